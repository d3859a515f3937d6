"""Tracks the batches that the training loop holds, to find how many samples a backward pass is for.

Start at :meth:`PendingBatches.share`. A *share* is the number of this rank's samples in a pass beside that of all ranks.
Loaders note each batch that they hand out (:meth:`PendingBatches.draw`). A backward pass marks the batches that its loss
was computed from as used; used batches are forgotten when their loader hands out the next one. So a loop may fetch
ahead, skip batches, train on batches of two loaders together, and evaluate on a third one in between.
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
"""Most batches of a loader, and sizes of forward passes, that are kept, so that a loop without backward fills no memory."""


def leading_size(values: Sequence[Any]) -> int | None:
    """Return the size of dimension 0 of the first tensor in ``values``, nested ones included, that has one; None without any.

    >>> leading_size([torch.tensor(2.0), {"pixels": torch.zeros(8, 3)}])
    8
    """
    return next((tensor.shape[0] for tensor in nested_tensors(values) if tensor.dim()), None)


@dataclass(eq=False, slots=True)
class _Drawn:
    """A batch that a loader has handed to the training loop."""

    share: Share
    """The number of its samples on this rank and on all ranks together."""
    sampler_pass: Pass | None
    """The sampler's pass that the batch is for; None for a batch of a stream."""
    for_evaluation: bool
    """Whether it was handed out under ``no_grad``, or while the model was in evaluation mode."""
    used: bool = False
    """Whether a backward pass has used it."""


