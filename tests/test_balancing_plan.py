"""LB-BSP as a plan: the step against a search over all splits, memory limits, and devices that are better left out."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.balancing.plan import StepCurve, plan_lb_bsp
from ddltool.analyzers.placement.bsp import plan_bsp
from ddltool.analyzers.placement.enforcement import to_enforcement
from ddltool.analyzers.placement.problem import Problem, from_job
from ddltool.errors import Infeasible
from ddltool.job import DeviceOffer, Job


def problem(counts: dict[str, int], speeds: dict[str, float], workers: int = 3, batch: int = 4) -> Problem:
    devices = [DeviceOffer(type=name, count=count) for name, count in counts.items()]
    return from_job(Job(name="j", max_workers=workers, batch_size=batch, devices=devices), speeds)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 9)), min_size=2, max_size=3),
    st.integers(1, 3),
)
@settings(max_examples=100, deadline=None)
def test_the_step_is_the_least_over_all_splits(shapes: list[tuple[int, int, int]], workers: int) -> None:
    names = [f"d{k}" for k in range(len(shapes))]
    curves = {
        name: StepCurve(launch_s=launch, per_sample_s=slope, memory_limit=limit)
        for name, (launch, slope, limit) in zip(names, shapes, strict=True)
    }
    given_problem = problem(dict.fromkeys(names, 1), dict.fromkeys(names, 1.0), workers)
    total = workers * 4
    best = min(
        (
            max(launch + slope * x for (launch, slope, _), x in zip(shapes, split, strict=True) if x)
            for split in itertools.product(*(range(min(limit, total) + 1) for _, _, limit in shapes))
            if sum(split) == total
        ),
        default=None,
    )
    if best is None:
        with pytest.raises(Infeasible):
            plan_lb_bsp(given_problem, curves)
        return
    made = plan_lb_bsp(given_problem, curves)
    assert made.iteration_s == pytest.approx(best)
    assert sum(row.devices * row.local_batch_size for row in made.assignments) == total
    for row in made.assignments:
        assert row.local_batch_size <= (curves[row.device_type].memory_limit or 0)


def test_faster_than_the_equal_split_and_enforceable() -> None:
    given_problem = problem({"V100": 2, "T4": 2}, {"V100": 3.0, "T4": 1.0}, workers=4, batch=16)
    made = plan_lb_bsp(given_problem)
    assert made.iteration_s == pytest.approx(0.5)  # 64 samples at 48 + 48 + 16 + 16 per second
    assert {row.device_type: row.local_batch_size for row in made.assignments} == {"V100": 24, "T4": 8}
    assert made.iteration_s < plan_bsp(given_problem).iteration_s
    assert made.split is not None
    assert made.split.equal_s == pytest.approx(plan_bsp(given_problem).iteration_s)
    assert [rank.local_batch_size for rank in to_enforcement(made).ranks] == [8, 8, 24, 24]


def test_a_device_that_only_slows_the_step_is_left_out() -> None:
    curves = {"fast": StepCurve(launch_s=0.0, per_sample_s=0.1), "slow": StepCurve(launch_s=9.0, per_sample_s=1.0)}
    made = plan_lb_bsp(problem({"fast": 1, "slow": 2}, {"fast": 1.0, "slow": 1.0}), curves)
    assert made.split is not None
    assert made.split.dropped == {"slow": 2}
    assert made.iteration_s == pytest.approx(1.2)
    assert made.split.kept_s == pytest.approx(10.0)
