"""Chooses the samples of each rank in each step, where batches differ between ranks and may change at any step.

Start at :class:`VariableBatchSampler`. Every epoch is one permutation of the dataset, which each rank computes from the
seed. Each step takes as many of the next samples as its total batch says; they are divided among ranks, and each rank's
among its passes. So one number, the position in the permutation, says which samples are done after a step, whatever the
ranks and sizes were: a change of sizes can neither lose nor repeat a sample.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch.utils.data import Sampler

from ddltool.arrays import Ints
from ddltool.errors import InputError
from ddltool.runtime.processes.checking import REFERENCE_RANKS
from ddltool.runtime.processes.lengths import Lengths

if TYPE_CHECKING:  # attaching the hook must not load an analyzer
    from ddltool.analyzers.job.goodput.elastic_table import Split

    Shares: TypeAlias = "Sizes | Split"
    """How the ranks share a step: unequal sizes, or the agent's equal ones in passes."""

# Loaders fetch far fewer batches ahead; the limit is for loops that never take passes from `issued`.
PASSES_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """How the ranks share a step: (n,) ``sizes`` in samples by rank, each at least ``least`` and split over ``passes``.

    With several passes the script divides the loss of each by their number, as trainers that accumulate do.
    """

    sizes: tuple[int, ...]
    """Samples of each rank in a full step."""
    least: int = 1
    """Least samples of a rank in any step."""
    passes: int = 1
    """Forward and backward passes of each rank in a step."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.sizes)

    @property
    def total_batch_size(self) -> int:
        """Samples of all ranks in a full step."""
        return sum(self.sizes)

    def sizes_of(self, samples: int) -> Ints:
        """Return the samples of each rank and pass, (n, passes), in a step of ``samples``, in proportion to the sizes.

        In a step smaller than a full one, no rank gets more than in a full one.
        """
        by_rank = np.array(self.sizes, dtype=np.int64)
        if samples != self.total_batch_size:
            from ddltool.analyzers.job.balancing.sizing import proportional  # attaching must not load an analyzer

            limits = self.sizes if samples < self.total_batch_size else None
            by_rank = proportional(self.sizes, samples, limits, self.least)
        whole_part, remainder = np.divmod(by_rank[:, None], self.passes)
        return whole_part + (np.arange(self.passes) < remainder)  # the first passes take the remainder, one sample each


@dataclass(frozen=True, slots=True)
class Share:
    """One rank's samples among those that all ranks compute in the same pass."""

    samples: int
    total: float
    """Samples of all ranks in the step, divided by its number of passes, by which the loop divides losses too."""
    even: bool
    """Whether all ranks have the same number of samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One forward and backward pass of one rank, as :class:`VariableBatchSampler` handed it out.

    In a step with fewer samples than ranks, a rank without samples takes part with one *filler* sample of weight 0, so
    that all ranks synchronise once per step: ``samples`` is 0 then.
    """

    epoch: int
    step: int
    """Number of the step since the start of training, from 0; the same on all ranks."""
    number: int
    """Index of this pass among the rank's passes of the step, from 0."""
    passes: int
    """Passes of this rank in this step."""
    samples: int
    step_start: int
    """Position in the epoch's order of the step's first sample."""
    step_samples: int
    """Samples of all ranks and passes of this step."""
    split: Shares
    """The shares of a full step; the last step of an epoch can have fewer samples."""
    is_even: bool
    """Whether all ranks have the same number of samples in all passes of the step."""

    @property
    def is_last(self) -> bool:
        """Whether this is the rank's last pass of the step, after which its gradients are complete."""
        return self.number == self.passes - 1

    @property
    def is_full(self) -> bool:
        """Whether the step has exactly as many samples as planned: an epoch's last steps may have fewer or more."""
        return self.step_samples == self.split.total_batch_size

    @property
    def weight(self) -> float:
        """Weight of this pass's mean loss in the mean loss over all samples of all ranks: its share of the step, 0 to 1."""
        return self.samples / self.step_samples

    @property
    def share(self) -> Share:
        """The rank's share of the pass's samples."""
        passes = self.split.passes if isinstance(self.split, Sizes) else 1
        return Share(self.samples, self.step_samples / passes, self.is_even)


