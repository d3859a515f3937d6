"""A model's equal blocks: a few are recorded, and the calls of the others are copies of what one of them did.

Of a list of blocks that differ in their numbers alone, :class:`EqualBlocks` keeps six while a step is recorded, and
:func:`repeated` adds the calls of those that were left out. It demands that three blocks in a row ran the same operations on
corresponding tensors; so a block may use tensors that all share, its own, and its neighbours'. Otherwise it raises
:class:`NotAlike`, and the whole model has to be recorded.

A place is the index of a call. A list's modules are its members; a block is one of them, or several in a row that repeat.
Six blocks are recorded, and the third of them, block 2, is copied. In the whole recording its copies are blocks 2, 3, ..., and
the numbers of the blocks after it grow by the number that was left out (``added``).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddltool.analyzers.step.recording.recorder import RecordedCall, RecordedStorage, Recording, Shadow, shadows_of

_KEPT = 6
"""How many blocks are recorded."""
_COPIED = 2
"""The number of the recorded block that is copied: neither it nor a neighbour of it is the first or the last block."""
_LONGEST_PERIOD = 8
"""Members of a list, such as layers of several kinds in turn, that are tried as one block."""
_NUMBERS = ("idx", "index", "layer_id", "layer_number")
"""Parts of the names of attributes that hold a block's number."""
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type)


class NotAlike(Exception):
    """Blocks that are built alike do not run alike, or the recording holds something that cannot be copied."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EqualBlocks:
    """Blocks of a module's list, each of ``period`` members, that differ in nothing but their numbers."""

    parent: nn.Module
    """The module that has the list as its ``attribute``."""
    attribute: str
    path: str
    """The list's name in the outermost module: ``model.layers``."""
    first: int
    """The index in the list of the first block's first member."""
    period: int
    count: int
    """The number of blocks, including those that are not recorded."""

    @property
    def added(self) -> int:
        """The number of blocks that are not recorded."""
        return self.count - _KEPT

    @contextmanager
    def shortened(self, kept: int = _KEPT) -> Iterator[None]:
        """Shorten the module's list to ``kept`` blocks while the context lasts: half of them its first, half its last ones.

        The list's members before and after the equal blocks stay, too.
        """
        whole = self.parent._modules[self.attribute]
        assert isinstance(whole, nn.ModuleList)
        last_kept = kept // 2
        first_kept = kept - last_kept
        # The members that are left out.
        begin = self.first + first_kept * self.period
        end = self.first + (self.count - last_kept) * self.period
        self.parent._modules[self.attribute] = nn.ModuleList([*whole[:begin], *whole[end:]])
        try:
            yield
        finally:
            self.parent._modules[self.attribute] = whole

    def block_of(self, name: str, count: int) -> int | None:
        """Return the number of the block that a parameter or module of a name belongs to; None: it belongs to none.

        ``name``: in the outermost module, ``model.layers.3.mlp``. ``count``: how many blocks the module has, which is
        six while it is shortened.
        """
        block = self._block_by_member(name)
        return block if 0 <= block < count else None

    def _block_by_member(self, name: str) -> int:
        """Return the number of the block in whose place a name's member of the list is.

        It is negative for a member before the first block and for a name outside the list, and it is the number of
        blocks or more for a member after the last one.
        """
        member = re.match(re.escape(self.path) + r"\.(\d+)(?:\.|$)", name)
        return (int(member[1]) - self.first) // self.period if member else -1

    def name_when_shortened(self, name: str) -> str:
        """Return the name in the shortened module for the name of a parameter or module in the whole module.

        For a block that is not recorded it is the copied block's name; for a later block, that of the block ``added``
        numbers before it.
        """
        block = self._block_by_member(name)
        if block <= _COPIED:
            return name
        # A copy moves back to the copied block; what comes after the copies moves back by the blocks left out.
        shift = max(_COPIED - block, -self.added)
        return self.moved(name, shift)

    def moved(self, name: str, shift: int) -> str:
        """Return the name of the same parameter or module ``shift`` blocks further; ``name`` must lie in the list."""
        number, _, rest = name.removeprefix(f"{self.path}.").partition(".")
        moved = f"{self.path}.{int(number) + shift * self.period}"
        return f"{moved}.{rest}" if rest else moved


