"""What a decision says to people: the answer in a sentence, why, how sure, and what next. Start at :func:`explained`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ddltool.analyzers.job.placement.problem import Problem
from ddltool.analyzers.job.planning.exposed import FITTED, MEASURED
from ddltool.analyzers.job.planning.goal import HOUR_S
from ddltool.analyzers.job.planning.job_model import JobModel
from ddltool.decision import LEAST_GAIN, Decision, Option, RunFigures
from ddltool.job import Job
from ddltool.plans import Plan
from ddltool.units import counted, faster_than, show_bytes, show_hours, show_money, show_seconds

Value = Callable[[Option], float]
# From this share of communication in a step on, another number of samples per step gains more than any strategy.
_STARVED = 0.5
# Below this a share reads as 0.0 %.
_LEAST_SHOWN = 0.005
_BETTER = {
    "cheapest": ("cheaper per sample", "dearer per sample"),
    "least-memory": ("less memory", "more memory"),
    "fewest-devices": ("fewer devices", "more devices"),
}
_WHY = {
    "bsp": "every device takes the same share, which is as good as anything else here",
    "lb-bsp": "every device gets the share of the batch that lets all end together",
    "est": "logical workers (EasyScaleThreads) keep their data, random numbers and order of sums on any number of devices",
    "goodput": "this number of devices and this batch make most progress per second by the fitted model",
    "elastic-bsp": "devices make iterations of their own between barriers, so none waits for a slower one",
}


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
) -> tuple[list[str], str]:
    """Return four sentences on the picked option (answer, reason, certainty, next step), and the next command.

    Args:
        value: what options are ranked by, higher is better.
        rival: the best option within the error of the compute times that is ahead of the picked one; None: no such option.
        first: the highest-ranked option.
    """
    gain = value(picked) / value(decision.baseline) - 1 if value(decision.baseline) else 0.0
    certainty, measuring_command = _certainty(decision, picked, gain, job, knowledge, value, rival)
    next_command = measuring_command or "ddltool emit PLAN -o enforce.json"
    if measuring_command:
        worth = _lead_clause(picked, rival, value)
        next_step = (
            f"Next: {measuring_command} on that machine, and profile: FILE beside it in the job, settles it{worth}."
        )
    elif sum(picked.devices.values()) == 1 and _needs_only_batch(plan):
        next_command = f"ddltool profile {job.model or 'MODEL'}"
        next_step = "Next: train on it with that batch; one device exchanges nothing, so no script need change."
    else:
        next_step = (
            "Next: ddltool emit plan.json writes what the training script follows (-o plan.json saves the plan)."
        )
    sentences = [
        _answer(decision, plan, picked, problem, value, gain),
        _why(decision, picked, first, value),
        certainty,
        next_step,
    ]
    return sentences, next_command


def _needs_only_batch(plan: Plan) -> bool:
    """Return whether a plan needs no change of the script but the batch size."""
    recomputed = plan.sharding is not None and plan.sharding.checkpointing
    return not (plan.est_count or recomputed or any(row.accumulation_steps for row in plan.assignments))


def why_not(option: Option, picked: Option, value: Value, tie: bool) -> str:
    """Return in a few words why an option is not picked; ``tie``: whether it ties with the picked one."""
    ratio = value(option) / value(picked) - 1 if value(picked) else 0.0
    if tie and abs(ratio) < _LEAST_SHOWN:
        return "as good, more to change"
    if tie:
        return f"tie ({ratio:+.0%}), more to change"
    if option.staleness and ratio > 0:
        return f"{ratio:.0%} ahead, but stale"
    return f"{-ratio:.0%} behind" if ratio < 0 else f"{ratio:.0%} ahead"


def _answer(decision: Decision, plan: Plan, picked: Option, problem: Problem, value: Value, gain: float) -> str:
    """Return the sentence that names devices, work per device, rate and gain."""
    offered = {device.name: device.count for device in (*problem.devices, *problem.left_out)}
    used_text = _joined(
        [_counted_type(count, name, offered.get(name, count)) for name, count in picked.devices.items()]
    )
    unused = [f"the {_type_name(name, count)}" for name, count in offered.items() if name not in picked.devices]
    work = _work_per_device(decision, plan, picked)
    unused_clause = f"{',' if work else ''} and leave {_joined(unused)} out" if unused else ""
    return f"Use {used_text}{work}{unused_clause}: {_rate(picked)}, {_gain(decision, picked, value, gain)}.{_run(decision.run)}"


def _joined(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _counted_type(count: int, name: str, offered: int) -> str:
    if count < offered:
        return f"{count} of the {_type_name(name, offered)}"
    return f"the {_type_name(name, count, numbered=True)}"


def _type_name(name: str, count: int, *, numbered: bool = False) -> str:
    """Return a device type, in the plural and with its number where ``count`` is above 1; ``numbered``: with "one" for 1."""
    text = name if count == 1 or not name[-1].isalnum() or name.endswith(("s", "GB")) else f"{name}s"
    return f"{count} {text}" if count > 1 else f"one {text}" if numbered else text


def _each_of_type(name: str, count: int) -> str:
    return f"each {name}" if count > 1 else f"the {name}"


def _work_per_device(decision: Decision, plan: Plan, picked: Option) -> str:
    """Return the clause on each device's work: samples, passes, logical workers or barriers; empty for many shares."""
    if decision.layouts and decision.layouts[0].text == picked.order:
        layout = decision.layouts[0]
        sizes_by_type = layout.local_batch_sizes.items()
        if layout.sharding == "none" and layout.checkpointing == "none":
            size = counted(next(iter(layout.local_batch_sizes.values())), "sample")
            passes = f" in {layout.passes} passes" if layout.passes > 1 else ""
            return f", {size} a step{passes}, {show_bytes(max(layout.memory_bytes.values()))}"
        sizes = _joined([f"{size} on {_each_of_type(name, picked.devices[name])}" for name, size in sizes_by_type])
        passes = f" in {layout.passes} passes" if layout.passes > 1 else ""
        return f" with {layout.text}, {sizes}{passes}, {show_bytes(max(layout.memory_bytes.values()))} a process"
    if plan.est_count:
        return f" with {plan.est_count} logical workers"
    if plan.superstep is not None:
        return " with barriers after their own numbers of iterations"
    samples_by_type: dict[str, set[int]] = {}
    for row in plan.assignments:
        samples_by_type.setdefault(row.device_type, set()).add(row.local_batch_size)
    if len(samples_by_type) > 3:
        return ""
    texts = {name: " or ".join(map(str, sorted(type_sizes))) for name, type_sizes in samples_by_type.items()}
    shares = [f"{size} samples on {_each_of_type(name, picked.devices[name])}" for name, size in texts.items()]
    return f", {_joined(shares)}"


