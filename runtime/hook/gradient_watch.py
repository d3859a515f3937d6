"""Warns once when gradients are NaN or infinite, which DDP's average spreads to all ranks. Start at :func:`watch_gradients`.

Looking at every gradient before every update would be too slow. So about a thousand values of two parameters are looked
at: of the first parameter, at which the backward pass ends, and of another one, which changes from update to update. A
loss that is not finite spoils both. Only when one of them is not finite are all gradients read, and one line is logged.
On CUDA, where reading a value waits for the device, this happens once in 50 updates. Training goes on: whether it
should is for the script to decide.
"""

from __future__ import annotations

import logging
import math
import weakref
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)
SAMPLE = 1024
"""Values of a gradient that are looked at."""
STEPS_ON_CUDA = 50
"""On CUDA gradients are looked at once in so many updates."""


def watch_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Log one warning when the gradients of ``model`` are not finite at the beginning of an update of ``optimizer``."""
    trained = [(name.removeprefix("module."), value) for name, value in model.named_parameters() if value.requires_grad]
    if trained:
        watch = _GradientWatch(trained, rank)
        _, first_parameter = trained[0]  # at which a backward pass ends: whatever was not finite before shows there
        first_parameter.register_hook(watch.note_own)
        optimizer.register_step_pre_hook(watch)


class _GradientWatch:
    """Looks at gradients before updates. The optimizer holds this object, so it refers to the parameters only weakly."""

    def __init__(self, trained: list[tuple[str, nn.Parameter]], rank: int) -> None:
        """Watch the ``trained`` parameters, given as (name, parameter) in the model's order."""
        self._trained = [(name, weakref.ref(value)) for name, value in trained]
        self._rank, self._updates, self._told = rank, 0, False
        self._own: Tensor | None = None
        """A sum over this rank's own gradients of the first parameter, before any average; None: unknown."""

    def note_own(self, gradient: Tensor) -> None:
        """Add a gradient of the first parameter to this rank's own sum, before DDP averages it: the hook of that gradient."""
        if not self._told:
            partial_sum = _sum_of_some(gradient.detach())
            self._own = partial_sum if self._own is None else self._own + partial_sum

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Warn, once, when an update begins with gradients that are not finite: the optimizer's pre-step hook.

        A fused optimizer that gets ``found_inf`` from a GradScaler is left alone: it skips such an update by itself.
        """
        update, own_gradients = self._updates, self._own
        self._updates, self._own = update + 1, None
        # A GradScaler that leaves the check to a fused optimizer sets found_inf: that one skips such an update by itself.
        if self._told or getattr(optimizer, "found_inf", None) is not None:
            return
        looked_at = {0, self._updates % len(self._trained)}
        gradients_looked_at = [gradient for place in looked_at if (gradient := self._gradient(place)) is not None]
        if any(gradient.is_cuda for gradient in gradients_looked_at) and update % STEPS_ON_CUDA:
            return
        turn = update // len(self._trained)
        if all(math.isfinite(float(_sum_of_some(gradient, turn))) for gradient in gradients_looked_at):
            return
        gradients = [(name, self._gradient(place)) for place, (name, _) in enumerate(self._trained)]
        spoiled = [name for name, gradient in gradients if gradient is not None and not gradient.isfinite().all()]
        if not spoiled:
            return  # only the sum has overflown
        self._told = True
        is_own_fault = own_gradients is not None and not math.isfinite(float(own_gradients))
        if is_own_fault or self._rank == 0:  # the others have it by the average, and who made it says so
            where = ""
            if own_gradients is not None:
                where = " by this rank's own samples" if is_own_fault else " by another rank's samples"
            log.warning(
                "rank %d, step %d: gradients are not finite%s, in %d of %d parameters, first %s; training goes on with them",
                *(self._rank, update, where, len(spoiled), len(gradients), spoiled[0]),
            )

    def _gradient(self, place: int) -> Tensor | None:
        """Return the values of a parameter's gradient that this rank holds, None where it has no gradient.

        ``place``: the parameter's index. Of a sharded gradient these are the rank's shard, of a sparse one its stored
        values.
        """
        parameter = self._trained[place][1]()
        gradient = None if parameter is None else parameter.grad
        if gradient is None:
            return None
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        return local.coalesce().values() if local.is_sparse else local


def _sum_of_some(gradient: Tensor, turn: int = 0) -> Tensor:
    """Return the sum of about a thousand values of a gradient, a tensor of shape () on the gradient's device.

    Which values these are changes with ``turn``. The sum is not finite where one of them is not, so one operation
    tells.
    """
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    if gradient.numel() <= SAMPLE:
        return gradient.sum()
    if not gradient.is_contiguous():  # a flat view would copy it
        return gradient[turn % len(gradient)].sum()
    parts = -(-gradient.numel() // SAMPLE)  # rounded up
    begin = turn % parts * SAMPLE
    return gradient.view(-1)[begin : begin + SAMPLE].sum()
