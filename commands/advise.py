"""``ddltool simulate --advise JOBSTATE.yaml``: is a resize of one job worth its restart?"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddltool.analyzers.scheduling.advise import Advice, Placement
    from ddltool.job_state import JobState

_MOST_OPTIONS = 4096
# Options that are looked at: each is an integral over three distributions.
_MOST_LOOKED_AT = 64
_SHOWN = 12


def advise_job(path: Path) -> dict[str, Any]:
    """Return the document (kind ``ddltool.advice``) for the job in a JOBSTATE.yaml: every option, and the best.

    Raises InputError, with file and field, for what cannot be, and Infeasible where the job's batch limits allow
    nothing on what it holds.
    """
    from ddltool.analyzers.goodput.throughput import ThroughputParams
    from ddltool.analyzers.goodput.tuning import BatchLimits, tune, tune_one
    from ddltool.analyzers.scheduling.advise import Guess, Placement, advise, placements
    from ddltool.artifacts import load
    from ddltool.errors import InputError
    from ddltool.goodput_model import Goodput
    from ddltool.job_state import JobState

    state = load(path, JobState)
    _check(state, path)
    model = load(path.parent / state.goodput, Goodput)
    params = ThroughputParams(**model.params_of(state.device).model_dump())
    limits = BatchLimits(
        initial_batch_size=state.initial_batch_size,
        max_batch_size=state.max_batch_size,
        max_local_batch_size=min(state.max_local_batch_size, state.max_batch_size),
    )
    has = Placement(gpus=tuple(state.held))
    now = tune_one(params, has.nodes, has.replicas, limits, noise_scale=state.noise_scale)
    left_s = state.remaining_s
    if state.remaining_samples is not None:
        left_s = state.remaining_samples / now.goodput_per_s
    assert left_s is not None
    if not 0 < left_s <= 1e15:
        raise InputError(f"{path}:remaining_samples", f"is {left_s:g} seconds of work", "what a job can have left")
    most = min(state.max_replicas or _MOST_OPTIONS, _MOST_OPTIONS)
    found = _thinned(list(placements(state.held, state.free, most)))
    tuned = tune(
        params,
        [each.nodes for each in found] or [1],
        [each.replicas for each in found] or [1],
        limits,
        noise_scale=state.noise_scale,
    )
    # Both goodputs of a ratio carry the model's error.
    off = model.devices[state.device].rmsle if model.devices else model.rmsle
    gain_factor = min(math.exp(math.sqrt(2) * off), 1000.0)
    options = []
    for row, option in enumerate(found):
        if tuned.feasible[row]:
            then = float(tuned.goodput_per_s[row])
            remaining = Guess(median=left_s, factor=state.remaining_factor)
            advice = advise(
                now.goodput_per_s, then, remaining, state.restarts_s, gain_factor=gain_factor, hold_s=state.hold_s
            )
            batch = int(tuned.total_batch_size[row])
            options.append(_option(option, advice, batch, then, has.replicas, left_s))
    best = max(options, key=lambda one: float(one["expected_saved_s"]), default=None)
    worth = best is not None and best["expected_saved_s"] > 0
    return {
        "kind": "ddltool.advice",
        "schema_version": 1,
        "job": str(path),
        "now": {
            "gpus": list(state.held),
            "replicas": has.replicas,
            "batch_size": now.total_batch_size,
            "goodput_per_s": now.goodput_per_s,
            "remaining_s": left_s,
            "remaining_factor": state.remaining_factor,
        },
        "gain_factor": gain_factor,
        "resize": worth,
        "best": best,
        "options": options,
    }


def _thinned(options: list[Placement]) -> list[Placement]:
    """Return all of few options; of many, numbers of GPUs in equal ratios, the smallest and the largest among them."""
    import numpy as np

    if len(options) <= _MOST_LOOKED_AT:
        return options
    rows = np.unique(np.geomspace(1, len(options), _MOST_LOOKED_AT).round().astype(int) - 1)
    return [options[row] for row in rows.tolist()]


def _check(state: JobState, path: Path) -> None:
    """Raise InputError for fields that contradict each other."""
    from ddltool.errors import InputError

    if len(state.held) != len(state.free):
        problem = f"has {len(state.free)} nodes, held has {len(state.held)}"
        raise InputError(f"{path}:free", problem, "one number per node in both")
    if sum(state.held) < 1:
        raise InputError(f"{path}:held", "are no GPUs", "a job that does not run has nothing to restart")
    if (state.remaining_s is None) == (state.remaining_samples is None):
        raise InputError(f"{path}:remaining_s", "and remaining_samples are both or neither there", "give one of them")
    if state.initial_batch_size > state.max_batch_size:
        problem = f"is {state.initial_batch_size}, above max_batch_size, {state.max_batch_size}"
        raise InputError(f"{path}:initial_batch_size", problem, "it must be at most that")


def _option(option: Placement, advice: Advice, batch: int, goodput: float, held: int, left_s: float) -> dict[str, Any]:
    then_s = advice.restart_s + left_s / advice.gain
    return {
        "gpus_by_node": {str(node): count for node, count in enumerate(option.gpus) if count},
        "replicas": option.replicas,
        "nodes": option.nodes,
        "batch_size": batch,
        "goodput_per_s": goodput,
        "gain": advice.gain,
        "restart_s": advice.restart_s,
        "break_even_s": advice.break_even_s,
        "saved_s": advice.saved_s,
        "expected_saved_s": advice.expected_s,
        "saved_p10_s": advice.low_s,
        "saved_p90_s": advice.high_s,
        "probability": advice.probability,
        "extra_gpu_seconds": option.replicas * then_s - held * left_s,
    }


def show_advice(document: Mapping[str, Any]) -> None:
    """Print the answer in words and the options that save most."""
    from ddltool.commands.output import out, table

    now, best = document["now"], document["best"]
    console = out()
    if not document["resize"]:
        why = "no other allocation is possible now" if best is None else "no resize saves time on average"
        console.print(f"Stay on {now['replicas']} GPUs: {why}.")
    else:
        console.print(
            f"Resize from {now['replicas']} to {best['replicas']} GPUs on {best['nodes']} "
            f"node{'s' if best['nodes'] > 1 else ''}: saves {_span(best['expected_saved_s'])} on average, some time with "
            f"probability {best['probability']:.0%}."
        )
        even = best["break_even_s"]
        if even is not None:
            console.print(f"It pays from {_span(even)} left on; {_span(now['remaining_s'])} are left, as it is now.")
    shown = sorted(document["options"], key=lambda one: -float(one["expected_saved_s"]))[:_SHOWN]
    if not shown:
        return
    rows = [
        [
            f"{one['replicas']} on {one['nodes']}",
            str(one["batch_size"]),
            f"{one['gain']:.2f}",
            _span(one["break_even_s"], "") if one["break_even_s"] is not None else "never",
            *(_span(one[name], "") for name in ("expected_saved_s", "saved_p10_s", "saved_p90_s")),
            f"{one['probability']:.0%}",
            f"{round(one['extra_gpu_seconds'] / 3600, 1) + 0.0:+.1f}",
        ]
        for one in shown
    ]
    columns = ("GPUs", "batch", "gain", "pays from", "saves", "10 %", "90 %", "sure", "GPU h")
    left = f"{_span(now['remaining_s'])} left on {now['replicas']} GPUs"
    caption = (
        "gain: goodput over that of now; pays from: with so much left; saves: the mean, and what 10 and 90 % of cases stay "
        "below; sure: probability of saving time; GPU h: held more than without the resize"
    )
    console.print()
    console.print(table(f"{left}, predicted by the fitted model", columns, rows, caption=caption))


def _span(seconds: float, blank: str = " ") -> str:
    """Return a time as people say it; in tables without the blank."""
    minute = "min" if blank else "m"
    for size, unit in ((86400, "d"), (3600, "h"), (60, minute)):
        if abs(seconds) >= 2 * size:
            return f"{seconds / size:.1f}{blank}{unit}"
    return f"{seconds:.0f}{blank}s"
