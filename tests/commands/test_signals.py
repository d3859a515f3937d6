"""Ctrl-C and SIGTERM in the middle of the commands that last: one line, soon, and nothing of theirs is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ddltool.shipped import folder

LOADS = folder() / "workloads"
JOBS = ("many.csv", "--cluster", LOADS / "cluster.yaml", "--traces", LOADS / "traces", "--policy", "pollux,ours,sia")
SCRIPT = "import time\nwhile True:\n    time.sleep(0.01)\n"
MODEL = """
import pathlib, time
from torch import nn, ones

class Slow(nn.Linear):
    def forward(self, x):
        pathlib.Path('begun').touch()
        time.sleep(30)
        return super().forward(x)

def make():
    return Slow(4, 4), (ones(2, 4),)
"""
COMMANDS: dict[str, tuple[object, ...]] = {
    "simulate": (*JOBS, "-o", "out.json"),
    "simulate sweep": (*JOBS, "--seeds", "4", "--jobs", "2", "-o", "out.json"),
    "report": ("many.jsonl", "-o", "out.html"),
    "plan": ("model.py:make", "--devices", "64xH100", "-o", "out.json"),
    "profile": ("model.py:make", "--batch-sizes", "1,2,4", "--replicas", "1,2", "-o", "out.csv"),
    "predict": ("--device", "V100", "--limit", "600", "-o", "out.csv", "--", "python", "script.py"),
}
BUSY_S = 1.5
"""CPU time after which a command, which takes several times as long, has begun."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands take long for."""
    made = tmp_path_factory.mktemp("signals")
    rows = (LOADS / "synthetic.csv").read_text().splitlines()
    jobs = [f"{row.partition(',')[0]}-{copy},{row.partition(',')[2]}" for copy in range(20) for row in rows[1:]]
    (made / "many.csv").write_text("\n".join([rows[0], *jobs]) + "\n")
    step = {"rank": 0, "world_size": 1, "device": "V100", "local_batch_size": 8, "total_batch_size": 8}
    steps = (json.dumps({"step": number, "step_time_s": 0.1, **step}) for number in range(400_000))
    (made / "many.jsonl").write_text("\n".join(steps) + "\n")
    (made / "model.py").write_text(MODEL)
    (made / "script.py").write_text(SCRIPT)
    return made


def _begun(process: psutil.Process, place: Path, name: str) -> bool:
    """Whether a command is in the middle of its work."""
    if name in ("plan", "profile"):
        return (place / "begun").exists()
    at_work = process.children() if name in ("simulate sweep", "predict") else [process]  # what the command started
    return bool(at_work) and at_work[-1].cpu_times().user > BUSY_S


def _shared(process: psutil.Process) -> set[str]:
    """The semaphores and other shared memory with a name that a process holds."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line and "deleted" not in line}


@pytest.mark.parametrize("sent", ["SIGINT", "SIGTERM", "SIGTERM to all"])
@pytest.mark.parametrize(
    "name", ["simulate", *(pytest.param(each, marks=pytest.mark.slow) for each in list(COMMANDS)[1:])]
)
def test_a_signal_in_the_middle(place: Path, tmp_path: Path, name: str, sent: str) -> None:
    (place / "begun").unlink(missing_ok=True)
    before = set(os.listdir(place))
    number = signal.Signals[sent.split()[0]]
    with subprocess.Popen(
        [sys.executable, "-m", "ddltool", *name.split(), *map(str, COMMANDS[name])],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True},
        cwd=place,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as child:
        process = psutil.Process(child.pid)
        while not _begun(process, place, name):
            assert child.poll() is None, child.stderr and child.stderr.read()
            time.sleep(0.02)
        family = [process, *process.children(recursive=True)]
        shared = {path for each in family for path in _shared(each)}
        began_s = time.monotonic()
        (os.kill if sent == "SIGTERM" else os.killpg)(child.pid, number)
        out, err = child.communicate(timeout=60)
        took_s = time.monotonic() - began_s
    assert (child.returncode, out, err.splitlines()[-1]) == (128 + number, "", "error: interrupted"), err
    assert err.count("error: ") == 1
    assert "Traceback" not in err
    assert "resource_tracker" not in err
    assert not psutil.wait_procs(family, timeout=5)[1]
    print(f"{name} {sent}: {took_s:.2f} s at a load of {os.getloadavg()[0]:.0f}")
    assert took_s < 2 * (1 + os.getloadavg()[0] / (os.cpu_count() or 1))
    assert not any(Path(path).exists() for path in shared)
    assert set(os.listdir(place)) - {"begun", "__pycache__"} == before - {"__pycache__"}
    assert [name for name in os.listdir(tmp_path) if not name.startswith("torchinductor")] == []  # torch's own cache


def test_an_interruption_within_a_text_that_is_executed_ends_by_its_code(tmp_path: Path) -> None:
    """The interpreter of ``python -m`` would else end by SIGINT, as after a KeyboardInterrupt that nobody caught."""
    text = "import signal; signal.raise_signal(signal.SIGTERM)"
    (tmp_path / "interrupted.py").write_text(
        "import ddltool.__main__, ddltool.commands.main as commands\n"
        f"commands.app = lambda **_: exec({text!r})\n"
        "ddltool.__main__.main()\n"
    )
    command = [sys.executable, "-m", "interrupted"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (143, "error: interrupted\n")
