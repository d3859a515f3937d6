"""How a training process ends: in one line, and in order. Start at :class:`StopSignals` and :func:`refuse_in_one_line`.

Schedulers and torchrun end a job by SIGTERM to every process, which by default kills it on the spot, and on Ctrl-C
Python raises KeyboardInterrupt between any two of its instructions. Here both signals are noted when they come, and
raised where the process is ready to end.
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
"""A SIGINT so soon after the first is the same Ctrl-C, sent by a launcher too."""
EXIT_PAUSE_S = 0.1
"""How long gloo's threads get to drop the last step's tensors before the process exits."""


class Terminated(SystemExit):
    """SIGTERM has come. Where nobody catches it, the process ends with 143, as shells show a SIGTERM."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)

    def __str__(self) -> str:
        """Name the signal."""
        return "SIGTERM"


class StopSignals:
    """Notes signals in the main thread.

    A SIGINT more than a second after the first is a KeyboardInterrupt, at once; earlier ones are the same Ctrl-C, which
    the terminal and a launcher both send.

    Attributes:
        came: the first of the signals, None before.
    """

    def __init__(self, *numbers: signal.Signals) -> None:
        """Note these signals, by default SIGTERM and SIGINT, from :meth:`open` on."""
        self._numbers = numbers or (signal.SIGTERM, signal.SIGINT)
        self.came: int | None = None
        self._came_s = 0.0
        self._heard = False
        self._process = os.getpid()
        self._replaced: dict[int, Any] = {}

    def open(self, *, all_of_them: bool = False) -> None:
        """Take over the signals without a handler of the script's, or ``all_of_them``; in the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in self._numbers:
            if all_of_them or signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                self._replaced[number] = signal.signal(number, self._note)

    def close(self) -> None:
        """Give the signals back, if nobody else has taken them since."""
        if threading.current_thread() is threading.main_thread():
            for number, before in self._replaced.items():
                if signal.getsignal(number) == self._note:
                    signal.signal(number, before)
            self._replaced = {}

    def hear(self) -> None:
        """Raise KeyboardInterrupt or :class:`Terminated` when a signal has come that was not raised yet."""
        if self.came is not None and not self._heard:
            self._heard = True
            raise KeyboardInterrupt if self.came == signal.SIGINT else Terminated

    def _note(self, number: int, _: FrameType | None) -> None:
        """Note the first signal; a second Ctrl-C more than a second later interrupts at once: the signals' handler."""
        if os.getpid() != self._process:  # a forked data worker inherits the handler, but not what it is for
            signal.signal(number, self._replaced.get(number, signal.SIG_DFL))
            os.kill(os.getpid(), number)
        elif self.came is None:
            self.came, self._came_s = number, time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._came_s > SAME_CTRL_C_S:
            raise KeyboardInterrupt


def refuse_in_one_line() -> None:
    """From now on, let an uncaught error of ddltool's own end the process with one line on stderr and the error's exit code.

    That is how the command line ends, instead of a traceback. Other exceptions are not touched.
    """
    previous = sys.excepthook
    if isinstance(previous, _OneLine):
        return
    sys.excepthook = _OneLine(previous)


@dataclass(frozen=True, slots=True)
class _OneLine:
    """A ``sys.excepthook`` that prints ddltool's errors as one line; ``previous`` gets all others."""

    previous: Callable[[type[BaseException], BaseException, TracebackType | None], object]

    def __call__(self, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        """Print the error as one line and exit with its code; hand others on."""
        if not isinstance(value, DdlToolError):
            self.previous(kind, value, trace)
            return
        sys.stderr.write(f"error: {value}\n")
        raise SystemExit(value.exit_code)


def pause_before_exit() -> None:
    """Give gloo's threads the time to drop the tensors of the last step.

    They do so a moment after the step is over, and need the interpreter for tensors that Python has seen, as a hook's
    buckets are. A thread that asks for it while it shuts down aborts the process (pytorch issue 190489), and a job that
    was done would count as failed: 13 of 150 short ones did, none of 295 with this pause.
    """
    time.sleep(EXIT_PAUSE_S)
