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

# A batch is saturating when it reaches this share of the best measured throughput.
SATURATED = 0.9
# Step times lie on a line when it misses none of them by more than this.
LINEAR = 0.05


def summarise(
    frame: pd.DataFrame, memory_limit_bytes: float | None, measured_limits: Mapping[str, int | None] | None = None
) -> dict[str, DeviceCurve]:
    """Return a summary per device from a checked profile's rows with the fewest replicas and no accumulation.

    ``linear_from_batch``: the smallest batch from which on one line holds all step times to 5 %, its slope being
    ``seconds_per_sample``; None without three such batches. ``launch_overhead_s`` is the line's step time of an empty batch.

    ``memory_limit_bytes``: what a line through the peak memories is extrapolated to, for devices that are not in
    ``measured_limits``, the largest batch that ran by device (None: memory sets no limit).
    """
    if "accumulation_steps" in frame and (frame["accumulation_steps"].fillna(0) == 0).any():
        frame = frame[frame["accumulation_steps"].fillna(0) == 0]
    found: dict[str, DeviceCurve] = {}
    for device, rows in frame.groupby("device", sort=True):
        fewest = rows[rows["num_replicas"] == rows["num_replicas"].min()]
        medians = fewest.groupby("local_batch_size").median(numeric_only=True).sort_index()
        batches = medians.index.to_numpy(dtype=float)
        times = medians["step_time_s"].to_numpy(dtype=float)
        memory = medians["peak_memory_bytes"].to_numpy(dtype=float) if "peak_memory_bytes" in medians else None
        origin: str | None = "measured"
        limit = (measured_limits or {}).get(str(device))
        if measured_limits is None or str(device) not in measured_limits:
            limit = _memory_limit(batches, memory, memory_limit_bytes)
            origin = "extrapolated" if limit is not None else None
        linear = _linear_part(batches, times)
        found[str(device)] = DeviceCurve(
            saturation_batch=_saturation(batches, times),
            memory_limit_batch=limit,
            memory_limit_origin=origin,
            launch_overhead_s=line(batches, times)[0] if len(batches) > 1 else None,
            linear_from_batch=linear[0] if linear else None,
            seconds_per_sample=linear[1] if linear else None,
        )
    return found


def _saturation(batches: Floats, times: Floats) -> int:
    speed = batches / times
    return int(batches[np.flatnonzero(speed >= SATURATED * speed.max())[0]])


def _linear_part(batches: Floats, times: Floats) -> tuple[int, float] | None:
    """Return the first batch from which on one line holds all times, and the line's slope."""
    for first in range(len(batches) - 2):
        base, each = line(batches[first:], times[first:])
        if np.abs((base + each * batches[first:]) / times[first:] - 1).max() <= LINEAR:
            return int(batches[first]), each
    return None


def line(batches: Floats, values: Floats) -> tuple[float, float]:
    """Return intercept and slope, both >= 0, of the line with the least relative squared error; arrays of shape (n,)."""
    weighted = np.stack([np.ones_like(batches), batches], axis=1) / values[:, None]
    solution, _ = nnls(weighted, np.ones_like(values))
    return float(solution[0]), float(solution[1])


def _memory_limit(batches: Floats, memory: Floats | None, limit_bytes: float | None) -> int | None:
    if memory is None or limit_bytes is None or len(batches) < 2 or not (np.isfinite(memory) & (memory > 0)).all():
        return None
    base, each = line(batches, memory)
    if each * batches[-1] < 0.01 * memory[-1]:
        return None  # memory does not grow with the batch beyond the noise
    return max(0, int((limit_bytes - base) / each))


