"""Reads any artifact, told by its kind, its name or its columns, and checked: for the report, and as documents for gate."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from ddltool.analyzers.deciding.feedback import check_rows
from ddltool.analyzers.gating.metrics import RECORDS
from ddltool.artifacts import ending, parse, parse_record, read_document, read_lines
from ddltool.errors import InputError, did_you_mean
from ddltool.graph import from_document
from ddltool.graph_results import MemoryTimeline
from ddltool.profiles import check_profile, read_profile
from ddltool.schema_words import in_words
from ddltool.tables import read_table
from ddltool.telemetry import EVENTS, TelemetryRow, last_run

if TYPE_CHECKING:
    import pandas as pd

# Tables of rows.
_TABLES = (".csv", ".jsonl", ".ndjson")
# Sections stand in the order in which data flow.
ORDER = (
    *("graph", "profile", "network", "goodput", "plan", "enforcement", "telemetry", "verification", "stragglers"),
    *("sync", "barrier", "balance", "simulation", "sweep", "gate"),
)
_MODELS = {kind: RECORDS[f"ddltool.{kind}"] for kind in ORDER if f"ddltool.{kind}" in RECORDS}
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """One artifact: kind without ``ddltool.``, where it was read, and the checked content.

    ``content`` is a Graph, a frame (profile, telemetry), a list of rows (sync), or the kind's record.
    """

    kind: str
    path: Path
    content: Any
    remark: str = ""
    """Where a graph's times come from; which run of several telemetry is of."""
    folders: int = 0

    @property
    def name(self) -> str:
        """The file's name, with as many of its folders as tell it from other files."""
        return "/".join(self.path.parts[-1 - self.folders :])


def told_apart(found: Sequence[Found]) -> list[Found]:
    """Return the artifacts with the fewest folders in their names that make them differ; the same file keeps its name."""
    made = list(found)
    for place, one in enumerate(found):
        others = {other.path for other in found if other.path != one.path and other.path.name == one.path.name}
        for folders in range(len(one.path.parts) if others else 0):
            made[place] = replace(one, folders=folders)
            if all(replace(one, path=other, folders=folders).name != made[place].name for other in others):
                break
    return made


def read(path: str | Path) -> Any:
    """Return the artifact in a file, told by its kind, name or columns: a record, a Graph, a frame, or rows of a server."""
    return read_any(Path(path)).content


def read_any(path: Path) -> Found:
    """Return the artifact in a file. Raises InputError, naming the file, for what is unknown, broken or empty."""
    last = ending(path)
    if last in (".jsonl", ".ndjson"):
        return _from_rows(path, list(read_lines(path)))
    if last == ".csv":
        return Found(kind="profile", path=path, content=read_profile(path))
    if last not in (".json", ".yaml", ".yml"):
        raise InputError(str(path), "is no artifact by its name", "name a .json, .jsonl or .csv file (.gz accepted)")
    return _from_document(path)


def _from_document(path: Path) -> Found:
    document, where = read_document(path), str(path)
    named = document.get("kind")
    kind = str(named).removeprefix("ddltool.")
    if kind == "profile":
        import pandas as pd

        content: Any = pd.DataFrame(checked_document(document, where)["rows"])
        content.attrs["memory"] = _timelines(document, where)
    elif kind == "graph":
        from ddltool.analyzers.loading.timed_graph import timed_somehow  # the cost model, which gates do not need

        content, remark = timed_somehow(from_document(document, where))
        return Found(kind=kind, path=path, content=content, remark=remark)
    elif isinstance(named, str) and kind in _MODELS:
        content = parse(document, _MODELS[kind], where)
    else:
        problem = "is missing" if named is None else f"is {named!r}, which has no section"
        raise InputError(f"{where}:kind", problem, did_you_mean(kind[:60], ["graph", "profile", *_MODELS]))
    return Found(kind=kind, path=path, content=content)


def _timelines(document: dict[str, Any], where: str) -> dict[str, MemoryTimeline]:
    """Return the memory over a pass by device, of a prediction that has it."""
    devices = document.get("devices") if document.get("predicted") is True else None
    held = {name: about.get("memory") for name, about in devices.items()} if isinstance(devices, dict) else {}
    return {
        name: parse_record(one, MemoryTimeline, where, f"devices.{name}.memory") for name, one in held.items() if one
    }


