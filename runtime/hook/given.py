"""A DataLoader that the script has made itself: its options, and the order of its samples. Start at :class:`GivenLoader`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler

from ddltool.errors import InputError
from ddltool.runtime.hook.batches import epoch_order
from ddltool.runtime.hook.job import Job, dataset_length

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
