"""From an ONNX file to a Graph of its forward pass. Start at :func:`trace_onnx`.

Weights are never loaded: sizes come from dimensions and types, the bytes of large initializers are dropped before
shape inference, and external data are never opened. This is the one analyzer that reads a file: it is a parser.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper

from ddltool.analyzers.tracing.onnx_costs import NodeView, Shape, cost_of
from ddltool.errors import InputError, one_line
from ddltool.graph import Graph, Op

# Shape inference follows small integer tensors (shapes, axes, pads); anything larger is a weight.
_KEPT_ELEMENTS = 1024
_FLOATING = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16})
_QUANTISED = frozenset({TensorProto.INT8, TensorProto.UINT8, TensorProto.INT4, TensorProto.UINT4})


def trace_onnx(path: str, *, batch_size: int | None = None) -> Graph:
    """Return the forward graph of an ONNX file; durations None, flops, bytes and their provenance set.

    Every used floating-point initializer (and ConstantOfShape or Constant node that stands in for a weight) is a recv,
    running statistics included: a worker that runs the model needs them. A symbolic first dimension of an input is the
    batch, ``batch_size`` or 1. Raises InputError for what is no ONNX file, for external data outside the file's folder,
    and for shapes that cannot be inferred.
    """
    model = _read(path)
    _check_external_data(model, Path(path))
    model = _inlined(model, path)
    batch = _set_batch(model.graph, batch_size, path)
    _drop_weights(model)
    try:
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except Exception as error:  # the checker raises several unrelated types
        raise InputError(
            path, f"shapes cannot be inferred ({one_line(str(error))[:200]})", "check the model"
        ) from error
    return _Builder(model, path).build(batch)


def _read(path: str) -> ModelProto:
    from google.protobuf.message import DecodeError

    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise InputError(path, "no such file", "give the path of an ONNX file") from None
    except IsADirectoryError:
        raise InputError(path, "is a folder", "give the path of an ONNX file") from None
    except OSError as error:
        raise InputError(path, f"cannot be read ({error.strerror})", "check its permissions") from None
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


def _check_external_data(model: ModelProto, path: Path) -> None:
    """Refuse external data that lie outside the model's folder, links resolved; nothing is opened."""
    folder = path.resolve().parent
    for tensor in _tensors(model.graph):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        location = next((entry.value for entry in tensor.external_data if entry.key == "location"), "")
        target = (folder / location).resolve()
        if not location or Path(location).is_absolute() or not target.is_relative_to(folder):
            problem = f"tensor {tensor.name!r} points to external data at {location!r}, outside the model's folder"
            raise InputError(str(path), problem, "external data must lie beside the model")


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


def _set_batch(graph: GraphProto, batch_size: int | None, path: str) -> int | None:
    """Write the batch into the first dimension of the inputs; return it, None when no input has one."""
    constants = {tensor.name for tensor in graph.initializer}
    batch: int | None = None
    for value in graph.input:
        dims = value.type.tensor_type.shape.dim
        if value.name in constants or not dims:
            continue
        first = dims[0]
        if batch_size is not None or first.dim_value <= 0:
            first.dim_value = batch_size or 1
        batch = batch or first.dim_value
        for place, dim in enumerate(dims):
            if dim.dim_value <= 0:
                problem = f"dimension {place} of input {value.name!r} has no size ({dim.dim_param or 'unnamed'})"
                raise InputError(path, problem, "only the first may be symbolic: export with fixed sizes")
    if batch_size is not None:
        # What was inferred for another batch contradicts this one.
        del graph.value_info[:]
        for value in graph.output:
            value.type.tensor_type.ClearField("shape")
    return batch


def _drop_weights(model: ModelProto) -> None:
    """Drop the bytes of tensors that shape inference does not follow."""
    for tensor in _tensors(model.graph):
        if math.prod(tensor.dims) > _KEPT_ELEMENTS or tensor.data_type in _FLOATING:
            for field in ("raw_data", "float_data", "double_data", "int32_data", "int64_data", "uint64_data"):
                tensor.ClearField(field)


