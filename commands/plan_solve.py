"""From a job to its plan by a strategy's name. Start at :func:`solve`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddltool.analyzers.balancing.plan import StepCurve
    from ddltool.analyzers.deciding.candidates import Settings
    from ddltool.commands.decide import Given
    from ddltool.commands.placement import Wishes
    from ddltool.graph import Graph
    from ddltool.job import Job
    from ddltool.plan import Plan


def solve(strategy: str, job: Job, job_file: Path, known: Given, wishes: Wishes) -> Plan:
    """Return the plan of one strategy, or of the best one. Raises InputError, and Infeasible, which names the job's file."""
    from ddltool.errors import Infeasible, naming

    try:
        with naming(job_file, type(job).model_fields):
            return _solved(strategy, job, job_file, known, wishes)
    except Infeasible as error:
        raise Infeasible(f"{job_file}: {error}") from None


def _solved(strategy: str, job: Job, job_file: Path, known: Given, wishes: Wishes) -> Plan:
    """Return :func:`solve`'s plan. Raises InputError, Infeasible."""
    from ddltool.analyzers.placement.problem import demand_throughput
    from ddltool.commands.decide import auto_plan
    from ddltool.commands.placement import est_plan
    from ddltool.commands.plan_input import capabilities_of, step_curves

    if strategy == "auto":
        # Several strategies call the solver, each with a share of the time.
        halved = replace(known.settings, limit_s=known.settings.limit_s / 2)
        return auto_plan(job, job_file, replace(known, settings=halved))
    if strategy == "goodput":
        made = goodput_plan(job, job_file)
        demand_throughput(made.throughput, job.constraints.min_throughput)
        return made
    capabilities = capabilities_of(job, job_file.parent, str(job_file))
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
    from ddltool.analyzers.balancing.plan import plan_bsp, plan_lb_bsp
    from ddltool.analyzers.barriers.superstep import plan_elastic_bsp
    from ddltool.analyzers.deciding.compute import with_compute
    from ddltool.analyzers.placement.est import solve_est
    from ddltool.analyzers.placement.problem import demand_throughput, from_job

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


def complete(made: Plan, job: Job, job_file: Path, graph: Graph | None) -> Plan:
    """Return a plan with its parameters in order, its data-parallel settings and the shape of its nodes, where known."""
    from ddltool.commands.plan_input import data_parallel, ordered_parameters

    if graph is not None:
        settings = {} if made.decision is not None else data_parallel(graph, made)
        made = made.model_copy(update={"parameters": ordered_parameters(graph), **settings})
    return made.model_copy(update={"devices_per_node": _devices_per_node(job, job_file, made)})


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
