"""EST plans with CP-SAT beside the closed form of the same run: device types x devices x logical workers.

Step times must be equal where a closed form exists (no price limit); the program ends with an error where they differ
or where a plan is not proven optimal. ``solve`` and ``closed form`` are the median and the largest of ``--repeat``
runs, ``top 5`` is one run with four alternatives.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from random import Random

from ddltool.analyzers.placement.closed_form import best_step_time
from ddltool.analyzers.placement.est import solve_est
from ddltool.analyzers.placement.problem import DeviceType, Problem

SIZES = ((1, 64), (3, 64), (3, 1_000), (8, 1_000), (8, 10_000), (32, 10_000))
WORKERS = (8, 1_000, 50_000)
LIMITS = ("none", "max_devices", "single_type", "price")


def make(types: int, devices: int, workers: int, limit: str) -> Problem:
    """Return a problem with measured capabilities (17 digits, 0.5 to 20 per second) and prices that grow with them."""
    random = Random(types)
    offers = []
    for number in range(types):
        rate = 1 / random.uniform(0.05, 2.0)
        count = devices // types + (number < devices % types)
        price = int(rate * random.uniform(0.2, 0.4) * 10**6)
        offers.append(
            DeviceType(name=f"t{number}", count=count, capability_per_s=Fraction(repr(rate)), price_micro=price)
        )
    problem = Problem(job="bench", max_workers=workers, batch_size=32, devices=tuple(offers))
    total = sum(device.count * (device.price_micro or 0) for device in offers)
    changes = {
        "none": {},
        "max_devices": {"max_devices": max(1, devices // 7)},
        "single_type": {"single_type": True},
        "price": {"max_price_micro": max(total // 7, *(device.price_micro or 0 for device in offers), 1)},
    }
    return replace(problem, **changes[limit])


def seconds(call: Callable[[], object], repeat: int) -> tuple[float, float]:
    """Return the median and the largest of the wall times of ``repeat`` calls."""
    taken = []
    for _ in range(repeat):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken), max(taken)


def row(problem: Problem, limit: str, repeat: int) -> str:
    """Return one line of the table; ends the program when a plan is not the proven best."""
    plan = solve_est(problem)
    devices = sum(device.count for device in problem.devices)
    text = f"{len(problem.devices):5d} {devices:8,d} {problem.max_workers:8,d}  {limit:12s}"
    closed = f"{'':>18s}"
    if limit != "price":
        if plan.iteration_s != float(best_step_time(problem)):
            sys.exit(f"{text} step {plan.iteration_s} s, closed form {float(best_step_time(problem))} s")
        closed = "{:8.4f} /{:8.4f}".format(*seconds(lambda: best_step_time(problem), repeat))
    if plan.status != "optimal":
        sys.exit(f"{text} {plan.status}, gap {plan.gap}")
    solve = "{:8.4f} /{:8.4f}".format(*seconds(lambda: solve_est(problem), repeat))
    top, _ = seconds(lambda: solve_est(problem, top_k=5), 1)
    return f"{text} {plan.world_size:8,d} {plan.throughput:10.1f}  {solve}  {closed}  {top:8.4f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    print("types  devices  workers  limit            used mini-b./s  solve: median/max  closed: median/max     top 5")
    for types, devices in SIZES:
        for workers in WORKERS:
            for limit in LIMITS:
                print(row(make(types, devices, workers, limit), limit, repeat), flush=True)


if __name__ == "__main__":
    main()
