"""Several jobs on shared devices against trying every way of sharing; larger cases against their proven bound.
Solvers that stop early or fail: what they did not say is never read as an answer, and what is told stays true.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import pytest
from ortools.sat.python import cp_model
from scipy import optimize

from ddltool.analyzers.job.placement import est, jobs, network
from ddltool.analyzers.job.placement import jobs as several
from ddltool.analyzers.job.placement.est import solve_est
from ddltool.analyzers.job.placement.jobs import JobTable, find_floor_sharing, job_table, solve_jobs, solve_sharing
from ddltool.analyzers.job.placement.network import solve_on_nodes
from ddltool.analyzers.job.placement.problem import DeviceType, Problem
from ddltool.analyzers.job.placement.steps import best_step, verify
from ddltool.errors import Infeasible, InputError, NotProven
from ddltool.results import JointPlan, Sharing
from tests.job.placement import test_est as one_job
from tests.job.placement import test_network as on_nodes


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
    for _ in range(24):
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
    assert told > 30


def test_grouped_step_times_bound_every_sharing() -> None:
    """However few groups there are, no sharing is worth more than the bound, and what is found is what it is said to be."""
    random, close = Random(5), 0
    for _ in range(18):
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
    assert close > 12


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
    made = solve_jobs(jobs, devices, objective="max-min", time_limit_s=600)  # ends long before
    check(jobs, devices, made)
    assert min(relative(made)) > 0
    assert made.gap < 0.03


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


Run = Callable[[cp_model.CpSolver, cp_model.CpModel], cp_model.CpSolverStatus]
RULES: tuple[Sharing, ...] = ("sum", "max-min")


def stopping(after: int) -> Run:
    """CP-SAT whose time runs out after so many questions: then the first solution at most, and never a proof."""
    real, asked = est.run, 0

    def run(solver: cp_model.CpSolver, model: cp_model.CpModel) -> cp_model.CpSolverStatus:
        nonlocal asked
        asked += 1
        if asked <= after:
            return real(solver, model)
        if not model.has_objective():
            return cp_model.UNKNOWN
        solver.parameters.stop_after_first_solution = True
        status = real(solver, model)
        return cp_model.FEASIBLE if status in (cp_model.OPTIMAL, cp_model.FEASIBLE) else cp_model.UNKNOWN

    return run


def failing(after: int, *, found: bool = False) -> Callable[..., Any]:
    """scipy's milp, whose time runs out after so many calls: without an answer, or with one ``found`` and no bound."""
    real, asked = optimize.milp, 0

    def milp(*given: Any, **named: Any) -> Any:
        nonlocal asked
        asked += 1
        solved = real(*given, **named)
        if asked > after and solved.status in (0, 1):
            solved.status, solved.mip_dual_bound = 1, None
            solved.x = solved.x if found else None
        return solved

    return milp


@functools.cache
def small_cases() -> list[tuple[list[Problem], dict[str, int], tuple[float, float]]]:
    """Twelve times jobs, devices, and the best sum and smallest share of any way."""
    random = Random(21)
    found: list[tuple[list[Problem], dict[str, int], tuple[float, float]]] = []
    while len(found) < 12:
        devices = {"a": random.randint(1, 3), "b": random.randint(1, 3)}
        some = [random_job(random, f"j{place}", devices, (1, 3, 6)) for place in range(random.randint(2, 3))]
        with contextlib.suppress(ValueError):
            found.append((some, devices, every_way(some, devices, [1.0] * len(some))[:2]))
    return found


def is_honest(some: list[Problem], devices: dict[str, int], made: JointPlan, best: float) -> bool:
    """Check that the plan holds, the bound too, and "optimal" is; return whether it says so."""
    check(some, devices, made)
    assert made.bound >= best - 1e-7
    assert made.value <= best + 1e-7
    if made.status == "optimal":
        assert made.gap == 0
        assert made.value == pytest.approx(best)
        return True
    assert made.gap == pytest.approx(1 - made.value / made.bound)
    assert made.gap > 0
    assert {job.plan.status for job in made.jobs if job.plan is not None} <= {"feasible"}
    return False


