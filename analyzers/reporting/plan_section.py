"""The report's sections of plans, of every strategy, and of what the hook is to enforce."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

import numpy as np

from ddltool.analyzers.communication.program import share_saved
from ddltool.analyzers.reporting.figures import Bars, Line, Lines, Span, Spans
from ddltool.analyzers.reporting.section import Picture, Section, Table, counted, filled, shortened
from ddltool.decision import Decision, Option
from ddltool.plan import (
    Alternative,
    Assignment,
    BatchSplit,
    BucketSetting,
    Enforcement,
    GoodputChoice,
    NetworkCost,
    ParameterRecord,
    Plan,
    PrefetchSetting,
    Superstep,
)
from ddltool.results import JointPlan
from ddltool.units import show_bytes, show_seconds

_LANES_DRAWN = 16
_ITERATIONS_DRAWN = 80
Blocks = list[Picture | Table]


def plan_section(plan: Plan, name: str) -> Section:
    """Return the section of one plan: its step, its placement, and what its strategy adds. All predicted."""
    used = plan.waste + plan.throughput
    lead = [
        f"Job {shortened(plan.job, 60)}, strategy {plan.strategy}: {show_seconds(plan.iteration_s)} per step, "
        f"{plan.throughput:.4g} mini-batches/s of {counted(plan.batch_size, 'sample')} "
        f"on {counted(plan.world_size, 'device')}; {_proof(plan)} ({plan.solve_seconds:.3f} s).",
        f"Waste: {plan.waste:.4g} mini-batches/s of {used:.4g} on the used devices.",
    ]
    passes = [
        f"{row.device_type} {row.local_batch_size} in {row.accumulation_steps + 1}"
        for row in plan.assignments
        if row.accumulation_steps
    ]
    if passes:
        lead.append(f"In several passes, for memory does not hold them at once: {', '.join(passes)}.")
    blocks: Blocks = [_placement(plan)]
    if plan.superstep is not None:
        lead += [
            f"Left out: {count} {name}; the others make more without."
            for name, count in plan.superstep.left_out.items()
        ]
        blocks.append(_superstep_table(plan.superstep))
    if plan.split is not None:
        lead.append(_split_words(plan, plan.split))
    if plan.goodput is not None:
        blocks += _goodput(plan.goodput)
    if plan.decision is not None:
        lead += _decision_words(plan.decision)
        blocks.append(_decision(plan.decision))
    if plan.alternatives:
        blocks.append(_alternatives(plan))
    if plan.network is not None:
        blocks.append(_network(plan.network))
    blocks += communication_blocks(plan.ddp, plan.fsdp2, plan.parameters)
    return Section(title=f"Plan ({plan.strategy}): {name}", lead=lead, blocks=blocks)


def _proof(plan: Plan) -> str:
    if plan.status == "optimal":
        return "proven optimal"
    if plan.gap < 5e-4:
        return "no plan has a shorter step, but the search ended before the other objectives were proven"
    return f"within {plan.gap:.1%} of the proven bound"


def _placement(plan: Plan) -> Picture | Table:
    """Return what each device does in a step (to the barrier, for elastic-bsp), over the table of assignments."""
    table = filled(_assignments(plan))
    timed = [row for row in plan.assignments if row.compute_s is not None]
    if not timed:
        return table
    lanes = [(f"{row.devices} x {shortened(row.device_type, 18)}", _spans(plan, row)) for row in timed[:_LANES_DRAWN]]
    end = plan.superstep.superstep_s if plan.superstep is not None else plan.iteration_s
    word = "superstep" if plan.superstep is not None else "step"
    caption = f"What one device of each kind does until the {word} ends at {show_seconds(end)}."
    if len(timed) > _LANES_DRAWN:
        caption += f" {_LANES_DRAWN} of {len(timed)} kinds are drawn."
    figure = Spans(lanes=lanes, title=f"Timeline of one {word}", mark=(f"{word} ends", end))
    return Picture(figures=[figure], caption=caption, label="predicted", table=table)


def _assignments(plan: Plan) -> Table:
    return Table(
        caption="Devices and what each of them does",
        header=("device type", "devices", "ESTs each", "local batch", "compute"),
        rows=[
            (
                row.device_type,
                str(row.devices),
                str(row.ests_per_device) if plan.est_count else "-",
                f"{row.local_batch_size:,}",
                show_seconds(row.compute_s),
            )
            for row in plan.assignments
        ],
        label="predicted",
    )


def _spans(plan: Plan, row: Assignment) -> list[Span]:
    """Return one device's bars: its ESTs or iterations, waiting, then communication and the rest of a step."""
    compute = row.compute_s or 0.0
    made: list[Span] = []
    if plan.superstep is not None:
        count = plan.superstep.iterations.get(row.device_type, 0)
        drawn = count if count <= _ITERATIONS_DRAWN else 1
        length = compute * count / max(drawn, 1)
        texts = [str(place + 1) for place in range(drawn)] if drawn == count else [f"{count:,} iterations"]
        made = [Span(place * length, (place + 1) * length, "compute", text) for place, text in enumerate(texts)]
        end = plan.superstep.superstep_s
        done = count * compute
    else:
        parts = row.ests_per_device if 1 < row.ests_per_device <= _ITERATIONS_DRAWN else 1
        text = "EST {}" if plan.est_count else f"{row.local_batch_size:,} samples"
        if parts < row.ests_per_device:
            text = f"{row.ests_per_device:,} ESTs"
        made = [
            Span(place * compute / parts, (place + 1) * compute / parts, "compute", text.format(place + 1))
            for place in range(parts)
        ]
        communication_s, other_s = plan.communication_s or 0.0, plan.other_s or 0.0
        done, end = compute, plan.iteration_s - communication_s - other_s
        together = max(end, done)
        if communication_s:
            made.append(Span(together, together + communication_s, "communication"))
        if other_s:
            made.append(Span(together + communication_s, together + communication_s + other_s, "other"))
    if end > done * (1 + 1e-9):
        made.append(Span(done, end, "waiting"))
    return made


