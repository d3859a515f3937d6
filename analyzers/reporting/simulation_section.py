"""Sections of replays: a workload, a sweep, two policies in pairs, a search's trials, a rented cluster; advice on a resize."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.reporting.figures import LINES_DRAWN, Bars, Line, Lines
from ddltool.analyzers.reporting.section import Blocks, Column, Picture, Section, Table, filled, pictured, some, tabled
from ddltool.errors import few, shortened
from ddltool.simulation_results import (
    AdviceResult,
    AutoscalingResult,
    ComparedMeasure,
    PolicyComparison,
    PolicyRecord,
    ResizeOption,
    SearchResult,
    SimulationDocument,
    SweepDocument,
    SweepFigures,
)
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


_BARS_DRAWN = 24
# Ratios that differ more than this are drawn on a logarithmic axis.
_LOG_FROM = 10.0
# A bar beyond, or below one over this, leaves nothing of the others.
_MOST_DRAWN = 1e12
# A comparison's measures in the words of ``ddltool sweep --compare``.
_MEASURES = {
    **{"avg_jct_s": "average JCT", "p99_jct_s": "p99 JCT", "worst_fairness": "worst fairness"},
    **{"makespan_s": "makespan", "gpu_seconds": "cost (GPU time)", "cost": "cost (price)"},
}
_MOST_OPTIONS_SHOWN = 12
PUBLISHED_SCALING = {"cost": -0.25, "seconds": 0.06}
"""Pollux, section 5.4.1: ImageNet, goodput against throughput."""
PUBLISHED_SEARCH: Mapping[str, tuple[float, float]] = {"baseline": (2040.0, 50_400.0), "pollux": (1500.0, 36_000.0)}
"""Mean JCT and makespan, s (Pollux, Table 3: 100 trials of ResNet18 on CIFAR-10, two nodes with 8 A100 each)."""


def sweep_section(found: SweepDocument, name: str) -> Section:
    """Return the section of a sweep: means over the seeds, the comparison of two policies, the replays that failed."""
    groups = found.means_by_policy()
    failed = [cell for cell in found.cells if cell.figures is None]
    workloads, policies = ({getattr(cell, key) for cell in found.cells} for key in ("workload", "policy"))
    seeds = counted(len({cell.seed for cell in found.cells}), "seed")
    under = "1 policy" if len(policies) == 1 else f"{len(policies)} policies"
    lead = f"{counted(len(workloads), 'workload')} under {under} with {seeds}: {counted(len(found.cells), 'replay')}."
    missing = found.cells_wanted - len(found.cells)
    if missing > 0:
        lead += f" {counted(missing, 'replay')} of this sweep are not done yet."
    blocks: Blocks = [_drawn(groups, several=len(workloads) > 1)] if groups else []
    blocks += [_compared(found.comparison)] if found.comparison is not None else []
    if failed:
        columns = {"workload": "workload", "policy": "policy", "seed": "seed:d"}
        columns |= {"why": lambda cell: cell.error or "no figures"}  # type: ignore[dict-item]
        blocks.append(tabled("Replays that failed", "read", failed, columns, text_columns=2))
    return Section(title=f"Sweep: {name}", lead=[lead], blocks=blocks)


Means = tuple[str, str, int, SweepFigures]


def _drawn(groups: Sequence[Means], *, several: bool) -> Picture:
    """Return the mean completion times as bars over the table of all means."""

    def figure_of(field: str, form: str, below: float = 1e12) -> Callable[[Means], str]:
        return lambda row: format(value := getattr(row[3], field), form if value < below else ".3g")

    columns: dict[str, Column[Means]] = {
        **{"workload": lambda row: shortened(row[0], 30), "policy": "1", "seeds": "2:d"},
        **{"mean JCT": figure_of("avg_jct_s", ",.0f"), "median": figure_of("median_jct_s", ",.0f")},
        **{"p99": figure_of("p99_jct_s", ",.0f"), "makespan": figure_of("makespan_s", ",.0f")},
        **{"used": figure_of("utilization", ".0%", 1e4), "worst": figure_of("worst_fairness", ".2f")},
        **{"restarts": figure_of("restarts", ",.1f"), "cost": "3.cost:.4g"},
    }
    caption = "Means over the seeds, times in s; used: share of GPU time; worst: largest finish-time fairness"
    spare = ("median", "used", "seeds")
    table = tabled(caption, "simulated", groups, columns, text_columns=2, spare=spare)
    bars = [
        (f"{shortened(policy, 30)}, {shortened(workload, 30)}" if several else policy, mean.avg_jct_s)
        for workload, policy, _, mean in groups[:_BARS_DRAWN]
    ]
    figure = Bars(rows=bars, xlabel="mean JCT", title="Mean job completion time", seconds=True)
    caption = "Mean job completion time over the seeds: the shorter, the better."
    return pictured(f"{caption}{some(_BARS_DRAWN, groups, 'means')}", filled(table), figure)


def _compared(found: PolicyComparison) -> Picture | Table:
    """Return two policies compared: the first's figures over the second's, with their intervals."""
    first, second = shortened(found.first, 60), shortened(found.second, 60)

    def verdict(one: ComparedMeasure) -> str:
        if one.low is None or one.high is None:
            return "unknown"
        return "not decided" if not one.decided else "lower" if one.ratio < 1 else "higher"

    columns: dict[str, Column[ComparedMeasure]] = {
        "": lambda one: _MEASURES.get(one.measure, one.measure),
        "change": lambda one: _change(one.ratio),
        "interval": lambda one: (
            "unknown" if verdict(one) == "unknown" else f"{_change(one.low)} to {_change(one.high)}"
        ),
        **{"lower on": lambda one: f"{one.better} of {one.units}", "verdict": verdict},
    }
    caption = f"Change from {second} to {first}, with the {found.confidence:.0%} interval of Student's t on log ratios"
    table = tabled(caption, "simulated", found.comparisons, columns)
    drawn = [one for one in found.comparisons if 1 / _MOST_DRAWN < one.ratio < _MOST_DRAWN]
    if not drawn:
        return table
    ratios = [one.ratio for one in drawn]
    figure = Bars(
        rows=[(_MEASURES.get(one.measure, one.measure), one.ratio) for one in drawn],
        xlabel=f"{first} over {second}",
        title=f"{first} against {second}",
        level=("equal", 1.0),
        intervals=[(one.low, one.high) if one.low and one.high and one.high < _MOST_DRAWN else None for one in drawn],
        log=max(*ratios, 1.0) > _LOG_FROM * min(*ratios, 1.0),
    )
    caption = f"Geometric means of the ratios, paired by {shortened(found.unit, 30)}: below 1 {first} is better."
    return pictured(caption, table, figure)


def _change(ratio: float | None) -> str:
    """Return a ratio as a change in percent, a large one as a factor."""
    if ratio is None:
        return "-"
    return f"{ratio - 1:+.1%}" if ratio < 100 else f"x{ratio:.3g}"


def _against(value: float, base: float) -> str:
    """Return by how much a figure differs from the baseline's, nothing for the baseline itself."""
    return f"{value / base - 1:+.0%}" if value != base else ""


