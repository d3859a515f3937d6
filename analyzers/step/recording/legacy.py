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


class _TensorType(type):
    """The metaclass of the old tensor types: calling one makes a tensor on the GPU, isinstance checks type and device."""

    dtype: torch.dtype

    def __call__(cls, *args: Any, **_: Any) -> Any:
        """Return a new tensor of the type, as ``torch.cuda.FloatTensor(2, 3)`` does."""
        return new_tensor(args, cls.dtype)

    def __instancecheck__(cls, value: Any) -> bool:
        """Return whether a value is a tensor of this type on the GPU."""
        return isinstance(value, Tensor) and value.is_cuda and value.dtype == cls.dtype


def new_tensor(args: tuple[Any, ...], dtype: torch.dtype, device: Any = "cuda") -> Tensor:
    """Return a tensor as the old constructors do: with the values of a list or array, or uninitialized, of given sizes.

    ``args``: what the constructor was called with, a list or the sizes; without arguments the tensor has no elements.
    """
    if args and not isinstance(args[0], (int, torch.Size)):
        return torch.as_tensor(args[0], dtype=dtype).to(device)
    sizes = args or (0,)
    return torch.empty(*sizes, dtype=dtype, device=device)


def legacy_result(name: str, tensor: Tensor, args: tuple[Any, ...], device: torch.device) -> Any:
    """Return what ``tensor.type(kind)`` or ``tensor.new(...)`` returns for a tensor on the GPU or an old GPU type.

    NotImplemented: torch's own method gives the right result. ``name``: the method, "type" or "new"; ``args``: its
    arguments; ``device``: the recorded device, which the script takes for a GPU. Call it outside the mode that stands
    in for torch's functions.
    """
    is_on_gpu = tensor.device.type in ("cuda", device.type)
    if name == "new" and is_on_gpu:
        return new_tensor(args, tensor.dtype, device)
    if name == "type" and not args and is_on_gpu:  # asks for the name of the tensor's type
        type_name = next(kind for kind, dtype in _TYPES.items() if dtype == tensor.dtype)
        return f"torch.cuda.{type_name}"
    if name == "type" and args:
        kind = _gpu_type_of(args[0])
        if isinstance(kind, _TensorType):
            return tensor.to(device, kind.dtype)
    return NotImplemented


def _gpu_type_of(kind: Any) -> Any:
    """Return the old GPU type for its name (``torch.cuda.FloatTensor``); return any other value unchanged."""
    if isinstance(kind, str) and kind.startswith("torch.cuda."):
        return getattr(torch.cuda, kind.rpartition(".")[2])
    return kind


def stand_in_types() -> None:
    """Give ``torch.cuda`` its old tensor types, and make a module ``torch._six`` with the names that torch 1 had there.

    ``torch.set_default_tensor_type`` takes these types, too. So a script that names them can be recorded without a GPU, which
    torch's own need. Nothing of this is undone, because the process is the recorded script's alone.
    """
    six = ModuleType("torch._six")
    six.__dict__.update(
        inf=math.inf, nan=math.nan, string_classes=(str, bytes), int_classes=int, container_abcs=collections.abc
    )
    sys.modules.setdefault(six.__name__, six)
    for name, dtype in _TYPES.items():
        setattr(torch.cuda, name, _TensorType(name, (), {"dtype": dtype}))
    real_set_default = torch.set_default_tensor_type

    def set_default_tensor_type(kind: Any) -> None:
        """Set the default type and device of new tensors to those of an old GPU type; any other kind goes to torch."""
        kind = _gpu_type_of(kind)
        if not isinstance(kind, _TensorType):
            return real_set_default(kind)
        torch.set_default_dtype(kind.dtype)
        torch.set_default_device("cuda")
        return None

    torch.set_default_tensor_type = set_default_tensor_type