def _superstep_table(found: Superstep) -> Table:
    rows = [(name, f"{count:,}") for name, count in found.iterations.items()]
    caption = (
        f"Iterations until the barrier (lookahead {found.lookahead}): {found.mini_batches} mini-batches in "
        f"{show_seconds(found.superstep_s)}; longest waiting {show_seconds(found.waiting_s)}, of all "
        f"{show_seconds(found.total_waiting_s)}; iteration gap {found.iteration_gap}"
    )
    return Table(caption=caption, header=("device type", "iterations"), rows=rows, label="predicted")


def _split_words(plan: Plan, found: BatchSplit) -> str:
    step_s = plan.iteration_s - (plan.communication_s or 0.0)
    if plan.decision is not None:
        step_s = next(option.compute_s for option in plan.decision.options if option.strategy == plan.strategy)
    equal = "memory forbids it"
    if found.equal_s is not None:
        saved = f"{1 - step_s / found.equal_s:.1%} of it saved" if found.equal_s > 0 else "nothing to save"
        equal = f"{show_seconds(found.equal_s)} of computing, {saved}"
    dropped = ", ".join(f"{count} {name}" for name, count in found.dropped.items())
    left = f" Better left out: {dropped}." if dropped else ""
    if found.accumulated_s is not None:
        longer = show_seconds(found.accumulated_s)
        left += f" Accumulation would make the step {longer} where memory limits batches."
    return (
        f"Total batch {found.total_batch_size:,}; the equal split: {equal}. "
        f"Devices wait {show_seconds(found.idle_s)} for the slowest, all together.{left}"
    )


