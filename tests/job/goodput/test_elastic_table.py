"""The elastic table: the total batch kept exactly, each sample once, and proofs of absence checked by enumeration.
Learning-rate rules against their papers' definitions.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddltool.analyzers.job.goodput import lr_rules
from ddltool.analyzers.job.goodput.elastic_table import ElasticLimits, Split, elastic_table, find_split
from ddltool.analyzers.job.goodput.lr_rules import GradientStatistics, LrRule, register, rule, rule_names
from ddltool.analyzers.job.goodput.throughput import efficiency
from ddltool.errors import InputError

splits = st.builds(
    Split, world_size=st.integers(1, 20), total_batch_size=st.integers(1, 300), accumulation_steps=st.integers(0, 8)
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


scales = st.floats(0.1, 1e4)
nonnegative = st.floats(1e-6, 1e6)


def test_worked_numbers() -> None:
    # Goyal et al.: 0.1 at 256 images becomes 3.2 at 8192
    assert 0.1 * rule("linear").factor(8192 / 256) == pytest.approx(3.2)
    assert rule("sqrt").factor(16) == 4
    assert rule("legw").factor(16) == 4
    assert rule("constant").factor(16) == 1
    # LEGW: 32 times the batch, 32 times the warm-up epochs: as many warm-up steps as before
    assert rule("legw").warmup_epochs(32, 0.3125) == 10
    assert rule("linear").warmup_epochs(32, 5) == 5
    # AdaScale by hand: (3 + 1) / (3 / 4 + 1)
    assert rule("adascale").factor(4, GradientStatistics(sqr=1, var=3)) == pytest.approx(16 / 7)


@given(scales, nonnegative, nonnegative)
def test_adascale_lies_between_one_and_linear(scale: float, sqr: float, var: float) -> None:
    gain = rule("adascale").factor(scale, GradientStatistics(sqr=sqr, var=var))
    low, high = sorted((1.0, scale))
    assert low * (1 - 1e-12) <= gain <= high * (1 + 1e-12)
    assert rule("adascale").factor(scale, GradientStatistics(sqr=0, var=var)) == pytest.approx(
        scale
    )  # identity at noise
    assert rule("adascale").factor(scale, GradientStatistics(sqr=sqr, var=0)) == pytest.approx(1)  # no gain without


@given(st.integers(1, 4096), st.integers(1, 64), st.floats(0, 1e5))
def test_adascale_over_scale_is_statistical_efficiency(initial: int, times: int, noise: float) -> None:
    statistics = GradientStatistics.from_noise_scale(noise, initial)
    gain = rule("adascale").factor(times, statistics)
    assert gain / times == pytest.approx(float(efficiency(noise, initial * times, initial)))
    assert rule("adascale").steps_at_initial(times, statistics) == gain


@given(scales)
def test_the_initial_batch_changes_nothing_and_rules_are_monotone(scale: float) -> None:
    statistics = GradientStatistics(sqr=2.0, var=5.0)
    for name in rule_names():
        one = rule(name)
        assert one.factor(1.0, statistics) == pytest.approx(1)
        assert one.warmup_epochs(1.0, 3.0) == 3.0
        assert one.factor(scale * 1.01, statistics) >= one.factor(scale, statistics)


def test_warm_up_rises_in_a_line_to_the_factor() -> None:
    legw = rule("legw")
    values = [legw.warmed_factor(4, epoch, 1.0) for epoch in (-1, 0, 1, 2, 4, 9)]
    assert values == pytest.approx([0, 0, 0.5, 1.0, 2.0, 2.0])
    assert rule("linear").warmed_factor(4, 0, 0.0) == 4  # no warm-up


def test_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lr_rules, "_RULES", dict(lr_rules._RULES))  # known to this test alone

    class Cubic(LrRule):
        name = "cubic-root"

        def factor(self, scale: float, statistics: GradientStatistics | None = None) -> float:
            return float(scale ** (1 / 3))

    register(Cubic())
    assert rule("cubic-root").factor(8) == pytest.approx(2)
    assert rule("cubic-root").steps_at_initial(8) == 8
    with pytest.raises(InputError, match="exists"):
        register(Cubic())
    with pytest.raises(InputError, match="no name"):
        register(LrRule())


def test_errors_of_rules() -> None:
    with pytest.raises(InputError, match='did you mean "linear"'):
        rule("liner")
    with pytest.raises(InputError, match="needs gradient statistics"):
        rule("adascale").factor(2)
    for scale in (0.0, -1.0, math.nan, math.inf):
        for name in ("constant", "linear", "sqrt", "legw"):
            with pytest.raises(InputError, match="scale"):
                rule(name).factor(scale)
    assert {name for name in rule_names() if rule(name).needs_statistics} == {"adascale"}
    for sqr, var in ((-1.0, 1.0), (-1.0, 3.0), (3.0, -0.5), (math.nan, 1.0), (math.inf, 1.0), (0.0, 0.0)):
        with pytest.raises(InputError):
            GradientStatistics(sqr=sqr, var=var)
