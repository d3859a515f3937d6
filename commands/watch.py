"""``ddltool profile SOURCE --watch N``: record worker speeds, CPU and memory for ``ddltool balance``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ddltool.artifacts import check_writable
from ddltool.commands.output import out, print_json, progress, table
from ddltool.commands.profile_measure import RESOLVER
from ddltool.commands.values import as_options
from ddltool.errors import DdlToolError, InputError
from ddltool.graph import natural_key
from ddltool.results import WatchedWorker, WatchResult
from ddltool.runtime.measuring.watch import SpeedRow, WatchLost, WatchRequest, record, write_rows
from ddltool.units import show_seconds

MOST_WORKERS = 256
MOST_ROWS = 10**7
WARM_ITERATIONS = 5
_OPTIONS = {"batch": "--batch-sizes", "workers": "--replicas", "iterations": "--watch", "cores": "--cores"}
"""What a request calls these options in its errors."""


def profile_watch(
    source: str,
    *,
    batch: int,
    workers: int,
    iterations: int,
    cores: str | None,
    seed: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Train ``source`` in ``workers`` local processes in lockstep, write what each did as CSV, and print a summary.

    ``cores`` is a list such as ``0,0,1``: the core that each worker stays on. Raises InputError for what cannot be watched,
    DdlToolError when a worker is lost; what was recorded until then is written all the same.
    """
    if workers > MOST_WORKERS:
        raise InputError("--replicas", f"is {workers}", f"watch at most {MOST_WORKERS} local processes")
    if workers * iterations > MOST_ROWS:
        raise InputError("--watch", f"would make {workers * iterations} rows", f"record at most {MOST_ROWS}")
    if output is not None:
        check_writable(output)
    with as_options(_OPTIONS):
        request = WatchRequest(
            source=source,
            resolver=RESOLVER,
            batch=batch,
            workers=workers,
            iterations=iterations,
            cores=None if cores is None else _cores(cores),
            seed=seed,
        )
    try:
        with progress("watching", iterations) as advance:
            rows = record(request, lambda done: advance(done, f"{done} of {iterations}"))
    except WatchLost as lost:
        raise DdlToolError(f"{source}: {lost}; {_keep(lost.rows, workers, output)}") from None
    if output is not None:
        write_rows(rows, output)
    found = watch_result(rows, request.batch)
    if as_json:
        print_json(found)
    else:
        show_watch(found, output)


def _keep(rows: Sequence[SpeedRow], workers: int, output: Path | None) -> str:
    """Write what was recorded before a worker was lost, and return what to say about it."""
    if not rows:
        return "no iteration was complete, so nothing is written"
    complete = f"the {len(rows) // workers} iterations that all workers completed"
    if output is None:
        return f"{complete} are lost: name a file with -o"
    write_rows(rows, output)
    return f"{complete} are in {output}"


def _cores(text: str) -> tuple[int, ...]:
    """Return the numbers in ``0,0,1``. Raises InputError for anything that is no whole number of at least 0."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) <= 6 for part in parts):
        raise InputError("--cores", f"{text!r} is not a list of cores", "write for example 0,0,1")
    return tuple(int(part) for part in parts)


def watch_result(rows: Sequence[SpeedRow], batch: int) -> WatchResult:
    """Return each worker's speed, and how far the slowest is behind.

    The first iterations pay for what later ones find ready and are left out of the figures, where there are more.
    """
    names = sorted({row.worker for row in rows}, key=natural_key)
    begin = WARM_ITERATIONS if max(row.iteration for row in rows) >= 2 * WARM_ITERATIONS else 0
    workers = []
    speeds = []
    for name in names:
        mine = sorted((row for row in rows if row.worker == name and row.iteration >= begin), key=lambda r: r.iteration)
        speed = np.array([row.speed for row in mine])
        speeds.append(speed)
        workers.append(
            WatchedWorker(
                worker=name,
                speed=float(np.median(speed)),
                speed_low=float(np.quantile(speed, 0.1)),
                speed_high=float(np.quantile(speed, 0.9)),
                cpu=float(np.mean([row.cpu for row in mine])),
                memory=float(np.mean([row.memory for row in mine])),
            )
        )
    every = np.stack(speeds)
    # With equal batches all wait for the slowest; batches in proportion to speeds would all end together.
    equal_s = float((batch / every.min(axis=0)).mean())
    known_s = float((batch * len(names) / every.sum(axis=0)).mean())
    return WatchResult(
        batch=batch,
        iterations=every.shape[1] + begin,
        left_out=begin,
        workers=workers,
        equal_split_s=equal_s,
        speeds_known_s=known_s,
    )


def show_watch(found: WatchResult, output: Path | None) -> None:
    """Print a row per worker and what balancing could gain."""
    console = out()
    rows = [
        [
            worker.worker,
            f"{worker.speed:.4g}",
            f"{worker.speed_low:.4g} to {worker.speed_high:.4g}",
            f"{worker.cpu:.0%}",
            f"{worker.memory:.0%}",
        ]
        for worker in found.workers
    ]
    title = f"{found.iterations} iterations with {found.batch} samples per worker, measured"
    columns = ("worker", "samples/s", "10 to 90 %", "CPU", "memory")
    caption = "samples/s: median without waiting; CPU and memory: mean shares that the worker could expect"
    console.print(table(title, columns, rows, caption=caption))
    equal_s, known_s = found.equal_split_s, found.speeds_known_s
    console.print(
        f"Computing takes {show_seconds(equal_s)} with equal batches, {show_seconds(known_s)} with batches by known "
        f"speeds ({1 - known_s / equal_s:.0%} less)."
    )
    if output is not None:
        console.print(f"wrote {output}; next: ddltool balance {output}", soft_wrap=True)
