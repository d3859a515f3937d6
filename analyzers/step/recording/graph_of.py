"""From a recording to a :class:`Graph`: the ops with their work, the lives of storages, the collectives on their streams."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any, Literal, cast

from torch import Tensor
from torch.fx import Graph as FxGraph
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from ddltool.analyzers.step.recording.op_rules import CLASS, FACTOR_PLACES, Cost, class_of, normal_type
from ddltool.analyzers.step.recording.recorder import (
    LAYOUTS,
    RecordedCall,
    RecordedStorage,
    Recording,
    Shadow,
    shadows_of,
)
from ddltool.analyzers.step.recording.torch_costs import Issued, base_name, cost_of, issued, written_arguments
from ddltool.graph import RECOMPUTED, Gemm, Graph, Layout, Op, Recorded

_TOKEN_DIMENSIONS = 2
"""A batch of token sequences has two dimensions: (samples, tokens)."""
_OF_IMAGES = tuple(CLASS[name] for name in ("convolution", "normalisation", "pooling"))
"""Classes of kernels whose time depends on the layout of images in memory."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RecordedOps:
    """The calls of a recording as nodes of a program, and what each costs."""

    program: FxGraph
    """Placeholders of tensors that live from before the step, then the calls.

    ``node.meta["val"]`` holds tensors without memory.
    """
    nodes: list[Node]
    """The node of each recorded call, in the order of the calls."""
    ops: list[Op]
    """The op of each recorded call, in the same order."""
    given: dict[str, Node]
    """By a parameter's name, its placeholder: of every parameter that the step reads or that was asked for."""
    issued: tuple[Issued, ...]
    """What the cost of each call depends on; equal ones appear once."""
    issued_of: dict[str, int]
    """Index in ``issued`` of each op, by its name."""
    last_writer: dict[int, str]
    """The last op that wrote to a storage, by the storage's number."""


def ops_of(step: Recording, *, given: Mapping[str, Shadow] = MappingProxyType({})) -> RecordedOps:
    """Return the ops of a recorded step with their costs and inputs.

    An op depends on the ops that made its tensors, and on the last op that wrote in place to their storages. An op that
    reads a parameter before any op has written to it depends on ``recv/<parameter>``. ``given``: parameters by name
    that get a placeholder even where the step reads none of them. Equal calls are costed once.
    """
    reader = _Reader(step)
    parameter_of = {reader.maker_of(shadow): name for name, shadow in given.items()}  # by the parameter's placeholder
    nodes = [reader.node_of(call) for call in step.calls]
    for name, shadow in step.parameters.items():
        parameter_of |= dict.fromkeys(reader.placeholders_of(shadow.storage), name)
    # By a node, the op that makes its tensor; None for one that was there before the step and is no parameter.
    producer: dict[Node, str | None] = dict.fromkeys(reader.placeholders)
    producer |= {node: f"recv/{name}" for node, name in parameter_of.items()}
    ops: list[Op] = []
    cost_table = _CostTable()
    issued_of: dict[str, int] = {}
    written_by: dict[int, str] = {}  # by torch's identifier of a storage, the last op so far that wrote to it in place
    call_index_of = {node: index for index, node in enumerate(nodes)}
    for node in reader.program.nodes:
        if node.op != "call_function":
            continue
        if node.target is operator.getitem:
            producer[node] = producer.get(node.args[0])  # the tuple's call; a getitem is no op of its own
            continue
        call = step.calls[call_index_of[node]]
        name = f"{_phase(call)}/{node.name}"
        # The ops that it depends on, each once and in order: the makers of its tensors, then in-place writers to them.
        sources = node.all_input_nodes
        makers = [producer.get(source) for source in sources]
        writers = [written_by.get(_storage(source)) for source in sources]
        inputs = tuple(dict.fromkeys(op for op in (*makers, *writers) if op is not None))
        written_by |= {shadow.tensor.untyped_storage()._cdata: name for shadow in shadows_of(_written(call))}
        index = cost_table.index_of(node, call)
        issued_of[name] = index
        producer[node] = name
        ops.append(_op_of(call, cost_table.costs[index], name, inputs))
    return RecordedOps(
        program=reader.program,
        nodes=nodes,
        ops=ops,
        # A parameter may have several placeholders, one for each view: reversed, so that its first one stays.
        given={name: node for node, name in reversed(parameter_of.items())},
        issued=tuple(cost_table.index_of_issued),
        issued_of=issued_of,
        last_writer={storage: ops[index].name for storage, index in reader.writers.items()},
    )


