"""LB-BSP as a plan: the step against a search over all splits, memory limits, and devices that are better left out.
Every figure of ``ddltool plan --strategy lb-bsp`` against all choices of devices and all splits, in exact fractions.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from operator import mul
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddltool.analyzers.answers.emitting.enforcement import to_enforcement
from ddltool.analyzers.job.balancing.minmax import DeviceCurves, Offer, _type_samples, choose
from ddltool.analyzers.job.goodput.throughput import StepTime, ThroughputParams
from ddltool.analyzers.job.placement.problem import Problem, from_job
from ddltool.analyzers.job.planning.job_inputs import step_curves
from ddltool.analyzers.job.planning.split import plan_bsp, plan_lb_bsp
from ddltool.errors import Infeasible, InputError
from ddltool.job import DeviceOffer, Job, read_job
from ddltool.plans import Plan
from tests.conftest import Cli


def problem(counts: dict[str, int], speeds: dict[str, float], workers: int = 3, batch: int = 4) -> Problem:
    devices = [DeviceOffer(type=name, count=count) for name, count in counts.items()]
    return from_job(Job(name="j", max_workers=workers, batch_size=batch, devices=devices), speeds)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 9)), min_size=2, max_size=3),
    st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_the_step_is_the_least_over_all_splits(shapes: list[tuple[int, int, int]], workers: int) -> None:
    names = [f"d{k}" for k in range(len(shapes))]
    curves = {
        name: StepTime(launch_s=launch, per_sample_s=slope, memory_limit=limit)
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
        assert any(row.accumulation_steps for row in plan_lb_bsp(given_problem, curves).assignments)
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
    curves = {"fast": StepTime(launch_s=0.0, per_sample_s=0.1), "slow": StepTime(launch_s=9.0, per_sample_s=1.0)}
    made = plan_lb_bsp(problem({"fast": 1, "slow": 2}, {"fast": 1.0, "slow": 1.0}), curves)
    assert made.split is not None
    assert made.split.dropped == {"slow": 2}
    assert made.iteration_s == pytest.approx(1.2)
    assert made.split.kept_s == pytest.approx(10.0)


def brute_force(
    shapes: list[tuple[int, int, int]], counts: list[int], total: int, allowed: Callable[[tuple[int, ...]], bool]
) -> float | None:
    """Return the least step over all numbers of devices that ``allowed`` admits and all splits over them."""
    kinds = [kind for kind, count in enumerate(counts) for _ in range(count)]
    best = None
    for sizes in itertools.product(*(range(min(shapes[kind][2], total) + 1) for kind in kinds)):
        if sum(sizes) != total:
            continue
        used = tuple(
            sum(1 for k, x in zip(kinds, sizes, strict=True) if k == kind and x) for kind in range(len(counts))
        )
        if not allowed(used):
            continue
        took = max(shapes[k][0] + shapes[k][1] * x for k, x in zip(kinds, sizes, strict=True) if x)
        best = took if best is None else min(best, took)
    return best


@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 6), st.integers(1, 2), st.integers(0, 5)),
        min_size=2,
        max_size=3,
    ),
    st.integers(1, 3),
    st.one_of(st.none(), st.integers(0, 14)),
    st.booleans(),
    st.integers(1, 7),
)
@example(shapes=[(0, 2, 6, 2, 10), (0, 3, 6, 3, 1)], most=2, budget=12, single=False, total=6)  # three would be faster
@settings(max_examples=60, deadline=None)
def test_devices_are_chosen_by_curves_and_limits(
    shapes: list[tuple[int, int, int, int, int]], most: int, budget: int | None, single: bool, total: int
) -> None:
    """Against all numbers of devices of each type and all splits: limits of devices, of money, and to one type."""
    curves = [shape[:3] for shape in shapes]
    counts, prices = [shape[3] for shape in shapes], tuple(shape[4] for shape in shapes)
    offer = Offer(
        counts=tuple(counts),
        max_devices=most,
        prices=None if budget is None else prices,
        budget=budget or 0,
        single_type=single,
    )

    def allowed(used: tuple[int, ...]) -> bool:
        cost = sum(number * price for number, price in zip(used, prices, strict=True))
        one = not single or sum(number > 0 for number in used) == 1
        return sum(used) <= most and (budget is None or cost <= budget) and one

    expected = brute_force(curves, counts, total, allowed)
    made = choose(
        DeviceCurves.of(
            launch_s=[float(each[0]) for each in curves],
            per_sample_s=[float(each[1]) for each in curves],
            memory_limit=[each[2] for each in curves],
        ),
        offer,
        total,
    )
    if expected is None:
        assert made is None
        return
    assert made is not None
    assert made.iteration_s == expected
    assert allowed(made.numbers)
    assert sum(row.devices * row.size for row in made.rows) == total
    assert all(1 <= row.size <= curves[row.kind][2] for row in made.rows)
    for kind, number in enumerate(made.numbers):
        assert sum(row.devices for row in made.rows if row.kind == kind) == number <= counts[kind]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 8)), min_size=1, max_size=3),
    st.lists(st.integers(0, 6), min_size=6, max_size=6),
    st.integers(1, 8),
)
@settings(max_examples=40, deadline=None)
def test_the_cost_of_synchronisation_is_seen(shapes: list[tuple[int, int, int]], grows: list[int], total: int) -> None:
    """Every number of devices has a best split of its own; the sum with what they pay decides."""
    counts = [2] * len(shapes)
    costs = list(itertools.accumulate(grows))
    made = choose(
        DeviceCurves.of(
            launch_s=[float(each[0]) for each in shapes],
            per_sample_s=[float(each[1]) for each in shapes],
            memory_limit=[each[2] for each in shapes],
        ),
        Offer(counts=tuple(counts)),
        total,
        lambda slowest, devices: slowest + costs[devices - 1],
    )
    found = [
        took + costs[devices - 1]
        for devices in range(1, sum(counts) + 1)
        if (took := brute_force(shapes, counts, total, lambda used, n=devices: sum(used) == n)) is not None
    ]
    assert (None if made is None else made.iteration_s) == min(found, default=None)


@given(st.integers(0, 10**6), st.integers(1, 8), st.sampled_from([1.0, 2.5]))
@settings(max_examples=25, deadline=None)
def test_devices_that_cost_nothing_are_as_good_as_unpriced_ones(seed: int, kinds: int, gamma: float) -> None:
    """The step is the same, and no number of devices, tried one after the other without its cost, makes a shorter one."""
    chance = np.random.default_rng(seed)
    curves = DeviceCurves.of(
        launch_s=chance.uniform(0, 0.3, kinds),
        per_sample_s=chance.uniform(0.001, 0.02, kinds),
        memory_limit=chance.integers(5, 60, kinds),
        accumulate=bool(seed % 2),
    )
    counts = tuple(chance.integers(1, 30, kinds).tolist())
    total, grows = int(chance.integers(1, 20 * sum(counts))), float(chance.uniform(0, 0.02))
    most = int(chance.integers(1, sum(counts) + 1)) if seed % 3 else None

    def finish(slowest_s: float, devices: int) -> float:
        return float((slowest_s**gamma + (grows * (devices - 1)) ** gamma) ** (1 / gamma))

    free = choose(curves, Offer(counts=counts, max_devices=most), total, finish)
    priced = choose(curves, Offer(counts=counts, max_devices=most, prices=(0,) * kinds), total, finish)
    if priced is None:
        assert free is None
        return
    assert free is not None
    assert free.iteration_s == pytest.approx(priced.iteration_s, rel=1e-14)
    assert sum(row.devices * row.size for row in free.rows) == total
    assert sum(free.numbers) <= (most or total)
    assert finish(free.slowest_s, sum(free.numbers)) == free.iteration_s
    for devices in range(1, min(sum(counts), total, most or total) + 1):
        made = choose(curves, Offer(counts=counts, max_devices=devices), total)
        assert made is None or finish(made.slowest_s, devices) >= free.iteration_s * (1 - 1e-14)


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_money_is_spent_where_it_buys_the_batch(seed: int) -> None:
    """A knapsack: the most samples for the price is not the most for the money. Against all numbers of devices."""
    chance = random.Random(seed)
    kinds = chance.randint(2, 3)
    limits, prices = ([chance.randint(3, 12) for _ in range(kinds)] for _ in range(2))
    counts, budget = [chance.randint(1, 4) for _ in range(kinds)], chance.randint(5, 30)
    offer = Offer(counts=tuple(counts), prices=tuple(prices), budget=budget, max_devices=chance.randint(2, 6))
    most = max(
        sum(number * limit for number, limit in zip(numbers, limits, strict=True))
        for numbers in itertools.product(*(range(count + 1) for count in counts))
        if sum(map(mul, prices, numbers)) <= budget and sum(numbers) <= (offer.max_devices or 0)
    )
    curves = DeviceCurves.of(per_sample_s=[1.0] * kinds, memory_limit=limits)
    if most:
        made = choose(curves, offer, most)
        assert made is not None
        assert sum(map(mul, prices, made.numbers)) <= budget
        assert sum(made.numbers) <= (offer.max_devices or 0)
    assert choose(curves, offer, most + 1) is None


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)), min_size=1, max_size=4), st.integers(1, 2**40))
def test_samples_beyond_64_bits_reach_the_batch_where_they_do(kinds: list[tuple[int, int]], total: int) -> None:
    """Products in whole numbers of any length; what one device makes is never more than the batch."""
    made = [(number, min(size, total)) for number, size in kinds]
    found = _type_samples(*(np.array(each, dtype=np.int64) for each in zip(*made, strict=True)), total).tolist()
    exact = [number * size for number, size in made]
    assert min(sum(found), total) == min(sum(exact), total)
    if sum(exact) < total:
        assert found == exact
    assert all(0 <= one <= other for one, other in zip(found, exact, strict=True))


def lb_bsp(tmp_path: Path, text: str) -> Plan:
    """Return the plan of a job.yaml as the command makes it."""
    file = tmp_path / "job.yaml"
    file.write_text("kind: ddltool.job\nname: j\n" + text)
    job = read_job(file)
    capabilities = {offer.type: offer.capability_per_s or 0.0 for offer in job.devices}
    return plan_lb_bsp(from_job(job, capabilities), step_curves(job, file))


DEVICES = """
max_workers: 2
batch_size: 64
devices:
  - {type: Fast, count: 1, capability_per_s: 10, max_local_batch_size: 16}
  - {type: Slow, count: 2, capability_per_s: 4, max_local_batch_size: 128}
