"""No output may replace an input, or fail after a long run: one check for every command that writes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ddltool.artifacts import check_writable
from ddltool.errors import InputError, shortened

_LONGEST_NAME = 160


def check_outputs(
    inputs: Iterable[str | Path | None], outputs: Mapping[str, str | Path | None], remedy: str = "give another file"
) -> None:
    """Raise InputError where a file to write is one of those to read, or is written twice, or cannot be written.

    ``outputs``: option -> file. None and ``-`` (the standard streams) are no files; neither are pipes and devices.
    Files are told by what they are, not by their names: links, hard links and other spellings of a path count.
    """
    read = [Path(path) for path in inputs if path is not None and str(path) != "-"]
    written: dict[str, Path] = {}
    for option, given in outputs.items():
        if given is None or str(given) == "-":
            continue
        path = Path(given)
        shown = shortened(str(path), _LONGEST_NAME)
        if any(_same(path, other) for other in read):
            raise InputError(option, f"{shown} is one of the inputs", remedy)
        twice = next((name for name, other in written.items() if _same(path, other)), None)
        if twice is not None:
            raise InputError(option, f"{shown} is written by {twice} too", remedy)
        check_writable(path)
        written[option] = path


def demand_once(paths: Iterable[Path], remedy: str) -> None:
    """Raise InputError for a path to a file that one before it names; loops of links are found by who reads them."""
    seen: set[str] = set()
    for path in paths:
        if (real := os.path.realpath(path)) in seen:
            raise InputError(str(path), "is given twice", remedy)
        seen.add(real)


def _same(one: Path, other: Path) -> bool:
    """Return whether two paths are one file; what cannot be looked at is another file, and is refused elsewhere."""
    try:
        if one.exists() and other.exists():
            return one.is_file() and os.path.samefile(one, other)
        return one.resolve() == other.resolve()
    except (OSError, RuntimeError, ValueError):
        return False
