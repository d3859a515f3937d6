"""Sections of what commands find: network, barriers, balancing, verification, gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ddltool.analyzers.balancing.replay import Outcome
from ddltool.analyzers.barriers.ends import Barrier, EndTimes, Floats, Times
from ddltool.analyzers.barriers.tradeoff import TradeoffPoint
from ddltool.analyzers.deciding.verification import error_text
from ddltool.analyzers.gating.formats import figures_of, outcome, remarks
from ddltool.analyzers.gating.metrics import LONGEST_NAME, harmless
from ddltool.analyzers.reporting.figures import Bars, Figure, Line, Lines, Span, Spans
from ddltool.analyzers.reporting.section import Picture, Section, Table, counted, few, listed, shortened
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
from ddltool.units import show_bytes, show_seconds

BARRIER_WORKERS_DRAWN = 40
_SPEED_WORKERS_DRAWN, _ITERATIONS_DRAWN = 3, 150
_BARS_DRAWN = 24
_PAIRS_DRAWN = 6
_WORKERS_SHOWN = 16
# Ratios that span more would leave the small ones no bar at all.
_LOG_FROM = 20
# A bar beyond, or below one over this, leaves nothing of the others.
_MOST_DRAWN = 1e12
# A fit of the network this far off says little about any size of message.
_BAD_FIT = 1.0
Blocks = list[Picture | Table]


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
    fitted = Table(caption="Pairs of processes, one way", header=header, rows=rows, label="measured")
    return Section(title=f"Network: {name}", lead=lead, blocks=[*_rates(found), fitted])


def _rates(found: NetworkResult) -> Blocks:
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
    rows = [
        (show_bytes(size), *(f"{show_bytes(one[size])}/s" if size in one else "-" for one in rates))
        for size in sorted({size for one in rates for size in one})
    ]
    table = Table(
        caption="Median rate between two ranks by message size",
        header=("message", *(line.label for line in lines)),
        rows=rows,
        label="measured",
    )
    some = f" The {_PAIRS_DRAWN} slowest of {len(found.pairs)} pairs." if len(found.pairs) > _PAIRS_DRAWN else ""
    figure = Lines(
        lines=lines,
        xlabel="message size",
        ylabel="rate (GiB/s)",
        title="Rate by message size",
        draw="points",
        x_axis="bytes",
    )
    caption = f"Median rate by message size, a line for each pair of ranks.{some}"
    return [Picture(figures=[figure], caption=caption, label="measured", table=table)]


def barrier_section(found: BarrierResult, name: str) -> Section:
    """Return the section of the next barrier's choices, and of waiting against the iteration gap."""
    labels = {"waiting": "least longest", "total": "least total", "per_iteration": "least per iter."}
    least = {labels.get(key, key): record for key, record in found.objectives.items()}
    records = {"bsp": found.bsp, **found.algorithms, **least}
    caption = "Choices of the next barrier; longest, of all, per iter.: waiting of the workers"
    if found.max_gap is not None:
        caption += f"; in the rows 'least ...' the gap is at most {found.max_gap}"
    rows = [
        (
            key,
            show_seconds(record.barrier_s),
            show_seconds(record.waiting_time_s),
            show_seconds(record.total_waiting_s),
            show_seconds(record.waiting_per_iteration_s),
            str(record.iteration_gap),
            show_seconds(record.compute_seconds),
        )
        for key, record in records.items()
    ]
    header = ("choice", "at", "longest", "of all", "per iter.", "gap", "CPU")
    figure = Bars(
        rows=[(key, record.waiting_time_s) for key, record in records.items()],
        xlabel="longest waiting of a worker",
        title="Longest waiting by choice of the barrier",
        seconds=True,
        level=("bsp", found.bsp.waiting_time_s),
    )
    choices = Picture(
        figures=[figure],
        caption="Longest waiting of any worker, by choice of the barrier.",
        label="predicted",
        table=Table(caption=caption, header=header, rows=rows, label="predicted"),
    )
    blocks: Blocks = [choices, *_iterations(records)]
    if found.tradeoff:
        blocks.append(_tradeoff(found))
    ahead = f"{counted(found.workers, 'worker')}, {counted(found.lookahead, 'iteration')} looked ahead."
    lead = f"{ahead} Times count as in the file that was read."
    return Section(title=f"Barrier: {name}", lead=[lead], blocks=blocks)


