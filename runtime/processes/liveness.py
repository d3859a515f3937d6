"""Finds out which ranks of a job are still alive when a collective has failed. Start at :class:`LivenessMonitor`.

Torch's error of a failed collective names an address or nothing at all. So a process that sees one makes a *roll call*:
it sets the key "call" in torch.distributed's own store, and a thread of each other process answers by a key of its own;
a process that was killed or stopped does not. Nothing is pickled.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from ddltool.errors import DdlToolError

KeyStore = Any
"""A ``torch.distributed.Store``: its type hints are not those of the real one."""
WITHIN_S = 0.8
"""Seconds after which a rank that has not answered counts as missing; every process polls several times in them."""
_POLL_S = 0.1
ENDING_S = 1.8
"""Seconds from an uncaught error of a lost rank to the end of the process, the roll call and exit functions included.

Three times as long where a busy machine slows down the roll call, so that its result is still printed.
"""
STORE_GONE = "the store is gone, and with it the rank that holds it (rank 0, unless a launcher does)"
_BROKEN = re.compile(
    r"gloo/transport/|connection (closed|reset) by peer|broken pipe|ncclremoteerror|remote process exited"
    r"|pair closure|timed out waiting|watchdog caught collective operation timeout",
    re.I,
)


class LostRank(DdlToolError):
    """A rank of the job is gone, without which training cannot continue."""


class LivenessMonitor:
    """Answers roll calls for this process, and calls them. Get it by :meth:`of_this_job`: one per default process group.

    Until :meth:`close`, an uncaught error that a lost rank has caused (a LostRank, or torch's error of a connection
    that broke in ``backward``) is one line on stderr that names the rank, and exit code 1, instead of a traceback.

    Args:
        rank, world_size: this process's place in the job.
        store: the store of the process group.

    Attributes:
        passes: function that returns how many backward passes this process has begun, which is its answer to others.
    """

    _current: LivenessMonitor | None = None

    def __init__(self, rank: int, world_size: int, store: KeyStore) -> None:
        """Start the thread that answers for this process, and take over ``sys.excepthook`` until :meth:`close`."""
        self._rank = rank
        self._ranks = range(world_size)
        self._group_store = store
        store = dist.PrefixStore("ddltool/liveness", store)  # type: ignore[attr-defined]
        self._store = store
        self._answering = own_connection(store, WITHIN_S)
        self._listeners: list[Callable[[list[int]], object]] = []
        self.passes: Callable[[], int] = int  # int() is 0: no pass is counted until somebody sets it
        self._passes_by_rank: dict[int, int] = {}  # the ranks' answers
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="ddltool-liveness", daemon=True)
        self._thread.start()
        self._previous = sys.excepthook
        self._hook = self._show  # a bound method is a new object each time
        sys.excepthook = self._hook
        # A thread that is still in torch's own code when the interpreter ends aborts the process.
        atexit.register(self.close)

    @classmethod
    def of_this_job(cls) -> LivenessMonitor:
        """Return the monitor of the default process group; the first call makes it, and closes that of an earlier group."""
        store = dist.distributed_c10d._get_default_store()
        current = cls._current
        if current is not None and current._group_store is store and not current._ended.is_set():
            return current
        if current is not None:
            current.close()
        cls._current = cls(dist.get_rank(), dist.get_world_size(), store)
        return cls._current

    def add_listener(self, listener: Callable[[list[int]], object]) -> None:
        """Have ``listener`` called with the list of missing ranks when this process finds some missing."""
        self._listeners.append(listener)

    def remove_listener(self, listener: Callable[[list[int]], object]) -> None:
        """Stop calling ``listener``; nothing happens if it is not known."""
        with contextlib.suppress(ValueError):
            self._listeners.remove(listener)

    def missing_ranks(self) -> list[int] | None:
        """Call the roll: ask all ranks to answer, and return those that do not within :data:`WITHIN_S`.

        Blocks for at most 0.2 s more. If ranks are missing, the listeners are called with them. None when the store
        itself does not answer: the rank that holds it is gone.
        """
        missing = list(self._ranks)
        store_answers = threading.Event()

        def ask() -> None:
            """Answer for this rank, call the others, and remove from ``missing`` those that answer: the body of a thread."""
            with contextlib.suppress(RuntimeError):
                deadline_s = time.monotonic() + WITHIN_S
                self._store.set(f"here/{self._rank}", str(self.passes()))
                self._store.set("call", b"1")
                while missing and time.monotonic() < deadline_s:
                    for rank in list(missing):
                        if self._store.check([f"here/{rank}"]):
                            self._passes_by_rank[rank] = int(self._store.get(f"here/{rank}"))
                            missing.remove(rank)
                    store_answers.set()
                    time.sleep(0.02)

        # A thread, because a store whose holder is stopped blocks for ever.
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(WITHIN_S + 0.2)
        if not store_answers.is_set():
            return None
        missing_now = list(missing)  # the thread may still change the other list
        if missing_now:
            for listener in list(self._listeners):
                listener(missing_now)
        return missing_now

    def line(self, error: BaseException) -> str:
        """Return one line about an error that a lost rank has caused: a LostRank's own, else what a roll call finds.

        A roll call finds the first of these that holds: the store does not answer, ranks are missing, ranks have begun
        fewer backward passes than others, or only a connection is lost.
        """
        if isinstance(error, LostRank):
            return str(error)
        missing = self.missing_ranks()
        if missing is None:
            reason = STORE_GONE
        elif missing:
            reason = f"rank {', '.join(map(str, missing))} is gone"
        else:
            reason = self._ranks_behind() or "the connection to another rank is lost"
        return f"{reason}; go on from the last checkpoint"

    def _ranks_behind(self) -> str:
        """Return a clause on the ranks that have begun fewer backward passes than another, so that others wait for them.

        It is "" where all have begun equally many, and where a rank has not answered.
        """
        if len(self._passes_by_rank) < len(self._ranks):
            return ""
        ahead = max(self._ranks, key=lambda rank: self._passes_by_rank[rank])
        behind = [rank for rank in self._ranks if self._passes_by_rank[rank] < self._passes_by_rank[ahead]]
        if not behind:
            return ""
        counts = f"{self._passes_by_rank[behind[0]]} backward passes, and rank {ahead} {self._passes_by_rank[ahead]}"
        return f"rank {', '.join(map(str, behind))} has begun {counts}, each of which needs all ranks"

    def close(self) -> None:
        """Stop answering, and restore the previous ``sys.excepthook`` unless it was replaced. More calls do nothing."""
        atexit.unregister(self.close)
        self._ended.set()
        self._thread.join(timeout=_POLL_S)
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous

    def _answer(self) -> None:
        """Poll the store for a roll call of any rank, answer the first, and end: the body of the thread."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            while not self._ended.wait(_POLL_S):
                if self._answering.check(["call"]):
                    self._answering.set(f"here/{self._rank}", str(self.passes()))
                    return

    def _show(self, error_type: type[BaseException], value: BaseException, trace: TracebackType | None) -> None:
        """Print the error of a lost rank as one line and end the process; pass any other error to the previous hook.

        This is the ``sys.excepthook``, which gets uncaught errors. A timer ends the process in any case, because exit
        functions of libraries may wait for the lost rank.
        """
        if not isinstance(value, LostRank) and not is_broken(value):
            self._previous(error_type, value, trace)
            return
        _end_within(3 * ENDING_S)  # the roll call itself may take long on a busy machine
        sys.stderr.write(f"error: {self.line(value)}\n")
        sys.stderr.flush()
        # A second timer, which ends sooner: it has the time that is left after a roll call of the usual duration.
        _end_within(ENDING_S - WITHIN_S)


