"""Several packs in one stream: which samples come how often, under which labels, and when that is refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from packing import pack_here
from rich.console import Console

import rfstream
from benchmarks.bad_storage import BadStorage
from rfstream.config import Config
from rfstream.dataset.index import SplitIndex, read_index
from rfstream.dataset.mixture import mixed_categories
from rfstream.dataset.roles import split_of
from rfstream.errors import ConfigError, DatasetError, StateError
from rfstream.loader import RankLoader
from rfstream.stream.decode import BatchDecoder
from rfstream.stream.pipeline import build_pipeline
from rfstream.stream.source import reader_of, reader_spec_of
from rfstream.stream.targets import parse_sidecar
from rfstream.tools.ledger import first_difference, ledger_rows, make_ledger
from rfstream.tools.report import plan_report
from rfstream.tools.scenes import make_scenes

NAMES = ["disc", "square", "triangle", "star"]
OTHERS = ["star", "circle", "square", "hexagon"]
"""What the second pack calls the classes with the ids 1 to 4: its discs are stars, by name."""
CROP = {"transform": "tests.pipelines:crop_flip_jitter", "args": {"size": 64}}


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tar pack of 20 scenes and a Parquet pack of 12 with other class names, and 6 and 4 to validate on."""
    folder = tmp_path_factory.mktemp("mixture")
    make_scenes(folder / "a", train=20, val=6, seed=1)
    make_scenes(folder / "b", train=12, val=4, seed=2)
    for document in (folder / "b" / "annotations").iterdir():
        content = json.loads(document.read_text())
        for category, name in zip(content["categories"], OTHERS, strict=True):
            category["name"] = name
        document.write_text(json.dumps(content))
    for split in ("train", "val"):
        pack_here(folder / "a", folder / "tar", 6, split)
        pack_here(folder / "b", folder / "parquet", 5, split, "parquet")
    return folder / "tar", folder / "parquet"


def mixture(packs: tuple[Path, Path], weights: tuple[float, float] = (1.5, 0.5), **second: Any) -> list[dict[str, Any]]:
    first = {"path": str(packs[0]), "weight": weights[0]}
    return [first, {"path": str(packs[1]), "weight": weights[1], "categories": {"circle": "disc"}, **second}]


def config(path: Any, **stream: Any) -> Config:
    return Config(
        data={"path": path},
        stream={"batch_size": 2, "grad_accum": 2, "timeout_s": 300, "block_bytes": "100kB", **stream},
        decode={"actors": (1, 2)},
        augment={"cpu": CROP},
    )


@pytest.fixture(scope="module")
def reference(packs: tuple[Path, Path], ray_session: None) -> pa.Table:
    """Two epochs on one rank, windows of 8: 30 samples of the first pack and 6 of the second, and 4 to fill up."""
    return make_ledger(config(mixture(packs), grad_accum=4), epochs=2, world_size=1)


def test_an_epoch_holds_what_the_weights_say(reference: pa.Table) -> None:
    rows = reference.to_pylist()
    assert [row["position"] for row in rows] == [*range(40), *range(40)]
    halves = []
    for epoch in (0, 1):
        keys = Counter(row["key"] for row in rows if row["epoch"] == epoch and row["position"] < 36)
        first = {key: times for key, times in keys.items() if key.startswith("0/")}
        assert len(first) == 20 and sorted(first.values()) == [1] * 10 + [2] * 10
        halves.append({key for key, times in first.items() if times == 2} | {key for key in keys if key[0] == "1"})
        assert len(halves[-1]) == 16 and len(keys) == 26
    assert not halves[0] & halves[1], "the other halves come in the next epoch"
    twice = [row["pixels"] for row in rows if row["key"] in halves[0] and row["epoch"] == 0 and row["key"][0] == "0"]
    assert len(set(twice)) == len(twice), "a sample that comes twice is augmented anew"


@pytest.mark.parametrize(("world_size", "grad_accum", "assembly"), [(2, 2, "fused"), (4, 1, "staged")])
def test_the_ledger_is_one_at_any_world_size(
    packs: tuple[Path, Path], reference: pa.Table, world_size: int, grad_accum: int, assembly: str
) -> None:
    cfg = config(mixture(packs), grad_accum=grad_accum, assembly=assembly)
    assert first_difference(reference, make_ledger(cfg, epochs=2, world_size=world_size)) is None


def loader_of(cfg: Config) -> RankLoader:
    loader = rfstream.ray_loader(cfg)
    assert isinstance(loader, RankLoader)
    return loader


