"""The best that any order of transfers and compute could do: CP-SAT on the reduced graph. Start at :func:`solve_exact`.

Every resource is a machine that runs one op at a time; CP-SAT orders them all. The answer is therefore also a bound for
orders of transfers alone. The search starts from the schedule that TAC gives and from the bound of
:func:`~ddltool.analyzers.communication.shop.lower_bound`; it is skipped where the two already meet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce as fold
from typing import Literal

import numpy as np

from ddltool.analyzers.communication.order import Schedule, tac
from ddltool.analyzers.communication.properties import time_scale
from ddltool.analyzers.communication.shop import (
    ShopProblem,
    expand,
    list_schedule,
    lower_bound,
    numberings,
    order_of,
    reduce,
    run_order,
    unreduced,
)
from ddltool.analyzers.communication.timeline import Simulator, Timeline
from ddltool.graph import RECV, Graph, natural_key

# CP-SAT works on whole numbers; horizons beyond this are rounded down for the bound (times of real graphs lose less
# than a millionth), and the schedule found is timed again with the full figures.
_LARGEST_HORIZON = 2**34
_CLOSED = 1e-6
_SIMULATED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactResult:
    """The best schedule found and how far from it the optimum can be at most."""

    schedule: Schedule
    """Recvs in the order of the best schedule."""
    timeline: Timeline
    makespan_s: float
    lower_bound_s: float
    status: Literal["optimal", "feasible"]
    """"optimal": the bound is reached (to a millionth, the solver's resolution)."""
    blocks: int
    """Ops left after the reduction."""
    solve_seconds: float

    @property
    def gap(self) -> float:
        """Return (makespan - bound) / makespan; 0 when optimal."""
        return 0.0 if self.makespan_s <= 0 else max(0.0, 1.0 - self.lower_bound_s / self.makespan_s)


def solve_exact(
    graph: Graph,
    *,
    time_limit_s: float = 20.0,
    workers: int = 0,
    seed: int = 0,
    start: Schedule | None = None,
    problem: ShopProblem | None = None,
) -> ExactResult:
    """Return the shortest step over all orders on all resources, or the best found with a bound.

    ``start`` is the order to begin with (TAC's by default); the result is never worse than the schedule it gives.
    ``problem``: the reduced graph where it is at hand.
    ``workers``: solver threads, 0 for one per processor. Raises InputError for ops without a duration.
    """
    started = time.perf_counter()
    problem = reduce(graph) if problem is None else problem
    order = start if start is not None else tac(graph)
    starts = [list_schedule(problem, numbers) for numbers in _block_priorities(graph, problem, order.priority)]
    best = min(starts, key=lambda entry: _makespan(problem, entry))
    bound = lower_bound(problem)
    best_end = _makespan(problem, best)
    if bound < best_end:
        found, proven = _solve(problem, best, bound, time_limit_s, workers, seed)
        bound = max(bound, proven)
        if found is not None and _makespan(problem, found) < best_end:
            best, best_end = found, _makespan(problem, found)
    scale = time_scale(graph)
    timeline = _as_timeline(graph, expand(graph, problem, best))
    # The order simulated as it is can beat list schedules of blocks where CP-SAT found nothing: blocks are not cut up.
    simulator = Simulator(graph)
    timelines = [timeline, *(simulator.run(order.priority, seed + number) for number in range(_SIMULATED))]
    timeline = min(timelines, key=lambda entry: entry.makespan_s)
    makespan = round(timeline.makespan_s * scale)
    closed = makespan - bound <= _CLOSED * makespan
    recvs = graph.of_kind(RECV).tolist()
    recvs.sort(key=lambda op: (timeline.start_s[op], timeline.end_s[op], natural_key(graph.names[op])))
    names = tuple(graph.names[op] for op in recvs)
    return ExactResult(
        schedule=Schedule(name="exact", priority={name: place for place, name in enumerate(names)}, order=names),
        timeline=timeline,
        makespan_s=makespan / scale,
        lower_bound_s=(makespan if closed else min(bound, makespan)) / scale,
        status="optimal" if closed else "feasible",
        blocks=len(problem),
        solve_seconds=time.perf_counter() - started,
    )


def _as_timeline(graph: Graph, order: Sequence[int]) -> Timeline:
    """Return the timeline in which every resource follows the order of all ops."""
    whole = unreduced(graph)
    ops = [op for (op,) in whole.members]
    place = {op: number for number, op in enumerate(ops)}
    starts, ends = np.zeros(len(graph), dtype=np.int64), np.zeros(len(graph), dtype=np.int64)
    starts[ops] = run_order(whole, [place[op] for op in order], whole.times)
    ends[ops] = starts[ops] + np.array(whole.times)
    scale = time_scale(graph)
    return Timeline(start_s=starts / scale, end_s=ends / scale, makespan_s=int(ends.max(initial=0)) / scale)


def _block_priorities(graph: Graph, problem: ShopProblem, priority: Mapping[str, int]) -> list[list[int]]:
    """Return numbers for the blocks, several to try: recvs by their least priority and before the sends."""
    recvs = {
        block: min(priority.get(graph.names[op], len(graph)) for op in members) - 2 * len(graph)
        for block, (members, kind) in enumerate(zip(problem.members, problem.kind, strict=True))
        if kind == RECV
    }
    return [[recvs.get(block, number) for block, number in enumerate(numbers)] for numbers in numberings(problem)]


def _makespan(problem: ShopProblem, starts: Sequence[int]) -> int:
    return max((start + length for start, length in zip(starts, problem.times, strict=True)), default=0)


def _solve(
    problem: ShopProblem, hint: Sequence[int], bound: int, time_limit_s: float, workers: int, seed: int
) -> tuple[list[int] | None, int]:
    """Return CP-SAT's starts in whole units (None if it found nothing) and the bound that it proved."""
    from ortools.sat.python import cp_model

    unit = _unit(problem, _makespan(problem, hint))
    times = [length // unit for length in problem.times]
    horizon = -(-_makespan(problem, hint) // unit)
    model = cp_model.CpModel()
    starts = [model.new_int_var(0, max(0, horizon - length), "") for length in times]
    span = model.new_int_var(min(bound // unit, horizon), horizon, "makespan")
    for resource in range(problem.resources):
        ops = [op for op in range(len(problem)) if problem.resource[op] == resource]
        model.add_no_overlap([model.new_fixed_size_interval_var(starts[op], times[op], "") for op in ops])
    leads = {source for inputs in problem.inputs for source in inputs}
    for op, inputs in enumerate(problem.inputs):
        for source in inputs:
            model.add(starts[op] >= starts[source] + times[source])
        if op not in leads:
            model.add(span >= starts[op] + times[op])
    for op, value in enumerate(_rounded_starts(problem, times, hint)):
        model.add_hint(starts[op], value)
    model.minimize(span)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.random_seed = seed
    solver.parameters.catch_sigint_signal = False
    if workers:
        solver.parameters.num_workers = workers
    status = solver.solve(model)
    proven = math.ceil(solver.best_objective_bound - 1e-6) * unit
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, proven
    return _retimed(problem, [solver.value(start) for start in starts], times), proven


def _unit(problem: ShopProblem, horizon: int) -> int:
    """Return how many time units make one of the solver's: a common divisor, or what keeps the horizon manageable."""
    common = fold(math.gcd, problem.times, 0) or 1
    return common if horizon // common <= _LARGEST_HORIZON else -(-horizon // _LARGEST_HORIZON)


def _rounded_starts(problem: ShopProblem, times: Sequence[int], starts: Sequence[int]) -> list[int]:
    """Return the schedule's sequence timed with the rounded durations."""
    return run_order(problem, order_of(problem, starts, problem.times), times)


def _retimed(problem: ShopProblem, starts: Sequence[int], times: Sequence[int]) -> list[int]:
    """Return the same sequence timed with the full durations."""
    return run_order(problem, order_of(problem, starts, times), problem.times)
