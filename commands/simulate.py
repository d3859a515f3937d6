"""``ddltool simulate``: a workload on a cluster under scheduling policies; and the commands grouped with it.

``sweep`` replays workloads x policies x seeds, ``trials`` a search of hyper-parameters, ``autoscale`` one job in a cloud;
``advise`` judges the resize of a running job; ``generate`` and ``convert`` write workloads.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from ddltool.analyzers.answers.reporting.simulation_section import (
    advice_section,
    autoscaling_section,
    search_section,
    simulation_section,
    sweep_section,
)
from ddltool.analyzers.cluster import sweep as sweeps
from ddltool.analyzers.cluster.advise import advise_job
from ddltool.analyzers.cluster.autoscale import autoscale
from ddltool.analyzers.cluster.cluster import ClusterSpec, NodeFailures
from ddltool.analyzers.cluster.generator import PATTERNS, Pattern
from ddltool.analyzers.cluster.inputs import (
    FittedModel,
    generated,
    read_applications,
    read_cluster,
    read_events,
    read_jobs,
    read_templates,
    workload_csv,
)
from ddltool.analyzers.cluster.metrics import check_prices
from ddltool.analyzers.cluster.policies import POLICIES, policies
from ddltool.analyzers.cluster.replay import Setup, search_trials, study
from ddltool.analyzers.cluster.simulator import Options, SchedulingPolicy
from ddltool.analyzers.cluster.truth import FittedJob
from ddltool.artifacts import check_outputs, write_text
from ddltool.commands.options import Seed, as_options, integers, number, one_of, pairs, some_of, within
from ddltool.commands.output import finish, note, print_json, show
from ddltool.commands.verbs import VerbCall, also_takes, is_given, verb
from ddltool.errors import CheckFailed, InputError, known
from ddltool.shipped import folder
from ddltool.simulation_results import (
    AdviceResult,
    AutoscalingResult,
    SearchResult,
    SimulationDocument,
    SweepDocument,
    TrialSearch,
    WorkloadResult,
)
from ddltool.stages import Stage, Tell, log_remark, quietly
from ddltool.units import parse_duration

# One name, several with commas or as a list, or all.
PolicyNames = Annotated[str | Sequence[str], some_of(*POLICIES, "all")]
# A folder of traces, or several.
Folders = str | Path | Sequence[str | Path]


def _read_application(text: str, where: str) -> str:
    """Return the text, an application's name. Raises InputError, named ``where``, for an empty one."""
    if not text:
        raise InputError(where, "is empty", "name an application that has a folder in --traces")
    return text


Application = Annotated[str, _read_application]


@verb
def simulate(
    workload: str | Path,
    cluster: str | Path | None = None,
    traces: Folders = (),
    *,
    policy: PolicyNames = "pollux",
    interval_s: float = 60.0,
    restart_delay_s: float = 30.0,
    interference: float = 0.0,
    power: float = -1.0,
    react: bool = False,
    whole_seconds: bool = False,
    models: Sequence[str | FittedModel] = (),
    prices: str | float | Mapping[str, float] | None = None,
    mtbf_s: Annotated[float | None, parse_duration] = None,
    repair_s: Annotated[float, parse_duration] = 1800.0,
    checkpoint_interval_s: Annotated[float | None, parse_duration] = None,
    checkpoint_s: Annotated[float, parse_duration] = 0.0,
    failures: str | Path | None = None,
    failure_seed: Seed = 0,
    seed: Seed = 0,
    tell: Tell = log_remark,
    stage: Stage = quietly,
) -> SimulationDocument:
    """Replay a workload on a cluster under one or more scheduling policies and compare completion times.

    ``workload``: a CSV, or the trace of a cluster. ``cluster``: a cluster.yaml. ``traces``: folders of measured
    applications. Without ``cluster`` and ``traces``, shipped ones are used. ``policy``: names, or all. ``models``: fitted
    models in place of traces. ``prices``: per GPU hour, one or by type. ``failures``: a file of node events. For the
    others see the options of ``ddltool simulate``.

    Raises InputError for a wrong or unreadable file, and for jobs that can never run.
    """
    setup, machines, makers = _replay_setup(**locals())  # all of them: nothing else is bound yet
    return study(Path(workload), machines, makers, setup, seed=seed, tell=tell, stage=stage)


