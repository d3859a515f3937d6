"""A timeline as a Chrome trace, which Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddltool.analyzers.communication.timeline import Timeline
from ddltool.graph import KINDS, Graph


def to_chrome_trace(graph: Graph, timeline: Timeline, priority: Mapping[str, int] | None) -> dict[str, Any]:
    """Return the trace as a JSON-ready mapping: one complete event per op, one thread per resource, microseconds.

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
