"""Reads the input of a replay: a workload or a cluster's trace, the cluster, node events, and the applications.

Applications are read from measured traces, fitted models (kind ``ddltool.goodput``), or both: :func:`read_truth`.

Traces of clusters are Microsoft's Philly (JSON), SenseTime's Helios, Acme's, Alibaba's of 2020 and 2023 (CSV), and similar
tables. They say when a job was submitted, how many GPUs it had and for how long, but not what it trained. As in Pollux (section
5.1), each job is replaced by an application of the same size class by GPU time (:func:`to_workload`). Formats:
github.com/msr-fiddle/philly-traces, ``cluster_job_log`` (a list of jobs with ``jobid``, ``submitted_time``,
``attempts[].{start_time,end_time,detail[].gpus[]}``);
github.com/S-Lab-System-Group/HeliosData, ``cluster_log.csv`` (``job_id,gpu_num,submit_time,duration``, ...), as in
github.com/InternLM/AcmeTrace; github.com/alibaba/clusterdata, ``pai_task_table`` with its header, ``openb_pod_list``. Other
tables name their columns as in :data:`COLUMNS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ddltool.analyzers.cluster.cluster import KINDS, ClusterSpec, NodeEvent
from ddltool.analyzers.cluster.generator import (
    POLLUX,
    SIZE_CLASSES,
    Pattern,
    Template,
    class_indices,
    generate,
    make_specs,
    templates,
)
from ddltool.analyzers.cluster.truth import (
    ANY_TYPE,
    Application,
    FittedJob,
    MeasuredTimes,
    Validation,
    assumptions,
    fitted_application,
)
from ddltool.analyzers.job.goodput.observations import split_placements
from ddltool.arrays import Floats
from ddltool.artifacts import load, opened, read_text
from ddltool.errors import InputError, did_you_mean
from ddltool.goodput_model import Goodput
from ddltool.job import Cluster
from ddltool.plain_values import from_json
from ddltool.simulation_results import JobSpec, WorkloadResult
from ddltool.tables import demand_distinct_jobs, demand_valid, numbers, read_columns, read_table, texts

WORKLOAD = ("name", "time", "application", "num_replicas", "batch_size")
_EVENTS = ("time", "node", "event")
_PLACEMENTS = ("placement", "local_bsz", "step_time", "sync_time")
_SCALABILITY = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
_VALIDATION = ("progress", "iteration", "metric", "grad_sqr", "grad_var")
_MOST_GPUS = 100_000  # of a cluster or a job: more is a typing error
# Later times and longer runs than ten years, and longer steps, are in another unit, or typing errors.
_LONGEST_S, _LONGEST_STEP_S = 315_360_000.0, 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedModel:
    """A fitted model that takes the place of an application's traces.

    ``file``: the model; ``job``: what the model does not say of the job; ``given``: ``job`` as the user wrote it.
    """

    application: str
    file: Path
    job: FittedJob
    given: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Truth:
    """The applications by name; ``source``: in words, where they are from; ``assumed``: remarks on what they assume."""

    applications: dict[str, Application]
    source: str
    assumed: tuple[str, ...]


def read_cluster(path: Path) -> ClusterSpec:
    """Return the nodes of a cluster.yaml (kind ``ddltool.cluster``), in file order. Raises InputError for a bad file."""
    cluster = load(path, Cluster)
    total = sum(group.count * group.devices.count for group in cluster.nodes)
    if not 0 < total <= _MOST_GPUS:
        raise InputError(f"{path}:nodes", f"have {total} GPUs", f"from 1 to {_MOST_GPUS}")
    groups = [(group.devices.count, group.devices.type) for group in cluster.nodes for _ in range(group.count)]
    return ClusterSpec(gpus=tuple(count for count, _ in groups), gpu_types=tuple(kind for _, kind in groups))


def read_workload(path: Path) -> list[JobSpec]:
    """Return the jobs of a CSV with the columns ``name,time,application,num_replicas,batch_size``, by row.

    Raises InputError naming row and column for missing columns, repeated names and bad numbers, and for a cluster's trace,
    which must be converted to a workload first.
    """
    frame = None if is_json(path) else read_table(path, WORKLOAD)
    if frame is None or is_trace(frame):
        raise InputError(str(path), "is a cluster's trace", "make a workload of it with ddltool simulate convert first")
    return _jobs(frame, path)


def _jobs(frame: pd.DataFrame, path: Path) -> list[JobSpec]:
    """Return the jobs of a workload's table, by row, with every cell checked. Raises InputError as :func:`read_workload`."""
    missing = [name for name in WORKLOAD if name not in frame.columns]
    if missing:
        remedy = f"a workload has {', '.join(WORKLOAD)}; {ACCEPTED}"
        raise InputError(f"{path}:{missing[0]}", "column is missing", remedy)
    late = f"seconds, at most {_LONGEST_S:.0f} (ten years)"
    times = numbers(frame, "time", path, maximum=_LONGEST_S, remedy=late)
    replicas, batches = (numbers(frame, name, path, minimum=1.0, whole=True) for name in WORKLOAD[3:])
    names, kinds = (texts(frame, column, path) for column in ("name", "application"))
    demand_distinct_jobs(frame["name"], path)
    return [
        JobSpec(name=name, submit_s=time, application=kind, num_replicas=int(count), batch_size=int(batch))
        for name, time, kind, count, batch in zip(
            names, times.tolist(), kinds, replicas.tolist(), batches.tolist(), strict=True
        )
    ]


