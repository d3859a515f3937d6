"""ElasticBSP as a plan: how many iterations each device makes until the barrier, and what that gains over BSP.

Every device is one worker with a logical mini-batch of its own per iteration, so worker p's predicted ends are
``k / C_p``. Of the barriers among the next R of them (ElasticBSP, section IV) the plan takes the one that makes most
mini-batches per second: with speeds known, the least waiting per unit of time, where ZipLine takes the least waiting of
one superstep. All supersteps are alike, because all workers start together after each barrier.
Start at :func:`plan_elastic_bsp`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from fractions import Fraction

from ddltool.analyzers.placement.bsp import choose_devices
from ddltool.analyzers.placement.problem import Problem, check_affordable
from ddltool.errors import InputError
from ddltool.graph import natural_key
from ddltool.plan import Assignment, Plan, Superstep

DEFAULT_LOOKAHEAD = 15


def plan_elastic_bsp(problem: Problem, *, lookahead: int = DEFAULT_LOOKAHEAD, max_gap: int | None = None) -> Plan:
    """Return the plan with a barrier among each worker's next ``lookahead`` iterations.

    ``max_gap`` bounds the iterations by which one worker may be ahead of another. Devices are chosen as for BSP; at most
    ``max_workers`` of them, as each makes a logical mini-batch at a time. Synchronisation itself is left out, as in all
    plans. Raises Infeasible when no device can be afforded.
    """
    started = time.perf_counter()
    check_affordable(problem)
    chosen = choose_devices(problem)
    left = problem.max_workers
    rows = []
    for device, count in chosen:
        used = min(count, left)
        left -= used
        if used:
            rows.append((device, used))
    barrier, iterations = best_superstep(
        [(device.capability_per_s, count) for device, count in rows], lookahead, max_gap
    )
    made = sum(k * count for k, (_, count) in zip(iterations, rows, strict=True))
    throughput = float(made / barrier)
    waits = [barrier - k / device.capability_per_s for k, (device, _) in zip(iterations, rows, strict=True)]
    capability = float(sum(device.capability_per_s * count for device, count in rows))
    assignments = [
        Assignment(device_type=device.name, devices=count, ests_per_device=0, local_batch_size=problem.batch_size)
        for device, count in sorted(rows, key=lambda row: natural_key(row[0].name))
    ]
    return Plan(
        job=problem.job,
        strategy="elastic-bsp",
        max_workers=problem.max_workers,
        batch_size=problem.batch_size,
        iteration_s=problem.max_workers / throughput,
        throughput=throughput,
        assignments=assignments,
        est_count=0,
        waste=max(0.0, capability - throughput),
        overload_factor=problem.max_workers / throughput,
        status="optimal",
        gap=0.0,
        solve_seconds=time.perf_counter() - started,
        superstep=Superstep(
            lookahead=lookahead,
            superstep_s=float(barrier),
            iterations={device.name: k for (device, _), k in zip(rows, iterations, strict=True)},
            mini_batches=made,
            waiting_s=float(max(waits)),
            total_waiting_s=float(sum(wait * count for wait, (_, count) in zip(waits, rows, strict=True))),
            iteration_gap=max(iterations) - min(iterations),
        ),
    )


def best_superstep(
    workers: Sequence[tuple[Fraction, int]], lookahead: int, max_gap: int | None = None
) -> tuple[Fraction, list[int]]:
    """Return (barrier in seconds, iterations per entry) of the superstep that makes most mini-batches per second.

    ``workers``: (iterations per second, how many such workers). Every worker makes 1 to ``lookahead`` iterations, at most
    ``max_gap`` more than any other. The first of equal ones wins. O(n^2 R) exact, n entries. Raises InputError for a
    lookahead below 1 or a negative gap.
    """
    if lookahead < 1 or (max_gap is not None and max_gap < 0):
        raise InputError(
            "--lookahead", f"{lookahead} with a gap of {max_gap}", "look 1 iteration ahead or more, gap >= 0"
        )
    best: tuple[Fraction, Fraction, list[int]] | None = None
    for at in sorted({k / speed for speed, _ in workers for k in range(1, lookahead + 1)}):
        iterations = [min(lookahead, int(at * speed)) for speed, _ in workers]
        if min(iterations) < 1:
            continue
        if max_gap is not None:
            iterations = [min(k, min(iterations) + max_gap) for k in iterations]
        rate = sum(k * count for k, (_, count) in zip(iterations, workers, strict=True)) / at
        if best is None or rate > best[0]:
            best = (rate, at, iterations)
    assert best is not None  # the slowest worker's first end is a candidate
    return best[1], best[2]
