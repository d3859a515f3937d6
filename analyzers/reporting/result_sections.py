"""The report's sections of what commands found: network, barriers, balancing, verification, gate."""

from __future__ import annotations

import re

import numpy as np

from ddltool.analyzers.deciding.verification import error_text
from ddltool.analyzers.reporting.charts import Line, bars_svg, lines_svg
from ddltool.analyzers.reporting.documents import (
    BalanceDocument,
    BarrierDocument,
    GateDocument,
    NetworkDocument,
    SchemeRecord,
    SplitTime,
    VerificationDocument,
)
from ddltool.analyzers.reporting.page import Picture, Section, Table, counted, few, listed, shortened
from ddltool.analyzers.reporting.telemetry_section import verified_row, verified_table
from ddltool.units import show_bytes, show_seconds

_ROWS_AT_FIRST = 10
_BARS_DRAWN = 24
_PAIRS_DRAWN = 6
# Ratios that span more would leave the small ones no bar at all.
_LOG_FROM = 20
# A bar beyond, or below one over this, leaves nothing of the others.
_MOST_DRAWN = 1e12
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
    fitted = Table(
        caption="Pairs of processes, one way", header=header, rows=rows, label="measured", head=_ROWS_AT_FIRST
    )
    return Section(anchor=anchor, title=f"Network: {name}", lead=lead, blocks=[*_rates(found), fitted])


def _rates(found: NetworkDocument) -> Blocks:
    """Return the rate by message size of the slowest pairs, as far as any message took time."""
    slowest = sorted(found.pairs, key=lambda pair: pair.bandwidth_bytes_per_s)[:_PAIRS_DRAWN]
    lines, rates = [], []
    for pair in slowest:
        count = min(len(pair.sizes_bytes), len(pair.median_s))
        sizes, times = (np.array(values[:count], dtype=float) for values in (pair.sizes_bytes, pair.median_s))
        keep = (sizes > 0) & (times > 0)
        rate = sizes[keep] / times[keep]
        rates.append(dict(zip(sizes[keep], rate, strict=True)))
        lines.append(Line(label=f"{pair.ranks[0]} - {pair.ranks[1]}", x=sizes[keep], y=rate / 2**30))
    if not any(line.x.size for line in lines):
        return []
    svg = lines_svg(
        lines,
        xlabel="message size",
        ylabel="rate (GiB/s)",
        title="Rate by message size",
        draw="points",
        byte_x=True,
    )
    rows = [
        (show_bytes(size), *(f"{show_bytes(one[size])}/s" if size in one else "-" for one in rates))
        for size in sorted({size for one in rates for size in one})
    ]
    table = Table(
        caption="Median rate between two ranks by message size",
        header=("message", *(line.label for line in lines)),
        rows=rows,
        label="measured",
        head=_ROWS_AT_FIRST,
    )
    some = f" The {_PAIRS_DRAWN} slowest of {len(found.pairs)} pairs." if len(found.pairs) > _PAIRS_DRAWN else ""
    caption = f"Median rate by message size, a line for each pair of ranks.{some}"
    return [Picture(svg=svg, caption=caption, label="measured", table=table, unfolded=True)]


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
    header = ("choice", "at", "longest waiting", "of all", "per iteration", "gap")
    choices = Table(caption="Choices of the next barrier", header=header, rows=rows, label="predicted")
    svg = bars_svg(
        [(key, record.waiting_time_s) for key, record in records.items()],
        xlabel="longest waiting of a worker",
        title="Longest waiting by choice of the barrier",
        seconds=True,
    )
    blocks: Blocks = [
        Picture(
            svg=svg,
            caption="Longest waiting of any worker, by choice of the barrier.",
            label="predicted",
            table=choices,
            unfolded=True,
        )
    ]
    workers = sorted({worker for record in records.values() for worker in record.iterations}, key=_natural)
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
    ahead = f"{counted(found.workers, 'worker')}, {counted(found.lookahead, 'iteration')} looked ahead."
    lead = f"{ahead} Times count as in the file that was read."
    return Section(anchor=anchor, title=f"Barrier: {name}", lead=[lead], blocks=blocks)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return what sorts ``w2`` before ``w10``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,15})", name)]


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
        ylabel="least waiting",
        title="Waiting against the iteration gap",
        draw="points",
        seconds=True,
        whole="x",
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
        rows.append((key, f"{record.rmse:,.4g}", f"{record.rmse_relative:.1%}", *_split(record), gain))
    rows.append(("speeds known", "0", "0.0%", *_split(found.oracle), "100%"))
    header = ("predictor", "RMSE", "of mean", "iteration", "of equal split", "gain kept")
    table = Table(caption="Predictors of speed, and batches sized by them", header=header, rows=rows, label="simulated")
    bars = [("equal split", found.equal_split.iteration_s)]
    bars += [(key, record.iteration_s) for key, record in found.predictors.items()]
    bars.append(("speeds known", found.oracle.iteration_s))
    svg = bars_svg(bars, xlabel="mean iteration time", title="Iteration time by predictor", seconds=True)
    blocks: Blocks = [
        Picture(
            svg=svg,
            caption="Mean iteration time by what sizes the batches.",
            label="simulated",
            table=table,
            unfolded=True,
        )
    ]
    schemes = {key: record for key, record in found.schemes.items() if isinstance(record, SchemeRecord)}
    if schemes:
        cells = [
            (key, *_split(record), f"{record.staleness:.1f}", str(record.iteration_gap))
            for key, record in schemes.items()
        ]
        head = ("scheme", "iteration", "of BSP", "staleness", "gap")
        drawn = bars_svg(
            [(key, record.iteration_s) for key, record in schemes.items()],
            xlabel="mean iteration time",
            title="Iteration time by scheme",
            seconds=True,
        )
        under = Table(caption="Schemes on the whole trace", header=head, rows=cells, label="simulated")
        blocks.append(
            Picture(
                svg=drawn,
                caption="Mean iteration time by scheme, on the whole trace.",
                label="simulated",
                table=under,
                unfolded=True,
            )
        )
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
        *(_as_sentence(words) for words in few(found.refit) or ["nothing to fit again: the plan's figures hold"]),
    ]
    parts = (("step", step), ("compute, longest", found.compute), ("synchronisation", found.sync))
    rows = [verified_row(part, times.predicted_s, times.measured_s) for part, times in parts]
    rows += [
        verified_row(f"compute, rank {rank.rank} ({rank.device})", rank.predicted_s, rank.measured_s)
        for rank in found.ranks
    ]
    bars: list[tuple[str, float]] = []
    for part, times in zip(("step", "compute", "sync"), (step, found.compute, found.sync), strict=True):
        bars += [(f"{part}, predicted", times.predicted_s)] if times.predicted_s is not None else []
        bars.append((f"{part}, measured", times.measured_s))
    picture = Picture(
        svg=bars_svg(
            bars,
            xlabel="time",
            title="Predicted against measured",
            seconds=True,
            marked=("predicted", [name.endswith("predicted") for name, _ in bars]),
            unmarked="measured",
        ),
        caption="Predicted against measured: the step, its longest computation, and synchronisation.",
        label="measured",
        table=verified_table("Parts of the step", rows),
        unfolded=True,
    )
    return Section(anchor=anchor, title=f"Verification: {name}", lead=lead, blocks=[picture])


