"""Tensor types of torch's first years, which scripts still name: ``torch.cuda.FloatTensor``, ``x.type(kind)``, ``x.new(2)``."""

from __future__ import annotations

import collections.abc
import math
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

_TYPES = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16, "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64, "IntTensor": torch.int32, "ShortTensor": torch.int16, "CharTensor": torch.int8,
    "ByteTensor": torch.uint8, "BoolTensor": torch.bool,
}  # fmt: skip


class _OfType(type):
    """Makes tensors of one element type on the GPU, and knows them."""

    dtype: torch.dtype

    def __call__(cls, *args: Any, **_: Any) -> Any:
        return made(args, cls.dtype)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_cuda and value.dtype == cls.dtype


def made(args: tuple[Any, ...], dtype: torch.dtype, device: Any = "cuda") -> Tensor:
    """Return a tensor on the GPU as the old constructors do: of sizes, of a list's or an array's values, or empty."""
    if args and not isinstance(args[0], (int, torch.Size)):
        return torch.as_tensor(args[0], dtype=dtype).to(device)
    return torch.empty(*args or (0,), dtype=dtype, device=device)


def converted(name: str, tensor: Tensor, args: tuple[Any, ...], device: torch.device) -> Any:
    """Return what ``tensor.type(kind)`` and ``tensor.new(...)`` give; NotImplemented where torch's own do.

    Call it where torch's functions are not those of the pose; ``device``: the one that poses.
    """
    is_here = tensor.device.type in ("cuda", device.type)
    if name == "new" and is_here:
        return made(args, tensor.dtype, device)
    if name == "type" and not args and is_here:
        return f"torch.cuda.{next(kind for kind, dtype in _TYPES.items() if dtype == tensor.dtype)}"
    kind = args[0] if name == "type" and args else None
    if isinstance(kind, str) and kind.startswith("torch.cuda."):
        kind = getattr(torch.cuda, kind.rpartition(".")[2])
    return tensor.to(device, kind.dtype) if isinstance(kind, _OfType) else NotImplemented


def stand_in_types() -> None:
    """Let ``torch.cuda`` have the old types, also as the default of new tensors, and ``torch._six`` what torch 1 had there."""
    old = ModuleType("torch._six")
    old.__dict__.update(
        inf=math.inf, nan=math.nan, string_classes=(str, bytes), int_classes=int, container_abcs=collections.abc
    )
    sys.modules.setdefault(old.__name__, old)
    for name, dtype in _TYPES.items():
        setattr(torch.cuda, name, _OfType(name, (), {"dtype": dtype}))
    real = torch.set_default_tensor_type

    def set_default_tensor_type(kind: Any) -> None:
        if isinstance(kind, str) and kind.startswith("torch.cuda."):
            kind = getattr(torch.cuda, kind.rpartition(".")[2])
        if not isinstance(kind, _OfType):
            return real(kind)
        torch.set_default_dtype(kind.dtype)
        torch.set_default_device("cuda")
        return None

    torch.set_default_tensor_type = set_default_tensor_type
