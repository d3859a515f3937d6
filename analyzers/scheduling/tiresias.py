"""Tiresias' discretised two-dimensional least attained service, with two queues (Gu et al., NSDI 2019)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddltool.analyzers.scheduling.cluster import Allocation, ClusterSpec
from ddltool.analyzers.scheduling.gang import start_gangs
from ddltool.analyzers.scheduling.job import SimulatedJob, Tuning

THRESHOLD_GPU_S = 16 * 3600.0
"""GPU-seconds after which a job is demoted: the value of Pollux's published simulator."""


class Tiresias:
    """Jobs that have used fewer GPU-seconds than the threshold come first; first in, first out within a queue.

    Service counts from round to round while a job runs, replicas times seconds, restarts included. A job that does not
    fit is passed over; one that is overtaken is preempted. No promotion back (the published simulator's default).
    """

    name = "tiresias"
    tuning = Tuning.RIGID

    def __init__(self, threshold_gpu_s: float = THRESHOLD_GPU_S) -> None:
        self.threshold_gpu_s = threshold_gpu_s
        self.queues: tuple[list[int], list[int]] = ([], [])
        self.service: dict[int, float] = {}
        self.running: set[int] = set()
        self.last_s = 0.0

    def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Mapping[int, Allocation]:
        """Return the allocations of the jobs that run in the next interval."""
        by_index = {job.index: job for job in jobs}
        first, second = ([index for index in queue if index in by_index] for queue in self.queues)
        first += [index for index in by_index if index not in self.service]
        for index in by_index:
            ran = now_s - self.last_s if index in self.running else 0.0
            self.service[index] = self.service.get(index, 0.0) + ran * by_index[index].spec.num_replicas
        demoted = [index for index in by_index if index in set(first) and self._served(index)]
        first = [index for index in first if index not in demoted]
        self.queues, self.last_s = (first, [*second, *demoted]), now_s
        made = start_gangs([by_index[index] for queue in self.queues for index in queue], cluster)
        self.running = set(made)
        return made

    def _served(self, index: int) -> bool:
        return self.service[index] >= self.threshold_gpu_s
