"""How good an order is: bounds, scheduling efficiency, the comparison with random orders, and a verdict.

``U`` = all ops one after the other, ``L`` = the busiest resource alone, ``E = (U - makespan) / (U - L)``,
``S = (U - L) / L`` (TicTac, Equations 1 to 4). L ignores that ops wait for each other, so a low E can be the graph's fault:
``attribution`` tells the part of 1 - E that some order could win from the part that none can. Start at :func:`compare`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ddltool.analyzers.communication.best import improve, solve_exact
from ddltool.analyzers.communication.dependencies import time_scale
from ddltool.analyzers.communication.order import Schedule, tac, tic
from ddltool.analyzers.communication.program import CLEAR_GAIN, SMALL_GAIN
from ddltool.analyzers.communication.shop import lower_bound, reduce
from ddltool.analyzers.communication.timeline import Simulator, Timeline
from ddltool.graph import COMPUTE, Graph
from ddltool.graph_results import LostEfficiency, ScheduleFigures, TraceVerdict
from ddltool.units import show_seconds

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

    def share(self, makespan_s: float, best_s: float | None = None) -> float | None:
        """Return E of a makespan in seconds (Equation 3), None when U = L: there is nothing to overlap.

        ``best_s`` in place of L: E against the best that any schedule could reach.
        """
        spread = self.upper_s - (self.lower_s if best_s is None else best_s)
        if spread <= 1e-12 * max(self.upper_s, 1e-300):
            return None
        return min(1.0, max(0.0, (self.upper_s - makespan_s) / spread))


@dataclass(kw_only=True, slots=True)
class Comparison:
    """Random orders, TIC, TAC, the improved order and, where asked for, the exact optimum of one graph."""

    bounds: Bounds
    schedules: dict[str, ScheduleFigures] = field(default_factory=dict)
    """By name, in the order of the tables: random, tic, tac, improved, exact."""
    timelines: dict[str, Timeline] = field(default_factory=dict)
    """The simulated run of each that is nearest the mean."""
    best_bound_s: float = 0.0
    """No order of anything is faster, seconds; at least L."""

    @property
    def undefined_reason(self) -> str | None:
        """Why E is undefined."""
        if self.bounds.share(self.bounds.lower_s) is not None:
            return None
        return "U = L, one resource does all the work: there is nothing to overlap"

    @property
    def gain(self) -> float:
        """Share of the mean step under random orders that TAC saves."""
        if self.undefined_reason is not None or self.bounds.speedup is None:
            return 0.0
        return 1.0 - self.schedules["tac"].makespan_s / self.schedules["random"].makespan_s


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


def simulated(
    graph: Graph,
    orders: Mapping[str, Schedule | None],
    limits: Bounds,
    *,
    samples: int,
    seed: int = 0,
    tell: Callable[[], None] = lambda: None,
) -> tuple[dict[str, ScheduleFigures], dict[str, Timeline]]:
    """Return figures of each order's runs, None for no order, and the run nearest their mean; ``tell`` is called after each."""
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
            efficiency=limits.share(mean),
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
    """Simulate random orders, TIC, TAC and the improved one, ``samples`` runs each with seeds from ``seed``.

    ``exact_s``: seconds for the exact optimum, None without it. ``progress`` is called with (runs done, runs in all). Raises
    InputError for ops without a duration.
    """
    found, done = Comparison(bounds=bounds(graph)), 0

    def tell() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, 4 * samples)

    def simulate(orders: Mapping[str, Schedule | None]) -> None:
        figures, timelines = simulated(graph, orders, found.bounds, samples=samples, seed=seed, tell=tell)
        found.schedules.update(figures)
        found.timelines.update(timelines)

    first = tac(graph)
    simulate({"random": None, "tic": tic(graph), "tac": first})
    problem = reduce(graph)
    better = improve(graph, seed=seed, start=first, problem=problem)
    by_tac = improved = found.schedules["tac"]
    if better.priority != first.priority:
        simulate({"improved": better})
        improved = found.schedules["improved"]
    if improved.makespan_s > by_tac.makespan_s:  # worse on these seeds, if not on those that it was chosen on
        better, improved = first, by_tac
    orders_compute = len(better.priority) > len(better.order)
    found.schedules["improved"] = improved.model_copy(update={"orders_compute": orders_compute})
    bound = lower_bound(problem) / time_scale(graph)
    known = [figures.makespan_min_s or 0.0 for figures in found.schedules.values()]
    if exact_s is not None:
        exact = solve_exact(graph, time_limit_s=exact_s, seed=seed, start=better, problem=problem)
        bound = exact.lower_bound_s
        known.append(exact.makespan_s)
    found.best_bound_s = max(found.bounds.lower_s, bound)
    for name, figures in found.schedules.items():
        found.schedules[name] = figures.model_copy(
            update={
                "efficiency_of_best": found.bounds.share(figures.makespan_s, found.best_bound_s),
                "attribution": _attribution(found, figures.makespan_s, min(known)),
            }
        )
    if exact_s is not None:
        found.schedules["exact"] = ScheduleFigures(
            makespan_s=exact.makespan_s,
            efficiency=found.bounds.share(exact.makespan_s),
            efficiency_of_best=found.bounds.share(exact.makespan_s, found.best_bound_s),
            lower_bound_s=exact.lower_bound_s,
            status=exact.status,
            gap=0.0 if exact.makespan_s <= 0 else max(0.0, 1.0 - exact.lower_bound_s / exact.makespan_s),
            solve_seconds=exact.solve_seconds,
            order=list(exact.schedule.order),
            priority=dict(exact.schedule.priority),
        )
    return found


def _attribution(found: Comparison, makespan_s: float, known_s: float) -> LostEfficiency | None:
    """Return where 1 - E of a makespan (seconds) goes: what an order is known to win, what nobody knows, the graph's own.

    ``known_s``: the shortest step that any order here gives.
    """
    if found.undefined_reason is not None:
        return None
    spread = found.bounds.upper_s - found.bounds.lower_s
    known = min(known_s, makespan_s)
    bound = min(found.best_bound_s, known)
    return LostEfficiency(
        winnable=(makespan_s - known) / spread,
        open=(known - bound) / spread,
        graph=max(0.0, bound - found.bounds.lower_s) / spread,
    )


def verdict(comparison: Comparison) -> TraceVerdict:
    """Return in words what any order could gain at best, what TAC gains over a random one, and whether to do it."""
    limits, random, best = comparison.bounds, comparison.schedules["random"], comparison.schedules["tac"]
    if comparison.undefined_reason is not None or limits.speedup is None:
        reason = comparison.undefined_reason or "nothing takes any time"
        return TraceVerdict(worth_it=False, text=f"No order can gain anything: {reason}.")
    gain = comparison.gain
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
    return TraceVerdict(worth_it=gain >= SMALL_GAIN, text=f"{first} {second} {third}")
