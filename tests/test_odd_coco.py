"""Each real-world odd COCO file packs, or is refused with a sentence that says what to do (see docs/odd_coco.md)."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from rfstream.dataset.coco import SplitFiles, find_splits, read_split
from rfstream.errors import DatasetError

ABSENT = r"\d+ of \d+ images are not in .*, the first is '.+'; copy them there, or take them out of the file"
NO_BOXES = r"no annotation of \d+ has a bbox .* so it is no detection dataset; convert it first"
RESULTS = r"a list of detection results, not a COCO dataset; give the file that has"


@dataclass(frozen=True)
class Case:
    """An annotation file and the image folder it belongs to, inside the case's folder.

    With all its images there it packs (images, objects, categories), or is refused with a sentence. ``as_it_lies`` is
    the sentence for the case as shipped, where that is another.
    """

    file: str
    images: str
    packs: tuple[int, int, int] | None = None
    refused: str | None = None
    as_it_lies: str | None = None

    @property
    def name(self) -> str:
        return self.file.split("/")[0]


CASES = [
    Case("datumaro_coco_image_info/annotations/image_info_train.json", "images/train", packs=(1, 0, 0)),
    Case("datumaro_coco_image_info/annotations/image_info_val.json", "images/val", packs=(1, 0, 0)),
    Case("datumaro_coco_captions/annotations/captions_train.json", "images/train", refused=NO_BOXES),
    Case("datumaro_coco_captions/annotations/captions_val.json", "images/val", refused=NO_BOXES),
    Case("datumaro_coco_stuff/annotations/stuff_train.json", "images/train", packs=(1, 1, 2)),
    Case("datumaro_coco_stuff/annotations/stuff_val.json", "images/val", packs=(1, 1, 2)),
    Case("datumaro_coco_roboflow/train/_annotations.coco.json", "train", packs=(1, 1, 3)),
    Case("datumaro_coco_roboflow/val/_annotations.coco.json", "val", packs=(1, 2, 3)),
    Case("datumaro_mmdet_coco/annotations/instances_train.json", "train", packs=(1, 1, 3)),
    Case("datumaro_mmdet_coco/annotations/instances_val.json", "val", packs=(1, 2, 3)),
    Case("datumaro_roboflow/train/_annotations.coco.json", "train", packs=(2, 2, 2)),
    Case("datumaro_roboflow/val/_annotations.coco.json", "val", packs=(1, 2, 2)),
    Case(
        "mmdet_obj365_unsorted/unsorted_obj365_sample.json",
        ".",
        refused="annotation 6: category_id is 3, the id of no category; correct it, or add the category",
    ),
    Case(
        "mmdet_wrong_format/coco_wrong_format_sample.json",
        ".",
        refused="two annotations have the id 1; give each its own id",
    ),
    Case(
        "taco_unofficial/annotations_unofficial.json",
        ".",
        refused=r"annotation 107 \(and 14 more like it\): bbox is \[inf, inf, -inf, -inf\], not \[x, y, width",
    ),
    Case("cocoapi_results_bbox/instances_val2014_fakebbox100_results.json", ".", refused=RESULTS),
    Case("cocoapi_results_keypoints/person_keypoints_val2014_fakekeypoints100_results.json", ".", refused=RESULTS),
    Case("sahi_terrain/terrain_all_coco.json", ".", packs=(3, 22, 2), as_it_lies="1 of 3 .*terrain3.png"),
    Case("sahi_coco_evaluate/dataset.json", ".", packs=(2, 249, 80), as_it_lies=ABSENT),
    Case("sahi_coco_evaluate/result.json", ".", refused=RESULTS),
    Case("panoptic_detection_format/panoptic_coco_detection_format.json", ".", packs=(2, 50, 133), as_it_lies=ABSENT),
    Case("panoptic_segments_info/panoptic_examples.json", ".", refused=NO_BOXES),
    Case("panoptic_images_only/images_info_examples.json", ".", packs=(2, 0, 133), as_it_lies=ABSENT),
    Case("icevision_coco6/annotations.json", "images", packs=(6, 36, 80), as_it_lies="4 of 6 images are not in"),
    Case("label_studio_export/result.json", ".", packs=(11, 11, 8)),
    Case("cvat_export/annotations/instances_default.json", "images", packs=(6, 29, 23), as_it_lies=ABSENT),
    Case("roboflow_dogs/train/_annotations.coco.json", "train", packs=(213, 258, 2), as_it_lies=ABSENT),
    Case("roboflow_facade_raw/_annotations.coco.json", ".", packs=(83, 2842, 11), as_it_lies=ABSENT),
    Case("coco_keypoints_val/person_keypoints_val2017.json", ".", packs=(79, 118, 1), as_it_lies=ABSENT),
    Case("sam2_sav_manual/sav_000001_manual.json", ".", refused="has no 'images' list .* so it is no COCO dataset"),
]
NO_COCO = ["bccd_voc_zero_boxes"]


@pytest.fixture(scope="module")
def odd(shared_data: Path) -> Path:
    return shared_data / "odd_coco"


def test_every_case_is_covered(odd: Path) -> None:
    cases = json.loads((odd / "manifest.json").read_text())["cases"]
    listed = {f"{case['name']}/{file}" for case in cases for file in case["json"]}
    assert listed == {case.file for case in CASES}
    assert {case["name"] for case in cases} == {case.name for case in CASES} | set(NO_COCO)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)
def test_as_it_lies(odd: Path, case: Case) -> None:
    check(odd / case.file, odd / case.name / case.images, case, refused=case.as_it_lies or case.refused)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.file)
def test_with_all_its_images(odd: Path, case: Case, shared_data: Path, tmp_path: Path) -> None:
    document = json.loads((odd / case.file).read_text())
    names = [image["file_name"] for image in document.get("images", [])] if isinstance(document, dict) else []
    photo = next((shared_data / "bccd" / "train").glob("*.jpg"))
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(photo, tmp_path / name)
    check(odd / case.file, tmp_path, case, refused=case.refused)


def check(file: Path, images: Path, case: Case, refused: str | None) -> None:
    files = SplitFiles("train", file, images)
    if refused is not None:
        with pytest.raises(DatasetError, match=refused) as caught:
            read_split(files, "remap")
        assert str(caught.value).startswith(str(file))
        assert "\n" not in str(caught.value)
        return
    source = read_split(files, "remap")
    assert (len(source.items), sum(item.objects for item in source.items), len(source.categories)) == case.packs
    annotations = json.loads(file.read_text()).get("annotations", [])
    packed = [a for item in source.items for a in json.loads(item.sidecar)["annotations"]]
    assert sorted(packed, key=repr) == sorted(annotations, key=repr)


@pytest.mark.parametrize("name", NO_COCO)
def test_a_folder_without_coco_is_refused(odd: Path, name: str) -> None:
    with pytest.raises(DatasetError, match=r"has neither SPLIT/.* nor annotations/.* \(JSON files here: none\)"):
        find_splits(odd / name)


def test_a_folder_of_unknown_layout_is_refused_with_what_is_there(odd: Path) -> None:
    expected = re.escape("(JSON files here: annotations/captions_train.json, annotations/captions_val.json)")
    with pytest.raises(DatasetError, match=expected):
        find_splits(odd / "datumaro_coco_captions")


@pytest.mark.parametrize("name", ["datumaro_coco_roboflow", "datumaro_mmdet_coco", "datumaro_roboflow"])
def test_known_layouts_are_found(odd: Path, name: str) -> None:
    assert set(find_splits(odd / name)) == {"train", "val"}
