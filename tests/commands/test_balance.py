"""``ddltool balance``: keys, files, one line for every kind of bad input; and the recorder that feeds it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.synthetic import cpu_cluster
from ddltool.analyzers.job.balancing.predict import PREDICTORS
from ddltool.analyzers.step.measured.worker_tables import read_speeds
from ddltool.errors import InputError
from ddltool.runtime.measuring.share import expected_cpu
from ddltool.runtime.measuring.watch import SpeedRow, Watch, WatchRequest, record, write_rows
from tests.conftest import Cli

FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "balance"
RECORD = {"rmse", "rmse_relative", "iteration_s", "iteration_time_ratio", "gain_kept"}


def recorded(path: Path, iterations: int = 60, workers: int = 3, seed: int = 0) -> Path:
    trace = cpu_cluster(iterations, seed, workers)
    rows = [
        SpeedRow(iteration=k, worker=f"w{w}", speed=trace.speed[k, w], cpu=trace.cpu[k, w], memory=trace.memory[k, w])
        for k in range(iterations)
        for w in range(workers)
    ]
    write_rows(rows, path)
    return path


@pytest.fixture
def short(tmp_path: Path) -> Path:
    return recorded(tmp_path / "trace.csv")


def test_json_keeps_its_contract(cli: Cli, short: Path) -> None:
    result = cli("balance", short, "--predictor", "all", "--schemes", "--json").done()
    assert result.err.splitlines() == [
        "redundant execution is left out: one worker in 16 is a backup, and the trace has 3",
        "the trace has 60 iterations, so the warm-up is 30 of them",
    ]
    document = result.document
    assert tuple(document["predictors"]) == PREDICTORS
    for record_ in document["predictors"].values():
        assert set(record_) == RECORD
        assert record_["iteration_time_ratio"] >= document["oracle"]["iteration_time_ratio"] * 0.97
    assert document["equal_split"]["iteration_time_ratio"] == 1.0
    assert (document["workers"], document["iterations"], document["warm_up"]) == (3, 60, 30)
    assert document["total_batch"] == 384
    assert set(document["schemes"]) == {
        "predictor", "bsp", "asp", "ssp", "work_shifting", "lb_bsp", "lb_bsp_oracle"
    }  # fmt: skip
    assert document["schemes"]["predictor"] == "narx"


def test_figures_are_those_of_the_definition(cli: Cli, tmp_path: Path) -> None:
    """Two workers, the memoryless method, computed by hand: 20 iterations of warm-up and 20 that are judged."""
    rows = []
    for k in range(40):
        fast = 30 if k < 39 else 10
        rows += [f"{k},b,{fast},1,1", f"{k},a,10,1,1"]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["iteration,worker,speed,cpu,memory", *rows]) + "\n", encoding="utf-8")
    document = cli("balance", path, "--predictor", "last", "--total-batch", 40, "--warm-up", 20, "--json").document
    # Judged are iterations 20 to 39; only in the last one the prediction for b (30 samples of 40) is wrong.
    last = document["predictors"]["last"]
    assert last["rmse"] == pytest.approx((20 / np.sqrt(20) + 0) / 2)
    assert last["iteration_s"] == pytest.approx((19 * 1.0 + 3.0) / 20)
    assert document["equal_split"]["iteration_s"] == pytest.approx(2.0)
    assert document["oracle"]["iteration_s"] == pytest.approx((19 * 1.0 + 2.0) / 20)
    assert last["gain_kept"] == pytest.approx((2 - 1.1) / (2 - 1.05))


def test_tables_fit_80_columns_and_files_are_written(cli: Cli, short: Path, tmp_path: Path) -> None:
    output = tmp_path / "balance.json"
    result = cli("balance", short, "--schemes", "-o", output).done()
    assert max(map(len, result.out.replace(str(tmp_path), "").splitlines())) <= 80
    assert "work shifting" in result.out
    assert json.loads(output.read_text(encoding="utf-8"))["kind"] == "ddltool.balance"


def test_speeds_that_cannot_be_foretold_are_called_so(cli: Cli, tmp_path: Path) -> None:
    line = "Leave the batches equal"
    chance = np.random.default_rng(0)
    for name, steady in (("noise", 0.0), ("steady", 1.0)):
        base = 1.0 + steady * np.arange(4)
        rows = [
            SpeedRow(iteration=k, worker=f"w{w}", speed=base[w] * chance.uniform(0.5, 1.5), cpu=1.0, memory=1.0)
            for k in range(80)
            for w in range(4)
        ]
        write_rows(rows, tmp_path / f"{name}.csv")
        assert (line in cli("balance", tmp_path / f"{name}.csv", "--predictor", "last").out) == (name == "noise")


HEADER = "iteration,worker,speed,cpu,memory"
GOOD = ["0,a,1,1,1", "0,b,2,1,1", "1,a,1,1,1", "1,b,2,1,1"]


@pytest.mark.parametrize(
    ("header", "rows", "text"),
    [
        ("iteration,worker,sped,cpu,memory", GOOD, ':speed: no such column; did you mean "sped"?'),
        (HEADER, [], "has no rows"),
        (HEADER, [*GOOD[:3], "1,b,fast,1,1"], ":row 4:speed: is fast; a number from 1e-09 to 1000000000000"),
        (HEADER, [*GOOD[:3], "1,b,0,1,1"], ":row 4:speed: is 0"),
        (HEADER, [*GOOD[:3], "1,b,inf,1,1"], ":row 4:speed: is inf"),
        (HEADER, [*GOOD[:3], "1,b,2,-0.1,1"], ":row 4:cpu: is -0.1; a number >= 0"),
        (HEADER, [*GOOD[:3], "1,b,2,1,"], ":row 4:memory: is nan"),
        (HEADER, [*GOOD[:3], "1.5,b,2,1,1"], ":row 4:iteration: is 1.5; a whole number"),
        (HEADER, [*GOOD[:3], "1,,2,1,1"], ":row 4:worker: is empty, or NA; give a name"),
        (HEADER, [*GOOD[:3], '1,"b\x07",2,1,1'], ":row 4:worker: is 'b\\x07'; name workers without control characters"),
        (HEADER, [*GOOD[:3], '1,"b\u202e",2,1,1'], ":row 4:worker: is 'b\\u202e'; name"),
        (HEADER, [*GOOD, "1,b,2,1,1"], ":row 5:iteration: repeats iteration 1 of worker b"),
        (HEADER, GOOD[:3], "worker b has no iteration 1; give a row of every worker for every iteration"),
        (HEADER, GOOD, "has 2 iterations, none after the warm-up of 20"),
    ],
)
def test_one_line_for_bad_input(cli: Cli, tmp_path: Path, header: str, rows: list[str], text: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    cli("balance", path).refuses(text)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--predictor", "narks"], 'did you mean "narx"?'),
        (["--total-batch", 2], "--total-batch: is 2; 3 workers need one sample each or more"),
        (["-o", "/nowhere/p.json"], "/nowhere"),
    ],
)
def test_one_line_for_bad_options(cli: Cli, short: Path, options: list[object], text: str) -> None:
    cli("balance", short, *options).refuses(text)


def test_order_of_rows_means_nothing(short: Path, tmp_path: Path) -> None:
    lines = short.read_text(encoding="utf-8").splitlines()
    mixed = tmp_path / "mixed.csv.gz"
    from ddltool.artifacts import write_text

    write_text(mixed, "\n".join([lines[0], *np.random.default_rng(0).permutation(lines[1:])]) + "\n")
    one, other = read_speeds(short, print), read_speeds(mixed, print)
    assert one.names == other.names == ("w0", "w1", "w2")
    for name in ("speed", "cpu", "memory"):
        assert np.array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.csv.gz")), ids=lambda path: path.name)
def test_shipped_traces_can_be_read(path: Path) -> None:
    trace = read_speeds(path, print)
    assert trace.iterations >= 900
    assert path.stat().st_size < 400_000


def test_watch_measures_the_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 12.0, 20.0, 20.5])
    monkeypatch.setattr("ddltool.runtime.measuring.watch.time.perf_counter", lambda: next(clock))
    watch = Watch("w7")
    for samples in (64, 32):
        with watch.iteration(samples):
            pass
    monkeypatch.undo()
    with pytest.raises(ZeroDivisionError), watch.iteration(1):
        _ = 1 / 0
    assert [(row.iteration, row.worker, row.speed) for row in watch.rows] == [(0, "w7", 32.0), (1, "w7", 64.0)]
    assert all(0 < row.cpu <= 1 and 0 < row.memory <= 1 for row in watch.rows)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="counts processes as Linux shows them")
def test_competing_processes_lower_the_expected_share() -> None:
    """On one core with k busy processes the share is at most 1 / (k + 1)."""
    cores = os.sched_getaffinity(0)
    core = min(cores)
    spin = f"import os; os.sched_setaffinity(0, {{{core}}}); print(flush=True)\nwhile True: pass"
    busy = [subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) for _ in range(3)]
    try:
        for process in busy:
            assert process.stdout is not None
            process.stdout.readline()
        os.sched_setaffinity(0, {core})
        assert np.median([expected_cpu() for _ in range(20)]) <= 1 / 4
    finally:
        os.sched_setaffinity(0, cores)
        for process in busy:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def broken_step(source: str, batch: int) -> None:
    raise RuntimeError("no such model")


def test_a_failing_step_is_told_in_one_line() -> None:
    request = WatchRequest(source="broken", resolver="tests.commands.test_balance:broken_step", batch=4, workers=1)
    with pytest.raises(InputError, match="broken: a training step failed .*no such model"):
        record(request)


def two_speeds(path: Path, first: float, second: float) -> Path:
    lines = [f"{k},{name},{speed!r},0.5,0.5" for k in range(30) for name, speed in (("a", first), ("b", second))]
    path.write_text("\n".join(("iteration,worker,speed,cpu,memory", *lines)) + "\n")
    return path


@pytest.mark.parametrize("total", [10**12 + 1, 10**20])
def test_a_total_batch_beyond_all_machines_is_one_line(cli: Cli, tmp_path: Path, total: int) -> None:
    made = cli("balance", two_speeds(tmp_path / "trace.csv", 1.0, 2.0), "--predictor", "ema", "--total-batch", total)
    assert made.code == 2
    assert made.error_line.startswith(f"--total-batch: is {total};")


def test_a_worker_a_billion_times_slower_ends(cli: Cli, tmp_path: Path) -> None:
    """LB-BSP then makes very many iterations in the trace's time; their mean is known long before its end."""
    trace = two_speeds(tmp_path / "trace.csv", 1e9, 1.0)
    made = cli("balance", trace, "--warm-up", 20, "--predictor", "last", "--schemes", "--json")
    assert made.document["schemes"]["lb_bsp"]["iteration_time_ratio"] < 0.1


