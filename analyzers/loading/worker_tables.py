"""Tables of what workers did: recorded speeds (``balance``), and iteration ends or telemetry (``barrier``).

Rows stand in any order; what is wrong in one is told with its row and column.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddltool.analyzers.balancing.trace import LEAST_SPEED, MOST_SPEED, SpeedTrace
from ddltool.errors import InputError, did_you_mean
from ddltool.graph import natural_key
from ddltool.profile import demand, numbers, read_table

Floats = NDArray[np.float64]
SPEED_COLUMNS = ("iteration", "worker", "speed", "cpu", "memory")
END_COLUMNS = ("worker", "iteration", "end_s")
# Thirty million years: predictions from longer times could leave the range of floats, and mean nothing.
MOST_S = 1e15
# Above this, floats skip whole numbers.
MOST_ITERATIONS = 2**53
_NEGATIVE = "nobody waits for less than 0 s"


def read_speeds(path: Path, tell: Callable[[str], None]) -> SpeedTrace:
    """Return the trace in a CSV (``.gz`` is accepted), rows in any order; workers come in natural order of their names.

    Every worker needs a row for every iteration; ``tell`` hears of numbers that no worker has. Raises InputError naming row
    and column.
    """
    frame, where = _read(path, SPEED_COLUMNS), str(path)
    _demand_columns(frame, SPEED_COLUMNS, where)
    names = frame["worker"].astype(str)
    demand(frame["worker"].notna().to_numpy(), frame["worker"], "worker", where, "name the worker")
    # They would end up in pictures and terminals, which act on such characters.
    plain = names.map(str.isprintable).to_numpy(dtype=bool)
    demand(plain, names, "worker", where, "name workers without control characters")
    iteration = _whole(frame["iteration"])
    demand(~np.isnan(iteration), frame["iteration"], "iteration", where, "it must be a whole number >= 0")
    values = {column: numbers(frame[column]).to_numpy(dtype=np.float64) for column in SPEED_COLUMNS[2:]}
    for column, value in values.items():
        low, high = (LEAST_SPEED, MOST_SPEED) if column == "speed" else (0.0, np.finfo(np.float64).max)
        remedy = f"it must lie between {low:g} and {high:g} samples per second"
        remedy = remedy if column == "speed" else "it must be a finite number >= 0"
        demand((value >= low) & (value <= high), frame[column], column, where, remedy)
    table = pd.DataFrame({"iteration": iteration, "worker": names, **values})
    again = table.duplicated(["iteration", "worker"]).to_numpy()
    if again.any():
        row = int(np.argmax(again))
        problem = f"repeats iteration {iteration[row]:.0f} of worker {names.iloc[row]}"
        raise InputError(f"{where}:row {row + 1}:iteration", problem, "give each iteration of a worker once")
    wide = table.pivot(index="iteration", columns="worker")
    workers = sorted(names.unique(), key=natural_key)
    gone = np.argwhere(wide["speed"][workers].isna().to_numpy())
    if len(gone):
        problem = f"worker {workers[gone[0][1]]} has no iteration {wide.index[gone[0][0]]:.0f}"
        raise InputError(where, problem, "give a row of every worker for every iteration")
    _tell_gaps(wide.index.to_numpy(), path, tell)
    arrays = {column: wide[column][workers].to_numpy(dtype=np.float64) for column in values}
    return SpeedTrace.of(tuple(workers), **arrays)


def _tell_gaps(iterations: NDArray[np.float64], path: Path, tell: Callable[[str], None]) -> None:
    """Say how many iterations are missing between the (K,) ascending ones, and where first."""
    steps = np.diff(iterations)
    if (steps > 1).any():
        place = int(np.argmax(steps > 1))
        first, last = iterations[place], iterations[place + 1]
        tell(
            f"{path}: {steps.sum() - len(steps):.0f} iterations are missing, the first between {first:.0f} and {last:.0f}; "
            "rows on both sides are taken as neighbours"
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recorded:
    """What n workers did: names, iteration lengths in seconds (oldest first), and when their next iteration begins."""

    names: tuple[str, ...]
    lengths_s: list[Floats]
    origins_s: Floats
    """(n,)"""
    lagging: tuple[str, ...] = ()
    """Workers whose rows stop more than two of their iterations before the newest row."""


def read_recorded(path: Path) -> Recorded:
    """Return the recorded iterations of a CSV (``worker,iteration,end_s``) or of telemetry.jsonl.

    Telemetry is the hook's, or that of a server of :mod:`ddltool.runtime.servers`. From ends, an iteration's length is the
    time since the worker's previous end. From telemetry, it is the step without the waiting for others, and the next
    iterations begin together, at 0. Raises InputError naming row and column.
    """
    frame = _read(path, END_COLUMNS)
    if {"event", "worker", "wait_s"} <= set(map(str, frame.columns)):
        return _from_sync(frame, str(path))
    if {"rank", "step_s"} <= set(map(str, frame.columns)):
        return _from_telemetry(frame, str(path))
    names, ends, _ = _rows_by_worker(frame, END_COLUMNS, str(path))
    for name, row in zip(names, ends, strict=True):
        if len(row) < 2:
            problem = "has one row, which gives no iteration length"
            raise InputError(f"{path}:worker {name}", problem, "give two or more rows of each worker, or --predicted")
    lengths = [np.diff(row) for row in ends]
    last = np.array([row[-1] for row in ends])
    late = [last.max() - at > 2 * row.max() for at, row in zip(last, lengths, strict=True)]
    lagging = tuple(name for name, is_late in zip(names, late, strict=True) if is_late)
    return Recorded(names=tuple(names), lengths_s=lengths, origins_s=last, lagging=lagging)


def read_predicted(path: Path, lookahead: int | None) -> tuple[tuple[str, ...], Floats]:
    """Return worker names (n,) and the predicted ends (n, R) that a CSV holds, its first ``lookahead`` per worker.

    None: all, of which every worker must then have the same number. Raises InputError naming row and column.
    """
    frame = _read(path, END_COLUMNS)
    names, ends, rows = _rows_by_worker(frame, END_COLUMNS, str(path))
    wanted = lookahead if lookahead is not None else max(map(len, ends))
    for name, row, last in zip(names, ends, rows, strict=True):
        if len(row) < wanted:
            problem = f"worker {name} ends with this row, its prediction {len(row)} of {wanted}"
            remedy = f"give every worker {wanted} rows, or set --lookahead {min(map(len, ends))}"
            raise InputError(f"{path}:row {last + 1}:iteration", problem, remedy)
    return tuple(names), np.array([row[:wanted] for row in ends])


def _read(path: Path, columns: tuple[str, ...]) -> pd.DataFrame:
    if path.is_file() and not path.stat().st_size:
        more = ", or telemetry" if columns == END_COLUMNS else ""
        remedy = f"give a CSV with the columns {', '.join(columns)}{more}"
        raise InputError(str(path), "is empty", remedy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # columns of mixed type in a long table: what is wrong in them is told below
        return read_table(path)


def _from_telemetry(frame: pd.DataFrame, where: str) -> Recorded:
    """Return each rank's steps without their waiting."""
    names, steps, _ = _rows_by_worker(frame, ("rank", "step", "step_s"), where, ascending=False)
    _, waits, _ = _rows_by_worker(frame, ("rank", "step", "wait_s"), where, ascending=False)
    demand((frame["wait_s"] >= 0).to_numpy(), frame["wait_s"], "wait_s", where, _NEGATIVE)
    none_left = frame["wait_s"].to_numpy(dtype=np.float64) >= frame["step_s"].to_numpy(dtype=np.float64)
    demand(~none_left, frame["wait_s"], "wait_s", where, "it must be less than the row's step_s")
    lengths = [step - wait for step, wait in zip(steps, waits, strict=True)]
    return Recorded(names=tuple(names), lengths_s=lengths, origins_s=np.zeros(len(names)))


