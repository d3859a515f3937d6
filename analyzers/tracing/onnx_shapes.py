"""Shapes of an ONNX graph's tensors: shape inference, and constant folding where it gives up.

``onnx.shape_inference`` follows integer arithmetic on sizes but not floating-point arithmetic, so an exported
``interpolate`` would lose the shape of its output and of everything behind it. It also needs the nodes in topological
order. Start at :func:`sort_nodes` and :func:`infer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from ddltool.analyzers.tracing.op_rules import Call, Shape
from ddltool.errors import InputError, one_line

# Inputs that only say how large the output is, by op type.
_SIZE_INPUTS: Mapping[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "Pad": (1, 3),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Tile": (1,),
    "Upsample": (1,),
}
# Arithmetic on sizes that cannot make a small tensor large.
_FOLDED = frozenset(
    [
        *(
            "Abs",
            "Add",
            "Cast",
            "Ceil",
            "Concat",
            "Constant",
            "ConstantOfShape",
            "Div",
            "Equal",
            "Floor",
            "Gather",
            "Greater",
        ),
        *("Identity", "Less", "Max", "Min", "Mod", "Mul", "Neg", "ReduceProd", "Reshape", "Round", "Slice", "Sqrt"),
        *("Squeeze", "Sub", "Unsqueeze", "Where"),
    ]
)
_FOLDED_ELEMENTS = 64
# Native shape inference reserves memory for as many dimensions as a file claims.
_MOST_DIMENSIONS = 1024
_LONGEST = 1_000_000
# Their initial states, inputs 5 and 6, have the batch as the second dimension.
RECURRENT = frozenset(["LSTM", "GRU", "RNN"])

# A constant that takes the place of a node's input, by node number and input number.
Patches = dict[tuple[int, int], TensorProto]


@dataclass(frozen=True, kw_only=True)
class Inferred:
    """Shapes by tensor name where they are known, and element types (TensorProto.DataType, 0 where unknown)."""

    shapes: Mapping[str, Shape]
    types: Mapping[str, int]


def infer(model: ModelProto, path: str) -> Inferred:
    """Return the shapes and types of the tensors of a topologically sorted model.

    Constant arithmetic on sizes is folded where onnx.shape_inference does not follow it. Raises InputError when shape
    inference fails altogether.
    """
    _check_ranks(model.graph, path)
    propagate = False
    while True:
        try:
            found = _read_off(onnx.shape_inference.infer_shapes(model, data_prop=propagate).graph)
        except Exception as error:  # the checker raises several unrelated types
            problem = f"shapes cannot be inferred ({one_line(str(error))[:200]})"
            raise InputError(path, problem, "check the model") from error
        if all(name in found.shapes for node in model.graph.node for name in node.output if name):
            return found
        # It takes every vector for a list of sizes and keeps about 150 bytes for each of its elements.
        if not propagate and all(max(shape) <= _LONGEST for shape in found.shapes.values() if len(shape) == 1):
            propagate = True
            continue
        patches = _foldable(model, found)
        if not patches:
            return found
        model = patched(model, patches)  # each round turns at least one computed size into a constant: it ends


def _check_ranks(graph: GraphProto, path: str) -> None:
    """Refuse a tensor of sizes so long that no tensor has that many dimensions."""
    declared = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.value_info)
    }
    declared |= {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    for node in graph.node:
        for place in _SIZE_INPUTS.get(node.op_type, ()):
            dims = declared.get(node.input[place], []) if place < len(node.input) else []
            if max(dims, default=0) > _MOST_DIMENSIONS:
                problem = f"{label(node)} reads {node.input[place]!r}, of {show(tuple(dims))}, as sizes"
                raise InputError(path, problem, "there is one for every dimension")


def _read_off(graph: GraphProto) -> Inferred:
    shapes: dict[str, Shape] = {}
    types: dict[str, int] = {}
    inner = len(graph.value_info)
    for number, value in enumerate((*graph.value_info, *graph.input, *graph.output)):
        tensor = value.type.tensor_type
        types[value.name] = tensor.elem_type
        # Inside, 0 is an empty list of sizes; in what an exporter declares it often stands for "unknown".
        known = (dim.dim_value > 0 or (number < inner and dim.HasField("dim_value")) for dim in tensor.shape.dim)
        if tensor.HasField("shape") and all(known):
            shapes[value.name] = tuple(dim.dim_value for dim in tensor.shape.dim)
    for initializer in graph.initializer:
        shapes[initializer.name] = tuple(initializer.dims)
        types[initializer.name] = initializer.data_type
    return Inferred(shapes=shapes, types=types)


def _foldable(model: ModelProto, found: Inferred) -> Patches:
    """Return constants for the computed sizes of nodes whose output shape is unknown."""
    lost = [
        number
        for number, node in enumerate(model.graph.node)
        if node.op_type in _SIZE_INPUTS and node.output and node.output[0] not in found.shapes
    ]
    if not lost:
        return {}
    constants = {tensor.name for tensor in model.graph.initializer}
    values = _small_values(model, found)
    patches: Patches = {}
    for number in lost:
        node = model.graph.node[number]
        for place in _SIZE_INPUTS[node.op_type]:
            source = node.input[place] if place < len(node.input) else ""
            if source in values and source not in constants:
                patches[number, place] = numpy_helper.from_array(values[source], "")
    return patches


def _small_values(model: ModelProto, found: Inferred) -> dict[str, NDArray[Any]]:
    """Return the small tensors that do not depend on data, evaluated."""
    values: dict[str, NDArray[Any]] = {}
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) <= _FOLDED_ELEMENTS and tensor.data_location != TensorProto.EXTERNAL:
            _keep(values, tensor.name, tensor)
    for node in model.graph.node:
        if node.domain not in ("", "ai.onnx") or len(node.output) != 1:
            continue
        if node.op_type == "Shape" and node.input and node.input[0] in found.shapes:
            bounds: dict[str, int] = {attribute.name: attribute.i for attribute in node.attribute}
            values[node.output[0]] = np.array(
                found.shapes[node.input[0]][bounds.get("start", 0) : bounds.get("end")], dtype=np.int64
            )
        elif node.op_type == "Constant" and any(math.prod(a.t.dims) > _FOLDED_ELEMENTS for a in node.attribute):
            continue
        elif node.op_type in _FOLDED and all(name in values or not name for name in node.input):
            if node.op_type == "ConstantOfShape" and any(
                values[name].dtype.kind not in "iu" or np.prod(values[name], dtype=float) > _FOLDED_ELEMENTS
                for name in inputs_of(node)
            ):
                continue
            outcome = _evaluated(node, values, model)
            if outcome is not None and outcome.size <= _FOLDED_ELEMENTS:
                values[node.output[0]] = outcome
    return values


def _keep(values: dict[str, NDArray[Any]], name: str, tensor: TensorProto) -> None:
    try:
        values[name] = numpy_helper.to_array(tensor)
    except (KeyError, ValueError, TypeError):  # its bytes were dropped, it holds strings or nothing known
        return


def _evaluated(node: NodeProto, values: Mapping[str, NDArray[Any]], model: ModelProto) -> NDArray[Any] | None:
    from onnx.reference import ReferenceEvaluator

    names = [name for name in dict.fromkeys(node.input) if name]
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(values[name].dtype), None) for name in names
    ]
    outputs = [helper.make_tensor_value_info(node.output[0], TensorProto.UNDEFINED, None)]
    single = helper.make_model(
        helper.make_graph([node], "one", inputs, outputs), opset_imports=list(model.opset_import)
    )
    try:
        (outcome,) = ReferenceEvaluator(single).run(None, {name: values[name] for name in names})
    except Exception:  # whatever a malformed node makes numpy raise: its value stays unknown
        return None
    return np.asarray(outcome)


def patched(model: ModelProto, patches: Patches) -> ModelProto:
    """Return a copy of the model in which constants take the place of some inputs."""
    copy = ModelProto()
    copy.CopyFrom(model)
    taken = len(copy.graph.initializer)
    for (number, place), tensor in patches.items():
        constant = copy.graph.initializer.add()
        constant.CopyFrom(tensor)
        constant.name = f"//constant {taken} of {number}.{place}"  # no exporter writes such names
        taken += 1
        copy.graph.node[number].input[place] = constant.name
    return copy


def inputs_of(node: NodeProto) -> list[str]:
    """Return the names that a node reads, what its subgraphs capture from outside included."""
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        for subgraph in [attribute.g] if attribute.type == AttributeProto.GRAPH else attribute.graphs:
            inner = {output for child in subgraph.node for output in child.output}
            inner |= {value.name for value in (*subgraph.input, *subgraph.initializer)}
            inner |= {tensor.values.name for tensor in subgraph.sparse_initializer}
            names += [name for child in subgraph.node for name in inputs_of(child) if name not in inner]
            names += [value.name for value in subgraph.output if value.name not in inner]
    return names


def call_of(node: NodeProto, shapes: Mapping[str, Shape], size_bytes: Callable[[Iterable[str]], float]) -> Call:
    """Return a node as the cost rules see it; ``size_bytes`` gives the bytes of named tensors."""
    known = [math.prod(shapes[name]) for name in (*node.input, *node.output) if name in shapes]
    return Call(
        name=node.op_type,
        inputs=[shapes.get(name) for name in node.input],
        output=shapes.get(node.output[0]) if node.output else None,
        named={a.name: helper.get_attribute_value(a) for a in node.attribute if a.type != AttributeProto.GRAPH},
        elements=float(max(known, default=0)),
        read_bytes=size_bytes(node.input),
        written_bytes=size_bytes(filter(None, node.output)),
    )


def contradiction(node: NodeProto, shapes: Mapping[str, Shape]) -> str | None:
    """Return what is impossible about a node's shapes, or None.

    Shape inference compares neither a constant Reshape target with what it reshapes nor all inner dimensions.
    """
    places = (0, 3 if node.op_type.startswith("QLinear") else 1)
    source, second = (shapes.get(node.input[place]) if place < len(node.input) else None for place in places)
    output = shapes.get(node.output[0]) if node.output else None
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    if node.op_type == "Reshape" and source is not None and output is not None:
        if math.prod(source) != math.prod(output):
            return f"{label(node)} reshapes {show(source)} to {show(output)}"
    elif node.op_type == "Resize" and source and output and source[0] != output[0]:
        return f"{label(node)} resizes {show(source)} to {show(output)}"
    elif node.op_type in ("Gemm", "MatMul", "MatMulInteger", "QLinearMatMul") and source and second:
        left = source[0] if attributes.get("transA") else source[-1]
        right = second[-1] if attributes.get("transB") or len(second) == 1 else second[-2]
        if left != right:
            return f"{label(node)} multiplies {show(source)} by {show(second)}"
    elif (
        node.op_type in ("Conv", "ConvInteger", "QLinearConv")
        and source
        and second
        and min(len(source), len(second)) > 1
    ):
        if source[1] != second[1] * attributes.get("group", 1):
            return f"{label(node)} convolves {show(source)} with {show(second)}"
    elif node.op_type in RECURRENT and source and len(source) > 1 and not attributes.get("layout"):
        for state in (shapes.get(name, ()) for name in node.input[5:7]):
            if len(state) > 1 and state[1] != source[1]:
                return f"{label(node)} reads {show(source)} and starts from {show(state)}"
    return None


def label(node: NodeProto) -> str:
    """Return how a message names a node: by its name, or else by what it makes."""
    name = node.name or next((output for output in node.output if output), "?")
    return f"node {name!r} ({node.op_type})"


def show(shape: Shape | None) -> str:
    """Return a shape as ``1x3x224x224``."""
    return "of unknown shape" if shape is None else "x".join(map(str, shape)) or "a scalar"


def sort_nodes(graph: GraphProto, path: str) -> bool:
    """Put every node after the nodes that it reads from, first in file first; return whether the order changed.

    Raises InputError for names that nothing makes or that two nodes make, and for cycles.
    """
    known = {tensor.name for tensor in graph.initializer} | {value.name for value in graph.input}
    known |= {tensor.values.name for tensor in graph.sparse_initializer}
    maker: dict[str, int] = {}
    for number, node in enumerate(graph.node):
        for name in filter(None, node.output):
            if name in maker or name in known:
                problem = f"{label(node)} makes {name!r}, which exists already"
                raise InputError(path, problem, "every tensor needs a name of its own: export the model again")
            maker[name] = number
    graph_of = nx.DiGraph()
    graph_of.add_nodes_from(range(len(graph.node)))
    for number, node in enumerate(graph.node):
        for name in inputs_of(node):
            if name in maker:
                graph_of.add_edge(maker[name], number)
            elif name not in known:
                problem = f"{label(node)} reads {name!r}, which nothing makes"
                raise InputError(path, problem, "an input must be a graph input, an initializer or a node's output")
    if all(source < number for source, number in graph_of.edges):
        return False
    try:
        order = list(nx.lexicographical_topological_sort(graph_of))
    except nx.NetworkXUnfeasible:
        first, _ = nx.find_cycle(graph_of)[0]
        problem = f"{label(graph.node[first])} reads its own output"
        raise InputError(path, problem, "a graph has no cycle: export again") from None
    copies = [NodeProto.FromString(graph.node[number].SerializeToString()) for number in order]
    del graph.node[:]
    graph.node.extend(copies)
    return True
