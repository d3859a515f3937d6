"""From a torch module to a Graph: its step is recorded as a script's is, without allocating weights.

The module is built on the ``meta`` device; its parameters, buffers and inputs become tensors without values that seem to be on
a GPU, and :class:`ddltool.analyzers.step.recording.recorder.Recorder` notes every op of the step: forward for inference;
forward, loss and backward for training.

A recording holds one batch size. :func:`trace_any_batch` computes the work at every other batch size from it where all
tensor sizes are proportional to a power of the batch size, and records the step again elsewhere.

Every parameter has a recv op without inputs, every gradient a send op that nothing reads. Buffers, inputs and targets are on
the worker already and have no ops.
"""

from __future__ import annotations

import logging
import math
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from traceback import walk_tb
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.fx import Graph as FxGraph
from torch.fx import Node
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ddltool.analyzers.step.recording.command import assumption_line
from ddltool.analyzers.step.recording.float8 import float8_layers, linear_layers
from ddltool.analyzers.step.recording.graph_of import ops_of, send_of, transfer
from ddltool.analyzers.step.recording.posing import posed, recording_modules, register_device
from ddltool.analyzers.step.recording.recorder import Recorder, Recording, Shadow
from ddltool.analyzers.step.recording.repeating import EqualBlocks, NotAlike, equal_blocks, repeated
from ddltool.analyzers.step.recording.torch_costs import Issued, Scale, cost_of, prime_batch
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.step import TrainingStep, called
from ddltool.errors import DdlToolError, InputError, one_line
from ddltool.graph import Graph, Mode

# Errors of modules that compute on their weights while they are built without any.
_META_REFUSALS = (NotImplementedError, RuntimeError, TypeError)
# Forward passes are compared at a small and at a large batch size. A model that refuses the small one (it halves the
# batch, say) is compared at the multiple instead.
_SMALL, _LARGE, _MULTIPLE = 3, 256, 8
_LEAST_64_BIT_INDEX = 2**31
"""A tensor of so many elements has indices beyond 32 bits."""
_HIGHEST_POWER = 3  # of the batch size in a tensor dimension: losses over all pairs have 2
# The limit of a traced step: one that loops over its samples has ops in proportion to the batch size.
_MOST_OPS = 10_000
_NEGLIGIBLE = 1e-3  # of the elements of a step, in tensors that do not grow with the batch as all others do
_MODULES_SHOWN = 3


