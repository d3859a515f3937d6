"""The job that this process belongs to. Start at :meth:`DistributedJob.this`.

An InputError on one rank is raised on all (:meth:`DistributedJob.together`), so that no rank waits for one that ended.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ddltool.errors import InputError
from ddltool.runtime.processes.launcher import launched_number
from ddltool.runtime.processes.liveness import LivenessMonitor, job_timeout_s

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class DistributedJob:
    """This process's rank, the number of processes, and ``side``: the gloo group for ddltool's own messages.

    ``side`` is None for one process. All hooks of a job share it, because each group has threads that live until the
    process ends.
    """

    rank: int
    world_size: int
    side: dist.ProcessGroup | None

    @classmethod
    def this(cls) -> DistributedJob:
        """Return the present job; without a process group it is one process.

        With several processes, all of them call this together. It starts the thread that finds lost ranks
        (:class:`~ddltool.runtime.processes.liveness.LivenessMonitor`) and, at the first call, makes the side group.
        Raises InputError where WORLD_SIZE is not 1 and ``init_process_group`` was not called.
        """
        if dist.is_available() and dist.is_initialized():
            size = dist.get_world_size()
            if size > 1:
                LivenessMonitor.of_this_job()
            return cls(rank=dist.get_rank(), world_size=size, side=_side().group if size > 1 else None)
        planned = launched_number("WORLD_SIZE", "1")
        if planned != 1:
            problem = f"is not initialised, but WORLD_SIZE is {planned}"
            remedy = "call torch.distributed.init_process_group before runtime.attach"
            raise InputError("torch.distributed", problem, remedy)
        return cls(rank=0, world_size=1, side=None)

    def together(self, action: Callable[[], T]) -> T:
        """Run ``action`` on every rank and return its result on this one; if it raises InputError on one rank, all raise.

        No rank returns before all have run it. A rank raises its own InputError if it has one; otherwise that of the
        first rank that has, prefixed with the rank. Other exceptions are raised at once, on this rank alone.
        """
        try:
            result = action()
        except InputError as error:
            self.raise_together(error)
            raise  # not reached: this rank's own error was raised
        self.raise_together(None)
        return result

    def raise_together(self, refusal: InputError | None) -> None:
        """Raise an InputError on all ranks if any has a ``refusal``; all ranks call this together, with theirs or None.

        A rank that refuses raises its own; the others raise that of the first refusing rank, prefixed with the rank.
        """
        texts = self.gather(b"" if refusal is None else str(refusal).encode(errors="replace"))  # b"": no refusal
        if refusal is not None:
            raise refusal
        for rank, text in enumerate(texts):
            if text:
                raise InputError(f"rank {rank}", text.decode())

    def demand_same(self, what: str, value: str, remedy: str) -> None:
        """Raise InputError on every rank unless the text ``value`` is the same on all; all ranks call this together.

        ``what`` names the thing that differs, for the message; ``remedy`` ends it.
        """
        values = [other.decode() for other in self.gather(value.encode(errors="replace"))]
        for rank, other in enumerate(values):
            if other != values[0]:
                raise InputError(what, f"differs between rank 0 ({values[0]}) and rank {rank} ({other})", remedy)

    def new_tag(self) -> int:
        """Return an unused tag for point-to-point messages on ``side``; all ranks call this together. 0 for one process."""
        return 0 if self.side is None else next(_side().tags)

    def numbers(self, *own_numbers: float) -> list[list[float]]:
        """Return every rank's numbers, by rank; all ranks call this together, each with the same count of numbers."""
        rows = torch.zeros(self.world_size, len(own_numbers), dtype=torch.float64)
        rows[self.rank] = torch.tensor(own_numbers, dtype=torch.float64)
        if self.side is not None:
            dist.all_reduce(rows, group=self.side)  # takes gloo a third of the time of an all_gather of so few numbers
        by_rank: list[list[float]] = rows.tolist()
        return by_rank

    def gather(self, content: bytes) -> list[bytes]:
        """Return every rank's ``content``, by rank, on every rank; all ranks call this together. Nothing is pickled."""
        if self.side is None:
            return [content]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(lengths, torch.tensor([len(content)]), group=self.side)
        longest = max(map(int, lengths))  # all_gather needs equal sizes, so shorter contents are padded
        padded = torch.frombuffer(bytearray(content.ljust(max(longest, 1), b"\0")), dtype=torch.uint8)
        contents = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(contents, padded, group=self.side)
        return [other[: int(length)].numpy().tobytes() for other, length in zip(contents, lengths, strict=True)]


@dataclass(slots=True)
class _Side:
    """A gloo group of all ranks, with the timeout of the job's own group, and an iterator of its unused message tags."""

    group: dist.ProcessGroup | None
    tags: Iterator[int]


_sides: weakref.WeakKeyDictionary[Any, _Side] = weakref.WeakKeyDictionary()
"""The side group of each default process group; the entry goes when that group is destroyed."""


def _side() -> _Side:
    """Return the side group of the default process group; the first call makes it, on all ranks together."""
    world = dist.group.WORLD
    if world not in _sides:
        group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timedelta(seconds=job_timeout_s()))
        _sides[world] = _Side(group, itertools.count(1))
    return _sides[world]
