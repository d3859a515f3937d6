"""What to keep, to compute again, or to send to the host under a budget of memory: the cheapest choice, proven by CP-SAT.

What each block may save is an integer program (:mod:`.saving_options`, :mod:`.saving_program`). Places enter it when a solution
exceeds the budget there; until then it is a relaxation, whose bound holds. Start at :func:`cheapest`.

Sources: Jain et al., "Checkmate: Breaking the memory wall with optimal tensor rematerialization", MLSys 2020, of which
this is the part that ``torch.utils.checkpoint`` can do; Beaumont et al., "Efficient combination of rematerialization and
offloading for training DNNs", NeurIPS 2021, for both in one choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from ortools.sat.python import cp_model

from ddltool.analyzers.step.costs.memory import TensorLifetimes
from ddltool.analyzers.step.costs.saving import Saving
from ddltool.analyzers.step.costs.saving_options import SavingOptions
from ddltool.analyzers.step.costs.saving_program import SavingProgram
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.arrays import Floats
from ddltool.errors import Infeasible
from ddltool.solver import run, solver_for
from ddltool.units import show_bytes

_LIMIT_S = 10.0
# A choice for which the allocator finds no room is made again for a smaller budget, at least by this share. So many choices
# are made in all: once one has room, budgets between it and the least that had none are tried.
_TIGHTER, _TRIES = 0.98, 5
# A solution in fractions is rounded for so many budgets.
_ROUNDINGS = 4
# With copies, no search of a few seconds finds better than rounding for more blocks than these.
_SEARCHED = 48
# Over how many blocks a copy to or from the host may go on, one window for all; the next where no choice of the first fits.
WINDOWS = (4, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointingChoice:
    """A choice of what to compute again and what to send to the host, what it costs, and the least that any choice costs."""

    saving: Saving
    peak_bytes: float
    """The most bytes of tensors at one time."""
    cost_s: float
    """Seconds of all recomputation, and of all waits for copies."""
    bound_s: float
    """The proven lower bound of these seconds over all choices."""

    @property
    def gap(self) -> float:
        """Return how far the cost lies above its proven lower bound, as a share of the cost; 0: proven to be cheapest."""
        return 1.0 - self.bound_s / self.cost_s if self.cost_s else 0.0


def cheapest(
    lifetimes: TensorLifetimes,
    seconds: Floats,
    sharding: Sharding,
    optimizer: str,
    budget_bytes: float,
    batch_size: int | None = None,
    limit_s: float = _LIMIT_S,
    host_bytes_per_s: float = 0.0,
    gap: float = 0.0,
    lacking_bytes: Callable[[Saving], float] = lambda _: 0.0,
) -> CheckpointingChoice:
    """Return the choice of least time that keeps a step's tensors within a budget of bytes.

    Args:
        lifetimes: the step's storages, with blocks that can be checkpointed.
        seconds: (nodes,) the time of each place of the program (:meth:`TensorLifetimes.seconds`).
        sharding: how the replicas share parameters, gradients and the optimizer's state.
        optimizer: a name of ``OPTIMIZERS``.
        budget_bytes: the most bytes of tensors at one time.
        batch_size: local samples; None: as many as were traced.
        limit_s: limit of each search, in seconds as the solver counts them from its steps, so that an answer does not depend
            on the machine; the best choice found by then is returned with its bound.
        host_bytes_per_s: of the device's link to its host, one way; 0: nothing goes there.
        gap: a choice proven to take no more than this share of a step longer than the best ends the search; above 0, copies of
            many blocks are not searched for longer than it takes to round.
        lacking_bytes: returns the bytes that the device's allocator, whose segments take more than the tensors, lacks for a
            choice; 0.0: it has room. A choice that it has no room for is made again with a smaller budget. If none of a few
            has room, the last is returned.

    Raises Infeasible, with the least bytes that any choice holds, if no choice fits or none is found in time.
    """
    size = lifetimes.sizes(batch_size)

    @cache  # the options do not depend on the budget, which is lowered below
    def options_of(window: int, bytes_per_s: float) -> SavingOptions:
        """Return the options with copies over ``window`` blocks on a link of ``bytes_per_s``; 0.0: without copies."""
        return SavingOptions.of(lifetimes, seconds, sharding, optimizer, size, window, bytes_per_s)

    best = None  # the cheapest choice that the allocator has room for
    choice = None
    too_large_bytes = budget_bytes
    for _ in range(_TRIES):
        try:
            choice = _cheapest_within(budget_bytes, options_of, lifetimes.names, limit_s, host_bytes_per_s, gap)
        except Infeasible:
            if choice is None:
                raise
            break  # what a larger budget gave is the best there is
        used_bytes = min(budget_bytes, choice.peak_bytes)
        lacking = lacking_bytes(choice.saving)
        if lacking:
            too_large_bytes = used_bytes
            # The next budget is smaller by what lacks, and at least by a fixed share.
            budget_bytes = min(_TIGHTER * used_bytes, used_bytes - lacking)
        elif best is None or choice.cost_s < best.cost_s:
            best = choice
        if best is None:
            continue
        if too_large_bytes <= best.peak_bytes / _TIGHTER:
            break
        # What a choice lacked is no proof that the next has to hold so much less.
        budget_bytes = (best.peak_bytes + too_large_bytes) / 2
    assert choice is not None
    return best or choice


def _cheapest_within(
    budget_bytes: float,
    options_of: Callable[[int, float], SavingOptions],
    names: Sequence[str],
    limit_s: float,
    host_bytes_per_s: float,
    gap: float,
) -> CheckpointingChoice:
    """Return the choice of least time within one budget: without the host first, then with the widest window that has one.

    Args:
        budget_bytes: the most bytes of tensors at one time.
        options_of: returns the options for (window, bytes per second of the link to the host; 0.0: without the host).
        names: the names of the blocks in order.
        limit_s: time limit of each search.
        host_bytes_per_s: of the device's link to its host, one way; 0: nothing goes there.
        gap: a choice proven to take no more than this share of a step longer than the best ends a search.

    Raises Infeasible as :func:`cheapest` does.
    """
    all_recomputed: dict[str, tuple[int, ...]] = dict.fromkeys(names, ())  # this holds least on the device
    options = options_of(1, 0.0)
    choice, bound_s = _solve(options, budget_bytes, limit_s, known=Saving(saved_ops=all_recomputed), gap=gap)
    # Of a window of half the blocks or more at most half could go to the host: it is not tried.
    windows = [window for window in WINDOWS if 2 * window < len(names)] if host_bytes_per_s else []
    for window in windows:
        if choice is None:  # the search starts from what holds least here: all blocks on the host
            known = Saving(saved_ops=all_recomputed, on_host=frozenset(names[:-window]), window=window)
            most_s = np.inf
        else:
            known = options.saving(choice)
            most_s = options.cost_s(choice)
        options_with_host = options_of(window, host_bytes_per_s)  # all choices without the host are in it
        choice_with_host, bound_s = _solve(options_with_host, budget_bytes, limit_s, most_s, known, gap)
        if choice_with_host is not None and (choice is None or options_with_host.cost_s(choice_with_host) < most_s):
            choice = choice_with_host
            options = options_with_host
        elif choice is None:
            options = options_with_host  # for the least bytes below
        if choice is not None:
            break
    if choice is None:
        smallest_choice, _ = _solve(options, None, limit_s)
        least_bytes = np.inf if smallest_choice is None else float(options.curve(smallest_choice).max())
        least, budget = show_bytes(least_bytes), show_bytes(budget_bytes)
        text = f"no choice of activations to compute again holds the tensors of a step within {budget}; the least is {least}"
        raise Infeasible(text)
    return CheckpointingChoice(
        saving=options.saving(choice),
        peak_bytes=float(options.curve(choice).max()),
        cost_s=options.cost_s(choice),
        bound_s=min(bound_s, options.cost_s(choice)),
    )


def _solve(
    options: SavingOptions,
    budget_bytes: float | None,
    limit_s: float,
    most_s: float = np.inf,
    known: Saving | None = None,
    gap: float = 0.0,
) -> tuple[list[int] | None, float]:
    """Return (cheapest choice within a budget, lower bound on the seconds of any choice).

    If no choice fits that costs at most ``most_s``, they are (None, ``most_s``); if none is found in time, None and a bound.

    Args:
        options: what each block may save.
        budget_bytes: the most bytes of tensors at one time; None: the choice that needs least memory is returned, and the
            second value has no meaning.
        limit_s: seconds of each round's search, as the solver counts them from its steps: on any machine it ends at the same
            choice, unless that takes five times as long.
        most_s: the most seconds that a choice may cost.
        known: what blocks save in a choice from which the search starts; None: it starts from nothing.
        gap: a choice proven to take no more than this share of a step longer than the best ends the search.
    """
    # Only ``limited_places`` limit memory in the program; each round adds those at which its solution exceeds the limit.
    program = SavingProgram(options)
    limited_places = {int(options.base.argmax())}
    rounded, least_s = None, 0.0
    if options.copies and budget_bytes is not None:
        rounded, least_s = _rounded(program, limited_places, budget_bytes, most_s, gap)
        if rounded is not None:
            is_near = options.cost_s(rounded) - least_s <= gap * options.step_s
            if is_near or (gap and len(options.by_block) > _SEARCHED):
                return rounded, least_s
            known = options.saving(rounded)
    while True:
        model, variables = program.of(sorted(limited_places), budget_bytes, most_s).model()
        if known:
            for variable, hint in zip(variables, program.hints(known), strict=False):
                model.add_hint(variable, hint)
        counted_s = max(limit_s, 0.1)
        solver = solver_for(5 * counted_s, 0)
        solver.parameters.max_deterministic_time = counted_s
        if budget_bytes is not None and gap:
            solver.parameters.absolute_gap_limit = program.cost(gap * options.step_s)
        if options.copies:
            solver.parameters.linearization_level = 2  # the waits are a linear program
        status = run(solver, model)
        if status == cp_model.INFEASIBLE:
            return None, most_s
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):  # the time was over
            return rounded, least_s
        choice = program.picked(np.array([solver.value(variable) for variable in variables]))
        limit = solver.value(variables[program.peak_column]) if budget_bytes is None else budget_bytes
        exceeded_places = _exceeded_places(options, options.curve(choice), limit) - limited_places
        if not exceeded_places:
            is_proven = status == cp_model.OPTIMAL and not gap  # then cost and bound differ by rounding alone
            bound_s = max(least_s, program.seconds(solver.best_objective_bound))
            return choice, options.cost_s(choice) if is_proven else bound_s
        limited_places |= exceeded_places


def _exceeded_places(options: SavingOptions, curve: Floats, limit_bytes: float) -> set[int]:
    """Return the places where ``curve`` (places,) exceeds ``limit_bytes``, at most one between two blocks' backward passes."""
    span_ends = np.append(np.sort([block.begins for block in options.lifetimes.blocks]), len(curve))
    fullest_places = [
        begin + int(curve[begin:end].argmax())
        for begin, end in zip(np.append(0, span_ends), span_ends, strict=False)
        if end > begin
    ]
    return {place for place in fullest_places if curve[place] > limit_bytes}


