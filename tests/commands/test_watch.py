"""``ddltool profile watch``: real processes, a CSV that ``balance`` reads, and figures that follow from its rows."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ddltool.analyzers.step.measured.worker_tables import read_speeds
from ddltool.commands.profile import watch_workers
from ddltool.errors import InputError
from ddltool.runtime.measuring.profiling import RESOLVER
from ddltool.runtime.measuring.watch import SpeedRow, WatchRequest, record, summarise
from tests.conftest import Result
from tests.helpers.processes import workers_of


def row(iteration: int, worker: str, speed: float) -> SpeedRow:
    return SpeedRow(iteration=iteration, worker=worker, speed=speed, cpu=0.5, memory=0.25)


def test_figures_follow_from_the_rows() -> None:
    rows = [row(k, name, speed) for k in range(20) for name, speed in (("w10", 30.0), ("w9", 10.0))]
    rows = [row(0, "w9", 1e-3) if r.iteration == 0 and r.worker == "w9" else r for r in rows]
    found = summarise(rows, 60)
    assert [worker.worker for worker in found.workers] == ["w9", "w10"]
    assert found.workers[0].speed == 10.0
    assert found.equal_split_s == pytest.approx(6.0)
    assert found.speeds_known_s == pytest.approx(3.0)
    assert found.left_out == 5
    assert summarise(rows[:4], 60).left_out == 0


def test_real_processes_give_a_trace_for_balance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "trace.csv"
    request = WatchRequest(source="zoo:cifarnet", resolver=RESOLVER, batch=2, workers=2, iterations=12)
    watch_workers(request, output, False)
    shown = capsys.readouterr().out
    assert "12 iterations with 2 samples per worker, measured" in shown
    assert max(map(len, shown.splitlines())) <= 80 + len(str(output)) * 2
    trace = read_speeds(output, print)
    assert trace.names == ("w0", "w1")
    assert trace.iterations == 12


@pytest.mark.slow
def test_a_killed_worker_costs_its_last_moments_only(tmp_path: Path) -> None:
    """Killed in the middle: exit code 1, who, how and when, and the iterations that all had completed stay."""
    output = tmp_path / "trace.csv"
    command = [
        *("-m", "ddltool", "profile", "watch", "zoo:cifarnet", "--iterations", "1000000"),
        "--batch-size",
        "2",
        "--replicas",
        "2",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(
        [sys.executable, *command, "-o", str(output)], stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        victim = _after_some_work(running.pid)
        victim.kill()
        told = running.communicate(timeout=60)[1]
    finally:
        running.kill()
    assert running.returncode == 1
    line = next(line for line in told.splitlines() if line.startswith("error: "))
    found = re.search(
        r"worker w([01]) was killed \(SIGKILL: .*\) at iteration (\d+); the (\d+) iterations that all", line
    )
    assert found is not None, told
    trace = read_speeds(output, print)
    assert trace.iterations == int(found[3]) <= int(found[2])
    assert trace.names == ("w0", "w1")


def _after_some_work(command: int) -> psutil.Process:
    """Return a watched process that has trained for some seconds of CPU."""
    workers, deadline = workers_of(command, 2), time.monotonic() + 120
    while min(sum(worker.cpu_times()[:2]) for worker in workers) < 8:
        assert time.monotonic() < deadline, "no worker trained"
        time.sleep(0.1)
    return workers[1]


@pytest.mark.slow
def test_each_worker_stays_on_the_core_asked_for() -> None:
    usable = sorted(os.sched_getaffinity(0))
    asked = (usable[-1], usable[0])
    request = WatchRequest(
        source="zoo:cifarnet",
        resolver=RESOLVER,
        batch=2,
        workers=2,
        iterations=200,
        cores=asked,
    )
    seen: set[tuple[int, ...]] = set()

    def look(done: int) -> None:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                seen.add(tuple(child.cpu_affinity()))

    record(request, look)
    assert {(core,) for core in asked} <= seen


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cores", "0,x"), "--cores: '0,x' is not a list of whole numbers"),
        (("--cores", "0,-1"), "--cores: -1 is below 0"),
        (("--cores", "0"), "--cores: names 1 cores"),
        (("--cores", f"{max(os.sched_getaffinity(0))},99999"), "--cores: 99999 is not here; usable: "),
        (("--iterations", "0"), "--iterations: is 0; give a whole number of at least 1"),
        (("--replicas", "4000"), "--replicas: is 4000; watch at most 256 local processes"),
        (("-o", "/nowhere/at/all.csv"), "/nowhere/at/all.csv"),
    ],
)
def test_what_cannot_be_watched(cli: Callable[..., Result], arguments: tuple[str, ...], message: str) -> None:
    result = cli("profile", "watch", "zoo:mlp", "--iterations", "3", "--json", *arguments)
    assert result.code == 2
    assert message in result.error_line


def test_more_rows_than_can_be_kept_are_refused() -> None:
    with pytest.raises(InputError, match="iterations: would make 2000000000 rows"):
        WatchRequest(source="zoo:mlp", resolver=RESOLVER, batch=8, iterations=10**9)
