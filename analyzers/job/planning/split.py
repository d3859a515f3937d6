"""How many samples of the total batch each device takes: equally (BSP), or so that all end together (LB-BSP).

Start at :func:`plan_lb_bsp`; :func:`plan_bsp` is the equal split that one would use without planning.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from heapq import heappop, heappush

from ddltool.analyzers.job.balancing.minmax import (
    Chosen,
    DeviceCurves,
    Finish,
    Offer,
    Row,
    choose,
    slowest_of,
    spread,
)
from ddltool.analyzers.job.balancing.sizing import MOST_SAMPLES
from ddltool.analyzers.job.goodput.throughput import StepTime, ThroughputParams, overlapped, sync_time_s
from ddltool.analyzers.job.placement.problem import Problem, check_affordable, exact
from ddltool.errors import Infeasible, InputError
from ddltool.graph import natural_key
from ddltool.job import DeviceOffer, Job
from ddltool.plans import Assignment, BatchSplit, Plan, Strategy
from ddltool.quantities import MOST_PASSES

NEAR_BEST = 1e-3
"""The search for a total batch ends when no other can be better by more than this share."""


def memory_limit(job: Job, offer: DeviceOffer) -> int | None:
    """Return the most samples that one device of ``offer`` holds at a time; None: no limit is known.

    It is the least of the device's ``max_local_batch_size``, that of the goodput section, and the samples that fit into its
    memory: ``batch_size`` of them need ``memory_per_worker_gib``, beside ``memory_fixed_gib`` for all.
    """
    limits = [offer.max_local_batch_size, None if job.goodput is None else job.goodput.max_local_batch_size]
    mini_batch_gib = job.constraints.memory_per_worker_gib
    if mini_batch_gib is not None and offer.memory_gib is not None:
        fixed_gib = exact(job.constraints.memory_fixed_gib or 0.0)
        # exact fractions, because rounding could cost a mini-batch that just fits
        mini_batches = math.floor((exact(offer.memory_gib) - fixed_gib) / exact(mini_batch_gib))
        limits.append(max(0, mini_batches) * job.batch_size)
    return min((limit for limit in limits if limit is not None), default=None)


def plan_bsp(problem: Problem, curves: Mapping[str, StepTime] | None = None) -> Plan:
    """Return the plan of bulk-synchronous training with an equal split of ``max_workers * batch_size`` samples.

    Every device is one replica and gets at least one sample; the remainder goes to the fastest devices, one each. A step takes
    as long as the slowest share: the time that the type's entry of ``curves`` (by device type) gives, launch and saturation
    included, or without one ``x_i / (batch_size C_i)`` seconds for x_i samples at capability C_i. That is EasyScale's f
    (Equation 1b) with ``A_i = x_i / batch_size``. Where constraints exclude devices, the fastest are kept, as far as devices
    and money go; where a job must keep to one type, the type whose kept devices have the most capability in all. Raises
    Infeasible when no device can be afforded, or a share does not fit into a device's memory.
    """
    started = time.perf_counter()
    check_affordable(problem)
    device_curves = DeviceCurves.of_types(_step_times(problem, curves))
    rows = _equal_rows(problem, problem.max_workers * problem.batch_size)
    for row in rows:
        fits = int(device_curves.limits[row.kind])
        if row.size > fits:
            name = problem.devices[row.kind].name
            raise Infeasible(f"an equal split gives each {name} {row.size} samples, and {fits} fit")
    step = slowest_of(device_curves, rows)
    return _plan(problem, "bsp", device_curves, rows, step, time.perf_counter() - started)


def plan_lb_bsp(problem: Problem, curves: Mapping[str, StepTime] | None = None, *, synchronise: bool = True) -> Plan:
    """Return the split of ``max_workers * batch_size`` samples with the shortest step, over all subsets of the devices.

    Devices, within the problem's limits, and their samples are chosen together and exactly (:mod:`~.minmax`). A type's time for
    x samples is its entry of ``curves`` (by device type), or ``x / (batch_size C)`` seconds by its capability C. Where a type's
    memory does not hold the whole batch, gradient accumulation is tried too: each device makes its samples in as few and as
    equal passes as fit, and the shorter step is taken. A device is left out only where the step is shorter without it.

    With ``synchronise`` and a fitted model in ``curves``, the step is ``(compute^gamma + sync^gamma)^(1/gamma)`` (Pollux,
    section 3.2) with the slowest type's synchronisation time on that number of devices; with accumulation it is their sum.

    Raises Infeasible when no device can be afforded or none holds a sample, InputError above 10^12 samples.
    """
    started = time.perf_counter()
    check_affordable(problem)
    total = checked_total(problem.max_workers, problem.batch_size, "batch_size")
    step_times = _step_times(problem, curves)
    offer = _offer(problem)
    timing = _Timing.of(step_times, synchronise=synchronise)
    # In one pass, with the equal split to compare, then in several passes where memory does not hold the whole batch.
    best = timing.choose(offer, total)
    equal_s = None if best is None else _equal_split_s(problem, timing, total)
    accumulated_s = None  # of the step in several passes, where it is the shorter one
    if any(curve.memory_limit is not None and curve.memory_limit < total for curve in step_times):
        accumulating = _Timing.of(step_times, synchronise=synchronise, accumulate=True)
        accumulated = accumulating.choose(offer, total)
        if best is None:
            timing, best = accumulating, accumulated
        elif accumulated is not None and accumulated.iteration_s < best.iteration_s:
            accumulated_s = accumulated.iteration_s
    if best is None:
        raise Infeasible(f"no device holds a single sample: {_limits_text(problem, step_times)}")
    plan = _plan(problem, "lb-bsp", timing.curves, best.rows, best.iteration_s, time.perf_counter() - started)
    usable_numbers, kept_s = _with_all_usable(problem, timing, best, total)
    device_numbers = zip(problem.devices, usable_numbers, best.numbers, strict=True)
    record = BatchSplit(
        total_batch_size=total,
        equal_s=equal_s,
        kept_s=kept_s,
        idle_s=_idle_s(timing, best),
        dropped={device.name: usable - used for device, usable, used in device_numbers if usable > used},
        accumulated_s=accumulated_s,
    )
    communication_s = None if timing.finish is None else max(0.0, best.iteration_s - best.slowest_s)
    # the plan's field overload_factor holds EasyScale's f: here the seconds that the slowest device computes
    update = {"split": record, "communication_s": communication_s, "overload_factor": best.slowest_s}
    return plan.model_copy(update=update)


def plan_best_total(
    problem: Problem, curves: Mapping[str, StepTime], totals: range, progress: Callable[[int], float]
) -> Plan | None:
    """Return the split of most progress per second; its total batch, devices and sizes are chosen together.

    This is Cannikin's problem (arXiv:2402.05302). Step times are those of :func:`plan_lb_bsp`, in one pass or in several,
    whichever is shorter. None where no total fits.

    The search is branch and bound. Both progress and step time grow with the total, so any total in a range makes at most the
    progress of the largest in the time of the smallest. Ranges are halved, the most promising first, until none can be better
    than the best total found by more than :data:`NEAR_BEST`.

    Args:
        problem: the offered devices and the constraints on them.
        curves: device type -> step time over samples, with the fitted model of synchronisation.
        totals: the total batches to choose from, in samples.
        progress: returns the useful samples of a step with this total batch (the total times its statistical efficiency).
    """
    started = time.perf_counter()
    step_times = _step_times(problem, curves)
    offer = _offer(problem)
    timings = [_Timing.of(step_times, synchronise=True, accumulate=accumulate) for accumulate in (False, True)]

    @cache
    def shortest(total: int) -> tuple[_Timing, Chosen] | None:
        """Return the timing and the split of the shortest step of ``total`` samples; None where none fits."""
        found = [(timing, choice) for timing in timings if (choice := timing.choose(offer, total)) is not None]
        return min(found, key=lambda each: each[1].iteration_s, default=None)

    def rate(total: int, timed_total: int) -> float:
        """Return the progress of ``total`` samples over the seconds of the shortest step of ``timed_total`` samples.

        Where these are the largest and the smallest total of a range, it is an upper bound of the range's best rate.
        """
        step = shortest(timed_total)
        return 0.0 if step is None else progress(total) / step[1].iteration_s

    best = max(totals[0], totals[-1], key=lambda total: rate(total, total))
    ranges = [(-rate(totals[-1], totals[0]), totals[0], totals[-1])]  # a heap of (-bound, smallest, largest total)
    while ranges and -ranges[0][0] > rate(best, best) * (1 + NEAR_BEST):
        _, first, last = heappop(ranges)
        middle = (first + last + 1) // 2
        best = max(best, middle, key=lambda total: rate(total, total))
        for begin, end in ((first, middle - 1), (middle, last)):
            if begin < end:
                heappush(ranges, (-rate(end, begin), begin, end))
    found = shortest(best)
    if found is None:
        return None
    timing, choice = found
    # the total need not be a multiple of the job's mini-batch, so the plan's mini-batches are single samples
    in_samples = replace(problem, max_workers=best, batch_size=1)
    plan = _plan(in_samples, "goodput", timing.curves, choice.rows, choice.iteration_s, time.perf_counter() - started)
    split = BatchSplit(
        total_batch_size=best,
        equal_s=_equal_split_s(problem, timing, best),
        kept_s=None,
        idle_s=_idle_s(timing, choice),
        dropped={},
        goodput_per_s=rate(best, best),
        efficiency=progress(best) / best,
    )
    waiting_s = max(0.0, choice.iteration_s - choice.slowest_s)
    update = {"split": split, "communication_s": waiting_s, "overload_factor": choice.slowest_s}
    return plan.model_copy(update=update)


def _offer(problem: Problem) -> Offer:
    """Return the problem's devices, prices and limits in the form that :mod:`~.minmax` takes."""
    prices = tuple(device.price_micro or 0 for device in problem.devices)
    return Offer(
        counts=tuple(device.count for device in problem.devices),
        max_devices=problem.max_devices,
        prices=None if problem.max_price_micro is None else prices,
        budget=problem.max_price_micro or 0,
        single_type=problem.single_type,
    )


