"""Rows of equal configurations as one: what a least-squares fit of log times needs of a million rows. See :func:`group`."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.goodput.observations import Observations

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
# Beyond this, batches are told apart only to this logarithm: the model is smooth in them.
MOST_CONFIGURATIONS = 5000
_BIN = 0.005


@dataclass(frozen=True, kw_only=True, eq=False)
class Grouped:
    """Rows of one device with equal configurations as one: arrays of shape (g,); all that least squares needs of them.

    ``log_step`` and ``log_grad`` are means over the rows of a configuration (the latter 0 where ``grads`` is 0).
    """

    nodes: Array
    replicas: Array
    batch: Array
    passes: Array
    log_step: Array
    log_grad: Array
    steps: Array
    """Rows of each configuration."""
    grads: Array
    """Of them, those that observed T_grad."""
    within: float
    """Sum of squared log errors of the steps about their configuration's mean: no fit removes it."""
    within_grad: float
    member: NDArray[np.int64]
    """(n,) the configuration of each row."""

    @property
    def shared(self) -> Mask:
        """Where gradients are synchronised at all, shape (g,)."""
        made: Mask = self.replicas > 1
        return made

    @property
    def placements(self) -> int:
        """The number of different (nodes, replicas) of more than one replica."""
        pairs = np.stack([self.nodes, self.replicas])[:, self.shared]
        return int(np.unique(pairs, axis=1).shape[1])


def group(rows: Observations) -> Grouped:
    """Return the rows grouped by configuration. O(n log n).

    Of more than :data:`MOST_CONFIGURATIONS` those whose batches differ by less than half a per cent count as one.
    """
    batch = rows.local_batch_size
    keys = np.stack([rows.num_nodes, rows.num_replicas, batch, rows.accumulation_steps])
    first, member = _distinct(keys)
    if len(first) > MOST_CONFIGURATIONS:
        keys[2] = np.round(np.log(batch) / _BIN)
        first, member = _distinct(keys)
    count = len(first)
    empty = Grouped(
        nodes=rows.num_nodes[first],
        replicas=rows.num_replicas[first],
        batch=np.bincount(member, batch, count) / np.bincount(member, minlength=count),
        passes=rows.accumulation_steps[first],
        log_step=np.zeros(count),
        log_grad=np.zeros(count),
        steps=np.zeros(count),
        grads=np.zeros(count),
        within=0.0,
        within_grad=0.0,
        member=member,
    )
    return weighted(empty, rows, np.ones(len(rows)))


def weighted(grouped: Grouped, rows: Observations, weights: Array) -> Grouped:
    """Return the same groups of the same rows with ``weights`` (n,): how much each row counts."""
    count = len(grouped.nodes)
    log_step, steps, within = _means(np.log(rows.step_time_s), weights, grouped.member, count)
    seen = np.isfinite(rows.grad_time_s)
    log_grads = np.log(np.where(seen, rows.grad_time_s, 1.0))
    log_grad, grads, within_grad = _means(log_grads, weights * seen, grouped.member, count)
    return replace(
        grouped,
        log_step=log_step,
        log_grad=log_grad,
        steps=steps,
        grads=grads,
        within=within,
        within_grad=within_grad,
    )


def _distinct(keys: Array) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the place of the first of each distinct column of keys (k, n), and (n,) which distinct one each column is."""
    order = np.lexsort(keys)
    ordered = keys[:, order]
    fresh = np.concatenate([[True], (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)])
    member = np.empty(keys.shape[1], dtype=np.int64)
    member[order] = np.cumsum(fresh) - 1
    first: NDArray[np.int64] = order[fresh]
    return first, member


def _means(values: Array, weights: Array, member: NDArray[np.int64], count: int) -> tuple[Array, Array, float]:
    """Return weighted means and sums of weights by group, and the weighted squares about the means."""
    total: Array = np.bincount(member, weights, count).astype(np.float64)
    mean = np.bincount(member, weights * values, count) / np.where(total > 0, total, 1.0)
    within = float(weights @ (values - mean[member]) ** 2)
    return mean, total, within
