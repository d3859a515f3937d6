"""ElasticBSP as a plan: how many iterations each device makes until the barrier, and what that gains over BSP.

Start at :func:`plan_elastic_bsp`. Every device is one worker that trains a logical mini-batch of its own per iteration. With
C_p iterations per second, worker p's k-th iteration ends at ``k / C_p``. Of the barriers at one of the next R ends
(ElasticBSP, section IV) the plan takes the one that makes most mini-batches per second, which waits least per unit of time;
ZipLine takes the one that waits least in a superstep. All supersteps are alike, because all workers start together after
each barrier.

Which devices take part is chosen too, because a slow one can cost more than it brings. Until a given barrier, a worker's
iterations grow with its speed, also where they are clipped to the fewest plus a bound on the gap. So without a price limit
the best devices are the fastest ones down to some type: one candidate per type, and the best of them is optimal. With a price
limit, that value bounds every choice, and so does the most capability that the money buys; branch and bound finds the best.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.job.placement.problem import Problem, check_affordable
from ddltool.analyzers.job.placement.steps import Counts
from ddltool.analyzers.job.planning.device_search import Best, best_devices
from ddltool.arrays import Ints
from ddltool.errors import InputError
from ddltool.graph import natural_key
from ddltool.plans import Assignment, Plan, Superstep

DEFAULT_LOOKAHEAD = 15
# Largest n^2 R (n device types, lookahead R) of candidate barriers; more would take over a second or two.
MOST_ENDS = 100_000_000
# Products below this fit 64-bit integers.
_INT64 = 2**62
# Relative difference of two rates that may be rounding.
_ROUNDING = 1e-12


class BestSuperstep(NamedTuple):
    """The best superstep of given devices, in exact numbers."""

    type_indices: list[int]
    """Indices in ``problem.devices`` of the used device types, fastest first."""
    barrier_s: Fraction
    """Length of the superstep."""
    iterations: list[int]
    """Iterations in a superstep of a worker of each used type."""
    rate_per_s: Fraction
    """Mini-batches per second."""


def plan_elastic_bsp(
    problem: Problem,
    *,
    lookahead: int = DEFAULT_LOOKAHEAD,
    max_gap: int | None = None,
    limit_s: float = 2.0,
    all_devices: bool = False,
) -> Plan:
    """Return the plan with the best barrier among each worker's next ``lookahead`` iterations, and the best devices for it.

    ``max_gap``: most iterations by which one worker may be ahead of another; None: no limit. ``all_devices``: take them all
    instead of choosing. At most ``max_workers`` devices take part, as each makes a logical mini-batch at a time. ``status`` is
    ``optimal`` when no other devices and no other barrier make more mini-batches per second; else the search ended after
    ``limit_s`` seconds, and ``gap`` bounds how much more they could make. The time of synchronisation is not included. Raises
    Infeasible when no device can be afforded, InputError where :func:`best_superstep` does.
    """
    started = time.perf_counter()
    check_affordable(problem)
    if all_devices:
        counts = tuple(device.count for device in problem.devices)
        best = superstep_of(problem, counts, lookahead, max_gap)
        gap = 0.0
    else:
        choice = choose(problem, lookahead, max_gap, limit_s)
        counts, best, gap = choice.counts, choice.evaluation, choice.gap
    # The figures of the superstep, by type: each worker waits from the end of its last iteration until the barrier.
    used = [(problem.devices[index], counts[index]) for index in best.type_indices]
    iterations = {device.name: made for (device, _), made in zip(used, best.iterations, strict=True)}
    waits_s = [best.barrier_s - iterations[device.name] / device.capability_per_s for device, _ in used]
    throughput = float(best.rate_per_s)
    return problem.plan(
        "elastic-bsp",
        problem.max_workers / throughput,
        [
            Assignment(device_type=device.name, devices=count, ests_per_device=0, local_batch_size=problem.batch_size)
            for device, count in sorted(used, key=lambda row: natural_key(row[0].name))
        ],
        throughput=throughput,
        waste=float(sum(device.capability_per_s * count for device, count in used)) - throughput,
        status="feasible" if gap else "optimal",
        gap=gap,
        solve_seconds=time.perf_counter() - started,
        superstep=Superstep(
            lookahead=lookahead,
            superstep_s=float(best.barrier_s),
            iterations=iterations,
            mini_batches=int(best.rate_per_s * best.barrier_s),
            waiting_s=float(max(waits_s)),
            total_waiting_s=float(sum(wait_s * count for wait_s, (_, count) in zip(waits_s, used, strict=True))),
            iteration_gap=max(best.iterations) - min(best.iterations),
            left_out={} if gap or problem.single_type else problem.spare(counts),
        ),
    )


def superstep_of(problem: Problem, counts: Counts, lookahead: int, max_gap: int | None) -> BestSuperstep:
    """Return the superstep that makes most mini-batches per second on exactly ``counts`` (T,) devices, at least one.

    Each worker makes at most ``lookahead`` iterations until the barrier, and at most ``max_gap`` more than any other (None: no
    limit).
    """
    type_indices = [index for index in problem.fastest_first if counts[index]]
    workers = [(problem.devices[index].capability_per_s, counts[index]) for index in type_indices]
    barrier_s, iterations = best_superstep(workers, lookahead, max_gap)
    mini_batches = sum(k * count for k, (_, count) in zip(iterations, workers, strict=True))
    return BestSuperstep(type_indices, barrier_s, iterations, mini_batches / barrier_s)


def choose(problem: Problem, lookahead: int, max_gap: int | None, limit_s: float) -> Best[BestSuperstep]:
    """Return the devices whose best superstep makes most mini-batches per second; of equal ones the fewest.

    ``lookahead`` and ``max_gap`` limit a worker's iterations, see :func:`superstep_of`. The search ends after ``limit_s``
    seconds; the result's gap then says how much better another choice could be. At least one device must be affordable
    (:func:`~ddltool.analyzers.job.placement.problem.check_affordable`).
    """

    @cache
    def on_devices(counts: Counts) -> tuple[float, BestSuperstep]:
        """Return the seconds per mini-batch on exactly ``counts`` (T,) devices, and their superstep."""
        best = superstep_of(problem, counts, lookahead, max_gap)
        return float(1 / best.rate_per_s), best

    @cache
    def least_s(most: Counts) -> float:
        """Return a lower bound of the seconds per mini-batch on up to ``most`` (T,) devices; infinite for no device.

        It is the larger of two bounds: the best value if devices cost nothing (the fastest ones down to some type), and that of
        the most capability that the price limit buys.
        """
        if not any(most):
            return math.inf
        offered = problem.offering(most)
        seconds = min(on_devices(counts)[0] for counts in _fastest_down_to_each_type(offered))
        if problem.max_price_micro is None or not offered.affordable_capability:
            return seconds
        return max(seconds, float(1 / offered.affordable_capability) * (1 - _ROUNDING))

    best = best_devices(
        problem,
        lambda counts, _: on_devices(counts),
        lambda _, most: least_s(most),
        most=problem.max_workers,
        limit_s=limit_s,
        first=_first_guesses(problem),
    )
    assert best is not None  # a device can be afforded
    return best


def _fastest_down_to_each_type(problem: Problem) -> set[Counts]:
    """Return candidates of (T,) device counts, one of which is optimal if there is no limit on the price.

    They are all devices of the fastest type, of the fastest two types, and so on; of each type alone where a job must keep to
    one. Each has at most as many devices as the problem allows.
    """
    order = problem.fastest_first
    unpriced = replace(problem, max_price_micro=None)
    type_sets = [[index] for index in order] if problem.single_type else [order[: n + 1] for n in range(len(order))]
    largest = {tuple(unpriced.with_added(type_set, unpriced.device_limit)) for type_set in type_sets}
    return {counts for counts in largest if any(counts)}


def _first_guesses(problem: Problem) -> Iterator[Counts]:
    """Yield (T,) device counts that the search should try first under a price limit; none without one.

    Types are ordered by speed, then by price per capability. For every contiguous range of each order, devices are taken in
    that order while the money lasts.
    """
    if problem.max_price_micro is None:
        return
    for order in (problem.fastest_first, problem.cheapest_first):
        for first, last in itertools.combinations(range(len(order) + 1), 2):
            yield tuple(problem.with_added(order[first:last], problem.device_limit))


def best_superstep(
    workers: Sequence[tuple[Fraction, int]], lookahead: int, max_gap: int | None = None
) -> tuple[Fraction, list[int]]:
    """Return (barrier in seconds, iterations per entry) of the superstep that makes most mini-batches per second.

    ``workers``: entries (iterations per second, number of such workers). Every worker makes 1 to ``lookahead`` iterations, at
    most ``max_gap`` more than any other. Of equally good barriers the earliest is taken. Exact; O(n^2 R) operations for n
    entries and R = ``lookahead``. Raises InputError for a lookahead below 1 or a negative gap, and for n^2 R above 100 million.
    """
    if lookahead < 1 or (max_gap is not None and max_gap < 0):
        raise InputError(
            "--lookahead", f"{lookahead} with a gap of {max_gap}", "look 1 iteration ahead or more, gap >= 0"
        )
    if len(workers) ** 2 * lookahead > MOST_ENDS:
        problem = f"{lookahead} iterations of {len(workers)} device types are too many"
        raise InputError("--lookahead", problem, f"at most {MOST_ENDS // len(workers) ** 2} for these types")
    best: tuple[Fraction, Fraction] | None = None  # (mini-batches per second, barrier in seconds)
    counts = np.array([count for _, count in workers], dtype=np.int64)
    speeds = [speed for speed, _ in workers]
    # A barrier that is not at the end of some worker's iteration would only add waiting.
    for speed in set(speeds):
        candidate = _best_barrier(speed, speeds, counts, lookahead, max_gap)
        if candidate is None:
            continue
        rate_per_s, barrier_s = candidate
        if best is None or (rate_per_s, -barrier_s) > (best[0], -best[1]):  # of equal rates the earlier barrier
            best = candidate
    assert best is not None  # the slowest worker's first end is a candidate
    barrier_s = best[1]
    iterations = [min(lookahead, int(barrier_s * speed)) for speed, _ in workers]
    if max_gap is not None:
        iterations = [min(k, min(iterations) + max_gap) for k in iterations]
    return barrier_s, iterations


def _best_barrier(
    speed: Fraction, speeds: Sequence[Fraction], counts: Ints, lookahead: int, max_gap: int | None
) -> tuple[Fraction, Fraction] | None:
    """Return (mini-batches per second, barrier in seconds) of the best barrier where a worker with ``speed`` ends an iteration.

    ``speeds``: iterations per second of all n kinds of workers; ``counts`` (n,): number of workers of each kind. Of equally
    good barriers the earliest is taken. None where at each of these ends some worker has not completed an iteration.
    """
    iterations = _completed_iterations(speed, speeds, lookahead)  # (n, R)
    fewest_iterations = iterations.min(axis=0)
    valid_ends = np.flatnonzero(fewest_iterations >= 1)
    if not len(valid_ends):
        return None
    if max_gap is not None:
        iterations = np.minimum(iterations, fewest_iterations + max_gap)
    mini_batches = counts @ iterations[:, valid_ends]  # (r,) mini-batches until the (valid_ends[i] + 1)-th end
    rate = mini_batches / (valid_ends + 1)  # in mini-batches per iteration of that worker; times speed: per second
    # Rates closer than rounding are compared exactly; the first of equal ones stays.
    near_best = np.flatnonzero(rate >= rate.max() * (1 - _ROUNDING))
    best_count, best_end = 0, 0  # mini-batches until the barrier, and which end it is, from 1
    for candidate in near_best.tolist():
        count, end = int(mini_batches[candidate]), int(valid_ends[candidate]) + 1
        if best_end == 0 or count * best_end > best_count * end:
            best_count, best_end = count, end
    return best_count * speed / best_end, best_end / speed


def _completed_iterations(speed: Fraction, speeds: Sequence[Fraction], lookahead: int) -> Ints:
    """Return (n, R) the iterations that each worker has completed when one with ``speed`` ends its first, ..., R-th iteration.

    ``speeds``: iterations per second of the n workers; R is ``lookahead``, which also caps every number. Exact.
    """
    ends = np.arange(1, lookahead + 1, dtype=np.int64)
    completed = np.empty((len(speeds), lookahead), dtype=np.int64)
    for index, other in enumerate(speeds):
        ratio = other / speed
        numerator, denominator = ratio.numerator, ratio.denominator
        exact_ends: NDArray[Any] = ends
        if numerator * lookahead >= _INT64 or denominator >= _INT64:
            exact_ends = ends.astype(object)  # Python's integers, which cannot overflow
        completed[index] = np.minimum(exact_ends * numerator // denominator, lookahead)
    return completed
