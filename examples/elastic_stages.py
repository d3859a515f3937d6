"""EasyScale's three stages with processes as devices: 4 devices, then 2, then 3 of two types; the same losses bit for bit.

Stage 0 trains on four devices with a logical worker each, stage 1 continues on two with two each, stage 2 on one with
two and two of a slower type with one each. The slower type is a process that sleeps after every forward pass. Every
stage is a job of its own that continues from the checkpoint of the one before. Beside it runs one job on four devices
from beginning to end. Printed are the losses of both and whether the bits are equal; the exit code is 1 if not.

    python examples/elastic_stages.py [--steps 20] [--workers 2]
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.multiprocessing import spawn
from torch.utils.data import Dataset

from ddltool.runtime.elastic import ElasticTrainer, digest

# Logical workers and slowness (seconds added to every forward pass) of each device.
FOUR = ((1, 0.0), (1, 0.0), (1, 0.0), (1, 0.0))
TWO = ((2, 0.0), (2, 0.0))
MIXED = ((2, 0.0), (1, 0.02), (1, 0.02))


class Shifted(Dataset[tuple[Tensor, int]]):
    """Handwritten digits, moved sideways at random."""

    def __init__(self) -> None:
        images, targets = load_digits(return_X_y=True)
        self.images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        self.targets = targets.tolist()

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return an image, shape (1, 8, 8), and its digit."""
        return torch.roll(self.images[index], random.randint(-1, 1), dims=2), self.targets[index]


def network() -> nn.Module:
    """Return a network with BatchNorm and dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2)),
        *(nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)),
    )


def job(rank: int, devices: tuple[tuple[int, float], ...], store: str, path: str, until: int, workers: int) -> None:
    """Be one device of a job: continue from the checkpoint ``path``, if it is there, train up to step ``until``, and save.

    ``devices``: (logical workers, slowness in seconds) of each device, one for each rank; ``store``: the file by which the
    processes meet; ``workers``: data workers of each device. Process 0 writes each step's losses into ``path``.losses, and a
    digest of the parameters into ``path``.bits.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(devices))
    model, slowness_s = network(), devices[rank][1]
    if slowness_s:
        model.register_forward_hook(lambda *_: time.sleep(slowness_s))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    placement = [count for count, _ in devices]
    trainer = ElasticTrainer(
        model, optimizer, nn.CrossEntropyLoss(), Shifted(), placement=placement, data_workers=workers
    )
    trainer.resume(path)
    losses: list[Any] = []
    for epoch in range(until):
        for step in trainer.epoch(epoch):
            losses.append(step.losses)
            if step.number == until:
                break
        if trainer.steps_made == until:
            break
    trainer.save(path)
    trainer.close()
    if rank == 0:
        torch.save(losses, f"{path}.losses")
        torch.save(digest("".join(digest(value) for value in model.parameters()).encode()), f"{path}.bits")


def train(devices: tuple[tuple[int, float], ...], path: Path, until: int, workers: int) -> tuple[list[Any], str]:
    """Run a job with a process for each device; return each step's losses (one per logical worker), and the digest.

    The arguments are those of :func:`job`.
    """
    with tempfile.TemporaryDirectory() as folder:
        spawn(job, (devices, f"{folder}/store", str(path), until, workers), nprocs=len(devices))
    return torch.load(f"{path}.losses"), torch.load(f"{path}.bits")


def main() -> int:
    """Run the stages and the reference; return 1 when a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="steps of each stage")
    parser.add_argument("--workers", type=int, default=2, help="data workers of each device")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        expected, bits = train(FOUR, Path(folder, "fixed.pt"), 3 * given.steps, given.workers)
        equal = True
        stages = (("4 devices", FOUR), ("2 devices", TWO), ("1 + 2 slower devices", MIXED))
        for number, (name, devices) in enumerate(stages):
            until = (number + 1) * given.steps
            losses, found = train(devices, Path(folder, "elastic.pt"), until, given.workers)
            reference = expected[until - given.steps : until]
            same = losses == reference
            equal &= same
            # The mean loss of the 4 logical workers in the stage's last step.
            last, wanted = (float(sum(steps[-1]) / 4) for steps in (losses, reference))
            verdict = "equal bits" if same else "different bits"
            print(f"stage {number}: {name:21s} loss {last.hex()} ({last:.4f}), fixed run {wanted.hex()}, {verdict}")
    equal &= found == bits
    print(f"{given.steps} steps a stage, 4 logical workers; parameters at the end: {found}, fixed run {bits}")
    return 0 if equal else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
