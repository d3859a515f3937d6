"""The comparison of strategies: every figure from its parts, and the pick by its rule.
The best devices for every strategy: equal to trying all of them, and never worse for more devices, options or money.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddltool.analyzers.job.goodput.throughput import iteration_time_s
from ddltool.analyzers.job.placement.est import solve_est
from ddltool.analyzers.job.placement.problem import Problem, from_job
from ddltool.analyzers.job.placement.steps import best_step, device_counts
from ddltool.analyzers.job.planning.candidates import STRATEGIES, Candidates
from ddltool.analyzers.job.planning.compare import (
    LEAST_GAIN,
    STALENESS_MARGIN,
    _all_layouts,
    _Choice,
    _demand_inputs,
    _pareto,
    _unwaiting_throughput,
    decide,
)
from ddltool.analyzers.job.planning.decision_words import _gain_interval
from ddltool.analyzers.job.planning.device_search import best_devices
from ddltool.analyzers.job.planning.exposed import (
    STATES,
    Communication,
    Exposed,
    FittedCommunication,
    GraphCommunication,
    MeasuredCommunication,
)
from ddltool.analyzers.job.planning.failures import Failures
from ddltool.analyzers.job.planning.job_inputs import offered, with_prices
from ddltool.analyzers.job.planning.job_model import JobModel
from ddltool.analyzers.job.planning.options import Goal, PlanOptions
from ddltool.analyzers.job.planning.split import plan_bsp, plan_lb_bsp
from ddltool.analyzers.job.planning.superstep import plan_elastic_bsp
from ddltool.analyzers.step.communication.collectives import (
    best_cuts,
    default_cuts,
    finish_s,
    plan_collectives,
    plan_ddp,
)
from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.analyzers.step.communication.program import program_of, stretched
from ddltool.analyzers.step.costs.model import cost_model, estimate
from ddltool.analyzers.step.transfers.efficiency import compare
from ddltool.decision import Option
from ddltool.device import Network
from ddltool.errors import Infeasible, InputError
from ddltool.graph import Graph, read_graph
from ddltool.job import GoodputSection, Job
from ddltool.links import parse_link, parse_nic
from ddltool.plans import Plan
from ddltool.shipped import calibration, devices, folder
from tests.conftest import job, throughput

RATE, DELAY = 10e9 / 8, 50e-6
NETWORK = dict.fromkeys(("V100", "T4"), Fabric.flat(RATE, DELAY))


asked = partial(job, max_workers=16, batch_size=32)


def problem_of(made: Job) -> Problem:
    return from_job(made, {offer.type: offer.capability_per_s or 1.0 for offer in made.devices})


def auto(made: Job, knowledge: JobModel | None = None, **options: object) -> Plan:
    return decide(made, problem_of(made), knowledge or JobModel(), **options)  # type: ignore[arg-type]


def options_of(plan: Plan) -> dict[str, Option]:
    assert plan.decision is not None
    return {option.strategy: option for option in plan.decision.options}


MIXED = asked({"V100": (4, 3.1), "P100": (4, 2.4), "T4": (4, 1.0)})


@pytest.fixture(scope="module")
def resnet() -> Graph:
    graph = read_graph(folder() / "graphs" / "resnet50_v1-training.graph.json.gz")
    return estimate(graph, cost_model(devices().device("V100"), calibration()), Network())


def test_without_communication_the_figures_are_the_single_plans() -> None:
    found = options_of(auto(MIXED))
    problem = problem_of(MIXED)
    assert found["bsp"].iteration_s <= plan_bsp(problem).iteration_s  # of all subsets
    assert found["bsp"].devices == {"V100": 4, "P100": 4}
    assert found["bsp"].iteration_s == pytest.approx(2 / 2.4)
    assert found["lb-bsp"].iteration_s == plan_lb_bsp(problem).iteration_s
    alone = [
        solve_est(problem_of(asked({name: (4, speed)}))).iteration_s
        for name, speed in (("V100", 3.1), ("P100", 2.4), ("T4", 1.0))
    ]
    assert found["est"].iteration_s == min(alone)  # bits across types are not promised
    assert found["est"].determinism == "D1"
    assert all(option.communication_s is None for option in found.values())


def test_types_mix_for_est_where_the_bits_are_known_to_hold() -> None:
    """The closed form's 19.2 mini-batches per second on all three types, against 12.4 on the V100s alone."""
    assert options_of(auto(MIXED))["est"].throughput == pytest.approx(12.4)
    assert options_of(auto(MIXED, JobModel(d2_eligible=True)))["est"].throughput == pytest.approx(19.2)
    wanted = MIXED.model_copy(update={"constraints": MIXED.constraints.model_copy(update={"determinism": "D2"})})
    assert options_of(auto(wanted))["est"].determinism == "D2"


