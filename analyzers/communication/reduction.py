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
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddltool.analyzers.communication.properties import whole_times
from ddltool.graph import COMPUTE, RECV, SEND, Graph

# A free op with more inputs times consumers than this stays: taking it out would add too many edges.
_BYPASS_EDGES = 256
# Subset edges between blocks of H save edges from recvs; more than this many per block save nothing.
_SUBSET_EDGES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
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

    def part(self, chosen: Sequence[int]) -> ShopProblem:
        """Return the problem of some of the ops, ascending; they must hold all their inputs. Members are op numbers."""
        place = {op: number for number, op in enumerate(chosen)}
        return ShopProblem(
            times=[self.times[op] for op in chosen],
            resource=[self.resource[op] for op in chosen],
            kind=[self.kind[op] for op in chosen],
            inputs=[[place[source] for source in self.inputs[op]] for op in chosen],
            resources=self.resources,
            members=[[op] for op in chosen],
        )

    def consumers(self) -> list[list[int]]:
        """Return the reversed edges."""
        found: list[list[int]] = [[] for _ in self.times]
        for op, inputs in enumerate(self.inputs):
            for source in inputs:
                found[source].append(op)
        return found


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
    consumers = problem.consumers()
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
    return _keep(problem, [op for op in range(len(problem)) if op not in gone], inputs)


def _keep(problem: ShopProblem, kept: list[int], inputs: list[list[int]]) -> ShopProblem:
    place = {op: number for number, op in enumerate(kept)}
    return ShopProblem(
        times=[problem.times[op] for op in kept],
        resource=[problem.resource[op] for op in kept],
        kind=[problem.kind[op] for op in kept],
        inputs=[[place[source] for source in inputs[op]] for op in kept],
        resources=problem.resources,
        members=[problem.members[op] for op in kept],
    )


class _Reducer:
    """Rules 2 to 6 on a problem with one compute resource."""

    def __init__(self, problem: ShopProblem) -> None:
        self.problem = problem
        self.consumers = problem.consumers()
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
        order = _topological(inputs)
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


def _topological(inputs: dict[int, set[int]]) -> list[int]:
    """Return the keys with every key after its inputs, smallest first among the ready ones."""
    import heapq

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
    assert len(order) == len(inputs), "merging made a cycle"
    return order


def reach(problem: ShopProblem) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Return which ops an op needs, directly or transitively, shape (n, n): row needs column."""
    found = np.zeros((len(problem), len(problem)), dtype=bool)
    for op, inputs in enumerate(problem.inputs):
        for source in inputs:
            found[op] |= found[source]
            found[op, source] = True
    return found
