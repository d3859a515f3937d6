"""How well the measured rows determine each throughput parameter.

Start at :func:`parameter_intervals`; what to measure next is in :mod:`ddltool.analyzers.goodput.next_measurement`.

Profile likelihood: a value belongs to the interval of a parameter when the rows, with all other parameters refitted, are
explained not much worse than by the best fit (F test on the sum of squared log errors; Bates and Watts 1988, section 6.1).
Unlike a covariance from the Hessian it holds at bounds and far from them: a parameter that may as well be 0 or without an
upper limit is seen as such. Rows alone count here: the prior on the slopes that :func:`ddltool.analyzers.goodput.fit.fit`
uses is left out. Log errors of all measured times are taken as independent and of one size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

from ddltool.analyzers.goodput.fit import NAMES, _Problem
from ddltool.analyzers.goodput.observations import Observations
from ddltool.analyzers.goodput.sensitivity import log_times
from ddltool.analyzers.goodput.throughput import ThroughputParams
from ddltool.errors import InputError

Array = NDArray[np.float64]
# Relative error of a measured time when the rows are too few to tell.
ASSUMED_ERROR = 0.05
_UNSEEN = {
    "beta_grad_s": "all rows have one local batch size",
    "alpha_sync_local_s": "no row has two or more replicas on one node",
    "beta_sync_local_s": "no row has three or more replicas on one node",
    "alpha_sync_node_s": "no row has two or more nodes",
    "beta_sync_node_s": "no row has three or more replicas on two or more nodes",
    "gamma": "no row has two or more replicas",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """What the rows say about one parameter."""

    name: str
    value: float
    """Best value by the rows alone."""
    low: float
    high: float
    """0 and infinity (1 and 10 for gamma) where the rows set no limit."""
    reason: str
    """Why the rows say nothing; empty when they do."""

    @property
    def determined(self) -> bool:
        """Whether the rows set a limit on at least one side."""
        least, most = (1.0, 10.0) if self.name == "gamma" else (0.0, math.inf)
        return self.low > least or self.high < most


@dataclass(frozen=True, kw_only=True, slots=True)
class Uncertainty:
    """Intervals of all seven parameters, and the size of the rows' log errors that they rest on."""

    level: float
    error: float
    """Standard deviation of a measured log time about the model (so, relative error)."""
    error_is_assumed: bool
    intervals: tuple[Interval, ...]

    @property
    def undetermined(self) -> tuple[str, ...]:
        """Names of the parameters on which the rows set no limit."""
        return tuple(interval.name for interval in self.intervals if not interval.determined)

    def __getitem__(self, name: str) -> Interval:
        return next(interval for interval in self.intervals if interval.name == name)


def parameter_intervals(
    observations: Observations, params: ThroughputParams, *, level: float = 0.9, error: float | None = None
) -> Uncertainty:
    """Return the interval of each parameter at confidence ``level``, from the rows that ``params`` were fitted to.

    ``error``: known standard deviation of a log time; by default estimated from the rows, or, when they are no more than
    the parameters, assumed to be 5 %. A few hundred small least-squares problems. Raises InputError without rows or for a
    level that is not between 0 and 1.
    """
    if len(observations) == 0:
        raise InputError("observations", "are empty", "give at least one measured row")
    if not 0 < level < 1:
        raise InputError("level", f"is {level}", "give a confidence between 0 and 1, such as 0.9")
    rows = _Rows(observations)
    point, squares = rows.refit(rows.start_from(params))
    found: list[tuple[float, float]] = []
    for _ in range(4):  # a profile can meet a better fit than the one it starts from: then begin again there
        freedom = rows.count - int(rows.free.sum())
        assumed = error is None and freedom < 1
        size = error if error is not None else ASSUMED_ERROR if assumed else math.sqrt(squares / freedom)
        size = max(size, 1e-9)  # rows without any error
        quantile = ndtri((1 + level) / 2) if assumed or error is not None else stdtrit(freedom, (1 + level) / 2)
        profile = _Profile(rows, point, squares, size, float(quantile))
        found = [profile.interval(int(i)) for i in np.flatnonzero(rows.free)]
        if profile.best_squares >= squares - 1e-6 * size**2:
            break
        point, squares = rows.refit(profile.best_point)
    ends = iter(found)
    intervals = []
    for i, name in enumerate(NAMES):
        value = float(np.exp(point[i])) if rows.free[i] else (1.0 if name == "gamma" else 0.0)
        value = 0.0 if name != "gamma" and point[i] <= rows.low[i] + 1e-6 else value
        low, high = next(ends) if rows.free[i] else ((1.0, 10.0) if name == "gamma" else (0.0, math.inf))
        reason = "" if rows.free[i] else _UNSEEN[name]
        one = Interval(name=name, value=value, low=low, high=high, reason=reason)
        if rows.free[i] and not one.determined:
            one = Interval(name=name, value=value, low=low, high=high, reason="the rows fit as well with any value")
        intervals.append(one)
    return Uncertainty(level=level, error=size, error_is_assumed=assumed, intervals=tuple(intervals))


