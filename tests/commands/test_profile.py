"""``ddltool profile`` as people run it: rows that survive, files that are refused, and one line for every mistake."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ddltool.profiles import read_profile, write_profile
from tests.conftest import Result
from tests.helpers.processes import workers_of

Cli = Callable[..., Result]
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
    result = cli("profile", "model.py:make", "--batch-sizes", "1,2,4", *again, "--json")
    assert result.code == 0
    assert [row["local_batch_size"] for row in result.document["rows"]] == [1, 2, 4]
    assert file.read_text().startswith(kept)
    assert read_profile(file)["repeats"].tolist() == [40, 40, 3]

    frame = read_profile(file)
    unchanged = file.read_text()
    for change, message in (
        (("--threads", 2), "p.csv:row 1:settings: is threads=1, not threads=2; measure alike, or write another file"),
        (("--device-name", "T4"), "p.csv:row 1:device: is cpu, not T4; measure alike, or"),
    ):
        refused = cli("profile", "model.py:make", "--batch-sizes", "1", *again, *change)
        assert refused.code == 2
        assert message in refused.error_line
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
            time.sleep(0.001)
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
    result = cli("profile", "model.py:make", "--batch-sizes", "1,2", "--repeats", 3, "--json")
    assert result.code == 0
    device = result.document["devices"]["cpu"]
    assert device["memory_limit_origin"] in ("extrapolated", None)
    assert set(device) >= {"saturation_batch", "memory_limit_batch", "launch_overhead_s"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "0"), "--budget: '0' is not a usable time"),
        (("--budget", "nan"), "--budget: 'nan' is not a duration"),
        (("--budget", "1e308h"), "--budget: '1e308h' is longer than"),
        (("--repeats", 10**9), "--repeats: is 1000000000; give a whole number from 1 to 100000"),
        (("--repeats", 0), "--repeats: is 0; give a whole number from 1 to 100000"),
        (("--warmup", 10**9), "--warmup: is 1000000000; give a whole number from 0 to 100000"),
        (("--precision", "0"), "--precision: '0' is not a share"),
        (("--precision", "nan%"), "--precision: 'nan%' is not a share"),
        (("--precision", "200%"), "--precision: '200%' is not a share"),
        (("--batch-sizes", "9" * 5000), "is not a list of whole numbers"),
        (("--batch-sizes", "1,99999999999"), "--batch-sizes: has 99999999999"),
        (("--batch-sizes", ",".join(map(str, range(1, 2000)))), "--batch-sizes: holds 1999 numbers"),
        (("--batch-sizes", "auto", "--repeats", 3), "auto searches with --precision"),
        (("--replicas", "99999"), "--replicas: has 99999"),
        (("--accumulation", "-1"), "--accumulation: -1 is below 0"),
        (("--memory", "lots"), "--memory: 'lots' is not a size"),
        (("--memory", "0"), "--memory: '0' is not a size"),
        (("--memory", "all"), "--memory: all is for GPUs"),
        (("--memory", "9999TiB"), "GiB that are free"),
        (("--memory", "1MiB"), "--memory: even batch 1 needs more than 1.0 MiB"),
        (("--repeats", 3, "--precision", "1%"), "--precision: has no part beside --repeats"),
        (("--accumulation", "99999999"), "--accumulation: has 99999999"),
        (("--resume",), "--resume: has no file to go on with"),
        (("--device", "tpu"), "--device: unknown device 'tpu'"),
        (("-o", "no/such/folder.csv"), "no/such/folder.csv: cannot be written"),
    ],
)
def test_every_mistake_is_one_line(cli: Cli, folder: Path, arguments: tuple[object, ...], message: str) -> None:
    result = cli("profile", "model.py:make", *arguments)
    assert result.code == 2
    assert message in result.error_line
    assert [path.name for path in folder.iterdir() if path.suffix != ".py" and path.is_file()] == []
