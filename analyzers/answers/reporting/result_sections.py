"""Sections of results: network, barriers, balancing, verification, gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ddltool.analyzers.answers.gating.formats import check_texts, outcome, remarks, sentence
from ddltool.analyzers.answers.gating.metrics import LONGEST_NAME, harmless
from ddltool.analyzers.answers.reporting.figures import BARS_DRAWN, MOST_DRAWN, Bars, Line, Lines, line, value_of
from ddltool.analyzers.answers.reporting.section import (
    Blocks,
    Column,
    Picture,
    Section,
    Table,
    Verdict,
    cell,
    how_many_drawn,
    pictured,
    tabled,
)
from ddltool.analyzers.job.diagnosing.verification import error_text
from ddltool.errors import few, listed, shortened
from ddltool.graph import natural_key
from ddltool.results import (
    BalanceResult,
    BarrierChoice,
    BarrierResult,
    GateResult,
    Ledger,
    NetworkResult,
    SchemeFigures,
    SplitTime,
    Verification,
    VerifiedRank,
    VerifiedTime,
)
from ddltool.units import counted, show_bytes, show_seconds

_PAIRS_DRAWN = 6
_WORKERS_SHOWN = 16
# Ratios that span more would leave the small ones no bar at all.
_LOG_FROM = 20
# A fit of the network this far off says little about any size of message.
_BAD_FIT = 1.0


def network_section(result: NetworkResult, name: str) -> Section:
    """Return the section of a network's measured latency and bandwidth, also as options for other commands."""
    lead = [
        f"{result.processes} processes: {show_bytes(result.bandwidth_bytes_per_s)}/s, latency {show_seconds(result.latency_s)} "
        f"(misfit {result.residual:.1%})."
    ]
    if result.residual > _BAD_FIT:
        lead.append(
            f"The times do not lie on a line (misfit {result.residual:.0%}): measure again on a quieter machine."
        )
    if result.local:
        lead.append("These processes share one machine: that is its loopback, not a network.")
    rate = result.bandwidth_bytes_per_s * 8 / 1e9
    lead.append(f"For ddltool trace: --bandwidth {rate:.3g}Gbit --latency {result.latency_s * 1e6:.3g}us")
    ranks = ("ranks", [f"{pair.ranks[0]} - {pair.ranks[1]}" for pair in result.pairs])
    columns = {"latency": "latency_s", "bandwidth": "bandwidth_bytes_per_s", "misfit": "residual:.1%"}
    fitted = tabled("Pairs of processes, one way", "measured", result.pairs, columns, names=ranks)
    return Section(
        title=f"Network: {name}", lead=lead, blocks=[*_rate_pictures(result), fitted], verdict=_network_verdict(result)
    )


def _rate_pictures(result: NetworkResult) -> Blocks:
    """Return the picture of rates by message size of the six slowest pairs of processes; [] if no message took any time."""
    rates: dict[str, dict[float, float]] = {}  # bytes per second, by pair and message size in bytes
    for pair in sorted(result.pairs, key=lambda pair: pair.bandwidth_bytes_per_s)[:_PAIRS_DRAWN]:
        times_by_size = zip(pair.sizes_bytes, pair.median_s, strict=False)
        rates[f"{pair.ranks[0]} - {pair.ranks[1]}"] = {
            size: size / time_s for size, time_s in times_by_size if size > 0 and time_s > 0
        }
    sizes = sorted({size for rate_by_size in rates.values() for size in rate_by_size})
    if not sizes:
        return []
    lines = [
        Line(label=label, x=np.array([*rate_by_size]), y=np.array([*rate_by_size.values()]) / 2**30)
        for label, rate_by_size in rates.items()
    ]
    title = "Rate by message size"
    figure = Lines(
        lines=lines, xlabel="message size", ylabel="rate (GiB/s)", title=title, draw="points", x_axis="bytes"
    )
    rows = [
        [show_bytes(size), *(cell(rate_by_size.get(size), "_bytes_per_s") for rate_by_size in rates.values())]
        for size in sizes
    ]
    caption = "Median rate between two ranks by message size"
    table = Table(caption=caption, header=("message", *rates), rows=rows, label="measured")
    remark = f" The {_PAIRS_DRAWN} slowest of {len(result.pairs)} pairs." if len(result.pairs) > _PAIRS_DRAWN else ""
    return [pictured(f"Median rate by message size, a line for each pair of ranks.{remark}", table, figure)]


