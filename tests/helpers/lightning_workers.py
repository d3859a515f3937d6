"""Lightning's Trainer as people use it: alone with whole batches, and on two ranks with the callback and uneven ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, WeightedRandomSampler

from ddltool.runtime.integrations import HookCallback  # first: it mends torchvision
from tests.helpers.whole_trainers import SAMPLES, TOTAL, WIDTH, Cell, Points, Run, Stream

import lightning  # isort: skip

CLASSES = 3


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(Points() if dataset is None else dataset, **({"batch_size": TOTAL} | options))


class Plain(lightning.LightningModule):
    """What most modules look like: batches by name, a loss with a penalty, a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, 6), nn.Linear(6, CLASSES)
        self.double()

    def forward(self, points: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(points).tanh())
        return logits

    def training_step(self, batch: Any, number: int) -> Any:
        return {
            "loss": F.cross_entropy(self(batch["points"]), batch["labels"]) + 0.01 * self.head.weight.square().sum()
        }

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("seen", self(batch["points"]).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)
        steps = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": steps, "interval": "step"}}


def trained(
    run: Run,
    module: Plain,
    data: Any = None,
    *,
    checkpoint: str | None = None,
    strategy: str = "ddp",
    lengths: Any = None,
    **options: Any,
) -> lightning.Trainer:
    """Return a Trainer that has trained the module."""
    run.begins(module.parameters())
    how: dict[str, Any] = {"devices": 1, "callbacks": []}
    if not run.alone:
        how = {"devices": 2, "strategy": strategy, "callbacks": [HookCallback(run.plan, lengths=lengths)]}
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=str(run.folder),
        **(how | {"max_epochs": 2, "enable_checkpointing": False, "use_distributed_sampler": False} | options),
    )  # fmt: skip
    trainer.fit(module, loader() if data is None else data, ckpt_path=checkpoint)
    return trainer


class TrainingAndValidation(lightning.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader()

    def val_dataloader(self) -> Any:
        return loader(batch_size=10)


class LineSearch(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.3, max_iter=3)


class ByHand(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, number: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(batch["points"]), batch["labels"]))
        self.clip_gradients(optimizer, 0.1, gradient_clip_algorithm="norm")
        optimizer.step()


class Rivals(Plain):
    """Two optimizers, two backward passes in one step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Linear(CLASSES, 1).double()

    def training_step(self, batch: Any, number: int) -> None:
        of_judge, of_maker = self.optimizers()  # type: ignore[misc]
        made, ones = self(batch["points"]), torch.ones(len(batch["labels"]), 1, dtype=torch.float64)
        truth = F.one_hot(batch["labels"], CLASSES).double()
        real = F.binary_cross_entropy_with_logits(self.judge(truth), ones)
        self.toggle_optimizer(of_judge)
        of_judge.zero_grad()
        self.manual_backward(real + F.binary_cross_entropy_with_logits(self.judge(made.detach()), 0 * ones))
        of_judge.step()
        self.untoggle_optimizer(of_judge)
        of_maker.zero_grad()
        self.manual_backward(F.binary_cross_entropy_with_logits(self.judge(self(batch["points"])), ones))
        of_maker.step()

    def configure_optimizers(self) -> Any:
        maker = [*self.body.parameters(), *self.head.parameters()]
        return [torch.optim.SGD(self.judge.parameters(), lr=0.3), torch.optim.SGD(maker, lr=0.3)]


def resumed(run: Run) -> lightning.Trainer:
    first = trained(run, Plain(), max_epochs=1, accumulate_grad_batches=2)
    first.save_checkpoint(run.folder / "one.ckpt")
    return trained(run, Plain(), max_epochs=3, checkpoint=str(run.folder / "one.ckpt"), accumulate_grad_batches=2)


def said(module: lightning.LightningModule, loss: Tensor, **meaning: Any) -> Tensor:
    """Return a loss that is said to the callback, where there is one."""
    hooks = [each.hook for each in module.trainer.callbacks if isinstance(each, HookCallback)]  # type: ignore[attr-defined]
    return hooks[0].loss(loss, **meaning) if hooks else loss


class Sum(Plain):
    def training_step(self, batch: Any, number: int) -> Any:
        loss = F.cross_entropy(self(batch["points"]), batch["labels"], reduction="sum") / TOTAL
        return said(self, loss, reduction="sum")


class SaidByHand(ByHand):
    def training_step(self, batch: Any, number: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        each = F.cross_entropy(self(batch["points"]), batch["labels"], reduction="none")
        weights = 1.0 + batch["labels"]
        loss = said(self, (weights * each).sum() / weights.sum(), count=weights.sum())
        self.manual_backward(loss)
        optimizer.step()


def fitted_twice(run: Run) -> lightning.Trainer:
    trainer = trained(run, Plain(), max_epochs=1)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(trainer.lightning_module, loader())
    return trainer


def shuffled(run: Run, **options: Any) -> lightning.Trainer:
    torch.manual_seed(3)
    return trained(run, Plain(), loader(sampler=WeightedRandomSampler(torch.arange(1.0, 105), SAMPLES)), **options)


def sampler_of_lightning(run: Run) -> lightning.Trainer:
    sampler = WeightedRandomSampler(torch.arange(1.0, 105), SAMPLES)
    return trained(run, Plain(), loader(sampler=sampler), use_distributed_sampler=True)


def cell(train: Callable[[Run], lightning.Trainer]) -> Cell:
    return lambda run: train(run).lightning_module.parameters()


CELLS: dict[str, Cell] = {
    "plain": cell(lambda run: trained(run, Plain())),
    "clipped": cell(lambda run: trained(run, Plain(), gradient_clip_val=0.05)),
    "accumulated": cell(lambda run: trained(run, Plain(), accumulate_grad_batches=3)),
    "shuffled": cell(shuffled),
    "by length": cell(lambda run: shuffled(run, lengths=[1 + 7 * index % 50 for index in range(SAMPLES)])),
    "data workers": cell(lambda run: trained(run, Plain(), loader(num_workers=2, persistent_workers=True))),
    "stream": cell(lambda run: trained(run, Plain(), loader(Stream(Points())), accumulate_grad_batches=2)),
    "validated": cell(lambda run: trained(run, Plain(), TrainingAndValidation(), val_check_interval=2)),
    "closure called again": cell(lambda run: trained(run, LineSearch())),
    "by hand": cell(lambda run: trained(run, ByHand())),
    "said by hand": cell(lambda run: trained(run, SaidByHand())),
    "sum over samples": cell(lambda run: trained(run, Sum(), accumulate_grad_batches=2)),
    "fitted twice": cell(fitted_twice),
    "two optimizers": cell(lambda run: trained(run, Rivals(), strategy="ddp_find_unused_parameters_true")),
    "resumed": cell(resumed),
}
REFUSED: dict[str, tuple[Cell, str]] = {
    "sampler of lightning": (
        cell(sampler_of_lightning),
        "loader: is shared out by a DistributedSamplerWrapper; leave that to the hook",
    )
}


def watched(rank: int, target: str, devices: int) -> None:
    """Train with telemetry, and nothing enforced."""
    lightning.Trainer(
        accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", logger=False, max_epochs=1,
        enable_progress_bar=False, enable_checkpointing=False, callbacks=[HookCallback(telemetry=target)],
    ).fit(Plain(), loader(batch_size=16))  # fmt: skip
