"""Tables of recorded speeds (``balance``), and of iteration ends or telemetry (``barrier``).

Rows stand in any order; errors name the row and column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from ddltool.analyzers.step.measured.ranks import of_telemetry
from ddltool.arrays import Floats
from ddltool.artifact_files import read_any
from ddltool.artifacts import ending
from ddltool.errors import InputError
from ddltool.graph import natural_key
from ddltool.quantities import MOST
from ddltool.stages import Tell
from ddltool.tables import demand_columns, numbers, read_table, texts
from ddltool.telemetry import check_rows

SPEED_COLUMNS = ("iteration", "worker", "speed", "cpu", "memory")
END_COLUMNS = ("worker", "iteration", "end_s")
# Seconds, thirty million years: predictions from longer times could leave the range of floats.
MOST_S = 1e15
# The fewest iterations of a warm-up: it takes so many to tell how workers differ.
LEAST_WARM_UP = 20


def read_speeds(path: Path, tell: Tell, frame: pd.DataFrame | None = None) -> SpeedTrace:
    """Return the speeds in a CSV (``.gz`` is accepted), or in telemetry of the training hook, with workers in natural order.

    A CSV has the columns of ``SPEED_COLUMNS``. In telemetry, the speed is the samples per second of the rank's own compute,
    and the readings of CPU and memory are 1. Rows may have any order, and every worker needs one for every iteration.
    ``tell`` receives a remark about iterations that no worker has. ``frame``: the table, if it has been read already; None:
    it is read from ``path``. Raises InputError with row and column.
    """
    frame = read_table(path, SPEED_COLUMNS) if frame is None else frame
    if "compute_s" in frame.columns:
        run = of_telemetry(frame, str(path), tell)
        speed = run.speed().T
        _tell_gaps(run.steps.astype(np.float64), path, tell)
        full_share = np.ones_like(speed)
        return SpeedTrace.of(tuple(map(str, run.ranks)), speed=speed, cpu=full_share, memory=full_share)
    table = _checked_speeds(frame, path)
    # A row for each iteration, and a column for each pair of a reading (speed, cpu, memory) and a worker.
    by_iteration = table.pivot(index="iteration", columns="worker")
    names = sorted(set(table["worker"]), key=natural_key)
    missing = np.argwhere(by_iteration["speed"][names].isna().to_numpy())
    if len(missing):
        iteration_index, worker_index = missing[0]
        problem = f"worker {names[worker_index]} has no iteration {by_iteration.index[iteration_index]:.0f}"
        raise InputError(str(path), problem, "give a row of every worker for every iteration")
    _tell_gaps(by_iteration.index.to_numpy(), path, tell)
    columns = {column: by_iteration[column][names].to_numpy() for column in ("speed", "cpu", "memory")}
    return SpeedTrace.of(tuple(names), **columns)


def _checked_speeds(frame: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Return the columns of ``SPEED_COLUMNS`` of a table, the worker as text and the others as floats, in the table's order.

    ``path``: the table's, for errors. Raises InputError for a missing column, a value out of range, a name of a worker with
    control characters, and an iteration that a worker has twice.
    """
    demand_columns(frame, SPEED_COLUMNS, path)
    worker = texts(frame, "worker", path)
    for row, name in enumerate(worker, 1):
        if not name.isprintable():  # it would end up in pictures and terminals, which act on such characters
            raise InputError(f"{path}:row {row}:worker", f"is {name!r}", "name workers without control characters")
    iteration = numbers(frame, "iteration", path, maximum=MOST, whole=True)
    speed = numbers(frame, "speed", path, minimum=LEAST_SPEED, maximum=MOST_SPEED)
    readings = {column: numbers(frame, column, path) for column in ("cpu", "memory")}
    table = pd.DataFrame({"worker": worker, "iteration": iteration, "speed": speed, **readings})
    is_repeated = table.duplicated(["worker", "iteration"])
    if is_repeated.any():
        row = int(np.argmax(is_repeated))
        problem = f"repeats iteration {iteration[row]:.0f} of worker {worker[row]}"
        raise InputError(f"{path}:row {row + 1}:iteration", problem, "give each iteration of a worker once")
    return table