def barrier_section(result: BarrierResult, name: str) -> Section:
    """Return the section of choices of the next barrier, and of the least waiting under bounds on the iteration gap."""
    labels = {"waiting": "least longest", "total": "least total", "per_iteration": "least per iter."}
    least_waiting = {labels.get(key, key): record for key, record in result.objectives.items()}
    records = {"bsp": result.bsp, **result.algorithms, **least_waiting}
    caption = "Choices of the next barrier; longest, of all, per iter.: waiting of the workers"
    if result.max_gap is not None:
        caption += f"; in the rows 'least ...' the gap is at most {result.max_gap}"
    columns: dict[str, Column[BarrierChoice]] = {"at": "barrier_s", "longest": "waiting_time_s"}
    columns |= {"of all": "total_waiting_s", "per iter.": "waiting_per_iteration_s", "gap": "iteration_gap"}
    columns |= {"CPU": lambda record: show_seconds(record.compute_seconds)}
    figure = Bars(
        rows=[(key, record.waiting_time_s) for key, record in records.items()],
        xlabel="longest waiting of a worker",
        title="Longest waiting by choice of the barrier",
        seconds=True,
        level=("bsp", result.bsp.waiting_time_s),
    )
    table = tabled(caption, "predicted", records.values(), columns, names=("choice", records))
    blocks: Blocks = [pictured("Longest waiting of any worker, by choice of the barrier.", table, figure)]
    blocks += [*_iteration_tables(records), *([_tradeoff_picture(result)] if result.tradeoff else [])]
    lead = f"{counted(result.workers, 'worker')}, {counted(result.lookahead, 'iteration')} looked ahead. "
    lead += "Times count as in the file that was read."
    verdict = _barrier_verdict(result)
    return Section(
        title=f"Barrier: {name}",
        lead=[verdict.answer, lead],
        blocks=blocks,
        verdict=verdict,
    )


def _barrier_sentence(result: BarrierResult) -> str:
    """Return the sentence on when to synchronise next, and on its gain in iterations per second over BSP.

    BSP (bulk synchronous parallel) synchronises after every iteration. The barrier is that of the first algorithm, or where its
    gap exceeds the bound, the exact one of most iterations a second within it.
    """
    choice = next(iter(result.algorithms.values()))
    if result.max_gap is not None and choice.iteration_gap > result.max_gap:
        choice = max(result.objectives.values(), key=lambda record: record.iterations_per_s or 0.0)
    iteration_counts = choice.iterations.values()
    fewest = min(iteration_counts)
    most = max(iteration_counts)
    count_text = counted(fewest, "iteration") if fewest == most else f"{fewest} to {most} iterations"
    answer = f"Synchronise after {count_text} of each worker, at {show_seconds(choice.barrier_s)}"
    if choice.iterations_per_s is None or not result.bsp.iterations_per_s:
        return f"{answer} (predicted)."
    gain = choice.iterations_per_s / result.bsp.iterations_per_s - 1
    gain_text = (
        f"{gain:.0%} more iterations a second than BSP's" if gain > 0.005 else "no more iterations a second than BSP's"
    )
    return f"{answer}: {gain_text} (predicted), up to {counted(choice.iteration_gap, 'iteration')} stale."


def _iteration_tables(records: dict[str, BarrierChoice]) -> list[Table]:
    """Return the table of each worker's iterations until the barrier by choice; for many workers after one of quantiles."""
    workers = sorted({worker for record in records.values() for worker in record.iterations}, key=natural_key)
    columns = {key: lambda worker, counts=record.iterations: counts.get(worker) for key, record in records.items()}
    names = ("worker", [shortened(worker, 40) for worker in workers])
    tables = [tabled("Iterations until the barrier", "predicted", workers, columns, names=names)]
    if len(workers) > _WORKERS_SHOWN:  # more than a reader compares one by one
        counts = {key: [*record.iterations.values()] for key, record in records.items()}
        quantile_columns = {
            key: lambda share, counts=counts: f"{np.quantile(counts, share):g}" for key, counts in counts.items()
        }
        caption = f"Iterations of {len(workers)} workers until the barrier"
        tables.insert(
            0, tabled(caption, "predicted", (0, 0.5, 1), quantile_columns, names=("", ("fewest", "median", "most")))
        )
    return tables


