"""Shortest remaining time first, with an oracle: how far knowing the remaining times alone would go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddltool.analyzers.scheduling.cluster import Allocation, ClusterSpec
from ddltool.analyzers.scheduling.gang import start_gangs
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
        return start_gangs(sorted(jobs, key=lambda job: (job.remaining_s(job.spec.num_replicas), job.index)), cluster)
