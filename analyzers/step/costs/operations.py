"""The time of a single matrix product or collective, and what limits it: easy to check before believing a whole step.

A product is a matrix product, a collective an exchange among several GPUs. Times are those of a loop of one operation.

Start at :func:`time_product` and :func:`time_collective`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from ddltool.analyzers.step.communication.fabrics import fabric_of
from ddltool.analyzers.step.communication.nccl import Algorithm, Fabric, Group
from ddltool.analyzers.step.costs.kernel_times import Demand, demand_of, seconds
from ddltool.analyzers.step.costs.kernels import Kernels, product_kernels
from ddltool.analyzers.step.costs.model import CostModel
from ddltool.calibration import Residuals
from ddltool.device import DEVICES_PER_NODE, Device
from ddltool.errors import InputError, known
from ddltool.graph_results import OperationTime
from ddltool.units import parse_bytes, show_bytes

ProductPrecision = Literal["fp32", "tf32", "bf16", "fp16", "fp8", "nvfp4"]
# (type of the operands, bytes of their elements, bytes of the result's elements)
_TYPES: dict[ProductPrecision, tuple[str, float, int]] = {
    "fp32": ("float32", 4, 4),
    "tf32": ("float32", 4, 4),
    "bf16": ("bfloat16", 2, 2),
    "fp16": ("float16", 2, 2),
    "fp8": ("float8_e4m3fn", 1, 2),
    "nvfp4": ("float4", 0.5 + 1 / 16, 2),  # sixteen numbers share a scale of a byte
}
_UNMEASURED = "; by the datasheet alone, no product in four bits was measured"
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
# In a loop of one operation, its operands are in the last cache as far as they fit; this saves so much of their traffic.
_CACHED = 0.5
# A longer side of a product is taken for a typing error.
_LARGEST_SIDE = 2**40
# A product is said to be limited by memory if its traffic alone would take this share of its time.
_BY_MEMORY = 0.8
# Large enough that NCCL chooses an algorithm by its bandwidth.
_LARGE_BYTES = 2.0**30
# The word in a device's data that says that NVLink joins a whole rack, and the number of the rack's GPUs.
_RACK, _RACK_GPUS = "NVL72", 72


def time_product(model: CostModel, text: str, precision: str) -> OperationTime:
    """Return the time of a product ``MxNxK`` or ``COUNTxMxNxK`` on a device, run in a loop by itself, and what limits it.

    The product is of an (M, K) and a (K, N) matrix, COUNT of them at once. ``precision``: of the operands, see
    ``ProductPrecision``; the result of ``fp8`` and ``nvfp4`` is bfloat16. Raises InputError for any other text, and for a
    precision for which the device's datasheet has no rate.
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2,3}", text) or max(map(int, text.split("x"))) > _LARGEST_SIDE:
        raise InputError("--product", f"{text!r} is no product", "give MxNxK, such as 8192x8192x4096")
    name: ProductPrecision = known("--precision", precision, get_args(ProductPrecision))  # type: ignore[assignment]
    dtype, width, result_width = _TYPES[name]
    rate = "tf32" if name == "tf32" else dtype.partition("_")[0]  # the name of the device's peak
    device = model.device
    device.demand_rate(rate, name)
    sizes = [float(size) for size in text.split("x")]
    count_m_n_k = [1.0, *sizes][-4:]  # a count of 1 where the text has none
    kernels = product_kernels(np.array([count_m_n_k]), dtype, width, result_width)
    demand = warm_demand(kernels, device, "tf32" if name == "tf32" else "fp32")
    [time_s] = seconds(demand, model.constants).tolist()
    start_s = model.constants.start_s
    only_traffic = replace(demand, arithmetic_s=demand.arithmetic_s * 0.0, fed_s=demand.fed_s * 0.0)
    [traffic_s] = seconds(only_traffic, model.constants).tolist()
    [on_matrix_units] = demand.on_tensor.tolist()
    if start_s > time_s / 2:
        limit = "the start of a kernel"
    elif traffic_s - start_s > _BY_MEMORY * (time_s - start_s):
        limit = "memory"
    elif on_matrix_units:
        limit = "matrix units"
    else:
        limit = "float32 units"
    flops_per_s = float(kernels.flops[0]) / time_s
    share_of_peak = flops_per_s / device.peak_flops[rate]
    limit += f": {flops_per_s / 1e12:.4g} x 10^12/s, {share_of_peak:.0%} of peak"
    if name == "nvfp4":
        limit += _UNMEASURED
    return _ranged(f"{text} {name}", time_s, model.product_residuals, limit)


def warm_demand(kernels: Kernels, device: Device, precision: str) -> Demand:
    """Return the demand of operations that run in a loop, with their operands in the last cache as far as they fit.

    What fits there saves the share ``_CACHED`` of its traffic. ``precision``: "tf32" if float32 products may use TF32, else
    "fp32".
    """
    # Such a loop is too brief to be slowed by the power limit.
    demand = demand_of(kernels, device, precision=precision, brief=True)
    fitting = np.minimum(device.l2_bytes / np.maximum(kernels.moved_bytes, 1.0), 1.0)
    return replace(demand, traffic_s=demand.traffic_s * (1.0 - _CACHED * fitting))


