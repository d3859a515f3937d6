"""Reading a torch profiler trace (Kineto, Chrome format): what ran, for how long, and what launched what.

Start at :func:`read_trace` (operators and what they launched) or :func:`read_steps` (how long steps took). The file is
streamed. Kept are one row of numbers per operator span (32 bytes), launch (20) and GPU activity (37), about twice that
while they are sorted; one entry per distinct name; and the ranges that are open. Flows, Python frames and other rows
are counted and dropped.

What launched a kernel is found by the kernel's ``correlation`` id: the runtime call of that id, and the innermost span
around that call on its thread. ``External id`` is used only where no such call was recorded and the two ids differ:
older profilers write the correlation into both, where it collides with ids of unrelated operators.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.oracle.trace_events import read_events
from ddltool.analyzers.oracle.trace_spans import Flags, Floats, Indices, Spans, busy_s
from ddltool.errors import InputError

_STEP = re.compile(r"ProfilerStep#?\s*([0-9]+)$")
# One namespace, one name. Autograd's and the reducer's ranges hold operators and are none.
_OPERATOR = re.compile(r"(?!autograd::)[A-Za-z_]\w*::\w+$")
# The host side of a collective: its time is the network's, not compute.
_COMMUNICATION = re.compile(r"_?c10d(_functional)?::|record_param_comms$|(nccl|gloo|mpi|ucc):(?!:)")

_COMPUTE_KERNEL, _COMMUNICATION_KERNEL, _COPY = range(3)
_ACTIVITY = {"kernel": _COMPUTE_KERNEL, "gpu_memcpy": _COPY, "gpu_memset": _COPY}
_SPANS = frozenset(["cpu_op", "user_annotation"])
_RUNTIME = frozenset(["cuda_runtime", "cuda_driver", "privateuse1_runtime", "privateuse1_driver"])
# What torch 1.8 to 1.11 called the same rows.
_EARLIER = {
    "operator": "cpu_op",
    "runtime": "cuda_runtime",
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
}
_SYNC_ROWS = frozenset(["Device Sync", "Stream Sync", "Event Sync", "Context Sync", "Stream Wait Event"])
_NCCL_KERNEL = re.compile(r"[nr]ccl(?:Dev)?Kernel_?[A-Za-z]")


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
    """(k,) time in which NCCL kernels ran."""
    exposed_s: Floats
    """(k,) the part of it in which no compute kernel ran."""
    device: str | None
    """The GPU's name, where the trace gives it."""
    world_size: int | None


def read_trace(path: str | Path) -> ProfilerTrace:
    """Return what a profiler trace (JSON or gzip, told by its first bytes) says about operators and kernels.

    Streamed: O(file + m log m) time; memory as the module says. B/E pairs are joined per thread in file order.

    Raises InputError (one line) for a missing, empty, cut-off or malformed file, for a file without operator or kernel
    events, and for an event with a NaN or negative duration, which is named.
    """
    collected = _collect(path)
    if not collected.categories["cpu_op"] and not collected.activity_kind:
        kinds = ", ".join(sorted(collected.categories)[:8]) or "none at all"
        remedy = "profile the CPU too, and export a scheduled profile from on_trace_ready"
        raise InputError(str(path), f"has no cpu_op and no kernel events (found: {kinds})", remedy)
    spans, order = collected.spans()
    kind, duration = np.frombuffer(collected.activity_kind, dtype=np.int8), _seconds(collected.activity_duration)
    launcher = _launchers(collected, spans, order)
    own = (kind != _COMMUNICATION_KERNEL) & (launcher >= 0)
    waiter = spans.innermost(_indices(collected.wait_thread), _seconds(collected.wait_start))
    waits = waiter >= 0
    begin, _, span_step = _steps(collected.names, spans)
    return ProfilerTrace(
        names=collected.names,
        spans=spans,
        device_s=spans.with_nested(_sums(launcher[own], duration[own], len(spans))),
        wait_s=spans.with_nested(_sums(waiter[waits], _seconds(collected.wait_duration)[waits], len(spans))),
        span_step=span_step,
        steps=len(begin),
    )