def _as_sentence(words: str) -> str:
    """Return a remark as a sentence; names in lower case at its beginning are no names of files here."""
    return f"{words[:1].upper()}{words[1:].rstrip('.')}."


def gate_section(found: GateDocument, name: str, anchor: str) -> Section:
    """Return the section of a gate's verdict."""
    failed = [check for check in found.checks if not check.passed]
    word = "Passed" if found.passed else f"FAILED: {len(failed)} of {len(found.checks)} checks"
    against = f" against {listed(found.baseline, 3)}" if found.baseline else ""
    lead = [f"{word}, {listed(found.current, 3)}{against}."]
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
                "-"
                if check.change is None
                else f"{100 * check.change:+{'.1f' if abs(check.change) < 1e4 else '.3g'}}%",
                "-" if check.limit is None else f"{check.op} {_value(check.limit, check.unit)}",
                check.note or check.rule,
            )
        )
    header = ("outcome", "metric", "baseline", "current", "change", "limit", "rule")
    table = Table(
        caption=f"Checks of a {found.artifact.removeprefix('ddltool.')}",
        header=header,
        rows=rows,
        label="read",
        head=20,
        text_columns=2,
    )
    changes = [
        (check.metric, check.current / check.baseline, not check.passed)
        for check in sorted(found.checks, key=lambda one: one.passed)
        if isinstance(check.baseline, float)
        and isinstance(check.current, float)
        and check.baseline > 0
        and check.current >= 0
        and (check.current == 0 or 1 / _MOST_DRAWN < check.current / check.baseline < _MOST_DRAWN)
    ]
    blocks: Blocks = [table]
    if changes:
        ratios = [ratio for _, ratio, _ in changes]
        svg = bars_svg(
            [(metric, ratio) for metric, ratio, _ in changes[:_BARS_DRAWN]],
            xlabel="current over baseline",
            title="Current over baseline",
            level=("baseline", 1.0),
            from_level=min(ratios) > 0 and max(*ratios, 1.0) > _LOG_FROM * min(*ratios, 1.0),
            marked=("failed", [bad for *_, bad in changes[:_BARS_DRAWN]]),
            unmarked="passed",
        )
        some = f" {_BARS_DRAWN} of {len(changes)} metrics are drawn." if len(changes) > _BARS_DRAWN else ""
        blocks = [
            Picture(svg=svg, caption=f"Each metric over its baseline.{some}", label="read", table=table, unfolded=True)
        ]
    return Section(anchor=anchor, title=f"Gate: {name}", lead=lead, blocks=blocks)


def _value(value: float | str | None, unit: str) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    if unit in ("s", "bytes"):
        return show_seconds(value) if unit == "s" else show_bytes(value)
    return f"{value:,.0f} {unit}".strip() if 1e4 <= abs(value) < 1e12 else f"{value:.4g} {unit}".strip()
