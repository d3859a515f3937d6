"""Branch and bound, best first: what every exact search here that is not a solver's is made of."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar


class Ordered(Protocol):
    """What can be compared: a number, or a tuple of them."""

    def __lt__(self, other: Any, /) -> bool:
        """Return whether this is the better one."""
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
    """Open boxes (sets of candidates), least bound first, until no other can hold a candidate better than the best found.

    Args:
        roots: boxes that hold all candidates together.
        bound: returns a lower bound on the cost of every candidate in a box.
        parts: examines a box, and returns boxes that hold the candidates not examined.
        to_beat: returns the cost of the best candidate found so far, which ``parts`` may lower.
        out_of_time: whether to stop.

    Returns the least bound of the boxes left unopened, a lower bound on what is better than the best found; None where no
    box is left, so that the best found is optimal.
    """
    order = itertools.count()  # of equal bounds the box that was found first
    waiting = [(bound(box), next(order), box) for box in roots]
    heapq.heapify(waiting)
    while waiting and waiting[0][0] < to_beat() and not out_of_time():
        _, _, box = heapq.heappop(waiting)
        for part in parts(box):
            # What cannot hold a better candidate is never opened.
            if (least := bound(part)) < to_beat():
                heapq.heappush(waiting, (least, next(order), part))
    return waiting[0][0] if waiting else None


def search_counts(
    least: int,
    most: int,
    cost: Callable[[int], Bound],
    bound: Callable[[int, int], Bound],
    out_of_time: Callable[[], bool] = lambda: False,
) -> tuple[int, Bound | None]:
    """Return the best whole number from ``least`` to ``most``, and what :func:`search` returns of those not looked at.

    Intervals are halved, and the ends of each are looked at. ``cost`` is asked again for the same number, so it should
    be cached. ``bound`` returns a lower bound on the costs between two numbers, ends included. ``out_of_time``: whether
    to stop.
    """
    best = min(least, most, key=cost)

    def halves(interval: tuple[int, int]) -> list[tuple[int, int]]:
        """Look at the middle of an interval, and return its halves; none where nothing lies between its ends."""
        nonlocal best
        low, high = interval
        if high - low < 2:
            return []
        middle = (low + high) // 2
        best = min(best, middle, key=cost)
        return [(low, middle), (middle, high)]

    unopened = search([(least, most)], lambda ends: bound(*ends), halves, lambda: cost(best), out_of_time)
    return best, unopened
