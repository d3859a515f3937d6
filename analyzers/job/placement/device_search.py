"""The device counts of least cost for any cost function, by branch and bound over boxes. Start at :func:`best_devices`.

A box holds all device counts between two corners. Its bound is a lower bound on their values, by a cost model that leaves
out the costs that it cannot bound; boxes are opened in order of their bounds, until no other can hold a smaller value. So
the answer is over all subsets, and more devices, more options or more money never make it worse. Where time runs out, the
least bound of the unopened boxes limits the distance from the best value.
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

Found = TypeVar("Found")
Box = tuple[Counts, Counts]
"""The smallest and the largest (T,) device counts in a box."""
# Relative difference below which two values are equal.
_EQUAL = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Best(Generic[Found]):
    """The device counts of least value, and the evaluation on them."""

    found: Found
    counts: Counts
    value: float
    bound: float
    """No device counts have a smaller value; equal to ``value``: proven best."""
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
    """Return the device counts of least value that the problem's constraints allow; None where none has a value.

    Args:
        value: from (T,) counts and the least value so far to the value on exactly these devices, with its evaluation;
            None where there is no value, or none below the least one.
        bound: from the corners of a box to a lower bound on the values inside; infinite where no counts are possible.
        most: devices that can take part at all.
        limit_s: CPU seconds of this thread after which the best so far is returned; ``first`` and the largest counts
            are evaluated in any case.
        first: counts to evaluate before all others.
        spare: whether the fewest devices are taken among equal values; else the first found, which are larger counts.
    """
    widened = replace(problem, max_workers=most)
    started_s = time.thread_time()
    deadline_s = started_s + limit_s
    seen: set[Counts] = set()
    best: tuple[float, Counts, Found] | None = None

    def evaluate_counts(counts: Counts) -> None:
        nonlocal best
        if counts in seen or not widened.allows(counts):
            return
        seen.add(counts)
        least = math.inf if best is None else best[0]
        evaluated = value(counts, least * (1 + _EQUAL))
        if evaluated is None or evaluated[0] == math.inf:
            return
        is_smaller_tie = (
            spare and best is not None and sum(counts) < sum(best[1]) and evaluated[0] <= least * (1 + _EQUAL)
        )
        if evaluated[0] < least * (1 - _EQUAL) or is_smaller_tie:
            best = (evaluated[0], counts, evaluated[1])

    for counts in itertools.chain(first, _largest_counts(widened, most)):
        evaluate_counts(counts)
    no_devices = (0,) * len(problem.devices)

    def split_box(box: Box) -> list[Box]:
        evaluate_counts(_largest_allowed(widened, *box, most))
        return [] if box[0] == box[1] else [half for half in _halve_box(*box) if sum(half[0]) <= most]

    least_bound = search(
        [(no_devices, root) for root in _root_corners(problem)],
        lambda box: bound(*box),
        split_box,
        lambda: math.inf if best is None else best[0] * (1 - _EQUAL),
        lambda: time.thread_time() >= deadline_s,
    )
    if best is None:
        return None
    if spare and time.thread_time() < deadline_s:
        for smaller_counts in _smaller_counts(best[1]):
            evaluate_counts(smaller_counts)
    best_value, counts, found = best
    lower_bound = best_value if least_bound is None else min(best_value, least_bound)
    seconds = time.thread_time() - started_s
    return Best(
        found=found,
        counts=counts,
        value=best_value,
        bound=lower_bound,
        tried=len(seen),
        seconds=seconds,
    )


def _root_corners(problem: Problem) -> list[Counts]:
    offered = tuple(device.count for device in problem.devices)
    if not problem.single_type:
        return [offered]
    return [
        tuple(count * (type_index == only_index) for type_index, count in enumerate(offered))
        for only_index in range(len(offered))
    ]


def _largest_counts(problem: Problem, max_devices: int) -> Iterator[Counts]:
    """Yield the largest counts of all types, of each type alone, and of the fastest two types, three types, and so on."""
    order = problem.fastest_first
    type_sets = [[type_index] for type_index in order]
    if not problem.single_type:
        type_sets = [order, *type_sets, *(order[:end] for end in range(2, len(order)))]
    for type_indices in type_sets:
        yield tuple(problem.filled(type_indices, max_devices))


def _largest_allowed(problem: Problem, low: Counts, high: Counts, max_devices: int) -> Counts:
    """Return the largest counts of a box that the constraints allow, filled with the fastest types first."""
    box_problem = problem.offering(high)
    return tuple(box_problem.filled(box_problem.fastest_first, max_devices, low))


def _halve_box(low: Counts, high: Counts) -> list[tuple[Counts, Counts]]:
    """Return the halves of a box: without and with its first undecided type, else split along its longest side.

    Whether a type is used at all decides which links are used, and with them the bound.
    """
    undecided = [type_index for type_index in range(len(low)) if low[type_index] == 0 < high[type_index]]
    type_index = undecided[0] if undecided else max(range(len(low)), key=lambda index: high[index] - low[index])
    middle = 0 if undecided else (low[type_index] + high[type_index]) // 2
    return [
        (low, (*high[:type_index], middle, *high[type_index + 1 :])),
        ((*low[:type_index], middle + 1, *low[type_index + 1 :]), high),
    ]


def _smaller_counts(counts: Counts) -> Iterator[Counts]:
    """Yield the counts with 1, 2, 4, ... devices less of one type."""
    for type_index, count in enumerate(counts):
        step = 1
        while step <= count:
            yield (*counts[:type_index], count - step, *counts[type_index + 1 :])
            step *= 2
