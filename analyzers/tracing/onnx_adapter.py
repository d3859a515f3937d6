"""From an ONNX file to a Graph of its forward pass. Start at :func:`trace_onnx`.

Weights are never loaded: sizes come from dimensions and types, the bytes of large initializers are dropped before
shape inference, and external data are never opened. This is the one analyzer that reads a file: it is a parser.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from ddltool.analyzers.tracing.onnx_batch import bind_dimensions, find_batch, shapes_at
from ddltool.analyzers.tracing.onnx_shapes import Inferred, call_of, inputs_of, label, sort_nodes
from ddltool.analyzers.tracing.op_rules import cost_of
from ddltool.artifacts import read_bytes
from ddltool.errors import InputError, one_line
from ddltool.graph import Graph, Op

# Shape inference follows small tensors (shapes, axes, pads, scales); anything larger is a weight.
_KEPT_ELEMENTS = 1024
_LARGEST_BATCH = 2**31 - 1
# What protobuf itself reads.
_LARGEST_MODEL = 2**31
_FLOATING = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16})
_FLOAT8 = frozenset(
    {TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E5M2FNUZ}
)
_PACKED_BITS: Mapping[int, int] = {TensorProto.INT4: 4, TensorProto.UINT4: 4, TensorProto.FLOAT4E2M1: 4}
_QUANTISED = _FLOAT8 | _PACKED_BITS.keys() | {TensorProto.INT8, TensorProto.UINT8}

# Inputs that say how to compute and hold nothing learned: scales and zero points of quantised tensors, output sizes.
# A constant that is read at these places only is no parameter, and no transfer.
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
    """Return the forward graph of an ONNX file; durations None, flops, bytes and their provenance set.

    Every used floating-point initializer (and ConstantOfShape or Constant node that stands in for a weight) is a recv,
    running statistics included: a worker that runs the model needs them. A symbolic first dimension of an input is the
    batch, ``batch_size`` or 1; ``bindings`` gives symbolic dimensions their sizes by name. What is not counted in full is
    said in ``meta["note"]``.

    Weights count as they are stored, int8 and 4-bit weights and int32 biases of quantised models included;
    quantisation scales and zero points are no parameters. ``meta["dtype"]`` is the type of most FLOPs.

    Raises InputError for what is no ONNX file, for names that nothing makes, for external data outside the file's
    folder, for symbolic dimensions without a size or sizes without a dimension, and where the shapes cannot be inferred,
    contradict each other or do not follow ``batch_size``.
    """
    if batch_size is not None and not 1 <= batch_size <= _LARGEST_BATCH:
        raise InputError("--batch-size", f"is {batch_size}", f"it must be at least 1 and at most {_LARGEST_BATCH}")
    model = _read(path)
    _check_tensors(model, Path(path))
    model = _inlined(model, path)
    notes = ["the nodes were not in topological order and have been sorted"] if sort_nodes(model.graph, path) else []
    bind_dimensions(model.graph, bindings or {}, path)
    batch = find_batch(model.graph, path)
    if batch_size is not None and not batch.inputs:
        raise InputError("--batch-size", f"no input of {path} has a batch dimension", "leave it out")
    _drop_weights(model)
    inferred = shapes_at(model, batch, batch_size, path)
    size = (batch_size or batch.size or 1) if batch.inputs else None
    if batch.inputs and batch.size is None and batch_size is None:
        notes.append("the batch dimension is symbolic and taken as 1 (--batch-size)")
    if batch_size not in (None, batch.size) and batch.others:
        notes.append(f"inputs without the batch first keep their dimensions: {', '.join(batch.others)}")
    return _Builder(model, inferred, path).build(size, notes)


def _read(path: str) -> ModelProto:
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


def _tensors(graph: GraphProto) -> list[TensorProto]:
    """Return every tensor of a graph and its subgraphs: initializers and tensor attributes."""
    found = list(graph.initializer)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.TENSOR:
                found.append(attribute.t)
            for subgraph in [attribute.g] if attribute.type == AttributeProto.GRAPH else attribute.graphs:
                found += _tensors(subgraph)
    return found


def _check_tensors(model: ModelProto, path: Path) -> None:
    """Refuse unknown types, and external data outside the model's folder, links resolved; nothing is opened."""
    folder = path.resolve().parent
    known = set(TensorProto.DataType.values())
    types = {value.name: value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.value_info)}
    for tensor in _tensors(model.graph):
        types[tensor.name] = tensor.data_type
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
        target = (folder / location).resolve()
        if not location or Path(location).is_absolute() or not target.is_relative_to(folder):
            problem = f"tensor {tensor.name!r} points to external data at {location!r}, outside the model's folder"
            raise InputError(str(path), problem, "external data must lie beside the model")
    unknown = next((name for name, data_type in types.items() if data_type not in known), None)
    if unknown is not None:
        problem = f"tensor {unknown!r} has the element type {types[unknown]}, which this onnx package does not know"
        raise InputError(str(path), problem, "install a newer onnx, or export it again")


