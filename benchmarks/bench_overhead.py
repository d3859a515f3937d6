"""What the runtime costs: plain DDP, the hook, balancing, the goodput agent and elastic training, side by side in one run.

    python benchmarks/bench_overhead.py [--step-ms 8,50] [--blocks 40] [--steps 10] [--replicas 2] [--adam]
        [--variants hook,agent]

Each process has one thread and, where there are cores enough, one core of its own; gradients travel over gloo. The variants
take turns in blocks of steps, in an order that changes from block to block, so that a slow spell of the machine hits all.
A block of a variant and the block of plain training beside it make one ratio; printed are the medians of the ratios of
CPU seconds (all threads of all processes) and of wall clock, with their distribution-free 95 % intervals. All train the same
number of samples a step: the hook with telemetry, balancing and the agent at their defaults but for changes of the batch
(``adapt=False``; equal ranks leave little to balance), elastic training with a logical worker on each process. "own loader"
is the hook with a loader of the script's own, whose batches are counted. The network is made as wide as it must be for a
plain step of so many milliseconds of CPU time on this machine; 0: one layer, beside which the fixed cost shows.

Under torchrun this is a training script of one variant, which ``ddltool doctor --overhead`` can measure:

    ddltool doctor --overhead "benchmarks/bench_overhead.py --width 0.4 --variants hook" --replicas 2
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
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
LOCAL, PIXELS = 16, 16
NARROWEST, WIDEST, TRIED = 0.05, 6.0, 8
MOST_STEPS = 2000


def network(width: float) -> nn.Module:
    """Return a convolutional network, of 1.3 million parameters at width 1; one layer at 0."""
    if not width:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * PIXELS**2, 10))
    one, two, three, hidden = (max(1, round(width * channels)) for channels in (48, 64, 96, 512))
    return nn.Sequential(
        *(nn.Conv2d(3, one, 3, padding=1), nn.ReLU(), nn.Conv2d(one, two, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(two, three, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(5), nn.Flatten()),
        *(nn.Linear(25 * three, hidden), nn.ReLU(), nn.Linear(hidden, 10)),
    )


def width_for(step_ms: float, replicas: int, adam: bool) -> float:
    """Return the width at which a plain step takes about so long, in CPU time: the shortest of a few, on the slower rank."""
    low, high = NARROWEST, WIDEST
    while step_ms and high > 1.05 * low:
        width, shortest_ms = math.sqrt(low * high), math.inf
        run = trainer(PLAIN, replicas, width, adam, TRIED + 2)
        for step in range(TRIED + 2):
            begin = time.process_time()
            next(run)
            if step >= 2:  # DDP rebuilds its buckets after the first
                shortest_ms = min(shortest_ms, 1e3 * (time.process_time() - begin))
        both = torch.tensor([shortest_ms])
        if replicas > 1:
            dist.all_reduce(both, op=dist.ReduceOp.MAX)
        low, high = (width, high) if float(both) < step_ms else (low, width)
    return math.sqrt(low * high) if step_ms else 0.0


def trainer(variant: str, replicas: int, width: float, adam: bool, steps: int) -> Iterator[None]:
    """Make training steps, one for each item, ``steps`` of them at most."""
    torch.manual_seed(0)
    samples = LOCAL * replicas * steps
    data = TensorDataset(torch.randn(samples, 3, PIXELS, PIXELS), torch.arange(samples) % 10)
    module = network(width)
    model = DistributedDataParallel(module) if replicas > 1 and variant != "elastic" else module
    optimizer: torch.optim.Optimizer = (
        torch.optim.Adam(model.parameters(), lr=1e-4) if adam else torch.optim.SGD(model.parameters(), lr=1e-3)
    )
    batches: Any = DataLoader(data, batch_size=LOCAL, shuffle=True)
    weighed: Callable[[Tensor], Tensor] = lambda loss: loss  # noqa: E731
    if variant in (PLAIN, "elastic"):
        runtime.attach(None, model=model, optimizer=optimizer)  # beside the others' batches it has its own
    if variant in ("hook", "own loader"):
        hook = runtime.attach("enforce.json", model=model, optimizer=optimizer, dataset=data)
        batches, weighed = hook.dataloader(batch_size=LOCAL) if variant == "hook" else batches, hook.loss
    elif variant == "balance":
        balancer = balance(model, optimizer, data, total_batch=LOCAL * replicas)
        batches, weighed = balancer.dataloader(), balancer.loss
    elif variant == "agent":
        sizes = {"max_batch_size": LOCAL * replicas * 16, "max_local_batch_size": LOCAL * 4}
        agent = GoodputAgent(model, optimizer, data, initial_batch_size=LOCAL * replicas, adapt=False, **sizes)
        batches, weighed = agent.batches(0), agent.loss
    elif variant == "elastic":
        loss = nn.CrossEntropyLoss()
        whole = ElasticTrainer(model, optimizer, loss, data, max_workers=replicas, batch_size=LOCAL)
        yield from (None for _ in whole.epoch(0))
        return
    for inputs, targets in batches:
        weighed(nn.functional.cross_entropy(model(inputs), targets)).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def measure(rank: int, folder: str, given: argparse.Namespace, step_ms: float, variants: list[str]) -> None:
    """Time all variants in one process; each rank leaves the seconds per step and block in ``folder``."""
    cores, replicas, blocks, steps = sorted(os.sched_getaffinity(0)), given.replicas, given.blocks, given.steps
    if len(cores) >= replicas:
        os.sched_setaffinity(0, {cores[rank]})
    torch.set_num_threads(1)
    os.chdir(folder)
    if replicas > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=replicas)
    width = given.width if given.width is not None else width_for(step_ms, replicas, given.adam)
    runs = {each: trainer(each, replicas, width, given.adam, (blocks + 2) * steps) for each in variants}
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
    Path(f"result-{rank}.json").write_text(json.dumps((width, times)), encoding="utf-8")
    if replicas > 1:
        dist.barrier()
        dist.destroy_process_group()


def write_plan(size: int, folder: str) -> None:
    """Write the hook's config: equal batches and telemetry."""
    ranks = [RankEnforcement(rank=rank, device_type="cpu", ests=1, local_batch_size=LOCAL) for rank in range(size)]
    plan = Enforcement(
        job="bench",
        strategy="bsp",
        world_size=size,
        total_batch_size=size * LOCAL,
        ranks=ranks,
        telemetry="rows.jsonl",
    )
    save(plan, Path(folder, "enforce.json"))


