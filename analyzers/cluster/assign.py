"""One configuration for each job - a GPU type and a count - of least total cost within the GPUs of every type.

A multiple-choice knapsack with one constraint per type, by HiGHS: as an integer program, over the lower convex hull of each
job's cost over the count where there are many options; as its relaxation, of which at most one job per type is split and
gets the lesser part, where there are too many for that.

What Sia's and our policy share: what each GPU type would bring a job, as believed, and from counts per type to nodes.
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
_FEW = 500
_RELATIVE_GAP = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeAssignment:
    """``types[j]``, ``counts[j]``: GPUs of job j (count 0: none), their total cost, and a bound on that of any."""

    types: tuple[int, ...]
    counts: tuple[int, ...]
    cost: float
    bound: float


@dataclass(frozen=True, kw_only=True, eq=False)
class _Options:
    """All ``o`` options, by job: arrays (o,) of job, type, count and cost; the first of a job is nothing."""

    job: Ints
    kind: Ints
    count: Ints
    cost: Floats
    first: Ints


def assign(costs: Sequence[Sequence[Floats]], capacity: Sequence[int], *, exact: bool = True) -> TypeAssignment:
    """Return an assignment of small total cost.

    ``costs[j][t][k]``: job j on k GPUs of type t, inf where not allowed; ``costs[j][t][0]`` is the cost of nothing, finite
    and the same for every type. ``capacity[t]``: GPUs of type t. ``exact``: solve the integer program (HiGHS, relative gap
    1e-4; over the hulls where there are more than 500 options) with at most 20,000 binaries; else its relaxation.
    """
    if not costs:
        return TypeAssignment(types=(), counts=(), cost=0.0, bound=0.0)
    costs = [[table[: most + 1] for table, most in zip(tables, capacity, strict=True)] for tables in costs]
    options = _options(costs, _falling) if exact else None
    if options is None or len(options.job) > _FEW:
        options = _options(costs, _hull)
    room = np.asarray(capacity, dtype=np.float64)
    least = np.minimum.reduceat(options.cost, options.first)
    hit = np.flatnonzero(options.cost <= least[options.job])
    chosen, bound = hit[np.unique(options.job[hit], return_index=True)[1]], float(least.sum())
    if np.any(np.bincount(options.kind[chosen], options.count[chosen], len(room)) > room):
        chosen, bound = _solved(options, room, exact and len(options.job) <= _MOST_BINARIES)
    total = float(options.cost[chosen].sum())
    return TypeAssignment(
        types=tuple(options.kind[chosen].tolist()),
        counts=tuple(options.count[chosen].tolist()),
        cost=total,
        bound=min(bound, total),
    )


def _options(costs: Sequence[Sequence[Floats]], chosen: Callable[[Floats], list[int]]) -> _Options:
    """Return the options of the ``chosen`` counts of each table, after nothing."""
    rows: list[tuple[int, int, int, float]] = []
    first: list[int] = []
    for job, tables in enumerate(costs):
        first.append(len(rows))
        rows.append((job, 0, 0, float(tables[0][0])))
        for kind, table in enumerate(tables):
            rows.extend((job, kind, count, float(table[count])) for count in chosen(table))
    jobs, kinds, counts, values = (np.array(column) for column in zip(*rows, strict=True))
    return _Options(job=jobs, kind=kinds, count=counts, cost=values, first=np.array(first))


def _falling(cost: Floats) -> list[int]:
    """Return the counts above 0 that cost less than every smaller one.

    >>> _falling(np.array([9.0, 5.0, 6.0, 4.5, np.inf, 1.0]))
    [1, 3, 5]
    """
    least = np.minimum.accumulate(cost)
    made: list[int] = (np.flatnonzero(cost[1:] < least[:-1]) + 1).tolist()
    return made


def _hull(cost: Floats) -> list[int]:
    """Return the counts above 0 on the falling part of the lower convex hull of a cost over 0, 1, ...

    >>> _hull(np.array([9.0, 5.0, 4.5, 1.0, 1.0]))
    [1, 3]
    """
    values = cost.tolist()
    made = [0]
    for count in range(1, len(values)):
        value = values[count]
        if not value < values[made[-1]]:
            continue
        while len(made) > 1:
            last, before = made[-1], made[-2]
            if (values[before] - values[last]) * (count - last) >= (values[last] - value) * (last - before):
                break
            made.pop()
        made.append(count)
    return made[1:]


def _solved(options: _Options, room: Floats, exact: bool) -> tuple[Ints, float]:
    """Return each job's option (n,) by HiGHS, and a bound on the cost; jobs that a relaxation splits get the lesser count."""
    amount, jobs = len(options.job), len(options.first)
    columns = np.arange(amount)
    one = csr_array((np.ones(amount), (options.job, columns)), shape=(jobs, amount))
    use = csr_array((options.count.astype(np.float64), (options.kind, columns)), shape=(len(room), amount))
    span = float(np.ptp(options.cost)) or 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: Any = milp(
            options.cost / span,
            constraints=[LinearConstraint(one, 1, 1), LinearConstraint(use, -np.inf, room)],
            integrality=np.full(amount, int(exact)),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": _RELATIVE_GAP, "node_limit": 2000},
        )
    if found.x is None:
        return options.first, -np.inf  # nobody gets anything: always allowed
    # The last of a job's options that is chosen whole; of one that is split between two, the first, so that all fit.
    chosen = options.first.copy()
    taken = np.flatnonzero(found.x > 1 - 1e-6)
    chosen[options.job[taken]] = taken
    for job in np.setdiff1d(np.arange(jobs), options.job[taken]).tolist():
        parts = np.flatnonzero((options.job == job) & (found.x > 1e-6))
        if len(set(options.kind[parts].tolist())) == 1:
            chosen[job] = parts[0]
    bound = found.mip_dual_bound if exact and found.mip_dual_bound is not None else found.fun
    return chosen, float(bound) * span


