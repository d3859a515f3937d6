"""Tables of what workers did: recorded speeds (``balance``), and iteration ends or telemetry (``barrier``).

Rows stand in any order; what is wrong in one is told with its row and column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from ddltool.analyzers.balancing.trace import LEAST_SPEED, MOST_SPEED, SpeedTrace
from ddltool.analyzers.stragglers.ranks import of_telemetry
from ddltool.arrays import Floats
from ddltool.errors import InputError
from ddltool.graph import natural_key
from ddltool.stages import Tell
from ddltool.tables import demand_columns, numbers, read_table, texts
from ddltool.telemetry import last_run

SPEED_COLUMNS = ("iteration", "worker", "speed", "cpu", "memory")
END_COLUMNS = ("worker", "iteration", "end_s")
# Thirty million years: predictions from longer times could leave the range of floats, and mean nothing.
MOST_S = 1e15
# Above this, floats skip whole numbers.
MOST_ITERATIONS = 2**53 - 1


def read_speeds(path: Path, tell: Tell) -> SpeedTrace:
    """Return the trace in a CSV (``.gz`` is accepted), rows in any order; workers come in natural order of their names.

    Of the hook's telemetry a speed is the samples a second of the rank's own compute, and all readings are 1.

    Every worker needs a row for every iteration; ``tell`` hears of numbers that no worker has. Raises InputError naming row
    and column.
    """
    frame = read_table(path, SPEED_COLUMNS)
    if "compute_s" in frame.columns:
        run = of_telemetry(frame, str(path), tell)
        speed = run.speed().T
        _tell_gaps(run.steps.astype(np.float64), path, tell)
        ones = np.ones_like(speed)
        return SpeedTrace.of(tuple(map(str, run.ranks)), speed=speed, cpu=ones, memory=ones)
    demand_columns(frame, SPEED_COLUMNS, path)
    worker = texts(frame, "worker", path)
    for row, name in enumerate(worker, 1):
        if not name.isprintable():  # it would end up in pictures and terminals, which act on such characters
            raise InputError(f"{path}:row {row}:worker", f"is {name!r}", "name workers without control characters")
    iteration = numbers(frame, "iteration", path, most=MOST_ITERATIONS, whole=True)
    speed = numbers(frame, "speed", path, least=LEAST_SPEED, most=MOST_SPEED)
    table = pd.DataFrame({"worker": worker, "iteration": iteration, "speed": speed})
    table = table.assign(**{column: numbers(frame, column, path) for column in ("cpu", "memory")})
    again = table.duplicated(["worker", "iteration"])
    if again.any():
        row = int(np.argmax(again))
        problem = f"repeats iteration {iteration[row]:.0f} of worker {worker[row]}"
        raise InputError(f"{path}:row {row + 1}:iteration", problem, "give each iteration of a worker once")
    cells = table.pivot(index="iteration", columns="worker")
    names = sorted(set(worker), key=natural_key)
    missing = np.argwhere(cells["speed"][names].isna().to_numpy())
    if len(missing):
        problem = f"worker {names[missing[0][1]]} has no iteration {cells.index[missing[0][0]]:.0f}"
        raise InputError(str(path), problem, "give a row of every worker for every iteration")
    _tell_gaps(cells.index.to_numpy(), path, tell)
    return SpeedTrace.of(tuple(names), **{column: cells[column][names].to_numpy() for column in SPEED_COLUMNS[2:]})


def _tell_gaps(iterations: Floats, path: Path, tell: Tell) -> None:
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


def read_recorded(path: Path, tell: Tell) -> Recorded:
    """Return the recorded iterations of a CSV (``worker,iteration,end_s``) or of telemetry.jsonl.

    Telemetry is the hook's, or that of a server of :mod:`ddltool.runtime.servers`. From ends, an iteration's length is the
    time since the worker's previous end. From telemetry, it is the step without the waiting for others, and the next
    iterations begin together, at 0; ``tell`` hears which of several runs it is. Raises InputError naming row and column.
    """
    frame = read_table(path, END_COLUMNS)
    if {"event", "worker", "wait_s"} <= set(map(str, frame.columns)):
        return _from_sync(last_run(frame, str(path), tell), str(path))
    if {"rank", "step_s"} <= set(map(str, frame.columns)):
        return _from_telemetry(last_run(frame, str(path), tell), str(path))
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
    frame = read_table(path, END_COLUMNS)
    names, ends, rows = _rows_by_worker(frame, END_COLUMNS, str(path))
    wanted = lookahead if lookahead is not None else max(map(len, ends))
    for name, row, last in zip(names, ends, rows, strict=True):
        if len(row) < wanted:
            problem = f"worker {name} ends with this row, its prediction {len(row)} of {wanted}"
            remedy = f"give every worker {wanted} rows, or set --lookahead {min(map(len, ends))}"
            raise InputError(f"{path}:row {last + 1}:iteration", problem, remedy)
    return tuple(names), np.array([row[:wanted] for row in ends])


def _from_telemetry(frame: pd.DataFrame, where: str) -> Recorded:
    """Return each rank's steps without their waiting."""
    names, steps, _ = _rows_by_worker(frame, ("rank", "step", "step_s"), where, ascending=False)
    _, waits, _ = _rows_by_worker(frame, ("rank", "step", "wait_s"), where, least=0.0, ascending=False)
    idle = (frame["wait_s"] >= frame["step_s"]).to_numpy()
    if idle.any():
        row = int(np.argmax(idle))
        problem, remedy = f"is {frame['wait_s'].iloc[row]}", "it must be less than the row's step_s"
        raise InputError(f"{where}:row {frame.index[row] + 1}:wait_s", problem, remedy)
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
    worker = numbers(steps, "worker", where, most=MOST_ITERATIONS, whole=True)
    steps = steps.assign(worker=worker.astype(np.int64).astype(str))
    names, ends, _ = _rows_by_worker(steps, ("worker", "step", "time_s"), where)
    _, waits, _ = _rows_by_worker(steps, ("worker", "step", "wait_s"), where, least=0.0, ascending=False)
    lengths = [np.diff(end) - wait[1:] for end, wait in zip(ends, waits, strict=True)]
    for name, own in zip(names, lengths, strict=True):
        if not len(own) or own.min() <= 0:
            problem = "has one step" if not len(own) else "waited longer than a step took"
            raise InputError(
                f"{where}:worker {name}", problem, "give two or more steps of each, as the server wrote them"
            )
    return Recorded(names=tuple(names), lengths_s=lengths, origins_s=np.zeros(len(names)))


