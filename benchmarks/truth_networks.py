"""Several GPUs: collectives as predicted against published sweeps of nccl-tests. Start at :func:`section`."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

from ddltool.analyzers.costs.nccl import Fabric
from ddltool.links import parse_link, parse_nic


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One measured all-reduce."""

    title: str
    fabric: Fabric
    ranks: int
    size_bytes: float
    measured_s: float

    @property
    def error(self) -> float:
        """Return predicted / measured - 1."""
        return self.fabric.over(self.ranks).all_reduce_s(self.size_bytes) / self.measured_s - 1.0


def sweeps(data: Path) -> list[Sweep]:
    """Return the published sweeps below ``data``.

    Ranks are what the ratio of the rates says, the rest is of the pages that the rows name: Oracle's nodes of 8 A100 have 16
    cards of 100 Gbit/s, of 8 H100 a card of 400 each; two of its pages set NCCL_ALGO=Ring and NCCL_CUMEM_ENABLE=0, which takes
    NVLS away. Of Amazon's EFA 15 us for a message are taken.
    """
    a100 = Fabric(inside=parse_link("nvlink3"), between=parse_nic("16x100Gbit"), gpus_per_node=8)
    ring: Fabric = replace(a100, algorithms=("ring",))
    h100 = Fabric(inside=parse_link("nvlink4"), between=parse_nic("8x400Gbit"), gpus_per_node=8)
    unswitched: Fabric = replace(h100, algorithms=("ring", "tree"))
    efa = replace(h100, between=replace(h100.between, latency_s=15e-6))
    racks = Fabric(inside=parse_link("nvlink5"), between=parse_nic("72x400Gbit"), gpus_per_node=72)
    halves = replace(racks, between=parse_nic("64x400Gbit"), gpus_per_node=64)
    # repository, file and the lines below which a sweep's rows stand
    places = (
        ("coreweave", "", 200, "12 x 8 H100", h100, 96),
        ("coreweave", "", 280, "one GB200 NVL72", racks, 72),
        ("coreweave", "", 295, "2 x 64 GB200", halves, 128),
        ("coreweave", "", 999, "20 x 72 GB200", racks, 1440),
        ("aws", "", 999, "16 x 8 H100, EFA", efa, 128),
        ("oracle", "slurm", 1000, "2 x 8 A100, ring", ring, 16),
        ("oracle", "slurm", 9999, "2 x 8 H100, without NVLS", unswitched, 16),
        ("oracle", "rdma", 9999, "2 x 8 A100, ring", ring, 16),
        ("oracle", "", 9999, "2 x 8 A100", a100, 16),
    )
    found = []
    with (data / "truth" / "nccl_tests_measured.csv").open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            title, fabric, ranks = next(
                each
                for repository, file, line, *each in places
                if repository in row["repo"] and file in row["file"] and int(row["line"]) < line
            )
            size, seconds = float(row["bytes"]), 1e-6 * float(row["time_us"])
            found.append(Sweep(title=title, fabric=fabric, ranks=ranks, size_bytes=size, measured_s=seconds))
    return found
