"""The same total batch on any number of workers: exact local batches, accumulation steps, remainder, learning rate.

Start at :func:`elastic_table`. Which samples a step takes does not depend on the number of workers: step t of an epoch takes
positions ``t M`` to ``(t + 1) M`` of its order of samples, cut by rank and then by pass in the sizes of :meth:`Split.sizes_of`.
So a job that resizes between two steps loses and repeats nothing, and its checkpoint needs the number of samples done only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from ddltool.analyzers.job.goodput.lr_rules import GradientStatistics, rule
from ddltool.arrays import Ints
from ddltool.errors import InputError
from ddltool.plans import ElasticSetting


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """How ``world_size`` ranks share a total batch in ``accumulation_steps + 1`` passes each.

    Samples are divided among the ranks, then each rank's among its passes: every part gets ``total // parts`` samples, and the
    first ``total % parts`` parts one more.
    """

    world_size: int
    total_batch_size: int
    accumulation_steps: int

    @property
    def remainder(self) -> int:
        """Number of ranks that take one sample more than the others: the first ones."""
        return self.total_batch_size % self.world_size

    @property
    def local_batch_sizes(self) -> Ints:
        """Samples per rank and pass, shape (world_size, accumulation_steps + 1); they add up to the total batch."""
        return _share_evenly(self.total_batch_size, self.world_size, self.accumulation_steps + 1)

    def sizes_of(self, samples: int) -> Ints:
        """Return the samples of each rank and pass, (world_size, passes), in a step of ``samples``, such as an epoch's last.

        There are as few passes as keep each within this split's largest local batch, which is known to fit into memory.
        """
        largest = _ceil_div(_ceil_div(self.total_batch_size, self.world_size), self.accumulation_steps + 1)
        passes = _ceil_div(_ceil_div(samples, self.world_size), largest)
        return _share_evenly(samples, self.world_size, passes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticLimits:
    """Limits of the samples of a rank in one pass (memory sets the largest) and of accumulation steps (None: any number).

    Raises InputError for limits out of range.
    """

    max_local_batch_size: int
    min_local_batch_size: int = 1
    max_accumulation_steps: int | None = None

    def __post_init__(self) -> None:
        """Raise InputError for a limit that is too small, and for a least local batch above the largest one."""
        for limit in fields(self):
            value = getattr(self, limit.name)
            least = 0 if limit.name == "max_accumulation_steps" else 1
            if value is not None and value < least:
                raise InputError(limit.name, f"is {value}", f"it must be {least} or more")
        if self.min_local_batch_size > self.max_local_batch_size:
            remedy = f"it must be at most max_local_batch_size, {self.max_local_batch_size}"
            raise InputError("min_local_batch_size", f"is {self.min_local_batch_size}", remedy)


def find_split(total_batch_size: int, world_size: int, limits: ElasticLimits) -> tuple[Split | None, str]:
    """Return (the split with the fewest accumulation steps, "") or (None, a text that proves that no split exists).

    A total batch M can be split into n passes on W ranks, within the limits ``min`` and ``max`` of local batches, exactly where
    ``W n min <= M <= W n max``: the sum of any local batches obeys that, and where it holds, local batches that differ by at
    most one are within the limits. Raises InputError for a total or a world size below 1.
    """
    samples, ranks = total_batch_size, world_size
    if samples < 1 or ranks < 1:
        raise InputError("total_batch_size, world_size", f"are {samples}, {ranks}", "give 1 or more")
    smallest = limits.min_local_batch_size
    largest = limits.max_local_batch_size
    passes = _ceil_div(samples, ranks * largest)  # the fewest, by the inequality on the right
    most_passes = samples // (ranks * smallest)  # by that on the left
    if passes > most_passes:
        lower_text = f"{ranks} ranks with {passes} x {smallest} samples at least need {ranks * passes * smallest}"
        if passes == 1:
            return None, f"{lower_text}, more than {samples}"
        upper_text = f"with {passes - 1} x {largest} at most they hold {ranks * (passes - 1) * largest}"
        return None, f"{lower_text}; {upper_text}: never {samples}"
    if limits.max_accumulation_steps is not None and passes > limits.max_accumulation_steps + 1:
        steps = limits.max_accumulation_steps
        return None, f"{steps} accumulation steps of at most {largest} hold {ranks * (steps + 1) * largest} samples"
    return Split(world_size=ranks, total_batch_size=samples, accumulation_steps=passes - 1), ""


def elastic_table(
    total_batch_size: int,
    world_sizes: Iterable[int],
    limits: ElasticLimits,
    *,
    epoch_samples: int | None = None,
    initial_batch_size: int | None = None,
    learning_rate: float = 1.0,
    rules: Sequence[str] = ("linear", "sqrt", "legw"),
    statistics: GradientStatistics | None = None,
) -> list[ElasticSetting]:
    """Return one setting per world size that keeps ``total_batch_size`` exactly, or gives the reason why none can.

    Args:
        total_batch_size: samples of a step, M.
        limits: of local batches and accumulation steps.
        epoch_samples: samples of an epoch, for its number of steps and the samples of its last one (0: a whole step).
        initial_batch_size: M0, the total batch that ``learning_rate`` was tuned at; None: M.
        rules: names of learning rate rules; each scales the rate by its factor at ``M / M0``, without warm-up.
        statistics: of the gradient, for the rules that need them.

    Raises InputError for numbers out of range, unknown rules, and rules that need statistics without them.
    """
    for name, value in (("epoch_samples", epoch_samples), ("initial_batch_size", initial_batch_size)):
        if value is not None and value < 1:
            raise InputError(name, f"is {value}", "give 1 or more")
    scale = 1.0 if initial_batch_size is None else total_batch_size / initial_batch_size
    rates = {name: learning_rate * rule(name).factor(scale, statistics) for name in rules}
    settings = []
    for world_size in world_sizes:
        split, reason = find_split(total_batch_size, world_size, limits)
        # The first rank stands for those with one sample more, if there are any, and rank ``remainder`` for the others.
        typical_ranks: list[int] = []
        if split is not None:
            typical_ranks = [0, split.remainder] if split.remainder else [0]
        settings.append(
            ElasticSetting(
                world_size=world_size,
                local_batch_sizes=[] if split is None else split.local_batch_sizes[typical_ranks].tolist(),
                accumulation_steps=None if split is None else split.accumulation_steps,
                ranks_with_one_more=0 if split is None else split.remainder,
                reason=reason,
                nearest_total_batch_sizes=[] if split else _nearest_totals(total_batch_size, world_size, limits),
                learning_rates=rates,
                steps_per_epoch=_ceil_div(epoch_samples, total_batch_size) if epoch_samples else 0,
                last_step_samples=(epoch_samples or 0) % total_batch_size if split else 0,
            )
        )
    return settings


def _ceil_div(number: int, by: int) -> int:
    """Return ``number / by`` rounded up."""
    return -(-number // by)


def _share_evenly(total: int, ranks: int, passes: int) -> Ints:
    """Return ``total`` samples shared out in the shape (ranks, passes), as equally as possible by rank and then by pass.

    >>> _share_evenly(7, 2, 2).tolist()
    [[2, 2], [2, 1]]
    """
    per_rank = total // ranks + (np.arange(ranks) < total % ranks)
    sizes: Ints = per_rank[:, None] // passes + (np.arange(passes)[None, :] < per_rank[:, None] % passes)
    return sizes


def _nearest_totals(total: int, world_size: int, limits: ElasticLimits) -> list[int]:
    """Return the nearest smaller and the nearest larger total batch that have a split; one or both may not exist.

    Every total from ``world_size`` times the least to ``world_size`` times the largest local batch has a split into a single
    pass, so both searches end.
    """
    smallest = world_size * limits.min_local_batch_size
    largest = math.inf
    if limits.max_accumulation_steps is not None:
        largest = world_size * (limits.max_accumulation_steps + 1) * limits.max_local_batch_size
    below: Iterable[int] = range(int(min(total - 1, largest)), smallest - 1, -1)
    above: Iterable[int] = itertools.takewhile(lambda size: size <= largest, itertools.count(max(total + 1, smallest)))
    nearest = (
        next((size for size in sizes if find_split(size, world_size, limits)[0]), None) for sizes in (below, above)
    )
    return [size for size in nearest if size is not None]
