"""ElasticBSP as a plan: the best superstep against enumeration, and what the plan says about it.
Every figure of ``ddltool plan --strategy elastic-bsp`` against all devices and all numbers of iterations.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.answers.emitting.enforcement import to_enforcement
from ddltool.analyzers.job.placement.problem import Problem, from_job
from ddltool.analyzers.job.planning.split import plan_bsp
from ddltool.analyzers.job.planning.superstep import best_superstep, choose, plan_elastic_bsp
from ddltool.errors import Infeasible, InputError
from ddltool.job import Constraints, DeviceOffer, read_job
from tests.conftest import Cli, job

Best = tuple[Fraction, int, Fraction]
"""Mini-batches per second, negated; devices; the barrier: the least is the plan that is preferred."""


def by_enumeration(workers: list[tuple[Fraction, int]], lookahead: int, max_gap: int | None) -> Best:
    """The best over every choice of iterations: the barrier is when the last worker ends."""
    rows = []
    for chosen in itertools.product(range(1, lookahead + 1), repeat=len(workers)):
        if max_gap is None or max(chosen) - min(chosen) <= max_gap:
            at = max(k / speed for k, (speed, _) in zip(chosen, workers, strict=True))
            made = sum(k * count for k, (_, count) in zip(chosen, workers, strict=True))
            rows.append((-made / at, sum(count for _, count in workers), at))
    return min(rows)


def one_end_at_a_time(
    workers: list[tuple[Fraction, int]], lookahead: int, max_gap: int | None
) -> tuple[Fraction, list[int]]:
    """The same search in fractions, barrier by barrier: the earliest of the best."""
    best: tuple[Fraction, Fraction, list[int]] | None = None
    for at in sorted({k / speed for speed, _ in workers for k in range(1, lookahead + 1)}):
        iterations = [min(lookahead, int(at * speed)) for speed, _ in workers]
        if min(iterations) < 1:
            continue
        if max_gap is not None:
            iterations = [min(k, min(iterations) + max_gap) for k in iterations]
        rate = sum(k * count for k, (_, count) in zip(iterations, workers, strict=True)) / at
        if best is None or rate > best[0]:
            best = (rate, at, iterations)
    assert best is not None
    return best[1], best[2]


speeds = st.fractions(min_value=Fraction(1, 5), max_value=9, max_denominator=12)


@given(
    st.lists(st.tuples(speeds, st.integers(1, 5)), min_size=1, max_size=3),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(0, 4)),
)
@settings(max_examples=80, deadline=None)
def test_the_best_superstep_equals_enumeration(
    workers: list[tuple[Fraction, int]], lookahead: int, max_gap: int | None
) -> None:
    barrier, iterations = best_superstep(workers, lookahead, max_gap)
    rate = sum(k * count for k, (_, count) in zip(iterations, workers, strict=True)) / barrier
    assert rate == -by_enumeration(workers, lookahead, max_gap)[0]
    assert barrier >= max(k / speed for k, (speed, _) in zip(iterations, workers, strict=True))
    assert max_gap is None or max(iterations) - min(iterations) <= max_gap


# Decimals as they are measured have long fractions, whose products leave 64 bits.
measured = st.floats(0.01, 50, allow_nan=False).map(Fraction)


@given(
    st.lists(st.tuples(st.one_of(speeds, measured), st.integers(1, 1000)), min_size=1, max_size=5),
    st.integers(1, 40),
    st.one_of(st.none(), st.integers(0, 9)),
)
@settings(max_examples=120, deadline=None)
def test_the_search_on_arrays_is_exact_and_takes_the_first(
    workers: list[tuple[Fraction, int]], lookahead: int, max_gap: int | None
) -> None:
    assert best_superstep(workers, lookahead, max_gap) == one_end_at_a_time(workers, lookahead, max_gap)


def test_a_long_lookahead_costs_little_and_too_long_a_one_is_refused() -> None:
    """In CPU time against the search barrier by barrier at a hundredth of the length."""
    workers = [(Fraction("3.1"), 4), (Fraction("2.4"), 4), (Fraction("1.07"), 4)]
    begin = time.process_time()
    expected = one_end_at_a_time(workers, 1000, None)
    slow = time.process_time() - begin
    begin = time.process_time()
    found = best_superstep(workers, 100_000)
    assert time.process_time() - begin < 20 * slow
    assert sum(found[1]) / found[0] >= sum(expected[1]) / expected[0]
    with pytest.raises(InputError, match="100000 iterations of 40 device types are too many; at most 62500 for these"):
        best_superstep([(Fraction(k), 1) for k in range(1, 41)], 100_000)


asked = partial(job, {"V100": (2, 3.0), "T4": (1, 1.0)}, batch_size=16)


CAPABILITIES = {"V100": 3.0, "T4": 1.0}


def test_a_plan_by_hand() -> None:
    """3, 3 and 1 mini-batches a second meet after one second without any waiting: 7 a second."""
    made = plan_elastic_bsp(from_job(asked(), CAPABILITIES))
    assert made.superstep is not None
    assert made.superstep.iterations == {"V100": 3, "T4": 1}
    assert (made.superstep.superstep_s, made.superstep.waiting_s, made.superstep.iteration_gap) == (1.0, 0.0, 2)
    assert made.throughput == pytest.approx(7.0)
    assert made.iteration_s == pytest.approx(8 / 7)
    assert made.throughput > plan_bsp(from_job(asked(), CAPABILITIES)).throughput


def test_waiting_and_waste_by_hand() -> None:
    """Two iterations of 1/3 s, twice, and one of 0.8 s: 5 in 0.8 s, before which the two wait 0.8 - 2/3 s each."""
    made = plan_elastic_bsp(from_job(asked(), {"V100": 3.0, "T4": 1.25}), lookahead=2)
    assert made.superstep is not None
    assert (made.superstep.iterations, made.superstep.mini_batches) == ({"V100": 2, "T4": 1}, 5)
    assert made.superstep.superstep_s == pytest.approx(0.8)
    assert made.superstep.waiting_s == pytest.approx(0.8 - 2 / 3)
    assert made.superstep.total_waiting_s == pytest.approx(2 * (0.8 - 2 / 3))
    assert (made.throughput, made.waste) == (pytest.approx(6.25), pytest.approx(1.0))
    assert plan_elastic_bsp(from_job(asked(), CAPABILITIES)).waste == 0.0


def test_a_gap_of_zero_is_bsp_with_one_mini_batch_each() -> None:
    """With the slow device 3 mini-batches a second, without it 6."""
    made = plan_elastic_bsp(from_job(asked(), CAPABILITIES), max_gap=0)
    assert made.superstep is not None
    assert made.superstep.iterations == {"V100": 1}
    assert made.superstep.left_out == {"T4": 1}
    assert made.throughput == pytest.approx(6.0)
    only = plan_elastic_bsp(from_job(asked(constraints=Constraints(max_devices=2)), CAPABILITIES), max_gap=0)
    assert only.superstep is not None
    assert (only.throughput, only.superstep.left_out) == (made.throughput, {})


def test_a_device_that_costs_throughput_is_left_out() -> None:
    """Two devices of 3 a second wait ten seconds for one of 0.1, or make 6 a second without it."""
    capabilities = {"A": 3.0, "B": 0.1}
    devices = [DeviceOffer(type=name, count=count) for name, count in (("A", 2), ("B", 1))]
    made = plan_elastic_bsp(from_job(asked(devices=devices), capabilities))
    assert made.throughput == pytest.approx(6.0)
    assert made.superstep is not None
    assert made.superstep.left_out == {"B": 1}
    long = plan_elastic_bsp(from_job(asked(devices=devices), capabilities), lookahead=30)
    assert long.throughput == pytest.approx(6.1)
    assert long.superstep is not None
    assert long.superstep.left_out == {}


def by_all_devices(problem: Problem, lookahead: int, max_gap: int | None) -> Best | None:
    """The best over every choice of counts and, for each, of iterations; None: no devices are allowed."""
    rows = []
    for counts in itertools.product(*(range(device.count + 1) for device in problem.devices)):
        used = [(device, count) for device, count in zip(problem.devices, counts, strict=True) if count]
        price = sum(count * (device.price_micro or 0) for device, count in used)
        if not used or sum(counts) > problem.device_limit or (problem.single_type and len(used) > 1):
            continue
        if problem.max_price_micro is None or price <= problem.max_price_micro:
            workers = [(device.capability_per_s, count) for device, count in used]
            rows.append(by_enumeration(workers, lookahead, max_gap))
    return min(rows, default=None)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 12), st.integers(0, 4)), min_size=1, max_size=3),
    st.integers(1, 4),
    st.one_of(st.none(), st.integers(0, 2)),
    st.integers(1, 7),
    st.one_of(st.none(), st.integers(4, 12)),
    st.booleans(),
    st.sampled_from((0.0, 30.0)),
)
@settings(max_examples=80, deadline=None)
def test_no_other_devices_make_more(
    offers: list[tuple[int, int, int]],
    lookahead: int,
    max_gap: int | None,
    most: int,
    price: int | None,
    homogeneous: bool,
    limit_s: float,
) -> None:
    """Without time some are tried: the plan then says by how much it may be off, and is right."""
    devices = [DeviceOffer(type=f"d{i}", count=count, price_per_hour=cost) for i, (count, _, cost) in enumerate(offers)]
    capabilities = {f"d{i}": speed / 4 for i, (_, speed, _) in enumerate(offers)}
    limits = Constraints(max_price_per_hour=price, homogeneous=homogeneous)
    problem = from_job(asked(devices=devices, max_workers=most, constraints=limits), capabilities)
    found = choose(problem, lookahead, max_gap, limit_s)
    best, made = -(by_all_devices(problem, lookahead, max_gap) or (0,))[0], found.evaluation
    assert made.rate_per_s <= best <= 1 / found.bound * (1 + 1e-9)
    if limit_s:
        assert (made.rate_per_s, found.gap) == (best, 0.0)
    assert sum(k * found.counts[kind] for k, kind in zip(made.iterations, made.type_indices, strict=True)) == (
        made.rate_per_s * made.barrier_s
    )


def test_no_more_devices_than_workers_and_none_that_is_too_dear() -> None:
    made = plan_elastic_bsp(from_job(asked(max_workers=2), CAPABILITIES))
    assert sum(row.devices for row in made.assignments) == 2
    dear = job({"V100": (2, None, 3.0), "T4": (1, None, 0.5)}, constraints={"max_price_per_hour": 2.0})
    made = plan_elastic_bsp(from_job(dear, CAPABILITIES))
    assert [(row.device_type, row.devices) for row in made.assignments] == [("T4", 1)]
    assert (made.throughput, made.waste, made.status) == (1.0, 0.0, "optimal")


def test_most_of_the_capability_may_be_wasted() -> None:
    """One iteration of each: all five wait for the slowest, and 5 x 21.6 is still more than fewer would make."""
    speeds = {"a": 100.0, "b": 51.0, "c": 34.7, "d": 26.5, "e": 21.6}
    made = plan_elastic_bsp(from_job(job(dict.fromkeys(speeds, (1,))), speeds), lookahead=1)
    assert (made.throughput, made.waste) == (pytest.approx(108.0), pytest.approx(sum(speeds.values()) - 108.0))


def test_the_server_is_told_the_superstep() -> None:
    made = plan_elastic_bsp(from_job(asked(), CAPABILITIES))
    assert made.superstep is not None
    assert to_enforcement(made).superstep == made.superstep
    with pytest.raises(InputError, match="look 1 iteration ahead"):
        best_superstep([(Fraction(1), 1)], 0)


@pytest.mark.parametrize("seed", range(100))
def test_every_figure_of_the_plan(cli: Cli, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    devices = [
        {
            "type": f"T{kind}",
            "count": chance.randint(1, 2),
            "capability_per_s": chance.choice((chance.randint(1, 6), chance.randint(1, 60) / 10)),
            "price_per_hour": chance.choice((0, 1, 2.5, 3.1)),
        }
        for kind in range(chance.randint(1, 3))
    ]
    limits: dict[str, object] = {}
    if chance.random() < 0.3:
        limits["max_devices"] = chance.randint(1, 3)
    if chance.random() < 0.3:
        limits["max_price_per_hour"] = chance.choice((1, 2, 4.5, 6))
    if chance.random() < 0.2:
        limits["homogeneous"] = True
    workers, lookahead, gap = chance.randint(1, 4), chance.randint(1, 4), chance.choice((None, None, 0, 1, 2))
    job = {"kind": "ddltool.job", "name": "numbers", "max_workers": workers, "devices": devices, "constraints": limits}
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    options = ["--lookahead", lookahead, *(() if gap is None else ("--max-gap", gap))]
    result = cli("plan", path, "--strategy", "elastic-bsp", *options, "--json")
    speeds = {str(device["type"]): float(device["capability_per_s"]) for device in devices}
    try:
        best = by_all_devices(from_job(read_job(path), speeds), lookahead, gap)
    except Infeasible:  # nothing can be paid for
        best = None
    if best is None:
        assert result.code == 3
        return
    assert result.code == 0, result.err
    plan, made_of = result.document, result.document["superstep"]
    rate, number, barrier = best
    assert plan["status"] == "optimal"
    assert plan["throughput"] == pytest.approx(float(-rate), rel=1e-12)
    assert plan["iteration_s"] == pytest.approx(float(workers / -rate), rel=1e-12)
    assert made_of["superstep_s"] == pytest.approx(float(barrier), rel=1e-12)
    rows = {row["device_type"]: row["devices"] for row in plan["assignments"]}
    assert sum(rows.values()) == number
    iterations = made_of["iterations"]
    assert set(iterations) == set(rows)
    waits = {name: barrier - count / Fraction(repr(speeds[name])) for name, count in iterations.items()}
    assert min(waits.values()) == 0
    assert made_of["mini_batches"] == sum(count * rows[name] for name, count in iterations.items())
    assert made_of["mini_batches"] / barrier == -rate
    assert made_of["waiting_s"] == pytest.approx(float(max(waits.values())), rel=1e-9)
    total = sum(wait * rows[name] for name, wait in waits.items())
    assert made_of["total_waiting_s"] == pytest.approx(float(total), rel=1e-9)
    assert made_of["iteration_gap"] == max(iterations.values()) - min(iterations.values())
