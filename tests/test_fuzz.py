"""Whatever bytes a reader is given, it answers or raises an error that is meant for the user.

Everything here is small and made on the spot; what is random is bounded so that the whole file takes about a minute.
"""

from __future__ import annotations

import io
import json
import resource
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from packing import pack_here
from PIL import Image
from pycocotools import mask as coco_mask

from rfstream.config import Config, load_config
from rfstream.dataset.coco import SplitFiles, read_split
from rfstream.dataset.index import SplitIndex, read_index
from rfstream.dataset.reader import EncodedSample
from rfstream.dataset.shards import scan_shard
from rfstream.dataset.tar import TarReader
from rfstream.errors import ConfigError, RFStreamError, StateError
from rfstream.plan.position import Position, position_of, state_of
from rfstream.plan.windows import Windows
from rfstream.stream.decode import BatchDecoder, DetectionSpec
from rfstream.stream.scaling import Scaling
from rfstream.stream.segmentation import decompress, mask_of
from rfstream.stream.targets import parse_sidecar, targets_of
from rfstream.tools.check import check
from rfstream.tools.check_document import check_document
from rfstream.tools.check_images import check_image

HEIGHT, WIDTH, SAMPLES = 24, 32, 6
MEMORY = 400 * 1024  # KiB that all of these tests together may add to the process
EXAMPLES = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
FEW = settings(EXAMPLES, max_examples=25)


