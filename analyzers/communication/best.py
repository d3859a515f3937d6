"""Better orders than TAC's: a few candidates judged in simulation, and the best that any order could do, by CP-SAT.

TAC looks at single recvs: while several are missing for every op, all P are 0 and only the nearest join counts, however
little it unlocks. :func:`improve` also tries Johnson's rule on whole joins, and orders compute and sends as well (longest
tail first) if that shortens the step.

:func:`solve_exact` gives the optimum. Every resource is a machine that runs one op at a time; CP-SAT orders them all, on the
reduced graph, so the answer is also a bound for orders of transfers alone. The search starts from the best schedule at hand
and from the bound of :func:`~ddltool.analyzers.communication.shop.lower_bound`; it is skipped where the two already meet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce as fold
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.communication.dependencies import as_matrix, time_scale
from ddltool.analyzers.communication.order import Schedule, tac, tic
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

# Simulated steps that decide between two orders: common random numbers, so few suffice.
_JUDGES = 8
# Numbers for compute ops are given only where they gain this share of the step.
_WORTH = 1e-3
# CP-SAT works on whole numbers; horizons beyond this are rounded down for the bound (times of real graphs lose less
# than a millionth), and the schedule found is timed again with the full figures.
_LARGEST_HORIZON = 2**34
_CLOSED = 1e-6


def improve(
    graph: Graph, *, seed: int = 0, start: Schedule | None = None, problem: ShopProblem | None = None
) -> Schedule:
    """Return an order that is at least as good as TAC's in simulation, on the same seeds.

    It numbers the recvs, or every op: a runtime that only orders transfers gains less. ``start``: TAC's order,
    ``problem``: the reduced graph, where they are at hand. Raises InputError for ops without a duration.
    """
    first = replace(tac(graph) if start is None else start, name="improved")
    problem = reduce(graph) if problem is None else problem
    orders = {first.order: first}
    for order in (tic(graph).order, *(_by_joins(graph, problem, by_load=each) for each in (True, False))):
        rank = {name: place for place, name in enumerate(order)}
        orders.setdefault(order, Schedule(name="improved", priority=rank, order=order))
    simulator = Simulator(graph)

    def step_s(schedule: Schedule) -> float:
        runs = (simulator.run(schedule.priority, seed + judge).makespan_s for judge in range(_JUDGES))
        return sum(runs) / _JUDGES

    steps = {order: step_s(schedule) for order, schedule in orders.items()}
    best = orders[min(steps, key=steps.__getitem__)]
    if graph.mode == "inference":
        return best
    # With numbers for every op hardly anything is left to chance: one run each tells the best.
    numbers = numberings(problem)
    wholes = [
        replace(order, priority=_with_compute(graph, problem, order, each))
        for order in orders.values()
        for each in numbers
    ]
    whole = min(wholes, key=lambda each: simulator.run(each.priority, seed).makespan_s)
    return whole if step_s(whole) < steps[best.order] * (1 - _WORTH) else best


def _by_joins(graph: Graph, problem: ShopProblem, *, by_load: bool) -> tuple[str, ...]:
    """Bring in whole joins, the next by Johnson's rule on (missing transfers, compute that they unlock).

    A join is what blocks of H (all compute blocks without one) wait for. ``by_load``: the largest load per missing transfer
    first.
    """
    recvs = problem.of_kind(RECV)
    loads: dict[int, int] = {}
    for block in sorted(problem.head) or (op for op in range(len(problem)) if problem.kind[op] != RECV):
        if bits := problem.needed[block]:
            loads[bits] = loads.get(bits, 0) + problem.times[block]
    joins = as_matrix(list(loads), len(recvs))
    gain, transfer = np.array(list(loads.values()), dtype=np.int64), np.array([problem.times[op] for op in recvs])
    wait, left = joins @ transfer, joins.sum(axis=1)
    missing = np.ones(len(recvs), dtype=bool)
    order: list[int] = []
    while (left > 0).any():
        join = _next_join(np.flatnonzero(left), wait, gain, by_load=by_load)
        brought = joins[join] & missing
        order += np.flatnonzero(brought).tolist()
        missing &= ~brought
        wait = wait - joins[:, brought] @ transfer[brought]
        left = left - joins[:, brought].sum(axis=1)
    order += np.flatnonzero(missing).tolist()
    return tuple(graph.names[op] for recv in order for op in problem.members[recvs[recv]])


def _next_join(left: NDArray[np.intp], wait: NDArray[np.int64], gain: NDArray[np.int64], *, by_load: bool) -> int:
    """Return which of the joins that are left comes next; ties: the first."""
    wait, gain = wait[left], gain[left]
    if by_load:
        return int(left[((gain + 1) / (wait + 1)).argmax()])
    early = wait < gain
    return int(left[np.lexsort((np.where(early, wait, -gain), ~early))[0]])


def _with_compute(graph: Graph, problem: ShopProblem, order: Schedule, numbers: Sequence[int]) -> dict[str, int]:
    """Return numbers for all ops: recvs as they are ordered, then the blocks by ``numbers`` (n,).

    Numbers are compared on one resource only; sends come after all recvs of their channel that are ready. Free ops are
    in no block: they get 0 and so run at once.
    """
    found = dict.fromkeys(graph.names, 0)
    for block, members in enumerate(problem.members):
        for op in members:
            found[graph.names[op]] = len(order.order) + numbers[block]
    return found | {name: place for place, name in enumerate(order.order)}


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
    solve_seconds: float


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
    ``problem``: the reduced graph where it is at hand. ``workers``: solver threads, 0 for one per processor. Raises
    InputError for ops without a duration.
    """
    started = time.perf_counter()
    problem = reduce(graph) if problem is None else problem
    order = start if start is not None else tac(graph)
    starts = [list_schedule(problem, numbers) for numbers in _block_priorities(graph, problem, order.priority)]
    best = min(starts, key=lambda entry: _makespan(problem, entry))
    bound = lower_bound(problem)
    if bound < _makespan(problem, best):
        found, proven = _solve(problem, best, bound, time_limit_s, workers, seed)
        bound = max(bound, proven)
        best = min([best, list(found)], key=lambda entry: _makespan(problem, entry))
    scale = time_scale(graph)
    # The order simulated as it is can beat list schedules of blocks where CP-SAT found nothing: blocks are not cut up.
    simulator = Simulator(graph)
    simulated = [simulator.run(order.priority, seed + number) for number in range(_JUDGES)]
    timeline = min([_as_timeline(graph, problem, best), *simulated], key=lambda entry: entry.makespan_s)
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
        solve_seconds=time.perf_counter() - started,
    )


