"""Every strategy for one job on the best devices for each, and which one to take. Start at :func:`decide`."""

from __future__ import annotations

import math
from dataclasses import replace

from ddltool.analyzers.deciding.candidates import STRATEGIES, Candidate, Candidates, Settings
from ddltool.analyzers.deciding.goal import Goal, Missed
from ddltool.analyzers.deciding.knowledge import Knowledge
from ddltool.analyzers.deciding.words import explained, why_not
from ddltool.analyzers.placement.problem import Problem
from ddltool.decision import Decision, Layout, Option
from ddltool.errors import Infeasible, InputError
from ddltool.job import Job
from ddltool.plans import BucketSetting, Plan, PrefetchSetting

# Faster by less than this is no reason to change anything, however exact the figures are.
LEAST_GAIN = 0.02
# Stale updates cost progress that no prediction shows: asynchrony must be faster by this much to be taken.
STALENESS_MARGIN = 0.10


def decide(
    job: Job,
    problem: Problem,
    knowledge: Knowledge,
    *,
    settings: Settings | None = None,
    goal: Goal | None = None,
    only: str | None = None,
) -> Plan:
    """Return the plan of the best strategy on the best devices for the goal, with the comparison in ``decision``.

    ``fastest``: most progress per second, goodput where a noise scale is known, else throughput. ``cheapest``: the lowest
    price per sample. ``same-bits``: the fastest plan whose results do not depend on the number of devices. ``least-memory``:
    the least on the fullest device. ``fewest-devices``: what keeps the deadline or the throughput with fewest. What is not
    better by more than ``LEAST_GAIN`` and by more than the error of the compute times is a tie, and the simplest is taken;
    asynchronous workers, whose updates may be stale, only from ``STALENESS_MARGIN`` on. ``only``: one strategy.

    Raises Infeasible when no strategy has a plan, InputError when the objective lacks a price, a model or a limit.
    """
    least = problem.min_throughput
    aim = replace(
        goal or Goal(),
        step_samples=job.max_workers * job.batch_size,
        slowest_step_s=math.inf if least is None else problem.max_workers / float(least),
    )
    _check(aim, problem, knowledge)
    maker = Candidates(job=job, knowledge=knowledge, settings=settings or Settings(), goal=aim)
    refused: dict[str, Infeasible] = {}
    found = maker.of(problem, refused, only)
    left_out = {strategy: str(error) for strategy, error in refused.items()}
    if aim.objective == "same-bits":
        left_out |= {
            candidate.option.strategy: "its results depend on the number of devices"
            for candidate in found
            if candidate.option.determinism not in ("D1", "D2")
        }
        found = [candidate for candidate in found if candidate.option.determinism in ("D1", "D2")]
    if not found and (missed := [error for error in refused.values() if isinstance(error, Missed)]):
        raise min(missed, key=lambda error: error.by)
    if not found:
        raise Infeasible("no strategy has a plan: " + "; ".join(f"{name}: {why}" for name, why in left_out.items()))
    choice = _Choice(maker)
    found.sort(key=lambda candidate: (-choice.value(candidate.option), STRATEGIES.index(candidate.option.strategy)))
    picked = choice.pick(found)
    # One line for each strategy: its best, or the one that is picked.
    ranked = list({it.option.strategy: it for it in (*reversed(found), picked)}.values())
    ranked.sort(key=found.index)
    usual = maker.usual(problem) or {"the plan itself": picked.option}
    name = max(usual, key=lambda each: choice.value(usual[each]))
    options = [
        it.option
        if it is picked
        else it.option.model_copy(
            update={"why_not": why_not(it.option, picked.option, choice.value, choice.ties(it, picked))}
        )
        for it in ranked
    ]
    decision = Decision(
        objective=aim.objective,
        picked=picked.option.strategy,
        baseline=usual[name],
        baseline_name=name,
        baselines=usual,
        options=options,
        left_out=left_out,
        words=[],
        error=knowledge.error(picked.option.devices),
        gain_error=knowledge.gain_error(picked.option, usual[name]),
        too_close=[it.option.strategy for it in ranked if it is not picked and choice.unsure(it, picked)],
        layouts=_listed(picked, ranked),
        run=aim.run(picked.option),
        pareto=_pareto([it.option for it in found], maker, problem),
        error_source=knowledge.error_source,
        communication_source="" if knowledge.communication is None else knowledge.communication.source,
    )
    ahead = (it.option for it in found if not it.option.staleness and choice.unsure(it, picked))
    worth = choice.value(picked.option) * (1 + LEAST_GAIN)
    rival = next((option for option in ahead if choice.value(option) > worth), None)
    words, following = explained(
        decision, picked.plan, picked.option, job, problem, choice.value, knowledge, rival=rival, first=found[0].option
    )
    decision = decision.model_copy(update={"words": words, "next_step": following})
    return picked.plan.model_copy(
        update={
            "iteration_s": picked.option.iteration_s,
            "throughput": picked.option.throughput,
            "communication_s": picked.option.communication_s,
            "waste": max(0.0, _in_use(picked, problem) - picked.option.throughput),
            **_in_step(picked),
            "decision": decision,
        }
    )


