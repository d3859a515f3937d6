"""TIC and TAC: in which order parameters should travel (TicTac, section 4). Start at :func:`tac`.

Equation 6 says A goes before B iff ``min(P_B, M_A) < min(P_A, M_B)``. It follows from the two makespans
``M_A + max(P_A, M_B) + P_B`` and ``M_B + max(P_B, M_A) + P_A`` (replace each max by the sum minus the min) and is
Johnson's rule for two machines. The paper's Algorithm 3 assigns the two minima the other way round and so returns the
reverse; Equation 6 is what is implemented here.

The comparator is no strict weak order when there are ties: three recvs can precede each other in a circle. "The
first" is therefore defined so that it cannot depend on the order of the input: among the outstanding recvs that no
other strictly precedes (if there is none: among those that no other precedes by Equation 6 alone, which always
exist), the smallest M+, then the largest P, then graph order. Graph order is the level of the earliest op that needs
the recv (longest path from the roots), then the name.

Nothing compares all pairs. With ``M* = min M`` over the recvs with ``M < P``, Equation 6 alone leaves unpreceded
exactly those with ``M = M*`` among them and those with ``P = M <= M*``; without any ``M < P``, those with the largest
P and those with ``P = M``. All of these tie with each other, so M+ decides among them: see :func:`unpreceded`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ddltool.analyzers.communication.dependencies import Dependencies, bits_of, find_dependencies, whole_times
from ddltool.arrays import Flags, Ints, Places
from ddltool.graph import Graph, natural_key

_NEVER = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Priority numbers of recv ops (0 first; equal numbers: any order), and the recvs in that order."""

    name: str
    priority: Mapping[str, int]
    order: tuple[str, ...]
    """Recv op names by priority; equal priorities in graph order."""


def tic(graph: Graph) -> Schedule:
    """Return the timing-independent order (Algorithm 2): priority is M+ with unit transfers, equal M+ equal priority.

    Needs no durations. O((n + e) r / 64) for the dependency sets, then O(groups (log groups + r / 64)).
    """
    dependencies = find_dependencies(graph)
    _, dense = np.unique(_unit_impending(dependencies), return_inverse=True)
    order = np.lexsort((_graph_order(graph, dependencies), dense))
    names = [graph.names[op] for op in dependencies.recvs]
    return Schedule(
        name="tic",
        priority={names[recv]: int(dense[recv]) for recv in order},
        order=tuple(names[recv] for recv in order),
    )


def _unit_impending(dependencies: Dependencies) -> list[int]:
    """Return M+ of each of the r recvs when each transfer takes 1 and all are outstanding: a least set size.

    Sets in ascending order of size, each looked at only for what no smaller one had: a recv is reached once.
    """
    found = [_NEVER] * len(dependencies.recvs)
    seen = 0
    for size, bits in sorted((bits.bit_count(), bits) for bits in dependencies.sets):
        if size > 1:
            for recv in bits_of(bits & ~seen):
                found[recv] = size
            seen |= bits
    return found


def tac(graph: Graph) -> Schedule:
    """Return the timing-aware order (section 4.3 with Equation 6): one recv at a time, the first under the comparator.

    O((n + e) r / 64) for the dependency sets, then O(r (groups + r)) in vector operations, against
    O(r (n r + r^2)) when every property is computed anew for every pick. Raises InputError for ops without a duration.
    """
    dependencies = find_dependencies(graph)
    properties = Properties(dependencies, whole_times(graph))
    rank = _graph_order(graph, dependencies)
    picked: list[int] = []
    for _ in range(len(dependencies.recvs)):
        picked.append(first_recv(properties, rank))
        properties.complete(picked[-1])
    names = [graph.names[dependencies.recvs[recv]] for recv in picked]
    return Schedule(name="tac", priority={name: place for place, name in enumerate(names)}, order=tuple(names))


