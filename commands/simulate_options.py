"""The options of ``ddltool simulate``, by the panels in which its help shows them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Optional

import typer

from ddltool.commands.simulate_policies import POLICIES

_on_nodes = partial(typer.Option, rich_help_panel="Nodes that fail")
_on_jobs = partial(typer.Option, rich_help_panel="Jobs: fitted, generated, from clusters' traces")
_on_pictures = partial(typer.Option, rich_help_panel="Pictures")
_on_sweeps = partial(typer.Option, rich_help_panel="Sweeps: workloads x policies x seeds")
_on_questions = partial(typer.Option, rich_help_panel="Other questions")
_File = Optional[Path]  # noqa: UP045
_Files = Optional[list[Path]]  # noqa: UP045
_Text = Optional[str]  # noqa: UP045
_Texts = Optional[list[str]]  # noqa: UP045
_Count = Optional[int]  # noqa: UP045

Workloads = Annotated[
    _Files,
    typer.Argument(
        metavar="WORKLOAD.csv",
        help="Columns name, time, application, num_replicas, batch_size; or a Philly (JSON) or Helios (CSV) trace. "
        "Several are a sweep.",
    ),
]
Cluster = Annotated[_File, typer.Option(metavar="CLUSTER.yaml", help="Nodes and their GPUs; needed for a replay.")]
Traces = Annotated[
    _Files, typer.Option(metavar="DIR", help="Folder with one folder of measurements per application; repeatable.")
]
PolicyNames = Annotated[str, typer.Option(metavar="NAME[,NAME]", help=f"{', '.join(POLICIES)} or all.")]
Interval = Annotated[float, typer.Option(help="Seconds between scheduling rounds.")]
RestartDelay = Annotated[float, typer.Option(help="Seconds that a start or restart costs.")]
Interference = Annotated[float, typer.Option(help="Share of speed lost by jobs across nodes that share a node.")]
Power = Annotated[float, typer.Option(help="p of Pollux's fitness, -50 to 50: lower is fairer.")]
React = Annotated[
    bool, typer.Option("--react", help="Also schedule whenever a job arrives or ends, or a node goes or comes.")
]
WholeSeconds = Annotated[
    bool, typer.Option("--whole-seconds", help="End epochs at whole seconds, as the published simulator does.")
]
Price = Annotated[str, typer.Option(metavar="PRICE|TYPE=PRICE,...", help="Price of a GPU hour.")]
Metrics = Annotated[
    bool, typer.Option("--metrics", help="Also print waits, useful GPU time, losses, and figures by size class.")
]

Mtbf = Annotated[str, _on_nodes(metavar="TIME", help="Mean time between failures of one node, such as 48h.")]
Repair = Annotated[str, _on_nodes(metavar="TIME", help="How long a failed node is down.")]
CheckpointInterval = Annotated[
    str, _on_nodes(metavar="TIME", help="Training between checkpoints; a failure undoes what came after.")
]
FailureEvents = Annotated[
    _File, _on_nodes(metavar="FILE.csv", help="Node events: time,node,event (fail, leave, join).")
]
FailureSeed = Annotated[int, _on_nodes(min=0, help="Seed of the drawn failures.")]

FittedModels = Annotated[
    _Texts,
    _on_jobs(
        metavar="APP=FILE,noise=N,...",
        help="A fitted goodput.json in place of an application's traces; needs noise=, samples= and batch= (M0); also "
        "max-batch=, max-local=; repeatable.",
    ),
]
Generate = Annotated[
    _Text,
    _on_jobs(
        metavar="jobs=N,hours=H,...",
        help="Write a synthetic workload to -o; also pattern= constant, poisson or diurnal, and seed=.",
    ),
]
Sample = Annotated[str, _on_jobs(metavar="jobs=N,hours=H", help="Of a cluster's trace: N jobs of its busiest H hours.")]
Convert = Annotated[bool, _on_jobs("--convert", help="Write the trace as a workload to -o in place of replaying it.")]

Picture = Annotated[_File, _on_pictures(metavar="DIR", help="Draw completion times, allocations and one job's life.")]
PictureJob = Annotated[_Text, _on_pictures(metavar="NAME", help="Whose life: else the most restarted.")]
PictureFormat = Annotated[str, _on_pictures(help="png or svg.")]

Seeds = Annotated[_Count, _on_sweeps(min=1, max=100_000, help="Replay each with seeds 0 to N-1.")]
Jobs = Annotated[_Count, _on_sweeps(min=1, max=4096, help="Local processes.")]
Engine = Annotated[str, _on_sweeps(help="local, or ray: a Ray cluster.")]
Csv = Annotated[_File, _on_sweeps("--csv", metavar="FILE", help="One row per replay.")]
Compare = Annotated[_Text, _on_sweeps(metavar="A,B", help="Compare two policies in pairs, with intervals.")]

Advise = Annotated[_File, _on_questions(metavar="JOBSTATE.yaml", help="Is a resize of this job worth its restart?")]
Autoscale = Annotated[_Text, _on_questions(metavar="APP", help="Rent nodes for one job by goodput or by throughput.")]
Search = Annotated[
    _Text,
    _on_questions("--hyperparameter-search", metavar="APP", help="100 trials of this application under the policies."),
]
LocalBatch = Annotated[
    str,
    _on_questions(metavar="N,...", help="With --hyperparameter-search: fixed samples per GPU of the baseline."),
]
