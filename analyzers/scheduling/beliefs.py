"""What a running job believes: a throughput model fitted to what it has seen so far, and the batch it tunes from it.

The model is Pollux's (section 3.2). The fit follows the published simulator's objective and priors, which decide how a
job explores: RMSLE of ``T_grad`` plus RMSLE of the step plus ``1e-3 (g - 1)^2 + 1e-2 ((b_n / a_n)^2 + (b_l / a_l)^2)``;
half of ``T_grad`` is constant while one batch size was seen; parameters of synchronisation never seen are nothing, and
across nodes never less than 1.1 times those within. A job is fitted thousands of times in one simulation, so the
minimum is found by Levenberg-Marquardt steps on reweighted squares, from the previous minimum.

Every job has its own :class:`Beliefs`, as in Pollux, unless a policy pools them: then jobs of the same application share
one object, and a new job starts from what earlier ones have seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_TINY = 1e-8
_GAMMA = 6
# Total batch sizes tried between the smallest and the largest, in equal ratios; the published simulator's number.
_CANDIDATES = 50
_SPREAD = np.linspace(0.0, 1.0, _CANDIDATES)[:, None]
_EPSILON = 1e-8
Configuration = tuple[int, int, int]
"""Nodes, replicas, local batch size in samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tunable:
    """Within which a job may choose its batch: samples."""

    init_batch_size: int
    max_batch_size: int
    min_local_batch_size: int
    max_local_batch_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """``n`` seen configurations, all (n,): nodes, replicas, local batch, accumulation and full step time in seconds."""

    num_nodes: Floats
    num_replicas: Floats
    local_batch_size: Floats
    grad_time_s: Floats
    step_time_s: Floats


def predict_step(values: Floats, profile: Profile) -> tuple[Floats, Floats]:
    """Return predicted ``T_grad`` and step time, (n,) each; ``values``: a_g, b_g, a_n, b_n, a_l, b_l, g."""
    grad = values[0] + values[1] * profile.local_batch_size
    several, across = profile.num_replicas > 1, profile.num_nodes > 1
    more = np.maximum(profile.num_replicas - 2, 0.0)
    sync = np.where(across, values[2] + values[3] * more, np.where(several, values[4] + values[5] * more, _TINY))
    return grad, _p_norm(grad, sync, values[_GAMMA])


def _p_norm(first: Floats, second: Floats, exponent: float | Floats) -> Floats:
    """Return ``(first^g + second^g)^(1/g)`` for positive times, without overflow."""
    large = np.maximum(first, second)
    made: Floats = large * (1.0 + (np.minimum(first, second) / large) ** exponent) ** (1.0 / exponent)
    return made


def fit(profile: Profile, previous: Floats | None = None) -> Floats:
    """Return a_g, b_g, a_n, b_n, a_l, b_l (seconds) and g, shape (7,), that minimise the objective.

    ``previous``: the last fit of the same job, a start beside the one from the data. Source: Pollux, section 4.1, and
    the published simulator's objective. O(n) per step, a few dozen steps.
    """
    problem = _Fit(profile)
    starts = [problem.start()]
    if previous is not None:
        starts.append(problem.adapt(previous))
    best = min(starts, key=lambda start: problem.evaluate(start).value)
    values = problem.descend(best)
    if not problem.across.any():
        # What was never seen across nodes is taken to be a little slower than within one.
        values[2] = max(values[2], 1.1 * values[4])
        values[3] = max(values[3], 1.1 * values[5])
    return values


class _Point(NamedTuple):
    """One evaluation: the objective, its parts (n,) each, and the root mean squares of both errors."""

    value: float
    grad: Floats
    sync: Floats
    log_g: Floats
    log_s: Floats
    both: Floats
    first: Floats
    second: Floats
    rms_1: float
    rms_2: float
    slopes: tuple[float, float]


