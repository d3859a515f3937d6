"""The best devices for every strategy: equal to trying all of them, and never worse for more devices, options or money."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddltool.analyzers.job.placement.problem import Problem, from_job
from ddltool.analyzers.job.placement.steps import best_step, device_counts
from ddltool.analyzers.job.planning.candidates import Candidates
from ddltool.analyzers.job.planning.compare import decide
from ddltool.analyzers.job.planning.device_search import best_devices
from ddltool.analyzers.job.planning.exposed import Communication, Exposed, GraphCommunication
from ddltool.analyzers.job.planning.goal import Failures, Goal
from ddltool.analyzers.job.planning.job_model import JobModel
from ddltool.analyzers.job.planning.options import PlanOptions
from ddltool.analyzers.job.planning.split import plan_bsp, plan_lb_bsp
from ddltool.analyzers.job.planning.superstep import plan_elastic_bsp
from ddltool.analyzers.step.communication.collectives import best_cuts, default_cuts, finish_s
from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.analyzers.step.communication.program import stretched
from ddltool.analyzers.step.costs.model import cost_model, estimate
from ddltool.device import Network
from ddltool.errors import Infeasible, InputError
from ddltool.graph import read_graph
from ddltool.job import Job
from ddltool.links import parse_link, parse_nic
from ddltool.shipped import calibration, devices, folder
from tests.conftest import job

SPEEDS = (0.3, 0.5, 1.0, 1.7, 2.4, 3.1, 6.0)
PRICES = (0.0, 0.3, 1.0, 2.5)


class Ring(Communication):
    """A ring over the slowest of the used links: what the devices share grows with their number, and with a slow type."""

    source = "a ring"

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self.seconds = seconds

    def synchronous(self, devices: Mapping[str, int], pass_s: float) -> Exposed:
        count, slowest = sum(devices.values()), max(self.seconds[name] for name in devices)
        exposed = max(0.0, 2 * (count - 1) / count * slowest - pass_s / 2)
        return Exposed(default_s=1.2 * exposed, best_s=exposed, setting="ring")

    def asynchronous(self, devices: Mapping[str, int], pass_s: float) -> Exposed:
        slowest = max(self.seconds[name] for name in devices)
        return Exposed(default_s=slowest, best_s=slowest, setting="ring")

    def bound_s(self, devices: Mapping[str, int], most: Mapping[str, int], pass_s: float) -> float:
        return self.synchronous(devices, pass_s).best_s if sum(devices.values()) > 1 else 0.0


def problem_of(made: Job) -> Problem:
    return from_job(made, {offer.type: offer.capability_per_s or 1.0 for offer in made.devices})


def on(problem: Problem, counts: tuple[int, ...]) -> Problem:
    kept = tuple(replace(it, count=n) for it, n in zip(problem.devices, counts, strict=True) if n)
    return replace(problem, devices=kept, max_devices=None, max_price_micro=None)


RESTS_S, SKEW = {"A": 0.01, "B": 0.03, "C": 0.2}, 0.1


def besides(every: Mapping[str, int], compute_s: float) -> float:
    """Return what such a step takes beside compute and communication."""
    return max(RESTS_S[name] for name in every) + (SKEW * compute_s if sum(every.values()) > 1 else 0.0)


def by_hand(name: str, problem: Problem, counts: tuple[int, ...], ring: Ring) -> float:
    """Return the step of a strategy on exactly these devices, from the planners of single strategies; infinite: none."""
    part = on(problem, counts)
    every = {device.name: device.count for device in part.devices}
    if name == "est":
        step = best_step(part, tuple(every.values()))
        if step is None or sum(counts) > part.max_workers:
            return math.inf
        rooms = {device.name: part.est_capacity(device, step) for device in part.devices}
        last = max(
            1 / device.capability_per_s
            for device in part.devices
            if rooms[device.name] / device.capability_per_s == step
        )
        return float(step) + ring.least_s(every, float(last)) + besides(every, float(step))
    if name == "elastic-bsp":
        transfer = Fraction(ring.asynchronous(every, 1.0).best_s)
        slow = [
            replace(it, capability_per_s=1 / (1 / it.capability_per_s + transfer + Fraction(RESTS_S[it.name])))
            for it in part.devices
        ]
        plan = plan_elastic_bsp(replace(part, devices=tuple(slow)))
        return plan.iteration_s if device_counts(plan) == every else math.inf
    plan = plan_bsp(part) if name == "bsp" else plan_lb_bsp(part)
    if device_counts(plan) != every:
        return math.inf
    return plan.iteration_s + ring.least_s(every, plan.iteration_s) + besides(every, plan.iteration_s)


def found_by(name: str, made: Job, ring: Ring, goal: Goal | None = None) -> float:
    """Return what the search's plan is worth by the goal; infinite where there is none."""
    problem, aim = problem_of(made), goal or Goal(step_samples=made.max_workers * made.batch_size)
    known = JobModel(communication=ring, overhead_s=RESTS_S, imbalance=SKEW)
    maker = Candidates(job=made, model=known, options=PlanOptions(limit_s=60.0, goal=aim))
    try:
        candidate = maker._search_counts(name, problem)
    except Infeasible:
        return math.inf
    assert candidate.plan.status == "optimal"
    return aim.value(candidate.option)


