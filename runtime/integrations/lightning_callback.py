"""Lightning's ``Trainer`` with a plan. Start at :class:`HookCallback`.

::

    trainer = Trainer(strategy="ddp", devices=2, use_distributed_sampler=False, callbacks=[HookCallback("enforce.json")])
"""

from __future__ import annotations

import os
from typing import Any

import lightning
from torch import Tensor
from torch.utils.data import DataLoader

from ddltool.runtime.hook import Hook, attach
from ddltool.runtime.integrations.said_losses import SaidLosses

Path = str | os.PathLike[str]


class HookCallback(lightning.Callback):
    """Makes a Trainer follow an enforcement config, in automatic and in manual optimization.

    Its training loaders get the planned batches in the order of their own sampler; a ``DistributedSampler`` that Lightning puts
    there is taken over. Validation is left as it is. Where the plan accumulates, ``accumulate_grad_batches`` are its passes.
    Losses are taken for means over the batch's samples, unless the module says of those of a step what they are, by
    :meth:`hook.loss <ddltool.runtime.hook.Hook.loss>` of this callback: of all of them then.

    Args:
        enforcement: path of an ``enforce.json``; None: nothing is enforced.
        telemetry: without a config, a file for what is measured all the same.
        lengths: of the training dataset's samples, as in :meth:`~ddltool.runtime.hook.Hook.dataloader`.
    """

    def __init__(self, enforcement: Path | None = None, *, telemetry: Path | None = None, lengths: Any = None) -> None:
        """Keep the arguments; the hook is attached when a fit starts. Until then, ``hook`` enforces nothing."""
        self._enforcement, self._telemetry, self._lengths = enforcement, telemetry, lengths
        self.hook = SaidLosses(Hook(None, 0, 1))

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Attach the hook and put it between the strategy and its loaders and losses, before the loaders are made.

        Raises InputError, on every rank, as ``attach`` does.
        """
        strategy: Any = trainer.strategy
        self.hook = SaidLosses(attach(self._enforcement, telemetry=self._telemetry))
        self.hook.bind(strategy.model, *trainer.optimizers)
        self._is_bare = strategy.model is pl_module
        # The class's own methods: those of the instance are replaced already where it has been through this before.
        strategy_class = type(strategy)

        def planned(loader: Any) -> Any:
            """Return the strategy's loader, of the planned batches while training; loaders of validation stay as they are."""
            if trainer.training and isinstance(loader, DataLoader):
                accumulated = trainer.accumulate_grad_batches if pl_module.automatic_optimization else None
                loader = self.hook.planned(loader, accumulated=accumulated, lengths=self._lengths)
            return strategy_class.process_dataloader(strategy, loader)

        def weighed(loss: Tensor, optimizer: Any, *args: Any, **options: Any) -> Any:
            """Run the strategy's backward pass on the weighted loss."""
            return strategy_class.backward(strategy, self.hook.weighed(loss), optimizer, *args, **options)

        strategy.process_dataloader, strategy.backward = planned, weighed

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Tell the hook how many steps a checkpoint, if one was loaded, has made before."""
        self.hook.resumed(trainer.global_step)

    def on_train_epoch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Choose the epoch's order of samples."""
        self.hook.set_epoch(trainer.current_epoch)

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Turn the hook to the next batch that was fetched: Lightning fetches one ahead.

        A single process calls ``training_step`` on the bare module, without a forward pass that the hook sees; then
        the batch is passed.
        """
        self.hook.said = False
        self.hook.turn_to_next_batch(passed=batch if self._is_bare else None)

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Write the telemetry that is held back."""
        self.hook.close()
