"""``rfstream ...``: the command line. One sentence and exit status 1 for whatever a user can put right."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from rfstream.config import load_config
from rfstream.dataset.pack import pack
from rfstream.errors import ConfigError, DatasetError, RFStreamError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
app.command(help="Pack a COCO, YOLO or Pascal VOC dataset into shards that rfstream trains from: tar, or Parquet.")(
    pack
)

ConfigFile = Annotated[Path, typer.Argument(help="YAML configuration.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value ...")]


@app.command()
def index(
    path: Annotated[
        str,
        typer.Argument(
            help="Folder of a pack without tables; with --output a folder or pattern of tars or Parquet files."
        ),
    ],
    split: Annotated[str, typer.Argument(help="Split to index.")],
    output: Annotated[
        str | None, typer.Option(help="Index tars or Parquet of PATH that others wrote, and write what they need here.")
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            help="What they call otherwise, by comma: 'image=img,objects.bbox=o.box'; of tars 'image=left.jpg'."
        ),
    ] = None,
    names: Annotated[str | None, typer.Option(help="JSON file that names the categories of tars.")] = None,
) -> None:
    """Write the sample and fragment tables of a pack that has none, or the index of shards that others wrote."""
    if output is None and columns is None and names is None:
        from rfstream.dataset.pack import index_pack

        index_pack(path, split)
        return
    if output is None:
        raise DatasetError(
            "--columns and --names are for shards that others wrote: name a folder for their index with --output"
        )
    from rfstream.dataset.foreign import index_foreign

    pairs = [part.partition("=") for part in (columns or "").split(",") if part]
    index = index_foreign(path, split, output, {name.strip(): column.strip() for name, _, column in pairs}, names)
    elsewhere = "" if index.shards_at == output else f" data.shards={index.shards_at}"
    typer.echo(f"{index.num_samples} samples in {len(index.shards)} files: data.path={output}{elsewhere}")


@app.command()
def check(
    path: Annotated[str, typer.Argument(help="Folder of a dataset or a pack, or a COCO file.")],
    html: Annotated[Path | None, typer.Option(help="Write the report to this HTML file too.")] = None,
    images: Annotated[bool, typer.Option(help="Decode every image.")] = True,
    strict: Annotated[bool, typer.Option(help="Exit with status 1 for warnings too.")] = False,
) -> None:
    """Say what is odd about a dataset or a pack; exit with status 1 if training would refuse it or be wrong."""
    from rich.console import Console

    from rfstream.dataset import storage
    from rfstream.tools.check import check as look
    from rfstream.tools.check_report import html_report, print_report

    report = look(path, images=images)
    print_report(report, Console())
    if html is not None:
        with storage.replacing(str(html)) as file:
            file.write(html_report(report).encode("utf-8", "replace"))
    if not report.passed(strict):
        raise typer.Exit(1)


@app.command()
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks to plan for.")] = 1,
    read_mb_s: Annotated[
        float | None, typer.Option(min=0.001, help="MB/s that storage gives all readers together, if known.")
    ] = None,
) -> None:
    """Say what a run will do, before it is paid for."""
    from rich.console import Console

    from rfstream.tools.report import plan_report

    known = {} if read_mb_s is None else {"read_bytes_per_s": read_mb_s * 1e6}
    Console().print(plan_report(load_config(config, overrides or ()), world_size, **known))


@app.command()
def ledger(
    config: ConfigFile,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Parquet file to write.")] = Path("ledger.parquet"),
    epochs: Annotated[int, typer.Option(min=1, help="Epochs to record.")] = 1,
    actors: Annotated[int | None, typer.Option(min=1, help="Decode actors, in place of decode.actors.")] = None,
    world_size: Annotated[int, typer.Option(min=1, help="Ranks to stream to.")] = 1,
) -> None:
    """Stream the training split and record every sample's place, pixels and targets."""
    from rfstream.tools.ledger import make_ledger, write_ledger

    pool = [f"decode.actors=[{actors},{actors}]"] if actors else []
    table = make_ledger(load_config(config, [*(overrides or ()), *pool]), epochs=epochs, world_size=world_size)
    write_ledger(table, out)
    typer.echo(f"{len(table)} samples of {epochs} epochs in {out}")


@app.command()
def verify(
    first: Annotated[Path, typer.Argument(help="A ledger.")],
    second: Annotated[Path, typer.Argument(help="Another.")],
) -> None:
    """Compare two ledgers by position; exit with status 1 and the first difference if they differ."""
    from rfstream.tools.ledger import first_difference, read_ledger

    difference = first_difference(read_ledger(first), read_ledger(second))
    if difference is not None:
        typer.echo(f"{first} and {second} differ at {difference}", err=True)
        raise typer.Exit(1)
    typer.echo("equal: the same samples, pixels and targets at every position")


@app.command(context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def bench(
    context: typer.Context,
    table: Annotated[str, typer.Argument(help="What to measure: a script of benchmarks/, as loaders.")],
) -> None:
    """Measure: run a script of the repository's benchmarks/ with the arguments that follow."""
    folder = Path(__file__).resolve().parents[1] / "benchmarks"
    scripts = {file.stem: file for file in sorted(folder.glob("*.py")) if "__main__" in file.read_text()}
    if table not in scripts:
        there = ", ".join(scripts) or "none: they come with the repository, not with the package"
        raise ConfigError(f"no table {table!r} in benchmarks/ beside the package (there: {there})")
    raise typer.Exit(subprocess.run([sys.executable, str(scripts[table]), *context.args]).returncode)


def main() -> None:
    """Run the command line."""
    sys.path.insert(0, "")  # transforms and models named by import path may lie where the command is run
    try:
        app()
    except RFStreamError as error:
        typer.echo(f"rfstream: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
