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
from numpy.typing import NDArray

from ddltool.analyzers.communication.properties import (
    INFINITE,
    Dependencies,
    Properties,
    find_dependencies,
    whole_times,
)
from ddltool.graph import Graph, natural_key


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
    rank = _graph_order(graph, dependencies)
    impending = _unit_impending(dependencies)
    _, dense = np.unique(impending, return_inverse=True)
    order = np.lexsort((rank, dense))
    names = [graph.names[op] for op in dependencies.recvs]
    return Schedule(
        name="tic",
        priority={names[recv]: int(dense[recv]) for recv in order},
        order=tuple(names[recv] for recv in order),
    )


def _unit_impending(dependencies: Dependencies) -> NDArray[np.int64]:
    """Return M+ of every recv, shape (r,), when each transfer takes 1 and all are outstanding: a least set size.

    Sets in ascending order of size, each looked at only for what no smaller one had: a recv is reached once.
    """
    found = np.full(len(dependencies.recvs), INFINITE, dtype=np.int64)
    seen = 0
    for size, bits in sorted((bits.bit_count(), bits) for bits in dependencies.sets):
        fresh = bits & ~seen if size > 1 else 0
        seen |= fresh
        while fresh:
            lowest = fresh & -fresh
            found[lowest.bit_length() - 1] = size
            fresh ^= lowest
    return found


def tac(graph: Graph) -> Schedule:
    """Return the timing-aware order (section 4.3 with Equation 6): one recv at a time, the first under the comparator.

    O((n + e) r / 64) for the dependency sets, then O(r (groups r / 64 + r)) in vector operations, against
    O(r (n r + r^2)) when every property is computed anew for every pick. Raises InputError for ops without a duration.
    """
    dependencies = find_dependencies(graph)
    properties = Properties(dependencies, whole_times(graph))
    rank = _graph_order(graph, dependencies)
    picked: list[int] = []
    for _ in range(len(dependencies.recvs)):
        recv = first_recv(properties, rank)
        picked.append(recv)
        properties.complete(recv)
    names = [graph.names[dependencies.recvs[recv]] for recv in picked]
    return Schedule(name="tac", priority={name: place for place, name in enumerate(names)}, order=tuple(names))


def first_recv(properties: Properties, rank: NDArray[np.intp]) -> int:
    """Return the number of the outstanding recv that goes first; ``rank`` (r,) is graph order."""
    compute, transfer = properties.compute, properties.recv_time
    candidates = unpreceded(compute, transfer, properties.outstanding)
    chosen = candidates if int(candidates.sum()) == 1 else properties.least_impending(candidates)
    places = np.flatnonzero(chosen)
    # A recv that Equation 6 puts behind another can still tie with one of these and have the smaller M+. Such ties rule
    # out all of them, or those with the smallest P: the largest P goes first either way.
    return int(places[np.lexsort((rank[places], -compute[places]))[0]])


def precedes(
    compute: NDArray[np.int64], transfer: NDArray[np.int64], impending: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return the matrix "row strictly precedes column" of Equation 6 with M+ on equality, from P, M and M+ (r,)."""
    left = np.minimum(compute[None, :], transfer[:, None])  # min(P_B, M_A), A the row and B the column
    right = left.T  # min(P_A, M_B)
    before: NDArray[np.bool_] = (left < right) | ((left == right) & (impending[:, None] < impending[None, :]))
    return before


def unpreceded(
    compute: NDArray[np.int64], transfer: NDArray[np.int64], outstanding: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Return which outstanding recvs no other precedes by Equation 6 alone, shape (r,), from P and M (r,). O(r).

    At least one if any is outstanding. Johnson's rule in one pass: recvs that transfer faster than they compute go by
    ascending M, before the others by descending P; a recv with P = M ties with either side.
    """
    early = outstanding & (transfer < compute)
    even = outstanding & (transfer == compute)
    if early.any():
        least = transfer[early].min()
        found: NDArray[np.bool_] = (early & (transfer == least)) | (even & (transfer <= least))
    else:
        found = even | (outstanding & (compute == compute[outstanding].max(initial=0)))
    return found


def _graph_order(graph: Graph, dependencies: Dependencies) -> NDArray[np.intp]:
    """Return each recv's place in graph order, shape (r,): level of its earliest consumer, then name."""
    level = [0] * len(graph)
    earliest = [int(INFINITE)] * len(graph)
    pointer, sources = graph.input_ptr.tolist(), graph.input_index.tolist()
    for op in graph.topological_order().tolist():
        inputs = sources[pointer[op] : pointer[op + 1]]
        if inputs:
            level[op] = 1 + max(level[source] for source in inputs)
            for source in inputs:
                earliest[source] = min(earliest[source], level[op])
    recvs = dependencies.recvs.tolist()
    keys = [(earliest[op], natural_key(graph.names[op])) for op in recvs]
    rank = np.empty(len(recvs), dtype=np.intp)
    rank[sorted(range(len(recvs)), key=keys.__getitem__)] = np.arange(len(recvs))
    return rank
