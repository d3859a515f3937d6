"""The fit of the throughput model: seven parameters from measured step times (Pollux, section 4.1). Start at :func:`fit`.

Minimised is the mean squared log error of the full step and of one pass (:mod:`~ddltool.analyzers.goodput.problem`), from
many starts, after rows that are no steady state were left out (:mod:`~ddltool.analyzers.goodput.robust`).

Synchronisation slows down less than linearly as replicas are added, so a slope learnt on few replicas predicts too long
steps for many. A prior answers that: a slope is a small share of its intercept, ``beta / alpha`` Cauchy about 0 with scale
:data:`SLOPE_SPREAD`, which lets rows that say otherwise have their way. What stands against it is the rows' own scatter
about the model, counted once for each placement (rows of one placement err together), so rows without noise overrule it.
Its scale, and the weight of T_grad, are about those that best predicted rows of more than 8 replicas from those of up to
8, and of 4 nodes from those of up to 3, over the six applications of Pollux's own measurements
(``benchmarks/bench_fit.py --prior`` repeats the choice).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.goodput.observations import Observations, check
from ddltool.analyzers.goodput.problem import NAMES, Descent, Problem, descend
from ddltool.analyzers.goodput.robust import Outlier, describe, outliers
from ddltool.analyzers.goodput.throughput import ThroughputParams, iteration_time_s
from ddltool.errors import InputError, NotProven

__all__ = ["NAMES", "SLOPE_SPREAD", "ErrorSummary", "FitResult", "JointFit", "evaluate", "fit", "fit_joint"]

Array = NDArray[np.float64]
SLOPE_SPREAD = 0.05
# Standard deviation of a log time: when the rows are too few to tell, and at least.
ASSUMED_ERROR, LEAST_ERROR = 0.05, 1e-7
_GAMMA_STARTS = (1.0, 1.3, 2.0, 3.5, 7.0)
_GROWTH_STARTS = (0.02, 0.3)
# Descents from all starts are cut short; the best few go on to the end.
_SHORT, _FINALISTS = 12, 3


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorSummary:
    """Error of the predicted against the measured full step time."""

    rmsle: float
    mape: float
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FitResult:
    """Fitted parameters, their error on all rows (those left out included), and what the rows could not determine."""

    params: ThroughputParams
    rmsle: float
    mape: float
    samples: int
    fit_seconds: float
    undetermined: tuple[str, ...]
    outliers: tuple[Outlier, ...] = ()
    """Rows that were left out of the fit."""
    left_out: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=bool), compare=False)
    """The same rows as a mask (n,) over all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JointFit:
    """Models of several device types on one network: all seven parameters each, five of them in common."""

    results: tuple[FitResult, ...]


def evaluate(params: ThroughputParams, observations: Observations) -> ErrorSummary:
    """Return RMSLE and MAPE of the full step time on the observations. Raises InputError for rows that cannot be."""
    check(observations)
    seen = observations.step_time_s
    predicted = np.maximum(predict(params, observations), 1e-300)
    return ErrorSummary(
        rmsle=float(np.sqrt(np.mean((np.log(predicted) - np.log(seen)) ** 2))),
        mape=float(np.mean(np.abs(predicted - seen) / seen)),
        samples=len(seen),
    )


def predict(params: ThroughputParams, rows: Observations) -> Array:
    """Return the predicted step time of each row in seconds, shape (n,)."""
    return np.asarray(
        iteration_time_s(params, rows.num_nodes, rows.num_replicas, rows.local_batch_size, rows.accumulation_steps)
    )


def fit(
    observations: Observations,
    *,
    seed: int = 0,
    slope_spread: float = SLOPE_SPREAD,
    grad_weight: float | None = None,
    robust: bool = True,
) -> FitResult:
    """Return the best fit of one device type over many starts.

    ``slope_spread``: scale of ``beta / alpha`` of synchronisation before any row is seen; ``math.inf`` fits the rows
    alone. ``grad_weight``: how much an error of T_grad counts beside one of the step; by default 1 for up
    to 20 configurations, falling to 0.1 for 200 and more. ``robust``: leave out rows that are
    no steady state. ``seed`` makes one more, random start. Raises InputError without rows or for numbers that no
    measurement can give, NotProven when no start converged. O(configurations) per evaluation.
    """
    joint = fit_joint([observations], seed=seed, slope_spread=slope_spread, grad_weight=grad_weight, robust=robust)
    return joint.results[0]


