"""Reading a torch profiler trace (Kineto, Chrome format): what ran, for how long, and what launched what.

Start at :func:`read_trace` (operators and their kernels) or :func:`read_steps` (step times). The file is streamed;
20 to 48 bytes are kept for every operator span, launch, wait and GPU activity.

What launched a kernel is found by the kernel's ``correlation`` id: the runtime call of that id, and the innermost span
around that call on its thread. ``External id`` is used only where no such call was recorded and the two ids differ:
older profilers write the correlation into both, where it collides with ids of unrelated operators.

A span is one timed range on one CPU thread. Spans of a thread nest, so that each has at most one parent.
"""

from __future__ import annotations

import math
import re
from array import array
from codecs import BOM_UTF8
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

# A child span may end this much after its parent: some profilers cut times to whole microseconds.
_OVERHANG_S = 1.0e-6
# How many rows of a column are turned into Python objects at a time.
_CHUNK = 1 << 16
# How many of the steps that are left out a remark names.
_STEPS_SHOWN = 4
# Integers below this are exact as floats, in which all columns are kept.
_EXACT_BELOW = 2**53


@dataclass(frozen=True, kw_only=True, eq=False)
class TraceSpans:
    """``m`` spans sorted by thread, then start, then longest first: a parent stands before its children."""

    key: Indices
    """(m,) index of the span's name in ``ProfilerTrace.names``."""
    thread: Indices
    """(m,) number of the thread."""
    start_s: Floats
    duration_s: Floats
    parent: Indices
    """(m,) index of the span around it on the same thread, -1 at the top."""
    levels: list[Indices]
    """The spans of each depth that have a parent, shallowest first."""

    @classmethod
    def build(cls, key: Indices, thread: Indices, start_s: Floats, duration_s: Floats) -> tuple[TraceSpans, Places]:
        """Return the spans of these columns (m,), sorted and nested, and the (m,) indices by which they were sorted.

        The columns are those of the class, in any order of rows. Indexing another column of the same spans with the indices
        sorts it likewise. O(m log m).
        """
        order = np.lexsort((-duration_s, start_s, thread))
        key, thread, start_s, duration_s = key[order], thread[order], start_s[order], duration_s[order]
        parent, depth = _nested(thread, start_s, start_s + duration_s)
        by_depth = np.argsort(depth, kind="stable").astype(np.int32)
        level_ends = np.cumsum(np.bincount(depth))
        levels = np.split(by_depth, level_ends[:-1])[1:] if depth.size else []  # without the top, which has no parents
        table = cls(key=key, thread=thread, start_s=start_s, duration_s=duration_s, parent=parent, levels=levels)
        return table, order

    def __len__(self) -> int:
        """Return the number of spans, m."""
        return len(self.key)

    def below(self, marked: Flags) -> Flags:
        """Return (m,) whether any ancestor of each span is ``marked`` (m,); a span's own mark does not count. O(m)."""
        # Level by level, so that parents are done before their children.
        is_below = np.zeros(len(self), dtype=bool)
        for level in self.levels:
            parents = self.parent[level]
            is_below[level] = is_below[parents] | marked[parents]
        return is_below

    def with_nested(self, amount: Floats) -> Floats:
        """Return (m,) each span's ``amount`` (m,) plus the amounts of all its descendants. O(m)."""
        total = amount.copy()
        for level in reversed(self.levels):
            np.add.at(total, self.parent[level], total[level])
        return total

    def innermost(self, thread: Indices, time_s: Floats) -> Indices:
        """Return (k,) the index of the innermost span around each of k moments, -1 outside every span. O(k log m).

        ``thread`` (k,): the thread on which to look; ``time_s`` (k,): the moment, on the clock of ``start_s``.
        """
        # First the span that started last before each moment on its thread, whether it has ended or not.
        span_of = np.full(len(time_s), -1, dtype=np.int32)
        for thread_number in np.unique(thread):
            moments = np.flatnonzero(thread == thread_number)
            first, last = np.searchsorted(self.thread, [thread_number, thread_number + 1])  # the thread's spans
            index_in_thread = np.searchsorted(self.start_s[first:last], time_s[moments], side="right") - 1
            span_of[moments] = np.where(index_in_thread >= 0, index_in_thread + first, -1)
        if not len(self):
            return span_of
        end_s = self.start_s + self.duration_s
        # An index of -1 reads the last span's end, which has no effect, because the first condition is false there.
        while (ended := np.flatnonzero((span_of >= 0) & (end_s[span_of] < time_s))).size:
            span_of[ended] = self.parent[span_of[ended]]  # the moment lies after this span, and may lie in its parent
        return span_of


