"""Placement: the closed form and brute force as oracles, certificates on every plan."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from random import Random

import numpy as np
import pandas as pd
import pytest

from ddltool.analyzers.placement.bsp import plan_bsp
from ddltool.analyzers.placement.capability import capability_from_graph, capability_from_profile
from ddltool.analyzers.placement.closed_form import best_step_time, capacity
from ddltool.analyzers.placement.enforcement import to_enforcement
from ddltool.analyzers.placement.est import solve_est
from ddltool.analyzers.placement.problem import DeviceType, Problem, from_job
from ddltool.analyzers.placement.verify import verify
from ddltool.errors import Infeasible, InputError, NotProven
from ddltool.graph import Graph, Op
from ddltool.job import Constraints, DeviceOffer, Job
from ddltool.plan import Assignment


def problem(capabilities: tuple[float, ...], counts: tuple[int, ...], workers: int, **limits: object) -> Problem:
    prices = limits.pop("prices", [None] * len(counts))
    devices = tuple(
        DeviceType(name=f"t{i}", count=count, capability_per_s=Fraction(str(capability)), price_micro=price)
        for i, (capability, count, price) in enumerate(zip(capabilities, counts, prices, strict=True))  # type: ignore[call-overload]
    )
    return Problem(job="j", max_workers=workers, batch_size=4, devices=devices, **limits)  # type: ignore[arg-type]


def random_problem(random: Random, **bounds: int) -> Problem:
    types = random.randint(1, bounds.get("types", 5))
    capabilities = tuple(round(random.uniform(0.1, 9.0), random.randint(0, 3)) or 1.0 for _ in range(types))
    counts = tuple(random.randint(1, bounds.get("count", 12)) for _ in range(types))
    limits: dict[str, object] = {}
    if random.random() < 0.3:
        limits["max_devices"] = random.randint(1, 8)
    if random.random() < 0.2:
        limits["single_type"] = True
    return problem(capabilities, counts, random.randint(1, bounds.get("workers", 80)), **limits)


def test_throughput_equals_the_closed_form_on_1000_random_jobs() -> None:
    random = Random(0)
    for _ in range(1000):
        case = random_problem(random)
        made = solve_est(case)
        exact = best_step_time(case)
        assert made.status == "optimal"
        assert made.gap == 0
        assert verify(case, made.assignments) == exact  # as fractions: no rounding hides a difference
        assert made.iteration_s == float(exact)
        assert made.throughput == float(case.max_workers / exact)
        capability = {device.name: device.capability_per_s for device in case.devices}
        # Formula 1c and 1d word for word, over GPUs: throughput = sum N C - waste.
        used = sum(row.devices * capability[row.device_type] for row in made.assignments)
        waste = sum(
            row.devices * (capability[row.device_type] - row.ests_per_device / exact) for row in made.assignments
        )
        assert made.waste == pytest.approx(float(waste), abs=1e-9)
        assert made.throughput == pytest.approx(float(used) - made.waste)
        assert made.est_count == case.max_workers


def brute_force(case: Problem) -> tuple[Fraction, int, Fraction]:
    """The best (step time, devices, capability in use) over all device counts, the step found by trying every k / C."""
    best: tuple[Fraction, int, Fraction] | None = None
    for counts in itertools.product(*(range(device.count + 1) for device in case.devices)):
        used = [(device, count) for device, count in zip(case.devices, counts, strict=True) if count]
        price = sum((device.price_micro or 0) * count for device, count in used)
        total = sum(counts)
        if not used or total > (case.max_devices or math.inf) or total > case.max_workers:
            continue
        if (case.single_type and len(used) > 1) or price > (case.max_price_micro or math.inf):
            continue
        steps = sorted({k / device.capability_per_s for device, _ in used for k in range(1, case.max_workers + 1)})
        room = (step for step in steps if sum(c * int(d.capability_per_s * step) for d, c in used) >= case.max_workers)
        step = next(room)
        key = (step, total, sum((c * d.capability_per_s for d, c in used), Fraction(0)))
        best = key if best is None else min(best, key)
    assert best is not None
    return best


def test_all_three_objectives_equal_brute_force() -> None:
    random = Random(1)
    for number in range(120):
        case = random_problem(random, types=3, count=3, workers=9)
        if number % 3 == 0:
            prices = [random.randint(1, 5) for _ in case.devices]
            case = problem(
                tuple(float(device.capability_per_s) for device in case.devices),
                tuple(device.count for device in case.devices),
                case.max_workers,
                prices=prices,
                max_price_micro=random.randint(max(prices), 12) if max(prices) <= 12 else 12,
            )
        made = solve_est(case)
        step, devices, in_use = brute_force(case)
        assert verify(case, made.assignments) == step
        assert made.world_size == devices
        assert made.waste == pytest.approx(float(in_use - case.max_workers / step), abs=1e-9)


@pytest.mark.parametrize(
    ("workers", "capabilities", "counts", "throughput"),
    [
        (8, (3.1, 2.4, 1.0), (4, 4, 4), 19.2),
        (16, (3.1, 2.4, 1.0), (4, 4, 4), 19.2),
        (24, (3.9, 1.7, 1.0), (4, 4, 4), 23.4),
        (8, (3.9, 1.7, 1.0), (4, 4, 4), 15.6),
        (16, (3.9, 1.7, 1.0), (8, 4, 4), 31.2),
        (24, (3.1, 2.4, 1.0), (4, 4, 4), 24.0),
    ],
)
def test_cases_where_the_published_planner_falls_short(
    workers: int, capabilities: tuple[float, ...], counts: tuple[int, ...], throughput: float
) -> None:
    """EasyScale's own planner reaches 12.4, 16.53, 20.4, 15.6, 31.2 and 24.0 on these."""
    assert solve_est(problem(capabilities, counts, workers)).throughput == pytest.approx(throughput)


