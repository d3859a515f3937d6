"""Train on scikit-learn's digits under synchronisation models: python examples/sync_launch.py 4 THIS_FILE [MODEL...].

Ranks 0 to 2 are workers, rank 2 the slowest (it sleeps); rank 3 is the parameter server. MODEL is bsp, asp, ssp,
or elastic; several are trained one after the other, each until the server has used GRADIENTS gradients
(400), so time and accuracy can be compared.

What the workers' shares of an epoch are is equal under every model, so with a fixed number of epochs the job lasts as
long as the slowest worker needs for its share, whatever the model. With a number of gradients, who is faster makes more.
"""

import itertools
import os
import sys
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

from ddltool.runtime.servers import ASP, BSP, SSP, ElasticBSP, Server, TransferPlan, Worker

WORKERS = 3
GRADIENTS = int(os.environ.get("GRADIENTS", "400"))
# A synchronisation model, and how many workers' gradients make one update.
MODELS = {
    "bsp": (BSP(), WORKERS),
    "asp": (ASP(), 1),
    "ssp": (SSP(3), 1),
    "elastic": (ElasticBSP(15), 1),
}


def train(name: str) -> None:
    """Train under one model; the server prints time, accuracy, and how long the workers waited."""
    policy, per_update = MODELS[name]
    torch.manual_seed(0)
    images, targets = load_digits(return_X_y=True)
    features, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    plan = TransferPlan.for_model(model, workers=WORKERS, servers=1)
    rank = int(os.environ["RANK"])
    if rank == WORKERS:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        server = Server(model, plan, optimizer, policy, telemetry=f"sync.{name}.jsonl")
        begin = time.monotonic()
        server.serve()
        seconds = time.monotonic() - begin
        with torch.no_grad():
            accuracy = (model(features[1500:]).argmax(1) == labels[1500:]).float().mean().item()
        waits = ", ".join(f"{wait_s:.2f}" for wait_s in server.log.wait_s)
        used = round(server.updates * per_update)
        print(f"{name}: {used} gradients in {seconds:.1f} s, accuracy {accuracy:.3f}, waited {waits} s", flush=True)
        return
    with Worker(model, plan, policy, checkpoint=f"last.{rank}.pt") as worker:
        for epoch in itertools.count():
            for batch in worker.batches(1500, 16, epoch=epoch, seed=0):
                if worker.updates * per_update >= GRADIENTS:
                    return
                with worker.step():
                    time.sleep(0.03 if rank == 2 else 0.01)
                    nn.functional.cross_entropy(model(features[batch]), labels[batch]).backward()


def main() -> None:
    """Train under each model that the command line names."""
    torch.set_num_threads(1)
    for name in sys.argv[1:] or ["bsp", "elastic"]:
        train(name)


if __name__ == "__main__":
    main()
