"""What CUDA has and a registered device lacks: kernels of its own for some operators, and autocast by its lists.

Start at :func:`install_cuda_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ddltool.analyzers.step.recording.op_rules import names_in
from ddltool.analyzers.step.recording.recurrent import declare_cells, recurrent_layers

# CUDA's lists, from ATen/autocast_mode.h of torch 2.13 (pytorch.org/docs/stable/amp.html names most of them).
_IN_HALF = names_in(
    "_convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input "
    "convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul "
    "linalg_multi_dot _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
    "scaled_dot_product_attention"
)
_IN_FLOAT32 = names_in(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar "
    "pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim "
    "nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits "
    "dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d "
    "_upsample_nearest_exact2d upsample_nearest3d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d "
    "_upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa norm.Scalar "
    "norm.ScalarOpt_dim"
)
_FLOAT32_UNLESS_TYPED = names_in(
    "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm sum "
    "sum.dim_IntList"
)
_WIDEST = names_in("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
_AUTOCAST: Any = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]
_CASTABLE = (torch.float16, torch.bfloat16, torch.float32)
"""The types that autocast casts from: float64 and whole numbers stay as they are."""
_WIDEST_FLASH_HEAD = 256
"""Flash attention of torch takes heads up to this width."""


class Autocast:
    """CUDA's autocast for the registered device: kernels under its dispatch key, and a cache of parameters' casts.

    torch has autocast kernels for its own devices alone; a device that is registered as PrivateUse1 has to bring its
    own. The operators in each list, and what they are cast to, are CUDA's.
    """

    def __init__(self, device_type: str) -> None:
        """Register the kernels with torch; ``device_type``: the name under which the device is registered there."""
        self.type = device_type
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        """A parameter and its cast by the parameter's ``id``, which is not used again while the parameter is held here."""
        # A library's kernels are gone with it, so both live as long as this does.
        self.libraries = [
            torch.library.Library("aten", "IMPL"),
            torch.library.Library("_", "IMPL", "AutocastPrivateUse1"),
        ]
        self.libraries[1].fallback(torch.library.fallthrough_kernel)  # ops that are in no list run without a cast
        for names, kernel in (
            (_IN_HALF, self._half),
            (_IN_FLOAT32, self._float32),
            (_FLOAT32_UNLESS_TYPED, self._unless_typed),
            (_WIDEST, self._widest),
        ):
            for name in names:
                packet, _, overload = name.partition(".")
                op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
                if op is not None:  # another version of torch may lack a listed op
                    self.libraries[0].impl(name, kernel(op), "AutocastPrivateUse1")

    def clear(self) -> None:
        """Forget the casts of parameters; called when the outermost autocast block ends."""
        self.cache.clear()

    def _half(self, op: Any) -> Callable[..., Any]:
        """Return a kernel that casts an op's floating-point tensors to the type of the autocast block."""
        return self._casting(op, lambda _tensors: torch.get_autocast_dtype(self.type))

    def _float32(self, op: Any) -> Callable[..., Any]:
        """Return a kernel that casts an op's floating-point tensors to float32."""
        return self._casting(op, lambda _tensors: torch.float32)

    def _widest(self, op: Any) -> Callable[..., Any]:
        """Return a kernel that casts an op's tensors to float32 where one of them is float32, and else casts nothing."""

        def wanted(tensors: list[Tensor]) -> torch.dtype | None:
            """Return float32 if one of the tensors has that type; None: nothing is to be cast."""
            return torch.float32 if any(tensor.dtype == torch.float32 for tensor in tensors) else None

        return self._casting(op, wanted)

    def _unless_typed(self, op: Any) -> Callable[..., Any]:
        """Return a kernel for an op with a ``dtype`` argument, which is set to float32 where the call does not give it.

        The op itself casts its input to ``dtype``, so that no cast is recorded apart.
        """

        def kernel(*args: Any, **kwargs: Any) -> Any:
            """Run the op without autocast; a call without ``dtype``, on a castable first tensor, gets float32."""
            is_typed = kwargs.get("dtype") is not None or any(isinstance(arg, torch.dtype) for arg in args)
            with self._without_autocast():
                if not is_typed and args[0].dtype in _CASTABLE:
                    kwargs["dtype"] = torch.float32
                return op(*args, **kwargs)

        return kernel

    def _without_autocast(self) -> Any:
        """Return a context in which ops skip autocast: an autocast kernel that calls its op would else call itself."""
        return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST))

    def _casting(self, op: Any, wanted: Callable[..., torch.dtype | None]) -> Callable[..., Any]:
        """Return a kernel that casts an op's floating-point tensors, then calls the op without autocast.

        ``wanted`` takes the list of a call's tensors and returns the type to cast to, None where nothing is to be cast.
        """

        def kernel(*args: Any, **kwargs: Any) -> Any:
            """Run the op without autocast on its arguments, cast where ``wanted`` returns a type."""
            dtype = wanted([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)])
            with self._without_autocast():
                # The last argument is cast first, as in torch's builds for Linux, so that the ops come in the same order.
                if dtype is not None:
                    kwargs = {name: self.cast_all(value, dtype) for name, value in reversed(kwargs.items())}
                    args = tuple(self.cast_all(value, dtype) for value in reversed(args))[::-1]
                return op(*args, **kwargs)

        return kernel

    def cast_all(self, values: Any, dtype: torch.dtype) -> Any:
        """Return an argument (a tensor, a list of tensors, or anything else) with its tensors cast by :meth:`cast`."""
        return tree_map(lambda leaf: self.cast(leaf, dtype), values)

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """Return a floating-point tensor of the device in another type; return any other value, and float64, unchanged.

        As torch does on CUDA, a trained float32 parameter is cast once in an autocast block, and taken from the cache
        afterwards.
        """
        if not isinstance(value, Tensor) or value.dtype not in _CASTABLE or value.dtype == dtype:
            return value
        if value.device.type != self.type:
            return value
        is_parameter = value.is_leaf and value.requires_grad
        is_cached = torch.is_autocast_cache_enabled() and is_parameter and value.dtype == torch.float32
        if not is_cached or dtype == torch.float32:
            return value.to(dtype)
        if id(value) not in self.cache:
            self.cache[id(value)] = (value, value.to(dtype))
        _, cast_value = self.cache[id(value)]
        return cast_value


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return scaled dot product attention, run by the kernel that CUDA would choose for these arguments.

    That is the flash kernel in half precision without a mask (heads of equal widths up to 256), and otherwise the
    memory-efficient one. Float64, inputs that are not (batch, heads, tokens, width), and a mask whose rows are not
    contiguous take the math kernel, which is composed of several ops. The arguments and the result are those of
    ``functional.scaled_dot_product_attention``: ``attn_mask`` is added to the scores, or False where a boolean one hides;
    ``scale`` None: 1 / sqrt(width); ``enable_gqa``: keys and values may have fewer heads than queries.
    """
    ops = torch.ops.aten
    # The efficient kernel reads a mask along its rows; T5 permutes the table of its biases, so that a row is a column there.
    has_strided_rows = attn_mask is not None and attn_mask.stride(-1) != 1
    if query.dim() != 4 or query.dtype == torch.float64 or has_strided_rows:
        return ops._scaled_dot_product_attention_math(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    width = query.shape[-1]
    if is_half and attn_mask is None and width <= _WIDEST_FLASH_HEAD and width == value.shape[-1]:
        return ops._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    # The efficient kernel takes no grouped heads, no boolean masks and no masks that are still to be broadcast.
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, 1) if groups > 1 else part for part in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), float("-inf"))
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype).expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    needs_gradient = torch.is_grad_enabled() and any(part.requires_grad for part in (query, key, value))
    return ops._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
        query, key, value, attn_mask, needs_gradient, dropout_p, is_causal, scale=scale
    )[0]


def _recurrent(autocast: Autocast) -> Callable[..., Any]:
    """Return the kernel of torch's LSTM, GRU and RNN ops (overload ``input``): one op for all layers, as in cuDNN."""

    def run(x: Tensor, hidden: Any, weights: list[Tensor], _bias: bool, _layers: int, _dropout: float, _training: bool,
            bidirectional: bool, batch_first: bool) -> tuple[Tensor, ...]:  # fmt: skip
        """Return outputs and last states of all layers (see :func:`recurrent_layers`), from inputs cast where autocast is on.

        The arguments are those of torch's op ``aten::lstm.input`` and its like, of which bias, layers, dropout and training are
        not used, because they do not change any shape.
        """
        if torch.is_autocast_enabled(autocast.type):
            dtype = torch.get_autocast_dtype(autocast.type)
            x = autocast.cast(x, dtype)
            weights = [autocast.cast(weight, dtype) for weight in weights]
        return recurrent_layers(x, hidden, weights, bidirectional, batch_first)

    return run


@cache
def install_cuda_kernels(device_type: str) -> Autocast:
    """Register kernels that torch has for CUDA alone with the device, and return its autocast; once in a process.

    ``device_type``: the name under which the device is registered with torch. The kernels live as long as the returned
    object, which the cache of this function holds.
    """
    autocast = Autocast(device_type)
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", _attention, "AutogradPrivateUse1")
    for layer in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        library.impl(f"{layer}.input", _recurrent(autocast), "AutogradPrivateUse1")
    for name in ("silu_backward", "mish_backward", "native_channel_shuffle"):
        # torch composes these ops of others for a device without a kernel, and CUDA has one. The kernel that is given
        # here is never called, because fake tensors run none.
        library.impl(name, getattr(torch.ops.aten, name).default, "PrivateUse1")
    declare_cells(library)
    for name in ("_fused_sgd_", "_fused_adagrad_"):  # torch knows the sizes of fused Adam alone
        for overload in ("", ".tensor_lr"):
            library.impl(name + overload, lambda *_args, **_kwargs: None, "Meta")
    autocast.libraries.append(library)
    return autocast
