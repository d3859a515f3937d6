"""One configuration for each job - a GPU type and a count - of least total cost within the GPUs of every type.

A multiple-choice knapsack with one constraint per type. Prices per GPU (Lagrange multipliers) bound the cost of every
assignment from below; the integer program then runs over what a price can choose at all, the lower convex hull of each
job's cost over the count, and comes close to that bound because at most one job per type is split by the relaxation.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# Above this many binaries the integer program gives way to prices and repair.
_MOST_BINARIES = 20_000
# Up to this many options the integer program runs over all that could be best, not over the hulls alone.
_FEW = 500
_RELATIVE_GAP = 1e-4
_PRICE_STEPS = 200


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
    1e-4; over the hulls where there are more than 500 options) with at most 20,000 binaries; else prices and repair.
    O(options) per price step.
    """
    if not costs:
        return Assignment(types=(), counts=(), cost=0.0, bound=0.0)
    costs = [[table[: most + 1] for table, most in zip(tables, capacity, strict=True)] for tables in costs]
    options = _options(costs, _falling) if exact else None
    if options is None or len(options.job) > _FEW:
        options = _options(costs, _hull)
    room = np.asarray(capacity, dtype=np.float64)
    prices, bound, integral = _prices(options, room)
    if integral is not None:
        chosen = integral
    elif exact and len(options.job) <= _MOST_BINARIES:
        chosen = _integer(options, room)
    else:
        chosen = _repair(options, room, prices)
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
    jobs, kinds, counts, values = zip(*rows, strict=True)
    return _Options(
        job=np.array(jobs),
        kind=np.array(kinds),
        count=np.array(counts),
        cost=np.array(values),
        first=np.array(first),
    )


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


def _choose(options: _Options, prices: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Return each job's cheapest option (n,) at these prices, the first on a tie, and its priced cost (n,)."""
    priced = options.cost + prices[options.kind] * options.count
    least = np.minimum.reduceat(priced, options.first)
    hit = np.flatnonzero(priced <= least[options.job])
    _, at = np.unique(options.job[hit], return_index=True)
    return hit[at], least


def _used(options: _Options, chosen: NDArray[np.int64], kinds: int) -> Floats:
    return np.bincount(options.kind[chosen], weights=options.count[chosen], minlength=kinds).astype(np.float64)


def _prices(options: _Options, room: Floats) -> tuple[Floats, float, NDArray[np.int64] | None]:
    """Return near-best prices (T,), the bound they give, and an assignment if one at these prices is optimal.

    One type: bisection between the slopes of the hulls. Several: coordinate-wise bisection, from which no start is lost
    as every price gives a bound; a few rounds over the types.
    """
    kinds = len(room)
    prices = np.zeros(kinds)
    chosen, least = _choose(options, prices)
    if np.all(_used(options, chosen, kinds) <= room):
        return prices, float(least.sum()), chosen
    nothing = options.cost[options.first][options.job]
    with np.errstate(divide="ignore", invalid="ignore"):
        slopes = (nothing - options.cost) / options.count
    top = float(np.nanmax(np.where(options.count > 0, slopes, 0.0))) * 1.01 + 1e-12
    best, best_prices = -np.inf, prices
    for _ in range(1 if kinds == 1 else 8):
        before = best
        for kind in range(kinds):
            low, high = 0.0, top
            for _ in range(_PRICE_STEPS // 4):
                prices[kind] = (low + high) / 2
                chosen, least = _choose(options, prices)
                value = float(least.sum() - prices @ room)
                if value > best:
                    best, best_prices = value, prices.copy()
                if _used(options, chosen, kinds)[kind] > room[kind]:
                    low = prices[kind]
                else:
                    high = prices[kind]
                if high - low <= 1e-9 * high:
                    break
            prices[kind] = high
        if best <= before + 1e-9 * abs(before):
            break
    return best_prices, best, None


def _integer(options: _Options, room: Floats) -> NDArray[np.int64]:
    """Return the options (n,) of the integer program's solution, by HiGHS."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    amount, jobs = len(options.job), len(options.first)
    columns = np.arange(amount)
    one = csr_array((np.ones(amount), (options.job, columns)), shape=(jobs, amount))
    use = csr_array((options.count.astype(np.float64), (options.kind, columns)), shape=(len(room), amount))
    span = float(np.ptp(options.cost)) or 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = milp(
            options.cost / span,
            constraints=[LinearConstraint(one, 1, 1), LinearConstraint(use, -np.inf, room)],
            integrality=np.ones(amount, dtype=np.int64),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": _RELATIVE_GAP, "node_limit": 2000},
        )
    if found.x is None:
        return options.first  # nobody gets anything: always allowed
    hit = np.flatnonzero(found.x > 0.5)
    return np.asarray(hit[np.argsort(options.job[hit], kind="stable")])


def _repair(options: _Options, room: Floats, prices: Floats) -> NDArray[np.int64]:
    """Return options (n,) that fit: those of the prices, stepped down where they do not, then up where there is room."""
    chosen, _ = _choose(options, prices)
    chosen = chosen.copy()
    kinds = len(room)
    ends = np.append(options.first[1:], len(options.job))
    left = room - _used(options, chosen, kinds)
    for kind in range(kinds):
        while left[kind] < 0:
            held = np.flatnonzero((options.kind[chosen] == kind) & (options.count[chosen] > 0))
            lower = _neighbour(options, chosen[held], -1)
            freed = options.count[chosen[held]] - options.count[lower]
            loss = (options.cost[lower] - options.cost[chosen[held]]) / freed
            for at in np.argsort(loss, kind="stable").tolist():
                chosen[held[at]] = lower[at]
                left[kind] += freed[at]
                if left[kind] >= 0:
                    break
    while True:
        best: tuple[float, int, int] | None = None
        for kind in range(kinds):
            at = np.flatnonzero((options.kind[chosen] == kind) | (options.count[chosen] == 0))
            for job in at.tolist():
                for option in range(options.first[job] + 1, ends[job]):
                    if options.kind[option] != kind:
                        continue
                    more = options.count[option] - options.count[chosen[job]]
                    if 0 < more <= left[kind]:
                        gain = float(options.cost[chosen[job]] - options.cost[option]) / float(more)
                        if gain > 0 and (best is None or gain > best[0]):
                            best = gain, job, option
        if best is None:
            return chosen
        _, job, option = best
        left[options.kind[option]] -= options.count[option] - options.count[chosen[job]]
        chosen[job] = option


def _neighbour(options: _Options, chosen: NDArray[np.int64], step: int) -> NDArray[np.int64]:
    """Return the next smaller option of the same job and type; nothing where there is none."""
    other = chosen + step
    same = (options.job[other] == options.job[chosen]) & (options.kind[other] == options.kind[chosen])
    return np.where(same & (options.count[other] > 0), other, options.first[options.job[chosen]])
