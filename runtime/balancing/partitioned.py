"""Partitioned data under unequal batches: samples move between ranks in the background (LB-BSP, section 3.5).

Where each rank can reach its own partition only, larger batches traverse theirs more often, and its samples count more.
:class:`PartitionedData` counts, and once one partition leads another by more than a threshold, a thread moves samples
peer to peer until partitions are in proportion to the batches. Training goes on meanwhile with the old partitions; all ranks
take over the new ones at the same step, start their loaders anew and count from zero.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ddltool.analyzers.balancing.partitions import THRESHOLD, Move, Traversals
from ddltool.errors import DdlToolError, InputError, one_line
from ddltool.runtime.hook.job import Job


@dataclass(slots=True)
class _Migration:
    """Moves that are being made by this rank's thread."""

    moves: list[Move]
    given: Tensor
    """Places in this rank's partition of the samples that it gives away."""
    received: Future[list[tuple[Tensor, ...]]] = field(default_factory=Future)


class PartitionedData:
    """One rank's partition, and its part in keeping all partitions equally often traversed.

    Args:
        tensors: this rank's samples; dim 0 counts them, everything else is alike on all ranks. On the host.
        threshold: traversals by which one partition may lead another before samples move.
        seed: of the order of samples and of the choice of those that move; the same on every rank.

    Call it on every rank. Raises InputError where partitions do not fit together.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        threshold: float = THRESHOLD,
        seed: int = 0,
    ) -> None:
        self.tensors = tuple(tensor.contiguous() for tensor in tensors)
        self.generation = 0
        """How often partitions have changed."""
        self._seed = seed
        self._job = Job.this()
        self._tag = self._job.new_tag()
        self._migration: _Migration | None = None
        self._order: list[int] = []
        self._passes = 0
        self._traversals = Traversals(self._partitions(), threshold)

    def _partitions(self) -> list[int]:
        """Return all ranks' numbers of samples. Raises InputError on all ranks where one's tensors do not fit."""
        lengths = {len(tensor) if tensor.dim() else 0 for tensor in self.tensors}

        def check() -> int:
            if len(lengths) != 1 or 0 in lengths:
                raise InputError("partition", "has no samples, or tensors of different lengths", "give 1 or more")
            return next(iter(lengths))

        mine = self._job.together(check)
        shapes = "; ".join(f"{tensor.dtype} {tuple(tensor.shape[1:])}" for tensor in self.tensors)
        self._job.demand_same("partition", shapes, "give all ranks the same types and shapes")
        return [int(samples) for (samples,) in self._job.numbers(mine)]

    @property
    def partitions(self) -> tuple[int, ...]:
        """(n,) samples of each rank's partition."""
        return tuple(self._traversals.partitions.tolist())

    @property
    def counts(self) -> tuple[float, ...]:
        """(n,) traversals of each partition since the last change."""
        return tuple(self._traversals.counts.tolist())

    @property
    def moving(self) -> bool:
        """Whether samples are on their way."""
        return self._migration is not None

    def __len__(self) -> int:
        """Return the samples of this rank's partition."""
        return len(self.tensors[0])

    def next_batch(self, size: int) -> tuple[Tensor, ...]:
        """Return ``size`` samples of this partition: random order, all once before any twice."""
        while len(self._order) < size:
            generator = torch.Generator().manual_seed(hash((self._seed, self.generation, self._passes, self._job.rank)))
            self._passes += 1
            self._order += torch.randperm(len(self), generator=generator).tolist()
        taken, self._order = self._order[:size], self._order[size:]
        places = torch.tensor(taken, dtype=torch.int64)
        return tuple(tensor[places] for tensor in self.tensors)

    def after_step(self, sizes: Sequence[int]) -> bool:
        """Count a step of (n,) ``sizes``, the same on every rank; return whether the partition has just changed.

        Starts a migration when it is time. While one is under way ranks exchange one number per step, to agree on when all
        are done. Raises DdlToolError on all ranks when it has failed on one.
        """
        self._traversals.add(sizes)
        if self._migration is None:
            if moves := self._traversals.moves():
                self._start(moves)
            return False
        return self._finish_together(self._migration)

    def _start(self, moves: list[Move]) -> None:
        leaving = sum(move.samples for move in moves if move.source == self._job.rank)
        generator = torch.Generator().manual_seed(hash((self._seed, self.generation, -1, self._job.rank)))
        self._migration = _Migration(moves=moves, given=torch.randperm(len(self), generator=generator)[:leaving])
        threading.Thread(target=self._migrate, args=(self._migration,), name="ddltool-migrate", daemon=True).start()

    def _migrate(self, migration: _Migration) -> None:
        """Send and receive. All ranks go through the moves in one order, so nobody waits for somebody who waits."""
        try:
            received, begin = [], 0
            for move in migration.moves:
                if move.source == self._job.rank:
                    places = migration.given[begin : begin + move.samples]
                    begin += move.samples
                    for tensor in self.tensors:
                        dist.send(tensor[places], move.target, group=self._job.side, tag=self._tag)
                elif move.target == self._job.rank:
                    parts = tuple(tensor.new_empty((move.samples, *tensor.shape[1:])) for tensor in self.tensors)
                    for part in parts:
                        dist.recv(part, move.source, group=self._job.side, tag=self._tag)
                    received.append(parts)
            migration.received.set_result(received)
        except Exception as error:
            migration.received.set_exception(error)

    def _finish_together(self, migration: _Migration) -> bool:
        error = migration.received.exception() if migration.received.done() else None
        told = self._job.numbers(migration.received.done(), error is not None)
        if any(failed for _, failed in told):
            own = "" if error is None else f" ({one_line(str(error)) or type(error).__name__})"
            raise DdlToolError(f"rank {self._job.rank}: moving samples between ranks has failed{own}")
        if not all(done for done, _ in told):
            return False
        stays = torch.ones(len(self), dtype=torch.bool)
        stays[migration.given] = False
        received = migration.received.result()
        self.tensors = tuple(
            torch.cat([tensor[stays], *(parts[place] for parts in received)])
            for place, tensor in enumerate(self.tensors)
        )
        self._traversals.reset(migration.moves)
        self._migration = None
        self.generation += 1
        self._order, self._passes = [], 0
        return True
