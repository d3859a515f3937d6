"""Sweeps for ``ddltool simulate``: workloads x policies x seeds over local processes or a Ray cluster, resumable."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddltool.commands.sweep_engines import ENGINES, Task, cell_of, run_tasks
from ddltool.commands.sweep_settings import Setup, earlier_cells, settings_of

if TYPE_CHECKING:
    from ddltool.analyzers.scheduling.simulator import Options
    from ddltool.analyzers.scheduling.sweep import Cell
    from ddltool.commands.workload_inputs import FittedText


def sweep(
    workloads: Sequence[Path],
    cluster: Path,
    traces: Sequence[Path],
    policies: Sequence[str],
    seeds: Sequence[int],
    options: Options,
    *,
    models: Sequence[FittedText] = (),
    prices: Mapping[str, float] | None = None,
    power: float = -1.0,
    jobs: int = 1,
    engine: str = "local",
    output: Path | None = None,
    table: Path | None = None,
) -> dict[str, Any]:
    """Replay every cell and return the document (kind ``ddltool.sweep``), the cells in the order asked.

    ``models``: fitted models in place of the traces of their applications; ``prices``: per GPU hour, by type.
    ``jobs`` local processes (``engine="local"``; 1: this process), or as many as a Ray cluster holds. ``output`` is
    rewritten after every cell and taken up again when it is there: what it holds is not replayed, what failed is tried
    again. ``table``: the same as CSV. Raises InputError before anything runs for input that cannot be read, for an
    ``output`` of other settings and for one that another sweep is writing.
    """
    from ddltool.analyzers.scheduling.sweep import cells
    from ddltool.artifacts import check_writable
    from ddltool.commands.sweep_lock import sole_writer
    from ddltool.errors import InputError, did_you_mean

    if engine not in ENGINES:
        raise InputError("--engine", f"unknown engine {engine!r}", did_you_mean(engine, ENGINES))
    if jobs < 1:
        raise InputError("--jobs", f"is {jobs}", "at least 1")
    names = _names(workloads)
    wanted = cells(list(names), policies, seeds)
    setup = Setup(cluster=cluster, traces=traces, models=models, options=options, power=power, prices=prices)
    settings = settings_of(names, setup)
    for place in (output, table):
        if place is not None:
            check_writable(place)
    with sole_writer(output):
        records = earlier_cells(output, settings)
        todo = [_task(cell, names, setup) for cell in wanted if cell not in records]
        document = _replay(todo, records, wanted, settings, jobs, engine, output)
    if table is not None:
        _write_csv(document, table)
    return document


def _replay(
    todo: Sequence[Task],
    records: dict[Cell, dict[str, Any]],
    wanted: Sequence[Cell],
    settings: Mapping[str, Any],
    jobs: int,
    engine: str,
    output: Path | None,
) -> dict[str, Any]:
    """Replay what is to do, keeping ``output`` up to date, and return the whole document."""
    from ddltool.commands.output import note, progress

    there = len(wanted) - len(todo)
    if there:
        note(f"{output}: {there} of {len(wanted)} replays are there already")
    with progress("replays", total=len(wanted)) as advance:
        advance(there, "")
        for ended, record in enumerate(run_tasks(todo, jobs, engine), start=1):
            records[cell_of(record)] = record
            if record["error"]:
                note(f"failed: {cell_of(record)}: {record['error']}")
            advance(there + ended, str(cell_of(record)))
            if output is not None:
                _keep(_document(settings, records, wanted), output)
    document = _document(settings, records, wanted)
    if output is not None:
        _keep(document, output)
    return document


def _names(workloads: Sequence[Path]) -> dict[str, Path]:
    """Return each workload's name (its file's, or the path where two files are named alike) and file."""
    from ddltool.errors import InputError

    stems = [path.stem for path in workloads]
    made: dict[str, Path] = {}
    for path in workloads:
        name = path.stem if stems.count(path.stem) == 1 else str(path)
        if name in made:
            raise InputError(str(path), "is given twice", "give each workload once")
        made[name] = path
    return made


def _task(cell: Cell, names: Mapping[str, Path], setup: Setup) -> Task:
    return {
        "workload": cell.workload,
        "policy": cell.policy,
        "seed": cell.seed,
        "workload_path": str(names[cell.workload].resolve()),
        "cluster_path": str(setup.cluster.resolve()),
        "traces": [str(folder.resolve()) for folder in setup.traces],
        "models": [[model.application, str(Path(model.file).resolve()), model.fields] for model in setup.models],
        "prices": None if setup.prices is None else dict(setup.prices),
        "power": setup.power,
        "options": asdict(setup.options),
    }


def _document(
    settings: Mapping[str, Any], records: Mapping[Cell, dict[str, Any]], wanted: Sequence[Cell]
) -> dict[str, Any]:
    asked = set(wanted)
    return {
        "kind": "ddltool.sweep",
        "schema_version": 1,
        "settings": settings,
        "cells_wanted": len(wanted),
        "cells_failed": sum(record["error"] is not None for record in records.values()),
        "cells": [
            *(records[cell] for cell in wanted if cell in records),
            # What an earlier run with other policies or seeds left in the file stays there.
            *(record for cell, record in records.items() if cell not in asked),
        ],
    }


def _keep(document: Mapping[str, Any], output: Path) -> None:
    from ddltool.artifacts import save

    save(dict(document), output)


def _write_csv(document: Mapping[str, Any], path: Path) -> None:
    from ddltool.analyzers.scheduling.sweep import COLUMNS, rows
    from ddltool.artifacts import write_text

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows(document["cells"]))
    write_text(path, text.getvalue())
