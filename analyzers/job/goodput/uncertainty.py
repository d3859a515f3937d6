"""How well the measured rows determine each throughput parameter. Start at :func:`parameter_intervals`.

Intervals are profile likelihoods: a value belongs to the interval of a parameter when the rows, with all other parameters
refitted, are explained not much worse than by the best fit (F test on the sum of squared log errors; Bates and Watts 1988,
section 6.1). Unlike a covariance from the Hessian it holds at bounds and far from them: a parameter that may as well be 0
or without an upper limit is seen as such. Rows alone count here, without the prior on the slopes of
:mod:`ddltool.analyzers.job.goodput.fit`. Log errors of all measured times are taken as independent, those of steps as of one
size, and those of T_grad as the fit weighs them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtri, stdtrit

from ddltool.analyzers.job.goodput.fit import ASSUMED_ERROR, GAMMA, Descent, FitProblem, descend
from ddltool.analyzers.job.goodput.observations import Observations
from ddltool.analyzers.job.goodput.throughput import NAMES, ThroughputParams
from ddltool.errors import InputError
from ddltool.goodput_model import ParameterInterval

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
    """Intervals of all seven parameters by name, and the size of the rows' log errors that they rest on."""

    level: float
    error: float
    """Standard deviation of a measured log time about the model (so, relative error)."""
    intervals: dict[str, ParameterInterval]

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Names of the parameters on which the rows set no limit."""
        return tuple(name for name, interval in self.intervals.items() if interval.reason)

    def __getitem__(self, name: str) -> ParameterInterval:
        return self.intervals[name]


def parameter_intervals(
    rows: Observations, params: ThroughputParams, *, level: float = 0.9, error: float | None = None
) -> Uncertainty:
    """Return the interval of each parameter at confidence ``level``, from the rows that ``params`` were fitted to.

    ``error``: known standard deviation of a log time; by default estimated from the rows, or, when they are no more than
    the parameters, assumed to be 5 %. A few hundred small least-squares problems. Raises InputError without rows or for a
    level that is not between 0 and 1.
    """
    if len(rows) == 0:
        raise InputError("observations", "are empty", "give at least one measured row")
    if not 0 < level < 1:
        raise InputError("level", f"is {level}", "give a confidence between 0 and 1, such as 0.9")
    problem = FitProblem(rows)
    # as in the fit, where as many T_grad were observed as steps: a T_grad counts as this much of a measured step
    problem.grad_weight *= problem.grad_count / len(rows)
    best = descend(problem, problem.start_from(params))
    for _ in range(4):  # a profile that meets a better fit than the one it starts from begins again there
        estimated_error, degrees_of_freedom = problem.time_error(best.loss)
        is_assumed = error is None and math.isinf(estimated_error)
        log_error = max(
            error or (ASSUMED_ERROR if is_assumed else estimated_error), 1e-9
        )  # rows may be without any error
        quantile = (
            ndtri((1 + level) / 2) if is_assumed or error is not None else stdtrit(degrees_of_freedom, (1 + level) / 2)
        )
        profile = _Profile(problem, best, log_error / math.sqrt(len(rows)), float(quantile))
        intervals = {name: profile.interval(index) for index, name in enumerate(NAMES)}
        if profile.best.loss >= best.loss - 1e-6 * log_error**2 / len(rows):
            break
        best = descend(problem, profile.best.point)
    return Uncertainty(level=level, error=log_error, intervals=intervals)


class _Profile:
    """Walks from the best point along one parameter, refitting the others, until the fit is too bad.

    ``size`` is the standard deviation of an error in units of the problem's residuals.
    """

    def __init__(self, problem: FitProblem, start: Descent, size: float, quantile: float) -> None:
        self.problem, self.start, self.size, self.quantile = problem, start, size, quantile
        self.best = start
        _, jacobian = problem.residuals(start.point)
        information = jacobian.T @ jacobian
        # A first guess of the step only. Rows that fit without error leave some directions flat at any scale of theirs.
        ridge = max(1e-2 * size**2, 1e-12 * float(np.trace(information)), 1e-18)
        self.spread = size * np.sqrt(np.diag(np.linalg.inv(information + ridge * np.eye(len(information)))))

    def interval(self, index: int) -> ParameterInterval:
        """Return the interval of a parameter, with no limit where the walk reaches the parameter's bound."""
        lowest, highest = (1.0, 10.0) if index == GAMMA else (0.0, math.inf)
        end_logs = (self._end(index, -1.0), self._end(index, 1.0)) if self.problem.free[index] else (None, None)
        low, high = (
            limit if end is None else math.exp(end) for end, limit in zip(end_logs, (lowest, highest), strict=True)
        )
        reason = "" if self.problem.free[index] else _UNSEEN[NAMES[index]]
        if not reason and end_logs == (None, None):
            reason = "the rows fit as well with any value"
        return ParameterInterval(low=low, high=high if math.isfinite(high) else None, reason=reason)

    def _end(self, index: int, side: float) -> float | None:
        """Return the logarithm at which the profile is ``quantile`` standard errors above the best fit; None: nowhere.

        ``index``: of the parameter; ``side``: -1 below the best fit, 1 above it.
        """
        bound = float(self.problem.high[index] if side > 0 else self.problem.low[index])
        centre, point = float(self.start.point[index]), self.start.point.copy()

        @cache  # a refit starts where the last one ended: the same value must not get another sign later
        def excess(log_value: float) -> float:
            nonlocal point
            point[index] = log_value
            refitted = descend(self.problem, point, fixed=index)
            point = refitted.point
            if refitted.loss < self.best.loss:
                self.best = refitted
            return math.sqrt(max(refitted.loss - self.start.loss, 0.0)) / self.size - self.quantile

        step = min(max(self.quantile * float(self.spread[index]), 1e-7), 2.0)
        inner = centre
        while inner != bound:
            outer = min(inner + step, bound) if side > 0 else max(inner - step, bound)
            if excess(outer) > 0:
                if excess(inner) >= 0:
                    return inner  # within rounding of the end
                tolerance = max(1e-3 * abs(outer - centre), 1e-9)
                return float(brentq(excess, inner, outer, xtol=tolerance, disp=False))
            inner, step = outer, step * 2.0
        return None
