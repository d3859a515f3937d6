"""The work of one training step as a function of the local batch size, from two or three traces.

Nearly all ops of a training step do work that is affine in the batch: a convolution's FLOPs grow with it, an update of
running statistics does not. So every op's FLOPs and bytes, and the bytes alive at every moment, follow from traces at
two batch sizes; a third, further out, checks it. A step that is not affine (a similarity of all pairs
of samples, an op that depends on the batch) is traced at every batch size instead. Start at :func:`measure_work`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from ddltool.analyzers.tracing.step import TrainingStep
from ddltool.analyzers.tracing.torch_adapter import TracedStep, trace_step
from ddltool.errors import InputError
from ddltool.graph import COMPUTE, Graph

Array = NDArray[np.float64]
# Two batches that are not 1 (which modules treat apart: squeezed dimensions, batch normalisation of one value).
SMALL_BATCHES = (2, 4)
# The line is checked no further out: what is not affine shows here already, and inputs may be real tensors.
CHECKED_AT_LEAST, CHECKED_AT_MOST = 8, 64
# Work that the line through two traces misses by more than this share makes the step "not affine".
TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True, eq=False)
class StepWork:
    """One training step at one batch size: its graph (``n`` ops) and the bytes alive while it runs."""

    graph: Graph
    live_bytes: Array
    """(c,) bytes of all tensors after each call, parameters, gradients, buffers and inputs included."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WorkCurve:
    """The work of a step at any batch size. ``at(m)`` interpolates between ``low`` and ``high``, or looks up."""

    low: StepWork
    high: StepWork
    affine: bool
    error: float
    """Largest relative error of total FLOPs, bytes and peak memory at the checked batch size."""
    traced: Mapping[int, StepWork] = field(default_factory=dict)
    """All traces by batch size."""

    def at(self, batch_size: int) -> StepWork:
        """Return the work at a batch size. Raises InputError when the step is not affine and was not traced there."""
        if batch_size in self.traced:
            return self.traced[batch_size]
        if not self.affine:
            known = ", ".join(map(str, sorted(self.traced)))
            raise InputError("--batch-sizes", f"{batch_size} was not traced", f"this step is not affine; use {known}")
        return _interpolate(self.low, self.high, batch_size)


def measure_work(build: Callable[[], TrainingStep], batch_sizes: Sequence[int]) -> WorkCurve:
    """Return the work of the training step that ``build`` makes, for the batch sizes asked for.

    Traces at 2 and 4 samples and at the largest size (8 at least, 64 at most); at every size when the step turns out
    not to be affine. Raises InputError when the model cannot be traced.
    """
    traced = {size: _trace(build, size) for size in SMALL_BATCHES}
    low, high = (traced[size] for size in SMALL_BATCHES)
    checked = max(CHECKED_AT_LEAST, min(max(batch_sizes), CHECKED_AT_MOST))
    traced[checked] = _trace(build, checked)
    error = _misfit(low, high, traced[checked])
    affine = _alike(low, high) and error <= TOLERANCE
    if not affine:
        traced |= {size: _trace(build, size) for size in batch_sizes if size not in traced}
    return WorkCurve(low=low, high=high, affine=affine, error=error, traced=traced)


def _trace(build: Callable[[], TrainingStep], batch_size: int) -> StepWork:
    step = trace_step(build, mode="training", batch_size=batch_size)
    return StepWork(graph=step.graph, live_bytes=live_bytes(step))


def _alike(first: StepWork, second: StepWork) -> bool:
    """Return whether two traces have the same ops in the same order."""
    same_ops = first.graph.op_type == second.graph.op_type and first.graph.names == second.graph.names
    return same_ops and len(first.live_bytes) == len(second.live_bytes)


def _interpolate(low: StepWork, high: StepWork, batch_size: int) -> StepWork:
    first, second = low.graph.batch_size or SMALL_BATCHES[0], high.graph.batch_size or SMALL_BATCHES[1]
    share = (batch_size - first) / (second - first)

    def line(one: Array, two: Array) -> Array:
        made: Array = np.maximum(one + (two - one) * share, 0.0)
        return made

    graph = replace(
        low.graph,
        flops=line(low.graph.flops, high.graph.flops),
        size_bytes=line(low.graph.size_bytes, high.graph.size_bytes),
        batch_size=batch_size,
    )
    return StepWork(graph=graph, live_bytes=line(low.live_bytes, high.live_bytes))


def _misfit(low: StepWork, high: StepWork, checked: StepWork) -> float:
    """Return the largest relative error of the line at a third trace; infinite when its ops differ."""
    if not (_alike(low, high) and _alike(low, checked)):
        return float("inf")
    predicted = _interpolate(low, high, checked.graph.batch_size or 1)
    compute = checked.graph.kind == COMPUTE
    pairs = (
        (predicted.graph.flops[compute].sum(), checked.graph.flops[compute].sum()),
        (predicted.graph.size_bytes[compute].sum(), checked.graph.size_bytes[compute].sum()),
        (predicted.live_bytes.max(initial=0.0), checked.live_bytes.max(initial=0.0)),
    )
    return max(abs(float(made) - float(seen)) / float(seen) if seen else 0.0 for made, seen in pairs)


def live_bytes(step: TracedStep) -> Array:
    """Return (c,) the bytes alive after each call of a traced step, its result allocated and what it used last still held.

    A storage lives from the call that makes it to the last call that uses any view of it; parameters, buffers and inputs
    live throughout, gradients from their making to the end. What kernels take as workspace is not in a trace. O(calls).
    """
    nodes = list(step.fx.graph.nodes)
    size: dict[int, int] = {}
    last: dict[int, int] = {}
    born: dict[int, int] = {}
    for place, node in enumerate(nodes):
        for tensor in _tensors(node):
            storage = tensor.untyped_storage()
            key = storage._cdata
            size[key] = max(size.get(key, 0), storage.nbytes())
            born.setdefault(key, 0 if node.op == "placeholder" else place)
            last[key] = max(last.get(key, 0), place)
        for source in node.all_input_nodes:
            for tensor in _tensors(source):
                last[tensor.untyped_storage()._cdata] = place
    lasting = {t.untyped_storage()._cdata for node in nodes if node.op == "placeholder" for t in _tensors(node)}
    change = np.zeros(len(nodes) + 1)
    for key, held in size.items():
        change[born[key]] += held
        change[len(nodes) if key in lasting else last[key] + 1] -= held
    alive = np.cumsum(change)[:-1]
    return np.array([alive[place] for place, node in enumerate(nodes) if node.op == "call_function"])


def _tensors(node: Node) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]
