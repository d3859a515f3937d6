"""``ddltool plan JOB.yaml``: where each logical worker runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional, cast

import typer

from ddltool.commands.options import Json, Output, Seed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddltool.analyzers.balancing.plan import StepCurve
    from ddltool.analyzers.deciding.candidates import Settings
    from ddltool.commands.decide import Given
    from ddltool.commands.placement import Wishes
    from ddltool.decision import Objective
    from ddltool.job import Job
    from ddltool.plan import Plan

STRATEGIES = ("auto", "est", "bsp", "lb-bsp", "elastic-bsp", "goodput")


def plan(
    job_file: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job: workers, batch size, devices.")],
    strategy: Annotated[
        str,
        typer.Option(
            help="auto: compare all and pick; est: EST mapping; bsp: equal split; lb-bsp: uneven split; elastic-bsp: "
            "barriers; goodput: count and batch."
        ),
    ] = "auto",
    objective: Annotated[
        str, typer.Option(help="auto: fastest, cheapest (per sample) or same-bits (on any number of devices).")
    ] = "fastest",
    telemetry: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="auto: telemetry of an earlier run, in place of the job's capabilities."),
    ] = None,
    bandwidth: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="auto: network of a node, e.g. 100Gbit; nic_gbit of the cluster by default."),
    ] = None,
    latency: Annotated[str, typer.Option(help="auto: network latency.")] = "50us",
    lookahead: Annotated[
        int, typer.Option(help="elastic-bsp: iterations per worker up to the barrier.", min=1, max=100_000)
    ] = 15,
    max_gap: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="elastic-bsp: most iterations that one worker may be ahead.", min=0, show_default=False),
    ] = None,
    graph_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            "--graph", metavar="FILE", help="graph.json: puts the model's parameters and their order in the plan."
        ),
    ] = None,
    top_k: Annotated[int, typer.Option(help="How many different plans to show.", min=1, max=1000)] = 1,
    time_limit_s: Annotated[
        float, typer.Option("--time-limit", help="Solver's time limit in seconds.", min=0.01)
    ] = 10.0,
    prefer: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="est: what matters, in this order: throughput, devices, price, waste, moves.",
            metavar="NAME,...",
            show_default=False,
        ),
    ] = None,
    current_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--current", metavar="PLAN", help="est: plan.json that runs now: is leaving it worth it?"),
    ] = None,
    migration_s: Annotated[
        float, typer.Option("--migration", help="With --current: seconds that a move stops the job.", min=0, max=1e9)
    ] = 30.0,
    horizon_s: Annotated[
        float, typer.Option("--horizon", help="With --current: seconds in which a move must pay.", min=0.001, max=1e9)
    ] = 3600.0,
    together: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option("--with", metavar="JOB.yaml", help="est: another job on the same devices; repeat for more."),
    ] = None,
    share: Annotated[
        str, typer.Option(help="With --with: sum or max-min of the throughputs relative to the job alone.")
    ] = "sum",
    picture: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="goodput: draw goodput over devices and batch (.svg or .png)."),
    ] = None,
    output: Output = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Compare the ways to run a job on its devices, or plan by one, and predict the step time."""
    from ddltool.analyzers.deciding.candidates import Settings
    from ddltool.artifacts import check_writable, save
    from ddltool.commands.decide import OBJECTIVES, Given
    from ddltool.commands.fit import check_picture
    from ddltool.commands.output import print_json
    from ddltool.commands.placement import Wishes
    from ddltool.commands.plan_input import data_parallel, graph_of, ordered_parameters, scanned
    from ddltool.commands.plan_output import show_plan
    from ddltool.errors import Infeasible, InputError, did_you_mean
    from ddltool.job import read_job
    from ddltool.outputs import demand_distinct

    if strategy not in STRATEGIES:
        raise InputError("--strategy", f"unknown strategy {strategy!r}", did_you_mean(strategy, STRATEGIES))
    inputs = [job_file, telemetry, graph_file, current_file, *(together or [])]
    demand_distinct(inputs, {"-o": output, "--picture": picture})
    for path in (output, picture):
        if path is not None:
            check_writable(path)
    if picture is not None:
        check_picture(picture)
    if objective not in OBJECTIVES:
        raise InputError("--objective", f"unknown objective {objective!r}", did_you_mean(objective, OBJECTIVES))
    only_auto = {"--objective": objective != "fastest", "--telemetry": telemetry, "--bandwidth": bandwidth}
    _only_for(strategy, ("auto",), only_auto)
    _only_for(strategy, ("elastic-bsp", "auto"), {"--lookahead": lookahead != 15, "--max-gap": max_gap is not None})
    _only_for(strategy, ("est", "auto"), {"--top-k": top_k != 1})
    if current_file is None and (migration_s != 30.0 or horizon_s != 3600.0):
        name = "--migration" if migration_s != 30.0 else "--horizon"
        raise InputError(name, "needs --current", "give the plan that runs now")
    if strategy != "est" and (prefer is not None or current_file is not None or together):
        raise InputError("--strategy", f"is {strategy}", "--prefer, --current and --with need --strategy est")
    if together:
        if top_k != 1:
            raise InputError("--top-k", "is for one job", "leave out --with or --top-k")
        _plan_jobs([job_file, *together], share, time_limit_s, seed, output, as_json)
        return
    job = read_job(job_file)
    named = [offer_file for offer in job.devices for offer_file in (offer.profile, offer.goodput)]
    beside = [job_file.parent / name for name in (*named, job.cluster, job.network) if name]
    demand_distinct(beside, {"-o": output, "--picture": picture})
    graph = graph_of(job, job_file.parent, graph_file)
    job = scanned(job, graph)
    given = Given(
        objective=cast("Objective", objective),
        graph=graph,
        telemetry=telemetry,
        bandwidth=bandwidth,
        latency=latency,
        settings=Settings(top_k=top_k, limit_s=time_limit_s, seed=seed, lookahead=lookahead, max_gap=max_gap),
    )
    wishes = Wishes(prefer=prefer, current_file=current_file, migration_s=migration_s, horizon_s=horizon_s)
    try:
        made = _solve(strategy, job, job_file, given, wishes)
    except Infeasible as error:
        raise Infeasible(f"{job_file}: {error}") from None
    if graph is not None:
        settings = {} if made.decision is not None else data_parallel(graph, made)
        made = made.model_copy(update={"parameters": ordered_parameters(graph), **settings})
    made = made.model_copy(update={"devices_per_node": _devices_per_node(job, job_file, made)})
    if output is not None:
        save(made, output)
    if picture is not None:
        _draw_goodput(job, job_file, made, picture)
    if as_json:
        print_json(made.model_dump(mode="json"))
    else:
        show_plan(made, output)


