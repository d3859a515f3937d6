"""Read and check any artifact, recognised by its kind, its file's name or its columns.

:func:`read_any` returns records, for the report; :func:`read_artifact` returns documents, for gate.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddltool.artifacts import Artifact, ending, kind_of, parse, parse_record, read_document, read_lines
from ddltool.errors import InputError, did_you_mean
from ddltool.goodput_model import Goodput
from ddltool.graph import from_document
from ddltool.graph_results import CommandPlan, PredictResult, TraceResult
from ddltool.island_results import IslandsPlan
from ddltool.plans import Enforcement, Plan
from ddltool.profiles import check_profile, read_profile
from ddltool.results import (
    BalanceResult,
    BarrierResult,
    GateResult,
    LengthsResult,
    NetworkResult,
    StragglersResult,
    Verification,
)
from ddltool.simulation_results import SimulationDocument, SweepDocument
from ddltool.tables import read_table
from ddltool.telemetry import EVENTS, TelemetryRow, check_rows, last_run

if TYPE_CHECKING:
    import pandas as pd

# Suffixes of files that hold tables.
_TABLE_SUFFIXES = (".csv", ".jsonl", ".ndjson")
# Kinds in the order of the report's sections, along the flow of data.
ORDER = (
    *("graph", "profile", "network", "goodput", "plan", "command_plan", "islands_plan", "enforcement", "telemetry"),
    *("verification", "stragglers"),
    *("sync", "barrier", "balance", "lengths", "simulation", "sweep", "gate"),
)
_READ_BACK: tuple[type[Artifact], ...] = (
    *(Plan, CommandPlan, IslandsPlan, Enforcement, Goodput, TraceResult, NetworkResult, BarrierResult, BalanceResult),
    *(LengthsResult, Verification, SimulationDocument, SweepDocument, GateResult, StragglersResult),
)
RECORDS: dict[str, type[Artifact]] = {kind_of(model): model for model in _READ_BACK}
"""The record of each kind that is read back from a file."""
# Those that have a section in the report, by kind without "ddltool.".
_MODELS = {kind: RECORDS[f"ddltool.{kind}"] for kind in ORDER if f"ddltool.{kind}" in RECORDS}
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadArtifact:
    """One artifact: its kind, its file and its checked content."""

    kind: str
    """Without ``ddltool.``."""
    path: Path
    content: Any
    """A Graph, a frame (profile, telemetry), a list of rows (sync), or the kind's record."""
    remark: str = ""
    """For telemetry and sync: which of the file's runs the rows are of; "": the file has one run."""
    folders: int = 0
    """Number of folders that ``name`` shows before the file's name."""

    @property
    def name(self) -> str:
        """The file's name, after its last ``folders`` folders: "a/plan.json" with one."""
        return "/".join(self.path.parts[-1 - self.folders :])


def with_distinct_names(artifacts: Sequence[ReadArtifact]) -> list[ReadArtifact]:
    """Return the artifacts with the fewest ``folders`` in each name that tell files of the same name apart.

    ``a/plan.json`` and ``b/plan.json`` get these names; a single plan is named ``plan.json``.
    """
    renamed = list(artifacts)
    for artifact_index, artifact in enumerate(artifacts):
        others = {
            other.path for other in artifacts if other.path != artifact.path and other.path.name == artifact.path.name
        }
        # One folder more until no other file has this name.
        for folders in range(len(artifact.path.parts) if others else 0):
            renamed[artifact_index] = replace(artifact, folders=folders)
            if all(
                replace(artifact, path=other, folders=folders).name != renamed[artifact_index].name for other in others
            ):
                break
    return renamed


def read(path: str | Path) -> Any:
    """Return the content of an artifact's file.

    That is a Graph; a DataFrame for a profile or telemetry; a list of rows for a server's events; and for any other kind its
    record, such as a Plan. Raises InputError for an unknown kind, and for a broken, wrong or empty file.
    """
    if not isinstance(path, (str, Path)):
        raise InputError("path", f"is a {type(path).__name__}", "give the path of a file")
    return read_any(Path(path)).content


def read_any(path: Path) -> ReadArtifact:
    """Return the artifact in a file. Raises InputError for an unknown kind, and for a broken, wrong or empty file."""
    suffix = ending(path)
    if suffix in (".jsonl", ".ndjson"):
        return _from_rows(path, list(read_lines(path)))
    if suffix == ".csv":
        return ReadArtifact(kind="profile", path=path, content=read_profile(path))
    if suffix not in (".json", ".yaml", ".yml"):
        raise InputError(
            str(path), "is no artifact by its name", "name a .json, .jsonl, .csv or .yaml file (.gz accepted)"
        )
    return _from_document(path)


