"""The report's sections of what commands found: network, barriers, balancing, verification, simulation, gate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.deciding.verification import error_text
from ddltool.analyzers.reporting.charts import Line, bars_svg, lines_svg
from ddltool.analyzers.reporting.documents import (
    BalanceDocument,
    BarrierDocument,
    GateDocument,
    NetworkDocument,
    PolicyRecord,
    SchemeRecord,
    SimulationDocument,
    SplitTime,
    VerificationDocument,
)
from ddltool.analyzers.reporting.page import Picture, Section, Table, shortened
from ddltool.analyzers.reporting.telemetry_section import verified_row, verified_table
from ddltool.units import show_bytes, show_seconds

_ROWS_AT_FIRST = 10
_BARS_DRAWN = 24
_PAIRS_DRAWN = 6
# Points of a line over time.
_POINTS = 200
Blocks = list[Picture | Table]


def network_section(found: NetworkDocument, name: str, anchor: str) -> Section:
    """Return the section of measured latency and bandwidth."""
    lead = [
        f"{found.processes} processes: {show_bytes(found.bandwidth_bytes_per_s)}/s, latency {show_seconds(found.latency_s)} "
        f"(misfit {found.residual:.1%})."
    ]
    if found.local:
        lead.append("These processes share one machine: that is its loopback, not a network.")
    rows = [
        (
            f"{pair.ranks[0]} - {pair.ranks[1]}",
            show_seconds(pair.latency_s),
            f"{show_bytes(pair.bandwidth_bytes_per_s)}/s",
            f"{pair.residual:.1%}",
        )
        for pair in found.pairs
    ]
    header = ("ranks", "latency", "bandwidth", "misfit")
    table = Table(
        caption="Pairs of processes, one way", header=header, rows=rows, label="measured", head=_ROWS_AT_FIRST
    )
    slowest = sorted(found.pairs, key=lambda pair: pair.bandwidth_bytes_per_s)[:_PAIRS_DRAWN]
    lines = []
    for pair in slowest:
        count = min(len(pair.sizes_bytes), len(pair.median_s))
        sizes, times = (np.array(values[:count], dtype=float) for values in (pair.sizes_bytes, pair.median_s))
        keep = sizes > 0
        rate = np.divide(sizes, times, out=np.zeros_like(sizes), where=times > 0)
        lines.append(Line(label=f"{pair.ranks[0]} - {pair.ranks[1]}", x=sizes[keep], y=rate[keep] / 1e9))
    svg = lines_svg(
        lines, xlabel="message size (bytes)", ylabel="GB/s", title="Rate by message size", draw="points", log_x=True
    )
    some = f" The {_PAIRS_DRAWN} slowest of {len(found.pairs)} pairs." if len(found.pairs) > _PAIRS_DRAWN else ""
    picture = Picture(
        svg=svg, caption=f"Median rate by message size.{some}", label="measured", table=table, unfolded=True
    )
    return Section(anchor=anchor, title=f"Network: {name}", lead=lead, blocks=[picture])


def barrier_section(found: BarrierDocument, name: str, anchor: str) -> Section:
    """Return the section of the next barrier's choices, and of waiting against the iteration gap."""
    labels = {"waiting": "least longest", "total": "least total", "per_iteration": "least per iteration"}
    records = {
        "bsp": found.bsp,
        **found.algorithms,
        **{labels.get(key, key): record for key, record in found.objectives.items()},
    }
    rows = [
        (
            key,
            show_seconds(record.barrier_s),
            show_seconds(record.waiting_time_s),
            show_seconds(record.total_waiting_s),
            show_seconds(record.waiting_per_iteration_s),
            str(record.iteration_gap),
        )
        for key, record in records.items()
    ]
    header = ("", "at", "longest waiting", "of all", "per iteration", "gap")
    choices = Table(caption="Choices of the next barrier", header=header, rows=rows, label="predicted")
    svg = bars_svg(
        [(key, record.waiting_time_s) for key, record in records.items()],
        xlabel="longest waiting of a worker (s)",
        title="Longest waiting by choice of the barrier",
    )
    blocks: Blocks = [
        Picture(svg=svg, caption="Longest waiting of any worker.", label="predicted", table=choices, unfolded=True)
    ]
    workers = sorted({worker for record in records.values() for worker in record.iterations})
    counts = [
        [shortened(worker, 40), *(str(record.iterations.get(worker, "-")) for record in records.values())]
        for worker in workers
    ]
    blocks.append(
        Table(
            caption="Iterations until the barrier",
            header=("worker", *records),
            rows=counts,
            label="predicted",
            head=_ROWS_AT_FIRST,
        )
    )
    if found.tradeoff:
        blocks.append(_tradeoff(found))
    lead = (
        f"{found.workers} workers, {found.lookahead} iterations looked ahead. Times count as in the file that was read."
    )
    return Section(anchor=anchor, title=f"Barrier: {name}", lead=[lead], blocks=blocks)


