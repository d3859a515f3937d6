"""EST plans under limits on a device's ESTs, a least throughput and other objectives; which requirements conflict."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddltool.analyzers.job.placement.est import is_feasible, solve_est
from ddltool.analyzers.job.placement.problem import DeviceType, Problem, from_job, minimal_conflict, requirements
from ddltool.analyzers.job.placement.steps import best_step, step_table, verify
from ddltool.errors import DdlToolError, Infeasible, InputError
from ddltool.job import DeviceOffer, Job
from ddltool.plans import Alternative, Plan
from tests.conftest import job
from tests.helpers.est_oracles import choices, closed_form


def random_problem(random: Random) -> Problem:
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
    figures = {
        "throughput": step,
        "devices": sum(counts),
        "price": price,
        "waste": speed - case.max_workers / step,
    }
    return [*(figures[name] for name in order), [-count for count in counts]]


def counts_of(case: Problem, plan: Plan | Alternative) -> tuple[int, ...]:
    return tuple(
        sum(row.devices for row in plan.assignments if row.device_type == device.name) for device in case.devices
    )


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
    for number in range(180):
        case = random_problem(random)
        order = ORDERS[number % len(ORDERS)]
        whole = (*order, *(name for name in ("throughput", "devices", "waste") if name not in order))
        expected = sorted(choices(case), key=lambda entry: key(case, entry, whole))
        if not expected:
            infeasible += 1
            with pytest.raises(Infeasible):
                solve_est(case, objective=order)
            continue
        made = solve_est(case, top_k=3, objective=order)
        assert (made.status, made.gap) == ("optimal", 0)
        verify(case, made.assignments)
        found = [counts_of(case, plan) for plan in [made, *made.alternatives]]
        assert found == [entry[0] for entry in expected[:3]], (case, order)
        assert made.iteration_s == float(expected[0][1])
        compared += 1
    assert infeasible > 12
    assert compared > 100


def test_the_smallest_step_without_a_solver() -> None:
    """With limits on a device, also on given devices; None exactly where nothing has room."""
    random, full = Random(8), 0
    for _ in range(300):
        case = replace(random_problem(random), max_price_micro=None, min_throughput=None)
        options = choices(case)
        assert best_step(case) == closed_form(case) == min((step for _, step, _ in options), default=None)
        for counts, step, _ in options:
            assert case.allows(counts)
            assert best_step(case, counts) == step
        full += not options
    assert full > 10


@given(seed=st.integers(0, 10**9))
@settings(max_examples=250, deadline=None)
def test_the_named_requirements_are_a_minimal_conflict(seed: int) -> None:
    random = Random(seed)
    case = random_problem(random)
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


def asked(limits: dict[str, object], workers: int = 8, **changes: object) -> Job:
    made = job({"V100": (2, 3.0, 2.5, 32), "T4": (4, 1.0, 0.5, 16)}, max_workers=workers, constraints=limits)
    return made.model_copy(update={"devices": [offer.model_copy(update=changes) for offer in made.devices]})


RATES = {"V100": 3.0, "T4": 1.0}


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
        solve_est(from_job(asked(limits, workers=8, **changes), RATES))
    assert message in str(caught.value)
    assert caught.value.exit_code == 3


def test_memory_grows_with_the_workers_only_where_a_fixed_part_is_given() -> None:
    assert solve_est(from_job(asked({"memory_per_worker_gib": 15}), RATES)).throughput == 8.0
    # 1 + 15 k GiB: one EST fits on a T4, two on a V100.
    made = solve_est(from_job(asked({"memory_per_worker_gib": 15, "memory_fixed_gib": 1}), RATES))
    assert [(row.device_type, row.devices, row.ests_per_device) for row in made.assignments] == [
        ("T4", 4, 1),
        ("V100", 2, 2),
    ]
    # The last bit of 16 = 1 + 15 counts: decimals are compared, not binary fractions.
    tight = from_job(asked({"memory_per_worker_gib": 0.1, "memory_fixed_gib": 15.7}, workers=3), RATES)
    assert [device.memory_ests for device in tight.devices] == [3, 163]
    with pytest.raises(ValueError, match="memory_fixed_gib needs memory_per_worker_gib"):
        asked({"memory_fixed_gib": 1})


def test_a_model_without_hardware_agnostic_kernels_keeps_to_one_type() -> None:
    mixed = solve_est(from_job(asked({"determinism": "D2"}), RATES))
    single = solve_est(from_job(asked({"determinism": "D2", "hardware_agnostic": False}), RATES))
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


@pytest.mark.parametrize("rates", [(1e308, 1e-308), (1e308, 1.0), (1.0, 5e-324), (1e-12, 1e12), (1.7e308, 1.7e308)])
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
