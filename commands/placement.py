"""What ``plan`` does beyond one job on a bag of devices: nodes and a network, the current plan, several jobs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ddltool.analyzers.deciding.candidates import Settings
    from ddltool.analyzers.placement.jobs import JobsPlan
    from ddltool.analyzers.placement.problem import Problem
    from ddltool.job import Job
    from ddltool.plan import Plan

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


def est_plan(job: Job, job_file: Path, capabilities: Mapping[str, float], settings: Settings, wishes: Wishes) -> Plan:
    """Return the EST plan of a job: on nodes when it names a network, weighed against the current plan when one is given.

    Raises InputError for options that do not go together.
    """
    from ddltool.analyzers.deciding.compute import with_compute
    from ddltool.analyzers.placement.dealing import device_counts
    from ddltool.analyzers.placement.est import solve_est
    from ddltool.analyzers.placement.migration import weigh
    from ddltool.analyzers.placement.problem import from_job
    from ddltool.artifacts import load
    from ddltool.errors import InputError
    from ddltool.plan import Plan

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
        from ddltool.errors import InputError

        raise InputError("--prefer", f"{text!r} names no objective", "for example throughput,devices,price")
    return names


def _on_nodes(job: Job, job_file: Path, problem: Problem, settings: Settings) -> Plan:
    """Return the plan with synchronisation in its step."""
    from ddltool.analyzers.goodput.throughput import ThroughputParams
    from ddltool.analyzers.placement.network import NodeShape, solve_on_nodes
    from ddltool.artifacts import load
    from ddltool.errors import InputError
    from ddltool.goodput_model import Goodput
    from ddltool.job import Cluster

    if job.cluster is None or job.network is None:
        raise InputError(f"{job_file}:network", "needs cluster: beside it", "name the cluster.yaml with the nodes")
    cluster = load(job_file.parent / job.cluster, Cluster)
    shapes = [
        NodeShape(device_type=group.devices.type, devices=group.devices.count, nodes=group.count)
        for group in cluster.nodes
    ]
    params = ThroughputParams(**load(job_file.parent / job.network, Goodput).params.model_dump())
    return solve_on_nodes(problem, shapes, params, time_limit_s=settings.limit_s, seed=settings.seed)


def plan_together(
    files: Sequence[Path], *, sharing: str, limit_s: float, seed: int, devices_file: Path | None = None
) -> tuple[JobsPlan, dict[Path, str]]:
    """Return the plan of several jobs on the same devices, and why each job that waits does.

    There are as many devices of each type as the job that names most of them says.

    Raises InputError for job files with a network, which is not part of a joint plan.
    """
    from typing import cast

    from ddltool.analyzers.placement.jobs import LARGEST_WEIGHT, Sharing, idle_throughput, solve_jobs
    from ddltool.analyzers.placement.problem import from_job
    from ddltool.commands.plan_input import capabilities_of
    from ddltool.errors import Infeasible, InputError, did_you_mean, naming
    from ddltool.fixtures.loading import with_specs
    from ddltool.job import Job, read_job

    if sharing not in SHARING:
        raise InputError("--share", f"unknown rule {sharing!r}", did_you_mean(sharing, SHARING))
    problems, names, weights = [], [], []
    devices: dict[str, int] = {}
    for file in files:
        job = with_specs(read_job(file), str(file), devices_file)
        if job.network is not None:
            raise InputError(f"{file}:network", "is not part of a joint plan", "leave it out, or plan the job alone")
        if job.weight > LARGEST_WEIGHT:
            raise InputError(
                f"{file}:weight", f"is {job.weight:g}", f"give a number above 0, at most {LARGEST_WEIGHT:g}"
            )
        try:
            with naming(file, Job.model_fields):
                problem = from_job(job, capabilities_of(job, file.parent, str(file)))
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
    waiting = {}
    for file, problem, plan in zip(files, problems, made.plans, strict=True):
        if plan is None:
            reached = idle_throughput(problem, devices, made.plans)
            text = f"{file.name} waits: on what the others leave it would reach {reached:.4g} mini-batches/s"
            least = problem.min_throughput
            below = "" if least is None else f", below its min_throughput of {float(least):g}"
            waiting[file] = f"{text}{below}" if reached else f"{file.name} waits: the others leave no device for it"
    return made, waiting


def jobs_document(made: JobsPlan, files: Sequence[Path], waiting: Mapping[Path, str]) -> dict[str, Any]:
    """Return the JSON document of a joint plan."""
    return {
        "objective": made.objective,
        "value": made.value,
        "bound": made.bound,
        "gap": made.gap,
        "status": made.status,
        "solve_seconds": made.solve_seconds,
        "jobs": [
            {
                "file": str(file),
                "relative": relative,
                "plan": None if plan is None else plan.model_dump(mode="json"),
                "waits": waiting.get(file),
            }
            for file, relative, plan in zip(files, made.relative, made.plans, strict=True)
        ],
    }


def show_jobs(made: JobsPlan, files: Sequence[Path], waiting: Mapping[Path, str]) -> None:
    """Print who gets what."""
    from ddltool.commands.output import out, table
    from ddltool.units import show_seconds

    rows = []
    for file, plan, relative in zip(files, made.plans, made.relative, strict=True):
        if plan is None:
            rows.append((file.name, "waits", "-", "-", "0 %"))
            continue
        mix = ", ".join(f"{row.devices} {row.device_type} x {row.ests_per_device}" for row in plan.assignments)
        rows.append((file.name, mix, show_seconds(plan.iteration_s), f"{plan.throughput:.4g}", f"{relative:.1%}"))
    columns = ("job", "devices x ESTs", "step time", "throughput", "of alone")
    console = out()
    console.print(table(f"{len(rows)} jobs on the same devices (predicted)", columns, rows, text_columns=2))
    for reason in waiting.values():
        console.print(reason)
    what = (
        "weighted sum of throughputs relative to alone" if made.objective == "sum" else "smallest relative throughput"
    )
    console.print(f"{what}: {made.value:.4g}, at most {made.bound:.4g} possible (gap {made.gap:.2%})")
    console.print(f"solver      {made.status}, {made.solve_seconds:.3f} s")


def show_placement(made: Plan) -> None:
    """Print what a plan says about nodes and about leaving the current plan."""
    from ddltool.commands.output import out
    from ddltool.units import show_seconds

    console = out()
    if made.network is not None:
        cost = made.network
        console.print(
            f"nodes       {cost.choice}: {cost.num_replicas} devices on {cost.num_nodes}; computing "
            f"{show_seconds(cost.compute_s)}, synchronising {show_seconds(cost.sync_s)} (predicted)"
        )
        others = ", ".join(f"{name} {show_seconds(step)}" for name, step in cost.best_steps.items())
        console.print(f"best steps  {others}")
    if made.migration is not None:
        move = made.migration
        if move.current_throughput is None:
            console.print(f"current     is no longer possible: {move.devices_moved} devices change")
            return
        if not move.devices_moved and move.other_throughput <= move.current_throughput:
            console.print("current     stay: the current plan is the best")
            return
        gain = move.other_throughput / move.current_throughput - 1
        verdict = "stay with the current plan" if move.stay else f"move {move.devices_moved} devices"
        pays = "never" if move.pays_after_s is None else f"after {show_seconds(move.pays_after_s)}"
        console.print(
            f"current     {verdict}: the best plan is {gain:.1%} faster, moving takes "
            f"{show_seconds(move.migration_s)} and pays {pays} (horizon {show_seconds(move.horizon_s)})"
        )
