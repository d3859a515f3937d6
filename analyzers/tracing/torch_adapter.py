"""From a torch module to a Graph: one flat trace of the step on fake tensors, no weights allocated.

The module is built on the ``meta`` device; its parameters, buffers and inputs become fake CPU tensors, and ``make_fx``
records every aten op of the step: forward for inference; forward, loss and backward for training. This is the only
module that touches torch's unstable tracing interfaces; a change there shows here and in the fixture graphs' tests.

The trace holds one batch size. :func:`trace_any_batch` gives every other from it where a step's tensors show that its work
is a function of the batch, and traces once more where they do not.

Every parameter is a recv root, every gradient a send leaf. Buffers, inputs and targets are on the worker already and
are no ops. Tuple indexing is folded into its producer. Writes through views are followed by storage, so that an op
that reads what an in-place op wrote depends on it.
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

from ddltool.analyzers.tracing.dialect import Numerics
from ddltool.analyzers.tracing.op_rules import Cost
from ddltool.analyzers.tracing.step import TrainingStep, all_tensors
from ddltool.analyzers.tracing.torch_costs import Issued, Scale, base_name, cost_of, issued, prime_batch, tensors_of
from ddltool.errors import DdlToolError, InputError, one_line
from ddltool.graph import Graph, Mode, Op

_META_REFUSALS = (NotImplementedError, RuntimeError, TypeError)
# Forward passes are compared at a small batch and at a large one. Some models take no batch that is not a multiple of a
# small number.
_SMALL, _LARGE, _MULTIPLE = 3, 256, 8
_HIGHEST_POWER = 3  # of the batch in a size: losses over all pairs have 2
# Ops of a step that loops over its samples grow without end; more than these are not traced.
_MOST_OPS = 10_000
_MODULES_SHOWN = 3
# What an op of a forward pass makes: its name, and of every tensor the dimensions with the stored elements, and the type.
Made = tuple[Any, tuple[tuple[int, ...], ...], tuple[torch.dtype, ...]]


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedStep:
    """A step's graph beside the fx graph that it was read from."""

    graph: Graph
    fx: GraphModule
    """Placeholders in the order parameters, buffers, tensor inputs; ``node.meta["val"]`` holds fake CPU tensors."""
    nodes: Mapping[str, Node]
    """The call that each compute op of ``graph`` stands for, by op name, in program order."""
    issued: Sequence[Issued]
    """The distinct calls."""
    calls: Mapping[str, int]
    """Which of ``issued`` each compute op is, by name."""
    again: Callable[[int], TracedStep]
    """Traces the step at another batch size."""
    sizes: frozenset[int] = frozenset()
    """What has to be whole at another batch size, where a step takes no batch of any size."""
    prime: int | None = None
    """What all dimensions that grow with the batch are multiples of, and no others; None: its work is no such function
    of the batch, and every batch size is traced."""
    largest: int | None = None
    """The largest batch size that is traced, where a step issues more ops for more samples."""
    _known: dict[int, TracedStep] = field(default_factory=dict)

    def at(self, batch_size: int) -> Graph:
        """Return the graph at another batch size: its work counted again from the same trace, or a trace of its own.

        O(distinct calls). Raises InputError where it has to be traced and does not run at this size.
        """
        graph = self.graph
        if batch_size == graph.batch_size or graph.batch_size is None:
            return graph
        scale = self.scale(batch_size)
        if scale is None or not all(scale.is_whole(size) for size in self.sizes):
            return self.traced_at(batch_size).graph
        work = np.stack([graph.flops, graph.size_bytes, graph.written_bytes])
        gemm = graph.gemm.copy()
        costs = [cost_of(call, scale) for call in self.issued]
        table = np.array([(it.flops, it.size_bytes, it.written_bytes, *it.gemm) for it in costs]).reshape(-1, 7)
        place, which = self._issues
        work[:, place], gemm[place] = table[which, :3].T, table[which, 3:]
        return replace(
            graph, flops=work[0], size_bytes=work[1], written_bytes=work[2], gemm=gemm, batch_size=batch_size
        )

    @cached_property
    def _issues(self) -> tuple[list[int], list[int]]:
        """Return the places of the graph's compute ops, and which of ``issued`` each is."""
        found = [(place, self.calls[name]) for place, name in enumerate(self.graph.names) if name in self.calls]
        return [place for place, _ in found], [which for _, which in found]

    def scale(self, batch_size: int) -> Scale | None:
        """Return how sizes of the trace become those at another batch size; None where that has to be traced."""
        own = self.graph.batch_size
        return Scale(own, batch_size, self.prime) if own is not None and self.prime is not None else None

    def traced_at(self, batch_size: int) -> TracedStep:
        """Return the step traced at a batch size; each is traced once. Raises InputError where it does not run."""
        if batch_size == self.graph.batch_size:
            return self
        if self.largest is not None and batch_size > self.largest:
            problem = f"loops over its samples, too many ops to trace at batch size {batch_size}"
            raise InputError(self.graph.name, problem, f"ask for at most {self.largest}")
        if batch_size not in self._known:
            self._known[batch_size] = self.again(batch_size)
        return self._known[batch_size]


