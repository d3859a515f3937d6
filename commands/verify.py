"""``ddltool verify PLAN TELEMETRY``: predicted against measured, and what to fit again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddltool.analyzers.answers.reporting.result_sections import verification_section
from ddltool.analyzers.job.diagnosing.ledger import ledger
from ddltool.analyzers.job.diagnosing.verification import verify as compare
from ddltool.analyzers.job.goodput.throughput import ThroughputParams
from ddltool.analyzers.step.measured.feedback import read_run
from ddltool.artifacts import load
from ddltool.commands.options import percent
from ddltool.commands.output import finish, note
from ddltool.goodput_model import Goodput
from ddltool.plans import Plan
from ddltool.tables import read_table


def verify(
    plan_file: Path,
    telemetry: Path,
    goodput: Path | None = None,
    max_error: Annotated[float | None, percent] = None,
    output: Path | None = None,
    as_json: bool = False,
) -> None:
    """Compare a run with its plan, part by part; say what to fit again, where its time went, and what to do."""
    plan = load(plan_file, Plan)
    models, model_error = _models(goodput)
    table = read_table(telemetry)
    run = read_run(table, str(telemetry), note)
    names = str(plan_file), str(telemetry)
    verification = compare(plan, run, models, model_error=model_error, max_error=max_error, names=names)
    verification = verification.model_copy(update={"ledger": ledger(table, str(telemetry))})
    finish(verification, lambda: verification_section(verification, plan.job), output, as_json)
    if not verification.passed:
        raise typer.Exit(1)


def _models(path: Path | None) -> tuple[dict[str, ThroughputParams] | None, float | None]:
    """Return the fitted models of a file by device type ("" for all others), and the error of the fit."""
    if path is None:
        return None, None
    fitted = load(path, Goodput)
    if fitted.devices:
        models = {name: device.params for name, device in fitted.devices.items()}
        return models, max(device.mape for device in fitted.devices.values())
    return {"": fitted.params}, fitted.mape
