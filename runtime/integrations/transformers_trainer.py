"""Transformers' ``Trainer`` with a plan. Start at :class:`HookedTrainerMixin`, or :class:`TelemetryCallback` without one.

::

    class MyTrainer(HookedTrainerMixin, Trainer):
        pass

    MyTrainer(model, arguments, train_dataset=dataset, enforcement="enforce.json").train()

What a Trainer in one process computes is what comes out: it divides a loss by the labels of all its batches of a step where the
model or ``compute_loss_func`` takes ``num_items_in_batch``, and by the number of those batches otherwise. Which it was is
measured in the first step (:mod:`~ddltool.runtime.integrations.measured_losses`), as models may take the number and not use it.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ddltool.errors import InputError
from ddltool.runtime.hook import Hook, attach
from ddltool.runtime.hook.loader import StreamLoader
from ddltool.runtime.integrations.measured_losses import (
    DIVIDED,
    HALF_TOLERANCE,
    SAID,
    SAMPLES,
    TOLERANCE,
    LossKinds,
    counts_of,
)
from ddltool.runtime.integrations.said_losses import SaidLosses
from ddltool.runtime.processes.job import DistributedJob
from ddltool.runtime.processes.random_streams import streams_kept

Path = str | os.PathLike[str]
# The remedy of refusals: how a script says what its loss is.
SAY = "say self.hook.loss(loss, ...) in a compute_loss of your own"


class TelemetryCallback(TrainerCallback):
    """Writes telemetry of any Trainer, in which nothing is enforced: ``trainer.add_callback(TelemetryCallback(trainer))``.

    Args:
        trainer: the Trainer, which wraps its model only when training begins.
        telemetry: the file, which all ranks share.
    """

    def __init__(self, trainer: Trainer, telemetry: Path = "telemetry.jsonl") -> None:
        self._trainer, self._telemetry = trainer, telemetry
        self._hook: Hook | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach a hook that records, now that the Trainer has wrapped its model and made its optimizer."""
        if self._hook is None:
            self._hook = attach(None, telemetry=self._telemetry)
            self._hook.resumed(state.global_step)
            self._hook.bind(self._trainer.model_wrapped, kwargs["optimizer"])

    def on_epoch_begin(self, *_: Any, **kwargs: Any) -> None:
        """Let the next step begin with its forward pass, as what came between epochs belongs to no step."""
        if self._hook is not None:
            self._hook.set_epoch(0)

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        """Write the telemetry that is held back."""
        if self._hook is not None:
            self._hook.close()


