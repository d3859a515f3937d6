"""``ddltool fit PROFILE...``: a throughput model from measured step times."""

from __future__ import annotations

from pathlib import Path

from ddltool.analyzers.reporting.fit_sections import goodput_section
from ddltool.commands.options import Seed
from ddltool.commands.output import finish


def fit(
    profiles: list[Path],
    holdout: Path | None = None,
    output: Path | None = None,
    seed: Seed = 0,
    as_json: bool = False,
) -> None:
    """Fit Pollux's seven-parameter throughput model and report its error."""
    from ddltool.analyzers.loading.fitted_models import fit as fit_to  # it loads scipy

    fitted = fit_to(profiles, holdout=holdout, seed=seed)
    finish(fitted, lambda: goodput_section(fitted, profiles[0].name, maps=False), output, as_json)
