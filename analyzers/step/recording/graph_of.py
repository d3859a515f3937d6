"""From a recording to a :class:`Graph`: the ops with their work, the lives of storages, the collectives on their streams."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import Graph as FxGraph
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from ddltool.analyzers.step.recording.op_rules import Cost
from ddltool.analyzers.step.recording.recorder import RecordedCall, Recording, Shadow, shadows_of
from ddltool.analyzers.step.recording.torch_costs import Issued, base_name, cost_of, issued
from ddltool.graph import Graph, Op, Recorded

_SAMPLE_DIMENSIONS = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedOps:
    """The calls of a recording as nodes of a program, and what each costs."""

    program: FxGraph
    """Placeholders of what lives from before the step, then the calls; ``node.meta["val"]`` holds tensors without memory."""
    nodes: list[Node]
    """Of each call."""
    ops: list[Op]
    """Of each call, in the same order."""
    given: dict[str, Node]
    """The placeholders of the model's parameters that are read, or all that were asked for, by name."""
    issued: tuple[Issued, ...]
    """The distinct calls."""
    issued_of: dict[str, int]
    """Index in ``issued`` of each op, by its name."""
    last_writer: dict[int, str]
    """The last op that wrote to a storage, by the storage's number."""


def ops_of(step: Recording, *, given: Mapping[str, Shadow] = MappingProxyType({})) -> RecordedOps:
    """Return the ops of a recorded step with their costs and inputs; ``given``: parameters that are placeholders in any case.

    An op depends on the ops that made its tensors, and on the last one that wrote in place to their storages.
    """
    reader = _Reader(step)
    names_of = {node: name for name, shadow in given.items() for node in [reader.placeholder_of(shadow)]}
    nodes = [reader.node_of(call) for call in step.calls]
    for name, shadow in step.parameters.items():
        names_of |= dict.fromkeys(reader.read_of(shadow.storage), name)
    producer: dict[Node, str | None] = dict.fromkeys(reader.placeholders)
    producer |= {node: f"recv/{name}" for node, name in names_of.items()}
    ops: list[Op] = []
    costs: list[Cost] = []
    distinct: dict[Issued, int] = {}
    issued_of: dict[str, int] = {}
    written_by: dict[int, str] = {}
    place_of = {node: place for place, node in enumerate(nodes)}
    for node in reader.program.nodes:
        if node.op != "call_function":
            continue
        if node.target is operator.getitem:
            producer[node] = producer.get(node.args[0])
            continue
        call = step.calls[place_of[node]]
        name = f"{_phase(call)}/{node.name}"
        inputs = dict.fromkeys(op for source in node.all_input_nodes if (op := producer.get(source)) is not None)
        for source in node.all_input_nodes:
            if (writer := written_by.get(_storage(source))) is not None:
                inputs.setdefault(writer)
        written_by |= {shadow.tensor.untyped_storage()._cdata: name for shadow in shadows_of(_written(call))}
        cost_key = issued(node)
        issued_of[name] = distinct.setdefault(cost_key, len(costs))
        if issued_of[name] == len(costs):
            costs.append(cost_of(cost_key))
        cost = costs[issued_of[name]]
        producer[node] = name
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
    return RecordedOps(
        program=reader.program,
        nodes=nodes,
        ops=ops,
        given={name: node for node, name in reversed(names_of.items())},
        issued=tuple(distinct),
        issued_of=issued_of,
        last_writer={storage: ops[place].name for storage, place in reader.writers.items()},
    )


