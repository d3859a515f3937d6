"""Finds what a loss is a mean over, from its values on parts of a batch. Start at :class:`LossKinds`.

A loss that is a sum divided by a given number becomes a third if the number is tripled. If a batch is cut in two, its
loss is the mean of the two parts' losses, weighted by their samples if it is a mean over samples, and by their labels if
it is one over labels. A loss that compares all samples with each other (contrastive pairs) is neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple, Protocol

import torch
from accelerate.utils import find_batch_size, recursively_apply  # type: ignore[import-untyped]
from torch import Tensor

from ddltool.errors import InputError
from ddltool.runtime.processes.job import DistributedJob

DIVIDED, SAMPLES, LABELS, SHIFTED = KINDS = ("divided", "samples", "labels", "shifted labels")
"""A sum divided by ``num_items_in_batch``; means over samples, over labels, and over all labels of a text but the first."""
SAID = "said"
"""The kind of a loss that the script itself has passed to ``hook.loss``."""
IGNORED = -100
"""The label that losses leave out."""
TOLERANCE, HALF_TOLERANCE = 1e-4, 2e-2
"""Relative differences that count as equal: for weights and activations of 32 bits or more, and of 16 bits."""
_ROUNDING = 1e-6
"""Relative difference of two predictions below which a float32 loss cannot tell them apart."""


class Loss(Protocol):
    """The interface of a function that computes losses, without gradients and dropout.

    Attributes:
        said: whether the script's own code has said what the last loss is.
        tolerance: relative difference up to which two losses count as equal.
    """

    said: bool
    tolerance: float

    def __call__(self, inputs: Any, items: Any, *, alone: bool = True) -> float:
        """Return the loss of the batch ``inputs``; it may change ``inputs``, but not the tensors in it.

        ``items``: the number by which the loss may be divided; ``alone``: compute it as if there were a single process.
        """


class LossKinds:
    """The kinds of loss that a training may have after the measurements so far; all ranks call :meth:`kind` together.

    Args:
        job: the ranks that measure.
        remedy: end of error messages: how a script says what its loss is.
    """

    def __init__(self, job: DistributedJob, remedy: str) -> None:
        self._job = job
        self._remedy = remedy
        self._kinds: list[str] = []  # those still possible after the losses measured so far; empty: none was measured

    def kind(self, loss: Loss, inputs: Any, items: Any) -> str:
        """Return the kind of a batch's loss: one of ``KINDS``, by which to weight it, or ``SAID`` if the script says it.

        The first call measures. Several kinds may fit, such as means over samples and over labels if all samples have
        equally many labels. As long as they give the same weights, which takes one small message per call, the first is
        returned; otherwise the loss is measured again.

        Args:
            loss: computes losses.
            inputs: the batch: tensors with rows of samples, and other arguments of the model.
            items: the number by which the loss may be divided; None: there is none.

        Raises InputError, on all ranks, if no kind fits, or if those that fit give different weights and this batch does
        not tell them apart.
        """
        measure = not self._kinds
        while measure or not self._weigh_alike(inputs):
            fitting = self._fitting(loss, inputs, items)
            if not measure and fitting == self._kinds:
                problem = f"may be a mean over {' or '.join(fitting)}, which its values do not tell"
                raise InputError("loss", problem, self._remedy)
            self._kinds = fitting
            measure = False
        return self._kinds[0]

    def _weigh_alike(self, inputs: Any) -> bool:
        """Return whether all kinds that are still possible weight this batch the same, on every rank.

        If they do, it does not matter yet which of them is right. A kind counts what its mean is over (samples or
        labels), and weights a rank by its share of the count. All ranks call this together.
        """
        if len(self._kinds) == 1:
            return True
        counts = counts_of(inputs)  # by kind, of each row of this rank's batch
        own_counts = [float(counts[kind].sum()) if kind in counts else 0.0 for kind in self._kinds]
        counts_by_rank = self._job.numbers(*own_counts)  # gathered from all ranks: of each, its counts by kind
        totals = [sum(of_ranks) for of_ranks in zip(*counts_by_rank, strict=True)]  # by kind
        # Compared with the first kind: count / total is equal where the products are, and these are exact.
        return all(
            rank_counts[0] * total == count * totals[0]
            for rank_counts in counts_by_rank
            for count, total in zip(rank_counts, totals, strict=True)
        )

    def _fitting(self, loss: Loss, inputs: Any, items: Any) -> list[str]:
        """Measure the loss, and return the kinds, among those still possible, that fit all ranks' batches.

        [SAID] if the script has said what the loss is, and [DIVIDED] if that fits. All ranks call this together, and
        get the same kinds. Raises InputError if none fits.
        """
        failed: list[str] = []

        def value(part: Any, number: Any, *, alone: bool = True) -> float:
            """Return the loss of a part of the batch, given ``number`` as its items; NaN if it cannot be computed."""
            try:
                return loss(copy(part), number, alone=alone)
            # A model may fail on a part of a batch, or have no loss in evaluation mode.
            except Exception as error:
                failed.append(f"{type(error).__name__}: {error}".splitlines()[0])
                return math.nan

        whole_loss = value(inputs, items, alone=False)
        if any(is_said for (is_said,) in self._job.numbers(float(loss.said))):
            return [SAID]
        verdicts = _verdicts(value, whole_loss, inputs, items, loss.tolerance)
        if failed:  # then only the first verdict, on a sum divided by a number, is reliable: it needs no parts
            verdicts = [verdicts[0], *(0.0 for _ in verdicts[1:])]
        verdicts_by_rank = self._job.numbers(*verdicts)
        verdicts_by_kind = dict(zip(KINDS, zip(*verdicts_by_rank, strict=True), strict=True))  # of all ranks
        # A kind fits if no rank's verdict is no (-1) and at least one's is yes (1), and earlier losses fitted it too.
        fitting = [
            kind
            for kind, of_ranks in verdicts_by_kind.items()
            if min(of_ranks) >= 0 and max(of_ranks) > 0 and (not self._kinds or kind in self._kinds)
        ]
        if fitting:
            return [DIVIDED] if DIVIDED in fitting else fitting
        problem = "is neither a sum divided by num_items_in_batch nor a mean over samples or labels"
        if failed:
            problem = f"cannot be measured on a part of the batch ({failed[0]})"
        elif any(min(of_ranks) == max(of_ranks) == 0 for of_ranks in verdicts_by_kind.values()):
            problem = "cannot be measured: it is 0 or not finite, or each rank has one sample"
        raise InputError("loss", problem, self._remedy)


def counts_of(inputs: Any) -> dict[str, Tensor]:
    """Return, by kind of mean, how many elements (samples or labels) each row of the batch adds to the mean.

    Each is a tensor (rows,) of float64. The kinds are samples; labels if ``inputs["labels"]`` are integers; and shifted
    labels if these are (rows, length). Empty for a batch without rows.
    """
    rows = find_batch_size(inputs)
    if not rows:
        return {}
    counts = {SAMPLES: torch.ones(rows, dtype=torch.float64)}
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if isinstance(labels, Tensor) and not labels.is_floating_point() and labels.dim() and len(labels) == rows:
        known = (labels != IGNORED).double().cpu()
        counts[LABELS] = known.reshape(rows, -1).sum(1)
        if labels.dim() == 2:
            counts[SHIFTED] = known[:, 1:].sum(1)
    return counts


class _Cut(NamedTuple):
    """A batch that was divided into two parts, and the losses of all three."""

    whole: float
    """Loss of the whole batch."""
    parts: tuple[float, float]
    """Losses of its two parts."""
    rows: tuple[Sequence[int], Sequence[int]]
    """Row indices of each part."""


def _verdicts(value: Any, whole: float, inputs: Any, items: Any, tolerance: float) -> list[float]:
    """Return for each of ``KINDS`` whether the loss on this rank is of that kind: 1 yes, -1 no, 0 unknown.

    The loss of the whole batch, and that of its two most different rows, are compared with sums and means of the losses
    of their parts. All are 0 if the whole loss is 0 or not finite.

    Args:
        value: ``value(part, number)`` returns the loss of a part of the batch.
        whole: the loss of the whole batch.
        inputs: the batch.
        items: the number by which the loss may be divided; None: there is none.
        tolerance: relative difference up to which two losses count as equal.
    """

    def near(loss: float, other: float, *scale: float) -> bool:
        """Return whether two losses are equal within the tolerance, relative to the largest of them and of ``scale``."""
        largest = max(map(abs, (loss, other, *scale)))
        return abs(loss - other) <= tolerance * largest

    counts = counts_of(inputs)
    rows = len(counts.get(SAMPLES, ()))
    # The number is tripled, not doubled: a mean that is multiplied by the number of processes is half as large in the
    # single process that `value` simulates, so with two processes it would look like a sum divided by twice the number.
    # A sum that is divided by the number becomes a third; a loss that does not use the number stays.
    loss_by_triple = whole if items is None else value(inputs, 3 * items)
    is_divided = items is not None and near(3 * loss_by_triple, whole)
    is_undivided = near(loss_by_triple, whole)
    fitting = {DIVIDED} if is_divided else set()
    # Ranks may have to compute every loss together, so all of them are computed before anything is decided.
    if rows:
        # Two cuts: of the whole batch into halves, and of its two most different rows into one each.
        halves = (range(max(rows // 2, 1)), range(rows // 2, rows))
        pair = _unlike_rows(counts)
        half_losses = [value(_rows(inputs, rows, half), items) for half in halves]
        few_loss = value(_rows(inputs, rows, pair[:1]), items)  # of the row with the fewest labels
        many_loss = value(_rows(inputs, rows, pair[1:]), items)  # of the row with the most labels
        pair_loss = value(_rows(inputs, rows, pair), items)
        relabelled_loss = pair_loss
        if SHIFTED in counts:
            relabelled_loss = value(_other_first_labels(_rows(inputs, rows, pair)), items)
    if rows > 1:
        cuts = (
            _Cut(whole, (half_losses[0], half_losses[1]), halves),
            _Cut(pair_loss, (few_loss, many_loss), (pair[:1], pair[1:])),
        )
        # A sum divided by one number is the sum of its parts' losses; a mean is not. NaN: a part could not be computed.
        are_sums = [math.isnan(sum(cut.parts)) or near(cut.whole, sum(cut.parts), *cut.parts) for cut in cuts]
        if not all(are_sums):
            fitting.discard(DIVIDED)
        if is_undivided:
            fitting |= _fitting_means(counts, cuts, near)
        # If both means over labels fit, another first label decides: only a mean over all labels changes by it.
        has_both = {LABELS, SHIFTED} <= fitting and few_loss != many_loss
        if has_both and _has_first_labels(_rows(inputs, rows, pair)):
            fitting.remove(LABELS if relabelled_loss == pair_loss else SHIFTED)
    if not math.isfinite(whole) or whole == 0:
        return [0.0] * len(KINDS)
    verdict_by_kind = {kind: 1.0 if kind in fitting else -1.0 for kind in KINDS}
    if rows == 1 and is_undivided:  # a single row is a mean of any kind, so it tells nothing
        verdict_by_kind |= dict.fromkeys(counts, 0.0)
    return list(verdict_by_kind.values())


def _fitting_means(counts: Mapping[str, Tensor], cuts: Sequence[_Cut], near: Callable[..., bool]) -> set[str]:
    """Return the kinds of mean by which the losses of the parts give that of the whole, in each of ``cuts``.

    Of the kinds that fit, only the one nearest to the whole in the last cut is returned, and those that rounding cannot
    tell from it.

    ``counts``: those of :func:`counts_of`; ``near(loss, other, *scale)`` returns whether two losses are equal within the
    tolerance, relative to the largest of all arguments.
    """
    means = {kind: [_mean(of_kind, cut.parts, cut.rows) for cut in cuts] for kind, of_kind in counts.items()}
    fitting = {
        kind
        for kind, means_of_kind in means.items()
        if all(near(cut.whole, mean, *cut.parts) for cut, mean in zip(cuts, means_of_kind, strict=True))
    }
    deviation = {kind: abs(means[kind][-1] - cuts[-1].whole) for kind in fitting}
    nearest = min(fitting, key=deviation.__getitem__, default=None)
    if nearest is None:
        return fitting
    within = max(4 * deviation[nearest], _ROUNDING * max(map(abs, cuts[-1].parts)))
    return {kind for kind in fitting if abs(means[kind][-1] - means[nearest][-1]) <= within}


def _unlike_rows(counts: Mapping[str, Tensor]) -> list[int]:
    """Return the indices of two rows: with the fewest labels above 0, and with the most; if equal, of the first and last."""
    labels = counts.get(LABELS, counts[SAMPLES])
    few = int(torch.where(labels > 0, labels, math.inf).argmin())
    many = int(labels.argmax())
    return [few, many] if few != many else [0, len(labels) - 1]


def _rows(inputs: Any, rows: int, chosen: Sequence[int]) -> Any:
    """Return the batch reduced to the rows with the indices ``chosen``; tensors whose length is not ``rows`` stay whole.

    ``rows``: number of rows of the batch.
    """

    def part(value: Tensor) -> Tensor:
        """Return the chosen rows of a tensor that has rows; any other tensor itself."""
        has_rows = value.dim() and len(value) == rows
        return value[torch.tensor([*chosen], device=value.device)] if has_rows else value

    return recursively_apply(part, inputs)


def _mean(counts: Tensor, losses: Sequence[float], rows: Sequence[Sequence[int]]) -> float:
    """Return the mean of the parts' ``losses``, each weighted by the sum of ``counts``, (rows,), over its rows.

    ``rows``: row indices of each part. A part without counts is left out, because its loss is not finite; 0 if all are.
    """
    weights = [float(counts[[*part]].sum()) for part in rows]
    total = sum(weights)
    if not total:
        return 0.0
    return sum(weight * loss for weight, loss in zip(weights, losses, strict=True) if weight) / total


def _has_first_labels(inputs: Any) -> bool:
    """Return whether the first label of some row is not ignored, and the batch has another label to replace it by."""
    labels = inputs["labels"]
    return bool((labels[:, 0] != IGNORED).any()) and len(labels[labels != IGNORED].unique()) > 1


def _other_first_labels(inputs: Any) -> Any:
    """Return a copy of the batch in which each row's first label is replaced by another one of the batch.

    Ignored labels stay. A loss over shifted labels, which leaves first labels out, does not change by that.
    """
    labels = inputs["labels"].clone()
    known = labels[labels != IGNORED]
    if known.numel():
        first = labels[:, 0]
        other = torch.where(first == known.max(), known.min(), known.max())
        labels[:, 0] = torch.where(first == IGNORED, first, other)
    inputs = copy(inputs)
    inputs["labels"] = labels
    return inputs
