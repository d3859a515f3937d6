"""The body of ``ddltool doctor --overhead SCRIPT``: what ddltool costs a training script, measured on this machine."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddltool.runtime.measuring.overhead import Interval, Overhead


def show_overhead(script: str, max_overhead: str, pairs: int, steps: int, replicas: int, as_json: bool) -> None:
    """Measure, print, and raise CheckFailed when the overhead is above the limit beyond doubt."""
    from ddltool.commands.output import out, print_json, progress, table
    from ddltool.errors import CheckFailed, InputError
    from ddltool.runtime.measuring.overhead import measure_overhead

    limit = parse_share(max_overhead) if max_overhead else None
    try:
        command = shlex.split(script)
    except ValueError as error:
        raise InputError(
            "--overhead", f"cannot be split into words ({error})", "quote the script's arguments"
        ) from None
    if not command:
        raise InputError("--overhead", "names no script", 'give "train.py --its options"')
    warmup = min(10, max(steps // 4, 1))
    with progress("runs", 2 * pairs) as advance:
        measured = measure_overhead(
            command, pairs=pairs, steps=steps, warmup=warmup, replicas=replicas, progress=lambda done: advance(done, "")
        )
    document = _document(script, measured, limit, replicas)
    if as_json:
        print_json(document)
    else:
        rows = [
            ("wall clock", *_cells(measured, "wall_s", measured.wall)),
            ("CPU seconds", *_cells(measured, "cpu_s", measured.cpu)),
        ]
        percent = f"{min(measured.wall.confidence, measured.cpu.confidence):.1%}"
        caption = (
            f"Measured: {pairs} pairs of runs in turns; {percent} intervals of the median. {_words(document)}".strip()
        )
        out().print(
            table(
                f"ddltool on and off: {command[0]}",
                ("per step", "off", "on", "overhead", "interval"),
                rows,
                caption=caption,
            )
        )
    if document["verdict"] == "above":
        raise CheckFailed(f"the overhead of ddltool is above {max_overhead} of a step")


def parse_share(text: str) -> float:
    """Return a share from "1%" or "0.01". Raises InputError for anything but a number from 0 to 1000 %.

    >>> parse_share("1%"), parse_share("0.02")
    (0.01, 0.02)
    """
    from ddltool import units
    from ddltool.errors import InputError

    share = units.parse_share(text)
    if not 0 <= share <= 10:
        raise InputError("--max-overhead", f'is "{text}"', "give a share such as 1%")
    return share


def _document(script: str, measured: Overhead, limit: float | None, replicas: int) -> dict[str, Any]:
    verdict = None
    if limit is not None:
        found = {measured.wall.excess(limit), measured.cpu.excess(limit)}
        verdict = next(word for word in ("above", "not decided", "within") if word in found)
    return {
        "kind": "ddltool.overhead",
        "schema_version": 1,
        "script": script,
        "replicas": replicas,
        "limit": limit,
        "verdict": verdict,
        "wall": asdict(measured.wall),
        "cpu": asdict(measured.cpu),
        "on": [asdict(run) for run in measured.on],
        "off": [asdict(run) for run in measured.off],
    }


def _cells(measured: Overhead, name: str, interval: Interval) -> tuple[str, str, str, str]:
    import statistics

    from ddltool.units import show_seconds

    off, on = (statistics.median(getattr(run, name) for run in runs) for runs in (measured.off, measured.on))
    ends = f"{interval.low - 1:+.1%} to {interval.high - 1:+.1%}"
    return show_seconds(off), show_seconds(on), f"{interval.median - 1:+.1%}", ends


def _words(document: dict[str, Any]) -> str:
    """Return the verdict in words; empty without a limit."""
    limit, verdict = document["limit"], document["verdict"]
    if verdict is None:
        return ""
    if verdict == "not decided":
        return f"Whether it is within {limit:.1%} is not decided: this machine is too noisy for so few runs (--pairs)."
    return f"The overhead is {verdict} {limit:.1%}."