class VariableBatchSampler(Sampler[list[int]]):
    """Batches of dataset indices of one rank; no sample comes twice in an epoch, and all ranks make equally many steps.

    Use as ``DataLoader(batch_sampler=...)``, and call :meth:`set_epoch` before each epoch. Each list of indices is one
    pass; its :class:`Pass` is appended to :attr:`issued` when the list is handed out, which a loader with workers does
    ahead of time. A change of sizes takes effect at a step that was not handed out yet (:attr:`next_step` or later), so
    ranks whose loaders look equally far ahead agree on it without a message. :meth:`commit` notes that a step is done;
    iterating again starts after the last step done in the epoch, or at its start.

    The remainder of an epoch becomes one smaller step, divided in proportion to the sizes. A remainder below ``least``
    samples per rank is left out. With ``whole`` it is kept: the step before it gives up the missing samples, or, if
    that would leave it too few itself, takes in the remainder as one larger step of less than 2 n ``least`` samples.

    Args:
        dataset_size: number of samples, N.
        sizes: (n,) samples per step of each rank, in rank order; or :class:`Sizes`; or the agent's ``Split``, whose
            ranks may get no sample. All arguments but ``rank`` are the same on every rank.
        rank: this process's index in ``sizes``.
        shuffle, seed: the order of samples, ``torch.randperm`` from ``seed + epoch``, as in torch's DistributedSampler.
        drop_last: leave out the remainder of an epoch.
        whole: give every sample of an epoch exactly once.
        least: the fewest samples of a rank in any step.
        order: function from an epoch to the (N,) indices of its samples in order; None: by ``shuffle`` and ``seed``.
        lengths: of the samples, by index: a step's samples are divided so that the ranks' costs, rather than numbers of
            samples, are in proportion to ``sizes``, with at least one sample for each rank and pass. None: consecutive
            samples go to ranks in order.

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
        lengths: Lengths | None = None,
    ) -> None:
        """Check the arguments against each other, and start at the first step of epoch 0."""
        if isinstance(sizes, Sequence):
            sizes = Sizes(fitting_sizes(sizes, len(sizes), sum(sizes), least), least)
        split: Shares = sizes
        # The fewest samples that a step of all ranks may have; 0: any number.
        self._fewest_in_step = split.world_size * split.least if isinstance(split, Sizes) else 0
        # A check's single process stands for all of the job's ranks, so it ends epochs where they do.
        self._fewest_in_step *= int(os.environ.get(REFERENCE_RANKS, "1"))
        ranks = split.world_size
        if not 0 <= rank < ranks:
            raise InputError("rank", f"is {rank}", f"there are {ranks} ranks: 0 to {ranks - 1}")
        if dataset_size < max(self._fewest_in_step, 1):
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
        """Samples of the epoch, of all ranks, in the steps that are done (committed)."""
        self.step = 0
        """Number of steps done since the start of training."""
        self.issued: deque[Pass] = deque(maxlen=PASSES_KEPT)
        """Passes handed out and not yet taken from here by the training loop, in order."""
        self.issued_count = 0
        """Number of passes that were appended to :attr:`issued` in the present iteration."""
        self._drop_last = drop_last
        self._keeps_all_samples = whole
        self._order = order
        self._lengths = lengths
        # (first step, shares from that step on), by step; the first entry covers the last committed step.
        self._changes: list[tuple[int, Shares]] = [(0, split)]
        self._begin()

    def _begin(self) -> None:
        """Start handing out passes after the last committed step; passes handed out before are forgotten."""
        self.issued.clear()
        self.issued_count = 0
        # The first step that was not handed out yet, its position, and the passes of this iteration before it.
        self._next_step = self.step
        self._next_position = self.position
        self._passes_handed_out = 0

    @property
    def next_step(self) -> int:
        """Number of the first step that was not handed out yet: the earliest at which this rank can change its batch."""
        return max(self._next_step, self.step)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each rank, (n,), in the next full step that is handed out."""
        split = self.split_at(self.next_step)
        return tuple(split.sizes_of(split.total_batch_size).sum(axis=1).tolist())

    def split_at(self, step: int) -> Shares:
        """Return the shares of a full step at ``step``; of steps long done, the oldest shares that are still kept."""
        return next((split for first, split in reversed(self._changes) if first <= step), self._changes[0][1])

    def resize(self, sizes: Sequence[int] | Shares, step: int | None = None) -> None:
        """Change the shares of full steps from ``step`` on (None: from :attr:`next_step`). All ranks make the same call.

        Raises InputError for a step that was handed out already, another number of ranks, or (n,) sizes with another
        sum or below ``least``.
        """
        first = self.next_step if step is None else step
        if first < self.next_step:
            raise InputError("step", f"{first} was handed out already", f"the next is {self.next_step}")
        split = self._checked_shares(sizes)
        # Drop changes that no longer matter: those before the one that covers the last committed step.
        earlier_changes = [change for change in self._changes if change[0] < first]
        current_index = max(
            (index for index, change in enumerate(earlier_changes) if change[0] <= self.step), default=0
        )
        self._changes = [*earlier_changes[current_index:], (first, split)]

    def _checked_shares(self, sizes: Sequence[int] | Shares) -> Shares:
        """Return ``sizes`` as shares.

        Raises InputError for another number of ranks; for (n,) sizes also for another sum or one below ``least``.
        """
        present = self._changes[-1][1]
        if isinstance(sizes, Sequence):
            return Sizes(fitting_sizes(sizes, present.world_size, present.total_batch_size, self.least), self.least)
        if sizes.world_size != present.world_size:
            raise InputError("split", f"is for {sizes.world_size} ranks", "make a new sampler for another number")
        return sizes

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``; nothing happens, and the position stays, if it is the present epoch."""
        if epoch != self.epoch:
            self.epoch = epoch
            self.position = 0
            self._begin()

    def ends_with(self, last_pass: Pass) -> bool:
        """Return whether the epoch ends with ``last_pass``: it is the last of its step, and no step follows."""
        next_position = last_pass.step_start + last_pass.step_samples
        return last_pass.is_last and not self._samples_of_step(last_pass.step + 1, next_position)

    def commit(self, done: Pass) -> None:
        """Note that the step of the pass ``done`` is complete: a new iteration starts after it."""
        self.position = done.step_start + done.step_samples
        self.step = done.step + 1

    def finish(self) -> None:
        """Note that all steps of this epoch are done."""
        self.position = self.dataset_size
        self.step = self.next_step

    def __len__(self) -> int:
        """Return the number of this rank's batches in the present iteration, if sizes do not change any more.

        Before an iteration it is the number in the next one.
        """
        step = self._next_step
        position = self._next_position
        pass_count = self._passes_handed_out
        while samples := self._samples_of_step(step, position):
            split = self.split_at(step)
            equal_steps = 1
            if samples == split.total_batch_size:  # count equal steps at once; the last two of an epoch may differ
                # The first step with other sizes; without one, more steps ahead than the epoch can have.
                change = next((first for first, _ in self._changes if first > step), self.dataset_size + step)
                equal_steps = max(1, min(change - step, (self.dataset_size - position) // samples - 1))
            _, sizes_of_passes = _own_passes(split, samples, self.rank)
            pass_count += equal_steps * len(sizes_of_passes)
            step += equal_steps
            position += equal_steps * samples
        return pass_count

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the dataset indices of each pass, from the first step that is not committed to the end of the epoch.

        The :class:`Pass` is appended to :attr:`issued` first. A rank without samples in a step gets one pass with the
        index of the step's first sample, a filler of weight 0.
        """
        if self._order is not None:
            order_tensor = self._order(self.epoch)
        else:
            order_tensor = epoch_order(self.dataset_size, self.shuffle, self.seed + self.epoch)
        order = order_tensor.numpy()  # slicing an array costs a tenth of slicing a tensor
        self._begin()
        epoch = self.epoch
        step = self.step
        position = self.position
        while samples := self._samples_of_step(step, position):
            split = self.split_at(step)
            passes, is_even = self._own_indices(order[position : position + samples], split)
            self._next_step = step + 1
            self._next_position = position + samples
            self._passes_handed_out += len(passes)
            for number, indices in enumerate(passes):
                issued_pass = Pass(
                    epoch=epoch,
                    step=step,
                    number=number,
                    passes=len(passes),
                    samples=len(indices),
                    step_start=position,
                    step_samples=samples,
                    split=split,
                    is_even=is_even,
                )
                self.issued.append(issued_pass)
                self.issued_count += 1
                yield indices or [int(order[position])]
            step += 1
            position += samples

    def _own_indices(self, indices: Ints, split: Shares) -> tuple[list[list[int]], bool]:
        """Return (the dataset indices of each of this rank's passes of a step; whether the step is even).

        A step is even if all ranks and passes have equally many samples. A rank without samples has one pass without
        indices. ``indices``: (samples,) those of all ranks in the step, in the epoch's order; ``split``: the shares of a
        full step.
        """
        samples = len(indices)
        lower_ranks_samples, sizes = _own_passes(split, samples, self.rank)
        if self._lengths is None or not isinstance(split, Sizes):  # the agent's Split is by numbers of samples only
            bounds = lower_ranks_samples + np.cumsum([0, *sizes])
            passes = [indices[begin:end].tolist() for begin, end in itertools.pairwise(bounds.tolist())]
            return passes, _is_even(split, samples)
        # For each sample, the number of its pass among those of all ranks, rank * passes + pass.
        pass_numbers = self._lengths.assign(indices, split.sizes, split.passes)
        first_own = self.rank * split.passes
        passes = [indices[pass_numbers == first_own + index].tolist() for index in range(len(sizes))]
        samples_by_pass = np.bincount(pass_numbers, minlength=split.world_size * split.passes)
        return passes, bool((samples_by_pass == samples_by_pass[0]).all())

    def _samples_of_step(self, step: int, position: int) -> int:
        """Return the samples of all ranks in the step ``step``, which begins at ``position`` in the epoch's order.

        It is 0 if the epoch is over. The last two steps of an epoch may be smaller or, with ``whole``, larger than
        planned.
        """
        remaining = self.dataset_size - position
        total = self.split_at(step).total_batch_size
        if remaining < total:  # this step would be the remainder of the epoch
            is_too_small = remaining < self._fewest_in_step and not self._keeps_all_samples
            return 0 if self._drop_last or is_too_small else remaining
        if self._keeps_all_samples and 0 < remaining - total < self._fewest_in_step:
            # The next step would be too small: leave it enough samples, or take them all if this step would be too small.
            can_be_divided = remaining >= 2 * self._fewest_in_step
            return remaining - self._fewest_in_step if can_be_divided else remaining
        return total

    def state_dict(self) -> dict[str, int]:
        """Return the position and order for a checkpoint, which a job with other ranks and sizes can load."""
        order = {"dataset_size": self.dataset_size, "seed": self.seed, "shuffle": int(self.shuffle)}
        return {"epoch": self.epoch, "position": self.position, "step": self.step, **order}

    def load_state_dict(self, state: Mapping[str, object], sizes: Sequence[int] | Shares | None = None) -> None:
        """Continue after the last committed step of ``state``; ``sizes``: new shares of the ranks, None: the present ones.

        Raises InputError, and changes nothing, for the state of another dataset or order, a broken one, or one that
        leaves too few samples of its epoch for these ranks.
        """
        for name, value in (("dataset_size", self.dataset_size), ("seed", self.seed), ("shuffle", int(self.shuffle))):
            if state.get(name) != value:
                raise InputError(f"sampler state:{name}", f"is {state.get(name)}", f"this job has {value}")
        epoch = state.get("epoch")
        position = state.get("position")
        step = state.get("step", 0)
        if not (isinstance(epoch, int) and isinstance(position, int) and isinstance(step, int)) or min(epoch, step) < 0:
            raise InputError("sampler state", "lacks epoch, position or step", "give what state_dict returned")
        if not 0 <= position <= self.dataset_size:
            raise InputError("sampler state:position", f"is {position}", f"the epoch has {self.dataset_size} samples")
        split = self._changes[-1][1] if sizes is None else self._checked_shares(sizes)
        if 0 < (left := self.dataset_size - position) < self._fewest_in_step:
            need = "" if self.least == 1 else f" that need {self.least} each"
            remedy = "resume on fewer ranks, or begin the next epoch"
            problem = f"leaves {left} samples of the epoch for {split.world_size} ranks{need}"
            raise InputError("sampler state", problem, remedy)
        self.epoch = epoch
        self.position = position
        self.step = step
        self._changes = [(step, split)]
        self._begin()


