"""``ddltool balance TRACE.csv``: what load balancing by predicted speeds would have gained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddltool.analyzers.balancing.predict import PREDICTORS
from ddltool.analyzers.balancing.replay import BATCH_PER_WORKER
from ddltool.analyzers.balancing.replay import balance as replayed
from ddltool.analyzers.reporting.result_sections import balance_section
from ddltool.commands.options import Json, Output, Seed, one_of
from ddltool.commands.output import finish, note, progress
from ddltool.outputs import check_outputs


def balance(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE.csv", help="Columns iteration,worker,speed,cpu,memory; or the hook's telemetry (.gz too)."
        ),
    ],
    predictor: Annotated[str, typer.Option(**one_of(*PREDICTORS, "all", help="What foretells speeds."))] = "all",
    total_batch: Annotated[
        int | None, typer.Option(help=f"Samples of all workers together (default {BATCH_PER_WORKER} each).")
    ] = None,
    warm_up: Annotated[
        int, typer.Option(help="Iterations before the first training; none of them is judged.", min=20)
    ] = 500,
    schemes: Annotated[bool, typer.Option("--schemes", help="Compare with BSP, ASP, SSP and others.")] = False,
    seed: Seed = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Replay recorded worker speeds: predict each next one, size the batches by it, and time the iterations."""
    check_outputs([trace], {"-o": output})
    found = replayed(
        trace,
        predictor,
        total_batch=total_batch,
        warm_up=warm_up,
        schemes=schemes,
        seed=seed,
        tell=note,
        stage=progress,
    )
    finish(found, lambda: balance_section(found, trace.name), output, as_json)
