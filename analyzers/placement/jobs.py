"""Several jobs on the same devices at once. Start at :func:`solve_jobs`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from ddltool.analyzers.placement.dealing import plan_of
from ddltool.analyzers.placement.est import solve_est
from ddltool.analyzers.placement.est_model import run
from ddltool.analyzers.placement.job_choice import SCALE, choose, device_variables, seed_columns, solver_until, value_of
from ddltool.analyzers.placement.job_columns import JobTable, generate, job_table
from ddltool.analyzers.placement.job_floor import highest_floor
from ddltool.analyzers.placement.problem import Problem
from ddltool.analyzers.placement.step_times import Counts, reach
from ddltool.errors import Infeasible, InputError, NotProven
from ddltool.graph import natural_key
from ddltool.plan import Plan

Ints = NDArray[np.int64]
Sharing = Literal["sum", "max-min"]
# Up to so many step times of all jobs together, one model with all of them is solved as well.
_SMALL = 4000
# Larger ones would leave nothing of the others in the solver's sums.
LARGEST_WEIGHT = 1e9
# Below this gap more time is not worth it, but in problems that are solved at once.
_CLOSE, _TINY = 1e-3, 400
# The smallest share, where it comes first, has this part of the time.
_FLOOR_SHARE = 0.6
# The sum, where it comes second, is given so long.
_SECOND_S = 4.0
# A gap below this is rounding.
_ROUNDING = 1e-7


@dataclass(frozen=True, kw_only=True, slots=True)
class JobsPlan:
    """What each job gets."""

    plans: tuple[Plan | None, ...]
    """In the order of the jobs; None: the job waits."""
    relative: tuple[float, ...]
    """Each job's throughput over what it makes with all devices to itself; 0 when it waits."""
    objective: Sharing
    value: float
    """"sum": the weighted sum of ``relative``; "max-min": the smallest of them."""
    bound: float
    """No way of sharing reaches more."""
    gap: float
    """``1 - value / bound``."""
    status: Literal["optimal", "feasible"]
    solve_seconds: float


def solve_jobs(
    problems: Sequence[Problem],
    devices: Mapping[str, int],
    *,
    weights: Sequence[float] | None = None,
    objective: Sharing = "sum",
    time_limit_s: float = 10.0,
    seed: int = 0,
) -> JobsPlan:
    """Return who gets which devices: no device is given twice, every job keeps its own constraints.

    ``devices``: how many there are of each type, for all jobs together; a job uses the types that its problem names, at
    most as many as it offers. "sum" maximises the weighted sum of throughputs relative to the job alone (a job may then
    wait); "max-min" maximises the smallest relative throughput, then the sum. The value is proven by a bound: columns
    for the jobs, priced by a linear program, then chosen whole by CP-SAT. Raises Infeasible where a job cannot run even
    alone, NotProven where it is not settled what a job makes alone, InputError for no jobs, unknown types, or weights that
    are not positive.
    """
    started = time.perf_counter()
    deadline = started + time_limit_s
    names = sorted((name for name, count in devices.items() if count > 0), key=natural_key)
    counts = np.array([devices[name] for name in names], dtype=np.int64)
    tables = _tables(problems, names, counts, weights or [1.0] * len(problems), seed)
    floor, floor_bound, start = 0.0, 1.0, None
    if objective == "max-min":
        part = time.perf_counter() + _FLOOR_SHARE * (deadline - time.perf_counter())
        floor, floor_bound, tables, start = highest_floor(tables, counts, part, seed)
        deadline = min(deadline, time.perf_counter() + _SECOND_S)  # what follows only settles the sum
    everyone = floor > 0
    seed_columns(tables, counts)
    # A share of the time is kept for the choice of whole columns.
    part = time.perf_counter() + 0.6 * (deadline - time.perf_counter())
    bound = generate(tables, counts, everyone=everyone, until=lambda: time.perf_counter() > part)
    chosen = choose(tables, counts, deadline, seed, everyone=everyone, start=start)
    chosen = _improve(tables, counts, chosen)
    value = value_of(tables, chosen)
    size = sum(len(table.values) for table in tables)
    largest = _SMALL if objective == "sum" and bound - value > _CLOSE * bound else _TINY
    if bound - value > _ROUNDING * bound and size <= largest:
        chosen, bound = _exact(tables, counts, chosen, bound, deadline, seed, everyone=everyone)
        value = value_of(tables, chosen)
    relative = tuple(
        0.0 if row is None else table.columns[row] / table.weight for table, row in zip(tables, chosen, strict=True)
    )
    if objective == "max-min":
        value, bound = min(relative), floor_bound
    gap = max(0.0, 1 - value / bound) if bound > 0 else 0.0
    gap = gap if gap > _ROUNDING else 0.0
    seconds = time.perf_counter() - started
    return JobsPlan(
        plans=tuple(_plan(table, row, gap, seconds) for table, row in zip(tables, chosen, strict=True)),
        relative=relative,
        objective=objective,
        value=value,
        bound=max(bound, value),
        gap=gap,
        status="optimal" if gap == 0 else "feasible",
        solve_seconds=seconds,
    )