def _as_timeline(graph: Graph, problem: ShopProblem, block_starts: Sequence[int]) -> Timeline:
    """Return the timeline in which every resource follows the order of a reduced schedule."""
    whole = unreduced(graph)
    ops = [op for (op,) in whole.members]
    starts = np.empty(len(graph), dtype=np.int64)
    starts[ops] = run_order(whole, expand(problem, whole, block_starts), whole.times)
    ends = starts.copy()
    ends[ops] += np.array(whole.times)
    scale = time_scale(graph)
    return Timeline(start_s=starts / scale, end_s=ends / scale, makespan_s=int(ends.max(initial=0)) / scale)


def _block_priorities(graph: Graph, problem: ShopProblem, priority: Mapping[str, int]) -> list[list[int]]:
    """Return numbers for the blocks, several to try: recvs by their priority and before the sends."""
    recvs = {
        block: priority.get(graph.names[problem.members[block][0]], len(graph)) - 2 * len(graph)
        for block in problem.of_kind(RECV)
    }
    return [[recvs.get(block, number) for block, number in enumerate(numbers)] for numbers in numberings(problem)]


def _makespan(problem: ShopProblem, starts: Sequence[int]) -> int:
    return max((start + length for start, length in zip(starts, problem.times, strict=True)), default=0)


def _solve(
    problem: ShopProblem, hint: Sequence[int], bound: int, time_limit_s: float, workers: int, seed: int
) -> tuple[Sequence[int], int]:
    """Return CP-SAT's starts in whole units (the hint if it found nothing) and the bound that it proved."""
    from ortools.sat.python import cp_model

    span_of_hint = _makespan(problem, hint)
    unit = fold(math.gcd, problem.times, 0) or 1  # what makes one of the solver's units
    if span_of_hint // unit > _LARGEST_HORIZON:
        unit = -(-span_of_hint // _LARGEST_HORIZON)
    times, horizon = [length // unit for length in problem.times], -(-span_of_hint // unit)
    model = cp_model.CpModel()
    starts = [model.new_int_var(0, max(0, horizon - length), "") for length in times]
    span = model.new_int_var(min(bound // unit, horizon), horizon, "makespan")
    for resource in range(problem.resources):
        ops = [op for op in range(len(problem)) if problem.resource[op] == resource]
        model.add_no_overlap([model.new_fixed_size_interval_var(starts[op], times[op], "") for op in ops])
    for op, inputs in enumerate(problem.inputs):
        for source in inputs:
            model.add(starts[op] >= starts[source] + times[source])
        if not problem.consumers[op]:
            model.add(span >= starts[op] + times[op])
    # The hint's sequence in the solver's units; below, the solver's sequence in whole ones.
    for op, value in enumerate(run_order(problem, order_of(problem, hint, problem.times), times)):
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
        return hint, proven
    found = order_of(problem, [solver.value(start) for start in starts], times)
    return run_order(problem, found, problem.times), proven
