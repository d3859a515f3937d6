"""The console entry point: runs the command line, and is the one place where errors become lines and exit codes."""

from __future__ import annotations

import gc
import sys

from ddltool import interrupts


def main() -> None:
    """Run the ``ddltool`` command line and exit with its exit code (:mod:`ddltool.errors` lists them)."""
    try:
        interrupts.listen()
        # A command makes many objects that stay: to look through them as often as by default is a tenth of its time.
        gc.set_threshold(100_000, 20, 20)
        from ddltool.commands.main import run

        code = run()
    except KeyboardInterrupt:  # before run() could take care of it
        print("error: interrupted", file=sys.stderr)  # noqa: T201
        code = 130
    interrupts.told()
    # The interpreter looks through all of them again before it ends, which takes a second of a command that has loaded torch.
    gc.freeze()
    raise SystemExit(interrupts.exit_code() if code == 130 else code)


if __name__ == "__main__":
    main()
