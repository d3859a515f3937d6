"""From an ONNX file to a Graph of its forward pass. Start at :func:`trace_onnx`.

Weights are never loaded: sizes come from dimensions and types, the bytes of large initializers are dropped before
shape inference, and external data are never opened. This is the one analyzer that reads a file: it is a parser.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, defs, helper

from ddltool.analyzers.step.recording.op_rules import cost_of
from ddltool.analyzers.step.tracing.onnx_shapes import (
    SMALL_ELEMENTS,
    Batch,
    Inferred,
    call_of,
    contradiction,
    infer,
    inputs_of,
    label,
    set_dimensions,
    sort_nodes,
)
from ddltool.artifacts import read_bytes
from ddltool.errors import InputError, one_line
from ddltool.graph import Graph, Op

# Bytes that protobuf can read at most.
_LARGEST_MODEL = 2**31
# Element types, as ONNX numbers them: floating-point ones; those of 8 bits; packed ones with their bits; and all those of
# quantised weights.
_FLOATING = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16})
_FLOAT8 = frozenset(
    {TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E5M2FNUZ}
)
_PACKED_BITS: Mapping[int, int] = {TensorProto.INT4: 4, TensorProto.UINT4: 4, TensorProto.FLOAT4E2M1: 4}
_QUANTISED = _FLOAT8 | _PACKED_BITS.keys() | {TensorProto.INT8, TensorProto.UINT8}

# By op type, the indices of inputs that hold settings: scales and zero points of quantised tensors, output sizes.
# A constant that is only read at these indices is no parameter, and no transfer.
_SETTINGS: Mapping[str, frozenset[int]] = {
    **dict.fromkeys(["QuantizeLinear", "DequantizeLinear"], frozenset([1, 2])),
    **dict.fromkeys(["ConvInteger", "MatMulInteger"], frozenset([2, 3])),
    **dict.fromkeys(["QLinearConv", "QLinearMatMul", "QLinearAdd", "QLinearMul"], frozenset([1, 2, 4, 5, 6, 7])),
    **dict.fromkeys(["QLinearGlobalAveragePool", "QLinearAveragePool", "QLinearLeakyRelu"], frozenset([1, 2, 3, 4])),
    **dict.fromkeys(["QLinearSigmoid", "QLinearSoftmax"], frozenset([1, 2, 3, 4])),
    "QGemm": frozenset([1, 2, 4, 5, 7, 8]),
    "Resize": frozenset([1, 2, 3]),
    "Upsample": frozenset([1]),
}


def trace_onnx(path: str, *, batch_size: int | None = None, bindings: Mapping[str, int] | None = None) -> Graph:
    """Return the forward graph of an ONNX file: FLOPs, bytes and where these come from, no durations.

    Each weight is a recv op: every floating-point initializer that a node reads (running statistics, too, which a worker
    needs to run the model), and every Constant or ConstantOfShape node in the place of one. In quantised models int8 and
    4-bit weights and int32 biases are weights, but scales and zero points are not. Sizes are as stored in the file.
    ``meta["dtype"]`` is the type of most FLOPs; ``meta["note"]`` names work that is not counted in full.

    Args:
        batch_size: see :func:`~.onnx_shapes.set_dimensions`.
        bindings: sizes of symbolic dimensions by name, see there.

    Raises InputError for a file that is no ONNX model, inputs that no node makes, external data outside the file's folder,
    symbolic dimensions without a size and sizes without a dimension, a ``batch_size`` other than the file's fixed one, and
    shapes that contradict each other.
    """
    model = _read_model(path)
    _check_numbers(model, path)
    _check_tensors(model, Path(path))
    model = _inline_functions(model, path)
    was_sorted = sort_nodes(model.graph, path)
    notes = ["the nodes were not in topological order and have been sorted"] if was_sorted else []
    batch = set_dimensions(model.graph, bindings or {}, batch_size, path)
    _drop_weights(model)
    inferred = infer(model)
    _check_shapes(model, inferred, batch, path)
    if batch.symbolic and batch_size is None:
        notes.append("the batch dimension is symbolic and taken as 1 (--batch-size)")
    return _GraphBuilder(model, inferred, path).build(batch.size, notes)


def _read_model(path: str) -> ModelProto:
    """Read and parse a file, with its weights. Raises InputError for a file that is too large or no ONNX model."""
    from google.protobuf.message import DecodeError

    data = read_bytes(path, _LARGEST_MODEL)
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except (DecodeError, UnicodeDecodeError):
        raise InputError(path, "is not an ONNX file, or is cut off", "export or copy it again") from None
    if not model.graph.node or not model.opset_import or model.ir_version <= 0:
        raise InputError(path, "is not an ONNX model (no graph, operator set or version)", "export it again")
    return model


_ABOVE_ZERO = ("strides", "dilations", "kernel_shape", "group")
"""Attributes whose numbers must be 1 or more."""


def _check_numbers(model: ModelProto, path: str) -> None:
    """Raise InputError for an operator set that this onnx does not know, a negative dimension, or an attribute below 1.

    The attributes are strides, dilations, kernel sizes and numbers of groups.
    """
    newest = defs.onnx_opset_version()
    for entry in model.opset_import:
        if entry.domain in ("", "ai.onnx") and not 1 <= entry.version <= newest:
            raise InputError(path, f"is of operator set {entry.version}", f"export it for one of 1 to {newest}")
    for tensor in _tensors(model.graph):
        if min(tensor.dims, default=0) < 0:
            problem = f"tensor {tensor.name!r} has a dimension of {min(tensor.dims)}"
            raise InputError(path, problem, "dimensions are 0 or more; export it again")
    for node in model.graph.node:
        for attribute in node.attribute:
            numbers = list(attribute.ints)
            if attribute.type == AttributeProto.INT:
                numbers.append(attribute.i)
            if attribute.name in _ABOVE_ZERO and min(numbers, default=1) < 1:
                problem = f"{attribute.name} of {node.op_type} {node.name!r} has {min(numbers)}"
                raise InputError(path, problem, "it must be at least 1; export it again")


def _tensors(graph: GraphProto) -> list[TensorProto]:
    """Return every tensor of a graph and its subgraphs: initializers and tensor attributes."""
    tensors = list(graph.initializer)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                tensors.append(attribute.t)
            # An attribute holds one graph or a list of graphs, which is empty for an attribute of another type.
            subgraphs = [attribute.g] if attribute.type == AttributeProto.GRAPH else attribute.graphs
            for subgraph in subgraphs:
                tensors += _tensors(subgraph)
    return tensors


def _check_tensors(model: ModelProto, path: Path) -> None:
    """Raise InputError for unknown element types, and for external data outside the folder of the model at ``path``.

    No external file is opened.
    """
    known_types = set(TensorProto.DataType.values())
    types = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.value_info)}
    for tensor in _tensors(model.graph):
        types[tensor.name] = tensor.data_type
        if tensor.data_location == TensorProto.EXTERNAL:
            _check_location(tensor, path)
    unknown = next((name for name, data_type in types.items() if data_type not in known_types), None)
    if unknown is not None:
        problem = f"tensor {unknown!r} has the element type {types[unknown]}, which this onnx package does not know"
        raise InputError(str(path), problem, "install a newer onnx, or export it again")


def _check_location(tensor: TensorProto, path: Path) -> None:
    """Raise InputError unless a tensor's external data lie in the folder of the model at ``path``, or below it.

    Links in paths are resolved first, so that none leads outside.
    """
    folder = path.resolve().parent
    location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
    target = (folder / location).resolve()
    if not location or Path(location).is_absolute() or not target.is_relative_to(folder):
        problem = f"tensor {tensor.name!r} points to external data at {location!r}, outside the model's folder"
        raise InputError(str(path), problem, "external data must lie beside the model")


def _inline_functions(model: ModelProto, path: str) -> ModelProto:
    """Return the model with calls of its own functions replaced by their nodes. Raises InputError if onnx cannot do that."""
    if not model.functions:
        return model
    from onnx import inliner

    try:
        return inliner.inline_local_functions(model)
    except Exception as error:  # the inliner is native code and raises bare RuntimeErrors
        raise InputError(
            path, f"its functions cannot be inlined ({one_line(str(error))[:200]})", "export it again"
        ) from error


def _drop_weights(model: ModelProto) -> None:
    """Clear the bytes of tensors with more than ``SMALL_ELEMENTS``, whose values shape inference does not use."""
    for tensor in _tensors(model.graph):
        if math.prod(tensor.dims) > SMALL_ELEMENTS:
            for field in ("raw_data", "float_data", "double_data", "int32_data", "int64_data", "uint64_data"):
                tensor.ClearField(field)


def _check_shapes(model: ModelProto, inferred: Inferred, batch: Batch, path: str) -> None:
    """Raise InputError for the first node whose input shapes contradict each other.

    ``batch``: of the model's inputs, for the remedy; ``path``: the file, for messages.
    """
    for node in model.graph.node:
        problem = contradiction(node, inferred.shapes)
        if problem is not None:
            remedy = "give the batch size that its constants hold, or " if batch.symbolic else ""
            raise InputError(path, problem, f"{remedy}export the model again")


_BIAS_INPUTS = (("QLinearConv", 8), ("DequantizeLinear", 0))
"""(op type, index of the input) of inputs that may be a quantised bias."""
_STATISTICS_INPUTS = slice(3, 5)
"""A BatchNormalization's running mean and variance among its inputs: parameters that are not trained."""


