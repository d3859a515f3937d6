"""EST plans with CP-SAT: which device runs how many logical workers (EasyScale, Equation 1). Start at :func:`solve_est`.

In a step of T seconds a device of type i has room for ``floor(C_i T)`` ESTs, and the possible step times are the exact
rationals ``k / C_i``. Without a price limit the smallest one is known (:func:`~.steps.best_step`). With one, and for the
next best plans, it is found by bisection, for whatever fits into a step fits into a longer one: for a given T, CP-SAT
finds numbers of devices (one whole number per type, so no symmetry to break) with room for every EST under all
constraints, or proves that there are none. With T settled it minimises the devices, then the waste (at a given
throughput: the capability in use), then prefers the types whose names come first; what is to come before the throughput
is settled first, in the longest step. CP-SAT sees whole numbers only, so no rounding can change the optimum.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from ortools.sat.python import cp_model

from ddltool.analyzers.placement.problem import (
    Problem,
    check_affordable,
    conflict_error,
    minimal_conflict,
    requirements,
)
from ddltool.analyzers.placement.steps import Counts, best_step, evaluate, plan_of, reach
from ddltool.errors import Infeasible, InputError, NotProven, known
from ddltool.plans import Plan

# What can be optimised, one after the other.
OBJECTIVES = ("throughput", "devices", "price", "waste")
DEFAULT_OBJECTIVE = ("throughput", "devices", "waste")
# Objectives stay below this: far from the end of CP-SAT's 64 bits, and exact as floats, in which it reports them.
_LARGEST_SUM = 2**50
_DIGIT = 2**26
# Up to this many step times are listed to find the middle one; more are halved by arithmetic.
_LISTED_STEPS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """Numbers of devices and the step time they allow."""

    counts: Counts
    step_s: Fraction
    bound_s: Fraction
    """No plan is faster than this."""
    proven: bool
    """Whether it is the best in every objective, and of those the one that uses most of the first types."""


@dataclass(kw_only=True, slots=True)
class Search:
    """One call of ``solve_est``: the problem, what limits the solver, and the solutions found so far."""

    problem: Problem
    deadline: float
    seed: int
    objective: tuple[str, ...] = DEFAULT_OBJECTIVE
    found: list[Solution] = field(default_factory=list)
    exhausted: bool = False
    """Proven: there is no other solution."""
    fixed: dict[str, int] = field(default_factory=dict)
    """Objectives that come before the throughput, with their best values."""


class OutOfTime(Exception):
    """The solver stopped with neither an answer nor a proof that there is none."""


def solve_est(
    problem: Problem,
    *,
    top_k: int = 1,
    time_limit_s: float = 10.0,
    seed: int = 0,
    objective: Sequence[str] = DEFAULT_OBJECTIVE,
) -> Plan:
    """Return the plan of highest throughput, then fewest devices, then least waste, with ``top_k - 1`` alternatives.

    ``objective`` sets another order of ``OBJECTIVES``; what it leaves out of the default order follows. Of plans equal in
    all, the one that uses most devices of the type whose name comes first. Alternatives use other numbers of devices; each is
    proven the next best, so there are fewer when the different plans or the time (``time_limit_s`` in all) run out.
    ``status`` is "optimal" when all of that is proven, so that it repeats; ``gap`` is the part of the step time that a
    faster plan could save at most, under the values reached in the objectives before the throughput; 0 in a "feasible"
    plan: only what comes after the throughput is open. Raises Infeasible, naming a smallest set of requirements that
    cannot be kept together, NotProven when there was no time at all,
    InputError for a ``top_k`` below 1 or an impossible ``objective``.

    >>> from ddltool.analyzers.placement.problem import DeviceType
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
    search = Search(
        problem=problem,
        deadline=started + time_limit_s,
        seed=seed,
        objective=check_objective(problem, objective),
    )
    if time_limit_s <= 0 or not _extend(search):
        if search.exhausted:
            raise _conflict(problem, seed)
        raise NotProven(f"no plan was found within {time_limit_s:g} s; allow more with --time-limit")
    while len(search.found) < top_k and search.found[-1].proven and _extend(search):
        pass
    best, *others = search.found
    alternatives = [evaluate(problem, other.counts) for other in others if other.proven]
    gap = float(1 - best.bound_s / best.step_s)
    seconds = time.perf_counter() - started
    made = plan_of(problem, evaluate(problem, best.counts), optimal=best.proven, gap=gap, solve_seconds=seconds)
    return made.model_copy(update={"alternatives": alternatives})


