"""Compares each strategy's best plan for one job and picks one: :func:`decide`.

What the decision says to people - the answer in a sentence, why, how sure, and what next - is :func:`explained`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from ddltool.analyzers.job.placement.problem import Problem
from ddltool.analyzers.job.planning.candidates import STRATEGIES, Candidate, Candidates
from ddltool.analyzers.job.planning.exposed import FITTED, MEASURED
from ddltool.analyzers.job.planning.job_model import JobModel
from ddltool.analyzers.job.planning.options import HOUR_S, Goal, Missed, PlanOptions
from ddltool.decision import LEAST_GAIN, Decision, Layout, Option, RunFigures
from ddltool.errors import Infeasible, InputError
from ddltool.job import Job
from ddltool.plans import BucketSetting, Plan, PrefetchSetting
from ddltool.units import counted, faster_than, show_bytes, show_hours, show_money, show_rate, show_seconds

# Stale updates cost progress that no prediction shows: asynchrony must be faster by this much to be taken.
STALENESS_MARGIN = 0.10


def decide(
    job: Job,
    problem: Problem,
    model: JobModel,
    *,
    options: PlanOptions | None = None,
    only: str | None = None,
) -> Plan:
    """Return the plan of the best strategy on its best devices for the goal, with the comparison in ``decision``.

    Objectives: ``fastest``: highest goodput where a noise scale is known, else throughput. ``cheapest``: lowest price per
    sample. ``same-bits``: the fastest plan whose results do not depend on the number of devices. ``least-memory``: least
    memory on the fullest device. ``fewest-devices``: fewest that meet the deadline or the throughput.

    Plans whose values differ by less than ``LEAST_GAIN`` or than the error of the compute times tie, and the simplest is
    picked. Asynchronous workers, whose updates may be stale, must be ahead by ``STALENESS_MARGIN``. ``only`` names a single
    strategy; None means all.

    Raises Infeasible when no strategy has a plan, InputError when the objective lacks a price, a model or a limit.
    """
    min_throughput = problem.min_throughput
    options = options or PlanOptions()
    goal = replace(
        options.goal,
        step_samples=job.max_workers * job.batch_size,
        slowest_step_s=math.inf if min_throughput is None else problem.max_workers / float(min_throughput),
    )
    _demand_inputs(goal, problem, model)
    candidates = Candidates(job=job, model=model, options=replace(options, goal=goal))
    ranked, left_out = _with_plans(candidates, problem, only)
    choice = _Choice(candidates)
    ranked.sort(key=lambda candidate: (-choice.value(candidate.option), STRATEGIES.index(candidate.option.strategy)))
    picked = choice.pick(ranked)
    decision = _compared(choice, picked, ranked, problem, left_out)
    unsure_options = (other.option for other in ranked if not other.option.staleness and choice.unsure(other, picked))
    clear_value = choice.value(picked.option) * (1 + LEAST_GAIN)
    rival = next((option for option in unsure_options if choice.value(option) > clear_value), None)
    words, following = explained(
        decision,
        picked.plan,
        picked.option,
        job,
        problem,
        choice.value,
        model,
        rival=rival,
        first=ranked[0].option,
        saved_as=options.saved_as,
    )
    return picked.plan.model_copy(
        update={
            "iteration_s": picked.option.iteration_s,
            "throughput": picked.option.throughput,
            "communication_s": picked.option.communication_s,
            "waste": max(0.0, _unwaiting_throughput(picked, problem) - picked.option.throughput),
            **_settings_of_whole_step(picked),
            "decision": decision.model_copy(update={"words": words, "next_step": following}),
        }
    )


def _with_plans(candidates: Candidates, problem: Problem, only: str | None) -> tuple[list[Candidate], dict[str, str]]:
    """Return the candidates that the objective takes, and strategy -> reason for those that have none.

    ``only``: the one strategy to look at; None: all. Raises Infeasible where there is no candidate. Where limits on time or
    money are the reason, it is the Missed of the candidate that missed them by least.
    """
    refused: dict[str, Infeasible] = {}
    found = candidates.of(problem, refused, only)
    left_out = {strategy: str(error) for strategy, error in refused.items()}
    if candidates.goal.objective == "same-bits":
        unequal = [other.option.strategy for other in found if other.option.determinism not in ("D1", "D2")]
        left_out |= dict.fromkeys(unequal, "its results depend on the number of devices")
        found = [candidate for candidate in found if candidate.option.determinism in ("D1", "D2")]
    if not found:
        missed = [error for error in refused.values() if isinstance(error, Missed)]
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise min(missed, key=lambda error: error.by, default=Infeasible(f"no strategy has a plan: {reasons}"))
    return found, left_out


def _compared(
    choice: _Choice, picked: Candidate, ranked: list[Candidate], problem: Problem, left_out: dict[str, str]
) -> Decision:
    """Return the comparison of the picked candidate with the best of each strategy and with what one would do otherwise.

    ``ranked``: all candidates, best first; ``left_out``: strategy -> why it has none.
    """
    candidates, model = choice.candidates, choice.candidates.model
    # One candidate per strategy, and size of groups: the best one, or the picked one.
    best_per_strategy = list({_way(other.option): other for other in (*reversed(ranked), picked)}.values())
    best_per_strategy.sort(key=ranked.index)
    others = [other for other in best_per_strategy if other is not picked]
    baselines = candidates.usual(problem) or {"the plan itself": picked.option}
    baseline_name = max(baselines, key=lambda key: choice.value(baselines[key]))
    return Decision(
        objective=choice.goal.objective,
        picked=picked.option.strategy,
        baseline=baselines[baseline_name],
        baseline_name=baseline_name,
        baselines=baselines,
        options=[
            other.option
            if other is picked
            else other.option.model_copy(
                update={"why_not": why_not(other.option, picked.option, choice.value, choice.ties(other, picked))}
            )
            for other in best_per_strategy
        ],
        left_out=left_out,
        words=[],
        would_save=picked.would_save(),
        step_tokens=None if model.layouts is None else model.layouts.step_tokens,
        error=model.error(picked.option.devices),
        gain_error=model.gain_error(picked.option, baselines[baseline_name]),
        too_close=[other.option.strategy for other in others if choice.unsure(other, picked)],
        layouts=_all_layouts(picked, best_per_strategy),
        run=choice.goal.run(picked.option),
        pareto=_pareto([other.option for other in ranked], candidates, problem),
        error_source=model.error_source,
        communication_source="" if model.communication is None else model.communication.source,
    )


def _way(option: Option) -> tuple[str, str]:
    """Return the key of options that are variants of each other, of which the comparison shows one: strategy and groups."""
    return option.strategy, "" if option.group is None else option.group.text


def _demand_inputs(goal: Goal, problem: Problem, model: JobModel) -> None:
    """Raise InputError where the objective or a limit needs prices, a model or a limit that the job lacks."""
    if goal.objective == "cheapest" or goal.budget < math.inf:
        unpriced = next((device.name for device in problem.devices if device.price_micro is None), None)
        if unpriced is not None:
            purpose = "the cheapest plan" if goal.objective == "cheapest" else "a budget"
            raise InputError(f"devices.{unpriced}.price_per_hour", "is missing", f"{purpose} needs every price")
    if goal.objective == "least-memory" and model.layouts is None:
        raise InputError(
            "--objective", "least-memory needs a model to look at", "name model: zoo:NAME, file.py:factory, ..."
        )
    if goal.objective == "fewest-devices" and not goal.limited:
        remedy = "give --deadline with --tokens or --samples, or min_throughput in the job"
        raise InputError("--objective", "fewest-devices needs something to keep", remedy)


class _Choice:
    """Ranks candidates by the goal and picks one."""

    def __init__(self, candidates: Candidates) -> None:
        """Take the candidates' goal and model."""
        self.candidates, self.goal = candidates, candidates.goal

    def value(self, option: Option) -> float:
        """Return the value that options are ranked by; higher is better, and 0.0 stands for an unknown one.

        By objective it is samples per price, 1 / bytes, 1 / devices, or progress per second; time and price include the
        slowdown by failures and checkpoints.
        """
        slowdown = self.goal.slowdown(sum(option.devices.values()))
        if self.goal.objective == "cheapest":
            return 0.0 if option.price_per_sample is None else 1 / max(option.price_per_sample * slowdown, 1e-300)
        if self.goal.objective == "least-memory":
            return 0.0 if option.memory_bytes is None else 1 / max(option.memory_bytes, 1.0)
        if self.goal.objective == "fewest-devices":
            return 1 / sum(option.devices.values())
        return self.candidates.progress(option) / slowdown

    def unsure(self, first: Candidate, second: Candidate) -> bool:
        """Return whether two candidates differ by less than the error of the compute times, so that either may be better.

        Memory and numbers of devices are known without error.
        """
        error = self.candidates.model.gain_error(first.option, second.option)
        values = self.value(first.option), self.value(second.option)
        if not error or min(values) <= 0 or self.goal.objective in ("least-memory", "fewest-devices"):
            return False
        return abs(math.log(values[0] / values[1])) <= math.log1p(error)

    def ties(self, first: Candidate, second: Candidate) -> bool:
        """Return whether neither of two candidates beats the other."""
        return not self.beats(first, second) and not self.beats(second, first)

    def beats(self, first: Candidate, second: Candidate) -> bool:
        """Return whether a candidate is ahead by more than both the margin and the error of the compute times."""
        asynchronous = [candidate.plan.superstep is not None for candidate in (first, second)]
        margin = STALENESS_MARGIN if asynchronous == [True, False] else LEAST_GAIN
        return self.value(first.option) > self.value(second.option) * (1 + margin) and not self.unsure(first, second)

    def pick(self, candidates: list[Candidate]) -> Candidate:
        """Return the simplest of the candidates that no other beats.

        Simpler is the earlier strategy of ``STRATEGIES``, then the smaller group, then fewer device types; then the higher
        value and fewer devices decide.
        """
        unbeaten = [
            candidate for candidate in candidates if not any(self.beats(other, candidate) for other in candidates)
        ]
        return min(
            unbeaten,
            key=lambda candidate: (
                STRATEGIES.index(candidate.option.strategy),
                0 if candidate.option.group is None else candidate.option.group.size,
                len(candidate.option.devices),
                -self.value(candidate.option),
                sum(candidate.option.devices.values()),
            ),
        )


