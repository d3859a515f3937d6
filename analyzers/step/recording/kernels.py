"""The arithmetic of CUDA packages that are not installed here, in torch's ops.

:data:`PACKAGES` says what each package holds. What it does not name has no stand-in, and asking for it raises an error.
Attention becomes the fused op that torch's own attention takes on CUDA; fused layers and optimizers become torch's; what a
kernel of the script's own (Triton) reads and writes is its traffic.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from ddltool.analyzers.step.recording.packages import REST, Inert

_BLOCK = 64
"""Weights of 4 bits in a block that shares one scale (bitsandbytes' default)."""
_STATE_BLOCK = 256
"""Elements of an optimizer's state of 8 bits in a block that shares one scale (bitsandbytes')."""


def attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
              causal: bool = False, **_: Any) -> Tensor:  # fmt: skip
    """Return attention of (batch, tokens, heads, width) tensors, flash_attn's layout, in the same layout.

    The arguments are those of ``flash_attn_func``: queries, keys and values; ``dropout_p``: the probability of dropout;
    ``softmax_scale``: the factor of the scores, None: 1 / sqrt(width). Keys and values may have fewer heads than queries
    (grouped queries).
    """
    query, key, value = (part.transpose(1, 2) for part in (q, k, v))
    grouped = q.shape[2] != k.shape[2]
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        dropout_p=dropout_p,
        is_causal=causal and q.shape[1] > 1,
        scale=softmax_scale,
        enable_gqa=grouped,
    ).transpose(1, 2)


