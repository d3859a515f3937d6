"""``ddltool network``: latency and bandwidth between processes of this machine, or of a torchrun job."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ddltool.analyzers.reporting.result_sections import network_section
from ddltool.commands.options import Json, Output
from ddltool.commands.output import finish, progress, rank_0_speaks
from ddltool.commands.values import as_options
from ddltool.outputs import check_outputs
from ddltool.runtime.measuring.campaign import MOST_REPLICAS
from ddltool.runtime.measuring.network import measure_network


@as_options({"replicas": "--replicas"})
def network(
    replicas: Annotated[
        int, typer.Option(min=2, max=MOST_REPLICAS, help="Local processes; a torchrun job has its own number.")
    ] = 2,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Measure latency and bandwidth between processes here, or between those of a torchrun job."""
    with rank_0_speaks():
        check_outputs([], {"-o": output})
        with progress("measuring the network") as advance:
            found = measure_network(replicas, progress=lambda done, total: advance(done, f"pair {done} of {total}"))
        if os.environ.get("RANK", "0") != "0":
            return
        together = os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE", "-")
        told = found.model_copy(update={"local": found.local or together})
        finish(found, lambda: network_section(told, "this job"), output, as_json)
