"""The event-driven timeline of one step: every resource runs one op at a time (TicTac, section 3.1).

A resource that is free picks, uniformly at random, among its ready ops with the lowest priority number and its ready
ops without one. Nothing is preempted; a resource never idles while one of its ops is ready. Start at :func:`simulate`.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.communication.properties import time_scale, whole_times
from ddltool.graph import KINDS, Graph, natural_key


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """When each op ran, in the graph's op order: ``start_s`` and ``end_s`` (n,), seconds from the step's start."""

    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    makespan_s: float


# Later than every event; whole times add up to less (properties.time_scale).
_NEVER = 2**62


class _Ready:
    """The ready ops of one resource: buckets by priority number, and those without one."""

    __slots__ = ("buckets", "free", "order")

    def __init__(self) -> None:
        self.free: list[int] = []
        self.buckets: dict[int, list[int]] = {}
        self.order: list[int] = []

    def add(self, op: int, priority: int) -> None:
        if priority < 0:
            self.free.append(op)
        elif priority in self.buckets:
            self.buckets[priority].append(op)
        else:
            self.buckets[priority] = [op]
            heapq.heappush(self.order, priority)

    def pick(self, chance: random.Random) -> int:
        """Take one op at random among the lowest bucket and the ops without a number; -1 when none is ready."""
        bucket = self.buckets[self.order[0]] if self.order else []
        total = len(bucket) + len(self.free)
        if total == 0:
            return -1
        place = int(chance.random() * total) if total > 1 else 0
        source = bucket if place < len(bucket) else self.free
        place = place if place < len(bucket) else place - len(bucket)
        op = source[place]
        source[place] = source[-1]
        source.pop()
        if source is bucket and not bucket:
            del self.buckets[heapq.heappop(self.order)]
        return op


class Simulator:
    """A graph prepared for many simulated runs. O((n + e) log n) each.

    Ops are numbered by name inside, so the same seed gives the same run whatever the order of the file.
    """

    def __init__(self, graph: Graph) -> None:
        """Prepare a timed graph. Raises InputError for ops without a duration."""
        count = len(graph)
        self._file_order = sorted(range(count), key=lambda op: natural_key(graph.names[op]))
        place = np.empty(count, dtype=np.intp)
        place[self._file_order] = np.arange(count)
        times = whole_times(graph)
        self._scale = time_scale(graph)
        self._times = times[self._file_order].tolist()
        self._resource = graph.resource[self._file_order].tolist()
        self._resources = len(graph.resource_names)
        self._names = [graph.names[op] for op in self._file_order]
        self._inputs = np.diff(graph.input_ptr)[self._file_order].tolist()
        self._patterns: dict[int, list[int]] = {}
        pointers, targets = graph.successors()
        moved = place[targets]
        self._next = [sorted(moved[pointers[op] : pointers[op + 1]].tolist()) for op in self._file_order]

    def run(self, priority: Mapping[str, int] | None, seed: int) -> Timeline:
        """Return one run under ``priority`` (op name to number >= 0; others have none)."""
        numbers = [priority.get(name, -1) for name in self._names] if priority else [-1] * len(self._names)
        starts, ends, last = self._events(numbers, random.Random(seed))
        count = len(self._names)
        start_s, end_s = np.empty(count), np.empty(count)
        start_s[self._file_order] = np.array(starts, dtype=np.float64) / self._scale
        end_s[self._file_order] = np.array(ends, dtype=np.float64) / self._scale
        return Timeline(start_s=start_s, end_s=end_s, makespan_s=last / self._scale)

    def _events(self, numbers: list[int], chance: random.Random) -> tuple[list[int], list[int], int]:
        """Run the event loop; return start and end times in whole units and the last end.

        Free resources pick in the order of their numbers; all ops that end at one instant are complete before any picks,
        so that a pick sees every ready op. A resource runs one op at a time: the next event is the least of their ends.
        """
        times, resource, following = self._times, self._resource, self._next
        pending = self._inputs.copy()
        ready = [_Ready() for _ in range(self._resources)]
        unnumbered = [lane.free for lane in ready]
        numbered = [lane.order for lane in ready]
        draw, patterns = chance.random, self._patterns
        starts, ends = [0] * len(times), [0] * len(times)
        running = [-1] * self._resources
        until = [_NEVER] * self._resources
        for op, count in enumerate(pending):
            if count == 0:
                ready[resource[op]].add(op, numbers[op])
        now = 0
        awake = sorted(set(resource))
        while True:
            for lane in awake:
                if running[lane] >= 0:
                    continue
                waiting = unnumbered[lane]
                if numbered[lane]:
                    op = ready[lane].pick(chance)
                elif not waiting:
                    continue
                else:
                    op = waiting.pop()
                    if waiting:  # the place of the one that was drawn is taken by the last
                        place = int(draw() * (len(waiting) + 1))
                        if place < len(waiting):
                            op, waiting[place] = waiting[place], op
                running[lane] = op
                starts[op] = now
                until[lane] = ends[op] = now + times[op]
            last, now = now, min(until)
            if now == _NEVER:
                return starts, ends, last
            woken = 0
            while now in until:
                lane = until.index(now)
                woken |= 1 << lane
                op, running[lane], until[lane] = running[lane], -1, _NEVER
                for successor in following[op]:
                    left = pending[successor] - 1
                    pending[successor] = left
                    if not left:
                        target = resource[successor]
                        if target != lane:
                            woken |= 1 << target
                        if numbers[successor] < 0:
                            unnumbered[target].append(successor)
                        else:
                            ready[target].add(successor, numbers[successor])
            awake = patterns.get(woken) or self._lanes(woken)

    def _lanes(self, woken: int) -> list[int]:
        """Return the set bits in ascending order; few patterns ever occur, so they are kept."""
        known = self._patterns.get(woken)
        if known is None:
            known = self._patterns[woken] = [lane for lane in range(self._resources) if woken >> lane & 1]
        return known


def simulate(graph: Graph, priority: Mapping[str, int] | None, seed: int) -> Timeline:
    """Return one run of a timed graph; see :class:`Simulator` for many."""
    return Simulator(graph).run(priority, seed)


def to_chrome_trace(graph: Graph, timeline: Timeline, priority: Mapping[str, int] | None) -> dict[str, Any]:
    """Return a timeline as a JSON-ready mapping that Perfetto and chrome://tracing open.

    One complete event per op, one thread per resource, microseconds.
    Format: "Trace Event Format" (Google), complete ("X") and metadata ("M") events.
    """
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": f"{graph.name} ({graph.mode}, simulated)"}}
    ]
    for lane, name in enumerate(graph.resource_names):
        events.append({"ph": "M", "pid": 0, "tid": lane, "name": "thread_name", "args": {"name": name}})
    for op in range(len(graph)):
        arguments: dict[str, Any] = {"kind": KINDS[graph.kind[op]], "size_bytes": float(graph.size_bytes[op])}
        if graph.parameter[op] is not None:
            arguments["parameter"] = graph.parameter[op]
        if priority is not None and graph.names[op] in priority:
            arguments["priority"] = priority[graph.names[op]]
        events.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": int(graph.resource[op]),
                "name": graph.names[op],
                "cat": KINDS[graph.kind[op]],
                "ts": float(timeline.start_s[op]) * 1e6,
                "dur": float(timeline.end_s[op] - timeline.start_s[op]) * 1e6,
                "args": arguments,
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