def workload_csv(workload: WorkloadResult) -> str:
    """Return a workload as the CSV that :func:`read_workload` reads, with the source of each job in a last column."""
    rows = []
    for job in workload.jobs:
        submit = f"{job.submit_s!r}".removesuffix(".0")
        rows.append((job.name, submit, job.application, job.num_replicas, job.batch_size, workload.source))
    return pd.DataFrame(rows, columns=[*WORKLOAD, "source"]).to_csv(index=False, lineterminator="\n")


def generated(pattern: Pattern, folders: Sequence[Path], cluster: ClusterSpec | None) -> WorkloadResult:
    """Return a synthetic workload by ``pattern``, of the applications that :func:`read_templates` returns."""
    source = f"synthetic: {','.join(f'{key}={value}' for key, value in asdict(pattern).items())}"
    return WorkloadResult(source=source, jobs=generate(pattern, read_templates(folders, cluster)))


def read_jobs(
    path: Path, templates_of: Callable[[], Sequence[Template]], *, jobs: int | None, hours: float | None, seed: int
) -> tuple[list[JobSpec], str]:
    """Return the jobs of a workload and "", or those of a cluster's trace and a remark on their conversion.

    A trace is recognised by its columns, or by being JSON. Of a trace, ``jobs`` jobs (None: all) of the busiest ``hours``
    (None: of the whole time) are taken; ``templates_of`` is called for the templates from which applications are drawn by
    ``seed``.
    """
    if is_json(path):
        trace = read_philly(from_json(read_text(path), str(path)), str(path))
    else:
        frame = read_table(path, WORKLOAD, no_nan=COLUMNS["duration"])
        if not is_trace(frame):
            return _jobs(frame, path), ""
        trace = read_table_trace(frame, str(path))
    job_count = len(trace.submit_s)
    if hours is not None:
        trace = busiest(trace, hours)
    specs, sizes = to_workload(trace, templates_of(), jobs=jobs, seed=seed)
    left_out = ", ".join(f"{count} {reason}" for reason, count in trace.skipped.items() if count) or "none"
    classes = ", ".join(f"{count} {name}" for name, count in sizes.items() if count)
    censored_remark = f"; {trace.censored} still ran at the log's end and count until then" if trace.censored else ""
    return specs, (
        f"{path}: {len(specs)} of {job_count} jobs ({classes}; left out: {left_out}{censored_remark}); "
        "each stands for an application of its size class by GPU time, drawn with the seed"
    )


