"""Every strategy for one job on the same devices, with communication, and which one to take. Start at :func:`decide`."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import combinations

from ddltool.analyzers.deciding.candidates import STRATEGIES, Candidate, Candidates, Knowledge, Settings
from ddltool.analyzers.deciding.communication import FITTED, MEASURED
from ddltool.analyzers.placement.problem import Problem
from ddltool.decision import Decision, Layout, NothingFits, Objective, Option
from ddltool.errors import Infeasible, InputError
from ddltool.job import Job
from ddltool.plans import Plan
from ddltool.units import show_bytes, show_seconds

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
    on the number of devices. ``least-memory``: the least on the fullest device. Raises Infeasible when no strategy has a
    plan, InputError when ``cheapest`` lacks a price or ``least-memory`` a model.
    """
    if objective == "cheapest" and any(device.price_micro is None for device in problem.devices):
        nameless = next(device.name for device in problem.devices if device.price_micro is None)
        raise InputError(f"devices.{nameless}.price_per_hour", "is missing", "the cheapest plan needs every price")
    if objective == "least-memory" and knowledge.layouts is None:
        raise InputError(
            "--objective", "least-memory needs a model to look at", "name model: zoo:NAME, file.py:factory, ..."
        )
    maker = Candidates(job=job, knowledge=knowledge, settings=settings or Settings(), objective=objective)
    left_out: dict[str, str] = {}
    found = maker.of(problem, left_out)
    if objective == "cheapest":
        for part in _parts(problem):
            with suppress(NothingFits):
                found += maker.of(part, {})
    if objective == "same-bits":
        left_out |= {
            candidate.option.strategy: "its results depend on the number of devices"
            for candidate in found
            if candidate.option.determinism not in ("D1", "D2")
        }
        found = [candidate for candidate in found if candidate.option.determinism in ("D1", "D2")]
    if not found:
        raise Infeasible("no strategy has a plan: " + "; ".join(f"{name}: {why}" for name, why in left_out.items()))
    value = {"cheapest": _samples_per_price, "least-memory": _per_byte}.get(objective, maker.progress)
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
        layouts=_listed(picked, ranked),
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


def _listed(picked: Candidate, ranked: list[Candidate]) -> list[Layout]:
    """Return the layouts of the picked plan, then what others found beside them."""
    made = list(picked.layouts)
    for other in ranked:
        made += [layout for layout in other.layouts if layout not in made]
    fitting = [layout for layout in made if not layout.missing_bytes]
    return fitting + [layout for layout in made if layout.missing_bytes]


def _per_byte(option: Option) -> float:
    return 0.0 if option.memory_bytes is None else 1 / max(option.memory_bytes, 1.0)


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


# From this share of communication in a step on, another number of samples per step gains more than any strategy.
_STARVED = 0.5
# Below this a share reads as 0.0%.
_SHOWN = 0.0005
_WHY = {
    "bsp": "an equal split is as good as anything else here",
    "lb-bsp": "every device gets the share of the batch that lets all end together",
    "est": "logical workers keep their data, random numbers and order of sums on any number of devices",
    "goodput": "this number of devices and this batch make most progress per second by the fitted model",
    "elastic-bsp": "no device waits for a slower one before the barrier",
}


def explain(decision: Decision, picked: Option, batch_size: int, remark: str = "") -> list[str]:
    """Return three sentences about the picked option, and the answer before them where a layout is part of it.

    ``batch_size``: samples per logical mini-batch; ``remark``: what a reader must know of the compute times beside
    their error, such as which are measured and which predicted.
    """
    gain = _lead(picked, decision.baseline, decision, batch_size)
    answer, why = _answer(decision, picked, batch_size), _why(decision, picked, batch_size)
    return [*answer, why, _gain(decision, picked, gain), _sure(decision, picked, gain, remark)]


def _answer(decision: Decision, picked: Option, batch_size: int) -> list[str]:
    """Return what to do in one sentence, where the layout of the model is part of the answer."""
    if not decision.layouts or decision.layouts[0].text != picked.order:
        return []
    layout, work = decision.layouts[0], picked.throughput * batch_size * picked.iteration_s
    out = [f"{count} {name}" for name, count in decision.baseline.devices.items() if name not in layout.devices]
    sizes = " and ".join(f"{size} on each {name}" for name, size in layout.local_batch_sizes.items())
    passes = f" in {layout.passes} passes" if layout.passes > 1 else ""
    between = f" ({work / layout.high_s:.3g} to {work / layout.low_s:.3g})" if layout.low_s and layout.high_s else ""
    left = f" and leave {' and '.join(out)} out" if out else ""
    rate = f"{work / picked.iteration_s:.3g} samples/s{between}"
    held = f"at most {show_bytes(max(layout.memory_bytes.values()))} of tensors in a process"
    return [f"Use {layout.devices_text}{left} with {layout.text}: {rate}, {sizes}{passes}, {held}."]


