"""Batch sizes: in proportion to speeds, and exact min-max over curves, against brute force and the greedy rule.
The shortest iteration where it does not grow with every second: plateaus, equal iterations, and what the search costs.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.synthetic import gpu_curves, least_longest
from ddltool.analyzers.job.balancing.minmax import Curves, DeviceCurves, Offer, choose
from ddltool.analyzers.job.balancing.sizing import checked_sizes, equal, proportional
from ddltool.arrays import Floats
from ddltool.arrays import Ints as Counts
from ddltool.errors import Infeasible, InputError


def greedy(curves: Curves, total: int) -> Counts:
    """The greedy rule, one sample at a time to whoever would end it first."""
    sizes = np.ones(len(curves.limits), dtype=np.int64)
    for _ in range(total - len(sizes)):
        following = curves.seconds(np.minimum(sizes + 1, curves.limits))
        sizes[int(np.argmin(np.where(sizes < curves.limits, following, np.inf)))] += 1
    return sizes


@st.composite
def shares(draw: st.DrawFn) -> tuple[list[float], int, list[int] | None, int]:
    workers, least = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    speeds = draw(st.lists(st.floats(1e-3, 1e3), min_size=workers, max_size=workers))
    limits = draw(st.none() | st.lists(st.integers(least, 60), min_size=workers, max_size=workers))
    most = 500 if limits is None else sum(limits)
    return speeds, draw(st.integers(workers * least, max(workers * least, most))), limits, least


@given(shares())
def test_proportional_sizes_keep_total_bounds_and_quota(case: tuple[list[float], int, list[int] | None, int]) -> None:
    """Checked against the exact shares in rational numbers, found by setting bounds one after the other."""
    speeds, total, limits, least = case
    sizes = proportional(speeds, total, limits, least)
    assert sizes.sum() == total
    assert (sizes >= least).all()
    most = [total] * len(speeds) if limits is None else limits
    assert (sizes <= most).all()
    exact = rational_shares([Fraction(v) for v in speeds], total, most, least)
    for size, share in zip(sizes.tolist(), exact, strict=True):
        assert abs(Fraction(size) - share) < 1 + Fraction(1, 10**6)
    # Largest remainder: nobody who was rounded down had a larger remainder than somebody who was rounded up.
    down = [share - int(share) for size, share in zip(sizes.tolist(), exact, strict=True) if size <= share]
    up = [share - int(share) for size, share in zip(sizes.tolist(), exact, strict=True) if size > share]
    if down and up:
        assert max(down) <= min(up) + Fraction(1, 10**6)


def rational_shares(speeds: list[Fraction], total: int, most: list[int], least: int) -> list[Fraction]:
    """Return clip(f v, least, most) that add up to the total, by bisection over f in exact arithmetic, then a solve."""
    low, high, few = Fraction(0), Fraction(max(most)) / min(speeds) + total, Fraction(least)
    for _ in range(80):
        factor = (low + high) / 2
        if sum(min(max(factor * v, few), Fraction(m)) for v, m in zip(speeds, most, strict=True)) < total:
            low = factor
        else:
            high = factor
    return [min(max(high * v, few), Fraction(m)) for v, m in zip(speeds, most, strict=True)]


def test_the_formula_of_the_paper() -> None:
    assert proportional([1.0, 2.0, 3.0, 4.0], 100).tolist() == [10, 20, 30, 40]
    assert proportional([1.0, 1.0, 1.0], 10).tolist() == [4, 3, 3]
    assert proportional([1.0, 1.0, 1.0], 10, [2, 9, 9]).tolist() == [2, 4, 4]
    assert proportional([1e-6, 1.0, 1.0], 5).tolist() == [1, 2, 2]
    assert equal(3, 9).tolist() == [3, 3, 3]


def test_equal_remainders_go_to_the_first_workers_in_large_batches_too() -> None:
    """Shares of 10^10 samples and a half: neither rounding nor the order of speeds decides."""
    for speeds in ([2 / 3, 1.1, 2 / 3, 1.1], [1.0, 1.0], [1 / 3, 0.7, 1 / 3, 0.7]):
        for total in (2 * 10**10 + 1, 51_176_295_353, 7):
            sizes = proportional(speeds, total).tolist()
            assert sum(sizes) == total
            for place, speed in enumerate(speeds):
                later = [size for size, other in zip(sizes[place:], speeds[place:], strict=True) if other == speed]
                assert sizes[place] - 1 <= min(later) <= max(later) == sizes[place]


def test_totals_that_floating_point_overshoots() -> None:
    """Shares of 10^16 and more are off by samples, rounded up as well as down; 50 totals of 10^18 pass 64 bits."""
    chance = np.random.default_rng(0)
    for total in (10**16, 10**17 + 3, 10**18):
        for workers in (2, 3, 7, 50):
            sizes = proportional(chance.uniform(0.1, 2.0, workers), total)
            assert sum(sizes.tolist()) == total
            assert (sizes >= 1).all()


def test_limits_that_bind_are_named() -> None:
    with pytest.raises(Infeasible, match="memory limits of all 3 workers admit 9 samples of 10"):
        proportional([1, 1, 1], 10, [3, 3, 3])
    with pytest.raises(Infeasible, match="total batch 2 is less than one sample for each of 3 workers"):
        proportional([1, 1, 1], 2)
    with pytest.raises(Infeasible, match="memory limit of worker 1 admits no sample"):
        proportional([1, 1], 4, [9, 0])
    with pytest.raises(InputError, match=r"speeds\[1\]: is 0"):
        proportional([1, 0], 4)
    with pytest.raises(Infeasible, match="total batch 5 is less than 2 samples for each of 3 workers"):
        proportional([1, 1, 1], 5, least=2)
    with pytest.raises(Infeasible, match="memory limit of worker 1 admits 1 of at least 2 samples"):
        proportional([1, 1, 1], 9, [9, 1, 0], least=2)
    for speeds in ([[1.0, 1.0]], []):
        with pytest.raises(InputError, match="speeds: has shape"):
            proportional(speeds, 4)
    for limits in ([9], [9, -1]):
        with pytest.raises(InputError, match="limits: are not usable; give 2 whole numbers"):
            proportional([1, 1], 4, limits)
    with pytest.raises(InputError, match="sizes: .* give every worker one sample or more"):
        checked_sizes([1, 0])
    with pytest.raises(InputError, match=r"sizes: is \[\]; give every worker"):
        checked_sizes([])
    with pytest.raises(InputError, match=r"sizes: is 5; give every worker"):
        checked_sizes(5)


def random_curves(chance: np.random.Generator, workers: int, *, accumulate: bool = False) -> DeviceCurves:
    return DeviceCurves.of(
        per_sample_s=chance.integers(1, 6, workers),
        launch_s=chance.integers(0, 30, workers),
        saturation=chance.integers(0, 12, workers),
        communication_s=chance.integers(0, 10, workers),
        memory_limit=chance.integers(4, 40, workers),
        accumulate=accumulate,
    )


def test_accumulated_batches_take_their_parts() -> None:
    curves = DeviceCurves.of(per_sample_s=[2.0], launch_s=10.0, saturation=4.0, memory_limit=[8], accumulate=True)
    for size, parts in ((1, [1]), (8, [8]), (9, [5, 4]), (17, [6, 6, 5]), (24, [8, 8, 8])):
        expected = sum(10 + 2 * max(part, 4) for part in parts)
        assert curves.seconds(np.array([size]))[0] == expected
    never_falling = [curves.seconds(np.array([size]))[0] for size in range(1, 200)]
    assert never_falling == sorted(never_falling)


def test_accumulation_serves_where_memory_binds() -> None:
    shape = {"per_sample_s": [0.01, 0.05], "launch_s": 0.1, "memory_limit": [16, 64]}
    made = [DeviceCurves.of(**shape, accumulate=parts) for parts in (False, True)]
    bound, free = (least_longest(curves, 64) for curves in made)
    assert bound[0] == 16 < free[0]
    assert made[1].seconds(free).max() < made[0].seconds(bound).max()


def test_a_worker_that_cannot_help_is_dropped() -> None:
    """The second one needs 9 s for a single sample; the first makes all ten in 2 s."""
    two = Offer(counts=(1, 1))
    made = choose(DeviceCurves.of(per_sample_s=[0.1, 0.1], launch_s=[1.0, 8.9]), two, 10)
    assert made is not None
    assert made.numbers == (1, 0)
    assert made.iteration_s == pytest.approx(2.0)
    # It has to stay where the other one's memory is too small.
    tight = choose(DeviceCurves.of(per_sample_s=[0.1, 0.1], launch_s=[1.0, 8.9], memory_limit=[9, 9]), two, 10)
    assert tight is not None
    assert tight.numbers == (1, 1)


def test_thousands_of_workers_have_the_sizes_of_the_greedy_rule() -> None:
    curves = random_curves(np.random.default_rng(0), 512)
    assert np.array_equal(least_longest(curves, 3000), greedy(curves, 3000))


def test_published_batch_sizes_of_four_gpus() -> None:
    """Inception-V3 from 32 each: (89, 21, 12, 6), within 2 on curves that are only shaped like the paper's."""
    _, curves = gpu_curves(1)
    sizes = least_longest(curves, 128)
    assert np.abs(sizes - np.array([89, 21, 12, 6])).max() <= 2
    change_s = curves.seconds(sizes) - curves.seconds(np.full(4, 32))
    assert change_s[3] == pytest.approx(-2.0, abs=0.2)  # "reduced by nearly 2s"
    assert change_s[0] == pytest.approx(0.5, abs=0.15)  # "an increase of 0.5s"


