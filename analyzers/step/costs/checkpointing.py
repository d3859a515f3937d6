"""What to keep, to compute again, or to send to the host under a budget of memory: the cheapest choice, proven by CP-SAT.

Each block is kept whole, computed again whole, or computed again with some of its products kept; what it saves (what it made,
or its input) stays or goes to the host. A block's choice adds the same bytes at the same places whatever the others choose,
but for inputs that several blocks share, which are there once. So the memory at every place is linear in the choices. Places
enter the model when a solution exceeds the budget there; until then it is a relaxation, whose bound holds. The waits for
copies (:mod:`.saving`) are the least numbers that linear inequalities allow. Start at :func:`cheapest`.

A product is a matrix product, convolution or attention: what is worth keeping. A place is the index of a node of the step's
program, and a curve (places,) the bytes held at each. A choice says for every block which of its options it takes.

Sources: Jain et al., "Checkmate: Breaking the memory wall with optimal tensor rematerialization", MLSys 2020, of which
this is the part that ``torch.utils.checkpoint`` can do; Beaumont et al., "Efficient combination of rematerialization and
offloading for training DNNs", NeurIPS 2021, for both in one choice.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, chain, combinations, groupby, pairwise, product
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from ddltool.analyzers.step.costs.memory import Recomputation, TensorLifetimes
from ddltool.analyzers.step.costs.saving import Copies, Saving
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.arrays import Floats, Ints
from ddltool.errors import Infeasible
from ddltool.solver import IntegerProgram, run, solver_for
from ddltool.units import show_bytes

# In a block of at most so many products (matrix products, convolutions, attention) all their sets are tried. In a larger one
# they are ranked by the time that they save per byte, and only the sets of the best 0, 1, 2, ... are.
_EVERY_SET = 5
# The most sets of products that the solver may choose from, by block.
_OPTIONS = 8
_LIMIT_S = 10.0
# A choice for which the allocator finds no room is made again for a smaller budget, at least by this share. So many choices
# are made in all: once one has room, budgets between it and the least that had none are tried.
_TIGHTER, _TRIES = 0.98, 5
# A solution in fractions is rounded for so many budgets, and its fractions averaged over so many blocks before.
_ROUNDINGS, _AVERAGED = 4, (1, 4, 8, 12, 16, 24, 32, 10**6)
# With copies, no search of a few seconds finds better than rounding for more blocks than these.
_SEARCHED = 48
# Over how many blocks a copy to or from the host may go on, one window for all; the next where no choice of the first fits.
WINDOWS = (4, 1)
# The solver counts in integers: seconds become whole nanoseconds, or whole millionths of a step with copies beside it.
_UNIT_S, _UNITS = 1e-9, 1e6
# A set that saves less than this share of the time is no faster: it differs by rounding.
_NO_FASTER = 1e-9


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
        limit_s: time limit of each search; the best choice found by then is returned with its bound.
        host_bytes_per_s: of the device's link to its host, one way; 0: nothing goes there.
        gap: a choice proven to take no more than this share of a step longer than the best ends the search; above 0, copies of
            many blocks are not searched for longer than it takes to round.
        lacking_bytes: returns the bytes that the device's allocator, whose segments take more than the tensors, lacks for a
            choice; 0.0: it has room. A choice that it has no room for is made again with a smaller budget. If none of a few
            has room, the last is returned.

    Raises Infeasible, with the least bytes that any choice holds, if no choice fits or none is found in time.
    """
    size = lifetimes.sizes(batch_size)

    @cache  # the problem does not depend on the budget, which is lowered below
    def problem_of(window: int, bytes_per_s: float) -> _Problem:
        """Return the problem with copies over ``window`` blocks on a link of ``bytes_per_s``; 0.0: without copies."""
        return _Problem.of(lifetimes, seconds, sharding, optimizer, size, window, bytes_per_s)

    best = None  # the cheapest choice that the allocator has room for
    choice = None
    too_large_bytes = budget_bytes
    for _ in range(_TRIES):
        try:
            choice = _cheapest_within(budget_bytes, problem_of, lifetimes.names, limit_s, host_bytes_per_s, gap)
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
        budget_bytes = (
            best.peak_bytes + too_large_bytes
        ) / 2  # that lacked so much is no proof that all of it is needed
    assert choice is not None
    return best or choice


