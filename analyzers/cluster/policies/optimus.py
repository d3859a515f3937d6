"""Optimus with an oracle (Peng et al., EuroSys 2018): each GPU goes to the job for which it saves most time."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from ddltool.analyzers.cluster.cluster import Allocation, ClusterSpec, count_gpus, free_gpus, take_most_free
from ddltool.analyzers.cluster.job import SimulatedJob, Tuning


class Optimus:
    """One GPU for every job in the workload's order, then each further one to the job with the largest gain.

    The gain is the true step time saved by one more replica times the true iterations left, both at the requested batch size,
    which Optimus would have to predict. Jobs whose number of GPUs does not change keep theirs.
    """

    name = "optimus"
    tuning = Tuning.ELASTIC
    mixed = False

    def __init__(self) -> None:
        """Begin with an empty cache of step times, by (application, batch size, replicas)."""
        self._step_seconds: dict[tuple[str, int, int], float] = {}

    def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Mapping[int, Allocation]:
        """Return job index -> allocation for the next interval, with the numbers of GPUs of :meth:`count`.

        A job whose number does not change keeps its allocation, because a move costs a restart. The others are placed in the
        order of rising numbers.
        """
        replicas = self.count(jobs, cluster.total_gpus)
        allocations = {
            job.index: job.allocation
            for job in jobs
            if job.allocation and count_gpus(job.allocation) == replicas[job.index]
        }
        free = free_gpus(cluster, allocations.values())
        for job in sorted(jobs, key=lambda job: replicas[job.index]):
            if replicas[job.index] and job.index not in allocations:
                allocations[job.index] = take_most_free(free, replicas[job.index])
        return allocations

    def count(self, jobs: Sequence[SimulatedJob], gpus: int) -> dict[int, int]:
        """Return job index -> number of GPUs, out of ``gpus``: one each, then each further one where the gain is largest.

        If there are fewer GPUs than jobs, the first jobs of the workload get one. GPUs that would save nothing stay free.
        """
        replicas = {job.index: int(position < gpus) for position, job in enumerate(jobs)}
        free_count = gpus - sum(replicas.values())
        # A heap of (-seconds saved by one more replica, position in the workload, replicas now): it pops the largest gain
        # first, in ties the job that is first in the workload.
        gains = [(-self._gain(job, 1), position, 1) for position, job in enumerate(jobs) if replicas[job.index]]
        heapq.heapify(gains)
        while free_count > 0 and gains:
            negative_gain, position, count = heapq.heappop(gains)
            if negative_gain >= 0:
                break
            job = jobs[position]
            replicas[job.index] = count + 1
            free_count -= 1
            heapq.heappush(gains, (-self._gain(job, count + 1), position, count + 1))
        return replicas

    def _gain(self, job: SimulatedJob, replicas: int) -> float:
        """Return the seconds of training that one replica more than ``replicas`` saves; 0 where the job may not have more."""
        if replicas + 1 > job.most_replicas:
            return 0.0
        return (self._step_s(job, replicas) - self._step_s(job, replicas + 1)) * job.remaining_iterations()

    def _step_s(self, job: SimulatedJob, replicas: int) -> float:
        """Return the true seconds of one step of the job on ``replicas`` packed GPUs; cached for jobs with the same request."""
        key = (job.spec.application, job.spec.batch_size, replicas)
        if key not in self._step_seconds:
            self._step_seconds[key] = job.true_step_s(replicas)
        return self._step_seconds[key]
