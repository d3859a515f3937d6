"""DataLoaders of planned batches, which tell the loss scaler which batches they hand out. Start at :class:`CountedLoader`.

:class:`GivenLoader` reads the dataset and order of a loader of the script's own. A stream (an iterable dataset) that is
the same on all ranks is divided as an epoch of indices is: each step takes the next samples for all ranks together, and
every rank keeps its own part of them. Where each rank has a stream of its own, it takes its planned number of samples
from it, and the ranks exchange how many they had, until none has any.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
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
from ddltool.runtime.hook.loss_scaling import LossScaler
from ddltool.runtime.processes.batches import Pass, Share, Sizes, VariableBatchSampler, epoch_order
from ddltool.runtime.processes.digests import fingerprint
from ddltool.runtime.processes.job import DistributedJob
from ddltool.runtime.processes.same_samples import dataset_length

_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers", "in_order"),
)


class GivenLoader:
    """The dataset, options and sample order of a script's ``loader``, also of one that accelerate has prepared.

    Attributes:
        dataset, options, drop_last: arguments for a new loader; ``options`` go to ``DataLoader``.
        is_stream: whether the dataset is iterable; if it is, the following attributes are missing.
        sampler: the script's sampler of single samples.
        samples: number of samples in an epoch, before they are divided among ranks.

    Raises InputError for a loader whose sampler gives whole batches, and for one that another library divides.
    """

    def __init__(self, loader: DataLoader[Any], job: DistributedJob) -> None:
        if not isinstance(loader, DataLoader):
            raise InputError("loader", f"is a {type(loader).__name__}", "give a torch.utils.data.DataLoader")
        self._job = job
        self._epoch = 0
        self.options = {name: getattr(loader, name) for name in _OPTIONS if hasattr(loader, name)}
        self.dataset: Dataset[Any] = loader.dataset
        self.is_stream = isinstance(self.dataset, IterableDataset)
        # accelerate's loaders keep the script's `drop_last`, dataset and samplers under other names or inside their own.
        self.drop_last = bool(getattr(loader, "_drop_last", loader.drop_last))
        if self.is_stream:
            if type(self.dataset).__module__.startswith("accelerate."):
                self.dataset = self.dataset.dataset  # type: ignore[attr-defined]  # the stream before its sharding
                if loader.batch_size is None:
                    problem = f"gives whole batches of a {type(self.dataset).__name__}"
                    raise InputError("loader", problem, "let it give single samples, with batch_size=1 or more")
            return
        # With batch_size=None the sampler itself may give whole batches.
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
        """Return the indices of an epoch's samples in order, (samples,), the same on all ranks; all call this together.

        It is the order that the script's sampler has in one process. A sampler's epoch is set only where ``epoch`` is
        another than before, so that one which the script has set itself stays. If the sampler may be random, every rank
        iterates over it, so that all random streams advance alike, and rank 0's order is sent to all.
        """
        if epoch != self._epoch and callable(set_epoch := getattr(self.sampler, "set_epoch", None)):
            set_epoch(epoch)
        self._epoch = epoch
        if isinstance(self.sampler, DistributedSampler):
            seed = self.sampler.seed + self.sampler.epoch  # what torch's own sampler shuffles by
            return epoch_order(self.samples, self.sampler.shuffle, seed)
        if type(self.sampler) is SequentialSampler:
            return torch.arange(self.samples)
        indices = torch.tensor(list(self.sampler), dtype=torch.int64)
        gloo_group = self._job.side  # None: there is one process, whose own order it is
        if gloo_group is not None:
            dist.broadcast(indices, src=0, group=gloo_group)
        return indices


@dataclass(frozen=True, slots=True)
class StreamBlock:
    """A rank's batch of a step: ``samples`` samples of this rank, of ``total`` of all ranks.

    With 0 samples the batch is a filler of weight 0.
    """

    batch: Any
    """A list of samples; after :func:`collate_block` a batch."""
    samples: int
    total: int
    digest: str
    """Digest of the stream's first sample, by which ranks check that they read the same stream; "" in further blocks."""


