"""``ddltool profile`` as people run it: rows that survive, files that are refused, and one line for every mistake.
``ddltool profile watch``: real processes, a CSV that ``balance`` reads, and figures that follow from its rows.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ddltool.analyzers.step.measured.worker_tables import read_speeds
from ddltool.commands.profile import profile_watch
from ddltool.errors import InputError
from ddltool.profiles import read_profile, write_profile
from ddltool.runtime.measuring.profiling import RESOLVER
from ddltool.runtime.measuring.watch import SpeedRow, WatchRequest, record, summarise
from tests.conftest import Cli
from tests.helpers.processes import workers_of

MODEL = """
import os, time, torch
from torch import nn

class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        print("a word of the model's own")
        if x.shape[0] >= 4 and os.environ.get("SLOW"):
            time.sleep(0.5)
        return self.layer(x)

def make():
    return Slow(), (torch.randn(2, 8),)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ddltool", "profile", "model.py:make", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "SLOW": "1"},
        start_new_session=True,
    )


def hears_interrupts(process: psutil.Process) -> bool:
    """Return whether SIGINT reaches a process: by its mask in the kernel, whatever it has come to doing."""
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigBlk"))
    return not int(mask, 16) & 1 << (signal.SIGINT - 1)


def said(err: str) -> list[str]:
    """Return the lines but for the model's own and, where the machine is busy, how long it takes."""
    return [line for line in err.splitlines() if line != "a word of the model's own" and not line.endswith("s so far")]


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 120
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert path.exists()


@pytest.mark.slow
def test_rows_survive_and_resume_adds_the_missing(cli: Cli, folder: Path) -> None:
    """A worker is killed; a second run with --resume keeps the bytes of the rows and adds the rest."""
    file = folder / "p.csv"
    with start(folder, "--batch-sizes", "1,2,4", "--repeats", "40", "--threads", "1", "-o", "p.csv") as child:
        wait_for(file)
        while len(file.read_text().splitlines()) < 3:
            time.sleep(0.05)
        workers_of(child.pid, 1)[0].kill()
        out, err = child.communicate(timeout=180)
    assert (child.returncode, out) == (1, "")
    last = err.rstrip().splitlines()[-1]
    assert last.startswith("error: batch 4 on 1 replica: process 0 was killed (SIGKILL")
    assert last.endswith("; 2 rows are in p.csv; --resume goes on from there")
    kept = file.read_text()
    assert len(kept.splitlines()) == 3
    again = ("--repeats", 3, "--threads", 1, "-o", "p.csv", "--resume")
    result = cli("profile", "model.py:make", "--batch-sizes", "1,2,4", *again, "--json").done()
    assert [row["local_batch_size"] for row in result.document["rows"]] == [1, 2, 4]
    assert file.read_text().startswith(kept)
    assert read_profile(file)["repeats"].tolist() == [40, 40, 3]

    frame = read_profile(file)
    unchanged = file.read_text()
    for change, message in (
        (("--threads", 2), "p.csv:row 1:settings: is threads=1, not threads=2; measure alike, or write another file"),
        (("--device-name", "T4"), "p.csv:row 1:device: is cpu, not T4; measure alike, or"),
    ):
        cli("profile", "model.py:make", "--batch-sizes", "1", *again, *change).refuses(message)
    (folder / "model.py").write_text(MODEL + "# edited\n")
    edited = cli("profile", "model.py:make", "--batch-sizes", "1", *again)
    assert "p.csv:row 1:source: is model.py:make#" in edited.error_line
    assert file.read_text() == unchanged
    (folder / "model.py").write_text(MODEL)
    write_profile(frame.drop(columns="settings"), file)
    assert "has no column 'settings'" in cli("profile", "model.py:make", *again).error_line
    import pandas as pd

    write_profile(pd.concat([frame, frame.iloc[:1]]), file)
    assert "p.csv:row 4: repeats an earlier configuration" in cli("profile", "model.py:make", *again).error_line