def checked_total(workers: int, batch_size: int, where: str) -> int:
    """Return the samples of a step, ``workers * batch_size``. Raises InputError at ``where`` above :data:`MOST_SAMPLES`."""
    total = workers * batch_size
    if total > MOST_SAMPLES:
        problem = f"is {batch_size}, which makes {total} samples a step for {workers} workers"
        raise InputError(where, problem, f"at most {MOST_SAMPLES // workers} (10^12 samples in all)")
    return total


def _plan(
    problem: Problem, strategy: Strategy, curves: DeviceCurves, rows: Sequence[Row], step_s: float, seconds: float
) -> Plan:
    """Return the plan that gives the devices of each row the row's samples.

    The plan's waste is the mini-batches per second that its devices lose by waiting. Raises Infeasible where a device would
    make more passes than a plan may have.

    Args:
        problem: the offered devices, in whose order rows number the types.
        strategy: the name of the strategy that made the split.
        curves: time over samples, and memory, of each type.
        rows: numbers of devices of a type with the same number of samples each.
        step_s: seconds of a step, synchronisation included if it is known.
        seconds: what the search for the split took.
    """
    names = [device.name for device in problem.devices]
    for row in rows:
        passes = _passes(curves, row)
        if passes > MOST_PASSES:
            raise Infeasible(
                f"each {names[row.kind]} would make {passes:,} passes of a step; {MOST_PASSES:,} are the most"
            )
    compute_s = {row: slowest_of(curves, [row]) for row in rows}
    # mini-batches per second if no device ever waited
    capability = sum(row.devices * row.size / row_s / problem.batch_size for row, row_s in compute_s.items() if row_s)
    assignments = [
        Assignment(
            device_type=names[row.kind],
            devices=row.devices,
            ests_per_device=0,
            local_batch_size=row.size,
            accumulation_steps=_passes(curves, row) - 1,
            compute_s=compute_s[row],
        )
        for row in sorted(rows, key=lambda row: (natural_key(names[row.kind]), -row.size))
    ]
    waste = max(0.0, capability - problem.max_workers / step_s)
    return problem.plan(strategy, step_s, assignments, waste=waste, solve_seconds=seconds)


