"""The fit of the throughput model: seven parameters from measured step times (Pollux, section 4.1). Start at :func:`fit`.

Minimised is the mean squared log error of the full step and, with a weight of its own, of one pass (T_grad) where observed,
over the logarithms of the parameters: scipy's bounded least squares from several starts. A parameter of which no row can
speak keeps its prior, zero for synchronisation never seen ("prior-driven exploration").

Synchronisation slows down less than linearly as replicas are added, so a slope learnt on few replicas predicts too long
steps for many. A prior answers that: ``beta / alpha`` is Cauchy about 0 with scale :data:`SLOPE_SPREAD`. What stands
against it is the rows' scatter about the model, counted once for each placement (rows of one placement err together), so
rows without noise overrule it. Its scale, and the weight of T_grad, are about those that best predicted rows of more than 8
replicas from those of up to 8, and of 4 nodes from those of up to 3, over the six applications of Pollux's measurements
(``benchmarks/bench_fit.py --prior``).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.optimize import least_squares

from ddltool.analyzers.job.goodput.curve import line
from ddltool.analyzers.job.goodput.observations import Observations, check
from ddltool.analyzers.job.goodput.throughput import NAMES, ThroughputParams, iteration_time_s, log_times
from ddltool.arrays import Floats, Ints
from ddltool.errors import InputError, NotProven
from ddltool.goodput_model import FitError

SLOPE_SPREAD = 0.05
# How much an error of T_grad counts beside one of the step, by the number of configurations: all measured times alike when
# they are few. When they are many the step speaks for itself and must not pay for how T_grad bends (chosen with the prior).
GRAD_WEIGHT, GRAD_WEIGHT_FEW = 0.1, 20
# Beyond this, batches are told apart only to half a per cent: the model is smooth in them.
MOST_CONFIGURATIONS = 5000
# Standard deviation of a log time: when the rows are too few to tell, and at least.
ASSUMED_ERROR, LEAST_ERROR = 0.05, 1e-7
# Where the parameters that are pairs of intercept and slope stand: synchronisation within a node, and across nodes.
SLOPES = ((2, 3), (4, 5))
GAMMA = 6
_GAMMA_STARTS = (1.3, 3.5)
# A part of the step this much shorter than the shortest step is zero: no clock sees it.
_LEAST_SHARE = 1e-7


@dataclass(frozen=True, kw_only=True, slots=True)
class FitResult:
    """Fitted parameters, their error on the rows, and what the rows could not determine."""

    params: ThroughputParams
    error: FitError
    fit_seconds: float
    undetermined: tuple[str, ...]


def predict(params: ThroughputParams, rows: Observations) -> Floats:
    """Return the predicted step time of each row in seconds, shape (n,)."""
    at = (rows.num_nodes, rows.num_replicas, rows.local_batch_size, rows.accumulation_steps)
    return np.asarray(iteration_time_s(params, *at))


def evaluate(params: ThroughputParams, rows: Observations) -> FitError:
    """Return RMSLE and MAPE of the full step time on the rows. Raises InputError for rows that cannot be."""
    check(rows)
    ratio = np.maximum(predict(params, rows), 1e-300) / rows.step_time_s
    rmsle, mape = float(np.sqrt(np.mean(np.log(ratio) ** 2))), float(np.mean(np.abs(ratio - 1.0)))
    return FitError(rmsle=rmsle, mape=mape, samples=len(rows))


def fit(
    rows: Observations,
    *,
    seed: int = 0,
    slope_spread: float = SLOPE_SPREAD,
    grad_weight: float | None = None,
) -> FitResult:
    """Return the best fit of one device type's rows over several starts, one of them drawn by ``seed``.

    ``slope_spread``: scale of ``beta / alpha`` of synchronisation before any row is seen; ``math.inf`` fits the rows
    alone. ``grad_weight``: how much an error of T_grad counts beside one of the step; by default 1 for up to 20
    configurations, falling to 0.1 for 200 and more. Raises InputError without rows or for numbers that no measurement can
    give, NotProven when no start converged. O(configurations) per evaluation.
    """
    started = time.perf_counter()
    if not slope_spread > 0:
        raise InputError("slope_spread", f"is {slope_spread}", "give a number above 0; inf fits the rows alone")
    check(rows)
    gammas = (*_GAMMA_STARTS, float(np.random.default_rng(seed).uniform(1.0, 10.0)))
    problem = FitProblem(rows, grad_weight=grad_weight, slope_spread=slope_spread)
    best = _best_descent(problem, gammas)
    if math.isfinite(slope_spread):
        best = _with_prior(problem, best)
    if not (best.converged and math.isfinite(best.loss)):
        raise NotProven("the throughput fit did not converge from any start; check the rows for errors of measurement")
    params = problem.params(best.point)
    return FitResult(
        params=params,
        error=evaluate(params, rows),
        fit_seconds=time.perf_counter() - started,
        undetermined=tuple(name for name, known in zip(NAMES, problem.free, strict=True) if not known),
    )


def refit(rows: Observations, before: ThroughputParams | None = None) -> ThroughputParams:
    """Return the fit of few rows that grow one by one, from where the last one ended: about a millisecond.

    For a job that learns while it runs, thousands of times in one simulation: parameters, errors and prior are those of
    :func:`fit`; the descent is a plain Levenberg-Marquardt.
    """
    problem = FitProblem(rows)
    problem.set_prior(ASSUMED_ERROR)
    starts = [problem.start(2.0), *([problem.start_from(before)] if before is not None else [])]
    point = _quick_descent(problem, min(starts, key=lambda start: float((problem.residuals(start)[0] ** 2).sum())))
    if problem.free[[beta for _, beta in SLOPES]].any():  # else there is nothing that the prior pulls at
        problem.set_prior(problem.scatter(point))
        point = _quick_descent(problem, point)
    return problem.params(point)


def _quick_descent(problem: FitProblem, point: Floats) -> Floats:
    """Return a point near the local minimum: Levenberg-Marquardt, clipped to the bounds."""
    places, damping = np.flatnonzero(problem.free), 1e-3
    errors, slopes = problem.residuals(point)
    loss = float(errors @ errors)
    for _ in range(30):
        free = slopes[:, places]
        normal, slope = free.T @ free, free.T @ errors
        normal.flat[:: len(places) + 1] *= 1.0 + damping
        normal.flat[:: len(places) + 1] += 1e-14
        tried = point.copy()
        tried[places] += np.clip(np.linalg.solve(normal, -slope), -3.0, 3.0)
        tried[places] = np.clip(tried[places], problem.low[places], problem.high[places])
        tried_errors, tried_slopes = problem.residuals(tried)
        tried_loss = float(tried_errors @ tried_errors)
        if tried_loss <= loss:
            gained = loss - tried_loss
            point, errors, slopes, loss = tried, tried_errors, tried_slopes, tried_loss
            damping = max(damping * 0.1, 1e-12)
            if gained <= 1e-3 * loss + 1e-8:
                break
        else:
            damping *= 10.0
            if damping > 1e6:
                break
    return point


class FitProblem:
    """Least squares by the logarithms of the seven parameters; the rows of one configuration count as one.

    ``log_step`` and ``log_grad`` (g,) are means over the rows of a configuration (the latter 0 where ``grads`` is 0),
    ``steps`` and ``grads`` how many rows they are of, ``member`` (n,) the configuration of each row. ``free`` (7,) tells
    which parameters the rows speak about, ``low`` and ``high`` (7,) bound the logarithms. The prior adds to the loss
    ``prior_weight log(1 + q^2)`` with q = beta / alpha over ``slope_spread``, for each of :data:`SLOPES`.
    """

    def __init__(
        self, rows: Observations, *, grad_weight: float | None = None, slope_spread: float = SLOPE_SPREAD
    ) -> None:
        self.rows, self.slope_spread, self.prior_weight = rows, slope_spread, 0.0
        keys = np.stack([rows.num_nodes, rows.num_replicas, rows.local_batch_size, rows.accumulation_steps])
        first, self.member = _distinct(keys)
        if len(first) > MOST_CONFIGURATIONS:
            keys[2] = np.round(np.log(rows.local_batch_size) / 0.005)
            first, self.member = _distinct(keys)
        self.nodes, self.replicas, self.passes = keys[0, first], keys[1, first], keys[3, first]
        self.batch = np.bincount(self.member, rows.local_batch_size) / np.bincount(self.member)
        seen = np.isfinite(rows.grad_time_s)
        log_grad = np.log(np.where(seen, rows.grad_time_s, 1.0))
        self.log_step, self.steps, self._within = self._means(np.log(rows.step_time_s), np.ones(len(rows)))
        self.log_grad, self.grads, self._within_grad = self._means(log_grad, seen.astype(np.float64))
        self.grad_count = float(self.grads.sum())
        usual = min(max(GRAD_WEIGHT, GRAD_WEIGHT_FEW / len(first)), 1.0)
        self.grad_weight = usual if grad_weight is None else grad_weight
        self.shared, more = self.replicas > 1, self.replicas > 2
        local, across = self.shared & (self.nodes <= 1), self.shared & (self.nodes > 1)
        several = self.batch != self.batch[0]
        spoken = (several, local, local & more, across, across & more, self.shared)
        self.free = np.array([True, *(bool(which.any()) for which in spoken)])
        self.low, self.high = self._bounds()

    def _means(self, values: Floats, weights: Floats) -> tuple[Floats, Floats, float]:
        """Return weighted means and sums of weights by configuration, and the weighted squares about the means."""
        total = np.bincount(self.member, weights).astype(np.float64)
        mean = np.bincount(self.member, weights * values) / np.where(total > 0, total, 1.0)
        return mean, total, float(weights @ (values - mean[self.member]) ** 2)

    def _bounds(self) -> tuple[Floats, Floats]:
        times = np.append(self.log_step, self.log_grad[self.grads > 0])
        low, high = np.full(7, times.min() + np.log(_LEAST_SHARE)), np.full(7, self.log_step.max() + np.log(10.0))
        low[1] -= np.log(self.batch.max())
        low[[3, 5]] -= np.log(max(self.replicas.max() - 2.0, 1.0))
        low[GAMMA], high[GAMMA] = 0.0, np.log(10.0)
        return low, high

    def set_prior(self, error: float | None) -> None:
        """Weigh the prior against rows whose log times have this standard deviation (None: unknown).

        The rows of one placement (nodes and replicas, of more than one replica) err together: they count as one.
        """
        placements = np.unique(np.stack([self.nodes, self.replicas])[:, self.shared], axis=1).shape[1]
        self.prior_weight = 2.0 * max(error or ASSUMED_ERROR, LEAST_ERROR) ** 2 / max(placements, 1)

    def start(self, gamma: float) -> Floats:
        """Return a start from the data: a line through T_grad, synchronisation from what the step takes longer."""
        step = np.exp(self.log_step)
        grad = np.where(self.grads > 0, np.exp(self.log_grad), step / (self.passes + 1.0))
        intercept, slope = line(self.batch, grad)
        floor = 0.01 * float(np.median(grad))
        values = [max(intercept, floor), max(slope, floor / float(self.batch.max()))]
        wait = np.maximum(step - (self.passes + 1.0) * grad, floor)
        for across in (False, True):
            waits = wait[self.shared & ((self.nodes > 1) == across)]
            typical = float(np.median(waits)) if waits.size else 1.0
            values += [typical, 0.1 * typical]
        return self.point([*values, gamma])

    def start_from(self, params: ThroughputParams) -> Floats:
        """Return the point of given parameters. A zero has no logarithm and near it nothing moves: a small value instead."""
        known = np.array([getattr(params, name) for name in NAMES])
        return self.point(np.where(known > 0, known, np.exp(self.start(2.0)) * 1e-3))

    def point(self, values: Floats | list[float]) -> Floats:
        """Return the logarithms of seven values within the bounds, 0 where a parameter is not free."""
        return np.where(self.free, np.clip(np.log(values), self.low, self.high), 0.0)

    def values(self, point: Floats) -> Floats:
        """Return the parameters at a point; those that are not free have their priors: 0, and 1 for gamma."""
        values: Floats = np.where(self.free, np.exp(point), 0.0)
        values[GAMMA] = max(values[GAMMA], 1.0)
        return values

    def params(self, point: Floats) -> ThroughputParams:
        """Return the parameters at a point; a time at the lower bound is zero."""
        values = self.values(point)
        values[:GAMMA][point[:GAMMA] <= self.low[:GAMMA] + 0.01] = 0.0
        values[GAMMA] = min(values[GAMMA], 10.0)
        return ThroughputParams(**dict(zip(NAMES, values.tolist(), strict=True)))

    def residuals(self, point: Floats) -> tuple[Floats, Floats]:
        """Return residuals (r,), whose squares sum to the loss, and their Jacobian (r, 7) by the logarithms."""
        values = self.values(point)
        log_grad, log_step, by_grad, by_step = log_times(values, self.nodes, self.replicas, self.batch, self.passes)
        of_step = np.sqrt(self.steps / len(self.rows))
        of_grad = np.sqrt(self.grad_weight * self.grads / max(self.grad_count, 1.0))
        errors = [of_step * (log_step - self.log_step), of_grad * (log_grad - self.log_grad)]
        slopes = [of_step[:, None] * by_step, of_grad[:, None] * by_grad]
        for alpha, beta in SLOPES:
            if self.free[beta] and self.prior_weight > 0:
                square = (values[beta] / values[alpha] / self.slope_spread) ** 2
                root = math.sqrt(self.prior_weight * math.log1p(square))
                slope = np.zeros((1, 7))
                slope[0, beta] = self.prior_weight * square / (1.0 + square) / root if root > 0 else 0.0
                slope[0, alpha] = -slope[0, beta]
                errors.append(np.array([root]))
                slopes.append(slope)
        return np.concatenate(errors), np.concatenate(slopes)

    def scatter(self, point: Floats) -> float | None:
        """Return the standard deviation of the rows' log step times about the model; None when they are too few to tell."""
        log_step = log_times(self.values(point), self.nodes, self.replicas, self.batch, self.passes)[1]
        errors = log_step[self.member] - np.log(self.rows.step_time_s)
        freedom = len(self.rows) - int(self.free.sum())
        return math.sqrt(float(errors @ errors) / freedom) if freedom >= 1 else None

    def time_error(self, loss: float) -> tuple[float, float]:
        """Return the standard deviation of all measured log times at a loss, and the degrees of freedom that it has.

        A T_grad counts as much as the problem weighs it. The error is infinite without a degree of freedom.
        """
        count = len(self.rows)
        share = self.grad_weight * count / max(self.grad_count, 1.0)
        freedom = count + share * self.grad_count - float(self.free.sum())
        squares = loss * count + self._within + share * self._within_grad
        return math.sqrt(squares / freedom) if freedom >= 1 else math.inf, freedom


