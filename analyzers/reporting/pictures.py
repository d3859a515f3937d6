"""Pictures as SVG text: data in, text out, nothing touches a disk or a screen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from numpy.typing import NDArray

from ddltool.analyzers.reporting.style import (
    INK,
    KIND_COLOURS,
    ON_BLUE,
    PHASE_COLOURS,
    SERIES_COLOURS,
    STYLE,
    WIDTH_IN,
    time_unit,
    to_svg,
    width_in,
)

# Bars closer than this share of the axis cannot be told apart and become one.
_RESOLUTION = 1 / 1600


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


def makespan_svg(rows: Sequence[tuple[str, float, float, float]], lower_s: float) -> str:
    """Return bars of mean makespans with whiskers from (name, mean, min, max) in seconds, and the lower bound as a line."""
    scale, unit = time_unit(max(row[3] for row in rows))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width_in(), 0.9 + 0.4 * len(rows)), layout="constrained")
        axis = figure.subplots()
        for place, (_, mean, low, high) in enumerate(rows):
            axis.barh(place, mean * scale, height=0.6, color=SERIES_COLOURS[place % len(SERIES_COLOURS)])
            axis.plot([low * scale, high * scale], [place, place], color=INK, linewidth=1.5, marker="|", markersize=8)
        axis.axvline(lower_s * scale, color=INK, linestyle="--", linewidth=1)
        axis.text(lower_s * scale, -0.62, " L", va="bottom", fontsize=9)
        axis.set_yticks(range(len(rows)), [row[0] for row in rows])
        axis.invert_yaxis()
        axis.set_xlabel(f"step time ({unit})")
        return to_svg(figure, "Step time by order of transfers")


def curve_svg(series: Sequence[Series]) -> str:
    """Return measured step times as points and fitted ones as lines, over the local batch size."""
    scale, unit = time_unit(max(float(item.step_s.max()) for item in series))
    with mpl.rc_context(STYLE):
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
        return to_svg(figure, "Step time over local batch size, measured and fitted")


def phases_svg(rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """Return stacked bars of seconds per phase (compute, wait, sync) for each named row."""
    scale, unit = time_unit(max(sum(phases.values()) for _, phases in rows))
    with mpl.rc_context(STYLE):
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
        return to_svg(figure, "Where each rank's step goes")


def line_svg(values: Sequence[float], *, xlabel: str, ylabel: str, title: str) -> str:
    """Return one line over 1, 2, 3, ..."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width_in(), 2.8), layout="constrained")
        axis = figure.subplots()
        axis.plot(range(1, len(values) + 1), values, color=SERIES_COLOURS[0], marker="o", markersize=3)
        axis.set_xlabel(xlabel)
        axis.set_ylabel(ylabel)
        axis.set_ylim(bottom=0)
        return to_svg(figure, title)


def devices_svg(rows: Sequence[tuple[str, float, str]]) -> str:
    """Return one bar per device: (name, busy share of the step from 0 to 1, what stands on the bar)."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width_in(), 0.9 + 0.4 * len(rows)), layout="constrained")
        axis = figure.subplots()
        for place, (_, share, text) in enumerate(rows):
            axis.barh(place, 1.0, height=0.6, facecolor="none", edgecolor=INK, linewidth=0.8, hatch="..", alpha=0.35)
            axis.barh(place, share, height=0.6, color=SERIES_COLOURS[5], edgecolor=INK, linewidth=0.8)
            if text:
                axis.text(0.01, place, text, va="center", fontsize=9, color="#000000" if share > 0.3 else INK)
        axis.set_yticks(range(len(rows)), [name for name, _, _ in rows])
        axis.set_ylim(len(rows) - 0.4, -0.6)
        axis.set_xlim(0, 1.001)
        axis.set_xlabel("share of the step that the device computes")
        return to_svg(figure, "What each device does in a step")


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
