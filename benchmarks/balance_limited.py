"""The processes of ``bench_balance_live.py --cpu-limit``: real computation under real CPU limits, no sleep.

Every variant (BSP, LB-BSP, the oracle) has its own model, optimizer and balancer in the same processes, and they take turns
step by step, so whatever else the machine does meets all of them alike. All ranks meet before a step begins; a step takes as
long as on its slowest rank, choosing batch sizes and the update included.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from cpu_limit import join, set_limit
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ddltool.analyzers.job.balancing.sizing import proportional
from ddltool.runtime.balancing.control import BalanceOptions, Balancer, balance

TRAINED = 1437


def network(channels: int) -> nn.Module:
    """Return a small convolutional network for digits: much to compute for each sample, few gradients to exchange."""
    layers: list[nn.Module] = [nn.Unflatten(1, (1, 8, 8))]
    for before in (1, channels, channels, channels):
        layers += [nn.Conv2d(before, channels, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * channels, 10))


@dataclass(kw_only=True)
class Variant:
    """One way to choose batch sizes, with a training of its own."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    balancer: Balancer
    batches: Iterator[tuple[Tensor, Tensor]]
    seconds: list[float] = field(default_factory=list)
    sizes: list[tuple[int, ...]] = field(default_factory=list)

    def step(self) -> None:
        """Make one step, from when all ranks are here."""
        pixels, digits = next(self.batches)
        self.sizes.append(self.balancer.sizes)
        dist.barrier()
        begin = time.perf_counter()
        loss = self.balancer.loss(nn.functional.cross_entropy(self.model(pixels), digits))
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - begin)


def variant(name: str, given: dict[str, Any], sizes: list[int] | None) -> Variant:
    """Return a training whose sizes are chosen as ``name`` says, and begin as ``sizes`` or as equal ones."""
    torch.manual_seed(given["seed"])
    images, targets = load_digits(return_X_y=True)
    total = given["total_batch"]
    order = torch.randperm(len(targets))[: TRAINED // total * total]  # whole steps only
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32)[order], torch.tensor(targets)[order])
    model = DistributedDataParallel(network(given["channels"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    balancer = balance(
        model,
        optimizer,
        data,
        total_batch=total,
        sizes=sizes,
        options=BalanceOptions(cluster="gpu" if name == "gpu" else "cpu", enabled=name in ("cpu", "gpu")),
    )
    loader = balancer.dataloader(seed=given["seed"])

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        epoch = 0
        while True:
            balancer.set_epoch(epoch)
            yield from loader
            epoch += 1

    return Variant(model=model, optimizer=optimizer, balancer=balancer, batches=batches())


def by_calculation(model: nn.Module, given: dict[str, Any]) -> int:
    """Return the samples of the slow worker with which all compute equally long, from times that all measure beforehand.

    Median CPU seconds over batch sizes, on all ranks, between which straight lines lie; a share of a core stretches them.
    """
    total, (fast, slow), workers = given["total_batch"], given["shares"], dist.get_world_size()
    tried = [total // part for part in (32, 16, 8, 4, 2, 1)]
    taken = []
    for size in tried:
        pixels, spent = torch.rand(size, 64), []
        for _ in range(7):
            begin = time.thread_time()
            model(pixels).square().mean().backward()
            spent.append(time.thread_time() - begin)
        taken.append(sorted(spent)[3])
    gathered: list[Any] = [None] * workers
    dist.all_gather_object(gathered, taken)
    seconds = np.median(np.array(gathered), axis=0)

    def longest(few: int) -> float:
        others = -(-(total - few) // (workers - 1))
        return max(float(np.interp(few, tried, seconds)) / slow, float(np.interp(others, tried, seconds)) / fast)

    return min(range(1, total // workers + 1), key=longest)


def by_trial(oracle: Variant, known: Callable[[int, int], list[int]], few: int, steps: int) -> int:
    """Return the samples of the slow worker with which steps are shortest, of some around ``few``, each tried for ``steps``."""
    workers, found = dist.get_world_size(), {}
    spacing = max(1, few // 10)
    for tried in sorted({max(1, few + spacing * number) for number in range(-3, 3)}):
        oracle.balancer.set_sizes(known(workers - 1, tried))
        oracle.seconds.clear()
        for _ in range(steps):
            oracle.step()
        gathered: list[Any] = [None] * workers
        dist.all_gather_object(gathered, oracle.seconds)
        found[tried] = sorted(map(max, zip(*gathered, strict=True)))[steps // 2]
    best = min(found, key=lambda tried: found[tried])
    oracle.balancer.set_sizes(known(workers - 1, best))
    oracle.seconds.clear()
    oracle.sizes.clear()
    return best


def replaced(rival: subprocess.Popen[bytes] | None, group: Path, wanted: bool) -> subprocess.Popen[bytes] | None:
    """End the process that competes with this worker in its group, and start one if it is wanted."""
    if rival is not None:
        rival.kill()
        rival.wait()
    if not wanted:
        return None
    started = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    (group / "cgroup.procs").write_text(str(started.pid))
    return started


def work(given: dict[str, Any]) -> None:
    """Be one rank; rank 0 prints seconds and sizes per variant and step as JSON."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, workers = dist.get_rank(), dist.get_world_size()
    fast, slow = given["shares"]
    group, total = Path(given["groups"][rank]), given["total_batch"]
    few = by_calculation(network(given["channels"]), given)

    def known(slow_one: int, few: int) -> list[int]:
        rest = proportional([1.0] * (workers - 1), total - few).tolist()
        return [*rest[:slow_one], few, *rest[slow_one:]]

    variants = {
        name: variant(name, given, known(workers - 1, few) if name == "oracle" else None) for name in given["variants"]
    }
    for one in variants.values():  # what the first pass sets up is not to be paid under the limit
        network(given["channels"])(torch.zeros(total, 64)).sum().backward()
        one.optimizer.zero_grad()
    join(group)
    compete = given.get("compete", False)
    rival = replaced(None, group, compete and rank == workers - 1)
    if "oracle" in variants:
        few = by_trial(variants["oracle"], known, few, given["trials"])
    for number in range(given["steps"]):
        if number == given["move_at"]:
            if compete:
                rival = replaced(rival, group, rank == 0)
            else:
                set_limit(group, fast if rank else slow)
            if "oracle" in variants:
                variants["oracle"].balancer.set_sizes(known(0, few))
            dist.barrier()
        for one in variants.values():
            one.step()
    replaced(rival, group, wanted=False)
    found: dict[str, Any] = {}
    for name, one in variants.items():
        gathered: list[Any] = [None] * workers
        dist.all_gather_object(gathered, one.seconds)
        found[name] = {"seconds": [max(times) for times in zip(*gathered, strict=True)], "sizes": one.sizes}
        one.balancer.close()
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()
