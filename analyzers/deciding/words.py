"""The decision in three sentences: why, what it gains over doing nothing, how sure that is."""

from __future__ import annotations

from ddltool.analyzers.deciding.communication import FITTED, MEASURED
from ddltool.decision import Decision, Option
from ddltool.units import show_seconds

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
    """Return three sentences about the picked option.

    ``batch_size``: samples per logical mini-batch; ``remark``: what a reader must know of the compute times beside
    their error, such as which are measured and which predicted.
    """
    return [
        _why(decision, picked, batch_size),
        _gain(decision, picked, batch_size),
        _sure(decision, picked, batch_size, remark),
    ]


def _why(decision: Decision, picked: Option, batch_size: int) -> str:
    text = f"{picked.strategy}: {_WHY[picked.strategy]}"
    first = decision.options[0]
    if first.strategy != picked.strategy:
        stale = f", but with updates up to {first.staleness} iterations stale" if first.staleness else ""
        lead = _rate(first, decision, batch_size) / _rate(picked, decision, batch_size) - 1
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
    if picked.communication_s < _SHOWN * 0.1 * picked.iteration_s:
        exposed = "no communication worth mentioning is exposed"
    else:
        exposed = f"{show_seconds(picked.communication_s)} of each step is exposed communication{starved}"
    source = picked.order if given else "predicted"
    return f"{text}; {exposed}{order} ({source}, its error is not known)."


def _gain(decision: Decision, picked: Option, batch_size: int) -> str:
    nothing = decision.baseline
    unit = "samples per price" if decision.objective == "cheapest" else "progress per second"
    gain = _rate(picked, decision, batch_size) / _rate(nothing, decision, batch_size) - 1
    error = "without a known error" if decision.error is None else f"± {decision.error:.0%} by compute"
    if decision.gain_error and abs(gain) >= _SHOWN:
        low, high = (1 + gain) / (1 + decision.gain_error) - 1, (1 + gain) * (1 + decision.gain_error) - 1
        error += f"; the gain between {low:+.0%} and {high:+.0%}"
    steps = f"{show_seconds(nothing.iteration_s)} -> {show_seconds(picked.iteration_s)} per step ({error})"
    saved = ""
    if picked.order_saves_s and picked.order_saves_s >= 0.001 * picked.iteration_s:
        saved = f"; {show_seconds(picked.order_saves_s)} of that by the order of communication"
    against = "Against doing nothing (equal split over all devices)"
    if abs(gain) < _SHOWN:
        return f"{against} it gains nothing in {unit}, {steps}."
    if gain < 0:
        return f"{against} it costs {-gain:.1%} of the {unit}, {steps}."
    return f"{against} it gains {gain:.1%} in {unit}, {steps}{saved}."


def _sure(decision: Decision, picked: Option, batch_size: int, remark: str) -> str:
    gain = _rate(picked, decision, batch_size) / _rate(decision.baseline, decision, batch_size) - 1
    mixed = f"; {remark}" if remark else ""
    if decision.error is None:
        return (
            "How sure: as sure as the capabilities in the job, which come without an error; profile and fit the devices, "
            f"or give the telemetry of an earlier run, to know it{mixed}."
        )
    source = f" ({decision.error_source})" if decision.error_source else ""
    apart = decision.error if decision.gain_error is None else decision.gain_error
    if abs(gain) <= apart or (abs(gain) < _SHOWN and decision.error > 0):
        types = " and ".join(sorted({*picked.devices, *decision.baseline.devices}))
        return (
            f"How sure: too close to call; compute times are known to within {decision.error:.0%}{source}, more than the "
            f"difference: measure {types} before you change anything{mixed}."
        )
    if (
        decision.gain_error == 0
        and picked.communication_s
        and abs(picked.compute_s / decision.baseline.compute_s - 1) < _SHOWN
    ):
        return (
            f"How sure: the gain is communication alone, whose error is not known; the devices' compute times, known to "
            f"within {decision.error:.0%}{source}, are the same in both: measure it with ddltool profile --network{mixed}."
        )
    if decision.gain_error == 0:
        return (
            f"How sure: the devices are the same in both, so the error of their compute times ({decision.error:.0%}{source}) "
            f"is no error of the gain{mixed}."
        )
    if remark:
        return (
            f"How sure: less than its error says, compute times known to within {decision.error:.0%}{source}: {remark}; "
            "measure all types before you rely on it."
        )
    return f"How sure: compute times are known to within {decision.error:.0%}{source}, less than the difference."


def _rate(option: Option, decision: Decision, batch_size: int) -> float:
    """Return what the objective compares."""
    if decision.objective == "cheapest":
        return 1 / option.price_per_sample if option.price_per_sample else 0.0
    return option.throughput * batch_size if option.goodput_per_s is None else option.goodput_per_s
