"""DataLoaders of planned batches, which tell which of them the training loop has: of samples by index, and of streams.

Start at :class:`CountedLoader`. :class:`GivenLoader` reads what a loader of the script's own brings. A stream that is alike on
all ranks is cut as an epoch of indices is: each step takes the next samples of all ranks together, and every rank keeps its own
part of them. A rank that has a stream of its own takes as many samples of it as planned, and the ranks tell each other how many
they had, until none has any.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    default_collate,
)

from ddltool.errors import InputError
from ddltool.runtime.hook.batches import Pass, Sizes, VariableBatchSampler, epoch_order
from ddltool.runtime.hook.digests import fingerprint
from ddltool.runtime.hook.in_hand import Share
from ddltool.runtime.hook.job import Job, dataset_length
from ddltool.runtime.hook.weighing import Weigher

_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers", "in_order"),
)


class GivenLoader:
    """What ``loader`` brings, also where accelerate has prepared it; raises InputError where samples do not come singly.

    Attributes:
        dataset, options: what a new DataLoader takes from it.
        sampler, samples: what orders an epoch, and its length.
        drop_last: whether an incomplete last batch is left out.
        is_stream: whether the dataset is an iterable one; it has no ``samples`` and no order then.
    """

    def __init__(self, loader: DataLoader[Any], job: Job) -> None:
        if not isinstance(loader, DataLoader):
            raise InputError("loader", f"is a {type(loader).__name__}", "give a torch.utils.data.DataLoader")
        self._job, self._told = job, 0
        self.options = {name: getattr(loader, name) for name in _OPTIONS if hasattr(loader, name)}
        self.dataset: Dataset[Any] = loader.dataset
        self.is_stream = isinstance(self.dataset, IterableDataset)
        self.drop_last = bool(getattr(loader, "_drop_last", loader.drop_last))
        if self.is_stream:
            if type(self.dataset).__module__.startswith("accelerate."):
                self.dataset = self.dataset.dataset  # type: ignore[attr-defined]  # the stream before its sharding
                if loader.batch_size is None:
                    problem = f"gives whole batches of a {type(self.dataset).__name__}"
                    raise InputError("loader", problem, "let it give single samples, with batch_size=1 or more")
            return
        batches: Any = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
        while isinstance(inner := getattr(batches, "batch_sampler", None), BatchSampler):
            batches = inner
        if type(batches) is not BatchSampler:
            remedy = "give it a sampler of single samples, or use hook.batch_sampler(...)"
            raise InputError("loader", f"takes whole batches from a {type(batches).__name__}", remedy)
        self.drop_last = self.drop_last or batches.drop_last
        self.sampler: Any = batches.sampler
        if not isinstance(self.sampler, DistributedSampler):
            self.samples = len(batches.sampler)  # type: ignore[arg-type]
            return
        if type(self.sampler) is not DistributedSampler:
            problem = f"is shared out by a {type(self.sampler).__name__}"
            raise InputError("loader", problem, "leave that to the hook (Lightning: use_distributed_sampler=False)")
        self.drop_last = self.drop_last or self.sampler.drop_last
        self.samples = dataset_length(self.dataset)

    def order(self, epoch: int) -> Tensor:
        """Return the indices of an epoch's samples in order, shape (samples,), the same on all ranks.

        They are what the script's sampler would give to one process: drawn on every rank, and those of rank 0 are used.
        """
        if epoch != self._told and callable(tell := getattr(self.sampler, "set_epoch", None)):
            tell(epoch)
        self._told = epoch
        if isinstance(self.sampler, DistributedSampler):
            return epoch_order(self.samples, self.sampler.shuffle, self.sampler.seed + self.sampler.epoch)
        if type(self.sampler) is SequentialSampler:
            return torch.arange(self.samples)
        drawn = torch.tensor(list(self.sampler), dtype=torch.int64)
        if self._job.side is not None:
            dist.broadcast(drawn, src=0, group=self._job.side)
        return drawn


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


class _TellingLoader(DataLoader[Any]):
    """Tells accelerate, where the script uses it, which batch is the last: its accumulation ends with the loader.

    Accelerate's ``prepare`` leaves it as it is, for the batches are this rank's already; they go to accelerate's device.
    """

    _is_accelerate_prepared = True
    end_of_dataloader = False
    remainder = -1
    _left_early = False
    _weigher: Weigher
    _source: Hashable
    """What the weigher knows the batches by."""

    def _given(self) -> Iterator[tuple[Any, Pass | Share, bool]]:
        """Yield each batch, what is in it, and whether it is the last one."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches of the epoch, or of what is left of it; the weigher knows of each."""
        self.end_of_dataloader, hand = False, self._weigher.hand
        if self._left_early:
            hand.drop(self._source, unused=True)
        self._left_early = True
        with _accelerated(self) as placed:
            for batch, drawn, is_last in self._given():
                hand.draw(self._source, drawn)
                self.end_of_dataloader = is_last
                yield placed(batch)
        hand.end(self._source)  # a loop that fetched ahead has its last batches still to use
        self._left_early = False