def ledger_of(loader: RankLoader, batches: int | None = None) -> list[dict[str, Any]]:
    """The ledger's rows of the rest of an epoch, or of its next ``batches``."""
    rows: list[dict[str, Any]] = []
    for batch in loader:
        rows += ledger_rows(batch, 0, 1)
        if batches is not None and len(rows) == batches * len(batch):
            break
    return rows


def test_a_resume_goes_on_with_what_would_have_followed(packs: tuple[Path, Path], reference: pa.Table) -> None:
    cfg = config(mixture(packs), grad_accum=4)
    whole = reference.drop_columns(["step", "rank", "slot"]).to_pylist()
    with loader_of(cfg) as loader:
        loader.set_epoch(1)
        before = ledger_of(loader, 7)
        state = json.loads(json.dumps(loader.state_dict()))
    with loader_of(cfg) as resumed:
        resumed.load_state_dict(state)
        rows = [*before, *ledger_of(resumed)]
    expected = [row for row in whole if row["epoch"] == 1]
    assert [{name: row[name] for name in expected[0]} for row in rows] == expected


def test_a_state_of_another_mixture_is_refused_by_name(packs: tuple[Path, Path]) -> None:
    state = loader_of(config(mixture(packs))).state_at(0, 3)
    heavier = config(mixture(packs, (1.5, 2.0)))
    with pytest.raises(StateError, match=r"weights was '0=1.5, 1=0.5', is '0=1.5, 1=2.0'"):
        loader_of(heavier).load_state_dict(state)
    with pytest.raises(StateError, match=r"classes was '\w+', is '\w+'"):
        loader_of(config(mixture(packs, categories={}))).load_state_dict(state)
    digest = loader_of(config(str(packs[0]))).index.digest
    with pytest.raises(StateError, match=rf"pack was '0={digest}, 1=\w+', is '{digest}'; weights was"):
        loader_of(config(str(packs[0]))).load_state_dict(state)
    allowed = loader_of(config(mixture(packs, (1.5, 2.0)), allow_mismatch=["weights"]))
    allowed.load_state_dict(state)
    assert allowed.state_dict()["samples"] == 6


def named_objects(index: SplitIndex, rows: int) -> dict[str, list[str]]:
    """Key -> class names of its objects, as the pack itself states them."""
    names = {int(category["id"]): str(category["name"]) for category in index.categories}
    samples = reader_of(reader_spec_of(index)).read(np.arange(rows))
    return {sample.key: [names[a["category_id"]] for a in parse_sidecar(sample.sidecar)[2]] for sample in samples}


def test_evaluation_sees_each_sample_once_under_the_mixture_s_labels(
    packs: tuple[Path, Path], ray_session: None
) -> None:
    loader = rfstream.ray_loader(config(mixture(packs)), "val")
    names = loader.index.class_names()
    assert names == [*NAMES, "hexagon"]
    batches = list(loader)
    keys = [key for batch in batches for key in batch.keys]
    ids = [number for batch in batches for number in batch.image_ids.tolist()]
    assert ids == list(range(10))
    seen = {
        key: [names[label] for label in target["labels"].tolist()]
        for batch in batches
        for key, target in zip(batch.keys, batch.targets, strict=True)
    }
    expected: dict[str, list[str]] = {}
    for number, (path, count) in enumerate(zip(packs, (6, 4), strict=True)):
        own = named_objects(read_index(str(path), "val"), count)
        expected |= {f"{number}/{key}": ["disc" if n == "circle" else n for n in own[key]] for key in own}
    assert keys == list(expected)
    assert seen == expected
    without = mixture(packs)
    without[0]["splits"] = {"val": None}
    alone = rfstream.ray_loader(config(without), "val")
    assert [key for batch in alone for key in batch.keys] == keys[6:]
    assert alone.index.class_names() == names


def test_the_plan_says_what_each_pack_gives(packs: tuple[Path, Path]) -> None:
    out = StringIO()
    Console(width=200, file=out).print(plan_report(config(mixture(packs)), 2))
    text = out.getvalue()
    assert "20 samples x 1.5 = 30 an epoch, 83.3%" in text
    assert "12 samples x 0.5 = 6 an epoch, 16.7%" in text
    assert "disc, square, triangle, star, hexagon" in text
    assert "36 in 7 shards" in text


def test_a_sample_of_a_mixture_is_named_with_its_pack(packs: tuple[Path, Path], tmp_path: Path) -> None:
    pack_here(packs[0].parent / "a", tmp_path / "pack", 30)
    (shard,) = (tmp_path / "pack").glob("*.tar")
    content = bytearray(shard.read_bytes())
    at = content.index(b"\xff\xd8\xff")
    content[at : at + 3] = bytes(3)
    shard.write_bytes(bytes(content))
    pipeline = build_pipeline(config([{"path": str(tmp_path / "pack")}]), "train", 1, training=True)
    samples = reader_of(pipeline.reader).read(np.arange(20))
    with pytest.raises(DatasetError, match=rf"^shard {shard}, key 0/00000000 "):
        BatchDecoder.of(pipeline.decode).batch(samples, 0, 0, 0)


