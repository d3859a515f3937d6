"""Profile: measured step times, a pandas frame with a checked schema (kind ``ddltool.profile``, a CSV file).

One row is one configuration: device, nodes, replicas and local batch size, with the median over the repeats.
"""

from __future__ import annotations

import csv
import io
import math
import sys
import warnings
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ddltool.artifacts import SCHEMA_VERSION, Record, read_lines, read_text, write_text
from ddltool.errors import InputError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

# Beyond these a number is a mistake of units or of a writer, and its square would leave the range of floats.
TIMES_S = (1e-9, 1e9)
LARGEST_COUNT = 10**9
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]


class ProfileRow(Record):
    """One row of profile.csv."""

    device: str = Field(min_length=1)
    num_nodes: Count
    num_replicas: Count
    local_batch_size: Count
    step_time_s: Annotated[float, Field(ge=TIMES_S[0], le=TIMES_S[1])] = Field(
        description="median seconds of a full step: forward, backward, synchronisation, update"
    )
    sync_time_s: Annotated[float, Field(ge=0, le=TIMES_S[1])] = Field(
        description="the part of it that waits for gradient synchronisation"
    )
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
# So many lines of JSON become a frame at a time: as objects they take ten times the memory.
_LINES_AT_ONCE = 5_000


def read_table(path: str | Path) -> pd.DataFrame:
    """Return the rows of a ``.csv`` or ``.jsonl`` file (``.gz`` accepted). Raises InputError naming the line."""
    import pandas as pd

    path = Path(path)
    if any(suffix in (".jsonl", ".ndjson") for suffix in path.suffixes):
        # A million times "ddltool.telemetry" is one text in memory.
        rows = ({k: sys.intern(v) if type(v) is str else v for k, v in row.items()} for _, row in read_lines(path))
        parts = []
        while chunk := list(islice(rows, _LINES_AT_ONCE)):
            parts.append(pd.DataFrame(chunk))
        return pd.concat(parts, ignore_index=True)
    text = read_text(path)
    try:
        lines = csv.reader(io.StringIO(text), skipinitialspace=True, strict=True)
        header = [name.strip() for name in next(filter(None, lines), [])]
        repeated = next((name for name in header if header.count(name) > 1), None)
        if repeated is not None:  # pandas would rename it, and one of the two would be lost
            raise InputError(f"{path}:line 1", f"has the column {repeated!r} twice", "keep one of the two")
        if text.lstrip()[:1] in ("{", "["):
            raise pd.errors.ParserError
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # rows longer than the header
            frame = pd.read_csv(
                io.StringIO(text),
                skipinitialspace=True,
                header=0,
                names=header,
                index_col=False,
                dtype={name: str for name in ("placement", "device") if name in header},
                float_precision="round_trip",
                keep_default_na=False,
                # A device or a worker may well be called NA or nan: there only an empty field is missing.
                na_values={n: [""] if n in ("device", "worker") else ["", "nan", "NaN", "NA"] for n in header},
                low_memory=False,
            )
    except (pd.errors.ParserError, pd.errors.EmptyDataError, pd.errors.ParserWarning, csv.Error, ValueError):
        raise _not_csv(text, path) from None
    if frame.empty:
        raise InputError(str(path), "has no rows", "give at least one measured row")
    return frame


def _not_csv(text: str, path: Path) -> InputError:
    """Return what is wrong with a text that could not be read as CSV: the first row, from 1 after the header, that differs."""
    if text.lstrip()[:1] in ("{", "["):
        problem = "is not a CSV table (it begins like JSON)"
        return InputError(str(path), problem, "give a table, or rows of JSON as .jsonl")
    problem, line, columns = "it cannot be read", 1, 0
    try:
        rows = csv.reader(io.StringIO(text), skipinitialspace=True, strict=True)
        for number, row in enumerate(row for row in rows if row):
            columns = columns or len(row)
            if len(row) > columns:
                problem = f"row {number} has {len(row)} columns, the header {columns}"
                break
            line = rows.line_num + 1
        if not columns:
            problem = "it has no header"
    except csv.Error:
        # A quote that nothing closes, letters behind one, or a field beyond what is read.
        problem = f"line {line} has a quote that does not end its field, or a field that is too long"
    remedy = "give a header line and one row per line, one field per column"
    return InputError(str(path), f"is not a CSV table ({problem})", remedy)


