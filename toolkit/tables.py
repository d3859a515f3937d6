"""Tables of rows (CSV, JSON Lines) as checked columns: every row as wide as the header, every number in its range."""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Collection, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddltool.arrays import Flags, Floats
from ddltool.artifacts import read_lines, read_text
from ddltool.errors import InputError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd

ABOVE_ZERO = math.ulp(0.0)
# So many lines of JSON become a frame at a time: as objects they take ten times the memory.
_LINES_AT_ONCE = 5_000


def read_table(
    path: str | Path, expected: Sequence[str] = (), *, no_nan: Collection[str] = (), ended: bool = False
) -> pd.DataFrame:
    """Return the rows of a ``.csv`` or ``.jsonl`` file (``.gz`` accepted); a file without any is told what was ``expected``.

    Raises InputError, naming the row from 1 after the header, for one with too many or too few fields: the one would shift
    its values by a column in silence, the other is what a writer that was killed leaves. ``no_nan``: columns in which
    ``nan`` is refused, where an empty field would be taken as missing. ``ended``: the last row must have its end of line,
    so that a file that was cut off within a number is refused.
    """
    import pandas as pd

    path = Path(path)
    if any(suffix in (".jsonl", ".ndjson") for suffix in path.suffixes):
        # A million times "ddltool.telemetry" is one text in memory.
        lines = ({k: sys.intern(v) if type(v) is str else v for k, v in row.items()} for _, row in read_lines(path))
        parts = []
        while chunk := list(islice(lines, _LINES_AT_ONCE)):
            parts.append(pd.DataFrame(chunk))
        return pd.concat(parts, ignore_index=True)
    wanted = f"expected columns {', '.join(expected)}" if expected else "give at least one measured row"
    try:
        text = read_text(path)
    except InputError as error:
        remedy = wanted if expected and error.problem == "is empty" else error.remedy
        raise InputError(error.where, error.problem, remedy) from None
    header, rows = _checked_widths(text, path, no_nan)
    if not rows:
        raise InputError(str(path), "has no rows", wanted)
    if ended and not text.endswith(("\n", "\r")):
        raise InputError(f"{path}:row {rows}", "has no end of line: the file may be cut off", "copy or make it again")
    return pd.read_csv(
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


def _checked_widths(text: str, path: Path, no_nan: Collection[str]) -> tuple[list[str], int]:
    """Return the names of a CSV's columns, and how many rows it has, all as wide as the header."""
    if text.lstrip()[:1] in ("{", "["):
        problem = "is not a CSV table (it begins like JSON)"
        raise InputError(str(path), problem, "give a table, or rows of JSON as .jsonl")
    number = 0
    try:
        rows = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True, strict=True)
        header = [name.strip() for name in next(filter(None, rows), [])]
        repeated = next((name for name in header if header.count(name) > 1), None)
        if repeated is not None:  # pandas would rename it, and one of the two would be lost
            raise InputError(f"{path}:line 1", f"has the column {repeated!r} twice", "keep one of the two")
        watched = [at for at, name in enumerate(header) if name in no_nan]
        for fields in rows:
            if not fields or (len(fields) == 1 < len(header) and not fields[0].strip()):
                continue  # pandas passes over blank lines too
            number += 1
            if len(fields) != len(header):
                problem = f"has {len(fields)} fields; the header has {len(header)}"
                raise InputError(f"{path}:row {number}", problem, "a field may be missing, or a comma too many")
            for at in watched:
                if (value := fields[at].strip()).lower() == "nan":
                    raise InputError(f"{path}:row {number}:{header[at]}", f"is {value}", "a number, or nothing")
    except csv.Error:
        problem = "has a quote that does not end its field, or a field that is too long"
        raise InputError(f"{path}:row {number + 1}", problem, "give one row per line") from None
    return header, number


def read_columns(path: Path, columns: Sequence[str], *, ended: bool = False) -> pd.DataFrame:
    """Return :func:`read_table` of a table that has these columns. Raises InputError for one that is missing."""
    frame = read_table(path, columns, ended=ended)
    demand_columns(frame, columns, path)
    return frame


def demand_columns(frame: pd.DataFrame, columns: Sequence[str], where: str | Path) -> None:
    """Raise InputError for the first of these columns that a table lacks."""
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise InputError(f"{where}:{missing[0]}", "no such column", did_you_mean(missing[0], list(frame.columns)))


def numbers(
    frame: pd.DataFrame,
    column: str,
    where: str | Path,
    *,
    least: float = 0.0,
    most: float = math.inf,
    whole: bool = False,
    missing: bool = False,
    remedy: str = "",
    shown: str = "",
    unit: str = "row",
) -> Floats:
    """Return a column (n,) as finite numbers from ``least`` to ``most``; ``missing``: an empty field is NaN.

    Raises InputError naming the row (from 1) of the first that is none, with ``remedy`` where it is above ``most``.
    ``shown``: the column's name in the file, where that is another; ``unit``: what the file's rows are called.
    """
    import pandas as pd

    cells = frame[column]
    if cells.dtype == object:  # an integer of hundreds of digits is no float
        cells = cells.map(lambda cell: math.inf if isinstance(cell, int) and abs(cell) > 1e300 else cell)
    made = pd.to_numeric(cells, errors="coerce").to_numpy(dtype=np.float64)
    empty = (cells.isna() | cells.isin(["", "None"])).to_numpy() if missing else np.zeros(len(cells), dtype=bool)
    good = empty | np.isfinite(made) & (made >= least) & (made <= most) & ((made == np.round(made)) | (not whole))
    if not good.all():
        kind, limits = "a whole number" if whole else "a number", f"from {least:g} to {most:.15g}"
        if most == math.inf or remedy:
            limits = "above zero" if least == ABOVE_ZERO else f">= {least:.15g}"
        if not remedy or not made[np.argmin(good)] > most:
            remedy = f"{kind} {limits}"
        demand(good, cells, shown or column, where, remedy, unit=unit)
    return made


def demand(
    good: Flags,
    cells: pd.Series[Any] | NDArray[Any],
    name: str,
    where: str | Path,
    remedy: str,
    *,
    said: str = "is ",
    unit: str = "row",
) -> None:
    """Raise InputError for the first of the cells, (n,), that is not good; ``unit``: what the file's rows are called."""
    if good.all():
        return
    place = int(np.argmin(good))
    # Of rows that were picked from a table, its own.
    row = place if isinstance(cells, np.ndarray) else int(cells.index[place])
    text = str(np.asarray(cells)[place]).removesuffix(".0")
    shown = text if len(text) <= 40 else f"{text[:37]}..."
    raise InputError(f"{where}:{unit} {row + 1}:{name}", f"{said}{shown}", remedy)


def texts(frame: pd.DataFrame, column: str, where: str | Path) -> list[str]:
    """Return a column as texts, none of them empty. Raises InputError naming the row (from 1)."""
    empty = frame[column].isna().to_numpy()
    if empty.any():
        row = frame.index[int(empty.argmax())] + 1
        raise InputError(f"{where}:row {row}:{column}", "is empty, or NA", "give a name")
    return [str(value) for value in frame[column].tolist()]


def demand_distinct_jobs(names: pd.Series[Any], where: str | Path) -> None:
    """Raise InputError for a job that a column names twice, naming both rows (from 1)."""
    again = names.duplicated().to_numpy()
    if again.any():
        row = int(again.argmax())
        first = int((names == names.iloc[row]).to_numpy().argmax())
        problem = f"{str(names.iloc[row])!r} stands in row {first + 1} too"
        raise InputError(f"{where}:row {row + 1}:{names.name}", problem, "name each job once")
