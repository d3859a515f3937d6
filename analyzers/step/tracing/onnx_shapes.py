"""Sizes of an ONNX graph's dimensions and shapes of its tensors.

Symbolic dimensions get their sizes first (:func:`set_dimensions`). Then, node by node, ``onnx.shape_inference`` infers
the shapes of the outputs, and ``onnx.reference`` computes small outputs that follow from constants: exporters write
sizes as arithmetic in the graph. Inference of the whole graph does not follow such arithmetic through floating-point
numbers (an ``interpolate``), and takes memory for every element of every vector. Nodes must be in topological order
(:func:`sort_nodes`). Start at :func:`infer`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    TensorProto,
    TypeProto,
    helper,
    numpy_helper,
    shape_inference,
)
from onnx.reference import ReferenceEvaluator

from ddltool.analyzers.step.recording.op_rules import Call, Shape
from ddltool.errors import InputError, did_you_mean

# Most elements of a tensor whose values decide shapes (shapes, axes, pads, scales); a larger tensor is a weight.
SMALL_ELEMENTS = 1024
_LARGEST_SIZE = 2**31 - 1
"""The largest size of a dimension that is accepted."""
_NAMELESS = frozenset(["", "?", "-1"])  # how exporters mark a dimension of any size
# Ops whose initial states, inputs 5 and 6, have the batch as the second dimension.
_RECURRENT = frozenset(["LSTM", "GRU", "RNN"])


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The batch of a model's inputs."""

    size: int | None
    """None: no input has dimensions."""
    symbolic: bool
    """Whether the file leaves the batch size open."""


def set_dimensions(graph: GraphProto, bindings: Mapping[str, int], batch_size: int | None, path: str) -> Batch:
    """Write sizes into a graph's symbolic dimensions, and return its batch.

    The batch is every input's first dimension that is symbolic and has no binding. If there is none, the batch is fixed: the
    size of the first input's first dimension.

    Args:
        bindings: sizes by name; a dimension without a name is called ``INPUT.PLACE`` (the input and the dimension's index).
        batch_size: size of a symbolic batch; None: 1.
        path: the file, for messages.

    Raises InputError for a name that no input has, an impossible size, symbolic dimensions without a size, and a batch size
    other than the fixed one.
    """
    if batch_size is not None and not 1 <= batch_size <= _LARGEST_SIZE:
        raise InputError("--batch-size", f"is {batch_size}", f"it must be at least 1 and at most {_LARGEST_SIZE}")
    constants = {tensor.name for tensor in graph.initializer}
    inputs = {value.name: value.type.tensor_type.shape.dim for value in graph.input if value.name not in constants}
    # Which symbolic dimensions there are, and which of them are the batch.
    first_places = _name_dimensions(inputs)
    _check_bindings(bindings, first_places, path)
    leading = [dims[0] for dims in inputs.values() if dims]  # each input's first dimension
    # A symbolic dimension has no positive value.
    batch_names = {dim.dim_param for dim in leading if dim.dim_value <= 0 and dim.dim_param not in bindings}
    unbound = [name for name in first_places if name not in bindings and name not in batch_names]
    if unbound:
        listed = ", ".join(f"{name} ({first_places[name]})" for name in unbound)
        remedy = f"give them with --bind {','.join(f'{name}=SIZE' for name in unbound)}"
        raise InputError(path, f"has dimensions without a size: {listed}", remedy)
    if batch_size is not None and not leading:
        raise InputError("--batch-size", f"no input of {path} has a batch dimension", "leave it out")
    if not batch_names:
        size = _fixed_batch(leading, bindings)
        if batch_size not in (None, size):
            problem = f"is {batch_size}, but {path} has a fixed batch of {size}"
            raise InputError("--batch-size", problem, "leave it out, or export with a symbolic batch dimension")
        _write_sizes(graph, bindings)
        return Batch(size=size, symbolic=False)
    size = batch_size or 1
    if size != 1:
        # A declared shape without the batch's name may hold the batch size of the export as a number.
        for value in (*graph.value_info, *graph.output):
            if batch_names.isdisjoint(dim.dim_param for dim in value.type.tensor_type.shape.dim):
                value.type.tensor_type.ClearField("shape")
    _write_sizes(graph, {**bindings, **dict.fromkeys(batch_names, size)})
    return Batch(size=size, symbolic=True)