def _cheapest_within(
    budget_bytes: float,
    problem_of: Callable[[int, float], _Problem],
    names: Sequence[str],
    limit_s: float,
    host_bytes_per_s: float,
    gap: float,
) -> CheckpointingChoice:
    """Return the choice of least time within one budget: without the host first, then with the widest window that has one.

    Args:
        budget_bytes: the most bytes of tensors at one time.
        problem_of: returns the problem for (window, bytes per second of the link to the host; 0.0: without the host).
        names: the names of the blocks in order.
        limit_s: time limit of each search.
        host_bytes_per_s: of the device's link to its host, one way; 0: nothing goes there.
        gap: a choice proven to take no more than this share of a step longer than the best ends a search.

    Raises Infeasible as :func:`cheapest` does.
    """
    all_recomputed: dict[str, tuple[int, ...]] = dict.fromkeys(names, ())  # this holds least on the device
    problem = problem_of(1, 0.0)
    choice, bound_s = problem.solve(
        budget_bytes, time.perf_counter() + limit_s, known=Saving(saved_ops=all_recomputed), gap=gap
    )
    # Of a window of half the blocks or more at most half could go to the host: it is not tried.
    windows = [window for window in WINDOWS if 2 * window < len(names)] if host_bytes_per_s else []
    for window in windows:
        if choice is None:  # the search starts from what holds least here: all blocks on the host
            known = Saving(saved_ops=all_recomputed, on_host=frozenset(names[:-window]), window=window)
            most_s = np.inf
        else:
            known = problem.saving(choice)
            most_s = problem.cost_s(choice)
        problem_with_host = problem_of(window, host_bytes_per_s)  # all choices without the host are in it
        deadline = time.perf_counter() + limit_s
        choice_with_host, bound_s = problem_with_host.solve(budget_bytes, deadline, most_s, known, gap)
        if choice_with_host is not None and (choice is None or problem_with_host.cost_s(choice_with_host) < most_s):
            choice = choice_with_host
            problem = problem_with_host
        elif choice is None:
            problem = problem_with_host  # for the least bytes below
        if choice is not None:
            break
    if choice is None:
        smallest_choice, _ = problem.solve(None, time.perf_counter() + limit_s)
        least_bytes = np.inf if smallest_choice is None else float(problem.curve(smallest_choice).max())
        least, budget = show_bytes(least_bytes), show_bytes(budget_bytes)
        text = f"no choice of activations to compute again holds the tensors of a step within {budget}; the least is {least}"
        raise Infeasible(text)
    return CheckpointingChoice(
        saving=problem.saving(choice),
        peak_bytes=float(problem.curve(choice).max()),
        cost_s=problem.cost_s(choice),
        bound_s=min(bound_s, problem.cost_s(choice)),
    )


def options(lifetimes: TensorLifetimes, seconds: Floats, size: Floats) -> list[list[tuple[int, ...]]]:
    """Return for every block at most ``_OPTIONS`` Pareto-optimal sets of products to save, by ascending bytes.

    A set is a tuple of the products' numbers in their block. Pareto-optimal means that no other set holds fewer bytes and takes
    less time to recompute the rest: each further set of a block holds more bytes and takes less time. ``seconds`` (nodes,): the
    time of each place of the program. ``size`` (storages,): bytes.
    """
    options_by_block = []
    for index, block in enumerate(lifetimes.blocks):
        cost_of = partial(_cost_of_saved, lifetimes, seconds, size, index)
        front: list[tuple[int, ...]] = []
        fastest_s = np.inf
        sets_with_cost = sorted((*cost_of(saved), saved) for saved in _candidate_sets(block.keepable, cost_of))
        for _, recompute_s, saved in sets_with_cost:  # by ascending bytes
            if recompute_s < fastest_s * (1 - _NO_FASTER):
                front.append(saved)
                fastest_s = recompute_s
        # A long front is thinned evenly, with its ends.
        front_indices = np.unique(np.linspace(0, len(front) - 1, min(len(front), _OPTIONS)).round().astype(int))
        options_by_block.append([front[number] for number in front_indices.tolist()])
    return options_by_block


