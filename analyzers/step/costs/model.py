"""The cost model of one device: its datasheet, the constants that hold for it, and how sure its predictions are.

The host issues ops, the device's queue runs them, and a step ends when both have: a model of small kernels is bound by the
host, and says so. Start at :class:`CostModel`; :func:`cost_model` makes one from the device table and the calibration,
:func:`estimate` gives every op of a graph its duration.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np

from ddltool.analyzers.step.costs.kernel_times import DATASHEET, UNITS, Constants, by_library, demand_of, seconds
from ddltool.analyzers.step.costs.kernels import kernels_of, memory_kernels
from ddltool.analyzers.step.costs.optimizers import OPTIMIZERS, parameters_of, update_of
from ddltool.analyzers.step.recording.op_rules import CLASS, class_of
from ddltool.arrays import Floats
from ddltool.calibration import CalibrationTable, Residuals
from ddltool.device import GIVEN, Device, Generation, Network, name_key
from ddltool.graph import COMPUTE, SEND, Estimate, Graph, assign_channels
from ddltool.graph_results import CoverageFigures
from ddltool.precision import precision_name, precision_of

# If the host takes this share of the device's time or more, a step is called host-bound: a slower host makes it longer.
HOST_BOUND = 0.9
# A host that takes up to this share of the device's time does not affect the step.
_HIDDEN = 0.5
# If kernels that differ by the library's version take this share of the device's time or more, their range is the step's.
LIBRARY_BOUND = 0.3
# A view launches no kernel, but takes the host this share of the time of an op that does (measured).
VIEW = 0.25
_DETACH = "aten.detach"
# The time that the wrapper of a compiled step takes to launch a kernel, over that of an op in eager mode, which goes through
# Python, autograd and the dispatcher. Fused ops and views then cost the host nothing.
WRAPPED = 0.4
# Of the time that products and collectives would save if neither slowed the other down, what they save: the share that fits
# the gains that torchtitan published of asynchronous tensor parallelism (benchmarks/truth_parallel.py).
_OVERLAPPED = 0.5
# The default optimizer of predictions, plans and traces alike.
OPTIMIZER = "adam"
# Branches of chips, each by year: a generation without measured rows is interpolated between its neighbours.
BRANCHES = (
    ("Kepler",),
    ("Pascal HBM", "Volta", "Ampere HBM", "Hopper", "Blackwell HBM"),
    ("Maxwell", "Pascal", "Turing", "Ampere", "Ada", "Blackwell"),
    ("CDNA", "CDNA2", "CDNA3", "CDNA4"),
)


def lora_words(rank: int, load_in_4bit: bool) -> str:
    """Return in words what LoRA adapters of a rank train; ``load_in_4bit``: whether frozen linear layers have 4-bit weights."""
    return f"LoRA of rank {rank}{' on 4-bit weights' if load_in_4bit else ''}"


def memory_words(precision: str, optimizer: str, copied: bool = False) -> str:
    """Return a text that explains a precision, and says the bytes of a parameter with its gradient and optimizer states.

    ``precision``: a name of :class:`Numerics`; ``optimizer``: a name of ``OPTIMIZERS``. ``copied``: whether ops read
    parameters in a half type (16 bits), and the optimizer updates float32 copies of them.

    >>> memory_words("bf16", "adamw")
    'bf16: autocast over float32 parameters, 16 bytes a parameter with adamw'
    >>> memory_words("bf16-pure", "none")
    'bf16-pure: everything in bfloat16, 4 bytes a parameter with its gradient'
    """
    update, numerics = OPTIMIZERS[optimizer], precision_of(precision)
    if copied and numerics.is_autocast:
        return f"{precision_name(precision)}: parameters in {numerics.computes}, updated in float32 with {optimizer}"
    pair_bytes = 2 * numerics.width  # a parameter and its gradient
    if update.each is None or copied:
        parameter_bytes = numerics.width * (2 + update.state_share(numerics.width))  # with its gradient and its states
        size_words = f"{round(parameter_bytes, 1):g} bytes a parameter"
        size_words += f" with {optimizer}" if optimizer != "none" else " with its gradient"
    elif optimizer == "muon":  # its states follow from shapes, as adafactor's do
        size_words = f"{1.5 * pair_bytes:g} bytes a parameter of the blocks' matrices with muon"
        size_words += f", {2 * pair_bytes:g} of the rest with adamw"
    else:
        size_words = f"{pair_bytes:g} bytes a parameter with adafactor"
        size_words += ", and a number for each row and column of a matrix"
    return f"{precision_name(precision)}: {', '.join(filter(None, (numerics.words, size_words)))}"


@dataclass(frozen=True, kw_only=True, eq=False)
class PredictedStep:
    """The predicted time of one pass and its update, in seconds."""

    op_s: Floats
    """(n,) device seconds of every op of the graph; 0 for transfers and views."""
    issue_s: Floats
    """(n,) seconds in which the host issues each op; 0 for transfers. The first op of a recorded update includes the time
    that the host takes to go through the update's tensors."""
    host_s: float
    """Seconds of the host to issue all ops, including the update's."""
    device_s: float
    """Seconds of the device for all kernels, one after another."""
    end_s: Floats
    """(n,) when every op has ended on the device, from the start of the pass; a view ends with the op before it."""
    update_s: float
    """Seconds from the end of the graph's ops to the end of the update that follows them."""
    update_host_s: float
    """The part of ``update_s`` in which the device waits for the host, which goes through the tensors one by one; sharding
    does not shorten it."""
    sum_s: float = 0.0
    """Seconds to add the gradients of one pass to those of the passes before, with one kernel for each gradient."""
    sum_launch_s: float = 0.0
    """The part of :attr:`sum_s` that kernels of no bytes would take; sharding does not shorten it."""
    library_s: float = 0.0
    """The part of ``device_s`` in kernels whose time differs by the version of their library (cuDNN)."""

    @property
    def pass_s(self) -> float:
        """Seconds from the start until the device has done the pass: forward, and backward in training."""
        return float(self.end_s[-1]) if len(self.end_s) else 0.0

    @property
    def pass_host_s(self) -> float:
        """Seconds of the pass in which the device waits for the host to issue an op."""
        return max(0.0, self.pass_s - float(self.op_s.sum()))

    @property
    def step_s(self) -> float:
        """Seconds of the pass and the update."""
        return self.pass_s + self.update_s

    @property
    def host_share(self) -> float:
        """The host's seconds over the device's; 0 if the device takes no time."""
        return self.host_s / self.device_s if self.device_s > 0 else 0.0

    @property
    def library_share(self) -> float:
        """The share of the device's time in kernels whose time differs by the library's version, 0 to 1."""
        return self.library_s / self.device_s if self.device_s > 0 else 0.0

    @property
    def host_bound(self) -> bool:
        """Whether the host needs about as long as the device, or longer."""
        return self.host_share > HOST_BOUND


