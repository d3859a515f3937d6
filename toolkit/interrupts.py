"""How a command ends on Ctrl-C and on SIGTERM: after its clean-up, within seconds.

The first signal raises KeyboardInterrupt, so that the command cleans up; later ones are ignored, so that they do not disturb
the clean-up. Python handles a signal only between two of its own instructions, and libraries may swallow the exception: a
thread, which the system wakes, therefore ends the process if it still runs ``LIMIT_S`` later. Start at :func:`listen`.
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

LIMIT_S = 2.0  # for the clean-up
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_received: list[int] = []  # the number of the first signal
_reported = threading.Event()


def exit_code() -> int | None:
    """Return the exit code of a shell for the signal that was received: 130 (Ctrl-C) or 143 (SIGTERM); None without one."""
    return 128 + _received[0] if _received else None


def mark_reported() -> None:
    """Note that the user has been told of the interruption, so that the thread ends the process without a message."""
    _reported.set()


def listen() -> None:
    """Handle Ctrl-C and SIGTERM from here on, and start the thread that ends a process which does not end by itself.

    A signal that has another handler, or is ignored (as by a shell's ``&``), stays as it is.
    """
    for number in _SIGNALS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, _on_first_signal)
    # The interpreter writes each signal's number into this pipe, also while the main thread is in C code.
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    # A fork has neither the thread nor a command to clean up.
    os.register_at_fork(after_in_child=_restore_handlers)
    threading.Thread(target=_end_process_late, args=(read_end,), daemon=True).start()


@contextmanager
def held() -> Iterator[None]:
    """Block SIGINT in the body: it arrives here after the body, and never in processes that the body starts.

    A child inherits the blocked signal; the parent, which receives it, ends the child. A handler that the child set
    would come too late: importing torch takes seconds, in which a Ctrl-C ends in a traceback.
    """
    from multiprocessing import resource_tracker  # `--help` needs none of it

    resource_tracker.ensure_running()  # it unblocks SIGINT when it starts its own process
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # a Ctrl-C during the body is delivered here


def _restore_handlers() -> None:
    """Restore Python's default handlers in a forked process, such as a DataLoader's worker, which is ended by SIGTERM."""
    signal.set_wakeup_fd(-1)
    if signal.getsignal(signal.SIGINT) is _on_first_signal:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGTERM) is _on_first_signal:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_first_signal(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt in the command, and ignore all later signals, which would disturb its clean-up."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    _received.append(number)
    raise KeyboardInterrupt


def _end_process_late(read_end: int) -> None:
    """End the process ``LIMIT_S`` after a signal that this module handles; runs in a thread of its own.

    ``read_end``: the pipe from which the numbers of all signals are read, one byte each.
    """
    while True:
        number = os.read(read_end, 1)[0]
        time.sleep(LIMIT_S)
        # The handler may not have run yet: the main thread can be in C code that never returns.
        if number in _SIGNALS and (_received or signal.getsignal(number) is _on_first_signal):
            if not _reported.is_set():
                print("error: interrupted", file=sys.stderr, flush=True)  # noqa: T201
            os._exit(128 + number)