def _distinct(keys: Floats) -> tuple[Ints, Ints]:
    """Return the place of the first of each distinct column of keys (k, n), and (n,) which distinct one each column is."""
    order = np.lexsort(keys)
    fresh = np.concatenate([[True], (np.diff(keys[:, order]) != 0).any(axis=0)])
    member = np.empty(keys.shape[1], dtype=np.int64)
    member[order] = np.cumsum(fresh) - 1
    return order[fresh], member


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Descent:
    """Where a descent ended: the point, its loss, and whether no direction within the bounds leads further down."""

    point: Floats
    loss: float
    converged: bool


def descend(problem: FitProblem, start: Floats, *, fixed: int | None = None) -> Descent:
    """Return the local minimum near ``start``, one parameter held when ``fixed`` is given."""
    moving = problem.free.copy()
    if fixed is not None:
        moving[fixed] = False
    places, point = np.flatnonzero(moving), start.copy()
    if not places.size:
        errors, _ = problem.residuals(point)
        return Descent(point=point, loss=float(errors @ errors), converged=True)

    @lru_cache(maxsize=2)  # the gradient is asked for where the errors were
    def at(values: bytes) -> tuple[Floats, Floats]:
        point[places] = np.frombuffer(values)
        errors, slopes = problem.residuals(point)
        return errors, slopes[:, places]

    def errors_at(values: Floats) -> Floats:
        return at(values.tobytes())[0]

    def slopes_at(values: Floats) -> Floats:
        return at(values.tobytes())[1]

    solution = least_squares(
        errors_at,
        start[places],
        jac=slopes_at,
        bounds=(problem.low[places], problem.high[places]),
        method="trf",
        ftol=1e-12,
        xtol=1e-10,
        gtol=1e-15,
        max_nfev=500,
    )
    point[places] = solution.x
    # rows explained to a 1e-5th are explained, though some direction may be nearly flat
    return Descent(point=point, loss=2.0 * float(solution.cost), converged=solution.status > 0 or solution.cost < 5e-11)


def _best_descent(problem: FitProblem, gammas: tuple[float, ...]) -> Descent:
    """Return the best minimum over starts with these gammas."""
    ends = [descend(problem, problem.start(gamma)) for gamma in (gammas if problem.free[GAMMA] else (2.0,))]
    return min([end for end in ends if end.converged] or ends, key=lambda end: end.loss)


def _with_prior(problem: FitProblem, best: Descent) -> Descent:
    """Return the minimum with the prior on the slopes; ``best`` is the one without it."""
    for _ in range(20):  # the scatter decides how much the prior counts, and the prior moves the scatter
        before = problem.prior_weight
        problem.set_prior(problem.scatter(best.point))
        best = descend(problem, best.point)
        if abs(problem.prior_weight - before) <= 0.01 * before:
            break
    return min(best, _best_descent(problem, _GAMMA_STARTS), key=lambda end: end.loss)