LEVEL = 0.95
# Below, the smallest and largest are the interval anyway.
_FEWEST_DEPENDENT = 6
# Standard deviations; of independent samples some 5 % have a sum beyond it.
_MORE_THAN_CHANCE = 2.1
# Doublings that each bring less than this share of throughput: the curve is a line from there on.
_FLAT = 0.05
# A bracket around the saturation batch is narrow enough at this ratio of its ends.
_BRACKET = 1.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A median with its confidence interval, all in the unit of the samples."""

    median: float
    low: float
    high: float

    @property
    def relative(self) -> float:
        """Half the interval's width over the median: 0.05 is known to 5 %."""
        return (self.high - self.low) / 2 / self.median


@lru_cache(maxsize=4096)
def interval_ranks(count: int, level: float = LEVEL) -> tuple[int, int]:
    """Return the ranks (from 0) of the order statistics that hold the median with probability ``level``.

    Distribution-free: the number of samples below the median is Binomial(n, 1/2), so the interval between the order
    statistics k and n + 1 - k covers it with probability 1 - 2 P(Binomial < k) (David and Nagaraja, Order Statistics,
    3rd ed., section 7.1). Under six samples no such interval has 95 %: then the smallest and largest are returned, whose
    coverage is 1 - 2^(1 - n). Raises ValueError for no samples.
    """
    if count < 1:
        raise ValueError("an interval needs a sample")
    # the largest k with P(Binomial <= k - 1) <= (1 - level) / 2
    first = max(0, int((bdtr(np.arange(count), count, 0.5) <= (1 - level) / 2).sum()) - 1)
    return first, count - 1 - first


def median_interval(samples: Sequence[float]) -> Interval:
    """Return the median of samples, in the order they were taken, with a distribution-free 95 % interval.

    :func:`interval_ranks`, moved apart by the root of :func:`dependence`: n dependent samples tell as much as n of it.
    Drift slower than all of the samples cannot be seen in them: then the interval is still too narrow.
    """
    ordered = sorted(samples)
    first, _ = interval_ranks(len(ordered))
    middle = (len(ordered) - 1) / 2
    first = max(0, math.floor(middle - (middle - first) * math.sqrt(dependence(samples))))
    return Interval(median=float(np.median(ordered)), low=ordered[first], high=ordered[len(ordered) - 1 - first])