def test_times_beyond_all_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="times too large for a number"):
        least_longest(DeviceCurves.of(per_sample_s=[1e308, 1.0]), 10)


Value = Callable[[float, int], float]


class Tables:
    """Curves of measured seconds for 1, 2, 3, ... samples of each worker, which never fall."""

    def __init__(self, rows: list[list[float]]) -> None:
        self.rows = rows
        self.limits = np.array([len(row) for row in rows], dtype=np.int64)

    def seconds(self, sizes: Counts) -> Floats:
        return np.array([(row[size - 1 : size] or [np.inf])[0] for row, size in zip(self.rows, sizes, strict=True)])


def first_ends(rows: list[list[float]], total: int) -> dict[int, float]:
    """Return number of workers -> when the slowest may end at the earliest: every time in the tables tried, ascending."""
    ends = {}
    for number in range(1, min(len(rows), total) + 1):
        for at in sorted({seconds for row in rows for seconds in row}):
            made = sorted((bisect.bisect_right(row, at) for row in rows), reverse=True)[:number]
            if made[-1] >= 1 and sum(made) >= total:
                ends[number] = at
                break
    return ends


def best_of(rows: list[list[float]], total: int, value: Value) -> tuple[float, int, float]:
    """Return seconds of the shortest iteration, most workers that it allows, and when the slowest of so many ends."""
    ends = first_ends(rows, total)
    iteration_s = min(value(at, number) for number, at in ends.items())
    number = max(number for number, at in ends.items() if value(at, number) == iteration_s)
    return iteration_s, number, ends[number]


