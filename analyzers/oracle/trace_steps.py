"""Steps of a torch profiler trace: how long each took, and how much of it was communication that nothing hid."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.oracle.kineto import steps_and_spans
from ddltool.analyzers.oracle.trace_columns import COMMUNICATION_KERNEL, COMPUTE_KERNEL, Collector
from ddltool.analyzers.oracle.trace_events import read_events
from ddltool.analyzers.oracle.trace_spans import Floats, Spans, busy_s
from ddltool.errors import InputError


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


def read_steps(path: str | Path) -> TraceSteps:
    """Return the steps of a profiler trace, streamed: O(file + m log m) time for m events that are kept.

    GPU work counts in the step in whose time it runs; what runs after the last step's end counts in the last step, since
    the GPU lags behind. Raises InputError (one line) for what is no whole trace, and for one without ``ProfilerStep``.
    """
    header: dict[str, Any] = {}
    collected = Collector(str(path))
    for event in read_events(path, header):
        collected.add(event)
    collected.finish()
    spans, _ = Spans.build(
        np.frombuffer(collected.span_key, dtype=np.int32),
        np.frombuffer(collected.span_thread, dtype=np.int32),
        _seconds(collected.span_start),
        _seconds(collected.span_duration),
    )
    steps, _ = steps_and_spans(collected.keys, spans)
    if not steps:
        raise InputError(str(path), "has no ProfilerStep range", "call prof.step() after every training step")
    begin = np.array([step.start_s for step in steps])
    end = np.append(begin[1:], np.inf)
    kind = np.frombuffer(collected.activity_kind, dtype=np.int8)
    start, duration = _seconds(collected.activity_start), _seconds(collected.activity_duration)
    device = np.frombuffer(collected.activity_device, dtype=np.int32)
    compute, communication = kind == COMPUTE_KERNEL, kind == COMMUNICATION_KERNEL
    totals = {}
    for name, wanted in (("compute", compute), ("communication", communication), ("any", compute | communication)):
        parts = [_busy_within(start[rows], duration[rows], begin, end) for rows in _per_device(device, wanted)]
        totals[name] = np.sum(parts, axis=0) if parts else np.zeros(len(steps))
    return TraceSteps(
        where=str(path),
        step_time_s=np.array([step.duration_s for step in steps]),
        communication_s=totals["communication"],
        exposed_s=np.maximum(totals["any"] - totals["compute"], 0.0),
        device=_device_name(header),
        world_size=_world_size(header),
    )


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


def _seconds(column: array[float]) -> Floats:
    return np.frombuffer(column, dtype=np.float64) * 1e-6
