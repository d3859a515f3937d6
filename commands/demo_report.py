"""What the demo shows: a table of findings, a JSON document, and report.html."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddltool import __version__
from ddltool.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from ddltool.analyzers.communication.efficiency import Comparison
    from ddltool.analyzers.reporting.page import Section
    from ddltool.commands.demo import Findings
    from ddltool.graph import Graph
    from ddltool.plan import Plan


def rows(found: Findings) -> list[tuple[str, str, str]]:
    """Return one row per step: name, what it found, seconds."""
    plan, training = found.plan, found.training
    from ddltool.analyzers.costs.estimate import coverage

    graph = found.graph
    count = (
        f"{len(graph)} ops, {show_bytes(graph.parameter_bytes)}; {coverage(graph).rule_time:.0%} of the time by rule"
    )
    gains = [_gain(graph, found.comparison), _gain(found.contrast_graph, found.contrast)]
    mix = ", ".join(f"{row.device_type} {row.ests_per_device} EST(s)" for row in plan.assignments)
    measured = measured_steps(found)
    slowest = max(row["step_s"] for row in measured)
    findings = {
        "trace": "\n".join([count, *gains]),
        "profile": f"{len(found.profile)} configurations on this CPU (measured)",
        "fit": f"throughput model, MAPE {found.fitted.mape:.1%} on {found.fitted.samples} measured rows",
        "plan": f"{mix}: {plan.throughput:.4g} mini-batches/s (predicted)\nequal split: {found.baseline.throughput:.4g}",
        "emit": f"enforce.json: {plan.world_size} ranks, local batches "
        + ", ".join(str(rank.local_batch_size) for rank in found.enforcement.ranks),
        "train": f"{len(training['losses'])} steps of {show_seconds(slowest)} on {plan.world_size} processes (measured)\n"
        f"loss {training['losses'][0]:.2f} -> {training['losses'][-1]:.2f}, held-out accuracy {training['accuracy']:.0%}",
        "fit telemetry": f"MAPE {found.refitted.mape:.1%} on {found.refitted.samples} rows (measured)",
        "report": "report.html",
    }
    return [(name, findings[name], f"{found.seconds[name]:.1f} s") for name in findings] + [
        ("all", "", f"{found.seconds['all']:.1f} s")
    ]


def measured_steps(found: Findings) -> list[dict[str, Any]]:
    """Return per rank the median seconds of each phase, and what the fitted profile predicted for its batch."""
    from ddltool.analyzers.goodput.throughput import ThroughputParams, iteration_time_s

    params = ThroughputParams.from_dict(found.fitted.params.model_dump())
    medians = found.telemetry[found.telemetry["step"] >= 3].groupby("rank").median(numeric_only=True)
    seconds = {name: medians[name].to_dict() for name in ("compute_s", "wait_s", "sync_s", "step_s")}
    return [
        {
            "rank": rank.rank,
            "device_type": rank.device_type,
            "batch": rank.local_batch_size,
            **{name: float(by_rank[rank.rank]) for name, by_rank in seconds.items()},
            "predicted_s": float(iteration_time_s(params, 1, found.plan.world_size, rank.local_batch_size)),
        }
        for rank in found.enforcement.ranks
    ]


def document(found: Findings, report: Path) -> dict[str, Any]:
    """Return the demo's JSON document."""
    from ddltool.commands.trace_output import as_document

    trace = as_document(found.graph, found.comparison)
    return {
        "kind": "ddltool.demo",
        "schema_version": 1,
        "trace": {name: trace[name] for name in ("graph", "bounds", "verdict", "coverage")},
        "fit": found.fitted.model_dump(mode="json"),
        "plan": found.plan.model_dump(mode="json", exclude={"parameters"}),
        "baseline": found.baseline.model_dump(mode="json", exclude={"parameters"}),
        "training": {**found.training, "ranks": measured_steps(found)},
        "fit_telemetry": found.refitted.model_dump(mode="json"),
        "seconds": found.seconds,
        "report": str(report),
    }


def write_report(found: Findings, path: Path) -> None:
    """Write report.html."""
    from ddltool.analyzers.reporting.page import render
    from ddltool.artifacts import write_text

    sections = [
        _order_section(found.graph, found.comparison, "order", "Order of transfers: the example"),
        _order_section(found.contrast_graph, found.contrast, "contrast", "Order of transfers: where it matters"),
        _fit_section(found),
        _plan_section(found),
        _training_section(found),
    ]
    summary = [
        f"{found.graph.name}, planned for a mixed V100, P100 and T4 job, trained on this machine's CPU.",
        "Predicted: computed from datasheet figures or from a fitted model. Simulated: played through on the traced graph. "
        "Measured: by a clock, here.",
    ]
    write_text(path, render("ddltool demo", sections, summary=summary, generated_by=f"ddltool {__version__}"))