"""


@pytest.mark.parametrize(
    ("most", "step_s", "rows"),
    [(1, 0.5, {("Slow", 128): 1}), (2, 0.25, {("Slow", 64): 2}), (3, 56 / 256, {("Fast", 16): 1, ("Slow", 56): 2})],
)
def test_a_fast_device_with_little_memory_is_not_taken_for_its_speed(
    most: int, step_s: float, rows: dict[tuple[str, int], int], tmp_path: Path
) -> None:
    made = lb_bsp(tmp_path, f"{DEVICES}constraints: {{max_devices: {most}}}\n")
    assert made.iteration_s == pytest.approx(step_s)
    assert {(row.device_type, row.local_batch_size): row.devices for row in made.assignments} == rows
    assert made.split is not None
    assert made.split.accumulated_s == pytest.approx({1: 0.2, 2: 0.1428, 3: 0.1111}[most], rel=0.02)


def test_memory_limits_of_the_job_bind(tmp_path: Path) -> None:
    """10 GiB for 8 samples: a 40 GiB device holds 32, a 16 GiB device 8; with 10 GiB fixed 24 and none."""
    text = """
max_workers: 6
batch_size: 8
devices:
  - {type: Big, count: 1, capability_per_s: 9, memory_gib: 40}
  - {type: Small, count: 2, capability_per_s: 3, memory_gib: 16}
