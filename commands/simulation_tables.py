"""The tables of ``ddltool simulate``: completion times; waits, losses and cost; figures by size class."""

from __future__ import annotations

from typing import Any


def show(document: dict[str, Any], *, more: bool = False, classes: bool = False) -> None:
    """Print one row per policy; ``more``: waits, losses and cost too; ``classes``: the size classes too."""
    _show_times(document)
    if more:
        _show_more(document)
    if classes:
        _show_classes(document)


def price_text(price: float) -> str:
    """Return a price for people: cents matter in small ones only."""
    return f"{price:,.2f}" if price < 100_000 else f"{price:,.0f}"


def _show_times(document: dict[str, Any]) -> None:
    """Print one row per policy."""
    from ddltool.commands.output import out, table

    rows = [
        [
            name,
            f"{record['avg_jct_s']:,.0f}",
            f"{record['p99_jct_s']:,.0f}",
            f"{record['makespan_s']:,.0f}",
            f"{record['utilization']:.0%}",
            f"{record['finish_time_fairness']['max']:.2f}",
            f"{record['finish_time_fairness']['share_below_1']:.0%}",
            str(record["restarts"]),
        ]
        for name, record in document["policies"].items()
    ]
    columns = ("", "avg JCT", "p99", "makespan", "used", "worst", "fair", "moves")
    title = f"{document['jobs']} jobs on {document['gpus']} GPUs, seconds (simulated from {document['truth']})"
    caption = (
        "JCT: completion time of a job; used: share of the GPU time held; worst: largest finish-time fairness; "
        "fair: share of jobs where it is below 1; moves: restarts"
    )
    out().print(table(title, columns, rows, caption=caption))


def _show_more(document: dict[str, Any]) -> None:
    """Print one row per policy: waits, what GPU time was good for, failures, cost; within 80 columns."""
    from ddltool.commands.output import out, table

    priced = any("cost" in record for record in document["policies"].values())
    columns = ["", "median", "wait", "p99 wait", "useful", "hit", "lost h", *(["cost"] if priced else [])]
    rows = []
    for name, record in document["policies"].items():
        row = [
            name,
            f"{record['median_jct_s']:,.0f}",
            f"{record['avg_queueing_s']:,.0f}",
            f"{record['p99_queueing_s']:,.0f}",
            f"{record['useful_share']:.0%}",
            str(record["job_failures"]),
            f"{record['lost_gpu_hours']:,.1f}",
        ]
        rows.append([*row, price_text(record["cost"]["jobs"])] if priced else row)
    caption = (
        "median: of the completion times; wait: from submission to first start; useful: share of the GPU time that was "
        "up in which training was done that lasted; hit: jobs that lost a node, counted each time; lost h: GPU-hours of "
        "training undone" + ("; cost: of the GPU time held" if priced else "")
    )
    out().print()
    out().print(table("Waits, use and losses; seconds", columns, rows, caption=caption))


def _show_classes(document: dict[str, Any]) -> None:
    """Print the figures of each size class under each policy; within 80 columns."""
    from ddltool.commands.output import out, table

    rows = []
    for policy, record in document["policies"].items():
        rows.append([policy, *[""] * 7])
        rows += [
            [
                f"- {name}",
                str(figures["jobs"]),
                f"{figures['avg_jct_s']:,.0f}",
                f"{figures['median_jct_s']:,.0f}",
                f"{figures['p99_jct_s']:,.0f}",
                f"{figures['avg_queueing_s']:,.0f}",
                f"{figures['worst_fairness']:.2f}",
                f"{figures['gpu_hours']:,.0f}",
            ]
            for name, figures in record["by_class"].items()
        ]
    columns = ("", "jobs", "avg JCT", "median", "p99", "wait", "worst", "GPU-h")
    caption = "classes by GPU time: small up to 1 GPU-hour, medium 10, large 100, xlarge above (Pollux, 5.1)"
    out().print()
    out().print(table("By size class, seconds", columns, rows, caption=caption))
