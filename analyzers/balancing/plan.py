"""How many samples of the total batch each device takes: equally (BSP), or so that all end together (LB-BSP).

Start at :func:`plan_lb_bsp`; :func:`plan_bsp` is what one would do otherwise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from ddltool.analyzers.balancing.minmax import (
    Chosen,
    DeviceCurves,
    Finish,
    Offer,
    Row,
    choose,
    slowest_of,
    spread,
)
from ddltool.analyzers.goodput.throughput import ThroughputParams, overlapped, sync_time_s
from ddltool.analyzers.placement.problem import Problem, check_affordable, exact
from ddltool.errors import Infeasible, InputError
from ddltool.graph import natural_key
from ddltool.job import DeviceOffer, Job
from ddltool.plans import Assignment, BatchSplit, Plan, Strategy

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


def plan_bsp(problem: Problem, curves: Mapping[str, StepCurve] | None = None) -> Plan:
    """Return bulk-synchronous training with an equal split: every device is one replica.

    Samples that do not divide go to the fastest devices. A step takes as long as the slowest share: ``max x_i /
    (batch_size C_i)`` seconds, the same figure f as for ESTs (EasyScale, Equation 1b) with ``A_i = x_i / batch_size``, or
    what a type's entry of ``curves`` gives, launch and saturation included. Where a constraint excludes devices, the fastest
    are kept, each type as far as devices and money go; with a single type, the one whose kept devices have the most
    capability in all. Each device gets a sample at least. Raises Infeasible when no device can be afforded, or a share does
    not fit into a device's memory.
    """
    started = time.perf_counter()
    check_affordable(problem)
    known = _device_curves(problem, curves, accumulate=False)
    rows = _equal_rows(problem, problem.max_workers * problem.batch_size)
    for row in rows:
        if row.size > (fits := int(known.limits[row.kind])):
            name = problem.devices[row.kind].name
            raise Infeasible(f"an equal split gives each {name} {row.size} samples, and {fits} fit")
    step = slowest_of(known, rows)
    return _plan(problem, "bsp", known, rows, step, time.perf_counter() - started)


def plan_lb_bsp(problem: Problem, curves: Mapping[str, StepCurve] | None = None, *, synchronise: bool = True) -> Plan:
    """Return the split of ``max_workers * batch_size`` samples with the shortest step, over all subsets of the devices.

    Devices, as many of each type as the limits of devices, money and types allow, and sizes are chosen together, exactly
    (:mod:`~.minmax`). A type's time is its entry of ``curves``, or ``x / (batch_size C)`` from its
    capability. Where the devices' memory does not hold the batch at once, each makes its samples in as few and as equal
    passes as fit (gradient accumulation). With ``synchronise`` and a fitted model in ``curves`` the step is
    ``(compute^gamma + sync^gamma)^(1/gamma)`` (Pollux, section 3.2) with the slowest type's synchronisation time on that
    number of devices, and their sum under accumulation. A device is left out only where the step is shorter without it.

    Raises Infeasible when no device can be afforded or none holds a sample, InputError above 10^12 samples.
    """
    started = time.perf_counter()
    check_affordable(problem)
    total = checked_total(problem.max_workers, problem.batch_size, "batch_size")
    given = [(curves or {}).get(device.name, StepCurve()) for device in problem.devices]
    prices = tuple(device.price_micro or 0 for device in problem.devices)
    offer = Offer(
        counts=tuple(device.count for device in problem.devices),
        max_devices=problem.max_devices,
        prices=None if problem.max_price_micro is None else prices,
        budget=problem.max_price_micro or 0,
        single_type=problem.single_type,
    )
    finish = _finish(given, False) if synchronise else None
    made = _device_curves(problem, curves, accumulate=False)
    best = choose(made, offer, total, finish)
    parts = _device_curves(problem, curves, accumulate=True)
    finish_parts = _finish(given, True) if synchronise else None
    binds = any(curve.memory_limit is not None and curve.memory_limit < total for curve in given)
    accumulated = choose(parts, offer, total, finish_parts) if binds else None
    equal = _equal_rows(problem, total)
    equal_s = None
    if best is not None and all(row.size <= int(made.limits[row.kind]) for row in equal):
        equal_s = _step_s(made, equal, finish)
    shorter = None
    if best is None:
        made, best, finish = parts, accumulated, finish_parts
    elif accumulated is not None and accumulated.iteration_s < best.iteration_s:
        shorter = accumulated.iteration_s
    if best is None:
        raise Infeasible(f"no device holds a single sample: {_limits_text(problem, given)}")
    plan = _plan(problem, "lb-bsp", made, best.rows, best.iteration_s, time.perf_counter() - started)
    numbers, kept_s = _all_kept(problem, made, best, total, finish)
    left_out = zip(problem.devices, numbers, best.numbers, strict=True)
    record = BatchSplit(
        total_batch_size=total,
        equal_s=equal_s,
        kept_s=kept_s,
        idle_s=sum(row.devices * (best.slowest_s - slowest_of(made, [row])) for row in best.rows),
        dropped={device.name: keeping - used for device, keeping, used in left_out if keeping > used},
        accumulated_s=shorter,
    )
    communication_s = None if finish is None else max(0.0, best.iteration_s - best.slowest_s)
    update = {"split": record, "communication_s": communication_s, "overload_factor": best.slowest_s}
    return plan.model_copy(update=update)


def checked_total(workers: int, batch_size: int, where: str) -> int:
    """Return ``workers * batch_size``. Raises InputError at ``where`` above :data:`MOST_SAMPLES`."""
    if (total := workers * batch_size) > MOST_SAMPLES:
        problem = f"is {batch_size}, which makes {total} samples a step for {workers} workers"
        raise InputError(where, problem, f"at most {MOST_SAMPLES // workers} (10^12 samples in all)")
    return total


def _plan(
    problem: Problem, strategy: Strategy, curves: DeviceCurves, rows: Sequence[Row], step_s: float, seconds: float
) -> Plan:
    """Return the record. Waste is what the devices' own speeds at their sizes make beyond the throughput."""
    names = [device.name for device in problem.devices]
    took = {row: slowest_of(curves, [row]) for row in rows}
    capability = sum(row.devices * row.size / each / problem.batch_size for row, each in took.items() if each)
    assignments = [
        Assignment(
            device_type=names[row.kind],
            devices=row.devices,
            ests_per_device=0,
            local_batch_size=row.size,
            accumulation_steps=_passes(curves, row) - 1,
            compute_s=took[row],
        )
        for row in sorted(rows, key=lambda row: (natural_key(names[row.kind]), -row.size))
    ]
    waste = max(0.0, capability - problem.max_workers / step_s)
    return problem.plan(strategy, step_s, assignments, waste=waste, solve_seconds=seconds)