def _step_times(problem: Problem, curves: Mapping[str, StepTime] | None) -> list[StepTime]:
    """Return the step time of each type, in the problem's order, from ``curves``: device type -> step time.

    A type without a time per sample there gets the one that its capability implies.
    """
    known = curves or {}
    return [
        known.get(device.name, StepTime()).at_capability(device.capability_per_s, problem.batch_size)
        for device in problem.devices
    ]


def _synchronised_finish(step_times: Sequence[StepTime], accumulating: bool) -> Finish | None:
    """Return the function that adds synchronisation to a step's compute; None where no type has a fitted model.

    ``step_times``: of each type, with its model if it has one. ``accumulating``: whether a step may have several passes; then
    the times add up, because gradients are exchanged after the last pass. The function takes (seconds of compute of the
    slowest device, number of devices).
    """
    models = [(curve.sync, curve.devices_per_node) for curve in step_times if curve.sync is not None]
    if not models:
        return None
    gamma = 1.0 if accumulating else min(params.gamma for params, _ in models)

    def sync_s(params: ThroughputParams, per_node: int, devices: int) -> float:
        """Return the seconds of synchronisation between ``devices`` devices, ``per_node`` on a node, by one type's model."""
        inside_s = float(sync_time_s(params, 1, min(devices, per_node)))  # on one node
        if devices <= per_node:
            return max(inside_s, 0.0)
        nodes = -(-devices // per_node)
        # a fit may say that several nodes are faster than one; the search needs times that grow with the devices
        return max(inside_s, float(sync_time_s(params, nodes, devices)))

    @cache
    def longest(devices: int) -> float:
        """Return the seconds of synchronisation between ``devices`` devices by the slowest type's model."""
        return max(sync_s(params, per_node, devices) for params, per_node in models)

    def finish(slowest_s: float, devices: int) -> float:
        """Return the seconds of a step on ``devices`` devices, the slowest of which computes for ``slowest_s``."""
        return float(overlapped(slowest_s, longest(devices), gamma))

    return finish


def _passes(curves: DeviceCurves, row: Row) -> int:
    """Return the number of passes in which the devices of a row make their samples: the fewest that fit into memory.

    It is 1 where ``curves`` are without accumulation.
    """
    if not curves.accumulate:
        return 1
    most_samples = max(1, int(curves.memory_limit[row.kind]))
    return max(1, -(-row.size // most_samples))  # rounded up


@dataclass(frozen=True, kw_only=True, slots=True)
class _Timing:
    """How long a step takes: compute by ``curves``, then synchronisation by ``finish``."""

    curves: DeviceCurves
    finish: Finish | None
    """See :func:`_synchronised_finish`; None: a step takes as long as its slowest device computes."""

    @classmethod
    def of(cls, step_times: Sequence[StepTime], *, synchronise: bool, accumulate: bool = False) -> _Timing:
        """Return the timing of a step on types with these step times.

        ``synchronise``: whether the step includes synchronisation; ``accumulate``: whether a device may make its samples in
        several passes (gradient accumulation), each as large as its memory holds.
        """
        curves = DeviceCurves.of_types(step_times, accumulate=accumulate)
        return cls(curves=curves, finish=_synchronised_finish(step_times, accumulate) if synchronise else None)

    def choose(self, offer: Offer, total: int) -> Chosen | None:
        """Return the devices and sizes of the shortest step of ``total`` samples; None where they fit on no devices."""
        return choose(self.curves, offer, total, self.finish)

    def step_s(self, rows: Sequence[Row]) -> float:
        """Return the seconds of a step in which the devices of ``rows`` take their samples."""
        slowest_s = slowest_of(self.curves, rows)
        return slowest_s if self.finish is None else self.finish(slowest_s, sum(row.devices for row in rows))


def _equal_split_s(problem: Problem, timing: _Timing, total: int) -> float | None:
    """Return the seconds of a step whose ``total`` samples are split equally (BSP); None where memory does not hold them."""
    rows = _equal_rows(problem, total)
    fits = all(row.size <= int(timing.curves.limits[row.kind]) for row in rows)
    return timing.step_s(rows) if fits else None


def _idle_s(timing: _Timing, choice: Chosen) -> float:
    """Return the seconds for which devices wait for the slowest one in a step, all devices together."""
    return sum(row.devices * (choice.slowest_s - slowest_of(timing.curves, [row])) for row in choice.rows)


def _equal_rows(problem: Problem, total: int) -> list[Row]:
    """Return the equal split of ``total`` samples over the devices that BSP uses; the fastest take the remainder.

    BSP uses the fastest devices that the constraints allow, or the type with the most capability in all where a job must keep
    to one. A row's ``kind`` is the index of its type in the problem.
    """
    order = problem.fastest_first
    type_sets = [[type_index] for type_index in order] if problem.single_type else [order]

    def capability_per_s(counts: Sequence[int]) -> Fraction:
        """Return the mini-batches per second of (T,) ``counts`` devices together."""
        pairs = zip(counts, problem.devices, strict=True)
        return sum((count * device.capability_per_s for count, device in pairs), start=Fraction(0))

    # ties go to the first, which is the fastest type
    counts = max((problem.with_added(type_set, total) for type_set in type_sets), key=capability_per_s)
    return equal_rows({type_index: counts[type_index] for type_index in order}, total)


def equal_rows(numbers: Mapping[int, int], total: int) -> list[Row]:
    """Return the equal split of ``total`` samples over devices; those of the first types take one more for the remainder.

    ``numbers``: type index -> number of devices. Devices of one type and size are one row.

    >>> [(row.devices, row.size) for row in equal_rows({0: 2, 1: 2}, 11)]
    [(2, 3), (1, 3), (1, 2)]
    """
    share, remainder = divmod(total, sum(numbers.values()))
    rows: list[Row] = []
    for type_index, number in numbers.items():
        larger = min(remainder, number)
        remainder -= larger
        sizes = ((larger, share + 1), (number - larger, share))
        rows += [Row(kind=type_index, devices=devices, size=size) for devices, size in sizes if devices]
    return rows


def _with_all_usable(problem: Problem, timing: _Timing, best: Chosen, total: int) -> tuple[list[int], float | None]:
    """Return (numbers of devices (T,), seconds of a step on them) when all usable devices are added to the ``best`` ones.

    The difference to the best step is what leaving devices out gains. A device is usable if its memory holds a sample and the
    constraints allow it. The seconds are None where a split of the ``total`` samples over these does not fit into memory.
    """
    with_memory = [index for index in problem.fastest_first if int(timing.curves.limits[index]) >= 1]
    usable = [index for index in with_memory if best.numbers[index] or not problem.single_type]
    numbers = problem.with_added(usable, total, best.numbers)
    if numbers == list(best.numbers):
        return numbers, best.iteration_s
    rows = spread(timing.curves, numbers, total)
    return numbers, None if rows is None else timing.step_s(rows)


def _limits_text(problem: Problem, step_times: Sequence[StepTime]) -> str:
    """Return how many samples a device of each type holds: "4 V100 of at most 32, 2 T4 of any number".

    ``step_times``: of the device types, in the problem's order.
    """
    limits = ["any number" if curve.memory_limit is None else f"at most {curve.memory_limit}" for curve in step_times]
    pairs = zip(problem.devices, limits, strict=True)
    return ", ".join(f"{device.count} {device.name} of {limit}" for device, limit in pairs)
