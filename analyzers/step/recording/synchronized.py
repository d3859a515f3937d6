"""Batch norms whose statistics all processes share: their CUDA kernels, of which torch says no shapes without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def stand_in_synchronized_norms() -> torch.library.Library:
    """Tell torch the shapes of what the CUDA kernels of ``nn.SyncBatchNorm`` return.

    Returns the library in which these rules are registered; the caller has to keep it, or they are gone.
    """
    library = torch.library.Library("aten", "IMPL")
    kernels = {
        "batch_norm_stats": lambda x, _eps: _two_per_channel(x),
        "batch_norm_gather_stats": lambda x, *_: _two_per_channel(x),
        "batch_norm_gather_stats_with_counts": lambda x, *_: _two_per_channel(x),
        "batch_norm_elemt": lambda x, *_: torch.empty_like(x),
        "batch_norm_backward_reduce": _reduced,
        "batch_norm_backward_elemt": lambda grad, *_: torch.empty_like(grad),
    }
    for name, kernel in kernels.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            library.impl(name, kernel, "Meta")
    return library


def _two_per_channel(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return two vectors (channels,), such as mean and deviation, of x (batch, channels, ...); in float32 for a half type."""
    dtype = torch.float32 if x.dtype.itemsize == 2 else x.dtype
    return x.new_empty(x.shape[1], dtype=dtype), x.new_empty(x.shape[1], dtype=dtype)


def _reduced(
    _grad: Tensor, x: Tensor, _mean: Tensor, _invstd: Tensor, weight: Any, _needs_input: bool, *needs_parameters: bool
) -> tuple[Any, ...]:
    """Return empty tensors shaped like the results of ``batch_norm_backward_reduce``, whose arguments these are.

    These are two sums over the gradients of a channel, then the gradients of weight and bias, each (channels,), and (0,)
    for a parameter's gradient that is not needed. ``x`` is (batch, channels, ...), ``weight`` may be None.
    ``needs_parameters``: whether the weight's gradient is needed, and whether the bias's is.
    """
    dtype = weight.dtype if isinstance(weight, Tensor) else torch.float32
    channels = x.shape[1]
    gradients = (x.new_empty(channels if is_needed else 0, dtype=dtype) for is_needed in needs_parameters)
    return *_two_per_channel(x), *gradients
