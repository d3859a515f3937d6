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
from numpy.typing import NDArray

from ddltool.results import NoiseFigures

FEWEST_REPEATS = 3
DRAWS = 20_000
# From here on T hardly depends on the number of repeats any more.
_MOST_SIMULATED = 40
# exp of more is no float.
_LARGEST_EXPONENT = 700.0
_QUARTILES = (0.25, 0.5, 0.75)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Repeats of one measurement: positive median, interquartile range in the same unit, number of repeats.

    ``runs``: how many separate runs they come from. Repeats within one run do not show what differs between runs.
    """

    key: str
    median: float
    spread: float
    repeats: int
    runs: int = 1


def cell_of(key: str, samples: Sequence[float]) -> Cell:
    """Return the cell of raw repeats, shape (n,), n >= 1."""
    low, median, high = np.quantile(np.asarray(samples, dtype=np.float64), _QUARTILES)
    return Cell(key=key, median=float(median), spread=float(high - low), repeats=len(samples))


def pool(key: str, cells: Sequence[Cell]) -> Cell:
    """Pool several measurements of one configuration (rows or files) into one cell.

    Three or more cells: their medians are the repeats, because runs differ by more than the repeats within a run do.
    Two cells: all their repeats, with the distance of the two medians as the spread where larger than both spreads.
    ``key``: the pooled cell's.
    """
    if len(cells) == 1:
        return replace(cells[0], key=key)
    pooled = replace(cell_of(key, [cell.median for cell in cells]), runs=sum(cell.runs for cell in cells))
    if len(cells) >= FEWEST_REPEATS:
        return pooled
    spread = max(abs(cells[0].median - cells[1].median), *(cell.spread for cell in cells))
    return replace(pooled, spread=spread, repeats=sum(cell.repeats for cell in cells))


def enough_repeats(cells: Sequence[Cell]) -> bool:
    """Return whether the cells have the repeats that :func:`past_limit` needs."""
    return bool(cells) and all(cell.repeats >= FEWEST_REPEATS and cell.median > 0 for cell in cells)


def geometric_mean(cells: Sequence[Cell]) -> float:
    """Return the geometric mean of the medians; 0 when one of them is 0."""
    if any(cell.median <= 0 for cell in cells):
        return 0.0
    return math.exp(sum(math.log(cell.median) for cell in cells) / len(cells))


def past_limit(
    current: Sequence[Cell], baseline: Sequence[Cell], limit: float, *, above: bool, level: float, seed: int = 0
) -> NoiseFigures:
    """Test whether the ratio current / baseline of geometric means is past ``limit`` (with ``above``: greater, else less).

    ``baseline``: the cells of the same keys in the same order, or empty to compare the current figure itself with
    ``limit``. Returns the p-value, the standard error and the interval at ``level``. Needs cells with
    :func:`enough_repeats` and a positive limit.
    """
    # In logarithms, for a ratio of 1e308 to 1e-308 is no float.
    log_ratio = math.log(geometric_mean(current)) - (math.log(geometric_mean(baseline)) if baseline else 0.0)
    relative_errors = [cell.spread / cell.median / math.sqrt(cell.repeats) for cell in (*current, *baseline)]
    error = min(math.hypot(*relative_errors) / len(current), sys.float_info.max)
    null_draws = _simulate_null(_repeat_counts(current), _repeat_counts(baseline), seed)
    log_excess = (log_ratio - math.log(limit)) * (1 if above else -1)
    if error == 0:
        p = 0.0 if log_excess > 0 else 1.0
    else:
        # The share of draws that are as far out; the figure itself counts as one, so that p is never 0 by chance.
        p = max((1 + DRAWS - int(np.searchsorted(sample, log_excess / error))) / (DRAWS + 1) for sample in null_draws)
    critical = max(float(sample[min(int(DRAWS * (1 - level)), DRAWS - 1)]) for sample in null_draws)
    low_ratio, high_ratio = np.exp(
        np.clip(log_ratio + np.array([-critical, critical]) * error, -_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    ).tolist()
    return NoiseFigures(p=p, level=level, standard_error=error, low=low_ratio, high=high_ratio)


def _repeat_counts(cells: Sequence[Cell]) -> tuple[int, ...]:
    """Return how many repeats each cell has, capped at the most that are simulated: beyond it the test hardly changes."""
    return tuple(min(cell.repeats, _MOST_SIMULATED) for cell in cells)


@lru_cache(maxsize=64)
def _simulate_null(current: tuple[int, ...], baseline: tuple[int, ...], seed: int) -> tuple[NDArray[np.float64], ...]:
    """Return draws of T, ascending, (DRAWS,) each, for a centre that is on the limit: an array for each ratio of the spreads.

    ``current`` and ``baseline`` hold the repeats per cell. An empty ``baseline`` gives one array, else there are three:
    equal spreads, none in the baseline, none in the current side.
    """
    random = np.random.default_rng(seed)

    def draw(sizes: tuple[int, ...]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Draw normal repeats for one side: return its sum over cells of medians, and that of squared spreads over repeats.

        ``sizes``: repeats per cell. Both sums are (DRAWS,).
        """
        centre, variance = np.zeros(DRAWS), np.zeros(DRAWS)
        for size in sizes:
            low, median, high = np.quantile(random.standard_normal((DRAWS, size)), _QUARTILES, axis=1)
            centre += median
            variance += (high - low) ** 2 / size
        return centre, variance

    # T is the sum of the medians over the root of the summed squared errors, the scale of both sides being one.
    centre, variance = draw(current)
    current_only = np.sort(centre / np.sqrt(variance))
    if not baseline:
        return (current_only,)
    baseline_centre, baseline_variance = draw(baseline)
    two_sided = np.sort((centre - baseline_centre) / np.sqrt(variance + baseline_variance))
    return two_sided, current_only, np.sort(baseline_centre / np.sqrt(baseline_variance))
