"""How good an order is: bounds, scheduling efficiency, the comparison with random orders, and a verdict.

``U`` = all ops one after the other, ``L`` = the busiest resource alone, ``E = (U - makespan) / (U - L)``,
``S = (U - L) / L`` (TicTac, Equations 1 to 4). L ignores that ops wait for each other, so a low E can be the graph's fault:
:func:`attribute` tells the part of 1 - E that some order could win from the part that none can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ddltool.analyzers.communication.exact import ExactResult, solve_exact
from ddltool.analyzers.communication.improve import improve
from ddltool.analyzers.communication.order import Schedule, tac, tic
from ddltool.analyzers.communication.properties import time_scale
from ddltool.analyzers.communication.shop import lower_bound, reduce
from ddltool.analyzers.communication.timeline import Simulator, Timeline
from ddltool.graph import COMPUTE, Graph
from ddltool.units import show_seconds

# Below the first a change is lost in the noise of real steps; from the second on it pays for the work of enforcing it.
SMALL_GAIN, CLEAR_GAIN = 0.01, 0.05
# Loads this close are as good as equal.
_BALANCED = 1.05
# An order whose first runs are all equal leaves nothing to chance; the remaining samples would repeat them.
_ENOUGH_EQUAL = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """U, L and S of a graph. ``speedup`` is None when L is 0: nothing takes any time."""

    upper_s: float
    lower_s: float
    speedup: float | None
    compute_s: float
    """Busiest compute resource."""
    transfer_s: float
    """Busiest channel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderResult:
    """Simulated steps under one order; ``efficiency`` is that of the mean makespan, None when E is undefined."""

    schedule: Schedule | None
    """None: no order is enforced."""
    makespan_s: float
    makespan_std_s: float
    makespan_min_s: float
    makespan_max_s: float
    samples: int
    efficiency: float | None
    timeline: Timeline
    """The run nearest the mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Attribution:
    """Where 1 - E of one order goes, in units of E; the three add up to it. None where E is undefined."""

    winnable: float
    """Lost to the order: a schedule that is known is that much better."""
    open: float
    """Between the best schedule known and the tightest bound: nobody knows; 0 when the optimum is proven."""
    graph: float
    """Below the bound: ops wait for each other there under every order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Random orders, TIC, TAC, the improved order and, where asked for, the exact optimum of one graph."""

    bounds: Bounds
    tic: OrderResult
    tac: OrderResult
    random: OrderResult
    improved: OrderResult
    orders_compute: bool
    """Whether the improved order also numbers compute ops and sends."""
    exact: ExactResult | None
    best_bound_s: float
    """No order of anything is faster, seconds; at least L."""
    undefined_reason: str | None

    def results(self) -> Mapping[str, OrderResult]:
        """Return the simulated results by name, in the order of the tables."""
        return {"random": self.random, "tic": self.tic, "tac": self.tac, "improved": self.improved}

    @property
    def best_known_s(self) -> float:
        """Return the shortest step that any order here gives, seconds."""
        known = [result.makespan_min_s for result in self.results().values()]
        return min(known if self.exact is None else [*known, self.exact.makespan_s])


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether ordering transfers is worth doing here, in words."""

    worth_it: bool
    gain: float
    """Share of the mean step under random orders that TAC saves."""
    text: str


def bounds(graph: Graph) -> Bounds:
    """Return the bounds of a timed graph, in seconds. O(n)."""
    loads = np.bincount(graph.resource, weights=graph.duration_s, minlength=len(graph.resource_names))
    lower = float(loads.max())
    upper = max(float(loads.sum()), lower)  # one resource: the two sums differ in rounding only
    is_compute = np.zeros(len(loads), dtype=bool)
    is_compute[graph.resource[graph.kind == COMPUTE]] = True
    return Bounds(
        upper_s=upper,
        lower_s=lower,
        speedup=(upper - lower) / lower if lower > 0 else None,
        compute_s=float(loads[is_compute].max(initial=0.0)),
        transfer_s=float(loads[~is_compute].max(initial=0.0)),
    )


def efficiency(limits: Bounds, makespan_s: float) -> float | None:
    """Return E of a makespan in seconds (Equation 3), None when U = L: there is nothing to overlap."""
    spread = limits.upper_s - limits.lower_s
    if spread <= 1e-12 * max(limits.upper_s, 1e-300):
        return None
    return min(1.0, max(0.0, (limits.upper_s - makespan_s) / spread))


def attribute(comparison: Comparison, makespan_s: float) -> Attribution | None:
    """Return how much of 1 - E of a makespan (seconds) an order could win, and how much is the graph's own."""
    limits = comparison.bounds
    if comparison.undefined_reason is not None:
        return None
    spread = limits.upper_s - limits.lower_s
    known = min(comparison.best_known_s, makespan_s)
    bound = min(comparison.best_bound_s, known)
    return Attribution(
        winnable=(makespan_s - known) / spread,
        open=(known - bound) / spread,
        graph=max(0.0, bound - limits.lower_s) / spread,
    )


