"""What every analysis of a graph needs first: whole times, and which ops depend on which, as bit sets.

Times are whole picoseconds, so sums do not depend on their order and equal means equal.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ddltool.arrays import Flags, Ints, Places
from ddltool.errors import InputError
from ddltool.graph import RECV, Graph

_LARGEST_TOTAL = 2**61


def time_scale(graph: Graph) -> float:
    """Return how many whole units make a second: 1e12, or a smaller power of ten when the sum would overflow."""
    scale = 1e12
    total = math.fsum(graph.duration_s.tolist())
    while total * scale > _LARGEST_TOTAL:
        scale /= 10
    return scale


def whole_times(graph: Graph) -> Ints:
    """Return the durations, shape (n,), as whole units of 1 / :func:`time_scale` seconds (picoseconds as a rule).

    Raises InputError for a graph with ops that have no duration.
    """
    unknown = np.flatnonzero(np.isnan(graph.duration_s))
    if unknown.size:
        name = graph.names[unknown[0]]
        raise InputError(graph.name, f"op {name!r} has no duration", "time the graph with an oracle first")
    return np.rint(graph.duration_s * time_scale(graph)).astype(np.int64)


def input_lists(graph: Graph) -> list[list[int]]:
    """Return the inputs of every op, as op numbers."""
    sources = graph.input_index.tolist()
    return [sources[first:last] for first, last in itertools.pairwise(graph.input_ptr.tolist())]


def reversed_edges(edges: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return for every op those whose edges name it, ascending."""
    sources: list[list[int]] = [[] for _ in edges]
    for op, others in enumerate(edges):
        for other in others:
            sources[other].append(op)
    return sources


def first_ready_first(inputs: Sequence[Sequence[int]]) -> list[int]:
    """Return the ops with every one after its inputs, the first among the ready ones. O((n + e) log n)."""
    waiting, consumers = [len(sources) for sources in inputs], reversed_edges(inputs)
    ready = [op for op, count in enumerate(waiting) if count == 0]  # ascending: a heap
    order = []
    while ready:
        order.append(heapq.heappop(ready))
        for target in consumers[order[-1]]:
            waiting[target] -= 1
            if waiting[target] == 0:
                heapq.heappush(ready, target)
    assert len(order) == len(inputs), "the inputs form a cycle"
    return order


def collected(edges: Sequence[Sequence[int]], order: Iterable[int], marked: Iterable[int]) -> list[int]:
    """Return for each op the set of marked ops that its edges lead to, itself included: bit k for ``marked[k]``.

    ``order`` has every op after those that its edges name. O((n + e) marked / 64).
    """
    sets = [0] * len(edges)
    for number, op in enumerate(marked):
        sets[op] = 1 << number
    for op in order:
        bits = sets[op]
        for other in edges[op]:
            bits |= sets[other]
        sets[op] = bits
    return sets


def bits_of(bits: int) -> Iterator[int]:
    """Yield the numbers of the set bits, ascending."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def as_matrix(sets: Sequence[int], width: int) -> Flags:
    """Return bit sets as rows of a matrix, shape (sets, width)."""
    size = max(1, -(-width // 8))
    raw = np.frombuffer(b"".join(bits.to_bytes(size, "little") for bits in sets), dtype=np.uint8)
    return np.unpackbits(raw.reshape(len(sets), size), axis=1, bitorder="little", count=width).astype(bool)


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """Which recv ops every op needs, directly or transitively, grouped.

    ``recvs`` (r,) are op indices in graph order; ``sets`` (g entries) says which recvs a group of non-recv ops needs,
    bit k for recv k; ``group`` (n,) gives each op's group, -1 for recvs and for ops that need no recv. ``inputs`` and
    ``order`` are the graph's edges, and its ops with every one after its inputs.
    """

    inputs: Sequence[Sequence[int]]
    order: Sequence[int]
    recvs: Places
    sets: tuple[int, ...]
    group: Places

    def matrix(self) -> Flags:
        """Return which recv (row) which group (column) needs, shape (r, g)."""
        return np.ascontiguousarray(as_matrix(self.sets, len(self.recvs)).T)


def find_dependencies(graph: Graph) -> Dependencies:
    """Return the dependency sets. O((n + e) r / 64), groups formed by identity of the sets."""
    recvs, inputs, order = graph.of_kind(RECV), input_lists(graph), graph.topological_order().tolist()
    needed = collected(inputs, order, recvs.tolist())
    numbers: dict[int, int] = {}
    group = [
        numbers.setdefault(bits, len(numbers)) if bits and kind != RECV else -1
        for bits, kind in zip(needed, graph.kind.tolist(), strict=True)
    ]
    return Dependencies(
        inputs=inputs, order=order, recvs=recvs, sets=tuple(numbers), group=np.array(group, dtype=np.intp)
    )
