"""What a replay reads: a workload or a cluster's trace, the cluster, node events, and the truth about the applications.

That truth is measured traces, fitted models (kind ``ddltool.goodput``), or both.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddltool.analyzers.scheduling.cluster import ClusterSpec
from ddltool.analyzers.scheduling.cluster_traces import (
    ACCEPTED,
    COLUMNS,
    busiest,
    is_json,
    is_trace,
    read_philly,
    read_table_trace,
    to_workload,
)
from ddltool.analyzers.scheduling.failures import KINDS, NodeEvent
from ddltool.analyzers.scheduling.generator import POLLUX, Pattern, Template, generate, templates
from ddltool.analyzers.scheduling.truth import (
    ANY_TYPE,
    Application,
    FittedJob,
    StepTimes,
    Validation,
    assumptions,
    fitted_application,
)
from ddltool.artifacts import load, read_text
from ddltool.errors import InputError, did_you_mean
from ddltool.goodput_model import Goodput
from ddltool.job import Cluster
from ddltool.simulation_results import JobSpec, WorkloadResult
from ddltool.tables import demand_distinct_jobs, numbers, read_columns, read_table, texts

Floats = NDArray[np.float64]
WORKLOAD = ("name", "time", "application", "num_replicas", "batch_size")
_EVENTS = ("time", "node", "event")
_PLACEMENTS = ("placement", "local_bsz", "step_time", "sync_time")
_SCALABILITY = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
_VALIDATION = ("progress", "iteration", "metric", "grad_sqr", "grad_var")
_MOST_GPUS = 100_000
# Later times and longer steps are in another unit, or typing errors.
_LATEST_S, _LONGEST_STEP_S = 315_360_000.0, 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedModel:
    """A fitted model in place of an application's traces: its file, and what that does not know, also as it was given."""

    application: str
    file: Path
    job: FittedJob
    given: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """How fast and how far per step the applications train; ``source`` and ``assumed`` say where that is from."""

    applications: dict[str, Application]
    source: str
    assumed: tuple[str, ...]


def read_cluster(path: Path) -> ClusterSpec:
    """Return the nodes of a cluster.yaml (kind ``ddltool.cluster``), in file order."""
    cluster = load(path, Cluster)
    total = sum(group.count * group.devices.count for group in cluster.nodes)
    if not 0 < total <= _MOST_GPUS:
        raise InputError(f"{path}:nodes", f"have {total} GPUs", f"from 1 to {_MOST_GPUS}")
    groups = [(group.devices.count, group.devices.type) for group in cluster.nodes for _ in range(group.count)]
    return ClusterSpec(gpus=tuple(count for count, _ in groups), gpu_types=tuple(kind for _, kind in groups))


def read_workload(path: Path) -> list[JobSpec]:
    """Return the jobs of a CSV with the columns ``name,time,application,num_replicas,batch_size``, by row.

    Raises InputError naming row and column: missing columns, names that stand twice, anything that is no number where
    one is needed; and for a cluster's trace, which is no workload yet.
    """
    frame = None if is_json(path) else read_table(path, WORKLOAD)
    if frame is None or is_trace(frame):
        raise InputError(str(path), "is a cluster's trace", "make a workload of it with --convert first")
    return _jobs(frame, path)


def _jobs(frame: pd.DataFrame, path: Path) -> list[JobSpec]:
    missing = [name for name in WORKLOAD if name not in frame.columns]
    if missing:
        remedy = f"a workload has {', '.join(WORKLOAD)}; {ACCEPTED}"
        raise InputError(f"{path}:{missing[0]}", "column is missing", remedy)
    late = f"seconds, at most {_LATEST_S:.0f} (ten years)"
    times = numbers(frame, "time", path, most=_LATEST_S, remedy=late)
    replicas, batches = (numbers(frame, name, path, least=1.0, whole=True) for name in WORKLOAD[3:])
    names, kinds = (texts(frame, column, path) for column in ("name", "application"))
    demand_distinct_jobs(frame["name"], path)
    return [
        JobSpec(name=name, submit_s=time, application=kind, num_replicas=int(count), batch_size=int(batch))
        for name, time, kind, count, batch in zip(
            names, times.tolist(), kinds, replicas.tolist(), batches.tolist(), strict=True
        )
    ]