class _CostTable:
    """The costs of the distinct calls of a recording.

    A cost depends on a call's :class:`Issued` alone, so it is worked out once for all calls with equal ones.
    """

    def __init__(self) -> None:
        """Begin without costs."""
        self.costs: list[Cost] = []
        self.index_of_issued: dict[Issued, int] = {}
        """By what a cost depends on, its index in ``costs``; in the order of ``costs``."""
        self._index_of_copied: dict[int, int] = {}
        """By the number that copies of one call share (``RecordedCall.copied``), the index of their cost."""

    def index_of(self, node: Node, call: RecordedCall) -> int:
        """Return the index in ``costs`` of a call's cost, which is added where it is new; ``node``: the call's node.

        Two tables save work. Copies of one call (the same call of a repeated block, which have one number ``copied``) cost the
        same, which one look-up of that number tells. Any other call's :class:`Issued` is made, and costed if it is new.
        """
        copies_number = call.copied  # None: it is no copy
        if copies_number is not None and copies_number in self._index_of_copied:
            return self._index_of_copied[copies_number]
        cost_key = issued(node)
        index = self.index_of_issued.get(cost_key)
        if index is None:
            index = len(self.costs)
            self.index_of_issued[cost_key] = index
            self.costs.append(cost_of(cost_key))
        if copies_number is not None:
            self._index_of_copied[copies_number] = index
        return index


def _op_of(call: RecordedCall, cost: Cost, name: str, inputs: tuple[str, ...]) -> Op:
    """Return the compute op of a call with its cost; ``inputs``: the names of the ops that it depends on."""
    return Op(
        name=name,
        kind="compute",
        flops=cost.flops,
        size_bytes=cost.size_bytes,
        inputs=inputs,
        op_type=f"aten.{base_name(call.target)}",
        estimate=cost.estimate,
        written_bytes=cost.written_bytes,
        dtype=cost.dtype,
        layout=_layout_of(call),
        gemm=cost.gemm,
    )


