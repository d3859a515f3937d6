"""Divides the samples of a global batch among ranks by their lengths. Start at :class:`Lengths`, which loaders take."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddltool.arrays import Ints
from ddltool.errors import InputError


class Lengths:
    """The lengths, in tokens, of every sample of a dataset, and the costs that follow from them.

    With lengths, a rank's planned batch is its share of the step's cost instead of its samples. Each step has the same
    samples as without lengths; only which rank computes which changes.

    Args:
        tokens: (n,) lengths by dataset index; anything that NumPy can make an array of.
        cost: (a, b, c) or (a, b) of the cost ``a L + b L^2 + c`` of a sample of L tokens, as ``ddltool balance`` prints
            them for a model. None: a decoder of width 4096.
        padded: whether samples of a pass are padded to its longest, so that samples of similar length are put together.

    Raises InputError for no lengths, and for one that is not finite and above 0.
    """

    def __init__(self, tokens: Any, *, cost: Sequence[float] | None = None, padded: bool = False) -> None:
        """Turn the lengths into costs, (n,) numbers above 0."""
        from ddltool.analyzers.job.balancing.assigning import checked_costs  # attaching must not load an analyzer
        from ddltool.analyzers.job.balancing.lengths import SampleCost

        if cost is not None and len(cost) not in (2, 3):
            raise InputError("cost", f"has {len(cost)} numbers", "give a, b and c of a L + b L^2 + c")
        coefficients = ("per_token", "per_square", "per_sample")
        chosen = SampleCost() if cost is None else SampleCost(**dict(zip(coefficients, cost, strict=False)))
        try:
            lengths = checked_costs(tokens, "lengths")
        except (TypeError, ValueError):
            raise InputError("lengths", f"is a {type(tokens).__name__}", "give one number for each sample") from None
        self._costs = chosen.of(lengths)
        self._padded = padded

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._costs)

    @property
    def digest(self) -> str:
        """A hash (12 hexadecimal digits) of the costs and ``padded``, by which ranks check that they have the same."""
        return hashlib.sha256(self._costs.tobytes() + bytes([self._padded])).hexdigest()[:12]

    def assign(self, indices: Ints, shares: Sequence[int], passes: int) -> Ints:
        """Return which rank and pass computes each sample of a step, as (k,) numbers ``rank * passes + pass``.

        They are the same on every rank.

        Args:
            indices: (k,) dataset indices of the step's samples.
            shares: (n,) planned samples of each rank; the ranks' costs will be in proportion to them.
            passes: number of passes of each rank.
        """
        from ddltool.analyzers.job.balancing.assigning import balanced, by_length

        divide = by_length if self._padded else balanced
        return divide(self._costs[indices], np.array(shares, dtype=np.float64), passes)


def as_lengths(given: Any, samples: int) -> Lengths | None:
    """Return ``given`` (:class:`Lengths`, or what its ``tokens`` may be) as Lengths; None for None.

    Raises InputError unless there are ``samples`` lengths.
    """
    if given is None:
        return None
    lengths = given if isinstance(given, Lengths) else Lengths(given)
    if len(lengths) != samples:
        problem = f"has {len(lengths)} numbers for {samples} samples"
        raise InputError("lengths", problem, "give one for each sample of the dataset, by index")
    return lengths