def _iterations(records: dict[str, BarrierChoice]) -> list[Table]:
    """Return each worker's iterations until the barrier; of many workers, how they spread comes first."""
    workers = sorted({worker for record in records.values() for worker in record.iterations}, key=natural_key)
    header = ("worker", *records)
    rows = [
        [shortened(worker, 40), *(str(record.iterations.get(worker, "-")) for record in records.values())]
        for worker in workers
    ]
    spread: list[Table] = []
    if len(workers) > _WORKERS_SHOWN:
        counts = [np.array(list(record.iterations.values())) for record in records.values()]
        quantiles = [
            [label, *(f"{np.quantile(count, share):g}" for count in counts)]
            for label, share in (("fewest", 0.0), ("median", 0.5), ("most", 1.0))
        ]
        caption = f"Iterations of {len(workers)} workers until the barrier"
        spread = [Table(caption=caption, header=("", *records), rows=quantiles, label="predicted")]
    caption = "Iterations until the barrier"
    return [*spread, Table(caption=caption, header=header, rows=rows, label="predicted")]


def _tradeoff(found: BarrierResult) -> Picture:
    gaps = np.array([point.max_gap for point in found.tradeoff], dtype=float)
    per_iteration = np.array([point.per_iteration.waiting_per_iteration_s for point in found.tradeoff])
    lines = [
        Line(label="longest", x=gaps, y=np.array([point.waiting.waiting_time_s for point in found.tradeoff])),
        Line(label="per iteration", x=gaps, y=per_iteration),
    ]
    figure = Lines(
        lines=lines,
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
            *map(show_seconds, (point.waiting.barrier_s, point.waiting.waiting_time_s)),
            *map(show_seconds, (point.total.barrier_s, point.total.total_waiting_s)),
            *map(show_seconds, (point.per_iteration.barrier_s, point.per_iteration.waiting_per_iteration_s)),
        )
        for point in found.tradeoff
    ]
    table = Table(
        caption="Least waiting by bound on the iteration gap",
        header=("gap <=", "at", "longest", "at", "of all", "at", "per iter."),
        rows=rows,
        label="predicted",
        head=20,
    )
    return Picture(figures=[figure], caption="Least waiting under a bound on the gap.", label="predicted", table=table)


_SCHEMES = {
    "bsp": "BSP",
    "asp": "ASP",
    "ssp": "SSP, bound 5",
    "redundant": "redundant execution",
    "work_shifting": "work shifting (FlexRR-like)",
    "lb_bsp": "LB-BSP",
    "lb_bsp_oracle": "LB-BSP, speeds known",
}


