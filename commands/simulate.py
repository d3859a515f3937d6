"""``ddltool simulate WORKLOAD.csv``: replay a workload on a cluster under scheduling policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from ddltool.commands.options import Json, Output, Seed

if TYPE_CHECKING:
    from ddltool.analyzers.scheduling.cluster import ClusterSpec
    from ddltool.analyzers.scheduling.job import JobSpec
    from ddltool.analyzers.scheduling.metrics import Summary
    from ddltool.analyzers.scheduling.recording import Recorder
    from ddltool.analyzers.scheduling.simulator import Options, Policy, SimulationResult
    from ddltool.analyzers.scheduling.truth import Application

_NODES, _JOBS = "Nodes that fail", "Jobs and their truth"
_SHOW, _SWEEP, _QUESTIONS = "Pictures", "Sweeps: workloads x policies x seeds", "Other questions"
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
    workloads: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Argument(
            metavar="WORKLOAD.csv",
            help="Columns name,time,application,num_replicas,batch_size; or a Philly (JSON) or Helios (CSV) trace. "
            "Several are a sweep.",
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
    power: Annotated[float, typer.Option(help="p of Pollux's fitness, -50 to 50: lower is fairer.")] = -1.0,
    react: Annotated[
        bool, typer.Option("--react", help="Also schedule whenever a job arrives or ends, or a node goes or comes.")
    ] = False,
    whole_seconds: Annotated[
        bool, typer.Option("--whole-seconds", help="End epochs at whole seconds, as the published simulator does.")
    ] = False,
    mtbf: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Mean time between failures of one node, such as 48h.", rich_help_panel=_NODES
        ),
    ] = "",
    repair: Annotated[
        str, typer.Option(metavar="TIME", help="How long a failed node is down.", rich_help_panel=_NODES)
    ] = "30m",
    checkpoint_interval: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Training between checkpoints; a failure undoes what came after.",
            rich_help_panel=_NODES,
        ),
    ] = "10m",
    failures: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            metavar="FILE.csv", help="Node events: time,node,event (fail, leave, join).", rich_help_panel=_NODES
        ),
    ] = None,
    failure_seed: Annotated[int, typer.Option(min=0, help="Seed of the drawn failures.", rich_help_panel=_NODES)] = 0,
    goodput: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            metavar="APP=FILE,noise=N,samples=N,batch=M0",
            help="A fitted goodput.json in place of traces; also max-batch=, max-local=; repeatable.",
            rich_help_panel=_JOBS,
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
            rich_help_panel=_JOBS,
        ),
    ] = None,
    sample: Annotated[
        str,
        typer.Option(
            metavar="jobs=N,hours=H", help="Of a cluster's trace: N jobs of its busiest H hours.", rich_help_panel=_JOBS
        ),
    ] = "",
    convert: Annotated[
        bool,
        typer.Option(
            "--convert", help="Write the trace as a workload to -o in place of replaying it.", rich_help_panel=_JOBS
        ),
    ] = False,
    picture: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            metavar="DIR", help="Draw completion times, allocations and one job's life.", rich_help_panel=_SHOW
        ),
    ] = None,
    picture_job: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NAME", help="Whose life: else the most restarted.", rich_help_panel=_SHOW),
    ] = None,
    picture_format: Annotated[str, typer.Option(help="png or svg.", rich_help_panel=_SHOW)] = "png",
    seeds: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, max=100_000, help="Replay each with seeds 0 to N-1.", rich_help_panel=_SWEEP),
    ] = None,
    jobs: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, max=4096, help="Local processes.", rich_help_panel=_SWEEP),
    ] = None,
    engine: Annotated[str, typer.Option(help="local, or ray: a Ray cluster.", rich_help_panel=_SWEEP)] = "local",
    csv: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--csv", metavar="FILE", help="One row per replay.", rich_help_panel=_SWEEP),
    ] = None,
    compare: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="A,B", help="Compare two policies in pairs, with intervals.", rich_help_panel=_SWEEP),
    ] = None,
    advise: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(
            metavar="JOBSTATE.yaml", help="Is a resize of this job worth its restart?", rich_help_panel=_QUESTIONS
        ),
    ] = None,
    autoscale: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="APP", help="Rent nodes for one job by goodput or by throughput.", rich_help_panel=_QUESTIONS
        ),
    ] = None,
    search: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--hyperparameter-search",
            metavar="APP",
            help="100 trials of this application under the policies.",
            rich_help_panel=_QUESTIONS,
        ),
    ] = None,
    local_batch: Annotated[
        str,
        typer.Option(
            metavar="N,...",
            help="With --hyperparameter-search: fixed samples per GPU of the baseline.",
            rich_help_panel=_QUESTIONS,
        ),
    ] = "128",
    seed: Seed = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Replay a workload on a cluster under one or more scheduling policies and compare completion times."""
    from ddltool.analyzers.scheduling.simulator import Options
    from ddltool.artifacts import check_writable, save
    from ddltool.commands.output import note, print_json
    from ddltool.commands.simulate_modes import Question, answer, sweep_mode, write_jobs
    from ddltool.commands.simulation_tables import show_classes, show_more
    from ddltool.commands.workload_inputs import read_failures, read_prices
    from ddltool.commands.workloads import read_cluster
    from ddltool.errors import InputError
    from ddltool.outputs import demand_distinct

    folders, files = list(traces or []), list(workloads or [])
    demand_distinct(
        [*files, cluster, failures, advise, *_models(goodput or []), *_trace_files(folders, output, csv)],
        {"-o": output, "--csv": csv},
    )
    for path in (output, csv):
        if path is not None:
            check_writable(path)
    asked = Question(advise=advise, autoscale=autoscale, search=search, local_batch=local_batch)
    if asked.count:
        makers = partial(policies, policy, power, restart_delay, seed)
        timing = Options(interval_s=interval, restart_delay_s=restart_delay)
        answer(asked, files, folders, cluster, makers, timing, output=output, as_json=as_json)
        return
    if generate is not None or convert:
        write_jobs(files, cluster, folders, generate, sample, seed, output, as_json)
        return
    if not files or cluster is None or not (folders or goodput):
        missing = "WORKLOAD.csv" if not files else "--cluster" if cluster is None else "--traces"
        raise InputError(missing, "is missing", "give WORKLOAD.csv, --cluster, and --traces or --goodput")
    machines = read_cluster(cluster)
    chosen = policies(policy, power, restart_delay, seed, mixed=len(machines.type_names) > 1)
    lost = read_failures(mtbf, repair, checkpoint_interval, failures, failure_seed, nodes=len(machines.gpus))
    options = Options(
        interval_s=interval,
        restart_delay_s=restart_delay,
        interference=interference,
        whole_seconds=whole_seconds,
        react=react,
        failures=lost,
    )
    if len(files) > 1 or seeds is not None or jobs is not None or csv is not None or compare or engine != "local":
        single = {
            "--goodput": goodput,
            "--price": price,
            "--metrics": metrics,
            "--sample": sample,
            "--picture": picture,
        }
        if used := [name for name, value in single.items() if value]:
            raise InputError(used[0], "has no part in a sweep", "leave it out, or replay one workload with one seed")
        sweep_mode(
            files,
            cluster,
            folders,
            list(chosen),
            range(seeds) if seeds is not None else [seed],
            options,
            power=power,
            jobs=jobs or 1,
            engine=engine,
            compare=compare,
            output=output,
            csv=csv,
            as_json=as_json,
        )
        return
    if picture is not None:
        from ddltool.commands.simulate_pictures import prepare_folder

        prepare_folder(picture, picture_format)
    elif picture_job is not None:
        raise InputError("--picture-job", "needs --picture", "give the folder for the pictures")
    prices = read_prices(price, machines)
    inputs = Inputs(files[0], folders, goodput or [], machines, sample, seed)
    watched = {name: _Watched(make) for name, make in chosen.items()} if picture is not None else {}
    cells = list(
        run_cells(
            {str(files[0]): inputs.jobs},
            inputs.applications,
            machines,
            {name: watched.get(name, make) for name, make in chosen.items()},
            options,
            prices=prices,
        )
    )
    document = inputs.document(cells, options, seed, prices)
    if output is not None:
        save(document, output)
        note(f"wrote {output}")
    if picture is not None:
        _draw(cells, watched, picture, picture_job, picture_format)
    if as_json:
        print_json(document)
        return
    show(document)
    if metrics or lost is not None or prices is not None:
        show_more(document)
    if metrics:
        show_classes(document)


