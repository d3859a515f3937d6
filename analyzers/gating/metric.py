"""One named figure of an artifact."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ddltool.analyzers.gating.noise import Cell
from ddltool.errors import one_line, shortened
from ddltool.units import show_bytes, show_seconds

# In messages and tables; documents keep the whole name.
LONGEST_NAME = 120
# What GitHub's runner acts on in a log: the newer form at the start of a line, the older one anywhere.
_COMMANDS = (
    "add-mask|add-matcher|add-path|debug|echo|endgroup|error|group|internal-set-repo-path|notice|remove-matcher|"
    "save-state|set-env|set-output|stop-commands|warning"
)
_WORKFLOW_COMMAND = re.compile(rf"::(?=({_COMMANDS})\b)|##(?=\[)", re.IGNORECASE)

Unit = Literal["", "s", "bytes", "share", "1/s", "text"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """``value`` in SI base units, shares as fractions; a text only for the unit ``text``."""

    name: str
    value: float | str
    unit: Unit = ""
    measured: bool = False
    """By a clock, so that it has noise; else counted or predicted, and any change is a change."""
    cells: tuple[Cell, ...] = ()
    """Of measured figures: what ``value`` is the geometric mean of."""


def harmless(text: str) -> str:
    r"""Return text on one line, control characters and whatever GitHub's runner would take for a command as escapes.

    >>> harmless("a\n::error::b"), harmless("x##[add-mask]y"), harmless("tests/t.py::test_b")
    ('a \\x3a:error::b', 'x#\\x23[add-mask]y', 'tests/t.py::test_b')
    """
    return _WORKFLOW_COMMAND.sub(lambda match: r"\x3a:" if match.group() == "::" else r"#\x23", one_line(text))


def figure(name: str, value: object, unit: str = "", *, measured: bool = False) -> Iterator[Metric]:
    """Yield the metric of a value, or nothing for None, NaN and infinities: the artifact does not have it."""
    if unit == "text":
        if value is not None:
            yield Metric(name=name, value=str(value), unit="text")
        return
    if value is None or not isinstance(value, (int, float)) or not math.isfinite(value):
        return
    yield Metric(name=name, value=float(value), unit=unit, measured=measured)  # type: ignore[arg-type]


def figures(unit: str = "", **values: object) -> Iterator[Metric]:
    """Yield :func:`figure` of each keyword."""
    for name, value in values.items():
        yield from figure(name, value, unit)


def show(value: float | str | None, unit: str) -> str:
    """Return a figure for people.

    >>> show(0.00153, "s"), show(0.98, "share"), show(7.0, ""), show(None, "")
    ('1.53 ms', '98%', '7', '-')
    """
    if value is None or isinstance(value, str):
        return "-" if value is None else shortened(harmless(value), LONGEST_NAME)
    if unit == "s":
        return show_seconds(value)
    if unit == "bytes":
        return show_bytes(value)
    if unit == "share":
        return f"{value:.4g}" if abs(value) > 1 else f"{100 * value:.3g}%"
    shown = f"{value:,.0f}" if value == int(value) and abs(value) < 1e7 else f"{value:.4g}"
    return f"{shown}/s" if unit == "1/s" else shown
