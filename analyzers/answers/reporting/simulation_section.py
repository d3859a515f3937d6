"""Sections of replays: a workload, a sweep, two policies in pairs, a search's trials, a rented cluster; advice on a resize.

A *replay* simulates a workload's jobs on a cluster under a scheduling policy. JCT: job completion time, from submission to
finish. Finish-time fairness: a job's JCT over the one that it would have with an equal share of the cluster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath

import numpy as np
from scipy.special import stdtrit

from ddltool.analyzers.answers.reporting.figures import BARS_DRAWN, LINES_DRAWN, MOST_DRAWN, Bars, Line, Lines
from ddltool.analyzers.answers.reporting.section import (
    Blocks,
    Column,
    Picture,
    Section,
    Table,
    Verdict,
    how_many_drawn,
    pictured,
    tabled,
    without_empty_columns,
)
from ddltool.arrays import Floats
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
from ddltool.units import counted, show_seconds

# Points of a line over time.
_TIME_POINTS = 200
# A workload's seconds beyond ten hours tell nobody anything.
_HOURS_FROM_S = 36_000.0


def simulation_section(document: SimulationDocument, name: str, *, details: bool = True) -> Section:
    """Return the section of a simulated workload: completion times, waits, losses and cost by policy.

    ``details``: also size classes, unfinished jobs and GPUs over time, GPU hours by application, and all jobs.
    """
    records = document.policies
    jobs = len(next(iter(records.values())).jobs)
    policies = "1 policy" if len(records) == 1 else f"{len(records)} policies"
    source = shortened(PurePath(document.workload).name or document.workload, 60)
    lead = f"{counted(jobs, 'job')} of {source} on {counted(document.gpus, 'GPU')}, under {policies}."
    drawn_remark = f" The first {LINES_DRAWN} policies are drawn." if len(records) > LINES_DRAWN else ""
    # Without simulated failures or prices, the table of losses is only a detail.
    has_losses = document.failures is not None or any(record.cost is not None for record in records.values())
    figure = completion_figure({key: [job.jct_s for job in record.jobs] for key, record in records.items()})
    caption = f"Share of the jobs that were complete within a time: the higher, the better.{drawn_remark}"
    blocks: Blocks = [
        pictured(caption, _summary_table(records), figure),
        *(_losses_tables(records) if has_losses or details else []),
    ]
    if details:
        blocks += [
            *_size_class_tables(records),
            _unfinished_jobs_picture(records, drawn_remark),
            *_gpus_held_pictures(document, drawn_remark),
            _gpu_hours_picture(records),
        ]
        blocks.append(_job_table(records))
    remarks = [*document.assumptions, *([document.conversion] if document.conversion else [])]
    sentences = [f"{lead} Simulated from {document.truth}.", *few(remarks)]
    verdict = _simulation_verdict(document)
    return Section(title=f"Simulation: {name}", lead=[verdict.answer, *sentences], blocks=blocks, verdict=verdict)


Records = Mapping[str, PolicyRecord]
"""By policy: what the simulation recorded of all jobs."""


def _summary_table(records: Records) -> Table:
    """Return the table of each policy's job completion times (JCT), use of the GPUs, fairness and restarts.

    Times are in seconds, or in hours if the longest makespan is ten hours or more.
    """
    longest = max(record.makespan_s for record in records.values())
    caption = (
        f"Times in {_time_scale(longest)[1]}; used: share of GPU time; worst: largest finish-time fairness; "
        "fair: share of jobs below 1"
    )
    columns: dict[str, Column[PolicyRecord]] = {
        "mean JCT": lambda record: _time_cell(record.avg_jct_s, longest),
        "median": lambda record: _time_cell(record.median_jct_s, longest),
        "p99": lambda record: _time_cell(record.p99_jct_s, longest),
        "makespan": lambda record: _time_cell(record.makespan_s, longest),
        "used": "utilization:.0%",
        "worst": "finish_time_fairness.max:.2f",
        "fair": "finish_time_fairness.share_below_1:.0%",
        "restarts": "restarts",
    }
    spare = ("median", "fair")
    return tabled(caption, "simulated", records.values(), columns, names=("policy", records), spare=spare)


def _losses_tables(records: Records) -> Blocks:
    """Return the table of waits, losses by failures and cost, as a list; [] for files of older versions, which lack these."""
    with_losses = {key: record for key, record in records.items() if record.useful_share is not None}
    caption = (
        "Waits (s), use and losses; wait: from submission to first start; useful: share of the GPU time that was up in "
        "which training was done that lasted; hit: jobs that lost a node; lost: GPU hours undone; cost: of what jobs held"
    )
    columns = {"wait": "avg_queueing_s:,.0f", "p99 wait": "p99_queueing_s:,.0f", "useful": "useful_share:.0%"}
    columns |= {"hit": "job_failures", "lost": "lost_gpu_hours:,.1f", "cost": "cost.jobs:,.2f"}
    if not with_losses:
        return []
    table = tabled(caption, "simulated", with_losses.values(), columns, names=("policy", with_losses))
    return [without_empty_columns(table)]


def _size_class_tables(records: Records) -> Blocks:
    """Return the table of each size class under each policy, as a list; [] if the file has no classes."""
    rows = [(key, name, figures) for key, record in records.items() for name, figures in record.by_class.items()]
    columns = {"class": "1", "jobs": "2.jobs", "mean JCT": "2.avg_jct_s:,.0f", "median": "2.median_jct_s:,.0f"}
    columns |= {"p99": "2.p99_jct_s:,.0f", "wait": "2.avg_queueing_s:,.0f", "worst": "2.worst_fairness:.2f"}
    columns |= {"GPU h": "2.gpu_hours:,.0f"}
    caption = "By size class, s: small up to 1 GPU hour, medium 10, large 100, xlarge above (Pollux, 5.1)"
    table = tabled(caption, "simulated", rows, {"policy": "0", **columns}, text_columns=2, spare=("median",))
    return [table] if rows else []


def _unfinished_jobs_picture(records: Records, remark: str) -> Picture:
    """Return the number of submitted and unfinished jobs over time, by policy; ``remark``: appended to the caption."""
    last_finish_s = max(job.finish_s for record in records.values() for job in record.jobs)
    times_s = np.linspace(0.0, max(last_finish_s, 1e-9), _TIME_POINTS)
    unfinished = {}
    for key, record in records.items():
        submit_s = np.sort([job.submit_s for job in record.jobs])
        finish_s = np.sort([job.finish_s for job in record.jobs])
        submitted = np.searchsorted(submit_s, times_s, side="right")  # number of jobs at each time
        finished = np.searchsorted(finish_s, times_s, side="right")
        unfinished[key] = (submitted - finished).astype(np.float64)
    return _counts_over_time(
        times_s, unfinished, "unfinished jobs", f"Jobs that are submitted and not finished.{remark}"
    )


def _time_scale(longest_s: float) -> tuple[float, str]:
    """Return (factor from seconds, unit) for a workload of at most ``longest_s``: hours from ten hours on, else seconds."""
    return (1.0, "s") if longest_s < _HOURS_FROM_S else (1 / 3600, "h")


def _time_cell(seconds: float, longest_s: float) -> str:
    """Return a time as text, without its unit, in the unit that :func:`_time_scale` chooses for ``longest_s``."""
    scale, unit = _time_scale(longest_s)
    return f"{seconds * scale:,.0f}" if unit == "s" else f"{seconds * scale:,.2f}"


def _counts_over_time(times_s: Floats, series: Mapping[str, Floats], quantity: str, caption: str) -> Picture:
    """Return the picture of counts over time, a line for each policy, with a table of nine times.

    ``times_s`` and each of ``series`` (by policy): (t,). ``quantity``: the name of what is counted.
    """
    last_s = float(times_s[-1])
    title = quantity[:1].upper() + quantity[1:]
    scale, unit = _time_scale(last_s)
    lines = [Line(label=key, x=times_s * scale, y=values) for key, values in series.items()]
    xlabel = f"time ({unit})"
    figure = Lines(
        lines=lines,
        xlabel=xlabel,
        ylabel=quantity,
        title=f"{title} over time",
        draw="steps",
        whole="y",
        family="policy",
    )
    # Nine of the drawn points, the first and the last included.
    shown_points = np.linspace(0, _TIME_POINTS - 1, 9).round().astype(int)
    rows = [
        (_time_cell(times_s[point], last_s), *(f"{values[point]:.0f}" for values in series.values()))
        for point in shown_points
    ]
    table = Table(caption=f"{title} at nine times", header=(xlabel, *series), rows=rows, label="simulated")
    return pictured(caption, table, figure)


def _gpus_held_pictures(document: SimulationDocument, remark: str) -> Blocks:
    """Return the picture of GPUs held over time, by policy, as a list; [] for a document without records of use.

    ``remark``: appended to the caption.
    """
    usages = {key: record.usage for key, record in document.policies.items() if record.usage is not None}
    last_s = max((usage.time_s[-1] for usage in usages.values() if usage.time_s), default=0.0)
    if not last_s:
        return []
    times_s = np.linspace(0.0, last_s, _TIME_POINTS)
    series: dict[str, Floats] = {}
    for key, usage in usages.items():
        # Index of the last change at or before each time; -1, before the first change, picks the 0 appended at the end.
        usage_index = np.searchsorted(np.array(usage.time_s), times_s, side="right") - 1
        series[key] = np.array([*usage.gpus, 0.0])[usage_index]
    return [_counts_over_time(times_s, series, "GPUs held", f"GPUs that jobs hold, of {document.gpus}.{remark}")]


def _gpu_hours_picture(records: Records) -> Picture:
    """Return the table of GPU hours of each application under each policy, with bars of those of all jobs."""
    hours: dict[str, dict[str, float]] = {}  # by policy and application
    for key, record in records.items():
        hours[key] = dict.fromkeys(sorted({job.application for job in record.jobs}), 0.0)
        for job in record.jobs:
            hours[key][job.application] += job.gpu_seconds / 3600
    names = sorted({name for application_hours in hours.values() for name in application_hours})
    columns = {
        shortened(name, 30): lambda application_hours, name=name: f"{application_hours.get(name, 0.0):,.1f}"
        for name in names
    }
    table = tabled(
        "GPU hours by application",
        "simulated",
        hours.values(),
        {**columns, "all": lambda application_hours: f"{sum(application_hours.values()):,.1f}"},
        names=("policy", hours),
    )
    rows = [(key, sum(application_hours.values())) for key, application_hours in hours.items()]
    figure = Bars(rows=rows, xlabel="GPU hours of all jobs", title="GPU hours by policy", family="policy")
    return pictured("GPU hours that all jobs took.", table, figure)


def _job_table(records: Records) -> Table:
    """Return the table of each job's completion time under each policy; "-" if a policy's record lacks the job."""
    jobs_by_policy = {key: {job.name: job for job in record.jobs} for key, record in records.items()}
    longest = max(record.makespan_s for record in records.values())
    first_record = next(iter(records.values()))
    rows = []
    for job in first_record.jobs:
        cells = [shortened(job.name, 40), job.application, _time_cell(job.submit_s, longest)]
        cells += [
            _time_cell(jobs[job.name].jct_s, longest) if job.name in jobs else "-" for jobs in jobs_by_policy.values()
        ]
        rows.append(cells)
    header = ("job", "application", "submitted", *(f"JCT, {key}" for key in jobs_by_policy))
    caption = f"Completion time of each job ({_time_scale(longest)[1]})"
    return Table(caption=caption, header=header, rows=rows, label="simulated", text_columns=2)


def completion_figure(jct_s: Mapping[str, Sequence[float]]) -> Lines:
    """Return the figure of the share of jobs that were complete within a time, one line per policy.

    ``jct_s``: completion times in seconds, by policy. All lines are extended to the longest time, as one that ends before
    would look as if it had fewer jobs.
    """
    # At least a millisecond, as a logarithmic axis has no 0.
    sorted_times_s = {
        name: np.maximum(np.sort(np.asarray(values, dtype=float)), 1e-3) for name, values in jct_s.items()
    }
    shortest_s = min(durations_s[0] for durations_s in sorted_times_s.values())
    longest_s = max(durations_s[-1] for durations_s in sorted_times_s.values())
    lines = []
    for name, durations_s in sorted_times_s.items():
        shares = np.concatenate([[0.0], np.arange(1, len(durations_s) + 1) / len(durations_s), [1.0]])
        lines.append(Line(label=name, x=np.concatenate([[shortest_s], durations_s, [longest_s]]), y=shares))
    return Lines(
        title="Completion times (simulated)",
        lines=lines,
        xlabel="completion time, from submission to finish",
        ylabel="share of the jobs",
        draw="steps",
        x_axis="durations",
        family="policy",
    )


# Ratios that differ more than this are drawn on a logarithmic axis.
_LOG_FROM = 10.0
# A comparison's measures in the words of ``ddltool simulate sweep --compare``.
_MEASURES = {
    "avg_jct_s": "average JCT",
    "p99_jct_s": "p99 JCT",
    "worst_fairness": "worst fairness",
    "makespan_s": "makespan",
    "gpu_seconds": "cost (GPU time)",
    "cost": "cost (price)",
}
_MOST_OPTIONS_SHOWN = 12
PUBLISHED_SCALING = {"cost": -0.25, "seconds": 0.06}
"""Pollux, section 5.4.1: ImageNet, goodput against throughput."""
PUBLISHED_SEARCH: Mapping[str, tuple[float, float]] = {"baseline": (2040.0, 50_400.0), "pollux": (1500.0, 36_000.0)}
"""Mean JCT and makespan, s (Pollux, Table 3: 100 trials of ResNet18 on CIFAR-10, two nodes with 8 A100 each)."""


def sweep_section(sweep: SweepDocument, name: str) -> Section:
    """Return the section of a sweep: means over the seeds, the comparison of two policies (if any), and failed replays."""
    groups = sweep.means_by_policy()
    failed = [cell for cell in sweep.cells if cell.figures is None]
    workloads = {cell.workload for cell in sweep.cells}
    policies = {cell.policy for cell in sweep.cells}
    seeds = counted(len({cell.seed for cell in sweep.cells}), "seed")
    policy_count = "1 policy" if len(policies) == 1 else f"{len(policies)} policies"
    lead = f"{counted(len(workloads), 'workload')} under {policy_count} with {seeds}: {counted(len(sweep.cells), 'replay')}."
    missing_replays = sweep.cells_wanted - len(sweep.cells)
    if missing_replays > 0:
        lead += f" {counted(missing_replays, 'replay')} of this sweep are not done yet."
    blocks: Blocks = [_means_picture(groups, several=len(workloads) > 1)] if groups else []
    if sweep.comparison is not None:
        blocks.append(_comparison_picture(sweep.comparison))
    if failed:
        columns = {"workload": "workload", "policy": "policy", "seed": "seed:d"}
        columns |= {"why": lambda cell: cell.error or "no figures"}  # type: ignore[dict-item]
        blocks.append(tabled("Replays that failed", "read", failed, columns, text_columns=2))
    verdict = _sweep_verdict(sweep)
    answers = [] if verdict is None else [verdict.answer]
    return Section(title=f"Sweep: {name}", lead=[*answers, lead], blocks=blocks, verdict=verdict)


Means = tuple[str, str, int, SweepFigures]
"""(workload, policy, number of replays, means of their figures)."""


def _means_picture(groups: Sequence[Means], *, several: bool) -> Picture:
    """Return bars of the mean completion times, with the table of all means.

    ``groups``: (workload, policy, number of replays, their means). ``several``: whether there are several workloads; the
    bars then name them.
    """

    def figure_of(field: str, form: str, below: float = 1e12) -> Callable[[Means], str]:
        """Return the column of a mean in the format ``form``; numbers from ``below`` on, too long for it, in three digits."""

        def cell_text(row: Means) -> str:
            """Return the cell of one policy on one workload."""
            *_, means = row
            value = getattr(means, field)
            return format(value, form if value < below else ".3g")

        return cell_text

    columns: dict[str, Column[Means]] = {
        "workload": lambda row: shortened(row[0], 30),
        "policy": "1",
        "seeds": "2:d",
        "mean JCT": figure_of("avg_jct_s", ",.0f"),
        "median": figure_of("median_jct_s", ",.0f"),
        "p99": figure_of("p99_jct_s", ",.0f"),
        "makespan": figure_of("makespan_s", ",.0f"),
        "used": figure_of("utilization", ".0%", 1e4),
        "worst": figure_of("worst_fairness", ".2f"),
        "restarts": figure_of("restarts", ",.1f"),
        "cost": "3.cost:.4g",
    }
    caption = "Means over the seeds, times in s; used: share of GPU time; worst: largest finish-time fairness"
    spare = ("median", "used", "seeds")
    table = tabled(caption, "simulated", groups, columns, text_columns=2, spare=spare)
    bars = [
        (f"{shortened(policy, 30)}, {shortened(workload, 30)}" if several else policy, mean.avg_jct_s)
        for workload, policy, _, mean in groups[:BARS_DRAWN]
    ]
    figure = Bars(rows=bars, xlabel="mean JCT", title="Mean job completion time", seconds=True)
    caption = "Mean job completion time over the seeds: the shorter, the better."
    return pictured(f"{caption}{how_many_drawn(BARS_DRAWN, groups, 'means')}", without_empty_columns(table), figure)


def _comparison_picture(comparison: PolicyComparison) -> Picture | Table:
    """Return the table of the first policy's changes against the second, within a picture of the ratios with intervals.

    Returns the table alone if no ratio can be drawn.
    """
    first = shortened(comparison.first, 60)
    second = shortened(comparison.second, 60)

    def verdict(measure: ComparedMeasure) -> str:
        """Return "lower" or "higher" for the first policy's figure, "not decided", or "unknown" without an interval."""
        if measure.low is None or measure.high is None:
            return "unknown"
        if not measure.decided:
            return "not decided"
        return "lower" if measure.ratio < 1 else "higher"

    columns: dict[str, Column[ComparedMeasure]] = {
        "": lambda measure: _MEASURES.get(measure.measure, measure.measure),
        "change": lambda measure: _ratio_text(measure.ratio),
        "interval": lambda measure: (
            "unknown" if verdict(measure) == "unknown" else f"{_ratio_text(measure.low)} to {_ratio_text(measure.high)}"
        ),
        "lower on": lambda measure: f"{measure.better} of {measure.units}",
        "verdict": verdict,
    }
    caption = (
        f"Change from {second} to {first}, with the {comparison.confidence:.0%} interval of Student's t on log ratios"
    )
    table = tabled(caption, "simulated", comparison.comparisons, columns)
    # An extreme ratio is not drawn, as it would make the other bars invisible.
    drawn_measures = [measure for measure in comparison.comparisons if 1 / MOST_DRAWN < measure.ratio < MOST_DRAWN]
    if not drawn_measures:
        return table
    ratios = [measure.ratio for measure in drawn_measures]
    figure = Bars(
        rows=[(_MEASURES.get(measure.measure, measure.measure), measure.ratio) for measure in drawn_measures],
        xlabel=f"{first} over {second}",
        title=f"{first} against {second}",
        level=("equal", 1.0),
        intervals=[
            (measure.low, measure.high) if measure.low and measure.high and measure.high < MOST_DRAWN else None
            for measure in drawn_measures
        ],
        log=max(*ratios, 1.0) > _LOG_FROM * min(*ratios, 1.0),
    )
    caption = f"Geometric means of the ratios, paired by {shortened(comparison.unit, 30)}: below 1 {first} is better."
    return pictured(caption, table, figure)


