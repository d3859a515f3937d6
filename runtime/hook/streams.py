"""Iterable datasets: a count of samples per rank in place of an index sampler. Start at :class:`SharedStream`.

A stream that is alike on all ranks is cut as an epoch of indices is: each step takes the next samples of all ranks together,
and every rank keeps its own part of them. A rank that has a stream of its own takes as many samples of it as planned, and the
ranks tell each other how many they had, until none has any.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from ddltool.errors import InputError
from ddltool.runtime.hook.batches import Sizes
from ddltool.runtime.hook.job import Job, parts_of


@dataclass(frozen=True, slots=True)
class Block:
    """A rank's samples of a step, ``total`` of all ranks; none is a filler that weighs nothing."""

    batch: Any
    samples: int
    total: int
    digest: str
    """Of the step's first sample: alike on all ranks that have the same stream."""


class SharedStream(IterableDataset[Any]):
    """Yields one rank's :class:`Block` of each step, samples in a list; data workers cut each its own stream."""

    drop_last = False
    least = 1

    def __init__(self, stream: IterableDataset[Any], sizes: Sizes, rank: int) -> None:
        self.stream, self.sizes, self.rank = stream, sizes, rank
        self._told = False

    def set_epoch(self, epoch: int) -> None:
        """Pass an epoch on to a dataset that wants to know."""
        if callable(tell := getattr(self.stream, "set_epoch", None)):
            tell(epoch)

    def __iter__(self) -> Iterator[Block]:
        """Yield the blocks; what is left at the end is shared out in proportion to the sizes, or left out if too little."""
        held: list[Any] = []
        for sample in self.stream:
            held.append(sample)
            if len(held) == self.sizes.total_batch_size:
                yield self._block(held)
                held = []
        if len(held) >= self.least and held and not self.drop_last:
            yield self._block(held)

    def _block(self, held: list[Any]) -> Block:
        shares = self.sizes.sizes_of(len(held)).sum(axis=1)
        begin, size = int(shares[: self.rank].sum()), int(shares[self.rank])
        mine = held[begin : begin + size] if size else held[:1]
        digest = "" if self._told else hashlib.sha256(b"".join(parts_of(held[0]))).hexdigest()[:12]
        self._told = True
        return Block(mine, size, len(held), digest)


class Collated:
    """Makes a batch of a block's samples."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, block: Block) -> Block:
        """Return the block with a batch in place of its samples."""
        return replace(block, batch=self._collate(block.batch))


def same_streams(job: Job, block: Block) -> None:
    """Raise InputError on all ranks where their streams begin with other samples."""
    remedy = "give every rank the whole stream, or say that each has its own: dataloader(..., shared=False)"
    job.demand_same("dataset: first sample of the stream", block.digest, remedy)


def together(job: Job, blocks: Iterator[Block]) -> Iterator[tuple[Block, int]]:
    """Yield blocks with the samples of all ranks, as long as one rank has any; others repeat their last for nothing.

    Raises InputError, on all ranks, where one has no sample at all.
    """
    last: Block | None = None
    while True:
        block = next(blocks, None)
        mine = 0 if block is None else block.samples
        counts = [torch.zeros(2, dtype=torch.int64) for _ in range(job.world_size)]
        told = torch.tensor([mine, int(block is None and last is None)])
        if job.side is None:
            counts = [told]
        else:
            dist.all_gather(counts, told, group=job.side)
        total = sum(int(count[0]) for count in counts)
        if not total:
            return
        if empty := [rank for rank, count in enumerate(counts) if count[1]]:
            raise InputError("dataset", f"has no sample on rank {empty[0]}", "give every rank a part of the stream")
        if block is not None:
            last = block
        assert last is not None  # or this rank were empty
        yield replace(last, samples=mine), total
