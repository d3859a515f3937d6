"""LB-BSP as a plan: how many samples of the total batch each device takes, so that all end together.

Start at :func:`plan_lb_bsp`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from ddltool.analyzers.balancing.choosing import Chosen, Finish, Offer, Row, choose, seconds_of, spread
from ddltool.analyzers.balancing.curves import DeviceCurves
from ddltool.analyzers.goodput.throughput import ThroughputParams, overlapped, sync_time_s
from ddltool.analyzers.placement.bsp import choose_devices
from ddltool.analyzers.placement.problem import DeviceType, Problem, check_affordable, exact
from ddltool.errors import Infeasible, InputError
from ddltool.graph import natural_key
from ddltool.job import DeviceOffer, Job
from ddltool.plan import Assignment, BatchSplit, Plan

MOST_SAMPLES = 10**12
"""Largest total batch: sums of samples over devices stay exact."""
_UNLIMITED = 2**40


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCurve:
    """Seconds of a step with x samples on one device: ``launch_s + per_sample_s max(x, saturation)``."""

    launch_s: float = 0.0
    per_sample_s: float | None = None
    """None: from the device's capability, so that ``batch_size`` samples take ``1 / C``."""
    memory_limit: int | None = None
    """Most samples at a time."""
    saturation: int = 0
    """Samples below which a step takes no less time."""
    sync: ThroughputParams | None = None
    """Fitted model whose synchronisation time is added; None: not known."""
    devices_per_node: int = 8
    """For ``sync``: devices that fill a node."""


def memory_limit(job: Job, offer: DeviceOffer) -> int | None:
    """Return the most samples that one device of ``offer`` holds at a time; None: no limit is known.

    The least of the device's and the goodput section's ``max_local_batch_size``, and of what its memory holds where
    ``memory_per_worker_gib`` is what ``batch_size`` samples need: ``floor((memory - fixed) / each) batch_size``.
    """
    known = [offer.max_local_batch_size, None if job.goodput is None else job.goodput.max_local_batch_size]
    each = job.constraints.memory_per_worker_gib
    if each is not None and offer.memory_gib is not None:
        fixed = exact(job.constraints.memory_fixed_gib or 0.0)
        known.append(max(0, math.floor((exact(offer.memory_gib) - fixed) / exact(each))) * job.batch_size)
    return min((limit for limit in known if limit is not None), default=None)


def plan_lb_bsp(problem: Problem, curves: Mapping[str, StepCurve] | None = None, *, synchronise: bool = True) -> Plan:
    """Return the split of ``max_workers * batch_size`` samples with the shortest step, over all subsets of the devices.

    Devices, as many of each type as the limits of devices, money and types allow, and sizes are chosen together, exactly
    (:mod:`ddltool.analyzers.balancing.choosing`). A type's time is its entry of ``curves``, or ``x / (batch_size C)`` from its
    capability. Where the devices' memory does not hold the batch at once, each makes its samples in as few and as equal
    passes as fit (gradient accumulation). With ``synchronise`` and a fitted model in ``curves`` the step is
    ``(compute^gamma + sync^gamma)^(1/gamma)`` (Pollux, section 3.2) with the slowest type's synchronisation time on that
    number of devices, and their sum under accumulation. A device is left out only where the step is shorter without it.

    Raises Infeasible when no device can be afforded or none holds a sample, InputError above 10^12 samples.
    """
    started = time.perf_counter()
    check_affordable(problem)
    total = checked_total(problem.max_workers, problem.batch_size, "batch_size")
    known = [_curve(device, problem.batch_size, (curves or {}).get(device.name)) for device in problem.devices]
    offer = Offer(
        counts=tuple(device.count for device in problem.devices),
        max_devices=problem.max_devices,
        prices=None
        if problem.max_price_micro is None
        else tuple(device.price_micro or 0 for device in problem.devices),
        budget=problem.max_price_micro or 0,
        single_type=problem.single_type,
    )
    finish = _finish(known, False) if synchronise else None
    made = _device_curves(known, accumulate=False)
    best = choose(made, offer, total, finish)
    parts = _device_curves(known, accumulate=True)
    finish_parts = _finish(known, True) if synchronise else None
    binds = any(curve.memory_limit is not None and curve.memory_limit < total for curve in known)
    accumulated = choose(parts, offer, total, finish_parts) if binds else None
    equal_s = None if best is None else _equal_seconds(problem, made, total, finish)
    shorter = None
    if best is None:
        made, best, finish = parts, accumulated, finish_parts
    elif accumulated is not None and accumulated.iteration_s < best.iteration_s:
        shorter = accumulated.iteration_s
    if best is None:
        raise Infeasible(f"no device holds a single sample: {_limits_text(problem, known)}")
    return _plan(
        problem,
        made,
        best,
        time.perf_counter() - started,
        kept=_all_kept(problem, offer, made, best, total, finish),
        equal_s=equal_s,
        accumulated_s=shorter,
        synchronised=finish is not None,
    )


