"""SOURCE, the user's name of a model: a graph, an ONNX file, or a torch module of code or of a package.

``graph.json``, ``model.onnx``, ``package.module:factory``, ``path/file.py:factory``, ``zoo:NAME``, ``transformers:NAME``,
``timm:NAME``, ``diffusers:NAME``; a program's own ``held:NAME`` while :func:`holding` it. Torch and ONNX are imported when
a source needs them.
Start at :func:`load_graph`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from ddltool.analyzers.step.tracing.determinism import op_facts, scan
from ddltool.errors import InputError
from ddltool.graph import RECV, Graph, Mode, read_graph
from ddltool.graph_results import DeterminismLevel

if TYPE_CHECKING:
    from ddltool.analyzers.step.tracing.numerics import Numerics
    from ddltool.analyzers.step.tracing.step import TrainingStep

Source = str | Path | Callable[..., Any] | tuple[Any, Any]
"""A text as above, a module, (module, example_inputs), a function without arguments that returns either, or any of these with
a batch (:class:`~ddltool.analyzers.step.tracing.batches.Fed`)."""
FORMS = (
    "model.onnx, package.module:factory, path/file.py:factory, zoo:NAME, transformers:NAME, timm:NAME, diffusers:NAME "
    "or graph.json"
)
_LIBRARIES = ("transformers", "timm", "diffusers")
"""Packages whose models are built by name and given example inputs by ddltool."""
# Largest share of the parameters' bytes that may be unread: poolers and mask tokens stay below it, a tower exceeds it.
_MAX_UNREAD_SHARE = 0.03
_held: dict[str, Source] = {}
"""By its text ``held:NAME``, each model of this program that is held at the moment."""
_held_before: set[str] = set()
"""Names of all models that were held so far: a name that comes again gets a number."""
_numbers = count(2)
"""The numbers of names that come again."""


@contextlib.contextmanager
def holding(source: Source) -> Iterator[str]:
    """Yield a text, ``held:NAME``, that stands for a model of this program within the block, wherever a SOURCE is read.

    A SOURCE that is a text or path already is yielded as text. No two models ever get the same text, so that cached
    results of one are never taken for another's.
    """
    if isinstance(source, (str, Path)):
        yield str(source)
        return
    name = name_of(source)
    is_repeated = name in _held_before
    text = f"held:{next(_numbers)}:{name}" if is_repeated else f"held:{name}"
    _held_before.add(name)
    _held[text] = source
    try:
        yield text
    finally:
        del _held[text]


def is_graph_file(source: Source | list[str]) -> TypeGuard[str | Path]:
    """Return whether SOURCE names a graph document: a ``.json`` or ``.json.gz`` file, or ``-`` for standard input.

    A configuration file of a library's model (``transformers:config.json``) is none.
    """
    if not isinstance(source, (str, Path)):
        return False
    text = str(source)
    is_configuration = text.startswith(("transformers:", "diffusers:"))
    return text == "-" or (text.removesuffix(".gz").endswith(".json") and not is_configuration)


def is_onnx_file(source: Source | list[str]) -> TypeGuard[str | Path]:
    """Return whether SOURCE names an ONNX file."""
    return isinstance(source, (str, Path)) and str(source).endswith(".onnx")


def name_of(source: Source | list[str]) -> str:
    """Return the name of a SOURCE: its text, a command's words, or the name of the module's class or of the function."""
    if isinstance(source, list):
        return " ".join(map(str, source))
    if isinstance(source, (str, Path)):
        return str(source)
    model = source[0] if isinstance(source, tuple) else source
    if isinstance(model, (str, Path)):
        return str(model)
    return str(getattr(model, "__name__", type(model).__name__))


def load_graph(
    source: Source,
    mode: Mode | None,
    batch_size: int | None,
    bindings: Mapping[str, int] | None = None,
    *,
    numerics: Numerics | None = None,
    sequence_length: int | None = None,
) -> Graph:
    """Return the graph of any SOURCE.

    Args:
        mode: ``training`` or ``inference``; None: training for torch sources, inference for ONNX files.
        batch_size: samples of the step; None: those of the example inputs or the file.
        bindings: sizes of an ONNX file's symbolic dimensions by name.
        numerics: precision and layout of a torch source; None: float32 as torch runs it.
        sequence_length: tokens in each sample of a torch source; None: the source's own.

    Raises InputError when the source does not exist, does not run or has no such mode.
    """
    if is_graph_file(source):
        graph = read_graph(source)
        if mode is not None and mode != graph.mode:
            raise InputError("--mode", f"{source} holds a graph for {graph.mode}, not {mode}", "leave --mode out")
        if batch_size is not None and batch_size != graph.batch_size:
            raise InputError("--batch-size", f"{source} was traced for {graph.batch_size}", "trace the model again")
        return graph
    if is_onnx_file(source):
        from ddltool.analyzers.step.tracing.onnx_adapter import trace_onnx

        if mode == "training":
            raise InputError("--mode", f"{source} holds a forward graph only", "use --mode inference for ONNX files")
        return trace_onnx(str(source), batch_size=batch_size, bindings=bindings)
    from ddltool.analyzers.step.tracing.numerics import Numerics
    from ddltool.analyzers.step.tracing.torch_adapter import trace_torch

    with contextlib.redirect_stdout(sys.stderr):  # what the user's forward prints must not mix with the result either
        graph = trace_torch(
            lambda: resolve_step(source, sequence_length),
            mode=mode or "training",
            batch_size=batch_size,
            numerics=numerics or Numerics(),
        )
    return demand_whole(graph, source)


def training_step(source: str, batch_size: int) -> TrainingStep:
    """Return a real training step of a torch SOURCE at a batch size: its weights are allocated and initialised.

    Raises InputError for a graph or ONNX file, and as :func:`resolve_step` does.
    """
    if is_graph_file(source) or is_onnx_file(source):
        raise InputError(source, "cannot be trained here", "give a torch source: zoo:NAME, file.py:factory, ...")
    return resolve_step(source).at_batch(batch_size)


def resolve_step(source: Source, sequence_length: int | None = None, attention: str | None = None) -> TrainingStep:
    """Return the module of a torch SOURCE with example inputs and a loss, made on the current default device.

    ``sequence_length``: tokens of text, None for the source's own length. ``attention``: eager or sdpa, for
    ``transformers:`` and ``timm:`` only; None: the library's choice. What the user's code prints goes to stderr. Raises
    InputError if the source does not exist, cannot be built or run, has no text of that length, or takes no ``attention``;
    and MissingExtra if a package is not installed.
    """
    with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints must not mix with the result
        return _resolve(source, sequence_length, attention)


def _resolve(source: Source, sequence_length: int | None, attention: str | None = None) -> TrainingStep:
    """Do the work of :func:`resolve_step`, without redirecting what the user's code prints; arguments and errors as there."""
    from ddltool.analyzers.step.tracing.batches import Fed
    from ddltool.analyzers.step.tracing.diffusers_models import diffusers_step
    from ddltool.analyzers.step.tracing.factories import factory_step, fed_step, held_step, step_from, timm_step
    from ddltool.analyzers.step.tracing.step import with_sequence_length
    from ddltool.analyzers.step.tracing.transformers_models import transformers_step
    from ddltool.fixtures import zoo

    # A text ``held:NAME`` stands for an object of this program; see `holding`.
    if isinstance(source, str) and source.startswith("held:"):
        if source not in _held:
            raise InputError(source, "was a model of a program that has ended", "give the model again")
        source = _held[source]
    if attention is not None and not name_of(source).startswith(("transformers:", "timm:")):
        problem = f"{name_of(source)} has its attention in its code"
        raise InputError("attention", problem, "leave it out, or change it there")
    if isinstance(source, Fed):
        model = _resolve(source.model, None, attention) if isinstance(source.model, (str, Path)) else source.model
        step = fed_step(model, source.batch, name_of(source))
        return replace(step, inputs=with_sequence_length(step.inputs, sequence_length))
    if not isinstance(source, (str, Path)):
        step = held_step(source, name_of(source))
        return replace(step, inputs=with_sequence_length(step.inputs, sequence_length))
    source = str(source)
    scheme, colon, name = source.partition(":")
    if not colon:
        exists = Path(source).exists()
        problem = "is not a model that ddltool reads" if exists else "no such file or source"
        raise InputError(source, problem, f"SOURCE is {FORMS}")
    # Models of these two libraries are built for a length of text; the inputs of any other model are resized below.
    if scheme == "transformers":
        return transformers_step(name, sequence_length, attention)
    if scheme == "diffusers":
        return diffusers_step(name, sequence_length)
    if scheme == "timm":
        step = timm_step(name, attention)
    elif scheme == "zoo":
        step = step_from((zoo.build(name), zoo.example_inputs(name)), source, name)
    else:
        step = factory_step(source)
    return replace(step, inputs=with_sequence_length(step.inputs, sequence_length))


