"""Schedules as one order of all ops: timing it, making one by list scheduling, taking it back to the graph."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.communication.properties import whole_times
from ddltool.analyzers.communication.reduction import ShopProblem
from ddltool.graph import Graph


def order_of(problem: ShopProblem, starts: Sequence[int], times: Sequence[int]) -> list[int]:
    """Return all ops by start, then end, then number.

    It is an order in which inputs and every resource's earlier ops come first, zero times included: along both kinds of
    edges none of the three decreases, and the number increases.
    """
    return sorted(range(len(problem)), key=lambda op: (starts[op], starts[op] + times[op], op))


def run_order(problem: ShopProblem, order: Sequence[int], times: Sequence[int]) -> list[int]:
    """Return the start of each op when every resource runs its ops in that order, each as early as it can be."""
    starts, ends = [0] * len(problem), [0] * len(problem)
    free = [0] * problem.resources
    for op in order:
        begin = free[problem.resource[op]]
        for source in problem.inputs[op]:
            begin = max(begin, ends[source])
        starts[op], ends[op] = begin, begin + times[op]
        free[problem.resource[op]] = ends[op]
    return starts


def list_schedule(problem: ShopProblem, priority: Sequence[int]) -> list[int]:
    """Return starts when each free resource takes the ready op with the lowest number (ties: op number). O(n log n)."""
    consumers = problem.consumers()
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
            for target in consumers[op]:
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


def time_order(graph: Graph, order: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return start and end of each op, each (n,) whole units, when every resource follows the order of all ops.

    Raises ValueError when an op stands before one of its inputs.
    """
    times, resource = whole_times(graph).tolist(), graph.resource.tolist()
    pointer, sources = graph.input_ptr.tolist(), graph.input_index.tolist()
    ends: list[int] = [-1] * len(graph)
    starts = [0] * len(graph)
    free = [0] * len(graph.resource_names)
    for op in order:
        begin = free[resource[op]]
        for source in sources[pointer[op] : pointer[op + 1]]:
            if ends[source] < 0:
                raise ValueError(f"{graph.names[op]} stands before its input {graph.names[source]}")
            begin = max(begin, ends[source])
        starts[op], ends[op] = begin, begin + times[op]
        free[resource[op]] = ends[op]
    return np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)
