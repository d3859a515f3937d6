"""``ddltool barrier TIMES.csv``: when the workers should synchronise next."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddltool.analyzers.barriers.choices import LOOKAHEAD, PUBLISHED, choices_of
from ddltool.analyzers.barriers.predict import PREDICTORS
from ddltool.analyzers.reporting.result_sections import barrier_figures, barrier_section
from ddltool.commands.options import Json, Output, one_of
from ddltool.commands.output import finish, note
from ddltool.commands.parts import is_given
from ddltool.commands.values import demand_picture, write_picture
from ddltool.errors import InputError, did_you_mean
from ddltool.outputs import check_outputs


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
    algorithm: Annotated[str, typer.Option(**one_of(*PUBLISHED, "all", help="How it is chosen."))] = "zipline",
    predicted: Annotated[
        bool, typer.Option("--predicted", help="The rows are predictions themselves: make none from them.")
    ] = False,
    predictor: Annotated[str, typer.Option(**one_of(*PREDICTORS, help="Of the next iteration lengths."))] = "ema",
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
    made = choices_of(
        times,
        lookahead=lookahead,
        algorithm=algorithm,
        predicted=predicted,
        predictor=predictor,
        max_gap=max_gap,
        tell=note,
    )
    if picture is not None:
        # The published algorithms know no bound: under one, an exact barrier is what was asked for.
        first = next(iter(made.found.algorithms))
        drawn, title = (first, first) if max_gap is None else ("waiting", f"least longest, gap <= {max_gap}")
        figures = barrier_figures(made.names, made.ends, made.barriers[drawn][0], title=title, found=made.found)
        write_picture(picture, figures)
        note(f"wrote {picture}")
    finish(made.found, lambda: barrier_section(made.found, times.name), output, as_json)
