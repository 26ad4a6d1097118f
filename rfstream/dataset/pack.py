"""COCO, YOLO and Pascal VOC folders -> shards, index and tables, one Ray task a shard."""

from __future__ import annotations

import logging
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from rfstream.dataset import coco, storage
from rfstream.dataset.document import SplitSource
from rfstream.dataset.index import CategoryIds, PackFormat, SplitIndex, check_split, read_index
from rfstream.dataset.layouts import Layout, SplitFiles, find_splits, read_split
from rfstream.dataset.parquet_shards import write_parquet_shard
from rfstream.dataset.publish import describe_pack, publish, publish_remote, remove_dead, staging
from rfstream.dataset.scan import scan
from rfstream.dataset.shard_plan import ShardPlan, plan_shards
from rfstream.dataset.shards import WrittenShard, write_shard
from rfstream.dataset.tables import write_tables
from rfstream.errors import DatasetError

MAX_SHARD_BYTES = 100 * 1024 * 1024
_SCAN_THREADS = 8
_logger = logging.getLogger("rfstream")
_CANCEL_SECONDS = 30.0  # how long to wait for running tasks to stop when one has failed


@dataclass(frozen=True)
class _Measured:
    """What a shard will be: all but its bytes, and how many these are."""

    shard: WrittenShard
    nbytes: int


T = TypeVar("T")
_Job = tuple[int, ShardPlan]  # number of the split, and a shard of it
_Staged = tuple[str, dict[str, Any], list[WrittenShard]]  # generation, index and shards of a split


