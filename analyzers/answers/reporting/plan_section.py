"""The report's sections of plans, of every strategy, and of what the hook is to enforce.

ESTs are logical workers, of which a device may run several in turn. A superstep is the iterations between two barriers,
where workers iterate at their own pace. A plan's *decision* is its comparison of strategies, each an *option*.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Literal

import numpy as np

from ddltool.analyzers.answers.reporting.figures import (
    Bars,
    Lanes,
    Line,
    Lines,
    Span,
    line,
    stacked,
)
from ddltool.analyzers.answers.reporting.plan_choices import choices_picture, layouts_table, named_table, step_words
from ddltool.analyzers.answers.reporting.section import (
    Blocks,
    Column,
    Picture,
    Section,
    Table,
    Verdict,
    how_many_drawn,
    pictured,
    tabled,
    without_empty_columns,
)
from ddltool.analyzers.step.communication.program import share_saved
from ddltool.decision import LEAST_GAIN, Decision, Option
from ddltool.errors import listed, shortened
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
from ddltool.units import counted, show_bytes, show_hours, show_money, show_rate, show_seconds

_LANES_DRAWN = 16
# Times whose ratio is larger than this are drawn on a logarithmic axis.
_LOG_AXIS_RATIO = 8.0
# A gap to the bound of at least this (times the step) proves nothing of interest.
_UNPROVEN_GAP = 10.0
_ITERATIONS_DRAWN = 80
# Choices between time and price that are listed.
_PARETO_ROWS = 6


def plan_section(plan: Plan, name: str, others: Sequence[Plan] = ()) -> Section:
    """Return the section of one plan: its answer, the choices compared, its placement, and its strategy's own figures.

    All figures are predicted. ``others``: further plans of the page; one of the same job is compared in the verdict.
    """
    decision = plan.decision
    details = [
        f"Job {shortened(plan.job, 60)}, strategy {plan.strategy}: {show_seconds(plan.iteration_s)} per step, "
        f"{plan.throughput:.4g} mini-batches/s of {counted(plan.batch_size, 'sample')} "
        f"on {counted(plan.world_size, 'device')}; {_optimality_words(plan)}, searched for {show_seconds(plan.solve_seconds)}.",
        f"Waste: {plan.waste:.4g} mini-batches/s of {plan.waste + plan.throughput:.4g} on the used devices.",
    ]
    lead = list(decision.words) if decision is not None else [_plain_words(plan)]
    if plan.group is not None:
        details.append(f"Each device of this plan is a group of {plan.group.text}.")
    passes = [
        f"{row.device_type} {row.local_batch_size} in {row.accumulation_steps + 1}"
        for row in plan.assignments
        if row.accumulation_steps
    ]
    if passes:
        details.append(f"In several passes, for memory does not hold them at once: {', '.join(passes)}.")
    blocks: Blocks = [_placement_picture(plan)]
    more: Blocks = []
    if plan.superstep is not None:
        lead += [
            f"Left out: {count} {name}; the others make more without."
            for name, count in plan.superstep.left_out.items()
        ]
        blocks.append(_superstep_table(plan.superstep))
    if plan.split is not None:
        details.append(_split_words(plan, plan.split))
    if plan.goodput is not None:
        blocks += _goodput_blocks(plan.goodput)
    if decision is not None:  # the choices come before what the devices do
        details += _provenance_words(decision)
        more = [_strategies_table(decision)]
        if decision.layouts:  # which say what each device does
            more += [layouts_table(decision.layouts), blocks.pop(0)]
        blocks.insert(0, choices_picture(plan, decision))
        if decision.named:
            blocks.insert(0, named_table(plan, decision))
        if len(decision.pareto) > 1:
            more.insert(0, _pareto_picture(decision, plan))
    if plan.alternatives:
        blocks.append(_alternatives_table(plan))
    if plan.network is not None:
        blocks.append(_network_table(plan.network))
    if plan.compressed is not None:
        lead.append(plan.compressed.verdict)
    more += communication_blocks(plan.ddp, plan.fsdp2, plan.parameters)
    return Section(
        title=f"Plan: {name}{step_words(plan)}",
        lead=lead,
        blocks=blocks,
        verdict=_plan_verdict(plan, name, others),
        details=details,
        more=more,
    )


def _plain_words(plan: Plan) -> str:
    """Return the answer of a plan without a comparison in one sentence: devices, their work, and the step."""
    parts = [
        f"{row.devices} {shortened(row.device_type, 30)}"
        + (f" with {counted(row.ests_per_device, 'logical worker')} each" if row.ests_per_device else "")
        for row in plan.assignments
    ]
    rate = f"{show_rate(plan.throughput * plan.batch_size)} samples/s"
    counts = "" if plan.communication_s is not None or plan.world_size == 1 else ", without communication"
    step = f"{show_seconds(plan.iteration_s)} a step, {rate} (predicted{counts})"
    return f"Use {', '.join(parts)}: {step}; {_optimality_words(plan)}."


def _optimality_words(plan: Plan) -> str:
    """Return in words how far the plan is proven optimal."""
    if plan.status == "optimal":
        return "proven optimal" if plan.sharding is None else f"proven: no layout is {LEAST_GAIN:.0%} better"
    if plan.gap >= _UNPROVEN_GAP:
        return "nothing is proven"
    if plan.gap < 5e-4:
        return "no plan has a shorter step, but the search ended before the other objectives were proven"
    return f"within {plan.gap:.1%} of the proven bound"


def _placement_picture(plan: Plan) -> Picture | Table:
    """Return the timeline of each kind of device in a step (elastic-bsp: in a superstep), with the table of assignments.

    Returns the table alone if the plan has no compute times.
    """
    columns: dict[str, Column[Assignment]] = {"device type": "device_type", "devices": "devices"}
    columns["logical workers each"] = lambda row: str(row.ests_per_device) if plan.est_count else "-"
    columns |= {"local batch": "local_batch_size", "compute": "compute_s"}
    table = without_empty_columns(tabled("Devices and what each of them does", "predicted", plan.assignments, columns))
    timed_rows = [row for row in plan.assignments if row.compute_s is not None]
    if not timed_rows:
        return table
    lanes = [
        (f"{row.devices} x {shortened(row.device_type, 18)}", _device_spans(plan, row))
        for row in timed_rows[:_LANES_DRAWN]
    ]
    if plan.superstep is not None:
        period = "superstep"
        end_s = plan.superstep.superstep_s
    else:
        period = "step"
        end_s = plan.iteration_s
    caption = f"What one device of each kind does until the {period} ends at {show_seconds(end_s)}."
    figure = Lanes(lanes=lanes, title=f"Timeline of one {period}", mark=(f"{period} ends", end_s))
    return pictured(caption + how_many_drawn(_LANES_DRAWN, timed_rows, "kinds"), table, figure)


def _device_spans(plan: Plan, row: Assignment) -> list[Span]:
    """Return the spans of one device of an assignment: ESTs or iterations, waiting, communication, the rest of a step.

    The computation is drawn in equal parts, one for each EST (logical worker) or, in a superstep, for each iteration; as
    one part where there are too many to be told apart.
    """
    communication_s = plan.communication_s or 0.0
    other_s = plan.other_s or 0.0
    part_count = max(row.ests_per_device, 1)
    compute_s = row.compute_s or 0.0
    compute_ends_s = plan.iteration_s - communication_s - other_s  # when the slowest device has computed
    single_text = f"{row.local_batch_size:,} samples"  # of a part; {} is replaced by its number
    merged_text = single_text  # of all parts, where they are drawn as one
    if plan.est_count:
        single_text = "EST {}"
        merged_text = f"{part_count:,} ESTs"
    if plan.superstep is not None:  # iterations of the worker's own until the barrier, drawn without communication
        part_count = plan.superstep.iterations.get(row.device_type, 0)
        compute_s = part_count * compute_s
        compute_ends_s = plan.superstep.superstep_s
        communication_s = 0.0
        other_s = 0.0
        single_text = "{}"
        merged_text = f"{part_count:,} iterations"
    if part_count <= _ITERATIONS_DRAWN:
        texts = [single_text.format(number) for number in range(1, part_count + 1)]
    else:
        texts = [merged_text]
    spans = [
        Span(part * compute_s / len(texts), (part + 1) * compute_s / len(texts), "compute", text)
        for part, text in enumerate(texts)
    ]
    spans += stacked({"communication": communication_s, "other": other_s}, max(compute_ends_s, compute_s))
    if compute_ends_s > compute_s * (1 + 1e-9):  # 1e-9: no span for a difference of rounding
        spans.append(Span(compute_s, compute_ends_s, "waiting"))
    return spans


def _superstep_table(superstep: Superstep) -> Table:
    """Return the table of iterations of each device type until the barrier."""
    caption = (
        f"Iterations until the barrier (lookahead {superstep.lookahead}): {superstep.mini_batches} mini-batches in "
        f"{show_seconds(superstep.superstep_s)}; longest waiting {show_seconds(superstep.waiting_s)}, of all "
        f"{show_seconds(superstep.total_waiting_s)}; iteration gap {superstep.iteration_gap}"
    )
    return tabled(caption, "predicted", superstep.iterations.items(), {"device type": "0", "iterations": "1"})


def _split_words(plan: Plan, split: BatchSplit) -> str:
    """Return the sentences that compare an lb-bsp plan's split of the batch with the equal one."""
    # Compared is computation alone, as equal_s has no communication.
    step_s = plan.iteration_s - (plan.communication_s or 0.0)
    if plan.decision is not None:
        step_s = next(option.compute_s for option in plan.decision.options if option.strategy == plan.strategy)
    equal_text = "memory forbids it"
    if split.equal_s is not None:
        saved = f"{1 - step_s / split.equal_s:.1%} of it saved" if split.equal_s > 0 else "nothing to save"
        equal_text = f"{show_seconds(split.equal_s)} of computing, {saved}"
    dropped = ", ".join(f"{count} {name}" for name, count in split.dropped.items())
    remarks = f" Better left out: {dropped}." if dropped else ""
    if split.goodput_per_s is not None:
        remarks += (
            f" It makes most progress: {split.goodput_per_s:,.4g} useful samples/s, efficiency {split.efficiency:.3f}."
        )
    if split.accumulated_s is not None:
        accumulated = show_seconds(split.accumulated_s)
        remarks += f" Accumulation would make the step {accumulated} where memory limits batches."
    return (
        f"Total batch {split.total_batch_size:,}; the equal split: {equal_text}. "
        f"Devices wait {show_seconds(split.idle_s)} for the slowest, all together.{remarks}"
    )


