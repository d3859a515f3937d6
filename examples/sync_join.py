"""A job that lets workers join while it runs: start it, then run the same file again without a launcher.

    export DDLTOOL_SERVER=127.0.0.1:29600 DDLTOOL_TOKEN=secret
    python examples/sync_launch.py 3 examples/sync_join.py &
    python examples/sync_join.py

Started ranks 0 and 1 are workers, rank 2 is the parameter server; two more may join. Each worker stops when the job has
made 600 updates.
"""

import itertools
import os
import time

import torch
from torch import nn

from ddltool.runtime.servers import ASP, Server, TransferPlan, Worker

WORKERS, UPDATES = 2, int(os.environ.get("UPDATES", "600"))


def main() -> None:
    """Serve, train, or join, depending on how this process was started."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    features = torch.randn(512, 20)
    goals = features[:, :3].sum(1, keepdim=True).sin()
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))
    plan, policy = TransferPlan.for_model(model, workers=WORKERS, servers=1, late=2), ASP()
    if int(os.environ.get("RANK", "-1")) == WORKERS:
        server = Server(model, plan, torch.optim.SGD(model.parameters(), lr=0.1), policy)
        server.serve()
        loss = nn.functional.mse_loss(model(features), goals).item()
        made = ", ".join(f"worker {worker} {steps}" for worker, steps in enumerate(server.steps_made) if steps)
        print(f"{server.updates:.0f} updates, loss {loss:.3f}; steps made: {made}", flush=True)
        return
    with Worker(model, plan, policy) as worker:  # without a rank it joins
        print(f"worker {worker.rank} begins with step {worker.clock}, epoch {worker.epoch}", flush=True)
        for epoch in itertools.count(worker.epoch):
            for batch in worker.batches(len(features), 16, epoch=epoch, seed=0):
                if worker.updates >= UPDATES:
                    return
                with worker.step():
                    time.sleep(0.02)
                    nn.functional.mse_loss(model(features[batch]), goals[batch]).backward()


if __name__ == "__main__":
    main()
