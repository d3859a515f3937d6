"""Makes Lightning's ``Trainer`` follow a plan. Start at :class:`HookCallback`.

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

    Its training loaders get the planned batches in the order of their own sampler, also of a ``DistributedSampler`` that
    Lightning inserts. Validation does not change. If the plan accumulates, ``accumulate_grad_batches`` must be its number
    of passes. Losses count as means over the batch's samples, unless the module passes all losses of a step through
    :meth:`hook.loss <ddltool.runtime.hook.Hook.loss>` of this callback.

    Args:
        enforcement: path of an ``enforce.json``; None: nothing is enforced.
        telemetry: a file for telemetry, without a config; a config names its own.
        lengths: (n,) tokens of the training dataset's samples, by which the samples of a step are divided among ranks;
            None: consecutive samples go to ranks in order.
    """

    def __init__(self, enforcement: Path | None = None, *, telemetry: Path | None = None, lengths: Any = None) -> None:
        """Keep the arguments; the hook is attached when a fit starts, and enforces nothing until then."""
        self._enforcement = enforcement
        self._telemetry = telemetry
        self._lengths = lengths
        self.hook = SaidLosses(Hook(None, 0, 1))

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Attach the hook, and replace two methods of the strategy: for its loaders, before they are made, and losses.

        Raises InputError, on every rank, as ``attach`` does.
        """
        strategy: Any = trainer.strategy
        self.hook = SaidLosses(attach(self._enforcement, telemetry=self._telemetry))
        self.hook.bind(strategy.model, *trainer.optimizers)
        self._is_bare = strategy.model is pl_module
        # The class's methods are called below, because an earlier fit may have replaced those of the instance already.
        strategy_class = type(strategy)

        def planned(loader: Any) -> Any:
            """Return the strategy's version of ``loader``, a training loader with the planned batches."""
            if trainer.training and isinstance(loader, DataLoader):
                accumulated = trainer.accumulate_grad_batches if pl_module.automatic_optimization else None
                loader = self.hook.planned(loader, accumulated=accumulated, lengths=self._lengths)
            return strategy_class.process_dataloader(strategy, loader)

        def weighed(loss: Tensor, optimizer: Any, *args: Any, **options: Any) -> Any:
            """Run the strategy's backward pass on the weighted loss."""
            return strategy_class.backward(strategy, self.hook.weighed(loss), optimizer, *args, **options)

        strategy.process_dataloader = planned
        strategy.backward = weighed

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Tell the hook how many steps were made before, which is above 0 if a checkpoint was loaded."""
        self.hook.resumed(trainer.global_step)

    def on_train_epoch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Set the hook's epoch, by which samples are ordered."""
        self.hook.set_epoch(trainer.current_epoch)

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Tell the hook that the next batch's turn has come, because Lightning fetches one ahead.

        In a single process ``training_step`` is called on the bare module, so the hook sees no forward pass and gets the
        batch itself.
        """
        self.hook.said = False  # the module has not yet said what this step's loss is
        self.hook.turn_to_next_batch(passed=batch if self._is_bare else None)

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Write telemetry that is still buffered."""
        self.hook.close()
