"""Measuring with the processes of a torchrun job: one voice, one file, and one line when a rank fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddltool.commands.main import run
from ddltool.errors import InputError
from ddltool.profiles import read_profile
from ddltool.runtime.measuring.rendezvous import job_from_environment
from ddltool.runtime.measuring.torchrun_job import TorchrunJob
from ddltool.runtime.measuring.worker import Subject
from tests.helpers.processes import as_job

MODEL = """
import os, signal, torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(32, 32), 0

    def forward(self, x):
        print("a word of the model's own")
        self.calls += 1
        if os.environ["RANK"] == "1" and self.calls > 2:
            if os.environ.get("BAD") == "raises":
                raise ValueError("rank one is ill")
            if os.environ.get("BAD") == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x)

def make():
    return Model(), (torch.randn(4, 32),)
"""
ENVIRONMENT = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def torchrun(folder: Path, *arguments: str, bad: str = "") -> subprocess.CompletedProcess[str]:
    """Run ``ddltool profile`` in two processes."""
    (folder / "model.py").write_text(MODEL)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command = [*launcher, *place, "-m", "ddltool", "profile", "model.py:make", *arguments]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, "BAD": bad}, capture_output=True, text=True, timeout=240, check=False
    )


def lines_of_ours(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("error: ")]


@pytest.mark.slow
def test_one_file_for_all_replica_counts(tmp_path: Path) -> None:
    done = torchrun(
        tmp_path, "--batch-sizes", "16,64", "--repeats", "4", "--accumulation", "0,1", "-o", "p.csv", "--json"
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    frame = read_profile(tmp_path / "p.csv")
    keys = frame[["num_nodes", "num_replicas", "accumulation_steps", "local_batch_size"]].to_numpy().tolist()
    assert keys == [[1, replicas, steps, batch] for replicas in (1, 2) for steps in (0, 1) for batch in (16, 64)]
    assert len(document["rows"]) == 8
    assert (frame["sync_time_s"] < frame["step_time_s"]).all()
    assert "a word" not in done.stdout


ILL = "error: rank 1: model.py:make: a training step failed (ValueError: rank one is ill)"
REQUEST = ("--batch-sizes", "16", "--repeats", "20", "-o", "p.csv")


def profile(rank: int, bad: str) -> None:
    """Be one rank of a job that measures."""
    os.environ["BAD"] = bad
    sys.exit(run(["profile", "model.py:make", *REQUEST]))


def test_a_failing_rank_ends_all_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    ended = as_job(2, tmp_path, profile, "raises")
    assert all(code for code, _, _ in ended)
    assert [printed for _, printed, _ in ended] == ["", ""]
    check_line("".join(told for *_, told in ended), tmp_path, ILL)


@pytest.mark.slow
@pytest.mark.parametrize(("bad", "message"), [("raises", ILL), ("killed", "error: batch 16 on 2 replicas: ")])
def test_under_torchrun_a_failing_rank_ends_all_with_one_line(tmp_path: Path, bad: str, message: str) -> None:
    done = torchrun(tmp_path, *REQUEST, bad=bad)
    assert done.returncode != 0
    assert done.stdout == ""
    check_line(done.stderr, tmp_path, message)


def check_line(told: str, folder: Path, message: str) -> None:
    (line,) = lines_of_ours(told)
    assert line.startswith(message)
    assert read_profile(folder / "p.csv")["num_replicas"].tolist() == [1]  # what was measured before is kept


def test_more_replicas_than_processes() -> None:
    place = job_from_environment(ENVIRONMENT)
    assert place is not None
    subject = Subject(source="s", resolver="m:f", device="cpu", threads=1)
    with pytest.raises(InputError, match="--replicas: 9 is more than the job's 8 processes; start 9 with torchrun"):
        TorchrunJob(place, subject, (1, 9))


def test_the_place_of_a_process() -> None:
    place = job_from_environment(ENVIRONMENT)
    assert place is not None
    assert (place.rank, place.world_size, place.node, place.local_rank) == (3, 8, 1, 1)
    given = job_from_environment({**ENVIRONMENT, "GROUP_RANK": "2", "LOCAL_RANK": "0"})
    assert given is not None
    assert (given.node, given.local_rank) == (2, 0)
    assert job_from_environment({"RANK": "0"}) is None
    with pytest.raises(InputError, match="WORLD_SIZE: is 'x'; start the job with torchrun"):
        job_from_environment({**ENVIRONMENT, "WORLD_SIZE": "x"})
