"""Shows on stderr how far a replay is, once it has taken more than a second, and that a large file is being read."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_PATIENCE_S = 1.0
_REDRAW_S = 0.1
# A table of 8 MiB takes about half a second.
_LARGE_BYTES = 2**23


@contextmanager
def replay_progress(title: str, jobs: int) -> Iterator[Callable[[int, float], None]]:
    """Yield what a replay of ``jobs`` jobs calls each round: ``(finished jobs, simulated seconds)``.

    A bar appears after a second and on a terminal only; it is gone at the end.
    """
    with ExitStack() as stack:
        due = time.monotonic() + _PATIENCE_S
        advance: Callable[[int, str], None] | None = None

        def on_round(finished: int, now_s: float) -> None:
            nonlocal advance, due
            now = time.monotonic()
            if now < due:
                return
            due = now + _REDRAW_S
            if advance is None:
                from ddltool.commands.output import progress

                advance = stack.enter_context(progress(title, total=jobs))
            advance(finished, f"{finished} of {jobs} jobs, {now_s / 3600:,.1f} simulated hours")

        yield on_round


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Show on a terminal that a large file is being read."""
    with ExitStack() as stack:
        if path.is_file() and path.stat().st_size > _LARGE_BYTES:
            from ddltool.commands.output import progress

            stack.enter_context(progress(f"reading {path.name}"))
        yield
