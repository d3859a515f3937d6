"""A smaller scheduling problem with the same least makespan: what can be merged without losing optimality.

A timed graph is a job shop: every resource runs one op at a time, in any order that the inputs allow. Write H for the
compute ops that every send needs (all compute ops where there are no sends), D(op) for the recvs that op needs.

1. A compute op that takes no time and needs no recv directly runs at the instant when its last input ends, when the
   compute resource is between two ops anyway: it constrains nothing and goes.
2. Ops of H with equal D form one block. Before the last of H has ended there are no sends, so only the arrival times
   matter; sorting what runs until then by them (Jackson's rule for one machine with release times) ends no later, keeps
   inputs in front, because D grows along an edge, and puts the ops of one D side by side.
3. Recvs of one channel that are needed by the same blocks form one, if H needs them: every send comes after them, so
   moving the earlier one next to the later one only lets the transfers in between start earlier.
4. A compute op outside H that needs all recvs, and whose consumers all sit in one block of compute, joins that block:
   everything after it has all its recvs, so what ran in between can move up.
5. Compute ops outside H that need all recvs and lead to no send run last, as one block, for the same reason.
6. Sends of one channel that wait for the same block form one, if H needs all recvs: sends lead to nothing, so a
   channel is done at the same time whichever of its waiting sends goes first.

The tests hold all of this against the least makespan of the unreduced problem. Start at :func:`reduce`.

What orders, bounds and the exact solver ask of the problem stands below: :func:`lower_bound`, which no order of anything
can beat and which is cheap enough for every graph, :func:`numberings` to try, and schedules as one order of all ops.
``L``, the busiest resource alone, ignores that an op must wait for its inputs. Here every op gets a head (what must
happen before it can start) and a tail (what must happen after it ended), both from its whole set of ancestors and
descendants on each resource; each resource then is a one-machine problem with heads and tails, whose preemptive
optimum (Jackson's schedule: always run the available op with the longest tail) no real schedule can beat.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.communication.properties import whole_times
from ddltool.graph import COMPUTE, RECV, SEND, Graph

# A free op with more inputs times consumers than this stays: taking it out would add too many edges.
_BYPASS_EDGES = 256
# Subset edges between blocks of H save edges from recvs; more than this many per block save nothing.
_SUBSET_EDGES = 8
# The ancestor matrix takes n^2 bytes; beyond this many blocks only paths are looked at.
_MATRIX_OPS = 6000


@dataclass(frozen=True, kw_only=True)
class ShopProblem:
    """Ops in whole time units (see :func:`~ddltool.analyzers.communication.properties.time_scale`) on resources."""

    times: Sequence[int]
    resource: Sequence[int]
    kind: Sequence[int]
    inputs: Sequence[Sequence[int]]
    """Ops before ops: the numbering is topological."""
    resources: int
    members: Sequence[Sequence[int]]
    """Op indices of the graph that each op stands for, in an order that their edges allow."""
    head: frozenset[int] = frozenset()
    """The blocks of H."""

    def __len__(self) -> int:
        return len(self.times)

    def part(self, chosen: Sequence[int], inputs: Sequence[Sequence[int]] | None = None) -> ShopProblem:
        """Return the problem of some of the ops, ascending, with other inputs where given: they must be among the ops."""
        place = {op: number for number, op in enumerate(chosen)}
        edges = self.inputs if inputs is None else inputs
        return ShopProblem(
            times=[self.times[op] for op in chosen],
            resource=[self.resource[op] for op in chosen],
            kind=[self.kind[op] for op in chosen],
            inputs=[[place[source] for source in edges[op]] for op in chosen],
            resources=self.resources,
            members=[self.members[op] for op in chosen],
        )

    @cached_property
    def consumers(self) -> list[list[int]]:
        """The reversed edges."""
        found: list[list[int]] = [[] for _ in self.times]
        for op, inputs in enumerate(self.inputs):
            for source in inputs:
                found[source].append(op)
        return found

    @cached_property
    def heads_and_tails(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each op the least time before its start and after its end, each shape (n,), whole time units."""
        count = len(self)
        if count == 0:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        times = np.array(self.times, dtype=np.int64)
        head, tail = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        if count <= _MATRIX_OPS:
            needs = reach(self)
            by_resource = np.zeros((count, self.resources), dtype=np.int64)
            by_resource[np.arange(count), self.resource] = times
            head = _rows_times(needs, by_resource).max(axis=1)
            tail = _rows_times(np.ascontiguousarray(needs.T), by_resource).max(axis=1)
            if self.head and len(self.head) < count:
                head = np.maximum(head, _after_head(self, needs))
        for op in range(count):
            for source in self.inputs[op]:
                head[op] = max(head[op], head[source] + times[source])
        for op in range(count - 1, -1, -1):
            for target in self.consumers[op]:
                tail[op] = max(tail[op], times[target] + tail[target])
        return head, tail