def _nested(thread: Indices, start_s: Floats, end_s: Floats) -> tuple[Indices, Indices]:
    """Return (m,) each span's parent index (-1 at the top) and (m,) its depth (0 at the top).

    The columns (m,) are those of spans sorted as in :class:`TraceSpans`, so that the spans that are open at any start form a
    stack. Times are seconds.
    """
    parents = np.empty(len(thread), dtype=np.int32)
    depths = np.empty(len(thread), dtype=np.int32)
    open_spans: list[tuple[int, float]] = []  # index and end, outermost first
    current_thread = -1
    # Python floats take three times an array's memory: they are made a chunk at a time.
    for chunk_start in range(0, len(thread), _CHUNK):
        chunk = slice(chunk_start, chunk_start + _CHUNK)
        rows = zip(thread[chunk].tolist(), start_s[chunk].tolist(), end_s[chunk].tolist(), strict=True)
        for span_index, (row_thread, start, end) in enumerate(rows, chunk_start):
            if row_thread != current_thread:
                current_thread = row_thread
                open_spans.clear()
            # Close spans that have ended at this start, or that this span outlasts, so that it is no child of theirs.
            while open_spans and (start >= open_spans[-1][1] or end > open_spans[-1][1] + _OVERHANG_S):
                open_spans.pop()
            parents[span_index] = open_spans[-1][0] if open_spans else -1
            depths[span_index] = len(open_spans)
            open_spans.append((span_index, end))
    return parents, depths


def union(intervals: Floats) -> Floats:
    """Return the union of intervals as disjoint intervals (2, m), sorted by time. O(n log n).

    ``intervals``: (2, n) starts and ends in seconds; further rows are ignored.
    """
    if not intervals.size:
        return np.zeros((2, 0))
    start, end = intervals[:2, np.argsort(intervals[0], kind="stable")]
    latest_end = np.maximum.accumulate(end)  # of all intervals up to each
    has_gap_before = start[1:] > latest_end[:-1]  # of every interval but the first
    union_starts = np.concatenate([start[:1], start[1:][has_gap_before]])
    union_ends = np.append(latest_end[:-1][has_gap_before], latest_end[-1])
    return np.stack([union_starts, union_ends])


def clipped(intervals: Floats, low: float, high: float) -> Floats:
    """Return (2, m) the parts of ordered, disjoint intervals (2, n) that lie within the window from ``low`` to ``high``.

    Rows are starts and ends, in seconds.
    """
    starts, ends = intervals[:2]
    first = np.searchsorted(ends, low, side="right")  # the first interval that ends after the window begins
    last = np.searchsorted(starts, high, side="left")  # one past the last that starts before the window ends
    return np.clip(intervals[:, first:last], low, high)


_WHAT = "a torch profiler trace: the JSON file of export_chrome_trace, plain or gzip"
_STEP = re.compile(r"ProfilerStep#?\s*([0-9]+)$")
# One namespace and one name, as in aten::mm; the ranges of autograd and of the reducer contain operators but are none.
_OPERATOR = re.compile(r"(?!autograd::)[A-Za-z_]\w*::\w+$")
# The host's side of a collective, whose time counts as communication and not as compute.
_COMMUNICATION = re.compile(r"_?c10d(_functional)?::|record_param_comms$")
# A host range from a collective's call to its completion; for NCCL, only the launch of its kernel.
_COLLECTIVE = re.compile(r"(gloo|mpi|ucc|nccl|xccl):(?!:)\w+$")

_COMPUTE_KERNEL, _COMMUNICATION_KERNEL, _COPY = range(3)
_ACTIVITY = {"kernel": _COMPUTE_KERNEL, "gpu_memcpy": _COPY, "gpu_memset": _COPY}
_SPANS = frozenset(["cpu_op", "user_annotation"])
_RUNTIME = frozenset(["cuda_runtime", "cuda_driver", "privateuse1_runtime", "privateuse1_driver"])
# The categories of torch 1.8 to 1.11, and today's.
_EARLIER = {"operator": "cpu_op", "runtime": "cuda_runtime", "memcpy": "gpu_memcpy", "memset": "gpu_memset"}
# Rows that newer profilers write among the GPU's activities, in which it does nothing but wait.
_SYNC_ROWS = frozenset(["Device Sync", "Stream Sync", "Event Sync", "Context Sync", "Stream Wait Event"])
_NCCL_KERNEL = re.compile(r"[nr]ccl(?:Dev)?Kernel_?[A-Za-z]")
# Calls whose time grows with the size of the input. Nested calls may count twice, but do so on all ranks alike.
_PRODUCT = re.compile(r"aten::(mm|addmm|bmm|baddbmm|_?convolution|embedding|_?scaled_dot_product_\w+)$")
# Brackets that one read of 64 KiB may open without closing them.
_DEEPEST = 4000
# Bytes that a text may go on without its end: a parser looks through them again after every read.
_LONGEST = 1 << 24
# Names of kernels hold control characters now and then, which JSON does not allow.
_TO_BLANKS = bytes(32 if code < 32 else code for code in range(256))


