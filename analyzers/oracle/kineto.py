"""Reading a torch profiler trace (Kineto, Chrome format): what ran, for how long, and what launched what.

Start at :func:`read_trace` (operators and what they launched) or :func:`read_steps` (how long steps took). The file is
streamed; kept are 20 to 48 bytes for every operator span, launch, wait and GPU activity.

What launched a kernel is found by the kernel's ``correlation`` id: the runtime call of that id, and the innermost span
around that call on its thread. ``External id`` is used only where no such call was recorded and the two ids differ:
older profilers write the correlation into both, where it collides with ids of unrelated operators.

Spans of a trace as columns: which lies in which, what runs below, and how long something was busy.

A span is one timed range on one CPU thread. Spans of a thread nest, so that each has at most one parent.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import ijson
import numpy as np

from ddltool.arrays import Flags, Floats, Indices, Ints, Places
from ddltool.artifacts import opened
from ddltool.errors import InputError, one_line

# Times that were cut to whole microseconds let a child stand out of its parent by as much.
_OVERHANG_S = 1.0e-6
_CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True, eq=False)
class Spans:
    """``m`` spans sorted by thread, then start, then longest first: a parent stands before what it holds."""

    key: Indices
    """(m,) index into the trace's names."""
    thread: Indices
    """(m,) number of the thread."""
    start_s: Floats
    duration_s: Floats
    parent: Indices
    """(m,) index of the span around it on the same thread, -1 at the top."""
    levels: list[Indices]
    """The spans of each depth that have a parent, shallowest first."""

    @classmethod
    def build(cls, key: Indices, thread: Indices, start_s: Floats, duration_s: Floats) -> tuple[Spans, Places]:
        """Return the sorted spans, and the order that sorts other columns likewise. O(m log m)."""
        order = np.lexsort((-duration_s, start_s, thread))
        key, thread, start_s, duration_s = key[order], thread[order], start_s[order], duration_s[order]
        parent, depth = _nest(thread, start_s, start_s + duration_s)
        by_depth = np.argsort(depth, kind="stable").astype(np.int32)
        levels = np.split(by_depth, np.cumsum(np.bincount(depth))[:-1])[1:] if depth.size else []
        table = cls(key=key, thread=thread, start_s=start_s, duration_s=duration_s, parent=parent, levels=levels)
        return table, order

    def __len__(self) -> int:
        return len(self.key)

    def below(self, marked: Flags) -> Flags:
        """Return (m,) whether any span around span i, itself left out, is marked. O(m)."""
        found = np.zeros(len(self), dtype=bool)
        for level in self.levels:
            around = self.parent[level]
            found[level] = found[around] | marked[around]
        return found

    def with_nested(self, amount: Floats) -> Floats:
        """Return (m,) each span's amount plus that of every span in it. O(m)."""
        total = amount.copy()
        for level in reversed(self.levels):
            np.add.at(total, self.parent[level], total[level])
        return total

    def innermost(self, thread: Indices, time_s: Floats) -> Indices:
        """Return (k,) the innermost span around each moment on its thread, -1 where there is none. O(k log m)."""
        found = np.full(len(time_s), -1, dtype=np.int32)
        for number in np.unique(thread):
            asked = np.flatnonzero(thread == number)
            first, last = np.searchsorted(self.thread, [number, number + 1])
            found[asked] = np.searchsorted(self.start_s[first:last], time_s[asked], side="right") - 1
            found[asked[found[asked] >= 0]] += np.int32(first)
        if not len(self):
            return found
        end = self.start_s + self.duration_s
        while (over := np.flatnonzero((found >= 0) & (end[found] < time_s))).size:
            found[over] = self.parent[found[over]]  # what started last is over: the moment lies in a span around it
        return found


