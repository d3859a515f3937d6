"""What an op is and what it costs, from its name and shapes: one table for aten's names and ONNX's, a rule for each entry.

Convolutions, matrix products, attention and recurrent layers are counted from their shapes (a multiply-add counts two),
not by ``torch.utils.flop_counter``, whose rule for the backward pass of a convolution ignores ``groups`` and which knows
neither recurrent layers nor ``_grouped_mm``. Element-wise, reduction, normalisation, pooling and copy ops are bound by
memory; they get a small FLOP count per element and the bytes they read and write. Views and allocations cost nothing.
Whatever is in no table falls back to its memory traffic and is counted as ``default``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import numpy as np

from ddltool.graph import NO_GEMM, Estimate, Gemm

Shape = tuple[int, ...]
Product = tuple[float, Gemm]
"""FLOPs, and the (count, m, n, k) of ``count`` matrix products (m, k) @ (k, n) that take them."""


def names_in(text: str) -> frozenset[str]:
    """Return the names in a text, which are separated by white space."""
    return frozenset(text.split())


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The properties of an op from which its cost follows."""

    name: str
    """Without namespace and overload: ``convolution``, ``Conv``."""
    inputs: Sequence[Shape | None]
    """Shapes in the order of the arguments; None for what is no tensor, or of unknown shape."""
    output: Shape | None
    named: Mapping[str, Any] = field(default_factory=dict)
    """aten's arguments by name, tensors as shapes; ONNX's attributes."""
    elements: float
    """Number of elements of the largest input or output."""
    read_bytes: float
    written_bytes: float
    dtype: str = ""
    pointwise: bool = False
    """Whether torch marks the op as element-wise."""

    def shape(self, place: int) -> Shape | None:
        """Return the shape of the input with the index ``place``; None: there is no such tensor, or its shape is unknown."""
        return self.inputs[place] if place < len(self.inputs) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Work of one op: floating-point operations, bytes read plus written, and the shape of its matrix product."""

    flops: float
    size_bytes: float
    estimate: Estimate
    written_bytes: float = 0.0
    """The part of ``size_bytes`` that is written."""
    gemm: Gemm = NO_GEMM
    """(count, m, n, k) of the products behind it, of the forward pass for a backward op; (rows, 0, 0, elements of a row) of an
    op that works row by row, such as a softmax; zeros of any other."""
    dtype: str = ""
    """torch's name of the type that it computes in."""


