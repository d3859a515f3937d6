"""The console entry point: runs the command line, and is the one place where errors become lines and exit codes."""

from __future__ import annotations

import gc
import signal
import sys
from types import FrameType

_INTERRUPTED = 130


def _interrupt_once(number: int, frame: FrameType | None) -> None:
    """Interrupt the command; a second Ctrl-C must not disturb the cleaning up after the first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> None:
    """Run the ``ddltool`` command line and exit with its exit code (:mod:`ddltool.errors` lists them)."""
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _interrupt_once)
        # A command makes many objects that stay: to look through them as often as by default is a tenth of its time.
        gc.set_threshold(100_000, 20, 20)
        from ddltool.commands.main import run

        code = run()
    except KeyboardInterrupt:  # before run() could take care of it
        print("error: interrupted", file=sys.stderr)  # noqa: T201
        code = _INTERRUPTED
    raise SystemExit(code)


if __name__ == "__main__":
    main()
