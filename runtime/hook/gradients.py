"""DDP's plain average of gradients, timed. Start at :meth:`TimedAverage.reduce`.

Losses come weighed by their ranks' samples (:mod:`~ddltool.runtime.hook.weighing`), so that this average is the mean over
all samples. Without anybody who wants times DDP's own is used.
"""

# No `from __future__ import annotations` here: DDP compares the annotations of a communication hook with real types.

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ddltool.runtime.hook.telemetry import Exchange

EXCHANGES_PER_BEACON = 10


class Recorder(Protocol):
    """Who wants to know about exchanges of gradients: telemetry, or what chooses batch sizes."""

    def begin_exchange(self, samples: int, total: int) -> Exchange:
        """Return the record of a backward pass whose gradients are about to be exchanged."""
        ...


class TimedAverage:
    """The state of the communication hook: ``model.register_comm_hook(None, average.reduce)``.

    Args:
        take_tally: returns the samples of this rank and of all ranks behind the gradients.
        group: the process group of the model.
        recorder: is told when gradients are ready.
        side: a gloo group of the same ranks: every tenth exchange learns on it when the slowest rank is ready; None: never.
        compress: the type in which gradients travel; None: their own. They are divided in their own type, so only the
            travelling sum is rounded.
    """

    def __init__(
        self,
        take_tally: Callable[[], tuple[int, int]],
        group: dist.ProcessGroup,
        recorder: Recorder,
        side: dist.ProcessGroup | None = None,
        compress: torch.dtype | None = None,
    ) -> None:
        self._take_tally, self._group, self._recorder, self._side = take_tally, group, recorder, side
        self._compress = compress
        self._ranks = dist.get_world_size(group)
        self._exchange: Exchange | None = None
        self._complete = True  # between the last bucket and the next first one (an interruption would end DDP as well)
        self._number = 0
        self._inner: tuple[Any, Callable[[Any, Any], torch.futures.Future[Tensor]]] | None = None
        self._beacon = torch.zeros(1)

    def reduce(
        self,
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]  # exported only where torch.distributed is available
    ) -> torch.futures.Future[Tensor]:
        """Average one bucket over the ranks. DDP calls this for each bucket as it becomes ready.

        Torch's wrappers may go around it, as in ``bf16_compress_wrapper(average.reduce)``.
        """
        if self._complete or self._exchange is None:
            self._exchange = self._recorder.begin_exchange(*self._take_tally())
        self._complete = bucket.is_last()
        if self._complete:
            self._note_ready(self._exchange)
        if self._inner is not None:
            return self._inner[1](self._inner[0], bucket)
        buffer = bucket.buffer().div_(self._ranks)
        sent = buffer if self._compress is None else buffer.to(self._compress)
        future = dist.all_reduce(sent, group=self._group, async_op=True).get_future()
        finish = _first if self._compress is None else lambda done: buffer.copy_(done.value()[0])
        averaged: torch.futures.Future[Tensor] = future.then(finish)
        return averaged

    def _note_ready(self, exchange: Exchange) -> None:
        exchange.note_ready()
        if self._side is not None and self._number % EXCHANGES_PER_BEACON == 0:
            exchange.listened = True
            dist.all_reduce(self._beacon, group=self._side, async_op=True).get_future().then(exchange.note_arrival)
        self._number += 1

    def go_around(self, state: Any, hook: Callable[[Any, Any], torch.futures.Future[Tensor]]) -> bool:
        """Time a communication hook of the script's own from now on; return whether that is possible."""
        if self._compress is None and self._inner is None:
            self._inner = state, hook
        return self._inner == (state, hook)

    def __reduce__(self) -> tuple[Any, ...]:
        return _NotTimed, ()  # a copy of the model is not trained


class _NotTimed:
    reduce = None


def _first(done: torch.futures.Future[list[Tensor]]) -> Tensor:
    return done.value()[0]
