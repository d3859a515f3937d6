"""EST plans with CP-SAT: which device runs how many logical workers (EasyScale, Equation 1). Start at :func:`solve_est`.

In a step of T seconds a device of type i has room for ``floor(C_i T)`` ESTs, and the possible step times are the exact
rationals ``k / C_i``. Whatever fits into a step fits into a longer one, so the smallest step time is found by bisection:
for a given T, CP-SAT finds numbers of devices with room for every EST under all constraints, or proves that there are
none. With T settled it minimises the devices, then the waste (at a given throughput: the capability in use), then
prefers the types whose names come first; what is to come before the throughput is settled first, in the longest step.
CP-SAT sees whole numbers only, so no rounding can change the optimum. The ESTs are dealt out last.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from ddltool.analyzers.placement import est_model
from ddltool.analyzers.placement.dealing import evaluate
from ddltool.analyzers.placement.est_model import DEFAULT_OBJECTIVE, OutOfTime, Search, Solution
from ddltool.analyzers.placement.problem import DeviceType, Problem, check_affordable
from ddltool.analyzers.placement.requirements import conflict_error, minimal_conflict, requirements
from ddltool.analyzers.placement.step_times import (
    Counts,
    after,
    allowed,
    before,
    greedy,
    lower_bound,
    middle,
    neighbours,
    reach,
)
from ddltool.errors import Infeasible, InputError, NotProven
from ddltool.plan import Alternative, Plan

__all__ = ["DeviceType", "Problem", "is_feasible", "solve_est"]


def solve_est(
    problem: Problem,
    *,
    top_k: int = 1,
    time_limit_s: float = 10.0,
    seed: int = 0,
    objective: Sequence[str] = DEFAULT_OBJECTIVE,
    current: Mapping[str, int] | None = None,
) -> Plan:
    """Return the plan of highest throughput, then fewest devices, then least waste, with ``top_k - 1`` alternatives.

    ``objective`` sets another order of "throughput", "devices", "price", "waste" and "moves" (devices that differ from
    the ``current`` ones by type); what it leaves out of the default order follows. Of plans equal in all, the one that
    uses most devices of the type whose name comes first. Alternatives use other numbers of devices per type. Each is
    proven the next best, so there are fewer when the different plans or the time (``time_limit_s`` in all) run out.
    ``status`` is "optimal" when all of that is proven, so that it repeats; ``gap`` is the part of the step time that a
    faster plan could save at most, under the values reached in the objectives before the throughput; 0 in a "feasible"
    plan: only what comes after the throughput is open. ``current`` is also where the search starts. Raises Infeasible,
    naming a smallest set of requirements that cannot be kept together, NotProven when there was no time at all,
    InputError for a ``top_k`` below 1 or an impossible ``objective``.

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
        seed=seed % 2**31,
        objective=est_model.check_objective(problem, objective, current),
        current=None if current is None else tuple(current.get(device.name, 0) for device in problem.devices),
    )
    if time_limit_s <= 0 or not _extend(search):
        if search.exhausted:
            raise _conflict(problem, seed)
        raise NotProven(f"no plan was found within {time_limit_s:g} s; allow more with --time-limit")
    while len(search.found) < top_k and search.found[-1].proven and _extend(search):
        pass
    best, *others = search.found
    first = evaluate(problem, best.counts, best.step_s)
    return Plan(
        job=problem.job,
        strategy="est",
        max_workers=problem.max_workers,
        batch_size=problem.batch_size,
        **{name: getattr(first, name) for name in Alternative.model_fields},
        status="optimal" if best.proven else "feasible",
        gap=float(1 - best.bound_s / best.step_s),
        alternatives=[evaluate(problem, other.counts, other.step_s) for other in others if other.proven],
        solve_seconds=time.perf_counter() - started,
    )


def is_feasible(problem: Problem, *, seed: int = 0, time_limit_s: float = 10.0) -> bool:
    """Return whether any plan keeps all requirements, exactly: one question to CP-SAT. Raises NotProven without an answer."""
    if not any(problem.affordable(device) for device in problem.devices):
        return False
    search = Search(problem=problem, deadline=time.perf_counter() + time_limit_s, seed=seed % 2**31)
    try:
        return est_model.fit(search, problem.slowest_step) is not None
    except OutOfTime:
        raise NotProven(f"whether a plan exists was not settled within {time_limit_s:g} s") from None


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
        model, used = est_model.build(search, search.problem.slowest_step)
        (expression,) = est_model.expressions(model, search, used, name)
        model.minimize(expression)
        answer = est_model.solve(search, model, used)
        if answer.counts is None:
            if answer.proven:
                return True  # there is no plan: the search for the fastest says so
            raise OutOfTime
        search.fixed[name] = answer.value
        if not answer.proven:
            return False
    return True


def _fastest(search: Search) -> Solution | None:
    """Return a solution with the smallest step time (``proven``, unless time ran out); None when there is no other."""
    problem = search.problem
    capabilities = [device.capability_per_s for device in problem.devices]
    guess = None if search.fixed else _guess(search)
    counts = guess or est_model.fit(search, problem.slowest_step)
    if counts is None:
        return None
    step = _reached(problem, counts)
    # The guess is often the best already: ask first whether it can be beaten at all.
    following = bool(search.found) and not search.fixed
    lower = search.found[-1].step_s if following else lower_bound(problem)
    trial: Fraction | None = lower if following else before(capabilities, step)
    try:
        while trial is not None and lower <= trial < step:
            better = est_model.fit(search, trial)
            if better is None:
                lower = after(capabilities, trial)
            else:
                counts, step = better, _reached(problem, better)
            trial = middle(capabilities, lower, step)
    except OutOfTime:
        return Solution(counts=counts, step_s=step, bound_s=min(lower, step), proven=False)
    return Solution(counts=counts, step_s=step, bound_s=step, proven=True)


def _reached(problem: Problem, counts: Counts) -> Fraction:
    """Return the step time of devices that are known to hold every EST."""
    step = reach(problem, counts)
    if step is None:
        raise ValueError(f"{counts} devices have no room for {problem.max_workers} ESTs")
    return step


def _guess(search: Search) -> Counts | None:
    """Return a good choice of devices that was not found yet, None when none is at hand: what bisection starts from."""
    problem, excluded = search.problem, {solution.counts for solution in search.found}
    near = list(neighbours(search.found[-1].counts) if search.found else greedy(problem))
    if search.current is not None:
        near.append(search.current)
    best: tuple[Fraction, int, Counts] | None = None
    for counts in near:
        if counts in excluded or not allowed(problem, counts):
            continue
        step = reach(problem, counts)
        if step is None or step > problem.slowest_step:
            continue
        if best is None or (step, sum(counts)) < best[:2]:
            best = (step, sum(counts), counts)
    return None if best is None else best[2]


def _refine(search: Search, solution: Solution, names: Sequence[str]) -> Solution:
    """Return the best solution in the objectives ``names`` and then of first types, at the same step time."""
    model, used = est_model.build(search, solution.step_s)
    objectives = [part for name in names for part in est_model.expressions(model, search, used, name)]
    counts = solution.counts
    for objective in [*objectives, *est_model.preference(search.problem, used)]:
        model.minimize(objective)
        est_model.hint(model, used, counts)
        answer = est_model.solve(search, model, used)
        counts = answer.counts or counts
        if answer.counts is None or not answer.proven:
            return replace(solution, counts=counts, proven=False)
        model.add(objective == answer.value)
    return replace(solution, counts=counts)
