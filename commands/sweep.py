"""``ddltool sweep WORKLOAD.csv ...``: workloads x policies x seeds, and two policies compared in pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddltool.analyzers.reporting.sweep_section import sweep_section
from ddltool.analyzers.scheduling import sweep as sweeps
from ddltool.commands import replays
from ddltool.commands.options import Json, Output, one_of
from ddltool.commands.output import note, print_json, progress, show
from ddltool.commands.values import as_options
from ddltool.errors import CheckFailed, InputError


@as_options(replays.OPTIONS)
def sweep(
    context: typer.Context,
    workloads: Annotated[
        list[Path],
        typer.Argument(metavar="WORKLOAD.csv...", help="Columns name, time, application, num_replicas, batch_size."),
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
    seeds: Annotated[int, typer.Option(min=1, max=100_000, help="Replay each with seeds 0 to N-1.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, max=4096, help="Local processes.")] = 1,
    engine: Annotated[str, typer.Option(**one_of("local", "ray", help="ray: a Ray cluster."))] = "local",
    compare: Annotated[str, typer.Option(metavar="A,B", help="Compare two policies in pairs, with intervals.")] = "",
    csv: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="One row per replay.")] = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Replay several workloads, or one with several seeds, and compare policies by means and intervals."""
    setup, _, policies = replays.read_setup(context)
    pair = [name.strip() for name in compare.split(",")] if compare else []
    if pair and (len(pair) != 2 or not set(pair) <= set(policies)):
        raise InputError("--compare", f"is {compare!r}", f"two policies of those replayed: {', '.join(policies)}")
    with progress("replays", total=len(workloads) * len(policies) * seeds) as advance:
        found = sweeps.sweep(
            workloads,
            setup,
            list(policies),
            range(seeds),
            jobs=jobs,
            engine=engine,
            output=output,
            table=csv,
            tell=note,
            advance=advance,
        )
    if pair:
        found = found.model_copy(update={"comparison": sweeps.compare(found.cells, *pair)})
    if as_json:
        print_json(found)
    else:
        show(sweep_section(found, ", ".join(path.name for path in workloads)))
    if failed := [cell for cell in found.cells if cell.error]:
        raise CheckFailed(f"{len(failed)} of {found.cells_wanted} replays failed; the first: {failed[0].error}")