def _pareto(options: list[Option], candidates: Candidates, problem: Problem) -> list[Option]:
    """Return the Pareto front of time and price per sample, the fastest first; empty where a price is not known.

    Its points are the strategies' options and the equal splits of single types.
    """
    if any(device.price_micro is None for device in problem.devices):
        return []
    priced = [
        option
        for option in (*options, *candidates.alike(problem))
        if option.price_per_sample is not None and not option.staleness
    ]

    def cost(option: Option) -> tuple[float, float]:
        """Return seconds and price of a sample, failures and checkpoints included."""
        slowdown = candidates.goal.slowdown(sum(option.devices.values()))
        return slowdown / candidates.progress(option), slowdown * (option.price_per_sample or 0.0)

    front = list[Option]()
    for option in sorted(priced, key=cost):
        if not front or cost(option)[1] < cost(front[-1])[1] * (1 - LEAST_GAIN):
            front.append(option)
    return front


def _settings_of_whole_step(picked: Candidate) -> dict[str, BucketSetting | PrefetchSetting | None]:
    """Return the fields ``ddp`` and ``fsdp2`` of the plan, with the times of a whole step, all accumulation passes included.

    The picked candidate's own settings carry the times of the last pass alone.
    """
    step_s, exposed = picked.option.iteration_s, picked.exposed
    times = {"step_s": step_s, "default_step_s": step_s + (picked.option.order_saves_s or 0.0)}
    ddp, fsdp2 = (None, None) if exposed is None else (exposed.ddp, exposed.fsdp2)
    return {
        "ddp": ddp and ddp.model_copy(update=times),
        "fsdp2": fsdp2 and fsdp2.model_copy(update=times),
    }


