"""Sentences that explain a decision: the recommendation, why, how sure, and what to do next. Start at :func:`explained`.

:mod:`~.compare` makes the decision. Functions called ``..._clause`` return a part of a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ddltool.analyzers.job.placement.problem import Problem
from ddltool.analyzers.job.planning.exposed import FITTED, MEASURED
from ddltool.analyzers.job.planning.job_model import JobModel
from ddltool.analyzers.job.planning.options import HOUR_S
from ddltool.decision import LEAST_GAIN, Decision, FailureFigures, Layout, Option, RunFigures
from ddltool.job import Job
from ddltool.plans import Plan
from ddltool.precision import no_rate_words, precision_of
from ddltool.units import counted, faster_than, show_bytes, show_hours, show_money, show_rate, show_seconds

Value = Callable[[Option], float]
"""Returns the number that options are ranked by; higher is better."""
# Share of communication in a step above which larger batches gain more than any strategy.
_STARVED = 0.5
# Waiting for the host is said from this share of a step on.
_WORTH_SAYING = 0.1
# Smaller shares are printed as 0 %, or with one decimal as 0.0 %.
_LEAST_SHOWN, _LEAST_TENTH = 0.005, 0.0005
# Share of a step below which communication is not worth mentioning.
_NO_COMMUNICATION = 5e-5
# Objective -> words for an option that is better, and for one that is worse; else faster and slower.
_BETTER = {
    "cheapest": ("cheaper per sample", "dearer per sample"),
    "least-memory": ("less memory", "more memory"),
    "fewest-devices": ("fewer devices", "more devices"),
}
# Strategy -> why it is the best where it is picked.
_WHY = {
    "bsp": "equal shares are as good as anything else here",
    "lb-bsp": "every device gets the share of the batch that lets all end together",
    "est": "logical workers keep their data, random numbers and order of sums on any number of devices",
    "goodput": "this number of devices and this batch make most progress per second by the fitted model",
    "elastic-bsp": "devices make iterations of their own between barriers, so none waits for a slower one",
}


_WHY_TENSORS = "devices of a node share every product, so each holds less and gradients are exchanged among fewer"
_WHY_STAGES = "stages of a pipeline exchange little over the network that gradients would wait for"


def explained(
    decision: Decision,
    plan: Plan,
    picked: Option,
    job: Job,
    problem: Problem,
    value: Value,
    knowledge: JobModel,
    *,
    rival: Option | None,
    first: Option,
    saved_as: str = "",
) -> tuple[list[str], str]:
    """Return (sentences on the picked option, next command to run); the sentences recommend, give reason and certainty.

    More sentences follow on what else would save time and on failures, where there is something to say.

    Args:
        decision: the comparison, without its words.
        plan: the picked plan; ``picked`` is its option.
        job: the job that was planned; ``problem`` is its placement problem.
        value: option -> number that options are ranked by.
        knowledge: what is known of the job's times and memory, with the errors of the compute times.
        rival: the best option that is ahead of the picked one by less than the error of the compute times; None: none is.
        first: the highest-ranked option.
        saved_as: the file that the plan is written to; empty: it is not written.
    """
    gain = value(picked) / value(decision.baseline) - 1 if value(decision.baseline) else 0.0
    certainty, measuring_command = _certainty(decision, picked, gain, job, knowledge, value, rival)
    # Next is what would settle an unsure choice, else training at once where the script need not change, else emit.
    next_command = measuring_command or f"ddltool emit {saved_as or 'PLAN'} -o enforce.json"
    if measuring_command:
        lead_clause = _lead_clause(picked, rival, value)
        next_step = (
            f"Next: {measuring_command} on that machine, and profile: FILE beside it in the job, "
            f"settles it{lead_clause}."
        )
    elif sum(picked.devices.values()) == 1 and _needs_only_batch(plan):
        next_command = f"ddltool profile {job.model or 'MODEL'}"
        next_step = "Next: train on it with that batch; one device exchanges nothing, so no script need change."
    else:
        saving = "" if saved_as else " (-o plan.json saves the plan)"
        next_step = f"Next: ddltool emit {saved_as or 'plan.json'} writes what the training script follows{saving}."
    sentences = [
        _recommendation(decision, plan, picked, problem, value, gain, knowledge),
        _why(decision, plan, picked, first, value, compiles=job.compile) + _lacking(knowledge, job),
        certainty,
        next_step,
    ]
    sentences += _cheapest(decision, picked, problem)
    gains = {name: share for name, share in decision.would_save.items() if share >= LEAST_GAIN}
    if gains:
        texts = [f"{name} would save {share:.0%} of a step" for name, share in gains.items()]
        remark = ", if your loss bears fp8" if any("fp8" in name for name in gains) else ""
        sentences.append(f"Beside this: {_joined(texts)}{remark} (predicted, in this layout).")
    if decision.failures is not None:
        sentences.append(_failures(decision.failures))
    return sentences, next_command


def _cheapest(decision: Decision, picked: Option, problem: Problem) -> list[str]:
    """Return a list with the sentence on the cheapest plan that was found beside the fastest.

    It is empty where the objective is another one, where no prices are known, and where the picked plan costs less than
    ``LEAST_GAIN`` more. The price is of the whole run where the picked one's is known, else of a million tokens or samples.
    """
    if decision.objective != "fastest" or len(decision.pareto) < 2 or not picked.price_per_sample:
        return []
    option = decision.pareto[-1]  # the front ends with the cheapest
    step_samples = float(option.step_samples or problem.max_workers * problem.batch_size)
    price, picked_price = (
        (one.price_per_sample or 0.0) * decision.run_factors(one.devices).price for one in (option, picked)
    )
    saved = 1 - price / picked_price
    if saved < LEAST_GAIN:
        return []
    if decision.run is not None:
        price *= decision.run.samples
        of_what = " for the run"
    else:
        unit, step_items = ("tokens", decision.step_tokens) if decision.step_tokens else ("samples", step_samples)
        price *= 1e6 * step_samples / step_items
        of_what = f" for a million {unit}"
    used = " + ".join(f"{count} {name}" for name, count in option.devices.items())
    layout_text = f" with {option.order}" if option.order and decision.layouts else ""
    step = f"{show_seconds(option.iteration_s)} a step"
    return [f"Cheapest: {used}{layout_text}: {step}, {show_money(price)}{of_what}, {saved:.0%} less (predicted)."]


def _lacking(knowledge: JobModel, job: Job) -> str:
    """Return a sentence, behind a space, on device types without a rate for the job's precision in their datasheets.

    Empty where all have one, and where layouts, which need these rates, are not known.
    """
    if knowledge.layouts is None:
        return ""
    number_format = precision_of(job.precision).computes
    kinds = knowledge.layouts.kinds  # by device type
    names = [name for name, kind in kinds.items() if number_format not in kind.model.device.peak_flops]
    return f" {no_rate_words(_joined(names), job.precision)}" if names else ""


def _failures(figures: FailureFigures) -> str:
    """Return the sentences on failures: how often, the share of time that trains, checkpoints, and each remedy's goodput."""
    size = ""
    if figures.checkpoint_bytes is not None and figures.process_bytes is not None:
        size = f" of {show_bytes(figures.checkpoint_bytes)}"
        if figures.process_bytes < figures.checkpoint_bytes:
            size += f", {show_bytes(figures.process_bytes)} of each process,"
    text = f"Failures: one in {show_hours(figures.job_mtbf_s / HOUR_S)}, {figures.remedies[figures.remedy].goodput:.1%} of the "
    text += f"time trains. A checkpoint{size} stops training for {show_seconds(figures.checkpoint_s)}"
    if figures.write_s:
        text += f" and is written in {show_seconds(figures.write_s)} beside it"
    if figures.checkpoint_interval_s is None:
        text += "; it is made at the notice"
    else:
        text += f"; {'one in memory' if figures.per_storage else 'one'} every "
        text += show_hours(figures.checkpoint_interval_s / HOUR_S)
    if figures.per_storage:
        text += f", with every {_ordinal(figures.per_storage)} in storage, too"
    if len(figures.remedies) == 1:  # "restart": there is nothing to choose
        return f"{text}."
    doing = {"wait": "waiting for a failed device", "shrink": "going on with the others", "spares": "spares"}
    remedy_texts = []
    for name, remedy in figures.remedies.items():
        price_text = "" if remedy.price is None else f" for {show_money(remedy.price)}"
        remedy_texts.append(f"{doing[name]} {remedy.goodput:.1%}{price_text}")
    advice = {"wait": "wait", "shrink": "go on with the others", "spares": "keep spares"}[figures.remedy]
    away = show_hours(figures.repair_s / HOUR_S)
    return f"{text}. A failed device is away for {away}; best: {advice} ({', '.join(remedy_texts)})."


