"""``ddltool simulate WORKLOAD.csv``: replay a workload on a cluster under scheduling policies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddltool.analyzers.reporting.simulation_section import simulation_section
from ddltool.analyzers.scheduling.replay import study
from ddltool.commands import replays
from ddltool.commands.options import Json, Output, Seed
from ddltool.commands.output import finish, note, progress
from ddltool.commands.values import as_options


@as_options(replays.OPTIONS)
def simulate(
    context: typer.Context,
    workload: Annotated[
        Path,
        typer.Argument(
            metavar="WORKLOAD.csv",
            help="Columns name, time, application, num_replicas, batch_size; or the trace of a cluster "
            "(Philly, Helios, Acme, Alibaba).",
        ),
    ],
    cluster: replays.ClusterFile = None,
    traces: replays.Traces = None,
    policy: replays.PolicyNames = "pollux",
    interval: replays.Interval = 60.0,
    restart_delay: replays.RestartDelay = 30.0,
    interference: replays.Interference = 0.0,
    power: replays.Power = -1.0,
    react: replays.React = False,
    whole_seconds: replays.WholeSeconds = False,
    goodput: replays.FittedModels = None,
    price: replays.Price = "",
    mtbf: replays.Mtbf = "",
    repair: replays.Repair = "30m",
    checkpoint_interval: replays.CheckpointInterval = "10m",
    failures: replays.NodeEvents = None,
    failure_seed: replays.FailureSeed = 0,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Also print waits, use and losses, size classes, load over time and jobs.")
    ] = False,
    seed: Seed = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Replay a workload on a cluster under one or more scheduling policies and compare completion times."""
    setup, machines, makers = replays.read_setup(context)
    made = study(workload, machines, makers, setup, seed=seed, tell=note, stage=progress)
    finish(made, lambda: simulation_section(made, workload.name, details=metrics), output, as_json)
