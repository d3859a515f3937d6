"""From a torch module to a Graph: one flat trace of the step on fake tensors, no weights allocated.

The module is built on the ``meta`` device; its parameters, buffers and inputs become fake CPU tensors, and ``make_fx``
records every aten op of the step: forward for inference; forward, loss and backward for training. This is the only
module that touches torch's unstable tracing interfaces; a change there shows here and in the fixture graphs' tests.

A trace holds one batch size. :func:`trace_any_batch` computes the work at every other batch size from the trace where all
tensor sizes are proportional to a power of the batch size, and traces the step again elsewhere.

Every parameter is a recv root, every gradient a send leaf. Buffers, inputs and targets are on the worker already and
are no ops. Tuple indexing is folded into its producer. An op depends on the last in-place op that wrote to the storage
of its inputs, through whichever view.
"""

from __future__ import annotations

import logging
import math
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from traceback import walk_tb
from typing import Any, TypeVar

import numpy as np
import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode

from ddltool.analyzers.step.tracing.dialect import Numerics
from ddltool.analyzers.step.tracing.op_rules import Cost
from ddltool.analyzers.step.tracing.step import TrainingStep, all_tensors, called
from ddltool.analyzers.step.tracing.torch_costs import (
    Issued,
    Scale,
    base_name,
    cost_of,
    issued,
    prime_batch,
    tensors_of,
)
from ddltool.errors import DdlToolError, InputError, one_line
from ddltool.graph import Graph, Mode, Op

_META_REFUSALS = (NotImplementedError, RuntimeError, TypeError)
# Forward passes are compared at a small and at a large batch size; a model that refuses the small one, at the multiple.
_SMALL, _LARGE, _MULTIPLE = 3, 256, 8
_HIGHEST_POWER = 3  # of the batch size in a tensor dimension: losses over all pairs have 2
# The limit of a traced step: one that loops over its samples has ops in proportion to the batch size.
_MOST_OPS = 10_000
_MODULES_SHOWN = 3
# An op, and of each of its output tensors the dimensions followed by the elements of the storage, and the type.
OpOutput = tuple[Any, tuple[tuple[int, ...], ...], tuple[torch.dtype, ...]]


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedStep:
    """A step's graph, and the fx graph from which it was read."""

    graph: Graph
    fx: GraphModule
    """Placeholders in the order parameters, buffers, tensor inputs; ``node.meta["val"]`` holds fake CPU tensors."""
    nodes: Mapping[str, Node]
    """The fx call of each compute op of ``graph``, by op name, in program order."""
    issued: Sequence[Issued]
    """The distinct calls."""
    calls: Mapping[str, int]
    """Index in ``issued`` of each compute op, by op name."""
    again: Callable[[int], TracedStep]
    """Traces the step at another batch size."""
    sizes: frozenset[int] = frozenset()
    """Dimensions that must scale to whole numbers at another batch size; empty for a step that takes any batch size."""
    prime: int | None = None
    """Prime that divides the dimensions that grow with the batch, and no others; None: every batch size is traced."""
    largest: int | None = None
    """The largest batch size that is traced, for a step that issues more ops for more samples; None: no limit."""
    _traces: dict[int, TracedStep] = field(default_factory=dict)

    def at(self, batch_size: int) -> Graph:
        """Return the graph at another batch size: its work scaled from this trace, or read from a new trace.

        O(distinct calls). Raises InputError for a step that must be traced and does not run at this batch size.
        """
        graph = self.graph
        if batch_size == graph.batch_size or graph.batch_size is None:
            return graph
        scale = self.scale(batch_size)
        if scale is None or not all(scale.is_whole(size) for size in self.sizes):
            return self.traced_at(batch_size).graph
        # Columns of a distinct call: flops, bytes, written bytes, then its four of ``gemm``.
        work_of_op = np.stack([graph.flops, graph.size_bytes, graph.written_bytes])
        gemm = graph.gemm.copy()
        costs = [cost_of(call, scale) for call in self.issued]
        rows = [(cost.flops, cost.size_bytes, cost.written_bytes, *cost.gemm) for cost in costs]
        cost_table = np.array(rows).reshape(-1, 7)
        op_indices, call_indices = self._op_and_call_indices
        work_of_op[:, op_indices], gemm[op_indices] = cost_table[call_indices, :3].T, cost_table[call_indices, 3:]
        flops, size_bytes, written_bytes = work_of_op
        return replace(
            graph, flops=flops, size_bytes=size_bytes, written_bytes=written_bytes, gemm=gemm, batch_size=batch_size
        )

    @cached_property
    def _op_and_call_indices(self) -> tuple[list[int], list[int]]:
        """Indices of the graph's compute ops, and index in ``issued`` of each."""
        pairs = [(op_index, self.calls[name]) for op_index, name in enumerate(self.graph.names) if name in self.calls]
        return [op_index for op_index, _ in pairs], [call_index for _, call_index in pairs]

    def scale(self, batch_size: int) -> Scale | None:
        """Return how dimensions of the trace scale to another batch size, None for a step that must be traced again."""
        traced_batch = self.graph.batch_size
        if traced_batch is None or self.prime is None:
            return None
        return Scale(traced_batch, batch_size, self.prime)

    def traced_at(self, batch_size: int) -> TracedStep:
        """Return the step traced at a batch size, from the cache when repeated. Raises InputError when it does not run."""
        if batch_size == self.graph.batch_size:
            return self
        if self.largest is not None and batch_size > self.largest:
            problem = f"loops over its samples, too many ops to trace at batch size {batch_size}"
            raise InputError(self.graph.name, problem, f"ask for at most {self.largest}")
        if batch_size not in self._traces:
            self._traces[batch_size] = self.again(batch_size)
        return self._traces[batch_size]


