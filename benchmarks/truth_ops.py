"""Single operations that others measured: products as cases of the fit, and how far off products and collectives are.

    python benchmarks/truth_ops.py --data ../shared/data

Writes the section of docs/truth.md. Start at :func:`write_operations`.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from ddltool.analyzers.step.costs.fitting import Case
from ddltool.analyzers.step.costs.kernel_times import seconds
from ddltool.analyzers.step.costs.kernels import Kernels, product_kernels
from ddltool.analyzers.step.costs.model import cost_model
from ddltool.analyzers.step.costs.operations import collective_s, own_fabric, warm_demand
from ddltool.artifacts import read_text, write_text
from ddltool.calibration import CalibrationTable, Residuals
from ddltool.device import Device
from ddltool.shipped import calibration, devices

ROOT = Path(__file__).resolve().parents[1]
TITLE = "## Single operations"
_WORDS = (
    "Predicted over measured time of a product or collective by itself ([how](devices.md#one-operation)); collectives from "
    "1 MiB on. XLA's tables were measured without NVLS, which NCCL takes by itself from Hopper on: the last column has its "
    "prediction. In eight bits a fifth of XLA's rows on an H100 lie above the dense peak, and on an MI300X XLA has no fast "
    "kernels. NeuSight's times are of single calls, whose 30 us on the host are added."
)
_LEAST_BYTES = 2.0**20
# So many steps do the rows of one device and type count as; a row's own error is that of its measurement and of the kernel
# that a library happens to choose.
_AS_STEPS, _ERROR = 12.0, 0.1
# What NeuSight's measurements of single calls hold beside the kernel: the host's call.
_CALL_S = 30e-6
_NEUSIGHT = {"NVIDIA A100-PCIE-40GB": "A100-PCIe"}
# Bytes of one element of the operands and of the result.
_WIDTHS = {"bf16xbf16->bf16": (2, 2), "bf16xbf16->f32": (2, 4), "f32xf32->f32": (4, 4)}
_EIGHT_BITS = (1, 2)


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredProducts:
    """Products that one source measured on one device in one type."""

    source: str
    device: Device
    numerics: str
    precision: str
    kernels: Kernels
    measured_s: np.ndarray
    is_fitted: bool
    """Whether the fit reads them; others are shown alone."""

    def cases(self) -> list[Case]:
        """Return a case of each product."""
        weight = math.sqrt(_AS_STEPS / len(self.measured_s))
        return [
            Case(
                demand=warm_demand(self.kernels.chosen([place]), self.device, self.precision),
                count=np.ones(1),
                ops=0,
                views=0,
                tensors=0,
                generation=self.device.branch,
                measured_s=float(measured_s),
                weight=weight,
                error=_ERROR,
                setting="" if self.source != "NeuSight" else f"NeuSight, {self.device.name}",
            )
            for place, measured_s in enumerate(self.measured_s)
        ]

    def ratios(self, table: CalibrationTable) -> np.ndarray:
        """Return predicted over measured seconds of each product."""
        model = cost_model(self.device, table)
        added_s = _CALL_S if self.source == "NeuSight" else 0.0
        demand = warm_demand(self.kernels, self.device, self.precision)
        ratios: np.ndarray = (seconds(demand, model.constants) + added_s) / self.measured_s
        return ratios


def call_settings(groups: list[MeasuredProducts]) -> dict[str, float]:
    """Return what is believed beforehand of the seconds beside the kernels, by the cases' settings."""
    return {f"NeuSight, {group.device.name}": _CALL_S for group in groups if group.source == "NeuSight"}


def read_products(data: Path) -> list[MeasuredProducts]:
    """Return all measured products of ``data``/truth, by source, device and type; devices that are not known are left out."""
    return [group for group in _groups(data / "truth") if len(group.measured_s)]


