"""Sections of many replays: a sweep, two policies in pairs, a search's trials, a rented cluster; and advice on a resize."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ddltool.analyzers.reporting.figures import Bars
from ddltool.analyzers.reporting.section import Blocks, Column, Picture, Section, Table, filled, pictured, some, tabled
from ddltool.errors import shortened
from ddltool.simulation_results import (
    AdviceResult,
    AutoscalingResult,
    ComparedMeasure,
    PolicyComparison,
    ResizeOption,
    SearchResult,
    SweepDocument,
    SweepFigures,
)
from ddltool.units import counted

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
