"""A bound on how far a stream runs ahead of who consumes it."""

from __future__ import annotations

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

_DECODED, _ENCODED = "rfstream.waiting_decoded", "rfstream.waiting_encoded"


def bound_waiting_batches(context: DataContext, decoded: int, encoded: int = 0) -> None:
    """Let no step of a dataset begin a task while as many rows that it made wait to be taken.

    ``decoded`` rows are a batch each; ``encoded`` is for a step whose rows another one decodes. Ray's own policies
    count bytes against a share of the object store: a consumer that stands still would have it filled with epochs to
    come.
    """
    context.set_config(_DECODED, decoded)
    context.set_config(_ENCODED, encoded)
    # No public call adds a policy.
    context.set_config(ENABLED_BACKPRESSURE_POLICIES_CONFIG_KEY, [*ENABLED_BACKPRESSURE_POLICIES, WaitingBatches])


class WaitingBatches(BackpressurePolicy):  # type: ignore[misc]
    """Holds a step back as :func:`bound_waiting_batches` says; runs in Ray Data's executor."""

    def can_add_input(self, op: PhysicalOperator) -> bool:
        """Whether ``op`` may begin another task."""
        if not isinstance(op, MapOperator):
            return True
        reads = any(isinstance(after, MapOperator) for after in op.output_dependencies)
        most: int = self._data_context.get_config(_ENCODED if reads else _DECODED)
        return self._waiting(op) < most

    def _waiting(self, op: PhysicalOperator) -> int:
        """Blocks that ``op`` has made and no later step has taken, nor a consumer. A block is a row."""
        made: int = self._topology[op].total_enqueued_output_blocks()
        for after in op.output_dependencies:
            made += after.internal_input_queue_num_blocks()
            if not isinstance(after, MapOperator):
                made += self._waiting(after)
        return made
