"""``ddltool barrier TIMES.csv``: when the workers should synchronise next."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddltool.analyzers.barriers.choices import LOOKAHEAD, PUBLISHED
from ddltool.analyzers.barriers.choices import barrier as chosen
from ddltool.analyzers.barriers.predict import PREDICTORS
from ddltool.analyzers.reporting.result_sections import barrier_section
from ddltool.commands.declaring import called
from ddltool.commands.options import is_given, one_of, within
from ddltool.commands.output import finish
from ddltool.errors import InputError


def barrier(
    context: typer.Context,
    times: Path,
    lookahead: Annotated[int | None, within(1, 100_000), {"show_default": f"{LOOKAHEAD}, with --predicted all"}] = None,
    algorithm: Annotated[str, one_of(*PUBLISHED, "all")] = "zipline",
    predicted: bool = False,
    predictor: Annotated[str, one_of(*PREDICTORS)] = "ema",
    max_gap: Annotated[int | None, within(0)] = None,
    output: Path | None = None,
    as_json: bool = False,
) -> None:
    """Choose the next barrier: how many iterations each worker makes until all synchronise."""
    if predicted and is_given(context, "predictor"):
        raise InputError("--predictor", "has no part in --predicted", "leave it out: the rows are predictions already")
    found = called(context, chosen)
    finish(found, lambda: barrier_section(found, times.name), output, as_json)
