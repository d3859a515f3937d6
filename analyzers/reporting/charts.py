"""The report's pictures: lines, bars, spans over time, intervals, timelines, phases. Data in, SVG out when asked for.

Each is drawn twice, for a screen and for a phone; nothing touches a disk or a screen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.reporting.style import (
    INK,
    KIND_COLOURS,
    ON_BLUE,
    PAPER,
    PHASE_COLOURS,
    SERIES_COLOURS,
    STYLE,
    WIDTH_IN,
    at_both_widths,
    is_narrow,
    styled,
    time_unit,
    to_svg,
    width_in,
)
from ddltool.errors import shortened, visible
from ddltool.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

Array = NDArray[np.float64]
_MARKERS = "os^Dv*"
_DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
# Okabe and Ito's orange and sky blue are too faint for thin lines on white: the page's own colour follows the first four.
_LINE_COLOURS = (*SERIES_COLOURS[:4], INK)
LINES_DRAWN = 8
_LONGEST_NAME, _LONGEST_NARROW_NAME = 34, 24
# Bars closer than this share of the axis cannot be told apart and become one.
_RESOLUTION = 1 / 1600
# In a legend: the width of a letter, and of a key with its gaps.
_LETTER_IN, _KEY_IN = 0.075, 0.65
# Where a log axis spans fewer decades than this, powers of ten alone would leave it nearly without numbers.
_FEW_DECADES = 1.5


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
    """A bar from ``start`` to ``end`` seconds with the kind that gives its colour."""

    start: float
    end: float
    kind: str
    text: str = ""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lane:
    """One resource of a timeline: bars with start and end in seconds, shape (b,), and their kinds."""

    name: str
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    kinds: Sequence[str]
    labels: Sequence[str] = ()
    """What stands on each bar, as far as there is room; empty: nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """One timeline among several that share the time axis."""

    title: str
    lanes: Sequence[Lane]
    makespan_s: float


def name_of(text: str) -> str:
    """Return a name as a picture can hold it: short, printable, and no legend's word for nothing (``_``)."""
    made = shortened(visible(text), _LONGEST_NARROW_NAME if is_narrow() else _LONGEST_NAME)
    return f" {made}" if made.startswith("_") else made