AS_DEFAULT = Numerics()
Result = TypeVar("Result")


def trace_torch(
    build: Callable[[], TrainingStep], *, mode: Mode, batch_size: int | None = None, numerics: Numerics = AS_DEFAULT
) -> Graph:
    """Return the graph of one step of the module that ``build`` makes.

    ``build`` is called under the ``meta`` device, so that weights take no memory; a module that cannot be built there
    is built on the CPU instead. ``batch_size`` replaces the batch of the example inputs. Durations are None; flops,
    bytes and where they come from are set.

    Raises InputError when the module does not run on its example inputs or depends on its data.
    """
    return trace_step(build, mode=mode, batch_size=batch_size, numerics=numerics).graph


def trace_step(
    build: Callable[[], TrainingStep], *, mode: Mode, batch_size: int | None = None, numerics: Numerics = AS_DEFAULT
) -> TracedStep:
    """Return what :func:`trace_torch` returns, with the fx graph beside it. Raises as it does."""
    return _trace_at(_build(build, mode), batch_size, mode, numerics)


def trace_any_batch(build: Callable[[], TrainingStep], *, mode: Mode, numerics: Numerics = AS_DEFAULT) -> TracedStep:
    """Return a trace whose ``at`` knows the work at any batch size.

    It is traced at a prime that divides nothing else, so that a dimension tells whether it grows with the batch. Whether
    it does so in proportion, for a model may halve its batch, loop over it or ask how large it is, the forward pass
    tells at two other batch sizes, one odd and small and one large: the same ops must make the same sizes, or sizes in
    the ratio of the batches. What fails this is traced at every batch size asked for. A module that takes no odd batch
    (one that halves it, say) is traced at a multiple of the prime. Raises InputError as :func:`trace_torch` does.
    """
    step = _build(build, mode)
    small, few = _SMALL, _forward(step, _SMALL, mode, numerics)
    if few is None:
        small, few = _MULTIPLE, _forward(step, _MULTIPLE, mode, numerics)
    tensors = [*step.module.parameters(), *step.module.buffers()]
    prime = prime_batch([*(size for tensor in tensors for size in tensor.shape), *_sizes(few or ())])
    own = prime if small == _SMALL else _MULTIPLE * prime
    traced = _trace_at(step, own, mode, numerics)
    if traced.graph.batch_size is None or few is None:
        return traced
    large, many = _LARGE, _forward(step, _LARGE, mode, numerics)
    if many is None or (_beyond_32_bits(many) and not _in_proportion(few, many, small, large)):
        # Sizes that no 32-bit index reaches have ops of their own; the traced batch tells then.
        large, many = own, _forward(step, own, mode, numerics)
    if _in_proportion(few, many or [], small, large):
        made = () if own == prime else _forward(step, own, mode, numerics)
        return replace(traced, prime=prime, sizes=_sizes(made or ()))
    note = "its work does not grow in proportion with the batch: traced at every batch size"
    graph = replace(traced.graph, meta={**traced.graph.meta, "note": joined(traced.graph.meta.get("note"), note)})
    growth = (len(many or few) - len(few)) / (large - small)
    largest = max(own, 2 ** int(np.log2(_MOST_OPS / growth))) if growth > 0 else None
    return replace(traced, graph=graph, largest=largest)


