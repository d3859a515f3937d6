"""``ddltool sweep WORKLOAD.csv ...``: workloads x policies x seeds, and two policies compared in pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddltool.analyzers.reporting.simulation_section import sweep_section
from ddltool.analyzers.scheduling import sweep as sweeps
from ddltool.commands import replays
from ddltool.commands.options import one_of, within
from ddltool.commands.output import note, print_json, progress, show
from ddltool.errors import CheckFailed, InputError


def sweep(
    context: typer.Context,
    workloads: list[Path],
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
    seeds: Annotated[int, within(1, 100_000)] = 1,
    jobs: Annotated[int, within(1, 4096)] = 1,
    engine: Annotated[str, one_of("local", "ray")] = "local",
    compare: str = "",
    csv: Path | None = None,
    output: Path | None = None,
    as_json: bool = False,
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