def read_steps(path: str | Path) -> TraceSteps:
    """Return the steps of a profiler trace, streamed: O(file + m log m) time for m events that are kept.

    GPU work counts in the step in whose time it runs; what runs after the last step's end counts in the last step, since
    the GPU lags behind. Raises InputError (one line) for what is no whole trace, and for one without ``ProfilerStep``.
    """
    collected = _collect(path)
    begin, length, _ = _steps(collected.names, collected.spans()[0])
    if not len(begin):
        raise InputError(str(path), "has no ProfilerStep range", "call prof.step() after every training step")
    end = np.append(begin[1:], np.inf)
    kind = np.frombuffer(collected.activity_kind, dtype=np.int8)
    start, duration = _seconds(collected.activity_start), _seconds(collected.activity_duration)
    device = _indices(collected.activity_device)
    compute, communication = kind == _COMPUTE_KERNEL, kind == _COMMUNICATION_KERNEL
    totals = {}
    for name, wanted in (("compute", compute), ("communication", communication), ("any", compute | communication)):
        parts = [_busy_within(start[rows], duration[rows], begin, end) for rows in _per_device(device, wanted)]
        totals[name] = np.sum(parts, axis=0) if parts else np.zeros(len(begin))
    return TraceSteps(
        where=str(path),
        step_time_s=length,
        communication_s=totals["communication"],
        exposed_s=np.maximum(totals["any"] - totals["compute"], 0.0),
        device=_device_name(collected.header),
        world_size=_world_size(collected.header),
    )


def _launchers(collected: _Collector, spans: Spans, order: NDArray[np.intp]) -> Indices:
    """Return (k,) the innermost span that launched each GPU activity, -1 where none was recorded."""
    correlation = np.frombuffer(collected.activity_correlation, dtype=np.int64)
    external = np.frombuffer(collected.activity_external, dtype=np.int64)
    call = _lookup(np.frombuffer(collected.launch_correlation, dtype=np.int64), correlation)
    found = np.full(len(correlation), -1, dtype=np.int32)
    known = call >= 0
    thread, time = _indices(collected.launch_thread), _seconds(collected.launch_time)
    found[known] = spans.innermost(thread[call[known]], time[call[known]])
    other = ~known & (external > 0) & (external != correlation)
    by_external = _lookup(np.frombuffer(collected.span_external, dtype=np.int64)[order], external[other])
    found[other] = by_external
    return found