def _groups(truth: Path) -> Iterator[MeasuredProducts]:
    table = pd.read_csv(truth / "ops" / "products.csv")
    for (gpu, numerics), rows in table[table.flag.isna()].groupby(["gpu", "numerics"]):
        # XLA has no fast kernels of eight bits on an MI300X; on an H100 a fifth of its rows lie above the dense peak.
        is_odd = numerics.startswith("f8") and gpu in ("MI300X", "H100")
        yield from _group("XLA", gpu, numerics, rows, rows.time_us * 1e-6, is_fitted=not is_odd)
    best = pd.read_csv(truth / "matmul_best.csv").assign(batch=1)
    best_s = 2e-12 * best.m * best.n * best.k / best.tflops_bf16
    for gpu, rows in best.groupby("gpu"):
        yield from _group("best of many shapes", gpu, "bf16xbf16->bf16", rows, best_s[rows.index], is_fitted=False)
    for kind in ("linear", "bmm"):
        table = pd.read_csv(truth / "ops" / f"neusight_{kind}.csv.gz")
        table = table.rename(columns={"B": "batch", "M": "m", "N": "n", "K": "k"})
        for gpu, rows in table.groupby("Device"):
            name = _NEUSIGHT.get(gpu, gpu)
            yield from _group("NeuSight", name, f"float32 {kind}", rows, rows.Latency * 1e-3, is_fitted=True)