def graph_of(step: Recording, name: str) -> Graph:
    """Return the graph of a recorded step, named ``name``.

    The graph has an op for each call, a recv op for each parameter, and a send op for each gradient that the step
    writes. Its ``recorded`` part holds what only a recording knows: when storages are made and freed, groups of ranks,
    waits of the host, assumed values.
    """
    recorded_ops = ops_of(step)
    names = [op.name for op in recorded_ops.ops]
    ops = [_scheduled(op, call, names) for op, call in zip(recorded_ops.ops, step.calls, strict=True)]
    recvs = [transfer("recv", parameter, _size_bytes(shadow)) for parameter, shadow in step.parameters.items()]
    sends = [
        send_of(parameter, shadow, _size_bytes(shadow), recorded_ops.last_writer[shadow.storage])
        for parameter, shadow in step.gradients.items()
        if shadow.storage in recorded_ops.last_writer
    ]
    dtypes = Counter(shadow.tensor.dtype for shadow in step.parameters.values())
    main_dtype = str(dtypes.most_common(1)[0][0]) if dtypes else ""
    # The step's forward passes get inputs of one shape, whose first dimension is the batch.
    batch = step.inputs[0][0] if step.inputs else None
    meta: dict[str, str | int | float | bool | None] = {
        "framework": "torch",
        "dtype": main_dtype.removeprefix("torch.") or "float32",
        "parameter_elements": sum(shadow.tensor.numel() for shadow in step.parameters.values()),
        "precision": _precision(ops, main_dtype, "tf32" if step.tf32 else "fp32"),
        "channels_last": _is_channels_last(ops),
    }
    if step.inputs and len(step.inputs[0]) == _TOKEN_DIMENSIONS and step.tokens:
        meta["tokens_per_sample"] = step.inputs[0][1]
    recorded = Recorded(
        world_size=step.world_size,
        passes=max(1, len(step.inputs)),  # more than one where gradients are accumulated
        compiled=step.compiled,
        made=tuple(storage.made for storage in step.storages),
        freed=tuple(storage.freed for storage in step.storages),
        storage_bytes=tuple(storage.size_bytes for storage in step.storages),
        parts=tuple(_kinds_of_storages(step)),
        waits=tuple(step.host_waits),
        groups={name: call.exchange.ranks for name, call in zip(names, step.calls, strict=True) if call.exchange},
        assumed=dict(step.assumed),
        seconds=step.seconds,
        batches=max(1, step.world_size // _processes_sharing_a_batch(step, ops)),
    )
    return Graph.from_ops(
        name, "training", [*recvs, *ops, *sends], batch_size=batch, meta=meta, recorded=recorded, where=name
    )


class _Reader:
    """Makes an fx node of each recorded call, in order; the node's tensor arguments are the nodes that made them."""

    def __init__(self, step: Recording) -> None:
        """Begin with an empty program."""
        self.step = step
        self.program = FxGraph()
        self.placeholders: list[Node] = []
        self.writers: dict[int, int] = {}
        """By a storage's number, the index of the last call that wrote to it."""
        self._node_of_tensor: dict[Shadow, Node] = {}
        """By a tensor, the node that made it last."""
        self._placeholders_of_storage: dict[int, list[Node]] = {}
        self._calls_read = 0
        self._first_call: Node | None = None
        """Placeholders are inserted before it: torch.fx wants them all at the beginning."""

    def node_of(self, call: RecordedCall) -> Node:
        """Add a node for the next call to the program and return it.

        A call that returns several tensors also gets a ``getitem`` node for each of them.
        """
        args = _mapped(call.args, self.maker_of)
        kwargs = _mapped(call.kwargs, self.maker_of)
        name = base_name(call.target)
        node = self.program.create_node("call_function", call.target, args, kwargs, name=name)
        node.meta["val"] = _mapped(call.output, lambda shadow: shadow.tensor)
        returns_several = isinstance(call.output, (tuple, list))
        outputs = call.output if returns_several else [call.output]
        for index, output in enumerate(outputs):
            if not isinstance(output, Shadow):
                continue
            maker = node
            if returns_several:  # torch.fx has a node that takes one part of a call's tuple
                maker = self.program.create_node("call_function", operator.getitem, (node, index), name="getitem")
                maker.meta["val"] = output.tensor
            self._node_of_tensor[output] = maker
        for shadow in shadows_of((call.output, _written(call))):
            self.writers[shadow.storage] = self._calls_read
        self._calls_read += 1
        if self._first_call is None:
            self._first_call = node
        return node

    def placeholders_of(self, storage: int) -> list[Node]:
        """Return the placeholders of a storage, one for each way in which the step views it; [] if the step made it."""
        return self._placeholders_of_storage.get(storage, [])

    def maker_of(self, shadow: Shadow) -> Node:
        """Return the node that made a tensor last; a new placeholder for a tensor that was there before the step."""
        if shadow not in self._node_of_tensor:
            is_empty = self._first_call is None
            with nullcontext() if is_empty else self.program.inserting_before(self._first_call):
                node = self.program.placeholder(f"input{len(self.placeholders)}")
            node.meta["val"] = shadow.tensor
            self.placeholders.append(node)
            self._placeholders_of_storage.setdefault(shadow.storage, []).append(node)
            self._node_of_tensor[shadow] = node
        return self._node_of_tensor[shadow]


def _mapped(value: Any, change: Callable[[Shadow], Any]) -> Any:
    """Return a call's values with ``change`` applied to each of its tensors, in nested tuples, lists and mappings.

    torch's ``tree_map`` does the same and takes five times as long.
    """
    if isinstance(value, Shadow):
        return change(value)
    if isinstance(value, (tuple, list)):
        parts = (_mapped(part, change) for part in value)
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, Mapping):
        return {key: _mapped(part, change) for key, part in value.items()}
    return value


