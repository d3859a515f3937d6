"""``ddltool simulate WORKLOAD.csv``: replay a workload on a cluster under scheduling policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from ddltool.commands.options import Json, Output, Seed

if TYPE_CHECKING:
    from ddltool.analyzers.scheduling.cluster import ClusterSpec
    from ddltool.analyzers.scheduling.job import JobSpec
    from ddltool.analyzers.scheduling.metrics import Summary
    from ddltool.analyzers.scheduling.simulator import Options, Policy, SimulationResult
    from ddltool.analyzers.scheduling.truth import Application

POLICIES = (
    "fifo",
    "tiresias",
    "optimus",
    "pollux",
    "srtf",
    "easyscale-homo",
    "easyscale-heter",
    "sia",
    "ours",
)


def simulate(
    workload: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Argument(
            metavar="WORKLOAD.csv",
            help="Columns name,time,application,num_replicas,batch_size; or a Philly (JSON) or Helios (CSV) trace.",
        ),
    ] = None,
    cluster: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="CLUSTER.yaml", help="Nodes and their GPUs."),
    ] = None,
    traces: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(metavar="DIR", help="Measured traces, one folder per application; repeatable."),
    ] = None,
    policy: Annotated[str, typer.Option(metavar="NAME[,NAME]", help=f"{', '.join(POLICIES)} or all.")] = "pollux",
    interval: Annotated[float, typer.Option(help="Seconds between scheduling rounds.")] = 60.0,
    restart_delay: Annotated[float, typer.Option(help="Seconds that a start or restart costs.")] = 30.0,
    interference: Annotated[
        float, typer.Option(help="Share of speed lost by jobs across nodes that share a node.")
    ] = 0.0,
    power: Annotated[float, typer.Option(help="p of Pollux's fitness: lower is fairer.")] = -1.0,
    react: Annotated[
        bool, typer.Option("--react", help="Also schedule whenever a job arrives or ends, or a node goes or comes.")
    ] = False,
    whole_seconds: Annotated[
        bool, typer.Option("--whole-seconds", help="End epochs at whole seconds, as the published simulator does.")
    ] = False,
    mtbf: Annotated[
        str, typer.Option(metavar="TIME", help="Mean time between failures of one node, such as 48h.")
    ] = "",
    repair: Annotated[str, typer.Option(metavar="TIME", help="How long a failed node is down.")] = "30m",
    checkpoint_interval: Annotated[
        str, typer.Option(metavar="TIME", help="Training between checkpoints; a failure undoes what came after.")
    ] = "10m",
    failures: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE.csv", help="Node events: time,node,event (fail, leave, join)."),
    ] = None,
    failure_seed: Annotated[int, typer.Option(min=0, help="Seed of the drawn failures.")] = 0,
    goodput: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            metavar="APP=FILE,noise=N,samples=N,batch=M0",
            help="A fitted goodput.json in place of traces; also max-batch=, max-local=; repeatable.",
        ),
    ] = None,
    price: Annotated[str, typer.Option(metavar="PRICE|TYPE=PRICE,...", help="Price of a GPU hour.")] = "",
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Also print waits, useful GPU time, losses, and figures by size class.")
    ] = False,
    generate: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="jobs=160,hours=8,pattern=diurnal",
            help="Write a synthetic workload to -o: pattern constant, poisson or diurnal; also seed=.",
        ),
    ] = None,
    sample: Annotated[
        str, typer.Option(metavar="jobs=N,hours=H", help="Of a cluster's trace: N jobs of its busiest H hours.")
    ] = "",
    convert: Annotated[
        bool, typer.Option("--convert", help="Write the trace as a workload to -o in place of replaying it.")
    ] = False,
    seed: Seed = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Replay a workload on a cluster under one or more scheduling policies and compare completion times."""
    from ddltool.analyzers.scheduling.simulator import Options
    from ddltool.artifacts import check_writable, save
    from ddltool.commands.output import note, print_json
    from ddltool.commands.simulation_tables import describe_failures, show_classes, show_more
    from ddltool.commands.workload_inputs import read_failures, read_fitted, read_jobs, read_prices, read_templates
    from ddltool.commands.workloads import read_applications, read_cluster
    from ddltool.errors import InputError

    folders = list(traces or [])
    if output is not None:
        check_writable(output)
    if generate is not None or convert:
        _write_jobs(workload, cluster, folders, generate, sample, seed, output, as_json)
        return
    if workload is None or cluster is None or not (folders or goodput):
        missing = "WORKLOAD.csv" if workload is None else "--cluster" if cluster is None else "--traces"
        raise InputError(missing, "is missing", "give WORKLOAD.csv, --cluster, and --traces or --goodput")
    machines = read_cluster(cluster)
    makers = policies(policy, power, restart_delay, seed, mixed=len(machines.type_names) > 1)
    lost = read_failures(mtbf, repair, checkpoint_interval, failures, failure_seed)
    options = Options(
        interval_s=interval,
        restart_delay_s=restart_delay,
        interference=interference,
        whole_seconds=whole_seconds,
        react=react,
        failures=lost,
    )
    prices = read_prices(price, machines)
    jobs, remark = read_jobs(workload, lambda: read_templates(folders, machines), sample, seed)
    fitted, assumed = read_fitted(goodput or [])
    measured = [job.application for job in jobs if job.application not in fitted]
    if measured and not folders:
        raise InputError(
            "--traces", f"are missing for application {measured[0]!r}", "give --traces or --goodput for it"
        )
    applications = fitted | read_applications(folders, measured)
    for text in filter(None, [remark, *assumed]):
        note(text)
    records = {
        cell.policy: describe(cell.result, cell.summary)
        for cell in run_cells({str(workload): jobs}, applications, machines, makers, options, prices=prices)
    }
    document = {
        "kind": "ddltool.simulation",
        "schema_version": 1,
        "workload": str(workload),
        "jobs": len(jobs),
        "gpus": machines.total_gpus,
        "interval_s": interval,
        "restart_delay_s": restart_delay,
        "interference": interference,
        "seed": seed,
        **({"failures": describe_failures(lost)} if lost is not None else {}),
        **({"prices_per_gpu_hour": prices} if prices is not None else {}),
        "truth": " and ".join([*(["measured traces"] if measured else []), *(["fitted models"] if fitted else [])]),
        **({"assumptions": assumed} if assumed else {}),
        **({"conversion": remark} if remark else {}),
        "policies": records,
    }
    if output is not None:
        save(document, output)
        note(f"wrote {output}")
    if as_json:
        print_json(document)
        return
    show(document)
    if metrics or lost is not None or prices is not None:
        show_more(document)
    if metrics:
        show_classes(document)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One workload replayed under one policy."""

    workload: str
    policy: str
    result: SimulationResult
    summary: Summary


def run_cells(
    workloads: Mapping[str, Sequence[JobSpec]],
    applications: dict[str, Application],
    cluster: ClusterSpec,
    makers: Mapping[str, Callable[[], Policy]],
    options: Options,
    *,
    prices: Mapping[str, float] | None = None,
) -> Iterator[Cell]:
    """Yield every workload under every policy, workloads outermost, each as soon as it is there.

    Every pair is checked before the first is replayed: InputError for jobs that can never run on the cluster.
    """
    from ddltool.analyzers.scheduling.metrics import IsolatedTimes, summarize
    from ddltool.analyzers.scheduling.simulator import check_runs
    from ddltool.analyzers.scheduling.simulator import simulate as replay

    isolated = IsolatedTimes(applications, cluster)
    for jobs in workloads.values():
        for make in makers.values():
            check_runs(jobs, applications, cluster, make())
    for workload, jobs in workloads.items():
        for policy, make in makers.items():
            result = replay(jobs, applications, cluster, make(), options)
            summary = summarize(result, isolated, options.restart_delay_s, prices=prices)
            yield Cell(workload=workload, policy=policy, result=result, summary=summary)


def _write_jobs(
    workload: Path | None,
    cluster: Path | None,
    folders: Sequence[Path],
    generate: str | None,
    sample: str,
    seed: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Write a synthetic or converted workload as CSV to ``output``, by default to standard output."""
    from dataclasses import asdict

    from ddltool.analyzers.scheduling.generator import generate as make
    from ddltool.commands.output import note, print_json
    from ddltool.commands.workload_inputs import read_jobs, read_pattern, read_templates, write_workload
    from ddltool.commands.workloads import read_cluster
    from ddltool.errors import InputError

    machines = read_cluster(cluster) if cluster is not None else None
    if generate is not None:
        if workload is not None:
            raise InputError("--generate", f"and the workload {workload} are two", "give one of them")
        pattern = read_pattern(generate, seed=seed)
        fields = ",".join(f"{key}={value}" for key, value in asdict(pattern).items())
        jobs, source = make(pattern, read_templates(folders, machines)), f"synthetic: {fields}"
        remark = source
    else:
        if workload is None:
            raise InputError("--convert", "needs a trace", "give a Philly (JSON) or Helios (CSV) trace")
        jobs, remark = read_jobs(workload, lambda: read_templates(folders, machines), sample, seed)
        if not remark:
            raise InputError(str(workload), "is a workload already", "give a Philly (JSON) or Helios (CSV) trace")
        source = f"{workload.name}; applications drawn by size class, {sample or 'all jobs'}, seed={seed}"
    if as_json:
        if output is not None:
            write_workload(jobs, source, output)
        print_json(
            {"kind": "ddltool.workload", "schema_version": 1, "source": remark, "jobs": [asdict(job) for job in jobs]}
        )
        return
    write_workload(jobs, source, output or Path("-"))
    note(f"{remark}; wrote {len(jobs)} jobs to {output or 'standard output'}")


