"""Shortest remaining time first, with an oracle: how far knowing the remaining times alone would go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddltool.analyzers.scheduling.cluster import Allocation, ClusterSpec, free_gpus, take_most_free
from ddltool.analyzers.scheduling.job import SimulatedJob, Tuning


class Srtf:
    """Preemptive gang scheduling by the true remaining time on the requested GPUs; what does not fit is passed over.

    On one machine without restart costs this order has the least average completion time (Schrage 1968); for gangs of
    several GPUs and with restarts it is a yardstick, no bound.
    """

    name = "srtf"
    tuning = Tuning.RIGID

    def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Mapping[int, Allocation]:
        """Return the allocations for the next interval."""
        left = cluster.total_gpus
        running: list[SimulatedJob] = []
        for job in sorted(jobs, key=lambda job: (job.remaining_s(job.spec.num_replicas), job.index)):
            if job.spec.num_replicas <= left:
                left -= job.spec.num_replicas
                running.append(job)
        made = {job.index: job.allocation for job in running if job.allocation}
        free = free_gpus(cluster, made.values())
        for job in running:
            if job.index not in made:
                made[job.index] = take_most_free(free, job.spec.num_replicas)
        return made
