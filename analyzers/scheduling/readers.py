"""Workload traces of real clusters as jobs to replay: Microsoft's Philly (JSON), SenseTime's Helios (CSV), and tables alike.

Such a trace says when a job came, how many GPUs it had and for how long; it does not say what it trained. As Pollux does
(section 5.1), each job is replaced by an application of the same size class by GPU time (:func:`to_workload`).

Formats: github.com/msr-fiddle/philly-traces, ``cluster_job_log`` (a list of jobs with ``jobid``, ``submitted_time``,
``attempts[].{start_time,end_time,detail[].gpus[]}``); github.com/S-Lab-System-Group/HeliosData, ``cluster_log.csv``
(``job_id,gpu_num,submit_time,duration``, ...). Other tables name the four columns as in :data:`COLUMNS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddltool.analyzers.scheduling.generator import SIZE_CLASSES, Template, class_indices, make_specs
from ddltool.analyzers.scheduling.job import JobSpec
from ddltool.errors import InputError

Floats = NDArray[np.float64]
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "name": ("job_id", "jobid", "id"),
    "submit": ("submit_time", "submitted_time", "submit"),
    "gpus": ("gpu_num", "num_gpus", "num_gpu", "gpus"),
    "duration": ("duration", "run_time", "runtime"),
}
"""Names under which a table may hold each column; ``start_time`` and ``end_time`` may stand for the duration."""
_START, _END = "start_time", "end_time"
_ZONE = r"\s+(?:PST|PDT|UTC|GMT)$"
_MOST_GPUS, _LONGEST_S = 100_000, 315_360_000.0
_BUSY_STEP_S = 3600.0
_SPAN = "times within ten years"


@dataclass(frozen=True, kw_only=True, eq=False)
class ClusterTrace:
    """n jobs in order of submission: ``submit_s`` (n,) from the first one on, ``gpus`` (n,), ``gpu_hours`` (n,).

    ``skipped`` counts the jobs that were left out, by reason: they used no GPU, or never started.
    """

    submit_s: Floats
    gpus: Floats
    gpu_hours: Floats
    skipped: Mapping[str, int]


def is_trace(columns: Sequence[str]) -> bool:
    """Return whether a table with these columns is a cluster's trace and not a workload."""
    return any(name in columns for name in COLUMNS["gpus"]) and any(name in columns for name in COLUMNS["submit"])


def read_table_trace(frame: pd.DataFrame, where: str) -> ClusterTrace:
    """Return the jobs of a Helios-style table. Times are seconds or ``YYYY-MM-DD HH:MM:SS``; durations seconds.

    Raises InputError naming row and column. O(n log n), vectorised.
    """
    chosen = {key: next((name for name in names if name in frame.columns), None) for key, names in COLUMNS.items()}
    for key in ("submit", "gpus"):
        if chosen[key] is None:
            raise InputError(f"{where}:{COLUMNS[key][0]}", "column is missing", f"one of {', '.join(COLUMNS[key])}")
    if chosen["name"] is not None:
        _unique(frame[chosen["name"]], where, chosen["name"])
    submit = _times(frame[chosen["submit"]], where, str(chosen["submit"]))
    gpus = _numbers(frame[chosen["gpus"]], where, str(chosen["gpus"]), _MOST_GPUS)
    if (bad := np.flatnonzero(gpus != np.floor(gpus))).size:
        raise InputError(f"{where}:row {bad[0] + 1}:{chosen['gpus']}", f"is {gpus[bad[0]]:g}", "a whole number of GPUs")
    if chosen["duration"] is not None:
        length = _numbers(frame[chosen["duration"]], where, str(chosen["duration"]), _LONGEST_S, missing=True)
    elif _START in frame.columns and _END in frame.columns:
        start = _times(frame[_START], where, _START, missing=True)
        length = _times(frame[_END], where, _END, missing=True) - start
        if (bad := np.flatnonzero(length < 0)).size:
            raise InputError(
                f"{where}:row {bad[0] + 1}:{_END}", f"lies {-length[bad[0]]:g} s before {_START}", "a later time"
            )
        if (bad := np.flatnonzero(length > _LONGEST_S)).size:
            problem = f"lies {_years(length[bad[0]])} after {_START}"
            raise InputError(f"{where}:row {bad[0] + 1}:{_END}", problem, _SPAN)
    else:
        raise InputError(f"{where}:duration", "column is missing", f"give it, or {_START} and {_END}")
    return _trace(submit, gpus, gpus * length / 3600.0, where)


