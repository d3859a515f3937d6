"""Which devices take part in elastic supersteps.

At a barrier time T a worker's iterations grow with its speed, also when they are clipped to the fewest plus a bound on
the gap. So without a price the best devices are the fastest ones, down to some type: one candidate per type, and the best
of them is optimal. With a limit on the price every combination of counts is a candidate where they are few; else some are
tried, and the optimum without that limit bounds what is lost. Start at :func:`choose`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ddltool.analyzers.placement.problem import DeviceType, Problem

Rows = tuple[tuple[DeviceType, int], ...]
Best = Callable[[list[tuple[Fraction, int]]], tuple[Fraction, list[int]]]
"""From (iterations per second, how many) per type to the best barrier in seconds and the iterations per type."""

# Combinations of counts that are all looked at under a limit on the price, where each takes a millisecond.
MOST_COMBINATIONS = 2000


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceChoice:
    """Devices with their best superstep; exact numbers."""

    rows: Rows
    """Types with how many of each, fastest first."""
    barrier: Fraction
    """Seconds."""
    iterations: list[int]
    """Per row."""
    rate: Fraction
    """Mini-batches per second."""
    bound: Fraction
    """No choice has a higher rate; equal to ``rate``: optimal."""

    @property
    def devices(self) -> int:
        """How many devices in all."""
        return sum(count for _, count in self.rows)


def choose(problem: Problem, best: Best, combinations: int = MOST_COMBINATIONS) -> DeviceChoice:
    """Return the devices whose best superstep makes most mini-batches per second; of equal ones the fewest.

    ``combinations``: how many are all looked at under a limit on the price; of more, some are tried. At least one device
    must be affordable (:func:`~ddltool.analyzers.placement.problem.check_affordable`).
    """
    devices = sorted(problem.devices, key=lambda device: -device.capability_per_s)  # stable: names stay in order
    groups = [[device] for device in devices] if problem.single_type else [devices]
    if problem.max_price_micro is None:
        return _fittest((rows for group in groups for rows in _fastest(group, problem.device_limit)), best)
    most = [[problem.affordable(device) for device in group] for group in groups]
    if sum(math.prod(count + 1 for count in counts) for counts in most) <= combinations:
        return _fittest(_combinations(problem, groups, most), best)
    free = _fittest((rows for group in groups for rows in _fastest(group, problem.device_limit)), best)
    return _fittest(_guesses(problem, groups), best, free.rate)


def left_out(problem: Problem, rows: Rows) -> dict[str, int]:
    """Return the devices, by type, of which the limits would allow one more, but which would lower the rate."""
    if problem.single_type:
        return {}
    used = {device.name: count for device, count in rows}
    return {
        device.name: device.count - used.get(device.name, 0)
        for device in problem.devices
        if device.count > used.get(device.name, 0) and _allowed(problem, (*rows, (device, 1)))
    }


def _fittest(candidates: Iterator[Rows], best: Best, bound: Fraction | None = None) -> DeviceChoice:
    """Return the best of the candidates; ``bound`` None: there are no others."""
    choice: DeviceChoice | None = None
    for rows in candidates:
        barrier, iterations = best([(device.capability_per_s, count) for device, count in rows])
        rate = sum(k * count for k, (_, count) in zip(iterations, rows, strict=True)) / barrier
        top = rate if bound is None else max(rate, bound)
        found = DeviceChoice(rows=rows, barrier=barrier, iterations=iterations, rate=rate, bound=top)
        if choice is None or (found.rate, -found.devices) > (choice.rate, -choice.devices):
            choice = found
    assert choice is not None  # a device can be afforded
    return choice


def _fastest(devices: Sequence[DeviceType], limit: int) -> Iterator[Rows]:
    """Yield the fastest devices down to each type, at most ``limit``."""
    rows: Rows = ()
    for device in devices:
        count = min(device.count, limit - sum(number for _, number in rows))
        if not count:
            return
        rows = (*rows, (device, count))
        yield rows


def _combinations(problem: Problem, groups: list[list[DeviceType]], most: list[list[int]]) -> Iterator[Rows]:
    """Yield every combination of counts within the limits to which no device of a type that it uses can be added."""
    for group, counts in zip(groups, most, strict=True):
        for chosen in itertools.product(*(range(count + 1) for count in counts)):
            rows = tuple((device, count) for device, count in zip(group, chosen, strict=True) if count)
            if rows and _allowed(problem, rows) and not _grows(problem, rows):
                yield rows


def _guesses(problem: Problem, groups: list[list[DeviceType]]) -> Iterator[Rows]:
    """Yield devices taken one type after the other while money lasts: fastest first, and most speed for a price first."""
    for group in groups:
        by_price = sorted(group, key=lambda device: Fraction(device.price_micro or 0) / device.capability_per_s)
        for order in (group, by_price):
            for last in range(1, len(order) + 1):
                for first in range(last):
                    rows: Rows = ()
                    for device in order[first:last]:
                        room = problem.device_limit - sum(count for _, count in rows)
                        money = (problem.max_price_micro or 0) - _price(rows)
                        count = min(device.count, room)
                        if device.price_micro:
                            count = min(count, money // device.price_micro)
                        rows = (*rows, (device, count)) if count > 0 else rows
                    if rows:
                        yield tuple(sorted(rows, key=lambda row: -row[0].capability_per_s))


def _allowed(problem: Problem, rows: Rows) -> bool:
    """Return whether the devices keep to the limits on their number and price."""
    if sum(count for _, count in rows) > problem.device_limit:
        return False
    return problem.max_price_micro is None or _price(rows) <= problem.max_price_micro


def _grows(problem: Problem, rows: Rows) -> bool:
    """Return whether one more device of a type that is used would be allowed: it would bring mini-batches for nothing."""
    for place, (device, count) in enumerate(rows):
        if count < device.count and _allowed(problem, (*rows[:place], (device, count + 1), *rows[place + 1 :])):
            return True
    return False


def _price(rows: Rows) -> int:
    """Return what the devices cost in an hour, in millionths."""
    return sum(count * (device.price_micro or 0) for device, count in rows)
