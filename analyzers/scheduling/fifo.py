"""First in, first out, gang scheduling, as YARN's capacity scheduler does it: no job overtakes, none is preempted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddltool.analyzers.scheduling.cluster import Allocation, ClusterSpec
from ddltool.analyzers.scheduling.gang import start_in_turn
from ddltool.analyzers.scheduling.job import SimulatedJob, Tuning


class Fifo:
    """All requested GPUs at once or none; the first job that does not fit holds all later ones up.

    In a mixed cluster each job runs on one type: :func:`~ddltool.analyzers.scheduling.gang.choose_type`.
    """

    name = "fifo"
    tuning = Tuning.RIGID

    def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Mapping[int, Allocation]:
        """Return the current allocations and those of the jobs that can start now, in order of submission."""
        return start_in_turn(sorted(jobs, key=lambda job: (job.spec.submit_s, job.index)), cluster)
