"""``ddltool fit PROFILE...``: a throughput model from measured step times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import pandas as pd

from ddltool.analyzers.answers.reporting.fit_sections import goodput_section
from ddltool.commands.options import AS_FILES, Seed
from ddltool.commands.output import finish
from ddltool.commands.verbs import VerbCall, verb
from ddltool.goodput_model import Goodput


@verb
def fit(
    profiles: Annotated[str | Path | pd.DataFrame | Sequence[str | Path], AS_FILES],
    *,
    holdout: str | Path | None = None,
    seed: Seed = 0,
) -> Goodput:
    """Fit Pollux's seven-parameter throughput model and report its error.

    ``profiles``: profile.csv, telemetry.jsonl, an AdaptDL placements.csv, several of these, or a profile's DataFrame;
    the rows of all are fitted together, one model per device type. ``holdout``: a file of further rows, on which the
    fit's error is measured. Raises InputError for rows that cannot be read or fitted.
    """
    from ddltool.analyzers.job.goodput.fitted_models import fit_rows, read_rows  # they load scipy
    from ddltool.analyzers.job.goodput.observations import from_frame

    kept_out = None if holdout is None else Path(holdout)
    if isinstance(profiles, pd.DataFrame):
        return fit_rows(from_frame(profiles, "profile").by_device(), ["profile"], kept_out, seed)
    paths = [Path(profiles)] if isinstance(profiles, (str, Path)) else [Path(path) for path in profiles]
    return fit_rows(read_rows(paths), [str(path) for path in paths], kept_out, seed)


def show_fit(call: VerbCall[Goodput], output: Path | None = None, as_json: bool = False) -> None:
    """Print the model with its error, and save it to ``output`` if given."""
    result, first = call(), call["profiles"][0].name
    finish(result, lambda: goodput_section(result, first, maps=False), output, as_json)