offers = st.dictionaries(
    st.sampled_from(["A", "B", "C"]),
    st.tuples(st.integers(1, 4), st.sampled_from(SPEEDS), st.sampled_from(PRICES)),
    min_size=1,
)
rings = st.fixed_dictionaries({name: st.sampled_from([0.0, 0.05, 0.4, 3.0]) for name in "ABC"})
limits = st.fixed_dictionaries(
    {},
    optional={
        "max_devices": st.integers(1, 6),
        "max_price_per_hour": st.sampled_from([2.5, 5.0]),
        "homogeneous": st.just(True),
    },
)


def check_equal_to_all(
    offered: dict[str, tuple[int, float, float]],
    seconds: dict[str, float],
    workers: int,
    batch: int,
    more: dict[str, Any],
) -> None:
    made, ring = job(offered, max_workers=workers, batch_size=batch, constraints=more), Ring(seconds)
    try:
        problem = problem_of(made)
    except Infeasible:
        return
    every = list(itertools.product(*(range(device.count + 1) for device in problem.devices)))
    for name in ("bsp", "lb-bsp", "est", "elastic-bsp"):
        most = replace(problem, max_workers=workers * batch) if name in ("bsp", "lb-bsp") else problem
        allowed = [counts for counts in every if most.allows(counts)]
        steps = {counts: by_hand(name, problem, counts, ring) for counts in allowed}
        assert found_by(name, made, ring) == pytest.approx(min(steps.values()), rel=1e-9), name
        prices = [(it.price_micro or 0) / 1e6 / 3600 for it in problem.devices]
        cost = [
            steps[counts] * sum(n * price for n, price in zip(counts, prices, strict=True)) / (workers * batch)
            for counts in allowed
            if steps[counts] < math.inf
        ]
        goal = Goal(objective="cheapest", step_samples=workers * batch)
        assert found_by(name, made, ring, goal) == pytest.approx(min(cost, default=math.inf), rel=1e-6, abs=1e-15), name


drawn = given(st.tuples(offers, rings, st.integers(1, 9), st.sampled_from([1, 8]), limits))


@drawn
@settings(max_examples=25, deadline=None)
def test_the_search_is_equal_to_trying_all_devices(case: tuple[Any, ...]) -> None:
    check_equal_to_all(*case)


@pytest.mark.slow
@drawn
@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
def test_five_hundred_jobs_are_equal_to_trying_all_devices(case: tuple[Any, ...]) -> None:
    check_equal_to_all(*case)


def check_more_is_never_worse(
    offered: dict[str, tuple[int, float, float]], seconds: dict[str, float], workers: int, budget: float
) -> None:
    """One type less, one device less of each, less money: the answer is no better, but by the 2 % that simplicity may cost.

    What asynchronous workers reach counts 10 % less, by which they must be ahead.
    """

    def answer(some: Mapping[str, tuple[int, float, float]], **more: Any) -> float:
        made = job(some, max_workers=workers, batch_size=8, constraints=more)
        try:
            known = JobModel(communication=Ring(seconds), overhead_s=RESTS_S, imbalance=SKEW)
            plan = decide(made, problem_of(made), known, options=PlanOptions(limit_s=60.0))
        except Infeasible:
            return math.inf
        return plan.iteration_s * (1.1 if plan.strategy == "elastic-bsp" else 1.0)

    whole = answer(offered)
    for name in offered:
        rest = {other: shape for other, shape in offered.items() if other != name}
        assert not rest or whole <= answer(rest) * 1.0201
    fewer = {name: (count - 1, *rest) for name, (count, *rest) in offered.items() if count > 1}
    assert not fewer or whole <= answer(fewer) * 1.0201  # type: ignore[arg-type]
    assert whole <= answer(offered, max_devices=2) * 1.0201
    rich, poor = (answer(offered, max_price_per_hour=money) for money in (2 * budget, budget))
    assert whole <= rich * 1.0201
    assert rich <= poor * 1.0201


more = given(st.tuples(offers, rings, st.integers(1, 9), st.sampled_from([0.5, 2.5])))


