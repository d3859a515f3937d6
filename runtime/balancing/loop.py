"""When batch sizes are chosen: at the step's boundary while everybody waits (CPU clusters), or behind the next step (GPU).

Both are one rank's end: :meth:`Blocking.next` and :meth:`Background.next` are called once per step, on all ranks, and
return the same choice on all ranks, or None where there is none yet.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ddltool.errors import DdlToolError
from ddltool.runtime.balancing.exchange import Exchange

Floats = NDArray[np.float64]
Row = Callable[[], Floats]


class Blocking:
    """The choice that follows from a step is there when the step ends."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._step = 0
        self.waited_s = 0.0
        """Seconds in all that steps were held up."""

    def next(self, row: Row) -> Floats | None:
        """Return what was chosen from all ranks' rows of the step that has ended."""
        begin = time.perf_counter()
        chosen = self._exchange.round(self._step, row())
        self._step += 1
        self.waited_s += time.perf_counter() - begin
        return chosen

    def close(self) -> None:
        """Nothing more can be chosen. Idempotent."""
        self._exchange.interrupt()
        self._exchange.close()


class Background:
    """The choice that follows from a step comes into force one step later, and is made meanwhile by a thread.

    At the end of step t + 1 each rank takes the choice made from step t, so all change at once. Only a choice that takes
    longer than a whole step holds anybody up; :attr:`waited_s` adds that up.
    """

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._choices: queue.SimpleQueue[Floats | BaseException] = queue.SimpleQueue()
        self._under_way = 0
        self.waited_s = 0.0
        self._thread = threading.Thread(target=self._run, name="ddltool-balance", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def next(self, row: Row) -> Floats | None:
        """Hand in a step and return what was chosen from the one before; None after the first."""
        begin = time.perf_counter()
        self._rows.put(row)
        self._under_way += 1
        chosen = self._take() if self._under_way > 1 else None
        self.waited_s += time.perf_counter() - begin
        return chosen

    def _take(self) -> Floats:
        chosen = self._choices.get()
        self._under_way -= 1
        if isinstance(chosen, BaseException):
            self._choices.put(chosen)  # whoever asks again shall not wait for ever
            raise chosen
        return chosen

    def close(self) -> None:
        """End the thread; what it is waiting for nobody will use. At most a few seconds. Idempotent.

        It must not live on until the interpreter ends: that ends threads where they are, and in the middle of torch's own
        code the whole process with them.
        """
        atexit.unregister(self.close)
        self._rows.put(None)
        self._exchange.interrupt()
        self._thread.join(timeout=5.0)
        if not self._thread.is_alive():
            self._exchange.close()

    def _run(self) -> None:
        step = 0
        while (row := self._rows.get()) is not None:
            try:
                self._choices.put(self._exchange.round(step, row()))
            except DdlToolError as error:
                self._choices.put(error)
                return
            except BaseException as error:
                self._choices.put(DdlToolError(f"step {step}: choosing batch sizes failed ({error})"))
                return
            step += 1
