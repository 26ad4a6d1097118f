"""Train from a configuration: `python pipelines/train.py --config configs/train/demo.yaml [section.key=value ...]`.

The same file runs by itself, under `torchrun`, and as `ray job submit -- python pipelines/train.py ...`; the key
`train.launcher` says which.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from rfstream import RFStreamError, load_config
from rfstream.train.run import train


def main(
    config: Annotated[str, typer.Option(help="YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value, applied over the file.")] = None,
) -> None:
    """Train a detector on a packed dataset."""
    try:
        metrics = train(load_config(config, overrides or []))
    except RFStreamError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    if os.environ.get("RANK", "0") == "0":
        typer.echo("  ".join(f"{name}={value:.4g}" for name, value in sorted(metrics.items())))


if __name__ == "__main__":
    typer.run(main)