def test_ten_thousand_devices_of_eight_types() -> None:
    case = problem((8.1, 6.2, 5.3, 4.7, 3.1, 2.4, 1.7, 1.0), (1250,) * 8, 20_000)
    made = solve_est(case)
    assert made.status == "optimal"
    assert verify(case, made.assignments) == best_step_time(case)


def test_alternatives_are_different_and_ordered() -> None:
    made = solve_est(problem((3.0, 2.0), (2, 2), 5), top_k=50)
    plans = [made, *made.alternatives]
    counts = [counted(plan.assignments) for plan in plans]
    assert len(set(counts)) == len(counts)
    assert len(counts) == 8  # every non-empty choice of 0..2 and 0..2 devices can hold five workers
    times = [plan.iteration_s for plan in plans]
    assert times == sorted(times)
    assert all(verify(problem((3.0, 2.0), (2, 2), 5), plan.assignments) for plan in plans)


def counted(assignments: list[Assignment]) -> tuple[int, int]:
    return tuple(sum(row.devices for row in assignments if row.device_type == name) for name in ("t0", "t1"))  # type: ignore[return-value]


def job(**changes: object) -> Job:
    devices = [
        DeviceOffer(type="V100", count=4, capability_per_s=3.0, memory_gib=16, price_per_hour=2.1),
        DeviceOffer(type="T4", count=4, capability_per_s=1.0, memory_gib=15, price_per_hour=0.4),
    ]
    fields = {
        "name": "j",
        "max_workers": 6,
        "batch_size": 4,
        "devices": devices,
        "constraints": Constraints(),
        **changes,
    }
    return Job(**fields)  # type: ignore[arg-type]


RATES = {"V100": 3.0, "T4": 1.0}


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"memory_per_worker_gib": 31}, "memory_per_worker_gib: one worker needs 31 GiB; T4 has 15, V100 has 16"),
        ({"max_price_per_hour": 0.3}, "max_price_per_hour: 0.3 an hour buys no device; the cheapest, T4, costs 0.4"),
    ],
)
def test_infeasible_jobs_say_which_constraint(limits: dict[str, float], message: str) -> None:
    with pytest.raises(Infeasible, match=message):
        from_job(job(constraints=Constraints(**limits)), RATES)  # type: ignore[arg-type]
    with pytest.raises(Infeasible, match="no devices are offered: every count is 0"):
        from_job(job(devices=[DeviceOffer(type="T4", count=0, capability_per_s=1.0)]), RATES)


def test_missing_figures() -> None:
    plain = [DeviceOffer(type="T4", count=1, capability_per_s=1.0)]
    with pytest.raises(
        InputError, match="devices.T4.memory_gib: is missing; constraints.memory_per_worker_gib needs it"
    ):
        from_job(job(devices=plain, constraints=Constraints(memory_per_worker_gib=1)), RATES)


def test_constraints_change_the_plan() -> None:
    def used(**limits: object) -> dict[str, int]:
        made = solve_est(from_job(job(constraints=Constraints(**limits)), RATES))  # type: ignore[arg-type]
        return {row.device_type: row.devices for row in made.assignments}

    assert used() == {"V100": 3}  # two workers each take 2/3 s; a fourth V100 or T4s would not shorten that
    assert used(max_devices=1) == {"V100": 1}
    assert used(memory_per_worker_gib=15.5) == {"V100": 3}
    assert used(max_price_per_hour=1.0) == {"T4": 2}
    assert used(max_price_per_hour=2.5) == {"T4": 1, "V100": 1}
    mixed = job(max_workers=16)
    assert {row.device_type for row in solve_est(from_job(mixed, RATES)).assignments} == {"V100", "T4"}
    for limit in ({"homogeneous": True}, {"determinism": "D1"}):
        single = job(max_workers=16, constraints=Constraints(**limit))  # type: ignore[arg-type]
        assert len({row.device_type for row in solve_est(from_job(single, RATES)).assignments}) == 1
    relaxed = job(max_workers=16, constraints=Constraints(determinism="D2"))
    assert len({row.device_type for row in solve_est(from_job(relaxed, RATES)).assignments}) == 2