def joined(*notes: object) -> str:
    """Return remarks as one."""
    return "; ".join(str(note) for note in notes if note)


def module_names(parameters: Sequence[str]) -> str:
    """Return the modules that parameters belong to, without numbers, the first three by name."""

    def module(parameter: str) -> str:
        parts = [part for part in parameter.split(".")[:-1] if not part.isdigit()]
        return ".".join(parts[:3]) or parameter

    names = list(dict.fromkeys(module(parameter) for parameter in parameters))
    more = len(names) - _MODULES_SHOWN
    return ", ".join(names[:_MODULES_SHOWN]) + (f", +{more}" if more > 0 else "")


def _sizes(made: Sequence[Made]) -> frozenset[int]:
    return frozenset(size for _, shapes, _ in made for shape in shapes for size in shape)


def _beyond_32_bits(made: Sequence[Made]) -> bool:
    return any(math.prod(shape) >= 2**31 for _, shapes, _ in made for shape in shapes)


def _in_proportion(few: Sequence[Made], many: Sequence[Made], small: int, large: int) -> bool:
    """Return whether two forward passes are the same ops on sizes that are equal, or in the ratio of a power of the batch."""

    def alike(size: int, other: int) -> bool:
        return any(size * large**power == other * small**power for power in range(_HIGHEST_POWER + 1))

    def sizes(shapes: tuple[tuple[int, ...], ...]) -> Iterator[int]:
        return (size for shape in shapes for size in shape)

    return len(few) == len(many) and all(
        (one[0], one[2], [*map(len, one[1])]) == (two[0], two[2], [*map(len, two[1])])
        and all(alike(*pair) for pair in zip(sizes(one[1]), sizes(two[1]), strict=True))
        for one, two in zip(few, many, strict=True)
    )


def _forward(step: TrainingStep, batch_size: int, mode: Mode, numerics: Numerics) -> list[Made] | None:
    """Return what the ops of the forward pass and of the loss make at a batch size, None where it does not run."""
    try:
        return _guarded(lambda: _Fakes(step.at_batch(batch_size), mode, numerics).forward(), step, mode)
    except InputError:
        return None


def _trace_at(step: TrainingStep, batch_size: int | None, mode: Mode, numerics: Numerics) -> TracedStep:
    sized = step.at_batch(batch_size)
    trace = _guarded(lambda: _Trace(_Fakes(sized, mode, numerics)), step, mode)

    def again(size: int) -> TracedStep:
        try:
            return _trace_at(step, size, mode, numerics)
        except InputError as error:
            raise InputError(f"{error.where} at batch size {size}", error.problem, error.remedy) from error

    return _to_graph(trace, sized, again)


