"""``ddltool advise JOBSTATE.yaml``: is a resize of this job worth its restart?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddltool.analyzers.reporting.sweep_section import advice_section
from ddltool.analyzers.scheduling.advise import advise_job
from ddltool.commands.options import Json, Output
from ddltool.commands.output import finish
from ddltool.outputs import check_outputs


def advise(
    state: Annotated[
        Path, typer.Argument(metavar="JOBSTATE.yaml", help="What the job is and holds, and what is free.")
    ],
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Say whether a resize of a running job is worth its restart, by every number of free GPUs."""
    check_outputs([state], {"-o": output})
    advice = advise_job(state)
    finish(advice, lambda: advice_section(advice), output, as_json)
