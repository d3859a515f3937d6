"""Pollux's throughput model (section 3.2): how long a step takes on K replicas over N nodes.

``T_grad(m) = alpha_grad + beta_grad m``; ``T_sync`` is 0 for one replica, ``alpha_local + beta_local (K - 2)`` on one node
and ``alpha_node + beta_node (K - 2)`` across nodes; ``T_iter = s T_grad + (T_grad^g + T_sync^g)^(1/g)`` with s accumulation
steps before the synchronising one. The power is evaluated in log space, where it cannot overflow.

All functions broadcast over numpy arrays and return an array, or a float for scalars. Times in seconds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddltool.arrays import Floats
from ddltool.goodput_model import ThroughputParams as ThroughputParams

_TINY = 1e-300
NAMES = tuple(ThroughputParams.model_fields)


def _shaped(value: Floats, *inputs: ArrayLike) -> Floats | float:
    """Return ``value`` as a float when every input was a scalar, else as it is."""
    return float(value) if all(np.ndim(item) == 0 for item in inputs) else value


def grad_time_s(params: ThroughputParams, local_batch_size: ArrayLike) -> Floats | float:
    """Return the time of one forward and backward pass over ``local_batch_size`` samples."""
    seconds = params.alpha_grad_s + params.beta_grad_s * np.asarray(local_batch_size, dtype=np.float64)
    return _shaped(seconds, local_batch_size)


def sync_time_s(params: ThroughputParams, num_nodes: ArrayLike, num_replicas: ArrayLike) -> Floats | float:
    """Return the time of one gradient synchronisation."""
    nodes, replicas = np.broadcast_arrays(np.asarray(num_nodes), np.asarray(num_replicas))
    beyond_two = np.maximum(replicas - 2, 0)
    local = params.alpha_sync_local_s + params.beta_sync_local_s * beyond_two
    across = params.alpha_sync_node_s + params.beta_sync_node_s * beyond_two
    seconds = np.where(replicas <= 1, 0.0, np.where(nodes <= 1, local, across))
    return _shaped(seconds, num_nodes, num_replicas)


def overlapped(first: ArrayLike, second: ArrayLike, gamma: float) -> Floats:
    """Return ``(first^gamma + second^gamma)^(1/gamma)`` for times >= 0, without overflow, exact when one is 0."""
    first_s, second_s = np.broadcast_arrays(np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64))
    with np.errstate(divide="ignore"):
        logs = np.logaddexp(gamma * np.log(first_s), gamma * np.log(second_s)) / gamma
    return np.where(second_s == 0, first_s, np.where(first_s == 0, second_s, np.exp(logs)))


def iteration_time_s(
    params: ThroughputParams,
    num_nodes: ArrayLike,
    num_replicas: ArrayLike,
    local_batch_size: ArrayLike,
    accumulation_steps: ArrayLike = 0,
) -> Floats | float:
    """Return the time of one step (optimizer update); ``accumulation_steps`` s = 0 means none."""
    grad = np.asarray(grad_time_s(params, local_batch_size))
    sync = np.asarray(sync_time_s(params, num_nodes, num_replicas))
    seconds = np.asarray(accumulation_steps) * grad + overlapped(grad, sync, params.gamma)
    return _shaped(seconds, num_nodes, num_replicas, local_batch_size, accumulation_steps)


def throughput_per_s(
    params: ThroughputParams,
    num_nodes: ArrayLike,
    num_replicas: ArrayLike,
    local_batch_size: ArrayLike,
    accumulation_steps: ArrayLike = 0,
) -> Floats | float:
    """Return samples per second: total batch ``K m (s + 1)`` over the step time."""
    total = np.asarray(num_replicas) * np.asarray(local_batch_size) * (np.asarray(accumulation_steps) + 1.0)
    step = iteration_time_s(params, num_nodes, num_replicas, local_batch_size, accumulation_steps)
    return _shaped(total / step, num_nodes, num_replicas, local_batch_size, accumulation_steps)


def efficiency(noise_scale: ArrayLike, total_batch_size: ArrayLike, initial_batch_size: ArrayLike) -> Floats | float:
    """Return the statistical efficiency ``(phi + M0) / (phi + M)`` (Pollux, Equation 7); phi in samples, may be infinite."""
    phi, total, initial = (
        np.asarray(item, dtype=np.float64) for item in (noise_scale, total_batch_size, initial_batch_size)
    )
    finite_phi = np.where(np.isinf(phi), 0.0, phi)
    shares = np.where(np.isinf(phi), 1.0, (finite_phi + initial) / (finite_phi + total))
    return _shaped(shares, noise_scale, total_batch_size, initial_batch_size)


def goodput_per_s(
    params: ThroughputParams,
    num_nodes: ArrayLike,
    num_replicas: ArrayLike,
    local_batch_size: ArrayLike,
    accumulation_steps: ArrayLike = 0,
    *,
    noise_scale: ArrayLike,
    initial_batch_size: ArrayLike,
) -> Floats | float:
    """Return goodput: throughput times statistical efficiency, in useful samples per second."""
    total = np.asarray(num_replicas) * np.asarray(local_batch_size) * (np.asarray(accumulation_steps) + 1.0)
    speed = throughput_per_s(params, num_nodes, num_replicas, local_batch_size, accumulation_steps)
    useful_per_s = np.asarray(speed) * efficiency(noise_scale, total, initial_batch_size)
    return _shaped(
        useful_per_s, num_nodes, num_replicas, local_batch_size, accumulation_steps, noise_scale, initial_batch_size
    )


def log_times(
    values: Floats, nodes: NDArray[Any], replicas: NDArray[Any], batch: NDArray[Any], passes: Floats | float = 0.0
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return log T_grad, log T_iter, both of shape (n,), and their Jacobians of shape (n, 7).

    ``values`` are the seven parameters in the order of :data:`NAMES`; ``nodes``, ``replicas``, ``batch`` and ``passes``
    (accumulation steps s, default none) have shape (n,). The Jacobians are by the logarithms of the parameters (times Pollux,
    Equations 9 to 11).
    """
    a_grad, b_grad, a_local, b_local, a_node, b_node, gamma = values
    beyond_two = np.maximum(replicas - 2.0, 0.0)
    shared = replicas > 1
    is_local, is_across = shared & (nodes <= 1), shared & (nodes > 1)
    grad_s = np.maximum(a_grad + b_grad * batch, _TINY)
    sync_s = np.where(is_local, a_local + b_local * beyond_two, np.where(is_across, a_node + b_node * beyond_two, 0.0))
    last_pass_s = np.maximum(overlapped(grad_s, sync_s, gamma), _TINY)
    log_grad, log_sync, log_last_pass = np.log(grad_s), np.log(np.maximum(sync_s, _TINY)), np.log(last_pass_s)
    step_s = passes * grad_s + last_pass_s
    last_share = last_pass_s / step_s  # share of the synchronising pass in the step
    grad_share = np.exp(gamma * (log_grad - log_last_pass))  # d log(last pass) / d log T_grad
    sync_slope = np.where(sync_s > 0, last_share * (1.0 - grad_share) / np.maximum(sync_s, _TINY), 0.0)
    grad_slopes = np.zeros((len(batch), 7))
    grad_slopes[:, 0], grad_slopes[:, 1] = a_grad / grad_s, b_grad * batch / grad_s
    step_slopes = grad_slopes * (grad_share * last_share + passes * grad_s / step_s)[:, None]
    step_slopes[:, 2], step_slopes[:, 3] = sync_slope * is_local * a_local, sync_slope * is_local * b_local * beyond_two
    step_slopes[:, 4], step_slopes[:, 5] = sync_slope * is_across * a_node, sync_slope * is_across * b_node * beyond_two
    log_mean = grad_share * log_grad + (1.0 - grad_share) * log_sync
    step_slopes[:, 6] = np.where(sync_s > 0, last_share * (log_mean - log_last_pass), 0.0)
    return log_grad, np.log(step_s), grad_slopes, step_slopes
