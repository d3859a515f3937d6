"""A simulation of torch's caching allocator with the tensors of a step: how much of a device a process reserves to hold them.

Source: ``c10/cuda/CUDACachingAllocator.cpp``. Sizes are rounded to 512 bytes. Up to 1 MiB comes from segments of 2 MiB,
less than 10 MiB from segments of 20 MiB, more from a segment of its own in steps of 2 MiB. The smallest free block that is
large enough is taken, and split where more than 1 MiB (of a small segment: 512 bytes) is left; free neighbours join.
Segments that are free as a whole are given back where the device has no more, and only then. A segment is a piece of the
device's memory that the allocator reserves (one cudaMalloc); a block is the part of it that holds one tensor, or is free.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

# All in bytes, by the names of torch's source where it has one.
_ROUND = 512  # kMinBlockSize: every size is rounded up to a multiple
_SMALL = 2**20  # kSmallSize: the largest block of a small segment
_SMALL_SEGMENT = 2 * 2**20  # kSmallBuffer
_LARGE_SEGMENT = 20 * 2**20  # kLargeBuffer
_OWN_SEGMENT = 10 * 2**20  # kMinLargeAlloc: from here on a block gets a segment of its own
_STEP = 2 * 2**20  # kRoundLarge: the size of such a segment is a multiple


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """A part of a segment; ``before`` and ``after`` are its neighbours there, None at the segment's ends."""

    address: int
    size: int
    """In bytes."""
    small: bool
    """Whether it lies in a small segment."""
    free: bool = True
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None


@dataclass(slots=True)
class CachingAllocator:
    """Simulates the allocator of one process: it reserves segments of a device, and gives out blocks of them."""

    limit_bytes: float = inf
    """The most bytes that may be reserved."""
    reserved_bytes: int = 0
    """Bytes of all segments that are reserved now."""
    most_bytes: int = 0
    """The most bytes that were ever reserved."""
    _next_address: int = 0
    """Where the next segment begins; addresses are counted up, never used again."""
    _free_blocks: dict[bool, list[tuple[int, int, MemoryBlock]]] = field(default_factory=lambda: {True: [], False: []})
    """(size, address, block) of the free blocks, smallest first; True: those of small segments, False: of the others."""

    def take(self, size_bytes: float) -> MemoryBlock:
        """Allocate a block for a tensor of ``size_bytes`` and return it; :meth:`give_back` frees it.

        The smallest free block that is large enough is taken, or else a new segment is reserved; if enough of it is left
        over, the rest becomes a free block. Raises MemoryError if the limit allows no new segment. O(free blocks).
        """
        size = max(-(-int(size_bytes) // _ROUND), 1) * _ROUND
        is_small = size <= _SMALL
        free_blocks = self._free_blocks[is_small]
        index = bisect_left(free_blocks, (size, -1))  # of equally large blocks, the one at the lowest address
        if index < len(free_blocks):
            _, _, block = free_blocks.pop(index)
        else:
            block = self._reserve_segment(size, is_small)
        block.free = False
        rest_bytes = block.size - size
        is_split = rest_bytes >= _ROUND if is_small else rest_bytes > _SMALL
        if is_split:
            rest_block = MemoryBlock(block.address + size, rest_bytes, is_small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest_block
            block.after = rest_block
            block.size = size
            self._add_free_block(rest_block)
        return block

    def give_back(self, block: MemoryBlock) -> None:
        """Free a block that :meth:`take` returned, and join it with free neighbours in its segment."""
        # Out of the list before the join, because it is sorted by size and joining changes the size.
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                free_blocks = self._free_blocks[neighbour.small]
                free_blocks.pop(bisect_left(free_blocks, (neighbour.size, neighbour.address, neighbour)))
        if block.after is not None and block.after.free:
            self._merge_blocks(block, block.after)
        if block.before is not None and block.before.free:
            block = block.before
            assert block.after is not None
            self._merge_blocks(block, block.after)
        self._add_free_block(block)

    def _reserve_segment(self, size: int, small: bool) -> MemoryBlock:
        """Reserve a segment for a block of ``size`` bytes; return it as one block that is not in the list of free blocks.

        If it would exceed the limit, segments that are free as a whole are given up first. ``small``: whether the segment is
        for blocks of up to 1 MiB. Raises MemoryError if the limit allows no such segment even then.
        """
        if small:
            segment_bytes = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            segment_bytes = _LARGE_SEGMENT
        else:
            segment_bytes = -(-size // _STEP) * _STEP  # rounded up
        if self.reserved_bytes + segment_bytes > self.limit_bytes:
            self._give_up_segments()
            if self.reserved_bytes + segment_bytes > self.limit_bytes:
                raise MemoryError(f"{size} bytes")
        block = MemoryBlock(self._next_address, segment_bytes, small)
        self._next_address += segment_bytes
        self.reserved_bytes += segment_bytes
        self.most_bytes = max(self.most_bytes, self.reserved_bytes)
        return block

    def _give_up_segments(self) -> None:
        """Return all segments without a block in use to the device."""
        for free_blocks in self._free_blocks.values():
            whole = [entry for entry in free_blocks if entry[2].before is None and entry[2].after is None]
            for entry in whole:  # a free block without neighbours is a whole segment
                free_blocks.remove(entry)
                self.reserved_bytes -= entry[0]

    def _add_free_block(self, block: MemoryBlock) -> None:
        """Mark a block as free and enter it, by its size, into the list of free blocks."""
        block.free = True
        insort(self._free_blocks[block.small], (block.size, block.address, block))

    def _merge_blocks(self, block: MemoryBlock, next_block: MemoryBlock) -> None:
        """Extend ``block`` over its neighbour ``next_block``, which no longer exists afterwards."""
        block.size += next_block.size
        block.after = next_block.after
        if next_block.after is not None:
            next_block.after.before = block


def reserved_bytes(
    lasting: Sequence[float],
    later: Sequence[float],
    spans: Sequence[tuple[int, int, float]],
    limit_bytes: float = inf,
) -> int | None:
    """Return the most bytes of segments that a process reserves in two steps; None: it would exceed ``limit_bytes``.

    Two steps are simulated, because torch's optimizers allocate their states at the end of the first, which changes what is
    free in the second.

    Args:
        lasting: bytes of the tensors that are allocated before the first step, and stay.
        later: bytes of the tensors that are allocated at the end of the first step, and stay: the optimizer's states.
        spans: (place made, place freed, bytes) of the tensors that every step makes and frees. A place is an index into
            the step's program; at one place tensors are freed before others are made.

    O(spans log spans).
    """
    frees = [(end, 0, tensor_index) for tensor_index, (_, end, _) in enumerate(spans)]
    makes = [(start, 1, tensor_index) for tensor_index, (start, _, _) in enumerate(spans)]
    events = sorted(frees + makes)  # by place, and at one place frees (0) before makes (1)
    allocator = CachingAllocator(limit_bytes)
    block_of: dict[int, MemoryBlock] = {}  # by index of a tensor that is there

    def play_step() -> None:
        """Allocate and free the tensors of one step in the order of the program."""
        for _, is_make, tensor_index in events:
            if is_make:
                _, _, size_bytes = spans[tensor_index]
                block_of[tensor_index] = allocator.take(size_bytes)
            else:
                allocator.give_back(block_of.pop(tensor_index))

    try:
        for size_bytes in lasting:
            allocator.take(size_bytes)
        play_step()
        for size_bytes in later:
            allocator.take(size_bytes)
        play_step()
    except MemoryError:
        return None
    return allocator.most_bytes
