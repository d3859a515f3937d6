"""Kernels one by one, in plain arithmetic, against the arrays of :mod:`ddltool.analyzers.step.costs.kernel_times`."""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddltool.analyzers.step.costs.kernel_times import (
    ARITHMETIC,
    CARRIED,
    DATASHEET,
    FEED,
    TRAFFIC,
    Constants,
    demand_of,
    seconds,
    sustained,
    tiled_flops,
)
from ddltool.analyzers.step.costs.kernels import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Kernels
from ddltool.analyzers.step.costs.model import cost_model
from ddltool.analyzers.step.recording.op_rules import CLASS, CLASSES
from ddltool.device import Device
from ddltool.shipped import calibration, devices

ROOT = Path(__file__).parents[3]
AMPERE = Device(
    name="test",
    architecture="Ampere",
    multiprocessors=80,
    clock_hz=1.5e9,
    peak_flops={"float32": 1e12, "tf32": 8e12, "float16": 16e12},
    memory_bytes_per_s=1e11,
    memory_gib=16,
    l2_bytes=4e6,
)
# Watts per multiprocessor and GHz, on float32 units and on matrix units.
WATTS = {
    **{"Pascal": (2.4, 2.4), "Volta": (1.9, 2.2), "Turing": (1.9, 2.2), "Ampere": (1.9, 1.9), "Ada": (1.15, 1.74)},
    **{"Hopper": (1.5, 3.4), "Blackwell": (1.5, 5.2), "GeForce": (1.15, 1.74)},
}
DEVICES = (
    AMPERE,
    AMPERE.model_copy(update={"clock_hz": 0.0}),
    AMPERE.model_copy(update={"multiprocessors": 0, "l2_bytes": 0.0}),
    AMPERE.model_copy(update={"architecture": "Pascal", "peak_flops": {"float32": 1e12, "float16": 2e12}}),
    AMPERE.model_copy(update={"architecture": "Hopper", "peak_flops": {"float32": 1e12, "float16": 1e14}}),
    *(
        AMPERE.model_copy(
            update={
                **{"architecture": name.replace("GeForce", "Blackwell"), "power_w": 100.0, "ecc": True},
                "peak_flops": {"float32": 1e12, "float16": 9e12 if name == "GeForce" else 1e14},
            }
        )
        for name in WATTS
    ),
)
# Every share another number, so that taking one for another shows.
CONSTANTS = Constants(
    arithmetic={name: 0.3 + 0.031 * place for place, name in enumerate(ARITHMETIC)},
    traffic={name: 0.4 + 0.027 * place for place, name in enumerate(TRAFFIC)},
    feed={name: 700.0 + 60.0 * place for place, name in enumerate(FEED)},
    carried={name: 5.0 + 1.3 * place for place, name in enumerate(CARRIED)},
    start_s=2e-6,
    cache=0.3,
    issue_s=0.0,
    update_s=0.0,
    turn_s=5e-6,
    units={"tensor": 0.9, "vector": 0.8, "memory": 0.7},
)
TILES = {(256, 128): 1.0, (128, 128): 1.0, (128, 64): 0.9, (64, 64): 0.75, (64, 32): 0.5, (32, 32): 0.35}


def held(device: Device, tensor: bool, share: float) -> float:
    """The share of its clock that a board of 100 W holds: 80 x 1.5 GHz draw their watts each, products for this share of
    the time, and the rest of it 65 % of that; Pascal's by its lanes, of which float32's 1e12 keeps 1e12 / 120e9 / 128 busy.
    Matrix units of GeForce draw no more than the float32 units, and its clocks go beyond the datasheet's."""
    slow = device.peak_flops["float16"] == 9e12
    watts = 120.0 * WATTS["GeForce" if slow else device.architecture][tensor and not slow] if device.power_w else 1.0
    watts *= share + 0.65 * (1.0 - share) if tensor else 1.0
    watts *= 1e12 / 120e9 / 128 if device.architecture == "Pascal" else 1.0
    return min(1.12 if slow else 1.0, (100.0 / watts) ** 0.7) if device.power_w else 1.0


