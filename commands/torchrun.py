"""Commands that every process of a torchrun job runs: rank 0 speaks for all."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from ddltool.errors import DdlToolError

_INTERRUPTED = 130


def is_silent() -> bool:
    """Return whether this process belongs to a torchrun job and is not its rank 0."""
    return "WORLD_SIZE" in os.environ and os.environ.get("RANK", "0") != "0"


@contextmanager
def one_voice() -> Iterator[None]:
    """Let the errors of ranks other than 0 end the process with their exit code, and without a word."""
    if not is_silent():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal tells rank 0 as well, and it ends all
    try:
        yield
    except DdlToolError as error:
        raise SystemExit(error.exit_code) from None
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None
