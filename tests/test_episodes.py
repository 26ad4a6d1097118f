"""Samples of LeRobot datasets: equal to what LeRobot's own reader returns, whatever the files look like."""

from __future__ import annotations

import gc
import io
import json
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import lerobot
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from gcs import BUCKET
from lerobot import FIRST_DATA, FIRST_VIDEO, FRAMES, FRONT, LENGTHS, WRIST, config, copied, decode, training
from PIL import Image

from benchmarks.bad_storage import BadStorage
from rfstream.dataset import storage
from rfstream.episodes import reader as episode_reader
from rfstream.episodes.batch import EpisodeBatch
from rfstream.episodes.layout import layout_of
from rfstream.episodes.metadata import Feature, read_dataset
from rfstream.episodes.tabular import EpisodeRows
from rfstream.episodes.video import VideoDecoder
from rfstream.errors import ConfigError, DatasetError, SampleError
from rfstream.stream.source import reader_of
from rfstream.tools.check import check

GOLDEN = ["golden_video_torchcodec", "golden_video_nodelta_torchcodec", "golden_image", "golden_tabular_all"]
WINDOWS = {
    "observation.state": [-0.1, -1 / 30, 0.0],
    "action": [i / 30 for i in range(8)],
    FRONT: [-1 / 30, 0.0],
}


@pytest.fixture(scope="module")
def datasets(shared_data: Path) -> Path:
    return shared_data / "lerobot"


@pytest.fixture
def writable(datasets: Path, tmp_path: Path) -> Path:
    return copied(datasets / "ds_video", tmp_path / "ds_video")


def assert_equal(a: EpisodeBatch, b: EpisodeBatch) -> None:
    assert (a.keys, a.task, a.tensors.keys()) == (b.keys, b.task, b.tensors.keys())
    for name, values in a.tensors.items():
        assert torch.equal(values, b[name]), name


# What LeRobot returns


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_items(datasets: Path, name: str) -> None:
    about = json.loads((datasets / "golden/golden.json").read_text())["files"][f"{name}.npz"]
    golden = dict(np.load(datasets / f"golden/{name}.npz"))
    tabular = name == "golden_tabular_all"
    rows = golden.pop("__indices__", np.arange(FRAMES))
    windows = about["delta_timestamps"] or {}
    cfg = config(datasets / about["dataset"], delta_timestamps=windows, cameras=[] if tabular else None)
    batch = decode(training(cfg), rows)
    assert batch.task == golden.pop("task").tolist()
    assert batch.tensors.keys() == golden.keys()
    for key, expected in golden.items():
        if key in batch.cameras:
            # LeRobot drops the axis of time of a camera without a window; here every camera has one.
            expected = expected.reshape(len(rows), -1, *expected.shape[-3:])
            floats = torch.from_numpy(expected).to(torch.float32) / 255
            assert torch.equal(batch.pixels(key), floats)
        values = batch[key].numpy()
        assert (values.dtype, values.shape) == (expected.dtype, expected.shape), key
        assert np.array_equal(values, expected), key


