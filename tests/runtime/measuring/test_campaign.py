"""What is measured next, and when it is enough: against brute force, exact curves, and a machine made of numbers."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.job.goodput.curve import (
    Interval,
    first_to_measure,
    interval_ranks,
    median_interval,
    next_to_measure,
    predict,
    summarise,
)
from ddltool.errors import InputError
from ddltool.profiles import check_profile
from ddltool.runtime.measuring.campaign import MeasureRequest, campaign
from ddltool.runtime.measuring.worker import MeasureTask, StepTimings


@pytest.mark.parametrize("count", range(1, 15))
def test_the_intervals_coverage_by_brute_force(count: int) -> None:
    """The median lies between two order statistics when so many of n fair coins fall below it: count all 2^n throws."""

    def coverage(first: int, last: int) -> float:
        below = [sum(coins) for coins in itertools.product((0, 1), repeat=count)]
        return float(np.mean([first < number <= last for number in below]))

    first, last = interval_ranks(count)
    assert first == count - 1 - last
    if count < 6:
        assert (first, last) == (0, count - 1)
        assert coverage(first, last) == pytest.approx(1 - 2 ** (1 - count))
    else:
        assert coverage(first, last) >= 0.95
        assert coverage(first + 1, last - 1) < 0.95  # and none narrower would do


@pytest.mark.parametrize(
    ("count", "rho", "held", "width"),
    [
        (12, 0.0, (0.94, 0.99), 1.06),
        (25, 0.0, (0.94, 0.99), 1.05),
        (200, 0.0, (0.94, 0.99), 1.03),
        (50, 0.5, (0.94, 0.99), 2.5),
        (200, 0.5, (0.94, 0.99), 2.2),
        (200, 0.9, (0.93, 0.99), 6.0),
        # A drift that takes as long as all of the samples: as far as they can tell.
        (25, 0.9, (0.75, 0.99), 3.5),
    ],
)
def test_coverage_of_skewed_times_under_load_that_drifts(
    count: int, rho: float, held: tuple[float, float], width: float
) -> None:
    """Steps follow an autoregression of first order; where they are independent, the interval is hardly wider for it."""
    rng = np.random.default_rng(3)
    noise = rng.standard_normal((1000, count)) * [1.0, *[math.sqrt(1 - rho**2)] * (count - 1)]
    for step in range(1, count):
        noise[:, step] += rho * noise[:, step - 1]
    hits, wide, plain = 0, 0.0, 0.0
    first, last = interval_ranks(count)
    for samples in np.exp(0.5 * noise):
        found, ordered = median_interval(list(samples)), np.sort(samples)
        hits += found.low <= 1.0 <= found.high
        wide, plain = wide + math.log(found.high / found.low), plain + math.log(ordered[last] / ordered[first])
    assert held[0] <= hits / 1000 <= held[1]
    assert 1.0 <= wide / plain <= width


def exact(curve: Any, batches: Any) -> dict[int, Interval]:
    return {batch: Interval(median=curve(batch), low=curve(batch), high=curve(batch)) for batch in batches}


@given(
    a=st.floats(0.0, 1.0),
    b=st.floats(0.7, 1.0),
    c=st.floats(-1e-3, 1e-2),
    measured=st.sets(st.integers(1, 300), min_size=3, max_size=6),
)
def test_the_doubt_covers_the_error_on_a_curve_bent_to_one_side(
    a: float, b: float, c: float, measured: set[int]
) -> None:
    def curve(m: float) -> float:
        return a + b * m + c * m * m

    points = exact(curve, measured)
    for batch in range(min(measured) + 1, max(measured)):
        found = predict(points, batch)
        error = abs(found.step_time_s - curve(batch))
        assert error <= found.relative * found.step_time_s + 1e-9
    for batch in (min(measured) - 1, max(measured) + 1):
        assert math.isinf(predict(points, batch).relative)


@given(a=st.floats(0.0, 1.0), b=st.floats(1e-4, 1.0), measured=st.sets(st.integers(1, 300), min_size=3, max_size=6))
def test_a_line_leaves_no_doubt(a: float, b: float, measured: set[int]) -> None:
    points = exact(lambda m: a + b * m, measured)
    for batch in range(min(measured) + 1, max(measured)):
        found = predict(points, batch)
        assert found.step_time_s == pytest.approx(a + b * batch, rel=1e-9)
        assert found.relative < 1e-9


def test_two_points_prove_no_line_and_noise_adds_doubt() -> None:
    assert math.isinf(predict(exact(float, (1, 9)), 5).relative)
    wide = {batch: Interval(median=batch, low=0.9 * batch, high=1.1 * batch) for batch in (1, 5, 9)}
    assert predict(wide, 7).relative == pytest.approx(0.1)


def test_ends_before_middle() -> None:
    batches = [1, 2, 4, 8, 16, 32, 64]
    order: list[int] = []
    while len(order) < 3:
        order.append(first_to_measure([batch for batch in batches if batch not in order], order))
    assert order == [1, 64, 8]


@given(launch=st.floats(0.0, 0.5), each=st.floats(1e-5, 1e-2), most=st.integers(1, 4096))
def test_the_search_brackets_saturation(launch: float, each: float, most: int) -> None:
    times: dict[int, float] = {}
    while (batch := next_to_measure(times, most)) is not None:
        assert batch not in times
        assert 1 <= batch <= most
        times[batch] = launch + each * batch
    speed = {batch: batch / time_s for batch, time_s in times.items()}
    good = min(batch for batch in times if speed[batch] >= 0.9 * max(speed.values()))
    before = max((batch for batch in times if batch < good), default=good - 1)
    assert good - before <= 1 or good / before <= 1.25
    assert max(times) == most or launch + each * max(times) < 1.12 * each * max(times)  # it went on to the linear part


@dataclass
class Machine:
    """A machine made of numbers: step times follow a curve, with noise; too large a batch runs out of memory."""

    curve: Any
    noise: float = 0.0
    memory: int = 10**9
    tasks: list[MeasureTask] = field(default_factory=list)
    timed: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(5))

    def nodes_of(self, replicas: int) -> int:
        return 1

    def run(self, task: MeasureTask) -> StepTimings:
        self.tasks.append(task)
        if task.batch > self.memory:
            return StepTimings()
        one_pass = self.curve(task.batch)
        sync = 0.3 * (task.replicas > 1)
        full: list[float] = []
        while not task.is_over(full, sum(full)):
            full.append((one_pass * (task.accumulation + 1) + sync) * float(self.rng.lognormal(0.0, self.noise)))
        self.timed += len(full)
        return StepTimings(
            full=tuple(full),
            local=tuple(one_pass * (task.accumulation + 1) for _ in full) if task.replicas > 1 else (),
            passes=tuple(one_pass for _ in full) if task.accumulation else (),
            peak_bytes=1e6 + task.batch,
        )


REQUEST = MeasureRequest(source="s", resolver="m:f", batch_sizes=tuple(2**k for k in range(9)), repeats=None)


def test_a_line_needs_three_of_nine() -> None:
    machine = Machine(lambda m: 0.1 + 0.01 * m, noise=0.02)
    found = campaign(replace(REQUEST, replicas=(1, 2)), executor=machine)
    assert len(machine.tasks) <= 10
    assert len(found.frame) + len(found.skipped) == 18
    assert len(found.skipped) >= 10
    for item in found.skipped:
        truth = 0.1 + 0.01 * item.local_batch_size + 0.3 * (item.num_replicas > 1)
        assert item.predicted_step_time_s == pytest.approx(truth, rel=0.05)
        assert "from the curve between batch" in item.reason
    width = (found.frame["step_time_high_s"] - found.frame["step_time_low_s"]) / 2 / found.frame["step_time_s"]
    assert (width <= 0.05).all()
    check_profile(found.frame, "campaign")


@settings(max_examples=20)
@given(flat=st.floats(0.01, 0.5), each=st.floats(1e-3, 1e-1))
def test_what_is_skipped_is_known(flat: float, each: float) -> None:
    """A GPU's curve: flat until the batch fills it, then a line."""

    def curve(m: float) -> float:
        return max(flat, each * m)

    found = campaign(REQUEST, executor=Machine(curve))
    for item in found.skipped:
        predicted = item.predicted_step_time_s
        assert predicted is not None
        assert abs(predicted - curve(item.local_batch_size)) <= 0.0501 * predicted


