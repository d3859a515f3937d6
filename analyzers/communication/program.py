"""One replica's step in program order: when each gradient is ready, and when each unit of parameters is used.

Data-parallel frameworks run the compute ops of a step one after another in the order in which the program issues them,
which is the order of a traced graph's ops. Start at :func:`program_of`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ddltool.analyzers.communication.dependencies import (
    collected,
    first_ready_first,
    input_lists,
    reversed_edges,
    whole_times,
)
from ddltool.analyzers.costs.nccl import Fabric
from ddltool.arrays import Floats
from ddltool.errors import InputError
from ddltool.graph import COMPUTE, RECV, SEND, Graph

# Below the first a change is lost in the noise of real steps; from the second on it pays for the work of enforcing it.
SMALL_GAIN, CLEAR_GAIN = 0.01, 0.05
# Beyond this, a larger batch or a faster network is the answer and no setting is.
_STARVED = 1.5


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Program:
    """A training step on one device, seconds from its start; ``p`` parameters that get a gradient, in ready order."""

    parameters: tuple[str, ...]
    ready_s: Floats
    """(p,) when each gradient is ready, ascending; equal times in program order."""
    size_bytes: Floats
    """(p,)"""
    held: tuple[str, ...]
    """All q parameters, those without a gradient (frozen, unused) included, in file order."""
    held_bytes: Floats
    """(q,)"""
    first_use_s: Floats
    """(q,) start of the first op that needs the parameter directly; infinite for an unused one."""
    backward_s: float
    """Start of the backward pass."""
    compute_s: float
    """All compute, one op after another."""

    def starved(self, exposed_s: float) -> str:
        """Return the words for a step that waits for its communication above all, else nothing."""
        share = 1.0 + exposed_s / self.compute_s if self.compute_s > 0 else 0.0
        if share < _STARVED:
            return ""
        return f" The step is {share:.1f} times its compute: a larger batch per replica gains far more."


def stretched(program: Program, compute_s: float) -> Program:
    """Return the same step on a device on which all compute takes ``compute_s`` seconds."""
    by = compute_s / program.compute_s
    return replace(
        program,
        ready_s=program.ready_s * by,
        first_use_s=program.first_use_s * by,
        backward_s=program.backward_s * by,
        compute_s=compute_s,
    )


def own_fabric(graph: Graph) -> Fabric | None:
    """Return the network that the graph was timed for, one process behind each link; None when the graph does not say."""
    rate, delay = graph.meta.get("bandwidth_bytes_per_s"), graph.meta.get("latency_s")
    if not (isinstance(rate, (int, float)) and isinstance(delay, (int, float))):
        return None
    return Fabric.flat(float(rate), float(delay))


def share_saved(step_s: float, before_s: float) -> float:
    """Return the share of a step that is saved, 0 where there was nothing to save."""
    return 1.0 - step_s / before_s if before_s > 0 else 0.0


def program_of(graph: Graph) -> Program:
    """Return the program view of a timed training graph. O(n + e), and a sort where
    the ops are not in the order in which they can run.

    Compute ops on several resources count as one; gradients without any bytes are left out. Raises
    InputError for an inference graph or one without sends.
    """
    sends = graph.of_kind(SEND)
    if graph.mode != "training" or not len(sends):
        raise InputError(graph.name, "is no training step with gradients", "trace with --mode training")
    whole_times(graph)  # says which op has no duration
    n, source, user = len(graph), graph.input_index, graph.users
    order = np.arange(n) if (source < user).all() else np.array(first_ready_first(input_lists(graph)))
    order = order[graph.kind[order] == COMPUTE]
    start, end = np.zeros(n), np.zeros(n)
    end[order] = np.cumsum(graph.duration_s[order])
    start[order[1:]] = end[order[:-1]]
    sends = sends[graph.size_bytes[sends] > 0] if (graph.size_bytes[sends] > 0).any() else sends
    place = np.zeros(n)
    place[order] = np.arange(len(order))
    leaves, made = np.zeros(n), np.zeros(n)
    np.maximum.at(leaves, user, end[source])
    np.maximum.at(made, user, place[source])
    sends = sends[np.lexsort((made[sends], leaves[sends]))]  # views take no time, and say who is handed over first
    recvs = graph.of_kind(RECV)
    used = np.full(n, np.inf)
    computes = graph.kind[user] == COMPUTE
    np.minimum.at(used, source[computes], start[user[computes]])
    compute_s = float(graph.duration_s[graph.kind == COMPUTE].sum())
    return Program(
        parameters=tuple(graph.parameter[op] or graph.names[op] for op in sends),
        ready_s=leaves[sends],
        size_bytes=graph.size_bytes[sends],
        held=tuple(graph.parameter[op] or graph.names[op] for op in recvs),
        held_bytes=graph.size_bytes[recvs],
        first_use_s=used[recvs],
        backward_s=_backward_start(graph, start, compute_s),
        compute_s=compute_s,
    )


def _backward_start(graph: Graph, start: Floats, compute_s: float) -> float:
    """Return when backward begins: at the first op that the tracer named so, else at the first that not every send needs."""
    compute = graph.of_kind(COMPUTE).tolist()
    named = [float(start[op]) for op in compute if graph.names[op].startswith("backward/")]
    if named:
        return min(named)
    sends = graph.of_kind(SEND).tolist()
    leads = collected(reversed_edges(input_lists(graph)), graph.topological_order().tolist()[::-1], sends)
    tail = [float(start[op]) for op in compute if leads[op] not in (0, (1 << len(sends)) - 1)]
    return min(tail, default=compute_s)
