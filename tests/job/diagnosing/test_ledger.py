"""Where a job's wall clock went: by hand on written rows, and against a real job whose losses are known."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from benchmarks import bench_failures
from ddltool import runtime
from ddltool.analyzers.job.diagnosing.ledger import PARTS, ledger
from ddltool.analyzers.job.planning.failures import Failures
from ddltool.errors import InputError
from ddltool.results import Ledger
from ddltool.tables import read_table
from ddltool.telemetry import TelemetryRow
from tests.conftest import Cli, write_lines
from tests.helpers.ledger_job import EXTRA_S, LOAD_S, SAVE_S
from tests.helpers.processes import torchrun
from tests.job.diagnosing.test_verification import JOB

COMPUTE_S = (0.5, 0.7)


def row(run: str, step: int, rank: int, end_s: float, **more: Any) -> dict[str, Any]:
    """A step of 1 s: 0.1 s for data, the rank's computation, waiting, 0.1 s of communication, 0.1 s of update."""
    computed = COMPUTE_S[rank]
    made: dict[str, Any] = {"kind": "ddltool.telemetry", "schema_version": 1, "run": run, "step": step, "rank": rank}
    made |= {"world_size": 2, "num_nodes": 1, "device": ("fast", "slow")[rank], "batch": 4, "total_batch": 8}
    made |= {"compute_s": computed, "wait_s": 0.7 - computed, "sync_s": 0.1, "data_s": 0.1, "step_s": 1.0}
    return made | {"memory_bytes": 1.0, "end_s": end_s} | more


def job() -> list[dict[str, Any]]:
    """A start at 1000; steps from 1002, half a second of checkpoint after two; killed at 1006.5; two steps again from 1010.

    Before its last step the second run evaluates for 0.3 s.
    """
    first: list[tuple[int, float, dict[str, Any]]] = [(0, 1003.0, {"start_s": 2.0, "restarts": 0}), (1, 1004.0, {})]
    first += [(2, 1005.5, {"checkpoint_s": 0.5}), (3, 1006.5, {})]
    second: list[tuple[int, float, dict[str, Any]]] = [(2, 1011.0, {"start_s": 0.25, "restarts": 1})]
    second += [(3, 1012.0, {}), (4, 1013.3, {})]
    runs = {"a": first, "b": second}
    return [row(run, step, rank, end, **m) for run, rows in runs.items() for step, end, m in rows for rank in (0, 1)]


def found(rows: list[dict[str, Any]]) -> Ledger:
    made = ledger(pd.DataFrame(rows), "t.jsonl")
    assert made is not None
    assert sum(made.parts_s.values()) == pytest.approx(made.wall_s)
    assert list(made.parts_s) == list(PARTS)
    return made


def test_each_part_by_hand() -> None:
    made = found(job())
    assert made.wall_s == pytest.approx(13.3)
    # Five kept steps, two lost; before them 2 s, between the runs 3.5 s.
    assert [made.parts_s[part] for part in PARTS] == pytest.approx([3.5, 0.5, 0.5, 0.5, 0.5, 5.5, 2.0, 0.3])
    assert made.goodput == pytest.approx(3.5 / 13.3)
    assert made.in_steps == pytest.approx(4.5 / 13.3)
    assert (made.starts, made.steps, made.lost_steps, made.checkpoints, made.remarks) == (2, 5, 2, 1, [])
    assert made.gain == (
        "start and restart takes 5.5 s, 41.4% of the wall clock: without it the job is 71% faster than it was"
    )
    assert made.action.startswith("2 starts of 2.75 s each")


def test_rows_that_a_killed_rank_did_not_write_are_a_part_of_the_restart() -> None:
    made = found([row for row in job() if (row["run"], row["step"], row["rank"]) != ("a", 3, 1)])
    assert made.parts_s["lost work"] == pytest.approx(1.5)
    assert made.parts_s["start and restart"] == pytest.approx(6.0)


