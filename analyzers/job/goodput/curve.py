"""Step times over batch sizes on one device: what a profile says about it, what to measure next, how often, and how sure.

Start at :func:`summarise` (launch overhead, saturation batch, linear part, memory limit), :func:`median_interval` and
:func:`predict`. A curve is taken as known where its measured points leave no more room than the wanted precision. Curves
are taken as rising and, between neighbouring points, bent to one side: launch overhead, then a line. Then the chord
between two points is one bound, and the lines through the pairs beside them are the other (the sandwich algorithm; Rote,
"The convergence rate of the sandwich algorithm for approximating convex functions", Computing 48, 1992).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import nnls
from scipy.special import bdtr

from ddltool.arrays import Floats
from ddltool.results import DeviceCurve

if TYPE_CHECKING:
    import pandas as pd

# Share of the best measured throughput from which on a batch is saturating.
SATURATED = 0.9
# Largest relative error of a line through step times at which they count as linear in the batch.
LINEAR = 0.05


def summarise(
    frame: pd.DataFrame, memory_limit_bytes: float | None, measured_limits: Mapping[str, int | None] | None = None
) -> dict[str, DeviceCurve]:
    """Return device -> summary of its median step times over local batch sizes.

    ``linear_from_batch`` is the smallest batch from which on one line fits all step times to 5 %, and ``seconds_per_sample``
    that line's slope; None without three such batches. ``launch_overhead_s`` is the intercept of a line through all batches.

    Args:
        frame: rows of a checked profile; only those with the device's fewest replicas, and without accumulation if there are
            any, are used.
        memory_limit_bytes: memory of a device, to which a line through the peak memories is extrapolated; None: not known.
        measured_limits: device -> largest batch that ran (None: memory set no limit); takes the place of the extrapolation.
    """
    # A profile that knows only steps with accumulation is better than none.
    if "accumulation_steps" in frame and (frame["accumulation_steps"].fillna(0) == 0).any():
        frame = frame[frame["accumulation_steps"].fillna(0) == 0]
    curves: dict[str, DeviceCurve] = {}
    for device, rows in frame.groupby("device", sort=True):
        plain_rows = rows[rows["num_replicas"] == rows["num_replicas"].min()]
        medians = plain_rows.groupby("local_batch_size").median(numeric_only=True).sort_index()
        batches = medians.index.to_numpy(dtype=float)
        step_times_s = medians["step_time_s"].to_numpy(dtype=float)
        peak_bytes = medians["peak_memory_bytes"].to_numpy(dtype=float) if "peak_memory_bytes" in medians else None
        origin: str | None = "measured"
        if measured_limits is not None and str(device) in measured_limits:
            memory_limit_batch = measured_limits[str(device)]
        else:
            memory_limit_batch = _memory_limit(batches, peak_bytes, memory_limit_bytes)
            origin = "extrapolated" if memory_limit_batch is not None else None
        linear = _linear_part(batches, step_times_s)
        curves[str(device)] = DeviceCurve(
            saturation_batch=_saturating_batch(batches, step_times_s),
            memory_limit_batch=memory_limit_batch,
            memory_limit_origin=origin,
            launch_overhead_s=fit_line(batches, step_times_s)[0] if len(batches) > 1 else None,
            linear_from_batch=linear[0] if linear else None,
            seconds_per_sample=linear[1] if linear else None,
        )
    return curves


def _saturating_batch(batches: Floats, step_times_s: Floats) -> int:
    """Return the smallest batch whose throughput is at least 90 % of the best one's.

    ``batches`` (n,) in samples, ascending; ``step_times_s`` (n,) of each.
    """
    samples_per_s = batches / step_times_s
    saturating = batches[samples_per_s >= SATURATED * samples_per_s.max()]
    return int(saturating[0])


def _linear_part(batches: Floats, step_times_s: Floats) -> tuple[int, float] | None:
    """Return the smallest batch from which on one line fits all step times to 5 %, and the line's seconds per sample.

    ``batches`` (n,) ascend. None where no line through three or more batches fits that well (``LINEAR``).
    """
    for first in range(len(batches) - 2):
        intercept_s, slope_s = fit_line(batches[first:], step_times_s[first:])
        relative_errors = (intercept_s + slope_s * batches[first:]) / step_times_s[first:] - 1
        if np.abs(relative_errors).max() <= LINEAR:
            return int(batches[first]), slope_s
    return None


def fit_line(batches: Floats, values: Floats) -> tuple[float, float]:
    """Return intercept and slope of a line through ``values`` (n,) over ``batches`` (n,), both 0 or more.

    The line has the least sum of squared relative errors, so that small and large batches count alike.
    """
    weighted = np.stack([np.ones_like(batches), batches], axis=1) / values[:, None]
    coefficients, _ = nnls(weighted, np.ones_like(values))
    return float(coefficients[0]), float(coefficients[1])


def _memory_limit(batches: Floats, peaks: Floats | None, limit_bytes: float | None) -> int | None:
    """Return the largest batch that fits into memory, by a line through the peak memories; at least 0.

    ``peaks`` (n,) are bytes at each of the ``batches`` (n,). None without a limit or peaks, with fewer than two batches, where
    some peak is not a positive number, and where memory does not grow with the batch.
    """
    if peaks is None or limit_bytes is None or len(batches) < 2 or not (np.isfinite(peaks) & (peaks > 0)).all():
        return None
    intercept_bytes, bytes_per_sample = fit_line(batches, peaks)
    if bytes_per_sample * batches[-1] < 0.01 * peaks[-1]:
        return None  # the batch makes up less than 1 % of the memory: noise
    return max(0, int((limit_bytes - intercept_bytes) / bytes_per_sample))


# Probability with which an interval covers the median.
LEVEL = 0.95
# Below so many samples dependence does not matter: their smallest and largest are the interval anyway.
_FEWEST_DEPENDENT = 6
# Standard deviations of a sum of autocorrelations that about 5 % of independent samples exceed at some lag.
_MORE_THAN_CHANCE = 2.1
# Share of throughput: two doublings in turn that each gain less end the search for saturation.
_FLAT = 0.05
# Ratio of the ends of a bracket around the saturation batch at which it is narrow enough.
_BRACKET = 1.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A median with its confidence interval, all in the unit of the samples."""

    median: float
    low: float
    high: float

    @property
    def relative(self) -> float:
        """Half the interval's width over the median: 0.05 says that the median is known to 5 %."""
        return (self.high - self.low) / 2 / self.median