def _fixed_batch(leading: Sequence[Any], bindings: Mapping[str, int]) -> int | None:
    """Return the batch size that a file or a binding fixes, that of the first input; None: no input has dimensions.

    ``leading``: the first dimension of each input that has dimensions (ONNX's ``Dimension``).
    """
    if not leading:
        return None
    first = leading[0]
    return bindings.get(first.dim_param) or int(first.dim_value)


def _name_dimensions(inputs: Mapping[str, Any]) -> dict[str, str]:
    """Give the inputs' symbolic dimensions without a name the name ``INPUT.INDEX``, such as ``images.0``, in the model itself.

    Returns, by the name of each symbolic dimension, where it occurs first, as ``images[0]``. ``inputs``: by an input's
    name, its dimensions (ONNX's ``Dimension``).
    """
    first_places: dict[str, str] = {}
    for name, dims in inputs.items():
        for index, dim in enumerate(dims):
            if dim.dim_value > 0:  # it has a size
                continue
            if dim.dim_param in _NAMELESS:
                dim.dim_param = f"{name}.{index}"
            first_places.setdefault(dim.dim_param, f"{name}[{index}]")
    return first_places


def _write_sizes(graph: GraphProto, sizes: Mapping[str, int]) -> None:
    """Write sizes by name into a graph's symbolic dimensions; those without one become dimensions of unknown size."""
    for value in (*graph.input, *graph.value_info, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
            elif dim.dim_value <= 0:
                dim.Clear()  # a declared size of 0 or less means unknown


def _check_bindings(bindings: Mapping[str, int], known: Mapping[str, str], path: str) -> None:
    """Raise InputError for a binding whose name no dimension has, or whose size is impossible.

    ``known``: where each symbolic dimension stands first, by its name.
    """
    for name, size in bindings.items():
        if name not in known:
            remedy = did_you_mean(name, known) if known else "leave it out: all its dimensions have sizes"
            raise InputError("--bind", f"no input of {path} has a dimension {name!r}", remedy)
        if not 1 <= size <= _LARGEST_SIZE:
            raise InputError("--bind", f"{name} is {size}", f"it must be at least 1 and at most {_LARGEST_SIZE}")


@dataclass(frozen=True, kw_only=True)
class Inferred:
    """What is known of a model's tensors, by name."""

    shapes: Mapping[str, Shape]
    """Tensors of unknown shape are missing."""
    types: Mapping[str, int]
    """Element types (TensorProto.DataType), 0 for unknown."""


def infer(model: ModelProto) -> Inferred:
    """Return the shapes and types of the tensors of a model with sorted nodes and inputs without symbolic dimensions.

    For one node after another, the types of its outputs are inferred, and small outputs that follow from constants are
    computed, since later shapes may depend on them. Where inference finds no shape, as for operators of other domains, the
    shape that the file declares is taken.
    """
    graph = model.graph
    declared = {value.name: value.type for value in (*graph.value_info, *graph.output)}
    types = {value.name: value.type for value in graph.input}
    values: dict[str, TensorProto] = {}
    for tensor in graph.initializer:
        types[tensor.name] = helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
        if math.prod(tensor.dims) <= SMALL_ELEMENTS and tensor.data_location != TensorProto.EXTERNAL:
            values[tensor.name] = tensor
    for node in graph.node:
        single = _single_node_model(node, types, values, model.opset_import)
        inferred = _output_types(single)
        for name in filter(None, node.output):
            types[name] = inferred.get(name) or TypeProto()
            if _shape(types[name]) is None and name in declared:
                types[name] = declared[name]
        values |= _small_outputs(node, single, types, values)
    shapes = {name: _shape(type_) for name, type_ in types.items()}
    return Inferred(
        shapes={name: shape for name, shape in shapes.items() if shape is not None},
        types={name: type_.tensor_type.elem_type for name, type_ in types.items()},
    )


def _shape(type_: TypeProto) -> Shape | None:
    """Return the shape of a tensor type, None if it has no shape or a dimension has no size."""
    tensor = type_.tensor_type
    is_known = tensor.HasField("shape") and all(dim.HasField("dim_value") for dim in tensor.shape.dim)
    return tuple(dim.dim_value for dim in tensor.shape.dim) if is_known else None


def _single_node_model(
    node: NodeProto,
    types: Mapping[str, TypeProto],
    values: Mapping[str, TensorProto],
    opset_imports: Iterable[OperatorSetIdProto],
) -> ModelProto:
    """Return a model that consists of one node, for shape inference and the reference evaluator.

    Its inputs have the given types; those with known values are initializers.
    """
    names = dict.fromkeys(inputs_of(node))
    inputs = [helper.make_value_info(name, types.get(name, TypeProto())) for name in names]
    outputs = [helper.make_value_info(name, TypeProto()) for name in node.output if name]
    initializers = [values[name] for name in names if name in values]
    graph = helper.make_graph([node], "single", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=list(opset_imports))


def _output_types(single: ModelProto) -> dict[str, TypeProto]:
    """Return the inferred types of the outputs of a model of one node, by name; {} if inference refuses the node."""
    try:
        return {value.name: value.type for value in shape_inference.infer_shapes(single).graph.output}
    except Exception:  # inference raises several unrelated types for a node that contradicts its operator
        return {}


def _small_outputs(
    node: NodeProto, single: ModelProto, types: Mapping[str, TypeProto], values: Mapping[str, TensorProto]
) -> dict[str, TensorProto]:
    """Return the values of a node's outputs by name, computed from known values; {} unless all are small and computable.

    ``single``: the model of this node. ``types``, ``values``: of all tensors so far. External data are never opened.
    """
    shapes = [_shape(types[name]) for name in node.output if name]
    if any(shape is None or math.prod(shape) > SMALL_ELEMENTS for shape in shapes):
        return {}
    if any(item.HasField("g") or item.t.data_location == TensorProto.EXTERNAL for item in node.attribute):
        return {}
    feeds: dict[str, NDArray[np.float32]] = {}
    if node.op_type in ("Shape", "Size"):  # these read a shape only: zeros that take no memory will do
        source = _shape(types[node.input[0]])
        if source is None:
            return {}
        feeds[node.input[0]] = np.broadcast_to(np.float32(0), source)
    else:
        is_random = not node.input and node.op_type != "Constant"  # nodes without inputs draw random numbers, say
        if is_random or any(name and name not in values for name in node.input):
            return {}
    try:
        outputs = ReferenceEvaluator(single).run(None, feeds)
        arrays = zip(single.graph.output, outputs, strict=True)
        return {value.name: numpy_helper.from_array(np.asarray(array), value.name) for value, array in arrays}
    except Exception:  # whatever a malformed node makes numpy raise: its values stay unknown
        return {}


def inputs_of(node: NodeProto) -> list[str]:
    """Return the names of the tensors that a node reads, then of those that its subgraphs read from outside themselves."""
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        subgraphs = [attribute.g] if attribute.type == AttributeProto.GRAPH else attribute.graphs
        for subgraph in subgraphs:
            made_inside = {output for child in subgraph.node for output in child.output}
            made_inside |= {value.name for value in (*subgraph.input, *subgraph.initializer)}
            made_inside |= {tensor.values.name for tensor in subgraph.sparse_initializer}
            names += [name for child in subgraph.node for name in inputs_of(child) if name not in made_inside]
            names += [value.name for value in subgraph.output if value.name not in made_inside]
    return names


def call_of(node: NodeProto, shapes: Mapping[str, Shape], size_bytes: Callable[[Iterable[str]], float]) -> Call:
    """Return a node as a call for the cost rules; ``size_bytes``: a function from tensors' names to their bytes in all."""
    element_counts = [math.prod(shapes[name]) for name in (*node.input, *node.output) if name in shapes]
    return Call(
        name=node.op_type,
        inputs=[shapes.get(name) for name in node.input],
        output=shapes.get(node.output[0]) if node.output else None,
        named={
            item.name: helper.get_attribute_value(item) for item in node.attribute if item.type != AttributeProto.GRAPH
        },
        elements=float(max(element_counts, default=0)),
        read_bytes=size_bytes(node.input),
        written_bytes=size_bytes(filter(None, node.output)),
    )


def contradiction(node: NodeProto, shapes: Mapping[str, Shape]) -> str | None:
    """Return a message that says how a node's shapes contradict each other; None if they are possible, or not known.

    Checks what shape inference leaves out: constant targets of Reshape and Resize, the inner dimensions of products, the
    channels of convolutions, and the batch of recurrent states.
    """
    kind = node.op_type
    second_index = 3 if kind.startswith("QLinear") else 1  # the first input's scale and zero point come between
    source, second = (shapes.get(node.input[index]) if index < len(node.input) else None for index in (0, second_index))
    output = shapes.get(node.output[0]) if node.output else None
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    if kind == "Reshape" and source is not None and output is not None and math.prod(source) != math.prod(output):
        return f"{label(node)} reshapes {show(source)} to {show(output)}"
    if kind == "Resize" and source and output and source[0] != output[0]:  # a constant size with another batch
        return f"{label(node)} resizes {show(source)} to {show(output)}"
    if kind in ("Gemm", "MatMul", "MatMulInteger", "QLinearMatMul") and source and second:
        left_inner = source[0] if attributes.get("transA") else source[-1]
        right_inner = second[-1] if attributes.get("transB") or len(second) == 1 else second[-2]
        if left_inner != right_inner:
            return f"{label(node)} multiplies {show(source)} by {show(second)}"
    if kind in ("Conv", "ConvInteger", "QLinearConv") and source and second and min(len(source), len(second)) > 1:
        channels_of_filters = second[1] * attributes.get("group", 1)  # filters are (out, in / groups, taps ...)
        if source[1] != channels_of_filters:
            return f"{label(node)} convolves {show(source)} with {show(second)}"
    if (
        kind in _RECURRENT and source and len(source) > 1 and not attributes.get("layout")
    ):  # layout 0: (steps, batch, ...)
        for state_name in node.input[5:7]:
            state = shapes.get(state_name, ())
            if len(state) > 1 and state[1] != source[1]:
                return f"{label(node)} reads {show(source)} and starts from {show(state)}"
    return None


def label(node: NodeProto) -> str:
    """Return how messages call a node: its name, or else its first output's, and its op type."""
    name = node.name or next((output for output in node.output if output), "?")
    return f"node {name!r} ({node.op_type})"


def show(shape: Shape | None) -> str:
    """Return a shape in words: ``1x3x224x224``, ``a scalar``, ``of unknown shape`` for None."""
    return "of unknown shape" if shape is None else "x".join(map(str, shape)) or "a scalar"


def sort_nodes(graph: GraphProto, path: str) -> bool:
    """Sort the nodes topologically in place, and return whether the order changed; ties keep the file's order.

    ``path``: the file, for messages. Raises InputError for a tensor that nothing makes or that is made twice, and for cycles.
    """
    given_names = {tensor.name for tensor in graph.initializer} | {value.name for value in graph.input}
    given_names |= {tensor.values.name for tensor in graph.sparse_initializer}
    producer: dict[str, int] = {}
    for number, node in enumerate(graph.node):
        for name in filter(None, node.output):
            if name in producer or name in given_names:
                problem = f"{label(node)} makes {name!r}, which exists already"
                raise InputError(path, problem, "every tensor needs a name of its own: export the model again")
            producer[name] = number
    edges = nx.DiGraph()  # between the indices of nodes, from the maker of a tensor to its readers
    edges.add_nodes_from(range(len(graph.node)))
    for number, node in enumerate(graph.node):
        for name in inputs_of(node):
            if name in producer:
                edges.add_edge(producer[name], number)
            elif name not in given_names:
                problem = f"{label(node)} reads {name!r}, which nothing makes"
                raise InputError(path, problem, "an input must be a graph input, an initializer or a node's output")
    if all(source < number for source, number in edges.edges):
        return False
    try:
        order = list(nx.lexicographical_topological_sort(edges))
    except nx.NetworkXUnfeasible:
        first, _ = nx.find_cycle(edges)[0]
        problem = f"{label(graph.node[first])} reads its own output"
        raise InputError(path, problem, "a graph has no cycle: export again") from None
    # Copies, because the list is emptied before they are put back.
    copies = [NodeProto.FromString(graph.node[number].SerializeToString()) for number in order]
    del graph.node[:]
    graph.node.extend(copies)
    return True
