"""The report's sections of plans, of every strategy, and of what the hook is to enforce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Literal

import numpy as np

from ddltool.analyzers.communication.program import share_saved
from ddltool.analyzers.reporting.figures import Bars, Line, Lines, Span, Spans, line, stacked
from ddltool.analyzers.reporting.section import Blocks, Column, Picture, Section, Table, filled, pictured, some, tabled
from ddltool.decision import Decision, Layout, Option
from ddltool.errors import shortened
from ddltool.plans import (
    Alternative,
    Assignment,
    BatchSplit,
    BucketSetting,
    ElasticSetting,
    Enforcement,
    GoodputChoice,
    NetworkCost,
    ParameterRecord,
    Plan,
    PrefetchSetting,
    Superstep,
)
from ddltool.results import JointJob, JointPlan
from ddltool.units import counted, show_bytes, show_hours, show_money, show_seconds

_LANES_DRAWN = 16
# Of layouts closer than this the simplest is taken.
_AS_GOOD = 0.02
# Times so many apart are drawn on a logarithmic axis.
_FAR = 8.0
# A gap of so many times says nothing.
_UNPROVEN = 10.0
_ITERATIONS_DRAWN = 80
# Choices between time and price that are listed.
_CHOICES = 6


def plan_section(plan: Plan, name: str) -> Section:
    """Return the section of one plan: its step, its placement, and what its strategy adds. All predicted."""
    used, decision = plan.waste + plan.throughput, plan.decision
    figures = (
        f"Job {shortened(plan.job, 60)}, strategy {plan.strategy}: {show_seconds(plan.iteration_s)} per step, "
        f"{plan.throughput:.4g} mini-batches/s of {counted(plan.batch_size, 'sample')} "
        f"on {counted(plan.world_size, 'device')}; {_proof(plan)} ({show_seconds(plan.solve_seconds)})."
    )
    lead = [*([] if decision is None else decision.words), figures]
    lead.append(f"Waste: {plan.waste:.4g} mini-batches/s of {used:.4g} on the used devices.")
    if plan.group is not None:
        lead.append(f"Each device of this plan is a group of {plan.group.text}.")
    several = [row for row in plan.assignments if row.accumulation_steps]
    if passes := [f"{row.device_type} {row.local_batch_size} in {row.accumulation_steps + 1}" for row in several]:
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
    if decision is not None:
        lead += _provenance(decision)
        blocks.insert(0, _decision(decision))
        if len(decision.pareto) > 1:
            blocks.insert(1, _pareto(decision, plan))
        if decision.layouts:
            blocks.insert(1, layouts_table(decision.layouts))
    if plan.alternatives:
        blocks.append(_alternatives(plan))
    if plan.network is not None:
        blocks.append(_network(plan.network))
    lead += [plan.compressed.verdict] if plan.compressed is not None else []
    blocks += communication_blocks(plan.ddp, plan.fsdp2, plan.parameters)
    return Section(title=f"Plan ({plan.strategy}): {name}", lead=lead, blocks=blocks)


def _proof(plan: Plan) -> str:
    if plan.status == "optimal":
        return "proven optimal" if plan.sharding is None else f"proven: no layout is {_AS_GOOD:.0%} better"
    if plan.gap >= _UNPROVEN:
        return "nothing is proven"
    if plan.gap < 5e-4:
        return "no plan has a shorter step, but the search ended before the other objectives were proven"
    return f"within {plan.gap:.1%} of the proven bound"


def _placement(plan: Plan) -> Picture | Table:
    """Return what each device does in a step (to the barrier, for elastic-bsp), over the table of assignments."""
    columns: dict[str, Column[Assignment]] = {"device type": "device_type", "devices": "devices"}
    columns["ESTs each"] = lambda row: str(row.ests_per_device) if plan.est_count else "-"
    columns |= {"local batch": "local_batch_size", "compute": "compute_s"}
    table = filled(tabled("Devices and what each of them does", "predicted", plan.assignments, columns))
    timed = [row for row in plan.assignments if row.compute_s is not None]
    if not timed:
        return table
    lanes = [(f"{row.devices} x {shortened(row.device_type, 18)}", _spans(plan, row)) for row in timed[:_LANES_DRAWN]]
    word, end = ("superstep", plan.superstep.superstep_s) if plan.superstep is not None else ("step", plan.iteration_s)
    caption = f"What one device of each kind does until the {word} ends at {show_seconds(end)}."
    figure = Spans(lanes=lanes, title=f"Timeline of one {word}", mark=(f"{word} ends", end))
    return pictured(caption + some(_LANES_DRAWN, timed, "kinds"), table, figure)


def _spans(plan: Plan, row: Assignment) -> list[Span]:
    """Return one device's bars: its ESTs or iterations, waiting, then communication and the rest of a step."""
    communication_s, other_s = plan.communication_s or 0.0, plan.other_s or 0.0
    count, compute = max(row.ests_per_device, 1), row.compute_s or 0.0
    end = plan.iteration_s - communication_s - other_s
    one, many = ("EST {}", f"{count:,} ESTs") if plan.est_count else (f"{row.local_batch_size:,} samples",) * 2
    if plan.superstep is not None:
        count = plan.superstep.iterations.get(row.device_type, 0)
        compute, end, communication_s, other_s = count * compute, plan.superstep.superstep_s, 0.0, 0.0
        one, many = "{}", f"{count:,} iterations"
    parts = count if count <= _ITERATIONS_DRAWN else 1
    texts = [one.format(place + 1) for place in range(parts)] if parts == count else [many]
    made = [
        Span(place * compute / parts, (place + 1) * compute / parts, "compute", text)
        for place, text in enumerate(texts)
    ]
    made += stacked({"communication": communication_s, "other": other_s}, max(end, compute))
    return [*made, Span(compute, end, "waiting")] if end > compute * (1 + 1e-9) else made


