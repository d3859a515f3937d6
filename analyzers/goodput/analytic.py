"""Step times of a GPU that is not here: the roofline with measured efficiencies and launch costs. Start at :func:`predict`.

An op takes ``launch + max(flops / (share of peak), bytes / (share of bandwidth))`` (Williams et al., "Roofline", CACM 2009,
with what kernels reach instead of datasheet peaks); the update takes what its memory traffic takes, plus host work per
parameter. The shares and host times are constants for all devices and models (:class:`Calibration`), fitted to published
measurements; how far off they are on models and devices left out of the fit is in :mod:`.analytic_calibration`.

With several replicas the gradients leave in DDP's default buckets over a ring (Patarasuk and Yuan, JPDC 2009) while the
backward pass goes on, and only what is left after it counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.communication.ddp import DEFAULT_CAP_MIB, DEFAULT_FIRST_BYTES, assign_buckets, finish_s
from ddltool.analyzers.communication.program import Program, Ring, program_of
from ddltool.analyzers.goodput.step_work import StepWork, WorkCurve
from ddltool.device import Device
from ddltool.errors import InputError, did_you_mean
from ddltool.graph import COMPUTE, RECV, Graph

Array = NDArray[np.float64]
Arithmetic = Literal["default", "float32", "tf32", "mixed"]
ARITHMETICS: tuple[Arithmetic, ...] = ("default", "float32", "tf32", "mixed")
_MATMUL = frozenset(f"aten.{name}" for name in ("mm", "bmm", "addmm", "baddbmm", "addbmm", "linear", "matmul"))
# Peaks this many times float32's are those of matrix units, which kernels reach less of.
_MATRIX_UNIT = 2.5
# Mixed precision halves the bytes of activations and keeps a half-size copy of the weights.
_HALF = 0.5
# The CUDA context, cuDNN's workspaces and fragmentation: what a training process cannot have of the device.
RESERVED_BYTES = 2.0**30


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """What an update costs per byte of parameters."""

    state_copies: float
    """Copies of the parameters that it keeps."""
    passes: float
    """Times that it reads or writes the parameters' size."""


