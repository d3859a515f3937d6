"""Several GPUs: collectives and steps as predicted, against published measurements.

    python benchmarks/truth_networks.py --data ../shared/data

writes the section of docs/truth.md (six minutes, most of them tracing). Start at :func:`section`.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from ddltool.analyzers.job.planning.exposed import stretched
from ddltool.analyzers.step.communication.collectives import default_cuts, finish_s
from ddltool.analyzers.step.communication.fabrics import own_link
from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.analyzers.step.communication.program import program_of
from ddltool.analyzers.step.costs.model import cost_model
from ddltool.analyzers.step.costs.predict import predict
from ddltool.analyzers.step.costs.setting import Placement, Setting
from ddltool.analyzers.step.costs.work import WorkCurve, measure_work, timed_step
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.artifacts import read_text, write_text
from ddltool.links import parse_link, parse_nic
from ddltool.shipped import calibration, devices

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "python benchmarks/truth_networks.py --data ../shared/data"
TITLE = "## Several GPUs"
# Parts of the table that are one row.
AS_ONE = ("DDP, BERT-large", "Gavel's jobs")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A step as measured and as predicted."""

    group: str
    gpus: int
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Return predicted / measured - 1."""
        return self.predicted_s / self.measured_s - 1.0


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """One measured all-reduce."""

    device: str
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
        ("coreweave", "", 200, "H100", h100, 96),
        ("coreweave", "", 280, "GB200", racks, 72),
        ("coreweave", "", 295, "GB200", halves, 128),
        ("coreweave", "", 999, "GB200", racks, 1440),
        ("aws", "", 999, "H100", efa, 128),
        ("oracle", "slurm", 1000, "A100", ring, 16),
        ("oracle", "slurm", 9999, "H100", unswitched, 16),
        ("oracle", "rdma", 9999, "A100", ring, 16),
        ("oracle", "", 9999, "A100", a100, 16),
    )
    found = []
    with (data / "truth" / "nccl_tests_measured.csv").open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            device, fabric, ranks = next(
                each
                for repository, file, line, *each in places
                if repository in row["repo"] and file in row["file"] and int(row["line"]) < line
            )
            size, seconds = float(row["bytes"]), 1e-6 * float(row["time_us"])
            found.append(Sweep(device=device, fabric=fabric, ranks=ranks, size_bytes=size, measured_s=seconds))
    return found


@cache
def _curve(model: str, precision: str, fused: bool) -> WorkCurve:
    from truth_models import Trace, build  # needs torch and transformers; the sweeps do not

    trace = Trace(model, precision, fused=fused)
    return measure_work(lambda: build(trace), Numerics(precision))  # type: ignore[arg-type]


def _fabric(device: str, nic: str) -> Fabric:
    return Fabric(inside=own_link(devices().device(device)), between=parse_nic(nic), gpus_per_node=8)


def _cells(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8") as lines:
        yield from (cells for cells in csv.DictReader(lines) if not cells["flag"])


def _predicted_s(
    curve: WorkCurve, device: str, setting: Setting, gpus: int, batch: int, attention: float = 1.0
) -> float:
    """Return the predicted seconds of a step whose kernels of attention take ``attention`` times as long as today's."""
    model = cost_model(devices().device(device), calibration())
    constants = model.constants
    slower = {
        name: {part: share / (attention if part.startswith("attention") else 1.0) for part, share in shares.items()}
        for name, shares in (("arithmetic", constants.arithmetic), ("feed", constants.feed))
    }
    model = replace(model, constants=replace(constants, **slower))
    place = Placement(num_nodes=-(-gpus // setting.fabric.gpus_per_node), num_replicas=gpus)
    row = predict(curve, model, setting, [batch], [place])[0]
    return row.step_time_s


def mpt(data: Path) -> Iterator[Pair]:
    """Yield LLM Foundry's MPT under FSDP; A100 nodes have 1,600 Gbit/s, H100 nodes 3,200."""
    from truth_cases import SOURCES  # beside this file, which a test imports as a package's

    kinds = {"a100_40gb": ("A100", "1600Gbit"), "h100_80gb": ("H100", "3200Gbit")}
    for cells in _cells(data / "truth" / "llm_foundry_mpt.csv"):
        if "fp8" in cells["precision"]:
            continue
        device, nic = kinds[cells["gpu"]]
        setting = Setting(
            fabric=_fabric(device, nic),
            optimizer="adamw",
            accumulation=int(float(cells["grad_accum"])),
            sharding="zero2" if "GRAD_OP" in cells["strategy"] else "fsdp",
            checkpointing="full" if cells["act_ckpt"] == "1" else "none",
        )
        precision = "bf16-pure" if "PURE" in cells["precision"] else "bf16"  # PURE reduces in bfloat16, too
        curve = _curve(f"{cells['model'].lower()}@{int(float(cells['seq_len_or_img']))}", precision, True)
        gpus = int(cells["gpus"])
        yield Pair(
            group=f"{cells['model']}, {device}",
            gpus=gpus,
            measured_s=float(cells["step_time_ms"]) / 1e3,
            predicted_s=_predicted_s(
                curve, device, setting, gpus, int(float(cells["batch_per_gpu"])), SOURCES["mpt"].attention
            ),
        )


def bert(data: Path) -> Iterator[Pair]:
    """Yield the pretraining of BERT-large in NVIDIA's examples under DDP, on DGX A100 with 8 cards of 200 Gbit/s.

    With 512 tokens the examples leave out padding, and nobody says how much: those steps are predicted from the measured ones
    on 8 GPUs.
    """
    own: dict[str, float] = {}
    for cells in _cells(data / "truth" / "nvidia_deeplearningexamples.csv"):
        if cells["model"] != "BERT" or cells["gpu"] != "A100 80GB" or "sequences/s" not in cells["unit"]:
            continue
        if not cells["grad_accum"] or cells["nodes"] == "":
            continue
        half, gpus, length = cells["precision"] == "amp", int(float(cells["gpus"])), int(float(cells["seq_len_or_img"]))
        accumulation, batch = int(float(cells["grad_accum"])), int(float(cells["batch_per_gpu"]))
        setting = Setting(fabric=_fabric("A100-80GB", "8x200Gbit"), optimizer="adamw", accumulation=accumulation)
        curve = _curve(
            f"bert-large@{length}", "fp16-pure" if half else "tf32", False
        )  # half: the whole model (apex, O2)
        measured_s = batch * accumulation * gpus / float(cells["throughput"])
        predicted_s = _predicted_s(curve, "A100-80GB", setting, gpus, batch)
        group = f"{length} tokens, {'AMP' if half else 'TF32'}"
        if length == 512:
            if gpus < 8:
                continue
            if gpus == 8:
                own[group] = measured_s / predicted_s
                continue
            group, predicted_s = f"{group}, from 8 GPUs", predicted_s * own[group]
        yield Pair(group=group, gpus=gpus, measured_s=measured_s, predicted_s=predicted_s)


def gavel(data: Path) -> Iterator[Pair]:
    """Yield Gavel's jobs on 2 to 8 GPUs, each from its own measured step on one GPU: what is judged is the communication.

    Throughputs are the sum over the GPUs. One GPU per node: 10 Gbit/s between nodes.
    """
    models = {
        "ResNet-18": "cifar-resnet18@32",
        "ResNet-50": "timm:resnet50@224",
        "LM": "word-lstm@35",
        "Transformer": "translator@32",
    }
    steps: dict[tuple[str, str, str, int], dict[int, float]] = defaultdict(dict)
    for cells in _cells(data / "truth" / "gavel_k80_p100_v100.csv"):
        if cells["model"] in models:
            gpus = int(cells["gpus"])
            key = (cells["model"], cells["gpu"], cells["nodes"], int(float(cells["batch_per_gpu"])))
            steps[key].setdefault(gpus, gpus / float(cells["throughput"]))
    flat = Fabric.flat(1.25e9, 50e-6)
    for (name, gpu, nodes, batch), measured in steps.items():
        if 1 not in measured:
            continue
        device = devices().device(gpu)
        spread = nodes.startswith("one")
        fabric = flat if spread else _fabric(gpu, "10Gbit")
        graph = _curve(models[name], "fp32", False).traced.at(batch)
        timed = timed_step(graph, cost_model(device, calibration()), Setting(fabric=fabric, optimizer="momentum"))
        program = stretched(program_of(timed), measured[1])
        for gpus, seconds in measured.items():
            if gpus > 1:
                finished = finish_s(program, fabric.over(gpus), default_cuts(program))
                yield Pair(
                    group=f"{gpu}, {'one GPU per node' if spread else 'one node'}",
                    gpus=gpus,
                    measured_s=seconds,
                    predicted_s=max(measured[1], finished),
                )


def _summary(pairs: Sequence[Pair]) -> str:
    ratio = np.array([1.0 + pair.error for pair in pairs])
    error = np.abs(ratio - 1.0)
    return (
        f"{len(pairs)} | {np.median(ratio):.2f} | {100 * np.median(error):.1f} ({100 * np.quantile(error, 0.9):.0f}, "
        f"{100 * error.max():.0f})"
    )


def _median(pairs: Sequence[Pair]) -> float:
    return 100 * float(np.median([abs(pair.error) for pair in pairs]))


def _table(first: str, parts: dict[str, Sequence[Pair]]) -> str:
    lines = [
        f"| {first} | rows | ratio | error (worst tenth, largest), % |",
        f"|---{'|---:' * 3}|",
    ]
    for part, pairs in parts.items():
        groups: dict[str, list[Pair]] = defaultdict(list)
        for pair in pairs:
            groups[pair.group].append(pair)
        if part not in AS_ONE:
            lines += [f"| {part}, {name} | {_summary(each)} |" for name, each in groups.items()]
        lines.append(f"| {part}, all | {_summary(pairs)} |")
    return "\n".join(lines)


def _sweep_pairs(found: Sequence[Sweep]) -> list[Pair]:
    """Return the all-reduces as pairs, by the GPU where they are long enough for its links to decide."""
    return [
        Pair(
            group=f"1 MiB and more, {sweep.device}" if sweep.size_bytes >= 2**20 else "less than 1 MiB",
            gpus=sweep.ranks,
            measured_s=sweep.measured_s,
            predicted_s=sweep.fabric.over(sweep.ranks).all_reduce_s(sweep.size_bytes),
        )
        for sweep in found
    ]


def section(data: Path) -> str:
    """Return the section of the page, from the measured rows below ``data``."""
    collectives, sharded = sorted(_sweep_pairs(sweeps(data)), key=lambda pair: pair.group), list(mpt(data))
    one, more = [[pair for pair in sharded if (pair.gpus == 8) == alone] for alone in (True, False)]
    parts = [
        TITLE,
        f"<!-- run: parse (the measured rows) -->\n```sh\n{COMMAND}\n```",
        "[Links](network.md#the-model) are those of datasheets with NCCL's constants; four constants were read off these "
        "sweeps, none off a step.",
        _table(
            "what",
            {
                "All-reduce": collectives,
                "FSDP": sharded,
                "DDP, BERT-large": list(bert(data)),
                "Gavel's jobs": list(gavel(data)),
            },
        ),
        "- All-reduces: nccl-tests, 8 B to 16 GiB, 16 to 1,440 GPUs. The largest error is a sweep's first message.\n"
        "- MPT: LLM Foundry's steps on 8 to 512 GPUs, attention as slow as [the fit](#by-source) has it. On 8 GPUs, which the "
        "constants of compute saw, the error is "
        f"{_median(one):.1f} %, on more {_median(more):.1f} %. Where an A100 with 40 GB is nearly full (MPT-70b), steps take "
        "far longer than compute and network explain.\n"
        "- BERT-large: NVIDIA's examples on 1 to 256 GPUs, TF32 and AMP; with 512 tokens predicted from the measured steps on "
        "8 GPUs, for they leave out an unknown amount of padding.\n"
        "- Gavel's jobs: 2 to 8 K80 or V100, torch 1.4, from the measured step on one GPU; what GPUs of a node do to each "
        "other's data loading is not predicted.",
    ]
    return "\n\n".join(parts) + "\n\n"


def put_section(title: str, text: str) -> None:
    """Put a section into docs/truth.md before that on intervals, in place of the one of its title."""
    page = ROOT / "docs" / "truth.md"
    others = re.sub(rf"{title}\n.*?(?=^## )", "", read_text(page), flags=re.DOTALL | re.MULTILINE)
    before, heading, rest = others.partition("## Intervals\n")
    write_text(page, before + text + heading + rest)


def write_section(data: Path) -> None:
    """Write the section on networks."""
    put_section(TITLE, section(data))


def main() -> None:
    """Write the section from the measured rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds truth")
    write_section(parser.parse_args().data)


if __name__ == "__main__":
    main()
