"""Sia-like (Jayaram Subramanya et al., SOSP 2023): one of few configurations for each job, by an integer program.

Written from the paper. Configurations are powers of two GPUs within a node, and whole nodes beyond, of one type. The goodput of
a configuration, relative to one GPU of the type that is slowest for the job, is multiplied by the restart factor
``max(T - R d, 0) / (T + d)`` (:meth:`SimulatedJob.restart_factor`) if it is a change, and raised to p = -0.5. The sum over the
jobs is minimised; a job without GPUs costs 1.1 times its most costly configuration. Other than in the published system, models
are this simulator's (Pollux's fit). As there, a type on which only one GPU was profiled is assumed to scale as the type that is
known best.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ddltool.analyzers.cluster.assign import JobSpeedups, TypeSpeedup, assign, cost_tables, job_speedups, place_on_type
from ddltool.analyzers.cluster.cluster import Allocation, ClusterSpec
from ddltool.analyzers.cluster.job import SimulatedJob, Tuning
from ddltool.analyzers.cluster.search import JobCosts
from ddltool.arrays import Flags

# The cost of no GPUs over that of the job's most costly configuration; more than 1, so that no job waits beside idle GPUs.
_IDLE_COST_RATIO = 1.1
# The module's p.
_POWER = -0.5


class Sia:
    """Gives each job one of few configurations, so that the sum of the jobs' relative goodputs to the power p is least.

    ``delay_s``: seconds of a restart. The module says more.
    """

    name = "sia"
    tuning = Tuning.ADAPTIVE

    def __init__(self, *, delay_s: float = 30.0) -> None:
        """Set the seconds of a restart."""
        self.delay_s = delay_s

    def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Mapping[int, Allocation]:
        """Return job index -> allocation for the next interval.

        :func:`assign` chooses every job's type and count; then each type's jobs are placed on its nodes.
        """
        type_names = cluster.type_names
        node_sizes = {name: max(cluster.gpus[node] for node in cluster.nodes_of(name)) for name in type_names}
        choices = [self._choices(job_speedups(job, cluster), node_sizes, now_s) for job in jobs]
        capacity = [cluster.gpus_of(name) for name in type_names]
        assigned = assign([cost_tables(by_type, type_names) for by_type in choices], capacity)
        allocations: dict[int, Allocation] = {}
        for type_index, gpu_type in enumerate(type_names):
            members: dict[int, JobCosts] = {}
            counts: list[int] = []
            for job, by_type, (kind, count) in zip(jobs, choices, assigned, strict=True):
                if count and kind == type_index:
                    members[job.index] = by_type[gpu_type]
                    counts.append(count)
            allocations |= place_on_type(members, cluster, gpu_type, counts=counts)
        return allocations

    def _choices(self, offer: JobSpeedups, node_sizes: Mapping[str, int], now_s: float) -> dict[str, JobCosts]:
        """Return GPU type -> one job's costs; ``node_sizes``: GPU type -> GPUs of its largest node.

        No GPUs cost more than any configuration, so that jobs wait only where nothing is free.
        """
        job = offer.job
        allowed = {
            name: np.array([_is_configuration(count, size) for count in range(offer.most_replicas + 1)])
            for name, size in node_sizes.items()
        }
        # Goodputs are relative to one GPU of the type that is slowest for this job (speedup[0, 1]: one node, one GPU).
        single_gpu_speedup = min(float(on_type.speedup[0, 1]) for on_type in offer.by_type)
        costs_by_type = {}
        largest_cost = 0.0
        for on_type in offer.by_type:
            name = on_type.gpu_type
            factor = max(job.restart_factor(now_s, self.delay_s), 1e-3)  # a power of 0 would be infinite
            costs = self._choice(on_type, allowed[name], single_gpu_speedup, factor, node_sizes[name], job)
            costs_by_type[name] = costs
            values = np.concatenate([costs.within[1:], costs.across[1:], [costs.keep]])
            largest_cost = max(largest_cost, float(values[np.isfinite(values)].max(initial=0.0)))
        for costs in costs_by_type.values():
            costs.within[0] = costs.across[0] = _IDLE_COST_RATIO * max(largest_cost, 1.0)
        return costs_by_type

    def _choice(
        self,
        on_type: TypeSpeedup,
        allowed: Flags,
        single_gpu_speedup: float,
        restart_factor: float,
        node_size: int,
        job: SimulatedJob,
    ) -> JobCosts:
        """Return one job's costs on one type: of each allowed count within a node and across nodes, and of its allocation.

        The cost is the goodput relative to one GPU of the slowest type, times ``restart_factor`` for a change, to the power of
        p. ``allowed`` (m + 1,): whether k GPUs are a configuration; up to ``node_size`` they are on one
        node, beyond on several. ``single_gpu_speedup``: speedup of one GPU of the slowest type.
        """
        relative_goodput = on_type.speedup[:, : len(allowed)] / single_gpu_speedup
        with np.errstate(divide="ignore"):
            cost = (relative_goodput * restart_factor) ** _POWER
            cost = np.where(allowed & (relative_goodput > 0), cost, np.inf)
            held_goodput = on_type.speedup[on_type.held_row, on_type.held] / single_gpu_speedup
            keep_cost = float(held_goodput**_POWER) if on_type.held else np.inf
        # within a node (row 0) only what fits there, across nodes (row 1) only what does not
        cost[0, node_size + 1 :] = np.inf
        cost[1, : node_size + 1] = np.inf
        return JobCosts(within=cost[0], across=cost[1], base=job.allocation if on_type.held else (), keep=keep_cost)


def _is_configuration(count: int, node_size: int) -> bool:
    """Return whether ``count`` GPUs are a configuration: a power of two (or all) within a node, whole nodes beyond.

    >>> [count for count in range(1, 25) if _is_configuration(count, 8)]
    [1, 2, 4, 8, 16, 24]
    """
    if count <= node_size:
        return count == node_size or (count & (count - 1) == 0 and count > 0)
    return count % node_size == 0