@pytest.fixture(scope="module", autouse=True)
def bounded_memory() -> Iterator[None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEMORY


def document() -> dict[str, Any]:
    square = [2, 2, 12, 2, 12, 12, 2, 12]
    rle = coco_mask.encode(np.asfortranarray(np.tri(HEIGHT, WIDTH, dtype=np.uint8)))["counts"].decode()
    segmentations = [
        [square],
        {"size": [HEIGHT, WIDTH], "counts": rle},
        {"size": [HEIGHT, WIDTH], "counts": [5, 3, HEIGHT * WIDTH - 8]},
        [],
    ]
    return {
        "images": [{"id": i, "file_name": f"{i}.png", "width": WIDTH, "height": HEIGHT} for i in range(SAMPLES)],
        "annotations": [
            {
                "id": i,
                "image_id": i % SAMPLES,
                "category_id": 1 + i % 2,
                "bbox": [2, 2, 10, 10],
                "area": 100,
                "iscrowd": int(i == 7),
                "segmentation": segmentations[i % 4],
            }
            for i in range(8)
        ],
        "categories": [{"id": 1, "name": "a", "supercategory": "none"}, {"id": 2, "name": "b", "supercategory": "a"}],
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Roboflow folder of six images."""
    folder = tmp_path_factory.mktemp("fuzz") / "source"
    (folder / "train").mkdir(parents=True)
    for i in range(SAMPLES):
        Image.new("RGB", (WIDTH, HEIGHT), (40 * i, 0, 0)).save(folder / "train" / f"{i}.png")
    (folder / "train" / "_annotations.coco.json").write_text(json.dumps(document()))
    return folder


@pytest.fixture(scope="module")
def pack(source: Path) -> SplitIndex:
    """Its pack: two shards."""
    return pack_here(source, source.parent / "pack", per_shard=3)


def read_all(path: str) -> list[EncodedSample]:
    """What a training run reads: index, fragments, every sample, decoded with masks."""
    index = read_index(path, "train")
    assert index.fragments().total == index.num_samples
    labels = tuple(index.label_of().items())
    assert len(index.class_names()) <= 10**6
    samples = TarReader(path, "train", index.digest).read(np.arange(min(index.num_samples, SAMPLES)))
    decoder = BatchDecoder.of(DetectionSpec(0, labels, "", "", True, 1))
    for sample in samples:
        wire = decoder.batch([sample], 0, 0, 0)
        assert wire.arrays["images"].shape[0] == 1
    return samples


def survives(action: Callable[[], object], *allowed: type[Exception]) -> bool:
    """Whether ``action`` answers; what it raises must be of the kinds meant for users."""
    try:
        action()
    except (RFStreamError, *allowed) as error:
        assert str(error) and len(str(error)) < 5000
        return False
    return True


# Bytes

edits = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "drop", "insert", "repeat", "zero"]),
        st.floats(0, 1, exclude_max=True),
        st.binary(min_size=1, max_size=12),
    ),
    min_size=1,
    max_size=4,
)


def mutate(data: bytes, changes: list[tuple[str, float, bytes]]) -> bytes:
    """``data`` with each change made at that fraction of its length."""
    for kind, place, content in changes:
        at, n = int(place * len(data)), len(content)
        head, tail = data[:at], data[at:]
        data = {
            "flip": head + bytes(a ^ b for a, b in zip(tail, content, strict=False)) + tail[n:],
            "cut": head,
            "drop": head + tail[n:],
            "insert": head + content + tail,
            "repeat": head + tail[: 64 * n] + tail,
            "zero": head + bytes(min(len(tail), 64 * n)) + tail[64 * n :],
        }[kind]
    return data


def each_file(pack: SplitIndex) -> list[Path]:
    return sorted(path for path in Path(pack.path).iterdir() if path.is_file())


def test_what_is_not_damaged_is_read(pack: SplitIndex) -> None:
    assert len(read_all(pack.path)) == SAMPLES


def fuzzed(path: Path, changes: list[tuple[str, float, bytes]], *actions: Callable[[], object]) -> None:
    """Run every action while ``path`` is damaged."""
    data = path.read_bytes()
    try:
        path.write_bytes(mutate(data, changes))
        for action in actions:
            survives(action)
    finally:
        path.write_bytes(data)


@EXAMPLES
@given(changes=edits, number=st.integers(0, 1))
def test_damaged_shards(pack: SplitIndex, changes: list[tuple[str, float, bytes]], number: int) -> None:
    url = pack.shard_url(number)
    fuzzed(Path(url), changes, lambda: scan_shard(url, number), lambda: read_all(pack.path))


@EXAMPLES
@given(changes=edits, header=st.integers(0, 11), at=st.integers(0, 511))
def test_damaged_headers(pack: SplitIndex, changes: list[tuple[str, float, bytes]], header: int, at: int) -> None:
    """Damage within a tar header, with its checksum made to fit again."""
    path = Path(pack.shard_url(0))
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        start = tar.getmembers()[header % 6].offset
    block = bytearray(mutate(bytes(data[start : start + 512]), changes)[:512].ljust(512, b"\0"))
    block[148:156] = b"        "
    block[148:156] = b"%06o\0 " % sum(block)
    try:
        path.write_bytes(bytes(data[:start] + block + data[start + 512 :]))
        survives(lambda: scan_shard(str(path), 0))
        survives(lambda: read_all(pack.path))
    finally:
        path.write_bytes(data)


@EXAMPLES
@given(changes=edits, which=st.sampled_from(["samples", "fragments"]))
def test_damaged_tables(pack: SplitIndex, changes: list[tuple[str, float, bytes]], which: Any) -> None:
    fuzzed(Path(pack.table_url(which)), changes, lambda: read_all(pack.path))


@FEW
@given(changes=edits, number=st.integers(0, 4))
def test_the_check_survives_any_damage(pack: SplitIndex, changes: list[tuple[str, float, bytes]], number: int) -> None:
    fuzzed(each_file(pack)[number], changes, lambda: check(pack.path, progress=False))


types = st.sampled_from(
    [getattr(tarfile, f"{kind}TYPE") for kind in ("REG", "LNK", "SYM", "CHR", "BLK", "FIFO", "DIR", "CONT")]
    + [tarfile.GNUTYPE_SPARSE, b"Z"]
)
names = st.sampled_from(["0.png", "0.json", "1.png", "../0.png", "/etc/0.json", "a/../../0.png", "..", "", "C:/0.png"])


@EXAMPLES
@given(members=st.lists(st.tuples(names, types, st.binary(max_size=40)), max_size=5))
def test_members_of_any_kind_and_name(
    tmp_path_factory: pytest.TempPathFactory, members: list[tuple[str, bytes, bytes]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "members.tar"
    with tarfile.open(path, "w") as tar:
        for name, kind, payload in members:
            member = tarfile.TarInfo(name)
            member.type, member.size, member.linkname = kind, len(payload), "/etc/passwd"
            tar.addfile(member, io.BytesIO(payload))
    if survives(lambda: scan_shard(str(path), 0)):
        assert all(kind in (tarfile.REGTYPE, tarfile.CONTTYPE, tarfile.DIRTYPE, b"Z") for _, kind, _ in members)


# Documents

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2**31, 2**63, 10**30, 10**400, -(10**400)]),
    st.sampled_from([float("nan"), float("inf"), -1e308, 1e308, 0.5, -0.0]),
    st.sampled_from(["", "remap", "../x", "/x", "\ud800", "\x00", "a" * 300, "1"]),
    st.text(max_size=8),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.sampled_from(["id"]), inner),
    max_leaves=8,
)
changes_of = st.lists(st.tuples(st.integers(0, 10**6), values, st.booleans()), min_size=1, max_size=3)


def spots(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a JSON document."""
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], dict | list):
            yield from spots(node[key])


