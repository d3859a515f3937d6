"""FLOPs and memory traffic of one ONNX node, by the same conventions as the torch rules: a multiply-add counts two."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddltool.analyzers.oracle.op_types import factors, names_in
from ddltool.graph import NO_GEMM, Estimate, Gemm

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeView:
    """A node as the rules see it; shapes are None where shape inference could not tell."""

    op_type: str
    attributes: Mapping[str, Any]
    inputs: Sequence[Shape | None]
    outputs: Sequence[Shape | None]
    input_bytes: float
    output_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCost:
    """Work of one node."""

    flops: float
    size_bytes: float
    estimate: Estimate
    gemm: Gemm = NO_GEMM


# FLOPs, and count, m, n and k of the matrix product that they are.
Counted = tuple[float, Gemm]
# Looks at a tensor in another way, or concerns shapes only.
_FREE = names_in(
    "Reshape Flatten Squeeze Unsqueeze Identity Dropout Shape Size Constant ConstantOfShape NonZero Optional "
    "OptionalGetElement OptionalHasElement SequenceEmpty SequenceConstruct SequenceAt"
)
# Moves data without arithmetic.
_COPIES = names_in(
    "Transpose Concat Slice Split Pad Tile Expand Resize Upsample Cast CastLike DepthToSpace SpaceToDepth "
    "ReverseSequence ScatterND ScatterElements Scatter Compress Where Range EyeLike OneHot Trilu Unique"
)
# Only the looked-up elements are touched, not the whole table.
_LOOKUPS = names_in("Gather GatherElements GatherND")
# FLOPs per element of the largest tensor involved.
_PER_ELEMENT = factors(
    {
        1.0: "Add Sub Mul Div Neg Abs Sqrt Reciprocal Floor Ceil Round Sign Min Max Sum Mean Clip Relu LeakyRelu PRelu "
        "ThresholdedRelu Equal Greater GreaterOrEqual Less LessOrEqual And Or Xor Not IsNaN IsInf Mod BitShift "
        "Pow Exp Log Erf Sin Cos Tan Atan Sinh Cosh ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 "
        "ArgMax ArgMin CumSum TopK GlobalAveragePool GlobalMaxPool GlobalLpPool RandomNormalLike "
        "RandomUniformLike Bernoulli",
        2.0: "ReduceL2 ReduceSumSquare ReduceLogSum ReduceLogSumExp QuantizeLinear DequantizeLinear",
        4.0: "Sigmoid Tanh Elu Selu Celu Softplus Softsign HardSigmoid HardSwish Mish Gelu BatchNormalization "
        "InstanceNormalization LayerNormalization GroupNormalization RMSNormalization MeanVarianceNormalization "
        "SkipLayerNormalization",
        5.0: "Softmax LogSoftmax Hardmax LpNormalization",
    }
)
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


def is_setting(op_type: str, place: int) -> bool:
    """Return whether a node's input number ``place`` is a quantisation scale, a zero point or a size."""
    return place in _SETTINGS.get(op_type, ())


def cost_of(node: NodeView) -> NodeCost:
    """Return the cost of a node; op types in no table cost their memory traffic and count as ``default``."""
    if node.op_type in _FREE:
        return NodeCost(flops=0.0, size_bytes=0.0, estimate="free")
    moved = node.input_bytes + node.output_bytes
    if node.op_type in _LOOKUPS:
        return NodeCost(flops=0.0, size_bytes=2 * node.output_bytes, estimate="rule")
    if node.op_type in _COPIES:
        return NodeCost(flops=0.0, size_bytes=moved, estimate="rule")
    rule = _RULES.get(node.op_type)
    counted = rule(node) if rule is not None else None
    if counted is not None:
        return NodeCost(flops=counted[0], size_bytes=moved, estimate="rule", gemm=counted[1])
    elements = max((math.prod(shape) for shape in (*node.inputs, *node.outputs) if shape is not None), default=0)
    factor = _PER_ELEMENT.get(node.op_type)
    return NodeCost(flops=(factor or 1.0) * elements, size_bytes=moved, estimate="rule" if factor else "default")