@dataclass(frozen=True, kw_only=True, eq=False)
class Exchanges:
    """The communication that a step on several devices waits for."""

    seconds: Floats
    """(n,) seconds of the collectives that follow an op and that the next op waits for; the host issues them like ops."""
    restarts: Sequence[int] = ()
    """Ascending indices of ops before which the host waits until the device has done all ops so far."""
    overlapped_s: Floats | None = None
    """(n,) seconds of the collectives that follow an op and run at the same time as products; None: there are none."""
    pieces: int = 1
    """In how many pieces products and ``overlapped_s`` are divided for that; a piece is sent once it is computed."""

    def waits_s(self, op_s: Floats, op_type: Sequence[str]) -> Floats:
        """Return (n,) the seconds for which the device waits after each op.

        Half of an overlapped collective (the reduce-scatter) runs beside the products since the one before it, half (the
        all-gather) beside those before the next. Both are divided into pieces, so that all but one piece of the shorter could
        be hidden; ``_OVERLAPPED`` of that is. ``op_s``, ``op_type``: (n,) seconds and types of the ops, as of a graph.
        """
        if self.overlapped_s is None or not self.overlapped_s.any():
            return self.seconds
        is_product = np.array([class_of(name) == CLASS["matrix_product"] for name in op_type], dtype=bool)
        places = np.flatnonzero(self.overlapped_s)
        halves_s = self.overlapped_s[places] / 2
        # between two collectives, and before the first and after the last
        products_s = np.diff(np.cumsum(op_s * is_product)[[*places, -1]], prepend=0.0)
        collectives_s = np.append(halves_s, 0.0) + np.insert(halves_s, 0, 0.0)
        shorter_s = np.minimum(products_s, collectives_s)
        exposed_s = collectives_s - _OVERLAPPED * shorter_s * (1 - 1 / self.pieces)
        waits_s = self.seconds.copy()
        np.add.at(waits_s, [*places, places[-1]], exposed_s)
        return waits_s