def test_which_runs_are_one_job() -> None:
    """A run goes on where it begins at a later step, or where torchrun started it again; else it is a job of its own."""
    resumed = [{**row, "restarts": None} for row in job()]
    assert found(resumed).starts == 2
    anew = [{**row, "step": row["step"] - 2 * (row["run"] == "b")} for row in resumed]
    assert (found(anew).starts, found(anew).lost_steps) == (1, 0)
    again = [{**row, "restarts": 1 if row["run"] == "b" else 0} for row in anew]
    assert (found(again).starts, found(again).lost_steps) == (2, 4)
    assert found(again).remarks == [
        "run 2 of 2 begins at step 0: if it went on from a checkpoint, say so by hook.resumed(steps)"
    ]
    old = [{**row, "end_s": None if row["run"] == "a" else row["end_s"]} for row in job()]
    assert found(old).starts == 1
    assert ledger(pd.DataFrame(job()).drop(columns="end_s"), "t.jsonl") is None
    with pytest.raises(InputError, match=r"line 3:end_s: is 999; the steps of a rank end one after another"):
        ledger(pd.DataFrame([{**row, "end_s": 999.0} if i == 2 else row for i, row in enumerate(job())]), "t.jsonl")


@pytest.mark.parametrize(
    ("longer", "largest", "action"),
    [
        ({"data_s": 8.1}, "waiting for data", "load ahead: DataLoader(num_workers=), at least 9 above today's;"),
        ({"sync_s": 8.1}, "communication", "ddltool plan JOB --telemetry t.jsonl --compress bf16 says"),
        ({"wait_s": 8.1}, "waiting for the slowest rank", "rank 1 computes longest, 1.40 times the others' median: "),
        ({}, "lost work", "no checkpoint is told of: save within hook.checkpoint()"),
    ],
)
def test_the_next_action(longer: dict[str, float], largest: str, action: str) -> None:
    rows = [row("a", step, rank, 10.0 * step, step_s=9.0, restarts=0) | longer for step in range(9) for rank in (0, 1)]
    if largest == "lost work":
        rows += [row("b", 0, rank, 95.0, step_s=9.0, restarts=1) for rank in (0, 1)]
    made = found(rows)
    assert made.largest == largest
    assert made.action.startswith(action)


def test_the_interval_is_dalys() -> None:
    """One failure in 240 s, checkpoints of 5 s after every 20 s of training; the restart takes 10 s."""
    rows = []
    for run, steps, begin_s in (("a", range(5), 0.0), ("b", range(4, 10), 135.0)):
        for place, step in enumerate(steps):
            end_s = begin_s + 25.0 * place + 20.0
            spent = {"checkpoint_s": 5.0} if place else {"restarts": int(run == "b")}
            rows += [row(run, step, rank, end_s, step_s=20.0, compute_s=19.0, wait_s=0.0, **spent) for rank in (0, 1)]
    made = found(rows)
    assert made.largest == "checkpoint"
    assert made.wall_s == pytest.approx(280.0)
    best_s = Failures(mtbf_s=280.0, checkpoint_s=5.0, restart_s=7.5).interval_s(1)
    assert made.parts_s["start and restart"] == pytest.approx(15.0)
    assert made.action == (
        f"a checkpoint (5 s) every {best_s:.3g} s of training, by Daly for 1 failure in 280 s; now every 24.4 s"
    )


def test_verify_shows_it(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "job.yaml").write_text(JOB.replace("max_workers: 4", "max_workers: 2").replace("size: 8", "size: 4"))
    assert cli("plan", tmp_path / "job.yaml", "--strategy", "bsp", "-o", tmp_path / "plan.json").code == 0
    rows = write_lines(tmp_path / "t.jsonl", job())
    text = " ".join(cli("verify", tmp_path / "plan.json", rows).out.split())
    assert "Goodput 26.3%: computation of 5 kept steps in 13.3 s, 2 starts included; 33.8% with waiting" in text
    assert "lost work 2 s 15.0%" in text
    assert "Next: 2 starts of 2.75 s each" in text


