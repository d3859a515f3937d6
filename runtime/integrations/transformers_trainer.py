"""Makes transformers' ``Trainer`` follow a plan. Start at :class:`HookedTrainerMixin`, or at :class:`TelemetryCallback`.

::

    class MyTrainer(HookedTrainerMixin, Trainer):
        pass

    MyTrainer(model, arguments, train_dataset=dataset, enforcement="enforce.json").train()

The result is what a Trainer in one process computes: it divides a loss by the number of labels in all batches of a step if
the model or ``compute_loss_func`` takes ``num_items_in_batch``, and by the number of batches otherwise. Which of the two is
measured in the first step (:mod:`~ddltool.runtime.integrations.measured_losses`), because models may take the number and
not use it.
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
# The end of error messages: how a script says what its loss is.
SAY = "say self.hook.loss(loss, ...) in a compute_loss of your own"


class TelemetryCallback(TrainerCallback):
    """Writes telemetry of any Trainer, and enforces nothing: ``trainer.add_callback(TelemetryCallback(trainer))``.

    Args:
        trainer: the Trainer.
        telemetry: the file, to which all ranks append.
    """

    def __init__(self, trainer: Trainer, telemetry: Path = "telemetry.jsonl") -> None:
        self._trainer = trainer
        self._telemetry = telemetry
        self._hook: Hook | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach a recording hook, once, because only now the Trainer has wrapped its model and made its optimizer."""
        if self._hook is None:
            self._hook = attach(None, telemetry=self._telemetry)
            self._hook.resumed(state.global_step)
            self._hook.bind(self._trainer.model_wrapped, kwargs["optimizer"])

    def on_epoch_begin(self, *_: Any, **kwargs: Any) -> None:
        """Make the next step begin with its forward pass, so that the time between epochs counts as part of no step."""
        if self._hook is not None:
            self._hook.set_epoch(0)  # any number: without loaders of the hook's it orders nothing

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        """Write telemetry that is still buffered."""
        if self._hook is not None:
            self._hook.close()