def time_step(
    graph: Graph, device: Device, constants: Constants, *, optimizer: str = "none", exchanges: Exchanges | None = None
) -> PredictedStep:
    """Return the predicted time of one step of a traced graph: a pass over its ops, and the optimizer's update. O(n).

    The host issues ops one after another, and the device runs each once it was issued and the one before it has ended.
    Precision and layout are those that the graph was traced in (``meta``).

    Args:
        graph: the traced or recorded graph of one pass; a recorded one may include its update.
        device: the device with its datasheet.
        constants: which shares of the datasheet's rates kernels reach, and the times of the host.
        optimizer: a name of ``OPTIMIZERS``, whose update follows the graph's ops; "none" for a graph with a recorded update.
        exchanges: the collectives of a step on several devices; None: the step runs on one.

    Raises InputError for a precision in float8 on a device without it.
    """
    demand_float8(device, graph.meta.get("precision"))
    # What each op takes on the device, and what the host takes to issue it.
    kernels = kernels_of(graph)
    demand = demand_of(kernels, device, precision=str(graph.meta.get("precision", "fp32")))
    kernels_s = seconds(demand, constants)
    op_s = kernels.per_op(kernels_s)
    waits_s = np.zeros(len(op_s))
    if exchanges is not None:
        waits_s = exchanges.waits_s(op_s, graph.op_type)
    op_s = op_s + waits_s
    issue_s = _issue_s(graph, op_s, constants) + constants.issue_s * (waits_s > 0)
    # The same of the update that follows the graph's ops.
    update = update_of(graph, optimizer)
    update_op_s = seconds(demand_of(update.kernels, device), constants)
    # Before it launches the first op of the update (recorded, or following the pass), the host goes through the tensors.
    recorded_update = next((op for op, name in enumerate(graph.names) if name.startswith(UPDATE)), None)
    has_update = recorded_update is not None or len(update_op_s) > 0
    tensors_s = constants.update_s * len(graph.of_kind(SEND)) * has_update
    update_issue_s = constants.issue_s * (1.0 + VIEW * update.views)
    if recorded_update is not None:
        issue_s[recorded_update] += tensors_s
    else:
        update_issue_s[:1] += tensors_s
    # A kernel for each gradient's sum, which reads two gradients and writes one.
    summed = memory_kernels((3.0 * graph.size_bytes[graph.of_kind(SEND)]).tolist())
    sum_kernels_s = seconds(demand_of(summed, device), constants)
    is_host_bound = float(issue_s.sum()) > float(op_s.sum())
    sum_launch_s = constants.issue_s if is_host_bound else constants.start_s  # what one kernel takes at least
    # When each op of both has ended.
    all_issue_s = np.concatenate([issue_s, update_issue_s])
    all_op_s = np.concatenate([op_s, update_op_s])
    # Between two restarts the host issues ops ahead of the device; at a restart both begin together. A wait after the update's
    # last kernel delays nothing.
    waits = [len(op_s) + kernel for kernel in update.waits if kernel < len(update_op_s)]
    restarts = exchanges.restarts if exchanges is not None else ()
    end_s = np.zeros(len(all_op_s))
    for begin, end in pairwise([0, *restarts, *waits, len(all_op_s)]):
        restarted_s = float(end_s[begin - 1]) if begin else 0.0
        end_s[begin:end] = restarted_s + _ends_s(all_issue_s[begin:end], all_op_s[begin:end])
    pass_end_s = end_s[len(op_s) - 1] if len(op_s) else 0.0
    update_s = float(end_s[-1] - pass_end_s) if len(update_op_s) else 0.0
    return PredictedStep(
        op_s=op_s,
        issue_s=issue_s,
        host_s=float(all_issue_s.sum()),
        device_s=float(all_op_s.sum()),
        end_s=end_s[: len(op_s)],
        update_s=update_s,
        update_host_s=max(0.0, update_s - float(update_op_s.sum())),
        sum_s=float(np.maximum(sum_kernels_s, sum_launch_s).sum()),
        sum_launch_s=sum_launch_s * len(summed),
        library_s=float(kernels_s[by_library(demand)].sum()),
    )


