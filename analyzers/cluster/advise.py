"""Tells whether a resize of a running job is worth its restart: the time that it saves. Start at :func:`advise_job`.

On its present allocation the job needs T more seconds. On another one, whose goodput is ``r`` times as high, it needs
``d + T / r`` with d the restart. The resize saves ``T (1 - 1/r) - d``, and pays when T is above ``d / (1 - 1/r)``, the
break-even. T is a guess, r a prediction, and d was measured some times. So each is a distribution, and the results are the
expected saving and the probability of a saving. Guesses are log-normal: a median and a factor within which about two thirds
of such guesses lie. Pollux's re-allocation factor (OSDI 2021, section 4.2) makes the same trade for a whole cluster without
knowing T.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from scipy.special import ndtri

from ddltool.analyzers.cluster.cluster import fewest_nodes
from ddltool.analyzers.job.goodput.tuning import BatchLimits, tune, tune_one
from ddltool.arrays import Floats
from ddltool.artifacts import load
from ddltool.errors import InputError
from ddltool.goodput_model import Goodput
from ddltool.job_state import JobState
from ddltool.simulation_results import AdviceResult, JobNow, ResizeOption, ResizeSaving

# Number of equally likely values at which each distribution is summed: the grid has 199 x 39 x at most 16 points. Odd
# numbers include the median.
_REMAINING_VALUES, _GAIN_VALUES, _MOST_RESTART_VALUES = 199, 39, 16
_LONGEST_S = 1e15
# The most replicas, and the most options that are examined: each is an integral over three distributions.
_MOST_REPLICAS, _MOST_EXAMINED = 4096, 64


def advise(
    gain: float,
    remaining_s: float,
    restarts_s: Sequence[float],
    *,
    remaining_factor: float = 1.0,
    gain_factor: float = 1.0,
    hold_s: float | None = None,
) -> ResizeSaving:
    """Return the saving of a change to an allocation with ``gain`` times the present goodput.

    ``saved_s`` of the result is for the medians and the mean restart; the expected saving, its 10 and 90 % quantiles and the
    probability of a saving are over the three distributions.

    Args:
        gain: median of the ratio of goodputs.
        remaining_s: median of the seconds left on the present allocation.
        restarts_s: measured restarts in seconds, which are equally likely.
        remaining_factor, gain_factor: uncertainty of the two medians; about two thirds of the values lie between the median
            divided and multiplied by the factor; 1: the value is known.
        hold_s: seconds after which the job returns to its present allocation, by another restart; None: it never does.
    """
    restarts = np.array(restarts_s, dtype=np.float64)
    mean_restart_s = float(restarts.mean())
    if len(restarts) > _MOST_RESTART_VALUES:  # the grid below has every combination, so many restarts are thinned out
        restarts = np.quantile(restarts, (np.arange(_MOST_RESTART_VALUES) + 0.5) / _MOST_RESTART_VALUES)
    remaining = _lognormal_quantiles(remaining_s, remaining_factor, _REMAINING_VALUES)
    gains = _lognormal_quantiles(gain, gain_factor, _GAIN_VALUES)
    # all combinations (remaining, gains, restarts), which are equally likely
    saved = saved_seconds(remaining[:, None, None], gains[:, None], restarts, hold_s)
    low, high = np.quantile(saved, (0.1, 0.9), method="inverted_cdf").tolist()
    return ResizeSaving(
        gain=gain,
        restart_s=mean_restart_s,
        break_even_s=_break_even(gain, mean_restart_s, hold_s),
        saved_s=float(saved_seconds(np.array(remaining_s), np.array(gain), np.array(mean_restart_s), hold_s)),
        expected_saved_s=float(saved.mean()),
        saved_p10_s=low,
        saved_p90_s=high,
        probability=float((saved > 0).mean()),
    )


def _lognormal_quantiles(median: float, spread_factor: float, count: int) -> Floats:
    """Return (count,) equally likely values, ascending, of a log-normal distribution; [median] where ``spread_factor`` is 1.

    They are the quantiles in the middle of ``count`` equal parts. ``spread_factor``, 1 or more: the median multiplied by it
    lies one standard deviation above the median.
    """
    if spread_factor == 1:
        return np.array([median])
    return np.asarray(median * np.exp(math.log(spread_factor) * ndtri((np.arange(count) + 0.5) / count)))


def saved_seconds(remaining: Floats, gain: Floats, delay: Floats, hold_s: float | None = None) -> Floats:
    """Return the seconds that a resize saves: ``T (1 - 1/r) - d``, or less if the job goes back after ``hold_s`` seconds.

    ``remaining`` T (time left on the present allocation) and ``delay`` d (a restart) are seconds, ``gain`` r is a ratio of
    goodputs; arrays broadcast. After ``hold_s`` = h seconds the job has done work that takes ``r max(h - d, 0)`` seconds on its
    present allocation, and going back costs d again. With None, and if the job ends within h seconds, it does not go back.
    """
    saved_for_good: Floats = remaining - remaining / gain - delay
    if hold_s is None:
        return saved_for_good
    saved_in_hold = gain * np.maximum(hold_s - delay, 0.0) - hold_s - delay
    ends_in_hold = delay + remaining / gain <= hold_s
    return np.where(ends_in_hold, saved_for_good, saved_in_hold)


def _break_even(gain: float, delay: float, hold_s: float | None) -> float | None:
    """Return the least remaining time T in seconds above which a resize always saves time; None if there is none.

    ``gain``: ratio of goodputs; ``delay``: seconds of a restart; ``hold_s``: seconds after which the job goes back to its
    present allocation, None: never.
    """
    # With a hold, the saving of a long T is that within the hold, and does not depend on T.
    if gain <= 1 or (hold_s is not None and gain * max(hold_s - delay, 0.0) <= hold_s + delay):
        return None
    return delay / (1 - 1 / gain)


def placements(held: Sequence[int], free: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    """Yield the other allocations of 1 to ``most`` GPUs that the job could have now, one per number of GPUs, on fewest nodes.

    ``held``, ``free`` and each allocation are GPUs per node, (N,). The nodes with the most usable GPUs (held and free) are
    filled first, in ties those that the job is on; the rest goes to the node with the fewest that suffice. For the number of
    GPUs that the job has already, an allocation is yielded only if it is on fewer nodes.
    """
    usable = [own + unused for own, unused in zip(held, free, strict=True)]
    order = sorted(range(len(usable)), key=lambda node: (-usable[node], -held[node], node))
    for count in range(1, min(sum(usable), most) + 1):
        gpus_by_node = dict(fewest_nodes(usable, order, count))
        gpus = [gpus_by_node.get(node, 0) for node in range(len(usable))]
        if count != sum(held) or _count_nodes(gpus) < _count_nodes(held):
            yield tuple(gpus)


def _count_nodes(gpus: Sequence[int]) -> int:
    """Return the number of nodes with GPUs; ``gpus``: per node, (N,)."""
    return sum(count > 0 for count in gpus)


def advise_job(path: Path) -> AdviceResult:
    """Return the advice for the job in a JOBSTATE.yaml: every option with its saving, and the best of them.

    The fitted model that the file names (``goodput``) predicts the goodput of each allocation. Raises InputError, with file and
    field, for values out of range, and Infeasible where the job's batch limits allow no batch on its present GPUs.
    """
    state = load(path, JobState)
    model = load(path.parent / state.goodput, Goodput)
    params = model.params_of(state.device)
    limits = BatchLimits(
        initial_batch_size=state.initial_batch_size,
        max_batch_size=state.max_batch_size,
        max_local_batch_size=min(state.max_local_batch_size, state.max_batch_size),
    )
    held = sum(state.held)
    tuned_now = tune_one(params, _count_nodes(state.held), held, limits, noise_scale=state.noise_scale)
    # a job state without remaining_s has remaining_samples, at the efficiency of M0
    remaining_s = state.remaining_s or (state.remaining_samples or 0.0) / tuned_now.goodput_per_s
    if not 0 < remaining_s <= _LONGEST_S:
        raise InputError(f"{path}:remaining_samples", f"is {remaining_s:g} seconds of work", "what a job can have left")
    # The gain is a ratio of two goodputs, and both carry the model's error: hence sqrt(2). Beyond a factor of 1,000 (a fit
    # that says nothing) the quantiles would overflow.
    rmsle = model.devices[state.device].rmsle if model.devices else model.rmsle
    gain_factor = min(math.exp(math.sqrt(2) * rmsle), 1000.0)
    allocations = _examined(state)
    nodes = [_count_nodes(gpus) for gpus in allocations]
    replicas = [sum(gpus) for gpus in allocations]
    # without any other allocation a single GPU is tuned, and left out below
    tuned = tune(params, nodes or [1], replicas or [1], limits, noise_scale=state.noise_scale)
    options = []
    for row in np.flatnonzero(tuned.feasible[: len(allocations)]).tolist():
        goodput_per_s = float(tuned.goodput_per_s[row])
        saving = advise(
            goodput_per_s / tuned_now.goodput_per_s,
            remaining_s,
            state.restarts_s,
            remaining_factor=state.remaining_factor,
            gain_factor=gain_factor,
            hold_s=state.hold_s,
        )
        resized_s = saving.restart_s + remaining_s / saving.gain
        options.append(
            ResizeOption(
                gpus_by_node={str(node): count for node, count in enumerate(allocations[row]) if count},
                replicas=replicas[row],
                nodes=nodes[row],
                batch_size=int(tuned.total_batch_size[row]),
                goodput_per_s=goodput_per_s,
                extra_gpu_seconds=replicas[row] * resized_s - held * remaining_s,
                **saving.model_dump(),
            )
        )
    best = max(options, key=lambda option: option.expected_saved_s, default=None)
    running = JobNow(
        gpus=state.held,
        replicas=held,
        batch_size=tuned_now.total_batch_size,
        goodput_per_s=tuned_now.goodput_per_s,
        remaining_s=remaining_s,
        remaining_factor=state.remaining_factor,
    )
    resize = best is not None and best.expected_saved_s > 0
    return AdviceResult(job=str(path), now=running, gain_factor=gain_factor, resize=resize, best=best, options=options)


def _examined(state: JobState) -> list[tuple[int, ...]]:
    """Return the allocations to examine, each as GPUs per node (N,): all of them, or 64 if there are more.

    The 64 are in equal ratios of their numbers of GPUs, because neighbours hardly differ where these are large.
    """
    allocations = list(placements(state.held, state.free, min(state.max_replicas or _MOST_REPLICAS, _MOST_REPLICAS)))
    if len(allocations) <= _MOST_EXAMINED:
        return allocations
    rows = np.unique(np.geomspace(1, len(allocations), _MOST_EXAMINED).round().astype(int) - 1)
    return [allocations[row] for row in rows]
