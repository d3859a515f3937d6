"""A job that trains until it is disturbed: ``python -m tests.kill_workers KIND RANK SIZE PORT TIMEOUT_S``.

Writes ``ready`` when training has begun, and the number of every step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ddltool.runtime.agent import GoodputAgent
from ddltool.runtime.elastic import ElasticTrainer

STEPS = 10**6


def agent(network: nn.Module, data: TensorDataset, made: Callable[[], None]) -> None:
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    follows = GoodputAgent(
        model, optimizer, data, initial_batch_size=16, max_batch_size=64, max_local_batch_size=32, interval_s=0.5
    )
    for epoch in range(STEPS):
        for inputs, targets in follows.batches(epoch):
            follows.backward(nn.functional.cross_entropy(model(inputs), targets))
            if follows.complete:
                optimizer.step()
                optimizer.zero_grad()
                made()


def elastic(network: nn.Module, data: TensorDataset, made: Callable[[], None]) -> None:
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    trainer = ElasticTrainer(
        network, optimizer, nn.CrossEntropyLoss(), data, max_workers=4, batch_size=4, bucket_mib=0.01
    )
    for epoch in range(STEPS):
        for _ in trainer.epoch(epoch):
            made()


KINDS = {"agent": agent, "elastic": elastic}


def main(kind: str, rank: int, size: int, port: str, timeout_s: float) -> None:
    """Train for ever."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=size,
        init_method=f"tcp://127.0.0.1:{port}",
        timeout=timedelta(seconds=timeout_s),
    )
    torch.manual_seed(0)
    features = torch.randn(640, 32)
    data = TensorDataset(features, (features[:, 1] > 0).long())
    network = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    steps = 0

    def made() -> None:
        nonlocal steps
        steps += 1
        if steps == 2:
            print("ready", flush=True)
        time.sleep(0.002)

    KINDS[kind](network, data, made)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], float(sys.argv[5]))
