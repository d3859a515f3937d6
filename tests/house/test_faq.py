"""The error lines in docs/faq.md are those that the commands print."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from ddltool.commands.main import run
from tests.house.test_docs import REPO, put

PAGE = (REPO / "docs" / "faq.md").read_text()
FILES = (
    *("job.yaml", "telemetry.jsonl", "profile.csv", "graph.json", "plan.json", "train.py", "workload.csv"),
    *("cluster.yaml", "traces", "times.csv"),
)
CASES = [
    (re.findall(r"^\$ (.*)$", block, re.M), re.findall(r"^error: .*$", block, re.M))
    for block in re.findall(r"^```console\n(.*?)^```$", PAGE, re.M | re.S)
]


@pytest.fixture(scope="module")
def stocked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faq")
    before = Path.cwd()
    os.chdir(folder)
    try:
        for name in FILES:
            put(name)
    finally:
        os.chdir(before)
    return folder


def test_the_page_has_as_many_as_it_should() -> None:
    assert len(CASES) >= 9
    assert all(commands and len(errors) == 1 for commands, errors in CASES)


@pytest.mark.parametrize(("commands", "errors"), CASES, ids=[commands[-1][:60] for commands, _ in CASES])
def test_the_line_is_what_is_printed(
    commands: list[str],
    errors: list[str],
    stocked: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import shlex

    monkeypatch.chdir(stocked)
    *before, last = commands
    for command in before:
        if command.startswith("ddltool "):
            assert run(shlex.split(command)[1:]) == 0
        else:
            subprocess.run(["bash", "-ec", command], check=True)
    capsys.readouterr()
    code = run(shlex.split(last)[1:])
    printed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(printed) == 1, printed
    assert code in (2, 3)
    if errors[0].endswith(" ..."):
        assert printed[0].startswith(errors[0].removesuffix("..."))
    else:
        assert printed[0] == errors[0]
