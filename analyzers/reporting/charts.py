"""The report's own pictures: lines, bars, spans over time, intervals. As in :mod:`.pictures`: data in, SVG text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ddltool.analyzers.reporting.page import shortened
from ddltool.analyzers.reporting.pictures import _INK, _STYLE, _WIDTH_IN, SERIES_COLOURS, _to_svg
from ddltool.errors import visible

Array = NDArray[np.float64]
_MARKERS = "os^Dv*"
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
LINES_DRAWN = 8
_LONGEST_NAME = 34


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Line:
    """A named line through (x, y), both (n,), with an optional band from ``low`` to ``high`` (n,)."""

    label: str
    x: Array
    y: Array
    low: Array | None = None
    high: Array | None = None


@dataclass(frozen=True, slots=True)
class Span:
    """A bar from ``start`` to ``end`` with the kind that gives its colour."""

    start: float
    end: float
    kind: str
    text: str = ""


def name_of(text: str) -> str:
    """Return a name as a picture can hold it: short, printable, and no legend's word for nothing (``_``)."""
    made = shortened(visible(text), _LONGEST_NAME)
    return f" {made}" if made.startswith("_") else made


def lines_svg(
    lines: Sequence[Line],
    *,
    xlabel: str,
    ylabel: str,
    title: str,
    draw: Literal["line", "steps", "points"] = "line",
    log_x: bool = False,
    levels: Sequence[tuple[str, float]] = (),
) -> str:
    """Return up to eight lines, told apart by colour and dash (or marker); ``levels`` are named horizontal lines."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, 3.3), layout="constrained")
        axis = figure.subplots()
        for place, line in enumerate(lines[:LINES_DRAWN]):
            _draw_line(axis, line, place, draw)
        for label, level in levels:
            axis.axhline(level, color=_INK, linestyle=":", linewidth=1.4, label=name_of(label))
        if log_x:
            _log_axis(axis)
        axis.set_xlabel(xlabel)
        axis.set_ylabel(ylabel)
        axis.set_ylim(bottom=0)
        if len(lines) + len(levels) > 1 or any(line.low is not None for line in lines):
            figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=9)
        return _to_svg(figure, title)


def _draw_line(axis: Axes, line: Line, place: int, draw: str) -> None:
    colour, dash = SERIES_COLOURS[place % len(SERIES_COLOURS)], _DASHES[place % len(_DASHES)]
    label = name_of(line.label)
    if line.low is not None and line.high is not None:
        axis.fill_between(line.x, line.low, line.high, color=colour, alpha=0.22, linewidth=0)
    if draw == "points":
        marker = _MARKERS[place % len(_MARKERS)]
        axis.plot(line.x, line.y, marker=marker, color=colour, markersize=4, linewidth=1, linestyle=dash, label=label)
    else:
        style = "steps-post" if draw == "steps" else "default"
        axis.plot(line.x, line.y, color=colour, linestyle=dash, linewidth=1.6, drawstyle=style, label=label)


def _log_axis(axis: Axes) -> None:
    """Make the x axis logarithmic with plain numbers at powers of ten."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def bars_svg(
    rows: Sequence[tuple[str, float]], *, xlabel: str, title: str, level: tuple[str, float] | None = None
) -> str:
    """Return one bar per named value, the value behind it; ``level`` is a named line across all."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, 0.9 + 0.34 * len(rows)), layout="constrained")
        axis = figure.subplots()
        values = [value for _, value in rows]
        axis.barh(range(len(rows)), values, height=0.62, color=SERIES_COLOURS[0])
        for place, value in enumerate(values):
            axis.text(value, place, f" {value:.4g}", va="center", fontsize=9)
        if level is not None:
            axis.axvline(level[1], color=SERIES_COLOURS[1], linestyle="--", linewidth=1.4, label=name_of(level[0]))
            figure.legend(loc="outside upper right", frameon=False, fontsize=9)
        axis.set_yticks(range(len(rows)), [name_of(name) for name, _ in rows])
        axis.invert_yaxis()
        axis.set_xlim(0, 1.12 * max([*values, level[1] if level else 0.0, 1e-300]))
        axis.set_xlabel(xlabel)
        return _to_svg(figure, title)


def spans_svg(
    lanes: Sequence[tuple[str, Sequence[Span]]],
    *,
    xlabel: str,
    title: str,
    colours: dict[str, str],
    mark: tuple[str, float] | None = None,
) -> str:
    """Return a lane per named row with its bars over time; ``colours`` by kind, ``mark`` a named vertical line."""
    from matplotlib.patches import Patch

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, 1.1 + 0.36 * len(lanes)), layout="constrained")
        axis = figure.subplots()
        longest = max((span.end for _, spans in lanes for span in spans), default=1.0)
        for place, (_, spans) in enumerate(lanes):
            for span in spans:
                hatch = "///" if span.kind == "waiting" else None
                axis.barh(
                    place,
                    span.end - span.start,
                    left=span.start,
                    height=0.66,
                    color=colours[span.kind],
                    edgecolor="#ffffff",
                    linewidth=0.6,
                    hatch=hatch,
                )
                if span.text and span.end - span.start > 0.013 * len(span.text) * longest:
                    middle = (span.start + span.end) / 2
                    axis.text(middle, place, span.text, ha="center", va="center", fontsize=8, color="#000000")
        shown = {span.kind for _, spans in lanes for span in spans}
        handles = [Patch(color=colour, label=kind) for kind, colour in colours.items() if kind in shown]
        if mark is not None:
            axis.axvline(mark[1], color=_INK, linestyle="--", linewidth=1.2)
            axis.text(mark[1], -0.5, f"{mark[0]} ", ha="right", va="bottom", fontsize=9)
        figure.legend(handles=handles, loc="outside upper right", ncols=4, frameon=False, fontsize=9)
        axis.set_yticks(range(len(lanes)), [name_of(name) for name, _ in lanes])
        axis.set_ylim(len(lanes) - 0.5, -0.9)
        axis.set_xlim(0, 1.01 * longest)
        axis.set_xlabel(xlabel)
        return _to_svg(figure, title)


def intervals_svg(rows: Sequence[tuple[str, float, float, float]], *, xlabel: str, title: str) -> str:
    """Return a dot with whiskers per (name, value, low, high), all above zero, on a logarithmic axis."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, 0.9 + 0.34 * len(rows)), layout="constrained")
        axis = figure.subplots()
        for place, (_, value, low, high) in enumerate(rows):
            axis.plot([low, high], [place, place], color=SERIES_COLOURS[0], linewidth=2, marker="|", markersize=10)
            axis.plot([value], [place], "o", color=SERIES_COLOURS[1], markersize=6)
        axis.axvline(1.0, color=_INK, linestyle=":", linewidth=1)
        _log_axis(axis)
        axis.set_yticks(range(len(rows)), [name_of(name) for name, *_ in rows])
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xlabel(xlabel)
        return _to_svg(figure, title)
