"""EST plans with CP-SAT: which device runs how many logical workers (EasyScale, Equation 1). Start at :func:`solve_est`.

In a step of T seconds a device of type i has room for ``floor(C_i T)`` ESTs, and the possible step times are the exact
rationals ``k / C_i``. Whatever fits into a step fits into a longer one, so the smallest step time is found by bisection:
for a given T, CP-SAT finds numbers of devices with room for every EST under all constraints, or proves that there are
none. With T settled it minimises the devices, then the waste (at a given throughput: the capability in use), then
prefers the types whose names come first. CP-SAT sees whole numbers only, so no rounding can change the optimum. The
ESTs are dealt out last.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from ortools.sat.python import cp_model

from ddltool.analyzers.placement.problem import DeviceType, Problem, check_affordable
from ddltool.analyzers.placement.verify import verify
from ddltool.errors import InputError, NotProven
from ddltool.plan import Alternative, Assignment, Plan

# How many devices of each type of the problem are used.
Counts = tuple[int, ...]
# Objectives stay below this: far from the end of CP-SAT's 64 bits, and exact as floats, in which it reports them.
_LARGEST_SUM = 2**50
_DIGIT = 2**26
# Up to this many step times are listed to find the middle one; more are halved by arithmetic.
_LISTED_STEPS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class _Solution:
    counts: Counts
    step_s: Fraction
    bound_s: Fraction
    """No plan is faster than this."""
    proven: bool
    """Whether it is the best in every objective."""


@dataclass(kw_only=True, slots=True)
class _Search:
    """One call of :func:`solve_est`: the problem, what limits the solver, and the solutions found so far."""

    problem: Problem
    deadline: float
    seed: int
    found: list[_Solution] = field(default_factory=list)


class _OutOfTime(Exception):
    """The solver stopped with neither an answer nor a proof that there is none."""


def solve_est(problem: Problem, *, top_k: int = 1, time_limit_s: float = 10.0, seed: int = 0) -> Plan:
    """Return the plan of highest throughput, then fewest devices, then least waste, with ``top_k - 1`` alternatives.

    Of plans equal in all three, the one that uses most devices of the type whose name comes first. Alternatives use
    other numbers of devices per type. Each is proven the next best, so there are fewer when the different plans or the
    time (``time_limit_s`` in all) run out. ``status`` is "optimal" when all three objectives are proven; ``gap`` is the
    part of the step time that a faster plan could save at most. Raises Infeasible when no device can be afforded,
    NotProven when there was no time at all, InputError for a ``top_k`` below 1.

    >>> offered = (DeviceType(name="T4", count=4, capability_per_s=Fraction(1)),
    ...            DeviceType(name="V100", count=2, capability_per_s=Fraction("3.1")))
    >>> plan = solve_est(Problem(job="demo", max_workers=8, batch_size=32, devices=offered))
    >>> [(row.device_type, row.devices, row.ests_per_device) for row in plan.assignments]
    [('T4', 2, 1), ('V100', 2, 3)]
    >>> plan.iteration_s, plan.status
    (1.0, 'optimal')
    """
    started = time.perf_counter()
    if top_k < 1:
        raise InputError("top_k", f"is {top_k}", "ask for one plan at least")
    check_affordable(problem)
    search = _Search(problem=problem, deadline=started + time_limit_s, seed=seed % 2**31)
    if time_limit_s <= 0 or not _extend(search):
        raise NotProven(f"no plan was found within {time_limit_s:g} s; allow more with --time-limit")
    while len(search.found) < top_k and search.found[-1].proven and _extend(search):
        pass
    best, *others = search.found
    first = _evaluate(problem, best)
    return Plan(
        job=problem.job,
        strategy="est",
        max_workers=problem.max_workers,
        batch_size=problem.batch_size,
        **{name: getattr(first, name) for name in Alternative.model_fields},
        status="optimal" if best.proven else "feasible",
        gap=float(1 - best.bound_s / best.step_s),
        alternatives=[_evaluate(problem, solution) for solution in others if solution.proven],
        solve_seconds=time.perf_counter() - started,
    )


def _extend(search: _Search) -> bool:
    """Add the best solution that is not there yet; return False when there is no other or time ran out without one."""
    try:
        solution = _fastest(search)
    except _OutOfTime:
        return False
    if solution is not None:
        search.found.append(_refine(search, solution) if solution.proven else solution)
    return solution is not None


def _fastest(search: _Search) -> _Solution | None:
    """Return a solution with the smallest step time (``proven``, unless time ran out); None when there is no other."""
    problem = search.problem
    capabilities = [device.capability_per_s for device in problem.devices]
    counts = _guess(search)
    if counts is None:  # in this step any one device holds every EST
        counts = _fit(search, problem.max_workers / min(capabilities))
        if counts is None:
            return None
    step = _reach(problem, counts)
    # The guess is often the best already: ask first whether it can be beaten at all.
    lower = search.found[-1].step_s if search.found else _lower_bound(problem)
    trial: Fraction | None = lower if search.found else _before(capabilities, step)
    try:
        while trial is not None and lower <= trial < step:
            better = _fit(search, trial)
            if better is None:
                lower = _after(capabilities, trial)
            else:
                counts, step = better, _reach(problem, better)
            trial = _middle(capabilities, lower, step)
    except _OutOfTime:
        return _Solution(counts=counts, step_s=step, bound_s=min(lower, step), proven=False)
    return _Solution(counts=counts, step_s=step, bound_s=step, proven=True)


def _refine(search: _Search, solution: _Solution) -> _Solution:
    """Return the solution of fewest devices, then least waste, then first types, at the same step time."""
    model, used = _model(search, solution.step_s)
    objectives = [cp_model.LinearExpr.sum(used), *_capability_in_use(model, search.problem, used)]
    proofs, counts = 0, solution.counts
    for objective in [*objectives, *_preference(search.problem, used)]:
        model.minimize(objective)
        model.clear_hints()
        for variable, count in zip(used, counts, strict=True):
            model.add_hint(variable, count)
        answer = _solve(search, model, used)
        counts = answer.counts or counts
        if answer.counts is None or not answer.proven:
            break
        proofs += 1
        model.add(objective == answer.value)
    return replace(solution, counts=counts, proven=proofs >= len(objectives))


def _fit(search: _Search, step: Fraction) -> Counts | None:
    """Return numbers of devices with room for every EST in a step of ``step`` seconds; None: proven there are none."""
    answer = _solve(search, *_model(search, step))
    if answer.counts is None and not answer.proven:
        raise _OutOfTime
    return answer.counts


def _model(search: _Search, step: Fraction) -> tuple[cp_model.CpModel, list[cp_model.IntVar]]:
    """Return the constraints on the numbers of used devices, one variable per type, at a given step time.

    A device without room for one EST cannot be used. Solutions that were found before are forbidden.
    """
    problem, model = search.problem, cp_model.CpModel()
    room = [min(int(device.capability_per_s * step), problem.max_workers) for device in problem.devices]
    used = [
        model.new_int_var(0, problem.affordable(device) if each else 0, device.name)
        for device, each in zip(problem.devices, room, strict=True)
    ]
    model.add(cp_model.LinearExpr.weighted_sum(used, room) >= problem.max_workers)
    model.add(cp_model.LinearExpr.sum(used) <= problem.device_limit)
    if problem.max_price_micro is not None:
        prices = [device.price_micro or 0 for device in problem.devices]
        model.add(cp_model.LinearExpr.weighted_sum(used, prices) <= problem.max_price_micro)
    if problem.single_type:
        present = [model.new_bool_var(f"use {device.name}") for device in problem.devices]
        model.add_at_most_one(present)
        for variable, literal in zip(used, present, strict=True):
            model.add(variable == 0).only_enforce_if(~literal)
    if search.found:
        model.add_forbidden_assignments(used, [solution.counts for solution in search.found])
    return model, used


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    counts: Counts | None
    """None: no solution was found; there is none if ``proven``."""
    proven: bool
    value: int = 0
    """The objective's."""


