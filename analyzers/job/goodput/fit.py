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

How well the rows determine each parameter: :func:`parameter_intervals`. Intervals are profile likelihoods: a value belongs to
the interval of a parameter when the rows, with all other parameters refitted, are explained not much worse than by the best
fit (F test on the sum of squared log errors; Bates and Watts 1988, section 6.1). Unlike a covariance from the Hessian it holds
at bounds and far from them: a parameter that may as well be 0 or without an upper limit is seen as such. Rows alone count
there, without the prior on the slopes. Log errors of all measured times are taken as independent, those of steps as of one
size, and those of T_grad as the fit weighs them.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from scipy.optimize import brentq, least_squares
from scipy.special import ndtri, stdtrit

from ddltool.analyzers.job.goodput.curve import fit_line
from ddltool.analyzers.job.goodput.observations import Observations, check
from ddltool.analyzers.job.goodput.throughput import NAMES, ThroughputParams, iteration_time_s, log_times
from ddltool.arrays import Floats, Ints
from ddltool.errors import InputError, NotProven
from ddltool.goodput_model import FitError, ParameterInterval

SLOPE_SPREAD = 0.05
"""Scale of the prior on ``beta / alpha`` of synchronisation."""
# How much an error of T_grad counts beside one of the step: as much for up to GRAD_WEIGHT_FEW configurations, then less, down
# to GRAD_WEIGHT. Many step times determine the parameters, and must not be fitted worse because T_grad is not quite a line.
GRAD_WEIGHT, GRAD_WEIGHT_FEW = 0.1, 20
# Of more configurations, batches within half a per cent count as one: the model is smooth in them.
MOST_CONFIGURATIONS = 5000
# Standard deviation of a log time: when the rows are too few to tell, and at least.
ASSUMED_ERROR, LEAST_ERROR = 0.05, 1e-7
# Indices of (intercept, slope) among the parameters: of synchronisation within a node, and across nodes.
SLOPES = ((2, 3), (4, 5))
# Index of gamma among the parameters.
GAMMA = 6
_GAMMA_STARTS = (1.3, 3.5)
# A part of the step this much shorter than the shortest step is zero: no clock sees it.
_LEAST_SHARE = 1e-7
# Largest gamma: beyond it the longer of two times hides the shorter one as good as completely.
_LARGEST_GAMMA = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FitResult:
    """Fitted parameters, their error on the rows, and what the rows could not determine."""

    params: ThroughputParams
    error: FitError
    fit_seconds: float
    undetermined: tuple[str, ...]


def predict(params: ThroughputParams, rows: Observations) -> Floats:
    """Return the predicted step time of each row in seconds, shape (n,)."""
    configuration = (rows.num_nodes, rows.num_replicas, rows.local_batch_size, rows.accumulation_steps)
    return np.asarray(iteration_time_s(params, *configuration))


def evaluate(params: ThroughputParams, rows: Observations) -> FitError:
    """Return the error of the predicted step times on measured rows: RMSLE and MAPE.

    These are the root mean squared log error and the mean absolute relative error. Raises InputError where
    :func:`~.observations.check` refuses the rows.
    """
    check(rows)
    ratio = np.maximum(predict(params, rows), 1e-300) / rows.step_time_s  # above 0, so that it has a logarithm
    rmsle = float(np.sqrt(np.mean(np.log(ratio) ** 2)))
    mape = float(np.mean(np.abs(ratio - 1.0)))
    return FitError(rmsle=rmsle, mape=mape, samples=len(rows))