@more
@settings(max_examples=15, deadline=None)
def test_more_devices_and_money_are_never_worse(case: tuple[Any, ...]) -> None:
    check_more_is_never_worse(*case)


@pytest.mark.slow
@more
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
def test_more_devices_and_money_are_never_worse_in_300_jobs(case: tuple[Any, ...]) -> None:
    check_more_is_never_worse(*case)


LINKS = ("nvlink2", "nvlink4", "pcie3", "pcie5", "plain")
NICS = ("10Gbit", "100Gbit", "8x400Gbit", "plain")


def fabric(link: str, nic: str, per_node: int) -> Fabric:
    plain = Fabric.flat(5e9, 5e-5).between
    inside, between = (plain if link == "plain" else parse_link(link)), (plain if nic == "plain" else parse_nic(nic))
    return Fabric(inside=inside, between=between, gpus_per_node=per_node)


@given(
    st.lists(st.builds(fabric, st.sampled_from(LINKS), st.sampled_from(NICS), st.sampled_from([1, 4, 8])), min_size=3),
    st.lists(st.sampled_from([0, 1, 2, 8, 9, 24]), min_size=3, max_size=3).filter(lambda counts: sum(counts) > 1),
    st.lists(st.sampled_from([0, 0, 1, 8, 100]), min_size=3, max_size=3),
    st.lists(st.sampled_from([0, 0, 5, 16]), min_size=3, max_size=3),
    st.floats(0.01, 1.0),
)
@settings(max_examples=60, deadline=None)
def test_no_devices_reduce_sooner_than_the_bound_says(
    links: list[Fabric], least: list[int], more: list[int], rest: list[int], pass_s: float
) -> None:
    """Of devices between two corners none expose less than the bound of the corners, by the search over their buckets."""
    graph = estimate(
        read_graph(folder() / "graphs" / "resnet50_v1-training.graph.json.gz"),
        cost_model(devices().device("V100"), calibration()),
        Network(),
    )
    names = "ABC"
    fabrics = dict(zip(names, links, strict=False))
    source = GraphCommunication(graph, fabrics, {})
    fewest = {name: count for name, count in zip(names, least, strict=True) if count}
    used = {name: n + m for name, n, m in zip(names, least, more, strict=True) if n + m}
    most = {name: n + m + k for name, n, m, k in zip(names, least, more, rest, strict=True) if n + m + k}
    program, group = stretched(source.program, pass_s), Fabric.joined(fabrics, used)
    best = min(finish_s(program, group, cuts) for cuts in (default_cuts(program), best_cuts(program, group)))
    exposed = max(0.0, best - pass_s)
    assert source.least_s(used, pass_s) == pytest.approx(exposed)
    assert source.bound_s(fewest, most, pass_s) <= exposed * (1 + 1e-9) + 1e-12


def test_devices_behind_a_slow_link_are_left_out_by_every_strategy() -> None:
    """Eight fast ones alone make 37.6 a second; with four slow ones behind a slow link nobody does better."""
    made = job({"A100": (8, 4.7, 1.0), "V100": (4, 0.8, 1.0)}, max_workers=16, batch_size=1)
    plan = decide(made, problem_of(made), JobModel(communication=Ring({"A100": 0.001, "V100": 2.0})))
    assert plan.decision is not None
    assert plan.strategy == "bsp"
    for option in plan.decision.options:
        assert option.devices == {"A100": 8}, option.strategy
    assert plan.decision.words[0].startswith("Use the 8 A100s, 2 samples on each A100, and leave the 4 V100s out: ")
    alone = job({"A100": (8, 4.7, 1.0)}, max_workers=16, batch_size=1)
    same = decide(alone, problem_of(alone), JobModel(communication=Ring({"A100": 0.001})))
    assert (same.strategy, same.iteration_s) == (plan.strategy, plan.iteration_s)


def test_time_that_runs_out_leaves_a_bound() -> None:
    """Each device more takes a hundredth of a second of everybody's time."""
    speeds = (1.0, 1.7, 3.1)
    made = job(
        {name: (400, speed, 1.0) for name, speed in zip("ABC", speeds, strict=True)}, max_workers=4096, batch_size=1
    )
    problem = problem_of(made)

    def compute_s(counts: tuple[int, ...]) -> float:
        return 4096 / max(sum(n * speed for n, speed in zip(counts, speeds, strict=True)), 1e-9)

    def value(counts: tuple[int, ...], least: float) -> tuple[float, tuple[int, ...]]:
        return compute_s(counts) + sum(counts) / 100, counts

    best = best_devices(problem, value, lambda low, high: sum(low) / 100, most=4096, limit_s=0.05)
    assert best is not None
    assert best.bound < best.value
    assert best.gap > 0
    better = best_devices(problem, value, lambda low, high: compute_s(high) + sum(low) / 100, most=4096, limit_s=60.0)
    assert better is not None
    assert better.gap == pytest.approx(0.0, abs=1e-9)
    # only the fastest, as many as pay: 4096 / 3.1 n + n / 100 is least at n = 363.5
    assert better.counts in ((0, 0, 363), (0, 0, 364))
    assert better.value <= best.value


