"""Ranks that train together over gloo with a watch, one of them made slow on purpose."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn

from ddltool import runtime

WIDTH = 128


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
