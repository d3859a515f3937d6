"""``ddltool barrier``: keys, files, and one line for every kind of bad input."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import numpy as np
import pytest

from ddltool.analyzers.job.barriers.zipline import zipline
from ddltool.telemetry import SummaryRow, TelemetryRow
from tests.conftest import Cli, write

HEADER = "worker,iteration,end_s"
EXAMPLE = Path(__file__).resolve().parents[2] / "fixtures" / "barrier" / "times.csv"
FIGURES = {"waiting_time_s", "barrier_s", "total_waiting_s", "waiting_per_iteration_s", "iteration_gap"}
PREDICTED = [[1.0, 5.0, 9.0], [3.0, 6.0, 11.0], [2.0, 7.0, 9.5]]


@pytest.fixture
def predictions(tmp_path: Path) -> Path:
    rows = [f"w{w},{i},{end}" for w, ends in enumerate(PREDICTED) for i, end in enumerate(ends, start=1)]
    return write(tmp_path / "times.csv", HEADER, *rows[::-1])  # the order of the rows means nothing


def test_json_keeps_its_contract(cli: Cli) -> None:
    result = cli("barrier", EXAMPLE, "--algorithm", "all", "--json")
    assert (result.code, result.err) == (0, "")
    document = result.document
    assert set(document["algorithms"]) == {"zipline", "gridscan", "fullgridscan"}
    for record in (*document["algorithms"].values(), *document["objectives"].values(), document["bsp"]):
        assert set(record) == FIGURES | {"iterations", "iterations_per_s", "compute_seconds"}
        assert list(record["iterations"]) == ["w0", "w1", "w2", "w3"]
    assert set(document["bsp"]["iterations"].values()) == {1}
    assert (document["lookahead"], document["workers"], document["predictor"]) == (15, 4, "ema")
    waiting = document["algorithms"]["zipline"]["waiting_time_s"]
    assert waiting == document["objectives"]["waiting"]["waiting_time_s"]
    assert waiting < document["bsp"]["waiting_time_s"]
    totals = [point["total"]["total_waiting_s"] for point in document["tradeoff"]]
    assert totals == sorted(totals, reverse=True)
    assert set(document["tradeoff"][0]["per_iteration"]) == FIGURES


def test_predictions_are_taken_as_they_are(cli: Cli, predictions: Path) -> None:
    document = cli("barrier", predictions, "--predicted", "--json").document
    expected = zipline(PREDICTED)
    record = document["algorithms"]["zipline"]
    assert (
        (record["waiting_time_s"], record["barrier_s"]) == (expected.waiting_time_s, expected.barrier_s) == (2.0, 3.0)
    )
    assert list(record["iterations"].values()) == expected.iterations.tolist()
    assert (document["lookahead"], document["predictor"]) == (3, None)
    assert document["bsp"]["total_waiting_s"] == 3.0
    assert cli("barrier", predictions, "--predicted", "--lookahead", 2, "--json").document["lookahead"] == 2


def test_steady_workers_meet_where_their_periods_meet(cli: Cli, tmp_path: Path) -> None:
    """Periods of 2 s and 3 s recorded until 12 s meet at 18 s."""
    rows = [f"slow,{i},{3 * i}" for i in range(1, 5)] + [f"fast,{i},{2 * i}" for i in range(1, 7)]
    path = write(tmp_path / "times.csv", HEADER, *rows)
    for predictor in ("last", "ema", "mean"):
        document = cli("barrier", path, "--predictor", predictor, "--json").document
        record = document["algorithms"]["zipline"]
        assert (record["iterations_per_s"], document["bsp"]["iterations_per_s"]) == pytest.approx((5 / 6, 2 / 3))
        assert record["barrier_s"] == pytest.approx(18.0)
        assert record["waiting_time_s"] == pytest.approx(0.0, abs=1e-9)
        assert record["iterations"] == {"fast": 3, "slow": 2}
    assert "25% more iterations a second than BSP's (predicted)" in " ".join(cli("barrier", path).out.split())


def test_the_gap_is_kept(cli: Cli) -> None:
    answer = cli("barrier", EXAMPLE, "--lookahead", 30, "--max-gap", 1).done().out
    assert re.match(r"Synchronise after 1 to 2 iterations .*, up to 1\s+iteration\s+stale\.", answer, re.DOTALL)
    document = cli("barrier", EXAMPLE, "--max-gap", 2, "--json").document
    assert document["max_gap"] == 2
    for record in document["objectives"].values():
        counts = list(record["iterations"].values())
        assert max(counts) - min(counts) == record["iteration_gap"] <= 2
    assert document["algorithms"]["zipline"]["iteration_gap"] > 2


def test_tables_fit_80_columns_and_files_are_written(cli: Cli, tmp_path: Path) -> None:
    output = tmp_path / "barrier.json"
    result = cli("barrier", EXAMPLE, "--algorithm", "all", "-o", output).done()
    assert max(map(len, result.out.replace(str(tmp_path), "").splitlines())) <= 80
    assert "fullgridscan" in result.out
    assert json.loads(output.read_text(encoding="utf-8"))["kind"] == "ddltool.barrier"


def test_many_workers_are_summed_up(cli: Cli, tmp_path: Path) -> None:
    rows = [f"{w},{i},{i * (1 + w / 7):.6f}" for w in range(30) for i in range(1, 40)]
    result = cli("barrier", write(tmp_path / "times.csv", HEADER, *rows), "--lookahead", 40).done()
    assert "Iterations of 30 workers" in result.out
    assert "median" in result.out
    assert "stop more than two of their iterations before the newest row" in result.err


def telemetry(path: Path, *, wait: float = 0.5) -> Path:
    lines = []
    for step in range(6):
        for rank, own in ((0, 1.0), (1, 1.5)):
            wait_s = wait if rank == 0 else 0.0
            row = TelemetryRow(
                **{
                    **{"rank": rank, "step": step, "world_size": 2, "num_nodes": 1, "device": "cpu"},
                    **{"batch": 1, "total_batch": 2},
                },
                **{"compute_s": own, "sync_s": 0.0, "memory_bytes": 0.0, "step_s": own + wait_s, "wait_s": wait_s},
            )
            lines.append(row.model_dump_json())
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_telemetry_counts_without_its_waiting(cli: Cli, tmp_path: Path) -> None:
    """Under BSP every step lasts 1.5 s; without waiting the ranks need 1 s and 1.5 s, and meet after 3 s."""
    document = cli("barrier", telemetry(tmp_path / "telemetry.jsonl"), "--json").document
    record = document["algorithms"]["zipline"]
    assert record["barrier_s"] == pytest.approx(3.0)
    assert record["iterations"] == {"0": 3, "1": 2}
    assert document["bsp"]["waiting_time_s"] == pytest.approx(0.5)


def test_telemetry_of_a_sync_server_counts_without_its_waiting(cli: Cli, tmp_path: Path) -> None:
    """Two steps a second and three in two, under BSP: every step ends when the slower one's does."""
    path = tmp_path / "sync.jsonl"
    lines = []
    for step in range(6):
        for worker, own in ((0, 1.0), (1, 1.5)):
            time_s = 1.5 * step + own
            row = {
                **{"event": "step", "time_s": time_s, "worker": worker},
                **{"step": step, "wait_s": 1.5 - own if step else 0},
            }
            lines.append(json.dumps({"kind": "ddltool.sync", **row, "staleness": 0, "gap": 0, "dropped": False}))
    for changed, row, message in (
        ({"worker": "abc"}, 3, "worker: is 'abc'; give a whole number"),
        ({"wait_s": -3.0}, 5, "wait_s: is -3.0; give a number of at least 0"),
    ):
        wrong = [*lines[: row - 1], json.dumps(json.loads(lines[row - 1]) | changed), *lines[row:]]
        gone = {"kind": "ddltool.sync", "event": "left", "time_s": 0.5, "worker": 7, "lost": False, "reason": "closed"}
        path.write_text("\n".join([json.dumps(gone), *wrong]) + "\n", encoding="utf-8")
        refused = cli("barrier", path)
        assert (refused.code, refused.out) == (2, "")
        assert refused.error_line.startswith(f"{path}:line {row + 1}:{message}"), "rows are those of the file"
    lines.append(
        SummaryRow(
            **{
                **{"time_s": 9.0, "policy": "bsp", "steps": [6, 6], "updates": 12},
                **{"updates_per_s": 1.3, "wait_s": [2.5, 0.0]},
            },
            staleness={0: 12},
        ).model_dump_json()
    )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    record = cli("barrier", path, "--json").document["algorithms"]["zipline"]
    assert record["barrier_s"] == pytest.approx(3.0)
    assert record["iterations"] == {"0": 3, "1": 2}
    path.write_text(lines[-1] + "\n", encoding="utf-8")
    assert cli("barrier", path).code == 2
    path.write_text("\n".join(lines[:3]) + "\n", encoding="utf-8")
    assert f"{path}:worker 1: has one step" in cli("barrier", path).error_line


