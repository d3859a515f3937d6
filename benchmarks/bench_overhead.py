"""What the goodput agent and the hook cost: plain training, with the agent, with the hook, side by side in one run.

    python benchmarks/bench_overhead.py [--blocks 24] [--steps 10] [--replicas 2] [--tiny]

Each process has one thread and, where there are cores enough, one core of its own; gradients travel over gloo. The variants
take turns in blocks of steps, in an order that changes from block to block, so that a slow spell of the machine hits all.
A block of a variant and the block of plain training beside it make one ratio; printed are the medians of the ratios of
wall clock and of CPU seconds (all threads of rank 0), with their distribution-free 95 % intervals. The agent runs at its
defaults and changes nothing (adapt=False), so that all variants train the same batches; its fits fall where they fall.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from ddltool import runtime
from ddltool.artifacts import save
from ddltool.plans import Enforcement, RankEnforcement
from ddltool.runtime.agent.agent import GoodputAgent
from ddltool.runtime.measuring.overhead import ratio_interval

VARIANTS = ("plain", "agent", "agent, Adam", "plain, Adam", "hook")
BASE = {"agent": "plain", "agent, Adam": "plain, Adam", "hook": "plain"}
LOCAL = 16
SIZE = 32


def network(tiny: bool) -> nn.Module:
    """Return a convolutional network of 1.3 million parameters, or one layer, beside which the fixed cost shows."""
    if tiny:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 10))
    return nn.Sequential(
        *(nn.Conv2d(3, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 96, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(5), nn.Flatten()),
        *(nn.Linear(2400, 512), nn.ReLU(), nn.Linear(512, 10)),
    )


def trainer(variant: str, replicas: int, tiny: bool, steps: int) -> Callable[[int], None]:
    """Return a function that makes training steps, ``steps`` of them at most."""
    torch.manual_seed(0)
    samples = LOCAL * replicas * steps
    data = TensorDataset(torch.randn(samples, 3, SIZE, SIZE), torch.arange(samples) % 10)
    module = network(tiny)
    model = DistributedDataParallel(module) if replicas > 1 else module
    adam = variant.endswith("Adam")
    optimizer: torch.optim.Optimizer = (
        torch.optim.Adam(model.parameters(), lr=1e-4) if adam else torch.optim.SGD(model.parameters(), lr=1e-3)
    )
    agent = None
    if variant.startswith("agent"):
        agent = GoodputAgent(
            model,
            optimizer,
            data,
            initial_batch_size=LOCAL * replicas,
            max_batch_size=LOCAL * replicas * 16,
            max_local_batch_size=LOCAL * 4,
            adapt=False,
        )
        batches = iter(agent.batches(0))
    elif variant == "hook":
        hook = runtime.attach("enforce.json", model=model, optimizer=optimizer, dataset=data)
        batches = iter(hook.dataloader(batch_size=LOCAL))
    else:
        batches = iter(DataLoader(data, batch_size=LOCAL, shuffle=True))

    def run(steps: int) -> None:
        for _ in range(steps):
            inputs, targets = next(batches)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            if agent is not None:
                agent.backward(loss)
            else:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def measure(rank: int, folder: str, blocks: int, steps: int, replicas: int, tiny: bool) -> None:
    """Time all variants in one process; rank 0 leaves the seconds per step and block in ``folder``."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= replicas:
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    os.chdir(folder)
    if replicas > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=replicas)
    runs = {variant: trainer(variant, replicas, tiny, (blocks + 2) * steps) for variant in VARIANTS}
    times: dict[str, list[tuple[float, float]]] = {variant: [] for variant in VARIANTS}
    for block in range(-1, blocks):  # the first warms up: DDP rebuilds its buckets
        for place in range(len(VARIANTS)):
            variant = VARIANTS[(block + place) % len(VARIANTS)]
            if replicas > 1:
                dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            runs[variant](steps)
            if block >= 0:
                spent = (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps
                times[variant].append(spent)
    if rank == 0:
        Path("result.json").write_text(json.dumps(times), encoding="utf-8")
    if replicas > 1:
        dist.destroy_process_group()


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a network whose steps take a millisecond")
    options = parser.parse_args()
    size = options.replicas
    ranks = [RankEnforcement(rank=rank, device_type="cpu", ests=1, local_batch_size=LOCAL) for rank in range(size)]
    plan = Enforcement(job="bench", strategy="bsp", world_size=size, total_batch_size=size * LOCAL, ranks=ranks)
    with tempfile.TemporaryDirectory() as folder:
        save(plan, Path(folder, "enforce.json"))
        mp.spawn(measure, (folder, options.blocks, options.steps, size, options.tiny), nprocs=size)
        times = json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))
    load = os.getloadavg()[0]
    print(
        f"{options.blocks} blocks of {options.steps} steps, {size} processes, load {load:.1f}, torch {torch.__version__}"
    )
    print(f"{'variant':12} {'ms/step':>8} {'CPU ms':>8}   overhead, wall (95 %)          overhead, CPU (95 %)")
    for variant in VARIANTS:
        medians = [statistics.median(block[clock] for block in times[variant]) * 1e3 for clock in (0, 1)]
        line = f"{variant:12} {medians[0]:8.3f} {medians[1]:8.3f}"
        for clock in (0, 1) if variant in BASE else ():
            pairs = zip(times[variant], times[BASE[variant]], strict=True)
            found = ratio_interval([one[clock] / other[clock] for one, other in pairs])
            line += f"   {found.median - 1:+.2%} ({found.low - 1:+.2%} to {found.high - 1:+.2%})"
        print(line)


if __name__ == "__main__":
    main()
