"""LB-BSP as a plan: how many samples of the total batch each device takes, so that all end together.

Start at :func:`plan_lb_bsp`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ddltool.analyzers.balancing.curves import DeviceCurves
from ddltool.analyzers.balancing.minmax import drop_advice
from ddltool.analyzers.placement.bsp import choose_devices
from ddltool.analyzers.placement.problem import DeviceType, Problem, check_affordable
from ddltool.graph import natural_key
from ddltool.plan import Assignment, BatchSplit, Plan

_UNLIMITED = 2**31


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCurve:
    """Seconds of a step with x samples on one device: ``launch_s + per_sample_s x``, up to ``memory_limit`` samples."""

    launch_s: float
    per_sample_s: float
    memory_limit: int | None = None


def plan_lb_bsp(problem: Problem, curves: Mapping[str, StepCurve] | None = None) -> Plan:
    """Return the split of ``max_workers * batch_size`` samples with the shortest step, over all subsets of the devices.

    Devices are chosen as for BSP. A type's time is its entry of ``curves``, or ``x / (batch_size C)`` from its capability.
    A device is left out only where the step is shorter without it. Synchronisation is left out, as in all plans. Raises
    Infeasible when the memory limits do not hold the batch, or when no device can be afforded.
    """
    started = time.perf_counter()
    check_affordable(problem)
    known = dict(curves or {})
    devices: list[DeviceType] = [device for device, count in choose_devices(problem) for _ in range(count)]
    given = [known.get(device.name) or _from_capability(device, problem.batch_size) for device in devices]
    made = DeviceCurves.of(
        launch_s=[curve.launch_s for curve in given],
        per_sample_s=[curve.per_sample_s for curve in given],
        memory_limit=[_UNLIMITED if curve.memory_limit is None else curve.memory_limit for curve in given],
    )
    total = problem.max_workers * problem.batch_size
    advice = drop_advice(made, total)
    best = advice.best
    step_s = best.iteration_s
    rows = Counter(
        (device.name, int(size)) for device, size in zip(devices, best.sizes.tolist(), strict=True) if size > 0
    )
    dropped = Counter(devices[int(place)].name for place in advice.dropped)
    throughput = problem.max_workers / step_s
    idle = float(np.sum(step_s - best.seconds[best.sizes > 0]))
    capability = sum(
        float(device.capability_per_s) for device, size in zip(devices, best.sizes.tolist(), strict=True) if size > 0
    )
    return Plan(
        job=problem.job,
        strategy="lb-bsp",
        max_workers=problem.max_workers,
        batch_size=problem.batch_size,
        iteration_s=step_s,
        throughput=throughput,
        assignments=[
            Assignment(device_type=name, devices=count, ests_per_device=0, local_batch_size=size)
            for (name, size), count in sorted(rows.items(), key=lambda row: (natural_key(row[0][0]), -row[0][1]))
        ],
        est_count=0,
        waste=max(0.0, capability - throughput),
        overload_factor=step_s,
        status="optimal",
        gap=0.0,
        solve_seconds=time.perf_counter() - started,
        split=BatchSplit(
            total_batch_size=total,
            equal_s=None if advice.kept is None else _equal_seconds(made, total),
            kept_s=None if advice.kept is None else advice.kept.iteration_s,
            idle_s=idle,
            dropped=dict(sorted(dropped.items())),
        ),
    )


def _from_capability(device: DeviceType, batch_size: int) -> StepCurve:
    return StepCurve(launch_s=0.0, per_sample_s=float(1 / (device.capability_per_s * batch_size)))


def _equal_seconds(curves: DeviceCurves, total: int) -> float | None:
    """Return the step time of the equal split, None where a memory limit forbids it."""
    count = len(curves.limits)
    share, left = divmod(total, count)
    order = np.argsort(curves.per_sample_s, kind="stable")
    sizes = np.full(count, share, dtype=np.int64)
    sizes[order[:left]] += 1
    if (sizes > curves.limits).any() or share < 1:
        return None
    return float(curves.seconds(sizes).max())