def _goodput_blocks(choice: GoodputChoice) -> Blocks:
    """Return the picture of goodput over numbers of devices, and the table of elastic settings."""
    columns = {"devices": "num_replicas", "nodes": "num_nodes", "local batch": "local_batch_size"}
    columns |= {"accumulation": "accumulation_steps", "total batch": "total_batch_size"}
    columns |= {"goodput/s": "goodput_per_s:,.4g", "speedup": "speedup:.2f"}
    caption = f"Numbers of {choice.device_type} that no smaller number equals; scaling pays until {choice.pays_until}"
    lines = [line("best batch", choice.scaling, "num_replicas", "goodput_per_s")]
    title, ylabel = "Goodput over devices", "goodput (useful samples/s)"
    figure = Lines(lines=lines, xlabel="devices", ylabel=ylabel, title=title, draw="points", whole="x")
    choice_words = (
        f"Chosen: {counted(choice.num_replicas, 'device')} on {counted(choice.num_nodes, 'node')}, "
        f"total batch {choice.total_batch_size:,}, efficiency {choice.efficiency:.3f}, speedup {choice.speedup:.2f}: "
        f"{choice.goodput_per_s:,.4g} useful samples/s. Beyond {choice.pays_until} a device brings less than "
        f"{choice.pays_share:.0%} of the first."
    )
    return [
        pictured(choice_words, tabled(caption, "predicted", choice.scaling, columns), figure),
        _elastic_table(choice),
    ]


