"""How good an order is: bounds, scheduling efficiency, better orders than TAC's, the optimum, a verdict. Start at
:func:`compare`.

With ``U`` the time of all ops one after the other and ``L`` that of the busiest resource alone, the efficiency of an order is
``E = (U - makespan) / (U - L)``, and ``S = (U - L) / L`` (TicTac, Equations 1 to 4). L ignores that ops wait for each other, so
a low E can be due to the graph: ``attribution`` divides 1 - E into what some order could win and what none can.

TAC looks at single recvs: while several are missing for every op, all P are 0 and only the nearest join counts (a join is a
set of recvs for which some op waits), however little it unlocks. :func:`improve` also tries Johnson's rule on whole joins, and
orders compute and sends as well (longest tail first) if that shortens the step. :func:`solve_exact` gives the optimum: every
resource is a machine that runs one op at a time, and CP-SAT orders the ops of all of them on the reduced graph, so that the
optimum is also a bound for orders of transfers alone. The search starts from the best known schedule and from
:func:`~.shop.lower_bound`, and is skipped if these already meet.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce as fold
from typing import Literal

import numpy as np

from ddltool.analyzers.step.communication.program import CLEAR_GAIN, SMALL_GAIN
from ddltool.analyzers.step.transfers import shop
from ddltool.analyzers.step.transfers.order import Schedule, tac, tic
from ddltool.analyzers.step.transfers.shop import ShopProblem
from ddltool.analyzers.step.transfers.timeline import Simulator, Timeline
from ddltool.arrays import Ints, Places
from ddltool.dependencies import as_matrix, time_scale
from ddltool.graph import COMPUTE, RECV, Graph, natural_key
from ddltool.graph_results import LostEfficiency, ScheduleFigures, TraceVerdict
from ddltool.units import show_seconds

# Simulated steps by which orders are compared; all orders get the same seeds, so few suffice.
_RUNS = 8
# Compute ops get priority numbers only where those gain more than this share of the step.
_WORTHWHILE_SHARE = 1e-3
# CP-SAT works on whole numbers. Times with a horizon beyond this are rounded down (those of real graphs lose less than a
# millionth), so that its bound holds, and the schedule that it finds is timed again with the exact times.
_LARGEST_HORIZON = 2**34
# A schedule within this share of its bound counts as optimal.
_CLOSED = 1e-6
# By so much the solver's bound, a float, may lie above a whole number because of rounding.
_ROUNDED = 1e-6


def improve(
    graph: Graph, *, seed: int = 0, start: Schedule | None = None, problem: ShopProblem | None = None
) -> Schedule:
    """Return the schedule with the shortest mean step in simulation: TAC's, TIC's, or one of whole joins.

    Its priority numbers are for recvs, or for every op if that shortens a training step further; a runtime that only orders
    transfers then gains less.

    Args:
        seed: of the first of ``_RUNS`` simulated steps, whose mean is compared.
        start: TAC's order, if it is known already.
        problem: the reduced graph, if it is known already.

    Raises InputError for ops without a duration.
    """
    tac_schedule = replace(tac(graph) if start is None else start, name="improved")
    problem = shop.reduce(graph) if problem is None else problem
    schedules = {tac_schedule.order: tac_schedule}  # by order, so that each is simulated once
    other_orders = (
        tic(graph).order,
        _order_by_joins(graph, problem, by_load=True),
        _order_by_joins(graph, problem, by_load=False),
    )
    for order in other_orders:
        rank_by_recv = {name: rank for rank, name in enumerate(order)}
        schedules.setdefault(order, Schedule(name="improved", priority=rank_by_recv, order=order))
    simulator = Simulator(graph)

    def mean_step_s(schedule: Schedule) -> float:
        """Return the mean seconds of the simulated steps under a schedule."""
        return sum(simulator.run(schedule.priority, seed + run).makespan_s for run in range(_RUNS)) / _RUNS

    step_by_order = {order: mean_step_s(schedule) for order, schedule in schedules.items()}
    best = schedules[min(step_by_order, key=step_by_order.__getitem__)]
    if graph.mode == "inference":
        return best
    # With numbers for every op hardly anything is left to chance, so that one run of each is enough to find the best.
    numbered = [
        replace(schedule, priority=_number_all_ops(graph, problem, schedule.order, block_numbers))
        for schedule, block_numbers in itertools.product(schedules.values(), shop.numberings(problem))
    ]
    best_numbered = min(numbered, key=lambda schedule: simulator.run(schedule.priority, seed).makespan_s)
    worthwhile_s = step_by_order[best.order] * (1 - _WORTHWHILE_SHARE)
    return best_numbered if mean_step_s(best_numbered) < worthwhile_s else best


def _order_by_joins(graph: Graph, problem: ShopProblem, *, by_load: bool) -> tuple[str, ...]:
    """Return the recvs' names join by join; the next join follows by Johnson's rule on (missing transfers, compute unlocked).

    A join is a set of recvs for which some block waits: a block of H (the compute that every send needs), or if H is empty
    any compute block. ``by_load``: instead of Johnson's rule, the join with the most compute per missing transfer comes next.
    """
    recvs = problem.of_kind(RECV)
    loads: dict[int, int] = {}  # by join (bit k: the k-th recv), the compute time of the blocks that wait for it
    blocks = sorted(problem.before_sends) or [op for op in range(len(problem)) if problem.kind[op] != RECV]
    for block in blocks:
        needed_recvs = problem.needed[block]
        if needed_recvs:
            loads[needed_recvs] = loads.get(needed_recvs, 0) + problem.times[block]
    joins = as_matrix(list(loads), len(recvs))  # (joins, recvs) whether a join has a recv
    load = np.array(list(loads.values()), dtype=np.int64)  # (joins,)
    transfer = np.array([problem.times[op] for op in recvs])  # (recvs,)
    # Of each join, the time and the number of its recvs that the order does not have yet.
    missing_transfer = joins @ transfer
    missing_count = joins.sum(axis=1)
    is_missing = np.ones(len(recvs), dtype=bool)
    order: list[int] = []  # indices of recvs
    while (missing_count > 0).any():
        join = _next_join(np.flatnonzero(missing_count), missing_transfer, load, by_load=by_load)
        is_next = joins[join] & is_missing
        order += np.flatnonzero(is_next).tolist()
        is_missing &= ~is_next
        missing_transfer = missing_transfer - joins[:, is_next] @ transfer[is_next]
        missing_count = missing_count - joins[:, is_next].sum(axis=1)
    order += np.flatnonzero(is_missing).tolist()
    return tuple(graph.names[op] for recv in order for op in problem.members[recvs[recv]])


def _next_join(candidates: Places, transfer: Ints, load: Ints, *, by_load: bool) -> int:
    """Return the index of the candidate join that comes next, the first among equals.

    Args:
        candidates: indices of the joins of which recvs are missing.
        transfer: (joins,) the time of each join's missing transfers.
        load: (joins,) the time of the compute that waits for each join.
        by_load: whether the largest load per transfer comes first; else Johnson's rule decides.
    """
    transfer, load = transfer[candidates], load[candidates]
    if by_load:  # 1 is added to both: times may be 0
        return int(candidates[((load + 1) / (transfer + 1)).argmax()])
    # Johnson's rule: joins that transfer faster than they compute by ascending transfer, then the others by descending load.
    is_early = transfer < load
    within_kind = np.where(is_early, transfer, -load)
    first = np.lexsort((within_kind, ~is_early))[0]  # sorted by the last key, then by the one before it
    return int(candidates[first])


def _number_all_ops(
    graph: Graph, problem: ShopProblem, order: Sequence[str], block_numbers: Sequence[int]
) -> dict[str, int]:
    """Return priority numbers of all ops by name: recvs as in ``order``, then the ops of block b by ``block_numbers[b]``.

    Numbers are compared within one resource only; so sends come after the ready recvs of their channel. Ops without a block,
    which take no time, get 0 and run at once.
    """
    numbers = dict.fromkeys(graph.names, 0)
    for block, members in enumerate(problem.members):
        for op in members:
            numbers[graph.names[op]] = len(order) + block_numbers[block]
    return numbers | {name: rank for rank, name in enumerate(order)}


@dataclass(frozen=True, kw_only=True, slots=True)
class ExactResult:
    """The best schedule that was found, and a bound on the optimum."""

    schedule: Schedule
    """Recvs in the order of the best schedule."""
    timeline: Timeline
    makespan_s: float
    lower_bound_s: float
    status: Literal["optimal", "feasible"]
    """"optimal": the schedule reaches the bound (to a millionth, the solver's resolution); "feasible": it may not be."""
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
    """Return the shortest step over all orders on all resources, or the best one found in the time, with a bound.

    Args:
        time_limit_s: seconds for the solver.
        workers: solver threads; 0: one for each processor.
        seed: of the solver, and of the simulated runs of ``start``.
        start: the order to begin with, None: TAC's. The result is never worse than this order.
        problem: the reduced graph, if it is known already.

    Raises InputError for ops without a duration.
    """
    started = time.perf_counter()
    problem = shop.reduce(graph) if problem is None else problem
    order = start if start is not None else tac(graph)
    # List schedules of the blocks, as the starts of all blocks; the best one is what the search begins with.
    starts = [shop.list_schedule(problem, numbers) for numbers in _block_priorities(graph, problem, order.priority)]
    best_starts = min(starts, key=lambda entry: _makespan(problem, entry))
    bound = shop.lower_bound(problem)
    # All times are whole units up to here, so that the two can be equal: then nothing is left to search.
    if bound < _makespan(problem, best_starts):
        solver_starts, proven_bound = _solve_with_cp_sat(problem, best_starts, bound, time_limit_s, workers, seed)
        bound = max(bound, proven_bound)
        best_starts = min([best_starts, list(solver_starts)], key=lambda entry: _makespan(problem, entry))
    scale = time_scale(graph)
    # Where CP-SAT found nothing, the simulated start can beat list schedules, because it may interleave the ops of blocks.
    simulator = Simulator(graph)
    simulated = [simulator.run(order.priority, seed + run) for run in range(_RUNS)]
    timeline = min([_as_timeline(graph, problem, best_starts), *simulated], key=lambda entry: entry.makespan_s)
    makespan = round(timeline.makespan_s * scale)
    is_closed = makespan - bound <= _CLOSED * makespan
    recvs = graph.of_kind(RECV).tolist()
    recvs.sort(key=lambda op: (timeline.start_s[op], timeline.end_s[op], natural_key(graph.names[op])))
    names = tuple(graph.names[op] for op in recvs)
    rank_by_recv = {name: rank for rank, name in enumerate(names)}
    return ExactResult(
        schedule=Schedule(name="exact", priority=rank_by_recv, order=names),
        timeline=timeline,
        makespan_s=makespan / scale,
        lower_bound_s=(makespan if is_closed else min(bound, makespan)) / scale,
        status="optimal" if is_closed else "feasible",
        solve_seconds=time.perf_counter() - started,
    )


def _as_timeline(graph: Graph, problem: ShopProblem, block_starts: Sequence[int]) -> Timeline:
    """Return the timeline of the graph's ops in which every resource keeps the order of a schedule of blocks.

    ``block_starts`` (blocks,): the starts of the blocks of ``problem``, the reduced graph, in whole units.
    """
    whole = shop.unreduced(graph)
    ops = [op for (op,) in whole.members]
    starts = np.empty(len(graph), dtype=np.int64)
    starts[ops] = shop.run_order(whole, shop.expand(problem, whole, block_starts), whole.times)
    ends = starts.copy()
    ends[ops] += np.array(whole.times)
    scale = time_scale(graph)
    return Timeline(start_s=starts / scale, end_s=ends / scale, makespan_s=int(ends.max(initial=0)) / scale)


def _block_priorities(graph: Graph, problem: ShopProblem, priority: Mapping[str, int]) -> list[list[int]]:
    """Return lists (blocks,) of priority numbers to try: recvs by their ``priority`` and before all blocks of other ops.

    ``priority``: by op name; recvs that it lacks come last among the recvs.
    """
    op_count = len(graph)
    number_of_recv: dict[int, int] = {}
    for block in problem.of_kind(RECV):
        first_member = graph.names[problem.members[block][0]]
        # Below zero, and so before all other blocks, whose numbers begin at 0.
        number_of_recv[block] = priority.get(first_member, op_count) - 2 * op_count
    return [
        [number_of_recv.get(block, number) for block, number in enumerate(numbers)]
        for numbers in shop.numberings(problem)
    ]


def _makespan(problem: ShopProblem, starts: Sequence[int]) -> int:
    """Return the last end of ops that start at ``starts`` (n,); all in whole units, 0 without ops."""
    return max((start + length for start, length in zip(starts, problem.times, strict=True)), default=0)


def _solve_with_cp_sat(
    problem: ShopProblem, hint: Sequence[int], bound: int, time_limit_s: float, workers: int, seed: int
) -> tuple[Sequence[int], int]:
    """Return (starts, bound): CP-SAT's starts of the ops, ``hint`` if it found none, and the makespan's bound that it proved.

    Each op is an interval on its resource, where intervals must not overlap, and starts after its inputs have ended. All
    times are whole units.

    Args:
        hint: (n,) starts of a schedule that the search begins with; its makespan is the horizon.
        bound: a known lower bound on the makespan.
        time_limit_s, workers, seed: see :func:`solve_exact`.
    """
    from ortools.sat.python import cp_model

    from ddltool.solver import run, solver_for

    span_of_hint = _makespan(problem, hint)
    # How many whole time units make one of the solver's: the greatest that divides all times, more for too long a horizon.
    unit = fold(math.gcd, problem.times, 0) or 1
    if span_of_hint // unit > _LARGEST_HORIZON:
        unit = -(-span_of_hint // _LARGEST_HORIZON)
    times = [length // unit for length in problem.times]
    horizon = -(-span_of_hint // unit)  # rounded up
    model = cp_model.CpModel()
    starts = [model.new_int_var(0, max(0, horizon - length), "") for length in times]
    makespan = model.new_int_var(min(bound // unit, horizon), horizon, "makespan")
    for resource in range(problem.resources):
        ops = [op for op in range(len(problem)) if problem.resource[op] == resource]
        model.add_no_overlap([model.new_fixed_size_interval_var(starts[op], times[op], "") for op in ops])
    for op, inputs in enumerate(problem.inputs):
        for source in inputs:
            model.add(starts[op] >= starts[source] + times[source])
        if not problem.consumers[op]:
            model.add(makespan >= starts[op] + times[op])
    # Only the sequence of the hint is kept, and timed in the solver's units; below, the solver's is timed in whole units.
    for op, value in enumerate(shop.run_order(problem, shop.order_of(problem, hint, problem.times), times)):
        model.add_hint(starts[op], value)
    model.minimize(makespan)
    solver = solver_for(time_limit_s, seed, threads=workers)
    status = run(solver, model)
    proven_bound = math.ceil(solver.best_objective_bound - _ROUNDED) * unit
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return hint, proven_bound
    solver_order = shop.order_of(problem, [solver.value(start) for start in starts], times)
    return shop.run_order(problem, solver_order, problem.times), proven_bound


# Loads are called balanced if their ratio is below the first; above the second, the smaller load is not mentioned.
_BALANCED, _ONE_SIDED = 1.05, 1e4
# After so many equal runs an order is taken to leave nothing to chance, and the other samples are not run.
_ENOUGH_EQUAL = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class MakespanBounds:
    """U (``upper_s``), L (``lower_s``) and S (``speedup``) of a graph; S is None when L is 0: nothing takes any time."""

    upper_s: float
    """All ops one after the other."""
    lower_s: float
    """The busiest resource alone."""
    speedup: float | None
    """What overlap could gain at best, as a share of L."""
    compute_s: float
    """Busiest compute resource."""
    transfer_s: float
    """Busiest channel."""

    def efficiency(self, makespan_s: float, best_s: float | None = None) -> float | None:
        """Return the scheduling efficiency E of a makespan (Equation 3), from 0 to 1; None if U = L: nothing can overlap.

        ``best_s``: the best that any schedule could reach, in place of L.
        """
        spread_s = self.upper_s - (self.lower_s if best_s is None else best_s)
        if spread_s <= 1e-12 * max(self.upper_s, 1e-300):  # a difference that rounding alone can make
            return None
        return min(1.0, max(0.0, (self.upper_s - makespan_s) / spread_s))


@dataclass(kw_only=True, slots=True)
class Comparison:
    """The figures of random orders, TIC, TAC, the improved order and, if it was asked for, the exact optimum of one graph."""

    bounds: MakespanBounds
    schedules: dict[str, ScheduleFigures] = field(default_factory=dict)
    """By name, in the order of the tables: random, tic, tac, improved, exact."""
    timelines: dict[str, Timeline] = field(default_factory=dict)
    """By name, the simulated run nearest the mean."""
    best_bound_s: float = 0.0
    """Lower bound on the makespan of every order of all ops, seconds; at least L."""

    @property
    def undefined_reason(self) -> str | None:
        """The reason why the scheduling efficiency is undefined, None if it is defined."""
        # U and L alone decide whether E is defined, so that it can be asked for any makespan.
        if self.bounds.efficiency(self.bounds.lower_s) is not None:
            return None
        return "U = L, one resource does all the work: there is nothing to overlap"

    @property
    def gain(self) -> float:
        """The share of the mean step under random orders that TAC saves; 0 if the efficiency is undefined."""
        if self.undefined_reason is not None or self.bounds.speedup is None:
            return 0.0
        return 1.0 - self.schedules["tac"].makespan_s / self.schedules["random"].makespan_s


def bounds(graph: Graph) -> MakespanBounds:
    """Return the bounds of a timed graph, in seconds. O(n)."""
    loads = np.bincount(graph.resource, weights=graph.duration_s, minlength=len(graph.resource_names))
    lower_s = float(loads.max())
    upper_s = max(float(loads.sum()), lower_s)  # one resource: the two sums differ in rounding only
    is_compute = np.zeros(len(loads), dtype=bool)
    is_compute[graph.resource[graph.kind == COMPUTE]] = True
    return MakespanBounds(
        upper_s=upper_s,
        lower_s=lower_s,
        speedup=(upper_s - lower_s) / lower_s if lower_s > 0 else None,
        compute_s=float(loads[is_compute].max(initial=0.0)),
        transfer_s=float(loads[~is_compute].max(initial=0.0)),
    )


def simulated(
    graph: Graph,
    orders: Mapping[str, Schedule | None],
    limits: MakespanBounds,
    *,
    samples: int,
    seed: int = 0,
    tell: Callable[[], None] = lambda: None,
) -> tuple[dict[str, ScheduleFigures], dict[str, Timeline]]:
    """Return (figures, timelines) by name: the figures of each order's simulated runs, and the run nearest their mean.

    Args:
        orders: the orders by name; None: all picks are random.
        limits: the graph's bounds, for the efficiency.
        samples: how many runs of each order, with seeds from ``seed`` on; fewer if the first ``_ENOUGH_EQUAL`` are equal.
        tell: a function that is called after each run.
    """
    simulator = Simulator(graph)
    figures, timelines = {}, {}
    for name, schedule in orders.items():
        priority = schedule.priority if schedule is not None else None
        makespans: list[float] = []
        for sample in range(samples):
            makespans.append(simulator.run(priority, seed + sample).makespan_s)
            tell()
            if len(makespans) == _ENOUGH_EQUAL and len(set(makespans)) == 1 and schedule is not None:
                break
        values = np.array(makespans)
        mean = float(values.mean())
        figures[name] = ScheduleFigures(
            makespan_s=mean,
            makespan_std_s=float(values.std()),
            makespan_min_s=float(values.min()),
            makespan_max_s=float(values.max()),
            samples=len(makespans),
            efficiency=limits.efficiency(mean),
            order=list(schedule.order) if schedule is not None else None,
            priority=dict(schedule.priority) if schedule is not None else None,
        )
        timelines[name] = simulator.run(priority, seed + int(np.abs(values - mean).argmin()))
    return figures, timelines


def compare(
    graph: Graph,
    *,
    samples: int = 100,
    seed: int = 0,
    exact_s: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Compare random orders, TIC, TAC and the improved order in ``samples`` simulated runs of each, with seeds from ``seed``.

    ``exact_s``: seconds to look for the exact optimum, None: it is left out. ``progress`` is called with (runs done, runs in
    all). Raises InputError for ops without a duration.
    """
    comparison, runs_done = Comparison(bounds=bounds(graph)), 0

    def tell() -> None:
        """Count a run and report it."""
        nonlocal runs_done
        runs_done += 1
        if progress is not None:
            progress(runs_done, 4 * samples)  # four orders

    def simulate(orders: Mapping[str, Schedule | None]) -> None:
        """Add the figures and timelines of these orders to the comparison."""
        figures, timelines = simulated(graph, orders, comparison.bounds, samples=samples, seed=seed, tell=tell)
        comparison.schedules.update(figures)
        comparison.timelines.update(timelines)

    # TAC, and an order that may be better.
    tac_order = tac(graph)
    simulate({"random": None, "tic": tic(graph), "tac": tac_order})
    problem = shop.reduce(graph)
    best_order = improve(graph, seed=seed, start=tac_order, problem=problem)
    tac_figures = improved_figures = comparison.schedules["tac"]
    if best_order.priority != tac_order.priority:
        simulate({"improved": best_order})
        improved_figures = comparison.schedules["improved"]
    if improved_figures.makespan_s > tac_figures.makespan_s:  # it can be, because the order was chosen by fewer seeds
        best_order, improved_figures = tac_order, tac_figures
    orders_compute = len(best_order.priority) > len(best_order.order)
    comparison.schedules["improved"] = improved_figures.model_copy(update={"orders_compute": orders_compute})
    # The best that any schedule could reach, and the best that one is known to reach.
    bound_s = shop.lower_bound(problem) / time_scale(graph)
    known_makespans_s = [figures.makespan_min_s or 0.0 for figures in comparison.schedules.values()]
    if exact_s is not None:
        exact = solve_exact(graph, time_limit_s=exact_s, seed=seed, start=best_order, problem=problem)
        bound_s = exact.lower_bound_s
        known_makespans_s.append(exact.makespan_s)
    # Against these, where each order's lost time lies.
    comparison.best_bound_s = max(comparison.bounds.lower_s, bound_s)
    for name, figures in comparison.schedules.items():
        of_best = comparison.bounds.efficiency(figures.makespan_s, comparison.best_bound_s)
        lost = _attribute_loss(comparison, figures.makespan_s, min(known_makespans_s))
        comparison.schedules[name] = figures.model_copy(update={"efficiency_of_best": of_best, "attribution": lost})
    if exact_s is not None:
        comparison.schedules["exact"] = ScheduleFigures(
            makespan_s=exact.makespan_s,
            efficiency=comparison.bounds.efficiency(exact.makespan_s),
            efficiency_of_best=comparison.bounds.efficiency(exact.makespan_s, comparison.best_bound_s),
            lower_bound_s=exact.lower_bound_s,
            status=exact.status,
            gap=0.0 if exact.makespan_s <= 0 else max(0.0, 1.0 - exact.lower_bound_s / exact.makespan_s),
            solve_seconds=exact.solve_seconds,
            order=list(exact.schedule.order),
            priority=dict(exact.schedule.priority),
        )
    return comparison


def _attribute_loss(comparison: Comparison, makespan_s: float, known_s: float) -> LostEfficiency | None:
    """Return 1 - E of a makespan in three parts; None if E is undefined.

    ``winnable`` lies between the makespan and the best known one, ``known_s``; ``open`` between that and the lower bound,
    where better orders may or may not exist; ``graph`` between the lower bound and L, which no order can reach.
    """
    if comparison.undefined_reason is not None:
        return None
    spread_s = comparison.bounds.upper_s - comparison.bounds.lower_s
    best_known_s = min(known_s, makespan_s)
    bound_s = min(comparison.best_bound_s, best_known_s)
    return LostEfficiency(
        winnable=(makespan_s - best_known_s) / spread_s,
        open=(best_known_s - bound_s) / spread_s,
        graph=max(0.0, bound_s - comparison.bounds.lower_s) / spread_s,
    )


def verdict(comparison: Comparison) -> TraceVerdict:
    """Return a text on what an order could gain at best, what TAC gains over random orders, and whether to enforce it."""
    limits, random, best = comparison.bounds, comparison.schedules["random"], comparison.schedules["tac"]
    if comparison.undefined_reason is not None or limits.speedup is None:
        reason = comparison.undefined_reason or "nothing takes any time"
        return TraceVerdict(worth_it=False, text=f"No order can gain anything: {reason}.")
    gain = comparison.gain
    ceiling = 1.0 - limits.lower_s / limits.upper_s
    share_text = f"{ceiling:.0%} of a step without any overlap (S = {limits.speedup:.2f})"
    potential_text = f"At best an order saves {share_text}; {_balance_text(limits)}."
    makespans_text = f"{show_seconds(random.makespan_s)} to {show_seconds(best.makespan_s)}"
    gain_text = f"From random orders to TAC the step goes from {makespans_text} ({gain:+.1%} saved)."
    if gain >= CLEAR_GAIN:
        advice = "Worth doing: enforce the order."
    elif gain >= SMALL_GAIN:
        advice = "A small gain: enforce the order where it costs nothing."
    else:
        advice = "Not worth doing here: leave the order to chance."
    return TraceVerdict(worth_it=gain >= SMALL_GAIN, text=f"{potential_text} {gain_text} {advice}")


def _balance_text(limits: MakespanBounds) -> str:
    """Return a text that compares the times of computation and communication, each on its busiest resource."""
    if limits.transfer_s > limits.compute_s:
        heavier, lighter = "communication", "computation"
    else:
        heavier, lighter = "computation", "communication"
    # If the lighter one takes no time, the ratio becomes huge, beyond _ONE_SIDED, in place of a division by 0.
    ratio = max(limits.transfer_s, limits.compute_s) / max(min(limits.transfer_s, limits.compute_s), 1e-300)
    if ratio < _BALANCED:
        return "communication and computation are balanced"
    if ratio > _ONE_SIDED:
        return f"{heavier} is all there is"
    return f"{heavier} takes {ratio:.1f} times as long as {lighter}"
