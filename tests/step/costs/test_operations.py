"""Single operations: a product and a collective against bounds of physics, arithmetic by hand, and published measurements."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from ddltool.analyzers.step.costs.model import CostModel, cost_model
from ddltool.analyzers.step.costs.operations import time_collective, time_product
from ddltool.errors import InputError
from ddltool.shipped import calibration, devices
from tests.conftest import Result

Cli = Callable[..., Result]
DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "truth" / "ops"


def model_of(name: str) -> CostModel:
    return cost_model(devices().device(name), calibration())


@pytest.mark.parametrize("name", ["V100", "A100", "H100", "B200", "GB300", "RTX4090", "RTXPRO6000", "MI300X", "MI355X"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_product_is_between_its_peak_and_a_third_of_it(name: str, precision: str) -> None:
    device = devices().device(name)
    dtype = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[precision]
    if dtype not in device.peak_flops:
        with pytest.raises(InputError, match="has no rate for bf16"):
            time_product(model_of(name), "8192x8192x8192", precision)
        return
    row = time_product(model_of(name), "8192x8192x8192", precision)
    least_s = 2.0 * 8192.0**3 / device.peak_for(dtype)
    assert least_s <= row.time_s <= 3.0 * least_s
    assert row.low_s <= row.time_s <= row.high_s


def test_a_product_says_what_limits_it() -> None:
    h100 = model_of("H100")
    assert time_product(h100, "8192x8192x8192", "bf16").limit.startswith("matrix units: ")
    assert time_product(h100, "8192x8192x8192", "fp32").limit.startswith("float32 units: ")
    assert time_product(h100, "65536x65536x16", "bf16").limit.startswith("memory: ")
    assert time_product(h100, "64x64x64", "bf16").limit.startswith("the start of a kernel: ")


def test_batches_types_and_odd_rows() -> None:
    h100 = model_of("H100")

    def seconds(text: str, precision: str = "bf16") -> float:
        return time_product(h100, text, precision).time_s

    assert seconds("4x2048x2048x4096") == pytest.approx(4 * seconds("2048x2048x4096"), rel=0.25)
    assert seconds("8192x8192x8192", "fp8") < 0.65 * seconds("8192x8192x8192")
    assert seconds("8192x8192x8192") < 0.65 * seconds("8192x8192x8192", "tf32") < seconds("8192x8192x8192", "fp32")
    # A vocabulary that no 16 bytes divide: nanoGPT's step became a quarter faster by 47 rows more.
    assert seconds("16384x50304x768") < 0.9 * seconds("16384x50257x768")


def test_four_bits_are_the_datasheets_and_say_so() -> None:
    gb200 = model_of("GB200")
    narrow, eight = (time_product(gb200, "16384x16384x16384", precision) for precision in ("nvfp4", "fp8"))
    assert 0.5 <= narrow.time_s / eight.time_s < 0.75
    assert narrow.limit.endswith("; by the datasheet alone, no product in four bits was measured")
    assert "datasheet" not in eight.limit
    with pytest.raises(InputError, match="H100 has no rate for nvfp4; its datasheet has float32"):
        time_product(model_of("H100"), "64x64x64", "nvfp4")


@pytest.mark.parametrize(
    ("name", "gpus", "size_bytes", "least_gb_per_s", "most_gb_per_s"),
    [
        # What a GPU's links can send one way, and 0.6 of it: by the bytes that a ring sends of each that is reduced.
        ("H100", 8, 2**30, 0.6 * 450, 1.29 * 450),  # NVLS reduces in the switches, beyond the links' rate
        ("A100", 8, 2**30, 0.6 * 300, 300),
        ("GB200", 64, 2**32, 0.6 * 900, 900),
        ("MI300X", 8, 2**30, 0.5 * 448, 448),
        ("MI300X", 2, 2**30, 0.5 * 64, 64),  # one link of seven joins two of them
    ],
)
def test_a_collective_sends_what_links_carry(
    name: str, gpus: int, size_bytes: int, least_gb_per_s: float, most_gb_per_s: float
) -> None:
    row = time_collective(model_of(name), f"all-reduce:{size_bytes}B:{gpus}")
    bus = 2 * (gpus - 1) / gpus * size_bytes / row.time_s / 1e9
    assert least_gb_per_s <= bus <= most_gb_per_s
    assert row.low_s <= row.time_s <= row.high_s


def test_a_collective_by_an_algorithm() -> None:
    h100 = model_of("H100")
    chosen, ring = (time_collective(h100, f"all-reduce:1GiB:8{suffix}") for suffix in ("", ":ring"))
    assert "nvls Simple; " in chosen.limit
    assert f"{ring.time_s * 1e6:.4g} us without NVLS" in chosen.limit
    assert "ring" in ring.limit
    assert chosen.time_s < ring.time_s
    assert time_collective(h100, "all-gather:1GiB:8").time_s < ring.time_s
    assert time_collective(h100, "all-reduce:1KiB:8").limit.startswith("latency")


@pytest.mark.parametrize(
    "text",
    ["all-reduce", "all-reduce:64MiB", "all-reduce:64MiB:x", "sum:64MiB:8", "all-reduce:64B:1", "all-reduce:64B:9",
     "all-gather:64MiB:8:tree", "all-reduce:64MiB:2:nvls", "all-reduce:64MiB:8:star"],
)  # fmt: skip
def test_nonsense_of_collectives_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        time_collective(model_of("H100"), text)


@pytest.mark.parametrize("text", ["8192", "8192x8192", "0x1x1", "axbxc", "1x2x3x4x5", "1x1x99999999999999"])
def test_nonsense_of_products_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--product"):
        time_product(model_of("H100"), text, "bf16")


def test_the_command_times_operations(cli: Cli) -> None:
    command = (
        "devices",
        "H100",
        "--product",
        "8192x8192x4096",
        "--product",
        "256x256x256",
        "--collective",
        "all-reduce:64MiB:8",
    )
    shown = cli(*command)
    assert shown.code == 0
    assert shown.out.startswith("H100, 8192x8192x4096 bf16: ")
    document = cli(*command, "--json").document
    assert [row["operation"] for row in document["rows"]] == [
        "8192x8192x4096 bf16",
        "256x256x256 bf16",
        "all-reduce of 64.0 MiB on 8",
    ]
    assert all(0 < row["low_s"] <= row["time_s"] <= row["high_s"] for row in document["rows"])
    assert cli("devices", "--product", "1x1x1").error_line.startswith("NAME: no device is named")
    assert "--precision" in cli("devices", "H100", "--product", "8x8x8", "--precision", "int3").error_line


@pytest.mark.skipif(not DATA.is_dir(), reason="measured operations are not here")
def test_products_are_as_xla_measured_them() -> None:
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    precisions = {"bf16xbf16->bf16": "bf16", "f32xf32->f32": "tf32", "f8e4m3fnxf8e4m3fn->bf16": "fp8"}
    with (DATA / "products.csv").open() as file:
        for row in csv.DictReader(file):
            key = row["gpu"], precisions.get(row["numerics"], "")
            if key[1] and not row["flag"] and (key[1] != "fp8" or row["gpu"] == "B200"):
                shape = "x".join(row[name] for name in ("batch", "m", "n", "k"))
                found = time_product(model_of(row["gpu"]), shape, key[1])
                ratios[key].append(found.time_s / float(row["time_us"]) * 1e6)
    assert len(ratios) == 7
    for key, found_ratios in ratios.items():
        assert 0.85 <= median(found_ratios) <= 1.15, key
        assert np.quantile(np.abs(np.log(found_ratios)), 0.75) <= np.log(1.3), key
