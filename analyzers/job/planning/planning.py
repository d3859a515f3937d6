"""From a job to its plan: by one strategy, by the best one, or together with other jobs. Start at :func:`solve`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from ddltool.analyzers.job.goodput.throughput import StepTime, ThroughputParams
from ddltool.analyzers.job.placement.problem import Problem, demand_throughput, from_job
from ddltool.analyzers.job.placement.steps import device_counts
from ddltool.analyzers.job.planning import job_inputs
from ddltool.analyzers.job.planning.candidates import EAGER, Split, plan_by
from ddltool.analyzers.job.planning.compare import decide
from ddltool.analyzers.job.planning.exposed import GraphCommunication, LinkedSteps
from ddltool.analyzers.job.planning.goodput_plan import plan_goodput
from ddltool.analyzers.job.planning.job_model import JobModel, combine, measured_speeds, with_run
from ddltool.analyzers.job.planning.options import PlanOptions, Tell
from ddltool.analyzers.step.communication.collectives import (
    Compression,
    plan_collectives,
    settings,
)
from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.analyzers.step.communication.program import own_fabric
from ddltool.analyzers.step.measured.feedback import Run
from ddltool.analyzers.step.transfers.order import tac, tic
from ddltool.artifacts import load
from ddltool.decision import NothingFits
from ddltool.errors import Infeasible, InputError, naming
from ddltool.goodput_model import Goodput
from ddltool.graph import RECV, Graph
from ddltool.job import LINKS, Cluster, Job
from ddltool.plans import Assignment, CompressionFigures, ParameterRecord, Plan, StepSettings
from ddltool.results import JointPlan, Sharing

if TYPE_CHECKING:
    from ddltool.analyzers.job.placement.network import Steps

SHARING: tuple[str, ...] = get_args(Sharing)


def solve(strategy: str, job: Job, job_file: Path, options: PlanOptions) -> Plan:
    """Return the plan of a job by one strategy, or by the best one for ``auto``.

    ``job_file``: the path that errors name, and to whose folder the job's own paths are relative. Raises InputError for errors
    in the files, and Infeasible, which names the job's file, where no plan is possible.
    """
    try:
        with naming(job_file, type(job).model_fields):
            return _plan_job(strategy, job, job_file, options)
    except NothingFits as error:
        raise NothingFits(f"{job_file}: {error}", error.layouts) from None
    except Infeasible as error:
        raise Infeasible(f"{job_file}: {error}") from None


def _plan_job(strategy: str, job: Job, job_file: Path, options: PlanOptions) -> Plan:
    """Return the plan of a job by one strategy, or by the best one for ``auto``; errors do not name the job's file yet.

    ``auto``, and strategies other than est and goodput whose communication is known, go through :func:`auto_plan`.
    """
    if job.asks_for_hosts and strategy not in ("auto", *get_args(Split)):
        raise InputError("offload", f"{strategy} keeps all on the devices", "give none, or --strategy auto")
    if job.compile and strategy in EAGER and job_inputs.traceable(job):
        raise InputError("compile", f"is not modelled for {strategy}", "leave it out, or give --strategy auto")
    if strategy == "auto":
        return auto_plan(job, job_file, options)
    if strategy == "goodput":
        plan = goodput_plan(job, job_file)
        demand_throughput(plan.throughput, job.constraints.min_throughput)
        return plan
    # A traced model or an earlier run tells how long gradients take on the network, which auto_plan adds to the step.
    has_network = job_inputs.traceable(job) or options.telemetry is not None
    if strategy != "est" and has_network:
        return auto_plan(job, job_file, options, only=strategy)
    capabilities = job_inputs.capabilities_of(job, job_file.parent, str(job_file), options.tell)
    if strategy == "est" and job_inputs.traceable(job):
        job = _of_types_that_hold(job, job_file, options)
    if strategy == "est" and job.network is not None:
        return with_compute(_plan_on_nodes(job, job_file, from_job(job, capabilities), options), capabilities)
    return make_plan(job, capabilities, strategy, options, curves=job_inputs.step_curves(job, job_file))


def _of_types_that_hold(job: Job, job_file: Path, options: PlanOptions) -> Job:
    """Return the job without the device types that lack memory for a whole traced model and a mini-batch.

    A job that says what memory a worker needs is returned as it is, because the placement problem compares that itself; so is
    one whose memory is not known. Raises Infeasible where no type is left.
    """
    if job.constraints.memory_per_worker_gib is not None:
        return job
    layouts = job_inputs.knowledge_of(job, job_file, replace(options, tell=lambda _: None), None).layouts
    if layouts is None:
        return job
    kept, missing = [], list[Infeasible]()
    for offer in job.devices:
        try:
            layouts.demand_whole(offer.type, offer.count, job.batch_size)
            kept.append(offer)
        except Infeasible as error:
            missing.append(error)
    if not any(offer.count for offer in kept) and missing:
        raise missing[0]
    return job.model_copy(update={"devices": kept})


def make_plan(
    job: Job,
    capabilities: Mapping[str, float],
    strategy: str,
    options: PlanOptions,
    *,
    curves: Mapping[str, StepTime] | None = None,
) -> Plan:
    """Return the plan of a job by one strategy, without the time of communication.

    ``capabilities``: device type -> mini-batches per second; ``curves``: device type -> step time over batch size, if known.
    Raises Infeasible where no plan keeps the constraints, including the required throughput.
    """
    problem = from_job(job, capabilities)
    plan = plan_by(strategy, problem, options, curves)
    demand_throughput(plan.throughput, problem.min_throughput)
    return with_compute(plan, capabilities)


def with_compute(plan: Plan, capabilities: Mapping[str, float]) -> Plan:
    """Return the plan with ``compute_s`` of each assignment, where its strategy has not set it.

    ``capabilities``: device type -> mini-batches per second. A device computes one mini-batch per EST, else its local batch,
    whose time is proportional to its samples.
    """

    def seconds(row: Assignment) -> float | None:
        """Return the seconds that each device of a row computes in a step; None where they are not known."""
        if row.compute_s is not None or row.device_type not in capabilities:
            return row.compute_s
        mini_batches = row.ests_per_device or row.local_batch_size / plan.batch_size
        return mini_batches / capabilities[row.device_type]

    rows = [row.model_copy(update={"compute_s": seconds(row)}) for row in plan.assignments]
    return plan.model_copy(update={"assignments": rows})


def goodput_plan(job: Job, job_file: Path) -> Plan:
    """Return the plan of highest goodput (useful samples per second: throughput times statistical efficiency).

    Raises InputError when the job lacks the goodput section, or no device has a fitted model.
    """
    if job.goodput is None:
        remedy = "add goodput: {max_batch_size: N, max_local_batch_size: N, noise_scale: PHI}"
        raise InputError(f"{job_file}:goodput", "is missing", remedy)
    models = job_inputs.fitted_models(job, job_file)
    if not models:
        problem = "no device has a fitted throughput model"
        raise InputError(f"{job_file}:devices", problem, "add goodput: goodput.json (made by ddltool fit) to a device")
    return plan_goodput(job, job.goodput, models)


def complete(plan: Plan, job: Job, job_file: Path, options: PlanOptions) -> Plan:
    """Return the plan with the fields that other commands read, as far as they are known.

    With a graph in ``options``: parameters in the order in which they should travel, and data-parallel settings. Where
    ``options.compress`` asks: figures of compression. Always: devices on a node, and how the job runs its step.
    """
    graph = options.graph
    if graph is not None:
        fabrics = job_inputs.fabrics_of(job, job_file.parent, options)
        # a plan with a decision has its settings from the comparison
        settings = {} if plan.decision is not None else ddp_and_fsdp2_fields(graph, plan, fabrics)
        plan = plan.model_copy(update={"parameters": parameters_of(graph), **settings})
    if options.compress is not None and plan.world_size == 1:
        options.tell("note: --compress: the plan is for one device, which sends no gradients")
    elif options.compress is not None:
        figures = _compression_figures(plan, job, job_file, options, options.compress)
        plan = plan.model_copy(update={"compressed": figures})
    # A worker of such a job is a group of devices, and the cluster counts single devices.
    counts_differ = job.group is not None and job.cluster is not None
    devices_per_node = None if counts_differ else _devices_per_node(job, job_file, plan, options)
    gpus_per_node = None
    if plan.group is not None and devices_per_node is not None:
        # The plan counts a group as one device; only gpus_per_node counts single ones.
        gpus_per_node = devices_per_node
        devices_per_node = {name: max(count // plan.group.size, 1) for name, count in devices_per_node.items()}
    return plan.model_copy(
        update={
            "devices_per_node": devices_per_node,
            "group": job.group or plan.group,
            "run": _run_settings(plan, job, gpus_per_node),
        }
    )


def _run_settings(plan: Plan, job: Job, gpus_per_node: Mapping[str, int] | None) -> StepSettings:
    """Return how the job runs its step: model, numerics, optimizer, tokens of a sample, GPUs on a node.

    ``gpus_per_node``: device type -> GPUs on a node where groups of GPUs hold a replica; None: workers are single devices.
    Where the job does not say the sequence length, it is the tokens of a step in the plan's decision over its samples.
    """
    sequence_length = job.sequence_length
    if sequence_length is None and plan.decision is not None and plan.decision.step_tokens is not None:
        sequence_length = plan.decision.step_tokens // (job.max_workers * job.batch_size)
    return StepSettings(
        model=job.model,
        precision=job.precision,
        optimizer=job.optimizer,
        compile=job.compile,
        channels_last=job.channels_last,
        lora=job.lora,
        load_in_4bit=job.load_in_4bit,
        sequence_length=sequence_length,
        gpus_per_node=None if gpus_per_node is None else dict(gpus_per_node),
    )


def _compression_figures(
    plan: Plan, job: Job, job_file: Path, options: PlanOptions, compression: Compression
) -> CompressionFigures:
    """Return the figures of a step with compressed gradients on the plan's devices.

    Raises InputError where the gradients, the network or the memory bandwidth of a device are not known.
    """
    communication = job_inputs.graph_communication(
        job, job_file.parent, options, job_inputs.fabrics_of(job, job_file.parent, options)
    )
    counts = device_counts(plan)
    if communication is None:
        remedy = "give --bandwidth or name links, and a model or --graph"
        raise InputError("--compress", "nothing is known of the gradients and their network", remedy)
    memory_bytes_per_s = job_inputs.slowest_memory(job, str(job_file), counts)
    # ``accumulation_steps`` counts the passes before the last one of a step; gradients are exchanged in the last one.
    slowest_pass_s = max((row.compute_s or 0.0) / (row.accumulation_steps + 1) for row in plan.assignments)
    pass_s = slowest_pass_s or plan.iteration_s  # where the compute is not known, the whole iteration counts as compute
    return communication.compressed(counts, pass_s, compression, memory_bytes_per_s)


def _devices_per_node(job: Job, job_file: Path, plan: Plan, options: PlanOptions) -> dict[str, int] | None:
    """Return device type -> devices on a node, for the types that the plan uses; None where it is known for no type.

    With a cluster it is the smallest number on any of its nodes with the type; else what the job says, or what was assumed for
    the type's network. Types with one assumed device on a node are left out.
    """
    used_types = {row.device_type for row in plan.assignments}
    counts: dict[str, int] = {}
    if job.cluster is None:
        fabrics = job_inputs.fabrics_of(job, job_file.parent, replace(options, tell=lambda _: None)) or {}
        for offer in job.devices:
            assumed = fabrics[offer.type].gpus_per_node if offer.type in fabrics else 1
            per_node = offer.per_node or assumed
            if offer.type in used_types and (offer.per_node is not None or per_node > 1):
                counts[offer.type] = min(per_node, max(offer.count, 1))
        return counts or None
    for group in load(job_file.parent / job.cluster, Cluster).nodes:
        name, count = group.devices.type, group.devices.count
        if name in used_types and count and group.count:
            counts[name] = min(counts.get(name, count), count)
    return counts or None


def parameters_of(graph: Graph, *, ordered: bool = True) -> list[ParameterRecord]:
    """Return the graph's parameters in the order in which they should travel: TAC's, or TIC's for an untimed graph.

    If not ``ordered``, they are in the graph's own order, without priorities. That is for a sharded model, which travels block
    by block.
    """
    schedule = None
    if ordered:
        schedule = tac(graph) if graph.timed else tic(graph)
    # A parameter is received once in a step: the name of that operation -> its index in the graph.
    receiving = {graph.names[index]: index for index in graph.of_kind(RECV).tolist()}
    return [
        ParameterRecord(
            name=graph.parameter[receiving[name]] or name,
            size_bytes=int(graph.size_bytes[receiving[name]]),
            priority=None if schedule is None else schedule.priority[name],
        )
        for name in (receiving if schedule is None else schedule.order)
    ]


def ddp_and_fsdp2_fields(graph: Graph, plan: Plan, fabrics: Mapping[str, Fabric] | None) -> dict[str, Any]:
    """Return the fields ``ddp`` and ``fsdp2`` of a plan: the best settings on the job's network (None: that has no setting).

    ``fabrics``: device type -> network; None: the one that the graph was timed for. Returns {} where the network or the graph's
    times are not known, and for a plan without a synchronous exchange of gradients.
    """
    counts = device_counts(plan)
    if fabrics is None:
        graph_fabric = own_fabric(graph)
        fabrics = None if graph_fabric is None else dict.fromkeys(counts, graph_fabric)
    if fabrics is None or not graph.timed or plan.world_size < 2 or plan.superstep is not None:
        return {}
    # the slowest device's pass: a device makes one per EST or, without ESTs (0 of them), one per accumulation step
    pass_s = max(
        (row.compute_s or 0.0) / max(row.ests_per_device, row.accumulation_steps + 1) for row in plan.assignments
    )
    collectives = plan_collectives(graph, Fabric.joined(fabrics, counts), pass_s or None)
    if collectives is None:
        return {}
    # Collectives overlap the last pass of a step; the passes before it come on top.
    earlier_s = max(0.0, plan.iteration_s - collectives.compute_s) if pass_s else 0.0
    fields: dict[str, Any] = {}
    for name, setting in zip(("ddp", "fsdp2"), settings(collectives), strict=True):
        fields[name] = setting
        if setting is not None:
            times = {"step_s": setting.step_s + earlier_s, "default_step_s": setting.default_step_s + earlier_s}
            fields[name] = setting.model_copy(update=times)
    return fields


def auto_plan(job: Job, job_file: Path, options: PlanOptions, only: str | None = None) -> Plan:
    """Return the plan picked by comparing the strategies' best plans, with the comparison in its ``decision``.

    ``only``: the one strategy to plan by; None: all are compared. Speeds that an earlier run measured (``options.telemetry``)
    take precedence over others. Raises InputError for a run on devices that the job does not offer, Infeasible where no
    strategy has a plan; where memory is the reason, the message also names options with which the job would fit.
    """
    # Several strategies search in turn, each with a part of the time.
    options = replace(options, limit_s=options.limit_s / 2)
    run = job_inputs.run_of(options.telemetry, options.tell)
    knowledge = job_inputs.knowledge_of(job, job_file, options, run)
    options = _with_checkpoint(job, job_file, options)
    knowledge, capabilities = _with_speeds(job, job_file, options, knowledge, run)
    wanted = from_job(job, capabilities)
    try:
        plan = decide(job, wanted, knowledge, options=options, only=only)
    except NothingFits as error:
        nearest = job_inputs.options_that_fit(job, job_file, options, lambda layouts: layouts.holds(wanted))
        also = f"; on these devices with {' or '.join(nearest)}" if nearest else ""
        raise NothingFits(f"{error}{also}", error.layouts) from None
    if options.graph is None and isinstance(knowledge.communication, GraphCommunication):
        graph = knowledge.communication.graph
        plan = plan.model_copy(update={"parameters": parameters_of(graph, ordered=plan.sharding is None)})
    if options.top_k > 1 and plan.strategy != "est":
        options.tell(f"note: --top-k lists EST plans; the plan picked is {plan.strategy}")
    return with_compute(plan, capabilities)


def _with_speeds(
    job: Job, job_file: Path, options: PlanOptions, knowledge: JobModel, run: Run | None
) -> tuple[JobModel, Mapping[str, float]]:
    """Return (``knowledge`` with all times scaled to the devices' speeds, device type -> mini-batches per second).

    A speed is that which the earlier ``run`` (None: none) measured, else the one that the job gives, else predicted; predicted
    ones are scaled where the run shows that predictions are far off. Raises InputError for a run on devices that the job does
    not offer.
    """
    measured_per_s: Mapping[str, float] = {}
    run_factors: Mapping[str, float] = {}  # measured compute over that of the fit, by device type
    if run is not None:
        measured_per_s, run_factors = measured_speeds(run, job.batch_size, knowledge.curves)
    _demand_offered(job, measured_per_s, str(options.telemetry))
    unmeasured = [offer for offer in job.devices if offer.type not in measured_per_s]
    with_given_speed = [offer for offer in job.devices if offer.capability_per_s or offer.profile or offer.goodput]
    # Measured types are predicted too where the job can, because that shows how far predictions are off.
    predicts_all = job.model or len(with_given_speed) == len(job.devices)
    predicted_job = job if predicts_all else job.model_copy(update={"devices": unmeasured})
    predicted_per_s: Mapping[str, float] = {}
    if unmeasured:
        predicted_per_s = job_inputs.capabilities_of(predicted_job, job_file.parent, str(job_file), options.tell)
    combined = combine(measured_per_s, predicted_per_s)
    capabilities = combined.capabilities
    # By type whose prediction was scaled (those with an error): how many times as long as predicted its compute takes.
    scaled_factors = {name: predicted_per_s[name] / capabilities[name] for name in combined.errors}
    knowledge = replace(knowledge, errors={**knowledge.errors, **combined.errors}, remark=combined.remark)
    if knowledge.layouts is not None:
        given = {offer.type: capabilities[offer.type] for offer in with_given_speed if offer.type in capabilities}
        knowledge = replace(knowledge, layouts=knowledge.layouts.at_speeds(given, job.batch_size))
    if run is not None:
        knowledge = with_run(knowledge, run, {**scaled_factors, **run_factors})
    return knowledge, capabilities


def _demand_offered(job: Job, measured: Iterable[str], where: str) -> None:
    """Raise InputError if one of the ``measured`` device types is not offered by the job; ``where``: the measurement's file."""
    offered = {offer.type for offer in job.devices}
    unoffered = sorted(set(measured) - offered)
    if unoffered:
        problem = f"is of device {unoffered[0]!r}, which the job does not offer"
        raise InputError(where, problem, f"types there: {', '.join(sorted(offered))}")


def _with_checkpoint(job: Job, job_file: Path, options: PlanOptions) -> PlanOptions:
    """Return the options with the size of the job's checkpoints in the goal's failures.

    Where the storage's rate is given, the time to write a checkpoint follows from it. Without failures, or where the size is
    not known, the options are returned as they are; raises InputError if a storage is given then.
    """
    failures = options.goal.failures
    size_bytes = None if failures is None else job_inputs.checkpoint_bytes(job, job_file.parent, options.graph)
    if failures is None or size_bytes is None:
        if options.storage_bytes_per_s is not None:
            raise InputError(
                "--storage", "nothing says how large a checkpoint is", "give --checkpoint-write TIME, or a model"
            )
        return options
    failures = failures.of_size(size_bytes, options.storage_bytes_per_s)
    return replace(options, goal=replace(options.goal, failures=failures))


def _plan_on_nodes(job: Job, job_file: Path, problem: Problem, options: PlanOptions) -> Plan:
    """Return the EST plan whose step includes the synchronisation on the cluster's nodes.

    The job's ``network`` is "links" (synchronisation simulated on the graph and the cluster's links) or the file of a fitted
    model. Raises InputError where the cluster, the graph or the links are missing, and with the option --prefer.
    """
    from ddltool.analyzers.job.placement.network import solve_on_nodes  # it loads a solver

    if options.prefer is not None:
        raise InputError("--prefer", "does not go with network: in job.yaml", "leave out one of the two")
    if job.cluster is None or job.network is None:
        raise InputError(f"{job_file}:network", "needs cluster: beside it", "name the cluster.yaml with the nodes")
    nodes = load(job_file.parent / job.cluster, Cluster).nodes
    if job.network == LINKS:
        communication = job_inputs.graph_communication(
            job, job_file.parent, options, job_inputs.fabrics_of(job, job_file.parent, options)
        )
        if communication is None:
            remedy = "name the model, or --graph, and link and nic of the cluster's nodes"
            raise InputError(f"{job_file}:network", f"{LINKS} need a graph and links", remedy)
        steps: Steps | ThroughputParams = LinkedSteps(communication)
    else:
        steps = load(job_file.parent / job.network, Goodput).params
    return solve_on_nodes(problem, nodes, steps, time_limit_s=options.limit_s, seed=options.seed)


def plan_together(
    files: Sequence[Path], sharing: str, *, limit_s: float, seed: int, tell: Tell, read: Callable[[Path], Job]
) -> JointPlan:
    """Return the plan of several jobs on the same devices, with the reason in words for each job that has to wait.

    The number of devices of each type is the largest that any job names.

    Args:
        files: the job files.
        sharing: the objective, see :func:`~ddltool.analyzers.job.placement.jobs.solve_jobs`.
        limit_s: seconds of the search.
        seed: seed of the solver's random choices.
        tell: takes remarks for the user.
        read: reads a job from its file.

    Raises InputError for a job with a ``network``, which joint plans do not support.
    """
    from ddltool.analyzers.job.placement.jobs import idle_throughput, solve_jobs  # it loads a solver

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
    shared = solve_jobs(
        problems, devices, weights=weights, objective=cast(Sharing, sharing), time_limit_s=limit_s, seed=seed
    )
    plans = [row.plan for row in shared.jobs]
    rows = []
    for row, file, name, problem in zip(shared.jobs, files, names, problems, strict=True):
        if row.plan is not None:
            rows.append(row.model_copy(update={"plan": row.plan.model_copy(update={"job": name})}))
            continue
        throughput = idle_throughput(problem, devices, plans)  # on the devices that the other jobs leave
        if not throughput:
            reason = f"{file.name} waits: the others leave no device for it"
        else:
            reason = f"{file.name} waits: on what the others leave it would reach {throughput:.4g} mini-batches/s"
            if problem.min_throughput is not None:
                reason += f", below its min_throughput of {float(problem.min_throughput):g}"
        rows.append(row.model_copy(update={"waits": reason}))
    return shared.model_copy(update={"jobs": rows})
