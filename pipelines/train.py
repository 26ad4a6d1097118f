"""Train from a configuration: `python pipelines/train.py --config configs/train/demo.yaml [section.key=value ...]`.

The same file runs by itself, under `torchrun`, and as `ray job submit -- python pipelines/train.py ...`; the key
`train.launcher` says which. With `--dummy` it only loads the data.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from rfstream import RFStreamError, load_config
from rfstream.train.run import train, without_model

Dummy = Annotated[bool, typer.Option("--dummy", help="Only load the data, and log samples a second.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="section.key=value, applied over the file.")]


def main(
    config: Annotated[str, typer.Option(help="YAML file.")], dummy: Dummy = False, overrides: Overrides = None
) -> None:
    """Train a model on a packed dataset, or on robotics episodes."""
    try:
        loaded = load_config(config, overrides or [])
        metrics = train(without_model(loaded) if dummy else loaded)
    except RFStreamError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    if os.environ.get("RANK", "0") == "0":
        typer.echo("  ".join(f"{name}={value:.4g}" for name, value in sorted(metrics.items())))


if __name__ == "__main__":
    typer.run(main)
