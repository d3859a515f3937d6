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

    Rank and pass get ``total // parts`` samples, the first ``total % parts`` of the ranks (or passes) one more.
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
        return _sizes(self.total_batch_size, self.world_size, self.accumulation_steps + 1)

    def sizes_of(self, samples: int) -> Ints:
        """Return samples per rank and pass of a step of fewer samples, in as few passes as memory for this split allows."""
        largest = _ceil(_ceil(self.total_batch_size, self.world_size), self.accumulation_steps + 1)
        passes = _ceil(_ceil(samples, self.world_size), largest)
        return _sizes(samples, self.world_size, passes)


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticLimits:
    """Constraints: samples per pass (memory) and accumulation steps (None: any). Raises InputError for what cannot be."""

    max_local_batch_size: int
    min_local_batch_size: int = 1
    max_accumulation_steps: int | None = None

    def __post_init__(self) -> None:
        for limit in fields(self):
            value, least = getattr(self, limit.name), 0 if limit.name == "max_accumulation_steps" else 1
            if value is not None and value < least:
                raise InputError(limit.name, f"is {value}", f"it must be {least} or more")
        if self.min_local_batch_size > self.max_local_batch_size:
            remedy = f"it must be at most max_local_batch_size, {self.max_local_batch_size}"
            raise InputError("min_local_batch_size", f"is {self.min_local_batch_size}", remedy)


def find_split(total_batch_size: int, world_size: int, limits: ElasticLimits) -> tuple[Split | None, str]:
    """Return the split with the fewest accumulation steps, or None and the proof that none exists.

    With n passes on W ranks, batches that differ by at most one lie within the limits if and only if
    ``W n min <= M <= W n max`` (any other batches within the limits imply it: add them up). Raises InputError for numbers
    below 1.
    """
    total, world = total_batch_size, world_size
    if total < 1 or world < 1:
        raise InputError("total_batch_size, world_size", f"are {total}, {world}", "give 1 or more")
    low, high = limits.min_local_batch_size, limits.max_local_batch_size
    fewest, most = _ceil(total, world * high), total // (world * low)
    if fewest > most:
        needed = f"{world} ranks with {fewest} x {low} samples at least need {world * fewest * low}"
        before = f"with {fewest - 1} x {high} at most they hold {world * (fewest - 1) * high}"
        return None, f"{needed}, more than {total}" if fewest == 1 else f"{needed}; {before}: never {total}"
    if limits.max_accumulation_steps is not None and fewest > limits.max_accumulation_steps + 1:
        steps = limits.max_accumulation_steps
        return None, f"{steps} accumulation steps of at most {high} hold {world * (steps + 1) * high} samples"
    return Split(world_size=world, total_batch_size=total, accumulation_steps=fewest - 1), ""


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
    """Return one setting per world size that keeps ``total_batch_size`` exactly, or says why none can.

    ``learning_rate`` was tuned at ``initial_batch_size`` (M0, by default the total batch itself); each rule scales it by
    its factor at ``M / M0``, without warm-up. ``epoch_samples``: samples of an epoch, for its steps and its last one.
    Raises InputError for numbers out of range, unknown rules, and rules that need statistics without them.
    """
    for name, value in (("epoch_samples", epoch_samples), ("initial_batch_size", initial_batch_size)):
        if value is not None and value < 1:
            raise InputError(name, f"is {value}", "give 1 or more")
    scale = 1.0 if initial_batch_size is None else total_batch_size / initial_batch_size
    rates = {name: learning_rate * rule(name).factor(scale, statistics) for name in rules}
    made = []
    for world in world_sizes:
        split, reason = find_split(total_batch_size, world, limits)
        # the passes of the first ``remainder`` ranks, if any, and of the others: all ranks of a kind are alike
        kinds = [] if split is None else [0, split.remainder] if split.remainder else [0]
        made.append(
            ElasticSetting(
                world_size=world,
                local_batch_sizes=[] if split is None else split.local_batch_sizes[kinds].tolist(),
                accumulation_steps=None if split is None else split.accumulation_steps,
                ranks_with_one_more=0 if split is None else split.remainder,
                reason=reason,
                nearest_total_batch_sizes=[] if split else _nearest(total_batch_size, world, limits),
                learning_rates=rates,
                steps_per_epoch=_ceil(epoch_samples, total_batch_size) if epoch_samples else 0,
                last_step_samples=(epoch_samples or 0) % total_batch_size if split else 0,
            )
        )
    return made


def _ceil(number: int, by: int) -> int:
    return -(-number // by)


def _sizes(total: int, ranks: int, passes: int) -> Ints:
    """Return samples of shape (ranks, passes), as equal as they can be per rank and then per pass."""
    per_rank = total // ranks + (np.arange(ranks) < total % ranks)
    made: Ints = per_rank[:, None] // passes + (np.arange(passes)[None, :] < per_rank[:, None] % passes)
    return made


def _nearest(total: int, world: int, limits: ElasticLimits) -> list[int]:
    """Return the nearest smaller and larger total batch with a split, as far as they exist.

    Every total from W min to W max has one (one pass), so both searches end.
    """
    least, largest = world * limits.min_local_batch_size, math.inf
    if limits.max_accumulation_steps is not None:
        largest = world * (limits.max_accumulation_steps + 1) * limits.max_local_batch_size
    below: Iterable[int] = range(int(min(total - 1, largest)), least - 1, -1)
    above: Iterable[int] = itertools.takewhile(lambda tried: tried <= largest, itertools.count(max(total + 1, least)))
    found = (next((tried for tried in side if find_split(tried, world, limits)[0]), None) for side in (below, above))
    return [tried for tried in found if tried is not None]
