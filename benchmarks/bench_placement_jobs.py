"""EST planning beyond one job: the published planner's choices, proposals, several jobs, the companion database, nodes.

Each part prints one table. The program ends with an error where the exact plan is worse than the published planner's,
where figures of the same thing differ, or where several jobs end more than five percent below their bound. Seconds are
CPU seconds of this process; with ``--parts`` only some parts run.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from random import Random

from ddltool.analyzers.job.goodput.throughput import ThroughputParams
from ddltool.analyzers.job.placement.companion import build
from ddltool.analyzers.job.placement.est import solve_est
from ddltool.analyzers.job.placement.jobs import solve_jobs
from ddltool.analyzers.job.placement.network import solve_on_nodes
from ddltool.analyzers.job.placement.problem import DeviceType, Problem
from ddltool.analyzers.job.placement.proposals import best_throughput, proposals
from ddltool.analyzers.job.placement.steps import best_step
from ddltool.companion import Companion, CompanionDevice, CompanionMeta, write_companion
from ddltool.job import NodeDevices, NodeGroup
from ddltool.results import Sharing

# (maxP, capabilities of V100, P100 and T4, devices of each, what EasyScale's own planner reached).
PUBLISHED = (
    (8, (3.1, 2.4, 1.0), (4, 4, 4), 12.40),
    (16, (3.1, 2.4, 1.0), (4, 4, 4), 16.53),
    (24, (3.9, 1.7, 1.0), (4, 4, 4), 20.40),
    (8, (3.9, 1.7, 1.0), (4, 4, 4), 15.60),
    (16, (3.9, 1.7, 1.0), (8, 4, 4), 31.20),
    (24, (3.1, 2.4, 1.0), (4, 4, 4), 24.00),
)
# Capabilities of the four device types in the problems with several jobs lie in these.
SPANS = ((2, 6), (1.5, 3), (0.8, 1.5), (3, 9))


def make(name: str, capabilities: Sequence[float], counts: Sequence[int], workers: int) -> Problem:
    """Return a problem without constraints."""
    devices = tuple(
        DeviceType(name=f"t{place}", count=count, capability_per_s=Fraction(repr(float(rate))))
        for place, (rate, count) in enumerate(zip(capabilities, counts, strict=True))
    )
    return Problem(job=name, max_workers=workers, batch_size=32, devices=devices)


def proportional(capabilities: Sequence[float], counts: Sequence[int], workers: int) -> float:
    """Return the best throughput of plans that keep all devices of a type alike and ESTs in proportion to capability.

    A reading of EasyScale, section 3.4: ``A_i`` is m times the capability relative to the slowest type, rounded to the
    nearest whole number, the same on every device of the type, for any numbers of devices with at least maxP places; or
    devices of one type share the ESTs evenly. Throughput is by Equation 1: ``maxP / f``.
    """
    slowest = min(capabilities)
    best = 0.0
    for rate, count in zip(capabilities, counts, strict=True):
        for number in range(1, min(count, workers) + 1):
            best = max(best, workers / (math.ceil(workers / number) / rate))
    for multiple in range(1, workers + 1):
        ests = [max(1, round(multiple * rate / slowest)) for rate in capabilities]
        for used in itertools.product(*(range(count + 1) for count in counts)):
            if sum(number * each for number, each in zip(used, ests, strict=True)) >= workers:
                chosen = [place for place, number in enumerate(used) if number]
                best = max(best, workers / max(ests[place] / capabilities[place] for place in chosen))
    return best


def published() -> None:
    """Print the published planner's six cases."""
    print("maxP  capability     devices   published  proportional  optimum   gain")
    for workers, capabilities, counts, told in PUBLISHED:
        problem = make("j", capabilities, counts, workers)
        exact = solve_est(problem).throughput
        read = proportional(capabilities, counts, workers)
        found = best_throughput(
            dict(zip("abc", capabilities, strict=True)), dict(zip("abc", counts, strict=True)), workers
        )
        if exact != found or exact != float(workers / best_step(problem)):
            sys.exit(f"the solver says {exact}, the closed forms {found}")
        if exact < max(told, read) - 0.005:
            sys.exit(f"{exact} is worse than {told} or {read}")
        rates, offered = " ".join(f"{rate:g}" for rate in capabilities), " ".join(map(str, counts))
        print(f"{workers:4d}  {rates:13s}  {offered:8s} {told:9.2f} {read:13.2f} {exact:8.2f} {exact / told - 1:6.1%}")
    random, better, worse = Random(0), 0, 0.0
    for _ in range(200):
        capabilities = [round(random.uniform(0.5, 6), 1) for _ in range(3)]
        counts, workers = [random.randint(0, 4) + 1 for _ in range(3)], random.choice([4, 8, 12])
        exact, read = (
            solve_est(make("j", capabilities, counts, workers)).throughput,
            proportional(capabilities, counts, workers),
        )
        if exact < read - 1e-9:
            sys.exit(f"{exact} is worse than {read}: {capabilities}, {counts}, {workers}")
        better, worse = better + (exact > read + 1e-9), worse + (exact / read - 1)
    print(f"200 random cases: never worse, better in {better}; {worse / 200:.1%} more throughput on average\n")


def microseconds(call: Callable[[], object], repeat: int) -> float:
    """Return the CPU time of one call, in microseconds."""
    call()
    started = time.process_time()
    for _ in range(repeat):
        call()
    return (time.process_time() - started) / repeat * 1e6


