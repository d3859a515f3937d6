"""The bytes that one process holds at every place of a step's program, by part: their peak, and what an allocator reserves.

A place is the index of a node of the program. A part is what tensors are for: "parameters", "gradients", "activations",
"optimizer" (its states), "updating" (what the update makes for itself), and the buffers of DDP and FSDP.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import numpy as np

from ddltool.analyzers.step.costs.allocator import reserved_bytes
from ddltool.arrays import Floats, Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """The most bytes held at one place of a program."""

    total_bytes: float
    """All bytes held at that place."""
    parts: dict[str, float]
    """Of these, the bytes of each part."""
    curve: Floats
    """(places,) the bytes held at every place, all parts together."""


class Held:
    """Bytes held over the places of a program, by part: parameters, gradients, activations and others."""

    def __init__(self, places: int) -> None:
        """Hold nothing yet, over a program of that many places."""
        self.places = places
        self._change: dict[str, Floats] = {}
        """By part (places + 1,) the bytes added at each place, less those freed."""
        self._spans: list[tuple[str, Ints, Ints, Floats]] = []
        """What was added: its part, and (tensors,) first places, places of release, and bytes."""

    def add(self, part: str, start: Ints | int, end: Ints | int, size: Floats | float) -> None:
        """Add ``size`` bytes to a part over the places ``start`` to ``end - 1``, clipped to the program.

        Each entry of the arguments, which are broadcast to one shape, is one tensor: an array of sizes with two numbers for
        ``start`` and ``end`` adds several tensors that live equally long. ``part``: a new name, or that of an existing part.
        """
        if part not in self._change:
            self._change[part] = np.zeros(self.places + 1)
        changes = self._change[part]
        starts, ends, sizes = np.broadcast_arrays(np.asarray(start), np.asarray(end), np.asarray(size, dtype=float))
        starts, ends = np.clip(starts, 0, self.places), np.clip(ends, 0, self.places)
        np.add.at(changes, starts, sizes)
        np.subtract.at(changes, ends, sizes)
        self._spans.append((part, starts.ravel(), ends.ravel(), sizes.ravel()))

    def curves(self) -> dict[str, Floats]:
        """Return, by part, (places,) the bytes held at every place."""
        return {part: np.cumsum(change)[:-1] for part, change in self._change.items()}

    def peak(self) -> Peak:
        """Return the most bytes held at one place, all parts together, which bytes of each part these are, and the curve."""
        curves = self.curves()
        curve = np.sum(list(curves.values()), axis=0)
        fullest = int(curve.argmax())
        return Peak(
            total_bytes=float(curve[fullest]),
            parts={name: float(part_curve[fullest]) for name, part_curve in curves.items()},
            curve=curve,
        )

    def reserved_bytes(self, limit_bytes: float = inf) -> int | None:
        """Return the bytes of a device that torch's caching allocator reserves for all tensors, by simulating it.

        None: ``limit_bytes`` do not suffice. O(tensors log tensors).
        """
        lasting: list[float] = []
        from_second_step: list[float] = []  # the optimizer's states: the first update makes them
        spans: list[tuple[int, int, float]] = []  # (place made, place freed, bytes) of all other tensors
        for part, starts, ends, sizes in self._spans:
            is_held = (ends > starts) & (sizes > 0)
            is_lasting = is_held & (starts == 0) & (ends == self.places)
            target = from_second_step if part == "optimizer" else lasting
            target.extend(sizes[is_lasting].tolist())
            is_temporary = is_held & ~is_lasting
            spans += zip(
                starts[is_temporary].tolist(), ends[is_temporary].tolist(), sizes[is_temporary].tolist(), strict=True
            )
        return reserved_bytes(lasting, from_second_step, spans, limit_bytes)
