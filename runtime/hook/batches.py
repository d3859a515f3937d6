"""Which samples each rank takes in each step, under batches that differ between ranks and may change at any step.

Start at :class:`VariableBatchSampler`. Every epoch is one permutation that all ranks compute for themselves from the seed. Each
step takes the next samples of it, as many as its total batch says, cut by rank and then by pass. So which samples are done
after a step is one number, whatever the ranks and whatever sizes came before: a change can neither lose nor repeat a sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from ddltool.errors import InputError

if TYPE_CHECKING:  # to attach the hook loads no analyzer
    from ddltool.analyzers.goodput.elastic_table import Split

    Shares: TypeAlias = "Sizes | Split"
    """How the ranks share a step: unequal sizes, or the agent's equal ones in passes."""

# Loaders fetch far fewer batches ahead; where nobody takes the passes from :attr:`issued` no more are kept.
PASSES_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """Each rank's samples of a step, of a size of its own and never below ``least``, in ``passes`` as alike as can be.

    Whoever makes several passes divides each one's loss by their number, as trainers that accumulate do.
    """

    sizes: tuple[int, ...]
    least: int = 1
    passes: int = 1

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.sizes)

    @property
    def total_batch_size(self) -> int:
        """Samples of all ranks in a full step."""
        return sum(self.sizes)

    def sizes_of(self, samples: int) -> NDArray[np.int64]:
        """Return (n, passes) samples, in proportion to the sizes; in a smaller step nobody gets more than in a full one."""
        whole = np.array(self.sizes, dtype=np.int64)
        if samples != self.total_batch_size:
            from ddltool.analyzers.balancing.sizing import proportional  # to attach the hook loads no analyzer

            limits = self.sizes if samples < self.total_batch_size else None
            whole = proportional(self.sizes, samples, limits, self.least)
        return whole[:, None] // self.passes + (np.arange(self.passes) < whole[:, None] % self.passes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One forward and backward pass of one rank, as :class:`VariableBatchSampler` handed it out.

    A rank without samples (a step of fewer samples than there are ranks) takes part with one *filler* sample that has
    weight 0, so that all ranks synchronise once per step: ``samples`` is 0 then.
    """

    epoch: int
    step: int
    """Steps since the start of training, from 0; the same on all ranks."""
    number: int
    """Place of this pass among those of the rank in this step, from 0."""
    passes: int
    """Passes of this rank in this step."""
    samples: int
    step_start: int
    """Position in the epoch's order of the step's first sample."""
    step_samples: int
    """Samples of all ranks and passes of this step."""
    split: Shares
    """How a full step is shared out; the last step of an epoch can have fewer samples."""

    @property
    def is_last(self) -> bool:
        """Whether the rank's gradients of the step are complete after this pass."""
        return self.number == self.passes - 1

    @property
    def is_full(self) -> bool:
        """Whether the step has as many samples as planned."""
        return self.step_samples == self.split.total_batch_size

    @property
    def weight(self) -> float:
        """Weight of this pass's mean loss in the step's mean loss over all samples of all ranks."""
        return self.samples / self.step_samples


