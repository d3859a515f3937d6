"""``ddltool calibrate ROWS...``: a device's own constants from measured rows, for better predictions of other models."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from ddltool.analyzers.job.goodput.imported_rows import import_files, measured_rows
from ddltool.analyzers.step.communication.fabrics import bus_bandwidth, is_nccl_log
from ddltool.analyzers.step.costs.fitting import MeasuredStep, Updated, fit_device
from ddltool.analyzers.step.costs.work import WorkCurve, work_of
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.artifacts import ending, read_text, save
from ddltool.commands.options import DEVICES, OPTIMIZER, Precision, within
from ddltool.commands.output import note, print_json, progress, say
from ddltool.device import MEASURED, Device, DeviceTable
from ddltool.errors import InputError
from ddltool.job import is_code
from ddltool.shipped import calibration, known_devices
from ddltool.units import show_seconds

_TABLE_SUFFIXES = (".csv", ".json", ".jsonl", ".ndjson")


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
    """Fit one device's constants to your own measurements, the shipped ones as prior; `--devices-file` reads the result.

    ``rows``: profiles, telemetry, profiler traces, and logs of nccl-tests, which give the link's rate. ``model``,
    ``batch_size``, ``precision``, ``channels_last``, ``optimizer`` and ``sequence_length`` describe rows that do not have
    them. Raises InputError for files that cannot be read, or have no row of the device.
    """
    table = known_devices(devices_file)
    gpu = table.gpu(device)
    # A file that is no table may be a log of nccl-tests, recognised by its text.
    other_files = [path for path in rows if ending(path) not in _TABLE_SUFFIXES]
    logs = {path: text for path in other_files if is_nccl_log(text := read_text(path))}
    tables = [path for path in rows if path not in logs]
    # The link's rate is the highest one: lower ones were limited by something else.
    if logs:
        bytes_per_s, name = max((bus_bandwidth(text, str(path)), path.name) for path, text in logs.items())
        gpu = gpu.model_copy(update={"link_bytes_per_s": bytes_per_s, "link": f"{MEASURED} by {name}, {gpu.link}"})
    fit: Updated | None = None
    if tables:
        numerics = Numerics(precision, channels_last)  # type: ignore[arg-type]  # Numerics checks it
        steps = _read_steps(tables, gpu, table, batch_size, model=model, precision=precision, optimizer=optimizer)

        @cache
        def curve_of(name: str) -> WorkCurve:
            """Return the work of a model's step by batch size, traced once. Raises InputError for code without --allow-code."""
            if is_code(name) and name != model and not allow_code:
                problem = f"names code, {name!r}, which would be imported and run"
                raise InputError(f"{tables[0]}:model", problem, "give --allow-code where you trust it")
            with progress(f"tracing {name}"):
                return work_of(name, numerics, sequence_length)

        source = ", ".join(path.name for path in tables)
        fit = fit_device(steps, lambda name, size: curve_of(name).traced.at(size), gpu, calibration(), source=source)
        gpu = fit.device
    if output is not None:
        save(DeviceTable(devices=[gpu]), output)
    if as_json:
        print_json({**DeviceTable(devices=[gpu]).model_dump(), **_error_figures(fit)})
    else:
        _print_constants(gpu, fit, output)


def _read_steps(
    tables: list[Path], device: Device, known: DeviceTable, batch_size: int | None, **conditions: Any
) -> list[MeasuredStep]:
    """Return the measured steps of one replica and one pass on ``device`` in all files; a note says how many rows are others.

    Args:
        tables: the files of rows, and profiler traces.
        device: the device that is calibrated.
        known: the table by which other names of the device are recognised.
        batch_size: of profiler traces (.json), which lack it; None without traces.
        conditions: model, precision and optimizer of rows without them; see ``measured_rows``.

    Raises InputError for traces without a batch size, a batch size without traces, and unreadable files.
    """
    traces = [path for path in tables if ending(path) == ".json"]
    if traces and batch_size is None:
        raise InputError(str(traces[0]), "does not say the batch size", "give it with --batch-size N")
    if batch_size is not None and not traces:
        raise InputError("--batch-size", f"has no part in {tables[0]}", "it is for a profiler trace")
    steps: list[MeasuredStep] = []
    for path in tables:
        frame, _ = import_files([path], batch_size=batch_size if path in traces else None, unnamed=device.name)
        rows = measured_rows(frame, str(path), device, known, **conditions)
        if len(rows) < len(frame):
            counts = f"{len(rows)} of {len(frame)} rows are"
            note(f"note: {path}: {counts} of one replica and one pass on {device.name}; the others are left out")
        steps += rows
    return steps


def _error_figures(fit: Updated | None) -> dict[str, Any]:
    """Return the JSON fields on a fit's errors: ``rows`` (how many were fitted) and ``median_error`` ("before" and "after").

    An error is how far predicted / measured is from 1. {} for None: nothing was fitted.
    """
    if fit is None:
        return {}
    errors = {name: np.abs(ratios - 1) for name, ratios in (("before", fit.before), ("after", fit.after))}
    return {
        "rows": len(fit.before),
        "median_error": {name: float(np.median(values)) for name, values in errors.items()},
    }


def _print_constants(device: Device, fit: Updated | None, output: Path | None) -> None:
    """Print the fitted constants and errors (``fit`` None: there are none), a measured link, and the written file."""
    fitted = device.fitted
    if fit is not None and fitted is not None:
        errors = _error_figures(fit)
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