def balance_section(found: BalanceResult, name: str) -> Section:
    """Return the section of replayed batch balancing."""
    lead = [
        f"{found.workers} workers, {found.iterations:,} iterations of which {found.warm_up:,} warm-up, total batch "
        f"{found.total_batch:,}."
    ]
    if min((record.iteration_time_ratio for record in found.predictors.values()), default=0) >= 1:
        lead.append("Equal batches are as fast here: these speeds cannot be foretold well enough.")
    rows = [("equal split", "-", "-", *_split(found.equal_split), "-")]
    for key, record in found.predictors.items():
        gain = "-" if record.gain_kept is None else f"{record.gain_kept:.0%}"
        rows.append((key, f"{record.rmse:,.4g}", f"{record.rmse_relative:.1%}", *_split(record), gain))
    rows.append(("speeds known", "0", "0.0%", *_split(found.oracle), "100%"))
    table = Table(
        caption=(
            "Predictors of speed, and batches sized by them; RMSE in samples/s, mean over workers; gain: share of what "
            "knowing the speeds would gain"
        ),
        header=("predictor", "RMSE", "of mean", "iteration", "of equal split", "gain"),
        rows=rows,
        label="simulated",
    )
    bars = [("equal split", found.equal_split.iteration_s)]
    bars += [(key, record.iteration_s) for key, record in found.predictors.items()]
    bars.append(("speeds known", found.oracle.iteration_s))
    base = ("equal split", found.equal_split.iteration_s)
    figure = Bars(
        rows=bars, xlabel="mean iteration time", title="Iteration time by predictor", seconds=True, level=base
    )
    caption = "Mean iteration time by what sizes the batches."
    blocks: Blocks = [Picture(figures=[figure], caption=caption, label="simulated", table=table)]
    schemes = {key: record for key, record in found.schemes.items() if isinstance(record, SchemeFigures)}
    if schemes:
        blocks.append(_schemes(schemes, str(found.schemes.get("predictor", ""))))
    return Section(title=f"Balancing: {name}", lead=lead, blocks=blocks)


def _schemes(schemes: dict[str, SchemeFigures], predictor: str) -> Picture:
    labels = {key: _SCHEMES.get(key, key) for key in schemes}
    if "lb_bsp" in labels and predictor:
        labels["lb_bsp"] += f" ({predictor})"
    rows = [
        (labels[key], *_split(record), f"{record.staleness:.1f}", str(record.iteration_gap))
        for key, record in schemes.items()
    ]
    table = Table(
        caption="Schemes on the whole trace, rows as wall-clock time; staleness: updates of others that a gradient has not "
        "seen",
        header=("scheme", "iteration", "of BSP", "staleness", "gap"),
        rows=rows,
        label="simulated",
    )
    bars = [(labels[key], record.iteration_s) for key, record in schemes.items()]
    base = ("BSP", schemes["bsp"].iteration_s) if "bsp" in schemes else None
    figure = Bars(rows=bars, xlabel="mean iteration time", title="Iteration time by scheme", seconds=True, level=base)
    caption = "Mean iteration time by scheme, on the whole trace."
    return Picture(figures=[figure], caption=caption, label="simulated", table=table)


def _split(record: SplitTime) -> tuple[str, str]:
    return show_seconds(record.iteration_s), f"{record.iteration_time_ratio:.3f}"


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
        *(_as_sentence(words) for words in few(found.refit) or ["nothing to fit again: the plan's figures hold"]),
    ]
    if found.max_error is not None:
        word = "within" if abs(step.error) <= found.max_error else "beyond"
        limit = f"{word} the limit of {100 * found.max_error:.3g}%"
        lead.append(f"Step time off by {abs(step.error):.1%}: {limit}.")
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
    caption = (
        "Predicted against measured: the step (whiskers: half of all), its longest computation, and synchronisation."
    )
    picture = Picture(
        figures=[figure], caption=caption, label="measured", table=verified_table(found, "Parts of the step")
    )
    rows = [_rank_row(rank) for rank in found.ranks]
    header = ("rank", "device", "batch", "predicted", "measured", "error", "spread")
    ranks = Table(
        caption="Compute by process, medians",
        header=header,
        rows=rows,
        label="measured",
        text_columns=2,
    )
    return Section(title=f"Verification: {name}", lead=lead, blocks=[picture, ranks])


def verified_table(found: Verification, caption: str) -> Table:
    """Return the table of predicted against measured times, relative errors beside them."""
    parts: list[tuple[str, VerifiedTime | VerifiedRank | None]] = [
        ("step", found.iteration),
        ("compute, longest", found.compute),
        ("synchronisation", found.sync),
        ("other: optimizer, loader, waiting", found.other),
    ]
    rows = [
        (
            part,
            *map(show_seconds, (times.predicted_s, times.measured_s)),
            error_text(times.predicted_s, times.measured_s),
        )
        for part, times in parts
        if times is not None
    ]
    header = ("part of a step", "predicted", "measured", "error")
    return Table(caption=caption, header=header, rows=rows, label="measured")


