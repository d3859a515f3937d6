"""Tables of rows (CSV, JSON Lines) as checked columns: every row as wide as the header, every number in its range."""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel

from ddltool.arrays import Flags, Floats
from ddltool.artifacts import ending, read_lines, read_text
from ddltool.errors import InputError, did_you_mean, shortened

if TYPE_CHECKING:
    import pandas as pd

ABOVE_ZERO = math.ulp(0.0)  # the least float above 0, as a ``minimum`` of :func:`numbers`
# Lines of JSON that become a frame at a time: as Python objects they take ten times the memory.
_LINES_PER_FRAME = 5_000


def read_table(
    path: str | Path, expected: Sequence[str] = (), *, no_nan: Collection[str] = (), ended: bool = False
) -> pd.DataFrame:
    """Return the rows of a ``.csv``, ``.jsonl`` or ``.ndjson`` file (``.gz`` accepted) as a frame.

    A key that a line of JSON lacks is NaN. Raises InputError for a file that cannot be read or has no rows; for a CSV
    also, naming the row (from 1 after the header), if a row has more or fewer fields than the header: with more, its
    values would shift by a column; fewer are what a killed writer leaves.

    Args (all of a CSV alone):
        expected: columns that the error for a file without rows names.
        no_nan: columns in which the word ``nan`` is refused; an empty field is missing there too.
        ended: whether the last row must end with a line end; a file cut off within a number has none.
    """
    import pandas as pd

    path = Path(path)
    if ending(path) in (".jsonl", ".ndjson"):
        # Equal texts share memory: "ddltool.telemetry" stands in every one of a million rows.
        lines = (
            {key: sys.intern(value) if type(value) is str else value for key, value in row.items()}
            for _, row in read_lines(path)
        )
        frames = []
        while chunk := list(islice(lines, _LINES_PER_FRAME)):
            frames.append(pd.DataFrame(chunk))
        return pd.concat(frames, ignore_index=True)
    remedy_if_empty = f"expected columns {', '.join(expected)}" if expected else "give at least one measured row"
    try:
        text = read_text(path)
    except InputError as error:
        remedy = remedy_if_empty if expected and error.problem == "is empty" else error.remedy
        raise InputError(error.where, error.problem, remedy) from None
    header, rows = _checked_widths(text, path, no_nan)
    if not rows:
        raise InputError(str(path), "has no rows", remedy_if_empty)
    if ended and not text.endswith(("\n", "\r")):
        raise InputError(f"{path}:row {rows}", "has no end of line: the file may be cut off", "copy or make it again")
    return pd.read_csv(
        io.StringIO(text),
        skipinitialspace=True,
        header=0,
        names=header,
        index_col=False,
        dtype={name: str for name in ("placement", "device", "source", "settings", "run", "kind") if name in header},
        float_precision="round_trip",
        keep_default_na=False,
        # A device or a worker may be named NA or nan: in these columns only an empty field is missing.
        na_values={name: [""] if name in ("device", "worker") else ["", "nan", "NaN", "NA"] for name in header},
        low_memory=False,
    )


def _checked_widths(text: str, path: Path, no_nan: Collection[str]) -> tuple[list[str], int]:
    """Return (column names, number of rows) of a CSV's ``text``. Raises InputError for what :func:`read_table` refuses.

    ``path``: for errors. ``no_nan``: columns in which the word nan is refused.
    """
    if text.lstrip()[:1] in ("{", "["):
        problem = "is not a CSV table (it begins like JSON)"
        raise InputError(str(path), problem, "give a table, or rows of JSON as .jsonl")
    row_count = 0
    try:
        rows = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
        header = [name.strip() for name in next(filter(None, rows), [])]
        repeated = next((name for name in header if header.count(name) > 1), None)
        if repeated is not None:  # pandas would rename it, and one of the two would be lost
            raise InputError(f"{path}:line 1", f"has the column {repeated!r} twice", "keep one of the two")
        no_nan_indices = [column_index for column_index, name in enumerate(header) if name in no_nan]
        for fields in rows:
            if not fields or (len(fields) == 1 < len(header) and not fields[0].strip()):
                continue  # pandas passes over blank lines too
            row_count += 1
            if len(fields) != len(header):
                problem = f"has {len(fields)} fields; the header has {len(header)}"
                raise InputError(f"{path}:row {row_count}", problem, "a field may be missing, or a comma too many")
            for column_index in no_nan_indices:
                if (value := fields[column_index].strip()).lower() == "nan":
                    raise InputError(
                        f"{path}:row {row_count}:{header[column_index]}", f"is {value}", "a number, or nothing"
                    )
    except csv.Error:
        problem = "has a quote that does not end its field, or a field that is too long"
        raise InputError(f"{path}:row {row_count + 1}", problem, "give one row per line") from None
    return header, row_count