class OpOutput(NamedTuple):
    """What an op of a forward pass returned."""

    op: Any
    """torch's operator."""
    shapes: tuple[tuple[int, ...], ...]
    """Of each tensor that it returned, the dimensions followed by the number of elements in the tensor's storage."""
    types: tuple[torch.dtype, ...]
    """Of each of these tensors, its type."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedStep:
    """A step's graph, and the recording from which it was read."""

    graph: Graph
    program: FxGraph
    """Placeholders, calls and an end; ``node.meta["val"]`` holds tensors without memory."""
    nodes: Mapping[str, Node]
    """The call of each compute op of ``graph``, by op name, in program order."""
    parameters: Mapping[str, Node]
    """The placeholders of the parameters, by name."""
    gradients: Mapping[str, Tensor]
    """By a trained parameter's name, its gradient."""
    last: Mapping[int, Node]
    """The node after which a storage is free, by torch's identifier of the storage; one that outlives the step is missing."""
    issued: Sequence[Issued]
    """What the cost of each compute op depends on; equal ones appear once."""
    calls: Mapping[str, int]
    """The index in ``issued`` of each compute op, by op name."""
    retrace: Callable[[int], TracedStep]
    """Traces the step at another batch size."""
    sizes: frozenset[int] = frozenset()
    """Dimensions that must scale to whole numbers at another batch size; empty for a step that takes any batch size."""
    prime: int | None = None
    """Prime that divides the dimensions that grow with the batch, and no others; None: every batch size is traced."""
    largest: int | None = None
    """The largest batch size that is traced, for a step that issues more ops for more samples; None: no limit."""
    _traces: dict[int, TracedStep] = field(default_factory=dict)
    """What :meth:`traced_at` has traced, by batch size."""

    def at(self, batch_size: int) -> Graph:
        """Return the graph at another batch size: scaled from this trace if that is exact, else read from a new trace.

        Scaling takes O(distinct calls). A step without a batch is returned unchanged. Raises InputError for a step that
        must be traced again and does not run at this batch size.
        """
        graph = self.graph
        if batch_size == graph.batch_size or graph.batch_size is None:
            return graph
        scale = self.scale(batch_size)
        if scale is None or not all(scale.is_whole(size) for size in self.sizes):
            return self.traced_at(batch_size).graph
        costs = [cost_of(call, scale) for call in self.issued]
        op_indices, call_indices = self._op_and_call_indices

        def replaced(column: NDArray[np.float64], values: list[Any]) -> NDArray[np.float64]:
            """Return a column of the graph with the compute ops' entries replaced; ``values``: by distinct call."""
            by_call = np.array(values, dtype=float).reshape(len(values), *column.shape[1:])
            changed = column.copy()
            changed[op_indices] = by_call[call_indices]
            return changed

        return replace(
            graph,
            flops=replaced(graph.flops, [cost.flops for cost in costs]),
            size_bytes=replaced(graph.size_bytes, [cost.size_bytes for cost in costs]),
            written_bytes=replaced(graph.written_bytes, [cost.written_bytes for cost in costs]),
            gemm=replaced(graph.gemm, [cost.gemm for cost in costs]),
            batch_size=batch_size,
        )

    @property
    def scales_to_every_batch(self) -> bool:
        """Whether :meth:`at` scales this trace to any batch size.

        It does where the traced batch itself is the prime: then a multiple of the prime can only come from the batch. A step
        that needs a multiple of some number (half of the batch, say) is traced at a multiple of the prime instead.
        """
        return self.prime is not None and self.prime == self.graph.batch_size

    @cached_property
    def _op_and_call_indices(self) -> tuple[list[int], list[int]]:
        """The indices in the graph of its compute ops, and the index in ``issued`` of each one's call; equally long lists."""
        names = self.graph.names
        op_indices = [op_index for op_index, name in enumerate(names) if name in self.calls]
        return op_indices, [self.calls[names[op_index]] for op_index in op_indices]

    def scale(self, batch_size: int) -> Scale | None:
        """Return how dimensions of the trace scale to another batch size, None if the step must be traced again."""
        traced_batch = self.graph.batch_size
        if traced_batch is None or self.prime is None:
            return None
        return Scale(traced_batch, batch_size, self.prime)

    def traced_at(self, batch_size: int) -> TracedStep:
        """Return the step traced at a batch size; each batch size is traced once.

        Raises InputError where the step does not run, and beyond the largest batch size that can be traced.
        """
        if batch_size == self.graph.batch_size:
            return self
        if self.largest is not None and batch_size > self.largest:
            problem = f"loops over its samples, too many ops to trace at batch size {batch_size}"
            raise InputError(self.graph.name, problem, f"ask for at most {self.largest}")
        if batch_size not in self._traces:
            self._traces[batch_size] = self.retrace(batch_size)
        return self._traces[batch_size]


AS_DEFAULT = Numerics()
Result = TypeVar("Result")


def trace_torch(
    build: Callable[[], TrainingStep], *, mode: Mode, batch_size: int | None = None, numerics: Numerics = AS_DEFAULT
) -> Graph:
    """Return the graph of one step of the module that ``build`` makes, with FLOPs and bytes and without durations.

    Args:
        build: a function that is called under the ``meta`` device, where weights take no memory, and called again on the CPU
            if the module cannot be built there.
        mode: ``training`` for forward, loss and backward, ``inference`` for forward alone.
        batch_size: replaces the batch of the example inputs; None keeps it.
        numerics: precision and layout.

    Raises InputError when the module does not run on its example inputs or its control flow depends on data.
    """
    return trace_step(build, mode=mode, batch_size=batch_size, numerics=numerics).graph