def _superstep_table(found: Superstep) -> Table:
    caption = (
        f"Iterations until the barrier (lookahead {found.lookahead}): {found.mini_batches} mini-batches in "
        f"{show_seconds(found.superstep_s)}; longest waiting {show_seconds(found.waiting_s)}, of all "
        f"{show_seconds(found.total_waiting_s)}; iteration gap {found.iteration_gap}"
    )
    return tabled(caption, "predicted", found.iterations.items(), {"device type": "0", "iterations": "1"})


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
    columns = {"devices": "num_replicas", "nodes": "num_nodes", "local batch": "local_batch_size"}
    columns |= {"accumulation": "accumulation_steps", "total batch": "total_batch_size"}
    columns |= {"goodput/s": "goodput_per_s:,.4g", "speedup": "speedup:.2f"}
    caption = f"Numbers of {found.device_type} that no smaller number equals; scaling pays until {found.pays_until}"
    lines = [line("best batch", found.scaling, "num_replicas", "goodput_per_s")]
    title, ylabel = "Goodput over devices", "goodput (useful samples/s)"
    figure = Lines(lines=lines, xlabel="devices", ylabel=ylabel, title=title, draw="points", whole="x")
    chosen = (
        f"Chosen: {counted(found.num_replicas, 'device')} on {counted(found.num_nodes, 'node')}, "
        f"total batch {found.total_batch_size:,}, efficiency {found.efficiency:.3f}, speedup {found.speedup:.2f}: "
        f"{found.goodput_per_s:,.4g} useful samples/s. Beyond {found.pays_until} a device brings less than "
        f"{found.pays_share:.0%} of the first."
    )
    return [pictured(chosen, tabled(caption, "predicted", found.scaling, columns), figure), _elastic(found)]


def _elastic(found: GoodputChoice) -> Table:
    rules = sorted({rule for row in found.elastic for rule in row.learning_rates})
    columns: dict[str, Column[ElasticSetting]] = {
        "processes": "world_size",
        "local batches": lambda row: (
            "; ".join(" + ".join(map(str, passes)) for passes in row.local_batch_sizes) or "no split"
        ),
        **{f"lr, {rule}": f"learning_rates.{rule}:.4g" for rule in rules},
        "steps/epoch": "steps_per_epoch",
        "remark": lambda row: (
            f"{row.reason} (nearest: {', '.join(map(str, row.nearest_total_batch_sizes))})"
            if row.reason and row.nearest_total_batch_sizes
            else row.reason
        ),
    }
    caption = f"Elastic: how to keep a total batch of {found.total_batch_size:,} exactly on every number of processes"
    return filled(tabled(caption, "predicted", found.elastic, columns, text_columns=2))