# Nothing is computed or moved: memory is handed out, or a tensor is looked at in another way.
FREE = names_in(
    "empty empty_like empty_strided new_empty new_empty_strided detach alias lift_fresh lift_fresh_copy _unsafe_view "
    "view reshape _reshape_alias expand t transpose permute squeeze unsqueeze select slice split split_with_sizes "
    "chunk unbind as_strided as_strided_ unfold diagonal view_as_real view_as_complex sym_size sym_numel sym_stride "
    "resolve_conj resolve_neg scalar_tensor _assert_tensor_metadata _assert_async _assert_scalar "
    "Reshape Flatten Squeeze Unsqueeze Identity Dropout Shape Size Constant ConstantOfShape NonZero Optional "
    "OptionalGetElement OptionalHasElement SequenceEmpty SequenceConstruct SequenceAt"
)
# Data movement without arithmetic.
_COPIES = names_in(
    "copy copy_ clone contiguous _to_copy cat stack constant_pad_nd pad repeat fill fill_ zero_ zeros zeros_like ones "
    "ones_like full full_like new_zeros new_ones new_full arange linspace eye slice_scatter select_scatter "
    "slice_backward select_backward index_put index_put_ _unsafe_index_put index_add index_add_ scatter scatter_ "
    "scatter_add scatter_add_ embedding_dense_backward triu tril masked_fill masked_fill_ masked_scatter where "
    "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d upsample_nearest2d_backward "
    "upsample_bilinear2d_backward upsample_bicubic2d_backward _foreach_copy_ one_hot im2col col2im reflection_pad2d "
    "reflection_pad2d_backward _embedding_bag_dense_backward "
    "Transpose Concat Slice Split Pad Tile Expand Resize Upsample Cast CastLike DepthToSpace SpaceToDepth "
    "ReverseSequence ScatterND ScatterElements Scatter Compress Where Range EyeLike OneHot Trilu Unique"
)
# Only the looked-up rows are touched, not the whole table.
_LOOKUPS = names_in(
    "embedding index index_select gather _unsafe_index take take_along_dim Gather GatherElements GatherND"
)
# FLOPs per element of the largest tensor involved; sources of the factors: one operation per visit of an element, five
# for an exponential with its subtraction, sum and division, as counted in the usual softmax and normalisation listings.
_FACTORS: Mapping[float, str] = {
    1.0: "sum mean amax amin max min argmax argmin prod any all norm linalg_vector_norm cumsum bernoulli bernoulli_ "
    "rand rand_like randn randn_like normal_ uniform_ random_ sort topk roll flip histc bincount unique_consecutive "
    "Add Sub Mul Div Neg Abs Sqrt Reciprocal Floor Ceil Round Sign Min Max Sum Mean Clip Relu LeakyRelu PRelu "
    "ThresholdedRelu Equal Greater GreaterOrEqual Less LessOrEqual And Or Xor Not IsNaN IsInf Mod BitShift "
    "Pow Exp Log Erf Sin Cos Tan Atan Sinh Cosh ReduceSum ReduceMean ReduceMax ReduceMin ReduceProd ReduceL1 "
    "ArgMax ArgMin CumSum TopK GlobalAveragePool GlobalMaxPool GlobalLpPool RandomNormalLike RandomUniformLike Bernoulli "
    "float8_scale to_float8",
    2.0: "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss "
    "ReduceL2 ReduceSumSquare ReduceLogSum ReduceLogSumExp QuantizeLinear DequantizeLinear",
    3.0: "var var_mean std std_mean logsumexp native_dropout native_dropout_backward",
    4.0: "_native_batch_norm_legit_no_training _batch_norm_with_update "
    "Sigmoid Tanh Elu Selu Celu Softplus Softsign HardSigmoid HardSwish Mish Gelu BatchNormalization "
    "InstanceNormalization LayerNormalization GroupNormalization RMSNormalization MeanVarianceNormalization "
    "SkipLayerNormalization",
    5.0: "_softmax _safe_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data _fused_rms_norm "
    "_fused_rms_norm_backward Softmax LogSoftmax Hardmax LpNormalization",
    7.0: "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit",
    8.0: "mse_loss_backward gelu gelu_backward silu silu_backward tanh_backward sigmoid_backward",
    10.0: "native_layer_norm_backward native_group_norm_backward native_batch_norm_backward",
}
_PER_ELEMENT = {name: factor for factor, text in _FACTORS.items() for name in text.split()} | {
    f"{pool}{rank}d{suffix}{direction}": 1.0
    for pool, suffix in (("avg_pool", ""), ("_adaptive_avg_pool", ""), ("max_pool", "_with_indices"))
    for rank in (1, 2, 3)
    for direction in ("", "_backward")
}


_SOFTMAXES = names_in("_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data")
_ROW_NORMS = ("native_layer_norm", "_fused_rms_norm")
# What one access to the memory of a GPU reads at least.
_SECTOR_BYTES = 32.0


