"""The timeline of a barrier as SVG text: iteration ends per worker, the chosen ones, and the waiting.

Below it, on demand, what less staleness costs: the least waiting for each bound on the iteration gap.
"""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ddltool.analyzers.barriers.ends import Barrier, Counts, EndTimes, Times
from ddltool.analyzers.barriers.tradeoff import TradeoffPoint
from ddltool.analyzers.reporting.style import INK, SERIES_COLOURS, STYLE, WIDTH_IN, time_unit, to_svg

WORKERS_DRAWN = 40
_ENDS = "#0072B2"
_CHOSEN = "#D55E00"
_WAITING = "#999999"


def barrier_svg(
    names: Sequence[str],
    times: Times,
    barrier: Barrier,
    *,
    title: str = "",
    curve: Sequence[TradeoffPoint] = (),
    max_gap: int | None = None,
) -> str:
    """Return a lane per worker: a tick at each iteration end, a dot at the chosen one, a bar for its waiting.

    ``names``: (n,) lane labels; ``times`` as in :func:`~.zipline.zipline`, seconds; ``title``: what chose the barrier. Of
    more than 40 workers 40 are drawn, evenly spread from the one that waits longest to the one that does not. Two or more
    points of ``curve`` become a second panel: least waiting by bound on the iteration gap, ``max_gap`` marked.
    """
    ends = EndTimes.of(times)
    drawn = np.arange(ends.workers)
    if ends.workers > WORKERS_DRAWN:
        by_waiting = np.argsort(barrier.chosen_s, kind="stable")
        drawn = by_waiting[np.linspace(0, ends.workers - 1, WORKERS_DRAWN).round().astype(int)]
    heights = [0.8 + 0.3 * len(drawn)] + [2.6] * (len(curve) > 1)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, 0.6 + sum(heights)), layout="constrained")
        axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
        _draw_timeline(axes[0], names, ends, barrier, drawn)
        some = f"{len(drawn)} of {ends.workers} workers" if len(drawn) < ends.workers else ""
        axes[0].set_title(", ".join(text for text in (title, some) if text), loc="left", fontsize=10)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper right", ncols=4, frameon=False, fontsize=9)
        if len(curve) > 1:
            _draw_curve(axes[1], curve, max_gap)
        return to_svg(figure, "Iteration ends of each worker, and the barrier")


def _draw_timeline(axis: Axes, names: Sequence[str], ends: EndTimes, barrier: Barrier, drawn: Counts) -> None:
    """Draw a lane for each worker of ``drawn`` (m,)."""
    low = float(ends.first_s.min())
    scale, unit = time_unit(max(float(ends.last_s.max()) - low, barrier.barrier_s - low))
    # On clocks that began long ago only differences are legible; the axis then counts from the first end.
    offset = low if abs(low) > 1e3 * max(float(ends.last_s.max()) - low, 1e-9) else 0.0
    for place, worker in enumerate(drawn.tolist()):
        chosen = float(barrier.chosen_s[worker])
        label = "waiting" if place == 0 else "_"
        waiting = (barrier.barrier_s - chosen) * scale
        axis.barh(place, waiting, left=(chosen - offset) * scale, height=0.5, color=_WAITING, linewidth=0, label=label)
    rows = [(ends.row(worker) - offset) * scale for worker in drawn.tolist()]
    lanes = np.repeat(np.arange(len(drawn)), [len(row) for row in rows])
    axis.plot(np.concatenate(rows), lanes, "|", color=_ENDS, markersize=9, label="iteration end")
    chosen_s = (barrier.chosen_s[drawn] - offset) * scale
    axis.plot(chosen_s, np.arange(len(drawn)), "o", color=_CHOSEN, markersize=6, label="last before the barrier")
    axis.axvline((barrier.barrier_s - offset) * scale, color=INK, linestyle="--", linewidth=1, label="barrier")
    labels = [f"{names[worker]} ({barrier.iterations[worker]})" for worker in drawn.tolist()]
    axis.set_yticks(range(len(drawn)), labels)
    axis.set_ylim(len(drawn) - 0.5, -0.5)
    since = "" if offset == 0 else " after the first iteration end"
    axis.set_xlabel(f"time ({unit}){since}; in brackets: iterations until the barrier")


def _draw_curve(axis: Axes, curve: Sequence[TradeoffPoint], max_gap: int | None) -> None:
    """Draw the least waiting by bound on the gap; a bound between two points allows what the lower one does."""
    gaps = [point.max_gap for point in curve]
    lines = {
        "longest": [point.waiting.waiting_s for point in curve],
        "mean of the workers": [point.total.total_waiting_s / len(point.total.iterations) for point in curve],
        "per iteration made": [point.per_iteration.waiting_per_iteration_s for point in curve],
    }
    scale, unit = time_unit(max(max(line) for line in lines.values()))
    for (label, line), colour in zip(lines.items(), SERIES_COLOURS, strict=False):
        values = [value * scale for value in line]
        axis.step(gaps, values, where="post", color=colour, linewidth=1.5, label=label, marker="o", markersize=3)
    if max_gap is not None:
        axis.axvline(max_gap, color=INK, linestyle="--", linewidth=1, label=f"--max-gap {max_gap}")
    axis.set_ylim(bottom=0)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("bound on the iteration gap (staleness)")
    axis.set_ylabel(f"least waiting ({unit})")
    axis.legend(loc="upper right", frameon=False, fontsize=9)
