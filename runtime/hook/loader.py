"""DataLoaders that tell which of their batches the training loop has: of samples by index, and of streams."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from ddltool.runtime.hook.batches import Pass, Sizes, VariableBatchSampler
from ddltool.runtime.hook.in_hand import Share
from ddltool.runtime.hook.job import Job
from ddltool.runtime.hook.streams import Block, SharedStream, collate, together
from ddltool.runtime.hook.weighing import Weigher


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
