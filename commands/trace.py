"""``ddltool trace SOURCE``: read a model, order its transfers, and say what a good order is worth."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from ddltool.commands.options import Json, Output, Seed, Source

if TYPE_CHECKING:
    from ddltool.analyzers.communication.efficiency import Comparison
    from ddltool.graph import Graph, Mode


def trace(
    source: Source,
    mode: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="training (default for torch) or inference (default for ONNX).", show_default=False),
    ] = None,
    batch_size: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Samples per step; the source's own by default.", min=1, show_default=False),
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="Device type to estimate compute times for.")] = "V100",
    bandwidth: Annotated[str, typer.Option(help="Network bandwidth per channel.")] = "10Gbit",
    latency: Annotated[str, typer.Option(help="Network latency per transfer.")] = "50us",
    parameter_servers: Annotated[
        int, typer.Option(help="Channels to spread the parameters over.", min=1, max=10_000)
    ] = 1,
    oracle: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="roofline; a timed graph.json keeps its own durations unless this is given.", show_default=False
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Random orders to compare with.", min=1)] = 100,
    perfetto: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="Write TAC's timeline as a Chrome/Perfetto trace.", show_default=False),
    ] = None,
    output: Output = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Trace one step, order its transfers (TIC, TAC), and compare the timelines with random orders."""
    from ddltool.analyzers.communication.efficiency import verdict
    from ddltool.analyzers.communication.perfetto import to_chrome_trace
    from ddltool.artifacts import check_writable, to_json, write_text
    from ddltool.commands.output import print_json
    from ddltool.graph_io import write_graph

    for place in (output, perfetto):
        if place is not None:
            check_writable(place)
    graph = timed_graph(
        source,
        mode=_mode(mode),
        batch_size=batch_size,
        device=device,
        bandwidth=bandwidth,
        latency=latency,
        parameter_servers=parameter_servers,
        oracle=oracle,
    )
    comparison = compare_with_progress(graph, samples=samples, seed=seed)
    if output is not None:
        write_graph(graph, output)
    if perfetto is not None:
        timeline, schedule = comparison.tac.timeline, comparison.tac.schedule
        write_text(
            perfetto, to_json(to_chrome_trace(graph, timeline, schedule.priority if schedule else None), indent=None)
        )
    if as_json:
        print_json(as_document(graph, comparison))
    else:
        show_trace(graph, comparison, [place for place in (output, perfetto) if place is not None])
        from ddltool.commands.output import out

        out().print(f"\nVerdict: {verdict(comparison).text}")


def _mode(mode: str | None) -> Mode | None:
    from ddltool.errors import InputError

    modes: dict[str | None, Mode | None] = {None: None, "training": "training", "inference": "inference"}
    if mode not in modes:
        raise InputError("--mode", f"unknown mode {mode!r}", "training or inference")
    return modes[mode]


def timed_graph(
    source: str,
    *,
    mode: Mode | None = None,
    batch_size: int | None = None,
    device: str = "V100",
    bandwidth: str = "10Gbit",
    latency: str = "50us",
    parameter_servers: int = 1,
    oracle: str | None = None,
) -> Graph:
    """Return the graph of SOURCE with a duration for every op: its own where a file has them, else the roofline's."""
    from ddltool.analyzers.oracle.roofline import estimate_roofline
    from ddltool.commands.output import note, progress
    from ddltool.commands.sources import is_graph_file, load_graph
    from ddltool.device import Network
    from ddltool.errors import InputError
    from ddltool.fixtures.loading import devices
    from ddltool.units import parse_bandwidth, parse_duration

    if oracle not in (None, "roofline"):
        raise InputError("--oracle", f"unknown oracle {oracle!r}", "known: roofline")
    network = Network(
        bandwidth_bytes_per_s=parse_bandwidth(bandwidth),
        latency_s=parse_duration(latency),
        parameter_servers=parameter_servers,
    )
    hardware = devices().device(device)
    with progress(f"tracing {source}"):
        graph = load_graph(source, mode, batch_size)
    if graph.meta.get("note"):
        note(f"note: {graph.meta['note']}")
    if is_graph_file(source) and graph.timed and oracle is None:
        return graph
    return estimate_roofline(graph, hardware, network)


def compare_with_progress(graph: Graph, *, samples: int, seed: int) -> Comparison:
    """Return the comparison of orders, with a progress bar on a terminal."""
    from ddltool.analyzers.communication.efficiency import compare
    from ddltool.commands.output import progress

    with progress("simulating", samples) as advance:
        return compare(graph, samples=samples, seed=seed, progress=lambda done, total: advance(done, f"of {total}"))


