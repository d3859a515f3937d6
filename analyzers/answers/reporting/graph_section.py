"""Sections of a graph: the timeline of a step in two orders of transfers, the figures of each order, and determinism.

A graph has the ops of one training step, with the transfers from and to parameter servers (recv and send). An order of
transfers is the order in which the servers send parameters; TIC and TAC are those of TicTac, by the graph's shape and by
its ops' times. Makespan: the time from the first op's start to the last one's end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ddltool.analyzers.answers.reporting.figures import Lanes, Span, merged
from ddltool.analyzers.answers.reporting.section import (
    Blocks,
    Column,
    Picture,
    Section,
    Table,
    Verdict,
    cell,
    how_many_drawn,
    tabled,
)
from ddltool.analyzers.step.communication.collectives import plan_collectives
from ddltool.analyzers.step.communication.program import SMALL_GAIN, own_fabric
from ddltool.analyzers.step.costs.model import OPTIMIZER, memory_words
from ddltool.analyzers.step.transfers.efficiency import MakespanBounds, bounds, simulated
from ddltool.analyzers.step.transfers.order import tac, tic
from ddltool.analyzers.step.transfers.timeline import Timeline
from ddltool.device import DEVICES_PER_NODE
from ddltool.errors import shortened
from ddltool.graph import COMPUTE, KINDS, RECV, Graph
from ddltool.graph_results import (
    BucketFigures,
    CollectiveFigures,
    CoverageFigures,
    DdpFigures,
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
    """Return the section of a timed graph: the gain of DDP's buckets on 8 replicas, then that of the order of transfers.

    The buckets are there for a training step whose graph says for which network it was timed; of any other graph only the
    order of a parameter server's transfers is shown. Each order is simulated with 20 seeds (3 from 20,000 ops on).
    ``remark``: the sentence on the source of its times. Raises InputError for ops without a duration.
    """
    runs = RUNS if len(graph) < _LARGE else RUNS_OF_A_LARGE_GRAPH
    limits = bounds(graph)
    orders, timelines = simulated(graph, {"random": None, "TIC": tic(graph), "TAC": tac(graph)}, limits, samples=runs)
    batch = f" at batch {graph.batch_size:,}" if graph.batch_size else ""
    facts = (
        f"{graph.mode.capitalize()} step of {shortened(graph.name, 60)}{batch}: {counted(len(graph), 'op')}, "
        f"{counted(len(graph.of_kind(RECV)), 'parameter')} of {show_bytes(graph.parameter_bytes)}. {remark}"
    )
    if graph.recorded is not None:
        peak = graph.recorded.held_bytes(len(graph.of_kind(COMPUTE))).max(initial=0.0)
        facts += (
            f" A script's own step in a world of {graph.recorded.world_size}: tensors take "
            f"{show_bytes(float(peak))} at its peak; ddltool predict times it with its streams and collectives."
        )
    caption = f"Step time and efficiency by order of transfers, {runs} simulated runs each"
    blocks: Blocks = [_order_table(caption, orders, limits)]
    if limits.upper_s > 0:  # a graph whose ops take no time has no timeline
        blocks.insert(0, _timeline_picture(graph, timelines, orders["TAC"].priority or {}))
    lead = [facts.strip(), _bounds_words(limits, orders["random"].makespan_s, orders["TAC"].makespan_s)]
    verdict = _verdict(graph, orders, runs)
    fabric = own_fabric(graph)
    collectives = plan_collectives(graph, fabric.over(DEVICES_PER_NODE)) if fabric is not None and verdict else None
    if collectives is not None:
        blocks.insert(0, _collectives_table(collectives))
        lead[1] = f"Parameter servers: {lead[1][0].lower()}{lead[1][1:]}"
        verdict = _buckets_verdict(collectives.ddp)
    return Section(title=f"Graph: {name}", lead=lead, blocks=blocks, verdict=verdict)


def _buckets_verdict(ddp: DdpFigures) -> Verdict:
    """Return the verdict on DDP's buckets, that of ``ddltool trace``: the share of a step that the best ones save."""
    is_worthwhile = ddp.default.step_s - ddp.best.step_s >= SMALL_GAIN * ddp.default.step_s
    return Verdict(
        answer=ddp.verdict,
        sure="predicted by the graph's times and its network",
        then="give a plan with --graph, and ddltool emit sets the buckets" if is_worthwhile else "leave DDP as it is",
        good=True if is_worthwhile else None,
        minor=not is_worthwhile,
    )


