"""One configuration for each job - a GPU type and a count - of least total cost within the GPUs of every type.

Start at :func:`assign`. It is a multiple-choice knapsack with one constraint per type, solved by HiGHS: as an integer program;
where there are many options, only over those on the lower convex hull of each job's cost over the count; where there are too
many even for that, as its relaxation, in which at most one job per type is split, and this gets the smaller count.

Sia's and our policy also share :func:`job_speedups`, a job's believed speed on each GPU type, and :func:`place_on_type`,
which turns counts of one type into GPUs of its nodes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from ddltool.analyzers.cluster.cluster import Allocation, ClusterSpec, count_gpus
from ddltool.analyzers.cluster.job import SimulatedJob
from ddltool.analyzers.cluster.search import JobCosts, cost_by_count, pack, search
from ddltool.arrays import Floats, Ints

# Most binary variables of the integer program; with more its relaxation is solved.
_MOST_BINARIES = 20_000
# Up to so many options the integer program has all that could be best, not only those on the hulls.
_FEW_OPTIONS = 500
# Relative gap, and number of nodes of its search tree, at which the integer program may stop.
_RELATIVE_GAP, _MOST_TREE_NODES = 1e-4, 2000
# Values of the solution this close to 1 or 0 count as 1 or 0, because of the solver's tolerance.
_INTEGRAL = 1e-6


@dataclass(frozen=True, kw_only=True, eq=False)
class _Options:
    """All ``o`` options of n jobs, job after job: arrays (o,) of job, type (``kind``), count and cost.

    The first option of each job is to get no GPUs; ``first`` (n,) are the indices of these.
    """

    job: Ints
    kind: Ints
    count: Ints
    cost: Floats
    first: Ints


def assign(costs: Sequence[Sequence[Floats]], capacity: Sequence[int]) -> list[tuple[int, int]]:
    """Return (GPU type t, count k; 0: none) for each job, of small total cost and within the GPUs of every type.

    ``costs[j][t][k]``: cost of job j on k GPUs of type t, inf where not allowed; ``costs[j][t][0]`` is the cost of no GPUs,
    finite and the same for every type. ``capacity[t]``: GPUs of type t. The integer program is solved (HiGHS, relative gap
    1e-4; over the hulls if there are more than 500 options), as far as it has at most 20,000 binaries; else the relaxation.
    """
    if not costs:
        return []
    # More GPUs than there are of a type are no option.
    costs = [[table[: most + 1] for table, most in zip(tables, capacity, strict=True)] for tables in costs]
    options = _options(costs, _falling_counts)
    if len(options.job) > _FEW_OPTIONS:
        options = _options(costs, _hull_counts)
    gpus_by_type = np.asarray(capacity, dtype=np.float64)
    least_costs = np.minimum.reduceat(options.cost, options.first)
    # If every job's cheapest option (the first of equal ones) fits, these are optimal.
    cheapest = np.flatnonzero(options.cost <= least_costs[options.job])
    _, first_of_job = np.unique(options.job[cheapest], return_index=True)
    chosen = cheapest[first_of_job]
    gpus_used = np.bincount(options.kind[chosen], options.count[chosen], len(gpus_by_type))
    if np.any(gpus_used > gpus_by_type):
        chosen = _solve(options, gpus_by_type, len(options.job) <= _MOST_BINARIES)
    return list(zip(options.kind[chosen].tolist(), options.count[chosen].tolist(), strict=True))


def _options(costs: Sequence[Sequence[Floats]], select_counts: Callable[[Floats], list[int]]) -> _Options:
    """Return each job's options: no GPUs first, then, for each type, the counts that ``select_counts`` returns.

    ``costs[j][t][k]``: cost of job j on k GPUs of type t; ``select_counts``: costs (k,) of 0, 1, ... GPUs of a type -> counts.
    """
    rows: list[tuple[int, int, int, float]] = []
    first_options: list[int] = []
    for job, tables in enumerate(costs):
        first_options.append(len(rows))
        rows.append((job, 0, 0, float(tables[0][0])))
        for kind, table in enumerate(tables):
            rows.extend((job, kind, count, float(table[count])) for count in select_counts(table))
    jobs, kinds, counts, values = (np.array(column) for column in zip(*rows, strict=True))
    return _Options(job=jobs, kind=kinds, count=counts, cost=values, first=np.array(first_options))


def _falling_counts(cost: Floats) -> list[int]:
    """Return the counts above 0 that cost less than every smaller count; a cheapest assignment needs no others.

    >>> _falling_counts(np.array([9.0, 5.0, 6.0, 4.5, np.inf, 1.0]))
    [1, 3, 5]
    """
    least = np.minimum.accumulate(cost)
    counts: list[int] = (np.flatnonzero(cost[1:] < least[:-1]) + 1).tolist()
    return counts


def _hull_counts(cost: Floats) -> list[int]:
    """Return the counts above 0 on the falling part of the lower convex hull of the costs of 0, 1, ... GPUs.

    They are few, and as each further GPU saves less than the one before, the relaxation seldom splits a job.

    >>> _hull_counts(np.array([9.0, 5.0, 4.5, 1.0, 1.0]))
    [1, 3]
    """
    costs = cost.tolist()
    corners = [0]
    for count in range(1, len(costs)):
        cost_here = costs[count]
        if not cost_here < costs[corners[-1]]:
            continue
        # a corner on or above the line from the previous corner to this point is not on the hull
        while len(corners) > 1:
            last, previous = corners[-1], corners[-2]
            if (costs[previous] - costs[last]) * (count - last) >= (costs[last] - cost_here) * (last - previous):
                break
            corners.pop()
        corners.append(count)
    return corners[1:]


def _solve(options: _Options, gpus_by_type: Floats, exact: bool) -> Ints:
    """Return the index of each job's chosen option, (n,), by HiGHS.

    ``exact``: whether to solve the integer program or its relaxation. In the latter, a job that is split between two counts of
    a type gets the smaller one, and a job that is split between types gets no GPUs, so that the choice fits. ``gpus_by_type``
    (t,): number of GPUs of each type. Where HiGHS finds nothing, no job gets GPUs.
    """
    option_count, job_count = len(options.job), len(options.first)
    columns = np.arange(option_count)
    one_per_job = csr_array((np.ones(option_count), (options.job, columns)), shape=(job_count, option_count))
    counts, shape = options.count.astype(np.float64), (len(gpus_by_type), option_count)
    gpus_used = csr_array((counts, (options.kind, columns)), shape=shape)
    cost_range = float(np.ptp(options.cost)) or 1.0  # scaled, because the solver's tolerances are absolute
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scipy warns at a limit, but the solution found by then is good enough
        solution: Any = milp(
            options.cost / cost_range,
            constraints=[LinearConstraint(one_per_job, 1, 1), LinearConstraint(gpus_used, -np.inf, gpus_by_type)],
            integrality=np.full(option_count, int(exact)),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": _RELATIVE_GAP, "node_limit": _MOST_TREE_NODES},
        )
    if solution.x is None:
        return options.first
    # In the relaxation a job split between two counts uses at least the smaller one, so rounding down fits.
    chosen = options.first.copy()
    integral = np.flatnonzero(solution.x > 1 - _INTEGRAL)
    chosen[options.job[integral]] = integral
    for job in np.setdiff1d(np.arange(job_count), options.job[integral]).tolist():
        shares_of_job = np.flatnonzero((options.job == job) & (solution.x > _INTEGRAL))
        if len(set(options.kind[shares_of_job].tolist())) == 1:
            chosen[job] = shares_of_job[0]
    return chosen


# Most replicas of a job; the published simulator's number.
MOST_REPLICAS = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class TypeSpeedup:
    """A job's believed goodput on one GPU type, relative to that on one GPU of its first type."""

    gpu_type: str
    speedup: Floats
    """(2, m + 1): row 0 within a node, row 1 across nodes, column k on k GPUs; 0 where the job cannot run."""
    held: int
    """Number of GPUs of this type that the job holds."""
    held_row: int
    """Row of ``speedup`` for its current allocation; -1 without one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class JobSpeedups:
    """The believed speed of a job on every GPU type on which it can run."""

    job: SimulatedJob
    most_replicas: int
    """Most replicas that the job may get."""
    remaining_s: float | None
    """Believed seconds left on one GPU of the job's first type; None before it was observed on any type."""
    by_type: tuple[TypeSpeedup, ...]