def read_philly(document: Any, where: str) -> ClusterTrace:
    """Return the jobs of Philly's ``cluster_job_log``. A job's GPUs are those of its last attempt, its GPU time that of all.

    Attempts without a start or an end count nothing. Raises InputError naming the job (from 1) and the field.
    """
    if not isinstance(document, list):
        raise InputError(where, "is no list of jobs", "give Philly's cluster_job_log: a JSON list")
    submits: list[Any] = []
    names: list[Any] = []
    gpus = np.zeros(len(document))
    owner: list[int] = []
    counts: list[int] = []
    spans: tuple[list[Any], list[Any]] = ([], [])
    for row, job in enumerate(document):
        if not isinstance(job, dict):
            raise InputError(f"{where}:job {row + 1}", "is no object", "jobid, submitted_time, attempts")
        submits.append(_field(job, "submitted_time", where, row))
        names.append(_field(job, "jobid", where, row))
        attempts = _field(job, "attempts", where, row)
        try:
            for attempt in attempts:
                gpus[row] = sum(len(machine["gpus"]) for machine in attempt["detail"])
                if _given(attempt["start_time"]) and _given(attempt["end_time"]):
                    owner.append(row)
                    counts.append(int(gpus[row]))
                    spans[0].append(attempt["start_time"])
                    spans[1].append(attempt["end_time"])
        except (TypeError, KeyError) as error:
            remedy = "a list of attempts with start_time, end_time, detail[].gpus[]"
            raise InputError(f"{where}:job {row + 1}:attempts", f"are broken ({error})", remedy) from None
    _unique(pd.Series(names, dtype=object), where, "jobid")
    submit = _times(pd.Series(submits, dtype=object), where, "submitted_time")
    start, end = (_when(pd.Series(each, dtype=object)) for each in spans)
    with np.errstate(invalid="ignore"):
        orderly = np.where((end < start) | (end - start > _LONGEST_S), np.nan, end)
    for name, found in ((_START, start), (_END, end), (_END, orderly)):
        if (bad := np.flatnonzero(np.isnan(found))).size:
            problem = f"of an attempt is {spans[name == _END][bad[0]]!r}"
            raise InputError(
                f"{where}:job {owner[bad[0]] + 1}:{name}",
                problem,
                "YYYY-MM-DD HH:MM:SS, the end after the start by ten years at most",
            )
    hours = np.full(len(document), np.nan)
    held = np.bincount(owner, np.array(counts) * (end - start), minlength=len(document)) / 3600.0
    ran = np.unique(np.array(owner, dtype=int))
    hours[ran] = held[ran]
    return _trace(submit, gpus, hours, where)


def busiest(trace: ClusterTrace, hours: float) -> ClusterTrace:
    """Return the jobs of the span of ``hours`` in which most jobs came, beginning at a full hour; times from its start.

    Source: Pollux, section 5.1, which samples from the busiest eight hours.
    """
    if not 0 < hours <= _LONGEST_S / 3600:
        raise InputError("hours", f"is {hours:g}", "above 0 and at most ten years")
    starts = np.arange(0.0, trace.submit_s[-1] + _BUSY_STEP_S, _BUSY_STEP_S)
    low = np.searchsorted(trace.submit_s, starts)
    high = np.searchsorted(trace.submit_s, starts + 3600.0 * hours)
    best = int(np.argmax(high - low))
    kept = slice(int(low[best]), int(high[best]))
    return ClusterTrace(
        submit_s=trace.submit_s[kept] - starts[best],
        gpus=trace.gpus[kept],
        gpu_hours=trace.gpu_hours[kept],
        skipped=trace.skipped,
    )


def to_workload(
    trace: ClusterTrace, templates: Sequence[Template], *, jobs: int | None = None, seed: int = 0
) -> tuple[list[JobSpec], dict[str, int]]:
    """Return a workload: ``jobs`` of the trace (None: all), each an application of its size class; and jobs per class.

    Within a class applications are drawn by their shares, requests evenly (Pollux, section 5.1); a class without an
    application gets those of the nearest class that has one. Same seed, same jobs.
    """
    if not templates:
        raise InputError("templates", "are none", "give at least one application")
    chance = np.random.default_rng([seed, 2])
    total = len(trace.submit_s)
    chosen = np.arange(total)
    if jobs is not None:
        if not 1 <= jobs <= total:
            raise InputError("jobs", f"is {jobs}", f"the trace has {total} in that span")
        chosen = np.sort(chance.choice(total, jobs, replace=False))
    sizes = class_indices(trace.gpu_hours[chosen])
    names = list(SIZE_CLASSES)
    of_size = [[at for at, template in enumerate(templates) if template.size == name] for name in names]
    kinds = np.zeros(len(chosen), dtype=np.intp)
    for size in range(len(names)):
        rows = np.flatnonzero(sizes == size)
        nearest = min(
            (other for other in range(len(names)) if of_size[other]), key=lambda other: (abs(other - size), other)
        )
        shares = np.array([templates[at].share for at in of_size[nearest]])
        kinds[rows] = chance.choice(of_size[nearest], len(rows), p=shares / shares.sum())
    specs = make_specs(np.floor(trace.submit_s[chosen]), kinds, templates, chance, "trace")
    return specs, {name: int((sizes == size).sum()) for size, name in enumerate(names)}


