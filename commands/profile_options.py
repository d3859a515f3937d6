"""The options of ``ddltool profile``: those of measuring, then those of its other modes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from ddltool.commands.values import number

WATCH, IMPORT = "With --watch", "With --import"
_Files = Optional[list[Path]]  # noqa: UP045
_Text = Optional[str]  # noqa: UP045
_Count = Optional[int]  # noqa: UP045

Source = Annotated[
    _Text,
    typer.Argument(metavar="SOURCE", help="The model to train; not needed with --network.", show_default=False),
]
BatchSizes = Annotated[
    str,
    typer.Option(
        metavar="N,N,...|auto",
        help="Local batch sizes, 1,2,4,8 by default; auto searches where throughput saturates.",
    ),
]
Replicas = Annotated[
    str,
    typer.Option(
        metavar="N,N,...", help="How many processes to measure with; 1, and all of a torchrun job, by default."
    ),
]
Accumulation = Annotated[
    str, typer.Option(metavar="N,N,...", help="Accumulation steps before the one that synchronises; 0 is none.")
]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]
DeviceName = Annotated[
    str, typer.Option(metavar="NAME", help="Name to write in the device column; cpu or cuda by default.")
]
Precision = Annotated[str, typer.Option(metavar="SHARE", help="How well to know every step time.")]
Budget = Annotated[
    str, typer.Option(metavar="TIME", help="Stop measuring after this long; 60s by default without --repeats.")
]
Repeats = Annotated[
    _Count,
    typer.Option(help="Timed steps per configuration, in place of --precision.", show_default=False),
]
Warmup = Annotated[int, typer.Option(help="Untimed steps before them.")]
Threads = Annotated[int, typer.Option(help="Threads of each process; 0 shares the cores.", min=0, max=4096)]
Memory = Annotated[
    str,
    typer.Option(metavar="SIZE|all", help="Search the largest batch that fits, by trying; all is a whole GPU."),
]
MemoryGib = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(
        metavar="GIB", help="The same as --memory, in GiB.", parser=number("--memory-gib"), show_default=False
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Keep the rows of -o FILE; measure what is missing.")]
Network = Annotated[
    bool,
    typer.Option("--network", help="Measure latency and bandwidth between --replicas processes (or torchrun's)."),
]
Watch = Annotated[
    _Count,
    typer.Option(
        metavar="N",
        help="Record speed, CPU and memory of every process for N iterations, for balance.",
        min=1,
        show_default=False,
    ),
]
Cores = Annotated[
    str, typer.Option(metavar="N,N,...", help="The core that each process stays on.", rich_help_panel=WATCH)
]
Imports = Annotated[
    _Files,
    typer.Option(
        "--import", metavar="FILE", help="AdaptDL table, profiler trace, telemetry or profile.csv; may be repeated."
    ),
]
Nodes = Annotated[
    _Count,
    typer.Option(
        help="Nodes of a profiler trace that does not say.", min=1, show_default=False, rich_help_panel=IMPORT
    ),
]