def unreduced(graph: Graph) -> ShopProblem:
    """Return the graph as it is, renumbered topologically."""
    order = graph.topological_order().tolist()
    place = {op: number for number, op in enumerate(order)}
    times = whole_times(graph).tolist()
    return ShopProblem(
        times=[times[op] for op in order],
        resource=[int(graph.resource[op]) for op in order],
        kind=[int(graph.kind[op]) for op in order],
        inputs=[[place[source] for source in graph.inputs_of(op).tolist()] for op in order],
        resources=len(graph.resource_names),
        members=[[op] for op in order],
    )


def reduce(graph: Graph) -> ShopProblem:
    """Return the merged problem of a timed graph. O((n + e) r / 64 + b^2) for b blocks.

    Graphs with several compute resources are only renumbered. Raises InputError for ops without a duration.
    """
    compute_resources = {int(resource) for resource in graph.resource[graph.kind == COMPUTE]}
    problem = unreduced(graph)
    if len(compute_resources) != 1:
        return problem
    return _Reducer(_without_free_ops(problem)).merged()


def _without_free_ops(problem: ShopProblem) -> ShopProblem:
    """Return the problem without the compute ops of rule 1; they are no member of anything."""
    inputs = [list(sources) for sources in problem.inputs]
    consumers = [list(targets) for targets in problem.consumers]
    gone: set[int] = set()
    for op in range(len(problem)):
        if problem.times[op] or problem.kind[op] != COMPUTE:
            continue
        sources, targets = inputs[op], consumers[op]
        if any(problem.kind[source] == RECV for source in sources):
            continue
        if len(sources) * len(targets) > _BYPASS_EDGES:
            continue
        gone.add(op)
        for target in targets:
            known = dict.fromkeys(source for source in inputs[target] if source != op)
            inputs[target] = list(known | dict.fromkeys(sources))
        for source in sources:
            consumers[source] = list(dict.fromkeys([*(c for c in consumers[source] if c != op), *targets]))
    return problem.part([op for op in range(len(problem)) if op not in gone], inputs)


