"""A script of accelerate's with the hook: model, optimizer and loader prepared; prints how far it is from one process."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import TensorDataset

from ddltool import runtime
from ddltool.runtime.hook.batches import VariableBatchSampler

torch.set_num_threads(1)
SAMPLES, TOTAL = 228, 32
dataset = TensorDataset(
    torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64), torch.arange(SAMPLES) % 3
)


def made() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
model, optimizer, scheduler = accelerator.prepare(*made())
hook = runtime.attach(Path(sys.argv[1]), model=model, optimizer=optimizer, dataset=dataset)
loader = accelerator.prepare(hook.dataloader(batch_size=16, seed=4))
seen = 0
for epoch in range(2):
    hook.set_epoch(epoch)
    for features, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(features), labels))
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        seen += len(labels)
count = torch.tensor([seen])
dist.all_reduce(count)

alone, updates, rates = made()
start = [value.detach().clone() for value in alone.parameters()]
sampler = VariableBatchSampler(SAMPLES, [TOTAL], 0, seed=4)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for places in sampler:
        features, labels = dataset[places]
        updates.zero_grad()
        nn.functional.cross_entropy(alone(features), labels).backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        updates.step()
        rates.step()
moved = max((one - two).abs().max() for one, two in zip(alone.parameters(), start, strict=True))
apart = max((one - two).abs().max() for one, two in zip(alone.parameters(), model.parameters(), strict=True))
print(f"rank {hook.rank}: {int(count)} samples, off by {float(apart / moved):.0e}", flush=True)
