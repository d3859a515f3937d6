"""Predicted against measured step times (set DDLTOOL_DATA to the folder that holds sia-sosp23/). About a minute.

Predicts ImageNet (ResNet-50 at 224, mixed precision by apex), CIFAR-10 (ResNet-18 at 32) and BERT-base (question
answering, 384 tokens), as Pollux and Sia measured them on NVIDIA T4, RTX 2080 Ti and A100. Everything that is fitted is
fitted on other rows than those it is judged on: the application is left out, or the application and the device.

The factories below are sources, for example ``ddltool trace benchmarks/bench_analytic.py:resnet18``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddltool.analyzers.goodput.analytic import (
    DATASHEET,
    OPTIMIZERS,
    Arithmetic,
    Calibration,
    Link,
    Placement,
    Target,
    op_times_s,
    predict,
)
from ddltool.analyzers.goodput.observations import from_frame
from ddltool.analyzers.goodput.step_work import WorkCurve, measure_work
from ddltool.commands.sources import resolve_step
from ddltool.fixtures.loading import devices
from ddltool.graph import RECV
from ddltool.profile import read_table

if TYPE_CHECKING:
    from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("DDLTOOL_DATA", ROOT / ".." / "shared" / "data")) / "sia-sosp23" / "traces"
FILES = {"T4": "aws", "RTX2080Ti": "rtx", "A100": "dgx-ext"}
# One way: PCIe 3.0 x16, or NVLink 3; 50 Gbit/s Ethernet, or eight HDR adapters.
LINKS = {
    "T4": (Link(bandwidth_bytes_per_s=15.75e9, latency_s=10e-6), Link(bandwidth_bytes_per_s=6.25e9, latency_s=50e-6)),
    "RTX2080Ti": (
        Link(bandwidth_bytes_per_s=15.75e9, latency_s=10e-6),
        Link(bandwidth_bytes_per_s=6.25e9, latency_s=50e-6),
    ),
    "A100": (Link(bandwidth_bytes_per_s=300e9, latency_s=10e-6), Link(bandwidth_bytes_per_s=200e9, latency_s=20e-6)),
}


@dataclass(frozen=True)
class Application:
    """How an application of the measurements is traced; arithmetic by the script's own settings (torch before 1.12)."""

    source: str
    arithmetic: Arithmetic
    optimizer: str


APPLICATIONS = {
    "imagenet": Application(f"{__file__}:resnet50", "mixed", "momentum"),
    "cifar10": Application(f"{__file__}:resnet18", "tf32", "momentum"),
    "bert": Application(f"{__file__}:bert_base", "tf32", "adam"),
}


def resnet50() -> Any:
    """Return ResNet-50 with the stride in the 3 x 3 convolution, as torchvision has it."""
    import torch
    import transformers

    return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000)), torch.zeros(
        1, 3, 224, 224
    )


def bert_base() -> Any:
    """Return BERT-base for question answering on 384 tokens."""
    import torch
    import transformers

    config = transformers.BertConfig()
    return transformers.BertForQuestionAnswering(config), torch.zeros(1, 384, dtype=torch.long)


def resnet18() -> Any:
    """Return the ResNet-18 for 32 x 32 images that is usual for CIFAR-10: no pooling at the start, 11 M parameters."""
    import torch
    from torch import nn

    def block(inner: int, outer: int, stride: int) -> nn.Module:
        return _Residual(nn, inner, outer, stride)

    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    width = 64
    for outer, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [block(width, outer, stride), block(outer, outer, 1)]
        width = outer
    return nn.Sequential(*layers, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(512, 10)), torch.zeros(1, 3, 32, 32)


def _Residual(nn: Any, inner: int, outer: int, stride: int) -> Any:  # noqa: N802 - torch is imported late
    class Residual(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(inner, outer, 3, stride, 1, bias=False),
                nn.BatchNorm2d(outer),
                nn.ReLU(),
                nn.Conv2d(outer, outer, 3, 1, 1, bias=False),
                nn.BatchNorm2d(outer),
            )
            same = stride == 1 and inner == outer
            self.shortcut = (
                nn.Identity()
                if same
                else nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
            )

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.relu(self.body(x) + self.shortcut(x))

    return Residual()


@dataclass(frozen=True)
class Cell:
    """One application on one device: what was measured, medians over placements that are alike."""

    application: str
    device: str
    curve: WorkCurve
    batches: tuple[int, ...]
    measured: dict[tuple[int, int, int], float]
    """Seconds by nodes, replicas and local batch."""

    def target(self, calibration: Calibration, links: tuple[Link, Link] | None = None) -> Target:
        """Return what this cell's steps are predicted for; ``links``: local and between nodes, LINKS' by default."""
        local, network = links or LINKS[self.device]
        how = APPLICATIONS[self.application]
        return Target(
            device=devices().device(self.device),
            local=local,
            network=network,
            arithmetic=how.arithmetic,
            optimizer=how.optimizer,
            calibration=calibration,
        )

    def alone(self) -> np.ndarray:
        """Return (b,) the measured seconds of a step on one replica, by batch."""
        return np.array([self.measured[1, 1, batch] for batch in self.batches])