def _shape(shapes: Sequence[Shape | None], place: int) -> Shape | None:
    return shapes[place] if place < len(shapes) else None


def _convolution(node: NodeView) -> Counted | None:
    """Two per multiply-add: every output element sums over the kernel and its group's input channels."""
    output, weight = _shape(node.outputs, 0), _weight(node)
    return None if output is None or weight is None else _filtered(node, output, weight)


def _transposed_convolution(node: NodeView) -> Counted | None:
    source, weight = _shape(node.inputs, 0), _weight(node)
    return None if source is None or weight is None else _filtered(node, source, weight)


def _filtered(node: NodeView, seen: Shape, weight: Shape) -> Counted:
    """Return what every position of ``seen`` (n, channels, ...) costs that meets all filters (channels, taps ...) once."""
    groups, taps = int(node.attributes.get("group", 1)), math.prod(weight[1:])
    positions = math.prod((seen[0], *seen[2:])) if len(seen) > 1 else 1
    gemm = (float(groups), float(positions), weight[0] / max(groups, 1), float(taps))
    return 2.0 * math.prod(seen) * taps, gemm


def _weight(node: NodeView) -> Shape | None:
    return _shape(node.inputs, 3 if node.op_type == "QLinearConv" else 1)


def _gemm(node: NodeView) -> Counted | None:
    output, left = _shape(node.outputs, 0), _shape(node.inputs, 0)
    if output is None or left is None or len(left) != 2:
        return None
    inner = left[0 if node.attributes.get("transA") else 1]
    return 2.0 * math.prod(output) * inner, (1.0, float(math.prod(output[:-1])), float(output[-1]), float(inner))


def _matmul(node: NodeView) -> Counted | None:
    output, left, right = _shape(node.outputs, 0), _shape(node.inputs, 0), _shape(node.inputs, 1)
    if output is None or not left:
        return None
    flops = 2.0 * math.prod(output) * left[-1]
    if len(output) < 2:
        return flops, NO_GEMM
    one = right is not None and len(right) == 2  # the batch then counts as rows
    count, rows = (1, math.prod(output[:-1])) if one else (math.prod(output[:-2]), output[-2])
    return flops, (float(count), float(rows), float(output[-1]), float(left[-1]))


def _pooling(node: NodeView) -> Counted | None:
    output, kernel = _shape(node.outputs, 0), node.attributes.get("kernel_shape")
    return None if output is None or kernel is None else (float(math.prod(output) * math.prod(kernel)), NO_GEMM)


def _local_response(node: NodeView) -> Counted | None:
    output = _shape(node.outputs, 0)
    return None if output is None else (float(math.prod(output) * (int(node.attributes.get("size", 1)) + 3)), NO_GEMM)


def _recurrent(gates: int) -> Callable[[NodeView], Counted | None]:
    def count(node: NodeView) -> Counted | None:
        source, weight, recurrent = (_shape(node.inputs, place) for place in range(3))
        if source is None or weight is None or recurrent is None or len(source) != 3 or len(weight) != 3:
            return None
        if weight[1] % gates:
            return None
        length, batch, _ = source
        gemm = (float(length * weight[0]), float(batch), float(weight[1]), float(weight[2] + recurrent[-1]))
        return 2.0 * length * batch * (math.prod(weight) + math.prod(recurrent)), gemm

    return count


_RULES: Mapping[str, Callable[[NodeView], Counted | None]] = {
    **dict.fromkeys(("Conv", "ConvInteger", "QLinearConv"), _convolution),
    "ConvTranspose": _transposed_convolution,
    "Gemm": _gemm,
    **dict.fromkeys(("MatMul", "MatMulInteger", "QLinearMatMul"), _matmul),
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), _pooling),
    "LRN": _local_response,
    "LSTM": _recurrent(4),
    "GRU": _recurrent(3),
    "RNN": _recurrent(1),
}