def is_feasible(problem: Problem, *, seed: int = 0, time_limit_s: float = 10.0) -> bool:
    """Return whether any plan keeps all requirements, exactly: one question to CP-SAT. Raises NotProven without an answer."""
    if not any(problem.affordable(device) for device in problem.devices):
        return False
    search = Search(problem=problem, deadline=time.perf_counter() + time_limit_s, seed=seed)
    try:
        return fit(search, problem.slowest_step) is not None
    except OutOfTime:
        raise NotProven(f"whether a plan exists was not settled within {time_limit_s:g} s") from None


def check_objective(problem: Problem, objective: Sequence[str]) -> tuple[str, ...]:
    """Return the whole order of objectives: those given, then those of the default order that are missing.

    Raises InputError for a name that is unknown or stands twice, ``waste`` before ``throughput`` (waste is capability
    in use less throughput, so it has no smallest value on its own), ``price`` without prices.
    """
    objective = [known("objective", name, OBJECTIVES) for name in objective]
    for place, name in enumerate(objective):
        if name in objective[:place]:
            raise InputError("objective", f"{name!r} stands twice", "name each objective once")
        if name == "waste" and "throughput" not in objective[:place]:
            raise InputError("objective", "waste stands before throughput", "put throughput before it")
        if name == "price" and any(device.price_micro is None for device in problem.devices):
            kind = next(device.name for device in problem.devices if device.price_micro is None)
            raise InputError(f"devices.{kind}.price_per_hour", "is missing", "the objective price needs it")
    return (*objective, *(name for name in DEFAULT_OBJECTIVE if name not in objective))


def _conflict(problem: Problem, seed: int) -> Infeasible:
    """Return the error that names a minimal set of conflicting requirements."""
    conflict = minimal_conflict(problem, lambda other: is_feasible(other, seed=seed))
    names = {requirement.name for requirement in conflict}
    if "min_throughput" not in names:
        return conflict_error(problem, conflict)
    free = problem
    for requirement in requirements(problem):
        if requirement.name not in names or requirement.name == "min_throughput":
            free = requirement.without(free)
    most = solve_est(free, seed=seed)
    return conflict_error(problem, conflict, best="" if most.gap else f"{most.throughput:.4g}")


def _extend(search: Search) -> bool:
    """Add the best solution that is not there yet; return False when there is no other or time ran out without one."""
    try:
        first_proven = _settle(search)
        solution = _fastest(search)
    except OutOfTime:
        return False
    if solution is None:
        search.exhausted = True
        return False
    later = search.objective[search.objective.index("throughput") + 1 :]
    solution = _refine(search, solution, later) if solution.proven else solution
    search.found.append(replace(solution, proven=solution.proven and first_proven))
    return True


def _settle(search: Search) -> bool:
    """Settle the objectives that come before the throughput, in the longest step; return whether all are proven."""
    search.fixed = {}
    for name in search.objective[: search.objective.index("throughput")]:
        model, used = build(search, search.problem.slowest_step)
        (expression,) = expressions(model, search, used, name)
        model.minimize(expression)
        counts, proven, value = solve(search, model, used)
        if counts is None:
            if proven:
                return True  # there is no plan: the search for the fastest says so
            raise OutOfTime
        search.fixed[name] = value
        if not proven:
            return False
    return True


