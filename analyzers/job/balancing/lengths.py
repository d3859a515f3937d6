"""Samples of unequal length: what padding and waiting cost in a job, and what each remedy gains. Start at :func:`compare`.

Global batches are drawn in random order, as training draws them, and each way of sharing them out is timed by one cost of a
sample, ``a L + b L^2 + c``. A padded pass costs as much as if all of its samples were as long as its longest; without
padding (documents behind one another, with masks between them) it costs the sum over its samples, so b counts the sum of
the squares and not the square of the sum.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import ArrayLike

from ddltool.analyzers.job.balancing.assigning import (
    balanced,
    by_length,
    in_passes,
    is_differenced,
    karmarkar_karp,
    lpt,
    solve,
)
from ddltool.arrays import Floats, Ints
from ddltool.errors import InputError

# Forward and backward, in units of a token's products with weights: 12 d^2 of these in a block of width d, and with a causal
# mask L d / 2 products of a query with keys, as many with values. Width 4096: a model of 7 to 8 billion parameters.
_WIDTH = 4096
DEFAULT_PER_SQUARE = 1 / (12 * _WIDTH)
# transformers' LengthGroupedSampler sorts so many batches at a time.
_MEGABATCH = 50
# Below this gap an assignment counts as good enough to leave the solver out.
WORTH_SOLVING = 1e-3
# Bootstrap samples of a speedup, and the percentiles that bound its 95 % interval.
_RESAMPLES = 1000
_RANGE = (2.5, 97.5)
# Samples: beyond these, those of a histogram are not laid out, and no more are drawn.
_MOST_LAID_OUT = _MOST_DRAWN = 10**7
WAYS = ("padded", "grouped", "sorted", "unpadded", "lpt", "karmarkar_karp", "cp_sat", "window", "cut", "cut_masked")
IN_THE_BATCH = ("padded", "sorted", "unpadded", "lpt", "karmarkar_karp", "cp_sat")
"""Ways that share out the same global batches, step by step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleCost:
    """What a sample of L tokens costs, ``per_token L + per_square L^2 + per_sample``; what passes and steps cost besides.

    All in one unit: seconds, or what one token costs in products with weights (the defaults).
    """

    per_token: float = 1.0
    per_square: float = DEFAULT_PER_SQUARE
    per_sample: float = 0.0
    per_pass: float = 0.0
    per_step: float = 0.0

    def __post_init__(self) -> None:
        """Raise InputError for a negative or infinite coefficient, and where a sample would cost nothing."""
        values = astuple(self)
        if not all(math.isfinite(value) and value >= 0 for value in values) or not sum(values[:3]) > 0:
            given = ",".join(f"{value:g}" for value in values)
            raise InputError("cost", f"is {given}", "give finite numbers of 0 or more, one of the first three above 0")

    def of(self, lengths: ArrayLike) -> Floats:
        """Return the (n,) costs of samples of (n,) ``lengths`` tokens, in the unit of the coefficients."""
        tokens = np.asarray(lengths, dtype=np.float64)
        costs: Floats = self.per_token * tokens + self.per_square * tokens**2 + self.per_sample
        return costs


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LengthsJob:
    """How a job takes its global batches."""

    speeds: Floats
    """(R,) of the ranks, relative to one another."""
    total_batch: int
    """Samples of all ranks in a step."""
    cost: SampleCost = SampleCost()
    passes: int = 1
    """Passes of each rank in a step."""
    max_tokens: int | None = None
    """Most tokens in a pass, padding included: as few passes as that needs, in place of ``passes``."""
    sharded: bool = False
    """Whether ranks wait for each other in every pass (FSDP) and not once a step (DDP)."""
    window: int = 1
    """Global batches over which samples may be moved to make these alike."""
    pack: int | None = None
    """Tokens of a packed sequence; None: nothing is packed to a fixed length."""


@dataclass(frozen=True, slots=True, eq=False)
class TimedSteps:
    """What K steps took: arrays (K,), times in the unit of the job's :class:`SampleCost`."""

    seconds: Floats
    """Until the slowest rank ends, the cost of the step itself included."""
    busy: Floats
    """Mean over ranks of the time they compute."""
    tokens: Floats
    """Of all samples, without padding."""
    computed: Floats
    """Tokens with padding."""
    most_tokens: int
    """In one pass, padding included: what memory follows."""

    @property
    def per_token(self) -> float:
        """Seconds of a token."""
        return float(self.seconds.sum() / self.tokens.sum())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WaysCompared:
    """The ways that were tried, and the first batch as the best assignment shares it out."""

    steps: dict[str, TimedSteps]
    gaps: list[float]
    """Of each batch: how far its assignment may be above the best, as a share of it."""
    solver_s: float
    """Seconds that the solver took for all batches."""
    first: list[list[Ints]]
    """By rank and pass: the lengths, in tokens, of the first batch."""


