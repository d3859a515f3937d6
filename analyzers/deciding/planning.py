"""From a job to its plan: by one strategy, by the best one, or together with other jobs. Start at :func:`solve`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from ddltool.analyzers.balancing.plan import StepCurve
from ddltool.analyzers.communication.collectives import Compression, parse_compression, plan_collectives, settings
from ddltool.analyzers.communication.order import tac, tic
from ddltool.analyzers.communication.program import own_fabric
from ddltool.analyzers.costs.nccl import Fabric
from ddltool.analyzers.deciding.candidates import STRATEGIES, Settings, plan_by
from ddltool.analyzers.deciding.communication import GraphCommunication, LinkedSteps
from ddltool.analyzers.deciding.compare import decide
from ddltool.analyzers.deciding.goal import Failures, Goal
from ddltool.analyzers.deciding.rescaling import combine, measured_speeds, with_run
from ddltool.analyzers.goodput.plan import plan_goodput
from ddltool.analyzers.goodput.throughput import ThroughputParams
from ddltool.analyzers.loading import job_inputs
from ddltool.analyzers.loading.job_inputs import Given, Tell
from ddltool.analyzers.placement.problem import Problem, demand_throughput, from_job
from ddltool.analyzers.placement.steps import device_counts
from ddltool.artifacts import check_outputs, load, save
from ddltool.decision import NothingFits, Objective
from ddltool.errors import Infeasible, InputError, known, naming
from ddltool.goodput_model import Goodput
from ddltool.graph import RECV, Graph
from ddltool.job import LINKS, Cluster, Job
from ddltool.plans import Assignment, CompressionFigures, ParameterRecord, Plan
from ddltool.results import JointPlan, Sharing
from ddltool.stages import log_remark

if TYPE_CHECKING:
    from ddltool.analyzers.placement.network import Steps

SHARING: tuple[str, ...] = get_args(Sharing)


def plan(
    job: str | Path | Job,
    strategy: str = "auto",
    *,
    objective: Objective = "fastest",
    samples: float | None = None,
    tokens: float | None = None,
    deadline_s: float = math.inf,
    budget: float = math.inf,
    failures: Failures | None = None,
    telemetry: str | Path | None = None,
    bandwidth: str | None = None,
    latency: str = "50us",
    nccl_tests: Sequence[Path] = (),
    compress: str | None = None,
    lookahead: int = 15,
    max_gap: int | None = None,
    graph: str | Path | None = None,
    top_k: int = 1,
    time_limit_s: float = 10.0,
    prefer: Sequence[str] | None = None,
    devices_file: Path | None = None,
    allow_code: bool = False,
    output: str | Path | None = None,
    seed: int = 0,
    tell: Tell = log_remark,
) -> Plan:
    """Compare the ways to run a job (job.yaml, or a Job) on its devices, or plan by one of them.

    ``strategy``: auto, bsp, lb-bsp, elastic-bsp, est or goodput; ``samples`` or ``tokens``: of the whole run, which takes at
    most ``deadline_s`` and costs at most ``budget``; the rest as the options of ``ddltool plan``. ``output``: a place for the
    plan, which must be none of the files that the job names. Raises InputError, and Infeasible, which names the job's file and
    the constraint.
    """
    known("--strategy", strategy, ("auto", *STRATEGIES))
    job_file = Path(job.name) if isinstance(job, Job) else Path(job)
    read = job_inputs.read_with_specs(job if isinstance(job, Job) else job_file, devices_file, allow_code=allow_code)
    check_outputs(_named(read, job_file.parent), {"-o": output})
    traced = job_inputs.graph_of(read, job_file.parent, None if graph is None else Path(graph))
    read = job_inputs.scanned(read, traced, tell)
    goal = Goal(
        objective=objective,
        samples=job_inputs.samples_of(read, traced, tokens) if samples is None else samples,
        deadline_s=deadline_s,
        budget=budget,
        failures=failures,
        power_w=job_inputs.powers(read, str(job_file)),
    )
    _demand_length(goal)
    given = Given(
        goal=goal,
        graph=traced,
        telemetry=None if telemetry is None else Path(telemetry),
        bandwidth=bandwidth,
        latency=latency,
        nccl_tests=tuple(nccl_tests),
        compress=None if compress is None else parse_compression(compress),
        settings=Settings(
            top_k=top_k,
            limit_s=time_limit_s,
            seed=seed,
            lookahead=lookahead,
            max_gap=max_gap,
            prefer=None if prefer is None else tuple(prefer),
        ),
        tell=tell,
    )
    made = complete(solve(strategy, read, job_file, given), read, job_file, given)
    if output is not None:
        save(made, output)
    return made


def _demand_length(goal: Goal) -> None:
    """Raise InputError where the whole run has a limit and nobody says how long it is."""
    for option, limit in (("--deadline", goal.deadline_s), ("--budget", goal.budget)):
        if limit < math.inf and goal.samples is None:
            problem = "limits a whole run, and how long that is nobody says"
            raise InputError(option, problem, "give --samples or --tokens")


def _named(job: Job, folder: Path) -> list[Path]:
    """Return the files that a job names."""
    names = [name for offer in job.devices for name in (offer.profile, offer.goodput)]
    names += [job.cluster, None if job.network == LINKS else job.network]
    return [folder / name for name in names if name]


def solve(strategy: str, job: Job, job_file: Path, given: Given) -> Plan:
    """Return the plan of one strategy, or of the best one. Raises InputError, and Infeasible, which names the job's file."""
    try:
        with naming(job_file, type(job).model_fields):
            # Of a model that can be traced, or a run, a split of the batch has a network, too, and transfers take time.
            more = strategy in ("bsp", "lb-bsp", "elastic-bsp") and (
                job_inputs.traceable(job) or given.telemetry is not None
            )
            if strategy == "auto" or more:
                return auto_plan(job, job_file, given, None if strategy == "auto" else strategy)
            if strategy == "goodput":
                made = goodput_plan(job, job_file)
                demand_throughput(made.throughput, job.constraints.min_throughput)
                return made
            capabilities = job_inputs.capabilities_of(job, job_file.parent, str(job_file), given.tell)
            if strategy == "est" and job.network is not None:
                made = _on_nodes(job, job_file, from_job(job, capabilities), given)
                return with_compute(made, capabilities)
            curves = job_inputs.step_curves(job, job_file)
            return make_plan(job, capabilities, strategy, given.settings, curves=curves)
    except NothingFits as error:
        raise NothingFits(f"{job_file}: {error}", error.layouts) from None
    except Infeasible as error:
        raise Infeasible(f"{job_file}: {error}") from None


