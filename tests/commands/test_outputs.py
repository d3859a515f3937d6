"""No command writes over what it reads: the check itself, and the commands that use it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ddltool.artifacts import check_outputs
from ddltool.errors import InputError
from tests.conftest import Result, write_lines
from tests.job.diagnosing.test_verification import JOB, rows

Cli = Callable[..., Result]
FIGURES = '{"kind": "ddltool.figures", "figures": {"a": 1.0}}'


def _named(folder: Path, how: str) -> Path:
    """The file ``in`` of a folder under another name."""
    real = folder / "in"
    made = folder / "other"
    if how == "symlink":
        made.symlink_to(real)
    elif how == "hard link":
        os.link(real, made)
    elif how == "spelling":
        (folder / "sub").mkdir()
        return folder / "sub" / ".." / "in"
    elif how == "same":
        return real
    elif how == "folder link":
        (folder / "link").symlink_to(folder, target_is_directory=True)
        return folder / "link" / "in"
    return made


@pytest.mark.parametrize("how", ["same", "symlink", "hard link", "spelling", "folder link"])
def test_an_input_by_any_name_is_told(tmp_path: Path, how: str) -> None:
    (tmp_path / "in").write_text("x")
    with pytest.raises(InputError, match="^-o: .* is one of the inputs; give another file$"):
        check_outputs([None, "-", tmp_path / "in"], {"-o": _named(tmp_path, how)})


def test_other_files_streams_and_devices_are_free(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("x")
    (tmp_path / "copy").write_text("x")
    check_outputs([tmp_path / "in", "/dev/null", "-"], {"-o": tmp_path / "copy", "--junit": "-", "--sarif": None})
    check_outputs(["/dev/null"], {"-o": "/dev/null"})
    check_outputs([tmp_path / "in"], {"-o": tmp_path / "new"})


def test_two_outputs_in_one_file(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "q")
    with pytest.raises(InputError, match="^--sarif: .* is written by --junit too"):
        check_outputs([], {"--junit": tmp_path / "q", "--sarif": tmp_path / "link"})


def test_a_long_name_is_shortened(tmp_path: Path) -> None:
    with pytest.raises(InputError) as failed:
        check_outputs(["n/" * 900], {"-o": "n/" * 900})
    assert len(str(failed.value)) < 400


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ("gate one.json --rule a<=3 --junit one.json", "--junit"),
        ("gate one.json --baseline base.json --rule a<=+3% --sarif base.json", "--sarif"),
        ("gate one.json --baseline old --rule a<=+3% --sarif old/one.json", "--sarif"),
        ("gate one.json --junit ddltool.toml", "--junit"),
        ("gate one.json --rule a<=3 --junit q --sarif q", "--sarif"),
        ("verify plan.json telemetry.jsonl -o telemetry.jsonl", "-o"),
        ("verify plan.json telemetry.jsonl -o hard.json", "-o"),
        ("emit plan.json -o plan.json", "-o"),
        ("emit plan.json -o link.json --target torchrun", "-o"),
        ("report plan.json -o hard.json", "-o"),
        ("report plan.json telemetry.jsonl -o telemetry.jsonl", "-o"),
    ],
)
def test_commands_keep_their_inputs(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB, encoding="utf-8")
    assert cli("plan", "job.yaml", "--strategy", "lb-bsp", "-o", "plan.json").code == 0
    write_lines(Path("telemetry.jsonl"), rows({"fast": 24, "slow": 8}, {"fast": 0.1, "slow": 0.1}))
    Path("old").mkdir()
    for name in ("one.json", "base.json", "old/one.json"):
        Path(name).write_text(FIGURES)
    Path("ddltool.toml").write_text('[gate.rules]\nfigures = ["a <= 3"]\n')
    os.link("plan.json", "hard.json")
    os.symlink("plan.json", "link.json")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    failed = cli(*arguments.split(" "))
    assert failed.code == 2
    assert failed.error_line.startswith(f"{option}: ")
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (("plan", "a.yaml", "-o", "a.yaml"), "-o"),
        (("plan", "a.yaml", "--telemetry", "t.jsonl", "-o", "t.jsonl"), "-o"),
        (("fit", "p.csv", "-o", "p.csv"), "-o"),
        (("trace", "g.json", "--perfetto", "g.json"), "--perfetto"),
        (("balance", "p.csv", "-o", "p.csv"), "-o"),
        (("barrier", "p.csv", "-o", "p.csv"), "-o"),
        (("companion", "a.yaml", "-o", "a.yaml"), "-o"),
        (("import", "p.csv", "-o", "p.csv"), "-o"),
    ],
)
def test_no_command_overwrites_what_it_reads(
    cli: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.yaml", "t.jsonl", "p.csv", "g.json"):
        (tmp_path / name).write_text("kept")
    refused = cli(*arguments)
    assert refused.code == 2
    assert f"{option}: " in refused.error_line
    assert "is one of the inputs" in refused.error_line
    assert {path.read_text() for path in tmp_path.iterdir()} == {"kept"}
