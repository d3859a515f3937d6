"""Fingerprints of tensors, and of everything in nested values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def digest(value: Tensor | bytes) -> str:
    """Return the fingerprint (16 hex digits) of a tensor's type, shape and bits, or of bytes."""
    hasher = hashlib.blake2b(digest_size=8)
    if isinstance(value, Tensor):
        hasher.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        on_host = torch.empty(0) if value.is_meta else value.detach().cpu().contiguous()
        value = on_host.flatten().view(torch.uint8).numpy().tobytes()
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
    """Return the fingerprint of everything in a nested value, by dotted name (:func:`leaves`).

    Objects without a representation of their content have their type's fingerprint.
    """
    return {name: digest(leaf if isinstance(leaf, Tensor) else _content(leaf)) for name, leaf in leaves(value)}


def _content(leaf: Any) -> bytes:
    """Return bytes that stand for the content of something that is no tensor: the same in every process.

    A text that shows an address in memory says nothing about the content; then the type's name stands for it.
    """
    if isinstance(leaf, np.ndarray):
        return f"{leaf.dtype} {leaf.shape}".encode() + leaf.tobytes()
    if not isinstance(leaf, (bytes, np.generic)) and hasattr(leaf, "tobytes"):  # an image
        return bytes(leaf.tobytes())
    text = leaf if isinstance(leaf, bytes) else repr(leaf).encode()
    return type(leaf).__name__.encode() if b" at 0x" in text and not isinstance(leaf, (bytes, str)) else text


def fingerprint(value: Any) -> str:
    """Return one fingerprint of everything in a nested value, names included."""
    return digest(repr(digests(value)).encode())
