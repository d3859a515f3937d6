"""``ddltool profile --network``: latency and bandwidth between the processes of this torchrun job, or between local ones."""

from __future__ import annotations

import os
from pathlib import Path

from ddltool.analyzers.reporting.result_sections import network_section
from ddltool.artifacts import save
from ddltool.commands.output import print_json, progress, show
from ddltool.runtime.measuring.network import measure_network


def profile_network(processes: int, output: Path | None, as_json: bool) -> None:
    """Measure and print; rank 0 speaks for all."""
    with progress("measuring the network") as advance:
        found = measure_network(processes, progress=lambda done, total: advance(done, f"pair {done} of {total}"))
    if int(os.environ.get("RANK", "0")) != 0:
        return
    if output is not None:
        save(found, output)
    if as_json:
        print_json(found)
        return
    together = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE", "-")
    show(network_section(found.model_copy(update={"local": found.local or together}), "this job"), output)
