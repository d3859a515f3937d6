"""Scripts of accelerate's: alone with whole batches, and on two ranks with the hook and uneven ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ddltool import runtime
from tests.helpers.whole_trainers import TOTAL, WIDTH, Cell, Points, Run, Stream

SAMPLES, CLASSES = 4 * TOTAL + 9, 3


def data() -> TensorDataset:
    return TensorDataset(Points(SAMPLES).points, torch.arange(SAMPLES) * 5 % CLASSES)


class Script:
    """What these scripts begin with: all is prepared at once, then attached to."""

    def __init__(
        self,
        run: Run,
        dataset: Dataset[Any] | None = None,
        *,
        ours: bool = False,
        loader: dict[str, Any] | None = None,
        config: dict[str, Any] | None = None,
        **accelerator: Any,
    ) -> None:
        self.accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True, **(config or {})), **accelerator
        )
        self.net = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()
        run.begins(self.net.parameters())
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        given = data() if dataset is None else dataset
        made: Any = DataLoader(given, batch_size=TOTAL, **(loader or {}))
        self.model, self.optimizer, self.schedule, made = self.accelerator.prepare(self.net, optimizer, schedule, made)
        self.loader = made
        self.hook = runtime.attach(run.plan, model=self.model, optimizer=self.optimizer, dataset=given)
        if run.alone:
            return
        if ours:
            self.loader = self.accelerator.prepare(self.hook.dataloader(batch_size=TOTAL, shuffle=False))
        else:
            self.loader = self.hook.planned(made)

    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        return self.hook.loss(F.cross_entropy(self.model(features), labels))

    def epoch(self, loader: Any = None) -> None:
        for features, labels in self.loader if loader is None else loader:
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.loss(features, labels))
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()

    def trained(self, epochs: int = 2) -> Iterable[Tensor]:
        for _ in range(epochs):
            self.epoch()
        return self.net.parameters()


def first_batches_skipped(run: Run) -> Iterable[Tensor]:
    script = Script(run, loader={"num_workers": 1})
    script.epoch(script.accelerator.skip_first_batches(script.loader, 2))
    return script.trained(1)


def state_saved_and_loaded(run: Run) -> Iterable[Tensor]:
    first = Script(run)
    first.epoch()
    first.accelerator.save_state(str(run.folder / "state"))
    second = Script(run)
    second.accelerator.load_state(str(run.folder / "state"))
    return second.trained(1)


class Sums(Script):
    def loss(self, features: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(features), labels, reduction="sum") / TOTAL
        return self.hook.loss(loss, reduction="sum")


CELLS: dict[str, Cell] = {
    "prepared at once": lambda run: Script(run).trained(),
    "shuffled by seed": lambda run: Script(
        run, loader={"shuffle": True}, config={"use_seedable_sampler": True, "data_seed": 7}
    ).trained(3),
    # Five batches in an epoch: the last one ends an accumulation by itself.
    "accumulated": lambda run: Script(run, gradient_accumulation_steps=2).trained(),
    "loader of the hook": lambda run: Script(run, ours=True, gradient_accumulation_steps=2).trained(),
    "dispatched": lambda run: Script(run, config={"dispatch_batches": True}).trained(),
    "stream": lambda run: Script(run, Stream(data()), gradient_accumulation_steps=2).trained(),
    "stream not dispatched": lambda run: Script(run, Stream(data()), config={"dispatch_batches": False}).trained(),
    "first batches skipped": first_batches_skipped,
    "state saved and loaded": state_saved_and_loaded,
    "sum over samples": lambda run: Sums(run, gradient_accumulation_steps=2).trained(),
}
REFUSED: dict[str, tuple[Cell, str]] = {}
