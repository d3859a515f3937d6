"""Where ``ddltool simulate`` gets jobs, their truth and the cluster's failures from, beside workload files and traces."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ddltool.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from ddltool.analyzers.scheduling.cluster import ClusterSpec
    from ddltool.analyzers.scheduling.failures import Failures, NodeEvent
    from ddltool.analyzers.scheduling.fitted_truth import FittedJob
    from ddltool.analyzers.scheduling.generator import Pattern, Template
    from ddltool.analyzers.scheduling.job import JobSpec
    from ddltool.analyzers.scheduling.truth import Application

_EVENT_COLUMNS = ("time", "node", "event")


def read_fields(text: str, where: str, readers: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
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


def read_pattern(text: str, where: str = "--generate", seed: int = 0) -> Pattern:
    """Return the arrivals of ``jobs=160,hours=8,pattern=diurnal,seed=0``; what is left out keeps its default."""
    from ddltool.analyzers.scheduling.generator import Pattern

    fields = {"seed": seed} | read_fields(text, where, {"jobs": int, "hours": float, "pattern": str, "seed": int})
    try:
        return Pattern(**fields)
    except InputError as error:
        raise InputError(f"{where}:{error.where}", error.problem, error.remedy) from None


def read_templates(folders: Sequence[Path], cluster: ClusterSpec | None) -> tuple[Template, ...]:
    """Return what generated and converted jobs are drawn from.

    Pollux's Table 1 without ``folders`` or with those of its applications that have one; else every application there,
    which needs a cluster.
    """
    from dataclasses import replace

    from ddltool.analyzers.scheduling.generator import POLLUX, templates
    from ddltool.commands.workloads import read_applications

    names = sorted({path.name for folder in folders if folder.is_dir() for path in folder.iterdir() if path.is_dir()})
    found: tuple[Template, ...] = tuple(one for one in POLLUX if not folders or one.application in names)
    if not found:
        if cluster is None:
            raise InputError("--cluster", "is missing", "these applications' requests depend on the cluster")
        found = templates(read_applications(folders, names), cluster)
    if cluster is None:
        return found
    most = max(cluster.gpus_of(name) for name in cluster.type_names)
    fitting = [replace(one, requests=tuple(each for each in one.requests if each[0] <= most)) for one in found]
    return tuple(one for one in fitting if one.requests)


def read_jobs(
    path: Path, templates: Callable[[], Sequence[Template]], sample: str, seed: int
) -> tuple[list[JobSpec], str]:
    """Return the jobs of a workload, or of a cluster's trace (told by its columns, or JSON), and a remark about these.

    ``sample``: ``jobs=N,hours=H,seed=S``, from the trace's busiest ``H`` hours.
    """
    from ddltool.analyzers.scheduling import readers
    from ddltool.artifacts import read_text
    from ddltool.commands.workload_tables import read_rows
    from ddltool.commands.workloads import WORKLOAD, read_workload

    fields = {"seed": seed} | read_fields(sample, "--sample", {"jobs": int, "hours": float, "seed": int})
    if fields["seed"] < 0:
        raise InputError("--sample:seed", f"is {fields['seed']}", "a whole number >= 0")
    if ".json" in path.suffixes:
        try:
            trace = readers.read_philly(json.loads(read_text(path)), str(path))
        except (json.JSONDecodeError, RecursionError) as error:
            raise InputError(str(path), f"is no JSON ({error})", "give Philly's cluster_job_log") from None
    else:
        frame = read_rows(path, WORKLOAD, no_nan=readers.COLUMNS["duration"])
        if not readers.is_trace(list(frame.columns)):
            if sample:
                raise InputError("--sample", f"{path} is a workload", "sample from a cluster's trace")
            return read_workload(path), ""
        trace = readers.read_table_trace(frame, str(path))
    seen = len(trace.submit_s)
    if "hours" in fields:
        trace = readers.busiest(trace, fields["hours"])
    specs, sizes = readers.to_workload(trace, templates(), jobs=fields.get("jobs"), seed=fields["seed"])
    left = ", ".join(f"{count} {reason}" for reason, count in trace.skipped.items() if count) or "none"
    classes = ", ".join(f"{count} {name}" for name, count in sizes.items() if count)
    return specs, (
        f"{path}: {len(specs)} of {seen} jobs ({classes}; left out: {left}); "
        "each stands for an application of its size class by GPU time, drawn with the seed"
    )


def demand_workload(path: Path) -> None:
    """Raise InputError for a cluster's trace, which is no workload yet."""
    from ddltool.analyzers.scheduling import readers
    from ddltool.artifacts import read_text

    header = "" if ".json" in path.suffixes else read_text(path).partition("\n")[0]
    columns = [name.strip().strip('"') for name in header.split(",")]
    if ".json" in path.suffixes or readers.is_trace(columns):
        raise InputError(str(path), "is a cluster's trace", "make a workload of it with --convert first")


def write_workload(jobs: Sequence[JobSpec], source: str, path: Path) -> None:
    """Write a workload with a column that says where its jobs are from: as a table, atomically."""
    import csv

    from ddltool.artifacts import write_text

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["name", "time", "application", "num_replicas", "batch_size", "source"])
    for job in jobs:
        time_s = int(job.submit_s) if job.submit_s == math.floor(job.submit_s) else job.submit_s
        writer.writerow([job.name, time_s, job.application, job.num_replicas, job.batch_size, source])
    write_text(path, text.getvalue())