def _candidate_sets(
    keepable: Sequence[int], cost_of: Callable[[tuple[int, ...]], tuple[float, float]]
) -> list[tuple[int, ...]]:
    """Return the sets of a block's products that are worth a look: all of them, or in a large block the best of each length.

    ``keepable``: the numbers of the products that may be saved. ``cost_of``: returns for a set (bytes that it holds, seconds in
    which the rest of the block is recomputed).
    """
    count = len(keepable)
    if count <= _EVERY_SET:
        return list(chain.from_iterable(combinations(keepable, length) for length in range(count + 1)))
    # The best products are those that save most time per byte.
    _, full_recompute_s = cost_of(())
    alone_costs = [cost_of((product,)) for product in keepable]
    saved_s_per_byte = [
        (full_recompute_s - recompute_s) / max(saved_bytes, 1.0) for saved_bytes, recompute_s in alone_costs
    ]
    by_gain = sorted(range(count), key=lambda position: (-saved_s_per_byte[position], position))
    best_first = [keepable[position] for position in by_gain]
    return [tuple(sorted(best_first[:length])) for length in range(count + 1)]


def _cost_of_saved(
    lifetimes: TensorLifetimes, seconds: Floats, size: Floats, index: int, saved: tuple[int, ...]
) -> tuple[float, float]:
    """Return (bytes of a block's saved products, seconds in which the rest of the block is recomputed).

    ``index``: of the block. ``saved``: the numbers of the saved products in the block. ``seconds`` (nodes,): the time of each
    place of the program. ``size`` (storages,): bytes.
    """
    recomputation = Recomputation(lifetimes, {lifetimes.blocks[index].name: saved})
    return float(size[recomputation.kept].sum()), float(lifetimes.recompute_s(recomputation, seconds)[index])


