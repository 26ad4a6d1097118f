"""``rfstream check``: what is odd about a dataset, before it is packed or trained on."""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rfstream.dataset import coco, storage
from rfstream.dataset.document import PICTURES
from rfstream.dataset.index import check_inside
from rfstream.dataset.layouts import SplitFiles, find_splits, layouts_of, read_document
from rfstream.errors import DatasetError
from rfstream.tools.check_document import check_document, sections, stated_size
from rfstream.tools.check_episodes import check_episodes, is_lerobot
from rfstream.tools.check_images import Encoded, check_images, read_span
from rfstream.tools.check_pack import open_split
from rfstream.tools.check_traits import SEVERITIES, Finding, Severity, Trait, collect

_INDEX = "-index.json"
_SHARDS = ("*.tar", f"*-{'[0-9]' * 6}.parquet")
_PROBED = 20  # images looked for to tell which folder is theirs


@dataclass(frozen=True)
class Part:
    """A split, or an annotation file: its traits, the gravest first, and how many images it lists."""

    name: str
    images: int
    traits: list[Trait]


@dataclass(frozen=True)
class Report:
    """What was found at ``path``."""

    path: str
    parts: list[Part]

    def count(self, severity: Severity) -> int:
        """Traits of that severity, over all parts."""
        return sum(trait.severity == severity for part in self.parts for trait in part.traits)

    def passed(self, strict: bool = False) -> bool:
        """Whether there is no error; under ``strict``, no warning either."""
        return not self.count("error") and not (strict and self.count("warning"))

    def summary(self) -> str:
        """One line: how much was checked, and how much is odd."""
        counts = ", ".join(_plural(self.count(severity), f"{severity} trait") for severity in SEVERITIES)
        images = _plural(sum(part.images for part in self.parts), "image")
        return f"{self.path}: {images} in {_plural(len(self.parts), 'file')}: {counts}"


@dataclass
class _Subject:
    """A part on its way: what was found without decoding, and the images to decode."""

    name: str
    listed: int
    traits: list[Trait]
    findings: list[Finding]
    images: list[Encoded]


def check(path: str, *, images: bool = True, progress: bool = True) -> Report:
    """Look for every trait of :data:`rfstream.tools.check_traits.KINDS` in what lies at ``path``.

    Nothing is changed, nothing is sent anywhere, and no file, however damaged, ends the check.

    Args:
        path: local folder of a COCO, YOLO, VOC or LeRobot dataset or of a pack; or a COCO file; or the index of a split
            of a pack.
        images: decode every image too.
        progress: show a progress bar on standard error.

    Raises:
        DatasetError: if ``path`` names something remote or nothing at all.
    """
    local = storage.local_path(path)
    if local is None:
        raise DatasetError(f"{path}: only local or mounted folders can be checked; copy it first")
    if not local.exists():
        raise DatasetError(f"{path}: no such file or folder; give a dataset, a pack or a COCO file")
    if is_lerobot(local):
        parts = (_Subject(name, frames, [], odd, []) for name, frames, odd in check_episodes(local, frames=images))
        return Report(path, [_part(subject) for subject in parts])
    subjects = list(_subjects(local))
    if images:
        _decode(subjects, progress)
    return Report(path, [_part(subject) for subject in subjects])


def _subjects(path: Path) -> Iterator[_Subject]:
    """The parts of what lies at ``path``."""
    if path.is_file():
        if path.name.endswith(_INDEX):
            yield _packed(path.parent, path.name.removesuffix(_INDEX))
        else:
            yield from _together([_document(path, _folders(path))])
        return
    indexes = sorted(path.glob(f"*{_INDEX}"))
    if indexes:
        yield from _pack(path, [index.name.removesuffix(_INDEX) for index in indexes])
        return
    layouts = layouts_of(path)
    if not layouts:
        loose = [file for pattern in ("*.json", "annotations/*.json") for file in sorted(path.glob(pattern))]
        nothing = f"{path}: no layout that packing finds, and no JSON file"
        odd = [("unknown-layout", str(file)) for file in loose] or [("nothing-found", nothing)]
        yield _Subject(str(path), 0, [], odd, [])
        yield from _together([_document(file, _folders(file)) for file in loose])
    for layout in layouts:
        try:
            found = find_splits(path, layout)
        except DatasetError as error:
            yield _Subject(f"{path} ({layout})", 0, [], [("unreadable-labels", str(error))], [])
        else:
            yield from _together([_split(f"{path} ({layout} {split})", files) for split, files in found.items()])


