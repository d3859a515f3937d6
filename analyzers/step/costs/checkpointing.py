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

from ddltool.analyzers.step.costs.memory import Array, Places, Recomputation, Sharding, TensorLifetimes
from ddltool.errors import Infeasible
from ddltool.solver import run, solver_for
from ddltool.units import show_bytes

# In a block of at most so many products (matrix products, convolutions, attention) all their sets are tried. In a larger one
# they are ranked by the time that they save per byte, and only the sets of the best 0, 1, 2, ... are.
_EVERY_SET = 5
# The most sets of products that the solver may choose from, by block.
_OPTIONS = 8
_LIMIT_S = 10.0
# The solver counts in integers: seconds become whole nanoseconds.
_UNIT_S = 1e-9
# A set that saves less than this share of the time is no faster: it differs by rounding.
_NO_FASTER = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointingChoice:
    """A choice of what to compute again, what it costs, and the least that any choice costs."""

    saved_ops: dict[str, tuple[int, ...]]
    """By checkpointed block, the numbers of its products that are kept; the other blocks are kept whole."""
    peak_bytes: float
    """The most bytes of tensors at one time."""
    recompute_s: float
    """Seconds of all recomputation."""
    bound_s: float
    """The proven lower bound of these seconds over all choices."""

    @property
    def gap(self) -> float:
        """Return how far the cost lies above its proven lower bound, as a share of the cost; 0: proven to be cheapest."""
        return 1.0 - self.bound_s / self.recompute_s if self.recompute_s else 0.0


def cheapest(
    lifetimes: TensorLifetimes,
    seconds: Array,
    sharding: Sharding,
    optimizer: str,
    budget_bytes: float,
    batch_size: int | None = None,
    limit_s: float = _LIMIT_S,
    gap: float = 0.0,
) -> CheckpointingChoice:
    """Return the recomputation of least time that keeps a step's tensors within a budget of bytes.

    Args:
        lifetimes: the step's storages, with blocks that can be checkpointed.
        seconds: (nodes,) of :meth:`TensorLifetimes.seconds`.
        sharding: how the replicas share parameters, gradients and the optimizer's state.
        optimizer: a name of ``OPTIMIZERS``.
        budget_bytes: the most bytes of tensors at one time.
        batch_size: local samples; None: as many as were traced.
        limit_s: time limit of the search; the best choice found by then is returned with its bound.
        gap: a choice proven to be within this share of the least time ends the search.

    Raises Infeasible, with the least bytes that any choice holds, if no choice fits or none is found in time.
    """
    problem = _Problem.of(lifetimes, seconds, sharding, optimizer, lifetimes.sizes(batch_size))
    deadline = time.perf_counter() + limit_s
    try:
        choice, bound_s = problem.solve(budget_bytes, deadline, gap)
    except Infeasible:
        smallest, _ = problem.solve(None, time.perf_counter() + limit_s)
        least, budget = show_bytes(float(problem.curve(smallest).max())), show_bytes(budget_bytes)
        text = f"no choice of activations to compute again holds the tensors of a step within {budget}; the least is {least}"
        raise Infeasible(text) from None
    return CheckpointingChoice(
        saved_ops=problem.saved_ops(choice),
        peak_bytes=float(problem.curve(choice).max()),
        recompute_s=problem.cost_s(choice),
        bound_s=min(bound_s, problem.cost_s(choice)),
    )


def options(lifetimes: TensorLifetimes, seconds: Array, size: Array) -> list[list[tuple[int, ...]]]:
    """Return for every block at most ``_OPTIONS`` Pareto-optimal sets of products to save, by ascending bytes.

    A set is a tuple of the products' numbers in their block. ``seconds`` (nodes,) of the program's places, ``size``
    (storages,) in bytes. Each further set of a block holds more bytes and takes less time to recompute the rest.
    """
    options_by_block = []
    for index, block in enumerate(lifetimes.blocks):

        def cost_of(saved: tuple[int, ...], index: int = index, name: str = block.name) -> tuple[float, float]:
            """Return the bytes of the block's saved products, and the seconds in which the others are recomputed.

            ``saved``: the numbers of the saved products in the block. ``index`` and ``name`` are bound as defaults, so that
            they stay this block's.
            """
            recomputation = Recomputation(lifetimes, {name: saved})
            return float(size[recomputation.kept].sum()), float(lifetimes.recompute_s(recomputation, seconds)[index])

        count = len(block.keepable)
        if count <= _EVERY_SET:
            sets = list(chain.from_iterable(combinations(block.keepable, length) for length in range(count + 1)))
        else:
            full_recompute_s = cost_of(())[1]
            alone_costs = [cost_of((product,)) for product in block.keepable]
            seconds_per_byte = [(full_recompute_s - cost) / max(saved_bytes, 1.0) for saved_bytes, cost in alone_costs]
            by_gain = sorted(range(count), key=lambda number: (-seconds_per_byte[number], number))
            best_first = [block.keepable[number] for number in by_gain]
            sets = [tuple(sorted(best_first[:length])) for length in range(count + 1)]
        front: list[tuple[int, ...]] = []
        fastest_s = np.inf
        for _, cost_s, saved in sorted((*cost_of(saved), saved) for saved in sets):  # by ascending bytes
            if cost_s < fastest_s * (1 - _NO_FASTER):
                front.append(saved)
                fastest_s = cost_s
        # A long front is thinned evenly, with its ends.
        front_indices = np.unique(np.linspace(0, len(front) - 1, min(len(front), _OPTIONS)).round().astype(int))
        options_by_block.append([front[number] for number in front_indices.tolist()])
    return options_by_block


