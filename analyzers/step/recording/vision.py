"""torchvision's own operators where its compiled library does not load: regions of images pooled, boxes suppressed.

Their costs are those of what they read and write; a deformable convolution is the gathering of its columns and a product,
as its CUDA kernel is. How many boxes a suppression keeps only a run knows: a third of them are assumed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Arguments that several operators share, as torch's schemas write them.
_SIZE = "float spatial_scale, SymInt pooled_height, SymInt pooled_width"
_SHAPE = "SymInt batch_size, SymInt channels, SymInt height, SymInt width"
_DEFORM = ", ".join(f"SymInt {name}" for name in (
    "stride_h", "stride_w", "pad_h", "pad_w", "dil_h", "dil_w", "groups", "offset_groups",
))  # fmt: skip
_SCHEMAS = {
    "roi_align": f"(Tensor input, Tensor rois, {_SIZE}, int sampling_ratio, bool aligned) -> Tensor",
    "qroi_align": f"(Tensor input, Tensor rois, {_SIZE}, int sampling_ratio, bool aligned) -> Tensor",
    "_roi_align_backward": f"(Tensor grad, Tensor rois, {_SIZE}, {_SHAPE}, int sampling_ratio, bool aligned) -> Tensor",
    "roi_pool": f"(Tensor input, Tensor rois, {_SIZE}) -> (Tensor, Tensor)",
    "_roi_pool_backward": f"(Tensor grad, Tensor rois, Tensor argmax, {_SIZE}, {_SHAPE}) -> Tensor",
    "ps_roi_align": f"(Tensor input, Tensor rois, {_SIZE}, int sampling_ratio) -> (Tensor, Tensor)",
    "_ps_roi_align_backward": f"(Tensor grad, Tensor rois, Tensor mapping, {_SIZE}, int sampling_ratio, {_SHAPE}) -> Tensor",
    "ps_roi_pool": f"(Tensor input, Tensor rois, {_SIZE}) -> (Tensor, Tensor)",
    "_ps_roi_pool_backward": f"(Tensor grad, Tensor rois, Tensor mapping, {_SIZE}, {_SHAPE}) -> Tensor",
    "deform_conv2d": f"(Tensor x, Tensor weight, Tensor offset, Tensor mask, Tensor bias, {_DEFORM}, bool use_mask) -> Tensor",
    "_deform_conv2d_backward": (
        f"(Tensor grad, Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, {_DEFORM}, bool use_mask)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    ),
    "_columns": "(Tensor input, Tensor offset, Tensor? mask, int height, int width) -> Tensor",
    "_columns_backward": "(Tensor grad, Tensor input, Tensor offset, Tensor? mask) -> (Tensor, Tensor, Tensor)",
}  # fmt: skip
_BOXES_PER_KEPT = 3
"""Suppression keeps one of so many boxes: Faster R-CNN's 6,000 region proposals become about 2,000 (Ren et al. 2015)."""