def _build(build: Callable[[], TrainingStep], mode: Mode) -> TrainingStep:
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
    """A step on fake tensors: its parameters in placeholder order, buffers and inputs, and how it runs."""

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
            self.buffers = {name: numerics.cast(_fake(value)) for name, value in self.module.named_buffers()}
            self.inputs = tuple(
                numerics.cast(_fake(value)) if isinstance(value, Tensor) else value for value in step.inputs
            )

    @contextmanager
    def running(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> Iterator[None]:
        """Give the module these tensors, also to what its backward pass computes again, and let chance fall alike."""
        with (
            torch.set_grad_enabled(self.mode == "training"),
            _checkpoints(self.numerics, self.recomputed),
            _seeded(),
            _reparametrize_module(self.module, {**parameters, **buffers}, tie_weights=True),
        ):
            yield

    def output(self, inputs: tuple[Any, ...]) -> Any:
        """Return the loss, for inference the module's output."""
        with self.numerics.running():
            output = self.module(*inputs)
            return self.loss(output) if self.mode == "training" else output

    def forward(self) -> list[Made]:
        """Return what the ops of the forward pass and of the loss make."""
        record = _Record()
        with self.fake, self.running(self.parameters, self.buffers), record:
            self.output(self.inputs)
        return record.made


class _Record(TorchDispatchMode):
    """Notes which ops run and the sizes of what they make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[Made] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one op and note what it makes."""
        outcome = func(*args, **(kwargs or {}))
        tensors = tensors_of(outcome)
        shapes = tuple((*each.shape, each.untyped_storage().nbytes() // each.element_size()) for each in tensors)
        self.made.append((func, shapes, tuple(each.dtype for each in tensors)))
        return outcome


class _Trace:
    """A recorded step: the fx graph, and where each node was issued."""

    def __init__(self, fakes: _Fakes) -> None:
        self.fakes = fakes
        self.parameters = fakes.parameters
        self.scopes: list[tuple[int, str]] = []
        self.backward_start: int | None = None
        with fakes.fake, self._scoped(), _use_lazy_graph_module(True):  # its code is never run
            tensors = tuple(value for value in fakes.inputs if isinstance(value, Tensor))
            run = lambda p, b, t: self._run(p, b, t)  # noqa: E731 - make_fx counts a bound method's self
            self.fx: GraphModule = make_fx(run, _disable_torch_fn_metadata_mode=True)(
                fakes.parameters, fakes.buffers, tensors
            )

    def _run(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], tensors: tuple[Tensor, ...]) -> Any:
        stream = iter(tensors)
        inputs = tuple(next(stream) if isinstance(value, Tensor) else value for value in self.fakes.inputs)
        with self.fakes.running(parameters, buffers):
            output = self.fakes.output(inputs)
            if self.fakes.mode == "inference":
                return all_tensors(output)
            self.backward_start = _position()
            wanted = [value for value in parameters.values() if value.requires_grad]
            return output, torch.autograd.grad(output, wanted, allow_unused=True)

    @contextmanager
    def _scoped(self) -> Iterator[None]:
        """Record at which node each submodule is entered and left."""
        stack: list[str] = [""]
        names = {module: name for name, module in self.fakes.module.named_modules()}

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


@contextmanager
def _checkpoints(numerics: Numerics, recomputed: list[range]) -> Iterator[None]:
    """Let checkpointed activations be computed again inside ``autograd.grad``, by the kernels of the device.

    ``recomputed`` gets the places of their nodes, all of which run, whether something reads them or not.
    It cannot enter the reentrant form, which is run as the other one: the same arithmetic, all of it done again.
    """
    make = checkpointing._checkpoint_without_reentrant_generator

    def in_dialect(function: Callable[..., Any], _preserve: bool, *rest: Any, **options: Any) -> Any:
        def computed_again(*args: Any, **kwargs: Any) -> Any:
            start = _position()
            try:
                with numerics.kernels():
                    return function(*args, **kwargs)
            finally:  # it is left by an exception once all that was saved is there again
                recomputed.append(range(start, _position()))

        return make(computed_again, False, *rest, **options)  # nothing is drawn in a trace

    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        if not any(isinstance(value, Tensor) and value.requires_grad for value in args):
            with torch.no_grad():  # what the reentrant form makes of such inputs
                return function(*args)
        return checkpointing.checkpoint(function, *args, use_reentrant=False, early_stop=False)

    checkpointing._checkpoint_without_reentrant_generator = in_dialect  # type: ignore[assignment]
    checkpointing.CheckpointFunction.apply = staticmethod(apply)  # type: ignore[method-assign]
    try:
        yield
    finally:
        checkpointing._checkpoint_without_reentrant_generator = make
        del checkpointing.CheckpointFunction.apply


@contextmanager
def _seeded() -> Iterator[None]:
    """Let Python's and NumPy's generators, by which some models skip layers, draw the same in every pass."""
    before, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002 - the generator that models use
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpys)  # noqa: NPY002


def _guarded(run: Callable[[], Result], step: TrainingStep, mode: Mode) -> Result:
    try:
        with warnings.catch_warnings(), silent_log():
            warnings.simplefilter("ignore")
            return run()
    except DdlToolError:
        raise
    except Exception as error:  # whatever the user's forward raises is the user's to read, in one line
        if collective := _collective(error):
            problem = (
                f"{mode} step calls {collective} of torch.distributed, and what a step sends itself is not modelled"
            )
            remedy = "plan takes such a group's step as measured or given (group: in job.yaml)"
            raise InputError(step.name, problem, remedy) from error
        text = one_line(f"{type(error).__name__}: {error}")[:300]
        remedy = "it must run eagerly on its example inputs, with shapes that do not depend on the data"
        raise InputError(step.name, f"{mode} step cannot be traced ({text})", remedy) from error


def _collective(error: Exception) -> str:
    """Return the function of torch.distributed in which a forward pass failed; "" where it did not there."""
    frames = (frame for frame, _ in walk_tb(error.__traceback__))
    inside = (frame for frame in frames if str(frame.f_globals.get("__name__")).startswith("torch.distributed"))
    return next((frame.f_code.co_name for frame in inside if frame.f_code.co_name != "wrapper"), "")


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


def _to_graph(trace: _Trace, step: TrainingStep, again: Callable[[int], TracedStep]) -> TracedStep:
    mode, numerics = trace.fakes.mode, trace.fakes.numerics
    nodes = list(trace.fx.graph.nodes)
    phase = _phases(trace, nodes)
    kept_all = {nodes[place] for places in trace.fakes.recomputed for place in places}
    trace.fx.graph.eliminate_dead_code(lambda node: node in kept_all or node.is_impure())
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
    distinct: dict[Issued, int] = {}
    which: dict[str, int] = {}
    ops += _compute_ops([node for node in nodes if node.op == "call_function"], producer, phase, calls, distinct, which)
    note = step.note
    if mode == "training":
        sends = _send_ops(trace, nodes[-1], producer)
        sent = {send.parameter for send in sends}
        idle = [
            name
            for node, (name, value) in zip(placeholders, trace.parameters.items(), strict=False)
            if value.requires_grad and node.users and name not in sent
        ]
        if idle:
            note = joined(note, f"{len(idle)} trained parameters are read and get no gradient: {module_names(idle)}")
        ops += sends
    dtypes = [str(value.dtype).removeprefix("torch.") for value in trace.parameters.values()]
    meta: dict[str, str | int | float | bool | None] = {
        "framework": "torch",
        "dtype": max(set(dtypes), key=dtypes.count) if dtypes else "float32",
        "parameter_elements": sum(value.numel() for value in trace.parameters.values()),
        "precision": numerics.precision,
        "channels_last": numerics.channels_last,
    }
    if note:
        meta["note"] = note
    read = [
        value
        for value in step.inputs
        if isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point()
    ]
    if read:
        meta["tokens_per_sample"] = int(read[0].shape[1])
    place = step.batch_dimension
    batched = [value for value in step.inputs if isinstance(value, Tensor) and value.dim() > place]
    batch = int(batched[0].shape[place]) if batched else 0
    graph = Graph.from_ops(step.name, mode, ops, batch_size=batch or None, meta=meta, where=step.name)
    return TracedStep(graph=graph, fx=trace.fx, nodes=calls, issued=tuple(distinct), calls=which, again=again)


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
    calls: list[Node],
    producer: dict[Node, str | None],
    phase: dict[Node, str],
    made_by: dict[str, Node],
    distinct: dict[Issued, int],
    which: dict[str, int],
) -> list[Op]:
    """Return one compute op per call.

    ``producer`` gets the op that makes each node's value, ``made_by`` each op's call, ``distinct`` the calls by number and
    ``which`` each op's.
    """
    ops: list[Op] = []
    costs: list[Cost] = []
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
        call = issued(node)
        which[name] = distinct.setdefault(call, len(costs))
        if which[name] == len(costs):
            costs.append(cost_of(call))
        cost = costs[which[name]]
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
    return value.untyped_storage()._cdata if isinstance(value, Tensor) and value.layout == torch.strided else 0


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