def policies(
    names: str, power: float, delay_s: float, seed: int, *, mixed: bool = False
) -> dict[str, Callable[[], Policy]]:
    """Return what makes each policy of a comma-separated list, in its order.

    ``all`` leaves those out that know one GPU type only where the cluster is ``mixed``. Raises InputError for unknown
    names.
    """
    from functools import partial

    from ddltool.analyzers.scheduling.cluster import MIXED_POLICIES
    from ddltool.analyzers.scheduling.easyscale import EasyScale
    from ddltool.analyzers.scheduling.fifo import Fifo
    from ddltool.analyzers.scheduling.optimus import Optimus
    from ddltool.analyzers.scheduling.ours import Ours
    from ddltool.analyzers.scheduling.pollux import Pollux
    from ddltool.analyzers.scheduling.sia import Sia
    from ddltool.analyzers.scheduling.srtf import Srtf
    from ddltool.analyzers.scheduling.tiresias import Tiresias
    from ddltool.errors import InputError, did_you_mean

    known: dict[str, Callable[[], Policy]] = {
        "fifo": Fifo,
        "tiresias": Tiresias,
        "optimus": Optimus,
        "pollux": partial(Pollux, power=power, delay_s=delay_s, seed=seed),
        "srtf": Srtf,
        "easyscale-homo": partial(EasyScale, heterogeneous=False),
        "easyscale-heter": EasyScale,
        "sia": partial(Sia, delay_s=delay_s),
        "ours": partial(Ours, delay_s=delay_s, seed=seed),
    }
    everything = [name for name in known if name in MIXED_POLICIES or not mixed]
    wanted = everything if names == "all" else [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in known:
            raise InputError("--policy", f"unknown policy {name!r}", did_you_mean(name, [*known, "all"]))
    if not wanted:
        raise InputError("--policy", "names no policy", did_you_mean(names, known))
    return {name: known[name] for name in wanted}


def describe(result: SimulationResult, summary: Summary) -> dict[str, Any]:
    """Return the record of one policy; jobs say their failures and cost where there can be any."""
    from ddltool.commands.simulation_tables import describe_more

    struck = summary.node_failures > 0 or summary.job_failures > 0
    costs = summary.job_costs or (None,) * len(result.jobs)
    return {
        "avg_jct_s": summary.avg_jct_s,
        "median_jct_s": summary.median_jct_s,
        "p99_jct_s": summary.p99_jct_s,
        "makespan_s": summary.makespan_s,
        "avg_queueing_s": summary.avg_queueing_s,
        "utilization": summary.utilization,
        "restarts": summary.restarts,
        "finish_time_fairness": {"max": summary.worst_fairness, "share_below_1": summary.share_below_1},
        "avg_jct_by_application_s": dict(summary.by_application),
        **describe_more(summary),
        "rounds": result.rounds,
        "wall_seconds": result.wall_seconds,
        "policy_cpu_seconds": result.policy_seconds,
        "jobs": [
            {
                "name": job.name,
                "application": job.application,
                "submit_s": job.submit_s,
                "start_s": job.first_start_s,
                "finish_s": job.finish_s,
                "jct_s": job.jct_s,
                "restarts": job.restarts,
                "gpu_seconds": job.gpu_seconds,
                "finish_time_fairness": fairness,
                **({"failures": job.failures, "lost_gpu_seconds": job.lost_gpu_seconds} if struck else {}),
                **({"cost": cost} if cost is not None else {}),
            }
            for job, fairness, cost in zip(result.jobs, summary.fairness, costs, strict=True)
        ],
    }


def show(document: dict[str, Any]) -> None:
    """Print one row per policy."""
    from ddltool.commands.output import out, table

    rows = [
        [
            name,
            f"{record['avg_jct_s']:,.0f}",
            f"{record['p99_jct_s']:,.0f}",
            f"{record['makespan_s']:,.0f}",
            f"{record['utilization']:.0%}",
            f"{record['finish_time_fairness']['max']:.2f}",
            f"{record['finish_time_fairness']['share_below_1']:.0%}",
            str(record["restarts"]),
        ]
        for name, record in document["policies"].items()
    ]
    columns = ("", "avg JCT", "p99", "makespan", "used", "worst", "fair", "moves")
    title = f"{document['jobs']} jobs on {document['gpus']} GPUs, seconds (simulated from {document['truth']})"
    caption = "worst: largest finish-time fairness; fair: share of jobs below 1; moves: restarts"
    out().print(table(title, columns, rows, caption=caption))
