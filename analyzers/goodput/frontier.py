"""What more GPUs buy: goodput over their number, the efficient frontier, and where scaling stops paying.

Start at :func:`frontier`; :func:`goodput_grid` is the picture behind it, goodput over (GPUs, total batch).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddltool.analyzers.goodput.batch_search import BatchLimits
from ddltool.analyzers.goodput.throughput import ThroughputParams, iteration_time_s
from ddltool.analyzers.goodput.tuning import Tuned, tune
from ddltool.errors import Infeasible, InputError

Array = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Frontier:
    """Goodput over the number of GPUs; arrays of shape (n,), one entry per number of GPUs from 1 to n."""

    num_replicas: Ints
    num_nodes: Ints
    tuned: Tuned
    speedup: Array
    """Goodput over that of the fewest GPUs that can run the job; 0 where it cannot run."""
    efficient: NDArray[np.bool_]
    """True where no smaller number of GPUs has at least this goodput."""
    marginal_per_gpu: Array
    """On the frontier: goodput gained per GPU since the last efficient number, as a share of the goodput per GPU of the
    fewest GPUs that can run the job (the first entry is 1); NaN elsewhere."""
    pays_until: int
    """The number of GPUs from which on more cost more than they bring at the threshold."""
    threshold: float


def frontier(
    params: ThroughputParams,
    max_replicas: int,
    limits: BatchLimits,
    *,
    noise_scale: float,
    replicas_per_node: int,
    threshold: float = 0.5,
) -> Frontier:
    """Return tuned goodput for 1 to ``max_replicas`` GPUs on as few nodes as hold them.

    With ``g1`` the goodput per GPU of the fewest GPUs that can run the job, ``pays_until`` is the largest K of those that
    maximise ``goodput(K) - threshold g1 K``: beyond it no number of further GPUs brings, on average, the share
    ``threshold`` of what the first ones do. A dip (the first GPU of a second node) does not end it when what follows makes
    up for it. Raises InputError for arguments out of range, Infeasible when no number of GPUs can run the job.
    """
    if max_replicas < 1 or replicas_per_node < 1:
        raise InputError(
            "max_replicas, replicas_per_node", f"are {max_replicas}, {replicas_per_node}", "give 1 or more"
        )
    if not 0 <= threshold <= 1:
        raise InputError("threshold", f"is {threshold}", "give a share between 0 and 1")
    replicas = np.arange(1, max_replicas + 1, dtype=np.int64)
    nodes = -(-replicas // replicas_per_node)
    tuned = tune(params, nodes, replicas, limits, noise_scale=noise_scale)
    goodput = tuned.goodput_per_s
    can = np.flatnonzero(tuned.feasible)
    if not can.size:
        raise Infeasible(f"no number of GPUs up to {max_replicas} allows a batch within {limits}")
    first = int(can[0])
    before = np.concatenate([[0.0], np.maximum.accumulate(goodput)[:-1]])
    efficient = goodput > before
    per_gpu = goodput[first] / replicas[first]
    marginal = np.full(max_replicas, np.nan)
    chosen = np.flatnonzero(efficient)
    gained, added = np.diff(goodput[chosen], prepend=0.0), np.diff(replicas[chosen], prepend=0)
    marginal[chosen] = gained / added / per_gpu
    worth = np.where(tuned.feasible, goodput - threshold * per_gpu * replicas, -math.inf)
    return Frontier(
        num_replicas=replicas,
        num_nodes=nodes,
        tuned=tuned,
        speedup=goodput / goodput[first],
        efficient=efficient,
        marginal_per_gpu=marginal,
        pays_until=int(replicas[np.flatnonzero(worth == worth.max())[-1]]),
        threshold=threshold,
    )


def goodput_grid(
    params: ThroughputParams,
    num_nodes: ArrayLike,
    num_replicas: ArrayLike,
    total_batch_sizes: ArrayLike,
    limits: BatchLimits,
    *,
    noise_scale: float,
) -> Array:
    """Return goodput of shape (allocations, batches) at given total batches; NaN where the limits do not allow one.

    For each pair the fewest accumulation steps that fit into memory (fastest for a given batch), local batches as if they
    could be fractions: a surface to look at. ``noise_scale`` as in :func:`tune`.
    """
    nodes, replicas = (np.atleast_1d(np.asarray(item, dtype=np.float64))[:, None] for item in (num_nodes, num_replicas))
    total = np.atleast_1d(np.asarray(total_batch_sizes, dtype=np.float64))[None, :]
    passes = np.maximum(np.ceil(total / (replicas * limits.max_local_batch_size)), 1.0)
    local = total / (replicas * passes)
    step = np.asarray(iteration_time_s(params, nodes, replicas, local, passes - 1.0))
    share = (
        np.ones_like(total)
        if math.isinf(noise_scale)
        else (noise_scale + limits.initial_batch_size) / (noise_scale + total)
    )
    allowed = (local >= limits.min_local_batch_size) & (total >= limits.initial_batch_size)
    allowed &= total <= limits.max_batch_size
    if limits.max_accumulation_steps is not None:
        allowed &= passes <= limits.max_accumulation_steps + 1
    made: Array = np.where(allowed, total / step * share, np.nan)
    return made
