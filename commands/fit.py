"""``ddltool fit PROFILE...``: a throughput model from measured step times."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddltool.analyzers.reporting.fit_sections import goodput_section
from ddltool.commands.options import Json, Output, Seed
from ddltool.commands.output import finish
from ddltool.outputs import check_outputs


def fit(
    profiles: Annotated[
        list[Path],
        typer.Argument(metavar="PROFILE...", help="profile.csv, telemetry.jsonl, or an AdaptDL placements.csv."),
    ],
    holdout: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rows kept out of the fit, to measure its error on.")
    ] = None,
    output: Output = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Fit Pollux's seven-parameter throughput model and report its error."""
    check_outputs([*profiles, holdout], {"-o": output})
    from ddltool.analyzers.loading.fitted_models import fit as fit_to  # it loads scipy

    fitted = fit_to(profiles, holdout=holdout, seed=seed)
    finish(fitted, lambda: goodput_section(fitted, profiles[0].name, maps=False), output, as_json)