def draw(lengths: Ints, counts: Ints, total: int, batches: int, seed: int) -> Ints:
    """Return (K, total) lengths in tokens of global batches in random order, as an epoch of training draws them.

    ``counts`` (n,) samples have each of the (n,) ``lengths``; ``total`` samples are a batch. K is ``batches``, or as many whole
    batches as an epoch has. Raises InputError where there are too few samples for one batch.
    """
    rng, samples = np.random.default_rng(seed), int(counts.sum())
    wanted = total * min(batches, samples // total, max(_MOST_DRAWN // total, 1))
    if not wanted:
        raise InputError("total_batch", f"is {total}", f"the file has {samples} samples: give at most so many")
    if samples <= _MOST_LAID_OUT:
        drawn = rng.permutation(np.repeat(lengths, counts))[:wanted]
    else:  # of so many samples, drawing without replacement is as good as with
        drawn = rng.choice(lengths, wanted, p=counts / counts.sum())
    return drawn.reshape(-1, total)


def compare(
    batches: Ints, job: LengthsJob, limit_s: float, seed: int = 0, advance: Callable[[int, str], None] = lambda *_: None
) -> WaysCompared:
    """Return what the steps take under every way of sharing out the samples of the same global batches.

    Raises InputError for a sample longer than ``job.max_tokens``.

    Args:
        batches: (K, B) lengths in tokens of the samples of K global batches.
        job: ranks, passes and costs.
        limit_s: seconds for all of the solver's work.
        seed: of the solver.
        advance: gets the index of each batch that the solver begins with, for a display of progress.
    """
    if job.max_tokens is not None and (longest := int(batches.max())) > job.max_tokens:
        raise InputError("max_tokens", f"is {job.max_tokens}", f"the longest sample has {longest}: give that or more")
    ranks, batch_size, passes = len(job.speeds), batches.shape[1], _passes(job)
    costs = job.cost.of(batches)
    gaps, solved_ranks, left_s = list[float](), list[Ints](), limit_s
    for index, batch_costs in enumerate(costs):
        advance(index, "cp_sat")
        begun_s = time.perf_counter()
        # An equal part of the time that is left, so that what an easy batch does not need goes to the others.
        proven = solve(batch_costs, job.speeds, left_s / (len(costs) - index), seed, WORTH_SOLVING)
        left_s -= time.perf_counter() - begun_s
        gaps.append(proven.seconds / proven.bound - 1)
        solved_ranks.append(proven.places)

    def assigned(choose: Callable[[Floats], Ints], lengths: Ints = batches, padded: bool = False) -> TimedSteps:
        """Return the steps over (K, B) ``lengths`` where ``choose`` makes the (B,) places from the (B,) costs of a batch."""
        shared = (_by_place(job, row, choose(job.cost.of(row)), padded) for row in lengths)
        return timed(job, shared, padded)

    # As a sampler deals them out: the first samples of a batch to the first rank, and so on.
    blocks = np.array_split(np.arange(batch_size), ranks)
    in_order = np.repeat(np.arange(ranks), [len(block) for block in blocks])
    steps_by_way = {
        way: timed(job, (_in_order(job, row, in_order, padded) for row in batches), padded)
        for way, padded in (("padded", True), ("unpadded", False))
    }
    steps_by_way["grouped"] = timed(job, _grouped(job, batches), padded=True)
    steps_by_way["sorted"] = assigned(lambda row: by_length(row, job.speeds, passes), padded=True)
    steps_by_way["lpt"] = assigned(lambda row: in_passes(row, lpt(row, job.speeds), ranks, passes))
    if is_differenced(costs[0], job.speeds):
        steps_by_way["karmarkar_karp"] = assigned(lambda row: in_passes(row, karmarkar_karp(row, ranks), ranks, passes))
    shared = [
        _by_place(job, lengths, in_passes(batch_costs, rank_of, ranks, passes))
        for lengths, batch_costs, rank_of in zip(batches, costs, solved_ranks, strict=True)
    ]
    steps_by_way["cp_sat"] = timed(job, shared, padded=False)
    if job.window > 1:
        order = regrouped(costs.ravel(), ranks, batch_size, job.window)
        moved = batches.ravel()[order].reshape(batches.shape)
        steps_by_way["window"] = assigned(lambda row: balanced(row, job.speeds, passes), moved)
    if job.pack is not None:
        steps_by_way |= _packed(job, batches.ravel(), job.pack)
    return WaysCompared(
        steps={way: steps_by_way[way] for way in WAYS if way in steps_by_way},
        gaps=gaps,
        solver_s=limit_s - left_s,
        first=shared[0],
    )


def speedup(today: TimedSteps, other: TimedSteps, paired: bool, seed: int) -> tuple[float, float, float]:
    """Return by which factor ``other`` makes more tokens per second than ``today``, and the ends of its 95 % interval.

    The interval is a bootstrap's: steps are drawn again with replacement. ``paired``: both ways took the same batches, so the
    same steps are drawn for both.
    """
    rng = np.random.default_rng(seed)
    picks = [rng.integers(0, len(steps.seconds), (_RESAMPLES, len(steps.seconds))) for steps in (today, other)]
    if paired:
        picks[1] = picks[0]
    rates = [
        steps.tokens[pick].sum(axis=1) / steps.seconds[pick].sum(axis=1)
        for steps, pick in zip((today, other), picks, strict=True)
    ]
    low, high = np.percentile(rates[1] / rates[0], _RANGE)
    return today.per_token / other.per_token, float(low), float(high)


def regrouped(costs: Floats, ranks: int, total: int, window: int) -> Ints:
    """Return an order (n,) of samples in which the outliers of every ``window`` global batches come together.

    An outlier costs more than a rank has on average, so that all other ranks wait for it. ``ranks`` outliers in one batch wait
    for each other only. The other samples follow, costliest first: each goes to the batch that it prolongs least, and of equal
    ones to the one with the least cost so far. A sample stays within its stretch of ``window`` batches of ``total`` samples;
    samples after the last whole stretch stay where they are.
    """
    order, stretch = np.arange(len(costs)), total * window
    for begin in range(0, len(costs) - stretch + 1, stretch):
        stretch_costs = costs[begin : begin + stretch]
        ranked = np.argsort(-stretch_costs, kind="stable")
        outliers = int((stretch_costs > stretch_costs.sum() / (window * ranks)).sum())
        loads, longest, members = np.zeros(window), np.zeros(window), [list[int]() for _ in range(window)]
        for position, sample in enumerate(ranked.tolist()):
            batch = position // ranks
            if position >= outliers:
                # A batch takes its mean load per rank, or its costliest sample if that is longer.
                before, after = (
                    np.maximum(load / ranks - longest, 0.0) for load in (loads, loads + stretch_costs[sample])
                )
                longer = np.round((after - before) / stretch_costs[sample], 6)  # rounded, so that equal ones tie
                is_full = np.array([len(members_of_one) == total for members_of_one in members])
                batch = int(np.lexsort((loads, longer, is_full))[0])
            members[batch].append(sample)
            loads[batch] += stretch_costs[sample]
            longest[batch] = max(longest[batch], stretch_costs[sample])
        order[begin : begin + stretch] = begin + np.concatenate([np.sort(batch) for batch in members])
    return order


def timed(job: LengthsJob, steps: Iterator[list[list[Ints]]] | list[list[list[Ints]]], padded: bool) -> TimedSteps:
    """Return what each step takes, how long its ranks compute, and its tokens.

    ``steps``: for each step, rank and pass the lengths of its samples in tokens. ``padded``: whether a pass computes all of its
    samples as if they were as long as its longest.
    """
    rows, most_tokens = [], 0
    for ranks in steps:
        most_passes = max(len(passes) for passes in ranks)
        times = np.zeros((len(ranks), most_passes))
        tokens, computed = 0, 0
        for rank, passes in enumerate(ranks):
            for index, lengths in enumerate(passes):
                if not len(lengths):
                    continue
                computed_lengths = np.full_like(lengths, lengths.max()) if padded else lengths
                pass_cost = job.cost.of(computed_lengths).sum() + job.cost.per_pass
                times[rank, index] = pass_cost / job.speeds[rank]
                tokens += int(lengths.sum())
                computed += int(computed_lengths.sum())
                most_tokens = max(most_tokens, int(computed_lengths.sum()))
        # FSDP's ranks wait for each other in every pass, DDP's at the end of the step.
        slowest = times.max(axis=0).sum() if job.sharded else times.sum(axis=1).max()
        rows.append((slowest + job.cost.per_step, times.sum(axis=1).mean(), tokens, computed))
    seconds, busy, all_tokens, all_computed = np.array(rows, dtype=np.float64).reshape(-1, 4).T
    return TimedSteps(seconds, busy, all_tokens, all_computed, most_tokens)


def _passes(job: LengthsJob) -> int:
    """Return the passes into which a rank's samples are first shared out: one where tokens limit a pass, to be cut later."""
    return job.passes if job.max_tokens is None else 1


def _in_order(job: LengthsJob, lengths: Ints, ranks: Ints, padded: bool) -> list[list[Ints]]:
    """Return rank -> pass -> lengths, the samples of a rank in their given order.

    ``lengths`` (B,) of the batch's samples, ``ranks`` (B,) the rank of each; ``padded``: whether padding counts as tokens where
    these are limited.
    """
    by_rank = [lengths[ranks == rank] for rank in range(len(job.speeds))]
    if job.max_tokens is None:
        return [np.array_split(own_lengths, job.passes) for own_lengths in by_rank]
    return [_fitting(own_lengths, job.max_tokens, padded) for own_lengths in by_rank]


def _by_place(job: LengthsJob, lengths: Ints, places: Ints, padded: bool = False) -> list[list[Ints]]:
    """Return rank -> pass -> lengths, from the (B,) ``lengths`` of samples and their (B,) places, ``rank * passes + pass``.

    With a limit on tokens each rank's samples are cut, longest first, into as few passes as keep it.
    """
    passes = _passes(job)
    groups = [[lengths[places == rank * passes + index] for index in range(passes)] for rank in range(len(job.speeds))]
    if job.max_tokens is None:
        return groups
    longest_first = [np.sort(group[0])[::-1] for group in groups]
    return [_fitting(own_lengths, job.max_tokens, padded) for own_lengths in longest_first]


def _fitting(lengths: Ints, most_tokens: int, padded: bool) -> list[Ints]:
    """Return the (n,) ``lengths`` cut into passes of at most ``most_tokens`` tokens, padding included.

    Padded passes take neighbours in the given order, so that they waste little; others are filled by first fit.
    """
    passes: list[list[int]] = []
    for length in lengths.tolist():
        candidates = passes[-1:] if padded else passes
        for members in candidates:
            tokens = (len(members) + 1) * max(length, *members) if padded else sum(members) + length
            if tokens <= most_tokens:
                members.append(length)
                break
        else:  # it fits into none
            passes.append([length])
    return [np.array(members) for members in passes]


def _grouped(job: LengthsJob, batches: Ints) -> Iterator[list[list[Ints]]]:
    """Yield each step as rank -> pass -> lengths, as transformers' ``group_by_length`` makes them.

    The (K, B) lengths of ``batches`` are sorted within stretches of some batches of one rank, then dealt to ranks in turn, so
    that what all ranks compute at a time is about equally long.
    """
    flat, ranks = batches.ravel(), len(job.speeds)
    rank_batch = max(batches.shape[1] // ranks, 1)
    stretch = rank_batch * max(1, min(len(flat) // (4 * rank_batch), _MEGABATCH))  # a quarter of all at most, as there
    pieces = [np.sort(flat[begin : begin + stretch])[::-1] for begin in range(0, len(flat), stretch)]
    for row in np.concatenate(pieces).reshape(batches.shape):
        parts = np.array_split(row, ranks * _passes(job))
        by_rank = [parts[rank::ranks] for rank in range(ranks)]
        if job.max_tokens is None:
            yield by_rank
        else:
            yield [_fitting(passes[0], job.max_tokens, padded=True) for passes in by_rank]


def _packed(job: LengthsJob, lengths: Ints, pack: int) -> dict[str, TimedSteps]:
    """Return the steps of the ways ``cut`` and ``cut_masked``, where samples are packed into sequences of ``pack`` tokens.

    All samples of ``lengths`` (n,) tokens are put behind one another and cut every ``pack`` tokens. Without masks a sequence
    costs as much as one sample of that length, with masks as much as its pieces. Empty where there is not one whole step.
    """
    ends = np.cumsum(lengths)
    # A piece ends where its sample does, or its sequence; its last token tells which sequence it is in.
    cuts = np.union1d(ends, np.arange(pack, int(ends[-1]) + 1, pack))
    pieces, sequences = np.diff(cuts, prepend=0), (cuts - 1) // pack
    ranks, passes = len(job.speeds), job.passes if job.max_tokens is None else max(job.max_tokens // pack, 1)
    by_sequence = np.split(pieces, np.flatnonzero(np.diff(sequences)) + 1)
    steps = int(ends[-1]) // (pack * ranks * passes)
    if not steps:
        return {}
    masked = [
        [by_sequence[step * ranks * passes + rank * passes :][:passes] for rank in range(ranks)]
        for step in range(steps)
    ]
    unmasked = [[[np.array([pack])] * passes] * ranks] * steps
    return {"cut": timed(job, unmasked, padded=False), "cut_masked": timed(job, masked, padded=False)}
