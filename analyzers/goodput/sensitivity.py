"""How predicted log times move with the logarithms of the seven throughput parameters: the model's Jacobian."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.goodput.throughput import overlapped

Array = NDArray[np.float64]
_TINY = 1e-300


def log_times(
    values: Array, nodes: Array, replicas: Array, batch: Array, passes: Array | float = 0.0
) -> tuple[Array, Array, Array, Array]:
    """Return log T_grad, log T_iter, both of shape (n,), and their Jacobians of shape (n, 7).

    ``values`` are the seven parameters in the order of :data:`ddltool.analyzers.goodput.problem.NAMES`; ``nodes``,
    ``replicas``, ``batch`` and ``passes`` (accumulation steps s, default none) have shape (n,). The Jacobians are by the
    logarithms of the parameters. Pollux, Equations 9 to 11.
    """
    a_grad, b_grad, a_local, b_local, a_node, b_node, gamma = values
    more = np.maximum(replicas - 2.0, 0.0)
    shared = replicas > 1
    local, across = shared & (nodes <= 1), shared & (nodes > 1)
    grad = np.maximum(a_grad + b_grad * batch, _TINY)
    sync = np.where(local, a_local + b_local * more, np.where(across, a_node + b_node * more, 0.0))
    whole = np.maximum(overlapped(grad, sync, gamma), _TINY)
    log_grad, log_sync, log_whole = np.log(grad), np.log(np.maximum(sync, _TINY)), np.log(whole)
    step = passes * grad + whole
    last = whole / step  # weight of the synchronising pass in the step
    ours = np.exp(gamma * (log_grad - log_whole))  # weight of T_grad in that pass
    theirs = np.where(sync > 0, last * (1.0 - ours) / np.maximum(sync, _TINY), 0.0)
    by_grad = np.zeros((len(batch), 7))
    by_grad[:, 0], by_grad[:, 1] = a_grad / grad, b_grad * batch / grad
    by_step = by_grad * (ours * last + passes * grad / step)[:, None]
    by_step[:, 2], by_step[:, 3] = theirs * local * a_local, theirs * local * b_local * more
    by_step[:, 4], by_step[:, 5] = theirs * across * a_node, theirs * across * b_node * more
    by_step[:, 6] = np.where(sync > 0, last * (ours * log_grad + (1.0 - ours) * log_sync - log_whole), 0.0)
    return log_grad, np.log(step), by_grad, by_step
