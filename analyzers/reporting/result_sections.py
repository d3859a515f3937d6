"""Sections of what commands find: network, barriers, balancing, verification, gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ddltool.analyzers.deciding.verification import error_text
from ddltool.analyzers.gating.formats import figures_of, outcome, remarks
from ddltool.analyzers.gating.metrics import LONGEST_NAME, harmless
from ddltool.analyzers.reporting.figures import Bars, Line, Lines, line, value_of
from ddltool.analyzers.reporting.section import Blocks, Column, Picture, Section, Table, cell, pictured, some, tabled
from ddltool.errors import few, listed, shortened
from ddltool.graph import natural_key
from ddltool.results import (
    BalanceResult,
    BarrierChoice,
    BarrierResult,
    GateResult,
    NetworkResult,
    SchemeFigures,
    SplitTime,
    Verification,
    VerifiedRank,
    VerifiedTime,
)
from ddltool.units import counted, show_bytes, show_seconds

_BARS_DRAWN = 24
_PAIRS_DRAWN = 6
_WORKERS_SHOWN = 16
# Ratios that span more would leave the small ones no bar at all.
_LOG_FROM = 20
# A bar beyond, or below one over this, leaves nothing of the others.
_MOST_DRAWN = 1e12
# A fit of the network this far off says little about any size of message.
_BAD_FIT = 1.0


def network_section(found: NetworkResult, name: str) -> Section:
    """Return the section of measured latency and bandwidth, and the options that hand them on."""
    lead = [
        f"{found.processes} processes: {show_bytes(found.bandwidth_bytes_per_s)}/s, latency {show_seconds(found.latency_s)} "
        f"(misfit {found.residual:.1%})."
    ]
    if found.residual > _BAD_FIT:
        lead.append(
            f"The times do not lie on a line (misfit {found.residual:.0%}): measure again on a quieter machine."
        )
    if found.local:
        lead.append("These processes share one machine: that is its loopback, not a network.")
    rate = found.bandwidth_bytes_per_s * 8 / 1e9
    lead.append(f"For ddltool trace: --bandwidth {rate:.3g}Gbit --latency {found.latency_s * 1e6:.3g}us")
    ranks = ("ranks", [f"{pair.ranks[0]} - {pair.ranks[1]}" for pair in found.pairs])
    columns = {"latency": "latency_s", "bandwidth": "bandwidth_bytes_per_s", "misfit": "residual:.1%"}
    fitted = tabled("Pairs of processes, one way", "measured", found.pairs, columns, names=ranks)
    return Section(title=f"Network: {name}", lead=lead, blocks=[*_rates(found), fitted])


def _rates(found: NetworkResult) -> Blocks:
    """Return the rate by message size of the slowest pairs, as far as any message took time."""
    rates: dict[str, dict[float, float]] = {}
    for pair in sorted(found.pairs, key=lambda pair: pair.bandwidth_bytes_per_s)[:_PAIRS_DRAWN]:
        timed = zip(pair.sizes_bytes, pair.median_s, strict=False)
        rates[f"{pair.ranks[0]} - {pair.ranks[1]}"] = {size: size / time for size, time in timed if size > 0 < time}
    sizes = sorted({size for one in rates.values() for size in one})
    if not sizes:
        return []
    lines = [Line(label=label, x=np.array([*one]), y=np.array([*one.values()]) / 2**30) for label, one in rates.items()]
    title = "Rate by message size"
    figure = Lines(
        lines=lines, xlabel="message size", ylabel="rate (GiB/s)", title=title, draw="points", x_axis="bytes"
    )
    rows = [[show_bytes(size), *(cell(one.get(size), "_bytes_per_s") for one in rates.values())] for size in sizes]
    caption = "Median rate between two ranks by message size"
    table = Table(caption=caption, header=("message", *rates), rows=rows, label="measured")
    left = f" The {_PAIRS_DRAWN} slowest of {len(found.pairs)} pairs." if len(found.pairs) > _PAIRS_DRAWN else ""
    return [pictured(f"Median rate by message size, a line for each pair of ranks.{left}", table, figure)]


def barrier_section(found: BarrierResult, name: str) -> Section:
    """Return the section of the next barrier's choices, and of waiting against the iteration gap."""
    labels = {"waiting": "least longest", "total": "least total", "per_iteration": "least per iter."}
    least = {labels.get(key, key): record for key, record in found.objectives.items()}
    records = {"bsp": found.bsp, **found.algorithms, **least}
    caption = "Choices of the next barrier; longest, of all, per iter.: waiting of the workers"
    if found.max_gap is not None:
        caption += f"; in the rows 'least ...' the gap is at most {found.max_gap}"
    columns: dict[str, Column[BarrierChoice]] = {"at": "barrier_s", "longest": "waiting_time_s"}
    columns |= {"of all": "total_waiting_s", "per iter.": "waiting_per_iteration_s", "gap": "iteration_gap"}
    columns |= {"CPU": lambda record: show_seconds(record.compute_seconds)}
    figure = Bars(
        rows=[(key, record.waiting_time_s) for key, record in records.items()],
        xlabel="longest waiting of a worker",
        title="Longest waiting by choice of the barrier",
        seconds=True,
        level=("bsp", found.bsp.waiting_time_s),
    )
    table = tabled(caption, "predicted", records.values(), columns, names=("choice", records))
    blocks: Blocks = [pictured("Longest waiting of any worker, by choice of the barrier.", table, figure)]
    blocks += [*_iterations(records), *([_tradeoff(found)] if found.tradeoff else [])]
    lead = f"{counted(found.workers, 'worker')}, {counted(found.lookahead, 'iteration')} looked ahead. "
    lead += "Times count as in the file that was read."
    return Section(title=f"Barrier: {name}", lead=[_barrier_answer(found), lead], blocks=blocks)