AS_DEFAULT = Numerics()
Result = TypeVar("Result")


def trace_torch(
    build: Callable[[], TrainingStep], *, mode: Mode, batch_size: int | None = None, numerics: Numerics = AS_DEFAULT
) -> Graph:
    """Return the graph of one step of the module that ``build`` makes: flops, bytes and their sources, no durations.

    Args:
        build: is called under the ``meta`` device, where weights take no memory; a module that cannot be built there is
            built on the CPU.
        batch_size: replaces the batch of the example inputs; None keeps it.

    Raises InputError when the module does not run on its example inputs or its control flow depends on data.
    """
    return trace_step(build, mode=mode, batch_size=batch_size, numerics=numerics).graph


def trace_step(
    build: Callable[[], TrainingStep], *, mode: Mode, batch_size: int | None = None, numerics: Numerics = AS_DEFAULT
) -> TracedStep:
    """Return the graph of :func:`trace_torch` together with its fx graph. Raises as :func:`trace_torch` does."""
    return _trace_at(_build(build, mode), batch_size, mode, numerics)


def trace_any_batch(build: Callable[[], TrainingStep], *, mode: Mode, numerics: Numerics = AS_DEFAULT) -> TracedStep:
    """Return a trace whose :meth:`TracedStep.at` gives the graph at any batch size.

    The step is traced at a prime that divides no other dimension: the multiples of the prime are the dimensions that grow
    with the batch (at a multiple of the prime, for a module that takes no odd batch). Models may halve the batch, loop over
    it or branch on its size; so forward passes at a small and a large batch must run the same ops, on dimensions that are
    equal or in the ratio of the batches. A step that fails this is traced at every batch size asked for.
    Raises InputError as :func:`trace_torch` does.
    """
    step = _build(build, mode)
    small, small_outputs = _SMALL, _forward_outputs(step, _SMALL, mode, numerics)
    if small_outputs is None:
        small, small_outputs = _MULTIPLE, _forward_outputs(step, _MULTIPLE, mode, numerics)
    tensors = [*step.module.parameters(), *step.module.buffers()]
    prime = prime_batch([*(size for tensor in tensors for size in tensor.shape), *_sizes(small_outputs or ())])
    traced_batch = prime if small == _SMALL else _MULTIPLE * prime
    traced = _trace_at(step, traced_batch, mode, numerics)
    if traced.graph.batch_size is None or small_outputs is None:
        return traced
    large, large_outputs = _LARGE, _forward_outputs(step, _LARGE, mode, numerics)
    if large_outputs is None or (
        _exceeds_32_bits(large_outputs) and not _is_proportional(small_outputs, large_outputs, small, large)
    ):
        # torch runs other ops on tensors beyond 32-bit indices: compare at the traced batch size instead.
        large, large_outputs = traced_batch, _forward_outputs(step, traced_batch, mode, numerics)
    if _is_proportional(small_outputs, large_outputs or [], small, large):
        traced_outputs = () if traced_batch == prime else _forward_outputs(step, traced_batch, mode, numerics)
        return replace(traced, prime=prime, sizes=_sizes(traced_outputs or ()))
    note = "its work does not grow in proportion with the batch: traced at every batch size"
    graph = replace(traced.graph, meta={**traced.graph.meta, "note": joined(traced.graph.meta.get("note"), note)})
    ops_per_sample = (len(large_outputs or small_outputs) - len(small_outputs)) / (large - small)
    largest = max(traced_batch, 2 ** int(np.log2(_MOST_OPS / ops_per_sample))) if ops_per_sample > 0 else None
    return replace(traced, graph=graph, largest=largest)