@dataclass(frozen=True, kw_only=True, eq=False)
class ProfilerTrace:
    """One rank's trace. ``m`` spans in columns; times in seconds."""

    names: tuple[str, ...]
    """The distinct names of spans; ``spans.key`` points here."""
    spans: TraceSpans
    device_s: Floats
    """(m,) time of the compute kernels, copies and fills that a span and its descendants launched."""
    wait_s: Floats
    """(m,) time in which a span and its descendants waited for the device (cudaStreamSynchronize and the like)."""
    span_step: Indices
    """(m,) index of the step in which a span starts, -1 outside every step."""
    steps: int
    """How many ``ProfilerStep`` ranges there are."""

    @cached_property
    def is_operator(self) -> Flags:
        """(m,) whether a span is an operator call, and not an annotation, an autograd range or a collective's call."""
        return self.marked(lambda name: _OPERATOR.match(name) is not None and _COMMUNICATION.match(name) is None)

    @cached_property
    def is_top(self) -> Flags:
        """(m,) whether a span is an operator call outside every other operator call."""
        return self.is_operator & ~self.spans.below(self.is_operator)

    @cached_property
    def time_s(self) -> Floats:
        """(m,) a span's device time where it launched kernels, else its CPU time without waits."""
        return np.where(self.device_s > 0, self.device_s, np.maximum(self.spans.duration_s - self.wait_s, 0.0))

    def marked(self, wanted: Callable[[str], bool]) -> Flags:
        """Return (m,) whether ``wanted`` returns True for each span's name; it is called once for each distinct name."""
        is_wanted = np.array([wanted(name) for name in self.names], dtype=bool)
        return is_wanted[self.spans.key]


@dataclass(frozen=True, kw_only=True, eq=False)
class TraceSteps:
    """The ``k`` steps of one rank's trace, in order; seconds."""

    where: str
    step_time_s: Floats
    """(k,) length of the ``ProfilerStep`` ranges."""
    communication_s: Floats
    """(k,) time in which NCCL kernels, or collectives of gloo, MPI and UCC ran."""
    exposed_s: Floats
    """(k,) the part of ``communication_s`` in which no compute kernel ran (no operator, in a trace without kernels)."""
    device: str | None
    """The GPU's name, None where the trace does not give it."""
    world_size: int | None
    remarks: tuple[str, ...] = ()
    """One sentence for each kind of steps that is left out."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankTrace:
    """One rank's trace for the comparison of ranks; seconds on the rank's clock since ``epoch_s``."""

    where: str
    """The file, for errors and remarks."""
    rank: int | None
    """None: the trace does not say it."""
    node: str
    """The machine's name, "": the trace does not say it."""
    epoch_s: float
    """When the trace's first event began, by the rank's clock; all other times are seconds since then."""
    names: tuple[str, ...]
    """The distinct names of spans; ``spans.key`` points here."""
    spans: TraceSpans
    steps: ProfiledSteps
    groups: tuple[str, ...]
    """The distinct collectives: operation and process group."""
    collectives: Floats
    """(3, n) rows: index in ``groups``, start and end of each collective (of its kernel on a GPU, else of the host's call)."""
    kernels: Floats
    """(3, m) rows: start, end and launch of compute kernels, copies and fills; m is 0 in a trace of the CPU alone."""
    work: Floats
    """(2, p) rows: start and input elements of matrix products and convolutions; p is 0 in a trace without shapes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ProfiledSteps:
    """The ``k`` steps of a trace that hold work, ordered by time; seconds."""

    number: Indices
    """(k,) the numbers in ``ProfilerStep#NUMBER``."""
    start_s: Floats
    length_s: Floats
    until_s: Floats
    """(k,) start of the trace's next step, whether kept or left out; infinite for the trace's last step."""
    end_s: float
    """End of the trace's last step: GPU work launched later belongs to no step."""
    left_out: tuple[str, ...]
    """One sentence about the steps that are left out; empty where all are kept."""

    def at(self, time_s: Floats) -> Indices:
        """Return (m,) the index of the step at each moment, -1 outside every step.

        Steps are found by time and not by nesting: the backward pass runs on autograd's own thread.
        """
        if not len(self.start_s):
            return np.full(len(time_s), -1, dtype=np.int32)
        step_index = np.searchsorted(self.start_s, time_s, side="right") - 1
        inside = (step_index >= 0) & (time_s < (self.start_s + self.length_s)[step_index])
        return np.where(inside, step_index, -1).astype(np.int32)