def fit(
    rows: Observations,
    *,
    seed: int = 0,
    slope_spread: float = SLOPE_SPREAD,
    grad_weight: float | None = None,
) -> FitResult:
    """Return the best fit of one device type's rows over several starting points, one of which is drawn by ``seed``.

    ``slope_spread``: scale of the prior on ``beta / alpha`` of synchronisation; ``math.inf`` means no prior. ``grad_weight``:
    how much an error of T_grad counts beside one of the step; by default 1 for up to 20 configurations, falling to 0.1 for 200
    and more. Raises InputError without rows or for numbers that no measurement can give, NotProven when no start converged.
    An evaluation takes O(configurations).
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
        undetermined=tuple(name for name, is_free in zip(NAMES, problem.free, strict=True) if not is_free),
    )


def refit(rows: Observations, before: ThroughputParams | None = None) -> ThroughputParams:
    """Return a quick fit of a job's rows, in about a millisecond, for simulations that fit thousands of times.

    ``before`` is the job's previous fit, an additional starting point. Model, errors and prior are those of :func:`fit`, but
    there is one descent, which ends early (:func:`_quick_descent`), so that the result is near a local minimum only.
    """
    problem = FitProblem(rows)
    problem.set_prior(ASSUMED_ERROR)
    starts = [problem.start(2.0)] if before is None else [problem.start(2.0), problem.start_from(before)]
    point = _quick_descent(problem, min(starts, key=lambda start: float((problem.residuals(start)[0] ** 2).sum())))
    if problem.free[[beta for _, beta in SLOPES]].any():  # else there is nothing that the prior pulls at
        problem.set_prior(problem.scatter(point))
        point = _quick_descent(problem, point)
    return problem.params(point)


def _quick_descent(problem: FitProblem, point: Floats) -> Floats:
    """Return a point near the local minimum of the loss, by Levenberg-Marquardt from ``point``.

    Points (7,) are logarithms of the parameters; the loss is the sum of squared residuals. The diagonal of the normal matrix is
    multiplied by 1 + damping; damping falls tenfold after a step that does not raise the loss, and rises tenfold after one
    that does, which is undone. A step changes no parameter by more than a factor e^3, and stays within the bounds. The descent
    ends after 30 steps, when a step lowers the loss by less than a thousandth, or when no step lowers it. Unlike scipy's, it
    has no overhead of milliseconds.
    """
    free_indices = np.flatnonzero(problem.free)
    damping = 1e-3
    residuals, jacobian = problem.residuals(point)
    loss = float(residuals @ residuals)
    for _ in range(30):
        free_jacobian = jacobian[:, free_indices]
        normal_matrix = free_jacobian.T @ free_jacobian
        gradient = free_jacobian.T @ residuals
        # ``flat`` with this stride is the diagonal
        normal_matrix.flat[:: len(free_indices) + 1] *= 1.0 + damping
        normal_matrix.flat[:: len(free_indices) + 1] += 1e-14  # solvable also where a parameter changes nothing
        trial = point.copy()
        trial[free_indices] += np.clip(np.linalg.solve(normal_matrix, -gradient), -3.0, 3.0)
        trial[free_indices] = np.clip(trial[free_indices], problem.low[free_indices], problem.high[free_indices])
        trial_residuals, trial_jacobian = problem.residuals(trial)
        trial_loss = float(trial_residuals @ trial_residuals)
        if trial_loss <= loss:
            gain = loss - trial_loss
            point, residuals, jacobian, loss = trial, trial_residuals, trial_jacobian, trial_loss
            damping = max(damping * 0.1, 1e-12)
            if gain <= 1e-3 * loss + 1e-8:
                break
        else:
            damping *= 10.0
            if damping > 1e6:
                break
    return point


class FitProblem:
    """The least-squares problem of a fit, whose unknowns are the logarithms of the seven parameters.

    A configuration is (``nodes``, ``replicas``, local ``batch``, accumulation steps in ``passes``); its rows are replaced by
    their mean, with the weight of all. ``member`` (n,) holds the configuration of each row; ``shared``: those of several
    replicas; ``grad_count``: rows with T_grad. By configuration, (g,): ``log_step`` and ``log_grad`` are means
    of log times (the latter 0 where ``grads`` is 0), ``steps`` and ``grads`` how many rows they are over; ``_within`` and
    ``_within_grad`` are the sums of the rows' squared deviations from these means. By parameter, (7,), in the order of
    ``NAMES``: ``free`` tells which ones the rows say something about, ``low`` and ``high`` bound their logarithms. The prior
    adds to the loss ``prior_weight log(1 + q^2)`` with q = beta / alpha / ``slope_spread``, for each pair of :data:`SLOPES`.
    """

    def __init__(
        self, rows: Observations, *, grad_weight: float | None = None, slope_spread: float = SLOPE_SPREAD
    ) -> None:
        """Group the rows by configuration. The prior has no weight until :meth:`set_prior`.

        ``grad_weight``: how much an error of T_grad counts beside one of the step, None: by the number of configurations;
        ``slope_spread``: scale of the prior on ``beta / alpha`` of synchronisation.
        """
        self.rows = rows
        self.slope_spread = slope_spread
        self.prior_weight = 0.0
        keys = np.stack([rows.num_nodes, rows.num_replicas, rows.local_batch_size, rows.accumulation_steps])
        first_rows, self.member = _distinct(keys)
        if len(first_rows) > MOST_CONFIGURATIONS:
            # In place of the batch: a number that batches within half a per cent have in common.
            keys[2] = np.round(np.log(rows.local_batch_size) / 0.005)
            first_rows, self.member = _distinct(keys)
        self.nodes, self.replicas, self.passes = keys[0, first_rows], keys[1, first_rows], keys[3, first_rows]
        self.batch = np.bincount(self.member, rows.local_batch_size) / np.bincount(self.member)
        has_grad = np.isfinite(rows.grad_time_s)
        log_grad = np.log(np.where(has_grad, rows.grad_time_s, 1.0))
        self.log_step, self.steps, self._within = self._means(np.log(rows.step_time_s), np.ones(len(rows)))
        self.log_grad, self.grads, self._within_grad = self._means(log_grad, has_grad.astype(np.float64))
        self.grad_count = float(self.grads.sum())
        default_weight = min(max(GRAD_WEIGHT, GRAD_WEIGHT_FEW / len(first_rows)), 1.0)
        self.grad_weight = default_weight if grad_weight is None else grad_weight
        self.shared = self.replicas > 1
        over_two = self.replicas > 2
        one_node = self.shared & (self.nodes <= 1)
        many_nodes = self.shared & (self.nodes > 1)
        batch_varies = self.batch != self.batch[0]
        # For each parameter after alpha_grad, (g,): whether a configuration says something about it (all do about alpha_grad).
        informative_masks = (
            batch_varies,  # beta_grad
            one_node,  # alpha_sync_local
            one_node & over_two,  # beta_sync_local
            many_nodes,  # alpha_sync_node
            many_nodes & over_two,  # beta_sync_node
            self.shared,  # gamma
        )
        self.free = np.array([True, *(bool(mask.any()) for mask in informative_masks)])
        self.low, self.high = self._bounds()

    def _means(self, values: Floats, weights: Floats) -> tuple[Floats, Floats, float]:
        """Return (g,) weighted means and (g,) weights by configuration, and the weighted sum of squares about the means.

        ``values`` and ``weights`` (n,) are those of the rows. The mean is 0 where the weights sum to 0.
        """
        weight_sums = np.bincount(self.member, weights).astype(np.float64)
        means = np.bincount(self.member, weights * values) / np.where(weight_sums > 0, weight_sums, 1.0)
        return means, weight_sums, float(weights @ (values - means[self.member]) ** 2)

    def _bounds(self) -> tuple[Floats, Floats]:
        """Return the least and the largest logarithm of each parameter, both (7,).

        Times lie between 1e-7 of the shortest measured one, which no clock resolves, and ten times the longest step. A slope is
        bounded below by what it adds at the largest batch or number of replicas. gamma lies between 1 and 10.
        """
        log_times_seen = np.append(self.log_step, self.log_grad[self.grads > 0])
        low = np.full(7, log_times_seen.min() + np.log(_LEAST_SHARE))
        high = np.full(7, self.log_step.max() + np.log(10.0))
        low[1] -= np.log(self.batch.max())
        low[[3, 5]] -= np.log(max(self.replicas.max() - 2.0, 1.0))
        low[GAMMA], high[GAMMA] = 0.0, np.log(_LARGEST_GAMMA)
        return low, high

    def set_prior(self, error: float | None) -> None:
        """Set the prior's weight against rows whose log times have standard deviation ``error`` (None: 5 % is assumed).

        Rows of one placement (nodes and replicas, more than one) have errors in common, so they count as one.
        """
        placements = np.unique(np.stack([self.nodes, self.replicas])[:, self.shared], axis=1).shape[1]
        variance = max(error or ASSUMED_ERROR, LEAST_ERROR) ** 2
        self.prior_weight = 2.0 * variance / max(placements, 1)

    def start(self, gamma: float) -> Floats:
        """Return a starting point (7,), the logarithms of the parameters, from the rows and the given gamma.

        T_grad is a line through the times of a pass. Synchronisation is the median of what steps take beyond their passes, 1 s
        where no row shows it, and its slope a tenth of that. As 0 has no logarithm, times are at least a hundredth of a pass.
        """
        step_s = np.exp(self.log_step)
        # ``self.passes`` is without the pass that synchronises; where T_grad was not measured, synchronisation counts as none
        grad_s = np.where(self.grads > 0, np.exp(self.log_grad), step_s / (self.passes + 1.0))
        intercept_s, slope_s = fit_line(self.batch, grad_s)
        floor_s = 0.01 * float(np.median(grad_s))
        parameters = [max(intercept_s, floor_s), max(slope_s, floor_s / float(self.batch.max()))]
        sync_s = np.maximum(step_s - (self.passes + 1.0) * grad_s, floor_s)
        for is_across in (False, True):
            placement_sync_s = sync_s[self.shared & ((self.nodes > 1) == is_across)]
            typical_s = float(np.median(placement_sync_s)) if placement_sync_s.size else 1.0
            parameters += [typical_s, 0.1 * typical_s]
        return self.point([*parameters, gamma])

    def start_from(self, params: ThroughputParams) -> Floats:
        """Return the point (7,) of given parameters.

        A parameter of 0 becomes a thousandth of its value at :meth:`start`, because 0 has no logarithm and the loss is flat
        near the lower bound, so that a descent would not leave it.
        """
        parameters = np.array([getattr(params, name) for name in NAMES])
        return self.point(np.where(parameters > 0, parameters, np.exp(self.start(2.0)) * 1e-3))

    def point(self, values: Floats | list[float]) -> Floats:
        """Return the logarithms of seven parameters, moved within the bounds; 0 where a parameter is not free."""
        return np.where(self.free, np.clip(np.log(values), self.low, self.high), 0.0)

    def values(self, point: Floats) -> Floats:
        """Return the (7,) parameters at a point; those that are not free have their priors: 0, and 1 for gamma."""
        values: Floats = np.where(self.free, np.exp(point), 0.0)
        values[GAMMA] = max(values[GAMMA], 1.0)
        return values

    def params(self, point: Floats) -> ThroughputParams:
        """Return the parameters at a point (7,) as a model; a time within 1 % of its lower bound becomes 0."""
        values = self.values(point)
        values[:GAMMA][point[:GAMMA] <= self.low[:GAMMA] + 0.01] = 0.0
        values[GAMMA] = min(values[GAMMA], _LARGEST_GAMMA)
        return ThroughputParams(**dict(zip(NAMES, values.tolist(), strict=True)))

    def residuals(self, point: Floats) -> tuple[Floats, Floats]:
        """Return the residuals (r,) at a point (7,), whose squares sum to the loss, and their Jacobian (r, 7).

        The Jacobian is with respect to the logarithms of the parameters. Residuals are, in order: the weighted log errors of
        the g step times and of the g times T_grad, and one for the prior on each slope that is free.
        """
        values = self.values(point)
        log_grad, log_step, grad_slopes, step_slopes = log_times(
            values, self.nodes, self.replicas, self.batch, self.passes
        )
        step_weights = np.sqrt(self.steps / len(self.rows))
        grad_weights = np.sqrt(self.grad_weight * self.grads / max(self.grad_count, 1.0))
        residuals = [step_weights * (log_step - self.log_step), grad_weights * (log_grad - self.log_grad)]
        jacobians = [step_weights[:, None] * step_slopes, grad_weights[:, None] * grad_slopes]
        for alpha, beta in SLOPES:
            if self.free[beta] and self.prior_weight > 0:
                ratio_squared = (values[beta] / values[alpha] / self.slope_spread) ** 2
                prior_residual = math.sqrt(self.prior_weight * math.log1p(ratio_squared))
                prior_jacobian = np.zeros((1, 7))
                half_slope = self.prior_weight * ratio_squared / (1.0 + ratio_squared)  # of the squared residual
                prior_jacobian[0, beta] = half_slope / prior_residual if prior_residual > 0 else 0.0
                prior_jacobian[0, alpha] = -prior_jacobian[0, beta]
                residuals.append(np.array([prior_residual]))
                jacobians.append(prior_jacobian)
        return np.concatenate(residuals), np.concatenate(jacobians)

    def scatter(self, point: Floats) -> float | None:
        """Return the standard deviation of the rows' log step times about the model at a point (7,).

        None where there are no more rows than free parameters.
        """
        log_step = log_times(self.values(point), self.nodes, self.replicas, self.batch, self.passes)[1]
        errors = log_step[self.member] - np.log(self.rows.step_time_s)
        degrees_of_freedom = len(self.rows) - int(self.free.sum())
        return math.sqrt(float(errors @ errors) / degrees_of_freedom) if degrees_of_freedom >= 1 else None

    def time_error(self, loss: float) -> tuple[float, float]:
        """Return the standard deviation of all measured log times about a model with this ``loss``, and its degrees of freedom.

        Each T_grad counts as the fraction of a measurement that the problem weighs it by. The standard deviation is infinite
        with less than one degree of freedom.
        """
        row_count = len(self.rows)
        grad_row_weight = self.grad_weight * row_count / max(self.grad_count, 1.0)
        freedom = row_count + grad_row_weight * self.grad_count - float(self.free.sum())
        squared_errors = loss * row_count + self._within + grad_row_weight * self._within_grad
        return math.sqrt(squared_errors / freedom) if freedom >= 1 else math.inf, freedom


def _distinct(keys: Floats) -> tuple[Ints, Ints]:
    """Find the g distinct columns of ``keys`` (k, n).

    Returns (g,) the index of one column of each kind, and (n,) for each column which of these it equals, as an index from 0
    to g - 1.
    """
    order = np.lexsort(keys)
    is_new = np.concatenate([[True], (np.diff(keys[:, order]) != 0).any(axis=0)])
    member = np.empty(keys.shape[1], dtype=np.int64)
    member[order] = np.cumsum(is_new) - 1
    return order[is_new], member


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Descent:
    """Where a descent ended: the point (7,), its loss, and whether the descent converged to a local minimum."""

    point: Floats
    loss: float
    converged: bool


def descend(problem: FitProblem, start: Floats, *, fixed: int | None = None) -> Descent:
    """Return the local minimum of the loss, within the bounds, that scipy's least squares finds from ``start`` (7,).

    ``fixed``: index of a parameter that keeps its value besides those that are not free; None: no other.
    """
    is_moving = problem.free.copy()
    if fixed is not None:
        is_moving[fixed] = False
    moving_indices = np.flatnonzero(is_moving)
    point = start.copy()
    if not moving_indices.size:
        residuals, _ = problem.residuals(point)
        return Descent(point=point, loss=float(residuals @ residuals), converged=True)

    @lru_cache(maxsize=2)  # scipy takes the Jacobian where it took the residuals
    def evaluate_at(values: bytes) -> tuple[Floats, Floats]:
        """Return residuals and Jacobian at ``values`` of the moving parameters: bytes, because the cache hashes them."""
        point[moving_indices] = np.frombuffer(values)
        residuals, jacobian = problem.residuals(point)
        return residuals, jacobian[:, moving_indices]

    def residuals_at(values: Floats) -> Floats:
        """Return the residuals in the form that scipy asks for."""
        return evaluate_at(values.tobytes())[0]

    def jacobian_at(values: Floats) -> Floats:
        """Return the Jacobian in the form that scipy asks for."""
        return evaluate_at(values.tobytes())[1]

    solution = least_squares(
        residuals_at,
        start[moving_indices],
        jac=jacobian_at,
        bounds=(problem.low[moving_indices], problem.high[moving_indices]),
        method="trf",
        ftol=1e-12,
        xtol=1e-10,
        gtol=1e-15,
        max_nfev=500,
    )
    point[moving_indices] = solution.x
    # A residual of 1e-5 (half its square is 5e-11) is a perfect fit, even if scipy went on along some flat direction.
    has_converged = solution.status > 0 or solution.cost < 5e-11
    return Descent(
        point=point, loss=2.0 * float(solution.cost), converged=has_converged
    )  # scipy's cost is half the sum


def _best_descent(problem: FitProblem, gammas: tuple[float, ...]) -> Descent:
    """Return the lowest minimum over one descent per starting gamma; those that did not converge count only if none did."""
    starting_gammas = gammas if problem.free[GAMMA] else (2.0,)
    descents = [descend(problem, problem.start(gamma)) for gamma in starting_gammas]
    return min([descent for descent in descents if descent.converged] or descents, key=lambda descent: descent.loss)


def _with_prior(problem: FitProblem, best: Descent) -> Descent:
    """Return the lowest minimum with the prior on the slopes, starting from ``best``, the one without it.

    The prior's weight depends on the scatter of the rows about the fit, and the fit on the weight, so both are found in turn,
    until the weight changes by at most 1 %. Then the other starting points are tried with that weight, because the prior may
    have made another minimum the lowest one. ``problem`` keeps the weight.
    """
    for _ in range(20):
        weight_before = problem.prior_weight
        problem.set_prior(problem.scatter(best.point))
        best = descend(problem, best.point)
        if abs(problem.prior_weight - weight_before) <= 0.01 * weight_before:
            break
    return min(best, _best_descent(problem, _GAMMA_STARTS), key=lambda descent: descent.loss)


# Why the rows say nothing about a parameter that is not free.
_UNSEEN = {
    "beta_grad_s": "all rows have one local batch size",
    "alpha_sync_local_s": "no row has two or more replicas on one node",
    "beta_sync_local_s": "no row has three or more replicas on one node",
    "alpha_sync_node_s": "no row has two or more nodes",
    "beta_sync_node_s": "no row has three or more replicas on two or more nodes",
    "gamma": "no row has two or more replicas",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Uncertainty:
    """Confidence intervals of all seven parameters by name, and the error of the rows that they were computed from."""

    level: float
    error: float
    """Standard deviation of a measured log time about the model, which is its relative error."""
    intervals: dict[str, ParameterInterval]

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Names of the parameters on which the rows set no limit."""
        return tuple(name for name, interval in self.intervals.items() if interval.reason)

    def __getitem__(self, name: str) -> ParameterInterval:
        """Return the interval of the parameter called ``name``."""
        return self.intervals[name]


