"""``ddltool plan JOB.yaml``: where each logical worker runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, cast

import typer

from ddltool.commands.options import Json, Output, Seed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddltool.analyzers.balancing.plan import StepCurve
    from ddltool.analyzers.goodput.throughput import ThroughputParams
    from ddltool.decision import Objective
    from ddltool.graph import Graph
    from ddltool.job import Job
    from ddltool.plan import BatchSplit, BucketSetting, GoodputChoice, ParameterRecord, Plan

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
    """Map the job's logical workers onto its devices and predict the step time."""
    from ddltool.artifacts import check_writable, save
    from ddltool.commands.decide import OBJECTIVES, Given, auto_plan
    from ddltool.commands.fit import check_picture
    from ddltool.commands.output import print_json
    from ddltool.errors import InputError, did_you_mean
    from ddltool.job import read_job

    if strategy not in STRATEGIES:
        raise InputError("--strategy", f"unknown strategy {strategy!r}", did_you_mean(strategy, STRATEGIES))
    for path in (output, picture):
        if path is not None:
            check_writable(path)
    if picture is not None:
        check_picture(picture)
    if objective not in OBJECTIVES:
        raise InputError("--objective", f"unknown objective {objective!r}", did_you_mean(objective, OBJECTIVES))
    _only_for_auto(
        strategy, {"--objective": objective != "fastest", "--telemetry": telemetry, "--bandwidth": bandwidth}
    )
    if strategy != "est" and (prefer is not None or current_file is not None or together):
        raise InputError("--strategy", f"is {strategy}", "--prefer, --current and --with need --strategy est")
    if together:
        _plan_jobs([job_file, *together], share, time_limit_s, seed, output, as_json)
        return
    job = read_job(job_file)
    graph = _graph_of(job, job_file.parent, graph_file)
    job = _scanned(job, graph)
    if strategy == "auto":
        from ddltool.analyzers.deciding.candidates import Settings

        given = Given(
            objective=cast("Objective", objective),
            graph=graph,
            telemetry=telemetry,
            bandwidth=bandwidth,
            latency=latency,
            settings=Settings(top_k=top_k, limit_s=time_limit_s / 2, seed=seed, lookahead=lookahead, max_gap=max_gap),
        )
        made = auto_plan(job, job_file, given)
    elif strategy == "goodput":
        made = goodput_plan(job, job_file)
    elif strategy == "est" and (prefer is not None or current_file is not None or job.network is not None):
        from ddltool.commands.placement import est_plan

        made = est_plan(
            job,
            job_file,
            capabilities_of(job, job_file.parent, str(job_file)),
            top_k=top_k,
            limit_s=time_limit_s,
            seed=seed,
            prefer=prefer,
            current_file=current_file,
            migration_s=migration_s,
            horizon_s=horizon_s,
        )
    else:
        capabilities = capabilities_of(job, job_file.parent, str(job_file))
        made = make_plan(
            job,
            capabilities,
            strategy,
            top_k=top_k,
            limit_s=time_limit_s,
            seed=seed,
            lookahead=lookahead,
            max_gap=max_gap,
            curves=step_curves(job, job_file),
        )
    if graph is not None:
        settings = {} if made.decision is not None else _data_parallel(graph, made)
        made = made.model_copy(update={"parameters": ordered_parameters(graph), **settings})
    if output is not None:
        save(made, output)
    if picture is not None:
        _draw_goodput(job, job_file, made, picture)
    if as_json:
        print_json(made.model_dump(mode="json"))
    else:
        show_plan(made, output)


def _only_for_auto(strategy: str, given: Mapping[str, object]) -> None:
    """Refuse options that no single strategy reads."""
    from ddltool.errors import InputError

    used = [name for name, value in given.items() if value]
    if strategy != "auto" and used:
        raise InputError(used[0], f"has no part in --strategy {strategy}", "leave it out, or use --strategy auto")