def read_trace(path: str | Path) -> ProfilerTrace:
    """Return the operators of a profiler trace (JSON or gzip, by its first bytes) and the kernels that they launched.

    Streamed: O(file + m log m) time. Raises InputError (one line) for a missing, empty, cut-off or malformed file, a file
    without operator and kernel events, and an infinite or negative duration, whose event the error names.
    """
    events = _EventColumns(path)
    activities = events.table("activities")
    if not events.categories["cpu_op"] and not activities.size:
        categories = ", ".join(sorted(events.categories)[:8]) or "none at all"
        remedy = "profile the CPU too, and export a scheduled profile from on_trace_ready"
        raise InputError(str(path), f"has no cpu_op and no kernel events (found: {categories})", remedy)
    spans, order = events.spans()
    # What each span launched itself, and how long it waited itself; times in the tables are microseconds.
    kind, _, _, duration, _, _, _ = activities
    launcher = _launchers(events, spans, order)
    is_counted = (kind != _COMMUNICATION_KERNEL) & (launcher >= 0)
    launched_s = _sum_by_index(launcher[is_counted], duration[is_counted] * 1e-6, len(spans))
    thread, wait_start, wait_duration = events.table("waits")
    waiter = spans.innermost(thread.astype(np.int32), wait_start * 1e-6)
    in_span = waiter >= 0
    waited_s = _sum_by_index(waiter[in_span], wait_duration[in_span] * 1e-6, len(spans))
    steps = events.steps(spans)
    return ProfilerTrace(
        names=events.names,
        spans=spans,
        device_s=spans.with_nested(launched_s),
        wait_s=spans.with_nested(waited_s),
        span_step=steps.at(spans.start_s),
        steps=len(steps.start_s),
    )


def read_steps(path: str | Path) -> TraceSteps:
    """Return the steps of a profiler trace, streamed: O(file + m log m) time for m kept events.

    GPU work counts in the step in whose time it runs. Since the GPU lags behind the host, work that runs after the last
    step counts in the last step if it was launched before the step's end, and in no step otherwise. Steps with less than
    half of the calls of the fullest step (stubs, cut-off steps) are left out and named in ``remarks``. Raises InputError
    (one line) for a file that is no whole trace, and for one without a ``ProfilerStep`` that holds work.
    """
    events = _EventColumns(path)
    spans, _ = events.spans()
    steps = events.steps(spans)
    if not len(steps.start_s):
        raise InputError(str(path), "has no ProfilerStep range with work", "call prof.step() after every training step")

    def busy_s(intervals: Floats) -> Floats:
        """Return (k,) the seconds of each step in which one of the intervals was busy: (2, n) starts and durations."""
        start, duration = intervals
        return busy_within(start, duration, steps.start_s, steps.until_s)

    # (k,) seconds of each step in which compute, communication, or either of them ran, summed over the devices.
    compute_s, communication_s, either_s = (np.zeros(len(steps.start_s)) for _ in range(3))
    for compute, communication in events.busy_times(spans, steps.end_s):
        compute_s += busy_s(compute)
        communication_s += busy_s(communication)
        either_s += busy_s(np.concatenate([compute, communication], axis=1))
    header = _header(path)
    device, world_size = header.get("deviceProperties.item.name"), header.get("distributedInfo.world_size")
    return TraceSteps(
        where=str(path),
        step_time_s=steps.length_s,
        communication_s=communication_s,
        exposed_s=np.maximum(either_s - compute_s, 0.0),
        device=device if isinstance(device, str) and device.strip() else None,
        world_size=world_size if type(world_size) is int and world_size >= 1 else None,
        remarks=steps.left_out,
    )