class Properties:
    """M, P and M+ (TicTac, section 4.1 and Algorithm 1) of the outstanding recvs, kept up to date as recvs complete.

    Only groups of ops with the same dependency set matter: their outstanding part and the sum of their compute times.
    Completing a recv costs O(groups) in vector operations; nothing is computed anew from the ops.
    """

    def __init__(self, dependencies: Dependencies, times: Ints) -> None:
        """Take the dependency sets and the times (n,) of all ops in whole units."""
        self.recv_time = times[dependencies.recvs]
        self.outstanding = np.ones(len(dependencies.recvs), dtype=bool)
        self.compute = np.zeros(len(dependencies.recvs), dtype=np.int64)
        """P of each recv: compute time that it alone still blocks."""
        grouped = dependencies.group >= 0
        self._load = np.zeros(len(dependencies.sets), dtype=np.int64)
        np.add.at(self._load, dependencies.group[grouped], times[grouped])
        self._needs = dependencies.matrix()
        self._count = self._needs.sum(axis=0)
        self._transfer = np.zeros(len(dependencies.sets), dtype=np.int64)
        for needed, time in zip(self._needs, self.recv_time, strict=True):
            self._transfer[needed] += time
        self._unblock(np.flatnonzero(self._count == 1))

    def _unblock(self, groups: Places) -> None:
        """Add groups that one recv alone still blocks to that recv's P."""
        if groups.size:
            recvs = (self._needs[:, groups] & self.outstanding[:, None]).argmax(axis=0)
            np.add.at(self.compute, recvs, self._load[groups])

    def least_impending(self, candidates: Flags) -> Flags:
        """Return which of the candidates, a mask (r,) of outstanding recvs, have the least M+ among them."""
        blocked = np.flatnonzero(self._count > 1)
        blocked = blocked[np.argsort(self._transfer[blocked], kind="stable")]
        loads = self._transfer[blocked]
        first = 0
        while first < len(blocked):
            last = int(np.searchsorted(loads, loads[first], side="right"))
            found: Flags = candidates & self._needs[:, blocked[first:last]].any(axis=1)
            if found.any():
                return found
            first = last
        return candidates

    def complete(self, recv: int) -> None:
        """Take a recv (its number among the recvs) out of the outstanding set."""
        self.outstanding[recv] = False
        touched = self._needs[recv]
        self._count -= touched
        self._transfer -= touched * self.recv_time[recv]
        self._unblock(np.flatnonzero(touched & (self._count == 1)))


def first_recv(properties: Properties, rank: Places) -> int:
    """Return the number of the outstanding recv that goes first; ``rank`` (r,) is graph order."""
    compute, transfer = properties.compute, properties.recv_time
    candidates = unpreceded(compute, transfer, properties.outstanding)
    chosen = candidates if int(candidates.sum()) == 1 else properties.least_impending(candidates)
    places = np.flatnonzero(chosen)
    # A recv that Equation 6 puts behind another can still tie with one of these and have the smaller M+. Such ties rule
    # out all of them, or those with the smallest P: the largest P goes first either way.
    return int(places[np.lexsort((rank[places], -compute[places]))[0]])


def unpreceded(compute: Ints, transfer: Ints, outstanding: Flags) -> Flags:
    """Return which outstanding recvs no other precedes by Equation 6 alone, shape (r,), from P and M (r,). O(r).

    At least one if any is outstanding. Johnson's rule in one pass: recvs that transfer faster than they compute go by
    ascending M, before the others by descending P; a recv with P = M ties with either side.
    """
    early = outstanding & (transfer < compute)
    even = outstanding & (transfer == compute)
    if early.any():
        least = transfer[early].min()
        found: Flags = (early & (transfer == least)) | (even & (transfer <= least))
    else:
        found = even | (outstanding & (compute == compute[outstanding].max(initial=0)))
    return found


def _graph_order(graph: Graph, dependencies: Dependencies) -> Places:
    """Return each recv's place in graph order, shape (r,): level of its earliest consumer, then name."""
    level, earliest = [0] * len(graph), [_NEVER] * len(graph)
    for op in dependencies.order:
        if inputs := dependencies.inputs[op]:
            here = level[op] = 1 + max([level[source] for source in inputs])
            for source in inputs:
                if here < earliest[source]:
                    earliest[source] = here
    keys = [(earliest[op], natural_key(graph.names[op])) for op in dependencies.recvs.tolist()]
    rank = np.empty(len(keys), dtype=np.intp)
    rank[sorted(range(len(keys)), key=keys.__getitem__)] = np.arange(len(keys))
    return rank