class SharedStream(IterableDataset[Any]):
    """Divides a stream into steps, and yields the :class:`StreamBlock` of each for ``rank``, with a list of samples.

    Every data worker divides its own stream. The remainder of a stream is divided in proportion to ``sizes``, or left
    out if it has fewer than ``least`` samples.

    Args:
        stream: the script's dataset, which yields samples in the same order on all ranks.
        sizes: planned samples of each rank in a step.
        rank: whose part of each step is yielded.
        least: least number of samples, of all ranks together, that make a step.
    """

    def __init__(self, stream: IterableDataset[Any], sizes: Sizes, rank: int, least: int) -> None:
        self.stream = stream
        self.sizes = sizes
        self.rank = rank
        self.least = least
        self._has_digest = False

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the dataset, if it has a method ``set_epoch``."""
        if callable(set_epoch := getattr(self.stream, "set_epoch", None)):
            set_epoch(epoch)

    def __iter__(self) -> Iterator[StreamBlock]:
        """Yield this rank's block of each step; a rank without samples in it gets the step's first one, as a filler."""
        samples = iter(self.stream)
        while len(step_samples := list(itertools.islice(samples, self.sizes.total_batch_size))) >= self.least:
            samples_by_rank = self.sizes.sizes_of(len(step_samples)).sum(axis=1)  # summed over a rank's passes
            begin = int(samples_by_rank[: self.rank].sum())
            size = int(samples_by_rank[self.rank])
            digest = "" if self._has_digest else fingerprint(step_samples[0])[:12]
            self._has_digest = True
            own_samples = step_samples[begin : begin + size] if size else step_samples[:1]
            yield StreamBlock(own_samples, size, len(step_samples), digest)


def collate_block(collate_samples: Callable[[list[Any]], Any], block: StreamBlock) -> StreamBlock:
    """Return the block with its list of samples replaced by the batch that ``collate_samples`` makes of it."""
    return replace(block, batch=collate_samples(block.batch))


def aligned_blocks(job: DistributedJob, blocks: Iterator[StreamBlock]) -> Iterator[tuple[StreamBlock, int]]:
    """Yield (block, samples of all ranks) until no rank has samples left, where each rank reads a stream of its own.

    All ranks exchange their counts at each block. A rank whose stream has ended repeats its last block with 0 samples,
    so that all ranks make equally many steps. Raises InputError, on all ranks, when a rank's stream is empty.
    """
    last: StreamBlock | None = None
    while True:
        block = next(blocks, None)
        own_samples = 0 if block is None else block.samples
        is_stream_empty = block is None and last is None
        counts = job.numbers(own_samples, is_stream_empty)  # by rank: (samples, whether its stream is empty)
        total = int(sum(samples for samples, _ in counts))
        if not total:
            return
        if empty := [rank for rank, (_, is_empty) in enumerate(counts) if is_empty]:
            raise InputError("dataset", f"has no sample on rank {empty[0]}", "give every rank a part of the stream")
        if block is not None:
            last = block
        assert last is not None  # an empty stream has raised above
        yield replace(last, samples=own_samples), total


class _NotingLoader(DataLoader[Any]):
    """A loader that notes each batch with the loss scaler, and tells accelerate which one is the last.

    accelerate ends an accumulation at the loader's last batch. Its ``prepare`` does not change this loader, because the
    batches are this rank's already; here they are moved to accelerate's device.
    """

    # Attributes that accelerate reads: leave the loader as it is; whether the present batch is the last; -1: the last batch
    # was not filled up with samples that `gather_for_metrics` would have to drop.
    _is_accelerate_prepared = True
    end_of_dataloader = False
    remainder = -1
    _left_early = False
    """Whether the last iteration was left before its end, so that batches of it may still be noted."""
    _scaler: LossScaler
    _batches_key: Hashable
    """The key of this loader's batches in the scaler."""

    def _drawn_batches(self) -> Iterator[tuple[Any, Pass | Share, bool]]:
        """Yield (batch, its size, whether it is the epoch's last); subclasses implement it.

        The size is the sampler's pass that the batch is for, or for a stream the samples of this rank and of all.
        """
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches of the rest of the epoch, and note each with the scaler just before.

        Batches of an earlier iteration that was left before its end are forgotten first.
        """
        self.end_of_dataloader = False
        pending = self._scaler.pending
        if self._left_early:
            pending.drop(self._batches_key, everything=True)
        self._left_early = True
        with _accelerated(self) as placed:
            for batch, drawn, is_last in self._drawn_batches():
                pending.draw(self._batches_key, drawn)
                self.end_of_dataloader = is_last
                yield placed(batch)
        pending.end(self._batches_key)  # keeps the last batches, which a loop that fetches ahead has yet to use
        self._left_early = False


@contextlib.contextmanager
def _accelerated(loader: DataLoader[Any]) -> Iterator[Callable[[Any], Any]]:
    """Register the loader with accelerate for the block, if the script uses it.

    The block gets a function that returns a batch on accelerate's device, without accelerate the batch itself.
    """
    state = sys.modules.get("accelerate.state")
    if state is None or not state.is_initialized():
        yield lambda batch: batch
        return
    device = state.AcceleratorState().device
    gradients = state.GradientState()
    gradients._add_dataloader(loader)
    try:
        yield lambda batch: sys.modules["accelerate.utils"].send_to_device(batch, device)
    finally:
        gradients._remove_dataloader(loader)


class CountedLoader(_NotingLoader):
    """Yields the batches of ``sampler`` and notes the pass of each with ``scaler``; ``options`` go to ``DataLoader``."""

    def __init__(
        self, dataset: Dataset[Any], sampler: VariableBatchSampler, scaler: LossScaler, **options: Any
    ) -> None:
        super().__init__(dataset, batch_sampler=sampler, **options)
        self._planned_sampler = self._batches_key = sampler  # batches are noted under their sampler
        self._scaler = scaler
        # Until this loader iterates itself, others may iterate over its sampler (accelerate's skip_first_batches does),
        # and they do not call `pending.draw`.
        scaler.pending.unannounced.add(sampler)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, by which samples are ordered."""
        self._planned_sampler.set_epoch(epoch)

    def _drawn_batches(self) -> Iterator[tuple[Any, Pass | Share, bool]]:
        """Yield (batch, its pass, whether it ends the epoch).

        During the iteration this loader notes the sampler's batches itself.
        """
        self._scaler.pending.unannounced.discard(self._planned_sampler)
        for batch in DataLoader.__iter__(self):
            issued_pass = self._planned_sampler.issued.popleft()
            yield batch, issued_pass, self._planned_sampler.ends_with(issued_pass)
        self._scaler.pending.unannounced.add(self._planned_sampler)


