"""The section of a simulated workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.reporting.figures import LINES_DRAWN, Bars, Line, Lines
from ddltool.analyzers.reporting.section import Blocks, Column, Picture, Section, Table, filled, pictured, tabled
from ddltool.errors import few, shortened
from ddltool.simulation_results import PolicyRecord, SimulationDocument
from ddltool.units import counted

# Points of a line over time.
_POINTS = 200
# A workload's seconds beyond ten hours tell nobody anything.
_HOURS_FROM_S = 36_000.0
Floats = NDArray[np.float64]


def simulation_section(found: SimulationDocument, name: str, *, details: bool = True) -> Section:
    """Return the section of a simulated workload: completion times, waits and losses, and what it cost.

    ``details``: also the size classes, unfinished jobs and GPUs over time, GPU hours by application and every job.
    """
    records = found.policies
    jobs = len(next(iter(records.values())).jobs)
    policies = "1 policy" if len(records) == 1 else f"{len(records)} policies"
    source = shortened(PurePath(found.workload).name or found.workload, 60)
    lead = f"{counted(jobs, 'job')} of {source} on {counted(found.gpus, 'GPU')}, under {policies}."
    drawn = f" The first {LINES_DRAWN} policies are drawn." if len(records) > LINES_DRAWN else ""
    lost = found.failures is not None or any(record.cost is not None for record in records.values())
    figure = completion_figure({key: [job.jct_s for job in record.jobs] for key, record in records.items()})
    caption = f"Share of the jobs that were complete within a time: the higher, the better.{drawn}"
    blocks: Blocks = [pictured(caption, _summary(records), figure), *(_losses(records) if lost or details else [])]
    if details:
        blocks += [*_classes(records), _load(records, drawn), *_allocation(found, drawn), _gpu_time(records)]
        blocks.append(_jobs(records))
    remarks = [*found.assumptions, *([found.conversion] if found.conversion else [])]
    return Section(
        title=f"Simulation: {name}", lead=[f"{lead} Simulated from {found.truth}.", *few(remarks)], blocks=blocks
    )


Records = Mapping[str, PolicyRecord]


def _summary(records: Records) -> Table:
    """Return each policy's completion times, use of the GPUs, fairness and restarts."""
    longest = max(record.makespan_s for record in records.values())
    caption = (
        f"Times in {_clock(longest)[1]}; used: share of GPU time; worst: largest finish-time fairness; "
        "fair: share of jobs below 1"
    )
    columns: dict[str, Column[PolicyRecord]] = {
        "mean JCT": lambda record: _time(record.avg_jct_s, longest),
        "median": lambda record: _time(record.median_jct_s, longest),
        "p99": lambda record: _time(record.p99_jct_s, longest),
        "makespan": lambda record: _time(record.makespan_s, longest),
        **{"used": "utilization:.0%", "worst": "finish_time_fairness.max:.2f"},
        **{"fair": "finish_time_fairness.share_below_1:.0%", "restarts": "restarts"},
    }
    spare = ("median", "fair")
    return tabled(caption, "simulated", records.values(), columns, names=("policy", records), spare=spare)


def _losses(records: Records) -> Blocks:
    """Return the waits, and what failures took and GPUs cost; nothing for files of older versions."""
    known = {key: record for key, record in records.items() if record.useful_share is not None}
    caption = (
        "Waits (s), use and losses; wait: from submission to first start; useful: share of the GPU time that was up in "
        "which training was done that lasted; hit: jobs that lost a node; lost: GPU hours undone; cost: of what jobs held"
    )
    columns = {"wait": "avg_queueing_s:,.0f", "p99 wait": "p99_queueing_s:,.0f", "useful": "useful_share:.0%"}
    columns |= {"hit": "job_failures", "lost": "lost_gpu_hours:,.1f", "cost": "cost.jobs:,.2f"}
    return [filled(tabled(caption, "simulated", known.values(), columns, names=("policy", known)))] if known else []


def _classes(records: Records) -> Blocks:
    """Return the figures of each size class under each policy."""
    rows = [(key, name, one) for key, record in records.items() for name, one in record.by_class.items()]
    columns = {"class": "1", "jobs": "2.jobs", "mean JCT": "2.avg_jct_s:,.0f", "median": "2.median_jct_s:,.0f"}
    columns |= {"p99": "2.p99_jct_s:,.0f", "wait": "2.avg_queueing_s:,.0f", "worst": "2.worst_fairness:.2f"}
    columns |= {"GPU h": "2.gpu_hours:,.0f"}
    caption = "By size class, s: small up to 1 GPU hour, medium 10, large 100, xlarge above (Pollux, 5.1)"
    made = tabled(caption, "simulated", rows, {"policy": "0", **columns}, text_columns=2, spare=("median",))
    return [made] if rows else []