def changed(root: Any, changes: list[tuple[int, Any, bool]]) -> Any:
    """``root`` with values put in place of its own, or removed."""
    for place, value, remove in changes:
        found = list(spots(root)) if isinstance(root, dict | list) else []
        if not found:
            return value
        node, key = found[place % len(found)]
        if remove:
            del node[key]
        else:
            node[key] = value
    return root


@EXAMPLES
@given(changes=changes_of)
def test_index_files(pack: SplitIndex, changes: list[tuple[int, Any, bool]]) -> None:
    path = Path(pack.path) / "train-index.json"
    data = path.read_bytes()
    try:
        path.write_text(json.dumps(changed(json.loads(data), changes)))
        survives(lambda: read_all(pack.path))
        survives(lambda: check(pack.path, images=False, progress=False))
    finally:
        path.write_bytes(data)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"version": 1, "version": 2}',
        '{"version": NaN}',
        '{"version": 1e999}',
        '{"version": ' + "9" * 5000 + "}",
        "\ufeff{}",
        "\x00",
    ],
    ids=lambda text: text[:12],
)
def test_texts_that_are_hardly_json(pack: SplitIndex, source: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "train-index.json").write_text(text)
    (tmp_path / "a.json").write_text(text)
    assert not survives(lambda: read_index(str(tmp_path), "train"))
    assert not survives(lambda: read_split(SplitFiles("train", tmp_path / "a.json", source / "train"), "remap"))
    assert not check(str(tmp_path), progress=False).passed()
    assert not survives(lambda: parse_sidecar(text.encode()), ValueError)


@EXAMPLES
@given(changes=changes_of, category_ids=st.sampled_from(["remap", "raw"]))
def test_annotation_files(source: Path, changes: list[tuple[int, Any, bool]], category_ids: Any) -> None:
    found = changed(document(), changes)
    path = source / "other.json"
    path.write_text(json.dumps(found))
    read = survives(lambda: read_split(SplitFiles("train", path, source / "train"), category_ids))
    traits = check_document("other.json", json.loads(path.read_text()))
    if not read and category_ids == "remap":  # what packing refuses, the check calls an error
        report = check(str(path), images=False, progress=False)
        assert not report.passed(), [trait.name for trait in traits]


# Samples

LABELS = {1: 0, 2: 1}
numbers = st.sampled_from([0, 1, 3, 24, 32, 768, -1, 2**31, 2**40, 10**30, 0.5, 1e9, 1e30, float("nan"), float("inf")])
runs = st.fixed_dictionaries(
    {
        "size": st.sampled_from([[HEIGHT, WIDTH], [WIDTH, HEIGHT], [HEIGHT], [10**5, 10**5], [2**32, 4], [-1, -1], "a"])
        | values,
        "counts": st.lists(numbers | scalars, max_size=6)
        | st.text(max_size=20)
        | st.text("0123PQRo_", max_size=30)
        | values,
    }
)
polygons = st.lists(st.lists(numbers | scalars, max_size=10) | values, max_size=3)
annotations = st.fixed_dictionaries(
    {
        "bbox": st.just([1, 2, 8, 9]) | st.lists(numbers | scalars, min_size=4, max_size=4) | values,
        "category_id": st.sampled_from([1, 2]) | values,
    },
    optional={"area": numbers | values, "iscrowd": values, "segmentation": runs | polygons | values, "id": values},
)


