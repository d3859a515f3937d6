"""Batches of different sizes on different ranks: who takes which samples of each global step.

Start at :class:`VariableBatchSampler`, whose sizes a plan fixes; :mod:`.resizable_batches` has the sampler whose
total batch may change while the job runs. Every epoch is one permutation that all ranks compute for themselves from the
seed; each global step takes the next ``X = sum(local_sizes)`` samples of it and cuts them in rank order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch.utils.data import Sampler

from ddltool.errors import InputError


def split_tail(local_sizes: Sequence[int], tail: int) -> tuple[int, ...]:
    """Divide ``tail`` samples over the ranks in proportion to their local batches, at least one sample each.

    Largest remainder; equal remainders go to the lower rank. No rank gets more than its local batch. Returns one count
    per rank; they add up to ``tail``. Raises ValueError unless ``len(local_sizes) <= tail <= sum(local_sizes)``.

    >>> split_tail([3, 13], 5)
    (1, 4)
    >>> split_tail([1, 98, 1], 4)
    (1, 2, 1)
    """
    total = sum(local_sizes)
    if not len(local_sizes) <= tail <= total:
        raise ValueError(f"tail is {tail}; must be {len(local_sizes)} (one sample per rank) to {total}")
    shares = [max(1, tail * size // total) for size in local_sizes]
    ranks = range(len(shares))
    while sum(shares) > tail:  # the minimum of one pushed some ranks above their quota: the most favoured gives way
        giver = max(
            (rank for rank in ranks if shares[rank] > 1), key=lambda r: (shares[r] * total - tail * local_sizes[r], r)
        )
        shares[giver] -= 1
    while sum(shares) < tail:
        taker = max(ranks, key=lambda r: (tail * local_sizes[r] - shares[r] * total, -r))
        shares[taker] += 1
    return tuple(shares)


class VariableBatchSampler(Sampler[list[int]]):
    """Batches of dataset indices for one rank, ``local_sizes[rank]`` samples each (LB-BSP's unequal batches).

    With N samples and X = sum(local_sizes), global step t takes samples t X to (t + 1) X of the epoch's permutation
    and splits them in rank order. What is left at the end (the tail, N mod X samples) becomes one last, smaller step,
    shared out by :func:`split_tail`. It is dropped when ``drop_last`` is set or when it has fewer samples than there
    are ranks; :attr:`dropped` counts what one epoch leaves out. So all ranks make the same number of steps, no sample
    comes twice in an epoch, and every sample comes exactly once when nothing is dropped. A share of the tail can be a
    single sample, which BatchNorm refuses to train on: use ``drop_last`` for such models.

    The permutation is ``torch.randperm`` from ``seed + epoch``, as in torch's ``DistributedSampler``, so that runs with
    and without a plan see the same order of samples. Pass it to a ``DataLoader`` as ``batch_sampler`` and call
    :meth:`set_epoch` before each epoch, with the same number on every rank.

    Args:
        dataset_size: number of samples, N.
        local_sizes: samples per step of each rank, in rank order; the same on every rank.
        rank: this process's place in ``local_sizes``.
        shuffle: permute the samples; otherwise they come in the dataset's order.
        seed: the same on every rank.
        drop_last: leave out the tail even where every rank could have a part of it.

    Raises:
        InputError: a size below 1, a rank out of range, or less than one global step of samples.

    >>> [list(VariableBatchSampler(10, [1, 3], rank, shuffle=False)) for rank in (0, 1)]
    [[[0], [4], [8]], [[1, 2, 3], [5, 6, 7], [9]]]
    """

    def __init__(
        self,
        dataset_size: int,
        local_sizes: Sequence[int],
        rank: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        sizes = tuple(local_sizes)
        if not sizes or min(sizes) < 1:
            raise InputError("local_sizes", f"is {list(sizes)}", "give every rank at least one sample per step")
        if not 0 <= rank < len(sizes):
            raise InputError("rank", f"is {rank}", f"there are {len(sizes)} ranks: 0 to {len(sizes) - 1}")
        if sum(sizes) > dataset_size:
            problem = f"the local batches add up to {sum(sizes)} samples, but the dataset has {dataset_size}"
            raise InputError("local_sizes", problem, "use smaller batches or fewer ranks")
        self.dataset_size = dataset_size
        self.local_sizes = sizes
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self._full_steps, tail = divmod(dataset_size, sum(sizes))
        keep = tail >= len(sizes) and not drop_last
        self._tail_sizes = split_tail(sizes, tail) if keep else None
        self._dropped = 0 if keep else tail

    @property
    def dropped(self) -> int:
        """Samples that an epoch leaves out (a different choice each epoch when shuffling); the same on every rank."""
        return self._dropped

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose permutation the next iteration uses; the same number on every rank."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of steps in an epoch, which is the same on every rank."""
        return self._full_steps + (self._tail_sizes is not None)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's indices, one list per step."""
        order = self._order()
        begin = sum(self.local_sizes[: self.rank])
        for _ in range(self._full_steps):
            yield order[begin : begin + self.local_sizes[self.rank]].tolist()
            begin += sum(self.local_sizes)
        if self._tail_sizes is not None:
            ends = list(accumulate(self._tail_sizes, initial=self._full_steps * sum(self.local_sizes)))
            yield order[ends[self.rank] : ends[self.rank + 1]].tolist()

    def _order(self) -> torch.Tensor:
        """Return the epoch's permutation of all samples."""
        return epoch_order(self.dataset_size, self.shuffle, self.seed + self.epoch)


def epoch_order(dataset_size: int, shuffle: bool, seed: int) -> torch.Tensor:
    """Return the order in which an epoch visits the samples, shape (dataset_size,), as torch's DistributedSampler has it."""
    if not shuffle:
        return torch.arange(dataset_size)
    generator = torch.Generator()
    generator.manual_seed(seed)
    return torch.randperm(dataset_size, generator=generator)