def parameter_intervals(
    rows: Observations, params: ThroughputParams, *, level: float = 0.9, error: float | None = None
) -> Uncertainty:
    """Return the interval of each parameter at confidence ``level``, from the rows that ``params`` were fitted to.

    ``error``: standard deviation of a log time, if known; None: estimated from the rows, or assumed to be 5 % where these are
    no more than the parameters. It solves a few hundred small least-squares problems. Raises InputError without rows or for a
    level that is not between 0 and 1.
    """
    if len(rows) == 0:
        raise InputError("observations", "are empty", "give at least one measured row")
    if not 0 < level < 1:
        raise InputError("level", f"is {level}", "give a confidence between 0 and 1, such as 0.9")
    problem = FitProblem(rows)
    # The fit weighs the mean error of all T_grad against that of all steps; here each T_grad has that weight beside one step.
    problem.grad_weight *= problem.grad_count / len(rows)
    best = descend(problem, problem.start_from(params))
    for _ in range(4):  # a profile that meets a better fit than the one it starts from begins again there
        estimated_error, degrees_of_freedom = problem.time_error(best.loss)
        is_assumed = error is None and math.isinf(estimated_error)
        log_error = error or (ASSUMED_ERROR if is_assumed else estimated_error)
        # rows without any error would make intervals of width 0, which no search can find
        log_error = max(log_error, 1e-9)
        # The normal distribution for a known error, Student's for an estimated one.
        is_known = is_assumed or error is not None
        quantile = ndtri((1 + level) / 2) if is_known else stdtrit(degrees_of_freedom, (1 + level) / 2)
        profile = _Profile(problem, best, log_error / math.sqrt(len(rows)), float(quantile))
        intervals = {name: profile.interval(index) for index, name in enumerate(NAMES)}
        if profile.best.loss >= best.loss - 1e-6 * log_error**2 / len(rows):
            break
        best = descend(problem, profile.best.point)
    return Uncertainty(level=level, error=log_error, intervals=intervals)