def _models(texts: Sequence[str]) -> list[str]:
    """Return the files of ``--goodput APP=FILE,...``; what is none is refused where it is read."""
    return [text.partition(",")[0].partition("=")[2] or text for text in texts]


def _trace_files(folders: Sequence[Path], *outputs: Path | None) -> list[Path]:
    """Return the measured traces, where an output could be one of them."""
    if all(path is None or not path.exists() for path in outputs):
        return []
    return [path for folder in folders for path in folder.glob("*/*.csv")]


class Inputs:
    """What one replay reads: jobs, and the truth about their applications."""

    def __init__(
        self,
        workload: Path,
        folders: Sequence[Path],
        goodput: Sequence[str],
        machines: ClusterSpec,
        sample: str,
        seed: int,
    ) -> None:
        """Read everything, and tell on stderr what is assumed. Raises InputError."""
        from ddltool.commands.output import note
        from ddltool.commands.workload_inputs import read_fitted, read_jobs, read_templates
        from ddltool.commands.workloads import read_applications
        from ddltool.errors import InputError

        self.workload, self.machines = workload, machines
        self.jobs, self.remark = read_jobs(workload, lambda: read_templates(folders, machines), sample, seed)
        fitted, self.assumed = read_fitted(goodput)
        measured = [job.application for job in self.jobs if job.application not in fitted]
        if measured and not folders:
            raise InputError(
                "--traces", f"are missing for application {measured[0]!r}", "give --traces or --goodput for it"
            )
        self.truth = " and ".join([*(["measured traces"] if measured else []), *(["fitted models"] if fitted else [])])
        self.applications = fitted | read_applications(folders, measured)
        for text in filter(None, [self.remark, *self.assumed]):
            note(text)

    def document(
        self, cells: Sequence[Cell], options: Options, seed: int, prices: Mapping[str, float] | None
    ) -> dict[str, Any]:
        """Return the document (kind ``ddltool.simulation``) of all policies."""
        from ddltool.commands.simulation_tables import describe_failures

        return {
            "kind": "ddltool.simulation",
            "schema_version": 1,
            "workload": str(self.workload),
            "jobs": len(self.jobs),
            "gpus": self.machines.total_gpus,
            "interval_s": options.interval_s,
            "restart_delay_s": options.restart_delay_s,
            "interference": options.interference,
            "seed": seed,
            **({"failures": describe_failures(options.failures)} if options.failures is not None else {}),
            **({"prices_per_gpu_hour": prices} if prices is not None else {}),
            "truth": self.truth,
            **({"assumptions": self.assumed} if self.assumed else {}),
            **({"conversion": self.remark} if self.remark else {}),
            "policies": {cell.policy: describe(cell.result, cell.summary) for cell in cells},
        }


