"""Placement: the closed form and brute force as oracles, certificates on every plan.
EST plans under limits on a device's ESTs, a least throughput and other objectives; which requirements conflict.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from fractions import Fraction
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddltool.analyzers.job.placement import est
from ddltool.analyzers.job.placement.est import is_feasible, solve_est
from ddltool.analyzers.job.placement.problem import (
    DeviceType,
    Problem,
    capability_from_graph,
    capability_from_profile,
    from_job,
    minimal_conflict,
    requirements,
)
from ddltool.analyzers.job.placement.steps import best_step, step_table, verify
from ddltool.analyzers.job.planning.split import plan_bsp
from ddltool.errors import DdlToolError, Infeasible, InputError, NotProven
from ddltool.graph import Graph, Op
from ddltool.job import Constraints, DeviceOffer, Job
from ddltool.plans import Alternative, Assignment, Plan
from tests.conftest import job
from tests.helpers.est_oracles import choices, closed_form


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


def test_throughput_equals_the_closed_form_on_random_jobs() -> None:
    random = Random(0)
    for _ in range(250):
        case = random_problem(random)
        made = solve_est(case)
        exact = closed_form(case)
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


Ranked = tuple[Fraction, int, Fraction, tuple[int, ...]]


def ranking(case: Problem) -> list[Ranked]:
    """All choices of devices as (step time, devices, capability in use, counts), best first."""

    def speed(counts: tuple[int, ...]) -> Fraction:
        return sum(
            (each.capability_per_s * count for each, count in zip(case.devices, counts, strict=True)), Fraction(0)
        )

    ranked = [(step, sum(counts), speed(counts), counts) for counts, step, _ in choices(case)]
    return sorted(ranked, key=lambda row: (row[:3], [-count for count in row[3]]))


def as_ranked(case: Problem, plan: Plan | Alternative) -> Ranked:
    names = [device.name for device in case.devices]
    counts = tuple(sum(row.devices for row in plan.assignments if row.device_type == name) for name in names)
    speed = sum(
        (device.capability_per_s * count for device, count in zip(case.devices, counts, strict=True)), Fraction(0)
    )
    step = verify(case, plan.assignments)
    assert (plan.iteration_s, plan.throughput) == (float(step), float(case.max_workers / step))
    assert plan.waste == pytest.approx(float(speed - case.max_workers / step), abs=1e-9)
    assert plan.overload_factor == plan.iteration_s
    return step, sum(counts), speed, counts


def priced(random: Random, case: Problem) -> Problem:
    devices = tuple(replace(device, price_micro=random.randint(0, 5)) for device in case.devices)
    return replace(case, devices=devices, max_price_micro=random.randint(0, 12))


def test_measured_capabilities_are_compared_to_the_last_digit() -> None:
    """The least waste is exact where devices differ in the seventeenth digit only."""
    random = Random(3)
    for _ in range(30):
        base = random.choice([1.0, 2.4, 1 / 3])
        capabilities = tuple(base * (1 + random.randint(0, 3) * 2**-52) for _ in range(3))
        case = problem(capabilities, tuple(random.randint(1, 3) for _ in range(3)), random.randint(1, 8))
        assert as_ranked(case, solve_est(case)) == ranking(case)[0]


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


def test_digits_of_capabilities_carry() -> None:
    """Beside t0 go t1 (room for 3) and t2 (1), or two of t3 (2 each): the price rules out the rest.

    The former have 8e-16 less capability. In base 2**26 that shows only when the low digits of the latter, which add up
    to more than 2**26, carry over.
    """
    digit, one, two = 2**26, 10**16 // 2**26, 2 * 10**16 // 2**26
    units = (105 * 10**15, (2 * two - one + 1) * digit, one * digit + 2, two * digit + digit // 2 + 5)
    assert units[1] + units[2] + 8 == 2 * units[3]
    devices = tuple(
        DeviceType(name=f"t{i}", count=count, capability_per_s=Fraction(unit, 10**16), price_micro=price)
        for i, (unit, count, price) in enumerate(zip(units, (1, 1, 1, 2), (0, 3, 1, 2), strict=True))
    )
    case = Problem(job="j", max_workers=15, batch_size=4, devices=devices, max_price_micro=4)
    made = as_ranked(case, solve_est(case))
    assert made == ranking(case)[0]
    assert made[3] == (1, 1, 1, 0)


EIGHT = (8.1, 6.2, 5.3, 4.7, 3.1, 2.4, 1.7, 1.0)


@pytest.mark.parametrize("workers", [8, 1_000, 20_000, 50_000])
@pytest.mark.parametrize("limits", [{}, {"max_devices": 500}, {"single_type": True}], ids=str)
def test_ten_thousand_devices_of_eight_types(workers: int, limits: dict[str, int]) -> None:
    case = problem(EIGHT, (1250,) * 8, workers, **limits)
    made = solve_est(case)
    assert made.status == "optimal"
    assert verify(case, made.assignments) == closed_form(case)


@pytest.mark.parametrize("budget", [2.9, 200.0])
def test_ten_thousand_devices_with_a_price_limit(budget: float) -> None:
    """With 1,000 ESTs; no closed form: the plan is proven, keeps the limit, and no single type is better."""
    prices = (2_900_001, 2_100_000, 1_500_000, 1_300_000, 900_000, 500_000, 400_000, 350_000)
    case = problem(EIGHT, (1250,) * 8, 1_000, prices=prices, max_price_micro=int(budget * 10**6))
    made = solve_est(case)
    assert (made.status, made.gap) == ("optimal", 0)
    step = verify(case, made.assignments)
    for device in case.devices:
        count = case.affordable(device)
        assert count == 0 or step <= math.ceil(1_000 / count) / device.capability_per_s


def test_alternatives_end_with_the_last_different_plan() -> None:
    case = problem((3.0, 2.0), (2, 2), 5)
    made = solve_est(case, top_k=50)
    found = [as_ranked(case, plan) for plan in [made, *made.alternatives]]
    assert found == ranking(case)
    assert len(found) == 8  # every non-empty choice of 0..2 and 0..2 devices can hold five workers
    with pytest.raises(InputError, match="top_k: is 0; ask for one plan at least"):
        solve_est(case, top_k=0)


asked = partial(job, {"V100": (4, 3.0, 2.1, 16), "T4": (4, 1.0, 0.4, 15)}, max_workers=6)


RATES = {"V100": 3.0, "T4": 1.0}


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"memory_per_worker_gib": 31}, "memory_per_worker_gib: one worker needs 31 GiB; T4 has 15, V100 has 16"),
        ({"max_price_per_hour": 0.3}, "max_price_per_hour: 0.3 an hour buys no device; the cheapest, T4, costs 0.4"),
        (
            {"max_price_per_hour": 0.5, "memory_per_worker_gib": 16},
            "6 workers: these requirements cannot be kept together, but without any one of them they can: "
            "memory_per_worker_gib: one worker needs 16 GiB; T4 has 15, V100 has 16 | "
            "max_price_per_hour: at most 0.5 an hour; T4 costs 0.4, V100 costs 2.1",
        ),
    ],
)
def test_infeasible_jobs_say_which_constraint(limits: dict[str, float], message: str) -> None:
    with pytest.raises(Infeasible, match=f"^{re.escape(message)}$"):
        from_job(asked(constraints=Constraints(**limits)), RATES)  # type: ignore[arg-type]


def test_lines_of_one_device_type_add_up() -> None:
    line = DeviceOffer(type="T4", count=2, capability_per_s=1.0, price_per_hour=0.4)
    for name in ("T4", "nvidia t-4"):
        again = line.model_copy(update={"count": 3, "type": name})
        assert [(offer.type, offer.count) for offer in asked(devices=[line, again]).devices] == [("T4", 5)]
    with pytest.raises(ValueError, match="'T4' stands twice with other figures; give one another name"):
        asked(devices=[line, line.model_copy(update={"price_per_hour": 0.1})])


def test_no_devices() -> None:
    with pytest.raises(Infeasible, match="no devices are offered: every count is 0"):
        from_job(asked(devices=[DeviceOffer(type="T4", count=0, capability_per_s=1.0)]), RATES)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"memory_per_worker_gib": 1},
            r"devices\.T4\.memory_gib: is missing; constraints\.memory_per_worker_gib needs it",
        ),
        (
            {"max_price_per_hour": 1},
            r"devices\.T4\.price_per_hour: is missing; constraints\.max_price_per_hour needs it",
        ),
    ],
)
def test_missing_figures(limits: dict[str, float], message: str) -> None:
    constraints = Constraints(**limits)  # type: ignore[arg-type]
    known = DeviceOffer(type="V100", count=1, capability_per_s=1.0, memory_gib=16, price_per_hour=0.5)
    plain = DeviceOffer(type="T4", count=1, capability_per_s=1.0)
    with pytest.raises(InputError, match=message):
        from_job(asked(devices=[known, plain], constraints=constraints), RATES)
    # What is not offered needs no figures.
    unused = plain.model_copy(update={"count": 0})
    assert [each.name for each in from_job(asked(devices=[known, unused], constraints=constraints), RATES).devices] == [
        "V100"
    ]


def test_missing_and_impossible_capabilities() -> None:
    with pytest.raises(InputError, match=r'devices\.V100\.capability_per_s: is missing; did you mean "V-100"'):
        from_job(asked(), {"V-100": 3.0, "T4": 1.0})
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InputError, match=rf"devices\.V100\.capability_per_s: is {bad}; .* a finite number > 0"):
            from_job(asked(), {"V100": bad, "T4": 1.0})


def test_prices_are_decimal_and_never_exceeded() -> None:
    """Ten times 0.1 is 1 (in floats it is less than 1); a price is rounded up, and the limit down, to a millionth."""

    def devices(price: float, limit: float) -> int:
        offer = DeviceOffer(type="T4", count=20, capability_per_s=1.0, price_per_hour=price)
        return solve_est(
            from_job(asked(devices=[offer], max_workers=20, constraints=Constraints(max_price_per_hour=limit)), RATES)
        ).world_size

    assert devices(0.1, 1.0) == 10
    assert devices(0.1, 0.3) == 3
    assert devices(0.1, 0.299999) == 2
    assert devices(0.10000001, 0.3) == 2
    assert devices(0.1, 0.2999999) == 2
    assert devices(0.0, 0.0) == 20


def test_constraints_change_the_plan() -> None:
    def used(**limits: object) -> dict[str, int]:
        made = solve_est(from_job(asked(constraints=Constraints(**limits)), RATES))  # type: ignore[arg-type]
        return {row.device_type: row.devices for row in made.assignments}

    assert used() == {"V100": 3}  # two workers each take 2/3 s; a fourth V100 or T4s would not shorten that
    assert used(max_devices=1) == {"V100": 1}
    assert used(memory_per_worker_gib=15.5) == {"V100": 3}
    assert used(max_price_per_hour=1.0) == {"T4": 2}
    assert used(max_price_per_hour=2.5) == {"T4": 1, "V100": 1}
    mixed = asked(max_workers=16)
    assert {row.device_type for row in solve_est(from_job(mixed, RATES)).assignments} == {"V100", "T4"}
    for limit in ({"homogeneous": True}, {"determinism": "D1"}):
        single = asked(max_workers=16, constraints=Constraints(**limit))  # type: ignore[arg-type]
        assert len({row.device_type for row in solve_est(from_job(single, RATES)).assignments}) == 1
    relaxed = asked(max_workers=16, constraints=Constraints(determinism="D2"))
    assert len({row.device_type for row in solve_est(from_job(relaxed, RATES)).assignments}) == 2


def test_plans_do_not_depend_on_the_order_of_the_devices() -> None:
    random = Random(2)
    offers = [
        DeviceOffer(type=f"g{i}", count=random.randint(1, 5), capability_per_s=random.choice([1, 2, 3]))
        for i in range(5)
    ]
    rates = {offer.type: float(offer.capability_per_s or 0) for offer in offers}
    first = solve_est(from_job(asked(devices=offers, max_workers=13), rates), top_k=3)
    for _ in range(5):
        random.shuffle(offers)
        again = solve_est(from_job(asked(devices=offers, max_workers=13), rates), top_k=3)
        assert again.model_copy(update={"solve_seconds": first.solve_seconds}) == first


def test_of_equal_plans_the_first_names_win() -> None:
    offers = [DeviceOffer(type=name, count=2, capability_per_s=2.0) for name in ("g10", "g9", "g2")]
    case = from_job(asked(devices=offers, max_workers=3), {offer.type: 2.0 for offer in offers})
    for seed in (0, 1, -5, 2**40):
        made = solve_est(case, seed=seed)
        assert [(row.device_type, row.devices) for row in made.assignments] == [("g2", 2), ("g9", 1)]


def test_no_time_is_not_an_answer() -> None:
    with pytest.raises(NotProven, match="no plan was found within 0 s; allow more with --time-limit"):
        solve_est(problem((1.0,), (1,), 1), time_limit_s=0.0)


def test_verify_catches_wrong_plans() -> None:
    case = problem((2.0, 1.0), (2, 2), 4, max_devices=2, prices=(3, 1), max_price_micro=5)

    def row(kind: str, devices: int, ests: int, samples: int = 4) -> Assignment:
        return Assignment(device_type=kind, devices=devices, ests_per_device=ests, local_batch_size=samples * ests)

    assert verify(case, [row("t0", 1, 3), row("t1", 1, 1)]) == Fraction(3, 2)
    assert verify(case, [row("t0", 1, 2), row("t1", 1, 2)]) == 2
    for wrong, message in (
        ([row("t0", 1, 3)], "3 ESTs instead of 4"),
        ([row("t0", 4, 1)], "more devices than offered"),
        ([row("t0", 1, 1), row("t1", 1, 1), row("t1", 1, 2)], "constraints broken"),
        ([row("t0", 2, 2)], "price limit broken: 6"),
        ([row("t9", 1, 4)], "types that are not offered: .'t9'"),
        ([row("t1", 1, 4, samples=5)], "a used device needs ESTs and their samples"),
        (
            [row("t1", 1, 4), row("t0", 1, 1).model_copy(update={"ests_per_device": 0})],
            "a used device needs ESTs and their samples",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            verify(case, wrong)
    with pytest.raises(ValueError, match="constraints broken"):
        verify(replace(case, single_type=True), [row("t0", 1, 2), row("t1", 1, 2)])


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


def test_equal_split_under_limits() -> None:
    def used(**limits: object) -> dict[str, int]:
        made = plan_bsp(problem((3.0, 2.0, 1.0), (2, 3, 9), 9, **limits))
        return {
            name: sum(row.devices for row in made.assignments if row.device_type == name) for name in ("t0", "t1", "t2")
        }

    prices = (4, 3, 1)
    assert used(max_devices=4) == {"t0": 2, "t1": 2, "t2": 0}
    assert used(prices=prices, max_price_micro=9) == {"t0": 2, "t1": 0, "t2": 1}
    assert used(single_type=True) == {"t0": 0, "t1": 0, "t2": 9}
    assert used(single_type=True, max_devices=1) == {"t0": 1, "t1": 0, "t2": 0}
    assert used(single_type=True, prices=(40, 30, 1), max_price_micro=9) == {"t0": 0, "t1": 0, "t2": 9}
    with pytest.raises(
        Infeasible, match="max_price_per_hour: 1e-06 an hour buys no device; the cheapest, t1, costs 2e-06"
    ):
        used(prices=(4, 2, 3), max_price_micro=1)


def test_equal_split_adds_up() -> None:
    """Samples and devices are conserved, shares differ by at most one, and the figures follow from the shares."""
    random = Random(4)
    for _ in range(200):
        case = random_problem(random)
        made = plan_bsp(case)
        shares = [(row.local_batch_size, row.device_type) for row in made.assignments for _ in range(row.devices)]
        sizes = [size for size, _ in shares]
        assert sum(sizes) == case.max_workers * case.batch_size
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1
        speed = {device.name: float(device.capability_per_s) for device in case.devices}
        step = max(size / case.batch_size / speed[name] for size, name in shares)
        assert made.iteration_s == made.overload_factor == pytest.approx(step)
        assert made.throughput == pytest.approx(case.max_workers / step)
        # Formula 1c with A_i = x_i / batch_size.
        waste = sum(speed[name] - size / case.batch_size / step for size, name in shares)
        assert made.waste == pytest.approx(waste, abs=1e-9)
        assert made.world_size <= min(sum(d.count for d in case.devices), case.max_devices or math.inf)


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


def test_solving_leaves_the_interrupt_handler_alone() -> None:
    import signal

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        solve_est(problem((3.0, 1.0), (2, 2), 5))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_equal_split_takes_the_time_of_its_curves() -> None:
    """Launch and saturation included; on equal devices the uneven split has the same time, and memory is kept."""
    from ddltool.analyzers.job.goodput.throughput import StepTime
    from ddltool.analyzers.job.planning.split import plan_lb_bsp

    problem = from_job(
        Job(name="j", max_workers=4, batch_size=8, devices=[DeviceOffer(type="A", count=4, capability_per_s=3.0)]),
        {"A": 3.0},
    )
    for saturation, seconds in ((0, 0.05 + 8 * 0.01), (20, 0.05 + 20 * 0.01)):
        curves = {"A": StepTime(launch_s=0.05, per_sample_s=0.01, saturation=saturation)}
        plan = plan_bsp(problem, curves)
        assert plan.iteration_s == pytest.approx(seconds)
        assert [row.compute_s for row in plan.assignments] == [pytest.approx(seconds)]
        assert plan.throughput == pytest.approx(4 / seconds)
    even = {"A": StepTime(launch_s=0.05, per_sample_s=0.01)}
    assert plan_lb_bsp(problem, even).iteration_s == pytest.approx(plan_bsp(problem, even).iteration_s)
    with pytest.raises(Infeasible, match="an equal split gives each A 8 samples, and 7 fit"):
        plan_bsp(problem, {"A": StepTime(memory_limit=7)})


@pytest.mark.parametrize("seed", range(3))
def test_whenever_the_solver_runs_out_of_time_the_bound_holds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each number of answers: a plan that exists, no faster than is possible, and a bound that is no slower."""
    random, real, left = Random(seed), est.solve, [1000]
    capabilities = tuple(round(random.uniform(0.5, 9.0), 2) for _ in range(4))
    prices = [random.randint(1, 9) * 1_000_000 for _ in capabilities]
    case = problem(capabilities, (6, 5, 7, 4), 40, prices=prices, max_price_micro=30_000_000)
    best = solve_est(case)

    def until(*arguments: Any) -> tuple[tuple[int, ...] | None, bool, int]:
        left[0] -= 1
        return real(*arguments) if left[0] >= 0 else (None, False, 0)

    monkeypatch.setattr(est, "solve", until)
    open_ = 0
    for answers in range(1, 40):
        left[0] = answers
        try:
            made = solve_est(case)
        except NotProven:
            assert not open_, "with more time there is still a plan"
            continue
        assert float(verify(case, made.assignments)) == pytest.approx(made.iteration_s)
        assert made.iteration_s >= best.iteration_s * (1 - 1e-12)
        assert made.iteration_s * (1 - made.gap) <= best.iteration_s * (1 + 1e-12)
        open_ += made.status != "optimal"
        if made.status == "optimal":
            break
    assert open_ > 2
    assert made == best.model_copy(update={"solve_seconds": made.solve_seconds})


