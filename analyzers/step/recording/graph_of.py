"""From a recording to a :class:`Graph`: the ops with their work, the lives of storages, the collectives on their streams."""

from __future__ import annotations

import operator
from collections import Counter
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph as FxGraph
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map_only

from ddltool.analyzers.step.recording.recorder import RecordedCall, Recording, Shadow
from ddltool.analyzers.step.tracing.torch_adapter import compute_ops
from ddltool.graph import Graph, Op, Recorded

_SAMPLE_DIMENSIONS = 2


def graph_of(step: Recording, name: str) -> Graph:
    """Return the graph of a recorded step.

    A parameter's recv op comes before the first op that reads it, a gradient's send op after the op that completed it.
    """
    reader = _Reader(step)
    nodes = [reader.node_of(call) for call in step.calls]
    phases = {node: _phase(call) for node, call in zip(nodes, step.calls, strict=True)}
    producer: dict[Node, str | None] = dict.fromkeys(reader.placeholders)
    recvs = []
    for parameter, shadow in step.parameters.items():
        recvs.append(_transfer("recv", parameter, shadow))
        producer |= dict.fromkeys(reader.read_of(shadow.storage), f"recv/{parameter}")
    node_of_op: dict[str, Node] = {}
    listed = list(reader.graph.nodes)
    computes = compute_ops(
        [node for node in listed if node.op == "call_function"], producer, phases, node_of_op, {}, {}
    )
    name_of = {node: op for op, node in node_of_op.items()}
    names = [name_of[node] for node in nodes]
    ops = [_placed(op, call, names) for op, call in zip(computes, step.calls, strict=True)]
    sends = []
    for parameter, shadow in step.gradients.items():
        if (made := reader.last_writer_of(shadow.storage)) is not None:
            sends.append(_transfer("send", parameter, shadow, names[made]))
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
        self.graph = FxGraph()
        self.placeholders: list[Node] = []
        self._made: dict[tuple[Any, ...], Node] = {}
        self._readers: dict[int, list[Node]] = {}
        self._writers: dict[int, int] = {}
        self._place = 0

    def node_of(self, call: RecordedCall) -> Node:
        """Return the node of the next call."""
        args, kwargs = tree_map_only(Shadow, self._argument, (call.args, dict(call.kwargs)))
        node = self.graph.call_function(call.target, args, kwargs)
        node.meta["val"] = tree_map_only(Shadow, lambda shadow: shadow.tensor, call.output)
        outputs = call.output if isinstance(call.output, (tuple, list)) else None
        for number, output in enumerate(outputs if outputs is not None else [call.output]):
            made = node
            if outputs is not None and isinstance(output, Shadow):
                made = self.graph.call_function(operator.getitem, (node, number))
                made.meta["val"] = output.tensor
            if isinstance(output, Shadow):
                self._made[_signature(output)] = made
        for leaf in tree_leaves((call.output, _written(call))):
            if isinstance(leaf, Shadow):
                self._writers[leaf.storage] = self._place
        self._place += 1
        return node

    def read_of(self, storage: int) -> list[Node]:
        """Return the placeholders that read a storage from before the step."""
        return self._readers.get(storage, [])

    def last_writer_of(self, storage: int) -> int | None:
        """Return the place of the last call that wrote to a storage."""
        return self._writers.get(storage)

    def _argument(self, shadow: Shadow) -> Node:
        key = _signature(shadow)
        if key not in self._made:
            with self.graph.inserting_before():  # before all that is there
                node = self.graph.placeholder(f"input{len(self.placeholders)}")
            node.meta["val"] = shadow.tensor
            self.placeholders.append(node)
            self._readers.setdefault(shadow.storage, []).append(node)
            self._made[key] = node
        return self._made[key]


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


def _transfer(kind: Any, parameter: str, shadow: Shadow, after: str | None = None) -> Op:
    size_bytes = float(shadow.tensor.numel() * shadow.tensor.element_size())
    return Op(
        name=f"{kind}/{parameter}", kind=kind, resource="channel:0", size_bytes=size_bytes, parameter=parameter,
        inputs=(after,) if after is not None else (),
    )  # fmt: skip


def _placed(op: Op, call: RecordedCall, names: list[str]) -> Op:
    """Return the op on the resource of its stream, after what it waits for; a collective with what it moves."""
    from dataclasses import replace

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
    half = {"bfloat16": "bf16", "float16": "fp16"}.get(main)
    if half is None:
        return of_float32
    return half if kept == "torch.float32" else f"{half}-pure"


def _is_channels_last(step: Recording) -> bool:
    """Return whether most convolutions get their input with its channels last."""
    inputs = [call.args[0].tensor for call in step.calls if _base(call.target) == "convolution"]
    images = [tensor for tensor in inputs if isinstance(tensor, Tensor) and tensor.dim() == 4]
    last = [tensor for tensor in images if tensor.is_contiguous(memory_format=torch.channels_last)]
    return 2 * len(last) > len(images)


def _base(target: Any) -> str:
    return str(getattr(getattr(target, "_schema", None), "name", target)).partition("::")[2]
