"""Reads what ``ddltool simulate`` takes: a workload, a cluster and folders of measured traces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddltool.errors import InputError, did_you_mean

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from ddltool.analyzers.scheduling.cluster import ClusterSpec
    from ddltool.analyzers.scheduling.job import JobSpec
    from ddltool.analyzers.scheduling.truth import Application, StepTimes, Validation

    Floats = NDArray[np.float64]

WORKLOAD = ("name", "time", "application", "num_replicas", "batch_size")
VALIDATION = ("progress", "iteration", "metric", "grad_sqr", "grad_var")
_MOST_GPUS = 100_000
# Ten years: later times are in another unit, or a typing error.
_LATEST_S = 315_360_000.0
# Nothing trains with steps longer than an hour: such times are in another unit.
_LONGEST_STEP_S = 3600.0


def read_cluster(path: Path) -> ClusterSpec:
    """Return the nodes of a cluster.yaml (kind ``ddltool.cluster``), in file order."""
    from ddltool.analyzers.scheduling.cluster import ClusterSpec
    from ddltool.artifacts import load
    from ddltool.job import Cluster

    cluster = load(path, Cluster)
    total = sum(group.count * group.devices.count for group in cluster.nodes)
    if not 0 < total <= _MOST_GPUS:
        raise InputError(f"{path}:nodes", f"have {total} GPUs", f"from 1 to {_MOST_GPUS}")
    groups = [(group.devices.count, group.devices.type) for group in cluster.nodes for _ in range(group.count)]
    return ClusterSpec(gpus=tuple(count for count, _ in groups), gpu_types=tuple(kind for _, kind in groups))


def read_workload(path: Path) -> list[JobSpec]:
    """Return the jobs of a CSV with the columns ``name,time,application,num_replicas,batch_size``, by row.

    Raises InputError naming row and column: missing columns, names that stand twice, anything that is no number where
    one is needed.
    """
    from ddltool.analyzers.scheduling.job import JobSpec

    frame = read_columns(path, WORKLOAD)
    times = read_numbers(frame, "time", path, least=0.0)
    late = np.flatnonzero(times > _LATEST_S)
    if late.size:
        raise InputError(
            f"{path}:row {late[0] + 1}:time", f"is {times[late[0]]:g}", f"seconds, at most {_LATEST_S:.0f} (ten years)"
        )
    replicas = read_numbers(frame, "num_replicas", path, least=1.0, whole=True)
    batches = read_numbers(frame, "batch_size", path, least=1.0, whole=True)
    names, kinds = (_texts(frame, column, path) for column in ("name", "application"))
    seen: dict[str, int] = {}
    for row, name in enumerate(names, start=1):
        if name in seen:
            raise InputError(f"{path}:row {row}:name", f"{name!r} stands in row {seen[name]} too", "name each job once")
        seen[name] = row
    return [
        JobSpec(name=name, submit_s=time, application=kind, num_replicas=int(count), batch_size=int(batch))
        for name, time, kind, count, batch in zip(
            names, times.tolist(), kinds, replicas.tolist(), batches.tolist(), strict=True
        )
    ]


def _texts(frame: pd.DataFrame, column: str, path: Path) -> list[str]:
    """Return a column as texts, none of them empty."""
    empty = frame[column].isna().to_numpy()
    if empty.any():
        raise InputError(f"{path}:row {empty.argmax() + 1}:{column}", "is empty, or NA", "give a name")
    return [str(value) for value in frame[column].tolist()]


def read_applications(folders: Sequence[Path], wanted: Sequence[str]) -> dict[str, Application]:
    """Return the applications ``wanted`` from folders that hold one folder of traces each.

    An application's folder holds ``placements.csv`` and ``scalability.csv`` for any GPU type, or
    ``placements-TYPE.csv`` and ``scalability-TYPE.csv`` per type, and ``validation-BATCH.csv``; what one folder lacks
    may stand in a later one. Raises InputError naming the file, row and column.
    """
    from ddltool.analyzers.scheduling.truth import Application

    for folder in folders:
        if not folder.is_dir():
            raise InputError(str(folder), "is no folder", "give a folder of AdaptDL traces: APP/placements.csv, ...")
    made = {}
    for name in dict.fromkeys(wanted):
        places = [folder / name for folder in folders if (folder / name).is_dir()]
        if not places:
            known = {path.name for folder in folders for path in folder.iterdir() if path.is_dir()}
            shown = ", ".join(map(str, folders))
            raise InputError(shown, f"holds no traces of application {name!r}", did_you_mean(name, known))
        times: dict[str, StepTimes] = {}
        for place in places:
            times = {**_step_times(place), **times}
        runs = next((found for found in map(_validation, places) if found), [])
        if not times:
            raise InputError(str(places[0]), "holds no placements.csv", "give placements.csv or placements-TYPE.csv")
        if not runs:
            raise InputError(str(places[0]), "holds no validation-BATCH.csv", "give one per measured total batch size")
        made[name] = Application(name, times, runs)
    return made


def _step_times(place: Path) -> dict[str, StepTimes]:
    """Return the step times of each GPU type in one application's folder."""
    from ddltool.analyzers.scheduling.truth import ANY_TYPE, StepTimes

    made = {}
    for path in sorted(place.glob("placements*.csv")):
        suffix = path.stem.removeprefix("placements")
        placements = read_columns(path, ("placement", "local_bsz", "step_time", "sync_time"), ended=True)
        digits = []
        for row, value in enumerate(placements["placement"].tolist(), start=1):
            text = str(value)
            if not (text.isascii() and text.isdigit()) or int(text) == 0:
                raise InputError(f"{path}:row {row}:placement", f"is {text}", "one digit per node, such as 44")
            digits.append(tuple(map(int, text)))
        other = place / f"scalability{suffix}.csv"
        columns = ("num_nodes", "num_replicas", "local_bsz", "step_time", "sync_time")
        scalability = read_columns(other, columns, ended=True) if other.is_file() else None
        made[suffix.removeprefix("-") or ANY_TYPE] = StepTimes(
            where=str(path),
            placements=digits,
            local_batch_size=read_numbers(placements, "local_bsz", path, least=1.0),
            times_s=_times(placements, path),
            scalability=np.column_stack([read_numbers(scalability, name, other, least=1.0) for name in columns[:3]])
            if scalability is not None
            else np.empty((0, 3)),
            scalability_times_s=_times(scalability, other) if scalability is not None else np.empty((0, 2)),
        )
    return made


