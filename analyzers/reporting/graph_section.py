"""Sections of a graph: one step's timeline in two orders, what each order gives, and what its ops allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ddltool.analyzers.communication.efficiency import Bounds, bounds, simulated
from ddltool.analyzers.communication.order import tac, tic
from ddltool.analyzers.communication.program import SMALL_GAIN
from ddltool.analyzers.communication.timeline import Timeline
from ddltool.analyzers.reporting.figures import Span, Spans, merged
from ddltool.analyzers.reporting.section import Blocks, Column, Picture, Section, Table, Verdict, cell, some, tabled
from ddltool.errors import shortened
from ddltool.graph import KINDS, RECV, Graph
from ddltool.graph_results import (
    BucketFigures,
    CollectiveFigures,
    CoverageFigures,
    DeterminismOp,
    DeterminismResult,
    PrefetchFigures,
    ScheduleFigures,
    TracedGraph,
    TraceResult,
)
from ddltool.plans import CompressionFigures
from ddltool.units import counted, show_bytes, show_seconds

RUNS, RUNS_OF_A_LARGE_GRAPH = 20, 3
_LARGE = 20_000
SETTINGS = ("ddp", "fsdp2", "servers")
"""How replicas exchange gradients: what a trace's verdict speaks of first."""
_SHARDED_BYTES = 64 * 2**20
"""Of parameters; with fewer a whole process holds less than 256 MiB with Adam, so that sharding has nothing to save."""
_LANES_DRAWN = 12
_LABELLED = 60


def graph_section(graph: Graph, name: str, *, remark: str = "") -> Section:
    """Return the section of a timed graph; ``remark`` says where its times come from.

    Every order is simulated on 20 seeds (3 from 20,000 ops on). Raises InputError for ops without a duration.
    """
    runs = RUNS if len(graph) < _LARGE else RUNS_OF_A_LARGE_GRAPH
    limits = bounds(graph)
    orders, timelines = simulated(graph, {"random": None, "TIC": tic(graph), "TAC": tac(graph)}, limits, samples=runs)
    batch = f" at batch {graph.batch_size:,}" if graph.batch_size else ""
    facts = (
        f"{graph.mode.capitalize()} step of {shortened(graph.name, 60)}{batch}: {counted(len(graph), 'op')}, "
        f"{counted(len(graph.of_kind(RECV)), 'parameter')} of {show_bytes(graph.parameter_bytes)}. {remark}"
    )
    caption = f"Step time and efficiency by order of transfers, {runs} simulated runs each"
    blocks: Blocks = [_orders(caption, orders, limits)]
    if limits.upper_s > 0:  # else there is nothing to draw
        blocks.insert(0, _timeline(graph, timelines, orders["TAC"].priority or {}))
    lead = [facts.strip(), _verdict(limits, orders["random"].makespan_s, orders["TAC"].makespan_s)]
    return Section(title=f"Graph: {name}", lead=lead, blocks=blocks, verdict=_card(graph, orders, runs))


def _card(graph: Graph, orders: Mapping[str, ScheduleFigures], runs: int) -> Verdict | None:
    """Return what the order of transfers is worth, in one sentence."""
    chance, ordered = orders["random"], orders["TAC"]
    if chance.makespan_s <= 0:
        return None
    saved = 1.0 - ordered.makespan_s / chance.makespan_s
    low, high = (show_seconds(end or 0.0) for end in (ordered.makespan_min_s, ordered.makespan_max_s))
    worth = saved >= SMALL_GAIN
    error = graph.meta.get("error_low"), graph.meta.get("error_high")
    known = ""
    if all(isinstance(end, float) for end in error):
        known = "; compute predicted, 80 % of steps lay {:.2f} to {:.2f} times that".format(*error)
    times = f"{show_seconds(chance.makespan_s)} to {show_seconds(ordered.makespan_s)}"
    return Verdict(
        answer=f"TAC's order of transfers takes a step from {times}: {saved:+.1%} saved (simulated).",
        sure=(f"all {runs} runs alike" if low == high else f"{runs} runs between {low} and {high}") + known,
        then="enforce the order: ddltool emit, and transfers" if worth else "leave the order to chance",
        good=True if worth else None,
        minor=not worth,
    )


