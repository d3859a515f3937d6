"""``ddltool profile SOURCE --watch N``: record worker speeds, CPU and memory for ``ddltool balance``."""

from __future__ import annotations

from pathlib import Path

from ddltool.commands.output import out, print_json, progress, table
from ddltool.errors import DdlToolError
from ddltool.results import WatchResult
from ddltool.runtime.measuring.watch import WatchLost, WatchRequest, record, summarise, write_rows
from ddltool.units import show_seconds


def profile_watch(request: WatchRequest, output: Path | None, as_json: bool) -> None:
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
        _show(found, output)


def _show(found: WatchResult, output: Path | None) -> None:
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
        console.print(f"wrote {output}; next: ddltool balance {output}", soft_wrap=True)
