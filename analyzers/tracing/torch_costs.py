"""FLOPs and memory traffic of one aten op, and whether a rule knows them.

FLOPs of matrix products, convolutions and attention are torch's own (``torch.utils.flop_counter.flop_registry``, the
rules behind FlopCounterMode; a multiply-add counts two). Element-wise, reduction, normalisation, pooling and copy ops
are bound by memory; they get a small FLOP count per element and the bytes they read and write. Views and allocations
cost nothing. Whatever is in no table falls back to its memory traffic and is counted as ``default``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import flop_counter

from ddltool.graph import Estimate


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Work of one op: floating-point operations and bytes read plus written."""

    flops: float
    size_bytes: float
    estimate: Estimate


# torch's registry has no entry for the CPU attention kernels (they would count as zero); same formula, other name.
_CPU_ATTENTION: Mapping[str, Any] = {
    "_scaled_dot_product_flash_attention_for_cpu": flop_counter.sdpa_flop_count,
    "_scaled_dot_product_flash_attention_for_cpu_backward": flop_counter.sdpa_backward_flop_count,
}
# Nothing is computed or moved: memory is handed out, or a tensor is looked at in another way.
_FREE = frozenset(
    [
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "detach",
        "alias",
        "lift_fresh",
        "lift_fresh_copy",
        "_unsafe_view",
        "view",
        "reshape",
        "_reshape_alias",
        "expand",
        "t",
        "transpose",
        "permute",
        "squeeze",
        "unsqueeze",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "chunk",
        "unbind",
        "as_strided",
        "as_strided_",
        "unfold",
        "diagonal",
        "view_as_real",
        "view_as_complex",
        "sym_size",
        "sym_numel",
        "sym_stride",
        "resolve_conj",
        "resolve_neg",
        "scalar_tensor",
        "_assert_tensor_metadata",
    ]
)
# FLOPs per element of the largest tensor involved; sources of the factors: one operation per visit of an element, five
# for an exponential with its subtraction, sum and division, as counted in the usual softmax and normalisation listings.
_PER_ELEMENT: Mapping[str, float] = {
    **dict.fromkeys(
        [
            "sum",
            "mean",
            "amax",
            "amin",
            "max",
            "min",
            "argmax",
            "argmin",
            "prod",
            "any",
            "all",
            "norm",
            "linalg_vector_norm",
            "cumsum",
        ],
        1.0,
    ),
    **dict.fromkeys(
        ["var", "var_mean", "std", "std_mean", "logsumexp", "native_dropout", "native_dropout_backward"], 3.0
    ),
    **dict.fromkeys(
        ["_softmax", "_safe_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"], 5.0
    ),
    **dict.fromkeys(["native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit"], 7.0),
    **dict.fromkeys(["_native_batch_norm_legit_no_training", "cudnn_batch_norm", "_batch_norm_with_update"], 4.0),
    **dict.fromkeys(["_fused_rms_norm", "_fused_rms_norm_backward"], 5.0),
    **dict.fromkeys(["native_layer_norm_backward", "native_group_norm_backward", "native_batch_norm_backward"], 10.0),
    **{
        f"{pool}{rank}d{suffix}{direction}": 1.0
        for pool, suffix in (("avg_pool", ""), ("_adaptive_avg_pool", ""), ("max_pool", "_with_indices"))
        for rank in (1, 2, 3)
        for direction in ("", "_backward")
    },
    **dict.fromkeys(
        ["nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward", "mse_loss"], 2.0
    ),
    **dict.fromkeys(
        ["mse_loss_backward", "gelu", "gelu_backward", "silu", "silu_backward", "tanh_backward", "sigmoid_backward"],
        8.0,
    ),
    **dict.fromkeys(
        ["bernoulli", "bernoulli_", "rand", "rand_like", "randn", "randn_like", "normal_", "uniform_", "random_"], 1.0
    ),
    **dict.fromkeys(["sort", "topk", "roll", "flip", "histc", "bincount", "unique_consecutive"], 1.0),
}
# Data movement without arithmetic.
_COPIES = frozenset(
    [
        "copy",
        "copy_",
        "clone",
        "contiguous",
        "_to_copy",
        "cat",
        "stack",
        "constant_pad_nd",
        "pad",
        "repeat",
        "fill",
        "fill_",
        "zero_",
        "zeros",
        "zeros_like",
        "ones",
        "ones_like",
        "full",
        "full_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "arange",
        "linspace",
        "eye",
        "slice_scatter",
        "select_scatter",
        "slice_backward",
        "select_backward",
        "index_put",
        "index_put_",
        "_unsafe_index_put",
        "index_add",
        "index_add_",
        "scatter",
        "scatter_",
        "scatter_add",
        "scatter_add_",
        "embedding_dense_backward",
        "triu",
        "tril",
        "masked_fill",
        "masked_fill_",
        "masked_scatter",
        "where",
        "upsample_nearest2d",
        "upsample_bilinear2d",
        "upsample_nearest2d_backward",
        "upsample_bilinear2d_backward",
        "_foreach_copy_",
        "one_hot",
    ]
)
# Only the looked-up rows are touched, not the whole table.
_LOOKUPS = frozenset(["embedding", "index", "index_select", "gather", "_unsafe_index", "take", "take_along_dim"])


