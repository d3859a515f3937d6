"""A rank of a balanced job is killed: the others end in one line that names it, and nothing aborts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import free_port

SCRIPT = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from ddltool.runtime.balancing.control import BalanceOptions, balance

rank, cluster, victim, when, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5]
dist.init_process_group("gloo", rank=rank, world_size=3, init_method="tcp://127.0.0.1:" + port)
torch.manual_seed(0)
torch.set_num_threads(1)
features = torch.randn(640, 4)
data = TensorDataset(features, (features[:, 1] > 0).long())
model = DistributedDataParallel(nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
balancer = balance(model, optimizer, data, total_batch=24, options=BalanceOptions(cluster=cluster, timeout_s=4))
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
late = (victim + 1) % 3
for step, (inputs, labels) in enumerate(balancer.dataloader(seed=0)):
    if step == 9 and rank == victim and when == "computing":
        die()
    time.sleep(0.002 * (rank + 1))
    nn.functional.cross_entropy(model(inputs), labels).backward()
    if step == 9 and rank == victim:
        threading.Timer(1.0 if when == "waiting" else 0.0, die).start()
        time.sleep(0.0 if when == "waiting" else 9.0)
    if step == 9 and rank == late and when == "waiting":
        time.sleep(2.5)  # by then the victim, and the third rank with it, waits for this one's report
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("cluster", "victim", "when"),
    [
        ("gpu", 1, "updating"),
        pytest.param("gpu", 2, "computing", marks=pytest.mark.slow),
        pytest.param("gpu", 0, "updating", marks=pytest.mark.slow),
        pytest.param("cpu", 1, "updating", marks=pytest.mark.slow),
        pytest.param("cpu", 0, "computing", marks=pytest.mark.slow),
        ("cpu", 1, "waiting"),
        pytest.param("cpu", 0, "waiting", marks=pytest.mark.slow),
    ],
)
def test_survivors_end_in_one_line(cluster: str, victim: int, when: str, tmp_path: Path) -> None:
    port = str(free_port())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), cluster, str(victim), when, port],
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=environment,
        )
        for rank in range(3)
    ]
    try:
        told = [rank.communicate(timeout=120)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for number, (rank, text) in enumerate(zip(ranks, told, strict=True)):
        if number == victim:
            continue
        assert rank.returncode == 1, text
        assert "Traceback" not in text
        lines = [line for line in text.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1
        assert f"rank {victim}" in lines[0]
