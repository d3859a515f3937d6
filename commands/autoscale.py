"""``ddltool autoscale APP``: rent nodes for one job by goodput or by throughput."""

from __future__ import annotations

from pathlib import Path

from ddltool.analyzers.reporting.simulation_section import autoscaling_section
from ddltool.analyzers.scheduling.autoscale import autoscale as rent
from ddltool.analyzers.scheduling.inputs import read_applications
from ddltool.analyzers.scheduling.simulator import Options
from ddltool.artifacts import check_outputs
from ddltool.commands import replays
from ddltool.commands.output import finish, progress


def autoscale(
    application: replays.Application,
    traces: list[Path] | None = None,
    restart_delay: float = 30.0,
    output: Path | None = None,
    as_json: bool = False,
) -> None:
    """Rent nodes for one job in a cloud, by goodput or by throughput, and compare time and cost."""
    folders = traces or replays.shipped_traces()
    check_outputs([path for each in folders for path in each.glob("*/*.csv")], {"-o": output})
    timing = Options(restart_delay_s=restart_delay)
    with progress(f"{application} under 5 scaling rules"):
        job = read_applications(folders, [application])[application]
        found = rent(job, restart_delay_s=timing.restart_delay_s)
    finish(found, lambda: autoscaling_section(found), output, as_json)
