"""``ddltool calibrate ROWS...``: a device's own constants from measured rows, for better predictions of other models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from ddltool.commands.options import ChannelsLast, DevicesFile, Json, Output, Precision

if TYPE_CHECKING:
    import pandas as pd

    from ddltool.analyzers.costs.updating import Updated
    from ddltool.analyzers.costs.work import WorkCurve
    from ddltool.graph import Graph

# An all-reduce of less than this is bound by latency, not by the link.
_LARGE_BYTES = 64 * 2**20


def calibrate(
    rows: Annotated[
        list[Path],
        typer.Argument(metavar="ROWS...", help="profile.csv, telemetry.jsonl, profiler trace, or an nccl-tests log."),
    ],
    device: Annotated[str, typer.Option(metavar="NAME", help="The device that was measured.")],
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="SOURCE", help="What was trained, for rows that do not say.", show_default=False),
    ] = None,
    batch_size: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Local batch size of a profiler trace.", min=1, show_default=False),
    ] = None,
    precision: Precision = "fp32",
    channels_last: ChannelsLast = False,
    optimizer: Annotated[str, typer.Option(help="none, sgd, momentum, adam or adamw.")] = "adam",
    devices_file: DevicesFile = None,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Fit one device's constants to your own measurements, the shipped ones as prior; `--devices-file` reads the result."""
    from ddltool.analyzers.costs.step import OPTIMIZERS
    from ddltool.artifacts import check_writable, save
    from ddltool.commands.output import print_json
    from ddltool.device import DeviceTable
    from ddltool.errors import InputError, did_you_mean
    from ddltool.fixtures.loading import known_devices

    if output is not None:
        check_writable(output)
    if optimizer not in OPTIMIZERS:
        raise InputError("--optimizer", f"unknown {optimizer!r}", did_you_mean(optimizer, OPTIMIZERS))
    found = known_devices(devices_file).device(device)
    logs = [path for path in rows if _is_nccl_log(path)]
    tables = [path for path in rows if path not in logs]
    if logs:
        rate = max(_link_bytes_per_s(path) for path in logs)
        found = found.model_copy(update={"link_bytes_per_s": rate, "link": f"measured by {logs[0].name}"})
    updated: Updated | None = None
    if tables:
        updated = _fitted(tables, found, model, batch_size, precision, channels_last, optimizer)
        found = updated.device
    if output is not None:
        save(DeviceTable(devices=[found]), output)
    if as_json:
        print_json(
            {"kind": "ddltool.devices", "schema_version": 1, "devices": [found.model_dump()], **_errors(updated)}
        )
    else:
        _show(found, updated, output)


def _fitted(
    tables: list[Path],
    device: Any,
    model: str | None,
    batch_size: int | None,
    precision: str,
    channels_last: bool,
    optimizer: str,
) -> Updated:
    from ddltool.analyzers.costs.updating import update
    from ddltool.analyzers.tracing.dialect import Numerics
    from ddltool.commands.profile_import import import_files
    from ddltool.fixtures.loading import calibration

    frame, _ = import_files(tables, device=device.name, batch_size=batch_size)
    numerics = Numerics(precision, channels_last)  # type: ignore[arg-type]  # Numerics checks it
    cases = _cases(frame, model, numerics, str(tables[0]))
    source = ", ".join(path.name for path in tables)
    return update(cases, device, calibration(), optimizer=optimizer, source=source)


def _cases(frame: pd.DataFrame, model: str | None, numerics: Any, where: str) -> list[tuple[Graph, float]]:
    """Return (graph, measured seconds) of every row of one replica and one pass. Raises InputError when it lacks a model."""
    from ddltool.analyzers.loading.sources import work_of
    from ddltool.commands.output import progress
    from ddltool.errors import InputError

    single = frame[frame["num_replicas"] == 1]
    if "accumulation_steps" in single.columns:
        single = single[single["accumulation_steps"].fillna(0) == 0]
    curves: dict[str, WorkCurve] = {}
    made: list[tuple[Graph, float]] = []
    for row in single.to_dict("records"):
        said = row.get("source")
        source = model or (said if isinstance(said, str) and said else None)
        if source is None:
            raise InputError(where, "does not say which model was trained", "name it: --model SOURCE")
        if source not in curves:
            with progress(f"tracing {source}"):
                curves[source] = work_of(source, numerics, None)
        made.append((curves[source].traced.at(int(row["local_batch_size"])), float(row["step_time_s"])))
    return made


def _is_nccl_log(path: Path) -> bool:
    """Return whether a file is what nccl-tests print: a header that names the bus bandwidth."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return "busbw" in file.read(65536)
    except OSError:
        return False  # told by whoever reads it


def _link_bytes_per_s(path: Path) -> float:
    """Return the median out-of-place bus bandwidth of the large messages of an nccl-tests log, in bytes per second.

    Bus bandwidth is what each device sends over its link. Raises InputError for a log without large messages.
    """
    from statistics import median

    from ddltool.artifacts import read_text
    from ddltool.errors import InputError

    found = []
    for line in read_text(path).splitlines():
        words = line.split()
        if len(words) < 8 or not words[0].isdecimal() or not words[1].isdecimal():
            continue
        try:  # size count type redop root | time algbw busbw: older versions have no root
            time, algorithm, bus = next(
                figures for at in (5, 4) if (figures := [float(word) for word in words[at : at + 3]])[0] > 0
            )
        except (ValueError, StopIteration):
            continue
        if int(words[0]) >= _LARGE_BYTES and algorithm > 0 and time > 0:
            found.append(bus * 1e9)
    if not found:
        raise InputError(
            str(path), "has no row of 64 MiB or more", "run nccl-tests up to 1G: all_reduce_perf -b 8 -e 1G"
        )
    return median(found)


def _errors(updated: Updated | None) -> dict[str, Any]:
    """Return how far off the rows' predictions were, before and after."""
    import numpy as np

    if updated is None:
        return {}
    errors = {name: np.abs(ratios - 1) for name, ratios in (("before", updated.before), ("after", updated.after))}
    return {"rows": len(updated.before), "median_error": {name: float(np.median(e)) for name, e in errors.items()}}


def _show(device: Any, updated: Updated | None, output: Path | None) -> None:
    from ddltool.commands.output import out
    from ddltool.units import show_seconds

    console = out()
    if updated is not None:
        errors = _errors(updated)
        before, after = errors["median_error"]["before"], errors["median_error"]["after"]
        console.print(
            f"{device.name}: median error of {errors['rows']} rows {before:.1%} before, {after:.1%} after.",
            soft_wrap=True,
        )
        fitted = device.fitted
        console.print(
            f"factors on matrix units {fitted.units['tensor']:.2f}, float32 units {fitted.units['vector']:.2f}, memory "
            f"{fitted.units['memory']:.2f}; the host issues an op in {show_seconds(fitted.issue_s)}",
            soft_wrap=True,
        )
    if device.link.startswith("measured"):
        console.print(
            f"{device.name}: link {device.link_bytes_per_s / 1e9:.4g} GB/s one way, {device.link}", soft_wrap=True
        )
    if output is not None:
        console.print(f"wrote {output}; use it as --devices-file {output}", soft_wrap=True)