def _storage(node: Node) -> int:
    """Return torch's identifier of the storage behind a node's tensor, 0 for a node whose value is no single tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else 0


def _written(call: RecordedCall) -> list[Any]:
    """Return the arguments that a call writes to in place."""
    return written_arguments(call.target, call.args, call.kwargs)


def _phase(call: RecordedCall) -> str:
    """Return the first part of an op's name: ``forward/<module>``, ``backward``, ``RECOMPUTED`` or ``update``."""
    if call.recomputed:
        return RECOMPUTED
    return f"forward/{call.module}" if call.phase == "forward" and call.module else call.phase


def _size_bytes(shadow: Shadow) -> float:
    """Return the bytes of a tensor's elements."""
    return float(shadow.tensor.numel() * shadow.tensor.element_size())


def transfer(kind: Literal["recv", "send"], parameter: str, size_bytes: float, after: str | None = None) -> Op:
    """Return the recv op of a parameter, or the send op of its gradient.

    ``size_bytes``: of the parameter or gradient. ``after``: the name of the op that it depends on, which is the op that
    completes the gradient; None: it depends on nothing.
    """
    return Op(
        name=f"{kind}/{parameter}", kind=kind, resource="channel:0", size_bytes=size_bytes, parameter=parameter,
        inputs=(after,) if after is not None else (),
    )  # fmt: skip


def send_of(parameter: str, gradient: Shadow, size_bytes: float, after: str, dtype: str = "") -> Op:
    """Return the send op of a parameter's gradient, which also carries the parameter's shape and type for optimizers.

    The shape is in ``gemm``: (matrices, 0, rows, columns), or (0, 0, 0, elements) for a vector. ``size_bytes``,
    ``dtype``: of the parameter as it is stored; ``dtype`` "": the gradient's. ``after``: as for :func:`transfer`.
    """
    shape = [float(side) for side in gradient.tensor.shape]
    gemm = (prod(shape[:-2]), 0.0, *shape[-2:]) if len(shape) > 1 else (0.0, 0.0, 0.0, prod(shape))
    dtype = dtype or str(gradient.tensor.dtype).removeprefix("torch.")
    return replace(transfer("send", parameter, size_bytes, after), gemm=cast(Gemm, gemm), dtype=dtype)


def _scheduled(op: Op, call: RecordedCall, names: list[str]) -> Op:
    """Return the op with the resource of its stream, and with the ops that its call waits for among its inputs.

    ``names``: the names of all ops, by the index of their call. A resource is named ``compute:<stream>``; ops of one
    resource run one after another. A collective also gets its ``c10d`` type and the bytes that it moves, and no FLOPs.
    """
    waited_ops = [names[index] for index in call.waits]
    inputs = tuple(dict.fromkeys((*op.inputs, *waited_ops)))
    stream = call.stream if call.stream >= 0 else _STREAMS_OF_SCRIPT - call.stream
    resource = f"compute:{stream}"
    if call.exchange is None:
        return replace(op, inputs=inputs, resource=resource)
    return replace(
        op, inputs=inputs, resource=resource, op_type=f"c10d.{call.exchange.name}", flops=0.0, gemm=(0.0, 0.0, 0.0, 0.0),
        size_bytes=float(call.exchange.size_bytes), written_bytes=0.0, estimate="free",
    )  # fmt: skip


