"""EST plans with CP-SAT: which device runs how many logical workers (EasyScale, Equation 1). Start at :func:`solve_est`.

In a step of ``step_s`` seconds a device of capability C_i (ESTs per second) has capacity for ``floor(C_i step_s)`` ESTs, and
the possible step times are the exact rationals ``k / C_i``. Without a price limit :func:`~.steps.best_step` is the smallest
step time. With a price limit, and for the next best plans, a bisection finds it, because ESTs that fit into a step fit into a
longer one: for a given step time, CP-SAT finds device counts (one whole number per type, so no symmetry to break) with
capacity for every EST under all constraints, or proves that there are none. At the smallest step time it minimises the
devices, then the waste (at a given throughput: the capability in use), then prefers the types whose names come first.
Objectives that stand before the throughput are optimised first, in the longest step. CP-SAT computes with whole numbers only,
so no rounding can change the optimum.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from ortools.sat.python import cp_model

from ddltool.analyzers.job.placement.problem import (
    Problem,
    check_affordable,
    conflict_error,
    minimal_conflict,
    requirements,
)
from ddltool.analyzers.job.placement.steps import Counts, best_step, evaluate, plan_of, step_time_of
from ddltool.errors import Infeasible, InputError, NotProven, known
from ddltool.plans import Plan
from ddltool.solver import run, solver_for

# The objectives that a user may name; they are optimised one after the other.
OBJECTIVES = ("throughput", "devices", "price", "waste")
DEFAULT_OBJECTIVE = ("throughput", "devices", "waste")
# Objective values stay below this bound: far within CP-SAT's 64 bits, and exact as the floats that CP-SAT reports.
_LARGEST_SUM = 2**50
# Base of the digits into which larger sums are split.
_DIGIT = 2**26
# Up to so many step times are listed to find their median; of more it is only approximated.
_LISTED_STEPS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """Numbers of devices and their smallest step time."""

    counts: Counts
    """(T,) devices of each of the problem's T types."""
    step_s: Fraction
    bound_s: Fraction
    """No plan (besides those found before) has a shorter step."""
    proven: bool
    """Whether the solution is proven best in every objective; ties are broken by most devices of the first types."""


@dataclass(kw_only=True, slots=True)
class Search:
    """The state of one call of ``solve_est``: the problem, the solver's limits, and the solutions found so far."""

    problem: Problem
    deadline: float
    """The value of ``time.perf_counter`` at which the solver must end."""
    seed: int
    objective: tuple[str, ...] = DEFAULT_OBJECTIVE
    """Most important first; see ``OBJECTIVES``."""
    found: list[Solution] = field(default_factory=list)
    """Best first; later solves exclude them."""
    exhausted: bool = False
    """Whether CP-SAT has proven that there is no other solution."""
    fixed: dict[str, int] = field(default_factory=dict)
    """Best values of the objectives that stand before the throughput, which later solves must keep."""


class OutOfTime(Exception):
    """The solver's time ran out before it found an answer or a proof that there is none."""


