"""FSDP2 on two CPU processes follows enforce.json (docs/integrations.md): torchrun --nproc-per-node 2 THIS_FILE."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from ddltool import runtime

torch.manual_seed(0)
torch.distributed.init_process_group("gloo")
dataset = TensorDataset(torch.randn(400, 8), torch.arange(400) % 3)
hook = runtime.attach("enforce.json")
loader = hook.planned(DataLoader(dataset, batch_size=32, shuffle=True))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
for part in (model[0], model[2], model):
    fully_shard(part, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=2 * len(loader))
hook.bind(model, optimizer)
for _ in range(2):
    for features, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(features), labels)
        hook.loss(loss).backward()
        optimizer.step()
        schedule.step()
torch.distributed.destroy_process_group()
