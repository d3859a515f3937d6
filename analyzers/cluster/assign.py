"""One configuration for each job - a GPU type and a count - of least total cost within the GPUs of every type.

A multiple-choice knapsack with one constraint per type, by HiGHS: as an integer program, over the lower convex hull of each
job's cost over the count where there are many options; as its relaxation, of which at most one job per type is split and
gets the lesser part, where there are too many for that.

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
from ddltool.analyzers.cluster.search import JobCosts, flat, pack, search
from ddltool.arrays import Floats, Ints

# Above this many binaries the integer program gives way to its relaxation.
_MOST_BINARIES = 20_000
# Up to this many options the integer program runs over all that could be best, not over the hulls alone.
_FEW_OPTIONS = 500
# The integer program may stop this near to the optimum (a share of its cost), or after so many nodes of its search tree.
_RELATIVE_GAP, _MOST_TREE_NODES = 1e-4, 2000
# A share of the solution nearer to 1 or 0 than this is one or none: the solver's rounding.
_INTEGRAL = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeAssignment:
    """``types[j]``, ``counts[j]``: GPUs of job j (count 0: none), their total cost, and a bound on that of any."""

    types: tuple[int, ...]
    counts: tuple[int, ...]
    cost: float
    bound: float


@dataclass(frozen=True, kw_only=True, eq=False)
class _Options:
    """All ``o`` options, by job: arrays (o,) of job, type (``kind``), count and cost; a job's first is to get no GPUs.

    ``first``: the place (n,) of each job's first option.
    """

    job: Ints
    kind: Ints
    count: Ints
    cost: Floats
    first: Ints


def assign(costs: Sequence[Sequence[Floats]], capacity: Sequence[int], *, exact: bool = True) -> TypeAssignment:
    """Return a GPU type and a count for each job, of small total cost and within the GPUs of every type.

    ``costs[j][t][k]``: job j on k GPUs of type t, inf where not allowed; ``costs[j][t][0]`` is the cost of no GPUs, finite
    and the same for every type. ``capacity[t]``: GPUs of type t. ``exact``: solve the integer program (HiGHS, relative gap
    1e-4; over the hulls where there are more than 500 options) with at most 20,000 binaries; else its relaxation.
    """
    if not costs:
        return TypeAssignment(types=(), counts=(), cost=0.0, bound=0.0)
    # More GPUs than there are of a type are no option.
    costs = [[table[: most + 1] for table, most in zip(tables, capacity, strict=True)] for tables in costs]
    options = _options(costs, _falling_counts) if exact else None
    if options is None or len(options.job) > _FEW_OPTIONS:
        options = _options(costs, _hull_counts)
    gpus_by_type = np.asarray(capacity, dtype=np.float64)
    least_costs = np.minimum.reduceat(options.cost, options.first)
    # Where the cheapest option of every job (the first of equal ones) fits, nothing is to be solved.
    cheapest = np.flatnonzero(options.cost <= least_costs[options.job])
    chosen, bound = cheapest[np.unique(options.job[cheapest], return_index=True)[1]], float(least_costs.sum())
    if np.any(np.bincount(options.kind[chosen], options.count[chosen], len(gpus_by_type)) > gpus_by_type):
        chosen, bound = _solve(options, gpus_by_type, exact and len(options.job) <= _MOST_BINARIES)
    total = float(options.cost[chosen].sum())
    return TypeAssignment(
        types=tuple(options.kind[chosen].tolist()),
        counts=tuple(options.count[chosen].tolist()),
        cost=total,
        bound=min(bound, total),
    )


def _options(costs: Sequence[Sequence[Floats]], select_counts: Callable[[Floats], list[int]]) -> _Options:
    """Return each job's options in one table: no GPUs first, then the counts that ``select_counts`` keeps of each type's costs.

    ``costs``: as of :func:`assign`. ``select_counts`` is given the costs (k,) of 0, 1, ... GPUs of one type.
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
    """Return the counts above 0 that cost less than every smaller one; no other count can be in a cheapest assignment.

    >>> _falling_counts(np.array([9.0, 5.0, 6.0, 4.5, np.inf, 1.0]))
    [1, 3, 5]
    """
    least = np.minimum.accumulate(cost)
    counts: list[int] = (np.flatnonzero(cost[1:] < least[:-1]) + 1).tolist()
    return counts


def _hull_counts(cost: Floats) -> list[int]:
    """Return the counts above 0 on the falling part of the lower convex hull of a cost over 0, 1, ...

    On the hull every further GPU saves less than the one before, so the relaxation seldom splits a job; the options are
    few.

    >>> _hull_counts(np.array([9.0, 5.0, 4.5, 1.0, 1.0]))
    [1, 3]
    """
    costs = cost.tolist()
    corners = [0]
    for count in range(1, len(costs)):
        cost_here = costs[count]
        if not cost_here < costs[corners[-1]]:
            continue
        # A corner above the line from the one before it to here is not on the hull.
        while len(corners) > 1:
            last, previous = corners[-1], corners[-2]
            if (costs[previous] - costs[last]) * (count - last) >= (costs[last] - cost_here) * (last - previous):
                break
            corners.pop()
        corners.append(count)
    return corners[1:]