def _goodput(found: GoodputChoice) -> Blocks:
    scaling = Table(
        caption=f"Numbers of {found.device_type} that no smaller number equals; scaling pays until {found.pays_until}",
        header=("devices", "nodes", "local batch", "accumulation", "total batch", "goodput/s", "speedup"),
        rows=[
            (
                *(f"{count:,}" for count in (row.num_replicas, row.num_nodes, row.local_batch_size)),
                str(row.accumulation_steps),
                f"{row.total_batch_size:,}",
                f"{row.goodput_per_s:,.4g}",
                f"{row.speedup:.2f}",
            )
            for row in found.scaling
        ],
        label="predicted",
    )
    line = Line(
        label="best batch",
        x=np.array([row.num_replicas for row in found.scaling], dtype=np.float64),
        y=np.array([row.goodput_per_s for row in found.scaling], dtype=np.float64),
    )
    figure = Lines(
        lines=[line],
        xlabel="devices",
        ylabel="goodput (useful samples/s)",
        title="Goodput over devices",
        draw="points",
        whole="x",
    )
    chosen = (
        f"Chosen: {counted(found.num_replicas, 'device')} on {counted(found.num_nodes, 'node')}, "
        f"total batch {found.total_batch_size:,}, efficiency {found.efficiency:.3f}, speedup {found.speedup:.2f}: "
        f"{found.goodput_per_s:,.4g} useful samples/s. Beyond {found.pays_until} a device brings less than "
        f"{found.pays_share:.0%} of the first."
    )
    return [Picture(figures=[figure], caption=chosen, label="predicted", table=scaling), _elastic(found)]


def _elastic(found: GoodputChoice) -> Table:
    rules = sorted({rule for row in found.elastic for rule in row.learning_rates})
    rows = []
    for row in found.elastic:
        first = "; ".join(" + ".join(map(str, passes)) for passes in row.local_batch_sizes) or "no split"
        nearest = ", ".join(map(str, row.nearest_total_batch_sizes))
        remark = f"{row.reason} (nearest: {nearest})" if row.reason and nearest else row.reason
        rates = (f"{row.learning_rates[rule]:.4g}" if rule in row.learning_rates else "-" for rule in rules)
        rows.append((str(row.world_size), first, *rates, f"{row.steps_per_epoch:,}", remark))
    return filled(
        Table(
            caption=f"Elastic: how to keep a total batch of {found.total_batch_size:,} exactly on every number of processes",
            header=("processes", "local batches", *(f"lr, {rule}" for rule in rules), "steps/epoch", "remark"),
            rows=rows,
            label="predicted",
            text_columns=2,
        )
    )


def _decision_words(found: Decision) -> list[str]:
    """Return the three sentences, and what the comparison left out or took from where."""
    said = list(found.words)
    if found.baseline.other_s:
        besides = show_seconds(found.baseline.other_s)
        said.append(f"every step has {besides} besides, as the earlier run measured: optimizer, loader, waiting")
    said += [f"not compared: {name}: {why}" for name, why in found.left_out.items()]
    return [*said, f"communication from {found.communication_source}"] if found.communication_source else said


def _decision(found: Decision) -> Picture:
    options = [*found.options, found.baseline]
    names = [row.strategy for row in found.options] + ["doing nothing"]
    names = [f"{name} (picked)" if name == found.picked else name for name in names]
    progress = any(option.goodput_per_s is not None for option in options)
    header = ("strategy", "devices", "step", "±", "compute", "exposed", "per s", "stale", "bits", "price/1e6", "order")
    table = Table(
        caption=(
            f"Strategies compared, objective {found.objective}; per s: "
            f"{'useful samples' if progress else 'logical mini-batches'}; stale: iterations of staleness"
        ),
        header=header,
        rows=[_option_row(name, row, progress) for name, row in zip(names, options, strict=True)],
        label="predicted",
        text_columns=2,
        spare=("order", "devices", "compute"),
    )
    figure = Bars(
        rows=[(name, row.throughput) for name, row in zip(names, options, strict=True)],
        xlabel="logical mini-batches per second",
        title="Throughput by strategy",
        level=("doing nothing", found.baseline.throughput),
        intervals=[_rates(row) for row in options],
    )
    caption = f"Strategies for this job, {found.picked} picked: the words above say why."
    return Picture(figures=[figure], caption=caption, label="predicted", table=filled(table))