def _ordinal(number: int) -> str:
    """Return an ordinal number, such as ``3rd``."""
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _needs_only_batch(plan: Plan) -> bool:
    """Return whether a training script follows the plan by setting its batch size, without any other change.

    Other changes are logical workers (ESTs), recomputation, use of the hosts' memory, and gradient accumulation.
    """
    sharding = plan.sharding
    if sharding is not None and (sharding.checkpointing or sharding.offload or sharding.on_host):
        return False
    return not plan.est_count and not any(row.accumulation_steps for row in plan.assignments)


def why_not(option: Option, picked: Option, value: Value, tie: bool) -> str:
    """Return in a few words why an option is not picked, such as ``12% behind``.

    ``value``: returns the number that options are ranked by; ``tie``: whether the option and the picked one differ by less than
    can be told, so that the simpler one was picked.
    """
    lead = value(option) / value(picked) - 1 if value(picked) else 0.0
    if tie and abs(lead) < _LEAST_SHOWN:
        return "as good, more to change"
    if tie:
        return f"tie ({lead:+.0%}), more to change"
    if option.staleness and lead > 0:
        return f"{lead:.0%} ahead, but stale"
    return f"{-lead:.0%} behind" if lead < 0 else f"{lead:.0%} ahead"


def _recommendation(
    decision: Decision, plan: Plan, picked: Option, problem: Problem, value: Value, gain: float, knowledge: JobModel
) -> str:
    """Return the decision's first sentences: the devices to use, the work of each, the rate, the gain, and the whole run.

    ``gain``: value of the picked option over the baseline's, minus 1.
    """
    offered = {device.name: device.count for device in (*problem.devices, *problem.left_out)}
    used_text = _joined(
        [_counted_type(count, name, offered.get(name, count)) for name, count in picked.devices.items()]
    )
    unused = [f"the {_type_name(name, count)}" for name, count in offered.items() if name not in picked.devices]
    work = _work_per_device(decision, plan, picked, knowledge)
    unused_clause = ""
    if unused:
        comma = "," if work else ""
        unused_clause = f"{comma} and leave {_joined(unused)} out"
    step_items = decision.step_tokens or picked.step_samples or problem.max_workers * problem.batch_size
    rate = _rate(picked, step_items)
    unit = "tokens" if decision.step_tokens else "samples"
    mfu = decision.layouts[0].mfu if decision.layouts else None
    of_peak = "" if mfu is None else f" (MFU {mfu:.0%})"
    text = f"Use {used_text}{work}{unused_clause}: {rate} {unit}/s{of_peak}, {_gain(decision, picked, value, gain)}."
    return text + _run(decision.run)