@pytest.mark.parametrize("found", [False, True])
@pytest.mark.parametrize("after", [0, 1, 2, 5])
def test_several_jobs_are_optimal_only_with_a_proof(after: int, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for some, devices, best in small_cases()[:5]:
        for rule, true in zip(RULES, best, strict=True):
            monkeypatch.setattr(optimize, "milp", failing(after, found=found))
            made = solve_jobs(some, devices, objective=rule, time_limit_s=10)
            monkeypatch.undo()
            assert is_honest(some, devices, made, true) == (made.status == "optimal")


def test_many_jobs_are_planned_without_any_answer_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = {"a": 60, "b": 60, "c": 60}
    some = many(24, devices, (4, 8, 200))
    usual = [solve_jobs(some, devices, objective=rule, time_limit_s=1) for rule in RULES]
    monkeypatch.setattr(optimize, "milp", failing(0))
    for rule, other in zip(RULES, usual, strict=True):
        made = solve_jobs(some, devices, objective=rule, time_limit_s=1)
        check(some, devices, made)
        assert 0 < made.value <= other.bound + 1e-9
        assert (made.status == "optimal") == (made.gap == 0)
        assert made.bound >= other.value - 1e-9


def test_a_larger_sum_does_not_let_a_job_wait_that_another_sharing_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs that look for a smallest share say nothing in time; the one for the sum answers."""
    real = optimize.milp

    def milp(*given: Any, **named: Any) -> Any:
        solved = real(*given, **named)
        if named["options"]["mip_rel_gap"] > 1:
            solved.status, solved.mip_dual_bound, solved.x = 1, None, None
        return solved

    monkeypatch.setattr(optimize, "milp", milp)
    devices = {"a": 3, "b": 3, "c": 3}
    some = many(6, devices, (4, 8, 200))
    made = {rule: solve_jobs(some, devices, objective=rule, time_limit_s=20) for rule in RULES}
    assert min(job.relative for job in made["sum"].jobs) == 0
    assert made["max-min"].value > 0


@pytest.mark.parametrize("limit", [1e-9, 0.02])
def test_several_jobs_in_next_to_no_time(limit: float) -> None:
    for some, devices, best in small_cases():
        for rule, true in zip(RULES, best, strict=True):
            made = solve_jobs(some, devices, objective=rule, time_limit_s=limit)
            assert is_honest(some, devices, made, true) == (made.status == "optimal")


def test_one_job_is_optimal_only_with_every_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever time runs out: "optimal" is the very plan that all the time gives, "feasible" has a gap that covers it."""
    random, seen = Random(8), {"optimal": 0, "feasible": 0}
    for number in range(25):
        case = one_job.random_problem(random, types=3, count=3, workers=9)
        case = one_job.priced(random, case) if number % 2 else case
        expected = one_job.ranking(case)
        if not expected:
            continue
        order = ("devices", "throughput") if number % 3 == 0 else ("throughput",)
        usual = solve_est(case, top_k=3, objective=order)
        for after in range(12):
            monkeypatch.setattr(est, "run", stopping(after))
            try:
                made = solve_est(case, top_k=3, objective=order)
            except NotProven:
                continue
            finally:
                monkeypatch.undo()
            seen[made.status] += 1
            ways = [one_job.as_ranked(case, plan) for plan in (made, *made.alternatives)]
            if made.status == "optimal":
                assert made.gap == 0
                assert made.assignments == usual.assignments
                assert made.alternatives == usual.alternatives[: len(made.alternatives)]
            else:
                assert made.alternatives == []
                if order == ("throughput",):
                    assert float(ways[0][0]) * (1 - made.gap) <= float(expected[0][0]) * (1 + 1e-12)
    assert min(seen.values()) > 30


def test_no_answer_in_time_is_not_called_a_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the solver gives up a little before the deadline."""
    # The greedy guesses take one of the first type, which is too slow; the money buys two of the other.
    dear = one_job.problem((6.0, 4.0), (4, 4), 4, prices=(6, 5), max_price_micro=10, min_throughput=Fraction(7))
    assert solve_est(dear).status == "optimal"
    monkeypatch.setattr(est, "solve", lambda *_: (None, False, 0))
    with pytest.raises(NotProven, match="no plan was found within 10 s"):
        solve_est(dear)


def test_the_most_that_can_be_reached_is_told_only_with_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    case = one_job.problem((3.0, 1.0), (2, 2), 4, prices=(2, 1), max_price_micro=3, min_throughput=Fraction(9))
    with pytest.raises(Infeasible, match="the most that can be reached is"):
        solve_est(case)
    real = est.solve_est
    monkeypatch.setattr(est, "solve_est", lambda *given, **named: real(*given, **named).model_copy(update={"gap": 0.1}))
    with pytest.raises(Infeasible, match="min_throughput") as caught:
        real(case)
    assert "the most" not in str(caught.value)


def test_jobs_whose_throughput_alone_is_open_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    some, devices, _ = small_cases()[0]
    monkeypatch.setattr(jobs, "solve_est", lambda *a, **k: solve_est(*a, **k).model_copy(update={"gap": 0.1}))
    with pytest.raises(NotProven, match=r"j0: what it reaches alone was not settled in \d+ s"):
        solve_jobs(some, devices)


def test_on_nodes_an_unproven_computing_time_widens_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    random, wide = Random(2), 0

    def guessed(problem: Problem, **named: Any) -> Any:
        made = solve_est(problem, **named)
        return made.model_copy(update={"gap": 0.3, "status": "feasible"})  # a gap that is true

    for _ in range(80):
        case, shapes = on_nodes.case(random)
        case = replace(case, max_price_micro=9)
        cost = on_nodes.params(alpha_sync_node_s=random.choice([0.0, 0.05, 0.3]), beta_sync_node_s=0.01)
        expected = on_nodes.every_step(case, shapes, cost)
        if not expected:
            continue
        monkeypatch.setattr(network, "solve_est", guessed)
        try:
            made = solve_on_nodes(case, shapes, cost)
        except NotProven:
            continue
        finally:
            monkeypatch.undo()
        assert made.iteration_s * (1 - made.gap) <= min(expected) * (1 + 1e-9)
        if made.status == "optimal":
            assert made.iteration_s == pytest.approx(min(expected))
        wide += made.gap > 0
    assert wide > 5


def test_on_nodes_an_interval_is_left_only_with_a_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 2 to 8 devices the step is 4, 3.4, 2.8, .., 3.4 s; of 8 devices it is only known that computing takes 1 to 4 s."""
    offered = (DeviceType(name="a", count=8, capability_per_s=Fraction(1)),)
    case = Problem(job="j", max_workers=8, batch_size=1, devices=offered)
    shapes = [on_nodes.node_group(device_type="a", devices=1, nodes=8)]
    cost = on_nodes.params(
        alpha_sync_local_s=0.0, beta_sync_local_s=0.0, alpha_sync_node_s=0.0, beta_sync_node_s=0.4, gamma=1.0
    )
    real = network._compute_time

    def vague(problem: Problem, devices: int, seed: int) -> Any:
        made = real(problem, devices, seed)
        return made if made is None or devices < 8 else (Fraction(4), made[1])

    monkeypatch.setattr(network, "_compute_time", vague)
    made = solve_on_nodes(case, shapes, cost)
    assert made.iteration_s == pytest.approx(2.8)
    assert made.iteration_s * (1 - made.gap) <= 2.8 + 1e-9


def test_a_model_that_cp_sat_does_not_take_is_an_error() -> None:
    model = cp_model.CpModel()
    model.add(model.new_int_var(0, 2**62, "") * 2**10 <= 5)
    with pytest.raises(ValueError, match="CP-SAT does not take the model"):
        est.run(cp_model.CpSolver(), model)