def _rounded(
    program: SavingProgram, limited_places: set[int], budget_bytes: float, most_s: float, gap: float
) -> tuple[list[int] | None, float]:
    """Return (a choice within a budget near the best one in fractions, lower bound on the seconds of any choice).

    A program in which a block may save in several ways, by fractions that add up to 1, is solved in milliseconds; whole
    choices near its solution are formed in several ways (:meth:`SavingProgram.near`), and the cheapest that fits is returned.
    As long as none is near the bound, the program is solved again with what some exceed taken off its budget. None: of all
    these none fits.

    Args:
        program: of what blocks save.
        limited_places: where the program limits memory; those at which a choice exceeds the budget are added.
        budget_bytes: the most bytes of tensors at one time.
        most_s: the most seconds that a choice may cost; the bound if none costs so little.
        gap: a choice proven to take no more than this share of a step longer than the best ends the search.
    """
    limit_bytes = budget_bytes
    options = program.options
    best = None
    bound_s = most_s
    for _ in range(_ROUNDINGS):
        solution = program.of(sorted(limited_places), limit_bytes, most_s).relaxed()
        if solution is None:
            break
        values, cost = solution
        if limit_bytes == budget_bytes:
            bound_s = program.seconds(cost)
        choices = program.near(values)
        curves = [options.curve(choice) for choice in choices]
        excesses = [max(0.0, float(curve.max()) - budget_bytes) for curve in curves]
        fitting = [choice for choice, excess in zip(choices, excesses, strict=True) if not excess]
        best = min([*fitting, *([best] if best else [])], key=options.cost_s, default=None)
        if best and options.cost_s(best) - bound_s <= gap * options.step_s:
            break
        limited_places.update(*(_exceeded_places(options, curve, budget_bytes) for curve in curves))
        limit_bytes -= min((excess for excess in excesses if excess), default=0.0)
    return best, bound_s