def _barrier_answer(found: BarrierResult) -> str:
    """Return the chosen barrier in a sentence, and what its supersteps win over BSP's."""
    chosen = next(iter(found.algorithms.values()))
    made = chosen.iterations.values()
    answer = (
        f"Synchronise after {min(made)} to {max(made)} iterations of each worker, at {show_seconds(chosen.barrier_s)}"
    )
    if min(made) == max(made):
        answer = (
            f"Synchronise after {counted(min(made), 'iteration')} of each worker, at {show_seconds(chosen.barrier_s)}"
        )
    if chosen.iterations_per_s is None or not found.bsp.iterations_per_s:
        return f"{answer} (predicted)."
    gain = chosen.iterations_per_s / found.bsp.iterations_per_s - 1
    won = (
        f"{gain:.0%} more iterations a second than BSP's" if gain > 0.005 else "no more iterations a second than BSP's"
    )
    return f"{answer}: {won} (predicted), up to {counted(chosen.iteration_gap, 'iteration')} stale."


def _iterations(records: dict[str, BarrierChoice]) -> list[Table]:
    """Return each worker's iterations until the barrier; of many workers, how they spread comes first."""
    workers = sorted({worker for record in records.values() for worker in record.iterations}, key=natural_key)
    columns = {key: lambda worker, own=record.iterations: own.get(worker) for key, record in records.items()}
    names = ("worker", [shortened(worker, 40) for worker in workers])
    tables = [tabled("Iterations until the barrier", "predicted", workers, columns, names=names)]
    if len(workers) > _WORKERS_SHOWN:
        counts = {key: [*record.iterations.values()] for key, record in records.items()}
        spread = {key: lambda share, own=own: f"{np.quantile(own, share):g}" for key, own in counts.items()}
        caption = f"Iterations of {len(workers)} workers until the barrier"
        tables.insert(0, tabled(caption, "predicted", (0, 0.5, 1), spread, names=("", ("fewest", "median", "most"))))
    return tables


def _tradeoff(found: BarrierResult) -> Picture:
    """Return the least waiting by bound on the gap; a bound between two points allows what the lower one does."""
    points, caption = found.tradeoff, "Least waiting by bound on the iteration gap"
    fields = ("waiting.waiting_time_s", "total.total_waiting_s", "per_iteration.waiting_per_iteration_s")
    rows = []
    for point in points:
        paths = [path for field in fields for path in (f"{field.partition('.')[0]}.barrier_s", field)]
        rows.append([str(point.max_gap), *(cell(value_of(point, path), "_s") for path in paths)])
    header = ("gap <=", "at", "longest", "at", "of all", "at", "per iter.")
    table = Table(caption=caption, header=header, rows=rows, label="predicted", head=20)
    lines = [
        line(label, points, "max_gap", field)
        for label, field in zip(("longest", "mean of the workers", "per iteration made"), fields, strict=True)
    ]
    lines[1] = replace(lines[1], y=lines[1].y / found.workers)
    figure = Lines(
        title=caption,
        lines=lines,
        xlabel="bound on the iteration gap (staleness)",
        ylabel="least waiting",
        seconds=True,
        draw="steps",
        whole="x",
        marks=[] if found.max_gap is None else [(f"--max-gap {found.max_gap}", float(found.max_gap))],
    )
    return pictured("Least waiting under a bound on the gap.", table, figure)