def _elastic_table(choice: GoodputChoice) -> Table:
    """Return the table of how each number of processes splits the chosen total batch."""
    rules = sorted({rule for row in choice.elastic for rule in row.learning_rates})
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
    caption = f"Elastic: how to keep a total batch of {choice.total_batch_size:,} exactly on every number of processes"
    return without_empty_columns(tabled(caption, "predicted", choice.elastic, columns, text_columns=2))


def _provenance_words(decision: Decision) -> list[str]:
    """Return sentences on strategies that were not compared, with reasons, and on the source of communication times."""
    sentences = []
    if decision.baseline.other_s:
        other_text = show_seconds(decision.baseline.other_s)
        sentences.append(
            f"every step has {other_text} besides, as the earlier run measured: optimizer, loader, waiting"
        )
    reasons: dict[str, list[str]] = {}
    for name, reason in decision.left_out.items():
        reasons.setdefault(reason, []).append(name)
    sentences += [f"not compared: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    if decision.communication_source:
        sentences.append(f"communication from {decision.communication_source}")
    return sentences


def _strategies_table(decision: Decision) -> Table:
    """Return the table of strategies: devices, parts of a step, staleness, determinism, price, and why not picked."""
    options = [*decision.options, *decision.baselines.values()]
    names = [f"{row.strategy} (picked)" if not row.why_not else row.strategy for row in decision.options]
    names += [f"usual: {name}" for name in decision.baselines]
    has_goodput = any(option.goodput_per_s is not None for option in options)
    columns: dict[str, Column[Option]] = {
        "devices": lambda row: ", ".join(f"{count} {device}" for device, count in row.devices.items()),
        "step": "iteration_s",
        "±": lambda row: None if row.high_s is None else f"{(row.high_s - row.iteration_s) / row.iteration_s:.0%}",
        "compute": "compute_s",
        "exposed": "communication_s",
        "per s": _goodput_text if has_goodput else "throughput",
        "stale": lambda row: row.staleness or None,
        "bits": lambda row: row.determinism if row.determinism != "none" else None,
        "price/1e6": lambda row: None if row.price_per_sample is None else f"{row.price_per_sample * 1e6:.3g}",
        "why not": lambda row: row.why_not or None,
    }
    caption = (
        f"Strategies, each on the devices where it is best, objective {decision.objective}; per s: "
        f"{'useful samples' if has_goodput else 'logical mini-batches'}; stale: iterations of staleness; usual: an equal "
        "split, communication as it comes"
    )
    spare = ("compute", "exposed", "bits", "stale", "±")
    return without_empty_columns(
        tabled(caption, "predicted", options, columns, names=("strategy", names), text_columns=2, spare=spare)
    )


def _pareto_picture(decision: Decision, plan: Plan) -> Picture:
    """Return the picture of time against price of the Pareto-optimal options, with their table.

    Both are of the whole run if it is known, else of a million samples. Of many options six are shown, evenly spread.
    """
    run = decision.run
    picked = next(option for option in decision.options if option.strategy == plan.strategy)
    samples = 1e6 if run is None else run.samples
    # The share that failures and restarts add to the picked plan's time is assumed for all.
    restart_factor = 1.0 if run is None else run.hours * 3600 / (run.steps * picked.iteration_s)

    def hours(row: Option) -> float:
        """Return the hours that the samples take with an option."""
        return restart_factor * samples / (row.throughput * plan.batch_size) / 3600

    def price(row: Option) -> float:
        """Return the price of the samples with an option, in US dollars."""
        return restart_factor * samples * (row.price_per_sample or 0.0)

    drawn_options = decision.pareto
    if len(drawn_options) > _PARETO_ROWS:
        last = len(decision.pareto) - 1
        indices = [round(point * last / (_PARETO_ROWS - 1)) for point in range(_PARETO_ROWS)]
        drawn_options = [decision.pareto[index] for index in indices]
    names = [" + ".join(f"{count} {name}" for name, count in row.devices.items()) for row in drawn_options]
    columns: dict[str, Column[Option]] = {
        "strategy": "strategy",
        "time": lambda row: show_hours(hours(row)),
        "price": lambda row: show_money(price(row)),
    }
    work = "a million samples" if run is None else "the whole run"
    caption = f"Time against price of {work}: of what was looked at, nothing is both sooner and cheaper"
    table = tabled(caption, "predicted", drawn_options, columns, names=("devices", names), text_columns=2)
    points = np.array([(hours(row), price(row)) for row in drawn_options])
    lines = [Line(label="choices", x=points[:, 0], y=points[:, 1], texts=names)]
    lines.append(Line(label="picked", x=np.array([hours(picked)]), y=np.array([price(picked)])))
    axis: Literal["linear", "log"] = "log" if points[-1, 0] > _LOG_AXIS_RATIO * points[0, 0] else "linear"
    title = "Time against price"
    figure = Lines(lines=lines, xlabel="hours", ylabel="price", title=title, draw="points", x_axis=axis)
    return pictured(f"{caption}.", table, figure)


def _goodput_text(row: Option) -> str | None:
    """Return an option's goodput, in useful samples per second, as text; None if it is not known."""
    rate = row.goodput_per_s
    if rate is None:
        return None
    return f"{rate:.3g}" if rate < 100 else f"{rate:,.0f}"


def _alternatives_table(plan: Plan) -> Table:
    """Return the table of the plan and its alternatives."""
    rows: list[Plan | Alternative] = [plan, *plan.alternatives]
    columns: dict[str, Column[Plan | Alternative]] = {
        "devices x ESTs": lambda row: _assignment_text(row.assignments),
        "step": "iteration_s",
        "mini-batches/s": "throughput",
        "ESTs": "est_count",
        "waste": "waste",
        "overload f": lambda row: show_seconds(row.overload_factor),
    }
    return tabled("The plan, and the next best different ones", "predicted", rows, columns)


def _assignment_text(rows: Sequence[Assignment]) -> str:
    """Return assignments as text: "2 V100 x 3" for two V100 with three ESTs each."""
    return ", ".join(f"{row.devices} {row.device_type} x {row.ests_per_device}" for row in rows)


def _network_table(network: NetworkCost) -> Table:
    """Return the table of the best step for each way to spread the devices over nodes."""
    names = [f"{name} (chosen)" if name == network.choice else name for name in network.best_steps]
    caption = (
        f"Best step by where the devices stand; {network.choice}: {network.num_replicas} devices on {network.num_nodes}, "
        f"compute {show_seconds(network.compute_s)}, synchronisation {show_seconds(network.sync_s)}"
    )
    columns = {"best step": show_seconds}
    return tabled(caption, "predicted", network.best_steps.values(), columns, names=("devices on", names))


def communication_blocks(
    ddp: BucketSetting | None, fsdp2: PrefetchSetting | None, parameters: Sequence[ParameterRecord]
) -> Blocks:
    """Return the tables of DDP's buckets, FSDP2's prefetch lists and the order of parameters, of those that are set."""
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
        bucket_names = ("bucket", map(str, range(len(ddp.buckets))))
        blocks.append(tabled(caption, "predicted", ddp.buckets, buckets, names=bucket_names))
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
        listed_units = [unit for unit in fsdp2.units if unit in fsdp2.forward or unit in fsdp2.backward]
        blocks.append(tabled(caption, "predicted", listed_units, units, text_columns=3))
    if any(row.priority is not None for row in parameters):
        ordered = sorted(parameters, key=lambda row: (row.priority is None, row.priority or 0))
        columns = {"parameter": "name", "priority": "priority", "size": "size_bytes"}
        caption = f"Order in which {counted(len(parameters), 'parameter')} should travel"
        blocks.append(tabled(caption, "predicted", ordered, columns))
    return blocks


def enforcement_section(enforcement: Enforcement, name: str) -> Section:
    """Return the section of the hook's configuration: every rank's batch, and the communication settings."""
    columns = {"rank": "rank", "device type": "device_type", "ESTs": "ests", "local batch": "local_batch_size"}
    table = tabled("What each process does", "read", enforcement.ranks, columns)
    rows = [
        (f"rank {row.rank} ({shortened(row.device_type, 10)})", float(row.local_batch_size))
        for row in enforcement.ranks[:_LANES_DRAWN]
    ]
    figure = Bars(rows=rows, xlabel="local batch size (samples)", title="Local batch size by rank")
    lead = f"Job {shortened(enforcement.job, 60)}, {enforcement.strategy}: {counted(enforcement.world_size, 'rank')}, "
    lead += f"{enforcement.total_batch_size:,} samples."
    caption = f"Samples of each process per step.{how_many_drawn(_LANES_DRAWN, enforcement.ranks, 'ranks')}"
    blocks: Blocks = [
        pictured(caption, table, figure),
        *communication_blocks(enforcement.ddp, enforcement.fsdp2, enforcement.parameters),
    ]
    return Section(title=f"Enforcement: {name}", lead=[lead], blocks=blocks, verdict=_enforcement_verdict(enforcement))


def joint_section(result: JointPlan) -> Section:
    """Return the section of a joint plan: the devices of each job with their logical workers (ESTs), and the jobs that wait."""
    columns: dict[str, Column[JointJob]] = {
        "job": lambda job: PurePath(job.file).name,
        "devices x ESTs": lambda job: "waits" if job.plan is None else _assignment_text(job.plan.assignments),
        "step time": "plan.iteration_s",
        "throughput": "plan.throughput",
        "of alone": lambda job: "0 %" if job.plan is None else f"{job.relative:.1%}",
    }
    is_sum = result.objective == "sum"
    objective = "weighted sum of throughputs relative to alone" if is_sum else "smallest relative throughput"
    # `waits` is the sentence that says why a job waits.
    lead = [job.waits for job in result.jobs if job.waits is not None]
    lead.append(f"{objective}: {result.value:.4g}, at most {result.bound:.4g} possible (gap {result.gap:.2%})")
    lead.append(f"solver: {result.status}, {result.solve_seconds:.3f} s")
    table = tabled("Who gets what", "predicted", result.jobs, columns, text_columns=2)
    return Section(title=f"{len(result.jobs)} jobs on the same devices", lead=lead, blocks=[table])


def _plan_verdict(plan: Plan, name: str, others: Sequence[Plan]) -> Verdict:
    """Return the verdict of a plan: the answer of its comparison; without one its throughput, against a rival's.

    The rival is the first of ``others`` with the same job and another strategy. ``name``: the plan's file.
    """
    decision = plan.decision
    next_step = f"ddltool emit {name} -o enforce.json, train with it, then ddltool verify"
    if decision is not None:
        return Verdict(
            answer=decision.words[0],
            sure=decision.how_sure,
            then=next_step,
            good=None if decision.too_close else True,
        )
    rival = next((other for other in others if other.job == plan.job and other.strategy != plan.strategy), None)
    answer, is_good = _plain_words(plan), None
    if rival is not None and rival.throughput > 0:
        gain = plan.throughput / rival.throughput - 1
        answer = f"{answer.removesuffix('.')}, {gain:+.1%} against {rival.strategy}."
        is_good = gain >= 0
    certainty = "not known: its times come without an error; plan --strategy auto gives an interval where they have one"
    return Verdict(answer=answer, sure=certainty, then=next_step, good=is_good, minor=is_good is False)


def _enforcement_verdict(enforcement: Enforcement) -> Verdict:
    """Return the verdict of a hook's configuration: the local batches of its ranks."""
    batch_sizes = listed([str(rank.local_batch_size) for rank in enforcement.ranks], 8)
    answer = f"{counted(enforcement.world_size, 'rank')}, local batches {batch_sizes}."
    return Verdict(answer=answer, then="attach(...) in the script follows it; telemetry says what happened")