def _rates(row: Option) -> tuple[float, float] | None:
    """Return between which throughputs a strategy lies, where its error is known."""
    if not row.low_s or not row.high_s:
        return None
    work = row.throughput * row.iteration_s
    return work / row.high_s, work / row.low_s


def _option_row(name: str, row: Option, progress: bool) -> tuple[str, ...]:
    half = None if row.high_s is None else (row.high_s - row.iteration_s) / row.iteration_s
    rate = "-" if row.goodput_per_s is None else f"{row.goodput_per_s:,.0f}"
    if row.goodput_per_s is not None and row.goodput_per_s < 100:
        rate = f"{row.goodput_per_s:.3g}"
    return (
        name,
        ", ".join(f"{count} {device}" for device, count in row.devices.items()),
        show_seconds(row.iteration_s),
        "-" if half is None else f"{half:.0%}",
        show_seconds(row.compute_s),
        show_seconds(row.communication_s),
        rate if progress else f"{row.throughput:.4g}",
        str(row.staleness or "-"),
        row.determinism if row.determinism != "none" else "-",
        "-" if row.price_per_sample is None else f"{row.price_per_sample * 1e6:.3g}",
        row.order,
    )


def _alternatives(plan: Plan) -> Table:
    first: list[Plan | Alternative] = [plan]
    rows = [
        (
            _mix(row.assignments),
            show_seconds(row.iteration_s),
            f"{row.throughput:.4g}",
            str(row.est_count),
            f"{row.waste:.4g}",
            show_seconds(row.overload_factor),
        )
        for row in [*first, *plan.alternatives]
    ]
    return Table(
        caption="The plan, and the next best different ones",
        header=("devices x ESTs", "step", "mini-batches/s", "ESTs", "waste", "overload f"),
        rows=rows,
        label="predicted",
    )


def _mix(rows: Sequence[Assignment]) -> str:
    return ", ".join(f"{row.devices} {row.device_type} x {row.ests_per_device}" for row in rows)


def _network(found: NetworkCost) -> Table:
    rows = [
        (f"{name} (chosen)" if name == found.choice else name, show_seconds(step))
        for name, step in found.best_steps.items()
    ]
    caption = (
        f"Best step by where the devices stand; {found.choice}: {found.num_replicas} devices on {found.num_nodes}, compute "
        f"{show_seconds(found.compute_s)}, synchronisation {show_seconds(found.sync_s)}"
    )
    return Table(caption=caption, header=("devices on", "best step"), rows=rows, label="predicted")


