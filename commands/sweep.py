"""Sweeps for ``ddltool simulate``: workloads x policies x seeds over local processes or a Ray cluster, resumable."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddltool.commands.sweep_engines import ENGINES, Task, cell_of, run_tasks

if TYPE_CHECKING:
    from ddltool.analyzers.scheduling.simulator import Options
    from ddltool.analyzers.scheduling.sweep import Cell

# Settings that hold one value per file or application: a file of other ones may be taken up, not of changed ones.
_BY_NAME = ("workloads", "traces")


def sweep(
    workloads: Sequence[Path],
    cluster: Path,
    traces: Sequence[Path],
    policies: Sequence[str],
    seeds: Sequence[int],
    options: Options,
    *,
    power: float = -1.0,
    jobs: int = 1,
    engine: str = "local",
    output: Path | None = None,
    table: Path | None = None,
) -> dict[str, Any]:
    """Replay every cell and return the document (kind ``ddltool.sweep``), the cells in the order asked.

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
    settings = _settings(names, cluster, traces, options, power)
    for place in (output, table):
        if place is not None:
            check_writable(place)
    with sole_writer(output):
        records = _earlier(output, settings)
        todo = [_task(cell, names, cluster, traces, options, power) for cell in wanted if cell not in records]
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


def _settings(
    names: Mapping[str, Path], cluster: Path, traces: Sequence[Path], options: Options, power: float
) -> dict[str, Any]:
    """Return what the figures depend on: file contents by their hash. Raises InputError for what cannot be read."""
    from dataclasses import asdict

    from ddltool.artifacts import read_text
    from ddltool.commands.workloads import read_applications, read_cluster, read_workload

    wanted = [job.application for path in names.values() for job in read_workload(path)]
    read_cluster(cluster)
    read_applications(traces, wanted)
    return {
        "workloads": {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in names.items()},
        "cluster": hashlib.sha256(read_text(cluster).encode()).hexdigest(),
        "traces": {name: _traces_hash(traces, name) for name in sorted(set(wanted))},
        "options": asdict(options),
        "power": power,
    }


def _traces_hash(traces: Sequence[Path], application: str) -> str:
    """Return the hash of all that the folders hold of one application."""
    digest = hashlib.sha256()
    for folder in traces:
        for path in sorted((folder / application).glob("*.csv")):
            content = path.read_bytes()
            digest.update(f"{path.name}:{len(content)}:".encode() + content)
    return digest.hexdigest()


def _task(
    cell: Cell, names: Mapping[str, Path], cluster: Path, traces: Sequence[Path], options: Options, power: float
) -> Task:
    from dataclasses import asdict

    return {
        "workload": cell.workload,
        "policy": cell.policy,
        "seed": cell.seed,
        "workload_path": str(names[cell.workload].resolve()),
        "cluster_path": str(cluster.resolve()),
        "traces": [str(folder.resolve()) for folder in traces],
        "power": power,
        "options": asdict(options),
    }


def _earlier(output: Path | None, settings: dict[str, Any]) -> dict[Cell, dict[str, Any]]:
    """Return the cells of an earlier run with these settings, and add to ``settings`` the files that only it had."""
    from ddltool.analyzers.scheduling.sweep import finished
    from ddltool.artifacts import read_document
    from ddltool.errors import InputError

    if output is None or not output.is_file() or output.stat().st_size == 0:
        return {}
    found = read_document(output)
    remedy = "give a new file name, or remove it"
    if found.get("kind") != "ddltool.sweep" or not isinstance(found.get("cells"), list):
        raise InputError(str(output), "is there and is no sweep", remedy)
    old = found.get("settings")
    # Through JSON, as the file has gone: tuples and integers look alike on both sides.
    new = json.loads(json.dumps(settings))
    for name, value in new.items():
        known = old.get(name) if isinstance(old, dict) else None
        if name not in _BY_NAME:
            if known != value:
                raise InputError(f"{output}:settings.{name}", "is not that of this sweep", remedy)
        elif not (isinstance(known, dict) and all(isinstance(each, str) for each in known.values())):
            raise InputError(f"{output}:settings.{name}", "is missing", remedy)
        else:
            changed = [key for key in value if known.get(key, value[key]) != value[key]]
            if changed:
                raise InputError(f"{output}:settings.{name}.{changed[0]}", "has changed since", remedy)
            settings[name] = {**known, **value}
    return finished(found["cells"], str(output))


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
