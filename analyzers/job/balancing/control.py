"""Policies that choose the next batch sizes from the workers' reports: one interface for CPU and GPU clusters.

:class:`SpeedPolicy` is LB-BSP's Algorithm 1 (predicted speeds), :class:`TrialPolicy` its Algorithm 2. Neither uses processes
or clocks, so both can be simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ddltool.analyzers.job.balancing.algorithm2 import MEMORY_SHARE, Algorithm2, Phase
from ddltool.analyzers.job.balancing.predict import SpeedPredictor, make_predictor
from ddltool.analyzers.job.balancing.sizing import checked_limits, checked_sizes, proportional
from ddltool.analyzers.job.balancing.trained import PredictorSettings
from ddltool.arrays import Floats, Ints
from ddltool.errors import InputError

ERRORS_KEPT = 20
"""Number of last predictions whose errors tell how noisy speeds are: several times the memory of EMA."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Report:
    """One iteration of n workers, all (n,) arrays."""

    samples: Ints
    """Samples that each worker processed; at least 1."""
    seconds: Floats
    """Time of each worker's computation, without waiting for others; above 0."""
    memory: Floats
    """Share of each worker's memory in use, 0 to 1."""
    cpu: Floats
    """Share of a core that each worker can expect now, 0 to 1; an input of predictors."""
    available: Floats
    """Share of each worker's machine's memory that is available now, 0 to 1; an input of predictors."""

    @classmethod
    def of(cls, rows: Floats) -> Report:
        """Return the report made of (n, 5) ``rows``, one per worker: samples, seconds, memory, cpu, available."""
        samples, seconds, memory, cpu, available = np.asarray(rows, dtype=np.float64).T
        return cls(samples=samples.astype(np.int64), seconds=seconds, memory=memory, cpu=cpu, available=available)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The batch sizes from now on, and news for the user."""

    sizes: tuple[int, ...]
    fine_tuning: bool = False
    """Whether this choice has begun fine tuning."""
    remove: int | None = None
    """Index of the straggler without which training would be faster; None: no such advice."""


class Policy(Protocol):
    """Chooses batch sizes with a constant sum."""

    sizes: Ints

    def choose(self, report: Report) -> Choice:
        """Return the choice of (n,) batch sizes after one more iteration, and keep the sizes in ``sizes``."""
        ...


class SpeedPolicy:
    """Batches in proportion to predicted speeds; no worker exceeds its limit, and one short of memory does not grow.

    Args:
        sizes: (n,) samples at the start; the sum is kept.
        limits: (n,) most samples of each worker; None: memory use alone limits them.
        predictor: see :data:`~ddltool.analyzers.job.balancing.predict.PREDICTORS`.
        settings: how trained predictors learn.
        tolerance: share by which the longest predicted time must fall for sizes to change; 0: sizes are always the best ones,
            as in the paper; None: the median error of the last predictions, so that sizes do not follow noise.
        least: samples that each worker gets whatever its speed.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        limits: Sequence[int] | None = None,
        predictor: str = "ema",
        settings: PredictorSettings | None = None,
        tolerance: float | None = 0.0,
        least: int = 1,
    ) -> None:
        """Check sizes and limits. Raises InputError for bad ones, and Infeasible where the limits cannot hold the total."""
        self.sizes = checked_sizes(sizes, least)
        self.total = int(self.sizes.sum())
        self.least = least
        self.limits = checked_limits(limits, len(self.sizes), self.total, least)
        if (self.limits < self.sizes).any():
            raise InputError("limits", f"is {limits}", f"give each of {len(self.sizes)} workers at least its batch")
        self.tolerance = tolerance
        self._predictor: SpeedPredictor = make_predictor(predictor, len(self.sizes), settings)
        self._has_readings = False
        """Whether the predictor has been given readings, without which it must not observe speeds."""
        self._predicted: Floats | None = None
        """(n,) last predicted speeds, in samples per second; None before the first ones."""
        self._prediction_errors: deque[float] = deque(maxlen=ERRORS_KEPT)
        """Mean relative error of each of the last predictions."""

    def choose(self, report: Report) -> Choice:
        """Learn the speeds in ``report`` and return the sizes for the next iteration.

        Sizes change only where the longest predicted time falls by more than the tolerance, and not before all speeds can be
        predicted.
        """
        if not self._has_readings:
            self._predictor.predict(report.cpu, report.available)  # it must be called before the first observe()
            self._has_readings = True
        measured_speeds = report.samples / report.seconds
        if self._predicted is not None:
            self._prediction_errors.append(float(np.abs(measured_speeds / self._predicted - 1).mean()))
        self._predictor.observe(measured_speeds)
        speeds = np.asarray(self._predictor.predict(report.cpu, report.available), dtype=np.float64)
        if not (np.isfinite(speeds) & (speeds > 0)).all():
            return Choice(sizes=tuple(self.sizes.tolist()))
        self._predicted = speeds
        # A worker short of memory may shrink but not grow. The present sizes keep these limits, so the problem is feasible.
        limits = np.where(report.memory > MEMORY_SHARE, np.minimum(self.limits, self.sizes), self.limits)
        best_sizes = proportional(speeds, self.total, limits, self.least)
        least_gain = self.tolerance
        if least_gain is None:
            # The median ignores the few large errors after a lasting change of speed, so sizes soon follow that.
            least_gain = float(np.median(self._prediction_errors)) if self._prediction_errors else 0.0
        if float((best_sizes / speeds).max()) <= (1 - least_gain) * float((self.sizes / speeds).max()):
            self.sizes = best_sizes
        return Choice(sizes=tuple(self.sizes.tolist()))


class TrialPolicy(Algorithm2):
    """Algorithm 2 as a policy: samples move from stragglers to leaders."""

    def choose(self, report: Report) -> Choice:
        """Return the batch sizes after one more iteration's ``report``."""
        before = self.phase
        decision = self.observe(report.seconds, report.memory, report.samples)
        return Choice(
            sizes=decision.sizes,
            fine_tuning=before is Phase.APPROACH and decision.phase is Phase.FINE,
            remove=decision.straggler if decision.remove else None,
        )