def equal_blocks(module: nn.Module) -> EqualBlocks | None:
    """Return the run of equal blocks in a module's lists that saves the most members; None: no run has more than six.

    Only lists outside other lists, in modules of transformers, are looked at: its code runs through a list in order,
    and other code may do anything with one.
    """
    most_saving: EqualBlocks | None = None
    most_saved = 0  # members of its list that need not be recorded
    for path, members in module.named_modules():
        if not isinstance(members, nn.ModuleList) or len(members) <= _KEPT:
            continue
        owner, _, attribute = path.rpartition(".")
        parent = module.get_submodule(owner)
        if not type(parent).__module__.startswith("transformers."):
            continue
        is_nested = any(
            isinstance(other, nn.ModuleList) and other is not members and path.startswith(f"{name}.")
            for name, other in module.named_modules()
        )
        if is_nested:
            continue
        run = _longest_run(members, getattr(parent, "config", None))
        if run is None:
            continue
        saved = run.period * (run.blocks - _KEPT)
        if saved > most_saved:
            most_saved = saved
            most_saving = EqualBlocks(
                parent=parent, attribute=attribute, path=path, first=run.first, period=run.period, count=run.blocks
            )
    return most_saving


class _Run(NamedTuple):
    """Equal blocks that follow each other in a list."""

    first: int
    """The index in the list of the first block's first member."""
    period: int
    """Members of a block."""
    blocks: int
    """The number of blocks."""


def _longest_run(members: nn.ModuleList, config: Any) -> _Run | None:
    """Return a list's longest run of equal blocks, for the smallest size of a block that gives more than six of them.

    None: no size does. ``config``: the model's configuration object, or None. Its lists with an entry for each member
    (such as kinds of layers) must repeat, too, and where it asks to drop layers at random no blocks are equal.
    """
    settings: Mapping[str, Any] = vars(config) if config is not None else {}
    if any("drop" in name and "layer" in name and value for name, value in settings.items()):
        return None
    by_member = [
        value for value in settings.values() if isinstance(value, (list, tuple)) and len(value) == len(members)
    ]
    for period in range(1, _LONGEST_PERIOD + 1):
        # By a member's index, whether the member in its place in the next block is like it.
        is_repeated = [
            all(values[index] == values[index + period] for values in by_member)
            and _is_alike(members[index], members[index + period], period)
            for index in range(len(members) - period)
        ]
        begin, length = _longest_stretch(is_repeated)
        count = length // period + 1  # the last block is repeated by none, and so is not in the stretch
        if count > _KEPT:
            return _Run(begin, period, count)
    return None


def _longest_stretch(flags: list[bool]) -> tuple[int, int]:
    """Return (begin, length) of the longest stretch of True in a list, the first one of equal length; (0, 0) without True.

    >>> _longest_stretch([True, False, True, True])
    (2, 2)
    """
    longest_begin, longest = 0, 0
    begin = 0  # of the stretch that the loop is in
    for index, flag in enumerate([*flags, False]):  # the added False ends a stretch at the end of the list
        if flag:
            continue
        length = index - begin
        if length > longest:
            longest_begin, longest = begin, length
        begin = index + 1
    return longest_begin, longest


def _is_alike(one: nn.Module, other: nn.Module, apart: int) -> bool:
    """Return whether two modules, ``apart`` numbers apart in a list, have the same parts, sizes and settings."""
    if type(one) is not type(other) or one._modules.keys() != other._modules.keys():
        return False
    for first, second in ((one._parameters, other._parameters), (one._buffers, other._buffers)):
        if first.keys() != second.keys() or any(
            _layout_key(first[name]) != _layout_key(second[name]) for name in first
        ):
            return False
    settings, other_settings = _settings_of(one), _settings_of(other)
    if settings.keys() != other_settings.keys():
        return False
    if not all(
        _settings_match(settings[name], other_settings[name], _difference_allowed(name, apart)) for name in settings
    ):
        return False
    return all(
        first is second or (first is not None and second is not None and _is_alike(first, second, apart))
        for first, second in zip(one._modules.values(), other._modules.values(), strict=True)
    )