def _verdict(graph: Graph, orders: Mapping[str, ScheduleFigures], runs: int) -> Verdict | None:
    """Return the verdict on TAC, TicTac's order of transfers by the ops' times: its saving over random orders.

    None if nothing takes time. ``runs``: number of simulated runs of each order.
    """
    random_order = orders["random"]
    tac_order = orders["TAC"]
    if random_order.makespan_s <= 0:
        return None
    saved = 1.0 - tac_order.makespan_s / random_order.makespan_s
    low_text = show_seconds(tac_order.makespan_min_s or 0.0)
    high_text = show_seconds(tac_order.makespan_max_s or 0.0)
    runs_text = f"{runs} runs between {low_text} and {high_text}"
    if low_text == high_text:
        runs_text = f"all {runs} runs alike"
    is_worthwhile = saved >= SMALL_GAIN
    # The range of measured over predicted compute times on such a device, if the graph has it.
    error_low = graph.meta.get("error_low")
    error_high = graph.meta.get("error_high")
    error_text = ""
    if isinstance(error_low, float) and isinstance(error_high, float):
        error_text = f"; compute predicted, 80 % of steps lay {error_low:.2f} to {error_high:.2f} times that"
    times = f"{show_seconds(random_order.makespan_s)} to {show_seconds(tac_order.makespan_s)}"
    return Verdict(
        answer=f"TAC's order of transfers takes a step from {times}: {saved:+.1%} saved (simulated).",
        sure=runs_text + error_text,
        then="enforce the order: ddltool emit, and transfers" if is_worthwhile else "leave the order to chance",
        good=True if is_worthwhile else None,
        minor=not is_worthwhile,
    )


def _bounds_words(limits: MakespanBounds, random_s: float, tac_s: float) -> str:
    """Return the sentences on the saving of TAC's order, and on the bounds of the efficiency E = (U - step) / (U - L).

    L is the time of the busiest resource alone, which no order beats; U that of all ops one after the other. ``random_s``
    and ``tac_s``: mean seconds of a step in random orders, and in TAC's.
    """
    if limits.speedup is None or random_s <= 0:  # no speedup is defined where L is 0
        return "Nothing in this graph takes any time."
    saved = 1.0 - tac_s / random_s
    verb = "saved" if saved >= 0 else "lost"
    return (
        f"From random orders to TAC the step goes from {show_seconds(random_s)} to {show_seconds(tac_s)} "
        f"({abs(saved):.1%} {verb}). The busiest resource alone takes L = {show_seconds(limits.lower_s)}, all ops one "
        f"after the other U = {show_seconds(limits.upper_s)}; E = (U - step) / (U - L)."
    )


def _timeline_picture(graph: Graph, timelines: Mapping[str, Timeline], priority: Mapping[str, int]) -> Picture:
    """Return the timelines of a random order and of TAC's, with the table of the parameters in TAC's order.

    ``priority``: TAC's priorities by the name of a parameter's recv op; written on the bars if there are few.
    """
    recv_ops = graph.of_kind(RECV).tolist()
    drawn_timelines = {name: timelines[name] for name in ("random", "TAC")}
    drawn_priorities = {"TAC": priority} if len(recv_ops) <= _LABELLED else {}
    figures = [
        Lanes(
            title=f"{name} order: {show_seconds(run.makespan_s)}",
            headed=True,
            lanes=_resource_lanes(graph, run, drawn_priorities.get(name, {}))[:_LANES_DRAWN],
            xlabel="time in the step",
            until=max(run.makespan_s for run in drawn_timelines.values()),
            mark=("ends", run.makespan_s),
        )
        for name, run in drawn_timelines.items()
    ]
    remark = "numbers on transfers are TAC's priorities, 0 first."
    if len(recv_ops) > _LABELLED:
        remark = "bars too close to be told apart are drawn as one."
    remark += how_many_drawn(_LANES_DRAWN, graph.resource_names, "resources")
    caption = f"One step: what each resource does when; {remark}"
    # In TAC's order; transfers without a priority come last.
    recv_ops.sort(key=lambda op: (priority.get(graph.names[op], math.inf), op))
    columns: dict[str, Column[int]] = {
        "parameter": lambda op: shortened(graph.parameter[op] or graph.names[op], 60),
        "priority": lambda op: priority.get(graph.names[op]),
        "size": lambda op: show_bytes(float(graph.size_bytes[op])),
        "channel": lambda op: graph.resource_names[graph.resource[op]],
        "begins": lambda op: show_seconds(float(timelines["TAC"].start_s[op])),
        "ends": lambda op: show_seconds(float(timelines["TAC"].end_s[op])),
    }
    table = tabled("Parameters in TAC's order", "simulated", recv_ops, columns)
    return Picture(figures=figures, caption=caption, label="simulated", table=table if recv_ops else None)