@lru_cache(maxsize=4096)
def interval_ranks(count: int, level: float = LEVEL) -> tuple[int, int]:
    """Return the indices from 0 of two of ``count`` sorted samples that enclose the median with probability >= ``level``.

    Distribution-free: the number of samples below the median is Binomial(count, 1/2), so the interval from the k-th smallest
    to the k-th largest sample covers it with probability 1 - 2 P(Binomial < k) (David and Nagaraja, Order Statistics, 3rd
    ed., section 7.1). No interval of fewer than six samples reaches 95 %: then the smallest and the largest are returned,
    which cover it with probability 1 - 2^(1 - count). Raises ValueError for no samples.
    """
    if count < 1:
        raise ValueError("an interval needs a sample")
    # the largest k with P(Binomial <= k - 1) <= (1 - level) / 2; k counts from 1, the index from 0
    first = max(0, int((bdtr(np.arange(count), count, 0.5) <= (1 - level) / 2).sum()) - 1)
    return first, count - 1 - first


def median_interval(samples: Sequence[float]) -> Interval:
    """Return the median of ``samples``, which are in the order they were taken, with a distribution-free 95 % interval.

    n samples with autocorrelation time d (:func:`autocorrelation_time`) tell as much as n / d independent ones. So the
    interval reaches sqrt(d) times as far from the middle of the sorted samples as :func:`interval_ranks` says. It is too
    narrow where the samples drift more slowly than the whole series lasts, because the samples cannot show that.
    """
    ordered = sorted(samples)
    first, _ = interval_ranks(len(ordered))
    middle = (len(ordered) - 1) / 2
    first = max(0, math.floor(middle - (middle - first) * math.sqrt(autocorrelation_time(samples))))
    return Interval(median=float(np.median(ordered)), low=ordered[first], high=ordered[len(ordered) - 1 - first])


