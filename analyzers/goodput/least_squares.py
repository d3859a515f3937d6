"""The fit of the throughput model as a least-squares problem, and the descent that solves it.

Residuals are errors of log times: of the full step and, with a weight of its own, of the pass ``T_grad`` where observed
(the loss of Pollux, section 4.1, without the square roots). Unknowns are the logarithms of the parameters. A parameter that
no row can speak about is not free and keeps its prior: zero for synchronisation never seen ("prior-driven exploration").

Several device types are fitted in one problem: each has its own ``alpha_grad`` and ``beta_grad``, all share the other five.
Rows of one configuration count as one, so a million rows cost what their configurations do. Start at :class:`Problem`,
then :func:`descend`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.goodput.curve import line
from ddltool.analyzers.goodput.observations import Observations
from ddltool.analyzers.goodput.throughput import NAMES, ThroughputParams, log_times

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
# How much an error of T_grad counts beside one of the step, by the number of configurations: all measured times alike when
# they are few. When they are many the step speaks for itself and must not pay for how T_grad bends (chosen with the prior).
GRAD_WEIGHT, GRAD_WEIGHT_FEW = 0.1, 20
# Beyond this, batches are told apart only to half a per cent: the model is smooth in them.
MOST_CONFIGURATIONS = 5000
# A part of the step this much shorter than the shortest step is zero: no clock sees it.
_LEAST_SHARE = 1e-7
# Where the parameters that are pairs of intercept and slope stand: synchronisation within a node, and across nodes.
SLOPES = ((2, 3), (4, 5))


class Group:
    """The rows of one device with equal configurations as one: arrays of shape (g,), all that least squares needs.

    ``log_step`` and ``log_grad`` are means over the rows of a configuration (the latter 0 where ``grads`` is 0), ``steps``
    and ``grads`` how many rows they are of, ``within`` and ``within_grad`` the squared errors about them that no fit
    removes, ``member`` (n,) the configuration of each row.
    """

    def __init__(self, rows: Observations) -> None:
        keys = np.stack([rows.num_nodes, rows.num_replicas, rows.local_batch_size, rows.accumulation_steps])
        first, self.member = _distinct(keys)
        if len(first) > MOST_CONFIGURATIONS:
            keys[2] = np.round(np.log(rows.local_batch_size) / 0.005)
            first, self.member = _distinct(keys)
        self.rows = rows
        self.nodes, self.replicas, self.passes = (
            column[first] for column in (rows.num_nodes, rows.num_replicas, rows.accumulation_steps)
        )
        self.batch = np.bincount(self.member, rows.local_batch_size) / np.bincount(self.member)
        self.shared = self.replicas > 1
        self.weigh(np.ones(len(rows)))

    def weigh(self, weights: Array) -> None:
        """Let each row count by its weight, shape (n,)."""
        seen = np.isfinite(self.rows.grad_time_s)
        log_grads = np.log(np.where(seen, self.rows.grad_time_s, 1.0))
        self.log_step, self.steps, self.within = self._means(np.log(self.rows.step_time_s), weights)
        self.log_grad, self.grads, self.within_grad = self._means(log_grads, weights * seen)

    def _means(self, values: Array, weights: Array) -> tuple[Array, Array, float]:
        """Return weighted means and sums of weights by configuration, and the weighted squares about the means."""
        total = np.bincount(self.member, weights).astype(np.float64)
        mean = np.bincount(self.member, weights * values) / np.where(total > 0, total, 1.0)
        return mean, total, float(weights @ (values - mean[self.member]) ** 2)

    @property
    def placements(self) -> int:
        """The number of different (nodes, replicas) of more than one replica."""
        return len(np.unique(np.stack([self.nodes, self.replicas])[:, self.shared], axis=1).T)


def _distinct(keys: Array) -> tuple[Ints, Ints]:
    """Return the place of the first of each distinct column of keys (k, n), and (n,) which distinct one each column is."""
    order = np.lexsort(keys)
    fresh = np.concatenate([[True], (np.diff(keys[:, order]) != 0).any(axis=0)])
    member = np.empty(keys.shape[1], dtype=np.int64)
    member[order] = np.cumsum(fresh) - 1
    return order[fresh], member


class Problem:
    """Least squares by the logarithms of the unknowns: the seven parameters of one device, or ``2 d + 5`` of d devices.

    ``index`` (d, 7) tells where the parameters of each device stand among the unknowns; ``free`` (u,) which unknowns the
    rows speak about; ``low`` and ``high`` (u,) bound the logarithms; ``rows`` and ``grads`` are the numbers of steps and of
    observed T_grad, or the sums of their weights. ``slope_weights`` (2,): how much the prior counts,
    ``weight log(1 + q^2)`` with q = beta / alpha over ``slope_scale``, for each of :data:`SLOPES`.
    """

    def __init__(
        self, devices: Sequence[Observations], *, slope_scale: float = 1.0, grad_weight: float | None = None
    ) -> None:
        self.groups = [Group(rows) for rows in devices]
        count = len(self.groups)
        self.index = np.array([[2 * i, 2 * i + 1, *range(2 * count, 2 * count + 5)] for i in range(count)])
        self.gamma = 2 * count + 4
        self.slope_weights, self.slope_scale = np.zeros(2), slope_scale
        configurations = sum(len(item.nodes) for item in self.groups)
        usual = min(max(GRAD_WEIGHT, GRAD_WEIGHT_FEW / configurations), 1.0)
        self.grad_weight = usual if grad_weight is None else grad_weight
        self.placements = sum(item.placements for item in self.groups)
        self._count()
        self.free = np.zeros(self.gamma + 1, dtype=bool)
        for index, item in zip(self.index, self.groups, strict=True):
            local, across, more = item.shared & (item.nodes <= 1), item.shared & (item.nodes > 1), item.replicas > 2
            several = item.batch != item.batch[0]
            spoken = (several, local, local & more, across, across & more, item.shared)
            self.free[index] |= [True, *(bool(rows.any()) for rows in spoken)]
        self.low, self.high = self._bounds()

    def weigh(self, weights: Sequence[Array]) -> None:
        """Let each row count by its weight, arrays of shape (n,) per device."""
        for item, own in zip(self.groups, weights, strict=True):
            item.weigh(own)
        self._count()

    def _count(self) -> None:
        self.rows = float(sum(item.steps.sum() for item in self.groups))
        self.grads = float(sum(item.grads.sum() for item in self.groups))

    def _bounds(self) -> tuple[Array, Array]:
        times = [np.append(item.log_step, item.log_grad[item.grads > 0]) for item in self.groups]
        low = np.full(self.gamma + 1, min(float(item.min()) for item in times) + np.log(_LEAST_SHARE))
        high = np.full(self.gamma + 1, max(float(item.log_step.max()) for item in self.groups) + np.log(10.0))
        low[self.index[:, 1]] -= np.log([item.batch.max() for item in self.groups])
        low[self.index[0][[3, 5]]] -= np.log(max(max(float(item.replicas.max()) for item in self.groups) - 2.0, 1.0))
        low[self.gamma], high[self.gamma] = 0.0, np.log(10.0)
        return low, high

    def start(self, gamma: float, growth: float = 0.1) -> Array:
        """Return a start from the data: a line through T_grad, synchronisation from what the step takes longer.

        ``growth``: the slope of synchronisation as a share of its intercept.
        """
        made = np.zeros(self.gamma + 1)
        waits: tuple[list[Array], list[Array]] = ([], [])
        for index, item in zip(self.index, self.groups, strict=True):
            step = np.exp(item.log_step)
            grad = np.where(item.grads > 0, np.exp(item.log_grad), step / (item.passes + 1.0))
            intercept, slope = line(item.batch, grad)
            floor = 0.01 * float(np.median(grad))
            made[index[:2]] = max(intercept, floor), max(slope, floor / float(item.batch.max()))
            wait = np.maximum(step - (item.passes + 1.0) * grad, floor)
            for found, across in zip(waits, (False, True), strict=True):
                found.append(wait[item.shared & ((item.nodes > 1) == across)])
        for (alpha, beta), found in zip(SLOPES, waits, strict=True):
            every = np.concatenate(found)
            typical = float(np.median(every)) if every.size else 1.0
            made[self.index[0][[alpha, beta]]] = typical, growth * typical
        made[self.gamma] = gamma
        return self._point(made)

    def start_from(self, params: Sequence[ThroughputParams]) -> Array:
        """Return the point of given parameters. A zero has no logarithm and near it nothing moves: a small value instead."""
        values = np.exp(self.start(2.0)) * 1e-3
        for index, item in zip(self.index, params, strict=True):
            known = np.array([getattr(item, name) for name in NAMES])
            values[index] = np.where(known > 0, known, values[index])
        return self._point(values)

    def _point(self, values: Array) -> Array:
        return np.where(self.free, np.clip(np.log(values), self.low, self.high), 0.0)

    def values(self, point: Array) -> Array:
        """Return all unknowns at a point; those that are not free have their priors: 0, and 1 for gamma."""
        made: Array = np.where(self.free, np.exp(point), 0.0)
        made[self.gamma] = max(made[self.gamma], 1.0)
        return made

    def params(self, point: Array) -> tuple[ThroughputParams, ...]:
        """Return the parameters of each device at a point; a time at the lower bound is zero."""
        values = self.values(point)
        values[:-1][point[:-1] <= self.low[:-1] + 0.01] = 0.0
        values[self.gamma] = min(values[self.gamma], 10.0)
        return tuple(ThroughputParams(**dict(zip(NAMES, values[index].tolist(), strict=True))) for index in self.index)

    def residuals(self, point: Array) -> tuple[Array, Array]:
        """Return residuals (r,), whose squares sum to the loss, and their Jacobian (r, u) by the logarithms."""
        values = self.values(point)
        errors, slopes = [], []
        grad_share = self.grad_weight / max(self.grads, 1.0)
        for index, item in zip(self.index, self.groups, strict=True):
            log_grad, log_step, by_grad, by_step = log_times(
                values[index], item.nodes, item.replicas, item.batch, item.passes
            )
            for weight, error, slope in (
                (np.sqrt(item.steps / self.rows), log_step - item.log_step, by_step),
                (np.sqrt(grad_share * item.grads), log_grad - item.log_grad, by_grad),
            ):
                jacobian = np.zeros((len(error), len(values)))
                jacobian[:, index] = weight[:, None] * slope
                errors.append(weight * error)
                slopes.append(jacobian)
        for pull, pair in zip(self.slope_weights.tolist(), SLOPES, strict=True):
            alpha, beta = self.index[0][list(pair)]
            if self.free[beta] and pull > 0:
                square = (values[beta] / values[alpha] / self.slope_scale) ** 2
                root = math.sqrt(pull * math.log1p(square))
                jacobian = np.zeros((1, len(values)))
                jacobian[0, beta] = pull * square / (1.0 + square) / root if root > 0 else 0.0
                jacobian[0, alpha] = -jacobian[0, beta]
                errors.append(np.array([root]))
                slopes.append(jacobian)
        return np.concatenate(errors), np.concatenate(slopes)

    def step_errors(self, point: Array) -> list[Array]:
        """Return, per device, predicted less observed log step time of each row, shape (n,)."""
        values = self.values(point)
        made = []
        for index, item in zip(self.index, self.groups, strict=True):
            log_step = log_times(values[index], item.nodes, item.replicas, item.batch, item.passes)[1]
            made.append(log_step[item.member] - np.log(item.rows.step_time_s))
        return made

    def scatter(self, point: Array) -> float | None:
        """Return the standard deviation of the rows' log step times about the model; None when they are too few to tell."""
        freedom = self.rows - int(self.free.sum())
        squares = sum(float(item @ item) for item in self.step_errors(point))
        return float(np.sqrt(squares / freedom)) if freedom >= 1 else None

    def time_error(self, loss: float) -> tuple[float, float]:
        """Return the standard deviation of all measured log times at a loss, and the degrees of freedom that it has.

        A T_grad counts as much as the problem weighs it. The error is infinite without a degree of freedom.
        """
        share = self.grad_weight * self.rows / max(self.grads, 1.0)
        within = sum(item.within + share * item.within_grad for item in self.groups)
        freedom = self.rows + share * self.grads - float(self.free.sum())
        return float(np.sqrt((loss * self.rows + within) / freedom)) if freedom >= 1 else np.inf, freedom


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Descent:
    """Where a descent ended: the point, its loss, and whether no direction within the bounds leads further down."""

    point: Array
    loss: float
    converged: bool