def _solve(options: _Options, gpus_by_type: Floats, exact: bool) -> tuple[Ints, float]:
    """Return the index of each job's chosen option, (n,), by HiGHS, and a lower bound on the total cost of any choice.

    ``exact``: solve the integer program; else its relaxation. There, a job that is split between two counts of a type
    gets the lesser, and one that is split between types gets no GPUs, so that the choice fits. ``gpus_by_type``: how
    many there are, (t,).
    """
    option_count, job_count = len(options.job), len(options.first)
    columns = np.arange(option_count)
    one_per_job = csr_array((np.ones(option_count), (options.job, columns)), shape=(job_count, option_count))
    counts, shape = options.count.astype(np.float64), (len(gpus_by_type), option_count)
    gpus_used = csr_array((counts, (options.kind, columns)), shape=shape)
    cost_range = float(np.ptp(options.cost)) or 1.0  # costs of the size of 1 suit the solver's tolerances
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a limit that was reached is no surprise: what was found by then is good
        solution: Any = milp(
            options.cost / cost_range,
            constraints=[LinearConstraint(one_per_job, 1, 1), LinearConstraint(gpus_used, -np.inf, gpus_by_type)],
            integrality=np.full(option_count, int(exact)),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": _RELATIVE_GAP, "node_limit": _MOST_TREE_NODES},
        )
    if solution.x is None:
        return options.first, -np.inf  # no GPUs for any job: always allowed
    # A job split between two counts uses at least the lesser of its type in the relaxation, so rounding down fits.
    chosen = options.first.copy()
    integral = np.flatnonzero(solution.x > 1 - _INTEGRAL)
    chosen[options.job[integral]] = integral
    for job in np.setdiff1d(np.arange(job_count), options.job[integral]).tolist():
        shares_of_job = np.flatnonzero((options.job == job) & (solution.x > _INTEGRAL))
        if len(set(options.kind[shares_of_job].tolist())) == 1:
            chosen[job] = shares_of_job[0]
    bound = solution.mip_dual_bound if exact and solution.mip_dual_bound is not None else solution.fun
    return chosen, float(bound) * cost_range


# No job is given more replicas than in the published simulator.
MOST_REPLICAS = 64
PlacedJobs = list[tuple[int, Allocation]]
"""(index in the list of choices, allocation) of the jobs that got GPUs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TypeSpeedup:
    """A job's believed goodput on one GPU type, relative to that on one GPU of its first type."""

    gpu_type: str
    speedup: Floats
    """(2, m + 1), column k on k GPUs: row 0 within a node, row 1 across nodes; 0 where the job cannot run."""
    held: int
    """GPUs of this type that the job holds, 0 if none."""
    held_row: int
    """The row of ``speedup`` that its current allocation is in; -1 without one."""


@dataclass(frozen=True, kw_only=True, eq=False)
class JobSpeedups:
    """The believed speed of a job on every GPU type on which it can run."""

    job: SimulatedJob
    most_replicas: int
    """Replicas that the job may be given."""
    remaining_s: float | None
    """Seconds left on one GPU of the job's first type, as believed; None before it was observed on any."""
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
    speedups, held_row = [], min(len(job.allocation), 2) - 1
    for name in job.gpu_types:
        goodput = job.goodput_table(widest, name)
        if goodput is not None and single_gpu_goodput is None and goodput[0, 1] > 0:
            single_gpu_goodput = float(goodput[0, 1])
        # k GPUs count as k times one GPU, until goodput was observed.
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


def tables(by_type: Mapping[str, JobCosts], names: Sequence[str]) -> list[Floats]:
    """Return one job's cost of each count (from 0 on) on each of the types ``names``, as :func:`assign` takes it.

    A type without costs allows no GPUs; the cost of no GPUs is the same on all types. ``by_type``: the job's costs of
    each count, by GPU type.
    """
    by_count = [flat(by_type[name]) if name in by_type else np.zeros(1) for name in names]
    for table in by_count:
        # No GPUs cost the same whatever the type.
        table[0] = next(iter(by_type.values())).within[0]
    return by_count


def place_on_type(
    choices: Sequence[JobCosts],
    cluster: ClusterSpec,
    gpu_type: str,
    *,
    counts: Sequence[int] | None = None,
    effort: int = 0,
    seed: int = 0,
) -> PlacedJobs:
    """Return where the jobs' GPUs go on the nodes of one type, for the jobs that get some.

    ``choices``: the jobs' costs of each count, their ``base`` in the cluster's nodes. ``counts`` (n,): about how many
    GPUs each gets, which must fit in all; None: the counts and places of small total cost, by :func:`search` with
    ``effort`` and ``seed``.
    """
    nodes = cluster.nodes_of(gpu_type)
    gpus = [cluster.gpus[node] for node in nodes]
    local_index = {node: index for index, node in enumerate(nodes)}
    # The search numbers the nodes of this type from 0.
    local_choices = [
        replace(choice, base=tuple((local_index[node], count) for node, count in choice.base)) for choice in choices
    ]
    if counts is None:
        allocations = search(local_choices, gpus, effort=effort, seed=seed).allocations
    else:
        allocations = pack(local_choices, gpus, counts)
    return [
        (index, tuple((nodes[node], count) for node, count in allocation))
        for index, allocation in enumerate(allocations)
        if allocation
    ]
