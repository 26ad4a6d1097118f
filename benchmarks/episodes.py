"""Robotics episodes: the stream against pure decoding of its packets and LeRobot's own readers, and over a slow line.

    python benchmarks/episodes.py compare DATA --lerobot-python VENV/bin/python
    python benchmarks/episodes.py storage DATA

DATA is a folder for the generated datasets (see ``lerobot_dataset.py``); those that are there are used again. Readers
run in turn, each in a process of its own, with as many workers as the stream has decode actors.

frames/s counts what is delivered: each step of each camera's window of each sample, padding too. p50 to p99 are the
latency of a sample: the time between two batches through the samples of one, as a training loop sees it that takes all
it gets; pure decoding has none. ``first`` is the first batch, imports apart; packets and decoders are those of a
delivered frame. Memory is the most that all of a reader's processes had: RSS counts what they share once for each, PSS
once in all; ``stream`` is the object store and all actors, of which ``rfstream plan`` speaks.

LeRobot is measured where ``--lerobot-python`` names a Python that has it, and TorchCodec finds FFmpeg's libraries
(``LD_LIBRARY_PATH``). Its streaming reader takes a frame's place in the dataset for its place in the file, and fails
where a camera has more than one: ``--per-file`` with all episodes is what it can read.
"""

from __future__ import annotations

import csv
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import fsspec
import matplotlib.pyplot as plt
import numpy as np
import typer
from bad_storage import BadStorage, Line
from common import RESULTS, in_turn, report
from gcp_storage_emulator.server import create_server
from lerobot_dataset import Recipe, make_dataset
from processes import ReaderError, run

WARM_UP = 10
"""Batches before the clock starts."""
LINE = Line(latency_s=0.03, bytes_per_s=100e6)
BUCKET = "episodes"
SARM = [float(second) for second in range(-7, 1)]
"""Eight steps a second apart."""
BATCH_SIZE = {"single": 16, "sarm": 4}
"""By mode: one frame a sample, or windows of :data:`SARM`, of which 16 samples would be 350 MB."""
RECIPES = {
    "av1-gop2": Recipe(),
    "h264-gop250": Recipe(codec="h264", gop=250, b_frames=3, lengths=(250, 300)),
}
Figures = dict[str, float]
Readings = dict[str, dict[str, list[float]]]
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)
Data = Annotated[Path, typer.Argument(help="folder of the generated datasets")]
Datasets = Annotated[list[str], typer.Option("--dataset", help="which of them")]
Episodes = Annotated[int, typer.Option(help="of each dataset, where it is not there yet")]


def dataset_of(data: Path, name: str, episodes: int, per_file: int) -> tuple[Path, Recipe]:
    """The dataset in a folder that names what differs from the recipe."""
    recipe = replace(RECIPES[name], episodes=episodes, per_file=per_file)
    root = data / f"{name}-{episodes}-{per_file}"
    if not root.is_dir():
        part = data / f"{root.name}.part"
        shutil.rmtree(part, ignore_errors=True)  # of a run that was interrupted
        make_dataset(part, recipe).rename(root)
    return root, recipe


def deltas_of(mode: str, recipe: Recipe) -> dict[str, list[float]]:
    return {} if mode == "single" else dict.fromkeys([*recipe.names(), "observation.state"], SARM)


def config_of(
    root: str, deltas: dict[str, list[float]], batch_size: int, actors: int, pool_size: int = 16
) -> dict[str, Any]:
    return {
        "data": {"path": root, "format": "lerobot"},
        "stream": {"batch_size": batch_size},
        "decode": {"actors": [actors, actors]},
        "episodes": {"delta_timestamps": deltas, "pool_size": pool_size},
    }


def figures(arrivals: list[float], first: int, batch_size: int, frames: int) -> Figures:
    """Of batches that came at ``arrivals``, from batch ``first`` on, each of whose samples has ``frames``."""
    gaps = np.diff(arrivals[first:])
    if not len(gaps):
        raise ReaderError(f"it gave no more than {len(arrivals)} batches")
    rate = float(batch_size / gaps.mean())
    latencies = np.percentile(gaps / batch_size * 1000, [50, 95, 99])
    named = zip(("p50", "p95", "p99"), latencies.tolist(), strict=True)
    return {
        "frames/s": rate * frames,
        **{f"{name}, ms": value for name, value in named},
        "first, s": arrivals[0],
    }


# Against other readers


