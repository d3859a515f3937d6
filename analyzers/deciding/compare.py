"""Every strategy for one job on the same devices, with communication, and which one to take. Start at :func:`decide`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

from ddltool.analyzers.deciding.candidates import STRATEGIES, Candidate, Candidates, Knowledge, Settings
from ddltool.analyzers.deciding.words import explain
from ddltool.analyzers.placement.problem import Problem
from ddltool.decision import Decision, Objective, Option
from ddltool.errors import Infeasible, InputError
from ddltool.job import Job
from ddltool.plan import Plan

# Faster by less than this is no reason to change anything, however exact the figures are.
LEAST_GAIN = 0.02
# Stale updates cost progress that no prediction shows: asynchrony must be faster by this much to be taken.
STALENESS_MARGIN = 0.10
_MOST_TYPES = 4


def decide(
    job: Job,
    problem: Problem,
    knowledge: Knowledge,
    *,
    objective: Objective = "fastest",
    settings: Settings | None = None,
) -> Plan:
    """Return the plan of the best strategy for ``objective``, with the comparison in ``decision``.

    ``fastest``: most progress per second, goodput where a noise scale is known, else throughput; within ``LEAST_GAIN``
    of the best, the simplest strategy; one with stale updates only from ``STALENESS_MARGIN`` on. ``cheapest``: the
    lowest price per sample over all sets of device types. ``same-bits``: the fastest plan whose results do not depend
    on the number of devices. Raises Infeasible when no strategy has a plan, InputError when ``cheapest`` lacks a price.
    """
    if objective == "cheapest" and any(device.price_micro is None for device in problem.devices):
        nameless = next(device.name for device in problem.devices if device.price_micro is None)
        raise InputError(f"devices.{nameless}.price_per_hour", "is missing", "the cheapest plan needs every price")
    maker = Candidates(job=job, knowledge=knowledge, settings=settings or Settings())
    left_out: dict[str, str] = {}
    found = maker.of(problem, left_out)
    if objective == "cheapest":
        found += [candidate for part in _parts(problem) for candidate in maker.of(part, {})]
    if objective == "same-bits":
        left_out |= {
            candidate.option.strategy: "its results depend on the number of devices"
            for candidate in found
            if candidate.option.determinism not in ("D1", "D2")
        }
        found = [candidate for candidate in found if candidate.option.determinism in ("D1", "D2")]
    if not found:
        raise Infeasible("no strategy has a plan: " + "; ".join(f"{name}: {why}" for name, why in left_out.items()))
    value = _samples_per_price if objective == "cheapest" else maker.progress
    found.sort(key=lambda candidate: (-value(candidate.option), STRATEGIES.index(candidate.option.strategy)))
    ranked = list({candidate.option.strategy: candidate for candidate in reversed(found)}.values())
    ranked.sort(key=found.index)
    picked = _pick(ranked, value)
    baseline = maker.baseline(problem)
    decision = Decision(
        objective=objective,
        picked=picked.option.strategy,
        baseline=baseline,
        options=[candidate.option for candidate in ranked],
        left_out=left_out,
        words=[],
        error=maker.error(picked.option.devices),
        gain_error=maker.gain_error(picked.option.devices, baseline.devices),
        too_close=_too_close(maker, ranked, picked, value),
        error_source=knowledge.error_source,
        communication_source="" if knowledge.communication is None else knowledge.communication.source,
    )
    decision = decision.model_copy(update={"words": explain(decision, picked.option, job.batch_size, knowledge.remark)})
    exposed = picked.exposed
    return picked.plan.model_copy(
        update={
            "iteration_s": picked.option.iteration_s,
            "throughput": picked.option.throughput,
            "communication_s": picked.option.communication_s,
            "waste": max(0.0, _in_use(picked, problem) - picked.option.throughput),
            "ddp": None if exposed is None else exposed.ddp,
            "fsdp2": None if exposed is None else exposed.fsdp2,
            "decision": decision,
        }
    )


def _in_use(picked: Candidate, problem: Problem) -> float:
    """Return the mini-batches per second that the plan's devices make while none of them waits, by the plan's own times."""
    plan, option = picked.plan, picked.option
    if plan.strategy == "elastic-bsp":  # its own figures carry transfers in each iteration
        each = {device.name: float(device.capability_per_s) for device in problem.devices}
        return sum(each[name] * count for name, count in option.devices.items())
    if plan.strategy == "goodput":  # one type and one batch: all of them compute throughout compute_s
        return option.throughput * option.iteration_s / option.compute_s
    return plan.waste + plan.throughput


def _samples_per_price(option: Option) -> float:
    """Return samples per unit of money."""
    return 0.0 if option.price_per_sample is None else 1 / max(option.price_per_sample, 1e-300)


def _pick(ranked: list[Candidate], value: Callable[[Option], float]) -> Candidate:
    """Return the best candidate, or one without stale updates, or a simpler one that is as good."""
    best = ranked[0]
    fresh = [candidate for candidate in ranked if candidate.option.staleness == 0]
    if best.option.staleness and fresh and value(best.option) < value(fresh[0].option) * (1 + STALENESS_MARGIN):
        best = fresh[0]
    as_good = [
        candidate
        for candidate in ranked
        if value(candidate.option) * (1 + LEAST_GAIN) >= value(best.option)
        and candidate.option.staleness <= best.option.staleness
    ]
    return min(as_good, key=lambda candidate: STRATEGIES.index(candidate.option.strategy))


def _too_close(
    maker: Candidates, ranked: list[Candidate], picked: Candidate, value: Callable[[Option], float]
) -> list[str]:
    """Return the strategies that cannot be told apart from the picked one: the error of the ratio is more than it says."""
    found = []
    for other in ranked:
        error = maker.gain_error(picked.option.devices, other.option.devices)
        if other is not picked and error is not None and value(other.option) > 0:
            ratio = value(picked.option) / value(other.option)
            if abs(math.log(ratio)) <= math.log1p(error) and error > 0:
                found.append(other.option.strategy)
    return found


def _parts(problem: Problem) -> list[Problem]:
    """Return the problem on every smaller set of device types; of many types, on each alone."""
    devices = problem.devices
    sizes = range(1, len(devices)) if len(devices) <= _MOST_TYPES else range(1, 2)
    parts = [replace(problem, devices=part) for size in sizes for part in combinations(devices, size)]
    return [part for part in parts if any(part.affordable(device) for device in part.devices)]