def packed_attention(qkv: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return attention (batch, tokens, heads, width) of queries, keys and values in one (batch, tokens, 3, heads, width)."""
    q, k, v = qkv.unbind(2)
    return attention(q, k, v, *args, **kwargs)


def paired_attention(q: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return attention of queries (batch, tokens, heads, width) and of keys and values in (batch, tokens, 2, heads, width)."""
    k, v = kv.unbind(2)
    return attention(q, k, v, *args, **kwargs)


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None = None,
                     max_seqlen_q: int = 0, max_seqlen_k: int = 0, dropout_p: float = 0.0,
                     softmax_scale: float | None = None, causal: bool = False, **_: Any) -> Tensor:  # fmt: skip
    """Return attention of sequences that follow each other in (tokens, heads, width), in the same shape.

    The arguments are those of ``flash_attn_varlen_func``. ``cu_seqlens_q`` and ``cu_seqlens_k`` hold the offsets at which
    sequences begin, and the end: one more than there are sequences. Their values are not known here, so all sequences are
    taken as equally long, and the last one is padded. ``max_seqlen_q``: the length of the longest one, 0: not given. The
    further arguments: see :func:`attention`.
    """
    query_tokens, key_tokens = q.shape[0], k.shape[0]
    sequences = max(1, cu_seqlens_q.shape[0] - 1)
    query_length = -(-query_tokens // sequences)  # of each sequence, rounded up
    # It exceeds the longest sequence where there are too few offsets; then the longest one sets the number of sequences.
    if max_seqlen_q and query_length > int(max_seqlen_q):
        query_length = int(max_seqlen_q)
        sequences = -(-query_tokens // query_length)
    key_length = -(-key_tokens // sequences)

    def folded(part: Tensor, length: int) -> Tensor:
        """Return (tokens, heads, width) split into (sequences, ``length`` tokens, heads, width), padded at the end."""
        missing = sequences * length - part.shape[0]
        padded = functional.pad(part, (0, 0, 0, 0, 0, missing)) if missing else part
        return padded.view(sequences, length, *part.shape[1:])

    out = attention(
        folded(q, query_length), folded(k, key_length), folded(v, key_length), dropout_p, softmax_scale, causal
    )
    return out.reshape(-1, *out.shape[2:])[:query_tokens]


def varlen_packed_attention(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **kwargs: Any) -> Tensor:
    """Return :func:`varlen_attention` of queries, keys and values in one (tokens, 3, heads, width).

    ``cu_seqlens``: the offsets at which sequences begin, and the end; ``max_seqlen``: the longest one's length.
    """
    q, k, v = qkv.unbind(1)
    return varlen_attention(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **kwargs)


def efficient_attention(query: Tensor, key: Tensor, value: Tensor, attn_bias: Any = None, p: float = 0.0,
                        scale: float | None = None, **_: Any) -> Tensor:  # fmt: skip
    """Return xformers' attention of (batch, tokens, heads, width) or (batch, tokens, width), in the same shape.

    ``attn_bias``: a mask that is added to the scores, LowerTriangularMask for a causal one, or None; ``p``: the
    probability of dropout; ``scale``: the factor of the scores, None: 1 / sqrt(width).
    """
    parts = [part.unsqueeze(2) if part.dim() == 3 else part for part in (query, key, value)]
    q, k, v = (part.transpose(1, 2) for part in parts)
    mask = attn_bias if isinstance(attn_bias, Tensor) else None
    is_causal = isinstance(attn_bias, LowerTriangularMask)
    out = functional.scaled_dot_product_attention(q, k, v, mask, p, is_causal, scale=scale).transpose(1, 2)
    return out.squeeze(2) if query.dim() == 3 else out


class LowerTriangularMask:
    """xformers' causal mask."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Ignore all arguments."""


def unpad_input(hidden_states: Tensor, attention_mask: Tensor, *_: Any) -> tuple[Any, ...]:
    """Return all tokens of a padded batch one after another, as flash_attn's function of this name does.

    ``attention_mask`` is not read and no token is taken out, since only a run knows which ones are padding. Returns the
    tokens (batch x length, ...), their indices, the sequences' offsets (batch + 1), the longest length, and None in
    the place of the lengths without padding.
    """
    batch, length = hidden_states.shape[:2]
    flat = hidden_states.reshape(batch * length, *hidden_states.shape[2:])
    starts = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=hidden_states.device)
    indices = torch.arange(batch * length, device=hidden_states.device)
    return flat, indices, starts, length, None


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return ``x``, (batch, tokens, heads, width), with rotary embeddings: its two halves are rotated against each other.

    ``cos`` and ``sin``, of each position's angles, are (positions, width / 2) or wider.
    """
    first, second = x.chunk(2, -1)
    cos, sin = (part[: x.shape[1], None, : first.shape[-1]].to(x.dtype) for part in (cos, sin))
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm, with the arguments that the packages give theirs."""

    def __init__(
        self, hidden_size: Any, eps: float = 1e-6, *_: Any, device: Any = None, dtype: Any = None, **__: Any
    ) -> None:
        """Normalize over ``hidden_size``, a width or a shape; arguments that torch's norm does not know are ignored."""
        super().__init__(hidden_size, eps=eps, device=device, dtype=dtype)
        self.variance_epsilon = eps  # the name under which scripts read it


class LayerNorm(nn.LayerNorm):
    """torch's LayerNorm, with the arguments that the packages give theirs."""

    def __init__(self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, **_: Any) -> None:
        """Normalize over ``normalized_shape``, a width or a shape; arguments that torch's norm does not know are ignored."""
        super().__init__(normalized_shape, eps=eps, elementwise_affine=elementwise_affine)


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """torch's cross entropy, which ignores the options that only the packages have."""

    def __init__(
        self, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0, **_: Any
    ) -> None:
        """Take torch's options, and ignore any other."""
        super().__init__(ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)


class LinearCrossEntropyLoss(CrossEntropyLoss):
    """Liger's loss of hidden states: the product with the head's weight, and cross entropy of its result."""

    def forward(self, weight: Tensor, hidden: Tensor, target: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:  # type: ignore[override]
        """Return the loss of hidden states (tokens, width), a weight (classes, width) and targets (tokens,)."""
        return super().forward(functional.linear(hidden, weight, bias), target)


class SwiGLU(nn.Module):
    """Liger's gated layers of a transformer block, sized by the model's configuration."""

    def __init__(self, config: Any, **_: Any) -> None:
        """Make the three layers of ``hidden_size`` and ``intermediate_size``."""
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layers' output for inputs (..., hidden_size), in the same shape."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


def fused_optimizer(optimizer: type[torch.optim.Optimizer], *names: str) -> type[torch.optim.Optimizer]:
    """Return a subclass of one of torch's optimizers that always runs as one fused kernel.

    It takes the arguments of the package that it stands in for: those in ``names``, which torch has too, are passed on
    to torch, and the others are ignored.
    """

    class Fused(optimizer):  # type: ignore[misc,valid-type]
        """The optimizer with ``fused=True``."""

        def __init__(self, params: Any, lr: float = 1e-3, **asked: Any) -> None:
            """Pass on the arguments that are in ``names``."""
            super().__init__(params, lr=lr, fused=True, **{name: asked[name] for name in names if name in asked})

        def zero_grad(self, set_to_none: bool = True) -> None:
            """Set the gradients to None or to zero; the package allows the argument by position."""
            super().zero_grad(set_to_none)

    Fused.__name__ = optimizer.__name__
    return Fused


class StatesOfOneByte(torch.optim.Optimizer):
    """bitsandbytes' optimizers with states of 8 bits: one byte per element and state, and a scale for every 256 elements.

    An update is one kernel for each parameter. Parameters below ``min_8bit_size`` elements keep states of float32.
    """

    states = 2
    """States of each element: Adam has two, a momentum and a mean square."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 0.0, min_8bit_size: int = 4096, **_: Any) -> None:  # fmt: skip
        """Take bitsandbytes' arguments, of which only ``params`` and ``min_8bit_size`` (elements) change what is recorded.

        The other named ones are kept in ``param_groups``, where scripts and schedulers read them.
        """
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._least_elements = min_8bit_size

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, and make its states at its first update; return the closure's loss."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    self._make_states(parameter, state)
                own_ops().update(parameter, parameter.grad, list(state.values()))
        return loss

    def _make_states(self, parameter: Tensor, state: dict[str, Any]) -> None:
        """Put a parameter's states into ``state``, by bitsandbytes' names: ``state1``, and ``absmax1`` for its scales."""
        is_small = parameter.numel() < self._least_elements
        for number in range(1, self.states + 1):
            state[f"state{number}"] = torch.zeros_like(parameter, dtype=torch.float32 if is_small else torch.uint8)
            if not is_small:  # a scale for each block: its largest absolute value
                blocks = -(-parameter.numel() // _STATE_BLOCK)
                state[f"absmax{number}"] = torch.zeros(blocks, device=parameter.device)


class OneStateOfOneByte(StatesOfOneByte):
    """Stands in for bitsandbytes' 8-bit optimizers that keep one state, a momentum or a mean square, of each element."""

    states = 1


@cache
def own_ops() -> Any:
    """Declare this package's own ops, once in a process, and return their namespace; their cost is what they read and write.

    ``update`` changes a parameter and its optimizer states, ``kernel`` stands for a kernel of the script's own, and
    ``dequantize`` unpacks a weight of few bits.
    """
    library = torch.library.Library("ddltool", "FRAGMENT")
    library.define("update(Tensor(a!) parameter, Tensor gradient, Tensor(b!)[] states) -> ()")
    library.define("kernel(Tensor(a!)[] tensors) -> ()")
    library.define("dequantize(Tensor packed, Tensor scales, int rows, int columns, ScalarType dtype) -> Tensor")
    for name in ("update", "kernel"):
        library.impl(name, lambda *_: None, "CompositeExplicitAutograd")
    library.impl("dequantize", _unpacked, "CompositeExplicitAutograd")
    setattr(torch.ops.ddltool, "library", library)  # noqa: B010 - it lives as long as its ops
    return torch.ops.ddltool


def _unpacked(packed: Tensor, _scales: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return an empty weight (rows, columns) of a type, which stands for the unpacked one: nothing here has values."""
    return packed.new_empty((rows, columns), dtype=dtype)


class OneState(OneStateOfOneByte):
    """Stands in for bitsandbytes' optimizers that keep one state of each element in float32."""

    def __init__(self, *args: Any, **asked: Any) -> None:
        """Take bitsandbytes' arguments; ``min_8bit_size`` is overridden."""
        super().__init__(*args, **(asked | {"min_8bit_size": sys.maxsize}))  # no parameter is large enough for 8 bits


class PackedWeight(nn.Parameter):
    """A frozen weight of 4 or 8 bits an element."""

    def __new__(cls, data: Any = None, requires_grad: bool = False, **_: Any) -> PackedWeight:
        """Return a parameter that gets no gradient, whatever ``requires_grad`` says."""
        return nn.Parameter.__new__(cls, data, requires_grad=False)


class PackedLinear(nn.Linear):
    """A linear layer whose weight has 4 or 8 bits an element: it is unpacked for every product, forward and backward."""

    bits = 8
    """Bits of an element of the weight."""

    def __init__(self, input_features: int, output_features: int, bias: bool = True, compute_dtype: Any = None,
                 *_: Any, device: Any = None, **__: Any) -> None:  # fmt: skip
        """Make a layer of packed weights (elements x bits / 8 bytes) and their scales, which :meth:`forward` unpacks.

        ``compute_dtype``: the type of the product; None: half-precision inputs keep their type, others are computed in
        float16. bitsandbytes' other arguments, of how it quantises, are ignored.
        """
        super().__init__(input_features, output_features, bias, device="meta")  # the full weight takes no memory
        elements = input_features * output_features
        packed = torch.empty(elements * self.bits // 8, 1, dtype=torch.uint8, device=device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        scales = elements // _BLOCK if self.bits == 4 else output_features  # with 8 bits, one scale for each row
        self.scales = torch.empty(scales, dtype=torch.float32, device=device)  # no buffer: it keeps its type
        if bias:
            self.bias = nn.Parameter(torch.empty(output_features, device=device))
        self.compute_dtype = compute_dtype
        self._mark_weight()
        # Settings that libraries of adapters read of an 8-bit layer.
        self.state = SimpleNamespace(threshold=0.0, has_fp16_weights=False, memory_efficient_backward=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Apply ``fn`` to the parameters and to the scales, which stay float32, and return the layer.

        torch calls this to move or convert a module.
        """
        self.scales = fn(self.scales).float()
        moved = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark_weight()  # moving replaces the parameter, and its marks are gone
        return moved

    def _mark_weight(self) -> None:
        """Set on the weight the attributes of bitsandbytes' parameters that libraries of adapters (peft) read."""
        self.weight.__dict__.update(
            compress_statistics=True, quant_type="nf4", quant_storage=torch.uint8, quant_state=None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return (..., output features) in the input's type, computed in ``compute_dtype``."""
        dtype = self.compute_dtype or (x.dtype if x.dtype.itemsize == 2 else torch.float16)
        shape = (self.out_features, self.in_features)
        return _PackedProduct.apply(x.to(dtype), self.weight, self.scales, shape, self.bias).to(x.dtype)  # type: ignore[no-any-return,no-untyped-call]


class _PackedProduct(torch.autograd.Function):
    """The product with a packed weight, which is unpacked again for the gradient rather than kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, scales: Tensor, shape: tuple[int, int], bias: Tensor | None
    ) -> Tensor:
        """Return x (..., inputs) times the weight of ``shape`` (outputs, inputs), plus bias (outputs,) or None.

        ``packed``, ``scales``: the weight's bytes, and a scale for each block or row of it. The backward pass keeps these
        alone, and not the unpacked weight.
        """
        ctx.packed, ctx.scales, ctx.shape = packed, scales, shape
        weight = own_ops().dequantize(packed, scales, *shape, x.dtype)
        return functional.linear(x, weight, bias.to(x.dtype) if bias is not None else None)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Return the gradient of x, and None for the weight, its scales, the shape and the bias, which are frozen."""
        [gradient] = gradients
        weight = own_ops().dequantize(ctx.packed, ctx.scales, *ctx.shape, gradient.dtype)
        return gradient @ weight, None, None, None, None


class Linear4bit(PackedLinear):
    """bitsandbytes' layer of 4 bits."""

    bits = 4


class Linear8bitLt(PackedLinear):
    """bitsandbytes' layer of 8 bits."""


class TritonKernel:
    """A kernel that Triton would compile: a launch is recorded as one pass over the tensors that it is given."""

    def __init__(self, function: Any) -> None:
        """Keep the decorated function, which is never run; None: the kernel has no function of Python's."""
        self.fn, self.__name__ = function, getattr(function, "__name__", "kernel")

    def __getitem__(self, _grid: Any) -> Callable[..., None]:
        """Return what launches the kernel: ``kernel[grid](...)``."""
        return self.run

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Record one launch of the kernel, whose cost is to read and write the tensors among its arguments."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if tensors:
            with torch.no_grad():
                own_ops().kernel(tensors)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return None; other kernels call a jitted function as this, but kernels never run here."""
        return None


class CompiledKernel:
    """Stands in for a kernel compiled from CUDA source (``torch.cuda._compile_kernel``): each call records one launch."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Compile nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Record one launch."""
        TritonKernel(None).run(*args, **kwargs)

    def set_shared_memory_config(self, *_: Any) -> None:
        """Set nothing."""


def _jit(function: Any = None, **_: Any) -> Any:
    """Stand in for ``triton.jit``: return the kernel of a function (``@jit``), or a decorator (``@jit(...)``)."""
    return TritonKernel(function) if callable(function) else TritonKernel


def _decorator_without_effect(*_: Any, **__: Any) -> Callable[[Any], Any]:
    """Return a decorator that returns the function unchanged; all arguments are ignored."""
    return lambda function: function


def _flash_attn(name: str = "flash_attn") -> dict[str, Any]:
    """Return what the package ``name`` holds, by dotted names: flash_attn, or flash_attn_interface.

    The latter is the package of flash attention's third version, which has functions of attention alone.
    """
    functions = {
        "flash_attn_func": attention, "flash_attn_qkvpacked_func": packed_attention,
        "flash_attn_kvpacked_func": paired_attention, "flash_attn_varlen_func": varlen_attention,
        "flash_attn_varlen_qkvpacked_func": varlen_packed_attention,
    }  # fmt: skip
    modules = ("", ".flash_attn_interface") if name == "flash_attn" else ("",)
    stand_ins: dict[str, Any] = {
        f"{name}{module}.{key}": value for module in modules for key, value in functions.items()
    }
    if name != "flash_attn":
        return stand_ins
    stand_ins |= {f"flash_attn.bert_padding.{key}": value for key, value in _PADDING.items()}
    stand_ins |= {
        "flash_attn.layers.rotary.apply_rotary_emb": rotary, "flash_attn.layers.rotary.apply_rotary_emb_func": rotary,
        "flash_attn.ops.rms_norm.RMSNorm": RMSNorm, "flash_attn.ops.triton.layer_norm.RMSNorm": RMSNorm,
        "flash_attn.losses.cross_entropy.CrossEntropyLoss": CrossEntropyLoss,
    }  # fmt: skip
    return stand_ins


_PADDING: dict[str, Any] = {
    "unpad_input": unpad_input,
    "pad_input": lambda hidden, indices, batch, length: hidden.reshape(batch, length, *hidden.shape[1:]),
    "index_first_axis": lambda x, indices: x[indices],
}


def _xformers() -> dict[str, Any]:
    """Return the stand-ins for what scripts use of xformers, by dotted names: attention, causal mask, and ``unbind``."""
    return {
        "xformers.ops.memory_efficient_attention": efficient_attention,
        "xformers.ops.LowerTriangularMask": LowerTriangularMask,
        "xformers.ops.fmha.attn_bias.LowerTriangularMask": LowerTriangularMask,
        "xformers.ops.unbind": torch.unbind,  # xformers' own may spare a copy in the backward pass
    }


def _apex() -> dict[str, Any]:
    """Return what apex holds, by dotted names: optimizers, norms and data parallelism, each of them torch's own."""
    return {
        "apex.optimizers.FusedAdam": fused_optimizer(torch.optim.AdamW, "betas", "eps", "weight_decay"),
        "apex.optimizers.FusedSGD": fused_optimizer(torch.optim.SGD, "momentum", "dampening", "weight_decay", "nesterov"),
        "apex.normalization.FusedLayerNorm": LayerNorm, "apex.normalization.MixedFusedLayerNorm": LayerNorm,
        "apex.normalization.fused_layer_norm.FusedLayerNorm": LayerNorm,
        "apex.normalization.FusedRMSNorm": RMSNorm, "apex.normalization.MixedFusedRMSNorm": RMSNorm,
        "apex.parallel.DistributedDataParallel": lambda module, **_: nn.parallel.DistributedDataParallel(module),
        "apex.parallel.SyncBatchNorm": nn.SyncBatchNorm,
        "apex.parallel.convert_syncbn_model": nn.SyncBatchNorm.convert_sync_batchnorm,
    }  # fmt: skip


def _liger_kernel() -> dict[str, Any]:
    """Return what liger_kernel holds, by dotted names: layers and losses, and functions that would patch a model in place."""
    # The functions that patch a model leave it unchanged here, because the patched layers do the same arithmetic.
    stand_ins: dict[str, Any] = {
        "RMSNorm": RMSNorm, "LigerRMSNorm": RMSNorm, "LigerLayerNorm": LayerNorm, "LigerSwiGLUMLP": SwiGLU,
        "LigerCrossEntropyLoss": CrossEntropyLoss, "LigerFusedLinearCrossEntropyLoss": LinearCrossEntropyLoss,
        "_apply_liger_kernel_to_instance": lambda *_, **__: None, "_apply_liger_kernel": lambda *_, **__: None,
    }  # fmt: skip
    for family in (
        "llama",
        "mistral",
        "mixtral",
        "gemma",
        "gemma2",
        "gemma3",
        "qwen2",
        "qwen3",
        "qwen2_vl",
        "phi3",
        "olmo2",
    ):
        stand_ins[f"apply_liger_kernel_to_{family}"] = lambda *_, **__: None
    return {f"liger_kernel.transformers.{key}": value for key, value in stand_ins.items()}


def _bitsandbytes() -> dict[str, Any]:
    """Return what bitsandbytes holds, by dotted names: optimizers of 8 and 32 bits, and layers with packed weights."""
    stand_ins: dict[str, Any] = {
        f"{prefix}{name}8bit": StatesOfOneByte
        for prefix in ("", "Paged")
        for name in ("Adam", "AdamW", "AdEMAMix", "LAMB")
    }
    stand_ins |= {
        f"{prefix}{name}8bit": OneStateOfOneByte for prefix in ("", "Paged") for name in ("Lion", "SGD", "RMSprop")
    }
    stand_ins |= {
        f"{prefix}{name}{suffix}": OneState
        for prefix in ("", "Paged")
        for name in ("Lion", "SGD", "RMSprop")
        for suffix in ("", "32bit")
    }
    adam = fused_optimizer(torch.optim.AdamW, "betas", "eps", "weight_decay")  # states of 32 bits are torch's own
    stand_ins |= dict.fromkeys(
        ("Adam", "AdamW", "PagedAdam", "PagedAdamW", "AdamW32bit", "PagedAdamW32bit", "Adam32bit"), adam
    )
    return {f"bitsandbytes.optim.{key}": value for key, value in stand_ins.items()} | {
        "bitsandbytes.nn.Linear4bit": Linear4bit, "bitsandbytes.nn.LinearNF4": Linear4bit,
        "bitsandbytes.nn.LinearFP4": Linear4bit, "bitsandbytes.nn.Linear8bitLt": Linear8bitLt,
        "bitsandbytes.nn.Params4bit": PackedWeight, "bitsandbytes.nn.Int8Params": PackedWeight,
        "bitsandbytes.nn.Embedding": nn.Embedding, "bitsandbytes.nn.StableEmbedding": nn.Embedding,
    }  # fmt: skip


def _triton() -> dict[str, Any]:
    """Return what triton holds, by dotted names: decorators that make recorded kernels, and two helpers for sizes."""
    return {
        "triton.jit": _jit, "triton.autotune": _decorator_without_effect, "triton.heuristics": _decorator_without_effect,
        "triton.cdiv": lambda x, y: -(-x // y), "triton.next_power_of_2": lambda n: 1 << (int(n) - 1).bit_length(),
        REST: True,
    }  # fmt: skip


def _kernels() -> dict[str, Any]:
    """Return what the package ``kernels`` holds: ``get_kernel``, which knows flash attention alone."""
    functions = {key.rpartition(".")[2]: value for key, value in _flash_attn("flash_attn_interface").items()}
    package = SimpleNamespace(**functions, flash_attn_interface=SimpleNamespace(**functions))

    def get_kernel(name: str, *_: Any, **__: Any) -> Any:
        """Return the functions of flash attention. Raises ImportError for a ``name`` without "flash"."""
        if "flash" not in name:
            raise ImportError(f"the kernel {name} has no stand-in here")
        return package

    return {"kernels.get_kernel": get_kernel}


def _wandb() -> dict[str, Any]:
    """Return what wandb holds, by dotted names: all is inert except the run's configuration, which scripts read back."""

    class Config(SimpleNamespace):
        """The run's configuration, read by attribute or by key."""

        def update(self, values: Any, **_: Any) -> None:
            """Take the values of a mapping or of an object's attributes."""
            self.__dict__.update(values if isinstance(values, Mapping) else vars(values))

        def __getitem__(self, key: str) -> Any:
            """Return the value of a key. Raises KeyError for an unknown one."""
            return self.__dict__[key]

    config = Config()
    run = Inert("wandb.run")
    run.__dict__["config"] = config

    def init(*_: Any, config: Any = None, **__: Any) -> Any:
        """Return the run, with the script's configuration."""
        if config is not None:
            run.config.update(config)
        return run

    return {"wandb.init": init, "wandb.run": run, "wandb.config": config, REST: True}


PACKAGES: dict[str, Callable[[], dict[str, Any]]] = {
    "flash_attn": _flash_attn,
    "flash_attn_interface": lambda: _flash_attn("flash_attn_interface"),
    "xformers": _xformers,
    "apex": _apex,
    "liger_kernel": _liger_kernel,
    "bitsandbytes": _bitsandbytes,
    "triton": _triton,
    "kernels": _kernels,
    "wandb": _wandb,
}
"""What the stand-in of each package holds, by dotted names."""
