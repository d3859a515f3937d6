"""How long each device of a plan computes in a step."""

from __future__ import annotations

from collections.abc import Mapping

from ddltool.analyzers.balancing.plan import StepCurve
from ddltool.plan import Assignment, Plan


def with_compute(plan: Plan, capabilities: Mapping[str, float], curves: Mapping[str, StepCurve] | None = None) -> Plan:
    """Return the plan with ``compute_s`` in its assignments.

    ``capabilities``: mini-batches per second by device type. ESTs take turns of one mini-batch each; a whole local batch
    takes its entry of ``curves``, or the time by its share of a mini-batch.
    """
    known = dict(curves or {})

    def seconds(row: Assignment) -> float | None:
        if row.device_type not in capabilities:
            return None
        if row.ests_per_device:
            return row.ests_per_device / capabilities[row.device_type]
        curve = known.get(row.device_type)
        if curve is not None and plan.strategy == "lb-bsp":
            return curve.launch_s + curve.per_sample_s * row.local_batch_size
        return row.local_batch_size / plan.batch_size / capabilities[row.device_type]

    rows = [row.model_copy(update={"compute_s": seconds(row)}) for row in plan.assignments]
    return plan.model_copy(update={"assignments": rows})