def _check(goal: Goal, problem: Problem, knowledge: Knowledge) -> None:
    """Raise InputError where the objective or a limit needs what the job does not say."""
    if goal.objective == "cheapest" or goal.budget < math.inf:
        nameless = next((device.name for device in problem.devices if device.price_micro is None), None)
        if nameless is not None:
            what = "the cheapest plan" if goal.objective == "cheapest" else "a budget"
            raise InputError(f"devices.{nameless}.price_per_hour", "is missing", f"{what} needs every price")
    if goal.objective == "least-memory" and knowledge.layouts is None:
        raise InputError(
            "--objective", "least-memory needs a model to look at", "name model: zoo:NAME, file.py:factory, ..."
        )
    if goal.objective == "fewest-devices" and not goal.limited:
        remedy = "give --deadline with --tokens or --samples, or min_throughput in the job"
        raise InputError("--objective", "fewest-devices needs something to keep", remedy)


class _Choice:
    """Which of several candidates is taken."""

    def __init__(self, maker: Candidates) -> None:
        self.maker, self.goal = maker, maker.goal

    def value(self, option: Option) -> float:
        """Return what an option is ranked by, the most first."""
        lost = self.goal.lost(sum(option.devices.values()))
        if self.goal.objective == "cheapest":
            return 0.0 if option.price_per_sample is None else 1 / max(option.price_per_sample * lost, 1e-300)
        if self.goal.objective == "least-memory":
            return 0.0 if option.memory_bytes is None else 1 / max(option.memory_bytes, 1.0)
        if self.goal.objective == "fewest-devices":
            return 1 / sum(option.devices.values())
        return self.maker.progress(option) / lost

    def unsure(self, one: Candidate, other: Candidate) -> bool:
        """Return whether the error of the compute times is more than what lies between two."""
        error = self.maker.knowledge.gain_error(one.option, other.option)
        values = self.value(one.option), self.value(other.option)
        if not error or min(values) <= 0 or self.goal.objective in ("least-memory", "fewest-devices"):
            return False
        return abs(math.log(values[0] / values[1])) <= math.log1p(error)

    def ties(self, one: Candidate, other: Candidate) -> bool:
        """Return whether neither of two is surely better."""
        return not self.beats(one, other) and not self.beats(other, one)

    def beats(self, one: Candidate, other: Candidate) -> bool:
        """Return whether one is better than another by more than is worth a change, or than anybody can know."""
        asynchronous = [it.plan.superstep is not None for it in (one, other)]
        margin = STALENESS_MARGIN if asynchronous == [True, False] else LEAST_GAIN
        return self.value(one.option) > self.value(other.option) * (1 + margin) and not self.unsure(one, other)

    def pick(self, found: list[Candidate]) -> Candidate:
        """Return the simplest of those that no other beats: by strategy, types of devices, and what it reaches."""
        standing = [it for it in found if not any(self.beats(other, it) for other in found)]
        return min(
            standing,
            key=lambda it: (
                STRATEGIES.index(it.option.strategy),
                len(it.option.devices),
                -self.value(it.option),
                sum(it.option.devices.values()),
            ),
        )


def _pareto(found: list[Option], maker: Candidates, problem: Problem) -> list[Option]:
    """Return, the fastest first, what is neither slower nor dearer per sample than anything else that was looked at.

    Beside what the strategies found, equal splits of each type alone; empty where a price is not known.
    """
    if any(device.price_micro is None for device in problem.devices):
        return []
    priced = [it for it in (*found, *maker.alike(problem)) if it.price_per_sample is not None and not it.staleness]

    def cost(option: Option) -> tuple[float, float]:
        lost = maker.goal.lost(sum(option.devices.values()))
        return lost / maker.progress(option), lost * (option.price_per_sample or 0.0)

    kept = list[Option]()
    for option in sorted(priced, key=cost):
        if not kept or cost(option)[1] < cost(kept[-1])[1] * (1 - LEAST_GAIN):
            kept.append(option)
    return kept


def _in_step(picked: Candidate) -> dict[str, BucketSetting | PrefetchSetting | None]:
    """Return the communication settings with the time of the plan's own step, all its passes included."""
    step_s, exposed = picked.option.iteration_s, picked.exposed
    times = {"step_s": step_s, "default_step_s": step_s + (picked.option.order_saves_s or 0.0)}
    ddp, fsdp2 = (None, None) if exposed is None else (exposed.ddp, exposed.fsdp2)
    return {
        "ddp": ddp and ddp.model_copy(update=times),
        "fsdp2": fsdp2 and fsdp2.model_copy(update=times),
    }


def _listed(picked: Candidate, ranked: list[Candidate]) -> list[Layout]:
    """Return the layouts of the picked plan, then what others found beside them."""
    made = list(picked.layouts)
    for other in ranked:
        made += [layout for layout in other.layouts if layout not in made]
    fitting = [layout for layout in made if not layout.missing_bytes]
    return fitting + [layout for layout in made if layout.missing_bytes]


def _in_use(picked: Candidate, problem: Problem) -> float:
    """Return the mini-batches per second that the plan's devices make while none of them waits, by the plan's own times."""
    plan, option = picked.plan, picked.option
    if plan.strategy == "elastic-bsp":  # its own figures carry transfers in each iteration
        each = {device.name: float(device.capability_per_s) for device in problem.devices}
        return sum(each[name] * count for name, count in option.devices.items())
    if plan.strategy == "goodput":  # one type and one batch: all of them compute throughout compute_s
        return option.throughput * option.iteration_s / option.compute_s
    return plan.waste + plan.throughput