class HookedTrainerMixin:
    """Makes a ``Trainer`` follow an enforcement config; put it before ``Trainer`` in a class's bases.

    ``per_device_train_batch_size`` is replaced by the planned local batch, of which ``gradient_accumulation_steps``
    make an update. If the plan accumulates, it is replaced by one of the plan's passes, whose number
    ``gradient_accumulation_steps`` must be. The order of samples, and all else, stays the Trainer's own.

    In the first step the losses of some parts of its batch are computed, without dropout and gradients, to find what
    they are means over. A loss that is neither divided by ``num_items_in_batch`` nor a mean over samples or labels is
    refused; the script then says what it is by ``self.hook.loss`` in a ``compute_loss`` of its own, and no kind is
    searched.

    Args:
        enforcement: path of an ``enforce.json``; None: nothing is enforced.
        telemetry: a file for telemetry, without a config; a config names its own.
        lengths: (n,) tokens of the training dataset's samples: the samples of each update are divided among ranks by
            them, in the Trainer's order. None: consecutive samples go to ranks in order.
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
        """Attach the hook; it gets model and optimizer when training begins."""
        super().__init__(*args, **kwargs)
        self.hook = SaidLosses(attach(enforcement, telemetry=telemetry).named("self.hook"))
        self._trainer = cast(Any, self)  # self as a Trainer, which it is once it is mixed in
        self._kinds: LossKinds | None = None  # kinds that the losses may be; None: not measured yet
        # Keyword arguments for `hook.loss`; None: the script calls it itself.
        self._meaning: dict[str, Any] | None = None
        # Number of the epoch's batches that a resumed run skips; whether the hook has the model.
        self._skip = 0
        self._is_bound = False
        self._lengths = lengths
        self._trainer.add_callback(_Following(self))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the Trainer's own loader, with the planned batches."""
        loader: DataLoader[Any] = super().get_train_dataloader()  # type: ignore[misc]
        passes = self._trainer.args.gradient_accumulation_steps
        return self.hook.planned(loader, accumulated=passes, lengths=self._lengths)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Train on the next batch that was fetched, and return its loss times its weight, for the Trainer's log.

        The plain average of the ranks' results is the loss over all samples. ``num_items_in_batch``: the number of
        labels in the step.
        """
        self.hook.turn_to_next_batch(self._skip)
        self._skip = 0
        arguments = self._trainer.args
        is_total = arguments.average_tokens_across_devices
        if self.hook.local_batch_size is not None:
            arguments.average_tokens_across_devices = False  # otherwise the Trainer multiplies the loss by the ranks
        try:
            self._meaning = self._found_meaning(model, inputs, num_items_in_batch, is_total)
            self.hook.said = False
            loss = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        finally:
            arguments.average_tokens_across_devices = is_total
        return loss * self.hook.last_weight

    def _begin(self, state: TrainerState, loader: DataLoader[Any]) -> None:
        """Bind the hook to model and optimizer when training begins, and note how many batches a resumed run skips.

        Binding also replaces the accelerator's ``backward``, to weight losses. Raises InputError if batches of a stream
        would have to be skipped.
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
        """Return the number of updates in an epoch; for a stream, whose only epoch has no known end, ``sys.maxsize``."""
        if isinstance(loader, StreamLoader):
            return sys.maxsize
        passes: int = self._trainer.args.gradient_accumulation_steps
        return max(-(-len(loader) // passes), 1)

    def _found_meaning(self, model: Any, inputs: Any, items: Any, is_total: bool) -> dict[str, Any] | None:
        """Return the keyword arguments of ``hook.loss`` for a batch's loss; None if the script calls it itself.

        All ranks call this together, because the kind of loss may have to be measured. Raises InputError for a mean over
        labels if the plan has several passes.

        Args:
            model: the wrapped model, of which losses are measured.
            inputs: the batch, as the Trainer's loader gives it.
            items: the number by which the Trainer divides the loss; None: there is none.
            is_total: whether that is the sum over all ranks.
        """
        if self.hook.local_batch_size is None or self.hook.world_size == 1:
            return {}
        if self._kinds is None:
            self._kinds = LossKinds(DistributedJob.this(), SAY)
        inputs = self._trainer._prepare_inputs(inputs)
        kind = self._kinds.kind(_TrainersLoss(self._trainer, model), inputs, items)
        if kind == DIVIDED:
            return {"reduction": "sum"} if is_total else {"count": items}
        if kind == SAMPLES:
            return {}
        if kind == SAID:
            return None
        # A mean over labels is weighted by this rank's number of labels, which the hook can do in a single pass only.
        if self.hook.passes > 1:
            raise InputError("loss", f"is a mean over {kind}, which each pass of the plan would have of its own", SAY)
        return {"count": counts_of(inputs)[kind].sum()}

    def _weighed(self, loss: Tensor) -> Tensor:
        """Return the weighted loss for the backward pass.

        Raises InputError if the script has called ``hook.loss`` in the first step but not in this one.
        """
        if self._meaning is None and not self.hook.said:
            raise InputError("loss", "was said to the hook in the first step, and is not in this one", SAY)
        return self.hook.weighed(loss, **(self._meaning or {}))


class _TrainersLoss:
    """Computes losses by a Trainer's ``compute_loss``, in evaluation mode and without changing random streams."""

    def __init__(self, trainer: Any, model: torch.nn.Module) -> None:
        self._trainer = trainer
        self._model = model
        kinds = {value.dtype for value in model.parameters() if value.is_floating_point()}
        is_half = trainer.accelerator.mixed_precision != "no" or any(kind.itemsize < 4 for kind in kinds)
        self.tolerance = HALF_TOLERANCE if is_half else TOLERANCE
        self.said = False

    def __call__(self, inputs: Any, items: Any, *, alone: bool = True) -> float:
        """Return a batch's loss as the Trainer computes it, without dropout and gradients.

        Training modes and the Trainer's accelerator are restored; ``said`` tells whether ``hook.loss`` was called.

        Args:
            inputs: the batch.
            items: the number by which the Trainer divides the loss; None: there is none.
            alone: compute the loss as in a job of one process, where it is not multiplied by the number of processes.
        """
        trainer = self._trainer
        accelerator = self._trainer.accelerator
        modes = {module: module.training for module in self._model.modules()}
        trainer.hook.said = False
        try:
            self._model.eval()
            if alone:
                trainer.accelerator = _OneProcess(accelerator)
            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                # Training must draw the same numbers as without this.
                stack.enter_context(streams_kept(trainer.args.device))
                # Parts have new shapes: not worth compiling.
                stack.enter_context(torch.compiler.set_stance("force_eager"))
                stack.enter_context(trainer.compute_loss_context_manager())
                return float(trainer.compute_loss(self._model, inputs, num_items_in_batch=items))
        finally:
            self.said = trainer.hook.said
            trainer.accelerator = accelerator
            for module, training in modes.items():
                module.training = training


class _OneProcess:
    """A wrapper of an accelerator that reports one process, so that no loss is multiplied by the number of processes."""

    num_processes = 1

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        """Return the accelerator's attribute for every name but ``num_processes``."""
        return getattr(self._accelerator, name)


class _Following(TrainerCallback):
    """The callback through which the mixin learns of its Trainer's events."""

    def __init__(self, trainer: HookedTrainerMixin) -> None:
        self._trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make the mixin bind its hook, and tell the hook how many steps were made before."""
        self._trainer._begin(state, kwargs["train_dataloader"])
        self._trainer.hook.resumed(state.global_step)

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the hook's epoch, by which samples are ordered; its number follows from the steps made, also when resumed."""
        self._trainer.hook.set_epoch(state.global_step // self._trainer._updates(kwargs["train_dataloader"]))

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        """Write telemetry that is still buffered."""
        self._trainer.hook.close()
