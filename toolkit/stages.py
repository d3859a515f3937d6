"""How a long function reports progress and remarks: commands draw a bar, notebooks show nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Advance = Callable[..., None]
"""``advance(done, remark="")``: report how much is done so far, and a remark to show beside it."""
Stage = Callable[..., AbstractContextManager[Advance]]
"""``stage(title, total=None)``: a context manager around the work that yields its :data:`Advance`; None: total unknown."""
Tell = Callable[[str], None]
"""``tell(line)``: give the user a remark of one line."""


@contextmanager
def quietly(title: str, total: int | None = None) -> Iterator[Advance]:
    """Yield an :data:`Advance` that shows nothing: the :data:`Stage` of work that nobody watches."""
    yield lambda done, remark="": None


def log_remark(line: str) -> None:
    """Log a remark as a warning of the logger ``ddltool``, which Python prints unless the caller has silenced it."""
    logging.getLogger("ddltool").warning("%s", line)