OPTIMIZERS = {
    "sgd": Optimizer(state_copies=0, passes=3),
    "momentum": Optimizer(state_copies=1, passes=5),
    "adam": Optimizer(state_copies=2, passes=7),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What real steps reach of the datasheet, and what the host adds."""

    vector_share: float
    """Share of the float32 peak in convolutions and matrix products; above 1 where algorithms need fewer operations."""
    matrix_unit_share: float
    """The same on tensor cores."""
    bandwidth_share: float
    per_op_s: float
    """Seconds to launch one op."""
    per_parameter_s: float
    """Seconds of host work per parameter tensor: hooks, gradient accumulation, update."""


DATASHEET = Calibration(vector_share=1.0, matrix_unit_share=1.0, bandwidth_share=1.0, per_op_s=0.0, per_parameter_s=0.0)


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
class Target:
    """The device and what joins its replicas, and how the model is trained on it."""

    device: Device
    local: Link
    network: Link
    arithmetic: Arithmetic = "default"
    optimizer: str = "adam"
    calibration: Calibration = DATASHEET

    def __post_init__(self) -> None:
        if self.arithmetic not in ARITHMETICS:
            raise InputError("--arithmetic", f"unknown {self.arithmetic!r}", did_you_mean(self.arithmetic, ARITHMETICS))
        if self.optimizer not in OPTIMIZERS:
            raise InputError("--optimizer", f"unknown {self.optimizer!r}", did_you_mean(self.optimizer, OPTIMIZERS))


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedStep:
    """One predicted configuration; seconds and bytes."""

    num_nodes: int
    num_replicas: int
    local_batch_size: int
    step_time_s: float
    sync_time_s: float
    """What the step takes longer than with one replica."""
    peak_memory_bytes: float
    launch_s: float
    """The part that does not depend on the batch: launches and host work per parameter."""


def predict(
    curve: WorkCurve, target: Target, batch_sizes: Sequence[int], placements: Sequence[Placement]
) -> list[PredictedStep]:
    """Return one prediction per placement and local batch size, placements outermost. O(ops log ops) per batch size.

    Raises InputError for a batch size that the curve does not know.
    """
    made: list[PredictedStep] = []
    programs = {size: _program(curve.at(size), target) for size in batch_sizes}
    for placement in placements:
        for size in batch_sizes:
            program, update_s, launch_s = programs[size]
            synced_s = _synchronised_s(program, target, placement)
            made.append(
                PredictedStep(
                    num_nodes=placement.num_nodes,
                    num_replicas=placement.num_replicas,
                    local_batch_size=size,
                    step_time_s=synced_s + update_s,
                    sync_time_s=synced_s - program.compute_s,
                    peak_memory_bytes=peak_memory_bytes(curve.at(size), target, placement.num_replicas),
                    launch_s=launch_s,
                )
            )
    return made


def op_times_s(graph: Graph, target: Target) -> Array:
    """Return (n,) seconds of every op on the target, 0 for transfers and for ops that cost nothing."""
    device, calibration = target.device, target.calibration
    costs = (graph.kind == COMPUTE) & np.array([source != "free" for source in graph.estimate])
    rate = np.empty(len(graph))
    for op, op_type in enumerate(graph.op_type):
        rate[op] = _rate(device, _dtype(graph, op_type, target.arithmetic), calibration)
    scale = _HALF if target.arithmetic == "mixed" else 1.0
    moved = graph.size_bytes * scale / (device.memory_bytes_per_s * calibration.bandwidth_share)
    busy = np.maximum(graph.flops / rate, moved) + calibration.per_op_s
    return np.where(costs, busy, 0.0)


def _dtype(graph: Graph, op_type: str, arithmetic: Arithmetic) -> str:
    """Return the name of the peak that an op runs at; what is no matrix product is bound by memory at any peak."""
    own = str(graph.meta.get("dtype", "float32"))
    convolution = op_type.startswith("aten.convolution")
    if own != "float32" or not (convolution or op_type in _MATMUL or "attention" in op_type):
        return own
    if arithmetic == "mixed":
        return "float16"
    # torch's defaults: convolutions may use TF32, matrix products may not.
    return "tf32" if arithmetic == "tf32" or (arithmetic == "default" and convolution) else "float32"


def _rate(device: Device, dtype: str, calibration: Calibration) -> float:
    peak = device.peak_for(dtype)
    on_matrix_unit = peak > _MATRIX_UNIT * device.peak_flops["float32"]
    return peak * (calibration.matrix_unit_share if on_matrix_unit else calibration.vector_share)


def _program(work: StepWork, target: Target) -> tuple[Program, float, float]:
    """Return the timed step in program order, the seconds of the update, and the seconds that launches take."""
    graph, calibration = work.graph, target.calibration
    times = op_times_s(graph, target)
    program = program_of(graph.with_durations(times, graph.estimate))
    rate = target.device.memory_bytes_per_s * calibration.bandwidth_share
    host_s = calibration.per_parameter_s * len(graph.of_kind(RECV))
    traffic_s = OPTIMIZERS[target.optimizer].passes * graph.parameter_bytes / rate
    launches_s = calibration.per_op_s * int(np.count_nonzero(times))
    return program, host_s + traffic_s, host_s + launches_s


def _synchronised_s(program: Program, target: Target, placement: Placement) -> float:
    """Return forward, backward and what is left of DDP's all-reduces after it, in seconds."""
    if placement.num_replicas == 1:
        return program.compute_s
    link = target.local if placement.num_nodes == 1 else target.network
    ring = Ring(
        replicas=placement.num_replicas, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s, latency_s=link.latency_s
    )
    cuts = assign_buckets(program, DEFAULT_CAP_MIB, DEFAULT_FIRST_BYTES)
    return max(program.compute_s, finish_s(program, ring, cuts))


def peak_memory_bytes(work: StepWork, target: Target, num_replicas: int = 1) -> float:
    """Return the estimated peak of one replica: parameters, gradients, activations, optimizer state, DDP's buckets."""
    parameters = work.graph.parameter_bytes
    live = float(work.live_bytes.max(initial=0.0))
    if target.arithmetic == "mixed":
        live = parameters + _HALF * max(live - parameters, 0.0) + _HALF * parameters
    state = OPTIMIZERS[target.optimizer].state_copies * parameters
    buckets = parameters if num_replicas > 1 else 0.0
    updating = 3 * parameters  # the parameters, their gradients, and one temporary
    return max(live, updating) + state + buckets


def memory_limit_batch(curve: WorkCurve, target: Target, num_replicas: int = 1) -> int:
    """Return the largest local batch whose estimated peak fits the device beside ``RESERVED_BYTES``; 0 when none does.

    Among all sizes for an affine step (bisection), among the traced ones otherwise.
    """
    usable = target.device.memory_gib * 2.0**30 - RESERVED_BYTES

    def fits(size: int) -> bool:
        return peak_memory_bytes(curve.at(size), target, num_replicas) <= usable

    if not curve.affine:
        return max((size for size in curve.traced if fits(size)), default=0)
    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high) and high < 2**40:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