# No job is given more replicas than in the published simulator.
MOST_REPLICAS = 64
Placed = list[tuple[int, Allocation]]
"""(place in the list of choices, allocation) of the jobs that got GPUs."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TypeSpeedup:
    """A job's believed goodput on one GPU type, over that on one GPU of its first type."""

    gpu_type: str
    speedup: Floats
    """(2, m + 1): row 0 within a node, row 1 across nodes; 0 where it cannot run."""
    held: int
    """GPUs that it holds of this type, 0 if none."""
    row: int
    """The row of what it holds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class JobSpeedups:
    """All types on which a job can run."""

    job: SimulatedJob
    most: int
    """Replicas that it may be given."""
    remaining_s: float | None
    """Seconds left on one GPU of its first type, as believed; None before anything was seen of it."""
    by_type: tuple[TypeSpeedup, ...]


def job_speedups(job: SimulatedJob, cluster: ClusterSpec) -> JobSpeedups:
    """Return what each type of the cluster would bring a job. Before anything was seen, speedups count the GPUs."""
    most = min(job.most_replicas, MOST_REPLICAS)
    held = count_gpus(job.allocation)
    held_type = cluster.type_of(job.allocation) if held else None
    wide = max(most, held, 1)
    base: float | None = None
    made, row = [], min(len(job.allocation), 2) - 1
    for name in job.gpu_types:
        table = job.goodput_table(wide, name)
        if table is not None and base is None and table[0, 1] > 0:
            base = float(table[0, 1])
        speedup = np.tile(np.arange(wide + 1.0), (2, 1)) if table is None or base is None else table / base
        speedup[0, max(cluster.gpus[node] for node in cluster.nodes_of(name)) + 1 :] = 0.0
        speedup[1, :2] = 0.0
        made.append(TypeSpeedup(gpu_type=name, speedup=speedup, held=held if name == held_type else 0, row=row))
    remaining = job.remaining_samples() / base if base else None
    return JobSpeedups(job=job, most=most, remaining_s=remaining, by_type=tuple(made))


def tables(by_type: Mapping[str, JobCosts], names: Sequence[str]) -> list[Floats]:
    """Return what each count on each of the types ``names`` costs one job; nothing costs the same on all of them."""
    made = [flat(by_type[name]) if name in by_type else np.zeros(1) for name in names]
    for table in made:
        table[0] = next(iter(by_type.values())).within[0]
    return made


def place_on_type(
    choices: Sequence[JobCosts],
    cluster: ClusterSpec,
    gpu_type: str,
    *,
    counts: Sequence[int] | None = None,
    effort: int = 0,
    seed: int = 0,
) -> Placed:
    """Return allocations on the nodes of one type: of small total cost, or of about ``counts`` (n,), which must fit."""
    nodes = cluster.nodes_of(gpu_type)
    gpus = [cluster.gpus[node] for node in nodes]
    local = {node: at for at, node in enumerate(nodes)}
    here = [replace(one, base=tuple((local[node], count) for node, count in one.base)) for one in choices]
    found = search(here, gpus, effort=effort, seed=seed).allocations if counts is None else pack(here, gpus, counts)
    return [(at, tuple((nodes[node], count) for node, count in made)) for at, made in enumerate(found) if made]
