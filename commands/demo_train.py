"""The demo's training script: standard DistributedDataParallel under torchrun, plus the hook.

Trains a zoo model on scikit-learn's digits (1,797 handwritten digits, 8 x 8, enlarged to 32 x 32). Started by
``ddltool demo`` as ``torchrun -m ddltool.commands.demo_train ENFORCE OUTPUT``; rank 0 writes losses and accuracy to OUTPUT.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ddltool import runtime
from ddltool.artifacts import save
from ddltool.fixtures import zoo

MODEL = "resnet32"
STEPS = 100
HELD_OUT = 297  # of the 1,797 digits: the last ones
LEARNING_RATE = 0.02
ENLARGED = 4
"""Factor on the sides of a digit's image, 8 pixels: the model is made for 32."""


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's digits as (training, held-out) sets of (image (3, 32, 32), class) pairs.

    Images are enlarged and repeated in three channels, as the model expects; their values are around zero.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16.0 - 0.3
    images = nn.functional.interpolate(pixels, scale_factor=float(ENLARGED)).expand(-1, 3, -1, -1).contiguous()
    labels = torch.tensor(bunch.target)
    return (
        TensorDataset(images[:-HELD_OUT], labels[:-HELD_OUT]),
        TensorDataset(images[-HELD_OUT:], labels[-HELD_OUT:]),
    )


def accuracy(model: nn.Module, data: TensorDataset) -> float:
    """Return the share of the data that the model classifies correctly; the model is left in training mode."""
    images, labels = data.tensors
    model.eval()
    with torch.no_grad():
        # In parts of 64, as all at once would take much more memory.
        right = sum(
            int(torch.sum(model(x).argmax(1) == y)) for x, y in zip(images.split(64), labels.split(64), strict=True)
        )
    model.train()
    return right / len(labels)


def train(enforcement: str) -> dict[str, object]:
    """Train for STEPS steps with the hook's file ``enforcement``; return the losses, the seconds and the held-out accuracy."""
    torch.manual_seed(0)
    training, held_out = digits()
    model = DistributedDataParallel(zoo.build(MODEL))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9)
    hook = runtime.attach(enforcement, model=model, optimizer=optimizer, dataset=training)
    loader = hook.dataloader(batch_size=8, shuffle=True, seed=0)
    losses: list[float] = []
    started = time.perf_counter()
    epoch = 0
    while len(losses) < STEPS:  # epochs, until there are enough steps
        hook.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            # hook.loss weighs uneven batches, so that the mean of the gradients is that of all samples.
            loss = nn.functional.cross_entropy(model(images), labels)
            hook.loss(loss).backward()
            optimizer.step()
            losses.append(mean_over_samples(loss, len(labels)))
            if len(losses) == STEPS:
                break
        epoch += 1
    seconds = time.perf_counter() - started
    hook.close()
    return {"losses": losses, "seconds": seconds, "accuracy": accuracy(model.module, held_out)}


def mean_over_samples(loss: Tensor, samples: int) -> float:
    """Return the mean loss over all ranks' samples; ``loss``: the mean over this rank's ``samples``. All ranks must call it."""
    sums = torch.tensor([loss.item() * samples, float(samples)])
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def main() -> None:
    """Train as one process of torchrun's job: ``demo_train ENFORCE OUTPUT``.

    ENFORCE: the hook's configuration, enforce.json. OUTPUT: the JSON file that rank 0 writes.
    """
    enforcement, output = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = train(enforcement)
    if dist.get_rank() == 0:
        save(result, Path(output))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
