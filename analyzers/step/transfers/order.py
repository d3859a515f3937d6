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

from ddltool.arrays import Flags, Ints, Places
from ddltool.dependencies import Dependencies, bits_of, find_dependencies, whole_times
from ddltool.graph import Graph, natural_key

# Larger than any time in whole units, and than any level.
_NEVER = 2**62


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """An order of recv ops: priority numbers by op name (0 goes first; ops with equal numbers go in any order)."""

    name: str
    priority: Mapping[str, int]
    order: tuple[str, ...]
    """The names of the recv ops by priority, those of equal priority in graph order."""


def tic(graph: Graph) -> Schedule:
    """Return the timing-independent order (Algorithm 2): recvs by M+ with transfers of equal time, equal M+ in any order.

    M+ of a recv is the least sum of transfers that any op needs which also needs other recvs: how soon such an op can run.
    Needs no durations. O((n + e) r / 64) for the dependency sets, then O(groups (log groups + r / 64)).
    """
    dependencies = find_dependencies(graph)
    _, priority = np.unique(_unit_impending(dependencies), return_inverse=True)  # 0, 1, ... in place of M+
    order = np.lexsort((_graph_order(graph, dependencies), priority))
    names = [graph.names[op] for op in dependencies.recvs]
    return Schedule(
        name="tic",
        priority={names[recv]: int(priority[recv]) for recv in order},
        order=tuple(names[recv] for recv in order),
    )


def _unit_impending(dependencies: Dependencies) -> list[int]:
    """Return M+ of each of the r recvs if every transfer takes time 1 and none is done yet.

    It is the size of the smallest dependency set (the recvs that some op needs) that contains the recv and another one;
    ``_NEVER`` if there is no such set.
    """
    impending = [_NEVER] * len(dependencies.recvs)
    seen = 0  # as bits, the recvs whose smallest set has been found
    # From the smallest set to the largest; a set is an integer with a bit for each recv.
    for size, bits in sorted((bits.bit_count(), bits) for bits in dependencies.sets):
        if size < 2:  # it contains no other recv
            continue
        for recv in bits_of(bits & ~seen):
            impending[recv] = size
        seen |= bits
    return impending


def tac(graph: Graph) -> Schedule:
    """Return the timing-aware order (TicTac, section 4.3 with Equation 6): repeatedly pick the recv that goes first.

    For n ops, e edges, r recvs and g distinct dependency sets: O((n + e) r / 64) for the sets, as bits of 64-bit words, then
    O(r (g + r)) in vector operations. Raises InputError for ops without a duration.
    """
    dependencies = find_dependencies(graph)
    properties = Properties(dependencies, whole_times(graph))
    rank = _graph_order(graph, dependencies)
    picked_recvs: list[int] = []
    for _ in range(len(dependencies.recvs)):
        recv = first_recv(properties, rank)
        picked_recvs.append(recv)
        properties.complete(recv)
    names = [graph.names[dependencies.recvs[recv]] for recv in picked_recvs]
    return Schedule(name="tac", priority={name: place for place, name in enumerate(names)}, order=tuple(names))


