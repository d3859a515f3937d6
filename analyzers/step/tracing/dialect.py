"""How the step is computed: precision, layout, and what CUDA does in one kernel where the CPU takes several.

A step is traced on fake CPU tensors, and torch's CPU and CUDA backends differ: CUDA has dropout, attention with dropout and
recurrent layers as one kernel each, and its autocast keeps normalisation, softmax and losses in float32. :class:`Dialect` is
a mode under which a module runs as it would there, so that the trace holds CUDA's kernels, types and casts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from ddltool.analyzers.step.tracing.op_rules import names_in
from ddltool.precision import PRECISIONS, Precision, PrecisionName, precision_name


@dataclass(frozen=True, slots=True)
class Numerics:
    """Precision and layout of a step.

    ``fp32``: float32 as torch runs it by default (convolutions may use TF32 where the device has it). ``tf32``: float32
    with TF32 in matrix products too. ``bf16``, ``fp16``: autocast over float32 parameters; ``amp`` is read as ``fp16``.
    ``bf16-pure``, ``fp16-pure``: parameters and activations in that type. Raises InputError for another name.
    """

    precision: PrecisionName = "fp32"
    channels_last: bool = False
    cuda: bool = True
    """False: trace what runs on the CPU, kernel by kernel."""
    gathered: bool = False
    """Whether ``fully_shard`` computes in the half type of autocast, ``MixedPrecisionPolicy(param_dtype, torch.float32)``:
    shards of float32 are gathered in the half type and reduced in float32; nothing is cast between the ops."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "precision", precision_name(self.precision))

    @property
    def format(self) -> Precision:
        """Return what the precision computes and keeps in."""
        return PRECISIONS[self.precision]

    @property
    def autocasts(self) -> bool:
        """Whether the forward pass runs under autocast."""
        return self.format.is_autocast and not self.gathered

    def kept(self, value: Tensor) -> Tensor:
        """Return a parameter in the type that it is kept, reduced and updated in."""
        is_half = self.format.keeps != "float32" and value.is_floating_point()
        return value.to(getattr(torch, self.format.keeps)) if is_half else value

    def cast(self, value: Tensor) -> Tensor:
        """Return a parameter, buffer or input in the type and layout in which the module gets it."""
        value = self.kept(value)
        if self.gathered and self.format.is_autocast and value.dtype == torch.float32:
            value = value.to(getattr(torch, self.format.computes))
        if self.channels_last and value.dim() == 4:
            value = value.contiguous(memory_format=torch.channels_last)
        return value

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the block as it would run on the device: under autocast and in CUDA's kernels."""
        half = getattr(torch, self.format.computes) if self.autocasts else torch.bfloat16
        # make_fx turns the cache of casts off, which training has: it holds a parameter's cast until the pass ends.
        with torch.autocast("cpu", dtype=half, enabled=self.autocasts, cache_enabled=True), self.kernels():
            yield

    def kernels(self) -> AbstractContextManager[object]:
        """Return the context manager in which torch's calls are those of the device."""
        return Dialect() if self.cuda else nullcontext()


