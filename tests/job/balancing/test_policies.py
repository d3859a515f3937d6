"""Both ways to choose batch sizes keep the least that every worker gets, and notice a speed that changes for good."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.job.balancing.algorithm2 import Algorithm2, Algorithm2Settings, Phase
from ddltool.analyzers.job.balancing.control import Policy, Report, SpeedPolicy, TrialPolicy
from ddltool.analyzers.job.balancing.sizing import proportional
from ddltool.analyzers.job.balancing.trained import Ema
from ddltool.errors import Infeasible, InputError

NOTHING = np.zeros(2)


@given(
    st.lists(st.tuples(st.floats(1e-3, 1e3), st.integers(0, 40)), min_size=1, max_size=6),
    st.integers(1, 9),
    st.integers(0, 100),
)
@settings(max_examples=200, deadline=None)
def test_shares_are_cut_off_below_at_the_least(workers: list[tuple[float, int]], least: int, extra: int) -> None:
    """Against the factor that bisection finds."""
    speeds = np.array([speed for speed, _ in workers])
    limits = np.array([least + room for _, room in workers])
    total = min(len(workers) * least + extra, int(limits.sum()))
    sizes = proportional(speeds, total, limits, least)
    assert sizes.sum() == total
    assert (sizes >= least).all()
    assert (sizes <= limits).all()
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.clip(middle * speeds, least, limits).sum() < total else (low, middle)
    assert np.abs(sizes - np.clip(high * speeds, least, limits)).max() < 1 + 1e-6


def test_sizes_below_the_least_have_no_solution() -> None:
    assert proportional([1.0, 15.0], 16, least=3).tolist() == [3, 13]
    with pytest.raises(Infeasible, match="total batch 5 is less than 3 samples for each of 2 workers"):
        proportional([1.0, 1.0], 5, least=3)
    with pytest.raises(Infeasible, match="limit of worker 1 admits 2 of at least 3 samples"):
        proportional([1.0, 1.0], 8, [9, 2], least=3)
    with pytest.raises(InputError, match="least: is 0"):
        proportional([1.0, 1.0], 8, least=0)
    for made in (SpeedPolicy, TrialPolicy):
        with pytest.raises(InputError, match=r"sizes: is \[2, 14\]; give every worker 3 samples or more"):
            made([2, 14], least=3)
    with pytest.raises(InputError, match="2 workers and 16 samples, 3 or more each"):
        Algorithm2([8, 8], least=3).load_state_dict(Algorithm2([2, 14]).state_dict())


@given(st.integers(0, 10**6), st.sampled_from(["speeds", "trial"]))
@settings(max_examples=60, deadline=None)
def test_both_ways_keep_the_least_and_the_total(seed: int, way: str) -> None:
    chance = np.random.default_rng(seed)
    workers, least = int(chance.integers(2, 5)), int(chance.integers(1, 5))
    start = (least + chance.integers(0, 12, workers)).tolist()
    trial = Algorithm2Settings(step=3, window=1, fine_window=2, renew=True)
    policy: Policy = (
        SpeedPolicy(start, predictor="last", least=least) if way == "speeds" else TrialPolicy(start, None, trial, least)
    )
    speeds = 10.0 ** chance.uniform(-2, 2, workers)
    for step in range(60):
        if step == 30:
            speeds = speeds[::-1]
        sizes = policy.sizes
        assert sizes.min() >= least
        assert sizes.sum() == sum(start)
        seconds = sizes / speeds * chance.uniform(0.9, 1.1, workers)
        spare = np.full(workers, 0.1)
        report = Report(samples=sizes.copy(), seconds=seconds, memory=spare, cpu=spare, available=spare)
        policy.choose(report)


@pytest.mark.parametrize("renew", [False, True])
def test_a_hopeless_straggler_ends_at_the_least_and_is_told_to_go(renew: bool) -> None:
    algorithm = Algorithm2([16, 16], settings=Algorithm2Settings(window=1, fine_window=1, renew=renew), least=4)
    told = [algorithm.observe([1.0, 1000.0]) for _ in range(12)]
    assert [decision.sizes[1] for decision in told] == [11, 6, 6, 5, *[4] * 8]
    assert [decision.remove for decision in told] == [False] * 5 + [True] * 7
    assert told[2].phase is Phase.FINE


def predicted(speeds: list[list[float]], restart_after: int) -> list[float]:
    ema = Ema(2, restart_after=restart_after)
    for speed in speeds:
        ema.observe(np.array(speed))
    return ema.predict(NOTHING, NOTHING).tolist()


def test_the_average_begins_anew_after_a_lasting_change_and_only_for_who_changed() -> None:
    before = [[30.0, 20.0]] * 5
    assert predicted([*before, *[[10.0, 20.0]] * 3], 3) == [10.0, 20.0]
    assert predicted([*before, *[[90.0, 20.0]] * 3], 3) == [90.0, 20.0]
    assert predicted([*before, [10.0, 20.0], [8.0, 20.0], [12.0, 20.0]], 3)[0] == 10.0
    assert predicted([*before, *[[10.0, 20.0]] * 3], 0)[0] == pytest.approx(10 + 20 * 0.8**3)


def test_what_passes_is_no_change() -> None:
    """Two far-off speeds and a usual one, or far off on either side in turns, leave the plain average."""
    for after in ([10.0, 10.0, 30.0], [10.0, 90.0, 10.0, 90.0]):
        speeds = [[30.0, 20.0]] * 5 + [[speed, 20.0] for speed in after]
        assert predicted(speeds, 3) == predicted(speeds, 0)


@given(st.lists(st.tuples(st.floats(90, 110), st.floats(4.5, 5.5)), min_size=1, max_size=30))
def test_noise_of_a_tenth_is_no_change(speeds: list[tuple[float, float]]) -> None:
    rows = [list(row) for row in speeds]
    assert predicted(rows, 3) == predicted(rows, 0)


def steps_until_level(renew: bool) -> int:
    """Return the iterations that Algorithm 2 needs once speeds of 3 and 1 have changed places, until times differ by 15 %."""
    algorithm, speeds = Algorithm2([64, 64], settings=Algorithm2Settings(renew=renew)), np.array([3.0, 1.0])
    for _ in range(150):
        algorithm.observe(algorithm.sizes / speeds)
    assert algorithm.phase is Phase.FINE
    assert abs(algorithm.sizes[0] - 96) <= 1
    for step in range(200):
        seconds = algorithm.sizes / speeds[::-1]
        if seconds.max() < 1.15 * seconds.min():
            return step
        algorithm.observe(seconds)
    raise AssertionError("never level again")


def test_the_fast_approach_comes_back_after_a_change() -> None:
    """64 samples have to move: 13 iterations of 5 and a window, or one at a time after a long window."""
    assert steps_until_level(renew=True) <= 20
    assert steps_until_level(renew=False) >= 60


@pytest.mark.parametrize("seed", range(5))
def test_noise_does_not_end_fine_tuning(seed: int) -> None:
    chance, algorithm = np.random.default_rng(seed), Algorithm2([32] * 4, settings=Algorithm2Settings(renew=True))
    speeds = np.array([8.0, 3.0, 2.0, 1.0])
    for step in range(600):
        algorithm.observe(algorithm.sizes / speeds * chance.uniform(0.95, 1.05, 4))
        assert step < 100 or algorithm.phase is Phase.FINE