def _nest(thread: Indices, start_s: Floats, end_s: Floats) -> tuple[Indices, Indices]:
    parents, depths = np.empty(len(thread), dtype=np.int32), np.empty(len(thread), dtype=np.int32)
    stack: list[tuple[int, float]] = []
    current = -1
    for first in range(0, len(thread), _CHUNK):  # Python floats of a chunk at a time: they take three times the memory
        part = slice(first, first + _CHUNK)
        rows = zip(thread[part].tolist(), start_s[part].tolist(), end_s[part].tolist(), strict=True)
        for position, (where, start, end) in enumerate(rows, first):
            if where != current:
                current = where
                stack.clear()
            while stack and (start >= stack[-1][1] or end > stack[-1][1] + _OVERHANG_S):
                stack.pop()
            parents[position] = stack[-1][0] if stack else -1
            depths[position] = len(stack)
            stack.append((position, end))
    return parents, depths


def union(intervals: Floats) -> Floats:
    """Return the union of intervals, start and end (2, n) seconds, as disjoint intervals (2, m) by time. O(n log n)."""
    if not intervals.size:
        return np.zeros((2, 0))
    start, end = intervals[:2, np.argsort(intervals[0], kind="stable")]
    reach = np.maximum.accumulate(end)
    new = np.concatenate([[True], start[1:] > reach[:-1]])
    return np.stack([start[new], np.append(reach[:-1][new[1:]], reach[-1])])


def clipped(intervals: Floats, low: float, high: float) -> Floats:
    """Return what of ordered, disjoint intervals (2, n) lies within a window."""
    first, last = np.searchsorted(intervals[1], low, side="right"), np.searchsorted(intervals[0], high, side="left")
    return np.clip(intervals[:, first:last], low, high)


_WHAT = "a torch profiler trace: the JSON file of export_chrome_trace, plain or gzip"
_STEP = re.compile(r"ProfilerStep#?\s*([0-9]+)$")
# One namespace, one name. Autograd's and the reducer's ranges hold operators and are none.
_OPERATOR = re.compile(r"(?!autograd::)[A-Za-z_]\w*::\w+$")
# The host side of a collective: its time is the network's, not compute.
_COMMUNICATION = re.compile(r"_?c10d(_functional)?::|record_param_comms$")
# A collective from the call to its completion, on the host. NCCL's says only when its kernel was launched.
_COLLECTIVE = re.compile(r"(gloo|mpi|ucc|nccl|xccl):(?!:)\w+$")

_COMPUTE_KERNEL, _COMMUNICATION_KERNEL, _COPY = range(3)
_ACTIVITY = {"kernel": _COMPUTE_KERNEL, "gpu_memcpy": _COPY, "gpu_memset": _COPY}
_SPANS = frozenset(["cpu_op", "user_annotation"])
_RUNTIME = frozenset(["cuda_runtime", "cuda_driver", "privateuse1_runtime", "privateuse1_driver"])
# What torch 1.8 to 1.11 called the same rows.
_EARLIER = {"operator": "cpu_op", "runtime": "cuda_runtime", "memcpy": "gpu_memcpy", "memset": "gpu_memset"}
_SYNC_ROWS = frozenset(["Device Sync", "Stream Sync", "Event Sync", "Context Sync", "Stream Wait Event"])
_NCCL_KERNEL = re.compile(r"[nr]ccl(?:Dev)?Kernel_?[A-Za-z]")
# Calls whose time grows with what comes in; which of several nested ones counts does not matter, all ranks call the same.
_PRODUCT = re.compile(r"aten::(mm|addmm|bmm|baddbmm|_?convolution|embedding|_?scaled_dot_product_\w+)$")
_DEEPEST = 4000  # brackets opened within one read of 64 KiB
# Names of kernels hold control characters now and then, which JSON does not allow.
_TO_BLANKS = bytes(32 if code < 32 else code for code in range(256))


