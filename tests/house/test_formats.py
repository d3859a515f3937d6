"""``ddltool show schema`` knows every kind that the code writes, docs/formats.md what people write; documents keep to it."""

from __future__ import annotations

import csv
import json
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddltool import artifacts, companion, plain_values
from ddltool.analyzers.answers.emitting import enforcement
from ddltool.commands.show import FILES, KINDS, MODELS, RESULTS, schema_of
from ddltool.job import Cluster, Job
from ddltool.job_state import JobState
from tests.conftest import Result
from tests.house.test_docs import REPO, put

jsonschema = pytest.importorskip("jsonschema")
Cli = Callable[..., Result]
PAGE = (REPO / "docs" / "formats.md").read_text()
# In quotes where a kind is given: "kind": "ddltool.x", kind: Literal["ddltool.x"]. One word after it is not a module's name.
_WRITTEN = re.compile(r"""(?:"kind": |kind=|kind: Literal\[)"ddltool\.([a-z_-]+)\"""")


def kinds_in(folder: str) -> set[str]:
    texts = (path.read_text(encoding="utf-8") for path in (REPO / folder).rglob("*.py"))
    return {kind for text in texts for kind in _WRITTEN.findall(text)}


def section(kind: str) -> str:
    found = re.search(rf"^### {re.escape(kind)}$(.*?)(?=^##)", PAGE, re.M | re.S)
    assert found, f"docs/formats.md has no section on {kind}"
    return found[1]


@pytest.mark.parametrize("folder", ["toolkit", "commands"])
def test_every_kind_in_the_code_is_known(folder: str) -> None:
    found = kinds_in(folder)
    assert len(found) >= 1
    assert found <= set(KINDS), f"add to commands/kinds.toml: {sorted(found - set(KINDS))}"


def test_every_kind_is_in_the_code() -> None:
    written = {kind for folder in ("toolkit", "analyzers", "runtime", "commands") for kind in kinds_in(folder)}
    assert set(KINDS) - written == {"figures"}  # written by people


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_has_a_valid_schema(kind: str, cli: Cli) -> None:
    document = cli("show", "schema", kind).document
    assert document["$id"] == f"ddltool.{kind}"
    jsonschema.Draft202012Validator.check_schema(document)


def limits_of(kind: str) -> list[str]:
    """Return what the page is to say of a kind of file: bytes, items and seconds as the readers have them."""
    if kind == "companion":
        return [f"{companion._LONGEST_VALUE >> 20} MiB a value", f"{companion._QUERY_S:.0f} s a query"]
    if "JSON Lines" in KINDS[kind].form or kind == "sync":
        return [f"{artifacts.LONGEST_STREAM >> 30} GiB", f"{artifacts._LONGEST_LINE >> 20} MiB a line"]
    held = {
        "job": (Job, "devices", "lines of devices"),
        "cluster": (Cluster, "nodes", "groups of nodes"),
        "job_state": (JobState, "held", "nodes of a job_state"),
    }
    items = [f"{enforcement._MOST_RANKS:,} processes"] if kind == "enforcement" else []
    if kind in held:
        model, name, what = held[kind]
        most = next(each.max_length for each in model.model_fields[name].metadata if hasattr(each, "max_length"))
        items = [f"{most:,} {what}"]
    by_hand = "YAML" in KINDS[kind].form
    size = (
        f"{plain_values._LONGEST_YAML >> 20} MiB of YAML"
        if by_hand
        else f"{artifacts.LONGEST_TEXT >> 20} MiB a document"
    )
    return [size, *items]


@pytest.mark.parametrize("kind", [kind.name for kind in FILES if kind.name != "balance_event"])
def test_limits_on_the_page_are_the_readers(kind: str) -> None:
    """A balance_event is a line of telemetry."""
    limits = re.search(r"^Limits: .*", PAGE, re.M)
    assert limits
    assert all(limit in limits[0] for limit in limits_of(kind)), limits_of(kind)


@pytest.mark.parametrize("kind", ["job", "cluster", "profile", "telemetry", "enforcement"])
def test_every_field_is_on_the_page(kind: str) -> None:
    for name in set(MODELS[kind].model_fields) - {"kind", "schema_version"}:
        assert re.search(rf"`[^`]*\b{name}\b[^`]*`", section(kind)), f"{kind}.{name}"


def test_the_list_of_kinds(cli: Cli) -> None:
    listed = cli("show", "schema", "--json").document
    assert {each["name"] for each in listed["kinds"]} == set(KINDS)
    shown = cli("show", "schema").out
    assert all(kind.name in shown for kind in (*FILES, *RESULTS))
    assert max(map(len, shown.splitlines())) <= 80
    assert "name one" in cli("show", "schema", "-o", "x.json").error_line


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in (
        *("graph.json", "plan.json", "goodput.json", "profile.csv", "telemetry.jsonl", "times.csv", "run-plan.json"),
    ):
        put(name)
    capsys.readouterr()
    return tmp_path


def check(document: Any, kind: str) -> None:
    jsonschema.validate(document, schema_of(kind))


def test_what_commands_write_keeps_to_its_schema(here: Path, cli: Cli) -> None:
    cli("emit", "plan.json", "-o", "enforce.json")
    cli("companion", "job.yaml", "-o", "plans.db")
    for name, kind in (("graph", "graph"), ("plan", "plan"), ("goodput", "goodput"), ("enforce", "enforcement")):
        check(json.loads(Path(f"{name}.json").read_text()), kind)
    for line in Path("telemetry.jsonl").read_text().splitlines()[:4]:
        check(json.loads(line), "telemetry")
    with sqlite3.connect("plans.db") as database:
        (stored,) = database.execute("SELECT document FROM meta").fetchone()
        tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert tables == {"meta", "plans", "vectors"}
    check(json.loads(stored), "companion")
    check(json.loads((REPO / "fixtures" / "devices.json").read_text()), "devices")


def test_rows_of_a_profile_keep_to_the_schema(here: Path) -> None:
    schema = schema_of("profile")
    known = schema["properties"]
    with open("profile.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9
    for row in rows:
        typed: dict[str, Any] = {}
        for name, text in row.items():
            if name in known and text != "":
                number = any(word in json.dumps(known[name]) for word in ('"number"', '"integer"'))
                typed[name] = json.loads(text) if number else text
        check(typed, "profile")


def test_what_commands_print_keeps_to_its_schema(here: Path, cli: Cli) -> None:
    asked = {
        "barrier": ("barrier", "times.csv", "--json"),
        "verification": ("verify", "run-plan.json", "telemetry.jsonl", "--json"),
        "gate": ("gate", "plan.json", "--baseline", "plan.json", "--json"),
        "trace": ("trace", "graph.json", "--samples", "2", "--json"),
        "emit": ("emit", "plan.json", "-o", "e.json", "--json"),
    }
    for kind, arguments in asked.items():
        check(cli(*arguments).document, kind)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_schemas_refuse(kind: str) -> None:
    """A schema that took everything would pass all tests above."""
    if kind in ("profile",):  # rows carry no kind
        wrong: Any = {"device": 3}
    else:
        wrong = {"kind": "ddltool.other", "schema_version": 1}
    with pytest.raises(jsonschema.ValidationError):
        check(wrong, kind)