# What CUDA's autocast runs in float32 (the CPU's keeps some of it in half precision):
# pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float32".
_IN_FLOAT32 = names_in(
    "layer_norm group_norm softmax log_softmax softmin cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss kl_div "
    "binary_cross_entropy_with_logits cosine_embedding_loss cosine_similarity norm pow __pow__ __rpow__ exp expm1 log "
    "log10 log2 log1p rsqrt reciprocal sum prod cumsum cumprod softplus sinh cosh tan acos asin erfinv dist cdist pdist "
    "renorm logsumexp normalize __rdiv__ __rtruediv__ hinge_embedding_loss huber_loss margin_ranking_loss "
    "multi_margin_loss multilabel_margin_loss poisson_nll_loss soft_margin_loss triplet_margin_loss"
)
# What it runs in half precision, and the CPU's does not: the same page, "CUDA Ops that can autocast to float16".
_IN_HALF = names_in("mv addmv addr")
# Of these the CPU's autocast casts the weights, once as CUDA's does, and leaves the states in float32.
_CELLS = names_in("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
# What the CPU's autocast runs in float32, and CUDA's in the type that it is given.
_AS_GIVEN = names_in(
    "avg_pool3d max_pool3d adaptive_avg_pool3d adaptive_max_pool3d max_unpool2d max_unpool3d pad grid_sample trace "
    "fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn stft"
)


class Dialect(TorchFunctionMode):
    """Replaces calls that CUDA computes otherwise than the CPU. Use it around the forward pass and the loss."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one call of torch's, CUDA's way."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        # Dropout happens inside CUDA's attention; with it the CPU would leave the fused path.
        if func is F.scaled_dot_product_attention:
            named = dict(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False))
            args, kwargs = args[:3], {**named, **kwargs, "dropout_p": 0.0}
        if func is F.multi_head_attention_forward and not kwargs.get("need_weights", True):
            args = (*args[:10], 0.0, *args[11:])  # calls the former, where this mode is off
        if name in ("lstm", "gru", "rnn_tanh", "rnn_relu") and len(args) == 9:
            return _recurrent(*args)
        if torch.is_autocast_enabled("cpu"):
            if name in _IN_FLOAT32:
                args, kwargs = _cast((args, kwargs), torch.float32)
            elif name in _CELLS:
                args = (*_cast(args[:2], torch.get_autocast_dtype("cpu")), *args[2:])
            elif name in _IN_HALF:
                args, kwargs = _cast((args, kwargs), torch.get_autocast_dtype("cpu"))
            if name in _IN_HALF or name in _AS_GIVEN:
                with torch.autocast("cpu", enabled=False):
                    return func(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Return dropout from CUDA's one kernel; the signature is that of ``torch.nn.functional.dropout``."""
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


def _cast(arguments: Any, dtype: torch.dtype) -> Any:
    """Return a call's arguments with the floating-point tensors that autocast casts in one type; float64 stays."""
    castable = (torch.float16, torch.bfloat16, torch.float32)

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.dtype in castable else value

    return tree_map(cast, arguments)


def _recurrent(
    x: Tensor,
    hidden: Any,
    weights: list[Tensor],
    bias: bool,
    layers: int,
    dropout: float,
    training: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    """Return the outputs and last states of ``torch.lstm`` and its kin, from one op for all layers, as cuDNN runs them.

    The arguments are those of the torch functions, whose nine positions they have.
    """
    if torch.is_autocast_enabled("cpu"):
        half = torch.get_autocast_dtype("cpu")
        x, weights = x.to(half), [weight.to(half) for weight in weights]
    return recurrent_layers(x, hidden, weights, bidirectional, batch_first)


def recurrent_layers(
    x: Tensor, hidden: Any, weights: list[Tensor], bidirectional: bool, batch_first: bool
) -> tuple[Tensor, ...]:
    """Return a recurrent module's outputs and last states, from one op for all layers.

    ``x`` is (steps, batch, features), or (batch, steps, features) with ``batch_first``; ``hidden`` the first state, or the
    state and the cell of an LSTM, each (layers, batch, width).
    """
    state, *cells = hidden if isinstance(hidden, (tuple, list)) else (hidden,)
    width = int(state.shape[-1]) * (2 if bidirectional else 1)
    steps_first = x.transpose(0, 1) if batch_first else x
    outputs = torch.ops.ddltool.recurrent(steps_first, list(weights), width)
    last_state = outputs[-1:, :, : state.shape[-1]].expand(state.shape).to(state.dtype)
    returned = outputs.transpose(0, 1) if batch_first else outputs
    if not cells:
        return returned, last_state
    [cell] = cells  # of an LSTM; wider than the state where that is projected
    if cell.shape == state.shape:
        return returned, last_state, last_state
    return returned, last_state, outputs[-1:, :, :1].expand(cell.shape).to(cell.dtype)


@torch.library.custom_op("ddltool::recurrent", mutates_args=())
def recurrent(x: Tensor, weights: list[Tensor], width: int) -> Tensor:
    """Stand for all layers of a recurrent module: x (steps, batch, features) -> (steps, batch, width). Only ever traced."""
    raise NotImplementedError("ddltool::recurrent stands for cuDNN's recurrent layers in traces; it computes nothing")


@torch.library.custom_op("ddltool::recurrent_backward", mutates_args=())
def recurrent_backward(gradient: Tensor, x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    """Stand for the backward pass: the gradients of x and of every weight. Only ever traced."""
    raise NotImplementedError("ddltool::recurrent_backward stands for cuDNN's recurrent layers in traces")


@recurrent.register_fake
def _(x: Tensor, weights: list[Tensor], width: int) -> Tensor:
    return x.new_empty((*x.shape[:2], width))


@recurrent_backward.register_fake
def _(gradient: Tensor, x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(x), *(torch.empty_like(weight) for weight in weights)]


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save x and the weights of ``recurrent`` for its backward pass."""
    ctx.save_for_backward(inputs[0], *inputs[1])


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    """Return the gradients of ``recurrent``'s arguments: x, the weights, and None for the width."""
    x, *weights = ctx.saved_tensors
    x_gradient, *weight_gradients = torch.ops.ddltool.recurrent_backward(gradient, x, list(weights))
    return x_gradient, weight_gradients, None


torch.library.register_autograd("ddltool::recurrent", _differentiate, setup_context=_save_inputs)
