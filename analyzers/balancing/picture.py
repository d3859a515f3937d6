"""Actual against predicted speeds as SVG text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from ddltool.analyzers.balancing.replay import Floats, Outcome
from ddltool.analyzers.reporting.style import INK, SERIES_COLOURS, STYLE, WIDTH_IN, to_svg

ITERATIONS_DRAWN = 150
WORKERS_DRAWN = 3


def speeds_svg(names: Sequence[str], outcomes: Mapping[str, Outcome], first: int) -> str:
    """Return a panel per worker: its actual speed, and the predicted one of each outcome, over iterations.

    Args:
        names: (n,) workers.
        outcomes: predictor name -> what it came to; all over the same J iterations.
        first: the number of the first of them.

    Of more than 3 workers those are drawn whose speed varies most, and of more than 150 iterations the 150 in which
    they vary most.
    """
    actual = next(iter(outcomes.values())).actual
    low, high = _liveliest(actual)
    spread = actual[low:high].std(axis=0) / actual[low:high].mean(axis=0)
    drawn = np.sort(np.argsort(-spread, kind="stable")[:WORKERS_DRAWN]).tolist()
    at = np.arange(first + low, first + high)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH_IN, 0.9 + 2.0 * len(drawn)), layout="constrained")
        axes = figure.subplots(len(drawn), 1, sharex=True, squeeze=False)[:, 0]
        for axis, worker in zip(axes, drawn, strict=True):
            label = "actual" if axis is axes[0] else "_"
            axis.plot(at, actual[low:high, worker], color=INK, linewidth=1, label=label)
            for place, (name, outcome) in enumerate(outcomes.items()):
                if outcome.predicted is None:
                    continue
                label = name if axis is axes[0] else "_"
                colour = SERIES_COLOURS[place % len(SERIES_COLOURS)]
                axis.plot(at, outcome.predicted[low:high, worker], color=colour, linewidth=1.4, label=label)
            axis.set_title(names[worker], loc="left", fontsize=10)
            axis.set_ylim(bottom=0)
            axis.set_ylabel("samples/s")
        axes[-1].set_xlabel("iteration")
        figure.legend(loc="outside upper right", ncols=4, frameon=False, fontsize=9)
        return to_svg(figure, "Actual and predicted speed of each worker")


def _liveliest(actual: Floats) -> tuple[int, int]:
    """Return the bounds of the stretch of at most 150 iterations with the most relative variance in it."""
    count = len(actual)
    if count <= ITERATIONS_DRAWN:
        return 0, count
    relative = actual / actual.mean(axis=0)
    sums = np.concatenate(
        (np.zeros((1, 2, actual.shape[1])), np.cumsum(np.stack((relative, relative**2), axis=1), axis=0))
    )
    mean, square = ((sums[ITERATIONS_DRAWN:] - sums[:-ITERATIONS_DRAWN]) / ITERATIONS_DRAWN).transpose(1, 0, 2)
    begin = int(np.argmax(np.sort(square - mean**2, axis=1)[:, -WORKERS_DRAWN:].sum(axis=1)))
    return begin, begin + ITERATIONS_DRAWN
