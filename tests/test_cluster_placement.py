"""Decode stays off the GPU nodes: seen on a real Ray cluster of three nodes, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

import rfstream
from rfstream.session import start_again_if_late
from rfstream.tools.scenes import make_scenes

STORE = 200_000_000


def slow() -> Any:
    """A transform that takes long enough for the pool to grow."""

    def wait(image: Any, target: Any, rng: Any) -> Any:
        time.sleep(0.05)
        return image, target

    return wait


def main(folder: Path) -> None:
    """Print, as JSON, the role of the node that each decode actor ran on."""
    cluster = Cluster()
    nodes: list[dict[str, Any]] = [
        {"num_cpus": 0},
        {"num_cpus": 1, "num_gpus": 1},
        {"num_cpus": 3, "labels": {"ray-subcluster": "decode"}},
    ]
    for node in nodes:
        start_again_if_late(partial(cluster.add_node, object_store_memory=STORE, **node))
    ray.init(address=cluster.address, log_to_driver=False)
    make_scenes(folder / "coco", train=400, val=1, seed=0)
    rfstream.pack(str(folder / "coco"), str(folder / "pack"), progress=False)
    config = rfstream.Config(
        data={"path": str(folder / "pack")},
        stream={"batch_size": 4, "timeout_s": 300},
        augment={"cpu": {"transform": "test_cluster_placement:slow"}},
        decode={"actors": [1, 3], "label_selector": {"ray-subcluster": "decode"}},
    )
    with rfstream.ray_loader(config) as loader:
        batches = sum(1 for _ in loader)
        actors = [a for a in ray._private.state.actors().values() if a["ActorClassName"].startswith("MapWorker")]
    roles = {n["NodeID"]: "decode" if "ray-subcluster" in n["Labels"] else "other" for n in ray.nodes()}
    print(json.dumps({"batches": batches, "roles": [roles[a["Address"]["NodeID"]] for a in actors]}))
    ray.shutdown()
    cluster.shutdown()


def test_decode_actors_run_on_labelled_nodes_alone(tmp_path: Path) -> None:
    command = [sys.executable, __file__, str(tmp_path)]
    modules = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": modules}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["batches"] == 100
    assert set(seen["roles"]) == {"decode"}
    assert len(seen["roles"]) > 1, "the pool must grow by the decode node's CPUs, not by the GPU node's one"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
