"""One configuration for each job - a GPU type and a count - of least total cost within the GPUs of every type.

A multiple-choice knapsack with one constraint per type, by HiGHS: as an integer program, over the lower convex hull of each
job's cost over the count where there are many options; as its relaxation, of which at most one job per type is split and
gets the lesser part, where there are too many for that.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

Floats = NDArray[np.float64]
# Above this many binaries the integer program gives way to its relaxation.
_MOST_BINARIES = 20_000
# Up to this many options the integer program runs over all that could be best, not over the hulls alone.
_FEW = 500
_RELATIVE_GAP = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """``types[j]``, ``counts[j]``: GPUs of job j (count 0: none), their total cost, and a bound on that of any."""

    types: tuple[int, ...]
    counts: tuple[int, ...]
    cost: float
    bound: float


@dataclass(frozen=True, kw_only=True, eq=False)
class _Options:
    """All ``o`` options, by job: arrays (o,) of job, type, count and cost; the first of a job is nothing."""

    job: NDArray[np.int64]
    kind: NDArray[np.int64]
    count: NDArray[np.int64]
    cost: Floats
    first: NDArray[np.int64]


def assign(costs: Sequence[Sequence[Floats]], capacity: Sequence[int], *, exact: bool = True) -> Assignment:
    """Return an assignment of small total cost.

    ``costs[j][t][k]``: job j on k GPUs of type t, inf where not allowed; ``costs[j][t][0]`` is the cost of nothing, finite
    and the same for every type. ``capacity[t]``: GPUs of type t. ``exact``: solve the integer program (HiGHS, relative gap
    1e-4; over the hulls where there are more than 500 options) with at most 20,000 binaries; else its relaxation.
    """
    if not costs:
        return Assignment(types=(), counts=(), cost=0.0, bound=0.0)
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
    return Assignment(
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


def _solved(options: _Options, room: Floats, exact: bool) -> tuple[NDArray[np.int64], float]:
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
