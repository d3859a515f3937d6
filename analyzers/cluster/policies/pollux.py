"""Pollux (Qiao et al., OSDI 2021): allocations by every job's goodput, at its best batch, relative to a fair share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ddltool.analyzers.cluster.assign import MOST_REPLICAS
from ddltool.analyzers.cluster.cluster import Allocation, ClusterSpec, count_gpus
from ddltool.analyzers.cluster.job import SimulatedJob, Tuning
from ddltool.analyzers.cluster.search import JobCosts, search
from ddltool.arrays import Floats
from ddltool.errors import InputError

# Keeps the power of a job without GPUs finite; the published simulator's number.
_OFFSET = 1e-3
# Largest power, beyond which summands of speedups from _OFFSET to 100,000 overflow. For smaller powers than the least one,
# summands differ by rounding errors only, so their limit, the geometric mean, is used.
_MOST_POWER, _LEAST_POWER = 50.0, 1e-3


class Pollux:
    """Maximises ``FITNESS_p``, the power mean of the jobs' speedups over an equal share (section 4.2).

    The speedup of a job that is re-allocated is multiplied by ``max(T - R d, 0) / (T + d)``
    (:meth:`SimulatedJob.restart_factor`); a job gets at most twice the replicas that it has run with; at most one job that
    spans nodes runs on a node. ``power`` is p, from -50 to 50 (near 0: the geometric mean), ``delay_s`` is d.
    """

    name = "pollux"
    tuning = Tuning.ADAPTIVE
    mixed = False

    def __init__(self, *, power: float = -1.0, delay_s: float = 30.0, seed: int = 0) -> None:
        """Raise InputError for a power outside -50 to 50; a power near 0 becomes 0, the geometric mean."""
        if not abs(power) <= _MOST_POWER:
            raise InputError("power", f"is {power}", f"from -{_MOST_POWER:.0f} to {_MOST_POWER:.0f}; -1 is Pollux's")
        self.power = power if abs(power) >= _LEAST_POWER else 0.0
        self.delay_s = delay_s
        self.seed = seed

    def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Mapping[int, Allocation]:
        """Return job index -> allocation for the next interval: those of greatest fitness that :func:`search` finds."""
        choices = [self.choice(job, len(jobs), cluster, now_s) for job in jobs]
        allocations = search(choices, cluster.gpus, seed=self.seed).allocations
        return {job.index: allocation for job, allocation in zip(jobs, allocations, strict=True) if allocation}

    def choice(self, job: SimulatedJob, jobs: int, cluster: ClusterSpec, now_s: float) -> JobCosts:
        """Return the costs of one job; ``jobs``: number of jobs that share the cluster.

        Speedups of new allocations are multiplied by the restart factor at ``now_s``, that of the current one is not.
        """
        most_replicas = min(job.most_replicas, MOST_REPLICAS)
        within, across, held = self.speedups(job, most_replicas, math.ceil(cluster.total_gpus / jobs), cluster)
        restart_factor = job.restart_factor(now_s, self.delay_s)
        within_cost = self.cost(within * restart_factor)
        across_cost = self.cost(across * restart_factor)
        # more GPUs than the largest node has do not fit within one
        within_cost[max(cluster.gpus) + 1 :] = np.inf
        # fewer than two GPUs cannot span nodes
        across_cost[:2] = np.inf
        return JobCosts(
            within=within_cost,
            across=across_cost,
            base=job.allocation,
            keep=float(self.cost(np.array([held]))[0]) if job.allocation else np.inf,
        )

    def speedups(
        self, job: SimulatedJob, most: int, fair_count: int, cluster: ClusterSpec
    ) -> tuple[Floats, Floats, float]:
        """Return speedups (most + 1,) on 0, 1, ... GPUs of one node, the same across nodes, and that of the current allocation.

        They are relative to the goodput on ``fair_count`` GPUs of one node, even if no node has as many (as published), times
        the number of nodes over that of GPUs, which is the scale of the published fitness. Before anything was observed k GPUs
        count as k times one.
        """
        scale = len(cluster.gpus) / cluster.total_gpus
        held = count_gpus(job.allocation)
        widest = max(most, fair_count, held)
        goodput = job.goodput_table(widest)
        if goodput is None:
            linear = np.arange(widest + 1) / fair_count * scale  # the same on one node and on several
            return linear[: most + 1], linear[: most + 1].copy(), float(linear[held])
        goodput = goodput * (scale / goodput[0, fair_count])
        # Row 0: on one node, row 1: across nodes.
        row = min(len(job.allocation), 2) - 1
        return goodput[0, : most + 1], goodput[1, : most + 1], float(goodput[row, held]) if held else 0.0

    def cost(self, speedups: Floats) -> Floats:
        """Return the summands of the power mean, in the shape of ``speedups``, signed so that a smaller sum is better.

        At power 0 they are logarithms, whose mean is the limit. The offset keeps the power of a job without GPUs finite.
        """
        if self.power == 0:
            return np.asarray(-np.log(np.maximum(speedups, _OFFSET)))
        return np.asarray(-np.sign(self.power) * (speedups + _OFFSET) ** self.power)
