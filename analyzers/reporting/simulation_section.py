"""The section of a simulated workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.reporting.figures import LINES_DRAWN, Bars, Line, Lines
from ddltool.analyzers.reporting.section import Picture, Section, Table, counted, few, filled, shortened
from ddltool.simulation_results import PolicyRecord, SimulationDocument

# Applications with an area of their own, and points of time at which it is drawn.
_STACKED, _MOST_POINTS = 8, 400
# Points of a line over time.
_POINTS = 200
# A workload's seconds beyond ten hours tell nobody anything.
_HOURS_FROM_S = 36_000.0
Blocks = list[Picture | Table]
Floats = NDArray[np.float64]


def simulation_section(found: SimulationDocument, name: str, *, details: bool = True) -> Section:
    """Return the section of a simulated workload: completion times, waits and losses, and what it cost.

    ``details``: also the size classes, unfinished jobs and GPUs over time, GPU hours by application and every job.
    """
    jobs = len(next(iter(found.policies.values())).jobs)
    policies = "1 policy" if len(found.policies) == 1 else f"{len(found.policies)} policies"
    source = shortened(PurePath(found.workload).name or found.workload, 60)
    lead = f"{counted(jobs, 'job')} of {source} on {counted(found.gpus, 'GPU')}, under {policies}."
    drawn = f" The first {LINES_DRAWN} policies are drawn." if len(found.policies) > LINES_DRAWN else ""
    lost = found.failures is not None or any(record.cost is not None for record in found.policies.values())
    blocks: Blocks = [_completion(found, drawn), *(_losses(found) if lost or details else [])]
    if details:
        blocks += [*_classes(found), _load(found, drawn), *_allocation(found, drawn), _gpu_time(found), _jobs(found)]
    remarks = [*found.assumptions, *([found.conversion] if found.conversion else [])]
    said = [f"{lead} Simulated from {found.truth}.", *few(remarks)]
    return Section(title=f"Simulation: {name}", lead=said, blocks=blocks)


def _completion(found: SimulationDocument, remark: str) -> Picture:
    """Return the distribution of completion times under each policy, over its summary."""
    figure = completion_figure({key: [job.jct_s for job in record.jobs] for key, record in found.policies.items()})
    caption = f"Share of the jobs that were complete within a time: the higher, the better.{remark}"
    return Picture(figures=[figure], caption=caption, label="simulated", table=_summary(found))


def _summary(found: SimulationDocument) -> Table:
    """Return each policy's completion times, use of the GPUs, fairness and restarts."""
    longest = max(record.makespan_s for record in found.policies.values())
    rows = [
        (
            key,
            *(
                _time(value, longest)
                for value in (record.avg_jct_s, record.median_jct_s, record.p99_jct_s, record.makespan_s)
            ),
            f"{record.utilization:.0%}",
            f"{record.finish_time_fairness.max:.2f}",
            f"{record.finish_time_fairness.share_below_1:.0%}",
            f"{record.restarts:,}",
        )
        for key, record in found.policies.items()
    ]
    header = ("policy", "mean JCT", "median", "p99", "makespan", "used", "worst", "fair", "restarts")
    caption = (
        f"Times in {_clock(longest)[1]}; used: share of GPU time; worst: largest finish-time fairness; "
        "fair: share of jobs below 1"
    )
    return Table(caption=caption, header=header, rows=rows, label="simulated", spare=("median", "fair"))


def _losses(found: SimulationDocument) -> Blocks:
    """Return the waits, and what failures took and GPUs cost; nothing for files of older versions."""
    rows = [
        (
            key,
            f"{record.avg_queueing_s or 0:,.0f}",
            f"{record.p99_queueing_s or 0:,.0f}",
            f"{record.useful_share or 0:.0%}",
            f"{record.job_failures:,}",
            f"{record.lost_gpu_hours or 0:,.1f}",
            "-" if record.cost is None else f"{record.cost.jobs:,.2f}",
        )
        for key, record in found.policies.items()
        if record.useful_share is not None
    ]
    caption = (
        "Waits (s), use and losses; wait: from submission to first start; useful: share of the GPU time that was up in "
        "which training was done that lasted; hit: jobs that lost a node; lost: GPU hours undone; cost: of what jobs held"
    )
    header = ("policy", "wait", "p99 wait", "useful", "hit", "lost", "cost")
    return [filled(Table(caption=caption, header=header, rows=rows, label="simulated"))] if rows else []


def _classes(found: SimulationDocument) -> Blocks:
    """Return the figures of each size class under each policy."""
    rows = [
        (
            key,
            name,
            f"{one.jobs:,}",
            *(f"{value:,.0f}" for value in (one.avg_jct_s, one.median_jct_s, one.p99_jct_s, one.avg_queueing_s)),
            f"{one.worst_fairness:.2f}",
            f"{one.gpu_hours:,.0f}",
        )
        for key, record in found.policies.items()
        for name, one in record.by_class.items()
    ]
    caption = "By size class, s: small up to 1 GPU hour, medium 10, large 100, xlarge above (Pollux, 5.1)"
    header = ("policy", "class", "jobs", "mean JCT", "median", "p99", "wait", "worst", "GPU h")
    table = Table(caption=caption, header=header, rows=rows, label="simulated", text_columns=2, spare=("median",))
    return [table] if rows else []


def _load(found: SimulationDocument, remark: str) -> Picture:
    """Return how many jobs are there over time: submitted and not finished."""
    last = max(job.finish_s for record in found.policies.values() for job in record.jobs)
    times = np.linspace(0.0, max(last, 1e-9), _POINTS)
    present = {key: _jobs_at(record, times) for key, record in found.policies.items()}
    caption = f"Jobs that are submitted and not finished.{remark}"
    return _over_time(times, present, "Unfinished jobs", ylabel="unfinished jobs", caption=caption)


