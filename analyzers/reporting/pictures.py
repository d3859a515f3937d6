"""Pictures as SVG text: data in, text out, nothing touches a disk or a screen.

Colours are Okabe and Ito's, which people with colour blindness can tell apart; lines and text take the page's own
colour, so one picture serves light and dark pages. A picture that is shrunk to a phone's width cannot be read, and one
that scrolls hides its legend: :func:`at_both_widths` draws it once for each.
"""

from __future__ import annotations

import functools
import io
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

_ARGUMENTS = ParamSpec("_ARGUMENTS")
# The orange of bars is darker than Okabe and Ito's, which has a contrast of only 2.3 with white paper.
COMPUTE_COLOUR, WAIT_COLOUR = "#C98600", "#808080"
KIND_COLOURS: Mapping[str, str] = {"recv": "#0072B2", "compute": COMPUTE_COLOUR, "send": "#009E73"}
SERIES_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
PHASE_COLOURS: Mapping[str, str] = {"compute": COMPUTE_COLOUR, "wait": WAIT_COLOUR, "sync": "#0072B2"}
# Drawn in this colour, then replaced by the page's own.
_INK = "#010203"
_WIDTH_IN = 8.0
# On a phone of 390 pixels that leaves letters of 11 pixels.
_NARROW_IN = 4.2
_width: ContextVar[float] = ContextVar("width of a picture in inches", default=_WIDTH_IN)
# Letters on blue: the page lightens that blue, and darkens these letters, on dark paper.
_ON_BLUE = "#fffffe"
# The page's paper, behind letters that stand on a line.
_PAPER = "#fefffe"
# Bars closer than this share of the axis cannot be told apart and become one.
_RESOLUTION = 1 / 1600
_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "ddltool",
    "svg.fonttype": "none",
    "text.parse_math": False,  # a name may hold dollars
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Series:
    """Step times over local batch sizes: measured points and the predicted line through more batch sizes."""

    label: str
    batch: NDArray[np.float64]
    step_s: NDArray[np.float64]
    spread_s: NDArray[np.float64]
    line_batch: NDArray[np.float64]
    line_s: NDArray[np.float64]


def timeline_svg(panels: Sequence[Panel]) -> str:
    """Return timelines one under the other on one time axis, the makespan marked in each."""
    scale, unit = _time_unit(max(panel.makespan_s for panel in panels))
    lanes = sum(len(panel.lanes) for panel in panels)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width_in(), 1.1 + 0.42 * lanes + 0.45 * len(panels)), layout="constrained")
        ratios = [len(panel.lanes) for panel in panels]
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
        for axis, panel in zip(axes, panels, strict=True):
            _draw_panel(axis, panel, scale, unit)
        axes[-1].set_xlabel(f"time in the step ({unit})")
        kinds = {kind for panel in panels for lane in panel.lanes for kind in lane.kinds}
        patches = [Patch(color=colour, label=kind) for kind, colour in KIND_COLOURS.items() if kind in kinds]
        figure.legend(handles=patches, loc="outside upper right", ncols=3, frameon=False)
        return _to_svg(figure, "Timeline of one step: compute and channels")


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
            if text and end - start > 0.014 * len(text) * panel.makespan_s * _WIDTH_IN / width_in():
                middle = (start + end) / 2 * scale
                axis.text(middle, place, text, ha="center", va="center", fontsize=8, color=_ON_BLUE)
                axis.vlines((start * scale, end * scale), place - 0.4, place + 0.4, color=_ON_BLUE, linewidth=0.6)
    axis.axvline(panel.makespan_s * scale, color=_INK, linewidth=1, linestyle="--")
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


def makespan_svg(rows: Sequence[tuple[str, float, float, float]], lower_s: float) -> str:
    """Return bars of mean makespans with whiskers from (name, mean, min, max) in seconds, and the lower bound as a line."""
    scale, unit = _time_unit(max(row[3] for row in rows))
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width_in(), 0.9 + 0.4 * len(rows)), layout="constrained")
        axis = figure.subplots()
        for place, (_, mean, low, high) in enumerate(rows):
            axis.barh(place, mean * scale, height=0.6, color=SERIES_COLOURS[place % len(SERIES_COLOURS)])
            axis.plot([low * scale, high * scale], [place, place], color=_INK, linewidth=1.5, marker="|", markersize=8)
        axis.axvline(lower_s * scale, color=_INK, linestyle="--", linewidth=1)
        axis.text(lower_s * scale, -0.62, " L", va="bottom", fontsize=9)
        axis.set_yticks(range(len(rows)), [row[0] for row in rows])
        axis.invert_yaxis()
        axis.set_xlabel(f"step time ({unit})")
        return _to_svg(figure, "Step time by order of transfers")


