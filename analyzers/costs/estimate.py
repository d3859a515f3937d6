"""The time oracle of the cost model: a graph with the predicted duration of every op. Start at :func:`estimate`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ddltool.analyzers.costs.model import CostModel
from ddltool.device import Network
from ddltool.graph import COMPUTE, Estimate, Graph, spread
from ddltool.results import CoverageFigures

# The optimizer of whoever names none: predictions, plans and traces then speak of the same step.
OPTIMIZER = "adam"


def estimate(graph: Graph, model: CostModel, network: Network, *, optimizer: str = OPTIMIZER) -> Graph:
    """Return the graph with every duration set for the model's device and ``network``, in seconds. O(n).

    A compute op lasts from the end of the one before it to its own: where the device waits for the host, the op that it
    waits for takes longer. ``meta`` gets the seconds of the update that follows the graph's ops (``update_s``), and between
    which factors of the prediction 80 % of measurements are expected (``error_low``, ``error_high``). Transfers are spread
    over ``network.parameter_servers`` channels; see :func:`assign_channels`.
    """
    graph = assign_channels(graph, network.parameter_servers)
    step = model.step(graph, optimizer=optimizer)
    interval = model.interval(1.0, host_share=step.host_share)
    is_compute = graph.kind == COMPUTE
    transfer = network.latency_s + graph.size_bytes / network.bandwidth_bytes_per_s
    durations = np.where(is_compute, np.diff(step.end_s, prepend=0.0), transfer)
    marks = tuple(_mark(s) if c else "rule" for s, c in zip(graph.estimate, is_compute, strict=True))
    meta = {
        **graph.meta,
        "oracle": "roofline",
        "device": model.device.name,
        "bandwidth_bytes_per_s": network.bandwidth_bytes_per_s,
        "latency_s": network.latency_s,
        "parameter_servers": network.parameter_servers,
        "optimizer": optimizer,
        "update_s": step.update_s,
        "host_share": step.host_share,
        "error_low": interval.low,
        "error_high": interval.high,
    }
    return replace(graph, meta=meta).with_durations(np.maximum(durations, 0.0), marks)


def _mark(source: Estimate | None) -> Estimate:
    """Return what an estimated time rests on: a graph whose costs came without provenance counts as default."""
    return source if source in ("rule", "free") else "default"


def assign_channels(graph: Graph, servers: int) -> Graph:
    """Return the graph with its transfers spread over ``channel:0`` to ``channel:servers-1``.

    A parameter's recv and send use the same channel. Largest parameter first onto the least loaded channel (LPT), ties
    by name, so the assignment does not depend on the file's order. O(p log p + p * servers).
    """
    size: dict[str, float] = {}
    transfers = np.flatnonzero(graph.kind != COMPUTE)
    for position in transfers:
        key = graph.parameter[position] or graph.names[position]
        size[key] = max(size.get(key, 0.0), float(graph.size_bytes[position]))
    channel = spread(size, servers)
    computes = sorted({graph.resource_names[graph.resource[i]] for i in np.flatnonzero(graph.kind == COMPUTE)})
    used = sorted(set(channel.values()))
    names = tuple([f"channel:{number}" for number in used] + computes)
    place = {name: number for number, name in enumerate(names)}
    resource = graph.resource.copy()
    for op in range(len(graph)):
        if graph.kind[op] == COMPUTE:
            resource[op] = place[graph.resource_names[graph.resource[op]]]
        else:
            key = graph.parameter[op] or graph.names[op]
            resource[op] = place[f"channel:{channel[key]}"]
    return replace(graph, resource=resource, resource_names=names)


def coverage(graph: Graph) -> CoverageFigures:
    """Return how much of the compute ops, and of their estimated time, comes from a rule rather than a default."""
    compute = graph.kind == COMPUTE
    ops = max(int(compute.sum()), 1)
    source = np.array([estimate or "file" for estimate in graph.estimate])
    times = np.nan_to_num(graph.duration_s)
    total = float(times[compute].sum()) or 1.0
    default = compute & (source == "default")
    free = compute & (source == "free")
    counts: dict[str, int] = {}
    for position in np.flatnonzero(default):
        counts[graph.op_type[position]] = counts.get(graph.op_type[position], 0) + 1
    measured = compute & (source == "measured")
    rule = compute & (source == "rule")
    return CoverageFigures(
        rule_ops=int(rule.sum()) / ops,
        rule_time=float(times[rule].sum()) / total,
        measured_ops=int(measured.sum()) / ops,
        measured_time=float(times[measured].sum()) / total,
        default_ops=int(default.sum()) / ops,
        default_time=float(times[default].sum()) / total,
        free_ops=int(free.sum()) / ops,
        default_types=sorted(counts.items(), key=lambda item: (-item[1], item[0])),
    )
