"""Best-first branch and bound, on which every exact search of ddltool that needs no solver is built."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar


class Ordered(Protocol):
    """A value with an order, such as a number or a tuple of numbers; the lesser is the better."""

    def __lt__(self, other: Any, /) -> bool:
        """Return whether this is the lesser."""
        ...


Box = TypeVar("Box")
Bound = TypeVar("Bound", bound=Ordered)


def search(
    roots: Iterable[Box],
    bound: Callable[[Box], Bound],
    parts: Callable[[Box], Iterable[Box]],
    to_beat: Callable[[], Bound],
    out_of_time: Callable[[], bool] = lambda: False,
) -> Bound | None:
    """Open boxes (sets of candidates), least bound first, until none can hold a better candidate than the best found.

    The caller keeps the best candidate: ``parts`` records it, and ``to_beat`` returns its cost.

    Args:
        roots: boxes that together hold all candidates.
        bound: returns a lower bound on the cost of every candidate in a box.
        parts: examines some candidates of a box, and returns boxes that hold the others.
        to_beat: returns the cost of the best candidate found so far.
        out_of_time: returns whether to stop; asked before each box.

    Returns the least bound of the boxes left unopened, or None if no box is left. If it is None or not less than
    ``to_beat()``, the best candidate found is optimal; else no candidate costs less than it.
    """
    order = itertools.count()  # breaks ties: of equal bounds, the box found first is opened first
    waiting = [(bound(box), next(order), box) for box in roots]
    heapq.heapify(waiting)
    while waiting and waiting[0][0] < to_beat() and not out_of_time():
        _, _, box = heapq.heappop(waiting)
        for part in parts(box):
            least = bound(part)
            if least < to_beat():  # else the box cannot hold a better candidate, and is dropped
                heapq.heappush(waiting, (least, next(order), part))
    return waiting[0][0] if waiting else None


def search_counts(
    least: int,
    most: int,
    cost: Callable[[int], Bound],
    bound: Callable[[int, int], Bound],
    out_of_time: Callable[[], bool] = lambda: False,
) -> tuple[int, Bound | None]:
    """Return the whole number of least ``cost`` from ``least`` to ``most``, and the bound that :func:`search` returns.

    Intervals are halved, and the cost at their ends is computed. ``cost`` is called several times for one number, so it
    should be cached. ``bound``: returns a lower bound on the costs from one number to another, both included.
    ``out_of_time``: returns whether to stop; the number is then the best so far.
    """
    best = min(least, most, key=cost)

    def halves(interval: tuple[int, int]) -> list[tuple[int, int]]:
        """Compare the middle of an interval with ``best``, and return its halves; [] if no number lies between its ends."""
        nonlocal best
        low, high = interval
        if high - low < 2:
            return []
        middle = (low + high) // 2
        best = min(best, middle, key=cost)
        return [(low, middle), (middle, high)]

    unopened = search([(least, most)], lambda ends: bound(*ends), halves, lambda: cost(best), out_of_time)
    return best, unopened