def space(*names: str, path: str = "a", **changes: Any) -> SplitIndex:
    categories = [{"id": number, "name": name, **changes} for number, name in enumerate(names, start=1)]
    about = ("train", ("train-0.tar",), 1, tuple(categories), tuple(range(1, len(names) + 1)))
    return SplitIndex(path, *about, "remap", (), "00000000", "0" * 16)


def test_categories_are_the_same_where_their_names_are() -> None:
    categories, ids = mixed_categories(
        [space("car", "person"), space("person", "van", "lorry", "car"), space("dog")],
        [{}, {"van": "car", "lorry": "truck"}, {}],
    )
    assert [(c["id"], c["name"]) for c in categories] == [(0, "car"), (1, "person"), (2, "truck"), (3, "dog")]
    assert ids == (((1, 0), (2, 1)), ((1, 1), (2, 0), (3, 2), (4, 0)), ((1, 3),))


@pytest.mark.parametrize(
    ("spaces", "renamed", "sentence"),
    [
        ([space("a"), space("b", "b", path="gs://b")], {}, "gs://b: two categories are named 'b'"),
        ([space("a"), space("b", path="gs://b")], {"c": "a"}, "gs://b: `categories` renames 'c', .* only 'b'"),
        ([space("Traffic light"), space("traffic  light")], {}, "'Traffic light' and 'traffic  light' differ in case"),
        ([space("a"), space("a", path="b", keypoints=["nose"])], {}, "b: category 'a' has other keypoints than 'a'"),
    ],
)
def test_what_is_ambiguous_is_refused(spaces: list[SplitIndex], renamed: Mapping[str, str], sentence: str) -> None:
    with pytest.raises(DatasetError, match=sentence):
        mixed_categories(spaces, [{}, renamed])


def test_a_raw_pack_and_an_absent_split_are_refused(packs: tuple[Path, Path], tmp_path: Path) -> None:
    document = json.loads((packs[1] / "train-index.json").read_text())
    (tmp_path / "train-index.json").write_text(json.dumps({**document, "category_ids": "raw"}))
    with pytest.raises(DatasetError, match=rf"{tmp_path}: was packed with category_ids=raw"):
        split_of(config(mixture((packs[0], tmp_path))), "train")
    with pytest.raises(
        DatasetError, match=r"parquet: no split 'test' is packed there; .* give this pack `splits: \{val: "
    ):
        split_of(config(mixture(packs, splits={"val": "test"})), "val")
    nobody = [{"path": str(packs[0]), "splits": {"val": None}}]
    with pytest.raises(DatasetError, match="no pack of the mixture has a part in 'val'"):
        split_of(config(nobody), "val")


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ([], r"data\.path: list should have at least 1 item"),
        ([{"path": "a", "weight": 0}], r"data\.path\.0\.weight: input should be greater than 0 \(got 0\)"),
        ([{"path": "a"}, {"path": "b", "weigth": 2}], r"unknown key data\.path\.1\.weigth \(known here: path, weight"),
    ],
)
def test_a_mixture_that_is_none_is_refused(path: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        config(path)


def test_shards_elsewhere_are_each_packs_own() -> None:
    with pytest.raises(ConfigError, match="in a mixture set them beside the pack's own path"):
        Config(data={"path": [{"path": "a"}], "shards": "b"})


def test_with_a_remote_pack_all_is_read_by_blocks(packs: tuple[Path, Path]) -> None:
    assert build_pipeline(config(mixture(packs)), "train", 1, training=True).fused
    local = reader_of(reader_spec_of(split_of(config(mixture(packs)), "train")))
    with BadStorage(packs[1]) as web:
        pipeline = build_pipeline(config(mixture((packs[0], web.url))), "train", 1, training=True)  # type: ignore[arg-type]
        assert not pipeline.fused
        rows = np.random.default_rng(0).permutation(32)
        near, far = local.read(rows), reader_of(pipeline.reader).read(rows)
    assert [(s.key, s.image, s.sidecar, s.row) for s in far] == [(s.key, s.image, s.sidecar, s.row) for s in near]
    assert {s.shard for s in far if s.pack == 1} <= {
        f"{web.url}/{name}" for name in read_index(str(packs[1]), "train").shards
    }