def show_simulate(
    call: VerbCall[SimulationDocument], *, metrics: bool = False, output: Path | None = None, as_json: bool = False
) -> None:
    """Print each policy's figures, and save them to ``output`` if given; ``metrics``: also by size class, application, job."""
    _check_outputs_apart(call, [call["workload"], call["failures"]], {"-o": output})
    result, name = call(), Path(call["workload"]).name
    finish(result, lambda: simulation_section(result, name, details=metrics), output, as_json)


@verb
@also_takes(simulate, without=("workload", "seed"))
def simulate_sweep(
    workloads: Sequence[Path],
    *,
    seeds: Annotated[int, within(1, 100_000)] = 1,
    jobs: Annotated[int, within(1, 4096)] = 1,
    engine: Annotated[str, one_of(*sweeps.ENGINES)] = "local",
    compare: str = "",
    csv: Path | None = None,
    output: Path | None = None,
    tell: Tell = log_remark,
    stage: Stage = quietly,
    **replay: Any,
) -> SweepDocument:
    """Replay several workloads, or one with several seeds, and compare policies by means and intervals.

    ``seeds``: each workload is replayed with seeds 0 to N-1. ``jobs``: number of local processes; ``engine``: "local", or
    "ray" for a Ray cluster. ``compare``: two policies, ``A,B``, to compare in pairs. ``csv`` and ``output`` are rewritten
    after every replay, and a sweep in an existing ``output`` is continued. For the others see :func:`simulate`.

    Raises InputError for a wrong or unreadable file; a replay that fails becomes a cell with an error.
    """
    setup, _, makers = _replay_setup(tell=tell, seed=0, **replay)
    pair = [name.strip() for name in compare.split(",")] if compare else []
    if pair and (len(pair) != 2 or not set(pair) <= set(makers)):
        raise InputError("compare", f"is {compare!r}", f"two policies of those replayed: {', '.join(makers)}")
    with stage("replays", len(workloads) * len(makers) * seeds) as advance:
        document = sweeps.sweep(
            workloads,
            setup,
            list(makers),
            range(seeds),
            jobs=jobs,
            engine=engine,
            output=output,
            table=csv,
            tell=tell,
            advance=advance,
        )
    if not pair:
        return document
    first, second = pair
    return document.model_copy(update={"comparison": sweeps.compare(document.cells, first, second)})


def show_simulate_sweep(
    call: VerbCall[SweepDocument], *, csv: Path | None = None, output: Path | None = None, as_json: bool = False
) -> None:
    """Print the means over all replays. Raises CheckFailed if a replay failed. The sweep itself writes the files."""
    _check_outputs_apart(call, [*call["workloads"], call["failures"]], {"-o": output, "--csv": csv})
    result = call()
    if as_json:
        print_json(result)
    else:
        show(sweep_section(result, ", ".join(path.name for path in call["workloads"])))
    failed = [cell for cell in result.cells if cell.error]  # a cell is one replay
    if failed:
        raise CheckFailed(f"{len(failed)} of {result.cells_wanted} replays failed; the first: {failed[0].error}")


@verb
def simulate_trials(
    application: Application,
    cluster: str | Path | None = None,
    traces: Folders = (),
    *,
    policy: PolicyNames = "pollux",
    local_batch: Annotated[Sequence[int], partial(integers, ordered=False)] = (128,),
    interval_s: float = 60.0,
    restart_delay_s: float = 30.0,
    power: float = -1.0,
    seed: Seed = 0,
    tell: Tell = log_remark,
    stage: Stage = quietly,
) -> SearchResult:
    """Replay a search of hyper-parameters, 100 trials of one application, under scheduling policies.

    ``local_batch``: samples per GPU of each baseline with a fixed batch; the policies' trials begin with the first. For
    the others see :func:`simulate`. Raises InputError for an application without traces, and for trials that cannot run.
    """
    cluster_file, folders = shipped_or(cluster, traces, tell)
    machines = read_cluster(cluster_file)
    makers = policies(policy, power, restart_delay_s, seed, mixed=len(machines.type_names) > 1)
    first, *other_batches = local_batch
    search = TrialSearch(application=application, local_batch_size=first)
    timing = Options(interval_s=interval_s, restart_delay_s=restart_delay_s)
    measured = read_applications(folders, [application])
    return search_trials(search, measured, machines, makers, timing, local_batch_sizes=other_batches, stage=stage)


