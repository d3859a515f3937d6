"""SIGTERM and Ctrl-C in a process of a parameter-server job: an orderly end instead of a sudden one.

Schedulers and torchrun end a job by SIGTERM to every process, which by default kills it on the spot. Start at
:class:`Interruptions`.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Terminated(SystemExit):
    """SIGTERM has come. Nobody needs to catch it: the process then ends with 143, as shells show a SIGTERM."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)

    def __str__(self) -> str:
        return "SIGTERM"


class Interruptions:
    """Raises :class:`Terminated` and KeyboardInterrupt in the main thread, and at no moment that is held off.

    Only where the script has no handler of its own, and only from the main thread; else nothing is changed.

    Attributes:
        told: whether one of the signals has come.
    """

    def __init__(self) -> None:
        self.told = False
        self._process = os.getpid()
        self._held = 0
        self._pending: BaseException | None = None
        self._replaced: dict[int, Any] = {}

    def open(self) -> None:
        """Take the signals over."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, default in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
            if signal.getsignal(number) is default:
                self._replaced[number] = signal.signal(number, self._handle)

    def close(self) -> None:
        """Give the signals back, if nobody else has taken them since."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._replaced.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)
        self._replaced = {}

    @contextmanager
    def held_off(self) -> Iterator[None]:
        """Let the block end before a signal that comes meanwhile is heard."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            pending, self._pending = self._pending, None
            if pending is not None:
                raise pending

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked data worker inherits the handler, but not what it is for
            signal.signal(number, self._replaced.get(number, signal.SIG_DFL))
            os.kill(os.getpid(), number)
            return
        if self.told and number == signal.SIGTERM:
            return  # the end is under way
        self.told = True
        error = Terminated() if number == signal.SIGTERM else KeyboardInterrupt()
        if self._held:
            self._pending = error
        else:
            raise error