@at_both_widths
def draw_lines(
    lines: Sequence[Line],
    *,
    xlabel: str,
    ylabel: str,
    title: str,
    draw: Literal["line", "steps", "points"] = "line",
    byte_x: bool = False,
    log_x: bool = False,
    seconds: bool = False,
    whole: str = "",
    levels: Sequence[tuple[str, float]] = (),
) -> str:
    """Return up to eight lines, told apart by colour and dash (or marker); ``levels`` are named horizontal lines.

    With ``seconds`` y is in seconds and the axis in what is readable; ``log_x`` makes x logarithmic, ``byte_x``
    besides in bytes; ``whole`` names the axes (``x``, ``y`` or both) that count, and have no ticks between.
    """
    from matplotlib.ticker import MaxNLocator

    shown = lines[:LINES_DRAWN]
    scale = 1.0
    if seconds:
        highest = [line.y if line.high is None else line.high for line in shown]
        scale, unit = time_unit(max([*(float(y.max()) for y in highest if y.size), *(value for _, value in levels)]))
        ylabel = f"{ylabel} ({unit})"
    names = [line.label for line in shown] + [label for label, _ in levels]
    columns = _columns([name_of(name) for name in names])
    with styled(3.3 + 0.17 * (-(-len(names) // columns) - 1)) as (figure, axis):
        for place, line in enumerate(shown):
            _draw_line(axis, line, place, draw, scale)
        for label, level in levels:
            axis.axhline(level * scale, color=INK, linestyle=":", linewidth=1.6, label=name_of(label))
        if byte_x:
            _byte_axis(axis)
        elif log_x:
            _log_axis(axis)
        elif draw != "points" and min((float(line.x.min()) for line in shown if line.x.size), default=1.0) == 0:
            axis.set_xlim(left=0)
        for side, name in ((axis.xaxis, "x"), (axis.yaxis, "y")):
            if name in whole and not (name == "x" and (log_x or byte_x)):
                side.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
        axis.set_xlabel(xlabel)
        axis.set_ylabel(ylabel)
        axis.set_ylim(bottom=0)
        _plain_numbers(axis)
        if len(lines) + len(levels) > 1 or any(line.low is not None for line in lines):
            figure.legend(loc="outside upper left", ncols=columns, frameon=False, fontsize=9)
        return to_svg(figure, title)


def _columns(names: Sequence[str]) -> int:
    """Return how many columns of a legend have room for these names beside each other, at most four."""
    letters = max(map(len, names), default=0)
    return max(1, min(4, int(width_in() / (_LETTER_IN * letters + _KEY_IN))))


def _draw_line(axis: Axes, line: Line, place: int, draw: str, scale: float) -> None:
    colour, dash = _LINE_COLOURS[place % len(_LINE_COLOURS)], _DASHES[place % len(_DASHES)]
    label = name_of(line.label)
    if line.low is not None and line.high is not None:
        band: Literal["post"] | None = "post" if draw == "steps" else None
        low, high = line.low * scale, line.high * scale
        axis.fill_between(line.x, low, high, color=colour, alpha=0.22, linewidth=0, step=band)
    marker = _MARKERS[place % len(_MARKERS)] if draw == "points" or line.x.size == 1 else None
    style: Literal["steps-post", "default"] = "steps-post" if draw == "steps" else "default"
    axis.plot(
        line.x,
        line.y * scale,
        color=colour,
        marker=marker,
        markersize=4.5,
        linestyle=dash,
        linewidth=1.3 if draw == "points" else 1.6,
        drawstyle=style,
        label=label,
    )


def _plain_numbers(axis: Axes) -> None:
    """Write thousands with commas where an axis would otherwise be scaled by a power of ten in its corner."""
    from matplotlib.ticker import FuncFormatter, ScalarFormatter

    for side, (low, high) in ((axis.xaxis, axis.get_xlim()), (axis.yaxis, axis.get_ylim())):
        if isinstance(side.get_major_formatter(), ScalarFormatter) and 1e4 <= max(abs(low), abs(high)) < 1e9:
            side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _log_axis(axis: Axes) -> None:
    """Make the x axis logarithmic with plain numbers at powers of ten, and between where these are few."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_xscale("log")
    low, high = axis.get_xlim()
    few = np.log10(high / low) < _FEW_DECADES
    axis.xaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0) if few else (1.0,)))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(NullFormatter())


def _byte_axis(axis: Axes) -> None:
    """Make the x axis logarithmic with sizes in binary units at powers of two."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(LogLocator(2, numticks=5 if is_narrow() else 9))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: show_bytes(value).replace(".0 ", " ")))
    axis.xaxis.set_minor_formatter(NullFormatter())


@at_both_widths
def draw_bars(
    rows: Sequence[tuple[str, float]],
    *,
    xlabel: str,
    title: str,
    seconds: bool = False,
    level: tuple[str, float] | None = None,
    from_level: bool = False,
    marked: tuple[str, Sequence[bool]] | None = None,
    unmarked: str = "",
) -> str:
    """Return one bar per named value, the value behind it; ``level`` is a named line across all.

    With ``seconds`` the values are seconds, shown in what is readable. ``marked`` names a kind and says which bars are of
    it: these are of another colour and hatched; the others are ``unmarked``. Bars ``from_level`` begin there, on a
    logarithmic axis: all values are above zero.
    """
    values = [value for _, value in rows]
    longest = max([*values, level[1] if level else 0.0])
    scale, unit = time_unit(longest) if seconds else (1.0, "")
    with styled(0.9 + 0.34 * len(rows)) as (figure, axis):
        left = level[1] * scale if level is not None and from_level else 0.0
        widths = [value * scale - left for value in values]
        drawn = axis.barh(range(len(rows)), widths, left=left, height=0.62, color=SERIES_COLOURS[0])
        for place, value in enumerate(values):
            shown = show_seconds(value) if seconds else _number(value)
            ground = {"facecolor": PAPER, "edgecolor": "none", "pad": 0.8}
            at, beside = (value * scale, place), (4 if value * scale >= left else -4, 0)
            side: Literal["left", "right"] = "left" if value * scale >= left else "right"
            axis.annotate(shown, at, beside, textcoords="offset points", va="center", ha=side, fontsize=9, bbox=ground)
        handles = _mark_bars(list(drawn.patches), marked, unmarked)
        if level is not None:
            made = axis.axvline(level[1] * scale, color=INK, linestyle="--", linewidth=1.4, label=name_of(level[0]))
            handles = [*handles, made]
        if handles:
            figure.legend(handles=handles, loc="outside upper right", frameon=False, fontsize=9, ncols=3)
        axis.set_yticks(range(len(rows)), [name_of(name) for name, _ in rows])
        axis.set_ylim(len(rows) - 0.5, -0.5)
        room = 1.3 if is_narrow() else 1.12
        axis.set_xlabel(f"{xlabel} ({unit})" if seconds else xlabel)
        if from_level:
            low, high = min([*values, left]) * scale, max([*values, left]) * scale
            left_room, right_room = (0.5, 0.25) if is_narrow() else (0.18, 0.12)
            axis.set_xlim(low / (high / low) ** left_room, high * (high / low) ** right_room)
            _log_axis(axis)
        else:
            axis.set_xlim(0, room * longest * scale if longest > 0 else 1.0)
        _plain_numbers(axis)
        if is_narrow() and not from_level:
            axis.locator_params(axis="x", nbins=4)
        return to_svg(figure, title)


def _mark_bars(bars: Sequence[Patch], marked: tuple[str, Sequence[bool]] | None, unmarked: str) -> list[Artist]:
    """Give the marked bars their colour and hatch, and return the legend's entries."""
    if marked is None or not any(marked[1]):
        return []
    from matplotlib.patches import Patch

    entry = Patch(label=marked[0])
    for bar in [*(bar for bar, chosen in zip(bars, marked[1], strict=True) if chosen), entry]:
        bar.set(facecolor=SERIES_COLOURS[1], hatch="///", edgecolor="#ffffff", linewidth=0.0)
    return [entry] if all(marked[1]) else [entry, Patch(label=unmarked, color=SERIES_COLOURS[0])]


def _number(value: float) -> str:
    """Return a value for the end of its bar: thousands in full, else four digits."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


@at_both_widths
def draw_spans(
    lanes: Sequence[tuple[str, Sequence[Span]]],
    *,
    title: str,
    colours: dict[str, str],
    mark: tuple[str, float] | None = None,
) -> str:
    """Return a lane per named row with its bars over time in seconds; ``colours`` by kind, ``mark`` a named vertical line."""
    from matplotlib.patches import Patch

    longest = max((span.end for _, spans in lanes for span in spans), default=0.0)
    longest = max(longest, mark[1] if mark else 0.0)
    scale, unit = time_unit(longest)
    with styled(1.1 + 0.36 * len(lanes)) as (figure, axis):
        for place, (_, spans) in enumerate(lanes):
            for span in spans:
                _draw_span(axis, span, place, colours[span.kind], (longest, scale))
        shown = {span.kind for _, spans in lanes for span in spans}
        handles = [
            Patch(facecolor=colour, label=kind, hatch=_hatch(kind), edgecolor="#ffffff", linewidth=0)
            for kind, colour in colours.items()
            if kind in shown
        ]
        if mark is not None:
            axis.axvline(mark[1] * scale, color=INK, linestyle="--", linewidth=1.2)
            at = (mark[1] * scale, -0.5)
            axis.annotate(mark[0], at, (-4, 0), textcoords="offset points", ha="right", va="bottom", fontsize=9)
        figure.legend(handles=handles, loc="outside upper right", ncols=4, frameon=False, fontsize=9)
        axis.set_yticks(range(len(lanes)), [name_of(name) for name, _ in lanes])
        axis.set_ylim(len(lanes) - 0.5, -0.9)
        axis.set_xlim(0, 1.01 * longest * scale if longest > 0 else 1.0)
        axis.set_xlabel(f"time ({unit})")
        return to_svg(figure, title)


def _hatch(kind: str) -> str | None:
    return "///" if kind == "waiting" else None


def _draw_span(axis: Axes, span: Span, place: int, colour: str, size: tuple[float, float]) -> None:
    """Draw one bar, and its text where there is room; ``size`` is the whole length in seconds, and the axis's scale."""
    longest, scale = size
    length = span.end - span.start
    # white lines between bars that are hardly wider would be all that is seen
    edge = 0.6 if length > 0.008 * longest else 0.0
    axis.barh(
        place,
        length * scale,
        left=span.start * scale,
        height=0.66,
        color=colour,
        edgecolor="#ffffff",
        linewidth=edge,
        hatch=_hatch(span.kind),
    )
    if span.text and length > 0.013 * len(span.text) * longest * WIDTH_IN / width_in():
        middle = (span.start + span.end) / 2 * scale
        axis.text(middle, place, span.text, ha="center", va="center", fontsize=8, color="#000000")


@at_both_widths
def draw_intervals(rows: Sequence[tuple[str, float, float, float]], *, xlabel: str, title: str) -> str:
    """Return a dot with whiskers per (name, value, low, high), all above zero, on a logarithmic axis."""
    with styled(0.9 + 0.34 * len(rows)) as (figure, axis):
        for place, (_, value, low, high) in enumerate(rows):
            axis.plot([low, high], [place, place], color=SERIES_COLOURS[0], linewidth=2, marker="|", markersize=11)
            axis.plot([value], [place], "o", color=SERIES_COLOURS[1], markersize=4)
        axis.axvline(1.0, color=INK, linestyle=":", linewidth=1)
        _log_axis(axis)
        axis.set_yticks(range(len(rows)), [name_of(name) for name, *_ in rows])
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xlabel(xlabel)
        return to_svg(figure, title)


@at_both_widths
def draw_timeline(panels: Sequence[Panel]) -> str:
    """Return timelines one under the other on one time axis, the makespan marked in each."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    scale, unit = time_unit(max(panel.makespan_s for panel in panels))
    lanes = sum(len(panel.lanes) for panel in panels)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width_in(), 1.1 + 0.42 * lanes + 0.45 * len(panels)), layout="constrained")
        ratios = [len(panel.lanes) for panel in panels]
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
        for axis, panel in zip(axes, panels, strict=True):
            _draw_panel(axis, panel, scale, unit)
        axes[-1].set_xlabel(f"time in the step ({unit})")
        kinds = {kind for panel in panels for lane in panel.lanes for kind in lane.kinds}
        patches = [Patch(color=colour, label=kind) for kind, colour in KIND_COLOURS.items() if kind in kinds]
        figure.legend(handles=patches, loc="outside upper right", ncols=3, frameon=False)
        return to_svg(figure, "Timeline of one step: compute and channels")


def _draw_panel(axis: Axes, panel: Panel, scale: float, unit: str) -> None:
    resolution = panel.makespan_s * _RESOLUTION
    for place, lane in enumerate(panel.lanes):
        for kind, colour in KIND_COLOURS.items():
            chosen = np.array([bar == kind for bar in lane.kinds], dtype=bool)
            spans = [
                (start * scale, (end - start) * scale)
                for start, end in merge_bars(lane.start_s[chosen], lane.end_s[chosen], resolution)
            ]
            axis.broken_barh(spans, (place - 0.4, 0.8), facecolors=colour, linewidth=0)
        for text, start, end in zip(lane.labels, lane.start_s, lane.end_s, strict=False):
            if text and end - start > 0.014 * len(text) * panel.makespan_s * WIDTH_IN / width_in():
                middle = (start + end) / 2 * scale
                axis.text(middle, place, text, ha="center", va="center", fontsize=8, color=ON_BLUE)
                axis.vlines((start * scale, end * scale), place - 0.4, place + 0.4, color=ON_BLUE, linewidth=0.6)
    axis.axvline(panel.makespan_s * scale, color=INK, linewidth=1, linestyle="--")
    axis.set_yticks(range(len(panel.lanes)), [lane.name for lane in panel.lanes])
    axis.set_ylim(len(panel.lanes) - 0.4, -0.6)
    axis.set_xlim(left=0)
    axis.set_title(f"{panel.title}: {panel.makespan_s * scale:.3g} {unit}", loc="left", fontsize=10)


def merge_bars(start: NDArray[np.float64], end: NDArray[np.float64], resolution: float) -> list[tuple[float, float]]:
    """Return the bars in order of time with gaps below ``resolution`` closed; empty bars are left out."""
    merged: list[tuple[float, float]] = []
    for place in np.lexsort((end, start)):
        low, high = float(start[place]), float(end[place])
        if high <= low:
            continue
        if merged and low - merged[-1][1] < resolution:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return merged


@at_both_widths
def draw_phases(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Return stacked bars of seconds per phase (compute, wait, sync) for each named row."""
    from matplotlib.patches import Patch

    scale, unit = time_unit(max(sum(phases.values()) for _, phases in rows))
    with styled(1.2 + 0.45 * len(rows)) as (figure, axis):
        for place, (_, phases) in enumerate(rows):
            left = 0.0
            for phase, colour in PHASE_COLOURS.items():
                width = phases.get(phase, 0.0) * scale
                hatch = "//" if phase == "wait" else None
                axis.barh(
                    place, width, left=left, height=0.6, color=colour, hatch=hatch, edgecolor="white", linewidth=0
                )
                left += width
        axis.set_yticks(range(len(rows)), [name for name, _ in rows])
        axis.set_ylim(len(rows) - 0.4, -0.6)
        axis.set_xlabel(f"median step ({unit})")
        handles = [
            Patch(
                facecolor=colour, label=phase, hatch="///" if phase == "wait" else None, edgecolor="white", linewidth=0
            )
            for phase, colour in PHASE_COLOURS.items()
        ]
        figure.legend(handles=handles, loc="outside upper right", ncols=3, frameon=False)
        return to_svg(figure, "Where each rank's step goes")


def lanes_of(
    names: Iterable[str],
    resource: NDArray[np.int32],
    spans: tuple[NDArray[np.float64], NDArray[np.float64]],
    kinds: Sequence[str],
) -> list[Lane]:
    """Return one lane per resource, compute first, from the ops' resource indices, (start, end) in seconds and kinds."""
    start, end = spans
    lanes = []
    for number, name in sorted(enumerate(names), key=lambda item: (not item[1].startswith("compute"), item[0])):
        chosen = np.flatnonzero(resource == number)
        lanes.append(Lane(name=name, start_s=start[chosen], end_s=end[chosen], kinds=[kinds[int(op)] for op in chosen]))
    return lanes
