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
_REACH = 700.0
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
    """Return one cell for several measurements of one thing (rows or files).

    Three or more: their medians are the repeats, because runs differ by more than the repeats within a run do. Two: the repeats
    together, with the distance of the two as the spread where that is larger.
    """
    if len(cells) == 1:
        return replace(cells[0], key=key)
    together = replace(cell_of(key, [cell.median for cell in cells]), runs=sum(cell.runs for cell in cells))
    if len(cells) >= FEWEST_REPEATS:
        return together
    spread = max(abs(cells[0].median - cells[1].median), *(cell.spread for cell in cells))
    return replace(together, spread=spread, repeats=sum(cell.repeats for cell in cells))


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
    """Test whether current / baseline is past ``limit`` (above it, or below it).

    ``baseline``: the cells of the same keys in the same order, or empty to compare the current figure itself with ``limit``.
    Needs cells with :func:`enough_repeats` and a positive limit.
    """
    # In logarithms, for a ratio of 1e308 to 1e-308 is no float.
    log_ratio = math.log(geometric_mean(current)) - (math.log(geometric_mean(baseline)) if baseline else 0.0)
    shares = [cell.spread / cell.median / math.sqrt(cell.repeats) for cell in (*current, *baseline)]
    error = min(math.hypot(*shares) / len(current), sys.float_info.max)
    null = _null(_sizes(current), _sizes(baseline), seed)
    distance = (log_ratio - math.log(limit)) * (1 if above else -1)
    if error == 0:
        p = 0.0 if distance > 0 else 1.0
    else:
        p = max((1 + DRAWS - int(np.searchsorted(draws, distance / error))) / (DRAWS + 1) for draws in null)
    critical = max(float(draws[min(int(DRAWS * (1 - level)), DRAWS - 1)]) for draws in null)
    low, high = np.exp(np.clip(log_ratio + np.array([-critical, critical]) * error, -_REACH, _REACH)).tolist()
    return NoiseFigures(p=p, level=level, standard_error=error, low=low, high=high)


def _sizes(cells: Sequence[Cell]) -> tuple[int, ...]:
    return tuple(min(cell.repeats, _MOST_SIMULATED) for cell in cells)


@lru_cache(maxsize=64)
def _null(current: tuple[int, ...], baseline: tuple[int, ...], seed: int) -> tuple[NDArray[np.float64], ...]:
    """Return draws of T, shape (DRAWS,), ascending, for each ratio of the spreads, when nothing but noise moves it."""
    random = np.random.default_rng(seed)

    def draw(sizes: tuple[int, ...]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the sum over cells of medians and of squared interquartile ranges over n, each (DRAWS,)."""
        centre, variance = np.zeros(DRAWS), np.zeros(DRAWS)
        for size in sizes:
            low, median, high = np.quantile(random.standard_normal((DRAWS, size)), _QUARTILES, axis=1)
            centre += median
            variance += (high - low) ** 2 / size
        return centre, variance

    centre, variance = draw(current)
    alone = np.sort(centre / np.sqrt(variance))
    if not baseline:
        return (alone,)
    other, other_variance = draw(baseline)
    both = np.sort((centre - other) / np.sqrt(variance + other_variance))
    return both, alone, np.sort(other / np.sqrt(other_variance))
