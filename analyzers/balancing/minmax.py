"""The integer batch sizes that minimise the slowest worker's time, exactly, and which workers to do without.

``min over x of max_i t_i(x_i)`` with ``sum x_i = X`` (LB-BSP, Equation 3), for curves t_i that never fall with x_i. The
greedy rule gives one sample after the other to the worker whose next sample would end earliest. It is optimal: if the
result ends at T, the greedy took its last sample although every other next sample would have ended at T or later, so
fewer than X samples in all end before T, whatever the sizes. After all samples that end by some time the greedy is where
it is without regard to order, so a bisection over T for the last such state (:mod:`.searching`) replaces its X steps.

Leaving a worker out is giving it nothing. As one worker's time does not depend on the others, the least T at which the
workers' capacities reach X, with nothing from those that cannot make one sample by T, is the optimum over all subsets
at once. Where synchronisation costs more the more workers take part, the fewest workers that make X samples by T are
those with the largest capacities, which one sort finds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddltool.analyzers.balancing.curves import Counts, Curves, Floats
from ddltool.analyzers.balancing.searching import earliest, shortest
from ddltool.analyzers.balancing.sizing import checked_limits
from ddltool.errors import Infeasible, InputError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Split:
    """Batch sizes of n workers and what they come to."""

    sizes: Counts
    """(n,) samples; 0: the worker is left out."""
    seconds: Floats
    """(n,) each worker's time, 0 where it is left out."""
    sync_s: float = 0.0
    """Seconds of synchronisation that all pay, by the number of workers that take part."""

    @property
    def iteration_s(self) -> float:
        """Seconds of an iteration: the slowest worker's time, then synchronisation."""
        return float(self.seconds.max()) + self.sync_s


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DropAdvice:
    """The best split with all workers beside the best one that may leave some out."""

    kept: Split | None
    """None: no split gives every worker a sample within the limits."""
    best: Split
    dropped: Counts
    """Numbers of the workers to leave out, ascending; empty where all help or do no harm."""

    @property
    def saving(self) -> float:
        """Share of the iteration time that dropping saves; 0 where nothing is dropped or all could not be kept."""
        return 0.0 if self.kept is None else 1.0 - self.best.iteration_s / self.kept.iteration_s


def split(curves: Curves, total: int) -> Split:
    """Return the sizes with sum ``total`` and at least one sample each that minimise the slowest worker's time.

    They are the greedy rule's; of samples that would end at the same time the first workers take more. Raises Infeasible
    naming the limit that binds.
    """
    most = np.minimum(checked_limits(curves.limits, len(curves.limits), total), total)
    sizes = _fill(curves, total, most, 1)
    return Split(sizes=sizes, seconds=curves.seconds(sizes))


def drop_advice(curves: Curves, total: int, sync_s: ArrayLike | None = None) -> DropAdvice:
    """Return which workers to leave out so that an iteration takes least; exact over all subsets.

    Args:
        curves: seconds over batch size.
        total: X, samples of all workers together.
        sync_s: (n,) seconds of synchronisation with 1, 2, ..., n workers, never falling; None: it costs nothing more.

    A worker is left out only if that makes an iteration shorter. Raises Infeasible where the limits of all workers
    together admit fewer than ``total`` samples, InputError for a total below 1 or costs that are not (n,).
    """
    workers = len(curves.limits)
    if total < 1:
        raise InputError("total", f"is {total}", "give one sample or more")
    most = np.minimum(curves.limits, total)
    if int(most.sum()) < total:
        raise Infeasible(f"the memory limits of all {workers} workers admit {int(most.sum())} samples of {total}")
    costs = np.zeros(workers) if sync_s is None else np.asarray(sync_s, dtype=np.float64)
    if costs.shape != (workers,) or not np.isfinite(costs).all() or (np.diff(costs, prepend=0.0) < 0).any():
        raise InputError("sync_s", "is not usable", f"give {workers} finite seconds that never fall with more workers")
    kept = None
    if total >= workers and (most >= 1).all():
        whole = split(curves, total)
        kept = Split(sizes=whole.sizes, seconds=whole.seconds, sync_s=float(costs[-1]))
    best = _best_subset(curves, total, most, costs)
    # Of equal times the one that keeps everybody: nothing is won by sending a worker away.
    if kept is not None and kept.iteration_s <= best.iteration_s:
        best = kept
    return DropAdvice(kept=kept, best=best, dropped=np.flatnonzero(best.sizes == 0))


def _best_subset(curves: Curves, total: int, most: Counts, costs: Floats) -> Split:
    """Return the split with the least iteration time over all subsets of the workers."""
    found = shortest(
        lambda sizes: _fewest(sizes, total),
        lambda sizes: min(int((sizes > 0).sum()), total),
        lambda slowest_s, number: slowest_s + float(costs[number - 1]),
        curves,
        most,
    )
    assert found is not None  # all workers together admit the total
    chosen = np.argsort(-found.sizes, kind="stable")[: found.number]
    allowed = np.zeros_like(most)
    allowed[chosen] = np.where(found.sizes[chosen] > 0, most[chosen], 0)
    sizes = _fill(curves, total, allowed, 1)
    seconds = np.where(sizes > 0, curves.seconds(np.maximum(sizes, 1)), 0.0)
    return Split(sizes=sizes, seconds=seconds, sync_s=float(costs[int((sizes > 0).sum()) - 1]))


def _fewest(sizes: Counts, total: int) -> int:
    """Return the least number of workers that make ``total`` together if each makes its ``sizes``; 0: all make less."""
    made = np.cumsum(np.sort(sizes)[::-1])
    return 0 if int(made[-1]) < total else int(np.searchsorted(made, total)) + 1


def _fill(curves: Curves, total: int, most: Counts, least: int) -> Counts:
    """Return (n,) sizes from ``least`` (or ``most``, if that is less) to ``most`` with sum ``total``: the greedy's."""
    floor = np.minimum(most, least)
    if int(floor.sum()) == total:
        return floor
    reach = earliest(lambda sizes: int(sizes.sum()) >= total, curves, least, most)
    assert reach is not None  # the limits admit the total
    room = reach.sizes - reach.before  # samples that end exactly at the optimum
    before = np.concatenate(([0], np.cumsum(room)[:-1]))
    filled: Counts = reach.before + np.clip(total - int(reach.before.sum()) - before, 0, room)
    return filled


def greedy(curves: Curves, total: int) -> NDArray[np.int64]:
    """Return the greedy rule's sizes, one sample at a time: O(X n), for comparison with :func:`split`."""
    most = checked_limits(curves.limits, len(curves.limits), total)
    sizes = np.ones(len(most), dtype=np.int64)
    for _ in range(total - len(most)):
        following = curves.seconds(np.minimum(sizes + 1, np.maximum(most, 1)))
        sizes[int(np.argmin(np.where(sizes < most, following, np.inf)))] += 1
    return sizes
