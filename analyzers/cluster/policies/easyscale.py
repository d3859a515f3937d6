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

_MOST_PROPOSALS = 3
"""Best scale-outs that a job proposes in a round."""


class EasyScale:
    """A job may hold several types; in the published system not one whose kernels depend on the hardware (section 3.3)."""

    name = "easyscale-heter"
    tuning = Tuning.LOGICAL
    heterogeneous = True

    def __init__(self) -> None:
        """Remember nothing yet."""
        self._before: dict[int, tuple[Allocation, float]] = {}
        """By job index the allocation before its last scale-out, and the steps per second there."""
        self._content: set[int] = set()
        """Indices of the jobs that ask for no more GPUs: their last scale-out made them slower."""

    def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Mapping[int, Allocation]:
        """Return the allocations for the next interval, by job index; a job keeps what it holds unless something else pays.

        ``now_s``: the round's time. Jobs whose last growth did not pay fall back, jobs without a GPU get one of another's,
        and what is free goes to the proposals of most gain, round by round (EasyScale, section 3.4).
        """
        allocations = {job.index: job.allocation for job in jobs if job.allocation}
        for job in jobs:
            if job.index not in allocations:  # its nodes went away, so what it held before means nothing now
                self._before.pop(job.index, None)
                self._content.discard(job.index)
            if job.index in allocations and (earlier := self._fall_back(job, now_s)):
                allocations[job.index] = earlier
        # What is free is offered round by round, until nobody accepts anything more.
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
        for job in jobs:  # what held before a growth is remembered, to fall back to it
            allocation = allocations.get(job.index, ())
            if job.allocation and count_gpus(allocation) > count_gpus(job.allocation):
                self._before[job.index] = job.allocation, job.steps_per_s
        return allocations

    def _proposals(self, job: SimulatedJob, held: Counter[str], free_counts: Mapping[str, int]) -> list[Proposal]:
        """Return the scale-outs that the job proposes from the GPUs that it holds, the best ones first; each adds one GPU type.

        ``held`` and ``free_counts``: GPUs by type. In all it asks for at most one GPU for each logical worker.
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
        """Free one GPU for every job that holds none and finds none free, as long as some job holds several.

        Changes ``allocations``, by job index, and ``free`` (N,), GPUs per node. The freed GPU is not given out here; it
        goes to the proposals that follow.
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
                counts = Counter(dict(allocations[index]))
                # Of its nodes with that type the one where it has fewest: it may then leave that node, and span fewer.
                node = min((count, node) for node, count in counts.items() if cluster.gpu_types[node] == gpu_type)[1]
                allocations[index] = tuple((counts - Counter([node])).items())
                # It has become smaller, and may ask again.
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
        """Return (job index, GPU type) of the one GPU whose loss slows its job down least; None where no job could give one.

        Only jobs that hold several GPUs give one, of one of ``gpu_types``. The slowdown is a share of the job's
        throughput. ``allocations``: by job index.
        """
        cheapest: tuple[float, int, str] | None = None
        for job in jobs:
            held = cluster.by_type(allocations.get(job.index, ()))
            if held.total() < 2:
                continue
            capability, workers = job.capabilities(), job.spec.num_replicas
            throughput = best_throughput(capability, held, workers)
            for name in sorted(set(held) & set(gpu_types)):
                throughput_left = best_throughput(capability, held - Counter({name: 1}), workers)
                slowdown = 1 - throughput_left / throughput
                if cheapest is None or slowdown < cheapest[0] - 1e-12:  # rounding decides nothing: the first stays
                    cheapest = slowdown, job.index, name
        return cheapest[1:] if cheapest else None

    def _fall_back(self, job: SimulatedJob, now_s: float) -> Allocation:
        """Return the allocation to which the job goes back as its last scale-out made it slower; () if it did not.

        The job has to have run on the new allocation, restart over. It then asks for no more GPUs.
        """
        if job.index not in self._before or job.running_from_s >= now_s:
            return ()
        before, steps_per_s = self._before.pop(job.index)
        if job.steps_per_s >= steps_per_s:
            return ()
        self._content.add(job.index)
        return before


class EasyScaleHomo(EasyScale):
    """Each job on GPUs of one type."""

    name = "easyscale-homo"
    heterogeneous = False


def _join(first: Allocation, more: Allocation) -> Allocation:
    """Return two allocations, each (node, GPUs) pairs, as one: the GPUs of a node that both have added up, nodes ascending."""
    return tuple(sorted((Counter(dict(first)) + Counter(dict(more))).items()))