def cost_of(node: Node) -> Cost:
    """Return the cost of a call node whose ``meta['val']`` holds fake tensors (set by make_fx)."""
    target = node.target
    name = base_name(target)
    output = _tensors(node.meta.get("val"))
    if name in _FREE or _is_view(target):
        return Cost(flops=0.0, size_bytes=0.0, estimate="free")
    inputs = _tensors(list(map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))))
    counted = _counted_flops(node, name)
    if counted is not None:
        return Cost(flops=counted, size_bytes=_bytes(inputs) + _bytes(output), estimate="rule")
    if name in _LOOKUPS:
        return Cost(flops=0.0, size_bytes=2.0 * _bytes(output), estimate="rule")
    moved = _bytes(inputs) + _bytes(output)
    if name in _COPIES:
        return Cost(flops=0.0, size_bytes=moved, estimate="rule")
    elements = max((float(tensor.numel()) for tensor in [*inputs, *output]), default=0.0)
    factor = _PER_ELEMENT.get(name.removesuffix("_")) or _PER_ELEMENT.get(name)
    if factor is None and isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags:
        factor = 1.0
    if factor is not None:
        return Cost(flops=factor * elements, size_bytes=moved, estimate="rule")
    return Cost(flops=elements, size_bytes=moved, estimate="default")


def base_name(target: Any) -> str:
    """Return an op's name without namespace and overload: ``convolution`` for ``aten.convolution.default``."""
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.partition("::")[2]
    return str(getattr(target, "__name__", target))


def _counted_flops(node: Node, name: str) -> float | None:
    """Return torch's own FLOP count, or None where its registry has no rule."""
    packet = getattr(node.target, "overloadpacket", None)
    rule = flop_counter.flop_registry.get(packet)
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
    if rule is not None:
        return float(rule(*args, **kwargs, out_val=node.meta.get("val")))
    counter = _CPU_ATTENTION.get(name)
    return float(counter(*(tuple(value.shape) for value in _leading_tensors(args, name)))) if counter else None


def _leading_tensors(args: Iterable[Any], name: str) -> list[Tensor]:
    """Return the tensors that a CPU attention rule takes: (query, key, value), before them the gradient backward."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    return tensors[: 4 if name.endswith("backward") else 3]


def _is_view(target: Any) -> bool:
    """Return whether an op only looks at its input: its schema aliases a tensor without writing to one."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return bool(target.is_view)


def _tensors(values: Any) -> list[Tensor]:
    """Return the distinct tensors anywhere in nested lists, tuples and mappings."""
    found: dict[int, Tensor] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            found.setdefault(id(value), value)
        elif isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif isinstance(value, Mapping):
            for item in value.values():
                visit(item)

    visit(values)
    return list(found.values())


def _bytes(tensors: Iterable[Tensor]) -> float:
    """Return the bytes that the tensors occupy; an expanded tensor counts what it is stored in."""
    return float(sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors))