def _all_layouts(picked: Candidate, ranked: list[Candidate]) -> list[Layout]:
    """Return all layouts that were looked at, without repeats: the picked plan's, then the others'.

    Layouts that do not fit into memory come last.
    """
    layouts = list(picked.layouts)
    for other in ranked:
        layouts += [layout for layout in other.layouts if layout not in layouts]
    fitting = [layout for layout in layouts if not layout.missing_bytes]
    return fitting + [layout for layout in layouts if layout.missing_bytes]


def _unwaiting_throughput(picked: Candidate, problem: Problem) -> float:
    """Return the mini-batches per second that the plan's devices would make if none ever waited."""
    plan, option = picked.plan, picked.option
    if plan.strategy == "elastic-bsp":  # its throughput includes transfers in each iteration
        capability = {device.name: float(device.capability_per_s) for device in problem.devices}
        return sum(capability[name] * count for name, count in option.devices.items())
    if plan.strategy == "goodput":  # one type and one batch size: all devices compute throughout compute_s
        return option.throughput * option.iteration_s / option.compute_s
    return plan.waste + plan.throughput


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
    """Return four sentences on the picked option (answer, reason, certainty, next step), and the next command.

    A fifth sentence tells what else would save time, if anything would.

    Args:
        value: what options are ranked by, higher is better.
        rival: the best option within the error of the compute times that is ahead of the picked one; None: no such option.
        first: the highest-ranked option.
        saved_as: the file that the plan is written to; empty: none.
    """
    gain = value(picked) / value(decision.baseline) - 1 if value(decision.baseline) else 0.0
    certainty, measuring_command = _certainty(decision, picked, gain, job, knowledge, value, rival)
    next_command = measuring_command or f"ddltool emit {saved_as or 'PLAN'} -o enforce.json"
    if measuring_command:
        worth = _lead_clause(picked, rival, value)
        next_step = (
            f"Next: {measuring_command} on that machine, and profile: FILE beside it in the job, settles it{worth}."
        )
    elif sum(picked.devices.values()) == 1 and _needs_only_batch(plan):
        next_command = f"ddltool profile {job.model or 'MODEL'}"
        next_step = "Next: train on it with that batch; one device exchanges nothing, so no script need change."
    else:
        saving = "" if saved_as else " (-o plan.json saves the plan)"
        next_step = f"Next: ddltool emit {saved_as or 'plan.json'} writes what the training script follows{saving}."
    sentences = [
        _answer(decision, plan, picked, problem, value, gain),
        _why(decision, plan, picked, first, value),
        certainty,
        next_step,
    ]
    gains = {name: share for name, share in decision.would_save.items() if share >= LEAST_GAIN}
    if gains:
        texts = [f"{name} would save {share:.0%} of a step" for name, share in gains.items()]
        remark = ", if your loss bears fp8" if any("fp8" in name for name in gains) else ""
        sentences.append(f"Beside this: {_joined(texts)}{remark} (predicted, in this layout).")
    return sentences, next_command