def trace_step(
    build: Callable[[], TrainingStep], *, mode: Mode, batch_size: int | None = None, numerics: Numerics = AS_DEFAULT
) -> TracedStep:
    """Return the graph of :func:`trace_torch` together with the program that it was read from.

    ``build``: makes the step; ``mode``: training or inference; ``batch_size``: samples, None: those of the example inputs;
    ``numerics``: precision and layout. Raises InputError for a step that does not run.
    """
    _demand_device(numerics)
    return _trace_at(_build(build, mode, numerics), batch_size, mode, numerics)


def _demand_device(numerics: Numerics) -> None:
    """Raise NeedsOwnProcess before the model is built where this process must not record; later it would be built twice."""
    if numerics.cuda:
        register_device()


def trace_any_batch(
    build: Callable[[], TrainingStep], *, mode: Mode, numerics: Numerics = AS_DEFAULT, like: TracedStep | None = None
) -> TracedStep:
    """Return a trace whose :meth:`TracedStep.at` gives the graph at any batch size.

    The step is traced at a prime batch size that divides no other dimension, so that exactly the multiples of the prime
    grow with the batch. A module that does not run at an odd batch size is traced at a multiple of the prime.

    Models may halve the batch, loop over it or branch on its size. Therefore forward passes at a small and a large batch
    size are compared: they must run the same ops, on dimensions that are equal or grow with the batch. A step that fails
    this is traced at every batch size that is asked for, and a note in the graph says so.

    ``like``: a trace of the same step in other numerics, whose comparison holds for this one, too. The result has no ``prime``
    where the comparison failed, or the step has no batch. Raises InputError as :func:`trace_torch` does.
    """
    _demand_device(numerics)
    step = _build(build, mode, numerics)
    if like is not None and like.prime is not None:  # numerics change types, not how dimensions grow
        return replace(_trace_at(step, like.graph.batch_size, mode, numerics), prime=like.prime, sizes=like.sizes)
    outputs_at = partial(_forward_outputs, step, mode=mode, numerics=numerics)
    small = _SMALL
    small_outputs = outputs_at(small)
    if small_outputs is None:  # it does not run at 3 samples
        small = _MULTIPLE
        small_outputs = outputs_at(small)
    # Trace at a prime that divides no dimension of the weights, nor of any op's output at the small batch.
    tensors = [*step.module.parameters(), *step.module.buffers()]
    prime = prime_batch([*(size for tensor in tensors for size in tensor.shape), *_sizes(small_outputs or ())])
    traced_batch = prime if small == _SMALL else _MULTIPLE * prime
    traced = _trace_at(step, traced_batch, mode, numerics)
    if traced.graph.batch_size is None or small_outputs is None:  # nothing to compare: traced at every batch size
        return traced
    large, large_outputs = _large_outputs(outputs_at, small, small_outputs, traced_batch)
    if _is_proportional(small_outputs, large_outputs or [], small, large):
        # Traced at a multiple, its dimensions need not scale to whole numbers at every batch size.
        traced_outputs = () if traced_batch == prime else outputs_at(traced_batch)
        return replace(traced, prime=prime, sizes=_sizes(traced_outputs or ()))
    note = "its work does not grow in proportion with the batch: traced at every batch size"
    graph = replace(traced.graph, meta={**traced.graph.meta, "note": join_notes(traced.graph.meta.get("note"), note)})
    # A step that loops over its samples is traced only up to the batch size, a power of two, with about _MOST_OPS ops.
    ops_per_sample = (len(large_outputs or small_outputs) - len(small_outputs)) / (large - small)
    largest = None
    if ops_per_sample > 0:
        largest = max(traced_batch, 2 ** int(np.log2(_MOST_OPS / ops_per_sample)))
    return replace(traced, graph=graph, largest=largest)


def _large_outputs(
    outputs_at: Callable[[int], list[OpOutput] | None], small: int, small_outputs: list[OpOutput], traced_batch: int
) -> tuple[int, list[OpOutput] | None]:
    """Return the batch size at which to compare a step with that at ``small``, and its ops' outputs there; None: it fails.

    It is ``_LARGE``, or ``traced_batch`` where the step fails at that, or runs other ops on tensors beyond 32-bit indices,
    as torch does. ``outputs_at``: see :func:`_forward_outputs`.
    """
    large_outputs = outputs_at(_LARGE)
    if large_outputs is None:
        return traced_batch, outputs_at(traced_batch)
    if _exceeds_32_bits(large_outputs) and not _is_proportional(small_outputs, large_outputs, small, _LARGE):
        return traced_batch, outputs_at(traced_batch)
    return _LARGE, large_outputs


