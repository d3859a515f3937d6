"""What a running job believes: a throughput model (Pollux, section 3.2) fitted to what it has seen so far.

The fit is :func:`ddltool.analyzers.goodput.fit.refit`. What was never seen is taken as in the published simulator, which
decides how a job explores: half of ``T_grad`` is constant while one batch size was seen; synchronisation within a node
never seen is nothing, and across nodes never seen it is 1.1 times that within. Every job has its own :class:`Beliefs`, as
in Pollux, unless a policy pools them: then jobs of the same application share one object, and a new job starts from what
earlier ones have seen.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.goodput.fit import predict, refit
from ddltool.analyzers.goodput.observations import Observations
from ddltool.analyzers.goodput.tuning import BatchLimits, Tuned, tune
from ddltool.goodput_model import ThroughputParams

Floats = NDArray[np.float64]
_EPSILON = 1e-8
# A model is fitted anew when a new (nodes, replicas) was seen or the rows have grown by this share: more say little more.
_GROWTH = 0.25
Configuration = tuple[int, int, int]
"""Nodes, replicas, local batch size in samples."""


Seen = tuple[tuple[Configuration, tuple[float, float]], ...]
"""Configurations in the order in which they were first seen, and their (step, sync) seconds."""


def observations(seen: Seen) -> Observations:
    """Return what was seen as rows of a fit."""
    at, times = (np.array(part, dtype=np.float64).T for part in zip(*seen, strict=True))
    return Observations(
        num_nodes=at[0],
        num_replicas=at[1],
        local_batch_size=at[2],
        step_time_s=times[0],
        grad_time_s=times[0] - times[1],
    )


@lru_cache(maxsize=1024)  # jobs of one application begin alike
def fit(seen: Seen, before: ThroughputParams | None = None) -> ThroughputParams:
    """Return the model fitted to what was seen, the rest as the published simulator takes it; ``before``: the last one."""
    rows = observations(seen)
    found = refit(rows, before).model_dump()
    if (rows.local_batch_size == rows.local_batch_size[0]).all():
        half = (found["alpha_grad_s"] + found["beta_grad_s"] * float(rows.local_batch_size[0])) / 2
        found["alpha_grad_s"], found["beta_grad_s"] = half, half / float(rows.local_batch_size[0])
    if not (rows.num_nodes > 1).any():
        for name in ("alpha", "beta"):
            found[f"{name}_sync_node_s"] = 1.1 * found[f"{name}_sync_local_s"]
    return ThroughputParams.model_construct(**found)


@lru_cache(maxsize=4096)  # noise scales go to and fro, and jobs of one application believe the same at first
def best_batches(model: ThroughputParams, limits: BatchLimits, noise_scale: float, widest: int) -> Tuned:
    """Return the best batches on 1 to ``widest`` replicas, within a node and then across nodes."""
    replicas = np.arange(1, widest + 1)
    nodes = np.concatenate([np.ones_like(replicas), np.minimum(replicas, 2)])
    return tune(model, nodes, np.concatenate([replicas, replicas]), limits, noise_scale=noise_scale)


def split_batch(batch_size: int, replicas: int, limits: BatchLimits) -> tuple[int, int]:
    """Return local batch and accumulation steps of a given total batch size, as the published simulator splits it."""
    local = -int(-(batch_size / replicas - _EPSILON) // 1)
    steps = -int(-(local / limits.max_local_batch_size - _EPSILON) // 1) - 1
    if replicas == 1 and batch_size > limits.initial_batch_size:
        steps = max(1, steps)
    return -int(-(local / (steps + 1) - _EPSILON) // 1), steps


class Beliefs:
    """Step times seen so far, by GPU type and configuration, and one fitted throughput model per type.

    ``pooled``: shared by the jobs of an application.
    """

    def __init__(self, *, pooled: bool = False) -> None:
        self.pooled = pooled
        self.grads: dict[int, tuple[float, float]] = {}
        """Squared norm and variance of the gradient last seen in each epoch; kept when pooled."""
        self._seen: dict[str, dict[Configuration, tuple[float, float]]] = {}
        self._models: dict[str, ThroughputParams] = {}
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

    def model(self, gpu_type: str) -> ThroughputParams:
        """Return the model fitted to what was seen on this type; something must have been."""
        seen, before = self._seen[gpu_type], self._fitted_at.get(gpu_type)
        state = len(seen), len(self._shapes[gpu_type])
        if before is None or state[1] != before[1] or state[0] > (1 + _GROWTH) * before[0]:
            rows = tuple(seen.items())
            self._models[gpu_type] = fit(rows, self._models.get(gpu_type))
            if self.pooled:
                self._errors[gpu_type] = _errors(observations(rows), self._models[gpu_type])
            self._fitted_at[gpu_type] = state
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


def _errors(rows: Observations, model: ThroughputParams) -> tuple[tuple[Floats, Floats], ...]:
    """Return, within and across nodes, log replicas and the mean log of predicted over measured step time."""
    error = np.log(predict(model, rows) / rows.step_time_s)
    made = []
    for across in (False, True):
        chosen = (rows.num_nodes > 1) == across
        replicas, inverse = np.unique(rows.num_replicas[chosen], return_inverse=True)
        counts = np.maximum(np.bincount(inverse, minlength=len(replicas)), 1)
        made.append((np.log(replicas), np.bincount(inverse, error[chosen], minlength=len(replicas)) / counts))
    return tuple(made)
