"""EasyScale (Li et al., SC 2023): logical workers on any free GPUs, granted by speedup per GPU.

A job keeps its requested replicas as logical workers (ESTs) and its batch, so that its results do not change; it runs them on
any number of GPUs from one on. In each round, jobs propose scale-outs by one type (:mod:`proposals`, Equation 1), and the
cluster grants them greedily by speedup per GPU, more GPUs first in ties (section 3.4), until no GPU is free or none is
proposed. A scale-out that made the job slower is undone, and the job proposes nothing until it has been made smaller. For a
job without GPUs, when none is free, one GPU is taken from the job with several that loses least speed by that. (In the paper
a job may have 0 GPUs; it does not say from which job GPUs are taken.)
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

_MOST_PROPOSALS = 3
"""Best scale-outs that a job proposes in a round."""


class EasyScale:
    """EasyScale where a job may hold several types.

    In the published system, jobs whose kernels depend on the hardware may not (section 3.3).
    """

    name = "easyscale-heter"
    tuning = Tuning.LOGICAL
    heterogeneous = True

    def __init__(self) -> None:
        """Begin without records of scale-outs."""
        self._before: dict[int, tuple[Allocation, float]] = {}
        """Job index -> (allocation before its last scale-out, steps per second there)."""
        self._content: set[int] = set()
        """Indices of the jobs that propose nothing, because their last scale-out made them slower."""

    def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Mapping[int, Allocation]:
        """Return job index -> allocation for the next interval.

        Jobs that their last scale-out made slower fall back to the allocation before it, a GPU is freed for each job without
        one, and free GPUs go to the proposals with most speedup per GPU, in several turns (EasyScale, section 3.4). All other
        allocations stay.
        """
        allocations = {job.index: job.allocation for job in jobs if job.allocation}
        for job in jobs:
            if job.index not in allocations:  # it is new or its nodes failed, so earlier records are void
                self._before.pop(job.index, None)
                self._content.discard(job.index)
            if job.index in allocations and (earlier := self._fall_back(job, now_s)):
                allocations[job.index] = earlier
        # Free GPUs are offered again and again, until no proposal is accepted.
        free = free_gpus(cluster, allocations.values())
        self._reclaim(jobs, allocations, free, cluster)
        job_by_name = {str(job.index): job for job in jobs}
        asking = [job for job in jobs if job.index not in self._content and job.running_from_s <= now_s]
        while any(free):
            free_counts = free_by_type(cluster, free)
            offers = [
                (str(job.index), offer)
                for job in asking
                for offer in self._proposals(job, cluster.by_type(allocations.get(job.index, ())), free_counts)
            ]
            accepted = accept(offers, free_counts)
            if not accepted:
                break
            for name, offer in accepted:
                job = job_by_name[name]
                added = take_most_free(free, offer.count, cluster.nodes_of(offer.device_type))
                allocations[job.index] = _join(allocations.get(job.index, ()), added)
        for job in jobs:  # the allocation before a scale-out is recorded, to fall back to it
            allocation = allocations.get(job.index, ())
            if job.allocation and count_gpus(allocation) > count_gpus(job.allocation):
                self._before[job.index] = job.allocation, job.steps_per_s
        return allocations

    def _proposals(self, job: SimulatedJob, held: Counter[str], free_counts: Mapping[str, int]) -> list[Proposal]:
        """Return the scale-outs that the job proposes, best first; each adds GPUs of one type.

        ``held`` and ``free_counts``: GPU type -> GPUs. In total a job gets at most one GPU per logical worker.
        """
        capability_per_s = job.capabilities()
        usable = {name: count for name, count in free_counts.items() if name in capability_per_s}
        missing_replicas = job.spec.num_replicas - held.total()
        if missing_replicas <= 0:
            return []
        offers = proposals(
            capability_per_s, held, usable, job.spec.num_replicas, _MOST_PROPOSALS, not self.heterogeneous
        )
        return [offer for offer in offers if offer.count <= missing_replicas]

    def _reclaim(
        self, jobs: Sequence[SimulatedJob], allocations: dict[int, Allocation], free: list[int], cluster: ClusterSpec
    ) -> None:
        """Free one GPU for each job that holds none and finds no free one, while some job holds several.

        Changes ``allocations`` (by job index) and ``free`` (N,), GPUs per node. The freed GPU is not allocated here, but by the
        proposals that follow.
        """
        free_counts = free_by_type(cluster, free)
        for job in jobs:
            if job.index in allocations:
                continue
            gpu_type = next((name for name in job.gpu_types if free_counts[name]), None)
            if gpu_type is None:
                cheapest = self._cheapest(jobs, allocations, job.gpu_types, cluster)
                if cheapest is None:
                    continue
                index, gpu_type = cheapest
                counts = Counter(dict(allocations[index]))  # node -> GPUs
                # from its node with fewest GPUs of that type, which it may then leave altogether
                _, node = min((count, node) for node, count in counts.items() if cluster.gpu_types[node] == gpu_type)
                allocations[index] = tuple((counts - Counter([node])).items())
                # it has become smaller, and may propose again
                self._content.discard(index)
                self._before.pop(index, None)
                free[node] += 1
                free_counts[gpu_type] += 1
            free_counts[gpu_type] -= 1

    def _cheapest(
        self,
        jobs: Sequence[SimulatedJob],
        allocations: Mapping[int, Allocation],
        gpu_types: Collection[str],
        cluster: ClusterSpec,
    ) -> tuple[int, str] | None:
        """Return (job index, GPU type) of the GPU whose loss lowers its job's throughput by the least share; None: no such GPU.

        Only jobs that hold several GPUs can lose one, of one of ``gpu_types``. ``allocations``: job index -> allocation.
        """
        cheapest: tuple[float, int, str] | None = None
        for job in jobs:
            held = cluster.by_type(allocations.get(job.index, ()))
            if held.total() < 2:
                continue
            capability = job.capabilities()
            workers = job.spec.num_replicas
            throughput = best_throughput(capability, held, workers)
            for name in sorted(set(held) & set(gpu_types)):
                throughput_left = best_throughput(capability, held - Counter({name: 1}), workers)
                slowdown = 1 - throughput_left / throughput
                if cheapest is None or slowdown < cheapest[0] - 1e-12:  # of equal ones, up to rounding, the first
                    cheapest = slowdown, job.index, name
        return cheapest[1:] if cheapest else None

    def _fall_back(self, job: SimulatedJob, now_s: float) -> Allocation:
        """Return the allocation before the job's last scale-out if that made it slower, else ().

        Also () as long as the restart on the new allocation is not over. The speeds are compared once: then the record of the
        scale-out is removed, and a job that falls back is marked, so that it proposes nothing.
        """
        if job.index not in self._before or job.running_from_s >= now_s:
            return ()
        before, steps_per_s = self._before.pop(job.index)
        if job.steps_per_s >= steps_per_s:
            return ()
        self._content.add(job.index)
        return before


class EasyScaleHomo(EasyScale):
    """EasyScale with each job on GPUs of one type."""

    name = "easyscale-homo"
    heterogeneous = False


def _join(first: Allocation, more: Allocation) -> Allocation:
    """Return the sum of two allocations, with nodes in ascending order."""
    return tuple(sorted((Counter(dict(first)) + Counter(dict(more))).items()))