def _tell_gaps(iterations: Floats, path: Path, tell: Tell) -> None:
    """Call ``tell`` with a remark on how many iterations are missing and where the first gap is, if there is a gap.

    ``iterations`` (K,): the numbers of the iterations that there are, ascending. ``path``: the table's.
    """
    strides = np.diff(iterations)
    if (strides > 1).any():
        gap_index = int(np.argmax(strides > 1))
        before, after = iterations[gap_index], iterations[gap_index + 1]
        missing = strides.sum() - len(strides)
        tell(
            f"{path}: {missing:.0f} iterations are missing, the first between {before:.0f} and {after:.0f}; "
            "rows on both sides are taken as neighbours"
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WorkerIterations:
    """The recorded iterations of n workers."""

    names: tuple[str, ...]
    lengths_s: list[Floats]
    """Iteration lengths in seconds of each worker, oldest first."""
    origins_s: Floats
    """(n,) when each worker's next iteration begins, seconds."""
    lagging: tuple[str, ...] = ()
    """Workers whose rows stop more than two of their iterations before the newest row."""


def read_recorded(path: Path, tell: Tell) -> WorkerIterations:
    """Return the recorded iterations in a CSV (``worker,iteration,end_s``) or in telemetry.

    In a CSV, an iteration's length is the time since the worker's previous end. In telemetry (of the training hook, or of a
    server of :mod:`ddltool.runtime.servers`), it is the step time without the waiting for others, and every worker's next
    iteration is taken to begin at 0 seconds, because the rows of different ranks need not have one clock. ``tell`` receives
    a remark if there are several runs. Raises InputError with row and column.
    """
    if ending(path) in (".jsonl", ".ndjson"):
        read = read_any(path)
        if read.remark:
            tell(f"{path}: {read.remark}")
        if read.kind == "sync":  # rows of a parameter server
            columns = ["event", "worker", "step", "time_s", "wait_s"]
            return _from_sync(pd.DataFrame(read.content, columns=columns), str(path))
        if read.kind == "telemetry":
            return _from_telemetry(read.content, str(path))
    frame = read_table(path, END_COLUMNS)
    if {"rank", "step_s"} <= set(map(str, frame.columns)):
        return _from_telemetry(check_rows(frame, str(path), tell), str(path))
    ends = _rows_by_worker(frame, END_COLUMNS, str(path))
    for name, worker_ends in zip(ends.names, ends.values, strict=True):
        if len(worker_ends) < 2:
            problem = "has one row, which gives no iteration length"
            raise InputError(f"{path}:worker {name}", problem, "give two or more rows of each worker, or --predicted")
    lengths = [np.diff(worker_ends) for worker_ends in ends.values]
    last_ends_s = np.array([worker_ends[-1] for worker_ends in ends.values])
    behind_s = last_ends_s.max() - last_ends_s
    rows = zip(ends.names, behind_s, lengths, strict=True)
    lagging = tuple(name for name, late_s, lengths_s in rows if late_s > 2 * lengths_s.max())
    return WorkerIterations(names=tuple(ends.names), lengths_s=lengths, origins_s=last_ends_s, lagging=lagging)


def read_predicted(path: Path, lookahead: int | None) -> tuple[tuple[str, ...], Floats]:
    """Return (n,) worker names and (n, R) predicted ends in seconds from a CSV, the first R of each worker.

    R is ``lookahead``; None: R is the number of predictions, which must be the same for all workers. Raises InputError with
    row and column.
    """
    frame = read_table(path, END_COLUMNS)
    ends = _rows_by_worker(frame, END_COLUMNS, str(path))
    counts = [len(worker_ends) for worker_ends in ends.values]
    wanted = lookahead if lookahead is not None else max(counts)
    for name, count, last_row in zip(ends.names, counts, ends.last_rows, strict=True):
        if count < wanted:
            problem = f"worker {name} ends with this row, its prediction {count} of {wanted}"
            remedy = f"give every worker {wanted} rows, or set --lookahead {min(counts)}"
            raise InputError(f"{path}:row {last_row + 1}:iteration", problem, remedy)
    return tuple(ends.names), np.array([worker_ends[:wanted] for worker_ends in ends.values])


def _from_telemetry(frame: pd.DataFrame, where: str) -> WorkerIterations:
    """Return each rank's step times without waiting, from telemetry of the training hook; next iterations begin at 0.

    ``where``: the table, for errors. Raises InputError for a step that takes no longer than its waiting.
    """
    steps = _rows_by_worker(frame, ("rank", "step", "step_s"), where, ascending=False)
    waits = _rows_by_worker(frame, ("rank", "step", "wait_s"), where, least=0.0, ascending=False)
    only_waits = (frame["wait_s"] >= frame["step_s"]).to_numpy()
    if only_waits.any():
        row = int(np.argmax(only_waits))
        problem = f"is {frame['wait_s'].iloc[row]}"
        raise InputError(f"{where}:row {frame.index[row] + 1}:wait_s", problem, "it must be less than the row's step_s")
    lengths = [steps_s - waits_s for steps_s, waits_s in zip(steps.values, waits.values, strict=True)]
    return WorkerIterations(names=tuple(steps.names), lengths_s=lengths, origins_s=np.zeros(len(steps.names)))


def _from_sync(frame: pd.DataFrame, where: str) -> WorkerIterations:
    """Return each worker's step times without waiting, from the rows of one parameter server.

    ``frame`` has the columns event ("step", "left", ...), worker, step, time_s (when the server had the step's gradients) and
    wait_s; ``where`` names it in errors. A step begins when the server has the gradients of the step before, so the length of
    the first step is not known. Workers that left are not returned, unless all have left. Next iterations begin at 0. Raises
    InputError for a worker with one step, or with a step that takes no longer than its waiting.
    """
    departures = frame[frame["event"] == "left"]
    steps = frame[(frame["event"] == "step") & ~frame["worker"].isin(departures["worker"])]
    if steps.empty:  # the run is over, all have left
        steps = frame[frame["event"] == "step"]
    if steps.empty:
        raise InputError(where, "has no row of a step", "give the telemetry of a server that has taken gradients")
    worker = numbers(steps, "worker", where, maximum=MOST, whole=True)
    steps = steps.assign(worker=worker.astype(np.int64).astype(str))
    ends = _rows_by_worker(steps, ("worker", "step", "time_s"), where)
    waits = _rows_by_worker(steps, ("worker", "step", "wait_s"), where, least=0.0, ascending=False)
    # Without the first step, whose begin is not known.
    lengths = [np.diff(ends_s) - waits_s[1:] for ends_s, waits_s in zip(ends.values, waits.values, strict=True)]
    for name, worker_lengths in zip(ends.names, lengths, strict=True):
        if not len(worker_lengths) or worker_lengths.min() <= 0:
            problem = "has one step" if not len(worker_lengths) else "waited longer than a step took"
            remedy = "give two or more steps of each, as the server wrote them"
            raise InputError(f"{where}:worker {name}", problem, remedy)
    return WorkerIterations(names=tuple(ends.names), lengths_s=lengths, origins_s=np.zeros(len(ends.names)))


class _WorkerRows(NamedTuple):
    """One column of a table by worker; all lists are in the order of ``names``."""

    names: list[str]
    """The workers, in natural order (w2 before w10)."""
    values: list[Floats]
    """Each worker's values, by ascending iteration."""
    last_rows: list[int]
    """The table's index of the row of each worker's last iteration."""


def _rows_by_worker(
    frame: pd.DataFrame, columns: Sequence[str], where: str, *, least: float = -MOST_S, ascending: bool = True
) -> _WorkerRows:
    """Return a column of a table by worker, sorted by iteration.

    Args:
        columns: the names of the columns of worker, iteration and value.
        where: the table, for errors.
        least: the least value that is accepted.
        ascending: whether a worker's values must not fall.

    Raises InputError for iterations that repeat or leave gaps, and for values out of range.
    """
    demand_columns(frame, columns, where)
    worker, iteration, value = columns
    table = pd.DataFrame(
        {
            "worker": texts(frame, worker, where),
            "iteration": numbers(frame, iteration, where, maximum=MOST, whole=True),
            "value": numbers(frame, value, where, minimum=least, maximum=MOST_S),
        },
        index=frame.index,
    )
    table = table.sort_values(["worker", "iteration"], kind="stable")
    by_worker = table.groupby("worker", sort=False)
    iteration_gap = by_worker["iteration"].diff()
    # For each check: which rows fail it, the column at fault, the problem as a template over a row's fields, the remedy.
    checks = (
        (iteration_gap == 0, iteration, "repeats iteration {iteration:g} of worker {worker}", "give each iteration once"),
        (iteration_gap > 1, iteration, "is iteration {iteration:g} of worker {worker}, which has no iteration {before:g}",
         "the iterations of a worker must follow one another"),
        (ascending & (by_worker["value"].diff() < 0), value, "is {value!r}, before the previous end of worker {worker}",
         "a worker's iteration ends must ascend"),
    )  # fmt: skip
    for is_wrong, column, template, remedy in checks:
        if is_wrong.any():
            row = int(table.index[is_wrong].min())
            fields = {str(key): value for key, value in table.loc[row].to_dict().items()}
            problem = template.format(before=fields["iteration"] - 1, **fields)
            raise InputError(f"{where}:row {row + 1}:{column}", problem, remedy)
    rows_of = {str(name): rows for name, rows in by_worker}
    names = sorted(rows_of, key=natural_key)
    return _WorkerRows(
        names=names,
        values=[rows_of[name]["value"].to_numpy() for name in names],
        last_rows=[int(rows_of[name].index[-1]) for name in names],
    )


LEAST_SPEED, MOST_SPEED = 1e-9, 1e12
"""Limits of a worker's samples per second; beyond them times and their squares leave the range of floats."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SpeedTrace:
    """K iterations of n workers; all arrays (K, n). Made by :meth:`of`; treat it as read-only."""

    names: tuple[str, ...]
    """(n,) the workers."""
    speed: Floats
    """Samples per second of each iteration, without waiting for others."""
    cpu: Floats
    """Share of the CPU that the worker can expect (0 to 1), read at the iteration's start, before its speed is known."""
    memory: Floats
    """Share of the memory that is available (0 to 1), read at the iteration's start."""

    @classmethod
    def of(cls, names: tuple[str, ...], speed: Floats, cpu: Floats, memory: Floats) -> SpeedTrace:
        """Return a trace of (K, n) arrays after checking them; ``names``: the n workers, the arrays: see the class.

        Raises InputError for arrays of another shape, and for a value out of range, with its iteration and worker.
        """
        arrays = {"speed": speed, "cpu": cpu, "memory": memory}
        shape = (len(speed), len(names))
        for name, array in arrays.items():
            if array.shape != shape or 0 in shape:
                raise InputError(name, f"has shape {array.shape}", f"expected {shape}, with an iteration and a worker")
            if name == "speed":
                in_range = (array >= LEAST_SPEED) & (array <= MOST_SPEED)
                remedy = f"speeds are above 0: {LEAST_SPEED:g} to {MOST_SPEED:g} samples per second, and finite"
            else:
                in_range = array >= 0
                remedy = "readings are at least 0 and finite"
            is_wrong = ~(np.isfinite(array) & in_range)
            if is_wrong.any():
                iteration, worker = np.argwhere(is_wrong)[0]
                where = f"{name}, iteration {iteration}, worker {names[worker]}"
                raise InputError(where, f"is {array[iteration, worker]:g}", remedy)
        return cls(names=names, **arrays)

    @property
    def iterations(self) -> int:
        """The number of iterations, K."""
        return len(self.speed)

    @property
    def workers(self) -> int:
        """The number of workers, n."""
        return len(self.names)


def default_warm_up(iterations: int, wanted: int) -> int:
    """Return how many of a trace's ``iterations`` are its warm-up, from which speeds are learned before they are predicted.

    It is ``wanted`` or half of all, whichever is less, and at least ``LEAST_WARM_UP``.
    """
    return max(LEAST_WARM_UP, min(wanted, iterations // 2))
