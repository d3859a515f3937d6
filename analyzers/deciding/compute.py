"""How long each device of a plan computes in a step."""

from __future__ import annotations

from collections.abc import Mapping

from ddltool.plan import Assignment, Plan


def with_compute(plan: Plan, capabilities: Mapping[str, float]) -> Plan:
    """Return the plan with ``compute_s`` in its assignments.

    ``capabilities``: mini-batches per second by device type. ESTs take turns of one mini-batch each; a whole local batch
    takes the time by its share of a mini-batch. Those that are there already stay.
    """

    def seconds(row: Assignment) -> float | None:
        if row.compute_s is not None:
            return row.compute_s  # the strategy knows launch, saturation and passes
        if row.device_type not in capabilities:
            return None
        if row.ests_per_device:
            return row.ests_per_device / capabilities[row.device_type]
        return row.local_batch_size / plan.batch_size / capabilities[row.device_type]

    rows = [row.model_copy(update={"compute_s": seconds(row)}) for row in plan.assignments]
    return plan.model_copy(update={"assignments": rows})
