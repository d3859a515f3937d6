"""What each block of a model saves for its backward pass, and where: on the device, computed again, or on the host.

A block that goes to the host saves there what it made and still needs, a block that is computed again its input. The copy
begins when the block's forward pass ends, and must be done when that of the ``window``-th block after it ends; it comes back
while the backward passes from that block on run. So what is on its way lies on the device for as many places whatever the
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
# Checkpointed blocks, and which of their products (by number) each saves.
SavedOps = Mapping[str, Sequence[int]]
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
    """How many blocks' passes a copy may take without a wait."""

    @classmethod
    def of(cls, saving: SavedOps | Saving) -> Saving:
        """Return ``saving`` itself, or that of products alone, all on the device."""
        return saving if isinstance(saving, Saving) else cls(saved_ops=saving)

    @classmethod
    def read(cls, modules: Sequence[Recomputed], on_host: Sequence[Offloaded], blocks: Sequence[str]) -> Saving:
        """Return what a record says of a model's ``blocks``, the names of all of them in order."""
        places = {name: place for place, name in enumerate(blocks)}
        return cls(
            saved_ops={each.module: tuple(each.keeps) for each in modules},
            on_host=frozenset(each.module for each in on_host),
            window=max((places[each.until] - places[each.module] for each in on_host), default=1),
        )

    def recomputed(self) -> list[Recomputed]:
        """Return the record of what is computed again."""
        return [Recomputed(module=name, keeps=list(kept)) for name, kept in self.saved_ops.items()]

    def offloaded(self, blocks: Sequence[str]) -> list[Offloaded]:
        """Return the record of what is on the host; ``blocks``: the names of all blocks in order."""
        until = zip(blocks, blocks[self.window :], strict=False)
        return [Offloaded(module=name, until=later) for name, later in until if name in self.on_host]

    def __bool__(self) -> bool:
        """Return whether any block is checkpointed or saves on the host."""
        return bool(self.saved_ops or self.on_host)


def split_way(text: str) -> tuple[str, bool]:
    """Return a checkpointing's name (or budget) without ``:cpu``, and whether blocks may save on the host."""
    return text.removesuffix(ON_HOST), text.endswith(ON_HOST)


@dataclass(frozen=True, kw_only=True)
class Copies:
    """The copies of a step's blocks over the link between a device and its host; arrays are (blocks,) in seconds."""

    ends: Floats
    """When each block's forward pass ends, without any wait."""
    begins: Floats
    """When each block's backward pass, or its recomputation, begins without any wait."""
    copy_s: Floats
    """Of each block's copy, one way; 0: it stays on the device, as the last ``window`` blocks do."""
    window: int

    def waits(self) -> tuple[Floats, Floats]:
        """Return (blocks,) the seconds for which compute waits after each forward, and before each backward pass. O(blocks).

        The link takes one copy at a time in the order of the blocks, and back in the other order.
        """
        count = len(self.ends)
        after, before = np.zeros(count), np.zeros(count)
        # To the host: when the link is free again, all waits so far, and when each block's copy is done.
        copied_s, late_s, done_s = 0.0, 0.0, np.zeros(count)
        for block in range(count):
            copied_s = done_s[block] = max(copied_s, self.ends[block] + late_s) + self.copy_s[block]
            if block >= self.window:
                after[block] = max(0.0, done_s[block - self.window] - self.ends[block] - late_s)
                late_s += after[block]
        # And back: a copy may begin with the backward pass of the block a window later.
        copied_s, late_s, begun_s = 0.0, 0.0, np.zeros(count)
        for block in reversed(range(count)):
            if block + self.window < count:
                copied_s = max(copied_s, begun_s[block + self.window]) + self.copy_s[block]
                before[block] = max(0.0, copied_s - self.begins[block] - late_s)
                late_s += before[block]
            begun_s[block] = self.begins[block] + late_s
        return after, before
