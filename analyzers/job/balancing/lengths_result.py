"""The record of a comparison of ways to share out samples by length, from which tables, pages and JSON are made."""

from __future__ import annotations

from dataclasses import asdict
from typing import Literal

import numpy as np

from ddltool.analyzers.job.balancing.lengths import IN_THE_BATCH, LengthsJob, TimedSteps, WaysCompared, speedup
from ddltool.arrays import Ints
from ddltool.errors import known
from ddltool.results import LengthCost, LengthsResult, LengthStatistics, RankLengths, RemedyFigures


def lengths_result(
    job: LengthsJob,
    table: tuple[Ints, Ints],
    found: WaysCompared,
    *,
    today: str,
    seed: int,
    unit: Literal["s", "tokens"],
    source: str,
) -> LengthsResult:
    """Return the record of a comparison.

    Args:
        job: ranks, passes and the cost of a sample.
        table: two (n,) arrays: the lengths in the file, in tokens, and how many samples have each.
        found: the ways that were tried, and their times.
        today: the way that speedups are relative to. Raises InputError where it was not tried.
        seed: of the drawn batches and the bootstrap.
        unit: of the cost of a sample.
        source: where that cost comes from, in words.
    """
    today = known("today", today, [*found.steps])

    def remedy(way: str, steps: TimedSteps) -> RemedyFigures:
        """Return the figures of one way of sharing samples out, with its speedup over ``today``.

        Two ways that share out the same batches step by step are compared in pairs, which narrows the interval.
        """
        paired = {way, today} <= {*IN_THE_BATCH}
        gain, low, high = speedup(found.steps[today], steps, paired, seed)
        waiting_share = float(1 - steps.busy.sum() / (steps.seconds - job.cost.per_step).sum())
        return RemedyFigures(
            step=float(steps.seconds.mean()),
            speedup=gain,
            speedup_low=low,
            speedup_high=high,
            padding_share=float(1 - steps.tokens.sum() / steps.computed.sum()),
            waiting_share=max(waiting_share, 0.0),  # rounding may leave it just below 0
            most_tokens=steps.most_tokens,
        )

    ranks = [  # what the solver gives each rank of the first batch; a pass is an array of its samples' lengths
        RankLengths(
            rank=rank,
            samples=sum(len(lengths) for lengths in passes),
            tokens=sum(int(lengths.sum()) for lengths in passes),
            cost=float(sum(job.cost.of(lengths).sum() for lengths in passes)),
            passes=[lengths.tolist() for lengths in passes],
        )
        for rank, passes in enumerate(found.first)
    ]
    return LengthsResult(
        lengths=length_statistics(*table),
        replicas=len(job.speeds),
        speeds=job.speeds.tolist(),
        total_batch=job.total_batch,
        accumulation=job.passes,
        max_tokens=job.max_tokens,
        sharded=job.sharded,
        window=job.window,
        batches=len(found.gaps),
        seed=seed,
        cost=LengthCost(**asdict(job.cost), unit=unit, source=source),
        today=today,
        remedies={way: remedy(way, steps) for way, steps in found.steps.items()},
        gap=max(float(np.mean(found.gaps)), 0.0),
        largest_gap=max(*found.gaps, 0.0),
        solver_seconds=found.solver_s,
        assignments=ranks,
    )


def length_statistics(lengths: Ints, counts: Ints) -> LengthStatistics:
    """Return mean and percentiles, in tokens, over at least one sample; ``counts`` (n,) samples have each length (n,).

    A percentile is the smallest length that at least that share of the samples do not exceed.
    """
    order = np.argsort(lengths)
    cumulative_counts = np.cumsum(counts[order])
    samples = int(cumulative_counts[-1])
    median, p90, p99, longest = (
        float(lengths[order][np.searchsorted(cumulative_counts, share * samples)]) for share in (0.5, 0.9, 0.99, 1.0)
    )
    mean = float((lengths * counts).sum(dtype=np.float64) / samples)
    return LengthStatistics(samples=samples, mean=mean, median=median, p90=p90, p99=p99, longest=int(longest))
