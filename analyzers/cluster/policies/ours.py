"""Ours: prefers jobs with little left, puts GPUs where they are used well, and restarts only where it pays.

In each round it chooses one configuration c (GPU type, count, within a node or across) for each job j, such that the total
value is largest:

    ``sum_j r_j^q s_j(c)^p``, with ``s_j(c)`` multiplied by ``h / (h + d)`` where c is a restart of d seconds.

``s_j`` is the believed goodput over that on one GPU. ``r_j`` is the job's rank by its remaining time, 1 for the longest: the
number of jobs that would wait for it if it went first. For jobs that all speed up as ``k^q`` on k GPUs, ``r^q`` is nearly the
decrease of the sum of completion times per second of work less in that job (Berg et al., heSRPT, 2020: the optimum gives the
i-th longest of n jobs the share ``(i/n)^(1/(1-q)) - ((i-1)/n)^(1/(1-q))``). So ``p = 1`` would be optimal if no job arrived
later; ``p = 0.25`` leaves more to long jobs. In the rank, each waiting job counts with its expected completion time to the
power of ``lateness``, over the mean of these: the marginal cost of delay, as in the generalised c-mu rule (van Mieghem 1995),
which protects the tail. ``h`` is the time for which an allocation is likely to last: the time since a job last arrived or
ended, at least 120 s, at most what is left of the job. So few restarts pay in a busy cluster, and nearly all in a quiet one.

The policy uses the step times and gradient statistics that jobs of the same application have shown (pooled), each job's
progress, and the epochs that its user declared. It uses no true remaining times, no future arrivals, and nothing of an
application that never ran.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ddltool.analyzers.cluster.assign import JobSpeedups, TypeSpeedup, assign, cost_tables, job_speedups, place_on_type
from ddltool.analyzers.cluster.cluster import Allocation, ClusterSpec
from ddltool.analyzers.cluster.job import SimulatedJob, Tuning
from ddltool.analyzers.cluster.search import JobCosts

# Shorter completion times count as a minute.
_LEAST_S = 60.0
# Most (job, node) pairs for local search; with more it would take longer than a round.
_MOST_IMPROVED_PAIRS = 20_000
# The module's p, q and power of the expected completion time; the least h in seconds; the effort of the local search.
_POWER, _RANK_POWER, _LATENESS, _HOLD_S, _EFFORT = 0.25, 0.8, 0.75, 120.0, 100
# Least speedups in divisors, instead of 0.
_LEAST_SPEEDUP, _LEAST_BELIEVED_SPEEDUP = 1e-9, 1e-3


class Ours:
    """The policy that the module describes."""

    name = "ours"
    tuning = Tuning.ADAPTIVE

    def __init__(self, *, delay_s: float = 30.0, pools: bool = True, seed: int = 0) -> None:
        """Set the seconds of a restart, whether jobs of an application share (pool) observations, and local search's seed."""
        self.delay_s = delay_s
        self.pools = pools
        self.seed = seed
        self._present: frozenset[int] = frozenset()
        """Indices of the jobs of the last round."""
        self._changed_s = 0.0
        """Time at which a job last arrived or ended."""

    def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Mapping[int, Allocation]:
        """Return job index -> allocation for the next interval.

        On a cluster of several types, :func:`assign` first chooses each job's type. Then the jobs of each type get counts and
        nodes by :func:`place_on_type`.
        """
        if not jobs:
            return {}
        present = frozenset(job.index for job in jobs)
        if present != self._present:
            self._present = present
            self._changed_s = now_s
        hold_s = max(_HOLD_S, now_s - self._changed_s)
        offers = [job_speedups(job, cluster) for job in jobs]
        weights = self._weights(offers, cluster.total_gpus // len(jobs), now_s)
        choices = [self._choices(offer, weight, hold_s, now_s) for offer, weight in zip(offers, weights, strict=True)]
        type_names = cluster.type_names
        type_of_job = self._share_types(offers, choices, type_names, cluster)
        allocations: dict[int, Allocation] = {}
        for gpu_type in type_names:
            members = {
                job.index: by_type[gpu_type]
                for job, by_type, chosen_type in zip(jobs, choices, type_of_job, strict=True)
                if chosen_type == gpu_type
            }
            if members:
                effort = 0 if len(members) * len(cluster.gpus) > _MOST_IMPROVED_PAIRS else _EFFORT
                allocations |= place_on_type(members, cluster, gpu_type, effort=effort, seed=self.seed)
        return allocations

    def _weights(self, offers: Sequence[JobSpeedups], fair_count: int, now_s: float) -> list[float]:
        """Return (n,) ``r^q`` of each job, the weight of its speed in the total value.

        The rank r grows from the longest to the shortest job. A job that was never observed counts as the shortest one, so
        that it runs and shows its speed. ``offers``: the jobs' believed speeds; ``fair_count``: GPUs in an equal share.
        """
        remaining_s = [offer.remaining_s or 0.0 for offer in offers]
        order = sorted(range(len(offers)), key=lambda index: (-remaining_s[index], -offers[index].job.index))
        latenesses = [self._lateness(offers[index], fair_count, now_s) for index in order]
        mean_lateness = sum(latenesses) / len(latenesses)
        weights = [0.0] * len(offers)
        rank = 0.0
        for index, lateness in zip(order, latenesses, strict=True):
            rank += lateness / mean_lateness
            weights[index] = rank**_RANK_POWER
        return weights

    def _lateness(self, offer: JobSpeedups, fair_count: int, now_s: float) -> float:
        """Return the cost of a second's delay of this job: its expected completion time to the power of ``_LATENESS``.

        The expected completion time is its age plus the time left at its best speed on ``fair_count`` GPUs; before the job was
        observed, its age alone.
        """
        if offer.remaining_s is None:
            return float(max(offer.job.age_s(now_s), _LEAST_S) ** _LATENESS)
        replicas = max(min(fair_count, offer.most_replicas), 1)
        best_speedup = max(float(on_type.speedup[:, replicas].max()) for on_type in offer.by_type)
        completion_s = offer.job.age_s(now_s) + offer.remaining_s / max(best_speedup, _LEAST_BELIEVED_SPEEDUP)
        return float(max(completion_s, _LEAST_S) ** _LATENESS)

    def _choices(self, offer: JobSpeedups, weight: float, hold_s: float, now_s: float) -> dict[str, JobCosts]:
        """Return GPU type -> one job's costs of each number of GPUs of that type, and of keeping its allocation.

        The cost of a configuration is the value of the job's best configuration minus its own value, times the job's
        ``weight``. ``hold_s``: seconds for which an allocation is likely to last.
        """
        starting_s = max(offer.job.running_from_s - now_s, 0.0)
        best_value = max(float(on_type.speedup.max()) for on_type in offer.by_type) ** _POWER
        return {one.gpu_type: self._choice(one, offer, weight, best_value, hold_s, starting_s) for one in offer.by_type}

    def _choice(
        self,
        on_type: TypeSpeedup,
        offer: JobSpeedups,
        weight: float,
        best_value: float,
        hold_s: float,
        starting_s: float,
    ) -> JobCosts:
        """Return one job's costs on one GPU type: of each count within a node and across nodes, and of its allocation.

        A new allocation loses the time of a restart, the present one the ``starting_s`` seconds until its last restart is over.
        Costs are the value that the job loses against ``best_value``, that of its best configuration on any type, times its
        ``weight``. ``hold_s``: seconds for which an allocation is likely to last.
        """
        remaining = math.inf if offer.remaining_s is None else offer.remaining_s
        # how long each count would be held: until the job ends, or until the allocation is likely to change
        stay_s = np.minimum(remaining / np.maximum(on_type.speedup, _LEAST_SPEEDUP), hold_s)
        restarted = on_type.speedup * (stay_s / (stay_s + self.delay_s))
        cost = weight * (best_value - restarted[:, : offer.most_replicas + 1] ** _POWER)
        # counts above 0 on which the job cannot run
        cost[0, 1:][on_type.speedup[0, 1 : offer.most_replicas + 1] <= 0] = np.inf
        cost[1][on_type.speedup[1, : offer.most_replicas + 1] <= 0] = np.inf
        keep_cost = np.inf
        if on_type.held:
            held_stay_s = float(stay_s[on_type.held_row, on_type.held])
            held_speedup = float(on_type.speedup[on_type.held_row, on_type.held])
            kept_speedup = held_speedup * held_stay_s / (held_stay_s + starting_s) if held_stay_s else 0.0
            keep_cost = weight * (best_value - kept_speedup**_POWER)
        base = offer.job.allocation if on_type.held else ()
        return JobCosts(within=cost[0], across=cost[1], base=base, keep=keep_cost)

    def _share_types(
        self,
        offers: Sequence[JobSpeedups],
        choices: Sequence[dict[str, JobCosts]],
        type_names: Sequence[str],
        cluster: ClusterSpec,
    ) -> list[str]:
        """Return the GPU type of each job, (n,), by :func:`assign` over all jobs and types.

        A job that :func:`assign` gives no GPUs takes the first type on which it can run.
        """
        if len(type_names) == 1:
            return [type_names[0]] * len(offers)
        capacity = [cluster.gpus_of(name) for name in type_names]
        assigned = assign([cost_tables(by_type, type_names) for by_type in choices], capacity)
        return [
            type_names[type_index] if count else offer.job.gpu_types[0]
            for (type_index, count), offer in zip(assigned, offers, strict=True)
        ]
