"""The predicted step of a recorded script on a device: its kernels on their streams, its collectives, its memory.

A recorded step is one that a user's own script has run, with its collectives and its update among its ops. As with CUDA's
streams and events, an op starts once the host has issued it, the op before it on its stream has ended, and every op of another
stream that it waits for has ended. Start at :func:`predict_recorded`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.analyzers.step.costs.allocator import reserved_bytes
from ddltool.analyzers.step.costs.compiling import compiled, compiled_storages
from ddltool.analyzers.step.costs.model import CostModel, time_step
from ddltool.analyzers.step.costs.predict import fullest_of_spans, memory_range, products_s, usable_bytes
from ddltool.analyzers.step.costs.sharding import Sharding
from ddltool.analyzers.step.costs.wrapping import PART_OPS
from ddltool.arrays import Floats
from ddltool.graph import COMPUTE, Graph, Recorded
from ddltool.graph_results import MemoryTimeline, PredictedDevice, PredictedRow, PredictionAssumptions, PredictResult
from ddltool.precision import precision_of

# What the op types of collectives begin with, such as c10d.all_reduce.
_COLLECTIVE = "c10d."


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamedStep:
    """The simulated times of a recorded step's ``c`` compute ops (collectives included), in seconds from its start."""

    start_s: Floats
    """(c,) when each op starts."""
    end_s: Floats
    """(c,) when each op ends."""
    host_s: float
    """When the host has issued all ops."""
    alone_s: float
    """Seconds of the step if collectives took no time."""

    @property
    def step_s(self) -> float:
        """Seconds of the step: until the device and the host are done."""
        return float(max(self.end_s.max(initial=0.0), self.host_s))


def predict_recorded(graph: Graph, model_fabrics: Sequence[tuple[CostModel, Fabric]], source: str) -> PredictResult:
    """Return a recorded step's predicted row on each device, with the assumptions and each device's memory over time.

    Args:
        graph: a recorded step, whose ``recorded`` is not None.
        model_fabrics: for each device its cost model, and the network of such devices.
        source: the name of the script, for the rows.
    """
    rows, devices = [], {}
    recorded = graph.recorded
    assert recorded is not None
    for model, fabric in model_fabrics:
        row, timeline = _predict_row(graph, recorded, model, fabric, source)
        rows.append(row)
        devices[model.device.name] = PredictedDevice(
            saturation_batch=None,
            memory_limit_batch=row.local_batch_size if row.fits else 0,
            has_precision=precision_of(str(graph.meta.get("precision") or "fp32")).computes in model.device.peak_flops,
            price_per_hour=model.device.price_per_hour,
            error=model.residuals,
            link_bytes_per_s=fabric.inside.bytes_per_s,
            memory=timeline,
        )
    tokens = graph.meta.get("tokens_per_sample")
    fabric = model_fabrics[0][1]
    return PredictResult(
        predicted=True,
        rows=rows,
        devices=devices,
        assumptions=PredictionAssumptions(
            precision=str(graph.meta.get("precision") or "fp32"),
            channels_last=bool(graph.meta.get("channels_last")),
            compile=recorded.compiled,
            optimizer="recorded",
            accumulation=recorded.passes,
            sequence_length=int(tokens) if isinstance(tokens, int) else None,
            gpus_per_node=fabric.gpus_per_node,
            bandwidth_bytes_per_s=fabric.between.bytes_per_s,
            sharding="recorded",
        ),
    )


def simulate_streams(graph: Graph, model: CostModel, fabric: Fabric) -> StreamedStep:
    """Return the times of a recorded step's compute ops, including collectives, on a device. O(ops + edges).

    The step is simulated twice, with collectives and as if they took no time, so that their cost is known. ``graph``: a
    recorded step, whose ``recorded`` is not None. ``model``: the cost model of the device. ``fabric``: the network of such
    devices.
    """
    recorded = graph.recorded
    assert recorded is not None
    timed = time_step(graph, model.device, model.constants)
    ops = np.flatnonzero(graph.kind == COMPUTE)
    kernel_s, issue_s = timed.op_s[ops], timed.issue_s[ops].copy()
    exchange_s = np.zeros(len(ops))  # of collectives, which are free ops to the cost model
    for index, op in enumerate(ops):
        op_type = graph.op_type[op]
        if op_type.startswith(_COLLECTIVE):
            name = op_type.removeprefix(_COLLECTIVE)
            ranks = recorded.groups[graph.names[op]]
            exchange_s[index] = collective_s(name, graph.size_bytes[op], ranks, fabric)
            if name.startswith(("all_gather", "reduce_scatter")):  # FSDP2's hooks, or another library's in Python
                issue_s[index] += PART_OPS * model.constants.issue_s
    start_s, end_s, host_s = _play(graph, ops, kernel_s + exchange_s, issue_s, recorded.waits)
    _, end_without_s, host_without_s = _play(graph, ops, kernel_s, issue_s, recorded.waits)  # without collectives
    return StreamedStep(
        start_s=start_s, end_s=end_s, host_s=host_s, alone_s=max(end_without_s.max(initial=0.0), host_without_s)
    )


