"""Plans on nodes against trying every number of devices."""

from __future__ import annotations

import itertools
from fractions import Fraction
from random import Random

import pytest

from ddltool.analyzers.job.goodput.throughput import ThroughputParams
from ddltool.analyzers.job.placement.network import nodes_needed, solve_on_nodes
from ddltool.analyzers.job.placement.problem import DeviceType, Problem
from ddltool.analyzers.job.placement.steps import best_step
from ddltool.errors import Infeasible, InputError
from ddltool.job import NodeDevices, NodeGroup
from tests.conftest import throughput


def node_group(device_type: str, devices: int, nodes: int) -> NodeGroup:
    return NodeGroup(name="n", count=nodes, devices=NodeDevices(type=device_type, count=devices))


def params(**changes: float) -> ThroughputParams:
    usual = {"alpha_sync_local_s": 0.1, "beta_sync_local_s": 0.02, "alpha_sync_node_s": 0.3, "beta_sync_node_s": 0.05}
    return throughput(**{**usual, "gamma": 1.5, **changes})


def case(random: Random) -> tuple[Problem, list[NodeGroup]]:
    shapes = [
        node_group(device_type=name, devices=random.randint(1, 3), nodes=random.randint(1, 3))
        for name in ("a", "a", "b")[: random.randint(2, 3)]
    ]
    counts = {name: sum(s.devices.count * s.count for s in shapes if s.devices.type == name) for name in ("a", "b")}
    devices = tuple(
        DeviceType(
            name=name,
            count=count,
            capability_per_s=Fraction(random.randint(5, 50), 10),
            price_micro=random.randint(1, 4),
            max_ests=random.choice([None, None, 4]),
        )
        for name, count in counts.items()
        if count
    )
    problem = Problem(
        job="j",
        max_workers=random.randint(1, 14),
        batch_size=1,
        devices=devices,
        max_devices=random.choice([None, 4]),
        max_price_micro=random.choice([None, None, 9]),
        single_type=random.random() < 0.2,
    )
    return problem, shapes


def every_step(problem: Problem, shapes: list[NodeGroup], cost: ThroughputParams) -> list[float]:
    """The step time of every allowed number of devices: Pollux's formulas written out again."""
    found = []
    for counts in itertools.product(*(range(device.count + 1) for device in problem.devices)):
        compute = best_step(problem, counts) if problem.allows(counts) else None
        if compute is None:
            continue
        total = sum(counts)
        on_one = sum(map(bool, counts)) == 1 and any(
            shape.devices.count >= total and shape.devices.type == device.name
            for shape in shapes
            for device, count in zip(problem.devices, counts, strict=True)
            if count
        )
        local = cost.alpha_sync_local_s + cost.beta_sync_local_s * max(0, total - 2)
        across = max(local, cost.alpha_sync_node_s + cost.beta_sync_node_s * max(0, total - 2))
        sync = 0.0 if total == 1 else local if on_one else across
        found.append((float(compute) ** cost.gamma + sync**cost.gamma) ** (1 / cost.gamma))
    return found


def test_the_best_plan_on_nodes_equals_brute_force() -> None:
    random, chosen, infeasible = Random(2), set(), 0
    for number in range(120):
        problem, shapes = case(random)
        cost = params(
            alpha_sync_node_s=random.choice([0.0, 0.05, 0.3, 2.0]),
            beta_sync_node_s=random.choice([0.0, 0.02, 0.3]),
            gamma=random.choice([1.0, 1.5, 8.0]),
        )
        expected = every_step(problem, shapes, cost)
        if not expected:
            infeasible += 1
            with pytest.raises(Infeasible):
                solve_on_nodes(problem, shapes, cost)
            continue
        made = solve_on_nodes(problem, shapes, cost)
        assert made.iteration_s == pytest.approx(min(expected)), number
        assert (made.status, made.gap) == ("optimal", 0)
        assert made.network is not None
        assert made.throughput == pytest.approx(problem.max_workers / made.iteration_s)
        assert made.communication_s == pytest.approx(made.iteration_s - made.overload_factor)
        assert made.network.best_steps[made.network.choice] == made.iteration_s
        assert made.network.num_replicas == made.world_size
        chosen.add(made.network.choice)
    assert chosen == {"one device", "one node", "several nodes"}
    assert infeasible >= 2


def test_a_slow_network_keeps_the_job_on_one_node() -> None:
    devices = (DeviceType(name="a", count=8, capability_per_s=Fraction(1)),)
    problem = Problem(job="j", max_workers=8, batch_size=1, devices=devices)
    shapes = [node_group(device_type="a", devices=4, nodes=2)]
    fast, slow = params(), params(alpha_sync_node_s=5.0)
    assert [solve_on_nodes(problem, shapes, cost).world_size for cost in (fast, slow)] == [8, 4]
    throughput = solve_on_nodes(problem, shapes, fast).throughput
    asked = Problem(job="j", max_workers=8, batch_size=1, devices=devices, min_throughput=Fraction(5))
    assert throughput > 5
    with pytest.raises(Infeasible, match="min_throughput: .* with synchronisation the most that can be reached is"):
        solve_on_nodes(asked, shapes, slow)
    with pytest.raises(InputError, match="cluster:nodes.a: has no nodes"):
        solve_on_nodes(problem, [], fast)


def test_a_thousand_nodes_need_few_looks() -> None:
    names = [f"t{place}" for place in range(8)]
    devices = tuple(
        DeviceType(name=name, count=1000, capability_per_s=Fraction(10 + place, 7)) for place, name in enumerate(names)
    )
    problem = Problem(job="j", max_workers=5000, batch_size=1, devices=devices)
    shapes = [node_group(device_type=name, devices=8, nodes=125) for name in names]
    made = solve_on_nodes(problem, shapes, params(beta_sync_node_s=0.0005))
    assert made.status == "optimal"
    assert 8 < made.world_size < 5000  # neither everything nor one node


def test_nodes_are_filled_largest_first() -> None:
    shapes = [node_group(device_type="a", devices=2, nodes=3), node_group(device_type="a", devices=4, nodes=1)]
    assert [nodes_needed({"a": count}, shapes) for count in (1, 4, 5, 6, 7, 10)] == [1, 1, 2, 2, 3, 4]
    with pytest.raises(InputError, match="more than the cluster's nodes hold by 1"):
        nodes_needed({"a": 11}, shapes)