def solve_est(
    problem: Problem,
    *,
    top_k: int = 1,
    time_limit_s: float = 10.0,
    seed: int = 0,
    objective: Sequence[str] = DEFAULT_OBJECTIVE,
) -> Plan:
    """Return the plan of highest throughput, then fewest devices, then least waste, with ``top_k - 1`` alternatives.

    Waste is the capability of the used devices that no EST (logical worker) uses. ``objective`` sets another order of
    ``OBJECTIVES``; those of the default order that it leaves out follow. Of plans that are equal in all objectives, the one
    with most devices of the type whose name comes first is taken. Alternatives have other numbers of devices, and each is
    proven the next best; there are fewer when no other plans exist or the time (``time_limit_s`` in all) runs out.

    ``status`` is "optimal" when all of that is proven, so that another run finds the same plan. ``gap`` is the largest share of
    the step time that another plan could save, if it keeps the values of the objectives before the throughput. A gap of 0 in a
    "feasible" plan means that only the objectives after the throughput are not proven.

    Raises Infeasible, naming a smallest set of requirements that cannot be kept together, NotProven when no plan was found in
    time, InputError for a ``top_k`` below 1 or an impossible ``objective``.

    >>> from ddltool.analyzers.job.placement.problem import DeviceType
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
    if time_limit_s <= 0 or not _append_next_solution(search):
        if search.exhausted:  # proven: there is no plan
            raise _conflict_error_of(problem, seed)
        raise NotProven(f"no plan was found within {time_limit_s:g} s; allow more with --time-limit")
    while len(search.found) < top_k and search.found[-1].proven and _append_next_solution(search):
        pass
    best, *other_solutions = search.found
    alternatives = [evaluate(problem, other.counts) for other in other_solutions if other.proven]
    gap = float(1 - best.bound_s / best.step_s)  # exact fractions: 0 only where the step is proven
    seconds = time.perf_counter() - started
    plan = plan_of(problem, evaluate(problem, best.counts), optimal=best.proven, gap=gap, solve_seconds=seconds)
    return plan.model_copy(update={"alternatives": alternatives})


def is_feasible(problem: Problem, *, seed: int = 0, time_limit_s: float = 10.0) -> bool:
    """Return whether any plan keeps all requirements of the problem, by one CP-SAT solve at the longest allowed step.

    Raises NotProven where the time limit ends the solve.
    """
    if not any(problem.affordable(device) for device in problem.devices):
        return False
    search = Search(problem=problem, deadline=time.perf_counter() + time_limit_s, seed=seed)
    try:
        return counts_within(search, problem.slowest_step) is not None
    except OutOfTime:
        raise NotProven(f"whether a plan exists was not settled within {time_limit_s:g} s") from None


def check_objective(problem: Problem, objective: Sequence[str]) -> tuple[str, ...]:
    """Return the whole order of objectives: those in ``objective``, then those of the default order that it lacks.

    Raises InputError for a name that is unknown or stands twice, for ``waste`` before ``throughput`` (waste is the capability
    in use minus the throughput, so it can be minimised only at a given throughput), and for ``price`` without prices.
    """
    objective = [known("objective", name, OBJECTIVES) for name in objective]
    for index, name in enumerate(objective):
        if name in objective[:index]:
            raise InputError("objective", f"{name!r} stands twice", "name each objective once")
        if name == "waste" and "throughput" not in objective[:index]:
            raise InputError("objective", "waste stands before throughput", "put throughput before it")
        if name == "price" and any(device.price_micro is None for device in problem.devices):
            device_type = next(device.name for device in problem.devices if device.price_micro is None)
            raise InputError(f"devices.{device_type}.price_per_hour", "is missing", "the objective price needs it")
    return (*objective, *(name for name in DEFAULT_OBJECTIVE if name not in objective))


def _conflict_error_of(problem: Problem, seed: int) -> Infeasible:
    """Return the error that names a smallest set of requirements that cannot be kept together.

    Where a required throughput is among them, the error also names the throughput that the others allow.
    """
    conflict = minimal_conflict(problem, lambda relaxed: is_feasible(relaxed, seed=seed))
    conflict_names = {requirement.name for requirement in conflict}
    if "min_throughput" not in conflict_names:
        return conflict_error(problem, conflict)
    relaxed = problem
    for requirement in requirements(problem):
        if requirement.name not in conflict_names or requirement.name == "min_throughput":
            relaxed = requirement.without(relaxed)
    best_plan = solve_est(relaxed, seed=seed)
    return conflict_error(problem, conflict, best="" if best_plan.gap else f"{best_plan.throughput:.4g}")


def _append_next_solution(search: Search) -> bool:
    """Append the next best solution to ``search.found``, and return whether there was one.

    False means that there is no other, which sets ``search.exhausted``, or that time ran out before one was found.
    """
    try:
        leading_proven = _fix_leading_objectives(search)
        solution = _fastest_solution(search)
    except OutOfTime:
        return False
    if solution is None:
        search.exhausted = True
        return False
    if solution.proven:  # only at the smallest step time do the objectives after the throughput count
        later_objectives = search.objective[search.objective.index("throughput") + 1 :]
        solution = _refine_later_objectives(search, solution, later_objectives)
    search.found.append(replace(solution, proven=solution.proven and leading_proven))
    return True


def _fix_leading_objectives(search: Search) -> bool:
    """Optimise the objectives that stand before the throughput, and store their best values in ``search.fixed``.

    Return whether all are proven. They are optimised in the longest allowed step, because a longer step only adds choices.
    Raises OutOfTime where no plan was found in time.
    """
    search.fixed = {}
    for name in search.objective[: search.objective.index("throughput")]:
        model, used = build(search, search.problem.slowest_step)
        (expression,) = expressions(model, search, used, name)
        model.minimize(expression)
        counts, proven, value = solve(search, model, used)
        if counts is None:
            if proven:
                return True  # no plan exists, which the search for the fastest plan will report
            raise OutOfTime
        search.fixed[name] = value
        if not proven:
            return False
    return True


def _fastest_solution(search: Search) -> Solution | None:
    """Return a solution with the smallest step time that is not among those found; None: there is none.

    A bisection between a lower bound and the step of a first guess asks CP-SAT at each step time in the middle. Where the
    solver's time runs out first, the best solution so far is returned, not ``proven``; without one, OutOfTime is raised.
    """
    problem = search.problem
    capabilities = [device.capability_per_s for device in problem.devices]
    # The next best solution is no faster than the last one, unless it is worse in an objective before the throughput.
    lower_s = search.found[-1].step_s if search.found and not search.fixed else _lower_bound(problem)
    if lower_s is None or lower_s > problem.slowest_step:
        return None
    counts = _near_best_counts(search)
    # Try the lower bound itself where it is likely to be reached: without a price limit, or by a plan as fast as the last.
    if counts is None or (search.found and step_time_of(problem, counts) > lower_s):
        exact_counts = counts_within(search, lower_s)
        if exact_counts is not None:
            return Solution(counts=exact_counts, step_s=lower_s, bound_s=lower_s, proven=True)
        lower_s = _next_step(capabilities, lower_s)
        if counts is None:
            counts = counts_within(search, problem.slowest_step)
        if counts is None:  # not even the longest allowed step has a solution
            return None
    step_s = step_time_of(problem, counts)
    middle_s = _middle_step(capabilities, lower_s, step_s)
    if middle_s and not search.found:  # the guess is often the best, so try the next shorter step time first
        middle_s = max((math.ceil(capability * step_s) - 1) / capability for capability in capabilities)
    try:
        while middle_s is not None:
            faster_counts = counts_within(search, middle_s)
            if faster_counts is None:
                lower_s = _next_step(capabilities, middle_s)
            else:
                counts = faster_counts
                step_s = step_time_of(problem, faster_counts)
            middle_s = _middle_step(capabilities, lower_s, step_s)
    except OutOfTime:
        return Solution(counts=counts, step_s=step_s, bound_s=min(lower_s, step_s), proven=False)
    return Solution(counts=counts, step_s=step_s, bound_s=step_s, proven=True)


def _next_step(capabilities: Sequence[Fraction], step: Fraction) -> Fraction:
    """Return the least step time k / C above ``step`` (seconds), over all capabilities C and whole numbers k."""
    return min((int(capability * step) + 1) / capability for capability in capabilities)


def _lower_bound(problem: Problem) -> Fraction | None:
    """Return a lower bound on the step time in seconds; None where the devices cannot hold every EST.

    It is the best step time without the price limit or, if that is larger, with the most capability that the limit buys.
    """
    step = best_step(problem)
    if step is None or not problem.max_price_micro:
        return step
    return max(step, problem.max_workers / problem.affordable_capability)


def _near_best_counts(search: Search) -> Counts | None:
    """Return (T,) device counts that are probably near the best, for a first upper bound on the step time; None: no guess.

    It is the best allowed one of these: the fastest and the cheapest devices that the price limit buys or, after a first
    solution, one device more or less than in the last one. No guess is made for the first solution without a price limit,
    whose lower bound is exact, and where leading objectives (``search.fixed``) might forbid it.
    """
    problem = search.problem
    if search.fixed or not (search.found or problem.max_price_micro):
        return None
    if search.found:
        last = search.found[-1].counts
        candidates = [
            (*last[:type_index], last[type_index] + change, *last[type_index + 1 :])
            for type_index in range(len(last))
            for change in (1, -1)
        ]
    else:
        type_orders = problem.cheapest_first, problem.fastest_first
        candidates = [tuple(problem.with_added(order, problem.device_limit)) for order in type_orders]
    known_counts = {solution.counts for solution in search.found}
    steps: list[tuple[Fraction, Counts]] = []  # (step time in seconds, counts) of each usable candidate
    for counts in candidates:
        if problem.allows(counts) and counts not in known_counts:
            step_s = best_step(problem, counts)
            if step_s and step_s <= problem.slowest_step:
                steps.append((step_s, counts))
    if not steps:
        return None
    _, best = min(steps)
    return best


def _middle_step(capabilities: Sequence[Fraction], lower: Fraction, upper: Fraction) -> Fraction | None:
    """Return about the median of the possible step times from ``lower`` to below ``upper``; None: there are none.

    Step times are k / C for whole numbers k and the capabilities C. Where they are many, it is the median of the k / C of the
    one capability that has most of them.
    """
    ranges = [
        (range(math.ceil(lower * capability), math.ceil(upper * capability)), capability) for capability in capabilities
    ]
    if sum(len(multiples) for multiples, _ in ranges) > _LISTED_STEPS:
        multiples, capability = max(ranges, key=lambda entry: len(entry[0]))
        return multiples[len(multiples) // 2] / capability
    listed = sorted({k / capability for multiples, capability in ranges for k in multiples})
    return listed[len(listed) // 2] if listed else None


def _refine_later_objectives(search: Search, solution: Solution, objective_names: Sequence[str]) -> Solution:
    """Return the solution with the same step time that is best in ``objective_names``, then has most of the first types.

    Each objective is minimised in turn, and its value then kept. The result is not ``proven`` where the solver's time ran out.
    """
    model, used = build(search, solution.step_s)
    objectives = [expression for name in objective_names for expression in expressions(model, search, used, name)]
    counts = solution.counts
    for objective in [*objectives, *_type_preference(search.problem, used)]:
        model.minimize(objective)
        model.clear_hints()
        for variable, count in zip(used, counts, strict=True):
            model.add_hint(variable, count)
        better_counts, proven, value = solve(search, model, used)
        counts = better_counts or counts
        if not proven:
            return replace(solution, counts=counts, proven=False)
        model.add(objective == value)
    return replace(solution, counts=counts)


def counts_within(search: Search, step_s: Fraction) -> Counts | None:
    """Return (T,) devices of each type that run every EST (logical worker) within ``step_s`` seconds.

    None: the solver has proven that no devices do. Raises OutOfTime where it finds neither counts nor a proof in its time.
    """
    counts, proven, _ = solve(search, *build(search, step_s))
    if counts is None and not proven:
        raise OutOfTime
    return counts


def build(search: Search, step_s: Fraction) -> tuple[cp_model.CpModel, list[cp_model.IntVar]]:
    """Return the CP-SAT model for a step of ``step_s`` seconds, and its variables: devices in use, one per type.

    A type whose devices have no capacity for an EST gets 0 devices. The solutions in ``search.found`` are forbidden, and the
    values in ``search.fixed`` must be kept.
    """
    problem, model = search.problem, cp_model.CpModel()
    capacities = [problem.est_capacity(device, step_s) for device in problem.devices]
    used = [
        model.new_int_var(0, problem.affordable(device) if capacity else 0, device.name)
        for device, capacity in zip(problem.devices, capacities, strict=True)
    ]
    model.add(cp_model.LinearExpr.weighted_sum(used, capacities) >= problem.max_workers)
    limit_devices(model, problem, used)
    if search.found:
        model.add_forbidden_assignments(used, [solution.counts for solution in search.found])
    for name, value in search.fixed.items():
        (expression,) = expressions(model, search, used, name)
        model.add(expression <= value)
    return model, used


def limit_devices(model: cp_model.CpModel, problem: Problem, used: Sequence[cp_model.IntVar]) -> None:
    """Add a job's constraints on devices to the model: their number, their price, and a single type where it demands one.

    ``used``: the model's variables, devices of each type.
    """
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
    """Return (device counts (T,), whether the result is proven, value of the objective) of a CP-SAT model.

    The counts are None, and the value 0, where none exist (proven) or none were found by the search's deadline (not proven).
    ``used``: the model's variables, devices of each type. The value is 0 for a model without an objective, too.
    """
    time_left_s = search.deadline - time.perf_counter()
    if time_left_s <= 0:
        return None, False, 0
    solver = solver_for(time_left_s, search.seed)
    status = run(solver, model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        counts = tuple(solver.value(variable) for variable in used)
        return counts, status == cp_model.OPTIMAL, round(solver.objective_value)
    return None, status == cp_model.INFEASIBLE, 0


def expressions(
    model: cp_model.CpModel, search: Search, used: Sequence[cp_model.IntVar], name: str
) -> list[cp_model.LinearExpr]:
    """Return the expressions over ``used`` (devices of each type) that, minimised in turn, optimise the objective ``name``.

    ``waste`` becomes the capability in use, because the two differ by a constant at a given step time; ``model`` gets further
    variables for it where its sum does not fit into one number.
    """
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

    Capabilities become whole numbers over their common denominator. Where their sum would be too large for CP-SAT (measured
    capabilities have 17 digits), its digits in base 2**26 are variables, and the objectives are these, highest first.
    """
    common = math.lcm(*(device.capability_per_s.denominator for device in problem.devices))
    weights = [int(device.capability_per_s * common) for device in problem.devices]
    digits: list[cp_model.LinearExpr] = []  # of the sum, lowest first
    carry: cp_model.LinearExpr | int = 0
    # One turn for each digit, the lowest first: digit = (sum of the weights' digits + carry) mod base, as in adding on paper.
    while max(weights) * problem.device_limit >= _LARGEST_SUM:
        carried = model.new_int_var(0, problem.device_limit + 1, "carried")
        digit = model.new_int_var(0, _DIGIT - 1, "digit")
        lowest_digits = cp_model.LinearExpr.weighted_sum(used, [weight % _DIGIT for weight in weights])
        model.add(lowest_digits + carry == _DIGIT * carried + digit)
        digits.append(digit)
        carry = carried
        weights = [weight // _DIGIT for weight in weights]
    return [cp_model.LinearExpr.weighted_sum(used, weights) + carry, *reversed(digits)]


def _type_preference(problem: Problem, used: Sequence[cp_model.IntVar]) -> Iterator[cp_model.LinearExpr]:
    """Yield objectives that, minimised in turn, make the first type's count largest, then the second's, and so on.

    As many types as 64 bits hold share an objective: their counts are the digits of a number in a mixed base. Weights are
    negative, because minimising must make counts large.
    """
    group: list[cp_model.IntVar] = []
    weights: list[int] = []
    product = 1
    for variable, device in zip(used, problem.devices, strict=True):
        base = problem.affordable(device) + 1
        if group and product * base >= _LARGEST_SUM:
            yield cp_model.LinearExpr.weighted_sum(group, weights)
            group = []
            weights = []
            product = 1
        group = [*group, variable]
        weights = [*(weight * base for weight in weights), -1]  # earlier types' counts become higher digits
        product *= base
    yield cp_model.LinearExpr.weighted_sum(group, weights)
