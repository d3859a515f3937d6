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
_RESAMPLES = 1000
_RANGE = (2.5, 97.5)
# Samples: beyond these, those of a histogram are not laid out, and no more are drawn.
_MOST_LAID_OUT = _MOST_DRAWN = 10**7
WAYS = ("padded", "grouped", "sorted", "unpadded", "lpt", "karmarkar_karp", "cp_sat", "window", "cut", "cut_masked")
IN_THE_BATCH = ("padded", "sorted", "unpadded", "lpt", "karmarkar_karp", "cp_sat")
"""Ways that share out the same global batches, step by step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleCost:
    """What a sample of L tokens costs, ``per_token L + per_square L^2 + per_sample``; what passes and steps cost besides."""

    per_token: float = 1.0
    per_square: float = DEFAULT_PER_SQUARE
    per_sample: float = 0.0
    per_pass: float = 0.0
    per_step: float = 0.0

    def __post_init__(self) -> None:
        values = astuple(self)
        if not all(math.isfinite(value) and value >= 0 for value in values) or not sum(values[:3]) > 0:
            given = ",".join(f"{value:g}" for value in values)
            raise InputError("cost", f"is {given}", "give finite numbers of 0 or more, one of the first three above 0")

    def of(self, lengths: ArrayLike) -> Floats:
        """Return (n,) costs of samples of (n,) ``lengths`` tokens."""
        tokens = np.asarray(lengths, dtype=np.float64)
        costs: Floats = self.per_token * tokens + self.per_square * tokens**2 + self.per_sample
        return costs


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LengthsJob:
    """How a job takes its global batches."""

    speeds: Floats
    """(R,) of the ranks, relative to one another."""
    total_batch: int
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
    """What K steps took: all (K,)."""

    seconds: Floats
    busy: Floats
    """Mean over ranks of the time they compute."""
    tokens: Floats
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
    first: list[list[Ints]]
    """By rank and pass: the lengths."""


def draw(lengths: Ints, counts: Ints, total: int, batches: int, seed: int) -> Ints:
    """Return (K, total) lengths of up to ``batches`` whole global batches in random order, at most one epoch.

    ``counts``: (n,) samples of each of the (n,) lengths. Raises InputError where there are too few for one batch.
    """
    chance, samples = np.random.default_rng(seed), int(counts.sum())
    wanted = total * min(batches, samples // total, max(_MOST_DRAWN // total, 1))
    if not wanted:
        raise InputError("total_batch", f"is {total}", f"the file has {samples} samples: give at most so many")
    if samples <= _MOST_LAID_OUT:
        drawn = chance.permutation(np.repeat(lengths, counts))[:wanted]
    else:
        drawn = chance.choice(lengths, wanted, p=counts / counts.sum())
    return drawn.reshape(-1, total)


def compare(
    batches: Ints, job: LengthsJob, limit_s: float, seed: int = 0, advance: Callable[[int, str], None] = lambda *_: None
) -> WaysCompared:
    """Return the steps of every way over the (K, B) lengths of ``batches``; ``limit_s``: seconds for all of the solver's work.

    Raises InputError for a sample longer than ``job.max_tokens``.
    """
    if job.max_tokens is not None and (longest := int(batches.max())) > job.max_tokens:
        raise InputError("max_tokens", f"is {job.max_tokens}", f"the longest sample has {longest}: give that or more")
    ranks, count, passes = len(job.speeds), batches.shape[1], _passes(job)
    costs, gaps, best, left_s = job.cost.of(batches), list[float](), list[Ints](), limit_s
    for index, batch_costs in enumerate(costs):
        advance(index, "cp_sat")
        begun_s = time.perf_counter()
        proven = solve(batch_costs, job.speeds, left_s / (len(costs) - index), seed, WORTH_SOLVING)
        left_s -= time.perf_counter() - begun_s
        gaps.append(proven.seconds / proven.bound - 1)
        best.append(proven.places)

    def assigned(choose: Callable[[Floats], Ints], lengths: Ints = batches, padded: bool = False) -> TimedSteps:
        shared = (_by_place(job, row, choose(job.cost.of(row)), padded) for row in lengths)
        return timed(job, shared, padded)

    blocks = np.array_split(np.arange(count), ranks)
    in_order = np.repeat(np.arange(ranks), [len(block) for block in blocks])
    found = {
        way: timed(job, (_in_order(job, row, in_order, padded) for row in batches), padded)
        for way, padded in (("padded", True), ("unpadded", False))
    }
    found["grouped"] = timed(job, _grouped(job, batches), padded=True)
    found["sorted"] = assigned(lambda row: by_length(row, job.speeds, passes), padded=True)
    found["lpt"] = assigned(lambda row: in_passes(row, lpt(row, job.speeds), ranks, passes))
    if is_differenced(costs[0], job.speeds):
        found["karmarkar_karp"] = assigned(lambda row: in_passes(row, karmarkar_karp(row, ranks), ranks, passes))
    places = [in_passes(row, proven, ranks, passes) for row, proven in zip(costs, best, strict=True)]
    shared = [_by_place(job, row, each) for row, each in zip(batches, places, strict=True)]
    found["cp_sat"] = timed(job, shared, padded=False)
    if job.window > 1:
        order = regrouped(costs.ravel(), ranks, count, job.window)
        moved = batches.ravel()[order].reshape(batches.shape)
        found["window"] = assigned(lambda row: balanced(row, job.speeds, passes), moved)
    if job.pack is not None:
        found |= _packed(job, batches.ravel(), job.pack)
    return WaysCompared(
        steps={way: found[way] for way in WAYS if way in found},
        gaps=gaps,
        solver_s=limit_s - left_s,
        first=shared[0],
    )


def speedup(today: TimedSteps, other: TimedSteps, paired: bool, seed: int) -> tuple[float, float, float]:
    """Return how many times as many tokens per second ``other`` makes as ``today``, and the 95 % interval by the bootstrap.

    Steps are drawn again with replacement; ``paired``: both ways take the same batches.
    """
    chance = np.random.default_rng(seed)
    picks = [chance.integers(0, len(steps.seconds), (_RESAMPLES, len(steps.seconds))) for steps in (today, other)]
    if paired:
        picks[1] = picks[0]
    rates = [
        steps.tokens[pick].sum(axis=1) / steps.seconds[pick].sum(axis=1)
        for steps, pick in zip((today, other), picks, strict=True)
    ]
    low, high = np.percentile(rates[1] / rates[0], _RANGE)
    return today.per_token / other.per_token, float(low), float(high)


def regrouped(costs: Floats, ranks: int, total: int, window: int) -> Ints:
    """Return an order of (n,) samples in which the outliers of every ``window`` global batches come together.

    An outlier costs more than a rank has on average, so that all others wait for it; ``ranks`` of them in one batch wait for
    each other alone. What is left goes, costliest first, to the batch that it makes least longer, of such to the one that
    has least. A sample moves by less than ``window`` global batches; what fills no whole stretch of them stays.
    """
    order, stretch = np.arange(len(costs)), total * window
    for begin in range(0, len(costs) - stretch + 1, stretch):
        own = costs[begin : begin + stretch]
        ranked = np.argsort(-own, kind="stable")
        outliers = int((own > own.sum() / (window * ranks)).sum())
        loads, longest, members = np.zeros(window), np.zeros(window), [list[int]() for _ in range(window)]
        for position, sample in enumerate(ranked.tolist()):
            batch = position // ranks
            if position >= outliers:
                before, after = (np.maximum(load / ranks - longest, 0.0) for load in (loads, loads + own[sample]))
                is_full = np.array([len(batch) == total for batch in members])
                batch = int(np.lexsort((loads, np.round((after - before) / own[sample], 6), is_full))[0])
            members[batch].append(sample)
            loads[batch] += own[sample]
            longest[batch] = max(longest[batch], own[sample])
        order[begin : begin + stretch] = begin + np.concatenate([np.sort(batch) for batch in members])
    return order


def timed(job: LengthsJob, steps: Iterator[list[list[Ints]]] | list[list[list[Ints]]], padded: bool) -> TimedSteps:
    """Return what steps take whose passes, by rank, are the lengths in them."""
    rows, most = [], 0
    for ranks in steps:
        passes = max(len(rank) for rank in ranks)
        times = np.zeros((len(ranks), passes))
        tokens, computed = 0, 0
        for number, rank in enumerate(ranks):
            for index, lengths in enumerate(rank):
                if not len(lengths):
                    continue
                there = np.full_like(lengths, lengths.max()) if padded else lengths
                times[number, index] = (job.cost.of(there).sum() + job.cost.per_pass) / job.speeds[number]
                in_pass = int(there.sum())
                tokens, computed, most = tokens + int(lengths.sum()), computed + in_pass, max(most, in_pass)
        slowest = times.max(axis=0).sum() if job.sharded else times.sum(axis=1).max()
        rows.append((slowest + job.cost.per_step, times.sum(axis=1).mean(), tokens, computed))
    seconds, busy, real, made = np.array(rows, dtype=np.float64).reshape(-1, 4).T
    return TimedSteps(seconds, busy, real, made, most)


def _passes(job: LengthsJob) -> int:
    return job.passes if job.max_tokens is None else 1


def _in_order(job: LengthsJob, lengths: Ints, ranks: Ints, padded: bool) -> list[list[Ints]]:
    """Return each rank's passes in the order of its samples."""
    mine = [lengths[ranks == rank] for rank in range(len(job.speeds))]
    if job.max_tokens is None:
        return [np.array_split(each, job.passes) for each in mine]
    return [_fitting(each, job.max_tokens, padded) for each in mine]