_STREAMS_OF_SCRIPT = 999
"""A collective's stream has the number -1, -2, ... of its group; it becomes the resource 1000, 1001, ..., after those of
the script's own streams."""


def _kinds_of_storages(step: Recording) -> list[str]:
    """Return what each storage holds, in the order of the step's storages: the first of these words that applies.

    parameters; gradients; buffers; optimizer (read by an update, and there before the step); activations (made in the
    forward pass); temporary (made later in the step); other.
    """
    parameters = {shadow.storage for shadow in step.parameters.values()}
    gradients = {shadow.storage for shadow in step.gradients.values()}
    used_by_update: set[int] = set()
    for call in step.calls:
        if call.phase == "update":
            used_by_update |= {
                leaf.storage for leaf in tree_leaves((call.args, call.kwargs)) if isinstance(leaf, Shadow)
            }

    def kind_of(storage: RecordedStorage) -> str:
        """Return what a storage holds."""
        number = storage.number
        if number in parameters:
            return "parameters"
        if number in gradients:
            return "gradients"
        if number in step.buffers:
            return "buffers"
        if number in used_by_update and storage.made < 0:
            return "optimizer"
        if not 0 <= storage.made < len(step.calls):  # there before the step, or made after its last call
            return "other"
        return "activations" if step.calls[storage.made].phase == "forward" else "temporary"

    return [kind_of(storage) for storage in step.storages]


_LEAST_MOVED = 1 / 500
"""A collective that moves less than this part of the largest storage moves statistics (of SyncBatchNorm, of a mean loss)."""


def _processes_sharing_a_batch(step: Recording, ops: list[Op]) -> int:
    """Return how many processes work on the same batch: 1 for pure data parallelism, 8 for tensor parallelism over 8.

    These are the processes whose forward passes exchange activations: tensors that are made by a matrix product, an
    embedding, or an op that reads an activation. A group that gathers parameters in its forward pass (FSDP) is left
    out: each of its processes has its own batch, and anything else that they exchange is tokens for experts.
    """
    activations: set[int] = set()  # numbers of storages
    sharing: set[tuple[int, ...]] = set()  # groups, by the ranks of their processes
    gathering: set[tuple[int, ...]] = set()  # groups that gather parameters
    largest = max((storage.size_bytes for storage in step.storages if storage.made >= 0), default=0)
    for call, op in zip(step.calls, ops, strict=True):
        if call.phase != "forward":
            continue
        read = {leaf.storage for leaf in tree_leaves((call.args, dict(call.kwargs))) if isinstance(leaf, Shadow)}
        is_product = op.gemm[1] > 0  # gemm is (count, m, n, k) of matrix products, zeros for any other op
        is_activation = is_product or "embedding" in op.op_type or bool(read & activations)
        if is_activation:
            # A collective may write to any of its arguments.
            written = tree_leaves((call.output, call.args if call.exchange else _written(call)))
            activations |= {leaf.storage for leaf in written if isinstance(leaf, Shadow)}
        if call.exchange is None or len(call.exchange.ranks) <= 1:
            continue
        if not is_activation and call.exchange.name == "all_gather":
            gathering.add(call.exchange.ranks)
        elif is_activation and call.exchange.size_bytes >= _LEAST_MOVED * largest and _has_samples(step, call):
            sharing.add(call.exchange.ranks)
    groups = [set(ranks) for ranks in sharing if not any(set(ranks) <= set(group) for group in gathering)]
    # A group within a larger one adds nothing; groups that cross (tensor and context parallel ones) multiply.
    largest_groups = [group for group in groups if not any(group < other for other in groups)]
    return prod(map(len, largest_groups))