def communication_blocks(
    ddp: BucketSetting | None, fsdp2: PrefetchSetting | None, parameters: Sequence[ParameterRecord]
) -> Blocks:
    """Return the tables of DDP's buckets, FSDP2's prefetch and the order of parameters, where they are set."""
    blocks: Blocks = []
    if ddp is not None:
        sizes = {row.name: row.size_bytes for row in parameters}
        buckets = [
            (
                str(place),
                str(len(bucket)),
                show_bytes(sum(sizes.get(name, 0) for name in bucket)),
                bucket[0] if bucket else "",
            )
            for place, bucket in enumerate(ddp.buckets)
        ]
        cap = "DDP's default" if ddp.bucket_cap_mb is None else f"{ddp.bucket_cap_mb:.4g} MiB"
        caption = (
            f"DDP buckets in the order of reduction (cap {cap}): step {show_seconds(ddp.step_s)}, "
            f"with DDP's default {show_seconds(ddp.default_step_s)} ({share_saved(ddp.step_s, ddp.default_step_s):.1%} saved)"
        )
        header: tuple[str, ...] = ("bucket", "parameters", "size", "first parameter")
        blocks.append(Table(caption=caption, header=header, rows=buckets, label="predicted"))
    if fsdp2 is not None:
        units: list[Sequence[str]] = [
            (unit, ", ".join(fsdp2.forward.get(unit, [])) or "-", ", ".join(fsdp2.backward.get(unit, [])) or "-")
            for unit in fsdp2.units
        ]
        caption = (
            f"FSDP2 units and what each gathers ahead (-: left to it): step {show_seconds(fsdp2.step_s)}, with its own choice "
            f"{show_seconds(fsdp2.default_step_s)} ({share_saved(fsdp2.step_s, fsdp2.default_step_s):.1%} saved)"
        )
        header = ("unit", "ahead in forward", "ahead in backward")
        blocks.append(Table(caption=caption, header=header, rows=units, label="predicted", text_columns=3))
    if parameters:
        ordered = sorted(parameters, key=lambda row: (row.priority is None, row.priority or 0))
        places = [
            (row.name, "-" if row.priority is None else str(row.priority), show_bytes(row.size_bytes))
            for row in ordered
        ]
        caption = f"Order in which {counted(len(parameters), 'parameter')} should travel"
        header = ("parameter", "priority", "size")
        blocks.append(Table(caption=caption, header=header, rows=places, label="predicted"))
    return blocks


def enforcement_section(made: Enforcement, name: str) -> Section:
    """Return the section of what the hook enforces: every rank's batch, and the communication settings."""
    rows = [(str(row.rank), row.device_type, str(row.ests), f"{row.local_batch_size:,}") for row in made.ranks]
    table = Table(
        caption="What each process does", header=("rank", "device type", "ESTs", "local batch"), rows=rows, label="read"
    )
    drawn = made.ranks[:_LANES_DRAWN]
    figure = Bars(
        rows=[(f"rank {row.rank} ({shortened(row.device_type, 10)})", float(row.local_batch_size)) for row in drawn],
        xlabel="local batch size (samples)",
        title="Local batch size by rank",
    )
    some = f" Ranks 0 to {_LANES_DRAWN - 1} of {len(made.ranks)} are drawn." if len(made.ranks) > _LANES_DRAWN else ""
    processes = f"{made.world_size} process{'' if made.world_size == 1 else 'es'}"
    lead = f"Job {shortened(made.job, 60)}, {made.strategy}: {processes}, {made.total_batch_size:,} samples."
    picture = Picture(figures=[figure], caption=f"Samples of each process per step.{some}", label="read", table=table)
    blocks: Blocks = [picture, *communication_blocks(made.ddp, made.fsdp2, made.parameters)]
    return Section(title=f"Enforcement: {name}", lead=[lead], blocks=blocks)


def joint_section(found: JointPlan) -> Section:
    """Return the section of several jobs on the same devices: who gets what, and who waits."""
    rows = []
    for job in found.jobs:
        name = PurePath(job.file).name
        if job.plan is None:
            rows.append((name, "waits", "-", "-", "0 %"))
            continue
        step = show_seconds(job.plan.iteration_s)
        rows.append((name, _mix(job.plan.assignments), step, f"{job.plan.throughput:.4g}", f"{job.relative:.1%}"))
    what = (
        "weighted sum of throughputs relative to alone" if found.objective == "sum" else "smallest relative throughput"
    )
    lead = [job.waits for job in found.jobs if job.waits is not None]
    lead.append(f"{what}: {found.value:.4g}, at most {found.bound:.4g} possible (gap {found.gap:.2%})")
    lead.append(f"solver: {found.status}, {found.solve_seconds:.3f} s")
    header = ("job", "devices x ESTs", "step time", "throughput", "of alone")
    table = Table(caption="Who gets what", header=header, rows=rows, label="predicted", text_columns=2)
    return Section(title=f"{len(rows)} jobs on the same devices", lead=lead, blocks=[table])
