"""The elastic table: the total batch kept exactly, each sample once, and proofs of absence checked by enumeration."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.job.goodput.elastic_table import ElasticLimits, Split, elastic_table, find_split
from ddltool.analyzers.job.goodput.lr_rules import GradientStatistics
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
    )
)


def some_batches_exist(total: int, world: int, allowed: ElasticLimits) -> bool:
    """By trying: can ranks x passes batches within the limits add up to the total, whatever they are?"""
    low, high = allowed.min_local_batch_size, allowed.max_local_batch_size
    most = total if allowed.max_accumulation_steps is None else allowed.max_accumulation_steps + 1
    for passes in range(1, most + 1):
        slots = world * passes
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
    for fewer in range(split.accumulation_steps):  # no split with fewer passes
        short = ElasticLimits(
            max_local_batch_size=allowed.max_local_batch_size,
            min_local_batch_size=allowed.min_local_batch_size,
            max_accumulation_steps=fewer,
        )
        assert find_split(total, world, short)[0] is None


@given(splits)
def test_ranks_and_passes_add_up(split: Split) -> None:
    sizes = split.local_batch_sizes
    assert sizes.sum() == split.total_batch_size
    per_rank = sizes.sum(axis=1)
    assert (per_rank == per_rank.max()).sum() == (split.remainder or split.world_size)


@given(splits, st.integers(1, 2000))
def test_a_last_step_of_fewer_samples_fits_as_a_full_one_does(split: Split, samples: int) -> None:
    left = samples % split.total_batch_size or split.total_batch_size
    sizes = split.sizes_of(left)
    assert sizes.sum() == left
    assert sizes.max() <= split.local_batch_sizes.max()
    passes, per_rank = sizes.shape[1], sizes.sum(axis=1)
    assert passes <= split.accumulation_steps + 1
    if passes > 1:  # not in fewer passes
        assert per_rank.max() > (passes - 1) * split.local_batch_sizes.max()
    assert per_rank.max() - per_rank.min() <= 1


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
        batches = row.local_batch_sizes
        more = row.ranks_with_one_more
        assert (
            sum(batches[0]) * (more or row.world_size) + sum(batches[-1]) * (row.world_size - (more or row.world_size))
            == 256
        )
        assert row.learning_rates == pytest.approx({"linear": 0.4, "sqrt": 0.2, "adascale": 0.1 * 16 / 7, "legw": 0.2})
        assert row.steps_per_epoch == 8
        assert row.last_step_samples == 1797 - 7 * 256
    assert rows[0].accumulation_steps == 3
    assert (rows[2].local_batch_sizes, rows[2].ranks_with_one_more) == ([[43, 43], [43, 42]], 1)
    assert (rows[6].local_batch_sizes, rows[6].ranks_with_one_more) == ([[37], [36]], 4)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), limits)
def test_nearest_totals(total: int, world: int, allowed: ElasticLimits) -> None:
    (row,) = elastic_table(total, [world], allowed)
    possible = [t for t in range(1, 6 * 12 * 7 + 50) if find_split(t, world, allowed)[0]]
    below = [t for t in possible if t < total][-1:]
    above = [t for t in possible if t > total][:1]
    assert row.nearest_total_batch_sizes == ([] if row.local_batch_sizes else below + above)


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
    with pytest.raises(InputError, match="min_local_batch_size: is 5"):
        ElasticLimits(max_local_batch_size=4, min_local_batch_size=5)
    with pytest.raises(InputError, match="accumulation"):
        ElasticLimits(max_local_batch_size=4, max_accumulation_steps=-1)
