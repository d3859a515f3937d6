"""What one would do otherwise: bulk-synchronous training with the batch split equally over all devices."""

from __future__ import annotations

import time
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING

from ddltool.analyzers.placement.problem import DeviceType, Problem, check_affordable
from ddltool.errors import Infeasible
from ddltool.graph import natural_key
from ddltool.plan import Assignment, Plan

if TYPE_CHECKING:
    from ddltool.analyzers.balancing.plan import StepCurve


def plan_bsp(problem: Problem, curves: Mapping[str, StepCurve] | None = None) -> Plan:
    """Return the equal split: every device is one replica; samples that do not divide go to the fastest devices.

    A step takes as long as the slowest share: ``max x_i / (batch_size C_i)`` seconds, the same figure f as for ESTs
    (EasyScale, Equation 1b) with ``A_i = x_i / batch_size``. Where a constraint excludes devices, the fastest are kept,
    each type as far as devices and money go; with a single type, the one whose kept devices have the most capability
    in all. Each device gets a sample at least. A type in ``curves`` takes the time that its curve gives for its share,
    launch and saturation included. Raises Infeasible when no device can be afforded, or a share does not fit into a
    device's memory.
    """
    started = time.perf_counter()
    check_affordable(problem)
    chosen = choose_devices(problem)
    rows = _split(chosen, problem.max_workers * problem.batch_size)
    times = [_share_s(problem, device, samples, (curves or {}).get(device.name)) for device, _, samples in rows]
    step = max(times)
    throughput = problem.max_workers / step
    # By the same times as the step: what each device makes with its own samples, were it not to wait.
    capability = sum(
        Fraction(count * samples, problem.batch_size) / seconds
        for (_, count, samples), seconds in zip(rows, times, strict=True)
        if seconds
    )
    return Plan(
        job=problem.job,
        strategy="bsp",
        max_workers=problem.max_workers,
        batch_size=problem.batch_size,
        iteration_s=float(step),
        throughput=float(throughput),
        assignments=[
            Assignment(
                device_type=device.name,
                devices=count,
                ests_per_device=0,
                local_batch_size=samples,
                compute_s=float(seconds),
            )
            for (device, count, samples), seconds in sorted(
                zip(rows, times, strict=True), key=lambda pair: (natural_key(pair[0][0].name), -pair[0][2])
            )
        ],
        est_count=0,
        waste=max(0.0, float(capability - throughput)),
        overload_factor=float(step),
        status="optimal",
        gap=0.0,
        solve_seconds=time.perf_counter() - started,
    )


def _share_s(problem: Problem, device: DeviceType, samples: int, curve: StepCurve | None) -> Fraction:
    """Return the seconds of one device's share. Raises Infeasible when its memory does not hold it."""
    linear = Fraction(1, problem.batch_size) / device.capability_per_s
    if curve is None:
        return samples * linear
    if curve.memory_limit is not None and samples > curve.memory_limit:
        raise Infeasible(f"an equal split gives each {device.name} {samples} samples, and {curve.memory_limit} fit")
    each = linear if curve.per_sample_s is None else Fraction(curve.per_sample_s)
    return Fraction(curve.launch_s) + each * max(samples, curve.saturation)


def choose_devices(problem: Problem) -> list[tuple[DeviceType, int]]:
    """Return the types with how many devices of each are kept, fastest first."""
    if not problem.single_type:
        return _keep(problem, problem.devices)
    kept = [_keep(problem, (device,)) for device in problem.devices]
    return max((pairs for pairs in kept if pairs), key=lambda pairs: pairs[0][0].capability_per_s * pairs[0][1])


def _keep(problem: Problem, devices: tuple[DeviceType, ...]) -> list[tuple[DeviceType, int]]:
    left = problem.max_workers * problem.batch_size
    left = left if problem.max_devices is None else min(left, problem.max_devices)
    money = problem.max_price_micro
    kept: list[tuple[DeviceType, int]] = []
    for device in sorted(devices, key=lambda device: -device.capability_per_s):  # stable: equal ones stay in name order
        count = min(device.count, left)
        if money is not None and device.price_micro:
            count = min(count, money // device.price_micro)
            money -= count * device.price_micro
        left -= count
        if count:
            kept.append((device, count))
    return kept


def _split(chosen: list[tuple[DeviceType, int]], samples: int) -> list[tuple[DeviceType, int, int]]:
    """Return rows (type, devices, samples on each) of an equal split; the first devices take what is left over."""
    share, left = divmod(samples, sum(count for _, count in chosen))
    rows: list[tuple[DeviceType, int, int]] = []
    for device, count in chosen:
        more = min(left, count)
        left -= more
        rows += [(device, number, size) for number, size in ((more, share + 1), (count - more, share)) if number]
    return rows
