"""Measurements of others as rows of profile.csv: AdaptDL's tables, telemetry, profiler traces, native profiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddltool.analyzers.goodput.observations import TELEMETRY_NUMBERS, import_steps, import_table, kind_of
from ddltool.analyzers.oracle.kineto import read_steps
from ddltool.artifacts import ending
from ddltool.errors import InputError
from ddltool.outputs import demand_once
from ddltool.results import ImportedFile
from ddltool.tables import read_table
from ddltool.telemetry import runs_of

if TYPE_CHECKING:
    import pandas as pd

# Files of earlier versions lack these.
_MAY_BE_MISSING = ("memory_bytes", "passes")


def import_files(
    files: Sequence[Path],
    *,
    device: str | None = None,
    batch_size: int | None = None,
    num_nodes: int | None = None,
    num_replicas: int | None = None,
    unnamed: str = "",
) -> tuple[pd.DataFrame, list[ImportedFile]]:
    """Return the rows of all files, in their order, and what each gave. Nothing is returned when one of them is bad.

    ``device`` names the device of all rows, ``unnamed`` that of rows that name none; the three numbers are what a profiler
    trace does not always say. Raises InputError naming file, row and column; also for a file given twice.
    """
    import pandas as pd

    if not files:
        raise InputError("FILE", "is missing", "give a placements.csv, telemetry.jsonl, trace or profile.csv")
    parts, sources = [], []
    demand_once(files, "its rows would count double")
    for path in files:
        last = ending(path)
        if last == ".json":
            steps = read_steps(path)
            named = device or steps.device or unnamed or None
            numbers = {"local_batch_size": batch_size, "num_nodes": num_nodes, "num_replicas": num_replicas}
            parts.append(import_steps(steps, device=named, **numbers))
            source = ImportedFile(path=str(path), kind="trace", rows=len(steps.step_time_s))
            sources.append(source.model_copy(update={"remarks": [*steps.remarks]}) if steps.remarks else source)
            continue
        if last not in (".csv", ".jsonl", ".ndjson"):
            raise InputError(
                str(path), f"ends in {last or 'nothing'}", "give a .csv, .jsonl or .json file (or .gz of one)"
            )
        frame = read_table(path) if last == ".csv" else _telemetry(path)
        kind = kind_of([str(name) for name in frame.columns], str(path))
        named = device
        if unnamed and "device" in frame.columns:
            frame["device"] = frame["device"].fillna("").astype(str).str.strip().replace("", unnamed)
        elif unnamed:
            named = device or unnamed
        parts.append(import_table(frame, str(path), named))
        source = ImportedFile(path=str(path), kind=kind, rows=len(frame))
        count = runs_of(frame).nunique() if kind == "telemetry" else 1
        sources.append(source.model_copy(update={"remarks": [f"all of its {count} runs"]}) if count > 1 else source)
    # The tables say these of each row.
    given = {"--batch-size": batch_size, "--nodes": num_nodes, "--replicas": num_replicas}
    said = [name for name, value in given.items() if value is not None]
    if said and all(source.kind != "trace" for source in sources):
        raise InputError(said[0], f"has no part in the import of {sources[0].path}", "it is for a profiler trace")
    return pd.concat(parts, ignore_index=True), sources


def _telemetry(path: Path) -> pd.DataFrame:
    """Return the rows of a telemetry file. Raises InputError for lines of another kind and for keys that are missing."""
    frame = read_table(path)
    if "kind" in frame.columns:
        other = (frame["kind"].fillna("ddltool.telemetry") != "ddltool.telemetry").to_numpy()
        if other.any():
            line = int(other.argmax())
            problem = f"is {frame['kind'].iloc[line]!r}"
            raise InputError(f"{path}:line {line + 1}", problem, "every line is a ddltool.telemetry object")
    for name in TELEMETRY_NUMBERS:
        if name not in frame.columns and name not in _MAY_BE_MISSING:
            raise InputError(f"{path}:line 1:{name}", "is missing", "it must be a finite number >= 0")
    return frame