def test_what_the_hook_writes_of_data_checkpoints_and_starts(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before_s = time.time()
    hook = runtime.attach(None, model=model, optimizer=optimizer, telemetry=tmp_path / "t.jsonl")
    hook.resumed(7)
    for step in range(4):
        time.sleep(0.05)
        hook.loss(model(torch.ones(2, 4)).mean()).backward()
        optimizer.step()
        if step == 1:
            with hook.checkpoint():
                time.sleep(0.1)
    hook.close()
    rows = [TelemetryRow.model_validate_json(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    assert [row.step for row in rows] == [7, 8, 9, 10]
    assert [row.checkpoint_s is not None for row in rows] == [False, False, True, False]
    assert [row.start_s is not None for row in rows] == [True, False, False, False]
    assert (rows[0].start_s or 0.0) >= 0.05
    assert rows[0].data_s == 0.0
    assert all(0.05 <= (row.data_s or 0.0) <= row.step_s for row in rows[1:])
    made = ledger(read_table(tmp_path / "t.jsonl"), "t")
    assert made is not None
    assert 0.1 <= made.parts_s["checkpoint"] < 0.2
    assert 0.3 <= made.wall_s <= time.time() - before_s
    assert abs(made.parts_s["unaccounted"]) < 0.05 * made.wall_s
    with pytest.raises(InputError, match="resumed: is -1; give the number of steps made before, 0 or more"):
        hook.resumed(-1)


@pytest.mark.slow
def test_a_real_job_with_a_kill(tmp_path: Path) -> None:
    """Two processes, killed once: the parts add up to the script's own clock, and are what the script sleeps."""
    ended = torchrun(2, "-m", "tests.helpers.ledger_job", tmp_path, 50, 38, folder=tmp_path, restarts=3)
    assert ended.returncode == 0, ended.stderr
    moments = [float(line.split()[1]) for line in (tmp_path / "moments.txt").read_text().splitlines()]
    made = ledger(read_table(tmp_path / "telemetry.jsonl"), "t")
    assert made is not None
    assert made.wall_s == pytest.approx(moments[-1] - moments[0], rel=0.01)
    assert sum(made.parts_s.values()) == pytest.approx(made.wall_s, rel=1e-9)
    assert abs(made.parts_s["unaccounted"]) < 0.01 * made.wall_s
    assert (made.starts, made.steps, made.checkpoints, made.remarks) == (2, 50, 2, [])
    assert 8 <= made.lost_steps <= 18  # of the last second no row was written
    lost_s = (LOAD_S + EXTRA_S) * made.lost_steps
    known = {"waiting for data": 48 * LOAD_S, "waiting for the slowest rank": 50 * EXTRA_S / 2}
    known |= {"compute": 50 * EXTRA_S / 2, "checkpoint": 2 * SAVE_S, "lost work": lost_s}
    for part, least_s in known.items():
        assert 0.97 * least_s <= made.parts_s[part] <= 1.5 * least_s + 0.2, (part, made)


@pytest.mark.slow
def test_jobs_that_are_killed_at_random(tmp_path: Path) -> None:
    """The ledger is the job's own clock; the goodput is what the model expects of the kills (three jobs: 8 % by chance)."""
    failures, step_s = bench_failures.time_one(tmp_path, 15.0)
    predicted, outcomes = bench_failures.measure(tmp_path / "jobs", failures, step_s, jobs=3, seconds=25.0, at_once=3)
    assert sum(it.kills for it in outcomes) > 2
    for it in outcomes:
        assert it.ledger.wall_s == pytest.approx(it.clock_s, rel=0.01)
        assert sum(it.ledger.parts_s.values()) == pytest.approx(it.ledger.wall_s, rel=1e-9)
        assert it.ledger.steps == round(25.0 / step_s)
        assert 1 <= it.ledger.starts <= it.kills + 1
    assert bench_failures.goodput(outcomes) == pytest.approx(predicted, rel=0.3)
