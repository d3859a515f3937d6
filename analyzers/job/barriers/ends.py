"""Input and output of the barrier analyzers: iteration ends per worker, and a barrier.

Terms (ElasticBSP, section III): worker p will end its iterations at ``e_1 <= e_2 <= ... <= e_R``. A barrier chooses one
end per worker (the set Z); each worker waits from its chosen end until ``max(Z)``. The waiting time
``d_Z = max(Z) - min(Z)`` is that of the worker that waits longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddltool.arrays import Flags, Floats, Ints
from ddltool.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Barrier:
    """One barrier for n workers. Times are on the clock of the iteration ends, in seconds."""

    barrier_s: float
    """``max(Z)``: when the last worker arrives."""
    waiting_time_s: float
    """``d_Z``: how long the worker that arrives first waits."""
    iterations: Ints
    """(n,) iterations of each worker until the barrier: the place of its chosen end, from 1."""
    chosen_s: Floats
    """(n,) Z: when each worker begins to wait."""

    @property
    def total_waiting_s(self) -> float:
        """Sum of the seconds that the workers wait, ``max(Z) - z_p``."""
        return float(np.sum(self.barrier_s - self.chosen_s))

    @property
    def iteration_gap(self) -> int:
        """Largest number of iterations of a worker minus the smallest: the staleness within the superstep."""
        return int(self.iterations.max() - self.iterations.min())

    @property
    def waiting_per_iteration_s(self) -> float:
        """Total waiting over all workers' iterations, by which barriers after few and after many iterations compare."""
        return self.total_waiting_s / int(self.iterations.sum())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EndTimes:
    """Checked iteration ends of n workers in one array of N; treat it as read-only."""

    end_s: Floats
    """(N,) the ends of all workers in seconds, one worker after the other, ascending within each."""
    pointers: Ints
    """(n + 1,) worker p's ends are ``end_s[pointers[p]:pointers[p + 1]]``."""

    @classmethod
    def of(cls, times: Times) -> EndTimes:
        """Return the checked ends of ``times``, in seconds: one ascending array per worker, of any length, or one array (n, R).

        EndTimes are returned unchanged. Raises InputError naming the worker (counted from 0) whose ends are missing, not
        finite, or not ascending.
        """
        if isinstance(times, EndTimes):
            return times
        if isinstance(times, np.ndarray) and times.ndim == 2:
            workers, length = times.shape
            end_s = np.array(times, dtype=np.float64).ravel()
            lengths = np.full(workers, length, dtype=np.int64)
        else:
            rows = [np.asarray(row, dtype=np.float64).reshape(-1) for row in times]
            end_s = np.concatenate(rows) if rows else np.empty(0)
            lengths = np.array([len(row) for row in rows], dtype=np.int64)
        pointers = np.concatenate(([0], np.cumsum(lengths)))
        _check(end_s, pointers)
        return cls(end_s=end_s, pointers=pointers)

    @property
    def workers(self) -> int:
        """Number of workers, n."""
        return len(self.pointers) - 1

    @property
    def first_s(self) -> Floats:
        """(n,) each worker's first end."""
        return self.end_s[self.pointers[:-1]]

    @property
    def last_s(self) -> Floats:
        """(n,) each worker's last end."""
        return self.end_s[self.pointers[1:] - 1]

    @property
    def rounding_s(self) -> float:
        """Seconds up to which two differences of ends count as equal: 4 ulp (units in the last place) of the largest end.

        An end read from decimal digits is off by half an ulp. A difference of two ends is off by both errors and its own
        rounding, so two equal differences may be apart by twice as much.
        """
        return float(4 * np.spacing(np.abs(self.end_s).max()))

    def row(self, worker: int) -> Floats:
        """Return the (R_p,) ends of one worker, in seconds."""
        return self.end_s[self.pointers[worker] : self.pointers[worker + 1]]

    def count(self, mask: Flags) -> Ints:
        """Return (n,) the number of ends of each worker that ``mask`` (N,) marks."""
        return np.add.reduceat(mask, self.pointers[:-1], dtype=np.int64)

    def barrier(self, iterations: Ints) -> Barrier:
        """Return the barrier at which the workers have made ``iterations`` (n,), each at least 1."""
        chosen_s = self.end_s[self.pointers[:-1] + iterations - 1]
        latest_s = float(chosen_s.max())
        return Barrier(
            barrier_s=latest_s,
            waiting_time_s=float(latest_s - chosen_s.min()),
            iterations=iterations,
            chosen_s=chosen_s,
        )


Times = EndTimes | Sequence[ArrayLike] | NDArray[Any]


def bsp(times: Times) -> Barrier:
    """Return the barrier of bulk-synchronous training (BSP): every worker makes one iteration.

    ``times``: per worker its iteration ends in seconds, ascending. Raises InputError where :meth:`EndTimes.of` does.
    """
    ends = EndTimes.of(times)
    return ends.barrier(np.ones(ends.workers, dtype=np.int64))


def _check(end_s: Floats, pointers: Ints) -> None:
    """Raise InputError unless there is a worker, and each worker has one or more finite, ascending ends.

    ``end_s`` (N,): the ends of all workers, one worker after the other; ``pointers`` (n + 1,): where each worker's ends begin,
    and N. The error names worker and end, counted from 0.
    """
    if len(pointers) == 1:
        raise InputError("times", "holds no workers", "give one array of iteration ends per worker")
    empty_workers = np.flatnonzero(np.diff(pointers) == 0)
    if len(empty_workers):
        raise InputError(f"times[{empty_workers[0]}]", "holds no iteration ends", "every worker needs at least one")
    is_infinite = ~np.isfinite(end_s)
    if is_infinite.any():
        raise InputError(
            _name_of_first(is_infinite, pointers), "is not finite", "iteration ends must be finite seconds"
        )
    goes_back = np.zeros(len(end_s), dtype=bool)
    goes_back[1:] = end_s[1:] < end_s[:-1]
    goes_back[pointers[:-1]] = False  # a worker's first end follows another worker's last
    if goes_back.any():
        problem, remedy = "goes backwards in time", "a worker's iteration ends must ascend"
        raise InputError(_name_of_first(goes_back, pointers), problem, remedy)


def _name_of_first(mask: Flags, pointers: Ints) -> str:
    """Return the name for errors, ``times[worker][end]``, of the first end that ``mask`` (N,) marks.

    ``pointers`` (n + 1,): where each worker's ends begin, as in :class:`EndTimes`.
    """
    end_index = int(np.argmax(mask))
    worker = int(np.searchsorted(pointers, end_index, side="right")) - 1
    return f"times[{worker}][{end_index - pointers[worker]}]"
