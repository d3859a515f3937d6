"""A rank of a balanced job is killed: the others end in one line that names it, whatever waits at exit, and nothing aborts."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ddltool.runtime.balancing.control import BalanceOptions, balance
from tests.helpers.processes import as_job


def train(rank: int, cluster: str, victim: int, when: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    features = torch.randn(640, 4)
    data = TensorDataset(features, (features[:, 1] > 0).long())
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = BalanceOptions(cluster=cluster, timeout_s=10, interval_s=0.0)  # type: ignore[arg-type]
    balancer = balance(model, optimizer, data, total_batch=24, options=options)
    late = (victim + 1) % 3
    if when == "waiting":
        atexit.register(time.sleep, 600)  # as of a library that waits for its server
    for step, (inputs, labels) in enumerate(balancer.dataloader(seed=0)):
        if step == 9 and rank == victim and when == "computing":
            die()
        time.sleep(0.002 * (rank + 1))
        balancer.loss(nn.functional.cross_entropy(model(inputs), labels)).backward()
        if step == 9 and rank == victim:
            threading.Timer(1.0 if when == "waiting" else 0.0, die).start()
            time.sleep(0.0 if when == "waiting" else 9.0)
        if step == 9 and rank == late and when == "waiting":
            time.sleep(2.5)  # by then the victim, and the third rank with it, waits for this one's report
        optimizer.step()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("cluster", "victim", "when"),
    [
        ("gpu", 1, "updating"),
        pytest.param("gpu", 2, "computing", marks=pytest.mark.slow),
        pytest.param("gpu", 0, "updating", marks=pytest.mark.slow),
        pytest.param("cpu", 1, "updating", marks=pytest.mark.slow),
        pytest.param("cpu", 0, "computing", marks=pytest.mark.slow),
        pytest.param("cpu", 1, "waiting", marks=pytest.mark.slow),
        pytest.param("cpu", 0, "waiting", marks=pytest.mark.slow),
    ],
)
def test_survivors_end_in_one_line(cluster: str, victim: int, when: str, tmp_path: Path) -> None:
    for number, (code, _, text) in enumerate(as_job(3, tmp_path, train, cluster, victim, when)):
        if number == victim:
            assert code == -signal.SIGKILL
            continue
        assert code == 1, text
        assert "Traceback" not in text
        lines = [line for line in text.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1
        assert f"rank {victim}" in lines[0]