class _Profile:
    """Finds a parameter's interval: walks along it from the best fit, refitting the others, until the fit is too bad.

    ``size`` is the standard deviation of an error in the unit of the problem's residuals; ``best`` is the best fit that any
    walk met, which may be better than ``start``; ``spread`` (7,) are approximate standard errors of the parameters.
    """

    def __init__(self, problem: FitProblem, start: Descent, size: float, quantile: float) -> None:
        """Begin at the best fit ``start``; an interval ends ``quantile`` standard errors from it."""
        self.problem, self.start, self.size, self.quantile = problem, start, size, quantile
        self.best = start
        _, jacobian = problem.residuals(start.point)
        information = jacobian.T @ jacobian
        # It only sets the first step of a walk. The ridge makes the matrix invertible where the rows leave a direction flat.
        ridge = max(1e-2 * size**2, 1e-12 * float(np.trace(information)), 1e-18)
        self.spread = size * np.sqrt(np.diag(np.linalg.inv(information + ridge * np.eye(len(information)))))

    def interval(self, index: int) -> ParameterInterval:
        """Return the interval of the parameter at ``index``; where a walk reaches the parameter's bound, that is the end.

        The end is the least or largest value that the parameter can have (``high`` is None for no such value). ``reason`` says
        why the rows limit the parameter on neither side; it is "" where they do.
        """
        lowest, highest = (1.0, _LARGEST_GAMMA) if index == GAMMA else (0.0, math.inf)
        low_log: float | None = None
        high_log: float | None = None
        reason = ""
        if not self.problem.free[index]:
            reason = _UNSEEN[NAMES[index]]
        else:
            low_log = self._end(index, is_upper=False)
            high_log = self._end(index, is_upper=True)
            if low_log is None and high_log is None:
                reason = "the rows fit as well with any value"
        low = lowest if low_log is None else math.exp(low_log)
        high = highest if high_log is None else math.exp(high_log)
        return ParameterInterval(low=low, high=high if math.isfinite(high) else None, reason=reason)

    def _end(self, index: int, *, is_upper: bool) -> float | None:
        """Return the logarithm of the parameter at ``index`` where its interval ends; None where it reaches the bound.

        ``is_upper``: whether the end above the best fit is sought, not the one below. The interval ends where the fit, with
        all other parameters refitted, is ``quantile`` standard errors worse than the best one. Steps away from the best fit
        double until one is beyond the end; between the last two a root is sought.
        """
        bound = float(self.problem.high[index] if is_upper else self.problem.low[index])
        centre = float(self.start.point[index])
        point = self.start.point.copy()

        @cache  # a refit starts where the last one ended, so a second one might give the same value another sign
        def excess(log_value: float) -> float:
            """Return by how many standard errors ``log_value`` is beyond the interval's end; negative inside."""
            nonlocal point
            point[index] = log_value
            refitted = descend(self.problem, point, fixed=index)
            point = refitted.point
            if refitted.loss < self.best.loss:
                self.best = refitted
            return math.sqrt(max(refitted.loss - self.start.loss, 0.0)) / self.size - self.quantile

        # not so small that it changes nothing, and at most a factor e^2
        step = min(max(self.quantile * float(self.spread[index]), 1e-7), 2.0)
        inner = centre
        while inner != bound:
            outer = min(inner + step, bound) if is_upper else max(inner - step, bound)
            if excess(outer) > 0:
                if excess(inner) >= 0:
                    return inner  # within rounding of the end
                tolerance = max(1e-3 * abs(outer - centre), 1e-9)
                return float(brentq(excess, inner, outer, xtol=tolerance, disp=False))
            inner = outer
            step *= 2.0
        return None