def _folders(file: Path) -> list[Path]:
    """Where the images of ``file`` may be, in the layouts that are in use."""
    root = file.parent.parent if file.parent.name == "annotations" else file.parent
    split = file.stem.rpartition("_")[2]  # instances_val2017, captions_train
    return [file.parent, root / split, root / "images" / split, root / "images", root]


def _together(parts: Sequence[tuple[_Subject, list[Encoded]]]) -> Iterator[_Subject]:
    """Parts that may share image folders, given with the images of each that are there."""
    listed = {Path(image.place) for _, images in parts for image in images}
    seen: set[Path] = set()
    for subject, images in parts:
        own = {Path(image.place).parent for image in images} - seen
        seen |= own
        for folder in sorted(own):
            subject.findings += [("unreferenced-file", str(file)) for file in _pictures(folder) if file not in listed]
        yield subject


def _pictures(folder: Path) -> list[Path]:
    return sorted(
        file for file in folder.iterdir() if file.suffix.lower().removeprefix(".") in PICTURES and file.is_file()
    )


def _split(name: str, files: SplitFiles) -> tuple[_Subject, list[Encoded]]:
    """A split of a folder, as a part named ``name`` where it has no file of its own."""
    if isinstance(files, coco.SplitFiles):
        return _document(files.annotations, [files.images])
    try:
        read = read_document(files)
    except DatasetError as error:
        return _Subject(name, 0, [], [("unreadable-labels", str(error))], []), []
    document = {"images": read.images, "annotations": list(read.annotations), "categories": read.categories}
    return _described(name, document, [read.folder])


def _document(file: Path, folders: Sequence[Path]) -> tuple[_Subject, list[Encoded]]:
    """A COCO file, given with the folders that its images may be in."""
    try:
        document = storage.read_json(str(file))
    except DatasetError as error:
        return _Subject(str(file), 0, [], [("unreadable-json", str(error))], []), []
    return _described(str(file), document, folders)


def _described(name: str, document: object, folders: Sequence[Path]) -> tuple[_Subject, list[Encoded]]:
    """A part, and the images of its that are there, whatever they hold."""
    found = sections(document)
    entries = found[0] if found else []
    subject = _Subject(name, len(entries), check_document(name, document), [], [])
    images = [(image["file_name"], stated_size(image)) for image in entries if _is_inside(image.get("file_name"))]
    folder = _fullest(folders, [name for name, _ in images[:_PROBED]])
    there = []
    for file_name, stated in images:
        path = folder / file_name
        size = _size(path)
        if size is None:
            subject.findings.append(("missing-file", str(path)))
            continue
        there.append(Encoded(str(path), path.name, stated, partial(read_span, str(path))))
        if size:
            subject.images.append(there[-1])
        else:
            subject.findings.append(("empty-file", str(path)))
    return subject, there


def _fullest(folders: Sequence[Path], names: Sequence[str]) -> Path:
    """The folder that holds most of the files ``names``; of equals the first."""
    return max(folders, key=lambda folder: sum(_size(folder / name) is not None for name in names))


def _is_inside(name: Any) -> TypeGuard[str]:
    try:
        return isinstance(name, str) and bool(check_inside(name, "file_name"))
    except DatasetError:
        return False


def _size(path: Path) -> int | None:
    """Bytes of a regular file, or None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) else None


def _pack(folder: Path, splits: Sequence[str]) -> Iterator[_Subject]:
    listed: set[str] = set()
    for split in splits:
        subject = _packed(folder, split, listed)
        if split == splits[-1]:
            shards = [file.name for pattern in _SHARDS for file in folder.glob(pattern)]
            unlisted = sorted(name for name in shards if name not in listed)
            subject.findings += [("unlisted-shard", name) for name in unlisted]
        yield subject


def _packed(folder: Path, split: str, listed: set[str] | None = None) -> _Subject:
    """A packed split; the names of its shards go into ``listed``."""
    found = open_split(folder, split)
    if listed is not None:
        listed.update(found.shards)
    name = str(folder / f"{split}{_INDEX}")
    traits = check_document(name, found.document, found.places) if found.document is not None else []
    return _Subject(name, len(found.images), traits, found.findings, found.images)


def _decode(subjects: Sequence[_Subject], progress: bool) -> None:
    columns = (TextColumn("decoding"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not progress) as bar:
        task = bar.add_task("", total=sum(len(subject.images) for subject in subjects))
        for subject in subjects:
            subject.findings += check_images(subject.images, partial(bar.advance, task))


def _part(subject: _Subject) -> Part:
    traits = [*subject.traits, *collect(subject.name, subject.findings)]
    ordered = sorted(traits, key=lambda trait: SEVERITIES.index(trait.severity))
    return Part(subject.name, subject.listed, ordered)


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