def _from_sync(frame: pd.DataFrame, where: str) -> Recorded:
    """Return each worker's steps without their waiting, from one parameter server's rows.

    A step lasts from when the server had the gradients of the one before; those of the first one are not known. Who
    has left has no next iteration.
    """
    left = frame[frame["event"] == "left"]
    steps = frame[(frame["event"] == "step") & ~frame["worker"].isin(left["worker"])]
    if steps.empty:  # the run is over, all have left
        steps = frame[frame["event"] == "step"]
    if steps.empty:
        raise InputError(where, "has no row of a step", "give the telemetry of a server that has taken gradients")
    workers = _whole(steps["worker"])
    demand(~np.isnan(workers), steps["worker"], "worker", where, "it must be a whole number >= 0")
    steps = steps.assign(worker=workers.astype(np.int64).astype(str))
    names, ends, _ = _rows_by_worker(steps, ("worker", "step", "time_s"), where)
    _, waits, _ = _rows_by_worker(steps, ("worker", "step", "wait_s"), where, ascending=False)
    demand((steps["wait_s"] >= 0).to_numpy(), steps["wait_s"], "wait_s", where, _NEGATIVE)
    lengths = [np.diff(end) - wait[1:] for end, wait in zip(ends, waits, strict=True)]
    for name, own in zip(names, lengths, strict=True):
        if not len(own) or own.min() <= 0:
            problem = "has one step" if not len(own) else "waited longer than a step took"
            raise InputError(
                f"{where}:worker {name}", problem, "give two or more steps of each, as the server wrote them"
            )
    return Recorded(names=tuple(names), lengths_s=lengths, origins_s=np.zeros(len(names)))


