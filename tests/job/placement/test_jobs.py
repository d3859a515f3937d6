"""Several jobs on shared devices against trying every way of sharing; larger cases against their proven bound."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from random import Random

import numpy as np
import pytest

from ddltool.analyzers.job.placement import jobs as several
from ddltool.analyzers.job.placement.jobs import JobTable, find_floor_sharing, job_table, solve_jobs, solve_sharing
from ddltool.analyzers.job.placement.problem import DeviceType, Problem
from ddltool.analyzers.job.placement.steps import best_step, verify
from ddltool.errors import Infeasible, InputError
from ddltool.results import JointPlan, Sharing


def random_job(random: Random, name: str, devices: dict[str, int], workers: tuple[int, ...]) -> Problem:
    types = tuple(
        DeviceType(
            name=kind,
            count=count,
            capability_per_s=Fraction(random.randint(5, 60), 10),
            price_micro=random.randint(1, 4),
            max_ests=random.choice([None, None, None, 3]),
        )
        for kind, count in devices.items()
    )
    return Problem(
        job=name,
        max_workers=random.choice(workers),
        batch_size=2,
        devices=types,
        single_type=random.random() < 0.2,
        max_devices=random.choice([None, None, 2]),
        max_price_micro=random.choice([None, None, 6]),
    )


def every_way(jobs: list[Problem], devices: dict[str, int], weights: list[float]) -> tuple[float, float, float]:
    """The best weighted sum, the best smallest share, and the best weighted sum with that smallest share."""
    options = []
    for job in jobs:
        found: dict[tuple[int, ...], float] = {}
        for counts in itertools.product(*(range(count + 1) for count in devices.values())):
            step = best_step(job, counts) if job.allows(counts) else None
            if step is not None and step <= job.slowest_step:
                found[counts] = float(job.max_workers / step)
        alone = max(found.values())
        options.append(
            [(np.zeros(len(devices), dtype=int), 0.0)]
            + [(np.array(row), speed / alone) for row, speed in found.items()]
        )
    limit = np.array(list(devices.values()))
    ways = []
    for way in itertools.product(*options):
        if (sum(row for row, _ in way) <= limit).all():
            shares = [share for _, share in way]
            ways.append((min(shares), sum(weight * share for weight, share in zip(weights, shares, strict=True))))
    floor = max(share for share, _ in ways)
    return max(total for _, total in ways), floor, max(total for share, total in ways if share >= floor - 1e-12)


def relative(made: JointPlan) -> list[float]:
    return [job.relative for job in made.jobs]


def check(jobs: list[Problem], devices: dict[str, int], made: JointPlan) -> None:
    """No device is given twice, every job's plan keeps its own constraints, and the figures follow from the plans."""
    used: dict[str, int] = {}
    for job, row in zip(jobs, made.jobs, strict=True):
        plan, share = row.plan, row.relative
        assert row.file == job.job
        if plan is None:
            assert share == 0
            continue
        step = verify(job, plan.assignments)
        assert plan.throughput == float(job.max_workers / step)
        assert 0 < share <= 1 + 1e-9
        for row in plan.assignments:
            used[row.device_type] = used.get(row.device_type, 0) + row.devices
    assert all(count <= devices[name] for name, count in used.items())
    assert made.value <= made.bound * (1 + 1e-9)


