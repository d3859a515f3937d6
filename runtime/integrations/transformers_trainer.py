"""Transformers' ``Trainer`` with a plan. Start at :class:`HookedTrainerMixin`, or :class:`TelemetryCallback` without one.

::

    class MyTrainer(HookedTrainerMixin, Trainer):
        pass

    MyTrainer(model, arguments, train_dataset=dataset, enforcement="enforce.json").train()

What a Trainer in one process computes is what comes out: it divides a loss by the labels of all its batches of a step where the
model or ``compute_loss_func`` takes ``num_items_in_batch``, and by the number of those batches otherwise. Which it was is read
from the loss (:meth:`~ddltool.runtime.hook.loss_scaling.LossScaler.is_divided_by`), for many models take the
number and do not use it.
"""

from __future__ import annotations

import os
import sys
from typing import Any, cast

from torch import Tensor
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ddltool.errors import InputError
from ddltool.runtime.hook import Hook, attach
from ddltool.runtime.hook.loader import StreamLoader
from ddltool.runtime.hook.parameter_checks import wrapped

Path = str | os.PathLike[str]


class TelemetryCallback(TrainerCallback):
    """Writes telemetry of any Trainer, in which nothing is enforced: ``Trainer(..., callbacks=[TelemetryCallback()])``.

    Args:
        telemetry: the file, which all ranks share.
    """

    def __init__(self, telemetry: Path = "telemetry.jsonl") -> None:
        self._telemetry = telemetry
        self._hook: Hook | None = None

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        """Model and optimizer are there: record them."""
        if self._hook is None:
            self._hook = attach(None, telemetry=self._telemetry)
            model = kwargs["model"]
            wrapper = next((each for each in wrapped() if each.module is model), model)
            self._hook.bind(wrapper, kwargs["optimizer"])

    def on_epoch_begin(self, *_: Any, **kwargs: Any) -> None:
        """What came between epochs belongs to no step."""
        if self._hook is not None:
            self._hook.set_epoch(0)

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        """Write what is held back."""
        if self._hook is not None:
            self._hook.close()


class HookedTrainerMixin:
    """Makes a ``Trainer`` follow an enforcement config; to stand before it in a class's bases.

    ``per_device_train_batch_size`` is replaced by the planned local batch, of which ``gradient_accumulation_steps`` make an
    update; where the plan accumulates, by one of its passes, and these are their number. The order of samples, and all else,
    stays the Trainer's own. Losses that cannot be read, or that are means of another kind, are refused; ``self.hook.loss`` in
    a ``compute_loss`` of your own says what they are.

    Args:
        enforcement: path of an ``enforce.json``; None: nothing is enforced.
        telemetry: without a config, a file for what is measured all the same.
        args, kwargs: go to ``Trainer``.

    Raises InputError, on every rank, as :func:`~ddltool.runtime.hook.attach` does.
    """

    def __init__(
        self, *args: Any, enforcement: Path | None = None, telemetry: Path | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.hook = attach(enforcement, telemetry=telemetry).call("self.hook")
        self._trainer = cast(Any, self)  # what it is once it is mixed in
        self._items: Any = None
        self._skip, self._is_bound, self._is_total = 0, False, False
        self._trainer.add_callback(_Following(self))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the Trainer's own loader, with the planned batches."""
        loader: DataLoader[Any] = super().get_train_dataloader()  # type: ignore[misc]
        return self.hook.planned(loader, accumulated=self._trainer.args.gradient_accumulation_steps)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Train on the next batch that was fetched; ``num_items_in_batch`` are the labels that the step counts.

        What it returns is logged: the loss by its weight, so that the plain average over ranks is that of all samples.
        """
        self.hook.turn_to_next_batch(self._skip)
        self._skip, self._items = 0, num_items_in_batch
        arguments = self._trainer.args
        self._is_total = arguments.average_tokens_across_devices
        if self.hook.local_batch_size is not None:
            arguments.average_tokens_across_devices = False  # or the loss is multiplied by the number of ranks
        try:
            loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        finally:
            arguments.average_tokens_across_devices = self._is_total
        return loss * self.hook.last_weight

    def _begin(self, state: TrainerState, loader: DataLoader[Any]) -> None:
        """Model and optimizer are there, or those of a checkpoint."""
        trainer = self._trainer
        self._skip = 0
        if state.global_step and not trainer.args.ignore_data_skip:
            passes = trainer.args.gradient_accumulation_steps
            self._skip = passes * (state.global_step % self._updates(loader))
            if self._skip and isinstance(loader, StreamLoader):
                remedy = "set ignore_data_skip=True, and let the dataset begin where it left off"
                raise InputError("resume_from_checkpoint", "cannot skip batches of a stream", remedy)
        if not self._is_bound:
            self._is_bound = True
            self.hook.bind(trainer.model_wrapped, trainer.optimizer)
            backward = trainer.accelerator.backward
            trainer.accelerator.backward = lambda loss, **options: backward(self._weighed(loss), **options)

    def _updates(self, loader: DataLoader[Any]) -> int:
        """Return the updates of an epoch; a stream has one epoch."""
        if isinstance(loader, StreamLoader):
            return sys.maxsize
        passes: int = self._trainer.args.gradient_accumulation_steps
        return max(-(-len(loader) // passes), 1)

    def _weighed(self, loss: Tensor) -> Tensor:
        """Return the loss as it would be in one process, weighed by what it counts."""
        items = self._items
        if items is None or not self.hook.is_divided_by(loss, float(items)):
            return loss
        return self.hook.loss(loss, reduction="sum") if self._is_total else self.hook.loss(loss, count=items)


class _Following(TrainerCallback):
    """Tells the mixin what its Trainer does."""

    def __init__(self, trainer: HookedTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer._begin(state, kwargs["train_dataloader"])

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._trainer.hook.set_epoch(state.global_step // self._trainer._updates(kwargs["train_dataloader"]))

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        self._trainer.hook.close()
