"""What ``ddltool trace`` says: the JSON document and the tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddltool.analyzers.communication.collectives import Collectives
    from ddltool.analyzers.communication.efficiency import Comparison
    from ddltool.graph import Graph


def as_document(graph: Graph, comparison: Comparison, plans: Collectives | None = None) -> dict[str, Any]:
    """Return the JSON document of a trace: graph, bounds, schedules, what is winnable, collectives, coverage, verdict."""
    from dataclasses import asdict

    from ddltool.analyzers.communication.efficiency import verdict
    from ddltool.analyzers.costs.estimate import coverage
    from ddltool.commands.collectives import collectives_document

    judged, bounds = verdict(comparison), comparison.bounds
    return {
        "kind": "ddltool.trace",
        "schema_version": 1,
        "graph": graph_document(graph),
        "bounds": {
            "upper_s": bounds.upper_s,
            "lower_s": bounds.lower_s,
            "speedup": bounds.speedup,
            "best_lower_s": comparison.best_bound_s,
        },
        "schedules": _schedules_document(comparison),
        "efficiency_undefined": comparison.undefined_reason,
        "coverage": asdict(coverage(graph)),
        "servers": servers_of(graph),
        "collectives": collectives_document(plans) if plans is not None else None,
        "verdict": {"worth_it": judged.worth_it, "text": judged.text},
        "predicted": True,
    }


def _schedules_document(comparison: Comparison) -> dict[str, Any]:
    """Return what each order comes to, the exact one's last where it was solved for."""
    from dataclasses import asdict

    from ddltool.analyzers.communication.efficiency import attribute, efficiency, efficiency_of_best

    schedules: dict[str, Any] = {}
    for name, result in comparison.results().items():
        shares = attribute(comparison, result.makespan_s)
        schedules[name] = {
            "makespan_s": result.makespan_s,
            "makespan_std_s": result.makespan_std_s,
            "makespan_min_s": result.makespan_min_s,
            "makespan_max_s": result.makespan_max_s,
            "samples": result.samples,
            "efficiency": result.efficiency,
            "efficiency_of_best": efficiency_of_best(comparison, result.makespan_s),
            "attribution": asdict(shares) if shares is not None else None,
            "order": list(result.schedule.order) if result.schedule is not None else None,
            "priority": dict(result.schedule.priority) if result.schedule is not None else None,
        }
    schedules["improved"]["orders_compute"] = comparison.orders_compute
    exact = comparison.exact
    if exact is not None:
        schedules["exact"] = {
            "makespan_s": exact.makespan_s,
            "efficiency": efficiency(comparison.bounds, exact.makespan_s),
            "efficiency_of_best": efficiency_of_best(comparison, exact.makespan_s),
            "lower_bound_s": exact.lower_bound_s,
            "status": exact.status,
            "gap": exact.gap,
            "solve_seconds": exact.solve_seconds,
            "order": list(exact.schedule.order),
            "priority": dict(exact.schedule.priority),
        }
    return schedules


# What a graph says of its times: where they are for, how they were made, and how sure they are.
_SAID = (
    *("device", "oracle", "precision", "channels_last", "optimizer", "update_s", "error_low", "error_high"),
    *("bandwidth_bytes_per_s", "latency_s"),
)


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
        **{key: graph.meta.get(key) for key in _SAID},
        "channels": sum(name.startswith("channel:") for name in graph.resource_names),
    }


def servers_of(graph: Graph) -> dict[str, list[str]]:
    """Return which parameters each channel (parameter server) holds, in file order."""
    from ddltool.graph import RECV

    held: dict[str, list[str]] = {name: [] for name in graph.resource_names if name.startswith("channel:")}
    for op in graph.of_kind(RECV):
        held[graph.resource_names[graph.resource[op]]].append(graph.parameter[op] or graph.names[op])
    return held


def show_trace(graph: Graph, comparison: Comparison, plans: Collectives | None, written: list[Path]) -> None:
    """Print a trace as tables for people, the verdicts last."""
    from ddltool.analyzers.communication.efficiency import best_text, verdict
    from ddltool.commands.output import out, table
    from ddltool.units import show_bytes

    facts = graph_document(graph)
    console = out()
    console.print(f"{graph.name}: {graph.mode} step, batch {graph.batch_size or '-'} ({_origin(facts)})")
    elements = facts["parameter_elements"]
    counted = f" ({elements:,} elements)" if isinstance(elements, int) else ""
    size = show_bytes(graph.parameter_bytes)
    console.print(f"{facts['ops']} ops: {facts['recvs']} recvs, {facts['sends']} sends; parameters {size}{counted}")
    console.print(
        table(
            "Parameter servers: order of transfers (simulated)",
            ("order", "step time", "min .. max", "efficiency E"),
            _order_rows(comparison),
        )
    )
    if comparison.undefined_reason:
        console.print(f"E is undefined: {comparison.undefined_reason}")
    console.print(f"Verdict: {verdict(comparison).text}")
    console.print(best_text(comparison))
    if plans is not None:
        _show_collectives(plans)
    _show_coverage(graph)
    for place in written:
        console.print(f"wrote {place}", soft_wrap=True)