def cost_of(call: Call) -> Cost:
    """Return the cost of a call, by the first rule that knows its name: free, matrix product, copy, or work per element.

    An op in no table is counted as one operation per element of its largest tensor. O(1).
    """
    written = call.written_bytes
    moved = call.read_bytes + written
    dtype = call.dtype
    if call.name in FREE:
        return Cost(flops=0.0, size_bytes=0.0, estimate="free", written_bytes=written)
    product = _product(call)
    if product is not None:
        flops, gemm = product
        if dtype.startswith("complex"):  # a product of complex numbers takes four of real ones
            count, *sides = gemm
            gemm = cast(Gemm, (4.0 * count, *sides))
            flops = 4.0 * flops
        if not flops:
            gemm = NO_GEMM  # an empty product runs no matrix kernel
        return Cost(flops=flops, size_bytes=moved, estimate="rule", written_bytes=written, gemm=gemm, dtype=dtype)
    if call.name in _LOOKUPS:  # it reads as many bytes as it writes, and not the whole table
        return Cost(flops=0.0, size_bytes=2.0 * written, estimate="rule", written_bytes=written, dtype=dtype)
    if call.name in _COPIES:
        return Cost(flops=0.0, size_bytes=moved, estimate="rule", written_bytes=written, dtype=dtype)
    rows = _rows(call)
    if call.name.startswith("nll_loss") and rows[0]:
        # For every row one element is read, by a whole sector of memory, and the target, a number of 8 bytes. Forward, what
        # is written is negligible; backward it is the gradient of all elements, which is 0 but for one of each row.
        looked_up = rows[0] * (_SECTOR_BYTES + 8.0)
        moved = looked_up + (written if call.name.endswith("_backward") else 0.0)
    # An op that works in place ("add_") has the factor of the op without the underscore.
    factor = _PER_ELEMENT.get(call.name.removesuffix("_")) or _PER_ELEMENT.get(call.name)
    estimate: Estimate = "rule" if factor is not None or call.pointwise else "default"
    flops = (factor or 1.0) * call.elements
    return Cost(flops=flops, size_bytes=moved, estimate=estimate, written_bytes=written, gemm=rows, dtype=dtype)


