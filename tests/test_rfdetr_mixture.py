"""A mixture as RF-DETR asks for it: names, labels, crowds and annotations of several packs as one dataset's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rfdetr.datasets.coco import crowd_regions_from_coco
from rfdetr.datasets.webdataset.index import read_shard_index
from rfdetr_reference import configs, pack_in_process

from rfstream.config import Config
from rfstream.dataset.mixture import MixedSplit
from rfstream.dataset.roles import split_of
from rfstream.stream.decode import BatchDecoder
from rfstream.stream.source import reader_of, reader_spec_of
from rfstream.stream.targets import parse_sidecar
from rfstream.train.rfdetr import RFStreamDataModule
from rfstream.train.rfdetr.run import _index_folder

pytestmark = pytest.mark.filterwarnings("ignore:RF-DETR has changed", "ignore:.*pretrain_weights=None")


@pytest.fixture(scope="module")
def packs(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Blood cells as tar, and photos with crowds as Parquet."""
    folder = tmp_path_factory.mktemp("mixture")
    for name, format in (("bccd", "tar"), ("coco_cc", "parquet")):
        for role in ("train", "val"):
            pack_in_process(shared_data / name, folder / name, role, format=format)  # type: ignore[arg-type]
    return [folder / "bccd", folder / "coco_cc"]


def module(path: Any) -> RFStreamDataModule:
    ours = RFStreamDataModule(*configs(Path("unread")), Config(data={"path": path}))
    ours.setup("fit")
    return ours


@pytest.fixture(scope="module")
def alone(packs: list[Path]) -> list[RFStreamDataModule]:
    return [module(str(pack)) for pack in packs]


@pytest.fixture(scope="module")
def mixed(packs: list[Path]) -> RFStreamDataModule:
    """Both, with people called RBC, as one class of blood cells is."""
    first, second = ({"path": str(pack)} for pack in packs)
    return module([first, {**second, "weight": 2.0, "categories": {"person": "RBC"}}])


def labels_in(mixed: RFStreamDataModule, alone: RFStreamDataModule) -> list[int]:
    """The label in the mixture of each label of a pack alone."""
    return [(mixed.class_names or []).index("RBC" if n == "person" else n) for n in alone.class_names or []]


def rows_in(mixed: RFStreamDataModule, role: str) -> dict[tuple[int, int], int]:
    """The row of each image by pack and image id, which is its image id in the mixture."""
    split = split_of(mixed.stream, role)
    samples = reader_of(reader_spec_of(split)).read(np.arange(split.num_samples))
    return {(sample.pack, parse_sidecar(sample.sidecar)[0]): sample.row for sample in samples}


def test_names_of_the_first_pack_keep_their_labels(mixed: RFStreamDataModule, alone: list[RFStreamDataModule]) -> None:
    first, second = (one.class_names or [] for one in alone)
    assert mixed.class_names == [*first, *(name for name in second if name not in {*first, "person"})]
    for dataset in (mixed._dataset_train, mixed._dataset_val):
        assert dataset is not None
        assert dataset.coco.label2cat == {label: label for label in range(len(mixed.class_names or []))}
    with _index_folder(split_of(mixed.stream, "train")) as folder:
        assert read_shard_index(folder, "train").class_names() == mixed.class_names


def test_crowds_and_annotations_are_those_of_the_packs(
    mixed: RFStreamDataModule, alone: list[RFStreamDataModule]
) -> None:
    rows = rows_in(mixed, "val")
    expected: dict[int, list[tuple[int, Any]]] = {}
    boxes = []
    for pack, one in enumerate(alone):
        labels, coco = labels_in(mixed, one), one._dataset_val.coco  # type: ignore[union-attr]
        for image, regions in crowd_regions_from_coco(coco).items():
            expected[rows[pack, image]] = [(labels[region.label], region.box) for region in regions]
        own = {category: label for label, category in coco.label2cat.items()}
        boxes += [
            (rows[pack, a["image_id"]], labels[own[a["category_id"]]], a["bbox"]) for a in coco.dataset["annotations"]
        ]
    assert mixed._dataset_val is not None and expected
    found = crowd_regions_from_coco(mixed._dataset_val.coco)
    assert {image: [(region.label, region.box) for region in regions] for image, regions in found.items()} == expected
    document = mixed._dataset_val.coco.dataset
    assert [image["id"] for image in document["images"]] == list(range(len(rows)))
    assert [(a["image_id"], a["category_id"], a["bbox"]) for a in document["annotations"]] == boxes


def test_a_batch_has_the_labels_of_the_mixture(mixed: RFStreamDataModule, alone: list[RFStreamDataModule]) -> None:
    split = split_of(mixed.stream, "val")
    assert isinstance(split, MixedSplit)
    chosen = [0, split.first_rows[1] + 3, 1]
    samples = reader_of(reader_spec_of(split)).read(np.array(chosen))
    wire = BatchDecoder.of(mixed._spec(mixed.stream, "val")).batch(samples, 0, 0, 0)
    expected = []
    for row, sample in zip(chosen, samples, strict=True):
        one = alone[sample.pack]
        (own,) = reader_of(reader_spec_of(split_of(one.stream, "val"))).read(
            np.array([row - split.first_rows[sample.pack]])
        )
        its = BatchDecoder.of(one._spec(one.stream, "val")).batch([own], 0, 0, 0)
        expected += [labels_in(mixed, one)[label] for label in its.arrays["target:labels"].tolist()]
    assert wire.arrays["target:labels"].tolist() == expected
    assert wire.arrays["target:image_id"].tolist() == chosen
