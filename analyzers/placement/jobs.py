"""Several jobs on the same devices at once. Start at :func:`solve_jobs`.

A column is a number of devices of each type for one job, with what the job makes of them. A linear program picks columns
within the devices that there are; its dual values are prices of devices, and under given prices each job's best columns,
and a bound on what any column is worth, follow from the job's step times (column generation). The sum of those bounds
(Lagrange) bounds every way of sharing, also in whole columns. Whole columns are chosen by CP-SAT; small problems are
settled by one CP-SAT model with every step time of every job. CP-SAT alone, without columns, leaves gaps of tens of percent
from some ten jobs on.

The highest smallest share is found by bisection over the shares: an integer program says whether all jobs can have one at
once. HiGHS settles it for hundreds of jobs several times sooner than CP-SAT.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from ddltool.analyzers.placement.est import limit_devices, run, solve_est, solver_for
from ddltool.analyzers.placement.problem import DeviceType, Problem
from ddltool.analyzers.placement.steps import Counts, best_step, counts_of, evaluate, plan_of, reach, step_table
from ddltool.arrays import Floats, Ints
from ddltool.errors import Infeasible, InputError, NotProven
from ddltool.graph import natural_key
from ddltool.job import LARGEST
from ddltool.plans import Plan
from ddltool.results import JointJob, JointPlan, Sharing

Way = list[Counts | None]
"""Each job's column; None: it waits."""
# Up to so many step times of all jobs together, one model with all of them is solved as well ...
_SMALL = 4000
# ... and, where the linear program leaves next to nothing open or the sum comes second, up to so many.
_TINY = 400
# Below this gap more time is not worth it, but in problems that are solved at once.
_CLOSE = 1e-3
# The smallest share, where it comes first, has this part of the time; the sum then so many seconds at most.
_FLOOR_SHARE, _SECOND_S = 0.6, 4.0
# One choice of whole columns takes so long at most; so does one question about a floor.
_CHOICE_S, _PATIENCE_S = 4.0, 1.0
# A gap below this is rounding.
_ROUNDING = 1e-7
# What linear programs and sums over them leave open.
_OPEN = 1e-9
# Step times and worths this near (relatively) are the same: floats of the same fractions, in another order.
_SAME = 1e-12
# Worths become whole numbers of this fraction of one for CP-SAT.
_SCALE = 10**9
# Longer tables are thinned to so many groups of step times.
_LONGEST = 1500
# So many of a job's best columns are taken in a round, so many rounds are made.
_COLUMNS_A_ROUND, _ROUNDS = 4, 60
# The price of a job's own limit is found in so many halvings.
_HALVINGS = 8


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
        own = tuple(int(counts[place]) for place in self.places)
        if counts in self.columns or sum(own) != sum(counts) or not self.problem.allows(own):
            return False
        step = best_step(self.problem, own)
        if step is None or step > self.problem.slowest_step:
            return False
        self.columns[counts] = self.weight * float(self.problem.max_workers / step) / self.alone
        return True

    def shares(self) -> Floats:
        """Return (2, T) what part of its limits, on devices and on what they cost in an hour, one device takes."""
        made = np.zeros((2, len(self.available)))
        made[0] = 1 / self.problem.device_limit
        if limit := self.problem.max_price_micro:
            made[1, list(self.places)] = [(device.price_micro or 0) / limit for device in self.problem.devices]
        return made

    def modes(self) -> Iterator[Ints]:
        """Yield (T,) how many devices the job may use at once: of all types, or of one type where it keeps to one."""
        kinds = np.eye(len(self.available), dtype=np.int64)
        yield from kinds * self.available if self.problem.single_type else [self.available]

    def at_least(self, floor: float) -> Ints:
        """Return the places of the step times that may give the job ``floor`` of what it makes alone.

        Where the table is thinned, the last of them may be a little too slow: what it does not allow is impossible.
        """
        return np.flatnonzero(self.best_values >= floor * self.weight * (1 - _SAME))

    def cut(self, floor: float) -> JobTable:
        """Return the table without step times, and columns, that are too slow for the floor."""
        kept = self.at_least(floor)
        least = Fraction(floor * (1 - _SAME) * self.alone)
        asked = self.problem.min_throughput
        return replace(
            self,
            problem=replace(self.problem, min_throughput=least if asked is None else max(asked, least)),
            values=self.values[kept],
            best_values=self.best_values[kept],
            rooms=self.rooms[kept],
            columns={row: worth for row, worth in self.columns.items() if worth >= floor * self.weight * (1 - _SAME)},
        )


