"""A third heuristic: TAC's order, improved by simulated steps until the bound or the budget is reached.

TAC looks at single recvs: while several are missing for every op, all P are 0 and only the nearest join counts, however
little it unlocks. This search looks at whole joins. It starts from TAC, TIC and from Johnson's rule on joins, and then
moves recvs around the critical arrival: with ``A_k`` the time of the k-th arrival and ``R_k`` the compute time that is
not unlocked before it, the compute resource ends at ``max_k (A_k + R_k)``, so the arrival that attains the maximum is
the one to change. Orders are compared by that maximum, then by the sum over all arrivals, which leads over plateaus.

Where sends exist, what runs after the last arrival is ordered as well (longest tail first), if that shortens the step.
Start at :func:`improve`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.communication.order import Schedule, tac, tic
from ddltool.analyzers.communication.properties import time_scale
from ddltool.analyzers.communication.shop import ShopProblem, list_schedule, lower_bound, numberings, reduce
from ddltool.analyzers.communication.timeline import Simulator
from ddltool.graph import RECV, Graph

# Simulated steps that decide between TAC's order and the improved one: common random numbers, so few suffice.
_JUDGES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Improvement:
    """The order found and how the search ended."""

    schedule: Schedule
    """Numbers for the recvs and, if ``orders_compute``, for every other op."""
    orders_compute: bool
    """Whether the compute ops and sends have numbers too: a runtime that only orders transfers gains less."""
    moves: int
    """Orders tried."""
    at_bound: bool
    """Whether no order of anything can be better."""


def improve(
    graph: Graph,
    *,
    budget_s: float = 2.0,
    max_moves: int = 20_000,
    seed: int = 0,
    start: Schedule | None = None,
    problem: ShopProblem | None = None,
) -> Improvement:
    """Return an order that is at least as good as TAC's in simulation, on the same seeds.

    ``start``: TAC's order, ``problem``: the reduced graph, where they are at hand. Ends at the lower bound, after
    ``max_moves`` orders, or after ``budget_s`` seconds, whichever comes first; only the last makes the result depend on
    the machine. Raises InputError for ops without a duration.
    """
    first = tac(graph) if start is None else start
    recvs = graph.of_kind(RECV)
    problem = reduce(graph) if problem is None else problem
    search = Search(graph, problem, budget_s, max_moves, seed)
    order = search.run([first, tic(graph)]) if len(recvs) > 1 else []
    names = [graph.names[op] for block in order for op in _sorted_members(graph, problem, block, first)]
    rank = {name: place for place, name in enumerate(names)}
    rest = [name for name in first.order if name not in rank]  # free ops are no recvs: nothing is ever missing
    rank.update({name: len(rank) + place for place, name in enumerate(rest)})
    transfers = Schedule(name="improved", priority=rank, order=tuple(rank))
    candidates = [Schedule(name="improved", priority=first.priority, order=first.order), transfers]
    wholes = [
        Schedule(name="improved", priority=_with_compute(graph, problem, rank, numbers), order=tuple(rank))
        for numbers in (numberings(problem) if graph.mode == "training" else [])
    ]
    simulator = Simulator(graph)
    best, compute = _judge(simulator, candidates, wholes, seed)
    bound = lower_bound(problem) / time_scale(graph)
    reached = _mean(simulator, best.priority, seed) <= bound * (1 + 1e-6)
    return Improvement(schedule=best, orders_compute=compute, moves=search.moves, at_bound=reached)


def _judge(
    simulator: Simulator, candidates: Sequence[Schedule], wholes: Sequence[Schedule], seed: int
) -> tuple[Schedule, bool]:
    """Return the schedule with the least mean step; numbers for compute only where they gain a thousandth."""
    means = [_mean(simulator, candidate.priority, seed) for candidate in candidates]
    place = min(range(len(candidates)), key=means.__getitem__)
    whole_means = [_mean(simulator, whole.priority, seed) for whole in wholes]
    if whole_means and min(whole_means) < means[place] * (1 - 1e-3):
        return wholes[min(range(len(wholes)), key=whole_means.__getitem__)], True
    return candidates[place], False


def _mean(simulator: Simulator, priority: Mapping[str, int], seed: int) -> float:
    return sum(simulator.run(priority, seed + judge).makespan_s for judge in range(_JUDGES)) / _JUDGES


def _sorted_members(graph: Graph, problem: ShopProblem, block: int, first: Schedule) -> list[int]:
    """Return the recvs of a block in TAC's order."""
    return sorted(problem.members[block], key=lambda op: first.priority[graph.names[op]])