def test_a_graph_at_its_own_speed_leaves_what_the_trace_says(resnet: Graph) -> None:
    """Not stretched, DDP's default and best are those of the trace; TAC and random those of the comparison."""
    program = program_of(resnet)
    source = GraphCommunication(resnet, NETWORK, {})
    seen = source.synchronous({"V100": 8}, program.compute_s)
    group = Fabric.flat(RATE, DELAY).over(8)
    plans = plan_collectives(resnet, group)
    assert plans is not None
    assert seen.default_s == pytest.approx(plans.ddp.default.exposed_s, rel=1e-9)
    assert seen.ddp is not None
    assert seen.best_s == pytest.approx(seen.ddp.step_s - program.compute_s, rel=1e-9)
    assert plans.ddp.best.exposed_s <= seen.best_s * (1 + 1e-9) <= seen.default_s * (1 + 1e-9)
    each = source.asynchronous({"V100": 8}, program.compute_s)
    assert each.best_s + program.compute_s == pytest.approx(
        compare(resnet, samples=5).schedules["tac"].makespan_s, rel=0.02
    )


def test_servers_of_one_node_are_reached_inside_it(resnet: Graph) -> None:
    """Asynchronous workers of one node do not pay for the network between nodes that other types would need."""
    flat = Fabric.flat(RATE, DELAY)
    node = replace(flat, inside=replace(flat.inside, bytes_per_s=100 * RATE), gpus_per_node=4)
    source = GraphCommunication(resnet, {"V100": node, "T4": node}, {})
    alone, over, beside = ({"V100": 4}, {"V100": 8}, {"V100": 4, "T4": 4})
    assert source.asynchronous(alone, 0.1).best_s < source.asynchronous(over, 0.1).best_s / 10
    assert source.asynchronous(beside, 0.1) == source.asynchronous(over, 0.1)


def test_more_compute_hides_more(resnet: Graph) -> None:
    source = GraphCommunication(resnet, NETWORK, {})
    times = [0.01, 0.1, 1.0, 10.0]
    seen = [source.synchronous({"V100": 8}, seconds) for seconds in times]
    left = [round(entry.default_s, 9) for entry in seen]
    assert left == sorted(left, reverse=True)
    assert left[0] > 5 * left[-1]
    program = program_of(resnet)
    group = Fabric.flat(RATE, DELAY).over(8)
    for seconds, entry in zip(times, seen, strict=True):
        by_hand = plan_ddp(stretched(program, seconds), group)
        assert entry.default_s == pytest.approx(by_hand.default.step_s - seconds, abs=1e-12)


def test_a_replica_that_does_not_fit_is_sharded_or_refused(resnet: Graph) -> None:
    states = STATES * resnet.parameter_bytes / 2**30
    roomy = GraphCommunication(resnet, NETWORK, {"T4": states * 1.01})
    tight = GraphCommunication(resnet, NETWORK, {"T4": states * 0.5})
    none = GraphCommunication(resnet, NETWORK, {"T4": states * 0.1})
    assert roomy.synchronous({"T4": 4}, 1.0).ddp is not None
    assert tight.synchronous({"T4": 4}, 1.0).fsdp2 is not None
    with pytest.raises(Infeasible, match="memory: weights, gradients and Adam's moments are"):
        none.synchronous({"T4": 4}, 1.0)


def test_the_fitted_step_is_the_models() -> None:
    params = throughput(
        alpha_grad_s=0.02,
        beta_grad_s=0.001,
        alpha_sync_local_s=0.03,
        beta_sync_local_s=0.002,
        alpha_sync_node_s=0.08,
        beta_sync_node_s=0.003,
        gamma=2.5,
    )
    source = FittedCommunication({"T4": params}, 4)
    for replicas, nodes in ((1, 1), (4, 1), (5, 2), (16, 4)):
        grad = params.alpha_grad_s + params.beta_grad_s * 64
        assert source.synchronous({"T4": replicas}, grad).best_s + grad == pytest.approx(
            float(iteration_time_s(params, nodes, replicas, 64))
        )