def test_speeds_too_far_apart_for_schemes_are_one_line(cli: Cli, tmp_path: Path) -> None:
    """Alternating 1e-9 and 1e12: a worker would make 10^21 iterations within a row. Without schemes it is a trace."""
    trace = tmp_path / "trace.csv"
    rows = [f"{k},w{w},{(1e-9, 1e12)[(k + w) % 2]!r},0.5,0.5" for k in range(30) for w in range(3)]
    trace.write_text("\n".join(("iteration,worker,speed,cpu,memory", *rows)) + "\n")
    made = cli("balance", trace, "--warm-up", 20, "--predictor", "last", "--schemes")
    assert made.code == 2
    assert made.error_line == (
        "speeds: lie between 1e-09 and 1e+12 samples per second; schemes are simulated up to a ratio of 1e+09"
    )
    assert cli("balance", trace, "--warm-up", 20, "--predictor", "last").code == 0


def test_alternating_speeds_at_the_limit_end(cli: Cli, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"{k},w{w},{(1.0, 1e9)[(k + w) % 2]!r},0.5,0.5" for k in range(30) for w in range(3)]
    trace.write_text("\n".join(("iteration,worker,speed,cpu,memory", *rows)) + "\n")
    made = cli("balance", trace, "--warm-up", 20, "--predictor", "last", "--schemes", "--json")
    assert made.document["schemes"]["work_shifting"]["iteration_time_ratio"] < 1


def test_missing_iterations_are_told(cli: Cli, short: Path, tmp_path: Path) -> None:
    trace = tmp_path / "gaps.csv"
    lines = short.read_text().splitlines()
    trace.write_text("\n".join(line for line in lines if line.split(",")[0] not in ("40", "41", "50")) + "\n")
    made = cli("balance", trace, "--predictor", "last").done()
    assert "3 iterations are missing, the first between 39 and 42;" in made.err
    assert "missing" not in cli("balance", short, "--predictor", "last").err