TWO = ["a,1,1.0", "a,2,2.0", "b,1,1.5", "b,2,3.0"]


@pytest.mark.parametrize(
    ("rows", "options", "line"),
    [
        ([], (), "{file}: has no rows"),
        ([*TWO, "b,3,nan"], (), "{file}:row 5:end_s: is nan; a number from -1e+15 to 1e+15"),
        ([*TWO, "b,3,soon"], (), "{file}:row 5:end_s: is soon"),
        ([*TWO, "b,3,inf"], (), "{file}:row 5:end_s: is inf"),
        ([*TWO, "b,2.5,4.0"], (), "{file}:row 5:iteration: is 2.5; a whole number"),
        ([*TWO, ",3,4.0"], (), "{file}:row 5:worker: is empty, or NA; give a name"),
        ([*TWO, "b,3,1e308"], (), "{file}:row 5:end_s: is 1e+308; a number from -1e+15 to 1e+15"),
        ([*TWO, "b,3,-2e15"], ("--predicted",), "{file}:row 5:end_s: is -2000000000000000; a number"),
        ([*TWO, "b,99999999999999999999,4.0"], (), "{file}:row 5:iteration: is 99999999999999999999; a whole number"),
        ([*TWO, "b,3,2.9"], (), "{file}:row 5:end_s: is 2.9, before the previous end of worker b"),
        ([*TWO, "a,2,2.5"], (), "{file}:row 5:iteration: repeats iteration 2 of worker a"),
        ([*TWO, "a,4,2.5"], (), "{file}:row 5:iteration: is iteration 4 of worker a, which has no iteration 3"),
        ([*TWO, "c,1,2.5"], (), "{file}:worker c: has one row, which gives no iteration length"),
        (
            [*TWO, "b,3,3.0"],
            ("--predictor", "last"),
            "worker b of {file}: its next iterations were predicted to take 0",
        ),
        (TWO[:3], ("--predicted",), "{file}:row 3:iteration: worker b ends with this row, its prediction 1 of 2"),
        (TWO, ("--predicted", "--lookahead", "3"), "{file}:row 2:iteration: worker a ends with this row"),
        (TWO, ("--algorithm", "ziplin"), "--algorithm: unknown algorithm 'ziplin'; did you mean \"zipline\"?"),
        (TWO, ("--predictor", "oracle"), "--predictor: unknown predictor 'oracle'"),
        (TWO, ("--lookahead", "100001"), "--lookahead: "),
        (TWO, ("--predicted", "--predictor", "ema"), "--predictor: has no part in --predicted; leave it out"),
        (TWO, ("--lookahead", "0"), "--lookahead: "),
        (TWO, ("--max-gap", "-1"), "--max-gap: is -1; give a whole number of at least 0"),
        (TWO, ("-o", "/nowhere/barrier.json"), "/nowhere/barrier.json: cannot be written"),
    ],
)
def test_bad_input_is_one_line(cli: Cli, tmp_path: Path, rows: list[str], options: tuple[str, ...], line: str) -> None:
    path = write(tmp_path / "times.csv", HEADER, *rows)
    result = cli("barrier", path, *options)
    assert (result.code, result.out) == (2, "")
    assert result.error_line.startswith(line.format(file=path)), result.error_line


