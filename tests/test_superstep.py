"""ElasticBSP as a plan: the best superstep against enumeration, and what the plan says about it."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.barriers.superstep import best_superstep, plan_elastic_bsp
from ddltool.analyzers.placement.bsp import plan_bsp
from ddltool.analyzers.placement.enforcement import to_enforcement
from ddltool.analyzers.placement.problem import from_job
from ddltool.errors import InputError
from ddltool.job import DeviceOffer, Job


def by_enumeration(workers: list[tuple[Fraction, int]], lookahead: int, max_gap: int | None) -> Fraction:
    """The best rate over every choice of iterations: the barrier is when the last worker ends."""
    best = Fraction(0)
    for chosen in itertools.product(range(1, lookahead + 1), repeat=len(workers)):
        if max_gap is not None and max(chosen) - min(chosen) > max_gap:
            continue
        at = max(k / speed for k, (speed, _) in zip(chosen, workers, strict=True))
        best = max(best, sum(k * count for k, (_, count) in zip(chosen, workers, strict=True)) / at)
    return best


speeds = st.fractions(min_value=Fraction(1, 5), max_value=9, max_denominator=12)


@given(
    st.lists(st.tuples(speeds, st.integers(1, 5)), min_size=1, max_size=3),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(0, 4)),
)
@settings(max_examples=200, deadline=None)
def test_the_best_superstep_equals_enumeration(
    workers: list[tuple[Fraction, int]], lookahead: int, max_gap: int | None
) -> None:
    barrier, iterations = best_superstep(workers, lookahead, max_gap)
    rate = sum(k * count for k, (_, count) in zip(iterations, workers, strict=True)) / barrier
    assert rate == by_enumeration(workers, lookahead, max_gap)
    assert barrier >= max(k / speed for k, (speed, _) in zip(iterations, workers, strict=True))
    assert max_gap is None or max(iterations) - min(iterations) <= max_gap


def job(**changes: object) -> Job:
    devices = [
        DeviceOffer(type="V100", count=2, capability_per_s=3.0),
        DeviceOffer(type="T4", count=1, capability_per_s=1.0),
    ]
    return Job(name="mixed", max_workers=8, batch_size=16, devices=devices).model_copy(update=changes)


CAPABILITIES = {"V100": 3.0, "T4": 1.0}


def test_a_plan_by_hand() -> None:
    """3, 3 and 1 mini-batches a second meet after one second without any waiting: 7 a second."""
    made = plan_elastic_bsp(from_job(job(), CAPABILITIES))
    assert made.superstep is not None
    assert made.superstep.iterations == {"V100": 3, "T4": 1}
    assert (made.superstep.superstep_s, made.superstep.waiting_s, made.superstep.iteration_gap) == (1.0, 0.0, 2)
    assert made.throughput == pytest.approx(7.0)
    assert made.iteration_s == pytest.approx(8 / 7)
    assert made.throughput > plan_bsp(from_job(job(), CAPABILITIES)).throughput


def test_a_gap_of_zero_is_bsp_with_one_mini_batch_each() -> None:
    made = plan_elastic_bsp(from_job(job(), CAPABILITIES), max_gap=0)
    assert made.superstep is not None
    assert set(made.superstep.iterations.values()) == {1}
    assert made.throughput == pytest.approx(3.0)


def test_no_more_devices_than_workers() -> None:
    made = plan_elastic_bsp(from_job(job(max_workers=2), CAPABILITIES))
    assert sum(row.devices for row in made.assignments) == 2


def test_ddp_cannot_enforce_it() -> None:
    with pytest.raises(InputError, match="DDP cannot do"):
        to_enforcement(plan_elastic_bsp(from_job(job(), CAPABILITIES)))
    with pytest.raises(InputError, match="look 1 iteration ahead"):
        best_superstep([(Fraction(1), 1)], 0)
