"""Lightning on two CPU processes follows enforce.json (docs/integrations.md): torchrun --nproc-per-node 2 THIS_FILE."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ddltool.runtime.integrations import HookCallback  # isort: skip  # first: declares torchvision's ops
import lightning  # isort: skip


class Module(lightning.LightningModule):
    """A linear classifier."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def training_step(self, batch, number):
        """Return the mean loss of the batch's samples."""
        return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

    def configure_optimizers(self):
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters())


lightning.seed_everything(0)
loader = DataLoader(TensorDataset(torch.randn(400, 8), torch.arange(400) % 3), batch_size=32, shuffle=True)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    use_distributed_sampler=False,
    max_epochs=2,
    callbacks=[HookCallback("enforce.json")],
)
trainer.fit(Module(), loader)