def test_deadlines_budgets_and_fewest_devices() -> None:
    made = job({"A": (8, 2.0, 2.0), "B": (8, 1.0, 0.5)}, max_workers=16, batch_size=10)
    steps = {"samples": 16 * 10 * 3600.0, "step_samples": 160}  # an hour of steps of a second
    plan = lambda **more: decide(made, problem_of(made), JobModel(), options=PlanOptions(goal=Goal(**steps, **more)))  # type: ignore[arg-type]  # noqa: E731
    fast = plan()
    assert fast.decision is not None
    assert fast.decision.run is not None
    assert fast.decision.run.hours == pytest.approx(fast.iteration_s)
    cheap = plan(objective="cheapest")
    assert device_counts(cheap) == {"B": 8}  # 0.5 per mini-batch against 1
    assert cheap.iteration_s == pytest.approx(2.0)
    sooner = plan(objective="cheapest", deadline_s=3600.0 * 1.2)
    assert sooner.iteration_s <= 1.2
    assert sooner.decision is not None
    assert cheap.decision is not None
    price = [it.decision.run.price for it in (cheap, sooner, fast) if it.decision and it.decision.run]
    assert price == sorted(price)  # type: ignore[type-var]
    within = plan(budget=price[0])
    assert within.decision is not None
    assert within.decision.run is not None
    assert (within.decision.run.price or 0) <= (price[0] or 0) * (1 + 1e-6)
    few = plan(objective="fewest-devices", deadline_s=3600.0 * 2.0)
    assert sum(device_counts(few).values()) == 4  # of 2 mini-batches a second each: 8 in a second
    with pytest.raises(
        Infeasible, match=r"deadline: the whole run takes 40 min by [a-z-]+ on 8 A \+ 8 B, 60 s allowed"
    ):
        plan(deadline_s=60.0)
    with pytest.raises(Infeasible, match=r"budget: the whole run costs 8 by [a-z-]+ on \d B, 0.01 allowed"):
        plan(budget=0.01)
    with pytest.raises(
        Infeasible, match=r"budget and deadline: no plan keeps both: the fastest plan costs .*; the cheapest"
    ):
        plan(deadline_s=3600.0, budget=10.0)
    front = [(it.iteration_s, it.price_per_sample or 0.0) for it in fast.decision.pareto]
    assert front == sorted(front)
    assert [price for _, price in front] == sorted((price for _, price in front), reverse=True)
    assert front[0][0] == pytest.approx(min(it.iteration_s for it in fast.decision.options if not it.staleness))
    assert front[-1][1] == pytest.approx((cheap.decision.options[0].price_per_sample or 0.0), rel=0.02)
    with pytest.raises(InputError, match="fewest-devices needs something to keep"):
        plan(objective="fewest-devices")


def test_failures_lengthen_a_run_as_daly_says() -> None:
    """Of equal losses on both sides of Young's interval, and the exact time of a run that fails by chance."""
    spot = Failures(mtbf_s=24 * 3600.0, checkpoint_s=60.0, restart_s=300.0)
    assert spot.interval_s(1) == pytest.approx(math.sqrt(2 * 60 * 24 * 3600) - 60, rel=0.02)
    for count in (1, 16, 256):
        best, each = spot.factor(count), spot.mtbf_s / count
        for stretch in (0.5, 2.0):  # the closed form is near the least of the exact one
            t = spot.interval_s(count) * stretch
            other = each * math.exp(300.0 / each) * math.expm1((t + 60.0) / each) / t
            assert best <= other * (1 + 1e-6)
    assert [spot.factor(n) for n in (1, 4, 16, 64)] == sorted(spot.factor(n) for n in (1, 4, 16, 64))
    goal = Goal(samples=1e6, step_samples=160, failures=spot)
    made = job({"A": (8, 2.0, 2.0)}, max_workers=16, batch_size=10)
    plan = decide(made, problem_of(made), JobModel(), options=PlanOptions(goal=goal))
    assert plan.decision is not None
    assert plan.decision.run is not None
    assert plan.decision.run.hours * 3600 == pytest.approx(1e6 / 160 * plan.iteration_s * spot.factor(8))