def _tables(
    problems: Sequence[Problem], names: Sequence[str], counts: Ints, weights: Sequence[float], seed: int
) -> list[JobTable]:
    """Return each job's table, with the types and counts that are shared."""
    if not problems:
        raise InputError("jobs", "there are none", "give one job at least")
    if len(weights) != len(problems) or not all(0 < weight <= LARGEST_WEIGHT for weight in weights):
        wrong = f"must be one positive number for each job, at most {LARGEST_WEIGHT:g}"
        raise InputError("weights", wrong, "leave them out for equal weights")
    tables = []
    for problem, weight in zip(problems, weights, strict=True):
        shared = dict(zip(names, counts.tolist(), strict=True))
        offered = [
            replace(device, count=min(device.count, shared[device.name]))
            for device in problem.devices
            if device.name in shared
        ]
        if not offered:
            raise InputError(f"{problem.job}:devices", "none of its device types is there", f"there are {names}")
        narrowed = replace(problem, devices=tuple(offered))
        try:
            alone = solve_est(narrowed, seed=seed)
        except Infeasible as error:
            raise Infeasible(f"{problem.job}: {error}") from None
        if alone.gap > 0:  # shares of less than the best would pass 1, and no bound would hold
            raise NotProven(f"{problem.job}: what it reaches alone was not settled in {alone.solve_seconds:.0f} s")
        used = {device.name: 0 for device in offered}
        for row in alone.assignments:
            used[row.device_type] += row.devices
        step = reach(narrowed, tuple(used.values()))
        if step is None:
            raise ValueError(f"{used} devices have no room for every EST")
        tables.append(job_table(narrowed, names, counts, weight, step))
        tables[-1].add(tuple(used.get(name, 0) for name in names))
    return tables


def idle_throughput(problem: Problem, devices: Mapping[str, int], plans: Sequence[Plan | None]) -> float:
    """Return what a job would reach on the devices that no plan uses, were any throughput enough; 0: it cannot run."""
    left = dict(devices)
    for plan in plans:
        for row in () if plan is None else plan.assignments:
            left[row.device_type] -= row.devices
    offered = tuple(
        replace(device, count=min(device.count, left[device.name])) for device in problem.devices if left[device.name]
    )
    try:
        return solve_est(replace(problem, devices=offered, min_throughput=None)).throughput if offered else 0.0
    except Infeasible:
        return 0.0