def join_notes(*notes: object) -> str:
    """Return the notes that are not empty as one text, separated by semicolons."""
    return "; ".join(str(note) for note in notes if note)


def module_names(parameters: Sequence[str]) -> str:
    """Return a text with the modules that own parameters, as ``model.layers.mlp, lm_head, model.norm, +2``.

    Names are without layer numbers and cut to three parts; modules beyond the first three are only counted.
    """

    def module(parameter: str) -> str:
        """Return the shortened path of the module that owns a parameter; a parameter of the model itself by its own name."""
        parts = [part for part in parameter.split(".")[:-1] if not part.isdigit()]
        return ".".join(parts[:3]) or parameter

    names = list(dict.fromkeys(module(parameter) for parameter in parameters))
    shown, hidden = names[:_MODULES_SHOWN], names[_MODULES_SHOWN:]
    counted = [f"+{len(hidden)}"] if hidden else []
    return ", ".join(shown + counted)


def _sizes(outputs: Sequence[OpOutput]) -> frozenset[int]:
    """Return all dimensions, and counts of stored elements, that occur among ops' outputs."""
    return frozenset(size for output in outputs for shape in output.shapes for size in shape)


def _exceeds_32_bits(outputs: Sequence[OpOutput]) -> bool:
    """Return whether an output may have more elements than 32-bit indices reach.

    Each of its shapes here ends with the count of stored elements, so the product is an upper bound.
    """
    return any(math.prod(shape) >= _LEAST_64_BIT_INDEX for output in outputs for shape in output.shapes)


def _is_proportional(
    small_outputs: Sequence[OpOutput], large_outputs: Sequence[OpOutput], small_batch: int, large_batch: int
) -> bool:
    """Return whether two forward passes run the same ops, on dimensions that are equal or grow with a power of the batch size.

    Outputs with other dimensions may hold up to a thousandth of all elements, because some models draw at random how many
    tokens they mask. ``small_outputs`` are those of the pass at ``small_batch``, ``large_outputs`` those at ``large_batch``.
    """

    def scales(small: int, large: int) -> bool:
        """Return whether the ratio of two dimensions is that of the batches to a power from 0 to 3."""
        # Products of integers: a quotient would be rounded.
        return any(small * large_batch**power == large * small_batch**power for power in range(_HIGHEST_POWER + 1))

    def program(outputs: Sequence[OpOutput]) -> list[tuple[object, ...]]:
        """Return each op with the types and numbers of dimensions of its results."""
        return [(output.op, output.types, [*map(len, output.shapes)]) for output in outputs]

    if program(small_outputs) != program(large_outputs):
        return False
    all_elements = disproportionate_elements = 0
    for small_output, large_output in zip(small_outputs, large_outputs, strict=True):
        elements = sum(shape[-1] for shape in large_output.shapes)  # the last number counts the stored elements
        all_elements += elements
        if not all(map(scales, chain(*small_output.shapes), chain(*large_output.shapes))):
            disproportionate_elements += elements
    return disproportionate_elements <= _NEGLIGIBLE * all_elements


def _forward_outputs(step: TrainingStep, batch_size: int, mode: Mode, numerics: Numerics) -> list[OpOutput] | None:
    """Return the outputs of the ops of the forward pass at a batch size, in order; None: the step does not run at it.

    In training mode the loss belongs to the pass.
    """
    try:
        recorded = _record_step(step.at_batch(batch_size), mode, numerics, forward_only=True)
    except InputError:
        return None

    def stored_elements(tensor: Tensor) -> int:
        """Return how many elements of a tensor's type its storage holds."""
        return tensor.untyped_storage().nbytes() // tensor.element_size()

    outputs: list[OpOutput] = []
    for call in recorded.recording.calls:
        tensors = [leaf.tensor for leaf in tree_leaves(call.output) if isinstance(leaf, Shadow)]
        shapes = tuple((*tensor.shape, stored_elements(tensor)) for tensor in tensors)
        outputs.append(OpOutput(call.target, shapes, tuple(tensor.dtype for tensor in tensors)))
    return outputs


