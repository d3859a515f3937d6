"""Ranks that train together over gloo under the profiler, one of them made slow on purpose."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset

from ddltool import runtime
from tests.processes import as_job

WIDTH, BATCH, STEPS = 128, 64, 18
SLEEP_S = 0.1
FAULTS = ("clean", "backward", "cpu", "loader", "sequences", "pauses")
CAUSES = {
    "backward": "slow device",
    "cpu": "slow device",
    "loader": "slow input",
    "sequences": "uneven work",
    "pauses": "pauses",
}
# Stops the process for most of the time, as a CPU quota does.
_LIMIT = """
import os, signal, sys, time
target = int(sys.argv[1])
while os.getppid() == target:
    os.kill(target, signal.SIGSTOP); time.sleep(0.03)
    os.kill(target, signal.SIGCONT); time.sleep(0.01)
"""


class Samples(Dataset[Tensor]):
    """Rows of one length; ``wait_s`` before each batch's first."""

    def __init__(self, length: int, wait_s: float) -> None:
        self.length, self.wait_s = length, wait_s

    def __len__(self) -> int:
        return BATCH * STEPS

    def __getitem__(self, row: int) -> Tensor:
        if self.wait_s and row % BATCH == 0:
            time.sleep(self.wait_s)
        return torch.zeros(self.length, WIDTH)


def train(rank: int, fault: str, slow: int, folder: Path) -> None:
    """Train for ``STEPS`` steps, the first two of them not profiled; rank ``slow`` has the fault."""
    torch.manual_seed(0)
    mine = fault if rank == slow else "clean"
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(6)))
    if mine == "backward":
        model[3].register_full_backward_hook(lambda *_: time.sleep(SLEEP_S))
    replica = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(replica.parameters(), lr=1e-4)
    loader = DataLoader(Samples(24 if mine == "sequences" else 4, SLEEP_S if mine == "loader" else 0.0), BATCH)
    heap = [[number] for number in range(600_000)] if mine == "pauses" else []
    gc.disable()
    limit = subprocess.Popen([sys.executable, "-c", _LIMIT, str(os.getpid())]) if mine == "cpu" else None

    def export(run: Any) -> None:
        run.export_chrome_trace(str(folder / f"rank{rank}.json"))

    timing = schedule(wait=1, warmup=1, active=STEPS - 2, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=timing, on_trace_ready=export) as run:
        for step, rows in enumerate(loader):
            optimizer.zero_grad()
            replica(rows).square().mean().backward()
            if heap and step % 4 == 3:
                gc.collect()
            optimizer.step()
            run.step()
    gc.enable()
    if limit is not None:
        limit.kill()
        limit.wait()
        os.kill(os.getpid(), signal.SIGCONT)


def train_watched(rank: int, slow: int, steps: int) -> None:
    """Train with telemetry and a watch; from the 25th step on rank ``slow`` sleeps in its backward pass."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    replica = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(replica.parameters(), lr=1e-4)
    hook = runtime.attach(None, model=replica, optimizer=optimizer, telemetry="telemetry.jsonl")
    runtime.watch_ranks(hook, every=20)
    for step in range(steps):
        if step == 25 and rank == slow:
            model[1].register_full_backward_hook(lambda *_: time.sleep(0.04))
        replica(torch.zeros(8, WIDTH)).square().mean().backward()
        optimizer.step()
    dist.barrier()
    hook.close()
    dist.destroy_process_group()


def main(rank: int, cases: list[tuple[str, int, str]]) -> None:
    """Train under each of the cases, (fault, slow rank, folder), one after the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for fault, slow, folder in cases:
        Path(folder).mkdir(parents=True, exist_ok=True)
        dist.barrier()
        train(rank, fault, slow, Path(folder))
    dist.barrier()
    dist.destroy_process_group()


def run_cases(folder: Path, world: int, cases: list[tuple[str, int]]) -> list[Path]:
    """Run the cases in ``world`` processes, a few at a time, and return the folder with the traces of each."""
    folders = [folder / f"{place}-{fault}" for place, (fault, _) in enumerate(cases)]
    given = [(fault, slow, str(where)) for (fault, slow), where in zip(cases, folders, strict=True)]
    for first in range(0, len(given), len(FAULTS)):
        ended = as_job(world, folder, main, given[first : first + len(FAULTS)])
        assert [code for code, _, _ in ended] == [0] * world, ended
    return folders