def read_cells() -> list[Cell]:
    """Return all nine cells."""
    found = []
    for name, how in APPLICATIONS.items():
        tables = {device: _measured(name, file) for device, file in FILES.items()}
        sizes = sorted({batch for table in tables.values() for _, _, batch in table})
        curve = measure_work(lambda source=how.source: resolve_step(source), sizes)  # type: ignore[misc]
        for device, table in tables.items():
            batches = tuple(sorted(batch for nodes, replicas, batch in table if replicas == 1))
            found.append(Cell(name, device, curve, batches, table))
    return found


def _measured(application: str, file: str) -> dict[tuple[int, int, int], float]:
    values: dict[tuple[int, int, int], list[float]] = {}
    for table in ("placements", "scalability"):
        path = DATA / application / f"{table}-{file}.csv"
        rows = from_frame(read_table(path), str(path))
        for nodes, replicas, batch, step in zip(
            rows.num_nodes, rows.num_replicas, rows.local_batch_size, rows.step_time_s, strict=True
        ):
            values.setdefault((int(nodes), int(replicas), int(batch)), []).append(float(step))
    return {key: float(np.median(steps)) for key, steps in values.items()}


class Quick:
    """A cell's one-replica rows with all but the calibration worked out; the same figures as ``predict`` gives."""

    def __init__(self, cell: Cell) -> None:
        target = cell.target(DATASHEET)
        self.measured = cell.alone()
        graphs = [cell.curve.at(batch).graph for batch in cell.batches]
        no_bytes = [replace(graph, size_bytes=0 * graph.size_bytes) for graph in graphs]
        no_flops = [replace(graph, flops=0 * graph.flops) for graph in graphs]
        self.flops_s = np.stack([op_times_s(graph, target) for graph in no_bytes])
        self.bytes_s = np.stack([op_times_s(graph, target) for graph in no_flops])
        # An op runs on matrix units when their share changes its time.
        half = target.calibration
        halved = op_times_s(no_bytes[0], replace(target, calibration=replace(half, matrix_unit_share=0.5)))
        self.matrix = halved > 1.5 * self.flops_s[0]
        one = op_times_s(graphs[0], replace(target, calibration=replace(half, per_op_s=1.0)))
        self.launches = int(np.count_nonzero(one))
        self.parameters = len(graphs[0].of_kind(RECV))
        passes = OPTIMIZERS[target.optimizer].passes
        self.update_s = passes * graphs[0].parameter_bytes / target.device.memory_bytes_per_s

    def seconds(self, c: Calibration) -> np.ndarray:
        """Return (b,) the predicted seconds of a step under a calibration."""
        share = np.where(self.matrix, c.matrix_unit_share, c.vector_share)
        busy = np.maximum(self.flops_s / share, self.bytes_s / c.bandwidth_share).sum(axis=1)
        host = c.per_op_s * self.launches + c.per_parameter_s * self.parameters
        made: np.ndarray = busy + host + self.update_s / c.bandwidth_share
        return made


START = Calibration(
    vector_share=0.6, matrix_unit_share=0.3, bandwidth_share=0.6, per_op_s=30e-6, per_parameter_s=300e-6
)
# Pulls what the rows of a fold do not determine towards the start.
PRIOR = 0.02


def calibrate(cells: list[Quick]) -> Calibration:
    """Return the five figures with the least mean squared log error, each cell with equal weight."""
    from scipy.optimize import minimize

    names = ("vector_share", "matrix_unit_share", "bandwidth_share", "per_op_s", "per_parameter_s")
    start = np.log([getattr(START, name) for name in names])

    def made(logs: np.ndarray) -> Calibration:
        return Calibration(**dict(zip(names, np.exp(logs).tolist(), strict=True)))

    def loss(logs: np.ndarray) -> float:
        errors = [np.mean(np.log(cell.seconds(made(logs)) / cell.measured) ** 2) for cell in cells]
        return float(np.sum(errors) + PRIOR * ((logs - start) ** 2).sum())

    options = {"maxiter": 3000, "maxfev": 3000, "xatol": 1e-3, "fatol": 1e-6}
    return made(minimize(loss, start, method="Nelder-Mead", options=options).x)


def summary(ratios: np.ndarray) -> str:
    """Return MAPE and range of predicted over measured as a cell of a table; ``ratios``: (k,)."""
    mape = float(np.abs(ratios - 1).mean())
    return f"{mape:6.1%}  {ratios.min():.2f} .. {ratios.max():.2f}"


def folds(cells: list[Cell], quick: list[Quick], keep: Callable[[Cell, Cell], bool]) -> list[np.ndarray]:
    """Return predicted / measured of every cell, calibrated on the cells that ``keep(other, cell)`` lets in."""
    cache: dict[tuple[int, ...], Calibration] = {}
    ratios = []
    for cell, rows in zip(cells, quick, strict=True):
        chosen = tuple(place for place, other in enumerate(cells) if keep(other, cell))
        if chosen not in cache:
            cache[chosen] = calibrate([quick[place] for place in chosen])
        ratios.append(rows.seconds(cache[chosen]) / rows.measured)
    return ratios


