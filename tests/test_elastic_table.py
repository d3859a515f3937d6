"""The elastic table: the total batch kept exactly, each sample once, and proofs of absence checked by enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.goodput.elastic_table import ElasticLimits, Split, elastic_table, find_split, last_step
from ddltool.analyzers.goodput.lr_rules import GradientStatistics
from ddltool.errors import InputError

splits = st.builds(
    Split,
    world_size=st.integers(1, 20),
    total_batch_size=st.integers(1, 300),
    accumulation_steps=st.integers(0, 8),
)
limits = st.integers(1, 12).flatmap(
    lambda most: st.builds(
        ElasticLimits,
        max_local_batch_size=st.just(most),
        min_local_batch_size=st.integers(1, most),
        max_accumulation_steps=st.one_of(st.none(), st.integers(0, 6)),
        equal_batches=st.booleans(),
    )
)


def some_batches_exist(total: int, world: int, allowed: ElasticLimits) -> bool:
    """By trying: can ranks x passes batches within the limits add up to the total, whatever they are?"""
    low, high = allowed.min_local_batch_size, allowed.max_local_batch_size
    most = total if allowed.max_accumulation_steps is None else allowed.max_accumulation_steps + 1
    for passes in range(1, most + 1):
        slots = world * passes
        if allowed.equal_batches:
            if any(slots * size == total for size in range(low, high + 1)):
                return True
            continue
        reachable = {0}
        for _ in range(slots):
            reachable = {done + size for done in reachable for size in range(low, high + 1) if done + size <= total}
        if total in reachable:
            return True
    return False


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), limits)
def test_a_split_is_within_the_limits_or_none_exists(total: int, world: int, allowed: ElasticLimits) -> None:
    split, reason = find_split(total, world, allowed)
    assert (split is not None) == some_batches_exist(total, world, allowed) == (reason == "")
    if split is None:
        return
    sizes = split.local_batch_sizes
    assert sizes.sum() == total
    assert allowed.min_local_batch_size <= sizes.min()
    assert sizes.max() <= allowed.max_local_batch_size
    assert sizes.max() - sizes.min() <= 1
    assert sizes.shape == (world, split.accumulation_steps + 1)
    assert split.is_equal == (sizes.min() == sizes.max())
    assert split.is_equal or not allowed.equal_batches
    for fewer in range(split.accumulation_steps):  # no split with fewer passes
        short = ElasticLimits(
            max_local_batch_size=allowed.max_local_batch_size,
            min_local_batch_size=allowed.min_local_batch_size,
            max_accumulation_steps=fewer,
            equal_batches=allowed.equal_batches,
        )
        assert find_split(total, world, short)[0] is None


@given(splits)
def test_ranks_and_passes_add_up(split: Split) -> None:
    sizes = split.local_batch_sizes
    assert sizes.sum() == split.total_batch_size
    assert split.gradient_weights.sum() == pytest.approx(1)
    per_rank = sizes.sum(axis=1)
    assert (per_rank == per_rank.max()).sum() == (split.remainder or split.world_size)


@given(splits, st.integers(1, 2000))
def test_an_epoch_takes_each_sample_once(split: Split, samples: int) -> None:
    steps = -(-samples // split.total_batch_size)
    taken = np.zeros(samples, dtype=int)
    for step in range(steps):
        for share in split.shares(samples, step):
            taken[share.start : share.stop] += 1
            assert 0 <= share.rank < split.world_size
            assert 0 <= share.micro_step <= split.accumulation_steps
    assert (taken == 1).all()
    with pytest.raises(InputError, match="fewer steps"):
        list(split.shares(samples, steps))
    with pytest.raises(InputError, match="fewer steps"):
        list(split.shares(samples, -1))


@given(st.lists(st.integers(1, 16), min_size=1, max_size=8), st.integers(1, 64), st.integers(1, 1500))
def test_resizing_between_steps_loses_and_repeats_nothing(worlds: list[int], total: int, samples: int) -> None:
    allowed = ElasticLimits(max_local_batch_size=64)
    seen: list[int] = []
    for step, world in zip(range(-(-samples // total)), itertools.cycle(worlds), strict=False):
        split, _ = find_split(total, world, allowed)
        split = split or find_split(total, 1, allowed)[0]  # more workers than samples: one of them works
        assert split is not None
        for share in split.shares(samples, step):
            seen += range(share.start, share.stop)
    assert seen == list(range(samples))


@given(splits, st.integers(1, 2000))
def test_the_last_step_says_who_has_what(split: Split, samples: int) -> None:
    last = last_step(split, samples)
    left = samples % split.total_batch_size
    assert last.samples == left
    if not left:
        assert last.ranks_without_samples == ()
        return
    shares = list(split.shares(samples, samples // split.total_batch_size))
    per_rank = np.zeros(split.world_size, dtype=int)
    passes = np.zeros(split.world_size, dtype=int)
    for share in shares:
        per_rank[share.rank] += share.stop - share.start
        passes[share.rank] += 1
    assert per_rank.sum() == left
    assert list(last.ranks_without_samples) == np.flatnonzero(per_rank == 0).tolist()
    assert last.passes == passes.max()
    assert max(share.stop - share.start for share in shares) <= split.local_batch_sizes.max()
    if last.passes > 1:  # not in fewer passes
        assert per_rank.max() > (last.passes - 1) * split.local_batch_sizes.max()
    assert last.ranks_with_one_more == (per_rank > left // split.world_size).sum()


def test_total_256_on_1_to_16() -> None:
    rows = elastic_table(
        256,
        range(1, 17),
        ElasticLimits(max_local_batch_size=64),
        epoch_samples=1797,
        initial_batch_size=64,
        learning_rate=0.1,
        rules=("linear", "sqrt", "adascale", "legw"),
        statistics=GradientStatistics(sqr=1.0, var=3.0),
    )
    for row in rows:
        assert row.split is not None
        assert row.split.local_batch_sizes.sum() == 256
        assert row.learning_rates == pytest.approx({"linear": 0.4, "sqrt": 0.2, "adascale": 0.1 * 16 / 7, "legw": 0.2})
        assert row.steps_per_epoch == 8
        assert row.last_step is not None
        assert row.last_step.samples == 1797 - 7 * 256
        assert len(row.last_step.ranks_without_samples) == max(0, row.world_size - 5)
    by_world = {row.world_size: row.split for row in rows}
    assert by_world[1].accumulation_steps == 3  # type: ignore[union-attr]
    assert by_world[3].local_batch_sizes.tolist() == [[43, 43], [43, 42], [43, 42]]  # type: ignore[union-attr]
    assert by_world[7].local_batch_sizes.ravel().tolist() == [37] * 4 + [36] * 3  # type: ignore[union-attr]
    equal = elastic_table(256, range(1, 17), ElasticLimits(max_local_batch_size=64, equal_batches=True))
    assert [row.world_size for row in equal if row.split] == [1, 2, 4, 8, 16]
    assert equal[2].reason == "256 is no multiple of 3"
    assert equal[2].nearest_total_batch_sizes == (255, 258)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), limits)
def test_nearest_totals(total: int, world: int, allowed: ElasticLimits) -> None:
    (row,) = elastic_table(total, [world], allowed)
    possible = [t for t in range(1, 6 * 12 * 7 + 50) if find_split(t, world, allowed)[0]]
    below = [t for t in possible if t < total][-1:]
    above = [t for t in possible if t > total][:1]
    assert list(row.nearest_total_batch_sizes) == ([] if row.split else below + above)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"total_batch_size": 0}, "total_batch_size"),
        ({"world_sizes": [0]}, "world_size"),
        ({"epoch_samples": 0}, "epoch_samples"),
        ({"initial_batch_size": 0}, "initial_batch_size"),
        ({"rules": ["linaer"]}, "did you mean"),
        ({"rules": ["adascale"], "initial_batch_size": 4}, "statistics"),
    ],
)
def test_errors(arguments: dict[str, object], message: str) -> None:
    given_: dict[str, object] = {"total_batch_size": 8, "world_sizes": [1], **arguments}
    with pytest.raises(InputError, match=message):
        elastic_table(limits=ElasticLimits(max_local_batch_size=4), **given_)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="local batch"):
        ElasticLimits(max_local_batch_size=4, min_local_batch_size=5)
    with pytest.raises(InputError, match="accumulation"):
        ElasticLimits(max_local_batch_size=4, max_accumulation_steps=-1)
