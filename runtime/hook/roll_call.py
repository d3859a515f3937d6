"""Who is still there, when a rank has lost another one. Start at :class:`RollCall`.

A collective that fails tells of an address or of nothing at all. So each process of a job answers for itself, in a thread,
over torch.distributed's own store: a process that was killed, or stopped, does not. Nothing is pickled.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ddltool.errors import DdlToolError
from ddltool.runtime.hook.stopping import pause_before_exit

KeyStore = Any
"""A ``torch.distributed.Store``: its type hints are not those of the real one."""
WITHIN_S = 0.8
"""A roll call takes no longer; every process answers several times within that."""
_LOOK_S = 0.1
ENDING_S = 1.8
"""From the error that nobody catches to the end of the process: the roll call, and what scripts and libraries do at exit.

On a machine so busy that the roll call itself takes longer, three times as long: the line is said first.
"""
STORE_GONE = "the store is gone, and with it the rank that holds it (rank 0, unless a launcher does)"
_BROKEN = re.compile(
    r"gloo/transport/|connection (closed|reset) by peer|broken pipe|ncclremoteerror|remote process exited"
    r"|pair closure|timed out waiting|watchdog caught collective operation timeout",
    re.I,
)


class LostRank(DdlToolError):
    """A rank is gone, and nothing can be computed without it."""


class RollCall:
    """One process's end. Start it with :meth:`of_this_job`: one for each process group, however many ask.

    Until :meth:`close` an error that nobody catches, and that comes from a lost rank, is one line on stderr that names the
    rank, and exit code 1, instead of a traceback: a LostRank, or a connection that broke in the middle of ``backward``.

    Args:
        rank, world_size: this process's place.
        store: what all processes share.

    Attributes:
        passes: returns how many backward passes this process has begun, which it answers with.
    """

    _current: RollCall | None = None

    def __init__(self, rank: int, world_size: int, store: KeyStore) -> None:
        self._rank, self._ranks = rank, range(world_size)
        self._group_store = store
        store = dist.PrefixStore("ddltool/roll", store)  # type: ignore[attr-defined]
        self._store, self._answering = store, connection(store, WITHIN_S)
        self._told: list[Callable[[list[int]], object]] = []
        self.passes: Callable[[], int] = int
        self._begun: dict[int, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="ddltool-roll-call", daemon=True)
        self._thread.start()
        self._previous = sys.excepthook
        self._hook = self._show  # a bound method is a new object each time
        sys.excepthook = self._hook
        # A thread that lives on until the interpreter ends is ended where it is, and with torch's own code the process.
        atexit.register(self.close)

    @classmethod
    def of_this_job(cls) -> RollCall:
        """Return that of the default process group."""
        store = dist.distributed_c10d._get_default_store()
        if cls._current is None or cls._current._group_store is not store or cls._current._ended.is_set():
            if cls._current is not None:
                cls._current.close()
            cls._current = cls(dist.get_rank(), dist.get_world_size(), store)
        return cls._current

    def tell(self, listener: Callable[[list[int]], object]) -> None:
        """Let ``listener`` know the ranks that are gone, when this process finds out."""
        self._told.append(listener)

    def untell(self, listener: Callable[[list[int]], object]) -> None:
        """Forget a listener."""
        with contextlib.suppress(ValueError):
            self._told.remove(listener)

    def gone(self, within_s: float = WITHIN_S) -> list[int] | None:
        """Return the ranks that do not answer within so many seconds; None where the store does not either."""
        left = list(self._ranks)
        asked = threading.Event()

        def call() -> None:
            with contextlib.suppress(RuntimeError):
                end = time.monotonic() + within_s
                self._store.set(f"here/{self._rank}", str(self.passes()))
                self._store.set("call", b"1")
                while left and time.monotonic() < end:
                    for rank in list(left):
                        if self._store.check([f"here/{rank}"]):
                            self._begun[rank] = int(self._store.get(f"here/{rank}"))
                            left.remove(rank)
                    asked.set()
                    time.sleep(0.02)

        calling = threading.Thread(target=call, daemon=True)  # a store whose holder is stopped answers never
        calling.start()
        calling.join(within_s + 0.2)
        if not asked.is_set():
            return None
        gone = list(left)
        if gone:
            for listener in list(self._told):
                listener(gone)
        return gone

    def line(self, error: BaseException) -> str:
        """Return what to say of an error that comes from a lost rank."""
        if isinstance(error, LostRank):
            return str(error)
        gone = self.gone()
        lost = STORE_GONE if gone is None else self._left_out() or "the connection to another rank is lost"
        if gone:
            lost = f"rank {', '.join(map(str, gone))} is gone"
        return f"{lost}; go on from the last checkpoint"

    def _left_out(self) -> str:
        """Return which ranks have begun fewer backward passes than another, where all have answered; "": none."""
        if len(self._begun) < len(self._ranks):
            return ""
        ahead = max(self._ranks, key=lambda rank: self._begun[rank])
        behind = [rank for rank in self._ranks if self._begun[rank] < self._begun[ahead]]
        if not behind:
            return ""
        made = f"{self._begun[behind[0]]} backward passes, and rank {ahead} {self._begun[ahead]}"
        return f"rank {', '.join(map(str, behind))} has begun {made}, each of which needs all ranks"

    def close(self) -> None:
        """Answer no more, and show errors as before unless somebody else has changed that meanwhile. Idempotent."""
        atexit.unregister(self.close)
        self._ended.set()
        self._thread.join(timeout=_LOOK_S)
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous

    def _answer(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone
            while not self._ended.wait(_LOOK_S):
                if self._answering.check(["call"]):
                    self._answering.set(f"here/{self._rank}", str(self.passes()))
                    return

    def _show(self, kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(value, LostRank) and not is_broken(value):
            self._previous(kind, value, trace)
            return
        _end_within(3 * ENDING_S)
        sys.stderr.write(f"error: {self.line(value)}\n")
        sys.stderr.flush()
        _end_within(ENDING_S - WITHIN_S)
        # All that an exit does but taking the interpreter apart, in which torch with broken connections at times aborts.
        _leave_torch_in_place()
        atexit.unregister(pause_before_exit)
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(1)


def _end_within(seconds: float) -> None:
    """End the process after so long: some exit functions wait for processes, or for servers."""
    deadline = threading.Timer(seconds, os._exit, (1,))
    deadline.daemon = True
    deadline.start()


def _leave_torch_in_place() -> None:
    """Let torch's operators be: it takes them down one by one at exit, most of the time that a process needs to end."""
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        if (found := finalizer.peek()) is not None and str(found[1].__module__).startswith("torch."):
            finalizer.atexit = False


def is_broken(error: BaseException) -> bool:
    """Return whether an error is that of a collective which has lost its connection, or its patience."""
    return isinstance(error, RuntimeError) and _BROKEN.search(str(error)) is not None


def connection(store: KeyStore, timeout_s: float) -> KeyStore:
    """Return a connection of its own to ``store`` that waits ``timeout_s`` for a key.

    A blocking call holds a connection: one that is shared would stop everybody else in this process. Where the store cannot
    give another connection, its own and its own timeout have to do.
    """
    with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):
        store = store.clone()
        wait_for_keys(store, timeout_s)
    return store


def wait_for_keys(store: KeyStore, timeout_s: float) -> None:
    """Let ``store`` wait so long for a key from now on, where it can."""
    with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):
        store.set_timeout(timedelta(seconds=timeout_s))


def job_timeout_s() -> float:
    """Return the seconds that the default process group waits in a collective, as the script gave it."""
    group = dist.group.WORLD
    assert group is not None
    limits = []
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):
            limits.append(group._get_backend(torch.device(device)).options._timeout.total_seconds())
    return min(limits, default=dist.distributed_c10d.default_pg_timeout.total_seconds())