def source_frames(root: Path, camera: str, episode: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Frames of an episode, uint8 (n, 3, H, W), found without rfstream."""
    meta = pa.concat_tables(pq.read_table(path) for path in sorted(root.glob("meta/episodes/*/*.parquet")))
    about = next(row for row in meta.to_pylist() if row["episode_index"] == episode)
    place = [about[f"data/{kind}_index"] for kind in ("chunk", "file")]
    if not (root / "videos").exists():
        rows = pq.read_table(root / "data/chunk-{:03d}/file-{:03d}.parquet".format(*place)).to_pylist()
        images = [row[camera]["bytes"] for row in rows if row["episode_index"] == episode]
        return np.stack([np.asarray(Image.open(io.BytesIO(data))).transpose(2, 0, 1) for data in images])
    place = [about[f"videos/{camera}/{kind}_index"] for kind in ("chunk", "file")]
    first = round(about[f"videos/{camera}/from_timestamp"] * 30)
    path = root / "videos/{}/chunk-{:03d}/file-{:03d}.mp4".format(camera, *place)
    return lerobot.video_frames(path)[first : first + about["length"]]


@pytest.mark.parametrize("dataset", ["ds_video", "ds_image", "ds_video_av1"])
def test_windows_far_past_both_ends_of_every_episode(datasets: Path, dataset: str) -> None:
    steps = np.array([-300, -70, -1, 0, 1, 5, 90, 300])
    deltas = (steps / 30).tolist()
    names = ("action", "observation.tactile", FRONT, WRIST)
    pipeline = training(config(datasets / dataset, delta_timestamps=dict.fromkeys(names, deltas)))
    tables = pa.concat_tables(pq.read_table(p) for p in sorted((datasets / dataset).glob("data/*/*.parquet")))
    tabular = {name: np.array(tables[name].to_pylist(), dtype=np.float32) for name in names[:2]}
    start = 0
    for episode, length in enumerate(LENGTHS):
        wanted = np.arange(length)[:, None] + steps
        inside = np.clip(wanted, 0, length - 1)
        batch = decode(pipeline, np.arange(start, start + length))
        assert batch["index"].tolist() == list(range(start, start + length))
        for name in names:
            episode_values = (
                tabular[name][start : start + length]
                if name in tabular
                else source_frames(datasets / dataset, name, episode)
            )
            assert len(episode_values) == length
            assert np.array_equal(batch[name].numpy(), episode_values[inside]), (name, episode)
            assert np.array_equal(batch[f"{name}_is_pad"].numpy(), wanted != inside)
        start += length


def test_chosen_episodes_keep_the_datasets_order(datasets: Path) -> None:
    pipeline = training(config(datasets / "ds_video", select=[7, 3], cameras=[WRIST]))
    batch = decode(pipeline, range(59))
    assert batch["episode_index"].tolist() == [3] * 53 + [7] * 6
    assert batch["index"].tolist() == [*range(194, 247), *range(450, 456)]
    assert batch.cameras == (WRIST,)
    assert batch.keys[52:54] == ["000003-000052", "000007-000000"]


# However the files are written


def test_rows_may_lie_in_any_order_and_row_groups_anywhere(datasets: Path, writable: Path) -> None:
    plain = training(config(datasets / "ds_video", delta_timestamps=WINDOWS))

    def mixed(table: pa.Table) -> pa.Table:
        extra = table.append_column("not.in.info", pa.array(range(len(table))))
        return extra.take(np.random.default_rng(0).permutation(len(table)))

    for path in writable.glob("data/*/*.parquet"):
        lerobot.edit_rows(path, mixed, row_group_size=17)
    odd = training(config(writable, delta_timestamps=WINDOWS))
    rows = np.arange(0, FRAMES, 5)
    assert_equal(decode(plain, rows), decode(odd, rows))


@pytest.mark.parametrize("column", ["task", "__index_level_0__"])
def test_tasks_are_read_from_an_index_with_or_without_a_name(writable: Path, column: str) -> None:
    path = writable / "meta/tasks.parquet"
    tasks = pq.read_table(path)
    pq.write_table(tasks.rename_columns([column if name == "task" else name for name in tasks.column_names]), path)
    assert decode(training(config(writable, cameras=[])), [0]).task == ["pick up the red block"]


def test_numbers_of_a_narrower_type_are_widened(datasets: Path, writable: Path) -> None:
    def narrow(table: pa.Table) -> pa.Table:
        return lerobot.set_column(table, "frame_index", table["frame_index"].cast(pa.int16()))

    for path in writable.glob("data/*/*.parquet"):
        lerobot.edit_rows(path, narrow)
    plain, odd = (training(config(root, cameras=[])) for root in (datasets / "ds_video", writable))
    assert_equal(decode(plain, range(FRAMES)), decode(odd, range(FRAMES)))


def test_the_task_may_change_within_an_episode(writable: Path) -> None:
    lerobot.edit_rows(writable / FIRST_DATA, lambda table: lerobot.set_value(table, "task_index", 3, 1))
    batch = decode(training(config(writable, cameras=[])), range(2, 6))
    blue, red = "push the blue cube to the left", "pick up the red block"
    assert batch.task == [red, blue, red, red]


def test_axes_of_a_camera_are_as_named(writable: Path) -> None:
    features = json.loads((writable / "meta/info.json").read_text())["features"]
    features[FRONT] |= {"shape": [3, 96, 128], "names": ["channels", "height", "width"]}
    lerobot.edit_info(writable, features=features)
    assert decode(training(config(writable)), [5])[FRONT].shape == (1, 1, 3, 96, 128)
    features[FRONT] |= {"shape": [128, 96, 3], "names": None}
    lerobot.edit_info(writable, features=features)
    with pytest.raises(SampleError, match=r"128 x 96 pixels, and meta/info.json says 96 x 128"):
        decode(training(config(writable)), [5])


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("libx264", {"g": "250", "bf": "3"}),
        ("libx265", {"x265-params": "keyint=6:open-gop=1:bframes=3:log-level=none"}),
    ],
)
def test_long_groups_of_pictures_with_b_frames(
    datasets: Path, writable: Path, codec: str, options: dict[str, str]
) -> None:
    path = writable / FIRST_VIDEO
    lerobot.encode(path, lerobot.video_frames(datasets / "ds_video" / FIRST_VIDEO), codec, **options)
    played = lerobot.video_frames(path)
    pipeline = training(config(writable, delta_timestamps={FRONT: [-4.0, -0.1, 0.0, 1.0]}, cameras=[FRONT]))
    rows = np.random.default_rng(1).permutation(194)
    first = np.repeat([0, 64, 104], LENGTHS[:3])[rows]
    last = np.repeat([63, 103, 193], LENGTHS[:3])[rows]
    expected = np.stack([played[np.clip(rows + step, first, last)] for step in (-120, -3, 0, 30)], axis=1)
    for lo in range(0, 194, 16):
        assert np.array_equal(decode(pipeline, rows[lo : lo + 16])[FRONT].numpy(), expected[lo : lo + 16])


def test_a_fragmented_file_is_read_like_any_other(datasets: Path, writable: Path) -> None:
    path = writable / FIRST_VIDEO
    frames = lerobot.video_frames(datasets / "ds_video" / FIRST_VIDEO)
    lerobot.encode(path, frames, "libx264", flags="frag_keyframe+empty_moov", g="10", bf="0")
    batch = decode(training(config(writable, cameras=[FRONT])), range(194))
    assert np.array_equal(batch[FRONT][:, 0].numpy(), lerobot.video_frames(path))


def test_frames_of_one_group_of_pictures_share_its_packets(datasets: Path, writable: Path) -> None:
    lerobot.encode(
        writable / FIRST_VIDEO, lerobot.video_frames(datasets / "ds_video" / FIRST_VIDEO), "libx264", g="250", bf="0"
    )
    pipeline = training(config(writable, cameras=[FRONT]))
    steps = reader_of(pipeline.reader).read(np.array([30, 3, 63]))
    (run,) = {step.shots[0][0].source for step in steps}
    assert (len(run.size), len(run.wanted)) == (64, 3)
    assert len(reader_of(pipeline.reader).to_columns(steps)["steps"][0].as_buffer()) < len(run.data) + 6000


@pytest.fixture(scope="module")
def in_bucket(datasets: Path, bucket: BadStorage) -> str:
    url = f"gs://{BUCKET}/ds_video"
    for path in (datasets / "ds_video").rglob("*"):
        if path.is_file():
            storage.upload(path, storage.join(url, path.relative_to(datasets / "ds_video").as_posix()))
    return url


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int, int]]]:
    """The ranges that are read from files, in order."""
    ranges: list[tuple[str, int, int]] = []
    plain = storage.read_range

    def noted(url: str, begin: int, end: int, deadline_s: float = 0.0) -> bytes:
        ranges.append((url, begin, end))
        return plain(url, begin, end, deadline_s)

    monkeypatch.setattr(storage, "read_range", noted)
    yield ranges


def test_a_bucket_gives_what_the_folder_gives(
    datasets: Path, in_bucket: str, asked: list[tuple[str, int, int]]
) -> None:
    local, remote = (
        training(config(root, delta_timestamps=WINDOWS, stream={"seed": 1}))
        for root in (datasets / "ds_video", in_bucket)
    )
    assert (local.fused, remote.fused) == (True, False)
    assert local.index.digest == remote.index.digest
    rows = np.random.default_rng(2).permutation(FRAMES)
    expected = decode(local, rows[:80])
    asked.clear()
    assert_equal(decode(remote, rows[:80]), expected)
    reader = reader_of(remote.reader)
    list(reader.parts(np.arange(FRAMES), 8))
    asked.clear()
    list(reader.parts(np.arange(FRAMES), 8))  # packet tables are known by now, and rows of these few episodes
    videos = {path: path.stat().st_size for path in (datasets / "ds_video/videos").rglob("*.mp4")}
    assert len(asked) == len(videos)  # a pool that holds all episodes is one range a file
    assert sum(end - begin for _, begin, end in asked) <= sum(videos.values())


def test_a_file_s_footer_is_fetched_once_and_its_rows_in_one_range(
    in_bucket: str, asked: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_reader, "_FILES", 1)
    reader = reader_of(training(config(in_bucket, pool_size=12, cameras=[])).reader)
    starts, url_of = reader.index.starts, reader.index.dataset.data_url
    first_of_file = [at for at in range(len(starts) - 1) if at == 0 or url_of(at) != url_of(at - 1)]
    for _ in range(2):
        asked.clear()
        reader._rows.clear()
        for at in first_of_file:
            reader.read(starts[[at]])
    assert [url for url, _, _ in asked] == list(map(url_of, first_of_file))
    assert all(end < storage.size_of(url) for url, _, end in asked)


def test_sizes_are_asked_for_where_listings_have_none(datasets: Path) -> None:
    local = training(config(datasets / "ds_video")).index
    serve = partial(SimpleHTTPRequestHandler, directory=datasets)
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/ds_video"
        assert set(storage.sizes_in(f"{url}/data/chunk-000").values()) == {None}
        remote = replace(local, dataset=replace(local.dataset, root=url))
        assert remote.nbytes.tolist() == local.nbytes.tolist()
        server.shutdown()


def test_packet_tables_of_a_pool_are_read_once(
    datasets: Path, asked: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode_reader, "_FILES", 1)
    reader = reader_of(training(config(datasets / "ds_video", pool_size=12)).reader)
    list(reader.parts(np.arange(FRAMES), 8))
    asked.clear()
    list(reader.parts(np.arange(FRAMES), 8))
    assert len(asked) == len(list((datasets / "ds_video/videos").rglob("*.mp4")))


def test_rows_with_images_are_let_go_before_others_are_read(datasets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of(training(config(datasets / "ds_image")).reader)
    plain = episode_reader.read_episodes
    read: list[weakref.ref[EpisodeRows]] = []
    alive = []

    def noted(*arguments: Any) -> dict[int, EpisodeRows]:
        alive.append(sum(rows() is not None for rows in read))
        found = plain(*arguments)
        read.extend(map(weakref.ref, found.values()))
        return found

    monkeypatch.setattr(episode_reader, "read_episodes", noted)
    for first in (0, 64, 104):  # an episode each
        reader.read(np.arange(first, first + 5))
    assert alive == [0, 0, 0]


# What is refused


@pytest.mark.parametrize(
    ("episodes", "sentence"),
    [
        ({"delta_timestamps": {"action": [0.05]}}, r"delta_timestamps.action: 0.05 s is no multiple of 1/30 s"),
        ({"delta_timestamps": {"action": []}}, r"delta_timestamps.action: no delta is given"),
        ({"delta_timestamps": {"torque": [0.0]}}, r"no feature 'torque' is streamed \(known here: .*action"),
        ({"delta_timestamps": {FRONT: [0.0]}, "cameras": [WRIST]}, "no feature 'observation.images.front' is streamed"),
        ({"cameras": ["top"]}, r"no camera 'top' \(known here: observation.images.front, "),
        ({"select": [3, 12]}, "split 'train' of .* has no episode 12"),
    ],
)
def test_a_configuration_that_does_not_fit_is_one_sentence(
    datasets: Path, episodes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        training(config(datasets / "ds_video", **episodes))


def test_a_delta_may_be_off_by_what_lerobot_allows(datasets: Path) -> None:
    cfg = config(datasets / "ds_video", delta_timestamps={"action": [0.0334, -0.0333]}, cameras=[])
    assert decode(training(cfg), [1])["action_is_pad"].tolist() == [[False, False]]


def test_sections_of_the_other_format_are_refused(datasets: Path) -> None:
    with pytest.raises(ConfigError, match=r"episodes is for data.format: lerobot"):
        config(datasets / "ds_video").__class__(data={"path": "pack"}, episodes={"pool_size": 2})
    with pytest.raises(ConfigError, match=r"augment.cpu has no part in data.format: lerobot"):
        lerobot.Config(data={"path": "x", "format": "lerobot"}, augment={"cpu": {"transform": "a:b"}})
    with pytest.raises(ConfigError, match="format lerobot takes one dataset; only packs of images make a mixture"):
        lerobot.Config(data={"path": [{"path": "x"}], "format": "lerobot"})


def refusal(root: Path, rows: Any = range(194), **episodes: Any) -> str:
    with pytest.raises(DatasetError) as caught:
        decode(training(config(root, **episodes)), rows)
    said = str(caught.value)
    assert "\n" not in said
    return said


def test_other_folders_versions_and_splits_are_refused(datasets: Path, writable: Path) -> None:
    assert "is no LeRobot dataset" in refusal(datasets)
    lerobot.edit_info(writable, splits={"train": "most"})
    assert "split 'train' is 'most', not a range" in refusal(writable)
    lerobot.edit_info(writable, splits={})
    assert "no split 'train' (known here: none); name one in data.splits, or leave the role out there" in refusal(
        writable
    )
    lerobot.edit_info(writable, codebase_version="v2.1")
    assert "codebase_version 'v2.1'" in refusal(writable)


def test_metadata_that_says_nothing_usable_is_refused(writable: Path) -> None:
    path = writable / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    first, last = (f"videos/{FRONT}/{end}_timestamp" for end in ("from", "to"))
    pq.write_table(lerobot.set_value(table, last, 0, float("nan")), path)
    assert f"episode 0 has length 64 and nan frames at fps=30 in the video of {FRONT}" in refusal(writable)
    pq.write_table(lerobot.set_value(lerobot.set_value(table, first, 0, -0.1), last, 0, 61 / 30), path)
    assert "has 194 frames, and episode 0 has frames -3 to 60 of it" in refusal(writable)
    lerobot.edit_info(writable, data_path="data/{chunk_index[0]}.parquet")
    assert "data_path 'data/{chunk_index[0]}.parquet' is no template for chunk_index, file_index" in refusal(writable)


@pytest.mark.parametrize(
    ("column", "values", "sentence"),
    [
        ("task", None, "has no column 'task'; write it again with LeRobot"),
        ("task", [3, 4], "column 'task' is int64, not string .*; write it again with LeRobot"),
        ("task", ["a", None], "column 'task' has rows without a value"),
    ],
)
def test_tasks_that_are_no_texts_are_refused(
    writable: Path, column: str, values: list[Any] | None, sentence: str
) -> None:
    path = writable / "meta/tasks.parquet"
    pq.write_table(pa.table({"task_index": [0, 1], **({column: values} if values else {})}), path)
    with pytest.raises(DatasetError, match=f"meta/tasks.parquet: {sentence}"):
        training(config(writable))


def test_tables_of_episodes_may_differ_in_type_and_must_hold_numbers(datasets: Path, writable: Path) -> None:
    path = writable / "meta/episodes/chunk-000/file-000.parquet"
    table = pq.read_table(path)
    half = len(table) // 2
    wide = lerobot.set_column(table.slice(half), "length", table["length"].slice(half).cast(pa.float64()))
    pq.write_table(table.slice(0, half), path)
    pq.write_table(wide, path.with_name("file-900.parquet"))
    plain, odd = (training(config(root)) for root in (datasets / "ds_video", writable))
    assert plain.index.digest == odd.index.digest
    for values, said in ((["x"] * half, "is string, not int64"), ([1.5] * half, "is double, not int64")):
        pq.write_table(lerobot.set_column(table.slice(0, half), "length", pa.array(values)), path)
        with pytest.raises(DatasetError, match=f"column 'length' {said}"):
            training(config(writable))


@pytest.mark.parametrize(
    ("column", "change", "sentence"),
    [
        ("action", lambda rows: [row[:5] if at % 2 else [*row, 0.0] for at, row in enumerate(rows)], r"\[\[5, 7\]\]"),
        ("action", lambda rows: [[row] for row in rows], r"lists of \[\[1\], \[6\]\], and .* says float32 \[6\]"),
        ("action", lambda rows: [row[0] for row in rows], r"is float, and meta/info.json says float32 \[6\]"),
        ("task_index", lambda rows: [row + 0.7 for row in rows], r"is double, and meta/info.json says int64 \[\]"),
        ("task_index", lambda rows: [str(row) for row in rows], r"is string, and meta/info.json says int64 \[\]"),
    ],
)
def test_values_of_another_shape_or_type_are_refused(
    writable: Path, column: str, change: Callable[[list[Any]], list[Any]], sentence: str
) -> None:
    def changed(table: pa.Table) -> pa.Table:
        kind = pa.float32() if column == "action" else None
        values = change(table[column].to_pylist())
        nested: Any = values[0]
        while kind is not None and isinstance(nested, list):
            kind, nested = pa.list_(kind), nested[0]
        return lerobot.set_column(table, column, pa.array(values, kind))

    lerobot.edit_rows(writable / FIRST_DATA, changed)
    assert re.search(f"{FIRST_DATA}: column '{column}' .*{sentence}.*; correct it", refusal(writable, cameras=[]))


@pytest.mark.parametrize(
    ("name", "feature", "sentence"),
    [
        (FRONT, {"dtype": "video", "shape": [96]}, r"shape \[96\], and three axes with 3 channels are streamed"),
        (FRONT, {"dtype": "video", "shape": [96, 128, 1]}, r"\[96, 128, 1\].*; name the other cameras in episodes.c"),
        ("task", {"dtype": "int64", "shape": [1]}, "feature 'task' has the name of something else in a sample"),
        ("action_is_pad", {"dtype": "bool", "shape": [1]}, "feature 'action_is_pad' has the name of something else"),
        ("records", {"dtype": "video", "shape": [96, 128, 3]}, "feature 'records' has the name of something else"),
        ("header", {"dtype": "video", "shape": [96, 128, 3]}, "feature 'header' has the name of something else"),
    ],
)
def test_features_that_a_sample_can_not_hold_are_refused(
    datasets: Path, name: str, feature: dict[str, Any], sentence: str
) -> None:
    info = read_dataset(str(datasets / "ds_video")).info
    odd = info.model_copy(update={"features": info.features | {name: Feature(**feature)}})
    with pytest.raises(DatasetError, match=sentence):
        layout_of(odd, {"action": [0.0]}, None)
    layout_of(info, {"action": [0.0]}, None)
    if name == FRONT:
        assert [camera.name for camera in layout_of(odd, {}, [WRIST]).cameras] == [WRIST]


def test_a_file_that_is_absent_is_refused_before_anything_runs(writable: Path) -> None:
    (writable / FIRST_VIDEO).unlink()
    with pytest.raises(DatasetError, match=rf"{FIRST_VIDEO} does not exist"):
        training(config(writable))
    training(config(writable, cameras=[WRIST]))
    (writable / FIRST_DATA).unlink()
    with pytest.raises(DatasetError, match=rf"{FIRST_DATA} does not exist"):
        training(config(writable, cameras=[WRIST]))


def test_a_video_that_is_cut_short_is_refused(datasets: Path, writable: Path) -> None:
    path, whole = writable / FIRST_VIDEO, (writable / FIRST_VIDEO).read_bytes()
    path.write_bytes(whole[:-1000])
    assert f"{FIRST_VIDEO}: its header speaks of more frames than its" in refusal(writable)
    path.write_bytes(whole[:-1])
    assert f"{FIRST_VIDEO}: its header speaks of more frames than its" in refusal(writable)
    path.write_bytes(whole[:1000])
    assert f"{FIRST_VIDEO}: no video can be read from it" in refusal(writable)
    path.write_bytes(b"")
    assert f"{FIRST_VIDEO}: no video can be read from it" in refusal(writable)
    frames = lerobot.video_frames(datasets / "ds_video" / FIRST_VIDEO)
    lerobot.encode(path, frames, "libx264", format="matroska", g="2")
    assert f"{FIRST_VIDEO}: its header does not say where and when each frame is; write it again as MP4" in refusal(
        writable
    )
    lerobot.encode(path, frames[:150], "libx264", g="2")
    assert "has 150 frames, and episode 2 has frames 104 to 193 of it" in refusal(writable)


def test_times_that_do_not_fit_are_refused(datasets: Path, writable: Path) -> None:
    path, whole = writable / FIRST_VIDEO, (writable / FIRST_VIDEO).read_bytes()
    lerobot.encode(path, lerobot.video_frames(datasets / "ds_video" / FIRST_VIDEO), "libx264", fps=25, g="2")
    assert "frame 3 is shown at 0.12 s, which is not frame 3 at fps=30" in refusal(writable)
    path.write_bytes(whole)
    lerobot.edit_info(writable, fps=25)
    assert "episode 0 has length 64 and 53 frames at fps=25 in the video of" in refusal(writable)
    images = copied(datasets / "ds_image", writable.parent / "images")
    lerobot.edit_info(images, fps=25)
    assert "episode 0, frame 4: timestamp 0.133333 s is not frame 4 at fps=25" in refusal(images)


@pytest.mark.parametrize(
    ("column", "row", "value", "sentence"),
    [
        ("timestamp", 70, 0.1, r"episode 1, frame 6: timestamp 0.1 s does not come after 0.166667 s"),
        ("timestamp", 63, 2.2, r"episode 0, frame 63: timestamp 2.2 s is not frame 63 at fps=30"),
        ("frame_index", 65, 7, r"episode 1 has 40 rows that are not frames 0 to 39 in order"),
        ("index", 65, 7, r"episode 1 has 40 rows that are not frames 0 to 39 in order"),
        ("episode_index", 65, 0, r"episode 0 has 65 rows that are not frames 0 to 63 in order"),
        ("task_index", 65, 2, r"episode 1 has task_index 2 and meta/tasks.parquet has 2 tasks"),
        ("action", 65, None, r"column 'action' has values that are absent"),
    ],
)
def test_rows_that_are_wrong_are_refused(writable: Path, column: str, row: int, value: Any, sentence: str) -> None:
    lerobot.edit_rows(writable / FIRST_DATA, lambda table: lerobot.set_value(table, column, row, value))
    with pytest.raises(DatasetError, match=sentence) as caught:
        decode(training(config(writable, cameras=[])), range(194))
    assert FIRST_DATA in str(caught.value)


# What ``rfstream check`` says


def found(root: Path, *, images: bool = True) -> dict[str, int]:
    report = check(str(root), images=images, progress=False)
    assert [part.images for part in report.parts] in ([FRAMES], [0])
    return {trait.name: trait.count for part in report.parts for trait in part.traits}


@pytest.mark.parametrize("name", ["ds_video", "ds_image"])
def test_nothing_is_odd_about_a_dataset_that_lerobot_wrote(datasets: Path, name: str) -> None:
    assert found(datasets / name) == {}


def test_check_finds_what_training_would_stop_at(writable: Path, damaged: Path) -> None:
    assert found(damaged) == {"undecodable-frame": 4}
    assert found(damaged, images=False) == {}
    (writable / FIRST_VIDEO).unlink()
    lerobot.edit_rows(
        writable / "data/chunk-001/file-000.parquet", lambda t: lerobot.set_value(t, "timestamp", 87, 0.0)
    )
    assert found(writable) == {"unreadable-episode": 4}  # the three of that video, and the one of that row
    lerobot.edit_info(writable, total_episodes=13)
    assert found(writable) == {"bad-metadata": 1}


# Frames that can't be decoded


@pytest.fixture
def damaged(writable: Path) -> Path:
    """``ds_video`` with zeros in the place of frames 20 to 23 of episode 0 in its front camera."""
    steps = reader_of(training(config(writable, cameras=[FRONT])).reader).read(np.array([20, 22]))
    data = bytearray((writable / FIRST_VIDEO).read_bytes())
    for step in steps:
        run = step.shots[0][0].source
        data[run.offset : run.offset + int(run.size.sum())] = bytes(int(run.size.sum()))
    (writable / FIRST_VIDEO).write_bytes(data)
    return writable


def test_a_frame_that_can_not_be_decoded_is_named(damaged: Path) -> None:
    pipeline = training(config(damaged))
    with pytest.raises(SampleError) as caught:
        decode(pipeline, [20])
    said = str(caught.value)
    assert "\n" not in said
    for part in (FIRST_VIDEO, str(damaged), "episode 0, frame 20", FRONT, "0.667 s"):
        assert part in said
    decode(training(config(damaged, cameras=[WRIST])), [20])


def test_nothing_of_a_frame_that_can_not_be_decoded_is_kept(damaged: Path) -> None:
    pipeline = training(config(damaged, cameras=[FRONT]))
    decoder = pipeline.decode.build()
    (step,) = reader_of(pipeline.reader).read(np.array([20]))
    run = weakref.ref(step.shots[0][0].source)
    for _ in range(2):
        with pytest.raises(SampleError, match="episode 0, frame 20"):
            decoder.sample(step, 0)
    del step
    gc.collect()
    assert run() is None


def test_a_bit_that_turned_is_rarely_taken_for_a_picture(datasets: Path) -> None:
    pipeline, draw = training(config(datasets / "ds_video", cameras=[FRONT])), np.random.default_rng(0)
    other = 0
    for step in reader_of(pipeline.reader).read(draw.permutation(FRAMES)[:100]):
        shot = step.shots[0][0]
        data = bytearray(shot.source.data)
        data[draw.integers(len(data))] ^= 1 << draw.integers(8)
        (plain,) = VideoDecoder().frames(replace(shot.source, wanted=frozenset([shot.pts]))).values()
        (turned,) = VideoDecoder().frames(replace(shot.source, wanted=frozenset([shot.pts]), data=bytes(data))).values()
        other += not isinstance(turned, str) and not np.array_equal(turned.to_ndarray(), plain.to_ndarray())
    assert other < 15  # 41 where FFmpeg may conceal what it sees


def test_a_damaged_frame_is_no_harm_to_those_before_it(datasets: Path, writable: Path) -> None:
    frames = lerobot.video_frames(datasets / "ds_video" / FIRST_VIDEO)
    lerobot.encode(writable / FIRST_VIDEO, frames, "libx264", g="250", bf="0")
    pipeline = training(config(writable, cameras=[FRONT], stream={"on_bad_sample": "replace"}))
    good = decode(pipeline, [10])[FRONT]
    (step,) = reader_of(pipeline.reader).read(np.array([40]))
    run = step.shots[0][0].source
    data = bytearray((writable / FIRST_VIDEO).read_bytes())
    end = run.offset + len(run.data)
    data[end - int(run.size[-1]) : end] = bytes(int(run.size[-1]))
    (writable / FIRST_VIDEO).write_bytes(data)
    batch = decode(pipeline, [10, 40, 63], policy=True)
    assert batch.keys[0] == "000000-000010"
    assert torch.equal(batch[FRONT][:1], good)
    assert not {"000000-000040", "000000-000063"} & set(batch.keys)


def test_a_frame_that_can_not_be_decoded_is_replaced(datasets: Path, damaged: Path) -> None:
    whole, broken = (
        training(config(root, stream={"on_bad_sample": "replace"}, cameras=[FRONT]))
        for root in (datasets / "ds_video", damaged)
    )
    rows = np.array([19, 20, 24])
    batch, expected = decode(broken, rows, policy=True), decode(whole, rows)
    assert [key == own for key, own in zip(batch.keys, expected.keys, strict=True)] == [True, False, True]
    assert torch.equal(batch[FRONT][[0, 2]], expected[FRONT][[0, 2]])
    number = int(batch["index"][1])
    assert torch.equal(batch[FRONT][1], decode(whole, [number])[FRONT][0])
