"""The search behind Pollux: allocations of least total cost when a job's cost depends on its own allocation alone.

A power mean of penalised speedups is such a sum. Start at :func:`search`, which has two parts. *Counts*: the number of GPUs of
each job, exactly, by dynamic programming, as if every count fitted on the nodes; its value is a lower bound on the cost of
every allocation. *Packing*: real nodes for these counts, with at most one job that spans nodes on any node; then local search,
which takes out a job that got fewer than its count and the jobs of one node, and puts them back in a better way. The gap
between the two costs bounds how far the result is from the best.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ddltool.analyzers.cluster.cluster import Allocation, count_gpus, fewest_nodes
from ddltool.arrays import Floats, Places

# Gains below this share of the cost are rounding errors.
_LEAST_GAIN = 1e-9
# Most jobs above their ideal cost that one pass of local search moves, and most passes.
_MOST_SHORT_JOBS, _MOST_PASSES = 12, 20
# A cost above its bound by less than this share has reached it.
_AT_BOUND = 1e-6
# Random choices of :meth:`_Packing.ruin_and_recreate`, found by trial: most nodes that it empties, most jobs without GPUs
# that it includes, probability that large counts go first, and that a job gets its former allocation back.
_MOST_EMPTIED, _MOST_JOINING, _LARGEST_FIRST_SHARE, _KEEP_SHARE = 4, 2, 0.7, 0.9


@dataclass(frozen=True, kw_only=True, eq=False)
class JobCosts:
    """The costs of one job: ``within[k]`` on k GPUs of one node, ``across[k]`` on k GPUs of several nodes, (m + 1,) each.

    ``within[0]`` is the cost of no GPUs. ``keep`` is the cost of keeping the current allocation ``base``. inf where not
    allowed.
    """

    within: Floats
    across: Floats
    base: Allocation = ()
    keep: float = np.inf


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedAllocations:
    """The chosen allocations (one per job), their total cost, and a lower bound on the total cost of any."""

    allocations: tuple[Allocation, ...]
    cost: float
    bound: float


def choose_counts(costs: Sequence[Floats], gpus: int) -> tuple[list[int], float]:
    """Return the numbers of GPUs of n jobs, ``gpus`` in all, with the least total cost, and that cost.

    ``costs[j][k]``: cost of job j with k GPUs. Exact: dynamic programming over jobs and GPUs, O(n gpus max_k).
    """
    all_gpus = np.arange(gpus + 1)
    best_costs = np.zeros(gpus + 1)  # least cost of the jobs so far with at most k GPUs, for k from 0
    best_counts_by_job: list[Places] = []
    for cost in costs:
        job_cost = cost[: gpus + 1]
        padded = np.concatenate([np.full(len(job_cost) - 1, np.inf), best_costs])
        item_bytes = padded.itemsize  # a view: row g, column k is the least cost of the earlier jobs on g - k GPUs
        earlier_costs = np.lib.stride_tricks.as_strided(
            padded[len(job_cost) - 1 :], (gpus + 1, len(job_cost)), (item_bytes, -item_bytes)
        )
        totals = earlier_costs + job_cost
        best_counts = totals.argmin(axis=1)
        best_costs = totals[all_gpus, best_counts]
        best_counts_by_job.append(best_counts)
    # Backwards from the last job: the GPUs that it does not take are for the jobs before it.
    counts: list[int] = []
    gpus_left = gpus
    for best_counts in reversed(best_counts_by_job):
        count = int(best_counts[gpus_left])
        counts.append(count)
        gpus_left -= count
    return counts[::-1], float(best_costs[gpus])


def cost_by_count(choice: JobCosts) -> Floats:
    """Return the least cost of each count of GPUs (m + 1,): within a node, across nodes, or by keeping the allocation.

    The array is longer where the job holds more than m GPUs.
    """
    least_costs = np.minimum(choice.within, choice.across)
    least_costs[0] = choice.within[0]
    held = count_gpus(choice.base)
    if held >= len(least_costs):
        least_costs = np.concatenate([least_costs, np.full(held + 1 - len(least_costs), np.inf)])
    if held:
        least_costs[held] = min(least_costs[held], choice.keep)
    return np.asarray(least_costs)


def search(choices: Sequence[JobCosts], gpus: Sequence[int], *, effort: int = 100, seed: int = 0) -> PackedAllocations:
    """Return allocations of n jobs, with the costs ``choices``, on nodes with ``gpus`` (N,) GPUs, of small total cost.

    At most one job that spans nodes is on any node. ``effort``: number of times that local search takes some jobs out and puts
    them back; 0: no local search. The result depends on nothing else but ``seed``. The objective, not the algorithm, is that of
    Pollux, section 4.2.
    """
    costs = [cost_by_count(choice) for choice in choices]
    counts, bound = choose_counts(costs, sum(gpus))
    packing = _Packing(choices, gpus, avoid_sharing=True)
    packing.fill(counts)
    ideal = [float(cost[count]) for cost, count in zip(costs, counts, strict=True)]
    if effort:
        packing.improve(ideal, bound)
        packing.ruin_and_recreate(costs, bound, effort, random.Random(seed))
    return PackedAllocations(allocations=tuple(packing.allocations), cost=sum(packing.costs), bound=bound)


def pack(choices: Sequence[JobCosts], gpus: Sequence[int], counts: Sequence[int]) -> tuple[Allocation, ...]:
    """Return allocations of n jobs with about ``counts`` (n,) GPUs on nodes with ``gpus`` (N,); all counts must fit in sum.

    Jobs that keep their count keep their allocation; the others are placed by falling count. A job whose count does not fit,
    because the free GPUs are scattered, gets the best allocation that does.
    """
    packing = _Packing(choices, gpus, avoid_sharing=False)
    packing.fill(counts)
    return tuple(packing.allocations)


_Saved = tuple[list[int], list[int], list[Allocation], list[float]]
"""Free GPUs and spanning jobs per node; allocation and cost of each job."""


class _Packing:
    """The allocations of all jobs during the search. They are Python's lists, which are faster than numpy's when short."""

    def __init__(self, choices: Sequence[JobCosts], gpus: Sequence[int], avoid_sharing: bool) -> None:
        """Start with no GPUs for any job, on nodes with ``gpus`` (N,) GPUs.

        ``avoid_sharing``: whether at most one job that spans nodes may be on any node.
        """
        self.choices = choices
        self.gpus = list(gpus)
        self.avoid_sharing = avoid_sharing
        self.free = list(gpus)
        """(N,) free GPUs of each node."""
        self.spanning = [0] * len(gpus)
        """(N,) number of jobs on each node that span nodes."""
        self.allocations: list[Allocation] = [()] * len(choices)
        self.within = [choice.within.tolist() for choice in choices]
        """By job and count, the cost on one node; ``across``: on several."""
        self.across = [choice.across.tolist() for choice in choices]
        self.costs = [within[0] for within in self.within]
        """By job, the cost of its present allocation."""
        self.best_within = [_prefix_argmin(within) for within in self.within]
        """By job and x, the count of least cost among those up to x on one node; ``best_across``: on several."""
        self.best_across = [_prefix_argmin(across) for across in self.across]

    def fill(self, counts: Sequence[int]) -> None:
        """Give each job about its count of GPUs.

        Jobs that already held that many keep their allocation; the others follow by falling count. Then every job, by falling
        cost, is moved to where it costs least.
        """
        moved = []
        for job, count in enumerate(counts):
            choice = self.choices[job]
            if not (choice.base and count == count_gpus(choice.base) and self.keep(job)):
                moved.append(job)
        for job in sorted(moved, key=lambda job: -counts[job]):
            self.insert(job, counts[job])
        for job in sorted(range(len(counts)), key=lambda job: -self.costs[job]):
            self.reinsert(job)

    def keep(self, job: int) -> bool:
        """Give the job its allocation of before the search (``base``) if those GPUs are free, and return whether they were.

        The job must hold no GPUs. False also where it had no allocation or must not keep it.
        """
        choice = self.choices[job]
        base = choice.base
        if not base or choice.keep == np.inf:
            return False
        spans = len(base) > 1
        for node, count in base:
            if self.free[node] < count or (spans and not self.may_span(node)):
                return False
        self.give(job, base, choice.keep)
        return True

    def give(self, job: int, allocation: Allocation, cost: float) -> None:
        """Give the job this allocation, at ``cost``; it must hold no GPUs."""
        spans = len(allocation) > 1
        for node, count in allocation:
            self.free[node] -= count
            self.spanning[node] += spans
        self.allocations[job] = allocation
        self.costs[job] = cost

    def take(self, job: int) -> None:
        """Take all GPUs from the job, and set its cost to that of no GPUs."""
        spans = len(self.allocations[job]) > 1
        for node, count in self.allocations[job]:
            self.free[node] += count
            self.spanning[node] -= spans
        self.allocations[job] = ()
        self.costs[job] = self.within[job][0]

    def insert(self, job: int, most: int) -> None:
        """Give a job that holds no GPUs at most ``most`` free ones, within a node or across nodes, such that it costs least.

        Its allocation of before the search (``base``) is preferred where it is free and costs no more. Within a node, the node
        with the fewest free GPUs that suffice is taken, to leave larger ones to other jobs.
        """
        free, choice = self.free, self.choices[job]
        best_within, best_across = self.best_within[job], self.best_across[job]
        # The best count that one node can give.
        within_count = best_within[min(max(free), most, len(best_within) - 1)]
        cost = self.within[job][within_count]
        # The best count over several nodes, where that costs less.
        across_count = 0
        if most > 1 and len(best_across) > 2:
            usable = [free[node] for node in range(len(free)) if self.may_span(node)]
            count = best_across[min(sum(usable), most, len(best_across) - 1)] if len(usable) > 1 else 0
            if self.across[job][count] < cost:
                across_count = count
                cost = self.across[job][count]
        # the allocation of before the search, which costs no restart
        held = count_gpus(choice.base)
        if held and choice.keep <= cost and held <= max(most, across_count, within_count) and self.keep(job):
            return
        if across_count:
            allocation = self.spread(across_count)
            if len(allocation) > 1:
                self.give(job, allocation, cost)
                return
        if within_count:
            fitting = (each for each in range(len(free)) if free[each] >= within_count)
            node = min(fitting, key=lambda each: (free[each], not self.spanning[each], each))
            self.give(job, ((node, within_count),), self.within[job][within_count])

    def spread(self, count: int) -> Allocation:
        """Return an allocation of ``count`` free GPUs on as few of the nodes that a spanning job may use as possible.

        () if there are too few.
        """
        nodes = [node for node in range(len(self.free)) if self.free[node] and self.may_span(node)]
        return fewest_nodes(self.free, sorted(nodes, key=lambda node: -self.free[node]), count)

    def may_span(self, node: int) -> bool:
        """Return whether a job that spans nodes may use this one: with ``avoid_sharing``, only if no other such job does."""
        return not (self.avoid_sharing and self.spanning[node])

    def reinsert(self, job: int) -> bool:
        """Move one job to where it costs least, if that is cheaper, and return whether it moved; all others stay."""
        allocation, cost = self.allocations[job], self.costs[job]
        self.take(job)
        self.insert(job, len(self.within[job]) + len(self.across[job]))
        if self.costs[job] < cost * (1 - _LEAST_GAIN):
            return True
        self.take(job)
        self.give(job, allocation, cost)
        return False

    def improve(self, ideal: Sequence[float], bound: float) -> None:
        """Lower the total cost by local search (:meth:`relocate`), until a pass gains nothing or the bound is reached.

        ``ideal`` (n,): each job's cost with its count if that fits on the nodes; only jobs that cost more are relocated, those
        furthest above first. ``bound``: the lower bound on the total cost.
        """
        for _ in range(_MOST_PASSES):
            if _is_at_bound(sum(self.costs), bound):
                return
            short = [job for job in range(len(ideal)) if self.costs[job] > ideal[job] * (1 + _AT_BOUND)]
            short.sort(key=lambda job: ideal[job] - self.costs[job])
            moved = sum(self.relocate(job) for job in short[:_MOST_SHORT_JOBS])
            if not moved:
                return

    def relocate(self, job: int) -> bool:
        """Try, for each node, to take out ``job`` and the node's jobs and insert ``job`` first; keep the best result.

        Return whether one lowered the total cost. Each is tried twice: with the node's jobs getting back their allocation of
        before the search, where it is free, before ``job`` is inserted, and without.
        """
        jobs_on_node: dict[int, list[int]] = {}
        for other, allocation in enumerate(self.allocations):
            for node, _ in allocation:
                jobs_on_node.setdefault(node, []).append(other)
        cost_before = sum(self.costs)
        saved = self.save()
        held_counts = [count_gpus(allocation) for allocation in self.allocations]
        best_state: tuple[float, _Saved] | None = None
        tried: set[tuple[int, ...]] = set()
        for node in range(len(self.gpus)):
            # the other jobs on the node; nodes with the same jobs are tried once
            displaced = tuple(other for other in jobs_on_node.get(node, []) if other != job)
            if displaced in tried:
                continue
            tried.add(displaced)
            for keeps_displaced in (False, True):
                self.restore(saved)
                self._put_before(job, {other: max(1, held_counts[other]) for other in displaced}, keeps_displaced)
                total = sum(self.costs)
                if total < cost_before * (1 - _LEAST_GAIN) and (best_state is None or total < best_state[0]):
                    best_state = total, self.save()
        self.restore(best_state[1] if best_state else saved)
        return best_state is not None

    def _put_before(self, job: int, displaced: Mapping[int, int], keeps_displaced: bool) -> None:
        """Take out ``job`` and the ``displaced`` jobs, insert ``job``, then the others by falling number of GPUs.

        ``displaced``: job -> most GPUs that it gets. ``keeps_displaced``: whether these get back their allocation of before the
        search, where it is free, before ``job`` is inserted.
        """
        for other in (job, *displaced):
            self.take(other)
        if keeps_displaced:
            for other in displaced:
                self.keep(other)
        self.insert(job, len(self.within[job]) + len(self.across[job]))
        for other in sorted(displaced, key=lambda each: -displaced[each]):
            if not self.allocations[other]:
                self.insert(other, displaced[other])
        for other in displaced:
            self.reinsert(other)

    def ruin_and_recreate(self, costs: Sequence[Floats], bound: float, effort: int, generator: random.Random) -> None:
        """Remove the jobs of 1 to 4 nodes, choose their counts again and insert them in another order, ``effort`` times.

        A result is kept unless it costs more, so that the search can walk along allocations of equal cost. It ends early at
        ``bound``, the lower bound on the total cost. ``costs[j][k]``: cost of job j with k GPUs; ``generator``: of the random
        choices.
        """
        total = sum(self.costs)
        jobs, nodes = len(self.costs), len(self.gpus)
        for _ in range(effort):
            if _is_at_bound(total, bound):
                return
            saved = self.save()
            # Ruin: the jobs on a few random nodes lose their GPUs, and some jobs without GPUs are included.
            opened_nodes = set(generator.sample(range(nodes), min(nodes, generator.randint(1, _MOST_EMPTIED))))
            removed = [job for job in range(jobs) if any(node in opened_nodes for node, _ in self.allocations[job])]
            without_gpus = [job for job in range(jobs) if not self.allocations[job]]
            removed += generator.sample(without_gpus, min(_MOST_JOINING, len(without_gpus)))
            for job in removed:
                self.take(job)
            # Recreate: the best counts for the free GPUs, inserted in random order or largest first.
            counts, _ = choose_counts([costs[job] for job in removed], sum(self.free))
            wanted_counts = dict(zip(removed, counts, strict=True))
            generator.shuffle(removed)
            if generator.random() < _LARGEST_FIRST_SHARE:
                removed.sort(key=lambda job: -wanted_counts[job])
            unchanged = [job for job in removed if wanted_counts[job] == count_gpus(self.choices[job].base)]
            kept_jobs = {job for job in unchanged if generator.random() < _KEEP_SHARE and self.keep(job)}
            for job in removed:
                if job not in kept_jobs:
                    self.insert(job, wanted_counts[job])
            for job in removed:
                self.reinsert(job)
            new_total = sum(self.costs)
            if new_total <= total:
                total = new_total
            else:
                self.restore(saved)

    def save(self) -> _Saved:
        """Return a copy of the state, for :meth:`restore`."""
        return self.free[:], self.spanning[:], self.allocations[:], self.costs[:]

    def restore(self, saved: _Saved) -> None:
        """Return to a state that :meth:`save` returned; it is copied, so that it can be restored again."""
        free, spanning, allocations, costs = saved
        self.free = free[:]
        self.spanning = spanning[:]
        self.allocations = allocations[:]
        self.costs = costs[:]


def _is_at_bound(cost: float, bound: float) -> bool:
    """Return whether a total cost is equal to its lower bound, up to rounding errors, so that the search can end."""
    return cost <= bound * (1 + _AT_BOUND) + 1e-12


def _prefix_argmin(values: Sequence[float]) -> list[int]:
    """Return for each index x the first index of the least value among those up to x.

    >>> _prefix_argmin([3.0, 5.0, 2.0, 2.0])
    [0, 0, 2, 2]
    """
    argmins: list[int] = []
    best_index = 0
    for index, value in enumerate(values):
        if value < values[best_index]:
            best_index = index
        argmins.append(best_index)
    return argmins