def _trace(submit: Floats, gpus: Floats, hours: Floats, where: str) -> ClusterTrace:
    """Return the jobs that ran on GPUs, by submission."""
    unstarted = np.isnan(hours)
    kept = np.flatnonzero(~unstarted & (gpus > 0))
    if not kept.size:
        raise InputError(where, "holds no job that ran on a GPU", "give one with GPUs above 0 and a duration")
    order = kept[np.argsort(submit[kept], kind="stable")]
    return ClusterTrace(
        submit_s=submit[order] - submit[order[0]],
        gpus=gpus[order],
        gpu_hours=hours[order],
        skipped={"no GPU": int(((gpus == 0) & ~unstarted).sum()), "never started": int(unstarted.sum())},
    )


def _given(value: Any) -> bool:
    return value not in (None, "", "None")


def _field(job: Mapping[str, Any], name: str, where: str, row: int) -> Any:
    if name not in job:
        raise InputError(f"{where}:job {row + 1}:{name}", "is missing", "jobid, submitted_time and attempts")
    return job[name]


def _unique(names: pd.Series[Any], where: str, column: str) -> None:
    again = names.duplicated().to_numpy()
    if again.any():
        row = int(np.flatnonzero(again)[0])
        raise InputError(
            f"{where}:row {row + 1}:{column}", f"{str(names.iloc[row])!r} stands twice", "name each job once"
        )


def _when(values: pd.Series[Any]) -> Floats:
    """Return seconds (n,): numbers as they are, dates since 1970 (their zone's name dropped), NaN for anything else."""
    made = pd.to_numeric(values, errors="coerce").to_numpy(dtype=np.float64)
    rest = np.flatnonzero(np.isnan(made))
    if rest.size:
        texts = values.iloc[rest].astype(str).str.strip()
        if texts.str.endswith(("T", "C")).any():
            texts = texts.str.replace(_ZONE, "", regex=True)
        dates = pd.to_datetime(texts, format="%Y-%m-%d %H:%M:%S", errors="coerce").to_numpy()
        # In whole seconds, as numpy counts them: years far from 1970 do not fit into nanoseconds.
        seconds = dates.astype("datetime64[s]").astype(np.int64).astype(np.float64)
        seconds[np.isnat(dates)] = np.nan
        made = made.copy()
        made[rest] = seconds
    return made


def _years(seconds: float) -> str:
    return f"{abs(seconds) / 31_536_000:,.0f} years"


def _check_span(made: Floats, values: pd.Series[Any], where: str, column: str) -> None:
    """Raise InputError for times far apart: of them one is mistyped, or dates and seconds stand in one column."""
    numeric = pd.to_numeric(values, errors="coerce").notna().to_numpy()
    given = ~np.isnan(made)
    if (mixed := np.flatnonzero((numeric != numeric[given.argmax()]) & given)).size:
        row, other = int(mixed[0]), int(given.argmax())
        problem = f"is {values.iloc[row]}, and row {other + 1} has {values.iloc[other]}"
        raise InputError(f"{where}:row {row + 1}:{column}", problem, "dates or seconds, the same in all rows")
    if given.any() and np.nanmax(made) - np.nanmin(made) > _LONGEST_S:
        middle = float(np.nanmedian(made))
        row = int(np.nanargmax(np.abs(made - middle)))
        problem = f"is {values.iloc[row]}, {_years(made[row] - middle)} from the middle of the trace"
        raise InputError(f"{where}:row {row + 1}:{column}", problem, _SPAN)


def _times(values: pd.Series[Any], where: str, column: str, *, missing: bool = False) -> Floats:
    """Return seconds; a missing value stays NaN where it may. Raises InputError for what is no time."""
    made = _when(values)
    empty = (values.isna() | values.isin(["", "None"])).to_numpy() if missing else np.zeros(len(values), dtype=bool)
    bad = np.flatnonzero((~np.isfinite(made) | (made < 0)) & ~empty)
    if bad.size:
        row = int(bad[0])
        raise InputError(
            f"{where}:row {row + 1}:{column}", f"is {values.iloc[row]}", "YYYY-MM-DD HH:MM:SS, or seconds >= 0"
        )
    _check_span(made, values, where, column)
    return made


def _numbers(values: pd.Series[Any], where: str, column: str, most: float, *, missing: bool = False) -> Floats:
    made = pd.to_numeric(values, errors="coerce").to_numpy(dtype=np.float64)
    empty = (values.isna() | values.isin(["", "None"])).to_numpy() if missing else np.zeros(len(values), dtype=bool)
    with np.errstate(invalid="ignore"):
        bad = np.flatnonzero(~((made >= 0) & (made <= most)) & ~empty)
    if bad.size:
        row = int(bad[0])
        raise InputError(f"{where}:row {row + 1}:{column}", f"is {values.iloc[row]}", f"a number from 0 to {most:.0f}")
    return made
