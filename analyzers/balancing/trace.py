"""What every worker did in every iteration: speeds, and the resources that drive them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddltool.arrays import Floats
from ddltool.errors import InputError

LEAST_SPEED, MOST_SPEED = 1e-9, 1e12
"""Samples per second that a worker can have; beyond them times and their squares leave the range of numbers."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SpeedTrace:
    """K iterations of n workers; all arrays (K, n). Made by :meth:`of`; treat it as read-only."""

    names: tuple[str, ...]
    """(n,)"""
    speed: Floats
    """Samples per second of each iteration, without waiting for others."""
    cpu: Floats
    """CPU reading at the iteration's start, before its speed is known: a share that the worker can expect, 0 to 1."""
    memory: Floats
    """Memory reading at the iteration's start: the share that is available, 0 to 1."""

    @classmethod
    def of(cls, names: tuple[str, ...], speed: Floats, cpu: Floats, memory: Floats) -> SpeedTrace:
        """Return a checked trace. Raises InputError naming iteration and worker of the first unusable value."""
        arrays = {"speed": speed, "cpu": cpu, "memory": memory}
        shape = (len(speed), len(names))
        for name, array in arrays.items():
            if array.shape != shape or 0 in shape:
                raise InputError(name, f"has shape {array.shape}", f"expected {shape}, with an iteration and a worker")
            inside = ((array >= LEAST_SPEED) & (array <= MOST_SPEED)) if name == "speed" else array >= 0
            wrong = ~(np.isfinite(array) & inside)
            if wrong.any():
                at, worker = np.argwhere(wrong)[0]
                where = f"{name}, iteration {at}, worker {names[worker]}"
                speeds = f"speeds are above 0: {LEAST_SPEED:g} to {MOST_SPEED:g} samples per second, and finite"
                remedy = speeds if name == "speed" else "readings are at least 0 and finite"
                raise InputError(where, f"is {array[at, worker]:g}", remedy)
        return cls(names=names, **arrays)

    @property
    def iterations(self) -> int:
        """K, how many iterations."""
        return len(self.speed)

    @property
    def workers(self) -> int:
        """N, how many workers."""
        return len(self.names)
