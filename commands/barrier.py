"""``ddltool barrier TIMES.csv``: when the workers should synchronise next."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Optional

import numpy as np
import typer

from ddltool.analyzers.balancing.predict import PREDICTORS as TRAINED
from ddltool.analyzers.balancing.predict import length_predictor
from ddltool.analyzers.barriers.ends import Barrier, EndTimes, Floats, bsp
from ddltool.analyzers.barriers.gridscan import full_gridscan, gridscan
from ddltool.analyzers.barriers.predict import PREDICTORS, predict_ends
from ddltool.analyzers.barriers.tradeoff import OBJECTIVES, TradeoffPoint, best_barrier, tradeoff
from ddltool.analyzers.barriers.zipline import zipline
from ddltool.analyzers.reporting.result_sections import barrier_section
from ddltool.artifacts import check_writable, save, write_text
from ddltool.commands.options import Json, Output
from ddltool.commands.output import note, print_json, show
from ddltool.commands.parts import is_given
from ddltool.commands.values import demand_picture
from ddltool.errors import InputError, did_you_mean
from ddltool.outputs import demand_distinct
from ddltool.results import BarrierChoice, BarrierFigures, BarrierResult, TradeoffFigures

Prices = Floats | None
ALGORITHMS = ("zipline", "gridscan", "fullgridscan")
LOOKAHEAD = 15
# Beyond these a choice takes more than seconds, for barriers that lie hours ahead.
MOST_ENDS, MANY_ENDS = 5_000_000, 500_000
# Bounds on the iteration gap in the trade-off: every one where they are few, else spread over their range.
_CURVE_POINTS, _FEW_POINTS = 17, 5


def barrier(
    context: typer.Context,
    times: Annotated[
        Path,
        typer.Argument(
            metavar="TIMES.csv",
            help="Columns worker,iteration,end_s; or telemetry, the hook's or a server's.",
        ),
    ],
    lookahead: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            help=f"Iterations to predict per worker (default {LOOKAHEAD}; with --predicted all in the file).",
            min=1,
            max=100_000,
            show_default=False,
        ),
    ] = None,
    algorithm: Annotated[str, typer.Option(help="zipline, gridscan, fullgridscan or all.")] = "zipline",
    predicted: Annotated[
        bool, typer.Option("--predicted", help="The rows are predictions themselves: make none from them.")
    ] = False,
    predictor: Annotated[
        str, typer.Option(help="Next iteration lengths: last, ema, mean, arima, rnn, lstm or narx.")
    ] = "ema",
    max_gap: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Bound on the iteration gap of the exact barriers.", min=0),
    ] = None,
    weights: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="FILE.csv|WORKER=PRICE,...",
            help="What a second of waiting of each worker costs: minimised in total and per iteration.",
        ),
    ] = None,
    picture: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE.svg", help="Draw the timeline with the barrier, and the trade-off with staleness."),
    ] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Choose the next barrier: how many iterations each worker makes until all synchronise."""
    if algorithm not in (*ALGORITHMS, "all"):
        raise InputError("--algorithm", f"unknown algorithm {algorithm!r}", did_you_mean(algorithm, ALGORITHMS))
    if predicted and is_given(context, "predictor"):
        raise InputError("--predictor", "has no part in --predicted", "leave it out: the rows are predictions already")
    demand_picture(picture, "barrier")
    demand_distinct([times], {"-o": output, "--picture": picture})
    for path in (output, picture):
        if path is not None:
            check_writable(path)
    from ddltool.analyzers.loading.worker_tables import read_weights  # it loads pandas

    names, ends = ends_of(times, lookahead, predicted=predicted, predictor=predictor)
    prices = None if weights is None else read_weights(weights, names)
    chosen = ALGORITHMS if algorithm == "all" else (algorithm,)
    barriers = choose(ends, chosen, max_gap, prices)
    curve = tradeoff_curve(ends, prices)
    found = describe(names, ends, barriers, curve, prices, max_gap=max_gap, predictor=None if predicted else predictor)
    if picture is not None:
        from ddltool.analyzers.barriers.picture import barrier_svg

        # The published algorithms know neither bound nor price: under these, an exact barrier is what was asked for.
        drawn = title = chosen[0]
        if prices is not None:
            drawn, title = "total", "least total by weight"
        elif max_gap is not None:
            drawn, title = "waiting", "least longest"
        title += "" if max_gap is None else f", gap <= {max_gap}"
        made = barriers[drawn][0]
        svg = barrier_svg(names, ends, made, title=title, curve=curve, max_gap=max_gap, weights=prices)
        write_text(picture, svg)
        note(f"wrote {picture}")
    if output is not None:
        save(found, output)
    if as_json:
        print_json(found)
    else:
        show(barrier_section(found, times.name), output)


