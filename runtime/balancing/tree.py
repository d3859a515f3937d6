"""How many ranks that all wait tell rank 0 what they did and learn what it chose: along a tree, by gloo messages.

Start at :class:`TreeExchange`. Each rank hands the rows of its branch to the rank above, and the choice goes down the same way,
so rank 0 has three messages in and three out per step whatever the number of ranks; through the store, whose server
is a part of rank 0, it is five for each rank. With up to a few dozen ranks that is just as well: no further connections.
The store serves only to find out which rank is lost (:mod:`ddltool.runtime.balancing.roll_call`).
"""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ddltool.runtime.balancing.exchange import Choose, Exchange, ExchangeError, KeyStore
from ddltool.runtime.balancing.roll_call import RollCall

Floats = NDArray[np.float64]
FAN_OUT = 3
_WELL, _LOST, _FAILED = 0.0, 1.0, 2.0


class TreeExchange(Exchange):
    """One rank's end, for the thread that trains. All ranks make the same calls in the same order.

    Args:
        store, rank, world_size, choose: as for :class:`Exchange`; ranks use the store only to find out who is missing.
            ``choose`` returns (n,) numbers for (n, m) rows.
        timeout_s: how long a rank waits in a round, whenever it comes to it; the same on every rank.
        fan_out: ranks below each rank.

    Made on all ranks together: it makes a process group, which :meth:`close` ends.
    """

    def __init__(
        self,
        store: KeyStore,
        rank: int,
        world_size: int,
        choose: Choose | None,
        timeout_s: float,
        fan_out: int = FAN_OUT,
    ) -> None:
        super().__init__(store, rank, world_size, choose)
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._kept: dist.ProcessGroup | None = None
        self._roll_call = RollCall(store, rank, world_size, timeout_s)
        self._timeout_s = timeout_s
        self._deadline = 0.0
        self._on_their_way: list[dist.Work] = []
        self._above = (rank - 1) // fan_out
        first = fan_out * rank + 1
        self._below = {child: _branch(child, world_size, fan_out) for child in range(first, first + fan_out)}
        self._below = {child: branch for child, branch in self._below.items() if branch}
        self._order = [rank, *(member for branch in self._below.values() for member in branch)]

    def round(self, step: int, row: Floats) -> Floats:
        """Return what rank 0 chose from all ranks' (m,) rows of ``step``; blocks until all have come here.

        Raises ExchangeError naming the ranks that are gone or did not come in time, the same on all ranks that are left.
        """
        if self._interrupted or self._group is None:
            raise self._ended(step)
        self._deadline = time.monotonic() + self._timeout_s
        self._roll_call.begin(step)
        rows, state = self._collect(np.asarray(row, dtype=np.float64))
        answer = torch.zeros(1 + self._world_size, dtype=torch.float64)
        answer[0] = state
        if self._rank:
            message = torch.cat((answer[:1], rows.flatten()))
            if not (self._send(message, self._above) and self._receive(answer, self._above)):
                answer[0] = _LOST
        elif state == _WELL:
            try:
                answer[1:] = torch.as_tensor(self._chosen(rows))
            except BaseException:
                answer[0] = _FAILED
                self._tell(answer)
                raise
        # A rank below that is gone when it is to be told, the others would miss in the next step only.
        if answer[0] == _LOST or not self._tell(answer):
            raise self._loss(step, answer)
        self._roll_call.end()
        if answer[0] == _FAILED:
            raise ExchangeError(f"step {step}: rank 0 could not choose batch sizes; see its message")
        return answer[1:].numpy()

    def look(self) -> None:
        """Note which ranks' connections are broken; only when the job is at an end, since the others get a message."""
        for rank in range(self._world_size if self._group is not None else 0):
            if rank != self._rank:
                self._send(torch.zeros(1), rank, wait=False)
        # What is still under way goes with the process: to end a broken group now could end the process by a signal.
        self._kept, self._group = self._group, None

    def missing(self, within_s: float) -> list[int] | None:
        """Return the ranks that are lost, found out within so many seconds; None where the store itself is gone."""
        verdict = self._roll_call.decide(within_s)
        return None if verdict is None else list(verdict.lost)

    def close(self) -> None:
        """End the process group and the thread. Each rank when it likes, also after a failure; idempotent."""
        group, self._group = self._group, None
        self._interrupted = True
        self._roll_call.close()
        if self._kept is None:
            self._on_their_way.clear()
        # Whoever ends the whole job first has ended this group with it.
        if group is not None and dist.is_initialized():
            with contextlib.suppress(ValueError, AssertionError):
                dist.destroy_process_group(group)

    def _chosen(self, rows: Tensor) -> Floats:
        assert self._choose is not None
        in_order = np.empty(tuple(rows.shape))
        in_order[self._order] = rows.numpy()
        return self._choose(in_order)

    def _collect(self, row: Floats) -> tuple[Tensor, float]:
        """Return the (k, m) rows of this rank and all below it, in the tree's order, and whether all came."""
        rows = torch.zeros((len(self._order), len(row)), dtype=torch.float64)
        rows[0] = torch.from_numpy(row)
        begin = 1
        for child, branch in self._below.items():
            came = torch.empty(1 + len(branch) * len(row), dtype=torch.float64)
            if not self._receive(came, child) or came[0]:
                return rows, _LOST
            rows[begin : begin + len(branch)] = came[1:].view(len(branch), len(row))
            begin += len(branch)
        return rows, _WELL

    def _tell(self, answer: Tensor) -> bool:
        """Return whether the answer went to all ranks below. Nobody waits for those who are told of a loss."""
        went = [self._send(answer, child, wait=bool(answer[0] != _LOST)) for child in self._below]
        return all(went)

    def _send(self, message: Tensor, rank: int, wait: bool = True) -> bool:
        """Return whether it went out; the group's own calls take half the time of torch.distributed's."""
        assert self._group is not None
        try:
            work = self._group.send([message], rank, 0)
            if wait:
                work.wait(self._left())
            else:
                self._on_their_way.append(work)  # what is let go of does not arrive
        except RuntimeError as error:
            return self._failed(rank, error)
        return True

    def _receive(self, message: Tensor, rank: int) -> bool:
        assert self._group is not None
        try:
            self._group.recv([message], rank, 0).wait(self._left())
        except RuntimeError as error:
            return self._failed(rank, error)
        return True

    def _left(self) -> timedelta:
        """Return what is left of the round's time; at least a little, since 0 would stand for no limit."""
        return timedelta(seconds=max(0.1, self._deadline - time.monotonic()))

    def _failed(self, rank: int, error: RuntimeError) -> bool:
        """Note a connection that broke. When this rank's time is up gloo closes all of them, which says nothing of others."""
        text = str(error).lower()
        if "timed out" not in text and "timeout" not in text:
            self._roll_call.broken.add(rank)
        return False

    def _loss(self, step: int, answer: Tensor) -> ExchangeError:
        """Tell the ranks below, find out together with all others who is lost, and return the error that says so."""
        if answer[0] == _LOST:
            self._roll_call.broken.update(rank for rank in range(self._world_size) if answer[1 + rank])
            for rank in self._roll_call.broken:
                answer[1 + rank] = 1.0
            self._tell(answer)
        verdict = self._roll_call.decide()
        if verdict is None:  # the store went with rank 0, or with the launcher: this rank knows what it saw itself
            seen = sorted(self._roll_call.broken)
            store = [] if 0 in seen else ["the store (of rank 0 or a launcher)"]
            gone = " and ".join([*(f"rank {rank}" for rank in seen), *store])
            return self._nothing(step, gone, broken=True)
        if self._rank in verdict.lost:
            problem = "this rank came too late, the others had given up"
            return ExchangeError(f"step {step}: {problem}; batch sizes are unknown")
        who = f"rank {', '.join(map(str, verdict.lost))}" if verdict.lost else "another rank in time"
        return self._nothing(step, who, verdict.broken)

    @staticmethod
    def _nothing(step: int, who: str, broken: bool) -> ExchangeError:
        reason = "the connection is lost" if broken else "time is up"
        return ExchangeError(f"step {step}: nothing came from {who}, so batch sizes are unknown ({reason})")


def _branch(rank: int, world_size: int, fan_out: int) -> list[int]:
    """Return ``rank`` and all ranks below it, each before those below it; empty where there is no such rank."""
    if rank >= world_size:
        return []
    first = fan_out * rank + 1
    return [
        rank,
        *(member for child in range(first, first + fan_out) for member in _branch(child, world_size, fan_out)),
    ]