def test_plans_do_not_depend_on_the_order_of_the_devices() -> None:
    random = Random(2)
    offers = [
        DeviceOffer(type=f"g{i}", count=random.randint(1, 5), capability_per_s=random.choice([1, 2, 3]))
        for i in range(5)
    ]
    rates = {offer.type: float(offer.capability_per_s or 0) for offer in offers}
    first = solve_est(from_job(job(devices=offers, max_workers=13), rates), top_k=3)
    for _ in range(5):
        random.shuffle(offers)
        again = solve_est(from_job(job(devices=offers, max_workers=13), rates), top_k=3)
        assert again.model_copy(update={"solve_seconds": first.solve_seconds}) == first


def test_no_time_is_not_an_answer() -> None:
    with pytest.raises(NotProven, match="no plan was found within 0 s; allow more with --time-limit"):
        solve_est(problem((1.0,), (1,), 1), time_limit_s=0.0)


def test_verify_catches_wrong_plans() -> None:
    case = problem((2.0, 1.0), (2, 2), 4, max_devices=2)

    def row(kind: str, devices: int, ests: int) -> Assignment:
        return Assignment(device_type=kind, devices=devices, ests_per_device=ests, local_batch_size=4 * ests)

    assert verify(case, [row("t0", 2, 2)]) == 1
    for wrong, message in (
        ([row("t0", 1, 3)], "3 ESTs instead of 4"),
        ([row("t0", 4, 1)], "more devices than offered"),
        ([row("t0", 2, 1), row("t1", 2, 1)], "constraints broken"),
    ):
        with pytest.raises(ValueError, match=message):
            verify(case, wrong)


def test_capacity_is_greedy_by_room() -> None:
    case = problem((3.0, 1.0), (2, 5), 1)
    assert capacity(case.devices, Fraction(1), None) == 11
    assert capacity(case.devices, Fraction(1), 3) == 7


def test_equal_split() -> None:
    made = plan_bsp(problem((3.0, 1.0), (1, 2), 5))  # 20 samples on three devices
    assert [(row.device_type, row.devices, row.local_batch_size) for row in made.assignments] == [
        ("t0", 1, 7),
        ("t1", 1, 7),
        ("t1", 1, 6),
    ]
    assert made.iteration_s == pytest.approx(7 / 4 / 1.0)
    assert made.throughput == pytest.approx(5 / (7 / 4))
    assert solve_est(problem((3.0, 1.0), (1, 2), 5)).throughput > made.throughput
    few = plan_bsp(problem((1.0,), (100,), 1))  # four samples cannot feed a hundred devices
    assert (few.world_size, few.assignments[0].local_batch_size) == (4, 1)
    assert plan_bsp(problem((3.0, 1.0), (2, 9), 5, max_devices=3)).world_size == 3
    assert {row.device_type for row in plan_bsp(problem((3.0, 1.0), (2, 9), 5, single_type=True)).assignments} == {"t1"}


def test_enforcement_follows_the_plan() -> None:
    made = solve_est(problem((3.0, 1.0), (1, 1), 4))
    ranks = to_enforcement(made).ranks
    assert [(rank.rank, rank.device_type, rank.ests, rank.local_batch_size) for rank in ranks] == [
        (0, "t0", 3, 12),
        (1, "t1", 1, 4),
    ]
    assert to_enforcement(made).total_batch_size == made.max_workers * made.batch_size


def test_capability_from_measurements() -> None:
    frame = pd.DataFrame(
        {
            "device": ["V100", "V100", "T4", "T4", "T4"],
            "num_replicas": [1, 1, 1, 1, 2],
            "local_batch_size": [8, 16, 8, 16, 8],
            "step_time_s": [0.1, 0.2, 0.5, 0.5, 9.0],
        }
    )
    assert capability_from_profile(frame, "V100", 12, "p.csv") == pytest.approx(1 / 0.15)
    assert capability_from_profile(frame, "T4", 8, "p.csv") == pytest.approx(2.0)
    assert capability_from_profile(frame[frame["device"] == "T4"], "anything", 8, "p.csv") == pytest.approx(2.0)
    with pytest.raises(InputError, match=r"p.csv: has no single-replica rows of device 'P100'; did you mean \"V100\""):
        capability_from_profile(frame, "P100", 8, "p.csv")
    with pytest.raises(InputError, match=r"covers local batch sizes 8 to 16, not the job's 32"):
        capability_from_profile(frame, "T4", 32, "p.csv")


def test_capability_from_a_graph() -> None:
    ops = [Op(name=f"c{i}", kind="compute", duration_s=0.25) for i in range(2)]
    ops.append(Op(name="r", kind="recv", resource="channel:0", duration_s=9.0))
    assert capability_from_graph(Graph.from_ops("g", "training", ops)) == pytest.approx(2.0)
    idle = Graph.from_ops("idle", "training", [Op(name="c", kind="compute", duration_s=0.0)])
    with pytest.raises(InputError, match="idle: its compute ops take 0.0 s"):
        capability_from_graph(idle)
    assert np.isfinite(capability_from_graph(Graph.from_ops("g", "training", ops)))
