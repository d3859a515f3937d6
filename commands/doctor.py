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
    """Try what ddltool needs of this machine; or what it costs a script, or whether a script trains right with it.

    ``overhead`` and ``check``: a script with its arguments. For the overhead, ``pairs`` pairs of runs of ``steps`` steps
    are compared, one without and one with ddltool; above ``max_overhead``, a share of a step, it fails. ``replicas``:
    number of processes. Raises CheckFailed for a failed check.
    """
    if check is not None:
        _check_script(check, replicas or 2, as_json)
        return
    if overhead is None:
        if max_overhead is not None:
            raise InputError("--max-overhead", "needs a script", "add --overhead SCRIPT")
        _examine_machine(as_json)
        return
    command = words(overhead, "--overhead")
    with progress("runs", 2 * pairs) as advance:
        sizes = {"pairs": pairs, "steps": steps, "replicas": replicas or 1}
        overhead_result = measure_overhead(
            command, **sizes, limit=max_overhead, progress=lambda done: advance(done, "")
        )
    if as_json:
        print_json(overhead_result)
    else:
        _print_overhead(overhead_result, command[0])
    if max_overhead is not None and overhead_result.verdict == "above":
        raise CheckFailed(f"the overhead of ddltool is above {100 * max_overhead:.6g}% of a step")


def _check_script(script: str, replicas: int, as_json: bool) -> None:
    """Print whether ``replicas`` processes train the script as one process does. Raises CheckFailed if they do not."""
    check_result = check_script(words(script, "--check"), replicas)
    if as_json:
        print_json(check_result)
    else:
        say(f"{check_result.script}, {replicas} processes: {check_result.line}")
    if not check_result.equal:
        raise CheckFailed(f"{check_result.script} does not train as one process would")


def _examine_machine(as_json: bool) -> None:
    """Check this machine and its packages, and print the outcome. Raises CheckFailed if a check failed."""
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
        rows = [(check.name, check.status, check.found) for check in checks]
        out().print(table(f"ddltool {__version__}", ("what", "status", "found"), rows, text_columns=3))
        for check in checks:
            if check.remedy:
                say(f"{check.name}: {check.remedy}")
    if failed:
        summary = f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}"
        raise CheckFailed(f"{summary}; remedies are in the output")


def _print_overhead(overhead: OverheadResult, script: str) -> None:
    """Print the seconds per step with ddltool off and on, their ratio with its interval, and the verdict.

    ``script``: its name, for the title.
    """
    rows = []
    for name, field, ratio in (("wall clock", "wall_s", overhead.wall), ("CPU seconds", "cpu_s", overhead.cpu)):
        off_s = statistics.median(getattr(run, field) for run in overhead.off)
        on_s = statistics.median(getattr(run, field) for run in overhead.on)
        interval = f"{ratio.low - 1:+.1%} to {ratio.high - 1:+.1%}"
        rows.append((name, show_seconds(off_s), show_seconds(on_s), f"{ratio.median - 1:+.1%}", interval))
    confidence = min(overhead.wall.confidence, overhead.cpu.confidence)
    caption = f"Measured: {len(overhead.on)} pairs of runs in turns; {confidence:.1%} intervals of the median."
    if overhead.verdict == "not decided":
        question = f"Whether it is within {overhead.limit:.1%}"
        caption += f" {question} is not decided: this machine is too noisy for so few runs (--pairs)."
    elif overhead.verdict is not None:
        caption += f" The overhead is {overhead.verdict} {overhead.limit:.1%}."
    columns = ("per step", "off", "on", "overhead", "interval")
    out().print(table(f"ddltool on and off: {script}", columns, rows, caption=caption))