def _plan_jobs(files: list[Path], share: str, limit_s: float, seed: int, output: Path | None, as_json: bool) -> None:
    """Plan several jobs on the same devices."""
    from ddltool.commands.output import print_json
    from ddltool.commands.placement import jobs_document, plan_together, show_jobs
    from ddltool.errors import InputError

    if output is not None:
        raise InputError("--output", "holds the plan of one job", "use --json for several")
    made = plan_together(files, sharing=share, limit_s=limit_s, seed=seed)
    if as_json:
        print_json(jobs_document(made, files))
    else:
        show_jobs(made, files)


def make_plan(
    job: Job,
    capabilities: Mapping[str, float],
    strategy: str,
    *,
    top_k: int,
    limit_s: float,
    seed: int,
    lookahead: int = 15,
    max_gap: int | None = None,
    curves: Mapping[str, StepCurve] | None = None,
) -> Plan:
    """Return the plan of a job; ``capabilities`` by device type in mini-batches per second."""
    from ddltool.analyzers.balancing.plan import plan_lb_bsp
    from ddltool.analyzers.barriers.superstep import plan_elastic_bsp
    from ddltool.analyzers.deciding.compute import with_compute
    from ddltool.analyzers.placement.bsp import plan_bsp
    from ddltool.analyzers.placement.est import solve_est
    from ddltool.analyzers.placement.problem import from_job

    problem = from_job(job, capabilities)
    if strategy == "bsp":
        made = plan_bsp(problem)
    elif strategy == "lb-bsp":
        made = plan_lb_bsp(problem, curves)
    elif strategy == "elastic-bsp":
        made = plan_elastic_bsp(problem, lookahead=lookahead, max_gap=max_gap)
    else:
        made = solve_est(problem, top_k=top_k, time_limit_s=limit_s, seed=seed)
    return with_compute(made, capabilities, curves)


def step_curves(job: Job, job_file: Path) -> dict[str, StepCurve]:
    """Return time over batch size for the device types that have a fitted model or a limit of samples."""
    from ddltool.analyzers.balancing.plan import StepCurve
    from ddltool.artifacts import load
    from ddltool.goodput_model import Goodput

    found = {}
    for offer in job.devices:
        if offer.goodput is not None:
            params = load(job_file.parent / offer.goodput, Goodput).params_of(offer.type)
            launch_s, per_sample_s = params.alpha_grad_s, params.beta_grad_s
        elif offer.max_local_batch_size is not None and offer.capability_per_s is not None:
            launch_s, per_sample_s = 0.0, 1.0 / (offer.capability_per_s * job.batch_size)
        else:
            continue
        found[offer.type] = StepCurve(
            launch_s=launch_s, per_sample_s=per_sample_s, memory_limit=offer.max_local_batch_size
        )
    return found


def fitted_models(job: Job, job_file: Path) -> dict[str, ThroughputParams]:
    """Return the fitted throughput models of the job's device types."""
    from ddltool.analyzers.goodput.throughput import ThroughputParams
    from ddltool.artifacts import load
    from ddltool.goodput_model import Goodput

    return {
        offer.type: ThroughputParams(
            **load(job_file.parent / offer.goodput, Goodput).params_of(offer.type).model_dump()
        )
        for offer in job.devices
        if offer.goodput is not None
    }


def goodput_plan(job: Job, job_file: Path) -> Plan:
    """Return the plan of highest goodput. Raises InputError when job.yaml lacks the goodput section or a model."""
    from ddltool.analyzers.goodput.plan import plan_goodput
    from ddltool.errors import InputError

    if job.goodput is None:
        remedy = "add goodput: {max_batch_size: N, max_local_batch_size: N, noise_scale: PHI}"
        raise InputError(f"{job_file}:goodput", "is missing", remedy)
    models = fitted_models(job, job_file)
    if not models:
        problem = "no device has a fitted throughput model"
        raise InputError(f"{job_file}:devices", problem, "add goodput: goodput.json (made by ddltool fit) to a device")
    return plan_goodput(job, job.goodput, models)