def pack(
    source: Annotated[str, typer.Argument(help="Folder of a COCO, YOLO or Pascal VOC dataset.")],
    output: Annotated[str, typer.Argument(help="Folder or fsspec URL to write the pack to.")],
    *,
    splits: Annotated[
        str | None,
        typer.Option(help="Splits, by comma: 'train,valid:val' packs valid as val. Default: all found, valid as val."),
    ] = None,
    layout: Annotated[Layout | None, typer.Option(help="Layout of SOURCE; default: the one that it has.")] = None,
    annotations: Annotated[
        str | None,
        typer.Option(help="COCO file, for a layout that is not found by itself; several, by comma, make one split."),
    ] = None,
    images: Annotated[
        str | None,
        typer.Option(help="Image folder of --annotations, or one for each file, by comma; default: SOURCE."),
    ] = None,
    max_shard_bytes: Annotated[int, typer.Option(help="A shard ends with the sample that reaches this size.")] = (
        MAX_SHARD_BYTES
    ),
    category_ids: Annotated[
        CategoryIds, typer.Option(help="Labels: 'remap' numbers the categories 0, 1, ...; 'raw' keeps their ids.")
    ] = "remap",
    format: Annotated[
        PackFormat,
        typer.Option(help="Shards: 'tar', as RF-DETR reads, or 'parquet', as `datasets` reads."),
    ] = "tar",
    shuffle_seed: Annotated[int | None, typer.Option(help="Pack in an order shuffled with this seed.")] = None,
    clean: Annotated[
        bool, typer.Option(help="Afterwards remove from OUTPUT what no index there names any more.")
    ] = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> list[SplitIndex]:
    """Pack a COCO, YOLO or Pascal VOC dataset into shards that rfstream trains from: tar, or Parquet.

    Everything is checked before anything is written, and nothing is published unless all splits were written. Equal
    input gives equal bytes, whatever the number of CPUs. A Ray cluster that runs is used, else a local one is started;
    its nodes must see both folders.

    Returns:
        The index of each split, in the order packed.

    Raises:
        DatasetError: on the first thing in the source that training could not use.
    """
    if max_shard_bytes <= 0:
        raise DatasetError(f"max_shard_bytes is {max_shard_bytes}; give a positive number of bytes")
    chosen = _choose(_folder(source), layout, splits, annotations, images)
    sources = [read_split(files, category_ids) for files in chosen]
    plans = [plan_shards(split, max_shard_bytes, format, shuffle_seed) for split in sources]
    if storage.local_path(output) is None:
        indexes = _pack_remote(output, sources, plans, category_ids, format, progress)
    else:
        destination = _folder(output)
        with staging(destination) as folder:
            written = _each_shard(_write, lambda job: (str(folder), job[1].loaded()), plans, "packing", progress)
            staged = _described(sources, written, category_ids, format)
            indexes = [publish(destination, folder, *one) for one in staged]
    if clean:
        remove_dead(output)
    return indexes


def _pack_remote(
    url: str,
    sources: Sequence[SplitSource],
    plans: Sequence[Sequence[ShardPlan]],
    category_ids: CategoryIds,
    format: PackFormat,
    progress: bool,
) -> list[SplitIndex]:
    """Write each shard twice: to know the digest that goes into its name, and to upload it under that name.

    No shard stays on a local disk meanwhile. One that is there under its name, with its size, was uploaded by a run
    that did not end: the name says what is in it, and it appeared as a whole.
    """
    there = storage.sizes_in(url)
    measured = _each_shard(_measure, lambda job: (job[1].loaded(),), plans, "reading", progress)
    staged = _described(sources, [[one.shard for one in of_split] for of_split in measured], category_ids, format)
    missing = [
        [plan for plan in of_split if there.get(index["shards"][plan.number]) != sizes[plan.number].nbytes]
        for of_split, sizes, (_, index, _) in zip(plans, measured, staged, strict=True)
    ]

    def arguments(job: _Job) -> tuple[str, str, ShardPlan]:
        _, index, shards = staged[job[0]]
        number = job[1].number
        return storage.join(url, index["shards"][number]), shards[number].digest, job[1].loaded()

    _each_shard(_upload, arguments, missing, "uploading", progress)
    return [publish_remote(url, *one) for one in staged]


def _described(
    sources: Sequence[SplitSource],
    written: Sequence[list[WrittenShard]],
    category_ids: CategoryIds,
    format: PackFormat,
) -> list[_Staged]:
    """What is to be published of each split; warns of what its images have."""
    _warn_of_turned([name for of_split in written for shard in of_split for name in shard.turned])
    return [
        (*describe_pack(s.split, s.categories, s.annotated_category_ids, category_ids, shards, format), shards)
        for s, shards in zip(sources, written, strict=True)
    ]


def _warn_of_turned(files: Sequence[str]) -> None:
    if files:
        _logger.warning(
            "%d images are stored turned (EXIF orientation), and their annotations are for them as they are shown, %s "
            "for one: train with decode.exif=transpose, or boxes and pixels do not match",
            len(files),
            files[0],
        )


def _folder(name: str) -> Path:
    """The local folder that ``name`` names, absolute, since tasks have working folders of their own."""
    local = storage.local_path(name)
    if local is None:
        raise DatasetError(f"{name}: pack from a local or mounted folder")
    return local.absolute()


def _choose(
    source: Path, layout: Layout | None, splits: str | None, annotations: str | None, images: str | None
) -> list[SplitFiles]:
    """The splits to pack, under the names they shall have in the pack."""
    pairs = [] if splits is None else [_pair(part) for part in splits.split(",")]
    if annotations is not None:
        if len(pairs) != 1:
            raise DatasetError("--annotations names one file: give the one name that it shall have with --splits")
        if layout not in (None, "coco"):
            raise DatasetError(f"--annotations names a COCO file: leave --layout {layout} out")
        return [_named(source, pairs[0][1], annotations.split(","), images.split(",") if images else [str(source)])]
    if images is not None:
        raise DatasetError("--images goes with --annotations: name the annotation file too")
    found = find_splits(source, layout)
    # Roboflow says valid; what trains from a pack, RF-DETR too, asks for val.
    pairs = pairs or [(name, "val" if name == "valid" and "val" not in found else name) for name in found]
    absent = [name for name, _ in pairs if name not in found]
    if absent:
        raise DatasetError(f"{source}: has no split {absent[0]!r}; it has {', '.join(sorted(found))}")
    names = [check_split(name) for _, name in pairs]
    if len(set(names)) != len(names):
        raise DatasetError(f"splits {splits!r}: two splits would have the same name in the pack")
    return [replace(found[at], split=name) for at, name in pairs]


def _named(source: Path, split: str, annotations: list[str], images: list[str]) -> coco.SplitFiles:
    """The split of COCO files that are named one by one."""
    folders = images * len(annotations) if len(images) == 1 else images
    if len(folders) != len(annotations):
        raise DatasetError(
            f"--images names {len(images)} folders for {len(annotations)} files of --annotations: name one for all, "
            "or one for each"
        )
    first, *further = [(Path(file), Path(folder).absolute()) for file, folder in zip(annotations, folders, strict=True)]
    return coco.SplitFiles(split, *first, tuple(further))


def _pair(part: str) -> tuple[str, str]:
    """``"valid:val"`` -> on disk ``valid``, in the pack ``val``."""
    on_disk, _, name = part.strip().partition(":")
    return check_split(on_disk), check_split(name or on_disk)


def _each_shard(
    task: Callable[..., T],
    arguments: Callable[[_Job], tuple[Any, ...]],
    plans: Sequence[Sequence[ShardPlan]],
    doing: str,
    progress: bool,
) -> list[list[T]]:
    """Run ``task`` for every shard of every split; returns what they return in order, split by split."""
    jobs = [(split, plan) for split, of_split in enumerate(plans) for plan in of_split]
    done: dict[tuple[int, int], T] = {}
    columns = (
        TextColumn(doing),
        BarColumn(),
        TextColumn("{task.fields[images]}/{task.fields[of]} images"),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, disable=not progress) as bar:
        images = 0
        total = sum(len(plan.items) for _, plan in jobs)
        shown = bar.add_task("", total=sum(plan.nbytes for _, plan in jobs), images=0, of=total)
        for (split, plan), result in _run(task, arguments, jobs):
            done[split, plan.number] = result
            images += len(plan.items)
            bar.update(shown, advance=plan.nbytes, images=images)
    return [[done[split, plan.number] for plan in of_split] for split, of_split in enumerate(plans)]


def _run(
    task: Callable[..., T], arguments: Callable[[_Job], tuple[Any, ...]], jobs: Sequence[_Job]
) -> Iterator[tuple[_Job, T]]:
    """Run one task a shard, at most two a CPU at a time; yields each job with its result as it ends."""
    import ray

    from rfstream.session import ensure_ray

    ensure_ray()
    remote = ray.remote(task)
    at_once = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
    waiting = iter(jobs)
    running = {remote.remote(*arguments(job)): job for job in islice(waiting, at_once)}
    try:
        while running:
            (ref,), _ = ray.wait(list(running), num_returns=1)
            job = running.pop(ref)
            yield job, _result(ref, job[1])
            running.update({remote.remote(*arguments(job)): job for job in islice(waiting, 1)})
    finally:
        for ref in running:
            ray.cancel(ref)
        if running:
            ray.wait(list(running), num_returns=len(running), timeout=_CANCEL_SECONDS)


def _write(folder: str, plan: ShardPlan) -> WrittenShard:
    """The task. Each attempt writes a file of its own, so a retry never meets what a lost worker still writes."""
    path = Path(folder) / uuid.uuid4().hex
    if plan.convention is None:
        return write_shard(path.with_suffix(".tar"), plan.number, plan.first, plan.items)
    return write_parquet_shard(path.with_suffix(".parquet"), plan.number, plan.first, plan.items, plan.convention)


def _measure(plan: ShardPlan) -> _Measured:
    """The task that writes a shard to know its digest."""
    with tempfile.TemporaryDirectory(prefix="rfstream-pack-") as folder:
        shard = _write(folder, plan)
        return _Measured(shard, (Path(folder) / shard.file).stat().st_size)


def _upload(url: str, digest: str, plan: ShardPlan) -> None:
    """The task that writes a shard to upload it."""
    with tempfile.TemporaryDirectory(prefix="rfstream-pack-") as folder:
        shard = _write(folder, plan)
        if shard.digest != digest:
            raise DatasetError(f"{url}: an image of it changed while it was packed; pack again")
        storage.upload(Path(folder) / shard.file, url)


def _result(ref: Any, plan: ShardPlan) -> Any:
    import ray

    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, DatasetError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError as error:
        reason = str(error).splitlines()[0]
        raise DatasetError(f"shard {plan.number} was lost with its worker ({reason}); pack again") from error


def index_pack(path: str, split: str) -> SplitIndex:
    """Write the sample and fragment tables of a packed split that has none, such as one that RF-DETR packed.

    Of tar shards only the headers and the JSON members are read; Parquet shards are read through. The tables appear
    whole or not at all.

    Args:
        path: folder or fsspec URL of the pack.
        split: name of the split.

    Returns:
        The split's index.

    Raises:
        DatasetError: if index or shards are damaged, or contradict each other.
    """
    index = read_index(path, split)
    if index.columns is not None:
        raise DatasetError(f"{path}: split {split!r} has shards that rfstream did not write; {index.reindex}")
    with ThreadPoolExecutor(_SCAN_THREADS) as pool:
        shards = list(pool.map(lambda i: scan(index, i), range(len(index.shards))))
    counts = [len(samples) for samples, _ in shards]
    expected = list(index.samples_per_shard) or counts
    wrong = next((i for i, (a, b) in enumerate(zip(counts, expected, strict=True)) if a != b), None)
    if wrong is not None:
        raise DatasetError(
            f"{index.shard_url(wrong)}: holds {counts[wrong]} samples, the index says {expected[wrong]}; "
            "copy or pack it again"
        )
    if sum(counts) != index.num_samples:
        raise DatasetError(
            f"{index.path}: the shards of {split!r} hold {sum(counts)} samples, the index says {index.num_samples}; "
            "copy or pack them again"
        )
    write_tables(index.path, split, index.generation, shards)
    return index