def read_rank(path: str | Path) -> RankTrace:
    """Return one rank's trace for the comparison of ranks: its steps, collectives, kernels and amounts of work. Streamed.

    Raises InputError as :func:`read_steps` does.
    """
    events = _EventColumns(path)
    spans, _ = events.spans()
    steps = events.steps(spans)
    if not len(steps.start_s):
        raise InputError(str(path), "has no ProfilerStep range with work", "call prof.step() after every training step")
    kind, _, start, duration, _, _, group = events.table("activities")
    launched = events.launched_s()
    is_collective = kind == _COMMUNICATION_KERNEL
    times = np.stack([start, start + duration, launched * 1e6]) * 1e-6  # start, end, launch in seconds
    group_names = tuple(events.known["group"])
    kernel_collectives = np.stack([group, times[0], times[1]])[:, is_collective]
    # Names of the host's collectives follow those of the kernels' groups.
    host_name, host_start_s, host_duration_s = events.collectives()
    host_collectives = np.stack([host_name + len(group_names), host_start_s, host_start_s + host_duration_s])
    header = _header(path)
    rank, host = header.get("distributedInfo.rank"), header.get("host_name")
    base_ns = header.get("baseTimeNanoseconds", 0)  # from where a newer profiler counts the events' times
    return RankTrace(
        where=str(path),
        rank=rank if type(rank) is int and rank >= 0 else None,
        node=str(host or ""),
        epoch_s=(events.base_us or 0.0) * 1e-6 + float(base_ns) * 1e-9,
        names=events.names,
        spans=spans,
        steps=steps,
        groups=(*group_names, *events.names),
        collectives=np.concatenate([kernel_collectives, host_collectives], axis=1),
        kernels=times[:, ~is_collective],
        work=events.table("work") * np.array([[1e-6], [1.0]]),  # microseconds to seconds; numbers of elements stay
    )


def _launchers(events: _EventColumns, spans: TraceSpans, order: Places) -> Indices:
    """Return (k,) the index of the innermost span that launched each GPU activity, -1 where no launch was recorded.

    ``order``: the indices by which ``spans`` were sorted. The module's docstring says how a launch is found.
    """
    _, _, _, _, correlation, external, _ = events.table("activities")
    launch_id, launch_thread, launch_time = events.table("launches")
    launch = _index_by_id(launch_id, correlation)
    has_launch = launch >= 0
    found = launch[has_launch]
    launcher = np.full(len(correlation), -1, dtype=np.int32)
    launcher[has_launch] = spans.innermost(launch_thread[found].astype(np.int32), launch_time[found] * 1e-6)
    by_external_id = ~has_launch & (external > 0) & (external != correlation)
    _, _, span_external, _, _ = events.table("ranges")
    launcher[by_external_id] = _index_by_id(span_external[order], external[by_external_id])
    return launcher


def _index_by_id(ids: Floats, wanted: Floats) -> Ints:
    """Return (k,) the index in ``ids`` (n,) of each id of ``wanted`` (k,), -1 for one that is missing. O((n + k) log n)."""
    if not len(ids):
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(ids, kind="stable")
    position = np.minimum(np.searchsorted(ids, wanted, sorter=order), len(ids) - 1)
    index = order[position]
    return np.where(ids[index] == wanted, index, -1)


def _sum_by_index(index: Indices, amount: Floats, size: int) -> Floats:
    """Return (size,) the sum, for each index from 0 to ``size`` - 1, of the amounts (n,) whose ``index`` (n,) it is."""
    return np.bincount(index, weights=amount, minlength=size).astype(np.float64)


def busy_within(start: Floats, duration: Floats, begin: Floats, end: Floats) -> Floats:
    """Return (k,) the seconds of each of k windows [begin, end) in which at least one of n intervals was busy.

    ``start``, ``duration`` (n,): of the intervals, which may overlap. O(n log n + k).
    """
    busy = union(np.stack([start, start + duration]))

    def busy_s(low: float, high: float) -> float:
        """Return the busy seconds of one window."""
        starts, ends = clipped(busy, low, high)
        return float((ends - starts).sum())

    return np.array([busy_s(low, high) for low, high in zip(begin.tolist(), end.tolist(), strict=True)])


