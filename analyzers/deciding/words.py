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
    gain = _lead(picked, decision.baseline, decision, batch_size)
    return [_why(decision, picked, batch_size), _gain(decision, picked, gain), _sure(decision, picked, gain, remark)]


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
    unit = "samples per price" if decision.objective == "cheapest" else "progress per second"
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
        if decision.objective == "cheapest":
            rates.append(1 / option.price_per_sample if option.price_per_sample else 0.0)
        else:
            rates.append(option.throughput * batch_size if option.goodput_per_s is None else option.goodput_per_s)
    return rates[0] / rates[1] - 1