def autocorrelation_time(samples: Sequence[float]) -> float:
    """Return how many samples in a row tell as much as one independent sample, from 1 to n, for ``samples`` (n,).

    Each sample is replaced by its position in sorted order (its statistical rank). The result is 1 + 2 times the sum of the
    autocorrelations of these, cut off where pairs of them stop being positive and falling (the initial monotone sequence;
    Geyer, "Practical Markov chain Monte Carlo", Statistical Science 7, 1992, section 3.3), and corrected once for the bias
    that comes from subtracting the samples' own mean. It is 1 for fewer than six samples, for equal ones, and unless the
    autocorrelations of the first 1, 2, 4, ... lags have a sum that independent samples seldom reach.
    """
    count = len(samples)
    _, tie_index, ties = np.unique(np.asarray(samples, dtype=np.float64), return_inverse=True, return_counts=True)
    if count < _FEWEST_DEPENDENT or len(ties) == 1:
        return 1.0
    ranks = (np.cumsum(ties) - ties / 2)[tie_index]  # equal samples share their mean rank
    ranks -= ranks.mean()
    spectrum = np.fft.rfft(ranks, 2 * count)
    autocorrelations = np.fft.irfft(np.abs(spectrum) ** 2, 2 * count)[:count]
    autocorrelations /= autocorrelations[0]
    # For independent samples the sum of k autocorrelations has mean -k / n and variance k / n, while k is small beside n.
    lags = 2 ** np.arange((count // 6).bit_length())
    if (np.cumsum(autocorrelations[1:])[lags - 1] + lags / count <= _MORE_THAN_CHANCE * np.sqrt(lags / count)).all():
        return 1.0
    bias = _integrated_time(autocorrelations) / count
    return min(_integrated_time((autocorrelations + bias) / (1 + bias)), count)


def _integrated_time(autocorrelations: Floats) -> float:
    """Return 1 + 2 times the sum of the autocorrelations beyond lag 0, by Geyer's rule; at least 1.

    ``autocorrelations`` (n,) begin with lag 0, which is 1. They are summed in pairs up to the first pair that is not positive,
    and no pair counts for more than the one before it.
    """
    pairs = autocorrelations[: len(autocorrelations) // 2 * 2].reshape(-1, 2).sum(axis=1)
    is_end = pairs <= 0
    positive_pairs = pairs[: int(np.argmax(is_end))] if is_end.any() else pairs
    return max(1.0, 2 * float(np.minimum.accumulate(positive_pairs).sum()) - 1)  # lag 0 counts once


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A predicted step time in seconds (NaN: not known) and its relative uncertainty (then infinite)."""

    step_time_s: float
    relative: float


_UNKNOWN = Prediction(step_time_s=math.nan, relative=math.inf)


def predict(points: Mapping[int, Interval], batch: int) -> Prediction:
    """Return the step time at ``batch`` samples and its uncertainty, as a share of it, from measured step times.

    It is midway between two bounds. One is the chord: the straight line between the two measured batches next to ``batch``. The
    other comes from two lines that are extended to ``batch``: through the two measured batches below it, and through the two
    above it. A curve that bends one way lies between these and the chord (:func:`_other_bound`). The uncertainty is half the
    distance of the bounds, plus half the width of the neighbours' own intervals. A measured batch keeps its own time and
    interval. The step time is unknown outside the measured batches and with fewer than three of them.

    ``points``: batch size -> measured step time in seconds, with its interval.
    """
    measured = sorted(points)
    if batch in points:
        return Prediction(step_time_s=points[batch].median, relative=points[batch].relative)
    if len(measured) < 3 or not measured[0] < batch < measured[-1]:
        return _UNKNOWN
    upper_index = next(position for position, value in enumerate(measured) if value > batch)
    lower, upper = measured[upper_index - 1], measured[upper_index]
    upper_share = (batch - lower) / (upper - lower)
    lower_noise_s, upper_noise_s = ((points[end].high - points[end].low) / 2 for end in (lower, upper))
    noise_s = (1 - upper_share) * lower_noise_s + upper_share * upper_noise_s
    chord_s = _extend_line(points, lower, upper, batch)
    extended_s = [
        _extend_line(points, measured[left], measured[left + 1], batch)
        for left in (upper_index - 2, upper_index)  # the left ends of the pairs below and above
        if 0 <= left < len(measured) - 1
    ]
    other_bound_s = _other_bound(chord_s, extended_s, points[lower].median, points[upper].median)
    middle_s = (chord_s + other_bound_s) / 2
    half_width_s = abs(chord_s - other_bound_s) / 2 + noise_s
    return Prediction(step_time_s=middle_s, relative=half_width_s / middle_s)


def _extend_line(points: Mapping[int, Interval], first_batch: int, second_batch: int, batch: int) -> float:
    """Return the seconds at ``batch`` on the line through the medians of two measured batches."""
    slope = (points[second_batch].median - points[first_batch].median) / (second_batch - first_batch)
    return points[first_batch].median + slope * (batch - first_batch)


def _other_bound(chord_s: float, extended_s: Sequence[float], lower_s: float, upper_s: float) -> float:
    """Return the bound (seconds) opposite the chord: below it where the curve bends up, above it where it bends down.

    ``extended_s``: seconds on the lines through the outer pairs; ``lower_s``, ``upper_s``: those of the two neighbours.
    """
    if all(value <= chord_s for value in extended_s):
        return max(min(lower_s, chord_s), *extended_s)
    if all(value >= chord_s for value in extended_s):
        return min(max(upper_s, chord_s), *extended_s)
    return max(extended_s, key=lambda value: abs(value - chord_s))  # it bends both ways, or that is noise


def first_to_measure(unpredicted: Sequence[int], measured: Sequence[int]) -> int:
    """Return the batch of ``unpredicted``, which is not empty, that should be measured next.

    It is the smallest of all batches, measured ones included, then the largest, then the one nearest to the geometric mean of
    these two, because throughput curves bend on a logarithmic scale.
    """
    batches = sorted([*unpredicted, *measured])
    for end in (batches[0], batches[-1]):
        if end in unpredicted:
            return end
    geometric_middle = math.sqrt(batches[0] * batches[-1])
    return min(unpredicted, key=lambda batch: abs(math.log(batch / geometric_middle)))


def next_to_measure(points: Mapping[int, float], largest_batch: int) -> int | None:
    """Return the next batch to measure in the search for saturation, the smallest batch with 90 % of the best throughput.

    ``points``: batch -> step time in seconds, of the batches that this function asked for before. Batches double from 1 until
    two doublings in turn bring less than 5 % throughput each, or ``largest_batch`` is reached. Then the bracket in which
    throughput passes 90 % of the best is halved. None when its ends are neighbours or within a factor of 1.25.
    """
    if not points:
        return 1
    measured = sorted(points)
    samples_per_s = {batch: batch / points[batch] for batch in measured}
    doublings = [batch for batch in measured if batch & (batch - 1) == 0]  # powers of two
    gains = [samples_per_s[upper] / samples_per_s[lower] - 1 for lower, upper in itertools.pairwise(doublings)]
    is_flat = len(gains) >= 2 and max(gains[-2:]) < _FLAT
    if not is_flat and measured[-1] < largest_batch:
        return min(2 * doublings[-1], largest_batch)
    best_per_s = max(samples_per_s.values())
    saturation_index = next(
        position for position, batch in enumerate(measured) if samples_per_s[batch] >= SATURATED * best_per_s
    )
    if saturation_index == 0:
        return None
    lower, upper = measured[saturation_index - 1], measured[saturation_index]
    if upper - lower <= 1 or upper / lower <= _BRACKET:
        return None
    return (lower + upper) // 2