def peak_of(kernel: Mapping[str, object], device: Device, precision: str) -> tuple[float, bool]:
    """The datasheet's rate for a kernel, and whether it is that of matrix units."""
    kind, vector, dtype = str(kernel["kind"]), device.peak_flops["float32"], str(kernel["dtype"])
    peak = device.peak_flops.get(dtype, vector)
    if dtype == "float32" and ((precision == "tf32" and kind != "attention") or kind in ("convolution", "recurrent")):
        peak = device.peak_flops.get("tf32", vector)
    if device.architecture == "Pascal":
        return min(peak, vector), False
    return peak, peak > 1.5 * vector


def share_of_products(made: list[dict[str, object]], device: Device, precision: str, cudnn: int) -> float:
    """The part of the time of all kernels, at the datasheet, in which matrix units work on products."""
    products_s, all_s = 0.0, 0.0
    for kernel in made:
        peak, tensor = peak_of(as_run(kernel, device, cudnn)[0], device, precision)
        is_product = tensor and float(kernel["gemm"][1]) > 0  # type: ignore[index]
        product_s = float(kernel["flops"]) / peak if is_product else 0.0  # type: ignore[arg-type]
        traffic_s = float(kernel["bytes"]) / device.memory_bytes_per_s * (16 / 15 if device.ecc else 1)  # type: ignore[arg-type]
        products_s, all_s = products_s + product_s, all_s + max(product_s, traffic_s)
    return products_s / all_s if all_s else 1.0


