"""Workload traces of real clusters as jobs to replay: Microsoft's Philly (JSON), SenseTime's Helios (CSV), and tables alike.

Such a trace says when a job came, how many GPUs it had and for how long; it does not say what it trained. As Pollux does
(section 5.1), each job is replaced by an application of the same size class by GPU time (:func:`to_workload`).

Formats: github.com/msr-fiddle/philly-traces, ``cluster_job_log`` (a list of jobs with ``jobid``, ``submitted_time``,
``attempts[].{start_time,end_time,detail[].gpus[]}``); github.com/S-Lab-System-Group/HeliosData, ``cluster_log.csv``
(``job_id,gpu_num,submit_time,duration``, ...). Other tables name the four columns as in :data:`COLUMNS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddltool.analyzers.scheduling.generator import SIZE_CLASSES, Template, class_indices, make_specs
from ddltool.artifacts import opened
from ddltool.errors import InputError
from ddltool.simulation_results import JobSpec
from ddltool.tables import demand_distinct_jobs, numbers

Floats = NDArray[np.float64]
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "name": ("job_id", "jobid", "id"),
    "submit": ("submit_time", "submitted_time", "submit"),
    "gpus": ("gpu_num", "num_gpus", "num_gpu", "gpus"),
    "duration": ("duration", "run_time", "runtime"),
}
"""Names under which a table may hold each column; ``start_time`` and ``end_time`` may stand for the duration."""
_START, _END = "start_time", "end_time"
_ZONE = r"\s*(?:PST|PDT|UTC|GMT|[+-]\d\d:\d\d)$"
_MOST_GPUS, _LONGEST_S = 100_000, 315_360_000.0
_BUSY_STEP_S = 3600.0
_SPAN = "times within ten years"
ACCEPTED = (
    f"a cluster's trace has {' or '.join(COLUMNS['submit'])}; {' or '.join(COLUMNS['gpus'])}; and "
    f"{' or '.join(COLUMNS['duration'])} (seconds), or {_START} and {_END}"
)
"""The columns of a trace, for people."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ClusterTrace:
    """n jobs in order of submission: ``submit_s`` (n,) from the first one on, ``gpus`` (n,), ``gpu_hours`` (n,).

    ``skipped`` counts the jobs that were left out, by reason: no GPU, never started. ``censored`` counts those that still
    ran when the log ended: their GPU time is what they had until then, which is less than they took.
    """

    submit_s: Floats
    gpus: Floats
    gpu_hours: Floats
    skipped: Mapping[str, int]
    censored: int = 0


