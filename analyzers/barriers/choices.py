"""Choices of the next barrier beside BSP's, and waiting against staleness, as one result. Start at :func:`barrier_choices`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ddltool.analyzers.barriers.ends import Barrier, EndTimes, bsp
from ddltool.analyzers.barriers.gridscan import full_gridscan, gridscan
from ddltool.analyzers.barriers.tradeoff import OBJECTIVES, TradeoffPoint, best_barrier
from ddltool.analyzers.barriers.zipline import zipline
from ddltool.results import BarrierChoice, BarrierFigures, BarrierResult, TradeoffFigures

PUBLISHED: Mapping[str, Callable[[EndTimes], Barrier]] = {
    "zipline": zipline,
    "gridscan": gridscan,
    "fullgridscan": full_gridscan,
}
# Bounds on the iteration gap in the trade-off: every one where they are few, else spread over their range.
CURVE_POINTS, FEW_POINTS, MANY_ENDS = 17, 5, 500_000


def choose(ends: EndTimes, algorithms: Sequence[str], max_gap: int | None) -> dict[str, tuple[Barrier, float]]:
    """Return barrier and CPU seconds of BSP, the named algorithms, and the exact ones (by objective) under ``max_gap``."""
    calls: dict[str, Callable[[EndTimes], Barrier]] = {"bsp": bsp, **{name: PUBLISHED[name] for name in algorithms}}
    calls |= {objective: partial(best_barrier, objective=objective, max_gap=max_gap) for objective in OBJECTIVES}
    made = {}
    for name, call in calls.items():
        begin = time.process_time()
        barrier = call(ends)
        made[name] = barrier, time.process_time() - begin
    return made


def barrier_choices(
    names: Sequence[str],
    ends: EndTimes,
    barriers: Mapping[str, tuple[Barrier, float]],
    curve: Sequence[TradeoffPoint],
    *,
    max_gap: int | None = None,
    predictor: str | None = None,
) -> BarrierResult:
    """Return what :func:`choose` and :func:`~.tradeoff.tradeoff` found for workers called ``names`` (n,) as a record."""
    records = {
        name: BarrierChoice(
            **_figures(made),
            iterations=dict(zip(names, made.iterations.tolist(), strict=True)),
            compute_seconds=seconds,
        )
        for name, (made, seconds) in barriers.items()
    }
    return BarrierResult(
        workers=len(names),
        lookahead=int(np.diff(ends.pointers).max()),
        predictor=predictor,
        algorithms={name: record for name, record in records.items() if name in PUBLISHED},
        bsp=records["bsp"],
        max_gap=max_gap,
        objectives={name: records[name] for name in OBJECTIVES},
        tradeoff=[
            TradeoffFigures(
                max_gap=point.max_gap,
                **{name: BarrierFigures(**_figures(getattr(point, name))) for name in OBJECTIVES},
            )
            for point in curve
        ],
    )


def _figures(made: Barrier) -> dict[str, Any]:
    return {
        "waiting_time_s": made.waiting_s,
        "barrier_s": made.barrier_s,
        "total_waiting_s": made.total_waiting_s,
        "waiting_per_iteration_s": made.waiting_per_iteration_s,
        "iteration_gap": made.iteration_gap,
    }