class HookedTrainerMixin:
    """Makes a ``Trainer`` follow an enforcement config; to stand before it in a class's bases.

    ``per_device_train_batch_size`` is replaced by the planned local batch, of which ``gradient_accumulation_steps``
    make an update. Where the plan accumulates, it is replaced by one of the plan's passes, and these are as many. The
    order of samples, and all else, stays the Trainer's own.

    The first step computes the losses of some parts of its batch, without dropout and gradients, to find what they are
    means over. A loss that is neither divided by ``num_items_in_batch`` nor a mean over samples or labels is refused.
    Then ``self.hook.loss`` in a ``compute_loss`` of the script's own says what it is, and nothing is measured.

    Args:
        enforcement: path of an ``enforce.json``; None: nothing is enforced.
        telemetry: without a config, a file for what is measured all the same.
        lengths: of the training dataset's samples, as in :meth:`~ddltool.runtime.hook.Hook.dataloader`: the samples of
            each update are shared out by them, in the Trainer's order.
        args, kwargs: go to ``Trainer``.

    Raises InputError, on every rank, as :func:`~ddltool.runtime.hook.attach` does.
    """

    def __init__(
        self,
        *args: Any,
        enforcement: Path | None = None,
        telemetry: Path | None = None,
        lengths: Any = None,
        **kwargs: Any,
    ) -> None:
        """Attach the hook, which replaces the batches; model and optimizer follow when training begins."""
        super().__init__(*args, **kwargs)
        self.hook = SaidLosses(attach(enforcement, telemetry=telemetry).named("self.hook"))
        self._trainer = cast(Any, self)  # what it is once it is mixed in
        self._kinds: LossKinds | None = None  # what the losses may be means over; None: not looked at yet
        self._meaning: dict[str, Any] | None = None  # what the hook is told of a loss; None: the script says it
        # Batches of the epoch that a resumed run leaves out; whether the hook has the model.
        self._skip, self._is_bound, self._lengths = 0, False, lengths
        self._trainer.add_callback(_Following(self))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the Trainer's own loader, with the planned batches."""
        loader: DataLoader[Any] = super().get_train_dataloader()  # type: ignore[misc]
        passes = self._trainer.args.gradient_accumulation_steps
        loader = self.hook.planned(loader, accumulated=passes, lengths=self._lengths)
        return loader

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Train on the next batch that was fetched, and return its loss times its weight, for the Trainer's log.

        The plain average of what ranks return is then the loss over all samples. ``num_items_in_batch``: the labels of
        the step.
        """
        self.hook.turn_to_next_batch(self._skip)
        self._skip = 0
        arguments = self._trainer.args
        is_total = arguments.average_tokens_across_devices
        if self.hook.local_batch_size is not None:
            arguments.average_tokens_across_devices = False  # or the loss is multiplied by the number of ranks
        try:
            self._meaning = self._found_meaning(model, inputs, num_items_in_batch, is_total)
            self.hook.said = False
            loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        finally:
            arguments.average_tokens_across_devices = is_total
        return loss * self.hook.last_weight

    def _begin(self, state: TrainerState, loader: DataLoader[Any]) -> None:
        """Bind the hook to model and optimizer as training begins; after a resumption, note how many batches are skipped.

        Raises InputError where batches of a stream would have to be skipped.
        """
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
        """Return the number of updates in an epoch; a stream has a single epoch, so no end."""
        if isinstance(loader, StreamLoader):
            return sys.maxsize
        passes: int = self._trainer.args.gradient_accumulation_steps
        return max(-(-len(loader) // passes), 1)

    def _found_meaning(self, model: Any, inputs: Any, items: Any, is_total: bool) -> dict[str, Any] | None:
        """Return the keyword arguments of the hook's ``loss`` for a batch's loss, None where the script gives them itself.

        All ranks call this together, as the kind of loss may have to be measured. ``items``: what the Trainer divides
        the loss by; ``is_total``: whether that is the sum over all ranks already.
        """
        if self.hook.local_batch_size is None or self.hook.world_size == 1:
            return {}
        if self._kinds is None:
            self._kinds = LossKinds(DistributedJob.this(), SAY)
        inputs = self._trainer._prepare_inputs(inputs)
        kind = self._kinds.kind(_TrainersLoss(self._trainer, model), inputs, items)
        if kind == DIVIDED:
            return {"reduction": "sum"} if is_total else {"count": items}
        if kind in (SAMPLES, SAID):
            return {} if kind == SAMPLES else None
        # A mean over labels: the hook weighs it by this rank's count of them, which it can in a single pass only.
        if self.hook.passes > 1:
            raise InputError("loss", f"is a mean over {kind}, which each pass of the plan would have of its own", SAY)
        return {"count": counts_of(inputs)[kind].sum()}

    def _weighed(self, loss: Tensor) -> Tensor:
        """Return the loss with which the backward pass begins, weighted by its meaning.

        Raises InputError where the script said what the loss is in the first step and does not in this one.
        """
        if self._meaning is None and not self.hook.said:
            raise InputError("loss", "was said to the hook in the first step, and is not in this one", SAY)
        return self.hook.weighed(loss, **(self._meaning or {}))


class _TrainersLoss:
    """What a Trainer's ``compute_loss`` makes of batches, in evaluation mode; random streams stay where they are."""

    def __init__(self, trainer: Any, model: torch.nn.Module) -> None:
        self._trainer, self._model = trainer, model
        kinds = {value.dtype for value in model.parameters() if value.is_floating_point()}
        is_half = trainer.accelerator.mixed_precision != "no" or any(kind.itemsize < 4 for kind in kinds)
        self.tolerance = HALF_TOLERANCE if is_half else TOLERANCE
        self.said = False

    def __call__(self, inputs: Any, items: Any, *, alone: bool = True) -> float:
        """Return a batch's loss as the Trainer computes it, without dropout and gradients; ``alone``: as in one process."""
        trainer, accelerator = self._trainer, self._trainer.accelerator
        modes = {module: module.training for module in self._model.modules()}
        trainer.hook.said = False
        try:
            self._model.eval()
            if alone:
                trainer.accelerator = _OneProcess(accelerator)
            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                stack.enter_context(streams_kept(trainer.args.device))  # the random streams of training must not move
                stack.enter_context(torch.compiler.set_stance("force_eager"))  # parts have shapes that no step has
                stack.enter_context(trainer.compute_loss_context_manager())
                return float(trainer.compute_loss(self._model, inputs, num_items_in_batch=items))
        finally:
            self.said, trainer.accelerator = trainer.hook.said, accelerator
            for module, training in modes.items():
                module.training = training


class _OneProcess:
    """An accelerator that says it is alone: a loss that is multiplied by the number of processes is then another one."""

    num_processes = 1

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        """Return the accelerator's own attribute for all but the number of processes."""
        return getattr(self._accelerator, name)


class _Following(TrainerCallback):
    """Tells the mixin what its Trainer does."""

    def __init__(self, trainer: HookedTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Let the mixin bind the hook, and tell it how many steps were made before."""
        self._trainer._begin(state, kwargs["train_dataloader"])
        self._trainer.hook.resumed(state.global_step)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Choose the epoch's order of samples; its number follows from the steps made, also after a resumption."""
        self._trainer.hook.set_epoch(state.global_step // self._trainer._updates(kwargs["train_dataloader"]))

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        """Write the telemetry that is held back."""
        self._trainer.hook.close()