def _tradeoff(found: BarrierDocument) -> Picture:
    gaps = np.array([point.max_gap for point in found.tradeoff], dtype=float)
    lines = [
        Line(label="longest", x=gaps, y=np.array([point.waiting.waiting_time_s for point in found.tradeoff])),
        Line(
            label="per iteration", x=gaps, y=np.array([p.per_iteration.waiting_per_iteration_s for p in found.tradeoff])
        ),
    ]
    svg = lines_svg(
        lines,
        xlabel="bound on the iteration gap",
        ylabel="least waiting (s)",
        title="Waiting against the iteration gap",
        draw="points",
    )
    rows = [
        (
            str(point.max_gap),
            show_seconds(point.waiting.waiting_time_s),
            show_seconds(point.total.total_waiting_s),
            show_seconds(point.per_iteration.waiting_per_iteration_s),
        )
        for point in found.tradeoff
    ]
    header = ("gap <=", "longest", "of all", "per iteration")
    table = Table(
        caption="Least waiting under a bound on the gap",
        header=header,
        rows=rows,
        label="predicted",
        head=_ROWS_AT_FIRST,
    )
    return Picture(
        svg=svg, caption="Least waiting under a bound on the gap.", label="predicted", table=table, unfolded=True
    )


def balance_section(found: BalanceDocument, name: str, anchor: str) -> Section:
    """Return the section of replayed batch balancing."""
    lead = (
        f"{found.workers} workers, {found.iterations:,} iterations of which {found.warm_up:,} warm-up, total batch "
        f"{found.total_batch:,}."
    )
    rows = [("equal split", "-", "-", *_split(found.equal_split), "-")]
    for key, record in found.predictors.items():
        gain = "-" if record.gain_kept is None else f"{record.gain_kept:.0%}"
        rows.append((key, f"{record.rmse:.4g}", f"{record.rmse_relative:.1%}", *_split(record), gain))
    rows.append(("speeds known", "0", "0.0%", *_split(found.oracle), "100%"))
    header = ("predictor", "RMSE", "of mean", "iteration", "of equal split", "gain kept")
    table = Table(caption="Predictors of speed, and batches sized by them", header=header, rows=rows, label="simulated")
    bars = [("equal split", found.equal_split.iteration_s)]
    bars += [(key, record.iteration_s) for key, record in found.predictors.items()]
    bars.append(("speeds known", found.oracle.iteration_s))
    svg = bars_svg(bars, xlabel="mean iteration time (s)", title="Iteration time by predictor")
    blocks: Blocks = [Picture(svg=svg, caption="Mean iteration time.", label="simulated", table=table, unfolded=True)]
    schemes = {key: record for key, record in found.schemes.items() if isinstance(record, SchemeRecord)}
    if schemes:
        cells = [
            (key, *_split(record), f"{record.staleness:.1f}", str(record.iteration_gap))
            for key, record in schemes.items()
        ]
        head = ("scheme", "iteration", "of BSP", "staleness", "gap")
        drawn = bars_svg(
            [(key, record.iteration_s) for key, record in schemes.items()],
            xlabel="mean iteration time (s)",
            title="Iteration time by scheme",
        )
        under = Table(caption="Schemes on the whole trace", header=head, rows=cells, label="simulated")
        blocks.append(Picture(svg=drawn, caption="Schemes compared.", label="simulated", table=under, unfolded=True))
    return Section(anchor=anchor, title=f"Balancing: {name}", lead=[lead], blocks=blocks)


def _split(record: SplitTime) -> tuple[str, str]:
    return show_seconds(record.iteration_s), f"{record.iteration_time_ratio:.3f}"