def show_simulate_trials(call: VerbCall[SearchResult], output: Path | None = None, as_json: bool = False) -> None:
    """Print the search's figures under each policy, and save them to ``output`` if given."""
    _check_outputs_apart(call, [], {"-o": output})
    result = call()
    finish(result, lambda: search_section(result), output, as_json)


@verb
def simulate_autoscale(
    application: Application, traces: Folders = (), *, restart_delay_s: float = 30.0, stage: Stage = quietly
) -> AutoscalingResult:
    """Rent nodes for one job in a cloud, by goodput or by throughput, and compare time and cost.

    ``traces``: folders of measured applications; (): the shipped ones. ``restart_delay_s``: seconds of each restart.
    Raises InputError for an application without a folder there.
    """
    folders = _folders(traces) or shipped_traces()
    timing = Options(restart_delay_s=restart_delay_s)  # made to check its range
    with stage(f"{application} under 5 scaling rules"):
        job = read_applications(folders, [application])[application]
        return autoscale(job, restart_delay_s=timing.restart_delay_s)


def show_simulate_autoscale(
    call: VerbCall[AutoscalingResult], output: Path | None = None, as_json: bool = False
) -> None:
    """Print time and cost under each scaling rule, and save them to ``output`` if given."""
    check_outputs(
        [path for traces_folder in _folders(call["traces"]) for path in traces_folder.glob("*/*.csv")], {"-o": output}
    )
    result = call()
    finish(result, lambda: autoscaling_section(result), output, as_json)


@verb
def simulate_advise(state: Path) -> AdviceResult:
    """Say whether a resize of a running job is worth its restart, by every number of free GPUs.

    ``state``: a job_state.yaml. Raises InputError for a wrong or unreadable one.
    """
    return advise_job(state)


def show_simulate_advise(call: VerbCall[AdviceResult], output: Path | None = None, as_json: bool = False) -> None:
    """Print the advice, and save it to ``output`` if given."""
    result = call()
    finish(result, lambda: advice_section(result), output, as_json)


@verb
def simulate_generate(
    *,
    jobs: int = 160,
    hours: float = 8.0,
    pattern: Annotated[str, one_of(*PATTERNS)] = "diurnal",
    cluster: Path | None = None,
    traces: Folders = (),
    pollux: bool = False,
    seed: Seed = 0,
    tell: Tell = log_remark,
) -> WorkloadResult:
    """Write a synthetic workload: jobs of the applications that have traces, or of Pollux's.

    ``jobs`` arrive over ``hours``, in a ``pattern``. ``traces``: the applications' folders; ``pollux``: those of
    Pollux's Table 1 instead. ``cluster``: no job asks for more GPUs than it has. Raises InputError for numbers out of
    range, and for unreadable folders.
    """
    arrivals = Pattern(jobs=jobs, hours=hours, pattern=pattern, seed=seed)
    machines, folders = _application_source(cluster, traces, pollux, tell)
    return generated(arrivals, folders, machines)


def show_simulate_generate(call: VerbCall[WorkloadResult], output: Path | None = None, as_json: bool = False) -> None:
    """Write the workload as CSV to ``output``, by default to standard output; with ``as_json`` print it as JSON."""
    result = call()
    if output is not None or not as_json:
        write_text(output or Path("-"), workload_csv(result))
    if as_json:
        print_json(result)
    else:
        note(f"{result.source}; wrote {len(result.jobs)} jobs to {output or 'standard output'}")