def checked_total(workers: int, batch_size: int, where: str) -> int:
    """Return ``workers * batch_size``. Raises InputError at ``where`` above :data:`MOST_SAMPLES`."""
    if (total := workers * batch_size) > MOST_SAMPLES:
        problem = f"is {batch_size}, which makes {total} samples a step for {workers} workers"
        raise InputError(where, problem, f"at most {MOST_SAMPLES // workers} (10^12 samples in all)")
    return total


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """All devices that the limits allow, and the step if all of them take part."""

    numbers: list[int]
    iteration_s: float | None


def _plan(
    problem: Problem,
    curves: DeviceCurves,
    best: Chosen,
    seconds: float,
    *,
    kept: _Kept,
    equal_s: float | None,
    accumulated_s: float | None,
    synchronised: bool,
) -> Plan:
    """Return the record. Waste is what the devices' own speeds at their sizes make beyond the throughput."""
    names = [device.name for device in problem.devices]
    total = problem.max_workers * problem.batch_size
    took = {row: seconds_of(curves, row) for row in best.rows}
    throughput = problem.max_workers / best.iteration_s
    capability = sum(row.devices * row.size / seconds / problem.batch_size for row, seconds in took.items())
    dropped = {
        name: keeping - used
        for name, keeping, used in zip(names, kept.numbers, best.numbers, strict=True)
        if keeping > used
    }
    return Plan(
        job=problem.job,
        strategy="lb-bsp",
        max_workers=problem.max_workers,
        batch_size=problem.batch_size,
        iteration_s=best.iteration_s,
        throughput=throughput,
        assignments=[
            Assignment(
                device_type=names[row.kind],
                devices=row.devices,
                ests_per_device=0,
                local_batch_size=row.size,
                accumulation_steps=_passes(curves, row) - 1,
                compute_s=took[row],
            )
            for row in sorted(best.rows, key=lambda row: (natural_key(names[row.kind]), -row.size))
        ],
        est_count=0,
        waste=max(0.0, capability - throughput),
        overload_factor=best.slowest_s,
        status="optimal",
        gap=0.0,
        solve_seconds=seconds,
        communication_s=max(0.0, best.iteration_s - best.slowest_s) if synchronised else None,
        split=BatchSplit(
            total_batch_size=total,
            equal_s=equal_s,
            kept_s=kept.iteration_s,
            idle_s=sum(row.devices * (best.slowest_s - each) for row, each in took.items()),
            dropped=dropped,
            accumulated_s=accumulated_s,
        ),
    )


def _curve(device: DeviceType, batch_size: int, known: StepCurve | None) -> StepCurve:
    """Return the type's curve with all its numbers."""
    curve = known if known is not None else StepCurve()
    if curve.per_sample_s is not None:
        return curve
    per_sample_s = float(1 / (device.capability_per_s * max(batch_size, curve.saturation)))
    return StepCurve(
        launch_s=curve.launch_s,
        per_sample_s=per_sample_s,
        memory_limit=curve.memory_limit,
        saturation=curve.saturation,
        sync=curve.sync,
        devices_per_node=curve.devices_per_node,
    )


