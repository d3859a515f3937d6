"""How a function that takes long says how far it is, and what it remarks: a terminal draws a bar, a notebook stays quiet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Advance = Callable[..., None]
"""Takes how much is done and, if there is one, a remark."""
Stage = Callable[..., AbstractContextManager[Advance]]
"""Given a title and, where it is known, how much there is to do: what surrounds the work."""
Tell = Callable[[str], None]
"""Takes a remark for the user."""


@contextmanager
def quietly(title: str, total: int | None = None) -> Iterator[Advance]:
    """Surround work that nobody watches: a :data:`Stage` whose function takes the progress and shows nothing."""
    yield lambda done, remark="": None


def log_remark(line: str) -> None:
    """Log a remark on the result, which is shown unless the caller has silenced the logger ``ddltool``."""
    logging.getLogger("ddltool").warning("%s", line)
