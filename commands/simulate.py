"""``ddltool simulate WORKLOAD.csv``: replay a workload on a cluster under scheduling policies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ddltool.analyzers.reporting.simulation_section import simulation_section
from ddltool.analyzers.reporting.sweep_section import advice_section, autoscaling_section, search_section, sweep_section
from ddltool.analyzers.scheduling.advise import advise_job
from ddltool.analyzers.scheduling.autoscale import autoscale as rent
from ddltool.analyzers.scheduling.cluster import ClusterSpec
from ddltool.analyzers.scheduling.failures import Failures
from ddltool.analyzers.scheduling.generator import Pattern
from ddltool.analyzers.scheduling.inputs import (
    FittedModel,
    generated,
    read_applications,
    read_cluster,
    read_events,
    read_jobs,
    read_templates,
    workload_csv,
)
from ddltool.analyzers.scheduling.metrics import check_prices
from ddltool.analyzers.scheduling.policies import POLICIES, policies
from ddltool.analyzers.scheduling.replay import search_trials, study, watched
from ddltool.analyzers.scheduling.simulator import Options
from ddltool.analyzers.scheduling.sweep import Setup, sweep
from ddltool.analyzers.scheduling.sweep import compare as compare_policies
from ddltool.analyzers.scheduling.truth import FittedJob
from ddltool.artifacts import write_text
from ddltool.commands.options import Json, Output, Seed, demand_part, is_given, one_of, some_of
from ddltool.commands.output import finish, note, print_json, progress, show
from ddltool.commands.values import as_options, integers
from ddltool.errors import CheckFailed, InputError, did_you_mean
from ddltool.outputs import check_outputs
from ddltool.simulation_results import TrialSearch, WorkloadResult
from ddltool.units import parse_duration

_on_nodes = partial(typer.Option, rich_help_panel="Nodes that fail")
_on_jobs = partial(typer.Option, rich_help_panel="Jobs: fitted, generated, from clusters' traces")
_on_sweeps = partial(typer.Option, rich_help_panel="Sweeps: workloads x policies x seeds")
_on_questions = partial(typer.Option, rich_help_panel="Other questions")
_File = Path | None
_Files = list[Path] | None
_Text = str | None
_Count = int | None

# What the library calls these options in its errors.
_OPTIONS = {
    name: f"--{name.replace(' ', '-')}"
    for name in ("interval", "restart delay", "interference", "power", "mtbf", "repair", "checkpoint interval")
}
_ALWAYS = {"output", "as_json", "seed"}
_REPLAY = _ALWAYS.union(
    ("workloads", "cluster", "traces", "goodput", "policy", "power", "price"),
    ("interval", "restart_delay", "interference", "react", "whole_seconds"),
    ("mtbf", "repair", "checkpoint_interval", "failures", "failure_seed"),
)
_SWEEP = {"seeds", "jobs", "engine", "csv", "compare"}
# By the parameter that asks for it: how the mode is called, and the parameters that it reads besides these always read.
_MODES: Mapping[str, tuple[str, Collection[str]]] = {
    "advise": ("--advise", ()),
    "autoscale": ("--autoscale", ("traces", "restart_delay")),
    "search": (
        "--hyperparameter-search",
        ("traces", "cluster", "policy", "power", "interval", "restart_delay", "local_batch"),
    ),
    "generate": ("--generate", ("traces", "cluster")),
    "convert": ("--convert", ("workloads", "traces", "cluster", "sample")),
}


@as_options(_OPTIONS)
def simulate(
    context: typer.Context,
    workloads: Annotated[
        _Files,
        typer.Argument(
            metavar="WORKLOAD.csv",
            help="Columns name, time, application, num_replicas, batch_size; or the trace of a cluster "
            "(Philly, Helios, Acme, Alibaba). Several are a sweep.",
        ),
    ] = None,
    cluster: Annotated[
        _File, typer.Option(metavar="CLUSTER.yaml", help="Nodes and their GPUs; needed for a replay.")
    ] = None,
    traces: Annotated[
        _Files, typer.Option(metavar="DIR", help="Folder with one folder of measurements per application; repeatable.")
    ] = None,
    policy: Annotated[str, typer.Option(**some_of(*POLICIES, "all", help="Which to replay."))] = "pollux",
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
    mtbf: Annotated[str, _on_nodes(metavar="TIME", help="Mean time between failures of one node, such as 48h.")] = "",
    repair: Annotated[str, _on_nodes(metavar="TIME", help="How long a failed node is down.")] = "30m",
    checkpoint_interval: Annotated[
        str, _on_nodes(metavar="TIME", help="Training between checkpoints; a failure undoes what came after.")
    ] = "10m",
    failures: Annotated[
        _File, _on_nodes(metavar="FILE.csv", help="Node events: time,node,event (fail, leave, join).")
    ] = None,
    failure_seed: Annotated[int, _on_nodes(min=0, help="Seed of the drawn failures.")] = 0,
    goodput: Annotated[
        list[str] | None,
        _on_jobs(
            metavar="APP=FILE,noise=N,...",
            help="A fitted goodput.json in place of an application's traces; needs noise=, samples= and batch= (M0); "
            "also max-batch=, max-local=; repeatable.",
        ),
    ] = None,
    price: Annotated[str, typer.Option(metavar="PRICE|TYPE=PRICE,...", help="Price of a GPU hour.")] = "",
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Also print waits, use and losses, size classes, load over time and jobs.")
    ] = False,
    generate: Annotated[
        _Text,
        _on_jobs(
            metavar="jobs=N,hours=H,...",
            help="Write a synthetic workload to -o; also pattern= constant, poisson or diurnal, and seed=.",
        ),
    ] = None,
    sample: Annotated[
        str, _on_jobs(metavar="jobs=N,hours=H", help="Of a cluster's trace: N jobs of its busiest H hours.")
    ] = "",
    convert: Annotated[
        bool, _on_jobs("--convert", help="Write the trace as a workload to -o in place of replaying it.")
    ] = False,
    seeds: Annotated[_Count, _on_sweeps(min=1, max=100_000, help="Replay each with seeds 0 to N-1.")] = None,
    jobs: Annotated[_Count, _on_sweeps(min=1, max=4096, help="Local processes.")] = None,
    engine: Annotated[str, _on_sweeps(**one_of("local", "ray", help="ray: a Ray cluster."))] = "local",
    csv: Annotated[_File, _on_sweeps("--csv", metavar="FILE", help="One row per replay.")] = None,
    compare: Annotated[_Text, _on_sweeps(metavar="A,B", help="Compare two policies in pairs, with intervals.")] = None,
    advise: Annotated[
        _File, _on_questions(metavar="JOBSTATE.yaml", help="Is a resize of this job worth its restart?")
    ] = None,
    autoscale: Annotated[
        _Text, _on_questions(metavar="APP", help="Rent nodes for one job by goodput or by throughput.")
    ] = None,
    search: Annotated[
        _Text,
        _on_questions(
            "--hyperparameter-search", metavar="APP", help="100 trials of this application under the policies."
        ),
    ] = None,
    local_batch: Annotated[
        str, _on_questions(metavar="N,...", help="With --hyperparameter-search: fixed samples per GPU of the baseline.")
    ] = "128",
    seed: Seed = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Replay a workload on a cluster under one or more scheduling policies and compare completion times."""

    _check_mode(context)
    _check_partners(context)
    files, folders, models = list(workloads or []), list(traces or []), _fitted(goodput or [])
    read = [*files, cluster, failures, advise, *(model.file for model in models)]
    if output or csv:
        read += [path for folder in folders for path in folder.glob("*/*.csv")]
    check_outputs(read, {"-o": output, "--csv": csv})
    machines = read_cluster(cluster) if cluster is not None else None
    if generate is not None or convert:
        if generate is not None:
            with _inside("--generate"):
                fields = _fields(generate, "--generate", {"jobs": int, "hours": float, "pattern": str, "seed": int})
                found = generated(Pattern(**{"seed": seed} | fields), folders, machines)
        else:
            found = _converted(files, folders, machines, sample, seed)
        _write_workload(found, output, as_json)
        return
    tell = partial(finish, output=output, as_json=as_json)
    if advise is not None:
        advice = advise_job(advise)
        tell(advice, lambda: advice_section(advice))
        return
    timing = Options(interval_s=interval, restart_delay_s=restart_delay)
    for option, application in (("--autoscale", autoscale), ("--hyperparameter-search", search)):
        if application == "":
            raise InputError(option, "the application's name is empty", "name one that has a folder in --traces")
        if application is not None and not folders:
            raise InputError("--traces", "is missing", "give the folder of measured applications")
    if autoscale is not None:
        with progress(f"{autoscale} under 5 scaling rules"):
            job = read_applications(folders, [autoscale])[autoscale]
            scaled = rent(job, restart_delay_s=timing.restart_delay_s)
        tell(scaled, lambda: autoscaling_section(scaled))
        return
    if machines is None and search is not None:
        raise InputError("--cluster", "is missing", "give the nodes that the trials share")
    if search is None and (not files or machines is None or not (folders or models)):
        missing = "WORKLOAD.csv" if not files else "--cluster" if cluster is None else "--traces"
        raise InputError(missing, "is missing", "give WORKLOAD.csv, --cluster, and --traces or --goodput")
    assert machines is not None
    assert cluster is not None
    makers = policies(policy, power, restart_delay, seed, mixed=len(machines.type_names) > 1)
    if search is not None:
        first, *others = integers(local_batch, "--local-batch", ordered=False)  # the first is the baseline
        asked = TrialSearch(application=search, local_batch_size=first)
        watch = partial(watched, stage=progress, jobs=asked.trials)
        measured = read_applications(folders, [search])
        trials = search_trials(asked, measured, machines, makers, timing, local_batch_sizes=others, watch=watch)
        tell(trials, lambda: search_section(trials))
        return
    options = Options(
        interval_s=interval,
        restart_delay_s=restart_delay,
        interference=interference,
        whole_seconds=whole_seconds,
        react=react,
        failures=_failures(mtbf, repair, checkpoint_interval, failures, failure_seed, nodes=len(machines.gpus)),
    )
    prices = _prices(price, machines)
    if _is_sweep(context):
        setup = Setup(cluster=cluster, traces=folders, options=options, models=models, prices=prices, power=power)
        asked_seeds = range(seeds) if seeds is not None else [seed]
        _sweep(files, setup, list(makers), asked_seeds, jobs or 1, engine, compare, output, csv, as_json)
        return
    drawn = _sampling(sample)
    made = study(
        files[0],
        machines,
        makers,
        options,
        folders=folders,
        models=models,
        prices=prices,
        seed=seed,
        jobs=drawn.get("jobs"),
        hours=drawn.get("hours"),
        sample_seed=drawn.get("seed"),
        tell=note,
        stage=progress,
    )
    tell(made, lambda: simulation_section(made, files[0].name, details=metrics))