def _fastest(search: Search) -> Solution | None:
    """Return a solution with the smallest step time (``proven``, unless time ran out); None when there is no other."""
    problem = search.problem
    capabilities = [device.capability_per_s for device in problem.devices]
    lower = search.found[-1].step_s if search.found and not search.fixed else _lower_bound(problem)
    if lower is None or lower > problem.slowest_step:
        return None
    counts = _guess(search)
    if counts is None or (search.found and reach(problem, counts) > lower):
        if (exact := fit(search, lower)) is not None:
            return Solution(counts=exact, step_s=lower, bound_s=lower, proven=True)
        lower = _next(capabilities, lower)
        if (counts := counts or fit(search, problem.slowest_step)) is None:
            return None
    step = reach(problem, counts)
    middle = _middle(capabilities, lower, step)
    if middle and not search.found:  # the guess is often the best: ask first whether it can be beaten at all
        middle = max((math.ceil(each * step) - 1) / each for each in capabilities)
    try:
        while middle is not None:
            if (better := fit(search, middle)) is None:
                lower = _next(capabilities, middle)
            else:
                counts, step = better, reach(problem, better)
            middle = _middle(capabilities, lower, step)
    except OutOfTime:
        return Solution(counts=counts, step_s=step, bound_s=min(lower, step), proven=False)
    return Solution(counts=counts, step_s=step, bound_s=step, proven=True)


def _next(capabilities: Sequence[Fraction], step: Fraction) -> Fraction:
    """Return the least step time k / C above ``step``."""
    return min((int(capability * step) + 1) / capability for capability in capabilities)


def _lower_bound(problem: Problem) -> Fraction | None:
    """Return a step time that no plan beats: without regard to money, or of the most capability for it; None: no room."""
    step = best_step(problem)
    return max(step, problem.max_workers / problem.bought) if step is not None and problem.max_price_micro else step


def _guess(search: Search) -> Counts | None:
    """Return devices that are nearly the best: most capability for the money, or one more or less than in the last solution."""
    problem = search.problem
    if search.fixed or not (search.found or problem.max_price_micro):
        return None
    if search.found:
        last = search.found[-1].counts
        ways = [(*last[:at], last[at] + more, *last[at + 1 :]) for at in range(len(last)) for more in (1, -1)]
    else:
        orders = problem.cheapest_first, problem.fastest_first
        ways = [tuple(problem.filled(order, problem.device_limit)) for order in orders]
    known = {solution.counts for solution in search.found}
    steps = [(best_step(problem, way), way) for way in ways if problem.allows(way) and way not in known]
    _, best = min(((step, way) for step, way in steps if step and step <= problem.slowest_step), default=(None, None))
    return best