class Properties:
    """M, P and M+ (TicTac, section 4.1 and Algorithm 1) of the outstanding recvs, kept up to date as recvs complete.

    M of a recv is the time of its transfer, P the compute time that it alone still blocks, M+ see :func:`tic`. Ops with the
    same dependency set form a group, of which only the outstanding recvs and the sum of compute times are kept. Completing a
    recv costs O(groups) in vector operations.
    """

    def __init__(self, dependencies: Dependencies, times: Ints) -> None:
        """Begin with all r recvs outstanding; ``times`` (n,): of all ops of the graph, in whole units."""
        self.recv_time = times[dependencies.recvs]
        """(r,) M of each recv."""
        self.outstanding = np.ones(len(dependencies.recvs), dtype=bool)
        """(r,) whether each recv is still to come."""
        self.compute = np.zeros(len(dependencies.recvs), dtype=np.int64)
        """(r,) P of each recv."""
        is_grouped = dependencies.group >= 0
        self._compute_load = np.zeros(len(dependencies.sets), dtype=np.int64)
        """(groups,) compute time of each group's ops."""
        np.add.at(self._compute_load, dependencies.group[is_grouped], times[is_grouped])
        self._needs = dependencies.matrix()
        """(r, groups) whether a group needs a recv."""
        self._recvs_left = self._needs.sum(axis=0)
        """(groups,) how many outstanding recvs each group needs."""
        self._transfer_left = np.zeros(len(dependencies.sets), dtype=np.int64)
        """(groups,) the time of these recvs' transfers."""
        for is_needed, time in zip(self._needs, self.recv_time, strict=True):
            self._transfer_left[is_needed] += time
        self._unblock(np.flatnonzero(self._recvs_left == 1))

    def _unblock(self, groups: Places) -> None:
        """Add the compute time of each of ``groups``, which a single recv still blocks, to that recv's P."""
        if groups.size:
            recvs = (self._needs[:, groups] & self.outstanding[:, None]).argmax(axis=0)
            np.add.at(self.compute, recvs, self._compute_load[groups])

    def least_impending(self, candidates: Flags) -> Flags:
        """Return the mask (r,) of the candidates with the least M+; ``candidates``: a mask (r,) of outstanding recvs.

        Groups that need several outstanding recvs are searched in the order of their transfers' times, those of equal time
        together, until some need a candidate. If none does, all candidates have an infinite M+ and are returned.
        """
        blocked = np.flatnonzero(self._recvs_left > 1)
        blocked = blocked[np.argsort(self._transfer_left[blocked], kind="stable")]
        impending = self._transfer_left[blocked]
        group_start = 0
        while group_start < len(blocked):
            group_end = int(np.searchsorted(impending, impending[group_start], side="right"))
            is_least: Flags = candidates & self._needs[:, blocked[group_start:group_end]].any(axis=1)
            if is_least.any():
                return is_least
            group_start = group_end
        return candidates

    def complete(self, recv: int) -> None:
        """Mark a recv, given by its index among the recvs, as transferred, and update the properties of the others."""
        self.outstanding[recv] = False
        needs_recv = self._needs[recv]  # (groups,)
        self._recvs_left -= needs_recv
        self._transfer_left -= needs_recv * self.recv_time[recv]
        self._unblock(np.flatnonzero(needs_recv & (self._recvs_left == 1)))


def first_recv(properties: Properties, rank: Places) -> int:
    """Return the index of the outstanding recv that goes first by Equation 6.

    Ties are broken by the smallest M+, then the largest P, then ``rank`` (r,), the positions in graph order.
    """
    compute, transfer = properties.compute, properties.recv_time
    candidates = unpreceded(compute, transfer, properties.outstanding)
    is_chosen = candidates if int(candidates.sum()) == 1 else properties.least_impending(candidates)
    recvs = np.flatnonzero(is_chosen)
    # A recv that Equation 6 puts behind another can still tie with one of these and, by a smaller M+, go before it. Then it
    # goes before all of these, or before those with the smallest P, so that taking the largest P is right either way.
    return int(recvs[np.lexsort((rank[recvs], -compute[recvs]))[0]])


def unpreceded(compute: Ints, transfer: Ints, outstanding: Flags) -> Flags:
    """Return (r,) whether each outstanding recv is preceded by none under Equation 6 alone; True for at least one. O(r).

    ``compute`` (r,) is P, the compute time that a recv alone unlocks; ``transfer`` (r,) is M, the time of its transfer. This
    is Johnson's rule in one pass: recvs with M < P go first, by ascending M, then the others by descending P; a recv with
    P = M ties with both kinds.
    """
    is_early = outstanding & (transfer < compute)
    is_even = outstanding & (transfer == compute)
    if is_early.any():
        least_transfer = transfer[is_early].min()
        is_unpreceded: Flags = (is_early & (transfer == least_transfer)) | (is_even & (transfer <= least_transfer))
    else:
        is_unpreceded = is_even | (outstanding & (compute == compute[outstanding].max(initial=0)))
    return is_unpreceded


def _graph_order(graph: Graph, dependencies: Dependencies) -> Places:
    """Return (r,) each recv's position in graph order: by the least level of an op that reads it, then by name.

    An op's level is the number of edges on the longest path to it from an op without inputs.
    """
    levels = [0] * len(graph)
    first_use = [_NEVER] * len(graph)  # by op, the least level of an op that reads it
    for op in dependencies.order:
        inputs = dependencies.inputs[op]
        if not inputs:
            continue
        level = 1 + max([levels[source] for source in inputs])
        levels[op] = level
        for source in inputs:
            if level < first_use[source]:
                first_use[source] = level
    keys = [(first_use[op], natural_key(graph.names[op])) for op in dependencies.recvs.tolist()]
    recvs_in_order = sorted(range(len(keys)), key=keys.__getitem__)
    return np.argsort(recvs_in_order)  # the inverse of the permutation
