"""Column generation for several jobs on shared devices: what is worth giving to a job when devices have prices.

A column is a number of devices of each type for one job, with what the job makes of them. The master problem (a linear
program) picks columns within the devices that there are; its dual values are prices of devices, and under given prices
each job's best column and a bound on what any column is worth follow from the job's table of step times. The sum of
those bounds (Lagrange) bounds every way of sharing, also in whole columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.placement.requirements import Problem
from ddltool.analyzers.placement.step_table import step_table
from ddltool.analyzers.placement.step_times import Counts, allowed, reach

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Longer tables are thinned to so many groups of step times.
_LONGEST = 1500
# Up to so many ESTs a job's devices are chosen whole at every step time of its table: dynamic programming over as many.
_MOST_WHOLE = 128
# A job's limit on devices or money is priced at so many times the devices' mean price, each in its own trial.
_MULTIPLIERS = (0.1, 0.3, 1.0, 3.0, 10.0)
# So many of a job's best columns are taken in a round.
_COLUMNS_A_ROUND = 4
# Step times and worths this near (relatively) are the same: floats of the same fractions, in another order.
SAME = 1e-12
# What linear programs and sums over them leave open.
ROUNDING = 1e-9


@dataclass(kw_only=True, slots=True)
class JobTable:
    """One job's useful step times, fastest first, over the shared device types."""

    problem: Problem
    places: tuple[int, ...]
    """For each of the problem's types, its place among the shared ones."""
    available: Ints
    """(T,) devices of each shared type that the job may use."""
    values: Floats
    """(S,) what a step of this length (or a little longer, where thinned) is worth."""
    best_values: Floats
    """(S,) what it is worth at most: of the fastest step in the group."""
    rooms: Ints
    """(S, T) ESTs that a device has room for; 0 for types that the job cannot use."""
    alone: float
    """Mini-batches per second with every device to itself."""
    weight: float
    columns: dict[Counts, float] = field(default_factory=dict)
    """Numbers of devices by shared type, with their worth."""

    def add(self, counts: Counts) -> bool:
        """Add the column of these devices if it keeps the job's constraints; return whether it is new."""
        if counts in self.columns:
            return False
        step = self.step(counts)
        if step is None:
            return False
        self.columns[counts] = self.worth(step)
        return True

    def worth(self, step: Fraction) -> float:
        """Return the weighted throughput relative to that alone."""
        return self.weight * float(self.problem.max_workers / step) / self.alone

    def least_worth(self, floor: float) -> float:
        """Return the least worth that counts as ``floor`` times the throughput alone."""
        return floor * self.weight * (1 - SAME)

    def step(self, counts: Sequence[int]) -> Fraction | None:
        """Return the step time on these devices; None where they break a constraint or are too few."""
        own = tuple(int(counts[place]) for place in self.places)
        if sum(own) != sum(counts) or not allowed(self.problem, own):
            return None
        step = reach(self.problem, own)
        return None if step is None or step > self.problem.slowest_step else step


def job_table(problem: Problem, names: Sequence[str], devices: Ints, weight: float, alone_step: Fraction) -> JobTable:
    """Return the table of one job; ``names`` and ``devices`` (T,) are the shared types and how many there are.

    ``alone_step``: the smallest step time with all of them. Steps that are faster, or too slow for the job, are left out.
    """
    table = step_table(
        tuple(device.capability_per_s for device in problem.devices),
        problem.max_workers,
        tuple(device.most_ests for device in problem.devices),
    )
    places = tuple(list(names).index(device.name) for device in problem.devices)
    steps = np.array([float(alone_step), float(problem.slowest_step)])
    first, last = (
        int(np.searchsorted(table.seconds, steps[0] * (1 - SAME))),
        int(np.searchsorted(table.seconds, steps[1] * (1 + SAME), side="right")),
    )
    chosen = np.arange(first, max(last, first + 1))
    starts = chosen
    if len(chosen) > _LONGEST:
        seconds = table.seconds[chosen]
        marks = np.geomspace(seconds[0], seconds[-1], _LONGEST + 1)[1:-1]
        edges = np.unique([0, *np.searchsorted(seconds, marks), len(chosen)])
        starts, chosen = chosen[edges[:-1]], chosen[edges[1:] - 1]
    rooms = np.zeros((len(chosen), len(names)), dtype=np.int64)
    rooms[:, list(places)] = table.rooms[chosen]
    available = np.zeros(len(names), dtype=np.int64)
    for device, place in zip(problem.devices, places, strict=True):
        available[place] = min(problem.affordable(device), int(devices[place]))
    alone = float(problem.max_workers / alone_step)
    return JobTable(
        problem=problem,
        places=places,
        available=available,
        values=weight * table.throughputs[chosen] / alone,
        best_values=weight * table.throughputs[starts] / alone,
        rooms=rooms,
        alone=alone,
        weight=weight,
    )


