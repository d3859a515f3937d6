"""From a torch module to a Graph: one flat trace of the step on fake tensors, no weights allocated.

The module is built on the ``meta`` device; its parameters, buffers and inputs become fake CPU tensors, and ``make_fx``
records every aten op of the step: forward for inference; forward, loss and backward for training. This is the only
module that touches torch's unstable tracing interfaces; a change there shows here and in the fixture graphs' tests.

Every parameter is a recv root, every gradient a send leaf. Buffers, inputs and targets are on the worker already and
are no ops. Tuple indexing is folded into its producer. Writes through views are followed by storage, so that an op
that reads what an in-place op wrote depends on it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from ddltool.analyzers.tracing.dialect import Numerics
from ddltool.analyzers.tracing.step import TrainingStep, with_batch_size
from ddltool.analyzers.tracing.torch_costs import Scale, base_name, cost_of, prime_batch
from ddltool.errors import DdlToolError, InputError, one_line
from ddltool.graph import Graph, Mode, Op

_META_REFUSALS = (NotImplementedError, RuntimeError, TypeError)


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedStep:
    """A step's graph beside the fx graph that it was read from."""

    graph: Graph
    fx: GraphModule
    """Placeholders in the order parameters, buffers, tensor inputs; ``node.meta["val"]`` holds fake CPU tensors."""
    nodes: Mapping[str, Node]
    """The call that each compute op of ``graph`` stands for, by op name, in program order."""

    def at(self, batch_size: int) -> Graph:
        """Return the graph at another batch size, its work counted again from the same trace; see :class:`Scale`.

        Exact where the traced batch size is a prime of :func:`trace_any_batch`'s choice. O(ops).
        """
        graph = self.graph
        if batch_size == graph.batch_size or graph.batch_size is None:
            return graph
        scale = Scale(graph.batch_size, batch_size)
        work = np.stack([graph.flops, graph.size_bytes, graph.written_bytes])
        gemm = graph.gemm.copy()
        for position, name in enumerate(graph.names):
            if name in self.nodes:
                cost = cost_of(self.nodes[name], scale)
                work[:, position] = cost.flops, cost.size_bytes, cost.written_bytes
                gemm[position] = cost.gemm
        return replace(
            graph, flops=work[0], size_bytes=work[1], written_bytes=work[2], gemm=gemm, batch_size=batch_size
        )


AS_DEFAULT = Numerics()


def trace_torch(
    build: Callable[[], TrainingStep], *, mode: Mode, batch_size: int | None = None, numerics: Numerics = AS_DEFAULT
) -> Graph:
    """Return the graph of one step of the module that ``build`` makes.

    ``build`` is called under the ``meta`` device, so that weights take no memory; a module that cannot be built there
    is built on the CPU instead. ``batch_size`` replaces dimension 0 of the example inputs. Durations are None; flops,
    bytes and where they come from are set.

    Raises InputError when the module does not run on its example inputs or depends on its data.
    """
    return trace_step(build, mode=mode, batch_size=batch_size, numerics=numerics).graph


def trace_step(
    build: Callable[[], TrainingStep], *, mode: Mode, batch_size: int | None = None, numerics: Numerics = AS_DEFAULT
) -> TracedStep:
    """Return what :func:`trace_torch` returns, with the fx graph beside it. Raises as it does."""
    step = _build(build)
    return _trace_built(replace(step, inputs=with_batch_size(step.inputs, batch_size)), mode, numerics)


def trace_any_batch(build: Callable[[], TrainingStep], *, mode: Mode, numerics: Numerics = AS_DEFAULT) -> TracedStep:
    """Return a trace whose ``at`` knows the work at any batch size, traced at a prime that divides nothing else.

    A module that takes no such batch (one that halves it, say) is traced at a multiple of the prime. Raises InputError
    as :func:`trace_torch` does.
    """
    step = _build(build)
    tensors = [*step.module.parameters(), *step.module.buffers()]
    sizes = [size for tensor in tensors for size in tensor.shape]
    sizes += [size for value in step.inputs if isinstance(value, Tensor) for size in value.shape[1:]]
    prime = prime_batch(sizes)
    try:
        return _trace_built(replace(step, inputs=with_batch_size(step.inputs, prime)), mode, numerics)
    except InputError:
        multiple = replace(step, inputs=with_batch_size(step.inputs, 8 * prime))
        return _trace_built(multiple, mode, numerics)


