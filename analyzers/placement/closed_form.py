"""The optimum without a solver, where one is known: the smallest step time that leaves room for every EST.

In a step of T seconds a device of capability C runs ``floor(C T)`` ESTs, so the best T is the smallest of the
numbers ``k / C_i`` with ``sum_i N_i floor(C_i T) >= maxP`` (follows from EasyScale, Equation 1). With at most D devices
the roomiest D count. Prices are not covered.
"""

from __future__ import annotations

from fractions import Fraction

from ddltool.analyzers.placement.problem import DeviceType, Problem
from ddltool.errors import Infeasible, InputError


def best_step_time(problem: Problem) -> Fraction:
    """Return the smallest step time in seconds, exactly. O(types x log(maxP)) per candidate search.

    A throughput that is asked for plays no part. Raises InputError for a problem with a price limit, Infeasible when the
    devices have no room for every EST.
    """
    if problem.max_price_micro is not None:
        raise InputError("max_price_per_hour", "has no closed form", "use solve_est")
    groups = [(device,) for device in problem.devices] if problem.single_type else [problem.devices]
    found = [_best_of(group, problem.max_workers, problem.max_devices) for group in groups]
    steps = [step for step in found if step is not None]
    if not steps:
        raise Infeasible(f"the offered devices have no room for {problem.max_workers} workers")
    return min(steps)


def capacity(devices: tuple[DeviceType, ...], step_s: Fraction, max_devices: int | None) -> int:
    """Return how many ESTs fit into a step of ``step_s`` seconds on at most ``max_devices`` of the devices."""
    room = sorted(((_room(device, step_s), device.count) for device in devices), reverse=True)
    left = sum(count for _, count in room) if max_devices is None else max_devices
    total = 0
    for each, count in room:
        used = min(count, left)
        total += each * used
        left -= used
    return total


def _room(device: DeviceType, step_s: Fraction) -> int:
    room = int(device.capability_per_s * step_s)
    return room if device.most_ests is None else min(room, device.most_ests)


def _best_of(devices: tuple[DeviceType, ...], workers: int, max_devices: int | None) -> Fraction | None:
    """Return the smallest feasible k / C_i: for each type, the smallest k by bisection (room grows with T).

    None: no step is long enough. Without limits, all workers on one device of a type always fit in T = workers / C.
    """
    best: Fraction | None = None
    for device in devices:
        low, high = 1, workers if device.most_ests is None else min(workers, device.most_ests)
        if capacity(devices, high / device.capability_per_s, max_devices) < workers:
            continue
        while low < high:
            middle = (low + high) // 2
            if capacity(devices, middle / device.capability_per_s, max_devices) >= workers:
                high = middle
            else:
                low = middle + 1
        candidate = low / device.capability_per_s
        best = candidate if best is None else min(best, candidate)
    return best
