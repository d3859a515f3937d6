"""The timeline of a barrier as SVG text: iteration ends per worker, the chosen ones, and the waiting."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from ddltool.analyzers.barriers.ends import Barrier, EndTimes, Times
from ddltool.analyzers.reporting.pictures import _INK, _STYLE, _WIDTH_IN, _time_unit, _to_svg

WORKERS_DRAWN = 40
_ENDS = "#0072B2"
_CHOSEN = "#D55E00"
_WAITING = "#999999"


def barrier_svg(names: Sequence[str], times: Times, barrier: Barrier) -> str:
    """Return a lane per worker: a tick at each iteration end, a dot at the chosen one, a bar for its waiting.

    ``names``: (n,) lane labels; ``times`` as in :func:`~.zipline.zipline`, seconds. Of more than 40 workers 40 are
    drawn, evenly spread from the one that waits longest to the one that does not.
    """
    ends = EndTimes.of(times)
    drawn = np.arange(ends.workers)
    if ends.workers > WORKERS_DRAWN:
        by_waiting = np.argsort(barrier.chosen_s, kind="stable")
        drawn = by_waiting[np.linspace(0, ends.workers - 1, WORKERS_DRAWN).round().astype(int)]
    low = float(ends.first_s.min())
    scale, unit = _time_unit(max(float(ends.last_s.max()) - low, barrier.barrier_s - low))
    # On clocks that began long ago only differences are legible; the axis then counts from the first end.
    offset = low if abs(low) > 1e3 * max(float(ends.last_s.max()) - low, 1e-9) else 0.0
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, 1.3 + 0.3 * len(drawn)), layout="constrained")
        axis = figure.subplots()
        for place, worker in enumerate(drawn.tolist()):
            chosen = float(barrier.chosen_s[worker])
            label = "waiting" if place == 0 else "_"
            waiting = (barrier.barrier_s - chosen) * scale
            axis.barh(
                place, waiting, left=(chosen - offset) * scale, height=0.5, color=_WAITING, linewidth=0, label=label
            )
        rows = [(ends.row(worker) - offset) * scale for worker in drawn.tolist()]
        lanes = np.repeat(np.arange(len(drawn)), [len(row) for row in rows])
        axis.plot(np.concatenate(rows), lanes, "|", color=_ENDS, markersize=9, label="iteration end")
        chosen_s = (barrier.chosen_s[drawn] - offset) * scale
        axis.plot(chosen_s, np.arange(len(drawn)), "o", color=_CHOSEN, markersize=6, label="last before the barrier")
        axis.axvline((barrier.barrier_s - offset) * scale, color=_INK, linestyle="--", linewidth=1, label="barrier")
        labels = [f"{names[worker]} ({barrier.iterations[worker]})" for worker in drawn.tolist()]
        axis.set_yticks(range(len(drawn)), labels)
        axis.set_ylim(len(drawn) - 0.5, -0.5)
        since = "" if offset == 0 else " after the first iteration end"
        axis.set_xlabel(f"time ({unit}){since}; in brackets: iterations until the barrier")
        if len(drawn) < ends.workers:
            axis.set_title(f"{len(drawn)} of {ends.workers} workers", loc="left", fontsize=10)
        figure.legend(loc="outside upper right", ncols=4, frameon=False, fontsize=9)
        return _to_svg(figure, "Iteration ends of each worker, and the barrier")