def fit_joint(
    devices: Sequence[Observations],
    *,
    seed: int = 0,
    slope_spread: float = SLOPE_SPREAD,
    grad_weight: float | None = None,
    robust: bool = True,
) -> JointFit:
    """Return the fit of several device types that share their network: gamma and the parameters of synchronisation.

    Arguments and errors as for :func:`fit`. Each result has its own rows' error; ``fit_seconds`` is that of the whole.
    """
    started = time.perf_counter()
    if not slope_spread > 0:
        raise InputError("slope_spread", f"is {slope_spread}", "give a number above 0; inf fits the rows alone")
    if not devices:
        raise InputError("observations", "are empty", "give at least one measured row")
    for rows in devices:
        check(rows)
    chance = np.random.default_rng(seed)
    gammas = (*_GAMMA_STARTS, float(chance.uniform(1.0, 10.0)))
    kept = list(devices)
    left_out = [np.zeros(len(rows), dtype=bool) for rows in devices]
    scale = 1.0 if math.isinf(slope_spread) else slope_spread
    if robust:
        problem = Problem(devices, slope_scale=scale, grad_weight=grad_weight)
        problem.slope_weight = _slope_weight(problem, slope_spread, ASSUMED_ERROR)
        start = _solve(problem, (2.0,)).point
        left_out = outliers(devices, [start], problem.slope_weight, scale)
        kept = [rows.take(~out) if out.any() else rows for rows, out in zip(devices, left_out, strict=True)]
    problem = Problem(kept, slope_scale=scale, grad_weight=grad_weight)
    found = _solve(problem, gammas)
    for _ in range(20):  # the scatter decides how much the prior counts, and the prior moves the scatter
        before = problem.slope_weight
        problem.slope_weight = _slope_weight(problem, slope_spread, _scatter(problem, found.point))
        found = descend(problem, found.point)
        if abs(problem.slope_weight - before) <= 0.01 * before:
            break
    if problem.slope_weight > 0:
        again = _solve(problem, _GAMMA_STARTS[::2])
        found = again if again.loss < found.loss else found
    if not (found.converged and math.isfinite(found.loss)):
        raise NotProven("the throughput fit did not converge from any start; check the rows for errors of measurement")
    undetermined = problem.free[problem.index]
    seconds = time.perf_counter() - started
    results = []
    for place, (rows, params) in enumerate(zip(devices, problem.params(found.point), strict=True)):
        error = evaluate(params, rows)
        removed = left_out[place]
        result = FitResult(
            params=params,
            rmsle=error.rmsle,
            mape=error.mape,
            samples=len(rows),
            fit_seconds=seconds,
            undetermined=tuple(name for name, free in zip(NAMES, undetermined[place], strict=True) if not free),
            outliers=tuple(describe(rows, removed, predict(params, rows))) if removed.any() else (),
            left_out=removed,
        )
        results.append(result)
    return JointFit(results=tuple(results))


def _slope_weight(problem: Problem, slope_spread: float, error: float) -> float:
    """Return the weight of the prior beside the mean squared error, errors of a placement taken as one."""
    return 0.0 if math.isinf(slope_spread) else 2.0 * error**2 / max(problem.placements, 1)


def _scatter(problem: Problem, point: Array) -> float:
    """Return the standard deviation of the rows' log step times about the model."""
    freedom = problem.rows - int(problem.free.sum())
    if freedom < 1:
        return ASSUMED_ERROR
    return max(math.sqrt(problem.step_squares(point) / freedom), LEAST_ERROR)


def _solve(problem: Problem, gammas: Sequence[float]) -> Descent:
    """Return the best minimum: short descents from all starts, the best of them to the end."""
    shared = bool(problem.free[problem.gamma])
    growths = _GROWTH_STARTS if problem.free[problem.gamma - 1] or problem.free[problem.gamma - 3] else (0.02,)
    starts = [problem.start(gamma, growth) for gamma in (gammas if shared else (2.0,)) for growth in growths]
    short = sorted((descend(problem, start, steps=_SHORT) for start in starts), key=lambda item: item.loss)
    ends = [descend(problem, item.point) for item in short[:_FINALISTS]]
    done = [item for item in ends if item.converged] or ends
    return min(done, key=lambda item: item.loss)