def _rate(option: Option) -> str:
    """Return steps per second, or seconds per step from 1 s on, with the interval where it is known."""
    has_interval = option.low_s is not None and option.high_s is not None and option.low_s > 0
    if option.iteration_s < 1:
        interval = f" ({1 / (option.high_s or 1):.3g} to {1 / (option.low_s or 1):.3g})" if has_interval else ""
        return f"{1 / option.iteration_s:.3g} steps/s{interval}"
    interval = f" ({show_seconds(option.low_s)} to {show_seconds(option.high_s)})" if has_interval else ""
    return f"{show_seconds(option.iteration_s)} a step{interval}"


def _run(run: RunFigures | None) -> str:
    """Return the sentence on time, price and energy of the whole run; empty where its length is not known."""
    if run is None:
        return ""
    text = f" The whole run takes {show_hours(run.hours)}"
    if run.low_hours is not None and run.high_hours is not None:
        text += f" ({show_hours(run.low_hours)} to {show_hours(run.high_hours)})"
    text += "" if run.price is None else f" and costs {show_money(run.price)}"
    text += "" if run.energy_kwh is None else f", at most {run.energy_kwh:,.3g} kWh"
    if run.failures is not None and run.checkpoint_interval_s is not None:
        interval = show_hours(run.checkpoint_interval_s / HOUR_S)
        text += f", with {run.failures:.2g} failures to expect and a checkpoint every {interval} (Daly)"
    return f"{text}."


