"""The cluster files, checked with Ray's own readers and asked of Ray's own autoscaler: which nodes would it start?

KubeRay's custom resource definitions are not in any Python package, so the fields that the RayJob file uses are checked
against the models below (KubeRay v1.6, ``ray.io/v1``; pods after Kubernetes ``core/v1``), which refuse any other field.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingReply, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import GangResourceRequest, ResourceRequestByCount
from ray.core.generated.common_pb2 import LabelSelectorOperator

from rfstream.config import load_config
from rfstream.stream.augment import build_transform

CLUSTER = Path(__file__).parents[1] / "configs" / "cluster"
DOCS = CLUSTER.parents[1] / "docs" / "cluster.md"
SELECTOR = {"ray-subcluster": "decode"}


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Resources(Strict):
    requests: dict[str, str]
    limits: dict[str, str]


class Port(Strict):
    name: str
    container_port: int = Field(alias="containerPort", ge=1, le=65535)


class Container(Strict):
    name: str
    image: str
    ports: list[Port] = []
    resources: Resources


class Toleration(Strict):
    key: str
    operator: Literal["Equal", "Exists"]
    value: str
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]


class PodSpec(Strict):
    restart_policy: Literal["Never"] = Field(alias="restartPolicy")
    service_account_name: str = Field(alias="serviceAccountName")
    node_selector: dict[str, str] = Field(alias="nodeSelector", default={})
    tolerations: list[Toleration] = []
    containers: list[Container] = Field(min_length=1)


class PodTemplate(Strict):
    spec: PodSpec


class HeadGroup(Strict):
    ray_start_params: dict[str, str] = Field(alias="rayStartParams")
    template: PodTemplate


class WorkerGroup(HeadGroup):
    group_name: str = Field(alias="groupName")
    min_replicas: int = Field(alias="minReplicas", ge=0)
    max_replicas: int = Field(alias="maxReplicas", ge=1)
    labels: dict[str, str] = {}

    @model_validator(mode="after")
    def _ordered(self) -> WorkerGroup:
        if self.min_replicas > self.max_replicas:
            raise ValueError("minReplicas exceeds maxReplicas")
        return self


class AutoscalerOptions(Strict):
    version: Literal["v2"]
    idle_timeout_seconds: int = Field(alias="idleTimeoutSeconds", ge=1)


class RayClusterSpec(Strict):
    ray_version: str = Field(alias="rayVersion")
    enable_in_tree_autoscaling: Literal[True] = Field(alias="enableInTreeAutoscaling")
    autoscaler_options: AutoscalerOptions = Field(alias="autoscalerOptions")
    head_group_spec: HeadGroup = Field(alias="headGroupSpec")
    worker_group_specs: list[WorkerGroup] = Field(alias="workerGroupSpecs", min_length=1)


class RayJobSpec(Strict):
    entrypoint: str
    shutdown_after_job_finishes: bool = Field(alias="shutdownAfterJobFinishes")
    ttl_seconds_after_finished: int = Field(alias="ttlSecondsAfterFinished", ge=0)
    backoff_limit: int = Field(alias="backoffLimit", ge=0)
    ray_cluster_spec: RayClusterSpec = Field(alias="rayClusterSpec")


class Metadata(Strict):
    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,45}[a-z0-9])?$")


class RayJob(Strict):
    api_version: Literal["ray.io/v1"] = Field(alias="apiVersion")
    kind: Literal["RayJob"]
    metadata: Metadata
    spec: RayJobSpec


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((CLUSTER / name).read_text(encoding="utf-8"))


def gcp() -> dict[str, Any]:
    """gcp.yaml as `ray up` completes and validates it."""
    config = prepare_config(load("gcp.yaml"))
    validate_config(config)
    return config


def kuberay() -> dict[str, Any]:
    """kuberay-rayjob.yaml as the autoscaler in KubeRay's head pod reads and validates it."""
    job = load("kuberay-rayjob.yaml")
    cluster = {"metadata": {**job["metadata"], "namespace": "default"}, "spec": job["spec"]["rayClusterSpec"]}
    return _derive_autoscaling_config_from_ray_cr(cluster)


def request(resources: dict[str, float], selector: dict[str, str]) -> Any:
    constraints = [(key, LabelSelectorOperator.LABEL_OPERATOR_IN, [value]) for key, value in selector.items()]
    return ResourceRequestUtil.make(resources, label_selectors=[constraints] if constraints else None)


def ask(config: dict[str, Any], **demand: Any) -> SchedulingReply:
    """What Ray's autoscaler would do about ``demand`` on an empty cluster of ``config``."""
    autoscaling = AutoscalingConfig(config, skip_content_hash=True)
    return ResourceDemandScheduler().schedule(
        SchedulingRequest(
            disable_launch_config_check=True,
            node_type_configs=autoscaling.get_node_type_configs(),
            max_num_nodes=autoscaling.get_max_num_nodes(),
            **demand,
        )
    )


def launched(reply: SchedulingReply) -> Counter[str]:
    return Counter({launch.instance_type: launch.count for launch in reply.to_launch})


@pytest.mark.parametrize("config", [gcp, kuberay])
def test_decode_actors_start_only_decode_nodes(config: Any) -> None:
    pool = [ResourceRequestByCount(request=request({"CPU": 1}, SELECTOR), count=40)]
    reply = ask(config(), resource_requests=pool)
    assert not reply.infeasible_resource_requests
    assert launched(reply) == {"decode": 3}  # 40 actors on nodes of 16 (14) CPUs


