"""Profile: measured step times, a pandas frame with a checked schema (kind ``ddltool.profile``, a CSV file).

One row is one configuration: device, nodes, replicas and local batch size, with the median over the repeats.
"""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from ddltool.artifacts import SCHEMA_VERSION, Record, read_text, write_text
from ddltool.errors import InputError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ProfileRow(Record):
    """One row of profile.csv."""

    KIND: ClassVar[str] = "ddltool.profile"
    device: str = Field(min_length=1)
    num_nodes: Annotated[int, Field(ge=1)]
    num_replicas: Annotated[int, Field(ge=1)]
    local_batch_size: Annotated[int, Field(ge=1)]
    step_time_s: Positive = Field(
        description="median seconds of a full step: forward, backward, synchronisation, update"
    )
    sync_time_s: NonNegative = Field(description="the part of it that waits for gradient synchronisation")
    peak_memory_bytes: NonNegative | None = None
    step_time_spread_s: NonNegative | None = Field(default=None, description="interquartile range over the repeats")
    repeats: Annotated[int, Field(ge=1)] | None = None
    step_time_low_s: Positive | None = Field(default=None, description="lower end of the median's 95 % interval")
    step_time_high_s: Positive | None = Field(default=None, description="upper end of the median's 95 % interval")
    accumulation_steps: Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="passes without synchronisation before the one that synchronises; 0 is none"
    )
    grad_time_s: Positive | None = Field(
        default=None, description="median seconds of one pass over a local batch without synchronisation"
    )
    source: str | None = Field(default=None, description="the model that was measured")
    settings: str | None = Field(default=None, description="how it was measured; rows compare where this is equal")
    schema_version: int = SCHEMA_VERSION


REQUIRED = ("device", "num_nodes", "num_replicas", "local_batch_size", "step_time_s", "sync_time_s")
COLUMNS = tuple(ProfileRow.model_fields)
_TEXT = ("device", "source", "settings")
_FROM_ZERO = ("sync_time_s", "peak_memory_bytes", "step_time_spread_s", "accumulation_steps")
_WHOLE = ("num_nodes", "num_replicas", "local_batch_size", "repeats", "accumulation_steps")


def read_table(path: str | Path) -> pd.DataFrame:
    """Return the rows of a ``.csv`` or ``.jsonl`` file (``.gz`` accepted). Raises InputError naming the line."""
    import pandas as pd

    path = Path(path)
    text = read_text(path)
    try:
        if any(suffix in (".jsonl", ".ndjson") for suffix in path.suffixes):
            frame = pd.DataFrame(_json_lines(text, path))
        else:
            if _like_json(text):
                raise not_csv(text, path)
            # A device or a worker may well be called NA or nan: there only an empty field is missing.
            header = pd.read_csv(io.StringIO(text), skipinitialspace=True, nrows=0).columns
            _check_header(text, path)
            missing = {name: [""] if name in ("device", "worker") else ["", "nan", "NaN", "NA"] for name in header}
            frame = pd.read_csv(
                io.StringIO(text),
                skipinitialspace=True,
                float_precision="round_trip",
                keep_default_na=False,
                na_values=missing,
            )
    except (pd.errors.ParserError, pd.errors.EmptyDataError, csv.Error):
        raise not_csv(text, path) from None
    if frame.empty:
        raise InputError(str(path), "has no rows", "give at least one measured row")
    return frame


def _like_json(text: str) -> bool:
    return text.lstrip()[:1] in ("{", "[")


def not_csv(text: str, path: Path) -> InputError:
    """Return what is wrong with a text that could not be read as CSV: the first row, from 1 after the header, that differs."""
    remedy = "give a header line and one row per line, one field per column"
    if _like_json(text):
        return InputError(
            str(path), "is not a CSV table (it begins like JSON)", "give a table, or rows of JSON as .jsonl"
        )
    rows = csv.reader(io.StringIO(text), skipinitialspace=True, strict=True)
    problem, line = "it cannot be read", 1
    try:
        columns = len(next((row for row in rows if row), []))
        if not columns:
            problem = "it has no header"
        line = rows.line_num + 1
        for number, row in enumerate((row for row in rows if row), start=1):
            if len(row) > columns:
                problem = f"row {number} has {len(row)} columns, the header {columns}"
                break
            line = rows.line_num + 1
    except csv.Error:
        # A quote that nothing closes, letters behind one, or a field beyond what is read.
        problem = f"line {line} has a quote that does not end its field, or a field that is too long"
    return InputError(str(path), f"is not a CSV table ({problem})", remedy)


