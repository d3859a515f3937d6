"""Tables of CSV as checked columns: every row has as many fields as the header, every number lies in its range."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddltool.artifacts import read_text
from ddltool.errors import InputError, did_you_mean
from ddltool.profile import read_table

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]


def read_rows(path: Path, columns: Sequence[str], *, no_nan: Collection[str] = (), ended: bool = False) -> pd.DataFrame:
    """Return a table's rows; ``columns`` are named where the file is empty.

    Raises InputError for rows with too many or too few fields: the one would shift its values by a column in silence, the
    other is what a writer that was killed leaves. ``no_nan``: columns in which ``nan`` is refused, where an empty field
    would be taken as missing. ``ended``: the last row must have its end of line, so that a file that was cut off within a
    number is refused.
    """
    if any(suffix in (".jsonl", ".ndjson") for suffix in path.suffixes):
        return read_table(path)
    expected = f"expected columns {', '.join(columns)}"
    try:
        text = read_text(path)
    except InputError as error:
        remedy = expected if error.problem == "is empty" else error.remedy
        raise InputError(error.where, error.problem, remedy) from None
    row = 0
    try:
        rows = csv.reader(io.StringIO(text, newline=""), skipinitialspace=True)
        header = next((fields for fields in rows if fields), [])
        watched = [at for at, name in enumerate(header) if name in no_nan]
        for fields in rows:
            if not fields or (len(fields) == 1 < len(header) and not fields[0].strip()):
                continue  # pandas passes over blank lines too
            row += 1
            if len(fields) != len(header):
                problem = f"has {len(fields)} fields; the header has {len(header)}"
                raise InputError(f"{path}:row {row}", problem, "a field may be missing, or a comma too many")
            for at in watched:
                if fields[at].strip().lower() == "nan":
                    problem = f"is {fields[at].strip()}"
                    raise InputError(f"{path}:row {row}:{header[at]}", problem, "a number, or nothing")
    except csv.Error as error:
        raise InputError(f"{path}:row {row + 1}", f"cannot be read ({error})", "give one row per line") from None
    if not row:
        raise InputError(str(path), "has no rows", expected)
    if ended and not text.endswith(("\n", "\r")):
        raise InputError(f"{path}:row {row}", "has no end of line: the file may be cut off", "copy or make it again")
    return read_table(path)


def read_columns(path: Path, columns: Sequence[str], *, ended: bool = False) -> pd.DataFrame:
    """Return :func:`read_rows` of a table that has these columns. Raises InputError for one that is missing."""
    frame = read_rows(path, columns, ended=ended)
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
) -> Floats:
    """Return a column (n,) as finite numbers from ``least`` to ``most``; ``missing``: an empty field is NaN.

    Raises InputError naming the row (from 1) of the first that is none, with ``remedy`` where it is above ``most``.
    """
    import pandas as pd

    values = frame[column]
    made = pd.to_numeric(values, errors="coerce").to_numpy(dtype=np.float64)
    empty = (values.isna() | values.isin(["", "None"])).to_numpy() if missing else np.zeros(len(values), dtype=bool)
    with np.errstate(invalid="ignore"):
        wrong = ~np.isfinite(made) | (made < least) | (made > most) | (whole & (made != np.floor(made)))
    bad = np.flatnonzero(wrong & ~empty)
    if bad.size:
        row, kind = int(bad[0]), "a whole number" if whole else "a number"
        if not made[row] > most or not remedy:
            remedy = (
                f"{kind} >= {least:.15g}" if most == math.inf or remedy else f"{kind} from {least:g} to {most:.15g}"
            )
        shown = values.iloc[row] if np.isnan(made[row]) else f"{made[row]:.15g}"
        raise InputError(f"{where}:row {values.index[row] + 1}:{column}", f"is {shown}", remedy)
    return made


def texts(frame: pd.DataFrame, column: str, where: str | Path) -> list[str]:
    """Return a column as texts, none of them empty. Raises InputError naming the row (from 1)."""
    empty = frame[column].isna().to_numpy()
    if empty.any():
        raise InputError(
            f"{where}:row {frame.index[int(empty.argmax())] + 1}:{column}", "is empty, or NA", "give a name"
        )
    return [str(value) for value in frame[column].tolist()]


def demand_distinct_jobs(names: pd.Series[Any], where: str | Path) -> None:
    """Raise InputError for a job that a column names twice, naming both rows (from 1)."""
    again = names.duplicated().to_numpy()
    if again.any():
        row = int(again.argmax())
        first = int((names == names.iloc[row]).to_numpy().argmax())
        problem = f"{str(names.iloc[row])!r} stands in row {first + 1} too"
        raise InputError(f"{where}:row {row + 1}:{names.name}", problem, "name each job once")