def _times(frame: pd.DataFrame, path: Path) -> Floats:
    """Return step and sync times (n, 2)."""
    step = read_numbers(frame, "step_time", path, least=0.0)
    sync = read_numbers(frame, "sync_time", path, least=0.0)
    bad = np.flatnonzero((sync >= step) | (step <= 0))
    if bad.size:
        row = int(bad[0])
        problem = f"is {sync[row]:g} with a step time of {step[row]:g}"
        raise InputError(f"{path}:row {row + 1}:sync_time", problem, "it is a part of the step, which is > 0")
    slow = np.flatnonzero(step > _LONGEST_STEP_S)
    if slow.size:
        row = int(slow[0])
        remedy = f"seconds, at most {_LONGEST_STEP_S:.0f} (an hour)"
        raise InputError(f"{path}:row {row + 1}:step_time", f"is {step[row]:g}", remedy)
    return np.column_stack([step, sync])


def _validation(place: Path) -> list[Validation]:
    from ddltool.analyzers.scheduling.truth import Validation

    runs: list[Validation] = []
    first: tuple[Path, int] | None = None
    for path in sorted(place.glob("validation-*.csv")):
        text = path.stem.removeprefix("validation-")
        if not text.isdigit() or int(text) == 0:
            raise InputError(str(path), f"{text!r} is no batch size", "name it validation-BATCH.csv, such as -128")
        frame = read_columns(path, VALIDATION, ended=True)
        columns = {name: read_numbers(frame, name, path, least=0.0) for name in VALIDATION}
        if not (columns["grad_sqr"] + columns["grad_var"] > 0).all():
            row = int(np.flatnonzero(columns["grad_sqr"] + columns["grad_var"] <= 0)[0])
            raise InputError(f"{path}:row {row + 1}:grad_sqr", "and grad_var are 0", "one of them must be above 0")
        first = first or (path, len(frame))
        if len(frame) != first[1]:
            short, long = sorted([(len(frame), path), (first[1], first[0])])
            problem = f"has {short[0]} epochs; {long[1].name} has {long[0]}"
            raise InputError(str(short[1]), problem, "as many in all validation files; this one may be cut off")
        runs.append(Validation(batch_size=int(text), **columns))
    return runs


def read_columns(path: Path, columns: Sequence[str], *, ended: bool = False) -> pd.DataFrame:
    """Return a table that has these columns. Raises InputError for one that is missing and for rows of other lengths.

    ``ended``: the last row must have its end of line, so that a file that was cut off within a number is refused.
    """
    from ddltool.commands.workload_tables import read_rows

    frame = read_rows(path, columns, ended=ended)
    missing = [name for name in columns if name not in frame.columns]
    if missing:
        raise InputError(f"{path}:{missing[0]}", "column is missing", f"expected columns {', '.join(columns)}")
    return frame


def read_numbers(frame: pd.DataFrame, column: str, path: Path, *, least: float, whole: bool = False) -> Floats:
    """Return a column as finite numbers of at least ``least``."""
    import pandas as pd

    made = pd.to_numeric(frame[column], errors="coerce").to_numpy(dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(made) | (made < least) | (whole & (made != np.floor(made))))
    if bad.size:
        kind = "a whole number" if whole else "a number"
        bound = math.floor(least) if least == math.floor(least) else least
        raise InputError(f"{path}:row {bad[0] + 1}:{column}", f"is {frame[column].iloc[bad[0]]}", f"{kind} >= {bound}")
    return made
