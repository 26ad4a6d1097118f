"""Samples that can't be decoded: what stops training, what takes their place, and what is told of them."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from packing import pack_here
from PIL import Image
from rfdetr_reference import configs

import rfstream
from rfstream.config import Config
from rfstream.dataset.index import IMAGE_EXTENSIONS, SplitIndex
from rfstream.dataset.reader import EncodedSample
from rfstream.dataset.tar import TarReader
from rfstream.errors import ConfigError, DatasetError, SampleError, StreamError
from rfstream.plan.substitute import ATTEMPTS, substitute_rows
from rfstream.stream.bad import BadSample
from rfstream.stream.decode import BatchDecoder, DecodeSpec, DetectionSpec
from rfstream.stream.image import check_header, decode_rgb
from rfstream.stream.quarantine import BadSampleRecord
from rfstream.stream.source import PackReaderSpec, PackSubstitutes
from rfstream.stream.wire import WireBatch, from_row, to_row
from rfstream.tools.ledger import first_difference, make_ledger
from rfstream.train.rfdetr.settings import Settings
from rfstream.train.rfdetr.spec import RFDETRSpec

PHOTOS, BAD = 53, 12
SMALL = {"transform": "tests.augmentations:resize", "args": {"size": 64}}
CROP = {"transform": "tests.pipelines:crop_flip_jitter", "args": {"size": 64}}


@pytest.fixture(scope="module")
def manifest(shared_data: Path) -> dict[str, Any]:
    """What Pillow makes of each odd image, by the name under which it is packed."""
    files = json.loads((shared_data / "odd_images" / "manifest.json").read_text())["files"]
    return {packed_name(entry["file"]): entry for entry in files}


def packed_name(name: str) -> str:
    """Packs take some extensions alone; what is in a file is for the decoder to find out."""
    return name if Path(name).suffix[1:] in IMAGE_EXTENSIONS else f"{name}.png"


@pytest.fixture(scope="module")
def source(shared_data: Path, manifest: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Roboflow folder of 53 photos and the 47 odd images, 12 of which are beyond decoding."""
    folder = tmp_path_factory.mktemp("bad") / "source"
    (folder / "train").mkdir(parents=True)
    bccd = shared_data / "bccd" / "train"
    document = json.loads((bccd / "_annotations.coco.json").read_text())
    images = document["images"][:PHOTOS]
    for image in images:
        shutil.copyfile(bccd / image["file_name"], folder / "train" / image["file_name"])
    numbers = {image["id"] for image in images}
    annotations = [a for a in document["annotations"] if a["image_id"] in numbers]
    category = annotations[0]["category_id"]
    for number, (name, entry) in enumerate(manifest.items(), start=10**6):
        shutil.copyfile(shared_data / "odd_images" / entry["file"], folder / "train" / name)
        width, height = entry["pillow"].get("size", (8, 8))
        images.append({"id": number, "file_name": name, "width": width, "height": height})
        box = {"bbox": [0, 0, 1, 1], "area": 1, "iscrowd": 0}
        annotations.append({"id": number, "image_id": number, "category_id": category, **box})
    assert len(images) == 100
    document |= {"images": images, "annotations": annotations}
    (folder / "train" / "_annotations.coco.json").write_text(json.dumps(document))
    return folder


@pytest.fixture(scope="module")
def pack(source: Path) -> SplitIndex:
    """Its pack, in four shards."""
    return pack_here(source, source.parent / "pack", per_shard=25)


@pytest.fixture(scope="module")
def samples(pack: SplitIndex) -> list[EncodedSample]:
    return TarReader(pack.path, "train", pack.digest).read(np.arange(pack.num_samples))


@pytest.fixture(scope="module")
def bad_keys(samples: list[EncodedSample], manifest: dict[str, Any]) -> dict[str, str]:
    """Key -> file name of what Pillow can't decode."""
    names = {sample.key: json.loads(sample.sidecar)["file_name"] for sample in samples}
    broken = {name for name, entry in manifest.items() if entry["pillow"]["outcome"] != "ok"}
    assert len(broken) == BAD
    return {key: name for key, name in names.items() if name in broken}