def _verdict(limits: Bounds, chance: float, ordered: float) -> str:
    if limits.speedup is None or chance <= 0:
        return "Nothing in this graph takes any time."
    saved = 1.0 - ordered / chance
    word = "saved" if saved >= 0 else "lost"
    return (
        f"From random orders to TAC the step goes from {show_seconds(chance)} to {show_seconds(ordered)} "
        f"({abs(saved):.1%} {word}). The busiest resource alone takes L = {show_seconds(limits.lower_s)}, all ops one "
        f"after the other U = {show_seconds(limits.upper_s)}; E = (U - step) / (U - L)."
    )


def _timeline(graph: Graph, timelines: Mapping[str, Timeline], priority: Mapping[str, int]) -> Picture:
    """Return the timelines of the random order and TAC's; under them the parameters in TAC's order."""
    received = graph.of_kind(RECV).tolist()
    shown = {name: timelines[name] for name in ("random", "TAC")}
    numbers = {"TAC": priority} if len(received) <= _LABELLED else {}
    figures = [
        Spans(
            title=f"{name} order: {show_seconds(run.makespan_s)}",
            headed=True,
            lanes=_lanes(graph, run, numbers.get(name, {}))[:_LANES_DRAWN],
            xlabel="time in the step",
            until=max(run.makespan_s for run in shown.values()),
            mark=("ends", run.makespan_s),
        )
        for name, run in shown.items()
    ]
    said = "numbers on transfers are TAC's priorities, 0 first."
    if len(received) > _LABELLED:
        said = "bars too close to be told apart are drawn as one."
    caption = f"One step: what each resource does when; {said}{some(_LANES_DRAWN, graph.resource_names, 'resources')}"
    received.sort(key=lambda op: (priority.get(graph.names[op], 2**31), op))
    columns: dict[str, Column[int]] = {
        "parameter": lambda op: shortened(graph.parameter[op] or graph.names[op], 60),
        "priority": lambda op: priority.get(graph.names[op]),
        "size": lambda op: show_bytes(float(graph.size_bytes[op])),
        "channel": lambda op: graph.resource_names[graph.resource[op]],
        "begins": lambda op: show_seconds(float(timelines["TAC"].start_s[op])),
        "ends": lambda op: show_seconds(float(timelines["TAC"].end_s[op])),
    }
    table = tabled("Parameters in TAC's order", "simulated", received, columns)
    return Picture(figures=figures, caption=caption, label="simulated", table=table if received else None)


def _lanes(graph: Graph, run: Timeline, priority: Mapping[str, int]) -> list[tuple[str, list[Span]]]:
    """Return what each resource does when, compute first, with priorities on the transfers."""
    names = sorted(graph.resource_names, key=lambda name: not name.startswith("compute"))
    lanes: dict[str, list[Span]] = {name: [] for name in names}
    for op, resource in enumerate(graph.resource.tolist()):
        text = str(priority.get(graph.names[op], ""))
        span = Span(float(run.start_s[op]), float(run.end_s[op]), KINDS[graph.kind[op]], text)
        lanes[graph.resource_names[resource]].append(span)
    return [(name, merged(spans, run.makespan_s)) for name, spans in lanes.items()]


def trace_section(found: TraceResult, setting: str = "ddp") -> Section:
    """Return the section of a trace: what to do under ``setting`` (one of :data:`SETTINGS`) first, then the others."""
    graph, both = found.graph, found.collectives
    elements = f" ({graph.parameter_elements:,} elements)" if graph.parameter_elements is not None else ""
    size = show_bytes(graph.parameter_bytes)
    servers = [f"E is undefined: {found.efficiency_undefined}"] if found.efficiency_undefined else []
    if found.verdict is not None:
        servers.insert(0, f"Parameter servers: {found.verdict.text}")
    servers.append(
        f"{_best_words(found)} (TIC and TAC order the transfers of a parameter server, by the graph alone or by its times; "
        "DDP and FSDP2 have none.)"
    )
    said: dict[str, list[str]] = {"servers": servers}
    ends = found.bounds
    limits = Bounds(upper_s=ends.upper_s, lower_s=ends.lower_s, speedup=ends.speedup, compute_s=0.0, transfer_s=0.0)
    blocks: Blocks = [_orders("Parameter servers: order of transfers", found.schedules, limits, ends.best_lower_s)]
    if both is not None:
        sharded = "FSDP2: the parameters' names show no list of blocks to shard by."
        if both.fsdp2 is not None:
            sharded = both.fsdp2.verdict
        if setting != "fsdp2" and graph.parameter_bytes < _SHARDED_BYTES:
            sharded = f"FSDP2 has little to save: parameters, gradients and Adam take {show_bytes(4 * graph.parameter_bytes)}."
            both = both.model_copy(update={"fsdp2": None})
        said = {"ddp": [both.ddp.verdict], "fsdp2": [sharded], **said}
        said["ddp"] += [both.compressed.verdict] if both.compressed is not None else []
        table = _collectives(both, f"Data parallel on {both.replicas} replicas, {both.network}")
        blocks.insert(len(blocks) if setting == "servers" else 0, table)
    first, *rest = sorted(said, key=lambda name: name != setting)
    lead = [f"Verdict: {said[first][0]}", *said[first][1:]]
    lead.append(f"{graph.ops} ops: {graph.recvs} recvs, {graph.sends} sends; parameters {size}{elements}")
    lead += [text for name in rest for text in said[name]]
    lead += _coverage_words(found.coverage) if found.coverage is not None else []
    title = f"{graph.name}: {graph.mode} step, batch {graph.batch_size or '-'} ({_origin(graph)})"
    return Section(title=title, lead=lead, blocks=blocks)


