"""WebDataset tars that others wrote, indexed where they lie and read as they are."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from gcs import BUCKET
from hypothesis import given, settings
from hypothesis import strategies as st
from packing import files_in, pack_here
from test_dataset_tar import CountingFileSystem
from typer.testing import CliRunner

from benchmarks.bad_storage import BadStorage
from rfstream.cli import app
from rfstream.config import Config
from rfstream.dataset import storage
from rfstream.dataset.foreign import index_foreign
from rfstream.dataset.foreign_json import columns_of, describe
from rfstream.dataset.index import SplitIndex, read_index
from rfstream.dataset.pack import index_pack
from rfstream.dataset.reader import EncodedSample
from rfstream.dataset.tar import TarReader
from rfstream.errors import DatasetError, SampleError
from rfstream.stream.pipeline import build_pipeline
from rfstream.tools.check import check
from rfstream.tools.ledger import first_difference, make_ledger

COUNT, PER_SHARD = 55, 20
BRACES = "train-{000000..000002}.tar"


@pytest.fixture(scope="module")
def ours(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> SplitIndex:
    """Our own pack of coco_cc's training split, crowds and ids with gaps among it."""
    return pack_here(shared_data / "coco_cc", tmp_path_factory.mktemp("ours"), PER_SHARD)


@pytest.fixture(scope="module")
def originals(ours: SplitIndex) -> list[EncodedSample]:
    return TarReader(ours.path, "train", ours.digest).read(np.arange(COUNT))


