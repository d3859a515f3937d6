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
        small = size <= _SMALL
        free = self._free[small]
        place = bisect_left(free, (size, 0))
        block = self._at[free.pop(place)[1]] if place < len(free) else self._segment(size, small)
        block.free = False
        rest = block.size - size
        if rest >= _ROUND if small else rest > _SMALL:
            other = _Block(block.address + size, rest, small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = other
            block.after, block.size = other, size
            self._keep(other)
        return block.address

    def give_back(self, address: int) -> None:
        """Free the block at an address."""
        block = self._at[address]
        for other in (block.before, block.after):
            if other is not None and other.free:
                own = self._free[other.small]
                own.pop(bisect_left(own, (other.size, other.address)))
        if block.after is not None and block.after.free:
            self._join(block, block.after)
        if block.before is not None and block.before.free:
            block = block.before
            assert block.after is not None
            self._join(block, block.after)
        self._keep(block)

    def _segment(self, size: int, small: bool) -> _Block:
        whole = _SMALL_SEGMENT if small else _LARGE_SEGMENT if size < _OWN_SEGMENT else -(-size // _STEP) * _STEP
        if self.reserved_bytes + whole > self.limit_bytes:
            self._give_up_segments()
            if self.reserved_bytes + whole > self.limit_bytes:
                raise MemoryError(f"{size} bytes")
        block = self._at[self._address] = _Block(self._address, whole, small)
        self._address += whole
        self.reserved_bytes += whole
        self.most_bytes = max(self.most_bytes, self.reserved_bytes)
        return block

    def _give_up_segments(self) -> None:
        for own in self._free.values():
            for size, address in list(own):
                if (block := self._at[address]).before is None and block.after is None:
                    own.remove((size, address))
                    del self._at[address]
                    self.reserved_bytes -= size

    def _keep(self, block: _Block) -> None:
        block.free = True
        self._at[block.address] = block
        insort(self._free[block.small], (block.size, block.address))

    def _join(self, block: _Block, other: _Block) -> None:
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
    steps: int = 2,
) -> int | None:
    """Return the most bytes of segments in some steps; None where the device's limit does not hold them.

    ``lasting`` tensors are there from the start, ``later`` ones from the end of the first step on, as the states of
    torch's optimizers are; ``spans``: (place made, place freed, bytes), of which at one place what ends goes before what
    begins. O(steps spans log spans).
    """
    moves = sorted(
        [(end, 0, number) for number, (_, end, _) in enumerate(spans)]
        + [(start, 1, number) for number, (start, _, _) in enumerate(spans)]
    )
    allocator = CachingAllocator(limit_bytes)
    held: dict[int, int] = {}
    try:
        for size in lasting:
            allocator.take(size)
        for step in range(steps):
            for _, begins, number in moves:
                if begins:
                    held[number] = allocator.take(spans[number][2])
                else:
                    allocator.give_back(held.pop(number))
            for size in later if step == 0 else ():
                allocator.take(size)
    except MemoryError:
        return None
    return allocator.most_bytes
