"""Samples of unequal length: what padding and waiting cost in a job, and what each remedy gains. Start at :func:`compare`.

Global batches are drawn in random order, as training draws them, and each way of sharing out their samples is timed by the
cost of a sample of L tokens, ``a L + b L^2 + c``. A padded pass costs as much as if all of its samples were as long as its
longest. Without padding (samples are concatenated, with masks between them) a pass costs the sum over its samples, so b is
multiplied by the sum of the squared lengths, not by the square of their sum.

The ways (:data:`WAYS`): ``padded`` and ``unpadded`` take samples in order; ``grouped`` is transformers' group_by_length;
``sorted`` cuts the sorted batch; ``lpt``, ``karmarkar_karp`` and ``cp_sat`` assign samples by cost; ``window`` also moves
samples between batches; ``cut`` and ``cut_masked`` pack samples into sequences of one length.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass

import numpy as np
from numpy.typing import ArrayLike

from ddltool.analyzers.job.balancing.assigning import (
    assign_passes,
    balanced,
    by_length,
    is_differenced,
    karmarkar_karp,
    lpt,
    solve,
)
from ddltool.arrays import Floats, Ints
from ddltool.errors import InputError

# Cost of attention per squared token, in units of a token's products with weights. A block of width d has 12 d^2 of these per
# token and, with a causal mask, L d / 2 products of a query with keys and as many with values: L d / (12 d^2) = L / (12 d).
# Width 4096 is that of models of 7 to 8 billion parameters.
_WIDTH = 4096
DEFAULT_PER_SQUARE = 1 / (12 * _WIDTH)
# Number of batches that transformers' LengthGroupedSampler sorts at a time.
_MEGABATCH = 50
# Gap up to which an assignment is good enough to leave the solver out.
WORTH_SOLVING = 1e-3
# Bootstrap samples of a speedup, and the percentiles that bound its 95 % interval.
_RESAMPLES = 1000
_RANGE = (2.5, 97.5)
# Most samples of a histogram that are laid out in memory, and most samples that are drawn.
_MOST_LAID_OUT = _MOST_DRAWN = 10**7
WAYS = ("padded", "grouped", "sorted", "unpadded", "lpt", "karmarkar_karp", "cp_sat", "window", "cut", "cut_masked")
IN_THE_BATCH = ("padded", "sorted", "unpadded", "lpt", "karmarkar_karp", "cp_sat")
"""Ways that share out the same global batches, step by step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleCost:
    """The cost of a sample of L tokens, ``per_token L + per_square L^2 + per_sample``, and of each pass and step besides.

    All are in one unit: seconds, or the cost of one token's products with weights (the defaults).
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
    """The ranks of a job and how they train a global batch."""

    speeds: Floats
    """(R,) speeds of the ranks, relative to one another."""
    total_batch: int
    """Samples of all ranks in a step."""
    cost: SampleCost = SampleCost()
    passes: int = 1
    """Passes of each rank in a step."""
    max_tokens: int | None = None
    """Most tokens in a pass, padding included; each rank then makes as few passes as that needs. None: ``passes`` counts."""
    sharded: bool = False
    """Whether ranks wait for each other in every pass (FSDP), not only once a step (DDP)."""
    window: int = 1
    """Number of global batches between which samples may be moved to make these alike; 1: none are moved."""
    pack: int | None = None
    """Tokens of a packed sequence; None: packing is not compared."""


@dataclass(frozen=True, slots=True, eq=False)
class TimedSteps:
    """The times and tokens of K steps: arrays (K,), times in the unit of the job's :class:`SampleCost`."""

    seconds: Floats
    """Time until the slowest rank ends, the cost of the step itself included."""
    busy: Floats
    """Mean over ranks of the time in which they compute."""
    tokens: Floats
    """Tokens of all samples, without padding."""
    computed: Floats
    """Tokens with padding."""
    most_tokens: int
    """Most tokens in one pass, padding included, which memory depends on."""

    @property
    def per_token(self) -> float:
        """Time of all steps over their tokens."""
        return float(self.seconds.sum() / self.tokens.sum())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WaysCompared:
    """The ways that were tried, and how the solver shares out the first batch."""

    steps: dict[str, TimedSteps]
    """By way, in the order of :data:`WAYS`."""
    gaps: list[float]
    """For each batch, the largest share by which the solver's assignment may be slower than the best one."""
    solver_s: float
    """Seconds that the solver took for all batches."""
    first: list[list[Ints]]
    """By rank and pass: lengths, in tokens, of the samples of the first batch."""