def _joined(parts: list[str]) -> str:
    """Return the parts joined as in ``a, b and c``."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _counted_type(count: int, name: str, offered: int) -> str:
    """Return ``count`` of the ``offered`` devices of a type in words: ``2 of the 4 T4s``, ``the 4 T4s`` or ``the one T4``."""
    if count < offered:
        return f"{count} of the {_type_name(name, offered)}"
    return f"the {_type_name(name, count, numbered=True)}"


def _type_name(name: str, count: int, *, numbered: bool = False) -> str:
    """Return a device type with its number, such as ``4 T4s``; for one device ``T4``, or ``one T4`` if ``numbered``.

    Names that end in "s", "GB" or a character that is no letter or digit get no plural s.
    """
    if count == 1:
        return f"one {name}" if numbered else name
    has_plural = name[-1].isalnum() and not name.endswith(("s", "GB"))
    return f"{count} {name}s" if has_plural else f"{count} {name}"


def _each_of_type(name: str, count: int, together: int = 1) -> str:
    """Return the devices that take one share in words: ``each T4``, ``the T4`` for a ``count`` of 1, or ``each 2 T4s``.

    ``together``: number of devices that hold one replica of the model.
    """
    if together > 1:
        return f"each {_type_name(name, together)}"
    return f"each {name}" if count > 1 else f"the {name}"


def _work_per_device(decision: Decision, plan: Plan, picked: Option, knowledge: JobModel) -> str:
    """Return the clause on each device's work: layout, logical workers, barriers, or samples.

    A layout is how the model is sharded and whether it recomputes; it is named where one was chosen. Empty for samples on more
    than three device types, which would be too long.
    """
    if decision.layouts and decision.layouts[0].text == picked.order:
        layout = decision.layouts[0]
        return _layout_clause(
            layout, picked.devices, plan.max_workers * plan.batch_size, _memory_text(layout, knowledge)
        )
    if plan.est_count:
        return f" with {plan.est_count} logical workers"
    if plan.superstep is not None:
        return " with barriers after their own numbers of iterations"
    samples_by_type: dict[str, set[int]] = {}  # devices of one type may differ by a sample
    for row in plan.assignments:
        samples_by_type.setdefault(row.device_type, set()).add(row.local_batch_size)
    if len(samples_by_type) > 3:
        return ""
    parts = []
    for name, samples in samples_by_type.items():
        number = " or ".join(str(size) for size in sorted(samples))
        unit = "sample" if number == "1" else "samples"
        parts.append(f"{number} {unit} on {_each_of_type(name, picked.devices[name])}")
    return f", {_joined(parts)}"


def _memory_text(layout: Layout, knowledge: JobModel) -> str:
    """Return the most memory of a process on any device, with what that device has, such as ``34.2 of 40 GiB``."""
    assert knowledge.layouts is not None, "a layout was chosen without what layouts are made of"
    name = max(layout.memory_bytes, key=layout.memory_bytes.__getitem__)
    device_gib = knowledge.layouts.kinds[name].model.device.memory_gib
    return f"{show_bytes(layout.memory_bytes[name]).removesuffix(' GiB')} of {device_gib:.3g} GiB"


def _layout_clause(layout: Layout, devices: Mapping[str, int], samples: int, memory: str) -> str:
    """Return the clause on a layout: how it shards and recomputes, the samples of each device, passes and memory.

    ``devices``: number of used devices by type; ``samples``: those of a whole step, which may not divide evenly, so that some
    devices take one less; ``memory``: of a process, as text. A layout on single devices that neither shards nor recomputes is
    not named.
    """
    passes = f" in {layout.passes} passes" if layout.passes > 1 else ""
    if layout.sharding == "none" and layout.checkpointing == "none" and layout.gpus == 1:
        size = counted(next(iter(layout.local_batch_sizes.values())), "sample")
        return f", {size} a step{passes}, {memory}"
    most_samples = layout.local_batch_sizes  # device type -> most samples of a device, or of a group
    is_exact = sum(size * devices[name] for name, size in most_samples.items()) <= samples * layout.gpus
    most = "" if is_exact else "up to "
    sizes = _joined(
        [f"{most}{size} on {_each_of_type(name, devices[name], layout.gpus)}" for name, size in most_samples.items()]
    )
    of_hosts = f" and {show_bytes(layout.host_bytes)} of each host" if layout.host_bytes else ""
    return f" with {layout.text}, {sizes}{passes}, {memory} a process{of_hosts}"


def _rate(option: Option, step_items: float) -> str:
    """Return the seconds of a step, with the interval where it is known, and ``step_items`` (samples or tokens) per second."""
    interval = ""
    if option.low_s is not None and option.high_s is not None and option.low_s > 0:
        interval = f" ({show_seconds(option.low_s)} to {show_seconds(option.high_s)})"
    return f"{show_seconds(option.iteration_s)} a step{interval}, {show_rate(step_items / option.iteration_s)}"


def _run(run: RunFigures | None) -> str:
    """Return the sentence on time, price, energy and failures of the whole run; empty without ``run`` (length not known)."""
    if run is None:
        return ""
    text = f" The whole run takes {show_hours(run.hours)}"
    if run.low_hours is not None and run.high_hours is not None:
        text += f" ({show_hours(run.low_hours)} to {show_hours(run.high_hours)})"
    text += "" if run.price is None else f" and costs {show_money(run.price)}"
    text += "" if run.energy_kwh is None else f", at most {show_rate(run.energy_kwh)} kWh"
    if run.failures is not None and run.checkpoint_interval_s is not None:
        interval = show_hours(run.checkpoint_interval_s / HOUR_S)
        text += f", with {run.failures:.2g} failures to expect and a checkpoint every {interval} (Daly)"
    return f"{text}."


def _gain(decision: Decision, picked: Option, value: Value, gain: float) -> str:
    """Return the clause on the gain over the baseline, the best plan that one would make without planning.

    ``gain``: value of the picked option over the baseline's, minus 1.
    """
    if not value(decision.baseline):
        return f"and {decision.baseline_name} breaks a limit"
    if abs(gain) >= LEAST_GAIN:
        return _ahead(gain, decision.objective) + decision.baseline_name
    layout = decision.layouts[0] if decision.layouts else None
    if layout is not None and (layout.offload or layout.activations):  # its baseline keeps as much on the hosts
        return "the best with memory of the hosts"
    if picked.devices != decision.baseline.devices or picked.order != decision.baseline.order:
        return f"as good as {decision.baseline_name}"
    wider = _wider_baseline(decision, picked)
    if wider is None:
        return "what one would do anyway"
    name, option = wider
    usual = f"what one would do anyway on {counted(sum(picked.devices.values()), 'device')}"
    if not value(option):
        return f"{usual} ({name} breaks a limit)"
    lead = value(picked) / value(option) - 1
    return usual if lead < LEAST_GAIN else f"{usual}, {_ahead(lead, decision.objective)}{name}"


def _wider_baseline(decision: Decision, picked: Option) -> tuple[str, Option] | None:
    """Return (name, figures) of the baseline on the most devices, among them all of the picked ones; None: there is none."""
    wider = [
        (name, option)
        for name, option in decision.baselines.items()
        if picked.devices != option.devices
        and all(count <= option.devices.get(device_type, 0) for device_type, count in picked.devices.items())
    ]
    return max(wider, key=lambda pair: sum(pair[1].devices.values()), default=None)


def _ahead(gain: float, objective: str) -> str:
    """Return a gain in words, such as "25% faster than ".

    ``gain``: ratio of the values of two options, minus 1. Values of objectives that are costs (price, memory, devices) are
    1 / cost; for these it is the share of the cost that is saved: a gain of 1 is "50% cheaper per sample than ".
    """
    if objective not in _BETTER:
        return f"{faster_than(gain)} "
    better, worse = _BETTER[objective]
    if gain > 0:
        return f"{1 - 1 / (1 + gain):.0%} {better} than "
    return f"{abs(gain):.0%} {better if gain == 0 else worse} than "


def _why(decision: Decision, plan: Plan, picked: Option, first: Option, value: Value, *, compiles: bool) -> str:
    """Return the sentence that says why the picked strategy wins, and how much communication is exposed.

    Its clauses: the reason, the step on all devices if fewer were picked, the lead of the highest-ranked option (``first``) if
    another was picked, offloading, a host that bounds the step, and communication. ``compiles``: whether the step is compiled.
    """
    text = f"Why: {_reason(plan, picked)}"
    text += _more_devices_clause(decision, picked)
    text += _first_clause(decision, picked, first, value)
    layout = decision.layouts[0] if decision.layouts else None
    if layout is not None:
        text += _host_memory_clause(layout)
        if layout.host_wait_s > _WORTH_SAYING * picked.iteration_s:
            helps = "a larger batch" if compiles else "a larger batch or --compile"
            wait = show_seconds(layout.host_wait_s)
            text += f"; a GPU waits {wait} of a step for Python: {helps} may gain more than devices"
    if picked.communication_s is None:
        return f"{text}; communication is not in these figures (no graph, no fitted model)."
    if sum(picked.devices.values()) == 1:
        return f"{text}."
    in_groups = layout is not None and layout.gpus > 1
    return f"{text}; {_exposed_clause(picked, picked.communication_s, in_groups)}."


def _reason(plan: Plan, picked: Option) -> str:
    """Return the clause on why the picked strategy, or its groups of devices, is the best one."""
    if picked.group is not None:
        return _WHY_STAGES if picked.group.pipeline > 1 else _WHY_TENSORS
    if sum(picked.devices.values()) == 1:
        return "one device has nothing to share or to exchange"
    # shares by speed may turn out equal, and then the reason is that of equal shares
    is_equal = picked.strategy == "lb-bsp" and len({row.local_batch_size for row in plan.assignments}) == 1
    return _WHY["bsp" if is_equal else picked.strategy]


def _host_memory_clause(layout: Layout) -> str:
    """Return the clause on the state or activations that a layout keeps in the hosts' memory; empty where it keeps none."""
    state, activations = layout.offload, layout.activations
    text = ""
    if state:
        text += f"; each host keeps {show_bytes(state.memory_bytes)} of state and needs {show_seconds(state.update_s)} of a "
        text += f"step to update it, {show_bytes(state.copied_bytes)} go over each device's link to it"
    if activations:
        text += f"; each host keeps {show_bytes(activations.memory_bytes)} of activations, "
        text += f"{show_bytes(activations.copied_bytes)} go over each device's link to it in a step, "
        text += f"which waits {show_seconds(activations.waits_s)} for them"
    if text:
        text += "; tensor parallelism is not modelled beside that"
    return text