class _Rows:
    """Least squares of log times by the logarithms of the free parameters, within bounds."""

    def __init__(self, rows: Observations) -> None:
        problem = _Problem(rows, 0.0)
        self.free: NDArray[np.bool_] = problem.free
        self.nodes, self.replicas, self.batch = rows.num_nodes, rows.num_replicas, rows.local_batch_size
        self.has_grad, self.log_grad, self.log_step = problem.has_grad, problem.log_grad, problem.log_step
        self.count = len(rows) + int(self.has_grad.sum())
        self.low, self.high = np.zeros(7), np.zeros(7)
        self.low[self.free], self.high[self.free] = (np.array(side) for side in zip(*problem.bounds, strict=True))
        self.usual = np.zeros(7)
        self.usual[self.free] = problem.start(2.0)

    def start_from(self, params: ThroughputParams) -> Array:
        """Return log parameters to start from. A zero has no logarithm, and near it nothing moves: a small value instead."""
        values = np.array([getattr(params, name) for name in NAMES])
        floor = np.exp(self.usual) * 1e-3
        start = np.log(np.where(values > 0, values, floor))
        made: Array = np.where(self.free, np.clip(start, self.low, self.high), 0.0)
        return made

    def values(self, point: Array) -> Array:
        made = np.exp(point)
        made[~self.free] = 0.0
        if not self.free[6]:
            made[6] = 1.0
        return made

    def residuals(self, point: Array) -> tuple[Array, Array]:
        """Return residuals of shape (count,) and their Jacobian (count, 7)."""
        log_grad, log_step, by_grad, by_step = log_times(self.values(point), self.nodes, self.replicas, self.batch)
        seen = self.has_grad
        errors = np.concatenate([log_step - self.log_step, (log_grad - self.log_grad)[seen]])
        return errors, np.concatenate([by_step, by_grad[seen]])

    def refit(self, point: Array, fixed: int | None = None) -> tuple[Array, float]:
        """Return the least-squares point and its sum of squares, from ``point``, one parameter held (Levenberg-Marquardt)."""
        moving = self.free.copy()
        if fixed is not None:
            moving[fixed] = False
        point = point.copy()
        errors, jacobian = self.residuals(point)
        squares, damping = float(errors @ errors), 1e-3
        for _ in range(200):
            slope = jacobian.T @ errors
            stuck = ((point <= self.low) & (slope > 0)) | ((point >= self.high) & (slope < 0))
            index = np.flatnonzero(moving & ~stuck)
            if not index.size:
                break
            normal = jacobian[:, index].T @ jacobian[:, index]
            scale = np.diag(np.diag(normal) + 1e-12)
            step = np.linalg.solve(normal + damping * scale, -slope[index])
            tried = point.copy()
            tried[index] = np.clip(point[index] + np.clip(step, -3.0, 3.0), self.low[index], self.high[index])
            new_errors, new_jacobian = self.residuals(tried)
            new_squares = float(new_errors @ new_errors)
            if new_squares <= squares:
                gained, moved = squares - new_squares, float(np.abs(tried - point).max())
                point, errors, jacobian, squares = tried, new_errors, new_jacobian, new_squares
                damping = max(damping * 0.2, 1e-9)
                if gained <= 1e-9 * squares or moved < 1e-9:
                    break
            else:
                damping *= 6.0
                if damping > 1e8:
                    break
        return point, squares


class _Profile:
    """Walks from the best point along one parameter, refitting the others, until the fit is too bad."""

    def __init__(self, rows: _Rows, point: Array, squares: float, size: float, quantile: float) -> None:
        self.rows, self.point, self.squares, self.size, self.quantile = rows, point, squares, size, quantile
        self.best_point, self.best_squares = point, squares
        _, jacobian = rows.residuals(point)
        index = np.flatnonzero(rows.free)
        information = jacobian[:, index].T @ jacobian[:, index]
        # A first guess of the step only. Rows that fit without error leave some directions flat at any scale of theirs.
        ridge = max(1e-2 * size**2, 1e-12 * float(np.trace(information)), 1e-300)
        self.spread = np.zeros(7)
        self.spread[index] = size * np.sqrt(np.diag(np.linalg.inv(information + ridge * np.eye(len(index)))))

    def interval(self, i: int) -> tuple[float, float]:
        """Return the ends for parameter i, with no limit where the walk reaches the parameter's bound."""
        low, high = self._end(i, -1.0), self._end(i, 1.0)
        least, most = (1.0, 10.0) if NAMES[i] == "gamma" else (0.0, math.inf)
        return least if low is None else float(np.exp(low)), most if high is None else float(np.exp(high))

    def _excess(self, i: int, at: float, start: Array) -> tuple[float, Array]:
        """Return how many standard errors the profile is above the best fit, less the quantile."""
        tried = start.copy()
        tried[i] = at
        point, squares = self.rows.refit(tried, fixed=i)
        if squares < self.best_squares:
            self.best_point, self.best_squares = point, squares
        return math.sqrt(max(squares - self.squares, 0.0)) / self.size - self.quantile, point

    def _end(self, i: int, side: float) -> float | None:
        bound = float(self.rows.high[i] if side > 0 else self.rows.low[i])
        inside, at_inside, point = float(self.point[i]), -self.quantile, self.point
        step = min(max(self.quantile * float(self.spread[i]), 1e-7), 2.0)
        while True:
            if inside == bound:
                return None
            outside = inside + side * step
            outside = min(outside, bound) if side > 0 else max(outside, bound)
            at_outside, new = self._excess(i, outside, point)
            if at_outside > 0:
                break
            inside, at_inside, point, step = outside, at_outside, new, step * 2.0
        for _ in range(30):  # the excess is nearly linear: false position, halving when it is one-sided
            if abs(outside - inside) < max(1e-3 * abs(outside - self.point[i]), 1e-9):
                break
            share = min(max(at_inside / (at_inside - at_outside), 0.1), 0.9)
            middle = inside + share * (outside - inside)
            value, new = self._excess(i, middle, point)
            if value > 0:
                outside, at_outside = middle, value
            else:
                inside, at_inside, point = middle, value, new
            if abs(value) < 1e-3:
                return middle
        return 0.5 * (inside + outside)