def read_templates(folders: Sequence[Path], cluster: ClusterSpec | None) -> tuple[Template, ...]:
    """Return the templates from which generated and converted jobs are drawn, with requests that fit the cluster.

    They are those of Pollux's Table 1 whose application has traces in ``folders`` (all of them without ``folders``). Where no
    application has, they are made from every application in ``folders``; then InputError is raised without a ``cluster``.
    ``cluster`` None: requests of any size.
    """
    names = sorted({path.name for folder in folders if folder.is_dir() for path in folder.iterdir() if path.is_dir()})
    candidates = tuple(template for template in POLLUX if not folders or template.application in names)
    if not candidates:
        if cluster is None:
            raise InputError("--cluster", "is missing", "these applications' requests depend on the cluster")
        candidates = templates(read_applications(folders, names), cluster)
    if cluster is None:
        return candidates
    most_gpus = max(cluster.gpus_of(name) for name in cluster.type_names)
    # a job must not request more GPUs than there are of one type
    fitting = [
        replace(template, requests=tuple(request for request in template.requests if request[0] <= most_gpus))
        for template in candidates
    ]
    return tuple(template for template in fitting if template.requests)


def read_events(path: Path, nodes: int) -> tuple[NodeEvent, ...]:
    """Return the node events in a CSV with the columns ``time`` (seconds), ``node`` (from 0) and ``event`` (fail, leave, join).

    ``nodes``: number of nodes of the cluster. Raises InputError naming file, row and column.
    """
    frame = read_columns(path, _EVENTS)
    times = numbers(frame, "time", path)
    places = numbers(frame, "node", path, maximum=nodes - 1, whole=True, remedy=f"nodes are 0 to {nodes - 1}")
    kinds = frame["event"].fillna("empty")
    demand_valid(kinds.isin(KINDS).to_numpy(), kinds, "event", path, f"one of {', '.join(KINDS)}")
    return tuple(
        NodeEvent(time_s=time_s, node=int(node), kind=kind)
        for time_s, node, kind in zip(times.tolist(), places.tolist(), kinds.tolist(), strict=True)
    )


def read_truth(jobs: Sequence[JobSpec], folders: Sequence[Path], models: Sequence[FittedModel]) -> Truth:
    """Return the jobs' applications, each from its model in ``models`` if there is one, else from traces in ``folders``.

    Raises InputError for an application with neither, for a model whose application no job has, and for bad files.
    """
    names = {job.application for job in jobs}
    applications: dict[str, Application] = {}
    # A fitted model takes the place of measured traces.
    for fitted in models:
        if fitted.application not in names:
            problem = f"{fitted.application!r} is no application of the workload"
            raise InputError("--goodput", problem, did_you_mean(fitted.application, names))
        model = load(fitted.file, Goodput)
        params = {gpu_type: device.params for gpu_type, device in model.devices.items()} or {ANY_TYPE: model.params}
        applications[fitted.application] = fitted_application(fitted.application, params, fitted.job)
    measured = [job.application for job in jobs if job.application not in applications]
    if measured and not folders:
        remedy = "give --traces or --goodput for it"
        raise InputError("--traces", f"are missing for application {measured[0]!r}", remedy)
    sources = [*(["measured traces"] if measured else []), *(["fitted models"] if models else [])]
    return Truth(
        applications=applications | read_applications(folders, measured),
        source=" and ".join(sources),
        assumed=tuple(assumptions(fitted.application, fitted.job) for fitted in models),
    )


def read_applications(folders: Sequence[Path], names: Sequence[str]) -> dict[str, Application]:
    """Return the applications ``names`` from folders that hold one folder of traces each.

    An application's folder holds ``placements.csv`` and ``scalability.csv`` for any GPU type, or ``placements-TYPE.csv`` and
    ``scalability-TYPE.csv`` per type, and ``validation-BATCH.csv``. What is missing in one of ``folders`` may be in a later
    one. Raises InputError naming the file, row and column.
    """
    for folder in folders:
        if not folder.is_dir():
            raise InputError(str(folder), "is no folder", "give a folder of AdaptDL traces: APP/placements.csv, ...")
    applications = {}
    for name in dict.fromkeys(names):
        app_folders = [folder / name for folder in folders if (folder / name).is_dir()]
        if not app_folders:
            known_names = {path.name for folder in folders for path in folder.iterdir() if path.is_dir()}
            folder_names = ", ".join(map(str, folders))
            raise InputError(folder_names, f"holds no traces of application {name!r}", did_you_mean(name, known_names))
        where = str(app_folders[0])
        times: dict[str, MeasuredTimes] = {}
        for folder in app_folders:
            times = {**_step_times(folder), **times}  # earlier folders take precedence
        validation = next((runs for runs in map(_validation, app_folders) if runs), [])
        if not times:
            raise InputError(where, "holds no placements.csv", "give placements.csv or placements-TYPE.csv")
        if not validation:
            raise InputError(where, "holds no validation-BATCH.csv", "give one per measured total batch size")
        applications[name] = Application(name, times, validation)
    return applications