def _ratio_text(ratio: float | None) -> str:
    """Return a ratio as a change in percent ("+5.0%"), from 100 on as a factor ("x120"); "-" for None."""
    if ratio is None:
        return "-"
    return f"{ratio - 1:+.1%}" if ratio < 100 else f"x{ratio:.3g}"


def _change_from(value: float, baseline: float) -> str:
    """Return the change of a value from the baseline in percent; "" if they are equal, as for the baseline itself."""
    return f"{value / baseline - 1:+.0%}" if value != baseline else ""


def autoscaling_section(result: AutoscalingResult) -> Section:
    """Return the section of autoscaling a rented cluster: one row per rule, with changes against scaling by throughput.

    For the application imagenet, the last row has the changes published in the Pollux paper.
    """
    base = result.rules["throughput"]
    goodput = result.rules["goodput"]
    rows = []
    for name, run in result.rules.items():
        rows.append(
            (
                name,
                f"{run.seconds / 3600:.2f}",
                _change_from(run.seconds, base.seconds),
                f"{run.cost:,.1f}",
                _change_from(run.cost, base.cost),
                f"{run.efficiency:.2f}",
                f"{run.first_nodes}-{run.last_nodes}",
                str(run.restarts),
            )
        )
    if result.application == "imagenet":
        time_change = f"{PUBLISHED_SCALING['seconds']:+.0%}"
        cost_change = f"{PUBLISHED_SCALING['cost']:+.0%}"
        rows.append(("published", "", time_change, "", cost_change, "", "", ""))
    caption = "Changes against the throughput scaler; effic.: statistical efficiency"
    header = ("rule", "hours", "change", "cost", "change", "effic.", "nodes", "restarts")
    lead = (
        f"Scaling {result.application} by goodput costs {goodput.cost / base.cost - 1:+.0%} and takes "
        f"{goodput.seconds / base.seconds - 1:+.0%} against scaling by throughput, on up to {result.most_nodes} nodes."
    )
    table = Table(caption=caption, header=header, rows=rows, label="simulated")
    return Section(title=f"Autoscaling: {result.application}", lead=[lead], blocks=[table])


