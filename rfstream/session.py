"""Ray itself: attach to the cluster there is, or start a quiet local one."""

from __future__ import annotations

import logging
import os

import ray

from rfstream.errors import ConfigError


def ensure_ray(min_cpus: int = 1) -> None:
    """Connect this process to Ray: as it already is, to a running cluster, or to a local one started for this process.

    The local one has at least ``min_cpus`` logical CPUs, so that a pool larger than the machine still starts.

    Raises:
        ConfigError: if ``RAY_ADDRESS`` names a cluster that can't be reached.
    """
    if ray.is_initialized():
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = os.environ.get("RAY_ADDRESS", "auto")
    if address != "local":
        try:
            ray.init(address=address, logging_level=logging.ERROR)
            return
        except ConnectionError as error:
            if "RAY_ADDRESS" in os.environ:
                raise ConfigError(f"no Ray cluster answers at RAY_ADDRESS={address}: {error}") from None
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, min_cpus),
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    # Ray Data reports each execution at INFO; in a session of our own that is noise beside a progress bar.
    logging.getLogger("ray.data").setLevel(logging.ERROR)