def time_collective(model: CostModel, text: str) -> OperationTime:
    """Return the time of a collective given as ``all-reduce:64MiB:8`` (name, bytes, GPUs), and what limits it.

    An algorithm may follow: ``:ring``, ``:tree`` or ``:nvls`` (reduction in the NVLink switches). The bytes are those of the
    whole tensor that is reduced, gathered or scattered. The GPUs are in one node, on the device's own link. If NCCL would
    choose NVLS, the text on the limit gives the time without it, too. Raises InputError for any other text.
    """
    parts = text.split(":")
    remedy = "give NAME:SIZE:GPUS, such as all-reduce:64MiB:8"
    if len(parts) not in (3, 4) or not parts[2].isdecimal():
        raise InputError("--collective", f"{text!r} is no collective", remedy)
    name = known("--collective", parts[0], _COLLECTIVES)
    size_bytes, replicas = parse_bytes(parts[1], "--collective"), int(parts[2])
    fabric = own_fabric(model.device)
    if not 2 <= replicas <= fabric.gpus_per_node:
        problem = f"{replicas} GPUs; a node of {model.device.name} has {fabric.gpus_per_node}"
        raise InputError("--collective", problem, "give 2 to that many: links between nodes are predict's and plan's")
    if len(parts) == 4:
        algorithm: Algorithm = known("--collective", parts[3], get_args(Algorithm))  # type: ignore[assignment]
        if name != "all-reduce" or (
            algorithm == "nvls" and "nvls" not in _algorithms(fabric.over(replicas), size_bytes)
        ):
            raise InputError("--collective", f"{name} of {replicas} {model.device.name} has no {algorithm}", remedy)
        fabric = replace(fabric, algorithms=(algorithm,))
    group = fabric.over(replicas)
    time_s = collective_s(group, name, size_bytes)
    chosen, protocol = group.chosen("all_reduce" if name == "all-reduce" else "all_gather", size_bytes)
    latency_s = collective_s(group, name, 1.0)  # a single byte
    limit = "latency" if latency_s > time_s / 2 else f"{fabric.inside.text or 'the link'}"
    limit += f": {size_bytes / time_s / 1e9:.4g} GB/s, {chosen} {protocol}"
    if chosen == "nvls":
        group_without_nvls = replace(fabric, algorithms=("ring", "tree")).over(replicas)
        without_nvls_s = collective_s(group_without_nvls, name, size_bytes)
        limit += f"; {without_nvls_s * 1e6:.4g} us without NVLS (NCCL before 2.17, NCCL_NVLS_ENABLE=0, XLA)"
    return _ranged(f"{name} of {show_bytes(size_bytes)} on {replicas}", time_s, model.collective_residuals, limit)


def own_fabric(device: Device) -> Fabric:
    """Return the fabric (the GPUs of a node and their links) of one node of a device type, on the device's own link.

    The node has the 72 GPUs of a rack if the device's data names one that NVLink joins, else ``DEVICES_PER_NODE``.
    """
    is_rack = _RACK in f"{device.title} {device.source} {device.note}"
    return fabric_of(device, gpus_per_node=_RACK_GPUS if is_rack else DEVICES_PER_NODE)


def collective_s(group: Group, name: str, size_bytes: float) -> float:
    """Return the seconds of a collective among the GPUs of ``group``.

    ``name``: one of ``_COLLECTIVES``. ``size_bytes``: of the whole tensor that is reduced, gathered or scattered.
    """
    if name == "all-reduce":
        return group.all_reduce_s(size_bytes)
    if name == "reduce-scatter":
        return group.reduce_scatter_s(size_bytes)
    # An all-to-all counts as an all-gather: as many bytes pass each link.
    return group.all_gather_s(size_bytes)


def _algorithms(group: Group, size_bytes: float) -> Sequence[Algorithm]:
    """Return two algorithms: those that NCCL chooses for an all-reduce of ``size_bytes``, and for a large one.

    A group can use NVLS if it is one of the two: NCCL may choose it for large tensors only, or for small ones only.
    """
    return [group.chosen("all_reduce", size)[0] for size in (size_bytes, _LARGE_BYTES)]


def _ranged(operation: str, time_s: float, residuals: Residuals, limit: str) -> OperationTime:
    """Return the time of an operation with the range in which 80 % of measurements are expected.

    ``operation``: its name, for the result. ``residuals``: the range of measured / predicted for such operations. ``limit``: a
    text that says what limits it.
    """
    return OperationTime(
        operation=operation,
        time_s=time_s,
        low_s=time_s * residuals.low,
        high_s=time_s * residuals.high,
        limit=limit,
    )
