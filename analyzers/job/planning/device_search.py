"""The device counts of least cost, for any cost function, by branch and bound over boxes. Start at :func:`best_devices`.

A box holds all device counts between two corners, and has a lower bound on their values. Boxes are split in the order of
their bounds, until no other can hold a smaller value. So the answer is the best over all subsets of the devices, and more
devices, options or money never make it worse. Where time runs out, the least bound of the open boxes limits the distance
from the best value.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from ddltool.analyzers.job.placement.problem import Problem
from ddltool.analyzers.job.placement.steps import Counts
from ddltool.search import search

Evaluation = TypeVar("Evaluation")
Box = tuple[Counts, Counts]
"""The smallest and the largest (T,) device counts in a box."""
# Relative difference below which two values are equal.
_EQUAL = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Best(Generic[Evaluation]):
    """The device counts of least value, and the evaluation on them."""

    evaluation: Evaluation
    counts: Counts
    value: float
    bound: float
    """No device counts have a smaller value; equal to ``value``: proven best."""
    tried: int
    """Number of device counts that were evaluated."""
    seconds: float
    """CPU seconds of the search."""

    @property
    def gap(self) -> float:
        """How much higher the value is than the bound, as a share; 0: proven best; infinite for a bound of 0."""
        if self.value <= self.bound * (1 + _EQUAL):
            return 0.0
        return self.value / self.bound - 1 if self.bound > 0 else math.inf


def best_devices(
    problem: Problem,
    value: Callable[[Counts, float], tuple[float, Evaluation] | None],
    bound: Callable[[Counts, Counts], float],
    *,
    most: int,
    limit_s: float,
    first: Iterable[Counts] = (),
    spare: bool = True,
) -> Best[Evaluation] | None:
    """Return the device counts of least value that the problem's constraints allow; None where none has a value.

    Args:
        problem: the offered devices and the constraints that counts must keep.
        value: takes (T,) counts and the least value so far; returns the value on exactly these devices, with its evaluation
            (whatever the caller wants back of the best counts), or None where there is no value, or only one above the least.
        bound: takes the two corners of a box, (T,) each; returns a lower bound on the values inside, infinite where no
            counts are possible.
        most: largest number of devices that can take part.
        limit_s: CPU seconds of this thread after which the best so far is returned; ``first`` and the largest counts
            are evaluated in any case.
        first: counts to evaluate before all others.
        spare: whether to take the fewest devices among equal values; else the counts that were found first, which are larger.
    """
    widened = replace(problem, max_workers=most)
    started_s = time.thread_time()
    deadline_s = started_s + limit_s
    seen: set[Counts] = set()
    best: tuple[float, Counts, Evaluation] | None = None

    def try_counts(counts: Counts) -> None:
        """Evaluate ``counts`` unless that was done, and keep them in ``best`` if they are better, or as good and fewer."""
        nonlocal best
        if counts in seen or not widened.allows(counts):
            return
        seen.add(counts)
        least = math.inf if best is None else best[0]
        evaluated = value(counts, least * (1 + _EQUAL))
        if evaluated is None or evaluated[0] == math.inf:
            return
        has_fewer = spare and best is not None and sum(counts) < sum(best[1])
        if evaluated[0] < least * (1 - _EQUAL) or (has_fewer and evaluated[0] <= least * (1 + _EQUAL)):
            best = (evaluated[0], counts, evaluated[1])

    def split(box: Box) -> list[Box]:
        """Try the largest allowed counts of a box, and return its halves; a box that holds a single point has none."""
        offered = widened.offering(box[1])
        try_counts(tuple(offered.with_added(offered.fastest_first, most, box[0])))
        return [] if box[0] == box[1] else [half for half in _halves(box) if sum(half[0]) <= most]

    # Good counts first, because all boxes with a bound above the best value so far are dropped.
    for counts in itertools.chain(first, _largest_counts(widened, most)):
        try_counts(counts)
    # The least bound of the boxes that were still open when the time was up; None: all were searched.
    least_bound = search(
        _roots(problem),
        lambda box: bound(*box),
        split,
        lambda: math.inf if best is None else best[0] * (1 - _EQUAL),
        lambda: time.thread_time() >= deadline_s,
    )
    if best is None:
        return None
    if spare and time.thread_time() < deadline_s:  # boxes with values equal to the best were not searched
        for smaller_counts in _smaller_counts(best[1]):
            try_counts(smaller_counts)
    best_value, counts, evaluation = best
    return Best(
        evaluation=evaluation,
        counts=counts,
        value=best_value,
        bound=best_value if least_bound is None else min(best_value, least_bound),
        tried=len(seen),
        seconds=time.thread_time() - started_s,
    )


def _roots(problem: Problem) -> list[Box]:
    """Return boxes that together hold all allowed counts: one, or one for each type where types may not mix."""
    offered = tuple(device.count for device in problem.devices)
    none = (0,) * len(offered)
    if not problem.single_type:
        return [(none, offered)]
    return [(none, (*none[:index], count, *none[index + 1 :])) for index, count in enumerate(offered)]


def _largest_counts(problem: Problem, max_devices: int) -> Iterator[Counts]:
    """Yield the largest allowed counts of all types, each type alone, the fastest two types, three types, and so on.

    Where types may not mix, those of each type alone.
    """
    order = problem.fastest_first
    type_sets = [[type_index] for type_index in order]
    if not problem.single_type:
        type_sets = [order, *type_sets, *(order[:end] for end in range(2, len(order)))]
    for type_indices in type_sets:
        yield tuple(problem.with_added(type_indices, max_devices))


def _halves(box: Box) -> list[Box]:
    """Return the two halves of a box, which must hold more than one point.

    While some type's count may be 0 or more, one half has none of the first such type, and the other at least 1. Otherwise the
    widest range of counts is halved. Types are decided first because the types in use determine the links, and these the bound.
    """
    low, high = box
    undecided = [index for index in range(len(low)) if low[index] == 0 < high[index]]
    if undecided:
        split_index = undecided[0]
        middle = 0
    else:
        split_index = max(range(len(low)), key=lambda index: high[index] - low[index])
        middle = (low[split_index] + high[split_index]) // 2
    return [
        (low, (*high[:split_index], middle, *high[split_index + 1 :])),
        ((*low[:split_index], middle + 1, *low[split_index + 1 :]), high),
    ]


def _smaller_counts(counts: Counts) -> Iterator[Counts]:
    """Yield (T,) counts with 1, 2, 4, ... devices of one type less than ``counts``."""
    for index, count in enumerate(counts):
        for power in range(count.bit_length()):
            yield (*counts[:index], count - 2**power, *counts[index + 1 :])
