"""From a plan to what each training process does."""

from __future__ import annotations

from ddltool.analyzers.emitting.layout import plan_hash
from ddltool.errors import InputError
from ddltool.plan import Enforcement, Plan, RankEnforcement


def to_enforcement(plan: Plan, *, telemetry: str | None = "telemetry.jsonl") -> Enforcement:
    """Return the enforcement of a plan: one rank per used device, in the plan's order of assignments.

    A rank's local batch holds the samples of all its logical workers. Raises InputError when a device of the plan has
    no samples, which a hand-edited plan may say.
    """
    if plan.strategy == "elastic-bsp":
        problem = "is an elastic-bsp plan: its workers do not step together, which DDP cannot do"
        raise InputError(
            "plan:strategy", problem, "run it with ddltool.runtime.servers, or emit a bsp, lb-bsp or est plan"
        )
    ranks: list[RankEnforcement] = []
    for assignment in plan.assignments:
        if assignment.local_batch_size < 1:
            where = f"plan:assignments.{assignment.device_type}.local_batch_size"
            raise InputError(where, f"is {assignment.local_batch_size}", "a used device needs at least one sample")
        for _ in range(assignment.devices):
            ranks.append(
                RankEnforcement(
                    rank=len(ranks),
                    device_type=assignment.device_type,
                    ests=assignment.ests_per_device,
                    local_batch_size=assignment.local_batch_size,
                    accumulation_steps=assignment.accumulation_steps,
                )
            )
    return Enforcement(
        job=plan.job,
        strategy=plan.strategy,
        world_size=len(ranks),
        total_batch_size=sum(rank.local_batch_size for rank in ranks),
        ranks=ranks,
        parameters=plan.parameters,
        ddp=plan.ddp,
        fsdp2=plan.fsdp2,
        telemetry=telemetry,
        plan_sha256=plan_hash(plan),
    )