def read_failures(
    mtbf: str, repair: str, checkpoint: str, events: Path | None, seed: int, *, nodes: int | None = None
) -> Failures | None:
    """Return what goes wrong, None when neither a time between failures nor a file of events is given.

    ``nodes``: how many the cluster has, so that an event on another is named with its row.
    """
    from ddltool.analyzers.scheduling.failures import Failures
    from ddltool.units import parse_duration

    repair_s, checkpoint_s = parse_duration(repair, "--repair"), parse_duration(checkpoint, "--checkpoint-interval")
    mtbf_s = parse_duration(mtbf, "--mtbf") if mtbf else None
    made = Failures(
        mtbf_s=mtbf_s,
        repair_s=repair_s,
        checkpoint_interval_s=checkpoint_s,
        events=read_events(events, nodes) if events is not None else (),
        seed=seed,
    )
    return made if mtbf_s is not None or events is not None else None


def read_events(path: Path, count: int | None = None) -> tuple[NodeEvent, ...]:
    """Return the node events of a CSV ``time,node,event``: seconds, node from 0, one of fail, leave, join.

    ``count``: how many nodes there are. Raises InputError naming file, row and column.
    """
    from ddltool.analyzers.scheduling.failures import KINDS, NodeEvent
    from ddltool.commands.workloads import read_columns, read_numbers

    frame = read_columns(path, _EVENT_COLUMNS)
    times = read_numbers(frame, "time", path, least=0.0)
    nodes = read_numbers(frame, "node", path, least=0.0, whole=True)
    made = []
    for row, (time_s, node, kind) in enumerate(
        zip(times.tolist(), nodes.tolist(), frame["event"].tolist(), strict=True), 1
    ):
        if kind not in KINDS:
            shown = "empty" if kind != kind else kind  # pandas' mark of an empty field is no number
            raise InputError(f"{path}:row {row}:event", f"is {shown}", f"one of {', '.join(KINDS)}")
        if count is not None and node >= count:
            raise InputError(f"{path}:row {row}:node", f"is {node:.0f}", f"nodes are 0 to {count - 1}")
        made.append(NodeEvent(time_s=time_s, node=int(node), kind=kind))
    return tuple(made)


class FittedText(NamedTuple):
    """One ``--goodput APP=FILE,FIELDS`` in its parts."""

    application: str
    file: str
    fields: str


def split_fitted(texts: Sequence[str]) -> list[FittedText]:
    """Return the parts of each ``APP=FILE,noise=..,samples=..,batch=..[,max-batch=..,max-local=..]``. Reads no file."""
    made: dict[str, FittedText] = {}
    for text in texts:
        head, _, fields = text.partition(",")
        name, equals, file = head.partition("=")
        if not (equals and name and file):
            raise InputError("--goodput", f"is {text!r}", "APP=FILE,noise=SAMPLES,samples=TOTAL,batch=M0")
        if name in made:
            raise InputError("--goodput", f"gives {name} twice", "one model per application")
        made[name] = FittedText(name, file, fields)
    return list(made.values())


def read_fitted(models: Sequence[FittedText]) -> tuple[dict[str, Application], list[str]]:
    """Return the applications of fitted models, and what is assumed about them."""
    from ddltool.analyzers.goodput.throughput import ThroughputParams
    from ddltool.analyzers.scheduling.fitted_truth import assumptions, fitted_application
    from ddltool.analyzers.scheduling.truth import ANY_TYPE
    from ddltool.artifacts import load
    from ddltool.goodput_model import Goodput

    made: dict[str, Application] = {}
    said = []
    for name, file, fields in models:
        job = _fitted_job(fields, f"--goodput {name}")
        model = load(file, Goodput)
        records = {kind: each.params for kind, each in model.devices.items()} or {ANY_TYPE: model.params}
        params = {kind: ThroughputParams(**record.model_dump()) for kind, record in records.items()}
        made[name] = fitted_application(name, params, job)
        said.append(assumptions(name, job))
    return made, said


def _fitted_job(text: str, where: str) -> FittedJob:
    """Return what the fit does not know. The batch size's default limits: 64 M0 over all replicas, M0 on one GPU."""
    from ddltool.analyzers.scheduling.fitted_truth import FittedJob

    kinds: dict[str, Callable[[str], Any]] = {
        "noise": float,
        "samples": float,
        "batch": int,
        "max-batch": int,
        "max-local": int,
    }
    fields = read_fields(text, where, kinds)
    for key in ("noise", "samples", "batch"):
        if key not in fields:
            raise InputError(where, f"lacks {key}", "noise=SAMPLES,samples=TOTAL,batch=M0 are needed")
    batch = fields["batch"]
    try:
        return FittedJob(
            noise_scale=fields["noise"],
            total_samples=fields["samples"],
            batch_size=batch,
            max_batch_size=fields.get("max-batch", 64 * batch),
            max_local_batch_size=fields.get("max-local", batch),
        )
    except InputError as error:
        raise InputError(f"{where}:{error.where}", error.problem, error.remedy) from None


def read_prices(text: str, cluster: ClusterSpec) -> dict[str, float] | None:
    """Return the price per GPU hour by type from ``0.5`` (all types) or ``T4=0.35,A100=2``; None for no text."""
    from ddltool.analyzers.scheduling.metrics import check_prices

    if not text:
        return None
    if "=" in text:
        made = read_fields(text, "--price", dict.fromkeys(cluster.type_names, float))
    else:
        try:
            made = dict.fromkeys(cluster.type_names, float(text))
        except ValueError:
            raise InputError("--price", f"is {text!r}", "a number per GPU hour, or TYPE=NUMBER,...") from None
    try:
        check_prices(made, cluster)
    except InputError as error:
        # "price of T4" and "price"
        kind = error.where.removeprefix("price").removeprefix(" of ")
        raise InputError("--price" + (f":{kind}" if kind else ""), error.problem, error.remedy) from None
    return made