@pytest.mark.parametrize("instances", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_curves_of_devices_are_their_tables(instances: int) -> None:
    """With accumulation and without: where every worker takes part, and where each more of them costs its own."""
    chance = np.random.default_rng(instances)
    for number in range(instances):
        workers = int(chance.integers(2, 9))
        curves = random_curves(chance, workers, accumulate=number % 3 == 0)
        total = int(chance.integers(workers, min(int(curves.limits.sum()), 25 * workers) + 1))
        ones = np.ones(workers, dtype=np.int64)
        rows = [
            [
                float(curves.seconds(ones + (size - 1) * (np.arange(workers) == worker))[worker])
                for size in range(1, most + 1)
            ]
            for worker, most in enumerate(np.minimum(curves.limits, total).tolist())
        ]
        assert curves.seconds(least_longest(curves, total)).max() == first_ends(rows, total)[workers]
        sync = np.cumsum(chance.integers(0, 12, workers)).tolist()
        made = choose(curves, Offer(counts=(1,) * workers), total, lambda at, number, s=sync: at + s[number - 1])
        assert made is not None
        assert made.iteration_s == best_of(rows, total, lambda at, number, s=sync: at + s[number - 1])[0]


def values(costs: list[float], floor: float) -> dict[str, Value]:
    """Return ways in which synchronisation lengthens an iteration, from none of them flat to one flat everywhere."""
    return {
        "sum": lambda at, number: at + costs[number - 1],
        "hidden": lambda at, number: max(at, costs[number - 1]),
        "floor": lambda at, number: max(at, floor),
        "floor and sum": lambda at, number: max(at, floor) + costs[number - 1],
        "steps": lambda at, number: at // 4 + costs[number - 1] // 2,
        "gamma 10": lambda at, number: (at**10 + (20 * costs[number - 1]) ** 10) ** 0.1,
        "number alone": lambda at, number: costs[number - 1],
        "flat": lambda at, number: floor,
    }


NAMES = sorted(values([], 0.0))
STEPS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=12), min_size=1, max_size=9)
GROWS = st.lists(st.integers(0, 4), min_size=9, max_size=9)


