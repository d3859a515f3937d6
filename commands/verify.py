"""``ddltool verify PLAN TELEMETRY``: predicted against measured, and what to fit again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from ddltool.analyzers.answers.reporting.result_sections import verification_section
from ddltool.analyzers.job.diagnosing.ledger import ledger
from ddltool.analyzers.job.diagnosing.verification import verify as compare
from ddltool.analyzers.job.goodput.throughput import ThroughputParams
from ddltool.analyzers.step.measured.feedback import read_run
from ddltool.artifacts import load
from ddltool.commands.options import percent
from ddltool.commands.output import finish
from ddltool.commands.verbs import VerbCall, verb
from ddltool.goodput_model import Goodput
from ddltool.plans import Plan
from ddltool.results import Verification
from ddltool.stages import Tell, log_remark
from ddltool.tables import read_table


@verb
def verify(
    plan: Path | Plan,
    telemetry: Path | pd.DataFrame,
    *,
    goodput: Path | Goodput | None = None,
    max_error: Annotated[float | None, percent] = None,
    tell: Tell = log_remark,
) -> Verification:
    """Compare a run with its plan, part by part; say what to fit again, where its time went, and what to do.

    ``plan``: a Plan or its file. ``telemetry``: the hook's file, or its rows. ``goodput``: a fit, or its file, of the
    devices that the job ran on, if they are not the plan's. ``max_error``: the largest relative error of the step time.

    The result's ``passed`` is False if the error was larger, or the run did not follow the plan. Raises InputError for a
    file that is wrong or unreadable, and for a run without a step.
    """
    followed = plan if isinstance(plan, Plan) else load(plan, Plan)
    models, model_error = _models(goodput)
    where = "telemetry" if isinstance(telemetry, pd.DataFrame) else str(telemetry)
    table = telemetry if isinstance(telemetry, pd.DataFrame) else read_table(telemetry)
    names = "plan" if isinstance(plan, Plan) else str(plan), where
    run = read_run(table, where, tell)
    found = compare(followed, run, models, model_error=model_error, max_error=max_error, names=names)
    return found.model_copy(update={"ledger": ledger(table, where)})


def show_verify(call: VerbCall[Verification], output: Path | None = None, as_json: bool = False) -> None:
    """Print the comparison of the run with its plan; exit with code 1 if it has not passed."""
    found = call()
    finish(found, lambda: verification_section(found, found.job), output, as_json)
    if not found.passed:
        raise typer.Exit(1)


def _models(given: Path | Goodput | None) -> tuple[dict[str, ThroughputParams] | None, float | None]:
    """Return (parameters by device type, relative error of the fit); (None, None) without a fit.

    ``given``: a fit, or its file. The parameters of a fit of one type, which does not name it, are under "", for any type;
    of several types the error is the largest.
    """
    if given is None:
        return None, None
    fitted = given if isinstance(given, Goodput) else load(given, Goodput)
    if fitted.devices:
        models = {name: device.params for name, device in fitted.devices.items()}
        return models, max(device.mape for device in fitted.devices.values())
    return {"": fitted.params}, fitted.mape
