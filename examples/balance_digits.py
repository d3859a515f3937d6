"""Train on scikit-learn's digits with workers of unequal speed: torchrun --nproc-per-node 4 balance_digits.py

The speeds are emulated: each worker sleeps some time per sample in its forward pass, besides computing, so that what one
sees does not depend on what else the machine does. One worker takes longer per sample; at --move-at another one instead. With
--compete a process on the slow worker's core computes against it, and nobody sleeps: that is real, and needs a core per worker.
"""

import argparse
import json
import multiprocessing
import os
import time
from multiprocessing.process import BaseProcess as Process

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ddltool.analyzers.job.balancing.sizing import proportional
from ddltool.runtime.balancing import BalanceOptions, balance

TRAINED = 1437


class Worker(nn.Module):
    """A small network on a worker that takes ``per_sample_s`` longer for each sample."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        self.per_sample_s = 0.0

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return (samples, 10) logits of (samples, 64) pixels."""
        if self.training:
            time.sleep(self.per_sample_s * len(pixels))
        return self.network(pixels)


def compete(core: int) -> None:
    """Compute on one core for ever."""
    os.sched_setaffinity(0, {core})
    while True:
        pass


def replaced(rival: Process | None, wanted: bool) -> Process | None:
    """End the competing process ``rival`` (None: there is none), and return a new one on this worker's core if it is wanted."""
    if rival is not None:
        rival.kill()
        rival.join()
    if not wanted:
        return None
    started = multiprocessing.get_context("spawn").Process(
        target=compete, args=(min(os.sched_getaffinity(0)),), daemon=True
    )
    started.start()
    return started


def oracle_sizes(total: int, slow: int, factor: float, workers: int) -> list[int]:
    """Return the sizes of somebody who knows that worker ``slow`` takes ``factor`` times as long per sample."""
    return proportional([1 / factor if rank == slow else 1.0 for rank in range(workers)], total).tolist()


def parse() -> argparse.Namespace:
    """Return the options."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--mode", choices=("bsp", "cpu", "gpu", "oracle"), default="cpu")
    arguments.add_argument("--predictor", default="ema")
    arguments.add_argument("--sizes", help="fixed batch sizes, for example 89,21,12,6")
    arguments.add_argument("--naive", action="store_true", help="average gradients without weights")
    arguments.add_argument("--per-sample-ms", type=float, default=0.5)
    arguments.add_argument("--factor", type=float, default=4.0, help="how much slower the slow worker is")
    arguments.add_argument("--move-at", type=int, default=60, help="step from which worker 0 is the slow one")
    arguments.add_argument("--compete", action="store_true")
    arguments.add_argument("--width", type=int, default=64)
    arguments.add_argument("--total-batch", type=int, default=128)
    arguments.add_argument("--epochs", type=int, default=10)
    arguments.add_argument("--lr", type=float, default=0.5)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--rows", action="store_true", help="print every step")
    return arguments.parse_args()


def main() -> None:
    """Train, and print time per step, batch sizes and accuracy per epoch as JSON."""
    given = parse()
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    images, targets = load_digits(return_X_y=True)
    order = torch.randperm(len(targets))
    features, labels = torch.tensor(images / 16, dtype=torch.float32)[order], torch.tensor(targets)[order]
    model = DistributedDataParallel(Worker(given.width))
    optimizer = torch.optim.SGD(model.parameters(), lr=given.lr, momentum=0.9)
    sizes = [int(size) for size in given.sizes.split(",")] if given.sizes else None
    fixed = given.mode in ("bsp", "oracle") or sizes is not None
    balancer = balance(
        model,
        optimizer,
        TensorDataset(features[:TRAINED], labels[:TRAINED]),
        total_batch=given.total_batch,
        sizes=sizes
        or (oracle_sizes(given.total_batch, workers - 1, given.factor, workers) if given.mode == "oracle" else None),
        options=BalanceOptions(
            cluster="gpu" if given.mode == "gpu" else "cpu", predictor=given.predictor, enabled=not fixed
        ),
    )
    loader = balancer.dataloader(seed=given.seed)
    if given.compete:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    rival = None
    slow, step, rows, accuracy = -1, 0, [], []  # slow: the rank of the slow worker
    for epoch in range(given.epochs):
        balancer.set_epoch(epoch)
        begin, left = time.perf_counter(), TRAINED  # left: samples of the epoch that no step has had
        for pixels, digits in loader:
            slow_now = 0 if step >= given.move_at else workers - 1
            if slow_now != slow:  # the slowness moves
                slow = slow_now
                if given.compete:
                    rival = replaced(rival, rank == slow)
                elif given.mode == "oracle":
                    balancer.set_sizes(oracle_sizes(given.total_batch, slow, given.factor, workers))
            if not given.compete:
                model.module.per_sample_s = given.per_sample_ms / 1000 * (given.factor if rank == slow else 1)
            loss = balancer.loss(nn.functional.cross_entropy(model(pixels), digits))
            if given.naive:  # undo the weight: every worker counts the same, whatever its batch
                loss = loss * min(left, given.total_batch) / (workers * len(digits))
            left -= given.total_batch
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            end = time.perf_counter()
            rows.append({"step": step, "seconds": end - begin, "sizes": balancer.sizes})
            step, begin = step + 1, end
        with torch.no_grad():
            right = model.module.eval()(features[TRAINED:]).argmax(1) == labels[TRAINED:]
            accuracy.append(round(right.float().mean().item(), 4))
        model.module.train()
    replaced(rival, wanted=False)
    balancer.close()
    if rank == 0:
        middle = sorted(row["seconds"] for row in rows)[len(rows) // 2]
        summary = {"mode": given.mode, "median_step_s": round(middle, 4), "sizes": balancer.sizes, "accuracy": accuracy}
        print(json.dumps({**summary, "rows": rows} if given.rows else summary))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
