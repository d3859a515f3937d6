"""ZipLine, the barrier with the least waiting time, and the published heuristics (ElasticBSP, Algorithms 1 and 2).

ZipLine's problem is the smallest range that covers one element of each of n sorted lists. For a barrier at time T each worker
best chooses its latest end up to T, so only T is left to choose, and T is one of the ends: one sort, one scan
(:mod:`~.tradeoff`, without a bound on the gap).

In GridScan and FullGridScan every worker chooses its end nearest to a pivot, which is an end of one given worker, or of any.
The nearest end of a worker changes halfway between two of its ends, so over ascending pivots both the latest and the earliest
chosen end are found by running extremes: O(N log N) for N ends, where the published loops take O(R N) and O(N^2).
"""

from __future__ import annotations

import numpy as np

from ddltool.analyzers.job.barriers.ends import Barrier, EndTimes, Times
from ddltool.analyzers.job.barriers.tradeoff import best_barrier
from ddltool.arrays import Floats


def zipline(times: Times) -> Barrier:
    """Return the barrier with the least waiting time ``max(Z) - min(Z)``; of several the earliest.

    Z are the ends that the workers choose, each its latest one up to the barrier, so the order of the workers does not matter.
    Waiting times that differ by at most ``EndTimes.rounding_s`` are equal. ``times``: per worker its (R_p,) iteration ends in
    seconds, ascending; lengths may differ. O(N log N) for N ends in all.

    Raises InputError for ends that are missing, not finite or not ascending.
    """
    return best_barrier(times, objective="waiting")


def gridscan(times: Times) -> Barrier:
    """Return GridScan's barrier: the best over the pivots of the worker whose first end is the earliest.

    For a pivot every worker chooses its nearest end. Ties go to the barrier with the earliest pivot, to the earlier of two
    equally near ends, and, of workers with the same first end, to the one whose ends come first in lexicographic order.
    ``times``: per worker its iteration ends in seconds, ascending. Raises InputError as :func:`zipline` does.
    """
    ends = EndTimes.of(times)
    rows = [ends.row(int(worker)) for worker in np.flatnonzero(ends.first_s == ends.first_s.min())]
    return _best_pivot(ends, rows[0] if len(rows) == 1 else min(rows, key=tuple))


def full_gridscan(times: Times) -> Barrier:
    """Return FullGridScan's barrier: the best over the ends of all workers as pivots.

    For a pivot every worker chooses its nearest end. Ties go to the barrier with the earliest pivot, and to the earlier of two
    equally near ends. ``times``: per worker its iteration ends in seconds, ascending.
    """
    ends = EndTimes.of(times)
    return _best_pivot(ends, np.sort(ends.end_s))


def _best_pivot(ends: EndTimes, pivots: Floats) -> Barrier:
    """Return the barrier with the least waiting time among those of the ascending ``pivots`` (k,), in seconds.

    Of equally good ones it is that of the first pivot, which is the earliest barrier.
    """
    # An end is its worker's nearest one to pivots in (since_s, until_s].
    since_s = np.empty_like(ends.end_s)
    since_s[1:] = ends.end_s[:-1] + (ends.end_s[1:] - ends.end_s[:-1]) / 2
    since_s[ends.pointers[:-1]] = -np.inf
    until_s = np.append(since_s[1:], np.inf)
    until_s[ends.pointers[1:] - 1] = np.inf
    order = np.argsort(ends.end_s)
    sorted_s = ends.end_s[order]
    # The earliest end with until_s >= pivot is a chosen one, because its worker has no earlier such end; and so is the latest
    # end with since_s < pivot.
    used_until_s = np.maximum.accumulate(until_s[order])
    used_since_s = np.minimum.accumulate(since_s[order][::-1])[::-1]
    earliest = sorted_s[np.searchsorted(used_until_s, pivots, side="left")]
    latest = sorted_s[np.searchsorted(used_since_s, pivots, side="left") - 1]
    waiting_s = latest - earliest
    best_index = int(np.argmax(waiting_s <= waiting_s.min() + ends.rounding_s))
    return ends.barrier(ends.count(since_s < pivots[best_index]))