def stand_in_vision(declared: torch.library.Library | None, device: torch.device) -> dict[str, Callable[[Any], None]]:
    """Declare torchvision's operators where its compiled library is not loaded, and return patches for its modules.

    ``declared``: what :func:`declare_torchvision` returned; None: nothing is done. ``device``: the recorded one. Returns,
    by the name of a module of torchvision, a function that patches the module once it is imported.
    """
    if declared is None:
        return {}
    for name, schema in _SCHEMAS.items():
        declared.define(f"{name}{schema}")
    # torchvision compares the version with torch's when it is imported.
    declared.define("_cuda_version() -> int")
    declared.impl("_cuda_version", lambda: -1, "CompositeExplicitAutograd")  # -1: compiled without CUDA
    # It returns the indices of the boxes that are kept; their number is rounded up.
    declared.impl("nms", lambda boxes, _scores, _iou: torch.arange(-(-len(boxes) // _BOXES_PER_KEPT)), "CPU")
    declared.impl("_columns", _columns, "Meta")
    declared.impl("_columns_backward", lambda grad, x, offset, mask: (
        torch.empty_like(x), torch.empty_like(offset), torch.empty_like(offset if mask is None else mask)
    ), "Meta")  # fmt: skip
    torch.library.register_autograd(
        "torchvision::_columns", _columns_gradients, setup_context=_keep_inputs, lib=declared
    )
    for name in ("nms", "roi_align", "roi_pool", "_columns"):
        declared.impl(
            name, _in_float32(getattr(torch.ops.torchvision, name).default), f"Autocast{_dispatch_key(device)}"
        )
    return {
        "torchvision.extension": lambda module: setattr(module, "_has_ops", lambda: True),  # else it refuses to run any
        # Boxes of each class are suppressed apart: which classes there are only a run knows, and one pass does as much.
        "torchvision.ops.boxes": lambda module: setattr(
            module, "_batched_nms_vanilla", module._batched_nms_coordinate_trick
        ),
        "torchvision.ops.deform_conv": lambda module: setattr(module, "deform_conv2d", deform_conv2d_as_product),
    }


def _dispatch_key(device: torch.device) -> str:
    """Return a device's name among torch's dispatch keys: ``CUDA``, or ``PrivateUse1`` for a registered device."""
    return "PrivateUse1" if device.type == torch._C._get_privateuse1_backend_name() else device.type.upper()


def _in_float32(op: Any) -> Callable[..., Any]:
    """Return an op's kernel under autocast, as in torchvision: it computes in float32 and returns the first input's type."""

    def is_floating(value: Any) -> bool:
        """Return whether an argument or result is a floating-point tensor."""
        return isinstance(value, Tensor) and value.is_floating_point()

    def run(first: Tensor, *args: Any) -> Any:
        """Run the op without autocast on floating-point inputs cast to float32; its result has the type of ``first``."""
        autocast_key = torch._C.DispatchKey.AutocastPrivateUse1  # type: ignore[attr-defined]
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(autocast_key)):
            float32_arguments = [arg.float() if is_floating(arg) else arg for arg in (first, *args)]
            out = op(*float32_arguments)
        return out.to(first.dtype) if is_floating(out) else out

    return run


def _keep_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    """Keep the inputs of ``_columns`` (x, offset, mask, height, width) for its backward pass."""
    ctx.inputs = inputs


def _columns(x: Tensor, offset: Tensor, _mask: Tensor | None, height: int, width: int) -> Tensor:
    """Return the shape, as an empty tensor, of the columns that a deformable convolution gathers from its input.

    It is (batch, channels x filter taps, output positions). ``height`` and ``width``: of the filter. The last two
    dimensions of ``offset`` are the height and width of the output.
    """
    return x.new_empty((x.shape[0], x.shape[1] * height * width, offset.shape[2] * offset.shape[3]))


def _columns_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Return the gradients of the arguments of ``_columns``, None for those that have none: the filter's height and width.

    ``grad``: the gradient of its result. A missing mask has no gradient, either.
    """
    x, offset, mask, *_ = ctx.inputs
    x_gradient, offset_gradient, mask_gradient = torch.ops.torchvision._columns_backward(grad, x, offset, mask)
    return x_gradient, offset_gradient, None if mask is None else mask_gradient, None, None


def deform_conv2d_as_product(input: Tensor, offset: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = (1, 1),
             padding: Any = (0, 0), dilation: Any = (1, 1), mask: Tensor | None = None) -> Tensor:  # fmt: skip
    """Stand in for torchvision's ``deform_conv2d`` while a model is recorded: the same shapes and work, on empty tensors.

    It gathers columns of the input and multiplies each group's columns by its weight, as the CUDA kernel does. The
    arguments are torchvision's: input (batch, channels, height, width), weight (out channels, channels / groups, height,
    width), result (batch, out channels, height, width), offset and mask (batch, 2 and 1 for each filter tap and offset
    group, height and width of the result). Stride, padding and dilation are not used, because ``offset`` has the size of
    the result.
    """
    out_channels, channels_per_group, height, width = weight.shape
    groups = input.shape[1] // channels_per_group
    # An operator of ours, declared among torchvision's: it makes the shape that the gathering has.
    columns = torch.ops.torchvision._columns(input, offset, mask, height, width)
    columns = columns.view(input.shape[0], groups, channels_per_group * height * width, -1)
    product = torch.matmul(weight.view(groups, out_channels // groups, -1), columns)
    out = product.view(input.shape[0], out_channels, *offset.shape[2:])
    return out if bias is None else out + bias.view(1, -1, 1, 1)


@cache
def declare_torchvision() -> torch.library.Library | None:
    """Declare the two ops that torchvision's import needs, if its compiled library cannot be loaded.

    Returns the library with the declarations, which live as long as it; None: torchvision is missing, or its compiled
    library was loaded. PyPI's torchvision is compiled for a torch with CUDA. Beside a CPU torch its import fails when
    these ops get a meta kernel, and so do the imports of timm and most of transformers.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return None
    try:
        for library_path in Path(spec.origin).parent.glob("_C*"):  # "_C_stable.so" since torchvision 0.29
            if library_path.suffix in (".so", ".pyd", ".dylib"):
                torch.ops.load_library(str(library_path))
                return None
    except OSError:
        pass  # built for another torch (with CUDA, say): the ops are declared below without kernels
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
