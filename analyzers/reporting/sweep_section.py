"""The report's sections of many replays: means by workload and policy, and two policies compared in pairs."""

from __future__ import annotations

from collections.abc import Sequence

from ddltool.analyzers.reporting.charts import draw_bars
from ddltool.analyzers.reporting.section import Picture, Section, Table, counted, filled, shortened
from ddltool.results import PolicyComparison, SweepCell, SweepDocument, SweepFigures

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
            workload,
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
    table = Table(caption=caption, header=header, rows=rows, label="simulated", text_columns=2)
    bars = [
        (f"{shortened(policy, 30)}, {shortened(workload, 30)}" if several else policy, mean.avg_jct_s)
        for workload, policy, _, mean in groups[:_BARS_DRAWN]
    ]
    left = f" The first {_BARS_DRAWN} are drawn." if len(groups) > _BARS_DRAWN else ""
    draw = draw_bars(bars, xlabel="mean JCT", title="Mean job completion time", seconds=True)
    caption = f"Mean job completion time over the seeds: the shorter, the better.{left}"
    return Picture(draw=draw, caption=caption, label="simulated", table=filled(table))


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
    table = Table(
        caption=f"Change from {second} to {first}, with the {found.confidence:.0%} interval of Student's t on log ratios",
        header=("", "change", "interval", "lower on", "verdict"),
        rows=rows,
        label="simulated",
    )
    if not bars:
        return table
    ratios = [ratio for _, ratio in bars]
    draw = draw_bars(
        bars,
        xlabel=f"{first} over {second}",
        title=f"{first} against {second}",
        level=("equal", 1.0),
        from_level=max(*ratios, 1.0) > _LOG_FROM * min(*ratios, 1.0),
    )
    caption = f"Geometric means of the ratios, paired by {shortened(found.unit, 30)}: below 1 {first} is better."
    return Picture(draw=draw, caption=caption, label="simulated", table=table)


def _change(ratio: float | None) -> str:
    """Return a ratio as a change in percent, a large one as a factor."""
    if ratio is None:
        return "-"
    return f"{ratio - 1:+.1%}" if ratio < 100 else f"x{ratio:.3g}"
