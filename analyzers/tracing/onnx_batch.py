"""The batch of an ONNX model: where it is, and the shapes of all tensors at another one.

A file exported at a fixed batch holds that batch in constants too: in the targets of Reshape and Expand, in the sizes
of Resize, in constants that are concatenated with activations. Shape inference believes them, so the new batch is
written into them, and the outcome is then compared with the file's own shapes: every tensor computed from the inputs
and the FLOPs of every node must have grown in proportion, or the model is refused. Start at :func:`rescale`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, numpy_helper

from ddltool.analyzers.tracing.onnx_shapes import (
    RECURRENT,
    Inferred,
    Patches,
    call_of,
    contradiction,
    infer,
    inputs_of,
    label,
    patched,
    show,
)
from ddltool.analyzers.tracing.op_rules import Shape, cost_of
from ddltool.errors import InputError, did_you_mean

_ROUNDS = 64
_LARGEST_SIZE = 2**31 - 1
_NAMELESS = frozenset(["", "?", "-1"])  # as some exporters write a dimension of any size
# Where samples go that two dimensions of a Reshape's output could take: tried in this order.
_MERGES = ("by rank", "first", "last")
# Besides Reduce*: outputs of one element are one number for the whole batch.
_SUMMARIES = frozenset(["DynamicQuantizeLinear", "NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"])


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Where a file's batch is: the inputs that have it, its size (None when symbolic or absent), its symbols."""

    inputs: tuple[str, ...]
    size: int | None
    symbols: frozenset[str]
    others: tuple[str, ...]
    """Inputs whose first dimension is another size: they keep it."""