def _issue_s(graph: Graph, op_s: Floats, constants: Constants) -> Floats:
    """Return (n,) the seconds in which the host issues each op: to launch its kernel, or for a view the share ``VIEW`` of that.

    Transfers take 0. So do free ops that the host never sees: those of ONNX files are folded before a run, autograd detaches
    by itself, and a compiled step has no views. ``op_s`` (n,): the seconds of each op on the device; 0 for a view.
    """
    is_unseen = np.array([op_type.startswith("onnx.") or op_type == _DETACH for op_type in graph.op_type], dtype=bool)
    is_compiled = bool(graph.meta.get("compiled"))
    view_s = np.where(is_unseen | is_compiled, 0.0, VIEW * constants.issue_s)
    launch_s = (WRAPPED if is_compiled else 1.0) * constants.issue_s
    compute_issue_s = np.where(op_s > 0, launch_s, view_s)
    return np.where(graph.kind == COMPUTE, compute_issue_s, 0.0)


def demand_float8(device: Device, precision: object) -> None:
    """Raise InputError for a precision with linear layers in float8 on a device whose datasheet has no such rate.

    ``precision``: a name of :class:`Numerics`, or None for float32.
    """
    linear_type = precision_of(precision).linears
    if linear_type:
        device.demand_rate(linear_type, str(precision))


def _ends_s(issue_s: Floats, op_s: Floats) -> Floats:
    """Return (n,) when each op ends on the device, in seconds after the host begins to issue them.

    ``issue_s``, ``op_s`` (n,): the seconds of every op on the host and on the device. An op starts once it was issued and the
    one before it has ended: end_i = max over j <= i of issued_j + op_s_j + ... + op_s_i.
    """
    issued_s, done_s = np.cumsum(issue_s), np.cumsum(op_s)
    # By op, the delay of the device if it had to wait for the host before this op alone. Ops that take the device no time,
    # such as views, delay nothing.
    delay_s = np.where(op_s > 0, issued_s - (done_s - op_s), -np.inf)
    longest_delay_s = np.maximum.accumulate(delay_s)
    ends_s: Floats = np.where(np.isfinite(longest_delay_s), done_s + longest_delay_s, 0.0)
    return ends_s


UPDATE = "update/"
"""The beginning of the names of ops of a recorded update."""


@dataclass(frozen=True, eq=False)
class CostModel:
    """Predicts times on one device. ``Residuals`` are ranges of measured / predicted, for different kinds of predictions."""

    device: Device
    constants: Constants
    residuals: Residuals
    """Range for a step that is bound by the device."""
    host_residuals: Residuals
    """Range for a step that is bound by the host."""
    library_residuals: Residuals
    """Range for a step whose kernels differ by the library's version."""
    product_residuals: Residuals
    """Range for a matrix product by itself."""
    collective_residuals: Residuals
    """Range for a collective by itself."""
    compiled_residuals: Residuals
    """Range for a step under ``torch.compile``."""

    @property
    def memory_bytes_per_s(self) -> float:
        """The bytes per second that an element-wise kernel reads and writes."""
        share = self.constants.traffic["pointwise"] * self.constants.units["memory"]
        return self.device.free_of_codes * self.device.memory_bytes_per_s * share

    def step(self, graph: Graph, *, optimizer: str = "none", exchanges: Exchanges | None = None) -> PredictedStep:
        """Return the predicted time of one step of a traced graph on this device; see :func:`time_step`."""
        return time_step(graph, self.device, self.constants, optimizer=optimizer, exchanges=exchanges)

    def interval(
        self, step_s: float, *, host_share: float = 0.0, library_share: float = 0.0, compiled: bool = False
    ) -> tuple[float, float]:
        """Return the lower and upper seconds between which 80 % of measurements of a step are expected.

        The range begins as that of steps bound by the device, and is widened towards the ranges of three other kinds of step.

        Args:
            step_s: the predicted seconds.
            host_share: the host's time over the device's; the host-bound range has no weight below ``_HIDDEN``, and all of
                it from ``HOST_BOUND`` on.
            library_share: share of the device's time in kernels that differ by the library's version; their range has all
                weight from ``LIBRARY_BOUND`` on.
            compiled: whether the step runs under ``torch.compile``; the range of such steps then has all weight.
        """
        low_ratio, high_ratio = self.residuals.low, self.residuals.high
        for wider_residuals, share in (
            (self.compiled_residuals, float(compiled)),
            (self.library_residuals, library_share / LIBRARY_BOUND),
            (self.host_residuals, (host_share - _HIDDEN) / (HOST_BOUND - _HIDDEN)),
        ):
            weight = min(1.0, max(0.0, share))
            low_ratio *= min(wider_residuals.low / low_ratio, 1.0) ** weight
            high_ratio *= max(wider_residuals.high / high_ratio, 1.0) ** weight
        return step_s * low_ratio, step_s * high_ratio

    @property
    def relative_error(self) -> float:
        """Half the width of the interval of a step bound by the device, as a share of the prediction."""
        return (self.residuals.high - self.residuals.low) / 2.0


