"""What sweeps show: one row per policy and workload, and the paired comparison of two policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def show_sweep(document: Mapping[str, Any]) -> None:
    """Print one row per policy and workload: means over the seeds."""
    import numpy as np

    from ddltool.commands.output import out, table

    groups: dict[tuple[str, str], list[Mapping[str, float]]] = {}
    for record in document["cells"]:
        if record["figures"] is not None:
            groups.setdefault((record["workload"], record["policy"]), []).append(record["figures"])
    shown = ("avg_jct_s", "p99_jct_s", "makespan_s", "worst_fairness", "restarts")
    lines = []
    for (workload, policy), found in groups.items():
        means = {name: float(np.mean([values[name] for values in found])) for name in shown}
        lines.append(
            [
                workload,
                policy,
                str(len(found)),
                *(f"{means[name]:,.0f}" for name in shown[:3]),
                f"{means['worst_fairness']:.2f}",
                f"{means['restarts']:,.0f}",
            ]
        )
    columns = ("workload", "policy", "seeds", "avg JCT", "p99", "makespan", "worst", "moves")
    caption = f"{document['cells_failed']} replays failed" if document["cells_failed"] else None
    title = "means over the seeds, seconds (simulated)"
    out().print(table(title, columns, lines, caption=caption, text_columns=2))


def compare_document(document: Mapping[str, Any], pair: str, *, confidence: float = 0.95) -> dict[str, Any]:
    """Return the paired comparison of ``pair`` ("ours,pollux") over a sweep's cells, as one document."""
    from dataclasses import asdict

    from ddltool.analyzers.scheduling.paired import compare
    from ddltool.analyzers.scheduling.sweep import replays
    from ddltool.errors import InputError

    names = [name.strip() for name in pair.split(",")]
    if len(names) != 2 or not all(names):
        raise InputError("--compare", f"is {pair!r}", "two policies, such as ours,pollux")
    result = compare(replays(document["cells"]), names[0], names[1], confidence=confidence)
    made = asdict(result)
    for row, comparison in zip(made["comparisons"], result.comparisons, strict=True):
        row["decided"] = comparison.decided
    made["comparisons"] = list(made["comparisons"])
    return {"kind": "ddltool.comparison", "schema_version": 1, **made}


def show_comparison(comparison: Mapping[str, Any]) -> None:
    """Print one row per measure."""
    from ddltool.analyzers.scheduling.paired import MEASURES
    from ddltool.commands.output import out, table

    lines = []
    for row in comparison["comparisons"]:
        change = f"{row['ratio'] - 1:+.1%}"
        known = row["low"] is not None
        interval = f"{row['low'] - 1:+.1%} to {row['high'] - 1:+.1%}" if known else "unknown"
        verdict = (
            "" if not known else "not decided" if not row["decided"] else "lower" if row["ratio"] < 1 else "higher"
        )
        lines.append([MEASURES[row["measure"]], change, interval, f"{row['better']} of {row['units']}", verdict])
    unit = comparison["unit"]
    title = f"{comparison['first']} against {comparison['second']}"
    caption = f"{comparison['confidence']:.0%} interval of Student's t on log ratios, paired by {unit}"
    out().print(table(title, ("", "change", "interval", "lower on", "verdict"), lines, caption=caption))
