"""Sections of many replays: a sweep, two policies in pairs, a search's trials, a rented cluster; and advice on a resize."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddltool.analyzers.reporting.figures import Bars
from ddltool.analyzers.reporting.section import Picture, Section, Table, counted, filled, shortened
from ddltool.simulation_results import (
    AdviceResult,
    AutoscalingResult,
    PolicyComparison,
    SearchResult,
    SweepCell,
    SweepDocument,
    SweepFigures,
)

_BARS_DRAWN = 24
# Ratios that differ more than this are drawn on a logarithmic axis.
_LOG_FROM = 10.0
# A bar beyond, or below one over this, leaves nothing of the others.
_MOST_DRAWN = 1e12
# A comparison's measures in the words of ``ddltool simulate --compare``.
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
    blocks: list[Picture | Table] = []
    if groups:
        blocks.append(_drawn(groups, several=len(workloads) > 1))
    if found.comparison is not None:
        blocks.append(_compared(found.comparison))
    if failed:
        blocks.append(_failures(failed))
    return Section(title=f"Sweep: {name}", lead=[lead], blocks=blocks)


def _drawn(groups: Sequence[tuple[str, str, int, SweepFigures]], *, several: bool) -> Picture:
    """Return the mean completion times as bars over the table of all means."""
    rows = [
        (
            shortened(workload, 30),
            policy,
            str(count),
            *(f"{value:,.0f}" if value < 1e12 else f"{value:.3g}" for value in _times(mean)),
            f"{mean.utilization:.0%}" if mean.utilization < 1e4 else f"{mean.utilization:.3g}",
            f"{mean.worst_fairness:.2f}" if mean.worst_fairness < 1e12 else f"{mean.worst_fairness:.3g}",
            f"{mean.restarts:,.1f}" if mean.restarts < 1e12 else f"{mean.restarts:.3g}",
            "-" if mean.cost is None else f"{mean.cost:.4g}",
        )
        for workload, policy, count, mean in groups
    ]
    header = (
        "workload",
        "policy",
        "seeds",
        "mean JCT",
        "median",
        "p99",
        "makespan",
        "used",
        "worst",
        "restarts",
        "cost",
    )
    caption = "Means over the seeds, times in s; used: share of GPU time; worst: largest finish-time fairness"
    spare = ("median", "used", "seeds")
    table = Table(caption=caption, header=header, rows=rows, label="simulated", text_columns=2, spare=spare)
    bars = [
        (f"{shortened(policy, 30)}, {shortened(workload, 30)}" if several else policy, mean.avg_jct_s)
        for workload, policy, _, mean in groups[:_BARS_DRAWN]
    ]
    left = f" The first {_BARS_DRAWN} are drawn." if len(groups) > _BARS_DRAWN else ""
    figure = Bars(rows=bars, xlabel="mean JCT", title="Mean job completion time", seconds=True)
    caption = f"Mean job completion time over the seeds: the shorter, the better.{left}"
    return Picture(figures=[figure], caption=caption, label="simulated", table=filled(table))


def _times(mean: SweepFigures) -> tuple[float, float, float, float]:
    return mean.avg_jct_s, mean.median_jct_s, mean.p99_jct_s, mean.makespan_s


def _failures(failed: Sequence[SweepCell]) -> Table:
    rows = [(cell.workload, cell.policy, str(cell.seed), cell.error or "no figures") for cell in failed]
    header = ("workload", "policy", "seed", "why")
    return Table(caption="Replays that failed", header=header, rows=rows, label="read", text_columns=2)


def _compared(found: PolicyComparison) -> Picture | Table:
    """Return two policies compared: the first's figures over the second's, with their intervals."""
    first, second = shortened(found.first, 60), shortened(found.second, 60)
    rows, bars = [], []
    intervals: list[tuple[float, float] | None] = []
    for one in found.comparisons:
        measure = _MEASURES.get(one.measure, one.measure)
        known = one.low is not None and one.high is not None
        interval = f"{_change(one.low)} to {_change(one.high)}" if known else "unknown"
        verdict = (
            "unknown" if not known else "not decided" if not one.decided else "lower" if one.ratio < 1 else "higher"
        )
        rows.append((measure, _change(one.ratio), interval, f"{one.better} of {one.units}", verdict))
        if 1 / _MOST_DRAWN < one.ratio < _MOST_DRAWN:
            bars.append((measure, one.ratio))
            intervals.append((one.low, one.high) if one.low and one.high and one.high < _MOST_DRAWN else None)
    table = Table(
        caption=f"Change from {second} to {first}, with the {found.confidence:.0%} interval of Student's t on log ratios",
        header=("", "change", "interval", "lower on", "verdict"),
        rows=rows,
        label="simulated",
    )
    if not bars:
        return table
    ratios = [ratio for _, ratio in bars]
    figure = Bars(
        rows=bars,
        xlabel=f"{first} over {second}",
        title=f"{first} against {second}",
        level=("equal", 1.0),
        intervals=intervals,
        log=max(*ratios, 1.0) > _LOG_FROM * min(*ratios, 1.0),
    )
    caption = f"Geometric means of the ratios, paired by {shortened(found.unit, 30)}: below 1 {first} is better."
    return Picture(figures=[figure], caption=caption, label="simulated", table=table)


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
    base = found.rules["throughput"]
    rows = [
        (
            name,
            f"{one.seconds / 3600:.2f}",
            _against(one.seconds, base.seconds),
            f"{one.cost:,.1f}",
            _against(one.cost, base.cost),
            f"{one.efficiency:.2f}",
            f"{one.first_nodes}-{one.last_nodes}",
            str(one.restarts),
        )
        for name, one in found.rules.items()
    ]
    if found.application == "imagenet":
        seconds, cost = (f"{PUBLISHED_SCALING[key]:+.0%}" for key in ("seconds", "cost"))
        rows.append(("published", "", seconds, "", cost, "", "", ""))
    caption = "Changes against the throughput scaler; effic.: statistical efficiency"
    header = ("rule", "hours", "change", "cost", "change", "effic.", "nodes", "restarts")
    table = Table(caption=caption, header=header, rows=rows, label="simulated")
    goodput = found.rules["goodput"]
    lead = (
        f"Scaling {found.application} by goodput costs {goodput.cost / base.cost - 1:+.0%} and takes "
        f"{goodput.seconds / base.seconds - 1:+.0%} against scaling by throughput, on up to {found.most_nodes} nodes."
    )
    return Section(title=f"Autoscaling: {found.application}", lead=[lead], blocks=[table])


def search_section(found: SearchResult) -> Section:
    """Return the section of a search's trials: one row per policy, and what was published."""
    base = next(iter(found.policies.values()))
    rows = [
        (
            name,
            f"{one.avg_jct_s / 60:.1f}",
            _against(one.avg_jct_s, base.avg_jct_s),
            f"{one.makespan_s / 3600:.2f}",
            _against(one.makespan_s, base.makespan_s),
            f"{one.gpu_seconds / 3600:,.0f}",
            str(one.restarts),
        )
        for name, one in found.policies.items()
    ]
    if found.search.application == "cifar10":
        first = PUBLISHED_SEARCH["baseline"]
        for name, (jct_s, span_s) in PUBLISHED_SEARCH.items():
            changes = _against(jct_s, first[0]), _against(span_s, first[1])
            row = (f"published {name}", f"{jct_s / 60:.0f}", changes[0], f"{span_s / 3600:.0f}", changes[1], "", "")
            rows.append(row)
    caption = (
        f"Changes against a fixed {found.search.local_batch_size} samples on each GPU; span: from the first trial to the "
        "end of the last"
    )
    header = ("", "JCT, min", "change", "span, h", "change", "GPU h", "restarts")
    trials = f"{found.search.trials} trials of {found.search.application}, {found.search.concurrent} at a time"
    lead = f"{trials} on {counted(found.gpus, 'GPU')}; the trials are synthetic."
    table = Table(caption=caption, header=header, rows=rows, label="simulated")
    return Section(title=f"Search: {found.search.application}", lead=[lead], blocks=[table])


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
    rows = [
        (
            f"{one.replicas} on {one.nodes}",
            str(one.batch_size),
            f"{one.gain:.2f}",
            "never" if one.break_even_s is None else _cell(one.break_even_s),
            *(_cell(value) for value in (one.expected_saved_s, one.saved_p10_s, one.saved_p90_s)),
            f"{one.probability:.0%}",
            f"{round(one.extra_gpu_seconds / 3600, 1) + 0.0:+.1f}",
        )
        for one in sorted(found.options, key=lambda one: -one.expected_saved_s)[:_MOST_OPTIONS_SHOWN]
    ]
    caption = (
        "gain: goodput over that of now; pays from: with so much left; saves: the mean, and what 10 and 90 % of cases stay "
        "below; sure: probability of saving time; GPU h: held more than without the resize"
    )
    header = ("GPUs", "batch", "gain", "pays from", "saves", "10 %", "90 %", "sure", "GPU h")
    table = Table(caption=caption, header=header, rows=rows, label="predicted")
    return Section(title=f"Advice: {found.job}", lead=lead, blocks=[table] if rows else [])


def _span(seconds: float) -> str:
    """Return a time as people say it."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if abs(seconds) >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _cell(seconds: float) -> str:
    """Return a time as short as a column needs it."""
    return _span(seconds).replace(" min", "m").replace(" ", "")
