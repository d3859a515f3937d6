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
    """Open boxes, the most promising first, until no other can hold anything below what is ``to_beat``.

    Args:
        roots: boxes that hold everything together.
        bound: from a box to what nothing inside it is below.
        parts: looks into a box, and returns boxes that hold what was not seen of it.
        to_beat: the best so far.
        out_of_time: whether to stop.

    Returns the least bound of the boxes that were not opened; None: there is none left, so the best is proven.
    """
    order = itertools.count()  # of equal bounds the box that was found first
    waiting = [(bound(box), next(order), box) for box in roots]
    heapq.heapify(waiting)
    while waiting and waiting[0][0] < to_beat() and not out_of_time():
        _, _, box = heapq.heappop(waiting)
        for part in parts(box):
            if (least := bound(part)) < to_beat():
                heapq.heappush(waiting, (least, next(order), part))
    return waiting[0][0] if waiting else None
