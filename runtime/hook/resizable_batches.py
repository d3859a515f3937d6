"""Batches whose size may change at any step, in mid-epoch, and which survive a restart on another number of processes.

Start at :class:`ResizableBatchSampler`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from torch.utils.data import Sampler

from ddltool.analyzers.goodput.elastic_table import Split
from ddltool.errors import InputError
from ddltool.runtime.hook.batches import epoch_order


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One forward and backward pass of one rank, as :class:`ResizableBatchSampler` handed it out.

    A rank without samples (a step of fewer samples than there are ranks) takes part with one *filler* sample that has
    weight 0, so that all ranks synchronise once per step: ``samples`` is 0 then.
    """

    epoch: int
    step: int
    """Optimizer steps since the start of training, from 0; the same on all ranks."""
    number: int
    """Place of this pass among those of the rank in this step, from 0."""
    passes: int
    """Passes of this rank in this step."""
    samples: int
    step_start: int
    """Position in the epoch's order of the step's first sample."""
    step_samples: int
    """Samples of all ranks and passes of this step."""
    split: Split
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


class ResizableBatchSampler(Sampler[list[int]]):
    """Passes of one rank over an epoch's permutation, under a total batch that may change at any step.

    Each step takes the next ``total_batch_size`` samples of the epoch's order, cut by rank and then by pass
    (:class:`~ddltool.analyzers.goodput.elastic_table.Split`); the last step takes what is left. So which samples are done
    after a step is one number, :attr:`position`, whatever the ranks and whatever sizes came before: every sample of an
    epoch comes exactly once, across changes of the batch, of the number of ranks, and restarts.

    Use as ``DataLoader(batch_sampler=...)``. Each list of indices is one pass, described by a :class:`Pass` that is
    appended to :attr:`issued` when the list is handed out; a loader with workers asks for lists ahead of time. A change
    therefore takes effect at a step that no rank has handed out yet (:attr:`next_step` and later), and what was handed
    out before keeps its size. :meth:`commit` says that a step is done; iterating again starts after the last step done.

    Args:
        dataset_size: number of samples.
        split: ranks, total batch and accumulation steps at the start.
        rank: this process's place.
        shuffle, seed: the order of samples, ``torch.randperm`` from ``seed + epoch``; the same on every rank.

    Raises InputError for a rank out of range or an empty dataset.

    >>> sampler = ResizableBatchSampler(10, Split(world_size=2, total_batch_size=4, accumulation_steps=0), 1, shuffle=False)
    >>> sampler.resize(Split(world_size=2, total_batch_size=6, accumulation_steps=1), step=1)
    >>> list(sampler)
    [[2, 3], [7, 8], [9]]
    """

    def __init__(self, dataset_size: int, split: Split, rank: int, shuffle: bool = True, seed: int = 0) -> None:
        if dataset_size < 1:
            raise InputError("dataset", f"has {dataset_size} samples", "give one with at least one")
        if not 0 <= rank < split.world_size:
            raise InputError("rank", f"is {rank}", f"there are {split.world_size} ranks: 0 to {split.world_size - 1}")
        self.dataset_size = dataset_size
        self.rank = rank
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.position = 0
        """Samples of the epoch that are done, on all ranks together."""
        self.step = 0
        """Steps done since the start of training."""
        self.issued: deque[Pass] = deque()
        """Passes handed out and not taken from here yet, in order."""
        self._changes: list[tuple[int, Split]] = [(0, split)]
        self._next_step = 0

    @property
    def next_step(self) -> int:
        """First step that was not handed out yet: the earliest at which this rank can still change its batch."""
        return max(self._next_step, self.step)

    def split_at(self, step: int) -> Split:
        """Return how a full step is shared out at ``step``."""
        return next(split for first, split in reversed(self._changes) if first <= step)

    def resize(self, split: Split, step: int) -> None:
        """Share out full steps by ``split`` from ``step`` on; the same step on every rank.

        Raises InputError for a step that was handed out already or another number of ranks.
        """
        if step < self.next_step:
            raise InputError("step", f"{step} was handed out already", f"the next is {self.next_step}")
        if split.world_size != self._changes[0][1].world_size:
            raise InputError("split", f"is for {split.world_size} ranks", "make a new sampler for another number")
        kept = [change for change in self._changes if change[0] < step]
        current = max((place for place, change in enumerate(kept) if change[0] <= self.step), default=0)
        self._changes = [*kept[current:], (step, split)]

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``; does nothing when that is the present one, whose position is kept."""
        if epoch != self.epoch:
            self.epoch, self.position = epoch, 0

    def commit(self, done: Pass) -> None:
        """Note that the step of ``done`` is made: its samples are done."""
        self.position = done.step_start + done.step_samples
        self.step = done.step + 1

    def __len__(self) -> int:
        """Return the number of passes that are left of this epoch on this rank, if no further change comes."""
        return sum(len(sizes) for *_, sizes in self._steps())

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of each pass, from the first step that is not done to the end of the epoch."""
        order = epoch_order(self.dataset_size, self.shuffle, self.seed + self.epoch)
        self.issued.clear()
        self._next_step = self.step
        for step, place, samples, begin, sizes in self._steps():
            split = self.split_at(step)
            for number, size in enumerate(sizes):
                self._next_step = step + 1
                self.issued.append(
                    Pass(
                        epoch=self.epoch,
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

    def state_dict(self) -> dict[str, int]:
        """Return what a checkpoint needs: the number of ranks is not in it."""
        split = self.split_at(self.step)
        return {
            "epoch": self.epoch,
            "position": self.position,
            "step": self.step,
            "dataset_size": self.dataset_size,
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "total_batch_size": split.total_batch_size,
            "accumulation_steps": split.accumulation_steps,
        }

    def load_state_dict(self, state: Mapping[str, int], split: Split | None = None) -> None:
        """Continue after the last step done; ``split`` is what to use on the present ranks (None: keep this one's).

        Raises InputError when the state is of another dataset or order, or is no state.
        """
        for name, mine in (("dataset_size", self.dataset_size), ("seed", self.seed), ("shuffle", int(self.shuffle))):
            if state.get(name) != mine:
                raise InputError(f"sampler state:{name}", f"is {state.get(name)}", f"this job has {mine}")
        epoch, position, step = (state.get(name) for name in ("epoch", "position", "step"))
        if not (
            isinstance(epoch, int) and isinstance(position, int) and isinstance(step, int) and min(epoch, step) >= 0
        ):
            raise InputError("sampler state", "lacks epoch, position or step", "give what state_dict returned")
        if not 0 <= position <= self.dataset_size:
            raise InputError("sampler state:position", f"is {position}", f"the epoch has {self.dataset_size} samples")
        self.epoch, self.position, self.step = epoch, position, step
        self._next_step = step
        self._changes = [(step, split if split is not None else self._changes[-1][1])]
        self.issued.clear()

    def _steps(self) -> Iterator[tuple[int, int, int, int, list[int]]]:
        """Yield each step that is left: number, position, samples; and this rank's position and its samples by pass."""
        step, place = self.step, self.position
        while place < self.dataset_size:
            split = self.split_at(step)
            samples = min(split.total_batch_size, self.dataset_size - place)
            before, mine = _shares(split, samples, self.rank)
            yield step, place, samples, place + before, mine
            step, place = step + 1, place + samples


@lru_cache(maxsize=256)
def _shares(split: Split, samples: int, rank: int) -> tuple[int, list[int]]:
    """Return the samples of lower ranks in a step, and this rank's by pass (one pass of none rather than no pass)."""
    sizes = split.sizes_of(samples)
    return int(sizes[:rank].sum()), [size for size in sizes[rank].tolist() if size] or [0]