def _check_header(text: str, path: Path) -> None:
    """Raise InputError for a column that stands twice: pandas would rename it, and one of the two would be lost."""
    names = next(csv.reader(io.StringIO(text), skipinitialspace=True), [])
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise InputError(f"{path}:line 1", f"has the column {repeated!r} twice", "keep one of the two")


def _json_lines(text: str, path: Path) -> list[dict[str, Any]]:
    """Return one mapping per line. A last line without its end is dropped: that is a writer that was killed."""
    import json

    rows: list[dict[str, Any]] = []
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines) and not text.endswith("\n") and rows:
                break
            raise InputError(
                f"{path}:line {number}", f"is not JSON ({error.msg})", "one JSON object per line"
            ) from None
        except (ValueError, RecursionError):
            problem = "has a number of thousands of digits, or is nested thousands deep"
            raise InputError(f"{path}:line {number}", problem, "one flat JSON object per line") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}:line {number}", "is not an object", "one JSON object per line")
        rows.append(row)
    return rows


def check_profile(frame: pd.DataFrame, where: str) -> pd.DataFrame:
    """Return the frame with the schema's types; extra columns stay. Raises InputError naming row and column.

    Rows count from 1 after the header, as ``row``.
    """
    import pandas as pd

    for name in REQUIRED:
        if name not in frame.columns:
            raise InputError(where, f"has no column {name!r}", did_you_mean(name, map(str, frame.columns)))
    checked = frame.copy()
    if "schema_version" in checked.columns:
        _check_version(checked["schema_version"].tolist(), where)
    for name in COLUMNS:
        if name not in checked.columns or name in _TEXT:
            continue
        numbers = pd.to_numeric(checked[name], errors="coerce")
        _check_numbers(numbers.tolist(), checked[name].tolist(), name, where)
        whole = name in ("num_nodes", "num_replicas", "local_batch_size")
        checked[name] = numbers.astype("int64") if whole else numbers
    _check_replicas(checked, where)
    checked["device"] = checked["device"].astype(str)
    return checked


def _check_version(versions: list[Any], where: str) -> None:
    for row, version in enumerate(versions, start=1):
        if version != SCHEMA_VERSION:
            raise InputError(
                f"{where}:row {row}:schema_version", f"is {version}", f"this ddltool reads {SCHEMA_VERSION}"
            )


def _check_numbers(values: list[float], raw: list[Any], name: str, where: str) -> None:
    optional = name not in REQUIRED
    least = 0.0 if name in _FROM_ZERO else None
    whole = name in _WHOLE
    for row, value in enumerate(values, start=1):
        if optional and isinstance(raw[row - 1], float) and math.isnan(raw[row - 1]):
            continue
        good = math.isfinite(value) and (value >= least if least is not None else value > 0)
        if not good or (whole and value != int(value)):
            from_where = 1 if least is None else 0
            wanted = (
                f"a whole number >= {from_where}" if whole else "above zero" if from_where else "a finite number >= 0"
            )
            raise InputError(f"{where}:row {row}:{name}", f"is {raw[row - 1]}", f"it must be {wanted}")


def _check_replicas(frame: pd.DataFrame, where: str) -> None:
    wrong = (frame["num_replicas"] < frame["num_nodes"]).to_numpy().nonzero()[0]
    if wrong.size:
        row = frame.iloc[int(wrong[0])]
        text = f"{row['num_replicas']} replicas on {row['num_nodes']} nodes"
        raise InputError(f"{where}:row {wrong[0] + 1}:num_replicas", text, "every node holds at least one replica")


def read_profile(path: str | Path) -> pd.DataFrame:
    """Return a checked profile.csv as a frame with the columns of :class:`ProfileRow`."""
    return check_profile(read_table(path), str(path))


def write_profile(frame: pd.DataFrame, path: str | Path) -> None:
    """Write a profile atomically, schema's columns first. Raises InputError if the frame breaks the schema."""
    checked = check_profile(frame, str(path))
    checked["schema_version"] = SCHEMA_VERSION
    ordered = [name for name in COLUMNS if name in checked.columns]
    rest = [str(name) for name in checked.columns if name not in ordered]
    write_text(path, checked[ordered + rest].to_csv(index=False))
