"""Ours: jobs with little left first, GPUs where they are used well, and no restart that does not pay.

Per round, one configuration (GPU type, count, within a node or across) for each job, of greatest total value

    ``sum_j r_j^q s_j(c)^p``, with ``s_j(c)`` multiplied by ``h / (h + d)`` where c is a restart.

``r_j`` is the job's rank by its remaining time, 1 for the longest: how many jobs wait for it if it goes first. For
jobs that all speed up as ``k^q``, ``r^q`` is, nearly, by how much a second's work less in that job lowers the sum of
completion times (Berg et al., heSRPT, 2020: the optimum gives the i-th longest of n jobs the share ``(i/n)^(1/(1-q))
- ((i-1)/n)^(1/(1-q))``), so that ``p = 1`` would be the optimal choice for jobs that are all there. ``p = 0.25``
leaves long jobs more. In the rank, each job that waits counts with its expected completion time to the power of
``lateness`` (over the mean): the marginal cost of delay, as in the generalised c-mu rule (van Mieghem 1995), which
protects the tail. ``s_j`` is the believed goodput over that on one GPU. ``h``, how long an allocation is likely to
stay as it is, is the time since a job last arrived or ended, at least 120 s, at most what is left of the job: in
a busy cluster few restarts pay, in a quiet one nearly all.

What it knows: step times and gradient statistics that jobs of the same application have shown (pooled), how far each
job is, and the epochs that its user declared. No true remaining time, no future arrival, nothing of an application that
never ran.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ddltool.analyzers.cluster.assign import JobSpeedups, TypeSpeedup, assign, job_speedups, place_on_type, tables
from ddltool.analyzers.cluster.cluster import Allocation, ClusterSpec
from ddltool.analyzers.cluster.job import SimulatedJob, Tuning
from ddltool.analyzers.cluster.search import JobCosts

# Completion times below a minute are as good as one.
_LEAST_S = 60.0
# Above this many (job, node) pairs the packing is not improved by local search: it would take longer than the round.
_LARGE = 20_000
_POWER, _HOLD_S, _EFFORT = 0.25, 120.0, 100


class Ours:
    """See the module. ``delay_s`` is what a restart costs; ``pools`` turns the sharing within an application on."""

    name = "ours"
    tuning = Tuning.ADAPTIVE

    def __init__(
        self,
        *,
        rank_power: float = 0.8,
        lateness: float = 0.75,
        delay_s: float = 30.0,
        pools: bool = True,
        seed: int = 0,
    ) -> None:
        self.rank_power, self.lateness, self.delay_s = rank_power, lateness, delay_s
        self.pools, self.seed = pools, seed
        self._present: frozenset[int] = frozenset()
        self._changed_s = 0.0

    def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Mapping[int, Allocation]:
        """Return the allocations for the next interval. One type: exact counts; several: :func:`assign`, then each type."""
        if not jobs:
            return {}
        present = frozenset(job.index for job in jobs)
        if present != self._present:
            self._present, self._changed_s = present, now_s
        hold = max(_HOLD_S, now_s - self._changed_s)
        made = [job_speedups(job, cluster) for job in jobs]
        weights = self._weights(made, cluster.total_gpus // len(jobs), now_s)
        choices = [self._choices(offer, weight, hold, now_s) for offer, weight in zip(made, weights, strict=True)]
        names = cluster.type_names
        on_type = self._share_types(made, choices, names, cluster)
        found: dict[int, Allocation] = {}
        for name in names:
            members = [at for at in range(len(jobs)) if on_type[at] == name]
            if members:
                effort = 0 if len(members) * len(cluster.gpus) > _LARGE else _EFFORT
                here = [choices[at][name] for at in members]
                placed = place_on_type(here, cluster, name, effort=effort, seed=self.seed)
                found.update({jobs[members[at]].index: allocation for at, allocation in placed})
        return found

    def _weights(self, made: Sequence[JobSpeedups], fair: int, now_s: float) -> list[float]:
        """Return ``r^q`` of each job. One of which nothing is known yet counts as the shortest: it is soon known."""
        order = sorted(range(len(made)), key=lambda at: (-(made[at].remaining_s or 0.0), -made[at].job.index))
        costs = [self._lateness(made[at], fair, now_s) for at in order]
        unit = sum(costs) / len(costs)
        weights = [0.0] * len(made)
        rank = 0.0
        for at, cost in zip(order, costs, strict=True):
            rank += cost / unit
            weights[at] = rank**self.rank_power
        return weights

    def _lateness(self, offer: JobSpeedups, fair: int, now_s: float) -> float:
        """Return what a second of delay of this job costs: its expected completion time to the power of ``lateness``."""
        if offer.remaining_s is None:
            return float(max(offer.job.age_s(now_s), _LEAST_S) ** self.lateness)
        count = max(min(fair, offer.most), 1)
        speed = max(float(one.speedup[:, count].max()) for one in offer.by_type)
        expected = offer.job.age_s(now_s) + offer.remaining_s / max(speed, 1e-3)
        return float(max(expected, _LEAST_S) ** self.lateness)

    def _choices(self, offer: JobSpeedups, weight: float, hold: float, now_s: float) -> dict[str, JobCosts]:
        """Return what each count on each type costs one job: the value of the best of all less its own."""
        starting = max(offer.job.running_from_s - now_s, 0.0)
        best = max(float(one.speedup.max()) for one in offer.by_type) ** _POWER
        return {one.gpu_type: self._choice(one, offer, weight, best, hold, starting) for one in offer.by_type}

    def _choice(
        self, one: TypeSpeedup, offer: JobSpeedups, weight: float, best: float, hold: float, starting: float
    ) -> JobCosts:
        remaining = math.inf if offer.remaining_s is None else offer.remaining_s
        stays = np.minimum(remaining / np.maximum(one.speedup, 1e-9), hold)
        restarted = one.speedup * (stays / (stays + self.delay_s))
        cost = weight * (best - restarted[:, : offer.most + 1] ** _POWER)
        cost[0, 1:][one.speedup[0, 1 : offer.most + 1] <= 0] = np.inf
        cost[1][one.speedup[1, : offer.most + 1] <= 0] = np.inf
        keep = np.inf
        if one.held:
            span = float(stays[one.row, one.held])
            kept = float(one.speedup[one.row, one.held]) * span / (span + starting) if span else 0.0
            keep = weight * (best - kept**_POWER)
        return JobCosts(within=cost[0], across=cost[1], base=offer.job.allocation if one.held else (), keep=keep)

    def _share_types(
        self,
        made: Sequence[JobSpeedups],
        choices: Sequence[dict[str, JobCosts]],
        names: Sequence[str],
        cluster: ClusterSpec,
    ) -> list[str]:
        """Return the GPU type of each job."""
        if len(names) == 1:
            return [names[0]] * len(made)
        found = assign([tables(by_type, names) for by_type in choices], [cluster.gpus_of(name) for name in names])
        fallback = [offer.job.gpu_types[0] for offer in made]
        return [
            names[kind] if count else other
            for kind, count, other in zip(found.types, found.counts, fallback, strict=True)
        ]