class _Weight(NamedTuple):
    """The size of a weight as the file stores it."""

    size_bytes: float
    elements: int


class _GraphBuilder:
    """Turns a sorted model and its inferred shapes into a graph."""

    def __init__(self, model: ModelProto, inferred: Inferred, path: str) -> None:
        """Find which tensors may be parameters; ``model``: with sorted nodes, ``path``: the file, for messages."""
        self.graph = model.graph
        self.path = path
        self.opset = max(entry.version for entry in model.opset_import)
        self.shapes, self.types = inferred.shapes, inferred.types
        self.data = {name for node in self.graph.node for name in _data_inputs(node)}
        """Names of tensors that some node reads as data (not as settings): the constants among them are parameters."""
        self.biases = {
            name
            for node in self.graph.node
            for index, name in enumerate(node.input)
            if (node.op_type, index) in _BIAS_INPUTS
        }
        """Names of quantised biases, the only int32 tensors that are parameters; others hold shapes and indices."""

    def build(self, batch: int | None, notes: list[str]) -> Graph:
        """Return the graph: recv ops of the weights, then the nodes in file order.

        ``batch``: the samples of its inputs, None without a batch. ``notes``: remarks for the graph's meta.
        """
        weights = self._weights()
        producer: dict[str, str] = {name: f"recv/{name}" for name in weights}
        ops = [
            Op(name=f"recv/{name}", kind="recv", resource="channel:0", size_bytes=weight.size_bytes, parameter=name)
            for name, weight in weights.items()
        ]
        name_counts: Counter[str] = Counter()
        flops_by_type: Counter[int] = Counter()
        for node in self.graph.node:
            if len(node.output) == 1 and node.output[0] in weights:
                continue  # the node's output is a weight, which has a recv
            name = _unique_name(node.name or node.op_type, name_counts)  # a file's names may be missing or repeated
            op = self._compute_op(node, name, producer)
            ops.append(op)
            flops_by_type[self._arithmetic_type(node)] += int(op.flops)
            producer |= {output: name for output in node.output if output}  # an optional output may have no name
        statistics = {
            name
            for node in self.graph.node
            if node.op_type == "BatchNormalization"
            for name in node.input[_STATISTICS_INPUTS]
        }
        meta: dict[str, str | int | float | bool | None] = {
            "framework": "onnx",
            "dtype": self._main_dtype(flops_by_type, weights),
            "opset": self.opset,
            "parameter_elements": sum(weight.elements for weight in weights.values()),
            "trainable_elements": sum(weight.elements for name, weight in weights.items() if name not in statistics),
        }
        notes = notes + self._uncounted_notes()
        if notes:
            meta["note"] = "; ".join(notes)
        name = self.graph.name or Path(self.path).stem
        return Graph.from_ops(name, "inference", ops, batch_size=batch, meta=meta, where=self.path)

    def _weights(self) -> dict[str, _Weight]:
        """Return every weight that some node reads as data, by name, in file order.

        Weights are initializers of a floating-point or quantised type, and constants of several floating-point
        elements.
        """
        weights: dict[str, _Weight] = {}
        for tensor in self.graph.initializer:
            is_bias = tensor.data_type == TensorProto.INT32 and tensor.name in self.biases
            is_weight = tensor.data_type in _FLOATING or tensor.data_type in _QUANTISED or is_bias
            if is_weight and tensor.name in self.data:
                weights[tensor.name] = self._weight(tensor.name)
        initializer_names = {tensor.name for tensor in self.graph.initializer}
        for node in self.graph.node:
            has_constant_shape = node.op_type == "ConstantOfShape" and initializer_names.issuperset(node.input)
            if not node.output or not (has_constant_shape or node.op_type == "Constant"):
                continue
            name = node.output[0]
            is_floating = self.types.get(name) in _FLOATING
            if name in self.data and is_floating and math.prod(self.shapes.get(name, ())) > 1:
                weights[name] = self._weight(name)
        return weights

    def _weight(self, name: str) -> _Weight:
        """Return the size of a weight whose shape and type are known."""
        elements = math.prod(self.shapes[name])
        return _Weight(_stored_bytes(elements, self.types[name]), elements)

    def _total_bytes(self, names: Iterable[str]) -> float:
        """Return the bytes of the distinct tensors of known shape among the names; others count as 0."""
        total_bytes = 0.0
        for name in {name for name in names if name in self.shapes}:
            data_type = self.types.get(name, TensorProto.FLOAT)  # an unknown type is taken for float32
            total_bytes += _stored_bytes(math.prod(self.shapes[name]), data_type)
        return total_bytes

    def _arithmetic_type(self, node: NodeProto) -> int:
        """Return the element type that a node computes in: that of its first floating-point or quantised input, else 0."""
        types = (self.types.get(name, 0) for name in node.input)
        return next((data_type for data_type in types if data_type in _FLOATING | _QUANTISED), 0)

    def _main_dtype(self, flops_by_type: Counter[int], weights: Mapping[str, _Weight]) -> str:
        """Return the name of the element type of most FLOPs, or of most weights if there are no FLOPs, else "float32".

        ``flops_by_type``: by ONNX's number of the type, 0: unknown, which does not count. ``weights``: by name. Unsigned
        8-bit integers are called ``int8``, too, as both run at the same rate.
        """
        counts = Counter({element_type: flops for element_type, flops in flops_by_type.items() if element_type})
        if not counts.total():
            for name, weight in weights.items():
                counts[self.types[name]] += weight.elements
        if not counts:
            return "float32"
        main_type = counts.most_common(1)[0][0]
        name = str(helper.tensor_dtype_to_np_dtype(main_type).name)
        return "int8" if name == "uint8" else name

    def _uncounted_notes(self) -> list[str]:
        """Return notes on work that is not counted in full, because of unknown shapes or subgraphs; [] if there is none."""
        notes = []
        read_names = {name for node in self.graph.node for name in inputs_of(node)}
        read_names |= {value.name for value in self.graph.output}
        unsized_nodes = [
            node
            for node in self.graph.node
            if any(name not in self.shapes for name in read_names.intersection(node.output))
        ]
        if unsized_nodes:
            count = f"{len(unsized_nodes)} of {len(self.graph.node)} nodes make a tensor of unknown shape"
            notes.append(f"{count} (first: {label(unsized_nodes[0])}); their work is counted in part")
        nodes_with_subgraphs = [
            node for node in self.graph.node if any(item.HasField("g") or item.graphs for item in node.attribute)
        ]
        if nodes_with_subgraphs:
            notes.append(f"the work inside {label(nodes_with_subgraphs[0])}'s subgraphs is not counted")
        return notes

    def _compute_op(self, node: NodeProto, name: str, producer: dict[str, str]) -> Op:
        """Return a node's compute op. ``producer``: the op that makes each tensor, by tensor name."""
        cost = cost_of(call_of(node, self.shapes, self._total_bytes))
        # The ops that it depends on, each once; a tensor without one is an input of the model or a setting.
        sources = dict.fromkeys(producer[tensor] for tensor in inputs_of(node) if tensor in producer)
        return Op(
            name=name,
            kind="compute",
            flops=cost.flops,
            size_bytes=cost.size_bytes,
            inputs=tuple(sources),
            op_type=f"onnx.{node.op_type}",
            estimate=cost.estimate,
            gemm=cost.gemm,
        )