def _provenance(found: Decision) -> list[str]:
    """Return what the comparison left out, and where it took what from."""
    said = []
    if found.baseline.other_s:
        besides = show_seconds(found.baseline.other_s)
        said.append(f"every step has {besides} besides, as the earlier run measured: optimizer, loader, waiting")
    reasons: dict[str, list[str]] = {}
    for name, why in found.left_out.items():
        reasons.setdefault(why, []).append(name)
    said += [f"not compared: {', '.join(names)}: {why}" for why, names in reasons.items()]
    return [*said, f"communication from {found.communication_source}"] if found.communication_source else said


def layouts_table(layouts: Sequence[Layout]) -> Table:
    """Return the ways to shard and checkpoint a model: the time and memory of each, and what those that do not fit lack."""
    types = sorted({name for row in layouts for name in row.devices})

    def each(values: Mapping[str, object]) -> str:
        return " / ".join(str(values.get(name, "-")) for name in types)

    columns: dict[str, Column[Layout]] = {
        "n": lambda row: each(row.devices) if len(types) > 1 else str(sum(row.devices.values())),
        "batch": lambda row: each(row.local_batch_sizes) + (f" in {row.passes}" if row.passes > 1 else ""),
        "step": "step_s",
        "GiB": lambda row: f"{max(row.memory_bytes.values()) / 2**30:.1f}",
        "missing": lambda row: f"{row.missing_bytes / 2**30:.1f}" if row.missing_bytes else None,
        "price/1e6": lambda row: None if row.price_per_sample is None else f"{row.price_per_sample * 1e6:.3g}",
    }
    caption = (
        f"Ways to hold the model on {' / '.join(types)}: with which checkpointing, on n of them, batch: samples "
        "per step of each (in passes); GiB of tensors in a process, and what is missing where it does not fit"
    )
    shown = (row.text.replace("without resharding", "kept gathered").removesuffix(" checkpointing") for row in layouts)
    names = ("layout", shown)
    return filled(tabled(caption, "predicted", layouts, columns, names=names, text_columns=3, spare=("price/1e6",)))


def _decision(found: Decision) -> Picture:
    usual = {name: it for name, it in found.baselines.items() if name.startswith("all ") or name == found.baseline_name}
    options = [*found.options, *usual.values()]
    names = [f"{row.strategy} (picked)" if not row.why_not else row.strategy for row in found.options]
    names += [f"usual: {name.removesuffix(', equally')}" for name in usual]
    progress = any(option.goodput_per_s is not None for option in options)
    columns: dict[str, Column[Option]] = {
        "devices": lambda row: ", ".join(f"{count} {device}" for device, count in row.devices.items()),
        "step": "iteration_s",
        "±": lambda row: None if row.high_s is None else f"{(row.high_s - row.iteration_s) / row.iteration_s:.0%}",
        "compute": "compute_s",
        "exposed": "communication_s",
        "per s": _goodput_text if progress else "throughput",
        "stale": lambda row: row.staleness or None,
        "bits": lambda row: row.determinism if row.determinism != "none" else None,
        "price/1e6": lambda row: None if row.price_per_sample is None else f"{row.price_per_sample * 1e6:.3g}",
        "why not": lambda row: row.why_not or None,
    }
    caption = (
        f"Strategies, each on the devices where it is best, objective {found.objective}; per s: "
        f"{'useful samples' if progress else 'logical mini-batches'}; stale: iterations of staleness; usual: an equal split, "
        "communication as it comes"
    )
    spare = ("compute", "exposed", "bits")
    table = filled(
        tabled(caption, "predicted", options, columns, names=("strategy", names), text_columns=2, spare=spare)
    )
    figure = Bars(
        rows=[(name, row.throughput) for name, row in zip(names, options, strict=True)],
        xlabel="logical mini-batches per second",
        title="Throughput by strategy",
        level=(found.baseline_name, found.baseline.throughput),
        intervals=[_rates(row) for row in options],
    )
    return pictured(f"Strategies for this job, {found.picked} picked: the words above say why.", filled(table), figure)