def _middle(capabilities: Sequence[Fraction], lower: Fraction, upper: Fraction) -> Fraction | None:
    """Return a step time k / C of about the middle of those with ``lower <= k / C < upper``; None: there are none."""
    ranges = [(range(math.ceil(lower * each), math.ceil(upper * each)), each) for each in capabilities]
    if sum(len(steps) for steps, _ in ranges) > _LISTED_STEPS:
        steps, capability = max(ranges, key=lambda entry: len(entry[0]))
        return steps[len(steps) // 2] / capability
    listed = sorted({k / capability for steps, capability in ranges for k in steps})
    return listed[len(listed) // 2] if listed else None


def _refine(search: Search, solution: Solution, names: Sequence[str]) -> Solution:
    """Return the best solution in the objectives ``names`` and then of first types, at the same step time."""
    model, used = build(search, solution.step_s)
    objectives = [part for name in names for part in expressions(model, search, used, name)]
    counts = solution.counts
    for objective in [*objectives, *_preference(search.problem, used)]:
        model.minimize(objective)
        model.clear_hints()
        for variable, count in zip(used, counts, strict=True):
            model.add_hint(variable, count)
        better, proven, value = solve(search, model, used)
        counts = better or counts
        if not proven:
            return replace(solution, counts=counts, proven=False)
        model.add(objective == value)
    return replace(solution, counts=counts)


def fit(search: Search, step: Fraction) -> Counts | None:
    """Return numbers of devices with room for every EST in a step of ``step`` seconds; None: proven there are none."""
    counts, proven, _ = solve(search, *build(search, step))
    if counts is None and not proven:
        raise OutOfTime
    return counts


def build(search: Search, step: Fraction) -> tuple[cp_model.CpModel, list[cp_model.IntVar]]:
    """Return the constraints on the numbers of used devices, one variable per type, at a given step time.

    A device without room for one EST cannot be used. Solutions that were found before are forbidden.
    """
    problem, model = search.problem, cp_model.CpModel()
    room = [problem.room(device, step) for device in problem.devices]
    used = [
        model.new_int_var(0, problem.affordable(device) if each else 0, device.name)
        for device, each in zip(problem.devices, room, strict=True)
    ]
    model.add(cp_model.LinearExpr.weighted_sum(used, room) >= problem.max_workers)
    limit_devices(model, problem, used)
    if search.found:
        model.add_forbidden_assignments(used, [solution.counts for solution in search.found])
    for name, value in search.fixed.items():
        (expression,) = expressions(model, search, used, name)
        model.add(expression <= value)
    return model, used


def limit_devices(model: cp_model.CpModel, problem: Problem, used: Sequence[cp_model.IntVar]) -> None:
    """Add a job's own constraints on its numbers of devices, one variable per type of the problem."""
    model.add(cp_model.LinearExpr.sum(used) <= problem.device_limit)
    if problem.max_price_micro is not None:
        prices = [device.price_micro or 0 for device in problem.devices]
        model.add(cp_model.LinearExpr.weighted_sum(used, prices) <= problem.max_price_micro)
    if problem.single_type:
        present = [model.new_bool_var("") for _ in used]
        model.add_at_most_one(present)
        for variable, literal in zip(used, present, strict=True):
            model.add(variable == 0).only_enforce_if(~literal)


def solve(search: Search, model: cp_model.CpModel, used: Sequence[cp_model.IntVar]) -> tuple[Counts | None, bool, int]:
    """Return what CP-SAT finds in the time that is left, whether it (or that there is nothing) is proven, and its value."""
    left = search.deadline - time.perf_counter()
    if left <= 0:
        return None, False, 0
    solver = solver_for(left, search.seed)
    status = run(solver, model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        counts = tuple(solver.value(variable) for variable in used)
        return counts, status == cp_model.OPTIMAL, round(solver.objective_value)
    return None, status == cp_model.INFEASIBLE, 0


def solver_for(limit_s: float, seed: int) -> cp_model.CpSolver:
    """Return CP-SAT with a limit on its time, on one thread and with a fixed seed, so that answers repeat."""
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed % 2**31
    # CP-SAT would put the default handler in Python's place, and a later Ctrl-C would end the process without clean-up.
    solver.parameters.catch_sigint_signal = False
    return solver


def run(solver: cp_model.CpSolver, model: cp_model.CpModel) -> cp_model.CpSolverStatus:
    """Return CP-SAT's status. Raises ValueError for a model that it does not take: that is not "no answer in time"."""
    status = solver.solve(model)
    if status == cp_model.MODEL_INVALID:
        raise ValueError(f"CP-SAT does not take the model: {model.validate()}")
    return status


def expressions(
    model: cp_model.CpModel, search: Search, used: Sequence[cp_model.IntVar], name: str
) -> list[cp_model.LinearExpr]:
    """Return the expressions that, minimised in turn, optimise one objective at a given step time."""
    if name == "devices":
        return [cp_model.LinearExpr.sum(used)]
    if name == "price":
        prices = [device.price_micro or 0 for device in search.problem.devices]
        return [cp_model.LinearExpr.weighted_sum(used, prices)]
    return _capability_in_use(model, search.problem, used)


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
