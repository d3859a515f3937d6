"""FLOPs, memory traffic and matrix shape of one aten op, and whether a rule knows them.

Convolutions, matrix products, attention and recurrent layers are counted from their shapes here (a multiply-add counts
two), not by ``torch.utils.flop_counter``, whose rule for the backward pass of a convolution ignores ``groups`` and which
knows neither recurrent layers nor ``_grouped_mm``. Element-wise, reduction, normalisation, pooling and copy ops are bound
by memory; they get a small FLOP count per element and the bytes they read and write. Views and allocations cost nothing.
Whatever is in no table falls back to its memory traffic and is counted as ``default``.

Every size goes through a :class:`Scale`, so that one trace gives the work of a step at any batch size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ddltool.analyzers.oracle.op_types import factors, names_in
from ddltool.graph import NO_GEMM, Estimate, Gemm


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Work of one op: floating-point operations, bytes read plus written, and the shape of its matrix product."""

    flops: float
    size_bytes: float
    estimate: Estimate
    written_bytes: float = 0.0
    """The part of ``size_bytes`` that is written."""
    gemm: Gemm = NO_GEMM
    """(count, m, n, k) of the products behind it, of the forward pass for a backward op; zeros where there are none."""
    dtype: str = ""
    """torch's name of the type that it computes in."""


