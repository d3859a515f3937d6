"""``ddltool barrier TIMES.csv``: when the workers should synchronise next."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from ddltool.commands.options import Json, Output

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddltool.analyzers.barriers.ends import Barrier, EndTimes

ALGORITHMS = ("zipline", "gridscan", "fullgridscan")
LOOKAHEAD = 15
LABELS = {"waiting": "least longest", "total": "least total", "per_iteration": "least per iter."}
SHOWN = {
    "waiting": "waiting_time_s",
    "total": "total_waiting_s",
    "per_iteration": "waiting_per_iteration_s",
}
# Beyond these a choice takes more than seconds, for barriers that lie hours ahead.
MOST_ENDS, MANY_ENDS = 5_000_000, 500_000
# Bounds on the iteration gap in the trade-off: every one where they are few, else spread over their range.
_CURVE_POINTS, _FEW_POINTS = 17, 5
_WORKERS_SHOWN = 16


def barrier(
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
    picture: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE.svg", help="Draw the timeline with the barrier."),
    ] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Choose the next barrier: how many iterations each worker makes until all synchronise."""
    from ddltool.artifacts import check_writable, save, write_text
    from ddltool.commands.output import note, print_json
    from ddltool.errors import InputError, did_you_mean

    if algorithm not in (*ALGORITHMS, "all"):
        raise InputError("--algorithm", f"unknown algorithm {algorithm!r}", did_you_mean(algorithm, ALGORITHMS))
    for path in (output, picture):
        if path is not None:
            check_writable(path)
    names, ends = ends_of(times, lookahead, predicted=predicted, predictor=predictor)
    chosen = ALGORITHMS if algorithm == "all" else (algorithm,)
    barriers = choose(ends, chosen, max_gap)
    document = describe(names, ends, barriers, max_gap, None if predicted else predictor)
    if picture is not None:
        from ddltool.analyzers.barriers.picture import barrier_svg

        write_text(picture, barrier_svg(names, ends, barriers[chosen[0]][0]))
        note(f"wrote {picture}")
    if output is not None:
        save(document, output)
    if as_json:
        print_json(document)
    else:
        show_barriers(document, output)


def ends_of(path: Path, lookahead: int | None, *, predicted: bool, predictor: str) -> tuple[tuple[str, ...], EndTimes]:
    """Return the workers' names (n,) and their predicted iteration ends (n, R)."""
    from ddltool.analyzers.balancing.predict import PREDICTORS as TRAINED
    from ddltool.analyzers.balancing.predict import length_predictor
    from ddltool.analyzers.barriers.ends import EndTimes
    from ddltool.analyzers.barriers.predict import PREDICTORS, predict_ends
    from ddltool.commands.barrier_times import read_predicted, read_recorded
    from ddltool.commands.output import note
    from ddltool.errors import InputError, did_you_mean

    trained = [name for name in TRAINED if name not in PREDICTORS]
    if predictor not in (*PREDICTORS, *trained):
        known = (*PREDICTORS, *trained)
        raise InputError("--predictor", f"unknown predictor {predictor!r}", did_you_mean(predictor, known))
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


def choose(ends: EndTimes, algorithms: tuple[str, ...], max_gap: int | None) -> dict[str, tuple[Barrier, float]]:
    """Return each algorithm's barrier and CPU seconds, then BSP's and the exact ones under ``max_gap``."""
    from functools import partial

    from ddltool.analyzers.barriers.ends import bsp
    from ddltool.analyzers.barriers.gridscan import full_gridscan, gridscan
    from ddltool.analyzers.barriers.tradeoff import OBJECTIVES, best_barrier
    from ddltool.analyzers.barriers.zipline import zipline

    published = {"zipline": zipline, "gridscan": gridscan, "fullgridscan": full_gridscan}
    made = {name: _timed(published[name], ends) for name in algorithms}
    made["bsp"] = _timed(bsp, ends)
    for objective in OBJECTIVES:
        made[objective] = _timed(partial(best_barrier, objective=objective, max_gap=max_gap), ends)
    return made


def _timed(call: Callable[[EndTimes], Barrier], ends: EndTimes) -> tuple[Barrier, float]:
    import time

    begin = time.process_time()
    barrier = call(ends)
    return barrier, time.process_time() - begin


