"""What to compute again under a budget of memory: the cheapest choice by CP-SAT, with its proven bound.

Each block is kept whole, computed again whole, or computed again with some of its products kept. A block's choice adds the
same bytes at the same places whatever the others choose, but for inputs that several blocks share, which are there once.
So the memory at every place is linear in the choices. Places enter the model when a solution exceeds the budget there;
until then it is a relaxation, whose bound holds. Start at :func:`cheapest`.

Source: Jain et al., "Checkmate: Breaking the memory wall with optimal tensor rematerialization", MLSys 2020, of which
this is the part that ``torch.utils.checkpoint`` can do.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import numpy as np
from ortools.sat.python import cp_model

from ddltool.analyzers.costs.memory import Array, Ledger, Places, Recomputation, Sharding
from ddltool.analyzers.placement.est import run, solver_for
from ddltool.errors import Infeasible
from ddltool.units import show_bytes

# All sets of products are tried in a block of so many; of more, the sets of those that cost most time per byte.
_EVERY_SET = 5
_OPTIONS = 8
_LIMIT_S = 10.0
# Seconds become whole nanoseconds.
_UNIT_S = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """A choice of what to compute again, what it costs, and the least that any choice costs."""

    keeps: dict[str, tuple[int, ...]]
    peak_bytes: float
    again_s: float
    bound_s: float

    @property
    def gap(self) -> float:
        """Return the relative distance to the bound; 0: proven to be cheapest."""
        return 1.0 - self.bound_s / self.again_s if self.again_s else 0.0


def cheapest(
    ledger: Ledger,
    seconds: Array,
    sharding: Sharding,
    optimizer: str,
    budget_bytes: float,
    batch_size: int | None = None,
    limit_s: float = _LIMIT_S,
) -> Chosen:
    """Return what to compute again so that a step's tensors stay within a budget, in the least time.

    ``seconds`` (nodes,): of :meth:`Ledger.seconds`. Raises Infeasible, with the least that is possible, where no choice fits.
    """
    problem = _Problem.of(ledger, seconds, sharding, optimizer, ledger.sizes(batch_size))
    deadline = time.perf_counter() + limit_s
    try:
        picks, bound_s = problem.solve(budget_bytes, deadline)
    except Infeasible:
        least, _ = problem.solve(None, time.perf_counter() + limit_s)
        held, given = show_bytes(float(problem.curve(least).max())), show_bytes(budget_bytes)
        text = (
            f"no choice of activations to compute again holds the tensors of a step within {given}; the least is {held}"
        )
        raise Infeasible(text) from None
    return Chosen(
        keeps=problem.keeps(picks),
        peak_bytes=float(problem.curve(picks).max()),
        again_s=problem.cost_s(picks),
        bound_s=min(bound_s, problem.cost_s(picks)),
    )


def options(ledger: Ledger, seconds: Array, size: Array) -> list[list[tuple[int, ...]]]:
    """Return by block the sets of products worth keeping: none that holds more and saves no time, at most ``_OPTIONS``."""
    made = []
    for number, block in enumerate(ledger.blocks):

        def judged(kept: tuple[int, ...], number: int = number, name: str = block.name) -> tuple[float, float]:
            again = Recomputation(ledger, {name: kept})
            return float(size[again.kept].sum()), float(ledger.again_s(again, seconds)[number])

        count = len(block.keepable)
        if count <= _EVERY_SET:
            sets = list(chain.from_iterable(combinations(block.keepable, length) for length in range(count + 1)))
        else:
            nothing, single = judged(()), [judged((product,)) for product in block.keepable]
            worth = [(nothing[1] - cost) / max(held, 1.0) for held, cost in single]
            order = [block.keepable[place] for place in sorted(range(count), key=lambda place: (-worth[place], place))]
            sets = [tuple(sorted(order[:length])) for length in range(count + 1)]
        front: list[tuple[int, ...]] = []
        fastest = np.inf
        for _, cost, kept in sorted((*judged(kept), kept) for kept in sets):
            if cost < fastest * (1 - 1e-9):
                front.append(kept)
                fastest = cost
        places = np.unique(np.linspace(0, len(front) - 1, min(len(front), _OPTIONS)).round().astype(int))
        made.append([front[place] for place in places.tolist()])
    return made


@dataclass(frozen=True, kw_only=True, eq=False)
class _Problem:
    """The memory of a step, linear in what is chosen for each block; place 0 of a block's options: not checkpointed."""

    ledger: Ledger
    sets: list[list[tuple[int, ...]]]
    seconds: list[list[float]]
    base: Array
    columns: list[Array]
    """By block (options, places): what each set adds."""
    shared: list[tuple[frozenset[int], Array]]
    """Blocks of which any, where it is computed again, holds inputs for longer, and the bytes (places,) of that."""

    @classmethod
    def of(cls, ledger: Ledger, seconds: Array, sharding: Sharding, optimizer: str, size: Array) -> _Problem:
        """Return the problem of a ledger with storages of ``size`` bytes."""
        sets = options(ledger, seconds, size)
        costs, longest = [], []
        for number, (block, own) in enumerate(zip(ledger.blocks, sets, strict=True)):
            each = [Recomputation(ledger, {block.name: kept}) for kept in own]
            costs.append([float(ledger.again_s(again, seconds)[number]) for again in each])
            longest.append(max(int(again.length[number]) for again in each))
        room = np.array(longest, dtype=np.int64)
        nothing = Recomputation(ledger, {}, room)
        whole = ledger.held(nothing, sharding, optimizer, size).peak().curve
        alone, several = _readers(ledger)
        activations = ledger.activations(nothing, size)
        columns = []
        for block, own in zip(ledger.blocks, sets, strict=True):
            plans = (Recomputation(ledger, {block.name: kept}, room) for kept in own)
            columns.append(np.array([ledger.activations(again, size, alone) - activations for again in plans]))
        shared = _shared(ledger, nothing, several, size)
        return cls(ledger=ledger, sets=sets, seconds=costs, base=whole, columns=columns, shared=shared)

    def solve(self, budget_bytes: float | None, deadline: float) -> tuple[list[int], float]:
        """Return an option per block and a bound on the seconds; without a budget, what needs least memory, and no bound.

        Raises Infeasible where nothing fits, and where no choice is found in time.
        """
        rows = {int(self.base.argmax())}
        ends = np.append(np.sort([block.begins for block in self.ledger.blocks]), len(self.base))
        while True:
            model, picks, peak = self._model(sorted(rows), budget_bytes)
            solver = solver_for(max(deadline - time.perf_counter(), 0.1), 0)
            status = run(solver, model)
            if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
                raise Infeasible("no choice fits")
            chosen = [next((k for k, pick in enumerate(own, 1) if solver.value(pick)), 0) for own in picks]
            limit = solver.value(peak) if budget_bytes is None else budget_bytes
            curve = self.curve(chosen)
            tops = [a + int(curve[a:b].argmax()) for a, b in zip(np.append(0, ends), ends, strict=False) if b > a]
            more = {place for place in tops if curve[place] > limit} - rows
            if not more:
                proven = status == cp_model.OPTIMAL  # what is left of a difference is rounding
                return chosen, self.cost_s(chosen) if proven else solver.best_objective_bound * _UNIT_S
            rows |= more

    def _model(
        self, rows: Sequence[int], budget_bytes: float | None
    ) -> tuple[cp_model.CpModel, list[list[cp_model.IntVar]], cp_model.LinearExprT]:
        model = cp_model.CpModel()
        picks = [[model.new_bool_var("") for _ in own] for own in self.sets]
        for own in picks:
            model.add_at_most_one(own)
        held = [model.new_bool_var("") for _ in self.shared]
        for variable, (blocks, _) in zip(held, self.shared, strict=True):
            for number in blocks:
                model.add(variable >= cp_model.LinearExpr.sum(picks[number]))
        variables = [pick for own in picks for pick in own] + held
        most = model.new_int_var(0, 2**60, "") if budget_bytes is None else int(budget_bytes)
        for place in rows:
            added = [float(value) for own in self.columns for value in own[:, place]]
            added += [float(size[place]) for _, size in self.shared]
            whole = [int(np.ceil(value)) for value in added]
            model.add(cp_model.LinearExpr.weighted_sum(variables, whole) + int(np.ceil(self.base[place])) <= most)
        costs = [round(seconds / _UNIT_S) for own in self.seconds for seconds in own]
        model.minimize(
            most if budget_bytes is None else cp_model.LinearExpr.weighted_sum(variables[: len(costs)], costs)
        )
        return model, picks, most

    def curve(self, chosen: Sequence[int]) -> Array:
        """Return the bytes at every place."""
        made = self.base.copy()
        for number, pick in enumerate(chosen):
            if pick:
                made += self.columns[number][pick - 1]
        for blocks, size in self.shared:
            if any(chosen[number] for number in blocks):
                made += size
        return made

    def cost_s(self, chosen: Sequence[int]) -> float:
        """Return the seconds of what is computed again."""
        return sum(self.seconds[number][pick - 1] for number, pick in enumerate(chosen) if pick)

    def keeps(self, chosen: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return the choice by name."""
        picked = zip(self.ledger.blocks, self.sets, chosen, strict=True)
        return {block.name: own[pick - 1] for block, own, pick in picked if pick}


def _readers(ledger: Ledger) -> tuple[Places, Places]:
    """Return the rows of ``read`` whose storage one block reads, and those whose storage several do."""
    count = np.bincount(ledger.read[:, 0], minlength=1)
    single = count[ledger.read[:, 0]] == 1
    return ledger.read[single], ledger.read[~single]


def _shared(ledger: Ledger, nothing: Recomputation, read: Places, size: Array) -> list[tuple[frozenset[int], Array]]:
    """Return what inputs that several blocks read add after their last other use, by the blocks that need them so late."""
    died = nothing.moved(ledger.died) + 1
    made: dict[frozenset[int], Array] = {}
    for storage in np.unique(read[:, 0]).tolist():
        until = {}
        for number, last in read[read[:, 0] == storage, 1:].tolist():
            used = min(last - ledger.blocks[number].first, int(nothing.room[number]) - 1)
            until[number] = int(nothing.start[number]) + used + 1
        start = int(died[storage])
        for end in sorted(set(until.values())):
            if end > start:
                blocks = frozenset(number for number, each in until.items() if each >= end)
                made.setdefault(blocks, np.zeros(ledger.nodes + nothing.extra))[start:end] += size[storage]
                start = end
    return list(made.items())
