"""The result of tracing a step and ordering its transfers, as one record. Start at :func:`trace_result`."""

from __future__ import annotations

from ddltool.analyzers.step.costs.model import coverage
from ddltool.analyzers.step.transfers.efficiency import Comparison, verdict
from ddltool.artifacts import parse_record
from ddltool.graph import RECV, SEND, Graph
from ddltool.graph_results import BucketFigures, CollectiveFigures, TraceBounds, TracedGraph, TraceResult


def trace_result(graph: Graph, comparison: Comparison, plans: CollectiveFigures | None = None) -> TraceResult:
    """Return the result of the command ``trace``: graph, bounds, schedules, coverage, collectives and verdict.

    ``comparison``: of orders of the graph's transfers. ``plans``: for the collectives of data-parallel frameworks; None: it is
    an inference graph, which has none.
    """
    bounds, best_s = comparison.bounds, comparison.best_bound_s
    return TraceResult(
        graph=_traced_graph(graph),
        bounds=TraceBounds(upper_s=bounds.upper_s, lower_s=bounds.lower_s, speedup=bounds.speedup, best_lower_s=best_s),
        schedules=comparison.schedules,
        efficiency_undefined=comparison.undefined_reason,
        coverage=coverage(graph),
        servers=_servers_of(graph),
        collectives=None if plans is None else _drop_other_bucket_names(plans),
        verdict=verdict(comparison),
        predicted=True,
    )


# Keys of a graph's ``meta`` that describe its times: device and network, oracle, precision and error.
_DESCRIPTION = (
    "device", "oracle", "precision", "channels_last", "optimizer", "update_s", "error_low", "error_high",
    "bandwidth_bytes_per_s", "latency_s",
)  # fmt: skip


def _traced_graph(graph: Graph) -> TracedGraph:
    """Return a graph's name, counts and sizes, and the values of its ``meta`` that describe its times (``_DESCRIPTION``)."""
    recvs, sends = len(graph.of_kind(RECV)), len(graph.of_kind(SEND))
    record = {
        "name": graph.name,
        "mode": graph.mode,
        "batch_size": graph.batch_size,
        "parameters": recvs,  # each has one recv
        "parameter_bytes": int(graph.parameter_bytes),
        "ops": len(graph),
        "recvs": recvs,
        "sends": sends,
        **{key: graph.meta.get(key) for key in ("parameter_elements", *_DESCRIPTION)},
        "flops": float(graph.flops.sum()),
        "channels": sum(name.startswith("channel:") for name in graph.resource_names),
    }
    return parse_record(record, TracedGraph, graph.name)


def _servers_of(graph: Graph) -> dict[str, list[str]]:
    """Return, by the name of each channel (parameter server), the names of its parameters in file order."""
    parameters_of: dict[str, list[str]] = {name: [] for name in graph.resource_names if name.startswith("channel:")}
    for op in graph.of_kind(RECV):
        parameters_of[graph.resource_names[graph.resource[op]]].append(graph.parameter[op] or graph.names[op])
    return parameters_of


def _drop_other_bucket_names(plans: CollectiveFigures) -> CollectiveFigures:
    """Return the plans without the parameter names in DDP's default and best-cap buckets, which would swell the result."""
    plans_without_names = {"default": plans.ddp.default, "best_cap": plans.ddp.best_cap}
    shortened = {
        name: BucketFigures(**bucket_plan.model_dump(exclude={"bucket_parameters"}))
        for name, bucket_plan in plans_without_names.items()
    }
    return plans.model_copy(update={"ddp": plans.ddp.model_copy(update=shortened)})
