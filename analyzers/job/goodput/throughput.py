"""Pollux's throughput model (section 3.2): how long a step takes on K replicas over N nodes.

``T_grad(m) = alpha_grad + beta_grad m``; ``T_sync`` is 0 for one replica, ``alpha_local + beta_local (K - 2)`` on one node
and ``alpha_node + beta_node (K - 2)`` across nodes; ``T_iter = s T_grad + (T_grad^g + T_sync^g)^(1/g)`` with s accumulation
steps before the synchronising one. The power is evaluated in log space, where it cannot overflow.

All functions broadcast over numpy arrays and return an array, or a float for scalars. Times in seconds.

:class:`StepTime` is THE model of a device's seconds over batch size that planners share;
:class:`~ddltool.analyzers.job.balancing.minmax.DeviceCurves` is the same of several types at once, as arrays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddltool.arrays import Floats
from ddltool.device import DEVICES_PER_NODE
from ddltool.goodput_model import ThroughputParams as ThroughputParams

# Stands for a time of 0 where a logarithm is taken.
_TINY = 1e-300
# The seven parameters' names, in the order of all arrays of parameters.
NAMES = tuple(ThroughputParams.model_fields)


def _shaped(value: Floats, *inputs: ArrayLike) -> Floats | float:
    """Return ``value`` as a float when all ``inputs`` that it was computed from are scalars, else unchanged."""
    return float(value) if all(np.ndim(item) == 0 for item in inputs) else value


def grad_time_s(params: ThroughputParams, local_batch_size: ArrayLike) -> Floats | float:
    """Return the seconds of one forward and backward pass over ``local_batch_size`` samples (T_grad)."""
    seconds = params.alpha_grad_s + params.beta_grad_s * np.asarray(local_batch_size, dtype=np.float64)
    return _shaped(seconds, local_batch_size)


def sync_time_s(params: ThroughputParams, num_nodes: ArrayLike, num_replicas: ArrayLike) -> Floats | float:
    """Return the seconds of one gradient synchronisation between ``num_replicas`` on ``num_nodes`` (T_sync).

    It is 0 for one replica, else linear in the replicas beyond two, with other parameters within a node than across nodes.
    """
    nodes, replicas = np.broadcast_arrays(np.asarray(num_nodes), np.asarray(num_replicas))
    beyond_two = np.maximum(replicas - 2, 0)
    local_s = params.alpha_sync_local_s + params.beta_sync_local_s * beyond_two
    across_s = params.alpha_sync_node_s + params.beta_sync_node_s * beyond_two
    seconds = np.where(replicas <= 1, 0.0, np.where(nodes <= 1, local_s, across_s))
    return _shaped(seconds, num_nodes, num_replicas)


def overlapped(first: ArrayLike, second: ArrayLike, gamma: float) -> Floats:
    """Return the seconds of two activities that overlap in part: ``(first^gamma + second^gamma)^(1/gamma)``.

    ``first`` and ``second`` are seconds of 0 or more. gamma = 1 means no overlap: the sum. The larger gamma is, the more the
    longer time hides the shorter one, up to the maximum. The result never overflows and is exact where one time is 0.
    """
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
    """Return the seconds of one step, from one optimizer update to the next (T_iter).

    ``local_batch_size``: samples of a replica in one pass; ``accumulation_steps`` passes precede the one that synchronises.
    """
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
    """Return samples per second: the total batch over the step time.

    The total batch is replicas times local batch times passes; there are ``accumulation_steps + 1`` passes.
    """
    total = np.asarray(num_replicas) * np.asarray(local_batch_size) * (np.asarray(accumulation_steps) + 1.0)
    step = iteration_time_s(params, num_nodes, num_replicas, local_batch_size, accumulation_steps)
    return _shaped(total / step, num_nodes, num_replicas, local_batch_size, accumulation_steps)


def efficiency(noise_scale: ArrayLike, total_batch_size: ArrayLike, initial_batch_size: ArrayLike) -> Floats | float:
    """Return the statistical efficiency ``(phi + M0) / (phi + M)``: progress per sample over that with batches of M0.

    phi is the noise scale in samples; where it is infinite, batches of any size make the same progress per sample (efficiency
    1). M is the total batch and M0 the initial one (Pollux, Equation 7).
    """
    phi, total, first = (
        np.asarray(item, dtype=np.float64) for item in (noise_scale, total_batch_size, initial_batch_size)
    )
    finite = np.where(np.isinf(phi), 0.0, phi)
    share = np.where(np.isinf(phi), 1.0, (finite + first) / (finite + total))
    return _shaped(share, noise_scale, total_batch_size, initial_batch_size)


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
    """Return goodput, in useful samples per second: throughput times statistical efficiency.

    Args:
        params: the fitted throughput model.
        num_nodes: number of nodes; ``num_replicas``: number of replicas on all of them.
        local_batch_size: samples of a replica in one pass.
        accumulation_steps: passes before the one that synchronises.
        noise_scale: phi in samples; infinite: efficiency is 1.
        initial_batch_size: M0, the total batch at which efficiency is 1, in samples.
    """
    total = np.asarray(num_replicas) * np.asarray(local_batch_size) * (np.asarray(accumulation_steps) + 1.0)
    speed = throughput_per_s(params, num_nodes, num_replicas, local_batch_size, accumulation_steps)
    goodput = np.asarray(speed) * efficiency(noise_scale, total, initial_batch_size)
    return _shaped(
        goodput, num_nodes, num_replicas, local_batch_size, accumulation_steps, noise_scale, initial_batch_size
    )


def log_times(
    values: Floats, nodes: NDArray[Any], replicas: NDArray[Any], batch: NDArray[Any], passes: Floats | float = 0.0
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return (log T_grad, log T_iter, Jacobian of the first, Jacobian of the second): (n,), (n,), (n, 7) and (n, 7).

    ``values`` are the seven parameters in the order of :data:`NAMES`; ``nodes``, ``replicas``, ``batch`` and ``passes``
    (accumulation steps s, default none) have shape (n,). The Jacobians are by the logarithms of the parameters. Pollux,
    Equations 9 to 11. Times are bounded below by ``_TINY``, so that their logarithms are finite.
    """
    a_grad, b_grad, a_local, b_local, a_node, b_node, gamma = values
    beyond_two = np.maximum(replicas - 2.0, 0.0)
    is_local = (replicas > 1) & (nodes <= 1)
    is_across = (replicas > 1) & (nodes > 1)
    grad_s = np.maximum(a_grad + b_grad * batch, _TINY)
    local_s = a_local + b_local * beyond_two
    across_s = a_node + b_node * beyond_two
    sync_s = np.where(is_local, local_s, np.where(is_across, across_s, 0.0))
    last_pass_s = np.maximum(overlapped(grad_s, sync_s, gamma), _TINY)  # with the synchronisation that it overlaps
    log_grad = np.log(grad_s)
    log_sync = np.log(np.maximum(sync_s, _TINY))
    log_last_pass = np.log(last_pass_s)
    step_s = passes * grad_s + last_pass_s
    # d log T_iter / d log p by the chain rule, with the last pass's share of the step, and T_grad^g over T_grad^g + T_sync^g
    last_share = last_pass_s / step_s
    grad_share = np.exp(gamma * (log_grad - log_last_pass))
    per_sync_s = np.where(sync_s > 0, last_share * (1.0 - grad_share) / np.maximum(sync_s, _TINY), 0.0)
    by_grad = np.zeros((len(batch), 7))
    by_grad[:, 0] = a_grad / grad_s
    by_grad[:, 1] = b_grad * batch / grad_s
    by_step = by_grad * (grad_share * last_share + passes * grad_s / step_s)[:, None]
    by_step[:, 2] = per_sync_s * is_local * a_local
    by_step[:, 3] = per_sync_s * is_local * b_local * beyond_two
    by_step[:, 4] = per_sync_s * is_across * a_node
    by_step[:, 5] = per_sync_s * is_across * b_node * beyond_two
    by_gamma = last_share * (grad_share * log_grad + (1.0 - grad_share) * log_sync - log_last_pass)
    by_step[:, 6] = np.where(sync_s > 0, by_gamma, 0.0)
    return log_grad, np.log(step_s), by_grad, by_step


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """A pass over x samples takes ``launch_s + per_sample_s max(x, saturation)`` seconds of computing on one device."""

    launch_s: float = 0.0
    per_sample_s: float | None = None
    """None: not known; :meth:`at_capability` derives it from the device's speed."""
    memory_limit: int | None = None
    """Most samples of a pass; None: no limit is known."""
    saturation: int = 0
    """Samples below which a pass takes no less time."""
    sync: ThroughputParams | None = None
    """Fitted model whose synchronisation time is added to a step; None: not known."""
    devices_per_node: int = DEVICES_PER_NODE
    """For ``sync``: devices that fill a node."""

    def at_capability(self, mini_batches_per_s: Fraction | float, batch_size: int) -> Self:
        """Return the model with a time per sample such that a mini-batch computes for ``1 / mini_batches_per_s`` seconds.

        ``batch_size``: samples of a mini-batch. A model that has a time per sample already (a fitted one) is returned as it is.
        """
        if self.per_sample_s is not None:
            return self
        return replace(self, per_sample_s=float(1 / (mini_batches_per_s * max(batch_size, self.saturation))))

    @property
    def samples_per_s(self) -> float:
        """Samples per second beyond the launch, where the device is saturated; infinity where they take no time."""
        return 1 / self.per_sample_s if self.per_sample_s else math.inf

    def seconds(self, samples: float, passes: int = 1) -> float:
        """Return the seconds in which the device computes ``samples`` in ``passes`` equal passes.

        The model must have a time per sample. ``memory_limit`` is not looked at.
        """
        assert self.per_sample_s is not None
        return passes * self.launch_s + self.per_sample_s * max(samples, passes * self.saturation)

    def most_within(self, seconds: float, samples: int) -> int:
        """Return the most samples, up to ``samples``, that one pass computes within ``seconds``.

        It is 0 where the time does not suffice for one saturating batch, as no smaller batch is faster. A result within
        rounding of the next whole number is rounded up.
        """
        left_s = seconds - self.launch_s
        if left_s < 0:
            return 0
        if self.samples_per_s == math.inf:
            return samples
        computed = left_s * self.samples_per_s
        most = int(min(computed * (1 + 1e-12) + 1e-9, samples))
        return most if most >= max(1, self.saturation) else 0

    def scaled(self, factor: float) -> Self:
        """Return the model with both times multiplied by ``factor``; memory limit, saturation and ``sync`` stay."""
        per_sample_s = None if self.per_sample_s is None else self.per_sample_s * factor
        return replace(self, launch_s=self.launch_s * factor, per_sample_s=per_sample_s)
