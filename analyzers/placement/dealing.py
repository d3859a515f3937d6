"""From numbers of devices and a step time to a plan's figures: who runs how many ESTs."""

from __future__ import annotations

from fractions import Fraction

from ddltool.analyzers.placement.requirements import Problem
from ddltool.analyzers.placement.step_times import Counts
from ddltool.analyzers.placement.verify import verify
from ddltool.plan import Alternative, Assignment, Plan


def evaluate(problem: Problem, counts: Counts, step_s: Fraction) -> Alternative:
    """Deal out the ESTs and return the plan's figures, checked from scratch.

    ``step_s`` must be the smallest step time of these devices (``step_times.reach``).
    """
    assignments = deal(problem, counts, step_s)
    step = verify(problem, assignments)
    if step != step_s:
        raise ValueError(f"the plan's step takes {step} s, not {step_s} s")
    throughput = problem.max_workers / step
    pairs = zip(counts, problem.devices, strict=True)
    in_use = sum((count * device.capability_per_s for count, device in pairs), Fraction(0))
    return Alternative(
        iteration_s=float(step),
        throughput=float(throughput),
        assignments=assignments,
        est_count=sum(row.devices * row.ests_per_device for row in assignments),
        waste=float(in_use - throughput),
        overload_factor=float(step),
    )


def plan_of(problem: Problem, counts: Counts, step_s: Fraction, *, gap: float, solve_seconds: float) -> Plan:
    """Return the est plan of given devices; ``gap`` 0 stands for a proven optimum."""
    made = evaluate(problem, counts, step_s)
    return Plan(
        job=problem.job,
        strategy="est",
        max_workers=problem.max_workers,
        batch_size=problem.batch_size,
        **{name: getattr(made, name) for name in Alternative.model_fields},
        status="feasible" if gap > 0 else "optimal",
        gap=gap,
        solve_seconds=solve_seconds,
    )


def deal(problem: Problem, counts: Counts, step_s: Fraction) -> list[Assignment]:
    """Return how many ESTs each used device runs: full first, the surplus taken evenly from the slowest types."""
    pairs = [(device, count) for device, count in zip(problem.devices, counts, strict=True) if count]
    ests = {device.name: count * problem.room(device, step_s) for device, count in pairs}
    surplus = sum(ests.values()) - problem.max_workers
    for device, count in sorted(pairs, key=lambda pair: pair[0].capability_per_s):
        taken = min(surplus, ests[device.name] - count)  # each keeps one
        ests[device.name] -= taken
        surplus -= taken
    rows: list[Assignment] = []
    for device, count in pairs:
        each, more = divmod(ests[device.name], count)
        for number, size in ((more, each + 1), (count - more, each)):
            if number:
                samples = size * problem.batch_size
                rows.append(
                    Assignment(device_type=device.name, devices=number, ests_per_device=size, local_batch_size=samples)
                )
    return rows