@pytest.mark.parametrize("objective", ["sum", "max-min"])
def test_small_cases_equal_trying_every_way(objective: Sharing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several, "_FLOOR_LIMIT_S", 20.0)  # the proof is wanted, whatever else the machine does
    random, waiting = Random(3), 0
    for number in range(25):
        devices = {"a": random.randint(1, 3), "b": random.randint(1, 2)}
        jobs = [random_job(random, f"j{place}", devices, (1, 3, 6)) for place in range(random.randint(2, 3))]
        weights = [random.choice([1.0, 1.0, 2.5]) for _ in jobs]
        try:
            best, floor, second = every_way(jobs, devices, weights)
        except ValueError:  # a job that cannot run even alone
            with pytest.raises(Infeasible):
                solve_jobs(jobs, devices, weights=weights)
            continue
        made = solve_jobs(jobs, devices, weights=weights, objective=objective, time_limit_s=20)
        check(jobs, devices, made)
        assert made.status == "optimal", number
        total = sum(weight * share for weight, share in zip(weights, relative(made), strict=True))
        waiting += 0.0 in relative(made)
        if objective == "sum":
            assert made.value == pytest.approx(best)
            assert total == pytest.approx(best)
        else:
            assert made.value == pytest.approx(floor)
            # With a floor of 0 someone waits however it is shared.
            assert total == pytest.approx(second if floor > 0 else best)
    assert waiting >= 1


def tables_of(jobs: list[Problem], devices: dict[str, int]) -> list[JobTable]:
    """Each job's table; raises ValueError for a job that cannot run even alone."""
    limit = np.array(list(devices.values()))
    tables = []
    for job in jobs:
        steps = {
            counts: step
            for counts in itertools.product(*(range(count + 1) for count in devices.values()))
            if job.allows(counts) and (step := best_step(job, counts)) is not None
        }
        fastest = min(steps, key=lambda counts: steps[counts])
        tables.append(job_table(job, list(devices), limit, 1.0, steps[fastest]))
        assert tables[-1].share(fastest) == pytest.approx(1.0)
    return tables


def test_what_is_said_about_a_floor_is_true() -> None:
    """Of every floor: what is called impossible is, and a way that is found gives every job the floor."""
    random, told = Random(6), 0
    for _ in range(40):
        devices = {"a": random.randint(1, 3), "b": random.randint(1, 3)}
        jobs = [random_job(random, f"j{place}", devices, (1, 3, 6)) for place in range(random.randint(2, 3))]
        try:
            _, best, _ = every_way(jobs, devices, [1.0] * len(jobs))
            tables = tables_of(jobs, devices)
        except ValueError:
            continue
        limit = np.array(list(devices.values()))
        for floor in np.unique(np.concatenate([table.best_shares for table in tables])):
            devices_of, bound = find_floor_sharing(tables, limit, float(floor))
            impossible = bound == -math.inf
            assert impossible == (best < floor * (1 - 1e-9)) == (devices_of is None)
            told += impossible
            for table, row in zip(tables, devices_of or [], strict=devices_of is not None):
                assert row is not None
                assert (table.share(row) or 0.0) >= floor * (1 - 1e-9)
    assert told > 50


def test_grouped_step_times_bound_every_sharing() -> None:
    """However few groups there are, no sharing is worth more than the bound, and what is found is what it is said to be."""
    random, close = Random(5), 0
    for _ in range(30):
        devices = {"a": random.randint(1, 3), "b": random.randint(1, 3)}
        jobs = [random_job(random, f"j{place}", devices, (5, 9, 14)) for place in range(2)]
        try:
            best, _, _ = every_way(jobs, devices, [1.0, 1.0])
            tables = tables_of(jobs, devices)
        except ValueError:
            continue
        for lines in (1, 2, 4, 100):
            grouped = [table.grouped(lines) for table in tables]
            found, bound = solve_sharing(grouped, np.array(list(devices.values())), must_serve_all=False, limit_s=20)
            assert bound >= best - 1e-6
            total = sum(table.share(row) or 0.0 for table, row in zip(tables, found or [], strict=bool(found)) if row)
            assert total <= best + 1e-9
            close += lines < 100 and bound < 1.2 * best
        assert total == pytest.approx(best)
        assert bound == pytest.approx(best)
    assert close > 20