def ends_of(path: Path, lookahead: int | None, *, predicted: bool, predictor: str) -> tuple[tuple[str, ...], EndTimes]:
    """Return the workers' names (n,) and their predicted iteration ends (n, R)."""
    trained = [name for name in TRAINED if name not in PREDICTORS]
    if predictor not in (*PREDICTORS, *trained):
        known = (*PREDICTORS, *trained)
        raise InputError("--predictor", f"unknown predictor {predictor!r}", did_you_mean(predictor, known))
    from ddltool.analyzers.loading.worker_tables import read_predicted, read_recorded

    if predicted:
        names, ends = read_predicted(path, lookahead)
        return names, EndTimes.of(ends)
    recorded = read_recorded(path)
    names, horizon = recorded.names, lookahead if lookahead is not None else LOOKAHEAD
    if len(names) * horizon > MOST_ENDS:
        problem = f"{len(names)} workers x {horizon} iterations are too many"
        raise InputError("--lookahead", problem, f"at most {MOST_ENDS // len(names)} for these workers")
    if recorded.lagging:
        shown = ", ".join(recorded.lagging[:3]) + (", ..." if len(recorded.lagging) > 3 else "")
        note(
            f"the rows of {len(recorded.lagging)} of {len(names)} workers ({shown}) stop more than two of their "
            "iterations before the newest row; their predictions begin there"
        )
    where = [f"{name} of {path}" for name in names]
    rule = length_predictor(predictor) if predictor in trained else PREDICTORS[predictor]
    ends = predict_ends(recorded.lengths_s, recorded.origins_s, horizon, rule, where)
    return names, EndTimes.of(ends)


def choose(
    ends: EndTimes, algorithms: tuple[str, ...], max_gap: int | None, prices: Prices = None
) -> dict[str, tuple[Barrier, float]]:
    """Return each algorithm's barrier and CPU seconds, then BSP's and the exact ones under ``max_gap`` and prices."""
    published = {"zipline": zipline, "gridscan": gridscan, "fullgridscan": full_gridscan}
    made = {name: _timed(published[name], ends) for name in algorithms}
    made["bsp"] = _timed(bsp, ends)
    for objective in OBJECTIVES:
        made[objective] = _timed(partial(best_barrier, objective=objective, max_gap=max_gap, weights=prices), ends)
    return made


def _timed(call: Callable[[EndTimes], Barrier], ends: EndTimes) -> tuple[Barrier, float]:

    begin = time.process_time()
    barrier = call(ends)
    return barrier, time.process_time() - begin


def tradeoff_curve(ends: EndTimes, prices: Prices) -> tuple[TradeoffPoint, ...]:
    """Return the best barriers by bound on the iteration gap."""
    return tradeoff(ends, _bounds(ends, prices), prices)


def describe(
    names: tuple[str, ...],
    ends: EndTimes,
    barriers: dict[str, tuple[Barrier, float]],
    curve: tuple[TradeoffPoint, ...],
    prices: Prices,
    *,
    max_gap: int | None = None,
    predictor: str | None = None,
) -> BarrierResult:
    """Return all barriers as the command's result."""
    records = {
        name: BarrierChoice(
            **_figures(made, prices),
            iterations=dict(zip(names, made.iterations.tolist(), strict=True)),
            compute_seconds=seconds,
        )
        for name, (made, seconds) in barriers.items()
    }
    return BarrierResult(
        workers=len(names),
        lookahead=int((ends.pointers[1:] - ends.pointers[:-1]).max()),
        predictor=predictor,
        algorithms={name: record for name, record in records.items() if name in ALGORITHMS},
        bsp=records["bsp"],
        max_gap=max_gap,
        weights=None if prices is None else dict(zip(names, prices.tolist(), strict=True)),
        objectives={name: records[name] for name in OBJECTIVES},
        tradeoff=[
            TradeoffFigures(
                max_gap=point.max_gap,
                waiting=BarrierFigures(**_figures(point.waiting, prices)),
                total=BarrierFigures(**_figures(point.total, prices)),
                per_iteration=BarrierFigures(**_figures(point.per_iteration, prices)),
            )
            for point in curve
        ],
    )


def _bounds(ends: EndTimes, prices: Prices) -> list[int]:
    """Return at most 17 bounds (5 where ends are many) on the gap, from 0 to the one from which on nothing improves."""
    most = max(best_barrier(ends, objective=objective, weights=prices).iteration_gap for objective in OBJECTIVES)
    points = _CURVE_POINTS if len(ends.end_s) <= MANY_ENDS else _FEW_POINTS
    if most < points:
        return list(range(most + 1))
    spread = np.unique(np.geomspace(1, most, points - 1).round().astype(int))
    return [0, *spread.tolist()]


def _figures(made: Barrier, prices: Prices) -> dict[str, Any]:
    cost = {}
    if prices is not None:
        waited = float(prices @ (made.barrier_s - made.chosen_s))
        cost = {"waiting_cost": waited, "waiting_cost_per_iteration": waited / int(made.iterations.sum())}
    return {
        "waiting_time_s": made.waiting_s,
        "barrier_s": made.barrier_s,
        "total_waiting_s": made.total_waiting_s,
        "waiting_per_iteration_s": made.waiting_per_iteration_s,
        "iteration_gap": made.iteration_gap,
        **cost,
    }