def solve_jobs(
    problems: Sequence[Problem],
    devices: Mapping[str, int],
    *,
    weights: Sequence[float] | None = None,
    objective: Sharing = "sum",
    time_limit_s: float = 10.0,
    seed: int = 0,
) -> JointPlan:
    """Return who gets which devices: no device is given twice, every job keeps its own constraints.

    ``devices``: how many there are of each type, for all jobs together; a job uses the types that its problem names, at
    most as many as it offers. "sum" maximises the weighted sum of throughputs relative to the job alone (a job may then
    wait); "max-min" maximises the smallest relative throughput, then the sum. The value is proven by a bound: columns
    for the jobs, priced by a linear program, then chosen whole by CP-SAT. Raises Infeasible where a job cannot run even
    alone, NotProven where it is not settled what a job makes alone, InputError for no jobs, unknown types, or weights that
    are not positive. ``file`` of a job in the result is its problem's name.
    """
    started = time.perf_counter()
    deadline = started + time_limit_s
    names = sorted((name for name, count in devices.items() if count > 0), key=natural_key)
    counts = np.array([devices[name] for name in names], dtype=np.int64)
    tables = _tables(problems, names, counts, weights or [1.0] * len(problems), seed)
    for table in tables:  # one device of each type, and an equal share, to start from
        for column in (*np.eye(len(counts), dtype=np.int64).tolist(), (counts // len(tables)).tolist()):
            table.add(tuple(np.minimum(column, table.available).tolist()))
    floor_bound, start = 1.0, None
    if objective == "max-min":
        part = time.perf_counter() + _FLOOR_SHARE * (deadline - time.perf_counter())
        floor, floor_bound, start = _highest_floor(tables, counts, part)
        tables = tables if start is None else [table.cut(floor) for table in tables]
        deadline = min(deadline, time.perf_counter() + _SECOND_S)  # what follows only settles the sum
    everyone = start is not None
    # A share of the time is kept for the choice of whole columns.
    part = time.perf_counter() + 0.6 * (deadline - time.perf_counter())
    bound = generate(tables, counts, everyone=everyone, until=lambda: time.perf_counter() > part)
    limit_s = min(_CHOICE_S, max(0.05, 0.7 * (deadline - time.perf_counter())))
    chosen = _choose(tables, counts, limit_s, seed, start or _greedy(tables, counts), everyone=everyone)
    value = _value_of(tables, chosen)
    largest = _SMALL if objective == "sum" and bound - value > _CLOSE * bound else _TINY
    if bound - value > _ROUNDING * bound and sum(len(table.values) for table in tables) <= largest:
        limit_s = max(0.05, deadline - time.perf_counter())
        better, most = _whole(tables, counts, limit_s, seed, everyone=everyone, start=chosen)
        bound = min(bound, most)
        if better is not None and _value_of(tables, better) > value:
            chosen = better
        value = _value_of(tables, chosen)
    relative = [
        0.0 if row is None else table.columns[row] / table.weight for table, row in zip(tables, chosen, strict=True)
    ]
    if objective == "max-min":
        value, bound = min(relative), floor_bound
    gap = max(0.0, 1 - value / bound) if bound > 0 else 0.0
    gap = gap if gap > _ROUNDING else 0.0
    seconds = time.perf_counter() - started
    jobs = [
        JointJob(file=table.problem.job, relative=share, plan=_plan(table, row, gap, seconds), waits=None)
        for table, row, share in zip(tables, chosen, relative, strict=True)
    ]
    status = "optimal" if gap == 0 else "feasible"
    bound = max(bound, value) if gap else value
    return JointPlan(
        objective=objective, value=value, bound=bound, gap=gap, status=status, solve_seconds=seconds, jobs=jobs
    )


def idle_throughput(problem: Problem, devices: Mapping[str, int], plans: Sequence[Plan | None]) -> float:
    """Return what a job would reach on the devices that no plan uses, were any throughput enough; 0: it cannot run."""
    left = dict(devices)
    for plan in plans:
        for row in () if plan is None else plan.assignments:
            left[row.device_type] -= row.devices
    offered = _within(problem, left)
    try:
        return solve_est(replace(problem, devices=offered, min_throughput=None)).throughput if offered else 0.0
    except Infeasible:
        return 0.0


def _within(problem: Problem, devices: Mapping[str, int]) -> tuple[DeviceType, ...]:
    """Return what a job offers itself of the devices that there are."""
    there = [device for device in problem.devices if devices.get(device.name)]
    return tuple(replace(device, count=min(device.count, devices[device.name])) for device in there)


def _plan(table: JobTable, row: Counts | None, gap: float, seconds: float) -> Plan | None:
    if row is None:
        return None
    made = evaluate(table.problem, tuple(row[place] for place in table.places))
    return plan_of(table.problem, made, optimal=gap == 0, gap=gap, solve_seconds=seconds)


def _tables(
    problems: Sequence[Problem], names: Sequence[str], counts: Ints, weights: Sequence[float], seed: int
) -> list[JobTable]:
    """Return each job's table, with the types and counts that are shared."""
    if not problems:
        raise InputError("jobs", "there are none", "give one job at least")
    if len(weights) != len(problems) or not all(0 < weight <= LARGEST for weight in weights):
        wrong = f"must be one positive number for each job, at most {LARGEST:g}"
        raise InputError("weights", wrong, "leave them out for equal weights")
    tables = []
    shared = dict(zip(names, counts.tolist(), strict=True))
    for problem, weight in zip(problems, weights, strict=True):
        offered = _within(problem, shared)
        if not offered:
            raise InputError(f"{problem.job}:devices", "none of its device types is there", f"there are {names}")
        narrowed = replace(problem, devices=offered)
        try:
            alone = solve_est(narrowed, seed=seed)
        except Infeasible as error:
            raise Infeasible(f"{problem.job}: {error}") from None
        if alone.gap > 0:  # shares of less than the best would pass 1, and no bound would hold
            raise NotProven(f"{problem.job}: what it reaches alone was not settled in {alone.solve_seconds:.0f} s")
        used = counts_of(narrowed, alone)
        tables.append(job_table(narrowed, names, counts, weight, reach(narrowed, used)))
        own = dict(zip((device.name for device in offered), used, strict=True))
        tables[-1].add(tuple(own.get(name, 0) for name in names))
    return tables


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
    first = int(np.searchsorted(table.seconds, float(alone_step) * (1 - _SAME)))
    last = int(np.searchsorted(table.seconds, float(problem.slowest_step) * (1 + _SAME), side="right"))
    starts = ends = np.arange(first, max(last, first + 1))
    if len(starts) > _LONGEST:
        seconds = table.seconds[starts]
        marks = np.geomspace(seconds[0], seconds[-1], _LONGEST + 1)[1:-1]
        edges = np.unique([0, *np.searchsorted(seconds, marks), len(starts)])
        starts, ends = starts[edges[:-1]], starts[edges[1:] - 1]
    rooms = np.zeros((len(ends), len(names)), dtype=np.int64)
    rooms[:, list(places)] = table.rooms[ends]
    available = np.zeros(len(names), dtype=np.int64)
    for device, place in zip(problem.devices, places, strict=True):
        available[place] = min(problem.affordable(device), int(devices[place]))
    alone = float(problem.max_workers / alone_step)
    return JobTable(
        problem=problem,
        places=places,
        available=available,
        values=weight * table.throughputs[ends] / alone,
        best_values=weight * table.throughputs[starts] / alone,
        rooms=rooms,
        alone=alone,
        weight=weight,
    )


def _highest_floor(tables: Sequence[JobTable], counts: Ints, deadline: float) -> tuple[float, float, Way | None]:
    """Return the highest relative throughput that all jobs can have at once, its bound, and a way to share so.

    The way is None where nothing was found. The lowest floor comes first, whatever the time: so that there is an answer.
    Then bisection finds the highest floor that has an answer, and above it the lowest one that is proven impossible.
    """
    floors = np.unique(
        np.concatenate([values / table.weight for table in tables for values in (table.values, table.best_values)])
    )
    found: Way | None = None
    reached, barred = -1, len(floors)

    def ask(place: int) -> bool | None:
        """Return whether all jobs can have a floor; None: that is not settled."""
        nonlocal found, reached, barred
        way, impossible = _serve(tables, counts, float(floors[place]))
        if impossible:
            barred = min(barred, place)
        if way is None:
            return False if impossible else None
        shares = [table.columns[row] / table.weight for table, row in zip(tables, way, strict=True) if row is not None]
        got = int(np.searchsorted(floors, min(shares) * (1 + _SAME), side="right")) - 1
        if got > reached:  # it may reach more than what was asked for, and less where a table is thinned
            reached, found = got, way
        return True if reached >= place else None

    ask(0)
    high = barred
    while high - reached > 1 and time.perf_counter() < deadline:
        middle = (max(reached, 0) + high) // 2
        if not ask(max(middle, reached + 1)):
            high = max(middle, reached + 1)
    low = high
    while barred - low > 1 and time.perf_counter() < deadline:
        middle = (low + barred) // 2
        low = middle if ask(middle) is not False else low
    thinned = any((table.values != table.best_values).any() for table in tables)
    bound = float(floors[min(barred if thinned else barred - 1, len(floors) - 1)]) if barred else 0.0
    return float(floors[max(reached, 0)]), bound, found


def _serve(tables: Sequence[JobTable], counts: Ints, floor: float) -> tuple[Way | None, bool]:
    """Return a way in which all jobs have (about) the floor, None where none is found, and whether there is none.

    Rounded up, ``sum(ceil(room / d) n) >= ceil(ESTs / d)`` holds as well: for d among the rooms it makes the linear
    relaxation, by which HiGHS proves that a floor is impossible, much tighter. A job that keeps to one type takes as many
    devices of it as hold its ESTs, or none.
    """
    from scipy import optimize, sparse

    slowest = [table.at_least(floor) for table in tables]
    if not all(map(len, slowest)):
        return None, True
    problems, shape = [table.problem for table in tables], (len(tables), len(counts))
    rooms = np.array([table.rooms[places[-1]] for table, places in zip(tables, slowest, strict=True)])
    workers = np.array([[problem.max_workers] for problem in problems])
    alone = np.array([[problem.single_type] for problem in problems])
    needed = -(-workers // np.maximum(rooms, 1))
    unit = np.where(alone, needed, 1)  # devices that are taken at a time
    most = np.minimum([table.available for table in tables], needed) // unit * (rooms > 0)
    held = np.where(alone, workers * (rooms > 0), rooms)
    parts = np.hstack((np.maximum(held, 1), np.ones_like(workers)))
    prices = np.array([table.shares()[1] for table in tables])
    own = np.hstack((-held[:, None] // parts[:, :, None], np.ones_like(unit)[:, None], (prices * unit)[:, None]))
    devices = np.where(alone, 1, [[problem.device_limit] for problem in problems])
    limits = np.hstack((-workers // parts, devices, np.ones_like(workers)))
    at = np.arange(unit.size)
    places = np.repeat(at.reshape(shape), own.shape[1], axis=0)
    rows = sparse.csr_matrix((own.ravel(), places.ravel(), np.arange(0, own.size + 1, shape[1])))
    made = optimize.milp(
        unit.ravel(),  # any way will do: HiGHS finds one soonest where it looks for few devices
        integrality=np.ones_like(at),
        bounds=optimize.Bounds(0, most.ravel()),
        constraints=[
            optimize.LinearConstraint(rows, ub=limits.ravel()),
            optimize.LinearConstraint(sparse.csr_matrix((unit.ravel(), (at % shape[1], at))), ub=counts),
        ],
        options={"time_limit": _PATIENCE_S, "mip_rel_gap": 1e9},
    )
    if made.x is None:
        return None, bool(made.status == 2)  # infeasible
    taken = np.rint(made.x).astype(np.int64).reshape(shape) * unit
    columns = [tuple(row) for row in taken.tolist()]
    for table, column in zip(tables, columns, strict=True):
        table.add(column)
    # HiGHS counts in floats: what it found is checked.
    fits = all(column in table.columns for table, column in zip(tables, columns, strict=True))
    return (list(columns) if fits and (taken.sum(axis=0) <= counts).all() else None), False


def _maximise(
    model: cp_model.CpModel, terms: Sequence[tuple[cp_model.IntVar, float]], tables: Sequence[JobTable]
) -> float:
    """Let the model maximise the sum of worths of what is chosen; return how many of its whole units make one."""
    unit = _SCALE / max(table.weight for table in tables)
    variables, worths = zip(*terms, strict=True)
    model.maximize(cp_model.LinearExpr.weighted_sum(variables, [round(worth * unit) for worth in worths]))
    return unit


def generate(
    tables: Sequence[JobTable], devices: Ints, *, everyone: bool, until: Callable[[], bool], rounds: int = _ROUNDS
) -> float:
    """Add columns until none can improve the linear program or ``until()`` says stop; return the smallest bound seen.

    The bound holds for every way of sharing the devices (T,), in which each job has a column (``everyone``; the columns must
    then admit a solution) or one at most. It ends as well where the linear program is not solved: without new prices there
    is nothing to ask.
    """
    lines = _Lines.of(tables)
    bound = float(sum(table.best_values.max(initial=0.0) for table in tables))
    for _ in range(rounds):
        solved = _master(tables, devices, everyone=everyone)
        if solved is None:
            break
        value, prices = solved
        most, columns = lines.price(prices)
        bound = min(bound, float(prices @ devices) + float((most if everyone else np.maximum(0.0, most)).sum()))
        fresh = sum([tables[job].add(row) for job, row in columns])
        if not fresh or bound - value <= _OPEN * max(1.0, bound) or until():
            break
    return bound


def _master(tables: Sequence[JobTable], devices: Ints, *, everyone: bool) -> tuple[float, Floats] | None:
    """Solve the linear program over columns: return its value and the prices (T,) of devices; None: it was not solved."""
    from scipy import optimize, sparse  # of all plans only these need it

    owners = [job for job, table in enumerate(tables) for _ in table.columns]
    use = sparse.csr_matrix(np.array([row for table in tables for row in table.columns], dtype=float).T)
    worth = np.array([worth for table in tables for worth in table.columns.values()])
    picks = sparse.csr_matrix((np.ones(len(owners)), (owners, range(len(owners)))), shape=(len(tables), len(owners)))
    ones = np.ones(len(tables))
    linprog: Any = optimize.linprog
    if everyone:
        made = linprog(-worth, A_ub=use, b_ub=devices, A_eq=picks, b_eq=ones, method="highs")
    else:
        made = linprog(-worth, A_ub=sparse.vstack([use, picks]), b_ub=np.append(devices, ones), method="highs")
    if made.status != 0:
        return None
    return float(-made.fun), np.maximum(0.0, -made.ineqlin.marginals[: len(devices)])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lines:
    """The step times of all jobs one after the other (L of them), a job's own once for each of its modes."""

    jobs: Ints
    rooms: Ints
    """(L, T)"""
    available: Ints
    """(L, T)"""
    shares: Floats
    """(2, L, T), of :meth:`JobTable.shares`."""
    workers: Ints
    values: Floats
    best_values: Floats

    @classmethod
    def of(cls, tables: Sequence[JobTable]) -> _Lines:
        """Return the lines of the tables."""
        parts = [(job, table, mode) for job, table in enumerate(tables) for mode in table.modes() if mode.any()]
        sizes = [len(table.values) for _, table, _ in parts]
        return cls(
            jobs=np.repeat([job for job, _, _ in parts], sizes),
            rooms=np.concatenate([table.rooms * (mode > 0) for _, table, mode in parts]),
            available=np.repeat([mode for _, _, mode in parts], sizes, axis=0),
            shares=np.repeat(np.stack([table.shares() for _, table, _ in parts], axis=1), sizes, axis=1),
            workers=np.repeat([table.problem.max_workers for _, table, _ in parts], sizes),
            values=np.concatenate([table.values for _, table, _ in parts]),
            best_values=np.concatenate([table.best_values for _, table, _ in parts]),
        )

    def price(self, prices: Floats) -> tuple[Floats, list[tuple[int, Counts]]]:
        """Return (J,) bounds on worth less cost of any column at ``prices`` (T,) of devices, and promising columns.

        For each step time the cheapest devices with room for every EST are taken: parts of devices allowed for the bound,
        the last one rounded up for the column. Where these pass a limit of the job's own, the limit gets a price too, found
        by bisection: whatever it is, what the devices then cost, less it, bounds what they cost within the limit (Lagrange).
        """
        cost, counts, holds = cover(self.rooms, self.available, np.broadcast_to(prices, self.rooms.shape), self.workers)
        for shares in self.shares:
            at = np.flatnonzero(holds & ((counts * shares).sum(axis=1) > 1 + _OPEN))
            low, high = np.zeros(len(at)), self.best_values[at]
            for _ in range(_HALVINGS if len(at) else 0):
                middle = (low + high) / 2
                priced = prices + middle[:, None] * shares[at]
                least, taken, _ = cover(self.rooms[at], self.available[at], priced, self.workers[at])
                cost[at] = np.maximum(cost[at], least - middle)
                over = (taken * shares[at]).sum(axis=1) > 1 + _OPEN
                counts[at[~over]] = taken[~over]
                low, high = np.where(over, middle, low), np.where(over, high, middle)
        most = np.full(int(self.jobs.max(initial=-1)) + 1, -np.inf)
        np.maximum.at(most, self.jobs, self.best_values - cost)
        score = np.where(holds, self.values - (counts * prices).sum(axis=1), -np.inf)
        order = np.lexsort((-score, self.jobs))
        rank = np.arange(len(order)) - np.searchsorted(self.jobs[order], self.jobs[order])
        best = order[(rank < _COLUMNS_A_ROUND) & np.isfinite(score[order])]
        return most, [(int(self.jobs[at]), tuple(counts[at].tolist())) for at in best]


def cover(rooms: Ints, available: Ints, prices: Floats, workers: Ints) -> tuple[Floats, Ints, NDArray[np.bool_]]:
    """Return (L,) the least cost of room for every EST, parts allowed; (L, T) whole devices; (L,) whether there is room.

    ``rooms``, ``available`` and ``prices`` are (L, T), ``workers`` (L,).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(rooms > 0, prices / rooms, np.inf)
    order = np.argsort(ratio, axis=1, kind="stable")
    lines = np.arange(len(rooms))
    left, cost, counts = workers.astype(float), np.zeros(len(rooms)), np.zeros_like(rooms)
    for kind in order.T:
        room = rooms[lines, kind]
        needed = np.where(room > 0, left / np.maximum(room, 1), 0.0)
        taken = np.minimum(needed, available[lines, kind])
        cost += taken * prices[lines, kind]
        counts[lines, kind] = np.ceil(taken - _OPEN).astype(np.int64)
        left = np.maximum(left - taken * room, 0.0)
    holds = left <= _OPEN * workers
    return np.where(holds, cost, np.inf), counts, holds


def _value_of(tables: Sequence[JobTable], rows: Way) -> float:
    """Return the weighted sum of what each job makes of its devices, relative to alone; a job without any waits."""
    return sum(table.columns[row] for table, row in zip(tables, rows, strict=True) if row is not None)


def _greedy(tables: Sequence[JobTable], counts: Ints) -> Way:
    """Return a choice of columns job by job, without a solver: what fits, of most worth."""
    left = counts.copy()
    chosen: Way = []
    for table in tables:
        rows = list(table.columns)
        fitting = np.flatnonzero((np.array(rows, dtype=np.int64).reshape(-1, len(left)) <= left).all(axis=1)).tolist()
        row = max((rows[place] for place in fitting), key=lambda row: table.columns[row], default=None)
        left -= np.array(row) if row is not None else 0
        chosen.append(row)
    return chosen


def _choose(tables: Sequence[JobTable], counts: Ints, limit_s: float, seed: int, start: Way, *, everyone: bool) -> Way:
    """Return the best choice of whole columns that CP-SAT finds; at least as good as ``start``.

    With ``everyone`` each job has a column, also in ``start``.
    """
    model = cp_model.CpModel()
    picks = [{row: model.new_bool_var("") for row in table.columns} for table in tables]
    for pick, chosen in zip(picks, start, strict=True):
        (model.add_exactly_one if everyone else model.add_at_most_one)(pick.values())
        for row, variable in pick.items():
            model.add_hint(variable, row == chosen)
    for place, limit in enumerate(counts.tolist()):
        terms = [(variable, row[place]) for pick in picks for row, variable in pick.items() if row[place]]
        model.add(cp_model.LinearExpr.weighted_sum(*zip(*terms, strict=True)) <= limit if terms else True)
    pairs = zip(tables, picks, strict=True)
    _maximise(model, [(each, table.columns[row]) for table, pick in pairs for row, each in pick.items()], tables)
    solver = solver_for(limit_s, seed)
    solver.parameters.relative_gap_limit = 1e-6
    if run(solver, model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return start
    found = [next((row for row, variable in pick.items() if solver.boolean_value(variable)), None) for pick in picks]
    return found if _value_of(tables, found) >= _value_of(tables, start) else start


def _whole(
    tables: Sequence[JobTable], counts: Ints, limit_s: float, seed: int, start: Way, *, everyone: bool
) -> tuple[Way | None, float]:
    """Return the best way that CP-SAT finds with every step time of every job in one model, and a bound on all ways.

    The way is None where none is found; the bound is 0 where it is proven that there is none.
    """
    model = cp_model.CpModel()
    used, terms = [], []
    for table, row in zip(tables, start, strict=True):
        own = [model.new_int_var(0, int(limit), "") for limit in table.available]
        limit_devices(model, table.problem, [own[place] for place in table.places])
        steps = [model.new_bool_var("") for _ in table.values]
        (model.add_exactly_one if everyone else model.add_at_most_one)(steps)
        for step, rooms, worth in zip(steps, table.rooms.tolist(), table.best_values.tolist(), strict=True):
            fits = cp_model.LinearExpr.weighted_sum(own, rooms) >= table.problem.max_workers
            model.add(fits).only_enforce_if(step)
            terms.append((step, worth))
        for variable, count in zip(own, row or (0,) * len(own), strict=True):
            model.add_hint(variable, count)
        used.append(own)
    for place, limit in enumerate(counts.tolist()):
        model.add(cp_model.LinearExpr.sum([own[place] for own in used]) <= limit)
    unit = _maximise(model, terms, tables)
    solver = solver_for(limit_s, seed)
    status = run(solver, model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, 0.0 if status == cp_model.INFEASIBLE else np.inf
    found = [tuple(solver.value(variable) for variable in own) for own in used]
    for table, row in zip(tables, found, strict=True):
        table.add(row)
    rows = [row if row in table.columns else None for table, row in zip(tables, found, strict=True)]
    # Half a unit for each job is what rounding may have hidden.
    return None if everyone and None in rows else rows, (solver.best_objective_bound + len(tables)) / unit
