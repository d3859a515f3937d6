"""How many ranks that all wait tell rank 0 what they did and learn what it chose: along a tree, by gloo messages.

Start at :class:`TreeExchange`. Each rank hands the rows of its branch to the rank above, and the choice goes down the same way,
so rank 0 has three messages in and three out per step whatever the number of ranks; through the store, whose server
is a part of rank 0, it is five for each rank. With up to a few dozen ranks that is just as well: no further connections.
"""

from __future__ import annotations

from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ddltool.runtime.batch_control_exchange import Choose, Exchange, ExchangeError, KeyStore

Floats = NDArray[np.float64]
FAN_OUT = 3
ROLL_CALL_S = 3.0
_WELL, _LOST, _FAILED = 0.0, 1.0, 2.0


class TreeExchange(Exchange):
    """One rank's end, for the thread that trains. All ranks make the same calls in the same order.

    Args:
        store, rank, world_size, choose: as for :class:`Exchange`; ranks use the store only to find out who is missing.
            ``choose`` returns (n,) numbers for (n, m) rows.
        timeout_s: how long to wait for others; the same on every rank.
        fan_out: ranks below each rank.

    Made on all ranks together: it makes a process group.
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
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._on_their_way: list[dist.Work] = []
        self._above = (rank - 1) // fan_out
        first = fan_out * rank + 1
        self._below = {child: _branch(child, world_size, fan_out) for child in range(first, first + fan_out)}
        self._below = {child: branch for child, branch in self._below.items() if branch}
        self._order = [rank, *(member for branch in self._below.values() for member in branch)]

    def round(self, step: int, row: Floats) -> Floats:
        """Return what rank 0 chose from all ranks' (m,) rows of ``step``; blocks until all have come here.

        Raises ExchangeError naming the ranks that are gone or did not come in time.
        """
        if self._interrupted:
            raise self._ended(step)
        rows, state = self._collect(np.asarray(row, dtype=np.float64))
        answer = torch.full((1 + self._world_size,), state, dtype=torch.float64)
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
        self._tell(answer)
        if answer[0] == _LOST:
            raise self._nobody(step)
        if answer[0] == _FAILED:
            raise ExchangeError(f"step {step}: rank 0 could not choose batch sizes; see its message")
        return answer[1:].numpy()

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

    def _tell(self, answer: Tensor) -> None:
        """Send the answer to the ranks below. Of those who are told of a loss some may be gone: nobody waits for them."""
        for child in self._below:
            self._send(answer, child, wait=bool(answer[0] != _LOST))

    def _send(self, message: Tensor, rank: int, wait: bool = True) -> bool:
        """Return whether it went out; the group's own calls take half the time of torch.distributed's."""
        try:
            work = self._group.send([message], rank, 0)
            if wait:
                work.wait()
            else:
                self._on_their_way.append(work)  # what is let go of does not arrive
        except RuntimeError:
            return False
        return True

    def _receive(self, message: Tensor, rank: int) -> bool:
        try:
            self._group.recv([message], rank, 0).wait()
        except RuntimeError:
            return False
        return True

    def _nobody(self, step: int) -> ExchangeError:
        gone = self.missing(ROLL_CALL_S)
        who = "the store" if gone is None else f"rank {', '.join(map(str, gone))}" if gone else "another rank in time"
        return ExchangeError(f"step {step}: nothing came from {who}, so batch sizes are unknown")


def _branch(rank: int, world_size: int, fan_out: int) -> list[int]:
    """Return ``rank`` and all ranks below it, each before those below it; empty where there is no such rank."""
    if rank >= world_size:
        return []
    first = fan_out * rank + 1
    return [
        rank,
        *(member for child in range(first, first + fan_out) for member in _branch(child, world_size, fan_out)),
    ]
