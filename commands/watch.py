"""``ddltool watch SOURCE``: speed, CPU and memory of every process of a training job, iteration by iteration."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from ddltool.commands.declaring import called
from ddltool.commands.options import Seed, integers, within
from ddltool.commands.output import out, print_json, progress, say, table
from ddltool.errors import DdlToolError
from ddltool.results import WatchResult
from ddltool.runtime.measuring.campaign import LARGEST_BATCH
from ddltool.runtime.measuring.profiling import RESOLVER
from ddltool.runtime.measuring.watch import WatchLost, WatchRequest, record, summarise, write_rows
from ddltool.units import show_seconds

_cores = partial(integers, least=0, ordered=False, once=False)


def watch(
    context: typer.Context,
    source: str,
    iterations: Annotated[int, within(1)] = 200,
    batch_size: Annotated[int, within(1, LARGEST_BATCH)] = 8,
    replicas: Annotated[int, within(1)] = 2,
    cores: Annotated[tuple[int, ...] | None, _cores] = None,
    output: Path | None = None,
    seed: Seed = 0,
    as_json: bool = False,
) -> None:
    """Train in local processes in lockstep and record speed, CPU and memory of each, for balance."""
    sizes = {"batch": batch_size, "workers": replicas, "iterations": iterations}
    request = called(context, WatchRequest, resolver=RESOLVER, **sizes)
    watch_workers(request, output, as_json)


def watch_workers(request: WatchRequest, output: Path | None, as_json: bool) -> None:
    """Train in local processes in lockstep, write what each did as CSV, and print a summary.

    Raises DdlToolError when a worker is lost; what was recorded until then is written all the same.
    """
    try:
        with progress("watching", request.iterations) as advance:
            rows = record(request, lambda done: advance(done, f"{done} of {request.iterations}"))
    except WatchLost as lost:
        kept = f"the {len(lost.rows) // request.workers} iterations that all workers completed"
        if not lost.rows:
            kept = "no iteration was complete, so nothing is written"
        elif output is None:
            kept += " are lost: name a file with -o"
        else:
            write_rows(lost.rows, output)
            kept += f" are in {output}"
        raise DdlToolError(f"{request.source}: {lost}; {kept}") from None
    if output is not None:
        write_rows(rows, output)
    found = summarise(rows, request.batch)
    if as_json:
        print_json(found)
    else:
        _show_watched(found, output)


def _show_watched(found: WatchResult, output: Path | None) -> None:
    """Print a row per worker and what balancing could gain."""
    rows = [
        (
            one.worker,
            f"{one.speed:.4g}",
            f"{one.speed_low:.4g} to {one.speed_high:.4g}",
            f"{one.cpu:.0%}",
            f"{one.memory:.0%}",
        )
        for one in found.workers
    ]
    title = f"{found.iterations} iterations with {found.batch} samples per worker, measured"
    columns = ("worker", "samples/s", "10 to 90 %", "CPU", "memory")
    caption = "samples/s: median without waiting; CPU and memory: mean shares that the worker could expect"
    console = out()
    console.print(table(title, columns, rows, caption=caption))
    equal_s, known_s = found.equal_split_s, found.speeds_known_s
    console.print(
        f"Computing takes {show_seconds(equal_s)} with equal batches, {show_seconds(known_s)} with batches by known "
        f"speeds ({1 - known_s / equal_s:.0%} less)."
    )
    if output is not None:
        say(f"wrote {output}; next: ddltool balance {output}")