def verification_section(found: VerificationDocument, name: str, anchor: str) -> Section:
    """Return the section of predicted against measured."""
    step = found.iteration
    lead = [
        f"{shortened(found.telemetry, 60)} against {shortened(found.plan, 60)}: predicted over measured step "
        f"{error_text(step.predicted_s, step.measured_s)}; half of the measured steps took {show_seconds(step.low_s)} to "
        f"{show_seconds(step.high_s)}.",
        *(found.refit or ["Nothing to fit again: the plan's figures hold."]),
    ]
    parts = (("step", step), ("compute, longest", found.compute), ("synchronisation", found.sync))
    rows = [verified_row(part, times.predicted_s, times.measured_s) for part, times in parts]
    rows += [
        verified_row(f"compute, rank {rank.rank} ({rank.device})", rank.predicted_s, rank.measured_s)
        for rank in found.ranks
    ]
    bars: list[tuple[str, float]] = []
    for part, times in parts:
        bars += [(f"{part}, predicted", times.predicted_s)] if times.predicted_s is not None else []
        bars.append((f"{part}, measured", times.measured_s))
    picture = Picture(
        svg=bars_svg(bars, xlabel="seconds", title="Predicted against measured"),
        caption="Predicted against measured.",
        label="measured",
        table=verified_table("Parts of the step", rows),
        unfolded=True,
    )
    return Section(anchor=anchor, title=f"Verification: {name}", lead=lead, blocks=[picture])


