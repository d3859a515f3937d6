"""Sia-like (Jayaram Subramanya et al., SOSP 2023): one of few configurations for each job, by an integer program.

Written from the paper. Configurations are powers of two within a node and whole nodes beyond, of one type. The goodput
of each, over the least of the job's row times the least count, is discounted by the restart factor
``max(T - R d, 0) / (T + d)`` when it is a change, raised to p = -0.5 and summed; a job without GPUs costs 1.1 times the
dearest it could have. What differs from the published system: the models are this simulator's (Pollux's fit); what was
profiled on one GPU scales as on the type known best, as there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from ddltool.analyzers.cluster.assign import JobSpeedups, TypeSpeedup, assign, job_speedups, place_on_type, tables
from ddltool.analyzers.cluster.cluster import Allocation, ClusterSpec
from ddltool.analyzers.cluster.job import SimulatedJob, Tuning
from ddltool.analyzers.cluster.search import JobCosts
from ddltool.arrays import Flags
from ddltool.errors import InputError

# The cost of no GPUs over that of the least that a job may have; more than 1, so that no job waits beside idle GPUs.
_IDLE = 1.1


class Sia:
    """See the module. ``exponent`` is p, ``delay_s`` is what a restart costs in seconds."""

    name = "sia"
    tuning = Tuning.ADAPTIVE

    def __init__(self, *, exponent: float = -0.5, delay_s: float = 30.0) -> None:
        if not (math.isfinite(exponent) and exponent < 0):
            raise InputError("policy sia", f"exponent {exponent}", "a finite number below 0; -0.5 is Sia's")
        self.exponent, self.delay_s = exponent, delay_s

    def allocate(self, jobs: Sequence[SimulatedJob], cluster: ClusterSpec, now_s: float) -> Mapping[int, Allocation]:
        """Return the allocations for the next interval."""
        names = cluster.type_names
        sizes = {name: max(cluster.gpus[node] for node in cluster.nodes_of(name)) for name in names}
        choices = [self._choices(job_speedups(job, cluster), sizes, now_s) for job in jobs]
        found = assign([tables(by_type, names) for by_type in choices], [cluster.gpus_of(name) for name in names])
        made: dict[int, Allocation] = {}
        for kind, name in enumerate(names):
            members = [at for at in range(len(jobs)) if found.counts[at] and found.types[at] == kind]
            if members:
                counts = [found.counts[at] for at in members]
                placed = place_on_type([choices[at][name] for at in members], cluster, name, counts=counts)
                made.update({jobs[members[at]].index: allocation for at, allocation in placed})
        return made

    def _choices(self, offer: JobSpeedups, sizes: Mapping[str, int], now_s: float) -> dict[str, JobCosts]:
        """Return the cost of each configuration, by type; equal counts within and across cost what they bring."""
        job = offer.job
        factor = job.restart_factor(now_s, self.delay_s)
        allowed = {
            one.gpu_type: np.array([_allowed(count, sizes[one.gpu_type]) for count in range(offer.most + 1)])
            for one in offer.by_type
        }
        least = min(float(one.speedup[0, 1]) for one in offer.by_type)
        made = {}
        worst = 0.0
        for one in offer.by_type:
            choice = self._choice(one, allowed[one.gpu_type], least, max(factor, 1e-3), sizes[one.gpu_type], job)
            made[one.gpu_type] = choice
            finite = np.concatenate([choice.within[1:], choice.across[1:], [choice.keep]])
            worst = max(worst, float(finite[np.isfinite(finite)].max(initial=0.0)))
        for choice in made.values():
            choice.within[0] = choice.across[0] = _IDLE * max(worst, 1.0)
        return made

    def _choice(
        self, one: TypeSpeedup, allowed: Flags, least: float, factor: float, size: int, job: SimulatedJob
    ) -> JobCosts:
        gain = one.speedup[:, : len(allowed)] / least
        with np.errstate(divide="ignore"):
            cost = np.where(allowed & (gain > 0), (gain * factor) ** self.exponent, np.inf)
            keep = float((one.speedup[one.row, one.held] / least) ** self.exponent) if one.held else np.inf
        cost[0, size + 1 :] = np.inf
        cost[1, : size + 1] = np.inf
        return JobCosts(within=cost[0], across=cost[1], base=job.allocation if one.held else (), keep=keep)


def _allowed(count: int, size: int) -> bool:
    """Return whether a count is a configuration on nodes of ``size`` GPUs: a power of two within one, whole nodes beyond.

    >>> [count for count in range(1, 25) if _allowed(count, 8)]
    [1, 2, 4, 8, 16, 24]
    """
    if count <= size:
        return count == size or (count & (count - 1) == 0 and count > 0)
    return count % size == 0