def search_section(result: SearchResult) -> Section:
    """Return the section of a search's trials: one row per policy, with changes against the first, the baseline.

    For the application cifar10 further rows have the published figures, with changes against the published baseline.
    """
    settings = result.search
    base = next(iter(result.policies.values()))
    rows = []
    for name, run in result.policies.items():
        jct_cells = f"{run.avg_jct_s / 60:.1f}", _change_from(run.avg_jct_s, base.avg_jct_s)
        makespan_cells = f"{run.makespan_s / 3600:.2f}", _change_from(run.makespan_s, base.makespan_s)
        rows.append((name, *jct_cells, *makespan_cells, f"{run.gpu_seconds / 3600:,.0f}", str(run.restarts)))
    if settings.application == "cifar10":
        published_base = PUBLISHED_SEARCH["baseline"]
        for name, (jct_s, makespan_s) in PUBLISHED_SEARCH.items():
            jct_cells = (f"{jct_s / 60:.0f}", _change_from(jct_s, published_base[0]))
            makespan_cells = (f"{makespan_s / 3600:.0f}", _change_from(makespan_s, published_base[1]))
            rows.append((f"published {name}", *jct_cells, *makespan_cells, "", ""))
    caption = (
        f"Changes against a fixed {settings.local_batch_size} samples on each GPU; span: from the first trial to the "
        "end of the last"
    )
    header = ("", "JCT, min", "change", "span, h", "change", "GPU h", "restarts")
    trials = f"{settings.trials} trials of {settings.application}, {settings.concurrent} at a time"
    lead = f"{trials} on {counted(result.gpus, 'GPU')}; the trials are synthetic."
    table = Table(caption=caption, header=header, rows=rows, label="simulated")
    return Section(title=f"Search: {settings.application}", lead=[lead], blocks=[table])