@pytest.mark.parametrize("config", [gcp, kuberay])
def test_training_workers_start_only_gpu_nodes(config: Any) -> None:
    gang = GangResourceRequest()
    gang.requests.extend(request({"CPU": 1, "GPU": 1}, {}) for _ in range(4))
    reply = ask(config(), gang_resource_requests=[gang])
    assert not reply.infeasible_gang_resource_requests
    assert launched(reply) == {"train": 4}


@pytest.mark.parametrize("config", [gcp, kuberay])
def test_nothing_runs_before_it_is_needed(config: Any) -> None:
    reply = ask(config())
    assert launched(reply) == {}
    types = config()["available_node_types"]
    assert {name: types[name].get("labels") or {} for name in ("train", "decode")} == {"train": {}, "decode": SELECTOR}
    head = config()["head_node_type"]
    assert types[head]["resources"]["CPU"] == 0
    assert types["train"]["resources"]["GPU"] == 1
    assert "GPU" not in types["decode"]["resources"]


def test_rayjob_has_the_fields_of_the_custom_resource_and_no_other() -> None:
    job = RayJob.model_validate(load("kuberay-rayjob.yaml"))
    images = {c.image for g in job.spec.ray_cluster_spec.worker_group_specs for c in g.template.spec.containers}
    assert images == {job.spec.ray_cluster_spec.head_group_spec.template.spec.containers[0].image}


@pytest.mark.parametrize("name", ["train.yaml", "episodes.yaml"])
def test_training_run_asks_for_what_the_clusters_offer(name: str) -> None:
    config = load_config(CLUSTER / name)
    assert config.decode.label_selector == SELECTOR
    for types in (gcp()["available_node_types"], kuberay()["available_node_types"]):
        assert config.train.workers <= types["train"]["max_workers"]
        assert config.decode.actors[1] <= types["decode"]["max_workers"] * types["decode"]["resources"]["CPU"]


def test_training_run_makes_frames_of_one_size() -> None:
    config = load_config(CLUSTER / "train.yaml")
    for key in ("cpu", "eval"):
        image, target = np.zeros((480, 640, 3), np.uint8), {"boxes": np.array([[8, 8, 99, 99]], np.float32)}
        target |= {"area": np.array([8281], np.float32), "labels": np.array([1]), "iscrowd": np.array([0])}
        out, _ = build_transform(getattr(config.augment, key), f"augment.{key}")(image, target, 1)
        assert out.shape == (576, 576, 3)


def test_rayjob_runs_a_file_of_the_image_with_a_valid_configuration() -> None:
    entrypoint = load("kuberay-rayjob.yaml")["spec"]["entrypoint"]
    program, flag, file, *overrides = entrypoint.replace(image_folder(), str(CLUSTER.parents[1])).split()[1:]
    assert flag == "--config"
    assert Path(program).is_file()
    load_config(file, overrides)


def image_folder() -> str:
    """Where the image has the repository."""
    folder = re.search(r"(?m)^WORKDIR (.+)$", (CLUSTER / "Dockerfile").read_text(encoding="utf-8"))
    assert folder
    return folder[1]


def test_ray_job_script_submits_a_file_of_the_image_with_its_options(tmp_path: Path) -> None:
    ray = tmp_path / "ray"
    ray.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')  # says what it would have been given
    ray.chmod(0o755)
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin", "RAY_API_SERVER_ADDRESS": "http://head:8265"}
    script = [str(CLUSTER / "ray-job.sh"), "data.path=my data", "--dummy"]
    said = subprocess.run(script, env=path, check=True, capture_output=True, text=True).stdout.splitlines()
    head, command = said[: said.index("--")], said[said.index("--") + 1 :]
    assert head == ["job", "submit", "--address", "http://head:8265"]
    interpreter, program, flag, file, *options = [
        part.replace(image_folder(), str(CLUSTER.parents[1])) for part in command
    ]
    assert (interpreter, flag, options) == ("python", "--config", ["data.path=my data", "--dummy"])
    assert Path(program).is_file()
    load_config(file, options[:1])


def test_slurm_script_is_one_that_bash_reads() -> None:
    subprocess.run(["bash", "-n", str(CLUSTER / "slurm.sbatch")], check=True)


@pytest.mark.parametrize(
    "name", ["gcp.yaml", "kuberay-rayjob.yaml", "Dockerfile", "train.yaml", "episodes.yaml", "ray-job.sh"]
)
def test_placeholders_are_documented_and_nothing_is_secret(name: str) -> None:
    text = (CLUSTER / name).read_text(encoding="utf-8")
    documented = set(re.findall(r"YOUR_[A-Z_]+", DOCS.read_text(encoding="utf-8")))
    assert set(re.findall(r"YOUR_[A-Z_]+", text)) <= documented
    assert not re.search(r"(?i)password|passwd|secret|token|api_?key|PRIVATE KEY|[A-Za-z0-9+/]{40,}={0,2}$", text)


def test_ray_version_is_the_same_everywhere() -> None:
    version = load("kuberay-rayjob.yaml")["spec"]["rayClusterSpec"]["rayVersion"]
    assert f"rayproject/ray:{version}-" in (CLUSTER / "Dockerfile").read_text(encoding="utf-8")