def _rows(call: Call) -> Gemm:
    """Return (rows, 0, 0, elements of a row) of an op that works row by row; zeros of any other.

    Such ops are softmax along the last dimension, layer and RMS norms, batch norms of images with the batch's own statistics
    (their rows are channels), ``nll_loss``, which reads one element of a row (so that its rows have 1), and average pools of
    images: a row for each element that they write, of the elements that it is made of (backward on average).
    """
    named, name = call.named, call.name
    shape = named.get("self", named.get("input", named.get("grad_output")))
    if not isinstance(shape, tuple) or not shape:
        return NO_GEMM
    if name.startswith("nll_loss"):
        # A row for each target: the classes are dimension 1, or the only one of a single sample.
        classes = shape[-1] if len(shape) < 3 else shape[1]
        targets = math.prod(shape) // max(1, classes)
        return (float(targets), 0.0, 0.0, 1.0)
    if name.startswith("avg_pool2d") and call.output and isinstance(named.get("kernel_size"), (list, tuple)):
        # Each averaged window reads its elements once (forward), or adds to them once (backward).
        windows = named.get("grad_output") if name.endswith("_backward") else call.output
        visits = math.prod(named["kernel_size"]) * math.prod(windows or ())
        written = float(math.prod(call.output))
        return (written, 0.0, 0.0, visits / max(1.0, written))
    if name in _SOFTMAXES and named.get("dim") in (-1, len(shape) - 1):
        width = shape[-1]
    elif name.startswith(_ROW_NORMS) and isinstance(named.get("normalized_shape"), (list, tuple)):
        width = math.prod(named["normalized_shape"])
    elif normal_type(name).startswith("native_batch_norm") and len(shape) > 2 and _has_own_statistics(call):
        width = math.prod(shape) // max(1, shape[1])
    else:
        return NO_GEMM
    return (float(math.prod(shape) // max(1, width)), 0.0, 0.0, float(width))


def _has_own_statistics(call: Call) -> bool:
    """Return whether a batch norm normalizes by its batch's statistics, or is the backward pass of one that did."""
    return "no_training" not in call.name and bool(call.named.get("training", call.named.get("train", True)))


def multiplies(name: str) -> bool:
    """Return whether an op of this name multiplies matrices; such an op computes in the type of its inputs."""
    return name in _PRODUCTS or _is_attention(name) or name.startswith(_RECURRENT)


def _is_attention(name: str) -> bool:
    """Return whether an op of this name is fused attention, forward or backward, of any backend."""
    return "scaled_dot_product" in name and "attention" in name


def _product(call: Call) -> Product | None:
    """Return FLOPs and (count, m, n, k) of an op that multiplies matrices or has a rule of its own, None for any other.

    (count, m, n, k) stands for ``count`` products of (m, k) by (k, n) matrices, here and in all rules below.
    """
    if _is_attention(call.name):
        return _attention(call)
    if call.name.startswith(_RECURRENT):
        # This package's op has a list of weights, torch's own op has arguments weight0, weight1, ...
        weights = call.named.get("weights") or [value for key, value in call.named.items() if key.startswith("weight")]
        matrices = [tuple(weight) for weight in weights if isinstance(weight, tuple) and len(weight) == 2]  # no biases
        inputs = call.named["input"] if "input" in call.named else call.named["x"]
        return _recurrent_layers(inputs, matrices, backward="backward" in call.name) if matrices else None
    # All other ops have a rule by their name.
    rule = _PRODUCTS.get(call.name)
    return rule(call) if rule is not None else None


def _product_of_inputs(left_place: int = 0, right_place: int = 1) -> Callable[[Call], Product | None]:
    """Return the rule (see ``_PRODUCTS``) of an op that multiplies two of its inputs, given by their indices.

    ``addmm``, for example, has its bias at 0, and its factors at 1 and 2.
    """

    def count_product(call: Call) -> Product | None:
        """Return FLOPs and (count, m, n, k) of the two inputs' product, None where a shape is unknown."""
        left, right = call.shape(left_place), call.shape(right_place)
        return None if left is None or right is None else _matmul(left, right)

    return count_product


def _matmul(left: Shape, right: Shape) -> Product | None:
    """Return FLOPs and (count, m, n, k) of (..., m, k) @ (..., k, n), None for a factor without dimensions.

    A vector counts as a matrix of one row (left) or column (right). If the right factor is a single matrix, the leading
    dimensions of the left one count as rows; otherwise the leading dimensions, broadcast, make the count.
    """
    if not left or not right:
        return None
    left = (1, *left) if len(left) == 1 else left
    right = (*right, 1) if len(right) == 1 else right
    if len(right) > 2:
        count = math.prod(np.broadcast_shapes(left[:-2], right[:-2]))
        m = left[-2]
    else:
        count = 1
        m = math.prod(left[:-1])
    k, n = left[-1], right[-1]
    return 2.0 * count * m * n * k, (float(count), float(m), float(n), float(k))


def _gemm(call: Call) -> Product | None:
    """Return FLOPs and (count, m, n, k) of ONNX's Gemm, whose factors may be transposed; None where a shape is unknown."""
    left, right = call.shape(0), call.shape(1)
    if left is None or right is None or len(left) != 2:
        return None
    left = left[::-1] if call.named.get("transA") else left
    right = right[::-1] if call.named.get("transB") else right
    return _matmul(left, right)


def _linear(call: Call) -> Product | None:
    """Return FLOPs and (count, m, n, k) of ``linear``: inputs (..., in) times a weight (out, in) transposed.

    All dimensions of the inputs but the last count as rows.
    """
    inputs, weight = call.inputs[0] or (), call.inputs[1] or ()
    in_features = weight[1]
    rows = math.prod(inputs) // max(in_features, 1)
    return _matmul((rows, in_features), weight[::-1])


def _grouped(call: Call) -> Product | None:
    """Return FLOPs and (count, m, n, k) of ``_grouped_mm``, which multiplies each group of rows by a matrix of its own.

    Three forms, by the number of dimensions: (t, k) x (g, k, n) divides the t rows among g groups; (g, m, k) x (k, t)
    divides the t columns; (m, t) x (t, n), the gradient of the groups' matrices, divides the inner dimension t, which
    costs as much as one product. Every group is taken to get as many rows or columns as any other.
    """
    left, right = call.inputs[0] or (), call.inputs[1] or ()
    if len(left) == 2 and len(right) == 3:
        rows = left[0]
        groups, k, n = right
        return 2.0 * rows * k * n, (float(groups), rows / groups, float(n), float(k))
    if len(left) == 3 and len(right) == 2:
        columns = right[1]
        groups, m, k = left
        return 2.0 * m * k * columns, (float(groups), float(m), columns / groups, float(k))
    return _matmul(left, right)


def convolution(visited: Shape | None, filters: Shape | None, groups: int) -> Product | None:
    """Return FLOPs of a convolution and its implicit matrix products (count, m, n, k), None where a shape is unknown.

    There is one product per group: m counts the positions of all samples, n the group's output channels, and k its
    input channels times the filter's taps. ``visited``: the shape of the tensor at whose every position every filter
    element is multiplied once: the output, or the input of a transposed convolution. ``filters``: (out, in / groups,
    taps ...), of a transposed convolution (in, out / groups, taps ...).
    """
    if visited is None or filters is None:
        return None
    samples = visited[0] if len(visited) == len(filters) else 1  # else a single image without a batch dimension
    positions = samples * math.prod(visited[2:])
    flops = 2.0 * positions * math.prod(filters)
    return flops, (float(groups), float(positions), filters[0] / max(groups, 1), float(math.prod(filters[1:])))


def _aten_convolution(call: Call) -> Product | None:
    """Return FLOPs and (count, m, n, k) of aten's convolution, forward or backward.

    The backward pass takes the FLOPs of the forward pass once for each gradient that ``output_mask`` asks for, the
    input's and the weight's; (count, m, n, k) is that of the forward pass.
    """
    arguments, is_backward = call.named, call.name.endswith("_backward")
    output = arguments["grad_output"] if is_backward else call.output
    visited = arguments["input"] if arguments["transposed"] else output
    product = convolution(visited, arguments["weight"], arguments["groups"])
    if product is None:
        return None
    flops, gemm = product
    # The mask has a flag for the input, the weight and the bias, whose gradient is a sum and no product.
    gradients = sum(map(bool, arguments["output_mask"][:2])) if is_backward else 1
    return flops * gradients, gemm


def _onnx_convolution(call: Call) -> Product | None:
    """Return FLOPs and (count, m, n, k) of ONNX's convolutions, None where a shape is unknown."""
    # The weight is input 1; a quantized convolution has its input's scale and zero point before it.
    weight = call.shape(3 if call.name == "QLinearConv" else 1)
    # The tensor at whose every position the filters are multiplied.
    visited = call.shape(0) if call.name == "ConvTranspose" else call.output
    return convolution(visited, weight, int(call.named.get("group", 1)))


# Drawing the random numbers of dropout takes fused attention as long as widening the heads by so many columns in each of its
# products, forward and backward (measured on an H200 with heads of 64 and 128: 1.05 and 0.6 ps a score).
_DROPOUT_COLUMNS = (130.0, 32.0)


def _attention(call: Call) -> Product | None:
    """Return FLOPs and (heads of all samples, queries, keys, width of a head) of fused attention; None without shapes.

    There are two products in the forward pass, and five in the backward pass, which computes the scores again. FLOPs
    count the whole square of queries and keys, as is usual in reports of MFU. The keys returned are halved under a
    causal mask, because kernels skip half of the scores. The width returned is the mean over the products, so that each
    takes 2 x heads x queries x keys x width operations, plus ``_DROPOUT_COLUMNS`` where dropout draws random numbers.
    """
    arguments = call.named
    if not all(isinstance(arguments.get(part), tuple) for part in ("query", "key", "value")):
        return None
    query, key, value = arguments["query"], arguments["key"], arguments["value"]
    heads, queries, score_width = math.prod(query[:-2]), query[-2], query[-1]
    keys, value_width = key[-2], value[-1]
    # How many products have the width of queries and keys, and how many that of the values.
    score_products, value_products = (3.0, 2.0) if "backward" in call.name else (1.0, 1.0)
    products = score_products + value_products
    width = (score_products * score_width + value_products * value_width) / products
    flops = 2.0 * products * heads * queries * keys * width
    if arguments.get("dropout_p"):
        forward_columns, backward_columns = _DROPOUT_COLUMNS
        width += backward_columns if "backward" in call.name else forward_columns
    is_causal = bool(arguments.get("is_causal", False)) and queries > 1
    visited_keys = keys / 2 if is_causal else float(keys)
    return flops, (float(heads), float(queries), visited_keys, width)


def _recurrent_layers(inputs: Shape, matrices: Sequence[Shape], *, backward: bool = False) -> Product:
    """Return FLOPs and (count, m, n, k) of recurrent layers whose weight matrices are (gates x state, inputs) each.

    Every step of every sample is multiplied by every weight once, and in the backward pass twice, for the gradients of
    inputs and weights. The steps of a layer run one after another, so the count is steps x layers x directions, with
    the mean number of inputs for k. ``inputs``: (steps, batch, features). ``matrices``: the shapes of all weight matrices,
    at least one, the first layer's first.
    """
    rows = math.prod(inputs[:-1])  # steps x batch
    flops = 2.0 * rows * sum(math.prod(matrix) for matrix in matrices)
    steps = float(inputs[0])
    batch = rows / steps if steps else 0.0
    gate_rows = float(matrices[0][0])
    # A layer has two matrices of so many rows, for its input and its state; a projection of the state has other rows.
    layers = max(sum(matrix[0] == gate_rows for matrix in matrices) / 2.0, 1.0)
    mean_columns = flops / (2.0 * rows * layers * gate_rows) if flops else 0.0
    gemm = (steps * layers, batch, gate_rows, mean_columns)
    return (2.0 * flops if backward else flops), gemm


def _onnx_recurrent(call: Call) -> Product | None:
    """Return FLOPs and (count, m, n, k) of ONNX's LSTM, GRU and RNN, None where a shape is unknown or not of three dimensions.

    Their first three inputs are the sequence (steps, batch, features), the weight of these, and the weight of the state;
    both weights are (directions, gates x state, inputs).
    """
    inputs, weight, state_weight = (call.shape(place) for place in range(3))
    if inputs is None or weight is None or state_weight is None:
        return None
    if not len(inputs) == len(weight) == len(state_weight) == 3:
        return None
    directions = weight[0]
    matrices = [weight[1:], state_weight[1:]] * directions
    return _recurrent_layers(inputs, matrices)


def _pooling(call: Call) -> Product | None:
    """Return the FLOPs of ONNX's pooling, one per output element and element of the kernel, and zeros: no matrix product.

    None where the output's shape or the kernel is unknown.
    """
    kernel = call.named.get("kernel_shape")
    if call.output is None or kernel is None:
        return None
    return float(math.prod(call.output) * math.prod(kernel)), NO_GEMM


def _local_response(call: Call) -> Product | None:
    """Return the FLOPs of ONNX's LRN (local response normalization), and zeros, because it is no matrix product.

    An element takes one for each neighbouring channel, to add its square, and three to be scaled. None where the output's
    shape is unknown.
    """
    if call.output is None:
        return None
    flops_per_element = int(call.named.get("size", 1)) + 3
    return float(math.prod(call.output) * flops_per_element), NO_GEMM


FACTOR_PLACES = dict.fromkeys(("mm", "_scaled_mm", "bmm", "_grouped_mm"), (0, 1)) | dict.fromkeys(
    ("addmm", "baddbmm"), (1, 2)
)
"""By the names of torch's matrix products, the places of the two factors among their arguments."""
_RECURRENT = ("mkldnn_rnn_layer", "recurrent")
_PRODUCTS: Mapping[str, Callable[[Call], Product | None]] = {
    **dict.fromkeys(("convolution", "_convolution", "convolution_backward"), _aten_convolution),
    **dict.fromkeys(("Conv", "ConvInteger", "QLinearConv", "ConvTranspose"), _onnx_convolution),
    **dict.fromkeys(
        ("mm", "_scaled_mm", "_int_mm", "bmm", "matmul", "mv", "MatMul", "MatMulInteger"), _product_of_inputs()
    ),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "_addmm_activation", "addmv"), _product_of_inputs(1, 2)),
    "QLinearMatMul": _product_of_inputs(0, 3),
    "Gemm": _gemm,
    "linear": _linear,
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm"), _grouped),
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), _pooling),
    "LRN": _local_response,
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _onnx_recurrent),
}

