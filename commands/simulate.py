"""``ddltool simulate WORKLOAD.csv``: replay a workload on a cluster under scheduling policies."""

from __future__ import annotations

from pathlib import Path

import typer

from ddltool.analyzers.reporting.simulation_section import simulation_section
from ddltool.analyzers.scheduling.replay import study
from ddltool.commands import replays
from ddltool.commands.options import Seed
from ddltool.commands.output import finish, note, progress


def simulate(
    context: typer.Context,
    workload: Path,
    cluster: Path | None = None,
    traces: list[Path] | None = None,
    policy: replays.PolicyNames = "pollux",
    interval: float = 60.0,
    restart_delay: float = 30.0,
    interference: float = 0.0,
    power: float = -1.0,
    react: bool = False,
    whole_seconds: bool = False,
    goodput: list[str] | None = None,
    price: str = "",
    mtbf: str = "",
    repair: str = "30m",
    checkpoint_interval: str = "10m",
    failures: Path | None = None,
    failure_seed: replays.FailureSeed = 0,
    metrics: bool = False,
    seed: Seed = 0,
    output: Path | None = None,
    as_json: bool = False,
) -> None:
    """Replay a workload on a cluster under one or more scheduling policies and compare completion times."""
    setup, machines, makers = replays.read_setup(context)
    made = study(workload, machines, makers, setup, seed=seed, tell=note, stage=progress)
    finish(made, lambda: simulation_section(made, workload.name, details=metrics), output, as_json)
