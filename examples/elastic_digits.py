"""Train a CNN on scikit-learn's digits with the same bits on 1 to 4 processes: torchrun --nproc-per-node 2 THIS_FILE.

Stop it when you like (Ctrl-C, kill -9) and start it again on another number of processes with the same --checkpoint:
the digest at the end is the same.
"""

import argparse
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from ddltool.errors import DdlToolError
from ddltool.runtime.elastic import ElasticTrainer, digest, start_processes


def main() -> None:
    """Train, and print the accuracy on samples that were held out and a digest of all parameters."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--checkpoint", default="digits.pt")
    arguments.add_argument("--epochs", type=int, default=2)
    arguments.add_argument("--record", help="write the fingerprints of every step here")
    arguments.add_argument("--seed", type=int, default=0, help="of the order of samples and of all that is drawn")
    arguments.add_argument("--data-workers", type=int, help="processes that fetch samples ahead")
    given = arguments.parse_args()

    start_processes()
    torch.set_num_threads(1)  # torchrun sets one thread per process, but not for a single process; bits depend on it
    torch.manual_seed(0)
    images, targets = load_digits(return_X_y=True)
    features = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(targets)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2)),
        *(nn.Conv2d(16, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=40, gamma=0.5)
    trainer = ElasticTrainer(
        model,
        optimizer,
        nn.CrossEntropyLoss(),
        TensorDataset(features[:1500], labels[:1500]),
        max_workers=4,
        batch_size=8,
        extras={"scheduler": scheduler},
        seed=given.seed,
        data_workers=given.data_workers,
        record=given.record,
    )
    trainer.stop_on()  # SIGTERM: save, then stop
    if trainer.resume(given.checkpoint) and trainer.processes.rank == 0:
        print(f"continuing after step {trainer.steps_made}")
    for epoch in range(given.epochs):
        for step in trainer.epoch(epoch):
            scheduler.step()
            if step.number % 10 == 0 or step.stop:
                trainer.save(given.checkpoint)
            if step.stop:
                return
    trainer.save(given.checkpoint)
    with trainer.evaluating(), torch.no_grad():
        accuracy = (model(features[1500:]).argmax(1) == labels[1500:]).float().mean().item()
    if trainer.processes.rank == 0:
        bits = digest("".join(digest(value) for value in model.parameters()).encode())
        print(f"{trainer.steps_made} steps, accuracy {accuracy:.3f}, parameters {bits}")


if __name__ == "__main__":
    try:
        main()
    except DdlToolError as error:
        sys.exit(f"error: {error}")
