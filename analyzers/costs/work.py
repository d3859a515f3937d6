"""The work of one training step at any local batch size, from one trace: its graph and the memory alive while it runs.

Start at :func:`measure_work`. All batch sizes are counted from one trace where the step's work is a function of its
batch (:func:`ddltool.analyzers.tracing.torch_adapter.trace_any_batch`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.tracing.dialect import Numerics
from ddltool.analyzers.tracing.step import TrainingStep
from ddltool.analyzers.tracing.torch_adapter import AS_DEFAULT, TracedStep, trace_any_batch
from ddltool.analyzers.tracing.torch_costs import AS_TRACED, Scale
from ddltool.errors import InputError

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, eq=False)
class WorkCurve:
    """The work of a step at any batch size."""

    traced: TracedStep

    def live_bytes(self, batch_size: int) -> Array:
        """Return (c,) the bytes alive after each call, its result allocated and what it used last still held. O(calls).

        Of all tensors: parameters, gradients, buffers and inputs included. What kernels take as workspace is not in a
        trace. A step that is traced at every batch size counts at the next multiple of 8 where it does not run at this
        one, and has no bounds where it cannot be traced.
        """
        traced = self.traced
        scale = AS_TRACED if batch_size == traced.graph.batch_size else traced.scale(batch_size)
        if scale is not None:
            return _live_bytes(traced, scale)
        if traced.largest is not None and batch_size > traced.largest:
            return np.array([np.inf])
        try:
            return _live_bytes(traced.traced_at(batch_size), AS_TRACED)
        except InputError:
            if batch_size % 8 == 0:
                raise
            return self.live_bytes(batch_size + -batch_size % 8)

    def runs_at(self, batch_size: int) -> bool:
        """Return whether the step takes a batch size, so far as a trace has to tell."""
        if self.traced.prime == self.traced.graph.batch_size:
            return True
        try:
            self.traced.at(batch_size)
        except InputError:
            return False
        return True


def _live_bytes(traced: TracedStep, scale: Scale) -> Array:
    calls = np.array([node.op == "call_function" for node in traced.fx.graph.nodes])
    change = np.zeros(calls.size + 1)
    for storage in traced.storages:
        held = float(scale.size(storage.elements) * storage.width)
        change[storage.born] += held
        change[storage.died] -= held
    alive: Array = np.cumsum(change)[:-1][calls]
    return alive


def measure_work(build: Callable[[], TrainingStep], numerics: Numerics = AS_DEFAULT) -> WorkCurve:
    """Return the work of the training step that ``build`` makes. Raises InputError when it cannot be traced."""
    return WorkCurve(traced=trace_any_batch(build, mode="training", numerics=numerics))