@dataclass(frozen=True, kw_only=True, eq=False)
class ProfilerTrace:
    """One rank's trace. ``m`` spans in columns; times in seconds."""

    names: tuple[str, ...]
    """The distinct names of spans; ``spans.key`` points here."""
    spans: Spans
    device_s: Floats
    """(m,) compute kernels, copies and fills that a span and everything in it launched."""
    wait_s: Floats
    """(m,) time in which a span and everything in it waited for the device (cudaStreamSynchronize and the like)."""
    span_step: Indices
    """(m,) which of the steps a span starts in, -1 outside every step."""
    steps: int
    """How many ``ProfilerStep`` ranges there are."""

    @cached_property
    def is_operator(self) -> Flags:
        """(m,) whether a span is an operator call, not an annotation or an autograd range."""
        return self.marked(lambda name: _OPERATOR.match(name) is not None and _COMMUNICATION.match(name) is None)

    @cached_property
    def is_top(self) -> Flags:
        """(m,) whether a span is an operator call that no other operator makes."""
        return self.is_operator & ~self.spans.below(self.is_operator)

    @cached_property
    def time_s(self) -> Floats:
        """(m,) what a span takes: its kernels' time where it launched any, else its CPU time without waits."""
        return np.where(self.device_s > 0, self.device_s, np.maximum(self.spans.duration_s - self.wait_s, 0.0))

    def marked(self, wanted: Callable[[str], bool]) -> Flags:
        """Return (m,) whether ``wanted(name)`` holds for each span's name; called once per name."""
        return np.array([wanted(name) for name in self.names], dtype=bool)[self.spans.key]


@dataclass(frozen=True, kw_only=True, eq=False)
class TraceSteps:
    """The ``k`` steps of one rank's trace, in order; seconds."""

    where: str
    step_time_s: Floats
    """(k,) length of the ``ProfilerStep`` ranges."""
    communication_s: Floats
    """(k,) time in which NCCL kernels, or collectives of gloo, MPI and UCC ran."""
    exposed_s: Floats
    """(k,) the part of it in which no compute kernel ran; in a trace without kernels, no operator."""
    device: str | None
    """The GPU's name, where the trace gives it."""
    world_size: int | None
    remarks: tuple[str, ...] = ()
    """What was left out, a sentence each."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankTrace:
    """One rank's trace, as aligning ranks needs it; seconds on its own clock since ``epoch_s``."""

    where: str
    rank: int | None
    node: str
    epoch_s: float
    names: tuple[str, ...]
    spans: Spans
    steps: Steps
    groups: tuple[str, ...]
    """The distinct collectives: what is done, and among whom."""
    collectives: Floats
    """(3, n) group, start and end of each; on a GPU its kernel, else from the call to the completion."""
    kernels: Floats
    """(3, m) start, end and launch of compute kernels, copies and fills; none in a trace of the CPU alone."""
    work: Floats
    """(2, p) start, and elements of the tensors, of matrix products and convolutions, where the trace has shapes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """The ``k`` steps of a trace that hold work, by time; seconds."""

    number: Indices
    start_s: Floats
    length_s: Floats
    until_s: Floats
    """(k,) where the next step begins, one that is left out included; infinite for the trace's last."""
    end_s: float
    """Where the trace's last step ends: what is launched later belongs to none."""
    left_out: tuple[str, ...]
    """A sentence for the steps without part in this, if any."""

    def at(self, time_s: Floats) -> Indices:
        """Return (m,) the step in which each moment lies, -1 outside every step.

        By time and not by nesting: the backward pass runs on autograd's own thread.
        """
        if not len(self.start_s):
            return np.full(len(time_s), -1, dtype=np.int32)
        place = np.searchsorted(self.start_s, time_s, side="right") - 1
        inside = (place >= 0) & (time_s < (self.start_s + self.length_s)[place])
        return np.where(inside, place, -1).astype(np.int32)


