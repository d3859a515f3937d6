"""The event-driven timeline of one step: every resource runs one op at a time (TicTac, section 3.1).

A resource that is free picks, uniformly at random, among its ready ops with the lowest priority number and its ready
ops without one. Nothing is preempted; a resource never idles while one of its ops is ready. Start at :func:`simulate`;
the event loop, which list schedules share, is :func:`play`.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddltool.arrays import Floats
from ddltool.dependencies import time_scale, whole_times
from ddltool.graph import KINDS, Graph, natural_key


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """When each op ran, in the graph's op order: ``start_s`` and ``end_s`` (n,), seconds from the step's start."""

    start_s: Floats
    end_s: Floats
    makespan_s: float


# Later than every event; whole times add up to less (dependencies.time_scale).
_NEVER = 2**62
# In place of a running op: the resource waits for a ready op (idle), or picks one at this instant.
_IDLE, _PICKING = -1, -2


class Ready:
    """The ready ops of one resource: lists ("buckets") of those with one priority number, and those without a number."""

    __slots__ = ("buckets", "free", "order")

    def __init__(self) -> None:
        """Begin with no ready op."""
        self.free: list[int] = []
        """Ops without a priority number."""
        self.buckets: dict[int, list[int]] = {}
        """By priority number its ops; no bucket is empty."""
        self.order: list[int] = []
        """The numbers of the buckets, a heap."""

    def add(self, op: int, priority: int) -> None:
        """Add an op that became ready; a negative priority: the op has no number."""
        if priority < 0:
            self.free.append(op)
        elif priority in self.buckets:
            self.buckets[priority].append(op)
        else:
            self.buckets[priority] = [op]
            heapq.heappush(self.order, priority)

    def pick(self, chance: random.Random) -> int:
        """Remove and return a random one of the ops with the lowest number and those without one; -1: none is ready.

        All of these are equally likely. ``chance`` draws, and only if there are several.
        """
        lowest_bucket = self.buckets[self.order[0]] if self.order else []
        candidate_count = len(lowest_bucket) + len(self.free)
        if candidate_count == 0:
            return -1
        index = int(chance.random() * candidate_count) if candidate_count > 1 else 0
        if index < len(lowest_bucket):
            ops = lowest_bucket
        else:
            ops = self.free
            index -= len(lowest_bucket)
        op = ops[index]
        ops[index] = ops[-1]  # the last op takes its place, so that removing costs O(1)
        ops.pop()
        if ops is lowest_bucket and not lowest_bucket:
            del self.buckets[heapq.heappop(self.order)]
        return op


def play(
    times: Sequence[int],
    resource: Sequence[int],
    following: Sequence[Sequence[int]],
    inputs: Sequence[int],
    numbers: Sequence[int],
    chance: random.Random,
) -> tuple[list[int], list[int], int]:
    """Run all ops and return (starts, ends, last end): (n,) and (n,) in whole units, and the makespan. O((n + e) log n).

    All ops that end at one instant complete before any resource picks, so that a pick sees every ready op.

    Args:
        times: (n,) in whole units.
        resource: (n,) the index of each op's resource; a free resource ("lane") picks its next op, the lowest index first.
        following: the ops of which each op is an input.
        inputs: (n,) how many inputs each op has.
        numbers: (n,) priorities; negative: the op has none, and may be picked at any time.
        chance: decides among ops that may be picked.
    """
    lanes = range(max(resource, default=0) + 1)
    ready = [Ready() for _ in lanes]
    # Ops without a number are handled here and not by Ready, because calls take most of the time.
    unnumbered = [lane.free for lane in ready]  # by lane, its ready ops without a number
    numbered = [lane.order for lane in ready]  # by lane, the numbers of its other ready ops; empty if there are none
    draw = chance.random
    starts = [0] * len(times)
    ends = [0] * len(times)
    running = [_PICKING for _ in lanes]  # the op that each lane runs, or _IDLE or _PICKING
    until = [_NEVER for _ in lanes]  # when that op ends; the least of these is the next event
    pending = list(inputs)  # by op, how many of its inputs have not ended
    for op, count in enumerate(pending):
        if count == 0:
            ready[resource[op]].add(op, numbers[op])
    now = 0
    picking_lanes = list(lanes)  # those that pick an op at this instant, the lowest index first
    while True:
        for lane in picking_lanes:
            unnumbered_ops = unnumbered[lane]
            if numbered[lane]:
                op = ready[lane].pick(chance)
            elif not unnumbered_ops:
                running[lane] = _IDLE
                continue
            else:
                op = unnumbered_ops.pop()
                if unnumbered_ops:  # as in Ready.pick: the last op takes the place of the one that is drawn
                    index = int(draw() * (len(unnumbered_ops) + 1))
                    if index < len(unnumbered_ops):
                        op, unnumbered_ops[index] = unnumbered_ops[index], op
            running[lane] = op
            starts[op] = now
            until[lane] = ends[op] = now + times[op]
        next_event = min(until)
        if next_event == _NEVER:  # nothing runs, so the last op has ended at this instant
            return starts, ends, now
        now = next_event
        picking_lanes = []
        has_endings = True
        while has_endings:
            lane = until.index(now)
            picking_lanes.append(lane)
            op = running[lane]  # it ends at this instant
            running[lane] = _PICKING
            until[lane] = _NEVER
            for successor in following[op]:
                inputs_left = pending[successor] - 1
                pending[successor] = inputs_left
                if not inputs_left:
                    successor_lane = resource[successor]
                    if running[successor_lane] == _IDLE:
                        running[successor_lane] = _PICKING
                        picking_lanes.append(successor_lane)
                    if numbers[successor] < 0:
                        unnumbered[successor_lane].append(successor)
                    else:
                        ready[successor_lane].add(successor, numbers[successor])
            has_endings = now in until  # of another lane, at the same instant
        picking_lanes.sort()


class Simulator:
    """A graph prepared for many simulated runs.

    Inside, ops are numbered in the order of their names, so that a seed gives the same run whatever the order of the file.
    The arguments of :func:`play` are kept in this order; times are whole units, of which ``scale`` make a second.
    """

    def __init__(self, graph: Graph) -> None:
        """Prepare a timed graph. Raises InputError for ops without a duration."""
        self.file_order = sorted(range(len(graph)), key=lambda op: natural_key(graph.names[op]))
        """By an op's number here, its index in the graph."""
        inner_index = np.argsort(self.file_order)  # by an op's index in the graph, its number here
        self.scale = time_scale(graph)
        self.times = whole_times(graph)[self.file_order].tolist()
        self.resource = graph.resource[self.file_order].tolist()
        self.inputs = np.diff(graph.input_ptr)[self.file_order].tolist()
        pointers, targets = graph.successors()
        inner_targets = inner_index[targets]
        self.following = [sorted(inner_targets[pointers[op] : pointers[op + 1]].tolist()) for op in self.file_order]
        self._names = [graph.names[op] for op in self.file_order]

    def numbers(self, priority: Mapping[str, int] | None) -> list[int]:
        """Return the priority numbers of the ops in the simulator's own order, -1 for ops without one."""
        return [priority.get(name, -1) for name in self._names] if priority else [-1] * len(self._names)

    def run(self, priority: Mapping[str, int] | None, seed: int) -> Timeline:
        """Return one simulated run; ``seed`` decides its picks among ops of equal priority.

        ``priority``: numbers of 0 or more by op name; an op that it lacks has none; None: no op has a number.
        """
        chance = random.Random(seed)
        starts, ends, last = play(
            self.times, self.resource, self.following, self.inputs, self.numbers(priority), chance
        )
        start_s, end_s = np.empty(len(starts)), np.empty(len(starts))
        start_s[self.file_order] = np.array(starts, dtype=np.float64) / self.scale
        end_s[self.file_order] = np.array(ends, dtype=np.float64) / self.scale
        return Timeline(start_s=start_s, end_s=end_s, makespan_s=last / self.scale)


