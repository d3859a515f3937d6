"""``-`` is standard input wherever a file is read, told by how it begins: each command says what it says of the file."""

from __future__ import annotations

import gzip
import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddltool.artifacts import ending
from ddltool.commands.main import run
from tests.house.test_docs import put

CASES = [
    ("run-plan.json", "emit FILE --target hook -o out.json --json"),
    ("run-plan.json", "verify FILE telemetry.jsonl --json"),
    ("telemetry.jsonl", "verify run-plan.json FILE --json"),
    ("job.yaml", "plan FILE --strategy est --json"),
    ("profile.csv", "fit FILE --json"),
    ("graph.json", "trace FILE --samples 2 --json"),
    ("times.csv", "barrier FILE --json"),
    ("lengths.csv", "balance FILE --replicas 2 --batches 2 --limit 0 --json"),
    ("run-plan.json", "gate FILE --baseline run-plan.json --json"),
    ("profile.csv", "gate FILE --metrics --json"),
    ("run-plan.json", "report FILE -o page.html --json"),
    ("telemetry.jsonl", "stragglers FILE --json"),
    ("workload.csv", "simulate FILE --policy tiresias --json"),
]
_OF_THE_DAY = re.compile(r'"(\w*seconds\w*|compute_seconds|bytes|plan|telemetry|file|title|name|current)": [^\n]*')


@pytest.fixture(scope="module")
def stocked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stdin")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in dict.fromkeys([*(name for name, _ in CASES), "cluster.yaml", "traces"]):
            put(name)
    return folder


@pytest.mark.parametrize(("name", "command"), CASES, ids=[command for _, command in CASES])
def test_a_command_reads_it_as_it_reads_the_file(
    name: str, command: str, stocked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(stocked)
    said = []
    for given in (name, "-"):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(Path(name).read_bytes())))
        code = run(command.replace("FILE", given).split())
        captured = capsys.readouterr()
        assert "error" not in captured.err
        said.append((code, _OF_THE_DAY.sub("", captured.out.replace(f'"{name}"', '"-"'))))
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1}\n{"a": 2}\n', ".jsonl"),
        ('{"a": 1}\n', ".json"),
        ('{\n "a": 1\n}\n', ".json"),
        ("[1, 2]", ".json"),
        ("a,b\n1,2\n", ".csv"),
        ("a: 1\nb: [1, 2]\n", ".yaml"),
        ("# a comment, and\nkind: ddltool.job\n", ".yaml"),
    ],
)
def test_what_it_holds_is_told_by_how_it_begins(text: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for data in (text.encode(), gzip.compress(text.encode())):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
        assert ending(Path("-")) == found


def test_nothing_on_it_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"")))
    assert run(["fit", "-"]) == 2
    assert capsys.readouterr().err.startswith("error: -: is empty")
