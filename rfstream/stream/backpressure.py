"""A bound on how far a stream runs ahead of who consumes it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ray.data import DataContext
from ray.data._internal.execution.backpressure_policy import (
    ENABLED_BACKPRESSURE_POLICIES,
    ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY,
    BackpressurePolicy,
)
from ray.data._internal.execution.operators.map_operator import MapOperator

if TYPE_CHECKING:
    from ray.data._internal.execution.interfaces import PhysicalOperator

_TASKS, _ENCODED = "rfstream.waiting_tasks", "rfstream.waiting_encoded"


def bound_waiting_rows(context: DataContext, tasks: int, encoded: int = 0) -> None:
    """Let no step of a dataset begin a task while too many rows that it made wait to be taken.

    For the step whose rows are consumed those are what ``tasks`` of its tasks make: how many batches share a row
    depends on their size. For one whose rows another one decodes they are ``encoded``. Ray's own policies count bytes
    against a share of the object store: a consumer that stands still would have it filled with epochs to come.
    """
    context.set_config(_TASKS, tasks)
    context.set_config(_ENCODED, encoded)
    # No public call adds a policy.
    context.set_config(ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY, [*ENABLED_BACKPRESSURE_POLICIES, WaitingRows])


class WaitingRows(BackpressurePolicy):  # type: ignore[misc]
    """Holds a step back as :func:`bound_waiting_rows` says; runs in Ray Data's executor."""

    def can_add_input(self, op: PhysicalOperator) -> bool:
        """Whether ``op`` may begin another task."""
        if not isinstance(op, MapOperator):
            return True
        if any(isinstance(after, MapOperator) for after in op.output_dependencies):
            most: int = self._data_context.get_config(_ENCODED)
        else:
            most = self._data_context.get_config(_TASKS) * math.ceil(op.metrics.average_num_outputs_per_task or 1)
        return self._waiting(op) < most

    def _waiting(self, op: PhysicalOperator) -> int:
        """Blocks that ``op`` has made and no later step has taken, nor a consumer. A block is a row."""
        made: int = self._topology[op].total_enqueued_output_blocks()
        for after in op.output_dependencies:
            made += after.internal_input_queue_num_blocks()
            if not isinstance(after, MapOperator):
                made += self._waiting(after)
        return made