def _device_curves(problem: Problem, curves: Mapping[str, StepCurve] | None, *, accumulate: bool) -> DeviceCurves:
    """Return the types' curves; without a time per sample a batch takes what the capability says."""
    known = [(device, (curves or {}).get(device.name, StepCurve())) for device in problem.devices]
    return DeviceCurves.of(
        launch_s=[curve.launch_s for _, curve in known],
        per_sample_s=[
            float(1 / (device.capability_per_s * max(problem.batch_size, curve.saturation)))
            if curve.per_sample_s is None
            else curve.per_sample_s
            for device, curve in known
        ],
        saturation=[float(curve.saturation) for _, curve in known],
        memory_limit=[_UNLIMITED if curve.memory_limit is None else curve.memory_limit for _, curve in known],
        accumulate=accumulate,
    )


def _finish(known: Sequence[StepCurve], accumulating: bool) -> Finish | None:
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


def _step_s(curves: DeviceCurves, rows: Sequence[Row], finish: Finish | None) -> float:
    slowest = slowest_of(curves, rows)
    return slowest if finish is None else finish(slowest, sum(row.devices for row in rows))


def _equal_rows(problem: Problem, total: int) -> list[Row]:
    """Return the equal split over the devices that BSP uses; the fastest take what is left over."""
    order, speeds = problem.fastest_first, [device.capability_per_s for device in problem.devices]
    kept = [problem.filled(kinds, total) for kinds in ([[kind] for kind in order] if problem.single_type else [order])]
    numbers = max(kept, key=lambda counts: sum(count * speed for count, speed in zip(counts, speeds, strict=True)))
    return equal_rows({kind: numbers[kind] for kind in order}, total)


def equal_rows(numbers: Mapping[int, int], total: int) -> list[Row]:
    """Return an equal split over so many devices of each type; the first ones take what is left over."""
    share, left = divmod(total, sum(numbers.values()))
    rows: list[Row] = []
    for kind, number in numbers.items():
        more = min(left, number)
        left -= more
        sizes = ((more, share + 1), (number - more, share))
        rows += [Row(kind=kind, devices=devices, size=size) for devices, size in sizes if devices]
    return rows


def _all_kept(
    problem: Problem, curves: DeviceCurves, best: Chosen, total: int, finish: Finish | None
) -> tuple[list[int], float | None]:
    """Return the devices that could take part beside those that do, fastest first, and the step with all of them."""
    room = [kind for kind in problem.fastest_first if int(curves.limits[kind]) >= 1]
    usable = [kind for kind in room if best.numbers[kind] or not problem.single_type]
    numbers = problem.filled(usable, total, best.numbers)
    if numbers == list(best.numbers):
        return numbers, best.iteration_s
    rows = spread(curves, numbers, total)
    return numbers, None if rows is None else _step_s(curves, rows, finish)


def _limits_text(problem: Problem, known: Sequence[StepCurve]) -> str:
    limits = ["any number" if curve.memory_limit is None else str(curve.memory_limit) for curve in known]
    pairs = zip(problem.devices, limits, strict=True)
    return ", ".join(f"{device.count} {device.name} of at most {limit}" for device, limit in pairs)
