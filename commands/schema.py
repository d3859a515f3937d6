"""``ddltool schema [KIND]``: the JSON Schema of a kind of document, or the list of kinds.

``kinds.toml`` has every kind with its form, what writes it and what reads it; ``docs/formats.md`` has the fields
of those that people write or read by hand, the site those of all.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, TypeAdapter

from ddltool import graph_results, results, simulation_results
from ddltool.artifacts import kind_of, save
from ddltool.calibration import CalibrationTable
from ddltool.commands.options import completed
from ddltool.commands.output import out, print_json, table
from ddltool.companion import CompanionMeta
from ddltool.device import DeviceTable
from ddltool.errors import InputError, did_you_mean
from ddltool.goodput_model import Goodput
from ddltool.graph import GraphDocument
from ddltool.job import Cluster, Job
from ddltool.job_state import JobState
from ddltool.plans import Enforcement, Plan
from ddltool.profiles import ProfileRow
from ddltool.results import KindsResult, ListedKind
from ddltool.telemetry import BalanceEvent, SyncRow, TelemetryRow

FILES, RESULTS = (
    [ListedKind(name=name, form=form, written_by=by, read_by=to) for name, (form, by, to) in kinds.items()]
    for kinds in tomllib.loads(Path(__file__).with_name("kinds.toml").read_text(encoding="utf-8")).values()
)
KINDS = {kind.name: kind for kind in (*FILES, *RESULTS)}
_FILE_MODELS: tuple[type[BaseModel], ...] = (
    *(GraphDocument, Goodput, Cluster, Job, JobState, Plan, Enforcement, TelemetryRow),
    *(CalibrationTable, DeviceTable, CompanionMeta, BalanceEvent),
)
_RESULT_MODELS = [
    model
    for module in (results, graph_results, simulation_results)
    for model in vars(module).values()
    if isinstance(model, type) and issubclass(model, results.Result)
]
MODELS: dict[str, type[BaseModel]] = {
    kind_of(model).removeprefix("ddltool."): model
    for model in (*_RESULT_MODELS, *_FILE_MODELS)
    if "kind" in model.model_fields
} | {"profile": ProfileRow}
"""By kind: what a document is checked by, on reading and before it is written; of tables, a row."""


def schema_of(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a kind, named with or without ``ddltool.``; of one row, for tables.

    Raises InputError naming the nearest kind.
    """
    short = kind.removeprefix("ddltool.")
    if short not in KINDS:
        raise InputError("KIND", f"unknown kind {kind!r}", did_you_mean(short, KINDS))
    if short in MODELS:
        schema = MODELS[short].model_json_schema()
    elif short == "sync":
        schema = {"title": "SyncRow", **TypeAdapter(SyncRow).json_schema()}
    else:  # printed by one command and read by nobody: what every document has, and no promise about the rest
        schema = {
            "title": short,
            "description": f"Written by: {KINDS[short].written_by}. Other fields are described on that command's page.",
            "type": "object",
            "properties": {"kind": {"const": f"ddltool.{short}"}, "schema_version": {"const": 1}},
            "required": ["kind", "schema_version"],
        }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"ddltool.{short}", **schema}


def schema(
    kind: Annotated[str, completed(KINDS)] = "",
    output: Path | None = None,
    as_json: bool = False,
) -> None:
    """Print the JSON Schema of a kind of document (of one row, for tables), or list the kinds."""
    if not kind:
        if output is not None:
            raise InputError("-o", "needs a kind", "name one, such as: ddltool schema plan -o plan.schema.json")
        _list(as_json)
        return
    document = schema_of(kind)
    if output is not None:
        save(document, output)
    if output is None or as_json:
        print_json(document)


def _list(as_json: bool) -> None:
    """Print every kind with its form, what writes it and what reads it."""
    if as_json:
        print_json(KindsResult(kinds=list(KINDS.values())))
        return
    for title, kinds in (("Files", FILES), ("What commands print", RESULTS)):
        rows = [(kind.name, kind.form, kind.written_by, kind.read_by) for kind in kinds]
        out().print(table(title, ("kind", "form", "written by", "read by"), rows, text_columns=4))
