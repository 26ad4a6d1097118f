"""Train a small policy on robotics episodes: `python pipelines/train_episodes.py data.path=DATASET [key=value ...]`.

It is `pipelines/train.py` with the configuration of episodes: the same launchers, and `--dummy` to only load the data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from train import Dummy, Overrides
from train import main as train

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "train" / "episodes.yaml"


def main(
    config: Annotated[str, typer.Option(help="YAML file.")] = str(CONFIG),
    dummy: Dummy = False,
    overrides: Overrides = None,
) -> None:
    """Train a policy by behaviour cloning on a LeRobot v3 dataset."""
    train(config, dummy, overrides)


if __name__ == "__main__":
    typer.run(main)