def _tradeoff_picture(result: BarrierResult) -> Picture:
    """Return the picture of the least waiting by bound on the iteration gap.

    It is drawn as steps, as a bound between two points allows the same choices as the lower one.
    """
    points = result.tradeoff
    caption = "Least waiting by bound on the iteration gap"
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
    lines[1] = replace(lines[1], y=lines[1].y / result.workers)  # the sum over the workers, drawn as their mean
    figure = Lines(
        title=caption,
        lines=lines,
        xlabel="bound on the iteration gap (staleness)",
        ylabel="least waiting",
        seconds=True,
        draw="steps",
        whole="x",
        marks=[] if result.max_gap is None else [(f"--max-gap {result.max_gap}", float(result.max_gap))],
    )
    return pictured("Least waiting under a bound on the gap.", table, figure)


_SCHEMES = {
    "bsp": "BSP",
    "asp": "ASP",
    "ssp": "SSP, bound 5",
    "redundant": "redundant execution",
    "work_shifting": "work shifting (FlexRR-like)",
    "lb_bsp": "LB-BSP",
    "lb_bsp_oracle": "LB-BSP, speeds known",
}


def balance_section(result: BalanceResult, name: str) -> Section:
    """Return the section of a replayed trace of speeds: equal batches, batches sized by each predictor, by the true speeds."""
    lead = [
        f"{result.workers} workers, {result.iterations:,} iterations of which {result.warm_up:,} warm-up, total batch "
        f"{result.total_batch:,}."
    ]
    equal = "equal split"
    # Predictors are between two bounds: equal batches, which ignore speeds, and those by the true speeds.
    splits: dict[str, SplitTime] = {equal: result.equal_split, **result.predictors, "speeds known": result.oracle}
    caption = (
        "Predictors of speed, and batches sized by them; RMSE in samples/s, mean over workers; gain: share of what "
        "knowing the speeds would gain"
    )

    def predictor_column(field: str, form: str, at_best: str) -> Column[SplitTime]:
        """Return the column of a predictor's ``field`` in the format ``form``; ``at_best``: the cell for the true speeds.

        Equal batches, which have no such field, get "-".
        """
        return lambda split: at_best if split is result.oracle else cell(getattr(split, field, None), form=form)

    columns: dict[str, Column[SplitTime]] = {
        "RMSE": predictor_column("rmse", ",.4g", "0"),
        "of mean": predictor_column("rmse_relative", ".1%", "0.0%"),
        "iteration": "iteration_s",
        "of equal split": "iteration_time_ratio:.3f",
        "gain": predictor_column("gain_kept", ".0%", "100%"),
    }
    table = tabled(caption, "simulated", splits.values(), columns, names=("predictor", splits))
    blocks: Blocks = [_iteration_time_picture("Mean iteration time by what sizes the batches.", table, splits, equal)]
    schemes = {key: record for key, record in result.schemes.items() if isinstance(record, SchemeFigures)}
    if schemes:
        blocks.append(_schemes_picture(schemes, str(result.schemes.get("predictor", ""))))
    return Section(title=f"Balancing: {name}", lead=lead, blocks=blocks, verdict=_balance_verdict(result))


def _schemes_picture(schemes: dict[str, SchemeFigures], predictor: str) -> Picture:
    """Return the picture of synchronisation schemes on the whole trace; ``predictor``: LB-BSP's, "" if unknown."""
    predictor_text = f" ({predictor})" if predictor else ""
    labelled = {
        _SCHEMES.get(key, key) + (predictor_text if key == "lb_bsp" else ""): record for key, record in schemes.items()
    }
    columns = {"iteration": "iteration_s", "of BSP": "iteration_time_ratio:.3f"}
    columns |= {"staleness": "staleness:.1f", "gap": "iteration_gap"}
    caption = (
        "Schemes on the whole trace, rows as wall-clock time; staleness: updates of others that a gradient has not seen"
    )
    table = tabled(caption, "simulated", labelled.values(), columns, names=("scheme", labelled))
    return _iteration_time_picture("Mean iteration time by scheme, on the whole trace.", table, labelled, "BSP")


