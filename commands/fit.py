"""``ddltool fit PROFILE...``: a throughput model from measured step times."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddltool.analyzers.goodput.observations import Observations
from ddltool.analyzers.reporting.fit_sections import fit_figures, goodput_section
from ddltool.commands.options import Json, Output, Seed
from ddltool.commands.output import finish
from ddltool.commands.values import demand_picture, write_picture
from ddltool.goodput_model import Goodput
from ddltool.outputs import check_outputs


def fit(
    profiles: Annotated[
        list[Path],
        typer.Argument(metavar="PROFILE...", help="profile.csv, telemetry.jsonl, or an AdaptDL placements.csv."),
    ],
    holdout: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rows kept out of the fit, to measure its error on.")
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the fitted curves over the measured points (.svg or .png)."),
    ] = None,
    output: Output = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Fit Pollux's seven-parameter throughput model and report its error."""
    check_outputs([*profiles, holdout], {"-o": output, "--picture": picture})
    demand_picture(picture, "fit")
    from ddltool.analyzers.loading.fitted_models import fit as fit_to  # it loads scipy
    from ddltool.analyzers.loading.fitted_models import read_rows

    fitted = fit_to(profiles, holdout=holdout, seed=seed)
    if picture is not None:
        draw_fit(read_rows(profiles), fitted, picture)
    finish(fitted, lambda: goodput_section(fitted, profiles[0].name, maps=False), output, as_json)


def draw_fit(devices: dict[str, Observations], fitted: Goodput, path: Path) -> None:
    """Write the picture of the fit."""
    params = {name: fitted.params_of(name) for name in devices}
    write_picture(path, fit_figures(devices, params))