def _pareto(found: Decision, plan: Plan) -> Picture:
    """Return what may be chosen between time and money: of the whole run where it is known, else of a million samples."""
    run, picked = found.run, next(option for option in found.options if option.strategy == plan.strategy)
    samples = 1e6 if run is None else run.samples
    # restarts included, as in the picked plan
    lost = 1.0 if run is None else run.hours * 3600 / (run.steps * picked.iteration_s)

    def hours(row: Option) -> float:
        return lost * samples / (row.throughput * plan.batch_size) / 3600

    def price(row: Option) -> float:
        return lost * samples * (row.price_per_sample or 0.0)

    shown = found.pareto
    if len(shown) > _CHOICES:
        shown = [shown[round(place * (len(shown) - 1) / (_CHOICES - 1))] for place in range(_CHOICES)]
    names = [" + ".join(f"{count} {name}" for name, count in row.devices.items()) for row in shown]
    columns: dict[str, Column[Option]] = {
        "strategy": "strategy",
        "time": lambda row: show_hours(hours(row)),
        "price": lambda row: show_money(price(row)),
    }
    what = "a million samples" if run is None else "the whole run"
    caption = f"Time against price of {what}: of what was looked at, nothing is both sooner and cheaper"
    table = tabled(caption, "predicted", shown, columns, names=("devices", names), text_columns=2)
    points = np.array([(hours(row), price(row)) for row in shown])
    lines = [Line(label="choices", x=points[:, 0], y=points[:, 1], texts=names)]
    lines.append(Line(label="picked", x=np.array([hours(picked)]), y=np.array([price(picked)])))
    axis: Literal["linear", "log"] = "log" if points[-1, 0] > _FAR * points[0, 0] else "linear"
    title = "Time against price"
    figure = Lines(lines=lines, xlabel="hours", ylabel="price", title=title, draw="points", x_axis=axis)
    return pictured(f"{caption}.", table, figure)


def _rates(row: Option) -> tuple[float, float] | None:
    """Return between which throughputs a strategy lies, where its error is known."""
    if not row.low_s or not row.high_s:
        return None
    work = row.throughput * row.iteration_s
    return work / row.high_s, work / row.low_s


def _goodput_text(row: Option) -> str | None:
    rate = row.goodput_per_s
    return None if rate is None else f"{rate:.3g}" if rate < 100 else f"{rate:,.0f}"


def _alternatives(plan: Plan) -> Table:
    plans: list[Plan | Alternative] = [plan, *plan.alternatives]
    columns: dict[str, Column[Plan | Alternative]] = {
        "devices x ESTs": lambda row: _mix(row.assignments),
        **{"step": "iteration_s", "mini-batches/s": "throughput", "ESTs": "est_count", "waste": "waste"},
        "overload f": lambda row: show_seconds(row.overload_factor),
    }
    return tabled("The plan, and the next best different ones", "predicted", plans, columns)


def _mix(rows: Sequence[Assignment]) -> str:
    return ", ".join(f"{row.devices} {row.device_type} x {row.ests_per_device}" for row in rows)


def _network(found: NetworkCost) -> Table:
    names = [f"{name} (chosen)" if name == found.choice else name for name in found.best_steps]
    caption = (
        f"Best step by where the devices stand; {found.choice}: {found.num_replicas} devices on {found.num_nodes}, compute "
        f"{show_seconds(found.compute_s)}, synchronisation {show_seconds(found.sync_s)}"
    )
    columns = {"best step": show_seconds}
    return tabled(caption, "predicted", found.best_steps.values(), columns, names=("devices on", names))


