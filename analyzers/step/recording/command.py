"""A training script's step, recorded in a process of its own. Start at :func:`record`."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TypeGuard

from ddltool.analyzers.step.recording.packages import ABSENT, NOTE
from ddltool.device import DEVICES_PER_NODE, Device
from ddltool.errors import InputError
from ddltool.graph import Graph, read_graph

COMMAND = "-- "
"""Before the command in a SOURCE that is one: ``-- python train.py``."""
LIMIT_S = 300.0
_FAILURE = "\0"
"""Before the line in which the child process says why it recorded nothing."""
_SHOWN_ASSUMPTIONS = 3
_CAPABILITY = (9, 0)
_LOOK_S = 0.5
"""So often a recording looks whether it is to end."""


def is_command(source: object) -> TypeGuard[str | list[str]]:
    """Return whether a SOURCE is a command that starts training: a text after ``-- ``, or a list of words."""
    if isinstance(source, str):
        return source.startswith(COMMAND)
    return isinstance(source, list) and all(isinstance(word, str) for word in source)


def words_of(source: str | Sequence[str]) -> list[str]:
    """Return the words of a command. Raises InputError for one whose quotes do not match, or that is empty."""
    try:
        words = shlex.split(source.removeprefix(COMMAND)) if isinstance(source, str) else list(source)
    except ValueError as error:
        raise InputError(COMMAND.strip(), str(error).lower(), "close the quotes") from None
    if not words:
        raise InputError(COMMAND.strip(), "no command follows", "write python train.py, torchrun train.py, ...")
    return words


def record(
    source: str | Sequence[str],
    device: Device | None = None,
    *,
    gpus_per_node: int = DEVICES_PER_NODE,
    limit_s: float = LIMIT_S,
    keep_files: bool = False,
    shows: bool = True,
    ended: threading.Event | None = None,
) -> Graph:
    """Return the graph of one steady step of a script: from the end of its first update to the end of the second.

    The script runs as rank 0 with the user's rights, in this folder, on tensors without values that pose as ``device``'s.
    What it prints goes to stderr where it ``shows``; what it writes to a folder that is removed, unless ``keep_files``.
    ``ended``, set by another thread, ends it.

    Raises InputError for a command that cannot be read, a script that fails or ends before its second update, and one that
    takes longer than ``limit_s``.
    """
    words = words_of(source)
    with tempfile.TemporaryDirectory(prefix="ddltool-") as scratch:
        out, request = Path(scratch, "graph.json"), Path(scratch, "request.json")
        request.write_text(
            json.dumps(
                {
                    "out": str(out),
                    "label": shlex.join(words),
                    "name": device.name if device is not None else "GPU",
                    "memory_bytes": int(device.memory_gib * 2**30) if device is not None else 80 * 2**30,
                    "capability": _CAPABILITY,
                    "count": gpus_per_node,
                    "scratch": None if keep_files else str(Path(scratch, "files")),
                }
            )
        )
        child = [sys.executable, "-m", _CHILD, str(request), "--", *words]
        failure = _run(child, limit_s, _short(words), shows, ended or threading.Event())
        if not out.exists():
            problem, _, remedy = (failure or "recorded no step").partition("; ")
            raise InputError(_short(words), problem, remedy or ("its output above says more" if shows else ""))
        return read_graph(out)


def _short(words: Sequence[str]) -> str:
    """Return a command without the arguments of its script."""
    script = next((place for place, word in enumerate(words) if word.endswith(".py") or words[place - 1] == "-m"), 0)
    return shlex.join(words[: script + 1])


_CHILD = "ddltool.analyzers.step.recording.script"


def assumed(graph: Graph) -> str:
    """Return the line that says which values of a recorded script were assumed, and where; "": none were."""
    return assumption_line(graph.recorded.assumed) if graph.recorded is not None else ""


def assumption_line(values: Mapping[str, int]) -> str:
    """Return the line that says what was stood in for, which values were assumed, and where; "": nothing was.

    ``values``: how often a value was read, by ``file:line``; remarks after ``ABSENT`` and ``NOTE``.
    """
    absent = ", ".join(place.removeprefix(ABSENT) for place in values if place.startswith(ABSENT))
    notes = [f"Stood in for, not installed here: {absent}."] if absent else []
    for place in values:
        if place.startswith(NOTE):
            said = place.removeprefix(NOTE)
            notes.append(f"{said[0].upper()}{said[1:]}.")
    read = ((place, count) for place, count in values.items() if not place.startswith((ABSENT, NOTE)))
    counts = sorted(read, key=lambda item: -item[1])
    if not counts:
        return " ".join(notes)
    total = sum(count for _, count in counts)
    named = ", ".join(_near(place) for place, _ in counts[:_SHOWN_ASSUMPTIONS])
    more = f" and {len(counts) - _SHOWN_ASSUMPTIONS} more places" if len(counts) > _SHOWN_ASSUMPTIONS else ""
    return f"Assumed: {total} value{'s' * (total > 1)} that only a run knows: {named}{more}. {' '.join(notes)}".rstrip()


def _near(place: str) -> str:
    """Return a place by its path from here where that is shorter."""
    path, _, line = place.rpartition(":")
    try:
        return f"{Path(path).resolve().relative_to(Path.cwd())}:{line}"
    except ValueError:
        return f"{'/'.join(Path(path).parts[-2:])}:{line}"


def _run(arguments: list[str], limit_s: float, name: str, shows: bool, ended: threading.Event) -> str:
    """Run the child to its end; return the line in which it says why it recorded nothing. Raises InputError at the limit."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    child = subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    failures: list[str] = []
    assert child.stdout is not None
    relay = threading.Thread(target=_relay, args=(child.stdout, failures, shows), daemon=True)
    relay.start()
    deadline_s = time.monotonic() + limit_s
    try:
        while child.poll() is None and not ended.is_set():
            if (left_s := deadline_s - time.monotonic()) <= 0:
                problem = f"has not ended its second update in {limit_s:g} s"
                raise InputError(name, problem, "give it more time by --limit, or a smaller job")
            with suppress(subprocess.TimeoutExpired):
                child.wait(min(left_s, _LOOK_S))
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        relay.join(timeout=5)
    if child.returncode < 0:
        return f"was ended by {signal.Signals(-child.returncode).name}"
    return failures[-1] if failures else ""


def _relay(stream: IO[str], failures: list[str], shows: bool) -> None:
    """Pass what the script prints on to stderr where it ``shows``, dimmed on a terminal."""
    dims = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    for line in stream:
        before, mark, failure = line.rstrip("\n").partition(_FAILURE)
        if mark:
            failures.append(failure)
        if shows and (before or not mark):
            sys.stderr.write(f"\x1b[2m{before}\x1b[0m\n" if dims else f"{before}\n")
