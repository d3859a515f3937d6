"""What the hook costs: training steps with plain DDP, with ``attach(None)`` and with the full hook, side by side.

    python benchmarks/bench_hook.py [--blocks 40] [--steps 20]

Two processes over gloo, one thread each, 16 samples per process and step. The three variants take turns in blocks of
steps, in an order that changes from block to block, so that a slow spell of the machine hits all of them. Printed are
the medians over the blocks of rank 0's time per step, and the ratios of these medians to plain DDP. The full hook weighs
gradients, counts samples and writes telemetry.
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
from torch.utils.data import TensorDataset

from ddltool import runtime
from ddltool.artifacts import save
from ddltool.plans import Enforcement, RankEnforcement

VARIANTS = ("plain DDP", "attach(None)", "full hook")
SAMPLES = 16


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """Return a small multilayer perceptron (0.1 M parameters, one bucket) and a batch."""
    layers = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return layers, torch.randn(SAMPLES, 128)


def conv_net() -> tuple[nn.Module, torch.Tensor]:
    """Return a convolutional network (2.8 M parameters, several buckets) and a batch of 32 x 32 images."""
    stages: list[nn.Module] = []
    for inputs, outputs in ((3, 32), (32, 64), (64, 128), (128, 256)):
        stages += [nn.Conv2d(inputs, outputs, 3, stride=2, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*stages, nn.Flatten(), nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 10)), torch.randn(
        SAMPLES, 3, 32, 32
    )


def stepper(
    build: Callable[[], tuple[nn.Module, torch.Tensor]], config: str | None, attach: bool
) -> Callable[[], None]:
    """Return a function that makes one training step."""
    torch.manual_seed(0)
    module, inputs = build()
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    labels = torch.arange(SAMPLES) % 10
    if attach:
        runtime.attach(config, model=model, optimizer=optimizer, dataset=TensorDataset(torch.zeros(1000)))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    return step


def measure(rank: int, folder: str, blocks: int, steps: int) -> None:
    """Time all models and variants in one process; rank 0 leaves the medians in ``folder``."""
    torch.set_num_threads(1)
    os.chdir(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    results = {}
    for name, build in (("mlp", mlp), ("conv net", conv_net)):
        configs = {"plain DDP": (None, False), "attach(None)": (None, True), "full hook": ("enforce.json", True)}
        runs = {variant: stepper(build, *configs[variant]) for variant in VARIANTS}
        seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for block in range(-2, blocks):  # the first two warm up: DDP rebuilds its buckets
            for place in range(len(VARIANTS)):
                variant = VARIANTS[(block + place) % len(VARIANTS)]
                dist.barrier()
                start = time.perf_counter()
                for _ in range(steps):
                    runs[variant]()
                if block >= 0:
                    seconds[variant].append((time.perf_counter() - start) / steps)
        results[name] = {variant: statistics.median(times) for variant, times in seconds.items()}
    if rank == 0:
        Path("result.json").write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


def main() -> None:
    """Run the benchmark and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    ranks = [RankEnforcement(rank=rank, device_type="cpu", ests=1, local_batch_size=SAMPLES) for rank in (0, 1)]
    plan = Enforcement(job="bench", strategy="bsp", world_size=2, total_batch_size=2 * SAMPLES, ranks=ranks)
    with tempfile.TemporaryDirectory() as folder:
        save(plan, Path(folder, "enforce.json"))
        mp.spawn(measure, (folder, options.blocks, options.steps), nprocs=2)
        results = json.loads(Path(folder, "result.json").read_text(encoding="utf-8"))
    print(f"{options.blocks} blocks of {options.steps} steps, torch {torch.__version__}, {os.cpu_count()} cores")
    for name, medians in results.items():
        for variant, median_s in medians.items():
            ratio = median_s / medians[VARIANTS[0]]
            print(f"{name:9} {variant:13} {median_s * 1e3:8.3f} ms per step  x{ratio:.3f}")


if __name__ == "__main__":
    main()