# The kinds of residuals that all devices share, in the order of CostModel's fields.
_Shared = Literal["host", "library", "product", "collective", "compiled"]
_OF_ALL: tuple[_Shared, ...] = get_args(_Shared)


def cost_model(device: Device, calibration: CalibrationTable) -> CostModel:
    """Return the cost model of a device: with its own fit if a user calibrated it, else with its generation's factors.

    A CPU without a fit is taken to reach its datasheet. ``calibration``: the fitted constants, which ship with ddltool.
    """
    shared_residuals = tuple(calibration.residuals[kind] for kind in _OF_ALL)
    own_fit = device.fitted
    if own_fit is not None:
        constants = _constants(calibration, dict(own_fit.units))
        constants = replace(constants, issue_s=own_fit.issue_s, start_s=own_fit.start_s, update_s=own_fit.update_s)
        return CostModel(device, constants, own_fit.residuals, *shared_residuals)
    if device.architecture == "CPU":
        return datasheet(device)
    units = _units(device.branch, calibration)
    return CostModel(device, _constants(calibration, units), _device_residuals(device, calibration), *shared_residuals)


def _device_residuals(device: Device, calibration: CalibrationTable) -> Residuals:
    """Return the range of measured / predicted for steps that are bound by a device without a fit of its own.

    It depends on what was measured: steps on this very device, steps on its generation, or none. A device whose figures the
    user gives counts as not measured.
    """
    if device.architecture not in get_args(Generation):
        return _ANOTHER_MAKER
    measured_names = {name_key(name) for name in calibration.devices}
    if name_key(device.name) in measured_names and not device.source.startswith(GIVEN):
        return calibration.residuals["device"]
    if device.branch in calibration.judged:
        return calibration.residuals["generation"]
    return calibration.residuals["unknown"]


# For other makers, only single operations were measured, which took from half to twice the predicted time, and no step.
_ANOTHER_MAKER = Residuals(
    low=0.6, high=2.2, median_error=0.4, rows=0, what="a belief: no step on a GPU of this maker was measured"
)
# Datasheets alone were between a quarter of a measured step and all of it, on CPUs and GPUs alike.
_UNCALIBRATED = Residuals(low=1.0, high=4.0, median_error=0.6, rows=1, what="the datasheet alone, never measured")


def datasheet(device: Device) -> CostModel:
    """Return the cost model of a device that reaches its datasheet and whose host takes no time, as CPUs are estimated."""
    return CostModel(device, DATASHEET, *(_UNCALIBRATED,) * (1 + len(_OF_ALL)))


def _constants(calibration: CalibrationTable, units: dict[str, float]) -> Constants:
    """Return the calibrated constants, which all devices share, with one device's ``units``: its factors by unit."""
    shared: dict[str, Any] = {f.name: getattr(calibration, f.name) for f in fields(Constants) if f.name != "units"}
    return Constants(**shared, units=units)


def _units(branch: str, calibration: CalibrationTable) -> dict[str, float]:
    """Return a generation's factors on the shares that kernels reach, by unit: matrix units, float32 units, memory.

    They are the measured ones; otherwise the geometric means of those of the nearest measured generations before and after it
    in its line of ``BRANCHES``; otherwise 1. ``branch``: the name of the generation as in ``BRANCHES``.
    """
    measured_factors = calibration.generations
    if branch in measured_factors:
        return dict(measured_factors[branch])
    line = next((generations for generations in BRANCHES if branch in generations), (branch,))
    index = line.index(branch)
    earlier = [measured_factors[name] for name in line[:index] if name in measured_factors]
    later = [measured_factors[name] for name in line[index:] if name in measured_factors]
    neighbours = [*earlier[-1:], *later[:1]]
    if not neighbours:
        return dict.fromkeys(UNITS, 1.0)
    return {unit: math.exp(float(np.mean([math.log(units[unit]) for units in neighbours]))) for unit in UNITS}


