"""First in, first out, gang scheduling, as YARN's capacity scheduler does it: no job overtakes, none is preempted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddltool.analyzers.scheduling.cluster import Allocation, ClusterSpec, free_gpus, take_most_free
from ddltool.analyzers.scheduling.job import SimulatedJob, Tuning


class Fifo:
    """All requested GPUs at once or none; the first job that does not fit holds all later ones up."""

    name = "fifo"
    tuning = Tuning.RIGID

    def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Mapping[int, Allocation]:
        """Return the current allocations and those of the jobs that can start now, in order of submission."""
        made = {job.index: job.allocation for job in jobs if job.allocation}
        free = free_gpus(cluster, made.values())
        pending = (job for job in jobs if not job.allocation)
        for job in sorted(pending, key=lambda job: (job.spec.submit_s, job.index)):
            if job.spec.num_replicas > sum(free):
                break
            made[job.index] = take_most_free(free, job.spec.num_replicas)
        return made
