"""How well the measured rows determine each throughput parameter.

Start at :func:`parameter_intervals`; what to measure next is in :mod:`ddltool.analyzers.goodput.next_measurement`.

Profile likelihood: a value belongs to the interval of a parameter when the rows, with all other parameters refitted, are
explained not much worse than by the best fit (F test on the sum of squared log errors; Bates and Watts 1988, section 6.1).
Unlike a covariance from the Hessian it holds at bounds and far from them: a parameter that may as well be 0 or without an
upper limit is seen as such. Rows alone count here: the prior on the slopes that :func:`ddltool.analyzers.goodput.fit.fit`
uses is left out. Log errors of all measured times are taken as independent, those of steps as of one size, and those of
T_grad as the fit weighs them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

from ddltool.analyzers.goodput.observations import Observations
from ddltool.analyzers.goodput.problem import NAMES, Descent, Problem, descend
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
    return joint_intervals([observations], [params], level=level, error=error)[0]


def joint_intervals(
    devices: Sequence[Observations],
    params: Sequence[ThroughputParams],
    *,
    level: float = 0.9,
    error: float | None = None,
) -> tuple[Uncertainty, ...]:
    """Return the intervals of several device types that share their network, one result per device.

    Arguments and errors as for :func:`parameter_intervals`; the shared parameters have the same interval everywhere.
    """
    if not devices or min(len(rows) for rows in devices) == 0:
        raise InputError("observations", "are empty", "give at least one measured row")
    if not 0 < level < 1:
        raise InputError("level", f"is {level}", "give a confidence between 0 and 1, such as 0.9")
    problem = Problem(devices)
    share = problem.grad_weight  # as in the fit: a T_grad counts as this much of a measured step
    problem.grad_weight = share * problem.grads / problem.rows
    count = problem.rows + share * problem.grads
    within = sum(item.within + share * item.within_grad for item in problem.groups)

    def squares_at(loss: float) -> float:
        return loss * problem.rows + within

    best = descend(problem, problem.start_from(params))
    found: dict[int, tuple[float, float]] = {}
    for _ in range(4):  # a profile can meet a better fit than the one it starts from: then begin again there
        freedom = count - float(problem.free.sum())
        assumed = error is None and freedom < 1
        size = error if error is not None else ASSUMED_ERROR if assumed else math.sqrt(squares_at(best.loss) / freedom)
        size = max(size, 1e-9)  # rows without any error
        quantile = ndtri((1 + level) / 2) if assumed or error is not None else stdtrit(freedom, (1 + level) / 2)
        profile = _Profile(problem, best, size / math.sqrt(problem.rows), float(quantile))
        found = {int(i): profile.interval(int(i)) for i in np.flatnonzero(problem.free)}
        if profile.best.loss >= best.loss - 1e-6 * size**2 / problem.rows:
            break
        best = descend(problem, profile.best.point)
    return tuple(
        Uncertainty(
            level=level,
            error=size,
            error_is_assumed=assumed,
            intervals=tuple(
                _interval(problem, best.point, int(place), name, found)
                for name, place in zip(NAMES, index, strict=True)
            ),
        )
        for index in problem.index
    )


def _interval(problem: Problem, point: Array, i: int, name: str, found: dict[int, tuple[float, float]]) -> Interval:
    gamma, free = name == "gamma", bool(problem.free[i])
    value = float(np.exp(point[i])) if free else (1.0 if gamma else 0.0)
    value = 0.0 if not gamma and point[i] <= problem.low[i] + 1e-6 else value
    low, high = found[i] if free else ((1.0, 10.0) if gamma else (0.0, math.inf))
    one = Interval(name=name, value=value, low=low, high=high, reason="" if free else _UNSEEN[name])
    return one if one.determined or not free else replace(one, reason="the rows fit as well with any value")


class _Profile:
    """Walks from the best point along one unknown, refitting the others, until the fit is too bad.

    ``size`` is the standard deviation of an error in units of the problem's residuals.
    """

    def __init__(self, problem: Problem, found: Descent, size: float, quantile: float) -> None:
        self.problem, self.point, self.size, self.quantile = problem, found.point, size, quantile
        self.loss, self.best = found.loss, found
        _, jacobian = problem.residuals(found.point)
        index = np.flatnonzero(problem.free)
        information = jacobian[:, index].T @ jacobian[:, index]
        # A first guess of the step only. Rows that fit without error leave some directions flat at any scale of theirs.
        ridge = max(1e-2 * size**2, 1e-12 * float(np.trace(information)), 1e-18)
        self.spread = np.zeros(len(found.point))
        self.spread[index] = size * np.sqrt(np.diag(np.linalg.inv(information + ridge * np.eye(len(index)))))

    def interval(self, i: int) -> tuple[float, float]:
        """Return the ends for unknown i, with no limit where the walk reaches the unknown's bound."""
        low, high = self._end(i, -1.0), self._end(i, 1.0)
        least, most = (1.0, 10.0) if i == self.problem.gamma else (0.0, math.inf)
        return least if low is None else float(np.exp(low)), most if high is None else float(np.exp(high))

    def _excess(self, i: int, at: float, start: Array) -> tuple[float, Array]:
        """Return how many standard errors the profile is above the best fit, less the quantile."""
        tried = start.copy()
        tried[i] = at
        found = descend(self.problem, tried, fixed=i)
        if found.loss < self.best.loss:
            self.best = found
        return math.sqrt(max(found.loss - self.loss, 0.0)) / self.size - self.quantile, found.point

    def _end(self, i: int, side: float) -> float | None:
        bound = float(self.problem.high[i] if side > 0 else self.problem.low[i])
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
