"""Rows that somebody would have measured of a job whose throughput parameters are known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ddltool.analyzers.job.goodput.observations import Observations
from ddltool.analyzers.job.goodput.throughput import ThroughputParams, grad_time_s, iteration_time_s
from ddltool.arrays import Floats


def observed(
    truth: ThroughputParams,
    places: Sequence[tuple[int, int, int]] | Floats,
    error: float = 0.0,
    seed: int = 0,
    *,
    with_grad: bool = True,
) -> Observations:
    """One row for each (nodes, replicas, local batch); steps and passes each with their own log error of that size."""
    nodes, replicas, batch = np.array(places, dtype=float).T
    noise = np.exp(error * np.random.default_rng(seed).normal(size=(2, len(places))))
    grad = np.asarray(grad_time_s(truth, batch)) * noise[1]
    return Observations(
        num_nodes=nodes,
        num_replicas=replicas,
        local_batch_size=batch,
        step_time_s=np.asarray(iteration_time_s(truth, nodes, replicas, batch)) * noise[0],
        grad_time_s=grad if with_grad else np.full(len(nodes), np.nan),
    )