def _scanned(job: Job, graph: Graph | None) -> Job:
    """Return the job with what its model's ops say about D2, where it asks for D2 and does not say itself."""
    from ddltool.analyzers.placement.determinism import d2_eligible
    from ddltool.commands.determinism import scan_source
    from ddltool.commands.output import note
    from ddltool.commands.sources import is_graph_file

    limits = job.constraints
    if limits.determinism != "D2" or limits.hardware_agnostic is not None or (graph is None and job.model is None):
        return job
    if job.model is not None and not is_graph_file(job.model):
        _, found = scan_source(job.model, batch_size=job.batch_size)
        eligible, reasons = found.d2_eligible, found.reasons
    else:
        assert graph is not None  # a job's own graph file has been read
        eligible, reasons = d2_eligible(graph)
    if not eligible:
        note(f"D2: the plan keeps to one device type: {reasons[0]}")
    return job.model_copy(update={"constraints": limits.model_copy(update={"hardware_agnostic": eligible})})


def _draw_goodput(job: Job, job_file: Path, made: Plan, path: Path) -> None:
    """Draw goodput over devices and batch for the plan's device type. Raises InputError for a plan without goodput."""
    from ddltool.analyzers.goodput.batch_search import BatchLimits
    from ddltool.analyzers.goodput.picture import goodput_picture
    from ddltool.artifacts import write_bytes
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


def capabilities_of(job: Job, folder: Path, where: str) -> dict[str, float]:
    """Return the capability of each device type: as written, from its profile, or from the model's roofline.

    Paths in the job are relative to ``folder``; predicted capabilities are told on stderr.
    """
    from ddltool.analyzers.placement.capability import capability_from_profile
    from ddltool.commands.output import note
    from ddltool.errors import InputError
    from ddltool.profile import read_profile

    found: dict[str, float] = {}
    missing: list[str] = []
    for offer in job.devices:
        if offer.capability_per_s is not None:
            found[offer.type] = offer.capability_per_s
        elif offer.profile is not None:
            path = folder / offer.profile
            found[offer.type] = capability_from_profile(read_profile(path), offer.type, job.batch_size, str(path))
        else:
            missing.append(offer.type)
    if missing and job.model is None:
        problem = (
            f"{missing[0]} has neither capability_per_s nor profile, and the job names no model to estimate it from"
        )
        raise InputError(f"{where}:devices", problem, "give one of the three")
    if not missing:
        return found
    predicted = _roofline_capabilities(job, folder, missing)
    shown = ", ".join(f"{name} {value:.3g}/s" for name, value in predicted.items())
    note(f"predicted capabilities (roofline of {job.model}): {shown}")
    return {**found, **predicted}


def _roofline_capabilities(job: Job, folder: Path, types: list[str]) -> dict[str, float]:
    """Return capabilities predicted from the traced model and the device table."""
    from ddltool.analyzers.oracle.roofline import estimate_roofline
    from ddltool.analyzers.placement.capability import capability_from_graph
    from ddltool.commands.sources import is_graph_file, load_graph
    from ddltool.device import Network
    from ddltool.fixtures.loading import devices

    source = str(folder / job.model) if job.model and is_graph_file(job.model) else str(job.model)
    graph = load_graph(source, None, None if is_graph_file(source) else job.batch_size)
    table = devices()
    return {
        name: capability_from_graph(estimate_roofline(graph, table.device(name, "devices.type"), Network()))
        for name in types
    }


def _graph_of(job: Job, folder: Path, graph_file: Path | None) -> Graph | None:
    """Return the graph whose parameters the plan lists: the one given, or the job's own when that is a file."""
    from ddltool.commands.sources import is_graph_file
    from ddltool.graph_io import read_graph

    if graph_file is not None:
        return read_graph(graph_file)
    return read_graph(folder / job.model) if job.model is not None and is_graph_file(job.model) else None


