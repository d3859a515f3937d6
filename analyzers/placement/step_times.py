"""Step times ``k / C``: the next, the one before, the middle one, what given devices reach, and what none can beat."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

from ddltool.analyzers.placement.requirements import DeviceType, Problem

# How many devices of each type of the problem are used.
Counts = tuple[int, ...]
# Up to this many step times are listed to find the middle one; more are halved by arithmetic.
_LISTED_STEPS = 16


def middle(capabilities: Sequence[Fraction], lower: Fraction, upper: Fraction) -> Fraction | None:
    """Return a step time k / C of about the middle of those with ``lower <= k / C < upper``; None: there are none."""
    ranges = [(range(math.ceil(lower * each), math.ceil(upper * each)), each) for each in capabilities]
    if sum(len(steps) for steps, _ in ranges) > _LISTED_STEPS:
        steps, capability = max(ranges, key=lambda entry: len(entry[0]))
        return steps[len(steps) // 2] / capability
    listed = sorted({k / capability for steps, capability in ranges for k in steps})
    return listed[len(listed) // 2] if listed else None


def after(capabilities: Sequence[Fraction], step: Fraction) -> Fraction:
    """Return the next larger step time k / C."""
    return min((int(capability * step) + 1) / capability for capability in capabilities)


def before(capabilities: Sequence[Fraction], step: Fraction) -> Fraction:
    """Return the next smaller step time k / C, or 0."""
    return max((math.ceil(capability * step) - 1) / capability for capability in capabilities)


def reach(problem: Problem, counts: Counts) -> Fraction | None:
    """Return the smallest step time in seconds in which these devices hold every EST, and each of them at least one.

    None: however long the step is, there is no room, for the ESTs on a device are limited.
    """
    pairs = [(device, count) for device, count in zip(problem.devices, counts, strict=True) if count]
    capabilities = [device.capability_per_s for device, _ in pairs]
    pool = sum((device.capability_per_s * count for device, count in pairs), Fraction(0))
    lower = max(problem.max_workers / pool, 1 / min(capabilities))
    if any(device.most_ests is not None for device, _ in pairs):
        step = max(lower, problem.max_workers / min(capabilities))
        if not _holds(problem, pairs, step):
            return None
    else:
        step = max(lower, (problem.max_workers + sum(counts)) / pool)  # room for all, since floor(x) > x - 1
    while (trial := middle(capabilities, lower, step)) is not None:
        if _holds(problem, pairs, trial):
            step = trial
        else:
            lower = after(capabilities, trial)
    return step


def _holds(problem: Problem, pairs: Sequence[tuple[DeviceType, int]], step: Fraction) -> bool:
    return sum(count * problem.room(device, step) for device, count in pairs) >= problem.max_workers


def lower_bound(problem: Problem) -> Fraction:
    """Return a step time that no plan can beat: all ESTs spread evenly over the most capability that can be used."""
    devices = problem.devices
    if problem.single_type:
        return problem.max_workers / max(device.capability_per_s * problem.affordable(device) for device in devices)
    most = _fill([(device, 1) for device in devices], problem.device_limit)
    if problem.max_price_micro is not None:
        most = min(most, _fill([(device, device.price_micro or 0) for device in devices], problem.max_price_micro))
    return problem.max_workers / most


def _fill(offers: Sequence[tuple[DeviceType, int]], limit: int) -> Fraction:
    """Return the most capability for ``limit`` in all, at so much for each device, parts of devices allowed."""
    left, total = Fraction(limit), Fraction(0)
    for device, cost in sorted(offers, key=lambda offer: offer[1] / offer[0].capability_per_s):
        count = min(Fraction(device.count), left / cost) if cost else Fraction(device.count)
        total += count * device.capability_per_s
        left -= count * cost
    return total


def greedy(problem: Problem) -> Iterator[Counts]:
    """Yield choices that take as many devices as are allowed: of each type alone, fastest first, best value first."""
    devices = problem.devices
    for place, device in enumerate(devices):
        yield tuple(problem.affordable(device) if place == other else 0 for other in range(len(devices)))
    for value in (lambda device: -device.capability_per_s, _price_of_capability):
        left, money, taken = problem.device_limit, problem.max_price_micro, dict.fromkeys(range(len(devices)), 0)
        for place in sorted(taken, key=lambda place: value(devices[place])):
            price = devices[place].price_micro or 0
            taken[place] = min(devices[place].count, left)
            if money is not None and price:
                taken[place] = min(taken[place], money // price)
                money -= taken[place] * price
            left -= taken[place]
        yield tuple(taken.values())


def _price_of_capability(device: DeviceType) -> Fraction:
    return (device.price_micro or 0) / device.capability_per_s


def neighbours(counts: Counts) -> Iterator[Counts]:
    """Yield the choices with one device more or less."""
    for place, count in enumerate(counts):
        yield (*counts[:place], count + 1, *counts[place + 1 :])
        yield (*counts[:place], count - 1, *counts[place + 1 :])


def allowed(problem: Problem, counts: Counts) -> bool:
    """Return whether a choice of devices keeps the constraints, those on the ESTs and the throughput apart."""
    price = sum((device.price_micro or 0) * count for device, count in zip(problem.devices, counts, strict=True))
    return (
        1 <= sum(counts) <= problem.device_limit
        and all(0 <= count <= device.count for device, count in zip(problem.devices, counts, strict=True))
        and (problem.max_price_micro is None or price <= problem.max_price_micro)
        and not (problem.single_type and sum(map(bool, counts)) > 1)
    )
