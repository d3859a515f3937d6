"""``ddltool barrier TIMES.csv``: when the workers should synchronise next."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddltool.analyzers.barriers.choices import LOOKAHEAD, PUBLISHED
from ddltool.analyzers.barriers.choices import barrier as chosen
from ddltool.analyzers.barriers.predict import PREDICTORS
from ddltool.analyzers.reporting.result_sections import barrier_section
from ddltool.commands.options import Json, Output, is_given, one_of
from ddltool.commands.output import finish, note
from ddltool.errors import InputError
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
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Choose the next barrier: how many iterations each worker makes until all synchronise."""
    if predicted and is_given(context, "predictor"):
        raise InputError("--predictor", "has no part in --predicted", "leave it out: the rows are predictions already")
    check_outputs([times], {"-o": output})
    found = chosen(
        times,
        lookahead=lookahead,
        algorithm=algorithm,
        predicted=predicted,
        predictor=predictor,
        max_gap=max_gap,
        tell=note,
    )
    finish(found, lambda: barrier_section(found, times.name), output, as_json)