def limited_problem(random: Random) -> Problem:
    devices = tuple(
        DeviceType(
            name=f"t{number}",
            count=random.randint(1, 3),
            capability_per_s=Fraction(random.randint(5, 60), 10),
            price_micro=random.randint(1, 6),
            max_ests=random.choice([None, None, 1, 2, 4]),
            memory_ests=random.choice([None, None, 1, 3]),
        )
        for number in range(random.randint(1, 3))
    )
    return Problem(
        job="j",
        max_workers=random.randint(1, 9),
        batch_size=4,
        devices=devices,
        single_type=random.random() < 0.2,
        single_type_reason="homogeneous",
        max_devices=random.choice([None, None, 2, 4]),
        max_price_micro=random.choice([None, None, 6, 12]),
        min_throughput=random.choice([None, None, Fraction(4), Fraction(9)]),
    )


def key(case: Problem, entry: tuple[tuple[int, ...], Fraction, int], order: tuple[str, ...]) -> list[object]:
    counts, step, price = entry
    speed = sum((d.capability_per_s * n for d, n in zip(case.devices, counts, strict=True)), Fraction(0))
    figures = {"throughput": step, "devices": sum(counts), "price": price, "waste": speed - case.max_workers / step}
    return [*(figures[name] for name in order), [-count for count in counts]]


