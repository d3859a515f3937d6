"""What a torch SOURCE can be: ``package.module:factory``, ``path/file.py:factory``, ``transformers:NAME``, ``timm:NAME``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddltool.analyzers.loading.factories import factory_step, step_from
from ddltool.analyzers.loading.timm_models import timm_step
from ddltool.analyzers.loading.transformers_models import transformers_step
from ddltool.analyzers.tracing.step import TrainingStep, with_sequence_length
from ddltool.errors import InputError
from ddltool.graph import RECV, Graph

FORMS = "model.onnx, package.module:factory, path/file.py:factory, zoo:NAME, transformers:NAME, timm:NAME or graph.json"
# Of the bytes of parameters: poolers and mask tokens stay below, a tower that no input reaches is above.
_MOST_UNFED = 0.03
_MODULES_SHOWN = 3


def resolve(
    source: str, schemes: Mapping[str, Callable[[str], Any]], *, sequence_length: int | None = None
) -> TrainingStep:
    """Return the module of a torch SOURCE with example inputs and a loss, under the ambient default device.

    ``schemes``: makers of further ``scheme:NAME`` sources; each returns a module or (module, example inputs).
    ``sequence_length``: tokens of text. Raises InputError when the source does not exist, cannot be built or fed, or
    has no text of that length, and MissingExtra when it needs a package that is not installed.
    """
    scheme, colon, name = source.partition(":")
    if not colon:
        exists = Path(source).exists()
        problem = "is not a model that ddltool reads" if exists else "no such file or source"
        raise InputError(source, problem, f"SOURCE is {FORMS}")
    if scheme == "transformers":
        return transformers_step(name, sequence_length)
    if scheme == "timm":
        step = timm_step(name)
    elif scheme in schemes:
        step = step_from(schemes[scheme](name), source, name)
    else:
        step = factory_step(source)
    return replace(step, inputs=with_sequence_length(step.inputs, sequence_length))


def demand_whole(graph: Graph, source: str) -> Graph:
    """Return a torch SOURCE's graph with a note on parameters that nothing reads.

    Raises InputError for a model of ``transformers:`` or ``timm:`` when those are more than 3 % of its bytes: its
    example inputs then do not reach part of it. A user's own model may leave out what it likes.
    """
    read = {int(source_op) for op in range(len(graph.names)) for source_op in graph.inputs_of(op)}
    received = [int(op) for op in graph.of_kind(RECV)]
    unfed = [op for op in received if op not in read]
    if not unfed:
        return graph
    share = sum(graph.size_bytes[op] for op in unfed) / max(1.0, sum(graph.size_bytes[op] for op in received))
    modules = list(dict.fromkeys(_module(graph.parameter[op] or "") for op in unfed))
    shown = ", ".join(modules[:_MODULES_SHOWN]) + (
        f", +{len(modules) - _MODULES_SHOWN}" if len(modules) > _MODULES_SHOWN else ""
    )
    problem = f"{len(unfed)} of {len(received)} parameters ({share:.1%} of their bytes) feed nothing: {shown}"
    if share > _MOST_UNFED and source.partition(":")[0] in ("transformers", "timm"):
        remedy = "no example input reaches them: write a factory that returns (module, example_inputs)"
        raise InputError(source, problem, remedy)
    note = "; ".join(text for text in (str(graph.meta.get("note", "")), problem) if text)
    return replace(graph, meta={**graph.meta, "note": note})


def _module(parameter: str) -> str:
    """Return the first parts of a parameter's path, without numbers: enough to know what it belongs to."""
    parts = [part for part in parameter.split(".")[:-1] if not part.isdigit()]
    return ".".join(parts[:3]) or parameter