def draw(lengths: Ints, counts: Ints, total: int, batches: int, seed: int) -> Ints:
    """Return (K, total) lengths in tokens of K global batches in random order, as an epoch of training draws them.

    ``counts`` (n,) samples have each of the ``lengths`` (n,); a batch has ``total`` samples. K is ``batches``, or the number of
    whole batches in an epoch if that is smaller. Raises InputError where there are too few samples for one batch.
    """
    rng = np.random.default_rng(seed)
    samples = int(counts.sum())
    wanted = total * min(batches, samples // total, max(_MOST_DRAWN // total, 1))
    if not wanted:
        raise InputError("total_batch", f"is {total}", f"the file has {samples} samples: give at most so many")
    if samples <= _MOST_LAID_OUT:
        drawn = rng.permutation(np.repeat(lengths, counts))[:wanted]
    else:  # of so many samples, drawing with replacement hardly differs from drawing without
        drawn = rng.choice(lengths, wanted, p=counts / counts.sum())
    return drawn.reshape(-1, total)


def compare(
    batches: Ints, job: LengthsJob, limit_s: float, seed: int = 0, advance: Callable[[int, str], None] = lambda *_: None
) -> WaysCompared:
    """Return the times of the steps for every way of sharing out the samples of the same global batches.

    Raises InputError for a sample longer than ``job.max_tokens``.

    Args:
        batches: (K, B) lengths in tokens of the samples of K global batches.
        job: ranks, passes and costs.
        limit_s: seconds for all of the solver's work.
        seed: of the solver.
        advance: called before the solver begins with a batch, with the batch's index and "cp_sat", to show progress.
    """
    longest = int(batches.max()) if job.max_tokens is not None else 0
    if job.max_tokens is not None and longest > job.max_tokens:
        raise InputError("max_tokens", f"is {job.max_tokens}", f"the longest sample has {longest}: give that or more")
    ranks = len(job.speeds)
    batch_size = batches.shape[1]
    passes = _planned_passes(job)
    # First the solver's assignments of all batches, within its time; then the steps of each way.
    costs = job.cost.of(batches)  # (K, B)
    gaps: list[float] = []  # of each batch
    solved_ranks: list[Ints] = []  # of each batch, the rank of each sample
    left_s = limit_s
    for index, batch_costs in enumerate(costs):
        advance(index, "cp_sat")
        begun_s = time.perf_counter()
        # Each batch may use an equal part of the time that is left, so that later ones get what easy ones do not need.
        proven = solve(batch_costs, job.speeds, left_s / (len(costs) - index), seed, WORTH_SOLVING)
        left_s -= time.perf_counter() - begun_s
        gaps.append(proven.seconds / proven.bound - 1)
        solved_ranks.append(proven.rank_of)

    def assigned(choose: Callable[[Floats], Ints], lengths: Ints = batches, padded: bool = False) -> TimedSteps:
        """Return the timed steps of a way that assigns each batch's samples by their costs.

        ``choose``: (B,) costs of a batch -> (B,) places of its samples, ``rank * passes + pass``; ``lengths`` (K, B) in tokens;
        ``padded``: whether a pass is padded to its longest sample.
        """
        shared = (_by_place(job, row, choose(job.cost.of(row)), padded) for row in lengths)
        return time_steps(job, shared, padded)

    # without planning, the first samples of a batch go to the first rank, and so on
    blocks = np.array_split(np.arange(batch_size), ranks)
    in_order = np.repeat(np.arange(ranks), [len(block) for block in blocks])
    steps_by_way = {
        way: time_steps(job, (_in_order(job, row, in_order, padded) for row in batches), padded)
        for way, padded in (("padded", True), ("unpadded", False))
    }
    steps_by_way["grouped"] = time_steps(job, _grouped(job, batches), padded=True)
    steps_by_way["sorted"] = assigned(lambda row: by_length(row, job.speeds, passes), padded=True)
    steps_by_way["lpt"] = assigned(lambda row: assign_passes(row, lpt(row, job.speeds), ranks, passes))
    if is_differenced(costs[0], job.speeds):
        steps_by_way["karmarkar_karp"] = assigned(
            lambda row: assign_passes(row, karmarkar_karp(row, ranks), ranks, passes)
        )
    shared = [
        _by_place(job, lengths, assign_passes(batch_costs, rank_of, ranks, passes))
        for lengths, batch_costs, rank_of in zip(batches, costs, solved_ranks, strict=True)
    ]
    steps_by_way["cp_sat"] = time_steps(job, shared, padded=False)
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
    """Return the tokens per second of ``other`` over those of ``today``, and the ends of this ratio's 95 % interval.

    The interval is by bootstrap: steps are drawn again with replacement. ``paired``: whether both ways took the same batches,
    so that the same steps must be drawn for both.
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
    """Return an order (n,) of the samples, as indices, that puts the outliers of every ``window`` batches together.

    A batch is ``total`` samples in a row, which ``ranks`` ranks divide among themselves; ``window`` batches make a span, within
    which its samples are regrouped. An outlier costs more than a rank has of a batch on average, so that all other ranks wait
    for it; ``ranks`` outliers in one batch wait only for each other. Then come the other samples, costliest first: each joins
    the batch whose time grows least by it, and among equal ones that with the least cost so far. Samples after the last whole
    span keep their places. ``costs``: (n,) of the samples, in any unit.
    """
    order = np.arange(len(costs))
    span = total * window  # samples
    for begin in range(0, len(costs) - span + 1, span):
        batches = _regrouped_span(costs[begin : begin + span], ranks, total, window)  # indices from ``begin`` on
        order[begin : begin + span] = begin + np.concatenate([np.sort(batch) for batch in batches])
    return order


def _regrouped_span(costs: Floats, ranks: int, total: int, window: int) -> list[list[int]]:
    """Return the samples of each of ``window`` batches, as indices in ``costs``, for one span of :func:`regrouped`.

    ``costs`` (total * window,) of the span's samples, ``total`` of which make a batch.
    """
    outliers = int((costs > costs.sum() / (window * ranks)).sum())
    loads = np.zeros(window)  # cost of each batch so far
    longest = np.zeros(window)  # cost of its costliest sample
    members = [list[int]() for _ in range(window)]
    for position, sample in enumerate(np.argsort(-costs, kind="stable").tolist()):
        if position < outliers:
            batch = position // ranks
        else:
            # A batch takes as long as its mean load per rank, or as its costliest sample if that is longer.
            before = np.maximum(loads / ranks - longest, 0.0)
            after = np.maximum((loads + costs[sample]) / ranks - longest, 0.0)
            longer = np.round((after - before) / costs[sample], 6)  # rounded, so that equal ones tie
            is_full = np.array([len(of_batch) == total for of_batch in members])
            batch = int(np.lexsort((loads, longer, is_full))[0])  # by the last key first
        members[batch].append(sample)
        loads[batch] += costs[sample]
        longest[batch] = max(longest[batch], costs[sample])
    return members


def time_steps(job: LengthsJob, steps: Iterator[list[list[Ints]]] | list[list[list[Ints]]], padded: bool) -> TimedSteps:
    """Return the times and tokens of steps whose samples are given.

    ``steps``: for each step, rank and pass, an array of the lengths of the samples in tokens. ``padded``: whether a pass
    computes all of its samples as if they were as long as its longest one.
    """
    rows = []  # of each step: (time, mean time in which a rank computes, tokens, tokens with padding)
    most_computed = 0  # tokens of a pass, with padding
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
                most_computed = max(most_computed, int(computed_lengths.sum()))
        # With FSDP ranks wait for each other in every pass, with DDP at the end of the step.
        slowest = times.max(axis=0).sum() if job.sharded else times.sum(axis=1).max()
        rows.append((slowest + job.cost.per_step, times.sum(axis=1).mean(), tokens, computed))
    seconds, busy, all_tokens, all_computed = np.array(rows, dtype=np.float64).reshape(-1, 4).T
    return TimedSteps(seconds, busy, all_tokens, all_computed, most_computed)


def _planned_passes(job: LengthsJob) -> int:
    """Return the number of passes that a rank's samples are divided among.

    It is 1 where passes are limited by tokens: then each rank's samples are divided into passes afterwards.
    """
    return job.passes if job.max_tokens is None else 1


def _in_order(job: LengthsJob, lengths: Ints, ranks: Ints, padded: bool) -> list[list[Ints]]:
    """Return the lengths of a batch's samples by rank and pass, each rank's in their given order.

    ``lengths`` (B,) of the samples in tokens, ``ranks`` (B,) the rank of each; ``padded``: whether passes are padded, so that
    the limit of tokens includes padding.
    """
    by_rank = [lengths[ranks == rank] for rank in range(len(job.speeds))]
    if job.max_tokens is None:
        return [np.array_split(own_lengths, job.passes) for own_lengths in by_rank]
    return [_fitting(own_lengths, job.max_tokens, padded) for own_lengths in by_rank]


def _by_place(job: LengthsJob, lengths: Ints, places: Ints, padded: bool = False) -> list[list[Ints]]:
    """Return the lengths of a batch's samples by rank and pass, from their places (B,), ``rank * passes + pass``.

    With a limit of tokens each rank's samples are cut, longest first, into as few passes as keep it.
    """
    passes = _planned_passes(job)
    groups = [[lengths[places == rank * passes + index] for index in range(passes)] for rank in range(len(job.speeds))]
    if job.max_tokens is None:
        return groups
    longest_first = [np.sort(group[0])[::-1] for group in groups]
    return [_fitting(own_lengths, job.max_tokens, padded) for own_lengths in longest_first]


def _fitting(lengths: Ints, most_tokens: int, padded: bool) -> list[Ints]:
    """Return ``lengths`` (n,) cut into passes of at most ``most_tokens`` tokens, padding included.

    Padded passes take neighbours in the given order, which keeps padding small; others are filled by first fit.
    """
    passes: list[list[int]] = []
    for length in lengths.tolist():
        candidates = passes[-1:] if padded else passes
        for members in candidates:
            tokens = (len(members) + 1) * max(length, *members) if padded else sum(members) + length
            if tokens <= most_tokens:
                members.append(length)
                break
        else:  # it fits into no pass so far
            passes.append([length])
    return [np.array(members) for members in passes]


def _grouped(job: LengthsJob, batches: Ints) -> Iterator[list[list[Ints]]]:
    """Yield each step's lengths by rank and pass, as transformers' ``group_by_length`` makes them.

    The (K, B) lengths of ``batches`` are sorted within spans of up to 50 batches of one rank, then dealt to the ranks in turn,
    so that the samples that ranks compute at the same time are about equally long.
    """
    flat = batches.ravel()
    ranks = len(job.speeds)
    rank_batch = max(batches.shape[1] // ranks, 1)
    span = rank_batch * max(1, min(len(flat) // (4 * rank_batch), _MEGABATCH))  # at most a quarter of all samples
    sorted_spans = [np.sort(flat[begin : begin + span])[::-1] for begin in range(0, len(flat), span)]
    for row in np.concatenate(sorted_spans).reshape(batches.shape):
        passes = np.array_split(row, ranks * _planned_passes(job))
        by_rank = [passes[rank::ranks] for rank in range(ranks)]
        if job.max_tokens is None:
            yield by_rank
        else:
            yield [_fitting(own_passes[0], job.max_tokens, padded=True) for own_passes in by_rank]


def _packed(job: LengthsJob, lengths: Ints, pack: int) -> dict[str, TimedSteps]:
    """Return the steps of the ways ``cut`` and ``cut_masked``, where samples are packed into sequences of ``pack`` tokens.

    All samples, of ``lengths`` (n,) tokens, are concatenated and cut every ``pack`` tokens. Without masks a sequence costs as
    much as one sample of that length, with masks as much as its pieces. {} where there is not even one whole step.
    """
    sample_ends = np.cumsum(lengths)
    tokens = int(sample_ends[-1])
    # A piece ends where its sample or its sequence ends; the index of its last token, piece_ends - 1, tells its sequence.
    piece_ends = np.union1d(sample_ends, np.arange(pack, tokens + 1, pack))
    pieces = np.diff(piece_ends, prepend=0)  # their lengths
    sequences = (piece_ends - 1) // pack
    by_sequence = np.split(pieces, np.flatnonzero(np.diff(sequences)) + 1)
    # Each pass takes one sequence; with a limit of tokens a rank makes as many passes as sequences fit into it.
    ranks = len(job.speeds)
    passes = job.passes if job.max_tokens is None else max(job.max_tokens // pack, 1)
    steps = tokens // (pack * ranks * passes)
    if not steps:
        return {}
    masked = [
        [by_sequence[step * ranks * passes + rank * passes :][:passes] for rank in range(ranks)]
        for step in range(steps)
    ]
    unmasked = [[[np.array([pack])] * passes] * ranks] * steps
    return {"cut": time_steps(job, unmasked, padded=False), "cut_masked": time_steps(job, masked, padded=False)}
