"""Linear layers in float8 in traces: which layers of a model, and what one runs forward and backward.

As ``torchao.float8.convert_to_float8_training`` (dynamic scaling, one scale a tensor) and Transformer Engine's current scaling
do it: input and weight in e4m3, the output's gradient in e5m2, all three products on the float8 units, results in the half
type. Each tensor is read for its largest value, then read and cast; the gradient's two products need the other layout of
input, weight and gradient, a copy in float8, because Hopper multiplies rows by columns only. The weight is kept in high
precision and cast again for the backward pass, the input is kept in float8. Eager, these are Transformer Engine's kernels
(torchao's own are more); under ``torch.compile`` they fuse as any other. Start at :func:`float8_layers`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

# Matrix units read rows of 16 bytes: torch refuses other widths. Below so many columns casts cost more than products gain:
# routers, adapters and small heads stay as they are.
_WIDTH_MULTIPLE, _LEAST_WIDTH = 16, 256
# e4m3 has the finer steps, for inputs and weights; e5m2 the wider range, which gradients need.
_VALUES, _GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2


def float8_layers(module: nn.Module) -> list[str]:
    """Return the names of a module's linear layers that are converted to float8.

    These are the layers whose two widths are at least 256 and divisible by 16. A language model's head is left out: a
    layer with as many outputs as an embedding has rows. So is a weight that is computed from others. Attention is no
    linear layer, nor is transformers' ``Conv1D``.
    """
    vocabularies = {each.num_embeddings for each in module.modules() if isinstance(each, nn.Embedding)}
    return [
        name
        for name, layer in linear_layers(module).items()
        if _pays_in_float8(layer) and layer.out_features not in vocabularies
    ]


def linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    """Return all linear layers of a module by name."""
    return {name: each for name, each in module.named_modules() if isinstance(each, nn.Linear)}


def _pays_in_float8(layer: nn.Linear) -> bool:
    """Return whether float8 units take a layer's widths and make it faster; False for a weight computed from others."""
    widths = layer.in_features, layer.out_features
    return (
        "weight" in layer._parameters  # a weight that is computed (weight norm) is a plain attribute
        and min(widths) >= _LEAST_WIDTH
        and not any(width % _WIDTH_MULTIPLE for width in widths)
    )


class Float8Linears(TorchFunctionMode):
    """A mode under which ``functional.linear`` of chosen weights runs in float8, with results in ``dtype``."""

    def __init__(self, weights: Collection[Tensor], dtype: torch.dtype) -> None:
        """Choose the weights, compared by identity, and ``dtype``, the type of the results (bfloat16 or float16)."""
        super().__init__()
        self.dtype = dtype
        self.weights = {id(weight) for weight in weights}
        """The identities of the chosen weights."""
        self._last_cast: Callable[[], tuple[Tensor | None, ...]] = lambda: (None, None, None)
        """A function that returns the last input, its values in float8 and its scale, each None once it is freed.

        Layers side by side (query, key and value) read the same input, which is cast once. The references are weak, so
        that the cache keeps no memory in use.
        """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one function of torch, which the mode intercepts with its arguments.

        ``functional.linear`` of a chosen weight runs in float8, and any other call unchanged.
        """
        keywords = dict(kwargs or {})
        if func is functional.linear:
            arguments = {**dict(zip(("input", "weight", "bias"), args, strict=False)), **keywords}
            if id(arguments["weight"]) in self.weights:
                return self._linear(arguments["input"], arguments["weight"], arguments.get("bias"))
        return func(*args, **keywords)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``linear`` in float8: x (..., k), weight (n, k), bias (n,) or None -> (..., n) in the mode's type.

        An input that was cast for the layer before is not cast again.
        """
        rows = x.reshape(-1, x.shape[-1])
        last_input, values, scale = self._last_cast()
        if last_input is not x or values is None or scale is None:
            with torch.no_grad():
                values, scale = _scaled(rows, _VALUES)
            references = weakref.ref(x), weakref.ref(values), weakref.ref(scale)
            self._last_cast = lambda: tuple(reference() for reference in references)
        result: Tensor = _Linear.apply(rows, values, scale, weight, bias, self.dtype)  # type: ignore[no-untyped-call]
        return result.reshape(*x.shape[:-1], weight.shape[0])


