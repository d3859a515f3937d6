"""Who shows a record as a page, a table or a picture. The records ask here and need not know who it is.

The package's door (``import ddltool``) registers reporting, which is loaded when the first record is to be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_loaders: list[Callable[[], Any]] = []


def register(load: Callable[[], Any]) -> None:
    """Let the module that ``load`` returns show records from now on: its ``html``, ``frame``, ``chart`` and ``save_table``."""
    _loaders[:] = [load]


def module() -> Any:
    """Return the module that shows records. Raises RuntimeError when none was registered."""
    if not _loaders:
        raise RuntimeError("nothing is registered that shows records; import ddltool registers it")
    return _loaders[0]()