def make_plan(
    job: Job,
    capabilities: Mapping[str, float],
    strategy: str,
    settings: Settings,
    *,
    curves: Mapping[str, StepCurve] | None = None,
) -> Plan:
    """Return the plan of a job; ``capabilities`` by device type in mini-batches per second."""
    problem = from_job(job, capabilities)
    made = plan_by(strategy, problem, settings, curves)
    demand_throughput(made.throughput, problem.min_throughput)
    return with_compute(made, capabilities)


def with_compute(plan: Plan, capabilities: Mapping[str, float]) -> Plan:
    """Return the plan with the seconds that each device computes in a step, where its strategy does not say them.

    ``capabilities``: mini-batches per second by device type. ESTs take turns of one mini-batch each; a whole local batch
    takes the time by its share of a mini-batch.
    """

    def seconds(row: Assignment) -> float | None:
        if row.compute_s is not None or row.device_type not in capabilities:
            return row.compute_s
        return (row.ests_per_device or row.local_batch_size / plan.batch_size) / capabilities[row.device_type]

    rows = [row.model_copy(update={"compute_s": seconds(row)}) for row in plan.assignments]
    return plan.model_copy(update={"assignments": rows})


def goodput_plan(job: Job, job_file: Path) -> Plan:
    """Return the plan of highest goodput. Raises InputError when job.yaml lacks the goodput section or a model."""
    if job.goodput is None:
        remedy = "add goodput: {max_batch_size: N, max_local_batch_size: N, noise_scale: PHI}"
        raise InputError(f"{job_file}:goodput", "is missing", remedy)
    models = job_inputs.fitted_models(job, job_file)
    if not models:
        problem = "no device has a fitted throughput model"
        raise InputError(f"{job_file}:devices", problem, "add goodput: goodput.json (made by ddltool fit) to a device")
    return plan_goodput(job, job.goodput, models)


def complete(made: Plan, job: Job, job_file: Path, given: Given) -> Plan:
    """Return a plan with its parameters in order, its data-parallel settings and the shape of its nodes, where known."""
    graph = given.graph
    if graph is not None:
        fabrics = job_inputs.fabrics_of(job, job_file.parent, given)
        settings = {} if made.decision is not None else data_parallel(graph, made, fabrics)
        made = made.model_copy(update={"parameters": parameters_of(graph), **settings})
    if given.compress is not None and made.world_size == 1:
        given.tell("note: --compress: the plan is for one device, which sends no gradients")
    elif given.compress is not None:
        made = made.model_copy(update={"compressed": _compressed(made, job, job_file, given, given.compress)})
    grouped = job.group is not None and job.cluster is not None  # whose nodes count single devices
    together = None if grouped else _devices_per_node(job, job_file, made, given)
    return made.model_copy(update={"devices_per_node": together, "group": job.group})