class _Builder:
    """Turns an inferred model into ops."""

    def __init__(self, model: ModelProto, path: str) -> None:
        self.graph = model.graph
        self.path = path
        self.opset = max(entry.version for entry in model.opset_import)
        self.shapes: dict[str, Shape] = {}
        self.types: dict[str, int] = {}
        for value in (*self.graph.value_info, *self.graph.input, *self.graph.output):
            tensor = value.type.tensor_type
            self.types[value.name] = tensor.elem_type
            if tensor.HasField("shape") and all(dim.dim_value > 0 for dim in tensor.shape.dim):
                self.shapes[value.name] = tuple(dim.dim_value for dim in tensor.shape.dim)
        for initializer in self.graph.initializer:
            self.shapes[initializer.name] = tuple(initializer.dims)
            self.types[initializer.name] = initializer.data_type
        self.used = Counter(name for node in self.graph.node for name in _inputs(node))

    def build(self, batch: int | None) -> Graph:
        """Return the graph: recvs of the weights first, then the nodes in file order."""
        weights = self._weights()
        if not weights and len(self.graph.node) == 0:
            raise InputError(self.path, "has no nodes", "export it again")
        producer: dict[str, str] = {name: f"recv/{name}" for name in weights}
        ops = [
            Op(name=f"recv/{name}", kind="recv", resource="channel:0", size_bytes=size, parameter=name)
            for name, (size, _) in weights.items()
        ]
        taken: Counter[str] = Counter()
        for node in self.graph.node:
            if len(node.output) == 1 and node.output[0] in weights:
                continue  # it only stands in for a weight
            name = _unique(node.name or node.op_type, taken)
            ops.append(self._compute(node, name, producer))
            producer.update(dict.fromkeys((output for output in node.output if output), name))
        elements = sum(count for _, count in weights.values())
        statistics = {
            name for node in self.graph.node if node.op_type == "BatchNormalization" for name in node.input[3:5]
        }
        kinds = Counter(self.types.get(name, 0) for name in weights)
        dtype = helper.tensor_dtype_to_np_dtype(kinds.most_common(1)[0][0]).name if kinds else "float32"
        meta: dict[str, str | int | float | bool | None] = {
            "framework": "onnx",
            "dtype": dtype,
            "opset": self.opset,
            "parameter_elements": elements,
            "trainable_elements": sum(count for name, (_, count) in weights.items() if name not in statistics),
        }
        name = self.graph.name or Path(self.path).stem
        return Graph.from_ops(name, "inference", ops, batch_size=batch, meta=meta, where=self.path)

    def _weights(self) -> dict[str, tuple[float, int]]:
        """Return size in bytes and elements of every used weight, in file order."""
        found: dict[str, tuple[float, int]] = {}
        for tensor in self.graph.initializer:
            if self.used[tensor.name] and tensor.data_type in _FLOATING | _QUANTISED:
                found[tensor.name] = self._size(tensor.name)
        constants = {tensor.name for tensor in self.graph.initializer}
        for node in self.graph.node:
            stands_in = node.op_type == "ConstantOfShape" and node.input[0] in constants
            if not stands_in and node.op_type != "Constant":
                continue
            name = node.output[0]
            if self.used[name] and self.types.get(name) in _FLOATING and math.prod(self.shapes.get(name, ())) > 1:
                found[name] = self._size(name)
        return found

    def _size(self, name: str) -> tuple[float, int]:
        elements = math.prod(self.shapes[name])
        return float(elements * _item_bytes(self.types[name])), elements

    def _bytes(self, names: Sequence[str]) -> float:
        known = {name for name in names if name in self.shapes}
        return float(sum(math.prod(self.shapes[name]) * _item_bytes(self.types.get(name, 1)) for name in known))

    def _compute(self, node: NodeProto, name: str, producer: dict[str, str]) -> Op:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute if a.type != AttributeProto.GRAPH}
        view = NodeView(
            op_type=node.op_type,
            attributes=attributes,
            inputs=[self.shapes.get(source) for source in node.input],
            outputs=[self.shapes.get(output) for output in node.output],
            input_bytes=self._bytes(list(node.input)),
            output_bytes=self._bytes([output for output in node.output if output]),
        )
        cost = cost_of(view)
        sources = dict.fromkeys(producer[source] for source in _inputs(node) if source in producer)
        return Op(
            name=name,
            kind="compute",
            flops=cost.flops,
            size_bytes=cost.size_bytes,
            inputs=tuple(sources),
            op_type=f"onnx.{node.op_type}",
            estimate=cost.estimate,
        )


def _inputs(node: NodeProto) -> list[str]:
    """Return the names that a node reads, what its subgraphs capture from outside included."""
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        for subgraph in [attribute.g] if attribute.type == AttributeProto.GRAPH else attribute.graphs:
            inner = {output for child in subgraph.node for output in child.output}
            inner |= {value.name for value in (*subgraph.input, *subgraph.initializer)}
            names += [name for child in subgraph.node for name in _inputs(child) if name not in inner]
            names += [value.name for value in subgraph.output if value.name not in inner]
    return names


def _unique(name: str, taken: Counter[str]) -> str:
    taken[name] += 1
    return name if taken[name] == 1 else _unique(f"{name}_{taken[name] - 1}", taken)


def _item_bytes(data_type: int) -> int:
    if data_type in (TensorProto.UNDEFINED, TensorProto.STRING):
        return 0
    return int(helper.tensor_dtype_to_np_dtype(data_type).itemsize)
