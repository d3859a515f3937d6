"""The decision in three sentences: why, what it gains over doing nothing, how sure that is."""

from __future__ import annotations

from ddltool.decision import Decision, Option
from ddltool.units import show_seconds

# From this share of communication in a step on, another number of samples per step gains more than any strategy.
_STARVED = 0.5
_WHY = {
    "bsp": "an equal split is as good as anything else here",
    "lb-bsp": "every device gets the share of the batch that lets all end together",
    "est": "logical workers keep their data, random numbers and order of sums on any number of devices",
    "goodput": "this number of devices and this batch make most progress per second by the fitted model",
    "elastic-bsp": "no device waits for a slower one before the barrier",
}


def explain(decision: Decision, picked: Option, batch_size: int) -> list[str]:
    """Return three sentences about the picked option; ``batch_size``: samples per logical mini-batch."""
    return [
        _why(decision, picked, batch_size),
        _gain(decision, picked, batch_size),
        _sure(decision, picked, batch_size),
    ]


def _why(decision: Decision, picked: Option, batch_size: int) -> str:
    text = f"{picked.strategy}: {_WHY[picked.strategy]}"
    first = decision.options[0]
    if first.strategy != picked.strategy:
        stale = f", but with updates up to {first.staleness} iterations stale" if first.staleness else ""
        lead = _rate(first, decision, batch_size) / _rate(picked, decision, batch_size) - 1
        rest = "" if stale else ", too little to change a script for"
        text += f"; {first.strategy} is {lead:.1%} ahead{stale}{rest}"
    if picked.communication_s is None:
        return f"{text}; communication is not in these figures (no graph, no fitted model)."
    order = f" with {picked.order}" if picked.order else ""
    share = picked.communication_s / picked.iteration_s
    starved = f" ({share:.0%} of it: larger batches per worker would gain far more)" if share > _STARVED else ""
    return f"{text}; {show_seconds(picked.communication_s)} of each step is exposed communication{starved}{order}."


def _gain(decision: Decision, picked: Option, batch_size: int) -> str:
    nothing = decision.baseline
    unit = "samples per price" if decision.objective == "cheapest" else "progress per second"
    gain = _rate(picked, decision, batch_size) / _rate(nothing, decision, batch_size) - 1
    steps = f"{show_seconds(nothing.iteration_s)} -> {show_seconds(picked.iteration_s)} per step"
    saved = ""
    if picked.order_saves_s and picked.order_saves_s >= 0.001 * picked.iteration_s:
        saved = f"; {show_seconds(picked.order_saves_s)} of that by the order of communication"
    if gain < 0:
        return f"Against doing nothing (equal split over all devices) it costs {-gain:.1%} of the {unit}, {steps}."
    return f"Against doing nothing (equal split over all devices) it gains {gain:.1%} in {unit}, {steps}{saved}."


def _sure(decision: Decision, picked: Option, batch_size: int) -> str:
    gain = _rate(picked, decision, batch_size) / _rate(decision.baseline, decision, batch_size) - 1
    if decision.error is None:
        return (
            "How sure: as sure as the capabilities in the job, which come without an error; profile and fit the devices, "
            "or give the telemetry of an earlier run, to know it."
        )
    source = f" ({decision.error_source})" if decision.error_source else ""
    if abs(gain) <= decision.error:
        return (
            f"How sure: not; compute times are known to within {decision.error:.0%}{source}, more than the difference: "
            "measure before you change anything."
        )
    return f"How sure: compute times are known to within {decision.error:.0%}{source}, less than the difference."


def _rate(option: Option, decision: Decision, batch_size: int) -> float:
    """Return what the objective compares."""
    if decision.objective == "cheapest":
        return 1 / option.price_per_sample if option.price_per_sample else 0.0
    return option.throughput * batch_size if option.goodput_per_s is None else option.goodput_per_s