def _rows_by_worker(
    frame: pd.DataFrame, columns: tuple[str, str, str], where: str, *, ascending: bool = True
) -> tuple[list[str], list[Floats], list[int]]:
    """Return the workers' names in natural order, their values by iteration, and the row of each one's last value.

    ``columns`` are worker, iteration and value. Iterations must follow one another; values, if ``ascending``, too.
    """
    worker, iteration, value = columns
    _demand_columns(frame, columns, where)
    demand(frame[worker].notna().to_numpy(), frame[worker], worker, where, "name the worker")
    steps = _whole(frame[iteration])
    demand(~np.isnan(steps), frame[iteration], iteration, where, "it must be a whole number >= 0, below 2^53")
    values = numbers(frame[value]).to_numpy(dtype=np.float64)
    demand(np.isfinite(values), frame[value], value, where, "it must be finite seconds")
    remedy = f"it must be seconds between -{MOST_S:g} and {MOST_S:g}"
    demand(np.abs(values) <= MOST_S, frame[value], value, where, remedy)
    codes, found = pd.factorize(frame[worker].astype(str))
    names = [str(name) for name in found]
    order = np.lexsort((steps, codes))
    codes, steps, values = codes[order], steps[order], values[order]
    same = codes[1:] == codes[:-1]
    step = np.diff(steps)
    problems = (
        (same & (step == 0), iteration, "repeats iteration {at:g} of worker {name}", "give each iteration once"),
        (same & (step > 1), iteration, "is iteration {at:g} of worker {name}, which has no iteration {before:g}",
         "the iterations of a worker must follow one another"),
        (same & ascending & (np.diff(values) < 0), value, "is {end!r}, before the previous end of worker {name}",
         "a worker's iteration ends must ascend"),
    )  # fmt: skip
    for wrong, column, problem, remedy in problems:
        if wrong.any():
            places = np.flatnonzero(wrong) + 1
            place = int(places[np.argmin(order[places])])
            at = float(steps[place])
            text = problem.format(at=at, before=at - 1, name=names[codes[place]], end=float(values[place]))
            raise InputError(f"{where}:row {frame.index[order[place]] + 1}:{column}", text, remedy)
    bounds = np.append(np.flatnonzero(np.append(True, ~same)), len(codes))
    parts = {
        names[codes[low]]: (values[low:high], int(order[high - 1]))
        for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    }
    ordered = sorted(parts, key=natural_key)
    return ordered, [parts[name][0] for name in ordered], [parts[name][1] for name in ordered]


def _whole(raw: pd.Series[Any]) -> Floats:
    """Return (n,) the whole numbers from 0 that floats tell apart; NaN for all else."""
    values = numbers(raw).to_numpy(dtype=np.float64)
    whole = np.isfinite(values) & (values == np.floor(values)) & (values >= 0) & (values < MOST_ITERATIONS)
    return np.where(whole, values, np.nan)


def _demand_columns(frame: pd.DataFrame, columns: tuple[str, ...], where: str) -> None:
    """Raise InputError for the first column that a table lacks."""
    for column in columns:
        if column not in frame.columns:
            raise InputError(f"{where}:{column}", "no such column", did_you_mean(column, map(str, frame.columns)))
