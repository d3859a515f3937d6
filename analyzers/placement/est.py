"""EST plans with CP-SAT: which device runs how many logical workers (EasyScale, Equation 1). Start at :func:`solve_est`.

In a step of T seconds a device of type i has room for ``floor(C_i T)`` ESTs. The possible step times are the exact
rationals ``k / C_i``; CP-SAT chooses one of them by a literal and integers for the devices of each type, and sees
whole numbers only, so no rounding can change the optimum. Three solves, each with the former objective fixed: smallest
step time, fewest devices, least waste (with the throughput fixed, the least capability in use). ESTs are then dealt out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ortools.sat.python import cp_model

from ddltool.analyzers.placement.problem import DeviceType, Problem
from ddltool.analyzers.placement.verify import verify
from ddltool.errors import Infeasible, NotProven
from ddltool.plan import Alternative, Assignment, Plan

# Coefficients stay below this, so that CP-SAT's sums stay far from the end of its 64 bits.
_LARGEST_SUM = 2**50


@dataclass(frozen=True, kw_only=True, slots=True)
class _Solution:
    """Devices used per type of the problem, the step time they reach, and what was proven."""

    counts: tuple[int, ...]
    step_s: Fraction
    proven: bool
    bound_s: Fraction
    """No plan is faster than this."""


def solve_est(problem: Problem, *, top_k: int = 1, time_limit_s: float = 10.0, seed: int = 0) -> Plan:
    """Return the plan of highest throughput, then fewest devices, then least waste, with ``top_k - 1`` alternatives.

    Alternatives use other numbers of devices per type, best first. The plan says whether it is proven optimal within
    ``time_limit_s`` and the gap otherwise. Raises Infeasible when no devices can be afforded together, NotProven when
    time ran out before any plan was found.
    """
    started = time.perf_counter()
    deadline = started + time_limit_s
    solutions: list[_Solution] = []
    for _ in range(top_k):
        if time.perf_counter() >= deadline:
            break
        found = _solve(problem, [solution.counts for solution in solutions], deadline, seed)
        if found is None:
            break
        solutions.append(found)
    if not solutions:
        raise NotProven(f"no plan was found within {time_limit_s:g} s; allow more with --time-limit")
    first, *others = (_evaluate(problem, solution) for solution in solutions)
    best = solutions[0]
    return Plan(
        job=problem.job,
        strategy="est",
        max_workers=problem.max_workers,
        batch_size=problem.batch_size,
        **{name: getattr(first, name) for name in Alternative.model_fields},
        status="optimal" if best.proven else "feasible",
        gap=max(0.0, float((best.step_s - best.bound_s) / best.step_s)),
        solve_seconds=time.perf_counter() - started,
        alternatives=others,
    )


def _solve(problem: Problem, excluded: Sequence[tuple[int, ...]], deadline: float, seed: int) -> _Solution | None:
    """Return the best solution whose counts are not excluded, None when there is none or none was found in time."""
    places = range(len(problem.devices))
    groups = [(place,) for place in places] if problem.single_type else [tuple(places)]
    found = [_solve_group(problem, group, excluded, deadline, seed) for group in groups]
    solutions = [solution for solution in found if solution is not None]
    if not solutions:
        return None
    best = min(solutions, key=lambda solution: (solution.step_s, sum(solution.counts), _in_use(problem, solution)))
    bound = min(solution.bound_s for solution in solutions)
    return _Solution(counts=best.counts, step_s=best.step_s, proven=best.proven, bound_s=bound)


def _in_use(problem: Problem, solution: _Solution) -> Fraction:
    """Return the capability of the used devices, mini-batches per second."""
    pairs = zip(solution.counts, problem.devices, strict=True)
    return sum((count * device.capability_per_s for count, device in pairs), Fraction(0))


def _solve_group(
    problem: Problem, group: tuple[int, ...], excluded: Sequence[tuple[int, ...]], deadline: float, seed: int
) -> _Solution | None:
    """Return the best solution on some of the device types.

    The first window of step times always holds the best plan; when the plans in it are all excluded it is widened.
    """
    devices = [problem.devices[place] for place in group]
    slowest = problem.max_workers / min(device.capability_per_s for device in devices)
    window = _window(problem, devices)
    while window is not None:
        found = _solve_window(problem, group, excluded, _step_times(problem, devices, window), deadline, seed)
        if found is not None or window[1] >= slowest or time.perf_counter() >= deadline:
            return found
        window = (window[0], min(2 * window[1], slowest))
    return None


def _solve_window(
    problem: Problem,
    group: tuple[int, ...],
    excluded: Sequence[tuple[int, ...]],
    steps: Sequence[Fraction],
    deadline: float,
    seed: int,
) -> _Solution | None:
    """Return the best solution whose step time is one of ``steps``."""
    devices = [problem.devices[place] for place in group]
    model = cp_model.CpModel()
    used = [model.new_int_var(0, min(device.count, problem.max_workers), device.name) for device in devices]
    chosen = [model.new_bool_var(f"step{number}") for number in range(len(steps))]
    model.add_exactly_one(chosen)
    for literal, step in zip(chosen, steps, strict=True):
        room = [min(int(device.capability_per_s * step), problem.max_workers) for device in devices]
        model.add(cp_model.LinearExpr.weighted_sum(used, room) >= problem.max_workers).only_enforce_if(literal)
    _add_limits(model, problem, devices, used)
    for counts in excluded:
        if all(counts[place] == 0 for place in range(len(counts)) if place not in group):
            model.add_forbidden_assignments(used, [[counts[place] for place in group]])
    rank = cp_model.LinearExpr.weighted_sum(chosen, list(range(len(steps))))
    objectives = (rank, cp_model.LinearExpr.sum(used), cp_model.LinearExpr.weighted_sum(used, _weights(devices)))
    answer = _minimise_in_turn(model, objectives, [*chosen, *used], deadline, seed)
    if answer is None:
        return None
    values, proven, bound = answer
    found = [0] * len(problem.devices)
    for place, value in zip(group, values[len(chosen) :], strict=True):
        found[place] = value
    step = steps[values.index(1)]
    return _Solution(counts=tuple(found), step_s=step, proven=proven, bound_s=steps[min(bound, len(steps) - 1)])


def _minimise_in_turn(
    model: cp_model.CpModel,
    objectives: Sequence[cp_model.LinearExprT],
    variables: Sequence[cp_model.IntVar],
    deadline: float,
    seed: int,
) -> tuple[list[int], bool, int] | None:
    """Minimise each objective with the ones before it fixed.

    Returns the variables' values, whether every stage was proven, and the bound of the first; None without a solution.
    """
    values: list[int] | None = None
    proven, bound = True, 0
    for number, objective in enumerate(objectives):
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = max(deadline - time.perf_counter(), 0.001)
        solver.parameters.num_workers = 1  # one thread and a fixed seed: the same plan every time
        solver.parameters.random_seed = seed
        model.minimize(objective)
        status = solver.solve(model)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            proven = False
            break
        proven = proven and status == cp_model.OPTIMAL
        values = [solver.value(variable) for variable in variables]
        if number == 0:
            bound = max(0, math.ceil(solver.best_objective_bound - 1e-6))
        model.add(objective <= round(solver.objective_value))
        model.clear_hints()
        for variable, value in zip(variables, values, strict=True):
            model.add_hint(variable, value)
    return None if values is None else (values, proven, bound)


def _add_limits(
    model: cp_model.CpModel, problem: Problem, devices: Sequence[DeviceType], used: Sequence[cp_model.IntVar]
) -> None:
    model.add(
        cp_model.LinearExpr.sum(list(used)) <= min(problem.max_workers, problem.max_devices or problem.max_workers)
    )
    if problem.max_price_micro is not None:
        prices = [device.price_micro or 0 for device in devices]
        model.add(cp_model.LinearExpr.weighted_sum(list(used), prices) <= problem.max_price_micro)


def _weights(devices: Sequence[DeviceType]) -> list[int]:
    """Return the capabilities as whole numbers: exact where they fit, else rounded to a billionth of the largest."""
    common = math.lcm(*(device.capability_per_s.denominator for device in devices))
    exact = [int(device.capability_per_s * common) for device in devices]
    if sum(weight * device.count for weight, device in zip(exact, devices, strict=True)) < _LARGEST_SUM:
        return exact
    largest = max(device.capability_per_s for device in devices)
    total = sum(device.count for device in devices)
    return [round(device.capability_per_s / largest * min(10**9, _LARGEST_SUM // total)) for device in devices]


def _window(problem: Problem, devices: Sequence[DeviceType]) -> tuple[Fraction, Fraction] | None:
    """Return a lower and an upper bound of the best step time, None when no device can be used.

    Lower: all work spread without rounding over the most capability that the limits allow. Upper: on any chosen set of
    devices, T = (maxP + devices) / capability has room for maxP, because floor(x) > x - 1.
    """
    chosen = _greedy_set(problem, devices)
    if not chosen:
        return None
    pool = sum((count * device.capability_per_s for device, count in chosen), Fraction(0))
    used = sum(count for _, count in chosen)
    return problem.max_workers / _most_capability(problem, devices), (problem.max_workers + used) / pool


def _step_times(problem: Problem, devices: Sequence[DeviceType], window: tuple[Fraction, Fraction]) -> list[Fraction]:
    """Return every possible step time k / C_i in the window, ascending, and its upper end."""
    lower, upper = window
    steps = {
        k / device.capability_per_s
        for device in devices
        for k in range(max(1, math.ceil(lower * device.capability_per_s)), int(upper * device.capability_per_s) + 1)
    }
    return sorted(steps | {upper})


def _most_capability(problem: Problem, devices: Sequence[DeviceType]) -> Fraction:
    """Return a bound on the capability that can be used at once, relaxing all limits but one at a time."""
    bounds = [_fill(devices, problem.max_devices, problem.max_workers)]
    if problem.max_price_micro is not None:
        left, total = Fraction(problem.max_price_micro), Fraction(0)
        for device in sorted(devices, key=_price_per_capability):
            count = (
                min(Fraction(device.count), left / device.price_micro) if device.price_micro else Fraction(device.count)
            )
            total += count * device.capability_per_s
            left -= count * (device.price_micro or 0)
        bounds.append(total)
    return min(bounds)


def _price_per_capability(device: DeviceType) -> Fraction:
    """Return the price of capability, millionths an hour per mini-batch a second; free devices first."""
    return (device.price_micro or 0) / device.capability_per_s


def _fill(devices: Sequence[DeviceType], limit: int | None, workers: int) -> Fraction:
    """Return the capability of the fastest devices, at most ``limit`` and never more than there are workers."""
    left, total = min(workers, limit or workers), Fraction(0)
    for device in sorted(devices, key=lambda device: -device.capability_per_s):
        count = min(device.count, left)
        total += count * device.capability_per_s
        left -= count
    return total


def _greedy_set(problem: Problem, devices: Sequence[DeviceType]) -> list[tuple[DeviceType, int]]:
    """Return some affordable set of devices: fastest per price first, then as many as the limits allow."""
    left = min(problem.max_workers, problem.max_devices or problem.max_workers)
    money = problem.max_price_micro
    chosen: list[tuple[DeviceType, int]] = []
    for device in sorted(
        devices, key=lambda d: -d.capability_per_s / ((d.price_micro or 1) if money is not None else 1)
    ):
        count = min(device.count, left)
        if money is not None and device.price_micro:
            count = min(count, money // device.price_micro)
            money -= count * device.price_micro
        left -= count
        if count:
            chosen.append((device, count))
    return chosen


def _evaluate(problem: Problem, solution: _Solution) -> Alternative:
    """Deal out the ESTs and return the plan's figures, checked from scratch."""
    assignments = _deal(problem, solution)
    step = verify(problem, assignments)
    throughput = problem.max_workers / step
    return Alternative(
        iteration_s=float(step),
        throughput=float(throughput),
        assignments=assignments,
        est_count=sum(row.devices * row.ests_per_device for row in assignments),
        waste=float(_in_use(problem, solution) - throughput),
        overload_factor=float(step),
    )


def _deal(problem: Problem, solution: _Solution) -> list[Assignment]:
    """Return how many ESTs each used device runs: full first, the surplus taken evenly from the slowest types."""
    pairs = [(device, count) for device, count in zip(problem.devices, solution.counts, strict=True) if count]
    ests = {device.name: count * int(device.capability_per_s * solution.step_s) for device, count in pairs}
    surplus = sum(ests.values()) - problem.max_workers
    for device, count in sorted(pairs, key=lambda pair: pair[0].capability_per_s):
        taken = min(surplus, ests[device.name] - count)
        ests[device.name] -= taken
        surplus -= taken
    if surplus > 0:
        raise Infeasible("more devices than logical workers")  # the model uses at most maxP devices
    rows: list[Assignment] = []
    for device, count in pairs:
        each, more = divmod(ests[device.name], count)
        for number, size in ((more, each + 1), (count - more, each)):
            if number:
                samples = size * problem.batch_size
                rows.append(
                    Assignment(device_type=device.name, devices=number, ests_per_device=size, local_batch_size=samples)
                )
    return rows
