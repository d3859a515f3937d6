"""What a decision says to people: the answer in a sentence, why, how sure, and what next. Start at :func:`explained`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ddltool.analyzers.deciding.communication import FITTED, MEASURED
from ddltool.analyzers.deciding.goal import HOUR_S
from ddltool.analyzers.deciding.knowledge import Knowledge
from ddltool.analyzers.placement.problem import Problem
from ddltool.decision import Decision, Option, RunFigures
from ddltool.job import Job
from ddltool.plans import Plan
from ddltool.units import counted, show_bytes, show_hours, show_money, show_seconds

Value = Callable[[Option], float]
# From this share of communication in a step on, another number of samples per step gains more than any strategy.
_STARVED = 0.5
# Below this a share reads as 0.0 %.
_SHOWN = 0.005
# A gain below this is none.
_WORTH_SAYING = 0.02
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
    knowledge: Knowledge,
    *,
    rival: Option | None,
    first: Option,
) -> tuple[list[str], str]:
    """Return the four sentences about the picked option, and the command that follows.

    ``rival``: the best of those that the error of the compute times does not tell apart from it; ``first``: the best there is.
    """
    gain = value(picked) / value(decision.baseline) - 1 if value(decision.baseline) else 0.0
    sure, settles = _sure(decision, picked, gain, job, knowledge, value, rival)
    following = settles or "ddltool emit PLAN -o enforce.json"
    if settles:
        worth = _worth(picked, rival, value)
        then = f"Next: {settles} on that machine, and profile: FILE beside it in the job, settles it{worth}."
    elif sum(picked.devices.values()) == 1 and _plain(plan):
        following = f"ddltool profile {job.model or 'MODEL'}"
        then = "Next: train on it with that batch; one device exchanges nothing, so no script need change."
    else:
        then = "Next: ddltool emit plan.json writes what the training script follows (-o plan.json saves the plan)."
    words = [_answer(decision, plan, picked, problem, value, gain), _why(decision, picked, first, value), sure, then]
    return words, following


def _plain(plan: Plan) -> bool:
    """Return whether a plan asks nothing of a script but its batch."""
    again = plan.sharding is not None and plan.sharding.checkpointing
    return not (plan.est_count or again or any(row.accumulation_steps for row in plan.assignments))


def why_not(option: Option, picked: Option, value: Value, tie: bool) -> str:
    """Return why an option is not picked, in few words."""
    ratio = value(option) / value(picked) - 1 if value(picked) else 0.0
    if tie and abs(ratio) < _SHOWN:
        return "as good, more to change"
    if tie:
        return f"tie ({ratio:+.0%}), more to change"
    if option.staleness and ratio > 0:
        return f"{ratio:.0%} ahead, but stale"
    return f"{-ratio:.0%} behind" if ratio < 0 else f"{ratio:.0%} ahead"


def _answer(decision: Decision, plan: Plan, picked: Option, problem: Problem, value: Value, gain: float) -> str:
    offered = {device.name: device.count for device in (*problem.devices, *problem.left_out)}
    used = _listed([_the(count, name, offered.get(name, count)) for name, count in picked.devices.items()])
    out = [f"the {_many(name, count)}" for name, count in offered.items() if name not in picked.devices]
    how = _how(decision, plan, picked)
    left = f"{',' if how else ''} and leave {_listed(out)} out" if out else ""
    return f"Use {used}{how}{left}: {_rate(picked)}, {_gain(decision, picked, value, gain)}.{_run(decision.run)}"


def _listed(parts: list[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _the(count: int, name: str, offered: int) -> str:
    if count < offered:
        return f"{count} of the {_many(name, offered)}"
    return f"the {_many(name, count, numbered=True)}"


def _many(name: str, count: int, *, numbered: bool = False) -> str:
    """Return a device type in the plural where there are several."""
    text = name if count == 1 or not name[-1].isalnum() or name.endswith(("s", "GB")) else f"{name}s"
    return f"{count} {text}" if count > 1 else f"one {text}" if numbered else text


def _every(name: str, count: int) -> str:
    return f"each {name}" if count > 1 else f"the {name}"


def _how(decision: Decision, plan: Plan, picked: Option) -> str:
    """Return what each device does."""
    if decision.layouts and decision.layouts[0].text == picked.order:
        layout = decision.layouts[0]
        used = layout.local_batch_sizes.items()
        if layout.sharding == "none" and layout.checkpointing == "none":
            size = counted(next(iter(layout.local_batch_sizes.values())), "sample")
            passes = f" in {layout.passes} passes" if layout.passes > 1 else ""
            return f", {size} a step{passes}, {show_bytes(max(layout.memory_bytes.values()))}"
        sizes = _listed([f"{size} on {_every(name, picked.devices[name])}" for name, size in used])
        passes = f" in {layout.passes} passes" if layout.passes > 1 else ""
        return f" with {layout.text}, {sizes}{passes}, {show_bytes(max(layout.memory_bytes.values()))} a process"
    if plan.est_count:
        return f" with {plan.est_count} logical workers"
    if plan.superstep is not None:
        return " with barriers after their own numbers of iterations"
    shares: dict[str, set[int]] = {}
    for row in plan.assignments:
        shares.setdefault(row.device_type, set()).add(row.local_batch_size)
    if len(shares) > 3:
        return ""
    each = {name: " or ".join(map(str, sorted(some))) for name, some in shares.items()}
    return f", {_listed([f'{size} samples on {_every(name, picked.devices[name])}' for name, size in each.items()])}"


def _rate(option: Option) -> str:
    between = option.low_s is not None and option.high_s is not None and option.low_s > 0
    if option.iteration_s < 1:
        ends = f" ({1 / (option.high_s or 1):.3g} to {1 / (option.low_s or 1):.3g})" if between else ""
        return f"{1 / option.iteration_s:.3g} steps/s{ends}"
    ends = f" ({show_seconds(option.low_s)} to {show_seconds(option.high_s)})" if between else ""
    return f"{show_seconds(option.iteration_s)} a step{ends}"


def _run(run: RunFigures | None) -> str:
    if run is None:
        return ""
    text = f" The whole run takes {show_hours(run.hours)}"
    if run.low_hours is not None and run.high_hours is not None:
        text += f" ({show_hours(run.low_hours)} to {show_hours(run.high_hours)})"
    text += "" if run.price is None else f" and costs {show_money(run.price)}"
    text += "" if run.energy_kwh is None else f", at most {run.energy_kwh:,.3g} kWh"
    if run.failures is not None and run.checkpoint_interval_s is not None:
        every = show_hours(run.checkpoint_interval_s / HOUR_S)
        text += f", with {run.failures:.2g} failures to expect and a checkpoint every {every} (Daly)"
    return f"{text}."


def _gain(decision: Decision, picked: Option, value: Value, gain: float) -> str:
    """Return what is gained against the best of what one would do without a plan, and against all devices."""
    if abs(gain) >= _WORTH_SAYING:
        text = _ahead(gain, decision.objective) + decision.baseline_name
    else:
        same = picked.devices == decision.baseline.devices
        text = "what one would do anyway" if same else f"as good as {decision.baseline_name}"
    every = next((name for name in decision.baselines if name.startswith("all ")), None)
    if every is not None and every != decision.baseline_name and value(decision.baselines[every]):
        text += f", and {_ahead(value(picked) / value(decision.baselines[every]) - 1, decision.objective)}{every}"
    return text


def _ahead(gain: float, objective: str) -> str:
    better, worse = _BETTER.get(objective, ("faster", "slower"))
    if objective in ("cheapest", "least-memory", "fewest-devices"):  # of a cost, what is saved of it
        gain = 1 - 1 / (1 + gain) if gain > 0 else gain
        return f"{abs(gain):.0%} {better if gain >= 0 else worse} than "
    return (
        f"{gain + 1:.3g} times as fast as " if gain >= 1 else f"{abs(gain):.0%} {better if gain >= 0 else worse} than "
    )


def _why(decision: Decision, picked: Option, first: Option, value: Value) -> str:
    single = sum(picked.devices.values()) == 1
    text = f"{picked.strategy}: " + (
        "one device has nothing to share or to exchange" if single else _WHY[picked.strategy]
    )
    every = next((option for name, option in decision.baselines.items() if name.startswith("all ")), None)
    if every is not None and every.devices != picked.devices and every.iteration_s > picked.iteration_s:
        exposed = every.communication_s
        parts = f"{show_seconds(every.compute_s)} until the slowest has computed its share"
        parts += "" if exposed is None else f", then {show_seconds(exposed)} of communication"
        text += (
            f"; on all {sum(every.devices.values())}, equally, a step takes {show_seconds(every.iteration_s)}: {parts}"
        )
    if first.strategy != picked.strategy and value(picked):
        stale = f", but with updates up to {first.staleness} iterations stale" if first.staleness else ""
        lead = value(first) / value(picked) - 1
        rest = "" if stale else ", too little to change a script for"
        ahead = f"is {lead:.1%} ahead{stale}{rest}" if lead >= 0.0005 else f"is just as good{stale}"
        if first.strategy in decision.too_close and not stale:
            ahead = f"is {lead:.1%} ahead, too close to tell apart"
        text += f"; {first.strategy} {ahead}"
    if picked.communication_s is None:
        return f"{text}; communication is not in these figures (no graph, no fitted model)."
    if single:
        return f"{text}."
    # Communication by a simulation, by a fit or of an earlier run has no error that anybody knows.
    given = picked.order in (FITTED, MEASURED)
    saves = (picked.order_saves_s or 0.0) >= _SHOWN * picked.iteration_s or not picked.order.startswith("DDP, ")
    order = f" with {picked.order}" if picked.order and not given and saves else ""
    share = picked.communication_s / picked.iteration_s
    starved = f" ({share:.0%} of it: larger batches per worker would gain far more)" if share > _STARVED else ""
    exposed_text = f"{show_seconds(picked.communication_s)} of each step is exposed communication{starved}"
    if share < 5e-5:
        exposed_text = "no communication worth mentioning is exposed"
    return f"{text}; {exposed_text}{order} ({picked.order if given else 'predicted'}, its error is not known)."


def _sure(
    decision: Decision,
    picked: Option,
    gain: float,
    job: Job,
    knowledge: Knowledge,
    value: Value,
    rival: Option | None,
) -> tuple[str, str]:
    """Return how sure the answer is, and the command that would make it surer; empty: nothing is open."""
    mixed, measure, of_gain = f"; {knowledge.remark}" if knowledge.remark else "", "", decision.gain_error
    source = f" ({decision.error_source})" if decision.error_source else ""
    known = "" if decision.error is None else f"known to within {decision.error:.0%}{source}"
    apart = decision.error if of_gain is None else of_gain
    between = ""
    if of_gain and abs(gain) >= _SHOWN:
        low, high = (1 + gain) / (1 + of_gain), (1 + gain) * (1 + of_gain)
        ends = f"{low - 1:+.0%}", f"{high - 1:+.0%}"
        if low >= 2:
            ends = f"{low:.3g}", f"{high:.3g} times as fast"
        between = "" if ends[0] == ends[1] else f"; the gain lies between {ends[0]} and {ends[1]}"
    if decision.error is None or apart is None:
        text = "as sure as the capabilities in the job, which come without an error; profile and fit the devices, "
        text += f"or give the telemetry of an earlier run, to know it{mixed}"
    elif rival is not None:
        measure = _measure({**rival.devices, **picked.devices}, knowledge, job)
        mix = " + ".join(f"{count} {each}" for each, count in rival.devices.items())
        lead = value(rival) / value(picked) - 1 if value(picked) else 0.0
        text = f"a tie, so the simpler one: compute times are {known}, and {rival.strategy} on {mix} is {lead:+.0%} by them"
        text += between + mixed
    elif picked.devices == decision.baseline.devices and abs(gain) < _WORTH_SAYING:
        text = f"compute times are {known}; no other plan comes near enough to matter{mixed}"
    elif abs(gain) <= apart and of_gain != 0:
        measure = _measure({**decision.baseline.devices, **picked.devices}, knowledge, job)
        text = f"too close to call; compute times are {known}, more than the difference{between}{mixed}"
    elif of_gain == 0 and picked.communication_s and abs(picked.compute_s / decision.baseline.compute_s - 1) < 0.0005:
        text = f"the gain is communication alone, whose error is not known; the devices' compute times, {known}, "
        text += f"are the same in both: measure it with ddltool network{mixed}"
    elif of_gain == 0:
        text = f"the devices are the same in both, so the error of their compute times ({decision.error:.0%}{source}) "
        text += f"is no error of the gain{mixed}"
    elif knowledge.remark:
        text = f"less than its error says, compute times {known}: {knowledge.remark}{between}"
        text += "; measure all types before you rely on it"
    else:
        text = f"compute times are {known}, less than the difference{between}"
    return f"How sure: {text}.", measure


def _measure(devices: Mapping[str, int], knowledge: Knowledge, job: Job) -> str:
    """Return the command that measures the least known of some device types."""
    name = max(devices, key=lambda name: (knowledge.errors.get(name, 0.0), name))
    sizes = ",".join(str(size) for size in sorted({max(1, job.batch_size // 2), job.batch_size, 2 * job.batch_size}))
    where = "" if name.lower().startswith(("cpu", "xeon", "epyc")) else " --device cuda"
    return f"ddltool profile {job.model or 'MODEL'} --batch-sizes {sizes}{where} --device-name {name} -o {name}.csv"


def _worth(picked: Option, rival: Option | None, value: Value) -> str:
    if rival is None or not value(picked):
        return ""
    lead = value(rival) / value(picked) - 1
    return f"; it is worth up to {lead:.0%}" if lead >= _SHOWN else ""
