"""Reads any artifact, told by its kind, its name or its columns, and checked: for the report, and as documents for gate."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from ddltool.analyzers.deciding.feedback import check_rows
from ddltool.artifacts import Artifact, kind_of, parse, read_document, read_lines
from ddltool.errors import InputError, did_you_mean
from ddltool.goodput_model import Goodput
from ddltool.graph_io import from_document
from ddltool.plan import Enforcement, Plan
from ddltool.profile import check_profile, read_profile, read_table
from ddltool.results import SHOWN
from ddltool.schema_words import in_words
from ddltool.telemetry import TelemetryRow

if TYPE_CHECKING:
    import pandas as pd

# Tables of rows.
_TABLES = (".csv", ".jsonl", ".ndjson")
# Sections stand in the order in which data flow.
ORDER = (
    "graph",
    "profile",
    "network",
    "goodput",
    "plan",
    "enforcement",
    "telemetry",
    "verification",
    "sync",
    "barrier",
    "balance",
    "simulation",
    "sweep",
    "gate",
)
# Keys that tell documents without a kind, as hands and older versions write them.
_TELLING = {
    "graph": {"ops", "mode"},
    "goodput": {"params", "rmsle"},
    "plan": {"assignments", "strategy", "iteration_s"},
    "enforcement": {"ranks", "world_size", "total_batch_size"},
    "simulation": {"policies", "workload", "gpus"},
    "sweep": {"cells", "cells_wanted", "cells_failed"},
    "barrier": {"algorithms", "bsp", "tradeoff"},
    "balance": {"predictors", "equal_split", "oracle"},
    "gate": {"checks", "passed", "artifact"},
    "network": {"pairs", "processes", "bandwidth_bytes_per_s"},
    "verification": {"plan", "telemetry", "iteration", "ranks"},
    "profile": {"rows", "devices"},
}
_EVENTS = ("step", "barrier", "left", "joined", "summary")
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """One artifact: kind without ``ddltool.``, where it was read, and the checked content.

    ``content`` is a Graph, a frame (profile, telemetry), a list of rows (sync), or the kind's record.
    """

    kind: str
    path: Path
    content: Any
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


def read_any(path: Path) -> Found:
    """Return the artifact in a file. Raises InputError, naming the file, for what is unknown, broken or empty."""
    suffixes = [suffix for suffix in path.suffixes if suffix != ".gz"]
    last = suffixes[-1].lower() if suffixes else ""
    if last in (".jsonl", ".ndjson"):
        return _from_rows(path, list(read_lines(path)))
    if last == ".csv":
        return Found(kind="profile", path=path, content=read_profile(path))
    if last not in (".json", ".yaml", ".yml"):
        raise InputError(str(path), "is no artifact by its name", "name a .json, .jsonl or .csv file (.gz accepted)")
    return _from_document(path)


def _from_document(path: Path) -> Found:
    document = read_document(path)
    kind = _kind_of(document, str(path))
    if kind == "profile":
        import pandas as pd

        checked = checked_document({**document, "kind": "ddltool.profile"}, str(path))
        return Found(kind=kind, path=path, content=pd.DataFrame(checked["rows"]))
    return Found(kind=kind, path=path, content=_parsers()[kind]({"kind": f"ddltool.{kind}", **document}, str(path)))


def _kind_of(document: Mapping[str, Any], where: str) -> str:
    """Return the kind that a document names, or that its keys tell."""
    shown = [name for name in ORDER if name not in ("telemetry", "sync")]
    named = document.get("kind")
    if named is None:
        for kind, keys in _TELLING.items():
            if keys <= document.keys():
                return kind
        raise InputError(where, "is no artifact that is known", f"known: {', '.join(ORDER)}")
    kind = str(named).removeprefix("ddltool.")
    if not isinstance(named, str) or kind not in shown:
        raise InputError(f"{where}:kind", f"is {named!r}, which has no section", did_you_mean(kind[:60], shown))
    return kind


def _parsers() -> dict[str, Callable[[dict[str, Any], str], Any]]:
    """Return by kind what checks a document."""

    def parser(model: type[Artifact]) -> Callable[[dict[str, Any], str], Any]:
        return lambda document, where: parse(document, model, where)

    models: list[type[Artifact]] = [Goodput, Plan, Enforcement, *SHOWN]
    made = {kind_of(model).removeprefix("ddltool."): parser(model) for model in models}
    return {**made, "graph": from_document}


def _from_rows(path: Path, rows: list[tuple[int, Row]]) -> Found:
    """Return telemetry of the hook or the agent, or of a synchronisation server."""
    first = rows[0][1]
    named = first.get("kind")
    if named == "ddltool.sync" or (named is None and first.get("event") in _EVENTS):
        return Found(kind="sync", path=path, content=_sync_rows(path, rows))
    if named == "ddltool.telemetry" or (named is None and {"rank", "step_s"} <= first.keys()):
        import pandas as pd

        frame = pd.DataFrame(_checked(path, rows, lambda row: TelemetryRow))
        check_rows(frame, str(path))
        return Found(kind="telemetry", path=path, content=frame)
    if named == "ddltool.profile" or (named is None and "local_batch_size" in first):
        return Found(kind="profile", path=path, content=read_profile(path))
    shown = f"is {named!r}, which has no section" if named is not None else "is missing"
    raise InputError(f"{path}:line {rows[0][0]}:kind", shown, "telemetry, sync and profile rows are known")


def _sync_rows(path: Path, rows: list[tuple[int, Row]]) -> list[Row]:
    from ddltool.runtime.servers.records import BarrierRow, JoinedRow, LeftRow, StepRow, SummaryRow

    models: dict[Any, type[BaseModel]] = {
        "step": StepRow,
        "barrier": BarrierRow,
        "left": LeftRow,
        "joined": JoinedRow,
        "summary": SummaryRow,
    }
    for number, row in rows:
        event = row.get("event")
        if not isinstance(event, str) or event not in models:
            raise InputError(f"{path}:line {number}:event", f"is {event!r}", did_you_mean(str(event)[:60], models))
    return _checked(path, rows, lambda row: models[row["event"]])


def _checked(path: Path, rows: list[tuple[int, Row]], model_of: Callable[[Row], type[BaseModel]]) -> list[Row]:
    """Return the rows as their models give them. Raises InputError naming line and field."""
    made = []
    for number, row in rows:
        try:
            # As JSON, so that keys of mappings, which are texts there, count as the integers that they stand for.
            made.append(model_of(row).model_validate_json(json.dumps(row)).model_dump())
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
    if document.get("kind") == "ddltool.profile":
        return profile_document(_frame(document.get("rows"), where), where)
    return document


def _table(path: Path) -> dict[str, Any]:

    frame = read_table(path)
    if "compute_s" not in frame.columns:
        return profile_document(frame, str(path))

    check_rows(frame, str(path))
    rows = json.loads(frame.to_json(orient="records", double_precision=15))
    for number, row in enumerate(rows, start=1):
        try:
            TelemetryRow.model_validate(row)
        except ValidationError as error:
            first = error.errors()[0]
            column = ".".join(map(str, first["loc"]))
            raise InputError(f"{path}:line {number}:{column}", *in_words(first)) from None
    return {"kind": "ddltool.telemetry", "rows": rows}


def _frame(rows: Any, where: str) -> pd.DataFrame:
    import pandas as pd

    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{where}:rows", "is no list of rows", "make the profile again")
    return pd.DataFrame(rows)


def profile_document(frame: pd.DataFrame, where: str) -> dict[str, Any]:
    """Return a profile's frame as a document. Raises InputError where it breaks the schema."""
    checked = check_profile(frame, where)
    return {"kind": "ddltool.profile", "rows": checked.to_dict("records")}