def _compressed(made: Plan, job: Job, job_file: Path, given: Given, compression: Compression) -> CompressionFigures:
    """Return what compressing would bring the plan's devices. Raises InputError without a graph, links or known devices."""
    source = job_inputs.graph_communication(
        job, job_file.parent, given, job_inputs.fabrics_of(job, job_file.parent, given)
    )
    counts = device_counts(made)
    if source is None:
        remedy = "give --bandwidth or name links, and a model or --graph"
        raise InputError("--compress", "nothing is known of the gradients and their network", remedy)
    rate = job_inputs.slowest_memory(job, str(job_file), counts)
    pass_s = max((row.compute_s or 0.0) / (row.accumulation_steps + 1) for row in made.assignments)
    return source.compressed(counts, pass_s or made.iteration_s, compression, rate)


def _devices_per_node(job: Job, job_file: Path, made: Plan, given: Given) -> dict[str, int] | None:
    """Return how many devices of each used type stand on a node of the job's cluster; on unequal nodes, the fewest.

    Without a cluster as many as the job says, or as were assumed for their network.
    """
    used = {row.device_type for row in made.assignments}
    found: dict[str, int] = {}
    if job.cluster is None:
        assumed = job_inputs.fabrics_of(job, job_file.parent, replace(given, tell=lambda _: None)) or {}
        for offer in job.devices:
            each = offer.per_node or (assumed[offer.type].gpus_per_node if offer.type in assumed else 1)
            if offer.type in used and (offer.per_node is not None or each > 1):
                found[offer.type] = min(each, max(offer.count, 1))
        return found or None
    for group in load(job_file.parent / job.cluster, Cluster).nodes:
        name, count = group.devices.type, group.devices.count
        if name in used and count and group.count:
            found[name] = min(found.get(name, count), count)
    return found or None


def parameters_of(graph: Graph, *, ordered: bool = True) -> list[ParameterRecord]:
    """Return the graph's parameters in the order in which they should travel: TAC's, or TIC's for an untimed graph.

    Not ``ordered``: in the graph's own, for what is sharded travels block by block.
    """
    schedule = None if not ordered else tac(graph) if graph.timed else tic(graph)
    place = {graph.names[position]: position for position in graph.of_kind(RECV).tolist()}
    return [
        ParameterRecord(
            name=graph.parameter[place[name]] or name,
            size_bytes=int(graph.size_bytes[place[name]]),
            priority=None if schedule is None else schedule.priority[name],
        )
        for name in (place if schedule is None else schedule.order)
    ]


def data_parallel(graph: Graph, made: Plan, fabrics: Mapping[str, Fabric] | None) -> dict[str, Any]:
    """Return the DDP and FSDP2 settings for the plan's processes on the job's network, or the one the graph was timed for."""
    counts = device_counts(made)
    if fabrics is None and (own := own_fabric(graph)) is not None:
        fabrics = dict.fromkeys(counts, own)
    if fabrics is None or not graph.timed or made.world_size < 2 or made.superstep is not None:
        return {}
    pass_s = max(
        (row.compute_s or 0.0) / max(row.ests_per_device, row.accumulation_steps + 1) for row in made.assignments
    )
    plans = plan_collectives(graph, Fabric.joined(fabrics, counts), pass_s or None)
    if plans is None:
        return {}
    earlier_s = max(0.0, made.iteration_s - plans.compute_s) if pass_s else 0.0
    return {
        name: setting
        and setting.model_copy(
            update={"step_s": setting.step_s + earlier_s, "default_step_s": setting.default_step_s + earlier_s}
        )
        for name, setting in zip(("ddp", "fsdp2"), settings(plans), strict=True)
    }