# ---- One name for an op whose names differ by source: the user's call, its decomposition, the library that runs it.
_OVERLOADS = re.compile(r"\.(default|out|Tensor|Scalar|dim_IntList|int|input|self|dim|Tensor_Scalar)$")
_ATTENTION = re.compile(r"scaled_dot_product_\w*?attention\w*?(_backward)?$")
_SYNONYMS = {
    "convolution": (
        "conv1d conv2d conv3d conv cudnn_convolution mkldnn_convolution miopen_convolution thnn_conv2d slow_conv2d_forward "
        "convinteger qlinearconv convolution_overrideable mps_convolution cudnn_convolution_relu conv_depthwise2d"
    ),
    "convolution_backward": (
        "cudnn_convolution_backward mkldnn_convolution_backward miopen_convolution_backward thnn_conv2d_backward "
        "slow_conv2d_backward convolution_backward_overrideable mps_convolution_backward"
    ),
    "native_batch_norm": (
        "batch_norm batch_norm_impl_index cudnn_batch_norm miopen_batch_norm native_batch_norm_legit batchnormalization "
        "native_batch_norm_legit_no_training batch_norm_with_update native_batch_norm_legit_functional"
    ),
    "native_batch_norm_backward": (
        "batch_norm_impl_index_backward cudnn_batch_norm_backward miopen_batch_norm_backward batch_norm_backward"
    ),
    "native_layer_norm": "layer_norm layernormalization",
    "native_group_norm": "group_norm",
    "max_pool2d_with_indices": "max_pool2d maxpool mkldnn_max_pool2d",
    "max_pool3d_with_indices": "max_pool3d",
    "avg_pool2d": "averagepool",
    "adaptive_avg_pool2d": "globalaveragepool",
    "nll_loss_forward": "nll_loss nll_loss_nd",
    "recurrent": "cudnn_rnn mkldnn_rnn_layer miopen_rnn lstm gru rnn_tanh rnn_relu",
    "recurrent_backward": "cudnn_rnn_backward mkldnn_rnn_layer_backward miopen_rnn_backward",
    "nll_loss2d_forward": "nll_loss2d",
    "native_dropout": "dropout",
    "to_copy": "to",
    "addmm": "gemm",
    "softmax": "safe_softmax",
    "cat": "concat concatenate",
}
_CANONICAL = {name: canonical for canonical, names in _SYNONYMS.items() for name in names.split()}