@dataclass(frozen=True, kw_only=True, eq=False)
class _Problem:
    """The memory of a step, linear in what is chosen for each block.

    A choice has one entry per block: 0 for a block that is not checkpointed, k for its k-th set of saved products. All curves
    (places,) are of one program, in which every recomputation has the places of the longest that its block may get.
    """

    lifetimes: TensorLifetimes
    sets: list[list[tuple[int, ...]]]
    """By block, the sets of products that may be saved."""
    recompute_s: list[list[float]]
    """By block and set, the seconds of the recomputation."""
    base: Array
    """(places,) bytes without any checkpointing."""
    added: list[Array]
    """By block (sets, places): the bytes that each set adds to ``base``, mostly below zero."""
    shared: list[tuple[frozenset[int], Array]]
    """Sets of blocks with common inputs, and the bytes (places,) that these add if any of the blocks is checkpointed."""

    @classmethod
    def of(
        cls, lifetimes: TensorLifetimes, seconds: Array, sharding: Sharding, optimizer: str, size: Array
    ) -> _Problem:
        """Return the problem of a step whose storages have ``size`` (storages,) bytes and whose places take ``seconds``.

        The bytes that a set adds are those of the program with this block's recomputation less those of the program without
        any; both have the same places, because empty slots are inserted where nothing is recomputed.
        """
        sets = options(lifetimes, seconds, size)
        blocks = list(zip(lifetimes.blocks, sets, strict=True))
        recompute_s: list[list[float]] = []
        longest = np.zeros(len(blocks), dtype=np.int64)  # places of each block's longest recomputation
        for index, (block, block_sets) in enumerate(blocks):
            plans = [Recomputation(lifetimes, {block.name: saved}) for saved in block_sets]
            recompute_s.append([float(lifetimes.recompute_s(plan, seconds)[index]) for plan in plans])
            longest[index] = max(plan.length[index] for plan in plans)
        empty = Recomputation(lifetimes, {}, longest)
        read_once, read_by_several = _split_inputs_by_readers(lifetimes)
        added = []
        for index, (block, block_sets) in enumerate(blocks):
            own_inputs = read_once[read_once[:, 1] == index]
            changed = np.union1d(lifetimes.owned[index], own_inputs[:, 0])  # the others live as without recomputation
            before = lifetimes.activations(empty, size, own_inputs, changed)
            plans = [Recomputation(lifetimes, {block.name: saved}, longest) for saved in block_sets]
            added.append(np.array([lifetimes.activations(plan, size, own_inputs, changed) - before for plan in plans]))
        return cls(
            lifetimes=lifetimes,
            sets=sets,
            recompute_s=recompute_s,
            base=lifetimes.held(empty, sharding, optimizer, size).peak().curve,
            added=added,
            shared=_sum_shared_inputs(lifetimes, empty, read_by_several, size),
        )

    def solve(self, budget_bytes: float | None, deadline: float, gap: float = 0.0) -> tuple[list[int], float]:
        """Return the cheapest choice within a budget, to a relative ``gap``, and a lower bound on the seconds of any choice.

        ``budget_bytes`` None: return the choice that needs least memory; the second value then has no meaning. Raises
        Infeasible if no choice fits, and if none is found before ``deadline`` (of ``time.perf_counter``).
        """
        # Only ``limited_places`` limit memory in the model; each round adds those at which its solution exceeds the limit.
        limited_places = {int(self.base.argmax())}
        # The program is cut where a block's backward pass begins; of each span the fullest place is looked at.
        span_ends = np.append(np.sort([block.begins for block in self.lifetimes.blocks]), len(self.base))
        while True:
            model, block_picks, peak = self._model(sorted(limited_places), budget_bytes)
            solver = solver_for(max(deadline - time.perf_counter(), 0.1), 0)
            solver.parameters.relative_gap_limit = gap
            status = run(solver, model)
            if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
                raise Infeasible("no choice fits")
            choice = [next((k for k, pick in enumerate(picks, 1) if solver.value(pick)), 0) for picks in block_picks]
            limit = solver.value(peak) if budget_bytes is None else budget_bytes
            curve = self.curve(choice)
            fullest_places = [
                begin + int(curve[begin:end].argmax())
                for begin, end in zip(np.append(0, span_ends), span_ends, strict=False)
                if end > begin
            ]
            exceeded_places = {place for place in fullest_places if curve[place] > limit} - limited_places
            if not exceeded_places:
                is_proven = status == cp_model.OPTIMAL and not gap  # then cost and bound differ by rounding alone
                return choice, self.cost_s(choice) if is_proven else solver.best_objective_bound * _UNIT_S
            limited_places |= exceeded_places

    def _model(
        self, places: Sequence[int], budget_bytes: float | None
    ) -> tuple[cp_model.CpModel, list[list[cp_model.IntVar]], cp_model.LinearExprT]:
        """Return CP-SAT's model with memory limited at ``places``, its variables by block and set, and the limit.

        Without a budget the limit is a variable, which the model minimizes.
        """
        model = cp_model.CpModel()
        block_picks = [[model.new_bool_var("") for _ in block_sets] for block_sets in self.sets]
        for picks in block_picks:
            model.add_at_most_one(picks)
        is_held = [model.new_bool_var("") for _ in self.shared]
        for variable, (blocks, _) in zip(
            is_held, self.shared, strict=True
        ):  # 1 as soon as any of the blocks is recomputed
            for index in blocks:
                model.add(variable >= cp_model.LinearExpr.sum(block_picks[index]))
        variables = [pick for picks in block_picks for pick in picks] + is_held
        limit = model.new_int_var(0, 2**60, "") if budget_bytes is None else int(budget_bytes)
        for place in places:
            coefficients = [float(value) for block_added in self.added for value in block_added[:, place]]
            coefficients += [float(size[place]) for _, size in self.shared]
            whole_bytes = [
                int(np.ceil(value)) for value in coefficients
            ]  # rounded up: no solution holds more than it says
            model.add(
                cp_model.LinearExpr.weighted_sum(variables, whole_bytes) + int(np.ceil(self.base[place])) <= limit
            )
        costs = [round(seconds / _UNIT_S) for block_seconds in self.recompute_s for seconds in block_seconds]
        model.minimize(
            limit if budget_bytes is None else cp_model.LinearExpr.weighted_sum(variables[: len(costs)], costs)
        )
        return model, block_picks, limit

    def curve(self, choice: Sequence[int]) -> Array:
        """Return (places,) the bytes that a choice holds at every place; ``choice``: by block, as for the class."""
        curve = self.base.copy()
        for index, pick in enumerate(choice):
            if pick:
                curve += self.added[index][pick - 1]
        for blocks, size in self.shared:
            if any(choice[index] for index in blocks):
                curve += size
        return curve

    def cost_s(self, choice: Sequence[int]) -> float:
        """Return the seconds of all recomputation of a choice."""
        return sum(self.recompute_s[index][pick - 1] for index, pick in enumerate(choice) if pick)

    def saved_ops(self, choice: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return the saved products of a choice by the names of its checkpointed blocks."""
        chosen_sets = zip(self.lifetimes.blocks, self.sets, choice, strict=True)
        return {block.name: block_sets[pick - 1] for block, block_sets, pick in chosen_sets if pick}


def _split_inputs_by_readers(lifetimes: TensorLifetimes) -> tuple[Places, Places]:
    """Return the rows of ``lifetimes.read`` whose storage one block reads, and the rows whose storage several blocks read.

    A row is (storage, block, last place of the block that reads it). What one block reads depends on that block's choice
    alone; what several read is held once, whichever of them are recomputed.
    """
    reader_counts = np.bincount(lifetimes.read[:, 0], minlength=1)
    read_once = reader_counts[lifetimes.read[:, 0]] == 1
    return lifetimes.read[read_once], lifetimes.read[~read_once]


def _sum_shared_inputs(
    lifetimes: TensorLifetimes, empty: Recomputation, reads: Places, size: Array
) -> list[tuple[frozenset[int], Array]]:
    """Return by set of blocks the bytes (places,) of the inputs that they share, held for their recomputations alone.

    An input that several blocks read is held beyond its last use without checkpointing, until the recomputation of each of
    its readers has read it. Between two such readings it is there if any of the readers still to come is recomputed: those
    readers are the set. ``reads``: rows of ``lifetimes.read``. ``empty``: the program with slots for all recomputations.
    """
    freed_at = empty.moved(lifetimes.free) + 1  # (s,) first place after the last use, without checkpointing
    added: dict[frozenset[int], Array] = {}
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
