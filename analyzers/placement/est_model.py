"""The CP-SAT model of EST placement at a given step time: one whole number of devices per type, so no symmetry to break."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from ortools.sat.python import cp_model

from ddltool.analyzers.placement.requirements import Problem
from ddltool.analyzers.placement.step_times import Counts
from ddltool.errors import InputError, did_you_mean

# What can be optimised, one after the other.
OBJECTIVES = ("throughput", "devices", "price", "waste", "moves")
DEFAULT_OBJECTIVE = ("throughput", "devices", "waste")
# Objectives stay below this: far from the end of CP-SAT's 64 bits, and exact as floats, in which it reports them.
_LARGEST_SUM = 2**50
_DIGIT = 2**26


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
    current: Counts | None = None
    """Devices that the job holds now: what the search starts from, and what moves are counted from."""
    found: list[Solution] = field(default_factory=list)
    exhausted: bool = False
    """Proven: there is no other solution."""
    fixed: dict[str, int] = field(default_factory=dict)
    """Objectives that come before the throughput, with their best values."""


class OutOfTime(Exception):
    """The solver stopped with neither an answer nor a proof that there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What CP-SAT says."""

    counts: Counts | None
    """None: no solution was found; there is none if ``proven``."""
    proven: bool
    value: int = 0
    """The objective's."""


def check_objective(problem: Problem, objective: Sequence[str], current: Mapping[str, int] | None) -> tuple[str, ...]:
    """Return the whole order of objectives: those given, then those of the default order that are missing.

    Raises InputError for a name that is unknown or stands twice, ``waste`` before ``throughput`` (waste is capability
    in use less throughput, so it has no smallest value on its own), ``price`` without prices, ``moves`` without a
    current plan.
    """
    for place, name in enumerate(objective):
        if name not in OBJECTIVES:
            raise InputError("objective", f"unknown objective {name!r}", did_you_mean(name, OBJECTIVES))
        if name in objective[:place]:
            raise InputError("objective", f"{name!r} stands twice", "name each objective once")
        if name == "waste" and "throughput" not in objective[:place]:
            raise InputError("objective", "waste stands before throughput", "put throughput before it")
        if name == "price" and any(device.price_micro is None for device in problem.devices):
            kind = next(device.name for device in problem.devices if device.price_micro is None)
            raise InputError(f"devices.{kind}.price_per_hour", "is missing", "the objective price needs it")
        if name == "moves" and current is None:
            raise InputError("objective", "moves needs a current plan", "give it with --current")
    return (*objective, *(name for name in DEFAULT_OBJECTIVE if name not in objective))


def fit(search: Search, step: Fraction) -> Counts | None:
    """Return numbers of devices with room for every EST in a step of ``step`` seconds; None: proven there are none."""
    answer = solve(search, *build(search, step))
    if answer.counts is None and not answer.proven:
        raise OutOfTime
    return answer.counts


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
    for name, value in search.fixed.items():
        (expression,) = expressions(model, search, used, name)
        model.add(expression <= value)
    if search.current is not None:
        hint(model, used, search.current)
    return model, used


def hint(model: cp_model.CpModel, used: Sequence[cp_model.IntVar], counts: Counts) -> None:
    """Tell CP-SAT where to start, instead of what it was told before."""
    model.clear_hints()
    for variable, count in zip(used, counts, strict=True):
        model.add_hint(variable, count)


def solve(search: Search, model: cp_model.CpModel, used: Sequence[cp_model.IntVar]) -> Answer:
    """Run CP-SAT in the time that is left, on one thread and with a fixed seed, so that answers repeat."""
    left = search.deadline - time.perf_counter()
    if left <= 0:
        return Answer(counts=None, proven=False)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = left
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = search.seed
    # CP-SAT would put the default handler in Python's place, and a later Ctrl-C would end the process without clean-up.
    solver.parameters.catch_sigint_signal = False
    status = run(solver, model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        counts = tuple(solver.value(variable) for variable in used)
        return Answer(counts=counts, proven=status == cp_model.OPTIMAL, value=round(solver.objective_value))
    return Answer(counts=None, proven=status == cp_model.INFEASIBLE)


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
    if name == "moves":
        return [_moves(model, search, used)]
    return _capability_in_use(model, search.problem, used)


def _moves(model: cp_model.CpModel, search: Search, used: Sequence[cp_model.IntVar]) -> cp_model.LinearExpr:
    """Return how many devices are added to and taken from the current ones, all together."""
    changes = []
    for variable, now, device in zip(used, search.current or (), search.problem.devices, strict=True):
        change = model.new_int_var(0, max(now, device.count), f"moves {device.name}")
        model.add(change >= variable - now)
        model.add(change >= now - variable)
        changes.append(change)
    return cp_model.LinearExpr.sum(changes)


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


def preference(problem: Problem, used: Sequence[cp_model.IntVar]) -> Iterator[cp_model.LinearExpr]:
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