def job_speedups(job: SimulatedJob, cluster: ClusterSpec) -> JobSpeedups:
    """Return a job's believed speedups on each GPU type of the cluster on which it can run.

    Before anything was observed k GPUs count as k times one GPU.
    """
    most_replicas = min(job.most_replicas, MOST_REPLICAS)
    held = count_gpus(job.allocation)
    held_type = cluster.type_of(job.allocation) if held else None
    widest = max(most_replicas, held, 1)
    single_gpu_goodput: float | None = None
    held_row = min(len(job.allocation), 2) - 1  # 0 on one node, 1 across nodes, -1 without GPUs
    speedups: list[TypeSpeedup] = []
    for name in job.gpu_types:
        goodput = job.goodput_table(widest, name)
        if goodput is not None and single_gpu_goodput is None and goodput[0, 1] > 0:
            single_gpu_goodput = float(goodput[0, 1])
        speedup = np.tile(np.arange(widest + 1.0), (2, 1))
        if goodput is not None and single_gpu_goodput is not None:
            speedup = goodput / single_gpu_goodput
        # More GPUs than the largest node has do not fit within a node, and one GPU cannot be across nodes.
        speedup[0, max(cluster.gpus[node] for node in cluster.nodes_of(name)) + 1 :] = 0.0
        speedup[1, :2] = 0.0
        held_here = held if name == held_type else 0
        speedups.append(TypeSpeedup(gpu_type=name, speedup=speedup, held=held_here, held_row=held_row))
    remaining_s = job.remaining_samples() / single_gpu_goodput if single_gpu_goodput else None
    return JobSpeedups(job=job, most_replicas=most_replicas, remaining_s=remaining_s, by_type=tuple(speedups))