# What was asked for, and which options have a part in that.


def _is_sweep(context: typer.Context) -> bool:
    """Return whether several replays are asked for."""
    return len(context.params["workloads"] or ()) > 1 or any(is_given(context, name) for name in _SWEEP)


def _check_mode(context: typer.Context) -> None:
    """Raise InputError for the first option on the command line that what was asked for does not read."""
    for name, (mode, allowed) in _MODES.items():
        if is_given(context, name):
            demand_part(context, mode, {*_ALWAYS, name, *allowed})
            return
    if _is_sweep(context):
        remedy = "leave it out, or replay one workload with one seed"
        demand_part(context, "a sweep", _REPLAY | _SWEEP, instead=remedy)
        return
    demand_part(context, "a replay", {*_REPLAY, "metrics", "sample"})


def _check_partners(context: typer.Context) -> None:
    """Raise InputError for an option that is read with another one only, which is not there."""
    drawn, fails = is_given(context, "mtbf"), is_given(context, "failures")
    for name in ("repair", "failure_seed"):
        if is_given(context, name) and not drawn:
            remedy = "events say themselves when a node is back" if fails else "say how often nodes fail"
            raise InputError(f"--{name.replace('_', '-')}", "needs --mtbf", remedy)
    if is_given(context, "checkpoint_interval") and not (drawn or fails):
        raise InputError("--checkpoint-interval", "needs --mtbf or --failures", "say how often nodes fail")
    if is_given(context, "seeds") and is_given(context, "seed"):
        problem = f"has no part beside --seeds, which takes the seeds 0 to {context.params['seeds'] - 1}"
        raise InputError("--seed", problem, "give one of the two")
    names = {name.strip() for name in context.params["policy"].split(",")}
    if is_given(context, "power") and names <= {*POLICIES} - {"pollux"}:
        problem = f"has no part in --policy {context.params['policy']}"
        raise InputError("--power", problem, "leave it out, or replay pollux, which alone reads it")


