"""Batches whose split over the ranks may change at any step while their sum stays the same (LB-BSP).

Start at :class:`BalancedSampler`. As the total batch X is constant, global step t takes the same samples of the epoch's
order whatever the ranks' sizes are: a change of sizes can neither lose nor repeat a sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler

from ddltool.analyzers.balancing.sizing import Counts, proportional
from ddltool.errors import InputError
from ddltool.runtime.hook.batches import epoch_order


class BalancedSampler(Sampler[list[int]]):
    """Batches of dataset indices of one rank; every sample of an epoch comes exactly once over all ranks.

    With N samples and X in a step, step t of an epoch takes samples t X to (t + 1) X of its order, cut in rank order. What is
    left at the end is one smaller step, shared out in proportion to the sizes, at least ``least`` samples each. If that is
    too little for n ranks, the step before gives it what it lacks; if that one would have too little itself then, it takes
    the rest too: one larger step of less than 2 n ``least`` samples.

    Use as ``DataLoader(batch_sampler=...)``. Steps are numbered through all epochs. A loader with workers asks for
    lists ahead of time, so new sizes come into force at :attr:`next_step`, the first step not handed out yet, or later.
    Ranks whose loaders look ahead equally far agree on that step without asking each other.

    Args:
        dataset_size: number of samples, N.
        sizes: (n,) samples of each rank at the start; their sum X is kept.
        rank: this process's place in ``sizes``.
        shuffle, seed: the order of samples, as torch's DistributedSampler has it; the same on every rank.
        least: samples that each rank gets in every step, the last ones of an epoch included; the same on every rank.

    Raises InputError for a size below ``least``, a rank out of range, or a dataset of fewer than n ``least`` samples.

    >>> sampler = BalancedSampler(10, [1, 3], 1, shuffle=False)
    >>> sampler.resize([3, 1], step=1)
    >>> list(sampler)
    [[1, 2, 3], [7], [9]]
    """

    def __init__(
        self,
        dataset_size: int,
        sizes: Sequence[int],
        rank: int,
        shuffle: bool = True,
        seed: int = 0,
        least: int = 1,
    ) -> None:
        self._changes = [(0, fitting_sizes(sizes, len(sizes), sum(sizes), least))]
        if not 0 <= rank < len(sizes):
            raise InputError("rank", f"is {rank}", f"there are {len(sizes)} ranks: 0 to {len(sizes) - 1}")
        if dataset_size < len(sizes) * least:
            problem = f"has {dataset_size} samples for {len(sizes)} ranks"
            raise InputError("dataset", problem, f"give every rank {_least(least)}")
        self.dataset_size = dataset_size
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.least = least
        self.epoch = 0
        self.total = sum(sizes)
        self._floor = len(sizes) * least
        self._standard = _step_bounds(0, dataset_size, self.total, self._floor)
        self._bounds = self._standard
        self._done = 0
        self._next = 0

    @property
    def next_step(self) -> int:
        """The first step that was not handed out yet; numbers grow through all epochs, with gaps between them."""
        return self.epoch * len(self._standard) + self._next

    @property
    def sizes(self) -> tuple[int, ...]:
        """(n,) samples of a full step that is handed out next."""
        return self.sizes_at(self.next_step)

    def sizes_at(self, step: int) -> tuple[int, ...]:
        """Return (n,) samples of a full step ``step``; those of steps long past are forgotten."""
        return next((sizes for first, sizes in reversed(self._changes) if first <= step), self._changes[0][1])

    def resize(self, sizes: Sequence[int], step: int | None = None) -> None:
        """Use other sizes with the same sum from ``step`` on (None: from :attr:`next_step`); the same on every rank.

        Raises InputError for a step that was handed out already, a size below ``least``, another sum or number of ranks.
        """
        first = self.next_step if step is None else step
        if first < self.next_step:
            raise InputError("step", f"{first} was handed out already", f"the next is {self.next_step}")
        checked = fitting_sizes(sizes, len(self._changes[0][1]), self.total, self.least)
        kept = [change for change in self._changes if change[0] < first]
        current = max((place for place, change in enumerate(kept) if change[0] <= self.next_step), default=0)
        self._changes = [*kept[current:], (first, checked)]

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``; does nothing when that is the present one, which goes on after its last step done."""
        if epoch != self.epoch:
            self.epoch, self._done, self._next, self._bounds = epoch, 0, 0, self._standard

    def commit(self, steps: int = 1) -> None:
        """Note that ``steps`` more steps of this epoch are done: where :meth:`state_dict` will go on."""
        self._done = min(self._done + steps, self._next)

    def finish(self) -> None:
        """Note that all steps of this epoch are done."""
        self._done = self._next = len(self)

    def __len__(self) -> int:
        """Return the number of steps in the present epoch: the same on every rank, whatever the sizes."""
        return len(self._bounds) - 1

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's indices, one list per step, from the first step not committed to the end of the epoch.

        An epoch that was committed to its end is begun anew.
        """
        order = epoch_order(self.dataset_size, self.shuffle, self.seed + self.epoch)
        if self._done == len(self):
            self._done, self._bounds = 0, self._standard
        self._next = self._done
        while self._next < len(self):
            begin, end = self._bounds[self._next : self._next + 2]
            shares = self.shares(end - begin)
            self._next += 1
            start = begin + int(shares[: self.rank].sum())
            yield order[start : start + int(shares[self.rank])].tolist()

    def shares(self, samples: int) -> Counts:
        """Return (n,) samples of each rank in the step that is handed out next, if it has ``samples`` in all."""
        sizes = np.array(self.sizes, dtype=np.int64)
        if samples == self.total:
            return sizes
        return proportional(sizes, samples, sizes if samples < self.total else None, self.least)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs, as plain numbers; the number of ranks may be another one afterwards."""
        return {
            "epoch": self.epoch,
            "position": self._bounds[self._done],
            "dataset_size": self.dataset_size,
            "total": self.total,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "sizes": list(self._changes[-1][1]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the last step that was committed; sizes are taken over where they fit this job's ranks and ``least``.

        Raises InputError when the state is of another dataset, order or total batch, or leaves too little of its epoch for
        these ranks.
        """
        for name in ("dataset_size", "total", "seed", "shuffle"):
            if state.get(name) != (mine := getattr(self, name)):
                raise InputError(f"sampler state:{name}", f"is {state.get(name)}", f"this job has {mine}")
        epoch, position, sizes = state.get("epoch"), state.get("position"), state.get("sizes")
        if not (
            isinstance(epoch, int) and isinstance(position, int) and epoch >= 0 and 0 <= position <= self.dataset_size
        ):
            raise InputError("sampler state", "names no place in an epoch", "give what state_dict returned")
        ranks = len(self._changes[-1][1])
        if 0 < (left := self.dataset_size - position) < self._floor:
            each = "" if self.least == 1 else f" that need {self.least} each"
            remedy = "resume on fewer ranks, or begin the next epoch"
            raise InputError("sampler state", f"leaves {left} samples of the epoch for {ranks} ranks{each}", remedy)
        before = [bound for bound in self._standard if bound < position]
        after = _step_bounds(position, self.dataset_size, self.total, self._floor) if left else [position]
        self._bounds = [*before, *after]
        self.epoch, self._done, self._next = epoch, len(before), len(before)
        present = self._changes[-1][1]
        if isinstance(sizes, list) and len(sizes) == ranks and sum(sizes) == self.total and min(sizes) >= self.least:
            present = fitting_sizes(sizes, ranks, self.total, self.least)
        self._changes = [(0, present)]


class BalancedLoader(DataLoader[Any]):
    """A DataLoader over a :class:`BalancedSampler` that knows how many of its batches no update has used yet."""

    def __init__(self, dataset: Dataset[Any], sampler: BalancedSampler, **options: Any) -> None:
        super().__init__(dataset, batch_sampler=sampler, **options)
        self._balanced = sampler
        self._waiting = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield the batches of the epoch; one that is asked for more than it has is done."""
        self._waiting = 0
        for batch in super().__iter__():
            self._waiting += 1
            yield batch
        self._waiting = 0
        self._balanced.finish()

    def commit(self, passes: int) -> None:
        """Note an update after ``passes`` forward passes: it used as many batches, but none that was not handed out.

        So a loop that fetches ahead is not ahead in the count, nor is one with two passes per batch.
        """
        used = min(passes, self._waiting)
        self._waiting -= used
        self._balanced.commit(used)


def fitting_sizes(sizes: Sequence[int], ranks: int, total: int, least: int = 1) -> tuple[int, ...]:
    """Return (n,) whole ``sizes``. Raises InputError for one below ``least``, another sum or another number of ranks."""
    if least < 1:
        raise InputError("least", f"is {least}", "give every rank one sample or more")
    whole = tuple(int(size) for size in sizes)
    if not whole or min(whole) < least or list(whole) != list(sizes):
        raise InputError("sizes", f"is {list(sizes)}", f"give every rank {_least(least)}")
    if len(whole) != ranks or sum(whole) != total:
        problem = f"are {len(whole)} with sum {sum(whole)}"
        raise InputError("sizes", problem, f"this job has {ranks} ranks and {total} samples")
    return whole


def _least(number: int) -> str:
    return "one sample or more" if number == 1 else f"{number} samples or more, or make least smaller"


def _step_bounds(begin: int, end: int, total: int, floor: int) -> list[int]:
    """Return where steps begin in positions [begin, end) of an epoch's order, and its end; none has less than ``floor``.

    Where [begin, end) itself has less it is one step.
    """
    bounds = [*range(begin, end, total), end]
    lacking = floor - (end - bounds[-2])
    if lacking > 0 and len(bounds) > 2:
        if total - lacking >= floor:
            bounds[-2] -= lacking
        else:
            del bounds[-2]
    return bounds