def test_noise_gets_more_steps_and_the_count_can_be_fixed() -> None:
    quiet = campaign(replace(REQUEST, batch_sizes=(4,)), executor=Machine(lambda m: 0.5))
    machine = Machine(lambda m: 0.5, noise=0.3)
    # a share of the budget ends the first visit early; the later ones add to its steps
    noisy = campaign(replace(REQUEST, batch_sizes=(4,), budget_s=20.0), executor=machine)
    assert len(machine.tasks) > 1
    assert noisy.frame["repeats"].tolist() == [machine.timed]
    assert quiet.frame["repeats"].tolist() == [6]
    assert noisy.frame["repeats"].iloc[0] > 50
    fixed = campaign(replace(REQUEST, batch_sizes=(1, 4), repeats=7), executor=Machine(lambda m: 0.5, noise=0.3))
    assert fixed.frame["repeats"].tolist() == [7, 7]


def test_a_spent_budget_ends_it_with_at_least_one_row() -> None:
    machine = Machine(lambda m: 0.5, noise=2.0)
    found = campaign(replace(REQUEST, budget_s=1e-9), executor=machine)
    assert len(found.frame) == 1
    assert found.frame["repeats"].tolist() == [3]
    assert {item.reason for item in found.skipped} == {"the budget was spent"}


