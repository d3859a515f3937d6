"""The highest relative throughput that several jobs can all have at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from ddltool.analyzers.placement.est_model import run
from ddltool.analyzers.placement.job_choice import device_variables, solver_until
from ddltool.analyzers.placement.job_columns import SAME, JobTable
from ddltool.analyzers.placement.job_load import Load, at_least, load_at, whole_columns
from ddltool.analyzers.placement.requirements import Problem
from ddltool.analyzers.placement.step_times import Counts

Ints = NDArray[np.int64]
# One question about a floor takes so long at most; a question left open widens the gap.
_PATIENCE_S = 1.0
# Questions to CP-SAT about floors between the one reached and the bound take so long in all.
_CLOSING_S = 2.5
# With more numbers of devices than this, CP-SAT chooses among columns only.
_WIDEST = 400


@dataclass(kw_only=True, slots=True)
class _Search:
    """What is known so far: ``floors[low]`` can be had with ``rows``, ``floors[barred]`` and above cannot."""

    tables: Sequence[JobTable]
    counts: Ints
    floors: NDArray[np.float64]
    seed: int
    low: int
    barred: int
    rows: list[Counts] | None = None

    def keep(self, rows: list[Counts]) -> None:
        """Keep a way of sharing, which may reach more than what was asked for."""
        shares = []
        for table, row in zip(self.tables, rows, strict=True):
            table.add(row)
            shares.append(table.columns.get(row, 0.0) / table.weight)
        reached = int(np.searchsorted(self.floors, min(shares) * (1 + SAME), side="right")) - 1
        if reached > self.low:
            self.low, self.rows = reached, rows


def highest_floor(
    tables: Sequence[JobTable], counts: Ints, deadline: float, seed: int
) -> tuple[float, float, list[JobTable], list[Counts] | None]:
    """Return the highest relative throughput that all jobs can have at once, its bound, tables cut off there, and devices.

    First bisection over the different throughputs with linear programs, whose columns are rounded to whole ones wherever
    they suffice: this gives the bound and nearly always a way of sharing. Then CP-SAT settles what lies between, while
    there is time. Devices are None, and the floor is 0, where nothing was found.
    """
    floors = np.unique(
        np.concatenate([values / table.weight for table in tables for values in (table.values, table.best_values)])
    )
    search = _Search(tables=tables, counts=counts, floors=floors, seed=seed, low=-1, barred=len(floors))
    _bracket(search, deadline)
    _close(search, min(deadline, time.perf_counter() + _CLOSING_S))
    bound = _bound(search)
    if search.rows is None:
        return 0.0, bound, list(tables), None
    floor = float(floors[search.low])
    return floor, bound, [_cut(table, row, floor) for table, row in zip(tables, search.rows, strict=True)], search.rows


def _bound(search: _Search) -> float:
    """Return what no way of sharing exceeds: the floor below the one that is barred, or that one if others lie between."""
    thinned = any((table.values != table.best_values).any() for table in search.tables)
    below = search.barred if thinned else search.barred - 1
    return float(search.floors[min(below, len(search.floors) - 1)]) if search.barred else 0.0


def _bracket(search: _Search, deadline: float) -> None:
    """Find the highest floor that linear programs allow, and the highest at which rounding their columns succeeds.

    The lowest floor comes first, whatever the time: so that there is an answer.
    """
    low, middle, prices = -1, 0, 1.0 / search.counts
    while search.barred - low > 1 and (middle == 0 or time.perf_counter() < deadline):
        floor = float(search.floors[middle])
        load = load_at(search.tables, search.counts, floor, prices, lambda: time.perf_counter() > deadline)
        prices = load.prices
        if load.impossible:
            search.barred = middle
        else:
            if load.columns:
                rows, fit = whole_columns(load, search.counts, len(search.tables))
                if fit:
                    search.keep(rows)
            low = max(middle, search.low)
        middle = (low + search.barred) // 2


def _close(search: _Search, deadline: float) -> None:
    """Ask CP-SAT about floors between the one reached and the bound."""
    high = search.barred
    prices = 1.0 / search.counts
    while high - search.low > 1 and time.perf_counter() < deadline:
        middle = (search.low + high) // 2
        floor = float(search.floors[middle])
        load = load_at(search.tables, search.counts, floor, prices, lambda: time.perf_counter() > deadline)
        prices = load.prices
        rows, impossible = (None, True) if load.impossible else _ask(search, floor, load, deadline)
        if rows is not None:
            search.keep(rows)
        if search.low < middle:  # also where a thinned table let through what is a little too slow
            high = middle
            search.barred = min(search.barred, middle) if impossible else search.barred


def _ask(search: _Search, floor: float, load: Load, deadline: float) -> tuple[list[Counts] | None, bool]:
    """Return devices that give every job at least ``floor``, or None and whether that is proven impossible."""
    if load.columns:
        rows, fit = whole_columns(load, search.counts, len(search.tables))
        fitting = rows if fit else _choose(search, load, rows, deadline)
        if fitting is not None:
            return fitting, False
    if len(search.tables) * len(search.counts) > _WIDEST:
        return None, False
    return _every_number(search, floor, deadline)


def _choose(search: _Search, load: Load, start: Sequence[Counts], deadline: float) -> list[Counts] | None:
    """Return one of the columns for each job that fit together, if CP-SAT finds them."""
    model = cp_model.CpModel()
    picks = [model.new_bool_var("") for _ in load.columns]
    by_job: list[list[cp_model.IntVar]] = [[] for _ in search.tables]
    for (job, row), pick in zip(load.columns, picks, strict=True):
        by_job[job].append(pick)
        model.add_hint(pick, row == start[job])
    for own in by_job:
        model.add_exactly_one(own)
    use = np.array([row for _, row in load.columns], dtype=np.int64)
    for place, limit in enumerate(search.counts.tolist()):
        model.add(cp_model.LinearExpr.weighted_sum(picks, use[:, place].tolist()) <= limit)
    solver = solver_until(min(deadline, time.perf_counter() + _PATIENCE_S), search.seed)
    if run(solver, model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None
    found = dict(load.columns[place] for place, pick in enumerate(picks) if solver.boolean_value(pick))
    return [found[job] for job in range(len(search.tables))]


def _every_number(search: _Search, floor: float, deadline: float) -> tuple[list[Counts] | None, bool]:
    """Ask CP-SAT with all numbers of devices, not columns only: None with True is a proof."""
    model = cp_model.CpModel()
    used = [device_variables(model, table) for table in search.tables]
    for table, own in zip(search.tables, used, strict=True):
        rooms = table.rooms[at_least(table, floor)[-1]].tolist()
        for variable, room in zip(own, rooms, strict=True):
            if not room:
                model.add(variable == 0)
        model.add(cp_model.LinearExpr.weighted_sum(own, rooms) >= table.problem.max_workers)
    for place, limit in enumerate(search.counts.tolist()):
        model.add(cp_model.LinearExpr.sum([own[place] for own in used]) <= limit)
    solver = solver_until(min(deadline, time.perf_counter() + _PATIENCE_S), search.seed)
    status = run(solver, model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return [tuple(solver.value(variable) for variable in own) for own in used], False
    return None, status == cp_model.INFEASIBLE


def _cut(table: JobTable, row: Counts, floor: float) -> JobTable:
    """Return a job's table without step times that are too slow for the floor."""
    kept = at_least(table, floor)
    cut = replace(
        table,
        problem=_demanding(table, floor),
        values=table.values[kept],
        best_values=table.best_values[kept],
        rooms=table.rooms[kept],
        columns={},
    )
    cut.add(row)
    return cut


def _demanding(table: JobTable, floor: float) -> Problem:
    """Return the job's problem with the floor (less rounding) as its least throughput."""
    least = Fraction(table.least_worth(floor) / table.weight * table.alone)
    asked = table.problem.min_throughput
    return replace(table.problem, min_throughput=least if asked is None else max(asked, least))
