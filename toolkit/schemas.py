"""The kinds of documents, and their JSON Schemas."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from ddltool.balance_events import BalanceEvent
from ddltool.calibration import CalibrationTable
from ddltool.companion import CompanionMeta
from ddltool.device import DeviceTable
from ddltool.errors import InputError, did_you_mean
from ddltool.goodput_model import Goodput
from ddltool.graph_io import GraphDocument
from ddltool.job import Cluster, Job
from ddltool.job_state import JobState
from ddltool.plan import Enforcement, Plan
from ddltool.profile import ProfileRow
from ddltool.telemetry import TelemetryRow

_WITH_KIND = (
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
MODELS: dict[str, type[BaseModel]] = {model.KIND.removeprefix("ddltool."): model for model in _WITH_KIND}


def schema_of(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a kind, named with or without ``ddltool.``; for profile and telemetry, of one row.

    Raises InputError naming the nearest kind.
    """
    short = kind.removeprefix("ddltool.")
    if short not in MODELS:
        raise InputError("KIND", f"unknown kind {kind!r}", did_you_mean(short, MODELS))
    schema = MODELS[short].model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"ddltool.{short}", **schema}
