"""Train on scikit-learn's digits under a synchronisation model: torchrun --nproc-per-node 4 THIS_FILE [MODEL].

Ranks 0 to 2 are workers, rank 2 the slowest (it sleeps); rank 3 is the parameter server. MODEL is bsp, asp, ssp,
elastic, local or backup.
"""

import sys
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

from ddltool.runtime.sync import (
    ASP,
    BSP,
    SSP,
    BackupWorkers,
    ElasticBSP,
    LocalSGD,
    MomentumSGD,
    SyncServer,
    SyncWorker,
    TransferPlan,
    shard,
)

MODELS = {
    "bsp": BSP(),
    "asp": ASP(),
    "ssp": SSP(3),
    "elastic": ElasticBSP(15),
    "local": LocalSGD(4),
    "backup": BackupWorkers(1),
}


def main() -> None:
    """Train for three epochs; the server prints how long workers waited, and the accuracy."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    policy = MODELS[sys.argv[1] if len(sys.argv) > 1 else "elastic"]
    images, targets = load_digits(return_X_y=True)
    features, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(targets)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    plan = TransferPlan.for_model(model, workers=3, servers=1)
    rank, local = dist.get_rank(), policy.local_steps > 1
    if rank == 3:
        server = SyncServer(model, plan, MomentumSGD(lr=1.0 if local else 0.5), policy, telemetry="sync.jsonl")
        model.load_state_dict(server.serve())
        with torch.no_grad():
            accuracy = (model(features[1500:]).argmax(1) == labels[1500:]).float().mean().item()
        waits = ", ".join(f"{seconds:.2f}" for seconds in server.log.wait_s)
        print(f"{policy.describe()}: accuracy {accuracy:.3f}, {server.updates:.0f} updates, workers waited {waits} s")
        return
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5) if local else None
    with SyncWorker(model, plan, policy, local_optimizer=optimizer, checkpoint=f"last.{rank}.pt") as worker:
        for epoch in range(3):
            mine = torch.from_numpy(shard(1500, worker.members(epoch), rank, epoch=epoch, seed=0))
            for batch in mine.split(16):
                with worker.step():
                    time.sleep(0.03 if rank == 2 else 0.01)
                    nn.functional.cross_entropy(model(features[batch]), labels[batch]).backward()


if __name__ == "__main__":
    main()
