"""From numbers of devices to a plan's figures: who runs how many ESTs, and an independent check after every solve."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from ddltool.analyzers.placement.problem import Problem
from ddltool.analyzers.placement.steps import Counts, best_step, deal, whole
from ddltool.plans import Alternative, Assignment, Plan


def device_counts(plan: Plan | Alternative) -> dict[str, int]:
    """Return how many devices of each type a plan uses."""
    counts: Counter[str] = Counter()
    for row in plan.assignments:
        counts[row.device_type] += row.devices
    return dict(counts)


def counts_of(problem: Problem, plan: Plan) -> Counts:
    """Return how many devices of each type of the problem a plan uses."""
    used = device_counts(plan)
    return tuple(used.get(device.name, 0) for device in problem.devices)


def reach(problem: Problem, counts: Counts) -> Fraction:
    """Return the step time of devices that are known to hold every EST."""
    step = best_step(problem, counts)
    if step is None:
        raise ValueError(f"{counts} devices have no room for {problem.max_workers} ESTs")
    return step


def evaluate(problem: Problem, counts: Counts) -> Alternative:
    """Deal out the ESTs over devices that hold them, and return the plan's figures, checked from scratch."""
    step = reach(problem, counts)
    rooms = [problem.room(device, step) for device in problem.devices]
    dealt = deal(rooms, counts, problem.max_workers, whole(tuple(each.capability_per_s for each in problem.devices)))
    assignments = [
        Assignment(
            device_type=device.name, devices=number, ests_per_device=ests, local_batch_size=ests * problem.batch_size
        )
        for device, rows in zip(problem.devices, dealt, strict=True)
        for number, ests in rows
    ]
    if (checked := verify(problem, assignments)) != step:
        raise ValueError(f"the plan's step takes {checked} s, not {step} s")
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


def plan_of(problem: Problem, made: Alternative, *, optimal: bool, gap: float, solve_seconds: float) -> Plan:
    """Return the est plan of figures that were evaluated."""
    return Plan(
        job=problem.job,
        strategy="est",
        max_workers=problem.max_workers,
        batch_size=problem.batch_size,
        **{name: getattr(made, name) for name in Alternative.model_fields},
        status="optimal" if optimal else "feasible",
        gap=gap,
        solve_seconds=solve_seconds,
    )


def verify(problem: Problem, assignments: Sequence[Assignment]) -> Fraction:
    """Return the step time in seconds recomputed from scratch.

    Raises ValueError, which would be this package's mistake and not the user's, when an EST is missing or doubled, a
    device is used that is not offered, or a constraint is broken.
    """
    offered = {device.name: device for device in problem.devices}
    used: dict[str, int] = {}
    for row in assignments:
        used[row.device_type] = used.get(row.device_type, 0) + row.devices
        if row.local_batch_size != row.ests_per_device * problem.batch_size or row.ests_per_device < 1:
            raise ValueError(f"a used device needs ESTs and their samples: {row}")
    workers = sum(row.devices * row.ests_per_device for row in assignments)
    if not used.keys() <= offered.keys():
        raise ValueError(f"types that are not offered: {sorted(used.keys() - offered.keys())}")
    limits = {name: device.most_ests for name, device in offered.items()}
    if any(row.ests_per_device > (limits[row.device_type] or math.inf) for row in assignments):
        raise ValueError(f"more ESTs on a device than may be: {limits}")
    price = sum((offered[name].price_micro or 0) * count for name, count in used.items())
    if workers != problem.max_workers:
        raise ValueError(f"{workers} ESTs instead of {problem.max_workers}")
    if any(count > offered[name].count for name, count in used.items()):
        raise ValueError(f"more devices than offered: {used}")
    if (problem.single_type and len(used) > 1) or sum(used.values()) > (problem.max_devices or math.inf):
        raise ValueError(f"constraints broken: {used}")
    if problem.max_price_micro is not None and price > problem.max_price_micro:
        raise ValueError(f"price limit broken: {price}")
    step = max(row.ests_per_device / offered[row.device_type].capability_per_s for row in assignments)
    if problem.min_throughput is not None and problem.max_workers / step < problem.min_throughput:
        raise ValueError(f"too slow: a step of {step} s")
    return step
