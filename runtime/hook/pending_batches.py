"""Which batches the training loop holds, and what share of all ranks' samples a backward pass is for.

Start at :meth:`PendingBatches.share`. Loaders note each batch that they hand out (:meth:`PendingBatches.draw`). A
backward pass marks the batches behind its gradients as used, and used batches are forgotten when their loader hands out
the next one. So a loop may fetch ahead, leave batches out, train on batches of two loaders together, and evaluate on a
third one in between.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ddltool.errors import InputError
from ddltool.runtime.hook.claims import nested_tensors
from ddltool.runtime.processes.batches import Pass, Share, VariableBatchSampler

_MOST_HELD = 4096
"""Batches of a loader, and sizes of forward passes, that are kept: a loop that never calls backward must not fill memory."""


def leading_size(values: Sequence[Any]) -> int | None:
    """Return the size of dimension 0 of the first tensor in ``values`` that has one, nested ones included; None without any.

    >>> leading_size([torch.tensor(2.0), {"pixels": torch.zeros(8, 3)}])
    8
    """
    return next((tensor.shape[0] for tensor in nested_tensors(values) if tensor.dim()), None)


@dataclass(eq=False, slots=True)
class _Drawn:
    """A batch that a loader has handed to the training loop."""

    share: Share
    sampler_pass: Pass | None
    """The sampler's pass that the batch is for; None for a batch of a stream."""
    for_evaluation: bool
    """Whether it was handed out without gradients, or to a model that does not train."""
    used: bool = False
    """Whether it went into gradients."""


