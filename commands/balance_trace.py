"""Reads recorded speeds for ``ddltool balance``: a CSV with ``iteration,worker,speed,cpu,memory``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.balancing.trace import LEAST_SPEED, MOST_SPEED, SpeedTrace
from ddltool.errors import InputError, did_you_mean
from ddltool.graph import natural_key
from ddltool.profile import read_table

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("iteration", "worker", "speed", "cpu", "memory")


def read_trace(path: Path) -> SpeedTrace:
    """Return the trace in a CSV (``.gz`` is accepted), rows in any order; workers come in natural order of their names.

    Every worker needs a row for every iteration; numbers that no worker has are told on stderr. Raises InputError naming row
    and column.
    """
    import pandas as pd

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # columns of mixed type in a long table: what is wrong in them is told below
        frame = read_table(path)
    for column in COLUMNS:
        if column not in frame.columns:
            raise InputError(f"{path}:{column}", "no such column", did_you_mean(column, map(str, frame.columns)))
    _refuse(frame["worker"].isna().to_numpy(), frame, "worker", path, "name the worker")
    # They would end up in pictures and terminals, which act on such characters.
    unprintable = ~frame["worker"].astype(str).map(str.isprintable).to_numpy(dtype=bool)
    _refuse(unprintable, frame, "worker", path, "name workers without control characters")
    numbers = _numbers(frame, "iteration")
    whole = np.isfinite(numbers) & (numbers == np.floor(numbers)) & (numbers >= 0) & (numbers < 2**53)
    _refuse(~whole, frame, "iteration", path, "it must be a whole number >= 0")
    values = {column: _numbers(frame, column) for column in COLUMNS[2:]}
    speed = values["speed"]
    _refuse(~(np.isfinite(speed) & (speed > 0)), frame, "speed", path, "it must be finite samples per second above 0")
    beyond = (speed < LEAST_SPEED) | (speed > MOST_SPEED)
    _refuse(beyond, frame, "speed", path, f"it must lie between {LEAST_SPEED:g} and {MOST_SPEED:g} samples per second")
    for column in ("cpu", "memory"):
        share = values[column]
        _refuse(~(np.isfinite(share) & (share >= 0)), frame, column, path, "it must be a finite number >= 0")
    found = frame["worker"].astype(str)
    names = sorted(pd.unique(found), key=natural_key)
    worker = pd.Categorical(found, categories=names).codes.astype(np.int64)
    iterations, iteration = np.unique(numbers, return_inverse=True)
    cell = iteration * len(names) + worker
    order = np.argsort(cell, kind="stable")
    repeated = np.zeros(len(frame), dtype=bool)
    repeated[order[1:]] = cell[order[1:]] == cell[order[:-1]]
    if repeated.any():
        row = int(np.argmax(repeated))
        problem = f"repeats iteration {numbers[row]:.0f} of worker {found.iloc[row]}"
        raise InputError(f"{path}:row {row + 1}:iteration", problem, "give each iteration of a worker once")
    if len(cell) < len(names) * len(iterations):
        missing = int(np.argmax(np.bincount(cell, minlength=len(names) * len(iterations)) == 0))
        problem = f"worker {names[missing % len(names)]} has no iteration {iterations[missing // len(names)]:.0f}"
        raise InputError(str(path), problem, "give a row of every worker for every iteration")
    _tell_gaps(iterations, path)
    shape = (len(iterations), len(names))
    arrays = {column: array[order].reshape(shape) for column, array in values.items()}
    return SpeedTrace.of(tuple(map(str, names)), **arrays)


def _tell_gaps(iterations: NDArray[np.float64], path: Path) -> None:
    """Say on stderr how many iterations are missing between the (K,) ascending ones, and where first."""
    from ddltool.commands.output import note

    steps = np.diff(iterations)
    if (steps > 1).any():
        place = int(np.argmax(steps > 1))
        first, last = iterations[place], iterations[place + 1]
        note(
            f"{path}: {steps.sum() - len(steps):.0f} iterations are missing, the first between {first:.0f} and {last:.0f}; "
            "rows on both sides are taken as neighbours"
        )


def _numbers(frame: pd.DataFrame, column: str) -> NDArray[np.float64]:
    import pandas as pd

    return pd.to_numeric(frame[column], errors="coerce").to_numpy(dtype=np.float64)


def _refuse(wrong: NDArray[np.bool_], frame: pd.DataFrame, column: str, path: Path, remedy: str) -> None:
    """Raise InputError for the first row that is wrong."""
    if wrong.any():
        row = int(np.argmax(wrong))
        value: Any = frame[column].iloc[row]
        raise InputError(f"{path}:row {row + 1}:{column}", f"is {value}", remedy)