def _trace_built(step: TrainingStep, mode: Mode, numerics: Numerics) -> TracedStep:
    step = replace(step, module=step.module.train(mode == "training"))
    if mode == "training" and not any(value.requires_grad for value in step.module.parameters()):
        raise InputError(step.name, "has no parameter that is trained", "trace it with --mode inference")
    return _to_graph(_trace(step, mode, numerics), step, mode, numerics)


def _build(build: Callable[[], TrainingStep]) -> TrainingStep:
    try:
        with torch.device("meta"):
            return build()
    except DdlToolError:
        raise
    except _META_REFUSALS:  # some modules compute on their weights while they are built; those need real ones
        return build()


class _Trace:
    """A recorded step: the fx graph, its parameters in placeholder order, and where each node was issued."""

    def __init__(self, step: TrainingStep, mode: Mode, numerics: Numerics) -> None:
        self.module = step.module
        self.mode = mode
        self.numerics = numerics
        self.loss = step.loss
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake:
            self.parameters = {
                name: numerics.cast(_fake(value)).requires_grad_(value.requires_grad)
                for name, value in self.module.named_parameters()
            }
            self.buffers = {name: numerics.cast(_fake(value)) for name, value in self.module.named_buffers()}
            self.inputs = tuple(
                numerics.cast(_fake(value)) if isinstance(value, Tensor) else value for value in step.inputs
            )
        self.scopes: list[tuple[int, str]] = []
        self.backward_start: int | None = None
        with fake, self._scoped():
            tensors = tuple(value for value in self.inputs if isinstance(value, Tensor))
            run = lambda p, b, t: self._run(p, b, t)  # noqa: E731 - make_fx counts a bound method's self
            self.fx: GraphModule = make_fx(run, tracing_mode="real")(self.parameters, self.buffers, tensors)

    def _run(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], tensors: tuple[Tensor, ...]) -> Any:
        stream = iter(tensors)
        inputs = tuple(next(stream) if isinstance(value, Tensor) else value for value in self.inputs)
        with torch.set_grad_enabled(self.mode == "training"):
            with self.numerics.running():
                output = functional_call(self.module, (parameters, buffers), inputs)
                if self.mode == "inference":
                    return _flatten(output)
                loss = self.loss(output)
            self.backward_start = _position()
            wanted = [value for value in parameters.values() if value.requires_grad]
            return loss, torch.autograd.grad(loss, wanted, allow_unused=True)

    @contextmanager
    def _scoped(self) -> Iterator[None]:
        """Record at which node each submodule is entered and left."""
        stack: list[str] = [""]
        names = {module: name for name, module in self.module.named_modules()}

        def enter(module: nn.Module, _args: Any) -> None:
            stack.append(names.get(module, ""))
            self.scopes.append((_position(), stack[-1]))

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            stack.pop()
            self.scopes.append((_position(), stack[-1]))

        handles = [module.register_forward_pre_hook(enter) for module in names]
        handles += [module.register_forward_hook(leave) for module in names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _trace(step: TrainingStep, mode: Mode, numerics: Numerics) -> _Trace:
    try:
        with warnings.catch_warnings(), silent_log():
            warnings.simplefilter("ignore")
            return _Trace(step, mode, numerics)
    except DdlToolError:
        raise
    except Exception as error:  # whatever the user's forward raises is the user's to read, in one line
        text = one_line(f"{type(error).__name__}: {error}")[:300]
        remedy = "it must run eagerly on its example inputs, with shapes that do not depend on the data"
        raise InputError(step.name, f"{mode} step cannot be traced ({text})", remedy) from error


@contextmanager
def silent_log() -> Iterator[None]:
    """Keep torch from logging the stack of an error that is told in one line, or only means to try something else."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def _fake(value: Tensor) -> Tensor:
    """Return an empty fake CPU tensor of the same shape, strides and type (call under the fake mode)."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")


def _position() -> int:
    """Return how many nodes the running trace has so far."""
    mode = get_proxy_mode()
    return len(mode.tracer.graph.nodes) if mode is not None else 0


