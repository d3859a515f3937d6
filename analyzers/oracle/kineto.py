"""Reading a torch profiler trace (Kineto, Chrome format): what ran, for how long, and what launched what.

The file is streamed. Kept are one row of numbers per operator span (32 bytes), launch (20) and GPU activity (37), about
twice that while they are sorted; one record per distinct operator (name, shapes, types); and the ranges that are open.
Flows, Python frames and other rows are counted and dropped.

What launched a kernel is found by the kernel's ``correlation`` id: the runtime call of that id, and the innermost span
around that call on its thread. ``External id`` is used only where no such call was recorded and the two ids differ:
older profilers write the correlation into both, where it collides with ids of unrelated operators.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.oracle.trace_columns import (
    COMMUNICATION_KERNEL,
    COMPUTE_KERNEL,
    MEMCPY,
    MEMSET,
    Collector,
    OpKey,
)
from ddltool.analyzers.oracle.trace_events import read_events
from ddltool.analyzers.oracle.trace_spans import Flags, Floats, Indices, Spans, busy_s
from ddltool.errors import InputError

_STEP = re.compile(r"ProfilerStep#?\s*([0-9]+)$")
# One namespace, one name. Autograd's and the reducer's ranges hold operators and are none.
_OPERATOR = re.compile(r"(?!autograd::)[A-Za-z_]\w*::\w+$")
_COMMUNICATION = re.compile(r"_?c10d(_functional)?::|record_param_comms$|(nccl|gloo|mpi|ucc):(?!:)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One ``ProfilerStep#NUMBER`` range; the start is relative to the trace's first event."""

    number: int
    start_s: float
    duration_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """How many, and how long in sum (overlaps counted twice)."""

    count: int
    total_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """The NCCL kernels of one kind of collective."""

    kind: str
    count: int
    total_s: float
    bytes: float
    """Input elements times element size, over the kernels that say so."""
    unsized: int
    """Kernels that do not say how much they move."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorTotals:
    """The top-level calls of one operator, with one set of shapes, on one thread."""

    name: str
    shapes: str
    dtypes: str
    thread: str
    count: int
    min_s: float
    total_s: float
    device_s: float
    """Time of the kernels that these calls launched, in sum."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ProfilerTrace:
    """One rank's trace. ``m`` spans in columns; times in seconds."""

    where: str
    events: int
    categories: Mapping[str, int]
    unpaired: int
    """Begins without an end and ends without a begin."""
    rank: int | None
    world_size: int | None
    keys: tuple[OpKey, ...]
    threads: tuple[str, ...]
    spans: Spans
    device_s: Floats
    """(m,) compute kernels, copies and fills that a span and everything in it launched."""
    wait_s: Floats
    """(m,) time in which a span and everything in it waited for the device (cudaStreamSynchronize and the like)."""
    span_step: Indices
    """(m,) index into ``steps``, -1 outside every step."""
    steps: tuple[Step, ...]
    kernels: Totals
    memcpy: Totals
    memset: Totals
    sync: Totals
    communications: tuple[Communication, ...]
    unlinked_s: float
    """Time of compute kernels whose launch was not recorded."""
    compute_busy_s: float
    communication_busy_s: float
    exposed_communication_s: float
    """Communication time in which no compute kernel ran on that device."""

    @cached_property
    def is_operator(self) -> Flags:
        """(m,) whether a span is an operator call, not an annotation or an autograd range."""
        return self.marked(lambda name: _OPERATOR.match(name) is not None and not is_communication(name))

    @cached_property
    def is_top(self) -> Flags:
        """(m,) whether a span is an operator call that no other operator makes."""
        return self.is_operator & ~self.spans.below(self.is_operator)

    @cached_property
    def time_s(self) -> Floats:
        """(m,) what a span takes: its kernels' time where it launched any, else its CPU time without waits."""
        return np.where(self.device_s > 0, self.device_s, np.maximum(self.spans.duration_s - self.wait_s, 0.0))

    @property
    def operators(self) -> tuple[OperatorTotals, ...]:
        """Return the totals of the top-level operator calls, longest first; nested calls count in their parent."""
        top = np.flatnonzero(self.is_top)
        pairs = self.spans.thread[top].astype(np.int64) * len(self.keys) + self.spans.key[top]
        groups, member = np.unique(pairs, return_inverse=True)
        duration, device = self.spans.duration_s[top], self.device_s[top]
        least = np.full(len(groups), np.inf)
        np.minimum.at(least, member, duration)
        count = np.bincount(member, minlength=len(groups))
        total = np.bincount(member, weights=duration, minlength=len(groups))
        on_device = np.bincount(member, weights=device, minlength=len(groups))
        rows = [
            OperatorTotals(
                **self.keys[group % len(self.keys)]._asdict(),
                thread=self.threads[group // len(self.keys)],
                count=int(count[row]),
                min_s=float(least[row]),
                total_s=float(total[row]),
                device_s=float(on_device[row]),
            )
            for row, group in enumerate(groups.tolist())
        ]
        return tuple(sorted(rows, key=lambda row: (-row.total_s, row.name, row.shapes, row.thread)))

    def marked(self, wanted: Any) -> Flags:
        """Return (m,) whether ``wanted(name)`` holds for each span's name; called once per key."""
        return np.array([bool(wanted(key.name)) for key in self.keys], dtype=bool)[self.spans.key]


def is_communication(name: str) -> bool:
    """Return whether a span's name is that of a collective's host side, whose time is the network's, not compute."""
    return _COMMUNICATION.match(name) is not None


def read_trace(path: str | Path) -> ProfilerTrace:
    """Return what a profiler trace (JSON or gzip, told by its first bytes) says about operators and kernels.

    Streamed: O(file + m log m) time; memory as the module says. B/E pairs are joined per thread in file order.

    Raises InputError (one line) for a missing, empty, cut-off or malformed file, for a file without operator or kernel
    events, and for an event with a NaN or negative duration, which is named.
    """
    where = str(path)
    header: dict[str, Any] = {}
    collected = Collector(where)
    for event in read_events(path, header):
        collected.add(event)
    collected.finish()
    if not collected.categories["cpu_op"] and not collected.activity_kind:
        kinds = ", ".join(sorted(collected.categories)[:8]) or "none at all"
        remedy = "profile the CPU too, and export a scheduled profile from on_trace_ready"
        raise InputError(where, f"has no cpu_op and no kernel events (found: {kinds})", remedy)
    return _assemble(where, header, collected)


def _assemble(where: str, header: Mapping[str, Any], collected: Collector) -> ProfilerTrace:
    spans, order = Spans.build(
        _indices(collected.span_key),
        _indices(collected.span_thread),
        _seconds(collected.span_start),
        _seconds(collected.span_duration),
    )
    kind = np.frombuffer(collected.activity_kind, dtype=np.int8)
    start, duration = _seconds(collected.activity_start), _seconds(collected.activity_duration)
    launcher = _launchers(collected, spans, order)
    own = (kind != COMMUNICATION_KERNEL) & (launcher >= 0)
    device_s = _sums(launcher[own], duration[own], len(spans))
    waiter = spans.innermost(_indices(collected.wait_thread), _seconds(collected.wait_start))
    waited = _seconds(collected.wait_duration)
    wait_s = _sums(waiter[waiter >= 0], waited[waiter >= 0], len(spans))
    steps, span_step = steps_and_spans(collected.keys, spans)
    device = _indices(collected.activity_device)
    compute, communication = kind == COMPUTE_KERNEL, kind == COMMUNICATION_KERNEL
    busy_compute = _busy_per_device(device, compute, start, duration)
    busy_communication = _busy_per_device(device, communication, start, duration)
    busy_any = _busy_per_device(device, compute | communication, start, duration)
    distributed = header.get("distributedInfo")
    distributed = distributed if isinstance(distributed, dict) else {}
    return ProfilerTrace(
        where=where,
        events=collected.events,
        categories=dict(collected.categories),
        unpaired=collected.unpaired,
        rank=_whole(distributed.get("rank")),
        world_size=_whole(distributed.get("world_size")),
        keys=collected.keys,
        threads=collected.threads,
        spans=spans,
        device_s=spans.with_nested(device_s),
        wait_s=spans.with_nested(wait_s),
        span_step=span_step,
        steps=steps,
        kernels=_totals(duration[compute]),
        memcpy=_totals(duration[kind == MEMCPY]),
        memset=_totals(duration[kind == MEMSET]),
        sync=Totals(count=collected.sync_rows, total_s=collected.sync_us * 1e-6),
        communications=_communications(collected),
        unlinked_s=float(duration[compute & (launcher < 0)].sum()),
        compute_busy_s=busy_compute,
        communication_busy_s=busy_communication,
        exposed_communication_s=max(busy_any - busy_compute, 0.0),
    )


def _launchers(collected: Collector, spans: Spans, order: NDArray[np.intp]) -> Indices:
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


def steps_and_spans(keys: tuple[OpKey, ...], spans: Spans) -> tuple[tuple[Step, ...], Indices]:
    """Return the profiler's steps in order of time, and which span each is, shape (steps,)."""
    numbers = np.array([int(found[1]) if (found := _STEP.match(key.name)) else -1 for key in keys], dtype=np.int64)
    number = numbers[spans.key] if len(keys) else np.zeros(0, dtype=np.int64)
    at = np.flatnonzero(number >= 0)
    at = at[np.unique(number[at], return_index=True)[1]]  # other threads may carry the same range again
    at = at[np.argsort(spans.start_s[at], kind="stable")]
    start, end = spans.start_s[at], spans.start_s[at] + spans.duration_s[at]
    steps = tuple(
        Step(number=int(number[row]), start_s=float(spans.start_s[row]), duration_s=float(spans.duration_s[row]))
        for row in at
    )
    if not steps:
        return steps, np.full(len(spans), -1, dtype=np.int32)
    # By time and not by nesting: the backward pass runs on autograd's own thread.
    place = np.searchsorted(start, spans.start_s, side="right") - 1
    inside = (place >= 0) & (spans.start_s < end[place])
    return steps, np.where(inside, place, -1).astype(np.int32)


def _busy_per_device(device: Indices, wanted: Flags, start: Floats, duration: Floats) -> float:
    chosen = [wanted & (device == number) for number in np.unique(device)]
    return sum(busy_s(start[rows], duration[rows]) for rows in chosen)


def _communications(collected: Collector) -> tuple[Communication, ...]:
    rows = [
        Communication(kind=kind, count=t.count, total_s=t.total_us * 1e-6, bytes=t.bytes, unsized=t.unsized)
        for kind, t in collected.communications.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.total_s, row.kind)))


def _sums(place: Indices, amount: Floats, size: int) -> Floats:
    """Return (size,) the sum of the amounts at each place."""
    return np.bincount(place, weights=amount, minlength=size).astype(np.float64)


def _totals(durations: Floats) -> Totals:
    return Totals(count=len(durations), total_s=float(durations.sum()))


def _seconds(column: array[float]) -> Floats:
    return np.frombuffer(column, dtype=np.float64) * 1e-6


def _indices(column: array[int]) -> Indices:
    return np.frombuffer(column, dtype=np.int32)


def _whole(value: Any) -> int | None:
    try:
        return None if value is None or isinstance(value, bool) else int(value)
    except (TypeError, ValueError):
        return None
