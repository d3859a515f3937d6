"""Policies that give a job all of its requested GPUs at once, of one type, or none: FIFO, Tiresias, SRTF."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddltool.analyzers.cluster.cluster import Allocation, ClusterSpec, free_gpus, take_most_free
from ddltool.analyzers.cluster.job import SimulatedJob, Tuning

THRESHOLD_GPU_S = 16 * 3600.0
"""GPU-seconds after which Tiresias demotes a job: the value of Pollux's published simulator."""


def choose_type(job: SimulatedJob, free_counts: Mapping[str, int]) -> str | None:
    """Return the GPU type with the most free GPUs, if these suffice for the job, else None (ties: first in the cluster).

    Only types on which the job was measured count. With YARN's capacity scheduler users name the type, but workloads do not.
    ``free_counts``: GPU type -> free GPUs.
    """
    fitting = [name for name in job.gpu_types if free_counts[name] >= job.spec.num_replicas]
    return max(fitting, key=free_counts.__getitem__, default=None)


def start_gangs(
    order: Sequence[SimulatedJob], cluster: ClusterSpec, *, overtaking: bool = True
) -> dict[int, Allocation]:
    """Return job index -> allocation, for the jobs that run when GPUs are given out in ``order``.

    A job that does not fit is skipped or, without ``overtaking``, blocks all later ones. A running job that keeps running
    keeps its GPUs, and so its type. O(jobs x nodes).
    """
    free_counts = {gpu_type: cluster.gpus_of(gpu_type) for gpu_type in cluster.type_names}
    chosen_types: dict[int, str] = {}
    # First the jobs that run and their types, by counts alone. Then those that were running keep their GPUs, and the others are
    # placed on the free ones.
    for job in order:
        if job.allocation:
            held_type = cluster.type_of(job.allocation)
            gpu_type = held_type if free_counts[held_type] >= job.spec.num_replicas else None
        else:
            gpu_type = choose_type(job, free_counts)
        if gpu_type is not None:
            free_counts[gpu_type] -= job.spec.num_replicas
            chosen_types[job.index] = gpu_type
        elif not overtaking:
            break
    allocations = {job.index: job.allocation for job in order if job.allocation and job.index in chosen_types}
    free = free_gpus(cluster, allocations.values())
    nodes = {gpu_type: cluster.nodes_of(gpu_type) for gpu_type in cluster.type_names}
    for job in order:
        if job.index in chosen_types and job.index not in allocations:
            allocations[job.index] = take_most_free(free, job.spec.num_replicas, nodes[chosen_types[job.index]])
    return allocations


class Fifo:
    """First in, first out, as in YARN's capacity scheduler: no job overtakes another, and none is preempted.

    The first job that does not fit blocks all later ones. In a mixed cluster each job runs on one type (:func:`choose_type`).
    """

    name = "fifo"
    tuning = Tuning.RIGID

    def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Mapping[int, Allocation]:
        """Return job index -> allocation: the current ones, and those of the jobs that can start now.

        Jobs that run come first in the order, so that they keep their GPUs; then those that wait, by submission.
        """
        order = sorted(jobs, key=lambda job: (not job.allocation, job.spec.submit_s, job.index))
        return start_gangs(order, cluster, overtaking=False)


class Tiresias:
    """Discretised two-dimensional least attained service with two queues (Gu et al., NSDI 2019).

    Jobs that have used fewer GPU-seconds than the threshold come first; within a queue it is first in, first out. A job's
    service is its replicas times the seconds between rounds in which it holds GPUs, restarts included. A job that does not fit
    is skipped, and a running one for which no GPUs are left is preempted. Jobs never return to the first queue (the published
    simulator's default).
    """

    name = "tiresias"
    tuning = Tuning.RIGID

    def __init__(self, threshold_gpu_s: float = THRESHOLD_GPU_S) -> None:
        """Start with empty queues; ``threshold_gpu_s``: GPU-seconds after which a job goes to the second queue."""
        self.threshold_gpu_s = threshold_gpu_s
        self.queues: tuple[list[int], list[int]] = ([], [])
        """Indices of the jobs below the threshold, and of those beyond, in order."""
        self.service: dict[int, float] = {}
        """Job index -> GPU-seconds that it has used."""
        self.running: set[int] = set()
        """Indices of the jobs that got GPUs in the last round."""
        self.last_s = 0.0
        """Time of the last round."""

    def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Mapping[int, Allocation]:
        """Return job index -> allocation for the next interval, jobs of the first queue first.

        Adds the service since the last round, and moves jobs that have reached the threshold to the second queue.
        """
        by_index = {job.index: job for job in jobs}
        # Finished jobs leave the queues; new ones, which have no service yet, are added to the end of the first queue.
        first_queue, second_queue = ([index for index in queue if index in by_index] for queue in self.queues)
        first_queue += [index for index in by_index if index not in self.service]
        for index in by_index:
            ran_s = now_s - self.last_s if index in self.running else 0.0
            self.service[index] = self.service.get(index, 0.0) + ran_s * by_index[index].spec.num_replicas
        # jobs that have reached the threshold go to the end of the second queue
        served = {index for index in first_queue if self.service[index] >= self.threshold_gpu_s}
        demoted = [index for index in by_index if index in served]
        self.queues = [index for index in first_queue if index not in served], [*second_queue, *demoted]
        self.last_s = now_s
        allocations = start_gangs([by_index[index] for queue in self.queues for index in queue], cluster)
        self.running = set(allocations)
        return allocations


class Srtf:
    """Preemptive shortest remaining time first with an oracle, on the requested GPUs; jobs that do not fit are skipped.

    On one machine without restart costs this order has the least average completion time (Schrage 1968). For jobs of several
    GPUs and with restarts it is a yardstick, but no bound.
    """

    name = "srtf"
    tuning = Tuning.RIGID

    def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Mapping[int, Allocation]:
        """Return job index -> allocation for the next interval, given out in the order of the true remaining time."""
        return start_gangs(sorted(jobs, key=lambda job: (job.remaining_s(job.spec.num_replicas), job.index)), cluster)