@verb
def simulate_convert(
    trace: Path,
    *,
    jobs: int | None = None,
    hours: float | None = None,
    cluster: Path | None = None,
    traces: Folders = (),
    pollux: bool = False,
    seed: Seed = 0,
    tell: Tell = log_remark,
    stage: Stage = quietly,
) -> WorkloadResult:
    """Write the trace of a cluster as a workload: each job stands for an application of its size class.

    ``jobs``: number of jobs to draw with the seed; None: all. ``hours``: take only jobs of the busiest stretch of so many
    hours; None: of the whole trace. Raises InputError for a file that is no trace of Philly, Helios, Acme or Alibaba.
    """
    machines, folders = _application_source(cluster, traces, pollux, tell)
    with stage(f"reading {trace.name}"):
        templates = partial(read_templates, folders, machines)
        specs, remark = read_jobs(trace, templates, jobs=jobs, hours=hours, seed=seed)
    if not remark:  # read_jobs remarks on the conversion of every trace
        raise InputError(str(trace), "is a workload already", "give a cluster's: Philly, Helios, Acme, Alibaba")
    tell(remark)
    selection = ",".join(f"{name}={value:g}" for name, value in (("jobs", jobs), ("hours", hours)) if value is not None)
    source = f"{trace.name}; applications drawn by size class, {selection or 'all jobs'}, seed={seed}"
    return WorkloadResult(source=source, jobs=specs)


show_simulate_convert = show_simulate_generate


def _replay_setup(
    *, tell: Tell, **arguments: Any
) -> tuple[Setup, ClusterSpec, Mapping[str, Callable[[], SchedulingPolicy]]]:
    """Return (the settings of the replays, the cluster's nodes, a function that makes each policy, by the policy's name).

    ``arguments``: those of :func:`simulate` by name; absent ones have its defaults. Of use here are the files, ``policy``,
    ``power`` (of Pollux's fitness), ``seed``, those of :func:`_node_failures`, and those that are fields of ``Options``.
    ``tell`` is called with each remark. Raises InputError for settings that contradict each other, and for wrong or unreadable
    files.
    """
    arguments = {**_DEFAULTS, **arguments}
    _check_dependent_arguments(arguments["policy"])
    models = _read_fitted_models(arguments["models"])
    cluster, folders = shipped_or(arguments["cluster"], arguments["traces"], tell, fitted=bool(models))
    machines = read_cluster(cluster)
    power, delay_s = arguments["power"], arguments["restart_delay_s"]
    has_several_gpu_types = len(machines.type_names) > 1
    makers = policies(arguments["policy"], power, delay_s, arguments["seed"], mixed=has_several_gpu_types)
    replay_options = {name: arguments[name] for name in ("interval_s", "interference", "whole_seconds", "react")}
    failures = _node_failures(arguments, len(machines.gpus))
    options = Options(restart_delay_s=delay_s, failures=failures, **replay_options)
    prices = _prices(arguments["prices"], machines)
    setup = Setup(cluster=cluster, traces=folders, options=options, models=models, prices=prices, power=power)
    return setup, machines, makers


_DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(simulate).parameters.items()}


def _folders(traces: Folders | None) -> list[Path]:
    """Return one folder, several, or None (no folder) as a list of paths."""
    if isinstance(traces, (str, Path)):
        return [Path(traces)]
    return [Path(folder_name) for folder_name in traces or ()]


def _check_outputs_apart(call: VerbCall[Any], inputs: Sequence[Any], outputs: Mapping[str, Path | None]) -> None:
    """Raise InputError if an output is a file that the replay reads, or cannot be written.

    The replay reads ``inputs``, the cluster, the fitted models and all tables of the traces. ``outputs``: the file by option;
    None: it is not asked for.
    """
    if not any(outputs.values()):
        return
    folders = _folders(call["traces"]) or shipped_traces()
    tables = [path for traces_folder in folders for path in traces_folder.glob("*/*.csv")]
    models = _read_fitted_models(call["models"]) if "models" in call else []
    check_outputs([*inputs, call["cluster"], *(model.file for model in models), *tables], outputs)


