"""How well the measured rows determine each throughput parameter, and which configuration to measure next.

Start at :func:`parameter_intervals` and :func:`suggest_next`.

Intervals are profile likelihoods: a value belongs to the interval of a parameter when the rows, with all other parameters
refitted, are explained not much worse than by the best fit (F test on the sum of squared log errors; Bates and Watts 1988,
section 6.1). Unlike a covariance from the Hessian it holds at bounds and far from them: a parameter that may as well be 0
or without an upper limit is seen as such. Rows alone count here, without the prior on the slopes of
:mod:`ddltool.analyzers.goodput.fit`. Log errors of all measured times are taken as independent, those of steps as of one
size, and those of T_grad as the fit weighs them.

What to measure next is the configuration that makes predictions most certain: linear Gaussian design (V-optimality;
Chaloner and Verdinelli 1995, section 2). About the fitted point, log times are linear in the log parameters, which have a
wide prior, so a measurement's effect on the variance of every prediction is known before it is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.special import ndtri, stdtrit

from ddltool.analyzers.goodput.fit import ASSUMED_ERROR, GAMMA, SLOPES, Descent, Problem, descend
from ddltool.analyzers.goodput.observations import Observations
from ddltool.analyzers.goodput.throughput import NAMES, ThroughputParams, log_times
from ddltool.arrays import Floats, Ints
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
# Of more numbers of replicas, or batch sizes, these many are looked at: all small ones, then ever wider apart.
_MOST_REPLICAS, _MOST_BATCHES = 256, 64
# Before any row a time is known to a factor of ten (one standard deviation), gamma as spread evenly over log 1 to log 10.
_PRIOR = np.array([math.log(10.0)] * 6 + [math.log(10.0) / math.sqrt(12.0)])


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
    problem = Problem(rows)
    # as in the fit, where as many T_grad were observed as steps: a T_grad counts as this much of a measured step
    problem.grad_weight *= problem.grad_count / len(rows)
    best = descend(problem, problem.start_from(params))
    for _ in range(4):  # a profile can meet a better fit than the one it starts from: then begin again there
        measured, freedom = problem.time_error(best.loss)
        assumed = error is None and math.isinf(measured)
        size = max(error or (ASSUMED_ERROR if assumed else measured), 1e-9)  # rows may be without any error
        quantile = ndtri((1 + level) / 2) if assumed or error is not None else stdtrit(freedom, (1 + level) / 2)
        profile = _Profile(problem, best, size / math.sqrt(len(rows)), float(quantile))
        intervals = {name: profile.interval(place) for place, name in enumerate(NAMES)}
        if profile.best.loss >= best.loss - 1e-6 * size**2 / len(rows):
            break
        best = descend(problem, profile.best.point)
    return Uncertainty(level=level, error=size, intervals=intervals)


class _Profile:
    """Walks from the best point along one parameter, refitting the others, until the fit is too bad.

    ``size`` is the standard deviation of an error in units of the problem's residuals.
    """

    def __init__(self, problem: Problem, found: Descent, size: float, quantile: float) -> None:
        self.problem, self.start, self.size, self.quantile = problem, found, size, quantile
        self.best = found
        _, jacobian = problem.residuals(found.point)
        information = jacobian.T @ jacobian
        # A first guess of the step only. Rows that fit without error leave some directions flat at any scale of theirs.
        ridge = max(1e-2 * size**2, 1e-12 * float(np.trace(information)), 1e-18)
        self.spread = size * np.sqrt(np.diag(np.linalg.inv(information + ridge * np.eye(len(information)))))

    def interval(self, place: int) -> ParameterInterval:
        """Return the interval of a parameter, with no limit where the walk reaches the parameter's bound."""
        least, most = (1.0, 10.0) if place == GAMMA else (0.0, math.inf)
        ends = (self._end(place, -1.0), self._end(place, 1.0)) if self.problem.free[place] else (None, None)
        low, high = (limit if end is None else math.exp(end) for end, limit in zip(ends, (least, most), strict=True))
        reason = "" if self.problem.free[place] else _UNSEEN[NAMES[place]]
        if not reason and ends == (None, None):
            reason = "the rows fit as well with any value"
        return ParameterInterval(low=low, high=high if math.isfinite(high) else None, reason=reason)

    def _end(self, place: int, side: float) -> float | None:
        """Return the logarithm at which the profile is ``quantile`` standard errors above the best fit; None: nowhere."""
        bound = float(self.problem.high[place] if side > 0 else self.problem.low[place])
        centre, point = float(self.start.point[place]), self.start.point.copy()

        def excess(at: float) -> float:
            nonlocal point
            point[place] = at
            found = descend(self.problem, point, fixed=place)
            point = found.point
            if found.loss < self.best.loss:
                self.best = found
            return math.sqrt(max(found.loss - self.start.loss, 0.0)) / self.size - self.quantile

        step = min(max(self.quantile * float(self.spread[place]), 1e-7), 2.0)
        inside = centre
        while inside != bound:
            outside = min(inside + step, bound) if side > 0 else max(inside - step, bound)
            if excess(outside) > 0:
                if excess(inside) >= 0:
                    return inside  # within rounding of the end
                tolerance = max(1e-3 * abs(outside - centre), 1e-9)
                return float(brentq(excess, inside, outside, xtol=tolerance, disp=False))
            inside, step = outside, step * 2.0
        return None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Configurations:
    """Configurations that could run; arrays of shape (n,)."""

    num_nodes: Ints
    num_replicas: Ints
    local_batch_size: Ints

    def __len__(self) -> int:
        return len(self.num_nodes)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Suggestion:
    """The candidate whose measurement helps most, and how much; and all candidates' figures, shape (n,)."""

    num_nodes: int
    num_replicas: int
    local_batch_size: int
    variance_before: float
    """Mean over the targets of the variance of the predicted log step time."""
    variance_after: float
    reductions: Floats
    """Fall of that variance by each candidate."""


