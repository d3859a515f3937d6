"""What ``torch.compile`` makes of a traced step: chains of pointwise work become one kernel. Start at :func:`compiled`.

Inductor fuses element-wise ops, casts, normalisations, softmaxes and reductions with their neighbours; convolutions, matrix
products and attention stay. What passes from one fused op to the next is neither written nor read again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ddltool.analyzers.costs.kernels import CLASSES, class_of
from ddltool.graph import COMPUTE, Graph

_FUSED = frozenset(("pointwise", "copy", "normalisation", "softmax", "reduction"))


def compiled(graph: Graph) -> Graph:
    """Return the graph as it would run compiled: fused ops cost nothing, the last of each chain reads for all. O(n + e).

    A graph without written bytes (from a file of an older version) only loses its launches.
    """
    compute = graph.kind == COMPUTE
    free = np.array([mark == "free" for mark in graph.estimate]) & compute
    fusible = compute & ~free
    fusible &= np.array([CLASSES[class_of(op_type)] in _FUSED for op_type in graph.op_type])
    pointer, targets = graph.successors()
    size, estimate = graph.size_bytes.copy(), list(graph.estimate)

    def readers(op: int) -> list[int]:
        """Return the ops that read what an op makes, through views."""
        found: list[int] = []
        for target in targets[pointer[op] : pointer[op + 1]].tolist():
            found += readers(target) if free[target] else [target]
        return found

    for op in graph.topological_order().tolist():
        if not fusible[op]:
            continue
        reading = readers(op)
        written = float(graph.written_bytes[op])
        inside = [reader for reader in dict.fromkeys(reading) if fusible[reader]]
        for reader in inside:
            size[reader] = max(size[reader] - written, 0.0)
        if inside and len(inside) == len(set(reading)):
            size[inside[0]] += max(size[op] - written, 0.0)
            size[op], estimate[op] = 0.0, "free"
    return replace(graph, size_bytes=size, estimate=tuple(estimate))