def _needs_only_batch(plan: Plan) -> bool:
    """Return whether a training script can follow a plan by its batch size alone: no passes, no recomputing, no ESTs."""
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
    """Return the sentences that name the devices, the work of each, the rate, the gain, and the whole run.

    ``gain``: value of the picked option over the baseline's, less 1.
    """
    offered = {device.name: device.count for device in (*problem.devices, *problem.left_out)}
    used_text = _joined(
        [_counted_type(count, name, offered.get(name, count)) for name, count in picked.devices.items()]
    )
    unused = [f"the {_type_name(name, count)}" for name, count in offered.items() if name not in picked.devices]
    work = _work_per_device(decision, plan, picked)
    unused_clause = f"{',' if work else ''} and leave {_joined(unused)} out" if unused else ""
    rate = _rate(picked, (decision.step_tokens or picked.step_samples or problem.max_workers * problem.batch_size))
    unit = "tokens" if decision.step_tokens else "samples"
    return f"Use {used_text}{work}{unused_clause}: {rate} {unit}/s, {_gain(decision, picked, value, gain)}.{_run(decision.run)}"


def _joined(parts: list[str]) -> str:
    """Return the parts as a list in words, such as ``a, b and c``."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _counted_type(count: int, name: str, offered: int) -> str:
    """Return so many devices of a type in words, such as ``2 of the 4 T4s``, ``the 4 T4s`` or ``the one T4``."""
    if count < offered:
        return f"{count} of the {_type_name(name, offered)}"
    return f"the {_type_name(name, count, numbered=True)}"


def _type_name(name: str, count: int, *, numbered: bool = False) -> str:
    """Return a device type with its number, such as ``4 T4s``; for one device ``T4``, or ``one T4`` if ``numbered``.

    Names that end in "s", in "GB" or in a sign have no plural.
    """
    if count == 1:
        return f"one {name}" if numbered else name
    has_plural = name[-1].isalnum() and not name.endswith(("s", "GB"))
    return f"{count} {name}s" if has_plural else f"{count} {name}"


def _each_of_type(name: str, count: int, together: int = 1) -> str:
    """Return the devices that take one share, such as ``each T4``, ``the T4`` where there is one, or ``each 2 T4s``.

    ``together``: devices that hold one replica of the model.
    """
    if together > 1:
        return f"each {_type_name(name, together)}"
    return f"each {name}" if count > 1 else f"the {name}"


def _work_per_device(decision: Decision, plan: Plan, picked: Option) -> str:
    """Return the clause on each device's work: samples, passes, logical workers or barriers; empty for many shares."""
    if decision.layouts and decision.layouts[0].text == picked.order:
        layout = decision.layouts[0]
        sizes_by_type = layout.local_batch_sizes.items()
        if layout.sharding == "none" and layout.checkpointing == "none" and layout.gpus == 1:
            size = counted(next(iter(layout.local_batch_sizes.values())), "sample")
            passes = f" in {layout.passes} passes" if layout.passes > 1 else ""
            return f", {size} a step{passes}, {show_bytes(max(layout.memory_bytes.values()))}"
        sizes = _joined(
            [f"{size} on {_each_of_type(name, picked.devices[name], layout.gpus)}" for name, size in sizes_by_type]
        )
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


