"""``ddltool verify PLAN TELEMETRY``: predicted against measured, and what to fit again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from ddltool.analyzers.deciding.feedback import read_run
from ddltool.analyzers.deciding.verification import verify as compare
from ddltool.analyzers.goodput.throughput import ThroughputParams
from ddltool.analyzers.reporting.result_sections import verification_section
from ddltool.artifacts import load
from ddltool.commands.options import Json, Output
from ddltool.commands.output import finish, note
from ddltool.errors import InputError
from ddltool.goodput_model import Goodput
from ddltool.outputs import check_outputs
from ddltool.plans import Plan
from ddltool.tables import read_table
from ddltool.units import parse_share


def verify(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json that the run followed.")],
    telemetry: Annotated[Path, typer.Argument(metavar="TELEMETRY", help="telemetry.jsonl that the hook wrote.")],
    goodput: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="goodput.json of the devices that the job really ran on, when they are not the plan's."
        ),
    ] = None,
    max_error: Annotated[
        str | None, typer.Option(metavar="PERCENT", help="Exit 1 when the step time is off by more, e.g. 15%.")
    ] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Compare a run with its plan: step time, compute by process, synchronisation; say what to fit again."""
    check_outputs([plan_file, telemetry, goodput], {"-o": output})
    limit = None if max_error is None else percent(max_error, "--max-error")
    made = load(plan_file, Plan)
    models, model_error = _models(goodput)
    run = read_run(read_table(telemetry), str(telemetry), note)
    names = str(plan_file), str(telemetry)
    found = compare(made, run, models, model_error=model_error, max_error=limit, names=names)
    finish(found, lambda: verification_section(found, made.job), output, as_json)
    if not found.passed:
        raise typer.Exit(1)


def percent(text: str, where: str) -> float:
    """Return ``15%`` or ``0.15`` as 0.15.

    Raises InputError for anything else, negative or not finite, and for a bare number above 1: who writes 15 means 15%.
    """
    value = parse_share(text)
    if not (math.isfinite(value) and value >= 0):
        raise InputError(where, f"{text!r} is no share", "write for example 15% or 0.15")
    if value > 1 and not text.strip().endswith("%"):
        raise InputError(where, f"{text!r} would be {100 * value:g}%", f"write {value:g}% or {value / 100:g}")
    return value


def _models(path: Path | None) -> tuple[dict[str, ThroughputParams] | None, float | None]:
    """Return the fitted models of a file by device type ("" for all others), and the error of the fit."""
    if path is None:
        return None, None
    fitted = load(path, Goodput)
    if fitted.devices:
        models = {name: found.params for name, found in fitted.devices.items()}
        return models, max(found.mape for found in fitted.devices.values())
    return {"": fitted.params}, fitted.mape