# The texts that options take.


def _fields(text: str, where: str, readers: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Return the values of ``key=value,key=value``. Raises InputError for unknown or repeated keys and bad values."""
    made: dict[str, Any] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or key not in readers:
            raise InputError(where, f"unknown field {part!r}", f"KEY=VALUE; {did_you_mean(key, readers)}")
        if key in made:
            raise InputError(where, f"gives {key} twice", "give it once")
        try:
            made[key] = readers[key](value)
        except (ValueError, OverflowError):
            kind = "a whole number" if readers[key] is int else "a number"
            raise InputError(f"{where}:{key}", f"is {value!r}", kind) from None
    return made


@contextmanager
def _inside(where: str) -> Iterator[None]:
    """Name the option in front of the field in an InputError of the code inside."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}:{error.where}", error.problem, error.remedy) from None


def _fitted(texts: Sequence[str]) -> list[FittedModel]:
    """Return the models of each ``APP=FILE,noise=..,samples=..,batch=..[,max-batch=..,max-local=..]``. Reads no file.

    The default limits of the batch size: 64 M0 over all replicas, M0 on one GPU.
    """
    made: dict[str, FittedModel] = {}
    for text in texts:
        head, _, given = text.partition(",")
        name, equals, file = head.partition("=")
        if not (equals and name and file):
            raise InputError("--goodput", f"is {text!r}", "APP=FILE,noise=SAMPLES,samples=TOTAL,batch=M0")
        if name in made:
            raise InputError("--goodput", f"gives {name} twice", "one model per application")
        where = f"--goodput {name}"
        readers = {"noise": float, "samples": float, "batch": int, "max-batch": int, "max-local": int}
        fields = _fields(given, where, readers)
        for key in ("noise", "samples", "batch"):
            if key not in fields:
                raise InputError(where, f"lacks {key}", "noise=SAMPLES,samples=TOTAL,batch=M0 are needed")
        with _inside(where):
            job = FittedJob(
                noise_scale=fields["noise"],
                total_samples=fields["samples"],
                batch_size=fields["batch"],
                max_batch_size=fields.get("max-batch", 64 * fields["batch"]),
                max_local_batch_size=fields.get("max-local", fields["batch"]),
            )
        made[name] = FittedModel(application=name, file=Path(file), job=job, given=given)
    return list(made.values())


