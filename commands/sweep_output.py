"""What sweeps show: one row per policy and workload, and the paired comparison of two policies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_WIDTH = 80
_NARROWEST = 8


def show_sweep(document: Mapping[str, Any]) -> None:
    """Print one row per policy below each workload: means over the seeds; within 80 columns."""
    import numpy as np

    from ddltool.commands.output import out, table
    from ddltool.commands.simulation_tables import price_text

    groups: dict[str, dict[str, list[Mapping[str, float]]]] = {}
    for record in document["cells"]:
        if record["figures"] is not None:
            policies = groups.setdefault(record["workload"], {})
            policies.setdefault(record["policy"], []).append(record["figures"])
    found = [values for policies in groups.values() for values in policies.values()]
    priced = bool(found) and all("cost" in one for values in found for one in values)
    columns = ("", "avg JCT", "p99", "makespan", "worst", "moves", *(["cost"] if priced else []))

    def row(policy: str, values: list[Mapping[str, float]]) -> list[str]:
        def mean(name: str) -> float:
            return float(np.mean([one[name] for one in values]))

        times = [f"{mean(name):,.0f}" for name in ("avg_jct_s", "p99_jct_s", "makespan_s")]
        others = [f"{mean('worst_fairness'):.2f}", f"{mean('restarts'):,.0f}"]
        return [f"- {policy}", *times, *others, *([price_text(mean("cost"))] if priced else [])]

    made = {name: [row(policy, values) for policy, values in each.items()] for name, each in groups.items()}
    texts = [columns, *(line for rows in made.values() for line in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    room = max(_WIDTH - 1 - 3 * len(columns) - sum(widths[1:]), widths[0], _NARROWEST)
    lines = [line for name, rows in made.items() for line in ([_short(name, room), *[""] * len(columns[1:])], *rows)]
    counts = sorted({len(values) for values in found}) or [0]
    seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    caption = "worst: largest finish-time fairness; moves: restarts"
    if document["cells_failed"]:
        count = document["cells_failed"]
        caption += f"; {count} replay{'s' if count > 1 else ''} failed"
    title = f"means over {seeds} seed{'' if seeds == '1' else 's'}, seconds (simulated)"
    out().print(table(title, columns, lines, caption=caption))


def _short(name: str, most: int) -> str:
    """Return a name of at most ``most`` characters, the middle left out: ends tell names of one family apart."""
    if len(name) <= most:
        return name
    end = (most - 3) * 2 // 3
    return f"{name[: most - 3 - end]}...{name[len(name) - end :]}"


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
    from ddltool.analyzers.scheduling.paired import MEASURES, PRICED
    from ddltool.commands.output import out, table

    names = {**MEASURES, **PRICED}

    lines = []
    for row in comparison["comparisons"]:
        change = f"{row['ratio'] - 1:+.1%}"
        known = row["low"] is not None
        interval = f"{row['low'] - 1:+.1%} to {row['high'] - 1:+.1%}" if known else "unknown"
        verdict = (
            "" if not known else "not decided" if not row["decided"] else "lower" if row["ratio"] < 1 else "higher"
        )
        lines.append([names[row["measure"]], change, interval, f"{row['better']} of {row['units']}", verdict])
    unit = comparison["unit"]
    title = f"{comparison['first']} against {comparison['second']}"
    caption = f"{comparison['confidence']:.0%} interval of Student's t on log ratios, paired by {unit}"
    if any(row["low"] is None for row in comparison["comparisons"]):
        caption += "; unknown: one pair only, or pairs that are all the same"
    out().print()
    out().print(table(title, ("", "change", "interval", "lower on", "verdict"), lines, caption=caption))