def describe(
    names: tuple[str, ...],
    ends: EndTimes,
    barriers: dict[str, tuple[Barrier, float]],
    max_gap: int | None,
    predictor: str | None,
) -> dict[str, Any]:
    """Return the document that ``--json`` prints."""
    from ddltool.analyzers.barriers.tradeoff import OBJECTIVES, tradeoff

    records = {
        name: {**_figures(made), "iterations": _iterations(names, made), "compute_seconds": seconds}
        for name, (made, seconds) in barriers.items()
    }
    return {
        "kind": "ddltool.barrier",
        "schema_version": 1,
        "workers": len(names),
        "lookahead": int((ends.pointers[1:] - ends.pointers[:-1]).max()),
        "predictor": predictor,
        "algorithms": {name: record for name, record in records.items() if name in ALGORITHMS},
        "bsp": records["bsp"],
        "max_gap": max_gap,
        "objectives": {name: records[name] for name in OBJECTIVES},
        "tradeoff": [
            {"max_gap": point.max_gap, **{name: _figures(getattr(point, name)) for name in OBJECTIVES}}
            for point in tradeoff(ends, _bounds(ends))
        ],
    }


def _bounds(ends: EndTimes) -> list[int]:
    """Return at most 17 bounds (5 where ends are many) on the gap, from 0 to the one from which on nothing improves."""
    import numpy as np

    from ddltool.analyzers.barriers.tradeoff import OBJECTIVES, best_barrier

    most = max(best_barrier(ends, objective=objective).iteration_gap for objective in OBJECTIVES)
    points = _CURVE_POINTS if len(ends.end_s) <= MANY_ENDS else _FEW_POINTS
    if most < points:
        return list(range(most + 1))
    spread = np.unique(np.geomspace(1, most, points - 1).round().astype(int))
    return [0, *spread.tolist()]


def _figures(made: Barrier) -> dict[str, float | int]:
    return {
        "waiting_time_s": made.waiting_s,
        "barrier_s": made.barrier_s,
        "total_waiting_s": made.total_waiting_s,
        "waiting_per_iteration_s": made.waiting_per_iteration_s,
        "iteration_gap": made.iteration_gap,
    }


def _iterations(names: tuple[str, ...], made: Barrier) -> dict[str, int]:
    return dict(zip(names, made.iterations.tolist(), strict=True))


def show_barriers(document: dict[str, Any], output: Path | None) -> None:
    """Print the barriers, each worker's iterations, and the trade-off of waiting against the iteration gap."""
    from ddltool.commands.output import out, table
    from ddltool.units import show_seconds

    legend = "longest, total, per iter.: waiting of the workers"
    if document["max_gap"] is not None:
        legend += f"; in the rows 'least ...' the gap is at most {document['max_gap']}"
    records = {
        "bsp": document["bsp"],
        **document["algorithms"],
        **{label: document["objectives"][name] for name, label in LABELS.items()},
    }
    rows = [
        [
            name,
            show_seconds(record["barrier_s"]),
            show_seconds(record["waiting_time_s"]),
            show_seconds(record["total_waiting_s"]),
            show_seconds(record["waiting_per_iteration_s"]),
            str(record["iteration_gap"]),
            show_seconds(record["compute_seconds"]),
        ]
        for name, record in records.items()
    ]
    title = f"Next barrier of {document['workers']} workers, lookahead {document['lookahead']} (predicted)"
    columns = ("", "at", "longest", "total", "per iter.", "gap", "CPU")
    console = out()
    console.print(table(title, columns, rows, caption=legend))
    _show_iterations(document)
    curve = []
    for point in document["tradeoff"]:
        cells = [str(point["max_gap"])]
        for name, figure in SHOWN.items():
            cells += [show_seconds(point[name]["barrier_s"]), show_seconds(point[name][figure])]
        curve.append(cells)
    headings = ("gap <=", "at", "longest", "at", "total", "at", "per iter.")
    console.print(table("Least waiting by bound on the iteration gap", headings, curve, text_columns=0))
    if output is not None:
        console.print(f"wrote {output}", soft_wrap=True)


def _show_iterations(document: dict[str, Any]) -> None:
    """Print the iterations until the barrier: per worker, or how they spread where workers are many."""
    import numpy as np

    from ddltool.commands.output import out, table

    columns = {**document["algorithms"], LABELS["per_iteration"]: document["objectives"]["per_iteration"]}
    workers = list(next(iter(columns.values()))["iterations"])
    if len(workers) <= _WORKERS_SHOWN:
        rows = [[worker, *(str(record["iterations"][worker]) for record in columns.values())] for worker in workers]
        out().print(table("Iterations until the barrier", ("worker", *columns), rows))
        return
    counts = [np.array(list(record["iterations"].values())) for record in columns.values()]
    rows = [
        [label, *(f"{np.quantile(count, share):g}" for count in counts)]
        for label, share in (("fewest", 0.0), ("median", 0.5), ("most", 1.0))
    ]
    out().print(table(f"Iterations of {len(workers)} workers until the barrier", ("", *columns), rows))