def _from_document(path: Path) -> ReadArtifact:
    """Return the artifact in a JSON or YAML file, by its ``kind``. Raises InputError for an unknown kind and wrong content.

    The frame of a predicted profile has the whole prediction in ``attrs["prediction"]``.
    """
    document, where = read_document(path), str(path)
    kind_field = document.get("kind")
    kind = str(kind_field).removeprefix("ddltool.")
    if kind == "profile":
        import pandas as pd

        content: Any = pd.DataFrame(checked_document(document, where)["rows"])
        if document.get("predicted") is True:
            content.attrs["prediction"] = parse(document, PredictResult, where)
    elif kind == "graph":
        content = from_document(document, where)
    elif isinstance(kind_field, str) and kind in _MODELS:
        content = parse(document, _MODELS[kind], where)
    else:
        problem = "is missing" if kind_field is None else f"is {kind_field!r}, which has no section"
        raise InputError(f"{where}:kind", problem, did_you_mean(kind[:60], ["graph", "profile", *_MODELS]))
    return ReadArtifact(kind=kind, path=path, content=content)


def _from_rows(path: Path, rows: list[tuple[int, Row]]) -> ReadArtifact:
    """Return the artifact in ``rows``, the (line number, row) pairs of the JSON Lines file ``path``, by its first row.

    It is a profile, or the last run of telemetry or of a server's events (sync). Raises InputError for other rows.
    """
    import pandas as pd

    first = rows[0][1]
    # Rows of earlier versions have no kind; they are recognised by their columns.
    kind_field = first.get("kind")
    if kind_field == "ddltool.sync":
        records, notes = _sync_rows(path, rows), list[str]()
        last_rows = last_run(pd.DataFrame({"run": [row["run"] for row in records]}), str(path), notes.append)
        return ReadArtifact(
            kind="sync",
            path=path,
            content=[records[row_index] for row_index in last_rows.index],
            remark=_run_remark(notes, path),
        )
    if kind_field == "ddltool.telemetry" or (kind_field is None and {"rank", "step_s"} <= first.keys()):
        frame, notes = pd.DataFrame([row for _, row in rows]), list[str]()
        frame = frame.reindex(columns=list(TelemetryRow.model_fields))
        last_rows = check_rows(frame, str(path), notes.append)
        return ReadArtifact(
            kind="telemetry", path=path, content=frame.loc[last_rows.index], remark=_run_remark(notes, path)
        )
    if kind_field == "ddltool.profile" or (kind_field is None and "local_batch_size" in first):
        return ReadArtifact(kind="profile", path=path, content=read_profile(path))
    problem = f"is {kind_field!r}, which has no section" if kind_field is not None else "is missing"
    raise InputError(f"{path}:line {rows[0][0]}:kind", problem, "telemetry, sync and profile rows are known")


def _run_remark(notes: list[str], path: Path) -> str:
    """Return ``notes``, the remarks of ``last_run`` on the file ``path``, as one text without its name; "" for none."""
    return "".join(line.removeprefix(f"{path}: ") for line in notes)


def _sync_rows(path: Path, rows: Iterable[tuple[int, Row]]) -> list[Row]:
    """Return a server's (line number, row) pairs as rows, each checked by the model of its ``event``.

    Raises InputError naming the line and the field.
    """
    records: list[Row] = []
    for line_number, row in rows:
        event = row.get("event")
        if not isinstance(event, str) or event not in EVENTS:
            raise InputError(f"{path}:line {line_number}:event", f"is {event!r}", did_you_mean(str(event)[:60], EVENTS))
        # Checked as JSON text: only there pydantic takes keys of mappings, which are texts, for integers.
        records.append(parse_record(json.dumps(row), EVENTS[event], f"{path}:line {line_number}").model_dump())
    return records


# Artifacts as documents, for gate


def is_table(path: Path) -> bool:
    """Return whether a file's name (for standard input: its beginning) says that it is a table: .csv, .jsonl, .ndjson."""
    return ending(path) in _TABLE_SUFFIXES


def read_artifact(path: Path) -> dict[str, Any]:
    """Return an artifact as a document with its ``kind``; a table becomes ``{kind, rows}``.

    Raises InputError for an unreadable file and for rows that break their schema; other documents are not checked.
    """
    if is_table(path):
        return _read_table_document(path)
    return checked_document(read_document(path), str(path))


def checked_document(document: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the document unchanged, except for a profile, which is rebuilt from its checked ``rows`` alone.

    Raises InputError, named ``where``, for rows that are missing, empty, no mappings, or against the profile's schema.
    """
    if document.get("kind") != "ddltool.profile":
        return document
    import pandas as pd

    rows = document.get("rows")
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise InputError(f"{where}:rows", "is no list of rows", "make the profile again")
    return profile_document(pd.DataFrame(rows), where)


def _read_table_document(path: Path) -> dict[str, Any]:
    """Return a table as a document: the last run of telemetry if it has a column ``compute_s``, else a profile."""
    frame = read_table(path)
    if "compute_s" not in frame.columns:
        return profile_document(frame, str(path))
    frame = frame.loc[check_rows(frame, str(path)).index]
    rows = json.loads(frame.to_json(orient="records", double_precision=15))
    return {"kind": "ddltool.telemetry", "rows": rows}


def profile_document(frame: pd.DataFrame, where: str) -> dict[str, Any]:
    """Return a profile's frame, checked, as a document ``{kind, rows}``. Raises InputError, named ``where``, if it is wrong."""
    return {"kind": "ddltool.profile", "rows": check_profile(frame, where).to_dict("records")}
