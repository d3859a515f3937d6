"""The fit of the throughput model as a least-squares problem, and the descent that solves it.

Residuals are errors of log times: of the full step and, with a weight of its own, of the pass ``T_grad`` where observed
(the loss of Pollux, section 4.1, without the square roots). Unknowns are the logarithms of the parameters. A parameter that
no row can speak about is not free and keeps its prior: zero for synchronisation never seen ("prior-driven exploration").

Several device types are fitted in one problem: each has its own ``alpha_grad`` and ``beta_grad``, all share the other five.
Start at :class:`Problem`, then :func:`descend`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.goodput.grouped import Grouped, group
from ddltool.analyzers.goodput.observations import Observations
from ddltool.analyzers.goodput.sensitivity import log_times
from ddltool.analyzers.goodput.throughput import ThroughputParams

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
NAMES = (
    "alpha_grad_s",
    "beta_grad_s",
    "alpha_sync_local_s",
    "beta_sync_local_s",
    "alpha_sync_node_s",
    "beta_sync_node_s",
    "gamma",
)
# How much an error of T_grad counts beside one of the step, by the number of configurations: all measured times alike when
# they are few. When they are many the step speaks for itself and must not pay for how T_grad bends (chosen with SLOPE_SPREAD).
GRAD_WEIGHT, GRAD_WEIGHT_FEW = 0.1, 20
# A part of the step this much shorter than the shortest step is zero: no clock sees it.
_LEAST_SHARE = 1e-7
_SLOPES = ((2, 3), (4, 5))


class Problem:
    """Least squares by the logarithms of the unknowns: the seven parameters of one device, or ``2 d + 5`` of d devices.

    ``index`` (d, 7) tells where the parameters of each device stand among the unknowns; ``free`` (u,) which unknowns the
    rows speak about; ``low`` and ``high`` (u,) bound the logarithms. ``groups``: the rows as grouped before.
    """

    def __init__(
        self,
        devices: Sequence[Observations],
        *,
        slope_weight: float = 0.0,
        slope_scale: float = 1.0,
        grad_weight: float | None = None,
        groups: Sequence[Grouped] | None = None,
    ) -> None:
        self.groups = [group(rows) for rows in devices] if groups is None else list(groups)
        count = len(self.groups)
        shared = np.arange(2 * count, 2 * count + 5)
        self.index = np.stack([np.concatenate([[2 * i, 2 * i + 1], shared]) for i in range(count)])
        self.gamma = 2 * count + 4
        self.slope_weight, self.slope_scale = slope_weight, slope_scale
        configurations = sum(len(item.nodes) for item in self.groups)
        usual = min(max(GRAD_WEIGHT, GRAD_WEIGHT_FEW / configurations), 1.0)
        self.grad_weight = usual if grad_weight is None else grad_weight
        self.rows = float(sum(item.steps.sum() for item in self.groups))
        self.grads = float(sum(item.grads.sum() for item in self.groups))
        self.placements = sum(item.placements for item in self.groups)
        self.free = self._free()
        self.low, self.high = self._bounds()

    def _free(self) -> Mask:
        free = np.zeros(self.gamma + 1, dtype=bool)
        for index, item in zip(self.index, self.groups, strict=True):
            local, across = item.shared & (item.nodes <= 1), item.shared & (item.nodes > 1)
            more = item.replicas > 2
            spoken = (
                True,
                bool((item.batch != item.batch[0]).any()),
                local.any(),
                (local & more).any(),
                across.any(),
                (across & more).any(),
                item.shared.any(),
            )
            free[index] |= np.array(spoken)
        return free

    def _bounds(self) -> tuple[Array, Array]:
        low, high = np.zeros(self.gamma + 1), np.zeros(self.gamma + 1)
        shortest = min(self._shortest(item) for item in self.groups)
        longest = max(float(item.log_step.max()) for item in self.groups)
        low[:] = shortest + np.log(_LEAST_SHARE)
        high[:] = longest + np.log(10.0)
        for index, item in zip(self.index, self.groups, strict=True):
            low[index[1]] -= np.log(item.batch.max())
        more = np.log(max(max(float(item.replicas.max()) for item in self.groups) - 2.0, 1.0))
        low[self.index[0][[3, 5]]] -= more
        low[self.gamma], high[self.gamma] = 0.0, np.log(10.0)
        return low, high

    @staticmethod
    def _shortest(item: Grouped) -> float:
        grads = item.log_grad[item.grads > 0]
        return float(min(item.log_step.min(), grads.min() if grads.size else np.inf))

    def start(self, gamma: float, growth: float = 0.1) -> Array:
        """Return a start from the data: a line through T_grad, synchronisation from what the step takes longer.

        ``growth``: the slope of synchronisation as a share of its intercept.
        """
        made = np.zeros(self.gamma + 1)
        waits: list[tuple[Array, Mask]] = []
        for index, item in zip(self.index, self.groups, strict=True):
            step = np.exp(item.log_step)
            grad = np.where(item.grads > 0, np.exp(item.log_grad), step / (item.passes + 1.0))
            intercept, slope = _line(item.batch, grad)
            floor = 0.01 * float(np.median(grad))
            made[index[0]], made[index[1]] = max(intercept, floor), max(slope, floor / float(item.batch.max()))
            waits.append((np.maximum(step - (item.passes + 1.0) * grad, floor), item.nodes > 1))
        for place, across in ((2, False), (4, True)):
            chosen = [
                wait[item.shared & (nodes == across)] for item, (wait, nodes) in zip(self.groups, waits, strict=True)
            ]
            every = np.concatenate(chosen)
            typical = float(np.median(every)) if every.size else 1.0
            made[self.index[0][place]], made[self.index[0][place + 1]] = typical, growth * typical
        made[self.gamma] = gamma
        start: Array = np.where(self.free, np.clip(np.log(made), self.low, self.high), 0.0)
        return start

    def start_from(self, params: Sequence[ThroughputParams]) -> Array:
        """Return the point of given parameters. A zero has no logarithm and near it nothing moves: a small value instead."""
        small = np.exp(self.start(2.0)) * 1e-3
        values = small.copy()
        for index, item in zip(self.index, params, strict=True):
            known = np.array([getattr(item, name) for name in NAMES])
            values[index] = np.where(known > 0, known, small[index])
        made: Array = np.where(self.free, np.clip(np.log(values), self.low, self.high), 0.0)
        return made

    def values(self, point: Array) -> Array:
        """Return all unknowns at a point; those that are not free have their priors: 0, and 1 for gamma."""
        made: Array = np.where(self.free, np.exp(point), 0.0)
        if not self.free[self.gamma]:
            made[self.gamma] = 1.0
        return made

    def params(self, point: Array) -> tuple[ThroughputParams, ...]:
        """Return the parameters of each device at a point; a time at the lower bound is zero."""
        values = self.values(point)
        nothing = point <= self.low + 0.01
        nothing[self.gamma] = False
        values[nothing] = 0.0
        values[self.gamma] = min(max(values[self.gamma], 1.0), 10.0)
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
            step_weight, grad_weight = np.sqrt(item.steps / self.rows), np.sqrt(grad_share * item.grads)
            errors += [step_weight * (log_step - item.log_step), grad_weight * (log_grad - item.log_grad)]
            jacobian = np.zeros((2 * len(log_step), len(values)))
            jacobian[: len(log_step), index] = step_weight[:, None] * by_step
            jacobian[len(log_step) :, index] = grad_weight[:, None] * by_grad
            slopes.append(jacobian)
        pull, by_pull = self._pull(values)
        return np.concatenate([*errors, pull]), np.concatenate([*slopes, by_pull])

    def _pull(self, values: Array) -> tuple[Array, Array]:
        """Return the residuals of the prior on the slopes and their Jacobian.

        Cauchy: their squares are ``slope_weight log(1 + q^2)`` with q = beta / alpha over :attr:`slope_scale`.
        """
        pull, jacobian = np.zeros(2), np.zeros((2, len(values)))
        for place, (alpha, beta) in enumerate(self.index[0][list(pair)] for pair in _SLOPES):
            if self.free[beta] and self.slope_weight > 0:
                square = (values[beta] / values[alpha] / self.slope_scale) ** 2
                root = np.sqrt(np.log1p(square))
                pull[place] = np.sqrt(self.slope_weight) * root
                slope = np.sqrt(self.slope_weight) * (square / (1.0 + square) / root if root > 0 else 0.0)
                jacobian[place, beta], jacobian[place, alpha] = slope, -slope
        return pull, jacobian

    def step_errors(self, point: Array) -> list[Array]:
        """Return, per device, predicted less observed log step time of each configuration, shape (g,)."""
        values = self.values(point)
        return [
            log_times(values[index], item.nodes, item.replicas, item.batch, item.passes)[1] - item.log_step
            for index, item in zip(self.index, self.groups, strict=True)
        ]

    def step_squares(self, point: Array) -> float:
        """Return the sum over all rows of the squared log error of the step."""
        found = 0.0
        for errors, item in zip(self.step_errors(point), self.groups, strict=True):
            found += float(item.steps @ errors**2) + item.within
        return found


def _line(batch: Array, times: Array) -> tuple[float, float]:
    """Return intercept and slope of the line with the least relative squared error; slope 0 for one batch size."""
    weight = 1.0 / times**2
    weight = weight / weight.sum()
    mean_batch, mean_time = float(weight @ batch), float(weight @ times)
    spread = float(weight @ (batch - mean_batch) ** 2)
    slope = float(weight @ ((batch - mean_batch) * (times - mean_time))) / spread if spread > 0 else 0.0
    return mean_time - slope * mean_batch, slope


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
    point = start.copy()
    errors, jacobian = problem.residuals(point)
    loss, damping = float(errors @ errors), 1e-3
    for _ in range(steps):
        slope = jacobian.T @ errors
        stuck = ((point <= problem.low) & (slope > 0)) | ((point >= problem.high) & (slope < 0))
        index = np.flatnonzero(moving & ~stuck)
        if not index.size or float(np.abs(slope[index]).max()) <= 1e-14 * max(loss, 1e-16):
            return Descent(point=point, loss=loss, converged=True)
        moved_by = jacobian[:, index]
        normal = moved_by.T @ moved_by
        normal.flat[:: len(index) + 1] *= 1.0 + damping
        normal.flat[:: len(index) + 1] += 1e-14
        step = np.linalg.solve(normal, -slope[index])
        tried = point.copy()
        tried[index] = np.clip(point[index] + np.clip(step, -3.0, 3.0), problem.low[index], problem.high[index])
        new_errors, new_jacobian = problem.residuals(tried)
        new_loss = float(new_errors @ new_errors)
        if new_loss <= loss:
            gained, moved = loss - new_loss, float(np.abs(tried - point).max())
            point, errors, jacobian, loss = tried, new_errors, new_jacobian, new_loss
            damping = max(damping * 0.2, 1e-12)
            if gained <= max(1e-12 * loss, 1e-16) or moved < 1e-10:
                return Descent(point=point, loss=loss, converged=True)
        else:
            damping *= 6.0
            if damping > 1e10:  # not even a tiny step against the gradient helps: the rounding floor
                return Descent(point=point, loss=loss, converged=True)
    # rows explained to a 1e-5th are explained, though some direction may be nearly flat
    return Descent(point=point, loss=loss, converged=loss < 1e-10)