_SCHEMES = {
    **{"bsp": "BSP", "asp": "ASP", "ssp": "SSP, bound 5", "redundant": "redundant execution"},
    **{"work_shifting": "work shifting (FlexRR-like)", "lb_bsp": "LB-BSP", "lb_bsp_oracle": "LB-BSP, speeds known"},
}


def balance_section(found: BalanceResult, name: str) -> Section:
    """Return the section of replayed batch balancing."""
    lead = [
        f"{found.workers} workers, {found.iterations:,} iterations of which {found.warm_up:,} warm-up, total batch "
        f"{found.total_batch:,}."
    ]
    if min((record.iteration_time_ratio for record in found.predictors.values()), default=0) >= 1:
        lead.append("Equal batches are as fast here: these speeds cannot be foretold well enough.")
    equal, known = "equal split", "speeds known"
    ways: dict[str, SplitTime] = {equal: found.equal_split, **found.predictors, known: found.oracle}
    caption = (
        "Predictors of speed, and batches sized by them; RMSE in samples/s, mean over workers; gain: share of what "
        "knowing the speeds would gain"
    )

    def foretold(field: str, form: str, at_best: str) -> Column[SplitTime]:
        def shown(way: SplitTime) -> str | None:
            return at_best if way is found.oracle else cell(getattr(way, field, None), form=form)

        return shown

    columns: dict[str, Column[SplitTime]] = {
        **{"RMSE": foretold("rmse", ",.4g", "0"), "of mean": foretold("rmse_relative", ".1%", "0.0%")},
        **{"iteration": "iteration_s", "of equal split": "iteration_time_ratio:.3f"},
        "gain": foretold("gain_kept", ".0%", "100%"),
    }
    table = tabled(caption, "simulated", ways.values(), columns, names=("predictor", ways))
    blocks: Blocks = [_iteration_times("Mean iteration time by what sizes the batches.", table, ways, equal)]
    schemes = {key: record for key, record in found.schemes.items() if isinstance(record, SchemeFigures)}
    if schemes:
        blocks.append(_schemes(schemes, str(found.schemes.get("predictor", ""))))
    return Section(title=f"Balancing: {name}", lead=lead, blocks=blocks)


def _schemes(schemes: dict[str, SchemeFigures], predictor: str) -> Picture:
    by = f" ({predictor})" if predictor else ""
    named = {_SCHEMES.get(key, key) + (by if key == "lb_bsp" else ""): record for key, record in schemes.items()}
    columns = {"iteration": "iteration_s", "of BSP": "iteration_time_ratio:.3f"}
    columns |= {"staleness": "staleness:.1f", "gap": "iteration_gap"}
    caption = (
        "Schemes on the whole trace, rows as wall-clock time; staleness: updates of others that a gradient has not seen"
    )
    table = tabled(caption, "simulated", named.values(), columns, names=("scheme", named))
    return _iteration_times("Mean iteration time by scheme, on the whole trace.", table, named, "BSP")


def _iteration_times(caption: str, table: Table, ways: Mapping[str, SplitTime], base: str) -> Picture:
    """Return bars of iteration times over their table, the way named ``base`` as a line across all."""
    figure = Bars(
        rows=[(name, record.iteration_s) for name, record in ways.items()],
        xlabel="mean iteration time",
        title=f"Iteration time by {table.header[0]}",
        seconds=True,
        level=(base, ways[base].iteration_s) if base in ways else None,
    )
    return pictured(caption, table, figure)


