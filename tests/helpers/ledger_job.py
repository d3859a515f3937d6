"""A training job with known losses of time: ``torchrun -m tests.helpers.ledger_job FOLDER STEPS DIES_AFTER``.

Each batch takes LOAD_S to load, rank 1 computes EXTRA_S longer than the others, every EVERY steps comes a checkpoint of
SAVE_S, and in the first attempt rank 1 kills itself after step DIES_AFTER. Rank 0 notes when it begins and ends.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from ddltool import runtime
from ddltool.runtime.elastic import start_processes

LOAD_S, EXTRA_S, SAVE_S, EVERY = 0.05, 0.08, 0.4, 20


class Slow(Dataset[torch.Tensor]):
    """One sample is a batch."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(LOAD_S)
        return torch.ones(64)


def note(folder: Path, what: str) -> None:
    """Append a moment."""
    with (folder / "moments.txt").open("a") as file:
        file.write(f"{what} {time.time()!r}\n")


def main(folder: Path, until: int, dies_after: int) -> None:
    """Train up to step ``until``."""
    start_processes()
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    model, made, path = DistributedDataParallel(net), 0, folder / "checkpoint.pt"
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    hook = runtime.attach(None, model=model, optimizer=optimizer, telemetry=folder / "telemetry.jsonl")
    if rank == 0:
        note(folder, "begin")
    if path.exists():
        made = torch.load(path)["made"]
        hook.resumed(made)
    for batch in DataLoader(Slow(until - made), batch_size=1):
        loss = model(batch).square().mean()
        time.sleep(EXTRA_S * rank)
        hook.loss(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        made += 1
        if made == dies_after and attempt == 0 and rank == 1:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        if made % EVERY == 0 and made < until:
            with hook.checkpoint():
                time.sleep(SAVE_S)
                if rank == 0:
                    torch.save({"made": made}, path)
                dist.barrier()
        if made == until:
            break
    if rank == 0:
        note(folder, "end")
    hook.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