class _EventColumns:
    """The columns that are kept of a trace's events, in one flat array of rows for each kind of event.

    Times are microseconds since the first event, because a float holds microseconds since 1970 only to a quarter.
    """

    # Columns of each kind, which :meth:`_append_event` fills in this order:
    # ranges: name, thread, external id, start, duration; launches: correlation id, thread, start;
    # waits: thread, start, duration; collectives: name, thread, start, duration; work: start, elements;
    # activities: kind, device, start, duration, correlation id, external id, group (-1: no collective).
    WIDTH: Mapping[str, int] = {"ranges": 5, "launches": 3, "waits": 3, "activities": 7, "collectives": 4, "work": 2}

    def __init__(self, path: str | Path) -> None:
        """Read all events of a trace. Raises InputError as :func:`read_events` does, and for an event without finite times."""
        self.where = str(path)
        self.categories: Counter[str] = Counter()
        """How many events of each category there are."""
        self._values = {kind: array("d") for kind in self.WIDTH}
        """By kind of event its rows, one after another."""
        self.known: dict[str, dict[str, int]] = {"name": {}, "thread": {}, "device": {}, "group": {}}
        """By kind of text, the number of each text by which columns refer to it: texts repeat, and columns hold numbers."""
        self.base_us: float | None = None
        """The start of the first event; None: there is none."""
        for number, event in enumerate(read_events(path)):
            if not isinstance(event, dict):
                raise InputError(self.where, f"event {number} is no JSON object", "export the trace again")
            if event.get("ph") == "X":
                self._append_event(event, number)
            else:
                self.categories[str(event.get("cat", event.get("ph")))] += 1

    def steps(self, spans: TraceSpans) -> ProfiledSteps:
        """Return the steps of a trace, without those that hold less than half of the calls of the fullest step.

        Calls are the operators that start, and the GPU work that is launched, in a step's time.
        """
        all_steps = self._all_steps(spans)
        start_s, length_s = all_steps.start_s, all_steps.length_s
        is_operator = np.array([_OPERATOR.match(name) is not None for name in self.names], dtype=bool)
        operator_s = spans.start_s[is_operator[spans.key]] if len(spans) else start_s
        call_s = np.concatenate([operator_s, self.launched_s()])
        step_of_call = all_steps.at(call_s)
        calls = np.bincount(step_of_call[step_of_call >= 0], minlength=len(start_s))
        is_kept = (calls > 0) & (2 * calls >= calls.max(initial=0))
        if is_kept.all():
            return all_steps
        left_out = [
            f"{all_steps.number[index]} ({length_s[index] * 1e3:.3g} ms, {calls[index]} of {calls.max()} calls)"
            for index in np.flatnonzero(~is_kept)
        ]
        counts = f"{len(left_out)} of {len(is_kept)} steps"
        remark = f"{counts} hold less than half of the work and are left out: {', '.join(left_out[:_STEPS_SHOWN])}"
        columns = {name: getattr(all_steps, name)[is_kept] for name in ("number", "start_s", "length_s", "until_s")}
        return ProfiledSteps(**columns, end_s=all_steps.end_s, left_out=(remark,))

    def _all_steps(self, spans: TraceSpans) -> ProfiledSteps:
        """Return all steps of a trace, one for each number of a ``ProfilerStep`` range, ordered by time."""
        number_of_name = [int(match[1]) if (match := _STEP.match(name)) else -1 for name in self.names]
        number = np.array(number_of_name or [-1], dtype=np.int64)[spans.key]
        step_spans = np.flatnonzero(number >= 0)
        # Several threads may hold a range of the same step: the first counts.
        _, first_of_number = np.unique(number[step_spans], return_index=True)
        step_spans = step_spans[first_of_number]
        step_spans = step_spans[np.argsort(spans.start_s[step_spans], kind="stable")]
        start_s, length_s = spans.start_s[step_spans], spans.duration_s[step_spans]
        return ProfiledSteps(
            number=number[step_spans].astype(np.int32),
            start_s=start_s,
            length_s=length_s,
            until_s=np.append(start_s[1:], np.inf)[: len(start_s)],
            end_s=float((start_s + length_s).max(initial=0.0)),
            left_out=(),
        )

    def launched_s(self) -> Floats:
        """Return (n,) the seconds at which the host launched each GPU activity; its own start if no launch was recorded."""
        _, _, start, _, correlation, _, _ = self.table("activities")
        launch_id, _, launch_start = self.table("launches")
        if not len(launch_id):
            return np.asarray(start * 1e-6)
        launch = _index_by_id(launch_id, correlation)
        launched: Floats = np.where(launch >= 0, launch_start[launch], start) * 1e-6
        return launched

    def collectives(self) -> Floats:
        """Return (3, n) the collectives that run on the host; rows: the index of the name, start and duration in seconds.

        Starts count from the first event that was read. Collectives of NCCL, and of XCCL (Intel's), are left out: on the host
        they only launch a kernel.
        """
        name_index, _, start_us, duration_us = self.table("collectives")
        runs_on_host = np.array([not name.startswith(("nccl", "xccl")) for name in self.names], dtype=bool)  # by name
        is_kept = runs_on_host[name_index.astype(np.intp)]  # the tables keep all numbers as floats
        return np.stack([name_index[is_kept], start_us[is_kept] * 1e-6, duration_us[is_kept] * 1e-6])

    def busy_times(self, spans: TraceSpans, end_s: float) -> Iterator[tuple[Floats, Floats]]:
        """Yield (compute, communication) for each device: two arrays (2, n) of starts and durations in seconds.

        Work launched after ``end_s`` is left out. Collectives of gloo, MPI and UCC, which run on the host, are added to the
        first device's communication. In a trace without kernels but with such collectives, the host is the only device and
        its operators are the compute; without either, nothing is yielded.
        """
        kind, device, start, duration, _, _, _ = self.table("activities")
        times = np.stack([start, duration]) * 1e-6
        is_in_time = self.launched_s() < end_s
        is_compute = is_in_time & (kind == _COMPUTE_KERNEL)
        is_communication = is_in_time & (kind == _COMMUNICATION_KERNEL)
        host_times = self.collectives()[1:]
        host_times = host_times[:, host_times[0] < end_s]
        for device_number in np.unique(device[is_compute | is_communication]):
            on_device = device == device_number
            device_times = times[:, is_communication & on_device]
            yield times[:, is_compute & on_device], np.concatenate([device_times, host_times], axis=1)
            host_times = host_times[:, :0]  # the host's collectives count once, with the first device
        if host_times.size:
            is_operator = [_OPERATOR.match(name) is not None and not _COMMUNICATION.match(name) for name in self.names]
            computes = np.array(is_operator or [False])[spans.key] & (spans.start_s < end_s)
            yield np.stack([spans.start_s[computes], spans.duration_s[computes]]), host_times

    @property
    def names(self) -> tuple[str, ...]:
        """The distinct names of spans, at the index of each."""
        return tuple(self.known["name"])

    def table(self, kind: str) -> Floats:
        """Return (width, n) the columns of the n rows of one kind, a key of ``WIDTH``, whose comment names and orders them."""
        return np.frombuffer(self._values[kind]).reshape(-1, self.WIDTH[kind]).T

    def spans(self) -> tuple[TraceSpans, Places]:
        """Return the spans, sorted and nested, and the indices by which they were sorted (:meth:`TraceSpans.build`)."""
        name, thread, _, start, duration = self.table("ranges")
        return TraceSpans.build(name.astype(np.int32), thread.astype(np.int32), start * 1e-6, duration * 1e-6)

    def _append_event(self, event: Mapping[str, Any], number: int) -> None:
        """Append the rows of one complete event ("ph": "X") to the kinds that it belongs to; other events are only counted.

        ``number``: its index in the file. Raises InputError for an event without a start or with a negative duration.
        """
        start_us, duration_us = self._time(event, "ts", number), self._time(event, "dur", number)
        if start_us is None or (duration_us is not None and duration_us < 0):
            problem = "has no ts" if start_us is None else f"dur is {event['dur']}"
            raise self._event_error(event, number, problem)
        if self.base_us is None:
            self.base_us = start_us
        start = start_us - self.base_us
        duration = duration_us or 0.0
        # What the event is of, and the ids by which a kernel and its launch are joined.
        category = str(event.get("cat", "")).lower()
        category = _EARLIER.get(category, category)
        self.categories[category] += 1
        name = str(event.get("name", ""))
        thread = f"{event.get('pid')} {event.get('tid')}"  # the process and its thread
        event_args = event.get("args")
        args: Mapping[str, Any] = event_args if isinstance(event_args, dict) else {}
        correlation = _event_id(args.get("correlation"))
        external = _event_id(args.get("External id", args.get("external id")))
        if category in _SPANS:
            name_index, thread_index = self._index_of("name", name), self._index_of("thread", thread)
            if _COLLECTIVE.match(name):
                self._append_row("collectives", name_index, thread_index, start, duration)
                return
            self._append_row("ranges", name_index, thread_index, external, start, duration)
            if "Input Dims" in args and _PRODUCT.match(name):
                self._append_row("work", start, _elements(args["Input Dims"]))
        elif category in _RUNTIME:
            thread_index = self._index_of("thread", thread)
            if name.endswith("Synchronize"):
                self._append_row("waits", thread_index, start, duration)
            if correlation > 0:
                self._append_row("launches", correlation, thread_index, start)
        elif category in _ACTIVITY and name not in _SYNC_ROWS:
            kind = _ACTIVITY[category]
            group = -1  # no collective
            # NCCL's kernels are known by their names: ncclDevKernel_AllReduce_Sum_f32_RING_LL is of AllReduce.
            prefix = _NCCL_KERNEL.match(name) if kind == _COMPUTE_KERNEL else None
            if prefix is not None:
                kind = _COMMUNICATION_KERNEL
                operation = name[prefix.end() - 1 :].split("_")[0]
                ranks = args.get("Process Group Ranks", "")
                group = self._index_of("group", f"{operation} {ranks}")
            device = self._index_of("device", str(args.get("device", event.get("pid"))))
            self._append_row("activities", kind, device, start, duration, correlation, external, group)

    def _append_row(self, kind: str, *row: float) -> None:
        """Append a row to the columns of a kind, in the order that ``WIDTH`` names."""
        self._values[kind].extend(row)

    def _index_of(self, kind: str, key: str) -> int:
        """Return the index of a text among the known texts of its kind ("name", "thread", ...); a new text is appended."""
        indices = self.known[kind]
        return indices.setdefault(key, len(indices))

    def _time(self, event: Mapping[str, Any], field: str, event_index: int) -> float | None:
        """Return the time in an event's field ("ts" or "dur") in microseconds, None where the field is missing.

        Raises InputError for a value that is no finite number.
        """
        value = event.get(field)
        if value is None:
            return None
        try:
            microseconds = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            microseconds = math.nan
        if not math.isfinite(microseconds):
            raise self._event_error(event, event_index, f"{field} is {str(value)[:40]}")
        return microseconds

    def _event_error(self, event: Mapping[str, Any], event_index: int, problem: str) -> InputError:
        """Return the error that names an event and its problem."""
        name = str(event.get("name", "without a name"))[:80]
        remedy = "times are microseconds, finite, and no duration is negative"
        return InputError(self.where, f"event {event_index} ({name}): {problem}", remedy)