def ordered_parameters(graph: Graph) -> list[ParameterRecord]:
    """Return the graph's parameters in the order in which they should travel: TAC's, or TIC's for an untimed graph."""
    from ddltool.analyzers.communication.order import tac, tic
    from ddltool.graph import RECV
    from ddltool.plan import ParameterRecord

    schedule = tac(graph) if graph.timed else tic(graph)
    place = {graph.names[position]: int(position) for position in graph.of_kind(RECV)}
    return [
        ParameterRecord(
            name=graph.parameter[place[name]] or name,
            size_bytes=int(graph.size_bytes[place[name]]),
            priority=schedule.priority[name],
        )
        for name in schedule.order
    ]


def _data_parallel(graph: Graph, made: Plan) -> dict[str, Any]:
    """Return the DDP and FSDP2 settings for the plan's processes on the network that the graph was timed for."""
    from ddltool.analyzers.communication.collectives import plan_collectives, settings
    from ddltool.commands.collectives import own_ring

    ring = own_ring(graph, made.world_size)
    if ring is None or not graph.timed or made.world_size < 2:
        return {}
    plans = plan_collectives(graph, ring)
    if plans is None:
        return {}
    buckets, prefetch = settings(plans)
    return {"ddp": buckets, "fsdp2": prefetch}


def show_plan(made: Plan, output: Path | None) -> None:
    """Print a plan as a table."""
    from ddltool.analyzers.communication.collectives import share_saved
    from ddltool.commands.decide import show_decision
    from ddltool.commands.output import out, table
    from ddltool.units import show_seconds

    rows = [
        (
            row.device_type,
            str(row.devices),
            str(row.ests_per_device) if row.ests_per_device else "-",
            str(row.local_batch_size),
        )
        for row in made.assignments
    ]
    console = out()
    title = f"{made.job}: {made.strategy} plan for {made.max_workers} logical workers (predicted)"
    console.print(table(title, ("device", "devices", "ESTs each", "local batch"), rows))
    console.print(
        f"step time   {show_seconds(made.iteration_s)}, {made.throughput:.4g} logical mini-batches/s (predicted)"
    )
    console.print(
        f"waste       {made.waste:.4g} mini-batches/s of {made.waste + made.throughput:.4g} on the used devices"
    )
    console.print(f"solver      {made.status}, gap {made.gap:.2%}, {made.solve_seconds:.3f} s")
    if made.decision is not None:
        show_decision(made.decision)
    if made.network is not None or made.migration is not None:
        from ddltool.commands.placement import show_placement

        show_placement(made)
    if made.goodput is not None:
        _show_goodput(made.goodput)
    if made.split is not None:
        _show_split(made.split, made.iteration_s)
    if made.superstep is not None:
        step = made.superstep
        shown_iterations = ", ".join(f"{name} {count}" for name, count in step.iterations.items())
        console.print(f"superstep   {show_seconds(step.superstep_s)}: iterations until the barrier: {shown_iterations}")
        console.print(
            f"waiting     at most {show_seconds(step.waiting_s)}, all together {show_seconds(step.total_waiting_s)}; "
            f"one worker is at most {step.iteration_gap} ahead"
        )
    if made.alternatives:
        shown = (
            (str(number), show_seconds(other.iteration_s), f"{other.throughput:.4g}", _mix(other.assignments))
            for number, other in enumerate(made.alternatives, start=2)
        )
        console.print(table("Other plans", ("rank", "step time", "throughput", "devices x ESTs"), shown))
    if made.ddp is not None:
        saved = share_saved(made.ddp.step_s, made.ddp.default_step_s)
        console.print(f"DDP         {_bucket_text(made.ddp)}: {saved:.1%} of the step saved (predicted)")
    if made.fsdp2 is not None:
        saved = share_saved(made.fsdp2.step_s, made.fsdp2.default_step_s)
        depth = max((len(ahead) for ahead in made.fsdp2.forward.values()), default=1)
        back = max((len(ahead) for ahead in made.fsdp2.backward.values()), default=1)
        console.print(f"FSDP2       prefetch {depth} / {back} blocks: {saved:.1%} of the step saved (predicted)")
    if output is not None:
        console.print(f"wrote {output}", soft_wrap=True)