def detection(pack: SplitIndex, **changes: Any) -> DetectionSpec:
    values = {"seed": 0, "labels": tuple(pack.label_of().items()), "transform": "", "transform_key": "augment.cpu"}
    return DetectionSpec(**{**values, "masks": False, "pad_multiple": 1, **changes})


def rfdetr(pack: SplitIndex, **changes: Any) -> RFDETRSpec:
    settings = Settings.of(*configs(Path(pack.path), **changes)).to_json()
    return RFDETRSpec(settings, "train", 0, tuple(pack.label_of().items()))


@pytest.fixture(scope="module", params=["detection", "rfdetr"])
def spec(request: pytest.FixtureRequest, pack: SplitIndex) -> DecodeSpec:
    return detection(pack) if request.param == "detection" else rfdetr(pack)


def substitutes(pack: SplitIndex, seed: int = 0) -> PackSubstitutes:
    return PackSubstitutes(PackReaderSpec(pack.path, "train", pack.digest), pack.num_samples, seed)


def stream(pack: SplitIndex, cpu: dict[str, Any] = CROP, actors: int = 1, **stream: Any) -> Config:
    return Config(
        data={"path": pack.path, "splits": {"train": "train", "val": "train"}},
        stream={"batch_size": 5, "timeout_s": 300, **stream},
        decode={"actors": (actors, actors)},
        augment={"cpu": cpu, "eval": SMALL},
    )


# What is bad, and how it is said


def test_each_undecodable_image_gives_its_sentence(
    spec: DecodeSpec, samples: list[EncodedSample], bad_keys: dict[str, str]
) -> None:
    decoder = BatchDecoder.of(spec)
    refused = {}
    for sample in samples:
        try:
            assert decoder.batch([sample], 0, 0, 0).keys == [sample.key]
        except SampleError as error:
            refused[sample.key] = str(error)
            start = f"shard {sample.shard}, key {sample.key} (file {bad_keys[sample.key]}): "
            assert str(error).startswith(start)
            assert f"(its image is at byte {sample.offset} of the shard); repair or remove" in str(error)
            assert "0x" not in str(error)
    assert set(refused) == set(bad_keys)


def with_annotation(sample: EncodedSample, **fields: Any) -> EncodedSample:
    sidecar = json.loads(sample.sidecar)
    sidecar["annotations"][0] |= fields
    return replace(sample, sidecar=json.dumps(sidecar).encode())


