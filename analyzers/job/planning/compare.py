"""Compares each strategy's best plan for one job and picks one: :func:`decide`.

What the decision says to people is in :mod:`~.decision_words`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ddltool.analyzers.job.placement.problem import Problem
from ddltool.analyzers.job.planning.candidates import STRATEGIES, Candidate, Candidates
from ddltool.analyzers.job.planning.decision_words import explained, why_not
from ddltool.analyzers.job.planning.job_model import JobModel
from ddltool.analyzers.job.planning.options import Goal, Missed, PlanOptions
from ddltool.decision import LEAST_GAIN, Decision, Layout, Option
from ddltool.errors import Infeasible, InputError
from ddltool.job import Job
from ddltool.plans import BucketSetting, Plan, PrefetchSetting

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

    Plans tie whose values differ by less than ``LEAST_GAIN`` or than the error of the compute times; of these the simplest is
    picked. Asynchronous workers, whose updates may be stale, must be ahead by ``STALENESS_MARGIN``.

    Args:
        job: the job to plan.
        problem: the placement problem of the job, with the speed of each device type.
        model: what is known of the job's times, memory and communication.
        options: how to plan, with the goal; None: the defaults.
        only: the one strategy to plan by; None: all are compared.

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
    cheapest = candidates.cheapest(problem) if goal.objective == "fastest" and only is None else None
    decision = _compared(choice, picked, ranked, problem, left_out, cheapest)
    # The rival may be better than the picked option, and only a measurement can tell; stale updates are no question of speed.
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
    """Return (candidates that the objective admits, strategy -> reason for each strategy that has none).

    ``only``: the one strategy to look at; None: all. Raises Infeasible where there is no candidate. Where some candidates
    missed limits on time or money, that is the :class:`Missed` of the one that missed them by least.
    """
    refused: dict[str, Infeasible] = {}
    taken = candidates.of(problem, refused, only)
    left_out = {strategy: str(error) for strategy, error in refused.items()}
    if candidates.goal.objective == "same-bits":
        # D1 and D2 give the same results on any number of devices, D2 on devices of any type too
        unequal = [other.option.strategy for other in taken if other.option.determinism not in ("D1", "D2")]
        left_out |= dict.fromkeys(unequal, "its results depend on the number of devices")
        taken = [candidate for candidate in taken if candidate.option.determinism in ("D1", "D2")]
    if not taken:
        missed = [error for error in refused.values() if isinstance(error, Missed)]
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise min(missed, key=lambda error: error.by, default=Infeasible(f"no strategy has a plan: {reasons}"))
    return taken, left_out


def _compared(
    choice: _Choice,
    picked: Candidate,
    ranked: list[Candidate],
    problem: Problem,
    left_out: dict[str, str],
    cheapest: Candidate | None,
) -> Decision:
    """Return the comparison of the picked candidate with the best of each strategy and with plans made without planning.

    ``ranked``: all candidates, best first; ``left_out``: strategy -> why it has no candidate; ``cheapest``: a candidate to
    compare on price as well, None for none. The decision's ``words`` are still empty.
    """
    candidates, model = choice.candidates, choice.candidates.model
    best_per_variant = _best_per_variant(ranked, picked)
    others = [other for other in best_per_variant if other is not picked]
    baselines = candidates.usual(problem, picked.option.devices) or {"the plan itself": picked.option}
    baseline_name = max(baselines, key=lambda name: choice.value(baselines[name]))
    state_shards = 1 if picked.plan.sharding is None else picked.plan.sharding.shard
    pareto = _pareto([other.option for other in (*ranked, *([cheapest] if cheapest else []))], candidates, problem)
    layouts = _all_layouts(picked, best_per_variant, cheapest)
    options = (*(other.option for other in best_per_variant), *baselines.values(), *pareto)
    device_counts = {sum(one.devices.values()) for one in options} | {sum(one.devices.values()) for one in layouts}
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
            for other in best_per_variant
        ],
        left_out=left_out,
        words=[],
        would_save=picked.would_save(),
        step_tokens=None if model.layouts is None else model.layouts.step_tokens,
        error=model.error(picked.option.devices),
        gain_error=model.gain_error(picked.option, baselines[baseline_name]),
        too_close=[other.option.strategy for other in others if choice.unsure(other, picked)],
        layouts=layouts,
        run=choice.goal.run(picked.option),
        failures=choice.goal.failure_figures(picked.option, state_shards),
        failure_factors=choice.goal.failure_factors(device_counts),
        pareto=pareto,
        error_source=model.error_source,
        communication_source="" if model.communication is None else model.communication.source,
    )


def _best_per_variant(ranked: list[Candidate], picked: Candidate) -> list[Candidate]:
    """Return one candidate per variant, best first: the picked one for its variant, the highest-ranked of each other.

    ``ranked``: all candidates, best first, with ``picked`` among them.
    """
    by_variant: dict[tuple[str, str], Candidate] = {}
    for candidate in (picked, *ranked):
        by_variant.setdefault(_variant_key(candidate.option), candidate)
    return sorted(by_variant.values(), key=ranked.index)


def _variant_key(option: Option) -> tuple[str, str]:
    """Return (strategy, groups of devices in words, "" for single devices): the comparison shows one option of each key."""
    return option.strategy, "" if option.group is None else option.group.text


def _demand_inputs(goal: Goal, problem: Problem, model: JobModel) -> None:
    """Raise InputError where the goal needs prices, a model or a limit, and the job has none.

    The cheapest plan and a budget need every device type's price, least memory a model whose layouts are known, and fewest
    devices a limit that these must keep.
    """
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
        """Take the goal and the job's model from ``candidates``, which made all that is compared here."""
        self.candidates = candidates
        self.goal = candidates.goal

    def value(self, option: Option) -> float:
        """Return the value that options are ranked by; higher is better.

        By objective it is samples per price, 1 / bytes, 1 / devices, else progress per second. Samples per price and progress
        include the slowdown by failures and checkpoints. 0.0 where the price or the memory is not known, and where a limit is
        broken.
        """
        if self.goal.value(option) == math.inf:
            return 0.0
        slowdown = self.goal.slowdown(sum(option.devices.values()))
        if self.goal.objective == "cheapest":
            return 0.0 if option.price_per_sample is None else 1 / max(option.price_per_sample * slowdown, 1e-300)
        if self.goal.objective == "least-memory":
            return 0.0 if option.memory_bytes is None else 1 / max(option.memory_bytes, 1.0)
        if self.goal.objective == "fewest-devices":
            return 1 / sum(option.devices.values())
        return self.candidates.progress(option) / slowdown

    def unsure(self, first: Candidate, second: Candidate) -> bool:
        """Return whether two candidates' values differ by less than the error of the compute times: either may be better.

        False where that error is 0 or not known, and for objectives whose values have no error: memory and number of devices.
        """
        error = self.candidates.model.gain_error(first.option, second.option)
        values = self.value(first.option), self.value(second.option)
        if not error or min(values) <= 0 or self.goal.objective in ("least-memory", "fewest-devices"):
            return False
        return abs(math.log(values[0] / values[1])) <= math.log1p(error)

    def ties(self, first: Candidate, second: Candidate) -> bool:
        """Return whether neither of two candidates beats the other (:meth:`beats`)."""
        return not self.beats(first, second) and not self.beats(second, first)

    def beats(self, first: Candidate, second: Candidate) -> bool:
        """Return whether the first candidate is ahead of the second by more than a margin and the error of compute times.

        The margin is larger for an asynchronous candidate (one with supersteps) against a synchronous one, because stale
        updates cost progress that no prediction shows.
        """
        only_first_is_asynchronous = first.plan.superstep is not None and second.plan.superstep is None
        margin = STALENESS_MARGIN if only_first_is_asynchronous else LEAST_GAIN
        is_ahead = self.value(first.option) > self.value(second.option) * (1 + margin)
        return is_ahead and not self.unsure(first, second)

    def pick(self, candidates: list[Candidate]) -> Candidate:
        """Return the simplest of the candidates that no other beats.

        A candidate is simpler if its strategy is earlier in ``STRATEGIES``, then if its group is smaller, then if it has fewer
        device types. Among equally simple ones the higher value decides, then fewer devices.
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

    Considered are ``options`` and equal splits on one device type, without those whose updates may be stale. An option must be
    cheaper than all faster ones by more than ``LEAST_GAIN``.
    """
    if any(device.price_micro is None for device in problem.devices):
        return []
    priced = [
        option
        for option in (*options, *candidates.equal_splits_of_one_type(problem))
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
    """Return the fields ``ddp`` and ``fsdp2`` of the plan (None: no such setting), with the times of a whole step.

    The picked candidate's own settings have the times of the step's last accumulation pass alone.
    """
    exposed = picked.exposed
    if exposed is None:
        return {"ddp": None, "fsdp2": None}
    step_s = picked.option.iteration_s
    times = {"step_s": step_s, "default_step_s": step_s + (picked.option.order_saves_s or 0.0)}
    return {
        "ddp": None if exposed.ddp is None else exposed.ddp.model_copy(update=times),
        "fsdp2": None if exposed.fsdp2 is None else exposed.fsdp2.model_copy(update=times),
    }


def _all_layouts(picked: Candidate, ranked: list[Candidate], cheapest: Candidate | None) -> list[Layout]:
    """Return the layouts of all candidates without repeats: first the picked one's; those that do not fit into memory last.

    ``ranked``: the candidates, best first. Of the ``cheapest`` candidate (None: none) only the layout that it is made of is
    taken.
    """
    layouts = list(picked.layouts)
    for other in ranked:
        layouts += [layout for layout in other.layouts if layout not in layouts]
    if cheapest is not None:
        layouts += [layout for layout in cheapest.layouts[:1] if layout not in layouts]
    fitting = [layout for layout in layouts if not layout.missing_bytes]
    return fitting + [layout for layout in layouts if layout.missing_bytes]


def _unwaiting_throughput(picked: Candidate, problem: Problem) -> float:
    """Return the mini-batches per second that the plan's devices would make if none ever waited.

    The plan's waste is this number minus its real throughput.
    """
    plan, option = picked.plan, picked.option
    if plan.strategy == "elastic-bsp":  # its throughput includes transfers in each iteration
        capability = {device.name: float(device.capability_per_s) for device in problem.devices}
        return sum(capability[name] * count for name, count in option.devices.items())
    if plan.strategy == "goodput":  # one type and one batch size: all devices compute throughout compute_s
        return option.throughput * option.iteration_s / option.compute_s
    return plan.waste + plan.throughput