def _solve(strategy: str, job: Job, job_file: Path, given: Given, wishes: Wishes) -> Plan:
    """Return the plan of one strategy, or of the best one. Raises InputError, Infeasible."""
    from ddltool.analyzers.placement.requirements import demand_throughput
    from ddltool.commands.decide import auto_plan
    from ddltool.commands.placement import est_plan
    from ddltool.commands.plan_input import capabilities_of, step_curves

    if strategy == "auto":
        # Several strategies call the solver, each with a share of the time.
        return auto_plan(
            job, job_file, replace(given, settings=replace(given.settings, limit_s=given.settings.limit_s / 2))
        )
    if strategy == "goodput":
        made = goodput_plan(job, job_file)
        demand_throughput(made.throughput, job.constraints.min_throughput)
        return made
    capabilities = capabilities_of(job, job_file.parent, str(job_file))
    if strategy == "est":
        return est_plan(job, job_file, capabilities, given.settings, wishes)
    return make_plan(job, capabilities, strategy, given.settings, curves=step_curves(job, job_file))


def _devices_per_node(job: Job, job_file: Path, made: Plan) -> dict[str, int] | None:
    """Return how many devices of each used type stand on a node of the job's cluster; on unequal nodes, the fewest."""
    from ddltool.artifacts import load
    from ddltool.job import Cluster

    if job.cluster is None:
        return None
    used = {row.device_type for row in made.assignments}
    found: dict[str, int] = {}
    for group in load(job_file.parent / job.cluster, Cluster).nodes:
        name, count = group.devices.type, group.devices.count
        if name in used and count and group.count:
            found[name] = min(found.get(name, count), count)
    return found or None