def _more_devices_clause(decision: Decision, picked: Option) -> str:
    """Return the clause on the longer step on more devices with equal shares, or on the best layout on more types than picked.

    Empty where neither was compared.
    """
    wider_baseline = _wider_baseline(decision, picked)
    if wider_baseline is not None and (on_more := wider_baseline[1]).iteration_s > picked.iteration_s:
        parts = f"{show_seconds(on_more.compute_s)} until the slowest has computed its share"
        if on_more.communication_s is not None:
            parts += f", then {show_seconds(on_more.communication_s)} of communication"
        everyone = f"on {sum(on_more.devices.values())} with equal shares"
        return f"; {everyone} a step takes {show_seconds(on_more.iteration_s)}: {parts}"
    wider = [layout for layout in decision.layouts if set(layout.devices) > set(picked.devices) and layout.step_s]
    if wider_baseline is None and wider:
        best = min(wider, key=lambda layout: layout.step_s or math.inf)
        return f"; on {best.devices_text} a step takes {show_seconds(best.step_s)} at best"
    return ""


def _first_clause(decision: Decision, picked: Option, first: Option, value: Value) -> str:
    """Return the clause on why the highest-ranked option is not picked; empty where its strategy is the picked one."""
    if first.strategy == picked.strategy or not value(picked):
        return ""
    stale_clause = f", but with updates up to {first.staleness} iterations stale" if first.staleness else ""
    lead = value(first) / value(picked) - 1
    if first.strategy in decision.too_close and not stale_clause:
        text = f"is {lead:.1%} ahead, too close to tell apart"
    elif lead < _LEAST_TENTH:  # would print as 0.0 %
        text = f"is just as good{stale_clause}"
    else:
        text = f"is {lead:.1%} ahead{stale_clause or ', too little to change a script for'}"
    return f"; {first.strategy} {text}"