def _trace_at(step: TrainingStep, batch_size: int | None, mode: Mode, numerics: Numerics) -> TracedStep:
    """Return the step traced at a batch size, None: that of its example inputs. Raises InputError when it does not run.

    ``mode``: training for forward, loss and backward, inference for forward alone; ``numerics``: precision and layout.
    """
    sized_step = step.at_batch(batch_size)

    def trace_again(size: int) -> TracedStep:
        """Return the step traced at another batch size; an InputError then names that size."""
        try:
            return _trace_at(step, size, mode, numerics)
        except InputError as error:
            raise InputError(f"{error.where} at batch size {size}", error.problem, error.remedy) from error

    return _to_graph(_record_step(sized_step, mode, numerics), sized_step, mode, numerics, trace_again)


def _build(build: Callable[[], TrainingStep], mode: Mode, numerics: Numerics) -> TrainingStep:
    """Return the step that ``build`` makes, its module in train or eval mode, with a note on the layers that run in float8.

    Raises InputError if no parameter is trained in a training step, and if fp8 finds no layer that can run in float8.
    """
    try:
        with torch.device("meta"):
            step = build()
    except DdlToolError:
        raise
    except _META_REFUSALS:  # some modules compute on their weights while they are built; those need real ones
        step = build()
    step = replace(step, module=step.module.train(mode == "training"))
    if mode == "training" and not any(value.requires_grad for value in step.module.parameters()):
        raise InputError(
            step.name,
            "has no parameter that is trained",
            "set requires_grad, or ddltool trace it with --mode inference",
        )
    _demand_kept_type(step, numerics)
    shaped = (*step.module.parameters(), *(value for value in step.inputs if isinstance(value, Tensor)))
    if numerics.channels_last and all(value.dim() != 4 for value in shaped):
        raise InputError("--channels-last", f"has no part: {step.name} has no images and no filters", "leave it out")
    if not numerics.format.linears:
        return step
    return replace(step, note=join_notes(step.note, _float8_note(step)))


def _demand_kept_type(step: TrainingStep, numerics: Numerics) -> None:
    """Raise InputError if all trained parameters are of one type other than float32, which the precision says they are.

    Memory, updates and words would be those of float32, which the module does not have.
    """
    trained = [value for value in step.module.parameters() if value.requires_grad and value.is_floating_point()]
    names = {torch.float16: "fp16-pure", torch.bfloat16: "bf16-pure"}
    types = {value.dtype for value in trained}
    if len(types) == 1 and types <= {*names, torch.float64} and numerics.format.keeps == "float32":
        [kept] = types
        problem = f"has parameters in {str(kept).removeprefix('torch.')}, which {numerics.precision} keeps in float32"
        remedy = f"give --precision {names[kept]}, or return" if kept in names else "return"
        raise InputError(step.name, problem, f"{remedy} the module in float32")


def _float8_note(step: TrainingStep) -> str:
    """Return a note on which linear layers of a step run in float8, and which do not. Raises InputError if none does."""
    all_layers, chosen = linear_layers(step.module), float8_layers(step.module)
    if not chosen:
        problem = f"has no linear layer for float8 among {len(all_layers)}"
        remedy = (
            "give bf16: widths must divide by 16 and be 256 or more, and a head over a vocabulary stays in bfloat16"
        )
        raise InputError(step.name, problem, remedy)
    not_chosen = [f"{name}.weight" for name in all_layers if name not in chosen]
    in_bfloat16 = f", in bfloat16: {module_names(not_chosen)}" if not_chosen else ""
    return f"float8: {len(chosen)} of {len(all_layers)} linear layers{in_bfloat16}"


