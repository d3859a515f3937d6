"""Choosing among the columns of several jobs with CP-SAT."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from ddltool.analyzers.placement.est_model import run
from ddltool.analyzers.placement.job_columns import JobTable
from ddltool.analyzers.placement.step_times import Counts

Ints = NDArray[np.int64]
# Worths become whole numbers of this fraction of one for CP-SAT.
SCALE = 10**9
# Choosing whole columns takes so long at most: beyond, it gains next to nothing.
_CHOICE_S = 4.0


def seed_columns(tables: Sequence[JobTable], counts: Ints) -> None:
    """Give every job one device of each type, and an equal share, to start from."""
    for table in tables:
        for place in range(len(counts)):
            table.add(tuple(int(other == place) for other in range(len(counts))))
        share = np.minimum(table.available, counts // len(tables))
        if share.any():
            table.add(tuple(int(count) for count in share))


def solver_until(deadline: float, seed: int, share: float = 1.0) -> cp_model.CpSolver:
    """Return CP-SAT with a ``share`` of the time that is left, on one thread and with a fixed seed."""
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.05, (deadline - time.perf_counter()) * share)
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed % 2**31
    solver.parameters.catch_sigint_signal = False
    return solver


def choose(
    tables: Sequence[JobTable],
    counts: Ints,
    deadline: float,
    seed: int,
    *,
    everyone: bool,
    start: Sequence[Counts | None] | None = None,
) -> list[Counts | None]:
    """Return the best choice of whole columns that CP-SAT finds; at least as good as ``start``, one column for each job.

    With ``everyone`` there must be a start, for that there is always an answer.
    """
    first: list[Counts | None] = _greedy(tables, counts) if start is None else list(start)
    model = cp_model.CpModel()
    picks = [{row: model.new_bool_var("") for row in table.columns} for table in tables]
    for pick, chosen in zip(picks, first, strict=True):
        if everyone:
            model.add_exactly_one(pick.values())
        else:
            model.add_at_most_one(pick.values())
        for row, variable in pick.items():
            model.add_hint(variable, row == chosen)
    for place, limit in enumerate(counts.tolist()):
        terms = [(variable, row[place]) for pick in picks for row, variable in pick.items() if row[place]]
        model.add(cp_model.LinearExpr.weighted_sum(*zip(*terms, strict=True)) <= limit if terms else True)
    unit = SCALE / max(table.weight for table in tables)
    terms = [
        (variable, round(table.columns[row] * unit))
        for table, pick in zip(tables, picks, strict=True)
        for row, variable in pick.items()
    ]
    model.maximize(cp_model.LinearExpr.weighted_sum(*zip(*terms, strict=True)))
    solver = solver_until(min(deadline, time.perf_counter() + _CHOICE_S), seed, 0.7)
    solver.parameters.relative_gap_limit = 1e-6
    if run(solver, model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return first
    found = [next((row for row, variable in pick.items() if solver.boolean_value(variable)), None) for pick in picks]
    return found if value_of(tables, found) >= value_of(tables, first) else first


def value_of(tables: Sequence[JobTable], rows: Sequence[Counts | None]) -> float:
    """Return the weighted sum of what each job makes of its devices, relative to alone; a job without any waits."""
    return sum(table.columns[row] for table, row in zip(tables, rows, strict=True) if row is not None)


def _greedy(tables: Sequence[JobTable], counts: Ints) -> list[Counts | None]:
    """Return a choice of columns job by job, without a solver: what fits, of most worth."""
    left, chosen = counts.copy(), []
    for table in tables:
        fitting = [row for row in table.columns if (np.array(row) <= left).all()]
        row = max(fitting, key=lambda row: table.columns[row], default=None)
        left -= np.array(row) if row is not None else 0
        chosen.append(row)
    return chosen


def device_variables(model: cp_model.CpModel, table: JobTable) -> list[cp_model.IntVar]:
    """Return a job's numbers of devices by shared type, under its own constraints."""
    problem = table.problem
    used = [model.new_int_var(0, int(limit), "") for limit in table.available]
    own = [used[place] for place in table.places]
    model.add(cp_model.LinearExpr.sum(own) <= problem.device_limit)
    if problem.max_price_micro is not None:
        prices = [device.price_micro or 0 for device in problem.devices]
        model.add(cp_model.LinearExpr.weighted_sum(own, prices) <= problem.max_price_micro)
    if problem.single_type:
        present = [model.new_bool_var("") for _ in own]
        model.add_at_most_one(present)
        for variable, literal in zip(own, present, strict=True):
            model.add(variable == 0).only_enforce_if(~literal)
    return used
