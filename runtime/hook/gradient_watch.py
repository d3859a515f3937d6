"""Warns once when gradients are NaN or infinite, which DDP's average spreads to all ranks. Start at :func:`watch_gradients`.

Reading every gradient before every update would be too slow. So about a thousand values of each of two parameters are
read: of the first parameter, at which the backward pass ends, and of another one, which changes from update to update.
A loss that is not finite makes both not finite. Only if one of them is not finite are all gradients read, and one line
is logged. On CUDA, where reading a value waits for the device, this is done once in 50 updates. Training goes on in any
case.
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
"""Number of values of a gradient that are read."""
STEPS_ON_CUDA = 50
"""On CUDA gradients are read once in this many updates."""


def watch_gradients(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Log a warning, once, when gradients of ``model`` are not finite at the start of an update of ``optimizer``.

    It registers hooks on both. Rank 0 and a rank whose own samples are the cause log; others do not.
    """
    trained = [(name.removeprefix("module."), value) for name, value in model.named_parameters() if value.requires_grad]
    if trained:
        watch = _GradientWatch(trained, rank)
        # A backward pass ends there, so what was not finite before shows in its gradient.
        _, first_parameter = trained[0]
        first_parameter.register_hook(watch.note_own)
        optimizer.register_step_pre_hook(watch)


class _GradientWatch:
    """Reads some gradients before each update.

    The optimizer holds this object through a hook, so it holds the parameters only by weak references.
    """

    def __init__(self, trained: list[tuple[str, nn.Parameter]], rank: int) -> None:
        """Watch the ``trained`` parameters, given as (name, parameter) in the model's order; ``rank``: this process's."""
        self._trained = [(name, weakref.ref(value)) for name, value in trained]
        self._rank = rank
        self._updates = 0
        self._has_warned = False
        self._own_sum: Tensor | None = None
        """A sum over this rank's own gradients of the first parameter, before any average; None: unknown."""

    def note_own(self, gradient: Tensor) -> None:
        """Add a gradient of the first parameter to this rank's own sum, before DDP averages it: the gradient's hook."""
        if not self._has_warned:
            partial_sum = _sum_of_some(gradient.detach())
            self._own_sum = partial_sum if self._own_sum is None else self._own_sum + partial_sum

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Warn, once, if an update begins with gradients that are not finite: the optimizer's pre-step hook."""
        update = self._updates
        own_sum = self._own_sum
        self._updates = update + 1
        self._own_sum = None
        # A GradScaler sets found_inf on a fused optimizer, which then skips such an update by itself.
        if self._has_warned or getattr(optimizer, "found_inf", None) is not None:
            return
        if self._looks_finite(update):
            return
        gradients = [(name, self._gradient(index)) for index, (name, _) in enumerate(self._trained)]
        spoiled = [name for name, gradient in gradients if gradient is not None and not gradient.isfinite().all()]
        if not spoiled:
            return  # only the sum of finite values has overflowed
        self._has_warned = True
        is_own_fault = own_sum is not None and not math.isfinite(float(own_sum))
        if is_own_fault or self._rank == 0:  # the other ranks got it by the average, and need not repeat the line
            where = ""
            if own_sum is not None:
                where = " by this rank's own samples" if is_own_fault else " by another rank's samples"
            log.warning(
                "rank %d, step %d: gradients are not finite%s, in %d of %d parameters, first %s; training goes on with them",
                self._rank,
                update,
                where,
                len(spoiled),
                len(gradients),
                spoiled[0],
            )

    def _looks_finite(self, update: int) -> bool:
        """Return whether a few values of two gradients are finite, before update number ``update``, from 0.

        True also on CUDA in an update in which nothing is read, because reading waits for the device.
        """
        indices = {0, self._updates % len(self._trained)}  # the first parameter, and another one in each update
        gradients = [gradient for index in indices if (gradient := self._gradient(index)) is not None]
        if any(gradient.is_cuda for gradient in gradients) and update % STEPS_ON_CUDA:
            return True
        block = update // len(self._trained)  # other values of a gradient each time that all parameters had their turn
        return all(math.isfinite(float(_sum_of_some(gradient, block))) for gradient in gradients)

    def _gradient(self, index: int) -> Tensor | None:
        """Return the values of the gradient of parameter number ``index`` that this rank holds; None without a gradient.

        Of a sharded gradient that is the rank's shard, of a sparse one its stored values.
        """
        _, reference = self._trained[index]
        parameter = reference()
        gradient = None if parameter is None else parameter.grad
        if gradient is None:
            return None
        local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        return local.coalesce().values() if local.is_sparse else local


def _sum_of_some(gradient: Tensor, block: int = 0) -> Tensor:
    """Return the sum of about a thousand values of a gradient, a tensor of shape () on the gradient's device.

    If one of the values is not finite, neither is the sum, which takes a single operation. ``block``: which block of
    values is read, from 0; numbers beyond the last block begin again at the first.
    """
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()
    if gradient.numel() <= SAMPLE:
        return gradient.sum()
    if not gradient.is_contiguous():  # flattening would copy all of it, so one index of dimension 0 is read
        return gradient[block % len(gradient)].sum()
    block_count = -(-gradient.numel() // SAMPLE)  # rounded up
    begin = block % block_count * SAMPLE
    return gradient.view(-1)[begin : begin + SAMPLE].sum()