@dataclass(frozen=True, kw_only=True, eq=False)
class _RecordedModule:
    """A module's step as recorded, and the tensors of its parameters, buffers and gradients in it by name.

    A parameter is kept in one type, in which the optimizer updates it, and may be computed with in another.
    """

    recording: Recording
    parameters: dict[str, Shadow]
    buffers: dict[str, Shadow]
    kept_bytes: dict[str, float]
    """Bytes of each parameter as it is kept, reduced and updated: float32 where ``fully_shard`` gathers a half type."""
    kept_types: dict[str, str]
    """The type in which each parameter is kept: ``float32``."""
    trained: list[str]
    """The names of the parameters that require a gradient."""
    gradients: dict[str, Shadow]
    """By a parameter's name, its gradient; parameters that got none are missing."""

    @property
    def kept_type(self) -> str:
        """The type in which most parameters are kept; ``float32`` for a module without parameters."""
        types = Counter(self.kept_types.values())
        return types.most_common(1)[0][0] if types else "float32"

    def whole(self, module: nn.Module, blocks: EqualBlocks) -> _RecordedModule:
        """Return the recording of the whole module, made from this one of the module with its list of equal blocks shortened.

        ``module``: the whole one. Raises NotAlike if the recorded blocks turn out to differ.
        """
        repetition = repeated(self.recording, blocks, {**self.parameters, **self.buffers})
        # By a parameter's name in the whole module, the name of the one that was recorded in its place.
        recorded_name = {name: blocks.name_when_shortened(name) for name, _ in module.named_parameters()}

        def of_all_blocks(shadows: Mapping[str, Shadow]) -> dict[str, Shadow]:
            """Return the shadows of all the module's parameters, from those of the recorded ones."""
            found = ((name, repetition.shadow_of(shadows, name)) for name in recorded_name)
            return {name: shadow for name, shadow in found if shadow is not None}

        return replace(
            self,
            recording=replace(repetition.recording, parameters=of_all_blocks(self.recording.parameters)),
            parameters=of_all_blocks(self.parameters),
            kept_bytes={name: self.kept_bytes[recorded] for name, recorded in recorded_name.items()},
            kept_types={name: self.kept_types[recorded] for name, recorded in recorded_name.items()},
            trained=[name for name, recorded in recorded_name.items() if recorded in self.trained],
            gradients=of_all_blocks(self.gradients),
        )


def _record_step(
    step: TrainingStep, mode: Mode, numerics: Numerics, *, forward_only: bool = False, shorten: bool = True
) -> _RecordedModule:
    """Return the recording of a step. Raises InputError if the step does not run.

    ``forward_only``: record the forward pass and loss alone; the result then lacks blocks that were left out.
    ``shorten``: of many equal blocks record only a few, and copy the others from them; if that fails, record all. A step
    that fails is tried once more with all new tensors on the GPU, as it may have mixed in tensors of the CPU; if that fails
    too, the first error is raised.
    """
    blocks = equal_blocks(step.module) if shorten else None
    if blocks is not None:
        with suppress(InputError, NotAlike):
            # Forward passes are only compared, and two blocks show how the dimensions of equal blocks grow.
            with blocks.shortened(2) if forward_only else blocks.shortened():
                recorded = _record_step(step, mode, numerics, forward_only=forward_only, shorten=False)
            return recorded if forward_only else recorded.whole(step.module, blocks)

    def record(everywhere: bool) -> _RecordedModule:
        """Return the recording; ``everywhere``: all new tensors are on the GPU."""
        return _record_once(step, mode, numerics, forward_only, everywhere=everywhere)

    try:
        return _run_guarded(lambda: record(everywhere=False), step, mode)
    except InputError:
        with suppress(InputError):
            return _run_guarded(lambda: record(everywhere=True), step, mode)
        raise