def shipped_traces() -> list[Path]:
    """Return the folder of the shipped applications, as a list of one."""
    return [folder() / "workloads" / "traces"]


def shipped_or(
    cluster: str | Path | None, traces: Folders | None, tell: Tell, *, fitted: bool = False
) -> tuple[Path, list[Path]]:
    """Return (file of the cluster, folders of traces): those that are given, or else those that ship with ddltool.

    Without traces and fitted models the shipped traces are taken, and without a cluster too the shipped cluster, of which
    ``tell`` is called with a remark. ``fitted``: whether there are fitted models, which need no traces. Raises InputError for
    traces or fitted models without a cluster.
    """
    if not _folders(traces) and not fitted:
        if cluster is None:
            tell("--cluster and --traces are not given: 4 nodes of 4 GPUs and two applications that ship with ddltool")
        return Path(cluster or folder() / "workloads" / "cluster.yaml"), shipped_traces()
    if cluster is None:
        raise InputError("cluster", "is missing", "give the nodes and their GPUs")
    return Path(cluster), _folders(traces)


def _check_dependent_arguments(policy: str | Sequence[str]) -> None:
    """Raise InputError for an argument that the caller gave and that has no effect beside the others.

    They are those on failures if none are simulated, and ``power`` without the policy pollux. ``policy``: the policies' names.
    """
    is_mtbf_given, is_events_given = is_given("mtbf_s"), is_given("failures")
    for name in ("repair_s", "failure_seed"):
        if is_given(name) and not is_mtbf_given:
            remedy = "events say themselves when a node is back" if is_events_given else "say how often nodes fail"
            raise InputError(name, "needs --mtbf", remedy)
    for name in ("checkpoint_interval_s", "checkpoint_s"):
        if is_given(name) and not (is_mtbf_given or is_events_given):
            raise InputError(name, "needs --mtbf or --failures", "say how often nodes fail")
    text = policy if isinstance(policy, str) else ",".join(policy)
    names = {name.strip() for name in text.split(",")}
    other_policies = {*POLICIES} - {"pollux"}  # without "all", which is no policy's name and includes pollux
    if is_given("power") and names <= other_policies:
        problem = f"has no part in --policy {text}"
        raise InputError("power", problem, "leave it out, or replay pollux, which alone reads it")


def _read_key_values(text: str, where: str, readers: Mapping[str, Callable[[str, str], Any]]) -> dict[str, Any]:
    """Return the values of a text ``key=value,key=value``, each read by its key's entry of ``readers``.

    A reader is a function of (text, option). Raises InputError for an unknown or repeated key, and for a value that its
    reader refuses. ``where``: the option, for errors.
    """
    text_by_key = pairs(text, where, "KEY=VALUE", ",".join(f"{key}=1" for key in readers))
    values = {}
    for key, value_text in text_by_key.items():
        known(where, key, list(readers))  # raises for an unknown key
        values[key] = readers[key](value_text, f"{where}:{key}")
    return values


def _read_integer(text: str, where: str) -> int:
    """Return the whole number, at least 1, in a text. Raises InputError, named ``where``, for any other text."""
    return integers(text, where)[0]


_DEFAULT_BATCH_RANGE = 64  # default of the largest total batch, as a multiple of the initial one