def _elements(shapes: Any) -> float:
    """Return the number of elements of a call's tensors together, from their shapes, such as ``[[4, 8], [], [8]]``."""
    total = 0.0
    for shape in shapes if isinstance(shapes, list) else ():
        if isinstance(shape, list) and shape:
            total += math.prod(float(size) for size in shape if isinstance(size, (int, float)))
    return total


def _event_id(value: Any) -> int:
    """Return an id as an integer; -1 for one that is missing, unreadable, or too large for a float to hold exactly."""
    try:
        number = -1 if value is None else int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if abs(number) < _EXACT_BELOW else -1


def read_events(path: str | Path) -> Iterator[Any]:
    """Yield the members of ``traceEvents``, or of a bare list of events, in file order; memory holds one at a time.

    Raises InputError when the file is missing, empty, cut off or not JSON.
    """
    with _opened(path) as (stream, is_list):
        yield from ijson.items(stream, "item" if is_list else "traceEvents.item")


def _header(path: str | Path) -> dict[str, Any]:
    """Return the values before a trace's events, which describe its device, rank and clock.

    Keys are ijson's prefixes, such as "distributedInfo.rank"; of several values with one prefix the first is kept.
    """
    values: dict[str, Any] = {}
    with _opened(path) as (stream, _):
        for prefix, _, value in ijson.parse(stream):
            if prefix.startswith(("traceEvents", "item")):
                break
            values.setdefault(prefix, value)
    return values