@contextlib.contextmanager
def _accelerated(loader: DataLoader[Any]) -> Iterator[Callable[[Any], Any]]:
    """Let accelerate's state know of the loader meanwhile; gives what puts a batch on its device."""
    state = sys.modules.get("accelerate.state")
    if state is None or not state.is_initialized():
        yield lambda batch: batch
        return
    device, gradients = state.AcceleratorState().device, state.GradientState()
    gradients._add_dataloader(loader)
    try:
        yield lambda batch: sys.modules["accelerate.utils"].send_to_device(batch, device)
    finally:
        gradients._remove_dataloader(loader)


class CountedLoader(_TellingLoader):
    """Yields what ``sampler`` hands out, and says so to ``weigher``; ``options`` go to ``DataLoader``."""

    def __init__(self, dataset: Dataset[Any], sampler: VariableBatchSampler, weigher: Weigher, **options: Any) -> None:
        super().__init__(dataset, batch_sampler=sampler, **options)
        self._variable = self._source = sampler
        self._weigher = weigher
        weigher.hand.follow(sampler, loose=True)  # as long as somebody else iterates: accelerate's skip_first_batches

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch's order of samples."""
        self._variable.set_epoch(epoch)

    def _given(self) -> Iterator[tuple[Any, Pass | Share, bool]]:
        self._weigher.hand.follow(self._variable)
        for batch in DataLoader.__iter__(self):
            taken = self._variable.issued.popleft()
            yield batch, taken, self._variable.ends_with(taken)
        self._weigher.hand.follow(self._variable, loose=True)


class StreamLoader(_TellingLoader):
    """Yields a rank's batches of an iterable dataset, and says to ``weigher`` how many samples all ranks have in them.

    Args:
        stream: the dataset.
        sizes: the planned samples per step of the ranks.
        job: this process's place.
        weigher: is told of the batches.
        shared: whether every rank's stream is the whole one, of which it takes its part; else each has a stream of its own.
        drop_last: leave out what is left at the end of a shared stream.
        options: go to ``DataLoader``.
    """

    def __init__(
        self,
        stream: IterableDataset[Any],
        sizes: Sizes,
        job: Job,
        weigher: Weigher,
        *,
        shared: bool = True,
        drop_last: bool = False,
        collate_fn: Callable[[Any], Any] = default_collate,
        **options: Any,
    ) -> None:
        own = SharedStream(stream, sizes if shared else Sizes((sizes.sizes[job.rank],)), job.rank if shared else 0)
        own.drop_last, own.least = drop_last and shared, job.world_size if shared else 1
        collated: Any = functools.partial(collate, collate_fn)
        super().__init__(own, batch_size=None, collate_fn=collated, **options)
        self._job, self._weigher, self._source, self._shared, self._seen = job, weigher, self, shared, False

    def _given(self) -> Iterator[tuple[Any, Pass | Share, bool]]:
        source: Iterator[Block] = DataLoader.__iter__(self)
        blocks = ((block, block.total) for block in source) if self._shared else together(self._job, source)
        present = next(blocks, None)
        if present is not None and self._shared and not self._seen:
            remedy = "give every rank the whole stream, or say that each has its own: dataloader(..., shared=False)"
            self._job.demand_same("dataset: first sample of the stream", present[0].digest, remedy)
            self._seen = True
        while present is not None:
            (block, total), present = present, next(blocks, None)
            even = self._shared and total == block.samples * self._job.world_size
            yield block.batch, Share(block.samples, total, even), present is None
