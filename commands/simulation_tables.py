"""What ``ddltool simulate`` tells beyond completion times: records and tables of waits, goodput, failures, cost, classes."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddltool.analyzers.scheduling.failures import Failures
    from ddltool.analyzers.scheduling.metrics import Summary


def describe_more(summary: Summary) -> dict[str, Any]:
    """Return the further keys of one policy's record; costs only where prices are given."""
    made: dict[str, Any] = {
        "p99_queueing_s": summary.p99_queueing_s,
        "gpu_hours": summary.gpu_hours,
        "restart_gpu_hours": summary.restart_gpu_hours,
        "lost_gpu_hours": summary.lost_gpu_hours,
        "useful_share": summary.useful_share,
        "availability": summary.availability,
        "node_failures": summary.node_failures,
        "job_failures": summary.job_failures,
        "goodput_by_application": dict(summary.goodput),
        "by_class": {name: asdict(figures) for name, figures in summary.by_class.items()},
    }
    if summary.cost is not None:
        made["cost"] = {"jobs": summary.cost, "cluster": summary.cluster_cost}
    return made


def describe_failures(failures: Failures) -> dict[str, Any]:
    """Return what was to go wrong."""
    return {
        "mtbf_s": failures.mtbf_s,
        "repair_s": failures.repair_s,
        "checkpoint_interval_s": failures.checkpoint_interval_s,
        "events": len(failures.events),
        "seed": failures.seed,
    }


def show_more(document: dict[str, Any]) -> None:
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
        rows.append([*row, f"{record['cost']['jobs']:,.2f}"] if priced else row)
    caption = (
        "median: JCT; wait: from submission to start; useful: share of the GPU time that was up in which training was done "
        "that lasted; hit: losses of a node by jobs; lost h: GPU-hours undone"
        + ("; cost: of held GPUs" if priced else "")
    )
    out().print(table("Waits, use and losses; seconds", columns, rows, caption=caption))


def show_classes(document: dict[str, Any]) -> None:
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
    out().print(table("By size class, seconds", columns, rows, caption=caption))
