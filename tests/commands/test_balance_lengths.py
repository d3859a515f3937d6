"""``ddltool balance`` of lengths: every form of file, its JSON and page, and one line for every kind of nonsense."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ddltool as dt
from ddltool.analyzers.job.balancing.lengths import SampleCost
from ddltool.errors import InputError
from ddltool.results import LengthsResult
from tests.conftest import Cli

SHORT = ("--replicas", 2, "--total-batch", 4, "--limit", 0)
LENGTHS = [8, 1, 1, 2, 9, 9, 3, 3, 4, 5, 6, 7]


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def forms(folder: Path) -> list[Path]:
    lines = "\n".join(map(str, LENGTHS)) + "\n"
    rows = [json.dumps({"input_ids": [1] * length, "text": "a"}) for length in LENGTHS]
    values, counts = np.unique(LENGTHS, return_counts=True)
    histogram = "\n".join(f"{value},{count}" for value, count in zip(values, counts, strict=True))
    return [
        written(folder, "a.csv", "length\n" + lines),
        written(folder, "b.csv", "name,tokens\n" + "".join(f"x,{length}\n" for length in LENGTHS)),
        written(folder, "c.csv.gz", "num_tokens\n" + lines),
        written(folder, "d.txt", lines),
        written(folder, "e.csv", lines),
        written(folder, "f.jsonl", "\n".join(rows) + "\n"),
        written(folder, "g.csv", f"length,count\n{histogram}\n"),
    ]


def test_every_form_of_file_is_the_same_dataset(cli: Cli, tmp_path: Path) -> None:
    found = [cli("balance", path, *SHORT, "--json").done().document for path in forms(tmp_path)]
    assert all(each["lengths"] == found[0]["lengths"] for each in found)
    assert found[0]["lengths"] == {
        "samples": 12, "mean": pytest.approx(58 / 12), "median": 4.0, "p90": 9.0, "p99": 9.0, "longest": 9
    }  # fmt: skip
    first = found[0]
    assert all(each["remedies"] == first["remedies"] for each in found[:6])
    assert [*first["remedies"]] == ["padded", "grouped", "sorted", "unpadded", "lpt", "karmarkar_karp", "cp_sat"]
    assert first["batches"] == 3
    assert first["remedies"]["padded"]["speedup"] == 1
    assert sum(rank["samples"] for rank in first["assignments"]) == 4
    for rank in first["assignments"]:
        assert rank["tokens"] == sum(sum(each) for each in rank["passes"])


def test_all_settings_together_and_the_page(cli: Cli, tmp_path: Path) -> None:
    chance = np.random.default_rng(1)
    path = written(tmp_path, "many.txt", "\n".join(map(str, chance.integers(1, 2000, 4000))))
    out = tmp_path / "lengths.json"
    said = cli(
        "balance", path, "--rank-speeds", "1,1,0.5", "--total-batch", 48, "--max-tokens", 8000, "--window", 3, "--pack", 2000,
        "--cost", "1,1e-4,5,20,100", "--today", "unpadded", "--sharded", "--batches", 12, "--limit", 1, "-o", out
    ).done().out  # fmt: skip
    assert max(map(len, said.splitlines()[:-1])) <= 80
    assert "a sample of L tokens costs 1 L + 0.0001 L^2 + 5 tokens (given)" in " ".join(said.split())
    result = dt.read(out)
    assert isinstance(result, LengthsResult)
    assert result.remedies["unpadded"].speedup == 1
    assert {"window", "cut", "cut_masked"} < {*result.remedies}
    assert "karmarkar_karp" not in result.remedies  # speeds differ
    assert all(each.most_tokens <= 8000 for each in result.remedies.values())
    assert all(each.speedup_low <= each.speedup <= each.speedup_high for each in result.remedies.values())
    fast, _, slow = (rank.cost for rank in result.assignments)
    assert fast / slow == pytest.approx(2, rel=0.1)
    page = tmp_path / "page.html"
    cli("report", out, "-o", page).done()
    assert "unpadded, CP-SAT" in page.read_text()
    cli("gate", out, "--baseline", out).done()


@pytest.mark.parametrize("is_real", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_model_gives_the_cost(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_real: bool) -> None:
    def costs(source: str, device: str, precision: str, *, longest: int, **_: object) -> SampleCost:
        assert (source, device, precision, longest) == ("transformers:gpt2", "A100", "bf16", 9)
        return SampleCost(per_token=1e-6, per_step=1e-3)

    if not is_real:
        monkeypatch.setattr("ddltool.analyzers.job.balancing.length_costs.cost_of_model", costs)
    path = written(tmp_path, "lengths.txt", "\n".join(map(str, LENGTHS)))
    found = cli("balance", path, *SHORT, "--model", "transformers:gpt2", "--device", "A100", "--json").done().document
    assert found["cost"]["unit"] == "s"
    assert found["cost"]["source"] == "transformers:gpt2 on A100, bf16"
    assert 0 < found["cost"]["per_token"] < 1e-4
    assert found["cost"]["per_step"] > 0


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.csv", "length\n5\n-1\n", "a.csv:row 2:length: is -1; a whole number from 1 to 1000000000"),
        ("a.csv", "tokens\n5\nnan\n", "a.csv:row 2:tokens: is nan; a whole number from 1 to 1000000000"),
        ("a.csv", "length\n2.5\n", "a.csv:row 1:length: is 2.5; a whole number from 1 to 1000000000"),
        ("a.csv", "length\n2000000000\n", "a.csv:row 1:length: is 2000000000; a whole number from 1 to 1000000000"),
        ("a.txt", "5\nmany words\n", "a.txt:row 2:length: is many words; a whole number from 1 to 1000000000"),
        ("a.txt", "", "a.txt: is empty"),
        ("a.txt", "\n\n", "a.txt: is empty"),
        (
            "a.csv",
            "length\n",
            "a.csv: has no rows; expected columns iteration, worker, speed, cpu, memory, or length alone",
        ),
        ("a.csv", "length,count\n5,-2\n", "a.csv:row 1:count: is -2; a whole number from 0 to 1000000000000"),
        ("a.csv", "length,count\n5,0\n", "a.csv:count: is 0 in all rows; give the samples of each length"),
        ("a.jsonl", '{"input_ids": []}\n', "a.jsonl:row 1:input_ids: is 0; a whole number from 1 to 1000000000"),
        ("a.csv", "text\nabc\n", "a.csv:iteration: no such column"),
    ],
)
def test_nonsense_is_one_line(cli: Cli, tmp_path: Path, name: str, text: str, problem: str) -> None:
    failed = cli("balance", written(tmp_path, name, text), *SHORT[:2])
    assert failed.code == 2
    assert len(failed.err.splitlines()) == 1
    assert problem in failed.err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--total-batch", 100), "--total-batch: is 100; the file has 12 samples: give at most so many"),
        (("--total-batch", 1), "--total-batch: is 1; give 2 (one in each pass) to 100000 samples"),
        (("--predictor", "ema"), "--predictor: has no part in a table of lengths"),
        (("--rank-speeds", "1,0"), "--rank-speeds: has 0; give finite numbers above 0"),
        (("--rank-speeds", "1,1,1"), "--replicas: has no part in --rank-speeds; 3 are given, one for each rank"),
        (("--cost", "1,2"), "--cost: has 2 numbers; give 3 to 5, separated by commas"),
        (
            ("--cost", "1,-2,0"),
            "--cost: is 1,-2,0,0,0; give finite numbers of 0 or more, one of the first three above 0",
        ),
        (("--device", "A100"), "--device: has no part in a cost that is not a model's; give --model without --cost"),
        (("--max-tokens", 3), "--max-tokens: is 3; the longest sample has 9: give that or more"),
        (("--max-tokens", 30, "--accumulation", 2), "--accumulation: has no part in --max-tokens; give one of the two"),
        (("--today", "window"), "--today: unknown today 'window'; known: cp_sat"),
    ],
)
def test_settings_that_do_not_fit_are_one_line(
    cli: Cli, tmp_path: Path, options: tuple[object, ...], problem: str
) -> None:
    path = written(tmp_path, "a.txt", "\n".join(map(str, LENGTHS)))
    failed = cli("balance", path, *(SHORT if "--total-batch" not in options else SHORT[:2]), *options)
    assert failed.code == 2
    assert problem in failed.err.splitlines()[-1]


def test_a_trace_of_speeds_takes_no_options_of_lengths(cli: Cli, tmp_path: Path) -> None:
    trace = written(tmp_path, "a.csv", "iteration,worker,speed,cpu,memory\n0,a,1,1,1\n")
    failed = cli("balance", trace, "--replicas", 2)
    assert failed.code == 2
    assert "--replicas: has no part in recorded speeds; give a table with a column length or tokens" in failed.err


def test_the_function_refuses_as_the_command_does(tmp_path: Path) -> None:
    path = written(tmp_path, "a.txt", "\n".join(map(str, LENGTHS)))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rank_speeds": (1.0, 0.0)}, r"^rank_speeds\[1\]: is 0; give finite numbers above 0$"),
        ({"cost": (1.0,)}, r"^cost: has 1 numbers; give a, b, c, and those of a pass and of a step$"),
        ({"cost": (0.0, 0.0, 0.0)}, r"^cost: is 0,0,0,0,0; give finite numbers of 0 or more"),
        ({"predictor": "ema"}, r"^predictor: has no part in a table of lengths; leave it out$"),
    ]
    for given, problem in cases:
        with pytest.raises(InputError, match=problem):
            dt.balance(path, **{"total_batch": 8, **given})
    assert dt.balance(path, total_batch=8, limit=0.0).remedies["padded"].speedup == 1
