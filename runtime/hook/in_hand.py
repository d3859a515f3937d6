"""Which batch is being trained on, and what share of all ranks' samples it is. Start at :meth:`InHand.share`.

Loaders say what they hand out (:meth:`InHand.draw`), and backward passes use it up. Loops may fetch ahead, leave batches out,
train on those of two loaders together, and evaluate on a third one in between.
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
            found = value.shape[0] if value.dim() > 0 else None
        elif isinstance(value, Mapping):
            found = leading_size(value.values())
        else:
            found = leading_size(value) if isinstance(value, (list, tuple)) else None
        if found is not None:
            return found
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
    """A batch that the training loop has; ``taken``: of a sampler, None of a stream; ``aside``: for an evaluation."""

    def __init__(self, drawn: Pass | Share, aside: bool) -> None:
        self.used, self.aside = False, aside
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


class InHand:
    """The batches that the training loop has.

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
        self._used_in = -1
        self._tally: tuple[int, float] = (0, 0.0)

    def follow(self, source: Hashable, *, loose: bool = False) -> None:
        """Take the shares of what a sampler or a stream gives; ``loose``: to a loader that does not :meth:`draw` it."""
        self._drawn = {
            each: drawn for each, drawn in self._drawn.items() if drawn
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
        """Forget the batches of a loader that went into gradients, or all of them."""
        drawn = self._drawn.get(source, deque())
        while drawn and (unused or drawn[0].used):
            drawn.popleft()

    def end(self, source: Hashable) -> None:
        """A loader has no more batches; a loop that fetched ahead has the last ones still to use, but no evaluation has."""
        drawn = self._drawn.get(source, deque())
        self.drop(source, unused=any(each.aside for each in drawn))

    def turn_to_next(self, skip: int = 0) -> None:
        """Let the batch in hand be the oldest that was not yet, until the next call; before it ``skip`` are left out.

        For loops that fetch batches ahead and say when each one's turn is. Does nothing with more than one loader.
        """
        self._fill()
        if len(drawn := [each for each in self._drawn.values() if each]) != 1:
            self._held = None
            return
        for _ in range(skip + (drawn[0][0] is self._held)):
            drawn[0].popleft()
        self._held = drawn[0][0] if drawn[0] else None

    def last_used(self, sampler: VariableBatchSampler) -> Pass | None:
        """Return the last batch that went into gradients, of those that the training loop still has; None: none."""
        return next((each.taken for each in reversed(self._drawn.get(sampler, ())) if each.used and each.taken), None)

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

    def share(self, number: int, name: str) -> Share | None:
        """Return the share of the batch that backward pass ``number`` is for; None where no loader of ours has given one.

        There can be several batches; mostly they are alike. Where they are not the size of the forward pass tells. Raises
        InputError where it does not; ``name`` is what the script calls us.
        """
        fitting = batches = self._batches()
        if not batches:
            return None
        if len({each.share for each in batches}) > 1:
            sizes = {*self.told, *self.passed}
            fitting = [each for each in batches if each.share.samples in sizes]
        if len({each.share for each in fitting}) != 1:
            remedy = f"say which it is: {name}.loss(loss, count=samples)"
            raise InputError("backward", "the script has batches of several steps in hand, of different shares", remedy)
        self._use(number, fitting)
        return fitting[0].share

    def use(self, number: int) -> None:
        """Note that backward pass ``number`` uses what there is, whose share the script has said."""
        if batches := self._batches():
            self._use(number, batches)

    def count(self, number: int, samples: int, total: int) -> None:
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
        """Return the batches of our loaders that the training loop has, or the one whose turn it is."""
        self._fill()
        if self._held is not None:
            return [self._held]
        batches = [each for drawn in self._drawn.values() for each in drawn]
        return [each for each in batches if not each.aside] or batches

    def _use(self, number: int, fitting: list[_Drawn]) -> None:
        """Note which batches go into gradients: of each loader the oldest new one that fits, and all before it."""
        if self._used_in == number:
            return  # another term of the same loss
        self._used_in = number
        for drawn in self._drawn.values():
            new = next((each for each in drawn if not each.used and each in fitting), None)
            if new is None:
                continue
            self._tally = (self._tally[0] + new.share.samples, self._tally[1] + new.share.total)
            for each in drawn:
                each.used = True
                if each is new:
                    break
