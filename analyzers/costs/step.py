"""One step on one device: the host issues ops, the device's queue runs them, and the step ends when both have.

Start at :func:`time_step`. A model of small kernels is bound by the host, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddltool.analyzers.costs.kernel_times import Constants, demand_of, seconds
from ddltool.analyzers.costs.kernels import kernels_of
from ddltool.device import Device
from ddltool.graph import COMPUTE, SEND, Graph

Array = NDArray[np.float64]
# From this share of the device's time on a step is called bound by the host: a slower host then makes the step longer.
HOST_BOUND = 0.9
# A view is no kernel, but the host makes it: measured beside ops that launch one.
VIEW = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    """What an update costs per byte of parameters."""

    state_copies: float
    """Copies of the parameters that it keeps."""
    passes: float
    """Times that it reads or writes the parameters' size."""


OPTIMIZERS = {
    "none": Optimizer(state_copies=0, passes=0),
    "sgd": Optimizer(state_copies=0, passes=3),
    "momentum": Optimizer(state_copies=1, passes=5),
    "adam": Optimizer(state_copies=2, passes=7),
    "adamw": Optimizer(state_copies=2, passes=7),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class StepTime:
    """The predicted time of one pass and its update, in seconds."""

    op_s: Array
    """(n,) device seconds of every op of the graph; 0 for transfers and views."""
    host_s: float
    """What the host takes to issue all ops."""
    device_s: float
    """What the device takes for all kernels, one after another."""
    end_s: Array
    """(n,) when every op has ended on the device, from the start of the pass; a view with the op before it."""
    update_s: float

    @property
    def pass_s(self) -> float:
        """When the device is done: forward, and backward in training."""
        return float(self.end_s[-1]) if len(self.end_s) else 0.0

    @property
    def step_s(self) -> float:
        """Pass and update."""
        return self.pass_s + self.update_s

    @property
    def host_share(self) -> float:
        """What the host takes, as a share of what the device takes."""
        return self.host_s / self.device_s if self.device_s > 0 else 0.0

    @property
    def host_bound(self) -> bool:
        """Whether the host needs about as long as the device, or longer."""
        return self.host_share > HOST_BOUND


def time_step(graph: Graph, device: Device, constants: Constants, *, optimizer: str = "none") -> StepTime:
    """Return the predicted time of one step of a traced graph. O(n).

    Precision and layout are those that the graph was traced in (``meta``).
    """
    kernels = kernels_of(graph)
    precision, channels_last = str(graph.meta.get("precision", "fp32")), bool(graph.meta.get("channels_last", False))
    demand = demand_of(kernels, device, precision=precision, channels_last=channels_last)
    op_s = kernels.per_op(seconds(demand, constants))
    compute = graph.kind == COMPUTE
    # What costs nothing in an ONNX file (constants, shapes, reshapes) is folded before it runs.
    folded = np.array([op_type.startswith("onnx.") for op_type in graph.op_type], dtype=bool)
    view_s = np.where(folded, 0.0, VIEW * constants.issue_s)
    issued = np.where(compute, np.where(op_s > 0, constants.issue_s, view_s), 0.0)
    issued_at, done = np.cumsum(issued), np.cumsum(op_s)
    # An op starts once it was issued and the one before it has ended: end_i = max over j <= i of issued_j + t_j + ... + t_i.
    begun = np.where(op_s > 0, issued_at - (done - op_s), -np.inf)
    latest = np.maximum.accumulate(begun)
    end_s = np.where(np.isfinite(latest), done + latest, 0.0)
    return StepTime(
        op_s=op_s,
        host_s=float(issued_at[-1]) if len(issued_at) else 0.0,
        device_s=float(op_s.sum()),
        end_s=end_s,
        update_s=update_s(graph, device, constants, optimizer) if graph.mode == "training" else 0.0,
    )


def update_s(graph: Graph, device: Device, constants: Constants, optimizer: str) -> float:
    """Return the seconds of the optimizer's update: its memory traffic, and host work per trained tensor."""
    passes = OPTIMIZERS[optimizer].passes
    if passes == 0:
        return 0.0
    rate = device.memory_bytes_per_s * constants.traffic["pointwise"] * constants.units["memory"]
    tensors = len(graph.of_kind(SEND))
    return passes * graph.trained_bytes / rate + constants.update_s * tensors
