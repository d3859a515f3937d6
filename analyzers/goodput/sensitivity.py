"""How predicted log times move with the logarithms of the seven throughput parameters: the model's Jacobian."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.goodput.throughput import overlapped

Array = NDArray[np.float64]
_TINY = 1e-300


def log_times(values: Array, nodes: Array, replicas: Array, batch: Array) -> tuple[Array, Array, Array, Array]:
    """Return log T_grad, log T_iter (no accumulation), both of shape (n,), and their Jacobians of shape (n, 7).

    ``values`` are the seven parameters in the order of :data:`ddltool.analyzers.goodput.fit.NAMES`; ``nodes``, ``replicas``
    and ``batch`` have shape (n,). The Jacobians are by the logarithms of the parameters. Pollux, Equations 9 to 11.
    """
    a_grad, b_grad, a_local, b_local, a_node, b_node, gamma = values
    more = np.maximum(replicas - 2.0, 0.0)
    shared = replicas > 1
    local, across = shared & (nodes <= 1), shared & (nodes > 1)
    grad = np.maximum(a_grad + b_grad * batch, _TINY)
    sync = np.where(local, a_local + b_local * more, np.where(across, a_node + b_node * more, 0.0))
    whole = np.maximum(overlapped(grad, sync, gamma), _TINY)
    log_grad, log_sync, log_whole = np.log(grad), np.log(np.maximum(sync, _TINY)), np.log(whole)
    ours = np.exp(gamma * (log_grad - log_whole))  # weight of T_grad in T_iter
    theirs = np.where(sync > 0, (1.0 - ours) / np.maximum(sync, _TINY), 0.0)
    by_grad = np.zeros((len(batch), 7))
    by_grad[:, 0], by_grad[:, 1] = a_grad / grad, b_grad * batch / grad
    by_whole = by_grad * ours[:, None]
    by_whole[:, 2], by_whole[:, 3] = theirs * local * a_local, theirs * local * b_local * more
    by_whole[:, 4], by_whole[:, 5] = theirs * across * a_node, theirs * across * b_node * more
    by_whole[:, 6] = np.where(sync > 0, ours * log_grad + (1.0 - ours) * log_sync - log_whole, 0.0)
    return log_grad, log_whole, by_grad, by_whole