"""
    limit = "constraints: {memory_per_worker_gib: 10}\n"
    made = lb_bsp(tmp_path, text + limit)
    assert {row.device_type: row.local_batch_size for row in made.assignments} == {"Big": 32, "Small": 8}
    fixed = lb_bsp(tmp_path, text + "constraints: {memory_per_worker_gib: 10, memory_fixed_gib: 10}\n")
    assert [(row.device_type, row.local_batch_size, row.accumulation_steps) for row in fixed.assignments] == [
        ("Big", 48, 1)
    ]
    section = "goodput: {max_batch_size: 64, max_local_batch_size: 20}\n"
    assert max(row.local_batch_size for row in lb_bsp(tmp_path, text + section).assignments) == 20
    with pytest.raises(Infeasible, match="one worker needs 50 GiB"):
        lb_bsp(tmp_path, text + "constraints: {memory_per_worker_gib: 50}\n")


def test_passes_where_memory_does_not_hold_the_batch(tmp_path: Path) -> None:
    """Each pass pays its launch; the whole numbers are those of a search over all splits."""
    curves = {
        "a": StepTime(launch_s=2.0, per_sample_s=1.0, memory_limit=2),
        "b": StepTime(launch_s=1.0, per_sample_s=3.0, memory_limit=3),
    }
    made = plan_lb_bsp(problem({"a": 1, "b": 1}, {"a": 1.0, "b": 1.0}, workers=3), curves)

    def seconds(x: int, launch: float, slope: float, limit: int) -> float:
        return -(-x // limit) * launch + slope * x if x else 0.0

    assert made.iteration_s == min(max(seconds(x, 2, 1, 2), seconds(12 - x, 1, 3, 3)) for x in range(13))
    for row in made.assignments:
        limit = {"a": 2, "b": 3}[row.device_type]
        assert -(-row.local_batch_size // (row.accumulation_steps + 1)) <= limit
    assert any(row.accumulation_steps for row in made.assignments)


def test_saturation_makes_small_batches_dear(tmp_path: Path) -> None:
    """A device that is saturated at 32 samples takes as long for fewer, so the other one gets what it can."""
    text = """
