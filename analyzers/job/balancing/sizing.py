"""Batch sizes in proportion to speeds, as integers with an exact total (LB-BSP, section 3.2 and Algorithm 1).

On a CPU worker the computation time of x samples is x / v, so with ``x_i = v_i / sum v * X`` all workers end together. Bounds
(at least one sample or a given number, at most what fits into memory) are kept: samples that a worker cannot take go to the
others in proportion to their speeds. Start at :func:`proportional`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ddltool.arrays import Floats, Ints
from ddltool.errors import Infeasible, InputError

NO_LIMIT = np.iinfo(np.int64).max
MOST_SAMPLES = 10**12
"""Largest total batch; sums of samples over devices stay exact up to it."""


def equal(workers: int, total: int, limits: ArrayLike | None = None, least: int = 1) -> Ints:
    """Return the (n,) batch sizes of n ``workers``, as equal as possible with sum ``total``.

    ``limits`` (n,): most samples that fit into each worker's memory, None: no limit; ``least``: samples that each worker gets.
    Raises Infeasible where no sizes keep to these bounds.
    """
    return proportional(np.ones(workers), total, limits, least)


def proportional(speeds: ArrayLike, total: int, limits: ArrayLike | None = None, least: int = 1) -> Ints:
    """Return (n,) batch sizes with sum ``total``, each at least ``least`` and less than one sample from its exact share.

    The exact share is ``clip(f * v_i, least, limit_i)`` with the one factor f for which the shares add up to ``total``. Shares
    are rounded down, and the samples that are left go to those with the largest remainders, in ties to the first workers.

    Args:
        speeds: (n,) samples per second, each above zero and finite.
        total: X, samples of all workers together.
        limits: (n,) most samples that fit into each worker's memory; None: no limit.
        least: samples that each worker gets whatever its speed, 1 or more.

    O(n log n). Raises InputError for speeds that are not positive, Infeasible where no sizes keep to the bounds.
    """
    speed = np.asarray(speeds, dtype=np.float64)
    if speed.ndim != 1 or len(speed) == 0:
        raise InputError("speeds", f"has shape {speed.shape}", "give one speed per worker")
    is_wrong = ~(np.isfinite(speed) & (speed > 0))
    if is_wrong.any():
        worker = int(np.argmax(is_wrong))
        raise InputError(f"speeds[{worker}]", f"is {speed[worker]:g}", "speeds are finite samples per second above 0")
    max_sizes = checked_limits(limits, len(speed), total, least)
    exact_shares = _exact_shares(speed / speed.max(), total, np.minimum(max_sizes, total).astype(np.float64), least)
    sizes = np.clip(np.floor(exact_shares).astype(np.int64), least, max_sizes)
    _distribute_remainder(sizes, exact_shares, max_sizes, total - int(sizes.sum()), least)
    return sizes


def checked_sizes(sizes: ArrayLike, least: int = 1) -> Ints:
    """Return the (n,) batch sizes as integers. Raises InputError for no sizes, and for a size below ``least``."""
    checked = np.array(sizes, dtype=np.int64)
    least_words = _least_in_words(least)
    if checked.ndim != 1 or len(checked) == 0 or checked.min() < least:
        raise InputError("sizes", f"is {np.asarray(sizes).tolist()}", f"give every worker {least_words} or more")
    return checked


def _least_in_words(least: int) -> str:
    """Return ``least`` samples in words, for errors. Raises InputError for a ``least`` below 1."""
    if least < 1:
        raise InputError("least", f"is {least}", "give every worker one sample or more")
    return "one sample" if least == 1 else f"{least} samples"


def checked_limits(limits: ArrayLike | None, workers: int, total: int, least: int) -> Ints:
    """Return (n,) ``limits``, the most samples of each of n ``workers``, as integers; None becomes :data:`NO_LIMIT` for all.

    Raises InputError for limits that are not n numbers of 0 or more, and Infeasible where ``total`` samples cannot be shared
    out so that each worker gets at least ``least`` and at most its limit.
    """
    least_words = _least_in_words(least)
    checked = np.asarray([NO_LIMIT] * workers if limits is None else limits, dtype=np.int64)
    if checked.shape != (workers,) or (checked < 0).any():
        raise InputError("limits", "are not usable", f"give {workers} whole numbers of samples")
    if total < workers * least:
        raise Infeasible(f"the total batch {total} is less than {least_words} for each of {workers} workers")
    tight_workers = np.flatnonzero(checked < least)
    if len(tight_workers):
        admits = checked[tight_workers[0]]
        admitted_text = "no sample at all" if admits == 0 else f"{admits} of at least {least} samples"
        raise Infeasible(f"the memory limit of worker {tight_workers[0]} admits {admitted_text}")
    admitted = sum(np.minimum(checked, total).tolist())  # by Python, because it may need more than 64 bits
    if admitted < total:
        raise Infeasible(f"the memory limits of all {workers} workers admit {admitted} samples of {total}")
    return checked


def _exact_shares(speed: Floats, total: int, max_sizes: Floats, least: int) -> Floats:
    """Return (n,) ``clip(f * speed, least, max_sizes)`` with the f for which they add up to ``total``.

    ``speed`` and ``max_sizes`` are (n,) by worker; the limits must admit ``total``. The sum over the workers is piecewise
    linear in f: its slope changes where a worker leaves its lower bound (f = least / v) or reaches its limit (f = max / v).
    With these bends sorted, running sums tell in which piece the sum reaches ``total``.
    """
    bends = np.concatenate((least / speed, max_sizes / speed))
    slope_changes = np.concatenate((speed, -speed))
    # A stable sort puts the bend at a worker's lower bound before that at its limit, also where both are the same f.
    order = np.argsort(bends, kind="stable")
    bends = bends[order]
    slope = np.cumsum(slope_changes[order])
    sums = len(speed) * least + np.concatenate(([0.0], np.cumsum(slope[:-1] * np.diff(bends))))
    piece = max(int(np.searchsorted(sums, total, side="left")) - 1, 0)
    factor = bends[piece]  # f at the beginning of the piece
    if slope[piece] > 0:  # else the sum is constant in this piece, and any f in it will do
        factor += (total - sums[piece]) / slope[piece]
    shares: Floats = np.clip(factor * speed, float(least), max_sizes)
    return shares


def _distribute_remainder(sizes: Ints, exact_shares: Floats, max_sizes: Ints, remainder: int, least: int) -> None:
    """Add ``remainder`` samples to ``sizes`` (n,), in place, one each to the workers whose exact shares exceed them most.

    A negative remainder is taken away from the workers whose exact shares exceed their sizes least. Sizes stay between
    ``least`` and ``max_sizes`` (n,).
    """
    step = 1 if remainder > 0 else -1
    while remainder:  # more than one turn where fewer workers have room than samples remain
        has_room = sizes < max_sizes if step > 0 else sizes > least
        order = np.argsort(-step * (exact_shares - sizes), kind="stable")
        chosen = order[has_room[order]][: abs(remainder)]
        sizes[chosen] += step
        remainder -= step * len(chosen)
