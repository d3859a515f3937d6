"""The console entry point: runs the command line, and is the one place where errors become lines and exit codes."""

from __future__ import annotations

import gc
import sys

from ddltool import interrupts, own_process


def main() -> None:
    """Run the ``ddltool`` command line and exit with its exit code (:mod:`ddltool.errors` lists them); never returns."""
    try:
        interrupts.listen()
        own_process.claim()
        # A command keeps most objects that it makes: Python's default thresholds would spend a tenth of its time on them.
        gc.set_threshold(100_000, 20, 20)
        from ddltool.commands.main import run

        code = run()
    except KeyboardInterrupt:  # it came before run() could handle it
        print("error: interrupted", file=sys.stderr)  # noqa: T201
        code = 130
    interrupts.mark_reported()  # run() has told the user of an interruption, if there was one
    # The interpreter looks through all of them again before it ends, which takes a second of a command that has loaded torch.
    gc.freeze()
    # An interruption in the midst of exec() with a text, by which dataclasses make their methods, is kept in mind by the
    # interpreter, which would end by SIGINT whatever the exit code; another text takes it back.
    exec("")
    # 130 is any interruption; a signal that came says whether it was Ctrl-C (130) or SIGTERM (143).
    raise SystemExit(interrupts.exit_code() if code == 130 else code)


if __name__ == "__main__":
    main()
