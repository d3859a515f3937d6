"""Predicted steps over batch sizes and placements of a job on one device type. Start at :func:`predict`.

A step is ``accumulation`` passes and an update. With several replicas the gradients leave in DDP's default buckets over a
ring (Patarasuk and Yuan, JPDC 2009) while the last backward pass goes on, and only what is left after it counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ddltool.analyzers.communication.collectives import default_cuts, finish_s
from ddltool.analyzers.communication.program import Program, Ring, program_of
from ddltool.analyzers.costs.compiled import compiled
from ddltool.analyzers.costs.estimate import OPTIMIZER, estimate
from ddltool.analyzers.costs.model import CostModel, Interval
from ddltool.analyzers.costs.step import HOST_BOUND, OPTIMIZERS
from ddltool.analyzers.costs.work import Array, WorkCurve
from ddltool.device import Device, Network
from ddltool.errors import InputError, did_you_mean
from ddltool.graph import Graph

# The CUDA context, cuDNN's workspaces and fragmentation: what a training process cannot have of the device.
RESERVED_BYTES = 2.0**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What one replica sends over: bytes per second each way, and seconds per message."""

    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Replicas over nodes; one node is joined by the local link, several by the network."""

    num_nodes: int
    num_replicas: int

    def __post_init__(self) -> None:
        if not 1 <= self.num_nodes <= self.num_replicas:
            text = f"{self.num_replicas} replicas on {self.num_nodes} nodes"
            raise InputError("--replicas", text, "every node holds at least one replica")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How the replicas are joined, and how the model is trained."""

    local: Link
    network: Link
    optimizer: str = OPTIMIZER
    accumulation: int = 1
    """Passes in a step."""
    compile: bool = False

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise InputError("--optimizer", f"unknown {self.optimizer!r}", did_you_mean(self.optimizer, OPTIMIZERS))


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedStep:
    """One predicted configuration; seconds and bytes."""

    num_nodes: int
    num_replicas: int
    local_batch_size: int
    step: Interval
    sync_time_s: float
    """What the step takes longer than with one replica."""
    peak_memory_bytes: float
    fits: bool
    samples_per_s: float
    """Of all replicas."""
    tokens_per_s: float | None
    """Of all replicas, where the model reads tokens."""
    mfu: float
    """Share of the step that matrix products, convolutions and attention would take at the device's dense peak."""
    host_bound: bool


def predict(
    curve: WorkCurve, model: CostModel, setting: Setting, batch_sizes: Sequence[int], placements: Sequence[Placement]
) -> list[PredictedStep]:
    """Return one prediction per placement and local batch size, placements outermost. O(ops log ops) per batch size."""
    made: list[PredictedStep] = []
    timed = {size: timed_step(curve.traced.at(size), model, setting) for size in batch_sizes}
    programs = {size: program_of(graph) for size, graph in timed.items()}
    for placement in placements:
        for size in batch_sizes:
            graph, program = timed[size], programs[size]
            update_s = float(graph.meta.get("update_s") or 0.0)
            synced_s = _synchronised_s(program, setting, placement)
            step_s = (setting.accumulation - 1) * program.compute_s + synced_s + update_s
            share = graph.meta.get("host_share")
            host_share = float(share) if isinstance(share, (int, float)) else 0.0
            samples = placement.num_replicas * size * setting.accumulation
            tokens = graph.meta.get("tokens_per_sample")
            memory = peak_memory_bytes(curve.live_bytes(size), graph, setting.optimizer, placement.num_replicas)
            least_s = setting.accumulation * products_s(graph, model.device)
            made.append(
                PredictedStep(
                    num_nodes=placement.num_nodes,
                    num_replicas=placement.num_replicas,
                    local_batch_size=size,
                    step=model.interval(step_s, host_share=host_share),
                    sync_time_s=max(synced_s - program.compute_s, 0.0),
                    peak_memory_bytes=memory,
                    fits=memory <= usable_bytes(model.device),
                    samples_per_s=samples / step_s,
                    tokens_per_s=samples * float(tokens) / step_s if isinstance(tokens, (int, float)) else None,
                    mfu=least_s / step_s,
                    host_bound=host_share > HOST_BOUND,
                )
            )
    return made