class _Watched:
    """Makes a policy whose last instance is remembered with what it gave to whom."""

    def __init__(self, make: Callable[[], Policy]) -> None:
        self._make = make
        self.recorder: Recorder | None = None

    def __call__(self) -> Policy:
        from ddltool.analyzers.scheduling.recording import Recorder

        self.recorder = Recorder(self._make())
        return self.recorder


def _draw(
    cells: Sequence[Cell], watched: Mapping[str, _Watched], folder: Path, job: str | None, file_format: str
) -> None:
    """Write the pictures and say where they are."""
    from ddltool.commands.output import note
    from ddltool.commands.simulate_pictures import write_pictures

    recorders = {name: each.recorder for name, each in watched.items() if each.recorder is not None}
    results = {cell.policy: cell.result for cell in cells}
    for path in write_pictures(folder, results, recorders, job=job, file_format=file_format):
        note(f"wrote {path}")


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
    from ddltool.commands.simulate_progress import replay_progress

    isolated = IsolatedTimes(applications, cluster)
    for jobs in workloads.values():
        for make in makers.values():
            check_runs(jobs, applications, cluster, make())
    for workload, jobs in workloads.items():
        for policy, make in makers.items():
            with replay_progress(policy, len(jobs)) as on_round:
                result = replay(jobs, applications, cluster, make(), options, on_round=on_round)
            summary = summarize(result, isolated, options.restart_delay_s, prices=prices)
            yield Cell(workload=workload, policy=policy, result=result, summary=summary)


def policies(
    names: str, power: float, delay_s: float, seed: int, *, mixed: bool = False
) -> dict[str, Callable[[], Policy]]:
    """Return what makes each policy of a comma-separated list, in its order.

    ``all`` leaves those out that know one GPU type only where the cluster is ``mixed``. Raises InputError for unknown
    names.
    """
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
    if "pollux" in wanted:
        Pollux(power=power)  # refuses a power before anything is replayed, in a sweep too
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
        "usage": _usage(result),
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


def _usage(result: SimulationResult, most: int = 500) -> dict[str, list[float]]:
    """Return the GPUs that are held from each time on; of many changes, as many, evenly spread."""
    rows = result.usage
    if len(rows) > most:
        rows = tuple(rows[round(place * (len(rows) - 1) / (most - 1))] for place in range(most))
    return {
        "time_s": [row.time_s for row in rows],
        "gpus": [row.gpus for row in rows],
        "jobs": [row.jobs for row in rows],
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