def one_replica(cells: list[Cell], quick: list[Quick]) -> None:
    """Print how far predictions of one replica are off: uncalibrated, scaled, and calibrated on other rows."""
    raw = [rows.seconds(DATASHEET) / rows.measured for rows in quick]
    scaled = []
    for cell, ratio in zip(cells, raw, strict=True):
        others = [r for c, r in zip(cells, raw, strict=True) if c.device == cell.device and c is not cell]
        factor = np.exp(-np.mean([np.log(r).mean() for r in others]))
        scaled.append(ratio * factor)
    by_application = folds(cells, quick, lambda other, cell: other.application != cell.application)
    by_both = folds(
        cells, quick, lambda other, cell: other.application != cell.application and other.device != cell.device
    )
    print("ONE REPLICA: MAPE and range of predicted / measured")
    print(f"{'':20s}{'datasheet':22s}{'x factor per device':22s}{'calibrated, appl.':22s}{'calibrated, appl.'}")
    print(f"{'':20s}{'':22s}{'appl. left out':22s}{'left out':22s}{'and device left out'}")
    for cell, *ratios in zip(cells, raw, scaled, by_application, by_both, strict=True):
        print(f"{cell.application:9s}{cell.device:11s}" + "".join(f"{summary(r):22s}" for r in ratios))
    print(f"{'all':20s}" + "".join(f"{summary(np.concatenate(r)):22s}" for r in (raw, scaled, by_application, by_both)))
    final = calibrate(quick)
    everything = np.concatenate([rows.seconds(final) / rows.measured for rows in quick])
    print(f"\nfitted to all nine (what ships), {summary(everything)} on these same rows:\n  {final}")


def several_replicas(cells: list[Cell], quick: list[Quick]) -> None:
    """Print how far predictions of several replicas are off, with the datasheet's links and with one factor for each."""
    print("\nSEVERAL REPLICAS, calibrated with the application left out: MAPE and range of predicted / measured")
    print(f"{'':20s}{'':9s}{'links of datasheet':22s}{'x factor per link':22s}{'factor'}")
    for cell in cells:
        chosen = [q for c, q in zip(cells, quick, strict=True) if c.application != cell.application]
        calibration = calibrate(chosen)
        others = [c for c in cells if c.device == cell.device and c is not cell]
        for where in ("local", "network"):
            factor = best_factor(others, calibration, where)
            plain, tuned = (ratios(cell, calibration, where, f) for f in (1.0, factor))
            print(
                f"{cell.application:9s}{cell.device:11s}{where:9s}{summary(plain):22s}{summary(tuned):22s}{factor:.3g}"
            )


def ratios(cell: Cell, calibration: Calibration, where: str, factor: float) -> np.ndarray:
    """Return (k,) predicted over measured steps, on one node (``where``: local) or several; ``factor``: of the links' rates."""
    local, network = (replace(k, bandwidth_bytes_per_s=k.bandwidth_bytes_per_s * factor) for k in LINKS[cell.device])
    target = cell.target(calibration, (local, network))
    wanted = [key for key in cell.measured if key[1] > 1 and (key[0] == 1) == (where == "local")]
    places = sorted({key[:2] for key in wanted})
    batches = sorted({key[2] for key in wanted})
    batches = batches[:: max(1, len(batches) // 3)]
    steps = predict(cell.curve, target, batches, [Placement(num_nodes=n, num_replicas=k) for n, k in places])
    found = [
        step.step_time_s / cell.measured[key]
        for step in steps
        if (key := (step.num_nodes, step.num_replicas, step.local_batch_size)) in cell.measured
    ]
    return np.array(found)


def best_factor(cells: list[Cell], calibration: Calibration, where: str) -> float:
    """Return the share of the link's bandwidth that predicts these cells best."""
    tried = np.geomspace(0.02, 1.0, 12)
    scores = [
        np.mean([np.log(ratios(cell, calibration, where, factor)).__pow__(2).mean() for cell in cells])
        for factor in tried
    ]
    return float(tried[int(np.argmin(scores))])


def check_quick(cells: list[Cell], quick: list[Quick]) -> None:
    """The short cut must give what the product gives."""
    for cell, rows in zip(cells, quick, strict=True):
        steps = predict(cell.curve, cell.target(START), cell.batches, [Placement(num_nodes=1, num_replicas=1)])
        np.testing.assert_allclose(rows.seconds(START), [step.step_time_s for step in steps], rtol=1e-9)


if __name__ == "__main__":
    if not DATA.is_dir():
        sys.exit(f"no data at {DATA}; set DDLTOOL_DATA")
    everything = read_cells()
    shortcuts = [Quick(cell) for cell in everything]
    check_quick(everything, shortcuts)
    one_replica(everything, shortcuts)
    several_replicas(everything, shortcuts)