def test_measured_synchronisation_scales_as_a_ring() -> None:
    source = MeasuredCommunication(sync_s=0.1, replicas=2)
    assert source.synchronous({"a": 1}, 1.0).best_s == 0
    assert source.synchronous({"a": 2}, 1.0).best_s == pytest.approx(0.1)
    assert source.synchronous({"a": 3, "b": 1}, 1.0).best_s == pytest.approx(0.15)


def test_one_measured_exchange_tells_of_others_between_what_may_decide_them() -> None:
    """By hand, 60 ms among 4 of one machine: a ring sends 1.5 n and receives as much, so n one way alone takes 20 ms."""
    source = MeasuredCommunication(sync_s=0.06, replicas=4, speeds={"a": 30.0, "b": 10.0}, buckets=1)
    same, fewer, fast = (source.synchronous(devices, 1.0) for devices in ({"a": 2, "b": 2}, {"b": 2}, {"a": 2}))
    assert (same.low_s, same.best_s, same.high_s) == pytest.approx((0.06, 0.06, 0.06))
    assert (fewer.low_s, fewer.best_s, fewer.high_s) == pytest.approx((0.02, 0.04, 0.04))  # by messages, by bytes
    assert (fast.low_s, fast.high_s) == pytest.approx((0.02 / 3, 0.04))  # or by the devices, three times as fast
    served, two = (source.asynchronous(devices, 0.12) for devices in ({"a": 2, "b": 2}, {"a": 2}))  # a push and a pull
    assert two.best_s == pytest.approx(0.04 * (1 + 0.04 / 0.16))  # the other is there a quarter of the time
    assert (served.low_s, served.high_s) == pytest.approx((0.02, 4 * 0.04))
    assert 4 / (0.12 + served.best_s) < 1 / 0.04  # no more than the server makes
    assert source.asynchronous({"a": 4}, 0.0).best_s == pytest.approx(4 * 0.04)
    known = MeasuredCommunication.of_servers(served.best_s, 0.12, 4)  # a run with a server tells the same transfers
    assert known.sync_s == pytest.approx(0.06)
    again = known.asynchronous({"a": 4}, 0.12)
    assert (again.low_s, again.best_s, again.high_s) == pytest.approx([served.best_s] * 3)
    whole, many = (replace(source, buckets=buckets).ordered({"a": 2, "b": 2}, same) for buckets in (1, 1000))
    assert whole.best_s == pytest.approx(2 * 3 * 0.02)  # along the chain, and round with the mean
    assert many.best_s == pytest.approx(same.best_s)  # never less than a ring
    apart = replace(source, nodes=4).ordered({"a": 2, "b": 2}, same)  # each way has a link of its own
    assert (apart.low_s, apart.best_s, apart.high_s) == pytest.approx((0.12, 0.24, 0.24))
    for exposed in (
        same,
        fewer,
        fast,
        served,
        whole,
        many,
        apart,
        replace(source, buckets=None).ordered({"a": 3}, same),
    ):
        assert (exposed.low_s or 0) <= exposed.best_s <= (exposed.high_s or 0)


@dataclass(frozen=True)
class Fixed(Communication):
    """Communication of fixed length."""

    synchronous_s: float
    asynchronous_s: float
    source: str = "test"

    def synchronous(self, devices: Mapping[str, int], pass_s: float) -> Exposed:
        return Exposed(default_s=self.synchronous_s * 1.5, best_s=self.synchronous_s, setting="test")

    def asynchronous(self, devices: Mapping[str, int], pass_s: float) -> Exposed:
        return Exposed(default_s=self.asynchronous_s * 1.5, best_s=self.asynchronous_s, setting="test")


offers = st.dictionaries(
    st.sampled_from(["A", "B", "C"]),
    st.tuples(st.integers(1, 4), st.sampled_from([0.5, 1.0, 1.7, 2.4, 3.1])),
    min_size=1,
)


