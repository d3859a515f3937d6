"""Times of a graph's ops as integers, and which ops depend on which, as bit sets: the input of every analysis of a graph.

Times are whole picoseconds, so that sums do not depend on their order and equal times compare equal.
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
    """Return the number of time units in a second: 1e12 (picoseconds), or a smaller power of ten.

    It is smaller if the sum of all durations in picoseconds would exceed ``_LARGEST_TOTAL``.
    """
    scale = 1e12
    total = math.fsum(graph.duration_s.tolist())
    while total * scale > _LARGEST_TOTAL:
        scale /= 10
    return scale


def whole_times(graph: Graph) -> Ints:
    """Return the durations of the n ops, (n,), as integers in units of 1 / :func:`time_scale` seconds.

    Raises InputError if an op has no duration.
    """
    unknown = np.flatnonzero(np.isnan(graph.duration_s))
    if unknown.size:
        name = graph.names[unknown[0]]
        raise InputError(graph.name, f"op {name!r} has no duration", "time the graph with an oracle first")
    return np.rint(graph.duration_s * time_scale(graph)).astype(np.int64)


def input_lists(graph: Graph) -> list[list[int]]:
    """Return for every op the indices of its inputs, the ops whose results it needs."""
    sources = graph.input_index.tolist()
    return [sources[first:last] for first, last in itertools.pairwise(graph.input_ptr.tolist())]


def reversed_edges(edges: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the reversed graph: for every op the ops that list it in ``edges``, ascending.

    >>> reversed_edges([[], [0], [0, 1]])
    [[1, 2], [2], []]
    """
    sources: list[list[int]] = [[] for _ in edges]
    for op, others in enumerate(edges):
        for other in others:
            sources[other].append(op)
    return sources


def first_ready_first(inputs: Sequence[Sequence[int]]) -> list[int]:
    """Return a topological order of the ops (each after its inputs) in which the lowest-numbered ready op comes first.

    ``inputs``: see :func:`input_lists`; they must form no cycle (AssertionError). O((n + e) log n) for n ops, e edges.
    """
    missing_inputs = [len(sources) for sources in inputs]  # by op, how many of its inputs are not in the order yet
    consumers = reversed_edges(inputs)
    ready = [op for op, count in enumerate(missing_inputs) if count == 0]  # an ascending list is a heap
    order = []
    while ready:  # Kahn's algorithm, with a heap of the ready ops
        op = heapq.heappop(ready)
        order.append(op)
        for target in consumers[op]:
            missing_inputs[target] -= 1
            if missing_inputs[target] == 0:
                heapq.heappush(ready, target)
    assert len(order) == len(inputs), "the inputs form a cycle"
    return order


def collected(edges: Sequence[Sequence[int]], order: Iterable[int], marked: Iterable[int]) -> list[int]:
    """Return for each op the set of marked ops that it reaches along its edges, including itself.

    A set is an integer whose bit k stands for ``marked[k]``. ``order``: all ops, each after those in its ``edges``.
    O((n + e) m / 64) for n ops, e edges and m marked ops.

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
    """Yield the positions of the 1 bits of ``bits``, ascending.

    >>> list(bits_of(0b1010))
    [1, 3]
    """
    while bits:
        lowest = bits & -bits  # the lowest 1 bit alone
        yield lowest.bit_length() - 1
        bits ^= lowest


def as_matrix(sets: Sequence[int], width: int) -> Flags:
    """Return bit sets as a matrix of booleans, (len(sets), width): one row for each set, column k for bit k."""
    row_bytes = max(1, math.ceil(width / 8))
    raw = np.frombuffer(b"".join(bits.to_bytes(row_bytes, "little") for bits in sets), dtype=np.uint8)
    return np.unpackbits(raw.reshape(len(sets), row_bytes), axis=1, bitorder="little", count=width).astype(bool)


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """Which recv ops every op needs, directly or transitively; ops that need the same ones form a group."""

    inputs: Sequence[Sequence[int]]
    """By op: the indices of its inputs (:func:`input_lists`)."""
    order: Sequence[int]
    """All ops, each after its inputs."""
    recvs: Places
    """(r,) op indices of the recv ops, ascending."""
    sets: tuple[int, ...]
    """By group, g entries: the recvs that its ops need, bit k for ``recvs[k]``."""
    group: Places
    """(n,) each op's group; -1 for recv ops and for ops that need no recv."""

    def matrix(self) -> Flags:
        """Return booleans, (r, g): whether the ops of a group (column) need a recv (row)."""
        return np.ascontiguousarray(as_matrix(self.sets, len(self.recvs)).T)


def find_dependencies(graph: Graph) -> Dependencies:
    """Return which recv ops every op needs; groups are numbered in the order of their first ops.

    O((n + e) r / 64) for n ops, e edges and r recv ops.
    """
    recvs = graph.of_kind(RECV)
    inputs = input_lists(graph)
    order = graph.topological_order().tolist()
    needed = collected(inputs, order, recvs.tolist())  # by op, the recvs that it needs, as bits
    group_by_set: dict[int, int] = {}
    group = [
        -1 if not bits or kind == RECV else group_by_set.setdefault(bits, len(group_by_set))  # a new set, a new number
        for bits, kind in zip(needed, graph.kind.tolist(), strict=True)
    ]
    return Dependencies(
        inputs=inputs, order=order, recvs=recvs, sets=tuple(group_by_set), group=np.array(group, dtype=np.intp)
    )
