"""The highest relative throughput that several jobs can all have at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from ddltool.analyzers.placement.job_choice import choose, device_variables, seed_columns, solver_until
from ddltool.analyzers.placement.job_columns import JobTable, generate
from ddltool.analyzers.placement.requirements import Problem
from ddltool.analyzers.placement.step_times import Counts

Ints = NDArray[np.int64]
# One question about a floor takes so long at most; a question left open widens the gap.
_PATIENCE_S = 1.0


def highest_floor(
    tables: Sequence[JobTable], counts: Ints, deadline: float, seed: int
) -> tuple[float, float, list[JobTable]]:
    """Return the highest relative throughput that all jobs can have at once, its bound, and tables cut off there.

    At a given floor each job has one step time, the slowest that it may have; CP-SAT tells whether there are devices.
    Only as many halvings are needed as there are bits in the number of different throughputs.
    """
    floors = np.unique(np.concatenate([table.values / table.weight for table in tables]))
    # Parts of devices are cheap to ask about: they bar what is far too high.
    low, high = 0, len(floors)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if _parts_suffice(tables, counts, float(floors[middle])) else (low, middle)
    barred, low, high = high, -1, high
    best: list[Counts] | None = None
    # The first question is an easy one, so that something is known when time runs out.
    middle = int(np.searchsorted(floors, 0.5 * floors[barred - 1])) if barred else 0
    while high - low > 1:  # floors[low] can be had, floors[high] was not, floors[barred] cannot
        rows, certain = _at_floor(tables, counts, float(floors[middle]), deadline, seed)
        if rows is not None:
            low, best = middle, rows
        else:
            high, barred = middle, min(barred, middle) if certain else barred
        middle = (low + high) // 2
    bound = float(floors[barred - 1]) if barred else 0.0
    if best is None:
        return 0.0, bound, list(tables)
    floor = float(floors[low])
    cut = []
    for table, row in zip(tables, best, strict=True):
        kept = table.values >= floor * table.weight * (1 - 1e-12)
        narrowed = replace(
            table,
            problem=_at_least(table, floor),
            values=table.values[kept],
            best_values=table.best_values[kept],
            rooms=table.rooms[kept],
            columns={},
        )
        narrowed.add(row)
        cut.append(narrowed)
    return floor, bound, cut


def _at_least(table: JobTable, floor: float) -> Problem:
    """Return the job's problem with the floor (less rounding) as its least throughput."""
    least = Fraction(floor * table.alone) * (1 - Fraction(1, 10**12))
    asked = table.problem.min_throughput
    return replace(table.problem, min_throughput=least if asked is None else max(asked, least))


def _at_floor(
    tables: Sequence[JobTable], counts: Ints, floor: float, deadline: float, seed: int
) -> tuple[list[Counts] | None, bool]:
    """Return devices that give every job at least ``floor``, or None and whether that is proven impossible."""
    model = cp_model.CpModel()
    used = [device_variables(model, table) for table in tables]
    for table, own in zip(tables, used, strict=True):
        allowed = np.flatnonzero(table.values >= floor * table.weight * (1 - 1e-12))
        if not len(allowed):
            return None, True
        rooms = table.rooms[allowed[-1]].tolist()
        for variable, room in zip(own, rooms, strict=True):
            if not room:
                model.add(variable == 0)
        model.add(cp_model.LinearExpr.weighted_sum(own, rooms) >= table.problem.max_workers)
    for place, limit in enumerate(counts.tolist()):
        model.add(cp_model.LinearExpr.sum([own[place] for own in used]) <= limit)
    rows = _columns_at_floor(tables, counts, floor, deadline, seed)
    if not isinstance(rows, bool):
        return rows, True
    if not rows:
        return None, True
    solver = solver_until(min(deadline, time.perf_counter() + _PATIENCE_S), seed)
    status = solver.solve(model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return [tuple(solver.value(variable) for variable in own) for own in used], True
    return None, status == cp_model.INFEASIBLE


def _columns_at_floor(
    tables: Sequence[JobTable], counts: Ints, floor: float, deadline: float, seed: int
) -> list[Counts] | bool:
    """Return devices that give every job at least ``floor``; False: proven that there are none; True: not settled.

    How many jobs can be served at once is bounded by columns at the step time that the floor allows each.
    """
    served = []
    for table in tables:
        slowest = np.flatnonzero(table.values >= floor * table.weight * (1 - 1e-12))[-1:]
        one = np.ones(1)
        # Any column counts as one job, whatever it is worth: the step must only be short enough.
        least = Fraction(floor * table.alone) * (1 - Fraction(1, 10**12))
        problem = replace(table.problem, min_throughput=max(least, table.problem.min_throughput or least))
        rooms = table.rooms[slowest]
        served.append(
            _Served(**_fields(table, problem=problem, values=one, best_values=one, rooms=rooms, columns={}, weight=1.0))
        )
    seed_columns(served, counts)
    if not any(table.columns for table in served):
        return True
    until = min(deadline, time.perf_counter() + 2 * _PATIENCE_S)
    most = generate(served, counts, everyone=False, until=lambda: time.perf_counter() > until, rounds=30)
    if most < len(tables) * (1 - 1e-7):
        return False
    chosen = choose(served, counts, min(deadline, time.perf_counter() + _PATIENCE_S), seed, everyone=False)
    rows = [row for row in chosen if row is not None]
    return rows if len(rows) == len(tables) else True


def _fields(table: JobTable, **changes: Any) -> dict[str, Any]:
    return {field.name: changes.get(field.name, getattr(table, field.name)) for field in fields(table)}


class _Served(JobTable):
    """A job for which every column that is fast enough is worth the same."""

    def worth(self, step: Fraction) -> float:
        """Return 1."""
        return 1.0


def _parts_suffice(tables: Sequence[JobTable], counts: Ints, floor: float) -> bool:
    """Return whether the devices would be enough for every job's ``floor`` if they could be cut in parts."""
    from scipy import optimize, sparse

    linprog: Any = optimize.linprog
    kinds, number = len(counts), len(tables)
    rooms = np.empty((number, kinds))
    for row, table in zip(rooms, tables, strict=True):
        row[:] = table.rooms[np.flatnonzero(table.values >= floor * table.weight * (1 - 1e-12))[-1]]
    each = np.arange(kinds * number)
    cover = sparse.csr_matrix((rooms.ravel(), (each // kinds, each)), shape=(number, len(each)))
    use = sparse.csr_matrix((np.ones(len(each)), (each % kinds, each)), shape=(kinds, len(each)))
    workers = np.array([table.problem.max_workers for table in tables], dtype=float)
    made = linprog(
        np.zeros(len(each)),
        A_ub=sparse.vstack([-cover, use]).tocsr(),
        b_ub=np.append(-workers * (1 - 1e-9), counts),
        bounds=np.stack([np.zeros(len(each)), np.concatenate([table.available for table in tables])], axis=1),
        method="highs",
    )
    return int(made.status) != 2  # 2: infeasible
