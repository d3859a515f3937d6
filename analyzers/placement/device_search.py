"""Which devices: the best numbers of each type for whatever they are asked to do, by branch and bound over boxes of counts.

A box holds all numbers of devices between two corners. Its bound is a value that none of them is below, by a cost model that
leaves out what it cannot bound; boxes are opened the most promising first, until no other can hold anything better. So the
answer is over all subsets, and more devices, more options or more money never make it worse. Where time runs out, the least
bound of the boxes left says how far the answer may be from the best. Start at :func:`best_devices`.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from ddltool.analyzers.placement.problem import Problem
from ddltool.analyzers.placement.steps import Counts

Found = TypeVar("Found")
# Values closer than this are equal: fewer devices are taken.
_EQUAL = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Best(Generic[Found]):
    """What was found on the best devices."""

    found: Found
    counts: Counts
    value: float
    bound: float
    """No devices have a smaller value; equal to ``value``: proven."""
    tried: int
    seconds: float

    @property
    def gap(self) -> float:
        """Relative distance to the bound; 0: proven."""
        if self.value <= self.bound * (1 + _EQUAL):
            return 0.0
        return self.value / self.bound - 1 if self.bound > 0 else math.inf


def best_devices(
    problem: Problem,
    value: Callable[[Counts, float], tuple[float, Found] | None],
    bound: Callable[[Counts, Counts], float],
    *,
    most: int,
    limit_s: float,
    first: Iterable[Counts] = (),
    spare: bool = True,
) -> Best[Found] | None:
    """Return what has the least value on any devices that the problem's constraints allow; None where nothing has one.

    Args:
        value: from the numbers of each type, and the least value so far, to the value on exactly these devices and what it is
            of; None where there is none, or none below the least.
        bound: from the corners of a box to a value that no numbers inside it are below; infinite where none are possible.
        most: devices that can take part at all.
        limit_s: seconds of computing after which the best so far is returned, however busy the machine is; at least what
            ``first`` and the largest sets give.
        first: numbers to look at before all others.
        spare: whether of equal values the one with fewer devices is taken; else what was found first, of the larger sets.
    """
    roomy = replace(problem, max_workers=most)
    started = time.thread_time()
    ends = started + limit_s
    seen: set[Counts] = set()
    best: tuple[float, Counts, Found] | None = None

    def look(counts: Counts) -> None:
        nonlocal best
        if counts in seen or not roomy.allows(counts):
            return
        seen.add(counts)
        least = math.inf if best is None else best[0]
        made = value(counts, least * (1 + _EQUAL))
        if made is None or made[0] == math.inf:
            return
        fewer = spare and best is not None and sum(counts) < sum(best[1]) and made[0] <= least * (1 + _EQUAL)
        if made[0] < least * (1 - _EQUAL) or fewer:
            best = (made[0], counts, made[1])

    for counts in itertools.chain(first, _largest(roomy, most)):
        look(counts)
    order = itertools.count()
    none = (0,) * len(problem.devices)
    boxes = [(bound(none, high), next(order), none, high) for high in _roots(problem)]
    heapq.heapify(boxes)
    while boxes and (best is None or boxes[0][0] < best[0] * (1 - _EQUAL)) and time.thread_time() < ends:
        _, _, low, high = heapq.heappop(boxes)
        look(_corner(roomy, low, high, most))
        if low == high:
            continue
        for part in _halves(low, high):
            if sum(part[0]) <= most and (least := bound(*part)) < (math.inf if best is None else best[0]):
                heapq.heappush(boxes, (least, next(order), *part))
    if best is None:
        return None
    if spare and time.thread_time() < ends:
        for fewer in _fewer(best[1]):
            look(fewer)
    worth, counts, found = best
    left = boxes[0][0] if boxes else worth
    seconds = time.thread_time() - started
    return Best(found=found, counts=counts, value=worth, bound=min(worth, left), tried=len(seen), seconds=seconds)


def _roots(problem: Problem) -> list[Counts]:
    every = tuple(device.count for device in problem.devices)
    if not problem.single_type:
        return [every]
    return [tuple(count * (kind == only) for kind, count in enumerate(every)) for only in range(len(every))]


def _largest(problem: Problem, most: int) -> Iterator[Counts]:
    """Yield the largest sets: of all types, of each alone, and of the fastest ones down to each."""
    order = problem.fastest_first
    sets = [[kind] for kind in order]
    if not problem.single_type:
        sets = [order, *sets, *(order[:last] for last in range(2, len(order)))]
    for kinds in sets:
        yield tuple(problem.filled(kinds, most))


def _corner(problem: Problem, low: Counts, high: Counts, most: int) -> Counts:
    """Return the most devices of a box that the constraints allow, the fastest first."""
    part = problem.offering(high)
    return tuple(part.filled(part.fastest_first, most, low))


def _halves(low: Counts, high: Counts) -> list[tuple[Counts, Counts]]:
    """Return a box in two: without a type and with it, for that decides on the network, else along its longest side."""
    open_kinds = [kind for kind in range(len(low)) if low[kind] == 0 < high[kind]]
    kind = open_kinds[0] if open_kinds else max(range(len(low)), key=lambda place: high[place] - low[place])
    middle = 0 if open_kinds else (low[kind] + high[kind]) // 2
    return [
        (low, (*high[:kind], middle, *high[kind + 1 :])),
        ((*low[:kind], middle + 1, *low[kind + 1 :]), high),
    ]


def _fewer(counts: Counts) -> Iterator[Counts]:
    """Yield numbers with less of one type, in steps that grow: what the best can do without."""
    for kind, count in enumerate(counts):
        step = 1
        while step <= count:
            yield (*counts[:kind], count - step, *counts[kind + 1 :])
            step *= 2