ORDERS = [
    ("throughput",),
    ("throughput", "price"),
    ("price",),
    ("price", "throughput"),
    ("devices", "throughput"),
    ("throughput", "waste", "devices"),
    ("devices", "price", "throughput"),
]


def test_every_order_of_objectives_equals_brute_force() -> None:
    random, infeasible, compared = Random(7), 0, 0
    for number in range(120):
        case = limited_problem(random)
        order = ORDERS[number % len(ORDERS)]
        whole = (*order, *(name for name in ("throughput", "devices", "waste") if name not in order))
        expected = sorted(choices(case), key=lambda entry: key(case, entry, whole))
        if not expected:
            infeasible += 1
            with pytest.raises(Infeasible):
                solve_est(case, objective=order)
            continue
        made = solve_est(case, top_k=5, objective=order)
        assert (made.status, made.gap) == ("optimal", 0)
        found = [as_ranked(case, plan)[3] for plan in [made, *made.alternatives]]
        assert found == [entry[0] for entry in expected[:5]], (case, order)
        assert made.iteration_s == float(expected[0][1])
        compared += 1
    assert infeasible > 8
    assert compared > 67


def test_the_smallest_step_without_a_solver() -> None:
    """With limits on a device, also on given devices; None exactly where nothing has room."""
    random, full = Random(8), 0
    for _ in range(300):
        case = replace(limited_problem(random), max_price_micro=None, min_throughput=None)
        options = choices(case)
        assert best_step(case) == closed_form(case) == min((step for _, step, _ in options), default=None)
        for counts, step, _ in options:
            assert case.allows(counts)
            assert best_step(case, counts) == step
        full += not options
    assert full > 10