def read_trace(path: str | Path) -> ProfilerTrace:
    """Return what a profiler trace (JSON or gzip, told by its first bytes) says about operators and kernels.

    Streamed: O(file + m log m) time. Raises InputError (one line) for a missing, empty, cut-off or malformed file, for
    one without operator or kernel events, and for an event with an infinite or negative duration, which is named.
    """
    rows = _Rows(path)
    activities = rows.table("activities")
    if not rows.categories["cpu_op"] and not activities.size:
        kinds = ", ".join(sorted(rows.categories)[:8]) or "none at all"
        remedy = "profile the CPU too, and export a scheduled profile from on_trace_ready"
        raise InputError(str(path), f"has no cpu_op and no kernel events (found: {kinds})", remedy)
    spans, order = rows.spans()
    launcher = _launchers(rows, spans, order)
    own = (activities[0] != _COMMUNICATION_KERNEL) & (launcher >= 0)
    thread, start, duration = rows.table("waits")
    waiter = spans.innermost(thread.astype(np.int32), start * 1e-6)
    waits = waiter >= 0
    steps = rows.steps(spans)
    return ProfilerTrace(
        names=rows.names,
        spans=spans,
        device_s=spans.with_nested(_sums(launcher[own], activities[3][own] * 1e-6, len(spans))),
        wait_s=spans.with_nested(_sums(waiter[waits], duration[waits] * 1e-6, len(spans))),
        span_step=steps.at(spans.start_s),
        steps=len(steps.start_s),
    )


def read_steps(path: str | Path) -> TraceSteps:
    """Return the steps of a profiler trace, streamed: O(file + m log m) time for m events that are kept.

    GPU work counts in the step in whose time it runs; what the last step launched counts in the last step, whenever it
    runs, since the GPU lags behind, and nothing that was launched later does. Steps that hold less than half of the work
    of the fullest (stubs, cut ones) are left out and said. Raises InputError (one line) for what is no whole trace, and
    for one without a ``ProfilerStep`` that holds work.
    """
    rows = _Rows(path)
    spans = rows.spans()[0]
    steps = rows.steps(spans)
    if not len(steps.start_s):
        raise InputError(str(path), "has no ProfilerStep range with work", "call prof.step() after every training step")
    found = np.zeros((3, len(steps.start_s)))
    for compute, communication in rows.busy(spans, steps.end_s):
        kinds = (compute, communication, np.concatenate([compute, communication], axis=1))
        for place, (start, length) in enumerate(kinds):
            found[place] += busy_within(start, length, steps.start_s, steps.until_s)
    header = _header(path)
    name, size = header.get("deviceProperties.item.name"), header.get("distributedInfo.world_size")
    return TraceSteps(
        where=str(path),
        step_time_s=steps.length_s,
        communication_s=found[1],
        exposed_s=np.maximum(found[2] - found[0], 0.0),
        device=name if isinstance(name, str) and name.strip() else None,
        world_size=size if type(size) is int and size >= 1 else None,
        remarks=steps.left_out,
    )


def read_rank(path: str | Path) -> RankTrace:
    """Return one rank's trace for :mod:`ddltool.analyzers.stragglers`, streamed. Raises InputError as read_steps does."""
    rows = _Rows(path)
    spans = rows.spans()[0]
    steps = rows.steps(spans)
    if not len(steps.start_s):
        raise InputError(str(path), "has no ProfilerStep range with work", "call prof.step() after every training step")
    kind, _, start, duration, _, _, group = rows.table("activities")
    launched = rows.launched_s()
    remote = kind == _COMMUNICATION_KERNEL
    times = np.stack([start, start + duration, launched * 1e6]) * 1e-6
    host = rows.collectives()
    names = tuple(rows.known["group"])
    of_host = np.stack([host[0] + len(names), host[1], host[1] + host[2]])
    header = _header(path)
    rank, node = header.get("distributedInfo.rank"), header.get("host_name")
    base_ns = header.get("baseTimeNanoseconds", 0)
    return RankTrace(
        where=str(path),
        rank=rank if type(rank) is int and rank >= 0 else None,
        node=str(node or ""),
        epoch_s=(rows.base_us or 0.0) * 1e-6 + float(base_ns) * 1e-9,
        names=rows.names,
        spans=spans,
        steps=steps,
        groups=(*names, *rows.names),
        collectives=np.concatenate([np.stack([group, times[0], times[1]])[:, remote], of_host], axis=1),
        kernels=times[:, ~remote],
        work=rows.table("work") * np.array([[1e-6], [1.0]]),
    )


