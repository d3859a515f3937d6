"""How the ranks of a job come to one choice while it trains, such as the next batch sizes. Start at :class:`Consensus`.

Each rank proposes a row of numbers, rank 0 chooses from all rows, and all ranks learn the choice. Messages go over
torch.distributed's own store: in each round, rank r writes its row under a key of its own; rank 0 waits for all n keys
and writes the choice under another one, for which the others wait. So the store shows who has come to a round. When the
time is up, the first rank to notice writes there, in place of the choice, who has not come, and all others read it at
once. Nothing is pickled.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch.distributed as dist

from ddltool.arrays import Floats
from ddltool.errors import DdlToolError
from ddltool.runtime.processes.job import DistributedJob
from ddltool.runtime.processes.liveness import (
    STORE_GONE,
    KeyStore,
    LivenessMonitor,
    LostRank,
    job_timeout_s,
    own_connection,
    wait_for_keys,
)

Choose = Callable[[Floats], Floats]
Row = Callable[[], Floats]
CHOOSING_S = 1.0
"""Choosing takes no longer, once all have come."""
# Each agreement of a process has keys of its own: the last ones of another would be taken for answers.
_NUMBERS = itertools.count()
_NO_ROW = b"0"  # in place of a rank's row, so that rank 0 waits for it no more
# How a round ends: with numbers, or with the ranks that did not come, are gone, or have ended, or because choosing failed.
_CHOSEN, _MISSING, _GONE, _ENDED, _FAILED = b"=", b"?", b"-", b".", b"!"


class ConsensusError(LostRank):
    """Ranks have reached no consensus, mostly because one is gone."""


class Consensus:
    """One rank's part. All ranks make the same objects and the same calls, in the same order.

    An error that nobody catches, and that comes from a lost rank, is one line on stderr
    (:class:`~.liveness.LivenessMonitor`).

    Args:
        job: the ranks. With one process the store is not used.
        choose: what rank 0 does with (n, m) rows: returns (k,) numbers for all ranks. Only rank 0's is called.
        timeout_s: seconds that a rank waits for the others in a round, from its own coming on; None: as long as the
            job's process group waits in a collective.
        behind: a round goes on in a thread while the next step computes, and its choice comes into force one step
            later; only a round that takes longer than a whole step holds anybody up.
        store: a store that all ranks share, with keys of this object's own; None: that of ``init_process_group``.
    """

    def __init__(
        self,
        job: DistributedJob,
        choose: Choose,
        *,
        timeout_s: float | None = None,
        behind: bool = False,
        store: KeyStore | None = None,
    ) -> None:
        """Connect to the store; ``behind`` training, also start the thread that goes through the rounds."""
        self._rank, self._ranks = job.rank, range(job.world_size)
        self._choose = choose
        self._timeout_s = job_timeout_s() if timeout_s is None and job.world_size > 1 else timeout_s or 0.0
        self._step = 0  # number of the next round
        self._under_way: int | None = None  # number of the round in which this rank is now
        self._ended = False
        self._liveness: LivenessMonitor | None = None
        self._thread: threading.Thread | None = None
        if job.world_size > 1:
            if store is None:
                self._liveness = LivenessMonitor.of_this_job()
                self._liveness.add_listener(self._tell_who_is_gone)
                shared = dist.distributed_c10d._get_default_store()
                store = dist.PrefixStore(f"ddltool/consensus/{next(_NUMBERS)}", shared)  # type: ignore[attr-defined]
            # One connection to wait over, and one for other threads, which a wait must not hold up.
            self._store: KeyStore = own_connection(store, self._timeout_s)
            self._shared_store: KeyStore = store
        if behind:
            self._rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
            self._choices: queue.SimpleQueue[Floats | DdlToolError] = queue.SimpleQueue()
            self._handed_in = 0
            self._thread = threading.Thread(target=self._run, name="ddltool-consensus", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def propose(self, row: Row) -> Floats | None:
        """Bring this rank's row to a round, and return the (k,) numbers that rank 0 chose from all ranks' rows.

        They are the same on all ranks, which wait for each other. ``row`` returns (m,) numbers. ``behind`` training it
        is called in the thread, and the result is the choice of the round before, None the first time.

        Raises ConsensusError naming the ranks that did not come in time or have ended, on all that wait; rank 0's own
        error where it could not choose, and a ConsensusError that says so elsewhere.
        """
        if self._thread is None:
            return self._round(row())
        self._rows.put(row)
        self._handed_in += 1
        if self._handed_in == 1:
            return None
        chosen = self._choices.get()
        if isinstance(chosen, DdlToolError):
            self._choices.put(chosen)  # whoever asks again shall not wait for ever
            raise chosen
        return chosen

    def _run(self) -> None:
        """Go through the rounds behind training: the body of the thread, which ends with the first round that fails."""
        while (row := self._rows.get()) is not None:
            try:
                self._choices.put(self._round(row()))
            except BaseException as error:
                refusal = f"step {self._step - 1}: choosing failed ({error})"
                self._choices.put(error if isinstance(error, DdlToolError) else DdlToolError(refusal))
                return

    def _round(self, row: Floats) -> Floats:
        """Return the choice of the next round, to which this rank brings ``row``, (m,); a single process chooses by itself."""
        step, self._step = self._step, self._step + 1
        if len(self._ranks) == 1:
            return self._choose(np.asarray(row, dtype=np.float64)[None])
        self._under_way = step
        try:
            return self._exchange(step, row)
        finally:
            self._under_way = None

    def _exchange(self, step: int, row: Floats) -> Floats:
        """Write this rank's row of a round; on rank 0 wait for all rows and choose, elsewhere wait for the choice.

        Keys of the round before are deleted, as nobody reads them any more. Raises ConsensusError where the round ends
        without a choice.
        """
        try:
            if self._ended:
                raise self._error_of(step, _ENDED + str(self._rank).encode())
            self._store.set(f"row/{step}/{self._rank}", np.asarray(row, dtype="<f8").tobytes())
            self._delete(f"row/{step - 1}/{self._rank}")
            if self._rank:
                return self._choice_in(step, self._wait(step, [f"choice/{step}"])[0])
            rows = self._wait(step, [f"row/{step}/{rank}" for rank in self._ranks])
            if _NO_ROW in rows:  # written by somebody who has given up or ended, after it said so
                return self._choice_in(step, self._store.get(f"choice/{step}"))
            self._delete(f"choice/{step - 1}")  # who is in this round has read it
        except RuntimeError as error:
            lines = str(error).splitlines() or [type(error).__name__]
            raise ConsensusError(f"step {step}: {STORE_GONE} ({lines[0]}), so batch sizes are unknown") from None
        try:
            chosen = self._choose(np.stack([np.frombuffer(text, dtype="<f8") for text in rows]))
        except BaseException:
            self._conclude(self._store, step, _FAILED)
            raise
        ending = self._conclude(self._store, step, _CHOSEN + np.asarray(chosen, dtype="<f8").tobytes())
        return self._choice_in(step, ending)

    def _wait(self, step: int, keys: Sequence[str]) -> list[bytes]:
        """Return the values of ``keys``, in their order, when all of them are there.

        When the time is up, this rank ends the round, so that no other waits in vain. The keys then hold what it, or
        another rank before it, has written there in place of rows or of the choice. Once all rows are there, choosing
        has a time of its own.
        """
        for limit_s in (self._timeout_s, min(self._timeout_s, CHOOSING_S)):
            try:
                if self._store is not self._shared_store:
                    wait_for_keys(self._store, limit_s)
                return self._values(keys)
            except RuntimeError as error:
                if "timeout" not in str(error).lower():
                    raise
            if missing := [rank for rank in self._ranks if not self._store.check([f"row/{step}/{rank}"])]:
                break  # else all have come by now, and rank 0 is choosing, or has gone just before
        self._conclude(self._store, step, _MISSING + ",".join(map(str, missing or [0])).encode())
        return self._values(keys)

    def _values(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of ``keys``, in one message where the store can."""
        return list(self._store.multi_get(keys) if self._store.has_extended_api() else map(self._store.get, keys))

    def _conclude(self, store: KeyStore, step: int, text: bytes) -> bytes:
        """Write how a round ends, unless another rank has done so before; return the ending that all ranks read.

        ``text``: the kind of ending in its first byte, then the numbers chosen or the ranks concerned. Where a rank is
        missing, rows that have not come are filled in, as rank 0 waits for them.
        """
        ending: bytes = store.compare_set(f"choice/{step}", "", text)
        if text[:1] in (_MISSING, _GONE, _ENDED):
            for rank in self._ranks:  # rank 0 waits for these
                store.compare_set(f"row/{step}/{rank}", "", _NO_ROW)
        return ending

    def _choice_in(self, step: int, text: bytes) -> Floats:
        """Return the (k,) chosen numbers from ``text``, the ending of a round. Raises ConsensusError where it has no choice."""
        if not text.startswith(_CHOSEN):
            raise self._error_of(step, text)
        return np.frombuffer(text[1:], dtype="<f8")

    def _error_of(self, step: int, text: bytes) -> ConsensusError:
        """Return the error for a round without a choice, from its ending ``text``: a kind, and the ranks concerned."""
        ending, ranks = text[:1], text[1:].decode()
        is_mine = str(self._rank) in ranks.split(",")
        if ending == _FAILED:
            what = "rank 0 could not choose batch sizes; see its message"
        elif ending in (_MISSING, _GONE) and is_mine:
            what = "this rank came too late, the others had given up; batch sizes are unknown"
        elif ending in (_MISSING, _GONE):
            reason = "time is up" if ending == _MISSING else "the connection is lost"
            what = f"nothing came from rank {ranks.replace(',', ', ')}, so batch sizes are unknown ({reason})"
        else:
            what = f"{'this rank is ending' if is_mine else f'rank {ranks} has ended'}, so batch sizes are unknown"
        return ConsensusError(f"step {step}: {what}")

    def _delete(self, key: str) -> None:
        """Delete a key, where the store can; others keep a few bytes a round."""
        with contextlib.suppress(RuntimeError, NotImplementedError):
            self._store.delete_key(key)

    def close(self) -> None:
        """End the thread, also in the middle of a round; no more choices are made. More calls do nothing.

        Each rank calls it when it likes. The thread must not live on until the interpreter ends, which ends threads
        where they are, and the whole process with them if they are in torch's own code. The thread waits outside the
        interpreter, where only a key that comes can wake it.
        """
        self._ended = True
        if self._thread is not None and self._thread.is_alive():
            atexit.unregister(self.close)
            self._rows.put(None)
            if self._under_way is not None:
                with contextlib.suppress(RuntimeError):
                    self._conclude(self._shared_store, self._under_way, _ENDED + str(self._rank).encode())
            self._thread.join(timeout=5.0)
        if self._liveness is not None:
            self._liveness.remove_listener(self._tell_who_is_gone)

    def _tell_who_is_gone(self, ranks: list[int]) -> None:
        """End the round under way for all that wait in it, as ``ranks`` are gone."""
        with contextlib.suppress(RuntimeError):
            step = self._step if self._under_way is None else self._under_way
            self._conclude(self._shared_store, step, _GONE + ",".join(map(str, ranks)).encode())
