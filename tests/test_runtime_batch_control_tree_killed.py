"""A rank is killed inside the tree while others wait for it: they end in time, in one line that names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddltool.runtime.measuring.children import free_port

TIMEOUT_S = 6.0
IN_TREE = "error: step 3: nothing came from rank {}, so batch sizes are unknown (the connection is lost)"
IN_STEP = "error: rank {} is gone; go on from the last checkpoint"
SCRIPT = """
import json, os, signal, sys, threading, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from datetime import timedelta
from ddltool.runtime.balancing import control as batch_control

RANKS, STEP, KILLED_S, LATE_S = 5, 3, 1.5, 4.0
victim, late, port, timeout_s = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
torch.set_num_threads(1)


def work(rank):
    # The store is rank 0's where that is the one to be killed, and otherwise a launcher's.
    own = rank == 0 and victim == 0
    store = dist.TCPStore("127.0.0.1", port, RANKS, own, timedelta(seconds=60), wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    batch_control.MOST_BLOCKING = 1
    data = TensorDataset(torch.randn(640, 4), torch.zeros(640, dtype=torch.long))
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = batch_control.BalanceOptions(background=False, timeout_s=timeout_s)
    balancer = batch_control.balance(model, optimizer, data, total_batch=40, options=options)
    try:
        for step, (inputs, labels) in enumerate(balancer.dataloader(seed=0)):
            nn.functional.cross_entropy(model(inputs), labels).backward()
            if step == STEP and rank == late:
                time.sleep(LATE_S)
            if step == STEP and rank == victim:  # by then it waits for the late rank, as all others do
                threading.Timer(KILLED_S, os.kill, (os.getpid(), signal.SIGKILL)).start()
            optimizer.step()
    finally:
        with open(f"{rank}.ended", "w") as file:
            file.write(str(time.monotonic()))


children = {}
for rank in range(RANKS):
    child = os.fork()
    if child == 0:
        os.dup2(os.open(f"{rank}.txt", os.O_WRONLY | os.O_CREAT), 2)
        work(rank)
        sys.exit(0)
    children[child] = rank
if victim:
    store = dist.TCPStore("127.0.0.1", port, RANKS, True, timedelta(seconds=60), wait_for_workers=False)
found, end = {}, time.monotonic() + 60
while len(found) < RANKS and time.monotonic() < end:
    child, status = os.waitpid(-1, os.WNOHANG)
    if child == 0:
        time.sleep(0.05)
        continue
    rank = children.pop(child)
    if rank == victim:
        killed = time.monotonic()
    found[rank] = os.waitstatus_to_exitcode(status)
for child in children:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
print(json.dumps([killed, found]))
"""


@pytest.mark.parametrize(
    ("victim", "late"),
    [
        pytest.param(1, 2, marks=pytest.mark.slow),  # between rank 0 and rank 4
        pytest.param(4, 3, marks=pytest.mark.slow),  # its report is in already: nobody waits for it but to tell it
        pytest.param(0, 4, marks=pytest.mark.slow),  # with the store
    ],
)
def test_the_others_end_in_one_line_that_names_it(victim: int, late: int, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-c", SCRIPT, str(victim), str(late), str(free_port()), str(TIMEOUT_S)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=True
    )
    killed, found = json.loads(done.stdout)
    assert found == {str(rank): -9 if rank == victim else 1 for rank in range(5)}
    told = []
    for rank in set(range(5)) - {victim}:
        text = (tmp_path / f"{rank}.txt").read_text()
        (line,) = (line for line in text.splitlines() if line.startswith("error: "))
        assert "Traceback" not in text
        told.append(line)
        # Who was let go into the next step learns of it there, when the others end.
        assert line in (IN_TREE.format(victim), IN_STEP.format(victim))
        if line == IN_TREE.format(victim):
            assert float((tmp_path / f"{rank}.ended").read_text()) - killed < TIMEOUT_S + 5.0
    assert IN_TREE.format(victim) in told
