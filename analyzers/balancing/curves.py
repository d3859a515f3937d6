"""Time over batch size of heterogeneous workers, evaluated for all of them at once (LB-BSP, section 3.3.1).

A curve gives the seconds of an iteration with x samples, communication included, and never falls with x. What solvers
need is that and the limits; so parameters of GPUs and measured tables serve them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddltool.errors import InputError

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


class Curves(Protocol):
    """Seconds over batch size of n workers."""

    @property
    def limits(self) -> Counts:
        """(n,) most samples of each worker; at least 0."""
        ...

    def seconds(self, sizes: Counts) -> Floats:
        """Return (n,) seconds of the workers with (n,) ``sizes`` samples, ``1 <= sizes <= limits``; never falling."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DeviceCurves:
    """``launch + per_sample * max(x, saturation) + communication``, all (n,) arrays; made by :meth:`of`.

    With accumulation a batch above the memory limit is made in as few and as equal parts as fit, each with its own
    launch; gradients travel once.
    """

    launch_s: Floats
    per_sample_s: Floats
    saturation: Floats
    communication_s: Floats
    memory_limit: Counts
    accumulate: bool = False

    @classmethod
    def of(
        cls,
        *,
        per_sample_s: ArrayLike,
        launch_s: ArrayLike = 0.0,
        saturation: ArrayLike = 0.0,
        communication_s: ArrayLike = 0.0,
        memory_limit: ArrayLike = 2**31,
        accumulate: bool = False,
    ) -> DeviceCurves:
        """Return checked curves; each argument is (n,) or one number for all.

        Args:
            per_sample_s: seconds per sample where the device is saturated, at least 0; its length is n.
            launch_s: Gamma(0), seconds of a batch whatever its size.
            saturation: samples below which time does not fall (x^s).
            communication_s: t_comm, seconds that do not overlap with computation.
            memory_limit: most samples in memory at a time (x^o).
            accumulate: whether larger batches are made by gradient accumulation.

        Raises InputError for values that are negative or not finite.
        """
        slope = np.atleast_1d(np.asarray(per_sample_s, dtype=np.float64))
        named = {"launch_s": launch_s, "saturation": saturation, "communication_s": communication_s}
        values = {"per_sample_s": slope}
        for name, given in named.items():
            values[name] = np.asarray(given, dtype=np.float64)
        for name, array in values.items():
            if array.shape not in ((), slope.shape):
                raise InputError(name, f"has shape {array.shape}", f"give one number or {len(slope)}")
            if not np.isfinite(array).all() or (array < 0).any():
                raise InputError(name, "has a value that is negative or not finite", "give numbers of at least 0")
            values[name] = np.broadcast_to(array, slope.shape)
        memory = np.asarray(memory_limit, dtype=np.int64)
        if memory.shape not in ((), slope.shape) or (memory < 0).any():
            raise InputError("memory_limit", "is not usable", f"give one whole number of samples or {len(slope)}")
        return cls(**values, memory_limit=np.broadcast_to(memory, slope.shape), accumulate=accumulate)

    @property
    def limits(self) -> Counts:
        """(n,) most samples; with accumulation memory does not bind."""
        if self.accumulate:
            return np.where(self.memory_limit > 0, np.int64(2**40), 0)
        return self.memory_limit

    def seconds(self, sizes: Counts) -> Floats:
        """Return (n,) seconds of an iteration with (n,) ``sizes`` samples."""
        parts = np.ones_like(sizes)
        if self.accumulate:
            parts = np.maximum(-(-sizes // np.maximum(self.memory_limit, 1)), 1)
        small, larger = sizes // parts, sizes % parts  # `larger` parts hold one sample more
        computed = larger * np.maximum(small + 1, self.saturation)
        computed += (parts - larger) * np.maximum(small, self.saturation)
        seconds: Floats = self.communication_s + parts * self.launch_s + self.per_sample_s * computed
        return seconds


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TableCurves:
    """Measured seconds for 1, 2, 3, ... samples; made by :meth:`of`."""

    table_s: Floats
    """(n, L) padded with infinity."""
    limits: Counts

    @classmethod
    def of(cls, tables_s: Sequence[ArrayLike]) -> TableCurves:
        """Return curves from (L_i,) seconds per worker, entry j for j + 1 samples; its length is the memory limit.

        Raises InputError naming worker and entry where seconds are not finite, negative, or fall with more samples.
        """
        rows = [np.asarray(row, dtype=np.float64).reshape(-1) for row in tables_s]
        if not rows:
            raise InputError("tables_s", "holds no workers", "give one table per worker")
        for worker, row in enumerate(rows):
            wrong = ~(np.isfinite(row) & (row >= 0))
            wrong[1:] |= row[1:] < row[:-1]
            if wrong.any():
                place = int(np.argmax(wrong))
                problem = f"is {row[place]:g} s"
                raise InputError(f"tables_s[{worker}][{place}]", problem, "seconds are finite and never fall")
        limits = np.array([len(row) for row in rows], dtype=np.int64)
        table = np.full((len(rows), max(1, int(limits.max()))), np.inf)
        for worker, row in enumerate(rows):
            table[worker, : len(row)] = row
        return cls(table_s=table, limits=limits)

    def seconds(self, sizes: Counts) -> Floats:
        """Return (n,) seconds of an iteration with (n,) ``sizes`` samples."""
        seconds: Floats = self.table_s[np.arange(len(sizes)), sizes - 1]
        return seconds


def capacities(curves: Curves, within_s: float, least: int | Counts, most: Counts) -> Counts:
    """Return (n,) the most samples that each worker makes within ``within_s``, from ``least`` to (n,) ``most``.

    ``least`` is one number or (n,); where ``most`` is less than it, ``most`` is the answer.

    Bisection over the size for all workers at once: O(n log max(most - least)).
    """
    high = np.array(most, dtype=np.int64)
    low = np.minimum(high, least)
    while (low < high).any():
        middle = high - (high - low) // 2
        # Where the search has ended the middle may be 0, for which curves need not be defined.
        fits = curves.seconds(np.maximum(middle, 1)) <= within_s
        going = low < high
        low = np.where(going & fits, middle, low)
        high = np.where(going & ~fits, middle - 1, high)
    return low
