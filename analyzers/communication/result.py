"""What ``ddltool trace`` found, as one record. Start at :func:`trace_result`."""

from __future__ import annotations

from ddltool.analyzers.communication.efficiency import Comparison, verdict
from ddltool.analyzers.costs.model import coverage
from ddltool.artifacts import parse_record
from ddltool.graph import RECV, SEND, Graph
from ddltool.graph_results import BucketFigures, CollectiveFigures, TraceBounds, TracedGraph, TraceResult


def trace_result(graph: Graph, comparison: Comparison, plans: CollectiveFigures | None = None) -> TraceResult:
    """Return a trace as the command's result: graph, bounds, schedules, what is winnable, collectives, coverage, verdict."""
    bounds = comparison.bounds
    return TraceResult(
        graph=_traced_graph(graph),
        bounds=TraceBounds(
            upper_s=bounds.upper_s,
            lower_s=bounds.lower_s,
            speedup=bounds.speedup,
            best_lower_s=comparison.best_bound_s,
        ),
        schedules=comparison.schedules,
        efficiency_undefined=comparison.undefined_reason,
        coverage=coverage(graph),
        servers=_servers_of(graph),
        collectives=None if plans is None else _with_names_of_the_best(plans),
        verdict=verdict(comparison),
        predicted=True,
    )


# What a graph says of its times: where they are for, how they were made, and how sure they are.
_SAID = (
    *("device", "oracle", "precision", "channels_last", "optimizer", "update_s", "error_low", "error_high"),
    *("bandwidth_bytes_per_s", "latency_s"),
)


def _traced_graph(graph: Graph) -> TracedGraph:
    """Return a graph's figures."""
    counts = {
        "parameters": len(graph.of_kind(RECV)),
        "parameter_bytes": int(graph.parameter_bytes),
        "parameter_elements": graph.meta.get("parameter_elements"),
        "ops": len(graph),
        "recvs": len(graph.of_kind(RECV)),
        "sends": len(graph.of_kind(SEND)),
        "flops": float(graph.flops.sum()),
    }
    times = {key: graph.meta.get(key) for key in _SAID}
    channels = sum(name.startswith("channel:") for name in graph.resource_names)
    whole = {"name": graph.name, "mode": graph.mode, "batch_size": graph.batch_size, **counts, **times}
    return parse_record({**whole, "channels": channels}, TracedGraph, graph.name)


def _servers_of(graph: Graph) -> dict[str, list[str]]:
    """Return which parameters each channel (parameter server) holds, in file order."""
    held: dict[str, list[str]] = {name: [] for name in graph.resource_names if name.startswith("channel:")}
    for op in graph.of_kind(RECV):
        held[graph.resource_names[graph.resource[op]]].append(graph.parameter[op] or graph.names[op])
    return held


def _with_names_of_the_best(plans: CollectiveFigures) -> CollectiveFigures:
    """Return the plans without the parameters of the buckets that nobody would set."""
    others = {
        name: BucketFigures(**getattr(plans.ddp, name).model_dump(exclude={"bucket_parameters"}))
        for name in ("default", "best_cap")
    }
    return plans.model_copy(update={"ddp": plans.ddp.model_copy(update=others)})
