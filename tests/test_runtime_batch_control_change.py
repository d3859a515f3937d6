"""A worker whose speed changes for good: both ways to choose batch sizes notice, and noise is no change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddltool.analyzers.balancing.algorithm2 import Algorithm2, Phase, Settings
from ddltool.analyzers.balancing.predict import Ema

NOTHING = np.zeros(2)


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
    algorithm, speeds = Algorithm2([64, 64], settings=Settings(renew=renew)), np.array([3.0, 1.0])
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
    chance, algorithm = np.random.default_rng(seed), Algorithm2([32] * 4, settings=Settings(renew=True))
    speeds = np.array([8.0, 3.0, 2.0, 1.0])
    for step in range(600):
        algorithm.observe(algorithm.sizes / speeds * chance.uniform(0.95, 1.05, 4))
        assert step < 100 or algorithm.phase is Phase.FINE
