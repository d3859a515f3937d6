"""Unequal batches on partitioned data: when samples must move between ranks, and which (LB-BSP, section 3.5).

Each rank can access a partition of the data only. Ranks with larger batches go through theirs more often, so their samples
count more. Once one partition has been traversed more often than another by more than a threshold, samples move from the
slower ranks to the faster ones until partitions are in proportion to batch sizes: then all are traversed equally often.
Start at :class:`Traversals`.
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
    """Samples that one rank gives to another."""

    source: int
    target: int
    samples: int


class Traversals:
    """How often each of n partitions has been traversed since the counts were last reset.

    Args:
        partitions: (n,) samples of each partition, at least 1.
        threshold: traversals by which one may lead another, above 0.

    Deterministic: ranks that see the same sizes come to the same answer without asking each other.
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

    @property
    def counts(self) -> Floats:
        """(n,) traversals of each partition."""
        return self.processed / self.partitions

    @property
    def gap(self) -> float:
        """How far the partition traversed most often leads the one traversed least often."""
        return float(self.counts.max() - self.counts.min())

    def add(self, sizes: Sequence[int]) -> None:
        """Count a step in which the ranks process ``sizes`` (n,) samples of their partitions."""
        self.processed += np.asarray(sizes, dtype=np.int64)

    def moves(self) -> list[Move]:
        """Return what to move now: nothing while the gap is within the threshold, at most n - 1 moves beyond it.

        Afterwards partitions are in proportion to the samples processed since the last reset, to a sample.
        """
        if self.gap <= self.threshold:
            return []
        # A rank that has processed nothing keeps one sample: it may be needed as soon as its batch grows again.
        sizes = proportional(np.maximum(self.processed, 1e-9 * self.processed.max()), int(self.partitions.sum()))
        return between(self.partitions, sizes)

    def reset(self, moves: Sequence[Move] = ()) -> None:
        """Set all counts to 0, after ``moves`` have been made, which change the partitions' sizes."""
        for move in moves:
            self.partitions[move.source] -= move.samples
            self.partitions[move.target] += move.samples
        self.processed[:] = 0


def between(present: Ints, wanted: Ints) -> list[Move]:
    """Return at most n - 1 moves from (n,) ``present`` to (n,) ``wanted`` samples with the same sum; each sample moves once.

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
