"""EasyScale (Li et al., SC 2023): logical workers on whatever is free, granted by speedup per GPU.

A job keeps its requested replicas as logical workers (ESTs) and its batch, so its results do not change; it runs them on
any number of GPUs from one on. Each round, jobs propose scale-outs by one type (:mod:`proposals`, Equation 1), and the
cluster grants greedily by speedup per GPU, more GPUs first on a tie (section 3.4), until nothing is free or asked for. A
scale-out after which the job measured slower is taken back, and the job asks for nothing more until it has been made
smaller. Jobs that hold nothing while nothing is free get one GPU each from jobs that hold several, where it costs least
speed per GPU: the minimum is 0 GPUs in the paper, which does not say who gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ddltool.analyzers.cluster.cluster import (
    Allocation,
    ClusterSpec,
    count_gpus,
    free_by_type,
    free_gpus,
    take_most_free,
)
from ddltool.analyzers.cluster.job import SimulatedJob, Tuning
from ddltool.analyzers.job.placement.proposals import Proposal, accept, best_throughput, proposals

_TOP_K = 3


class EasyScale:
    """A job may hold several types; in the published system not one whose kernels depend on the hardware (section 3.3)."""

    name = "easyscale-heter"
    tuning = Tuning.LOGICAL
    heterogeneous = True

    def __init__(self) -> None:
        # Per job: the allocation before its last scale-out, and its steps per second there.
        self._before: dict[int, tuple[Allocation, float]] = {}
        self._content: set[int] = set()

    def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Mapping[int, Allocation]:
        """Return the allocations for the next interval."""
        made = {job.index: job.allocation for job in jobs if job.allocation}
        for job in jobs:
            if job.index not in made:  # its nodes went away: there is nothing to fall back to or to be content with
                self._before.pop(job.index, None)
                self._content.discard(job.index)
            if job.index in made and (back := self._fall_back(job, now_s)):
                made[job.index] = back
        free = free_gpus(cluster, made.values())
        self._reclaim(jobs, made, free, cluster)
        names = {str(job.index): job for job in jobs}
        asking = [job for job in jobs if job.index not in self._content and job.running_from_s <= now_s]
        while any(free):
            left = free_by_type(cluster, free)
            offers = [(str(job.index), one) for job in asking for one in self._proposals(job, made, left, cluster)]
            granted = accept(offers, left)
            if not granted:
                break
            for name, one in granted:
                job = names[name]
                more = take_most_free(free, one.count, cluster.nodes_of(one.device_type))
                made[job.index] = _join(made.get(job.index, ()), more)
        for job in jobs:
            now = made.get(job.index, ())
            if job.allocation and count_gpus(now) > count_gpus(job.allocation):
                self._before[job.index] = job.allocation, job.steps_per_s
        return made

    def _proposals(
        self, job: SimulatedJob, made: Mapping[int, Allocation], left: Mapping[str, int], cluster: ClusterSpec
    ) -> list[Proposal]:
        capability = job.capabilities()
        held = cluster.by_type(made.get(job.index, ()))
        usable = {name: count for name, count in left.items() if name in capability}
        room = job.spec.num_replicas - held.total()
        if room <= 0:
            return []
        found = proposals(capability, held, usable, job.spec.num_replicas, _TOP_K, not self.heterogeneous)
        return [one for one in found if one.count <= room]

    def _reclaim(
        self, jobs: Sequence[SimulatedJob], made: dict[int, Allocation], free: list[int], cluster: ClusterSpec
    ) -> None:
        """Free one GPU for every job that holds nothing and finds nothing, while some job holds several."""
        left = free_by_type(cluster, free)
        for job in jobs:
            if job.index in made:
                continue
            have = next((name for name in job.gpu_types if left[name]), None)
            if have is None:
                given = self._cheapest(jobs, made, job.gpu_types, cluster)
                if given is None:
                    continue
                index, have = given
                node = min((c, n) for n, c in made[index] if cluster.gpu_types[n] == have)[1]
                made[index] = tuple((n, c - (n == node)) for n, c in made[index] if c > (n == node))
                self._content.discard(index)
                self._before.pop(index, None)
                free[node] += 1
                left[have] += 1
            left[have] -= 1

    def _cheapest(
        self,
        jobs: Sequence[SimulatedJob],
        made: Mapping[int, Allocation],
        wanted: Collection[str],
        cluster: ClusterSpec,
    ) -> tuple[int, str] | None:
        """Return the job and type of the GPU whose loss costs the least share of a job's speed."""
        best: tuple[float, int, str] | None = None
        for job in jobs:
            held = cluster.by_type(made.get(job.index, ()))
            if held.total() < 2:
                continue
            capability, workers = job.capabilities(), job.spec.num_replicas
            now = best_throughput(capability, held, workers)
            for name in sorted(set(held) & set(wanted)):
                rest = best_throughput(capability, held - Counter({name: 1}), workers)
                if best is None or 1 - rest / now < best[0] - 1e-12:
                    best = 1 - rest / now, job.index, name
        return best[1:] if best else None

    def _fall_back(self, job: SimulatedJob, now_s: float) -> Allocation:
        """Return what the job had before a scale-out that made it slower; () if there is nothing to take back."""
        if job.index not in self._before or job.running_from_s >= now_s:
            return ()
        before, speed = self._before.pop(job.index)
        if job.steps_per_s >= speed:
            return ()
        self._content.add(job.index)
        return before


class EasyScaleHomo(EasyScale):
    """Each job on GPUs of one type."""

    name = "easyscale-homo"
    heterogeneous = False


def _join(first: Allocation, more: Allocation) -> Allocation:
    """Return two allocations as one, nodes ascending."""
    return tuple(sorted((Counter(dict(first)) + Counter(dict(more))).items()))
