"""``ddltool schema [KIND]``: the JSON Schema of a kind of document, or the list of kinds.

Here stands every kind: its form, what writes it, what reads it, and the model that it is checked by and its schema is
made from. ``docs/formats.md`` has the fields.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import typer
from pydantic import BaseModel, TypeAdapter

from ddltool.artifacts import save
from ddltool.balance_events import BalanceEvent
from ddltool.calibration import CalibrationTable
from ddltool.commands.options import Json, Output
from ddltool.commands.output import out, print_json, table
from ddltool.companion import CompanionMeta
from ddltool.device import DeviceTable
from ddltool.errors import InputError, did_you_mean
from ddltool.goodput_model import Goodput
from ddltool.graph_io import GraphDocument
from ddltool.job import Cluster, Job
from ddltool.job_state import JobState
from ddltool.plan import Enforcement, Plan
from ddltool.profile import ProfileRow
from ddltool.results import RESULTS as RESULT_MODELS
from ddltool.results import KindsResult, ListedKind
from ddltool.telemetry import TelemetryRow

Form = Literal["JSON", "JSON or YAML", "a row of CSV", "a line of JSON Lines", "SQLite"]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of document, named without ``ddltool.``."""

    name: str
    form: Form
    written_by: str
    read_by: str


def _file(name: str, form: Form, written_by: str, read_by: str) -> Kind:
    return Kind(name=name, form=form, written_by=written_by, read_by=read_by)


def _result(name: str, written_by: str, read_by: str = "people and scripts") -> Kind:
    return Kind(name=name, form="JSON", written_by=written_by, read_by=read_by)


FILES = (
    _file("graph", "JSON", "trace -o, zoo --write", "trace, plan --graph, gate, report"),
    _file("profile", "a row of CSV", "profile -o, predict -o", "fit, plan, gate, report"),
    _file("goodput", "JSON", "fit -o", "plan, verify, simulate --goodput, gate, report"),
    _file("cluster", "JSON or YAML", "people", "plan, simulate"),
    _file("job", "JSON or YAML", "people", "plan, companion"),
    _file("job_state", "JSON or YAML", "people, or a job about itself", "simulate --advise"),
    _file("plan", "JSON", "plan -o", "emit, verify, gate, report"),
    _file("enforcement", "JSON", "emit", "the hook, transfers, gate, report"),
    _file(
        "telemetry",
        "a line of JSON Lines",
        "the hook, the goodput agent",
        "fit, verify, plan, companion, barrier, gate, report",
    ),
    _file("calibration", "JSON", "comes with ddltool", "predict, trace, plan"),
    _file(
        "devices",
        "JSON or YAML",
        "comes with ddltool; people; calibrate -o",
        "devices, predict, trace, plan, companion",
    ),
    _file("companion", "SQLite", "companion -o", "companion --lookup, --measured"),
    _file("balance_event", "a line of JSON Lines", "balance(..., events=)", "people and scripts"),
    _file("sync", "a line of JSON Lines", "Server(telemetry=)", "barrier, report"),
    _file("figures", "JSON", "people and scripts", "gate"),
)
RESULTS = (
    _result("network", "profile --network", "gate, report"),
    _result("barrier", "barrier", "gate, report"),
    _result("balance", "balance", "gate, report"),
    _result("verification", "verify", "report"),
    _result("simulation", "simulate", "gate, report"),
    _result("gate", "gate --json", "report"),
    _result("trace", "trace --json", "gate"),
    _result("demo", "demo --json", "gate"),
    _result("advice", "simulate --advise"),
    _result("autoscaling", "simulate --autoscale"),
    _result("comparison", "simulate --compare"),
    _result("determinism", "trace --determinism --json"),
    _result("doctor", "doctor --json"),
    _result("emit", "emit --json"),
    _result("gate_metrics", "gate --metrics --json"),
    _result("hyperparameter_search", "simulate --hyperparameter-search"),
    _result("kinds", "schema --json"),
    _result("overhead", "doctor --overhead --json"),
    _result("report", "report --json"),
    _result("run-difference", "diff-run --json"),
    _result("sweep", "simulate --seeds", "simulate --seeds -o, gate, report"),
    _result("watch", "profile --watch --json"),
    _result("workload", "simulate --generate, --convert, with --json"),
    _result("zoo", "zoo --json"),
)
KINDS: dict[str, Kind] = {kind.name: kind for kind in (*FILES, *RESULTS)}


_FILE_MODELS: tuple[type[Any], ...] = (
    GraphDocument,
    ProfileRow,
    Goodput,
    Cluster,
    Job,
    Plan,
    Enforcement,
    TelemetryRow,
    CalibrationTable,
    DeviceTable,
    CompanionMeta,
    BalanceEvent,
    JobState,
)
MODELS: dict[str, type[BaseModel]] = {
    model.KIND.removeprefix("ddltool."): model for model in (*_FILE_MODELS, *RESULT_MODELS)
}
"""By kind: what a document is checked by, on reading and before it is written."""


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
        schema = _sync_schema()
    else:  # printed by one command and read by nobody: what every document has, and no promise about the rest
        schema = {
            "title": short,
            "description": f"Written by: {KINDS[short].written_by}. Other fields are described on that command's page.",
            "type": "object",
            "properties": {"kind": {"const": f"ddltool.{short}"}, "schema_version": {"const": 1}},
            "required": ["kind", "schema_version"],
        }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"ddltool.{short}", **schema}


def _sync_schema() -> dict[str, Any]:
    """The schema of any row of a synchronisation server's telemetry."""
    from ddltool.runtime.servers.records import BarrierRow, JoinedRow, LeftRow, StepRow, SummaryRow

    rows: TypeAdapter[Any] = TypeAdapter(StepRow | BarrierRow | LeftRow | JoinedRow | SummaryRow)
    return {"title": "SyncRow", **rows.json_schema()}


def schema(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="[KIND]",
            help="graph, profile, goodput, cluster, job, plan, enforcement, telemetry, ...; none: list all kinds.",
            show_default=False,
        ),
    ] = "",
    output: Output = None,
    as_json: Json = False,
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
        print_json(KindsResult(kinds=[ListedKind(**asdict(kind)) for kind in KINDS.values()]))
        return
    for title, kinds in (("Files", FILES), ("What commands print", RESULTS)):
        rows = [(kind.name, kind.form, kind.written_by, kind.read_by) for kind in kinds]
        out().print(table(title, ("kind", "form", "written by", "read by"), rows, text_columns=4))