class PendingBatches:
    """The batches that loaders have handed to the training loop and that are not forgotten yet."""

    def __init__(self) -> None:
        self.missing: str | None = None
        """In words, what the script must do before batches may be handed out; None: nothing."""
        self.trains: Callable[[], bool] = lambda: True
        """Returns whether the model is in training mode."""
        self.unannounced: weakref.WeakSet[VariableBatchSampler] = weakref.WeakSet()
        """Samplers whose loaders do not call :meth:`draw`; the passes that they have issued are looked up when needed."""
        self.announced_sizes: list[int] = []
        """Samples, as the script has announced them, of forward passes since the last backward pass."""
        self.input_sizes: list[int] = []
        """Dimension 0 of the inputs of the other forward passes since the last backward pass."""
        self._drawn: dict[Hashable, deque[_Drawn]] = {}  # by loader, oldest first
        self._chosen: _Drawn | None = None  # the batch that `turn_to_next` has chosen; None: none
        self._announced: int | None = None  # samples of the next forward pass, if the script has announced them
        self._used_in: Hashable = None  # number of the backward pass whose samples were counted last
        self._tally: tuple[int, float] = (0, 0.0)  # samples of this rank and of all since `take_tally`

    # Calls of loaders.

    def draw(self, source: Hashable, drawn: Pass | Share) -> None:
        """Note that the loader ``source`` hands a batch to the training loop, and forget its oldest batches that were used.

        ``source``: the key of the loader's batches, which is its sampler or the loader itself. ``drawn``: the sampler's
        pass that the batch is for, or for a stream the numbers of samples of this rank and of all. Raises InputError if
        the hook has no model yet (:attr:`missing`).
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
        """Forget the oldest batches of the loader ``source`` that were used, or with ``everything`` all of its batches."""
        batches = self._drawn.get(source, ())
        while batches and (everything or batches[0].used):
            batches.popleft()

    def end(self, source: Hashable) -> None:
        """Note that the loader ``source`` has no more batches.

        Unused ones stay for a loop that has fetched ahead; if some were for evaluation, all are forgotten.
        """
        self.drop(source, everything=any(batch.for_evaluation for batch in self._drawn.get(source, ())))

    # Calls of the script.

    def turn_to_next(self, skip: int = 0) -> None:
        """Choose the batch that the following backward passes are for: the next one, after ``skip`` ones that are dropped.

        For loops that fetch batches ahead and say when each one's turn comes. The batch that the last call chose is
        dropped. If no loader or several have batches, none is chosen, and :meth:`share` finds the batch.
        """
        self._fill()  # so that the batches of loaders that do not call `draw` count, too
        non_empty = [(source, batches) for source, batches in self._drawn.items() if batches]
        if len(non_empty) != 1:
            self._chosen = None
            return
        [(source, batches)] = non_empty
        finished_count = 1 if batches[0] is self._chosen else 0  # the batch that the last call chose is done with
        remaining = len(batches) - finished_count - skip
        if skip and isinstance(source, VariableBatchSampler):
            # Of very many skipped batches only the latest are in `batches`. So those that remain are counted from the start
            # of the sampler's iteration, which begins with the skipped ones.
            drawn_count = source.issued_count - len(source.issued)  # by the loop, of those that the sampler has issued
            remaining = drawn_count - skip
        while len(batches) > max(remaining, 0):
            batches.popleft()
        self._chosen = batches[0] if batches else None

    def announce(self, samples: int) -> None:
        """Note that the next forward pass is for ``samples`` samples. Raises InputError for a negative number."""
        if samples < 0:
            raise InputError("count_samples", f"is {samples}", "give the number of samples, 0 or more")
        self._announced = samples

    def begin_forward(self, values: Sequence[Any]) -> None:
        """Note how many samples a forward pass with gradients is for.

        It is the number that the script has announced, or else dimension 0 of the first tensor in the inputs ``values``.
        """
        if self._announced is not None:
            self.announced_sizes.append(self._announced)
            self._announced = None
        elif (size := leading_size(values)) is not None and len(self.input_sizes) < _MOST_HELD:
            self.input_sizes.append(size)

    def end_backward(self) -> None:
        """Forget the sizes of forward passes: those that follow belong to another backward pass."""
        self.input_sizes = []
        self.announced_sizes = []

    # Calls of the loss scaler.

    @property
    def is_known(self) -> bool:
        """Whether the loop holds a batch of one of ddltool's loaders."""
        return bool(self._batches())

    def share(self, number: Hashable, name: str) -> Share | None:
        """Return this rank's and all ranks' samples in the batch of the backward pass ``number``; mark the batch as used.

        None if the loop holds no batch of ddltool's loaders. Of several batches with different shares, those are
        considered that have as many samples as a forward pass had; if their shares differ too, InputError is raised.

        Args:
            number: tells backward passes apart: the number of forward passes begun before it.
            name: the script's name for the object whose ``loss`` takes a count, for the message.
        """
        batches = self._batches()
        if not batches:
            return None
        fitting = batches
        if len({batch.share for batch in batches}) > 1:  # equal shares need not be told apart
            sizes = {*self.announced_sizes, *self.input_sizes}
            fitting = [batch for batch in batches if batch.share.samples in sizes]
            if len({batch.share for batch in fitting}) != 1:
                remedy = f"say which it is: {name}.loss(loss, count=samples)"
                problem = "the script has batches of several steps in hand, of different shares"
                raise InputError("backward", problem, remedy)
        self._use(number, fitting)
        return fitting[0].share

    def use(self, number: Hashable) -> None:
        """Mark the batches that the loop holds as used by the backward pass ``number``, whose count the script has given."""
        self._use(number, self._batches())

    def count(self, number: Hashable, samples: int, total: float) -> None:
        """Add samples of this rank, and of all ranks (``total``), to the tally.

        ``number``: the backward pass. Only the first call for it counts, because each term of a loss makes a call.
        """
        if self._used_in != number:
            self._used_in = number
            samples_before, total_before = self._tally
            self._tally = (samples_before + samples, total_before + total)

    def take_tally(self) -> tuple[int, int]:
        """Return (this rank's samples, all ranks' samples) that backward passes have used since the last call."""
        samples, total = self._tally
        self._tally = (0, 0.0)
        return samples, round(total)

    def last_used(self, sampler: VariableBatchSampler) -> Pass | None:
        """Return the pass of the latest used batch of ``sampler`` that is not forgotten; None if there is none."""
        return next((batch.sampler_pass for batch in reversed(self._drawn.get(sampler, ())) if batch.used), None)

    def _fill(self) -> None:
        """Note the batches of loaders that do not call :meth:`draw` themselves, by the passes that samplers have issued."""
        for sampler in list(self.unannounced):
            while sampler.issued:
                self.draw(sampler, sampler.issued.popleft())

    def _batches(self) -> list[_Drawn]:
        """Return the batches that the next backward pass may be for.

        That is the batch that :meth:`turn_to_next` has chosen; without one, those handed out for training; without any
        of these, all, because a loop may have drawn its batch under ``no_grad``.
        """
        self._fill()
        if self._chosen is not None:
            return [self._chosen]
        batches = [batch for drawn in self._drawn.values() for batch in drawn]
        return [batch for batch in batches if not batch.for_evaluation] or batches

    def _use(self, number: Hashable, fitting: list[_Drawn]) -> None:
        """For each loader, mark its oldest unused batch among ``fitting`` as used, and all of its batches before that one.

        The samples of those oldest batches are added to the tally. ``number``: the backward pass; a second call for the
        same one does nothing.
        """
        if self._used_in == number or not fitting:
            return
        samples = 0
        total_samples = 0.0
        for drawn in self._drawn.values():
            trained = next((batch for batch in drawn if not batch.used and batch in fitting), None)
            if trained is None:
                continue
            samples += trained.share.samples
            total_samples += trained.share.total
            for batch in drawn:
                batch.used = True  # those before it were skipped by the loop
                if batch is trained:
                    break
        self.count(number, samples, total_samples)