@lru_cache(maxsize=4096)
def normal_type(op_type: str) -> str:
    """Return the canonical name of an op type, without aten's or ONNX's namespace, overload and in-place mark.

    >>> [normal_type(name) for name in ("aten.convolution.default", "aten::_convolution", "aten.conv2d", "onnx.Conv")]
    ['convolution', 'convolution', 'convolution', 'convolution']
    >>> normal_type("aten::relu_"), normal_type("fbgemm::bounds_check_indices")
    ('relu', 'fbgemm.bounds_check_indices')
    """
    name = op_type.strip().replace("::", ".").removeprefix("onnx.")
    if name.startswith("aten."):
        name = _OVERLOADS.sub("", name.removeprefix("aten."))
    elif "." in name:
        return _OVERLOADS.sub("", name)
    name = name.strip("_").lower()
    attention = _ATTENTION.match(name)
    if attention:
        return f"scaled_dot_product_attention{attention[1] or ''}"
    return _CANONICAL.get(name, name)


# The kernels behind an op: what its time is made of (``analyzers/costs/kernel_times.py``).
CLASSES = (
    *("convolution", "grouped_convolution", "depthwise_convolution", "matrix_product", "attention", "normalisation"),
    *("softmax", "pointwise", "reduction", "pooling", "copy", "indexing", "recurrent"),
    # torch's own batch norm, which bfloat16 takes in place of cuDNN's; norms of rows; and casts to a wider type.
    *("native_normalisation", "row_normalisation", "widening"),
)
CLASS = {name: number for number, name in enumerate(CLASSES)}
_CLASS_OF = {
    "matrix_product": (
        "mm addmm bmm baddbmm addbmm linear matmul grouped_mm scaled_mm int_mm mv addmv scaled_grouped_mm gemm "
        "matmulinteger qlinearmatmul"
    ),
    "reduction": (
        "sum mean var var_mean std std_mean amax amin max min argmax argmin norm linalg_vector_norm prod cumsum cumprod "
        "logsumexp any all nll_loss_forward nll_loss2d_forward nll_loss_backward nll_loss2d_backward reducemean reducesum "
        "float8_scale"
    ),
    "copy": (
        "to_copy copy clone contiguous cat stack constant_pad_nd pad roll repeat flip slice_backward select_backward fill "
        "zeros slice_scatter select_scatter new_zeros new_ones new_full ones ones_like zeros_like full full_like arange "
        "linspace eye reflection_pad2d reflection_pad2d_backward im2col col2im transpose concat slice split expand tile"
    ),
    "indexing": (
        "embedding embedding_dense_backward embedding_bag embedding_bag_forward_only embedding_bag_dense_backward "
        "index index_put unsafe_index unsafe_index_put index_select index_add gather "
        "scatter scatter_add sort topk take take_along_dim masked_scatter bincount histc unique_consecutive one_hot"
    ),
}
_CLASS_BY_NAME = {name: CLASS[kind] for kind, names in _CLASS_OF.items() for name in names.split()}
# The class of a name that is in no table: that of the first pattern that matches at the name's beginning.
_CLASS_BY_PART = (
    ("convolution", re.compile("convolution|convtranspose")),
    ("attention", re.compile(".*attention")),
    ("recurrent", re.compile("recurrent|mkldnn_rnn|cudnn_rnn|lstm|gru|rnn")),
    ("row_normalisation", re.compile(".*(layer|rms|group)_norm|(layer|rms|group)normalization$")),
    ("normalisation", re.compile(".*_norm|.*normalization$")),
    ("softmax", re.compile(".*softmax")),
    ("pooling", re.compile(".*(pool|upsample)|resize$")),
)


@lru_cache(maxsize=4096)
def class_of(op_type: str) -> int:
    """Return the index in ``CLASSES`` of the kernels behind an op type.

    Grouped and depthwise convolutions count as ``convolution`` here; callers that know the groups refine the class. A
    name in no table counts as ``pointwise``.
    """
    name = normal_type(op_type).rpartition(".")[2]
    if name in _CLASS_BY_NAME:
        return _CLASS_BY_NAME[name]
    for kind, pattern in _CLASS_BY_PART:
        if pattern.match(name):
            return CLASS[kind]
    return CLASS["pointwise"]