def _end_within(seconds: float) -> None:
    """End the process with exit code 1 after ``seconds``, unless it has ended by then: a timer in a daemon thread."""
    # At exit Python waits for all threads, child processes and exit functions of libraries: asynchronous checkpoints, pools and
    # loggers that wait for the lost rank themselves. Torch's own means (destroy_process_group, abort) end none of these.
    deadline = threading.Timer(seconds, os._exit, (1,))
    deadline.daemon = True
    deadline.start()


def is_broken(error: BaseException) -> bool:
    """Return whether ``error`` is torch's for a collective whose connection broke or whose timeout passed, by its text."""
    return isinstance(error, RuntimeError) and _BROKEN.search(str(error)) is not None


def own_connection(store: KeyStore, timeout_s: float) -> KeyStore:
    """Return a new connection to ``store``, which waits up to ``timeout_s`` for a key.

    A blocking call holds its connection, so a shared one would block all other threads of this process. A store that
    cannot be cloned is returned itself, with its own timeout.
    """
    with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):
        store = store.clone()
        wait_for_keys(store, timeout_s)
    return store


def wait_for_keys(store: KeyStore, timeout_s: float) -> None:
    """Set how many seconds ``store`` waits for a key, if it supports that."""
    with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):
        store.set_timeout(timedelta(seconds=timeout_s))


def job_timeout_s() -> float:
    """Return the timeout of the default process group's collectives in seconds; of CPU's and CUDA's, the shorter one.

    The process group must be initialised.
    """
    group = dist.group.WORLD
    assert group is not None
    limits = []
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError, AttributeError):  # no backend for this device, or one without options
            limits.append(group._get_backend(torch.device(device)).options._timeout.total_seconds())
    return min(limits, default=dist.distributed_c10d.default_pg_timeout.total_seconds())