def as_document(graph: Graph, comparison: Comparison) -> dict[str, Any]:
    """Return the JSON document of a trace: graph, bounds, schedules, coverage and verdict."""
    from dataclasses import asdict

    from ddltool.analyzers.communication.efficiency import verdict
    from ddltool.analyzers.oracle.roofline import coverage

    judged = verdict(comparison)
    bounds = comparison.bounds
    schedules = {}
    for name, result in comparison.results().items():
        schedules[name] = {
            "makespan_s": result.makespan_s,
            "makespan_std_s": result.makespan_std_s,
            "makespan_min_s": result.makespan_min_s,
            "makespan_max_s": result.makespan_max_s,
            "samples": result.samples,
            "efficiency": result.efficiency,
            "order": list(result.schedule.order) if result.schedule is not None else None,
            "priority": dict(result.schedule.priority) if result.schedule is not None else None,
        }
    return {
        "kind": "ddltool.trace",
        "schema_version": 1,
        "graph": graph_document(graph),
        "bounds": {"upper_s": bounds.upper_s, "lower_s": bounds.lower_s, "speedup": bounds.speedup},
        "schedules": schedules,
        "efficiency_undefined": comparison.undefined_reason,
        "coverage": asdict(coverage(graph)),
        "verdict": {"worth_it": judged.worth_it, "text": judged.text},
        "predicted": True,
    }


def graph_document(graph: Graph) -> dict[str, Any]:
    """Return a graph's figures."""
    from ddltool.graph import RECV, SEND

    return {
        "name": graph.name,
        "mode": graph.mode,
        "batch_size": graph.batch_size,
        "parameters": len(graph.of_kind(RECV)),
        "parameter_bytes": int(graph.parameter_bytes),
        "parameter_elements": graph.meta.get("parameter_elements"),
        "ops": len(graph),
        "recvs": len(graph.of_kind(RECV)),
        "sends": len(graph.of_kind(SEND)),
        "flops": float(graph.flops.sum()),
        **{key: graph.meta.get(key) for key in ("device", "oracle", "bandwidth_bytes_per_s", "latency_s")},
        "channels": sum(name.startswith("channel:") for name in graph.resource_names),
    }


def show_trace(graph: Graph, comparison: Comparison, written: list[Path]) -> None:
    """Print a trace as tables for people."""
    from ddltool.analyzers.oracle.roofline import coverage
    from ddltool.commands.output import out, table
    from ddltool.units import show_bytes, show_seconds

    facts = graph_document(graph)
    console = out()
    where = f"on {facts['device']}, roofline" if facts["device"] else "times from the file"
    console.print(f"{graph.name}: {graph.mode} step, batch {graph.batch_size or '-'} ({where}; all times predicted)")
    elements = facts["parameter_elements"]
    counted = f" ({elements:,} elements)" if isinstance(elements, int) else ""
    size = show_bytes(graph.parameter_bytes)
    console.print(f"{facts['ops']} ops: {facts['recvs']} recvs, {facts['sends']} sends; parameters {size}{counted}")
    rows = []
    for name, result in comparison.results().items():
        efficiency = "-" if result.efficiency is None else f"{result.efficiency:.3f}"
        spread = f"{show_seconds(result.makespan_min_s)} .. {show_seconds(result.makespan_max_s)}"
        rows.append((name, show_seconds(result.makespan_s), spread, efficiency))
    bounds = comparison.bounds
    rows += [
        ("lower bound L", show_seconds(bounds.lower_s), "", "1"),
        ("upper bound U", show_seconds(bounds.upper_s), "", "0"),
    ]
    console.print(table("Order of transfers (simulated)", ("order", "step time", "min .. max", "efficiency E"), rows))
    if comparison.undefined_reason:
        console.print(f"E is undefined: {comparison.undefined_reason}")
    covered = coverage(graph)
    console.print(
        f"Coverage: rules give {covered.rule_time:.1%} of the compute time "
        f"({covered.rule_ops:.1%} of the ops by rule, {covered.free_ops:.1%} free, {covered.default_ops:.1%} by default)"
    )
    if covered.default_types:
        shown = ", ".join(f"{name} x{count}" for name, count in covered.default_types[:4])
        console.print(f"Without a rule: {shown}", soft_wrap=True)
    for place in written:
        console.print(f"wrote {place}", soft_wrap=True)