def _has_samples(step: Recording, call: RecordedCall) -> bool:
    """Return whether a collective moves a tensor that holds something for each sample of the batch.

    Such a tensor has a dimension as long as the batch, or a first dimension that is a multiple of it (samples x tokens).
    A tensor of means over the batch has neither. Without known inputs the batch counts as 1 sample.
    """
    samples = step.inputs[0][0] if step.inputs else 1
    shapes = [tuple(leaf.tensor.shape) for leaf in tree_leaves(call.args) if isinstance(leaf, Shadow)]
    return any(samples in shape or (len(shape) > 0 and shape[0] % samples == 0) for shape in shapes)


def _precision(ops: list[Op], parameter_dtype: str, float32_precision: str) -> str:
    """Return the name of the precision in which most FLOPs of matrix products are done.

    One of fp8, bf16, fp16, bf16-pure and fp16-pure (the parameters are of that type, too), or ``float32_precision``,
    which names how float32 is multiplied (tf32 or fp32). ``parameter_dtype``: the type of most parameters, written
    ``torch.float32``.
    """
    flops_of: Counter[str] = Counter()
    for op in ops:
        if op.gemm[1] > 0:  # rows of a matrix product; 0 for any other op
            flops_of[op.dtype] += int(op.flops)
    main_dtype = flops_of.most_common(1)[0][0] if flops_of else "float32"
    if main_dtype.startswith("float8"):
        return "fp8"
    short_name = {"bfloat16": "bf16", "float16": "fp16"}.get(main_dtype)
    if short_name is None:
        return float32_precision
    return short_name if parameter_dtype == "torch.float32" else f"{short_name}-pure"


def _is_channels_last(ops: list[Op]) -> bool:
    """Return whether more convolutions get images with channels last in memory than with channels first."""
    layouts = Counter(op.layout for op in ops if normal_type(op.op_type) == "convolution" and op.layout)
    return layouts["channels_last"] > layouts["channels_first"]


def _layout_of(call: RecordedCall) -> Layout:
    """Return the memory layout of what a call reads: images, volumes, or the factors of a matrix product.

    It is "" for a call whose kernel does not depend on it. Of images and volumes, the first argument whose strides differ
    between the two layouts decides; tensors of one channel or one pixel fit both and are passed over ("" if all do). A
    convolution is ``channels_last`` if its image or its weight is, because cuDNN lays out the other one alike. Layouts may
    differ between the calls of a model: ConvNeXt permutes its images around its norms.
    """
    name = base_name(call.target)
    if name in FACTOR_PLACES:
        return _layout_of_factors(*(call.args[place] for place in FACTOR_PLACES[name]))
    if class_of(name) not in _OF_IMAGES:
        return ""
    layouts: list[Layout] = []
    # Of a backward convolution only the image and the weight count, its arguments 1 and 2.
    arguments = call.args[1:3] if name == "convolution_backward" else call.args
    for argument in arguments:
        if not isinstance(argument, Shadow):
            continue
        layout = LAYOUTS.get(argument.tensor.dim())
        if layout is None:  # neither images nor volumes
            continue
        is_last = argument.tensor.is_contiguous(memory_format=layout)
        is_first = argument.tensor.is_contiguous()
        if is_last != is_first:
            layouts.append("channels_last" if is_last else "channels_first")
    if class_of(name) == CLASS["convolution"] and "channels_last" in layouts:
        return "channels_last"
    return layouts[0] if layouts else ""


def _layout_of_factors(left: Shadow, right: Shadow) -> Layout:
    """Return which factors of a matrix product have contiguous columns, that is, are transposed; "": the left one does not."""

    def is_transposed(factor: Shadow) -> bool:
        """Return whether the elements of a column, and not those of a row, lie next to each other."""
        row_stride, column_stride = factor.tensor.stride()[-2:]
        return row_stride == 1 and column_stride > 1

    if not is_transposed(left):
        return ""
    return "both_transposed" if is_transposed(right) else "left_transposed"