def _flatten(output: Any) -> list[Tensor]:
    """Return every tensor in an output, so that make_fx can return it."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def _to_graph(trace: _Trace, step: TrainingStep, mode: Mode, numerics: Numerics) -> TracedStep:
    nodes = list(trace.fx.graph.nodes)
    phase = _phases(trace, nodes)
    trace.fx.graph.eliminate_dead_code()
    kept = set(trace.fx.graph.nodes)
    nodes = [node for node in nodes if node in kept]
    placeholders = [node for node in nodes if node.op == "placeholder"]
    producer: dict[Node, str | None] = dict.fromkeys(placeholders)
    ops: list[Op] = []
    for node, (name, value) in zip(placeholders, trace.parameters.items(), strict=False):
        size = float(value.numel() * value.element_size())
        producer[node] = f"recv/{name}"
        ops.append(Op(name=f"recv/{name}", kind="recv", resource="channel:0", size_bytes=size, parameter=name))
    calls: dict[str, Node] = {}
    ops += _compute_ops([node for node in nodes if node.op == "call_function"], producer, phase, calls)
    if mode == "training":
        ops += _send_ops(trace, nodes[-1], producer)
    dtypes = [str(value.dtype).removeprefix("torch.") for value in trace.parameters.values()]
    meta: dict[str, str | int | float | bool | None] = {
        "framework": "torch",
        "dtype": max(set(dtypes), key=dtypes.count) if dtypes else "float32",
        "parameter_elements": sum(value.numel() for value in trace.parameters.values()),
        "precision": numerics.precision,
        "channels_last": numerics.channels_last,
    }
    if step.note:
        meta["note"] = step.note
    read = [
        value
        for value in step.inputs
        if isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point()
    ]
    if read:
        meta["tokens_per_sample"] = int(read[0].shape[1])
    first = next((value for value in step.inputs if isinstance(value, Tensor) and value.dim() > 0), None)
    batch = int(first.shape[0]) if first is not None else 0
    graph = Graph.from_ops(step.name, mode, ops, batch_size=batch or None, meta=meta, where=step.name)
    return TracedStep(graph=graph, fx=trace.fx, nodes=calls)


def _phases(trace: _Trace, nodes: list[Node]) -> dict[Node, str]:
    """Return ``forward/SCOPE`` or ``backward`` for every node, from the positions recorded while tracing."""
    scopes = iter([*trace.scopes, (len(nodes) + 1, "")])
    current, upcoming = "", next(scopes)
    found: dict[Node, str] = {}
    for position, node in enumerate(nodes):
        while upcoming[0] <= position:
            current = upcoming[1]
            upcoming = next(scopes, (len(nodes) + 1, ""))
        if trace.backward_start is not None and position >= trace.backward_start:
            found[node] = "backward"
        else:
            found[node] = f"forward/{current}" if current else "forward"
    return found


def _compute_ops(
    calls: list[Node], producer: dict[Node, str | None], phase: dict[Node, str], made_by: dict[str, Node]
) -> list[Op]:
    """Return one compute op per call; ``producer`` gets the op that makes each node's value, ``made_by`` each op's call."""
    ops: list[Op] = []
    writer: dict[int, str] = {}
    for node in calls:
        if base_name(node.target) == "getitem":
            producer[node] = producer.get(node.args[0]) if isinstance(node.args[0], Node) else None
            continue
        name = f"{phase[node]}/{node.name}"
        inputs = dict.fromkeys(made for source in node.all_input_nodes if (made := producer.get(source)) is not None)
        for source in node.all_input_nodes:
            written = writer.get(_storage(source))
            if written is not None:
                inputs.setdefault(written)
        for storage in _written_storages(node):
            writer[storage] = name
        cost = cost_of(node)
        producer[node] = name
        made_by[name] = node
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
    """Return an identity of the storage that a node's tensor looks at, 0 when it is no single tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else 0


def _written_storages(node: Node) -> list[int]:
    """Return the storages that an op writes to in place, by its schema."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return []
    written = []
    for argument, value in zip(target._schema.arguments, node.args, strict=False):
        alias = argument.alias_info
        if alias is not None and alias.is_write and isinstance(value, Node):
            written.append(_storage(value))
    return [storage for storage in written if storage]


def _send_ops(trace: _Trace, output: Node, producer: dict[Node, str | None]) -> list[Op]:
    """Return one send leaf per parameter that gets a gradient."""
    returned = output.args[0]
    gradients = list(returned[1:]) if isinstance(returned, (list, tuple)) else []
    if len(gradients) == 1 and isinstance(gradients[0], (list, tuple)):
        gradients = list(gradients[0])
    wanted = [(name, value) for name, value in trace.parameters.items() if value.requires_grad]
    ops: list[Op] = []
    for (name, value), gradient in zip(wanted, gradients, strict=True):
        made = producer.get(gradient) if isinstance(gradient, Node) else None
        if made is None:
            continue  # the loss does not depend on this parameter: nothing leaves
        size = float(value.numel() * value.element_size())
        ops.append(
            Op(name=f"send/{name}", kind="send", resource="channel:0", size_bytes=size, parameter=name, inputs=(made,))
        )
    return ops