def cost_tables(by_type: Mapping[str, JobCosts], names: Sequence[str]) -> list[Floats]:
    """Return one job's cost of each count (from 0 on) on each of the types ``names``, in the form that :func:`assign` takes.

    ``by_type``: GPU type -> the job's costs. A type that is not in it allows no GPUs.
    """
    cost_of_none = next(iter(by_type.values())).within[0]
    tables = [cost_by_count(by_type[name]) if name in by_type else np.zeros(1) for name in names]
    for table in tables:
        table[0] = cost_of_none  # must be the same for all types
    return tables


def place_on_type(
    choices: Mapping[int, JobCosts],
    cluster: ClusterSpec,
    gpu_type: str,
    *,
    counts: Sequence[int] | None = None,
    effort: int = 0,
    seed: int = 0,
) -> dict[int, Allocation]:
    """Return job index -> allocation on the nodes of one type, for the jobs that get GPUs there.

    ``choices``: job index -> costs, with ``base`` in the cluster's node numbers. ``counts`` (n,): about the number of GPUs of
    each job, which must fit in sum; None: counts of small total cost, by :func:`search` with ``effort`` and ``seed``.
    """
    nodes = cluster.nodes_of(gpu_type)
    gpus = [cluster.gpus[node] for node in nodes]
    local_index = {node: index for index, node in enumerate(nodes)}
    # The search numbers the nodes of this type from 0.
    local_choices = [
        replace(choice, base=tuple((local_index[node], count) for node, count in choice.base))
        for choice in choices.values()
    ]
    if counts is None:
        allocations = search(local_choices, gpus, effort=effort, seed=seed).allocations
    else:
        allocations = pack(local_choices, gpus, counts)
    return {
        job: tuple((nodes[node], count) for node, count in allocation)
        for job, allocation in zip(choices, allocations, strict=True)
        if allocation
    }