def _why(decision: Decision, picked: Option, batch_size: int) -> str:
    text = f"{picked.strategy}: {_WHY[picked.strategy]}"
    first = decision.options[0]
    if first.strategy != picked.strategy:
        stale = f", but with updates up to {first.staleness} iterations stale" if first.staleness else ""
        lead = _lead(first, picked, decision, batch_size)
        rest = "" if stale else ", too little to change a script for"
        ahead = f"is {lead:.1%} ahead{stale}{rest}" if lead >= _SHOWN else f"is just as good{stale}"
        if first.strategy in decision.too_close and not stale:
            ahead = "is too close to tell apart"
        text += f"; {first.strategy} {ahead}"
    if picked.communication_s is None:
        return f"{text}; communication is not in these figures (no graph, no fitted model)."
    if sum(picked.devices.values()) == 1:
        return f"{text}; one device has nothing to exchange."
    # Communication by a simulation, by a fit or of an earlier run has no error that anybody knows.
    given = picked.order in (FITTED, MEASURED)
    order = f" with {picked.order}" if picked.order and not given else ""
    share = picked.communication_s / picked.iteration_s
    starved = f" ({share:.0%} of it: larger batches per worker would gain far more)" if share > _STARVED else ""
    exposed = f"{show_seconds(picked.communication_s)} of each step is exposed communication{starved}"
    if share < _SHOWN * 0.1:
        exposed = "no communication worth mentioning is exposed"
    return f"{text}; {exposed}{order} ({picked.order if given else 'predicted'}, its error is not known)."


def _gain(decision: Decision, picked: Option, gain: float) -> str:
    unit = {"cheapest": "samples per price", "least-memory": "samples per byte"}.get(
        decision.objective, "progress per second"
    )
    error = "without a known error" if decision.error is None else f"± {decision.error:.0%} by compute"
    if decision.gain_error and abs(gain) >= _SHOWN:
        low, high = (1 + gain) / (1 + decision.gain_error) - 1, (1 + gain) * (1 + decision.gain_error) - 1
        error += f"; the gain between {low:+.0%} and {high:+.0%}"
    steps = f"{show_seconds(decision.baseline.iteration_s)} -> {show_seconds(picked.iteration_s)} per step ({error})"
    against = "Against doing nothing (equal split over all devices)"
    if abs(gain) < _SHOWN:
        return f"{against} it gains nothing in {unit}, {steps}."
    if gain < 0:
        return f"{against} it costs {-gain:.1%} of the {unit}, {steps}."
    saved = ""
    if picked.order_saves_s and picked.order_saves_s >= 0.001 * picked.iteration_s:
        saved = f"; {show_seconds(picked.order_saves_s)} of that by the order of communication"
    return f"{against} it gains {gain:.1%} in {unit}, {steps}{saved}."


def _sure(decision: Decision, picked: Option, gain: float, remark: str) -> str:
    mixed = f"; {remark}" if remark else ""
    if decision.error is None:
        return (
            "How sure: as sure as the capabilities in the job, which come without an error; profile and fit the devices, "
            f"or give the telemetry of an earlier run, to know it{mixed}."
        )
    source = f" ({decision.error_source})" if decision.error_source else ""
    known = f"known to within {decision.error:.0%}{source}"
    apart = decision.error if decision.gain_error is None else decision.gain_error
    if abs(gain) <= apart or (abs(gain) < _SHOWN and decision.error > 0):
        types = " and ".join(sorted({*picked.devices, *decision.baseline.devices}))
        said = f"too close to call; compute times are {known}, more than the difference"
        return f"How sure: {said}: measure {types} before you change anything{mixed}."
    if decision.gain_error == 0:
        same_compute = abs(picked.compute_s / decision.baseline.compute_s - 1) < _SHOWN
        if picked.communication_s and same_compute:
            return (
                f"How sure: the gain is communication alone, whose error is not known; the devices' compute times, {known}, "
                f"are the same in both: measure it with ddltool profile --network{mixed}."
            )
        return (
            f"How sure: the devices are the same in both, so the error of their compute times ({decision.error:.0%}{source}) "
            f"is no error of the gain{mixed}."
        )
    if remark:
        said = f"less than its error says, compute times {known}: {remark}"
        return f"How sure: {said}; measure all types before you rely on it."
    return f"How sure: compute times are {known}, less than the difference."


def _lead(one: Option, other: Option, decision: Decision, batch_size: int) -> float:
    """Return by how much one option is better than another in what the objective compares."""
    rates = []
    for option in (one, other):
        if decision.objective == "least-memory":
            rates.append(_per_byte(option))
        elif decision.objective == "cheapest":
            rates.append(1 / option.price_per_sample if option.price_per_sample else 0.0)
        else:
            rates.append(option.throughput * batch_size if option.goodput_per_s is None else option.goodput_per_s)
    return rates[0] / rates[1] - 1
