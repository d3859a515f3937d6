"""Measurements of others as rows of profile.csv, and which rows of a profile tell of one device."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddltool.analyzers.job.goodput.observations import import_steps, import_table, kind_of
from ddltool.analyzers.step.costs.fitting import MeasuredStep
from ddltool.analyzers.step.costs.optimizers import OPTIMIZERS
from ddltool.analyzers.step.measured.kineto import read_steps
from ddltool.artifacts import demand_once, ending
from ddltool.device import Device, DeviceTable, name_key
from ddltool.errors import InputError, did_you_mean
from ddltool.precision import precision_name
from ddltool.results import ImportedFile
from ddltool.tables import read_table
from ddltool.telemetry import runs_of

if TYPE_CHECKING:
    import pandas as pd


def import_files(
    files: Sequence[Path],
    *,
    device: str | None = None,
    batch_size: int | None = None,
    num_nodes: int | None = None,
    num_replicas: int | None = None,
    unnamed: str = "",
) -> tuple[pd.DataFrame, list[ImportedFile]]:
    """Return the rows of all files as rows of profile.csv, in their order, and one record per file of what it holds.

    Args:
        files: placements.csv, telemetry.jsonl, profile.csv or profiler traces (.json).
        device: name of the device of all rows, whatever the files say; None: what they say.
        batch_size, num_nodes, num_replicas: of profiler traces, which do not always say them.
        unnamed: name of the device of rows that name none; "": such rows are an error.

    Raises InputError naming file, row and column; also for a file given twice, and for one of the numbers without a trace.
    """
    import pandas as pd

    if not files:
        raise InputError("FILE", "is missing", "give a placements.csv, telemetry.jsonl, trace or profile.csv")
    frames, sources = [], []
    demand_once(files, "its rows would count double")
    counts = {"local_batch_size": batch_size, "num_nodes": num_nodes, "num_replicas": num_replicas}
    for path in files:
        if ending(path) == ".json":
            frame, source = _imported_trace(path, device, unnamed, counts)
        else:
            frame, source = _imported_table(path, device, unnamed)
        frames.append(frame)
        sources.append(source)
    # Tables say these of each row; only a trace needs the options.
    trace_options = {"--batch-size": batch_size, "--nodes": num_nodes, "--replicas": num_replicas}
    given_options = [name for name, value in trace_options.items() if value is not None]
    if given_options and all(source.kind != "trace" for source in sources):
        problem = f"has no part in the import of {sources[0].path}"
        raise InputError(given_options[0], problem, "it is for a profiler trace")
    return pd.concat(frames, ignore_index=True), sources


def _imported_trace(
    path: Path, device: str | None, unnamed: str, counts: Mapping[str, int | None]
) -> tuple[pd.DataFrame, ImportedFile]:
    """Return the one row of a profiler trace, and the record of the file.

    ``device``: name of its device whatever the trace says, None: what it says; ``unnamed``: name of a device that it does not
    say, "": none; ``counts``: the batch size, nodes and replicas that a trace may not say, by column of profile.csv.
    """
    steps = read_steps(path)
    frame = import_steps(steps, device=device or steps.device or unnamed or None, **counts)
    source = ImportedFile(path=str(path), kind="trace", rows=len(steps.step_time_s))
    return frame, source.model_copy(update={"remarks": [*steps.remarks]}) if steps.remarks else source


def _imported_table(path: Path, device: str | None, unnamed: str) -> tuple[pd.DataFrame, ImportedFile]:
    """Return the rows of a table, and the record of the file. Raises InputError for a file that is none by its name.

    ``device``: name of the device of all rows, None: what the rows say; ``unnamed``: name for rows that name none, "": none.
    """
    extension = ending(path)
    if extension not in (".csv", ".jsonl", ".ndjson"):
        raise InputError(
            str(path), f"ends in {extension or 'nothing'}", "give a .csv, .jsonl or .json file (or .gz of one)"
        )
    frame = read_table(path)
    kind = kind_of([str(name) for name in frame.columns], str(path))
    row_device = device
    if unnamed and "device" in frame.columns:
        frame["device"] = frame["device"].fillna("").astype(str).str.strip().replace("", unnamed)
    elif unnamed:
        row_device = device or unnamed
    run_count = runs_of(frame).nunique() if kind == "telemetry" else 1
    remarks = {"remarks": [f"all of its {run_count} runs"]} if run_count > 1 else {}
    source = ImportedFile(path=str(path), kind=kind, rows=len(frame)).model_copy(update=remarks)
    return import_table(frame, str(path), row_device), source


# What `ddltool profile` always trains with; its rows name neither.
_PROFILE_TRAINS_WITH = {"precision": "fp32", "optimizer": "sgd"}
# The names in `settings` by which its rows are recognised.
_PROFILE_NAMES = {"device", "warmup", "torch"}
# Names in the device column that do not say which device it is.
_UNNAMED = {"", "cuda", "gpu"}
# The hash of its file that a profile appends to the name of a model.
_DIGEST = re.compile(r"#[0-9a-f]{12}$")


def measured_rows(
    frame: pd.DataFrame,
    where: str,
    device: Device,
    known: DeviceTable,
    *,
    model: str | None = None,
    precision: str = "fp32",
    optimizer: str | None = None,
) -> list[MeasuredStep]:
    """Return the steps in a profile that were measured on ``device`` with one replica and no accumulation.

    Args:
        frame: a table with the columns of :class:`ProfileRow`.
        where: name of its file, for errors.
        known: the table of devices, which knows the names of each.
        model: SOURCE of rows that do not say their model.
        precision: the one asked for, and that of rows that do not say theirs; with tf32, fp32 rows are taken too.
        optimizer: the one asked for, and that of rows that do not say theirs; None: any is taken, and adam is assumed for rows
            that do not say theirs.

    Raises InputError when no row is of the device, and for a row of it that was predicted, was measured with another precision
    or optimizer than asked for, or on a CPU, or does not say its model.
    """
    row_devices = [str(name) for name in frame["device"]]
    is_own = {name: _is_of_device(device, name, known) for name in set(row_devices)}
    if not any(is_own.values()):
        others = ", ".join(sorted(is_own)[:8])
        remedy = "name the device that was measured, as ddltool devices or --devices-file names it"
        raise InputError(where, f"holds rows of {others} and none of {device.name}", remedy)
    steps, precision_asked = [], precision_name(precision)
    for number, (name, row) in enumerate(zip(row_devices, frame.to_dict("records"), strict=True), start=1):
        if not is_own[name]:
            continue
        place = f"{where}:row {number}"
        if row.get("origin") == "predicted" or str(row.get("settings", "")).startswith("predicted"):
            raise InputError(f"{place}:origin", "is predicted", "calibrate with measured rows")
        accumulation_steps = row.get("accumulation_steps", 0)
        if row["num_replicas"] != 1 or accumulation_steps > 0:  # a row that does not say has NaN
            continue
        settings = _row_settings(row, place)
        measured = precision_name(settings.get("precision", precision), f"{place}:precision")
        if measured not in (precision_asked, {"tf32": "fp32"}.get(precision_asked)):
            raise InputError(place, f"was measured in {measured}, not {precision_asked}", _remedy("precision"))
        if optimizer is not None and settings.get("optimizer", optimizer) != optimizer:
            raise InputError(place, f"was measured with {settings['optimizer']}, not {optimizer}", _remedy("optimizer"))
        trained_by = settings.get("optimizer") or optimizer or "adam"
        if trained_by not in OPTIMIZERS:
            raise InputError(f"{place}:optimizer", f"unknown {trained_by!r}", did_you_mean(trained_by, OPTIMIZERS))
        row_model = row.get("source")
        row_model = _DIGEST.sub("", row_model) if isinstance(row_model, str) and row_model else model
        if row_model is None:
            raise InputError(where, "does not say which model was trained", "name it: --model SOURCE")
        steps.append(
            MeasuredStep(
                model=row_model,
                batch=int(row["local_batch_size"]),
                optimizer=trained_by,
                seconds=float(row["step_time_s"]),
            )
        )
    return steps


def _is_of_device(device: Device, name: str, known: DeviceTable) -> bool:
    """Return whether the name in a row means this device: one of its names in the table, or one of no particular device."""
    found = known.find(name)
    return name.casefold() in _UNNAMED or (found is not None and name_key(found.name) == name_key(device.name))


def _row_settings(row: Mapping[Any, Any], place: str) -> dict[str, str]:
    """Return ``precision`` and ``optimizer`` of the training that a row was measured in, as far as the row says them.

    Its columns count first, then its ``settings`` (``name=value;...``), then the fixed ones of ``ddltool profile`` if that
    wrote it. Raises InputError for a row that was measured on a CPU; ``place`` names the row in the message.
    """
    options = dict(part.split("=", 1) for part in str(row.get("settings", "")).split(";") if "=" in part)
    is_from_profile = set(options) >= _PROFILE_NAMES
    settings = dict(_PROFILE_TRAINS_WITH) if is_from_profile else {}
    for source in (options, row):  # the later one counts; an empty cell is NaN or ""
        for name in _PROFILE_TRAINS_WITH:
            if isinstance(source.get(name), str) and source[name]:
                settings[name] = source[name]
    if options.get("device") == "cpu":
        raise InputError(place, "was measured on a CPU", "measure on the GPU: ddltool profile --device cuda")
    return settings


def _remedy(option: str) -> str:
    """Return an error's advice about rows that were measured with another value of ``--option`` than asked for."""
    return f"leave --{option} out, or measure alike"
