"""From trace events to columns of numbers: what is kept of each event, and what makes an event unusable."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from ddltool.errors import InputError

COMPUTE_KERNEL, COMMUNICATION_KERNEL, MEMCPY, MEMSET = range(4)
_ACTIVITY = {"kernel": COMPUTE_KERNEL, "gpu_memcpy": MEMCPY, "gpu_memset": MEMSET}
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
_NCCL_KERNEL = re.compile(r"[nr]ccl(?:Dev)?Kernel_?([A-Za-z]+)")
_ELEMENT_BYTES = {
    **dict.fromkeys(["double", "long", "float64", "int64", "uint64", "complexfloat"], 8),
    **dict.fromkeys(["float", "int", "float32", "int32", "uint32"], 4),
    **dict.fromkeys(["half", "bfloat16", "short", "float16", "int16", "uint16"], 2),
    **dict.fromkeys(["char", "byte", "bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"], 1),
}


class OpKey(NamedTuple):
    """One distinct kind of span: an operator with its input shapes and types as the profiler wrote them, or a range."""

    name: str
    shapes: str
    dtypes: str


class CommunicationTotals:
    """Running totals of one kind of collective."""

    __slots__ = ("bytes", "count", "total_us", "unsized")

    def __init__(self) -> None:
        self.count = 0
        self.total_us = 0.0
        self.bytes = 0.0
        self.unsized = 0


class Collector:
    """Takes events in any order; every column grows by one number per event of its kind.

    Times are microseconds after the first event that was seen: an epoch in microseconds leaves a float a quarter of
    a microsecond.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.events = 0
        self.unpaired = 0
        self.categories: Counter[str] = Counter()
        self.base_us: float | None = None
        self._keys: dict[OpKey, int] = {}
        self._threads: dict[tuple[Any, Any], int] = {}
        self._devices: dict[Any, int] = {}
        self._open: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
        self.communications: dict[str, CommunicationTotals] = {}
        self.sync_rows = 0
        self.sync_us = 0.0
        self.span_key, self.span_thread, self.span_external = array("i"), array("i"), array("q")
        self.span_start, self.span_duration = array("d"), array("d")
        self.launch_correlation, self.launch_thread, self.launch_time = array("q"), array("i"), array("d")
        self.wait_thread, self.wait_start, self.wait_duration = array("i"), array("d"), array("d")
        self.activity_kind, self.activity_device = array("b"), array("i")
        self.activity_start, self.activity_duration = array("d"), array("d")
        self.activity_correlation, self.activity_external = array("q"), array("q")

    @property
    def keys(self) -> tuple[OpKey, ...]:
        """The distinct kinds of spans; ``span_key`` points here."""
        return tuple(self._keys)

    @property
    def threads(self) -> tuple[str, ...]:
        """``PID/TID`` of every thread; ``span_thread`` points here."""
        return tuple(f"{process}/{thread}" for process, thread in self._threads)

    def add(self, event: Any) -> None:
        """Take one event. Raises InputError that names it where its times cannot be."""
        self.events += 1
        if not isinstance(event, dict):
            raise InputError(self.where, f"event {self.events - 1} is no JSON object", "export the trace again")
        phase = event.get("ph")
        if phase == "X":
            self._complete(event, self._time(event, "ts"), self._length(event))
        elif phase == "B":
            self._open.setdefault(self._place(event), []).append(event)
        elif phase == "E":
            self._close(event)
        else:
            self.categories[str(event.get("cat", phase))] += 1

    def finish(self) -> None:
        """Count the ranges that were opened and never closed."""
        self.unpaired += sum(len(stack) for stack in self._open.values())

    def _close(self, event: Mapping[str, Any]) -> None:
        stack = self._open.get(self._place(event))
        if not stack:
            self.unpaired += 1  # opened before the capture began
            return
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
        elif category == "cuda_sync" or (category in _ACTIVITY and event.get("name") in _SYNC_ROWS):
            self.sync_rows += 1
            self.sync_us += duration
        elif category in _ACTIVITY:
            self._activity(event, _ACTIVITY[category], start, duration)

    def _span(self, event: Mapping[str, Any], start: float, duration: float) -> None:
        arguments = _arguments(event)
        shapes = arguments.get("Input Dims", arguments.get("Input dims"))
        dtypes = arguments.get("Input type")
        key = OpKey(
            str(event.get("name", "")), "" if shapes is None else str(shapes), "" if dtypes is None else str(dtypes)
        )
        self.span_key.append(self._keys.setdefault(key, len(self._keys)))
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
        named = _NCCL_KERNEL.match(str(event.get("name", ""))) if kind == COMPUTE_KERNEL else None
        if named is not None:
            kind = COMMUNICATION_KERNEL
            self._communication(str(arguments.get("Collective name") or named[1]), arguments, duration)
        device = arguments.get("device", event.get("pid"))
        self.activity_kind.append(kind)
        self.activity_device.append(self._devices.setdefault(str(device), len(self._devices)))
        self.activity_start.append(start)
        self.activity_duration.append(duration)
        self.activity_correlation.append(_identity(arguments.get("correlation")))
        self.activity_external.append(_identity(arguments.get("External id", arguments.get("external id"))))

    def _communication(self, name: str, arguments: Mapping[str, Any], duration: float) -> None:
        kind = name.replace("_", "").lower().removesuffix("base")
        totals = self.communications.setdefault(kind, CommunicationTotals())
        totals.count += 1
        totals.total_us += duration
        elements = _identity(arguments.get("In msg nelems"))
        size = _ELEMENT_BYTES.get(str(arguments.get("dtype", "")).lower())
        if elements < 0 or size is None:
            totals.unsized += 1
        else:
            totals.bytes += elements * size

    def _thread(self, event: Mapping[str, Any]) -> int:
        return self._threads.setdefault(self._place(event), len(self._threads))

    def _place(self, event: Mapping[str, Any]) -> tuple[str, str]:
        return str(event.get("pid")), str(event.get("tid"))

    def _time(self, event: Mapping[str, Any], field: str) -> float:
        value = self._number(event, field)
        if value is None:
            raise self._bad(event, f"has no {field}")
        if self.base_us is None:
            self.base_us = value
        return value - self.base_us

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
        return InputError(self.where, f"event {self.events - 1} ({name}): {problem}", remedy)


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
