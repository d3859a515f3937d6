"""What one would do otherwise: bulk-synchronous training with the batch split equally over all devices."""

from __future__ import annotations

import time
from fractions import Fraction

from ddltool.analyzers.placement.problem import DeviceType, Problem
from ddltool.errors import Infeasible
from ddltool.graph import natural_key
from ddltool.plan import Assignment, Plan


def plan_bsp(problem: Problem) -> Plan:
    """Return the equal split: every device is one replica; samples that do not divide go to the fastest devices.

    Of devices that a constraint excludes, the slowest are left out first; with a single type, the one with the most
    capability in all. A step takes as long as the slowest share: ``max x_i / (batch_size C_i)`` seconds.
    """
    started = time.perf_counter()
    chosen = _choose(problem)
    total = problem.max_workers * problem.batch_size
    share, rest = divmod(total, len(chosen))
    rows: dict[tuple[str, int], int] = {}
    for place, device in enumerate(chosen):
        key = (device.name, share + (1 if place < rest else 0))
        rows[key] = rows.get(key, 0) + 1
    capability = {device.name: device.capability_per_s for device in chosen}
    step = max(Fraction(samples, problem.batch_size) / capability[name] for name, samples in rows)
    throughput = problem.max_workers / step
    assignments = [
        Assignment(device_type=name, devices=count, ests_per_device=0, local_batch_size=samples)
        for (name, samples), count in sorted(rows.items(), key=lambda row: (natural_key(row[0][0]), -row[0][1]))
    ]
    return Plan(
        job=problem.job,
        strategy="bsp",
        max_workers=problem.max_workers,
        batch_size=problem.batch_size,
        iteration_s=float(step),
        throughput=float(throughput),
        assignments=assignments,
        est_count=0,
        waste=float(sum(device.capability_per_s for device in chosen) - throughput),
        overload_factor=float(step),
        status="optimal",
        gap=0.0,
        solve_seconds=time.perf_counter() - started,
    )


def _choose(problem: Problem) -> list[DeviceType]:
    """Return one entry per used device, fastest first."""
    types = problem.devices
    if problem.single_type:
        types = (max(types, key=lambda device: device.count * device.capability_per_s),)
    pool = [device for device in types for _ in range(device.count)]
    pool.sort(key=lambda device: (-device.capability_per_s, natural_key(device.name)))
    limit = min(problem.max_devices or len(pool), problem.max_workers * problem.batch_size)
    chosen: list[DeviceType] = []
    spent = 0
    for device in pool:
        price = device.price_micro or 0
        affordable = problem.max_price_micro is None or spent + price <= problem.max_price_micro
        if len(chosen) < limit and affordable:
            chosen.append(device)
            spent += price
    if not chosen:
        raise Infeasible("max_price_per_hour: no device is cheap enough")
    return chosen