def _failures(
    mtbf: str, repair: str, checkpoint: str, events: Path | None, seed: int, *, nodes: int
) -> Failures | None:
    """Return what goes wrong, None when neither a time between failures nor a file of events is given."""

    made = Failures(
        mtbf_s=parse_duration(mtbf, "--mtbf") if mtbf else None,
        repair_s=parse_duration(repair, "--repair"),
        checkpoint_interval_s=parse_duration(checkpoint, "--checkpoint-interval"),
        events=read_events(events, nodes) if events is not None else (),
        seed=seed,
    )
    return made if mtbf or events is not None else None


def _prices(text: str, cluster: ClusterSpec) -> dict[str, float] | None:
    """Return the price per GPU hour by type from ``0.5`` (all types) or ``T4=0.35,A100=2``; None for no text."""

    if not text:
        return None
    if "=" in text:
        made = _fields(text, "--price", dict.fromkeys(cluster.type_names, float))
    else:
        try:
            made = dict.fromkeys(cluster.type_names, float(text))
        except ValueError:
            raise InputError("--price", f"is {text!r}", "a number per GPU hour, or TYPE=NUMBER,...") from None
    check_prices(made, cluster, "--price")
    return made


# What is read, replayed and written.


def _sampling(text: str) -> dict[str, Any]:
    """Return what --sample says: ``jobs``, ``hours`` and ``seed``, as far as it does."""
    fields = _fields(text, "--sample", {"jobs": int, "hours": float, "seed": int})
    if fields.get("seed", 0) < 0:
        raise InputError("--sample:seed", f"is {fields['seed']}", "a whole number >= 0")
    return fields