def test_a_missing_column_and_a_missing_file_are_one_line(cli: Cli, tmp_path: Path) -> None:
    path = write(tmp_path / "times.csv", "worker,iteration,ends", *TWO)
    assert cli("barrier", path).error_line == f'{path}:end_s: no such column; did you mean "ends"? (known: ends, iteration, worker)'  # fmt: skip  # noqa: E501
    assert "no such file" in cli("barrier", tmp_path / "none.csv").error_line
    (tmp_path / "empty.csv").touch()
    remedy = "expected columns worker, iteration, end_s"
    assert cli("barrier", tmp_path / "empty.csv").error_line == f"{tmp_path / 'empty.csv'}: is empty; {remedy}"
    waited = telemetry(tmp_path / "telemetry.jsonl", wait=0.0)
    text = waited.read_text(encoding="utf-8")
    waited.write_text(
        text.replace('"wait_s":0.0,"sync_s":0.0,"step_s":1.5', '"wait_s":1.5,"sync_s":0.0,"step_s":1.5', 1),
        encoding="utf-8",
    )
    assert "row 2:wait_s: is 1.5; it must be less than the row's step_s" in cli("barrier", waited).error_line


def test_a_mistake_in_a_long_file_is_one_line(cli: Cli, tmp_path: Path) -> None:
    """Long columns are read in chunks, whose types may then differ: that must not warn."""
    rows = [f"{w},{i},{i}" for w in range(20) for i in range(1, 20_001)]
    rows[-1] = "19,20000,late"
    result = cli("barrier", write(tmp_path / "times.csv", HEADER, *rows))
    assert result.err.splitlines() == [f"error: {tmp_path / 'times.csv'}:row 400000:end_s: is late; a number from -1e+15 to 1e+15"]  # fmt: skip  # noqa: E501