def _rate(option: Option, step_items: float) -> str:
    """Return the seconds of a step, with the interval where it is known, and the samples or tokens in a second."""
    interval = ""
    if option.low_s is not None and option.high_s is not None and option.low_s > 0:
        interval = f" ({show_seconds(option.low_s)} to {show_seconds(option.high_s)})"
    return f"{show_seconds(option.iteration_s)} a step{interval}, {show_rate(step_items / option.iteration_s)}"


def _run(run: RunFigures | None) -> str:
    """Return the sentence on time, price and energy of the whole run; empty where its length is not known."""
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
    """Return the clause on the gain over the baseline, which is the best of what one would do without planning."""
    if abs(gain) >= LEAST_GAIN:
        return _ahead(gain, decision.objective) + decision.baseline_name
    has_same_devices = picked.devices == decision.baseline.devices
    return "what one would do anyway" if has_same_devices else f"as good as {decision.baseline_name}"


def _ahead(gain: float, objective: str) -> str:
    """Return a gain of value in words, such as "25% faster than "; of a cost it is the share that is saved."""
    better, worse = _BETTER.get(objective, ("faster", "slower"))
    if objective in ("cheapest", "least-memory", "fewest-devices"):  # of a cost, what is saved of it
        gain = 1 - 1 / (1 + gain) if gain > 0 else gain
        return f"{abs(gain):.0%} {better if gain >= 0 else worse} than "
    return f"{faster_than(gain)} "


