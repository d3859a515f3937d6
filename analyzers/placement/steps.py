"""Step times and room for ESTs, in whole numbers: what every planner of this package is built on.

In a step of T seconds a device of capability C has room for ``floor(C T)`` ESTs (EasyScale, Equation 1). So the best step
time on given devices is the smallest of the numbers ``k / C_i`` in which they have room for every EST: one bisection
(:func:`smallest_step`), or, for many vectors of devices at once, a table of all those numbers (:class:`StepTable`).
:func:`evaluate` deals the ESTs out and returns a plan's figures, checked from scratch after every solve.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np

from ddltool.analyzers.placement.problem import Problem
from ddltool.arrays import Floats, Ints
from ddltool.errors import InputError
from ddltool.plans import Alternative, Assignment, Plan

# How many devices of each type of a problem are used.
Counts = tuple[int, ...]
# A larger table takes seconds to make and gigabytes to keep.
LARGEST_TABLE = 4_000_000


@lru_cache(maxsize=4096)
def whole(capabilities: tuple[Fraction, ...]) -> tuple[int, ...]:
    """Return whole numbers in the same ratio as the capabilities: ``floor(C_i k / C_j)`` is ``w_i k // w_j``."""
    common = math.lcm(*(capability.denominator for capability in capabilities))
    weights = [int(capability * common) for capability in capabilities]
    shared = math.gcd(*weights)
    return tuple(weight // shared for weight in weights)


def smallest_step(
    weights: Sequence[int],
    counts: Sequence[int],
    max_workers: int,
    limits: Sequence[int | None] | None = None,
    max_devices: int | None = None,
) -> tuple[int, int] | None:
    """Return (k, i): the smallest step time with room for ``max_workers`` is ``k / C_i``; None: no step is long enough.

    ``weights`` as from :func:`whole`, ``counts`` devices of each type, at least one in all; ``limits``: most ESTs on one
    device of each type; ``max_devices``: of the devices, the roomiest so many count. A few whole-number operations for each
    type: bisection starts from bounds that follow from ``x - 1 < floor(x) <= x``.
    """
    most = [max_workers if limit is None else min(limit, max_workers) for limit in limits or (None,) * len(weights)]
    offers = [(weight, count, limit) for weight, count, limit in zip(weights, counts, most, strict=True) if count]
    pool = sum(weight * count for weight, count, _ in offers)
    devices = sum(count for _, count, _ in offers)
    free = limits is None and (max_devices is None or max_devices >= devices)

    def enough(k: int, weight: int) -> bool:
        if free:
            return sum(number * (other * k // weight) for other, number, _ in offers) >= max_workers
        left, total = devices if max_devices is None else max_devices, 0
        for room, number in sorted(
            ((min(w * k // weight, limit), number) for w, number, limit in offers), reverse=True
        ):
            total += room * min(number, left)
            left -= min(number, left)
        return total >= max_workers

    best: tuple[int, int] | None = None
    for kind, (weight, count) in enumerate(zip(weights, counts, strict=True)):
        if not count:
            continue
        low = -(-max_workers * weight // pool)
        # The smallest k known to be enough: none needs to be looked at beyond the best step time so far.
        high = min(-(-(max_workers + devices) * weight // pool), max_workers) if free else most[kind]
        if best is not None:
            high = min(high, -(-best[0] * weight // weights[best[1]]))
        if low > high or not (free or enough(high, weight)):
            continue
        while low < high:
            middle = (low + high) // 2
            if enough(middle, weight):
                high = middle
            else:
                low = middle + 1
        if best is None or low * weights[best[1]] < best[0] * weight:
            best = low, kind
    return best


def best_step(problem: Problem, counts: Counts | None = None) -> Fraction | None:
    """Return the smallest step time in seconds on the offered devices, or on ``counts`` of them; None: no room for all.

    Exact (EasyScale, Equation 1). Money and a throughput that is asked for play no part; so with a price limit this is a
    step time that no plan can beat. With ``counts`` every device has an EST at least.
    """
    devices, limits = problem.devices, tuple(device.most_ests for device in problem.devices)
    weights = whole(tuple(device.capability_per_s for device in devices))
    most = problem.max_devices if counts is None else None
    ways = [tuple(device.count for device in devices) if counts is None else counts]
    if counts is None and problem.single_type:
        ways = [tuple(each.count * (each is only) for each in devices) for only in devices]
    bound = limits if any(limits) else None
    found = [smallest_step(weights, way, problem.max_workers, bound, most) for way in ways if any(way)]
    step = min((each[0] / devices[each[1]].capability_per_s for each in found if each is not None), default=None)
    if counts is None or step is None:
        return step
    slowest = min(device.capability_per_s for device, count in zip(devices, counts, strict=True) if count)
    return max(step, 1 / slowest)


def deal(
    rooms: Sequence[int], counts: Sequence[int], workers: int, speeds: Sequence[int]
) -> list[list[tuple[int, int]]]:
    """Return by type rows (devices, ESTs on each), most first: full, then the surplus taken evenly from the slowest types.

    ``rooms``: ESTs that one device has room for; ``counts``: devices, which all get an EST; ``speeds``: higher is faster.
    """
    ests = [room * count for room, count in zip(rooms, counts, strict=True)]
    surplus = sum(ests) - workers
    for kind in sorted(range(len(ests)), key=lambda kind: speeds[kind]):
        taken = min(surplus, ests[kind] - counts[kind])
        ests[kind] -= taken
        surplus -= taken
    shares = [(count, *divmod(total, count or 1)) for total, count in zip(ests, counts, strict=True)]
    return [
        [(number, size) for number, size in ((more, each + 1), (count - more, each)) if number]
        for count, each, more in shares
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTable:
    """Step times in increasing order, S of them, for T device types."""

    capabilities: tuple[Fraction, ...]
    max_workers: int
    kinds: Ints
    """(S,) the type i of ``k / C_i``."""
    multiples: Ints
    """(S,) the k."""
    rooms: Ints
    """(S, T) ESTs that one device of each type has room for, at most ``max_workers`` and the type's limit."""
    seconds: Floats
    """(S,) the step times."""
    throughputs: Floats
    """(S + 1,) logical mini-batches per second, ``maxP / T`` rounded once; the last is 0, for no step time."""

    def step(self, place: int) -> Fraction:
        """Return a step time in seconds exactly."""
        return int(self.multiples[place]) / self.capabilities[int(self.kinds[place])]

    def smallest(self, vectors: Ints) -> Ints:
        """Return (V,) places of the smallest step time for (V, T) numbers of devices; S where no step time is enough."""
        low = np.zeros(len(vectors), dtype=np.int64)
        high = np.full(len(vectors), len(self.multiples), dtype=np.int64)
        for _ in range(len(self.multiples).bit_length() + 1):
            middle = np.minimum((low + high) // 2, len(self.multiples) - 1)
            enough = np.einsum("vt,vt->v", vectors, self.rooms[middle]) >= self.max_workers
            low, high = np.where((low < high) & ~enough, middle + 1, low), np.where((low < high) & enough, middle, high)
        return low

    def best_of(self, vectors: Ints, *, homogeneous: bool = False) -> tuple[Ints, Ints]:
        """Return (V,) places of the smallest step times for (V, T) devices, and (V, T) how many of them are used.

        Roomiest types are used first, so as few devices as possible; none where there is no step time.
        """
        kinds = np.arange(vectors.shape[1])
        if homogeneous:
            steps = np.stack([self.smallest(np.where(kinds == kind, vectors, 0)) for kind in kinds])
            vectors = np.where(kinds == steps.argmin(axis=0)[:, None], vectors, 0)
        steps = self.smallest(vectors)
        rooms = np.vstack([self.rooms, np.zeros((1, len(kinds)), dtype=np.int64)])[steps]
        order = np.argsort(-rooms, axis=1, kind="stable")
        left = np.full(len(vectors), self.max_workers, dtype=np.int64)
        used, lines = np.zeros_like(vectors), np.arange(len(vectors))
        for rank in kinds:
            kind = order[:, rank]
            room = rooms[lines, kind]
            taken = np.where(room > 0, np.minimum(vectors[lines, kind], -(-left // np.maximum(room, 1))), 0)
            used[lines, kind] = taken
            left = np.maximum(left - taken * room, 0)
        return steps, used


def step_table(
    capabilities: tuple[Fraction, ...], max_workers: int, most_ests: tuple[int | None, ...] | None = None
) -> StepTable:
    """Return the table for device types of these capabilities (mini-batches per second of one EST alone).

    ``most_ests`` limits the ESTs on one device of each type (memory). Raises InputError when the table would have more
    than ``LARGEST_TABLE`` rows.
    """
    types = len(capabilities)
    limits = [max_workers if most is None else min(most, max_workers) for most in most_ests or (None,) * types]
    if sum(limits) > LARGEST_TABLE:
        problem = f"is {max_workers:,} on {types} device types: {sum(limits):,} possible step times"
        raise InputError("max_workers", problem, f"at most {LARGEST_TABLE:,} fit into a table; use ddltool plan")
    weights = whole(capabilities)
    kinds = np.repeat(np.arange(types), limits)
    multiples = np.concatenate([np.arange(1, limit + 1) for limit in limits])
    columns = [_rooms(weight, weights, limits, most) for weight, most in zip(weights, limits, strict=True)]
    rooms = np.stack(columns, axis=1)
    pairs = list(zip(capabilities, limits, strict=True))
    seconds = np.concatenate([_ratios(limit, rate.denominator, rate.numerator) for rate, limit in pairs])
    throughputs = np.concatenate(
        [_ratios(limit, rate.denominator, max_workers * rate.numerator, inverse=True) for rate, limit in pairs]
    )
    # Rounded quotients keep the order of the exact ones except for ties; of step times that round to the same float the
    # smaller has less room, or as much.
    order = np.lexsort((rooms.sum(axis=1), seconds))
    rooms, seconds = rooms[order], seconds[order]
    keep = np.append(True, (rooms[1:] != rooms[:-1]).any(axis=1))
    return StepTable(
        capabilities=capabilities,
        max_workers=max_workers,
        kinds=kinds[order][keep],
        multiples=multiples[order][keep],
        rooms=rooms[keep],
        seconds=seconds[keep],
        throughputs=np.append(throughputs[order][keep], 0.0),
    )


def _ratios(limit: int, factor: int, other: int, *, inverse: bool = False) -> Floats:
    """Return ``k factor / other`` for k = 1 to ``limit``, or its inverse, each rounded once as a fraction's float is."""
    if max(limit * factor, other) < 2**53:  # exact as floats
        multiples = np.arange(1, limit + 1) * float(factor)
        return np.asarray(other / multiples if inverse else multiples / other)
    if inverse:
        return np.array([other / (k * factor) for k in range(1, limit + 1)])
    return np.array([k * factor / other for k in range(1, limit + 1)])


def _rooms(weight: int, weights: Sequence[int], limits: Sequence[int], most: int) -> Ints:
    """Return ``min(floor(C T), most)`` of one type for every step time ``k / C_j``, types j one after the other."""
    parts = []
    for other, limit in zip(weights, limits, strict=True):
        if weight * limit < 2**62:  # whole numbers of 64 bits are enough
            part = np.arange(1, limit + 1, dtype=np.int64) * weight // other if other < 2**62 else np.zeros(limit, int)
        else:
            part = np.fromiter((min(k * weight // other, most) for k in range(1, limit + 1)), np.int64, limit)
        parts.append(np.minimum(part, most))
    return np.concatenate(parts)


def device_counts(plan: Plan | Alternative) -> dict[str, int]:
    """Return how many devices of each type a plan uses."""
    counts: Counter[str] = Counter()
    for row in plan.assignments:
        counts[row.device_type] += row.devices
    return dict(counts)


def counts_of(problem: Problem, plan: Plan) -> Counts:
    """Return how many devices of each type of the problem a plan uses."""
    return problem.counts(device_counts(plan))


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
    figures = {name: getattr(made, name) for name in Alternative.model_fields}
    status = "optimal" if optimal else "feasible"
    return problem.plan("est", **figures, status=status, gap=gap, solve_seconds=solve_seconds)


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
    if any(row.ests_per_device > (offered[row.device_type].most_ests or math.inf) for row in assignments):
        raise ValueError(f"more ESTs on a device than may be: {assignments}")
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
