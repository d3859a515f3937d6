"""A timed graph as a job shop: merged without losing optimality, bounded, and scheduled. Start at :func:`reduce`.

Every resource runs one op at a time, in any order that the inputs allow. Write H for the compute ops that every send needs
(all compute ops where there are no sends), D(op) for the recvs that op needs.

1. A compute op that takes no time and needs no recv directly can run at the instant when its last input ends, at which the
   compute resource is between two ops. It constrains nothing and is left out.
2. Ops of H with equal D form one block. Before the last of H has ended there are no sends, so only the arrival times of
   recvs matter. Sorting the ops until then by these times (Jackson's rule for one machine with release times) ends no later,
   keeps inputs before their consumers, because D grows along an edge, and puts ops of equal D side by side.
3. Recvs of one channel that are needed by the same blocks form one block, if H needs them: every send comes after them, so
   moving the earlier one next to the later one only lets the transfers in between start earlier.
4. A compute op outside H that needs all recvs, and whose consumers are all in one block of compute, joins that block:
   everything after it has all its recvs, so ops that ran in between can run earlier.
5. Compute ops outside H that need all recvs and lead to no send run last, as one block, for the same reason.
6. Sends of one channel that wait for the same block form one block, if H needs all recvs: nothing waits for sends, so a
   channel is done at the same time whichever of its waiting sends goes first.

The tests compare the reduced problem's least makespan with the unreduced one's.

:func:`lower_bound` returns a time that no order of the ops can beat, and is cheap enough for every graph. ``L``, the busiest
resource alone, ignores that an op must wait for its inputs. Here every op gets a head (the least time before it can start) and
a tail (the least time after it has ended), from all its ancestors and descendants on each resource. Each resource is then a
one-machine problem with heads and tails, whose preemptive optimum (Jackson's schedule: always run the available op with the
longest tail) no real schedule can beat.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from functools import reduce as fold
from operator import or_

import numpy as np

from ddltool.analyzers.step.transfers.timeline import play
from ddltool.arrays import Flags, Ints
from ddltool.dependencies import (
    as_matrix,
    bits_of,
    collected,
    first_ready_first,
    input_lists,
    reversed_edges,
    whole_times,
)
from ddltool.graph import COMPUTE, RECV, SEND, Graph

# An op without time is kept if it has more inputs times consumers than this: leaving it out would add so many edges.
_BYPASS_EDGES = 256
# Edges from blocks of H with a subset of the recvs replace edges from recvs; more than so many per block save nothing.
_SUBSET_EDGES = 8
# The ancestor matrix takes n^2 bytes; beyond this many blocks only paths are looked at.
_MATRIX_OPS = 6000
# How many rows of a matrix of flags are widened to integers at a time.
_ROWS_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class ShopProblem:
    """The job shop of ``n`` ops, or blocks of ops, in topological order: an input's index is below its consumer's.

    Every resource runs one op at a time. H are the compute ops that every send needs (all compute ops without sends).
    """

    times: Sequence[int]
    """(n,) durations in whole units, see :func:`~ddltool.dependencies.time_scale`."""
    resource: Sequence[int]
    """(n,) the resource on which each op runs, from 0 to ``resources`` - 1."""
    kind: Sequence[int]
    """(n,) ``COMPUTE``, ``RECV`` or ``SEND``."""
    inputs: Sequence[Sequence[int]]
    """The ops that must end before each op can start."""
    resources: int
    members: Sequence[Sequence[int]]
    """Op indices of the graph that each op stands for, in an order that their edges allow."""
    before_sends: frozenset[int] = frozenset()
    """The blocks of H; empty where the problem was not merged."""

    def __len__(self) -> int:
        """Return the number of ops, n."""
        return len(self.times)

    def part(self, chosen: Sequence[int], inputs: Sequence[Sequence[int]] | None = None) -> ShopProblem:
        """Return the problem of the ``chosen`` ops alone (ascending indices), which must include their inputs.

        ``inputs``: the inputs of all ops of this problem, in place of its own; None: its own.
        """
        new_index = {op: index for index, op in enumerate(chosen)}
        edges = self.inputs if inputs is None else inputs
        return ShopProblem(
            times=[self.times[op] for op in chosen],
            resource=[self.resource[op] for op in chosen],
            kind=[self.kind[op] for op in chosen],
            inputs=[[new_index[source] for source in edges[op]] for op in chosen],
            resources=self.resources,
            members=[self.members[op] for op in chosen],
        )

    def of_kind(self, kind: int) -> list[int]:
        """Return the indices of the ops of one kind, ascending."""
        return [op for op, op_kind in enumerate(self.kind) if op_kind == kind]

    @cached_property
    def consumers(self) -> list[list[int]]:
        """The ops of which each op is an input, ascending."""
        return reversed_edges(self.inputs)

    @cached_property
    def needed(self) -> list[int]:
        """The recvs that each op needs, itself included: bit k for the k-th of ``of_kind(RECV)``."""
        return collected(self.inputs, range(len(self)), self.of_kind(RECV))

    @cached_property
    def heads_and_tails(self) -> tuple[Ints, Ints]:
        """(n,) the least time before each op's start, and (n,) the least time after its end, in whole time units.

        All ops that an op needs, directly or not, run before it: those on one resource one after another, and those on a
        path to it, too. The same holds for the ops that need it.
        """
        count = len(self)
        times = np.array(self.times, dtype=np.int64)
        head, tail = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        if 0 < count <= _MATRIX_OPS:
            # (n, n) whether an op needs another one, directly or not, and (n, resources) the time of each op on its resource.
            needs = as_matrix(collected(self.inputs, range(count), range(count)), count)
            np.fill_diagonal(needs, val=False)
            by_resource = np.zeros((count, self.resources), dtype=np.int64)
            by_resource[np.arange(count), self.resource] = times
            head = _rows_times(needs, by_resource).max(axis=1)
            tail = _rows_times(np.ascontiguousarray(needs.T), by_resource).max(axis=1)
            if self.before_sends and len(self.before_sends) < count:
                head = np.maximum(head, self._before_sends_bound(needs))
        for op in range(count):
            for source in self.inputs[op]:
                head[op] = max(head[op], head[source] + times[source])
        for op in range(count - 1, -1, -1):
            for target in self.consumers[op]:
                tail[op] = max(tail[op], times[target] + tail[target])
        return head, tail

    def _before_sends_bound(self, needs: Flags) -> Ints:
        """Return (n,) a lower bound on the end of H for ops that need all of H, 0 for the others.

        ``needs`` (n, n): whether the op of a row needs that of a column, directly or not.
        """
        blocks = sorted(self.before_sends)
        is_needed = np.zeros(len(self), dtype=bool)  # the blocks of H, and all that they need
        is_needed[blocks] = True
        is_needed |= needs[blocks].any(axis=0)
        end_bound = lower_bound(self.part(np.flatnonzero(is_needed).tolist()))
        needs_all_blocks = needs[:, blocks].all(axis=1)
        return np.where(needs_all_blocks, end_bound, 0)


def _rows_times(rows: Flags, columns: Ints) -> Ints:
    """Return ``rows @ columns`` in exact integers, computed some rows at a time.

    numpy copies the flags to int64 for the product, which for all rows at once would take eight times their memory.
    """
    parts = [rows[start : start + _ROWS_AT_ONCE] @ columns for start in range(0, len(rows), _ROWS_AT_ONCE)]
    return np.concatenate(parts)


def unreduced(graph: Graph) -> ShopProblem:
    """Return the graph's ops as a job shop, in topological order and not merged: the only member of each op is itself.

    Raises InputError for ops without a duration.
    """
    order = graph.topological_order().tolist()
    new_index = {op: number for number, op in enumerate(order)}
    times, inputs = whole_times(graph).tolist(), input_lists(graph)
    return ShopProblem(
        times=[times[op] for op in order],
        resource=graph.resource[order].tolist(),
        kind=graph.kind[order].tolist(),
        inputs=[[new_index[source] for source in inputs[op]] for op in order],
        resources=len(graph.resource_names),
        members=[[op] for op in order],
    )


def reduce(graph: Graph) -> ShopProblem:
    """Return the merged problem of a timed graph, which has the graph's least makespan. O((n + e) r / 64 + b^2).

    n ops with e edges and r recvs become b blocks, by the rules in the module's docstring. A graph with several compute
    resources is only renumbered. Raises InputError for ops without a duration.
    """
    problem = unreduced(graph)
    if len(np.unique(graph.resource[graph.kind == COMPUTE])) != 1:
        return problem  # the rules hold for one compute resource
    return _merge_ops(_without_free_ops(problem))


def _without_free_ops(problem: ShopProblem) -> ShopProblem:
    """Return the problem without the compute ops of rule 1, which take no time and need no recv directly.

    The inputs of such an op become inputs of its consumers. Removed ops are members of no block.
    """
    inputs = [list(sources) for sources in problem.inputs]
    consumers = [list(targets) for targets in problem.consumers]
    removed: set[int] = set()
    for op in range(len(problem)):
        sources, targets = inputs[op], consumers[op]
        if problem.times[op] or problem.kind[op] != COMPUTE or len(sources) * len(targets) > _BYPASS_EDGES:
            continue
        if any(problem.kind[source] == RECV for source in sources):
            continue
        removed.add(op)
        for target in targets:
            inputs[target] = list(dict.fromkeys([*(source for source in inputs[target] if source != op), *sources]))
        for source in sources:
            consumers[source] = list(dict.fromkeys([*(user for user in consumers[source] if user != op), *targets]))
    return problem.part([op for op in range(len(problem)) if op not in removed], inputs)


def _merge_ops(problem: ShopProblem) -> ShopProblem:
    """Return the problem of the blocks that rules 2 to 6 of the module's docstring form; it needs one compute resource.

    H are the compute ops that every send needs.
    """
    # Sets of recvs and of sends are integers, with a bit for each.
    sends, compute = problem.of_kind(SEND), problem.of_kind(COMPUTE)
    needed = problem.needed  # by op, the recvs that it needs
    leads_to = collected(problem.consumers, range(len(problem) - 1, -1, -1), sends)  # by op, the sends that need it
    all_sends = (1 << len(sends)) - 1
    before_sends = [op for op in compute if leads_to[op] == all_sends]  # H
    needed_by_compute = fold(or_, (needed[op] for op in compute), 0)
    needed_before_sends = fold(or_, (needed[op] for op in before_sends), 0)
    block_of = list(range(len(problem)))  # by op, one of the ops of its block
    representative: dict[object, int] = {}  # by what the ops of a block have in common, the first of them
    for op in before_sends:  # rule 2: ops of H that need the same recvs
        block_of[op] = representative.setdefault(needed[op], op)
    recvs = problem.of_kind(RECV)
    needs = {needed[op] for op in (*compute, *sends)}
    users = as_matrix(sorted(needs), len(recvs)).T  # (recvs, sets) whether a recv is in each set that is needed
    for recv_index in bits_of(needed_before_sends):  # rule 3: recvs of one channel with the same users
        op = recvs[recv_index]
        block_of[op] = representative.setdefault((problem.resource[op], users[recv_index].tobytes()), op)
    after_all_recvs = [op for op in compute if leads_to[op] != all_sends and needed[op] == needed_by_compute]
    last_ops = [op for op in after_all_recvs if not leads_to[op]]
    for op in last_ops:  # rule 5: compute that leads to no send
        block_of[op] = last_ops[-1]
    for op in reversed(after_all_recvs):  # rule 4: compute whose consumers are one block
        targets = {block_of[target] for target in problem.consumers[op] if leads_to[target]}
        if len(targets) == 1 and all(problem.kind[target] == COMPUTE for target in problem.consumers[op]):
            block_of[op] = targets.pop()
    if before_sends and needed_before_sends == needed_by_compute:
        for op in sends:  # rule 6: sends of one channel that wait for the same blocks
            waits_for = frozenset(block_of[source] for source in problem.inputs[op])
            block_of[op] = representative.setdefault((problem.resource[op], waits_for), op)
    return _join_blocks(problem, block_of, {block_of[op] for op in before_sends}, last_ops[-1] if last_ops else None)


def _join_blocks(problem: ShopProblem, block: Sequence[int], before_sends: set[int], last: int | None) -> ShopProblem:
    """Return the problem whose ops are the blocks, in topological order; a block's key is one of its ops.

    Args:
        problem: the problem of the single ops.
        block: the key of each op's block.
        before_sends: the keys of the blocks of H.
        last: the key of the block of rule 5, which runs after all other compute; None where there is none.
    """
    members: dict[int, list[int]] = {}
    for op, key in enumerate(block):
        members.setdefault(key, []).append(op)
    # The edges of ops that lead from one block to another.
    inputs = {
        key: {block[source] for op in ops for source in problem.inputs[op]} - {key} for key, ops in members.items()
    }
    # A block of H has edges from recvs and from other blocks of H alone. Those from recvs give way to fewer that say the same.
    for key, sources in _edges_before_sends(problem, block, before_sends).items():
        inputs[key] = sources | (inputs[key] & before_sends)
    if last is not None:  # rule 5
        inputs[last] |= {other for other in members if problem.kind[other] == COMPUTE and other != last}
    order = _inputs_first(inputs)
    position = {key: index for index, key in enumerate(order)}
    return ShopProblem(
        times=[sum(problem.times[op] for op in members[key]) for key in order],
        resource=[problem.resource[key] for key in order],
        kind=[problem.kind[key] for key in order],
        inputs=[sorted(position[source] for source in inputs[key]) for key in order],
        resources=problem.resources,
        members=[[original for op in members[key] for original in problem.members[op]] for key in order],
        before_sends=frozenset(position[key] for key in before_sends),
    )


def _inputs_first(inputs: Mapping[int, set[int]]) -> list[int]:
    """Return the keys of ``inputs`` in an order in which each comes after its inputs, which are keys as well."""
    keys = sorted(inputs)
    key_index = {key: index for index, key in enumerate(keys)}
    indexed_inputs = [[key_index[source] for source in inputs[key]] for key in keys]
    return [keys[index] for index in first_ready_first(indexed_inputs)]


def _edges_before_sends(problem: ShopProblem, block: Sequence[int], before_sends: set[int]) -> dict[int, set[int]]:
    """Return, by key, the inputs of the blocks of H: recvs, and in place of some of them other blocks that need these.

    Jackson's rule runs a block that needs a subset of the recvs first, so that an edge from it loses nothing and replaces
    several edges. The arguments are those of :func:`_join_blocks`.
    """
    needed, recvs = problem.needed, problem.of_kind(RECV)
    by_size = sorted(before_sends, key=lambda key: (needed[key].bit_count(), key))
    edges: dict[int, set[int]] = {}
    for rank, key in enumerate(by_size):
        needed_recvs = needed[key]
        covered_recvs = 0  # those that the blocks in ``edges[key]`` need
        edges[key] = set()
        for other in reversed(by_size[:rank]):  # large subsets first: few edges then cover much
            other_recvs = needed[other]
            is_subset = other_recvs & ~needed_recvs == 0
            covers_more = other_recvs & ~covered_recvs != 0
            if is_subset and covers_more:
                edges[key].add(other)
                covered_recvs |= other_recvs
                if covered_recvs == needed_recvs or len(edges[key]) >= _SUBSET_EDGES:
                    break
        edges[key].update(block[recvs[recv]] for recv in bits_of(needed_recvs & ~covered_recvs))
    return edges


def lower_bound(problem: ShopProblem) -> int:
    """Return a lower bound on the makespan in whole time units: the largest of the bounds of the single resources.

    Each resource is a one-machine problem: a block can start after its head, the least time before its start, and the step
    ends no sooner than its tail after the block's end. For n blocks O(n^2 + n resources log n).
    """
    head, tail = (times.tolist() for times in problem.heads_and_tails)
    return max((_one_machine_bound(problem, resource, head, tail) for resource in range(problem.resources)), default=0)


def _one_machine_bound(problem: ShopProblem, resource: int, head: Sequence[int], tail: Sequence[int]) -> int:
    """Return the makespan of Jackson's preemptive schedule of one resource, which no real schedule can beat.

    The resource always runs the available op with the longest tail, and may interrupt another op for it. An op is available
    from ``head[op]`` on, and the step ends ``tail[op]`` after the op at the earliest. All times are whole units.
    """
    by_head = sorted((head[op], op) for op in range(len(problem)) if problem.resource[op] == resource)
    remaining = {op: problem.times[op] for _, op in by_head}
    available: list[tuple[int, int]] = []  # (-tail, op), a heap
    now = makespan = 0
    arrivals = 0  # how many ops have become available
    while arrivals < len(by_head) or available:
        if not available:
            now = max(now, by_head[arrivals][0])
        while arrivals < len(by_head) and by_head[arrivals][0] <= now:
            op = by_head[arrivals][1]
            heapq.heappush(available, (-tail[op], op))
            arrivals += 1
        negative_tail, op = available[0]
        run_until = now + remaining[op]
        if arrivals < len(by_head):  # the next arrival may have a longer tail
            run_until = min(run_until, by_head[arrivals][0])
        remaining[op] -= run_until - now
        now = run_until
        if remaining[op] == 0:
            heapq.heappop(available)
            makespan = max(makespan, now - negative_tail)
    return makespan


def numberings(problem: ShopProblem) -> list[list[int]]:
    """Return four lists (n,) of priority numbers of the blocks to try in list schedules; the lowest number goes first.

    The orders are the graph's, and the longest tail first; each also with the blocks for which a send waits directly moved to
    the front, because a channel that gets its sends early has less to do at the end.
    """
    _, tail = (times.tolist() for times in problem.heads_and_tails)
    feeds_a_send = [any(problem.kind[target] == SEND for target in targets) for targets in problem.consumers]
    in_graph_order = list(range(len(problem)))
    longest_tail_first = sorted(in_graph_order, key=lambda block: -tail[block])
    numbers = []
    for order in (in_graph_order, longest_tail_first):
        numbers += [_ranks(order), _ranks(sorted(order, key=lambda block: not feeds_a_send[block]))]
    return numbers


def _ranks(order: Sequence[int]) -> list[int]:
    """Return the inverse of a permutation: the position of each of 0 to n - 1 in ``order``."""
    ranks: list[int] = np.argsort(order).tolist()
    return ranks


def list_schedule(problem: ShopProblem, priority: Sequence[int]) -> list[int]:
    """Return (n,) the starts, in whole units, of the schedule in which each free resource takes the ready op that goes first.

    That is the op with the lowest ``priority`` (n,), of several the one with the lowest index. O(n log n).
    """
    numbers = _ranks(sorted(range(len(problem)), key=priority.__getitem__))
    input_counts = [len(sources) for sources in problem.inputs]
    unused_chance = random.Random(0)  # all numbers differ: nothing is left to it
    starts, _, _ = play(problem.times, problem.resource, problem.consumers, input_counts, numbers, unused_chance)
    return starts


def order_of(problem: ShopProblem, starts: Sequence[int], times: Sequence[int]) -> list[int]:
    """Return all ops sorted by start, then end, then index; ``starts`` and ``times`` (n,) in the same units.

    Every op comes after its inputs and after its resource's earlier ops, also ops of no duration: of two such ops, neither
    start nor end of the later one is smaller, and its index is larger.
    """
    return sorted(range(len(problem)), key=lambda op: (starts[op], starts[op] + times[op], op))


def run_order(problem: ShopProblem, order: Sequence[int], times: Sequence[int]) -> list[int]:
    """Return (n,) the start of each op if every resource runs its ops in ``order``, each as early as possible.

    ``times`` (n,): of the ops, in the units of the result, which may be a solver's. Raises ValueError if an op stands before
    one of its inputs.
    """
    starts, ends = [0] * len(problem), [-1] * len(problem)
    free_at = [0] * problem.resources
    for op in order:
        start = free_at[problem.resource[op]]
        for source in problem.inputs[op]:
            if ends[source] < 0:
                raise ValueError(f"op {op} stands before its input {source}")
            start = max(start, ends[source])
        starts[op], ends[op] = start, start + times[op]
        free_at[problem.resource[op]] = ends[op]
    return starts


def expand(problem: ShopProblem, whole: ShopProblem, starts: Sequence[int]) -> list[int]:
    """Return the ops of the unreduced problem ``whole`` in the order of a schedule of the reduced one, ``problem``.

    Ops without a block follow their last input. ``starts``: of the blocks of ``problem``, in whole units.
    """
    op_index = {op: index for index, (op,) in enumerate(whole.members)}
    positions = [-1] * len(whole)
    for block_position, block in enumerate(order_of(problem, starts, problem.times)):
        for op in problem.members[block]:
            positions[op_index[op]] = block_position
    block_ops = {op_index[op] for members in problem.members for op in members}
    for op in range(len(whole)):
        if op not in block_ops:
            positions[op] = max((positions[source] for source in whole.inputs[op]), default=-1)
    return sorted(range(len(whole)), key=lambda op: (positions[op], op))
