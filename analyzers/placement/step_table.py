"""Every step time that can be the best one, with the room it gives on each device type: exact, and fast for many vectors.

In a step of T seconds a device of capability C has room for ``floor(C T)`` ESTs (EasyScale, Equation 1), so the best T for
``n_i`` devices of type i is the smallest of the numbers ``k / C_i`` with ``sum_i n_i floor(C_i T) >= maxP``. The table
lists those numbers once; after that a vector of devices costs one bisection over whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ddltool.errors import InputError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# A larger table takes seconds to make and gigabytes to keep.
LARGEST_TABLE = 4_000_000
# Capabilities outside these bounds are mistakes, and step times over them leave the range of floats.
SMALLEST_CAPABILITY, LARGEST_CAPABILITY = 1e-12, 1e12


@lru_cache(maxsize=4096)
def exact(number: float) -> Fraction:
    """Return the decimal number that was written: 0.1 is one tenth, not the nearest binary fraction."""
    return Fraction(repr(float(number)))


def check_capability(where: str, capability: float) -> None:
    """Raise InputError unless ``capability`` (mini-batches per second) is finite and of a size that a device can have."""
    if not (math.isfinite(capability) and capability > 0):
        raise InputError(where, f"is {capability}", "mini-batches per second must be a finite number > 0")
    if not SMALLEST_CAPABILITY <= capability <= LARGEST_CAPABILITY:
        bounds = f"between {SMALLEST_CAPABILITY:g} and {LARGEST_CAPABILITY:g}"
        raise InputError(where, f"is {capability:g}", f"mini-batches per second must lie {bounds}")


@lru_cache(maxsize=4096)
def weights_of(capabilities: tuple[float, ...]) -> tuple[int, ...]:
    """Return :func:`whole` of decimal numbers."""
    return whole([exact(capability) for capability in capabilities])


@lru_cache(maxsize=512)
def table_of(capabilities: tuple[float, ...], max_workers: int) -> StepTable:
    """Return :func:`step_table` of decimal numbers."""
    return step_table(tuple(exact(capability) for capability in capabilities), max_workers)


def whole(capabilities: Sequence[Fraction]) -> tuple[int, ...]:
    """Return whole numbers in the same ratio as the capabilities: ``floor(C_i k / C_j)`` is ``w_i k // w_j``."""
    common = math.lcm(*(capability.denominator for capability in capabilities))
    weights = [int(capability * common) for capability in capabilities]
    shared = math.gcd(*weights)
    return tuple(weight // shared for weight in weights)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTable:
    """Step times in increasing order, S of them, for T device types."""

    capabilities: tuple[Fraction, ...]
    max_workers: int
    kinds: Ints
    """(S,) the type i of ``k / C_i``."""
    multiples: Ints
    """(S,) the k."""
    rooms: Ints
    """(S, T) ESTs that one device of each type has room for, at most ``max_workers`` and the type's limit."""
    seconds: Floats
    """(S,) the step times."""
    throughputs: Floats
    """(S + 1,) logical mini-batches per second, ``maxP / T`` rounded once; the last is 0, for no step time."""

    def step(self, place: int) -> Fraction:
        """Return a step time in seconds exactly."""
        return int(self.multiples[place]) / self.capabilities[int(self.kinds[place])]

    def smallest(self, vectors: Ints) -> Ints:
        """Return (V,) places of the smallest step time for (V, T) numbers of devices; S where no step time is enough."""
        low = np.zeros(len(vectors), dtype=np.int64)
        high = np.full(len(vectors), len(self.multiples), dtype=np.int64)
        for _ in range(len(self.multiples).bit_length() + 1):
            middle = np.minimum((low + high) // 2, len(self.multiples) - 1)
            enough = np.einsum("vt,vt->v", vectors, self.rooms[middle]) >= self.max_workers
            low, high = np.where((low < high) & ~enough, middle + 1, low), np.where((low < high) & enough, middle, high)
        return low


def step_table(
    capabilities: tuple[Fraction, ...], max_workers: int, most_ests: tuple[int | None, ...] | None = None
) -> StepTable:
    """Return the table for device types of these capabilities (mini-batches per second of one EST alone).

    ``most_ests`` limits the ESTs on one device of each type (memory). Raises InputError when the table would have more
    than ``LARGEST_TABLE`` rows.
    """
    types = len(capabilities)
    limits = [max_workers if most is None else min(most, max_workers) for most in most_ests or (None,) * types]
    if sum(limits) > LARGEST_TABLE:
        problem = f"is {max_workers:,} on {types} device types: {sum(limits):,} possible step times"
        raise InputError("max_workers", problem, f"at most {LARGEST_TABLE:,} fit into a table; use ddltool plan")
    weights = whole(capabilities)
    kinds = np.repeat(np.arange(types), limits)
    multiples = np.concatenate([np.arange(1, limit + 1) for limit in limits])
    columns = [_rooms(weight, weights, limits, most) for weight, most in zip(weights, limits, strict=True)]
    rooms = np.stack(columns, axis=1)
    pairs = list(zip(capabilities, limits, strict=True))
    seconds = np.concatenate([_ratios(limit, rate.denominator, rate.numerator) for rate, limit in pairs])
    throughputs = np.concatenate(
        [_ratios(limit, rate.denominator, max_workers * rate.numerator, inverse=True) for rate, limit in pairs]
    )
    # Rounded quotients keep the order of the exact ones except for ties; of step times that round to the same float the
    # smaller has less room, or as much.
    order = np.lexsort((rooms.sum(axis=1), seconds))
    rooms, seconds = rooms[order], seconds[order]
    keep = np.append(True, (rooms[1:] != rooms[:-1]).any(axis=1))
    return StepTable(
        capabilities=capabilities,
        max_workers=max_workers,
        kinds=kinds[order][keep],
        multiples=multiples[order][keep],
        rooms=rooms[keep],
        seconds=seconds[keep],
        throughputs=np.append(throughputs[order][keep], 0.0),
    )


def _ratios(limit: int, factor: int, other: int, *, inverse: bool = False) -> Floats:
    """Return ``k factor / other`` for k = 1 to ``limit``, or its inverse, each rounded once as a fraction's float is."""
    if max(limit * factor, other) < 2**53:  # exact as floats
        multiples = np.arange(1, limit + 1) * float(factor)
        return np.asarray(other / multiples if inverse else multiples / other)
    if inverse:
        return np.array([other / (k * factor) for k in range(1, limit + 1)])
    return np.array([k * factor / other for k in range(1, limit + 1)])


def _rooms(weight: int, weights: Sequence[int], limits: Sequence[int], most: int) -> Ints:
    """Return ``min(floor(C T), most)`` of one type for every step time ``k / C_j``, types j one after the other."""
    parts = []
    for other, limit in zip(weights, limits, strict=True):
        if weight * limit < 2**62:  # whole numbers of 64 bits are enough
            part = np.arange(1, limit + 1, dtype=np.int64) * weight // other if other < 2**62 else np.zeros(limit, int)
        else:
            part = np.fromiter((min(k * weight // other, most) for k in range(1, limit + 1)), np.int64, limit)
        parts.append(np.minimum(part, most))
    return np.concatenate(parts)


def smallest_step(weights: Sequence[int], counts: Sequence[int], max_workers: int) -> tuple[int, int]:
    """Return (k, i): the smallest step time is ``k / C_i``; ``weights`` as from :func:`whole`, no limit on a device's ESTs.

    The sum of ``counts`` must be positive. A few whole-number operations for each type: bisection starts from bounds
    that follow from ``x - 1 < floor(x) <= x``.
    """
    pairs = [(weight, count) for weight, count in zip(weights, counts, strict=True) if count]
    pool = sum(weight * count for weight, count in pairs)
    slack = max_workers + sum(count for _, count in pairs)
    best_k, best_weight, best_kind = 0, 0, -1
    for kind, (weight, count) in enumerate(zip(weights, counts, strict=True)):
        if not count:
            continue
        low = -(-max_workers * weight // pool)
        # The smallest k known to be enough: none needs to be looked at beyond the best step time so far.
        high = min(-(-slack * weight // pool), max_workers)
        if best_kind >= 0:
            high = min(high, -(-best_k * weight // best_weight))
        while low < high:
            middle = (low + high) // 2
            if sum(number * (other * middle // weight) for other, number in pairs) >= max_workers:
                high = middle
            else:
                low = middle + 1
        if best_kind < 0 or low * best_weight < best_k * weight:
            best_k, best_weight, best_kind = low, weight, kind
    return best_k, best_kind
