"""A job that lets workers join while it runs: start it, then run the same file again without a launcher.

    python examples/sync_launch.py 3 examples/sync_join.py &
    python examples/sync_join.py

Started ranks 0 and 1 are workers, rank 2 is the parameter server, whose store (DOOR, by default 127.0.0.1:29600) is the
door for two more. Each worker stops when the job has made 600 updates.
"""

import itertools
import os
import time

import torch
import torch.distributed as dist
from torch import nn

from ddltool.runtime.servers import ASP, MomentumSGD, SyncServer, SyncWorker, TransferPlan

WORKERS, UPDATES = 2, int(os.environ.get("UPDATES", "600"))


def main() -> None:
    """Serve, train, or join, depending on how this process was started."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    features = torch.randn(512, 20)
    goals = features[:, :3].sum(1, keepdim=True).sin()
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 1))
    plan, policy = TransferPlan.for_model(model, workers=WORKERS, servers=1, late=2), ASP()
    host, _, port = os.environ.get("DOOR", "127.0.0.1:29600").rpartition(":")
    door = None
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        if dist.get_rank() >= WORKERS:
            store = dist.TCPStore(host, int(port), is_master=True, wait_for_workers=False)
            server = SyncServer(model, plan, MomentumSGD(lr=0.1), policy, door=store)
            model.load_state_dict(server.serve())
            loss = nn.functional.mse_loss(model(features), goals).item()
            made = ", ".join(f"worker {worker} {steps}" for worker, steps in enumerate(server.steps_made) if steps)
            print(f"{server.updates:.0f} updates, loss {loss:.3f}; steps made: {made}", flush=True)
            return
    else:
        door = dist.TCPStore(host, int(port), is_master=False)
    with SyncWorker(model, plan, policy, door=door) as worker:
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
