"""Step times and EST capacities in whole numbers, on which every planner of this package is built.

An EST is EasyScale's logical worker; the ESTs of one device take turns. In a step of s seconds a device of capability C (ESTs
per second) has capacity for ``floor(C s)`` of them (EasyScale, Equation 1). So the best step time on given devices is the
smallest of the numbers ``k / C_i`` in which they have capacity for every EST. It is found by one bisection
(:func:`smallest_step`) or, for many vectors of devices at once, in a table of all those numbers (:class:`StepTable`).
:func:`evaluate` distributes the ESTs and returns a plan's figures, verified from scratch. T is the number of device types.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial

import numpy as np

from ddltool.analyzers.job.placement.problem import Problem
from ddltool.arrays import Floats, Ints
from ddltool.errors import InputError
from ddltool.plans import Alternative, Assignment, Plan

# (T,) devices of each type of a problem.
Counts = tuple[int, ...]
# A larger table takes seconds to make and gigabytes to keep.
LARGEST_TABLE = 4_000_000


@lru_cache(maxsize=4096)
def integer_weights(capabilities: tuple[Fraction, ...]) -> tuple[int, ...]:
    """Return the smallest whole numbers w in the same ratio as the capabilities C, which are above 0.

    With them EST capacities are exact in integers: in a step of ``k / C_j`` seconds, in which a device of type j runs k ESTs,
    one of type i runs ``floor(C_i k / C_j) = w_i k // w_j``.
    """
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
    """Return (k, i) such that ``k / C_i`` is the smallest step time with capacity for ``max_workers`` ESTs (logical workers).

    None where no step is long enough, because ESTs or devices are limited. For each type i a bisection finds the least k; it
    starts from bounds that follow from ``x - 1 < floor(x) <= x``, so it takes a few integer operations.

    Args:
        weights: capabilities of the T types as integers, from :func:`integer_weights`.
        counts: devices of each type, at least one in all.
        max_workers: ESTs to place.
        limits: most ESTs on one device of each type, None for a type without a limit; None: no limits.
        max_devices: most devices in use, which are those of the largest capacities; None: no limit.
    """
    est_caps = [max_workers if limit is None else min(limit, max_workers) for limit in limits or (None,) * len(weights)]
    offers = [(weight, count, limit) for weight, count, limit in zip(weights, counts, est_caps, strict=True) if count]
    total_weight = sum(weight * count for weight, count, _ in offers)
    device_count = sum(count for _, count, _ in offers)
    # Without limits the total capacity is a plain sum, for which the bounds hold; with them, largest capacities count first.
    is_floor_sum = limits is None and (max_devices is None or max_devices >= device_count)

    def has_capacity(k: int, weight: int) -> bool:
        """Return whether the devices can run all ESTs in a step of ``k / C`` seconds, with C the capability of ``weight``."""
        if is_floor_sum:
            return sum(count * (other_weight * k // weight) for other_weight, count, _ in offers) >= max_workers
        capacities = [(min(other_weight * k // weight, limit), count) for other_weight, count, limit in offers]
        devices_left = device_count if max_devices is None else max_devices
        ests_held = 0
        for capacity, count in sorted(capacities, reverse=True):
            used = min(count, devices_left)
            ests_held += capacity * used
            devices_left -= used
        return ests_held >= max_workers

    best: tuple[int, int] | None = None
    for type_index, (weight, count) in enumerate(zip(weights, counts, strict=True)):
        if not count:
            continue
        # The smallest k with enough capacity lies in [low, high]. Below low even the capacities before rounding down add up to
        # too little; rounding down takes less than one EST per device, so max_workers + device_count before it are enough.
        low = -(-max_workers * weight // total_weight)
        high = est_caps[type_index]
        if is_floor_sum:
            high = min(-(-(max_workers + device_count) * weight // total_weight), max_workers)
        if best is not None:  # steps longer than the best one so far do not matter: its k for this type, rounded up
            best_k, best_type = best
            high = min(high, -(-best_k * weight // weights[best_type]))
        if low > high or not (is_floor_sum or has_capacity(high, weight)):
            continue
        low = bisect_left(range(high), True, lo=low, key=partial(has_capacity, weight=weight))
        if best is None or low * weights[best[1]] < best[0] * weight:
            best = low, type_index
    return best


def best_step(problem: Problem, counts: Counts | None = None) -> Fraction | None:
    """Return the exact smallest step time in seconds on all offered devices, or on ``counts`` (T,) of them.

    None where the devices cannot run every EST. The price limit and the required throughput are ignored, so with a price limit
    it is a lower bound. With ``counts`` every device runs at least one EST, so the step is at least as long as one EST takes
    on the slowest of them (EasyScale, Equation 1).
    """
    devices = problem.devices
    weights = integer_weights(tuple(device.capability_per_s for device in devices))
    max_devices = problem.max_devices if counts is None else None
    if counts is not None:
        vectors = [counts]
    elif problem.single_type:  # each type alone
        vectors = [tuple(device.count if device is only else 0 for device in devices) for only in devices]
    else:
        vectors = [tuple(device.count for device in devices)]
    limits = tuple(device.most_ests for device in devices)
    bounds = limits if any(limits) else None  # where no type has a limit, None makes the bisection shorter
    steps: list[Fraction] = []
    for vector in vectors:
        if any(vector):
            smallest = smallest_step(weights, vector, problem.max_workers, bounds, max_devices)
            if smallest is not None:
                k, type_index = smallest
                steps.append(k / devices[type_index].capability_per_s)
    step = min(steps, default=None)
    if counts is None or step is None:
        return step
    slowest = min(device.capability_per_s for device, count in zip(devices, counts, strict=True) if count)
    return max(step, 1 / slowest)


def distribute_ests(
    capacities: Sequence[int], counts: Sequence[int], workers: int, speeds: Sequence[int]
) -> list[list[tuple[int, int]]]:
    """Return for each of T types its rows (number of devices, ESTs on each of these), most ESTs first.

    An EST is a logical worker. Every device is first filled to its capacity; then the surplus over ``workers`` is removed, from
    the slowest types first and evenly within a type.

    >>> distribute_ests([2, 3], [2, 1], 6, [1, 2])  # capacity for 7, so the slower type runs one EST less
    [[(1, 2), (1, 1)], [(1, 3)]]

    Args:
        capacities: (T,) most ESTs on one device of each type.
        counts: (T,) devices of each type; each device keeps at least one EST.
        workers: ESTs in all, which must fit.
        speeds: (T,) numbers that rank the types, higher is faster.
    """
    type_ests = [capacity * count for capacity, count in zip(capacities, counts, strict=True)]
    surplus = sum(type_ests) - workers
    for type_index in sorted(range(len(type_ests)), key=lambda type_index: speeds[type_index]):
        removed = min(surplus, type_ests[type_index] - counts[type_index])
        type_ests[type_index] -= removed
        surplus -= removed
    rows_by_type: list[list[tuple[int, int]]] = []
    for ests_of_type, count in zip(type_ests, counts, strict=True):
        ests_each, larger = divmod(ests_of_type, count or 1)  # so many devices run one EST more
        rows = [(larger, ests_each + 1), (count - larger, ests_each)]
        rows_by_type.append([(devices, ests) for devices, ests in rows if devices])
    return rows_by_type


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTable:
    """The S possible step times ``k / C_i`` of T device types, in increasing order."""

    capabilities: tuple[Fraction, ...]
    max_workers: int
    type_indices: Ints
    """(S,) the i of ``k / C_i``, index of the device type."""
    multiples: Ints
    """(S,) the k of ``k / C_i``."""
    capacities: Ints
    """(S, T) EST capacity of one device of each type: at most ``max_workers`` and the type's limit."""
    seconds: Floats
    """(S,) the step times."""
    throughputs: Floats
    """(S + 1,) logical mini-batches per second, ``max_workers`` over the step time; the last is 0 and means no step."""

    def step(self, step_index: int) -> Fraction:
        """Return the exact step time in seconds of the row ``step_index``."""
        return int(self.multiples[step_index]) / self.capabilities[int(self.type_indices[step_index])]

    def smallest_steps(self, vectors: Ints) -> Ints:
        """Return (V,) the row of the smallest step time for each of the (V, T) device counts; S where none is long enough.

        It is one bisection over the S rows for all V vectors at once, because capacities grow with the step time.
        """
        low = np.zeros(len(vectors), dtype=np.int64)
        high = np.full(len(vectors), len(self.multiples), dtype=np.int64)
        for _ in range(len(self.multiples).bit_length() + 1):
            # A vector for which no row is long enough ends at low = high = S, which must not be used as an index.
            middle = np.minimum((low + high) // 2, len(self.multiples) - 1)
            fits = np.einsum("vt,vt->v", vectors, self.capacities[middle]) >= self.max_workers
            is_open = low < high
            low = np.where(is_open & ~fits, middle + 1, low)
            high = np.where(is_open & fits, middle, high)
        return low

    def best_steps(self, vectors: Ints, *, homogeneous: bool = False) -> tuple[Ints, Ints]:
        """Return the row of the smallest step time, (V,), and the devices in use, (V, T), for each of V vectors of devices.

        ``vectors`` (V, T): devices of each type. Types of the largest capacity are used first, so that the fewest devices are
        in use. Where no step time is long enough, the row is S and no device is in use. ``homogeneous``: each vector uses only
        the one type with the smallest step.
        """
        type_indices = np.arange(vectors.shape[1])
        if homogeneous:
            steps = np.stack(
                [self.smallest_steps(np.where(type_indices == type_index, vectors, 0)) for type_index in type_indices]
            )
            vectors = np.where(type_indices == steps.argmin(axis=0)[:, None], vectors, 0)
        steps = self.smallest_steps(vectors)
        # (V, T) capacities in each vector's step; 0 for row S, where no step is long enough
        capacities = np.vstack([self.capacities, np.zeros((1, len(type_indices)), dtype=np.int64)])[steps]
        order = np.argsort(-capacities, axis=1, kind="stable")
        ests_left = np.full(len(vectors), self.max_workers, dtype=np.int64)
        used = np.zeros_like(vectors)
        rows = np.arange(len(vectors))
        for position in type_indices:  # the type of largest capacity in each vector, then the next one
            type_index = order[:, position]
            capacity = capacities[rows, type_index]
            devices = np.where(
                capacity > 0,
                np.minimum(vectors[rows, type_index], -(-ests_left // np.maximum(capacity, 1))),
                0,
            )
            used[rows, type_index] = devices
            ests_left = np.maximum(ests_left - devices * capacity, 0)
        return steps, used


def step_table(
    capabilities: tuple[Fraction, ...], max_workers: int, most_ests: tuple[int | None, ...] | None = None
) -> StepTable:
    """Return the table of all step times ``k / C_i`` of device types with these capabilities, each with its EST capacities.

    ``capabilities``: mini-batches per second of one EST alone, by type; ``most_ests``: most ESTs on one device by type, None
    for a type without a limit. Raises InputError when the table would have more than ``LARGEST_TABLE`` rows.
    """
    type_count = len(capabilities)
    limits = [max_workers if limit is None else min(limit, max_workers) for limit in most_ests or (None,) * type_count]
    if sum(limits) > LARGEST_TABLE:
        problem = f"is {max_workers:,} on {type_count} device types: {sum(limits):,} possible step times"
        raise InputError("max_workers", problem, f"at most {LARGEST_TABLE:,} fit into a table; use ddltool plan")
    weights = integer_weights(capabilities)
    type_indices = np.repeat(np.arange(type_count), limits)
    multiples = np.concatenate([np.arange(1, limit + 1) for limit in limits])
    columns = [_capacity_column(weight, weights, limits, limit) for weight, limit in zip(weights, limits, strict=True)]
    capacities = np.stack(columns, axis=1)
    pairs = list(zip(capabilities, limits, strict=True))
    seconds = np.concatenate([_ratios(limit, rate.denominator, rate.numerator) for rate, limit in pairs])
    throughputs = np.concatenate(
        [_ratios(limit, rate.denominator, max_workers * rate.numerator, inverse=True) for rate, limit in pairs]
    )
    # Rounded step times are in the order of the exact ones, except that different ones may round to the same float; of these
    # the smaller one has no larger capacities, so the sum of capacities puts them in order.
    row_order = np.lexsort((capacities.sum(axis=1), seconds))
    capacities, seconds = capacities[row_order], seconds[row_order]
    # Of rows with the same capacities only the first, which has the shortest step, can be a best step.
    is_new_row = np.append(True, (capacities[1:] != capacities[:-1]).any(axis=1))
    return StepTable(
        capabilities=capabilities,
        max_workers=max_workers,
        type_indices=type_indices[row_order][is_new_row],
        multiples=multiples[row_order][is_new_row],
        capacities=capacities[is_new_row],
        seconds=seconds[is_new_row],
        throughputs=np.append(throughputs[row_order][is_new_row], 0.0),
    )


def _ratios(limit: int, numerator_factor: int, denominator: int, *, inverse: bool = False) -> Floats:
    """Return (limit,) the floats nearest to ``k numerator_factor / denominator`` for k = 1, 2, ..., or to their inverses.

    Equal ratios give equal floats, so that rows of the table can be put in order and compared. Python divides whole numbers
    with a single rounding. Where all of them are exact as floats, numpy does so too, and faster.
    """
    if max(limit * numerator_factor, denominator) < 2**53:  # exact as floats
        multiples = np.arange(1, limit + 1) * float(numerator_factor)
        return np.asarray(denominator / multiples if inverse else multiples / denominator)
    if inverse:
        return np.array([denominator / (k * numerator_factor) for k in range(1, limit + 1)])
    return np.array([k * numerator_factor / denominator for k in range(1, limit + 1)])


def _capacity_column(weight: int, weights: Sequence[int], limits: Sequence[int], est_limit: int) -> Ints:
    """Return the EST capacities of a device of one type in the step times ``k / C_j``: for each type j, k from 1 to its limit.

    ``weight``: the type's capability as an integer (:func:`integer_weights`), ``est_limit``: most ESTs on one of its devices;
    ``weights`` and ``limits``: the same of all types j. Numbers that need more than 64 bits are computed by Python.
    """
    columns = []
    for other_weight, step_count in zip(weights, limits, strict=True):
        if weight * step_count < 2**62 <= other_weight:
            column = np.zeros(step_count, int)  # the quotients are below 1
        elif weight * step_count < 2**62:  # whole numbers of 64 bits are enough
            column = np.arange(1, step_count + 1, dtype=np.int64) * weight // other_weight
        else:
            column = np.fromiter(
                (min(k * weight // other_weight, est_limit) for k in range(1, step_count + 1)), np.int64, step_count
            )
        columns.append(np.minimum(column, est_limit))
    return np.concatenate(columns)


def device_counts(plan: Plan | Alternative) -> dict[str, int]:
    """Return device type -> number of devices that a plan uses."""
    counts: Counter[str] = Counter()
    for row in plan.assignments:
        counts[row.device_type] += row.devices
    return dict(counts)


def counts_of(problem: Problem, plan: Plan) -> Counts:
    """Return (T,) the numbers of devices that a plan uses, in the order of the problem's types."""
    return problem.counts(device_counts(plan))


def step_time_of(problem: Problem, counts: Counts) -> Fraction:
    """Return the smallest step time in seconds on (T,) devices. Raises ValueError where they cannot run every EST."""
    step = best_step(problem, counts)
    if step is None:
        raise ValueError(f"{counts} devices have no room for {problem.max_workers} ESTs")
    return step


def evaluate(problem: Problem, counts: Counts) -> Alternative:
    """Return the plan that distributes the ESTs (logical workers) over ``counts`` (T,) devices, with its figures.

    Its step is the smallest in which these devices run every EST. Its waste is the capability of the devices minus the
    throughput. The plan is verified from scratch (:func:`verify`). Raises ValueError where the devices cannot run the ESTs, or
    a constraint is broken.
    """
    step = step_time_of(problem, counts)
    capacities = [problem.est_capacity(device, step) for device in problem.devices]
    type_rows = distribute_ests(
        capacities,
        counts,
        problem.max_workers,
        integer_weights(tuple(device.capability_per_s for device in problem.devices)),
    )
    assignments = [
        Assignment(
            device_type=device.name, devices=devices, ests_per_device=ests, local_batch_size=ests * problem.batch_size
        )
        for device, rows in zip(problem.devices, type_rows, strict=True)
        for devices, ests in rows
    ]
    verified_step = verify(problem, assignments)
    if verified_step != step:
        raise ValueError(f"the plan's step takes {verified_step} s, not {step} s")
    throughput = problem.max_workers / step
    counted_types = zip(counts, problem.devices, strict=True)
    capability_in_use = sum((count * device.capability_per_s for count, device in counted_types), Fraction(0))
    return Alternative(
        iteration_s=float(step),
        throughput=float(throughput),
        assignments=assignments,
        est_count=sum(row.devices * row.ests_per_device for row in assignments),
        waste=float(capability_in_use - throughput),
        overload_factor=float(step),
    )


def plan_of(problem: Problem, evaluated: Alternative, *, optimal: bool, gap: float, solve_seconds: float) -> Plan:
    """Return a plan of the strategy est with the figures that :func:`evaluate` returned and the solver's proof.

    ``gap``: largest share of the step time that a better plan could save; ``optimal``: whether the plan is proven best;
    ``solve_seconds``: what the search took.
    """
    alternative_fields = {name: getattr(evaluated, name) for name in Alternative.model_fields}
    status = "optimal" if optimal else "feasible"
    return problem.plan("est", **alternative_fields, status=status, gap=gap, solve_seconds=solve_seconds)


def verify(problem: Problem, assignments: Sequence[Assignment]) -> Fraction:
    """Return the exact step time in seconds of a plan's ``assignments``, recomputed from scratch.

    Raises ValueError, which would be this package's mistake and not the user's, when an EST is missing or placed twice, a
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