@pytest.mark.slow
def test_resume_keeps_the_number_of_threads(cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas share the cores, so the one that is added later would have more by itself."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    again = ("--batch-sizes", "1", "--repeats", "3", "-o", "p.csv")
    assert cli("profile", "model.py:make", *again, "--replicas", "2").code == 0
    assert cli("profile", "model.py:make", *again, "--resume", "--replicas", "1").code == 0
    settings = read_profile("p.csv")["settings"]
    assert len(settings) == 2
    assert all(";threads=1;" in text for text in settings)


@pytest.mark.parametrize("early", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_interrupts_are_one_line(folder: Path, early: bool) -> None:
    """While the workers import torch, and while they measure; both signals go to the workers too."""
    file = folder / "p.csv"
    with start(folder, "--batch-sizes", "1,8", "--replicas", "1,2", "--repeats", "200", "-o", "p.csv", "-q") as child:
        if not early:
            wait_for(file)
        workers = workers_of(child.pid, 2)
        deadline = time.monotonic() + 60  # not while it starts them: they inherit what it does not hear
        while not hears_interrupts(psutil.Process(child.pid)) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not any(hears_interrupts(worker) for worker in workers)
        os.killpg(child.pid, signal.SIGINT)
        time.sleep(0.01)
        os.killpg(child.pid, signal.SIGINT)
        out, err = child.communicate(timeout=180)
    assert (child.returncode, out) == (130, "")
    assert file.exists() is not early
    if early:
        assert said(err) == ["error: interrupted"]
    else:
        rows = len(file.read_text().splitlines()) - 1
        kept = "1 row is" if rows == 1 else f"{rows} rows are"
        assert said(err) == [f"error: interrupted; {kept} in p.csv; --resume goes on from there"]
    assert not psutil.wait_procs(workers, timeout=60)[1]


@pytest.mark.slow
def test_network_children_keep_quiet_when_interrupted(folder: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "ddltool", "network", "--replicas", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        workers = workers_of(child.pid, 2)
        assert not any(hears_interrupts(worker) for worker in workers)
        os.killpg(child.pid, signal.SIGINT)
        out, err = child.communicate(timeout=180)
    assert (child.returncode, out, said(err)) == (130, "", ["error: interrupted"])


def test_standard_output_gets_the_rows_once(cli: Cli, folder: Path) -> None:
    result = cli("profile", "model.py:make", "--batch-sizes", "1,2", "--repeats", 3, "--json").done()
    device = result.document["devices"]["cpu"]
    assert device["memory_limit_origin"] in ("extrapolated", None)
    assert set(device) >= {"saturation_batch", "memory_limit_batch", "launch_overhead_s"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--time-limit", "0"), "--time-limit: '0' is not a usable time"),
        (("--time-limit", "nan"), "--time-limit: 'nan' is not a duration"),
        (("--time-limit", "1e308h"), "--time-limit: '1e308h' is longer than"),
        (("--repeats", 10**9), "--repeats: is 1000000000; give a whole number from 1 to 100000"),
        (("--repeats", 0), "--repeats: is 0; give a whole number from 1 to 100000"),
        (("--warmup", 10**9), "--warmup: is 1000000000; give a whole number from 0 to 100000"),
        (("--precision", "5%"), "--precision: is 5%, a share; give --half-width 5%"),
        (("--precision", "bf17"), "--precision: unknown precision 'bf17'"),
        (("--precision", "fp8"), "--precision: fp8 is not measured here"),
        (("--precision", "tf32"), "--precision: tf32 is a GPU's"),
        (("--optimizer", "adamv"), "--optimizer: unknown"),
        (("--half-width", "0"), "--half-width: '0' is not a share"),
        (("--half-width", "nan%"), "--half-width: 'nan%' is not a share"),
        (("--half-width", "200%"), "--half-width: '200%' is not a share"),
        (("--batch-sizes", "9" * 5000), "is not a list of whole numbers"),
        (("--batch-sizes", "1,99999999999"), "--batch-sizes: has 99999999999"),
        (("--batch-sizes", ",".join(map(str, range(1, 2000)))), "--batch-sizes: holds 1999 numbers"),
        (("--batch-sizes", "auto", "--repeats", 3), "auto searches with --half-width"),
        (("--replicas", "99999"), "--replicas: has 99999"),
        (("--accumulation", "-1"), "--accumulation: -1 is below 0"),
        (("--memory", "lots"), "--memory: 'lots' is not a size"),
        (("--memory", "0"), "--memory: '0' is not a size"),
        (("--memory", "all"), "--memory: all is for GPUs"),
        (("--memory", "9999TiB"), "GiB that are free"),
        (("--memory", "1MiB"), "--memory: even batch 1 needs more than 1.0 MiB"),
        (("--repeats", 3, "--half-width", "1%"), "--half-width: has no part beside --repeats"),
        (("--accumulation", "99999999"), "--accumulation: has 99999999"),
        (("--resume",), "--resume: has no file to go on with"),
        (("--device", "tpu"), "--device: unknown device 'tpu'"),
        (("-o", "no/such/folder.csv"), "no/such/folder.csv: cannot be written"),
    ],
)
def test_every_mistake_is_one_line(cli: Cli, folder: Path, arguments: tuple[object, ...], message: str) -> None:
    cli("profile", "model.py:make", *arguments).refuses(message)
    assert [path.name for path in folder.iterdir() if path.suffix != ".py" and path.is_file()] == []


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
    profile_watch("zoo:cifarnet", iterations=12, batch_size=2, replicas=2, output=output)
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
    request = WatchRequest(source="zoo:cifarnet", resolver=RESOLVER, batch=2, workers=2, iterations=200, cores=asked)
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
def test_what_cannot_be_watched(cli: Cli, arguments: tuple[str, ...], message: str) -> None:
    cli("profile", "watch", "zoo:mlp", "--json", *arguments).refuses(message)


def test_more_rows_than_can_be_kept_are_refused() -> None:
    with pytest.raises(InputError, match="iterations: would make 2000000000 rows"):
        WatchRequest(source="zoo:mlp", resolver=RESOLVER, batch=8, iterations=10**9)
