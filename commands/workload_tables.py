"""The CSV tables that ``ddltool simulate`` reads: every row has as many fields as the header, or is named."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddltool.errors import InputError

if TYPE_CHECKING:
    import pandas as pd


def read_rows(path: Path, columns: Sequence[str], *, no_nan: Collection[str] = (), ended: bool = False) -> pd.DataFrame:
    """Return a table's rows; ``columns`` are named where the file is empty.

    Raises InputError for rows with too many or too few fields: the one would shift its values by a column in silence, the
    other is what a writer that was killed leaves. ``no_nan``: columns in which ``nan`` is refused, where an empty field
    would be taken as missing. ``ended``: the last row must have its end of line.
    """
    from ddltool.profile import read_table

    if not any(suffix in (".jsonl", ".ndjson") for suffix in path.suffixes):
        _check_fields(path, columns, no_nan, ended)
    return read_table(path)


def _check_fields(path: Path, columns: Sequence[str], no_nan: Collection[str], ended: bool) -> None:
    from ddltool.artifacts import read_text

    expected = f"expected columns {', '.join(columns)}"
    try:
        text = read_text(path)
    except InputError as error:
        raise InputError(
            error.where, error.problem, expected if error.problem == "is empty" else error.remedy
        ) from None
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
                    raise InputError(
                        f"{path}:row {row}:{header[at]}", f"is {fields[at].strip()}", "a number, or nothing"
                    )
    except csv.Error as error:
        raise InputError(f"{path}:row {row + 1}", f"cannot be read ({error})", "give one row per line") from None
    if not row:
        raise InputError(str(path), "has no rows", expected)
    if ended and not text.endswith(("\n", "\r")):
        raise InputError(f"{path}:row {row}", "has no end of line: the file may be cut off", "copy or make it again")