def _step_times(folder: Path) -> dict[str, MeasuredTimes]:
    """Return GPU type -> step times in one application's folder; the type is :data:`ANY_TYPE` for files that name none."""
    times = {}
    for path in sorted(folder.glob("placements*.csv")):
        suffix = path.stem.removeprefix("placements")
        placements = read_columns(path, _PLACEMENTS, ended=True)
        rotations = split_placements(placements["placement"], str(path))
        scalability_path = folder / f"scalability{suffix}.csv"
        # Without the second file, only measured placements count.
        configurations, scalability_times_s = np.empty((0, 3)), np.empty((0, 2))
        if scalability_path.is_file():
            scalability = read_columns(scalability_path, _SCALABILITY, ended=True)
            columns = [numbers(scalability, name, scalability_path, minimum=1.0) for name in _SCALABILITY[:3]]
            configurations = np.column_stack(columns)
            scalability_times_s = _step_and_sync(scalability, scalability_path)
        times[suffix.removeprefix("-") or ANY_TYPE] = MeasuredTimes(
            where=str(path),
            placements=rotations,
            local_batch_size=numbers(placements, "local_bsz", path, minimum=1.0),
            times_s=_step_and_sync(placements, path),
            scalability=configurations,
            scalability_times_s=scalability_times_s,
        )
    return times


def _step_and_sync(frame: pd.DataFrame, path: Path) -> Floats:
    """Return the step and sync times (n, 2) of a table, in seconds. Raises InputError for a sync not shorter than its step."""
    hour = f"seconds, at most {_LONGEST_STEP_S:.0f} (an hour)"
    step = numbers(frame, "step_time", path, maximum=_LONGEST_STEP_S, remedy=hour)
    sync = numbers(frame, "sync_time", path)
    demand_valid((sync < step) & (step > 0), sync, "sync_time", path, "it is a part of the step, which is > 0")
    return np.column_stack([step, sync])


def _validation(folder: Path) -> list[Validation]:
    """Return the validation runs in one application's folder, one per file; [] without files.

    Raises InputError for a bad file, and unless all have the same number of epochs.
    """
    runs: list[Validation] = []
    path_by_epochs: dict[int, Path] = {}
    for path in sorted(folder.glob("validation-*.csv")):
        digits = path.stem.removeprefix("validation-")
        if not digits.isdigit() or int(digits) == 0:
            raise InputError(str(path), f"{digits!r} is no batch size", "name it validation-BATCH.csv, such as -128")
        frame = read_columns(path, _VALIDATION, ended=True)
        columns = {name: numbers(frame, name, path) for name in _VALIDATION}
        sums = columns["grad_sqr"] + columns["grad_var"]
        demand_valid(sums > 0, sums, "grad_sqr", path, "one of them must be above 0", said="and grad_var are ")
        path_by_epochs.setdefault(len(frame), path)
        if len(path_by_epochs) > 1:
            (short, short_path), (long, long_path) = sorted(path_by_epochs.items())
            problem = f"has {short} epochs; {long_path.name} has {long}"
            raise InputError(str(short_path), problem, "as many in all validation files; this one may be cut off")
        del columns["metric"]  # it was read only to check the file
        runs.append(Validation(batch_size=int(digits), **columns))
    return runs


