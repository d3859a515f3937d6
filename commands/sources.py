"""SOURCE on the command line: resolves it to a training step or a graph.

``model.onnx``, ``graph.json``, or a torch source, of which ``ddltool.analyzers.loading`` knows all but the zoo.
Everything heavy is imported when it is needed.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from ddltool.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddltool.analyzers.tracing.dialect import Numerics
    from ddltool.analyzers.tracing.step import TrainingStep
    from ddltool.graph import Graph, Mode


def is_graph_file(source: str) -> bool:
    """Return whether SOURCE names a graph document."""
    return source.removesuffix(".gz").endswith(".json")


def is_onnx_file(source: str) -> bool:
    """Return whether SOURCE names an ONNX file."""
    return source.endswith(".onnx")


def load_graph(
    source: str,
    mode: Mode | None,
    batch_size: int | None,
    bindings: Mapping[str, int] | None = None,
    *,
    numerics: Numerics | None = None,
    sequence_length: int | None = None,
) -> Graph:
    """Return the graph of any SOURCE. Torch sources default to a training step, ONNX files to inference.

    ``bindings``: sizes of an ONNX file's symbolic dimensions. ``numerics``: precision and layout of a torch source, and
    ``sequence_length`` the tokens of its samples; files have their own. Raises InputError when the source does not exist, does
    not run or has no such mode.
    """
    if is_graph_file(source):
        from ddltool.graph_io import read_graph

        graph = read_graph(source)
        if mode is not None and mode != graph.mode:
            raise InputError("--mode", f"{source} holds a graph for {graph.mode}, not {mode}", "leave --mode out")
        if batch_size is not None and batch_size != graph.batch_size:
            raise InputError("--batch-size", f"{source} was traced for {graph.batch_size}", "trace the model again")
        return graph
    if is_onnx_file(source):
        from ddltool.analyzers.tracing.onnx_adapter import trace_onnx

        if mode == "training":
            raise InputError("--mode", f"{source} holds a forward graph only", "use --mode inference for ONNX files")
        return trace_onnx(source, batch_size=batch_size, bindings=bindings)
    from ddltool.analyzers.loading.sources import demand_whole
    from ddltool.analyzers.tracing.dialect import Numerics
    from ddltool.analyzers.tracing.torch_adapter import trace_torch

    with contextlib.redirect_stdout(sys.stderr):  # what the user's forward prints must not mix with the result either
        graph = trace_torch(
            lambda: resolve_step(source, sequence_length=sequence_length),
            mode=mode or "training",
            batch_size=batch_size,
            numerics=numerics or Numerics(),
        )
    return demand_whole(graph, source)


def training_step(source: str, batch_size: int) -> TrainingStep:
    """Return a real training step of a torch SOURCE at that batch size, weights allocated and initialised."""
    from dataclasses import replace

    from ddltool.analyzers.tracing.step import with_batch_size

    if is_graph_file(source) or is_onnx_file(source):
        raise InputError(source, "cannot be trained here", "give a torch source: zoo:NAME, file.py:factory, ...")
    step = resolve_step(source)
    return replace(step, inputs=with_batch_size(step.inputs, batch_size))


def resolve_step(source: str, sequence_length: int | None = None) -> TrainingStep:
    """Return the module of a torch SOURCE with example inputs and a loss, under the ambient default device.

    ``sequence_length``: tokens of text, the source's own by default. Raises InputError as
    :func:`ddltool.analyzers.loading.sources.resolve`.
    """
    from ddltool.analyzers.loading.sources import resolve

    with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints must not mix with the result
        return resolve(source, {"zoo": _zoo_model}, sequence_length=sequence_length)


def _zoo_model(name: str) -> tuple[Any, Any]:
    from ddltool.fixtures import zoo

    return zoo.build(name), zoo.example_inputs(name)