@dataclass(frozen=True, slots=True)
class Scale:
    """From the batch size of a trace to another one: every dimension that ``prime`` divides grows with the batch.

    Exact when the prime divides no other dimension of the step (:func:`prime_batch`).
    """

    traced: int = 1
    wanted: int = 1
    prime: int = 0
    """A divisor of ``traced``; 0: ``traced`` itself."""

    def size(self, number: int) -> int:
        """Return a dimension or a count of elements at the wanted batch size, rounded down.

        >>> Scale(61, 4).size(61 * 196), Scale(61, 4).size(61 * 61), Scale(61, 4).size(224)
        (784, 16, 224)
        >>> Scale(8 * 61, 6, 61).size(4 * 61)  # half of the batch
        3
        """
        grown, shrunk = self._ratio(number)
        return grown // shrunk

    def is_whole(self, number: int) -> bool:
        """Return whether a dimension comes out whole: half of an odd batch does not."""
        grown, shrunk = self._ratio(number)
        return grown % shrunk == 0

    def _ratio(self, number: int) -> tuple[int, int]:
        if self.traced == self.wanted:
            return number, 1
        prime = self.prime or self.traced
        powers = 0
        while number and number % prime == 0:
            number //= prime
            powers += 1
        return number * self.wanted**powers, (self.traced // prime) ** powers

    def shape(self, tensor: Tensor) -> tuple[int, ...]:
        """Return a tensor's shape at the wanted batch size."""
        return tuple(self.size(int(dim)) for dim in tensor.shape)

    def elements(self, tensor: Tensor) -> int:
        """Return how many elements a tensor has at the wanted batch size."""
        return math.prod(self.shape(tensor))

    def stored_bytes(self, tensor: Tensor) -> float:
        """Return the bytes of the storage behind a tensor at the wanted batch size."""
        width = tensor.element_size()
        return float(self.size(tensor.untyped_storage().nbytes() // width) * width)


AS_TRACED = Scale()


def prime_batch(sizes: Iterable[int]) -> int:
    """Return a prime that divides none of the ``sizes``: traced at this batch, a dimension tells if it is the batch's."""
    taken = {int(size) for size in sizes if size}
    return next(
        number
        for number in count(61, 2)
        if all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2))
        and all(size % number for size in taken)
    )


# Nothing is computed or moved: memory is handed out, or a tensor is looked at in another way.
_FREE = names_in(
    "empty empty_like empty_strided new_empty new_empty_strided detach alias lift_fresh lift_fresh_copy _unsafe_view "
    "view reshape _reshape_alias expand t transpose permute squeeze unsqueeze select slice split split_with_sizes "
    "chunk unbind as_strided as_strided_ unfold diagonal view_as_real view_as_complex sym_size sym_numel sym_stride "
    "resolve_conj resolve_neg scalar_tensor _assert_tensor_metadata _assert_async _assert_scalar"
)


# FLOPs per element of the largest tensor involved; sources of the factors: one operation per visit of an element, five
# for an exponential with its subtraction, sum and division, as counted in the usual softmax and normalisation listings.
_PER_ELEMENT: Mapping[str, float] = {
    **factors(
        {
            1.0: "sum mean amax amin max min argmax argmin prod any all norm linalg_vector_norm cumsum bernoulli bernoulli_ "
            "rand rand_like randn randn_like normal_ uniform_ random_ sort topk roll flip histc bincount unique_consecutive",
            2.0: "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward mse_loss",
            3.0: "var var_mean std std_mean logsumexp native_dropout native_dropout_backward",
            4.0: "_native_batch_norm_legit_no_training _batch_norm_with_update",
            5.0: "_softmax _safe_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data _fused_rms_norm "
            "_fused_rms_norm_backward",
            7.0: "native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit",
            8.0: "mse_loss_backward gelu gelu_backward silu silu_backward tanh_backward sigmoid_backward",
            10.0: "native_layer_norm_backward native_group_norm_backward native_batch_norm_backward",
        }
    ),
    **{
        f"{pool}{rank}d{suffix}{direction}": 1.0
        for pool, suffix in (("avg_pool", ""), ("_adaptive_avg_pool", ""), ("max_pool", "_with_indices"))
        for rank in (1, 2, 3)
        for direction in ("", "_backward")
    },
}
# Data movement without arithmetic.
_COPIES = names_in(
    "copy copy_ clone contiguous _to_copy cat stack constant_pad_nd pad repeat fill fill_ zero_ zeros zeros_like ones "
    "ones_like full full_like new_zeros new_ones new_full arange linspace eye slice_scatter select_scatter "
    "slice_backward select_backward index_put index_put_ _unsafe_index_put index_add index_add_ scatter scatter_ "
    "scatter_add scatter_add_ embedding_dense_backward triu tril masked_fill masked_fill_ masked_scatter where "
    "upsample_nearest2d upsample_bilinear2d upsample_bicubic2d upsample_nearest2d_backward "
    "upsample_bilinear2d_backward upsample_bicubic2d_backward _foreach_copy_ one_hot im2col col2im reflection_pad2d "
    "reflection_pad2d_backward _embedding_bag_dense_backward"
)
# Only the looked-up rows are touched, not the whole table.
_LOOKUPS = names_in("embedding index index_select gather _unsafe_index take take_along_dim")
# One row read for each index, and fewer written: those of a bag are added up.
_BAGS = names_in("_embedding_bag _embedding_bag_forward_only")
# CUDA's kernels for these read half precision and compute in float32, or write half precision again: a cast beside them is
# no kernel of its own.
_CASTS_INPUT = names_in("_softmax _log_softmax _safe_softmax sum prod cumsum cumprod")
_CASTS_RESULT = frozenset(["_softmax_backward_data", "_log_softmax_backward_data"])
_CASTING = _CASTS_INPUT | _CASTS_RESULT


def cost_of(node: Node, scale: Scale = AS_TRACED) -> Cost:
    """Return the cost of a call node whose ``meta['val']`` holds fake tensors (set by make_fx), at a scaled batch size."""
    target = node.target
    name = base_name(target)
    output = tensors_of(node.meta.get("val"))
    written = _bytes(output, scale)
    if name in _FREE or _is_view(target):
        return Cost(flops=0.0, size_bytes=0.0, estimate="free", written_bytes=written)
    if _in_neighbour(node, name):
        return Cost(flops=0.0, size_bytes=0.0, estimate="free", written_bytes=written)
    given = map_arg(named(node), lambda n: n.meta.get("val"))
    inputs = tensors_of(given)
    if name in _CASTING:
        inputs, output = _without_casts(node, inputs, output)
        written = _bytes(output, scale)
    moved = _bytes(inputs, scale) + written
    dtype = _dtype([*output, *inputs])
    product = _product(node, name, given, scale)
    if product is not None:
        flops, gemm = product
        if _dtype(inputs).startswith("complex"):  # four real products
            flops, gemm = 4.0 * flops, (4.0 * gemm[0], *gemm[1:])
        return Cost(
            flops=flops,
            size_bytes=moved,
            estimate="rule",
            written_bytes=written,
            gemm=gemm if flops else NO_GEMM,  # nothing fills no tile
            dtype=_dtype(inputs),
        )
    if name in _BAGS:
        table, indices = given["weight"], given["indices"]
        added = float(scale.elements(indices) * math.prod(table.shape[1:]))
        read = added * table.element_size() + _bytes([tensor for tensor in inputs if tensor is not table], scale)
        return Cost(flops=added, size_bytes=read + written, estimate="rule", written_bytes=written, dtype=dtype)
    if name in _LOOKUPS:
        return Cost(flops=0.0, size_bytes=2.0 * written, estimate="rule", written_bytes=written, dtype=dtype)
    if name in _COPIES:
        return Cost(flops=0.0, size_bytes=moved, estimate="rule", written_bytes=written, dtype=dtype)
    elements = max((float(scale.elements(tensor)) for tensor in [*inputs, *output]), default=0.0)
    factor = _PER_ELEMENT.get(name.removesuffix("_")) or _PER_ELEMENT.get(name)
    if factor is None and isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
        factor = 1.0
    if factor is not None:
        return Cost(flops=factor * elements, size_bytes=moved, estimate="rule", written_bytes=written, dtype=dtype)
    return Cost(flops=elements, size_bytes=moved, estimate="default", written_bytes=written, dtype=dtype)


def _in_neighbour(node: Node, name: str) -> bool:
    """Return whether a cast happens inside the kernel beside it: before a softmax or sum, or after a softmax's backward."""
    if name != "_to_copy" or not isinstance(node.args[0], Node):
        return False
    before = base_name(node.args[0].target)
    if before in _CASTS_RESULT:
        return len(node.args[0].users) == 1
    return bool(node.users) and all(base_name(user.target) in _CASTS_INPUT for user in node.users)


def _without_casts(node: Node, inputs: list[Tensor], output: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return what a kernel that casts by itself really reads and writes: the tensors beyond the casts."""
    for source in node.all_input_nodes:
        if _in_neighbour(source, base_name(source.target)):
            cast = source.meta["val"]
            inputs = [source.args[0].meta["val"] if tensor is cast else tensor for tensor in inputs]  # type: ignore[union-attr]
    for user in node.users:
        if _in_neighbour(user, base_name(user.target)):
            output = [user.meta["val"]]
    return inputs, output


def base_name(target: Any) -> str:
    """Return an op's name without namespace and overload: ``convolution`` for ``aten.convolution.default``."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return str(getattr(target, "__name__", target))


def named(node: Node) -> dict[str, Any]:
    """Return a call's arguments by the names of its schema; by position where it has none."""
    schema = getattr(node.target, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    names += [str(number) for number in range(len(names), len(node.args))]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _product(node: Node, name: str, given: Mapping[str, Any], scale: Scale) -> tuple[float, Gemm] | None:
    """Return FLOPs and (count, m, n, k) of an op that multiplies matrices, None for any other."""
    if name in ("convolution", "_convolution"):
        return _convolution(given["input"], given["weight"], _first(node), given, scale)
    if name == "convolution_backward":
        flops, gemm = _convolution(given["input"], given["weight"], given["grad_output"], given, scale)
        return flops * sum(bool(wanted) for wanted in given["output_mask"][:2]), gemm
    if "scaled_dot_product" in name and "attention" in name:
        return _attention(name, given, scale)
    if name.startswith(("mkldnn_rnn_layer", "recurrent")):
        return _recurrent(name, given, scale)
    args = list(given.values())
    if name in ("mm", "_scaled_mm", "_int_mm", "bmm", "matmul"):
        return _matmul(scale.shape(args[0]), scale.shape(args[1]))
    if name in ("addmm", "baddbmm", "addbmm", "_addmm_activation"):
        return _matmul(scale.shape(args[1]), scale.shape(args[2]))
    if name in ("addmv", "mv"):
        matrix, vector = (given["mat"], given["vec"]) if name == "addmv" else args[:2]
        return _matmul(scale.shape(matrix), (*scale.shape(vector), 1))
    if name == "linear":
        weight = scale.shape(args[1])
        return _matmul((scale.elements(args[0]) // max(weight[1], 1), weight[1]), weight[::-1])
    if name in ("_grouped_mm", "_scaled_grouped_mm"):
        return _grouped(scale.shape(args[0]), scale.shape(args[1]))
    return None


def _convolution(x: Tensor, weight: Tensor, out: Tensor, given: Mapping[str, Any], scale: Scale) -> tuple[float, Gemm]:
    """Return FLOPs of a convolution and its implicit matrix product: one per group, positions x channels x taps.

    Every position of the output (of the input, when transposed) meets every element of its filters once.
    """
    groups = scale.size(int(given["groups"]))  # a filter of its own for every sample makes the batch one of groups
    filters = scale.shape(weight)  # (out, in / groups, taps ...), transposed (in, out / groups, taps ...)
    seen = scale.shape(x if given["transposed"] else out)
    positions = (seen[0] if len(seen) == len(filters) else 1) * math.prod(seen[2:])
    flops = 2.0 * positions * math.prod(filters)
    gemm = (float(groups), float(positions), filters[0] / groups, float(math.prod(filters[1:])))
    return flops, gemm


def _matmul(left: Sequence[int], right: Sequence[int]) -> tuple[float, Gemm]:
    """Return FLOPs and shape of (..., m, k) @ (..., k, n)."""
    if len(left) < 2 or len(right) < 2:
        inner = float(left[-1]) if left else 1.0
        return 2.0 * inner, (1.0, 1.0, 1.0, inner)
    count = float(max(math.prod(left[:-2]), math.prod(right[:-2])))
    m, k, n = float(left[-2]), float(left[-1]), float(right[-1])
    return 2.0 * count * m * n * k, (count, m, n, k)


def _grouped(left: Sequence[int], right: Sequence[int]) -> tuple[float, Gemm]:
    """Return FLOPs and shape of ``_grouped_mm``: rows, or the inner dimension, are dealt out to the groups.

    (t, k) x (g, k, n): every row meets its group's matrix. (m, t) x (t, n) gives (g, m, n): the gradient of that matrix.
    (g, m, k) x (k, t): the columns are dealt out.
    """
    if len(left) == 2 and len(right) == 3:
        groups, k, n = right
        return 2.0 * left[0] * k * n, (float(groups), left[0] / groups, float(n), float(k))
    if len(left) == 3 and len(right) == 2:
        groups, m, k = left
        return 2.0 * m * k * right[1], (float(groups), float(m), right[1] / groups, float(k))
    if len(left) == 2:
        m, t, n = left[0], left[1], right[1]
        return 2.0 * m * t * n, (1.0, float(m), float(n), float(t))
    return _matmul(left, right)


def _attention(name: str, given: Mapping[str, Any], scale: Scale) -> tuple[float, Gemm] | None:
    """Return FLOPs and (heads of all samples, queries, keys, width) of fused attention.

    Two products forward; five backward, since the scores are computed again. FLOPs count the whole square, as MFU is
    usually reported; the keys of ``gemm`` are halved under a causal mask, of which kernels skip the upper half.
    """
    if not all(isinstance(given.get(part), Tensor) for part in ("query", "key", "value")):
        return None
    query, key, value = (scale.shape(given[part]) for part in ("query", "key", "value"))
    heads, queries, width = math.prod(query[:-2]), query[-2], query[-1]
    keys, out_width = key[-2], value[-1]
    scores, mixed = 2.0 * heads * queries * keys * width, 2.0 * heads * queries * keys * out_width
    flops = 3.0 * scores + 2.0 * mixed if "backward" in name else scores + mixed
    causal = bool(given.get("is_causal", False)) and queries > 1
    return flops, (float(heads), float(queries), keys / 2 if causal else float(keys), float(width))


def _recurrent(name: str, given: Mapping[str, Any], scale: Scale) -> tuple[float, Gemm] | None:
    """Return FLOPs and shape of one recurrent layer of oneDNN, or of the stack that the tracer's own op stands for."""
    x = given["input"] if "input" in given else given["x"]
    weights = given.get("weights") or [value for key, value in given.items() if key.startswith("weight")]
    matrices = [scale.shape(weight) for weight in weights if isinstance(weight, Tensor) and weight.dim() == 2]
    return _layers(scale.shape(x), matrices, backward="backward" in name) if matrices else None


def _layers(x: Sequence[int], matrices: Sequence[Sequence[int]], *, backward: bool) -> tuple[float, Gemm]:
    """Return FLOPs and shape of recurrent layers whose weight matrices are (gates x state, inputs) each.

    Every step of every sample meets every weight once; backward twice, for the input and for the weights. The steps of one
    layer wait for each other, hence ``gemm``'s count: steps times layers and directions.
    """
    rows = math.prod(x[:-1])  # (steps, batch, features) or the other way round: the product is what counts
    flops = 2.0 * rows * sum(math.prod(matrix) for matrix in matrices)
    steps = float(x[0])
    wide = float(matrices[0][0])
    layers = max(sum(matrix[0] == wide for matrix in matrices) / 2.0, 1.0)  # without projections of the state
    inner = flops / (2.0 * rows * layers * wide) if flops else 0.0
    return (2.0 * flops if backward else flops), (steps * layers, rows / steps if steps else 0.0, wide, inner)


def _first(node: Node) -> Tensor:
    value = node.meta["val"]
    first: Tensor = value[0] if isinstance(value, (list, tuple)) else value
    return first


def _dtype(tensors: Sequence[Tensor]) -> str:
    """Return the type that an op computes in: that of its largest floating-point tensor, else of its first."""
    floating = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    chosen = max(floating, key=lambda tensor: tensor.numel(), default=tensors[0] if tensors else None)
    return str(chosen.dtype).removeprefix("torch.") if chosen is not None else ""


def _is_view(target: Any) -> bool:
    """Return whether an op only looks at its input: its schema aliases a tensor without writing to one."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return bool(target.is_view)


def tensors_of(values: Any) -> list[Tensor]:
    """Return the distinct tensors anywhere in nested lists, tuples and mappings; of a sparse one indices and values."""
    found: dict[int, Tensor] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            if value.layout == torch.sparse_coo:
                visit([value._indices(), value._values()])
            else:
                found.setdefault(id(value), value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif isinstance(value, Mapping):
            for item in value.values():
                visit(item)

    visit(values)
    return list(found.values())


def value_of(node: Node) -> Any:
    """Return what a node makes, as fake tensors; for a constant of the graph the constant."""
    if "val" in node.meta or node.op != "get_attr":
        return node.meta.get("val")
    return getattr(node.graph.owning_module, str(node.target), None)


class Storage(NamedTuple):
    """Memory behind one or more tensors of a step, and when it is held."""

    elements: int
    width: int
    """Bytes of an element."""
    born: int
    """Place of the node that makes it among the graph's."""
    died: int
    """Place after the last node that uses any view of it; inputs and parameters live to its end."""


def storages(fx: GraphModule) -> list[Storage]:
    """Return every storage of a recorded step, in the order of their making. O(nodes)."""
    nodes = list(fx.graph.nodes)
    size: dict[int, tuple[int, int]] = {}
    born: dict[int, int] = {}
    died: dict[int, int] = {}
    for place, node in enumerate(nodes):
        for source in (*node.all_input_nodes, node):
            given = source.op == "placeholder"
            for tensor in tensors_of(value_of(source)):
                storage, width = tensor.untyped_storage(), tensor.element_size()
                key = storage._cdata
                size.setdefault(key, (storage.nbytes() // width, width))
                born.setdefault(key, 0 if given else place)
                died[key] = max(died.get(key, 0), len(nodes) if given else place + 1)
    return [Storage(*size[key], born[key], died[key]) for key in size]


def _bytes(tensors: Iterable[Tensor], scale: Scale) -> float:
    """Return the bytes that the tensors occupy; an expanded tensor counts what it is stored in."""
    return float(sum(min(scale.elements(t) * t.element_size(), scale.stored_bytes(t)) for t in tensors))
