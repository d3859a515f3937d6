"""Pictures of a throughput model: fitted curves over measured points, and goodput over (GPUs, batch) with its frontier.

:func:`fit_picture` and :func:`goodput_picture` return the bytes of an SVG or PNG file. Colours can be told apart by the
colour-blind and by their lightness in print; every series has a marker of its own besides.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Literal

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter
from numpy.typing import NDArray

from ddltool.analyzers.goodput.batch_search import BatchLimits
from ddltool.analyzers.goodput.frontier import frontier, goodput_grid
from ddltool.analyzers.goodput.observations import Observations
from ddltool.analyzers.goodput.problem import Problem
from ddltool.analyzers.goodput.sensitivity import log_times
from ddltool.analyzers.goodput.throughput import ThroughputParams, iteration_time_s
from ddltool.analyzers.reporting.pictures import _INK, _STYLE, _WIDTH_IN, SERIES_COLOURS, _time_unit, _to_svg

Array = NDArray[np.float64]

# Placements with a curve of their own in a panel; the measured points of the others would only clutter it.
CURVES_DRAWN = 5
PANELS_DRAWN = 6
_MARKERS = "os^Dv*"
# Two-sided 90 % of a normal error.
_QUANTILE = 1.645
_DOTS_PER_INCH = 150


def fit_picture(
    devices: Mapping[str, Observations],
    params: Mapping[str, ThroughputParams],
    *,
    file_format: str = "svg",
) -> bytes:
    """Return the fitted step time over the local batch, on the measured points, a panel per device type.

    ``devices``: the rows that were fitted; ``params``: the model of each. The lines are placements (nodes x replicas), at
    most five, from the one with fewest replicas to the one with most; the bands are where nine of ten measured steps
    should lie: the uncertainty of the model and the scatter of the rows about it. Of more than six types those with most
    rows are drawn.
    """
    names = sorted(devices, key=lambda name: -len(devices[name]))[:PANELS_DRAWN]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, 0.6 + 3.6 * len(names)), layout="constrained")
        axes = figure.subplots(len(names), 1, squeeze=False)[:, 0]
        for axis, name in zip(axes, names, strict=True):
            _draw_fit(axis, name, devices[name], params[name])
            if len(devices) > 1:
                axis.set_title(name, loc="left", fontsize=10)
        axes[-1].set_xlabel("local batch size (samples per replica and pass)")
        return _bytes(figure, "Fitted step times over the measured ones", file_format)


def noun_of(device: str) -> str:
    """Return what one replica on a device is called: GPU, and replica on a CPU or where nothing names the device."""
    return "GPU" if device and not device.casefold().startswith("cpu") else "replica"


def _draw_fit(axis: Axes, name: str, rows: Observations, params: ThroughputParams) -> None:
    # the points of one number of accumulation steps: others lie on other curves
    steps, counts = np.unique(rows.accumulation_steps, return_counts=True)
    passes = float(steps[counts.argmax()])
    rows = rows.take(rows.accumulation_steps == passes)
    scale, unit = _time_unit(float(np.median(rows.step_time_s)))
    batches = np.unique(rows.local_batch_size)
    line = np.geomspace(batches[0], batches[-1], 80) if len(batches) > 1 else batches[:1]
    for place, (nodes, replicas) in enumerate(_placements(rows)):
        own = rows.take((rows.num_nodes == nodes) & (rows.num_replicas == replicas))
        colour = SERIES_COLOURS[place % len(SERIES_COLOURS)]
        label = f"{replicas:.0f} {noun_of(name)}{'s' if replicas > 1 else ''}" + (
            f" on {nodes:.0f} nodes" if nodes > 1 else ""
        )
        middle = np.asarray(iteration_time_s(params, nodes, replicas, line, passes)) * scale
        spread = np.exp(_QUANTILE * _deviation(rows, params, nodes, replicas, line, passes))
        axis.fill_between(line, middle / spread, middle * spread, color=colour, alpha=0.18, linewidth=0)
        axis.plot(line, middle, color=colour, linewidth=1.6)
        marker = _MARKERS[place % len(_MARKERS)]
        axis.plot(
            own.local_batch_size, own.step_time_s * scale, marker, color=colour, markersize=4.5, alpha=0.8, label=label
        )
    if len(batches) > 1 and batches[-1] > 8 * batches[0]:
        _log_axis(axis, "x")
    shown = rows.step_time_s * scale
    if shown.max() > 8 * shown.min():
        _log_axis(axis, "y")
    else:
        axis.set_ylim(bottom=0)
    extra = f", {passes:.0f} accumulation steps" if passes else ""
    axis.set_ylabel(f"step time ({unit}){extra}")
    axis.legend(frameon=False, fontsize=9, loc="upper left", ncols=2)


def _log_axis(axis: Axes, which: Literal["x", "y"]) -> None:
    """Make an axis logarithmic with plain numbers at 1, 2 and 5."""
    (axis.set_xscale if which == "x" else axis.set_yscale)("log")
    side = axis.xaxis if which == "x" else axis.yaxis
    side.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
    formatter = ScalarFormatter()
    formatter.set_scientific(False)
    side.set_major_formatter(formatter)
    side.set_minor_formatter(NullFormatter())


def _placements(rows: Observations) -> list[tuple[float, float]]:
    """Return up to five placements, spread evenly from the fewest replicas to the most."""
    pairs, counts = np.unique(np.stack([rows.num_replicas, rows.num_nodes]), axis=1, return_counts=True)
    # curves of a single point say little, unless there is nothing else
    long = pairs[:, counts > 1] if (counts > 1).any() else pairs
    chosen = np.unique(np.linspace(0, long.shape[1] - 1, CURVES_DRAWN).round().astype(int))
    return [(float(long[1, i]), float(long[0, i])) for i in chosen]


def _deviation(
    rows: Observations, params: ThroughputParams, nodes: float, replicas: float, batch: Array, passes: float
) -> Array:
    """Return the standard deviation of a measured log step time about the curve, shape of ``batch``, to first order."""
    problem = Problem([rows])
    point = problem.start_from([params])
    _, jacobian = problem.residuals(point)
    freedom = max(problem.rows - int(problem.free.sum()), 1.0)
    variance = max(problem.step_squares(point) / freedom, 1e-12)
    index = np.flatnonzero(problem.free)
    information = jacobian[:, index].T @ jacobian[:, index] * problem.rows / variance
    # a parameter that the rows do not determine is taken as known to a factor of e: the line is drawn all the same
    covariance = np.linalg.inv(information + np.eye(len(index)))
    everywhere = np.ones_like(batch)
    _, _, _, slopes = log_times(
        problem.values(point)[problem.index[0]], nodes * everywhere, replicas * everywhere, batch, passes
    )
    slopes = slopes[:, index]
    made: Array = np.sqrt(variance + np.einsum("bi,ij,bj->b", slopes, covariance, slopes))
    return made


def goodput_picture(
    params: ThroughputParams,
    max_replicas: int,
    limits: BatchLimits,
    *,
    noise_scale: float,
    replicas_per_node: int,
    threshold: float = 0.5,
    known: int | None = None,
    noun: str = "GPU",
    file_format: str = "svg",
) -> bytes:
    """Return goodput over (GPUs, total batch) as a heat map, with the best batch of each count and where scaling stops paying.

    Below the map goodput over GPUs: efficient counts (no smaller one has as much) are marked, and the line that further
    GPUs would have to reach to bring ``threshold`` of what the first does. Beyond ``known`` GPUs, of which no measurement
    speaks, everything is hatched and dashed, and nothing is said about what pays. Arguments and errors as for
    :func:`~ddltool.analyzers.goodput.frontier.frontier`.
    """
    known = max_replicas if known is None else min(known, max_replicas)
    found = frontier(
        params,
        max_replicas,
        limits,
        noise_scale=noise_scale,
        replicas_per_node=replicas_per_node,
        threshold=threshold,
    )
    pays_until = frontier(
        params, known, limits, noise_scale=noise_scale, replicas_per_node=replicas_per_node, threshold=threshold
    ).pays_until
    can = found.tuned.feasible
    replicas, best = found.num_replicas[can], found.tuned.total_batch_size[can]
    goodput = found.tuned.goodput_per_s
    # a batch far above the best one only makes the map small
    top = min(limits.max_batch_size, max(4 * int(best.max()), 2 * limits.initial_batch_size))
    batches = np.geomspace(limits.initial_batch_size, max(top, limits.initial_batch_size + 1), 160)
    surface = goodput_grid(params, found.num_nodes, found.num_replicas, batches, limits, noise_scale=noise_scale)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, 6.4), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1.5, 1.0))
        edges = np.arange(0.5, max_replicas + 1.0)
        ratio = math.sqrt(batches[1] / batches[0])
        heights = np.concatenate([batches / ratio, [batches[-1] * ratio]])
        mesh = upper.pcolormesh(
            edges, heights, np.ma.masked_invalid(surface.T), cmap="cividis", vmin=0.0, rasterized=True
        )
        figure.colorbar(mesh, ax=upper, label="goodput (useful samples/s)", pad=0.01)
        _log_axis(upper, "y")
        upper.set_ylim(heights[0], heights[-1])
        upper.plot(replicas, best, color="white", linewidth=3.0)
        upper.plot(replicas, best, color="black", linewidth=1.2, marker="o", markersize=3, label="best batch")
        upper.set_ylabel("total batch size (samples)")
        chosen = found.efficient & can & (found.num_replicas <= known)
        sure, rest = can & (found.num_replicas <= known), can & (found.num_replicas >= known)
        lower.plot(
            found.num_replicas[sure], goodput[sure], color=SERIES_COLOURS[0], linewidth=1.4, label="best goodput"
        )
        if known < max_replicas:
            lower.plot(found.num_replicas[rest], goodput[rest], color=SERIES_COLOURS[0], linewidth=1.2, linestyle="--")
            for axis in (upper, lower):
                label = "not supported by data" if axis is lower else "_"
                span = (known + 0.5, max_replicas + 0.5)
                axis.axvspan(*span, facecolor="none", edgecolor="#888888", hatch="//", linewidth=0, label=label)
        lower.plot(
            found.num_replicas[chosen],
            goodput[chosen],
            "o",
            color=SERIES_COLOURS[0],
            markersize=4,
            label="efficient frontier",
        )
        first = int(np.flatnonzero(can)[0])
        slope = threshold * goodput[first] / found.num_replicas[first]
        # beyond the count until which scaling pays, all goodput lies below this line
        pays = np.array([pays_until, known])
        lower.plot(
            pays,
            goodput[pays_until - 1] + slope * (pays - pays_until),
            color=_INK,
            linestyle=":",
            linewidth=1.2,
            label=f"{threshold:.0%} of the first {noun}'s goodput for each further one",
        )
        for axis in (upper, lower):
            least = "at least " if pays_until == known < max_replicas else ""
            label = f"scaling pays {least}until {pays_until}" if axis is lower else "_"
            axis.axvline(pays_until, color="#D55E00", linestyle="--", linewidth=1.6, label=label)
        lower.set_ylim(0, 1.08 * float(goodput.max()))
        lower.set_xlim(0.5, max_replicas + 0.5)
        lower.set_xlabel(f"{noun}s ({replicas_per_node} per node)")
        lower.set_ylabel("goodput\n(useful samples/s)")
        upper.legend(loc="lower right", fontsize=9, framealpha=0.9, labelcolor="#000000")  # its ground is white
        figure.legend(
            *lower.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=9
        )
        return _bytes(figure, f"Goodput over {noun}s and total batch size, and its efficient frontier", file_format)


def _bytes(figure: Figure, title: str, file_format: str) -> bytes:
    """Return the figure as the bytes of a file; ``title`` is what an SVG's reader without eyes is told."""
    if file_format == "svg":
        return _to_svg(figure, title).encode("utf-8")
    made = io.BytesIO()
    figure.savefig(made, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None, "Title": title})
    return made.getvalue()