@pytest.mark.slow
def test_a_million_rows_take_seconds(cli: Cli, tmp_path: Path) -> None:
    chance = np.random.default_rng(0)
    ends = np.cumsum(chance.uniform(0.5, 2.0, (1000, 1)) * chance.uniform(0.9, 1.1, (1000, 1000)), axis=1)
    rows = [f"w{w},{i},{end:.6f}" for w, row in enumerate(ends.tolist()) for i, end in enumerate(row, start=1)]
    path = write(tmp_path / "times.csv", HEADER, *rows)
    begin = time.process_time()
    document = cli("barrier", path, "--lookahead", 150, "--json").document
    whole = time.process_time() - begin
    assert document["workers"] == 1000
    # Against what reading the same text line by line takes in this process, so that no machine's speed counts.
    begin = time.process_time()
    [(worker, int(i), float(end)) for worker, i, end in (row.split(",") for row in rows)]
    assert whole < 30 * (time.process_time() - begin)


def test_a_worker_may_be_called_nan(cli: Cli, tmp_path: Path) -> None:
    rows = [f"{name},{k},{k * length}" for name, length in (("NaN", 2.0), ("NA", 3.0)) for k in range(1, 9)]
    document = cli("barrier", write(tmp_path / "times.csv", HEADER, *rows), "--json").document
    assert set(document["bsp"]["iterations"]) == {"NaN", "NA"}


def test_times_up_to_the_limit_stay_finite(cli: Cli, tmp_path: Path) -> None:
    rows = ["a,1,-1e15", "a,2,1e15", "b,1,0", "b,2,1e15"]
    result = cli(
        "barrier", write(tmp_path / "times.csv", HEADER, *rows), "--json", "--algorithm", "all", "--lookahead", 100
    )
    assert (result.code, result.err) == (0, "")
    assert "Infinity" not in result.out
    assert "NaN" not in result.out
