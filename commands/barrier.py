"""``ddltool barrier TIMES.csv``: when the workers should synchronise next."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddltool.analyzers.barriers.choices import CURVE_POINTS, FEW_POINTS, MANY_ENDS, PUBLISHED, barrier_choices, choose
from ddltool.analyzers.barriers.ends import EndTimes
from ddltool.analyzers.barriers.predict import PREDICTORS, predict_ends
from ddltool.analyzers.barriers.tradeoff import tradeoff
from ddltool.analyzers.loading.worker_tables import read_predicted, read_recorded
from ddltool.analyzers.reporting.result_sections import barrier_figures, barrier_section
from ddltool.commands.options import Json, Output
from ddltool.commands.output import finish, note
from ddltool.commands.parts import is_given
from ddltool.commands.values import demand_picture, write_picture
from ddltool.errors import InputError, did_you_mean
from ddltool.outputs import check_outputs

LOOKAHEAD = 15
# Beyond this a choice takes more than seconds, for barriers that lie hours ahead.
MOST_ENDS = 5_000_000


def barrier(
    context: typer.Context,
    times: Annotated[
        Path,
        typer.Argument(
            metavar="TIMES.csv", help="Columns worker,iteration,end_s; or telemetry, the hook's or a server's."
        ),
    ],
    lookahead: Annotated[
        int | None,
        typer.Option(
            help=f"Iterations to predict per worker (default {LOOKAHEAD}; with --predicted all in the file).",
            min=1,
            max=100_000,
        ),
    ] = None,
    algorithm: Annotated[str, typer.Option(help="zipline, gridscan, fullgridscan or all.")] = "zipline",
    predicted: Annotated[
        bool, typer.Option("--predicted", help="The rows are predictions themselves: make none from them.")
    ] = False,
    predictor: Annotated[str, typer.Option(help="Next iteration lengths: last, ema or mean.")] = "ema",
    max_gap: Annotated[
        int | None, typer.Option(help="Bound on the iteration gap of the exact barriers.", min=0)
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the timeline with the barrier, and the trade-off with staleness."),
    ] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Choose the next barrier: how many iterations each worker makes until all synchronise."""
    for option, name, known in (
        ("--algorithm", algorithm, (*PUBLISHED, "all")),
        ("--predictor", predictor, PREDICTORS),
    ):
        if name not in known:
            raise InputError(option, f"unknown {option[2:]} {name!r}", did_you_mean(name, known))
    if predicted and is_given(context, "predictor"):
        raise InputError("--predictor", "has no part in --predicted", "leave it out: the rows are predictions already")
    demand_picture(picture, "barrier")
    check_outputs([times], {"-o": output, "--picture": picture})
    if predicted:
        names, rows = read_predicted(times, lookahead)
        ends = EndTimes.of(rows)
    else:
        names, ends = predicted_ends(times, lookahead or LOOKAHEAD, predictor)
    chosen = tuple(PUBLISHED) if algorithm == "all" else (algorithm,)
    barriers = choose(ends, chosen, max_gap)
    curve = tradeoff(ends, CURVE_POINTS if len(ends.end_s) <= MANY_ENDS else FEW_POINTS)
    found = barrier_choices(names, ends, barriers, curve, max_gap=max_gap, predictor=None if predicted else predictor)
    if picture is not None:
        # The published algorithms know no bound: under one, an exact barrier is what was asked for.
        drawn, title = (chosen[0], chosen[0]) if max_gap is None else ("waiting", f"least longest, gap <= {max_gap}")
        write_picture(picture, barrier_figures(names, ends, barriers[drawn][0], title=title, found=found))
        note(f"wrote {picture}")
    finish(found, lambda: barrier_section(found, times.name), output, as_json)


def predicted_ends(path: Path, lookahead: int, predictor: str) -> tuple[tuple[str, ...], EndTimes]:
    """Return the workers' names (n,) and their predicted iteration ends (n, R), from what the file has recorded."""
    recorded = read_recorded(path)
    names = recorded.names
    if len(names) * lookahead > MOST_ENDS:
        problem = f"{len(names)} workers x {lookahead} iterations are too many"
        raise InputError("--lookahead", problem, f"at most {MOST_ENDS // len(names)} for these workers")
    if recorded.lagging:
        shown = ", ".join(recorded.lagging[:3]) + (", ..." if len(recorded.lagging) > 3 else "")
        note(
            f"the rows of {len(recorded.lagging)} of {len(names)} workers ({shown}) stop more than two of their "
            "iterations before the newest row; their predictions begin there"
        )
    where = [f"{name} of {path}" for name in names]
    ends = predict_ends(recorded.lengths_s, recorded.origins_s, lookahead, PREDICTORS[predictor], where)
    return names, EndTimes.of(ends)