def workload_csv(found: WorkloadResult) -> str:
    """Return a workload as the CSV that :func:`read_workload` reads, what its jobs are drawn from beside each."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*WORKLOAD, "source"])
    for job in found.jobs:
        time_s = int(job.submit_s) if job.submit_s == math.floor(job.submit_s) else job.submit_s
        writer.writerow([job.name, time_s, job.application, job.num_replicas, job.batch_size, found.source])
    return text.getvalue()


def generated(pattern: Pattern, folders: Sequence[Path], cluster: ClusterSpec | None) -> WorkloadResult:
    """Return a synthetic workload of the applications of :func:`read_templates`."""
    source = f"synthetic: {','.join(f'{key}={value}' for key, value in asdict(pattern).items())}"
    return WorkloadResult(source=source, jobs=generate(pattern, read_templates(folders, cluster)))


def read_jobs(
    path: Path, drawn_from: Callable[[], Sequence[Template]], *, jobs: int | None, hours: float | None, seed: int
) -> tuple[list[JobSpec], str]:
    """Return the jobs of a workload, or of a cluster's trace (told by its columns, or JSON) and a remark about these.

    ``jobs`` of a trace's busiest ``hours``, None: all; ``drawn_from``: what stands for them, as :func:`read_templates`.
    """
    if is_json(path):
        try:
            trace = read_philly(json.loads(read_text(path)), str(path))
        except (json.JSONDecodeError, RecursionError) as error:
            raise InputError(str(path), f"is no JSON ({error})", "give Philly's cluster_job_log") from None
    else:
        frame = read_table(path, WORKLOAD, no_nan=COLUMNS["duration"])
        if not is_trace(frame):
            return _jobs(frame, path), ""
        trace = read_table_trace(frame, str(path))
    seen = len(trace.submit_s)
    if hours is not None:
        trace = busiest(trace, hours)
    specs, sizes = to_workload(trace, drawn_from(), jobs=jobs, seed=seed)
    left = ", ".join(f"{count} {reason}" for reason, count in trace.skipped.items() if count) or "none"
    classes = ", ".join(f"{count} {name}" for name, count in sizes.items() if count)
    still = f"; {trace.censored} still ran at the log's end and count until then" if trace.censored else ""
    return specs, (
        f"{path}: {len(specs)} of {seen} jobs ({classes}; left out: {left}{still}); "
        "each stands for an application of its size class by GPU time, drawn with the seed"
    )


def read_templates(folders: Sequence[Path], cluster: ClusterSpec | None) -> tuple[Template, ...]:
    """Return what generated and converted jobs are drawn from.

    Pollux's Table 1 without ``folders`` or with those of its applications that have one; else every application there,
    which needs a cluster.
    """
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


def read_events(path: Path, nodes: int) -> tuple[NodeEvent, ...]:
    """Return the node events of a CSV ``time,node,event``: seconds, node from 0 of ``nodes``, one of fail, leave, join.

    Raises InputError naming file, row and column.
    """
    frame = read_columns(path, _EVENTS)
    times = numbers(frame, "time", path)
    places = numbers(frame, "node", path, most=nodes - 1, whole=True, remedy=f"nodes are 0 to {nodes - 1}")
    for row, kind in enumerate(frame["event"].tolist(), start=1):
        if kind not in KINDS:
            shown = "empty" if kind != kind else kind  # pandas' mark of an empty field is no number
            raise InputError(f"{path}:row {row}:event", f"is {shown}", f"one of {', '.join(KINDS)}")
    return tuple(
        NodeEvent(time_s=time_s, node=int(node), kind=kind)
        for time_s, node, kind in zip(times.tolist(), places.tolist(), frame["event"].tolist(), strict=True)
    )


def read_truth(jobs: Sequence[JobSpec], folders: Sequence[Path], models: Sequence[FittedModel]) -> Truth:
    """Return the truth about the jobs' applications: fitted ``models`` where there are some, else traces.

    Raises InputError for an application with neither, for a model of none, and for files that cannot be read.
    """
    names = {job.application for job in jobs}
    applications: dict[str, Application] = {}
    for one in models:
        if one.application not in names:
            problem = f"{one.application!r} is no application of the workload"
            raise InputError("--goodput", problem, did_you_mean(one.application, names))
        model = load(one.file, Goodput)
        params = {kind: each.params for kind, each in model.devices.items()} or {ANY_TYPE: model.params}
        applications[one.application] = fitted_application(one.application, params, one.job)
    measured = [job.application for job in jobs if job.application not in applications]
    if measured and not folders:
        remedy = "give --traces or --goodput for it"
        raise InputError("--traces", f"are missing for application {measured[0]!r}", remedy)
    sources = [*(["measured traces"] if measured else []), *(["fitted models"] if models else [])]
    return Truth(
        applications=applications | read_applications(folders, measured),
        source=" and ".join(sources),
        assumed=tuple(assumptions(one.application, one.job) for one in models),
    )


def read_applications(folders: Sequence[Path], wanted: Sequence[str]) -> dict[str, Application]:
    """Return the applications ``wanted`` from folders that hold one folder of traces each.

    An application's folder holds ``placements.csv`` and ``scalability.csv`` for any GPU type, or
    ``placements-TYPE.csv`` and ``scalability-TYPE.csv`` per type, and ``validation-BATCH.csv``; what one folder lacks
    may stand in a later one. Raises InputError naming the file, row and column.
    """
    for folder in folders:
        if not folder.is_dir():
            raise InputError(str(folder), "is no folder", "give a folder of AdaptDL traces: APP/placements.csv, ...")
    made = {}
    for name in dict.fromkeys(wanted):
        places = [folder / name for folder in folders if (folder / name).is_dir()]
        if not places:
            known = {path.name for folder in folders for path in folder.iterdir() if path.is_dir()}
            shown = ", ".join(map(str, folders))
            raise InputError(shown, f"holds no traces of application {name!r}", did_you_mean(name, known))
        times: dict[str, StepTimes] = {}
        for place in places:
            times = {**_step_times(place), **times}
        runs = next((found for found in map(_validation, places) if found), [])
        if not times:
            raise InputError(str(places[0]), "holds no placements.csv", "give placements.csv or placements-TYPE.csv")
        if not runs:
            raise InputError(str(places[0]), "holds no validation-BATCH.csv", "give one per measured total batch size")
        made[name] = Application(name, times, runs)
    return made


def _step_times(place: Path) -> dict[str, StepTimes]:
    """Return the step times of each GPU type in one application's folder."""
    made = {}
    for path in sorted(place.glob("placements*.csv")):
        kind = path.stem.removeprefix("placements")
        placements = read_columns(path, _PLACEMENTS, ended=True)
        digits = []
        for row, value in enumerate(placements["placement"].tolist(), start=1):
            text = str(value)
            if not (text.isascii() and text.isdigit()) or int(text) == 0:
                raise InputError(f"{path}:row {row}:placement", f"is {text}", "one digit per node, such as 44")
            digits.append(tuple(map(int, text)))
        other = place / f"scalability{kind}.csv"
        more = read_columns(other, _SCALABILITY, ended=True) if other.is_file() else None
        scaled = [] if more is None else [numbers(more, name, other, least=1.0) for name in _SCALABILITY[:3]]
        made[kind.removeprefix("-") or ANY_TYPE] = StepTimes(
            where=str(path),
            placements=digits,
            local_batch_size=numbers(placements, "local_bsz", path, least=1.0),
            times_s=_times(placements, path),
            scalability=np.column_stack(scaled) if more is not None else np.empty((0, 3)),
            scalability_times_s=_times(more, other) if more is not None else np.empty((0, 2)),
        )
    return made


