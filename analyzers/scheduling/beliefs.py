"""What is believed of an application's speed: step times seen per GPU type, and the throughput model fitted to them.

Every job has its own beliefs, as in Pollux, unless a policy pools them: then jobs of the same application share one
object, and a new job starts from what earlier ones have seen.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.scheduling.estimate import Profile, fit, predict_step

Floats = NDArray[np.float64]
Configuration = tuple[int, int, int]
"""Nodes, replicas, local batch size in samples."""


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
