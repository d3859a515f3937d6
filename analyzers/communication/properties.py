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


@dataclass(frozen=True, kw_only=True)
class Dependencies:
    """Which recv ops every op needs, directly or transitively, grouped.

    ``recvs`` (r,) are op indices in graph order; ``member`` (g, r) says which recvs a group of non-recv ops needs;
    ``group`` (n,) gives each op's group, -1 for recvs and for ops that need no recv.
    """

    recvs: NDArray[np.intp]
    member: NDArray[np.bool_]
    group: NDArray[np.intp]


def find_dependencies(graph: Graph) -> Dependencies:
    """Return the dependency sets. O((n + e) r / 64) with bit sets, groups formed by identity of the sets."""
    recvs = graph.of_kind(RECV)
    bits = [0] * len(graph)
    for number, op in enumerate(recvs):
        bits[op] = 1 << number
    for op in graph.topological_order().tolist():
        for source in graph.inputs_of(op).tolist():
            bits[op] |= bits[source]
    group = np.full(len(graph), -1, dtype=np.intp)
    numbers: dict[int, int] = {}
    for op in np.flatnonzero(graph.kind != RECV).tolist():
        if bits[op]:
            group[op] = numbers.setdefault(bits[op], len(numbers))
    member = np.zeros((len(numbers), len(recvs)), dtype=bool)
    width = (len(recvs) + 7) // 8
    for set_bits, number in numbers.items():
        raw = np.frombuffer(set_bits.to_bytes(width, "little"), dtype=np.uint8)
        member[number] = np.unpackbits(raw, bitorder="little")[: len(recvs)]
    return Dependencies(recvs=recvs, member=member, group=group)


def time_scale(graph: Graph) -> float:
    """Return how many whole units make a second: 1e12, or a smaller power of ten when the sum would overflow."""
    scale = 1e12
    while math.fsum(graph.duration_s.tolist()) * scale > _LARGEST_TOTAL:
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


class Properties:
    """M, P and M+ of the outstanding recvs, kept up to date as recvs complete.

    Completing a recv touches the groups that contain it, not the others: the work over a whole run is the number of
    (group, recv) memberships instead of recvs times ops.
    """

    def __init__(self, dependencies: Dependencies, times: NDArray[np.int64]) -> None:
        """Take the dependency sets and the times (n,) of all ops in whole units."""
        self._member = dependencies.member
        self.recv_time = times[dependencies.recvs]
        groups, recvs = self._member.shape
        grouped = dependencies.group >= 0
        self._load = np.zeros(groups, dtype=np.int64)
        np.add.at(self._load, dependencies.group[grouped], times[grouped])
        self.outstanding = np.ones(recvs, dtype=bool)
        self._count = self._member.sum(axis=1)
        self._transfer = self._member.astype(np.int64) @ self.recv_time
        self.compute = np.zeros(recvs, dtype=np.int64)
        """P of each recv: compute time that it alone still blocks."""
        for group in np.flatnonzero(self._count == 1):
            self._activate(int(group))

    def _activate(self, group: int) -> None:
        """Add a group that one recv alone still blocks to that recv's P."""
        last = np.flatnonzero(self._member[group] & self.outstanding)
        self.compute[last] += self._load[group]

    def impending(self) -> NDArray[np.int64]:
        """Return M+ of every recv, shape (r,): the least M among groups that need it and another outstanding one."""
        found = np.full(len(self.outstanding), INFINITE, dtype=np.int64)
        blocked = np.flatnonzero(self._count > 1)
        # Groups in descending order of M: what is written last is the smallest.
        for group in blocked[np.argsort(-self._transfer[blocked], kind="stable")]:
            found[self._member[group]] = self._transfer[group]
        return found

    def complete(self, recv: int) -> None:
        """Take a recv (its number among the recvs) out of the outstanding set."""
        self.outstanding[recv] = False
        touched = np.flatnonzero(self._member[:, recv] & (self._count > 0))
        self._count[touched] -= 1
        self._transfer[touched] -= self.recv_time[recv]
        for group in touched[self._count[touched] == 1]:
            self._activate(int(group))