def _launchers(rows: _Rows, spans: Spans, order: Places) -> Indices:
    """Return (k,) the innermost span that launched each GPU activity, -1 where none was recorded."""
    correlation, external = rows.table("activities")[4:6]
    identity, thread, time = rows.table("launches")
    call = _lookup(identity, correlation)
    found = np.full(len(correlation), -1, dtype=np.int32)
    known = call >= 0
    found[known] = spans.innermost(thread[call[known]].astype(np.int32), time[call[known]] * 1e-6)
    other = ~known & (external > 0) & (external != correlation)
    found[other] = _lookup(rows.table("ranges")[2][order], external[other])
    return found


def _lookup(ids: Floats, asked: Floats) -> Ints:
    """Return where each asked id stands in ``ids``, -1 where it does not."""
    if not len(ids):
        return np.full(len(asked), -1, dtype=np.int64)
    order = np.argsort(ids, kind="stable")
    place = np.minimum(np.searchsorted(ids, asked, sorter=order), len(ids) - 1)
    return np.where(ids[order[place]] == asked, order[place], -1)


def _sums(place: Indices, amount: Floats, size: int) -> Floats:
    """Return (size,) the sum of the amounts at each place."""
    return np.bincount(place, weights=amount, minlength=size).astype(np.float64)


def busy_within(start: Floats, duration: Floats, begin: Floats, end: Floats) -> Floats:
    """Return (k,) the busy time inside each window [begin, end), overlapping intervals counted once. O(n log n + k)."""
    busy = union(np.stack([start, start + duration]))
    windows = zip(begin.tolist(), end.tolist(), strict=True)
    return np.array([float(np.diff(clipped(busy, low, high), axis=0).sum()) for low, high in windows])


