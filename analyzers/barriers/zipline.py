"""ZipLine: the barrier with the least waiting time (ElasticBSP, Algorithm 2), by one sort and one scan of arrays.

The problem is the smallest range that covers one element of each of n sorted lists. For a barrier at time T the best
any worker can do is its latest end up to T, so only the choice of T is left, and T is one of the ends.
"""

from __future__ import annotations

import numpy as np

from ddltool.analyzers.barriers.ends import Barrier, EndTimes, Times


def zipline(times: Times) -> Barrier:
    """Return the barrier with the least waiting time ``max(Z) - min(Z)``.

    Of several the earliest wins, and every worker brings its latest end up to the barrier; so the answer does not
    depend on the order of the workers. Waiting times that differ by rounding alone (``EndTimes.rounding_s``) are equal.

    ``times``: per worker its (R_p,) iteration ends in seconds, ascending; lengths may differ. O(N log N) for N ends in
    all, where the published list handling takes O(N n).

    Raises InputError for ends that are missing, not finite or not ascending.
    """
    ends = EndTimes.of(times)
    size = len(ends.end_s)
    order = np.argsort(ends.end_s)
    at = ends.end_s[order]
    # Place k of the sorted line holds the latest end of its worker until the worker's next end comes, at place until[k].
    place = np.empty(size, dtype=np.int32 if size < 2**31 else np.int64)
    place[order] = np.arange(size, dtype=place.dtype)
    following = np.empty_like(place)
    following[:-1] = place[1:]
    following[ends.pointers[1:] - 1] = size
    until = np.maximum.accumulate(following[order])
    # The earliest of the workers' latest ends at place k is the first one that lasts beyond k: as many places lie
    # before it as there are running maxima up to k. Within a tie this sees ends that are about to be replaced, and so
    # too long a waiting; the tie's last place, whose barrier is the same, corrects it.
    begin = int(np.searchsorted(at, ends.first_s.max()))
    earliest = np.cumsum(np.bincount(until, minlength=size + 1)[:size])[begin:]
    waiting = at[begin:] - at[earliest]
    best = int(np.argmax(waiting <= waiting.min() + ends.rounding_s))
    return ends.latest(float(at[begin + best]))