class StreamLoader(_NotingLoader):
    """Yields a rank's batches of an iterable dataset, and notes with ``scaler`` the samples of this rank and of all.

    Args:
        stream: the iterable dataset.
        sizes: planned samples of each rank in a step.
        shared: whether all ranks read the same stream; False: every rank has a stream of its own.
        drop_last: leave out the remainder of a shared stream.
        collate_fn: makes a batch of a list of samples.
        options: go to ``DataLoader``.
    """

    def __init__(
        self,
        stream: IterableDataset[Any],
        sizes: Sizes,
        job: DistributedJob,
        scaler: LossScaler,
        *,
        shared: bool = True,
        drop_last: bool = False,
        collate_fn: Callable[[Any], Any] = default_collate,
        **options: Any,
    ) -> None:
        """Divide the stream by ``sizes``; without ``shared``, take this rank's size at each step."""
        if not shared:  # all of the stream is this rank's, its remainder included
            sizes = Sizes((sizes.sizes[job.rank],))
            drop_last = False
        least = sizes.total_batch_size if drop_last else sizes.world_size  # at least one sample for each rank
        blocks = SharedStream(stream, sizes, job.rank if shared else 0, least)
        collate: Any = functools.partial(collate_block, collate_fn)
        super().__init__(blocks, batch_size=None, collate_fn=collate, **options)
        self._job = job
        self._scaler = scaler
        self._batches_key = self
        self._shared = shared
        self._seen = False

    def _drawn_batches(self) -> Iterator[tuple[Any, Pass | Share, bool]]:
        """Yield (batch, its samples on this rank and on all, whether it is the last); one block is read ahead to know that.

        At the first block of a shared stream, InputError is raised on all ranks unless they read the same one.
        """
        source: Iterator[StreamBlock] = DataLoader.__iter__(self)
        blocks = ((block, block.total) for block in source) if self._shared else aligned_blocks(self._job, source)
        following = next(blocks, None)
        if following is not None and self._shared and not self._seen:
            remedy = "give every rank the whole stream, or say that each has its own: dataloader(..., shared=False)"
            self._job.demand_same("dataset: first sample of the stream", following[0].digest, remedy)
            self._seen = True
        while following is not None:
            block, total = following
            following = next(blocks, None)
            is_even = self._shared and total == block.samples * self._job.world_size
            is_last = following is None
            yield block.batch, Share(block.samples, total, is_even), is_last
