"""What files may not hold is told in one form: FILE:FIELD: what is wrong; what would be right. No library speaks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ddltool.errors import InputError, naming
from ddltool.schema_words import in_words
from ddltool.tables import read_table
from tests.conftest import Cli


class Everything(BaseModel):
    """A field of every kind that documents have."""

    model_config = ConfigDict(strict=True, extra="forbid")
    above: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1
    least: Annotated[int, Field(ge=1)] = 1
    below: Annotated[float, Field(lt=1)] = 0
    most: Annotated[int, Field(le=10_000_000)] = 1
    maybe: Annotated[float, Field(ge=0)] | None = None
    text: Annotated[str, Field(min_length=1, max_length=3)] = "a"
    flag: bool = True
    choice: Literal["x", "y"] = "x"
    listed: Annotated[list[int], Field(min_length=2, max_length=3)] = [1, 2]
    mapped: dict[str, float] = {}
    part: dict[str, dict[str, int]] = {}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("above", 0, "is 0; give a number above 0"),
        ("above", float("nan"), "is nan; give a finite number"),
        ("above", "3", "is '3'; give a number"),
        ("above", True, "is true; give a number"),
        ("least", 0, "is 0; give a number of at least 1"),
        ("least", 1.5, "is 1.5; give a whole number"),
        ("least", None, "is null; give a whole number"),
        ("below", 1e308, "is 1e+308; give a number below 1"),
        ("most", 2**62, f"is {2**62}; give a number of at most 10000000"),
        ("maybe", -1, "is -1; give a number of at least 0"),
        ("text", "", "is empty; give at least 1 character"),
        ("text", "abcd", "has 4 characters; give at most 3 characters"),
        ("text", [], "is a list; give a text"),
        ("flag", 1, "is 1; give true or false"),
        ("choice", "z", "is 'z'; give 'x' or 'y'"),
        ("listed", [1], "has 1 entry; give at least 2 entries"),
        ("listed", {}, "is a mapping; give a list"),
        ("mapped", [], "is a list; give a mapping"),
        ("part", {"a": 3}, "is 3; give a mapping"),
        ("extra", 3, "is unknown; remove it"),
    ],
)
def test_every_kind_of_complaint_has_words(name: str, value: Any, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Everything.model_validate({name: value})
    assert "; ".join(in_words(caught.value.errors()[0])) == words


def test_a_complaint_without_words_of_its_own() -> None:
    unknown = {"type": "url_scheme", "msg": "URL scheme should be\n http", "input": "x"}
    assert in_words(unknown) == ("URL scheme should be http (got 'x')", "")
    assert in_words({"type": "value_error", "msg": "Value error, a; b", "input": {}}) == ("a; b", "")


def test_long_values_are_shortened() -> None:
    problem, _ = in_words({"type": "float_type", "msg": "", "input": "x" * 10_000})
    assert len(problem) < 100


# Tables


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"kind": "ddltool.plan", "sch', "it begins like JSON"),
        ('[{"a": 1}]\n', "it begins like JSON"),
        ("a,b\n1,2\n\n1,2,3\n", "row 2: has 3 fields; the header has 2"),
        ('a,b\n1,2\n3,"4\n5,6\n', "row 2: has a quote that does not end its field"),
        ("\n\n,\n", "has"),
    ],
)
@pytest.mark.parametrize("command", ["fit", "report"])
def test_what_is_no_table(tmp_path: Path, cli: Cli, command: str, text: str, problem: str) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    extra = ["-o", tmp_path / "out.html"] if command == "report" else []
    result = cli(command, path, *extra)
    assert result.code == 2
    assert problem in result.error_line
    assert not any(word in result.error_line for word in ("tokenizing", "C error", "EOF", "parse"))
    assert not (tmp_path / "out.html").exists()


def test_a_good_table_is_read(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('a,b\n1,"x, y"\n\n2,z\n')
    assert read_table(tmp_path / "t.csv").values.tolist() == [[1, "x, y"], [2, "z"]]


# Files


def test_naming_a_file_leaves_what_is_named_alone() -> None:
    for where, wanted in (
        ("devices.T4.memory_gib", "job.yaml:devices.T4.memory_gib: x"),
        ("devices[0]", "job.yaml:devices[0]: x"),
        ("other.yaml:devices", "other.yaml:devices: x"),
        ("--top-k", "--top-k: x"),
    ):
        with pytest.raises(InputError) as caught, naming("job.yaml", ["devices"]):
            raise InputError(where, "x")
        assert str(caught.value) == wanted
