"""Gangs: all requested GPUs of one type at once, or none. What FIFO, Tiresias and SRTF share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddltool.analyzers.scheduling.cluster import Allocation, ClusterSpec, free_by_type, free_gpus, take_most_free
from ddltool.analyzers.scheduling.job import SimulatedJob


def choose_type(job: SimulatedJob, left: Mapping[str, int]) -> str | None:
    """Return the GPU type of a gang: the one with the most GPUs left (ties: first in the cluster), None if none fits.

    YARN's capacity scheduler gives a job the one type that it asks for; a workload does not name one, so the emptiest
    type that it was measured on stands in.
    """
    fitting = [name for name in job.gpu_types if left[name] >= job.spec.num_replicas]
    return max(fitting, key=left.__getitem__, default=None)


def start_gangs(order: Sequence[SimulatedJob], cluster: ClusterSpec) -> dict[int, Allocation]:
    """Return the allocations of the jobs that run when GPUs are given out in this order; what does not fit is passed.

    A job that runs on keeps its GPUs, so it stays on its type. O(jobs x nodes).
    """
    left = {name: cluster.gpus_of(name) for name in cluster.type_names}
    chosen: dict[int, str] = {}
    for job in order:
        if job.allocation:
            held = cluster.type_of(job.allocation)
            name = held if left[held] >= job.spec.num_replicas else None
        else:
            name = choose_type(job, left)
        if name is not None:
            left[name] -= job.spec.num_replicas
            chosen[job.index] = name
    made = {job.index: job.allocation for job in order if job.allocation and job.index in chosen}
    free = free_gpus(cluster, made.values())
    nodes = {name: cluster.nodes_of(name) for name in cluster.type_names}
    for job in order:
        if job.index in chosen and job.index not in made:
            made[job.index] = take_most_free(free, job.spec.num_replicas, nodes[chosen[job.index]])
    return made


def start_in_turn(order: Sequence[SimulatedJob], cluster: ClusterSpec) -> dict[int, Allocation]:
    """Return the current allocations and those of the jobs that can start now; the first that cannot ends the line."""
    made = {job.index: job.allocation for job in order if job.allocation}
    free = free_gpus(cluster, made.values())
    left = free_by_type(cluster, free)
    for job in order:
        if not job.allocation:
            name = choose_type(job, left)
            if name is None:
                break
            left[name] -= job.spec.num_replicas
            made[job.index] = take_most_free(free, job.spec.num_replicas, cluster.nodes_of(name))
    return made