def _clock(longest_s: float) -> tuple[float, str]:
    """Return the factor and the name of a unit for the time of a workload."""
    return (1.0, "s") if longest_s < _HOURS_FROM_S else (1 / 3600, "h")


def _time(seconds: float, longest_s: float) -> str:
    """Return a time in the unit of :func:`_clock`, for a cell."""
    scale, unit = _clock(longest_s)
    return f"{seconds * scale:,.0f}" if unit == "s" else f"{seconds * scale:,.2f}"


def _over_time(times_s: Floats, series: Mapping[str, Floats], what: str, *, ylabel: str, caption: str) -> Picture:
    """Return counts over the time of a workload, by policy, over a table of nine times; all arrays are (t,)."""
    last = float(times_s[-1])
    scale, unit = _clock(last)
    figure = Lines(
        lines=[Line(label=key, x=times_s * scale, y=values) for key, values in series.items()],
        xlabel=f"time ({unit})",
        ylabel=ylabel,
        title=f"{what} over time",
        draw="steps",
        whole="y",
        family="policy",
    )
    picked = np.linspace(0, _POINTS - 1, 9).round().astype(int)
    rows = [(_time(times_s[at], last), *(f"{values[at]:.0f}" for values in series.values())) for at in picked]
    header = (f"time ({unit})", *series)
    table = Table(caption=f"{what} at nine times", header=header, rows=rows, label="simulated")
    return Picture(figures=[figure], caption=caption, label="simulated", table=table)


def _allocation(found: SimulationDocument, remark: str) -> Blocks:
    """Return the GPUs that are held over time, as far as the document has them."""
    held = {key: record.usage for key, record in found.policies.items() if record.usage is not None}
    last = max((usage.time_s[-1] for usage in held.values() if usage.time_s), default=0.0)
    if not last:
        return []
    times = np.linspace(0.0, last, _POINTS)
    series: dict[str, Floats] = {}
    for key, usage in held.items():
        place = np.searchsorted(np.array(usage.time_s), times, side="right") - 1
        series[key] = np.where(place >= 0, np.array([*usage.gpus, 0.0])[place], 0.0)
    caption = f"GPUs that jobs hold, of {found.gpus}.{remark}"
    return [_over_time(times, series, "GPUs held", ylabel="GPUs that are held", caption=caption)]


def _jobs_at(record: PolicyRecord, times: Floats) -> Floats:
    """Return the number of unfinished jobs at ``times`` (t,), in seconds, shape (t,)."""
    submitted = np.sort([job.submit_s for job in record.jobs])
    finished = np.sort([job.finish_s for job in record.jobs])
    there = np.searchsorted(submitted, times, side="right") - np.searchsorted(finished, times, side="right")
    return there.astype(np.float64)


def _gpu_time(found: SimulationDocument) -> Picture:
    """Return the GPU hours that each application got under each policy."""
    applications = sorted({job.application for record in found.policies.values() for job in record.jobs})
    hours = {
        key: {
            name: sum(job.gpu_seconds for job in record.jobs if job.application == name) / 3600 for name in applications
        }
        for key, record in found.policies.items()
    }
    rows = [
        (key, *(f"{got[name]:,.1f}" for name in applications), f"{sum(got.values()):,.1f}")
        for key, got in hours.items()
    ]
    table = Table(
        caption="GPU hours by application",
        header=("policy", *(shortened(name, 30) for name in applications), "all"),
        rows=rows,
        label="simulated",
    )
    figure = Bars(
        rows=[(key, sum(got.values())) for key, got in hours.items()],
        xlabel="GPU hours of all jobs",
        title="GPU hours by policy",
        family="policy",
    )
    return Picture(figures=[figure], caption="GPU hours that all jobs took.", label="simulated", table=table)


def _jobs(found: SimulationDocument) -> Table:
    by_name = {key: {job.name: job for job in record.jobs} for key, record in found.policies.items()}
    first = next(iter(found.policies.values())).jobs
    longest = max(record.makespan_s for record in found.policies.values())
    rows = []
    for job in first:
        cells = [shortened(job.name, 40), job.application, _time(job.submit_s, longest)]
        cells += [_time(jobs[job.name].jct_s, longest) if job.name in jobs else "-" for jobs in by_name.values()]
        rows.append(cells)
    header = ("job", "application", "submitted", *(f"JCT, {key}" for key in by_name))
    return Table(
        caption=f"Completion time of each job ({_clock(longest)[1]})",
        header=header,
        rows=rows,
        label="simulated",
        text_columns=2,
    )


def completion_figure(jct_s: Mapping[str, Sequence[float]]) -> Lines:
    """Return the distribution of completion times (share of jobs done within t), one line per policy.

    All lines end where the longest does: one that stops would seem to have fewer jobs.
    """
    # A job that ends as it arrives has no place on a log axis; a millisecond is as good.
    times = {name: np.maximum(np.sort(np.asarray(values, dtype=float)), 1e-3) for name, values in jct_s.items()}
    first, last = min(at[0] for at in times.values()), max(at[-1] for at in times.values())
    lines = [
        Line(
            label=name,
            x=np.concatenate([[first], at, [last]]),
            y=np.concatenate([[0.0], np.arange(1, len(at) + 1) / len(at), [1.0]]),
        )
        for name, at in times.items()
    ]
    return Lines(
        title="Completion times (simulated)",
        lines=lines,
        xlabel="completion time, from submission to finish",
        ylabel="share of the jobs",
        draw="steps",
        x_axis="durations",
        family="policy",
    )
