"""Paired comparisons: against scipy's t interval, coverage on drawn data, and what is no evidence."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from ddltool.analyzers.cluster.sweep import MEASURES, compare
from ddltool.errors import InputError
from ddltool.simulation_results import SweepCell, SweepFigures

Replays = list[SweepCell]


def replays(ratios: dict[tuple[str, int], float], hardness: dict[str, float] | None = None) -> Replays:
    """Two policies, "a" at ``ratio`` times the figures of "b"."""
    made = []
    for (workload, seed), ratio in ratios.items():
        base = (hardness or {}).get(workload, 100.0)
        made += [replay("a", workload, seed, base * ratio), replay("b", workload, seed, base)]
    return made


def replay(policy: str, workload: str, seed: int, value: float) -> SweepCell:
    figures = SweepFigures.model_construct(**dict.fromkeys(SweepFigures.model_fields, value))
    return SweepCell.model_construct(workload=workload, policy=policy, seed=seed, figures=figures)


def test_agrees_with_scipys_paired_t_test() -> None:
    ratios = {("w1", 0): 0.8, ("w2", 0): 0.95, ("w3", 0): 0.85, ("w4", 0): 1.02}
    result = compare(replays(ratios, {"w1": 1e6, "w2": 3.0}), "a", "b")
    logs = np.log(list(ratios.values()))
    low, high = stats.t.interval(0.95, 3, loc=logs.mean(), scale=stats.sem(logs))
    assert result.unit == "workload"
    assert [row.measure for row in result.comparisons] == list(MEASURES)
    for row in result.comparisons:
        assert row.ratio == pytest.approx(stats.gmean(list(ratios.values())))
        assert (row.low, row.high) == pytest.approx((math.exp(low), math.exp(high)))
        assert (row.better, row.units, row.decided) == (3, 4, False)


def test_the_order_of_the_policies_turns_the_ratio_over() -> None:
    ratios = {("w1", 0): 0.8, ("w2", 0): 0.81, ("w3", 0): 0.79}
    there, back = (compare(replays(ratios), *pair).comparisons[0] for pair in (("a", "b"), ("b", "a")))
    assert there.low is not None
    assert there.high is not None
    assert there.ratio * back.ratio == pytest.approx(1)
    assert back.low == pytest.approx(1 / there.high)
    assert there.decided
    assert back.decided


def test_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        logs = rng.normal(math.log(0.9), 0.2, size=4)
        made = replays({(f"w{number}", 0): math.exp(value) for number, value in enumerate(logs)})
        row = compare(made, "a", "b").comparisons[0]
        assert row.low is not None
        assert row.high is not None
        covered += row.low <= 0.9 <= row.high
    # 95 % of 400 with a standard deviation of 4.4; a normal quantile in place of Student's covers 85 %.
    assert 365 <= covered <= 395


def test_seeds_do_not_count_as_workloads() -> None:
    ratios = {(name, seed): ratio for name, ratio in (("w1", 0.8), ("w2", 0.9), ("w3", 0.85)) for seed in range(50)}
    many = compare(replays(ratios), "a", "b").comparisons[0]
    few = compare(replays({key: ratio for key, ratio in ratios.items() if key[1] == 0}), "a", "b").comparisons[0]
    assert many.units == few.units == 3
    assert (many.low, many.high) == pytest.approx((few.low, few.high))


def test_one_workload_counts_its_seeds_and_repeats_are_no_evidence() -> None:
    result = compare(replays({("w", 0): 0.8, ("w", 1): 0.9}), "a", "b")
    assert result.unit == "seed"
    assert result.comparisons[0].low is not None
    same = compare(replays({("w", seed): 0.8 for seed in range(5)}), "a", "b").comparisons[0]
    assert (same.low, same.high, same.decided) == (None, None, False)
    assert compare(replays({("w", 0): 0.8}), "a", "b").comparisons[0].low is None


def test_only_shared_replays_are_compared() -> None:
    made = replays({("w1", 0): 0.8, ("w2", 0): 0.9})
    more = [*made, replay("a", "w3", 0, 1e9)]
    assert compare(more, "a", "b").comparisons == compare(made, "a", "b").comparisons


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_refuses_figures_without_a_logarithm(value: float) -> None:
    made = [replay("a", "w1", 0, value), replay("b", "w1", 0, 1.0)]
    with pytest.raises(InputError, match="w1 seed 0:avg_jct_s"):
        compare(made, "a", "b")


def test_refuses_what_cannot_be_compared() -> None:
    made = replays({("w1", 0): 0.8})
    for pair, words in ((("a", "a"), "twice"), (("a", "c"), "in common")):
        with pytest.raises(InputError, match=words):
            compare(made, *pair)
    with pytest.raises(InputError, match="confidence"):
        compare(made, "a", "b", confidence=1.0)
