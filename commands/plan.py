"""``ddltool plan JOB.yaml``: where each logical worker runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Optional, cast, get_args

import typer

from ddltool.analyzers.goodput.tuning import BatchLimits
from ddltool.analyzers.reporting.plan_section import joint_section, plan_section
from ddltool.artifacts import check_writable, save, write_bytes
from ddltool.commands.options import DevicesFile, Json, Output, Seed
from ddltool.commands.output import note, print_json, show
from ddltool.commands.parts import demand_part
from ddltool.commands.values import demand_picture, number
from ddltool.decision import Objective
from ddltool.errors import InputError, did_you_mean
from ddltool.graph import Graph
from ddltool.job import Job
from ddltool.outputs import demand_distinct
from ddltool.plan import Plan

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
ObjectiveName = Annotated[
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

STRATEGIES = ("auto", "est", "bsp", "lb-bsp", "elastic-bsp", "goodput")
# The strategies that read an option; those of EST plans alone are in _check_est.
READERS = {
    "--objective": ("auto",),
    "--telemetry": ("auto",),
    "--bandwidth": ("auto",),
    "--latency": ("auto",),
    "--lookahead": ("elastic-bsp", "auto"),
    "--max-gap": ("elastic-bsp", "auto"),
    "--top-k": ("est", "auto"),
}
# What the plan of several jobs reads.
_TOGETHER = {"job_file", "strategy", "together", "share", "devices_file", "time_limit_s", "output", "seed", "as_json"}


def plan(
    context: typer.Context,
    job_file: JobFile,
    strategy: Strategy = "auto",
    objective: ObjectiveName = "fastest",
    telemetry: Telemetry = None,
    bandwidth: Bandwidth = None,
    latency: Latency = LATENCY,
    lookahead: Lookahead = LOOKAHEAD,
    max_gap: MaxGap = None,
    graph_file: GraphFile = None,
    top_k: TopK = 1,
    time_limit_s: TimeLimitS = 10.0,
    prefer: Prefer = None,
    current_file: CurrentFile = None,
    migration_s: MigrationS = MIGRATION_S,
    horizon_s: HorizonS = HORIZON_S,
    together: Together = None,
    share: Share = SHARE,
    picture: Picture = None,
    devices_file: DevicesFile = None,
    output: Output = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Compare the ways to run a job on its devices, or plan by one, and predict the step time."""
    _demand_known("--strategy", strategy, STRATEGIES)
    _demand_known("--objective", objective, get_args(Objective))
    written = {"-o": output, "--picture": picture}
    demand_distinct([job_file, telemetry, graph_file, current_file, devices_file, *(together or [])], written)
    _check_places(output, picture)
    _demand_readers(
        strategy,
        {
            "--objective": objective != "fastest",
            "--telemetry": telemetry is not None,
            "--bandwidth": bool(bandwidth),
            "--latency": latency != LATENCY,
            "--lookahead": lookahead != LOOKAHEAD,
            "--max-gap": max_gap is not None,
            "--top-k": top_k != 1,
        },
    )
    moves = {"--migration": migration_s != MIGRATION_S, "--horizon": horizon_s != HORIZON_S}
    _check_est(strategy, wished=bool(prefer is not None or current_file or together), current=current_file, moves=moves)
    if share != SHARE and not together:
        raise InputError("--share", "needs --with", "name the jobs that share the devices")
    if together:
        demand_part(context, "a plan of several jobs", _TOGETHER, instead="leave it out, or leave out --with")
        _plan_jobs([job_file, *together], share, devices_file, time_limit_s, seed, output, as_json)
        return
    from ddltool.analyzers.deciding.candidates import Settings
    from ddltool.analyzers.deciding.planning import Wishes, complete, solve
    from ddltool.analyzers.loading.job_inputs import Given

    job, graph = _read(job_file, graph_file, devices_file, written)
    known = Given(
        objective=cast("Objective", objective),
        graph=graph,
        telemetry=telemetry,
        bandwidth=bandwidth,
        latency=latency,
        settings=Settings(top_k=top_k, limit_s=time_limit_s, seed=seed, lookahead=lookahead, max_gap=max_gap),
        tell=note,
    )
    wishes = Wishes(prefer=prefer, current_file=current_file, migration_s=migration_s, horizon_s=horizon_s)
    made = complete(solve(strategy, job, job_file, known, wishes), job, job_file, graph)
    if output is not None:
        save(made, output)
    if picture is not None:
        _draw_goodput(job, job_file, made, picture)
    if as_json:
        print_json(made)
    else:
        show(plan_section(made, made.job), output)


