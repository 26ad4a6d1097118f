"""LeRobot's own readers, timed for ``benchmarks/episodes.py`` by a Python that has LeRobot and need not have rfstream.

    python benchmarks/lerobot_reader.py map ARGUMENTS

ARGUMENTS is a JSON object: the keyword arguments of :func:`read`. The last line is its result, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.datasets.streaming_dataset import StreamingLeRobotDataset
from torch.utils.data import DataLoader

NAME = "generated/episodes"


def read(
    kind: str,
    root: str,
    deltas: dict[str, list[float]],
    batch_size: int,
    workers: int,
    buffer: int,
    seconds: float,
    warm_up: int,
) -> dict[str, Any]:
    """When each batch came, seconds after the dataset was opened, until ``seconds`` after ``warm_up`` batches."""
    began = time.perf_counter()
    if kind == "map":
        dataset: Any = LeRobotDataset(NAME, root=root, delta_timestamps=deltas or None)
    else:
        dataset = StreamingLeRobotDataset(NAME, root=root, delta_timestamps=deltas or None, buffer_size=buffer)
    # As LeRobot's training script makes it.
    loader = DataLoader(dataset, batch_size, shuffle=kind == "map" or None, num_workers=workers, prefetch_factor=2)
    arrivals: list[float] = []
    for _ in loader:
        arrivals.append(time.perf_counter() - began)
        if len(arrivals) > warm_up and arrivals[-1] - arrivals[warm_up] >= seconds:
            break
    return {"arrivals": arrivals}


if __name__ == "__main__":
    print(json.dumps(read(sys.argv[1], **json.loads(sys.argv[2]))))
