"""How the ranks of a job come to one choice while it trains, such as the next batch sizes. Start at :class:`Consensus`.

Each rank proposes a row of numbers, rank 0 chooses from all rows, and all ranks learn the choice. Messages go over
torch.distributed's own store: in each round, rank r writes its row under a key of its own; rank 0 waits for all n keys
and writes the choice under another one, for which the others wait. So the store shows who has come to a round. The
first rank whose waiting time is up writes, in place of the choice, which ranks are missing, and all others read it at
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
"""Seconds that the others wait for rank 0's choice once all rows are there."""
# Each Consensus of a process has keys of its own, so that the last keys of another are not taken for answers.
_NUMBERS = itertools.count()
_NO_ROW = b"0"  # written in place of a rank's row, so that rank 0 stops waiting for it
# How a round ends, the first byte of the key "choice/<step>": with the chosen numbers (float64), with the ranks ("1,2") that
# did not come in time, are gone, or have closed their Consensus, or because choosing failed on rank 0.
_CHOSEN = b"="
_MISSING = b"?"
_GONE = b"-"
_ENDED = b"."
_FAILED = b"!"


class ConsensusError(LostRank):
    """The ranks have reached no consensus, mostly because one of them is gone."""


class Consensus:
    """One rank's part in the rounds. All ranks make the same objects and the same calls, in the same order.

    An uncaught error that a lost rank has caused becomes one line on stderr (:class:`~.liveness.LivenessMonitor`).

    Args:
        job: the ranks. With one process the store is not used.
        choose: function from the ranks' (n, m) rows to the (k,) numbers for all ranks; called on rank 0 only.
        timeout_s: seconds that a rank waits for the others in a round, from when it joins; None: as long as the job's
            process group waits in a collective.
        behind: run each round in a thread while the next step computes; its choice is returned one round later. Training
            then waits only for a round that takes longer than a step.
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
        """Connect to the store; with ``behind`` also start the thread that runs the rounds."""
        self._rank = job.rank
        self._ranks = range(job.world_size)
        self._choose = choose
        if timeout_s is not None:
            self._timeout_s = timeout_s
        else:  # a single process waits for nobody
            self._timeout_s = job_timeout_s() if job.world_size > 1 else 0.0
        self._step = 0  # number of the next round
        self._under_way: int | None = None  # number of the round in which this rank is now; None between rounds
        self._ended = False
        self._liveness: LivenessMonitor | None = None
        self._thread: threading.Thread | None = None
        if job.world_size > 1:
            if store is None:
                self._liveness = LivenessMonitor.of_this_job()
                self._liveness.add_listener(self._tell_who_is_gone)
                shared = dist.distributed_c10d._get_default_store()
                store = dist.PrefixStore(f"ddltool/consensus/{next(_NUMBERS)}", shared)  # type: ignore[attr-defined]
            # One connection to wait on, and one for other threads, which would block while the first waits.
            self._store: KeyStore = own_connection(store, self._timeout_s)
            self._shared_store: KeyStore = store
        if behind:
            self._rows: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
            self._choices: queue.SimpleQueue[Floats | DdlToolError] = queue.SimpleQueue()
            self._handed_in = 0  # rows given to the thread so far
            self._thread = threading.Thread(target=self._run, name="ddltool-consensus", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def propose(self, row: Row) -> Floats | None:
        """Give this rank's row to the next round, and return the (k,) numbers that rank 0 chose from all ranks' rows.

        They are the same on all ranks, which block until all rows are there. ``row`` is a function that returns (m,)
        numbers. With ``behind`` it is called in the thread, and the result is the choice of the round before; None at
        the first call.

        Raises ConsensusError, on all ranks that wait, naming those that did not come in time or have ended. If choosing
        fails, rank 0 raises the error itself and the others a ConsensusError. With ``behind``, later calls raise the
        same error.
        """
        if self._thread is None:
            return self._round(row())
        self._rows.put(row)
        self._handed_in += 1
        if self._handed_in == 1:
            return None
        chosen = self._choices.get()
        if isinstance(chosen, DdlToolError):
            self._choices.put(chosen)  # the thread has ended, so a later call would wait for ever
            raise chosen
        return chosen

    def _run(self) -> None:
        """Run the rounds beside training: the body of the thread, which ends at None or with the first round that fails."""
        while (row := self._rows.get()) is not None:
            try:
                self._choices.put(self._round(row()))
            except BaseException as error:
                message = f"step {self._step - 1}: choosing failed ({error})"
                self._choices.put(error if isinstance(error, DdlToolError) else DdlToolError(message))
                return

    def _round(self, row: Floats) -> Floats:
        """Return the choice of the next round, (k,), to which this rank brings ``row``, (m,); one process chooses alone."""
        step = self._step
        self._step += 1
        if len(self._ranks) == 1:
            return self._choose(np.asarray(row, dtype=np.float64)[None])
        self._under_way = step
        try:
            return self._exchange(step, row)
        finally:
            self._under_way = None

    def _exchange(self, step: int, row: Floats) -> Floats:
        """Write this rank's row of a round, then return its choice, which rank 0 makes and the others wait for.

        ``step``: number of the round; ``row``: this rank's (m,) numbers. Keys of the round before are deleted, because
        nobody reads them any more. Raises ConsensusError where the round ends without a choice, and on rank 0 what
        choosing raises.
        """
        try:
            if self._ended:
                raise self._error_of(step, _ENDED + str(self._rank).encode())
            self._store.set(f"row/{step}/{self._rank}", np.asarray(row, dtype="<f8").tobytes())
            self._delete(f"row/{step - 1}/{self._rank}")
            if self._rank != 0:
                [ending] = self._wait(step, [f"choice/{step}"])
                return self._choice_in(step, ending)
            rows = self._wait(step, [f"row/{step}/{rank}" for rank in self._ranks])
            if _NO_ROW in rows:  # written by a rank that has concluded the round already, without a choice
                return self._choice_in(step, self._store.get(f"choice/{step}"))
            self._delete(f"choice/{step - 1}")  # every rank in this round has read it
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
        """Block until all ``keys`` are in the store, and return their values in order.

        If ranks are missing when the time is up, this rank concludes the round, so that no other waits in vain. The
        keys then hold what it, or another rank before it, has written in place of rows or of the choice. If no row is
        missing by then, rank 0 gets :data:`CHOOSING_S` more to choose.
        """
        missing: list[int] = []
        for limit_s in (self._timeout_s, min(self._timeout_s, CHOOSING_S)):
            try:
                if self._store is not self._shared_store:
                    wait_for_keys(self._store, limit_s)
                return self._values(keys)
            except RuntimeError as error:
                if "timeout" not in str(error).lower():
                    raise
            missing = [rank for rank in self._ranks if not self._store.check([f"row/{step}/{rank}"])]
            if missing:
                break
            # All rows have come by now: rank 0 is choosing, or was lost just before.
        # Without a missing row it is rank 0 that has failed to write the choice.
        late_ranks = missing or [0]
        self._conclude(self._store, step, _MISSING + ",".join(map(str, late_ranks)).encode())
        return self._values(keys)

    def _values(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of ``keys``, in one message if the store supports that; blocks until they are there."""
        if self._store.has_extended_api():
            return list(self._store.multi_get(keys))
        return [self._store.get(key) for key in keys]

    def _conclude(self, store: KeyStore, step: int, text: bytes) -> bytes:
        """Write how a round ends, unless another rank has written that before; return the ending that all ranks read.

        Where a rank is missing, rows that have not come are filled in with ``_NO_ROW``, because rank 0 waits for them.

        Args:
            store: the connection to write by.
            step: number of the round.
            text: the kind of ending in its first byte (``_CHOSEN``, ``_MISSING``, ...), then the chosen numbers as
                float64 or the ranks concerned.
        """
        # compare_set writes only if the key is not set yet, and returns the value that it then has.
        ending: bytes = store.compare_set(f"choice/{step}", "", text)
        if text[:1] in (_MISSING, _GONE, _ENDED):
            for rank in self._ranks:
                store.compare_set(f"row/{step}/{rank}", "", _NO_ROW)
        return ending

    def _choice_in(self, step: int, text: bytes) -> Floats:
        """Return the (k,) chosen numbers in ``text``, the ending of a round. Raises ConsensusError if it has no choice."""
        if not text.startswith(_CHOSEN):
            raise self._error_of(step, text)
        return np.frombuffer(text[1:], dtype="<f8")

    def _error_of(self, step: int, text: bytes) -> ConsensusError:
        """Return the error for a round without a choice, from the ``text`` that it has ended with.

        That is the kind in the first byte, then the ranks concerned ("1,2"): ``_FAILED`` (no ranks), ``_MISSING`` (not in
        time), ``_GONE`` (connection lost) or ``_ENDED`` (the rank has closed its Consensus).
        """
        kind = text[:1]
        ranks = text[1:].decode()
        is_this_rank = str(self._rank) in ranks.split(",")
        if kind == _FAILED:
            what = "rank 0 could not choose batch sizes; see its message"
        elif kind in (_MISSING, _GONE) and is_this_rank:
            what = "this rank came too late, the others had given up; batch sizes are unknown"
        elif kind in (_MISSING, _GONE):
            reason = "time is up" if kind == _MISSING else "the connection is lost"
            what = f"nothing came from rank {ranks.replace(',', ', ')}, so batch sizes are unknown ({reason})"
        else:  # _ENDED
            who = "this rank is ending" if is_this_rank else f"rank {ranks} has ended"
            what = f"{who}, so batch sizes are unknown"
        return ConsensusError(f"step {step}: {what}")

    def _delete(self, key: str) -> None:
        """Delete a key if the store supports that; otherwise it keeps a few bytes per round."""
        with contextlib.suppress(RuntimeError, NotImplementedError):
            self._store.delete_key(key)

    def close(self) -> None:
        """Stop taking part, also in the middle of a round, and end the thread. More calls do nothing.

        A rank may call it at any time; a round under way then ends for all ranks without a choice. The thread must end
        before the interpreter does: a thread that is stopped inside torch's own code aborts the whole process. It waits
        in the store's code, where only a key that arrives can wake it.
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
        """End the round under way, or the next one, for all ranks, because ``ranks`` are gone."""
        with contextlib.suppress(RuntimeError):
            step = self._step if self._under_way is None else self._under_way
            self._conclude(self._shared_store, step, _GONE + ",".join(map(str, ranks)).encode())