def _device_curves(known: list[StepCurve], *, accumulate: bool) -> DeviceCurves:
    return DeviceCurves.of(
        launch_s=[curve.launch_s for curve in known],
        per_sample_s=[curve.per_sample_s or 0.0 for curve in known],
        saturation=[float(curve.saturation) for curve in known],
        memory_limit=[_UNLIMITED if curve.memory_limit is None else curve.memory_limit for curve in known],
        accumulate=accumulate,
    )


def _finish(known: list[StepCurve], accumulating: bool) -> Finish | None:
    """Return how synchronisation lengthens a step; None where no type has a fitted model."""
    models = [(curve.sync, curve.devices_per_node) for curve in known if curve.sync is not None]
    if not models:
        return None
    gamma = 1.0 if accumulating else min(params.gamma for params, _ in models)

    def sync_s(params: ThroughputParams, per_node: int, devices: int) -> float:
        inside = float(sync_time_s(params, 1, min(devices, per_node)))
        across = float(sync_time_s(params, -(-devices // per_node), devices)) if devices > per_node else 0.0
        return max(inside, across)  # a fit may make it faster across nodes than inside; more devices never are

    @cache
    def longest(devices: int) -> float:
        return max(sync_s(params, per_node, devices) for params, per_node in models)

    def finish(slowest_s: float, devices: int) -> float:
        return float(overlapped(slowest_s, longest(devices), gamma))

    return finish


def _passes(curves: DeviceCurves, row: Row) -> int:
    return max(1, -(-row.size // max(1, int(curves.memory_limit[row.kind])))) if curves.accumulate else 1


def _all_kept(
    problem: Problem, offer: Offer, curves: DeviceCurves, best: Chosen, total: int, finish: Finish | None
) -> _Kept:
    """Return the devices that could take part beside those that do, fastest first, and the step with all of them."""
    numbers = list(best.numbers)
    left = (total if problem.max_devices is None else min(total, problem.max_devices)) - sum(numbers)
    money = offer.budget - offer.price(numbers)
    kinds = range(len(numbers))
    for kind in sorted(kinds, key=lambda kind: -problem.devices[kind].capability_per_s):
        if problem.single_type and not best.numbers[kind]:
            continue
        if int(curves.limits[kind]) < 1:
            continue
        more = min(offer.allows(kind, left, money), offer.counts[kind] - numbers[kind])
        numbers[kind] += more
        left -= more
        money -= offer.price_of(kind, more)
    if numbers == list(best.numbers):
        return _Kept(numbers=numbers, iteration_s=best.iteration_s)
    rows = spread(curves, numbers, total)
    if rows is None:
        return _Kept(numbers=numbers, iteration_s=None)
    slowest = max(seconds_of(curves, row) for row in rows)
    return _Kept(numbers=numbers, iteration_s=slowest if finish is None else finish(slowest, sum(numbers)))


def _equal_seconds(problem: Problem, curves: DeviceCurves, total: int, finish: Finish | None) -> float | None:
    """Return the step time of the equal split over the devices that BSP would use, None where a limit forbids it."""
    place = {device.name: kind for kind, device in enumerate(problem.devices)}
    pairs = sorted(choose_devices(problem), key=lambda pair: curves.per_sample_s[place[pair[0].name]])
    count = sum(number for _, number in pairs)
    share, left = divmod(total, count)
    if share < 1:
        return None
    slowest = 0.0
    for device, number in pairs:
        kind = place[device.name]
        size = share + (left > 0)
        left -= min(left, number)
        if size > int(curves.limits[kind]):
            return None
        slowest = max(slowest, seconds_of(curves, Row(kind=kind, devices=number, size=size)))
    return slowest if finish is None else finish(slowest, count)


def _limits_text(problem: Problem, known: list[StepCurve]) -> str:
    shown = [
        f"{device.count} {device.name} of at most {'any number' if curve.memory_limit is None else curve.memory_limit}"
        for device, curve in zip(problem.devices, known, strict=True)
    ]
    return ", ".join(shown)