def _converted(
    workloads: Sequence[Path], folders: Sequence[Path], machines: ClusterSpec | None, sample: str, seed: int
) -> WorkloadResult:
    """Return the workload that a cluster's trace makes."""
    if len(workloads) != 1:
        if workloads:
            raise InputError("WORKLOAD.csv", f"is given {len(workloads)} times", "one trace at a time is converted")
        raise InputError("--convert", "needs a trace", "give a cluster's: Philly, Helios, Acme, Alibaba")
    workload = workloads[0]
    with progress(f"reading {workload.name}"):
        fields = {"seed": seed} | _sampling(sample)
        templates = partial(read_templates, folders, machines)
        jobs, remark = read_jobs(
            workload, templates, jobs=fields.get("jobs"), hours=fields.get("hours"), seed=fields["seed"]
        )
    if not remark:
        if sample:
            raise InputError("--sample", f"{workload} is a workload", "sample from a cluster's trace")
        raise InputError(str(workload), "is a workload already", "give a cluster's: Philly, Helios, Acme, Alibaba")
    note(remark)
    source = f"{workload.name}; applications drawn by size class, {sample or 'all jobs'}, seed={seed}"
    return WorkloadResult(source=source, jobs=jobs)


def _write_workload(found: WorkloadResult, output: Path | None, as_json: bool) -> None:
    """Write a workload as CSV to ``output``, by default to standard output."""
    if output is not None or not as_json:
        write_text(output or Path("-"), workload_csv(found))
    if as_json:
        print_json(found)
    else:
        note(f"{found.source}; wrote {len(found.jobs)} jobs to {output or 'standard output'}")


def _sweep(
    workloads: Sequence[Path],
    setup: Setup,
    policies: Sequence[str],
    seeds: Sequence[int],
    jobs: int,
    engine: str,
    compare: str | None,
    output: Path | None,
    table: Path | None,
    as_json: bool,
) -> None:
    """Replay everything and print means, or the comparison of two policies. Raises CheckFailed where a replay failed."""
    pair = [name.strip() for name in compare.split(",")] if compare is not None else []
    if compare is not None and (len(pair) != 2 or not set(pair) <= set(policies)):
        raise InputError("--compare", f"is {compare!r}", f"two policies of those replayed: {', '.join(policies)}")
    with progress("replays", total=len(workloads) * len(policies) * len(seeds)) as advance:
        found = sweep(
            workloads,
            setup,
            policies,
            seeds,
            jobs=jobs,
            engine=engine,
            output=output,
            table=table,
            tell=note,
            advance=advance,
        )
    if pair:
        found = found.model_copy(update={"comparison": compare_policies(found.cells, *pair)})
    if as_json:
        print_json(found)
    else:
        show(sweep_section(found, ", ".join(path.name for path in workloads)))
    failed = [cell for cell in found.cells if cell.error]
    if failed:
        raise CheckFailed(f"{len(failed)} of {found.cells_wanted} replays failed; the first: {failed[0].error}")