def _times(frame: pd.DataFrame, path: Path) -> Floats:
    """Return step and sync times (n, 2)."""
    hour = f"seconds, at most {_LONGEST_STEP_S:.0f} (an hour)"
    step = numbers(frame, "step_time", path, most=_LONGEST_STEP_S, remedy=hour)
    sync = numbers(frame, "sync_time", path)
    bad = (sync >= step) | (step <= 0)
    if bad.any():
        row = int(bad.argmax())
        problem = f"is {sync[row]:g} with a step time of {step[row]:g}"
        raise InputError(f"{path}:row {row + 1}:sync_time", problem, "it is a part of the step, which is > 0")
    return np.column_stack([step, sync])


def _validation(place: Path) -> list[Validation]:
    """Return the validation runs in one application's folder, all of as many epochs."""
    runs: list[Validation] = []
    sizes: dict[int, Path] = {}
    for path in sorted(place.glob("validation-*.csv")):
        text = path.stem.removeprefix("validation-")
        if not text.isdigit() or int(text) == 0:
            raise InputError(str(path), f"{text!r} is no batch size", "name it validation-BATCH.csv, such as -128")
        frame = read_columns(path, _VALIDATION, ended=True)
        columns = {name: numbers(frame, name, path) for name in _VALIDATION}
        empty = columns["grad_sqr"] + columns["grad_var"] <= 0
        if empty.any():
            where = f"{path}:row {empty.argmax() + 1}:grad_sqr"
            raise InputError(where, "and grad_var are 0", "one of them must be above 0")
        sizes.setdefault(len(frame), path)
        if len(sizes) > 1:
            (short, at), (long, other) = sorted(sizes.items())
            problem = f"has {short} epochs; {other.name} has {long}"
            raise InputError(str(at), problem, "as many in all validation files; this one may be cut off")
        del columns["metric"]  # read, so that a file is whole; nothing here depends on it
        runs.append(Validation(batch_size=int(text), **columns))
    return runs