def _origin(graph: TracedGraph) -> str:
    """Return in words where the times come from."""
    if graph.oracle == "roofline":
        low, high = graph.error_low, graph.error_high
        range_ = f", 80 % of measured steps within x {low:.2f} to {high:.2f}" if low and high else ""
        how = f", {graph.precision}" if graph.precision else ""
        return f"on {graph.device}{how}; all times predicted{range_}"
    if graph.oracle == "measured":
        return f"ops measured on this machine's {graph.device}, transfers predicted"
    return f"ops from {graph.oracle}, transfers predicted" if graph.oracle is not None else "times from the file"


def _orders(
    caption: str, schedules: Mapping[str, ScheduleFigures], limits: Bounds, best_s: float | None = None
) -> Table:
    """Return the table of orders: those simulated, the exact one, and the bounds; ``best_s``: no order is faster."""

    def spread(made: ScheduleFigures) -> str:
        if made.status is not None:
            return "optimal" if made.status == "optimal" else f"gap {made.gap:.2%}"
        return f"{show_seconds(made.makespan_min_s)} .. {show_seconds(made.makespan_max_s)}"

    both = {name for name, made in schedules.items() if name == "exact" or made.orders_compute}
    names = [f"{name} (and compute)" if name in both else name for name in schedules]
    columns: dict[str, Column[ScheduleFigures]] = {"step time": "makespan_s", "min .. max": spread}
    columns["efficiency E"] = "efficiency:.3f"
    table = tabled(caption, "simulated", schedules.values(), columns, names=("order", names))
    ends = [
        ("lower bound L", show_seconds(limits.lower_s), "", "1"),
        ("upper bound U", show_seconds(limits.upper_s), "", "0"),
    ]
    if best_s is not None:
        best = ("best bound", show_seconds(best_s), "no order is faster", cell(limits.share(best_s), form=".3f"))
        ends = [best, *ends]
    return replace(table, rows=[*table.rows, *ends])


def _best_words(found: TraceResult) -> str:
    """Return in words what part of 1 - E an order could still win over TAC, and which is the graph's."""
    by_tac, best = found.schedules["tac"], found.schedules["improved"]
    shares = by_tac.attribution
    if shares is None or by_tac.efficiency is None:
        return "Nothing is left for an order to win."
    lost = 1.0 - by_tac.efficiency
    text = (
        f"Of TAC's 1 - E = {lost:.3f}, {shares.graph:.3f} is the graph's own: ops wait for each other in every order."
    )
    text += f" An order can win back {shares.winnable:.3f}"
    text += f", and {shares.open:.3f} is open (see --exact)." if shares.open > 5e-4 else "; that is proven."
    gain = 1.0 - best.makespan_s / by_tac.makespan_s
    if gain >= 5e-4:
        how = "Ordering compute as well" if best.orders_compute else "The improved order"
        text += f" {how} saves {gain:.2%} of TAC's step."
    return text


Setting = BucketFigures | PrefetchFigures | CompressionFigures