def _record_once(
    step: TrainingStep, mode: Mode, numerics: Numerics, forward_only: bool, *, everywhere: bool = False
) -> _RecordedModule:
    """Run a step once on tensors without values, and return its recording; raises what the step raises.

    ``forward_only``: without the backward pass. The tensors seem to be on a GPU, or are the CPU's where ``numerics`` asks for
    its kernels. ``everywhere``: tensors that the module makes without naming a device are made on the GPU, too.
    """
    gpu = register_device() if numerics.cuda else torch.device("cpu")
    recorder = Recorder(gpu)

    def without_values(value: Tensor) -> Tensor:
        """Return a tensor without values, of the same layout and type, on the recorded device."""
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=gpu)

    with _seeded(), _on_device(recorder, everywhere or not numerics.cuda), recording_modules(recorder):
        # The tensors that take the place of the module's: as they are kept, then as the module gets them.
        weights = {name: without_values(value) for name, value in step.module.named_parameters()}
        kept = {name: numerics.kept(value) for name, value in weights.items()}
        kept_bytes = {name: float(value.nbytes) for name, value in kept.items()}
        kept_types = {name: str(value.dtype).removeprefix("torch.") for name, value in kept.items()}
        del kept  # a tensor that stays alive would count in the step's memory; so ``weights`` is emptied below, too
        needs_gradient = {name: value.requires_grad for name, value in step.module.named_parameters()}
        parameters = {
            name: numerics.cast(weights.pop(name)).requires_grad_(needs_gradient[name]) for name in kept_bytes
        }
        buffers = {name: numerics.cast(without_values(value)) for name, value in step.module.named_buffers()}
        inputs = tuple(
            numerics.cast(without_values(value)) if isinstance(value, Tensor) else value for value in step.inputs
        )
        with (
            _reparametrize_module(step.module, {**parameters, **buffers}, tie_weights=True),
            torch.set_grad_enabled(mode == "training"),
        ):
            recorder.start()
            # Around the backward pass, too: checkpoints recompute layers there.
            with numerics.float8_linears(step.module, parameters):
                with numerics.autocast():
                    result = called(step.module, inputs, step.keywords)
                    if mode == "training":
                        result = step.loss(result)
                if mode == "training" and not forward_only:
                    result.backward()
            recorder.stop()
        with _disable_current_modes():
            return _RecordedModule(
                recording=recorder.step,
                parameters={name: recorder.shadow_of(value) for name, value in parameters.items()},
                buffers={name: recorder.shadow_of(value) for name, value in buffers.items()},
                kept_bytes=kept_bytes,
                kept_types=kept_types,
                trained=[name for name, is_trained in needs_gradient.items() if is_trained],
                gradients={
                    name: recorder.shadow_of(value.grad) for name, value in parameters.items() if value.grad is not None
                },
            )


@contextmanager
def _on_device(recorder: Recorder, everywhere: bool) -> Iterator[None]:
    """Run the block under the recorder, with CUDA seeming to be there unless the recorder's device is the CPU.

    ``everywhere``: tensors that are made without naming a device are made on the recorder's.
    """
    with (
        recorder if recorder.gpu.type == "cpu" else posed(recorder),
        recorder.gpu if everywhere else nullcontext(),
    ):
        yield


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed Python's and NumPy's generators with 0 for the block, and restore their states afterwards.

    Some models skip layers at random, and passes that are compared have to skip the same ones.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 - the generator that models use
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002


def _run_guarded(run: Callable[[], Result], step: TrainingStep, mode: Mode) -> Result:
    """Call ``run`` with warnings and logs silenced, and return its result.

    An exception of the user's code becomes an InputError of one line, which names the step.
    """
    try:
        with warnings.catch_warnings(), silent_log():
            warnings.simplefilter("ignore")
            return run()
    except DdlToolError:
        raise
    except Exception as error:  # whatever the user's forward raises is the user's to read, in one line
        collective = _failed_collective(error)
        if collective:  # no process group is started here
            problem = (
                f"{mode} step calls {collective} of torch.distributed, and what a step sends itself is not modelled"
            )
            remedy = "plan takes such a group's step as measured or given (group: in job.yaml)"
            raise InputError(step.name, problem, remedy) from error
        if "fork-based multiprocessing" in str(error):  # torch's refusal of a backward pass in a fork
            problem = "this process has run backward passes beside its GPU, after which it cannot record a model"
            raise InputError(step.name, problem, "ask before them, or in a process of its own (ddltool ...)") from error
        text = one_line(f"{type(error).__name__}: {error}")[:300]
        remedy = "it must run eagerly on its example inputs, with shapes that do not depend on the data"
        raise InputError(step.name, f"{mode} step cannot be traced ({text})", remedy) from error


