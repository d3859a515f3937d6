"""How ranks tell rank 0 what they did and learn what it chose: over torch.distributed's own store, no further server.

Start at :class:`Exchange`. Rank r writes its row of step t under one key; rank 0 waits for all n keys, chooses, and writes
the choice under another key that the others wait for. Per step that is three messages of a few dozen bytes for each rank; keys
that everybody is done with are deleted. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
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
KeyStore = Any
"""A ``torch.distributed.Store``: its type hints are not those of the real one."""
Choose = Callable[[Floats], Floats]


class Exchange:
    """One rank's end. All ranks make the same calls in the same order; each end belongs to one thread.

    Args:
        store: a store that all ranks share, with a connection and a timeout of its own (:func:`own`).
        rank, world_size: this process's place.
        choose: what rank 0 does with (n, m) rows: returns (k,) numbers for all ranks. Only rank 0's is called.
    """

    def __init__(self, store: KeyStore, rank: int, world_size: int, choose: Choose | None) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._choose = choose

    def round(self, step: int, row: Floats) -> Floats:
        """Return what rank 0 chose from all ranks' (m,) rows of ``step``; blocks until all have come here.

        Raises DdlToolError naming the ranks that did not come in time, or when the store is gone.
        """
        if self._rank == 0:
            return self._serve(step, row)
        mine = f"row/{step}/{self._rank}"
        try:
            self._store.set(mine, np.asarray(row, dtype="<f8").tobytes())
            text = self._store.get(f"choice/{step}")
        except RuntimeError as error:
            raise self._lost(step, "rank 0", error) from None
        self._forget(mine)
        if text == _FAILED:
            raise DdlToolError(f"step {step}: rank 0 could not choose batch sizes; see its message")
        return np.frombuffer(text, dtype="<f8")

    def _serve(self, step: int, row: Floats) -> Floats:
        """Wait for all rows, choose, and tell; a failure is told as well, so that nobody waits in vain."""
        assert self._choose is not None
        keys = [f"row/{step}/{rank}" for rank in range(1, self._world_size)]
        try:
            given = self._store.multi_get(keys) if self._store.has_extended_api() else map(self._store.get, keys)
            rows = np.stack([np.asarray(row, dtype=np.float64), *(np.frombuffer(text, dtype="<f8") for text in given)])
        except RuntimeError as error:
            missing = [str(rank) for rank, key in enumerate(keys, 1) if not self._there(key)]
            raise self._lost(step, f"rank {', '.join(missing)}" if missing else "the store", error) from None
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

    @staticmethod
    def _lost(step: int, who: str, error: RuntimeError) -> DdlToolError:
        reason = (str(error).strip().splitlines() or [""])[0][:120]
        return DdlToolError(f"step {step}: nothing came from {who}, so batch sizes are unknown ({reason})")

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
    return dist.PrefixStore(name, store)  # type: ignore[attr-defined]  # exported only where it is available


def default_store() -> KeyStore:
    """Return the store that ``init_process_group`` made."""
    return dist.distributed_c10d._get_default_store()