def _exposed_clause(picked: Option, communication_s: float, in_groups: bool) -> str:
    """Return the clause on the step's exposed communication, its settings, and the source of the figure.

    ``picked.order`` names the settings (sharding, buckets, order of transfers) or says that the figure is fitted or measured.
    ``communication_s``: seconds of the step that are exposed communication. ``in_groups``: whether groups of devices hold a
    replica; what they exchange within a pass counts among its compute.
    """
    source = picked.order if picked.order in (FITTED, MEASURED) else "predicted"
    settings = ""
    if picked.order and source == "predicted":
        saves_enough = (picked.order_saves_s or 0.0) >= _LEAST_SHOWN * picked.iteration_s
        if saves_enough or not picked.order.startswith(
            "DDP, "
        ):  # buckets that save next to nothing are not worth a word
            settings = f" with {picked.order}"
    share = communication_s / picked.iteration_s
    if share < _NO_COMMUNICATION:
        return f"no communication worth mentioning is exposed{settings} ({source})"
    starved_clause = f" ({share:.0%} of it: larger batches per worker would gain far more)" if share > _STARVED else ""
    where = " between groups" if in_groups else ""
    return f"{show_seconds(communication_s)} of each step is exposed communication{where}{starved_clause}{settings} ({source})"


def _certainty(
    decision: Decision,
    picked: Option,
    gain: float,
    job: Job,
    knowledge: JobModel,
    value: Value,
    rival: Option | None,
) -> tuple[str, str]:
    """Return (sentence on how sure the choice is, command of a measurement that would settle it, "" where it is settled).

    ``gain``: value of the picked option over the baseline's, minus 1; ``rival``: the best option that is ahead of the picked
    one by less than the error of the compute times, None where none is. The sentence ends with :attr:`JobModel.remark`, if
    there is one.
    """
    remark = f"; {knowledge.remark}" if knowledge.remark else ""
    gain_error = decision.gain_error
    if decision.error is None:
        text = "as sure as the capabilities in the job, which come without an error; profile and fit the devices, "
        return f"How sure: {text}or give the telemetry of an earlier run, to know it{remark}.", ""
    source = f" ({decision.error_source})" if decision.error_source else ""
    known = f"known to within {decision.error:.0%}{source}"
    widest = decision.error
    if picked.low_s is not None and picked.high_s is not None and picked.iteration_s:
        below = 1 - picked.low_s / picked.iteration_s
        above = picked.high_s / picked.iteration_s - 1
        known = f"known to within {below:.0%} below and {above:.0%} above{source}"
        widest = max(below, above)
    interval = _gain_interval(gain, gain_error, decision.objective)
    command = ""
    # The cases in order: a tie with another plan; no better plan than the usual one; a gain within its error; a gain without an
    # error (both plans depend on the devices' times alike); a gain by times of unequal trust; at last a gain beyond its error.
    if rival is not None:
        command = _measuring_command({**rival.devices, **picked.devices}, knowledge, job)
        mix = " + ".join(f"{count} {name}" for name, count in rival.devices.items())
        lead = value(rival) / value(picked) - 1 if value(picked) else 0.0
        text = f"a tie, so the simpler one: compute times are {known}, "
        text += f"and {rival.strategy} on {mix} is {lead:+.0%} by them{interval}{remark}"
    elif picked.devices == decision.baseline.devices and abs(gain) < LEAST_GAIN:
        text = f"compute times are {known}; no other plan comes near enough to matter{remark}"
    elif gain_error != 0 and abs(gain) <= (decision.error if gain_error is None else gain_error):
        command = _measuring_command({**decision.baseline.devices, **picked.devices}, knowledge, job)
        text = f"too close to call; compute times are {known}, more than the difference{interval}{remark}"
    elif gain_error == 0 and _is_only_communication(picked, decision.baseline):
        text = f"the gain is communication alone, whose error is not known; the devices' compute times, {known}, "
        text += f"are the same in both: measure it with ddltool network{remark}"
    elif gain_error == 0:
        text = f"the devices are the same in both, so the error of their compute times ({decision.error:.0%}{source}) "
        text += f"is no error of the gain{remark}"
    elif knowledge.remark:
        text = f"less than its error says, compute times {known}: {knowledge.remark}{interval}"
        text += "; measure all types before you rely on it"
    else:
        both = "; both plans lean on them, so that their difference is surer"
        less = both if gain_error is not None and abs(gain) <= widest else ", less than the difference"
        text = f"compute times are {known}{less}{interval}"
    return f"How sure: {text}.", command


