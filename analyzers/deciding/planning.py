"""From a job to its plan: by one strategy, by the best one, or together with other jobs. Start at :func:`solve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ddltool.analyzers.balancing.plan import StepCurve, plan_bsp, plan_lb_bsp
from ddltool.analyzers.barriers.superstep import plan_elastic_bsp
from ddltool.analyzers.communication.collectives import own_ring, plan_collectives, settings
from ddltool.analyzers.communication.order import tac, tic
from ddltool.analyzers.deciding.candidates import Settings
from ddltool.analyzers.deciding.communication import GraphCommunication
from ddltool.analyzers.deciding.compare import decide
from ddltool.analyzers.deciding.compute import with_compute
from ddltool.analyzers.deciding.feedback import combine
from ddltool.analyzers.deciding.rescaling import measured_speeds, with_run
from ddltool.analyzers.goodput.plan import plan_goodput
from ddltool.analyzers.loading.job_inputs import (
    Given,
    Tell,
    capabilities_of,
    fitted_models,
    knowledge_of,
    read_with_specs,
    run_of,
    step_curves,
)
from ddltool.analyzers.placement.dealing import device_counts
from ddltool.analyzers.placement.est import solve_est
from ddltool.analyzers.placement.jobs import LARGEST_WEIGHT, Sharing, idle_throughput, solve_jobs
from ddltool.analyzers.placement.migration import weigh
from ddltool.analyzers.placement.network import NodeShape, solve_on_nodes
from ddltool.analyzers.placement.problem import Problem, demand_throughput, from_job
from ddltool.artifacts import load
from ddltool.errors import Infeasible, InputError, did_you_mean, naming
from ddltool.goodput_model import Goodput
from ddltool.graph import RECV, Graph
from ddltool.job import Cluster, Job
from ddltool.plan import ParameterRecord, Plan
from ddltool.results import JointJob, JointPlan

SHARING = ("sum", "max-min")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What the command line asks of an EST plan beside the solver's settings."""

    prefer: str | None
    """Objectives in their order, separated by commas."""
    current_file: Path | None
    """The plan that runs now."""
    migration_s: float
    """Seconds that a move stops the job."""
    horizon_s: float
    """Seconds in which a move must pay."""


def solve(strategy: str, job: Job, job_file: Path, known: Given, wishes: Wishes) -> Plan:
    """Return the plan of one strategy, or of the best one. Raises InputError, and Infeasible, which names the job's file."""
    try:
        with naming(job_file, type(job).model_fields):
            return _solved(strategy, job, job_file, known, wishes)
    except Infeasible as error:
        raise Infeasible(f"{job_file}: {error}") from None


def _solved(strategy: str, job: Job, job_file: Path, known: Given, wishes: Wishes) -> Plan:
    """Return :func:`solve`'s plan. Raises InputError, Infeasible."""
    if strategy == "auto":
        # Several strategies call the solver, each with a share of the time.
        halved = replace(known.settings, limit_s=known.settings.limit_s / 2)
        return auto_plan(job, job_file, replace(known, settings=halved))
    if strategy == "goodput":
        made = goodput_plan(job, job_file)
        demand_throughput(made.throughput, job.constraints.min_throughput)
        return made
    capabilities = capabilities_of(job, job_file.parent, str(job_file), known.tell)
    if strategy == "est":
        return est_plan(job, job_file, capabilities, known.settings, wishes)
    return make_plan(job, capabilities, strategy, known.settings, curves=step_curves(job, job_file))


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
    if job.goodput is None:
        remedy = "add goodput: {max_batch_size: N, max_local_batch_size: N, noise_scale: PHI}"
        raise InputError(f"{job_file}:goodput", "is missing", remedy)
    models = fitted_models(job, job_file)
    if not models:
        problem = "no device has a fitted throughput model"
        raise InputError(f"{job_file}:devices", problem, "add goodput: goodput.json (made by ddltool fit) to a device")
    return plan_goodput(job, job.goodput, models)


def complete(made: Plan, job: Job, job_file: Path, graph: Graph | None) -> Plan:
    """Return a plan with its parameters in order, its data-parallel settings and the shape of its nodes, where known."""
    if graph is not None:
        settings = {} if made.decision is not None else data_parallel(graph, made)
        made = made.model_copy(update={"parameters": ordered_parameters(graph), **settings})
    return made.model_copy(update={"devices_per_node": _devices_per_node(job, job_file, made)})


def _devices_per_node(job: Job, job_file: Path, made: Plan) -> dict[str, int] | None:
    """Return how many devices of each used type stand on a node of the job's cluster; on unequal nodes, the fewest."""
    if job.cluster is None:
        return None
    used = {row.device_type for row in made.assignments}
    found: dict[str, int] = {}
    for group in load(job_file.parent / job.cluster, Cluster).nodes:
        name, count = group.devices.type, group.devices.count
        if name in used and count and group.count:
            found[name] = min(found.get(name, count), count)
    return found or None


def ordered_parameters(graph: Graph) -> list[ParameterRecord]:
    """Return the graph's parameters in the order in which they should travel: TAC's, or TIC's for an untimed graph."""
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


def data_parallel(graph: Graph, made: Plan) -> dict[str, Any]:
    """Return the DDP and FSDP2 settings for the plan's processes on the network that the graph was timed for."""
    ring = own_ring(graph, made.world_size)
    if ring is None or not graph.timed or made.world_size < 2:
        return {}
    plans = plan_collectives(graph, ring)
    if plans is None:
        return {}
    buckets, prefetch = settings(plans)
    return {"ddp": buckets, "fsdp2": prefetch}