def communication_blocks(
    ddp: BucketSetting | None, fsdp2: PrefetchSetting | None, parameters: Sequence[ParameterRecord]
) -> Blocks:
    """Return the tables of DDP's buckets, FSDP2's prefetch and the order of parameters, where they are set."""
    blocks: Blocks = []
    if ddp is not None:
        sizes = {row.name: row.size_bytes for row in parameters}
        buckets: dict[str, Column[Sequence[str]]] = {
            "parameters": len,
            "size": lambda bucket: show_bytes(sum(sizes.get(name, 0) for name in bucket)),
            "first parameter": lambda bucket: bucket[0] if bucket else "",
        }
        cap = "DDP's default" if ddp.bucket_cap_mb is None else f"{ddp.bucket_cap_mb:.4g} MiB"
        caption = (
            f"DDP buckets in the order of reduction (cap {cap}): step {show_seconds(ddp.step_s)}, "
            f"with DDP's default {show_seconds(ddp.default_step_s)} ({share_saved(ddp.step_s, ddp.default_step_s):.1%} saved)"
        )
        places = ("bucket", map(str, range(len(ddp.buckets))))
        blocks.append(tabled(caption, "predicted", ddp.buckets, buckets, names=places))
    if fsdp2 is not None and (fsdp2.forward or fsdp2.backward):
        units: dict[str, Column[str]] = {
            "unit": lambda unit: unit,
            "ahead in forward": lambda unit: ", ".join(fsdp2.forward.get(unit, [])) or None,
            "ahead in backward": lambda unit: ", ".join(fsdp2.backward.get(unit, [])) or None,
        }
        caption = (
            f"FSDP2 units and what each gathers ahead (-: left to it): step {show_seconds(fsdp2.step_s)}, with its own choice "
            f"{show_seconds(fsdp2.default_step_s)} ({share_saved(fsdp2.step_s, fsdp2.default_step_s):.1%} saved)"
        )
        listed = [unit for unit in fsdp2.units if unit in fsdp2.forward or unit in fsdp2.backward]
        blocks.append(tabled(caption, "predicted", listed, units, text_columns=3))
    if any(row.priority is not None for row in parameters):
        ordered = sorted(parameters, key=lambda row: (row.priority is None, row.priority or 0))
        columns = {"parameter": "name", "priority": "priority", "size": "size_bytes"}
        caption = f"Order in which {counted(len(parameters), 'parameter')} should travel"
        blocks.append(tabled(caption, "predicted", ordered, columns))
    return blocks


def enforcement_section(made: Enforcement, name: str) -> Section:
    """Return the section of what the hook enforces: every rank's batch, and the communication settings."""
    columns = {"rank": "rank", "device type": "device_type", "ESTs": "ests", "local batch": "local_batch_size"}
    table = tabled("What each process does", "read", made.ranks, columns)
    rows = [
        (f"rank {row.rank} ({shortened(row.device_type, 10)})", float(row.local_batch_size))
        for row in made.ranks[:_LANES_DRAWN]
    ]
    figure = Bars(rows=rows, xlabel="local batch size (samples)", title="Local batch size by rank")
    lead = f"Job {shortened(made.job, 60)}, {made.strategy}: {counted(made.world_size, 'rank')}, "
    lead += f"{made.total_batch_size:,} samples."
    caption = f"Samples of each process per step.{some(_LANES_DRAWN, made.ranks, 'ranks')}"
    blocks: Blocks = [pictured(caption, table, figure), *communication_blocks(made.ddp, made.fsdp2, made.parameters)]
    return Section(title=f"Enforcement: {name}", lead=[lead], blocks=blocks)


def joint_section(found: JointPlan) -> Section:
    """Return the section of several jobs on the same devices: who gets what, and who waits."""
    columns: dict[str, Column[JointJob]] = {
        "job": lambda job: PurePath(job.file).name,
        "devices x ESTs": lambda job: "waits" if job.plan is None else _mix(job.plan.assignments),
        **{"step time": "plan.iteration_s", "throughput": "plan.throughput"},
        "of alone": lambda job: "0 %" if job.plan is None else f"{job.relative:.1%}",
    }
    what = "weighted sum of throughputs relative to alone"
    what = what if found.objective == "sum" else "smallest relative throughput"
    lead = [job.waits for job in found.jobs if job.waits is not None]
    lead.append(f"{what}: {found.value:.4g}, at most {found.bound:.4g} possible (gap {found.gap:.2%})")
    lead.append(f"solver: {found.status}, {found.solve_seconds:.3f} s")
    table = tabled("Who gets what", "predicted", found.jobs, columns, text_columns=2)
    return Section(title=f"{len(found.jobs)} jobs on the same devices", lead=lead, blocks=[table])