@given(seed=st.integers(0, 10**9))
def test_the_named_requirements_are_a_minimal_conflict(seed: int) -> None:
    random = Random(seed)
    case = limited_problem(random)
    # Tighter, so that several requirements clash.
    case = replace(
        case,
        min_throughput=Fraction(random.randint(1, 60)),
        max_price_micro=random.randint(1, 14),
        max_devices=random.randint(1, 4),
    )
    feasible = bool(choices(case))
    assert is_feasible(case) == feasible
    if feasible:
        return
    conflict = minimal_conflict(case, is_feasible)
    if not conflict:  # not even without any requirement: nothing to name
        for requirement in requirements(case):
            case = requirement.without(case)
        assert choices(case) == []
        return
    names = {requirement.name for requirement in conflict}
    alone = case
    for requirement in requirements(case):
        if requirement.name not in names:
            alone = requirement.without(alone)
    assert choices(alone) == []  # the named ones alone cannot be kept ...
    for requirement in conflict:
        assert choices(requirement.without(alone)), requirement.name  # ... and can without any one of them
    with pytest.raises(Infeasible) as caught:
        solve_est(case)
    text = str(caught.value)
    # Where not even one device can be paid for, that is what is said, whatever else conflicts.
    assert "buys no device" in text or all(name in text for name in names)