def _why(decision: Decision, plan: Plan, picked: Option, first: Option, value: Value) -> str:
    """Return the sentence that says why the picked strategy wins, and how much communication is exposed."""
    is_single = sum(picked.devices.values()) == 1
    grouped = None if picked.group is None else _WHY_STAGES if picked.group.pipeline > 1 else _WHY_TENSORS
    # Shares by speed are equal where all devices are equally fast.
    is_equal = picked.strategy == "lb-bsp" and len({row.local_batch_size for row in plan.assignments}) == 1
    alone = (
        "one device has nothing to share or to exchange" if is_single else _WHY["bsp" if is_equal else picked.strategy]
    )
    text = f"Why: {grouped or alone}"
    overall = next((option for name, option in decision.baselines.items() if name.startswith("all ")), None)
    if overall is not None and overall.devices != picked.devices and overall.iteration_s > picked.iteration_s:
        exposed_s = overall.communication_s
        parts = f"{show_seconds(overall.compute_s)} until the slowest has computed its share"
        parts += "" if exposed_s is None else f", then {show_seconds(exposed_s)} of communication"
        everyone = f"on all {sum(overall.devices.values())} with equal shares"
        text += f"; {everyone} a step takes {show_seconds(overall.iteration_s)}: {parts}"
    wider = [layout for layout in decision.layouts if set(layout.devices) > set(picked.devices) and layout.step_s]
    if overall is None and wider:
        best = min(wider, key=lambda layout: layout.step_s or math.inf)
        text += f"; on {best.devices_text} a step takes {show_seconds(best.step_s)} at best"
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
    return f"{text}; {exposed_text}{order} ({picked.order if is_fitted_or_measured else 'predicted'})."


def _certainty(
    decision: Decision,
    picked: Option,
    gain: float,
    job: Job,
    knowledge: JobModel,
    value: Value,
    rival: Option | None,
) -> tuple[str, str]:
    """Return the sentence on how sure the choice is, and the measuring command that would settle it; empty: it is settled.

    ``gain``: of the picked option over the baseline; ``rival``: the best option ahead of it within the error; None: none is.
    """
    remark = f"; {knowledge.remark}" if knowledge.remark else ""
    gain_error = decision.gain_error
    if decision.error is None:
        text = "as sure as the capabilities in the job, which come without an error; profile and fit the devices, "
        return f"How sure: {text}or give the telemetry of an earlier run, to know it{remark}.", ""
    source = f" ({decision.error_source})" if decision.error_source else ""
    known = f"known to within {decision.error:.0%}{source}"
    if picked.low_s is not None and picked.high_s is not None and picked.iteration_s:
        below, above = (1 - picked.low_s / picked.iteration_s, picked.high_s / picked.iteration_s - 1)
        known = f"known to within {below:.0%} below and {above:.0%} above{source}"
    interval = _gain_interval(gain, gain_error)
    command = ""
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
        text = f"compute times are {known}, less than the difference{interval}"
    return f"How sure: {text}.", command


def _gain_interval(gain: float, gain_error: float | None) -> str:
    """Return the clause on the interval in which the gain lies; empty where its ends print alike, or none is known."""
    if not gain_error or abs(gain) < _LEAST_SHOWN:
        return ""
    low, high = (1 + gain) / (1 + gain_error), (1 + gain) * (1 + gain_error)
    ends = (f"{low:.3g}", f"{high:.3g} times as fast") if low >= 2 else (f"{low - 1:+.0%}", f"{high - 1:+.0%}")
    return "" if ends[0] == ends[1] else f"; the gain lies between {ends[0]} and {ends[1]}"


def _is_only_communication(picked: Option, baseline: Option) -> bool:
    """Return whether two plans compute for the same time, so that what differs is their communication."""
    return bool(picked.communication_s) and abs(picked.compute_s / baseline.compute_s - 1) < 0.0005


def _measuring_command(devices: Mapping[str, int], knowledge: JobModel, job: Job) -> str:
    """Return the command that profiles the device type whose compute times have the largest error.

    It measures half, one and two of the job's batches on a machine with such a device.
    """
    name = max(devices, key=lambda name: (knowledge.errors.get(name, 0.0), name))
    sizes = ",".join(str(size) for size in sorted({max(1, job.batch_size // 2), job.batch_size, 2 * job.batch_size}))
    device_option = "" if name.lower().startswith(("cpu", "xeon", "epyc")) else " --device cuda"
    return f"ddltool profile {job.model or 'MODEL'} --batch-sizes {sizes}{device_option} --device-name {name} -o {name}.csv"


def _lead_clause(picked: Option, rival: Option | None, value: Value) -> str:
    """Return the clause on by how much the rival may be better; empty without a rival, and where that is too little."""
    if rival is None or not value(picked):
        return ""
    lead = value(rival) / value(picked) - 1
    return f"; it is worth up to {lead:.0%}" if lead >= _LEAST_SHOWN else ""