def many(number: int, devices: dict[str, int], workers: tuple[int, ...]) -> list[Problem]:
    """Jobs with limits of their own, every fourth without."""
    random = Random(number)
    jobs = []
    for place in range(number):
        offers = tuple(
            DeviceType(
                name=name, count=count, capability_per_s=Fraction(random.randint(10, 60), 10), price_micro=place % 3 + 1
            )
            for place, (name, count) in enumerate(devices.items())
        )
        limits = ({}, {"max_devices": 6}, {"max_price_micro": 15}, {"single_type": True})[place % 4]
        jobs.append(
            Problem(job=f"j{place}", max_workers=random.choice(workers), batch_size=2, devices=offers, **limits)  # type: ignore[arg-type]
        )
    return jobs


def test_hundreds_of_jobs_all_get_something() -> None:
    devices = {"a": 100, "b": 100, "c": 100}
    jobs = many(120, devices, (4, 8, 16, 32))
    made = solve_jobs(jobs, devices, objective="max-min", time_limit_s=60)  # ends long before
    check(jobs, devices, made)
    assert min(relative(made)) > 0
    assert made.gap < 0.03


@pytest.mark.parametrize("objective", ["sum", "max-min"])
def test_there_is_an_answer_with_a_bound_without_any_time(objective: Sharing) -> None:
    devices = {"a": 30, "b": 30}
    jobs = many(24, devices, (4, 8, 200))
    made = solve_jobs(jobs, devices, objective=objective, time_limit_s=1e-9)
    check(jobs, devices, made)
    assert made.value > 0
    assert made.gap == pytest.approx(1 - made.value / made.bound)
    longer = solve_jobs(jobs, devices, objective=objective, time_limit_s=2)
    assert made.value <= longer.bound + 1e-9
    assert made.bound >= longer.value - 1e-9


@pytest.mark.slow
def test_many_jobs_are_shared_close_to_the_bound() -> None:
    random = Random(11)
    devices = {"a": 64, "b": 64, "c": 64}
    jobs = [
        Problem(
            job=f"j{place}",
            max_workers=random.choice([4, 8, 16, 32]),
            batch_size=2,
            devices=tuple(
                DeviceType(name=name, count=64, capability_per_s=Fraction(random.randint(10, 60), 10))
                for name in devices
            ),
        )
        for place in range(32)
    ]
    made = solve_jobs(jobs, devices, time_limit_s=8)
    check(jobs, devices, made)
    assert made.gap < 0.03
    fair = solve_jobs(jobs, devices, objective="max-min", time_limit_s=60)  # ends long before, but on a busy machine
    check(jobs, devices, fair)
    assert min(relative(fair)) > min(relative(made))
    assert sum(relative(fair)) <= made.bound + 1e-9


def test_long_tables_are_thinned_without_losing_the_bound() -> None:
    devices = {"a": 40, "b": 40}
    jobs = [
        Problem(
            job=f"j{place}",
            max_workers=3000,
            batch_size=1,
            devices=(
                DeviceType(name="a", count=40, capability_per_s=Fraction(3)),
                DeviceType(name="b", count=40, capability_per_s=Fraction(2 + place)),
            ),
        )
        for place in range(2)
    ]
    made = solve_jobs(jobs, devices, time_limit_s=60)  # ends long before
    check(jobs, devices, made)
    assert made.gap < 0.01
    # The second job is as fast on b as on a, so it should have b; splitting otherwise is worse.
    assert made.value > 0.9


def test_wrong_questions() -> None:
    job = random_job(Random(1), "j", {"a": 1}, (1,))
    for call, message in (
        (lambda: solve_jobs([], {"a": 1}), "jobs: there are none"),
        (lambda: solve_jobs([job], {"b": 1}), "j:devices: none of its device types is there"),
        (lambda: solve_jobs([job], {"a": 1}, weights=[0.0]), "weights: must be one positive number for each job"),
        (lambda: solve_jobs([job], {"a": 1}, weights=[1.0, 1.0]), "weights: must be one positive number for each job"),
        (lambda: solve_jobs([job], {"a": 1}, weights=[float("nan")]), "weights: must be one positive number"),
    ):
        with pytest.raises(InputError, match=message):
            call()  # type: ignore[no-untyped-call]
