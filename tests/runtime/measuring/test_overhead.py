"""``ddltool doctor --overhead``: the interval, the turns, and a script that is really slower when ddltool is on."""

from __future__ import annotations

import collections
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import bench_overhead
from ddltool.results import OverheadInterval, OverheadRun
from ddltool.runtime.balancing import BalanceOptions
from ddltool.runtime.hook.guards import UPDATES_PER_EXCHANGE
from ddltool.runtime.measuring import overhead
from ddltool.runtime.measuring.overhead import failure_of_script, measure_overhead, ratio_interval, verdict
from ddltool.runtime.processes.consensus import Consensus
from tests.helpers.runtime_workers import crew

MEASURED = 40
SCRIPT = """
import os, sys, torch
assert sys.argv[1:] == ["--lr", "0.1"]
weight = torch.nn.Parameter(torch.ones(4))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(1000):
    for _ in range(300 if os.environ.get("DDLTOOL_HOLD") == "1" else 100):
        weight.sum().backward()
    optimizer.step()
"""


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=40), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_the_interval_is_the_narrowest_of_the_binomial_law(ratios: list[float], confidence: float) -> None:
    """Brute force: of all pairs (k-th smallest, k-th largest), the innermost that holds the median often enough."""
    count = len(ratios)
    holds = [
        1 - 2 * sum(math.comb(count, place) for place in range(rank + 1)) / 2**count for rank in range((count + 1) // 2)
    ]
    good = [rank for rank, level in enumerate(holds) if level >= confidence]
    rank = max(good, default=0)
    found = ratio_interval(ratios, confidence)
    assert (found.low, found.high) == (sorted(ratios)[rank], sorted(ratios)[-1 - rank])
    assert found.confidence == pytest.approx(max(holds[rank], 0))
    assert found.low <= found.median <= found.high


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    chance = np.random.default_rng(0)
    made = [ratio_interval(chance.lognormal(0.0, 0.1, 10).tolist()) for _ in range(4000)]
    share = np.mean([interval.low <= 1.0 <= interval.high for interval in made])
    assert share == pytest.approx(made[0].confidence, abs=0.01)
    assert made[0].confidence == pytest.approx(0.9785, abs=1e-4)  # 10 values, second smallest to second largest


def test_what_is_decided() -> None:
    interval = OverheadInterval(median=1.01, low=1.005, high=1.02, confidence=0.95)
    assert [verdict(interval, limit) for limit in (0.004, 0.006, 0.01, 0.021)] == [
        "above",
        "not decided",
        "not decided",
        "within",
    ]


def messages(rank: int, folder: str, variant: str) -> tuple[int, int]:
    """Return the exchanges and the rounds over the store that some steps of a benchmark's variant take."""
    counted = collections.Counter[str]()

    def count(what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counts(*args: Any, **named: Any) -> Any:
            counted[what] += 1
            return call(*args, **named)

        return counts

    before = os.getcwd()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather", "broadcast", "barrier"):
            patch.setattr(dist, name, count("exchanges", getattr(dist, name)))
        patch.setattr(Consensus, "propose", count("rounds", Consensus.propose))
        options = BalanceOptions(interval_s=1000.0)  # however slow this machine is
        patch.setattr(bench_overhead, "balance", partial(bench_overhead.balance, options=options))
        os.chdir(folder)
        try:
            run = bench_overhead.trainer(variant, 2, 0.0, False, MEASURED + 20)
            for _ in range(20):
                next(run)
            counted.clear()
            for _ in range(MEASURED):
                next(run)
            run.close()
        finally:
            os.chdir(before)
    return counted["exchanges"], counted["rounds"]


def test_a_message_in_a_few_steps_beside_the_gradients(tmp_path: Path) -> None:
    """DDP averages gradients by itself; what must be alike is told now and then, counts of foreign loaders in each step."""
    bench_overhead.write_plan(2, str(tmp_path))
    tenth, twentieth = MEASURED // 10, MEASURED // 20
    found = {variant: crew().run(messages, str(tmp_path), variant)[0] for variant in ("hook", "own loader", "balance")}
    alike = MEASURED // UPDATES_PER_EXCHANGE
    assert found["hook"] == (alike + tenth, 0)
    assert found["own loader"] == (MEASURED + alike + tenth, 0)
    assert found["balance"] == (alike, twentieth)


def test_turns_change_from_pair_to_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[bool] = []

    def run(command: Any, turn: bool, *_: Any) -> OverheadRun:
        turns.append(turn)
        return OverheadRun(steps=9, wall_s=3.0 if turn else 2.0, cpu_s=1.0)

    monkeypatch.setattr(overhead, "_run", run)
    found = measure_overhead([__file__], pairs=3, steps=9)
    assert turns == [True, False, False, True, True, False]
    assert (found.wall.median, found.cpu.median) == (1.5, 1.0)


@pytest.mark.slow
def test_one_pair_of_runs_decides_nothing(tmp_path: Path, cli: Callable[..., Any]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    asked = ("doctor", "--overhead", f"{script} --lr 0.1", "--steps", "12", "--pairs", "1", "--json")
    few = cli(*asked, "--max-overhead", "20%")
    assert (few.code, few.document["verdict"]) == (0, "not decided")
    assert few.document["cpu"]["median"] > 1.8


@pytest.mark.slow
def test_a_script_that_is_slower_with_ddltool_is_found_out(tmp_path: Path, cli: Callable[..., Any]) -> None:
    """Three times the work when on; the gate says no, with one line and exit code 1."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    asked = ("doctor", "--overhead", f"{script} --lr 0.1", "--steps", "12", "--json")
    result = cli(*asked, "--pairs", "6", "--max-overhead", "20%")
    assert result.code == 1
    assert result.error_line == "the overhead of ddltool is above 20% of a step"
    document = result.document
    assert document["verdict"] == "above"
    assert document["cpu"]["median"] > 1.8
    assert [len(document[turn]) for turn in ("on", "off")] == [6, 6]
    assert {run["steps"] for run in document["on"]} == {12}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("raise SystemExit(3)", "failed with exit code 3", marks=pytest.mark.slow),
        ("print('no step')", "made 0 optimizer steps, of which 3 are warm-up"),
        pytest.param(
            "import nowhere_to_be_found",
            "No module named 'nowhere_to_be_found'; see to it that it runs by itself",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_script_that_cannot_be_measured(tmp_path: Path, cli: Callable[..., Any], text: str, message: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text, encoding="utf-8")
    cli("doctor", "--overhead", script, "--pairs", "1", "--steps", "12").refuses(message)


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        (
            "[rank0]: Traceback:\n[rank0]: KeyError: 'x'\nfoo.ChildFailedError: \n  error_file: <N/A>\n=====",
            "KeyError: 'x'",
        ),
        ("ValueError: first\nerror: loss: cannot be read\nRuntimeError: torchrun's", "error: loss: cannot be read"),
        ("killed\nout of memory\n", "out of memory"),
        ("", ""),
    ],
)
def test_a_failed_script_is_told_by_its_own_exception(errors: str, said: str) -> None:
    assert (
        str(failure_of_script(["train.py"], 1, errors))
        == f"train.py: failed with exit code 1: {said}; see to it that it runs by itself"
    )


def test_options_that_cannot_be(cli: Callable[..., Any]) -> None:
    assert cli("doctor", "--overhead", "nowhere.py").error_line == "nowhere.py: is no file; name a training script"
    assert "needs a script" in cli("doctor", "--max-overhead", "1%").error_line
    for text in ("1x", "-1%", "nan", "inf"):
        result = cli("doctor", "--overhead", __file__, "--max-overhead", text)
        assert (result.code, result.error_line.startswith("--max-overhead: ")) == (2, True)
    assert cli("doctor", "--overhead", '"a').code == 2
