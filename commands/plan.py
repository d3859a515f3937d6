"""``ddltool plan JOB.yaml``: where each logical worker runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer

from ddltool.commands import plan_options as given
from ddltool.commands.options import DevicesFile, Json, Output, Seed
from ddltool.commands.parts import demand_part

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddltool.decision import Objective
    from ddltool.graph import Graph
    from ddltool.job import Job
    from ddltool.plan import Plan

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
    job_file: given.JobFile,
    strategy: given.Strategy = "auto",
    objective: given.Objective = "fastest",
    telemetry: given.Telemetry = None,
    bandwidth: given.Bandwidth = None,
    latency: given.Latency = given.LATENCY,
    lookahead: given.Lookahead = given.LOOKAHEAD,
    max_gap: given.MaxGap = None,
    graph_file: given.GraphFile = None,
    top_k: given.TopK = 1,
    time_limit_s: given.TimeLimitS = 10.0,
    prefer: given.Prefer = None,
    current_file: given.CurrentFile = None,
    migration_s: given.MigrationS = given.MIGRATION_S,
    horizon_s: given.HorizonS = given.HORIZON_S,
    together: given.Together = None,
    share: given.Share = given.SHARE,
    picture: given.Picture = None,
    devices_file: DevicesFile = None,
    output: Output = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Compare the ways to run a job on its devices, or plan by one, and predict the step time."""
    from ddltool.analyzers.deciding.candidates import Settings
    from ddltool.artifacts import save
    from ddltool.commands.decide import OBJECTIVES, Given
    from ddltool.commands.output import print_json
    from ddltool.commands.placement import Wishes
    from ddltool.commands.plan_output import show_plan
    from ddltool.commands.plan_solve import complete, solve
    from ddltool.errors import InputError
    from ddltool.outputs import demand_distinct

    _demand_known("--strategy", strategy, STRATEGIES)
    _demand_known("--objective", objective, OBJECTIVES)
    written = {"-o": output, "--picture": picture}
    demand_distinct([job_file, telemetry, graph_file, current_file, devices_file, *(together or [])], written)
    _check_places(output, picture)
    _demand_readers(
        strategy,
        {
            "--objective": objective != "fastest",
            "--telemetry": telemetry is not None,
            "--bandwidth": bool(bandwidth),
            "--latency": latency != given.LATENCY,
            "--lookahead": lookahead != given.LOOKAHEAD,
            "--max-gap": max_gap is not None,
            "--top-k": top_k != 1,
        },
    )
    moves = {"--migration": migration_s != given.MIGRATION_S, "--horizon": horizon_s != given.HORIZON_S}
    _check_est(strategy, wished=bool(prefer is not None or current_file or together), current=current_file, moves=moves)
    if share != given.SHARE and not together:
        raise InputError("--share", "needs --with", "name the jobs that share the devices")
    if together:
        demand_part(context, "a plan of several jobs", _TOGETHER, instead="leave it out, or leave out --with")
        _plan_jobs([job_file, *together], share, devices_file, time_limit_s, seed, output, as_json)
        return
    job, graph = _read(job_file, graph_file, devices_file, written)
    known = Given(
        objective=cast("Objective", objective),
        graph=graph,
        telemetry=telemetry,
        bandwidth=bandwidth,
        latency=latency,
        settings=Settings(top_k=top_k, limit_s=time_limit_s, seed=seed, lookahead=lookahead, max_gap=max_gap),
    )
    wishes = Wishes(prefer=prefer, current_file=current_file, migration_s=migration_s, horizon_s=horizon_s)
    made = complete(solve(strategy, job, job_file, known, wishes), job, job_file, graph)
    if output is not None:
        save(made, output)
    if picture is not None:
        _draw_goodput(job, job_file, made, picture)
    if as_json:
        print_json(made.model_dump(mode="json"))
    else:
        show_plan(made, output)


def _demand_known(option: str, name: str, known: tuple[str, ...]) -> None:
    """Raise InputError, naming the nearest, when a name is none of those that are known."""
    from ddltool.errors import InputError, did_you_mean

    if name not in known:
        raise InputError(option, f"unknown {option.removeprefix('--')} {name!r}", did_you_mean(name, known))


def _check_places(output: Path | None, picture: Path | None) -> None:
    """Raise InputError for a file that cannot be written, before anything is solved."""
    from ddltool.artifacts import check_writable
    from ddltool.commands.values import demand_picture

    for path in (output, picture):
        if path is not None:
            check_writable(path)
    demand_picture(picture, "fit", (".svg", ".png"))


def _demand_readers(strategy: str, changed: Mapping[str, bool]) -> None:
    """Raise InputError for the first option with another value than its default that the strategy does not read."""
    from ddltool.errors import InputError

    for name, is_changed in changed.items():
        if is_changed and strategy not in READERS[name]:
            remedy = f"leave it out, or use --strategy {' or '.join(READERS[name])}"
            raise InputError(name, f"has no part in --strategy {strategy}", remedy)


def _check_est(strategy: str, *, wished: bool, current: Path | None, moves: Mapping[str, bool]) -> None:
    """Raise InputError for the EST plan's own options with another strategy, and for prices of moves without --current."""
    from ddltool.errors import InputError

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
    from ddltool.commands.plan_input import graph_of, scanned
    from ddltool.fixtures.loading import with_specs
    from ddltool.job import read_job
    from ddltool.outputs import demand_distinct

    job = with_specs(read_job(job_file), str(job_file), devices_file)
    named = [offer_file for offer in job.devices for offer_file in (offer.profile, offer.goodput)]
    demand_distinct([job_file.parent / name for name in (*named, job.cluster, job.network) if name], written)
    graph = graph_of(job, job_file.parent, graph_file)
    return scanned(job, graph), graph


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
    from ddltool.commands.output import print_json
    from ddltool.commands.placement import jobs_document, plan_together, show_jobs
    from ddltool.errors import InputError

    if output is not None:
        raise InputError("--output", "holds the plan of one job", "use --json for several")
    made, waiting = plan_together(files, sharing=share, limit_s=limit_s, seed=seed, devices_file=devices_file)
    if as_json:
        print_json(jobs_document(made, files, waiting))
    else:
        show_jobs(made, files, waiting)


def _draw_goodput(job: Job, job_file: Path, made: Plan, path: Path) -> None:
    """Draw goodput over devices and batch for the plan's device type. Raises InputError for a plan without goodput."""
    from ddltool.analyzers.goodput.picture import goodput_picture
    from ddltool.analyzers.goodput.tuning import BatchLimits
    from ddltool.artifacts import write_bytes
    from ddltool.commands.plan_input import fitted_models
    from ddltool.errors import InputError

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