def _only_for(strategy: str, those: tuple[str, ...], given: Mapping[str, object]) -> None:
    """Refuse options that the strategy does not read; ``those`` do."""
    from ddltool.errors import InputError

    used = [name for name, value in given.items() if value]
    if strategy not in those and used:
        remedy = f"leave it out, or use --strategy {' or '.join(those)}"
        raise InputError(used[0], f"has no part in --strategy {strategy}", remedy)


def _plan_jobs(files: list[Path], share: str, limit_s: float, seed: int, output: Path | None, as_json: bool) -> None:
    """Plan several jobs on the same devices."""
    from ddltool.commands.output import print_json
    from ddltool.commands.placement import jobs_document, plan_together, show_jobs
    from ddltool.errors import InputError

    if output is not None:
        raise InputError("--output", "holds the plan of one job", "use --json for several")
    made, waiting = plan_together(files, sharing=share, limit_s=limit_s, seed=seed)
    if as_json:
        print_json(jobs_document(made, files, waiting))
    else:
        show_jobs(made, files, waiting)


def make_plan(
    job: Job,
    capabilities: Mapping[str, float],
    strategy: str,
    settings: Settings,
    *,
    curves: Mapping[str, StepCurve] | None = None,
) -> Plan:
    """Return the plan of a job; ``capabilities`` by device type in mini-batches per second."""
    from ddltool.analyzers.balancing.plan import plan_lb_bsp
    from ddltool.analyzers.barriers.superstep import plan_elastic_bsp
    from ddltool.analyzers.deciding.compute import with_compute
    from ddltool.analyzers.placement.bsp import plan_bsp
    from ddltool.analyzers.placement.est import solve_est
    from ddltool.analyzers.placement.problem import from_job
    from ddltool.analyzers.placement.requirements import demand_throughput

    problem = from_job(job, capabilities)
    if strategy == "bsp":
        made = plan_bsp(problem, curves)
    elif strategy == "lb-bsp":
        made = plan_lb_bsp(problem, curves)
    elif strategy == "elastic-bsp":
        made = plan_elastic_bsp(problem, lookahead=settings.lookahead, max_gap=settings.max_gap)
    else:
        made = solve_est(problem, top_k=settings.top_k, time_limit_s=settings.limit_s, seed=settings.seed)
    demand_throughput(made.throughput, problem.min_throughput)
    return with_compute(made, capabilities)


def goodput_plan(job: Job, job_file: Path) -> Plan:
    """Return the plan of highest goodput. Raises InputError when job.yaml lacks the goodput section or a model."""
    from ddltool.analyzers.goodput.plan import plan_goodput
    from ddltool.commands.plan_input import fitted_models
    from ddltool.errors import InputError

    if job.goodput is None:
        remedy = "add goodput: {max_batch_size: N, max_local_batch_size: N, noise_scale: PHI}"
        raise InputError(f"{job_file}:goodput", "is missing", remedy)
    models = fitted_models(job, job_file)
    if not models:
        problem = "no device has a fitted throughput model"
        raise InputError(f"{job_file}:devices", problem, "add goodput: goodput.json (made by ddltool fit) to a device")
    return plan_goodput(job, job.goodput, models)


def _draw_goodput(job: Job, job_file: Path, made: Plan, path: Path) -> None:
    """Draw goodput over devices and batch for the plan's device type. Raises InputError for a plan without goodput."""
    from ddltool.analyzers.goodput.batch_search import BatchLimits
    from ddltool.analyzers.goodput.picture import goodput_picture
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
        file_format=path.suffix.removeprefix("."),
    )
    write_bytes(path, drawn)
