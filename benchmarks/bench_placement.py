"""EST plans with CP-SAT beside the closed form of the same run: device types x devices x logical workers.

Step times must be equal where a closed form exists (no price limit); the program ends with an error where they differ
or where a plan is not proven optimal. ``solve`` and ``closed form`` are the median and the largest of ``--repeat``
runs, ``top 5`` is one run with four alternatives. ``--options`` prints another table: 10,000 devices of eight types with
all constraints, alone and together, under five orders of objectives.
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

from ddltool.analyzers.job.placement.est import solve_est
from ddltool.analyzers.job.placement.problem import DeviceType, Problem
from ddltool.analyzers.job.placement.steps import best_step
from ddltool.errors import Infeasible

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
        if plan.iteration_s != float(best_step(problem)):
            sys.exit(f"{text} step {plan.iteration_s} s, closed form {float(best_step(problem))} s")
        closed = "{:8.4f} /{:8.4f}".format(*seconds(lambda: best_step(problem), repeat))
    if plan.status != "optimal":
        sys.exit(f"{text} {plan.status}, gap {plan.gap}")
    solve = "{:8.4f} /{:8.4f}".format(*seconds(lambda: solve_est(problem), repeat))
    top, _ = seconds(lambda: solve_est(problem, top_k=5), 1)
    return f"{text} {plan.world_size:8,d} {plan.throughput:10.1f}  {solve}  {closed}  {top:8.4f}"


def constrained(workers: int) -> dict[str, Problem]:
    """Return the problems of the table of options."""
    free = make(8, 10_000, workers, "none")
    budget = sum(device.count * (device.price_micro or 0) for device in free.devices)
    rate = Fraction(solve_est(free).throughput)
    few = tuple(replace(device, max_ests=40, memory_ests=50) for device in free.devices)
    return {
        "none": free,
        "max_price_per_hour": replace(free, max_price_micro=budget // 7),
        "max_devices": replace(free, max_devices=1_428),
        "homogeneous": replace(free, single_type=True),
        "min_throughput": replace(free, min_throughput=rate / 3),
        "memory": replace(free, devices=tuple(replace(device, memory_ests=7) for device in free.devices)),
        "all but homogeneous": replace(
            free, devices=few, max_price_micro=budget // 3, max_devices=4_000, min_throughput=rate / 20
        ),
        "none possible": replace(free, max_price_micro=budget // 50, max_devices=400, min_throughput=rate / 2),
    }


def options() -> None:
    """Print the largest and the mean CPU time over the orders of objectives, five plans each, for every constraint."""
    orders = (
        ("throughput",),
        ("throughput", "devices", "price", "waste"),
        ("throughput", "price"),
        ("price", "throughput"),
        ("devices", "throughput"),
    )
    print("workers  constraints          plans  optimal  CPU s: mean  largest")
    for workers in (1_000, 5_000, 50_000):
        for name, problem in constrained(workers).items():
            plans, proven, taken = 0, 0, []
            for order in orders:
                started = time.process_time()
                try:
                    made = solve_est(problem, top_k=5, objective=order)
                    plans, proven = plans + 1 + len(made.alternatives), proven + (made.status == "optimal")
                except Infeasible:
                    proven += 1
                taken.append(time.process_time() - started)
            text = f"{workers:7,d}  {name:20s} {plans:5d} {proven:6d}/{len(orders)}"
            print(f"{text} {statistics.mean(taken):12.2f} {max(taken):8.2f}", flush=True)
            if proven < len(orders):
                sys.exit("a plan is not proven")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--options", action="store_true")
    given = parser.parse_args()
    if given.options:
        options()
        return
    repeat = given.repeat
    print("types  devices  workers  limit            used mini-b./s  solve: median/max  closed: median/max     top 5")
    for types, devices in SIZES:
        for workers in WORKERS:
            for limit in LIMITS:
                print(row(make(types, devices, workers, limit), limit, repeat), flush=True)


if __name__ == "__main__":
    main()