def asked_within(limits: dict[str, object], workers: int = 8, **changes: object) -> Job:
    made = job({"V100": (2, 3.0, 2.5, 32), "T4": (4, 1.0, 0.5, 16)}, max_workers=workers, constraints=limits)
    return made.model_copy(update={"devices": [offer.model_copy(update=changes) for offer in made.devices]})


@pytest.mark.parametrize(
    ("limits", "changes", "message"),
    [
        (
            {"min_throughput": 40},
            {},
            "min_throughput: at least 40 mini-batches/s; the most that can be reached is 8 (8 workers)",
        ),
        (
            {"min_throughput": 6, "max_price_per_hour": 3},
            {},
            "8 workers: these requirements cannot be kept together, but without any one of them they can: "
            "max_price_per_hour: at most 3 an hour; T4 costs 0.5, V100 costs 2.5 | "
            "min_throughput: at least 6 mini-batches/s; the most that can be reached is 4",
        ),
        (
            {"memory_per_worker_gib": 10, "memory_fixed_gib": 12},
            {},
            "memory_per_worker_gib: k workers on a device need 12 + k x 10 GiB; T4 has 16 (room for 0; 4 offered), "
            "V100 has 32 (room for 2; 2 offered)",
        ),
        ({}, {"max_ests": 1}, "max_ests: 8 workers, at most 1 on a T4, 1 on a V100"),
        (
            {"max_devices": 3, "homogeneous": True},
            {"max_ests": 2},
            "max_ests: 8 workers, at most 2 on a T4, 2 on a V100 | max_devices: at most 3",
        ),
        (  # the price does not matter, so it does not count in what can be reached
            {"min_throughput": 40, "max_price_per_hour": 3},
            {},
            "min_throughput: at least 40 mini-batches/s; the most that can be reached is 8 (8 workers)",
        ),
        ({"min_throughput": 6, "determinism": "D1"}, {"count": 1}, "min_throughput: at least 6 mini-batches/s"),
        (
            {"min_throughput": 7, "determinism": "D2", "hardware_agnostic": False},
            {},
            "determinism D2 without hardware_agnostic: devices of one type only; offered are 4 T4, 2 V100 | min_throughput",
        ),
    ],
)
def test_conflicts_in_the_words_of_the_job(limits: dict[str, object], changes: dict[str, object], message: str) -> None:
    with pytest.raises(Infeasible) as caught:
        solve_est(from_job(asked_within(limits, workers=8, **changes), RATES))
    assert message in str(caught.value)
    assert caught.value.exit_code == 3


