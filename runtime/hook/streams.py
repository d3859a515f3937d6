"""Iterable datasets: a count of samples per rank in place of an index sampler. Start at :class:`SharedStream`.

A stream that is alike on all ranks is cut as an epoch of indices is: each step takes the next samples of all ranks together,
and every rank keeps its own part of them. A rank that has a stream of its own takes as many samples of it as planned, and the
ranks tell each other how many they had, until none has any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import IterableDataset

from ddltool.errors import InputError
from ddltool.runtime.hook.batches import Sizes
from ddltool.runtime.hook.digests import fingerprint
from ddltool.runtime.hook.job import Job


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
        digest = "" if self._told else fingerprint(held[0])[:12]
        self._told = True
        return Block(mine, size, len(held), digest)


def collate(samples: Callable[[list[Any]], Any], block: Block) -> Block:
    """Return the block with a batch in place of its samples."""
    return replace(block, batch=samples(block.batch))


def together(job: Job, blocks: Iterator[Block]) -> Iterator[tuple[Block, int]]:
    """Yield blocks with the samples of all ranks, as long as one rank has any; others repeat their last for nothing.

    Raises InputError, on all ranks, where one has no sample at all.
    """
    last: Block | None = None
    while True:
        block = next(blocks, None)
        mine = 0 if block is None else block.samples
        counts = job.numbers(mine, block is None and last is None)
        total = int(sum(samples for samples, _ in counts))
        if not total:
            return
        if empty := [rank for rank, (_, is_empty) in enumerate(counts) if is_empty]:
            raise InputError("dataset", f"has no sample on rank {empty[0]}", "give every rank a part of the stream")
        if block is not None:
            last = block
        assert last is not None  # or this rank were empty
        yield replace(last, samples=mine), total
