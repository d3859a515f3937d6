"""Rows that are no steady state: steps that took several times as long as everything around them. Start at :func:`outliers`.

Only gross errors are left out. Measured tables deviate from the model by tens of per cent in whole groups of rows (the
model is not the truth), and a loss that bends early, such as Huber's at two standard deviations, gives those groups up:
on Pollux's tables it doubles the error on unseen rows of bert. So a first fit that few rows cannot pull (least absolute
errors) finds the rows that lie far outside the others' scatter, and the least-squares fit goes without them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.goodput.grouped import group, weighted
from ddltool.analyzers.goodput.observations import Observations
from ddltool.analyzers.goodput.problem import Descent, Problem, descend

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
# A row is left out when its log error exceeds both: six standard deviations, and a factor of two either way.
DEVIATIONS = 6.0
LEAST_FACTOR = 2.0
# More than this share of rows are no outliers: then the model does not hold.
LARGEST_SHARE = 0.15
# With fewer rows an outlier cannot be told from a parameter.
FEWEST_ROWS = 6
# Errors smaller than this count alike in the first fit.
_SMOOTH = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Outlier:
    """A row that was left out, and what the others say it should have taken."""

    device: str
    part: int
    """Which of the tables (from 0), and which row there (from 1); 0 when the rows are medians of a log."""
    row: int
    num_nodes: int
    num_replicas: int
    local_batch_size: int
    step_time_s: float
    expected_s: float


def least_absolute(
    devices: Sequence[Observations], starts: Sequence[Array], slope_weight: float, slope_scale: float
) -> Descent:
    """Return the fit of least absolute log errors of the steps, by iteratively reweighted least squares."""
    best: tuple[float, Descent] | None = None
    plain = [group(rows) for rows in devices]
    for start in starts:
        groups, found = plain, Descent(point=start, loss=math.inf, converged=False)
        for turn in range(10):
            problem = Problem(devices, slope_weight=slope_weight, slope_scale=slope_scale, groups=groups)
            found = descend(problem, found.point, steps=20 if turn == 0 else 3)
            errors = _row_errors(devices, problem, found.point)
            groups = [
                weighted(item, rows, 1.0 / np.maximum(np.abs(error), _SMOOTH))
                for item, rows, error in zip(plain, devices, errors, strict=True)
            ]
        total = sum(float(np.abs(item).sum()) for item in errors)
        if best is None or total < best[0]:
            best = total, found
    assert best is not None  # there is always a start
    return best[1]


def _row_errors(devices: Sequence[Observations], problem: Problem, point: Array) -> list[Array]:
    """Return observed less predicted log step time of each row."""
    made = []
    for rows, item, errors in zip(devices, problem.groups, problem.step_errors(point), strict=True):
        made.append(np.log(rows.step_time_s) - (errors + item.log_step)[item.member])
    return made


def outliers(
    devices: Sequence[Observations], starts: Sequence[Array], slope_weight: float, slope_scale: float
) -> list[Mask]:
    """Return, per device, which rows to leave out, shape (n,): none when they are many or carry a parameter alone.

    ``starts``: points of the :class:`~.problem.Problem` of the same devices. About ten least-squares fits per start.
    """
    none = [np.zeros(len(rows), dtype=bool) for rows in devices]
    count = sum(len(rows) for rows in devices)
    problem = Problem(devices)
    if count < max(FEWEST_ROWS, int(problem.free.sum()) + 1):
        return none
    errors = _row_errors(devices, problem, least_absolute(devices, starts, slope_weight, slope_scale).point)
    # per device: one may scatter far more than another
    found = []
    for item in errors:
        limit = max(DEVIATIONS * 1.4826 * float(np.median(np.abs(item))), math.log(LEAST_FACTOR))
        found.append(np.abs(item) > limit)
    left = sum(int(item.sum()) for item in found)
    if left == 0 or left > max(1, LARGEST_SHARE * count) or any(item.all() for item in found):
        return none
    kept = Problem([rows.take(~item) for rows, item in zip(devices, found, strict=True)])
    return found if np.array_equal(kept.free, problem.free) else none


def describe(rows: Observations, left_out: Mask, expected_s: Array) -> list[Outlier]:
    """Return the rows of a device that were left out; ``expected_s`` (n,) as the fit of the others predicts."""
    return [
        Outlier(
            device=str(rows.device[i]),
            part=int(rows.part[i]),
            row=int(rows.row[i]),
            num_nodes=int(rows.num_nodes[i]),
            num_replicas=int(rows.num_replicas[i]),
            local_batch_size=int(rows.local_batch_size[i]),
            step_time_s=float(rows.step_time_s[i]),
            expected_s=float(expected_s[i]),
        )
        for i in np.flatnonzero(left_out).tolist()
    ]
