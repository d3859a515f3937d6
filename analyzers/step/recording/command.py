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

from ddltool.analyzers.step.recording.packages import ABSENT, FAILURE_MARK, NOTE
from ddltool.device import DEVICES_PER_NODE, Device
from ddltool.errors import InputError
from ddltool.graph import Graph, read_graph

COMMAND = "-- "
"""Before the command in a SOURCE that is one: ``-- python train.py``."""
LIMIT_S = 300.0
"""Seconds that a recording may take, unless the caller says otherwise."""
_SHOWN_PLACES = 3
"""At most so many places of assumed values are named in one line."""
_CAPABILITY = (9, 0)
"""The compute capability that scripts see: Hopper's."""
_RELAY_S = 5.0
"""Seconds to wait for the rest of what an ended recording has printed."""
_POLL_S = 0.5
"""Seconds between two looks at whether a recording is to end."""


def is_command(source: object) -> TypeGuard[str | list[str]]:
    """Return whether a SOURCE is a command that starts training: a text that begins with ``-- ``, or a list of words."""
    if isinstance(source, str):
        return source.startswith(COMMAND)
    return isinstance(source, list) and all(isinstance(word, str) for word in source)


def words_of(source: str | Sequence[str]) -> list[str]:
    """Return the words of a command, given as for :func:`is_command`.

    Raises InputError for a command that is empty or whose quotes do not match.
    """
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

    The script runs as rank 0 in a child process, with the user's rights and in this folder. Its GPU tensors have
    sizes but no values, and they seem to be on ``device``'s GPUs (None: on a GPU of 80 GiB). The call returns when the
    child has ended.

    ``source``: the command, as for :func:`is_command`. ``shows``: what the script prints is passed on to stderr.
    ``keep_files``: what it writes stays on the disk; otherwise it goes to a folder that is removed at the end.
    ``ended``: an event that another thread sets to kill the child early, which raises InputError, too.

    Raises InputError for a command that cannot be read, for a script that fails or ends before its second update, and
    for one that takes longer than ``limit_s`` seconds.
    """
    words = words_of(source)
    with tempfile.TemporaryDirectory(prefix="ddltool-") as scratch:
        out, request = Path(scratch, "graph.json"), Path(scratch, "request.json")
        request.write_text(
            json.dumps(
                {  # the module `script` says what each key means to the child
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
        failure = _run_child(child, limit_s, _without_script_arguments(words), shows, ended or threading.Event())
        if not out.exists():
            # The child writes what is wrong and, after "; ", what would be right.
            problem, _, remedy = (failure or "recorded no step").partition("; ")
            raise InputError(
                _without_script_arguments(words), problem, remedy or ("its output above says more" if shows else "")
            )
        return read_graph(out)


def _without_script_arguments(words: Sequence[str]) -> str:
    """Return a command as one text that ends with its script: ``torchrun train.py`` for ``torchrun train.py --lr 1``."""
    for index, word in enumerate(words):
        if word.endswith(".py") or words[index - 1] == "-m":  # the script, or the module after -m
            return shlex.join(words[: index + 1])
    return shlex.join(words[:1])


_CHILD = "ddltool.analyzers.step.recording.script"
"""The module that the child process runs."""


def assumed(graph: Graph) -> str:
    """Return the line that says which values a recorded script's graph assumes, and where; "" where it assumes none."""
    return assumption_line(graph.recorded.assumed) if graph.recorded is not None else ""


def assumption_line(values: Mapping[str, int]) -> str:
    """Return the line that says which packages were stood in for, which values were assumed, and where; "" for neither.

    ``values`` maps ``file:line`` to how often a value was read there. Its keys may also be ``ABSENT`` and a package's
    name, or ``NOTE`` and a sentence; the numbers of these are not used.
    """
    absent = ", ".join(key.removeprefix(ABSENT) for key in values if key.startswith(ABSENT))
    remarks = [f"Stood in for, not installed here: {absent}."] if absent else []
    for key in values:
        if key.startswith(NOTE):
            sentence = key.removeprefix(NOTE)
            remarks.append(f"{sentence[0].upper()}{sentence[1:]}.")
    times_by_place = {key: times for key, times in values.items() if not key.startswith((ABSENT, NOTE))}
    if not times_by_place:
        return " ".join(remarks)
    most_read_first = sorted(times_by_place, key=lambda place: -times_by_place[place])
    shown, hidden = most_read_first[:_SHOWN_PLACES], most_read_first[_SHOWN_PLACES:]
    named = ", ".join(map(_shortened_place, shown))
    more = f" and {len(hidden)} more places" if hidden else ""
    times_read = sum(times_by_place.values())
    counted = f"{times_read} value{'s' * (times_read > 1)}"
    return f"Assumed: {counted} that only a run knows: {named}{more}. {' '.join(remarks)}".rstrip()


def _shortened_place(place: str) -> str:
    """Return ``file:line`` with its path from the current folder, or with its last two parts where it lies outside."""
    path, _, line = place.rpartition(":")
    try:
        return f"{Path(path).resolve().relative_to(Path.cwd())}:{line}"
    except ValueError:
        return f"{'/'.join(Path(path).parts[-2:])}:{line}"


def _run_child(arguments: list[str], limit_s: float, name: str, shows: bool, ended: threading.Event) -> str:
    """Run the child process to its end; return the line in which it says why it recorded nothing, or "".

    For a child that a signal ended, the line names the signal. ``arguments``: the child's command line. ``name``: the
    recorded command in messages. ``shows``: what the child prints is passed on to stderr. ``ended``: an event that another
    thread sets to kill the child. The child leads a process group of its own, so that at the limit, or once ``ended`` is
    set, the processes that it started are killed with it. Raises InputError after ``limit_s`` seconds.
    """
    # Unbuffered, so that prints are relayed as they come; tokenizers' threads make that library warn of later forks.
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
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                problem = f"has not ended its second update in {limit_s:g} s"
                raise InputError(name, problem, "give it more time by --limit, or a smaller job")
            with suppress(subprocess.TimeoutExpired):
                child.wait(min(left_s, _POLL_S))
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        relay.join(timeout=_RELAY_S)  # not for ever: a process that outlives the child may hold its output open
    if child.returncode < 0:
        return f"was ended by {signal.Signals(-child.returncode).name}"
    return failures[-1] if failures else ""


def _relay(stream: IO[str], failures: list[str], shows: bool) -> None:
    """Read what the child prints until its end, and pass it on to stderr where ``shows`` is true, dimmed on a terminal.

    What follows ``FAILURE_MARK`` in a line is the child's reason for failing: it is appended to ``failures`` and not shown.
    """
    dims = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    for line in stream:
        before, mark, failure = line.rstrip("\n").partition(FAILURE_MARK)
        if mark:
            failures.append(failure)
        is_for_parent_alone = bool(mark) and not before  # the mark and the reason, nothing that the script printed
        if shows and not is_for_parent_alone:
            sys.stderr.write(f"\x1b[2m{before}\x1b[0m\n" if dims else f"{before}\n")