@pytest.fixture(scope="module")
def written(originals: list[EncodedSample], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same samples as ``webdataset``'s own writer makes shards of them."""
    folder = tmp_path_factory.mktemp("written")
    with webdataset.ShardWriter(f"{folder}/train-%06d.tar", maxcount=PER_SHARD, verbose=0) as writer:
        for sample in originals:
            writer.write({"__key__": sample.key, "jpg": sample.image, "json": json.loads(sample.sidecar)})
    return folder


@pytest.fixture(scope="module")
def names(ours: SplitIndex) -> str:
    """A file with the names of the categories: any with COCO's list of them, such as an index."""
    return f"{ours.path}/train-index.json"


def read(index: SplitIndex, rows: Sequence[int] | None = None) -> list[EncodedSample]:
    reader = TarReader(index.path, index.split, index.digest, index.shards_at)
    return reader.read(np.arange(index.num_samples) if rows is None else np.array(rows, dtype=np.int64))


def content(samples: list[EncodedSample]) -> list[tuple[Any, ...]]:
    return [(sample.row, sample.key, sample.image, json.loads(sample.sidecar)) for sample in samples]


def test_what_shardwriter_wrote_is_read_as_it_is(
    ours: SplitIndex, originals: list[EncodedSample], written: Path, names: str, tmp_path: Path
) -> None:
    before = files_in(written)
    command = ["index", f"{written}/{BRACES}", "train", "--output", str(tmp_path), "--names", names]
    done = CliRunner().invoke(app, command)
    assert done.output == f"55 samples in 3 files: data.path={tmp_path} data.shards={written}\n"
    assert files_in(written) == before
    index = read_index(str(tmp_path), "train", str(written))
    assert content(read(index)) == content(originals)
    assert (index.label_of(), index.class_names()) == (ours.label_of(), ours.class_names())
    assert index.samples_per_shard == ours.samples_per_shard
    assert index.fragments().starts.tolist() == ours.fragments().starts.tolist()
    crowds = [json.loads(crowds) for crowds in index.crowds()["crowds"].to_pylist()]
    assert crowds == [json.loads(crowds) for crowds in ours.crowds()["crowds"].to_pylist()] != []


@pytest.mark.parametrize("path", ["AT", "AT/train-*.tar", "AT/train-00000[012].tar", f"file://AT/{BRACES}"])
def test_a_folder_and_patterns_mean_the_same_files(written: Path, names: str, tmp_path: Path, path: str) -> None:
    index = index_foreign(path.replace("AT", str(written)), "train", str(tmp_path), {}, names)
    assert index.shards == tuple(f"train-{number:06d}.tar" for number in range(3))


@pytest.mark.usefixtures("ray_session")
def test_an_epoch_from_a_bucket_equals_that_of_our_own_pack(
    bucket: BadStorage, ours: SplitIndex, written: Path, names: str, tmp_path: Path
) -> None:
    url = f"gs://{BUCKET}/foreign"
    for name, data in files_in(written).items():
        with storage.replacing(f"{url}/{name}") as file:
            file.write(data)
    index = index_foreign(f"{url}/{BRACES}", "train", str(tmp_path), {}, names)
    assert sorted(storage.sizes_in(url)) == sorted(index.shards)
    ledgers = [
        make_ledger(
            Config(
                data=data,
                stream={"batch_size": 5, "timeout_s": 300},
                decode={"actors": (1, 1)},
                augment={"cpu": {"transform": "tests.augmentations:resize", "args": {"size": 96}}},
            ),
            epochs=1,
            world_size=1,
        )
        for data in ({"path": ours.path}, {"path": str(tmp_path), "shards": url})
    ]
    assert first_difference(*ledgers) is None
    assert sorted(ledgers[1]["key"].to_pylist()) == [f"{row:08d}" for row in range(COUNT)]


def test_no_image_is_read_to_index(written: Path, originals: list[EncodedSample], names: str, tmp_path: Path) -> None:
    for name, data in files_in(written).items():
        CountingFileSystem().pipe(f"/shards/{name}", data)
    CountingFileSystem.requests.clear()
    index = index_foreign("counting://shards", "train", str(tmp_path), {}, names)
    asked = [(f"/{path.strip('/')}", *span) for path, *span in CountingFileSystem.requests]
    large = [sample for sample in originals if len(sample.image) > 3 * storage.MAX_GAP]
    found = {sample.key: sample for sample in read(index)}
    for sample in large:
        at = found[sample.key].offset + 2 * storage.MAX_GAP
        assert not any(path == f"/shards/{found[sample.key].shard}" and lo <= at < hi for path, lo, hi in asked)
    assert len(large) > 5
    local = build_pipeline(Config(data={"path": str(tmp_path), "shards": str(written)}), "train", 1, training=True)
    assert local.fused  # images are read one by one, unlike those of Parquet that others wrote


def test_a_pack_of_rfdetr_is_read_as_it_is(shared_data: Path, ours: SplitIndex, names: str, tmp_path: Path) -> None:
    stock = pytest.importorskip("rfdetr.datasets.webdataset.pack")
    source, theirs = shared_data / "coco_cc" / "train", tmp_path / "theirs"
    stock.pack_coco_to_shards(source, source / "_annotations.coco.json", theirs, split="train", max_shard_bytes=2**21)
    before = files_in(theirs)
    named = f"{theirs}/train-index.json"
    index = index_foreign(f"{theirs}/train-*.tar", "train", str(tmp_path / "index"), {}, named)
    assert files_in(theirs) == before
    assert len(index.shards) > 3 and index.class_names() == ours.class_names()
    assert content(read(index)) == content(read(ours))


def test_webdataset_opens_our_packs(ours: SplitIndex, originals: list[EncodedSample]) -> None:
    urls = [ours.shard_url(number) for number in range(len(ours.shards))]
    samples = list(webdataset.WebDataset(urls, shardshuffle=False))
    assert [(s["__key__"], s["jpg"], s["json"]) for s in samples] == [(s.key, s.image, s.sidecar) for s in originals]


# ---- tars written member by member ----


def annotation(category: int | str = 1, **fields: Any) -> dict[str, Any]:
    return {"bbox": [1, 2, 3, 4], "category_id": category} | fields


def coco(*annotations: dict[str, Any], **fields: Any) -> bytes:
    return json.dumps({"annotations": list(annotations)} | fields).encode()


def lists(*categories: int | str, **fields: Any) -> bytes:
    objects = {"bbox": [[i, 2, 3, 4] for i in range(len(categories))], "category": list(categories)}
    return json.dumps({"objects": objects | fields}).encode()


Members = Sequence[tuple[str, bytes] | tarfile.TarInfo]


def write(path: Path, members: Members, format: int = tarfile.USTAR_FORMAT) -> Path:
    with tarfile.open(path, "w", format=format) as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
    return path


def sample(key: str, json_: bytes | None = None, image: bytes = b"image") -> list[tuple[str, bytes]]:
    return [(f"{key}.jpg", image), (f"{key}.json", coco(annotation()) if json_ is None else json_)]


def indexed(path: Path, columns: dict[str, str] | None = None, names: str | None = None) -> SplitIndex:
    return index_foreign(str(path), "train", str(path.parent / "index"), columns or {}, names)


NAME = st.text(st.characters(codec="utf-8", exclude_characters="./:\x00\\", exclude_categories=("C",)), min_size=1)
KEY = st.builds(
    lambda folders, base: "/".join([*folders, base]),
    st.lists(NAME.map(lambda name: f"{name}.d"), max_size=2),
    st.one_of(NAME, st.integers(90, 300).map(lambda n: "k" * n)),
).filter(lambda key: not key.startswith("__") and key[1:2] != ":")


@settings(deadline=None, max_examples=60)
@given(
    keys=st.lists(KEY, min_size=1, max_size=6, unique=True),
    format=st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    data=st.data(),
)
def test_any_names_in_any_order_and_format(
    keys: list[str], format: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    if format == tarfile.USTAR_FORMAT:
        keys = list(
            dict.fromkeys(f"{number}{key[:40]}".encode("ascii", "replace").decode() for number, key in enumerate(keys))
        )
    members = data.draw(
        st.permutations([m for i, key in enumerate(keys) for m in sample(key, coco(annotation(i)), b"i" * (i * 700))])
    )
    index = indexed(write(tmp_path_factory.mktemp("any") / "train.tar", members, format))
    found = {s.key: (s.image, json.loads(s.sidecar)["annotations"][0]["category_id"]) for s in read(index)}
    assert found == {key: (b"i" * (i * 700), i) for i, key in enumerate(keys)}
    rows = data.draw(st.lists(st.integers(0, len(keys) - 1), max_size=9))
    assert [s.row for s in read(index, rows)] == rows


def test_members_that_are_none_of_a_sample_are_passed_over(tmp_path: Path) -> None:
    folder = tarfile.TarInfo("a")
    folder.type = tarfile.DIRTYPE
    strange = ["._000.jpg", "a/._000.jpg", "__MACOSX/a/._000.jpg", ".cache/x.jpg", "__meta__", "LICENSE", ".DS_Store"]
    members = [folder, *((name, b"?") for name in strange), *sample("./a/000"), ("./a/000.txt", b"caption")]
    index = indexed(write(tmp_path / "train.tar", members))
    assert [s.key for s in read(index)] == ["./a/000"]


def test_what_follows_the_first_dot_tells_members_apart(tmp_path: Path) -> None:
    said = coco(annotation(), image_id=7, file_name="x.jpg", width=640, height=480)
    members = [(f"v1.0/000.{ext}", ext.encode()) for ext in ("left.JPG", "right.jpg", "seg.png")]
    path = write(tmp_path / "train.tar", [*members, ("v1.0/000.Boxes.json", said), ("v1.0/000.json", b"[]")])
    (found,) = read(indexed(path, {"image": "left.JPG", "json": "Boxes.json"}))
    assert (found.key, found.image, found.width, found.height) == ("v1.0/000", b"left.JPG", 640, 480)
    own = annotation(image_id=7, area=12)
    assert json.loads(found.sidecar) == {"image_id": 7, "file_name": "x.jpg", "annotations": [own]}


def test_an_annotation_without_an_area_has_that_of_its_box() -> None:
    boxes = [{"bbox": [1, 2, 3, 4], "category_id": 0}, {"bbox": [1, 2, 3, 4], "area": 5.5, "category_id": 0}]
    data = json.dumps({"annotations": boxes}).encode()
    assert [a["area"] for a in describe(data, columns_of(data, {})).annotations] == [12, 5.5]


def test_other_labels_of_the_same_size_are_another_index(tmp_path: Path) -> None:
    digests = []
    for one, two in (("ant", "cat"), ("cat", "ant"), ("ant", "cat")):
        path = write(tmp_path / "train.tar", [*sample("a", lists(one)), *sample("b", lists(two))])
        digests.append(indexed(path).digest)
    assert digests[0] == digests[2] != digests[1]


def test_lists_of_the_hugging_face_convention(tmp_path: Path) -> None:
    full = lists("cat", "dog", id=[5, None], area=[9, 8.5], iscrowd=[0, 1], segmentation=[[[1, 2, 3, 4, 5, 6]], None])
    path = write(tmp_path / "train.tar", [*sample("a", full), *sample("b", lists()), *sample("c", lists("ant"))])
    index = indexed(path)
    assert index.class_names() == ["ant", "cat", "dog"]  # names in alphabetical order
    one, two, three = (json.loads(s.sidecar) for s in read(index))
    box = {"area": 9.0, "bbox": [0.0, 2.0, 3.0, 4.0], "category_id": 1, "id": 5, "image_id": 0, "iscrowd": 0}
    crowd = {"area": 8.5, "bbox": [1.0, 2.0, 3.0, 4.0], "category_id": 2, "image_id": 0, "iscrowd": 1}
    assert one["annotations"] == [box | {"segmentation": [[1, 2, 3, 4, 5, 6]]}, crowd]
    assert two == {"image_id": 1, "file_name": "", "annotations": []}
    assert (three["image_id"], three["annotations"][0]["area"]) == (2, 12.0)
    assert [json.loads(crowds) for crowds in index.crowds()["crowds"].to_pylist()] == [[crowd]]


def test_fields_of_other_names(tmp_path: Path) -> None:
    said = {"meta": {"number": 9}, "instances": {"box": [[1, 2, 3, 4]], "label": [2]}, "w": 64, "objects": "two"}
    path = write(tmp_path / "train.tar", sample("a", json.dumps(said).encode()))
    names = tmp_path / "names.json"
    names.write_text(json.dumps({"2": "dog", "7": "cat"}))
    named = "objects.bbox=instances.box,objects.category=instances.label,image_id=meta.number,width=w"
    command = ["index", str(path), "train", "--output", str(tmp_path), "--names", str(names), "--columns", named]
    assert CliRunner().invoke(app, command).output == f"1 samples in 1 files: data.path={tmp_path}\n"
    index = read_index(str(tmp_path), "train")
    (found,) = read(index)
    document = json.loads(found.sidecar)
    assert (document["image_id"], document["annotations"][0]["category_id"], found.width) == (9, 2, 64)
    assert index.class_names() == ["dog", "cat"]


NAMED = [
    (["ant", "cat"], [0, 1], {0: 0, 1: 1}),
    ({"3": "ant", "1": "cat"}, [3], {1: 0, 3: 1}),
    ({"categories": [{"id": 9, "name": "ant"}, {"id": 4, "name": "cat"}]}, ["ant"], {4: 0, 9: 1}),
    (None, [2, 0], {0: 0, 1: 1, 2: 2}),
    (None, [], {}),
]


@pytest.mark.parametrize(("document", "used", "labels"), NAMED)
def test_ways_to_name_categories(tmp_path: Path, document: Any, used: list[Any], labels: dict[int, int]) -> None:
    path = write(tmp_path / "train.tar", sample("a", coco(*map(annotation, used))))
    names = tmp_path / "names.json"
    names.write_text(json.dumps(document))
    assert indexed(path, names=None if document is None else str(names)).label_of() == labels


def test_splits_of_other_categories_are_refused(tmp_path: Path) -> None:
    for split, categories in (("train", ["ant", "bee", "cat"]), ("val", ["ant", "cat"]), ("test", ["ant", "bee"])):
        write(tmp_path / f"{split}.tar", sample("a", coco(*map(annotation, categories))))
    for split in ("train", "test"):
        index_foreign(str(tmp_path), split, str(tmp_path / "index"), {})
    with pytest.raises(
        DatasetError, match=r"category 1 of split 'val' would be 'cat', and 'test' has 1, 'bee', in its"
    ):
        index_foreign(str(tmp_path), "val", str(tmp_path / "index"), {})
    names = tmp_path / "names.json"
    names.write_text('["ant", "bee", "cat"]')
    index = index_foreign(str(tmp_path), "val", str(tmp_path / "index"), {}, str(names))
    assert [a["category_id"] for a in json.loads(read(index)[0].sidecar)["annotations"]] == [0, 2]


# ---- refused ----


def linked(kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo("b.jpg")
    info.type, info.linkname = kind, "a.jpg"
    return info


REFUSED: list[tuple[Members, dict[str, str], str]] = [
    (
        [("a.jpg", b"i"), ("b.txt", b"t")],
        {},
        r"no sample has a member 'json'; say which holds annotations with --columns",
    ),
    (
        [*sample("a"), ("b.jpg", b"i"), ("b.txt", b"t")],
        {},
        "sample b has no member json, only jpg, txt; if it goes by another",
    ),
    (
        [*sample("a"), ("b.json", coco()), ("b.tif", b"i")],
        {},
        "sample b has no member jpg or jpeg or .*, only json, tif; if",
    ),
    (
        sample("a"),
        {"image": "left.jpg"},
        r"sample a has no member left.jpg, only jpg, json; .* --columns image=NAME, else",
    ),
    (
        [*sample("a"), ("a.png", b"mask")],
        {},
        r"sample a has the images jpg, png; say which to take with --columns image=",
    ),
    (
        [*sample("a"), *sample("b"), ("a.jpg", b"")],
        {},
        r"sample a has two members 'jpg', and a key stands for one sample; ",
    ),
    ([*sample("a"), linked(tarfile.SYMTYPE)], {}, r"member 'b.jpg' is a link, device or sparse file"),
    ([*sample("a"), linked(tarfile.LNKTYPE)], {}, r"member 'b.jpg' is a link, device or sparse file"),
    ([*sample("a"), ("../b.jpg", b"i")], {}, r"member '../b.jpg' is absolute or leaves its folder"),
    (
        sample("a"),
        {"width": "w"},
        r"'a.json' has no field 'w'; say where 'width' stands with --columns width=NAME \(it has",
    ),
    (sample("a", b"{"), {}, r"member 'a.json' is not valid JSON"),
    (sample("a", b"[" * 200_000), {}, r"member 'a.json' is not valid JSON"),
    (sample("a", b"[]"), {}, r"member 'a.json' is no JSON object"),
    (sample("a", b'{"boxes": []}'), {}, r"'a.json' has not one of a list .* say where they stand .* \(it has boxes\)"),
    (sample("a", coco(objects={"bbox": [], "category": []})), {}, r"member 'a.json' has both a list of annotations"),
    (
        [*sample("a", coco(image_id=1)), *sample("b", coco(image_id="2"))],
        {},
        "sample b: .*'image_id' is no integer, as it",
    ),
    (
        [*sample("a"), *sample("b", b'{"annotations": {}}')],
        {},
        "sample b: .*'json': field 'annotations' is no list of obj",
    ),
    (
        sample("a", coco(annotation(None))),
        {},
        r"field 'annotations\[0\].category_id' is absent, neither an integer nor",
    ),
    (sample("a", coco(annotation(True))), {}, r"field 'annotations\[0\].category_id' is True, neither an integer nor"),
    (
        sample("a", coco(annotation(1), annotation("cat"))),
        {},
        r"sample a calls a category 'cat', and .* calls one 1; write",
    ),
    (sample("a", coco(annotation(-1))), {}, r"sample a uses category -1; name the categories with --names"),
    (
        sample("a", lists(1, bbox=[[1, 2, 3]])),
        {},
        r"field 'objects.bbox' holds \[1, 2, 3\], which can't be 'objects.bbox'",
    ),
    (sample("a", lists(1, bbox=[None])), {}, r"field 'objects.bbox' holds absent, which can't be"),
    (sample("a", lists(1, bbox=[])), {}, r"column 'objects.category' has 1 entries, 'objects.bbox' 0"),
    (sample("a", lists(1.5)), {}, r"field 'objects.category' holds 1.5, which can't be"),
    (
        [*sample("a", lists(1)), *sample("b", b'{"objects": {}}')],
        {},
        r"sample b: .*field 'objects.bbox' is absent, not a l",
    ),
    (sample("a"), {"boxes": "b"}, "there is nothing 'boxes' to name in a tar, only image, json, annotations, image_id"),
    ([], {}, "no sample has a member 'json'"),
]


@pytest.mark.parametrize(("members", "columns", "sentence"), REFUSED, ids=range(len(REFUSED)))
def test_what_can_not_be_understood_is_refused(
    tmp_path: Path, members: Members, columns: dict[str, str], sentence: str
) -> None:
    path = write(tmp_path / "train.tar", members)
    with pytest.raises(DatasetError, match=sentence) as caught:
        indexed(path, columns)
    assert str(caught.value).startswith(("--columns", f"{path}: ")) and "\n" not in str(caught.value)
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize(
    ("document", "sentence"),
    [
        ('["ant"]', "sample a uses category 1, which --names does not have; add it there"),
        ('{"x": "ant"}', "has id 'x'; every category needs an integer id"),
        ('{"1": 5}', "category 1 has name 5; every category needs a name that is text"),
        ("7", "names.json: holds no names of categories; make it a list of names, an object of ids"),
        ("{", "names.json: not a readable JSON file"),
    ],
)
def test_names_that_do_not_fit_are_refused(tmp_path: Path, document: str, sentence: str) -> None:
    (tmp_path / "names.json").write_text(document)
    with pytest.raises(DatasetError, match=sentence):
        indexed(write(tmp_path / "train.tar", sample("a")), names=str(tmp_path / "names.json"))


def test_two_categories_of_one_name_are_refused_where_names_tell(tmp_path: Path) -> None:
    (tmp_path / "names.json").write_text('["cat", "cat"]')
    path = write(tmp_path / "train.tar", sample("a", coco(annotation("cat"))))
    with pytest.raises(DatasetError, match="sample a uses category 'cat', and --names has two of that name"):
        indexed(path, names=str(tmp_path / "names.json"))


def test_a_key_in_two_shards_is_refused(tmp_path: Path) -> None:
    for name, keys in (("train-0.tar", "ab"), ("train-1.tar", "cb")):
        write(tmp_path / name, [member for key in keys for member in sample(key)])
    with pytest.raises(DatasetError, match=r"train-1.tar: sample b is in .*/train-0.tar too, and a key stands for one"):
        index_foreign(str(tmp_path), "train", str(tmp_path), {})


def test_files_that_are_not_there_or_not_tars_are_refused(written: Path, tmp_path: Path) -> None:
    for path, sentence in {
        f"{written}/train-{{000000..000004}}.tar": "2 of 5 files are not there, the first is train-000003.tar",
        f"{written}/train-{{0..2.tar": "a brace is not closed",
        f"{written}/{{a,b}}/train-0.tar": "means files in several folders, such as .*/a and .*/b; index one",
        f"{written}/val-*.tar": r"no file val-\*.tar there \(train-000000.tar, train-",
        str(tmp_path): "no file train-.*.tar or train.tar or .* there",
    }.items():
        with pytest.raises(DatasetError, match=sentence):
            index_foreign(path, "train", str(tmp_path / "index"), {})
    for name in ("train-0.tar.gz", "train-0.parquet", "train-1.tar"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DatasetError, match=r"/train-0.tar.gz: is named neither .tar nor .parquet; unpack"):
        index_foreign(f"{tmp_path}/train-*", "train", str(tmp_path / "index"), {})
    with pytest.raises(DatasetError, match=r"means train-1.tar as well as train-0.parquet; name one kind"):
        index_foreign(str(tmp_path), "train", str(tmp_path / "index"), {})
    with pytest.raises(DatasetError, match=r"--names is for tars"):
        index_foreign(f"{tmp_path}/train-*.parquet", "train", str(tmp_path / "index"), {}, "names.json")


@pytest.mark.parametrize("keep", [0, 100, 512, 700, 1024, 1100, 2047, 2048])
def test_a_truncated_tar_is_refused(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "train.tar", sample("a"))
    os.truncate(path, keep)
    with pytest.raises(DatasetError, match=r"train.tar: (not a whole tar file \(|no sample has a member)"):
        indexed(path)


def test_joined_tars_and_damaged_headers_are_refused(tmp_path: Path) -> None:
    one, two = (write(tmp_path / f"{key}.tar", sample(key)).read_bytes() for key in "ab")
    path = tmp_path / "train.tar"
    path.write_bytes(one + two)
    with pytest.raises(
        DatasetError, match=r"not a whole tar file \(after byte 2048 comes what is no header, or another"
    ):
        indexed(path)
    both = bytearray(write(path, [*sample("a"), *sample("b")]).read_bytes())
    both[2048 + 100] ^= 1
    path.write_bytes(both)
    with pytest.raises(DatasetError, match=r"not a whole tar file \(after byte 2048 comes"):
        indexed(path)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_damage_is_one_sentence(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    format = data.draw(st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]))
    members = [*sample("a" * 120, coco(annotation(), image_id=1)), *sample("b", coco(image_id=2))]
    content = bytearray(write(folder / "train.tar", members, format).read_bytes())
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 255)), min_size=1, max_size=4)):
        content[at] = value
    (folder / "train.tar").write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        read(indexed(folder / "train.tar"))
    except DatasetError as error:
        assert "\n" not in str(error)


def test_a_shard_that_changed_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "train.tar", [*sample("a"), *sample("b", coco(annotation("c")))][:2])
    index = indexed(path)
    write(path, sample("a", coco(annotation(7))))
    with pytest.raises(
        SampleError, match=r"sample a: its JSON is not as it was when the shard was indexed \(category 7 is"
    ):
        read(index)
    os.truncate(path, 100)
    with pytest.raises(SampleError, match=r"sample a ends at byte \d+ but the shard before that"):
        read(index)


def test_other_commands_leave_them_alone(written: Path, names: str, tmp_path: Path) -> None:
    before = files_in(written)
    for name, data in before.items():
        (tmp_path / name).write_bytes(data)
    index_foreign(str(tmp_path), "train", str(tmp_path), {}, names)
    with pytest.raises(DatasetError, match=r"did not write; run `rfstream index FILES train --output .*` again"):
        index_pack(str(tmp_path), "train")
    with pytest.raises(DatasetError, match="has shards that rfstream did not write, which are not checked"):
        check(str(tmp_path), progress=False)
    assert files_in(tmp_path).items() > before.items()
