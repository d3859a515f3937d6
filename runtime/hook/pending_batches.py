"""Which batches the training loop holds, and what share of all ranks' samples a backward pass is for.

Start at :meth:`PendingBatches.share`. Loaders note each batch that they hand out (:meth:`PendingBatches.draw`), backward passes
mark those that went into gradients as used, and used ones are forgotten when their loader hands out the next. So loops may
fetch ahead, leave batches out, train on those of two loaders together, and evaluate on a third one in between.
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


def leading_size(values: Sequence[Any]) -> int | None:
    """Return dim 0 of the first tensor that has one, looking into what holds some; None if there is none.

    >>> leading_size([torch.tensor(2.0), {"pixels": torch.zeros(8, 3)}])
    8
    """
    return next((tensor.shape[0] for tensor in nested_tensors(values) if tensor.dim()), None)


@dataclass(eq=False, slots=True)
class _Drawn:
    """A batch that the training loop was given."""

    share: Share
    taken: Pass | None
    """The pass of a sampler that it is; None for one of a stream."""
    for_evaluation: bool
    """Whether it was handed out without gradients, or to a model that does not train."""
    used: bool = False
    """Whether it went into gradients."""


class PendingBatches:
    """The batches that the training loop has been given and that have not been left behind."""

    def __init__(self) -> None:
        self.missing: str | None = None
        """What has to be known before batches may be handed out; None: nothing."""
        self.trains: Callable[[], bool] = lambda: True
        """Whether the model is in training mode; batches handed out otherwise, or without gradients, are for evaluation."""
        self.loose: weakref.WeakSet[VariableBatchSampler] = weakref.WeakSet()
        """Samplers whose loaders do not call :meth:`draw`: what they have issued is looked up when it is needed."""
        self.told: list[int] = []
        """What the script said of the forward passes since the last backward pass."""
        self.passed: list[int] = []
        """The sizes that the others of them had."""
        self._drawn: dict[Hashable, deque[_Drawn]] = {}
        self._held: _Drawn | None = None
        self._announced: int | None = None
        self._used_in: Hashable = None
        self._tally: tuple[int, float] = (0, 0.0)

    # What loaders tell.

    def draw(self, source: Hashable, drawn: Pass | Share) -> None:
        """Note that the training loop gets a batch; those that backward has used before are behind it now.

        Raises InputError where nobody has said yet what is trained.
        """
        if self.missing is not None:
            raise InputError("loader", "is used before the hook knows what is trained", self.missing)
        self.drop(source)
        if source not in self._drawn:  # loops may make loaders by the epoch
            self._drawn = {known: batches for known, batches in self._drawn.items() if batches}
            self._drawn[source] = deque(maxlen=_MOST_HELD)
        share, taken = (drawn.share, drawn) if isinstance(drawn, Pass) else (drawn, None)
        self._drawn[source].append(_Drawn(share, taken, not (torch.is_grad_enabled() and self.trains())))

    def drop(self, source: Hashable, *, unused: bool = False) -> None:
        """Forget the batches of a loader that went into gradients; with ``unused`` all of its batches."""
        batches = self._drawn.get(source, ())
        while batches and (unused or batches[0].used):
            batches.popleft()

    def end(self, source: Hashable) -> None:
        """Note that a loader has no more batches.

        Its last ones stay for a loop that fetched ahead and has yet to use them; those of an evaluation are forgotten.
        """
        self.drop(source, unused=any(batch.for_evaluation for batch in self._drawn.get(source, ())))

    # What the script tells.

    def turn_to_next(self, skip: int = 0) -> None:
        """Take it that backward passes are for the next batch, until the next call; ``skip`` batches before it are left out.

        For loops that fetch batches ahead and say when it is each one's turn. Does nothing with more than one loader.
        """
        self._fill()
        if len(sources := [batches for batches in self._drawn.values() if batches]) != 1:
            self._held = None
            return
        for _ in range(skip + (sources[0][0] is self._held)):
            sources[0].popleft()
        self._held = sources[0][0] if sources[0] else None

    def announce(self, samples: int) -> None:
        """Let the next forward pass stand for ``samples`` samples. Raises InputError when negative."""
        if samples < 0:
            raise InputError("count_samples", f"is {samples}", "give the number of samples, 0 or more")
        self._announced = samples

    def begin_forward(self, values: Sequence[Any]) -> None:
        """A forward pass with gradients begins."""
        if self._announced is not None:
            self.told.append(self._announced)
            self._announced = None
        elif (size := leading_size(values)) is not None and len(self.passed) < _MOST_HELD:
            self.passed.append(size)

    def end_backward(self) -> None:
        """A backward pass is over: what comes now belongs to another one."""
        self.passed, self.told = [], []

    # What is asked.

    @property
    def is_known(self) -> bool:
        """Whether a loader of ours has given the batch in hand."""
        return bool(self._batches())

    def share(self, number: Hashable, name: str) -> Share | None:
        """Return the share of the batch that backward pass ``number`` is for; None where no loader of ours has given one.

        The loop may hold several batches. Mostly their shares are equal; where they are not, those count that have as many
        samples as the forward pass had. Raises InputError where these still differ; ``name`` is what the script calls the
        object on which it can say the count.
        """
        fitting = batches = self._batches()
        if not batches:
            return None
        if len({batch.share for batch in batches}) > 1:
            sizes = {*self.told, *self.passed}
            fitting = [batch for batch in batches if batch.share.samples in sizes]
            if len({batch.share for batch in fitting}) != 1:
                remedy = f"say which it is: {name}.loss(loss, count=samples)"
                raise InputError(
                    "backward", "the script has batches of several steps in hand, of different shares", remedy
                )
        self._use(number, fitting)
        return fitting[0].share

    def use(self, number: Hashable) -> None:
        """Note that backward pass ``number`` uses what there is, whose share the script has said."""
        self._use(number, self._batches())

    def count(self, number: Hashable, samples: int, total: float) -> None:
        """Note that backward pass ``number`` is for so many samples; once for all terms of a loss."""
        if self._used_in != number:
            self._used_in = number
            self._tally = (self._tally[0] + samples, self._tally[1] + total)

    def take_tally(self) -> tuple[int, int]:
        """Return this rank's and all ranks' samples that went into gradients since the last call."""
        (samples, total), self._tally = self._tally, (0, 0.0)
        return samples, round(total)

    def last_used(self, sampler: VariableBatchSampler) -> Pass | None:
        """Return the latest batch of a sampler that went into gradients and is not forgotten yet, None where there is none."""
        return next((batch.taken for batch in reversed(self._drawn.get(sampler, ())) if batch.used), None)

    def _fill(self) -> None:
        for sampler in list(self.loose):
            while sampler.issued:
                self.draw(sampler, sampler.issued.popleft())

    def _batches(self) -> list[_Drawn]:
        """Return the batch whose turn it is, where the loop says so, else those held to train on, or all held."""
        self._fill()
        if self._held is not None:
            return [self._held]
        batches = [batch for drawn in self._drawn.values() for batch in drawn]
        return [batch for batch in batches if not batch.for_evaluation] or batches

    def _use(self, number: Hashable, fitting: list[_Drawn]) -> None:
        """Mark as used, of each loader, the oldest unused batch among ``fitting`` and all batches before it."""
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
