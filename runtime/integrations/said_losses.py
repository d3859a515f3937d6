"""Notes whether a script inside a trainer says itself what its losses are. Start at :class:`SaidLosses`."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ddltool.runtime.hook import Hook

log = logging.getLogger(__name__)


class SaidLosses:
    """A wrapper of ``hook`` that notes whether the script's own code has called :meth:`loss`.

    Attributes:
        said: whether it has in this step; the integration sets it to False at the start of each step.
    """

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self.said = False

    def __getattr__(self, name: str) -> Any:
        """Return the hook's attribute for every name that this class does not define."""
        return getattr(self._hook, name)

    def planned(self, loader: DataLoader[Any], *, accumulated: int | None, lengths: Any = None) -> DataLoader[Any]:
        """Return the loader with the planned batches, for a trainer whose update takes ``accumulated`` batches (None: one).

        If the plan accumulates, these batches are its passes, of which there must be equally many. If it does not, each
        is a whole planned batch, and rank 0 logs a warning if there are several.
        """
        if (accumulated or 1) > 1 and self._hook.passes == 1 and self._hook.local_batch_size is not None:
            if self._hook.rank == 0:
                log.warning("an update of the trainer has %d of the plan's batches", accumulated)
            return self._hook.planned(loader, lengths=lengths)
        return self._hook.planned(loader, accumulated=accumulated, lengths=lengths)

    def loss(self, loss: Tensor, **meaning: Any) -> Tensor:
        """Return ``loss`` weighted as by the hook's ``loss``, and note that the script has said what it is.

        For the script's own code; ``meaning``: ``count`` and ``reduction``. Without gradients, as in an evaluation,
        ``loss`` itself is returned, and no message is exchanged.
        """
        self.said = True
        return self._hook.loss(loss, **meaning) if torch.is_grad_enabled() else loss

    def weighed(self, loss: Tensor, **meaning: Any) -> Tensor:
        """Return the weighted loss for the trainer's backward pass.

        If the script has called :meth:`loss` in this step, that is ``loss`` itself; otherwise it is weighted by
        ``meaning``, the keyword arguments of the hook's ``loss``.
        """
        return loss if self.said else self._hook.loss(loss, **meaning)
