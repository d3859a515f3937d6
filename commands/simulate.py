"""``ddltool simulate WORKLOAD.csv``: replay a workload on a cluster under scheduling policies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ddltool.commands.options import Json, Output, Seed

if TYPE_CHECKING:
    from ddltool.analyzers.scheduling.metrics import Summary
    from ddltool.analyzers.scheduling.simulator import Policy, SimulationResult

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
        Path, typer.Argument(metavar="WORKLOAD.csv", help="Columns name,time,application,num_replicas,batch_size.")
    ],
    cluster: Annotated[Path, typer.Option(metavar="CLUSTER.yaml", help="Nodes and their GPUs.")],
    traces: Annotated[
        list[Path], typer.Option(metavar="DIR", help="Measured traces, one folder per application; repeatable.")
    ],
    policy: Annotated[str, typer.Option(metavar="NAME[,NAME]", help=f"{', '.join(POLICIES)} or all.")] = "pollux",
    interval: Annotated[float, typer.Option(help="Seconds between scheduling rounds.")] = 60.0,
    restart_delay: Annotated[float, typer.Option(help="Seconds that a start or restart costs.")] = 30.0,
    interference: Annotated[
        float, typer.Option(help="Share of speed lost by jobs across nodes that share a node.")
    ] = 0.0,
    power: Annotated[float, typer.Option(help="p of Pollux's fitness: lower is fairer.")] = -1.0,
    react: Annotated[bool, typer.Option("--react", help="Also schedule whenever a job arrives or ends.")] = False,
    whole_seconds: Annotated[
        bool, typer.Option("--whole-seconds", help="End epochs at whole seconds, as the published simulator does.")
    ] = False,
    seed: Seed = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Replay a workload on a cluster under one or more scheduling policies and compare completion times."""
    from ddltool.analyzers.scheduling.metrics import IsolatedTimes, summarize
    from ddltool.analyzers.scheduling.simulator import Options, check_runs
    from ddltool.analyzers.scheduling.simulator import simulate as replay
    from ddltool.artifacts import check_writable, save
    from ddltool.commands.output import note, print_json
    from ddltool.commands.workloads import read_applications, read_cluster, read_workload

    machines = read_cluster(cluster)
    makers = policies(policy, power, restart_delay, seed, mixed=len(machines.type_names) > 1)
    if output is not None:
        check_writable(output)
    options = Options(
        interval_s=interval,
        restart_delay_s=restart_delay,
        interference=interference,
        whole_seconds=whole_seconds,
        react=react,
    )
    jobs = read_workload(workload)
    applications = read_applications(traces, [job.application for job in jobs])
    isolated = IsolatedTimes(applications, machines)
    for make in makers.values():
        check_runs(jobs, applications, machines, make())
    records = {}
    for name, make in makers.items():
        result = replay(jobs, applications, machines, make(), options)
        records[name] = describe(result, summarize(result, isolated, restart_delay))
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
        "policies": records,
    }
    if output is not None:
        save(document, output)
        note(f"wrote {output}")
    if as_json:
        print_json(document)
    else:
        show(document)


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
    """Return the record of one policy."""
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
            }
            for job, fairness in zip(result.jobs, summary.fairness, strict=True)
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
    title = f"{document['jobs']} jobs on {document['gpus']} GPUs, seconds (simulated from measured traces)"
    caption = "worst: largest finish-time fairness; fair: share of jobs below 1; moves: restarts"
    out().print(table(title, columns, rows, caption=caption))
