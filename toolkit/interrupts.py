"""How a command ends on Ctrl-C and on SIGTERM: once, in order, and soon.

The first signal is a KeyboardInterrupt, so that what the command holds is given back, and later ones do not disturb that.
Python hears a signal only between two instructions of its own, and libraries may swallow the exception: a thread, which the
system wakes, ends the process where it has not ended by itself ``LIMIT_S`` later. Start at :func:`listen`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LIMIT_S = 2.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_came: list[int] = []
_told = threading.Event()


def exit_code() -> int | None:
    """Return what shells show for the signal that has come, 130 or 143; None before one."""
    return 128 + _came[0] if _came else None


def told() -> None:
    """Say that the person has been told; the thread then ends the process without a word."""
    _told.set()


def listen() -> None:
    """Take Ctrl-C and SIGTERM from here on, where nobody else does and they are not ignored (as a shell's ``&`` does)."""
    for number in _SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _first)
    heard, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=_leave)
    threading.Thread(target=_end_late, args=(heard,), daemon=True).start()


@contextmanager
def held() -> Iterator[None]:
    """Hold SIGINT back; processes started inside never receive it, for a blocked signal stays blocked across exec.

    The parent receives it too and ends them. A handler set by the child itself would come too late: importing torch
    takes seconds, and a Ctrl-C then ends in a traceback.
    """
    from multiprocessing import resource_tracker  # `--help` needs none of it

    resource_tracker.ensure_running()  # it unblocks SIGINT when it starts its own process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # a Ctrl-C of the meantime is delivered here


def _leave() -> None:
    """Take no signals in a process that was forked off: they are not this command's, and DataLoaders end theirs by SIGTERM."""
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGINT) is _first:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is _first:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _first(number: int, frame: FrameType | None) -> None:
    """Interrupt the command; a second signal must not disturb the cleaning up after the first."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    _came.append(number)
    raise KeyboardInterrupt


def _end_late(heard: int) -> None:
    """End the process ``LIMIT_S`` after a signal that is ours. ``heard``: where the system writes the signals' numbers."""
    while True:
        number = os.read(heard, 1)[0]
        time.sleep(LIMIT_S)
        if number in _SIGNALS and (_came or signal.getsignal(number) is _first):
            if not _told.is_set():
                print("error: interrupted", file=sys.stderr, flush=True)  # noqa: T201
            os._exit(128 + number)
