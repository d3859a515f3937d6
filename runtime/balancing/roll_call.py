"""Which rank it was, when one of many that wait for each other gives up: so that no rank that lives is named as lost.

Start at :class:`RollCall`. Ranks come to a round at different times and so give up at different times, and one that waits
inside gloo cannot be asked. So each that waits for longer than a moment says in the store that it has come, each whose
connection to another one breaks says to whom, and each that gives up says that it lives. The first to have heard all that
decides for all.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from dataclasses import dataclass
from typing import Self

from ddltool.runtime.balancing.exchange import KeyStore

LISTEN_S = 3.0
GRACE_S = 1.0
_MARK_AFTER_S = 1.0  # noticed at most twice as late, which must be less than LISTEN_S
_VERDICT = "verdict"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Who is lost: what all ranks say, as far as the store lets them."""

    lost: tuple[int, ...]
    """Ranks in order; empty: all have come by now, but not in time."""
    broken: bool
    """True: their connections broke; False: they did not come in time."""

    def encode(self) -> str:
        """Return it as the store keeps it."""
        return f"{'broken' if self.broken else 'late'}:{','.join(map(str, self.lost))}"

    @classmethod
    def decode(cls, text: bytes) -> Self:
        """Return what :meth:`encode` wrote."""
        kind, _, ranks = text.decode().partition(":")
        return cls(lost=tuple(int(rank) for rank in ranks.split(",") if rank), broken=kind == "broken")


class RollCall:
    """One rank's part. The store is touched only in rounds that take longer than a moment.

    Args:
        store: a store that all ranks share, with keys of this job's own.
        rank, world_size: this process's place.
        timeout_s: how long a rank waits in a round.

    Attributes:
        broken: ranks to which the connection of this rank, or of one that told it so, broke.
    """

    def __init__(self, store: KeyStore, rank: int, world_size: int, timeout_s: float) -> None:
        self.broken: set[int] = set()
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._every_s = min(_MARK_AFTER_S, timeout_s / 4)
        self._next = 0
        self._waiting: tuple[float, int] | None = None
        """Since when this rank waits in which round; in one piece, for another thread reads it."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._mark, name="ddltool-roll-call", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def begin(self, step: int) -> None:
        """This rank has come to the round of ``step`` and waits for others."""
        self._next = step
        self._waiting = (time.monotonic(), step)

    def end(self) -> None:
        """The round went well."""
        self._waiting = None
        self._next += 1

    def close(self) -> None:
        """End the thread; :meth:`decide` works all the same. Idempotent."""
        atexit.unregister(self.close)
        self._over.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _mark(self) -> None:
        """Say in the store that this rank has come, once per round that takes long."""
        marked = -1
        while not self._over.wait(self._every_s):
            waiting = self._waiting
            if waiting is None or marked == waiting[1] or time.monotonic() - waiting[0] < self._every_s:
                continue
            step = waiting[1]
            try:
                self._store.set(f"came/{self._rank}", str(step))
            except RuntimeError:
                return  # without a store there is nobody to tell
            marked = step

    def decide(self, within_s: float = LISTEN_S) -> Verdict | None:
        """Return who is lost, after having listened to the others for at most ``within_s`` seconds; None: the store is gone.

        A rank to which a connection broke and that does not say that it lives. Where there is none: each rank that neither
        says so nor has come to this round.
        """
        try:
            self._store.set(f"alive/{self._rank}", b"1")
            for rank in self.broken:
                self._store.set(f"broken/{rank}", b"1")
            others = [f"alive/{rank}" for rank in range(self._world_size) if rank not in self.broken]
            begin = time.monotonic()
            while (spent := time.monotonic() - begin) < within_s:
                if self._store.check([_VERDICT]):
                    break
                if spent >= min(GRACE_S, within_s / 2) and self._store.check(others):
                    break
                time.sleep(0.1)
            if not self._store.check([_VERDICT]):
                return Verdict.decode(self._store.compare_set(_VERDICT, "", self._opinion().encode()))
            return Verdict.decode(self._store.get(_VERDICT))
        except RuntimeError:
            return None

    def _opinion(self) -> Verdict:
        silent = [rank for rank in range(self._world_size) if not self._store.check([f"alive/{rank}"])]
        broken = tuple(rank for rank in silent if self._store.check([f"broken/{rank}"]))
        if broken:
            return Verdict(lost=broken, broken=True)
        return Verdict(lost=tuple(rank for rank in silent if not self._has_come(rank)), broken=False)

    def _has_come(self, rank: int) -> bool:
        mark = f"came/{rank}"
        with contextlib.suppress(ValueError):
            return bool(self._store.check([mark])) and int(self._store.get(mark)) >= self._next
        return False