def _show_split(split: BatchSplit, step_s: float) -> None:
    from ddltool.commands.output import out
    from ddltool.units import show_seconds

    console = out()
    if split.equal_s is not None:
        saved = 1 - step_s / split.equal_s
        console.print(f"equal split {show_seconds(split.equal_s)}: {saved:.1%} of the step saved")
    for name, count in split.dropped.items():
        console.print(f"left out    {count} {name}: the step is shorter without")


def _show_goodput(choice: GoodputChoice) -> None:
    """Print the chosen batch, the scaling table, and the elastic table."""
    from ddltool.commands.output import out, table

    console = out()
    console.print(
        f"goodput     {choice.goodput_per_s:.4g} samples/s: {choice.num_replicas} {choice.device_type}, local batch "
        f"{choice.local_batch_size}, {choice.accumulation_steps} accumulation steps, total batch "
        f"{choice.total_batch_size} (efficiency {choice.efficiency:.1%})"
    )
    console.print(
        f"scaling     pays until {choice.pays_until}: beyond, a device brings less than {choice.pays_share:.0%} of the first"
    )
    rows = [
        (
            str(row.num_replicas),
            str(row.local_batch_size),
            str(row.accumulation_steps),
            str(row.total_batch_size),
            f"{row.goodput_per_s:.4g}",
            f"{row.speedup:.2f}",
        )
        for row in _thinned(choice.scaling)
    ]
    columns = ("devices", "local batch", "accumulation", "total batch", "goodput/s", "speedup")
    console.print(table("Goodput by number of devices (predicted)", columns, rows))
    rates = list(choice.elastic[0].learning_rates) if choice.elastic else []
    splits: list[tuple[str, ...]] = []
    for entry in _thinned(choice.elastic):
        if entry.accumulation_steps is None:
            nearest = " or ".join(str(total) for total in entry.nearest_total_batch_sizes) or "none"
            splits.append((str(entry.world_size), f"none; {nearest}", "-", "-"))
            continue
        sizes = sorted({size for rank in entry.local_batch_sizes for size in rank}, reverse=True)
        more = f" ({entry.ranks_with_one_more} + 1)" if entry.ranks_with_one_more else ""
        last = str(entry.last_step_samples or "-")
        splits.append((str(entry.world_size), "/".join(map(str, sizes)) + more, str(entry.accumulation_steps), last))
    hidden = max(len(choice.scaling), len(choice.elastic)) - 32
    title = f"Elastic: how to keep a total batch of {choice.total_batch_size} exactly"
    console.print(
        table(title, ("processes", "local batch", "accumulation", "last step of an epoch"), splits, text_columns=2)
    )
    console.print("(k + 1): the first k processes take one sample more per step")
    if hidden > 0:
        console.print(f"{hidden} numbers of processes are left out here; -o FILE and --json have all")
    console.print(
        "the goodput table lists the numbers of devices that no smaller number equals, with equal splits alone"
    )
    if choice.elastic:
        shown = ", ".join(f"{name} {choice.elastic[0].learning_rates[name]:.4g}" for name in rates)
        console.print(f"learning rate at that batch: {shown}")


def _thinned(rows: list[Any], most: int = 32) -> list[Any]:
    """Return at most ``most`` of the rows for people: all of them, or the first, the last and evenly between."""
    if len(rows) <= most:
        return rows
    return [rows[round(place * (len(rows) - 1) / (most - 1))] for place in range(most)]


def _bucket_text(setting: BucketSetting) -> str:
    if setting.bucket_cap_mb_list is not None:
        return f"bucket_cap_mb_list of {len(setting.bucket_cap_mb_list)}"
    return "default buckets" if setting.bucket_cap_mb is None else f"bucket_cap_mb={setting.bucket_cap_mb:g}"


def _mix(assignments: list[Any]) -> str:
    return ", ".join(f"{row.devices} {row.device_type} x {row.ests_per_device}" for row in assignments)