def scan_source(
    source: Source, mode: Mode | None = None, batch_size: int | None = None, bindings: Mapping[str, int] | None = None
) -> tuple[Graph, DeterminismLevel]:
    """Return the graph of any SOURCE and the level of determinism that its ops allow.

    ``mode``, ``batch_size``, ``bindings``: see :func:`load_graph`, also for what it raises. For torch sources the data types
    of the ops are taken into account; files hold none.
    """
    if is_graph_file(source) or is_onnx_file(source):
        graph = load_graph(source, mode, batch_size, bindings)
        return graph, scan(graph)
    from ddltool.analyzers.step.tracing.torch_adapter import trace_step

    with contextlib.redirect_stdout(sys.stderr):  # what the user's forward prints must not mix with the result
        traced = trace_step(lambda: resolve_step(source), mode=mode or "training", batch_size=batch_size)
    return demand_whole(traced.graph, source), scan(traced.graph, op_facts(traced))


def demand_whole(graph: Graph, source: Source) -> Graph:
    """Return the graph of a torch SOURCE, with a note added if there are parameters that no op reads.

    Raises InputError for a library's model (``transformers:``, ``timm:``, ``diffusers:``) whose unread parameters hold
    more than 3 % of the bytes: the example inputs then miss a part of the model, such as its image encoder. A user's own
    model may have unused parameters.
    """
    from ddltool.analyzers.step.tracing.torch_adapter import join_notes, module_names

    read_ops = {int(read_op) for op in range(len(graph.names)) for read_op in graph.inputs_of(op)}
    parameters = [int(op) for op in graph.of_kind(RECV)]  # each parameter has an op that receives it
    unread = [op for op in parameters if op not in read_ops]
    if not unread:
        return graph
    unread_bytes = sum(graph.size_bytes[op] for op in unread)
    unread_share = unread_bytes / max(1.0, sum(graph.size_bytes[op] for op in parameters))
    names = module_names([graph.parameter[op] or "" for op in unread])
    problem = f"{len(unread)} of {len(parameters)} parameters ({unread_share:.1%} of their bytes) feed nothing: {names}"
    is_of_library = name_of(source).partition(":")[0] in _LIBRARIES
    if unread_share > _MAX_UNREAD_SHARE and is_of_library:
        remedy = "no example input reaches them: write a factory that returns (module, example_inputs)"
        raise InputError(name_of(source), problem, remedy)
    return replace(graph, meta={**graph.meta, "note": join_notes(graph.meta.get("note"), problem)})
