"""Which configuration to measure next: the one that makes predictions most certain. Start at :func:`suggest_next`.

Linear Gaussian design (V-optimality; Chaloner and Verdinelli 1995, section 2): about the fitted point, log times are linear
in the log parameters, which have a wide prior, so a measurement's effect on the variance of every prediction is known
before it is made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddltool.analyzers.goodput.observations import Observations
from ddltool.analyzers.goodput.problem import NAMES
from ddltool.analyzers.goodput.sensitivity import log_times
from ddltool.analyzers.goodput.throughput import ThroughputParams
from ddltool.errors import InputError

Array = NDArray[np.float64]
Ints = NDArray[np.int64]
# Of more numbers of replicas, or batch sizes, these many are looked at: all small ones, then ever wider apart.
_MOST_REPLICAS, _MOST_BATCHES = 256, 64
# Before any row a time is known to a factor of ten (one standard deviation), gamma as spread evenly over log 1 to log 10.
_PRIOR = np.array([math.log(10.0)] * 6 + [math.log(10.0) / math.sqrt(12.0)])


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
    reductions: Array
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
    batches = batches[np.array(_thinned(batches.size, _MOST_BATCHES)) - 1]
    places = []
    for replicas in _thinned(most, _MOST_REPLICAS):
        fewest = -(-replicas // replicas_per_node)
        places.append((fewest, replicas))
        if fewest == 1 and replicas > 1 and max_replicas > replicas_per_node:
            places.append((2, replicas))
    table = np.array([(nodes, replicas, batch) for nodes, replicas in places for batch in batches], dtype=np.int64)
    return Configurations(num_nodes=table[:, 0], num_replicas=table[:, 1], local_batch_size=table[:, 2])


def _thinned(count: int, most: int) -> list[int]:
    """Return 1 to ``count``, or when they are more than ``most`` the first half of that many and then a geometric rest."""
    if count <= most:
        return list(range(1, count + 1))
    rest = np.geomspace(most // 2 + 1, count, most - most // 2).round().astype(np.int64)
    return [*range(1, most // 2 + 1), *np.unique(rest).tolist()]


def suggest_next(
    observations: Observations,
    params: ThroughputParams,
    candidates: Configurations,
    *,
    targets: Configurations | None = None,
    error: float = 0.05,
) -> Suggestion:
    """Return the candidate that reduces most the mean variance of the predicted log step time over ``targets``.

    ``targets``: by default the candidates themselves. ``error``: standard deviation of a measured log time. A measurement
    yields the step time and T_grad. Synchronisation never seen is taken to cost about as much as T_grad: an unknown that
    could matter. Raises InputError without candidates or targets, or for an error that is not above 0.
    """
    targets = candidates if targets is None else targets
    if not (len(candidates) and len(targets)):
        raise InputError("candidates", "are empty", "give at least one configuration that can run")
    if not error > 0:
        raise InputError("error", f"is {error}", "give the relative error of a measured time, above 0")
    values = _plausible(params, observations)
    _, _, by_grad, by_step = log_times(
        values,
        observations.num_nodes,
        observations.num_replicas,
        observations.local_batch_size,
        observations.accumulation_steps,
    )
    seen = np.concatenate([by_step, by_grad[np.isfinite(observations.grad_time_s)]])
    covariance = np.linalg.inv(np.diag(_PRIOR**-2) + seen.T @ seen / error**2)
    _, _, _, wanted = _jacobians(values, targets)
    _, _, grad_rows, step_rows = _jacobians(values, candidates)
    before = float(np.einsum("ti,ij,tj->t", wanted, covariance, wanted).mean())
    # what the targets see of the covariance, C (mean of j j') C, reduced by a measurement's two rows R:
    # trace((error^2 I + R C R')^-1 R W R')
    weight = covariance @ (wanted.T @ wanted / len(targets)) @ covariance
    rows = np.stack([step_rows, grad_rows], axis=1)
    spread = np.einsum("cri,ij,csj->crs", rows, covariance, rows) + error**2 * np.eye(2)
    reductions: Array = np.einsum("crs,csr->c", np.linalg.inv(spread), np.einsum("cri,ij,csj->crs", rows, weight, rows))
    best = int(np.argmax(reductions))
    return Suggestion(
        num_nodes=int(candidates.num_nodes[best]),
        num_replicas=int(candidates.num_replicas[best]),
        local_batch_size=int(candidates.local_batch_size[best]),
        variance_before=before,
        variance_after=before - float(reductions[best]),
        reductions=reductions,
    )


def _jacobians(values: Array, points: Configurations) -> tuple[Array, Array, Array, Array]:
    places = (points.num_nodes, points.num_replicas, points.local_batch_size)
    return log_times(values, *(np.asarray(item, dtype=np.float64) for item in places))


def _plausible(params: ThroughputParams, rows: Observations) -> Array:
    """Return the parameters, with a value that matters for each of which the rows cannot speak."""
    values = np.array([getattr(params, name) for name in NAMES])
    shared = rows.num_replicas > 1
    local, across = shared & (rows.num_nodes <= 1), shared & (rows.num_nodes > 1)
    batch = float(np.median(rows.local_batch_size)) if len(rows) else 1.0
    typical = float(values[0] + values[1] * batch)
    if len(np.unique(rows.local_batch_size)) < 2 and values[1] == 0:
        values[0], values[1] = typical / 2, typical / 2 / batch
    for alpha, mask in ((2, local), (4, across)):
        if not mask.any() and values[alpha] == 0:
            values[alpha] = typical
        if not (mask & (rows.num_replicas > 2)).any() and values[alpha + 1] == 0:
            values[alpha + 1] = values[alpha] / 10
    if not shared.any():
        values[6] = max(values[6], 2.0)
    return values
