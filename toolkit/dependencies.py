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

_LARGEST_TOTAL = 2**61  # a quarter of what 64 bits hold, so that a few such sums may be added


def time_scale(graph: Graph) -> float:
    """Return how many whole units make a second: 1e12 (picoseconds), or a smaller power of ten.

    The smaller one where the sum of all durations would leave 64 bits.
    """
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
    """Return for every op the numbers of the ops whose results it needs."""
    sources = graph.input_index.tolist()
    return [sources[first:last] for first, last in itertools.pairwise(graph.input_ptr.tolist())]


def reversed_edges(edges: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return for every op those whose edges name it, ascending.

    >>> reversed_edges([[], [0], [0, 1]])
    [[1, 2], [2], []]
    """
    sources: list[list[int]] = [[] for _ in edges]
    for op, others in enumerate(edges):
        for other in others:
            sources[other].append(op)
    return sources


def first_ready_first(inputs: Sequence[Sequence[int]]) -> list[int]:
    """Return the ops in an order with every one after its inputs; of several that are ready the lowest number goes first.

    ``inputs``: as of :func:`input_lists`. O((n + e) log n).
    """
    waiting, consumers = [len(sources) for sources in inputs], reversed_edges(inputs)
    ready = [op for op, count in enumerate(waiting) if count == 0]  # ascending: a heap
    order = []
    # Kahn's algorithm with a heap of what is ready.
    while ready:
        order.append(heapq.heappop(ready))
        for target in consumers[order[-1]]:
            waiting[target] -= 1
            if waiting[target] == 0:
                heapq.heappush(ready, target)
    assert len(order) == len(inputs), "the inputs form a cycle"
    return order


def collected(edges: Sequence[Sequence[int]], order: Iterable[int], marked: Iterable[int]) -> list[int]:
    """Return for each op the set of marked ops that its edges lead to, itself included, as an integer: bit k for ``marked[k]``.

    ``order``: all ops, every one after those that its edges name. O((n + e) marked / 64): a set is a union of a few
    words.

    >>> [bin(bits) for bits in collected([[], [0], [0, 1]], [0, 1, 2], [0, 1])]
    ['0b1', '0b11', '0b11']
    """
    sets = [0] * len(edges)
    for bit, op in enumerate(marked):
        sets[op] = 1 << bit
    for op in order:
        bits = sets[op]
        for other in edges[op]:
            bits |= sets[other]
        sets[op] = bits
    return sets


def bits_of(bits: int) -> Iterator[int]:
    """Yield the positions of the set bits, ascending.

    >>> list(bits_of(0b1010))
    [1, 3]
    """
    while bits:
        # The lowest set bit alone.
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def as_matrix(sets: Sequence[int], width: int) -> Flags:
    """Return bit sets as rows of a matrix of booleans, (sets, width): column k is bit k."""
    row_bytes = max(1, math.ceil(width / 8))
    raw = np.frombuffer(b"".join(bits.to_bytes(row_bytes, "little") for bits in sets), dtype=np.uint8)
    return np.unpackbits(raw.reshape(len(sets), row_bytes), axis=1, bitorder="little", count=width).astype(bool)


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
    """Return which parameters' recv ops every op needs. O((n + e) r / 64) for r recv ops.

    Ops that need the same set form a group, numbered as they first come.
    """
    recvs, inputs, order = graph.of_kind(RECV), input_lists(graph), graph.topological_order().tolist()
    # A recv needs itself, which makes no group.
    needed = collected(inputs, order, recvs.tolist())
    group_by_set: dict[int, int] = {}
    group = [
        group_by_set.setdefault(bits, len(group_by_set)) if bits and kind != RECV else -1
        for bits, kind in zip(needed, graph.kind.tolist(), strict=True)
    ]
    return Dependencies(
        inputs=inputs, order=order, recvs=recvs, sets=tuple(group_by_set), group=np.array(group, dtype=np.intp)
    )
