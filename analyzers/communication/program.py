"""One replica's step in program order: when each gradient is ready, and when each unit of parameters is used.

Data-parallel frameworks run the compute ops of a step one after another in the order in which the program issues them,
which is the order of a traced graph's ops. Start at :func:`program_of`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.communication.properties import whole_times
from ddltool.analyzers.communication.shop import first_ready_first
from ddltool.errors import InputError
from ddltool.graph import COMPUTE, RECV, SEND, Graph


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Program:
    """A training step on one device, seconds from its start; ``p`` parameters that get a gradient, in ready order."""

    parameters: tuple[str, ...]
    ready_s: NDArray[np.float64]
    """(p,) when each gradient is ready, ascending; equal times in program order."""
    size_bytes: NDArray[np.float64]
    """(p,)"""
    held: tuple[str, ...]
    """All q parameters, those without a gradient (frozen, unused) included, in file order."""
    held_bytes: NDArray[np.float64]
    """(q,)"""
    first_use_s: NDArray[np.float64]
    """(q,) start of the first op that needs the parameter directly; infinite for an unused one."""
    backward_s: float
    """Start of the backward pass."""
    compute_s: float
    """All compute, one op after another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """Cost of collectives by the ring algorithm over ``replicas`` processes (Patarasuk and Yuan, JPDC 2009).

    Each of its ``replicas - 1`` rounds takes ``latency_s`` and moves a ``1 / replicas`` part of the data; an all-reduce
    is a reduce-scatter and an all-gather.
    """

    replicas: int
    bandwidth_bytes_per_s: float
    latency_s: float

    def all_gather_s(self, size_bytes: float) -> float:
        """Return the seconds to gather ``size_bytes`` (the whole, not one's part) on every process."""
        rounds = self.replicas - 1
        return rounds * (self.latency_s + size_bytes / self.replicas / self.bandwidth_bytes_per_s)

    reduce_scatter_s = all_gather_s

    def all_reduce_s(self, size_bytes: float) -> float:
        """Return the seconds to reduce ``size_bytes`` on every process."""
        return 2 * self.all_gather_s(size_bytes)


def program_of(graph: Graph) -> Program:
    """Return the program view of a timed training graph. O((n + e) log n).

    Compute ops on several resources count as one; gradients without any bytes are left out. Raises
    InputError for an inference graph or one without sends.
    """
    if graph.mode != "training" or not len(graph.of_kind(SEND)):
        raise InputError(graph.name, "is no training step with gradients", "trace with --mode training")
    whole_times(graph)  # says which op has no duration
    start, end = _run(graph)
    sends = graph.of_kind(SEND)
    sends = sends[graph.size_bytes[sends] > 0] if (graph.size_bytes[sends] > 0).any() else sends
    names = [graph.parameter[op] or graph.names[op] for op in sends]
    ready = np.array([max((end[source] for source in graph.inputs_of(int(op))), default=0.0) for op in sends])
    order = np.argsort(ready, kind="stable")
    used = {graph.parameter[op] or graph.names[op]: np.inf for op in graph.of_kind(RECV)}
    for op in np.flatnonzero(graph.kind == COMPUTE).tolist():
        for source in graph.inputs_of(op):
            name = graph.parameter[source] or graph.names[source]
            if graph.kind[source] == RECV:
                used[name] = min(used[name], float(start[op]))
    compute = float(graph.duration_s[graph.kind == COMPUTE].sum())
    return Program(
        parameters=tuple(names[place] for place in order),
        ready_s=ready[order],
        size_bytes=graph.size_bytes[sends][order],
        held=tuple(used),
        held_bytes=graph.size_bytes[graph.of_kind(RECV)],
        first_use_s=np.array(list(used.values())),
        backward_s=_backward_start(graph, start, compute),
        compute_s=compute,
    )


def _run(graph: Graph) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return start and end of every compute op when they run one after another, first in the file first."""
    start, end = np.zeros(len(graph)), np.zeros(len(graph))
    now = 0.0
    for op in first_ready_first({op: graph.inputs_of(op).tolist() for op in range(len(graph))}):
        if graph.kind[op] == COMPUTE:
            start[op], end[op] = now, now + float(graph.duration_s[op])
            now = float(end[op])
    return start, end


def _backward_start(graph: Graph, start: NDArray[np.float64], compute_s: float) -> float:
    """Return when backward begins: at the first op that the tracer named so, else at the first that not every send needs."""
    compute = np.flatnonzero(graph.kind == COMPUTE)
    named = [float(start[op]) for op in compute if graph.names[op].startswith("backward/")]
    if named:
        return min(named)
    pointer, targets = graph.successors()
    leads = [0] * len(graph)
    sends = graph.of_kind(SEND).tolist()
    every = (1 << len(sends)) - 1
    for number, op in enumerate(sends):
        leads[op] = 1 << number
    for op in reversed(graph.topological_order().tolist()):
        for target in targets[pointer[op] : pointer[op + 1]].tolist():
            leads[op] |= leads[target]
    tail = [float(start[op]) for op in compute if leads[op] not in (0, every)]
    return min(tail, default=compute_s)


def block_of(parameter: str, container: str) -> str:
    """Return the block that a parameter belongs to: ``container.NUMBER``, or "" for the root."""
    prefix = f"{container}." if container else ""
    if not parameter.startswith(prefix):
        return ""
    number = parameter[len(prefix) :].partition(".")[0]
    return f"{prefix}{number}" if number.isdigit() else ""


def block_container(program: Program) -> str | None:
    """Return the list of blocks that holds most of the parameters' bytes, as ``model.layers``; None if there is none.

    A list is whatever numbers its members: ``layers.0.weight``, ``layers.1.weight``; the outermost one wins a tie.
    """
    sizes: dict[str, float] = {}
    members: dict[str, set[str]] = {}
    for name, size in zip(program.held, program.held_bytes.tolist(), strict=True):
        parts = name.split(".")
        for place, part in enumerate(parts[:-1]):
            if part.isdigit():
                container = ".".join(parts[:place])
                sizes[container] = sizes.get(container, 0.0) + size
                members.setdefault(container, set()).add(part)
    listed = [container for container, numbers in members.items() if len(numbers) > 1]
    if not listed:
        return None
    return min(listed, key=lambda container: (-sizes[container], container.count("."), container))