def limit_prices(table: JobTable) -> list[tuple[Floats, float]]:
    """Return pairs of (T,) what a device costs beyond its price and what the job has of that for free, in mean prices.

    At such prices a job that keeps its limits on devices and money pays no more than without (Lagrange), so that they
    give bounds as well, and devices that keep the limits more often. The first pair is 0; one type alone needs no other.
    """
    problem, kinds = table.problem, len(table.available)
    trials = [(np.zeros(kinds), 0.0)]
    if problem.single_type:
        return trials
    if problem.max_devices is not None:
        trials += [(np.full(kinds, times), times * problem.max_devices) for times in _MULTIPLIERS]
    if problem.max_price_micro:
        money = np.zeros(kinds)
        money[list(table.places)] = [device.price_micro or 0 for device in problem.devices]
        unit = float(money.max(initial=0)) or 1.0
        trials += [(times * money / unit, times * problem.max_price_micro / unit) for times in _MULTIPLIERS]
    return trials


def price(table: JobTable, prices: Floats) -> tuple[float, list[Counts]]:
    """Return a bound on worth less cost of any column at ``prices`` (T,) of devices, and promising columns.

    For each step time the cheapest devices with room for every EST are taken: parts of devices allowed for the bound and
    the last one rounded up for the column, and for jobs of few ESTs whole devices for both.
    """
    best = -np.inf
    columns: list[Counts] = []
    modes: Iterator[NDArray[np.bool_]] = iter([np.ones(len(prices), dtype=bool)])
    if table.problem.single_type:
        modes = iter(np.eye(len(prices), dtype=bool))
    unit = float(prices.mean())
    for mode in modes:
        cost = np.full(len(table.values), -np.inf)
        for extra, free in limit_prices(table):
            paid, rows = _price_at(table, mode, prices + unit * extra)
            cost = np.maximum(cost, paid - unit * free)
            columns += rows
        best = max(best, float((table.best_values - cost).max(initial=-np.inf)))
    return best, columns


def _price_at(table: JobTable, mode: NDArray[np.bool_], prices: Floats) -> tuple[Floats, list[Counts]]:
    """Return (S,) what room for every EST costs at least with types in ``mode`` (T,), and the columns of most worth."""
    workers = table.problem.max_workers
    rooms = np.where(mode & (table.available > 0), table.rooms, 0)
    cost, counts, holds = cover(rooms, np.where(mode, table.available, 0), prices, workers)
    worths = np.where(holds, table.values - counts @ prices, -np.inf)
    rows = [row for row in np.argsort(-worths)[:_COLUMNS_A_ROUND] if np.isfinite(worths[row])]
    columns = [tuple(int(count) for count in counts[row]) for row in rows]
    if workers <= _MOST_WHOLE:
        whole_cost, choice = cover_whole(rooms, prices, workers)
        cost = np.maximum(cost, whole_cost)
        rows = [row for row in np.argsort(cost - table.values)[:_COLUMNS_A_ROUND] if np.isfinite(cost[row])]
        columns += taken_whole(rooms[rows], choice[:, rows], workers)
    return cost, columns


def cover_whole(rooms: Ints, prices: Floats, workers: int | Ints) -> tuple[Floats, NDArray[np.int16]]:
    """Return (L,) the least cost of whole devices with room for every EST, and (W + 1, L) the type taken last.

    ``rooms`` is (L, T); ``prices`` (T,) or (L, T); ``workers``, W at most, one number or (L,). Dynamic programming over the
    ESTs that have room, without limits on the numbers of devices: still a bound, and tighter than with parts of devices, for
    the last device is paid in full. A type without room is never taken; the cost is infinite where none has room.
    """
    if len(rooms) == 1:  # plain numbers are many times faster than arrays of one
        return _cover_one(rooms[0].tolist(), prices.ravel().tolist(), int(np.max(workers)))
    lines, most = np.arange(len(rooms)), int(np.max(workers))
    cost = np.zeros((most + 1, len(rooms)))
    choice = np.zeros((most + 1, len(rooms)), dtype=np.int16)
    price_each = np.where(rooms > 0, prices, np.inf).T
    room = rooms.T
    for placed in range(1, most + 1):
        total = price_each + cost[np.maximum(0, placed - room), lines]
        taken = total.argmin(axis=0)
        choice[placed] = taken
        cost[placed] = total[taken, lines]
    return cost[workers, lines], choice


