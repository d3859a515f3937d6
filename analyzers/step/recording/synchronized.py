"""Batch norms whose statistics all processes share: their CUDA kernels, of which torch says no shapes without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def stand_in_synchronized_norms() -> torch.library.Library:
    """Say what the kernels of ``nn.SyncBatchNorm`` give; the returned library keeps that said."""
    library = torch.library.Library("aten", "IMPL")
    kernels = {
        "batch_norm_stats": lambda x, _eps: _statistics(x, 2),
        "batch_norm_gather_stats": lambda x, *_: _statistics(x, 2),
        "batch_norm_gather_stats_with_counts": lambda x, *_: _statistics(x, 2),
        "batch_norm_elemt": lambda x, *_: torch.empty_like(x),
        "batch_norm_backward_reduce": _reduced,
        "batch_norm_backward_elemt": lambda grad, *_: torch.empty_like(grad),
    }
    for name, kernel in kernels.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            library.impl(name, kernel, "Meta")
    return library


def _statistics(x: Tensor, many: int) -> tuple[Tensor, ...]:
    """Return vectors of a value per channel, in float32 for half precision."""
    dtype = torch.float32 if x.dtype.itemsize == 2 else x.dtype
    return tuple(x.new_empty(x.shape[1], dtype=dtype) for _ in range(many))


def _reduced(_grad: Tensor, x: Tensor, _mean: Tensor, _invstd: Tensor, weight: Any, *asked: bool) -> tuple[Any, ...]:
    """Return the sums of gradients, and the gradients of weight and bias where they are asked for."""
    like = weight.dtype if isinstance(weight, Tensor) else torch.float32
    sums = _statistics(x, 2)
    return *sums, *(x.new_empty(x.shape[1] if wanted else 0, dtype=like) for wanted in asked[1:])