KINDS: dict[str, tuple[str, Any]] = {
    "empty": ("the image file is empty", lambda s: replace(s, image=b"")),
    "truncated": ("truncated|premature", lambda s: replace(s, image=s.image[: len(s.image) // 2])),
    "no image": ("of no known format", lambda s: replace(s, image=b"MZ" + bytes(500))),
    "bomb": (r"30000 x 30000 pixels, more than decode.max_pixels=178956970", lambda s: replace(s, image=bomb())),
    "broken JSON": ("the annotations are not valid JSON", lambda s: replace(s, sidecar=s.sidecar[:-9])),
    "box of no numbers": ("bbox|dimensions", lambda s: with_annotation(s, bbox=["a", 0, 1, 1])),
    "box of three": ("bbox|length|shape", lambda s: with_annotation(s, bbox=[0, 1, 1])),
    "unknown category": ("category_id", lambda s: with_annotation(s, category_id=77)),
}


def bomb() -> bytes:
    """A PNG of 30000 x 30000 pixels and a few bytes."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 30000, 30000, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_raised_and_replaced(
    spec: DecodeSpec, pack: SplitIndex, samples: list[EncodedSample], kind: str
) -> None:
    reason, damage = KINDS[kind]
    damaged = damage(samples[3])
    with pytest.raises(SampleError, match=reason):
        BatchDecoder.of(spec).batch([damaged], 0, 0, 3)
    wire = BatchDecoder.of(spec, substitutes(pack)).batch([samples[2], damaged], 0, 0, 2)
    assert wire.keys[0] == samples[2].key and wire.keys[1] != damaged.key
    assert {position for position, _ in wire.bad} == {3}
    assert wire.bad[0][1].key == damaged.key


def test_annotations_for_another_size_are_bad_but_not_for_rfdetr(
    pack: SplitIndex, samples: list[EncodedSample]
) -> None:
    """RF-DETR trains on them with the file's own size, and so does what stands in for its loader."""
    turned = replace(samples[3], width=480, height=640)
    with pytest.raises(SampleError, match=r"the file has 640 x 480 pixels, and its annotations are for 480 x 640"):
        BatchDecoder.of(detection(pack)).batch([turned], 0, 0, 0)
    assert BatchDecoder.of(detection(pack), substitutes(pack)).batch([turned], 0, 0, 0).keys != [turned.key]
    assert BatchDecoder.of(rfdetr(pack), substitutes(pack)).batch([turned], 0, 0, 0).keys == [turned.key]
    unstated = replace(samples[3], width=None, height=None)
    assert BatchDecoder.of(detection(pack)).batch([unstated], 0, 0, 0).keys == [unstated.key]


@pytest.mark.parametrize(
    "segmentation",
    [{"size": [480, 640], "counts": "o"}, {"size": [10**5, 10**5], "counts": "04"}, [[0, 0, 1, 1, 1e30, 2]]],
    ids=["cut run lengths", "another size", "absurd coordinate"],
)
@pytest.mark.parametrize("decoder", ["detection", "rfdetr"])
def test_a_malformed_mask_is_replaced_before_native_code_sees_it(
    pack: SplitIndex, samples: list[EncodedSample], decoder: str, segmentation: Any
) -> None:
    masks = detection(pack, masks=True) if decoder == "detection" else rfdetr(pack, kind="segmentation", resolution=144)
    damaged = with_annotation(samples[3], segmentation=segmentation)
    wire = BatchDecoder.of(masks, substitutes(pack)).batch([damaged], 0, 0, 3)
    assert "has a segmentation that is neither polygons nor RLE of the image" in wire.bad[0][1].reason


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_the_limit_of_pixels_is_the_configurations(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    import io

    buffer = io.BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, kind)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2 * 10**9)  # as RF-DETR leaves it
    for look in (decode_rgb, check_header):
        look(buffer.getvalue(), 64 * 64)
        with pytest.raises(Image.DecompressionBombError, match=r"64 x 64 pixels, more than decode.max_pixels=4095"):
            look(buffer.getvalue(), 64 * 64 - 1)


def test_a_transform_that_fails_is_no_bad_sample(pack: SplitIndex, samples: list[EncodedSample]) -> None:
    failing = detection(pack, transform='{"transform": "tests.pipelines:large_crop"}')
    with pytest.raises(ConfigError, match=r"augment.cpu fails on shard"):
        BatchDecoder.of(failing, substitutes(pack)).batch(samples[:1], 0, 0, 0)


# What takes its place


@given(
    rows=st.integers(1, 2**40),
    bad=st.integers(0, 2**40),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 10**6),
    position=st.integers(0, 2**40),
)
def test_the_draw_is_pure_and_never_the_bad_row(rows: int, bad: int, seed: int, epoch: int, position: int) -> None:
    bad %= rows
    drawn = list(substitute_rows(rows, bad, seed, epoch, position))
    assert drawn == list(substitute_rows(rows, bad, seed, epoch, position))
    assert len(drawn) == (ATTEMPTS if rows > 1 else 0)
    assert all(0 <= row < rows and row != bad for row in drawn)


def test_the_draw_reaches_every_other_row() -> None:
    drawn = [next(substitute_rows(10, 4, 0, 0, position)) for position in range(1000)]
    counts = np.bincount(drawn, minlength=10)
    assert counts[4] == 0 and counts[np.arange(10) != 4].min() > 60


def test_a_substitute_is_the_positions_own(
    spec: DecodeSpec, pack: SplitIndex, samples: list[EncodedSample], bad_keys: dict[str, str]
) -> None:
    """Key, pixels and targets are those of the first drawn row that decodes, under the position's augmentation."""
    strict, replacing = BatchDecoder.of(spec), BatchDecoder.of(spec, substitutes(pack))
    row_of = {sample.key: sample.row for sample in samples}
    chains = 0
    for position, key in enumerate(bad_keys, start=40):
        drawn = list(substitute_rows(pack.num_samples, row_of[key], 0, 7, position))
        first = next(row for row in drawn if samples[row].key not in bad_keys)
        replaced = replacing.batch([samples[row_of[key]]], 7, 0, position)
        expected = strict.batch([samples[first]], 7, 0, position)
        assert replaced.keys == expected.keys == [samples[first].key]
        for name, value in expected.arrays.items():
            assert np.array_equal(replaced.arrays[name], value), name
        tried = [key, *(samples[row].key for row in drawn[: drawn.index(first)])]
        assert [(at, bad.key) for at, bad in replaced.bad] == [(position, each) for each in tried]
        chains += len(tried) > 1
    assert chains  # a substitute that is bad itself was among them


def test_bad_samples_cross_the_wire(pack: SplitIndex, samples: list[EncodedSample], bad_keys: dict[str, str]) -> None:
    number = next(sample.row for sample in samples if sample.key in bad_keys)
    wire = BatchDecoder.of(detection(pack), substitutes(pack)).batch([samples[number]], 0, 0, 0)
    assert wire.bad and from_row(to_row([wire]))[0].bad == wire.bad


def test_where_nothing_decodes_the_sentence_says_so(pack: SplitIndex, samples: list[EncodedSample]) -> None:
    class Broken(PackSubstitutes):
        def of(self, bad: EncodedSample, epoch: int, position: int) -> Iterator[EncodedSample]:
            return (replace(other, image=b"") for other in super().of(bad, epoch, position))

    spec, damaged = PackReaderSpec(pack.path, "train", pack.digest), replace(samples[0], image=b"")
    for rows, others in ((pack.num_samples, ATTEMPTS), (1, 0)):
        with pytest.raises(SampleError, match=rf"the image file is empty .*\({others} others were tried\): repair"):
            BatchDecoder.of(detection(pack), Broken(spec, rows, 0)).batch([damaged], 0, 0, 0)


# The stream


@pytest.fixture(scope="module")
def reference(pack: SplitIndex, ray_session: None) -> pa.Table:
    """Two epochs under ``replace``: one actor, one rank."""
    return make_ledger(stream(pack, on_bad_sample="replace", global_batch=20, max_bad_rate=1), epochs=2, world_size=1)


def test_replaced_samples_leave_length_and_order_exact(
    pack: SplitIndex, reference: pa.Table, bad_keys: dict[str, str]
) -> None:
    for epoch in (0, 1):
        rows = [row for row in reference.to_pylist() if row["epoch"] == epoch]
        assert [row["position"] for row in rows] == list(range(100))
        keys = {row["key"] for row in rows}
        assert not keys & set(bad_keys)
        assert len(keys) == 100 - BAD  # every good sample is there all the same


@pytest.mark.parametrize(
    ("actors", "world_size", "options"),
    [(3, 2, {"assembly": "staged"}), (2, 4, {"on_bad_sample": "quarantine"})],
    ids=["three actors, staged, two ranks", "quarantine, four ranks"],
)
def test_same_pixels_where_samples_are_replaced(
    pack: SplitIndex, reference: pa.Table, tmp_path: Path, actors: int, world_size: int, options: dict[str, Any]
) -> None:
    if "on_bad_sample" in options:
        options = {**options, "quarantine": str(tmp_path / "reports")}
    values = {"on_bad_sample": "replace", "global_batch": 20, "max_bad_rate": 1, **options}
    table = make_ledger(stream(pack, CROP, actors, **values), epochs=2, world_size=world_size)
    assert first_difference(reference, table) is None
    assert len(list((tmp_path / "reports").glob("*"))) == (world_size if "quarantine" in values else 0)


def test_the_quarantine_report_says_what_was_bad(
    pack: SplitIndex, ray_session: None, bad_keys: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "new" / "reports"
    config = stream(pack, SMALL, 2, on_bad_sample="quarantine", quarantine=str(folder), max_bad_rate=1)
    with caplog.at_level(logging.WARNING, "rfstream"):
        make_ledger(config, epochs=2, world_size=1)
    (path,) = folder.iterdir()
    assert path.name == "train-bad-samples-00000.parquet"
    rows = pq.read_table(path).to_pylist()
    assert {row["key"]: row["file_name"] for row in rows} == bad_keys and len(rows) == BAD
    source = Path(pack.path).parent / "source" / "train"
    for row in rows:
        data = (source / row["file_name"]).read_bytes()
        assert (Path(pack.path) / row["shard"]).read_bytes()[row["offset"] :].startswith(data)
        assert row["reason"] and row["first_epoch"] == 0 and 0 <= row["first_position"] < 100
        assert row["times_seen"] >= 2  # once an epoch, and as a substitute perhaps
    said = [record.message for record in caplog.records if record.name == "rfstream"]
    assert len(said) == BAD
    assert all(any(f"(file {name})" in message for message in said) for name in bad_keys.values())


def test_too_many_bad_samples_stop_the_run(pack: SplitIndex, ray_session: None, tmp_path: Path) -> None:
    values = {"on_bad_sample": "quarantine", "quarantine": str(tmp_path), "max_bad_rate": 0.05}
    with pytest.raises(StreamError) as caught:
        make_ledger(stream(pack, SMALL, 2, **values), epochs=3, world_size=1)
    sentence = str(caught.value)
    assert f"rank 0: {BAD} of 100 samples could not be decoded and were replaced, 12.0%" in sentence
    assert "stream.max_bad_rate=0.05" in sentence and str(tmp_path) in sentence
    assert sentence.count("shard train-") == 3 and "(file " in sentence and " files)" in sentence
    assert len(pq.read_table(next(tmp_path.iterdir()))) == BAD


def test_one_rank_that_stops_ends_the_run(pack: SplitIndex, ray_session: None) -> None:
    """Unshuffled, the second rank's half of each epoch holds all of the bad samples."""
    values = {"on_bad_sample": "replace", "batch_size": 50, "shuffle": False, "max_bad_rate": 0.05}
    began = time.monotonic()
    with pytest.raises(StreamError, match=rf"rank 1: {2 * BAD} of 100 samples"):
        make_ledger(stream(pack, SMALL, 2, **values), epochs=8, world_size=2)
    assert time.monotonic() - began < 250  # stream.timeout_s is 300


def test_evaluation_and_the_default_stop_at_a_bad_sample(pack: SplitIndex, ray_session: None) -> None:
    replacing = stream(pack, SMALL, on_bad_sample="replace", max_bad_rate=1)
    with pytest.raises(StreamError, match=r"^[^\n]*shard train-.* \(file .*repair or remove the file and pack again$"):
        list(rfstream.ray_loader(replacing, "val"))
    with (
        rfstream.ray_loader(stream(pack, SMALL)) as loader,  # type: ignore[attr-defined]
        pytest.raises(StreamError, match=r"^[^\n]*shard train-.* \(file .*repair or remove the file and pack again$"),
    ):
        list(loader)


def test_a_stopped_run_may_go_on_under_another_policy(pack: SplitIndex) -> None:
    stopped = rfstream.ray_loader(stream(pack))
    replacing = rfstream.ray_loader(stream(pack, on_bad_sample="replace"))
    replacing.load_state_dict(stopped.state_at(1, 7))  # type: ignore[union-attr]
    assert replacing.state_dict() == stopped.state_at(1, 7)  # type: ignore[union-attr]


# The record of a rank


def wire_of(samples: int, *bad: tuple[int, str], epoch: int = 0) -> WireBatch:
    found = [(position, BadSample("a.tar", key, f"{key}.jpg", 512, "torn")) for position, key in bad]
    return WireBatch(epoch, 0, [str(i) for i in range(samples)], {}, found)


def record(folder: Path | None, rate: float = 1.0, digest: str = "d") -> BadSampleRecord:
    policy = {"on_bad_sample": "quarantine", "quarantine": str(folder)} if folder else {"on_bad_sample": "replace"}
    config = Config(data={"path": "pack"}, stream={**policy, "max_bad_rate": rate})
    return BadSampleRecord(config.stream, "train", digest, 3)


def test_nothing_is_judged_before_a_hundred_samples() -> None:
    bad = record(None, rate=0.02)
    for _ in range(9):
        bad.add(wire_of(11, (0, "a"), (1, "b"), (1, "c")))  # two positions, three files
    with pytest.raises(StreamError, match=r"rank 3: 20 of 110 samples .*18.2%.*; 3 different files .*torn \(3 files\)"):
        bad.add(wire_of(11, (0, "a"), (1, "b")))


def test_a_rate_at_its_limit_goes_on() -> None:
    bad = record(None, rate=0.01)
    bad.add(wire_of(100, (5, "a")))
    with pytest.raises(StreamError, match=r"stream.max_bad_rate=0.01"):
        bad.add(wire_of(99, (5, "a")))


def test_a_report_goes_on_in_the_next_run(tmp_path: Path) -> None:
    path = tmp_path / "train-bad-samples-00003.parquet"
    first = record(tmp_path)
    first.write()
    assert not path.exists()  # nothing of a former run is lost to a loader that never ran
    first.open()
    assert len(pq.read_table(path)) == 0
    first.add(wire_of(4, (2, "a"), (3, "b")))
    first.write()
    second = record(tmp_path)
    second.open()
    second.add(wire_of(4, (1, "b"), epoch=1))
    second.write()
    rows = {row["key"]: row for row in pq.read_table(path).to_pylist()}
    assert {k: (r["first_epoch"], r["first_position"], r["times_seen"]) for k, r in rows.items()} == {
        "a": (0, 2, 1),
        "b": (0, 3, 2),
    }
    other = record(tmp_path, digest="another pack")
    other.open()
    assert len(pq.read_table(path)) == 0
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # no half-written file
    path.write_bytes(b"no table")
    with pytest.raises(DatasetError, match=r"train-bad-samples-00003.parquet: not a readable report .*remove it"):
        record(tmp_path).open()


def test_a_report_may_lie_in_a_bucket() -> None:
    bad = record(None)
    bad = BadSampleRecord(
        Config(
            data={"path": "pack"}, stream={"on_bad_sample": "quarantine", "quarantine": "memory://bucket/reports"}
        ).stream,
        "train",
        "d",
        0,
    )
    bad.open()
    bad.add(wire_of(4, (2, "a")))
    bad.write()
    import fsspec

    with fsspec.open("memory://bucket/reports/train-bad-samples-00000.parquet") as file:
        assert pq.read_table(file)["key"].to_pylist() == ["a"]


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ({"on_bad_sample": "quarantine"}, "needs a folder or URL"),
        ({"on_bad_sample": "replace", "quarantine": "q"}, "not written under on_bad_sample: replace"),
        ({"on_bad_sample": "skip"}, "on_bad_sample"),
        ({"max_bad_rate": 1.5}, "max_bad_rate"),
    ],
)
def test_policies_that_can_not_be(stream: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(data={"path": "pack"}, stream=stream)
