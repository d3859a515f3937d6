"""GridScan and FullGridScan: the published heuristics (ElasticBSP, Algorithm 1), for comparison with ZipLine.

For a pivot (one end of one worker) every worker brings the end nearest to it. GridScan tries the ends of one worker,
FullGridScan those of all. The nearest end of a worker changes halfway between two of its ends, so over a moving pivot
both the latest and the earliest chosen end are found by running extremes: O(N log N) for N ends, where the published
loops take O(R N) and O(N^2).
"""

from __future__ import annotations

import numpy as np

from ddltool.analyzers.barriers.ends import Barrier, EndTimes, Floats, Times


def gridscan(times: Times) -> Barrier:
    """Return the best barrier over the pivots of the worker whose first end is the earliest.

    Of several barriers the one with the earliest pivot wins, of two equally near ends the earlier, of workers with the
    same first end the one whose ends come first in lexicographic order. See :func:`~.zipline.zipline` for ``times``
    and errors.
    """
    ends = EndTimes.of(times)
    tied = np.flatnonzero(ends.first_s == ends.first_s.min())
    row = ends.row(int(tied[0])) if len(tied) == 1 else min((ends.row(int(w)) for w in tied), key=tuple)
    return _best_pivot(ends, row)


def full_gridscan(times: Times) -> Barrier:
    """Return the best barrier over the pivots of all workers; ties as in :func:`gridscan`."""
    ends = EndTimes.of(times)
    return _best_pivot(ends, np.sort(ends.end_s))


def _best_pivot(ends: EndTimes, pivots: Floats) -> Barrier:
    """Return the barrier of the first of the ascending ``pivots`` (k,) with the least waiting time.

    With the pivot the barrier moves forward too, so the earliest pivot has the earliest barrier.
    """
    # A worker's end is the nearest to pivots in (since, until].
    since = np.empty_like(ends.end_s)
    since[1:] = ends.end_s[:-1] + (ends.end_s[1:] - ends.end_s[:-1]) / 2
    since[ends.pointers[:-1]] = -np.inf
    until = np.append(since[1:], np.inf)
    until[ends.pointers[1:] - 1] = np.inf
    order = np.argsort(ends.end_s)
    at = ends.end_s[order]
    # Among the ends that a pivot has not passed, the earliest is in use (its worker has no earlier one left), and among
    # those whose turn has come, the latest is.
    passed = np.maximum.accumulate(until[order])
    begun = np.minimum.accumulate(since[order][::-1])[::-1]
    earliest = at[np.searchsorted(passed, pivots, side="left")]
    latest = at[np.searchsorted(begun, pivots, side="left") - 1]
    waiting = latest - earliest
    best = int(np.argmax(waiting <= waiting.min() + ends.rounding_s))
    return ends.barrier(ends.count(since < pivots[best]))
