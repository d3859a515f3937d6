"""A hook inside a trainer that notes whether the script itself says what its losses are. Start at :class:`SaidLosses`."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ddltool.runtime.hook import Hook

log = logging.getLogger(__name__)


class SaidLosses:
    """A hook that notes whether the script's own code has said what its losses are, and leaves all else to ``hook``.

    Attributes:
        said: whether that was so in this step; a trainer begins each step with False.
    """

    def __init__(self, hook: Hook) -> None:
        self._hook, self.said = hook, False

    def __getattr__(self, name: str) -> Any:
        """Return the hook's own attribute for all that this class does not change."""
        return getattr(self._hook, name)

    def planned(self, loader: DataLoader[Any], *, accumulated: int | None, lengths: Any = None) -> DataLoader[Any]:
        """Return the loader with the planned batches, for a trainer whose update takes ``accumulated`` batches (None: one).

        Where the plan accumulates, these batches are its passes. Where it does not, each is a whole planned batch, and
        a line in the log says so.
        """
        if (accumulated or 1) > 1 and self._hook.passes == 1 and self._hook.local_batch_size is not None:
            if self._hook.rank == 0:
                log.warning("an update of the trainer has %d of the plan's batches", accumulated)
            return self._hook.planned(loader, lengths=lengths)
        return self._hook.planned(loader, accumulated=accumulated, lengths=lengths)

    def loss(self, loss: Tensor, **meaning: Any) -> Tensor:
        """Return ``loss`` weighed as by the hook's :meth:`~ddltool.runtime.hook.Hook.loss`, and note that the script
        has said it.

        For the script's own code. Without gradients, as in an evaluation, there is nothing to weigh, and the other
        ranks are not asked.
        """
        self.said = True
        return self._hook.loss(loss, **meaning) if torch.is_grad_enabled() else loss

    def weighed(self, loss: Tensor, **meaning: Any) -> Tensor:
        """Return the loss with which the trainer's backward pass begins.

        Where the script has called :meth:`loss` in this step, it is weighted already; else it is weighted by
        ``meaning``, the keyword arguments of the hook's ``loss``.
        """
        return loss if self.said else self._hook.loss(loss, **meaning)