def test_memory_grows_with_the_workers_only_where_a_fixed_part_is_given() -> None:
    assert solve_est(from_job(asked_within({"memory_per_worker_gib": 15}), RATES)).throughput == 8.0
    # 1 + 15 k GiB: one EST fits on a T4, two on a V100.
    made = solve_est(from_job(asked_within({"memory_per_worker_gib": 15, "memory_fixed_gib": 1}), RATES))
    assert [(row.device_type, row.devices, row.ests_per_device) for row in made.assignments] == [
        ("T4", 4, 1),
        ("V100", 2, 2),
    ]
    # The last bit of 16 = 1 + 15 counts: decimals are compared, not binary fractions.
    tight = from_job(asked_within({"memory_per_worker_gib": 0.1, "memory_fixed_gib": 15.7}, workers=3), RATES)
    assert [device.memory_ests for device in tight.devices] == [3, 163]
    with pytest.raises(ValueError, match="memory_fixed_gib needs memory_per_worker_gib"):
        asked_within({"memory_fixed_gib": 1})


def test_a_model_without_hardware_agnostic_kernels_keeps_to_one_type() -> None:
    mixed = solve_est(from_job(asked_within({"determinism": "D2"}), RATES))
    single = solve_est(from_job(asked_within({"determinism": "D2", "hardware_agnostic": False}), RATES))
    assert len({row.device_type for row in mixed.assignments}) == 2
    assert len({row.device_type for row in single.assignments}) == 1


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (("speed",), "unknown objective 'speed'"),
        (("throughput", "throughput"), "'throughput' stands twice"),
        (("waste",), "waste stands before throughput"),
        (("price",), r"devices\.t0\.price_per_hour: is missing"),
    ],
)
def test_impossible_orders(order: tuple[str, ...], message: str) -> None:
    case = Problem(
        job="j", max_workers=2, batch_size=1, devices=(DeviceType(name="t0", count=1, capability_per_s=Fraction(1)),)
    )
    with pytest.raises(InputError, match=message):
        solve_est(case, objective=order)


