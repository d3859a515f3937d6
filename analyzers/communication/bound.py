"""A lower bound on the step time that no order of anything can beat, cheap enough for every graph.

``L``, the busiest resource alone, ignores that an op must wait for its inputs. Here every op gets a head (what must
happen before it can start) and a tail (what must happen after it ended), both from its whole set of ancestors and
descendants on each resource; each resource then is a one-machine problem with heads and tails, whose preemptive
optimum (Jackson's schedule: always run the available op with the longest tail) no real schedule can beat.
Start at :func:`lower_bound`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.communication.reduction import ShopProblem, reach
from ddltool.graph import SEND

# The ancestor matrix takes n^2 bytes; beyond this many blocks only paths are looked at.
_MATRIX_OPS = 6000


def lower_bound(problem: ShopProblem) -> int:
    """Return a lower bound on the makespan, whole time units. O(n^2 / 8 + n resources log n) for n blocks."""
    if not len(problem):
        return 0
    head, tail = heads_and_tails(problem)
    return max(_one_machine(problem, resource, head.tolist(), tail.tolist()) for resource in range(problem.resources))


def heads_and_tails(problem: ShopProblem) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each op the least time before its start and after its end, each shape (n,), whole time units."""
    count = len(problem)
    if count == 0:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    times = np.array(problem.times, dtype=np.int64)
    head, tail = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    consumers = problem.consumers()
    if count <= _MATRIX_OPS:
        needs = reach(problem)
        by_resource = np.zeros((count, problem.resources), dtype=np.int64)
        by_resource[np.arange(count), problem.resource] = times
        head = _rows_times(needs, by_resource).max(axis=1)
        tail = _rows_times(np.ascontiguousarray(needs.T), by_resource).max(axis=1)
        if problem.head and len(problem.head) < count:
            head = np.maximum(head, _after_head(problem, needs))
    for op in range(count):
        for source in problem.inputs[op]:
            head[op] = max(head[op], head[source] + times[source])
    for op in range(count - 1, -1, -1):
        for target in consumers[op]:
            tail[op] = max(tail[op], times[target] + tail[target])
    return head, tail


def numberings(problem: ShopProblem) -> list[list[int]]:
    """Return orders of the blocks to try in list schedules, each (n,), lower first.

    The order of the graph; the longest tail first; and either with the blocks in front that a send waits for directly:
    a channel that is fed early has less left over at the end.
    """
    tail = heads_and_tails(problem)[1].tolist()
    count = len(problem)
    feeds = [any(problem.kind[target] == SEND for target in targets) for targets in problem.consumers()]
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