def _inlined(model: ModelProto, path: str) -> ModelProto:
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
    """Drop the bytes of tensors that shape inference does not follow."""
    for tensor in _tensors(model.graph):
        if math.prod(tensor.dims) > _KEPT_ELEMENTS:
            for field in ("raw_data", "float_data", "double_data", "int32_data", "int64_data", "uint64_data"):
                tensor.ClearField(field)


class _Builder:
    """Turns a sorted model and its shapes into ops."""

    def __init__(self, model: ModelProto, inferred: Inferred, path: str) -> None:
        self.graph = model.graph
        self.path = path
        self.opset = max(entry.version for entry in model.opset_import)
        self.shapes, self.types = inferred.shapes, inferred.types
        self.data = {name for node in self.graph.node for name in _data_inputs(node)}
        """Names read as data, so that a constant among them is a parameter."""
        self.biases = {
            name
            for node in self.graph.node
            for place, name in enumerate(node.input)
            if (node.op_type, place) in (("QLinearConv", 8), ("DequantizeLinear", 0))
        }
        """Quantised biases are int32, as are shapes and indices, which are no parameters."""

    def build(self, batch: int | None, notes: list[str]) -> Graph:
        """Return the graph: recvs of the weights first, then the nodes in file order; ``notes`` go to its meta."""
        weights = self._weights()
        producer: dict[str, str] = {name: f"recv/{name}" for name in weights}
        ops = [
            Op(name=f"recv/{name}", kind="recv", resource="channel:0", size_bytes=size, parameter=name)
            for name, (size, _) in weights.items()
        ]
        taken: Counter[str] = Counter()
        work: Counter[int] = Counter()
        for node in self.graph.node:
            if len(node.output) == 1 and node.output[0] in weights:
                continue  # it only stands in for a weight
            name = _unique(node.name or node.op_type, taken)
            ops.append(self._compute(node, name, producer))
            work[self._arithmetic(node)] += int(ops[-1].flops)
            producer.update(dict.fromkeys((output for output in node.output if output), name))
        elements = sum(count for _, count in weights.values())
        statistics = {
            name for node in self.graph.node if node.op_type == "BatchNormalization" for name in node.input[3:5]
        }
        meta: dict[str, str | int | float | bool | None] = {
            "framework": "onnx",
            "dtype": self._dtype(work, weights),
            "opset": self.opset,
            "parameter_elements": elements,
            "trainable_elements": sum(count for name, (_, count) in weights.items() if name not in statistics),
        }
        notes = notes + self._gaps()
        if notes:
            meta["note"] = "; ".join(notes)
        name = self.graph.name or Path(self.path).stem
        return Graph.from_ops(name, "inference", ops, batch_size=batch, meta=meta, where=self.path)

    def _weights(self) -> dict[str, tuple[float, int]]:
        """Return size in bytes and elements of every used weight, in file order."""
        found: dict[str, tuple[float, int]] = {}
        for tensor in self.graph.initializer:
            quantised = tensor.data_type in _QUANTISED or (
                tensor.data_type == TensorProto.INT32 and tensor.name in self.biases
            )
            if tensor.name in self.data and (quantised or tensor.data_type in _FLOATING):
                found[tensor.name] = self._size(tensor.name)
        constants = {tensor.name for tensor in self.graph.initializer}
        for node in self.graph.node:
            stands_in = node.op_type == "ConstantOfShape" and constants.issuperset(node.input)
            if not node.output or not (stands_in or node.op_type == "Constant"):
                continue
            name = node.output[0]
            if name in self.data and self.types.get(name) in _FLOATING and math.prod(self.shapes.get(name, ())) > 1:
                found[name] = self._size(name)
        return found

    def _size(self, name: str) -> tuple[float, int]:
        elements = math.prod(self.shapes[name])
        return _stored_bytes(elements, self.types[name]), elements

    def _bytes(self, names: Iterable[str]) -> float:
        known = {name for name in names if name in self.shapes}
        return sum(_stored_bytes(math.prod(self.shapes[name]), self.types.get(name, 1)) for name in known)

    def _arithmetic(self, node: NodeProto) -> int:
        """Return the type that a node computes in: that of its first input that is a number."""
        types = (self.types.get(name, 0) for name in node.input)
        return next((data_type for data_type in types if data_type in _FLOATING | _QUANTISED), 0)

    def _dtype(self, work: Counter[int], weights: Mapping[str, tuple[float, int]]) -> str:
        """Return the name of the type in which most FLOPs are done, else of most weights; ``int8`` for any 8 bits."""
        del work[0]
        if not sum(work.values()):
            for name, (_, elements) in weights.items():
                work[self.types[name]] += elements
        if not work:
            return "float32"
        name = str(helper.tensor_dtype_to_np_dtype(work.most_common(1)[0][0]).name)
        return "int8" if name == "uint8" else name

    def _gaps(self) -> list[str]:
        """Return notes on work that is not counted in full."""
        notes = []
        read = {name for node in self.graph.node for name in inputs_of(node)}
        read |= {value.name for value in self.graph.output}
        lost = [
            node for node in self.graph.node if any(name not in self.shapes for name in read.intersection(node.output))
        ]
        if lost:
            count = f"{len(lost)} of {len(self.graph.node)} nodes make a tensor of unknown shape"
            notes.append(f"{count} (first: {label(lost[0])}); their work is counted in part")
        nested = [node for node in self.graph.node if any(item.HasField("g") or item.graphs for item in node.attribute)]
        if nested:
            notes.append(f"the work inside {label(nested[0])}'s subgraphs is not counted")
        return notes

    def _compute(self, node: NodeProto, name: str, producer: dict[str, str]) -> Op:
        cost = cost_of(call_of(node, self.shapes, self._bytes))
        sources = dict.fromkeys(producer[source] for source in inputs_of(node) if source in producer)
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


def _unique(name: str, taken: Counter[str]) -> str:
    taken[name] += 1
    return name if taken[name] == 1 else _unique(f"{name}_{taken[name] - 1}", taken)


def _data_inputs(node: NodeProto) -> list[str]:
    """Return the names that a node reads as data, not as a quantisation scale, a zero point or a size."""
    captured = inputs_of(node)[sum(1 for name in node.input if name) :]
    settings = _SETTINGS.get(node.op_type, ())
    return [name for place, name in enumerate(node.input) if name and place not in settings] + captured


def _stored_bytes(elements: int, data_type: int) -> float:
    """Return the bytes of a tensor; types of less than 8 bits are packed."""
    if data_type in (TensorProto.UNDEFINED, TensorProto.STRING):
        return 0.0
    bits = _PACKED_BITS.get(data_type) or 8 * int(helper.tensor_dtype_to_np_dtype(data_type).itemsize)
    return float(-(-elements * bits // 8))