def _collectives(found: CollectiveFigures, caption: str) -> Table:
    """Return the table of DDP's and FSDP2's settings: step, exposed communication, memory."""
    ddp, fsdp2 = found.ddp, found.fsdp2
    settings: dict[str, Setting] = {"DDP default": ddp.default, "DDP best cap": ddp.best_cap}
    settings["DDP best buckets"] = ddp.best
    if found.compressed is not None:
        settings[f"DDP {found.compressed.name}"] = found.compressed
    if fsdp2 is not None:
        settings |= {"FSDP2 default": fsdp2.default, "FSDP2 best": fsdp2.best}
        settings["FSDP2 no reshard"] = fsdp2.without_reshard

    def setting(entry: Setting) -> str:
        if isinstance(entry, CompressionFigures):
            return f"default, {show_bytes(entry.sent_bytes)} sent"
        if isinstance(entry, PrefetchFigures):
            both = "" if fsdp2 is not None and entry is fsdp2.without_reshard else f" / {entry.backward_depth}"
            return f"prefetch {entry.forward_depth}{both}"
        cap = "default" if entry.bucket_cap_mb is None else f"{entry.bucket_cap_mb:.4g} MiB"
        return f"{'own list' if entry.bucket_cap_mb_list is not None else cap}, {entry.buckets} buckets"

    columns: dict[str, Column[Setting]] = {
        "setting": setting,
        **{"step": "step_s", "exposed": "exposed_s"},
        "gathered": lambda entry: show_bytes(entry.gathered_bytes) if isinstance(entry, PrefetchFigures) else None,
    }
    return tabled(caption, "predicted", settings.values(), columns, names=("framework", settings), text_columns=2)


def _coverage_words(covered: CoverageFigures) -> list[str]:
    """Return how much of the compute time was measured, estimated by a rule, or guessed."""
    if not covered.rule_ops + covered.measured_ops + covered.default_ops + covered.free_ops:
        return ["Times of the ops: the file's own."]
    measured = f"measurements {covered.measured_time:.1%}, " if covered.measured_ops else ""
    said = [
        f"Coverage of the compute time: {measured}rules {covered.rule_time:.1%}, defaults {covered.default_time:.1%} "
        f"(of the ops: {covered.measured_ops:.1%} measured, {covered.rule_ops:.1%} by rule, {covered.free_ops:.1%} free, "
        f"{covered.default_ops:.1%} by default)"
    ]
    if covered.default_types:
        shown = ", ".join(f"{name} x{count}" for name, count in covered.default_types[:4])
        said.append(f"Without a rule: {shown}")
    return said


_LEVELS = {
    "none": "not even D0: an op has no deterministic kernel",
    "unknown": "not known: an op is in no table",
    "D1": "D1: equal bits on any number of devices of one type; not D2",
    "D2": "D2-eligible by its documentation, tried on no GPU: equal bits on mixed types before Ampere",
}
_MODULES_SHOWN = 3


def determinism_section(found: DeterminismResult) -> Section:
    """Return the section of a scan: the level of a model's ops, what stands in the way, and what to set."""
    scanned, graph = found.determinism, found.graph
    lead = [f"  {reason}" for reason in scanned.reasons]
    of_class: dict[str, list[DeterminismOp]] = {}
    for op in scanned.ops:
        of_class.setdefault(op.class_, []).append(op)
    for name, ops in of_class.items():  # once per class what its bits depend on and what to set
        lead.append(f"{name} ({sum(op.count for op in ops)}): {ops[0].reason}")
        lead += [f"  set: {ops[0].setting}"] if ops[0].setting else []
    lead.append(f"{scanned.exact_ops} other ops depend on their inputs alone.")
    if graph.mode == "inference":
        lead.append("A forward graph: what the backward pass would add is not seen.")
    columns: dict[str, Column[DeterminismOp]] = {"op": lambda op: op.op or "(no type)", "kernels": "class_"}
    columns |= {"up to": "level", "n": "count:>3", "modules": lambda op: _modules(op.modules)}
    caption = "Ops whose bits depend on more than their inputs"
    table = tabled(caption, "read", scanned.ops, columns, text_columns=5)
    title = f"{graph.name} ({graph.mode}): {_LEVELS[scanned.level]}"
    return Section(title=title, lead=lead, blocks=[table] if scanned.ops else [])


def _modules(paths: Sequence[str]) -> str:
    """Return the last two parts of the modules' paths, without repeats, cut to a few."""
    names = list(dict.fromkeys(".".join(path.split(".")[-2:]) for path in paths))
    more = f", +{len(names) - _MODULES_SHOWN}" if len(names) > _MODULES_SHOWN else ""
    return ", ".join(names[:_MODULES_SHOWN]) + more