def roles() -> None:
    """Print the times of best plans and proposals."""
    print("types  devices   maxP  best us  proposals us (all free, top 3)")
    for types, devices, workers in ((3, 12, 16), (3, 64, 64), (8, 1_000, 256), (8, 10_000, 50_000)):
        capability = {f"t{place}": 1 / (0.1 + 0.17 * place) for place in range(types)}
        held = dict.fromkeys(capability, devices // types)
        free = dict.fromkeys(capability, min(16, devices // types))
        plan = microseconds(partial(best_throughput, capability, held, workers), 200)
        more = microseconds(partial(proposals, capability, held, free, workers, 3, False), 10)
        print(f"{types:5d} {devices:8,d} {workers:6,d} {plan:13.0f} {more:13.0f}")
    print()


def limited(problem: Problem, random: Random) -> Problem:
    """Return the problem with one of: a single type, few devices, a budget, few ESTs on a device, or as it is."""
    kind = random.randrange(5)
    if kind == 0:
        return replace(problem, single_type=True)
    if kind == 1:
        return replace(problem, max_devices=random.choice([4, 8, 16]))
    if kind == 2:
        dear = tuple(replace(each, price_micro=int(each.capability_per_s * 300_000)) for each in problem.devices)
        return replace(problem, devices=dear, max_price_micro=20_000_000)
    few = tuple(replace(each, max_ests=random.choice([2, 4])) for each in problem.devices)
    return replace(problem, devices=few) if kind == 3 else problem


def jobs() -> None:
    """Print several jobs at once: small ones, one with limits on the jobs, one with thousands of ESTs each."""
    print("jobs devices  ESTs          rule      value   bound    gap waiting wall s CPU s")
    small, large = (4, 8, 16, 32, 64), (1_000, 5_000, 50_000)
    cases = [(number, devices, small, False) for number, devices in ((8, 64), (64, 256), (64, 1_024), (256, 1_024))]
    for number, devices, workers, limits in (*cases, (64, 1_024, small, True), (64, 1_024, large, False)):
        random = Random(number)
        each = devices // 4
        problems = []
        for place in range(number):
            rates = [round(random.uniform(*span), 2) for span in SPANS]
            problem = make(f"j{place}", rates, [each] * 4, random.choice(workers))
            problems.append(limited(problem, random) if limits else problem)
        rules: tuple[Sharing, ...] = ("sum", "max-min")
        for rule in rules:
            started, used = time.perf_counter(), time.process_time()
            made = solve_jobs(problems, {f"t{place}": each for place in range(4)}, objective=rule, time_limit_s=10)
            seconds, used = time.perf_counter() - started, time.process_time() - used
            waiting = sum(job.plan is None for job in made.jobs)
            shown = f"{workers[0]}-{workers[-1]}" + (", limits" if limits else "")
            print(
                f"{number:4d} {devices:7,d}  {shown:13s} {rule:7s} {made.value:7.3f} {made.bound:7.3f} "
                f"{made.gap:6.2%} {waiting:7d} {seconds:6.1f} {used:5.1f}",
                flush=True,
            )
            if made.gap > 0.05:
                sys.exit("more than five percent below the bound")
    print()


def companion() -> None:
    """Print building and looking up of companion databases."""
    print("devices of each type    maxP    vectors   plans  build s  write s  lookup us  file KiB")
    for counts, workers in (((32, 16, 16), 32), ((64, 64, 64), 64), ((32, 32, 32, 32), 32)):
        devices = [
            CompanionDevice(type=f"t{place}", count=count, capability_per_s=rate)
            for place, (count, rate) in enumerate(zip(counts, (3.1, 2.4, 1.0, 1.7), strict=False))
        ]
        meta = CompanionMeta(job="j", max_workers=workers, batch_size=32, devices=devices)
        started = time.process_time()
        plans, places = build(meta)
        middle = time.process_time()
        random = Random(0)
        asked = [tuple(random.randint(0, count) for count in counts) for _ in range(5_000)]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "plans.db"
            write_companion(file, meta, plans, enumerate(places.tolist()))
            done = time.process_time()
            with Companion(file) as base:
                for counts_asked in asked:
                    base.lookup(counts_asked)
                looked = (time.process_time() - done) / len(asked) * 1e6
            size = file.stat().st_size / 1024
        shown = " ".join(map(str, counts))
        print(
            f"{shown:20s} {workers:7,d} {len(places):10,d} {len(plans):7,d} {middle - started:8.2f} "
            f"{done - middle:8.2f} {looked:10.0f} {size:9,.0f}"
        )
    print()


def nodes() -> None:
    """Print plans on nodes under faster and slower networks."""
    print("sync s per device  choice         devices  nodes  step ms  CPU s")
    problem = make("j", [4 - 0.3 * place for place in range(8)], [1_250] * 8, 5_000)
    shapes = [NodeGroup(name="n", count=157, devices=NodeDevices(type=f"t{place}", count=8)) for place in range(8)]
    for growth in (0.0, 1e-5, 1e-4, 1e-3, 1e-1, 10.0, 1000.0):
        params = ThroughputParams(
            alpha_grad_s=0, beta_grad_s=0, alpha_sync_local_s=growth / 10, beta_sync_local_s=growth / 10,
            alpha_sync_node_s=growth, beta_sync_node_s=growth, gamma=1.5,
        )  # fmt: skip
        started = time.process_time()
        made = solve_on_nodes(problem, shapes, params)
        seconds = time.process_time() - started
        if made.network is None or made.status != "optimal":
            sys.exit(f"{made.status}, gap {made.gap}")
        print(
            f"{growth:17g}  {made.network.choice:13s} {made.world_size:8,d} {made.network.num_nodes:6,d} "
            f"{made.iteration_s * 1e3:8,.0f} {seconds:6.2f}"
        )


PARTS = {"published": published, "roles": roles, "jobs": jobs, "companion": companion, "nodes": nodes}


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    for part in parser.parse_args().parts:
        PARTS[part]()


if __name__ == "__main__":
    main()