def dependence(samples: Sequence[float]) -> float:
    """Return how many samples in a row, shape (n,), tell as much as one independent one, from 1 to n.

    1 + 2 sum of the ranks' autocorrelations, cut where pairs of them stop being positive and falling (the initial monotone
    sequence; Geyer, "Practical Markov chain Monte Carlo", Statistical Science 7, 1992, section 3.3), and once corrected for
    the mean being the samples' own. 1 unless the sum of some of the first lags is more than what independent samples give.
    """
    count = len(samples)
    _, place, ties = np.unique(np.asarray(samples, dtype=np.float64), return_inverse=True, return_counts=True)
    if count < _FEWEST_DEPENDENT or len(ties) == 1:
        return 1.0
    ranks = (np.cumsum(ties) - ties / 2)[place]
    ranks -= ranks.mean()
    waves = np.fft.rfft(ranks, 2 * count)
    alike = np.fft.irfft(np.abs(waves) ** 2, 2 * count)[:count]
    alike /= alike[0]
    # Of independent samples the sum of k autocorrelations has mean -k / n and variance k / n.
    lags = 2 ** np.arange((count // 6).bit_length())
    if (np.cumsum(alike[1:])[lags - 1] + lags / count <= _MORE_THAN_CHANCE * np.sqrt(lags / count)).all():
        return 1.0
    bias = _monotone_sum(alike) / count
    return min(_monotone_sum((alike + bias) / (1 + bias)), count)


def _monotone_sum(alike: Floats) -> float:
    """Return 1 + 2 sum of autocorrelations (n,) from lag 0 on by Geyer's rule, at least 1."""
    pairs = alike[: len(alike) // 2 * 2].reshape(-1, 2).sum(axis=1)
    positive = pairs[: int(np.argmax(pairs <= 0)) if (pairs <= 0).any() else None]
    return max(1.0, 2 * float(np.minimum.accumulate(positive).sum()) - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A step time (seconds) that was not measured, and its relative uncertainty (infinite where nothing is known)."""

    step_time_s: float
    relative: float


_UNKNOWN = Prediction(step_time_s=math.nan, relative=math.inf)


def predict(points: Mapping[int, Interval], batch: int) -> Prediction:
    """Return the step time at ``batch`` from the measured batches next to it: the middle of the room that they leave.

    One bound is the chord between the two neighbours, the other the lines through the pairs on either side, and the lower
    neighbour's time. The uncertainty is half of that room and the neighbours' own intervals. Unknown outside the
    measured batches, and with fewer than three of them.
    """
    measured = sorted(points)
    if batch in points:
        return Prediction(step_time_s=points[batch].median, relative=points[batch].relative)
    if len(measured) < 3 or not measured[0] < batch < measured[-1]:
        return _UNKNOWN
    after = next(position for position, value in enumerate(measured) if value > batch)
    low, high = measured[after - 1], measured[after]
    share = (batch - low) / (high - low)
    noise = (1 - share) * (points[low].high - points[low].low) / 2 + share * (points[high].high - points[high].low) / 2
    chord = _on_line(points, low, high, batch)
    pairs = ([(measured[after - 2], low)] if after >= 2 else []) + [
        (high, one) for one in measured[after + 1 : after + 2]
    ]
    beside = [_on_line(points, *pair, batch) for pair in pairs]
    other = _other_bound(chord, beside, points[low].median, points[high].median)
    middle = (chord + other) / 2
    return Prediction(step_time_s=middle, relative=(abs(chord - other) / 2 + noise) / middle)


def _on_line(points: Mapping[int, Interval], first: int, second: int, batch: int) -> float:
    """Return the value at ``batch`` of the line through two points."""
    slope = (points[second].median - points[first].median) / (second - first)
    return points[first].median + slope * (batch - first)


def _other_bound(chord: float, beside: Sequence[float], low: float, high: float) -> float:
    """Return how far the curve may be from the chord: below it where it bends up, above it where it bends down."""
    if all(value <= chord for value in beside):
        return max(min(low, chord), *beside)
    if all(value >= chord for value in beside):
        return min(max(high, chord), *beside)
    return max(beside, key=lambda value: abs(value - chord))  # it bends both ways, or that is noise


def first_of(unknown: Sequence[int], measured: Sequence[int]) -> int:
    """Return which of the batches of which nothing is known to measure first: smallest, largest, then the middle ones.

    The middle is the geometric one: throughput curves bend on a logarithmic scale.
    """
    everything = sorted([*unknown, *measured])
    for end in (everything[0], everything[-1]):
        if end in unknown:
            return end
    middle = math.sqrt(everything[0] * everything[-1])
    return min(unknown, key=lambda batch: abs(math.log(batch / middle)))


def next_doubling(points: Mapping[int, float], most: int) -> int | None:
    """Return the next batch of a search for saturation, None when it is found.

    ``points``: step times (seconds) by batch. Doubles from 1 until two doublings in turn bring less than 5 % throughput
    each, or ``most`` is reached; then narrows the bracket in which throughput passes 90 % of the best.
    """
    if not points:
        return 1
    measured = sorted(points)
    speed = {batch: batch / points[batch] for batch in measured}
    doublings = [batch for batch in measured if batch & (batch - 1) == 0]
    gains = [speed[high] / speed[low] - 1 for low, high in itertools.pairwise(doublings)]
    flat = len(gains) >= 2 and max(gains[-2:]) < _FLAT
    if not flat and measured[-1] < most:
        return min(2 * doublings[-1], most)
    best = max(speed.values())
    place = next(position for position, batch in enumerate(measured) if speed[batch] >= SATURATED * best)
    if place == 0:
        return None
    low, high = measured[place - 1], measured[place]
    if high - low <= 1 or high / low <= _BRACKET:
        return None
    return (low + high) // 2