def _unique_name(name: str, name_counts: Counter[str]) -> str:
    """Return a name that no earlier op has, with a number where it is needed: ``Conv``, then ``Conv_1``.

    ``name_counts``: how often each name was asked for so far, in which this call is counted.
    """
    name_counts[name] += 1
    if name_counts[name] == 1:
        return name
    # The numbered name may itself be that of an earlier op, and is counted like any other.
    return _unique_name(f"{name}_{name_counts[name] - 1}", name_counts)


def _data_inputs(node: NodeProto) -> list[str]:
    """Return the names of tensors that a node and its subgraphs read as data, not as settings (scales, zero points, sizes)."""
    settings = _SETTINGS.get(node.op_type, ())
    own_data = [name for index, name in enumerate(node.input) if name and index not in settings]
    own_input_count = sum(1 for name in node.input if name)  # an optional input that is left out has no name
    subgraph_inputs = inputs_of(node)[own_input_count:]  # inputs_of lists the node's own first
    return own_data + subgraph_inputs


def _stored_bytes(elements: int, data_type: int) -> float:
    """Return the bytes in which a tensor's elements are stored; 0 for text and unknown types. Types below 8 bits are packed."""
    if data_type in (TensorProto.UNDEFINED, TensorProto.STRING):
        return 0.0
    bits = _PACKED_BITS.get(data_type) or 8 * int(helper.tensor_dtype_to_np_dtype(data_type).itemsize)
    return float(-(-elements * bits // 8))  # rounded up
