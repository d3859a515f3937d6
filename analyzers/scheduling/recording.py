"""What a replay's result leaves out: who held what in each round. :class:`Recorder` wraps a policy and keeps that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.scheduling.cluster import Allocation, ClusterSpec, count_gpus
from ddltool.analyzers.scheduling.job import SimulatedJob
from ddltool.analyzers.scheduling.simulator import Policy, SimulationResult

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """From ``time_s`` on job ``job`` (its row in the workload) holds ``allocation``; () is none."""

    time_s: float
    job: int
    allocation: Allocation
    restarted: bool
    """Whether this starts it anew; False for the first start and for a stop."""

    @property
    def gpus(self) -> int:
        """How many GPUs."""
        return count_gpus(self.allocation)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Job ``job`` was first seen to run with ``batch_size`` samples per step at ``time_s``."""

    time_s: float
    job: int
    batch_size: int


class Recorder:
    """A policy that passes everything on to ``policy`` and keeps its answers, where they changed.

    Batches are those that jobs ran with when the round began, so a change within an interval is seen at its end, and
    a batch that a job had between two rounds only is not seen. What failures took
    away counts as held until the next round.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.name, self.tuning = policy.name, policy.tuning
        self.pools = getattr(policy, "pools", False)
        self.held: list[Held] = []
        self.batches: list[Batch] = []
        self._batch: dict[int, int] = {}
        self._known: dict[int, Allocation] = {}

    def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Mapping[int, Allocation]:
        """Return what the policy answers."""
        has = {job.index: job.allocation for job in jobs}
        # What the simulator took away (a node failed) is seen here at the earliest; a finished job has nothing either.
        for index in [index for index, known in self._known.items() if known and known != has.get(index, ())]:
            self._note(now_s, index, (), restarted=False)
        for job in jobs:
            # A job in its restart has not trained with its batch yet.
            if job.allocation and now_s > job.running_from_s:
                size = job.total_batch_size
                if self._batch.get(job.index) != size:
                    self._batch[job.index] = size
                    self.batches.append(Batch(time_s=now_s, job=job.index, batch_size=size))
        chosen = self.policy.allocate(jobs, cluster, now_s)
        for job in jobs:
            new = chosen.get(job.index, ())
            if new != job.allocation:
                self._note(now_s, job.index, new, restarted=bool(new) and job.starts > 0)
        return chosen

    def _note(self, now_s: float, job: int, allocation: Allocation, *, restarted: bool) -> None:
        self._known[job] = allocation
        self.held.append(Held(time_s=now_s, job=job, allocation=allocation, restarted=restarted))


def gpus_over_time(result: SimulationResult, record: Recorder) -> tuple[Floats, Floats]:
    """Return times (t,) in seconds since the first submission and the GPUs of each job from each on, (n, t).

    The last column is the end, where nothing is held.
    """
    ends = [job.finish_s for job in result.jobs]
    changes = [(entry.time_s, entry.job, entry.gpus) for entry in record.held if entry.time_s < ends[entry.job]]
    changes += [(job.finish_s, index, 0) for index, job in enumerate(result.jobs)]
    begin = min(job.submit_s for job in result.jobs)
    times = np.unique(np.array([begin, *(at for at, _, _ in changes)]))
    held = np.zeros((len(result.jobs), len(times)))
    # Where a job ends in the very round in which another takes its GPUs both are told of at one time; order by job.
    for at, job, gpus in sorted(changes, key=lambda change: change[0]):
        held[job, int(np.searchsorted(times, at)) :] = gpus
    return times - begin, held


def longest_restarted(result: SimulationResult) -> str:
    """Return the job whose life shows most: the one with the most restarts, the longest on a tie."""
    return max(result.jobs, key=lambda job: (job.restarts, job.jct_s)).name
