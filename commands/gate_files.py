"""Reading what ``ddltool gate`` compares: artifacts, and the rules of a ``ddltool.toml``."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, PrivateAttr, ValidationError

from ddltool.analyzers.deciding.feedback import check_rows
from ddltool.analyzers.gating.metrics import EXTRACTORS, Figures, combine
from ddltool.analyzers.gating.rules import Rule, default_rules, parse_rules
from ddltool.artifacts import Record, parse_record, read_document, read_text
from ddltool.errors import InputError, did_you_mean
from ddltool.profile import check_profile, read_table
from ddltool.schema_words import in_words
from ddltool.telemetry import TelemetryRow

if TYPE_CHECKING:
    import pandas as pd


CONFIG_NAME = "ddltool.toml"
_TABLES = (".csv", ".jsonl", ".ndjson")


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


def figures_of(paths: Sequence[Path]) -> Figures:
    """Return the metrics of files that measure or predict the same thing. Raises InputError for two kinds."""
    return combine([(read_artifact(path), str(path)) for path in paths])


class GateConfig(Record):
    """The ``[gate]`` table of a ``ddltool.toml``: rules by kind (without ``ddltool.``), level and baseline."""

    rules: dict[str, Annotated[list[str], Field(min_length=1)]] = Field(default_factory=dict)
    level: Annotated[float, Field(gt=0, lt=1)] | None = None
    baseline: str | None = None
    _where: str = PrivateAttr("")

    @property
    def where(self) -> str:
        """The file that was read."""
        return self._where


def read_config(path: Path) -> GateConfig:
    """Return the ``[gate]`` table of a TOML file. Raises InputError naming what is unknown or of the wrong type."""
    try:
        table = tomllib.loads(read_text(path)).get("gate")
    except tomllib.TOMLDecodeError as error:
        raise InputError(str(path), f"is not valid TOML ({error})", "mind the quotes and brackets") from None
    if not isinstance(table, dict):
        raise InputError(str(path), "has no table [gate]", "write [gate.rules] with lists of rules by kind")
    found = parse_record(table, GateConfig, str(path), "gate")
    known = {kind.removeprefix("ddltool.") for kind in EXTRACTORS}
    for kind in found.rules:
        if kind not in known:
            raise InputError(f"{path}:gate.rules", f"unknown kind {kind!r}", did_you_mean(kind, known))
    folder = str(path.parent / found.baseline) if found.baseline is not None else None
    made = found.model_copy(update={"baseline": folder})
    made._where = str(path)
    return made


def rules_for(kind: str, given: Sequence[str], config: GateConfig | None) -> tuple[list[Rule], str]:
    """Return the rules that hold, and where they come from: as given, else the configuration's, else the defaults."""
    short = kind.removeprefix("ddltool.")
    if given:
        return parse_rules(given, "--rule"), "--rule"
    if config is not None and short in config.rules:
        return parse_rules(config.rules[short], f"{config.where}:gate.rules.{short}"), config.where
    return default_rules(kind), f"defaults for {short}"