def _settings_of(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes by name, hooks among them, without its parameters, buffers and parts."""
    return {name: value for name, value in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")}


def _layout_key(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """Return (shape, strides, type, whether it is trained): what alike tensors agree in, whatever their values."""
    if tensor is None:
        return None
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


def _difference_allowed(name: str, apart: int) -> int:
    """Return by how much the attribute ``name`` may grow between modules: ``apart`` if it holds a number of them, else 0."""
    return apart if any(part in name for part in _NUMBERS) else 0


def _settings_match(one: Any, other: Any, apart: int) -> bool:
    """Return whether two settings are equal, or whole numbers of which ``other`` is greater by ``apart`` (0: equal ones only).

    Numbers within lists and mappings have to be equal, because only a setting itself may be a block's number. Objects
    of a type that is not known to be plain are equal only to themselves.
    """
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_settings_match(one[key], other[key], 0) for key in one)
    if isinstance(one, (list, tuple)) and not isinstance(one, torch.Size):
        return len(one) == len(other) and all(_settings_match(*pair, 0) for pair in zip(one, other, strict=True))
    if type(one) is int and apart and other - one == apart:
        return True
    return isinstance(one, (*_PLAIN, set, frozenset)) and bool(one == other)


@dataclass(frozen=True, slots=True)
class _Home:
    """The block that a storage belongs to, and which of the block's storages it is."""

    block: int
    """The block's number among the recorded ones, 0 to 5."""
    slot: tuple[Any, ...]
    """Equal for corresponding storages of two blocks: ("given", name in block 0) of a parameter or buffer, otherwise
    (0 for the forward or 1 for the backward pass of the block, offset in that pass of the call that makes the storage, how
    many storages that call made before)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeated:
    """A recording with all blocks, and a function that finds a parameter's tensors in it."""

    recording: Recording
    shadow_of: Callable[[Mapping[str, Shadow], str], Shadow | None]
    """Takes the shortened module's tensors by name (parameters, or their gradients) and a name in the whole module, and
    returns the tensor of that name in ``recording``; None: there is none."""


def repeated(step: Recording, blocks: EqualBlocks, owned: Mapping[str, Shadow]) -> Repeated:
    """Return the recording of a shortened module, completed by the calls of the blocks that were left out.

    ``owned``: the shortened module's parameters and buffers by name. Raises :class:`NotAlike` where the recorded blocks ran
    differently, and where the step uses several streams, has collectives, or read assumed values.
    """
    return _Copier(step, blocks, owned).result()


class _BlockPass(NamedTuple):
    """A region of a recording: the calls of one pass of a block."""

    part: int
    """0: the forward pass, 1: the backward pass."""
    block: int


class _Copier:
    """Copies the calls of one block; :meth:`result` returns the completed recording.

    The calls are divided into regions that follow each other: each is one pass (forward or backward) of a block, or None
    for the calls before or between these. The last region, the backward pass of block 0, reaches to the end of the step. A
    place is the index of a call, a shift the number of blocks by which a call or tensor moves. Blocks are numbered as they
    were recorded, 0 to 5; in the whole recording those after the copied block, 2, have a number that is higher by the blocks
    that were left out. A storage's home is the block that it belongs to; a storage that several share has none.
    """

    def __init__(self, step: Recording, blocks: EqualBlocks, owned: Mapping[str, Shadow]) -> None:
        """Divide the recording into regions; raises NotAlike unless it can be copied.

        ``step``: the recording of the shortened module, ``blocks``: its equal blocks, ``owned``: the module's parameters and
        buffers by name.
        """
        if step.assumed or any(call.waits or call.exchange or call.stream for call in step.calls):
            raise NotAlike("assumed values, several streams and collectives are not copied")
        self.step, self.blocks, self.owned, self.calls = step, blocks, owned, step.calls
        given: dict[int, _Home | None] = {}  # by storage number; None: of no block, or tied between several
        for name, shadow in owned.items():
            block = blocks.block_of(name, _KEPT)
            home = None if block is None else _Home(block, ("given", blocks.moved(name, -block)))
            # Parameters of several blocks may share a storage, which then belongs to none of them.
            is_tied = shadow.storage in given and given[shadow.storage] != home
            given[shadow.storage] = None if is_tied else home
        self._find_regions({number: home.block for number, home in given.items() if home is not None})
        if any(self.regions[self._region_index(place)] is not None for place in step.host_waits):
            raise NotAlike("what the host waits for in a block is not copied")
        self._find_homes(given)
        # What is made for the whole recording.
        self.clones: dict[tuple[int, tuple[Any, ...]], RecordedStorage] = {}
        """Storages of blocks that were not recorded, by block and slot."""
        self.new_region_begins = self._place_regions()
        """(regions,) where each recorded region begins in the whole recording."""
        self.storages = [
            replace(record, made=self._new_made(record), freed=self._new_freed(record)) for record in step.storages
        ]

    def _find_regions(self, given: Mapping[int, int]) -> None:
        """Find the regions: set ``regions``, and ``begins``, the place of each region's first call.

        A forward pass begins at the first call in the block's module. A backward pass begins at the first call that reads
        a storage of the block: a parameter or buffer (``given``: its block by storage number), or one that the block's
        forward pass made. Raises NotAlike for blocks that do not run one after another.
        """
        calls = self.calls
        forward_end = next((place for place, call in enumerate(calls) if call.phase != "forward"), len(calls))
        forward, block_of_storage = self._forward_begins(forward_end)
        block_of_storage = {**given, **block_of_storage}
        backward: dict[int, int] = {}  # by block, the place at which its backward pass begins
        for place in range(forward_end, len(calls)):
            for shadow in (*shadows_of(calls[place].args), *shadows_of(calls[place].kwargs)):
                block = block_of_storage.get(shadow.storage)
                # All blocks may read what block 0 makes (a mask, angles), so its pass begins only after all the others.
                is_early_read = block == 0 and len(backward) < _KEPT - 1
                if block is not None and not is_early_read:
                    backward.setdefault(block, place)
        numbers = list(range(_KEPT))
        in_order = [forward.get(block, -1) for block in numbers]
        in_reverse = [backward.get(block, -1) for block in reversed(numbers)]
        if -1 in (*in_order, *in_reverse) or in_order != sorted(in_order) or in_reverse != sorted(in_reverse):
            raise NotAlike("blocks do not run one after another")
        self.begins = [0, *in_order, forward_end, *in_reverse]
        self.regions: list[_BlockPass | None] = [
            None,
            *(_BlockPass(0, block) for block in numbers),
            None,
            *(_BlockPass(1, block) for block in reversed(numbers)),
        ]

    def _forward_begins(self, forward_end: int) -> tuple[dict[int, int], dict[int, int]]:
        """Return by block the place at which its forward pass begins, and by storage number the block whose pass made it.

        ``forward_end``: the place of the first call that is not of the model's forward pass.
        """
        begins: dict[int, int] = {}
        maker: dict[int, int] = {}
        for place, call in enumerate(self.calls[:forward_end]):
            block = self.blocks.block_of(call.module, _KEPT)
            if block is not None:
                begins.setdefault(block, place)
            if not begins:
                continue
            # What is made from here on belongs to the block that began last, until the next one begins.
            current = max(begins)
            for shadow in shadows_of(call.output):
                if self.step.storages[shadow.storage].made == place:
                    maker[shadow.storage] = current
        return begins, maker

    def _region_index(self, place: int) -> int:
        """Return the index of the region that the call at a place lies in."""
        return bisect_right(self.begins, place) - 1

    def _find_homes(self, given: Mapping[int, _Home | None]) -> None:
        """Find the home of every storage: set ``homes`` by storage number (None or missing: no block's) and ``by_home``.

        A storage that is used by a block further away than the next counts as shared by all, with no home. Raises NotAlike
        if neither the first nor the last block made it. ``given``: by storage number, the homes of parameters and buffers,
        None for those of no block.
        """
        homes: dict[int, _Home | None] = dict(given)
        made_so_far: Counter[int] = Counter()  # by place, how many storages of that call were seen
        # A storage that the step makes belongs to the block in whose pass it is made.
        for record in self.step.storages:
            if record.number in homes or record.made < 0:
                continue
            region_index = self._region_index(record.made)
            region = self.regions[region_index]
            made_before = made_so_far[record.made]
            made_so_far[record.made] += 1
            if region is not None:
                offset = record.made - self.begins[region_index]
                homes[record.number] = _Home(region.block, (region.part, offset, made_before))
        for place, call in enumerate(self.calls):
            region = self.regions[self._region_index(place)]
            if region is None:
                continue
            for shadow in (*shadows_of(call.args), *shadows_of(call.kwargs)):
                home = homes.get(shadow.storage)
                if home is not None and abs(home.block - region.block) > 1:
                    if 0 < home.block < _KEPT - 1:
                        raise NotAlike("a block uses what one far away made")
                    homes[shadow.storage] = None
        self.homes = homes
        self.by_home = {home: number for number, home in homes.items() if home is not None}

    def _place_regions(self) -> list[int]:
        """Lay out the regions of the whole recording: set ``new_begins`` and ``order``; check that blocks run alike.

        Returns, by recorded region, the place at which it begins in the whole recording; for the copied block, that of the
        copy that keeps its number. Raises NotAlike if the blocks differ: all but block 0 in the operations of their forward
        pass, and the copied block and its two neighbours in anything.
        """
        ends = [*self.begins[1:], len(self.calls)]
        lengths = [end - begin for begin, end in zip(self.begins, ends, strict=True)]
        self.new_begins: dict[tuple[int, int], int] = {}
        """By (part, number of a block among all), the place at which that pass begins in the whole recording."""
        self.order: list[tuple[int, int]] = []
        """The regions of the whole recording: the index of a recorded region, and by how many blocks it is moved."""
        place = 0
        begins_of_recorded: list[int] = []
        for index, region in enumerate(self.regions):
            shifts = self._shifts_of(region)
            for shift in shifts:
                if region is not None:
                    self.new_begins[region.part, region.block + shift] = place
                if shift == 0 or len(shifts) == 1:  # not one of the added copies
                    begins_of_recorded.append(place)
                self.order.append((index, shift))
                place += lengths[index]
        self._demand_blocks_alike(lengths)
        return begins_of_recorded

    def _shifts_of(self, region: _BlockPass | None) -> list[int]:
        """Return by how many blocks a recorded region moves, for each time that it is in the whole recording, in order."""
        added = self.blocks.added
        if region is None or region.block < _COPIED:
            return [0]
        if region.block > _COPIED:
            return [added]
        copies = list(range(added + 1))
        return copies if region.part == 0 else copies[::-1]  # backward passes run from the last block to the first

    def _demand_blocks_alike(self, lengths: list[int]) -> None:
        """Raise NotAlike unless the recorded blocks run alike (:meth:`_place_regions`); ``lengths``: calls of each region."""
        index_of: dict[tuple[int, int], int] = {}  # by (part, block)
        index_of |= {region: index for index, region in enumerate(self.regions) if region is not None}
        # Every forward pass but the first block's runs the copied block's operations.
        first = self.begins[index_of[0, _COPIED]]
        targets = [call.target for call in self.calls[first : first + lengths[index_of[0, _COPIED]]]]
        for block in range(1, _KEPT):  # not the first: without a gradient before it, it may run other operations
            begin = self.begins[index_of[0, block]]
            if [call.target for call in self.calls[begin : begin + len(targets)]] != targets:
                raise NotAlike("blocks run different operations")
        # Both passes of the copied block and of its neighbours are alike call by call.
        for part in (0, 1):
            copied = index_of[part, _COPIED]
            for shift in (-1, 1):
                neighbour = index_of[part, _COPIED + shift]
                if lengths[copied] != lengths[neighbour]:
                    raise NotAlike("blocks run different operations")
                for offset in range(lengths[copied]):
                    call = self.calls[self.begins[copied] + offset]
                    other = self.calls[self.begins[neighbour] + offset]
                    self._demand_alike(call, other, shift)

    def _demand_alike(self, call: RecordedCall, other: RecordedCall, shift: int) -> None:
        """Raise NotAlike unless two calls do the same to corresponding tensors; ``other`` is ``shift`` blocks further."""
        if call.target is not other.target or call.phase != other.phase:
            raise NotAlike("blocks run different operations")
        if self._module_moved(call.module, shift) != other.module:
            raise NotAlike("blocks run in different modules")
        pairs = ((call.args, other.args), (dict(call.kwargs), dict(other.kwargs)), (call.output, other.output))
        for values, other_values in pairs:
            if not self._matches(values, other_values, shift):
                raise NotAlike(f"blocks run {call.target} differently")

    def _matches(self, one: Any, two: Any, shift: int) -> bool:
        """Return whether two values of calls are equal, with corresponding tensors in them (:meth:`_corresponds`).

        ``one``, ``two``: a call's arguments or result, in nested tuples, lists and dictionaries; ``two`` is of the call
        ``shift`` blocks further.
        """
        if isinstance(one, Shadow):
            return isinstance(two, Shadow) and self._corresponds(one, two, shift)
        if isinstance(one, (tuple, list)):
            return (
                type(one) is type(two)
                and len(one) == len(two)
                and all(self._matches(*pair, shift) for pair in zip(one, two, strict=True))
            )
        if isinstance(one, dict):
            return one.keys() == two.keys() and all(self._matches(one[key], two[key], shift) for key in one)
        return bool(one is two or one == two)

    def _corresponds(self, one: Shadow, two: Shadow, shift: int) -> bool:
        """Return whether two tensors are laid out alike, and are the same one in blocks of which one is ``shift`` further.

        A tensor that belongs to no block has to be in the same storage.
        """
        if _layout_key(one.tensor) != _layout_key(two.tensor):
            return False
        if one.tensor.storage_offset() != two.tensor.storage_offset():
            return False
        home, other_home = self.homes.get(one.storage), self.homes.get(two.storage)
        if home is None:
            return other_home is None and one.storage == two.storage
        is_same_slot = other_home == _Home(home.block + shift, home.slot)
        return is_same_slot and self._ends_alike(one.storage, two.storage, shift)

    def _ends_alike(self, one: int, two: int, shift: int) -> bool:
        """Return whether two storages have one size, and are freed at one call or at calls that are ``shift`` blocks apart.

        ``one``, ``two``: their numbers. If neither is the copied block's, it is enough that both are freed in forward or
        both in backward passes, because neither is copied.
        """
        first, second = self.step.storages[one], self.step.storages[two]
        if first.size_bytes != second.size_bytes:
            return False
        if first.freed == second.freed:
            return True
        if first.freed is None or second.freed is None or min(first.freed, second.freed) < 0:
            return False  # one outlives the step, or is freed before its first call
        index, other_index = self._region_index(first.freed), self._region_index(second.freed)
        region, other_region = self.regions[index], self.regions[other_index]
        if region is None or other_region is None or region.part != other_region.part:
            return False
        first_offset = first.freed - self.begins[index]
        second_offset = second.freed - self.begins[other_index]
        corresponds = other_region.block - region.block == shift and first_offset == second_offset
        return corresponds or _COPIED not in (self._block_of_storage(one), self._block_of_storage(two))

    def _block_of_storage(self, number: int) -> int:
        """Return the number of the block that a storage belongs to, -1: to none."""
        home = self.homes.get(number)
        return -1 if home is None else home.block

    def _module_moved(self, name: str, shift: int) -> str:
        """Return the name of the same module ``shift`` blocks further; for a module outside the blocks, its own name."""
        return name if self.blocks.block_of(name, _KEPT) is None else self.blocks.moved(name, shift)

    def _new_block(self, block: int) -> int:
        """Return a recorded block's number among all blocks."""
        return block if block <= _COPIED else block + self.blocks.added

    def _new_place(self, place: int, block: int | None, moved_block: int) -> int:
        """Return the place in the whole recording of the call at a recorded place, as seen from a block.

        ``block``: a recorded block, which becomes number ``moved_block`` among all; a call in it or in a neighbour moves
        along with it. ``block`` None, or a call in any other region: the place moves with the call's region alone, and
        ``moved_block`` is not used. -1 (before the step) stays -1.
        """
        if place < 0:
            return place
        region_index = self._region_index(place)
        region = self.regions[region_index]
        offset = place - self.begins[region_index]
        if region is None or block is None or abs(region.block - block) > 1:
            return self.new_region_begins[region_index] + offset
        new_block = moved_block + region.block - block
        return self.new_begins[region.part, new_block] + offset

    def _new_made(self, record: RecordedStorage) -> int:
        """Return the place in the whole recording at which a recorded storage is made."""
        return self._new_place_in_life(record.made, record)

    def _new_freed(self, record: RecordedStorage) -> int | None:
        """Return the place in the whole recording after which a recorded storage is freed; None: it outlives the step."""
        return None if record.freed is None else self._new_place_in_life(record.freed, record)

    def _new_place_in_life(self, place: int, record: RecordedStorage) -> int:
        """Return the place in the whole recording of a recorded place, as seen from the block that a storage belongs to."""
        home = self.homes.get(record.number)
        if home is None:
            return self._new_place(place, None, 0)
        return self._new_place(place, home.block, self._new_block(home.block))

    def _storage(self, number: int, shift: int) -> RecordedStorage:
        """Return the storage that corresponds to a recorded one ``shift`` blocks further; the same storage if of no block.

        ``number``: the recorded storage's. A storage of a block that was not recorded is cloned from the copied block's when
        it is first asked for. Raises NotAlike if there is no corresponding storage.
        """
        home = self.homes.get(number)
        if home is None:
            return self.storages[number]
        block = home.block + shift  # its number among all blocks
        recorded_block = block if block <= _COPIED else block - self.blocks.added
        is_recorded = block <= _COPIED or recorded_block > _COPIED
        if is_recorded:
            return self.storages[self._recorded_number(_Home(recorded_block, home.slot))]
        key = block, home.slot
        if key not in self.clones:
            record = self.step.storages[self._recorded_number(_Home(_COPIED, home.slot))]
            clone = RecordedStorage(
                number=len(self.storages),
                size_bytes=record.size_bytes,
                made=self._new_place(record.made, _COPIED, block),
                freed=None if record.freed is None else self._new_place(record.freed, _COPIED, block),
            )
            self.storages.append(clone)
            self.clones[key] = clone
        return self.clones[key]

    def _recorded_number(self, home: _Home) -> int:
        """Return the number of the recorded storage with a home. Raises NotAlike where there is none."""
        number = self.by_home.get(home)
        if number is None:
            raise NotAlike("a block lacks what the others have")
        return number

    def _moved(self, value: Any, shift: int) -> Any:
        """Return a call's values with every tensor replaced by the corresponding one ``shift`` blocks further."""
        if isinstance(value, Shadow):
            storage = self._storage(value.storage, shift)
            if storage.number == value.storage:
                return value
            return storage.shadow_of(value.tensor)
        if isinstance(value, (tuple, list)):
            return type(value)(self._moved(part, shift) for part in value)
        if isinstance(value, Mapping):
            return {key: self._moved(part, shift) for key, part in value.items()}
        return value

    def result(self) -> Repeated:
        """Return the recording of all blocks. Raises NotAlike where a copied block's tensor is used outside the blocks."""
        ends = [*self.begins[1:], len(self.calls)]
        calls = []
        for index, shift in self.order:  # the shift is by how many blocks the region's calls are moved
            region = self.regions[index]
            for place in range(self.begins[index], ends[index]):
                call = self.calls[place]
                if region is None:
                    self._demand_not_copied(call)
                    calls.append(replace(call))
                    continue
                calls.append(
                    replace(
                        call,
                        args=self._moved(call.args, shift),
                        kwargs=self._moved(call.kwargs, shift),
                        output=self._moved(call.output, shift),
                        module=self._module_moved(call.module, shift),
                        copied=place if region.block == _COPIED else None,
                    )
                )
        # The host waits outside the blocks only, as `__init__` has checked, so a wait moves with its region alone.
        host_waits = [self._new_place(place, None, 0) for place in self.step.host_waits]
        recording = replace(self.step, calls=calls, storages=self.storages, host_waits=host_waits)
        return Repeated(recording=recording, shadow_of=self._owned)

    def _demand_not_copied(self, call: RecordedCall) -> None:
        """Raise NotAlike if a call outside the blocks uses a tensor of the copied block: it is unknown which copy's."""
        used = shadows_of((call.args, call.kwargs, call.output))
        if any(self._block_of_storage(shadow.storage) == _COPIED for shadow in used):
            raise NotAlike("what a block made is used outside")

    def _owned(self, named: Mapping[str, Shadow], name: str) -> Shadow | None:
        """Return the tensor in the whole recording of a name in the whole module, None if there is none.

        ``named``: the shortened module's parameters, or their gradients, by name.
        """
        short_name = self.blocks.name_when_shortened(name)
        shadow = named.get(short_name)
        block = self.blocks.block_of(name, self.blocks.count)
        if shadow is None or block is None:
            return shadow
        recorded_block = self.blocks.block_of(short_name, _KEPT)
        assert recorded_block is not None
        moved: Shadow = self._moved(shadow, block - recorded_block)
        return moved
