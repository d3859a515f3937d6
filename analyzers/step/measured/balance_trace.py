"""Speeds of every worker in every iteration, with CPU and memory readings that predict them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddltool.arrays import Floats
from ddltool.errors import InputError

LEAST_SPEED, MOST_SPEED = 1e-9, 1e12
"""Limits of a worker's samples per second; beyond them times and their squares leave the range of floats."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SpeedTrace:
    """K iterations of n workers; all arrays (K, n). Made by :meth:`of`; treat it as read-only."""

    names: tuple[str, ...]
    """(n,) the workers."""
    speed: Floats
    """Samples per second of each iteration, without waiting for others."""
    cpu: Floats
    """Share of the CPU that the worker can expect (0 to 1), read at the iteration's start, before its speed is known."""
    memory: Floats
    """Share of the memory that is available (0 to 1), read at the iteration's start."""

    @classmethod
    def of(cls, names: tuple[str, ...], speed: Floats, cpu: Floats, memory: Floats) -> SpeedTrace:
        """Return a checked trace. Raises InputError naming iteration and worker of the first unusable value."""
        arrays = {"speed": speed, "cpu": cpu, "memory": memory}
        shape = (len(speed), len(names))
        for name, array in arrays.items():
            if array.shape != shape or 0 in shape:
                raise InputError(name, f"has shape {array.shape}", f"expected {shape}, with an iteration and a worker")
            in_range = ((array >= LEAST_SPEED) & (array <= MOST_SPEED)) if name == "speed" else array >= 0
            is_wrong = ~(np.isfinite(array) & in_range)
            if is_wrong.any():
                iteration, worker = np.argwhere(is_wrong)[0]
                where = f"{name}, iteration {iteration}, worker {names[worker]}"
                speeds = f"speeds are above 0: {LEAST_SPEED:g} to {MOST_SPEED:g} samples per second, and finite"
                remedy = speeds if name == "speed" else "readings are at least 0 and finite"
                raise InputError(where, f"is {array[iteration, worker]:g}", remedy)
        return cls(names=names, **arrays)

    @property
    def iterations(self) -> int:
        """The number of iterations, K."""
        return len(self.speed)

    @property
    def workers(self) -> int:
        """The number of workers, n."""
        return len(self.names)


def default_warm_up(iterations: int, wanted: int) -> int:
    """Return the warm-up that a trace allows: ``wanted``, or half of a shorter trace, and never below 20."""
    return max(20, min(wanted, iterations // 2))
