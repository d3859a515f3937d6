"""A job's truth from a fitted throughput model, where no traces were measured.

Assumed, and to be said wherever it is used: step times are exactly the model's (Pollux, section 3.2; the fit's errors are
not replayed), the gradient noise scale is one constant for the whole training (it usually grows), the largest local batch
is as given, and the work left is counted in samples at the smallest batch size, in equal epochs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.goodput.throughput import ThroughputParams, grad_time_s, iteration_time_s
from ddltool.analyzers.scheduling.truth import Application, Limits, Placement, Validation
from ddltool.errors import InputError

Floats = NDArray[np.float64]
# Linear interpolation between so many batch sizes keeps the iterations within 0.1 % of the formula.
_BATCHES = 129
_MOST = 1e15


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedJob:
    """What a fitted model does not know. Raises InputError for values that make no sense.

    ``noise_scale`` (samples, >= 0): phi, the batch size at which half of the samples are wasted; 0: larger batches bring
    nothing. ``total_samples``: samples to train at ``batch_size`` = M0. ``max_batch_size`` over all replicas;
    ``max_local_batch_size``: what fits into one GPU's memory.
    """

    noise_scale: float
    total_samples: float
    batch_size: int
    max_batch_size: int
    max_local_batch_size: int
    epochs: int = 20

    def __post_init__(self) -> None:
        if not 0 <= self.noise_scale <= _MOST:
            raise InputError("noise", f"is {self.noise_scale:g}", "samples, a finite number >= 0")
        if not (self.batch_size >= 1 and self.max_local_batch_size >= 1 and 1 <= self.epochs <= 10_000):
            problem = f"batch {self.batch_size}, max-local {self.max_local_batch_size}, epochs {self.epochs}"
            raise InputError("batch", problem, "whole numbers >= 1, at most 10,000 epochs")
        if not self.batch_size <= self.max_batch_size <= _MOST:
            raise InputError("max-batch", f"is {self.max_batch_size}", f"at least the batch size {self.batch_size}")
        if not self.batch_size * self.epochs <= self.total_samples <= _MOST:
            problem = f"is {self.total_samples:g}"
            raise InputError("samples", problem, f"at least {self.batch_size * self.epochs}: a step per epoch")


@dataclass(kw_only=True, eq=False)
class FittedTimes:
    """Step times (seconds) by the throughput model, as :class:`~ddltool.analyzers.scheduling.truth.StepTimes` gives them."""

    params: ThroughputParams
    max_local_batch_size: int
    _cache: dict[tuple[Placement, int], tuple[float, float]] = field(default_factory=dict, repr=False)

    @property
    def batch_range(self) -> tuple[int, int]:
        """Smallest and largest local batch size."""
        return 1, self.max_local_batch_size

    def __call__(self, placement: Placement, local_batch_size: int) -> tuple[float, float]:
        """Return (step time, the part of it beyond one gradient's computation) in seconds; only nodes and GPUs count.

        Source: Pollux, Equations 9 to 11: T_iter without accumulation, and T_iter - T_grad.
        """
        key = (placement, local_batch_size)
        found = self._cache.get(key)
        if found is None:
            used = [count for count in placement if count]
            step = float(iteration_time_s(self.params, len(used), sum(used), local_batch_size))
            found = self._cache[key] = step, max(step - float(grad_time_s(self.params, local_batch_size)), 0.0)
        return found


def fitted_application(name: str, params: Mapping[str, ThroughputParams], job: FittedJob) -> Application:
    """Return the truth of an application from its fitted model on each GPU type (``"*"``: any type).

    Gain of a batch size M over M0: ``(phi / M0 + 1) / (phi / M + 1)``, Pollux's efficiency (section 3.1), so an iteration
    at M is worth ``M EFFICIENCY(M) / M0`` iterations at M0. Raises InputError for a model without time.
    """
    for kind, values in params.items():
        seconds = float(grad_time_s(values, job.batch_size))
        if not (math.isfinite(seconds) and seconds > 0):
            raise InputError(f"{name}:{kind}", f"one gradient takes {seconds:g} s", "a fit with a time above 0")
    times = {
        kind: FittedTimes(params=values, max_local_batch_size=job.max_local_batch_size)
        for kind, values in params.items()
    }
    progress = np.linspace(0.0, job.total_samples / job.batch_size, job.epochs + 1)[1:]
    variance = job.noise_scale / job.batch_size
    grid = np.geomspace(job.batch_size, job.max_batch_size, _BATCHES).round().astype(int)
    runs = [_run(int(batch), progress, variance, job) for batch in np.unique(grid)]
    return Application(name, times, runs, Limits(max_epochs=job.epochs))


def _run(batch: int, progress: Floats, variance: float, job: FittedJob) -> Validation:
    ones = np.ones(job.epochs)
    gain = (variance + 1.0) / (variance * job.batch_size / batch + 1.0)
    return Validation(
        batch_size=batch,
        progress=progress,
        iteration=progress / gain,
        metric=np.arange(job.epochs, dtype=np.float64),
        grad_sqr=ones,
        grad_var=ones * variance,
    )


def assumptions(name: str, job: FittedJob) -> str:
    """Return one line that says what is assumed about the job."""
    return (
        f"{name}: step times as fitted (its errors are not replayed), constant noise scale {job.noise_scale:g}, "
        f"{job.total_samples:g} samples at batch {job.batch_size} (to {job.max_batch_size}), "
        f"at most {job.max_local_batch_size} per GPU"
    )