def _load(records: Records, remark: str) -> Picture:
    """Return how many jobs are there over time: submitted and not finished."""
    last = max(job.finish_s for record in records.values() for job in record.jobs)
    times = np.linspace(0.0, max(last, 1e-9), _POINTS)
    present = {}
    for key, record in records.items():
        begun, over = (np.sort([getattr(job, at) for job in record.jobs]) for at in ("submit_s", "finish_s"))
        there = np.searchsorted(begun, times, side="right") - np.searchsorted(over, times, side="right")
        present[key] = there.astype(np.float64)
    return _over_time(times, present, "unfinished jobs", f"Jobs that are submitted and not finished.{remark}")


def _clock(longest_s: float) -> tuple[float, str]:
    """Return the factor and the name of a unit for the time of a workload."""
    return (1.0, "s") if longest_s < _HOURS_FROM_S else (1 / 3600, "h")


def _time(seconds: float, longest_s: float) -> str:
    """Return a time in the unit of :func:`_clock`, for a cell."""
    scale, unit = _clock(longest_s)
    return f"{seconds * scale:,.0f}" if unit == "s" else f"{seconds * scale:,.2f}"


def _over_time(times_s: Floats, series: Mapping[str, Floats], what: str, caption: str) -> Picture:
    """Return counts over the time of a workload, by policy, over a table of nine times; all arrays are (t,)."""
    last, title = float(times_s[-1]), what[:1].upper() + what[1:]
    scale, unit = _clock(last)
    lines = [Line(label=key, x=times_s * scale, y=values) for key, values in series.items()]
    xlabel = f"time ({unit})"
    figure = Lines(
        lines=lines, xlabel=xlabel, ylabel=what, title=f"{title} over time", draw="steps", whole="y", family="policy"
    )
    picked = np.linspace(0, _POINTS - 1, 9).round().astype(int)
    rows = [(_time(times_s[at], last), *(f"{values[at]:.0f}" for values in series.values())) for at in picked]
    table = Table(caption=f"{title} at nine times", header=(xlabel, *series), rows=rows, label="simulated")
    return pictured(caption, table, figure)


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
    return [_over_time(times, series, "GPUs held", f"GPUs that jobs hold, of {found.gpus}.{remark}")]


def _gpu_time(records: Records) -> Picture:
    """Return the GPU hours that each application got under each policy."""
    hours = {key: dict.fromkeys(sorted({job.application for job in one.jobs}), 0.0) for key, one in records.items()}
    for key, record in records.items():
        for job in record.jobs:
            hours[key][job.application] += job.gpu_seconds / 3600
    names = sorted({name for got in hours.values() for name in got})
    columns = {shortened(name, 30): lambda got, name=name: f"{got.get(name, 0.0):,.1f}" for name in names}
    table = tabled(
        "GPU hours by application",
        "simulated",
        hours.values(),
        {**columns, "all": lambda got: f"{sum(got.values()):,.1f}"},
        names=("policy", hours),
    )
    rows = [(key, sum(got.values())) for key, got in hours.items()]
    figure = Bars(rows=rows, xlabel="GPU hours of all jobs", title="GPU hours by policy", family="policy")
    return pictured("GPU hours that all jobs took.", table, figure)


def _jobs(records: Records) -> Table:
    by_name = {key: {job.name: job for job in record.jobs} for key, record in records.items()}
    longest = max(record.makespan_s for record in records.values())
    rows = []
    for job in next(iter(records.values())).jobs:
        cells = [shortened(job.name, 40), job.application, _time(job.submit_s, longest)]
        rows.append(
            [*cells, *(_time(own[job.name].jct_s, longest) if job.name in own else "-" for own in by_name.values())]
        )
    header = ("job", "application", "submitted", *(f"JCT, {key}" for key in by_name))
    caption = f"Completion time of each job ({_clock(longest)[1]})"
    return Table(caption=caption, header=header, rows=rows, label="simulated", text_columns=2)


def completion_figure(jct_s: Mapping[str, Sequence[float]]) -> Lines:
    """Return the distribution of completion times (share of jobs done within t), one line per policy.

    All lines end where the longest does: one that stops would seem to have fewer jobs.
    """
    # A job that ends as it arrives has no place on a log axis; a millisecond is as good.
    times = {name: np.maximum(np.sort(np.asarray(values, dtype=float)), 1e-3) for name, values in jct_s.items()}
    first, last = min(at[0] for at in times.values()), max(at[-1] for at in times.values())
    lines = []
    for name, at in times.items():
        shares = np.concatenate([[0.0], np.arange(1, len(at) + 1) / len(at), [1.0]])
        lines.append(Line(label=name, x=np.concatenate([[first], at, [last]]), y=shares))
    return Lines(
        title="Completion times (simulated)",
        lines=lines,
        xlabel="completion time, from submission to finish",
        ylabel="share of the jobs",
        draw="steps",
        x_axis="durations",
        family="policy",
    )
