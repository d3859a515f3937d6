"""Pollux's throughput model (section 3.2): how long a step takes on K replicas over N nodes.

``T_grad(m) = alpha_grad + beta_grad m``; ``T_sync`` is 0 for one replica, ``alpha_local + beta_local (K - 2)`` on one node
and ``alpha_node + beta_node (K - 2)`` across nodes; ``T_iter = s T_grad + (T_grad^g + T_sync^g)^(1/g)`` with s accumulation
steps before the synchronising one. The power is evaluated in log space, where it cannot overflow.

All functions broadcast over numpy arrays and return an array, or a float for scalars. Times in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddltool.errors import InputError

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ThroughputParams:
    """The seven parameters; seconds, seconds per sample, seconds per further replica, and the overlap exponent."""

    alpha_grad_s: float
    beta_grad_s: float
    alpha_sync_local_s: float
    beta_sync_local_s: float
    alpha_sync_node_s: float
    beta_sync_node_s: float
    gamma: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "gamma" and not 1 <= value <= 10:
                raise InputError("gamma", f"is {value}", "the overlap exponent lies between 1 and 10")
            if not (math.isfinite(value) and value >= 0):
                raise InputError(field.name, f"is {value}", "it must be finite and >= 0")

    def as_dict(self) -> dict[str, float]:
        """Return the parameters by name."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, float]) -> ThroughputParams:
        """Return the parameters from a mapping that names all seven."""
        return cls(**values)


def _shaped(value: Array, *inputs: ArrayLike) -> Array | float:
    """Return a float when every input was a scalar."""
    return float(value) if all(np.ndim(item) == 0 for item in inputs) else value


def grad_time_s(params: ThroughputParams, local_batch_size: ArrayLike) -> Array | float:
    """Return the time of one forward and backward pass over ``local_batch_size`` samples."""
    made = params.alpha_grad_s + params.beta_grad_s * np.asarray(local_batch_size, dtype=np.float64)
    return _shaped(made, local_batch_size)


def sync_time_s(params: ThroughputParams, num_nodes: ArrayLike, num_replicas: ArrayLike) -> Array | float:
    """Return the time of one gradient synchronisation."""
    nodes, replicas = np.broadcast_arrays(np.asarray(num_nodes), np.asarray(num_replicas))
    more = np.maximum(replicas - 2, 0)
    local = params.alpha_sync_local_s + params.beta_sync_local_s * more
    across = params.alpha_sync_node_s + params.beta_sync_node_s * more
    made = np.where(replicas <= 1, 0.0, np.where(nodes <= 1, local, across))
    return _shaped(made, num_nodes, num_replicas)


def overlapped(first: ArrayLike, second: ArrayLike, gamma: float) -> Array:
    """Return ``(first^gamma + second^gamma)^(1/gamma)`` for times >= 0, without overflow, exact when one is 0."""
    one, two = np.broadcast_arrays(np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64))
    with np.errstate(divide="ignore"):
        logs = np.logaddexp(gamma * np.log(one), gamma * np.log(two)) / gamma
    return np.where(two == 0, one, np.where(one == 0, two, np.exp(logs)))


def iteration_time_s(
    params: ThroughputParams,
    num_nodes: ArrayLike,
    num_replicas: ArrayLike,
    local_batch_size: ArrayLike,
    accumulation_steps: ArrayLike = 0,
) -> Array | float:
    """Return the time of one step (optimizer update); ``accumulation_steps`` s = 0 means none."""
    grad = np.asarray(grad_time_s(params, local_batch_size))
    sync = np.asarray(sync_time_s(params, num_nodes, num_replicas))
    made = np.asarray(accumulation_steps) * grad + overlapped(grad, sync, params.gamma)
    return _shaped(made, num_nodes, num_replicas, local_batch_size, accumulation_steps)


def throughput_per_s(
    params: ThroughputParams,
    num_nodes: ArrayLike,
    num_replicas: ArrayLike,
    local_batch_size: ArrayLike,
    accumulation_steps: ArrayLike = 0,
) -> Array | float:
    """Return samples per second: total batch ``K m (s + 1)`` over the step time."""
    total = np.asarray(num_replicas) * np.asarray(local_batch_size) * (np.asarray(accumulation_steps) + 1.0)
    step = iteration_time_s(params, num_nodes, num_replicas, local_batch_size, accumulation_steps)
    return _shaped(total / step, num_nodes, num_replicas, local_batch_size, accumulation_steps)


def efficiency(noise_scale: ArrayLike, total_batch_size: ArrayLike, initial_batch_size: ArrayLike) -> Array | float:
    """Return the statistical efficiency ``(phi + M0) / (phi + M)`` (Pollux, Equation 7); phi in samples."""
    phi, total, first = (
        np.asarray(item, dtype=np.float64) for item in (noise_scale, total_batch_size, initial_batch_size)
    )
    return _shaped((phi + first) / (phi + total), noise_scale, total_batch_size, initial_batch_size)


def goodput_per_s(
    params: ThroughputParams,
    num_nodes: ArrayLike,
    num_replicas: ArrayLike,
    local_batch_size: ArrayLike,
    accumulation_steps: ArrayLike = 0,
    *,
    noise_scale: ArrayLike,
    initial_batch_size: ArrayLike,
) -> Array | float:
    """Return goodput: throughput times statistical efficiency, in useful samples per second."""
    total = np.asarray(num_replicas) * np.asarray(local_batch_size) * (np.asarray(accumulation_steps) + 1.0)
    speed = throughput_per_s(params, num_nodes, num_replicas, local_batch_size, accumulation_steps)
    made = np.asarray(speed) * efficiency(noise_scale, total, initial_batch_size)
    return _shaped(made, num_nodes, num_replicas, local_batch_size, accumulation_steps, noise_scale, initial_batch_size)