@app.command()
def compare(
    data: Data,
    datasets: Datasets = list(RECIPES),  # noqa: B006
    modes: Annotated[list[str], typer.Option("--mode")] = list(BATCH_SIZE),  # noqa: B006
    episodes: Episodes = 200,
    per_file: Annotated[int, typer.Option(help="episodes of a video file")] = 50,
    actors: Annotated[int, typer.Option(help="decode actors, and workers of the others")] = 2,
    seconds: Annotated[float, typer.Option(help="how long each reader is measured")] = 60,
    repetitions: int = 3,
    buffer: Annotated[int, typer.Option(help="decoded samples that LeRobot's streaming reader shuffles")] = 16,
    lerobot_python: Annotated[str | None, typer.Option(help="a Python that has LeRobot")] = None,
) -> None:
    """The stream, pure decoding of its packets, and LeRobot's readers."""
    asked = Asked(actors, seconds, buffer, lerobot_python)
    rows: list[dict[str, Any]] = []
    for name in datasets:
        root, recipe = dataset_of(data, name, episodes, per_file)
        for mode in modes:
            rows += compared(name, mode, root, recipe, asked, repetitions)
    write_csv(rows, RESULTS / "episodes.csv")
    draw(rows, RESULTS / "episodes.png")


@dataclass(frozen=True)
class Asked:
    actors: int
    seconds: float
    buffer: int
    lerobot_python: str | None


def compared(name: str, mode: str, root: Path, recipe: Recipe, asked: Asked, repetitions: int) -> list[dict[str, Any]]:
    """Measure all readers on one dataset, report, and give a row a reading."""
    deltas, batch_size = deltas_of(mode, recipe), BATCH_SIZE[mode]
    config = config_of(str(root), deltas, batch_size, asked.actors)
    frames = recipe.cameras * (len(SARM) if deltas else 1)
    failures: dict[str, str] = {}
    variants = variants_of(root, deltas, config, frames, asked)
    tried = {reader: partial(attempt, reader, measure, failures) for reader, measure in variants.items()}
    readings = {reader: values for reader, values in in_turn(tried, repetitions).items() if values}
    bounds = run(sys.executable, "episode_readers.py", "announce", {"config": config})
    announced = (bounds["store"] + asked.actors * bounds["actor"]) / 1e6
    setting = {"recipe": vars(recipe), "deltas": deltas, "failures": failures, "announced, MB": announced}
    setting |= {"batch_size": batch_size, "actors": asked.actors, "seconds": asked.seconds}
    report(f"episodes {name} {mode}: {frames} frames a sample, batch {batch_size}", readings, setting)
    typer.echo(f"rfstream plan announces {announced:.0f} MB of object store and actors")
    for reader, why in failures.items():
        typer.echo(f"{reader} failed: {why}")
    return table_rows(f"{name}, {mode}", readings)


def variants_of(
    root: Path, deltas: dict[str, list[float]], config: dict[str, Any], frames: int, asked: Asked
) -> dict[str, Callable[[], Figures]]:
    variants: dict[str, Callable[[], Figures]] = {
        "rfstream": partial(measure_stream, config, asked.seconds, frames),
        "pure decode": partial(measure_decode, config, asked.seconds, frames),
    }
    if asked.lerobot_python is None:
        return variants
    arguments = {
        "root": str(root),
        "deltas": deltas,
        "batch_size": config["stream"]["batch_size"],
        "workers": asked.actors,
        "buffer": asked.buffer,
        "seconds": asked.seconds,
        "warm_up": WARM_UP,
    }
    for kind, reader in (("map", "LeRobotDataset, DataLoader"), ("stream", "StreamingLeRobotDataset")):
        variants[reader] = partial(measure_lerobot, asked.lerobot_python, kind, arguments, frames)
    return variants


def attempt(name: str, measure: Callable[[], Figures], failures: dict[str, str]) -> Figures:
    """What is measured, or nothing where the reader fails; then it isn't tried again."""
    if name in failures:
        return {}
    try:
        return measure()
    except ReaderError as error:
        failures[name] = str(error)
        return {}


def memory_of(found: dict[str, Any]) -> Figures:
    return {f"{kind}, MB": found[kind] / 1e6 for kind in ("RSS", "PSS")}


def measure_stream(config: dict[str, Any], seconds: float, frames: int) -> Figures:
    found = run(
        sys.executable, "episode_readers.py", "stream", {"config": config, "seconds": seconds, "warm_up": WARM_UP}
    )
    actors = config["decode"]["actors"][1]
    return figures(found["arrivals"], WARM_UP, config["stream"]["batch_size"], frames) | {
        **memory_of(found),
        "stream, MB": (found["store bytes"] + actors * found["actor bytes"]) / 1e6,
    }


def measure_decode(config: dict[str, Any], seconds: float, frames: int) -> Figures:
    found = run(sys.executable, "episode_readers.py", "decode", {"config": config, "seconds": seconds})
    delivered = found["samples"] * frames
    return {
        "frames/s": found["samples/s"] * frames,
        **memory_of(found),
        "packets": found["packets"] / delivered,
        "decoders": found["decoders"] / delivered,
    }


