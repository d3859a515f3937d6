"""torch's caching allocator, played with the tensors of a step: what a process takes of a device to hold them.

Source: ``c10/cuda/CUDACachingAllocator.cpp``. Sizes are rounded to 512 bytes. Up to 1 MiB comes from segments of 2 MiB,
less than 10 MiB from segments of 20 MiB, more from a segment of its own in steps of 2 MiB. The smallest free block that is
large enough is taken, and split where more than 1 MiB (of a small segment: 512 bytes) is left; free neighbours join.
Segments that are free as a whole are given back where the device has no more, and only then.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

_ROUND = 512
_SMALL = 2**20
_SMALL_SEGMENT = 2 * 2**20
_LARGE_SEGMENT = 20 * 2**20
_OWN_SEGMENT = 10 * 2**20
_STEP = 2 * 2**20


@dataclass(slots=True, eq=False)
class _Block:
    """A part of a segment; ``before`` and ``after`` are its neighbours there, None at the segment's ends."""

    address: int
    size: int
    small: bool
    free: bool = True
    before: _Block | None = None
    after: _Block | None = None


@dataclass(slots=True)
class CachingAllocator:
    """Blocks of memory in segments; ``reserved_bytes`` of the device, ``most_bytes`` so far, at most ``limit_bytes``."""

    limit_bytes: float = inf
    reserved_bytes: int = 0
    most_bytes: int = 0
    _address: int = 0
    _free: dict[bool, list[tuple[int, int]]] = field(default_factory=lambda: {True: [], False: []})
    """(size, address) of the free blocks of small segments and of the others, smallest first."""
    _at: dict[int, _Block] = field(default_factory=dict)

    def take(self, size_bytes: float) -> int:
        """Return the address of a block. Raises MemoryError where the limit leaves none. O(free blocks)."""
        size = max(-(-int(size_bytes) // _ROUND), 1) * _ROUND
        is_small = size <= _SMALL
        free_blocks = self._free[is_small]
        index = bisect_left(free_blocks, (size, 0))
        block = (
            self._at[free_blocks.pop(index)[1]] if index < len(free_blocks) else self._reserve_segment(size, is_small)
        )
        block.free = False
        rest_bytes = block.size - size
        if rest_bytes >= _ROUND if is_small else rest_bytes > _SMALL:
            rest_block = _Block(block.address + size, rest_bytes, is_small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest_block
            block.after, block.size = rest_block, size
            self._add_free_block(rest_block)
        return block.address

    def give_back(self, address: int) -> None:
        """Free the block at an address."""
        block = self._at[address]
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                free_blocks = self._free[neighbour.small]
                free_blocks.pop(bisect_left(free_blocks, (neighbour.size, neighbour.address)))
        if block.after is not None and block.after.free:
            self._merge_blocks(block, block.after)
        if block.before is not None and block.before.free:
            block = block.before
            assert block.after is not None
            self._merge_blocks(block, block.after)
        self._add_free_block(block)

    def _reserve_segment(self, size: int, small: bool) -> _Block:
        whole_steps = -(-size // _STEP) * _STEP
        segment_bytes = _SMALL_SEGMENT if small else _LARGE_SEGMENT if size < _OWN_SEGMENT else whole_steps
        if self.reserved_bytes + segment_bytes > self.limit_bytes:
            self._give_up_segments()
            if self.reserved_bytes + segment_bytes > self.limit_bytes:
                raise MemoryError(f"{size} bytes")
        block = self._at[self._address] = _Block(self._address, segment_bytes, small)
        self._address += segment_bytes
        self.reserved_bytes += segment_bytes
        self.most_bytes = max(self.most_bytes, self.reserved_bytes)
        return block

    def _give_up_segments(self) -> None:
        """Return all segments without a block in use to the device."""
        for free_blocks in self._free.values():
            for size, address in list(free_blocks):
                if (block := self._at[address]).before is None and block.after is None:
                    free_blocks.remove((size, address))
                    del self._at[address]
                    self.reserved_bytes -= size

    def _add_free_block(self, block: _Block) -> None:
        block.free = True
        self._at[block.address] = block
        insort(self._free[block.small], (block.size, block.address))

    def _merge_blocks(self, block: _Block, other: _Block) -> None:
        block.size += other.size
        block.after = other.after
        if other.after is not None:
            other.after.before = block
        del self._at[other.address]


def reserved_bytes(
    lasting: Sequence[float],
    later: Sequence[float],
    spans: Sequence[tuple[int, int, float]],
    limit_bytes: float = inf,
) -> int | None:
    """Return the most bytes of segments that two steps reserve; None: they exceed ``limit_bytes``.

    ``lasting`` tensors are allocated at the start, ``later`` ones at the end of the first step, as the states of torch's
    optimizers are; ``spans``: (place made, place freed, bytes). At one place tensors are freed before others are made.
    O(spans log spans).
    """
    events = sorted(
        [(end, 0, tensor_index) for tensor_index, (_, end, _) in enumerate(spans)]
        + [(start, 1, tensor_index) for tensor_index, (start, _, _) in enumerate(spans)]
    )
    allocator = CachingAllocator(limit_bytes)
    addresses: dict[int, int] = {}
    try:
        for size in lasting:
            allocator.take(size)
        for step in range(2):
            for _, is_start, tensor_index in events:
                if is_start:
                    addresses[tensor_index] = allocator.take(spans[tensor_index][2])
                else:
                    allocator.give_back(addresses.pop(tensor_index))
            for size in later if step == 0 else ():
                allocator.take(size)
    except MemoryError:
        return None
    return allocator.most_bytes
