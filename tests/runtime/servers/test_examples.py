"""The launcher that leaves the other ranks alone, and the example that workers join late."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.helpers.processes import wait_until

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
LAUNCH = [sys.executable, str(EXAMPLES / "sync_launch.py")]

# Rank 1 goes on until it is told to end, as every rank does on SIGTERM, or until it is alone; rank 0 is killed at once.
RANKS = """
import os, pathlib, signal, sys, time
pathlib.Path(os.environ["DDLTOOL_BEGUN"]).touch()
rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
here = pathlib.Path(__file__).parent
(here / f"begun-{rank}").touch()
print(f"I am {rank} of {size}, {sys.argv[1]}", flush=True)
if rank == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if rank == "1" and sys.argv[1] == "alone":
    import psutil
    while not (here / "begun-0").exists() or not (here / "begun-2").exists():  # nor has it started them
        time.sleep(0.05)
    while len(psutil.Process(os.getppid()).children()) > 1:  # the launcher has not seen the others end
        time.sleep(0.05)
elif rank == "1":
    time.sleep(float(sys.argv[1]))
sys.exit(0 if rank == "1" else 7)
"""


def test_the_others_go_on_when_one_is_killed(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    done = subprocess.run(
        [*LAUNCH, "3", str(tmp_path / "ranks.py"), "alone"], capture_output=True, text=True, timeout=300, check=False
    )
    ends = re.findall(r"^rank (\d) (.*) after", done.stdout, re.MULTILINE)
    assert sorted(ends) == [("0", "was killed by SIGKILL"), ("1", "ended with 0"), ("2", "ended with 7")], done.stderr
    assert ends[-1][0] == "1", "the one that goes on was left alone"
    assert done.stdout.count("of 3, alone") == 3
    assert done.returncode == 7, "the last rank's"


# A job of two workers and a server; the rank in GONE ends at the place in WHERE, the others train.
STARTING = """
import os, signal, torch
from torch import nn
from ddltool.runtime.servers import BSP, Server, TransferPlan, Worker
rank, where = int(os.environ["RANK"]), os.environ["WHERE"]
def leave(place):
    if rank == int(os.environ["GONE"]) and where == place:
        os.kill(os.getpid(), signal.SIGKILL)
leave("first")
torch.manual_seed(0)
net = nn.Linear(2, 2)
plan = TransferPlan.for_model(net, workers=2, servers=1)
if rank == 2:
    Server(net, plan, torch.optim.SGD(net.parameters(), lr=0.1), BSP()).serve()
else:
    with Worker(net, plan, BSP()) as worker:
        for step in range(10):
            with worker.step():
                net(torch.ones(1, 2)).sum().backward()
            leave("in training")
    print(f"rank {rank} made {worker.clock} steps", flush=True)
"""


def started(folder: Path, gone: int, where: str) -> subprocess.CompletedProcess[str]:
    (folder / "starting.py").write_text(STARTING)
    environment = dict(os.environ) | {"GONE": str(gone), "WHERE": where, "OMP_NUM_THREADS": "1"}
    command = [*LAUNCH, "3", str(folder / "starting.py")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("gone", [0, 2])
def test_one_that_dies_while_it_starts_ends_the_others(gone: int, tmp_path: Path) -> None:
    done = started(tmp_path, gone, "first")
    ends = dict(re.findall(r"^rank (\d) (was .*|ended with \d+) after", done.stdout, re.MULTILINE))
    assert ends.pop(str(gone)) == "was killed by SIGKILL"
    assert len(ends) == 2
    assert "ended with 0" not in ends.values()
    assert done.stdout.count(f"rank {gone} ended before the job began") == 1
    assert done.returncode != 0


@pytest.mark.slow
def test_one_that_dies_in_training_does_not(tmp_path: Path) -> None:
    done = started(tmp_path, 1, "in training")
    assert "rank 0 made 10 steps" in done.stdout, done.stderr
    assert "before the job began" not in done.stdout
    assert done.returncode == 0


def test_sigterm_reaches_every_rank(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    with subprocess.Popen([*LAUNCH, "2", str(tmp_path / "ranks.py"), "600"], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        lines = []
        while not any("I am 1" in line for line in lines):
            lines.append(job.stdout.readline())
            assert lines[-1], "the job ended too early"
        job.send_signal(signal.SIGTERM)
        rest, _ = job.communicate(timeout=180)
        assert "rank 1 was killed by SIGTERM" in rest
        assert job.returncode == signal.SIGTERM


@pytest.mark.parametrize("arguments", [[], ["3"], ["none", "script.py"], ["0", "script.py"]])
def test_what_the_launcher_needs_is_told(arguments: list[str]) -> None:
    done = subprocess.run([*LAUNCH, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("usage: python ")


def listened_at() -> set[int]:
    return {place.laddr.port for place in psutil.net_connections("tcp") if place.status == psutil.CONN_LISTEN}


@pytest.mark.slow
def test_a_worker_joins_the_example(tmp_path: Path) -> None:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    meeting = {"DDLTOOL_SERVER": f"127.0.0.1:{port}", "DDLTOOL_TOKEN": "secret"}
    environment = dict(os.environ) | meeting | {"UPDATES": "800", "OMP_NUM_THREADS": "1"}
    example = str(EXAMPLES / "sync_join.py")
    with subprocess.Popen(
        [*LAUNCH, "3", example], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as job:
        wait_until(lambda: port in listened_at(), "the job's server listens")
        joined = subprocess.run(
            [sys.executable, example], env=environment, capture_output=True, text=True, timeout=300, check=True
        )
        told, _ = job.communicate(timeout=300)
    assert joined.stdout.startswith("worker 2 begins with step "), joined.stderr
    assert re.search(r"\d+ updates, loss 0\.\d+; steps made: worker 0 \d+, worker 1 \d+, worker 2 \d+", told), told
    assert job.returncode == 0