def _gain(decision: Decision, picked: Option, value: Value, gain: float) -> str:
    """Return the gain over the best baseline, and over the baseline on all devices."""
    if abs(gain) >= LEAST_GAIN:
        text = _ahead(gain, decision.objective) + decision.baseline_name
    else:
        has_same_devices = picked.devices == decision.baseline.devices
        text = "what one would do anyway" if has_same_devices else f"as good as {decision.baseline_name}"
    all_name = next((name for name in decision.baselines if name.startswith("all ")), None)
    if all_name is not None and all_name != decision.baseline_name and value(decision.baselines[all_name]):
        text += f", and {_ahead(value(picked) / value(decision.baselines[all_name]) - 1, decision.objective)}{all_name}"
    return text


def _ahead(gain: float, objective: str) -> str:
    """Return a gain of value as "25% faster than "; of costs as the share saved."""
    better, worse = _BETTER.get(objective, ("faster", "slower"))
    if objective in ("cheapest", "least-memory", "fewest-devices"):  # of a cost, what is saved of it
        gain = 1 - 1 / (1 + gain) if gain > 0 else gain
        return f"{abs(gain):.0%} {better if gain >= 0 else worse} than "
    return f"{faster_than(gain)} "


def _why(decision: Decision, picked: Option, first: Option, value: Value) -> str:
    """Return the sentence that says why the picked strategy wins, and how much communication is exposed."""
    is_single = sum(picked.devices.values()) == 1
    text = f"{picked.strategy}: " + (
        "one device has nothing to share or to exchange" if is_single else _WHY[picked.strategy]
    )
    overall = next((option for name, option in decision.baselines.items() if name.startswith("all ")), None)
    if overall is not None and overall.devices != picked.devices and overall.iteration_s > picked.iteration_s:
        exposed_s = overall.communication_s
        parts = f"{show_seconds(overall.compute_s)} until the slowest has computed its share"
        parts += "" if exposed_s is None else f", then {show_seconds(exposed_s)} of communication"
        text += f"; on all {sum(overall.devices.values())}, equally, a step takes {show_seconds(overall.iteration_s)}: {parts}"
    if first.strategy != picked.strategy and value(picked):
        stale_clause = f", but with updates up to {first.staleness} iterations stale" if first.staleness else ""
        lead = value(first) / value(picked) - 1
        reason = "" if stale_clause else ", too little to change a script for"
        lead_text = f"is {lead:.1%} ahead{stale_clause}{reason}" if lead >= 0.0005 else f"is just as good{stale_clause}"
        if first.strategy in decision.too_close and not stale_clause:
            lead_text = f"is {lead:.1%} ahead, too close to tell apart"
        text += f"; {first.strategy} {lead_text}"
    if picked.communication_s is None:
        return f"{text}; communication is not in these figures (no graph, no fitted model)."
    if is_single:
        return f"{text}."
    # The error of communication is not known, whether simulated, fitted or measured in an earlier run.
    is_fitted_or_measured = picked.order in (FITTED, MEASURED)
    is_order_shown = (picked.order_saves_s or 0.0) >= _LEAST_SHOWN * picked.iteration_s or not picked.order.startswith(
        "DDP, "
    )
    order = f" with {picked.order}" if picked.order and not is_fitted_or_measured and is_order_shown else ""
    share = picked.communication_s / picked.iteration_s
    starved_clause = f" ({share:.0%} of it: larger batches per worker would gain far more)" if share > _STARVED else ""
    exposed_text = f"{show_seconds(picked.communication_s)} of each step is exposed communication{starved_clause}"
    if share < 5e-5:
        exposed_text = "no communication worth mentioning is exposed"
    return f"{text}; {exposed_text}{order} ({picked.order if is_fitted_or_measured else 'predicted'}, its error is not known)."


