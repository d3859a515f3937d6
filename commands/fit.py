"""``ddltool fit PROFILE...``: a throughput model from measured step times."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from ddltool.commands.options import Json, Output, Seed

if TYPE_CHECKING:
    from ddltool.goodput_model import Goodput


def fit(
    profiles: Annotated[
        list[Path],
        typer.Argument(metavar="PROFILE...", help="profile.csv, telemetry.jsonl, or an AdaptDL placements.csv."),
    ],
    holdout: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="Rows kept out of the fit, to measure its error on."),
    ] = None,
    output: Output = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Fit Pollux's seven-parameter throughput model and report its error."""
    from ddltool.artifacts import check_writable, save
    from ddltool.commands.output import print_json

    if output is not None:
        check_writable(output)
    fitted = fit_files(profiles, holdout, seed)
    if output is not None:
        save(fitted, output)
    if as_json:
        print_json(fitted.model_dump(mode="json"))
    else:
        show_fit(fitted, output)


def fit_files(profiles: list[Path], holdout: Path | None, seed: int) -> Goodput:
    """Return the model fitted to the rows of all files together."""
    from ddltool.analyzers.goodput.fit import evaluate
    from ddltool.analyzers.goodput.fit import fit as fit_observations
    from ddltool.analyzers.goodput.observations import concatenate, from_frame
    from ddltool.goodput_model import FitError, Goodput, ThroughputRecord
    from ddltool.profile import read_table

    observations = concatenate([from_frame(read_table(path), str(path)) for path in profiles])
    kept_out = from_frame(read_table(holdout), str(holdout)) if holdout is not None else None
    result = fit_observations(observations, seed=seed)
    error = evaluate(result.params, kept_out) if kept_out is not None else None
    return Goodput(
        sources=[str(path) for path in profiles],
        params=ThroughputRecord(**result.params.as_dict()),
        rmsle=result.rmsle,
        mape=result.mape,
        samples=result.samples,
        fit_seconds=result.fit_seconds,
        undetermined=list(result.undetermined),
        holdout=FitError(rmsle=error.rmsle, mape=error.mape, samples=error.samples) if error is not None else None,
    )


def show_fit(fitted: Goodput, output: Path | None) -> None:
    """Print the parameters and the errors."""
    from ddltool.commands.output import out, table
    from ddltool.units import show_seconds

    rows = []
    for name, value in fitted.params.model_dump().items():
        shown = f"{value:.3g}" if name == "gamma" else show_seconds(value)
        rows.append((name, shown, "prior: not in the data" if name in fitted.undetermined else "fitted"))
    console = out()
    console.print(table(f"Throughput model from {fitted.samples} rows (fitted)", ("parameter", "value", ""), rows))
    console.print(f"error on the fitted rows   MAPE {fitted.mape:.1%}, RMSLE {fitted.rmsle:.4f}")
    if fitted.holdout is not None:
        error = fitted.holdout
        console.print(
            f"error on the holdout rows  MAPE {error.mape:.1%}, RMSLE {error.rmsle:.4f} ({error.samples} rows)"
        )
    console.print(f"fitted in {fitted.fit_seconds:.2f} s")
    if output is not None:
        console.print(f"wrote {output}", soft_wrap=True)