def _solve(search: _Search, model: cp_model.CpModel, used: Sequence[cp_model.IntVar]) -> _Answer:
    """Run CP-SAT in the time that is left, on one thread and with a fixed seed, so that answers repeat."""
    left = search.deadline - time.perf_counter()
    if left <= 0:
        return _Answer(counts=None, proven=False)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = left
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = search.seed
    # CP-SAT would put the default handler in Python's place, and a later Ctrl-C would end the process without clean-up.
    solver.parameters.catch_sigint_signal = False
    status = solver.solve(model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        counts = tuple(solver.value(variable) for variable in used)
        return _Answer(counts=counts, proven=status == cp_model.OPTIMAL, value=round(solver.objective_value))
    if status == cp_model.MODEL_INVALID:
        raise ValueError(f"CP-SAT does not take the model: {model.validate()}")
    return _Answer(counts=None, proven=status == cp_model.INFEASIBLE)


def _capability_in_use(
    model: cp_model.CpModel, problem: Problem, used: Sequence[cp_model.IntVar]
) -> list[cp_model.LinearExpr]:
    """Return objectives that, minimised in turn, minimise the capability of the used devices exactly.

    Capabilities become whole numbers over their common denominator. Where their sum would be too large (measured
    capabilities have 17 digits), it is carried out digit by digit in base 2**26, highest digit first.
    """
    common = math.lcm(*(device.capability_per_s.denominator for device in problem.devices))
    weights = [int(device.capability_per_s * common) for device in problem.devices]
    digits: list[cp_model.LinearExpr] = []
    carry: cp_model.LinearExpr | int = 0
    while max(weights) * problem.device_limit >= _LARGEST_SUM:
        carried = model.new_int_var(0, problem.device_limit + 1, "carried")
        digit = model.new_int_var(0, _DIGIT - 1, "digit")
        low = cp_model.LinearExpr.weighted_sum(used, [weight % _DIGIT for weight in weights])
        model.add(low + carry == _DIGIT * carried + digit)
        digits.append(digit)
        carry, weights = carried, [weight // _DIGIT for weight in weights]
    return [cp_model.LinearExpr.weighted_sum(used, weights) + carry, *reversed(digits)]


def _preference(problem: Problem, used: Sequence[cp_model.IntVar]) -> Iterator[cp_model.LinearExpr]:
    """Yield objectives that, minimised in turn, make the first type's count largest, then the second's, and so on.

    As many types as fit share an objective, as the digits of a number in a mixed base.
    """
    chunk: list[cp_model.IntVar] = []
    weights: list[int] = []
    size = 1
    for variable, device in zip(used, problem.devices, strict=True):
        base = problem.affordable(device) + 1
        if chunk and size * base >= _LARGEST_SUM:
            yield cp_model.LinearExpr.weighted_sum(chunk, weights)
            chunk, weights, size = [], [], 1
        chunk, weights, size = [*chunk, variable], [*(weight * base for weight in weights), -1], size * base
    yield cp_model.LinearExpr.weighted_sum(chunk, weights)


def _guess(search: _Search) -> Counts | None:
    """Return a good choice of devices that was not found yet, None when none is at hand: what bisection starts from."""
    problem, excluded = search.problem, {solution.counts for solution in search.found}
    near = _neighbours(search.found[-1].counts) if search.found else _greedy(problem)
    choices = [counts for counts in near if counts not in excluded and _allowed(problem, counts)]
    return min(choices, key=lambda counts: (_reach(problem, counts), sum(counts)), default=None)


def _greedy(problem: Problem) -> Iterator[Counts]:
    """Yield choices that take as many devices as are allowed: of each type alone, fastest first, best value first."""
    devices = problem.devices
    for place, device in enumerate(devices):
        yield tuple(problem.affordable(device) if place == other else 0 for other in range(len(devices)))
    for value in (lambda device: -device.capability_per_s, _price_of_capability):
        left, money, taken = problem.device_limit, problem.max_price_micro, dict.fromkeys(range(len(devices)), 0)
        for place in sorted(taken, key=lambda place: value(devices[place])):
            price = devices[place].price_micro or 0
            taken[place] = min(devices[place].count, left)
            if money is not None and price:
                taken[place] = min(taken[place], money // price)
                money -= taken[place] * price
            left -= taken[place]
        yield tuple(taken.values())


def _price_of_capability(device: DeviceType) -> Fraction:
    return (device.price_micro or 0) / device.capability_per_s


def _neighbours(counts: Counts) -> Iterator[Counts]:
    """Yield the choices with one device more or less."""
    for place, count in enumerate(counts):
        yield (*counts[:place], count + 1, *counts[place + 1 :])
        yield (*counts[:place], count - 1, *counts[place + 1 :])


def _allowed(problem: Problem, counts: Counts) -> bool:
    """Return whether a choice of devices keeps the constraints."""
    price = sum((device.price_micro or 0) * count for device, count in zip(problem.devices, counts, strict=True))
    return (
        1 <= sum(counts) <= problem.device_limit
        and all(0 <= count <= device.count for device, count in zip(problem.devices, counts, strict=True))
        and (problem.max_price_micro is None or price <= problem.max_price_micro)
        and not (problem.single_type and sum(map(bool, counts)) > 1)
    )


def _reach(problem: Problem, counts: Counts) -> Fraction:
    """Return the smallest step time in seconds in which these devices hold every EST, and each of them at least one."""
    pairs = [(device.capability_per_s, count) for device, count in zip(problem.devices, counts, strict=True) if count]
    capabilities = [capability for capability, _ in pairs]
    pool = sum((capability * count for capability, count in pairs), Fraction(0))
    lower = max(problem.max_workers / pool, 1 / min(capabilities))
    step = max(lower, (problem.max_workers + sum(counts)) / pool)  # room for all, since floor(x) > x - 1
    while (trial := _middle(capabilities, lower, step)) is not None:
        if sum(count * int(capability * trial) for capability, count in pairs) >= problem.max_workers:
            step = trial
        else:
            lower = _after(capabilities, trial)
    return step


def _lower_bound(problem: Problem) -> Fraction:
    """Return a step time that no plan can beat: all ESTs spread evenly over the most capability that can be used."""
    devices = problem.devices
    if problem.single_type:
        return problem.max_workers / max(device.capability_per_s * problem.affordable(device) for device in devices)
    most = _fill([(device, 1) for device in devices], problem.device_limit)
    if problem.max_price_micro is not None:
        most = min(most, _fill([(device, device.price_micro or 0) for device in devices], problem.max_price_micro))
    return problem.max_workers / most


def _fill(offers: Sequence[tuple[DeviceType, int]], limit: int) -> Fraction:
    """Return the most capability for ``limit`` in all, at so much for each device, parts of devices allowed."""
    left, total = Fraction(limit), Fraction(0)
    for device, cost in sorted(offers, key=lambda offer: offer[1] / offer[0].capability_per_s):
        count = min(Fraction(device.count), left / cost) if cost else Fraction(device.count)
        total += count * device.capability_per_s
        left -= count * cost
    return total


def _middle(capabilities: Sequence[Fraction], lower: Fraction, upper: Fraction) -> Fraction | None:
    """Return a step time k / C of about the middle of those with ``lower <= k / C < upper``; None: there are none."""
    ranges = [(range(math.ceil(lower * each), math.ceil(upper * each)), each) for each in capabilities]
    if sum(len(steps) for steps, _ in ranges) > _LISTED_STEPS:
        steps, capability = max(ranges, key=lambda entry: len(entry[0]))
        return steps[len(steps) // 2] / capability
    listed = sorted({k / capability for steps, capability in ranges for k in steps})
    return listed[len(listed) // 2] if listed else None


def _after(capabilities: Sequence[Fraction], step: Fraction) -> Fraction:
    """Return the next larger step time k / C."""
    return min((int(capability * step) + 1) / capability for capability in capabilities)


def _before(capabilities: Sequence[Fraction], step: Fraction) -> Fraction:
    """Return the next smaller step time k / C, or 0."""
    return max((math.ceil(capability * step) - 1) / capability for capability in capabilities)


def _evaluate(problem: Problem, solution: _Solution) -> Alternative:
    """Deal out the ESTs and return the plan's figures, checked from scratch."""
    assignments = _deal(problem, solution)
    step = verify(problem, assignments)
    if step != solution.step_s:
        raise ValueError(f"the plan's step takes {step} s, not {solution.step_s} s")
    throughput = problem.max_workers / step
    pairs = zip(solution.counts, problem.devices, strict=True)
    in_use = sum((count * device.capability_per_s for count, device in pairs), Fraction(0))
    return Alternative(
        iteration_s=float(step),
        throughput=float(throughput),
        assignments=assignments,
        est_count=sum(row.devices * row.ests_per_device for row in assignments),
        waste=float(in_use - throughput),
        overload_factor=float(step),
    )


def _deal(problem: Problem, solution: _Solution) -> list[Assignment]:
    """Return how many ESTs each used device runs: full first, the surplus taken evenly from the slowest types."""
    pairs = [(device, count) for device, count in zip(problem.devices, solution.counts, strict=True) if count]
    ests = {device.name: count * int(device.capability_per_s * solution.step_s) for device, count in pairs}
    surplus = sum(ests.values()) - problem.max_workers
    for device, count in sorted(pairs, key=lambda pair: pair[0].capability_per_s):
        taken = min(surplus, ests[device.name] - count)  # each keeps one
        ests[device.name] -= taken
        surplus -= taken
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