class _Rows:
    """The rows of a trace by kind, a flat array each: what is kept of an event, number after number.

    Times are microseconds after the first event's: an epoch in microseconds leaves a float a quarter of a microsecond.
    """

    # How many numbers a row has, in the order in which :meth:`_take` adds them.
    WIDTH: Mapping[str, int] = {"ranges": 5, "launches": 3, "waits": 3, "activities": 7, "collectives": 4, "work": 2}

    def __init__(self, path: str | Path) -> None:
        self.where = str(path)
        self.categories: Counter[str] = Counter()
        self._rows = {kind: array("d") for kind in self.WIDTH}
        self.known: dict[str, dict[str, int]] = {"name": {}, "thread": {}, "device": {}, "group": {}}
        self.base_us: float | None = None
        for number, event in enumerate(read_events(path)):
            if not isinstance(event, dict):
                raise InputError(self.where, f"event {number} is no JSON object", "export the trace again")
            if event.get("ph") == "X":
                self._take(event, number)
            else:
                self.categories[str(event.get("cat", event.get("ph")))] += 1

    def steps(self, spans: Spans) -> Steps:
        """Return the steps, without those that hold less than half of the operators and GPU work of the fullest."""
        numbers = [int(found[1]) if (found := _STEP.match(name)) else -1 for name in self.names]
        number = np.array(numbers or [-1], dtype=np.int64)[spans.key]
        at = np.flatnonzero(number >= 0)
        at = at[np.unique(number[at], return_index=True)[1]]  # other threads may carry the same range again
        at = at[np.argsort(spans.start_s[at], kind="stable")]
        start, length = spans.start_s[at], spans.duration_s[at]
        every = Steps(
            number=number[at].astype(np.int32),
            start_s=start,
            length_s=length,
            until_s=np.append(start[1:], np.inf)[: len(start)],
            end_s=float((start + length).max(initial=0.0)),
            left_out=(),
        )
        operator = np.array([_OPERATOR.match(name) is not None for name in self.names], dtype=bool)
        called = spans.start_s[operator[spans.key]] if len(spans) else start
        work = np.concatenate([called, self.launched_s()])
        place = every.at(work)
        held = np.bincount(place[place >= 0], minlength=len(start))
        kept = (held > 0) & (2 * held >= held.max(initial=0))
        if kept.all():
            return every
        shown = [
            f"{number[at[row]]} ({length[row] * 1e3:.3g} ms, {held[row]} of {held.max()} calls)"
            for row in np.flatnonzero(~kept)
        ]
        said = f"{len(shown)} of {len(kept)} steps hold less than half of the work and are left out: {', '.join(shown[:4])}"
        columns = {name: getattr(every, name)[kept] for name in ("number", "start_s", "length_s", "until_s")}
        return Steps(**columns, end_s=every.end_s, left_out=(said,))

    def launched_s(self) -> Floats:
        """Return (n,) when the host launched each GPU activity; its own start where no launch was recorded."""
        _, _, start, _, correlation, _, _ = self.table("activities")
        identity, _, time = self.table("launches")
        call = _lookup(identity, correlation)
        launched: Floats = np.where(call >= 0, time[call] if len(time) else start, start) * 1e-6
        return launched

    def collectives(self) -> Floats:
        """Return (3, n) name, start and duration of the host's collectives, NCCL's left out: theirs is their launch."""
        name, _, start, duration = self.table("collectives")
        own = [not name.startswith(("nccl", "xccl")) for name in self.names] or [False]
        kept = np.array(own)[name.astype(np.intp)]
        return np.stack([name[kept], start[kept] * 1e-6, duration[kept] * 1e-6])

    def busy(self, spans: Spans, end_s: float) -> Iterator[tuple[Floats, Floats]]:
        """Yield start and duration (2, n) of compute and of communication, of each device, launched before ``end_s``.

        Without kernels it is the host that computes: its operators, and the collectives of its own libraries.
        """
        kind, device, start, duration, _, _, _ = self.table("activities")
        times, launched = np.stack([start, duration]) * 1e-6, self.launched_s() < end_s
        host = self.collectives()[1:]
        host = host[:, host[0] < end_s]
        compute, communication = (launched & (kind == which) for which in (_COMPUTE_KERNEL, _COMMUNICATION_KERNEL))
        for number in np.unique(device[compute | communication]):
            here = device == number
            yield times[:, compute & here], np.concatenate([times[:, communication & here], host], axis=1)
            host = host[:, :0]
        if host.size:
            operator = [_OPERATOR.match(name) is not None and not _COMMUNICATION.match(name) for name in self.names]
            rows = np.array(operator or [False])[spans.key] & (spans.start_s < end_s)
            yield np.stack([spans.start_s[rows], spans.duration_s[rows]]), host

    @property
    def names(self) -> tuple[str, ...]:
        """The distinct names of spans, by number."""
        return tuple(self.known["name"])

    def table(self, kind: str) -> Floats:
        """Return (width, n) the columns of the n rows of one kind."""
        return np.frombuffer(self._rows[kind]).reshape(-1, self.WIDTH[kind]).T

    def spans(self) -> tuple[Spans, Places]:
        """Return the spans, nested, and the order that sorts other columns of spans likewise."""
        name, thread, _, start, duration = self.table("ranges")
        return Spans.build(name.astype(np.int32), thread.astype(np.int32), start * 1e-6, duration * 1e-6)

    def _take(self, event: Mapping[str, Any], number: int) -> None:
        start, duration = self._time(event, "ts", number), self._time(event, "dur", number)
        if start is None or (duration is not None and duration < 0):
            problem = "has no ts" if start is None else f"dur is {event['dur']}"
            raise self._bad(event, number, problem)
        self.base_us = start if self.base_us is None else self.base_us
        start, duration = start - self.base_us, duration or 0.0
        category = str(event.get("cat", "")).lower()
        category = _EARLIER.get(category, category)
        self.categories[category] += 1
        name, thread = str(event.get("name", "")), f"{event.get('pid')} {event.get('tid')}"
        told = event.get("args")
        args: Mapping[str, Any] = told if isinstance(told, dict) else {}
        correlation = _identity(args.get("correlation"))
        external = _identity(args.get("External id", args.get("external id")))
        if category in _SPANS and _COLLECTIVE.match(name):
            self._add("collectives", self._number("name", name), self._number("thread", thread), start, duration)
        elif category in _SPANS:
            self._add("ranges", self._number("name", name), self._number("thread", thread), external, start, duration)
            if "Input Dims" in args and _PRODUCT.match(name):
                self._add("work", start, _elements(args["Input Dims"]))
        elif category in _RUNTIME:
            at = self._number("thread", thread)
            if name.endswith("Synchronize"):
                self._add("waits", at, start, duration)
            if correlation > 0:
                self._add("launches", correlation, at, start)
        elif category in _ACTIVITY and name not in _SYNC_ROWS:
            kind, group = _ACTIVITY[category], -1
            if kind == _COMPUTE_KERNEL and (found := _NCCL_KERNEL.match(name)):
                what = name[found.end() - 1 :].split("_")[0]
                kind, group = (
                    _COMMUNICATION_KERNEL,
                    self._number("group", f"{what} {args.get('Process Group Ranks', '')}"),
                )
            device = self._number("device", str(args.get("device", event.get("pid"))))
            self._add("activities", kind, device, start, duration, correlation, external, group)

    def _add(self, kind: str, *row: float) -> None:
        self._rows[kind].extend(row)

    def _number(self, kind: str, key: str) -> int:
        return self.known[kind].setdefault(key, len(self.known[kind]))

    def _time(self, event: Mapping[str, Any], field: str, number: int) -> float | None:
        value = event.get(field)
        if value is None:
            return None
        try:
            found = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            found = math.nan
        if not math.isfinite(found):
            raise self._bad(event, number, f"{field} is {str(value)[:40]}")
        return found

    def _bad(self, event: Mapping[str, Any], number: int, problem: str) -> InputError:
        name = str(event.get("name", "without a name"))[:80]
        remedy = "times are microseconds, finite, and no duration is negative"
        return InputError(self.where, f"event {number} ({name}): {problem}", remedy)


