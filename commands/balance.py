"""``ddltool balance TRACE.csv``: what load balancing by predicted speeds would have gained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddltool.analyzers.balancing.predict import PREDICTORS, check_names
from ddltool.analyzers.balancing.replay import BATCH_PER_WORKER, replays_of
from ddltool.analyzers.reporting.result_sections import balance_section, speeds_figures
from ddltool.commands.options import Json, Output, Seed, one_of
from ddltool.commands.output import finish, note, progress
from ddltool.commands.values import demand_picture, write_picture
from ddltool.outputs import check_outputs


def balance(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE.csv", help="Columns iteration,worker,speed,cpu,memory (.gz accepted).")
    ],
    predictor: Annotated[str, typer.Option(**one_of(*PREDICTORS, "all", help="What foretells speeds."))] = "all",
    total_batch: Annotated[
        int | None, typer.Option(help=f"Samples of all workers together (default {BATCH_PER_WORKER} each).")
    ] = None,
    warm_up: Annotated[
        int, typer.Option(help="Iterations before the first training; none of them is judged.", min=20)
    ] = 500,
    schemes: Annotated[bool, typer.Option("--schemes", help="Compare with BSP, ASP, SSP and others.")] = False,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw actual and predicted speeds.")] = None,
    seed: Seed = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Replay recorded worker speeds: predict each next one, size the batches by it, and time the iterations."""
    check_names(PREDICTORS if predictor == "all" else (predictor,))
    check_outputs([trace], {"-o": output, "--picture": picture})
    demand_picture(picture, "speeds")
    made = replays_of(
        trace,
        predictor,
        total_batch=total_batch,
        warm_up=warm_up,
        schemes=schemes,
        seed=seed,
        tell=note,
        stage=progress,
    )
    found = made.found
    if picture is not None:
        best = sorted(made.outcomes, key=lambda name: made.outcomes[name].rmse or 0.0)[:3]
        outcomes = {name: made.outcomes[name] for name in best}
        write_picture(picture, speeds_figures(made.recorded.names, outcomes, found.warm_up))
        note(f"wrote {picture}")
    finish(found, lambda: balance_section(found, trace.name), output, as_json)
