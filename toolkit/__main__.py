"""The console entry point: runs the command line, and is the one place where errors become lines and exit codes."""

from __future__ import annotations


def main() -> None:
    """Run the ``ddltool`` command line and exit with the code that the contract gives."""
    from ddltool.commands.main import run

    raise SystemExit(run())


if __name__ == "__main__":
    main()