def _from_rows(path: Path, rows: list[tuple[int, Row]]) -> Found:
    """Return the last run of telemetry of the hook or the agent, or of a synchronisation server."""
    import pandas as pd

    first = rows[0][1]
    named = first.get("kind")
    if named == "ddltool.sync":
        made, said = _sync_rows(path, rows), list[str]()
        last = last_run(pd.DataFrame({"run": [row["run"] for row in made]}), str(path), said.append)
        return Found(kind="sync", path=path, content=[made[place] for place in last.index], remark=_which(said, path))
    if named == "ddltool.telemetry" or (named is None and {"rank", "step_s"} <= first.keys()):
        frame, said = pd.DataFrame(_checked(path, rows, TelemetryRow)), list[str]()
        last = check_rows(frame, str(path), said.append)
        return Found(kind="telemetry", path=path, content=frame.loc[last.index], remark=_which(said, path))
    if named == "ddltool.profile" or (named is None and "local_batch_size" in first):
        return Found(kind="profile", path=path, content=read_profile(path))
    shown = f"is {named!r}, which has no section" if named is not None else "is missing"
    raise InputError(f"{path}:line {rows[0][0]}:kind", shown, "telemetry, sync and profile rows are known")


def _which(said: list[str], path: Path) -> str:
    """Return which of several runs of a file it is, as it was told."""
    return "".join(line.removeprefix(f"{path}: ") for line in said)


def _sync_rows(path: Path, rows: list[tuple[int, Row]]) -> list[Row]:
    made: list[Row] = []
    for number, row in rows:
        event = row.get("event")
        if not isinstance(event, str) or event not in EVENTS:
            raise InputError(f"{path}:line {number}:event", f"is {event!r}", did_you_mean(str(event)[:60], EVENTS))
        made += _checked(path, [(number, row)], EVENTS[event])
    return made


def _checked(path: Path, rows: Iterable[tuple[int, Row]], model: type[BaseModel]) -> list[Row]:
    """Return numbered rows as their model gives them. Raises InputError naming line and field."""
    made = []
    for number, row in rows:
        try:
            # As JSON, so that keys of mappings, which are texts there, count as the integers that they stand for.
            made.append(model.model_validate_json(json.dumps(row)).model_dump())
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise InputError(f"{path}:line {number}:{field}", *in_words(first)) from None
    return made


# The same as documents, for what compares them


def is_table(path: Path) -> bool:
    """Return whether a file's name says that it is a table of rows: .csv, .jsonl, either with .gz."""
    return any(suffix in _TABLES for suffix in path.suffixes[-2:])


def read_artifact(path: Path) -> dict[str, Any]:
    """Return an artifact as a document with its ``kind``; tables become ``{kind, rows}``.

    Raises InputError for files that cannot be read and for tables that break their schema.
    """
    if is_table(path):
        return _table(path)
    return checked_document(read_document(path), str(path))


def checked_document(document: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a document as it is, a profile (as ``ddltool profile --json`` prints it) with its rows checked."""
    if document.get("kind") != "ddltool.profile":
        return document
    import pandas as pd

    rows = document.get("rows")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{where}:rows", "is no list of rows", "make the profile again")
    return profile_document(pd.DataFrame(rows), where)


def _table(path: Path) -> dict[str, Any]:
    frame = read_table(path)
    if "compute_s" not in frame.columns:
        return profile_document(frame, str(path))
    frame = frame.loc[check_rows(frame, str(path)).index]
    rows = json.loads(frame.to_json(orient="records", double_precision=15))
    _checked(path, enumerate(rows, start=1), TelemetryRow)
    return {"kind": "ddltool.telemetry", "rows": rows}


def profile_document(frame: pd.DataFrame, where: str) -> dict[str, Any]:
    """Return a profile's frame as a document. Raises InputError where it breaks the schema."""
    return {"kind": "ddltool.profile", "rows": check_profile(frame, where).to_dict("records")}
