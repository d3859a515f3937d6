"""Measuring in real processes: rows that make sense, and failures that are told in one line and leave nobody behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from ddltool.errors import DdlToolError, InputError
from ddltool.profiles import check_profile
from ddltool.runtime.measuring.campaign import MeasureRequest, campaign, reliability
from tests.helpers.processes import children_left, wait_until, workers_of


@dataclass
class Step:
    module: nn.Module
    inputs: tuple[Any, ...]
    keywords: tuple[str, ...] = ()

    @staticmethod
    def loss(output: Tensor) -> Tensor:
        return output.square().mean()


class Limited(nn.Module):
    """Runs out of memory from batch 8 on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] >= 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return self.layer(x)


def resolver(source: str, batch_size: int) -> Step:
    x = torch.randn(batch_size, 16)
    if source == "raises":
        raise ValueError("no such\nweights")
    if source == "dies late" and batch_size == 4 and torch.distributed.get_rank() == 1:
        os._exit(7)
    if source == "killed" and batch_size == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return Step(
        Limited() if source == "limited" else nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)), (x,)
    )


REQUEST = MeasureRequest(
    source="fine",
    resolver="tests.runtime.measuring.test_steps:resolver",
    batch_sizes=(2, 4),
    replicas=(1, 2),
    warmup=1,
    repeats=3,
)


def test_rows_of_real_processes() -> None:
    seen: list[int] = []
    request = replace(REQUEST, batch_sizes=(2, 512), accumulation=(0, 3))
    frame = check_profile(campaign(request, progress=lambda done, _: seen.append(done)).frame, "measured")
    keys = frame[["num_replicas", "accumulation_steps", "local_batch_size"]].to_numpy().tolist()
    assert keys == [[replicas, steps, batch] for replicas in (1, 2) for steps in (0, 3) for batch in (2, 512)]
    accumulated = frame[frame["accumulation_steps"] == 3]
    assert (accumulated["grad_time_s"] < accumulated["step_time_s"]).all()
    alone = frame[(frame["num_replicas"] == 1) & (frame["accumulation_steps"] == 0)]
    assert (alone["grad_time_s"] == alone["step_time_s"]).all()
    assert (frame.loc[frame["num_replicas"] == 1, "sync_time_s"] == 0).all()
    assert (frame["sync_time_s"] < frame["step_time_s"]).all()
    assert (frame["peak_memory_bytes"] > 2**20).all()
    assert seen == list(range(1, 9))
    assert not children_left()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raises", r"raises: a training step failed \(ValueError: no such weights\); it must train"),
        pytest.param("dies late", r"^batch 4 on 2 replicas: process 1 died \(exit code 7\)$", marks=pytest.mark.slow),
        ("killed", r"^batch 4 on 1 replica: process 0 was killed \(SIGKILL: by somebody, or by the system"),
    ],
)
def test_failures(source: str, message: str) -> None:
    kept: list[int] = []
    with pytest.raises(DdlToolError, match=message):
        campaign(
            replace(REQUEST, source=source, replicas=(2,) if source == "dies late" else (1,)),
            on_rows=lambda frame: kept.append(len(frame)),
        )
    assert kept == ([] if source == "raises" else [1])  # what was measured before had been handed on
    assert not children_left()


def test_out_of_memory_keeps_what_was_measured() -> None:
    frame = campaign(replace(REQUEST, source="limited", batch_sizes=(4, 8, 16), replicas=(1,))).frame
    assert frame["local_batch_size"].tolist() == [4]
    with pytest.raises(InputError, match="even 8 runs out of memory; give smaller ones"):
        campaign(replace(REQUEST, source="limited", batch_sizes=(8,), replicas=(1,)))


@pytest.mark.slow
def test_adaptive_rows_of_real_processes() -> None:
    """Whatever the budget sufficed for is a whole row, and everything else is named."""
    request = replace(REQUEST, batch_sizes=(2, 4, 8, 512), replicas=(1,), repeats=None, budget_s=4.0, threads=1)
    found = campaign(request)
    frame = check_profile(found.frame, "measured")
    assert len(frame) + len(found.skipped) == 4
    assert (frame["step_time_low_s"] <= frame["step_time_s"]).all()
    assert (frame["step_time_s"] <= frame["step_time_high_s"]).all()
    assert (frame["repeats"] >= 3).all()
    assert set(frame["source"]) == {"fine"}
    assert not children_left()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(InputError, match="--device: cuda has 0 devices for 2 replicas; use --device cpu"):
        campaign(replace(REQUEST, device="cuda"))


def test_measurements_that_are_not_to_be_believed() -> None:
    import pandas as pd

    good = {"step_time_s": 0.1, "step_time_spread_s": 0.001, "repeats": 5}
    assert reliability(pd.DataFrame([good])) == []
    bad = pd.DataFrame([good, {"step_time_s": 1e-4, "step_time_spread_s": 5e-5, "repeats": 2}])
    spread, short, few = reliability(bad)
    assert "1 of 2 rows spread by up to 50%" in spread
    assert "below 1 ms" in short
    assert "fewer than 3 repeats" in few


def test_a_killed_parent_leaves_nobody_behind(tmp_path: Path) -> None:
    profile = ("profile", "zoo:resnet32", "--batch-sizes", "64,128", "--repeats", "200")
    command = [sys.executable, "-m", "ddltool", *profile]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=tmp_path) as child:
        workers = workers_of(child.pid, 1)
        for worker in workers:  # each has a thread that watches its parent
            wait_until(lambda worker=worker: worker.num_threads() > 1, "a worker has started its own watch")
        child.send_signal(signal.SIGKILL)
    gone, alive = psutil.wait_procs(workers, timeout=120)
    assert not alive
    assert len(gone) == len(workers)
