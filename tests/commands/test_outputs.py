"""No command writes over what it reads: the check itself, and the commands that use it.
The texts of options as numbers: what is read, and which option an error names.
The table of commands: what it says of each is what the command says, and its examples can be run.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddltool.artifacts import check_outputs
from ddltool.commands.main import COMMANDS, load
from ddltool.commands.options import as_options, budget, integers, number, share
from ddltool.errors import InputError
from ddltool.units import parse_bytes
from tests.conftest import Cli, write_lines
from tests.house.test_docs import check_options
from tests.job.diagnosing.test_verification import JOB, rows

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
        ("plan job.yaml -o job.yaml", "-o"),
        ("plan job.yaml --telemetry telemetry.jsonl -o telemetry.jsonl", "-o"),
        ("companion job.yaml -o job.yaml", "-o"),
        ("fit base.json -o base.json", "-o"),
        ("trace base.json --perfetto base.json", "--perfetto"),
        ("balance base.json -o base.json", "-o"),
        ("barrier base.json -o base.json", "-o"),
        ("import base.json -o base.json", "-o"),
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
    failed.refuses(" is written by --junit too" if "q" in arguments.split() else "is one of the inputs")
    assert failed.error_line.startswith(f"{option}: ")
    assert {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()} == before


@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=20))
def test_integers_come_sorted_and_once(numbers: list[int]) -> None:
    text = ",".join(map(str, numbers))
    assert integers(text, "--replicas") == tuple(sorted(set(numbers)))


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (integers, "1,x", "'1,x' is not a list of whole numbers; write for example 1,2,4"),
        (integers, "0", "0 is below 1; write whole numbers >= 1"),
        (integers, ",".join(map(str, range(1, 1002))), "holds 1001 numbers; give at most 1000"),
        (share, "100%", "'100%' is not a share"),
        (budget, "0s", "'0s' is not a usable time"),
        (budget, "721h", "'721h' is not a usable time"),
        (parse_bytes, "0GiB", "'0GiB' is not a size"),
        (parse_bytes, "much", "'much' is not a size"),
        *(
            (number(0.5, 1e9), text, message)
            for text, message in (
                ("nan", "is nan; give a number"),
                ("many", "'many' is no number; give a number"),
                ("inf", "is inf; give a number from 0.5 to 1000000000"),
                ("0.4999", "is 0.4999; give a number from 0.5 to 1000000000"),
            )
        ),
        (number(1), "-inf", "is -inf; give a number of at least 1"),
    ],
)
def test_errors_name_the_option_and_the_text(read: object, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read(text, "--option")  # type: ignore[operator]
    assert str(caught.value).startswith(f"--option: {message}")


def test_an_error_names_the_option_and_keeps_what_was_added() -> None:
    @as_options({"restart delay": "--restart-delay"})
    def fail(where: str, added: str = "") -> None:
        error = InputError(where, "is -1", "at least 0")
        error.args = (f"{error}{added}",)
        raise error

    for where, option in (("restart delay", "--restart-delay"), ("delay", "delay")):
        with pytest.raises(InputError, match=f"^{option}: is -1; at least 0; 3 rows are kept$") as caught:
            fail(where, "; 3 rows are kept")
        assert caught.value.where == option


def test_sizes_and_shares_in_their_units() -> None:
    assert number(0.5)("0.5", "--horizon") == 0.5
    assert parse_bytes("2GiB", "--memory") == 2 * 2**30
    assert parse_bytes("500 MB", "--memory") == 500e6
    assert share("5%", "--precision") == share("0.05", "--precision") == pytest.approx(0.05)
    assert budget("5min", "--budget") == 300.0


@pytest.mark.parametrize(
    ("command", "option"), [(("report", "none.json"), "--noise-scale"), (("trace", "zoo:mlp"), "--time-limit")]
)
def test_commands_say_that_nan_is_no_number(cli: Cli, command: tuple[str, ...], option: str) -> None:
    refused = cli(*command, option, "nan")
    assert refused.code == 2
    assert refused.error_line == f"{option}: is nan; give a number"


def test_a_limit_of_a_search_that_is_not_made_is_refused(cli: Cli) -> None:
    refused = cli("trace", "zoo:mlp", "--time-limit", "3")
    assert refused.error_line == "--time-limit: has no part in a trace without --exact; add --exact, or leave it out"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_own_summary_and_one_example_that_it_understands(name: str) -> None:
    summary, example = COMMANDS[name]["summary"], COMMANDS[name].get("example")
    command = load(name)
    text = command.help or ""
    assert command.get_short_help_str(200) == summary
    assert (example is None) == ("Example: ddltool" in text)
    if example is not None:
        assert f"ddltool {name}" in example
        for part in example.replace("; then: ", "; ").replace("; or: ", "; ").split("; "):
            check_options(part)