def auto_plan(job: Job, job_file: Path, given: Given) -> Plan:
    """Return the picked plan with the comparison in ``decision``. Raises InputError, Infeasible."""
    run = run_of(given.telemetry)
    known = knowledge_of(job, job_file, given, run)
    speeds = None if run is None else measured_speeds(run, job.batch_size, known.curves)
    measured = {} if speeds is None else speeds.capabilities
    offered = {offer.type for offer in job.devices}
    unknown = sorted(set(measured) - offered)
    if unknown:
        problem = f"is of device {unknown[0]!r}, which the job does not offer"
        raise InputError(str(given.telemetry), problem, f"types there: {', '.join(sorted(offered))}")
    rest = job.model_copy(update={"devices": [offer for offer in job.devices if offer.type not in measured]})
    told = job if job.model or all(it.capability_per_s or it.profile or it.goodput for it in job.devices) else rest
    predicted = capabilities_of(told, job_file.parent, str(job_file), given.tell) if rest.devices else {}
    combined = combine(measured, predicted)
    capabilities = combined.capabilities
    factors = {name: predicted[name] / capabilities[name] for name in combined.errors}
    knowledge = replace(known, errors={**known.errors, **combined.errors}, remark=combined.remark)
    if run is not None and speeds is not None:
        knowledge = with_run(knowledge, run, {**factors, **speeds.factors})
    made = decide(
        job,
        from_job(job, capabilities),
        knowledge,
        objective=given.objective,
        settings=given.settings,
    )
    if given.graph is None and isinstance(knowledge.communication, GraphCommunication):
        made = made.model_copy(update={"parameters": ordered_parameters(knowledge.communication.graph)})
    if given.settings.top_k > 1 and made.strategy != "est":
        given.tell(f"note: --top-k lists EST plans; the plan picked is {made.strategy}")
    return with_compute(made, capabilities)


def est_plan(job: Job, job_file: Path, capabilities: Mapping[str, float], settings: Settings, wishes: Wishes) -> Plan:
    """Return the EST plan of a job: on nodes when it names a network, weighed against the current plan when one is given.

    Raises InputError for options that do not go together.
    """
    problem = from_job(job, capabilities)
    current = None if wishes.current_file is None else load(wishes.current_file, Plan)
    if job.network is not None:
        for option, given in (("--prefer", wishes.prefer), ("--current", wishes.current_file)):
            if given is not None:
                raise InputError(option, "does not go with network: in job.yaml", "leave out one of the two")
        return with_compute(_on_nodes(job, job_file, problem, settings), capabilities)
    names = {} if wishes.prefer is None else {"objective": _split(wishes.prefer)}
    made = solve_est(
        problem,
        top_k=settings.top_k,
        time_limit_s=settings.limit_s,
        seed=settings.seed,
        current=None if current is None else device_counts(current),
        **names,
    )
    if current is not None:
        made = weigh(problem, made, current, migration_s=wishes.migration_s, horizon_s=wishes.horizon_s)
    return with_compute(made, capabilities)


def _split(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise InputError("--prefer", f"{text!r} names no objective", "for example throughput,devices,price")
    return names


def _on_nodes(job: Job, job_file: Path, problem: Problem, settings: Settings) -> Plan:
    """Return the plan with synchronisation in its step."""
    if job.cluster is None or job.network is None:
        raise InputError(f"{job_file}:network", "needs cluster: beside it", "name the cluster.yaml with the nodes")
    cluster = load(job_file.parent / job.cluster, Cluster)
    shapes = [
        NodeShape(device_type=group.devices.type, devices=group.devices.count, nodes=group.count)
        for group in cluster.nodes
    ]
    params = load(job_file.parent / job.network, Goodput).params
    return solve_on_nodes(problem, shapes, params, time_limit_s=settings.limit_s, seed=settings.seed)


def plan_together(
    files: Sequence[Path], *, sharing: str, limit_s: float, seed: int, tell: Tell, devices_file: Path | None = None
) -> JointPlan:
    """Return the plan of several jobs on the same devices, and why each job that waits does.

    There are as many devices of each type as the job that names most of them says.

    Raises InputError for job files with a network, which is not part of a joint plan.
    """
    if sharing not in SHARING:
        raise InputError("--share", f"unknown rule {sharing!r}", did_you_mean(sharing, SHARING))
    problems, names, weights = [], [], []
    devices: dict[str, int] = {}
    for file in files:
        job = read_with_specs(file, devices_file)
        if job.network is not None:
            raise InputError(f"{file}:network", "is not part of a joint plan", "leave it out, or plan the job alone")
        if job.weight > LARGEST_WEIGHT:
            raise InputError(
                f"{file}:weight", f"is {job.weight:g}", f"give a number above 0, at most {LARGEST_WEIGHT:g}"
            )
        try:
            with naming(file, Job.model_fields):
                problem = from_job(job, capabilities_of(job, file.parent, str(file), tell))
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
    named = [
        None if plan is None else plan.model_copy(update={"job": name})
        for plan, name in zip(made.plans, names, strict=True)
    ]
    made = replace(made, plans=tuple(named))
    rows = []
    for file, problem, plan, relative in zip(files, problems, made.plans, made.relative, strict=True):
        waits = None
        if plan is None:
            reached = idle_throughput(problem, devices, made.plans)
            text = f"{file.name} waits: on what the others leave it would reach {reached:.4g} mini-batches/s"
            least = problem.min_throughput
            below = "" if least is None else f", below its min_throughput of {float(least):g}"
            waits = f"{text}{below}" if reached else f"{file.name} waits: the others leave no device for it"
        rows.append(JointJob(file=str(file), relative=relative, plan=plan, waits=waits))
    return JointPlan(
        objective=made.objective,
        value=made.value,
        bound=made.bound,
        gap=made.gap,
        status=made.status,
        solve_seconds=made.solve_seconds,
        jobs=rows,
    )
