"""What is attached to a job leaves no threads behind, however often: one group serves all, and ends with the job's."""

from __future__ import annotations

import faulthandler
import gc
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ddltool import runtime
from ddltool.artifacts import save
from ddltool.runtime.agent import GoodputAgent
from ddltool.runtime.balancing import balance
from ddltool.runtime.elastic import ElasticTrainer
from tests.helpers.processes import as_job, wait_until
from tests.helpers.runtime_workers import crew, enforcement

FEW, MANY, MORE = 3, 25, 1.2
DATA, LONGER = (TensorDataset(torch.arange(3.0 * rows).view(rows, 3), torch.arange(rows) % 2) for rows in (8, 32))


def hook(model: nn.Module, optimizer: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save(enforcement([1, 3], telemetry=os.devnull), path := Path(folder, "enforce.json"))
        with runtime.attach(path, model=model, optimizer=optimizer, dataset=DATA) as attached:
            train(model, optimizer, attached, attached.dataloader(batch_size=4))


def balanced(model: nn.Module, optimizer: Any, data: TensorDataset = DATA) -> None:
    with balance(model, optimizer, data, total_batch=4) as balancer:
        train(model, optimizer, balancer, balancer.dataloader())


def agent(model: nn.Module, optimizer: Any) -> None:
    sizes = {"initial_batch_size": 4, "max_batch_size": 8, "max_local_batch_size": 4}
    follows = GoodputAgent(model, optimizer, DATA, **sizes, adapt=False)
    train(model, optimizer, follows, follows.batches(0))
    follows.close()


def elastic(model: nn.Module, optimizer: Any) -> None:
    trainer = ElasticTrainer(model, optimizer, nn.CrossEntropyLoss(), DATA, max_workers=2, batch_size=2)
    assert [step.number for step in trainer.epoch(0)] == [1, 2]


def train(model: nn.Module, optimizer: Any, handle: Any, batches: Any) -> None:
    for inputs, targets in batches:
        handle.loss(nn.functional.cross_entropy(model(inputs), targets)).backward()
        optimizer.step()
        optimizer.zero_grad()


WAYS: dict[str, Callable[[nn.Module, Any], None]] = {
    "hook": hook,
    "balance": balanced,
    "agent": agent,
    "elastic": elastic,
}


def threads(rank: int, way: str) -> tuple[int, int]:
    """Return this process's threads after a few that were attached, and after many, once those that end have ended."""
    found: list[int] = []
    for times in (FEW, MANY):
        for _ in range(times):
            layer: nn.Module = nn.Linear(3, 2)
            model = layer if way == "elastic" else DistributedDataParallel(layer)
            WAYS[way](model, torch.optim.SGD(model.parameters(), lr=0.1))
        if found:
            wait_until(lambda: len(os.listdir("/proc/self/task")) <= MORE * found[0], "threads end")
        found.append(len(os.listdir("/proc/self/task")))
    return found[0], found[1]


@pytest.mark.parametrize("way", WAYS)
def test_threads_do_not_grow_with_what_was_attached(way: str) -> None:
    for few, many in crew().run(threads, way):
        assert many <= MORE * few


def outlive(rank: int) -> None:
    """Train in one process group after the other, each with a model that is collected after it."""
    faulthandler.dump_traceback_later(60, exit=True)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, rank == 0)
    for number in range(8):  # some are collected in time by chance
        dist.init_process_group("gloo", store=dist.PrefixStore(str(number), store), rank=rank, world_size=2)
        layers = nn.Sequential(nn.Linear(3, 64), *(nn.Linear(64, 64) for _ in range(5)), nn.Linear(64, 2))
        model = DistributedDataParallel(layers, bucket_cap_mb=0.01)
        balanced(model, torch.optim.SGD(model.parameters(), lr=0.1), LONGER)
        dist.destroy_process_group()
        del model, layers
        gc.collect()


def test_a_model_may_outlive_its_process_group(tmp_path: Path) -> None:
    for code, out, err in as_job(2, tmp_path, outlive):
        said = [
            line for line in out.splitlines() if not line.startswith("[Gloo]")
        ]  # torch 2.10 tells of each connection
        assert (code, said, err) == (0, [], "")
