"""Barriers under a bound on staleness, and barriers with the least waiting of all workers together.

Start at :func:`best_barrier`. ElasticBSP minimises the waiting of one worker, the first to arrive, and bounds the iteration gap
only by the lookahead. Here the gap (most iterations minus fewest) may be bounded, and the waiting of all workers minimised, per
barrier or per iteration made until it; all exactly.

For a barrier at time T let L_p be worker p's iterations up to T, m the least of them, and s the bound on the gap. No worker may
make more than ``m + s`` iterations. If each makes ``min(L_p, m + s)``, the bound is kept and every worker arrives as late as
possible, so this is best for T under any objective that falls with later arrivals and more iterations. As T grows, worker p's
i-th end becomes its choice at ``max(e_i, M_(i-s))``, where ``M_j`` is the time by which the slowest worker has ended j
iterations. With ends sorted by these times, running sums give the total waiting and running maxima the first arrival for
every T: O(N log N) per bound for N ends.

If the bound leaves no worker that arrives at T itself, the barrier is really earlier. But then T is not chosen, because that
earlier time is a candidate too, with the same or later arrivals, and so has less waiting.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from ddltool.analyzers.job.barriers.ends import Barrier, EndTimes, Times
from ddltool.arrays import Floats, Ints
from ddltool.errors import InputError

Objective = Literal["waiting", "total", "per_iteration"]
OBJECTIVES: tuple[Objective, ...] = ("waiting", "total", "per_iteration")
# Running sums have rounding errors: totals that differ by less than this share of the whole horizon count as equal.
_RELATIVE = 1e-12


def best_barrier(times: Times, *, objective: Objective = "total", max_gap: int | None = None) -> Barrier:
    """Return the earliest barrier that minimises the objective with an iteration gap of at most ``max_gap``.

    A barrier chooses one iteration of each worker p, which ends at ``z_p`` (all of them: Z); the worker then waits for the
    last one, until ``max(Z)``. The gap is the most iterations of a worker until then minus the fewest.

    Args:
        times: per worker its iteration ends in seconds, ascending; workers may have unequally many.
        objective: ``waiting``, of the first to arrive: ``max(Z) - min(Z)``; ``total``, of all workers: the sum of
            ``max(Z) - z_p``; ``per_iteration``: that sum over the iterations of all workers.
        max_gap: largest iteration gap; None: no bound.

    With a gap of 0 all workers make the same number of iterations. Values that differ by rounding errors are ties. Raises
    InputError for a negative bound, and for ends that :meth:`EndTimes.of` refuses.
    """
    return _Scan(EndTimes.of(times)).best(objective, max_gap)


def tradeoff(times: Times, points: int | None = None) -> dict[int, dict[Objective, Barrier]]:
    """Return bound on the iteration gap -> objective -> best barrier, to show the gain of a wider gap.

    The bounds go from 0 to the gap of the best barriers without a bound, beyond which nothing improves. ``points``: largest
    number of bounds, which are spread evenly over the logarithm; None: all. ``times``: per worker its iteration ends in
    seconds, ascending. Raises InputError for ends that :meth:`EndTimes.of` refuses.
    """
    scan = _Scan(EndTimes.of(times))
    widest_gap = max(scan.best(objective, None).iteration_gap for objective in OBJECTIVES)
    gaps = list(range(widest_gap + 1))
    if points is not None and widest_gap >= points:
        gaps = [0, *np.unique(np.geomspace(1, widest_gap, points - 1).round().astype(int)).tolist()]
    return {gap: {objective: scan.best(objective, gap) for objective in OBJECTIVES} for gap in gaps}


class _Scan:
    """The search for the best barrier, with the parts that do not depend on the bound: sorted ends and candidate barriers.

    A candidate is the time of any end by which every worker has ended an iteration. Shapes: N ends of n workers, k candidates,
    R iterations of the worker that has most.
    """

    def __init__(self, ends: EndTimes) -> None:
        """Sort the (N,) ends and compute the arrays that all objectives use."""
        self.ends = ends
        self.order = np.argsort(ends.end_s)  # (N,) indices of the ends by time
        sorted_s = ends.end_s[self.order]
        is_new = np.append(True, sorted_s[1:] > sorted_s[:-1])
        self.barriers_s = sorted_s[is_new & (sorted_s >= ends.first_s.max())]  # (k,) ascending
        lengths = np.diff(ends.pointers)
        self.place = np.arange(len(sorted_s)) - np.repeat(ends.pointers[:-1], lengths)  # (N,) from 0 within the worker
        common_iterations = int(lengths.min())
        common_indices = ends.pointers[:-1, None] + np.arange(common_iterations)
        # (R,) time by which every worker has ended its j-th iteration; infinite beyond the ends of the worker with fewest.
        self.slowest_s = np.full(int(lengths.max()), np.inf)
        self.slowest_s[:common_iterations] = ends.end_s[common_indices].max(axis=0)
        # Times are taken from the first end on, because sums of large clock times would lose digits.
        self.base_s = float(ends.first_s.min())
        # (N,) each end minus its worker's end before it; a worker's first one is counted from the base
        self.steps_s = np.diff(ends.end_s, prepend=self.base_s)
        self.steps_s[ends.pointers[:-1]] = ends.first_s - self.base_s

    def best(self, objective: Objective, max_gap: int | None) -> Barrier:
        """Return the best barrier for ``objective`` with an iteration gap of at most ``max_gap``; None: no bound.

        Of barriers whose values differ only by rounding errors the earliest is returned. Raises InputError for a negative
        bound.
        """
        if max_gap is not None and max_gap < 0:
            raise InputError("max_gap", f"is {max_gap}", "the bound on the iteration gap is 0 or more")
        in_use_s = self._moments(max_gap)
        # (k,) the value of each candidate, and the difference up to which two values count as equal
        if objective == "waiting":
            objective_values = self._longest(in_use_s)
            rounding = self.ends.rounding_s
        else:
            objective_values, iterations = self._total(in_use_s)
            horizon_s = float(self.barriers_s[-1]) - self.base_s
            rounding = self.ends.workers * (self.ends.rounding_s + _RELATIVE * horizon_s)
            if objective == "per_iteration":
                objective_values = objective_values / iterations
                rounding /= float(
                    iterations[0]
                )  # the first barrier has the fewest iterations, and so the largest error
        choice = int(np.argmax(objective_values <= objective_values.min() + rounding))
        return self.ends.barrier(self.ends.count(in_use_s <= self.barriers_s[choice]))

    def _moments(self, max_gap: int | None) -> Floats:
        """Return (N,) the time from which on each end is its worker's choice for a barrier, until the next end replaces it.

        With a bound, a worker that is ``max_gap`` iterations ahead must wait for the slowest one before its next end counts.
        """
        if max_gap is None or max_gap >= len(self.slowest_s):
            return self.ends.end_s
        moments_s = self.ends.end_s.copy()
        is_held = self.place >= max_gap
        # The end at place i (from 0) is iteration i + 1: all workers must have ended iteration i + 1 - max_gap, place i -
        # max_gap.
        needed_iteration = self.place[is_held] - max_gap
        moments_s[is_held] = np.maximum(moments_s[is_held], self.slowest_s[needed_iteration])
        return moments_s

    def _longest(self, in_use_s: Floats) -> Floats:
        """Return (k,) the seconds that the first worker to arrive waits at each candidate barrier.

        ``in_use_s`` (N,): when each end becomes its worker's choice, from :meth:`_moments`. The first arrival is the earliest
        end that is not yet replaced by its worker's next one; running maxima over the sorted ends find it.
        """
        replaced_s = np.append(in_use_s[1:], np.inf)
        replaced_s[self.ends.pointers[1:] - 1] = np.inf
        used_until_s = np.maximum.accumulate(replaced_s[self.order])
        first_index = np.searchsorted(used_until_s, self.barriers_s, side="right")
        waiting_s: Floats = self.barriers_s - self.ends.end_s[self.order[first_index]]
        return waiting_s

    def _total(self, in_use_s: Floats) -> tuple[Floats, Ints]:
        """Return (k,) all workers' waiting in seconds at each candidate barrier, and (k,) the sum of their iterations.

        ``in_use_s`` (N,): when each end becomes its worker's choice, from :meth:`_moments`. A worker's choice changes from one
        end to the next by ``steps_s``, so a running sum of these steps is the sum of all workers' choices.
        """
        order = np.argsort(in_use_s)
        sums = np.cumsum(self.steps_s[order])
        iterations = np.searchsorted(in_use_s[order], self.barriers_s, side="right")
        waiting_s: Floats = self.ends.workers * (self.barriers_s - self.base_s) - sums[iterations - 1]
        return waiting_s, iterations