def _with_compute(
    graph: Graph, problem: ShopProblem, rank: Mapping[str, int], numbers: Sequence[int]
) -> dict[str, int]:
    """Return numbers for all ops: recvs as given, then the blocks by ``numbers`` (n,).

    Numbers are compared on one resource only; sends come after all recvs of their channel that are ready. Free ops are
    in no block: they get 0 and so run at once.
    """
    found = dict.fromkeys(graph.names, 0)
    for block, members in enumerate(problem.members):
        for op in members:
            found[graph.names[op]] = len(rank) + numbers[block]
    return found | dict(rank)


class Search:
    """Local search over the orders of the recv blocks of a reduced problem."""

    def __init__(self, graph: Graph, problem: ShopProblem, budget_s: float, max_moves: int, seed: int) -> None:
        """Prepare the search; ``closed`` says whether the closed form ranks the orders."""
        self.problem = problem
        self.graph = graph
        self.deadline = time.perf_counter() + budget_s
        self.max_moves = max_moves
        self.moves = 0
        self.chance = random.Random(seed)
        self.recvs = [block for block in range(len(problem)) if problem.kind[block] == RECV]
        self.place = {block: number for number, block in enumerate(self.recvs)}
        self.transfer = np.array([problem.times[block] for block in self.recvs], dtype=np.int64)
        self.channel = np.array([problem.resource[block] for block in self.recvs], dtype=np.int64)
        self._collect_joins()
        self.tail = [-int(value) for value in problem.heads_and_tails[1]]
        self.closed = len(problem.head) > 0 and self._closed()
        self.bound = lower_bound(problem.part(sorted(problem.head | set(self.recvs))) if self.closed else problem)

    def _collect_joins(self) -> None:
        """Find the recvs that each block needs; joins are the blocks of H, or all compute blocks without one."""
        needed: list[frozenset[int]] = []
        for block in range(len(self.problem)):
            own = {self.place[block]} if self.problem.kind[block] == RECV else set()
            needed.append(frozenset(own.union(*(needed[source] for source in self.problem.inputs[block]))))
        blocks = sorted(self.problem.head) or [b for b in range(len(self.problem)) if self.problem.kind[b] != RECV]
        self.ready_load = sum(self.problem.times[block] for block in blocks if not needed[block])
        joins: dict[frozenset[int], int] = {}
        for block in blocks:
            if needed[block]:
                joins[needed[block]] = joins.get(needed[block], 0) + self.problem.times[block]
        self.joins = [np.array(sorted(recvs), dtype=np.intp) for recvs in joins]
        self.load = np.array(list(joins.values()), dtype=np.int64)
        self.flat = np.concatenate([np.zeros(0, dtype=np.intp), *self.joins])
        self.starts = np.cumsum([0, *(len(join) for join in self.joins)])[:-1].astype(np.intp)

    def _closed(self) -> bool:
        """Return whether every recv is needed by H: then the closed form ranks the orders."""
        return len(self.joins) > 0 and len(np.unique(self.flat)) == len(self.recvs)

    def run(self, starts: Sequence[Schedule]) -> list[int]:
        """Return the best order found, as blocks."""
        orders = [self._blocks(schedule) for schedule in starts]
        orders += [self._johnson_on_joins(by_load) for by_load in (True, False)] if self.joins else []
        scored = [(self.score(order), number, order) for number, order in enumerate(orders)]
        score, _, best = min(scored, key=lambda entry: entry[:2])
        while score[0] > self.bound and not self._spent():
            found = self._neighbour(best)
            if (value := self.score(found)) < score:
                score, best = value, found
        return [self.recvs[recv] for recv in best]

    def _spent(self) -> bool:
        return self.moves >= self.max_moves or (self.moves % 16 == 0 and time.perf_counter() > self.deadline)

    def _blocks(self, schedule: Schedule) -> NDArray[np.intp]:
        at = {name: place for place, name in enumerate(schedule.order)}
        first = [min(at[self.graph.names[op]] for op in self.problem.members[block]) for block in self.recvs]
        return np.argsort(np.array(first), kind="stable")

    def _johnson_on_joins(self, by_load: bool) -> NDArray[np.intp]:
        """Bring in whole joins, the next by Johnson's rule on (missing transfers, compute that they unlock).

        ``by_load``: among joins that compute longer than they transfer, the largest surplus per transfer first.
        """
        missing = np.ones(len(self.recvs), dtype=bool)
        left = list(range(len(self.joins)))
        order: list[int] = []
        while left:
            keys = []
            for join in left:
                wait = int(self.transfer[self.joins[join][missing[self.joins[join]]]].sum())
                gain = int(self.load[join])
                if by_load:
                    keys.append((-(gain + 1) / (wait + 1), 0, join))
                else:
                    keys.append((0, wait, join) if wait < gain else (1, -gain, join))
            join = min(keys)[2]
            order += [int(recv) for recv in self.joins[join] if missing[recv]]
            missing[self.joins[join]] = False
            left = [other for other in left if missing[self.joins[other]].any()]
        return np.array([*order, *np.flatnonzero(missing).tolist()], dtype=np.intp)

    def _arrivals(self, order: NDArray[np.intp]) -> NDArray[np.int64]:
        arrival = np.zeros(len(order), dtype=np.int64)
        for channel in np.unique(self.channel):
            mine = order[self.channel[order] == channel]
            arrival[mine] = np.cumsum(self.transfer[mine])
        return arrival

    def score(self, order: NDArray[np.intp]) -> tuple[int, float]:
        """Return (end, smoothness) of an order: the closed form where H needs every recv, else a list schedule."""
        self.moves += 1
        if self.closed:
            values = self._ends(order)[0]
            return int(values.max()), float(values.sum())
        numbers = list(self.tail)
        for number, recv in enumerate(order.tolist()):
            numbers[self.recvs[recv]] = number - len(order) - 2**62
        starts = list_schedule(self.problem, numbers)
        ends = [start + length for start, length in zip(starts, self.problem.times, strict=True)]
        return max(ends), float(sum(ends))

    def _ends(self, order: NDArray[np.intp]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return A_k + R_k by arrival, those arrivals, and the arrivals of the recvs."""
        arrival = self._arrivals(order)
        unlocked = np.maximum.reduceat(arrival[self.flat], self.starts)
        late = np.argsort(-unlocked, kind="stable")
        values = unlocked[late] + np.cumsum(self.load[late])
        everything = np.append(values, self.ready_load + int(self.load.sum()))
        return everything, np.append(unlocked[late], 0), arrival

    def _neighbour(self, order: NDArray[np.intp]) -> NDArray[np.intp]:
        """Return a changed order: a join brought forward to somewhere before the critical arrival, or one recv moved."""
        count = len(order)
        critical = count - 1
        if self.closed:
            values, at, arrival = self._ends(order)
            worst = at[int(values.argmax())]
            critical = int(np.flatnonzero(arrival[order] <= worst).max(initial=0))
        if self.joins and self.chance.random() < 0.6:
            join = self.joins[self.chance.randrange(len(self.joins))]
            target = self.chance.randint(0, critical)
            inside = np.isin(order, join)
            fixed = order[:target][~inside[:target]]
            moved, rest = order[inside], order[target:][~inside[target:]]
            return np.concatenate([fixed, moved, rest])
        source = self.chance.randint(0, critical)
        target = self.chance.randrange(count)
        shorter = np.delete(order, source)
        return np.insert(shorter, target, order[source])