def _certainty(
    decision: Decision,
    picked: Option,
    gain: float,
    job: Job,
    knowledge: JobModel,
    value: Value,
    rival: Option | None,
) -> tuple[str, str]:
    """Return the sentence on certainty, and the measuring command that would settle the choice; empty: it is settled."""
    remark, command, gain_error = f"; {knowledge.remark}" if knowledge.remark else "", "", decision.gain_error
    source = f" ({decision.error_source})" if decision.error_source else ""
    known_text = "" if decision.error is None else f"known to within {decision.error:.0%}{source}"
    error = decision.error if gain_error is None else gain_error
    gain_interval = ""
    if gain_error and abs(gain) >= _LEAST_SHOWN:
        low, high = (1 + gain) / (1 + gain_error), (1 + gain) * (1 + gain_error)
        end_texts = f"{low - 1:+.0%}", f"{high - 1:+.0%}"
        if low >= 2:
            end_texts = f"{low:.3g}", f"{high:.3g} times as fast"
        gain_interval = (
            "" if end_texts[0] == end_texts[1] else f"; the gain lies between {end_texts[0]} and {end_texts[1]}"
        )
    if decision.error is None or error is None:
        text = "as sure as the capabilities in the job, which come without an error; profile and fit the devices, "
        text += f"or give the telemetry of an earlier run, to know it{remark}"
    elif rival is not None:
        command = _measuring_command({**rival.devices, **picked.devices}, knowledge, job)
        mix_text = " + ".join(f"{count} {name}" for name, count in rival.devices.items())
        lead = value(rival) / value(picked) - 1 if value(picked) else 0.0
        text = f"a tie, so the simpler one: compute times are {known_text}, "
        text += f"and {rival.strategy} on {mix_text} is {lead:+.0%} by them"
        text += gain_interval + remark
    elif picked.devices == decision.baseline.devices and abs(gain) < LEAST_GAIN:
        text = f"compute times are {known_text}; no other plan comes near enough to matter{remark}"
    elif abs(gain) <= error and gain_error != 0:
        command = _measuring_command({**decision.baseline.devices, **picked.devices}, knowledge, job)
        text = f"too close to call; compute times are {known_text}, more than the difference{gain_interval}{remark}"
    elif (
        gain_error == 0 and picked.communication_s and abs(picked.compute_s / decision.baseline.compute_s - 1) < 0.0005
    ):
        text = f"the gain is communication alone, whose error is not known; the devices' compute times, {known_text}, "
        text += f"are the same in both: measure it with ddltool network{remark}"
    elif gain_error == 0:
        text = f"the devices are the same in both, so the error of their compute times ({decision.error:.0%}{source}) "
        text += f"is no error of the gain{remark}"
    elif knowledge.remark:
        text = f"less than its error says, compute times {known_text}: {knowledge.remark}{gain_interval}"
        text += "; measure all types before you rely on it"
    else:
        text = f"compute times are {known_text}, less than the difference{gain_interval}"
    return f"How sure: {text}.", command


def _measuring_command(devices: Mapping[str, int], knowledge: JobModel, job: Job) -> str:
    """Return the command that profiles the device type with the largest error."""
    name = max(devices, key=lambda name: (knowledge.errors.get(name, 0.0), name))
    sizes = ",".join(str(size) for size in sorted({max(1, job.batch_size // 2), job.batch_size, 2 * job.batch_size}))
    device_option = "" if name.lower().startswith(("cpu", "xeon", "epyc")) else " --device cuda"
    return f"ddltool profile {job.model or 'MODEL'} --batch-sizes {sizes}{device_option} --device-name {name} -o {name}.csv"


def _lead_clause(picked: Option, rival: Option | None, value: Value) -> str:
    """Return by how much the rival may be better, as a clause; empty where that is too little to show."""
    if rival is None or not value(picked):
        return ""
    lead = value(rival) / value(picked) - 1
    return f"; it is worth up to {lead:.0%}" if lead >= _LEAST_SHOWN else ""
