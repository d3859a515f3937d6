"""Policies that choose the next batch sizes from the workers' reports: one interface for CPU and GPU clusters.

:class:`SpeedPolicy` is LB-BSP's Algorithm 1 (predicted speeds), :class:`TrialPolicy` its Algorithm 2. Neither knows of
processes or clocks, so both can be simulated.
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
"""Predictions whose errors tell how noisy speeds are: as many as a live job's EMA remembers, several times over."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Report:
    """One iteration of n workers, all (n,) arrays."""

    samples: Ints
    """What each worker processed; at least 1."""
    seconds: Floats
    """How long its computation took, without waiting for others; above 0."""
    memory: Floats
    """Share of its memory in use, 0 to 1."""
    cpu: Floats
    """Share of a core that it can expect now, 0 to 1; what the predictor sees."""
    available: Floats
    """Share of its machine's memory that is available now, 0 to 1; what the predictor sees."""

    @classmethod
    def of(cls, rows: Floats) -> Report:
        """Return the report in (n, 5) rows, one per worker: samples, seconds, memory, cpu, available."""
        samples, seconds, memory, cpu, available = np.asarray(rows, dtype=np.float64).T
        return cls(samples=samples.astype(np.int64), seconds=seconds, memory=memory, cpu=cpu, available=available)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The batch sizes from now on, and what is worth telling."""

    sizes: tuple[int, ...]
    fine_tuning: bool = False
    """Fine tuning has begun just now."""
    remove: int | None = None
    """The straggler without which training would be faster."""


class Policy(Protocol):
    """Chooses batch sizes with a constant sum."""

    sizes: Ints

    def choose(self, report: Report) -> Choice:
        """Return (n,) batch sizes after one more iteration."""
        ...


class SpeedPolicy:
    """Batches in proportion to predicted speeds; no worker above its limit, and none larger that is short of memory.

    Args:
        sizes: (n,) samples at the start; the sum is kept.
        limits: (n,) most samples of each worker; None: memory use alone limits them.
        predictor: see :data:`~ddltool.analyzers.job.balancing.predict.PREDICTORS`.
        settings: how trained predictors learn.
        tolerance: share by which the longest predicted time must fall for sizes to change; 0: always the best ones, as the
            paper has it; None: as far as predictions were off of late, so that sizes follow speeds and not their noise.
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
        """Check sizes and limits; raises InputError, and Infeasible where limits cannot hold the total."""
        self.sizes = checked_sizes(sizes, least)
        self.total = int(self.sizes.sum())
        self.least = least
        self.limits = checked_limits(limits, len(self.sizes), self.total, least)
        if (self.limits < self.sizes).any():
            raise InputError("limits", f"is {limits}", f"give each of {len(self.sizes)} workers at least its batch")
        self.tolerance = tolerance
        self._predictor: SpeedPredictor = make_predictor(predictor, len(self.sizes), settings)
        self._has_readings = False
        self._predicted: Floats | None = None
        self._prediction_errors: deque[float] = deque(maxlen=ERRORS_KEPT)

    def choose(self, report: Report) -> Choice:
        """Learn the speeds in ``report`` and return the sizes for the next iteration.

        Sizes change only where the longest predicted time falls by more than the tolerance; until all speeds can be predicted
        they stay.
        """
        if not self._has_readings:
            self._predictor.predict(report.cpu, report.available)  # nothing is known yet; it keeps the readings
            self._has_readings = True
        measured_speeds = report.samples / report.seconds
        if self._predicted is not None:
            self._prediction_errors.append(float(np.abs(measured_speeds / self._predicted - 1).mean()))
        self._predictor.observe(measured_speeds)
        speeds = np.asarray(self._predictor.predict(report.cpu, report.available), dtype=np.float64)
        if not (np.isfinite(speeds) & (speeds > 0)).all():
            return Choice(sizes=tuple(self.sizes.tolist()))
        self._predicted = speeds
        # A worker short of memory may not grow but may shrink; the present sizes keep these limits, so some sizes always do.
        limits = np.where(report.memory > MEMORY_SHARE, np.minimum(self.limits, self.sizes), self.limits)
        best_sizes = proportional(speeds, self.total, limits, self.least)
        least_gain = self.tolerance
        if least_gain is None:
            # The median error: a lasting change of speed makes few large errors and is then followed.
            least_gain = float(np.median(self._prediction_errors)) if self._prediction_errors else 0.0
        if float((best_sizes / speeds).max()) <= (1 - least_gain) * float((self.sizes / speeds).max()):
            self.sizes = best_sizes
        return Choice(sizes=tuple(self.sizes.tolist()))


class TrialPolicy(Algorithm2):
    """Algorithm 2: samples move between leader and straggler."""

    def choose(self, report: Report) -> Choice:
        """Return the batch sizes after one more iteration's ``report``, with what is worth telling about them."""
        before = self.phase
        decision = self.observe(report.seconds, report.memory, report.samples)
        return Choice(
            sizes=decision.sizes,
            fine_tuning=before is Phase.APPROACH and decision.phase is Phase.FINE,
            remove=decision.straggler if decision.remove else None,
        )
