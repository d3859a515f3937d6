"""Every kind of document: its form, what writes it, what reads it, and its JSON Schema. ``docs/formats.md`` has the fields.

Those of :func:`checked_models` are validated on reading by the model that the schema is made from. The others are printed by
one command with ``--json`` and read by no other; their schema holds the kind and the version only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ddltool.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from pydantic import BaseModel

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
    _file("plan", "JSON", "plan -o", "emit, verify, plan --current, gate, report"),
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
    _file("speed_weights", "JSON", "balance --save-weights", "balance --weights"),
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


def checked_models() -> dict[str, type[BaseModel]]:
    """Return the models of the kinds that are validated on reading, by name, except sync's, which are several."""
    from ddltool.analyzers.reporting.documents import COMMAND_DOCUMENTS
    from ddltool.artifacts import Artifact
    from ddltool.job_state import JobState
    from ddltool.schemas import MODELS

    more: tuple[type[Artifact], ...] = (JobState, *COMMAND_DOCUMENTS)
    return {**MODELS, **{model.KIND.removeprefix("ddltool."): model for model in more}}


def schema_of(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a kind, named with or without ``ddltool.``. Raises InputError naming the nearest kind."""
    short = kind.removeprefix("ddltool.")
    if short not in KINDS:
        raise InputError("KIND", f"unknown kind {kind!r}", did_you_mean(short, KINDS))
    models = checked_models()
    if short in models:
        schema = models[short].model_json_schema()
    elif short == "sync":
        schema = _sync_schema()
    else:
        schema = _loose_schema(short)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"ddltool.{short}", **schema}


def _sync_schema() -> dict[str, Any]:
    """The schema of any row of a synchronisation server's telemetry."""
    from pydantic import TypeAdapter

    from ddltool.runtime.servers.records import BarrierRow, JoinedRow, LeftRow, StepRow, SummaryRow

    rows: TypeAdapter[Any] = TypeAdapter(StepRow | BarrierRow | LeftRow | JoinedRow | SummaryRow)
    return {"title": "SyncRow", **rows.json_schema()}


def _loose_schema(short: str) -> dict[str, Any]:
    """The schema of a document that one command prints: what every document has, and no promise about the rest."""
    return {
        "title": short,
        "description": f"Written by: {KINDS[short].written_by}. Other fields are described on that command's page.",
        "type": "object",
        "properties": {"kind": {"const": f"ddltool.{short}"}, "schema_version": {"const": 1}},
        "required": ["kind", "schema_version"],
    }