def _rank_row(rank: VerifiedRank) -> tuple[str, ...]:
    return (
        str(rank.rank),
        f"{rank.device} for {rank.planned_device}" if rank.other_device else rank.device,
        str(rank.batch),
        show_seconds(rank.predicted_s),
        show_seconds(rank.measured_s),
        "-" if rank.other_device else error_text(rank.predicted_s, rank.measured_s),
        "-" if rank.spread is None else f"{rank.spread:.1%}",
    )


def _as_sentence(words: str) -> str:
    """Return a remark as a sentence; names in lower case at its beginning are no names of files here."""
    return f"{words[:1].upper()}{words[1:].rstrip('.')}."


def gate_section(found: GateResult, name: str) -> Section:
    """Return the section of a gate's verdict."""
    count = counted(len(found.checks), "check")
    word = f"passed: {count}" if found.passed else f"FAILED: {len(found.failed)} of {count}"
    against = f" against {listed(found.baseline, 3)}" if found.baseline else ""
    lead = [harmless(f"{word}, {listed(found.current, 3)}{against}."), *few(remarks(found), 8)]
    lead += [found.noise_test] if found.noise_test else []
    checks = sorted(found.checks, key=lambda one: one.passed)
    rows = [(outcome(check), shortened(check.metric, LONGEST_NAME), *figures_of(check)) for check in checks]
    kind = found.artifact.removeprefix("ddltool.")
    table = Table(
        caption=f"Checks of a {kind}; rules: {harmless(found.rules_from) or 'not said'}",
        header=("", "metric", "baseline", "current", "change", "limit"),
        rows=rows,
        label="read",
        head=20,
        text_columns=2,
    )
    changes = [
        (check.metric, check.current / check.baseline, not check.passed)
        for check in checks
        if isinstance(check.baseline, float)
        and isinstance(check.current, float)
        and check.baseline > 0
        and check.current >= 0
        and (check.current == 0 or 1 / _MOST_DRAWN < check.current / check.baseline < _MOST_DRAWN)
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
    some = f" {_BARS_DRAWN} of {len(changes)} metrics are drawn." if len(changes) > _BARS_DRAWN else ""
    picture = Picture(figures=[figure], caption=f"Each metric over its baseline.{some}", label="read", table=table)
    return Section(title=f"Gate: {name}", lead=lead, blocks=[picture])


def barrier_figures(
    names: Sequence[str],
    times: Times,
    barrier: Barrier,
    *,
    title: str = "",
    curve: Sequence[TradeoffPoint] = (),
    max_gap: int | None = None,
) -> list[Figure]:
    """Return a lane per worker: a tick at each iteration end and a bar from the chosen one, its waiting for the barrier.

    ``names``: (n,) lane labels; ``times`` as in :func:`~.zipline.zipline`, seconds; ``title``: what chose the barrier. Of
    more than 40 workers 40 are drawn, evenly spread from the one that waits longest to the one that does not. Two or more
    points of ``curve`` become a second figure: least waiting by bound on the iteration gap, ``max_gap`` marked.
    """
    ends = EndTimes.of(times)
    drawn = np.arange(ends.workers)
    if ends.workers > BARRIER_WORKERS_DRAWN:
        by_waiting = np.argsort(barrier.chosen_s, kind="stable")
        drawn = by_waiting[np.linspace(0, ends.workers - 1, BARRIER_WORKERS_DRAWN).round().astype(int)]
    low = float(ends.first_s.min())
    # On clocks that began long ago only differences are legible; the axis then counts from the first end.
    offset = low if abs(low) > 1e3 * max(float(ends.last_s.max()) - low, 1e-9) else 0.0
    at = barrier.barrier_s - offset
    lanes = [f"{names[worker]} ({barrier.iterations[worker]})" for worker in drawn.tolist()]
    some = f"{len(drawn)} of {ends.workers} workers" if len(drawn) < ends.workers else ""
    chosen = [float(barrier.chosen_s[worker]) - offset for worker in drawn]
    timeline = Spans(
        title=", ".join(text for text in (title, some) if text) or "iteration ends of each worker, and the barrier",
        headed=bool(title or some),
        lanes=[(name, [Span(end, at, "waiting")]) for name, end in zip(lanes, chosen, strict=True)],
        ends=[(name, (ends.row(worker) - offset).tolist()) for name, worker in zip(lanes, drawn.tolist(), strict=True)],
        xlabel=f"time{' after the first iteration end' if offset else ''}; in brackets: iterations until the barrier",
        mark=("barrier", at),
    )
    return [timeline] if len(curve) < 2 else [timeline, _tradeoff_figure(curve, max_gap)]


def _tradeoff_figure(curve: Sequence[TradeoffPoint], max_gap: int | None) -> Lines:
    """Return the least waiting by bound on the gap; a bound between two points allows what the lower one does."""
    gaps = np.array([point.max_gap for point in curve], dtype=float)
    lines = {
        "longest": [point.waiting.waiting_s for point in curve],
        "mean of the workers": [point.total.total_waiting_s / len(point.total.iterations) for point in curve],
        "per iteration made": [point.per_iteration.waiting_per_iteration_s for point in curve],
    }
    return Lines(
        title="Least waiting by bound on the iteration gap",
        lines=[Line(label=label, x=gaps, y=np.array(values)) for label, values in lines.items()],
        xlabel="bound on the iteration gap (staleness)",
        ylabel="least waiting",
        seconds=True,
        draw="steps",
        whole="x",
        marks=[] if max_gap is None else [(f"--max-gap {max_gap}", float(max_gap))],
    )


def speeds_figures(names: Sequence[str], outcomes: Mapping[str, Outcome], first: int) -> list[Figure]:
    """Return a figure per worker: its actual speed, and the predicted one of each outcome, over iterations.

    ``names``: (n,) workers; ``outcomes``: by predictor, all over the same J iterations, of which ``first`` is the number
    of the first. Of more than 3 workers those are drawn whose speed varies most, and of more than 150 iterations the 150
    in which they vary most.
    """
    actual = next(iter(outcomes.values())).actual
    low, high = _liveliest(actual)
    spread = actual[low:high].std(axis=0) / actual[low:high].mean(axis=0)
    drawn = np.sort(np.argsort(-spread, kind="stable")[:_SPEED_WORKERS_DRAWN]).tolist()
    at = np.arange(first + low, first + high, dtype=float)
    predicted = {name: outcome.predicted for name, outcome in outcomes.items() if outcome.predicted is not None}
    return [
        Lines(
            title=names[worker],
            headed=True,
            lines=[
                Line(label=name, x=at, y=speeds[low:high, worker])
                for name, speeds in {"actual": actual, **predicted}.items()
            ],
            xlabel="iteration",
            ylabel="samples/s",
            whole="x",
        )
        for worker in drawn
    ]


def _liveliest(actual: Floats) -> tuple[int, int]:
    """Return the bounds of the stretch of at most 150 iterations with the most relative variance in it."""
    if len(actual) <= _ITERATIONS_DRAWN:
        return 0, len(actual)
    windows = np.lib.stride_tricks.sliding_window_view(actual / actual.mean(axis=0), _ITERATIONS_DRAWN, axis=0)
    begin = int(np.argmax(np.sort(windows.var(axis=2), axis=1)[:, -_SPEED_WORKERS_DRAWN:].sum(axis=1)))
    return begin, begin + _ITERATIONS_DRAWN