def graph_of(step: Recording, name: str) -> Graph:
    """Return the graph of a recorded step.

    A parameter's recv op comes before the first op that reads it, a gradient's send op after the op that completed it.
    """
    recorded_ops = ops_of(step)
    names = [op.name for op in recorded_ops.ops]
    ops = [_placed(op, call, names) for op, call in zip(recorded_ops.ops, step.calls, strict=True)]
    recvs = [transfer("recv", parameter, _bytes(shadow)) for parameter, shadow in step.parameters.items()]
    sends = [
        transfer("send", parameter, _bytes(shadow), recorded_ops.last_writer[shadow.storage])
        for parameter, shadow in step.gradients.items()
        if shadow.storage in recorded_ops.last_writer
    ]
    dtypes = Counter(shadow.tensor.dtype for shadow in step.parameters.values())
    batch = step.inputs[0][0] if step.inputs else None
    meta: dict[str, str | int | float | bool | None] = {
        "framework": "torch",
        "dtype": str(dtypes.most_common(1)[0][0]).removeprefix("torch.") if dtypes else "float32",
        "parameter_elements": sum(shadow.tensor.numel() for shadow in step.parameters.values()),
        "precision": _precision(
            ops, str(dtypes.most_common(1)[0][0]) if dtypes else "", "tf32" if step.tf32 else "fp32"
        ),
        "channels_last": _is_channels_last(step),
    }
    if step.inputs and len(step.inputs[0]) == _SAMPLE_DIMENSIONS and step.tokens:
        meta["tokens_per_sample"] = step.inputs[0][1]
    recorded = Recorded(
        world_size=step.world_size,
        passes=max(1, len(step.inputs)),
        compiled=step.compiled,
        made=tuple(storage.made for storage in step.storages),
        freed=tuple(storage.freed for storage in step.storages),
        storage_bytes=tuple(storage.size_bytes for storage in step.storages),
        parts=tuple(_parts(step, ops)),
        waits=tuple(step.host_waits),
        groups={name: call.exchange.ranks for name, call in zip(names, step.calls, strict=True) if call.exchange},
        assumed=dict(step.assumed),
        seconds=step.seconds,
        batches=max(1, step.world_size // _sharing(step, ops)),
    )
    return Graph.from_ops(
        name, "training", [*recvs, *ops, *sends], batch_size=batch, meta=meta, recorded=recorded, where=name
    )


class _Reader:
    """Makes fx nodes of recorded calls, whose arguments are the nodes that made them."""

    def __init__(self, step: Recording) -> None:
        self.step = step
        self.program = FxGraph()
        self.placeholders: list[Node] = []
        self.writers: dict[int, int] = {}
        """The place of the last call that wrote to a storage, by its number."""
        self._made: dict[tuple[Any, ...], Node] = {}
        self._readers: dict[int, list[Node]] = {}
        self._place = 0
        self._first_call: Node | None = None

    def node_of(self, call: RecordedCall) -> Node:
        """Return the node of the next call."""
        args, kwargs = _mapped(call.args, self.placeholder_of), _mapped(call.kwargs, self.placeholder_of)
        name = base_name(call.target)
        node = self.program.create_node("call_function", call.target, args, kwargs, name=name)
        node.meta["val"] = _mapped(call.output, lambda shadow: shadow.tensor)
        outputs = call.output if isinstance(call.output, (tuple, list)) else None
        for number, output in enumerate(outputs if outputs is not None else [call.output]):
            made = node
            if outputs is not None and isinstance(output, Shadow):
                made = self.program.create_node("call_function", operator.getitem, (node, number), name="getitem")
                made.meta["val"] = output.tensor
            if isinstance(output, Shadow):
                self._made[_signature(output)] = made
        for shadow in shadows_of((call.output, _written(call))):
            self.writers[shadow.storage] = self._place
        self._place += 1
        self._first_call = self._first_call or node
        return node

    def read_of(self, storage: int) -> list[Node]:
        """Return the placeholders that read a storage from before the step."""
        return self._readers.get(storage, [])

    def placeholder_of(self, shadow: Shadow) -> Node:
        """Return the node that made a tensor; one that lives from before the step has a placeholder."""
        key = _signature(shadow)
        if key not in self._made:
            before = nullcontext() if self._first_call is None else self.program.inserting_before(self._first_call)
            with before:
                node = self.program.placeholder(f"input{len(self.placeholders)}")
            node.meta["val"] = shadow.tensor
            self.placeholders.append(node)
            self._readers.setdefault(shadow.storage, []).append(node)
            self._made[key] = node
        return self._made[key]


def _mapped(value: Any, change: Callable[[Shadow], Any]) -> Any:
    """Return a call's values with other things in the place of its tensors; torch's ``tree_map`` takes five times as long."""
    if isinstance(value, Shadow):
        return change(value)
    if isinstance(value, (tuple, list)):
        parts = (_mapped(part, change) for part in value)
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, Mapping):
        return {key: _mapped(part, change) for key, part in value.items()}
    return value