def _cover_one(rooms: list[int], prices: list[float], workers: int) -> tuple[Floats, NDArray[np.int16]]:
    """Return what :func:`cover_whole` does, for a single line."""
    offers = [(kind, room, prices[kind]) for kind, room in enumerate(rooms) if room]
    cost, choice = [0.0] * (workers + 1), [0] * (workers + 1)
    for placed in range(1, workers + 1):
        least, taken = np.inf, 0
        for kind, room, price_each in offers:
            total = price_each + cost[max(0, placed - room)]
            if total < least:
                least, taken = total, kind
        cost[placed], choice[placed] = least, taken
    return np.array([cost[workers]]), np.array(choice, dtype=np.int16)[:, None]


def taken_whole(rooms: Ints, choice: NDArray[np.int16], workers: int | Ints) -> list[Counts]:
    """Return the numbers of devices that :func:`cover_whole` took for each of its (L, T) lines; none where none has room."""
    counts, left = np.zeros_like(rooms), np.where(rooms.any(axis=1), workers, 0)
    while (left > 0).any():
        busy = np.flatnonzero(left > 0)
        kind = choice[left[busy], busy]
        counts[busy, kind] += 1
        left[busy] -= rooms[busy, kind]
    return [tuple(row) for row in counts.tolist()]


def cover(rooms: Ints, available: Ints, prices: Floats, workers: int | Ints) -> tuple[Floats, Ints, NDArray[np.bool_]]:
    """Return (S,) the least cost of room for every EST, parts allowed; (S, T) whole devices; (S,) whether there is room.

    ``rooms`` is (S, T); ``available`` and ``prices`` are (T,) or (S, T), ``workers`` one number or (S,).
    """
    prices, available = np.broadcast_to(prices, rooms.shape), np.broadcast_to(available, rooms.shape)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(rooms > 0, prices / rooms, np.inf)
    order = np.argsort(ratio, axis=1, kind="stable")
    lines = np.arange(len(rooms))
    left = np.broadcast_to(workers, len(rooms)).astype(float)
    cost = np.zeros(len(rooms))
    counts = np.zeros_like(rooms)
    for rank in range(rooms.shape[1]):
        kind = order[:, rank]
        room = rooms[lines, kind]
        needed = np.where(room > 0, left / np.maximum(room, 1), 0.0)
        taken = np.minimum(needed, available[lines, kind])
        cost += taken * prices[lines, kind]
        counts[lines, kind] = np.ceil(taken - ROUNDING).astype(np.int64)
        left = np.maximum(left - taken * room, 0.0)
    holds = left <= ROUNDING * workers
    return np.where(holds, cost, np.inf), counts, holds


def linear_program(cost: Floats, **given: Any) -> Any | None:
    """Return what scipy's ``linprog`` says about the least ``cost``, if it solved the problem; None: it is not known."""
    from scipy import optimize

    linprog: Any = optimize.linprog
    made = linprog(cost, **given)
    return made if made.status == 0 else None


def master(tables: Sequence[JobTable], devices: Ints, *, everyone: bool) -> tuple[float, Floats] | None:
    """Solve the linear master problem: return its value and the prices (T,) of devices; None: it was not solved.

    ``everyone``: each job must get a column, else one at most.
    """
    from scipy import sparse

    owners = [job for job, table in enumerate(tables) for _ in table.columns]
    counts = np.array([counts for table in tables for counts in table.columns], dtype=float)
    worth = np.array([worth for table in tables for worth in table.columns.values()])
    picks = sparse.csr_matrix((np.ones(len(owners)), (owners, range(len(owners)))), shape=(len(tables), len(owners)))
    use = sparse.csr_matrix(counts.T)
    if everyone:
        made = linear_program(-worth, A_ub=use, b_ub=devices, A_eq=picks, b_eq=np.ones(len(tables)), method="highs")
    else:
        both = sparse.vstack([use, picks])
        made = linear_program(-worth, A_ub=both, b_ub=np.append(devices, np.ones(len(tables))), method="highs")
    if made is None:
        return None
    return float(-made.fun), np.maximum(0.0, -made.ineqlin.marginals[: len(devices)])


def generate(tables: Sequence[JobTable], devices: Ints, *, everyone: bool, until: Any, rounds: int = 60) -> float:
    """Add columns until none can improve the master problem or ``until()`` says stop; return the smallest bound seen.

    It ends as well where the master problem is not solved: without new prices there is nothing to ask.
    The bound holds for every way of sharing the devices. The columns must admit a solution of the master problem.
    """
    bound = float(sum(table.weight for table in tables))
    for _ in range(rounds):
        solved = master(tables, devices, everyone=everyone)
        if solved is None:
            break
        value, prices = solved
        total, fresh = float(prices @ devices), False
        for table in tables:
            most, columns = price(table, prices)
            total += most if everyone else max(0.0, most)
            for counts in columns:
                fresh |= table.add(counts)
        bound = min(bound, total)
        if not fresh or bound - value <= ROUNDING * max(1.0, bound) or until():
            break
    return bound
