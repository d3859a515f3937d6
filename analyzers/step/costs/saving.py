"""What each block of a model saves for its backward pass, and where: on the device or on the host (activation offloading).

A block keeps all tensors that its backward pass needs, or it is checkpointed: it keeps its input and some products (matrix
products, convolutions, attention), and computes the rest again. A block that saves on the host sends there what it keeps. The
copy begins when the block's forward pass ends, and must be done when that of the ``window``-th block after it ends; it comes
back while the backward passes from that block on run. So what is on its way lies on the device for as many places whatever the
other blocks do, and one link takes the copies in turn: :meth:`Copies.waits`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ddltool.arrays import Floats
from ddltool.plans import Offloaded, Recomputed

Checkpointing = Literal["none", "selective", "full"]
SavedOps = Mapping[str, Sequence[int]]
"""By name of a checkpointed block, the numbers of the products that it saves, counted from 0 within the block."""
ON_HOST = ":cpu"
"""Ends the name of a checkpointing whose blocks save on the host, as it ends that of a sharding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """What every block of a step saves."""

    saved_ops: SavedOps = field(default_factory=dict)
    """By checkpointed block, the numbers of its products that are kept; the other blocks are kept whole."""
    on_host: frozenset[str] = frozenset()
    """Blocks that save on the host."""
    window: int = 1
    """How many blocks' passes a copy may take before compute waits for it."""

    @classmethod
    def of(cls, saving: SavedOps | Saving) -> Saving:
        """Return ``saving`` as a ``Saving``; a mapping of saved products becomes one with everything on the device."""
        return saving if isinstance(saving, Saving) else cls(saved_ops=saving)

    @classmethod
    def read(cls, modules: Sequence[Recomputed], on_host: Sequence[Offloaded], blocks: Sequence[str]) -> Saving:
        """Return what a plan's or result's entries say of a model: the inverse of :meth:`recomputed` and :meth:`offloaded`.

        ``modules``: the entries of checkpointed blocks. ``on_host``: those of blocks that save on the host; each names the
        block until whose end its copy may take. ``blocks``: the names of all blocks of the model in order.
        """
        index_of = {name: index for index, name in enumerate(blocks)}
        windows = [index_of[each.until] - index_of[each.module] for each in on_host]
        return cls(
            saved_ops={each.module: tuple(each.keeps) for each in modules},
            on_host=frozenset(each.module for each in on_host),
            window=max(windows, default=1),
        )

    def recomputed(self) -> list[Recomputed]:
        """Return the checkpointed blocks, with the products that each keeps, as entries of a plan or result."""
        return [Recomputed(module=name, keeps=list(kept)) for name, kept in self.saved_ops.items()]

    def offloaded(self, blocks: Sequence[str]) -> list[Offloaded]:
        """Return the blocks that save on the host as entries of a plan or result.

        Each names the block, ``window`` later, by whose end its copy must be done. ``blocks``: the names of all blocks in
        order; the last ``window`` of them have no such later block, and are left out.
        """
        block_and_later = zip(blocks, blocks[self.window :], strict=False)
        return [Offloaded(module=name, until=later) for name, later in block_and_later if name in self.on_host]

    def __bool__(self) -> bool:
        """Return whether any block is checkpointed or saves on the host."""
        return bool(self.saved_ops or self.on_host)


def split_way(text: str) -> tuple[str, bool]:
    """Split an option's text such as "full:cpu": return (text without ``:cpu``, whether blocks may save on the host).

    The first is a kind of checkpointing, or a budget of memory such as "40GiB".
    """
    return text.removesuffix(ON_HOST), text.endswith(ON_HOST)


@dataclass(frozen=True, kw_only=True)
class Copies:
    """The copies of a step's blocks over the link between a device and its host; arrays are (blocks,) in seconds."""

    ends: Floats
    """When each block's forward pass ends, without any wait."""
    begins: Floats
    """When each block's backward pass, or its recomputation, begins without any wait."""
    copy_s: Floats
    """Seconds of each block's copy, one way; 0: it stays on the device, as the last ``window`` blocks do."""
    window: int
    """How many blocks later a copy to the host is awaited, and how many blocks earlier the copy back begins."""

    def waits(self) -> tuple[Floats, Floats]:
        """Return the seconds for which compute waits for copies: (after each forward pass, before each backward pass).

        Both are (blocks,). The link takes one copy at a time, to the host in the order of the blocks, and back in the other
        order. O(blocks).
        """
        return self._waits_for_copies_out(), self._waits_for_copies_back()

    def _waits_for_copies_out(self) -> Floats:
        """Return (blocks,) the seconds of waiting after each forward pass, for the copy of the block ``window`` before."""
        count = len(self.ends)
        waits_s = np.zeros(count)
        done_s = np.zeros(count)  # when each block's copy is done
        link_free_s = 0.0  # when the link is free again
        late_s = 0.0  # all waits so far, by which later passes end later
        for block in range(count):
            link_free_s = max(link_free_s, self.ends[block] + late_s) + self.copy_s[block]
            done_s[block] = link_free_s
            if block >= self.window:
                waits_s[block] = max(0.0, done_s[block - self.window] - self.ends[block] - late_s)
                late_s += waits_s[block]
        return waits_s

    def _waits_for_copies_back(self) -> Floats:
        """Return (blocks,) the seconds of each block's wait before its backward pass, for its own copy.

        That copy may begin with the backward pass of the block ``window`` later, which runs before.
        """
        count = len(self.begins)
        waits_s = np.zeros(count)
        begun_s = np.zeros(count)  # when each block's backward pass begins
        link_free_s = 0.0
        late_s = 0.0
        for block in reversed(range(count)):
            if block + self.window < count:
                link_free_s = max(link_free_s, begun_s[block + self.window]) + self.copy_s[block]
                waits_s[block] = max(0.0, link_free_s - self.begins[block] - late_s)
                late_s += waits_s[block]
            begun_s[block] = self.begins[block] + late_s
        return waits_s
