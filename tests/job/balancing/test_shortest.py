"""The shortest iteration where it does not grow with every second: plateaus, equal iterations, and what the search costs."""

from __future__ import annotations

import bisect
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.job.balancing.minmax import DeviceCurves, Offer, choose
from ddltool.arrays import Floats
from ddltool.arrays import Ints as Counts

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
@settings(max_examples=60, deadline=None)
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
@settings(max_examples=40, deadline=None)
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