def _read_fitted_models(texts_or_models: Sequence[str | FittedModel]) -> list[FittedModel]:
    """Return the fitted models of texts ``APP=FILE,noise=..,samples=..,batch=..[,max-batch=..,max-local=..]``.

    APP: the application; FILE: its goodput.json, not read here; ``noise``: gradient noise scale in samples; ``samples``: of the
    whole training; ``batch``: M0, the initial total batch. ``max-batch``, the largest total batch, is 64 M0 by default;
    ``max-local``, the largest on one GPU, is M0. Raises InputError for other texts, and two models of one APP.
    """
    model_by_application: dict[str, FittedModel] = {}
    for text in texts_or_models:
        if isinstance(text, FittedModel):
            model_by_application[text.application] = text
            continue
        first_part, _, settings = text.partition(",")
        name, equals_sign, file = first_part.partition("=")
        if not (equals_sign and name and file):
            raise InputError("models", f"is {text!r}", "APP=FILE,noise=SAMPLES,samples=TOTAL,batch=M0")
        if name in model_by_application:
            raise InputError("models", f"gives {name} twice", "one model per application")
        where = f"--goodput {name}"
        readers = {
            "noise": number(),
            "samples": number(),
            "batch": _read_integer,
            "max-batch": _read_integer,
            "max-local": _read_integer,
        }
        fields = _read_key_values(settings, where, readers)
        for key in ("noise", "samples", "batch"):
            if key not in fields:
                raise InputError(where, f"lacks {key}", "noise=SAMPLES,samples=TOTAL,batch=M0 are needed")
        # Errors of FittedJob name its fields; they become the option's keys.
        with as_options({name: f"{where}:{name}" for name in readers}):
            job = FittedJob(
                noise_scale=fields["noise"],
                total_samples=fields["samples"],
                batch_size=fields["batch"],
                max_batch_size=fields.get("max-batch", _DEFAULT_BATCH_RANGE * fields["batch"]),
                max_local_batch_size=fields.get("max-local", fields["batch"]),
            )
        model_by_application[name] = FittedModel(application=name, file=Path(file), job=job, given=settings)
    return list(model_by_application.values())


_FREE_INTERVAL_S = 600.0  # default interval of checkpoints that take no time


def _node_failures(arguments: Mapping[str, Any], node_count: int) -> NodeFailures | None:
    """Return the node failures of a replay; None if neither a time between failures nor events are given.

    ``arguments``: those of :func:`simulate` by name; checked in any case. ``node_count``: number of the cluster's nodes,
    to which events must refer.
    """
    mtbf_s, events = arguments["mtbf_s"], arguments["failures"]
    interval_s, checkpoint_s = arguments["checkpoint_interval_s"], arguments["checkpoint_s"]
    if interval_s is None and not checkpoint_s:  # else None: the best interval follows from the checkpoint's time
        interval_s = _FREE_INTERVAL_S
    failures = NodeFailures(
        mtbf_s=math.inf if mtbf_s is None else mtbf_s,
        repair_s=arguments["repair_s"],
        checkpoint_interval_s=interval_s,
        checkpoint_s=checkpoint_s,
        events=read_events(Path(events), node_count) if events is not None else (),
        seed=arguments["failure_seed"],
    )
    # Made even if nothing fails, as this checks the numbers.
    return failures if mtbf_s is not None or events is not None else None


def _prices(price: str | float | Mapping[str, float] | None, cluster: ClusterSpec) -> dict[str, float] | None:
    """Return the price per GPU hour by type; None if none is given (None or "").

    ``price``: ``0.5`` (for all types), ``T4=0.35,A100=2``, or a mapping. Raises InputError for a missing or wrong price.
    """
    if price is None or price == "":
        return None
    if isinstance(price, str) and "=" in price:
        prices = _read_key_values(price, "--price", dict.fromkeys(cluster.type_names, number()))
    elif isinstance(price, Mapping):
        prices = dict(price)
    else:
        prices = dict.fromkeys(cluster.type_names, number()(str(price), "--price"))
    check_prices(prices, cluster, "--price")
    return prices


def _application_source(
    cluster: Path | None, traces: Folders, pollux: bool, tell: Tell
) -> tuple[ClusterSpec | None, list[Path]]:
    """Return (cluster, trace folders of the applications from which jobs are drawn).

    The cluster is None if none is given and requests need not fit one. Folders are [] for ``pollux``: the applications
    of Pollux's Table 1. ``tell`` is called with a remark if shipped files are taken. Raises InputError for both ``pollux`` and
    ``traces``.
    """
    if pollux and _folders(traces):
        raise InputError("pollux", "has no part beside --traces", "give one of the two")
    if pollux or (_folders(traces) and cluster is None):
        return read_cluster(cluster) if cluster else None, _folders(traces)
    cluster_file, folders = shipped_or(cluster, traces, tell)
    return read_cluster(cluster_file), folders