def _iteration_time_picture(caption: str, table: Table, splits: Mapping[str, SplitTime], baseline: str) -> Picture:
    """Return bars of the mean iteration times ``splits`` by name, with their table; the ``baseline`` is a line across all."""
    figure = Bars(
        rows=[(name, record.iteration_s) for name, record in splits.items()],
        xlabel="mean iteration time",
        title=f"Iteration time by {table.header[0]}",
        seconds=True,
        level=(baseline, splits[baseline].iteration_s) if baseline in splits else None,
    )
    return pictured(caption, table, figure)


def verification_section(result: Verification, name: str) -> Section:
    """Return the section of a run against its plan: the error of the step, what to fit again, and where time went.

    The lead also names failures: an error beyond the limit, a rank that is missing, on another device or with another
    batch.
    """
    step = result.iteration
    lead = _verification_lead(result)
    bars: list[tuple[str, float]] = []
    for part, times in {"step": step, "compute": result.compute, "sync": result.sync}.items():
        if times.predicted_s is not None:
            bars.append((f"{part}, predicted", times.predicted_s))
        bars.append((f"{part}, measured", times.measured_s))
    # Only the measured step has whiskers, as only its quartiles are known.
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
        "device": lambda rank: f"{rank.device} for {rank.planned_device}" if rank.other_device else rank.device,
        "batch": "batch",
        "predicted": "predicted_s",
        "measured": "measured_s",
        "error": lambda rank: "-" if rank.other_device else error_text(rank.predicted_s, rank.measured_s),
        "spread": "spread:.1%",
    }
    ranks = tabled("Compute by process, medians", "measured", result.ranks, columns, text_columns=2)
    blocks: Blocks = [pictured(caption, verified_table(result, "Parts of the step"), figure), ranks]
    if (spent := result.ledger) is not None:
        lead += _ledger_lead(spent)
        blocks.append(_ledger_picture(spent))
    return Section(title=f"Verification: {name}", lead=lead, blocks=blocks, verdict=_verification_verdict(result))


def _verification_lead(result: Verification) -> list[str]:
    """Return the sentences on the error of the predicted step, on what to fit again, and on failures of the run."""
    step = result.iteration
    compared = f"predicted over measured step {error_text(step.predicted_s, step.measured_s)}"
    if result.elsewhere:
        compared = "not the plan's devices, so its times are not held against the measured ones"
    known_error_text = "The prediction comes without an error of its own."
    if result.known_error is not None:
        known_error_text = (
            f"Predicted compute is known to within {result.known_error:.0%}, synchronisation without an error."
        )
    lead = [
        f"{shortened(result.telemetry, 60)} against {shortened(result.plan, 60)}: {compared}; half of the measured steps took "
        f"{show_seconds(step.low_s)} to {show_seconds(step.high_s)}.",
        known_error_text,
    ]
    refits = few(result.refit) or ["nothing to fit again: the plan's figures hold"]
    lead += [f"{words[:1].upper()}{words[1:].rstrip('.')}." for words in refits]
    if result.max_error is not None and not result.elsewhere:
        relation = "within" if abs(step.error) <= result.max_error else "beyond"
        lead.append(f"Step time off by {abs(step.error):.1%}: {relation} the limit of {100 * result.max_error:.3g}%.")
    if result.max_error is not None and not result.complete:
        lead.append("FAILED: not the whole run on the planned devices (see above).")
    if not result.followed:
        lead.append("FAILED: the run did not follow the plan (see above).")
    return lead


def _ledger_lead(ledger: Ledger) -> list[str]:
    """Return the sentences on how the run's wall-clock time was spent, by the ledger."""
    lead = [
        f"Goodput {ledger.goodput:.1%}: computation of {counted(ledger.steps, 'kept step')} in {show_seconds(ledger.wall_s)}, "
        f"{counted(ledger.starts, 'start')} included; {ledger.in_steps:.1%} with waiting for others and communication."
    ]
    if ledger.gain:
        lead.append(f"{ledger.gain[:1].upper()}{ledger.gain[1:]}.")
    return [*lead, f"Next: {ledger.action}.", *(f"{remark[:1].upper()}{remark[1:]}." for remark in ledger.remarks)]