def _gain(graph: Graph, comparison: Comparison) -> str:
    """Return what an order gains on one graph, for the table."""
    from ddltool.analyzers.communication.efficiency import verdict

    times = f"{show_seconds(comparison.random.makespan_s)} -> {show_seconds(comparison.tac.makespan_s)}"
    return f"{graph.name}, {graph.meta.get('device')}: TAC {times} ({verdict(comparison).gain:.1%}, simulated)"


def _order_section(graph: Graph, comparison: Comparison, anchor: str, title: str) -> Section:
    from ddltool.analyzers.communication.efficiency import verdict
    from ddltool.analyzers.reporting.page import Picture, Section, Table
    from ddltool.analyzers.reporting.pictures import Panel, lanes_of, makespan_svg, timeline_svg
    from ddltool.analyzers.reporting.style import at_both_widths
    from ddltool.graph import KINDS

    kinds = [KINDS[kind] for kind in graph.kind]
    panels = []
    for name, result in (("random order", comparison.random), ("TAC", comparison.tac)):
        spans = (result.timeline.start_s, result.timeline.end_s)
        lanes = lanes_of(graph.resource_names, graph.resource, spans, kinds)
        panels.append(Panel(title=name, lanes=lanes, makespan_s=result.timeline.makespan_s))
    results = comparison.results()
    makespans = [(n, r.makespan_s, r.makespan_min_s, r.makespan_max_s) for n, r in results.items()]
    numbers = Table(
        caption=f"Step time by order of transfers, {comparison.random.samples} simulated runs of the random order",
        header=("order", "mean", "min", "max", "efficiency E"),
        rows=[
            (
                name,
                *(show_seconds(value) for value in (r.makespan_s, r.makespan_min_s, r.makespan_max_s)),
                _number(r.efficiency),
            )
            for name, r in results.items()
        ],
        label="simulated",
    )
    order = comparison.tac.schedule.order if comparison.tac.schedule is not None else ()
    first = Table(
        caption="The first parameters in TAC's order",
        header=("parameter", "place"),
        rows=[(name.removeprefix("recv/"), str(place)) for place, name in enumerate(order[:8])],
        label="predicted",
    )
    picture = (
        f"One {graph.mode} step of {graph.name} at batch {graph.batch_size} on a {graph.meta.get('device')} behind "
        "a 10 Gbit/s network, in a random order and in TAC's."
    )
    return Section(
        anchor=anchor,
        title=title,
        lead=[verdict(comparison).text],
        blocks=[
            Picture(svg=at_both_widths(timeline_svg)(panels), caption=picture, label="simulated", table=first),
            Picture(
                svg=at_both_widths(makespan_svg)(makespans, comparison.bounds.lower_s),
                caption="Mean step time; the whiskers are the fastest and slowest run, L is the busiest resource alone.",
                label="simulated",
                table=numbers,
            ),
        ],
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _fit_section(found: Findings) -> Section:
    import numpy as np

    from ddltool.analyzers.goodput.throughput import ThroughputParams, iteration_time_s
    from ddltool.analyzers.reporting.page import Picture, Section, Table
    from ddltool.analyzers.reporting.pictures import Series, curve_svg
    from ddltool.analyzers.reporting.style import at_both_widths

    params = ThroughputParams.from_dict(found.fitted.params.model_dump())
    line = np.linspace(1.0, float(found.profile["local_batch_size"].max()) * 1.1, 60)
    series = []
    for replicas, part in found.profile.groupby("num_replicas"):
        count = int(str(replicas))
        series.append(
            Series(
                label=f"{count} replica" + ("s" if count > 1 else ""),
                batch=part["local_batch_size"].to_numpy(dtype=float),
                step_s=part["step_time_s"].to_numpy(dtype=float),
                spread_s=part["step_time_spread_s"].to_numpy(dtype=float),
                line_batch=line,
                line_s=np.asarray(iteration_time_s(params, 1, count, line)),
            )
        )
    table = Table(
        caption="Profile of this machine's CPU",
        header=("replicas", "local batch", "step", "spread", "sync", "fitted", "peak memory"),
        rows=[
            (
                str(row["num_replicas"]),
                str(row["local_batch_size"]),
                *(show_seconds(row[name]) for name in ("step_time_s", "step_time_spread_s", "sync_time_s")),
                show_seconds(float(iteration_time_s(params, 1, row["num_replicas"], row["local_batch_size"]))),
                show_bytes(row["peak_memory_bytes"]),
            )
            for row in found.profile.to_dict("records")
        ],
        label="measured",
    )
    error = f"{found.fitted.mape:.1%} mean error on {found.fitted.samples} measured configurations."
    return Section(
        anchor="throughput",
        title="Throughput model",
        lead=[f"Pollux's seven parameters, fitted to steps measured here: {error}"],
        blocks=[
            Picture(
                svg=at_both_widths(curve_svg)(series),
                caption="Points are measured, lines are the fit.",
                label="measured",
                table=table,
            )
        ],
    )


def _plan_section(found: Findings) -> Section:
    from ddltool.analyzers.reporting.page import Picture, Section, Table
    from ddltool.analyzers.reporting.pictures import devices_svg
    from ddltool.analyzers.reporting.style import at_both_widths

    plan, baseline = found.plan, found.baseline
    table = Table(
        caption="EST plan against the equal split",
        header=("plan", "devices x ESTs", "step time", "mini-batches/s", "waste"),
        rows=[
            (made.strategy, _mix(made), show_seconds(made.iteration_s), f"{made.throughput:.4g}", f"{made.waste:.4g}")
            for made in (plan, baseline)
        ],
        label="predicted",
    )
    bars = [
        (row.device_type, share, f"{row.ests_per_device} EST(s), {row.local_batch_size} samples")
        for row, share in zip(plan.assignments, _busy_shares(found), strict=True)
    ]
    gain = plan.throughput / baseline.throughput
    lead = (
        f"{plan.max_workers} logical workers of {plan.batch_size} samples: {plan.throughput:.4g} mini-batches/s on "
        f"{plan.world_size} devices, {gain:.2f} times the equal split over all devices. Synchronisation is not in this figure."
    )
    return Section(
        anchor="plan",
        title="Placement",
        lead=[lead],
        blocks=[
            Picture(svg=at_both_widths(devices_svg)(bars), caption="The used devices.", label="predicted", table=table)
        ],
    )


def _busy_shares(found: Findings) -> list[float]:
    """Return how much of the step each used device computes."""
    step, capability = found.plan.iteration_s, found.capabilities
    return [min(1.0, row.ests_per_device / capability[row.device_type] / step) for row in found.plan.assignments]


def _mix(plan: Plan) -> str:
    if plan.strategy == "bsp":
        return ", ".join(f"{row.devices} {row.device_type}: {row.local_batch_size} samples" for row in plan.assignments)
    return ", ".join(f"{row.devices} {row.device_type} x {row.ests_per_device}" for row in plan.assignments)


def _training_section(found: Findings) -> Section:
    from ddltool.analyzers.reporting.page import Picture, Section, Table
    from ddltool.analyzers.reporting.pictures import line_svg, phases_svg
    from ddltool.analyzers.reporting.style import at_both_widths

    ranks = measured_steps(found)
    losses = found.training["losses"]
    bars = [
        (
            f"rank {row['rank']} ({row['batch']} samples)",
            {"compute": row["compute_s"], "wait": row["wait_s"], "sync": row["sync_s"]},
        )
        for row in ranks
    ]
    table = Table(
        caption="Median step per rank; predicted: the fit above, for compute and sync at that batch",
        header=("rank", "planned for", "batch", "compute", "wait", "sync", "compute + sync", "predicted"),
        rows=[
            (
                str(row["rank"]),
                row["device_type"],
                str(row["batch"]),
                *(show_seconds(row[name]) for name in ("compute_s", "wait_s", "sync_s")),
                show_seconds(row["compute_s"] + row["sync_s"]),
                show_seconds(row["predicted_s"]),
            )
            for row in ranks
        ],
        label="measured",
    )
    history = Table(
        caption="Mean loss over all samples of a step",
        header=("step", "loss"),
        rows=[(str(step), f"{loss:.4f}") for step, loss in enumerate(losses, start=1)],
        label="measured",
    )
    lead = [
        f"{len(losses)} steps of real training on scikit-learn's digits in {found.plan.world_size} processes with the hook; "
        f"held-out accuracy {found.training['accuracy']:.0%}.",
        "Both ranks ran on this machine's equally fast cores while the plan is for unequal devices, so the rank with the "
        "smaller batch waits here; on the planned devices it would not.",
    ]
    return Section(
        anchor="training",
        title="Training with the hook",
        lead=lead,
        blocks=[
            Picture(
                svg=at_both_widths(phases_svg)(bars),
                caption="Where each rank's median step goes.",
                label="measured",
                table=table,
            ),
            Picture(
                svg=at_both_widths(line_svg)(losses, xlabel="step", ylabel="loss", title="Training loss"),
                caption="Training loss.",
                label="measured",
                table=history,
            ),
        ],
    )
