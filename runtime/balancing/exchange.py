"""How ranks tell rank 0 what they did and learn what it chose: over torch.distributed's own store, no further server.

Start at :class:`Exchange`. Rank r writes its row of step t under one key; rank 0 waits for all n keys, chooses, and writes
the choice under another key that the others wait for. Per step that is three messages of a few dozen bytes for each rank; keys
that everybody is done with are deleted. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from ddltool.errors import DdlToolError

Floats = NDArray[np.float64]
TIMEOUT_S = 300.0
_FAILED = b"-"
_MISSING = b"!"
_ENDED = b"."
_NOTHING = "step {}: nothing came from {}, so batch sizes are unknown"
KeyStore = Any
"""A ``torch.distributed.Store``: its type hints are not those of the real one."""
Choose = Callable[[Floats], Floats]


class ExchangeError(DdlToolError):
    """Ranks have not come to an agreement, mostly because one is gone."""


class Exchange:
    """One rank's end. All ranks make the same calls in the same order; each end belongs to one thread.

    Args:
        store: a store that all ranks share, with a connection and a timeout of its own (:func:`own`).
        rank, world_size: this process's place.
        choose: what rank 0 does with (n, m) rows: returns (k,) numbers for all ranks. Only rank 0's is called.
        other: another connection to the keys of ``store``, for :meth:`interrupt`; None: it cannot be interrupted.
    """

    def __init__(
        self, store: KeyStore, rank: int, world_size: int, choose: Choose | None, other: KeyStore | None = None
    ) -> None:
        self._store = store
        self._other = other
        self._under_way: int | None = None
        self._interrupted = False
        self._rank = rank
        self._world_size = world_size
        self._choose = choose

    def round(self, step: int, row: Floats) -> Floats:
        """Return what rank 0 chose from all ranks' (m,) rows of ``step``; blocks until all have come here.

        Raises DdlToolError naming the ranks that did not come in time, or when the store is gone.
        """
        self._under_way = step
        if self._interrupted:
            raise self._ended(step)
        if self._rank == 0:
            return self._serve(step, row)
        mine = f"row/{step}/{self._rank}"
        try:
            self._store.set(mine, np.asarray(row, dtype="<f8").tobytes())
            text = self._store.get(f"choice/{step}")
        except RuntimeError as error:
            raise self._lost(step, "rank 0", error) from None
        if self._interrupted:
            raise self._ended(step)  # rank 0 may still be about to read this row
        self._forget(mine)
        if text.startswith(_MISSING):
            raise ExchangeError(_NOTHING.format(step, text.removeprefix(_MISSING).decode()))
        if text.startswith(_ENDED):
            who = text.removeprefix(_ENDED).decode()
            raise ExchangeError(f"step {step}: rank {who} has ended, so batch sizes are unknown")
        if text == _FAILED:
            raise ExchangeError(f"step {step}: rank 0 could not choose batch sizes; see its message")
        return np.frombuffer(text, dtype="<f8")

    def _serve(self, step: int, row: Floats) -> Floats:
        """Wait for all rows, choose, and tell; a failure is told as well, so that nobody waits in vain."""
        assert self._choose is not None
        keys = [f"row/{step}/{rank}" for rank in range(1, self._world_size)]
        try:
            given = self._store.multi_get(keys) if self._store.has_extended_api() else map(self._store.get, keys)
            given = list(given)
            if self._interrupted:
                self._end(self._store, step)
                raise self._ended(step)
            rows = np.stack([np.asarray(row, dtype=np.float64), *(np.frombuffer(text, dtype="<f8") for text in given)])
        except RuntimeError as error:
            missing = [str(rank) for rank, key in enumerate(keys, 1) if not self._there(key)]
            who = f"rank {', '.join(missing)}" if missing else "the store"
            with contextlib.suppress(RuntimeError):
                self._store.set(f"choice/{step}", _MISSING + who.encode())
            raise self._lost(step, who, error) from None
        try:
            chosen = self._choose(rows)
        except BaseException:
            self._store.set(f"choice/{step}", _FAILED)
            raise
        self._store.set(f"choice/{step}", np.asarray(chosen, dtype="<f8").tobytes())
        if step:
            self._forget(f"choice/{step - 1}")  # who is in this step has read that of the last
        return chosen

    def _there(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError:
            return True

    def interrupt(self) -> None:
        """Let a round that is under way in another thread end in an error; nothing more can be asked afterwards.

        It waits outside the interpreter, where only a key that comes can wake it: this writes the ones it waits for.
        """
        self._interrupted = True
        if self._other is None or self._under_way is None:
            return
        step = self._under_way
        with contextlib.suppress(RuntimeError):
            if self._rank == 0:  # nobody else reads rows
                for rank in range(1, self._world_size):
                    self._other.set(f"row/{step}/{rank}", _FAILED)
            else:
                self._end(self._other, step)

    def _end(self, store: KeyStore, step: int) -> None:
        """Say in place of the choice that this rank has ended, unless there is one."""
        with contextlib.suppress(RuntimeError):
            store.compare_set(f"choice/{step}", "", _ENDED.decode() + str(self._rank))

    def look(self) -> None:
        """Note what shows who is lost as long as this end is open: before :meth:`close`, for :meth:`missing` after it."""

    def close(self) -> None:
        """Let go of what this end holds; after :meth:`interrupt`, when no round is under way any more. Idempotent."""

    def missing(self, within_s: float) -> list[int] | None:
        """Return the ranks that do not call this within so many seconds; None where the store itself is gone.

        For ranks that have lost another one, to find out which. Only after :meth:`interrupt`.
        """
        store = self._other if self._other is not None else self._store
        try:
            store.set(f"alive/{self._rank}", b"1")
            left, end = set(range(self._world_size)), time.monotonic() + within_s
            while left and time.monotonic() < end:
                left = {rank for rank in left if not store.check([f"alive/{rank}"])}
                time.sleep(0.05)
        except RuntimeError:
            return None
        return sorted(left)

    @staticmethod
    def _ended(step: int) -> ExchangeError:
        return ExchangeError(f"step {step}: this rank is ending, so batch sizes are unknown")

    @staticmethod
    def _lost(step: int, who: str, error: RuntimeError) -> ExchangeError:
        text = str(error)
        reason = "time is up" if "timeout" in text.lower() else "the connection is lost"
        return ExchangeError(f"{_NOTHING.format(step, who)} ({reason})")

    def _forget(self, key: str) -> None:
        # Stores that cannot delete keep a few bytes a step.
        with contextlib.suppress(RuntimeError, NotImplementedError):
            self._store.delete_key(key)


def own(store: KeyStore, name: str, timeout_s: float = TIMEOUT_S) -> KeyStore:
    """Return a connection of its own to ``store``, with all keys under ``name``, that waits ``timeout_s`` for a key.

    A blocking call holds a connection: one that is shared would stop everybody else in this process. Where the store cannot
    give another connection, its own and its own timeout have to do.
    """
    with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):
        store = store.clone()
        store.set_timeout(timedelta(seconds=timeout_s))
    return under(store, name)


def under(store: KeyStore, name: str) -> KeyStore:
    """Return ``store`` with all keys under ``name``, over the same connection."""
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]  # exported only where it is available


def default_store() -> KeyStore:
    """Return the store that ``init_process_group`` made."""
    return dist.distributed_c10d._get_default_store()