def autoscaling_section(found: AutoscalingResult) -> Section:
    """Return the section of a rented cluster: one row per rule, and the published changes."""
    base, goodput = found.rules["throughput"], found.rules["goodput"]
    rows = []
    for name, one in found.rules.items():
        taken = f"{one.seconds / 3600:.2f}", _against(one.seconds, base.seconds)
        paid = f"{one.cost:,.1f}", _against(one.cost, base.cost)
        nodes = f"{one.first_nodes}-{one.last_nodes}"
        rows.append((name, *taken, *paid, f"{one.efficiency:.2f}", nodes, str(one.restarts)))
    if found.application == "imagenet":
        seconds, cost = (f"{PUBLISHED_SCALING[key]:+.0%}" for key in ("seconds", "cost"))
        rows.append(("published", "", seconds, "", cost, "", "", ""))
    caption = "Changes against the throughput scaler; effic.: statistical efficiency"
    header = ("rule", "hours", "change", "cost", "change", "effic.", "nodes", "restarts")
    lead = (
        f"Scaling {found.application} by goodput costs {goodput.cost / base.cost - 1:+.0%} and takes "
        f"{goodput.seconds / base.seconds - 1:+.0%} against scaling by throughput, on up to {found.most_nodes} nodes."
    )
    table = Table(caption=caption, header=header, rows=rows, label="simulated")
    return Section(title=f"Autoscaling: {found.application}", lead=[lead], blocks=[table])


