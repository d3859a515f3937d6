"""Accelerate on two CPU processes follows enforce.json (docs/integrations.md): torchrun --nproc-per-node 2 THIS_FILE."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddltool import runtime

set_seed(0)
planned = DataLoaderConfiguration(split_batches=True)
accelerator = Accelerator(cpu=True, dataloader_config=planned, gradient_accumulation_steps=2)
loader = DataLoader(TensorDataset(torch.randn(400, 8), torch.arange(400) % 3), batch_size=64, shuffle=True)
model = nn.Linear(8, 3)
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
hook = runtime.attach("enforce.json", model=model, optimizer=optimizer)
loader = hook.planned(loader)
for _ in range(2):
    for features, labels in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(features), labels)
            accelerator.backward(hook.loss(loss))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