def curve_svg(series: Sequence[Series]) -> str:
    """Return measured step times as points and fitted ones as lines, over the local batch size."""
    scale, unit = _time_unit(max(float(item.step_s.max()) for item in series))
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width_in(), 3.8), layout="constrained")
        axis = figure.subplots()
        for place, item in enumerate(series):
            colour, marker = SERIES_COLOURS[place % len(SERIES_COLOURS)], "os^Dv*"[place % 6]
            error = item.spread_s * scale / 2
            axis.errorbar(
                item.batch,
                item.step_s * scale,
                yerr=error if np.isfinite(error).all() else None,
                fmt=marker,
                color=colour,
                capsize=3,
                label=f"{item.label}, measured",
            )
            axis.plot(item.line_batch, item.line_s * scale, color=colour, label=f"{item.label}, fitted")
        axis.set_xlabel("local batch size (samples per replica)")
        axis.set_ylabel(f"step time ({unit})")
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, fontsize=9)
        return _to_svg(figure, "Step time over local batch size, measured and fitted")


def phases_svg(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Return stacked bars of seconds per phase (compute, wait, sync) for each named row."""
    scale, unit = _time_unit(max(sum(phases.values()) for _, phases in rows))
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width_in(), 1.2 + 0.45 * len(rows)), layout="constrained")
        axis = figure.subplots()
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
        return _to_svg(figure, "Where each rank's step goes")


def line_svg(values: Sequence[float], *, xlabel: str, ylabel: str, title: str) -> str:
    """Return one line over 1, 2, 3, ..."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width_in(), 2.8), layout="constrained")
        axis = figure.subplots()
        axis.plot(range(1, len(values) + 1), values, color=SERIES_COLOURS[0], marker="o", markersize=3)
        axis.set_xlabel(xlabel)
        axis.set_ylabel(ylabel)
        axis.set_ylim(bottom=0)
        return _to_svg(figure, title)


def devices_svg(rows: Sequence[tuple[str, float, str]]) -> str:
    """Return one bar per device: (name, busy share of the step from 0 to 1, what stands on the bar)."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width_in(), 0.9 + 0.4 * len(rows)), layout="constrained")
        axis = figure.subplots()
        for place, (_, share, text) in enumerate(rows):
            axis.barh(place, 1.0, height=0.6, facecolor="none", edgecolor=_INK, linewidth=0.8, hatch="..", alpha=0.35)
            axis.barh(place, share, height=0.6, color=SERIES_COLOURS[5], edgecolor=_INK, linewidth=0.8)
            if text:
                axis.text(0.01, place, text, va="center", fontsize=9, color="#000000" if share > 0.3 else _INK)
        axis.set_yticks(range(len(rows)), [name for name, _, _ in rows])
        axis.set_ylim(len(rows) - 0.4, -0.6)
        axis.set_xlim(0, 1.001)
        axis.set_xlabel("share of the step that the device computes")
        return _to_svg(figure, "What each device does in a step")


def _time_unit(longest_s: float) -> tuple[float, str]:
    """Return the factor and the name of a unit that keeps axis labels short."""
    if longest_s <= 0:
        return 1.0, "s"
    for factor, unit, least in ((1.0, "s", 1.0), (1e3, "ms", 1e-3)):
        if longest_s >= least:
            return factor, unit
    return 1e6, "us"


def width_in() -> float:
    """Return the width in inches at which a picture is to be drawn."""
    return _width.get()


def is_narrow() -> bool:
    """Return whether the picture is for a phone: legends then take fewer columns, names fewer letters."""
    return width_in() < _WIDTH_IN


def at_both_widths(draw: Callable[_ARGUMENTS, str]) -> Callable[_ARGUMENTS, str]:
    """Return what draws the picture twice, for a screen and for a phone; the page shows one of the two."""

    @functools.wraps(draw)
    def drawn(*args: _ARGUMENTS.args, **options: _ARGUMENTS.kwargs) -> str:
        wide = draw(*args, **options)
        token = _width.set(_NARROW_IN)
        try:
            narrow = draw(*args, **options)
        finally:
            _width.reset(token)
        return f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'

    return drawn


def _to_svg(figure: Figure, title: str) -> str:
    """Return the figure as an SVG element that scales with the page, titled for screen readers."""
    FigureCanvasSVG(figure)
    buffer = io.StringIO()
    # Of a picture's two widths one is hidden, and what is hidden lends nothing: each has hatches and clips of its own.
    with mpl.rc_context({"svg.hashsalt": f"ddltool {width_in():g}"}), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that no font here has: the reader's browser has its own
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Title": title})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'<svg ([^>]*?)width="[^"]*"', r'<svg \1width="100%" role="img"', text, count=1)
    text = re.sub(r'(<svg [^>]*?)height="[^"]*pt" ', r"\1", text, count=1)
    text = re.sub(r"<metadata>.*?</metadata>", f"<title>{title}</title>", text, count=1, flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)  # several pictures share a page, ids must not repeat
    return text.replace(_INK, "currentColor")


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