def search_section(found: SearchResult) -> Section:
    """Return the section of a search's trials: one row per policy, and what was published."""
    asked, base = found.search, next(iter(found.policies.values()))
    rows = []
    for name, one in found.policies.items():
        jct = f"{one.avg_jct_s / 60:.1f}", _against(one.avg_jct_s, base.avg_jct_s)
        span = f"{one.makespan_s / 3600:.2f}", _against(one.makespan_s, base.makespan_s)
        rows.append((name, *jct, *span, f"{one.gpu_seconds / 3600:,.0f}", str(one.restarts)))
    if asked.application == "cifar10":
        first = PUBLISHED_SEARCH["baseline"]
        for name, (jct_s, span_s) in PUBLISHED_SEARCH.items():
            jct, span = (
                (f"{jct_s / 60:.0f}", _against(jct_s, first[0])),
                (f"{span_s / 3600:.0f}", _against(span_s, first[1])),
            )
            rows.append((f"published {name}", *jct, *span, "", ""))
    caption = (
        f"Changes against a fixed {asked.local_batch_size} samples on each GPU; span: from the first trial to the "
        "end of the last"
    )
    header = ("", "JCT, min", "change", "span, h", "change", "GPU h", "restarts")
    trials = f"{asked.trials} trials of {asked.application}, {asked.concurrent} at a time"
    lead = f"{trials} on {counted(found.gpus, 'GPU')}; the trials are synthetic."
    table = Table(caption=caption, header=header, rows=rows, label="simulated")
    return Section(title=f"Search: {asked.application}", lead=[lead], blocks=[table])


def advice_section(found: AdviceResult) -> Section:
    """Return the answer in words and the options that save most."""
    now, best = found.now, found.best
    if not found.resize or best is None:
        why = "no other allocation is possible now" if best is None else "no resize saves time on average"
        lead = [f"Stay on {counted(now.replicas, 'GPU')}: {why}."]
    else:
        lead = [
            f"Resize from {now.replicas} to {counted(best.replicas, 'GPU')} on {counted(best.nodes, 'node')}: saves "
            f"{_span(best.expected_saved_s)} on average, some time with probability {best.probability:.0%}."
        ]
        if best.break_even_s is not None:
            left = f"{_span(now.remaining_s)} are left, as it is now"
            lead.append(f"It pays from {_span(best.break_even_s)} left on; {left}.")
    columns: dict[str, Column[ResizeOption]] = {
        **{"GPUs": lambda one: f"{one.replicas} on {one.nodes}", "batch": "batch_size:d", "gain": "gain:.2f"},
        "pays from": lambda one: "never" if one.break_even_s is None else _cell(one.break_even_s),
        "saves": lambda one: _cell(one.expected_saved_s),
        **{"10 %": lambda one: _cell(one.saved_p10_s), "90 %": lambda one: _cell(one.saved_p90_s)},
        **{"sure": "probability:.0%", "GPU h": lambda one: f"{round(one.extra_gpu_seconds / 3600, 1) + 0.0:+.1f}"},
    }
    caption = (
        "gain: goodput over that of now; pays from: with so much left; saves: the mean, and what 10 and 90 % of cases stay "
        "below; sure: probability of saving time; GPU h: held more than without the resize"
    )
    rows = sorted(found.options, key=lambda one: -one.expected_saved_s)[:_MOST_OPTIONS_SHOWN]
    blocks = [tabled(caption, "predicted", rows, columns)] if rows else []
    return Section(title=f"Advice: {found.job}", lead=lead, blocks=blocks)


def _span(seconds: float) -> str:
    """Return a time as people say it."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if abs(seconds) >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _cell(seconds: float) -> str:
    """Return a time as short as a column needs it."""
    return _span(seconds).replace(" min", "m").replace(" ", "")
