"""One operation by itself: how long a matrix product or a collective takes, and what limits it.

What a person checks first before believing a whole step. Start at :func:`time_product` and :func:`time_collective`.
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
# The type of the operands, and the bytes of their elements and of the result's.
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
# A loop of one operation finds its operands in the last cache as far as they fit; this share of their traffic is then saved.
_CACHED = 0.5
# A longer side of a product is a slip of the user's.
_LARGEST_SIDE = 2**40
# Memory limits a product that would take this share of its time for its traffic alone.
_BY_MEMORY = 0.8
# Large enough that NCCL chooses an algorithm by its bandwidth.
_LARGE_BYTES = 2.0**30
# NVLink joins so many GPUs of a rack.
_RACK, _RACK_GPUS = "NVL72", 72


def time_product(model: CostModel, text: str, precision: str) -> OperationTime:
    """Return the time of a product ``MxNxK`` or ``COUNTxMxNxK`` on a device, run again and again by itself, and its limit.

    The product is of an (M, K) and a (K, N) matrix, COUNT of them at once. ``precision``: of the operands, see
    ``ProductPrecision``; the result of ``fp8`` and ``nvfp4`` is bfloat16. Raises InputError for another text, and for a
    precision that the device's datasheet has no rate for.
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){2,3}", text) or max(map(int, text.split("x"))) > _LARGEST_SIDE:
        raise InputError("--product", f"{text!r} is no product", "give MxNxK, such as 8192x8192x4096")
    name: ProductPrecision = known("--precision", precision, get_args(ProductPrecision))  # type: ignore[assignment]
    dtype, width, result_width = _TYPES[name]
    rate = "tf32" if name == "tf32" else dtype.partition("_")[0]
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
    [on_units] = demand.on_tensor.tolist()
    limit = (
        "the start of a kernel" if start_s > time_s / 2
        else "memory" if traffic_s - start_s > _BY_MEMORY * (time_s - start_s)
        else "matrix units" if on_units
        else "float32 units"
    )  # fmt: skip
    rate_per_s = float(kernels.flops[0]) / time_s
    share = rate_per_s / device.peak_flops[rate]
    return _ranged(
        f"{text} {name}",
        time_s,
        model.product_residuals,
        f"{limit}: {rate_per_s / 1e12:.4g} x 10^12/s, {share:.0%} of peak{_UNMEASURED if name == 'nvfp4' else ''}",
    )


def warm_demand(kernels: Kernels, device: Device, precision: str) -> Demand:
    """Return the demand of operations that run in a loop, and so find their operands in the last cache as far as they fit.

    ``precision``: as of :func:`demand_of`.
    """
    demand = demand_of(kernels, device, precision=precision, brief=True)
    fitting = np.minimum(device.l2_bytes / np.maximum(kernels.moved_bytes, 1.0), 1.0)
    return replace(demand, traffic_s=demand.traffic_s * (1.0 - _CACHED * fitting))


def time_collective(model: CostModel, text: str) -> OperationTime:
    """Return the time of ``all-reduce:64MiB:8``: a collective, its bytes, its GPUs; ``:ring``, ``:tree``, ``:nvls`` may follow.

    The bytes are those of the whole tensor: what is reduced, put together by all-gather or taken apart by reduce-scatter. The
    GPUs are those of one node, on the device's own link. What limits the time is told with it, and so is the time without
    NVLS where NCCL would choose that. Raises InputError for another text.
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
        without = collective_s(replace(fabric, algorithms=("ring", "tree")).over(replicas), name, size_bytes)
        limit += f"; {without * 1e6:.4g} us without NVLS (NCCL before 2.17, NCCL_NVLS_ENABLE=0, XLA)"
    return _ranged(f"{name} of {show_bytes(size_bytes)} on {replicas}", time_s, model.collective_residuals, limit)


def own_fabric(device: Device) -> Fabric:
    """Return the fabric of one node of a device type on its own link.

    The node is a rack of 72 where the datasheet says that NVLink joins one, else a board of 8.
    """
    is_rack = _RACK in f"{device.title} {device.source} {device.note}"
    return fabric_of(device, gpus_per_node=_RACK_GPUS if is_rack else DEVICES_PER_NODE)


def collective_s(group: Group, name: str, size_bytes: float) -> float:
    """Return the seconds of a collective of ``_COLLECTIVES`` on a tensor of ``size_bytes`` in all.

    An all-to-all counts as an all-gather: as many bytes pass each link.
    """
    if name == "all-reduce":
        return group.all_reduce_s(size_bytes)
    return group.reduce_scatter_s(size_bytes) if name == "reduce-scatter" else group.all_gather_s(size_bytes)


def _algorithms(group: Group, size_bytes: float) -> Sequence[Algorithm]:
    """Return the algorithms that NCCL chooses for an all-reduce of that size and of a large one, to tell if NVLS is there."""
    return [group.chosen("all_reduce", size)[0] for size in (size_bytes, _LARGE_BYTES)]


def _ranged(operation: str, time_s: float, residuals: Residuals, limit: str) -> OperationTime:
    """Return the time of an operation with the range in which 80 % of measurements are expected, by ``residuals``.

    ``limit``: what limits it, in words.
    """
    return OperationTime(
        operation=operation,
        time_s=time_s,
        low_s=time_s * residuals.low,
        high_s=time_s * residuals.high,
        limit=limit,
    )