def measure_lerobot(python: str, kind: str, arguments: dict[str, Any], frames: int) -> Figures:
    found = run(python, "lerobot_reader.py", kind, arguments)
    return figures(found["arrivals"], WARM_UP, arguments["batch_size"], frames) | memory_of(found)


# Over a slow line


@app.command()
def storage(
    data: Data,
    datasets: Datasets = ["av1-gop2"],  # noqa: B006
    episodes: Episodes = 200,
    batch_size: int = 16,
    actors: int = 2,
    pool_size: int = 16,
    repetitions: int = 3,
) -> None:
    """Two epochs from a local folder, and from a bucket whose every answer takes 30 ms, at 100 MB/s in all.

    Up to three pools are read ahead when an epoch ends, so one more or less of them counts to the second epoch: the
    share of a pool is how exact the bytes of an epoch are.
    """
    for name in datasets:
        root, recipe = dataset_of(data, name, episodes, per_file=50)
        size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
        config = partial(config_of, deltas={}, batch_size=batch_size, actors=actors, pool_size=pool_size)
        with bucket(root) as line:
            variants = {
                "local": partial(measure_epochs, config(str(root)), recipe.cameras, line, size),
                "bucket": partial(measure_epochs, config(f"gs://{BUCKET}/{root.name}"), recipe.cameras, line, size),
            }
            readings = in_turn(variants, repetitions)
        setting = {
            "recipe": vars(recipe),
            "batch_size": batch_size,
            "actors": actors,
            "pool_size": pool_size,
            "bytes": size,
        }
        report(f"episodes storage {name}: 30 ms a request, 100 MB/s", readings, setting)


def measure_epochs(config: dict[str, Any], frames: int, line: BadStorage, size: int) -> Figures:
    """Two epochs, from the second pool on; bytes fetched in each, in datasets, with what is read ahead of it."""
    line.sent = 0
    sent: list[int] = []
    arguments = {"config": config, "seconds": None, "warm_up": 0}
    found = run(sys.executable, "episode_readers.py", "stream", arguments, lambda: sent.append(line.sent))
    first, second, *_ = sent
    return figures(found["arrivals"], found["first_pool"], config["stream"]["batch_size"], frames) | {
        "epoch 1, bytes": first / size,
        "epoch 2, bytes": (second - first) / size,
    }


@contextmanager
def bucket(root: Path) -> Iterator[BadStorage]:
    """A Google Cloud Storage bucket on this machine that holds ``root``, and the slow line to it, for this process and
    those that it starts."""
    with create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET) as server:
        port = server._api._httpd.server_port
        with BadStorage(f"http://127.0.0.1:{port}") as line:
            os.environ |= {"STORAGE_EMULATOR_HOST": line.url, "FSSPEC_GS_TOKEN": "anon"}
            os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # gRPC, which the emulator does not speak
            fsspec.filesystem("gs", token="anon").put(str(root), f"{BUCKET}/{root.name}", recursive=True)
            line.line = LINE
            yield line


# What is kept


def table_rows(setting: str, readings: Readings) -> list[dict[str, Any]]:
    """A row a reading."""
    return [
        {"setting": setting, "reader": name, "repetition": i, **{figure: found[i] for figure, found in values.items()}}
        for name, values in readings.items()
        for i in range(len(next(iter(values.values()))))
    ]


def write_csv(rows: list[dict[str, Any]], file: Path) -> None:
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Frames a second and latencies of each reader, medians; a row of axes a setting."""
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    figure, axes = plt.subplots(
        len(settings), 2, figsize=(10, 2.2 * len(settings)), squeeze=False, layout="constrained"
    )
    for setting, (speed, latency) in zip(settings, axes, strict=True):
        of_setting = [row for row in rows if row["setting"] == setting]
        readers = list(dict.fromkeys(row["reader"] for row in of_setting))[::-1]

        def medians(figure: str, of: list[dict[str, Any]] = of_setting, by: list[str] = readers) -> list[float]:
            found = [[row[figure] for row in of if row["reader"] == reader and figure in row] for reader in by]
            return [statistics.median(values) if values else float("nan") for values in found]

        speed.barh(readers, medians("frames/s"))
        speed.set(title=f"{setting}: frames/s")
        for name, marker in (("p50", "o"), ("p95", "s"), ("p99", "x")):
            latency.plot(medians(f"{name}, ms"), readers, marker, label=name)
        latency.set(title="ms a sample, between batches", xlim=(0, None))
        latency.legend(fontsize=7)
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    app()