class _Reducer:
    """Rules 2 to 6 on a problem with one compute resource."""

    def __init__(self, problem: ShopProblem) -> None:
        self.problem = problem
        self.consumers = problem.consumers
        count = len(problem)
        self.recvs = [op for op in range(count) if problem.kind[op] == RECV]
        needed = [0] * count
        for number, op in enumerate(self.recvs):
            needed[op] = 1 << number
        for op in range(count):
            for source in problem.inputs[op]:
                needed[op] |= needed[source]
        self.needed = needed
        leads = [0] * count
        sends = 0
        for op in range(count - 1, -1, -1):
            if problem.kind[op] == SEND:
                leads[op] = 1 << sends
                sends += 1
            for source in problem.inputs[op]:
                leads[source] |= leads[op]
        every = (1 << sends) - 1
        compute = [op for op in range(count) if problem.kind[op] == COMPUTE]
        self.head = [op for op in compute if leads[op] == every]
        self.tail = [op for op in compute if leads[op] != every]
        self.leads = leads
        consumed = 0
        for op in compute:
            consumed |= needed[op]
        self.consumed = consumed
        self.head_needs = 0
        for op in self.head:
            self.head_needs |= needed[op]

    def merged(self) -> ShopProblem:
        """Return the problem of the blocks."""
        block = list(range(len(self.problem)))
        self._merge_head(block)
        self._merge_recvs(block)
        self._merge_tail(block)
        self._merge_sends(block)
        return self._build(block)

    def _merge_head(self, block: list[int]) -> None:
        first: dict[int, int] = {}
        for op in self.head:
            block[op] = first.setdefault(self.needed[op], op)

    def _merge_recvs(self, block: list[int]) -> None:
        sets = {self.needed[op] for op in range(len(self.problem)) if self.problem.kind[op] != RECV}
        signature = [0] * len(self.recvs)
        for number, bits in enumerate(sorted(sets)):
            while bits:
                lowest = bits & -bits
                signature[lowest.bit_length() - 1] |= 1 << number
                bits ^= lowest
        first: dict[tuple[int, int], int] = {}
        for number, op in enumerate(self.recvs):
            if self.head_needs >> number & 1:
                block[op] = first.setdefault((self.problem.resource[op], signature[number]), op)

    def _merge_tail(self, block: list[int]) -> None:
        last: int | None = None
        compute = set(self.tail)
        for op in reversed(self.tail):
            if self.needed[op] != self.consumed:
                continue
            if not self.leads[op]:
                last = op if last is None else last
                block[op] = last
                continue
            targets = {block[target] for target in self.consumers[op] if self.leads[target]}
            unmovable = any(self.problem.kind[target] == SEND for target in self.consumers[op])
            if len(targets) == 1 and not unmovable and (target := next(iter(targets))) in compute:
                block[op] = target

    def _merge_sends(self, block: list[int]) -> None:
        if self.head_needs != self.consumed or not self.head:
            return
        first: dict[tuple[int, frozenset[int]], int] = {}
        for op in range(len(self.problem)):
            if self.problem.kind[op] == SEND:
                waits = frozenset(block[source] for source in self.problem.inputs[op])
                block[op] = first.setdefault((self.problem.resource[op], waits), op)

    def _build(self, block: list[int]) -> ShopProblem:
        problem = self.problem
        members: dict[int, list[int]] = {}
        for op in range(len(problem)):
            members.setdefault(block[op], []).append(op)
        head = {block[op] for op in self.head}
        inputs: dict[int, set[int]] = {
            key: {block[source] for op in ops for source in problem.inputs[op]} - {key} for key, ops in members.items()
        }
        for key, sources in self._head_edges(head, block).items():
            inputs[key] = sources | (inputs[key] & head)
        last = [key for key in members if problem.kind[key] == COMPUTE and not self.leads[key] and key not in head]
        final = [key for key in last if self.needed[key] == self.consumed]
        for key in final:  # rule 5: after all other compute; one block at most
            inputs[key] |= {other for other in members if problem.kind[other] == COMPUTE and other != key}
        order = first_ready_first(inputs)
        place = {key: number for number, key in enumerate(order)}
        return ShopProblem(
            times=[sum(problem.times[op] for op in members[key]) for key in order],
            resource=[problem.resource[key] for key in order],
            kind=[problem.kind[key] for key in order],
            inputs=[sorted(place[source] for source in inputs[key]) for key in order],
            resources=problem.resources,
            members=[[original for op in members[key] for original in problem.members[op]] for key in order],
            head=frozenset(place[key] for key in head),
        )

    def _head_edges(self, head: set[int], block: list[int]) -> dict[int, set[int]]:
        """Return the inputs of the blocks of H: recvs, and blocks with a subset of them in place of those recvs.

        Jackson's rule runs a block with a subset of the recvs first, so that edge costs nothing.
        """
        by_size = sorted(head, key=lambda key: (self.needed[key].bit_count(), key))
        edges: dict[int, set[int]] = {}
        for number, key in enumerate(by_size):
            wanted, covered = self.needed[key], 0
            edges[key] = set()
            for other in reversed(by_size[:number]):
                bits = self.needed[other]
                if bits & ~wanted == 0 and bits & ~covered:
                    edges[key].add(other)
                    covered |= bits
                    if covered == wanted or len(edges[key]) >= _SUBSET_EDGES:
                        break
            rest = wanted & ~covered
            while rest:
                lowest = rest & -rest
                edges[key].add(block[self.recvs[lowest.bit_length() - 1]])
                rest ^= lowest
        return edges


