"""Partitioned data under unequal batches: samples move between ranks in the background (LB-BSP, section 3.5).

Where each rank can reach its own partition only, a rank with larger batches traverses its partition more often, so that
its samples count more. :class:`PartitionedData` counts the traversals of each partition. Once one leads another by more
than a threshold, a thread moves samples between ranks until partitions are in proportion to the batches. Training goes
on meanwhile with the old partitions; all ranks switch to the new ones at the same step and count from zero.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ddltool.analyzers.job.balancing.partitions import THRESHOLD, Move, Traversals
from ddltool.errors import DdlToolError, InputError, one_line
from ddltool.runtime.processes.job import DistributedJob


@dataclass(slots=True)
class _Migration:
    """Moves that this rank's thread is making."""

    moves: list[Move]
    """All ranks' moves, in the order in which every rank makes its own."""
    given_indices: Tensor
    """(k,) indices in this rank's partition of the samples that it gives away."""
    received: Future[list[tuple[Tensor, ...]]] = field(default_factory=Future)
    """For each move to this rank, the samples received: one tensor (k, ...) for each of the partition's tensors."""


class PartitionedData:
    """One rank's partition of the data, whose size is adjusted so that all partitions are traversed equally often.

    Call everything on every rank. Raises InputError on all ranks for an empty partition, tensors of different lengths,
    and types or shapes that differ between ranks.

    Args:
        tensors: this rank's samples, on the host: dimension 0 is the sample; types and other dimensions are the same on
            all ranks.
        threshold: traversals by which one partition may lead another before samples move.
        seed: of the order of samples and of the choice of those that move; the same on every rank.
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
        self._job = DistributedJob.this()
        self._tag = self._job.new_tag()
        self._migration: _Migration | None = None
        self._sample_order: list[int] = []  # indices in this partition that come next
        self._traversal_count = 0  # of this partition, since partitions last changed: each has an order of its own
        self._traversals = Traversals(self._read_partition_sizes(), threshold)

    def _read_partition_sizes(self) -> list[int]:
        """Return the number of samples of every rank's partition, by rank. Raises InputError as the class does."""
        lengths = {len(tensor) if tensor.dim() else 0 for tensor in self.tensors}

        def check() -> int:
            """Return this rank's number of samples. Raises InputError without any, and for tensors of different lengths."""
            if len(lengths) != 1 or 0 in lengths:
                raise InputError("partition", "has no samples, or tensors of different lengths", "give 1 or more")
            return next(iter(lengths))

        own_samples = self._job.together(check)
        shapes = "; ".join(f"{tensor.dtype} {tuple(tensor.shape[1:])}" for tensor in self.tensors)
        self._job.demand_same("partition", shapes, "give all ranks the same types and shapes")
        return [int(samples) for (samples,) in self._job.numbers(own_samples)]

    @property
    def partitions(self) -> tuple[int, ...]:
        """Samples of each rank's partition, (n,)."""
        return tuple(self._traversals.partitions.tolist())

    @property
    def counts(self) -> tuple[float, ...]:
        """Traversals of each partition since partitions last changed, (n,); 1.5 is one and a half."""
        return tuple(self._traversals.counts.tolist())

    @property
    def moving(self) -> bool:
        """Whether samples are being moved between ranks."""
        return self._migration is not None

    def __len__(self) -> int:
        """Return the number of samples in this rank's partition."""
        return len(self.tensors[0])

    def next_batch(self, size: int) -> tuple[Tensor, ...]:
        """Return the next ``size`` samples of this partition, one tensor (size, ...) for each of ``tensors``.

        They come in random order; every sample comes once before any comes again. A batch may span two traversals.
        """
        while len(self._sample_order) < size:
            # The hash of a tuple of whole numbers is the same in every process and run.
            order_seed = hash((self._seed, self.generation, self._traversal_count, self._job.rank))
            generator = torch.Generator().manual_seed(order_seed)
            self._traversal_count += 1
            self._sample_order += torch.randperm(len(self), generator=generator).tolist()
        taken_indices = self._sample_order[:size]
        self._sample_order = self._sample_order[size:]
        index_tensor = torch.tensor(taken_indices, dtype=torch.int64)
        return tuple(tensor[index_tensor] for tensor in self.tensors)

    def after_step(self, sizes: Sequence[int]) -> bool:
        """Count a step, and return whether the partitions have changed in this call.

        ``sizes``: (n,) samples that each rank took in the step, the same on all ranks, which call this together.
        Samples begin to move once one partition is more than ``threshold`` traversals ahead of another. While they
        move, ranks exchange one small message per step, to agree on when all are done. Raises DdlToolError on all ranks
        when moving has failed on one.
        """
        self._traversals.add(sizes)
        if self._migration is None:
            if moves := self._traversals.moves():
                self._start_migration(moves)
            return False
        return self._finish_on_all_ranks(self._migration)

    def _start_migration(self, moves: list[Move]) -> None:
        """Choose at random the samples that this rank gives away in ``moves``, and start the thread that moves samples."""
        given_count = sum(move.samples for move in moves if move.source == self._job.rank)
        # -1 in place of a traversal's number: a random stream that no order of samples uses.
        generator = torch.Generator().manual_seed(hash((self._seed, self.generation, -1, self._job.rank)))
        given_indices = torch.randperm(len(self), generator=generator)[:given_count]
        migration = _Migration(moves=moves, given_indices=given_indices)
        self._migration = migration
        mover = threading.Thread(target=self._move_samples, args=(migration,), name="ddltool-migrate", daemon=True)
        mover.start()

    def _move_samples(self, migration: _Migration) -> None:
        """Send and receive samples: the body of the thread. Its result or error goes to ``migration.received``.

        All ranks go through the moves in the same order, so no two of them can wait for each other.
        """
        try:
            received = []
            given_begin = 0
            for move in migration.moves:
                if move.source == self._job.rank:
                    given_indices = migration.given_indices[given_begin : given_begin + move.samples]
                    given_begin += move.samples
                    for tensor in self.tensors:
                        dist.send(tensor[given_indices], move.target, group=self._job.side, tag=self._tag)
                elif move.target == self._job.rank:
                    received_tensors = tuple(
                        tensor.new_empty((move.samples, *tensor.shape[1:])) for tensor in self.tensors
                    )
                    for received_tensor in received_tensors:
                        dist.recv(received_tensor, move.source, group=self._job.side, tag=self._tag)
                    received.append(received_tensors)
            migration.received.set_result(received)
        except Exception as error:
            migration.received.set_exception(error)

    def _finish_on_all_ranks(self, migration: _Migration) -> bool:
        """Switch to the new partition if all ranks have received theirs; return whether they have.

        All ranks call this together. The switch counts traversals from zero. Raises DdlToolError on all of them when
        moving has failed on one.
        """
        is_done = migration.received.done()  # asked once, because the thread may end meanwhile
        error = migration.received.exception() if is_done else None
        states = self._job.numbers(is_done, error is not None)
        if any(failed for _, failed in states):
            own_error = "" if error is None else f" ({one_line(str(error)) or type(error).__name__})"
            raise DdlToolError(f"rank {self._job.rank}: moving samples between ranks has failed{own_error}")
        if not all(done for done, _ in states):
            return False
        is_kept = torch.ones(len(self), dtype=torch.bool)
        is_kept[migration.given_indices] = False
        received = migration.received.result()
        kept = [tensor[is_kept] for tensor in self.tensors]
        self.tensors = tuple(torch.cat(parts) for parts in zip(kept, *received, strict=True))
        self._traversals.reset(migration.moves)
        self._migration = None
        self.generation += 1
        self._sample_order = []
        self._traversal_count = 0
        return True