class _CleanStream:
    """A binary stream that replaces control characters by blanks, and refuses input that takes a parser quadratic time.

    Such input is deep nesting and very long texts; very long runs of blanks are refused with the latter.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self._unquoted = 0
        """Bytes of the reads since the last one that held a quotation mark that is not escaped."""

    def read(self, size: int = -1) -> bytes:
        """Return the next ``size`` bytes, cleaned. Raises ijson's JSONError for too deep nesting or too long a text."""
        data = self.stream.read(size)
        has_quotation_mark = data.count(b'"') > data.count(b'\\"')
        self._unquoted = 0 if has_quotation_mark else self._unquoted + len(data)
        if self._unquoted > _LONGEST:
            raise ijson.JSONError("16 MiB without the end of a text")
        left_open = data.count(b"[") + data.count(b"{") - data.count(b"]") - data.count(b"}")
        if left_open > _DEEPEST:
            raise ijson.JSONError("nested too deeply")
        return data.translate(_TO_BLANKS)


@contextmanager
def _opened(path: str | Path) -> Iterator[tuple[_CleanStream, bool]]:
    """Yield (stream, is list): a trace's stream, unpacked if its first bytes are gzip's, and whether it is a bare list.

    Raises InputError for an empty file; errors of the parser in the block become an InputError of one line.
    """
    where = str(path)
    try:
        with opened(path) as stream:
            head = stream.peek(256)
            if not head:
                raise InputError(where, "is empty", f"expected {_WHAT}")
            if head.startswith(BOM_UTF8):
                stream.read(len(BOM_UTF8))
            is_list = head.removeprefix(BOM_UTF8).lstrip().startswith(b"[")
            yield _CleanStream(stream), is_list
    except (ijson.JSONError, UnicodeDecodeError) as error:
        problem = f"is not JSON, or is cut off ({one_line(str(error))[:120]})"
        raise InputError(where, problem, f"expected {_WHAT}") from None