def advice_section(advice: AdviceResult) -> Section:
    """Return the section of advice on a running job: whether to resize it, and the options that save most time."""
    current = advice.now
    best = advice.best
    if not advice.resize or best is None:
        why = "no other allocation is possible now" if best is None else "no resize saves time on average"
        lead = [f"Stay on {counted(current.replicas, 'GPU')}: {why}."]
    else:
        lead = [
            f"Resize from {current.replicas} to {counted(best.replicas, 'GPU')} on {counted(best.nodes, 'node')}: saves "
            f"{_duration_text(best.expected_saved_s)} on average, some time with probability {best.probability:.0%}."
        ]
        if best.break_even_s is not None:
            remaining = f"{_duration_text(current.remaining_s)} are left, as it is now"
            lead.append(f"It pays from {_duration_text(best.break_even_s)} left on; {remaining}.")
    columns: dict[str, Column[ResizeOption]] = {
        "GPUs": lambda option: f"{option.replicas} on {option.nodes}",
        "batch": "batch_size:d",
        "gain": "gain:.2f",
        "pays from": lambda option: "never" if option.break_even_s is None else _short_duration(option.break_even_s),
        "saves": lambda option: _short_duration(option.expected_saved_s),
        "10 %": lambda option: _short_duration(option.saved_p10_s),
        "90 %": lambda option: _short_duration(option.saved_p90_s),
        "sure": "probability:.0%",
        "GPU h": lambda option: f"{round(option.extra_gpu_seconds / 3600, 1) + 0.0:+.1f}",  # 0.0 makes +0.0 of -0.0
    }
    caption = (
        "gain: goodput over that of now; pays from: with so much left; saves: the mean, and what 10 and 90 % of cases stay "
        "below; sure: probability of saving time; GPU h: held more than without the resize"
    )
    # Shown also if none is worth while.
    rows = sorted(advice.options, key=lambda option: -option.expected_saved_s)[:_MOST_OPTIONS_SHOWN]
    blocks = [tabled(caption, "predicted", rows, columns)] if rows else []
    return Section(title=f"Advice: {advice.job}", lead=lead, blocks=blocks)