def collective_s(name: str, size_bytes: float, ranks: Sequence[int], fabric: Fabric) -> float:
    """Return the seconds of a collective; 0.0 for a single rank, which exchanges nothing.

    Args:
        name: as in op types, such as all_reduce; any but all_reduce and reduce_scatter costs as all_gather does.
        size_bytes: of the whole buffer, not of a rank's part.
        ranks: the numbers of the processes that take part, one per GPU; nodes are filled in the order of numbers.
        fabric: the network between the GPUs.
    """
    if len(ranks) < 2:
        return 0.0
    nodes = len({rank // fabric.gpus_per_node for rank in ranks})
    group = fabric.over(len(ranks), nodes)
    if name == "all_reduce":
        return float(group.all_reduce_s(size_bytes))
    if name == "reduce_scatter":
        return float(group.reduce_scatter_s(size_bytes))
    # Any other one (broadcast, all-to-all) passes each byte over a link about once, as all-gather does.
    return float(group.all_gather_s(size_bytes))


def _play(
    graph: Graph,
    ops: NDArray[np.intp],
    seconds: Floats,
    issue_s: Floats,
    waits: Sequence[int],
) -> tuple[Floats, Floats, float]:
    """Simulate a step, and return (start of each op (c,), end of each op (c,), when the host has issued all) in seconds.

    Args:
        graph: the step; the ``resource`` of an op is its stream.
        ops: (c,) the indices of the graph's compute ops, in the order in which the host issues them.
        seconds: (c,) the time of each op on the device.
        issue_s: (c,) the time of each op on the host.
        waits: indices into ``ops`` of ops after which the host waits until all streams are idle.
    """
    index_of = np.full(len(graph), -1, dtype=np.int64)  # by op of the graph, its index in ``ops``; -1: a transfer
    index_of[ops] = np.arange(len(ops))
    starts, ends = np.zeros(len(ops)), np.zeros(len(ops))
    stream_free_s: dict[int, float] = {}
    host_waits = set(waits)
    host_s = 0.0  # when the host has issued the ops so far
    for index, op in enumerate(ops.tolist()):
        host_s += float(issue_s[index])
        stream = int(graph.resource[op])
        # An op that takes the device no time, such as a view, is not launched, so that it does not wait for the host.
        launched_s = host_s if seconds[index] > 0 else 0.0
        start_s = max(stream_free_s.get(stream, 0.0), launched_s)
        for source in graph.inputs_of(op).tolist():  # those on its own stream have ended by now
            source_index = index_of[source]
            if source_index >= 0 and graph.resource[source] != stream:
                start_s = max(start_s, ends[source_index])
        end_s = start_s + float(seconds[index])
        starts[index] = start_s
        ends[index] = end_s
        stream_free_s[stream] = end_s
        if index in host_waits:
            host_s = max(host_s, max(stream_free_s.values()))
    return starts, ends, host_s


def _predict_row(
    graph: Graph, recorded: Recorded, model: CostModel, fabric: Fabric, source: str
) -> tuple[PredictedRow, MemoryTimeline]:
    """Return (row with the predicted time, throughput, memory and price of a recorded step on a device, memory over time).

    A step of a script that compiles its model is predicted with fused kernels, and without the tensors that they do not write.
    ``recorded``: that of ``graph``, not None. ``fabric``: the network of such devices. ``source``: the script's name, for the
    row.
    """
    executed = graph
    if recorded.compiled:
        executed = compiled(graph)
        recorded = compiled_storages(graph, recorded)
    # Time: of all streams with their collectives, and of the kernels alone for the host's part of it.
    step = simulate_streams(executed, model, fabric)
    timed = time_step(executed, model.device, model.constants)
    low_s, high_s = model.interval(
        step.step_s, host_share=timed.host_share, library_share=timed.library_share, compiled=recorded.compiled
    )
    replicas = recorded.world_size
    nodes = math.ceil(replicas / fabric.gpus_per_node)
    batch = graph.batch_size or 1
    # Not every process has a batch of its own: those that share tensors do not.
    samples = (recorded.batches or replicas) * batch * recorded.passes
    tokens = graph.meta.get("tokens_per_sample")
    price = model.device.price_per_hour
    # Memory: of the tensors at every op, and of the allocator's segments.
    held = recorded.held_bytes(int((graph.kind == COMPUTE).sum()))
    peak_bytes = float(held.max(initial=0.0))
    limited = _reserved(recorded, len(held), usable_bytes(model.device))
    reserved = limited
    if reserved is None:  # a step that does not fit is reported with what it would reserve on a device without a limit
        reserved = _reserved(recorded, len(held)) or 0
    low_bytes, high_bytes = memory_range(peak_bytes, reserved, Sharding.named("none", 1), replicas, 0.0)
    row = PredictedRow(
        device=model.device.name,
        num_nodes=nodes,
        num_replicas=replicas,
        num_gpus=replicas,
        local_batch_size=batch,
        step_time_s=step.step_s,
        predicted_low_s=low_s,
        predicted_high_s=high_s,
        sync_time_s=max(step.step_s - step.alone_s, 0.0),
        peak_memory_bytes=round(peak_bytes),
        reserved_bytes=reserved,
        memory_low_bytes=round(low_bytes),
        memory_high_bytes=round(high_bytes),
        fits=limited is not None,
        samples_per_s=samples / step.step_s,
        tokens_per_s=samples * float(tokens) / step.step_s if isinstance(tokens, (int, float)) else None,
        mfu=products_s(graph, model.device) / step.step_s,
        host_bound=timed.host_bound,
        host_wait_s=min(step.step_s, timed.pass_host_s + timed.update_host_s),
        price_per_million_samples=None if price is None else price * replicas / 3600 / (samples / step.step_s) * 1e6,
        accumulation_steps=recorded.passes - 1,
        source=source,
        origin="predicted",
    )
    return row, _timeline(recorded, step, row)


def _reserved(recorded: Recorded, places: int, limit_bytes: float = math.inf) -> int | None:
    """Return the bytes of segments that torch's allocator reserves for a recorded step's storages; None: over ``limit_bytes``.

    ``places``: the number of the step's compute ops. Storages that exist before the step and outlive it are allocated only
    once.
    """
    start, end, size = recorded.lives(places)
    lasts = np.array(
        [made < 0 and freed is None for made, freed in zip(recorded.made, recorded.freed, strict=True)], dtype=bool
    )
    is_state = np.array([part == "optimizer" for part in recorded.parts], dtype=bool)
    spans = list(zip(start[~lasts].tolist(), (end[~lasts] + 1).tolist(), size[~lasts].tolist(), strict=True))
    return reserved_bytes(size[lasts & ~is_state].tolist(), size[lasts & is_state].tolist(), spans, limit_bytes)


def _timeline(recorded: Recorded, step: StreamedStep, row: PredictedRow) -> MemoryTimeline:
    """Return the memory of a step over time: by part, the bytes at the fullest moment of each of equal spans of the step.

    ``step``: the simulated times of its ops. ``row``: the step's prediction, from which the timeline takes replicas and batch
    size.
    """
    op_count = len(step.end_s)
    at_s = np.maximum.accumulate(step.end_s)  # ascending: ops of several streams may end in another order
    fullest_ops = fullest_of_spans(at_s, recorded.held_bytes(op_count), step.step_s)
    # Rounding can leave sums of bytes that are added and freed slightly below 0.
    parts = {
        part: np.maximum(recorded.held_bytes(op_count, part)[fullest_ops], 0.0)
        for part in dict.fromkeys(recorded.parts)
    }
    return MemoryTimeline(
        num_replicas=row.num_replicas,
        local_batch_size=row.local_batch_size,
        time_s=at_s[fullest_ops].tolist(),
        parts={part: held.tolist() for part, held in parts.items() if held.any()},
    )
