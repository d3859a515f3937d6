"""EST plans found without the planner: the smallest step in fractions, and every choice of devices by dealing."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

from ddltool.analyzers.job.placement.problem import DeviceType, Problem


def closed_form(problem: Problem) -> Fraction | None:
    """The smallest step time in fractions: for each type the smallest k, by bisection, in which the roomiest devices hold
    every EST. Money and a least throughput play no part; None: no step is long enough."""

    def holds(devices: tuple[DeviceType, ...], step: Fraction) -> bool:
        left, total = problem.max_devices or math.inf, 0.0
        for device in sorted(devices, key=lambda device: -problem.est_capacity(device, step)):
            total += problem.est_capacity(device, step) * min(device.count, left)
            left -= min(device.count, left)
        return total >= problem.max_workers

    found = []
    for devices in [(device,) for device in problem.devices] if problem.single_type else [problem.devices]:
        for rate in {device.capability_per_s for device in devices}:
            low, high = 0, problem.max_workers
            if not holds(devices, high / rate):
                continue
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if holds(devices, middle / rate) else (middle, high)
            found.append(high / rate)
    return min(found, default=None)


def choices(case: Problem) -> list[tuple[tuple[int, ...], Fraction, int]]:
    """Every allowed number of devices with its step time and price: ESTs are dealt one by one to who would finish first."""
    found = []
    for counts in itertools.product(*(range(device.count + 1) for device in case.devices)):
        used = [(device, count) for device, count in zip(case.devices, counts, strict=True) if count]
        price = sum((device.price_micro or 0) * count for device, count in used)
        if not used or sum(counts) > min(case.max_workers, case.max_devices or math.inf):
            continue
        if (case.single_type and len(used) > 1) or price > (
            math.inf if case.max_price_micro is None else case.max_price_micro
        ):
            continue
        every = [device for device, count in used for _ in range(count)]
        if sum(device.most_ests or case.max_workers for device in every) < case.max_workers:
            continue
        ests = [1] * len(every)
        for _ in range(case.max_workers - len(every)):
            open_places = [place for place, device in enumerate(every) if ests[place] < (device.most_ests or math.inf)]
            place = min(open_places, key=lambda place: (ests[place] + 1) / every[place].capability_per_s)
            ests[place] += 1
        step = max(number / device.capability_per_s for number, device in zip(ests, every, strict=True))
        if case.min_throughput is None or case.max_workers / step >= case.min_throughput:
            found.append((counts, step, price))
    return found