def _ledger_picture(ledger: Ledger) -> Picture:
    """Return the parts of the run's wall-clock time, by the ledger, as bars and a table."""
    columns: dict[str, Column[float]] = {"time": show_seconds, "share": lambda part_s: f"{part_s / ledger.wall_s:.1%}"}
    parts = {**ledger.parts_s, "wall clock": ledger.wall_s}
    table = tabled("Where the wall clock went", "measured", parts.values(), columns, names=("part", parts))
    bars = [(part, max(0.0, part_s)) for part, part_s in ledger.parts_s.items()]
    figure = Bars(rows=bars, xlabel="time", title="Where the wall clock went", seconds=True)
    return pictured("Where the wall clock went; the mean over the ranks.", table, figure)


_NEGLIGIBLE = 0.01
"""A difference of times below this share of a step is in the noise."""


def verified_table(result: Verification, caption: str) -> Table:
    """Return the table of predicted and measured times of the parts of a step, with relative errors.

    The error of a part is "in the noise" if it is below half the interquartile range of the measured steps, or below one
    percent of a step.
    """
    step = result.iteration
    noise_s = max(_NEGLIGIBLE * step.measured_s, (step.high_s - step.low_s) / 2)

    def error(times: VerifiedTime | VerifiedRank) -> str:
        """Return a part's relative error in words, or "in the noise"; that of the whole step is always given.

        On other devices than planned it is "-".
        """
        if result.elsewhere:
            return "-"
        off_s = 0.0 if times.predicted_s is None else abs(times.predicted_s - times.measured_s)
        is_small = times is not step and times.predicted_s and off_s <= noise_s
        return "in the noise" if is_small else error_text(times.predicted_s, times.measured_s)

    parts: dict[str, VerifiedTime | VerifiedRank | None] = {
        "step": result.iteration,
        "compute, longest": result.compute,
        "synchronisation": result.sync,
        "other: optimizer, loader, waiting": result.other,
    }
    known_times = {part: times for part, times in parts.items() if times is not None}
    columns: dict[str, Column[VerifiedTime | VerifiedRank]] = {"predicted": "predicted_s", "measured": "measured_s"}
    columns["error"] = error
    return tabled(caption, "measured", known_times.values(), columns, names=("part of a step", known_times))


def gate_section(result: GateResult, name: str) -> Section:
    """Return the section of a gate's outcome: the table of its checks, and bars of each metric over its baseline."""
    check_count = counted(len(result.checks), "check")
    outcome_text = f"passed: {check_count}" if result.passed else f"FAILED: {len(result.failed)} of {check_count}"
    against = f" against {listed(result.baseline, 3)}" if result.baseline else ""
    lead = [harmless(f"{outcome_text}, {listed(result.current, 3)}{against}."), *few(remarks(result), 8)]
    if result.noise_test:
        lead.append(result.noise_test)
    checks = sorted(result.checks, key=lambda check: check.passed)
    caption = (
        f"Checks of a {result.artifact.removeprefix('ddltool.')}; rules: {harmless(result.rules_from) or 'not said'}"
    )
    header = ("", "metric", "baseline", "current", "change", "limit")
    rows = [(outcome(check), shortened(check.metric, LONGEST_NAME), *check_texts(check)) for check in checks]
    table = Table(caption=caption, header=header, rows=rows, label="read", head=20, text_columns=2)
    changes: list[tuple[str, float, bool]] = []  # (metric, current over baseline, whether the check has failed)
    for check in checks:
        if not (isinstance(check.baseline, float) and isinstance(check.current, float)):
            continue
        can_be_drawn = check.baseline > 0 and check.current >= 0
        if not can_be_drawn:
            continue
        ratio = check.current / check.baseline
        if check.current == 0 or 1 / MOST_DRAWN < ratio < MOST_DRAWN:  # others would leave nothing of the other bars
            changes.append((check.metric, ratio, not check.passed))
    verdict = _gate_verdict(result)
    if not changes:
        return Section(title=f"Gate: {name}", lead=lead, blocks=[table], verdict=verdict)
    ratios = [ratio for _, ratio, _ in changes]
    figure = Bars(
        rows=[(metric, ratio) for metric, ratio, _ in changes[:BARS_DRAWN]],
        xlabel="current over baseline",
        title="Current over baseline",
        level=("baseline", 1.0),
        log=min(ratios) > 0 and max(*ratios, 1.0) > _LOG_FROM * min(*ratios, 1.0),
        marked=("failed", [has_failed for *_, has_failed in changes[:BARS_DRAWN]]),
        unmarked="passed",
    )
    caption = f"Each metric over its baseline.{how_many_drawn(BARS_DRAWN, changes, 'metrics')}"
    picture = pictured(caption, table, figure)
    return Section(title=f"Gate: {name}", lead=lead, blocks=[picture], verdict=verdict)


