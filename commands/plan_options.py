"""The options of ``ddltool plan``; help that begins with a strategy's name belongs to that strategy alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from ddltool.commands.values import number

LOOKAHEAD, MIGRATION_S, HORIZON_S, LATENCY, SHARE = 15, 30.0, 3600.0, "50us", "sum"
_File = Optional[Path]  # noqa: UP045
_Files = Optional[list[Path]]  # noqa: UP045
_Text = Optional[str]  # noqa: UP045
_Count = Optional[int]  # noqa: UP045

JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job: workers, batch size, devices.")]
Strategy = Annotated[
    str,
    typer.Option(
        help="auto: compare all and pick; est: EST mapping; bsp: equal split; lb-bsp: uneven split; elastic-bsp: "
        "barriers; goodput: count and batch."
    ),
]
Objective = Annotated[
    str, typer.Option(help="auto: fastest, cheapest (per sample) or same-bits (on any number of devices).")
]
Telemetry = Annotated[
    _File,
    typer.Option(metavar="FILE", help="auto: telemetry of an earlier run, in place of the job's capabilities."),
]
Bandwidth = Annotated[
    _Text,
    typer.Option(help="auto: network of a node, e.g. 100Gbit; nic_gbit of the cluster by default."),
]
Latency = Annotated[str, typer.Option(help="auto: network latency.")]
Lookahead = Annotated[
    int, typer.Option(help="elastic-bsp: iterations per worker up to the barrier.", min=1, max=100_000)
]
MaxGap = Annotated[
    _Count,
    typer.Option(help="elastic-bsp: most iterations that one worker may be ahead.", min=0, show_default=False),
]
GraphFile = Annotated[
    _File,
    typer.Option(
        "--graph", metavar="FILE", help="graph.json: puts the model's parameters and their order in the plan."
    ),
]
TopK = Annotated[int, typer.Option(help="How many different plans to show.", min=1, max=1000)]
TimeLimitS = Annotated[
    float,
    typer.Option(
        "--time-limit",
        help="Solver's time limit in seconds.",
        metavar="SECONDS",
        parser=number("--time-limit", 0.01),
    ),
]
Prefer = Annotated[
    _Text,
    typer.Option(
        help="est: what matters, in this order: throughput, devices, price, waste, moves.",
        metavar="NAME,...",
        show_default=False,
    ),
]
CurrentFile = Annotated[
    _File,
    typer.Option("--current", metavar="PLAN", help="est: plan.json that runs now: is leaving it worth it?"),
]
MigrationS = Annotated[
    float,
    typer.Option(
        "--migration",
        help="With --current: seconds that a move stops the job.",
        metavar="SECONDS",
        parser=number("--migration", 0, 1e9),
    ),
]
HorizonS = Annotated[
    float,
    typer.Option(
        "--horizon",
        help="With --current: seconds in which a move must pay.",
        metavar="SECONDS",
        parser=number("--horizon", 0.001, 1e9),
    ),
]
Together = Annotated[
    _Files,
    typer.Option("--with", metavar="JOB.yaml", help="est: another job on the same devices; repeat for more."),
]
Share = Annotated[str, typer.Option(help="With --with: sum or max-min of the throughputs relative to the job alone.")]
Picture = Annotated[
    _File,
    typer.Option(metavar="FILE", help="goodput: draw goodput over devices and batch (.svg or .png)."),
]
