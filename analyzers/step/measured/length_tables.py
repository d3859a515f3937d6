"""Lengths of a dataset's samples: a table of them, a histogram, lines of text, or lines of JSON as datasets are written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from ddltool.arrays import Ints
from ddltool.artifacts import ending, read_text
from ddltool.errors import InputError
from ddltool.tables import numbers

LENGTH_COLUMNS = ("length", "tokens", "num_tokens", "input_ids")
"""Accepted names of a column of lengths; ``input_ids`` holds lists, whose lengths are taken."""
MOST_TOKENS = 10**9
"""The longest sample that is accepted: up to it, costs with squared lengths are exact enough to be compared."""
MOST_COUNT = 10**12
"""The most samples of one length that are accepted."""


def read_length_lines(path: Path) -> pd.DataFrame | None:
    """Return a table with the column ``length`` from a file with one number per line: ``.txt``, or ``.csv`` without a header.

    None: the file has another ending, or is a ``.csv`` with a header. A line that is no number stays a text, which
    :func:`lengths_of` refuses with its row. Raises InputError for a file that is empty or cannot be read.
    """
    if ending(path) not in (".txt", ".csv"):
        return None
    lines = [line.strip() for line in read_text(path).splitlines()]
    if ending(path) == ".csv" and not lines[0].lstrip("-").replace(".", "", 1).isdigit():
        return None  # the first line is a header
    cells = pd.Series([line for line in lines if line], dtype=object)
    values = pd.to_numeric(cells, errors="coerce")  # NaN for a line that is no number
    return pd.DataFrame({"length": cells.where(values.isna(), values)})


def lengths_of(frame: pd.DataFrame, path: Path) -> tuple[Ints, Ints] | None:
    """Return (n,) the lengths in a table, and (n,) the number of samples of each; None: it has no column of lengths.

    A table with a column ``count`` is a histogram; otherwise every row is a sample. ``path``: the table's, for errors.
    Raises InputError, which names the row, for a length that is no whole number from 1 to MOST_TOKENS and for a count that
    is no whole number from 0 to MOST_COUNT; and if all counts are 0.
    """
    name = next((name for name in LENGTH_COLUMNS if name in frame.columns), None)
    if name is None:
        return None
    holds_lists = frame[name].map(lambda cell: isinstance(cell, list)).any()
    if holds_lists:
        lengths_of_lists = frame[name].map(lambda cell: len(cell) if isinstance(cell, list) else cell)
        frame = frame.assign(**{name: lengths_of_lists})
    lengths = numbers(frame, name, path, minimum=1, maximum=MOST_TOKENS, whole=True).astype(np.int64)
    if "count" not in frame.columns:
        return lengths, np.ones_like(lengths)
    counts = numbers(frame, "count", path, maximum=MOST_COUNT, whole=True).astype(np.int64)
    if not counts.any():
        raise InputError(f"{path}:count", "is 0 in all rows", "give the samples of each length")
    return lengths, counts