@given(offers, st.integers(1, 12), st.sampled_from([0.0, 0.01, 0.5]), st.sampled_from([0.0, 0.05, 1.0]))
@settings(max_examples=30, deadline=None)
def test_figures_add_up_and_the_pick_follows_its_rule(
    offered: dict[str, tuple[int, float]], workers: int, wait_s: float, own_s: float
) -> None:
    made = asked(offered, max_workers=workers)
    plan = auto(made, JobModel(communication=Fixed(wait_s, own_s), errors=dict.fromkeys(offered, 0.1)))
    found = options_of(plan)
    assert plan.decision is not None
    for option in found.values():
        assert option.communication_s is not None
        assert option.iteration_s == pytest.approx(option.compute_s + option.communication_s)
        assert option.throughput == pytest.approx(workers / option.iteration_s)
        assert option.low_s == pytest.approx(0.9 * option.iteration_s)
        assert option.high_s == pytest.approx(1.1 * option.iteration_s)
    for usual in plan.decision.baselines.values():
        assert usual.communication_s == pytest.approx(1.5 * wait_s)
        assert usual.throughput <= found["bsp"].throughput * (1 + 1e-9)
    assert plan.decision.baseline.throughput == max(it.throughput for it in plan.decision.baselines.values())
    assert found["lb-bsp"].iteration_s <= found["bsp"].iteration_s * (1 + 1e-12)
    rates = [option.throughput for option in plan.decision.options]
    assert rates == sorted(rates, reverse=True)
    picked = found[plan.strategy]
    for option in found.values():
        stale = [it.strategy == "elastic-bsp" for it in (option, picked)]
        margin = STALENESS_MARGIN if stale == [True, False] else LEAST_GAIN
        lean = {name: option.leans_on.get(name, 0.0) - picked.leans_on.get(name, 0.0) for name in offered}
        unsure = 0.1 * sum(more**2 for more in lean.values()) ** 0.5
        assert sum(option.leans_on.values()) == pytest.approx(option.compute_s / option.iteration_s)
        assert option.throughput <= picked.throughput * (1 + max(margin, unsure)) * (1 + 1e-9)
    assert (plan.iteration_s, plan.throughput) == (picked.iteration_s, picked.throughput)
    assert len(plan.decision.words) == 4
    assert plan.decision.words[0].startswith("Use ")
    assert [option.why_not == "" for option in plan.decision.options].count(True) == 1


@st.composite
def contenders(draw: st.DrawFn) -> list[Any]:
    """Candidates that nobody planned, whose values lie close to the margins of each other."""
    near = st.sampled_from([0.8, 0.905, 0.985, 1.0, 1.015, 1.025, 1.09, 1.11, 1.3])
    return [
        SimpleNamespace(
            option=SimpleNamespace(
                **{"strategy": draw(st.sampled_from(STRATEGIES)), "throughput": draw(near)},
                **{"price_per_sample": draw(st.none() | st.just(0.0) | near), "memory_bytes": draw(st.none() | near)},
                devices={name: draw(st.integers(1, 2)) for name in "AB"[: draw(st.integers(1, 2))]},
                **{
                    "group": draw(st.sampled_from([None, SimpleNamespace(size=2)])),
                    "staleness": draw(st.integers(0, 1)),
                },
            ),
            plan=SimpleNamespace(superstep=draw(st.sampled_from([None, "a"]))),
        )
        for _ in range(draw(st.integers(1, 5)))
    ]


