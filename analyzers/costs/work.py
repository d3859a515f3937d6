"""The work of one training step at any local batch size, from one trace: its graph and the memory alive while it runs.

Start at :func:`measure_work`. The step is traced at a prime batch size, at which a dimension tells whether it grows with the
batch (:func:`ddltool.analyzers.tracing.torch_costs.prime_batch`); all other sizes are counted again from that trace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from ddltool.analyzers.tracing.dialect import Numerics
from ddltool.analyzers.tracing.step import TrainingStep
from ddltool.analyzers.tracing.torch_adapter import AS_DEFAULT, TracedStep, trace_any_batch
from ddltool.analyzers.tracing.torch_costs import AS_TRACED, Scale

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class WorkCurve:
    """The work of a step at any batch size."""

    traced: TracedStep

    def live_bytes(self, batch_size: int) -> Array:
        """Return (c,) the bytes alive after each call, its result allocated and what it used last still held. O(calls).

        Of all tensors: parameters, gradients, buffers and inputs included.
        What kernels take as workspace is not in a trace.
        """
        own = self.traced.graph.batch_size
        scale = AS_TRACED if own is None else Scale(own, batch_size)
        change = np.zeros(self._calls.size + 1)
        for elements, width, born, died in self._storages:
            held = float(scale.size(elements) * width)
            change[born] += held
            change[died] -= held
        alive: Array = np.cumsum(change)[:-1][self._calls]
        return alive

    @cached_property
    def _calls(self) -> NDArray[np.bool_]:
        """Return (nodes,) which nodes are calls."""
        return np.array([node.op == "call_function" for node in self.traced.fx.graph.nodes])

    @cached_property
    def _storages(self) -> list[tuple[int, int, int, int]]:
        """Return elements, bytes of each, first node and first node after the last use of every storage.

        A storage lives from the call that makes it to the last call that uses any view of it; parameters, buffers and
        inputs live throughout, gradients from their making to the end.
        """
        nodes = list(self.traced.fx.graph.nodes)
        size: dict[int, tuple[int, int]] = {}
        last: dict[int, int] = {}
        born: dict[int, int] = {}
        lasting: set[int] = set()
        for place, node in enumerate(nodes):
            for tensor in _tensors(node):
                storage, width = tensor.untyped_storage(), tensor.element_size()
                key = storage._cdata
                size.setdefault(key, (storage.nbytes() // width, width))
                born.setdefault(key, 0 if node.op == "placeholder" else place)
                last[key] = max(last.get(key, 0), place)
                if node.op == "placeholder":
                    lasting.add(key)
            for source in node.all_input_nodes:
                for tensor in _tensors(source):
                    last[tensor.untyped_storage()._cdata] = place
        end = len(nodes)
        return [(*size[key], born[key], end if key in lasting else last[key] + 1) for key in size]


def measure_work(build: Callable[[], TrainingStep], numerics: Numerics = AS_DEFAULT) -> WorkCurve:
    """Return the work of the training step that ``build`` makes. Raises InputError when it cannot be traced."""
    return WorkCurve(traced=trace_any_batch(build, mode="training", numerics=numerics))


def _tensors(node: Node) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]