def first_ready_first(inputs: Mapping[int, Collection[int]]) -> list[int]:
    """Return the keys with every key after its inputs, smallest first among the ready ones."""
    waiting = {key: len(sources) for key, sources in inputs.items()}
    consumers: dict[int, list[int]] = {key: [] for key in inputs}
    for key, sources in inputs.items():
        for source in sources:
            consumers[source].append(key)
    ready = [key for key, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        key = heapq.heappop(ready)
        order.append(key)
        for target in consumers[key]:
            waiting[target] -= 1
            if waiting[target] == 0:
                heapq.heappush(ready, target)
    assert len(order) == len(inputs), "the inputs form a cycle"
    return order


def reach(problem: ShopProblem) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Return which ops an op needs, directly or transitively, shape (n, n): row needs column."""
    found = np.zeros((len(problem), len(problem)), dtype=bool)
    for op, inputs in enumerate(problem.inputs):
        for source in inputs:
            found[op] |= found[source]
            found[op, source] = True
    return found


def lower_bound(problem: ShopProblem) -> int:
    """Return a lower bound on the makespan, whole time units. O(n^2 / 8 + n resources log n) for n blocks."""
    if not len(problem):
        return 0
    head, tail = problem.heads_and_tails
    return max(_one_machine(problem, resource, head.tolist(), tail.tolist()) for resource in range(problem.resources))


def numberings(problem: ShopProblem) -> list[list[int]]:
    """Return orders of the blocks to try in list schedules, each (n,), lower first.

    The order of the graph; the longest tail first; and either with the blocks in front that a send waits for directly:
    a channel that is fed early has less left over at the end.
    """
    tail = problem.heads_and_tails[1].tolist()
    count = len(problem)
    feeds = [any(problem.kind[target] == SEND for target in targets) for targets in problem.consumers]
    by_tail = sorted(range(count), key=lambda block: (-tail[block], block))
    found = []
    for order in (list(range(count)), by_tail):
        for first in (False, True):
            ranked = sorted(order, key=lambda block: not feeds[block]) if first else order
            numbers = [0] * count
            for place, block in enumerate(ranked):
                numbers[block] = place
            found.append(numbers)
    return found


def _rows_times(rows: NDArray[np.bool_], columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return ``rows @ columns`` in exact integers without a wide copy of the matrix."""
    parts = [rows[start : start + 256] @ columns for start in range(0, len(rows), 256)]
    return np.concatenate(parts)


def _after_head(problem: ShopProblem, needs: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return for ops that need all of H when H can be done at the earliest, 0 for the others."""
    blocks = sorted(problem.head)
    inside = np.zeros(len(problem), dtype=bool)
    inside[blocks] = True
    inside |= needs[blocks].any(axis=0)
    done = lower_bound(problem.part(np.flatnonzero(inside).tolist()))
    return np.where(needs[:, blocks].all(axis=1), done, 0)


def _one_machine(problem: ShopProblem, resource: int, head: Sequence[int], tail: Sequence[int]) -> int:
    """Return the preemptive optimum of one resource with heads and tails."""
    ops = sorted((head[op], op) for op in range(len(problem)) if problem.resource[op] == resource)
    left = {op: problem.times[op] for _, op in ops}
    available: list[tuple[int, int]] = []
    now, following, best = 0, 0, 0
    while following < len(ops) or available:
        if not available:
            now = max(now, ops[following][0])
        while following < len(ops) and ops[following][0] <= now:
            op = ops[following][1]
            heapq.heappush(available, (-tail[op], op))
            following += 1
        longest, op = available[0]
        until = now + left[op]
        if following < len(ops):
            until = min(until, ops[following][0])
        left[op] -= until - now
        now = until
        if left[op] == 0:
            heapq.heappop(available)
            best = max(best, now - longest)
    return best


def order_of(problem: ShopProblem, starts: Sequence[int], times: Sequence[int]) -> list[int]:
    """Return all ops by start, then end, then number.

    It is an order in which inputs and every resource's earlier ops come first, zero times included: along both kinds of
    edges none of the three decreases, and the number increases.
    """
    return sorted(range(len(problem)), key=lambda op: (starts[op], starts[op] + times[op], op))


def run_order(problem: ShopProblem, order: Sequence[int], times: Sequence[int]) -> list[int]:
    """Return the start of each op when every resource runs its ops in that order, each as early as it can be.

    Raises ValueError when an op stands before one of its inputs.
    """
    starts, ends = [0] * len(problem), [-1] * len(problem)
    free = [0] * problem.resources
    for op in order:
        begin = free[problem.resource[op]]
        for source in problem.inputs[op]:
            if ends[source] < 0:
                raise ValueError(f"op {op} stands before its input {source}")
            begin = max(begin, ends[source])
        starts[op], ends[op] = begin, begin + times[op]
        free[problem.resource[op]] = ends[op]
    return starts


def list_schedule(problem: ShopProblem, priority: Sequence[int]) -> list[int]:
    """Return starts when each free resource takes the ready op with the lowest number (ties: op number). O(n log n)."""
    pending = [len(inputs) for inputs in problem.inputs]
    ready: list[list[tuple[int, int]]] = [[] for _ in range(problem.resources)]
    for op, count in enumerate(pending):
        if count == 0:
            heapq.heappush(ready[problem.resource[op]], (priority[op], op))
    starts = [0] * len(problem)
    busy = [False] * problem.resources
    events: list[tuple[int, int]] = []
    now = 0
    while True:
        for resource in range(problem.resources):
            if not busy[resource] and ready[resource]:
                op = heapq.heappop(ready[resource])[1]
                busy[resource] = True
                starts[op] = now
                heapq.heappush(events, (now + problem.times[op], op))
        if not events:
            return starts
        now = events[0][0]
        while events and events[0][0] == now:
            op = heapq.heappop(events)[1]
            busy[problem.resource[op]] = False
            for target in problem.consumers[op]:
                pending[target] -= 1
                if pending[target] == 0:
                    heapq.heappush(ready[problem.resource[target]], (priority[target], target))


def expand(graph: Graph, problem: ShopProblem, starts: Sequence[int]) -> list[int]:
    """Return the graph's op indices in the order of a reduced schedule; free ops follow their last input at once."""
    consumers_ptr, consumers = graph.successors()
    pending = np.diff(graph.input_ptr).tolist()
    free = np.ones(len(graph), dtype=bool)
    free[[op for members in problem.members for op in members]] = False
    order: list[int] = []

    def place(op: int) -> None:
        todo = [op]
        while todo:
            placed = todo.pop()
            order.append(placed)
            for target in consumers[consumers_ptr[placed] : consumers_ptr[placed + 1]].tolist():
                pending[target] -= 1
                if pending[target] == 0 and free[target]:
                    todo.append(target)

    for op in np.flatnonzero(free & (np.diff(graph.input_ptr) == 0)).tolist():
        place(op)
    for block in order_of(problem, starts, problem.times):
        for op in problem.members[block]:
            place(op)
    return order