def _gain_interval(gain: float, gain_error: float | None, objective: str) -> str:
    """Return the clause on the interval of the gain.

    ``gain``: value of the picked option over the baseline's, minus 1; ``gain_error``: relative error of that ratio. Empty
    where the gain prints as 0 %, where its error is 0 or not known (None), where both ends print alike, and for an objective
    that is no matter of time.
    """
    if not gain_error or abs(gain) < _LEAST_SHOWN or objective in ("least-memory", "fewest-devices"):
        return ""
    low = (1 + gain) / (1 + gain_error)
    high = (1 + gain) * (1 + gain_error)
    if objective == "cheapest":
        # Values are 1 / price. The saved share of the price is 1 - 1 / ratio; 1 is added, as below 1 is subtracted.
        low = 2 - 1 / low
        high = 2 - 1 / high
    if low >= 2:
        low_text, high_text = f"{low:.3g}", f"{high:.3g} times as fast"
    else:
        low_text, high_text = f"{low - 1:+.0%}", f"{high - 1:+.0%}"
    return "" if low_text == high_text else f"; the gain lies between {low_text} and {high_text}"


def _is_only_communication(picked: Option, baseline: Option) -> bool:
    """Return whether two plans compute for the same time, so that they differ by communication alone."""
    return bool(picked.communication_s) and abs(picked.compute_s / baseline.compute_s - 1) < _LEAST_TENTH


def _measuring_command(devices: Mapping[str, int], knowledge: JobModel, job: Job) -> str:
    """Return the command that profiles the device type whose compute times have the largest error.

    It measures half, one and two of the job's batches on a machine with such a device.
    """
    name = max(devices, key=lambda name: (knowledge.errors.get(name, 0.0), name))
    sizes = ",".join(str(size) for size in sorted({max(1, job.batch_size // 2), job.batch_size, 2 * job.batch_size}))
    device_option = "" if name.lower().startswith(("cpu", "xeon", "epyc")) else " --device cuda"
    return f"ddltool profile {job.model or 'MODEL'} --batch-sizes {sizes}{device_option} --device-name {name} -o {name}.csv"


def _lead_clause(picked: Option, rival: Option | None, value: Value) -> str:
    """Return the clause on how much better the rival may be; empty without a rival (None), and where its lead prints as 0 %."""
    if rival is None or not value(picked):
        return ""
    lead = value(rival) / value(picked) - 1
    return f"; it is worth up to {lead:.0%}" if lead >= _LEAST_SHOWN else ""
