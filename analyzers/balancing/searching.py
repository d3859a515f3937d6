"""The least time by which workers can do enough, and the shortest iteration where each worker costs time: exact searches.

What every worker makes by a time T, its capacity, never falls with T. So the least T at which the capacities are enough
is found by bisection. Its bounds are always times of samples, and the capacities at T lie between those at the bounds,
so a step costs O(n log of that range): full bisections over sizes are needed at the beginning only.

Where an iteration takes longer the more workers take part, let K(T) be the fewest that make the whole batch by T; it
never rises with T. The shortest iteration is the least ``value(T, K(T))`` over all T, and in a range of times from T1 to
T2 nothing is less than ``value(T1, K(T2))``: ranges that cannot win are dropped, the others halved, the most promising
first. A point costs one evaluation of the capacities, where a bisection for each number of workers takes dozens.

``value`` may be flat over times, as where synchronisation hides computation. A range that can only be as short as the
best is looked into only if more workers could take part in it: of those that can by T2, so many that ``value`` at T1
allows one more than the best has. So of a plateau few times are looked at, not those of all samples on it.
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
    """When the slowest worker ends: the least time by which ``number`` workers can."""
    sizes: Counts
    """(n,) most samples that each worker makes by then."""
    number: int
    """Most workers that can take part without making the iteration longer."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Best:
    """The best iteration seen, and whether a range of times can hold a better one."""

    fewest: Callable[[Counts], int]
    largest: Callable[[Counts], int]
    value: Callable[[float, int], float]
    iteration_s: float = math.inf
    number: int = 0
    at_s: float = math.inf
    sizes: Counts | None = None

    def look(self, at_s: float, sizes: Counts) -> int:
        """See what an iteration takes whose slowest worker ends at ``at_s``; return the fewest workers, 0 for none."""
        fewest = self.fewest(sizes)
        if not fewest or (found := self.value(at_s, fewest)) > self.iteration_s:
            return fewest
        if found < self.iteration_s:
            self.iteration_s, self.number = found, 0
        if self._more(at_s, sizes):
            self.number = self._most(at_s, max(fewest, self.number), self.largest(sizes))
            self.at_s, self.sizes = at_s, sizes
        return fewest

    def may_win(self, bound: float, part: _Range) -> bool:
        """Return whether a range with no iteration below ``bound`` may hold a shorter one, or an equal one of more workers."""
        return bound < self.iteration_s or (bound == self.iteration_s and self._more(part.next_s, part.high))

    def _more(self, from_s: float, until: Counts) -> bool:
        """Return whether more workers than the best's may take part from ``from_s`` on if each makes at most ``until``."""
        return self.largest(until) > self.number and self.value(from_s, self.number + 1) <= self.iteration_s

    def _most(self, at_s: float, number: int, largest: int) -> int:
        """Return the most workers up to ``largest``, of which ``number`` are not too many, that keep the iteration."""
        while number < largest:
            middle = number + (largest - number + 1) // 2
            if self.value(at_s, middle) <= self.iteration_s:
                number = middle
            else:
                largest = middle - 1
        return number


def shortest(
    fewest: Callable[[Counts], int],
    largest: Callable[[Counts], int],
    value: Callable[[float, int], float],
    curves: Curves,
    most: Counts,
) -> Shortest | None:
    """Return the shortest iteration over all times of the slowest worker; None where all make too little.

    Args:
        fewest: from (n,) capacities to the least number of workers that make the whole batch, 0 where all together do not;
            never rising with capacities (0 counting as infinite).
        largest: from (n,) capacities to the most workers that can take part, with a sample at least for each; no less than
            ``fewest``, never falling with capacities.
        value: from the seconds of the slowest worker and the number of workers to those of the iteration; never falling.
        curves: seconds over batch size.
        most: (n,) most samples.

    Of equal iterations the one with most workers is taken, and of those the one whose slowest worker ends first. Exact: what
    decides are the given functions' own numbers.
    """
    whole = earliest(lambda sizes: fewest(sizes) > 0, curves, 0, most)
    if whole is None:
        return None
    best = _Best(fewest=fewest, largest=largest, value=value)
    waiting: list[tuple[float, int, _Range]] = []
    order = itertools.count()

    def push(part: _Range) -> None:
        if part.next_s < part.until_s and best.may_win(bound := value(part.next_s, part.fewest), part):
            heapq.heappush(waiting, (bound, next(order), part))

    best.look(whole.at_s, whole.sizes)
    until_s = _last_s(curves, most > 0, most)
    everything = best.look(until_s, most)
    rest = _next_s(curves, whole.sizes, most)
    push(_Range(next_s=rest, until_s=until_s, low=whole.sizes, high=most, fewest=everything))
    while waiting:
        bound, _, part = heapq.heappop(waiting)
        if not best.may_win(bound, part):  # something better was found since
            continue
        middle = _between(part.next_s, part.until_s)
        while value(middle, part.fewest) > best.iteration_s:  # where nothing can win any more
            middle = _between(part.next_s, middle)
        sizes = capacities(curves, middle, part.low, part.high)
        at_s, next_s = _last_s(curves, sizes > 0, sizes), _next_s(curves, sizes, most)
        if number := best.look(at_s, sizes):
            push(_Range(next_s=part.next_s, until_s=at_s, low=part.low, high=sizes, fewest=number))
        push(_Range(next_s=next_s, until_s=part.until_s, low=sizes, high=part.high, fewest=part.fewest))
    return _first(best, curves, most)


def _first(best: _Best, curves: Curves, most: Counts) -> Shortest:
    """Return the best iteration with the slowest worker as early as its number of workers can have it."""
    assert best.sizes is not None
    number, at_s, sizes = best.number, best.at_s, best.sizes
    # Where any earlier time would have made an iteration of so many workers shorter, none of them can do it.
    if best.value(math.nextafter(at_s, 0.0), number) >= best.iteration_s:
        reach = earliest(lambda made: 0 < best.fewest(made) <= number <= best.largest(made), curves, 0, sizes)
        assert reach is not None  # the best itself is one
        at_s, sizes = reach.at_s, reach.sizes
    return Shortest(iteration_s=best.iteration_s, slowest_s=at_s, sizes=sizes, number=number)