def test_out_of_memory_ends_the_larger_ones() -> None:
    for request in (REQUEST, replace(REQUEST, repeats=3), replace(REQUEST, batch_sizes=())):
        machine = Machine(lambda m: 0.01 + 0.001 * m * m, memory=20)
        found = campaign(replace(request, replicas=(1, 2)), executor=machine)
        assert found.frame["local_batch_size"].max() <= 20
        too_large = [task.batch for task in machine.tasks if task.batch > 20]
        assert len(too_large) == len(set(too_large))  # none twice, though there are two series
        assert all("memory ends at batch" in item.reason for item in found.skipped if item.local_batch_size > 20)
    with pytest.raises(InputError, match="even 1 runs out of memory"):
        campaign(REQUEST, executor=Machine(lambda m: 0.1, memory=0))


def test_the_search_goes_through_all_series() -> None:
    found = campaign(
        replace(REQUEST, batch_sizes=(), replicas=(1, 2), accumulation=(0, 3)),
        executor=Machine(lambda m: 0.1 + 0.02 * m),
    )
    summary = summarise(found.frame, None)["cpu"]
    assert 36 <= summary.saturation_batch <= 64  # 9 launch / each = 45
    assert summary.launch_overhead_s == pytest.approx(0.1, rel=1e-6)
    assert summary.seconds_per_sample == pytest.approx(0.02, rel=1e-6)
    assert set(zip(found.frame["num_replicas"], found.frame["accumulation_steps"], strict=True)) == {
        *((1, 0), (1, 3), (2, 0), (2, 3))
    }


def test_accumulation_columns() -> None:
    found = campaign(
        replace(REQUEST, batch_sizes=(2, 8), replicas=(1, 2), accumulation=(0, 3), repeats=4),
        executor=Machine(lambda m: 0.1 + 0.02 * m),
    ).frame
    grad = 0.1 + 0.02 * found["local_batch_size"]
    sync = 0.3 * (found["num_replicas"] > 1)
    assert np.allclose(found["grad_time_s"], grad)
    assert np.allclose(found["sync_time_s"], sync)
    assert np.allclose(found["step_time_s"], grad * (found["accumulation_steps"] + 1) + sync)
    alone = summarise(found, None)["cpu"]
    assert alone.launch_overhead_s == pytest.approx(0.1)  # rows that accumulate are no part of the curve


def test_known_rows_stay_and_are_not_measured_again() -> None:
    request = replace(REQUEST, batch_sizes=(1, 2, 4), repeats=3)
    first = campaign(replace(request, batch_sizes=(1, 4)), executor=Machine(lambda m: 7.0 * m)).frame
    machine = Machine(lambda m: 0.1 * m)
    second = campaign(request, executor=machine, known=first).frame
    assert [task.batch for task in machine.tasks] == [2]
    pd.testing.assert_frame_equal(second[second["local_batch_size"] != 2].reset_index(drop=True), first)