max_workers: 1
batch_size: 40
devices:
  - {type: a, count: 1, capability_per_s: 1}
  - {type: b, count: 1, capability_per_s: 1%s}
"""
    even = lb_bsp(tmp_path, text % "")
    assert [row.local_batch_size for row in even.assignments] == [20, 20]
    made = lb_bsp(tmp_path, text % ", saturation_batch: 80")  # 40 samples take a second, and so do 1 to 80
    assert made.split is not None
    assert {row.device_type: row.local_batch_size for row in made.assignments} != {"a": 20, "b": 20}
    assert made.iteration_s == pytest.approx(1.0)


def test_waste_is_that_of_the_same_curves() -> None:
    """Two devices, 10 and 2 samples: 1 + 10 and 8 + 2 seconds. What they make at their own pace less what the step does."""
    curves = {"a": StepTime(launch_s=1.0, per_sample_s=1.0), "b": StepTime(launch_s=8.0, per_sample_s=1.0)}
    made = plan_lb_bsp(problem({"a": 1, "b": 1}, {"a": 1.0, "b": 1.0}), curves)
    sizes = {row.device_type: row.local_batch_size for row in made.assignments}
    assert sizes == {"a": 10, "b": 2}
    assert made.waste == pytest.approx((10 / 11 + 2 / 10 - 12 / 11) / 4)
    assert made.waste + made.throughput == pytest.approx((10 / 11 + 2 / 10) / 4)


def test_synchronisation_leaves_devices_out(tmp_path: Path) -> None:
    """8 equal devices, 1 s each for the whole batch: more than 4 cost more to synchronise than they compute."""
    costs = ThroughputParams(
        alpha_grad_s=0.0,
        beta_grad_s=1 / 64,
        alpha_sync_local_s=0.1,
        beta_sync_local_s=0.05,
        alpha_sync_node_s=0.5,
        beta_sync_node_s=0.05,
        gamma=1.0,
    )
    curve = StepTime(per_sample_s=1 / 64, sync=costs, devices_per_node=4)
    given_problem = problem({"a": 8}, {"a": 1.0}, workers=16)
    made = plan_lb_bsp(given_problem, {"a": curve})
    steps = {n: -(-64 // n) / 64 + (0 if n == 1 else (0.1 if n <= 4 else 0.5) + 0.05 * (n - 2)) for n in range(1, 9)}
    best = min(steps, key=lambda n: steps[n])
    assert made.iteration_s == pytest.approx(steps[best])
    assert made.world_size == best
    assert made.split is not None
    assert made.split.dropped == {"a": 8 - best}
    assert made.split.kept_s == pytest.approx(steps[8])
    assert made.communication_s == pytest.approx(steps[best] - -(-64 // best) / 64)
    bare = plan_lb_bsp(given_problem, {"a": curve}, synchronise=False)
    assert bare.world_size == 8
    assert bare.communication_s is None


def test_a_hundred_thousand_devices_of_a_type_cost_no_more_than_one() -> None:
    def cpu_s(count: int) -> float:
        begin = time.process_time()
        made = plan_lb_bsp(problem({"a": count, "b": count}, {"a": 3.0, "b": 1.0}, workers=4 * count, batch=8))
        assert sum(row.devices * row.local_batch_size for row in made.assignments) == 32 * count
        assert made.iteration_s == pytest.approx(1.0)
        return time.process_time() - begin

    assert min(cpu_s(100_000) for _ in range(3)) < 30 * max(min(cpu_s(10) for _ in range(3)), 1e-3)  # a clock's tick


def test_a_batch_beyond_what_can_be_split(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"job.yaml:batch_size: is 10{15}.*at most 500000000000 "):
        lb_bsp(tmp_path, DEVICES.replace("batch_size: 64", f"batch_size: {10**15}"))
    with pytest.raises(Infeasible, match="would make 34,722,222,223 passes of a step; 10,000 are the most"):
        lb_bsp(tmp_path, DEVICES.replace("batch_size: 64", f"batch_size: {5 * 10**11}"))
    made = lb_bsp(tmp_path, DEVICES.replace("batch_size: 64", f"batch_size: {5 * 10**4}"))
    assert sum(row.devices * row.local_batch_size for row in made.assignments) == 10**5


JobDocument = dict[str, Any]


def fraction(value: float) -> Fraction:
    return Fraction(repr(value))


def random_job(chance: random.Random) -> JobDocument:
    """Return a job of up to three types of up to two devices, with limits of memory, money, number and type."""
    devices = []
    for kind in range(chance.randint(1, 3)):
        device: JobDocument = {
            "type": f"T{kind}",
            "count": chance.randint(1, 2),
            "capability_per_s": chance.choice((chance.randint(1, 6), chance.randint(1, 60) / 10)),
            "price_per_hour": chance.choice((0, 1, 2.5, 3.1)),
            "memory_gib": chance.choice((1, 2, 3.3, 5)),
        }
        if chance.random() < 0.4:
            device["max_local_batch_size"] = chance.randint(1, 6)
        if chance.random() < 0.4:
            device["saturation_batch"] = chance.randint(1, 5)
        devices.append(device)
    limits: JobDocument = {}
    if chance.random() < 0.3:
        limits["max_devices"] = chance.randint(1, 3)
    if chance.random() < 0.3:
        limits["max_price_per_hour"] = chance.choice((1, 2, 4.5, 6))
    if chance.random() < 0.2:
        limits["homogeneous"] = True
    if chance.random() < 0.4:
        limits["memory_per_worker_gib"] = chance.choice((1, 0.5, 0.3))
        if chance.random() < 0.5:
            limits["memory_fixed_gib"] = 0.5
    return {
        "kind": "ddltool.job",
        "name": "numbers",
        "max_workers": chance.randint(1, 4),
        "batch_size": chance.randint(1, 3),
        "devices": devices,
        "constraints": limits,
    }


def allowed(job: JobDocument) -> Iterator[tuple[int, ...]]:
    """Yield the numbers of devices of each type that the job's limits allow."""
    limits = job["constraints"]
    most = min(limits.get("max_devices", 99), job["max_workers"] * job["batch_size"])
    for numbers in itertools.product(*(range(device["count"] + 1) for device in job["devices"])):
        price = sum(fraction(d["price_per_hour"]) * n for d, n in zip(job["devices"], numbers, strict=True))
        if not 1 <= sum(numbers) <= most or price > fraction(limits.get("max_price_per_hour", 99)):
            continue
        if not limits.get("homogeneous") or sum(number > 0 for number in numbers) == 1:
            yield numbers