def verification_section(found: Verification, name: str) -> Section:
    """Return the section of predicted against measured."""
    step = found.iteration
    lead = [
        f"{shortened(found.telemetry, 60)} against {shortened(found.plan, 60)}: predicted over measured step "
        f"{error_text(step.predicted_s, step.measured_s)}; half of the measured steps took {show_seconds(step.low_s)} to "
        f"{show_seconds(step.high_s)}.",
        "The prediction comes without an error of its own."
        if found.known_error is None
        else f"Predicted compute is known to within {found.known_error:.0%}, synchronisation without an error.",
    ]
    again = few(found.refit) or ["nothing to fit again: the plan's figures hold"]
    lead += [f"{words[:1].upper()}{words[1:].rstrip('.')}." for words in again]
    if found.max_error is not None:
        word = "within" if abs(step.error) <= found.max_error else "beyond"
        lead.append(f"Step time off by {abs(step.error):.1%}: {word} the limit of {100 * found.max_error:.3g}%.")
        if not found.complete:
            lead.append("FAILED: not the whole run on the planned devices (see above).")
    bars: list[tuple[str, float]] = []
    for part, times in zip(("step", "compute", "sync"), (step, found.compute, found.sync), strict=True):
        bars += [(f"{part}, predicted", times.predicted_s)] if times.predicted_s is not None else []
        bars.append((f"{part}, measured", times.measured_s))
    figure = Bars(
        rows=bars,
        xlabel="time",
        title="Predicted against measured",
        seconds=True,
        intervals=[(step.low_s, step.high_s) if name == "step, measured" else None for name, _ in bars],
        marked=("predicted", [name.endswith("predicted") for name, _ in bars]),
        unmarked="measured",
    )
    caption = "Predicted against measured: the step (whiskers: half of all), its longest computation, synchronisation."
    columns: dict[str, Column[VerifiedRank]] = {
        "rank": "rank",
        "device": lambda one: f"{one.device} for {one.planned_device}" if one.other_device else one.device,
        "batch": "batch",
        "predicted": "predicted_s",
        "measured": "measured_s",
        "error": lambda one: "-" if one.other_device else error_text(one.predicted_s, one.measured_s),
        "spread": "spread:.1%",
    }
    ranks = tabled("Compute by process, medians", "measured", found.ranks, columns, text_columns=2)
    picture = pictured(caption, verified_table(found, "Parts of the step"), figure)
    return Section(title=f"Verification: {name}", lead=lead, blocks=[picture, ranks])


def verified_table(found: Verification, caption: str) -> Table:
    """Return the table of predicted against measured times, relative errors beside them."""
    parts: dict[str, VerifiedTime | VerifiedRank | None] = {
        "step": found.iteration,
        "compute, longest": found.compute,
        "synchronisation": found.sync,
        "other: optimizer, loader, waiting": found.other,
    }
    timed = {part: times for part, times in parts.items() if times is not None}
    columns: dict[str, Column[VerifiedTime | VerifiedRank]] = {"predicted": "predicted_s", "measured": "measured_s"}
    columns["error"] = lambda times: error_text(times.predicted_s, times.measured_s)
    return tabled(caption, "measured", timed.values(), columns, names=("part of a step", timed))


def gate_section(found: GateResult, name: str) -> Section:
    """Return the section of a gate's verdict."""
    count = counted(len(found.checks), "check")
    word = f"passed: {count}" if found.passed else f"FAILED: {len(found.failed)} of {count}"
    against = f" against {listed(found.baseline, 3)}" if found.baseline else ""
    lead = [harmless(f"{word}, {listed(found.current, 3)}{against}."), *few(remarks(found), 8)]
    lead += [found.noise_test] if found.noise_test else []
    checks = sorted(found.checks, key=lambda one: one.passed)
    caption = (
        f"Checks of a {found.artifact.removeprefix('ddltool.')}; rules: {harmless(found.rules_from) or 'not said'}"
    )
    header = ("", "metric", "baseline", "current", "change", "limit")
    rows = [(outcome(check), shortened(check.metric, LONGEST_NAME), *figures_of(check)) for check in checks]
    table = Table(caption=caption, header=header, rows=rows, label="read", head=20, text_columns=2)
    changes = [
        (check.metric, check.current / check.baseline, not check.passed)
        for check in checks
        if isinstance(check.baseline, float) and isinstance(check.current, float)
        if check.current >= 0 < check.baseline
        if check.current == 0 or 1 / _MOST_DRAWN < check.current / check.baseline < _MOST_DRAWN
    ]
    if not changes:
        return Section(title=f"Gate: {name}", lead=lead, blocks=[table])
    ratios = [ratio for _, ratio, _ in changes]
    figure = Bars(
        rows=[(metric, ratio) for metric, ratio, _ in changes[:_BARS_DRAWN]],
        xlabel="current over baseline",
        title="Current over baseline",
        level=("baseline", 1.0),
        log=min(ratios) > 0 and max(*ratios, 1.0) > _LOG_FROM * min(*ratios, 1.0),
        marked=("failed", [bad for *_, bad in changes[:_BARS_DRAWN]]),
        unmarked="passed",
    )
    caption = f"Each metric over its baseline.{some(_BARS_DRAWN, changes, 'metrics')}"
    return Section(title=f"Gate: {name}", lead=lead, blocks=[pictured(caption, table, figure)])
