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
                stream={"batch_size": 5, "timeout_s": 120},
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


NAME = st.text(st.characters(codec="utf-8", exclude_characters="./\x00\\", exclude_categories=("C",)), min_size=1)
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