def _resource_lanes(graph: Graph, run: Timeline, priority: Mapping[str, int]) -> list[tuple[str, list[Span]]]:
    """Return (name, spans in seconds) of each resource, those of computation first; a transfer's text is its priority.

    ``run``: start and end of each op; ``priority``: by op's name.
    """
    names = sorted(graph.resource_names, key=lambda name: not name.startswith("compute"))
    lanes: dict[str, list[Span]] = {name: [] for name in names}
    for op, resource in enumerate(graph.resource.tolist()):
        text = str(priority.get(graph.names[op], ""))
        span = Span(float(run.start_s[op]), float(run.end_s[op]), KINDS[graph.kind[op]], text)
        lanes[graph.resource_names[resource]].append(span)
    return [(name, merged(spans, run.makespan_s)) for name, spans in lanes.items()]


def trace_section(result: TraceResult, setting: str = "ddp") -> Section:
    """Return the section of a trace: the verdict and table of one ``setting`` first, then those of the others.

    ``setting``: how replicas exchange gradients: "ddp", "fsdp2" or "servers".
    """
    graph = result.graph
    collectives = result.collectives
    elements = f" ({graph.parameter_elements:,} elements)" if graph.parameter_elements is not None else ""
    size = show_bytes(graph.parameter_bytes)
    servers = [f"E is undefined: {result.efficiency_undefined}"] if result.efficiency_undefined else []
    if result.verdict is not None:
        servers.insert(0, f"Parameter servers: {result.verdict.text}")
    servers.append(
        f"{_best_words(result)} (TIC and TAC order the transfers of a parameter server, by the graph alone or by its times; "
        "DDP and FSDP2 have none.)"
    )
    sentences: dict[str, list[str]] = {"servers": servers}  # by setting, the verdict of each first
    known = {name: getattr(result.bounds, name) for name in ("upper_s", "lower_s", "speedup")}
    limits = MakespanBounds(**known, compute_s=0.0, transfer_s=0.0)  # the table shows neither of the last two
    blocks: Blocks = [
        _order_table("Parameter servers: order of transfers", result.schedules, limits, result.bounds.best_lower_s)
    ]
    if collectives is not None:
        sharded = "FSDP2: the parameters' names show no list of blocks to shard by."
        if collectives.fsdp2 is not None:
            sharded = collectives.fsdp2.verdict
        # A table of sharding settings would be noise for a model this small.
        if setting != "fsdp2" and graph.parameter_bytes < _SHARDED_BYTES:
            sharded = f"FSDP2 has little to save: parameters, gradients and Adam take {show_bytes(4 * graph.parameter_bytes)}."
            collectives = collectives.model_copy(update={"fsdp2": None})
        sentences = {"ddp": [collectives.ddp.verdict], "fsdp2": [sharded], **sentences}
        if collectives.compressed is not None:
            sentences["ddp"].append(collectives.compressed.verdict)
        blocks.insert(len(blocks) if setting == "servers" else 0, _collectives_table(collectives))
    first, *rest = sorted(sentences, key=lambda name: name != setting)
    answer, *lead = sentences[first]
    lead.append(f"{graph.ops} ops: {graph.recvs} recvs, {graph.sends} sends; parameters {size}{elements}")
    lead += [text for name in rest for text in sentences[name]]
    if result.coverage is not None:
        lead += _coverage_words(result.coverage)
    title = f"{graph.name}: {graph.mode} step, batch {graph.batch_size or '-'} ({_time_source(graph)})"
    return Section(title=title, lead=lead, blocks=blocks, verdict=Verdict(answer=answer))