def _origin(facts: dict[str, Any]) -> str:
    """Return in words where the times come from."""
    if facts["oracle"] == "roofline":
        low, high = facts["error_low"], facts["error_high"]
        range_ = f", 80 % of measured steps within x {low:.2f} to {high:.2f}" if low and high else ""
        how = f", {facts['precision']}" if facts["precision"] else ""
        return f"on {facts['device']}{how}; all times predicted{range_}"
    if facts["oracle"] == "measured":
        return f"ops measured on this machine's {facts['device']}, transfers predicted"
    if facts["oracle"] is not None:
        return f"ops from {facts['oracle']}, transfers predicted"
    return "times from the file"


def _order_rows(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the rows of the table of orders: those simulated, the exact one, and the bounds."""
    from ddltool.analyzers.communication.efficiency import efficiency
    from ddltool.units import show_seconds

    rows: list[tuple[str, ...]] = []
    for name, result in comparison.results().items():
        value = "-" if result.efficiency is None else f"{result.efficiency:.3f}"
        spread = f"{show_seconds(result.makespan_min_s)} .. {show_seconds(result.makespan_max_s)}"
        label = f"{name} (and compute)" if name == "improved" and comparison.orders_compute else name
        rows.append((label, show_seconds(result.makespan_s), spread, value))
    bounds, exact = comparison.bounds, comparison.exact
    if exact is not None:
        note = "optimal" if exact.status == "optimal" else f"gap {exact.gap:.2%}"
        reached = efficiency(bounds, exact.makespan_s)
        shown = "-" if reached is None else f"{reached:.3f}"
        rows.append(("exact (and compute)", show_seconds(exact.makespan_s), note, shown))
    best = efficiency(bounds, comparison.best_bound_s)
    rows += [
        (
            "best bound",
            show_seconds(comparison.best_bound_s),
            "no order is faster",
            "-" if best is None else f"{best:.3f}",
        ),
        ("lower bound L", show_seconds(bounds.lower_s), "", "1"),
        ("upper bound U", show_seconds(bounds.upper_s), "", "0"),
    ]
    return rows


def _show_collectives(plans: Collectives) -> None:
    """Print the table of DDP's and FSDP2's settings and what each is worth."""
    from ddltool.analyzers.communication.collectives import ddp_verdict, fsdp_verdict
    from ddltool.commands.collectives import collective_rows
    from ddltool.commands.output import out, table
    from ddltool.units import show_bytes

    rate = show_bytes(plans.ring.bandwidth_bytes_per_s)
    title = f"Data parallel on {plans.ring.replicas} replicas, {rate}/s between any two (predicted)"
    columns = ("framework", "setting", "step", "exposed", "gathered")
    out().print(table(title, columns, collective_rows(plans), text_columns=2))
    out().print(ddp_verdict(plans))
    out().print(fsdp_verdict(plans))


def _show_coverage(graph: Graph) -> None:
    """Print how much of the compute time was measured, estimated by a rule, or guessed."""
    from ddltool.analyzers.costs.estimate import coverage
    from ddltool.commands.output import out

    covered = coverage(graph)
    if not covered.rule_ops + covered.measured_ops + covered.default_ops + covered.free_ops:
        out().print("\nTimes of the ops: the file's own.")
        return
    measured = f"measurements {covered.measured_time:.1%}, " if covered.measured_ops else ""
    out().print(
        f"\nCoverage of the compute time: {measured}rules {covered.rule_time:.1%}, defaults {covered.default_time:.1%} "
        f"(of the ops: {covered.measured_ops:.1%} measured, {covered.rule_ops:.1%} by rule, {covered.free_ops:.1%} free, "
        f"{covered.default_ops:.1%} by default)"
    )
    if covered.default_types:
        shown = ", ".join(f"{name} x{count}" for name, count in covered.default_types[:4])
        out().print(f"Without a rule: {shown}", soft_wrap=True)