def limit_of(job: JobDocument, device: JobDocument) -> int:
    """Return the most samples that a device holds at a time."""
    known = [device.get("max_local_batch_size", 10**6)]
    limits = job["constraints"]
    if "memory_per_worker_gib" in limits:
        room = fraction(device["memory_gib"]) - fraction(limits.get("memory_fixed_gib", 0))
        known.append(max(0, math.floor(room / fraction(limits["memory_per_worker_gib"]))) * job["batch_size"])
    return min(known)


def seconds(job: JobDocument, device: JobDocument, size: int, *, passes: bool) -> Fraction | None:
    """Return the seconds of a device with ``size`` samples, in as few and as equal passes as fit; None where none does."""
    limit, saturation = limit_of(job, device), device.get("saturation_batch", 0)
    if limit == 0 or (size > limit and not passes):
        return None
    count = -(-size // limit)
    parts = [size // count + (place < size % count) for place in range(count)]
    each = 1 / (fraction(device["capability_per_s"]) * max(job["batch_size"], saturation))
    return sum((each * max(part, saturation) for part in parts), Fraction(0))


def shortest(job: JobDocument, choices: list[tuple[int, ...]], *, passes: bool) -> Fraction | None:
    """Return the least slowest device over the choices and over all splits in which every device has a sample."""
    total = job["max_workers"] * job["batch_size"]
    best = None
    for numbers in choices:
        ends: dict[int, Fraction] = {0: Fraction(0)}  # samples given so far: the least slowest device
        for device in (d for d, n in zip(job["devices"], numbers, strict=True) for _ in range(n)):
            following: dict[int, Fraction] = {}
            for taken, at in ends.items():
                for size in range(1, total - taken + 1):
                    took = seconds(job, device, size, passes=passes)
                    if took is not None:
                        end = max(at, took)
                        following[taken + size] = min(end, following.get(taken + size, end))
            ends = following
        if total in ends and (best is None or ends[total] < best):
            best = ends[total]
    return best


@pytest.mark.parametrize("seed", range(40))
def test_every_figure_of_the_plan(cli: Cli, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    job = random_job(chance)
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job), encoding="utf-8")
    result = cli("plan", path, "--strategy", "lb-bsp", "--json")
    at_once = shortest(job, list(allowed(job)), passes=False)
    in_passes = shortest(job, list(allowed(job)), passes=True)
    best = at_once if at_once is not None else in_passes
    if best is None:
        assert result.code == 3
        return
    assert result.code == 0, result.err
    plan, made = result.document, result.document["split"]
    by_name = {device["type"]: device for device in job["devices"]}
    total = job["max_workers"] * job["batch_size"]
    assert plan["iteration_s"] == pytest.approx(float(best), rel=1e-12)
    assert plan["throughput"] == pytest.approx(float(job["max_workers"] / best), rel=1e-12)
    idle, capability, used, given = Fraction(0), Fraction(0), dict.fromkeys(by_name, 0), 0
    for row in plan["assignments"]:
        device, size = by_name[row["device_type"]], row["local_batch_size"]
        took = seconds(job, device, size, passes=at_once is None)
        assert took is not None
        assert row["compute_s"] == pytest.approx(float(took), rel=1e-12)
        assert row["accumulation_steps"] == -(-size // limit_of(job, device)) - 1
        idle += row["devices"] * (best - took)
        capability += row["devices"] * size / took / job["batch_size"]
        used[row["device_type"]] += row["devices"]
        given += row["devices"] * size
    assert given == total
    assert tuple(used.values()) in set(allowed(job))
    assert made["idle_s"] == pytest.approx(float(idle), rel=1e-9, abs=1e-12)
    assert plan["waste"] == pytest.approx(float(max(0, capability - job["max_workers"] / best)), rel=1e-9, abs=1e-9)
    shorter = at_once is not None and in_passes is not None and in_passes < at_once
    assert made["accumulated_s"] == (pytest.approx(float(in_passes or 0), rel=1e-12) if shorter else None)
    everybody = tuple(number + made["dropped"].get(name, 0) for name, number in used.items())
    kept = shortest(job, [everybody], passes=at_once is None)
    assert made["kept_s"] == (None if kept is None else pytest.approx(float(kept), rel=1e-12))