class PendingBatches:
    """The batches that the training loop has been given and that are not forgotten yet."""

    def __init__(self) -> None:
        self.missing: str | None = None
        """What the script still has to do before batches may be handed out, in words; None: nothing."""
        self.trains: Callable[[], bool] = lambda: True
        """Whether the model is in training mode; batches handed out otherwise, or without gradients, are for evaluation."""
        self.unannounced: weakref.WeakSet[VariableBatchSampler] = weakref.WeakSet()
        """Samplers whose loaders do not call :meth:`draw`: what they have issued is looked up when it is needed."""
        self.told: list[int] = []
        """Samples of the forward passes since the last backward pass, where the script announced them."""
        self.passed: list[int] = []
        """Dimension 0 of the inputs of the other forward passes since the last backward pass."""
        self._drawn: dict[Hashable, deque[_Drawn]] = {}
        self._held: _Drawn | None = None  # the batch whose turn it is, where the loop says so
        self._announced: int | None = None  # samples of the next forward pass, where the script says so
        self._used_in: Hashable = None  # the backward pass whose samples were counted last
        self._tally: tuple[int, float] = (0, 0.0)  # samples of this rank and of all, since they were taken last

    # What loaders tell.

    def draw(self, source: Hashable, drawn: Pass | Share) -> None:
        """Note that the loader ``source`` hands a batch to the training loop, and forget its batches that went into gradients.

        ``drawn``: the sampler's pass that the batch is for, or for a stream its share of the step's samples. Raises
        InputError where the script has not said yet what is trained.
        """
        if self.missing is not None:
            raise InputError("loader", "is used before the hook knows what is trained", self.missing)
        self.drop(source)
        if source not in self._drawn:  # loops may make loaders by the epoch
            self._drawn = {known: batches for known, batches in self._drawn.items() if batches}
            self._drawn[source] = deque(maxlen=_MOST_HELD)
        share, sampler_pass = (drawn.share, drawn) if isinstance(drawn, Pass) else (drawn, None)
        for_evaluation = not (torch.is_grad_enabled() and self.trains())
        self._drawn[source].append(_Drawn(share, sampler_pass, for_evaluation))

    def drop(self, source: Hashable, *, everything: bool = False) -> None:
        """Forget the batches of the loader ``source`` that went into gradients, up to the first that did not.

        With ``everything``, forget all of them.
        """
        batches = self._drawn.get(source, ())
        while batches and (everything or batches[0].used):
            batches.popleft()

    def end(self, source: Hashable) -> None:
        """Note that the loader ``source`` has no more batches.

        Its last ones stay for a loop that fetched ahead and has yet to use them; those of an evaluation are forgotten.
        """
        self.drop(source, everything=any(batch.for_evaluation for batch in self._drawn.get(source, ())))

    # What the script tells.

    def turn_to_next(self, skip: int = 0) -> None:
        """Let backward passes be for the next batch, until the next call; ``skip`` batches before it are left out.

        For loops that fetch batches ahead and say when it is each one's turn. Where several loaders have batches, which
        one is meant is left to :meth:`share`.
        """
        self._fill()
        if len(sources := [batches for batches in self._drawn.values() if batches]) != 1:
            self._held = None
            return
        [batches] = sources
        is_first_done = batches[0] is self._held  # its turn ends now
        for _ in range(skip + is_first_done):
            batches.popleft()
        self._held = batches[0] if batches else None

    def announce(self, samples: int) -> None:
        """Note that the script says how many samples the next forward pass is for. Raises InputError for a negative number."""
        if samples < 0:
            raise InputError("count_samples", f"is {samples}", "give the number of samples, 0 or more")
        self._announced = samples

    def begin_forward(self, values: Sequence[Any]) -> None:
        """Note how many samples a forward pass with gradients is for.

        It is the number that the script has announced, else dimension 0 of the first tensor in the inputs ``values``.
        """
        if self._announced is not None:
            self.told.append(self._announced)
            self._announced = None
        elif (size := leading_size(values)) is not None and len(self.passed) < _MOST_HELD:
            self.passed.append(size)

    def end_backward(self) -> None:
        """Forget the forward passes of a backward pass that is over: what comes now belongs to another one."""
        self.passed, self.told = [], []

    # What is asked.

    @property
    def is_known(self) -> bool:
        """Whether one of ddltool's loaders has handed out the batch in hand."""
        return bool(self._batches())

    def share(self, number: Hashable, name: str) -> Share | None:
        """Return the share of the batch that the backward pass ``number`` is for, and mark the batch as used.

        None where none of ddltool's loaders has handed it out. Of several batches with different shares, those count
        that have as many samples as the forward pass had. Raises InputError where these differ too; ``name`` is what
        the script calls the object on which it can say the count.
        """
        fitting = batches = self._batches()
        if not batches:
            return None
        if len({batch.share for batch in batches}) > 1:
            sizes = {*self.told, *self.passed}
            fitting = [batch for batch in batches if batch.share.samples in sizes]
            if len({batch.share for batch in fitting}) != 1:
                remedy = f"say which it is: {name}.loss(loss, count=samples)"
                problem = "the script has batches of several steps in hand, of different shares"
                raise InputError("backward", problem, remedy)
        self._use(number, fitting)
        return fitting[0].share

    def use(self, number: Hashable) -> None:
        """Mark the batches in hand as used by the backward pass ``number``, whose share the script has said itself."""
        self._use(number, self._batches())

    def count(self, number: Hashable, samples: int, total: float) -> None:
        """Add samples of this rank, and of all ranks (``total``), to the tally, once for all terms of one backward pass."""
        if self._used_in != number:
            self._used_in = number
            self._tally = (self._tally[0] + samples, self._tally[1] + total)

    def take_tally(self) -> tuple[int, int]:
        """Return (this rank's samples, all ranks' samples) that went into gradients since the last call."""
        (samples, total), self._tally = self._tally, (0, 0.0)
        return samples, round(total)

    def last_used(self, sampler: VariableBatchSampler) -> Pass | None:
        """Return the pass of a sampler's latest batch that went into gradients and is not forgotten yet, None without any."""
        return next((batch.sampler_pass for batch in reversed(self._drawn.get(sampler, ())) if batch.used), None)

    def _fill(self) -> None:
        """Note the batches that the script's own loaders have taken from a sampler: these loaders do not call :meth:`draw`."""
        for sampler in list(self.unannounced):
            while sampler.issued:
                self.draw(sampler, sampler.issued.popleft())

    def _batches(self) -> list[_Drawn]:
        """Return the batches that a backward pass now may be for.

        That is the batch whose turn it is, where the loop has said so; else the batches that were handed out for
        training; else all.
        """
        self._fill()
        if self._held is not None:
            return [self._held]
        batches = [batch for drawn in self._drawn.values() for batch in drawn]
        return [batch for batch in batches if not batch.for_evaluation] or batches

    def _use(self, number: Hashable, fitting: list[_Drawn]) -> None:
        """Mark as used, of each loader, the oldest unused batch that is among ``fitting`` and all batches before it."""
        if self._used_in == number or not fitting:
            return
        samples, total = 0, 0.0
        for drawn in self._drawn.values():
            newest = next((batch for batch in drawn if not batch.used and batch in fitting), None)
            if newest is None:
                continue
            samples, total = samples + newest.share.samples, total + newest.share.total
            for batch in drawn:
                batch.used = True
                if batch is newest:
                    break
        self.count(number, samples, total)