@pytest.mark.parametrize("rates", [(1e18, 1e-12), (1e13, 1.0), (1.0, 1e-12), (1e-12, 1e12), (1e18, 1e18)])
def test_extreme_capabilities_are_one_line_or_right(rates: tuple[float, float]) -> None:
    """Beyond 1e-12 to 1e12 they are refused; within, the result is exact."""
    offers = [DeviceOffer(type=f"t{place}", count=2, capability_per_s=rate) for place, rate in enumerate(rates)]
    spec = Job(name="j", max_workers=5, devices=offers)
    try:
        case = from_job(spec, {"t0": rates[0], "t1": rates[1]})
    except DdlToolError as error:
        assert "must lie between 1e-12 and 1e+12" in str(error)  # noqa: PT017
        assert not all(1e-12 <= rate <= 1e12 for rate in rates)
        return
    made = solve_est(case)
    assert verify(case, made.assignments) == closed_form(case)


def test_a_table_s_step_times_are_the_fractions_rounded_once() -> None:
    """For short decimals, which are divided all at once, and for seventeen digits, which are not."""
    random = Random(4)
    for number in range(40):
        rates = tuple(
            Fraction(random.randint(1, 99), 10) if number % 2 else Fraction(repr(1 / random.uniform(0.05, 2)))
            for _ in range(3)
        )
        workers = random.randint(1, 90)
        table = step_table(rates, workers)
        for place in range(len(table.multiples)):
            assert table.seconds[place] == float(table.step(place))
            assert table.throughputs[place] == float(workers / table.step(place))
