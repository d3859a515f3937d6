"""``ddltool autoscale APP``: rent nodes for one job by goodput or by throughput."""

from __future__ import annotations

from ddltool.analyzers.reporting.sweep_section import autoscaling_section
from ddltool.analyzers.scheduling.autoscale import autoscale as rent
from ddltool.analyzers.scheduling.inputs import read_applications
from ddltool.analyzers.scheduling.simulator import Options
from ddltool.commands import replays
from ddltool.commands.options import Json, Output
from ddltool.commands.output import finish, progress
from ddltool.commands.values import as_options
from ddltool.outputs import check_outputs


@as_options(replays.OPTIONS)
def autoscale(
    application: replays.Application,
    traces: replays.Traces = None,
    restart_delay: replays.RestartDelay = 30.0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Rent nodes for one job in a cloud, by goodput or by throughput, and compare time and cost."""
    folders = traces or replays.shipped_traces()
    check_outputs([path for each in folders for path in each.glob("*/*.csv")], {"-o": output})
    timing = Options(restart_delay_s=restart_delay)
    with progress(f"{application} under 5 scaling rules"):
        job = read_applications(folders, [application])[application]
        found = rent(job, restart_delay_s=timing.restart_delay_s)
    finish(found, lambda: autoscaling_section(found), output, as_json)
