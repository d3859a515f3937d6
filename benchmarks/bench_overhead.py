"""What the runtime costs: plain DDP, the hook, balancing, the goodput agent and elastic training, side by side in one run.

    python benchmarks/bench_overhead.py [--pixels 13,32] [--blocks 40] [--steps 10] [--replicas 2] [--adam]
        [--variants hook,agent]

Each process has one thread and, where there are cores enough, one core of its own; gradients travel over gloo. The variants
take turns in blocks of steps, in an order that changes from block to block, so that a slow spell of the machine hits all.
A block of a variant and the block of plain training beside it make one ratio; printed are the medians of the ratios of
CPU seconds (all threads of all processes) and of wall clock, with their distribution-free 95 % intervals. All train the same
number of samples a step: the hook with telemetry, balancing and the agent at their defaults but for changes of the batch
(``adapt=False``; equal ranks leave little to balance), elastic training with a logical worker on each process. "own loader"
is the hook with a loader of the script's own, whose batches are counted. Images of 32 x 32 pixels make steps of about 50 ms,
of 13 x 13 of about 8 ms, of 0 a network of one layer, beside which the fixed cost shows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddltool import runtime
from ddltool.artifacts import save
from ddltool.plans import Enforcement, RankEnforcement
from ddltool.runtime.agent import GoodputAgent
from ddltool.runtime.balancing import balance
from ddltool.runtime.elastic import ElasticTrainer
from ddltool.runtime.measuring.overhead import ratio_interval

PLAIN = "plain"
VARIANTS = ("hook", "own loader", "balance", "agent", "elastic")
LOCAL = 16


def network(pixels: int) -> nn.Module:
    """Return a convolutional network of 1.3 million parameters, or one layer."""
    if not pixels:
        return nn.Sequential(nn.Flatten(), nn.Linear(3072, 10))
    return nn.Sequential(
        *(nn.Conv2d(3, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 96, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(5), nn.Flatten()),
        *(nn.Linear(2400, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


def trainer(variant: str, replicas: int, pixels: int, adam: bool, steps: int) -> Iterator[None]:
    """Make training steps, one for each item, ``steps`` of them at most."""
    torch.manual_seed(0)
    samples, side = LOCAL * replicas * steps, pixels or 32
    data = TensorDataset(torch.randn(samples, 3, side, side), torch.arange(samples) % 10)
    module = network(pixels)
    model = DistributedDataParallel(module) if replicas > 1 and variant != "elastic" else module
    optimizer: torch.optim.Optimizer = (
        torch.optim.Adam(model.parameters(), lr=1e-4) if adam else torch.optim.SGD(model.parameters(), lr=1e-3)
    )
    batches: Any = DataLoader(data, batch_size=LOCAL, shuffle=True)
    if variant in ("hook", "own loader"):
        hook = runtime.attach("enforce.json", model=model, optimizer=optimizer, dataset=data)
        batches = hook.dataloader(batch_size=LOCAL) if variant == "hook" else batches
    elif variant == "balance":
        batches = balance(model, optimizer, data, total_batch=LOCAL * replicas).dataloader()
    elif variant == "agent":
        sizes = {"max_batch_size": LOCAL * replicas * 16, "max_local_batch_size": LOCAL * 4}
        agent = GoodputAgent(model, optimizer, data, initial_batch_size=LOCAL * replicas, adapt=False, **sizes)
        batches = agent.batches(0)
    elif variant == "elastic":
        loss = nn.CrossEntropyLoss()
        whole = ElasticTrainer(model, optimizer, loss, data, max_workers=replicas, batch_size=LOCAL)
        yield from (None for _ in whole.epoch(0))
        return
    for inputs, targets in batches:
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def measure(rank: int, folder: str, given: argparse.Namespace, pixels: int, variants: list[str]) -> None:
    """Time all variants in one process; each rank leaves the seconds per step and block in ``folder``."""
    cores, replicas, blocks, steps = sorted(os.sched_getaffinity(0)), given.replicas, given.blocks, given.steps
    if len(cores) >= replicas:
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    os.chdir(folder)
    if replicas > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=replicas)
    runs = {each: trainer(each, replicas, pixels, given.adam, (blocks + 2) * steps) for each in variants}
    times: dict[str, list[tuple[float, float]]] = {variant: [] for variant in variants}
    for block in range(-1, blocks):  # the first warms up: DDP rebuilds its buckets
        for place in range(len(variants)):
            variant = variants[(block + place) % len(variants)]
            if replicas > 1:
                dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(steps):
                next(runs[variant])
            if block >= 0:
                spent = (time.process_time() - cpu) / steps, (time.perf_counter() - wall) / steps
                times[variant].append(spent)
    Path(f"result-{rank}.json").write_text(json.dumps(times), encoding="utf-8")
    if replicas > 1:
        dist.barrier()
        dist.destroy_process_group()


def table(given: argparse.Namespace, pixels: int, variants: list[str]) -> Iterator[str]:
    """Yield the lines of one network's table."""
    size = given.replicas
    ranks = [RankEnforcement(rank=rank, device_type="cpu", ests=1, local_batch_size=LOCAL) for rank in range(size)]
    plan = Enforcement(
        job="bench",
        strategy="bsp",
        world_size=size,
        total_batch_size=size * LOCAL,
        ranks=ranks,
        telemetry="rows.jsonl",
    )
    with tempfile.TemporaryDirectory() as folder:
        save(plan, Path(folder, "enforce.json"))
        mp.spawn(measure, (folder, given, pixels, variants), nprocs=size)
        found = [json.loads(Path(folder, f"result-{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]
    times = {
        variant: [
            [statistics.fmean(clock) for clock in zip(*each, strict=True)] for each in zip(*of_ranks, strict=True)
        ]
        for variant, of_ranks in ((variant, [rank[variant] for rank in found]) for variant in variants)
    }
    for variant in variants:
        medians = [statistics.median(block[clock] for block in times[variant]) * 1e3 for clock in (0, 1)]
        line = f"| {pixels} | {variant} | {medians[0]:.2f} | {medians[1]:.2f} |"
        for clock in (0, 1):
            pairs = zip(times[variant], times[PLAIN], strict=True)
            ratio = ratio_interval([one[clock] / other[clock] for one, other in pairs])
            line += f" {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f}) |" if variant != PLAIN else " |"
        yield line


def numbers(text: str) -> list[int]:
    """Return whole numbers with commas between them."""
    return [int(each) for each in text.split(",")]


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pixels", type=numbers, default=[13, 32])
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--adam", action="store_true")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    given = parser.parse_args()
    print(
        f"{given.blocks} blocks of {given.steps} steps, {given.replicas} processes, torch {torch.__version__}, ", end=""
    )
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n", flush=True)
    print("| pixels | variant | CPU, ms a step | wall, ms | CPU over plain (95 %) | wall over plain (95 %) |")
    print("|---|---|---|---|---|---|")
    for pixels in given.pixels:
        for line in table(given, pixels, [PLAIN, *given.variants.split(",")]):
            print(line, flush=True)


if __name__ == "__main__":
    main()
