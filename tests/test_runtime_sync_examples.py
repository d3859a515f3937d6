"""The launcher that leaves the other ranks alone, and the example that workers join late."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LAUNCH = [sys.executable, str(EXAMPLES / "sync_launch.py")]

# Rank 1 goes on until it is told to end, as every rank does on SIGTERM; rank 0 is killed at once.
RANKS = """
import os, signal, sys, time
rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
print(f"I am {rank} of {size}, {sys.argv[1]}", flush=True)
if rank == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if rank == "1":
    time.sleep(float(sys.argv[1]))
sys.exit(0 if rank == "1" else 7)
"""


def test_the_others_go_on_when_one_is_killed(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    done = subprocess.run(
        [*LAUNCH, "3", str(tmp_path / "ranks.py"), "0.5"], capture_output=True, text=True, timeout=120, check=False
    )
    ends = re.findall(r"^rank (\d) (.*) after", done.stdout, re.MULTILINE)
    assert sorted(ends) == [("0", "was killed by SIGKILL"), ("1", "ended with 0"), ("2", "ended with 7")], done.stderr
    assert ends[-1][0] == "1", "the one that sleeps was left alone"
    assert done.stdout.count("of 3, 0.5") == 3
    assert done.returncode == 7, "the last rank's"


def test_sigterm_reaches_every_rank(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    with subprocess.Popen([*LAUNCH, "2", str(tmp_path / "ranks.py"), "600"], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        lines = []
        while not any("I am 1" in line for line in lines):
            lines.append(job.stdout.readline())
            assert lines[-1], "the job ended too early"
        job.send_signal(signal.SIGTERM)
        rest, _ = job.communicate(timeout=60)
        assert "rank 1 was killed by SIGTERM" in rest
        assert job.returncode == signal.SIGTERM


@pytest.mark.parametrize("arguments", [[], ["3"], ["none", "script.py"], ["0", "script.py"]])
def test_what_the_launcher_needs_is_told(arguments: list[str]) -> None:
    done = subprocess.run([*LAUNCH, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("usage: python ")


@pytest.mark.slow
def test_a_worker_joins_the_example(tmp_path: Path) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        door = f"127.0.0.1:{one.getsockname()[1]}"
    environment = dict(os.environ) | {"DOOR": door, "UPDATES": "800", "OMP_NUM_THREADS": "1"}
    example = str(EXAMPLES / "sync_join.py")
    with subprocess.Popen(
        [*LAUNCH, "3", example], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as job:
        time.sleep(1)
        joined = subprocess.run(
            [sys.executable, example], env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        told, _ = job.communicate(timeout=120)
    assert joined.stdout.startswith("worker 2 begins with step "), joined.stderr
    assert re.search(r"\d+ updates, loss 0\.\d+; steps made: worker 0 \d+, worker 1 \d+, worker 2 \d+", told), told
    assert job.returncode == 0