def _by_place(job: LengthsJob, lengths: Ints, places: Ints, padded: bool = False) -> list[list[Ints]]:
    """Return the lengths at each place, by rank; with a limit on tokens in as few passes as that needs."""
    passes = _passes(job)
    groups = [[lengths[places == rank * passes + index] for index in range(passes)] for rank in range(len(job.speeds))]
    if job.max_tokens is None:
        return groups
    longest_first = [np.sort(group[0])[::-1] for group in groups]
    return [_fitting(each, job.max_tokens, padded) for each in longest_first]


def _fitting(lengths: Ints, most: int, padded: bool) -> list[Ints]:
    """Return passes of at most ``most`` tokens: padded ones of neighbours, others by first fit."""
    passes: list[list[int]] = []
    for length in lengths.tolist():
        tried = passes[-1:] if padded else passes
        for each in tried:
            if ((len(each) + 1) * max(length, *each) if padded else sum(each) + length) <= most:
                each.append(length)
                break
        else:
            passes.append([length])
    return [np.array(each) for each in passes]


def _grouped(job: LengthsJob, batches: Ints) -> Iterator[list[list[Ints]]]:
    """Yield steps as transformers' ``group_by_length`` makes them: sorted in stretches, batches dealt to ranks in turn."""
    flat, ranks = batches.ravel(), len(job.speeds)
    own = max(batches.shape[1] // ranks, 1)
    stretch = own * max(1, min(len(flat) // (4 * own), _MEGABATCH))
    pieces = [np.sort(flat[begin : begin + stretch])[::-1] for begin in range(0, len(flat), stretch)]
    for row in np.concatenate(pieces).reshape(batches.shape):
        parts = np.array_split(row, ranks * _passes(job))
        mine = [parts[rank::ranks] for rank in range(ranks)]
        yield mine if job.max_tokens is None else [_fitting(each[0], job.max_tokens, True) for each in mine]


def _packed(job: LengthsJob, lengths: Ints, pack: int) -> dict[str, TimedSteps]:
    """Return the steps on sequences of ``pack`` tokens, cut from all samples behind one another, without masks and with."""
    ends = np.cumsum(lengths)
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
    whole = [[[np.array([pack])] * passes] * ranks] * steps
    return {"cut": timed(job, whole, padded=False), "cut_masked": timed(job, masked, padded=False)}
