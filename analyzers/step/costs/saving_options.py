"""What each block of a step may save for its backward pass: what that costs, and what it adds to memory at every place.

Each block is kept whole, computed again whole, or computed again with some of its products kept; what it saves (what it made,
or its input) stays or goes to the host. A block's choice adds the same bytes at the same places whatever the others choose,
but for inputs that several blocks share, which are there once. So the memory at every place is linear in the choices.

A product is a matrix product, convolution or attention: what is worth keeping. A place is the index of a node of the step's
program, and a curve (places,) the bytes held at each. A choice says for every block which of its options it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations

import numpy as np

from ddltool.analyzers.step.costs.memory import Recomputation, TensorLifetimes
from ddltool.analyzers.step.costs.saving import Copies, Saving
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.arrays import Floats, Ints

# In a block of at most so many products (matrix products, convolutions, attention) all their sets are tried. In a larger one
# they are ranked by the time that they save per byte, and only the sets of the best 0, 1, 2, ... are.
_EVERY_SET = 5
# The most sets of products that the solver may choose from, by block.
_OPTIONS = 8
# A set that saves less than this share of the time is no faster: it differs by rounding.
_NO_FASTER = 1e-9


def options(lifetimes: TensorLifetimes, seconds: Floats, size: Floats) -> list[list[tuple[int, ...]]]:
    """Return for every block at most ``_OPTIONS`` Pareto-optimal sets of products to save, by ascending bytes.

    A set is a tuple of the products' numbers in their block. Pareto-optimal means that no other set holds fewer bytes and takes
    less time to recompute the rest: each further set of a block holds more bytes and takes less time. ``seconds`` (nodes,): the
    time of each place of the program. ``size`` (storages,): bytes.
    """
    options_by_block = []
    for index, block in enumerate(lifetimes.blocks):
        cost_of = partial(_cost_of_saved, lifetimes, seconds, size, index)
        front: list[tuple[int, ...]] = []
        fastest_s = np.inf
        sets_with_cost = sorted((*cost_of(saved), saved) for saved in _candidate_sets(block.keepable, cost_of))
        for _, recompute_s, saved in sets_with_cost:  # by ascending bytes
            if recompute_s < fastest_s * (1 - _NO_FASTER):
                front.append(saved)
                fastest_s = recompute_s
        # A long front is thinned evenly, with its ends.
        front_indices = np.unique(np.linspace(0, len(front) - 1, min(len(front), _OPTIONS)).round().astype(int))
        options_by_block.append([front[number] for number in front_indices.tolist()])
    return options_by_block


def _candidate_sets(
    keepable: Sequence[int], cost_of: Callable[[tuple[int, ...]], tuple[float, float]]
) -> list[tuple[int, ...]]:
    """Return the sets of a block's products that are worth a look: all of them, or in a large block the best of each length.

    ``keepable``: the numbers of the products that may be saved. ``cost_of``: returns for a set (bytes that it holds, seconds in
    which the rest of the block is recomputed).
    """
    count = len(keepable)
    if count <= _EVERY_SET:
        return list(chain.from_iterable(combinations(keepable, length) for length in range(count + 1)))
    # The best products are those that save most time per byte.
    _, full_recompute_s = cost_of(())
    alone_costs = [cost_of((product,)) for product in keepable]
    saved_s_per_byte = [
        (full_recompute_s - recompute_s) / max(saved_bytes, 1.0) for saved_bytes, recompute_s in alone_costs
    ]
    by_gain = sorted(range(count), key=lambda position: (-saved_s_per_byte[position], position))
    best_first = [keepable[position] for position in by_gain]
    return [tuple(sorted(best_first[:length])) for length in range(count + 1)]


def _cost_of_saved(
    lifetimes: TensorLifetimes, seconds: Floats, size: Floats, index: int, saved: tuple[int, ...]
) -> tuple[float, float]:
    """Return (bytes of a block's saved products, seconds in which the rest of the block is recomputed).

    ``index``: of the block. ``saved``: the numbers of the saved products in the block. ``seconds`` (nodes,): the time of each
    place of the program. ``size`` (storages,): bytes.
    """
    recomputation = Recomputation(lifetimes, {lifetimes.blocks[index].name: saved})
    return float(size[recomputation.kept].sum()), float(lifetimes.recomputed(recomputation, seconds)[index])


# One way in which a block may save: (numbers of the products that it saves, or None for everything that it made; whether it
# saves on the host).
Option = tuple[tuple[int, ...] | None, bool]


@dataclass(frozen=True, kw_only=True, eq=False)
class SavingOptions:
    """What each block may save, with its time, and with the memory of the step, linear in what is chosen.

    A choice has one entry per block: 0 for a block that keeps everything on the device, k for its k-th option, counted from 1.
    All curves (places,) are of one program, in which every recomputation has as many places as the longest that its block may
    get, so that they can be added.
    """

    lifetimes: TensorLifetimes
    window: int
    """How many blocks' passes a copy to or from the host may take before compute waits for it."""
    by_block: list[list[Option]]
    """By block, what it may save in place of everything on the device."""
    recompute_s: list[list[float]]
    """By block and option, the seconds of the recomputation."""
    copy_s: list[list[float]]
    """By block and option, the seconds of the copy to the host."""
    plain: Copies
    """When each block's passes end and begin with nothing computed again."""
    base: Floats
    """(places,) bytes without any checkpointing."""
    added: list[Floats]
    """By block (options, places): the bytes that each option adds to ``base``, mostly below zero."""
    shared: list[tuple[frozenset[int], Floats]]
    """Sets of blocks with common inputs, and the bytes (places,) that these add if any of the blocks is checkpointed."""

    @property
    def step_s(self) -> float:
        """Return the seconds until the first block's backward pass, with nothing computed again: nearly those of the step."""
        return float(self.plain.begins[0])

    @property
    def copies(self) -> bool:
        """Return whether any option copies something to the host."""
        return any(map(any, self.copy_s))

    @classmethod
    def of(
        cls,
        lifetimes: TensorLifetimes,
        seconds: Floats,
        sharding: Sharding,
        optimizer: str,
        size: Floats,
        window: int,
        host_bytes_per_s: float,
    ) -> SavingOptions:
        """Return the options of a step's blocks.

        The bytes that an option adds are those of the program with this block's recomputation less those of the program
        without any; both have the same places, because empty slots are inserted where nothing is recomputed.

        Args:
            lifetimes: the step's storages and blocks.
            seconds: (nodes,) the time of each place of the program.
            sharding: how the replicas share parameters, gradients and the optimizer's state.
            optimizer: a name of ``OPTIMIZERS``.
            size: (storages,) bytes.
            window: how many blocks' passes a copy may take before compute waits for it.
            host_bytes_per_s: of the link to the host, one way; 0: nothing goes there.
        """
        block_options: list[list[Option]] = []
        for index, sets in enumerate(options(lifetimes, seconds, size)):
            own: list[Option] = [(saved, False) for saved in sets]
            # A copy is awaited ``window`` blocks later: the last blocks have none so late, and stay on the device.
            if host_bytes_per_s and index + window < len(lifetimes.blocks):
                own.append((None, True))
                if len(lifetimes.inputs[index]):  # a checkpointed block sends its input, if that is its own
                    own += [(saved, True) for saved in sets]
            block_options.append(own)
        blocks = list(zip(lifetimes.blocks, block_options, strict=True))
        # What each option of each block costs, and how many places its longest recomputation takes.
        recompute_s: list[list[float]] = []
        copy_s: list[list[float]] = []
        longest = np.zeros(len(blocks), dtype=np.int64)  # places of each block's longest recomputation
        savings = [[_saving({block.name: option}, window) for option in own] for block, own in blocks]
        for index, own_savings in enumerate(savings):
            plans = [Recomputation(lifetimes, saving) for saving in own_savings]
            recompute_s.append([float(lifetimes.recomputed(plan, seconds)[index]) for plan in plans])
            copied_bytes = [float(size[plan.copied[index]].sum()) for plan in plans]
            copy_s.append([copied / host_bytes_per_s if copied else 0.0 for copied in copied_bytes])
            longest[index] = max(plan.length[index] for plan in plans)
        # What each option of each block adds to the memory at every place.
        empty = Recomputation(lifetimes, {}, longest)
        read_once, read_by_several = _split_inputs_by_readers(lifetimes)
        added = []
        for index, own_savings in enumerate(savings):
            own_inputs = read_once[read_once[:, 1] == index]
            changed = np.union1d(lifetimes.owned[index], own_inputs[:, 0])  # the others live as without recomputation
            before = lifetimes.activations(empty, size, own_inputs, changed)
            plans = [Recomputation(lifetimes, saving, longest) for saving in own_savings]
            added.append(np.array([lifetimes.activations(plan, size, own_inputs, changed) - before for plan in plans]))
        return cls(
            lifetimes=lifetimes,
            window=window,
            by_block=block_options,
            recompute_s=recompute_s,
            copy_s=copy_s,
            plain=lifetimes.copies(Recomputation(lifetimes, {}), seconds, size, 1.0),
            base=lifetimes.held(empty, sharding, optimizer, size).peak().curve,
            added=added,
            shared=_sum_shared_inputs(lifetimes, empty, read_by_several, size),
        )

    def curve(self, choice: Sequence[int]) -> Floats:
        """Return (places,) the bytes that a choice holds at every place of the program.

        ``choice``: by block the number of its option, counted from 1; 0: it keeps everything.
        """
        curve = self.base.copy()
        recomputed_blocks = set()
        for index, pick in enumerate(choice):
            if pick:
                curve += self.added[index][pick - 1]
                saved, _ = self.by_block[index][pick - 1]
                if saved is not None:
                    recomputed_blocks.add(index)
        for blocks, size in self.shared:
            if not recomputed_blocks.isdisjoint(blocks):
                curve += size
        return curve

    def cost_s(self, choice: Sequence[int]) -> float:
        """Return the seconds of all recomputation of a choice, and of its waits for copies.

        ``choice``: by block the number of its option, counted from 1; 0: it keeps everything.
        """
        recompute_s = _chosen_seconds(self.recompute_s, choice)
        copy_s = _chosen_seconds(self.copy_s, choice)
        # Backward passes run from the last block on, so each begins after the recomputation of all blocks behind it.
        begins = self.plain.begins + np.cumsum(recompute_s[::-1])[::-1] - recompute_s
        copies = replace(self.plain, begins=begins, copy_s=copy_s, window=self.window)
        return float(recompute_s.sum() + sum(waits_s.sum() for waits_s in copies.waits()))

    def saving(self, choice: Sequence[int]) -> Saving:
        """Return what every block saves by a choice.

        ``choice``: by block the number of its option, counted from 1; 0: it keeps everything.
        """
        chosen = zip(self.lifetimes.blocks, self.by_block, choice, strict=True)
        return _saving({block.name: own[pick - 1] for block, own, pick in chosen if pick}, self.window)


def _chosen_seconds(seconds_by_option: Sequence[Sequence[float]], choice: Sequence[int]) -> Floats:
    """Return (blocks,) the seconds of each block's chosen option; 0.0 for a block that keeps everything.

    ``seconds_by_option``: by block and option. ``choice``: by block the number of its option, counted from 1; 0: none.
    """
    return np.array([own_s[pick - 1] if pick else 0.0 for own_s, pick in zip(seconds_by_option, choice, strict=True)])


def _saving(options_by_block: Mapping[str, Option], window: int) -> Saving:
    """Return a ``Saving`` of blocks that take one option each; blocks that are not named keep everything on the device.

    ``window``: how many blocks' passes a copy to the host may take.
    """
    return Saving(
        saved_ops={name: saved for name, (saved, _) in options_by_block.items() if saved is not None},
        on_host=frozenset(name for name, (_, is_on_host) in options_by_block.items() if is_on_host),
        window=window,
    )


def _split_inputs_by_readers(lifetimes: TensorLifetimes) -> tuple[Ints, Ints]:
    """Return (rows whose storage one block reads, rows whose storage several blocks read) of ``lifetimes.read``.

    A row is (storage, block, last place of the block that reads it), for a storage that was made before the block. How long an
    input of one block is held depends on that block's choice alone; an input of several is held once, whichever of them are
    recomputed.
    """
    reader_counts = np.bincount(lifetimes.read[:, 0], minlength=1)
    read_once = reader_counts[lifetimes.read[:, 0]] == 1
    return lifetimes.read[read_once], lifetimes.read[~read_once]


def _sum_shared_inputs(
    lifetimes: TensorLifetimes, empty: Recomputation, reads: Ints, size: Floats
) -> list[tuple[frozenset[int], Floats]]:
    """Return pairs (set of blocks, bytes at every place) for the inputs that several blocks share.

    The bytes (places,) are held in addition, if any of the blocks is recomputed. An input that several blocks read is held
    beyond its last use without checkpointing, until the recomputation of each of its readers has read it. Between two such
    readings it is there if any of the readers still to come is recomputed: those readers are the set.

    Args:
        lifetimes: the step's storages and blocks.
        empty: the program in which nothing is recomputed, with places for all recomputations.
        reads: the rows of ``lifetimes.read`` for these inputs: (storage, block, last place of the block that reads it).
        size: (storages,) bytes.
    """
    freed_at = empty.moved(lifetimes.free) + 1  # (s,) first place after the last use, without checkpointing
    added: dict[frozenset[int], Floats] = {}
    for storage in np.unique(reads[:, 0]).tolist():
        needed_until = {}  # by reader, the first place after its recomputation has read the storage
        for index, last_read in reads[reads[:, 0] == storage, 1:].tolist():
            offset = min(last_read - lifetimes.blocks[index].first, int(empty.slots[index]) - 1)
            needed_until[index] = int(empty.start[index]) + offset + 1
        start = int(freed_at[storage])
        for end in sorted(set(needed_until.values())):
            if end > start:
                readers = frozenset(index for index, place in needed_until.items() if place >= end)
                added.setdefault(readers, np.zeros(lifetimes.nodes + empty.extra))[start:end] += size[storage]
                start = end
    return list(added.items())