def _time_source(graph: TracedGraph) -> str:
    """Return in words the source of a graph's times: a datasheet, a measurement or the file."""
    if graph.oracle == "roofline":
        low = graph.error_low
        high = graph.error_high
        range_ = f", 80 % of measured steps within x {low:.2f} to {high:.2f}" if low and high else ""
        precision_text = f", {graph.precision}" if graph.precision else ""
        if graph.precision and graph.mode == "training":
            precision_text = f", {memory_words(graph.precision, graph.optimizer or OPTIMIZER)}"
        return f"on {graph.device}{precision_text}; all times predicted{range_}"
    if graph.oracle == "measured":
        return f"ops measured on this machine's {graph.device}, transfers predicted"
    return f"ops from {graph.oracle}, transfers predicted" if graph.oracle is not None else "times from the file"


def _order_table(
    caption: str, schedules: Mapping[str, ScheduleFigures], limits: MakespanBounds, best_s: float | None = None
) -> Table:
    """Return the table of orders of transfers with step times and efficiencies; the bounds are its last rows.

    ``schedules``: figures by order. ``best_s``: proven lower bound (seconds) on the step of every order; None: unknown.
    """

    def spread(figures: ScheduleFigures) -> str:
        """Return the range of an order's simulated steps; for the exact order, its largest distance from the optimum."""
        if figures.status is not None:
            return "optimal" if figures.status == "optimal" else f"gap {figures.gap:.2%}"
        return f"{show_seconds(figures.makespan_min_s)} .. {show_seconds(figures.makespan_max_s)}"

    # These order the computation too, not only the transfers.
    compute_orders = {name for name, figures in schedules.items() if name == "exact" or figures.orders_compute}
    names = [f"{name} (and compute)" if name in compute_orders else name for name in schedules]
    columns: dict[str, Column[ScheduleFigures]] = {"step time": "makespan_s", "min .. max": spread}
    columns["efficiency E"] = "efficiency:.3f"
    table = tabled(caption, "simulated", schedules.values(), columns, names=("order", names))
    bound_rows = [
        ("lower bound L", show_seconds(limits.lower_s), "", "1"),
        ("upper bound U", show_seconds(limits.upper_s), "", "0"),
    ]
    if best_s is not None:
        efficiency = cell(limits.efficiency(best_s), form=".3f")
        best_row = ("best bound", show_seconds(best_s), "no order is faster", efficiency)
        bound_rows = [best_row, *bound_rows]
    return replace(table, rows=[*table.rows, *bound_rows])


_SMALLEST_SHOWN = 5e-4  # a share below it reads 0.000


def _best_words(result: TraceResult) -> str:
    """Return the sentences on the parts of 1 - E, with E the efficiency of TAC's order (1 at the bound L, 0 at U).

    The parts: what the graph imposes on every order, what another order can gain, and what is not proven either way.
    """
    tac_order = result.schedules["tac"]
    improved_order = result.schedules["improved"]
    shares = tac_order.attribution
    if shares is None or tac_order.efficiency is None:
        return "Nothing is left for an order to win."
    tac_loss = 1.0 - tac_order.efficiency
    text = f"Of TAC's 1 - E = {tac_loss:.3f}, {shares.graph:.3f} is the graph's own: ops wait for each other in every order."
    text += f" An order can win back {shares.winnable:.3f}"
    text += f", and {shares.open:.3f} is open (see --exact)." if shares.open > _SMALLEST_SHOWN else "; that is proven."
    gain = 1.0 - improved_order.makespan_s / tac_order.makespan_s
    if gain >= _SMALLEST_SHOWN:
        order_name = "Ordering compute as well" if improved_order.orders_compute else "The improved order"
        text += f" {order_name} saves {gain:.2%} of TAC's step."
    return text


Setting = BucketFigures | PrefetchFigures | CompressionFigures


