"""An independent check of a plan against its problem, run after every solve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from ddltool.analyzers.placement.problem import Problem
from ddltool.plan import Assignment


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