def simulation_section(found: SimulationDocument, name: str, anchor: str) -> Section:
    """Return the section of a simulated workload: completion times, unfinished jobs over time, GPU hours."""
    jobs = len(next(iter(found.policies.values())).jobs)
    lead = f"{jobs} jobs of {shortened(found.workload, 60)} on {found.gpus} GPUs, under {len(found.policies)} policies."
    rows = [
        (
            key,
            *(
                f"{value:,.0f}"
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
    caption = "Seconds; used: share of GPU time; worst: largest finish-time fairness; fair: share of jobs below 1"
    table = Table(caption=caption, header=header, rows=rows, label="simulated")
    lines = []
    for key, record in found.policies.items():
        times = np.sort([job.jct_s for job in record.jobs])
        share = np.arange(1, len(times) + 1) / len(times)
        lines.append(Line(label=key, x=np.concatenate([[0.0], times]), y=np.concatenate([[0.0], share])))
    drawn = " Eight policies are drawn." if len(lines) > 8 else ""
    distribution = Picture(
        svg=lines_svg(
            lines, xlabel="job completion time (s)", ylabel="share of the jobs", title="Completion times", draw="steps"
        ),
        caption=f"Share of the jobs that took at most so long.{drawn}",
        label="simulated",
        table=table,
        unfolded=True,
    )
    blocks: Blocks = [distribution, _load(found, drawn), *_allocation(found, drawn), _gpu_time(found), _jobs(found)]
    return Section(anchor=anchor, title=f"Simulation: {name}", lead=[lead], blocks=blocks)


def _load(found: SimulationDocument, remark: str) -> Picture:
    """Return how many jobs are there over time: submitted and not finished."""
    last = max(job.finish_s for record in found.policies.values() for job in record.jobs)
    times = np.linspace(0.0, max(last, 1e-9), _POINTS)
    present = {key: _jobs_at(record, times) for key, record in found.policies.items()}
    lines = [Line(label=key, x=times, y=values) for key, values in present.items()]
    svg = lines_svg(lines, xlabel="time (s)", ylabel="unfinished jobs", title="Unfinished jobs over time", draw="steps")
    picked = np.linspace(0, _POINTS - 1, 9).round().astype(int)
    rows = [(f"{times[at]:,.0f}", *(f"{values[at]:.0f}" for values in present.values())) for at in picked]
    table = Table(caption="Unfinished jobs at nine times", header=("time (s)", *present), rows=rows, label="simulated")
    caption = f"Jobs that are submitted and not finished.{remark}"
    return Picture(svg=svg, caption=caption, label="simulated", table=table, unfolded=True)


def _allocation(found: SimulationDocument, remark: str) -> Blocks:
    """Return the GPUs that are held over time, as far as the document has them."""
    held = {key: record.usage for key, record in found.policies.items() if record.usage is not None}
    last = max((usage.time_s[-1] for usage in held.values() if usage.time_s), default=0.0)
    if not last:
        return []
    times = np.linspace(0.0, last, _POINTS)
    series: dict[str, NDArray[np.float64]] = {}
    for key, usage in held.items():
        place = np.searchsorted(np.array(usage.time_s), times, side="right") - 1
        series[key] = np.where(place >= 0, np.array([*usage.gpus, 0.0])[place], 0.0)
    lines = [Line(label=key, x=times, y=values) for key, values in series.items()]
    svg = lines_svg(lines, xlabel="time (s)", ylabel="GPUs that are held", title="Allocation over time", draw="steps")
    picked = np.linspace(0, _POINTS - 1, 9).round().astype(int)
    rows = [(f"{times[at]:,.0f}", *(f"{values[at]:.0f}" for values in series.values())) for at in picked]
    table = Table(caption="GPUs held at nine times", header=("time (s)", *series), rows=rows, label="simulated")
    caption = f"GPUs that jobs hold, of {found.gpus}.{remark}"
    return [Picture(svg=svg, caption=caption, label="simulated", table=table, unfolded=True)]


def _jobs_at(record: PolicyRecord, times: NDArray[np.float64]) -> NDArray[np.float64]:
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
        (key, *(f"{got[name]:.1f}" for name in applications), f"{sum(got.values()):.1f}") for key, got in hours.items()
    ]
    table = Table(
        caption="GPU hours by application",
        header=("policy", *(shortened(name, 30) for name in applications), "all"),
        rows=rows,
        label="simulated",
    )
    svg = bars_svg(
        [(key, sum(got.values())) for key, got in hours.items()],
        xlabel="GPU hours of all jobs",
        title="GPU hours by policy",
    )
    return Picture(svg=svg, caption="GPU hours that all jobs took.", label="simulated", table=table, unfolded=True)


def _jobs(found: SimulationDocument) -> Table:
    by_name = {key: {job.name: job for job in record.jobs} for key, record in found.policies.items()}
    first = next(iter(found.policies.values())).jobs
    rows = []
    for job in first:
        cells = [shortened(job.name, 40), job.application, f"{job.submit_s:,.0f}"]
        cells += [f"{jobs[job.name].jct_s:,.0f}" if job.name in jobs else "-" for jobs in by_name.values()]
        rows.append(cells)
    header = ("job", "application", "submitted", *(f"JCT, {key}" for key in by_name))
    return Table(
        caption="Completion time of each job (s)",
        header=header,
        rows=rows,
        label="simulated",
        head=_ROWS_AT_FIRST,
        text_columns=2,
    )


def gate_section(found: GateDocument, name: str, anchor: str) -> Section:
    """Return the section of a gate's verdict."""
    failed = [check for check in found.checks if not check.passed]
    word = "Passed" if found.passed else f"FAILED: {len(failed)} of {len(found.checks)} checks"
    against = f" against {_listed(found.baseline)}" if found.baseline else ""
    lead = [f"{word}, {_listed(found.current)}{against}."]
    lead += [found.noise_test] if found.noise_test else []
    rows = []
    for check in sorted(found.checks, key=lambda one: one.passed):
        outcome = "passed" if check.passed else "FAILED"
        rows.append(
            (
                f"{outcome}, in noise" if check.in_noise else outcome,
                check.metric,
                _value(check.baseline, check.unit),
                _value(check.current, check.unit),
                "-" if check.change is None else f"{check.change:+.1%}",
                "-" if check.limit is None else f"{check.op} {_value(check.limit, check.unit)}",
                check.note or check.rule,
            )
        )
    header = ("outcome", "metric", "baseline", "current", "change", "limit", "rule")
    table = Table(
        caption=f"Checks of a {found.artifact}", header=header, rows=rows, label="read", head=20, text_columns=2
    )
    changes = [
        (check.metric, check.current / check.baseline)
        for check in found.checks
        if check.baseline is not None and check.current is not None and check.baseline > 0 and check.current >= 0
    ]
    blocks: Blocks = [table]
    if changes:
        svg = bars_svg(
            changes[:_BARS_DRAWN],
            xlabel="current over baseline",
            title="Current over baseline",
            level=("baseline", 1.0),
        )
        some = f" {_BARS_DRAWN} of {len(changes)} metrics are drawn." if len(changes) > _BARS_DRAWN else ""
        blocks = [
            Picture(svg=svg, caption=f"Each metric over its baseline.{some}", label="read", table=table, unfolded=True)
        ]
    return Section(anchor=anchor, title=f"Gate: {name}", lead=lead, blocks=blocks)


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return show_seconds(value) if unit == "s" else f"{value:.4g} {unit}".strip()


def _listed(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(shortened(name, 60) for name in names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
