"""``ddltool balance TRACE.csv``: what load balancing by predicted speeds would have gained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddltool.analyzers.balancing.predict import PREDICTORS
from ddltool.analyzers.balancing.replay import BATCH_PER_WORKER
from ddltool.analyzers.balancing.replay import balance as replayed
from ddltool.analyzers.reporting.result_sections import balance_section
from ddltool.commands.declaring import called
from ddltool.commands.options import Seed, one_of, within
from ddltool.commands.output import finish


def balance(
    context: typer.Context,
    trace: Path,
    predictor: Annotated[str, one_of(*PREDICTORS, "all")] = "all",
    total_batch: Annotated[int | None, {"show_default": f"{BATCH_PER_WORKER} each"}] = None,
    warm_up: Annotated[int, within(20)] = 500,
    schemes: bool = False,
    seed: Seed = 0,
    output: Path | None = None,
    as_json: bool = False,
) -> None:
    """Replay recorded worker speeds: predict each next one, size the batches by it, and time the iterations."""
    found = called(context, replayed)
    finish(found, lambda: balance_section(found, trace.name), output, as_json)
