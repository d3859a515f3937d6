"""The truth of a simulation about an application: step times, gradient statistics and the work until training ends.

An :class:`Application` holds one application's measurements and answers the simulator's questions about it. The rules
of interpolation are those of Pollux's published simulator (AdaptDL traces): a measured placement, rotated to its
smallest form, interpolates linearly in the local batch size; any other placement interpolates over nodes, replicas and
local batch size; gradient statistics interpolate in the total batch size, per epoch. Progress counts iterations at M0, the
smallest total batch size.

Where no traces were measured, :func:`fitted_application` makes an application from a fitted throughput model. It assumes
(:func:`assumptions` tells the user) that step times are exactly the model's (Pollux, section 3.2; the fit's errors are not
replayed), that the gradient noise scale is constant in the whole training (it usually grows), that the largest local batch is
as given, and that the work is a number of samples at the smallest batch size, in equal epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ddltool.analyzers.job.goodput.throughput import ThroughputParams, grad_time_s, iteration_time_s
from ddltool.arrays import Floats
from ddltool.errors import InputError, did_you_mean

Placement = tuple[int, ...]
Curve = tuple[Floats, Floats]
ANY_TYPE = "*"
"""The GPU type of measurements that name none: they hold for every type."""
# Most nodes that were measured; the published simulator counts more nodes as this many.
_MOST_NODES = 16
# Largest share of a step that synchronises: beyond the measured batch sizes the lines of step and sync may cross.
_MOST_SYNC_SHARE = 0.999
# Shortest step over the shortest measured one: beyond the measured batch sizes a falling line may cross zero.
_LEAST_STEP_SHARE = 1e-3
# Total batch sizes tried between the smallest and the largest, in equal ratios; the published simulator's number.
_CANDIDATES = 50
# Batch sizes of a fitted application's runs; interpolating between them keeps iterations within 0.1 % of the formula.
_BATCHES = 129
_MOST = 1e15


def smallest_rotation(placement: Sequence[int]) -> Placement:
    """Return the GPUs per node without zeros, rotated to the lexicographically smallest form.

    >>> smallest_rotation((4, 0, 2, 3))
    (2, 3, 4)
    """
    used = tuple(count for count in placement if count)
    return min((used[shift:] + used[:shift] for shift in range(len(used))), default=())


@dataclass(kw_only=True, eq=False)
class MeasuredTimes:
    """Measured times of one application on one GPU type: ``n`` placement rows and ``m`` scalability rows, seconds."""

    where: str
    placements: Sequence[Placement]
    """(n,) GPUs per node, as measured."""
    local_batch_size: Floats
    """(n,)"""
    times_s: Floats
    """(n, 2) step time and the part of it that synchronises."""
    scalability: Floats
    """(m, 3) nodes, replicas, local batch size."""
    scalability_times_s: Floats
    """(m, 2)"""

    def __post_init__(self) -> None:
        """Group the rows by placement, rotated to its smallest form. Raises InputError for a table without rows."""
        if not self.placements:
            raise InputError(self.where, "holds no placement", "give at least one measured row")
        rotated = [smallest_rotation(placement) for placement in self.placements]
        self._curves = _curves(rotated, self.local_batch_size, self.times_s)

    @property
    def batch_range(self) -> tuple[int, int]:
        """Smallest and largest measured local batch size."""
        return int(self.local_batch_size.min()), int(self.local_batch_size.max())

    def __call__(self, placement: Placement, local_batch_size: int) -> tuple[float, float]:
        """Return (step time, sync time) in seconds of a placement (GPUs per node, without zeros) at a local batch size.

        A measured placement interpolates in the batch size; any other in nodes, replicas and batch size.
        """
        rotated = smallest_rotation(placement)
        curve = self._curves.get(rotated)
        return _times_at_batch(curve, local_batch_size) if curve else self._interpolated(rotated, local_batch_size)

    def _interpolated(self, placement: Placement, local_batch_size: int) -> tuple[float, float]:
        """Return the (step, sync) seconds of a placement that was not measured, interpolated between the measured ones.

        Outside of these, the measured (nodes, replicas) with the nearest ratios takes its place. ``placement``: GPUs per node,
        rotated to its smallest form.
        """
        # The published simulator counts more nodes than it measured as that many.
        surface, groups = self._neighbours
        nodes = min(len(placement), _MOST_NODES)
        replicas = sum(placement)
        step, sync = surface([nodes, replicas, local_batch_size])[0].tolist()
        if not math.isnan(step + sync):
            return step, sync
        nearest = min(
            groups,
            key=lambda configuration: (
                abs(math.log(configuration[0] / nodes)) + abs(math.log(configuration[1] / replicas)),
                configuration,
            ),
        )
        return _times_at_batch(groups[nearest], local_batch_size)

    @cached_property
    def _neighbours(self) -> tuple[Callable[[Any], Floats], dict[Placement, Curve]]:
        """The interpolation over (nodes, replicas, local batch size), and the curves of the times by (nodes, replicas)."""
        from scipy.interpolate import LinearNDInterpolator
        from scipy.spatial import QhullError

        configurations = np.array(
            [(len(placement), sum(placement)) for placement in map(smallest_rotation, self.placements)],
            dtype=np.float64,
        )
        unique, means = _means(np.column_stack([configurations, self.local_batch_size]), self.times_s)
        points = np.vstack([unique, self.scalability])  # (p, 3) nodes, replicas, local batch size
        times = np.vstack([means, self.scalability_times_s])  # (p, 2) step and sync
        curves = _curves(
            [(nodes, replicas) for nodes, replicas in points[:, :2].astype(int).tolist()], points[:, 2], times
        )
        try:
            return LinearNDInterpolator(points, times), curves
        except (QhullError, ValueError):
            # Rows too few or too flat for a volume: no point lies inside it (NaN), so the nearest configuration is always used.
            return lambda point: np.full((1, 2), np.nan), curves


def _curves(keys: Sequence[Placement], batch: Floats, times: Floats) -> dict[Placement, Curve]:
    """Group rows by key: return key -> (batch sizes (k,), ascending, mean (step, sync) times (k, 2) at each).

    ``keys`` (n,): a placement, or (nodes, replicas); ``batch`` (n,): local batch sizes; ``times`` (n, 2) in seconds.
    """
    rows: dict[Placement, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return {key: _means(batch[chosen], times[chosen]) for key, chosen in rows.items()}


def _means(keys: Floats, times: Floats) -> Curve:
    """Return the k distinct ``keys`` (rows or numbers), ascending, and the mean (step, sync) times (k, 2) of each.

    ``times`` (n, 2): seconds, one row per key.
    """
    unique, inverse = np.unique(keys, axis=0, return_inverse=True)
    counts = np.bincount(inverse.ravel())
    return unique, np.stack([np.bincount(inverse.ravel(), times[:, column]) / counts for column in range(2)], axis=1)


def _times_at_batch(curve: Curve, batch: float) -> tuple[float, float]:
    """Return the (step, sync) seconds at a batch size: linear between measured sizes, and extrapolated beyond them.

    A curve with one size gives its times for every batch. Extrapolated steps are kept above 0, and syncs within the step.
    """
    sizes, times = curve
    if len(sizes) == 1:
        return float(times[0, 0]), float(times[0, 1])
    upper = min(max(int(np.searchsorted(sizes, batch)), 1), len(sizes) - 1)
    weight = (batch - sizes[upper - 1]) / (sizes[upper] - sizes[upper - 1])
    step, sync = (times[upper - 1] + weight * (times[upper] - times[upper - 1])).tolist()
    step = max(step, float(times[:, 0].min()) * _LEAST_STEP_SHARE)
    return step, min(max(sync, 0.0), _MOST_SYNC_SHARE * step)


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """One validation run at total batch ``batch_size``: arrays over its ``E`` epochs."""

    batch_size: int
    progress: Floats
    """Iterations at M0 done at the end of the epoch."""
    iteration: Floats
    """Iterations at this batch size done at the end of the epoch."""
    grad_sqr: Floats
    grad_var: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of an application that its measurements do not show. None: that of the measurements, or no limit."""

    max_epochs: int | None = None
    max_local_batch_size: int | None = None
    fixed_batch_size: int | None = None
    """Total batch of a job whose batch may not be tuned."""
    max_replicas: int | None = None


