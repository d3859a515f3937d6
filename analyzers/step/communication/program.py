"""One replica's step in program order: when each gradient is ready, and when each parameter is first used.

Data-parallel frameworks run the compute ops of a step one after another in the order in which the program issues them,
which is the order of a traced graph's ops. Start at :func:`program_of`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.arrays import Floats
from ddltool.dependencies import collected, first_ready_first, input_lists, reversed_edges, whole_times
from ddltool.errors import InputError
from ddltool.graph import COMPUTE, RECV, SEND, Graph
from ddltool.precision import precision_of

# A gain below the first share is lost in the noise of real steps; one above the second is worth the work of enforcing it.
SMALL_GAIN, CLEAR_GAIN = 0.01, 0.05
# If a step takes more than this many times its compute, a larger batch helps far more than any setting.
_STARVED = 1.5


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Program:
    """A training step on one device, seconds from its start; ``p`` parameters that get a gradient, in ready order."""

    parameters: tuple[str, ...]
    ready_s: Floats
    """(p,) when each gradient is ready, ascending; equal times in program order."""
    size_bytes: Floats
    """(p,) bytes of each gradient."""
    held: tuple[str, ...]
    """The names of all q parameters, also of those without a gradient (frozen, unused), in file order."""
    held_bytes: Floats
    """(q,) bytes of each parameter as FSDP gathers it, which is in the half type under autocast."""
    first_use_s: Floats
    """(q,) start of the first op that needs the parameter directly; infinite for an unused one."""
    backward_s: float
    """Start of the backward pass."""
    compute_s: float
    """All compute, one op after another."""

    def starvation_advice(self, exposed_s: float) -> str:
        """Return advice for a step in which the device mostly waits for communication; "" for any other step.

        That is a step of at least ``_STARVED`` times its compute, to which ``exposed_s`` seconds of communication are added
        that overlap no compute. The advice is a sentence to append to a text, with a space before it.
        """
        if self.compute_s <= 0:
            return ""
        ratio = 1.0 + exposed_s / self.compute_s
        if ratio < _STARVED:
            return ""
        return f" The step is {ratio:.1f} times its compute: a larger batch per replica gains far more."


def stretched(program: Program, compute_s: float) -> Program:
    """Return the same step with all its times scaled so that its compute takes ``compute_s`` seconds."""
    factor = compute_s / program.compute_s
    return replace(
        program,
        ready_s=program.ready_s * factor,
        first_use_s=program.first_use_s * factor,
        backward_s=program.backward_s * factor,
        compute_s=compute_s,
    )


def own_fabric(graph: Graph) -> Fabric | None:
    """Return the network that the graph was timed for, with one process on each node; None: the graph does not name it."""
    bytes_per_s, latency_s = graph.meta.get("bandwidth_bytes_per_s"), graph.meta.get("latency_s")
    if not (isinstance(bytes_per_s, (int, float)) and isinstance(latency_s, (int, float))):
        return None
    return Fabric.flat(float(bytes_per_s), float(latency_s))


def share_saved(step_s: float, before_s: float) -> float:
    """Return the share of ``before_s`` that a step of ``step_s`` saves, negative if it is longer; 0 if ``before_s`` is 0."""
    return 1.0 - step_s / before_s if before_s > 0 else 0.0


def program_of(graph: Graph) -> Program:
    """Return the program view of a timed training graph. O(n + e), and a sort if the file lists ops before their inputs.

    All compute ops are taken to run one after another, also those of different compute resources. Gradients of zero bytes
    are left out, unless all are. Raises InputError for an inference graph, for one without sends, and for ops without a
    duration.
    """
    sends = graph.of_kind(SEND)
    if graph.mode != "training" or not len(sends):
        raise InputError(graph.name, "is no training step with gradients", "trace with --mode training")
    whole_times(graph)  # raises for an op without a duration
    n = len(graph)
    source, user = graph.input_index, graph.users  # (e,) of each edge, the op that is an input and the op that reads it
    is_in_program_order = (source < user).all()
    order = np.arange(n) if is_in_program_order else np.array(first_ready_first(input_lists(graph)))
    order = order[graph.kind[order] == COMPUTE]
    # Compute ops run one after another in this order; (n,) seconds, 0 for transfers.
    start, end = np.zeros(n), np.zeros(n)
    end[order] = np.cumsum(graph.duration_s[order])
    start[order[1:]] = end[order[:-1]]
    has_bytes = graph.size_bytes[sends] > 0
    if has_bytes.any():
        sends = sends[has_bytes]
    # When each gradient is ready: at the latest end among its send's inputs.
    program_index = np.zeros(n)
    program_index[order] = np.arange(len(order))
    ready_s, producer_index = np.zeros(n), np.zeros(n)  # of an op's inputs the latest end, and the last one's index
    np.maximum.at(ready_s, user, end[source])
    np.maximum.at(producer_index, user, program_index[source])
    # Gradients that are ready at the same time (views of them take no time) are ordered by the ops that make them.
    sends = sends[np.lexsort((producer_index[sends], ready_s[sends]))]
    # When each parameter is first used: at the earliest start among the compute ops that read its recv.
    recvs = graph.of_kind(RECV)
    first_use_s = np.full(n, np.inf)
    is_compute_edge = graph.kind[user] == COMPUTE
    np.minimum.at(first_use_s, source[is_compute_edge], start[user[is_compute_edge]])
    compute_s = float(graph.duration_s[graph.kind == COMPUTE].sum())
    return Program(
        parameters=tuple(graph.parameter[op] or graph.names[op] for op in sends),
        ready_s=ready_s[sends],
        size_bytes=graph.size_bytes[sends],
        held=tuple(graph.parameter[op] or graph.names[op] for op in recvs),
        held_bytes=graph.size_bytes[recvs] * _gathered_share(graph),
        first_use_s=first_use_s[recvs],
        backward_s=_find_backward_start(graph, start, compute_s),
        compute_s=compute_s,
    )


def _gathered_share(graph: Graph) -> float:
    """Return the bytes that FSDP gathers over the parameters' bytes: 0.5 for float32 parameters under autocast, else 1."""
    is_half = precision_of(graph.meta.get("precision")).is_autocast and graph.meta.get("dtype") == "float32"
    return 0.5 if is_half else 1.0


def _find_backward_start(graph: Graph, start: Floats, compute_s: float) -> float:
    """Return the seconds at which the backward pass begins: the start of the first op named ``backward/``.

    In a graph without such names it is the first op that some sends need and others do not, since every gradient needs the
    whole forward pass; ``compute_s``, the end, if there is no such op. ``start`` (n,): the start of every op.
    """
    compute_ops = graph.of_kind(COMPUTE).tolist()
    named_starts = [float(start[op]) for op in compute_ops if graph.names[op].startswith("backward/")]
    if named_starts:
        return min(named_starts)
    sends = graph.of_kind(SEND).tolist()
    # By op, the sends that need it, directly or not: an integer with a bit for each send.
    consumers_first = graph.topological_order().tolist()[::-1]
    needed_by = collected(reversed_edges(input_lists(graph)), consumers_first, sends)
    no_sends, all_sends = 0, (1 << len(sends)) - 1
    backward_starts = [float(start[op]) for op in compute_ops if needed_by[op] not in (no_sends, all_sends)]
    return min(backward_starts, default=compute_s)