def _duration_text(seconds: float) -> str:
    """Return a time as text in the largest unit of which it has at least two: "3.5 h", "90 s"."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if abs(seconds) >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _short_duration(seconds: float) -> str:
    """Return a time as short text for a column: "3.5h", "5.0m"."""
    return _duration_text(seconds).replace(" min", "m").replace(" ", "")


def _half_width_of_mean(values: Sequence[float]) -> float:
    """Return half the width of the 95 % interval of the mean of ``values``, two or more, by Student's t."""
    largest = max(values) or 1.0  # divided by it, because squares of enormous times would overflow
    standard_deviation = largest * float(np.std(np.divide(values, largest), ddof=1))
    quantile = float(stdtrit(len(values) - 1, 0.975))
    return quantile * standard_deviation / math.sqrt(len(values))


def _simulation_verdict(document: SimulationDocument) -> Verdict:
    """Return the verdict on a workload: the policy of least mean completion time, with its gain over the worst."""
    ranked = sorted(document.policies.items(), key=lambda item: item[1].avg_jct_s)
    best, best_record = ranked[0]
    worst, worst_record = ranked[-1]
    answer = f"{shortened(best, 60)}: jobs complete after {show_seconds(best_record.avg_jct_s)} on average"
    if worst != best and worst_record.avg_jct_s > 0:
        answer += f", {1 - best_record.avg_jct_s / worst_record.avg_jct_s:.0%} sooner than under {shortened(worst, 60)}"
    certainty = f"one workload and one seed: no interval; 99 % of its jobs within {show_seconds(best_record.p99_jct_s)}"
    return Verdict(
        answer=f"{answer} (simulated).", sure=certainty, then="ddltool simulate sweep --seeds 10 gives an interval"
    )


