"""Child processes that end with their parent, and that a Ctrl-C at the terminal does not reach. Start at :func:`start`."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from ddltool.errors import DdlToolError, InputError

# No step takes longer without a sign of life; a hung collective must not hang the user.
SILENCE_LIMIT_S = 300.0


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold SIGINT back; processes started inside never receive it, for a blocked signal stays blocked across exec.

    A handler set by the child itself would come too late: importing torch takes seconds, and a Ctrl-C then ends in a
    traceback.
    """
    resource_tracker.ensure_running()  # it unblocks SIGINT when it starts its own process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # a Ctrl-C of the meantime is delivered here


def start(children: Iterable[BaseProcess]) -> None:
    """Start the processes, deaf to SIGINT: the parent receives it too and ends them."""
    with _interrupts_held():
        for child in children:
            child.start()


def stop(children: Iterable[BaseProcess]) -> None:
    """Kill the processes that still run, and wait for all that were started."""
    started = [child for child in children if child.pid is not None]
    for child in started:
        if child.is_alive():
            child.kill()
    for child in started:
        child.join()


def follow_parent() -> None:
    """End this process when the one that started it is gone: a killed command leaves nobody computing."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def free_port() -> int:
    """Return a TCP port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def how_it_ended(exit_code: int) -> str:
    """Return an exit code of ``multiprocessing`` in words.

    >>> how_it_ended(9), how_it_ended(-9)
    ('died (exit code 9)', 'was killed (SIGKILL: by somebody, or by the system when memory ran out)')
    """
    if exit_code >= 0:
        return f"died (exit code {exit_code})"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    more = ": by somebody, or by the system when memory ran out" if -exit_code == signal.SIGKILL else ""
    return f"was killed ({name}{more})"


def listen(
    results: multiprocessing.Queue[tuple[str, Any]], children: Sequence[BaseProcess]
) -> Iterator[dict[str, Any]]:
    """Yield what the processes report, until they are done; raise what they could not do."""
    last = time.monotonic()
    while True:
        try:
            kind, value = results.get(timeout=0.2)
        except queue.Empty:
            dead = [child.exitcode for child in children if child.exitcode]
            if dead and results.empty():
                raise DdlToolError(f"a measuring process {how_it_ended(dead[0])}") from None
            if time.monotonic() - last > SILENCE_LIMIT_S:
                raise DdlToolError(f"the measuring processes were silent for {SILENCE_LIMIT_S:.0f} s") from None
            continue
        last = time.monotonic()
        if kind == "row":
            yield value
        elif kind == "error":
            raise InputError(*value)
        else:
            return