def _storage(node: Node) -> int:
    """Return the identity of the storage behind a node's tensor, 0 for a node that is no single tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else 0


def _signature(shadow: Shadow) -> tuple[Any, ...]:
    tensor = shadow.tensor
    return shadow.storage, tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype


def _written(call: RecordedCall) -> list[Any]:
    """Return the arguments that a call writes to in place, by its schema."""
    schema = getattr(call.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    named = dict(zip((argument.name for argument in schema.arguments), call.args, strict=False)) | dict(call.kwargs)
    return [
        named[argument.name]
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write and argument.name in named
    ]


def _phase(call: RecordedCall) -> str:
    return f"forward/{call.module}" if call.phase == "forward" and call.module else call.phase


def _bytes(shadow: Shadow) -> float:
    return float(shadow.tensor.numel() * shadow.tensor.element_size())


def transfer(kind: Literal["recv", "send"], parameter: str, size_bytes: float, after: str | None = None) -> Op:
    """Return a parameter's recv op, or its gradient's send op after the op that completed it."""
    return Op(
        name=f"{kind}/{parameter}", kind=kind, resource="channel:0", size_bytes=size_bytes, parameter=parameter,
        inputs=(after,) if after is not None else (),
    )  # fmt: skip


def _placed(op: Op, call: RecordedCall, names: list[str]) -> Op:
    """Return the op on the resource of its stream, after what it waits for; a collective with what it moves."""
    inputs = tuple(dict.fromkeys((*op.inputs, *(names[place] for place in call.waits))))
    resource = f"compute:{call.stream if call.stream >= 0 else _FIRST_GROUP - call.stream}"
    if call.exchange is None:
        return replace(op, inputs=inputs, resource=resource)
    return replace(
        op, inputs=inputs, resource=resource, op_type=f"c10d.{call.exchange.name}", flops=0.0, gemm=(0.0, 0.0, 0.0, 0.0),
        size_bytes=float(call.exchange.size_bytes), written_bytes=0.0, estimate="free",
    )  # fmt: skip


# Collectives run on streams of their groups, whose numbers follow those of the script's own.
_FIRST_GROUP = 999


def _parts(step: Recording, ops: list[Op]) -> list[str]:
    """Return what each storage holds: parameters, gradients, buffers, optimizer's states, activations, others."""
    parameters = {shadow.storage for shadow in step.parameters.values()}
    gradients = {shadow.storage for shadow in step.gradients.values()}
    updated: set[int] = set()
    for call in step.calls:
        if call.phase == "update":
            updated |= {leaf.storage for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Shadow)}
    parts = []
    for storage in step.storages:
        number = storage.number
        made_in = step.calls[storage.made].phase if 0 <= storage.made < len(step.calls) else ""
        parts.append(
            "parameters" if number in parameters
            else "gradients" if number in gradients
            else "buffers" if number in step.buffers
            else "optimizer" if number in updated and storage.made < 0
            else "activations" if made_in == "forward"
            else "temporary" if made_in else "other"
        )  # fmt: skip
    return parts


# An exchange of less than this share of the largest activation is of statistics (SyncBatchNorm's, a mean loss).
_LEAST_SHARE = 1 / 500


def _sharing(step: Recording, ops: list[Op]) -> int:
    """Return how many processes share a batch: those whose forward passes exchange activations (tensor parallel groups).

    Activations come from products and embeddings. A group that gathers parameters in the forward pass has a batch a process:
    what else it exchanges are tokens for experts.
    """
    activations: set[int] = set()
    sharing: set[tuple[int, ...]] = set()
    gathering: set[tuple[int, ...]] = set()
    largest = max((storage.size_bytes for storage in step.storages if storage.made >= 0), default=0)
    for call, op in zip(step.calls, ops, strict=True):
        if call.phase != "forward":
            continue
        read = {leaf.storage for leaf in tree_leaves((call.args, dict(call.kwargs))) if isinstance(leaf, Shadow)}
        is_activation = op.gemm[1] > 0 or "embedding" in op.op_type or bool(read & activations)
        if is_activation:
            written = tree_leaves((call.output, call.args if call.exchange else _written(call)))
            activations |= {leaf.storage for leaf in written if isinstance(leaf, Shadow)}
        if call.exchange is not None and len(call.exchange.ranks) > 1:
            if not is_activation and call.exchange.name == "all_gather":
                gathering.add(call.exchange.ranks)
            elif is_activation and call.exchange.size_bytes >= _LEAST_SHARE * largest and _has_samples(step, call):
                sharing.add(call.exchange.ranks)
    wholes = [set(ranks) for ranks in sharing if not any(set(ranks) <= set(group) for group in gathering)]
    return prod(len(group) for group in wholes if not any(group < other for other in wholes))


def _has_samples(step: Recording, call: RecordedCall) -> bool:
    """Return whether what a collective moves has a dimension of samples: a mean over the batch has none."""
    batch = step.inputs[0][0] if step.inputs else 1
    shapes = [tuple(leaf.tensor.shape) for leaf in tree_leaves(call.args) if isinstance(leaf, Shadow)]
    return any(batch in shape or (len(shape) > 0 and shape[0] % batch == 0) for shape in shapes)


def _precision(ops: list[Op], kept: str, of_float32: str) -> str:
    """Return the name of the precision in which most of the products' work is done; ``kept``: the parameters' type."""
    work: Counter[str] = Counter()
    for op in ops:
        if op.gemm[1] > 0:
            work[op.dtype] += int(op.flops)
    [(main, _)] = work.most_common(1) or [("float32", 0)]
    if main.startswith("float8"):
        return "fp8"
    half = {"bfloat16": "bf16", "float16": "fp16"}.get(main)
    if half is None:
        return of_float32
    return half if kept == "torch.float32" else f"{half}-pure"


def _is_channels_last(step: Recording) -> bool:
    """Return whether most convolutions get their input with its channels last."""
    inputs = [call.args[0].tensor for call in step.calls if base_name(call.target) == "convolution"]
    images = [tensor for tensor in inputs if isinstance(tensor, Tensor) and tensor.dim() == 4]
    last = [tensor for tensor in images if tensor.is_contiguous(memory_format=torch.channels_last)]
    return 2 * len(last) > len(images)