def is_json(path: Path) -> bool:
    """Return whether a file holds JSON: by its name, or, as the name of Philly's log does not tell, by how it begins."""
    if ".json" in path.suffixes:
        return True
    with suppress(InputError), opened(path) as file:
        return bool(file.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["))
    return False


def is_trace(frame: pd.DataFrame) -> bool:
    """Return whether a table is a cluster's trace and not a workload."""
    return all(any(name in frame.columns for name in COLUMNS[key]) for key in ("gpus", "submit"))


def read_table_trace(frame: pd.DataFrame, where: str) -> ClusterTrace:
    """Return the jobs of a Helios-style table. Times are seconds or ``YYYY-MM-DD HH:MM:SS``; durations seconds.

    Raises InputError naming row and column. O(n log n), vectorised.
    """
    chosen = {key: next((name for name in names if name in frame.columns), "") for key, names in COLUMNS.items()}
    spans = _START in frame.columns and _END in frame.columns
    for key in ("submit", "gpus", *(() if spans else ("duration",))):
        if not chosen[key]:
            raise InputError(f"{where}:{COLUMNS[key][0]}", "column is missing", ACCEPTED)
    if chosen["name"]:
        demand_distinct_jobs(frame[chosen["name"]], where)
    submit = _times(frame[chosen["submit"]], where)
    gpus = numbers(frame, chosen["gpus"], where, most=_MOST_GPUS, whole=True)
    start = _seconds(frame[_START]) if _START in frame.columns else np.full(len(frame), np.nan)
    started = ~np.isnan(start)
    if chosen["duration"]:
        length = numbers(frame, chosen["duration"], where, most=_LONGEST_S, missing=True)
    else:
        length = _times(frame[_END], where, missing=True) - _times(frame[_START], where, missing=True)
        for bad, how in ((length < 0, "before"), (length > _LONGEST_S, "after")):
            if bad.any():
                row = int(bad.argmax())
                problem = f"lies {abs(length[row]):,.0f} s {how} {_START}"
                raise InputError(f"{where}:row {row + 1}:{_END}", problem, f"a later time; {_SPAN}")
    open_ = started & np.isnan(length)
    end = _seconds(frame[_END]) if _END in frame.columns else start + length
    over = np.nanmax(np.concatenate([submit, start[started], end[~np.isnan(end)]]))
    until_now = np.where(open_, gpus * (over - start) / 3600.0, np.nan)
    return _trace(submit, gpus, gpus * length / 3600.0, until_now, where)


def read_philly(document: Any, where: str) -> ClusterTrace:
    """Return the jobs of Philly's ``cluster_job_log``. A job's GPUs are those of its last attempt, its GPU time that of all.

    Attempts without a start or an end count nothing; a job none of
    whose attempts ended counts from its first start until the last time in the log.

    Raises InputError naming the job (from 1) and the field.
    """
    if not isinstance(document, list):
        raise InputError(where, "is no list of jobs", "give Philly's cluster_job_log: a JSON list")
    jobs = pd.DataFrame({name: _fields(document, name, where) for name in ("submitted_time", "jobid")}, dtype=object)
    gpus, running = np.zeros(len(document)), np.full(len(document), np.nan)
    attempts: list[tuple[int, int, Any, Any]] = []
    for row, tries in enumerate(_fields(document, "attempts", where)):
        try:
            for attempt in tries:
                gpus[row] = sum(len(machine["gpus"]) for machine in attempt["detail"])
                start, end = (None if attempt[name] in ("", "None") else attempt[name] for name in (_START, _END))
                if start is not None and end is None:
                    running[row] = np.fmin(running[row], _seconds(pd.Series([start], dtype=object))[0])
                if start is not None and end is not None:
                    attempts.append((row, int(gpus[row]), start, end))
        except (TypeError, KeyError) as error:
            remedy = "a list of attempts with start_time, end_time, detail[].gpus[]"
            raise InputError(f"{where}:job {row + 1}:attempts", f"are broken ({error})", remedy) from None
    demand_distinct_jobs(jobs["jobid"], where)
    submit = _times(jobs["submitted_time"], where)
    ran = pd.DataFrame(attempts, columns=["row", "gpus", _START, _END])
    begin, end = _seconds(ran[_START].astype(object)), _seconds(ran[_END].astype(object))
    with np.errstate(invalid="ignore"):
        orderly = np.where((end < begin) | (end - begin > _LONGEST_S), np.nan, end)
    for name, found in ((_START, begin), (_END, end), (_END, orderly)):
        if np.isnan(found).any():
            bad = int(np.isnan(found).argmax())
            problem = f"of an attempt is {ran[name].iloc[bad]!r}"
            remedy = "YYYY-MM-DD HH:MM:SS, the end after the start by ten years at most"
            raise InputError(f"{where}:job {attempts[bad][0] + 1}:{name}", problem, remedy)
    owner = ran["row"].to_numpy(dtype=int)
    hours = np.bincount(owner, ran["gpus"].to_numpy(dtype=float) * (end - begin), minlength=len(document)) / 3600.0
    over = max((float(times.max()) for times in (submit, end) if len(times)), default=0.0)
    never = np.bincount(owner, minlength=len(document)) == 0
    hours[never] = np.nan
    until_now = np.where(never, gpus * np.maximum(over - running, 0.0) / 3600.0, np.nan)
    return _trace(submit, gpus, hours, until_now, where)


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
        censored=trace.censored,
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


def _trace(submit: Floats, gpus: Floats, hours: Floats, until_now: Floats, where: str) -> ClusterTrace:
    """Return the jobs that ran on GPUs, by submission; all arrays are (n,), ``hours`` of GPU time NaN where unknown.

    ``until_now``: the GPU hours up to the log's end of jobs that were then still running, NaN for others.
    """
    running = ~np.isnan(until_now)
    hours = np.where(running, until_now, hours)
    unknown = np.isnan(hours)
    kept = np.flatnonzero(~unknown & (gpus > 0))
    if not kept.size:
        raise InputError(where, "holds no job that ran on a GPU", "give one with GPUs above 0 and a duration")
    order = kept[np.argsort(submit[kept], kind="stable")]
    skipped = {"no GPU": (gpus == 0) & ~unknown, "never started": unknown}
    return ClusterTrace(
        submit_s=submit[order] - submit[order[0]],
        gpus=gpus[order],
        gpu_hours=hours[order],
        skipped={reason: int(rows.sum()) for reason, rows in skipped.items()},
        censored=int((running & (gpus > 0)).sum()),
    )


def _fields(document: Sequence[Any], name: str, where: str) -> list[Any]:
    """Return one field of every job."""
    made = []
    for number, job in enumerate(document, start=1):
        if not isinstance(job, dict):
            raise InputError(f"{where}:job {number}", "is no object", "jobid, submitted_time, attempts")
        if name not in job:
            raise InputError(f"{where}:job {number}:{name}", "is missing", "jobid, submitted_time and attempts")
        made.append(job[name])
    return made


def _seconds(values: pd.Series[Any]) -> Floats:
    """Return seconds (n,): numbers as they are, dates since 1970 (their zone's name dropped), NaN for anything else."""
    made = pd.to_numeric(values, errors="coerce").to_numpy(dtype=np.float64, copy=True)
    rest = np.flatnonzero(np.isnan(made))
    if rest.size:
        shown = values.iloc[rest].astype(str).str.strip()
        if shown.str.endswith(("T", "C", ":00")).any():
            shown = shown.str.replace(_ZONE, "", regex=True)
        dates = pd.to_datetime(shown, format="%Y-%m-%d %H:%M:%S", errors="coerce").to_numpy()
        # In whole seconds, as numpy counts them: years far from 1970 do not fit into nanoseconds.
        seconds = dates.astype("datetime64[s]").astype(np.int64).astype(np.float64)
        made[rest] = np.where(np.isnat(dates), np.nan, seconds)
    return made


def _times(values: pd.Series[Any], where: str, *, missing: bool = False) -> Floats:
    """Return seconds; a missing value stays NaN where it may. Raises InputError for what is no time.

    Also for times far apart: of them one is mistyped, or dates and seconds stand in one column.
    """

    def refuse(row: int, problem: str, remedy: str) -> InputError:
        return InputError(f"{where}:row {row + 1}:{values.name}", f"is {values.iloc[row]}{problem}", remedy)

    made = _seconds(values)
    empty = (values.isna() | values.isin(["", "None"])).to_numpy() if missing else np.zeros(len(values), dtype=bool)
    bad = (~np.isfinite(made) | (made < 0)) & ~empty
    if bad.any():
        raise refuse(int(bad.argmax()), "", "YYYY-MM-DD HH:MM:SS, or seconds >= 0")
    given = ~np.isnan(made)
    if given.any():
        numeric, first = pd.to_numeric(values, errors="coerce").notna().to_numpy(), int(given.argmax())
        mixed = (numeric != numeric[first]) & given
        if mixed.any():
            problem = f", and row {first + 1} has {values.iloc[first]}"
            raise refuse(int(mixed.argmax()), problem, "dates or seconds, the same in all rows")
        off = np.abs(made - np.nanmedian(made))
        if np.nanmax(made) - np.nanmin(made) > _LONGEST_S:
            row = int(np.nanargmax(off))
            raise refuse(row, f", {off[row] / 31_536_000:,.0f} years from the middle of the trace", _SPAN)
    return made
