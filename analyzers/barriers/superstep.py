"""ElasticBSP as a plan: how many iterations each device makes until the barrier, and what that gains over BSP.

Every device is one worker with a logical mini-batch of its own per iteration, so worker p's predicted ends are
``k / C_p``. Of the barriers among the next R of them (ElasticBSP, section IV) the plan takes the one that makes most
mini-batches per second: with speeds known, the least waiting per unit of time, where ZipLine takes the least waiting of
one superstep. All supersteps are alike, because all workers start together after each barrier.

Which devices take part is chosen too, for a slow one can cost more than it brings. At a barrier time T a worker's
iterations grow with its speed, also when they are clipped to the fewest plus a bound on the gap. So without a price the
best devices are the fastest ones, down to some type: one candidate per type, and the best of them is optimal. With a limit
on the price every combination of counts is a candidate where they are few; else some are tried, and the optimum without
that limit bounds what is lost. Start at :func:`plan_elastic_bsp`.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.placement.problem import Problem, check_affordable
from ddltool.errors import InputError
from ddltool.graph import natural_key
from ddltool.plans import Assignment, Plan, Superstep

DEFAULT_LOOKAHEAD = 15
# Ends looked at, one for each pair of entries and iteration: a second or two.
MOST_ENDS = 100_000_000
# Combinations of counts that are all looked at under a limit on the price, where each takes a millisecond.
MOST_COMBINATIONS = 2000
_INT64 = 2**62

Counts = Sequence[int]
"""Devices of each type of the problem."""
Best = Callable[[list[tuple[Fraction, int]]], tuple[Fraction, list[int]]]
"""From (iterations per second, how many) per type to the best barrier in seconds and the iterations per type."""


class DeviceChoice(NamedTuple):
    """Devices with their best superstep; exact numbers."""

    counts: Counts
    kinds: list[int]
    """The used types, fastest first."""
    barrier: Fraction
    """Seconds."""
    iterations: list[int]
    """Of each used type."""
    rate: Fraction
    """Mini-batches per second."""
    bound: Fraction
    """No choice has a higher rate; equal to ``rate``: optimal."""


def plan_elastic_bsp(problem: Problem, *, lookahead: int = DEFAULT_LOOKAHEAD, max_gap: int | None = None) -> Plan:
    """Return the plan with a barrier among each worker's next ``lookahead`` iterations, and the best devices for it.

    ``max_gap`` bounds the iterations by which one worker may be ahead of another. At most ``max_workers`` devices take
    part, as each makes a logical mini-batch at a time. ``status`` is ``optimal`` when no other devices and no other
    barrier make more mini-batches per second; else ``gap`` bounds how much more they could. Synchronisation itself is
    left out, as in all plans. Raises Infeasible when no device can be afforded, InputError as :func:`best_superstep`.
    """
    started = time.perf_counter()
    check_affordable(problem)
    each = len(problem.devices) ** 2 * lookahead
    combinations = max(1, min(MOST_COMBINATIONS, MOST_ENDS // max(each, 1)))
    found = choose(problem, lambda workers: best_superstep(workers, lookahead, max_gap), combinations)
    rows = [(problem.devices[kind], found.counts[kind]) for kind in found.kinds]
    barrier, iterations = found.barrier, found.iterations
    made = sum(k * count for k, (_, count) in zip(iterations, rows, strict=True))
    throughput = float(made / barrier)
    waits = [barrier - k / device.capability_per_s for k, (device, _) in zip(iterations, rows, strict=True)]
    capability = float(sum(device.capability_per_s * count for device, count in rows))
    assignments = [
        Assignment(device_type=device.name, devices=count, ests_per_device=0, local_batch_size=problem.batch_size)
        for device, count in sorted(rows, key=lambda row: natural_key(row[0].name))
    ]
    return Plan(
        job=problem.job,
        strategy="elastic-bsp",
        max_workers=problem.max_workers,
        batch_size=problem.batch_size,
        iteration_s=problem.max_workers / throughput,
        throughput=throughput,
        assignments=assignments,
        est_count=0,
        waste=capability - throughput,
        overload_factor=problem.max_workers / throughput,
        status="optimal" if found.bound == found.rate else "feasible",
        gap=float(found.bound / found.rate - 1),
        solve_seconds=time.perf_counter() - started,
        superstep=Superstep(
            lookahead=lookahead,
            superstep_s=float(barrier),
            iterations={device.name: k for (device, _), k in zip(rows, iterations, strict=True)},
            mini_batches=made,
            waiting_s=float(max(waits)),
            total_waiting_s=float(sum(wait * count for wait, (_, count) in zip(waits, rows, strict=True))),
            iteration_gap=max(iterations) - min(iterations),
            left_out=_left_out(problem, found.counts) if found.bound == found.rate else {},
        ),
    )


def choose(problem: Problem, best: Best, combinations: int = MOST_COMBINATIONS) -> DeviceChoice:
    """Return the devices whose best superstep makes most mini-batches per second; of equal ones the fewest.

    ``combinations``: how many are all looked at under a limit on the price; of more, some are tried. At least one device
    must be affordable (:func:`~ddltool.analyzers.placement.problem.check_affordable`).
    """
    order = problem.fastest_first
    groups = [[kind] for kind in order] if problem.single_type else [order]
    unpriced = replace(problem, max_price_micro=None)
    firsts = [group[:last] for group in groups for last in range(1, len(group) + 1)]
    fastest = [unpriced.filled(first, problem.device_limit) for first in firsts]
    if problem.max_price_micro is None:
        return _fittest(problem, fastest, best)
    most = [problem.affordable(device) for device in problem.devices]
    if sum(math.prod(most[kind] + 1 for kind in group) for group in groups) <= combinations:
        return _fittest(problem, _combinations(problem, groups, most), best)
    free = _fittest(problem, fastest, best)
    return _fittest(problem, _guesses(problem, groups), best, free.rate)


def _left_out(problem: Problem, counts: Counts) -> dict[str, int]:
    """Return the devices, by type, of which the limits would allow one more, but which would lower the rate."""
    if problem.single_type:
        return {}
    return {
        device.name: device.count - counts[kind]
        for kind, device in enumerate(problem.devices)
        if problem.allows(_one_more(counts, kind))
    }


def _fittest(problem: Problem, candidates: Iterable[Counts], best: Best, bound: Fraction | None = None) -> DeviceChoice:
    """Return the best of the candidates; ``bound`` None: there are no others."""
    choice: DeviceChoice | None = None
    for counts in candidates:
        kinds = [kind for kind in problem.fastest_first if counts[kind]]
        barrier, iterations = best([(problem.devices[kind].capability_per_s, counts[kind]) for kind in kinds])
        rate = sum(k * counts[kind] for k, kind in zip(iterations, kinds, strict=True)) / barrier
        if choice is None or (rate, -sum(counts)) > (choice.rate, -sum(choice.counts)):
            top = rate if bound is None else max(rate, bound)
            choice = DeviceChoice(counts, kinds, barrier, iterations, rate, top)
    assert choice is not None  # a device can be afforded
    return choice


def _combinations(problem: Problem, groups: Sequence[Sequence[int]], most: Counts) -> Iterator[Counts]:
    """Yield every allowed combination of counts to which no device of a type that it uses can be added.

    One more would bring mini-batches for nothing.
    """
    for group in groups:
        ranges = [range(most[kind] + 1) if kind in group else range(1) for kind in range(len(most))]
        for counts in itertools.product(*ranges):
            grows = any(count and problem.allows(_one_more(counts, kind)) for kind, count in enumerate(counts))
            if problem.allows(counts) and not grows:
                yield counts


def _one_more(counts: Counts, kind: int) -> Counts:
    return [count + (place == kind) for place, count in enumerate(counts)]


def _guesses(problem: Problem, groups: Sequence[Sequence[int]]) -> Iterator[Counts]:
    """Yield devices taken one type after the other while money lasts: fastest first, and most speed for a price first."""
    for group in groups:
        value = {
            kind: (problem.devices[kind].price_micro or 0) / problem.devices[kind].capability_per_s for kind in group
        }
        parts = itertools.combinations(range(len(group) + 1), 2)
        for order, (first, last) in itertools.product((group, sorted(group, key=value.__getitem__)), parts):
            counts = problem.filled(order[first:last], problem.device_limit)
            if any(counts):
                yield counts


def best_superstep(
    workers: Sequence[tuple[Fraction, int]], lookahead: int, max_gap: int | None = None
) -> tuple[Fraction, list[int]]:
    """Return (barrier in seconds, iterations per entry) of the superstep that makes most mini-batches per second.

    ``workers``: (iterations per second, how many such workers). Every worker makes 1 to ``lookahead`` iterations, at most
    ``max_gap`` more than any other. The earliest of equal ones wins. Exact, in O(n^2 R) operations on arrays for n
    entries. Raises InputError for a lookahead below 1 or a negative gap, and for n^2 R above 100 million.
    """
    if lookahead < 1 or (max_gap is not None and max_gap < 0):
        raise InputError(
            "--lookahead", f"{lookahead} with a gap of {max_gap}", "look 1 iteration ahead or more, gap >= 0"
        )
    if len(workers) ** 2 * lookahead > MOST_ENDS:
        problem = f"{lookahead} iterations of {len(workers)} device types are too many"
        raise InputError("--lookahead", problem, f"at most {MOST_ENDS // len(workers) ** 2} for these types")
    best: tuple[Fraction, Fraction] | None = None
    counts = np.array([count for _, count in workers], dtype=np.int64)
    for speed in {speed for speed, _ in workers}:
        found = _best_of(speed, [other for other, _ in workers], counts, lookahead, max_gap)
        if found is not None and (best is None or found[0] > best[0] or (found[0] == best[0] and found[1] < best[1])):
            best = found
    assert best is not None  # the slowest worker's first end is a candidate
    at = best[1]
    iterations = [min(lookahead, int(at * speed)) for speed, _ in workers]
    if max_gap is not None:
        iterations = [min(k, min(iterations) + max_gap) for k in iterations]
    return at, iterations


def _best_of(
    speed: Fraction, speeds: Sequence[Fraction], counts: NDArray[np.int64], lookahead: int, max_gap: int | None
) -> tuple[Fraction, Fraction] | None:
    """Return (mini-batches per second, barrier) of the best barrier among the ends of a worker with ``speed``.

    None when by none of them all workers have made an iteration.
    """
    made = _iterations(speed, speeds, lookahead)  # (n, R)
    fewest = made.min(axis=0)
    whole = np.flatnonzero(fewest >= 1)
    if not len(whole):
        return None
    if max_gap is not None:
        made = np.minimum(made, fewest + max_gap)
    total = counts @ made[:, whole]  # (r,) mini-batches until the whole[i] + 1-th end
    rate = total / (whole + 1)  # times speed
    # Rates closer than rounding are compared exactly; the first of equal ones stays.
    close = np.flatnonzero(rate >= rate.max() * (1 - 1e-12))
    most, place = 0, -1
    for candidate in close.tolist():
        number, end = int(total[candidate]), int(whole[candidate]) + 1
        if place < 0 or number * (place + 1) > most * end:
            most, place = number, end - 1
    return most * speed / (place + 1), (place + 1) / speed


def _iterations(speed: Fraction, speeds: Sequence[Fraction], lookahead: int) -> NDArray[np.int64]:
    """Return (n, R) how many iterations, at most R, each worker has made when one with ``speed`` ends its k-th."""
    ends = np.arange(1, lookahead + 1, dtype=np.int64)
    made = np.empty((len(speeds), lookahead), dtype=np.int64)
    for place, other in enumerate(speeds):
        ratio = other / speed
        up, down = ratio.numerator, ratio.denominator
        exact: NDArray[Any] = ends
        if up * lookahead >= _INT64 or down >= _INT64:
            exact = ends.astype(object)  # Python's whole numbers, which have no largest
        made[place] = np.minimum(exact * up // down, lookahead)
    return made