def front_by_hand(costs: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (seconds, price) each that costs 2 % less than any faster one of the front."""
    front: list[tuple[float, float]] = []
    for seconds, price in sorted(costs):
        if all(price < 0.98 * before for _, before in front):
            front.append((seconds, price))
    return front


def test_of_many_options_the_front_is_that_by_hand() -> None:
    chance = np.random.default_rng(0)
    costs = [(float(one), (2 - float(one)) * float(two)) for one, two in chance.uniform(0.9, 1.1, (200, 2))]
    made: Any = [
        SimpleNamespace(price_per_sample=price, staleness=0, seconds=seconds, devices={}) for seconds, price in costs
    ]
    candidates: Any = SimpleNamespace(
        goal=SimpleNamespace(slowdown=lambda devices: 1.0),
        **{"progress": lambda option: 1 / option.seconds, "equal_splits_of_one_type": lambda problem: []},
    )
    problem: Any = SimpleNamespace(devices=[])
    front = [(option.seconds, option.price_per_sample) for option in _pareto(made, candidates, problem)]  # type: ignore[attr-defined]
    assert len(front) > 5
    assert front == front_by_hand(costs)


OBJECTIVES = ("fastest", "cheapest", "same-bits", "least-memory", "fewest-devices")


@given(contenders(), st.sampled_from(OBJECTIVES), st.sampled_from([None, 0.0, 0.03, 0.12]), st.booleans())
def test_the_pick_is_that_by_hand(made: list[Any], objective: Any, error: float | None, fails: bool) -> None:
    """Every pair compared in plain arithmetic: who beats whom, who ties, and the simplest of those that nobody beats."""
    objective = "".join(list(objective))  # as from a command line: equal to the name, and another object

    def slowdown(devices: int) -> float:
        return 1.0 + 0.01 * devices if fails else 1.0

    candidates: Any = SimpleNamespace(
        goal=SimpleNamespace(objective=objective, slowdown=slowdown, value=lambda option: 1.0),
        model=SimpleNamespace(gain_error=lambda first, second: error),
        **{"progress": lambda option: 32 * option.throughput, "equal_splits_of_one_type": lambda problem: []},
    )
    choice, values = _Choice(candidates), []
    for one in made:
        longer, price = slowdown(sum(one.option.devices.values())), one.option.price_per_sample
        values.append(
            {
                "cheapest": 0.0 if price is None else 1 / max(price * longer, 1e-300),
                "least-memory": 0.0 if one.option.memory_bytes is None else 1 / max(one.option.memory_bytes, 1.0),
                "fewest-devices": 1 / sum(one.option.devices.values()),
            }.get(objective, 32 * one.option.throughput / longer)
        )
        assert choice.value(one.option) == pytest.approx(values[-1])
    exact = error is None or error == 0 or objective in ("least-memory", "fewest-devices")

    def unsure(first: int, second: int) -> bool:
        lower, upper = sorted((values[first], values[second]))
        return not exact and lower > 0 and upper <= lower * (1 + (error or 0.0))

    def beats(first: int, second: int) -> bool:
        stale = made[first].plan.superstep is not None and made[second].plan.superstep is None
        return values[first] > values[second] * (1.1 if stale else 1.02) and not unsure(first, second)

    for first, second in itertools.product(range(len(made)), repeat=2):
        assert choice.unsure(made[first], made[second]) == unsure(first, second)
        assert choice.beats(made[first], made[second]) == beats(first, second)
        assert choice.ties(made[first], made[second]) == (not beats(first, second) and not beats(second, first))
    candidates.goal.value = lambda option: math.inf  # a limit is broken
    assert {choice.value(one.option) for one in made} == {0.0}
    candidates.goal.value = lambda option: 1.0
    left = [n for n in range(len(made)) if not any(beats(other, n) for other in range(len(made)))]

    def simpler(n: int) -> tuple[float, ...]:
        option = made[n].option
        group = option.group.size if option.group else 0
        return STRATEGIES.index(option.strategy), group, len(option.devices), -values[n], sum(option.devices.values())

    assert choice.pick(made) is made[min(left, key=simpler)]

    priced = [one.option for one in made if one.option.price_per_sample is not None and not one.option.staleness]
    costs = []
    for option in priced:
        longer = slowdown(sum(option.devices.values()))
        costs.append((longer / (32 * option.throughput), longer * option.price_per_sample))
    problem: Any = SimpleNamespace(devices=[SimpleNamespace(price_micro=1)])
    front = [costs[priced.index(option)] for option in _pareto([one.option for one in made], candidates, problem)]
    assert [pytest.approx(one) for one in front_by_hand(costs)] == front
    assert (
        _pareto([one.option for one in made], candidates, SimpleNamespace(devices=[SimpleNamespace(price_micro=None)]))
        == []
    )  # type: ignore[arg-type]


def test_what_waits_and_what_was_looked_at_by_hand() -> None:
    option = SimpleNamespace(devices={"A": 2, "B": 1}, throughput=5.0, iteration_s=3.0, compute_s=2.0)
    problem: Any = SimpleNamespace(
        devices=[SimpleNamespace(name="A", capability_per_s=4), SimpleNamespace(name="B", capability_per_s=0.5)]
    )
    rates = {"elastic-bsp": 2 * 4 + 0.5, "goodput": 5.0 * 3 / 2, "bsp": 1.5 + 7.0, "lb-bsp": 1.5 + 7.0}
    for strategy, rate in rates.items():
        made: Any = SimpleNamespace(plan=SimpleNamespace(strategy=strategy, waste=1.5, throughput=7.0), option=option)
        assert _unwaiting_throughput(made, problem) == pytest.approx(rate)
    one, two, three, none = (SimpleNamespace(number=n, missing_bytes=missing) for n, missing in enumerate((0, 4, 0, 2)))
    first, other, last = (SimpleNamespace(layouts=each) for each in ([none, one], [one, two], [three, two]))
    assert _all_layouts(first, [first, other], last) == [one, three, none, two]  # type: ignore[arg-type, comparison-overlap]


def test_what_an_objective_needs_is_asked_for() -> None:
    """A price of every device, a model to look at, a limit to keep; nothing else."""
    problem: Any = SimpleNamespace(
        devices=[SimpleNamespace(name="A", price_micro=5), SimpleNamespace(name="B", price_micro=None)]
    )
    priced: Any = SimpleNamespace(devices=problem.devices[:1])
    bare, whole = JobModel(), replace(JobModel(), layouts=SimpleNamespace())  # type: ignore[arg-type]
    needs = (
        (Goal(objective="cheapest"), problem, bare, "devices.B.price_per_hour: is missing; the cheapest plan needs"),
        (Goal(budget=5.0), problem, bare, "devices.B.price_per_hour: is missing; a budget needs"),
        (Goal(objective="least-memory"), priced, bare, "least-memory needs a model to look at"),
        (Goal(objective="fewest-devices"), priced, bare, "fewest-devices needs something to keep"),
    )
    for goal, asked_of, model, problem_text in needs:
        with pytest.raises(InputError, match=problem_text):
            _demand_inputs(goal, asked_of, model)
    for goal, asked_of, model in (
        (Goal(), problem, bare),
        (Goal(objective="cheapest", budget=5.0), priced, bare),
        (Goal(objective="least-memory"), problem, whole),
    ):
        _demand_inputs(goal, asked_of, model)


def test_barriers_are_taken_only_when_far_ahead() -> None:
    """An equal split waits for the network at every step; workers of a parameter server hide it."""
    uneven = asked({"fast": (3, 3.0), "slow": (1, 1.0)}, max_workers=4)
    near = auto(uneven, JobModel(communication=Fixed(0.01, 0.01)))
    far = auto(uneven, JobModel(communication=Fixed(2.0, 0.01)))
    assert near.strategy == "lb-bsp"
    assert far.strategy == "elastic-bsp"
    assert far.decision is not None
    assert options_of(far)["elastic-bsp"].staleness > 0


def test_cheapest_is_the_least_price_over_all_sets_of_types() -> None:
    priced = asked({"V100": (4, 3.1), "T4": (4, 1.0)})
    prices = {"V100": 2.48, "T4": 0.35}
    made = priced.model_copy(
        update={"devices": [o.model_copy(update={"price_per_hour": prices[o.type]}) for o in priced.devices]}
    )
    plan = auto(made, options=PlanOptions(goal=Goal(objective="cheapest")))
    option = options_of(plan)[plan.strategy]
    assert option.devices == {"T4": 4}
    assert option.price_per_sample == pytest.approx(4 * 0.35 / 3600 / (4.0 * 32))
    with pytest.raises(InputError, match="devices.T4.price_per_hour: is missing"):
        auto(priced, options=PlanOptions(goal=Goal(objective="cheapest")))


def test_the_range_of_a_gain_is_of_what_is_gained() -> None:
    assert _gain_interval(1.0, 0.1, "fastest") == "; the gain lies between +82% and +120%"
    assert _gain_interval(9.0, 0.25, "fastest") == "; the gain lies between 8 and 12.5 times as fast"
    assert _gain_interval(9.0, 0.25, "cheapest") == "; the gain lies between +88% and +92%"
    assert _gain_interval(9.0, 0.25, "least-memory") == _gain_interval(9.0, 0.25, "fewest-devices") == ""


def test_a_type_named_twice_is_one_and_has_one_price() -> None:
    assert [(it.type, it.count) for it in offered("H100=4,2xA100,h100=2")] == [("H100", 4), ("A100", 2), ("H100", 2)]
    with pytest.raises(InputError, match="--price: gives A twice; give it once"):
        with_prices(job({"A": (8, 2.0, 2.0)}), "A=2,a=3")


def test_same_bits_leaves_only_logical_workers() -> None:
    plan = auto(MIXED, options=PlanOptions(goal=Goal(objective="same-bits")))
    assert plan.strategy == "est"
    assert plan.decision is not None
    assert set(plan.decision.left_out) == {"bsp", "lb-bsp", "elastic-bsp", "goodput"}


def test_goodput_counts_progress() -> None:
    """A small noise scale makes large batches worthless; the tuned batch is then no larger than M0's."""
    params = throughput(alpha_grad_s=0.01, beta_grad_s=0.001, alpha_sync_local_s=0.01, alpha_sync_node_s=0.01)
    found = {}
    for phi in (1.0, 1e9):
        section = GoodputSection(
            noise_scale=phi, initial_batch_size=64, max_batch_size=4096, max_local_batch_size=512, devices_per_node=4
        )
        made = asked({"T4": (8, 1 / (0.01 + 0.001 * 32))}).model_copy(update={"goodput": section})
        plan = auto(made, JobModel(models={"T4": params}, communication=FittedCommunication({"T4": params}, 4)))
        options = options_of(plan)
        share = (phi + 64) / (phi + 16 * 32)
        assert options["bsp"].goodput_per_s == pytest.approx(options["bsp"].throughput * 32 * share)
        assert options["goodput"].goodput_per_s is not None
        assert all(
            options["goodput"].goodput_per_s >= (option.goodput_per_s or 0) * (1 - 1e-9)
            for option in options.values()
            if option.strategy in ("bsp", "lb-bsp")
        )
        assert plan.goodput is None or plan.strategy == "goodput"
        found[phi] = auto(made, JobModel(models={"T4": params}))
    assert found[1.0].strategy == "goodput"
    assert found[1.0].goodput is not None
    assert found[1.0].goodput.total_batch_size == 64


def test_a_strategy_without_a_plan_says_why() -> None:
    plan = auto(MIXED)
    assert plan.decision is not None
    assert plan.decision.left_out == {"goodput": "the job has no goodput section"}


def test_words_tell_gain_and_doubt() -> None:
    types = ("V100", "P100", "T4")
    sure = auto(MIXED, JobModel(errors=dict.fromkeys(types, 0.1), error_source="profile"))
    unsure = auto(MIXED, JobModel(errors=dict.fromkeys(types, 5.0), error_source="profile"))
    assert sure.decision is not None
    assert unsure.decision is not None
    assert sure.strategy == "lb-bsp"
    # against the best of what one would do: the four V100s alone make 12.4, all twelve 12.2
    assert sure.decision.baseline_name == "4 V100 with equal batches"
    assert "2.06 times as fast as 4 V100 with equal batches" in sure.decision.words[0]
    # 48, 19 and 61 samples of 512 on each of four: by how much more or less than the V100s alone each type counts
    shares = {"P100": 48 * 4 / 512, "T4": 19 * 4 / 512, "V100": 61 * 4 / 512 - 1}
    assert sure.decision.gain_error == pytest.approx(0.1 * sum(share**2 for share in shares.values()) ** 0.5)
    assert "less than the difference; the gain lies between +94% and +120%" in sure.decision.words[2]
    # what nobody can tell apart is a tie: the simplest, and what would settle it
    assert unsure.strategy == "bsp"
    assert unsure.decision.words[2].startswith("How sure: a tie, so the simpler one")
    assert "ddltool profile MODEL --batch-sizes 16,32,64 --device cuda --device-name V100" in unsure.decision.words[3]
    assert "it is worth up to 106%" in unsure.decision.words[3]
    assert unsure.decision.next_step.startswith("ddltool profile MODEL")
    assert set(unsure.decision.too_close) >= {"lb-bsp"}


def test_the_error_of_one_type_cancels() -> None:
    plan = auto(asked({"V100": (4, 3.1)}, max_workers=4), JobModel(errors={"V100": 0.3}, error_source="cost model"))
    assert plan.decision is not None
    assert (plan.decision.error, plan.decision.gain_error, plan.decision.too_close) == (0.3, 0.0, [])


def test_an_error_beside_a_given_capability_is_not_dropped() -> None:
    plan = auto(MIXED, JobModel(errors={"T4": 0.3}, error_source="cost model"))
    assert plan.decision is not None
    assert plan.decision.error == 0.3
    assert "come without an error" not in plan.decision.words[2]


def test_the_words_say_what_is_measured_and_what_has_no_error() -> None:
    told = decide(
        MIXED, problem_of(MIXED), JobModel(errors={"V100": 0.02, "P100": 0.02, "T4": 0.5}, remark="T4 guessed")
    )
    assert told.decision is not None
    assert told.strategy == "lb-bsp"
    assert told.decision.words[2].startswith("How sure: less than its error says")
    assert "T4 guessed" in told.decision.words[2]
    plain = decide(MIXED, problem_of(MIXED), JobModel(errors={"V100": 0.02, "P100": 0.02, "T4": 0.02}))
    assert plain.decision is not None
    assert "less than the difference" in plain.decision.words[2]
    bare = auto(MIXED).decision
    assert bare is not None
    assert "which come without an error" in bare.words[2]


def test_the_words_of_measured_communication_and_of_equals() -> None:
    seen = auto(MIXED, JobModel(communication=MeasuredCommunication(sync_s=0.05, replicas=12))).decision
    assert seen is not None
    assert "is exposed communication (as measured)." in seen.words[1]
    assert "with as measured" not in " ".join(seen.words)
    none = auto(MIXED, JobModel(communication=MeasuredCommunication(sync_s=0.0, replicas=12))).decision
    assert none is not None
    assert "no communication worth mentioning is exposed" in none.words[1]
    equal = auto(asked({"A": (4, 1.0)}, max_workers=4)).decision
    assert equal is not None
    assert "0%" not in equal.words[0]
    assert equal.words[0].endswith("what one would do anyway.")


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


searched_offers = st.dictionaries(
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


drawn = given(st.tuples(searched_offers, rings, st.integers(1, 9), st.sampled_from([1, 8]), limits))


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


more = given(st.tuples(searched_offers, rings, st.integers(1, 9), st.sampled_from([0.5, 2.5])))


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
@settings(max_examples=30, deadline=None)
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
    with pytest.raises(Infeasible, match=r"deadline: the whole run takes 40 min on 8 A \+ 8 B, 60 s allowed"):
        plan(deadline_s=60.0)
    with pytest.raises(Infeasible, match=r"budget: the whole run costs \$8.00 on \d B, \$0.01 allowed"):
        plan(budget=0.01)
    with pytest.raises(
        Infeasible, match=r"budget and deadline: no plan keeps both: the fastest plan costs .*; the cheapest"
    ):
        plan(deadline_s=3600.0, budget=10.0)
    front = [(it.iteration_s, it.price_per_sample or 0.0) for it in fast.decision.pareto]
    assert front == sorted(front)
    assert [price for _, price in front] == sorted((price for _, price in front), reverse=True)
    assert front[0][0] == pytest.approx(min(it.iteration_s for it in fast.decision.options if not it.staleness))
    assert front[-1][1] == pytest.approx(cheap.decision.options[0].price_per_sample or 0.0)
    [said] = [text for text in fast.decision.words if text.startswith("Cheapest: ")]
    assert price[0] is not None
    assert f"${price[0]:,.2f} for the run, {1 - price[0] / (price[2] or 0.0):.0%} less (predicted)." in said
    assert not any(text.startswith("Cheapest") for text in cheap.decision.words)
    with pytest.raises(InputError, match="fewest-devices needs something to keep"):
        plan(objective="fewest-devices")


def test_failures_of_each_number_of_devices_have_their_own_hours_and_price() -> None:
    """What a decision keeps for all that it compares is what the picked plan's run is made of."""
    goal = Goal(samples=1e6, step_samples=10, failures=Failures(mtbf_s=3600.0, checkpoint_s=60.0, restart_s=300.0))
    factors = goal.failure_factors({8, 1})
    assert [*factors] == ["1", "8"]
    for count in (1, 8):
        times = {"compute_s": 1.0, "iteration_s": 2.0, "throughput": 1.0}
        option = Option(strategy="bsp", devices={"A": count}, determinism="D0", price_per_sample=0.1, **times)  # type: ignore[arg-type]
        run = goal.run(option)
        assert run is not None
        assert factors[str(count)].time * 1e5 * 2 / 3600 == pytest.approx(run.hours)
        assert factors[str(count)].price * 1e5 == pytest.approx(run.price)
    assert factors["8"].price > factors["1"].price > 1.0
    assert goal.unlimited().failure_factors([1]).keys() == {"1"}
    assert Goal().failure_factors([1]) == {}


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
    assert plan.decision.run.low_hours is not None
    assert plan.decision.run.low_hours * 3600 >= 1e6 / 160 * plan.iteration_s * (1 - 1e-9)  # failures only add to it
    hopeless = replace(goal, failures=replace(spot, mtbf_s=1.0))
    with pytest.raises(Infeasible, match="less than 1% of the time trains"):
        decide(made, problem_of(made), JobModel(), options=PlanOptions(goal=hopeless))