def efficiency_of_best(comparison: Comparison, makespan_s: float) -> float | None:
    """Return (U - m) / (U - bound): E against the best that any schedule could reach, None where that is U."""
    spread = comparison.bounds.upper_s - comparison.best_bound_s
    if spread <= 1e-12 * max(comparison.bounds.upper_s, 1e-300):
        return None
    return min(1.0, max(0.0, (comparison.bounds.upper_s - makespan_s) / spread))


def compare(
    graph: Graph,
    *,
    samples: int = 100,
    seed: int = 0,
    improve_s: float = 2.0,
    exact_s: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Simulate random orders, TIC, TAC and the improved one, ``samples`` runs each with seeds from ``seed``.

    ``improve_s``: seconds that the search for a better order than TAC's may take; ``exact_s``: seconds for the exact
    optimum, None without it. ``progress`` is called with (runs done, runs in all). Raises InputError for ops without a
    duration.
    """
    limits = bounds(graph)
    simulator = Simulator(graph)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, 4 * samples)

    def run(schedule: Schedule | None) -> OrderResult:
        return _run(simulator, schedule, limits, samples, seed, step)

    reason = None
    if efficiency(limits, limits.lower_s) is None:
        reason = "U = L, one resource does all the work: there is nothing to overlap"
    first = tac(graph)
    by_chance, by_tic, by_tac = run(None), run(tic(graph)), run(first)
    problem = reduce(graph)
    found = improve(graph, budget_s=improve_s, seed=seed, start=first, problem=problem)
    same = found.schedule.priority == first.priority
    better = replace(by_tac, schedule=found.schedule) if same else run(found.schedule)
    ordered = found.orders_compute
    if better.makespan_s > by_tac.makespan_s:  # worse on these seeds, if not on those that it was chosen on
        better, ordered = replace(by_tac, schedule=replace(first, name="improved")), False
    exact = None
    if exact_s is not None:
        exact = solve_exact(graph, time_limit_s=exact_s, seed=seed, start=better.schedule, problem=problem)
    bound = lower_bound(problem) / time_scale(graph) if exact is None else exact.lower_bound_s
    return Comparison(
        bounds=limits,
        random=by_chance,
        tic=by_tic,
        tac=by_tac,
        improved=better,
        orders_compute=ordered,
        exact=exact,
        best_bound_s=max(limits.lower_s, bound),
        undefined_reason=reason,
    )


def _run(
    simulator: Simulator, schedule: Schedule | None, limits: Bounds, samples: int, seed: int, step: Callable[[], None]
) -> OrderResult:
    priority = schedule.priority if schedule is not None else None
    makespans: list[float] = []
    for sample in range(samples):
        makespans.append(simulator.run(priority, seed + sample).makespan_s)
        step()
        if len(makespans) == _ENOUGH_EQUAL and len(set(makespans)) == 1 and schedule is not None:
            break
    values = np.array(makespans)
    mean = float(values.mean())
    nearest = int(np.abs(values - mean).argmin())
    return OrderResult(
        schedule=schedule,
        makespan_s=mean,
        makespan_std_s=float(values.std()),
        makespan_min_s=float(values.min()),
        makespan_max_s=float(values.max()),
        samples=len(makespans),
        efficiency=efficiency(limits, mean),
        timeline=simulator.run(priority, seed + nearest),
    )


def verdict(comparison: Comparison) -> Verdict:
    """Return in words what any order could gain at best, what TAC gains over a random one, and whether to do it."""
    limits, random, best = comparison.bounds, comparison.random, comparison.tac
    if comparison.undefined_reason is not None or limits.speedup is None:
        reason = comparison.undefined_reason or "nothing takes any time"
        return Verdict(worth_it=False, gain=0.0, text=f"No order can gain anything: {reason}.")
    gain = 1.0 - best.makespan_s / random.makespan_s
    ceiling = 1.0 - limits.lower_s / limits.upper_s
    heavier = "communication" if limits.transfer_s > limits.compute_s else "computation"
    ratio = max(limits.transfer_s, limits.compute_s) / max(min(limits.transfer_s, limits.compute_s), 1e-300)
    balance = f"{heavier} takes {ratio:.1f} times as long as the other side"
    if ratio < _BALANCED or ratio > 1e4:
        balance = "communication and computation are balanced" if ratio < _BALANCED else f"{heavier} is all there is"
    first = f"At best an order saves {ceiling:.0%} of a step without any overlap (S = {limits.speedup:.2f}); {balance}."
    times = f"{show_seconds(random.makespan_s)} to {show_seconds(best.makespan_s)}"
    second = f"From random orders to TAC the step goes from {times} ({gain:+.1%} saved)."
    if gain >= CLEAR_GAIN:
        third = "Worth doing: enforce the order."
    elif gain >= SMALL_GAIN:
        third = "A small gain: enforce the order where it costs nothing."
    else:
        third = "Not worth doing here: leave the order to chance."
    return Verdict(worth_it=gain >= SMALL_GAIN, gain=gain, text=f"{first} {second} {third}")
