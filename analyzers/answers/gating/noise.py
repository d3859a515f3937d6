"""Is a measured change real? A studentised test of medians, calibrated by simulation.

A measured figure is a set of cells, each the median and interquartile range of repeats: one configuration of a profile, or
several that are judged together by their geometric mean. The statistic is Welch's with medians in place of means, on the
logarithms::

    T = (mean_j ln(current_j / baseline_j) - ln limit) / SE,   SE = sqrt(sum_j (w_j^2 / n_j + v_j^2 / m_j)) / k

with w, v the interquartile ranges over their medians and n, m the repeats. Interquartile ranges of few repeats are too rough
for Student's t, so T is compared with what the same T gives on normal samples of the same sizes whose centre is on the limit.
Of the ratios 1, 0 and infinity of the two sides' spreads the one with the largest p counts. At the level 0.05 this gives 1 to
5 % false alarms on normal, log-normal and exponential noise, with spreads that differ threefold too (simulated in the tests).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ddltool.arrays import Floats
from ddltool.results import NoiseFigures

FEWEST_REPEATS = 3
DRAWS = 20_000
# For more repeats than this, T is simulated with this number, on which it hardly depends any more.
_MOST_SIMULATED = 40
# exp of a larger number overflows.
_LARGEST_EXPONENT = 700.0
_QUARTILES = (0.25, 0.5, 0.75)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """The repeats of one measurement, such as the step times of one configuration."""

    key: str
    """What was measured; the cells of two artifacts with the same key are compared."""
    median: float
    """Median of the repeats."""
    spread: float
    """Their interquartile range, in the unit of the median."""
    repeats: int
    runs: int = 1
    """Number of separate runs that the repeats come from; repeats of one run do not show the noise between runs."""


def cell_of(key: str, samples: Sequence[float]) -> Cell:
    """Return the cell ``key`` of raw repeats, (n,), n >= 1."""
    low, median, high = np.quantile(np.asarray(samples, dtype=np.float64), _QUARTILES)
    return Cell(key=key, median=float(median), spread=float(high - low), repeats=len(samples))


def pool(key: str, cells: Sequence[Cell]) -> Cell:
    """Return one cell ``key`` for several measurements of one configuration (rows or files).

    Three or more cells: their medians are the repeats, because runs differ by more than the repeats within a run do.
    Two cells: all their repeats count, and the spread is the largest of both spreads and the distance of the medians.
    """
    if len(cells) == 1:
        return replace(cells[0], key=key)
    pooled = replace(cell_of(key, [cell.median for cell in cells]), runs=sum(cell.runs for cell in cells))
    if len(cells) >= FEWEST_REPEATS:
        return pooled
    spread = max(abs(cells[0].median - cells[1].median), *(cell.spread for cell in cells))
    return replace(pooled, spread=spread, repeats=sum(cell.repeats for cell in cells))


def enough_repeats(cells: Sequence[Cell]) -> bool:
    """Return whether there are cells and all have the repeats and the positive median that :func:`past_limit` needs."""
    return bool(cells) and all(cell.repeats >= FEWEST_REPEATS and cell.median > 0 for cell in cells)


def geometric_mean(cells: Sequence[Cell]) -> float:
    """Return the geometric mean of the medians; 0 if one of them is not positive."""
    if any(cell.median <= 0 for cell in cells):
        return 0.0
    return math.exp(sum(math.log(cell.median) for cell in cells) / len(cells))


def past_limit(
    current: Sequence[Cell], baseline: Sequence[Cell], limit: float, *, above: bool, level: float, seed: int = 0
) -> NoiseFigures:
    """Test whether the ratio current / baseline of geometric means is greater (not ``above``: less) than ``limit``.

    Returns the one-sided p-value, the standard error of the logarithm of the ratio (or figure), and its interval at
    ``level``.

    Args:
        current: the cells of the current artifact; they must have :func:`enough_repeats`.
        baseline: those of the baseline, of the same keys in the same order; empty: the current figure itself is
            compared with the limit.
        limit: a positive ratio, or without a baseline a positive figure.
        above: True: the figure must not be above the limit; False: not below.
        level: the probability of a false alarm, from which the interval follows.
        seed: of the simulated noise.
    """
    # In logarithms, because a ratio such as 1e308 / 1e-308 would overflow.
    log_baseline = math.log(geometric_mean(baseline)) if baseline else 0.0
    log_ratio = math.log(geometric_mean(current)) - log_baseline
    relative_errors = [cell.spread / cell.median / math.sqrt(cell.repeats) for cell in (*current, *baseline)]
    error = min(math.hypot(*relative_errors) / len(current), sys.float_info.max)
    null_draws = _simulate_null(_repeat_counts(current), _repeat_counts(baseline), seed)
    log_excess = (log_ratio - math.log(limit)) * (1 if above else -1)
    if error == 0:
        p = 0.0 if log_excess > 0 else 1.0
    else:
        p = max(_share_of_draws_above(sample, log_excess / error) for sample in null_draws)
    critical = max(float(sample[min(int(DRAWS * (1 - level)), DRAWS - 1)]) for sample in null_draws)
    log_interval = log_ratio + np.array([-critical, critical]) * error
    low_ratio, high_ratio = np.exp(np.clip(log_interval, -_LARGEST_EXPONENT, _LARGEST_EXPONENT)).tolist()
    return NoiseFigures(p=p, level=level, standard_error=error, low=low_ratio, high=high_ratio)


def _share_of_draws_above(sorted_draws: Floats, statistic: float) -> float:
    """Return the share of draws, (DRAWS,) in ascending order, that are at least as large as ``statistic``.

    The statistic counts as one more draw, so that the share is never 0 by chance.
    """
    draws_below = int(np.searchsorted(sorted_draws, statistic))
    return (1 + DRAWS - draws_below) / (DRAWS + 1)


def _repeat_counts(cells: Sequence[Cell]) -> tuple[int, ...]:
    """Return the number of repeats of each cell, at most ``_MOST_SIMULATED``."""
    return tuple(min(cell.repeats, _MOST_SIMULATED) for cell in cells)


@lru_cache(maxsize=64)
def _simulate_null(current: tuple[int, ...], baseline: tuple[int, ...], seed: int) -> tuple[Floats, ...]:
    """Return sorted draws of T for a true figure on the limit: an array (DRAWS,) for each assumed ratio of the spreads.

    ``current`` and ``baseline``: repeats per cell. Without a baseline there is one array, else three: for equal spreads,
    for no spread of the baseline, and for none of the current side.
    """
    random = np.random.default_rng(seed)

    def draw(sizes: tuple[int, ...]) -> tuple[Floats, Floats]:
        """Draw normal repeats of one side: return the sums over its cells of medians, and of squared spreads / repeats.

        ``sizes``: repeats per cell. Both sums are (DRAWS,).
        """
        centre = np.zeros(DRAWS)
        variance = np.zeros(DRAWS)
        for size in sizes:
            low, median, high = np.quantile(random.standard_normal((DRAWS, size)), _QUARTILES, axis=1)
            centre += median
            variance += (high - low) ** 2 / size
        return centre, variance

    # T is the sum of the medians over the root of the summed squared errors; the factor 1 / k of both cancels out.
    centre, variance = draw(current)
    current_only = np.sort(centre / np.sqrt(variance))
    if not baseline:
        return (current_only,)
    baseline_centre, baseline_variance = draw(baseline)
    two_sided = np.sort((centre - baseline_centre) / np.sqrt(variance + baseline_variance))
    return two_sided, current_only, np.sort(baseline_centre / np.sqrt(baseline_variance))