def _rows_by_worker(
    frame: pd.DataFrame, columns: Sequence[str], where: str, *, least: float = -MOST_S, ascending: bool = True
) -> tuple[list[str], list[Floats], list[int]]:
    """Return the workers' names in natural order, their values by iteration, and the row of each one's last value.

    ``columns`` are worker, iteration and value. Iterations must follow one another; values, if ``ascending``, too.
    """
    demand_columns(frame, columns, where)
    worker, iteration, value = columns
    table = pd.DataFrame(
        {
            "worker": texts(frame, worker, where),
            "iteration": numbers(frame, iteration, where, most=MOST_ITERATIONS, whole=True),
            "value": numbers(frame, value, where, least=least, most=MOST_S),
        },
        index=frame.index,
    )
    table = table.sort_values(["worker", "iteration"], kind="stable")
    groups = table.groupby("worker", sort=False)
    step = groups["iteration"].diff()
    problems = (
        (step == 0, iteration, "repeats iteration {iteration:g} of worker {worker}", "give each iteration once"),
        (step > 1, iteration, "is iteration {iteration:g} of worker {worker}, which has no iteration {before:g}",
         "the iterations of a worker must follow one another"),
        (ascending & (groups["value"].diff() < 0), value, "is {value!r}, before the previous end of worker {worker}",
         "a worker's iteration ends must ascend"),
    )  # fmt: skip
    for wrong, column, problem, remedy in problems:
        if wrong.any():
            row = int(table.index[wrong].min())
            told = {str(key): value for key, value in table.loc[row].to_dict().items()}
            text = problem.format(before=told["iteration"] - 1, **told)
            raise InputError(f"{where}:row {row + 1}:{column}", text, remedy)
    found = {str(name): rows for name, rows in groups}
    names = sorted(found, key=natural_key)
    return names, [found[name]["value"].to_numpy() for name in names], [int(found[name].index[-1]) for name in names]
