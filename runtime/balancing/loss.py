"""How a rank ends when another one is gone: in one line that says which, not in a traceback of torch's.

A rank that is killed shows in the others as a broken connection in the middle of ``backward``. Start at :class:`LossReport`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
from collections.abc import Callable
from types import TracebackType

from ddltool.runtime.balancing.exchange import Exchange, ExchangeError

ROLL_CALL_S = 3.0
_BROKEN = re.compile(
    r"gloo/transport/|connection (closed|reset) by peer|broken pipe|ncclremoteerror|remote process exited", re.I
)


class LossReport:
    """Makes an error that nobody catches, and that comes from a lost rank, one line on stderr and exit code 1.

    All other errors go where they went before.

    Args:
        exchange: where the ranks that are left find out who is missing; None: it cannot be found out.
        stop: called first, so that nothing of ours waits for a rank that is gone.
    """

    def __init__(self, exchange: Exchange | None, stop: Callable[[], None]) -> None:
        self._exchange = exchange
        self._stop = stop
        self._previous = sys.excepthook
        self._hook = self._show  # a bound method is a new object each time
        sys.excepthook = self._hook

    def close(self) -> None:
        """Show errors as before, unless somebody else has changed that meanwhile."""
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous

    def _show(self, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        line = self._line(value)
        if line is None:
            self._previous(kind, value, trace)
            return
        sys.stderr.write(f"error: {line}\n")
        # All that an exit does but taking the interpreter apart, in which torch with broken connections at times aborts.
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)

    def _line(self, value: BaseException) -> str | None:
        if isinstance(value, ExchangeError):
            self._stop()
            return str(value)
        if not isinstance(value, RuntimeError) or not _BROKEN.search(str(value)):
            return None
        if self._exchange is not None:
            self._exchange.look()
        self._stop()
        gone = "the connection to another rank is lost"
        if self._exchange is not None:
            missing = self._exchange.missing(ROLL_CALL_S)
            if missing is None:
                gone = "the store is gone, and with it the rank that holds it (rank 0, unless a launcher does)"
            elif missing:
                gone = f"rank {', '.join(map(str, missing))} is gone"
        return f"{gone}; go on from the last checkpoint"