def _sweep_verdict(sweep: SweepDocument) -> Verdict | None:
    """Return the verdict on a sweep: the policy of least mean completion time, with the 95 % interval of the mean.

    If every replay failed, the verdict says so.
    """
    jct_by_policy: dict[str, list[float]] = {}
    for cell in sweep.cells:
        if cell.figures is not None:
            jct_by_policy.setdefault(cell.policy, []).append(cell.figures.avg_jct_s)
    if not jct_by_policy:
        return Verdict(answer="No replay of this sweep came to an end.", then="see the errors below", good=False)
    means = {name: math.fsum(value / len(values) for value in values) for name, values in jct_by_policy.items()}
    best = min(means, key=lambda name: means[name])
    answer = f"{shortened(best, 60)}: jobs complete after {show_seconds(means[best])} on average"
    values = jct_by_policy[best]
    certainty = "one replay: no interval"
    if len(values) > 1:
        half_width_s = _half_width_of_mean(values)
        low_s = max(0.0, means[best] - half_width_s)
        high_s = means[best] + half_width_s
        certainty = (
            f"95 % interval of the mean over {len(values)} replays: {show_seconds(low_s)} to {show_seconds(high_s)}"
        )
    next_step = "compare the two that matter in pairs: --compare A,B" if sweep.comparison is None else ""
    return Verdict(answer=f"{answer} (simulated).", sure=certainty, then=next_step)
