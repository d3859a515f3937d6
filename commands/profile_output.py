"""What ``ddltool profile SOURCE`` prints: a table, or one JSON document."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddltool.analyzers.goodput.curve import CurveSummary
    from ddltool.runtime.measuring.campaign import Measured, MeasureRequest
    from ddltool.runtime.measuring.memory import MemoryLimit


def shortfalls(found: Measured, request: MeasureRequest) -> list[str]:
    """Return what the budget did not suffice for, in plain sentences."""
    said = []
    width = (found.frame["step_time_high_s"] - found.frame["step_time_low_s"]) / 2 / found.frame["step_time_s"]
    wide = int((width > request.precision).sum())
    if wide and request.repeats is None:
        said.append(
            f"{wide} of {len(found.frame)} step times are known to {width.max():.0%} only, not {request.precision:.0%}; "
            "stop other load or raise --budget"
        )
    missing = sum(item.reason == "the budget was spent" for item in found.skipped)
    if missing:
        said.append(f"{missing} configurations were not measured: the budget was spent; raise --budget, or --resume")
    return said


def as_document(found: Measured, summaries: dict[str, CurveSummary], limit: MemoryLimit | None) -> dict[str, Any]:
    """Return the JSON document of a profile."""
    import json

    devices = {name: asdict(summary) for name, summary in summaries.items()}
    rows = json.loads(found.frame.to_json(orient="records", double_precision=15))
    document: dict[str, Any] = {"kind": "ddltool.profile", "schema_version": 1, "rows": rows, "devices": devices}
    document["skipped"] = [asdict(item) for item in found.skipped]
    document["measuring_seconds"] = found.spent_s
    if limit is not None:
        tries = [{"local_batch_size": batch, "peak_memory_bytes": peak} for batch, peak in limit.tried.items()]
        document["memory"] = {"budget_bytes": limit.budget_bytes, "tries": tries}
    return document


def show_profile(
    found: Measured, summaries: dict[str, CurveSummary], limit: MemoryLimit | None, output: Path | None
) -> None:
    """Print the measured rows and what they say about the device."""
    from ddltool.commands.output import out, table
    from ddltool.units import show_bytes, show_seconds

    accumulates = bool((found.frame["accumulation_steps"] > 0).any())
    rows = []
    for row in found.frame.to_dict("records"):
        width = (row["step_time_high_s"] - row["step_time_low_s"]) / 2 / row["step_time_s"]
        rows.append(
            (
                str(row["device"]),
                str(row["num_replicas"]),
                *((str(row["accumulation_steps"]),) if accumulates else ()),
                str(row["local_batch_size"]),
                show_seconds(row["step_time_s"]),
                f"{width:.1%}",
                str(int(row["repeats"])),
                show_seconds(row["sync_time_s"]),
                show_bytes(row["peak_memory_bytes"]),
            )
        )
    extra = ("accum",) if accumulates else ()
    columns = ("device", "replicas", *extra, "batch", "step", "+-", "steps", "sync", "memory")
    console = out()
    console.print(table("Step times (median, half its 95 % interval) and peak memory, measured", columns, rows))
    for item in found.skipped:
        passes = f", {item.accumulation_steps} accumulation steps" if item.accumulation_steps else ""
        guess = f": {show_seconds(item.predicted_step_time_s)}" if item.predicted_step_time_s else ""
        replicas = f"{item.num_replicas} replica{'s' if item.num_replicas > 1 else ''}"
        name = f"batch {item.local_batch_size} on {replicas}{passes}"
        console.print(f"not measured: {name}{guess} ({item.reason})")
    for name, summary in summaries.items():
        _show_summary(console, name, summary, limit)
    if output is not None:
        console.print(f"wrote {output}", soft_wrap=True)


def _show_summary(console: Any, name: str, summary: CurveSummary, limit: MemoryLimit | None) -> None:
    from ddltool.units import show_bytes, show_seconds

    overhead = show_seconds(summary.launch_overhead_s)
    console.print(f"{name}: launch overhead {overhead}, saturates at batch {summary.saturation_batch}")
    if summary.linear_from_batch is not None:
        slope = show_seconds(summary.seconds_per_sample)
        console.print(f"{name}: linear from batch {summary.linear_from_batch} on, {slope} per sample")
    if limit is not None:
        how = f"measured, {len(limit.tried)} tries within {show_bytes(limit.budget_bytes)}"
    else:
        how = "predicted by extrapolation"
    if summary.memory_limit_batch is None:
        console.print(
            f"{name}: memory limit unknown: the peaks do not grow with the batch; search it with --memory SIZE"
        )
    else:
        console.print(f"{name}: memory limit at batch {summary.memory_limit_batch} ({how})")