def simulate(graph: Graph, priority: Mapping[str, int] | None, seed: int) -> Timeline:
    """Return one run of a timed graph; see :class:`Simulator` for many, and :meth:`Simulator.run` for the arguments."""
    return Simulator(graph).run(priority, seed)


def to_chrome_trace(graph: Graph, timeline: Timeline, priority: Mapping[str, int] | None) -> dict[str, Any]:
    """Return a timeline as a mapping that, written as JSON, Perfetto and chrome://tracing open.

    Each op is an event in microseconds, each resource a thread. ``priority``: numbers by op name to show with the ops, None:
    there are none. Format: "Trace Event Format" (Google), complete ("X") and metadata ("M") events.
    """
    title = f"{graph.name} ({graph.mode}, simulated)"
    events: list[dict[str, Any]] = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}}]
    for lane, name in enumerate(graph.resource_names):
        events.append({"ph": "M", "pid": 0, "tid": lane, "name": "thread_name", "args": {"name": name}})
    for op, name in enumerate(graph.names):
        kind = KINDS[graph.kind[op]]
        start_s, end_s = float(timeline.start_s[op]), float(timeline.end_s[op])
        args: dict[str, Any] = {"kind": kind, "size_bytes": float(graph.size_bytes[op])}
        if graph.parameter[op] is not None:
            args["parameter"] = graph.parameter[op]
        if priority is not None and name in priority:
            args["priority"] = priority[name]
        events.append(
            {
                "ph": "X", "pid": 0, "tid": int(graph.resource[op]), "name": name, "cat": kind,
                "ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6, "args": args,
            }
        )  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}