def _failed_collective(error: Exception) -> str:
    """Return the name of the function of torch.distributed in which an error was raised, "" if it was raised elsewhere."""
    for frame, _ in walk_tb(error.__traceback__):  # from the outermost call inwards
        module, function = str(frame.f_globals.get("__name__")), frame.f_code.co_name
        # torch wraps its collectives in a decorator, whose frame, named "wrapper", comes before the collective's.
        if module.startswith("torch.distributed") and function != "wrapper":
            return function
    return ""


@contextmanager
def silent_log() -> Iterator[None]:
    """Silence all logs within the block: torch logs stacks of errors that are reported here in one line, or tried again."""
    disabled_level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled_level)


def _to_graph(
    recorded: _RecordedModule, step: TrainingStep, mode: Mode, numerics: Numerics, retrace: Callable[[int], TracedStep]
) -> TracedStep:
    """Return the traced step of a recording.

    Its graph has recv ops of the parameters, compute ops, and in training send ops of the gradients. ``retrace``: a
    function that traces the step at another batch size.
    """
    recording = recorded.recording
    kept_bytes = recorded.kept_bytes
    recorded_ops = ops_of(recording, given=recorded.parameters)
    recorded_ops.program.output(())  # the program's end, which reads nothing
    # Transfers: of each parameter, and of each gradient that an op of the step completes.
    recvs = [transfer("recv", name, kept_bytes[name]) for name in recorded.parameters]
    producers = {name: recorded_ops.last_writer.get(shadow.storage) for name, shadow in recorded.gradients.items()}
    sends = [
        send_of(name, recorded.gradients[name], kept_bytes[name], after, recorded.kept_types[name])
        for name, after in producers.items()
        if after is not None
    ]
    sent = {send.parameter for send in sends}
    # A parameter that is read and gets no gradient is mostly a mistake in the user's loss, so it is noted.
    without_gradient = [name for name in recorded.trained if recorded_ops.given[name].users and name not in sent]
    meta = _meta(recorded, step, numerics, without_gradient if mode == "training" else [])
    tensors = [value for value in step.inputs if isinstance(value, Tensor)]
    batches = [value.shape[step.batch_dimension] for value in tensors if value.dim() > step.batch_dimension]
    batch_size = int(batches[0]) if batches else None
    ops = [*recvs, *recorded_ops.ops, *sends]
    graph = Graph.from_ops(step.name, mode, ops, batch_size=batch_size, meta=meta, where=step.name)
    return TracedStep(
        graph=graph,
        program=recorded_ops.program,
        nodes={op.name: node for op, node in zip(recorded_ops.ops, recorded_ops.nodes, strict=True)},
        parameters=recorded_ops.given,
        gradients={name: recorded.gradients[name].tensor for name in producers if name in sent},
        last={
            storage.shadow.untyped_storage()._cdata: recorded_ops.nodes[storage.freed]
            for storage in recording.storages
            if storage.shadow is not None and storage.freed is not None and storage.freed >= 0
        },
        issued=recorded_ops.issued,
        calls=recorded_ops.issued_of,
        retrace=retrace,
    )


def _meta(
    recorded: _RecordedModule, step: TrainingStep, numerics: Numerics, without_gradient: Sequence[str]
) -> dict[str, str | int | float | bool | None]:
    """Return the properties of a traced step that a graph has in its ``meta``, with a note on what the user should know.

    ``without_gradient``: the trained parameters that the step reads and that get no gradient, for the note.
    """
    note = join_notes(step.note, assumption_line(recorded.recording.assumed))
    if without_gradient:
        modules = module_names(without_gradient)
        note = join_notes(note, f"{len(without_gradient)} trained parameters are read and get no gradient: {modules}")
    meta: dict[str, str | int | float | bool | None] = {
        "framework": "torch",
        "dtype": recorded.kept_type,
        "parameter_elements": sum(shadow.tensor.numel() for shadow in recorded.parameters.values()),
        "precision": numerics.precision,
        "channels_last": numerics.channels_last,
    }
    if note:
        meta["note"] = note
    # A matrix of integers among the inputs is taken for (samples, tokens).
    tensors = [value for value in step.inputs if isinstance(value, Tensor)]
    lengths = [value.shape[1] for value in tensors if value.dim() == 2 and not value.is_floating_point()]
    if lengths:
        meta["tokens_per_sample"] = int(lengths[0])
    return meta