def _improve(tables: Sequence[JobTable], counts: Ints, chosen: Sequence[Counts | None]) -> list[Counts | None]:
    """Let jobs take turns at their best plan on their own devices and the ones left over, until none gains."""
    rows = list(chosen)
    left = counts - np.sum([row for row in rows if row is not None], axis=0, dtype=np.int64)
    changed = bool(left.any())
    while changed and left.any():
        changed = False
        for job, table in enumerate(tables):
            own = np.zeros_like(counts) if rows[job] is None else np.array(rows[job])
            better = _best_within(table, own + left)
            now = 0.0 if rows[job] is None else table.columns[rows[job]]  # type: ignore[index]
            if better is not None and table.columns[better] > now + 1e-12:
                rows[job], left, changed = better, left + own - np.array(better), True
    return rows


def _best_within(table: JobTable, available: Ints) -> Counts | None:
    """Return a good column within the available devices: the fastest step in which they hold every EST."""
    within = np.minimum(available, table.available)
    modes = np.eye(len(within), dtype=np.int64) * within if table.problem.single_type else within[None, :]
    best: Counts | None = None
    for mode in modes:
        room = table.rooms @ mode
        enough = np.flatnonzero(room >= table.problem.max_workers)
        if not len(enough):
            continue
        rooms, left, counts = table.rooms[enough[0]], table.problem.max_workers, np.zeros_like(mode)
        for place in np.argsort(-rooms, kind="stable"):
            if rooms[place] and left > 0:
                counts[place] = min(int(mode[place]), -(-left // int(rooms[place])))
                left -= int(counts[place] * rooms[place])
        row = tuple(int(count) for count in counts)
        table.add(row)
        if row in table.columns and (best is None or table.columns[row] > table.columns[best]):
            best = row
    return best


def _exact(
    tables: Sequence[JobTable],
    counts: Ints,
    chosen: Sequence[Counts | None],
    bound: float,
    deadline: float,
    seed: int,
    *,
    everyone: bool,
) -> tuple[list[Counts | None], float]:
    """Return a better choice, if CP-SAT finds one with every step time in one model, and the smaller bound."""
    model = cp_model.CpModel()
    unit = SCALE / max(table.weight for table in tables)
    used = [device_variables(model, table) for table in tables]
    terms = []
    for table, own, row in zip(tables, used, chosen, strict=True):
        steps = [model.new_bool_var("") for _ in table.values]
        if everyone:
            model.add_exactly_one(steps)
        else:
            model.add_at_most_one(steps)
        for step, rooms, worth in zip(steps, table.rooms.tolist(), table.best_values.tolist(), strict=True):
            fits = cp_model.LinearExpr.weighted_sum(own, rooms) >= table.problem.max_workers
            model.add(fits).only_enforce_if(step)
            terms.append((step, round(worth * unit)))
        for variable, count in zip(own, row or (0,) * len(own), strict=True):
            model.add_hint(variable, count)
    for place, limit in enumerate(counts.tolist()):
        model.add(cp_model.LinearExpr.sum([own[place] for own in used]) <= limit)
    model.maximize(cp_model.LinearExpr.weighted_sum(*zip(*terms, strict=True)))
    solver = solver_until(deadline, seed)
    if run(solver, model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return list(chosen), bound
    rows: list[Counts | None] = []
    for table, own in zip(tables, used, strict=True):
        row = tuple(solver.value(variable) for variable in own)
        table.add(row)
        rows.append(row if row in table.columns else None)
    complete = not everyone or None not in rows
    rows = rows if complete and value_of(tables, rows) > value_of(tables, chosen) else list(chosen)
    # Half a unit for each job is what rounding may have hidden.
    return rows, min(bound, (solver.best_objective_bound + len(tables)) / unit)


def _plan(table: JobTable, row: Counts | None, gap: float, seconds: float) -> Plan | None:
    if row is None:
        return None
    own = tuple(row[place] for place in table.places)
    step = reach(table.problem, own)
    if step is None:
        raise ValueError(f"{own} devices have no room for every EST")
    return plan_of(table.problem, own, step, gap=gap, solve_seconds=seconds)
