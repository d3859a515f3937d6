"""The least time by which workers can do enough, and the shortest iteration where each worker costs time: exact searches.

What every worker makes by a time T, its capacity, never falls with T. So the least T at which the capacities are enough
is found by bisection. Its bounds are always times of samples, and the capacities at T lie between those at the bounds,
so a step costs O(n log of that range): full bisections over sizes are needed at the beginning only.

Where an iteration takes longer the more workers take part, let K(T) be the fewest that make the whole batch by T; it
never rises with T. The shortest iteration is the least ``value(T, K(T))`` over all T, and in a range of times from T1 to
T2 nothing is less than ``value(T1, K(T2))``: ranges that cannot win are dropped, the others halved, the most promising
first. A point costs one evaluation of the capacities, where a bisection for each number of workers takes dozens.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.balancing.curves import Counts, Curves, capacities
from ddltool.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reach:
    """The least time by which something is so, and what the workers make by then."""

    at_s: float
    sizes: Counts
    """(n,) most samples that each makes by ``at_s``."""
    before: Counts
    """(n,) most samples that each makes by any earlier time."""


def earliest(enough: Callable[[Counts], bool], curves: Curves, least: int, most: Counts) -> Reach | None:
    """Return the least time at which ``enough`` is true of what the workers make by it; None if it never is.

    Args:
        enough: from (n,) capacities, which lie between ``least`` (or ``most``, if that is less) and ``most``, to whether
            they do; must stay true with larger ones, and be false where no worker makes more than ``least``.
        curves: seconds over batch size.
        least: samples that each worker has anyhow.
        most: (n,) most samples.

    Raises InputError where the time of ``most`` samples is no finite number.
    """
    low = np.minimum(most, least)
    high: Counts = np.array(most, dtype=np.int64)
    high_s = _last_s(curves, most > 0, high)
    if not math.isfinite(high_s):
        raise InputError("curves", "give times too large for a number", "seconds of the whole batch must be finite")
    if not enough(high):
        return None
    floor = low
    high_s = _last_s(curves, high > floor, high)
    next_s = _next_s(curves, low, most)
    while next_s < high_s:
        middle = _between(next_s, high_s)
        sizes = capacities(curves, middle, low, high)
        if enough(sizes):
            high, high_s = sizes, _last_s(curves, sizes > floor, sizes)
        else:
            low, next_s = sizes, _next_s(curves, sizes, most)
    return Reach(at_s=high_s, sizes=high, before=low)


def _last_s(curves: Curves, mask: NDArray[np.bool_], sizes: Counts) -> float:
    """Return when the last of the workers in ``mask`` ends its ``sizes`` samples; -1 if there are none."""
    with np.errstate(over="ignore"):
        seconds = curves.seconds(np.maximum(sizes, 1))
    return float(seconds.max(where=mask, initial=-1.0))


def _next_s(curves: Curves, sizes: Counts, most: Counts) -> float:
    """Return when the first of the workers would end one sample more than ``sizes``; infinity if none has room."""
    seconds = curves.seconds(np.maximum(np.minimum(sizes + 1, most), 1))
    return float(seconds.min(where=sizes < most, initial=np.inf))


def _between(low: float, high: float) -> float:
    """Return a number from ``low``, itself allowed, to below ``high``."""
    middle = low + (high - low) / 2
    return middle if low < middle < high else low


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Range:
    """Times from ``next_s`` to before ``until_s`` at which an iteration may end."""

    next_s: float
    until_s: float
    low: Counts
    """(n,) what the workers make by any time before ``next_s``."""
    high: Counts
    """(n,) what they make by ``until_s``."""
    fewest: int
    """No fewer workers make the total by a time of the range."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Shortest:
    """The shortest iteration."""

    iteration_s: float
    slowest_s: float
    """When the slowest worker may end at the latest."""
    sizes: Counts
    """(n,) most samples that each worker makes by then."""
    number: int
    """Most workers that may take part without making the iteration longer."""


def shortest(
    fewest: Callable[[Counts], int],
    value: Callable[[float, int], float],
    curves: Curves,
    most: Counts,
    largest: int,
) -> Shortest | None:
    """Return the shortest iteration over all times of the slowest worker; None where all make too little.

    Args:
        fewest: from (n,) capacities to the least number of workers that make the whole batch, 0 where all together do not;
            never rising with capacities (0 counting as infinite).
        value: from the seconds of the slowest worker and the number of workers to those of the iteration; never falling.
        curves: seconds over batch size.
        most: (n,) most samples.
        largest: most workers that can take part.

    Of equal iterations the one with most workers is taken. Exact: what decides are the given functions' own numbers.
    """
    whole = earliest(lambda sizes: fewest(sizes) > 0, curves, 0, most)
    if whole is None:
        return None
    best = (math.inf, 0, whole.at_s, whole.sizes)
    waiting: list[tuple[float, int, _Range]] = []
    order = itertools.count()

    def look(at_s: float, sizes: Counts) -> int:
        nonlocal best
        if not (number := fewest(sizes)):
            return 0
        found = value(at_s, number)
        if found < best[0] or (found == best[0] and number > best[1]):
            best = (found, number, at_s, sizes)
        return number

    def push(part: _Range) -> None:
        if part.next_s < part.until_s and (bound := value(part.next_s, part.fewest)) <= best[0]:
            heapq.heappush(waiting, (bound, next(order), part))

    look(whole.at_s, whole.sizes)
    until_s = _last_s(curves, most > 0, most)
    everything = look(until_s, most)
    rest = _next_s(curves, whole.sizes, most)
    push(_Range(next_s=rest, until_s=until_s, low=whole.sizes, high=most, fewest=everything))
    while waiting and waiting[0][0] <= best[0]:
        part = heapq.heappop(waiting)[2]
        middle = _between(part.next_s, part.until_s)
        while value(middle, part.fewest) > best[0]:  # where nothing can win any more
            middle = _between(part.next_s, middle)
        sizes = capacities(curves, middle, part.low, part.high)
        at_s, next_s = _last_s(curves, sizes > 0, sizes), _next_s(curves, sizes, most)
        if number := look(at_s, sizes):
            push(_Range(next_s=part.next_s, until_s=at_s, low=part.low, high=sizes, fewest=number))
        push(_Range(next_s=next_s, until_s=part.until_s, low=sizes, high=part.high, fewest=part.fewest))
    iteration_s, number, slowest_s, sizes = best
    while number < largest:
        middle_number = number + (largest - number + 1) // 2
        if value(slowest_s, middle_number) <= iteration_s:
            number = middle_number
        else:
            largest = middle_number - 1
    return Shortest(iteration_s=iteration_s, slowest_s=slowest_s, sizes=sizes, number=number)
