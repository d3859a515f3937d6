"""Fingerprints of tensors, and of everything in nested values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def digest(value: Tensor | bytes) -> str:
    """Return the fingerprint (16 hex digits) of a tensor's type, shape and bits, or of bytes."""
    hasher = hashlib.blake2b(digest_size=8)
    if isinstance(value, Tensor):
        hasher.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        value = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    hasher.update(value)
    return hasher.hexdigest()


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the name and value of everything in nested mappings, lists and tuples that is none of these.

    >>> list(leaves({"a": [1, (2,)], "b": 3}))
    [('a.0', 1), ('a.1.0', 2), ('b', 3)]
    """
    if isinstance(value, Mapping):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        yield name, value
        return
    for key, item in items:
        yield from leaves(item, f"{name}.{key}" if name else str(key))


def digests(value: Any) -> dict[str, str]:
    """Return the fingerprint of everything in a nested value, by name; what is no tensor goes by its ``repr``."""
    return {
        name: digest(leaf if isinstance(leaf, (Tensor, bytes)) else repr(leaf).encode()) for name, leaf in leaves(value)
    }
