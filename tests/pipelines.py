"""Albumentations pipelines that tests name by import path."""

from __future__ import annotations

import albumentations as A


def crop_flip_jitter(size: int = 256) -> A.Compose:
    return A.Compose([A.RandomCrop(size, size, pad_if_needed=True), A.HorizontalFlip(p=0.5), A.ColorJitter(p=1.0)])


def floats() -> A.Compose:
    return A.Compose([A.Normalize()])


def never() -> A.Compose:
    return A.Compose([A.HorizontalFlip(p=1.0)], p=0.0)


def large_crop() -> A.Compose:
    return A.Compose([A.RandomCrop(4000, 4000)])