def descend(problem: Problem, start: Array, *, fixed: int | None = None, steps: int = 500) -> Descent:
    """Return the local minimum near ``start``, one unknown held when ``fixed`` is given (Levenberg-Marquardt in a box).

    O(rows) per step. Converged: the last step gained less than a 1e-12th of the loss or 1e-16 (no
    time can be told that well), or nothing can be gained.
    """
    moving = problem.free.copy()
    if fixed is not None:
        moving[fixed] = False
    point, damping = start.copy(), 1e-3
    errors, jacobian = problem.residuals(point)
    loss = float(errors @ errors)
    for _ in range(steps):
        slope = jacobian.T @ errors
        stuck = ((point <= problem.low) & (slope > 0)) | ((point >= problem.high) & (slope < 0))
        index = np.flatnonzero(moving & ~stuck)
        if not index.size or float(np.abs(slope[index]).max()) <= 1e-14 * max(loss, 1e-16):
            return Descent(point=point, loss=loss, converged=True)
        normal = jacobian[:, index].T @ jacobian[:, index]
        normal.flat[:: len(index) + 1] *= 1.0 + damping
        normal.flat[:: len(index) + 1] += 1e-14
        step = np.clip(np.linalg.solve(normal, -slope[index]), -3.0, 3.0)
        tried = point.copy()
        tried[index] = np.clip(point[index] + step, problem.low[index], problem.high[index])
        new_errors, new_jacobian = problem.residuals(tried)
        new_loss = float(new_errors @ new_errors)
        if new_loss <= loss:
            gained, moved = loss - new_loss, float(np.abs(tried - point).max())
            point, errors, jacobian, loss = tried, new_errors, new_jacobian, new_loss
            damping = max(damping * 0.2, 1e-12)
            done = gained <= max(1e-12 * loss, 1e-16) or moved < 1e-10
        else:
            damping *= 6.0
            done = damping > 1e10  # not even a tiny step against the gradient helps: the rounding floor
        if done:
            return Descent(point=point, loss=loss, converged=True)
    # rows explained to a 1e-5th are explained, though some direction may be nearly flat
    return Descent(point=point, loss=loss, converged=loss < 1e-10)
