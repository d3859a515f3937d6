"""``ddltool calibrate ROWS...``: a device's own constants from measured rows, for better predictions of other models."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from ddltool.analyzers.costs.fitting import Measured, Updated, update
from ddltool.analyzers.costs.predict import WorkCurve
from ddltool.analyzers.loading.fabrics import bus_bandwidth, is_nccl_log
from ddltool.analyzers.loading.imported_rows import import_files, measured_rows
from ddltool.analyzers.loading.sources import work_of
from ddltool.analyzers.tracing.dialect import Numerics
from ddltool.artifacts import ending, read_text, save
from ddltool.commands.options import DEVICES, OPTIMIZER, Precision, within
from ddltool.commands.output import note, print_json, progress, say
from ddltool.device import MEASURED, Device, DeviceTable
from ddltool.errors import InputError
from ddltool.fixtures.loading import calibration, known_devices
from ddltool.job import is_code
from ddltool.units import show_seconds

_TABLES = (".csv", ".json", ".jsonl", ".ndjson")


def calibrate(
    rows: list[Path],
    device: Annotated[str, DEVICES],
    model: str | None = None,
    batch_size: Annotated[int | None, within(1)] = None,
    precision: Precision = "fp32",
    channels_last: bool = False,
    optimizer: Annotated[str | None, OPTIMIZER] = None,
    sequence_length: Annotated[int | None, within(1)] = None,
    devices_file: Path | None = None,
    allow_code: bool = False,
    output: Path | None = None,
    as_json: bool = False,
) -> None:
    """Fit one device's constants to your own measurements, the shipped ones as prior; `--devices-file` reads the result."""
    known = known_devices(devices_file)
    found = known.gpu(device)
    others = [path for path in rows if ending(path) not in _TABLES]
    logs = {path: text for path in others if is_nccl_log(text := read_text(path))}
    tables = [path for path in rows if path not in logs]
    if logs:
        rate, name = max((bus_bandwidth(text, str(path)), path.name) for path, text in logs.items())
        found = found.model_copy(update={"link_bytes_per_s": rate, "link": f"{MEASURED} by {name}, {found.link}"})
    updated: Updated | None = None
    if tables:
        numerics = Numerics(precision, channels_last)  # type: ignore[arg-type]  # Numerics checks it
        measured = _measured(tables, found, known, batch_size, model=model, precision=precision, optimizer=optimizer)

        @cache
        def curve_of(name: str) -> WorkCurve:
            if is_code(name) and name != model and not allow_code:
                problem = f"names code, {name!r}, which would be imported and run"
                raise InputError(f"{tables[0]}:model", problem, "give --allow-code where you trust it")
            with progress(f"tracing {name}"):
                return work_of(name, numerics, sequence_length)

        source = ", ".join(path.name for path in tables)
        updated = update(
            measured, lambda name, size: curve_of(name).traced.at(size), found, calibration(), source=source
        )
        found = updated.device
    if output is not None:
        save(DeviceTable(devices=[found]), output)
    if as_json:
        document = {"kind": "ddltool.devices", "schema_version": 1, "devices": [found.model_dump()]}
        print_json({**document, **_errors(updated)})
    else:
        _show(found, updated, output)


def _measured(
    tables: list[Path], device: Device, known: DeviceTable, batch_size: int | None, **given: Any
) -> list[Measured]:
    """Return the rows of all files that were measured on the device; see ``measured_rows`` for what is ``given``."""
    traces = [path for path in tables if ending(path) == ".json"]
    if traces and batch_size is None:
        raise InputError(str(traces[0]), "does not say the batch size", "give it with --batch-size N")
    if batch_size is not None and not traces:
        raise InputError("--batch-size", f"has no part in {tables[0]}", "it is for a profiler trace")
    found: list[Measured] = []
    for path in tables:
        frame, _ = import_files([path], batch_size=batch_size if path in traces else None, unnamed=device.name)
        rows = measured_rows(frame, str(path), device, known, **given)
        if len(rows) < len(frame):
            kept = f"{len(rows)} of {len(frame)} rows are"
            note(f"note: {path}: {kept} of one replica and one pass on {device.name}; the others are left out")
        found += rows
    return found


def _errors(updated: Updated | None) -> dict[str, Any]:
    """Return how far off the rows' predictions were, before and after."""
    if updated is None:
        return {}
    errors = {name: np.abs(ratios - 1) for name, ratios in (("before", updated.before), ("after", updated.after))}
    return {"rows": len(updated.before), "median_error": {name: float(np.median(e)) for name, e in errors.items()}}


def _show(device: Device, updated: Updated | None, output: Path | None) -> None:
    fitted = device.fitted
    if updated is not None and fitted is not None:
        errors = _errors(updated)
        before, after = errors["median_error"]["before"], errors["median_error"]["after"]
        say(
            f"{device.name}: median error of {errors['rows']} steps {before:.1%} before, {after:.1%} after; of other models "
            f"80 % are expected at measured / predicted between {fitted.residuals.low:.2f} and {fitted.residuals.high:.2f}."
        )
        say(
            f"factors on matrix units {fitted.units['tensor']:.2f}, float32 units {fitted.units['vector']:.2f}, memory "
            f"{fitted.units['memory']:.2f}; the host issues an op in {show_seconds(fitted.issue_s)}"
        )
    if device.link.startswith(MEASURED):
        say(f"{device.name}: link {device.link_bytes_per_s / 1e9:.4g} GB/s one way, {device.link}")
    if output is not None:
        say(f"wrote {output}; use it as --devices-file {output}")