COLUMNS: Mapping[str, tuple[str, ...]] = {
    "name": ("job_id", "jobid", "id", "job_name"),
    "submit": ("submit_time", "submitted_time", "submit", "creation_time", "timestamp"),
    "gpus": ("gpu_num", "num_gpus", "num_gpu", "gpus", "gpu_request", "plan_gpu"),
    "duration": ("duration", "run_time", "runtime"),
    "start": ("start_time", "scheduled_time"),
    "end": ("end_time", "deletion_time"),
    "instances": ("inst_num", "num_inst", "worker_num"),
}
"""Key -> names of the column in tables. Start and end may replace the duration. With instances, GPUs are per instance."""
_START, _END = "start_time", "end_time"
# Alibaba's columns: GPUs in percent (2020), and the share of a GPU in thousandths beside a count of 1 (2023).
_PERCENT, _MILLI = "plan_gpu", "gpu_milli"
_ZONE = r"\s*(?:PST|PDT|UTC|GMT|[+-]\d\d:\d\d)$"
_BUSY_STEP_S = 3600.0  # the busiest span begins at a full hour
_SPAN = "times within ten years"
ACCEPTED = "a cluster's trace has {submit}; {gpus}; and {duration} (seconds), or {start} and {end}".format(
    **{key: " or ".join(names) for key, names in COLUMNS.items()}
)
"""The columns of a trace in words, for errors."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ClusterTrace:
    """n jobs in order of submission: ``submit_s`` (n,) since the first submission, ``gpus`` (n,), ``gpu_hours`` (n,).

    ``skipped``: reason -> number of jobs that were left out (no GPU, never started). ``censored``: number of jobs that were
    still running when the log ended; their GPU time is that until then, which is less than they really took.
    """

    submit_s: Floats
    gpus: Floats
    gpu_hours: Floats
    skipped: Mapping[str, int]
    censored: int = 0


def is_json(path: Path) -> bool:
    """Return whether a file holds JSON, by its name or because it begins with a bracket (Philly's log has no such name)."""
    if ".json" in path.suffixes:
        return True
    with suppress(InputError), opened(path) as file:
        # 64 bytes are enough to pass a byte order mark and a few blanks.
        return bool(file.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["))
    return False


def is_trace(frame: pd.DataFrame) -> bool:
    """Return whether a table is a cluster's trace: it has a column of submissions and one of GPUs."""
    chosen = _chosen(frame)
    return bool(chosen["gpus"] and chosen["submit"])


def _chosen(frame: pd.DataFrame) -> dict[str, str]:
    """Return key of :data:`COLUMNS` -> the table's column, "" for none; Alibaba's tasks are submitted at their start."""
    chosen = {key: next((name for name in names if name in frame.columns), "") for key, names in COLUMNS.items()}
    if chosen["gpus"] == _PERCENT and not chosen["submit"]:
        chosen["submit"] = chosen["start"]
    return chosen


def read_table_trace(frame: pd.DataFrame, where: str) -> ClusterTrace:
    """Return the jobs of a table with the columns of :data:`COLUMNS`. Times are seconds or ``YYYY-MM-DD HH:MM:SS``.

    In Alibaba's 2020 trace a job has a row per task, with GPUs in percent, and counts as submitted when its first task began;
    the 2023 trace has shares of a GPU in thousandths. A job that had not ended counts with its GPU time until the last time in
    the log. Raises InputError naming row and column. O(n log n), vectorised.
    """
    chosen = _chosen(frame)
    for key in ("submit", "gpus", *(() if chosen["start"] and chosen["end"] else ("duration",))):
        if not chosen[key]:
            raise InputError(f"{where}:{COLUMNS[key][0]}", "column is missing", ACCEPTED)
    start = _seconds(frame[chosen["start"]]) if chosen["start"] else np.full(len(frame), np.nan)
    has_tasks = "task_name" in frame.columns and chosen["name"] != ""
    if chosen["name"] and not has_tasks:
        demand_distinct_jobs(frame[chosen["name"]], where)
    submit = _times(frame[chosen["submit"]], where, missing=chosen["submit"] == chosen["start"])
    # in Alibaba's tables counts may be fractions, or empty where a task has no GPU
    may_be_shared = chosen["gpus"] == _PERCENT or bool(chosen["instances"])
    gpus = numbers(frame, chosen["gpus"], where, maximum=_MOST_GPUS, whole=not may_be_shared, missing=may_be_shared)
    if chosen["gpus"] == _PERCENT:
        gpus = np.nan_to_num(gpus) / 100.0
    if chosen["instances"]:
        gpus = np.nan_to_num(gpus) * numbers(frame, chosen["instances"], where, maximum=_MOST_GPUS, whole=True)
    if _MILLI in frame.columns:
        gpus = np.where(gpus == 1, numbers(frame, _MILLI, where, maximum=1000.0) / 1000.0, gpus)
    if chosen["duration"]:
        run_s = numbers(frame, chosen["duration"], where, maximum=_LONGEST_S, missing=True)
    else:
        run_s = _times(frame[chosen["end"]], where, missing=True) - _times(frame[chosen["start"]], where, missing=True)
        bad = (run_s < 0) | (run_s > _LONGEST_S)
        remedy = f"a later time than {chosen['start']}; {_SPAN}"
        demand_valid(~bad, run_s, chosen["end"], where, remedy, said=f"less {chosen['start']} is ")
    started = ~np.isnan(start)
    end = _seconds(frame[chosen["end"]]) if chosen["end"] else start + run_s
    # The last time in the log; jobs that were still running then are censored.
    log_end_s = np.max(np.concatenate([submit[~np.isnan(submit)], start[started], end[~np.isnan(end)]]), initial=0.0)
    until_now = np.where(started & np.isnan(run_s), gpus * (log_end_s - start) / 3600.0, np.nan)
    hours = gpus * run_s / 3600.0
    if has_tasks:
        # one row per job: the first submission, and the sums of GPUs and GPU time of its tasks
        tasks_frame = pd.DataFrame({"submit": submit, "gpus": gpus, "hours": hours, "until_now": until_now})
        by_job = tasks_frame.groupby(frame[chosen["name"]].to_numpy(), sort=False)
        totals = by_job.agg({"submit": "min", "gpus": "sum"}).join(by_job[["hours", "until_now"]].sum(min_count=1))
        # where one task of a job still runs, the job's ended tasks count as well
        totals["until_now"] += totals["hours"].fillna(0.0)
        submit, gpus, hours, until_now = (totals[name].to_numpy() for name in totals)
    return _trace(submit, gpus, hours, until_now, where)


def read_philly(document: Any, where: str) -> ClusterTrace:
    """Return the jobs of Philly's ``cluster_job_log``, which is the content of the file ``where``.

    A job's GPUs are those of its last attempt, its GPU time is that of all attempts with a start and an end. A job without such
    attempts counts from its first start until the last time in the log. Raises InputError naming the job (from 1) and the
    field.
    """
    if not isinstance(document, list):
        raise InputError(where, "is no list of jobs", "give Philly's cluster_job_log: a JSON list")
    jobs = pd.DataFrame({name: _fields(document, name, where) for name in ("submitted_time", "jobid")}, dtype=object)
    gpus, first_start_s = np.zeros(len(document)), np.full(len(document), np.nan)
    attempts: list[tuple[int, int, Any, Any]] = []
    for row, job_attempts in enumerate(_fields(document, "attempts", where)):
        try:
            for attempt in job_attempts:
                # Overwritten by each attempt, so that the last one counts.
                gpus[row] = sum(len(machine["gpus"]) for machine in attempt["detail"])
                start, end = (None if attempt[name] in ("", "None") else attempt[name] for name in (_START, _END))
                if start is not None and end is None:
                    first_start_s[row] = np.fmin(first_start_s[row], _seconds(pd.Series([start], dtype=object))[0])
                if start is not None and end is not None:
                    attempts.append((row, int(gpus[row]), start, end))
        except (TypeError, KeyError) as error:
            remedy = "a list of attempts with start_time, end_time, detail[].gpus[]"
            raise InputError(f"{where}:job {row + 1}:attempts", f"are broken ({error})", remedy) from None
    demand_distinct_jobs(jobs["jobid"], where)
    submit = _times(jobs["submitted_time"], where)
    attempt_rows = pd.DataFrame(attempts, columns=["row", "gpus", _START, _END])
    begin_s = _seconds(attempt_rows[_START].astype(object))
    end = _seconds(attempt_rows[_END].astype(object))
    with np.errstate(invalid="ignore"):
        valid_end = np.where((end < begin_s) | (end - begin_s > _LONGEST_S), np.nan, end)
    for name, seconds in ((_START, begin_s), (_END, end), (_END, valid_end)):
        if np.isnan(seconds).any():
            bad = int(np.isnan(seconds).argmax())
            problem = f"of an attempt is {attempt_rows[name].iloc[bad]!r}"
            remedy = "YYYY-MM-DD HH:MM:SS, the end after the start by ten years at most"
            raise InputError(f"{where}:job {attempts[bad][0] + 1}:{name}", problem, remedy)
    # From attempts to jobs: the GPU time of a job is the sum over its attempts.
    owner = attempt_rows["row"].to_numpy(dtype=int)
    gpu_seconds = attempt_rows["gpus"].to_numpy(dtype=float) * (end - begin_s)
    hours = np.bincount(owner, gpu_seconds, minlength=len(document)) / 3600.0
    log_end_s = max((float(times.max()) for times in (submit, end) if len(times)), default=0.0)
    never_ended = np.bincount(owner, minlength=len(document)) == 0
    hours[never_ended] = np.nan
    until_now = np.where(never_ended, gpus * np.maximum(log_end_s - first_start_s, 0.0) / 3600.0, np.nan)
    return _trace(submit, gpus, hours, until_now, where)


def busiest(trace: ClusterTrace, hours: float) -> ClusterTrace:
    """Return the jobs of the span of ``hours`` with most submissions, which begins at a full hour; times are since its start.

    Source: Pollux, section 5.1, which samples from the busiest eight hours.
    """
    if not 0 < hours <= _LONGEST_S / 3600:
        raise InputError("hours", f"is {hours:g}", "above 0 and at most ten years")
    starts = np.arange(0.0, trace.submit_s[-1] + _BUSY_STEP_S, _BUSY_STEP_S)
    # first and last job, exclusive, of the span after each full hour
    low = np.searchsorted(trace.submit_s, starts)
    high = np.searchsorted(trace.submit_s, starts + 3600.0 * hours)
    best = int(np.argmax(high - low))
    rows = slice(int(low[best]), int(high[best]))
    columns = {"submit_s": trace.submit_s[rows] - starts[best], "gpus": trace.gpus[rows]}
    return replace(trace, **columns, gpu_hours=trace.gpu_hours[rows])


def to_workload(
    trace: ClusterTrace, templates: Sequence[Template], *, jobs: int | None = None, seed: int = 0
) -> tuple[list[JobSpec], dict[str, int]]:
    """Return a workload of ``jobs`` jobs of the trace (None: all), and size class -> number of jobs.

    Each job becomes an application of its size class by GPU time: applications are drawn by their shares, and requests evenly
    (Pollux, section 5.1). A class without an application takes those of the nearest class that has one. ``templates``:
    applications with their classes, shares and requests. The same seed gives the same jobs.
    """
    if not templates:
        raise InputError("templates", "are none", "give at least one application")
    generator = np.random.default_rng([seed, 2])
    job_count = len(trace.submit_s)
    if jobs is not None and not 1 <= jobs <= job_count:
        raise InputError("jobs", f"is {jobs}", f"the trace has {job_count} in that span")
    chosen = np.arange(job_count) if jobs is None else np.sort(generator.choice(job_count, jobs, replace=False))
    sizes = class_indices(trace.gpu_hours[chosen])  # index of each job's size class in ``names``
    names = list(SIZE_CLASSES)
    indices_by_size = {
        size: [index for index, template in enumerate(templates) if template.size == name]
        for size, name in enumerate(names)
    }
    # For each job a template of its size class, or of the nearest class that has one.
    template_indices = np.zeros(len(chosen), dtype=np.intp)
    for size in indices_by_size:
        rows = np.flatnonzero(sizes == size)
        nearest = min(filter(indices_by_size.get, indices_by_size), key=lambda other: (abs(other - size), other))
        candidates = indices_by_size[nearest]
        shares = np.array([templates[index].share for index in candidates])
        template_indices[rows] = generator.choice(candidates, len(rows), p=shares / shares.sum())
    specs = make_specs(np.floor(trace.submit_s[chosen]), template_indices, templates, generator, "trace")
    return specs, {name: int((sizes == size).sum()) for size, name in enumerate(names)}


def _trace(submit: Floats, gpus: Floats, hours: Floats, until_now: Floats, where: str) -> ClusterTrace:
    """Return the trace of the jobs that ran on GPUs, in order of submission; arguments are (n,), one value per job.

    ``submit``: seconds; ``hours``: GPU hours, NaN where unknown; ``until_now``: GPU hours until the log's end of the jobs that
    were still running then, NaN for others. Raises InputError, with ``where`` as the file, where no job ran on a GPU.
    """
    running = ~np.isnan(until_now)
    hours = np.where(running, until_now, hours)
    unknown = np.isnan(hours)
    usable = np.flatnonzero(~unknown & (gpus > 0))
    if not usable.size:
        raise InputError(where, "holds no job that ran on a GPU", "give one with GPUs above 0 and a duration")
    order = usable[np.argsort(submit[usable], kind="stable")]
    skipped = {"no GPU": (gpus == 0) & ~unknown, "never started": unknown}
    return ClusterTrace(
        submit_s=submit[order] - submit[order[0]],
        gpus=gpus[order],
        gpu_hours=hours[order],
        skipped={reason: int(rows.sum()) for reason, rows in skipped.items()},
        censored=int((running & (gpus > 0)).sum()),
    )


def _fields(document: Sequence[Any], name: str, where: str) -> list[Any]:
    """Return the field ``name`` of every job in Philly's log, the file ``where``.

    Raises InputError naming the job (from 1) that lacks it.
    """
    values = []
    for number, job in enumerate(document, start=1):
        if not isinstance(job, dict):
            raise InputError(f"{where}:job {number}", "is no object", "jobid, submitted_time, attempts")
        if name not in job:
            raise InputError(f"{where}:job {number}:{name}", "is missing", "jobid, submitted_time and attempts")
        values.append(job[name])
    return values


def _seconds(values: pd.Series[Any]) -> Floats:
    """Return ``values`` as seconds (n,): numbers unchanged, dates since 1970 (zones are ignored), NaN for anything else."""
    seconds = pd.to_numeric(values, errors="coerce").to_numpy(dtype=np.float64, copy=True)
    unparsed = np.flatnonzero(np.isnan(seconds))
    if unparsed.size:
        date_texts = values.iloc[unparsed].astype(str).str.strip()
        # Only where a text may end with a zone (PST, UTC, +01:00): the replacement is slow on a long column.
        if date_texts.str.endswith(("T", "C", ":00")).any():
            date_texts = date_texts.str.replace(_ZONE, "", regex=True)
        dates = pd.to_datetime(date_texts, format="%Y-%m-%d %H:%M:%S", errors="coerce").to_numpy()
        # whole seconds, because years far from 1970 do not fit into 64 bits of nanoseconds
        date_seconds = dates.astype("datetime64[s]").astype(np.int64).astype(np.float64)
        seconds[unparsed] = np.where(np.isnat(dates), np.nan, date_seconds)
    return seconds


def _times(values: pd.Series[Any], where: str, *, missing: bool = False) -> Floats:
    """Return a column's times in seconds, (n,); an empty value is NaN where ``missing`` ones are allowed.

    Raises InputError, with ``where`` as the file, for values that are not times, for a column that mixes dates and seconds, and
    for times more than ten years apart, because one of these must be mistyped.
    """

    def refuse(row: int, problem: str, remedy: str) -> InputError:
        """Return the error about the value in ``row`` (from 0)."""
        return InputError(f"{where}:row {row + 1}:{values.name}", f"is {values.iloc[row]}{problem}", remedy)

    seconds = _seconds(values)
    empty = (values.isna() | values.isin(["", "None"])).to_numpy() if missing else np.zeros(len(values), dtype=bool)
    is_bad = (~np.isfinite(seconds) | (seconds < 0)) & ~empty
    if is_bad.any():
        raise refuse(int(is_bad.argmax()), "", "YYYY-MM-DD HH:MM:SS, or seconds >= 0")
    # all values must be dates, or all must be numbers
    present = ~np.isnan(seconds)
    if present.any():
        numeric = pd.to_numeric(values, errors="coerce").notna().to_numpy()
        first = int(present.argmax())
        mixed = (numeric != numeric[first]) & present
        if mixed.any():
            problem = f", and row {first + 1} has {values.iloc[first]}"
            raise refuse(int(mixed.argmax()), problem, "dates or seconds, the same in all rows")
        distance_s = np.abs(seconds - np.nanmedian(seconds))
        if np.nanmax(seconds) - np.nanmin(seconds) > _LONGEST_S:
            row = int(np.nanargmax(distance_s))
            raise refuse(row, f", {distance_s[row] / 31_536_000:,.0f} years from the middle of the trace", _SPAN)
    return seconds
