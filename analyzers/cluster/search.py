"""The search behind Pollux: allocations of least total cost when a job's cost depends on its own allocation alone.

A power mean of penalised speedups is such a sum. So the search has two parts. *Counts*: how many GPUs for each job,
exactly, by dynamic programming, as if all GPUs stood on nodes that fit; its value is a lower bound on the cost of every
allocation. *Packing*: real nodes for these counts, with at most one job that spans nodes on any node, then local search:
take a job that is short of its count and the jobs of one node out, put them back in a better way. The gap between the
two tells how good the result is at least.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddltool.analyzers.cluster.cluster import Allocation, count_gpus, fewest_nodes
from ddltool.arrays import Floats, Places

# A gain below this share of the cost is rounding.
_GAIN = 1e-9
# Jobs that fell short of their count that one pass of local search looks at, and its passes.
_SHORT, _PASSES = 12, 20


@dataclass(frozen=True, kw_only=True, eq=False)
class JobCosts:
    """What one job costs: ``within[k]`` on k GPUs of one node, ``across[k]`` over several, (m + 1,) each.

    ``within[0]`` is the cost of nothing. ``keep`` is the cost of the current allocation ``base``, if it has one and may
    keep it. inf where not allowed.
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
    """Return how many of ``gpus`` each of n jobs gets, and the least total cost; ``costs[j][k]``: job j with k GPUs.

    Exact: dynamic programming over jobs and GPUs, O(n gpus max_k).
    """
    best, every = np.zeros(gpus + 1), np.arange(gpus + 1)
    picks: list[Places] = []
    for cost in costs:
        kept = cost[: gpus + 1]
        padded = np.concatenate([np.full(len(kept) - 1, np.inf), best])
        step = padded.itemsize  # row g, column k: the least cost of the jobs before on g - k GPUs
        rest = np.lib.stride_tricks.as_strided(padded[len(kept) - 1 :], (gpus + 1, len(kept)), (step, -step))
        totals = rest + kept
        pick = totals.argmin(axis=1)
        best = totals[every, pick]
        picks.append(pick)
    counts: list[int] = []
    left = gpus
    for pick in reversed(picks):
        counts.append(int(pick[left]))
        left -= counts[-1]
    return counts[::-1], float(best[gpus])


def flat(choice: JobCosts) -> Floats:
    """Return the least cost of each count (m + 1,), wherever its GPUs stand, the current allocation included.

    The array is longer where the job holds more GPUs than it may newly be given.
    """
    made = np.minimum(choice.within, choice.across)
    made[0] = choice.within[0]
    held = count_gpus(choice.base)
    if held >= len(made):
        made = np.concatenate([made, np.full(held + 1 - len(made), np.inf)])
    if held:
        made[held] = min(made[held], choice.keep)
    return np.asarray(made)


def search(choices: Sequence[JobCosts], gpus: Sequence[int], *, effort: int = 100, seed: int = 0) -> PackedAllocations:
    """Return allocations of n jobs on nodes with ``gpus`` (N,) GPUs of small total cost.

    At most one job that spans nodes is on any node. ``effort``: how often the local search takes some jobs out and puts
    them back; 0 packs only. Same ``seed``, same result. Source: Pollux, section 4.2 (the objective, not the way).
    """
    costs = [flat(choice) for choice in choices]
    counts, bound = choose_counts(costs, sum(gpus))
    packing = _Packing(choices, gpus, avoid_sharing=True)
    packing.fill(counts)
    ideal = [float(cost[count]) for cost, count in zip(costs, counts, strict=True)]
    if effort:
        packing.improve(ideal, bound)
        packing.ruin_and_recreate(costs, bound, effort, random.Random(seed))
    return PackedAllocations(allocations=tuple(packing.allocations), cost=sum(packing.costs), bound=bound)


def pack(choices: Sequence[JobCosts], gpus: Sequence[int], counts: Sequence[int]) -> tuple[Allocation, ...]:
    """Return allocations of n jobs of about ``counts`` (n,) GPUs on nodes with ``gpus`` (N,); the sum must fit.

    Jobs that keep their count keep their place; the others come in order of their count, largest first. What no longer
    fits because the free GPUs are scattered gets the best of what is free.
    """
    packing = _Packing(choices, gpus, avoid_sharing=False)
    packing.fill(counts)
    return tuple(packing.allocations)