class _Fit:
    """One fit: which parameters are free, and the descent over their logarithms (g: over ``g - 1``'s)."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        replicas, nodes = profile.num_replicas, profile.num_nodes
        self.across = nodes > 1
        self.local = (replicas > 1) & ~self.across
        more = np.maximum(replicas - 2, 0.0)
        self.across_more, self.local_more = self.across * more, self.local * more
        self.alone = np.where(replicas > 1, 0.0, _TINY)
        self.batch = profile.local_batch_size
        several = bool((profile.local_batch_size != profile.local_batch_size[0]).any())
        grows = bool((replicas > 2).any())
        across, local = bool(self.across.any()), bool(self.local.any())
        self.shared = across or local
        free = [several, True, across, across and grows, local, local and grows, self.shared]
        self.free = np.flatnonzero(free)
        self.fixed = np.full(7, _TINY)
        self.fixed[0] = float(profile.grad_time_s.mean()) / 2
        self.fixed[_GAMMA] = 1.0
        self.log_grad = np.log(profile.grad_time_s)
        self.log_step = np.log(profile.step_time_s)

    def start(self) -> Floats:
        """Return a start from the data: a line through ``T_grad``, synchronisation from what steps take longer."""
        profile = self.profile
        values = self.fixed.copy()
        batch, grad = profile.local_batch_size, profile.grad_time_s
        if 0 in self.free:
            low, high = int(batch.argmin()), int(batch.argmax())
            slope = max((grad[high] - grad[low]) / (batch[high] - batch[low]), 1e-3 * grad[high] / batch[high])
            values[1] = slope
            values[0] = max(float(np.mean(grad - slope * batch)), 1e-2 * float(grad.mean()))
        else:
            values[1] = (float(grad.mean()) - values[0]) / batch[0]
        longer = np.maximum(profile.step_time_s - grad, 1e-2 * grad)
        for rows, alpha in ((self.across, 2), (self.local, 4)):
            if alpha in self.free:
                values[alpha] = float(np.mean(longer[rows]))
                if alpha + 1 in self.free:
                    values[alpha + 1] = values[alpha] / 20
        if _GAMMA in self.free:
            values[_GAMMA] = 1.5
        return values

    def adapt(self, previous: Floats) -> Floats:
        """Return the last minimum, with a start from the data for what has become free since."""
        values = self.start()
        known = self.free[previous[self.free] > 10 * _TINY]
        values[known] = previous[known]
        if _GAMMA in self.free:
            values[_GAMMA] = max(values[_GAMMA], 1.05)
        return values

    def descend(self, values: Floats) -> Floats:
        """Return the minimum near ``values``."""
        at = self.evaluate(values)
        damping = 1e-3
        for _ in range(60):
            normal, slope = self.squares(values, at)
            diagonal = normal.diagonal() + 1e-12
            better = False
            while damping < 1e8 and not better:
                solved = np.linalg.solve(normal + np.diag(damping * diagonal), -slope)
                step = np.asarray(solved, dtype=np.float64)
                trial = self.move(values, step)
                found = self.evaluate(trial)
                better = found.value < at.value
                damping = max(damping / 10, 1e-9) if better else damping * 10
            if not better:
                break
            gained, at, values = at.value - found.value, found, trial
            if gained < 1e-6 * (1.0 + at.value):
                break
        return values

    def move(self, values: Floats, step: Floats) -> Floats:
        """Return ``values`` moved by ``step`` in the logarithms, at most threefold exponents, within the bounds."""
        moved = values.copy()
        factor = np.exp(np.minimum(np.maximum(step, -3.0), 3.0))
        moved[self.free] *= factor
        if self.shared:
            moved[_GAMMA] = min(1.0 + (values[_GAMMA] - 1.0 + _TINY) * factor[-1], 10.0)
        np.maximum(moved, _TINY, out=moved)
        return moved

    def evaluate(self, values: Floats) -> _Point:
        """Return the objective at ``values``, and what the next step needs of it."""
        a_g, b_g, a_n, b_n, a_l, b_l, gamma = values.tolist()
        grad = a_g + b_g * self.batch
        sync = self.alone + (a_n * self.across + b_n * self.across_more) + (a_l * self.local + b_l * self.local_more)
        log_g, log_s = np.log(grad), np.log(sync)
        both = np.maximum(log_g, log_s) + np.log1p(np.exp(-gamma * np.abs(log_g - log_s))) / gamma
        first, second = log_g - self.log_grad, both - self.log_step
        rms_1 = math.sqrt(float(first @ first) / len(first))
        rms_2 = math.sqrt(float(second @ second) / len(first))
        slopes = 0.1 * b_n / a_n, 0.1 * b_l / a_l
        value = rms_1 + rms_2 + 1e-3 * (gamma - 1.0) ** 2 + slopes[0] ** 2 + slopes[1] ** 2
        return _Point(value, grad, sync, log_g, log_s, both, first, second, rms_1, rms_2, slopes)

    def squares(self, values: Floats, at: _Point) -> tuple[Floats, Floats]:
        """Return the normal matrix (f, f) and half the gradient (f,) of the reweighted squares at ``values``.

        A root mean square r is replaced by ``mean(e^2) / (2 r)``, which has the same gradient.
        """
        a_g, b_g, a_n, b_n, a_l, b_l, gamma = values.tolist()
        n = len(self.batch)
        share = np.exp(gamma * (at.log_g - at.both))
        weight_1 = 1.0 / math.sqrt(2 * n * max(at.rms_1, 1e-3))
        weight_2 = 1.0 / math.sqrt(2 * n * max(at.rms_2, 1e-3))
        whole = np.zeros((7, 2 * n + 3))
        first, second = whole[:, :n], whole[:, n : 2 * n]
        np.divide(weight_1 * a_g, at.grad, out=first[0])
        np.multiply(self.batch, weight_1 * b_g / at.grad, out=first[1])
        second[:2] = first[:2] * (share * (weight_2 / weight_1))
        rest = weight_2 * (1 - share) / at.sync
        second[2], second[3] = (a_n * self.across) * rest, (b_n * self.across_more) * rest
        second[4], second[5] = (a_l * self.local) * rest, (b_l * self.local_more) * rest
        by_gamma = share * at.log_g + (1 - share) * at.log_s - at.both
        second[6] = by_gamma * (weight_2 * (gamma - 1.0 + _TINY) / gamma)
        slopes, pull = at.slopes, 1e-3**0.5 * (gamma - 1.0)
        whole[2:4, 2 * n], whole[4:6, 2 * n + 1] = (-slopes[0], slopes[0]), (-slopes[1], slopes[1])
        whole[_GAMMA, 2 * n + 2] = pull
        jacobian = whole[self.free]
        residual = np.concatenate([weight_1 * at.first, weight_2 * at.second, (*slopes, pull)])
        return jacobian @ jacobian.T, jacobian @ residual


def best_goodput(
    values: Floats, grad_sqr: float, grad_var: float, limits: Tunable, num_nodes: Floats, num_replicas: Floats
) -> tuple[Floats, NDArray[np.int64], NDArray[np.int64]]:
    """Return the best goodput (samples per second at M0's efficiency), local batch and accumulation steps, (c,) each.

    For each of ``c`` allocations (nodes, replicas): the best of 50 total batch sizes in equal ratios between the
    smallest (M0, or the smallest local batch on each replica) and the largest allowed; the local batch is split over
    accumulation steps when it exceeds the largest, and on one replica with a total above M0, where one more gradient
    is needed to tell its noise. Goodput is 0 where nothing is allowed. Source: Pollux, equations 6 to 11.
    """
    low = np.maximum(float(limits.init_batch_size), limits.min_local_batch_size * num_replicas)
    ratio = np.log(limits.max_batch_size / low)
    total = low * np.exp(_SPREAD * ratio)
    local = total / num_replicas
    steps = np.maximum(np.ceil(local / limits.max_local_batch_size - _EPSILON), 1.0) - 1
    noisy = (num_replicas == 1) & (local > limits.init_batch_size + _EPSILON)
    steps = np.where(noisy, np.maximum(steps, 1.0), steps)
    atomic = np.ceil(local / (steps + 1) - _EPSILON)
    total = num_replicas * atomic * (steps + 1)
    grad = values[0] + values[1] * atomic
    more = np.maximum(num_replicas - 2, 0.0)
    sync = np.where(
        num_nodes > 1,
        values[2] + values[3] * more,
        np.where(num_replicas > 1, values[4] + values[5] * more, _TINY),
    )
    step_time = steps * grad + _p_norm(grad, np.broadcast_to(sync, grad.shape), values[_GAMMA])
    scale = total / limits.init_batch_size
    efficiency = (grad_var + grad_sqr) / (grad_var / scale + grad_sqr) / scale
    allowed = (atomic >= limits.min_local_batch_size) & (atomic <= limits.max_local_batch_size)
    goodput = np.where(allowed, total / step_time * efficiency, 0.0)
    best = goodput.argmax(axis=0)
    at = np.arange(goodput.shape[1])
    return goodput[best, at], atomic[best, at].astype(np.int64), steps[best, at].astype(np.int64)


def split_batch(batch_size: int, replicas: int, limits: Tunable) -> tuple[int, int]:
    """Return local batch and accumulation steps of a given total batch size, as the published simulator splits it."""
    local = -int(-(batch_size / replicas - _EPSILON) // 1)
    steps = -int(-(local / limits.max_local_batch_size - _EPSILON) // 1) - 1
    if replicas == 1 and batch_size > limits.init_batch_size:
        steps = max(1, steps)
    return -int(-(local / (steps + 1) - _EPSILON) // 1), steps


class Beliefs:
    """Step times seen so far, by GPU type and configuration, and one fitted throughput model per type.

    ``pooled``: shared by the jobs of an application. Then it is fitted again only when a new (nodes, replicas) was seen
    or the rows have grown by an eighth: hundreds of jobs add thousands of rows that say little more.
    """

    def __init__(self, *, pooled: bool = False) -> None:
        self.pooled = pooled
        self.version = 0
        """Grows with each new fit: what was derived from older models is stale."""
        self.grads: dict[int, tuple[float, float]] = {}
        """Squared norm and variance of the gradient last seen in each epoch; kept when pooled."""
        self._seen: dict[str, dict[Configuration, tuple[float, float]]] = {}
        self._models: dict[str, Floats] = {}
        self._fitted_at: dict[str, tuple[int, int]] = {}
        self._errors: dict[str, tuple[tuple[Floats, Floats], ...]] = {}
        self._shapes: dict[str, set[tuple[int, int]]] = {}

    def observe(self, gpu_type: str, at: Configuration, times: tuple[float, float]) -> None:
        """Take note of (step, sync) seconds of a configuration."""
        seen = self._seen.setdefault(gpu_type, {})
        if at not in seen:
            seen[at] = times
            self._shapes.setdefault(gpu_type, set()).add(at[:2])

    def knows(self, gpu_type: str, at: Configuration) -> bool:
        """Return whether this configuration was seen."""
        return at in self._seen.get(gpu_type, {})

    @property
    def most_replicas(self) -> int:
        """The most replicas seen on any type, 0 before the first."""
        return max((replicas for shapes in self._shapes.values() for _, replicas in shapes), default=0)

    @property
    def types(self) -> tuple[str, ...]:
        """GPU types seen, the one with the most configurations first."""
        return tuple(sorted(self._shapes, key=lambda name: (-len(self._shapes[name]), name)))

    def has_run_across(self, gpu_type: str) -> bool:
        """Return whether more than one replica was seen on this type."""
        return any(replicas > 1 for _, replicas in self._shapes.get(gpu_type, ()))

    def model(self, gpu_type: str) -> Floats:
        """Return the model (7,) fitted to what was seen on this type; something must have been."""
        seen = self._seen[gpu_type]
        state = len(seen), len(self._shapes[gpu_type])
        before = self._fitted_at.get(gpu_type)
        new = before is None or state[0] != before[0]
        if self.pooled and before is not None:
            new = state[1] != before[1] or state[0] > 1.125 * before[0]
        if new:
            at = np.array(list(seen), dtype=np.float64)
            times = np.array(list(seen.values()))
            profile = Profile(
                num_nodes=at[:, 0],
                num_replicas=at[:, 1],
                local_batch_size=at[:, 2],
                grad_time_s=times[:, 0] - times[:, 1],
                step_time_s=times[:, 0],
            )
            self._models[gpu_type] = fit(profile, self._models.get(gpu_type))
            self._errors[gpu_type] = _errors(profile, self._models[gpu_type])
            self._fitted_at[gpu_type] = state
            self.version += 1
        return self._models[gpu_type]

    def correction(self, gpu_type: str, most: int) -> Floats:
        """Return by how much faster than the model (2, most + 1) replicas were seen to be; call :meth:`model` first.

        Row 0 within a node, row 1 across nodes: predicted over measured step time, the geometric mean over what was
        seen on that many replicas, interpolated between replicas, 1 before any. The model has seven parameters; on
        some counts every job of an application is slower than it says, and only then GPUs go where they bring nothing.
        """
        made = np.ones((2, most + 1))
        for row, (replicas, error) in enumerate(self._errors[gpu_type]):
            if len(replicas):
                made[row] = np.exp(np.interp(np.log(np.maximum(np.arange(most + 1), 1.0)), replicas, error))
        return made


def _errors(profile: Profile, model: Floats) -> tuple[tuple[Floats, Floats], ...]:
    """Return, within and across nodes, log replicas and the mean log of predicted over measured step time."""
    error = np.log(predict_step(model, profile)[1] / profile.step_time_s)
    made = []
    for across in (False, True):
        rows = (profile.num_nodes > 1) == across
        replicas, inverse = np.unique(profile.num_replicas[rows], return_inverse=True)
        counts = np.maximum(np.bincount(inverse, minlength=len(replicas)), 1)
        made.append((np.log(replicas), np.bincount(inverse, error[rows], minlength=len(replicas)) / counts))
    return tuple(made)
