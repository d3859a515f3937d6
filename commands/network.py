"""``ddltool network``: latency and bandwidth between processes of this machine, or of a torchrun job."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from ddltool.analyzers.answers.reporting.result_sections import network_section
from ddltool.commands.options import is_follower, within
from ddltool.commands.output import finish, progress
from ddltool.runtime.measuring.campaign import MOST_REPLICAS
from ddltool.runtime.measuring.network import measure_network


def network(
    replicas: Annotated[int, within(2, MOST_REPLICAS)] = 2,
    output: Path | None = None,
    as_json: bool = False,
) -> None:
    """Measure latency and bandwidth between processes here, or between those of a torchrun job.

    ``replicas``: number of processes to start; ignored in a torchrun job, of which only rank 0 prints.
    """
    with progress("measuring the network") as advance:
        result = measure_network(replicas, progress=lambda done, total: advance(done, f"pair {done} of {total}"))
    if is_follower():
        return
    # torchrun counts the processes of this machine, and all: equal numbers mean that no network was between them.
    on_one_machine = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE", "-")
    shown = result.model_copy(update={"local": result.local or on_one_machine})
    finish(result, lambda: network_section(shown, "this job"), output, as_json)
