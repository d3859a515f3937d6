"""What records can do that stands above them: show themselves as a page, a table or a picture, and be emitted.

The records ask here and need not know who does it. The package's door (``import ddltool``) registers who does, which is loaded
when the first record needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_loaders: dict[str, Callable[[], Any]] = {}


def register(load: Callable[[], Any], what: str = "shows records") -> None:
    """Let the module that ``load`` returns do ``what`` from now on; it is loaded when it is first needed.

    One that shows records has ``html``, ``frame``, ``chart`` and ``save_table``; one that emits plans has ``emit``.
    """
    _loaders[what] = load


def module(what: str = "shows records") -> Any:
    """Return the module that was registered for ``what``. Raises RuntimeError when none was."""
    if what not in _loaders:
        raise RuntimeError(f"nothing is registered that {what}; import ddltool registers it")
    return _loaders[what]()