def as_script(given: argparse.Namespace) -> None:
    """Train one variant as a script of torchrun's."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    size = dist.get_world_size()
    run = trainer(given.variants, size, given.width or 0.0, given.adam, MOST_STEPS)
    with tempfile.TemporaryDirectory() as folder:  # whoever measures ends this process where it is
        os.chdir(folder)
        write_plan(size, folder)
        next(run)
        os.chdir("/")
    for _ in run:
        pass
    dist.destroy_process_group()


def table(given: argparse.Namespace, step_ms: float, variants: list[str]) -> Iterator[str]:
    """Yield the lines of one network's table."""
    size = given.replicas
    with tempfile.TemporaryDirectory() as folder:
        write_plan(size, folder)
        mp.spawn(measure, (folder, given, step_ms, variants), nprocs=size)
        told = [json.loads(Path(folder, f"result-{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]
    width, found = told[0][0], [times for _, times in told]
    times = {
        variant: [
            [statistics.fmean(clock) for clock in zip(*each, strict=True)] for each in zip(*of_ranks, strict=True)
        ]
        for variant, of_ranks in ((variant, [rank[variant] for rank in found]) for variant in variants)
    }
    for variant in variants:
        medians = [statistics.median(block[clock] for block in times[variant]) * 1e3 for clock in (0, 1)]
        line = f"| {width:.2f} | {variant} | {medians[0]:.2f} | {medians[1]:.2f} |"
        for clock in (0, 1):
            pairs = zip(times[variant], times[PLAIN], strict=True)
            ratio = ratio_interval([one[clock] / other[clock] for one, other in pairs])
            line += f" {ratio.median:.3f} ({ratio.low:.3f} to {ratio.high:.3f}) |" if variant != PLAIN else " |"
        yield line


def numbers(text: str) -> list[float]:
    """Return numbers with commas between them."""
    return [float(each) for each in text.split(",")]


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--step-ms", type=numbers, default=[8.0, 50.0])
    parser.add_argument("--width", type=float)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--adam", action="store_true")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    given = parser.parse_args()
    if "RANK" in os.environ:
        as_script(given)
        return
    print(
        f"{given.blocks} blocks of {given.steps} steps, {given.replicas} processes, torch {torch.__version__}, ", end=""
    )
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n", flush=True)
    print("| width | variant | CPU, ms a step | wall, ms | CPU over plain (95 %) | wall over plain (95 %) |")
    print("|---|---|---|---|---|---|")
    for step_ms in given.step_ms if given.width is None else [0.0]:
        for line in table(given, step_ms, [PLAIN, *given.variants.split(",")]):
            print(line, flush=True)


if __name__ == "__main__":
    main()
