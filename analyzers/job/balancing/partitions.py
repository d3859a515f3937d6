"""Unequal batches on partitioned data: when samples must move between ranks, and which (LB-BSP, section 3.5).

Each rank can access only its partition of the data. Ranks with larger batches traverse theirs more often, so their samples
count more. Once one partition has been traversed more often than another by more than a threshold, samples move from the
slower ranks to the faster ones until partitions are in proportion to batch sizes: from then on all are traversed equally
often. Start at :class:`Traversals`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddltool.analyzers.job.balancing.sizing import proportional
from ddltool.arrays import Floats, Ints
from ddltool.errors import InputError

THRESHOLD = 2.0
"""Traversals by which one partition may lead another before samples move."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """``samples`` samples that rank ``source`` gives to rank ``target``."""

    source: int
    target: int
    samples: int


class Traversals:
    """How often each of n partitions has been traversed since the counts were last reset.

    Args:
        partitions: (n,) samples of each partition, at least 1.
        threshold: traversals by which one may lead another, above 0.

    It is deterministic: ranks that are told the same sizes get the same moves without communicating.
    """

    def __init__(self, partitions: Sequence[int], threshold: float = THRESHOLD) -> None:
        """Begin without any traversal. Raises InputError for a partition without samples, and a threshold of 0 or less."""
        self.partitions = np.array(partitions, dtype=np.int64)
        if self.partitions.ndim != 1 or len(self.partitions) == 0 or self.partitions.min() < 1:
            raise InputError("partitions", f"is {list(partitions)}", "give every rank one sample or more")
        if not (np.isfinite(threshold) and threshold > 0):
            raise InputError("threshold", f"is {threshold:g}", "give a finite number of traversals above 0")
        self.threshold = threshold
        self.processed = np.zeros_like(self.partitions)
        """(n,) samples processed since the last reset, by partition."""

    @property
    def counts(self) -> Floats:
        """(n,) traversals of each partition."""
        return self.processed / self.partitions

    @property
    def gap(self) -> float:
        """Traversals of the partition traversed most often, minus those of the one traversed least often."""
        return float(self.counts.max() - self.counts.min())

    def add(self, sizes: Sequence[int]) -> None:
        """Count a step in which the ranks process ``sizes`` (n,) samples of their partitions."""
        self.processed += np.asarray(sizes, dtype=np.int64)

    def moves(self) -> list[Move]:
        """Return the moves to make now: none while the gap is within the threshold, else at most n - 1.

        They make partitions proportional to the samples processed since the last reset, rounded to whole samples. Nothing
        changes here until :meth:`reset`.
        """
        if self.gap <= self.threshold:
            return []
        # A rank that has processed nothing keeps one sample, because no partition may become empty.
        sizes = proportional(np.maximum(self.processed, 1e-9 * self.processed.max()), int(self.partitions.sum()))
        return between(self.partitions, sizes)

    def reset(self, moves: Sequence[Move] = ()) -> None:
        """Set all counts to 0, and change the partitions' sizes by the ``moves`` that have been made."""
        for move in moves:
            self.partitions[move.source] -= move.samples
            self.partitions[move.target] += move.samples
        self.processed[:] = 0


def between(present: Ints, wanted: Ints) -> list[Move]:
    """Return at most n - 1 moves that turn ``present`` (n,) samples by rank into ``wanted`` (n,), which has the same sum.

    >>> between(np.array([5, 5, 5]), np.array([2, 4, 9]))
    [Move(source=0, target=2, samples=3), Move(source=1, target=2, samples=1)]
    """
    surplus = np.array(present - wanted, dtype=np.int64)
    moves = []
    while (surplus != 0).any():
        source, target = int(np.argmax(surplus)), int(np.argmin(surplus))
        samples = int(min(surplus[source], -surplus[target]))
        moves.append(Move(source=source, target=target, samples=samples))
        surplus[source] -= samples
        surplus[target] += samples
    return moves