def _collectives_table(collectives: CollectiveFigures) -> Table:
    """Return the table of DDP's and FSDP2's settings: step, exposed communication, and bytes gathered at once."""
    ddp = collectives.ddp
    fsdp2 = collectives.fsdp2
    settings: dict[str, Setting] = {"DDP default": ddp.default, "DDP best cap": ddp.best_cap}
    settings["DDP best buckets"] = ddp.best
    if collectives.compressed is not None:
        settings[f"DDP {collectives.compressed.name}"] = collectives.compressed
    if fsdp2 is not None:
        settings |= {"FSDP2 default": fsdp2.default, "FSDP2 best": fsdp2.best}
        settings["FSDP2 no reshard"] = fsdp2.without_reshard

    def setting_text(entry: Setting) -> str:
        """Return a setting in words: FSDP2's prefetch depths, DDP's bucket size and number, or the bytes of compression."""
        if isinstance(entry, CompressionFigures):
            return f"default, {show_bytes(entry.sent_bytes)} sent"
        if isinstance(entry, PrefetchFigures):
            # Without resharding nothing is gathered again in the backward pass, so it has no depth.
            backward_text = "" if fsdp2 is not None and entry is fsdp2.without_reshard else f" / {entry.backward_depth}"
            return f"prefetch {entry.forward_depth}{backward_text}"
        cap = "default" if entry.bucket_cap_mb is None else f"{entry.bucket_cap_mb:.4g} MiB"
        return f"{'own list' if entry.bucket_cap_mb_list is not None else cap}, {entry.buckets} buckets"

    columns: dict[str, Column[Setting]] = {
        "setting": setting_text,
        "step": "step_s",
        "exposed": "exposed_s",
        "gathered": lambda entry: show_bytes(entry.gathered_bytes) if isinstance(entry, PrefetchFigures) else None,
    }
    caption = f"Data parallel on {collectives.replicas} replicas, {collectives.network}"
    return tabled(caption, "predicted", settings.values(), columns, names=("framework", settings), text_columns=2)


def _coverage_words(coverage: CoverageFigures) -> list[str]:
    """Return sentences on the shares of compute time that were measured, estimated by a rule, or guessed by a default."""
    if not coverage.rule_ops + coverage.measured_ops + coverage.default_ops + coverage.free_ops:
        return ["Times of the ops: the file's own."]
    measured = f"measurements {coverage.measured_time:.1%}, " if coverage.measured_ops else ""
    sentences = [
        f"Coverage of the compute time: {measured}rules {coverage.rule_time:.1%}, defaults {coverage.default_time:.1%} "
        f"(of the ops: {coverage.measured_ops:.1%} measured, {coverage.rule_ops:.1%} by rule, {coverage.free_ops:.1%} free, "
        f"{coverage.default_ops:.1%} by default)"
    ]
    if coverage.default_types:
        type_text = ", ".join(f"{name} x{count}" for name, count in coverage.default_types[:4])
        sentences.append(f"Without a rule: {type_text}")
    return sentences


_LEVELS = {
    "none": "not even D0: an op has no deterministic kernel",
    "unknown": "not known: an op is in no table",
    "D1": "D1: equal bits on any number of devices of one type; not D2",
    "D2": "D2-eligible by its documentation, tried on no GPU: equal bits on mixed types before Ampere",
}
_MODULES_SHOWN = 3


def determinism_section(result: DeterminismResult) -> Section:
    """Return the section of a scan for determinism: the level that is reached, the ops that prevent more, the settings."""
    scan = result.determinism
    graph = result.graph
    lead = [f"  {reason}" for reason in scan.reasons]
    ops_by_class: dict[str, list[DeterminismOp]] = {}
    for op in scan.ops:
        ops_by_class.setdefault(op.class_, []).append(op)
    for name, ops in ops_by_class.items():  # reason and setting are the same for all ops of a class
        lead.append(f"{name} ({sum(op.count for op in ops)}): {ops[0].reason}")
        if ops[0].setting:
            lead.append(f"  set: {ops[0].setting}")
    lead.append(f"{scan.exact_ops} other ops depend on their inputs alone.")
    if graph.mode == "inference":
        lead.append("A forward graph: what the backward pass would add is not seen.")
    columns: dict[str, Column[DeterminismOp]] = {"op": lambda op: op.op or "(no type)", "kernels": "class_"}
    columns |= {"up to": "level", "n": "count:>3", "modules": lambda op: _module_names(op.modules)}
    caption = "Ops whose bits depend on more than their inputs"
    table = tabled(caption, "read", scan.ops, columns, text_columns=5)
    title = f"{graph.name} ({graph.mode}): {_LEVELS[scan.level]}"
    return Section(title=title, lead=lead, blocks=[table] if scan.ops else [])


def _module_names(paths: Sequence[str]) -> str:
    """Return the last two parts of each module's path, without repeats: the first three, and the number of the others."""
    names = list(dict.fromkeys(".".join(path.split(".")[-2:]) for path in paths))
    hidden_text = f", +{len(names) - _MODULES_SHOWN}" if len(names) > _MODULES_SHOWN else ""
    return ", ".join(names[:_MODULES_SHOWN]) + hidden_text
