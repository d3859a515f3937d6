"""``ddltool advise JOBSTATE.yaml``: is a resize of this job worth its restart?"""

from __future__ import annotations

from pathlib import Path

from ddltool.analyzers.reporting.simulation_section import advice_section
from ddltool.analyzers.scheduling.advise import advise_job
from ddltool.commands.output import finish


def advise(
    state: Path,
    output: Path | None = None,
    as_json: bool = False,
) -> None:
    """Say whether a resize of a running job is worth its restart, by every number of free GPUs."""
    advice = advise_job(state)
    finish(advice, lambda: advice_section(advice), output, as_json)