class VariableBatchSampler(Sampler[list[int]]):
    """Batches of dataset indices of one rank; no sample comes twice in an epoch, and all ranks make as many steps.

    Use as ``DataLoader(batch_sampler=...)``, and call :meth:`set_epoch` before each epoch. Each list of indices is one pass,
    described by a :class:`Pass` that is appended to :attr:`issued` when the list is handed out; a loader with workers asks
    for lists ahead of time. A change of sizes takes effect at a step that was not handed out yet (:attr:`next_step` and
    later): ranks whose loaders look ahead equally far agree on it without asking each other. :meth:`commit` says that a
    step is done; iterating again starts after the last step done. Where nothing is committed that is the epoch's start.

    What is left at the end of an epoch becomes one smaller step, shared out in proportion to the sizes. Where that is too
    little for every rank to get ``least`` samples it is left out, or with ``whole`` the step before gives it what it lacks; if
    that one would have too little itself then, it takes the rest too: one larger step of less than 2 n ``least`` samples.

    Args:
        dataset_size: number of samples, N.
        sizes: (n,) samples per step of each rank, in rank order; or another way to share a step, whose ranks can do without
            a sample. The same on every rank, as all that follows but ``rank``.
        rank: this process's place in ``sizes``.
        shuffle, seed: the order of samples, ``torch.randperm`` from ``seed + epoch``, as torch's DistributedSampler has it.
        drop_last: leave out what is left at the end of an epoch.
        whole: let every sample of an epoch come, exactly once.
        least: samples that each rank gets in every step.
        order: returns the (dataset_size,) indices of an epoch's samples in order; None: by ``shuffle`` and ``seed``.

    Raises InputError for a size below ``least``, a rank out of range, or fewer samples than one step needs.

    >>> [list(VariableBatchSampler(10, [1, 3], rank, shuffle=False)) for rank in (0, 1)]
    [[[0], [4], [8]], [[1, 2, 3], [5, 6, 7], [9]]]
    >>> sampler = VariableBatchSampler(10, [1, 3], 1, shuffle=False)
    >>> sampler.resize([3, 1], step=1)
    >>> list(sampler)
    [[1, 2, 3], [7], [9]]
    """

    def __init__(
        self,
        dataset_size: int,
        sizes: Sequence[int] | Shares,
        rank: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        whole: bool = False,
        least: int = 1,
        order: Callable[[int], torch.Tensor] | None = None,
    ) -> None:
        if isinstance(sizes, Sequence):
            sizes = Sizes(fitting_sizes(sizes, len(sizes), sum(sizes), least), least)
        split: Shares = sizes
        self._floor = split.world_size * split.least if isinstance(split, Sizes) else 0
        ranks = split.world_size
        if not 0 <= rank < ranks:
            raise InputError("rank", f"is {rank}", f"there are {ranks} ranks: 0 to {ranks - 1}")
        if dataset_size < max(self._floor, 1):
            problem = f"has {dataset_size} samples for {ranks} ranks"
            raise InputError("dataset", problem, f"give every rank {_at_least(least)}")
        if not whole and split.total_batch_size > dataset_size:
            problem = f"add up to {split.total_batch_size} samples, but the dataset has {dataset_size}"
            raise InputError("sizes", problem, "use smaller batches or fewer ranks")
        self.dataset_size = dataset_size
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.least = least
        self.epoch = 0
        self.position = 0
        """Samples of the epoch that are done, on all ranks together."""
        self.step = 0
        """Steps done since the start of training."""
        self.issued: deque[Pass] = deque(maxlen=PASSES_KEPT)
        """Passes handed out and not taken from here yet, in order."""
        self._drop_last = drop_last
        self._whole = whole
        self._order = order
        self._changes: list[tuple[int, Shares]] = [(0, split)]
        self._begin()

    def _begin(self) -> None:
        """Start to hand out after the last step done."""
        self.issued.clear()
        self._next_step, self._next_place, self._handed_out = self.step, self.position, 0

    @property
    def next_step(self) -> int:
        """First step that was not handed out yet: the earliest at which this rank can still change its batch."""
        return max(self._next_step, self.step)

    @property
    def sizes(self) -> tuple[int, ...]:
        """(n,) samples of each rank in a full step that is handed out next."""
        split = self.split_at(self.next_step)
        return tuple(split.sizes_of(split.total_batch_size).sum(axis=1).tolist())

    def split_at(self, step: int) -> Shares:
        """Return how a full step is shared out at ``step``; that of steps long past is forgotten."""
        return next((split for first, split in reversed(self._changes) if first <= step), self._changes[0][1])

    def resize(self, sizes: Sequence[int] | Shares, step: int | None = None) -> None:
        """Share out full steps otherwise from ``step`` on (None: from :attr:`next_step`); the same on every rank.

        Raises InputError for a step that was handed out already, another number of ranks, or (n,) sizes with another sum
        or below ``least``.
        """
        first = self.next_step if step is None else step
        if first < self.next_step:
            raise InputError("step", f"{first} was handed out already", f"the next is {self.next_step}")
        split = self._fitting(sizes)
        kept = [change for change in self._changes if change[0] < first]
        current = max((place for place, change in enumerate(kept) if change[0] <= self.step), default=0)
        self._changes = [*kept[current:], (first, split)]

    def _fitting(self, sizes: Sequence[int] | Shares) -> Shares:
        present = self._changes[-1][1]
        if isinstance(sizes, Sequence):
            return Sizes(fitting_sizes(sizes, present.world_size, present.total_batch_size, self.least), self.least)
        if sizes.world_size != present.world_size:
            raise InputError("split", f"is for {sizes.world_size} ranks", "make a new sampler for another number")
        return sizes

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``; does nothing when that is the present one, whose position is kept."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0
            self._begin()

    def ends_with(self, taken: Pass) -> bool:
        """Return whether the epoch is over after a pass."""
        return taken.is_last and not self._samples(taken.step + 1, taken.step_start + taken.step_samples)

    def commit(self, done: Pass) -> None:
        """Note that the step of ``done`` is made: its samples are done."""
        self.position = done.step_start + done.step_samples
        self.step = done.step + 1

    def finish(self) -> None:
        """Note that all steps of this epoch are done."""
        self.position, self.step = self.dataset_size, self.next_step

    def __len__(self) -> int:
        """Return the number of batches of the iteration under way, or the next one, if no further change comes."""
        step, place, passes = self._next_step, self._next_place, self._handed_out
        while samples := self._samples(step, place):
            split, alike = self.split_at(step), 1
            if samples == split.total_batch_size:  # as many steps at once as are alike; the last two may not be
                change = next((first for first, _ in self._changes if first > step), self.dataset_size + step)
                alike = max(1, min(change - step, (self.dataset_size - place) // samples - 1))
            passes += alike * len(_cut(split, samples, self.rank)[1])
            step, place = step + alike, place + alike * samples
        return passes

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each pass, from the first step that is not done to the end of the epoch."""
        seed = self.seed + self.epoch
        order = epoch_order(self.dataset_size, self.shuffle, seed) if self._order is None else self._order(self.epoch)
        self._begin()
        epoch, step, place = self.epoch, self.step, self.position
        while samples := self._samples(step, place):
            split = self.split_at(step)
            before, sizes = _cut(split, samples, self.rank)
            begin = place + before
            self._next_step, self._next_place = step + 1, place + samples
            self._handed_out += len(sizes)
            for number, size in enumerate(sizes):
                self.issued.append(
                    Pass(
                        epoch=epoch,
                        step=step,
                        number=number,
                        passes=len(sizes),
                        samples=size,
                        step_start=place,
                        step_samples=samples,
                        split=split,
                    )
                )
                yield order[begin : begin + size].tolist() if size else [int(order[place])]
                begin += size
            step, place = step + 1, place + samples

    def _samples(self, step: int, place: int) -> int:
        """Return the samples of ``step`` if it begins at ``place`` in the epoch's order; 0 at its end."""
        left, total = self.dataset_size - place, self.split_at(step).total_batch_size
        after = left - total
        if after < 0 and (self._drop_last or (left < self._floor and not self._whole)):
            return 0
        if not 0 < after < self._floor or not self._whole:
            return min(left, total)
        return left - self._floor if left >= 2 * self._floor else left

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint needs; neither the number of ranks nor their sizes are in it."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "step": self.step,
            "dataset_size": self.dataset_size,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
        }

    def load_state_dict(self, state: Mapping[str, object], sizes: Sequence[int] | Shares | None = None) -> None:
        """Continue after the last step done; ``sizes`` is what to use on the present ranks (None: keep the present ones).

        Raises InputError, and takes nothing, when the state is of another dataset or order, is no state, or leaves too
        little of its epoch for these ranks.
        """
        for name, mine in (("dataset_size", self.dataset_size), ("seed", self.seed), ("shuffle", int(self.shuffle))):
            if state.get(name) != mine:
                raise InputError(f"sampler state:{name}", f"is {state.get(name)}", f"this job has {mine}")
        epoch, position, step = (
            state.get(name, default) for name, default in (("epoch", -1), ("position", -1), ("step", 0))
        )
        if not (
            isinstance(epoch, int) and isinstance(position, int) and isinstance(step, int) and min(epoch, step) >= 0
        ):
            raise InputError("sampler state", "lacks epoch, position or step", "give what state_dict returned")
        if not 0 <= position <= self.dataset_size:
            raise InputError("sampler state:position", f"is {position}", f"the epoch has {self.dataset_size} samples")
        split = self._changes[-1][1] if sizes is None else self._fitting(sizes)
        if 0 < (left := self.dataset_size - position) < self._floor:
            each = "" if self.least == 1 else f" that need {self.least} each"
            remedy = "resume on fewer ranks, or begin the next epoch"
            problem = f"leaves {left} samples of the epoch for {split.world_size} ranks{each}"
            raise InputError("sampler state", problem, remedy)
        self.epoch, self.position, self.step = epoch, position, step
        self._changes = [(step, split)]
        self._begin()


@lru_cache(maxsize=256)
def _cut(split: Shares, samples: int, rank: int) -> tuple[int, list[int]]:
    """Return the samples of lower ranks in a step, and this rank's by pass (one pass of none rather than no pass)."""
    sizes = split.sizes_of(samples)
    return int(sizes[:rank].sum()), [size for size in sizes[rank].tolist() if size] or [0]


def fitting_sizes(sizes: Sequence[int], ranks: int, total: int, least: int = 1) -> tuple[int, ...]:
    """Return (n,) whole ``sizes``. Raises InputError for one below ``least``, another sum or another number of ranks."""
    if least < 1:
        raise InputError("least", f"is {least}", "give every rank one sample or more")
    whole = tuple(int(size) for size in sizes)
    if not whole or min(whole) < least or list(whole) != list(sizes):
        raise InputError("sizes", f"is {list(sizes)}", f"give every rank {_at_least(least)}")
    if len(whole) != ranks or sum(whole) != total:
        problem = f"are {len(whole)} with sum {sum(whole)}"
        raise InputError("sizes", problem, f"this job has {ranks} ranks and {total} samples")
    return whole


def _at_least(number: int) -> str:
    return "one sample or more" if number == 1 else f"{number} samples or more, or make least smaller"


def epoch_order(dataset_size: int, shuffle: bool, seed: int) -> torch.Tensor:
    """Return the order in which an epoch visits the samples, shape (dataset_size,), as torch's DistributedSampler has it."""
    if not shuffle:
        return torch.arange(dataset_size)
    generator = torch.Generator()
    generator.manual_seed(seed)
    return torch.randperm(dataset_size, generator=generator)
