"""``ddltool doctor``: what this machine offers to ddltool, and what ddltool costs a script."""

from __future__ import annotations

import statistics
from typing import Annotated

from ddltool import __version__
from ddltool.commands.options import percent, within, words
from ddltool.commands.output import out, print_json, progress, say, table
from ddltool.errors import CheckFailed, InputError
from ddltool.results import DoctorResult, OverheadResult
from ddltool.runtime.measuring.machine_checks import OPTIONAL, PACKAGES, examine, installed
from ddltool.runtime.measuring.overhead import measure_overhead
from ddltool.runtime.measuring.script_check import check_script
from ddltool.units import show_seconds


def doctor(
    overhead: str | None = None,
    check: str | None = None,
    max_overhead: Annotated[float | None, percent] = None,
    pairs: Annotated[int, within(1, 1000)] = 10,
    steps: Annotated[int, within(4)] = 60,
    replicas: Annotated[int | None, within(1, 4096)] = None,
    as_json: bool = False,
) -> None:
    """Try what ddltool needs of this machine; or what it costs a script, or whether a script trains right with it."""
    if check is not None:
        _check(check, replicas or 2, as_json)
        return
    if overhead is None:
        if max_overhead is not None:
            raise InputError("--max-overhead", "needs a script", "add --overhead SCRIPT")
        _look(as_json)
        return
    command = words(overhead, "--overhead")
    with progress("runs", 2 * pairs) as advance:
        asked = {"pairs": pairs, "steps": steps, "replicas": replicas or 1}
        found = measure_overhead(command, **asked, limit=max_overhead, progress=lambda done: advance(done, ""))
    if as_json:
        print_json(found)
    else:
        _show_overhead(found, command[0])
    if max_overhead is not None and found.verdict == "above":
        raise CheckFailed(f"the overhead of ddltool is above {100 * max_overhead:.6g}% of a step")


def _check(script: str, replicas: int, as_json: bool) -> None:
    """Say whether a script trains as one process would; raise CheckFailed where it does not."""
    found = check_script(words(script, "--check"), replicas)
    if as_json:
        print_json(found)
    else:
        say(f"{found.script}, {replicas} processes: {found.line}")
    if not found.equal:
        raise CheckFailed(f"{found.script} does not train as one process would")


def _look(as_json: bool) -> None:
    """Print what this machine offers; raise CheckFailed when something needed does not work."""
    checks, machine = examine()
    failed = [check.name for check in checks if check.status == "failed"]
    if as_json:
        print_json(
            DoctorResult(
                version=__version__,
                **machine.model_dump(),
                packages={name: installed(name) for name in PACKAGES},
                optional={name: installed(name) for name in OPTIONAL},
                passed=not failed,
                checks=checks,
            )
        )
    else:
        rows = [(each.name, each.status, each.found) for each in checks]
        out().print(table(f"ddltool {__version__}", ("what", "status", "found"), rows, text_columns=3))
        for each in checks:
            if each.remedy:
                say(f"{each.name}: {each.remedy}")
    if failed:
        told = f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}"
        raise CheckFailed(f"{told}; remedies are in the output")


def _show_overhead(found: OverheadResult, script: str) -> None:
    rows = []
    for name, clock, ratio in (("wall clock", "wall_s", found.wall), ("CPU seconds", "cpu_s", found.cpu)):
        off, on = (statistics.median(getattr(run, clock) for run in runs) for runs in (found.off, found.on))
        ends = f"{ratio.low - 1:+.1%} to {ratio.high - 1:+.1%}"
        rows.append((name, show_seconds(off), show_seconds(on), f"{ratio.median - 1:+.1%}", ends))
    sure = min(found.wall.confidence, found.cpu.confidence)
    caption = f"Measured: {len(found.on)} pairs of runs in turns; {sure:.1%} intervals of the median."
    if found.verdict == "not decided":
        asked = f"Whether it is within {found.limit:.1%}"
        caption += f" {asked} is not decided: this machine is too noisy for so few runs (--pairs)."
    elif found.verdict is not None:
        caption += f" The overhead is {found.verdict} {found.limit:.1%}."
    columns = ("per step", "off", "on", "overhead", "interval")
    out().print(table(f"ddltool on and off: {script}", columns, rows, caption=caption))