_Saved = tuple[list[int], list[int], list[Allocation], list[float]]
"""Free GPUs and spanning jobs per node; allocation and cost of each job."""


class _Packing:
    """Which job has which GPUs, and the moves on it. Lists of Python numbers: they are short and change all the time."""

    def __init__(self, choices: Sequence[JobCosts], gpus: Sequence[int], avoid_sharing: bool) -> None:
        self.choices = choices
        self.gpus = list(gpus)
        self.avoid_sharing = avoid_sharing
        self.free = list(gpus)
        self.spanning = [0] * len(gpus)
        self.allocations: list[Allocation] = [()] * len(choices)
        self.within = [choice.within.tolist() for choice in choices]
        self.across = [choice.across.tolist() for choice in choices]
        self.costs = [within[0] for within in self.within]
        # best_within[j][x]: the count of least cost among those up to x; likewise across.
        self.best_within = [_prefix_argmin(within) for within in self.within]
        self.best_across = [_prefix_argmin(across) for across in self.across]

    def fill(self, counts: Sequence[int]) -> None:
        """Give each job about its count: first those that keep what they have, then the largest first."""
        later = []
        for job, count in enumerate(counts):
            choice = self.choices[job]
            if not (choice.base and count == count_gpus(choice.base) and self.keep(job)):
                later.append(job)
        for job in sorted(later, key=lambda job: -counts[job]):
            self.insert(job, counts[job])
        for job in sorted(range(len(counts)), key=lambda job: -self.costs[job]):
            self.reinsert(job)

    def keep(self, job: int) -> bool:
        """Give the job its current allocation back if it is free."""
        choice = self.choices[job]
        base = choice.base
        if not base or choice.keep == np.inf:
            return False
        spans = len(base) > 1
        for node, count in base:
            if self.free[node] < count or (spans and self.avoid_sharing and self.spanning[node]):
                return False
        self.give(job, base, choice.keep)
        return True

    def give(self, job: int, allocation: Allocation, cost: float) -> None:
        """Put an allocation into effect."""
        spans = len(allocation) > 1
        for node, count in allocation:
            self.free[node] -= count
            self.spanning[node] += spans
        self.allocations[job], self.costs[job] = allocation, cost

    def take(self, job: int) -> None:
        """Take everything from a job."""
        spans = len(self.allocations[job]) > 1
        for node, count in self.allocations[job]:
            self.free[node] += count
            self.spanning[node] -= spans
        self.allocations[job], self.costs[job] = (), self.within[job][0]

    def insert(self, job: int, most: int) -> None:
        """Give a job without GPUs the best of what is free, ``most`` GPUs at most (its current allocation aside)."""
        free, choice = self.free, self.choices[job]
        best_within, best_across = self.best_within[job], self.best_across[job]
        one = best_within[min(max(free), most, len(best_within) - 1)]
        cost, several = self.within[job][one], 0
        if most > 1 and len(best_across) > 2:
            room = [free[node] for node in range(len(free)) if not (self.avoid_sharing and self.spanning[node])]
            count = best_across[min(sum(room), most, len(best_across) - 1)] if len(room) > 1 else 0
            if self.across[job][count] < cost:
                several, cost = count, self.across[job][count]
        held = count_gpus(choice.base)
        if held and choice.keep <= cost and held <= max(most, several, one) and self.keep(job):
            return
        if several:
            made = self.spread(several)
            if len(made) > 1:
                self.give(job, made, cost)
                return
        if one:
            fits = (n for n in range(len(free)) if free[n] >= one)
            node = min(fits, key=lambda n: (free[n], not self.spanning[n], n))
            self.give(job, ((node, one),), self.within[job][one])

    def spread(self, count: int) -> Allocation:
        """Return ``count`` GPUs over as few nodes as possible that no other spanning job uses; () if there are not."""
        free = self.free
        nodes = [n for n in range(len(free)) if free[n] and not (self.avoid_sharing and self.spanning[n])]
        return fewest_nodes(free, sorted(nodes, key=lambda n: -free[n]), count)

    def reinsert(self, job: int) -> bool:
        """Put one job where it is best off given all others, and return whether that helped."""
        allocation, cost = self.allocations[job], self.costs[job]
        self.take(job)
        self.insert(job, len(self.within[job]) + len(self.across[job]))
        if self.costs[job] < cost * (1 - _GAIN):
            return True
        self.take(job)
        self.give(job, allocation, cost)
        return False

    def improve(self, ideal: Sequence[float], bound: float) -> None:
        """Lower the total cost by local search until a pass brings nothing or the bound is reached."""
        for _ in range(_PASSES):
            if sum(self.costs) <= bound * (1 + 1e-6) + 1e-12:
                return
            short = [job for job in range(len(ideal)) if self.costs[job] > ideal[job] * (1 + 1e-6)]
            short.sort(key=lambda job: ideal[job] - self.costs[job])
            moved = sum(self.relocate(job) for job in short[:_SHORT])
            if not moved:
                return

    def relocate(self, job: int) -> bool:
        """Try, node by node, to put ``job`` first and the jobs of that node after it; keep the best outcome."""
        members: dict[int, list[int]] = {}
        for other, allocation in enumerate(self.allocations):
            for node, _ in allocation:
                members.setdefault(node, []).append(other)
        before = sum(self.costs)
        start = self.save()
        held = [count_gpus(allocation) for allocation in self.allocations]
        best: tuple[float, _Saved] | None = None
        seen: set[tuple[int, ...]] = set()
        for node in range(len(self.gpus)):
            out = tuple(other for other in members.get(node, []) if other != job)
            if out in seen:
                continue
            seen.add(out)
            for order in (0, 1):
                self.restore(start)
                for other in (job, *out):
                    self.take(other)
                if order:
                    for other in out:
                        self.keep(other)
                self.insert(job, len(self.within[job]) + len(self.across[job]))
                for other in sorted(out, key=lambda o: -held[o]):
                    if not self.allocations[other]:
                        self.insert(other, max(1, held[other]))
                for other in out:
                    self.reinsert(other)
                total = sum(self.costs)
                if total < before * (1 - _GAIN) and (best is None or total < best[0]):
                    best = total, self.save()
        self.restore(best[1] if best else start)
        return best is not None

    def ruin_and_recreate(self, costs: Sequence[Floats], bound: float, effort: int, chance: random.Random) -> None:
        """Take the jobs of a few nodes out, share their GPUs anew and put them back in another order, ``effort`` times.

        What is no worse is kept, so that the search can walk along equal allocations.
        """
        total = sum(self.costs)
        jobs, nodes = len(self.costs), len(self.gpus)
        for _ in range(effort):
            if total <= bound * (1 + 1e-6) + 1e-12:
                return
            start = self.save()
            opened = set(chance.sample(range(nodes), min(nodes, chance.randint(1, 4))))
            out = [job for job in range(jobs) if any(node in opened for node, _ in self.allocations[job])]
            poor = [job for job in range(jobs) if not self.allocations[job]]
            out += chance.sample(poor, min(2, len(poor)))
            for job in out:
                self.take(job)
            counts, _ = choose_counts([costs[job] for job in out], sum(self.free))
            wanted = dict(zip(out, counts, strict=True))
            chance.shuffle(out)
            if chance.random() < 0.7:
                out.sort(key=lambda job: -wanted[job])
            same = [job for job in out if wanted[job] == count_gpus(self.choices[job].base)]
            kept = {job for job in same if chance.random() < 0.9 and self.keep(job)}
            for job in out:
                if job not in kept:
                    self.insert(job, wanted[job])
            for job in out:
                self.reinsert(job)
            found = sum(self.costs)
            if found <= total:
                total = found
            else:
                self.restore(start)

    def save(self) -> _Saved:
        """Return a copy of the state."""
        return self.free[:], self.spanning[:], self.allocations[:], self.costs[:]

    def restore(self, saved: _Saved) -> None:
        """Go back to a saved state."""
        free, spanning, allocations, costs = saved
        self.free, self.spanning, self.allocations, self.costs = free[:], spanning[:], allocations[:], costs[:]


def _prefix_argmin(values: Sequence[float]) -> list[int]:
    """Return for each x the first index of the least value up to x."""
    made, best = [], 0
    for at, value in enumerate(values):
        best = at if value < values[best] else best
        made.append(best)
    return made
