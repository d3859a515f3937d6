"""Fingerprints of tensors, and of everything in nested values."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def digest(value: Tensor | bytes) -> str:
    """Return the fingerprint (16 hex digits) of a tensor's type, shape and bits, or of bytes.

    A meta tensor has no bits, so only its type and shape count.
    """
    hasher = hashlib.blake2b(digest_size=8)
    if isinstance(value, Tensor):
        hasher.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        on_host = torch.empty(0) if value.is_meta else value.detach().cpu().contiguous()
        value = on_host.flatten().view(torch.uint8).numpy().tobytes()
    hasher.update(value)
    return hasher.hexdigest()


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each leaf: everything that is not itself a mapping, list or tuple.

    ``name``: prefix of the names. An empty container yields nothing.

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
    """Return the fingerprint of each leaf of a nested value, by dotted name (:func:`leaves`).

    Where an object's content cannot be read, its type's name is fingerprinted instead.
    """
    return {name: digest(leaf if isinstance(leaf, Tensor) else _content(leaf)) for name, leaf in leaves(value)}


def _content(leaf: Any) -> bytes:
    """Return bytes that stand for the content of a leaf that is not a tensor, the same in every process.

    That is an array's or image's data, bytes themselves, and the ``repr`` of others; if that shows an address in
    memory, which differs between processes, the type's name.
    """
    if isinstance(leaf, bytes):
        return leaf
    if isinstance(leaf, np.ndarray):
        return f"{leaf.dtype} {leaf.shape}".encode() + leaf.tobytes()
    if hasattr(leaf, "tobytes") and not isinstance(leaf, np.generic):  # an image; NumPy's scalars are shown by `repr`
        return bytes(leaf.tobytes())
    text = repr(leaf).encode()
    shows_address = b" at 0x" in text and not isinstance(leaf, str)  # a text may contain these words
    return type(leaf).__name__.encode() if shows_address else text


def fingerprint(value: Any) -> str:
    """Return one fingerprint (16 hex digits) of all leaves of a nested value and their names."""
    return digest(repr(digests(value)).encode())