def bind_dimensions(graph: GraphProto, bindings: Mapping[str, int], path: str) -> None:
    """Write sizes into the graph's symbolic dimensions, by name; one without a name is called ``INPUT.PLACE``.

    Raises InputError for a name that no input has, and for a size that no dimension can have.
    """
    for value in graph.input:
        for place, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_value <= 0 and dim.dim_param in _NAMELESS:
                dim.dim_param = f"{value.name}.{place}"
    known = _symbols(graph)
    for name, size in bindings.items():
        if name not in known:
            remedy = did_you_mean(name, known) if known else "leave it out: all its dimensions have sizes"
            raise InputError("--bind", f"no input of {path} has a dimension {name!r}", remedy)
        if not 1 <= size <= _LARGEST_SIZE:
            raise InputError("--bind", f"{name} is {size}", f"it must be at least 1 and at most {_LARGEST_SIZE}")
    for value in (*graph.input, *graph.value_info, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in bindings:
                dim.dim_value = bindings[dim.dim_param]


def _symbols(graph: GraphProto) -> dict[str, str]:
    """Return each symbolic dimension of the inputs with where it is first."""
    constants = {tensor.name for tensor in graph.initializer}
    found: dict[str, str] = {}
    for value in (value for value in graph.input if value.name not in constants):
        for place, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_value <= 0:
                found.setdefault(dim.dim_param, f"{value.name}[{place}]")
    return found


def find_batch(graph: GraphProto, path: str) -> Batch:
    """Return where the batch is: the symbolic first dimensions, or else the first input's and those equal to it.

    Raises InputError, which names them all, for symbolic dimensions that are not the batch.
    """
    constants = {tensor.name for tensor in graph.initializer}
    values = [value for value in graph.input if value.name not in constants]
    dims = {value.name: value.type.tensor_type.shape.dim for value in values if value.type.tensor_type.shape.dim}
    symbols = frozenset(shape[0].dim_param for shape in dims.values() if shape[0].dim_value <= 0)
    rest = {name: place for name, place in _symbols(graph).items() if name not in symbols}
    if rest:
        named = ", ".join(f"{name} ({place})" for name, place in rest.items())
        remedy = f"give them with --bind {','.join(f'{name}=SIZE' for name in rest)}"
        raise InputError(path, f"has dimensions without a size: {named}", remedy)
    symbolic = [name for name, shape in dims.items() if any(dim.dim_value <= 0 for dim in shape)]
    if symbolic:
        return Batch(inputs=tuple(symbolic), size=None, symbols=symbols, others=())
    size = next((int(shape[0].dim_value) for shape in dims.values()), None)
    inputs = tuple(name for name, shape in dims.items() if shape[0].dim_value == size)
    return Batch(inputs=inputs, size=size, symbols=symbols, others=tuple(name for name in dims if name not in inputs))


def with_batch(model: ModelProto, batch: Batch, size: int) -> ModelProto:
    """Return a copy of the model with that batch in its inputs, and without shapes noted for another one."""
    copy = ModelProto()
    copy.CopyFrom(model)
    for value in copy.graph.input:
        dims = value.type.tensor_type.shape.dim
        if value.name in batch.inputs:
            for place, dim in enumerate(dims):
                if dim.dim_value <= 0 or (batch.size is not None and place == 0):
                    dim.dim_value = size
    if size != (batch.size or 1):
        noted = [value for value in copy.graph.value_info if _has_symbol(value, batch)]
        del copy.graph.value_info[:]
        copy.graph.value_info.extend(noted)
        for value in copy.graph.output:
            if not _has_symbol(value, batch):
                value.type.tensor_type.ClearField("shape")
    for value in (*copy.graph.value_info, *copy.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in batch.symbols:
                dim.dim_value = size
    return copy


def _has_symbol(value: ValueInfoProto, batch: Batch) -> bool:
    return any(dim.dim_param in batch.symbols for dim in value.type.tensor_type.shape.dim)


def shapes_at(model: ModelProto, batch: Batch, size: int | None, path: str) -> Inferred:
    """Return the shapes of a sorted model at batch ``size``, None for the file's own (1 where it is symbolic).

    Raises InputError, naming the node, where the shapes contradict each other and where they cannot be rescaled.
    """
    own = batch.size or 1
    inferred = infer(with_batch(model, batch, own), path)
    problem = _first_contradiction(model, inferred.shapes)
    if size is None or size == own:
        if problem is not None:
            remedy = "give the batch size that its constants hold" if batch.size is None else "export the model again"
            raise InputError(path, problem, remedy)
        return inferred
    if batch.size is None:
        # The file says that it takes any batch: what it computes need not be proportional to it.
        direct = infer(with_batch(model, batch, size), path)
        lost = problem is None and any(name not in direct.shapes for name in inferred.shapes)
        if not lost and _first_contradiction(model, direct.shapes) is None:
            return direct
    if problem is not None:
        raise InputError(path, problem, "give the batch size that its constants hold, or export the model again")
    return rescale(model, batch, inferred, size, path)


def rescale(model: ModelProto, batch: Batch, own: Inferred, size: int, path: str) -> Inferred:
    """Return the shapes at batch ``size``, given those at the file's own batch.

    Raises InputError, naming the node, when a tensor computed from the inputs or a node's FLOPs would not grow in
    proportion.
    """
    resized = with_batch(model, batch, size)
    scale = _Scale(model, batch, own, size)
    problem: str | None = None
    for merges in _MERGES:
        patches: Patches = {}
        # A patch rests on the shapes before it, so every round corrects at least the first wrong guess of the last.
        for _ in range(_ROUNDS):
            found = infer(patched(resized, patches), path)
            shapes = scale.fixed | dict(found.shapes)
            wrong = scale.problem(shapes | scale.widened(patches, computed=False))
            if wrong is None:
                shapes |= scale.widened(patches, computed=True)
                return Inferred(shapes=shapes, types=dict(own.types) | dict(found.types))
            following = scale.patches(found.shapes, patches, merges)
            if following == patches:
                break
            patches = following
        problem = problem or wrong
    remedy = f"leave the batch size out (the file's is {batch.size or 1}), or export with a symbolic batch dimension"
    raise InputError(path, f"batch {size}: {problem}", remedy)


class _Scale:
    """Compares shapes at batch ``size`` with those at the file's own batch."""

    def __init__(self, model: ModelProto, batch: Batch, own: Inferred, size: int) -> None:
        self.nodes: Sequence[NodeProto] = model.graph.node
        self.own = own.shapes
        self.types = own.types
        self.old, self.new = batch.size or 1, size
        self.constants = {tensor.name for tensor in model.graph.initializer}
        self.constants |= {node.output[0] for node in self.nodes if node.op_type == "Constant"}
        self.used = {name for node in self.nodes for name in inputs_of(node)}
        self.used |= {value.name for value in model.graph.output}
        self.carriers = set(batch.inputs)
        """Tensors with one part per sample."""
        for node in self.nodes:
            if node.op_type not in ("Shape", "Size") and self.carriers.intersection(inputs_of(node)):
                self.carriers.update(name for name in node.output if name and not self._summary(node, name))
        self.fixed = {name: shape for name, shape in own.shapes.items() if name not in self.carriers}

    def _summary(self, node: NodeProto, name: str) -> bool:
        """Return whether an output is one number for the whole batch, or a running statistic."""
        if node.op_type == "BatchNormalization":
            return bool(name != node.output[0])
        # At batch 1 one number per sample is one number too, so a reduction must be over all axes by naming none.
        every = len(node.input) == 1 and not any(attribute.name == "axes" for attribute in node.attribute)
        reduces = node.op_type in _SUMMARIES or (node.op_type.startswith("Reduce") and every)
        return reduces and math.prod(self.own.get(name, (0,))) == 1

    def _scaled(self, name: str, shapes: Mapping[str, Shape]) -> bool:
        return name in shapes and math.prod(shapes[name]) * self.old == math.prod(self.own[name]) * self.new

    def problem(self, shapes: Mapping[str, Shape]) -> str | None:
        """Return what does not grow in proportion to the batch and where, or None."""
        for node in self.nodes:
            for name in node.output:
                if name not in self.carriers or name not in self.used:
                    continue
                if name not in self.own:
                    return f"{label(node)} makes {name!r}, whose shape cannot be inferred"
                if not self._scaled(name, shapes):
                    change = f"{show(self.own[name])} at batch {self.old}, {show(shapes.get(name))} now"
                    return f"{label(node)} does not scale with the batch ({change})"
            reason = contradiction(node, shapes)
            if reason is not None:
                return reason
            if self.carriers.intersection(node.output):
                before, after = _flops(node, self.own), _flops(node, shapes)
                if before is not None and (after is None or after * self.old != before * self.new):
                    return f"{label(node)} does not scale with the batch ({before:.6g} FLOPs, {after or 0:.6g} now)"
        return None

    def patches(self, shapes: Mapping[str, Shape], present: Patches, merges: str) -> Patches:
        """Return the constants that would make every node's output scale, as far as these shapes show it."""
        found: Patches = {}
        for number, node in enumerate(self.nodes):
            if not self.carriers.intersection(node.output) or node.output[0] not in self.own:
                continue
            if node.op_type == "Concat" or node.op_type in RECURRENT:
                found.update(self._stand_ins(number, node, shapes))
                continue
            place = {"Reshape": 1, "Expand": 1, "Resize": 3}.get(node.op_type)
            if place is None or len(node.input) <= place or not node.input[place]:
                continue
            computed = node.input[place] not in self.constants
            if computed and (number, place) not in present and self._scaled(node.output[0], shapes):
                continue
            target = self._target(node, shapes, merges)
            if target is not None:
                found[number, place] = numpy_helper.from_array(np.array(target, dtype=np.int64), "")
        return found

    def _axis(self, name: str, shapes: Mapping[str, Shape]) -> int | None:
        """Return the one dimension of a tensor that grew in proportion; 0 while that cannot be told."""
        before, after = self.own.get(name), shapes.get(name)
        if not before:
            return None
        if after is None or len(after) != len(before):
            return 0
        changed = [axis for axis in range(len(before)) if before[axis] != after[axis]]
        return changed[0] if len(changed) == 1 and self._scaled(name, shapes) else 0

    def _target(self, node: NodeProto, shapes: Mapping[str, Shape], merges: str) -> Shape | None:
        source, output = node.input[0], self.own[node.output[0]]
        axis = self._axis(source, shapes)
        if axis is None:
            return None
        if node.op_type == "Reshape":
            place = self._place(self.own[source], axis, output, merges)
        else:
            place = axis + len(output) - len(self.own[source])
            whole = not any(attribute.name == "axes" for attribute in node.attribute)
            place = place if whole and output[place] * self.new % self.old == 0 else None
        if place is None:
            return None
        return (*output[:place], output[place] * self.new // self.old, *output[place + 1 :])

    def _place(self, source: Shape, axis: int, output: Shape, merges: str) -> int | None:
        """Return the dimension of a Reshape's output into which the samples in ``source[axis]`` go, None for none.

        Row-major order is kept, so it is one whose strides lie within those of ``source[axis]``.
        """
        before = math.prod(source[:axis])
        after = before * source[axis]
        starts = [math.prod(output[:place]) for place in range(len(output))]
        spans = [(place, starts[place], starts[place] * output[place]) for place in range(len(output))]
        own = [place for place, start, end in spans if output[place] == self.old and before <= start and end <= after]
        merged = [
            place
            for place, start, end in spans
            if start <= before and before * self.old <= end and output[place] * self.new % self.old == 0
        ]
        # A batch of 1 between L and D can go into either: with L when dimensions are merged, with D's when it is split.
        backwards = merges == "first" or (merges == "by rank" and len(output) < len(source))
        return next(iter(own + (merged if backwards else merged[::-1])), None)

    def _stand_ins(self, number: int, node: NodeProto, shapes: Mapping[str, Shape]) -> Patches:
        """Return wider constants for those that must match the batch: beside activations, and as initial states."""
        places = range(len(node.input))
        axis: int | None = 1
        if node.op_type == "Concat":
            axes = {self._axis(name, shapes) for name in node.input if name in self.carriers and name in shapes}
            axis = axes.pop() if len(axes) == 1 else None
            joined = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 1)
            rank = len(self.own[node.output[0]])
            if axis is None or not rank or axis == joined % rank:
                return {}
        else:
            places = range(5, min(len(node.input), 7))
        found: Patches = {}
        for place in places:
            name, shape = node.input[place], self.own.get(node.input[place])
            if name in self.carriers or shape is None or axis is None or shape[axis : axis + 1] != (self.old,):
                continue
            stand_in = TensorProto(data_type=self.types.get(name) or TensorProto.FLOAT)
            stand_in.dims.extend((*shape[:axis], self.new, *shape[axis + 1 :]))
            found[number, place] = stand_in
        return found

    def widened(self, patches: Patches, *, computed: bool) -> dict[str, Shape]:
        """Return the shapes of the stand-ins by the names that they replace: all, or those that nodes compute."""
        found = {self.nodes[number].input[place]: tensor for (number, place), tensor in patches.items()}
        return {
            name: tuple(tensor.dims)
            for name, tensor in found.items()
            if not tensor.HasField("raw_data") and not (computed and name in self.constants)
        }


def _flops(node: NodeProto, shapes: Mapping[str, Shape]) -> float | None:
    """Return a node's FLOPs where a rule counts them, else None."""
    cost = cost_of(call_of(node, shapes, lambda _: 0.0))
    return cost.flops if cost.estimate == "rule" else None


def _first_contradiction(model: ModelProto, shapes: Mapping[str, Shape]) -> str | None:
    return next((reason for node in model.graph.node if (reason := contradiction(node, shapes)) is not None), None)