def read_columns(path: Path, columns: Sequence[str], *, ended: bool = False) -> pd.DataFrame:
    """Return :func:`read_table` of a file. Raises InputError for the first of ``columns`` that it lacks."""
    frame = read_table(path, columns, ended=ended)
    demand_columns(frame, columns, path)
    return frame


def demand_columns(frame: pd.DataFrame, columns: Sequence[str], where: str | Path) -> None:
    """Raise InputError for the first of ``columns`` that a table lacks. ``where``: the file, for the error."""
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise InputError(f"{where}:{missing[0]}", "no such column", did_you_mean(missing[0], list(frame.columns)))


def numbers(
    frame: pd.DataFrame,
    column: str,
    where: str | Path,
    *,
    minimum: float = 0.0,
    maximum: float = math.inf,
    whole: bool = False,
    missing: bool = False,
    remedy: str = "",
    shown: str = "",
    unit: str = "row",
) -> Floats:
    """Return a column (n,) as finite numbers from ``minimum`` to ``maximum``, both included.

    Raises InputError naming the row (from 1) of the first cell that is not such a number.

    Args:
        frame: the table.
        column: the name of the column.
        where: the file, for errors.
        minimum: the least number that is allowed; ``ABOVE_ZERO`` for any number above 0.
        maximum: the largest number that is allowed.
        whole: whether only whole numbers are allowed.
        missing: whether an empty cell is allowed; it becomes NaN.
        remedy: the error's remedy for a value above ``maximum``; "": the allowed range.
        shown: the column's name in the file; "": ``column``.
        unit: the error's word for a row ("row", "line").
    """
    import pandas as pd

    cells = frame[column]
    if cells.dtype == object:  # an integer of hundreds of digits does not fit into a float
        cells = cells.map(lambda cell: math.inf if isinstance(cell, int) and abs(cell) > 1e300 else cell)
    values = pd.to_numeric(cells, errors="coerce").to_numpy(dtype=np.float64, copy=True)
    # "None" is how Python's str() writes a missing value.
    is_empty = (cells.isna() | cells.isin(["None"])).to_numpy() if missing else np.zeros(len(cells), dtype=bool)
    if cells.dtype.kind not in "iuf":
        # to_numeric turns "4" and true into numbers. That is right for a CSV: if one of its cells is no number, pandas leaves
        # all of them texts. A column that mixes texts with numbers, or whose texts are all numbers, is from JSON: there the
        # texts are refused, and shown with their quotes.
        is_text_or_bool = cells.map(lambda cell: isinstance(cell, (str, bool))).to_numpy(dtype=bool)
        has_numbers = not (is_text_or_bool | cells.isna().to_numpy()).all()
        if has_numbers or np.isfinite(values[is_text_or_bool]).all():
            cells = cells.where(~(is_text_or_bool & np.isfinite(values)), cells.map(repr))
            values[is_text_or_bool] = np.nan
    is_in_range = np.isfinite(values) & (values >= minimum) & (values <= maximum)
    is_valid = is_empty | is_in_range & ((values == np.round(values)) | (not whole))
    if not is_valid.all():
        kind = "a whole number" if whole else "a number"
        limits = f"from {_plain(minimum)} to {_plain(maximum)}"
        if maximum == math.inf or remedy:
            limits = "above zero" if minimum == ABOVE_ZERO else f">= {_plain(minimum)}"
        if not remedy or not values[np.argmin(is_valid)] > maximum:
            remedy = f"{kind} {limits}"
        demand_valid(is_valid, cells, shown or column, where, remedy, unit=unit)
    return values


def _plain(limit: float) -> str:
    """Return a limit of a column as people write it: 1000000000, 9007199254740991, but 1e+15."""
    is_round = abs(limit) >= 1e15 and float(f"{limit:g}") == limit
    return f"{limit:g}" if is_round else f"{limit:.16g}"