def auto_plan(job: Job, job_file: Path, given: Given, only: str | None = None) -> Plan:
    """Return the picked plan with the comparison in ``decision``; ``only``: of one strategy. Raises InputError, Infeasible."""
    # Several strategies call the solver, each with a share of the time.
    settings = replace(given.settings, limit_s=given.settings.limit_s / 2)
    run = job_inputs.run_of(given.telemetry, given.tell)
    known = job_inputs.knowledge_of(job, job_file, given, run)
    measured, off = ({}, {}) if run is None else measured_speeds(run, job.batch_size, known.curves)
    offered = {offer.type for offer in job.devices}
    unknown = sorted(set(measured) - offered)
    if unknown:
        problem = f"is of device {unknown[0]!r}, which the job does not offer"
        raise InputError(str(given.telemetry), problem, f"types there: {', '.join(sorted(offered))}")
    rest = job.model_copy(update={"devices": [offer for offer in job.devices if offer.type not in measured]})
    told = job if job.model or all(it.capability_per_s or it.profile or it.goodput for it in job.devices) else rest
    predicted = job_inputs.capabilities_of(told, job_file.parent, str(job_file), given.tell) if rest.devices else {}
    combined = combine(measured, predicted)
    capabilities = combined.capabilities
    factors = {name: predicted[name] / capabilities[name] for name in combined.errors}
    knowledge = replace(known, errors={**known.errors, **combined.errors}, remark=combined.remark)
    if knowledge.layouts is not None:
        own = {it.type for it in job.devices if it.capability_per_s or it.profile or it.goodput}
        speeds = {name: capability for name, capability in capabilities.items() if name in own}
        knowledge = replace(knowledge, layouts=knowledge.layouts.at_speeds(speeds, job.batch_size))
    if run is not None:
        knowledge = with_run(knowledge, run, {**factors, **off})
    made = decide(job, from_job(job, capabilities), knowledge, goal=given.goal, settings=settings, only=only)
    if given.graph is None and isinstance(knowledge.communication, GraphCommunication):
        graph = knowledge.communication.graph
        made = made.model_copy(update={"parameters": parameters_of(graph, ordered=made.sharding is None)})
    if settings.top_k > 1 and made.strategy != "est":
        given.tell(f"note: --top-k lists EST plans; the plan picked is {made.strategy}")
    return with_compute(made, capabilities)


def _on_nodes(job: Job, job_file: Path, problem: Problem, given: Given) -> Plan:
    """Return the plan with synchronisation in its step."""
    from ddltool.analyzers.placement.network import solve_on_nodes  # it loads a solver

    settings = given.settings
    if settings.prefer is not None:
        raise InputError("--prefer", "does not go with network: in job.yaml", "leave out one of the two")
    if job.cluster is None or job.network is None:
        raise InputError(f"{job_file}:network", "needs cluster: beside it", "name the cluster.yaml with the nodes")
    nodes = load(job_file.parent / job.cluster, Cluster).nodes
    if job.network == LINKS:
        source = job_inputs.graph_communication(
            job, job_file.parent, given, job_inputs.fabrics_of(job, job_file.parent, given)
        )
        if source is None:
            remedy = "name the model, or --graph, and link and nic of the cluster's nodes"
            raise InputError(f"{job_file}:network", f"{LINKS} need a graph and links", remedy)
        steps: Steps | ThroughputParams = LinkedSteps(source)
    else:
        steps = load(job_file.parent / job.network, Goodput).params
    return solve_on_nodes(problem, nodes, steps, time_limit_s=settings.limit_s, seed=settings.seed)


def plan_together(
    files: Sequence[Path], sharing: str, *, limit_s: float, seed: int, tell: Tell, read: Callable[[Path], Job]
) -> JointPlan:
    """Return the plan of several jobs on the same devices, and why each job that waits does.

    There are as many devices of each type as the job that names most of them says.

    Raises InputError for job files with a network, which is not part of a joint plan.
    """
    from ddltool.analyzers.placement.jobs import idle_throughput, solve_jobs  # it loads a solver

    problems, names, weights = [], [], []
    devices: dict[str, int] = {}
    for file in files:
        job = read(file)
        if job.network is not None:
            raise InputError(f"{file}:network", "is not part of a joint plan", "leave it out, or plan the job alone")
        try:
            with naming(file, Job.model_fields):
                problem = from_job(job, job_inputs.capabilities_of(job, file.parent, str(file), tell))
        except Infeasible as error:
            raise Infeasible(f"{file}: {error}") from None
        # Files tell jobs apart where names may not.
        problems.append(replace(problem, job=str(file)))
        names.append(job.name)
        weights.append(job.weight)
        for offer in job.devices:
            devices[offer.type] = max(devices.get(offer.type, 0), offer.count)
    made = solve_jobs(
        problems, devices, weights=weights, objective=cast(Sharing, sharing), time_limit_s=limit_s, seed=seed
    )
    plans = [row.plan for row in made.jobs]
    rows = []
    for row, file, name, problem in zip(made.jobs, files, names, problems, strict=True):
        if row.plan is not None:
            rows.append(row.model_copy(update={"plan": row.plan.model_copy(update={"job": name})}))
            continue
        reached = idle_throughput(problem, devices, plans)
        text = f"{file.name} waits: on what the others leave it would reach {reached:.4g} mini-batches/s"
        least = problem.min_throughput
        below = "" if least is None else f", below its min_throughput of {float(least):g}"
        waits = f"{text}{below}" if reached else f"{file.name} waits: the others leave no device for it"
        rows.append(row.model_copy(update={"waits": waits}))
    return made.model_copy(update={"jobs": rows})