def _group(
    source: str, gpu: str, numerics: str, rows: pd.DataFrame, measured_s: pd.Series, *, is_fitted: bool
) -> Iterator[MeasuredProducts]:
    device = devices().find(gpu)
    if device is None:
        return
    is_half, is_eight = numerics.startswith("bf16"), numerics.startswith("f8")
    dtype = "bfloat16" if is_half else "float8_e4m3fn" if is_eight else "float32"
    widths = _EIGHT_BITS if is_eight else _WIDTHS.get(numerics, (4, 4))
    yield MeasuredProducts(
        source=source,
        device=device,
        numerics=numerics,
        precision="tf32" if numerics.startswith("f32") else "fp32",
        kernels=product_kernels(rows[["batch", "m", "n", "k"]].to_numpy(dtype=np.float64), dtype, *widths),
        measured_s=measured_s.to_numpy(dtype=np.float64),
        is_fitted=is_fitted,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredCollectives:
    """Collectives of one kind that XLA measured on one number of GPUs of a node or rack, from a mebibyte on."""

    device: Device
    name: str
    replicas: int
    size_bytes: np.ndarray
    """Of the whole."""
    measured_s: np.ndarray

    def ratios(self, *, nvls: bool) -> np.ndarray:
        """Return predicted over measured seconds of each size; ``nvls``: as NCCL chooses by itself, else by rings and trees."""
        fabric = own_fabric(self.device)
        group = (fabric if nvls else replace(fabric, algorithms=("ring", "tree"))).over(self.replicas)
        predicted_s = np.array([collective_s(group, self.name, size) for size in self.size_bytes.tolist()])
        ratios: np.ndarray = predicted_s / self.measured_s
        return ratios


def read_collectives(data: Path) -> list[MeasuredCollectives]:
    """Return the measured collectives of ``data``/truth.

    The table has bytes per second of the shape: of a reduce-scatter one process's part, by what links can carry, so that the
    whole, and the time, are as many times larger as there are processes.
    """
    table = pd.read_csv(data / "truth" / "ops" / "collectives.csv")
    parts = np.where(table.collective == "reduce-scatter", table.gpus_of_a_group, 1)
    table["whole"], table["seconds"] = table.shape_bytes * parts, table.time_us * 1e-6 * parts
    table["device"] = table.gpu.str.partition(" ")[0]
    table = table[table.whole >= _LEAST_BYTES]
    return [
        MeasuredCollectives(
            device=device,
            name=name,
            replicas=int(replicas),
            size_bytes=rows.whole.to_numpy(dtype=np.float64),
            measured_s=rows.seconds.to_numpy(),
        )
        for (gpu, name, replicas), rows in table.groupby(["device", "collective", "gpus_of_a_group"])
        if (device := devices().find(gpu)) is not None
    ]


def operation_residuals(
    groups: Sequence[MeasuredProducts], collectives: Sequence[MeasuredCollectives], table: CalibrationTable
) -> dict[str, Residuals]:
    """Return how far measured products and collectives lie from predicted ones, each device and kind with equal weight."""
    products = [group.ratios(table) for group in groups if group.is_fitted]
    exchanges = [group.ratios(nvls=False) for group in collectives]
    return {
        "product": _residuals(products, "nothing: the fit saw these"),
        "collective": _residuals(exchanges, "nothing: rates of links were read off these"),
    }


def _residuals(ratios: Sequence[np.ndarray], what: str) -> Residuals:
    logs = -np.log(np.concatenate(ratios))
    weights = np.concatenate([np.full(len(each), 1.0 / len(each)) for each in ratios])
    order = np.argsort(logs)
    reached = np.cumsum(weights[order]) / weights.sum()
    low, high = np.exp(np.interp([0.1, 0.9], reached, logs[order]))
    errors = np.abs(np.exp(-logs) - 1.0)
    return Residuals(
        low=min(1.0, float(f"{low:.4g}")),
        high=max(1.0, float(f"{high:.4g}")),
        median_error=float(f"{np.median(errors):.4g}"),
        rows=len(logs),
        what=what,
    )


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _quantiles(ratios: np.ndarray) -> tuple[str, str]:
    low, median, high = np.quantile(ratios, [0.1, 0.5, 0.9])
    return f"{median:.2f}", f"{low:.2f} to {high:.2f}"


def section(data: Path, table: CalibrationTable) -> str:
    """Return the section of docs/truth.md: predicted over measured by device, kind and type."""
    lines = [_row("products", "GPU", "type", "rows", "median", "10 to 90 %"), "|---|---|---|---:|---:|---:|"]
    products: dict[tuple[str, str, str], list[np.ndarray]] = {}
    for group in read_products(data):
        source = f"{group.source}{'' if group.is_fitted else ' (not fitted)'}"
        numerics = "float8" if group.numerics.startswith("f8") else group.numerics
        gpu = group.device.name if len(group.measured_s) > 1 else ""  # several GPUs with one product of each
        products.setdefault((source, gpu, numerics), []).append(group.ratios(table))
    for (source, gpu, numerics), parts in products.items():
        ratios = np.concatenate(parts)
        lines.append(_row(source, gpu or f"{len(parts)} GPUs", numerics, len(ratios), *_quantiles(ratios)))
    lines += [
        "",
        _row("collective", "GPU", "GPUs", "rows", "median", "10 to 90 %", "with NVLS"),
        "|---|---|---|---:|---:|---:|---:|",
    ]
    exchanges: dict[tuple[str, str], list[MeasuredCollectives]] = {}
    for exchange in read_collectives(data):
        exchanges.setdefault((exchange.name, exchange.device.name), []).append(exchange)
    for (name, gpu), sizes in sorted(exchanges.items()):
        plain, chosen = (np.concatenate([size.ratios(nvls=nvls) for size in sizes]) for nvls in (False, True))
        least, most = sizes[0].replicas, sizes[-1].replicas
        counts = ", ".join(str(size.replicas) for size in sizes) if len(sizes) < 4 else f"{least} to {most}"
        with_nvls = "" if np.allclose(plain, chosen) else _quantiles(chosen)[0]
        lines.append(_row(name, gpu, counts, len(plain), *_quantiles(plain), with_nvls))
    return "\n".join([TITLE, "", _WORDS, "", *lines, ""]) + "\n"


def write_operations(data: Path, table: CalibrationTable) -> None:
    """Put the section into docs/truth.md, in place of the one that is there."""
    page = ROOT / "docs" / "truth.md"
    text = re.sub(rf"{TITLE}\n.*?(?=^## )", "", read_text(page), flags=re.DOTALL | re.MULTILINE)
    before, after, rest = text.partition("## Intervals\n")
    write_text(page, before + section(data, table) + "\n" + after + rest)


def main() -> None:
    """Write the section with the shipped constants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds truth")
    write_operations(parser.parse_args().data, calibration())


if __name__ == "__main__":
    main()
