"""Registry of the modules that show and emit records, so that records need not import the packages above them.

``import ddltool`` registers the modules; each is imported when the first record needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_loaders: dict[str, Callable[[], Any]] = {}


def register(load: Callable[[], Any], what: str = "shows records") -> None:
    """Register ``load``, which imports and returns a module, for the task ``what``, in place of an earlier one.

    The module for "shows records" has the functions ``html``, ``frame``, ``chart`` and ``save_table``; the one for
    "emits plans" has ``emit``.
    """
    _loaders[what] = load


def module(what: str = "shows records") -> Any:
    """Return the module registered for the task ``what``, imported if need be. Raises RuntimeError if none is registered."""
    if what not in _loaders:
        raise RuntimeError(f"nothing is registered that {what}; import ddltool registers it")
    return _loaders[what]()