@pytest.mark.parametrize("name", NAMES)
@given(STEPS, GROWS, st.integers(1, 108), st.integers(0, 30))
def test_shortest_then_most_workers_then_soonest(
    name: str, steps: list[list[int]], grows: list[int], wanted: int, floor: int
) -> None:
    """Against every number of workers with every time of the tables."""
    rows = [np.cumsum(row).astype(float).tolist() for row in steps]
    total = 1 + (wanted - 1) % sum(map(len, rows))
    value = values(np.cumsum(grows).astype(float).tolist(), float(floor))[name]
    made = choose(Tables(rows), Offer(counts=(1,) * len(rows)), total, value)
    assert made is not None
    assert (made.iteration_s, sum(made.numbers), made.slowest_s) == best_of(rows, total, value)
    assert sum(row.size for row in made.rows) == total


@pytest.mark.parametrize("name", NAMES)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 6), st.integers(1, 8), st.integers(1, 3)), min_size=1, max_size=3
    ),
    GROWS,
    st.integers(1, 72),
    st.integers(0, 30),
)
@settings(max_examples=20)
def test_devices_of_types_on_plateaus(
    name: str, shapes: list[tuple[int, int, int, int]], grows: list[int], wanted: int, floor: int
) -> None:
    """Each device as a worker of its own."""
    rows = [
        [float(launch + per_sample * size) for size in range(1, limit + 1)]
        for launch, per_sample, limit, count in shapes
        for _ in range(count)
    ]
    total = 1 + (wanted - 1) % sum(map(len, rows))
    value = values(np.cumsum(grows).astype(float).tolist(), float(floor))[name]
    curves = DeviceCurves.of(
        launch_s=[float(shape[0]) for shape in shapes],
        per_sample_s=[float(shape[1]) for shape in shapes],
        memory_limit=[shape[2] for shape in shapes],
    )
    made = choose(curves, Offer(counts=tuple(shape[3] for shape in shapes)), total, value)
    assert made is not None
    assert (made.iteration_s, sum(made.numbers), made.slowest_s) == best_of(rows, total, value)
    assert sum(row.devices * row.size for row in made.rows) == total


class Counted:
    """Curves that count how often they are asked."""

    def __init__(self, curves: DeviceCurves) -> None:
        self.curves = curves
        self.limits = curves.limits
        self.calls = 0

    def seconds(self, sizes: Counts) -> Floats:
        self.calls += 1
        return self.curves.seconds(sizes)


def evaluations(finish: Value, limit: int) -> int:
    """Return how often 8 types of 16 devices were evaluated for about a quarter of what they can take."""
    chance = np.random.default_rng(0)
    curves = Counted(
        DeviceCurves.of(per_sample_s=chance.uniform(1e-6, 3e-6, 8), launch_s=1e-5, memory_limit=np.full(8, limit))
    )
    assert choose(curves, Offer(counts=(16,) * 8), 25 * limit, finish) is not None
    return curves.calls


@pytest.mark.parametrize(
    "finish",
    [
        lambda at, number: max(at, 0.5),
        lambda at, number: max(at, 0.005 * number),
        lambda at, number: (at**10 + (0.5 + 0.01 * number) ** 10) ** 0.1,
        lambda at, number: 0.5 + 0.01 * number,
        lambda at, number: 0.5,
    ],
    ids=["floor", "hidden", "gamma 10", "number alone", "flat"],
)
def test_a_plateau_is_not_walked_sample_by_sample(finish: Value) -> None:
    """64 times as many samples make bisections longer by a few steps; times on a plateau are 64 times as many."""
    few, many = evaluations(finish, 64), evaluations(finish, 4096)
    assert many < 4 * few
    assert many < 8 * evaluations(lambda at, number: at + 1e-9 * number, 4096)


def test_nobody_is_sent_away_where_rounding_hides_a_difference() -> None:
    """Against 1e17 s of synchronisation seconds of computation are nothing: an iteration is as long with two as with one."""
    sync = [1e17, 1e17, 2e17]
    rows = [[1.0, 2.0, 3.0], [6.0], [7.0, 7.0]]
    made = choose(Tables(rows), Offer(counts=(1, 1, 1)), 3, lambda at, number: at + sync[number - 1])
    assert made is not None
    assert made.iteration_s == 1e17
    assert made.numbers == (1, 1, 0)
