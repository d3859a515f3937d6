"""Train on scikit-learn's digits with a batch that follows the goodput: torchrun --nproc-per-node 2 THIS_FILE.

Stop it when you like and start it again on another number of processes with the same --checkpoint: it goes on with the
same total batch, learning rate and samples.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from ddltool.runtime.agent import GoodputAgent


def parse() -> argparse.Namespace:
    """Return the options."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--epochs", type=int, default=30)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--fixed", action="store_true", help="keep the batch of 32 for comparison")
    arguments.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    arguments.add_argument("--target", type=float, default=0.97, help="accuracy on the held-out samples to stop at")
    arguments.add_argument("--checkpoint", help="continue from here, and save here after each epoch")
    return arguments.parse_args()


def main() -> None:
    """Train until the target, and print what it took."""
    given = parse()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    images, targets = load_digits(return_X_y=True)
    features, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets)
    mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    features, labels = features[mixed], labels[mixed]
    training, held_out = TensorDataset(features[:1440], labels[:1440]), (features[1440:], labels[1440:])
    module = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    model = DistributedDataParallel(module) if dist.is_initialized() else module
    if given.optimizer == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=0.0005)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    agent = GoodputAgent(
        model,
        optimizer,
        training,
        initial_batch_size=32,
        max_batch_size=512,
        max_local_batch_size=256,
        rule="sqrt" if given.optimizer == "adam" else "adascale",
        interval_steps=20,  # short, for a run of seconds
        noise_every=2,
        smoothing=0.95,
        adapt=not given.fixed,
        seed=given.seed,
    )
    if given.checkpoint and Path(given.checkpoint).exists():
        state = torch.load(given.checkpoint, weights_only=True)
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        agent.load_state_dict(state["agent"])

    seconds, accuracy = 0.0, 0.0
    for epoch in range(agent.sampler.epoch, given.epochs):
        start = time.perf_counter()
        for inputs, answers in agent.batches(epoch):
            agent.loss(nn.functional.cross_entropy(model(inputs), answers)).backward()
            if agent.complete:
                optimizer.step()
                optimizer.zero_grad()
        seconds += time.perf_counter() - start
        with torch.no_grad():
            accuracy = (module(held_out[0]).argmax(1) == held_out[1]).float().mean().item()
        if given.checkpoint and agent.sampler.rank == 0:
            state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "agent": agent.state_dict()}
            # Renamed when it is whole: a killed run leaves the earlier checkpoint.
            torch.save(state, given.checkpoint + ".new")
            Path(given.checkpoint + ".new").replace(given.checkpoint)
        if accuracy >= given.target:
            break
    if agent.sampler.rank == 0:
        noise = "unknown" if agent.noise_scale is None else f"{agent.noise_scale:.0f}"
        print(
            f"accuracy {accuracy:.3f} after {epoch + 1} epochs, {agent.sampler.step} steps, "
            f"{agent.progress * 32 / len(training):.1f} epoch-equivalents, {seconds:.2f} s; "
            f"total batch {agent.total_batch_size}, noise scale {noise}"
        )
    agent.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