def _demand_known(option: str, name: str, known: tuple[str, ...]) -> None:
    """Raise InputError, naming the nearest, when a name is none of those that are known."""
    if name not in known:
        raise InputError(option, f"unknown {option.removeprefix('--')} {name!r}", did_you_mean(name, known))


def _check_places(output: Path | None, picture: Path | None) -> None:
    """Raise InputError for a file that cannot be written, before anything is solved."""
    for path in (output, picture):
        if path is not None:
            check_writable(path)
    demand_picture(picture, "fit", (".svg", ".png"))


def _demand_readers(strategy: str, changed: Mapping[str, bool]) -> None:
    """Raise InputError for the first option with another value than its default that the strategy does not read."""
    for name, is_changed in changed.items():
        if is_changed and strategy not in READERS[name]:
            remedy = f"leave it out, or use --strategy {' or '.join(READERS[name])}"
            raise InputError(name, f"has no part in --strategy {strategy}", remedy)


def _check_est(strategy: str, *, wished: bool, current: Path | None, moves: Mapping[str, bool]) -> None:
    """Raise InputError for the EST plan's own options with another strategy, and for prices of moves without --current."""
    priced = [name for name, is_given in moves.items() if is_given]
    if priced and current is None:
        raise InputError(priced[0], "needs --current", "give the plan that runs now")
    if wished and strategy != "est":
        raise InputError("--strategy", f"is {strategy}", "--prefer, --current and --with need --strategy est")


def _read(
    job_file: Path, graph_file: Path | None, devices_file: Path | None, written: Mapping[str, Path | None]
) -> tuple[Job, Graph | None]:
    """Return the job, with what its model's ops say about D2, and the graph whose parameters the plan lists.

    Raises InputError for files that cannot be read, and for outputs that would replace what the job names.
    """
    from ddltool.analyzers.loading.job_inputs import graph_of, read_with_specs, scanned

    job = read_with_specs(job_file, devices_file)
    named = [offer_file for offer in job.devices for offer_file in (offer.profile, offer.goodput)]
    demand_distinct([job_file.parent / name for name in (*named, job.cluster, job.network) if name], written)
    graph = graph_of(job, job_file.parent, graph_file)
    return scanned(job, graph, note), graph


def _plan_jobs(
    files: list[Path],
    share: str,
    devices_file: Path | None,
    limit_s: float,
    seed: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Plan several jobs on the same devices. Raises InputError for an output, which holds one plan."""
    if output is not None:
        raise InputError("--output", "holds the plan of one job", "use --json for several")
    from ddltool.analyzers.deciding.planning import plan_together

    found = plan_together(files, sharing=share, limit_s=limit_s, seed=seed, tell=note, devices_file=devices_file)
    if as_json:
        print_json(found)
    else:
        show(joint_section(found))


def _draw_goodput(job: Job, job_file: Path, made: Plan, path: Path) -> None:
    """Draw goodput over devices and batch for the plan's device type. Raises InputError for a plan without goodput."""
    from ddltool.analyzers.goodput.picture import goodput_picture
    from ddltool.analyzers.loading.job_inputs import fitted_models

    if made.goodput is None or job.goodput is None:
        raise InputError("--picture", f"shows goodput, and the plan is {made.strategy}", "use --strategy goodput")
    device, section = made.goodput.device_type, job.goodput
    initial = section.initial_batch_size or job.max_workers * job.batch_size
    drawn = goodput_picture(
        fitted_models(job, job_file)[device],
        max(offer.count for offer in job.devices if offer.type == device),
        BatchLimits(
            initial_batch_size=initial,
            max_batch_size=section.max_batch_size,
            max_local_batch_size=section.max_local_batch_size,
        ),
        noise_scale=math.inf if section.noise_scale is None else section.noise_scale,
        replicas_per_node=section.devices_per_node,
        file_format=path.suffix.lower().removeprefix("."),
    )
    write_bytes(path, drawn)