def occupied(gemm: tuple[float, ...], processors: int, edge: float) -> float:
    """Operations that a device is occupied for by ``count`` products of m x n x k: the fastest tile counts."""
    count, m, n, k = gemm
    found = []
    for (long, short), rate in TILES.items():
        for rows, columns in ((long, short), (short, long)):
            tiles = count * math.ceil(m / rows) * math.ceil(n / columns)
            parts = 1
            if tiles < processors:  # the inner dimension is split, down to pieces of 256
                parts = min(math.ceil(processors / tiles), max(1, int(k // 256)))
            rounds = tiles * parts / processors
            waves = 1.0 if rounds < 1 else rounds + 0.5 * (math.ceil(rounds) - rounds)
            found.append(waves * processors / parts * rows * columns * 2 * (k + edge * parts) / rate)
    return min(found)


def asks_cudnn(kernel: Mapping[str, object]) -> bool:
    """Whether torch asks cuDNN for a depthwise convolution in channels_first."""
    channels, *sides = (float(side) for side in kernel["gemm"])  # type: ignore[attr-defined]
    taps, positions = {
        FORWARD: (sides[2], sides[0]),
        INPUT_GRADIENT: (sides[1], sides[0]),
        WEIGHT_GRADIENT: (sides[1], sides[2]),
    }[kernel["direction"]]  # type: ignore[index]
    one_to_one = float(kernel["bytes"]) / float(kernel["width"]) <= 3 * channels * positions  # type: ignore[arg-type]
    return kernel["dtype"] == "float16" and channels >= 32 and taps in (1, 9, 25) and (one_to_one or channels >= 512)


def as_run(kernel: Mapping[str, object], device: Device, cudnn: int) -> tuple[dict[str, object], float | None]:
    """The kernel as the device runs it, and the cycles of its taps where cuDNN 9 has no own kernel for it; None: as ever.

    By cuDNN 9, groups of whole tiles of 64 channels are dense."""
    gemm = [float(side) for side in kernel["gemm"]]  # type: ignore[attr-defined]
    channels = gemm[1] if kernel["direction"] == WEIGHT_GRADIENT else min(gemm[2:])
    young = cudnn == 9 and device.architecture in ("Ampere", "Ada", "Hopper", "Blackwell")
    if not (young and kernel["kind"] == "grouped_convolution" and kernel["last"]):
        return dict(kernel), None
    moved, width, wide = float(kernel["bytes"]), float(kernel["width"]), float(kernel["width"]) > 2  # type: ignore[arg-type]
    direction, positions = kernel["direction"], gemm[3] if kernel["direction"] == WEIGHT_GRADIENT else gemm[1]
    strided = moved / width > 3 * gemm[0] * channels * positions
    is_power = bool(channels) and math.log2(channels).is_integer()
    if channels % 64 == 0:
        times = {
            WEIGHT_GRADIENT: 3.6 if wide else 1.0,
            INPUT_GRADIENT: 4.0 if strided else 1.5 if gemm[0] < 16 else 0.5,
        }
        return {**kernel, "kind": "convolution", "times": times.get(direction, 1.0)}, None  # type: ignore[call-overload]
    if is_power:
        times = {FORWARD: 0.55 if strided else 1.0, INPUT_GRADIENT: (2.5 if wide else 1.5) if strided else 1.0}
        times[WEIGHT_GRADIENT] = 2.6 if wide else 9.0 if channels <= 4 else 1.0
        return {**kernel, "traffic": times[direction]}, 0.0  # type: ignore[index]
    taps = 0.68 * float(kernel["flops"]) / 2 / channels if channels else 0.0  # type: ignore[arg-type]
    return {**kernel, "traffic": 1.5 if strided else 1.0}, (1.5 if strided else 1.0) * taps


def by_hand(
    kernel: Mapping[str, object], device: Device, precision: str, constants: Constants, products: float, cudnn: int
) -> float:
    """Return the seconds of one kernel, in words of the class's own rules; ``products``: their share of the step."""
    kernel, tap_cycles = as_run(kernel, device, cudnn)
    layout = "channels_last" if kernel["last"] else "channels_first"
    kind, gemm = str(kernel["kind"]), tuple(float(side) for side in kernel["gemm"])  # type: ignore[attr-defined]
    flops, moved, width = (float(kernel[name]) for name in ("flops", "bytes", "width"))  # type: ignore[arg-type]
    vector, dtype = device.peak_flops["float32"], str(kernel["dtype"])
    peak, tensor = peak_of(kernel, device, precision)
    cycles = device.multiprocessors * device.clock_hz
    clock = held(device, tensor, products)
    edge = 2000 * clock * peak / (2 * 256 * 128) / cycles if cycles else 0.0
    grouped, shaped = kind in ("grouped_convolution", "depthwise_convolution"), gemm[1] > 0
    if device.multiprocessors and shaped and kind in ("convolution", "matrix_product"):
        flops = occupied(gemm, device.multiprocessors, edge)
    flops *= float(kernel.get("times", 1.0))  # type: ignore[arg-type]
    if device.multiprocessors and shaped and kind == "recurrent":
        flops *= occupied((1.0, *gemm[1:]), device.multiprocessors, edge) / (2 * math.prod(gemm[1:]))
    unit = "tensor" if tensor else "vector"
    share, rate = None, f"{kind}/{layout}" if f"{kind}/{layout}" in TRAFFIC else kind
    if kind in ("matrix_product", "attention", "recurrent"):
        share = f"{kind}/{unit}"
        if kind == "matrix_product" and tensor:  # of 16 bytes as many elements as a power of two: 4, 8, 8 and 16
            share += "/tf32" if dtype == "float32" else ""
            if shaped and any(side % {4.0: 4, 2.0: 8, 1.5: 8, 1.0: 16}[width] for side in gemm[1:]):
                share = f"matrix_product/{'odd' if any(side % 2 for side in gemm[1:]) else 'misaligned'}"
    elif kind == "convolution":
        share = f"convolution/tensor/{layout}" if tensor else "convolution/vector"
        uneven = shaped and any(side % 8 for side in gemm[1:])
        if tensor and uneven and layout == "channels_last":
            share = rate = "convolution/misaligned"
    elif grouped:
        share = rate = f"{kind}/{layout}"
        if kind == "grouped_convolution" and layout == "channels_last":
            channels = gemm[1] if kernel["direction"] == WEIGHT_GRADIENT else min(gemm[2:])
            share = rate = f"{share}/narrow" if gemm[0] % 32 == 0 and channels <= 32 else share
        if share == "depthwise_convolution/channels_first" and not asks_cudnn(kernel):
            share = rate = f"{share}/torch"
            if kernel["direction"] == WEIGHT_GRADIENT:  # six blocks fill a multiprocessor
                flops *= max(1.0, 6 * device.multiprocessors / max(gemm[0] * gemm[2], 1.0))
        if kernel["direction"] == WEIGHT_GRADIENT and f"{share}/weights" in ARITHMETIC:
            share = f"{share}/weights"
    if tap_cycles is not None:
        share, rate = None, "grouped_convolution/channels_last/pass"
    arithmetic = 0.0
    if share is not None:
        tensor = tensor and not grouped
        at_peak = flops / (held(device, False, products) * (256 * cycles or vector) if grouped else clock * peak)
        arithmetic = at_peak / constants.arithmetic[share] / constants.units["tensor" if tensor else "vector"]
        if cycles and not grouped:
            wgmma = device.architecture == "Hopper" or (
                device.architecture == "Blackwell" and device.peak_for("float16") > 1e13
            )
            itself = 3.0 if kind == "convolution" and wgmma else 1.0
            scores = flops * 64.0 / max(gemm[3], 1.0) if kind == "attention" and shaped else flops
            arithmetic += scores / (clock * cycles) / itself / constants.feed.get(share, math.inf)
        elif tensor:
            arithmetic = max(arithmetic, at_peak)
    cached = min(1.0, 0.5 * device.l2_bytes / max(moved, 1.0))
    traffic = moved / device.memory_bytes_per_s * (16 / 15 if device.ecc else 1) * (1 - constants.cache * cached)
    traffic *= float(kernel.get("traffic", 1.0)) / constants.traffic[rate] / constants.units["memory"]  # type: ignore[arg-type]
    if cycles:
        by_channel = {"normalisation": (1.3, 2.8), "native_normalisation": (1.8, 3.5)}.get(kind)
        if by_channel and gemm[0] and not kernel["last"]:  # two blocks, each a channel, share a multiprocessor
            a_block = by_channel[kernel["direction"] != FORWARD] * gemm[3] / cycles * device.multiprocessors
            traffic += a_block * max(1.0, gemm[0] / 2 / device.multiprocessors)
        elif kind != "pooling" or not gemm[0]:
            traffic += moved / cycles / constants.carried.get(rate, math.inf)
        traffic += 250.0 * gemm[0] / cycles if kind == "row_normalisation" else 0.0
        traffic += (tap_cycles or 0.0) / cycles
        if kind == "pooling":  # cycles of an element written, and of each of a row
            first, last, backward = (2.6, 0.12), (4.0, 0.38), (4.05, 0.45)
            element, part = backward if kernel["direction"] != FORWARD else last if kernel["last"] else first
            at_datasheet = moved / device.memory_bytes_per_s * (16 / 15 if device.ecc else 1)
            traffic += max(0.0, gemm[0] * (element + part * gemm[3]) / cycles - at_datasheet)
    together = arithmetic + traffic if grouped else (arithmetic**3 + traffic**3) ** (1 / 3)
    return constants.start_s + (constants.turn_s * gemm[0] if kind == "recurrent" else 0.0) + together


EXTENTS = np.array([[1.0] * 4] * 4 + [[1.0, 0.0, 0.0, 0.0], [0.0] * 4])  # products; rows that are none; nothing known
SIDES = (1.0, 6.0, 7.0, 8.0, 9.0, 25.0, 31.0, 32.0, 33.0, 64.0, 100.0, 256.0, 512.0, 4096.0)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16"])
@pytest.mark.parametrize("cudnn", [8, 9])
@pytest.mark.parametrize("device", DEVICES, ids=range(len(DEVICES)))
def test_arrays_are_as_kernels_one_by_one(device: Device, precision: str, cudnn: int) -> None:
    """Some of every class, direction and type, and convolutions of many groups more often, which have most cases."""
    chance = np.random.default_rng(len(precision) + 10 * DEVICES.index(device))
    grouped = ["grouped_convolution", "depthwise_convolution"] * 5
    made: list[dict[str, object]] = [
        {
            "kind": kind,
            "direction": direction,
            "dtype": dtype,
            "last": bool(chance.integers(2)),
            "flops": chance.choice([0.0, 1e6, 3e9]),
            "bytes": chance.choice([0.0, 1e4, 1e6, 5e7]),
            "gemm": chance.choice(SIDES, 4) * EXTENTS[chance.integers(6)],
            "width": chance.choice([1.0, 1.5, 2.0, 4.0]),
        }
        for kind in (*CLASSES, *grouped)
        for direction in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
        for dtype in ("float32", "float16", "int64")
    ]
    made += [  # channels, taps and columns at their thresholds
        {**{"kind": kind, "direction": direction, "dtype": "float16", "last": kind == "grouped_convolution"},
         **{"flops": 3e9, "bytes": moved, "width": 2.0, "gemm": np.array([groups, *[extent] * 3])}}
        for kind in ("grouped_convolution", "depthwise_convolution")
        for direction in (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
        for groups in (31.0, 32.0, 33.0, 511.0, 512.0)
        for extent in (1.0, 8.0, 9.0, 25.0, 32.0, 33.0)
        for moved in (6 * groups * extent, 6 * groups * extent + 2)
    ]  # fmt: skip
    kernels = Kernels(
        op=np.arange(len(made)),
        kind=np.array([CLASS[str(each["kind"])] for each in made], dtype=np.int8),
        direction=np.array([each["direction"] for each in made], dtype=np.int8),
        flops=np.array([each["flops"] for each in made], dtype=float),
        moved_bytes=np.array([each["bytes"] for each in made], dtype=float),
        gemm=np.array([each["gemm"] for each in made], dtype=float),
        width=np.array([each["width"] for each in made], dtype=float),
        is_channels_last=np.array([each["last"] for each in made], dtype=bool),
        sets_alignment=np.ones((len(made), 3), dtype=bool),
        dtype=tuple(str(each["dtype"]) for each in made),
        ops=len(made),
    )
    products = share_of_products(made, device, precision, cudnn)
    for constants in (CONSTANTS, replace(CONSTANTS, feed={}, carried={}), DATASHEET):
        demand = demand_of(kernels, device, precision=precision, cudnn=cudnn)
        expected = [by_hand(each, device, precision, constants, products, cudnn) for each in made]
        assert seconds(demand, constants) == pytest.approx(expected, rel=1e-9, abs=1e-18)


def test_a_device_at_its_datasheet_waits_for_nothing() -> None:
    waits = DATASHEET.start_s, DATASHEET.issue_s, DATASHEET.update_s, DATASHEET.turn_s, DATASHEET.cache
    assert waits == (0.0, 0.0, 0.0, 0.0, 0.0)


sizes = st.one_of(st.integers(1, 5000).map(float), st.sampled_from(SIDES))


@given(st.tuples(st.integers(1, 64).map(float), sizes, sizes, sizes), st.integers(1, 160), st.floats(0, 300))
def test_tiles_are_those_by_hand_and_never_do_less_than_the_product(
    gemm: tuple[float, ...], processors: int, edge: float
) -> None:
    found = tiled_flops(np.array([gemm]), processors, edge)[0]
    assert found == pytest.approx(occupied(gemm, processors, edge), rel=1e-12)
    assert found >= 2 * np.prod(gemm)


def test_large_products_come_close_to_their_own_operations() -> None:
    assert tiled_flops(np.array([[1.0, *3 * (8192.0,)]]), 108, 32.0)[0] == pytest.approx(2 * 8192.0**3, rel=0.05)
    one_row = tiled_flops(np.array([[1.0, 1.0, 4096.0, 4096.0]]), 108, 32.0)[0]
    assert one_row > 10 * 2 * 4096.0**2  # a row fills no tile


def test_clocks_follow_the_boards_power() -> None:
    share = {
        name: sustained(devices().device(name), matrix=True) for name in ("L4", "RTX6000Ada", "L40S", "A100", "T4")
    }
    assert share["L4"] < share["RTX6000Ada"] < share["L40S"] < share["A100"] == 1.0
    assert 0.4 < share["L4"] < share["T4"] < 0.75  # boards of 70 W do not hold their boost clock
    half = devices().device("L40S").model_copy(update={"power_w": 175.0})
    assert sustained(half, matrix=True) == pytest.approx(share["L40S"] / 2**0.7)
    assert sustained(AMPERE, matrix=True) == 1.0  # whose power nobody knows
    h100 = devices().device("H100")
    assert sustained(h100, matrix=True) < sustained(h100, matrix=True, share=0.8) < 1.0
    assert sustained(h100, matrix=True, share=0.3) == 1.0  # what waits for memory leaves power to products
    assert sustained(devices().device("RTX3090"), matrix=False) > 1.0  # GeForce's clocks go beyond the datasheet's


def _measured_kernels() -> Iterator[tuple[dict[str, str], Kernels]]:
    """Each row of what an H200 measured, and its kernel, with the columns that ``kernels_of`` gives it."""
    with gzip.open(ROOT / "benchmarks" / "measured" / "h200_kernels.csv.gz", "rt", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            samples, channels, side, outputs, groups, taps, stride, padding = (
                int(row[name])
                for name in ("samples", "channels", "side", "outputs", "groups", "taps", "stride", "padding")
            )
            written = samples * ((side + 2 * padding - taps) // stride + 1) ** 2
            read, inner, filters = samples * side * side, channels // groups * taps * taps, outputs // groups
            width = 2.0 if row["dtype"] in ("bfloat16", "float16") else 4.0
            kind, direction = (
                "pooling",
                {"forward": FORWARD, "input": INPUT_GRADIENT}.get(row["direction"], WEIGHT_GRADIENT),
            )
            if row["op"] == "avg_pool":
                made, of_each = (written, taps**2) if direction == FORWARD else (read, taps**2 * written / read)
                gemm = [made * channels, 0.0, 0.0, of_each]
            else:
                kind = "convolution" if groups == 1 else "grouped_convolution"
                gemm = [groups, written, filters, inner]
                gemm = [groups, filters, inner, written] if direction == WEIGHT_GRADIENT else gemm
                gemm = [groups, written, inner, filters] if direction == INPUT_GRADIENT else gemm
            yield (
                row,
                Kernels(
                    op=np.zeros(1, dtype=np.intp),
                    kind=np.array([CLASS[kind]], dtype=np.int8),
                    direction=np.array([direction], dtype=np.int8),
                    flops=np.array([2.0 * math.prod(gemm)]),
                    moved_bytes=np.array([width * (read * channels + written * outputs)]),
                    gemm=np.array([gemm], dtype=float),
                    width=np.array([width]),
                    is_channels_last=np.array([row["layout"] == "last"]),
                    sets_alignment=np.ones((1, 3), dtype=bool),
                    dtype=({"tf32": "float32"}.get(row["dtype"], row["dtype"]),),
                    ops=1,
                ),
            )


def test_pools_and_grouped_convolutions_take_what_an_h200_took() -> None:
    """In the median of every way, direction, stride and type; before cuDNN 9 groups of 24 or 48 channels took other times."""
    model = cost_model(devices().device("H200"), calibration())
    ratios: dict[tuple[str, ...], list[float]] = {}
    for row, kernel in _measured_kernels():
        channels, groups = int(row["channels"]) // int(row["groups"]), int(row["groups"])
        if row["op"] == "avg_pool":
            way = "pool"
        elif groups > 1 and channels > 1 and row["layout"] == "last":
            way = "dense" if channels % 64 == 0 else "pass" if channels in (4, 8, 16, 32) else "taps"
        else:
            continue
        predicted_s = float(seconds(demand_of(kernel, model.device, brief=True), model.constants)[0])
        key = (
            way,
            row["direction"],
            row["stride"] if way != "pool" else "",
            "tf32" if row["dtype"] == "tf32" else "half",
        )
        ratios.setdefault(key, []).append(1e6 * predicted_s / float(row["us"]))
    assert len(ratios) == 2 + 3 * 3 * 2 * 2
    for key, each in ratios.items():
        assert len(each) >= 14, key
        assert 0.6 < np.median(each) < 1.75, key
    everything = np.concatenate(list(ratios.values()))
    assert np.median(np.abs(np.log(everything))) < 0.25