@lru_cache(maxsize=256)
def _own_passes(split: Shares, samples: int, rank: int) -> tuple[int, list[int]]:
    """Return (samples of all lower ranks in a step of ``samples``, this rank's samples in each of its passes).

    Passes without samples are left out; a rank without any has [0], since it takes part in the step with a filler of weight
    0. Results are cached, as most steps are alike; callers must not change the list.
    """
    sizes = split.sizes_of(samples)  # (ranks, passes)
    lower_ranks_samples = int(sizes[:rank].sum())
    own_sizes = [size for size in sizes[rank].tolist() if size]
    return lower_ranks_samples, own_sizes or [0]


@lru_cache(maxsize=256)
def _is_even(split: Shares, samples: int) -> bool:
    """Return whether all ranks and passes have equally many samples in a step of ``samples``."""
    sizes = split.sizes_of(samples)
    return bool((sizes == sizes[0, 0]).all())


def fitting_sizes(sizes: Sequence[int], ranks: int, total: int, least: int = 1) -> tuple[int, ...]:
    """Return ``sizes`` as integers, (ranks,), after checking that there are ``ranks`` of them with the sum ``total``.

    Raises InputError if that is not so, and for a size that is fractional or below ``least``.
    """
    if least < 1:
        raise InputError("least", f"is {least}", "give every rank one sample or more")
    integers = tuple(int(size) for size in sizes)
    if not integers or min(integers) < least or list(integers) != list(sizes):
        raise InputError("sizes", f"is {list(sizes)}", f"give every rank {_at_least(least)}")
    if len(integers) != ranks or sum(integers) != total:
        problem = f"are {len(integers)} with sum {sum(integers)}"
        raise InputError("sizes", problem, f"this job has {ranks} ranks and {total} samples")
    return integers


def _at_least(number: int) -> str:
    """Return the remedy for fewer than ``number`` samples, as words of a message."""
    return "one sample or more" if number == 1 else f"{number} samples or more, or make least smaller"


def epoch_order(dataset_size: int, shuffle: bool, seed: int) -> torch.Tensor:
    """Return the dataset indices in the order of an epoch, (dataset_size,), as in torch's DistributedSampler.

    ``seed`` is used only with ``shuffle``.
    """
    if not shuffle:
        return torch.arange(dataset_size)
    generator = torch.Generator()
    generator.manual_seed(seed)
    return torch.randperm(dataset_size, generator=generator)
