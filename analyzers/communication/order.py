"""TIC and TAC: in which order parameters should travel (TicTac, section 4). Start at :func:`tac`.

Equation 6 says A goes before B iff ``min(P_B, M_A) < min(P_A, M_B)``. It follows from the two makespans
``M_A + max(P_A, M_B) + P_B`` and ``M_B + max(P_B, M_A) + P_A`` (replace each max by the sum minus the min) and is
Johnson's rule for two machines. The paper's Algorithm 3 assigns the two minima the other way round and so returns the
reverse; Equation 6 is what is implemented here.

The comparator is no strict weak order when there are ties: three recvs can precede each other in a circle. "The
first" is therefore defined so that it cannot depend on the order of the input: among the outstanding recvs that no
other strictly precedes (if there is none: among the strongest circle, the recvs that together nobody outside
precedes), the smallest M+, then the largest P, then graph order. Graph order is the level of the earliest op that
needs the recv (longest path from the roots), then the name.
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
from ddltool.graph import RECV, Graph, natural_key


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Priority numbers of recv ops (0 first; equal numbers: any order), and the recvs in that order."""

    name: str
    priority: Mapping[str, int]
    order: tuple[str, ...]
    """Recv op names by priority; equal priorities in graph order."""


def tic(graph: Graph) -> Schedule:
    """Return the timing-independent order (Algorithm 2): priority is M+ with unit transfers, equal M+ equal priority.

    Needs no durations. O(groups x recvs) after the dependency sets.
    """
    dependencies = find_dependencies(graph)
    times = (graph.kind == RECV).astype(np.int64)
    rank = _graph_order(graph, dependencies)
    impending = Properties(dependencies, times).impending() if len(dependencies.recvs) else np.zeros(0, dtype=np.int64)
    _, dense = np.unique(impending, return_inverse=True)
    order = np.lexsort((rank, dense))
    names = [graph.names[op] for op in dependencies.recvs]
    return Schedule(
        name="tic",
        priority={names[recv]: int(dense[recv]) for recv in order},
        order=tuple(names[recv] for recv in order),
    )


def tac(graph: Graph) -> Schedule:
    """Return the timing-aware order (section 4.3 with Equation 6): one recv at a time, the first under the comparator.

    O(r (groups + r)) vectorised, plus the memberships. Raises InputError for ops without a duration.
    """
    dependencies = find_dependencies(graph)
    properties = Properties(dependencies, whole_times(graph))
    rank = _graph_order(graph, dependencies)
    picked: list[int] = []
    while properties.outstanding.any():
        recv = first_recv(properties, rank)
        picked.append(recv)
        properties.complete(recv)
    names = [graph.names[dependencies.recvs[recv]] for recv in picked]
    return Schedule(name="tac", priority={name: place for place, name in enumerate(names)}, order=tuple(names))


def first_recv(properties: Properties, rank: NDArray[np.intp]) -> int:
    """Return the number of the outstanding recv that goes first; ``rank`` (r,) is graph order."""
    candidates = np.flatnonzero(properties.outstanding)
    impending = properties.impending()[candidates]
    compute, transfer = properties.compute[candidates], properties.recv_time[candidates]
    chosen = undominated(compute, transfer, impending)
    keys = (rank[candidates[chosen]], -compute[chosen], impending[chosen])
    return int(candidates[chosen[np.lexsort(keys)[0]]])


def precedes(
    compute: NDArray[np.int64], transfer: NDArray[np.int64], impending: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return the matrix "row strictly precedes column" of Equation 6 with M+ on equality, from P, M and M+ (r,)."""
    left = np.minimum(compute[None, :], transfer[:, None])  # min(P_B, M_A), A the row and B the column
    right = left.T  # min(P_A, M_B)
    before: NDArray[np.bool_] = (left < right) | ((left == right) & (impending[:, None] < impending[None, :]))
    return before


def undominated(
    compute: NDArray[np.int64], transfer: NDArray[np.int64], impending: NDArray[np.int64]
) -> NDArray[np.intp]:
    """Return the places of the recvs that no other strictly precedes, or of the strongest circle if each is preceded."""
    before = precedes(compute, transfer, impending)
    free = np.flatnonzero(~before.any(axis=0))
    if free.size:
        return free
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import connected_components

    count, component = connected_components(csr_matrix(before.astype(np.int8)), directed=True, connection="strong")
    rows, columns = np.nonzero(before)
    entered = {
        int(component[column]) for row, column in zip(rows, columns, strict=True) if component[row] != component[column]
    }
    strongest = [number for number in range(count) if number not in entered]
    return np.flatnonzero(np.isin(component, strongest))


def _graph_order(graph: Graph, dependencies: Dependencies) -> NDArray[np.intp]:
    """Return each recv's place in graph order, shape (r,): level of its earliest consumer, then name."""
    level = np.zeros(len(graph), dtype=np.int64)
    earliest = np.full(len(graph), INFINITE, dtype=np.int64)
    for op in graph.topological_order().tolist():
        sources = graph.inputs_of(op)
        if len(sources):
            level[op] = int(level[sources].max()) + 1
            earliest[sources] = np.minimum(earliest[sources], level[op])
    recvs = dependencies.recvs
    keys = [(int(earliest[op]), natural_key(graph.names[op])) for op in recvs]
    rank = np.empty(len(recvs), dtype=np.intp)
    rank[sorted(range(len(recvs)), key=keys.__getitem__)] = np.arange(len(recvs))
    return rank
