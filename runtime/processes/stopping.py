"""Ends a training process in order, and with one line. Start at :class:`StopSignals` and :func:`refuse_in_one_line`.

Schedulers and torchrun end a job by SIGTERM to every process, which by default kills it at once, and on Ctrl-C Python
raises KeyboardInterrupt between any two of its instructions. Here both signals are noted when they come, and raised
where the process is ready to end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from ddltool.errors import DdlToolError

SAME_CTRL_C_S = 1.0
"""A SIGINT within these seconds of the first is the same Ctrl-C, which a launcher passes on too."""
EXIT_PAUSE_S = 0.1
"""How long gloo's threads get to drop the last step's tensors before the process exits."""


class Terminated(SystemExit):
    """SIGTERM has come. Uncaught, it ends the process with exit code 143 (128 + 15), which is a shell's for SIGTERM."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)

    def __str__(self) -> str:
        """Name the signal."""
        return "SIGTERM"


class StopSignals:
    """Notes signals when they come, for :meth:`hear` to raise later; main thread only.

    A SIGINT more than a second after the first signal is a KeyboardInterrupt at once; an earlier one is the same
    Ctrl-C, which the terminal and a launcher both send.

    Attributes:
        came: number of the first signal that came; None before.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        """Prepare to note these signals, by default SIGTERM and SIGINT; :meth:`open` begins it."""
        self._numbers = numbers or (signal.SIGTERM, signal.SIGINT)
        self.came: int | None = None
        self._came_s = 0.0
        self._heard = False
        self._process = os.getpid()
        self._replaced: dict[int, Any] = {}

    def open(self, *, all_of_them: bool = False) -> None:
        """Install the handler for the signals that have Python's default handler, or with ``all_of_them`` for all.

        In another thread than the main one nothing happens, because Python allows handlers there only.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._numbers:
            if all_of_them or signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                self._replaced[number] = signal.signal(number, self._note)

    def close(self) -> None:
        """Restore the handlers that :meth:`open` replaced, except where the script has installed another since."""
        if threading.current_thread() is threading.main_thread():
            for number, before in self._replaced.items():
                if signal.getsignal(number) == self._note:
                    signal.signal(number, before)
            self._replaced = {}

    def hear(self) -> None:
        """Raise KeyboardInterrupt (SIGINT) or :class:`Terminated` if a signal has come; only once."""
        if self.came is not None and not self._heard:
            self._heard = True
            raise KeyboardInterrupt if self.came == signal.SIGINT else Terminated

    def _note(self, number: int, _: FrameType | None) -> None:
        """Note the first signal; a Ctrl-C more than a second later raises KeyboardInterrupt: the signals' handler."""
        if os.getpid() != self._process:  # a forked data worker inherits the handler: there the signal acts as before
            signal.signal(number, self._replaced.get(number, signal.SIG_DFL))
            os.kill(os.getpid(), number)
        elif self.came is None:
            self.came = number
            self._came_s = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._came_s > SAME_CTRL_C_S:
            raise KeyboardInterrupt


def refuse_in_one_line() -> None:
    """Make an uncaught DdlToolError end the process with one line on stderr and its exit code, instead of a traceback.

    It installs a ``sys.excepthook``; more calls do nothing. Other exceptions go to the previous hook.
    """
    previous = sys.excepthook
    if isinstance(previous, _OneLine):
        return
    sys.excepthook = _OneLine(previous)


@dataclass(frozen=True, slots=True)
class _OneLine:
    """A ``sys.excepthook`` that prints ddltool's errors as one line; the hook ``previous`` gets all others."""

    previous: Callable[[type[BaseException], BaseException, TracebackType | None], object]

    def __call__(self, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        """Print a DdlToolError as one line and exit with its code; pass any other error to the previous hook."""
        if not isinstance(value, DdlToolError):
            self.previous(kind, value, trace)
            return
        sys.stderr.write(f"error: {value}\n")
        raise SystemExit(value.exit_code)  # Python takes the exit code from an excepthook that raises SystemExit


def pause_before_exit() -> None:
    """Block for :data:`EXIT_PAUSE_S`, so that gloo's threads can drop the tensors of the last step; called at exit.

    They drop them a moment after the step, and need the interpreter for tensors that Python has seen, such as a hook's
    buckets. A thread that asks for it during shutdown aborts the process (pytorch issue 190489), and a finished job
    would count as failed: 13 of 150 short ones did, none of 295 with this pause.
    """
    time.sleep(EXIT_PAUSE_S)