class _Linear(torch.autograd.Function):
    """The autograd function of one linear layer in float8, with k input features, n output features and t rows.

    It takes the input (t, k) twice: as given (``x``), only so that autograd asks for its gradient, and cast to float8
    (``values`` with their ``scale``). The weight is (n, k), the bias (n,) or None, and the result (t, n).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        values: Tensor,
        scale: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the layer's outputs (t, n) in ``dtype``, float16 or bfloat16.

        For the backward pass the input is kept in float8, and the weight in its own precision.
        """
        weight_values, weight_scale = _scaled(weight, _VALUES)
        # No save_for_backward: within torch.utils.checkpoint its hooks abort a process that records.
        ctx.kept = values, scale, weight, weight_scale
        ctx.dtype, ctx.has_bias = dtype, bias is not None
        half_bias = None if bias is None else bias.to(dtype)
        return torch._scaled_mm(values, weight_values.t(), scale, weight_scale, half_bias, out_dtype=dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        """Return the gradients of input, weight and bias, None for the other arguments and for those that need none.

        ``gradients`` holds one tensor, the gradient of the result (t, n).
        """
        values, scale, weight, weight_scale = ctx.kept
        ctx.kept = None  # so that the memory of these tensors is freed as soon as this function ends
        gradient = gradients[0].contiguous()
        cast, cast_scale = _scaled(gradient, _GRADIENTS)
        needs_input, _, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        input_gradient = weight_gradient = None
        # A product in float8 takes its first factor laid out by rows and its second by columns, hence the copies.
        if needs_input:
            weight_columns = torch.ops.ddltool.to_float8(weight, weight_scale, _VALUES, True)
            input_gradient = torch._scaled_mm(cast, weight_columns, cast_scale, weight_scale, out_dtype=ctx.dtype)
        if needs_weight:
            gradient_rows = cast.t().contiguous()
            input_columns = values.t().contiguous().t()
            weight_gradient = torch._scaled_mm(gradient_rows, input_columns, cast_scale, scale, out_dtype=ctx.dtype)
        bias_gradient = gradient.sum(0) if needs_bias else None
        return input_gradient, None, None, weight_gradient, bias_gradient, None


def _scaled(tensor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a tensor cast to a type of float8, and the scale that it was cast with: one float32 number, of shape ()."""
    scale = torch.ops.ddltool.float8_scale(tensor)
    return torch.ops.ddltool.to_float8(tensor, scale, dtype), scale


@torch.library.custom_op("ddltool::float8_scale", mutates_args=())
def float8_scale(x: Tensor) -> Tensor:
    """Stand for the kernel that finds a tensor's largest value and returns its scale: () in float32. Only ever traced."""
    raise NotImplementedError("ddltool::float8_scale stands for a kernel in traces; it computes nothing")


@torch.library.custom_op("ddltool::to_float8", mutates_args=())
def to_float8(x: Tensor, scale: Tensor, dtype: torch.dtype, columns: bool = False) -> Tensor:
    """Stand for the kernel that casts a scaled tensor to a float8 type. Only ever traced.

    ``columns``: the result, a matrix, is laid out by columns.
    """
    raise NotImplementedError("ddltool::to_float8 stands for a kernel in traces; it computes nothing")


@float8_scale.register_fake
def _(x: Tensor) -> Tensor:
    """Return the scale's shape and type: one number in float32."""
    return x.new_empty((), dtype=torch.float32)


@to_float8.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype, columns: bool = False) -> Tensor:
    """Return an empty tensor of x's shape in float8; with ``columns`` its memory runs along columns."""
    return x.new_empty(x.shape[::-1], dtype=dtype).t() if columns else x.new_empty(x.shape, dtype=dtype)
