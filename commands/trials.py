"""``ddltool trials APP``: a search of hyper-parameters as a workload of 100 trials."""

from __future__ import annotations

from pathlib import Path

import typer

from ddltool.analyzers.reporting.simulation_section import search_section
from ddltool.analyzers.scheduling.inputs import read_applications, read_cluster
from ddltool.analyzers.scheduling.replay import search_trials
from ddltool.analyzers.scheduling.simulator import Options
from ddltool.artifacts import check_outputs
from ddltool.commands import replays
from ddltool.commands.options import Seed, integers
from ddltool.commands.output import finish, progress
from ddltool.simulation_results import TrialSearch


def trials(
    context: typer.Context,
    application: replays.Application,
    cluster: Path | None = None,
    traces: list[Path] | None = None,
    policy: replays.PolicyNames = "pollux",
    local_batch: str = "128",
    interval: float = 60.0,
    restart_delay: float = 30.0,
    power: float = -1.0,
    seed: Seed = 0,
    output: Path | None = None,
    as_json: bool = False,
) -> None:
    """Replay a search of hyper-parameters, 100 trials of one application, under scheduling policies."""
    nodes, folders = replays.shipped_or(cluster, traces)
    check_outputs([nodes, *(path for each in folders for path in each.glob("*/*.csv"))], {"-o": output})
    machines = read_cluster(nodes)
    makers = replays.read_policies(context.params, machines)
    first, *others = integers(local_batch, "--local-batch", ordered=False)  # the first is the baseline
    asked = TrialSearch(application=application, local_batch_size=first)
    timing = Options(interval_s=interval, restart_delay_s=restart_delay)
    measured = read_applications(folders, [application])
    found = search_trials(asked, measured, machines, makers, timing, local_batch_sizes=others, stage=progress)
    finish(found, lambda: search_section(found), output, as_json)