# Set by hand in Pollux's published simulator (petuum/adaptdl, osdi21-artifact), ncf's only under adaptive policies.
PUBLISHED_LIMITS: Mapping[str, Limits] = {
    "bert": Limits(max_epochs=2),
    "cifar10": Limits(max_epochs=100),
    "ncf": Limits(max_epochs=10, fixed_batch_size=32768, max_replicas=1),
    "imagenet": Limits(max_epochs=90),
    "deepspeech2": Limits(max_epochs=80),
    "yolov3": Limits(max_epochs=50, max_local_batch_size=8),
}


class Application:
    """The truth about one application. Batch sizes are in samples, progress in iterations at M0, times in seconds.

    ``times``: step times by GPU type (:data:`ANY_TYPE` for all types); ``validation``: at least one run.
    Raises InputError where the measurements contradict each other or the limits.
    """

    def __init__(
        self,
        name: str,
        times: Mapping[str, MeasuredTimes | FittedTimes],
        validation: Sequence[Validation],
        limits: Limits | None = None,
    ) -> None:
        """Take limits that are not given from the measurements; with ``limits`` None, from the published simulator first."""
        limits = limits if limits is not None else PUBLISHED_LIMITS.get(name, Limits())
        if not times or not validation:
            raise InputError(f"application {name}", "lacks step times or validation runs", "give both")
        runs = sorted(validation, key=lambda run: run.batch_size)
        epochs = min(len(run.progress) for run in runs)
        self.name = name
        self.times = dict(times)
        self.limits = limits
        self.max_epochs = limits.max_epochs or epochs
        if not 1 <= self.max_epochs <= epochs:
            raise InputError(f"application {name}", f"max epochs {self.max_epochs}", f"1 to {epochs} are measured")
        self.batch_sizes = np.array([run.batch_size for run in runs], dtype=np.float64)
        self.init_batch_size = runs[0].batch_size
        self.max_batch_size = runs[-1].batch_size
        ranges = [table.batch_range for table in times.values()]
        self.min_local_batch_size = min(low for low, _ in ranges)
        self.max_local_batch_size = limits.max_local_batch_size or max(high for _, high in ranges)
        self.fixed_batch_size = limits.fixed_batch_size
        most = max(1, self.max_batch_size // self.min_local_batch_size)
        self.max_replicas = min(most, limits.max_replicas or most)
        # By run (in the order of ``batch_sizes``) and epoch.
        kept = slice(0, epochs)  # runs may be longer than the shortest one
        self.iteration = np.stack([run.iteration[kept] for run in runs])
        self.grad_sqr = np.stack([run.grad_sqr[kept] for run in runs])
        self.grad_var = np.stack([run.grad_var[kept] for run in runs])
        progress = np.stack([run.progress[kept] for run in runs]).min(axis=0)
        self.progress: list[float] = [0.0, *progress.tolist()]
        """``progress[e]``: iterations at M0 until e epochs are done, the least over the measured batch sizes."""
        if np.any(np.diff(self.progress[: self.max_epochs + 1]) <= 0):
            raise InputError(
                f"application {name}:progress", "does not grow with the epochs", "check the validation runs"
            )
        # Caches, because the same few configurations are asked for again and again.
        self._times_by_configuration: dict[tuple[Placement, int, str], tuple[float, float]] = {}
        """(step, sync) seconds by placement, local batch size and GPU type."""
        self._gradients_by_batch: dict[int, tuple[Floats, Floats, Floats]] = {}
        """Squared norm, variance and gain in every epoch, by total batch size."""

    def step_times(self, placement: Placement, local_batch_size: int, gpu_type: str = ANY_TYPE) -> tuple[float, float]:
        """Return (step time, sync time) in seconds on ``placement`` (GPUs per node) of one GPU type.

        Raises InputError for a type without measurements.
        """
        key = (placement, local_batch_size, gpu_type)
        if key not in self._times_by_configuration:
            if not self.runs_on(gpu_type):
                hint = did_you_mean(gpu_type, self.times)
                raise InputError(f"application {self.name}", f"no step times on {gpu_type!r}", hint)
            measured = self.times.get(gpu_type) or self.times[ANY_TYPE]
            self._times_by_configuration[key] = measured(placement, local_batch_size)
        return self._times_by_configuration[key]

    def run_time_bound_s(self, gpu_types: Sequence[str]) -> float:
        """Return a lower bound of the seconds of a whole training on these GPU types; 0 if it runs on none of them.

        It is the fewest steps, those at the largest batch, times the shortest step, that of one GPU at the smallest local
        batch. Replays use it to refuse implausible measurements.
        """
        types = [name for name in gpu_types if self.runs_on(name)]
        step_s = min((self.step_times((1,), self.min_local_batch_size, name)[0] for name in types), default=0.0)
        return self.progress[self.max_epochs] * self.init_batch_size / self.max_batch_size * step_s

    def runs_on(self, gpu_type: str) -> bool:
        """Return whether the application was measured on this GPU type."""
        return gpu_type in self.times or ANY_TYPE in self.times

    def largest_local_batch(self, gpu_type: str) -> int:
        """Return the largest local batch size on one GPU type: the application's limit, else the largest measured one."""
        table = self.times.get(gpu_type) or self.times.get(ANY_TYPE)
        if table is None or self.limits.max_local_batch_size:
            return self.max_local_batch_size
        return table.batch_range[1]

    def _weights(self, batch_size: float) -> tuple[int, int, float]:
        """Return the indices of the measured runs below and above a total batch size, and the weight of the upper one.

        Both are the same, with weight 0, for a measured size. Raises InputError for a size outside of the measured ones.
        """
        sizes = self.batch_sizes
        if not sizes[0] <= batch_size <= sizes[-1]:
            where = f"application {self.name}:batch size"
            raise InputError(where, f"is {batch_size:g}", f"measured from {sizes[0]:g} to {sizes[-1]:g}")
        upper = int(np.searchsorted(sizes, batch_size))
        if sizes[upper] == batch_size:
            return upper, upper, 0.0
        return upper - 1, upper, float((batch_size - sizes[upper - 1]) / (sizes[upper] - sizes[upper - 1]))

    def grad_stats(self, batch_size: int, epoch: int) -> tuple[float, float]:
        """Return the gradient's squared norm and variance (at M0) during ``epoch`` (from 0) at a total batch size."""
        sqr, var, _gain = self._gradients(batch_size)
        return float(sqr[epoch]), float(var[epoch])

    def _gradients(self, batch_size: int) -> tuple[Floats, Floats, Floats]:
        """Return squared norm, variance and AdaScale's gain at a total batch size in every epoch, (E,) each; cached."""
        if batch_size not in self._gradients_by_batch:
            low, high, share = self._weights(batch_size)
            sqr, var = (
                statistic[low] * (1 - share) + statistic[high] * share for statistic in (self.grad_sqr, self.grad_var)
            )
            # the number of iterations at M0 that one iteration at this batch is worth
            gain = (var + sqr) / (var * self.init_batch_size / batch_size + sqr)
            self._gradients_by_batch[batch_size] = sqr, var, gain
        return self._gradients_by_batch[batch_size]

    def batches(
        self, placement: Placement, gpu_type: str = ANY_TYPE, totals: Sequence[float] | None = None
    ) -> list[tuple[int, float, int]]:
        """Return (total batch, true seconds per optimizer step, passes) on a placement, ascending, each total once.

        ``totals``: total batches to try; None: the fixed batch, or 50 in equal ratios between the smallest and the largest.
        Each is split into the fewest passes that fit into memory and rounded up to equal local batches; those that the limits
        do not allow are left out.
        """
        replicas, largest = sum(placement), self.largest_local_batch(gpu_type)
        low = max(self.init_batch_size, self.min_local_batch_size * replicas)
        if totals is None:
            spread = np.geomspace(low, self.max_batch_size, _CANDIDATES).tolist()
            totals = [self.fixed_batch_size] if self.fixed_batch_size else spread
        time_by_total: dict[int, tuple[float, int]] = {}
        for total in totals:
            # Quotients are rounded up, except those just above a whole number by rounding errors. One sample less per pass
            # where the rounded total would exceed the largest batch.
            passes = max(math.ceil(total / replicas / largest - 1e-8), 1)
            local = math.ceil(total / replicas / passes - 1e-8)
            if replicas * local * passes > self.max_batch_size:
                local -= 1
            rounded_total = replicas * local * passes
            if local >= self.min_local_batch_size and low <= rounded_total <= self.max_batch_size:
                step, sync = self.step_times(placement, local, gpu_type)
                time_by_total[rounded_total] = step + (passes - 1) * (step - sync), passes
        return [(total, *time_by_total[total]) for total in sorted(time_by_total)]

    def epoch_seconds(self, total: int, step_s: float) -> Floats:
        """Return the seconds of each epoch (E,) at a total batch whose step takes ``step_s``."""
        gain = self._gradients(total)[2][: self.max_epochs]
        return np.asarray(np.diff(self.progress[: self.max_epochs + 1]) / gain * step_s)

    def gain(self, batch_size: int, epoch: int) -> float:
        """Return the progress of one iteration at ``batch_size`` in ``epoch``, in iterations at M0: AdaScale's gain."""
        return float(self._gradients(batch_size)[2][epoch])

    def iterations(self, batch_size: int, epoch: int) -> float:
        """Return the number of iterations at ``batch_size`` from the start until the end of epoch ``epoch`` (from 0)."""
        low, high, share = self._weights(batch_size)
        return float(self.iteration[low, epoch] * (1 - share) + self.iteration[high, epoch] * share)


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedJob:
    """What a simulation must know of a job beside its fitted model. Raises InputError for values out of range.

    ``noise_scale`` (samples, >= 0): phi, the batch size at which half of the samples are wasted; 0: larger batches gain
    nothing. ``total_samples``: samples to train at ``batch_size`` = M0. ``max_batch_size`` is over all replicas;
    ``max_local_batch_size`` is what fits into one GPU's memory.
    """

    noise_scale: float
    total_samples: float
    batch_size: int
    max_batch_size: int
    max_local_batch_size: int
    epochs: int = 20

    def __post_init__(self) -> None:
        """Raise InputError for a value out of range."""
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


@dataclass(frozen=True, slots=True)
class FittedTimes:
    """Step times (seconds) by the throughput model, with the interface of :class:`MeasuredTimes`."""

    params: ThroughputParams
    max_local_batch_size: int

    @property
    def batch_range(self) -> tuple[int, int]:
        """Smallest and largest local batch size."""
        return 1, self.max_local_batch_size

    def __call__(self, placement: Placement, local_batch_size: int) -> tuple[float, float]:
        """Return (step time, sync time) in seconds; of the placement only the numbers of nodes and GPUs matter.

        They are T_iter without accumulation, and T_iter - T_grad (Pollux, Equations 9 to 11).
        """
        used = [count for count in placement if count]
        step = float(iteration_time_s(self.params, len(used), sum(used), local_batch_size))
        return step, max(step - float(grad_time_s(self.params, local_batch_size)), 0.0)


def fitted_application(name: str, params: Mapping[str, ThroughputParams], job: FittedJob) -> Application:
    """Return the application with step times from ``params``, GPU type (``"*"``: any) -> fitted model.

    The gain of a batch size M over M0 is ``(phi / M0 + 1) / (phi / M + 1) = M EFFICIENCY(M) / M0`` with Pollux's efficiency
    (section 3.1): the number of iterations at M0 that one at M is worth. Raises InputError for a model in which a gradient
    takes no time.
    """
    for kind, values in params.items():
        seconds = float(grad_time_s(values, job.batch_size))
        if not (math.isfinite(seconds) and seconds > 0):
            raise InputError(f"{name}:{kind}", f"one gradient takes {seconds:g} s", "a fit with a time above 0")
    times = {kind: FittedTimes(values, job.max_local_batch_size) for kind, values in params.items()}
    # Equal epochs, counted in iterations at the smallest batch M0.
    progress = np.linspace(0.0, job.total_samples / job.batch_size, job.epochs + 1)[1:]
    # With a squared norm of 1, that ratio of variance and norm gives the noise scale.
    variance = job.noise_scale / job.batch_size
    sqr = np.ones(job.epochs)
    var = np.full(job.epochs, variance)
    runs = []
    for batch in np.unique(np.geomspace(job.batch_size, job.max_batch_size, _BATCHES).round().astype(int)).tolist():
        gain = (variance + 1.0) / (variance * job.batch_size / batch + 1.0)
        runs.append(
            Validation(batch_size=batch, progress=progress, iteration=progress / gain, grad_sqr=sqr, grad_var=var)
        )
    return Application(name, times, runs, Limits(max_epochs=job.epochs))


def assumptions(name: str, job: FittedJob) -> str:
    """Return the line that tells the user what :func:`fitted_application` assumes about the job."""
    return (
        f"{name}: step times as fitted (its errors are not replayed), constant noise scale {job.noise_scale:g}, "
        f"{job.total_samples:g} samples at batch {job.batch_size} (to {job.max_batch_size}), "
        f"at most {job.max_local_batch_size} per GPU"
    )