def _verification_verdict(result: Verification) -> Verdict:
    """Return the verdict on a run against its plan: the measured and the predicted step, and what to fit again."""
    step = result.iteration
    share = "on other devices" if result.elsewhere else error_text(step.predicted_s, step.measured_s)
    answer = f"The step took {show_seconds(step.measured_s)}, predicted {show_seconds(step.predicted_s)} ({share})."
    refits = few(result.refit, 1)
    return Verdict(
        answer=answer,
        sure=f"half of the measured steps between {show_seconds(step.low_s)} and {show_seconds(step.high_s)}",
        then=refits[0] if refits else "nothing to fit again: the plan's figures hold",
        good=result.passed if result.max_error is not None else None,
    )


def _gate_verdict(result: GateResult) -> Verdict:
    """Return the verdict of a gate: passed, or the number of failed checks and the first of them."""
    check_count = counted(len(result.checks), "check")
    if result.passed:
        return Verdict(
            answer=f"Passed: {check_count}.", sure=_false_alarm_words(result), then="let the change in", good=True
        )
    answer = f"FAILED: {len(result.failed)} of {check_count}: {harmless(sentence(result.failed[0]))}."
    next_step = "undo what made it so, or write the new baseline if it is meant"
    return Verdict(answer=answer, sure=_false_alarm_words(result), then=next_step, good=False)


def _false_alarm_words(result: GateResult) -> str:
    """Return the words on how often noise alone fails such a gate; "" if no check was tested for noise."""
    noise_tests = [check.noise for check in result.checks if check.noise is not None]
    return f"noise raises a false alarm in at most {result.level:.0%} of gates" if noise_tests and result.level else ""


def _balance_verdict(result: BalanceResult) -> Verdict | None:
    """Return the verdict on balancing: the time that the best predictor saves over equal batches; None without predictors."""
    if not result.predictors:
        return None
    name, best = min(result.predictors.items(), key=lambda item: item[1].iteration_time_ratio)
    saved = 1 - best.iteration_time_ratio
    oracle_saving = 1 - result.oracle.iteration_time_ratio
    is_faster = saved > 0
    answer = f"Batches sized by {name}: {saved:.1%} less time per iteration than equal ones (simulated)."
    if not is_faster:
        answer = (
            f"Leave the batches equal: sized by {name} an iteration takes {-saved:.1%} longer, for these speeds cannot be "
            "foretold well enough (simulated)."
        )
    return Verdict(
        answer=answer,
        sure=f"knowing the speeds would save {oracle_saving:.1%}; mean of {result.iterations - result.warm_up:,} iterations",
        then="balance(model, ...) in the script does it while it trains" if is_faster else "leave the batches equal",
        good=is_faster,
    )


def _barrier_verdict(result: BarrierResult) -> Verdict:
    """Return the verdict on barriers: when to synchronise; and how long a worker then waits, at the best one and under BSP."""
    best = min(result.objectives.values(), key=lambda record: record.waiting_time_s)
    best_wait, bsp_wait = show_seconds(best.waiting_time_s), show_seconds(result.bsp.waiting_time_s)
    return Verdict(
        answer=_barrier_sentence(result),
        sure=f"the longest waiting of a worker is {best_wait} at the best barrier, {bsp_wait} under BSP",
        then="Server(policy=ElasticBSP(...)) sets such barriers; see the trade-off for a bound on the gap",
        good=best.waiting_time_s < result.bsp.waiting_time_s,
    )


def _network_verdict(result: NetworkResult) -> Verdict:
    """Return the verdict on a network: bandwidth and latency of its slowest pair."""
    answer = f"{show_bytes(result.bandwidth_bytes_per_s)}/s, {show_seconds(result.latency_s)} between the slowest pair."
    return Verdict(answer=answer, sure=f"the line misses by {result.residual:.1%}", then="give both to trace and plan")
