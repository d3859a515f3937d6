"""Communication dependencies and op properties: dep, M, P and M+ (TicTac, section 4.1 and Algorithm 1).

Ops with the same dependency set are one group: only a group's set, its outstanding part and the sum of its compute
times matter. Times are whole picoseconds, so sums do not depend on their order and equal means equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddltool.errors import InputError
from ddltool.graph import RECV, Graph

# No real M+ reaches it: times are scaled so that all of them together stay below 2**61.
INFINITE = np.int64(2**62)
_LARGEST_TOTAL = 2**61
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """Which recv ops every op needs, directly or transitively, grouped.

    ``recvs`` (r,) are op indices in graph order; ``sets`` (g entries) says which recvs a group of non-recv ops needs,
    bit k for recv k; ``group`` (n,) gives each op's group, -1 for recvs and for ops that need no recv.
    """

    recvs: NDArray[np.intp]
    sets: tuple[int, ...]
    group: NDArray[np.intp]

    def packed(self) -> NDArray[np.uint64]:
        """Return the sets as words, shape (ceil(r / 64), g): word w of a column holds recvs 64 w to 64 w + 63."""
        words = max(1, (len(self.recvs) + 63) // 64)
        raw = b"".join(bits.to_bytes(8 * words, "little") for bits in self.sets)
        rows = np.frombuffer(raw, dtype="<u8").reshape(len(self.sets), words)
        return np.ascontiguousarray(rows.T).astype(np.uint64, copy=False)


def find_dependencies(graph: Graph) -> Dependencies:
    """Return the dependency sets. O((n + e) r / 64) with bit sets, groups formed by identity of the sets."""
    recvs = graph.of_kind(RECV)
    bits = [0] * len(graph)
    for number, op in enumerate(recvs.tolist()):
        bits[op] = 1 << number
    pointer, sources = graph.input_ptr.tolist(), graph.input_index.tolist()
    group = [-1] * len(graph)
    numbers: dict[int, int] = {}
    is_recv = (graph.kind == RECV).tolist()
    for op in graph.topological_order().tolist():
        found = bits[op]
        for source in sources[pointer[op] : pointer[op + 1]]:
            found |= bits[source]
        bits[op] = found
        if found and not is_recv[op]:
            group[op] = numbers.setdefault(found, len(numbers))
    return Dependencies(recvs=recvs, sets=tuple(numbers), group=np.array(group, dtype=np.intp))


def time_scale(graph: Graph) -> float:
    """Return how many whole units make a second: 1e12, or a smaller power of ten when the sum would overflow."""
    scale = 1e12
    total = math.fsum(graph.duration_s.tolist())
    while total * scale > _LARGEST_TOTAL:
        scale /= 10
    return scale


def whole_times(graph: Graph) -> NDArray[np.int64]:
    """Return the durations, shape (n,), as whole units of 1 / :func:`time_scale` seconds (picoseconds as a rule).

    Raises InputError for a graph with ops that have no duration.
    """
    unknown = np.flatnonzero(np.isnan(graph.duration_s))
    if unknown.size:
        name = graph.names[unknown[0]]
        raise InputError(graph.name, f"op {name!r} has no duration", "time the graph with an oracle first")
    return np.rint(graph.duration_s * time_scale(graph)).astype(np.int64)


def members(packed: NDArray[np.uint64], groups: NDArray[np.intp], recvs: int) -> NDArray[np.bool_]:
    """Return which recvs the given groups need, shape (len(groups), recvs)."""
    rows = np.ascontiguousarray(packed[:, groups].T).astype("<u8", copy=False)
    return np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little", count=recvs).astype(bool)


class Properties:
    """M, P and M+ of the outstanding recvs, kept up to date as recvs complete.

    Completing a recv costs O(groups) in vector operations, the least M+ of a set of recvs O(groups x recvs / 64):
    nothing is computed anew from the ops. Groups that one recv alone still blocks have given their time to that recv's
    P and are dropped.
    """

    def __init__(self, dependencies: Dependencies, times: NDArray[np.int64]) -> None:
        """Take the dependency sets and the times (n,) of all ops in whole units."""
        self.recv_time = times[dependencies.recvs]
        recvs, groups = len(dependencies.recvs), len(dependencies.sets)
        grouped = dependencies.group >= 0
        self._load = np.zeros(groups, dtype=np.int64)
        np.add.at(self._load, dependencies.group[grouped], times[grouped])
        self._packed = dependencies.packed()
        self._count = np.zeros(groups, dtype=np.int64)
        self._transfer = np.zeros(groups, dtype=np.int64)
        for start in range(0, groups, _ROWS_AT_ONCE):
            chosen = np.arange(start, min(groups, start + _ROWS_AT_ONCE), dtype=np.intp)
            rows = members(self._packed, chosen, recvs)
            self._count[chosen] = rows.sum(axis=1)
            self._transfer[chosen] = rows @ self.recv_time
        self.outstanding = np.ones(recvs, dtype=bool)
        self.compute = np.zeros(recvs, dtype=np.int64)
        """P of each recv: compute time that it alone still blocks."""
        self._activate(np.flatnonzero(self._count == 1))

    def _activate(self, groups: NDArray[np.intp]) -> None:
        """Add groups that one recv alone still blocks to that recv's P."""
        if groups.size:
            rows = members(self._packed, groups, len(self.outstanding)) & self.outstanding
            np.add.at(self.compute, rows.argmax(axis=1), self._load[groups])

    def _drop(self) -> None:
        """Forget the groups that are no longer blocked by two or more recvs, once they are the majority."""
        blocked = self._count > 1
        if 2 * int(blocked.sum()) < len(blocked):
            self._packed = np.ascontiguousarray(self._packed[:, blocked])
            self._count, self._transfer, self._load = (
                self._count[blocked],
                self._transfer[blocked],
                self._load[blocked],
            )

    def least_impending(self, candidates: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which of the candidates, a mask (r,) of outstanding recvs, have the least M+ among them."""
        touched = (self._count > 1) & self._touching(candidates)
        if not touched.any():
            return candidates
        least = self._transfer[touched].min()
        return candidates & self._needed(touched & (self._transfer == least))

    def _touching(self, recvs: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which groups need any of the recvs, shape (g,)."""
        words = np.packbits(recvs, bitorder="little")
        mask = np.zeros(8 * len(self._packed), dtype=np.uint8)
        mask[: len(words)] = words
        found = np.zeros(self._packed.shape[1], dtype=bool)
        for row, word in zip(self._packed, mask.view("<u8").astype(np.uint64, copy=False), strict=True):
            if word:
                found |= (row & word) != 0
        return found

    def _needed(self, groups: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which recvs any of the groups needs, shape (r,)."""
        words = np.bitwise_or.reduce(self._packed[:, groups], axis=1)
        recvs = np.unpackbits(words.astype("<u8").view(np.uint8), bitorder="little", count=len(self.outstanding))
        return recvs.astype(bool)

    def complete(self, recv: int) -> None:
        """Take a recv (its number among the recvs) out of the outstanding set."""
        self.outstanding[recv] = False
        touched = ((self._packed[recv // 64] >> np.uint64(recv % 64)) & np.uint64(1)).astype(bool)
        self._count -= touched
        self._transfer -= touched * self.recv_time[recv]
        self._activate(np.flatnonzero(touched & (self._count == 1)))
        self._drop()