# One way in which a block may save: (numbers of the products that it saves, or None for everything that it made; whether it
# saves on the host).
_Option = tuple[tuple[int, ...] | None, bool]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Problem:
    """The memory of a step, linear in what is chosen for each block.

    A choice has one entry per block: 0 for a block that keeps everything on the device, k for its k-th option, counted from 1.
    All curves (places,) are of one program, in which every recomputation has as many places as the longest that its block may
    get, so that they can be added.
    """

    lifetimes: TensorLifetimes
    window: int
    """How many blocks' passes a copy to or from the host may take before compute waits for it."""
    options: list[list[_Option]]
    """By block, what it may save in place of everything on the device."""
    recompute_s: list[list[float]]
    """By block and option, the seconds of the recomputation."""
    copy_s: list[list[float]]
    """By block and option, the seconds of the copy to the host."""
    plain: Copies
    """When each block's passes end and begin with nothing computed again."""
    base: Floats
    """(places,) bytes without any checkpointing."""
    added: list[Floats]
    """By block (options, places): the bytes that each option adds to ``base``, mostly below zero."""
    shared: list[tuple[frozenset[int], Floats]]
    """Sets of blocks with common inputs, and the bytes (places,) that these add if any of the blocks is checkpointed."""

    @property
    def unit_s(self) -> float:
        """Return the seconds that the solver counts as one."""
        return max(_UNIT_S, self.step_s / _UNITS) if self.copies else _UNIT_S

    @property
    def copies(self) -> bool:
        """Return whether any option copies something to the host."""
        return any(map(any, self.copy_s))

    @classmethod
    def of(
        cls,
        lifetimes: TensorLifetimes,
        seconds: Floats,
        sharding: Sharding,
        optimizer: str,
        size: Floats,
        window: int,
        host_bytes_per_s: float,
    ) -> _Problem:
        """Return the problem of a step.

        The bytes that an option adds are those of the program with this block's recomputation less those of the program
        without any; both have the same places, because empty slots are inserted where nothing is recomputed.

        Args:
            lifetimes: the step's storages and blocks.
            seconds: (nodes,) the time of each place of the program.
            sharding: how the replicas share parameters, gradients and the optimizer's state.
            optimizer: a name of ``OPTIMIZERS``.
            size: (storages,) bytes.
            window: how many blocks' passes a copy may take before compute waits for it.
            host_bytes_per_s: of the link to the host, one way; 0: nothing goes there.
        """
        block_options: list[list[_Option]] = []
        for index, sets in enumerate(options(lifetimes, seconds, size)):
            own: list[_Option] = [(saved, False) for saved in sets]
            # A copy is awaited ``window`` blocks later: the last blocks have none so late, and stay on the device.
            if host_bytes_per_s and index + window < len(lifetimes.blocks):
                own.append((None, True))
                if len(lifetimes.inputs[index]):  # a checkpointed block sends its input, if that is its own
                    own += [(saved, True) for saved in sets]
            block_options.append(own)
        blocks = list(zip(lifetimes.blocks, block_options, strict=True))
        # What each option of each block costs, and how many places its longest recomputation takes.
        recompute_s: list[list[float]] = []
        copy_s: list[list[float]] = []
        longest = np.zeros(len(blocks), dtype=np.int64)  # places of each block's longest recomputation
        savings = [[_saving({block.name: option}, window) for option in own] for block, own in blocks]
        for index, own_savings in enumerate(savings):
            plans = [Recomputation(lifetimes, saving) for saving in own_savings]
            recompute_s.append([float(lifetimes.recompute_s(plan, seconds)[index]) for plan in plans])
            copied_bytes = [float(size[plan.copied[index]].sum()) for plan in plans]
            copy_s.append([copied / host_bytes_per_s if copied else 0.0 for copied in copied_bytes])
            longest[index] = max(plan.length[index] for plan in plans)
        # What each option of each block adds to the memory at every place.
        empty = Recomputation(lifetimes, {}, longest)
        read_once, read_by_several = _split_inputs_by_readers(lifetimes)
        added = []
        for index, own_savings in enumerate(savings):
            own_inputs = read_once[read_once[:, 1] == index]
            changed = np.union1d(lifetimes.owned[index], own_inputs[:, 0])  # the others live as without recomputation
            before = lifetimes.activations(empty, size, own_inputs, changed)
            plans = [Recomputation(lifetimes, saving, longest) for saving in own_savings]
            added.append(np.array([lifetimes.activations(plan, size, own_inputs, changed) - before for plan in plans]))
        return cls(
            lifetimes=lifetimes,
            window=window,
            options=block_options,
            recompute_s=recompute_s,
            copy_s=copy_s,
            plain=lifetimes.copies(Recomputation(lifetimes, {}), seconds, size, 1.0),
            base=lifetimes.held(empty, sharding, optimizer, size).peak().curve,
            added=added,
            shared=_sum_shared_inputs(lifetimes, empty, read_by_several, size),
        )

    def solve(
        self,
        budget_bytes: float | None,
        deadline: float,
        most_s: float = np.inf,
        known: Saving | None = None,
        gap: float = 0.0,
    ) -> tuple[list[int] | None, float]:
        """Return (cheapest choice within a budget, lower bound on the seconds of any choice).

        If no choice fits that costs at most ``most_s``, they are (None, ``most_s``); if none is found in time, (None, 0.0).

        Args:
            budget_bytes: the most bytes of tensors at one time; None: the choice that needs least memory is returned, and the
                second value has no meaning.
            deadline: when the search ends, on the clock of ``time.perf_counter``.
            most_s: the most seconds that a choice may cost.
            known: what blocks save in a choice from which the search starts; None: it starts from nothing.
            gap: a choice proven to take no more than this share of a step longer than the best ends the search.
        """
        # Only ``limited_places`` limit memory in the program; each round adds those at which its solution exceeds the limit.
        limited_places = {int(self.base.argmax())}
        while True:
            rounded, least_s = None, 0.0
            if self.copies and budget_bytes is not None:
                rounded, least_s = self._rounded(limited_places, budget_bytes, most_s, gap)
                if rounded is not None:
                    is_near = self.cost_s(rounded) - least_s <= gap * self.step_s
                    if is_near or (gap and len(self.options) > _SEARCHED):
                        return rounded, least_s
                    known = self.saving(rounded)
            program = self._program(sorted(limited_places), budget_bytes, most_s)
            model, variables = program.model()
            if known:
                for variable, hint in zip(variables, self._hints(known), strict=False):
                    model.add_hint(variable, hint)
            solver = solver_for(max(deadline - time.perf_counter(), 0.1), 0)  # a late round still gets a moment
            if budget_bytes is not None and gap:
                solver.parameters.absolute_gap_limit = gap * self.step_s / self.unit_s * self._cost_weight
            if self.copies:
                solver.parameters.linearization_level = 2  # the waits are a linear program
            status = run(solver, model)
            if status == cp_model.INFEASIBLE:
                return None, most_s
            if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):  # the time was over
                return rounded, least_s
            choice = self._picked(np.array([solver.value(variable) for variable in variables]))
            limit = solver.value(variables[self._peak_column]) if budget_bytes is None else budget_bytes
            exceeded_places = self._exceeded_places(choice, limit) - limited_places
            if not exceeded_places:
                is_proven = status == cp_model.OPTIMAL and not gap  # then cost and bound differ by rounding alone
                bound_s = max(least_s, solver.best_objective_bound / self._cost_weight * self.unit_s)
                return choice, self.cost_s(choice) if is_proven else bound_s
            limited_places |= exceeded_places

    def _exceeded_places(self, choice: Sequence[int], limit_bytes: float) -> set[int]:
        """Return the places where a choice holds more than ``limit_bytes``, at most one between two blocks' backward passes."""
        curve = self.curve(choice)
        span_ends = np.append(np.sort([block.begins for block in self.lifetimes.blocks]), len(curve))
        fullest_places = [
            begin + int(curve[begin:end].argmax())
            for begin, end in zip(np.append(0, span_ends), span_ends, strict=False)
            if end > begin
        ]
        return {place for place in fullest_places if curve[place] > limit_bytes}

    def _rounded(
        self, limited_places: set[int], budget_bytes: float, most_s: float, gap: float
    ) -> tuple[list[int] | None, float]:
        """Return (a choice within a budget near the best one in fractions, lower bound on the seconds of any choice).

        A program in which a block may save in several ways, by fractions that add up to 1, is solved in milliseconds; whole
        choices near its solution are formed in several ways (:meth:`_near`), and the cheapest that fits is returned. If none
        fits, the program is solved again with what they exceed taken off its budget. After a few times the choice is None.

        Args:
            limited_places: where the program limits memory; those at which a choice exceeds the budget are added.
            budget_bytes: the most bytes of tensors at one time.
            most_s: the most seconds that a choice may cost; the bound if none costs so little.
        """
        limit_bytes = budget_bytes
        best = None
        bound_s = most_s
        for _ in range(_ROUNDINGS):
            solution = self._program(sorted(limited_places), limit_bytes, most_s).relaxed()
            if solution is None:
                break
            values, cost = solution
            if limit_bytes == budget_bytes:
                bound_s = cost / self._cost_weight * self.unit_s
            choices = self._near(values)
            excesses = [max(0.0, float(self.curve(choice).max()) - budget_bytes) for choice in choices]
            fitting = [choice for choice, excess in zip(choices, excesses, strict=True) if not excess]
            best = min([*fitting, *([best] if best else [])], key=self.cost_s, default=None)
            if best and self.cost_s(best) - bound_s <= gap * self.step_s:
                break
            limited_places.update(*(self._exceeded_places(choice, budget_bytes) for choice in choices))
            limit_bytes -= min((excess for excess in excesses if excess), default=0.0)
        return best, bound_s

    def _near(self, values: Floats) -> list[list[int]]:
        """Return whole choices near a solution in fractions, whose variables have the values (n,) ``values``.

        The fractions of each block are averaged with those of its neighbours in a run of blocks of one kind: a solver returns
        a corner, in which the kinds of saving come in bursts, and bursts of copies have to wait for the link. From block to
        block each then takes the way with the largest sum of fractions not yet taken (error diffusion).
        """
        widest = max(map(len, self.options))
        fractions = np.zeros((len(self.options), 1 + widest))
        for index, (begin, end) in enumerate(pairwise(self._columns)):
            fractions[index, 1 : 1 + end - begin] = values[begin:end]
            fractions[index, 0] = 1.0 - values[begin:end].sum()
        kinds = [*zip(self.options, self.recompute_s, self.copy_s, strict=True)]
        choices = []
        for width, step in product(_AVERAGED, (1, -1)):
            choice = [0] * len(kinds)
            for _, run_of_one_kind in groupby(range(len(kinds)), key=lambda index: kinds[index]):
                indices = list(run_of_one_kind)
                carried = np.zeros(1 + widest)
                for index in indices[::step]:
                    first = max(indices[0], index - width // 2)
                    carried += fractions[first : min(indices[-1], index + width // 2) + 1].mean(axis=0)
                    choice[index] = int(carried.argmax())
                    carried[choice[index]] -= 1.0
            choices.append(choice)
        return choices

    @property
    def step_s(self) -> float:
        """Return the seconds until the first block's backward pass, with nothing computed again: nearly those of the step."""
        return float(self.plain.begins[0])

    @property
    def _cost_weight(self) -> int:
        """Return by what a program multiplies the cost, so that a unit of it outweighs a block on the host for every block."""
        return 1 + len(self.options)

    @property
    def _columns(self) -> list[int]:
        """Return by block the column of its first option among a program's variables, and behind them the end of the last."""
        return [0, *accumulate(map(len, self.options))]

    @property
    def _peak_column(self) -> int:
        """Return the column of the most bytes at one time among a program's variables."""
        return self._columns[-1] + len(self.shared)

    def _picked(self, values: Ints) -> list[int]:
        """Return the choice that a program's variables, with the values (n,) ``values``, stand for."""
        options = [values[begin:end] for begin, end in pairwise(self._columns)]
        return [int(own.argmax()) + 1 if own.any() else 0 for own in options]

    def _hints(self, known: Saving) -> list[bool]:
        """Return, by block and option, whether the block saves in that way in ``known``, a choice of another problem."""
        hints = []
        for block, own_options in zip(self.lifetimes.blocks, self.options, strict=True):
            known_option = (known.saved_ops.get(block.name), block.name in known.on_host)
            hints += [option == known_option for option in own_options]
        return hints

    def _program(self, places: Sequence[int], budget_bytes: float | None, most_s: float) -> IntegerProgram:
        """Return the integer program whose solution is the cheapest choice with memory limited at ``places``.

        Its variables are, in order: for every block and option whether the block takes it (0 or 1), for every set of blocks
        with common inputs whether these are held (0 or 1), the most bytes at one time if they are minimized, and the times of
        :meth:`_waits`. An expression is a row with the coefficients of all variables and a constant at its end; each of those
        made here is to be at most 0.

        ``budget_bytes``: the most bytes at one time; None: these are minimized, not the cost. ``most_s``: the most seconds that
        a choice may cost; infinite: any.
        """
        columns = self._columns
        peak = self._peak_column
        width = peak + 1 + (4 * len(self.options) if self.copies else 0)

        def row(columns: slice | int | Sequence[int], coefficients: Any = 1, constant: float = 0) -> Ints:
            expression = np.zeros(width + 1, dtype=np.int64)
            expression[columns] = coefficients
            expression[-1] = constant
            return expression

        by_block = [slice(begin, end) for begin, end in pairwise(columns)]
        rows = [row(own, 1, -1) for own in by_block]  # at most one option; none: the block keeps everything
        for column, (blocks, _) in enumerate(self.shared, columns[-1]):
            for index in blocks:  # common inputs are held as soon as any of the blocks is recomputed
                recomputing = [
                    columns[index] + k for k, (saved, _) in enumerate(self.options[index]) if saved is not None
                ]
                rows.append(row(recomputing) - row(column))
        limit = row(peak) if budget_bytes is None else row(-1, 0, int(budget_bytes))
        for place in places:
            shared_bytes = np.array([curve[place] for _, curve in self.shared])
            added_bytes = np.concatenate([*(own[:, place] for own in self.added), shared_bytes])
            whole_bytes = np.ceil(added_bytes)  # so that no solution holds more than it says
            rows.append(row(slice(0, peak), whole_bytes, np.ceil(self.base[place])) - limit)

        upper = row(slice(0, peak))
        upper[peak] = 2**60
        cost = row(peak)
        if budget_bytes is not None:
            recomputes = self._in_units(self.recompute_s, by_block, row)
            cost = np.sum(recomputes, axis=0)
            if self.copies:
                wait_rows, waits, most = self._waits(recomputes, self._in_units(self.copy_s, by_block, row), row)
                rows += wait_rows
                cost += waits
                upper[peak + 1 : -1] = most
            if most_s < np.inf:
                most_units = math.ceil(most_s / self.unit_s) + len(self.options)  # each term was rounded
                rows.append(cost - row(-1, 0, most_units))
            # Of equally cheap choices the one with the fewest blocks on the host.
            is_on_host = [on_host for own_options in self.options for _, on_host in own_options]
            cost = self._cost_weight * cost + row(slice(0, columns[-1]), is_on_host)
        all_rows = np.array(rows)
        return IntegerProgram(cost=cost[:-1], upper=upper[:-1], rows=all_rows[:, :-1], limits=-all_rows[:, -1])

    def _in_units(
        self, seconds_by_option: Sequence[Sequence[float]], by_block: Sequence[slice], row: Callable[..., Ints]
    ) -> list[Ints]:
        """Return by block the expression of its chosen option's seconds in units of ``unit_s``.

        ``by_block``: the columns of each block's options. ``row``: makes an expression of columns, coefficients and a constant.
        """
        return [
            row(own, [round(each_s / self.unit_s) for each_s in own_s])
            for own, own_s in zip(by_block, seconds_by_option, strict=True)
        ]

    def _waits(
        self, recomputes: Sequence[Ints], copies: Sequence[Ints], row: Callable[..., Ints]
    ) -> tuple[list[Ints], Ints, int]:
        """Return (expressions that are at most 0, the wait for all copies to the host and back, the most of each time).

        The inequalities are those of :meth:`Copies.waits`: the least numbers that they allow are the waits. Of a block without
        a copy each follows from its neighbours', so none depends on what is picked. Behind the most bytes the variables are,
        for the forward and then the backward passes, all waits up to each block's and the end of each block's copy.

        Args:
            recomputes: by block, the time of its recomputation in units of ``unit_s``.
            copies: by block, the time of its copy in these units.
            row: makes an expression of columns, coefficients and a constant.
        """
        count = len(copies)
        window = self.window
        rows: list[Ints] = []
        waits = row(-1, 0)
        column = self._peak_column + 1
        for is_forward in (True, False):
            late = [row(column + block) for block in range(count)]
            done = [row(column + count + block) for block in range(count)]
            column += 2 * count
            order = range(count) if is_forward else range(count - 1, -1, -1)
            plain_s = self.plain.ends if is_forward else self.plain.begins
            # By block, when its pass ends (forward), or begins (backward): after the recomputation of all blocks behind it.
            clock = [late[block] + row(-1, 0, round(plain_s[block] / self.unit_s)) for block in range(count)]
            if not is_forward:
                again = row(-1, 0)
                for block in order:
                    clock[block] += again
                    again += recomputes[block]
            for before, block in pairwise(order):
                rows += [late[before] - late[block], done[before] + copies[block] - done[block]]
            for block in order:
                # Out: begun at the own end, awaited a window later. Back: begun a window earlier, awaited at the own begin.
                begun = block if is_forward else block + window
                if begun < count:
                    rows.append(clock[begun] + copies[block] - done[block])
                awaited = block - window if is_forward else block
                if awaited >= 0 and awaited + window < count:
                    rows.append(done[awaited] - clock[block])
            waits += late[order[-1]]
        # No wait and no copy ends later than everything one after another, each of the longest kind.
        most_s = self.step_s + sum(map(max, self.recompute_s)) + sum(map(max, self.copy_s))
        return rows, waits, 4 * round(most_s / self.unit_s) + 2

    def curve(self, choice: Sequence[int]) -> Floats:
        """Return (places,) the bytes that a choice holds at every place of the program.

        ``choice``: by block the number of its option, counted from 1; 0: it keeps everything.
        """
        curve = self.base.copy()
        recomputed_blocks = set()
        for index, pick in enumerate(choice):
            if pick:
                curve += self.added[index][pick - 1]
                saved, _ = self.options[index][pick - 1]
                if saved is not None:
                    recomputed_blocks.add(index)
        for blocks, size in self.shared:
            if not recomputed_blocks.isdisjoint(blocks):
                curve += size
        return curve

    def cost_s(self, choice: Sequence[int]) -> float:
        """Return the seconds of all recomputation of a choice, and of its waits for copies.

        ``choice``: by block the number of its option, counted from 1; 0: it keeps everything.
        """
        recompute_s = _chosen_seconds(self.recompute_s, choice)
        copy_s = _chosen_seconds(self.copy_s, choice)
        # Backward passes run from the last block on, so each begins after the recomputation of all blocks behind it.
        begins = self.plain.begins + np.cumsum(recompute_s[::-1])[::-1] - recompute_s
        copies = replace(self.plain, begins=begins, copy_s=copy_s, window=self.window)
        return float(recompute_s.sum() + sum(waits_s.sum() for waits_s in copies.waits()))

    def saving(self, choice: Sequence[int]) -> Saving:
        """Return what every block saves by a choice.

        ``choice``: by block the number of its option, counted from 1; 0: it keeps everything.
        """
        chosen = zip(self.lifetimes.blocks, self.options, choice, strict=True)
        return _saving({block.name: own[pick - 1] for block, own, pick in chosen if pick}, self.window)


def _chosen_seconds(seconds_by_option: Sequence[Sequence[float]], choice: Sequence[int]) -> Floats:
    """Return (blocks,) the seconds of each block's chosen option; 0.0 for a block that keeps everything.

    ``seconds_by_option``: by block and option. ``choice``: by block the number of its option, counted from 1; 0: none.
    """
    return np.array([own_s[pick - 1] if pick else 0.0 for own_s, pick in zip(seconds_by_option, choice, strict=True)])


def _saving(options_by_block: Mapping[str, _Option], window: int) -> Saving:
    """Return a ``Saving`` of blocks that take one option each; blocks that are not named keep everything on the device.

    ``window``: how many blocks' passes a copy to the host may take.
    """
    return Saving(
        saved_ops={name: saved for name, (saved, _) in options_by_block.items() if saved is not None},
        on_host=frozenset(name for name, (_, is_on_host) in options_by_block.items() if is_on_host),
        window=window,
    )


def _split_inputs_by_readers(lifetimes: TensorLifetimes) -> tuple[Ints, Ints]:
    """Return (rows whose storage one block reads, rows whose storage several blocks read) of ``lifetimes.read``.

    A row is (storage, block, last place of the block that reads it), for a storage that was made before the block. How long an
    input of one block is held depends on that block's choice alone; an input of several is held once, whichever of them are
    recomputed.
    """
    reader_counts = np.bincount(lifetimes.read[:, 0], minlength=1)
    read_once = reader_counts[lifetimes.read[:, 0]] == 1
    return lifetimes.read[read_once], lifetimes.read[~read_once]


def _sum_shared_inputs(
    lifetimes: TensorLifetimes, empty: Recomputation, reads: Ints, size: Floats
) -> list[tuple[frozenset[int], Floats]]:
    """Return pairs (set of blocks, bytes at every place) for the inputs that several blocks share.

    The bytes (places,) are held in addition, if any of the blocks is recomputed. An input that several blocks read is held
    beyond its last use without checkpointing, until the recomputation of each of its readers has read it. Between two such
    readings it is there if any of the readers still to come is recomputed: those readers are the set.

    Args:
        lifetimes: the step's storages and blocks.
        empty: the program in which nothing is recomputed, with places for all recomputations.
        reads: the rows of ``lifetimes.read`` for these inputs: (storage, block, last place of the block that reads it).
        size: (storages,) bytes.
    """
    freed_at = empty.moved(lifetimes.free) + 1  # (s,) first place after the last use, without checkpointing
    added: dict[frozenset[int], Floats] = {}
    for storage in np.unique(reads[:, 0]).tolist():
        needed_until = {}  # by reader, the first place after its recomputation has read the storage
        for index, last_read in reads[reads[:, 0] == storage, 1:].tolist():
            offset = min(last_read - lifetimes.blocks[index].first, int(empty.slots[index]) - 1)
            needed_until[index] = int(empty.start[index]) + offset + 1
        start = int(freed_at[storage])
        for end in sorted(set(needed_until.values())):
            if end > start:
                readers = frozenset(index for index, place in needed_until.items() if place >= end)
                added.setdefault(readers, np.zeros(lifetimes.nodes + empty.extra))[start:end] += size[storage]
                start = end
    return list(added.items())