def _lookup(ids: NDArray[np.int64], asked: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each asked id stands in ``ids``, -1 where it does not."""
    if not len(ids):
        return np.full(len(asked), -1, dtype=np.int64)
    order = np.argsort(ids, kind="stable")
    place = np.minimum(np.searchsorted(ids, asked, sorter=order), len(ids) - 1)
    return np.where(ids[order[place]] == asked, order[place], -1)


def _steps(names: tuple[str, ...], spans: Spans) -> tuple[Floats, Floats, Indices]:
    """Return the start and the length of the ``k`` profiler's steps by time, and the step that each span starts in (m,)."""
    numbers = np.array([int(found[1]) if (found := _STEP.match(name)) else -1 for name in names], dtype=np.int64)
    number = numbers[spans.key] if len(names) else np.zeros(0, dtype=np.int64)
    at = np.flatnonzero(number >= 0)
    at = at[np.unique(number[at], return_index=True)[1]]  # other threads may carry the same range again
    at = at[np.argsort(spans.start_s[at], kind="stable")]
    start, length = spans.start_s[at], spans.duration_s[at]
    if not len(start):
        return start, length, np.full(len(spans), -1, dtype=np.int32)
    # By time and not by nesting: the backward pass runs on autograd's own thread.
    place = np.searchsorted(start, spans.start_s, side="right") - 1
    inside = (place >= 0) & (spans.start_s < (start + length)[place])
    return start, length, np.where(inside, place, -1).astype(np.int32)


def _sums(place: Indices, amount: Floats, size: int) -> Floats:
    """Return (size,) the sum of the amounts at each place."""
    return np.bincount(place, weights=amount, minlength=size).astype(np.float64)


def _per_device(device: NDArray[np.int32], wanted: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
    return [wanted & (device == number) for number in np.unique(device[wanted])]


def _busy_within(start: Floats, duration: Floats, begin: Floats, end: Floats) -> Floats:
    """Return (k,) the busy time inside each window [begin, end); the windows do not overlap. O(n log n + k)."""
    order = np.argsort(start, kind="stable")
    start, stop = start[order], (start + duration)[order]
    reach = np.maximum.accumulate(stop) if len(stop) else stop
    found = np.zeros(len(begin))
    for window, (low, high) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        first, last = np.searchsorted(reach, low, side="right"), np.searchsorted(start, high, side="left")
        left = np.clip(start[first:last], low, high)
        found[window] = busy_s(left, np.maximum(np.clip(stop[first:last], low, high) - left, 0.0))
    return found


def _device_name(header: dict[str, Any]) -> str | None:
    listed = header.get("deviceProperties")
    first = listed[0] if isinstance(listed, list) and listed else None
    name = first.get("name") if isinstance(first, dict) else None
    return name if isinstance(name, str) and name.strip() else None


def _world_size(header: dict[str, Any]) -> int | None:
    distributed = header.get("distributedInfo")
    size = distributed.get("world_size") if isinstance(distributed, dict) else None
    return size if isinstance(size, int) and not isinstance(size, bool) and size >= 1 else None


class _Collector:
    """Takes events in any order; every column grows by one number per event of its kind.

    Times are microseconds after the first event that was seen: an epoch in microseconds leaves a float a quarter of
    a microsecond.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.header: dict[str, Any] = {}
        self.categories: Counter[str] = Counter()
        self._events = 0
        self._base_us: float | None = None
        self._names: dict[str, int] = {}
        self._threads: dict[tuple[Any, Any], int] = {}
        self._devices: dict[Any, int] = {}
        self._open: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
        self.span_name, self.span_thread, self.span_external = array("i"), array("i"), array("q")
        self.span_start, self.span_duration = array("d"), array("d")
        self.launch_correlation, self.launch_thread, self.launch_time = array("q"), array("i"), array("d")
        self.wait_thread, self.wait_start, self.wait_duration = array("i"), array("d"), array("d")
        self.activity_kind, self.activity_device = array("b"), array("i")
        self.activity_start, self.activity_duration = array("d"), array("d")
        self.activity_correlation, self.activity_external = array("q"), array("q")

    @property
    def names(self) -> tuple[str, ...]:
        """The distinct names of spans; ``span_name`` points here."""
        return tuple(self._names)

    def add(self, event: Any) -> None:
        """Take one event. Raises InputError that names it where its times cannot be."""
        self._events += 1
        if not isinstance(event, dict):
            raise InputError(self.where, f"event {self._events - 1} is no JSON object", "export the trace again")
        phase = event.get("ph")
        if phase == "X":
            self._complete(event, self._time(event, "ts"), self._length(event))
        elif phase == "B":
            self._open.setdefault(self._place(event), []).append(event)
        elif phase == "E":
            self._close(event)
        else:
            self.categories[str(event.get("cat", phase))] += 1

    def spans(self) -> tuple[Spans, NDArray[np.intp]]:
        """Return the spans, nested, and the order that sorts other columns of spans likewise."""
        return Spans.build(
            _indices(self.span_name),
            _indices(self.span_thread),
            _seconds(self.span_start),
            _seconds(self.span_duration),
        )

    def _close(self, event: Mapping[str, Any]) -> None:
        stack = self._open.get(self._place(event))
        if not stack:
            return  # opened before the capture began
        begin = stack.pop()
        start, end = self._time(begin, "ts"), self._time(event, "ts")
        if end < start:
            raise self._bad(begin, f"ends at {event.get('ts')}, before it begins at {begin.get('ts')}")
        merged = {**begin, "args": {**_arguments(begin), **_arguments(event)}}
        self._complete(merged, start, end - start)

    def _complete(self, event: Mapping[str, Any], start: float, duration: float) -> None:
        category = str(event.get("cat", "")).lower()
        category = _EARLIER.get(category, category)
        self.categories[category] += 1
        if category in _SPANS:
            self._span(event, start, duration)
        elif category in _RUNTIME:
            self._runtime(event, start, duration)
        elif category in _ACTIVITY and event.get("name") not in _SYNC_ROWS:
            self._activity(event, _ACTIVITY[category], start, duration)

    def _span(self, event: Mapping[str, Any], start: float, duration: float) -> None:
        arguments = _arguments(event)
        self.span_name.append(self._names.setdefault(str(event.get("name", "")), len(self._names)))
        self.span_thread.append(self._thread(event))
        self.span_external.append(_identity(arguments.get("External id", arguments.get("external id"))))
        self.span_start.append(start)
        self.span_duration.append(duration)

    def _runtime(self, event: Mapping[str, Any], start: float, duration: float) -> None:
        thread = self._thread(event)
        if str(event.get("name", "")).endswith("Synchronize"):
            self.wait_thread.append(thread)
            self.wait_start.append(start)
            self.wait_duration.append(duration)
        correlation = _identity(_arguments(event).get("correlation"))
        if correlation > 0:
            self.launch_correlation.append(correlation)
            self.launch_thread.append(thread)
            self.launch_time.append(start)

    def _activity(self, event: Mapping[str, Any], kind: int, start: float, duration: float) -> None:
        arguments = _arguments(event)
        if kind == _COMPUTE_KERNEL and _NCCL_KERNEL.match(str(event.get("name", ""))):
            kind = _COMMUNICATION_KERNEL
        device = arguments.get("device", event.get("pid"))
        self.activity_kind.append(kind)
        self.activity_device.append(self._devices.setdefault(str(device), len(self._devices)))
        self.activity_start.append(start)
        self.activity_duration.append(duration)
        self.activity_correlation.append(_identity(arguments.get("correlation")))
        self.activity_external.append(_identity(arguments.get("External id", arguments.get("external id"))))

    def _thread(self, event: Mapping[str, Any]) -> int:
        return self._threads.setdefault(self._place(event), len(self._threads))

    def _place(self, event: Mapping[str, Any]) -> tuple[str, str]:
        return str(event.get("pid")), str(event.get("tid"))

    def _time(self, event: Mapping[str, Any], field: str) -> float:
        value = self._number(event, field)
        if value is None:
            raise self._bad(event, f"has no {field}")
        if self._base_us is None:
            self._base_us = value
        return value - self._base_us

    def _length(self, event: Mapping[str, Any]) -> float:
        value = self._number(event, "dur")
        if value is not None and value < 0:
            raise self._bad(event, f"dur is {event['dur']}")
        return value or 0.0

    def _number(self, event: Mapping[str, Any], field: str) -> float | None:
        value = event.get(field)
        if value is None:
            return None
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise self._bad(event, f"{field} is {str(value)[:40]}")
        return number

    def _bad(self, event: Mapping[str, Any], problem: str) -> InputError:
        name = str(event.get("name", "without a name"))[:80]
        remedy = "times are microseconds, finite, and no duration is negative"
        return InputError(self.where, f"event {self._events - 1} ({name}): {problem}", remedy)


def _collect(path: str | Path) -> _Collector:
    """Return the columns of a trace (JSON or gzip, told by its first bytes), streamed, with the keys beside its events.

    Raises InputError (one line) for a missing, empty, cut-off or malformed file, and as :meth:`_Collector.add`.
    """
    collected = _Collector(str(path))
    for event in read_events(path, collected.header):
        collected.add(event)
    return collected


def _seconds(column: array[float]) -> Floats:
    return np.frombuffer(column, dtype=np.float64) * 1e-6


def _indices(column: array[int]) -> Indices:
    return np.frombuffer(column, dtype=np.int32)


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def _identity(value: Any) -> int:
    """Return an id or a count as an integer, -1 where there is none."""
    try:
        number = -1 if value is None else int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if -(2**63) <= number < 2**63 else -1