@settings(EXAMPLES, max_examples=150)
@given(given_annotations=st.lists(annotations, max_size=3), masks=st.booleans(), factor=st.sampled_from([1, 2, 4, 8]))
def test_annotations_of_a_sample(given_annotations: list[dict[str, Any]], masks: bool, factor: int) -> None:
    try:
        target = targets_of(given_annotations, LABELS, HEIGHT, WIDTH, masks=masks, scaling=Scaling(factor))
    except ValueError:
        return
    n = len(target["boxes"])
    assert target["boxes"].shape == (n, 4) and np.isfinite(target["boxes"]).all() and np.isfinite(target["area"]).all()
    assert all(len(array) == n for array in target.values())
    if masks:
        size = (HEIGHT // factor, WIDTH // factor)
        assert target["masks"].shape == (n, *size) and set(np.unique(target["masks"])) <= {0, 1}


CRASHERS = [
    {"size": [100_000, 100_000], "counts": "04"},  # asks for 10 GB, and does not look whether it got them
    {"size": [2**32, 4], "counts": "04"},
    {"size": [HEIGHT, WIDTH], "counts": ""},  # fills nothing: the mask is memory that nobody wrote
    {"size": [HEIGHT, WIDTH], "counts": [0, 1]},
    {"size": [HEIGHT, WIDTH], "counts": []},
    {"size": [HEIGHT, WIDTH], "counts": "o"},  # reads past the end of the text
    {"size": [HEIGHT, WIDTH], "counts": [0, -5, 3]},
    {"size": [HEIGHT, WIDTH], "counts": [0.5, 767.5]},
    [[0, 0, 1, 1, 1e30, 2]],
    [[0, 0, 1, 1, 1e8, 2]],
    [[0, 0, 1, 1, float("nan"), 2]],
    [[0, 0, float("inf"), 1, 2, 2]],
    [[0, 0, None, 1, 2, 2]],
    [[0, 0, 10**30, 1, 2, 2]],
]


@pytest.mark.parametrize("segmentation", CRASHERS, ids=str)
def test_what_would_crash_native_code_is_refused(segmentation: object) -> None:
    with pytest.raises(ValueError, match=r"RLE|polygon"):
        mask_of(segmentation, HEIGHT, WIDTH)


@FEW
@given(seed=st.integers(0, 2**32 - 1), height=st.integers(1, 60), width=st.integers(1, 60), share=st.floats(0, 1))
def test_run_lengths_are_those_of_pycocotools(seed: int, height: int, width: int, share: float) -> None:
    mask = (np.random.default_rng(seed).random((height, width)) < share).astype(np.uint8)
    counts = coco_mask.encode(np.asfortranarray(mask))["counts"].decode()
    assert sum(decompress(counts)) == height * width
    for form in (counts, decompress(counts)):
        assert np.array_equal(mask_of({"size": [height, width], "counts": form}, height, width), mask)


@EXAMPLES
@given(data=st.binary(max_size=40) | values.map(lambda value: json.dumps({"annotations": value}).encode()))
def test_sidecars(data: bytes) -> None:
    survives(lambda: parse_sidecar(data), ValueError)


@EXAMPLES
@given(image_id=values, name=values, given_annotations=st.lists(annotations | values, max_size=2))
def test_samples(image_id: Any, name: Any, given_annotations: list[Any]) -> None:
    buffer = io.BytesIO()
    Image.new("RGB", (WIDTH, HEIGHT)).save(buffer, "PNG")
    sidecar = json.dumps({"image_id": image_id, "file_name": name, "annotations": given_annotations}).encode()
    decoder = BatchDecoder.of(DetectionSpec(0, tuple(LABELS.items()), "", "", True, 1))
    survives(lambda: decoder.batch([EncodedSample("a.tar", "0", buffer.getvalue(), sidecar, 0, 0)], 0, 0, 0))


@EXAMPLES
@given(changes=edits, kind=st.sampled_from(["PNG", "JPEG", "WEBP", "BMP"]))
def test_images(changes: list[tuple[str, float, bytes]], kind: str) -> None:
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((WIDTH, HEIGHT)).convert("RGB").save(buffer, kind)
    data = mutate(buffer.getvalue(), changes)
    decoder = BatchDecoder.of(DetectionSpec(0, (), "", "", True, 1))
    sidecar = b'{"image_id": 1, "file_name": "a", "annotations": []}'
    decodes = survives(lambda: decoder.batch([EncodedSample("a.tar", "0", data, sidecar, 0, 0)], 0, 0, 0))
    traits = {name for name, _ in check_image(data, "a.png", (WIDTH, HEIGHT))}
    assert decodes == (not traits & {"undecodable-image", "empty-file"})


# Tables of other types

columns = st.sampled_from(
    [
        pa.array([0, 3], pa.int64()),
        pa.array([0, 3], pa.uint64()),
        pa.array([2**64 - 1, 0], pa.uint64()),
        pa.array([0.0, float("nan")]),
        pa.array(["0", "3"]),
        pa.array([None, 3], pa.int64()),
        pa.array([[0], [3]]),
        pa.array([b"0", b"3"]),
        pa.array([True, False]),
        pa.array([-(2**63), 2**63 - 1], pa.int64()),
    ]
)


@FEW
@given(column=columns, name=st.sampled_from([*"abc", "first", "nbytes", "key", "image_offset", "json_size"]))
def test_tables_of_other_types(pack: SplitIndex, column: pa.Array, name: str) -> None:
    for which in ("samples", "fragments"):
        path = Path(pack.table_url(which))  # type: ignore[arg-type]
        data = path.read_bytes()
        table = pq.read_table(path).slice(0, 2)
        at = table.schema.get_field_index(name)
        try:
            pq.write_table(table.append_column(name, column) if at < 0 else table.set_column(at, name, column), path)
            survives(lambda: read_all(pack.path))
            survives(lambda: check(pack.path, images=False, progress=False))
        finally:
            path.write_bytes(data)


# Saved positions and configurations

WINDOWS = Windows(100, 2, 2, 5, "wrap")
FINGERPRINT = {"pack": "0" * 16, "seed": 0, "shuffle": True, "window_samples": 20}


@EXAMPLES
@given(changes=changes_of, allowed=st.lists(st.sampled_from(["pack", "seed", "window_samples"])))
def test_saved_positions(changes: list[tuple[int, Any, bool]], allowed: list[str]) -> None:
    state = changed(state_of(Position(1, 2), WINDOWS, FINGERPRINT), changes)
    try:
        position = position_of(state, WINDOWS, FINGERPRINT, allowed)
    except StateError:
        return
    assert position.epoch >= 0 and 0 <= position.batch < WINDOWS.batches_per_rank


CONFIG = {
    "data": {"path": "pack", "splits": {"train": "train"}},
    "stream": {"batch_size": 4, "seed": 1, "block_bytes": "1MiB", "timeout_s": 1.5},
    "decode": {"actors": [1, 2], "masks": True},
    "augment": {"cpu": {"transform": "a.b:c", "args": {"size": 3}}, "device": {"normalize": {"mean": [0, 0, 0]}}},
}


@EXAMPLES
@given(changes=changes_of)
def test_configurations(tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, Any, bool]]) -> None:
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    path.write_text(json.dumps(changed(json.loads(json.dumps(CONFIG)), changes)))
    survives(lambda: load_config(path))


@EXAMPLES
@given(text=st.text(st.sampled_from("ab:-[]{}&*!#|>'\"\n ,?0123456789.%@`~\t"), max_size=40))
@example("data: 2024-13-45")
@example("1: 2")
@example("?")
@example("data: !!int ''")
@example("? [a]\n: b")
@example("[" * 500)
@example("data: &a {path: *a}")
@example("\n".join(["a0: &a0 [x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))]))
def test_texts_that_are_hardly_yaml(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.getbasetemp() / "hardly.yaml"
    path.write_text(text)
    survives(lambda: load_config(path))
    path.write_text("data: {path: pack}\n")
    survives(lambda: load_config(path, [f"stream.seed={text}"]))


def test_a_configuration_is_read(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({"data": {"path": "pack"}}))
    assert isinstance(load_config(path), Config)
    with pytest.raises(ConfigError):
        load_config(path, ["stream.seed=-1"])