def checked_columns(
    frame: pd.DataFrame,
    model: type[BaseModel],
    where: str | Path,
    *,
    required: Collection[str],
    shown: Mapping[str, str] | None = None,
    unit: str = "row",
) -> dict[str, Any]:
    """Return by name the columns (n,) of a table that are fields of ``model``: numbers as floats, texts unchanged.

    A missing cell, or null, of a field with a default is NaN. Raises InputError naming row and column of the first cell
    that the model would refuse, and for a ``required`` column that is absent. ``shown``: the columns' names in the file,
    where they differ. ``unit``: see :func:`numbers`.
    """
    whole_schema = model.model_json_schema()
    schema, required_cells = whole_schema["properties"], whole_schema["required"]
    for name in required:
        if name not in frame.columns:
            raise InputError(str(where), f"has no column {name!r}", did_you_mean(name, map(str, frame.columns)))
    columns: dict[str, Any] = {}
    for name in filter(frame.columns.__contains__, schema):
        # Of "a number or null", the schema of a field that may be missing, only the number is checked here.
        (kind,) = (part for part in schema[name].get("anyOf", [schema[name]]) if part["type"] != "null")
        const = kind.get("const")  # the one value that is allowed
        if kind["type"] != "string":
            limits = {"minimum": kind.get("minimum", const), "maximum": kind.get("maximum", const)}
            options = {"missing": name not in required_cells, "shown": (shown or {}).get(name, name), "unit": unit}
            options |= {} if const is None else {"remedy": f"this ddltool reads {const}"}
            columns[name] = numbers(frame, name, where, **limits, **options, whole=kind["type"] == "integer")
            continue
        cells = frame[name]
        columns[name] = cells
        is_valid = cells.isin([const]) if const is not None else cells.map(lambda cell: isinstance(cell, str))
        if "pattern" in kind:
            is_valid &= cells.map(str).str.contains(kind["pattern"])
        is_valid |= cells.isna() & (name not in required_cells)
        if not is_valid.all():
            remedy = "give a text" if const is None else f"give {const!r}"
            shown_cells = cells.map(repr).where(cells.notna(), "empty")
            demand_valid(is_valid.to_numpy(dtype=bool), shown_cells, name, where, remedy, unit=unit)
    return columns


def demand_valid(
    is_valid: Flags,
    cells: pd.Series[Any] | NDArray[Any],
    name: str,
    where: str | Path,
    remedy: str,
    *,
    said: str = "is ",
    unit: str = "row",
) -> None:
    """Raise InputError for the first of the ``cells``, (n,), whose ``is_valid`` is False; pass if there is none.

    The error names the row (from 1), the column ``name`` and the cell's value. ``said``: the error's words before the
    value; ``unit``: its word for a row.
    """
    if is_valid.all():
        return
    first_index = int(np.argmin(is_valid))
    # A series picked from a table keeps the table's row numbers as its index.
    row = first_index if isinstance(cells, np.ndarray) else int(cells.index[first_index])
    cell_text = str(np.asarray(cells)[first_index]).removesuffix(".0")  # a whole number may have become a float
    raise InputError(f"{where}:{unit} {row + 1}:{name}", f"{said}{shortened(cell_text, 40)}", remedy)


def texts(frame: pd.DataFrame, column: str, where: str | Path) -> list[str]:
    """Return a column's cells as texts. Raises InputError naming the row (from 1) of the first empty cell."""
    empty = frame[column].isna().to_numpy()
    if empty.any():
        row = frame.index[int(empty.argmax())] + 1
        raise InputError(f"{where}:row {row}:{column}", "is empty, or NA", "give a name")
    return [str(value) for value in frame[column].tolist()]


def demand_distinct_jobs(names: pd.Series[Any], where: str | Path) -> None:
    """Raise InputError for the first job name that an earlier row has too, naming both rows (from 1)."""
    is_repeated = names.duplicated().to_numpy()
    if is_repeated.any():
        repeated_row = int(is_repeated.argmax())
        first_row = int((names == names.iloc[repeated_row]).to_numpy().argmax())
        problem = f"{str(names.iloc[repeated_row])!r} stands in row {first_row + 1} too"
        raise InputError(f"{where}:row {repeated_row + 1}:{names.name}", problem, "name each job once")
