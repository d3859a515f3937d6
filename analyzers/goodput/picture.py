"""Pictures of a throughput model: fitted curves over measured points, and goodput over (GPUs, batch) with its frontier.

:func:`fit_picture` and :func:`goodput_picture` return the bytes of an SVG or PNG file. Colours can be told apart by the
colour-blind and by their lightness in print; every series has a marker of its own besides.
"""

from __future__ import annotations

import functools
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

from ddltool.analyzers.goodput.fit import ASSUMED_ERROR, Problem
from ddltool.analyzers.goodput.observations import Observations
from ddltool.analyzers.goodput.throughput import ThroughputParams, iteration_time_s, log_times
from ddltool.analyzers.goodput.tuning import BatchLimits, Frontier, frontier, goodput_grid
from ddltool.analyzers.reporting.style import INK, SERIES_COLOURS, STYLE, is_narrow, time_unit, to_svg, width_in

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
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width_in(), 0.6 + 3.6 * len(names)), layout="constrained")
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
    scale, unit = time_unit(float(np.median(rows.step_time_s)))
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
    problem = Problem(rows)
    point = problem.start_from(params)
    _, jacobian = problem.residuals(point)
    variance = max((problem.scatter(point) or ASSUMED_ERROR) ** 2, 1e-12)
    index = np.flatnonzero(problem.free)
    information = jacobian[:, index].T @ jacobian[:, index] * len(rows) / variance
    # a parameter that the rows do not determine is taken as known to a factor of e: the line is drawn all the same
    covariance = np.linalg.inv(information + np.eye(len(index)))
    everywhere = np.ones_like(batch)
    slopes = log_times(problem.values(point), nodes * everywhere, replicas * everywhere, batch, passes)[3][:, index]
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
    :func:`~ddltool.analyzers.goodput.tuning.frontier`.
    """
    known = max_replicas if known is None else min(known, max_replicas)
    up_to = functools.partial(
        frontier,
        params,
        limits=limits,
        noise_scale=noise_scale,
        replicas_per_node=replicas_per_node,
        threshold=threshold,
    )
    found, sure = up_to(max_replicas), up_to(known)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width_in(), 6.8 if is_narrow() else 6.4), layout="constrained")
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1.5, 1.0))
        _draw_map(figure, upper, found, _map_batches(found, limits), (params, limits, noise_scale))
        _draw_frontier(lower, found, known, noun)
        _draw_limit(lower, found, (sure.pays_until, known), threshold, noun)
        least = "at least " if sure.pays_until == known < max_replicas else ""
        for axis, label in ((upper, "_"), (lower, f"scaling pays {least}until {sure.pays_until}")):
            if known < max_replicas:
                _hatch_unknown(axis, known, max_replicas, "_" if axis is upper else "not supported by data")
            axis.axvline(sure.pays_until, color="#D55E00", linestyle="--", linewidth=1.6, label=label)
        lower.set_ylim(0, 1.08 * float(found.tuned.goodput_per_s.max()))
        lower.set_xlim(0.5, max_replicas + 0.5)
        lower.xaxis.get_major_locator().set_params(integer=True)
        lower.set_xlabel(f"{noun}s ({replicas_per_node} per node)")
        lower.set_ylabel("goodput\n(useful samples/s)")
        figure.legend(
            *lower.get_legend_handles_labels(),
            loc="outside lower left" if is_narrow() else "outside lower center",
            ncols=1 if is_narrow() else 2,
            frameon=False,
            fontsize=9,
        )
        return _bytes(figure, f"Goodput over {noun}s and total batch size, and its efficient frontier", file_format)


def _map_batches(found: Frontier, limits: BatchLimits) -> Array:
    """Return the total batches (b,) of the map: one far above the best would only make the map small."""
    best = int(found.tuned.total_batch_size[found.tuned.feasible].max())
    top = min(limits.max_batch_size, max(4 * best, 2 * limits.initial_batch_size))
    return np.geomspace(limits.initial_batch_size, max(top, limits.initial_batch_size + 1), 160)


def _draw_map(
    figure: Figure, axis: Axes, found: Frontier, batches: Array, model: tuple[ThroughputParams, BatchLimits, float]
) -> None:
    """Draw goodput over (GPUs, total batch) and the best batch of each count; ``model``: parameters, limits, noise scale."""
    params, limits, noise_scale = model
    surface = goodput_grid(params, found.num_nodes, found.num_replicas, batches, limits, noise_scale=noise_scale)
    edges = np.arange(0.5, len(found.num_replicas) + 1.0)
    ratio = math.sqrt(batches[1] / batches[0])
    heights = np.concatenate([batches / ratio, [batches[-1] * ratio]])
    mesh = axis.pcolormesh(edges, heights, np.ma.masked_invalid(surface.T), cmap="cividis", vmin=0.0, rasterized=True)
    # on a phone a bar beside the map would take a third of it
    beside = {"location": "top", "aspect": 30} if is_narrow() else {"location": "right"}
    figure.colorbar(mesh, ax=axis, label="goodput (useful samples/s)", pad=0.01, **beside)
    _log_axis(axis, "y")
    axis.set_ylim(heights[0], heights[-1])
    can = found.tuned.feasible
    replicas, best = found.num_replicas[can], found.tuned.total_batch_size[can]
    axis.plot(replicas, best, color="white", linewidth=3.0)
    axis.plot(replicas, best, color="black", linewidth=1.2, marker="o", markersize=3, label="best batch")
    axis.set_ylabel("total batch size (samples)")
    axis.legend(loc="lower right", fontsize=9, framealpha=0.9, labelcolor="#000000")  # its ground is white


def _draw_frontier(axis: Axes, found: Frontier, known: int, noun: str) -> None:
    """Draw the best goodput of each count: as a line as far as there are data, dashed beyond, a dot where it is efficient."""
    can, replicas, goodput = found.tuned.feasible, found.num_replicas, found.tuned.goodput_per_s
    sure, rest = can & (replicas <= known), can & (replicas >= known)
    axis.plot(replicas[sure], goodput[sure], color=SERIES_COLOURS[0], linewidth=1.4, label="best goodput")
    if known < len(replicas):
        axis.plot(replicas[rest], goodput[rest], color=SERIES_COLOURS[0], linewidth=1.2, linestyle="--")
    chosen = found.efficient & sure
    label = f"efficient: no fewer {noun}s give as much"
    axis.plot(replicas[chosen], goodput[chosen], "o", color=SERIES_COLOURS[0], markersize=4, label=label)


def _draw_limit(axis: Axes, found: Frontier, pays: tuple[int, int], threshold: float, noun: str) -> None:
    """Draw what further GPUs would have to bring to pay, from the first of ``pays`` on as far as the second."""
    goodput, until = found.tuned.goodput_per_s, pays[0]
    first = int(np.flatnonzero(found.tuned.feasible)[0])
    slope = threshold * goodput[first] / found.num_replicas[first]
    # beyond the count until which scaling pays, all goodput lies below this line
    x = np.array(pays)
    label = f"{threshold:.0%} of the first {noun}'s goodput for each further one"
    axis.plot(x, goodput[until - 1] + slope * (x - until), color=INK, linestyle=":", linewidth=1.2, label=label)


def _hatch_unknown(axis: Axes, known: int, most: int, label: str) -> None:
    """Hatch the counts of which no measurement speaks."""
    axis.axvspan(known + 0.5, most + 0.5, facecolor="none", edgecolor="#888888", hatch="//", linewidth=0, label=label)


def _bytes(figure: Figure, title: str, file_format: str) -> bytes:
    """Return the figure as the bytes of a file; ``title`` is what an SVG's reader without eyes is told."""
    if file_format == "svg":
        return to_svg(figure, title).encode("utf-8")
    made = io.BytesIO()
    figure.savefig(made, format="png", dpi=_DOTS_PER_INCH, metadata={"Software": None, "Title": title})
    return made.getvalue()