def joined(*notes: object) -> str:
    """Return the remarks that are not empty as one text."""
    return "; ".join(str(note) for note in notes if note)


def module_names(parameters: Sequence[str]) -> str:
    """Return the modules that own the parameters, without layer numbers; the first three by name, the others counted."""

    def module(parameter: str) -> str:
        parts = [part for part in parameter.split(".")[:-1] if not part.isdigit()]
        return ".".join(parts[:3]) or parameter

    names = list(dict.fromkeys(module(parameter) for parameter in parameters))
    hidden = len(names) - _MODULES_SHOWN
    return ", ".join(names[:_MODULES_SHOWN]) + (f", +{hidden}" if hidden > 0 else "")


def _sizes(outputs: Sequence[OpOutput]) -> frozenset[int]:
    return frozenset(size for _, shapes, _ in outputs for shape in shapes for size in shape)


def _exceeds_32_bits(outputs: Sequence[OpOutput]) -> bool:
    return any(math.prod(shape) >= 2**31 for _, shapes, _ in outputs for shape in shapes)


def _is_proportional(
    small_outputs: Sequence[OpOutput], large_outputs: Sequence[OpOutput], small_batch: int, large_batch: int
) -> bool:
    """Return whether two forward passes run the same ops on dimensions that are equal, or in a power of the batches' ratio.

    An output's fields are the op, the shapes and the types of its tensors.
    """

    def scales(small: int, large: int) -> bool:
        return any(small * large_batch**power == large * small_batch**power for power in range(_HIGHEST_POWER + 1))

    def sizes(shapes: tuple[tuple[int, ...], ...]) -> Iterator[int]:
        return (size for shape in shapes for size in shape)

    return len(small_outputs) == len(large_outputs) and all(
        (small_output[0], small_output[2], [*map(len, small_output[1])])
        == (large_output[0], large_output[2], [*map(len, large_output[1])])
        and all(scales(*pair) for pair in zip(sizes(small_output[1]), sizes(large_output[1]), strict=True))
        for small_output, large_output in zip(small_outputs, large_outputs, strict=True)
    )


def _forward_outputs(step: TrainingStep, batch_size: int, mode: Mode, numerics: Numerics) -> list[OpOutput] | None:
    """Return the outputs of all ops of the forward pass and loss at a batch size, None when the step does not run."""
    try:
        return _run_guarded(lambda: _Fakes(step.at_batch(batch_size), mode, numerics).forward(), step, mode)
    except InputError:
        return None


def _trace_at(step: TrainingStep, batch_size: int | None, mode: Mode, numerics: Numerics) -> TracedStep:
    """Return the step traced at a batch size (None: that of its example inputs). Raises InputError when it does not run."""
    sized_step = step.at_batch(batch_size)
    trace = _run_guarded(lambda: _RecordedStep(_Fakes(sized_step, mode, numerics)), step, mode)

    def trace_again(size: int) -> TracedStep:
        try:
            return _trace_at(step, size, mode, numerics)
        except InputError as error:
            raise InputError(f"{error.where} at batch size {size}", error.problem, error.remedy) from error

    return _to_graph(trace, sized_step, trace_again)


