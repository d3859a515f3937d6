"""Which batches the training loop holds, and what share of all ranks' samples a backward pass is for.

Start at :meth:`PendingBatches.share`. Loaders note each batch that they hand out (:meth:`PendingBatches.draw`), backward passes
mark those that went into gradients as used, and used ones are forgotten when their loader hands out the next. So loops may
fetch ahead, leave batches out, train on those of two loaders together, and evaluate on a third one in between.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ddltool.errors import InputError
from ddltool.runtime.hook.batches import Pass, Sizes, VariableBatchSampler

if TYPE_CHECKING:
    from ddltool.runtime.hook.batches import Shares

_PASSES_KEPT = 4096


def leading_size(values: Iterable[Any]) -> int | None:
    """Return dim 0 of the first tensor that has one, looking into lists, tuples and mappings; None if there is none.

    >>> leading_size([torch.tensor(2.0), {"pixels": torch.zeros(8, 3)}])
    8
    """
    for value in values:
        if isinstance(value, Tensor):
            size = value.shape[0] if value.dim() > 0 else None
        elif isinstance(value, Mapping):
            size = leading_size(value.values())
        else:
            size = leading_size(value) if isinstance(value, (list, tuple)) else None
        if size is not None:
            return size
    return None


@dataclass(frozen=True, slots=True)
class Share:
    """What a rank has of the samples of a pass over all ranks."""

    samples: int
    total: float
    """Of all passes, over their number, where the loop divides by that."""
    even: bool
    """Whether all ranks have as many."""


class _Drawn:
    """A batch that a loader has handed out to the training loop.

    Attributes:
        taken: the pass of a sampler that it is; None for one of a stream.
        share: this rank's samples of it and those of all ranks.
        used: whether it went into gradients.
        for_evaluation: whether it was handed out without gradients, or to a model that does not train.
    """

    def __init__(self, drawn: Pass | Share, for_evaluation: bool) -> None:
        self.used, self.for_evaluation = False, for_evaluation
        self.taken = drawn if isinstance(drawn, Pass) else None
        if isinstance(drawn, Pass):
            passes = drawn.split.passes if isinstance(drawn.split, Sizes) else 1
            even = _is_even(drawn.split, drawn.step_samples)
            drawn = Share(drawn.samples, drawn.step_samples / passes, even)
        self.share = drawn


@lru_cache(maxsize=256)
def _is_even(split: Shares, samples: int) -> bool:
    """Whether all ranks have as many samples of such a step."""
    sizes = split.sizes_of(samples)
    return bool((sizes == sizes[0, 0]).all())


class PendingBatches:
    """The batches that the training loop has been given and that have not been left behind.

    Attributes:
        missing: what has to be known before batches may be handed out; None: nothing.
        trains: whether the model is in training mode; batches handed out otherwise, or without gradients, are for evaluation.
    """

    def __init__(self) -> None:
        self.missing: str | None = None
        self.trains: Callable[[], bool] = lambda: True
        self._loose: weakref.WeakKeyDictionary[VariableBatchSampler, None] = weakref.WeakKeyDictionary()
        self._drawn: dict[Hashable, deque[_Drawn]] = {}
        self._held: _Drawn | None = None
        self._announced: int | None = None
        self.told: list[int] = []
        """What the script said of the forward passes since the last backward pass."""
        self.passed: list[int] = []
        """The sizes that the others of them had."""
        self._used_in: Hashable = None
        self._tally: tuple[int, float] = (0, 0.0)

    def follow(self, source: Hashable, *, loose: bool = False) -> None:
        """Know of the batches of a sampler or a stream from now on.

        ``loose``: the sampler feeds a loader that does not call :meth:`draw`, so what it issues is looked up when it is needed.
        """
        self._drawn = {
            known: drawn for known, drawn in self._drawn.items() if drawn
        }  # loops may make loaders by the epoch
        if isinstance(source, VariableBatchSampler):
            self._loose.pop(source, None)
            if loose:
                self._loose[source] = None

    def draw(self, source: Hashable, drawn: Pass | Share) -> None:
        """Note that the training loop gets a batch; those that backward has used before are behind it now.

        Raises InputError where nobody has said yet what is trained.
        """
        if self.missing is not None:
            raise InputError("loader", "is used before the hook knows what is trained", self.missing)
        self.drop(source)
        batch = _Drawn(drawn, not (torch.is_grad_enabled() and self.trains()))
        self._drawn.setdefault(source, deque(maxlen=_PASSES_KEPT)).append(batch)

    def drop(self, source: Hashable, *, unused: bool = False) -> None:
        """Forget the batches of a loader that went into gradients; with ``unused`` all of its batches."""
        drawn = self._drawn.get(source, deque())
        while drawn and (unused or drawn[0].used):
            drawn.popleft()

    def end(self, source: Hashable) -> None:
        """Note that a loader has no more batches.

        Its last ones stay for a loop that fetched ahead and has yet to use them; those of an evaluation are forgotten.
        """
        drawn = self._drawn.get(source, deque())
        self.drop(source, unused=any(batch.for_evaluation for batch in drawn))

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

    def last_used(self, sampler: VariableBatchSampler) -> Pass | None:
        """Return the latest batch of a sampler that went into gradients and is not forgotten yet, None where there is none."""
        return next(
            (batch.taken for batch in reversed(self._drawn.get(sampler, ())) if batch.used and batch.taken), None
        )

    def announce(self, samples: int) -> None:
        """Let the next forward pass stand for ``samples`` samples. Raises InputError when negative."""
        if samples < 0:
            raise InputError("count_samples", f"is {samples}", "give the number of samples, 0 or more")
        self._announced = samples

    def begin_forward(self, values: Iterable[Any]) -> None:
        """A forward pass with gradients begins."""
        if self._announced is not None:
            self.told.append(self._announced)
            self._announced = None
        elif (size := leading_size(values)) is not None and len(self.passed) < _PASSES_KEPT:
            self.passed.append(size)

    def end_backward(self) -> None:
        """A backward pass is over: what comes now belongs to another one."""
        self.passed, self.told = [], []

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
            raise InputError("backward", "the script has batches of several steps in hand, of different shares", remedy)
        self._use(number, fitting)
        return fitting[0].share

    def use(self, number: Hashable) -> None:
        """Note that backward pass ``number`` uses what there is, whose share the script has said."""
        if batches := self._batches():
            self._use(number, batches)

    def count(self, number: Hashable, samples: int, total: int) -> None:
        """Note that backward pass ``number`` is for so many samples, of a loader of the script's own."""
        if self._used_in != number:
            self._used_in = number
            self._tally = (self._tally[0] + samples, self._tally[1] + total)

    def take_tally(self) -> tuple[int, int]:
        """Return this rank's and all ranks' samples that went into gradients since the last call."""
        (samples, total), self._tally = self._tally, (0, 0.0)
        return samples, round(total)

    def _fill(self) -> None:
        for sampler in list(self._loose):
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
        if self._used_in == number:
            return  # another term of the same loss
        self._used_in = number
        for drawn in self._drawn.values():
            newest = next((batch for batch in drawn if not batch.used and batch in fitting), None)
            if newest is None:
                continue
            self._tally = (self._tally[0] + newest.share.samples, self._tally[1] + newest.share.total)
            for batch in drawn:
                batch.used = True
                if batch is newest:
                    break
