"""Jobs that train until they are disturbed, and how. Their processes are forked from one that has imported torch."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ddltool.runtime.agent import GoodputAgent
from ddltool.runtime.elastic import ElasticTrainer

STEPS = 10**6
RANKS, TIMEOUT_S = 3, 3.0


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


def _main(kind: str, rank: int, port: int, ready: Connection) -> None:
    """Train for ever; say so when training has begun."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=RANKS,
        store=dist.TCPStore("127.0.0.1", port, is_master=False),
        timeout=timedelta(seconds=TIMEOUT_S),
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
            ready.send("ready")
        time.sleep(0.002)

    KINDS[kind](network, data, made)


def _process(kind: str, rank: int, port: int, folder: str, ready: Connection) -> None:
    """Do what Python does with a script: an error that nobody catches goes to the excepthook."""
    with open(f"{folder}/told-{rank}", "w") as told:
        os.dup2(told.fileno(), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    try:
        _main(kind, rank, port, ready)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    os._exit(1)


def disturbed(kind: str, number: signal.Signals, victim: int, delay_s: float) -> tuple[float, list[str]]:
    """Send a signal to a rank some time after training began; return how long the others lived on, and what they said.

    This process holds the store, as torchrun does.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", __name__])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
        ranks = [
            context.Process(target=_process, args=(kind, rank, store.port, folder, pipes[rank][1]))
            for rank in range(RANKS)
        ]
        for rank in ranks:
            rank.start()
        try:
            for place, (mine, _) in enumerate(pipes):
                assert mine.poll(60), Path(folder, f"told-{place}").read_text()
            time.sleep(delay_s)
            begin = time.monotonic()
            os.kill(ranks[victim].pid or 0, number)
            others = [place for place in range(RANKS) if place != victim]
            for place in others:
                ranks[place].join(60)
            lived_s = time.monotonic() - begin
            told = [Path(folder, f"told-{place}").read_text() for place in others]
            assert [ranks[place].exitcode for place in others] == [1] * len(others), told
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    return lived_s, told