def estimate(
    graph: Graph,
    model: CostModel,
    network: Network,
    *,
    optimizer: str = OPTIMIZER,
    exchanges: Exchanges | None = None,
) -> Graph:
    """Return the graph with every duration set for the model's device and ``network``, in seconds. O(n).

    A compute op lasts from the end of the op before it to its own end, so that an op for which the device waits for the host
    takes longer. ``meta`` gets the seconds of the update that follows the graph's ops (``update_s``), those of the host for an
    op and for all of the graph (``issue_s``, ``issued_s``), the bytes that the device reads and writes per second
    (``memory_bytes_per_s``), and the factors on the prediction between which 80 % of measurements are expected (``error_low``,
    ``error_high``), among other figures of :class:`PredictedStep`. Transfers are spread over ``network.parameter_servers``
    channels; see :func:`assign_channels`.

    ``optimizer``: a name of ``OPTIMIZERS``, whose update follows. ``exchanges``: the collectives of a step on several devices;
    None: the step runs on one.
    """
    graph = assign_channels(graph, network.parameter_servers)
    step = model.step(graph, optimizer=optimizer, exchanges=exchanges)
    error_low, error_high = model.interval(
        1.0,
        host_share=step.host_share,
        library_share=step.library_share,
        compiled=bool(graph.meta.get("compiled")),
    )
    # Each op lasts from the end of the one before it; so the waits for the host are in the durations.
    is_compute = graph.kind == COMPUTE
    transfer_s = network.latency_s + graph.size_bytes / network.bandwidth_bytes_per_s
    durations = np.where(is_compute, np.diff(step.end_s, prepend=0.0), transfer_s)
    sources = tuple(
        _estimate_source(source) if computes else "rule"
        for source, computes in zip(graph.estimate, is_compute, strict=True)
    )
    meta = {
        **graph.meta,
        "oracle": "roofline",
        "device": model.device.name,
        "bandwidth_bytes_per_s": network.bandwidth_bytes_per_s,
        "latency_s": network.latency_s,
        "parameter_servers": network.parameter_servers,
        "optimizer": optimizer,
        "pass_host_s": step.pass_host_s,
        "issue_s": model.constants.issue_s,
        "issued_s": float(step.issue_s.sum()),
        "memory_bytes_per_s": model.memory_bytes_per_s,
        "update_s": step.update_s,
        "update_host_s": step.update_host_s,
        **_whole_matrices(graph, optimizer),
        "sum_s": step.sum_s,
        "sum_launch_s": step.sum_launch_s,
        "host_share": step.host_share,
        "library_share": step.library_share,
        "error_low": error_low,
        "error_high": error_high,
    }
    return replace(graph, meta=meta).with_durations(np.maximum(durations, 0.0), sources)


def _whole_matrices(graph: Graph, optimizer: str) -> dict[str, float]:
    """Return entries of ``meta``: how many matrices an update needs whole, and their bytes in bfloat16.

    Only Muon needs any. For another optimizer the entries are left out, but those that the graph has from an estimate with Muon
    are set to 0.
    """
    if optimizer != "muon" or graph.mode != "training":
        return dict.fromkeys(graph.meta.keys() & {"update_matrices", "update_matrix_bytes"}, 0.0)
    matrix_bytes = [2.0 * each.rows * each.columns for each in parameters_of(graph) if each.hidden]
    return {"update_matrices": len(matrix_bytes), "update_matrix_bytes": sum(matrix_bytes)}


def _estimate_source(source: Estimate | None) -> Estimate:
    """Return the source of an op's time, "rule" or "free" if that is the source of its cost, else "default"."""
    return source if source in ("rule", "free") else "default"


def coverage(graph: Graph) -> CoverageFigures:
    """Return the shares of compute ops, and of their estimated time, by the source of the estimate.

    Sources: a rule for the op's type, a measurement, a default for types without a rule, "free" for ops that take no time
    (whose share of the time is left out). The types without a rule are listed, the most frequent first.
    """
    is_compute = graph.kind == COMPUTE
    source = np.array(graph.estimate, dtype=object)[is_compute]
    times_s = np.nan_to_num(graph.duration_s)[is_compute]
    op_count = max(len(times_s), 1)
    total_s = float(times_s.sum()) or 1.0
    figures: dict[str, float] = {}
    for name in ("rule", "measured", "default", "free"):
        is_chosen = source == name
        figures |= {
            f"{name}_ops": int(is_chosen.sum()) / op_count,
            f"{name}_time": float(times_s[is_chosen].sum()) / total_s,
        }
    del figures["free_time"]
    default_counts = Counter(graph.op_type[op] for op in np.flatnonzero(is_compute) if graph.estimate[op] == "default")
    default_types = sorted(default_counts.items(), key=lambda item: (-item[1], item[0]))
    return CoverageFigures.model_validate({**figures, "default_types": default_types})