def numbers(cells: pd.Series[Any]) -> pd.Series[Any]:
    """Return cells as numbers, NaN where they are none; an integer of hundreds of digits is no float: infinite."""
    import pandas as pd

    if cells.dtype == object:
        cells = cells.map(lambda cell: math.inf if isinstance(cell, int) and abs(cell) > 1e300 else cell)
    return pd.to_numeric(cells, errors="coerce")


def check_profile(frame: pd.DataFrame, where: str, shown: Mapping[str, str] | None = None) -> pd.DataFrame:
    """Return the frame with the schema's types; extra columns stay. Raises InputError naming row and column.

    Rows count from 1 after the header, as ``row``; ``shown``: names that the file has for columns, where they are others.
    """
    for name in REQUIRED:
        if name not in frame.columns:
            raise InputError(where, f"has no column {name!r}", did_you_mean(name, map(str, frame.columns)))
    checked = frame.copy()
    for name, wanted in ProfileRow.model_json_schema()["properties"].items():
        # Without the null of what may be missing.
        (kind,) = (part for part in wanted.get("anyOf", [wanted]) if part["type"] != "null")
        if name not in checked.columns or kind["type"] == "string":
            continue
        column = numbers(checked[name])
        values, whole = column.to_numpy(dtype=float), kind["type"] == "integer"
        least, most = kind.get("minimum", 0), kind.get("maximum", math.inf)
        good = np.isfinite(values) & (values >= least) & (values <= most) & (values > kind.get("exclusiveMinimum", -1))
        remedy = f"it must be {'above zero' if 'exclusiveMinimum' in kind else 'a finite number >= 0'}"
        if whole:
            good &= values == np.round(values)
            remedy = f"it must be a whole number >= {least}"
        if most < math.inf:
            remedy = (
                f"it must be a whole number from {least} to {most}"
                if whole
                else f"it must lie between {least:g} and {most:g}"
            )
        if name == "schema_version":
            good, remedy = values == SCHEMA_VERSION, f"this ddltool reads {SCHEMA_VERSION}"
        elif name not in REQUIRED:
            good |= checked[name].isna().to_numpy()
        demand(good, checked[name], (shown or {}).get(name, name), where, remedy)
        checked[name] = column.astype("int64") if whole and name in REQUIRED else column
    pairs = checked["num_replicas"].astype(str) + " replicas on " + checked["num_nodes"].astype(str) + " nodes"
    few = (checked["num_replicas"] >= checked["num_nodes"]).to_numpy()
    demand(few, pairs, "num_replicas", where, "every node holds at least one replica", said="")
    checked["device"] = checked["device"].astype(str)
    return checked


def demand(
    good: NDArray[np.bool_],
    cells: pd.Series[Any] | NDArray[Any],
    name: str,
    where: str,
    remedy: str,
    *,
    said: str = "is ",
    unit: str = "row",
) -> None:
    """Raise InputError for the first of the cells, (n,), that is not good; ``unit``: what the file's rows are called."""
    if not good.all():
        place = int(np.argmin(good))
        row = (
            place if isinstance(cells, np.ndarray) else int(cells.index[place])
        )  # of rows that were picked from a table, its own
        text = str(np.asarray(cells)[place])
        shown = text if len(text) <= 40 else f"{text[:37]}..."
        raise InputError(f"{where}:{unit} {row + 1}:{name}", f"{said}{shown}", remedy)


def read_profile(path: str | Path) -> pd.DataFrame:
    """Return a checked profile.csv as a frame with the columns of :class:`ProfileRow`."""
    return check_profile(read_table(path), str(path))


def write_profile(frame: pd.DataFrame, path: str | Path) -> None:
    """Write a profile atomically, schema's columns first. Raises InputError if the frame breaks the schema."""
    checked = check_profile(frame, str(path)).assign(schema_version=SCHEMA_VERSION)
    ordered = [name for name in COLUMNS if name in checked.columns]
    rest = [str(name) for name in checked.columns if name not in ordered]
    write_text(path, checked[ordered + rest].to_csv(index=False))


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a table's rows as documents have them: what is missing is null."""
    return frame.astype(object).where(frame.notna(), None).to_dict("records")  # type: ignore[return-value]