def configurations(
    max_replicas: int,
    replicas_per_node: int,
    local_batch_sizes: ArrayLike,
    *,
    tried_replicas: int | None = None,
) -> Configurations:
    """Return all batches on 1 to ``max_replicas`` replicas: on as few nodes as hold them, and on two where one would do.

    With ``tried_replicas``, the largest number measured so far, at most twice as many (Pollux, section 4.1). Raises
    InputError for numbers below 1.
    """
    batches = np.unique(np.asarray(local_batch_sizes, dtype=np.int64))
    if min(max_replicas, replicas_per_node, tried_replicas or 1) < 1 or not batches.size or batches[0] < 1:
        raise InputError("configurations", "has a number below 1", "give replicas and batch sizes of 1 or more")
    most = max_replicas if tried_replicas is None else min(max_replicas, 2 * tried_replicas)
    batches = batches[_thinned(batches.size, _MOST_BATCHES) - 1]
    replicas = _thinned(most, _MOST_REPLICAS)
    places = np.stack([-(-replicas // replicas_per_node), replicas])
    beside = (places[0] == 1) & (replicas > 1) & (max_replicas > replicas_per_node)
    spread = np.stack([np.full(int(beside.sum()), 2), replicas[beside]])
    places = np.concatenate([places, spread], axis=1)
    places = places[:, np.lexsort(places)]
    nodes, replicas = np.repeat(places, len(batches), axis=1)
    return Configurations(num_nodes=nodes, num_replicas=replicas, local_batch_size=np.tile(batches, places.shape[1]))


def _thinned(count: int, most: int) -> Ints:
    """Return 1 to ``count``, or when they are more than ``most`` the first half of that many and then a geometric rest."""
    if count <= most:
        return np.arange(1, count + 1)
    rest = np.geomspace(most // 2 + 1, count, most - most // 2).round().astype(np.int64)
    return np.concatenate([np.arange(1, most // 2 + 1), np.unique(rest)])


def suggest_next(
    rows: Observations,
    params: ThroughputParams,
    candidates: Configurations,
    *,
    error: float = 0.05,
) -> Suggestion:
    """Return the candidate that reduces most the mean variance of the predicted log step time over all candidates.

    ``error``: standard deviation of a measured log time. A measurement yields the step time and T_grad. Synchronisation
    never seen is taken to cost about as much as T_grad: an unknown that could matter. Raises InputError without
    candidates, or for an error that is not above 0.
    """
    if not len(candidates):
        raise InputError("candidates", "are empty", "give at least one configuration that can run")
    if not error > 0:
        raise InputError("error", f"is {error}", "give the relative error of a measured time, above 0")
    values = _plausible(params, rows)
    places = (rows.num_nodes, rows.num_replicas, rows.local_batch_size, rows.accumulation_steps)
    _, _, by_grad, by_step = log_times(values, *places)
    seen = np.concatenate([by_step, by_grad[np.isfinite(rows.grad_time_s)]])
    covariance = np.linalg.inv(np.diag(_PRIOR**-2) + seen.T @ seen / error**2)
    both = log_times(values, candidates.num_nodes, candidates.num_replicas, candidates.local_batch_size)[2:]
    wanted = both[1]
    before = float(np.einsum("ti,ij,tj->t", wanted, covariance, wanted).mean())
    # what the steps see of the covariance, C (mean of j j') C, reduced by a measurement's two rows R:
    # trace((error^2 I + R C R')^-1 R W R')
    weight = covariance @ (wanted.T @ wanted / len(candidates)) @ covariance
    measured = np.stack(both, axis=1)
    spread = np.einsum("cri,ij,csj->crs", measured, covariance, measured) + error**2 * np.eye(2)
    gains = np.einsum("cri,ij,csj->crs", measured, weight, measured)
    reductions: Floats = np.einsum("crs,csr->c", np.linalg.inv(spread), gains)
    best = int(np.argmax(reductions))
    return Suggestion(
        num_nodes=int(candidates.num_nodes[best]),
        num_replicas=int(candidates.num_replicas[best]),
        local_batch_size=int(candidates.local_batch_size[best]),
        variance_before=before,
        variance_after=before - float(reductions[best]),
        reductions=reductions,
    )


def _plausible(params: ThroughputParams, rows: Observations) -> Floats:
    """Return the parameters, with a value that matters for each of which the rows cannot speak."""
    values = np.array([getattr(params, name) for name in NAMES])
    shared = rows.num_replicas > 1
    batch = float(np.median(rows.local_batch_size)) if len(rows) else 1.0
    typical = float(values[0] + values[1] * batch)
    if len(np.unique(rows.local_batch_size)) < 2 and values[1] == 0:
        values[:2] = typical / 2, typical / 2 / batch
    for (alpha, beta), here in zip(SLOPES, (rows.num_nodes <= 1, rows.num_nodes > 1), strict=True):
        seen = shared & here
        if not seen.any() and values[alpha] == 0:
            values[alpha] = typical
        if not (seen & (rows.num_replicas > 2)).any() and values[beta] == 0:
            values[beta] = values[alpha] / 10
    if not shared.any():
        values[6] = max(values[6], 2.0)
    return values
