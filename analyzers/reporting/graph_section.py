"""The report's section of a graph: one step's timeline in a random order and in TAC's, and what each order gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ddltool.analyzers.communication.efficiency import Bounds, bounds, efficiency
from ddltool.analyzers.communication.order import tac, tic
from ddltool.analyzers.communication.timeline import Simulator, Timeline
from ddltool.analyzers.reporting.page import Picture, Section, Table, counted, shortened
from ddltool.analyzers.reporting.pictures import Lane, Panel, lanes_of, timeline_svg
from ddltool.analyzers.reporting.style import at_both_widths
from ddltool.graph import KINDS, RECV, Graph
from ddltool.units import show_bytes, show_seconds

RUNS, RUNS_OF_A_LARGE_GRAPH = 20, 3
_LARGE = 20_000
_LANES_DRAWN = 12
_LABELLED = 60
_ROWS_AT_FIRST = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ordered:
    """Simulated steps under one order: mean, shortest, longest, and the first run's timeline."""

    mean_s: float
    min_s: float
    max_s: float
    timeline: Timeline
    priority: Mapping[str, int] | None


def graph_section(graph: Graph, name: str, anchor: str, *, remark: str = "") -> Section:
    """Return the section of a timed graph; ``remark`` says where its times come from.

    Every order is simulated on 20 seeds (3 from 20,000 ops on). Raises InputError for ops without a duration.
    """
    runs = RUNS if len(graph) < _LARGE else RUNS_OF_A_LARGE_GRAPH
    simulator = Simulator(graph)
    by_tac = tac(graph)
    orders = {
        "random": _ordered(simulator, None, runs),
        "TIC": _ordered(simulator, tic(graph).priority, runs),
        "TAC": _ordered(simulator, by_tac.priority, runs),
    }
    limits = bounds(graph)
    batch = f" at batch {graph.batch_size:,}" if graph.batch_size else ""
    facts = (
        f"{graph.mode.capitalize()} step of {shortened(graph.name, 60)}{batch}: {counted(len(graph), 'op')}, "
        f"{counted(len(graph.of_kind(RECV)), 'parameter')} of {show_bytes(graph.parameter_bytes)}. {remark}"
    )
    lead = [facts.strip(), _verdict(limits, orders)]
    blocks: list[Picture | Table] = [_table_of_orders(limits, orders, runs)]
    if limits.upper_s > 0:  # else there is nothing to draw
        blocks.insert(0, _timeline(graph, orders))
    return Section(anchor=anchor, title=f"Graph: {name}", lead=lead, blocks=blocks)


def _ordered(simulator: Simulator, priority: Mapping[str, int] | None, runs: int) -> _Ordered:
    first = simulator.run(priority, 0)
    spans = [first.makespan_s, *(simulator.run(priority, seed).makespan_s for seed in range(1, runs))]
    return _Ordered(mean_s=float(np.mean(spans)), min_s=min(spans), max_s=max(spans), timeline=first, priority=priority)


def _verdict(limits: Bounds, orders: Mapping[str, _Ordered]) -> str:
    chance, ordered = orders["random"].mean_s, orders["TAC"].mean_s
    if limits.speedup is None or chance <= 0:
        return "Nothing in this graph takes any time."
    saved = 1.0 - ordered / chance
    word = "saved" if saved >= 0 else "lost"
    return (
        f"From random orders to TAC the step goes from {show_seconds(chance)} to {show_seconds(ordered)} "
        f"({abs(saved):.1%} {word}). The busiest resource alone takes L = {show_seconds(limits.lower_s)}, all ops one "
        f"after the other U = {show_seconds(limits.upper_s)}; E = (U - step) / (U - L)."
    )


def _timeline(graph: Graph, orders: Mapping[str, _Ordered]) -> Picture:
    """Return the timelines of the random order and TAC's; under them the parameters in TAC's order."""
    panels = []
    for name in ("random", "TAC"):
        made = orders[name]
        kinds = [KINDS[kind] for kind in graph.kind]
        lanes = lanes_of(graph.resource_names, graph.resource, (made.timeline.start_s, made.timeline.end_s), kinds)
        if made.priority is not None:
            lanes = [
                _labelled(graph, lane, number, made) for lane, number in zip(lanes, _lane_order(graph), strict=True)
            ]
        panels.append(
            Panel(title=f"{name} order", lanes=lanes[:_LANES_DRAWN], makespan_s=max(made.timeline.makespan_s, 1e-12))
        )
    resources = len(graph.resource_names)
    caption = "One step: what each resource does when; numbers on transfers are TAC's priorities, 0 first."
    if len(graph.of_kind(RECV)) > _LABELLED:
        caption = "One step: what each resource does when. Bars too close to be told apart are drawn as one."
    if resources > _LANES_DRAWN:
        caption += f" {_LANES_DRAWN} of {resources} resources are drawn."
    return Picture(
        svg=at_both_widths(timeline_svg)(panels),
        caption=caption,
        label="simulated",
        table=_transfers(graph, orders["TAC"]) if len(graph.of_kind(RECV)) else None,
        unfolded=True,
    )


def _lane_order(graph: Graph) -> list[int]:
    """Return the resources' numbers in the order of :func:`lanes_of`."""
    named = enumerate(graph.resource_names)
    return [number for number, _ in sorted(named, key=lambda item: (not item[1].startswith("compute"), item[0]))]


def _labelled(graph: Graph, lane: Lane, resource: int, made: _Ordered) -> Lane:
    """Return a lane with priorities on its recv bars, where these are few."""
    priority = made.priority or {}
    ops = np.flatnonzero(graph.resource == resource)
    if len(graph.of_kind(RECV)) > _LABELLED:
        return lane
    labels = [str(priority.get(graph.names[op], "")) for op in ops]
    return Lane(name=lane.name, start_s=lane.start_s, end_s=lane.end_s, kinds=lane.kinds, labels=labels)


def _transfers(graph: Graph, made: _Ordered) -> Table:
    priority = made.priority or {}
    received = sorted(graph.of_kind(RECV).tolist(), key=lambda op: (priority.get(graph.names[op], 2**31), op))
    rows = [
        (
            shortened(graph.parameter[op] or graph.names[op], 60),
            str(priority.get(graph.names[op], "-")),
            show_bytes(float(graph.size_bytes[op])),
            graph.resource_names[graph.resource[op]],
            show_seconds(float(made.timeline.start_s[op])),
            show_seconds(float(made.timeline.end_s[op])),
        )
        for op in received
    ]
    return Table(
        caption="Parameters in TAC's order",
        header=("parameter", "priority", "size", "channel", "begins", "ends"),
        rows=rows,
        label="simulated",
        head=_ROWS_AT_FIRST,
    )


def _table_of_orders(limits: Bounds, orders: Mapping[str, _Ordered], runs: int) -> Table:
    rows = []
    for name, made in orders.items():
        reached = efficiency(limits, made.mean_s)
        times = (show_seconds(value) for value in (made.mean_s, made.min_s, made.max_s))
        rows.append((name, *times, "-" if reached is None else f"{reached:.3f}"))
    rows.append(("lower bound L", show_seconds(limits.lower_s), "", "", "1"))
    rows.append(("upper bound U", show_seconds(limits.upper_s), "", "", "0"))
    return Table(
        caption=f"Step time and efficiency by order of transfers, {runs} simulated runs each",
        header=("order", "mean", "min", "max", "efficiency E"),
        rows=rows,
        label="simulated",
    )