def timed_step(graph: Graph, model: CostModel, setting: Setting) -> Graph:
    """Return a traced training graph with the model's times: of the compiled step where the setting says so."""
    run = compiled(graph) if setting.compile else graph
    network = Network(bandwidth_bytes_per_s=setting.network.bandwidth_bytes_per_s, latency_s=setting.network.latency_s)
    return estimate(run, model, network, optimizer=setting.optimizer)


# What each precision computes in.
_TYPES = {"amp": "float16", "bf16": "bfloat16", "tf32": "tf32", "fp32": "float32"}


def has_precision(device: Device, precision: str) -> bool:
    """Return whether a device's datasheet has a rate for the type that ``precision`` computes in."""
    return _TYPES[precision] in device.peak_flops


def products_s(graph: Graph, device: Device) -> float:
    """Return the seconds of all matrix products, convolutions and attention at the device's dense peak: what MFU counts.

    In ``fp32`` convolutions and recurrent layers may use TF32, so its peak is theirs.
    """
    precision = str(graph.meta.get("precision", "fp32"))
    peak = device.peak_for(_TYPES[precision])
    eased = device.peak_for("tf32") if precision == "fp32" else peak
    product = graph.gemm[:, 1] > 0
    names = [op_type.rpartition(".")[2] for op_type in graph.op_type]
    convolution = product & np.array([name.startswith(("convolution", "recurrent")) for name in names], dtype=bool)
    return float(graph.flops[convolution].sum() / eased + graph.flops[product & ~convolution].sum() / peak)


def usable_bytes(device: Device) -> float:
    """Return what a training process can have of a device's memory."""
    return device.memory_gib * 2.0**30 - RESERVED_BYTES


def _synchronised_s(program: Program, setting: Setting, placement: Placement) -> float:
    """Return forward, backward and what is left of DDP's all-reduces after it, in seconds."""
    if placement.num_replicas == 1:
        return program.compute_s
    ring = _ring(setting, placement)
    return max(program.compute_s, finish_s(program, ring, default_cuts(program)))


def _ring(setting: Setting, placement: Placement) -> Ring:
    """Return the ring through all replicas: as fast as its slowest hop.

    Over several nodes a message goes around the ring, of which every step waits for the network, or up and down a tree of
    the nodes with a chain inside each, whichever is shorter, as NCCL chooses.
    """
    n, nodes = placement.num_replicas, placement.num_nodes
    local, network = setting.local, setting.network
    if nodes == 1:
        return Ring(replicas=n, bandwidth_bytes_per_s=local.bandwidth_bytes_per_s, latency_s=local.latency_s)
    rate, turns = network.bandwidth_bytes_per_s, 2 * (n - 1)
    inside = math.ceil(n / nodes) - 1
    if inside:
        rate = min(rate, local.bandwidth_bytes_per_s)
    tree_s = 2 * (math.ceil(math.log2(nodes)) * network.latency_s + inside * local.latency_s)
    return Ring(replicas=n, bandwidth_bytes_per_s=rate, latency_s=min(turns * network.latency_s, tree_s) / turns)


def peak_memory_bytes(live_bytes: Array, graph: Graph, optimizer: str, num_replicas: int = 1) -> float:
    """Return the estimated peak of one replica: parameters, gradients, activations, optimizer state, DDP's buckets.

    ``live_bytes``: (c,) alive after each call of the pass. ``graph``: the pass at any batch size, for its parameters.
    """
    trained = graph.trained_bytes
    state = OPTIMIZERS[optimizer].state_copies * trained
    buckets = trained if num_replicas > 1 else 0.0
    updating = graph.parameter_bytes + 2 * trained  # the parameters, their gradients, and one temporary
    return max(float(live_bytes.max(initial=0.0)), updating) + state + buckets


def memory_limit_batch(curve: WorkCurve, device: Device, optimizer: str, num_replicas: int = 1) -> int:
    """Return the largest local batch whose estimated peak fits the device; 0 when none does. Bisection."""

    def fits(size: int) -> bool:
        live = curve.live_bytes(size)
        return peak_memory_bytes(live, curve.traced.graph, optimizer, num_replicas) <= usable_bytes(device)

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high) and high < 2**40:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