def _build(build: Callable[[], TrainingStep], mode: Mode) -> TrainingStep:
    """Return the step that ``build`` makes, in the mode's train or eval state. Raises InputError without trained parameter."""
    try:
        with torch.device("meta"):
            step = build()
    except DdlToolError:
        raise
    except _META_REFUSALS:  # some modules compute on their weights while they are built; those need real ones
        step = build()
    step = replace(step, module=step.module.train(mode == "training"))
    if mode == "training" and not any(value.requires_grad for value in step.module.parameters()):
        raise InputError(step.name, "has no parameter that is trained", "trace it with --mode inference")
    return step


class _Fakes:
    """A step on fake tensors: parameters in placeholder order, buffers and inputs, and the passes run on them."""

    def __init__(self, step: TrainingStep, mode: Mode, numerics: Numerics) -> None:
        self.module = step.module
        self.mode = mode
        self.numerics = numerics
        self.loss = step.loss
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.recomputed: list[range] = []
        with self.fake:
            self.parameters = {
                name: numerics.cast(_fake(value)).requires_grad_(value.requires_grad)
                for name, value in self.module.named_parameters()
            }
            self.kept = {name: numerics.kept(_fake(value)) for name, value in self.module.named_parameters()}
            self.buffers = {name: numerics.cast(_fake(value)) for name, value in self.module.named_buffers()}
            self.inputs = tuple(
                numerics.cast(_fake(value)) if isinstance(value, Tensor) else value for value in step.inputs
            )
            self.keywords = step.keywords

    @contextmanager
    def running(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Iterator[None]:
        """Give the module these tensors, in recomputed activations too, with the same random draws in every pass."""
        with (
            torch.set_grad_enabled(self.mode == "training"),
            _traced_checkpoints(self.numerics, self.recomputed),
            _seeded(),
            _reparametrize_module(self.module, {**parameters, **buffers}, tie_weights=True),
        ):
            yield

    def output(self, inputs: tuple[Any, ...]) -> Any:
        """Return the loss in training, the module's output in inference."""
        with self.numerics.running():
            output = called(self.module, inputs, self.keywords)
            return self.loss(output) if self.mode == "training" else output

    def forward(self) -> list[OpOutput]:
        """Return the outputs of all ops of the forward pass and of the loss."""
        record = _OutputRecorder()
        with self.fake, self.running(self.parameters, self.buffers), record:
            self.output(self.inputs)
        return record.outputs


class _OutputRecorder(TorchDispatchMode):
    """Records the ops that run with the sizes and types of their outputs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outputs: list[OpOutput] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one op and record its outputs."""
        outcome = func(*args, **(kwargs or {}))
        tensors = tensors_of(outcome)
        shapes = tuple(
            (*tensor.shape, tensor.untyped_storage().nbytes() // tensor.element_size()) for tensor in tensors
        )
        self.outputs.append((func, shapes, tuple(tensor.dtype for tensor in tensors)))
        return outcome


class _RecordedStep:
    """A recorded step: the fx graph, the node index at each change of submodule, and that of the backward pass's start."""

    def __init__(self, fakes: _Fakes) -> None:
        self.fakes = fakes
        self.parameters = fakes.parameters
        self.kept = fakes.kept
        """Parameters as they are kept, reduced and updated: float32 where ``fully_shard`` gathers them in a half type."""
        self.scopes: list[tuple[int, str]] = []
        self.backward_start: int | None = None
        with fakes.fake, self._recording_scopes(), _use_lazy_graph_module(True):  # its code is never run
            tensors = tuple(value for value in fakes.inputs if isinstance(value, Tensor))
            run = lambda p, b, t: self._run_step(p, b, t)  # noqa: E731 - make_fx counts a bound method's self
            self.fx: GraphModule = make_fx(run, _disable_torch_fn_metadata_mode=True)(
                fakes.parameters, fakes.buffers, tensors
            )

    def _run_step(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], tensors: tuple[Tensor, ...]) -> Any:
        """Run the step on proxied tensors: the output in inference, the loss and the parameters' gradients in training."""
        tensor_iterator = iter(tensors)
        inputs = tuple(next(tensor_iterator) if isinstance(value, Tensor) else value for value in self.fakes.inputs)
        with self.fakes.running(parameters, buffers):
            output = self.fakes.output(inputs)
            if self.fakes.mode == "inference":
                return all_tensors(output)
            self.backward_start = _node_count()
            trained = [value for value in parameters.values() if value.requires_grad]
            return output, torch.autograd.grad(output, trained, allow_unused=True)

    @contextmanager
    def _recording_scopes(self) -> Iterator[None]:
        """Append to ``scopes`` the node index and submodule name at each entry into and exit from a submodule."""
        stack: list[str] = [""]
        names = {module: name for name, module in self.fakes.module.named_modules()}

        def enter(module: nn.Module, _args: Any) -> None:
            stack.append(names.get(module, ""))
            self.scopes.append((_node_count(), stack[-1]))

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            stack.pop()
            self.scopes.append((_node_count(), stack[-1]))

        handles = [module.register_forward_pre_hook(enter) for module in names]
        handles += [module.register_forward_hook(leave) for module in names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def _traced_checkpoints(numerics: Numerics, recomputed: list[range]) -> Iterator[None]:
    """Let ``autograd.grad`` recompute checkpointed activations, with the kernels of the device.

    ``recomputed`` gets the node indices of each recomputation; all of these nodes run, read or not. A trace cannot enter
    the reentrant form of checkpoints, which is replaced by the other: the same arithmetic, recomputed in full.
    """
    original_generator = checkpointing._checkpoint_without_reentrant_generator

    def generator_on_device_kernels(
        function: Callable[..., Any], _preserve: bool, *positional: Any, **options: Any
    ) -> Any:
        def recompute(*args: Any, **kwargs: Any) -> Any:
            start = _node_count()
            try:
                with numerics.kernels():
                    return function(*args, **kwargs)
            finally:  # torch ends a recomputation by an exception once all saved tensors are recomputed
                recomputed.append(range(start, _node_count()))

        return original_generator(recompute, False, *positional, **options)  # nothing is drawn in a trace

    def apply_reentrant(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        if not any(isinstance(value, Tensor) and value.requires_grad for value in args):
            with torch.no_grad():  # what the reentrant form makes of such inputs
                return function(*args)
        return checkpointing.checkpoint(function, *args, use_reentrant=False, early_stop=False)

    checkpointing._checkpoint_without_reentrant_generator = generator_on_device_kernels  # type: ignore[assignment]
    checkpointing.CheckpointFunction.apply = staticmethod(apply_reentrant)  # type: ignore[method-assign]
    try:
        yield
    finally:
        checkpointing._checkpoint_without_reentrant_generator = original_generator
        del checkpointing.CheckpointFunction.apply


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed Python's and NumPy's generators alike in every pass: some models skip layers by their draws."""
    python_state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 - the generator that models use
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)  # noqa: NPY002


def _run_guarded(run: Callable[[], Result], step: TrainingStep, mode: Mode) -> Result:
    """Return what ``run`` returns, with warnings and logs silenced; the user's exceptions become one-line InputErrors."""
    try:
        with warnings.catch_warnings(), silent_log():
            warnings.simplefilter("ignore")
            return run()
    except DdlToolError:
        raise
    except Exception as error:  # whatever the user's forward raises is the user's to read, in one line
        if collective := _failed_collective(error):
            problem = (
                f"{mode} step calls {collective} of torch.distributed, and what a step sends itself is not modelled"
            )
            remedy = "plan takes such a group's step as measured or given (group: in job.yaml)"
            raise InputError(step.name, problem, remedy) from error
        text = one_line(f"{type(error).__name__}: {error}")[:300]
        remedy = "it must run eagerly on its example inputs, with shapes that do not depend on the data"
        raise InputError(step.name, f"{mode} step cannot be traced ({text})", remedy) from error


def _failed_collective(error: Exception) -> str:
    """Return the name of the torch.distributed function that raised, "" for an error from elsewhere."""
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    inside = (frame for frame in frames if str(frame.f_globals.get("__name__")).startswith("torch.distributed"))
    return next((frame.f_code.co_name for frame in inside if frame.f_code.co_name != "wrapper"), "")


@contextmanager
def silent_log() -> Iterator[None]:
    """Keep torch from logging stacks of errors that are reported in one line or lead to another attempt."""
    disabled_level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled_level)


def _fake(value: Tensor) -> Tensor:
    """Return an empty fake CPU tensor of the same shape, strides and type (call under the fake mode)."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")


def _node_count() -> int:
    """Return how many nodes the running trace has, 0 outside a trace."""
    mode = get_proxy_mode()
    return len(mode.tracer.graph.nodes) if mode is not None else 0


def _to_graph(trace: _RecordedStep, step: TrainingStep, again: Callable[[int], TracedStep]) -> TracedStep:
    """Return the traced step: recv ops of the parameters, compute ops, and in training send ops of the gradients."""
    mode, numerics = trace.fakes.mode, trace.fakes.numerics
    nodes = list(trace.fx.graph.nodes)
    phases = _phases(trace, nodes)
    recomputed_nodes = {nodes[index] for node_range in trace.fakes.recomputed for index in node_range}
    trace.fx.graph.eliminate_dead_code(lambda node: node in recomputed_nodes or node.is_impure())
    kept = set(trace.fx.graph.nodes)
    nodes = [node for node in nodes if node in kept]
    placeholders = [node for node in nodes if node.op == "placeholder"]
    producer: dict[Node, str | None] = dict.fromkeys(placeholders)
    ops: list[Op] = []
    for node, (name, value) in zip(placeholders, trace.kept.items(), strict=False):
        size = float(value.numel() * value.element_size())
        producer[node] = f"recv/{name}"
        ops.append(Op(name=f"recv/{name}", kind="recv", resource="channel:0", size_bytes=size, parameter=name))
    calls: dict[str, Node] = {}
    distinct: dict[Issued, int] = {}
    call_indices: dict[str, int] = {}
    call_nodes = [node for node in nodes if node.op == "call_function"]
    ops += compute_ops(call_nodes, producer, phases, calls, distinct, call_indices)
    note = step.note
    if mode == "training":
        sends = _send_ops(trace, nodes[-1], producer)
        sent = {send.parameter for send in sends}
        without_gradient = [
            name
            for node, (name, value) in zip(placeholders, trace.parameters.items(), strict=False)
            if value.requires_grad and node.users and name not in sent
        ]
        if without_gradient:
            modules = module_names(without_gradient)
            note = joined(note, f"{len(without_gradient)} trained parameters are read and get no gradient: {modules}")
        ops += sends
    dtypes = [str(value.dtype).removeprefix("torch.") for value in trace.kept.values()]
    meta: dict[str, str | int | float | bool | None] = {
        "framework": "torch",
        "dtype": max(set(dtypes), key=dtypes.count) if dtypes else "float32",
        "parameter_elements": sum(value.numel() for value in trace.parameters.values()),
        "precision": numerics.precision,
        "channels_last": numerics.channels_last,
    }
    if note:
        meta["note"] = note
    token_inputs = [
        value
        for value in step.inputs
        if isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point()
    ]
    if token_inputs:
        meta["tokens_per_sample"] = int(token_inputs[0].shape[1])
    batch_dimension = step.batch_dimension
    batched = [value for value in step.inputs if isinstance(value, Tensor) and value.dim() > batch_dimension]
    batch = int(batched[0].shape[batch_dimension]) if batched else 0
    graph = Graph.from_ops(step.name, mode, ops, batch_size=batch or None, meta=meta, where=step.name)
    return TracedStep(graph=graph, fx=trace.fx, nodes=calls, issued=tuple(distinct), calls=call_indices, again=again)


def _phases(trace: _RecordedStep, nodes: list[Node]) -> dict[Node, str]:
    """Return ``forward/SCOPE`` or ``backward`` for every node, from the node indices recorded while tracing."""
    scopes = iter([*trace.scopes, (len(nodes) + 1, "")])
    scope, next_scope = "", next(scopes)  # next_scope: the node index at which it begins, and its name
    phases: dict[Node, str] = {}
    for position, node in enumerate(nodes):
        while next_scope[0] <= position:
            scope = next_scope[1]
            next_scope = next(scopes, (len(nodes) + 1, ""))
        if trace.backward_start is not None and position >= trace.backward_start:
            phases[node] = "backward"
        else:
            phases[node] = f"forward/{scope}" if scope else "forward"
    return phases


def compute_ops(
    calls: list[Node],
    producer: dict[Node, str | None],
    phases: dict[Node, str],
    node_of_op: dict[str, Node],
    distinct: dict[Issued, int],
    call_indices: dict[str, int],
) -> list[Op]:
    """Return one compute op per call, and fill the four mappings.

    Args:
        producer: gets the op that makes each node's value, None for a value without op (an input or a buffer).
        node_of_op: gets the call of each op, by op name.
        distinct: gets the index of each distinct call.
        call_indices: gets the index in ``distinct`` of each op, by op name.
    """
    ops: list[Op] = []
    costs: list[Cost] = []
    last_writer: dict[int, str] = {}  # the last op that wrote in place, by storage
    for node in calls:
        if base_name(node.target) == "getitem":
            producer[node] = producer.get(node.args[0]) if isinstance(node.args[0], Node) else None
            continue
        name = f"{phases[node]}/{node.name}"
        input_ops = (producer.get(source) for source in node.all_input_nodes)
        inputs = dict.fromkeys(op for op in input_ops if op is not None)
        for source in node.all_input_nodes:
            writer_op = last_writer.get(_storage(source))
            if writer_op is not None:
                inputs.setdefault(writer_op)
        for storage in _written_storages(node):
            last_writer[storage] = name
        call = issued(node)
        call_indices[name] = distinct.setdefault(call, len(costs))
        if call_indices[name] == len(costs):
            costs.append(cost_of(call))
        cost = costs[call_indices[name]]
        producer[node] = name
        node_of_op[name] = node
        ops.append(
            Op(
                name=name,
                kind="compute",
                flops=cost.flops,
                size_bytes=cost.size_bytes,
                inputs=tuple(inputs),
                op_type=f"aten.{base_name(node.target)}",
                estimate=cost.estimate,
                written_bytes=cost.written_bytes,
                dtype=cost.dtype,
                gemm=cost.gemm,
            )
        )
    return ops


def _storage(node: Node) -> int:
    """Return the identity of the storage behind a node's tensor, 0 for a node that is no single strided tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) and value.layout == torch.strided else 0


def _written_storages(node: Node) -> list[int]:
    """Return the storages that an op writes to in place, by its schema."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return []
    storages = []
    for argument, value in zip(target._schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written = value if isinstance(value, (list, tuple)) else [value]
            storages += [_storage(source) for source in written if isinstance(source, Node)]
    return [storage for storage in storages if storage]


def _send_ops(trace: _RecordedStep, output: Node, producer: dict[Node, str | None]) -> list[Op]:
    """Return one send leaf per parameter that gets a gradient. ``output``: the trace's output node."""
    returned = output.args[0]
    gradients = list(returned[1:]) if isinstance(returned, (list, tuple)) else []
    if len(gradients) == 1 and isinstance(gradients[0], (list, tuple)):
        gradients = list(gradients[0])
    trained = [name for name, value in trace.parameters.items() if value.requires_grad]
    ops: list[Op] = []
    for name, gradient in zip(trained, gradients, strict=True):
        producer_op = producer.get(gradient) if isinstance(gradient, Node) else None
        if producer_op is None:
            continue  # the loss does not depend on this parameter: nothing leaves
        size = float(trace.kept[name].numel() * trace.kept[name].element_size())
        ops.append(
            Op(
                name=f"send/{name}",
                kind="send",
                resource="channel:0",
                size_bytes=size,
                parameter=name,
                inputs=(producer_op,),
            )
        )
    return ops