def _elements(shapes: Any) -> float:
    """Return how many elements the call's tensors have together, of ``[[4, 8], [], [8]]``."""
    lists = [shape for shape in shapes if isinstance(shape, list)] if isinstance(shapes, list) else []
    return float(
        sum(math.prod(float(size) for size in shape if isinstance(size, (int, float))) for shape in lists if shape)
    )


def _identity(value: Any) -> int:
    """Return an id as an integer that a float holds exactly, -1 where there is none."""
    try:
        number = -1 if value is None else int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if abs(number) < 2**53 else -1


def read_events(path: str | Path) -> Iterator[Any]:
    """Yield the members of ``traceEvents``, or of a bare list of events, in file order; one is in memory at a time.

    Raises InputError when the file is missing, empty, cut off or not JSON.
    """
    with _opened(path) as (stream, is_list):
        yield from ijson.items(stream, "item" if is_list else "traceEvents.item")


def _header(path: str | Path) -> dict[str, Any]:
    """Return the first value at each place of the document before its events, by ijson's name of the place."""
    found: dict[str, Any] = {}
    with _opened(path) as (stream, _):
        for prefix, _, value in ijson.parse(stream):
            if prefix.startswith(("traceEvents", "item")):
                break
            found.setdefault(prefix, value)
    return found


class _Text:
    """A binary stream without control characters, and without the nesting on which a parser's time is quadratic."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(size)
        if data.count(b"[") + data.count(b"{") - data.count(b"]") - data.count(b"}") > _DEEPEST:
            raise ijson.JSONError("nested too deeply")
        return data.translate(_TO_BLANKS)


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple[_Text, bool]]:
    """Open a trace, plain or gzip by its first bytes, and tell whether it is a list; its errors become one line."""
    where = str(path)
    try:
        with opened(path) as stream:
            head = stream.peek(256)
            if not head:
                raise InputError(where, "is empty", f"expected {_WHAT}")
            if head.startswith(b"\xef\xbb\xbf"):
                stream.read(3)
            yield _Text(stream), head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
    except (ijson.JSONError, UnicodeDecodeError) as error:
        problem = f"is not JSON, or is cut off ({one_line(str(error))[:120]})"
        raise InputError(where, problem, f"expected {_WHAT}") from None
