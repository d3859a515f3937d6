"""Tensor and pipeline parallelism: steps as predicted, against published measurements.

    python benchmarks/truth_parallel.py --data ../shared/data

writes the section of docs/truth.md (two minutes). Start at :func:`section`.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from truth_float8 import META, device_of
from truth_models import gpt, llama
from truth_networks import put_section

from ddltool.analyzers.step.communication.fabrics import own_link
from ddltool.analyzers.step.communication.nccl import Fabric
from ddltool.analyzers.step.communication.program import program_of
from ddltool.analyzers.step.costs.model import CostModel, cost_model
from ddltool.analyzers.step.costs.parallel import ParallelCurve
from ddltool.analyzers.step.costs.predict import predict
from ddltool.analyzers.step.costs.setting import ParallelDegrees, Placement, Setting
from ddltool.analyzers.step.costs.work import WorkCurve, measure_work
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.step import TrainingStep
from ddltool.analyzers.step.tracing.transformers_models import transformers_step
from ddltool.links import parse_nic
from ddltool.shipped import calibration, devices

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "python benchmarks/truth_parallel.py --data ../shared/data"
TITLE = "## Tensor and pipeline parallelism"
# Megatron-LM's layers are Python functions, forward and backward: on the host of vTrain's node they take so many times as long
# to issue an op as what the shipped constants were fitted to. One number for all 750 steps of that node.
MEGATRON_HOST = 2.4
# What plans pick where others published what they chose; tests/job/planning/test_groups.py holds them.
CHOICES = """Published choices among the layouts that `plan` finds:

<!-- run: parse (minutes) -->
```sh
ddltool plan transformers:meta-llama/Meta-Llama-3-70B --devices 64xGB200 --nodes 1 --precision fp8 --compile \\
    --optimizer adamw --sequence-length 8192 --batch-size 256
ddltool plan transformers:meta-llama/Llama-2-7b-hf --devices 128xA100-80GB --nic 400Gbit --precision bf16 \\
    --optimizer adamw --sequence-length 4096 --batch-size 256
ddltool plan transformers:meta-llama/Llama-2-13b-hf --devices 128xA100-80GB --nic 400Gbit --precision bf16 \\
    --optimizer adamw --sequence-length 4096 --batch-size 128
ddltool plan transformers:meta-llama/Meta-Llama-3-70B --devices 64xH100 --nic 8x400Gbit --precision fp8 --compile \\
    --optimizer adamw --sequence-length 8192 --batch-size 256
```

- Llama-3-70B on 64 GB200 in FP8: NVIDIA's FSDP is the first (8.19 s predicted, 7.52 to 8.11 measured).
- Llama-2-7B on 128 A100: fms-fsdp's HSDP without checkpointing, two samples a pass, is within 1 % of the first.
- Llama-2-13B on 128 A100: fms-fsdp's HSDP without checkpointing is not among the best three, which are FSDP2 without
  resharding (1.81 s), alone and with TP 2 or 4.
- Llama-3-70B on 64 H100 in FP8: NVIDIA's TP 4 x PP 8 is not among the best three, FSDP2 (20.9 s) and FSDP2 with TP 2 or 4
  (22.0, 22.4 s) are. With asynchronous exchanges NVIDIA's is
  predicted 17 % slower than it was."""
# Llama by the name of its size: width, heads, heads of keys and values, hidden width, blocks.
LLAMAS = {
    "llama3-8b": (4096, 32, 8, 14336, 32),
    "llama3-70b": (8192, 64, 8, 28672, 80),
    "llama3-405b": (16384, 128, 8, 53248, 126),
}


EXPERTS = {"qwen3_30b_a3b": "Qwen/Qwen3-30B-A3B"}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A step as measured and as predicted, and where both are known its memory."""

    group: str
    strategy: str
    measured_s: float
    predicted_s: float
    shipped_s: float = 0.0
    """As the shipped constants of the host have it."""
    memory_gib: float = 0.0
    predicted_gib: float = 0.0
    job: tuple[str, ...] = ()
    """What it has in common with the steps that it is ranked among: all but its layout."""
    samples: float = 1.0
    """Of a step, by which rivals are compared."""

    @property
    def error(self) -> float:
        """Return predicted / measured - 1."""
        return self.predicted_s / self.measured_s - 1.0


def degrees(strategy: str) -> dict[str, int]:
    """Return the numbers of a strategy: ``TP2 DP4 PP1``."""
    return {name: int(number) for name, number in re.findall(r"([A-Z]+)(\d+)", strategy)}


def _cells(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8") as lines:
        yield from (cells for cells in csv.DictReader(lines) if not cells["flag"])


def _fabric(device: str, nic: str, gpus_per_node: int = 8) -> Fabric:
    link = own_link(devices().device(device))
    return Fabric(inside=link, between=parse_nic(nic), gpus_per_node=gpus_per_node)


def _traced(build: Callable[[], TrainingStep], precision: str) -> WorkCurve:
    return measure_work(build, Numerics(precision, gathered=True))  # type: ignore[arg-type]


class _CrossEntropy(torch.autograd.Function):
    """Megatron-LM's cross entropy in its own kernels, in float32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        """Return a loss for each token; keeps what the logits' softmax is."""
        shifted = logits.float()
        shifted = shifted - shifted.max(-1, keepdim=True)[0]
        chosen = shifted.gather(-1, labels[:, None])[:, 0]
        shares = shifted.exp()
        total = shares.sum(-1, keepdim=True)
        ctx.save_for_backward(shares / total, labels)
        return total[:, 0].log() - chosen

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits."""
        shares, labels = ctx.saved_tensors
        shares = shares.scatter_add(-1, labels[:, None], -torch.ones_like(shares[:, :1]))
        return (shares * gradients[0][:, None]).half(), None


def _token_loss(output: Any) -> Tensor:
    logits = output.logits.flatten(0, 1)
    labels = torch.zeros(logits.shape[0], dtype=torch.long, device=logits.device)
    return _CrossEntropy.apply(logits, labels).mean()


@cache
def _gpt(length: int, layers: int, width: int, heads: int) -> WorkCurve:
    """Return the work of a GPT with attention and loss of several kernels each, as they were before 2023."""

    def build() -> TrainingStep:
        step = gpt(length, layers, width, heads, "eager", vocabulary=50304, activation="gelu")
        return replace(step, loss=_token_loss)

    return _traced(build, precision="fp16")


@cache
def _llama(length: int, layers: int, name: str, precision: str = "bf16") -> WorkCurve:
    width, heads, key_heads, hidden, _ = LLAMAS[name]
    shape = {
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": 128256,
    }
    return _traced(lambda: llama(1, length, **shape), precision=precision)


@cache
def _on(curve: WorkCurve, layout: ParallelDegrees) -> ParallelCurve:
    return ParallelCurve.of(curve, layout, 1)


def model_of(device: str, host: float = 1.0) -> CostModel:
    """Return the cost model of a device whose host takes ``host`` times as long to issue an op."""
    model = cost_model(devices().device(device), calibration())
    return replace(model, constants=replace(model.constants, issue_s=host * model.constants.issue_s))


_TIMED: dict[tuple[object, ...], object] = {}


def step_s(curve: WorkCurve, device: str, host: float, setting: Setting, replicas: int, batch: int) -> float:
    """Return the predicted seconds of a step without checkpoints; its passes are timed once for all numbers of them."""
    own, layout = _on(curve, setting.layout), setting.layout
    place = Placement(
        num_nodes=-(-replicas * layout.gpus // setting.fabric.gpus_per_node), num_replicas=replicas, gpus=layout.gpus
    )
    model = model_of(device, host)
    if setting.checkpointing != "none":
        return predict(replace(own, passes=setting.accumulation), model, setting, [batch], [place])[0].step_time_s
    key = (id(own), device, host, batch)
    if key not in _TIMED:
        graph = own.timed(batch, model, setting)
        _TIMED[key] = (graph, program_of(graph))
    graph, program = _TIMED[key]  # type: ignore[misc]
    return replace(own, passes=setting.accumulation).step_time(graph, program, model, setting, place, batch).step_s


def vtrain(data: Path) -> Iterator[Pair]:
    """Yield Megatron-LM's GPTs on DGX A100 with four cards of 200 Gbit/s a node.

    On several nodes activations are computed again, on one they are not: without, the larger models would not fit; with it,
    the small ones would reach more than this GPU does.
    """
    device = "A100-80GB"
    for cells in _cells(data / "truth" / "vtrain_megatron_a100.csv"):
        width, layers, heads = map(int, re.findall(r"[hLa](\d+)", cells["model"]))
        parts, one = degrees(cells["strategy"]), int(cells["nodes"]) == 1
        setting = Setting(
            fabric=_fabric(device, "4x200Gbit"),
            optimizer="adam",
            accumulation=int(float(cells["grad_accum"])),
            checkpointing="none" if one else "full",
            layout=ParallelDegrees(tensor=parts["TP"], pipeline=parts["PP"]),
        )
        curve = _gpt(int(cells["seq_len_or_img"]), layers, width, heads)
        seconds = [
            step_s(curve, device, host, setting, parts["DP"], int(cells["batch_per_gpu"]))
            for host in (MEGATRON_HOST, 1.0)
        ]
        yield Pair(
            group="Megatron-LM, A100, one node" if one else "Megatron-LM, A100, several nodes",
            strategy=f"TP{parts['TP']} PP{parts['PP']}" if one else "all",
            measured_s=float(cells["step_time_ms"]) / 1e3,
            predicted_s=seconds[0],
            shipped_s=seconds[1],
            job=tuple(cells[name] for name in ("model", "gpus", "nodes", "seq_len_or_img", "global_batch")),
        )


def simumax(data: Path) -> Iterator[Pair]:
    """Yield Llama cut to some blocks on 8 B200, Megatron-LM with sequence parallelism; no context parallelism."""
    for cells in _cells(data / "truth" / "simumax_b200_time_and_memory.csv"):
        parts, named = degrees(cells["strategy"]), re.fullmatch(r"(\S+) cut to (\d+) layers", cells["model"])
        if "CP" in parts or "EP" in parts or named is None or named[1] not in LLAMAS:
            continue
        setting = Setting(
            fabric=_fabric("B200", "8x400Gbit"),
            optimizer="adamw",
            accumulation=int(cells["grad_accum"]),
            sharding="zero1",
            layout=ParallelDegrees(tensor=parts["TP"], pipeline=parts["PP"], sequence=parts["TP"] > 1),
        )
        curve = replace(
            _on(_llama(int(cells["seq_len_or_img"]), int(named[2]), named[1]), setting.layout),
            passes=setting.accumulation,
        )
        place = Placement(num_nodes=1, num_replicas=parts["DP"], gpus=setting.layout.gpus)
        row = predict(curve, model_of("B200"), setting, [int(cells["batch_per_gpu"])], [place])[0]
        yield Pair(
            group=f"{named[1]}, 8 B200",
            strategy=f"TP{parts['TP']} PP{parts['PP']}",
            measured_s=float(cells["step_time_ms"]) / 1e3,
            predicted_s=row.step_time_s,
            job=tuple(cells[name] for name in ("model", "seq_len_or_img", "grad_accum")),
            samples=float(cells["global_batch"]),
            memory_gib=float(cells["memory_gib"]),
            predicted_gib=row.peak_memory_bytes / 2**30,
        )


# NeMo's precisions of weights' products, as torch names their types; casts are those of float8 for both.
PRODUCTS = {"FP8": "float8", "FP8-CS": "float8", "MXFP8": "float8", "FP8-MX": "float8", "NVFP4": "float4"}


@cache
def _narrow_llama(length: int, layers: int, name: str, dtype: str) -> WorkCurve:
    """Return the work of a Llama with its linear layers in float8, or in float4: products at that rate."""
    if dtype == "float8":
        return _llama(length, layers, name, "fp8")
    curve = _narrow_llama(length, layers, name, "float8")
    graph = curve.traced.graph
    names = tuple(dtype if each.startswith("float8") else each for each in graph.dtype)
    traced = replace(curve.traced, graph=replace(graph, dtype=names))
    return replace(curve, traced=traced, under_fsdp=None, _lifetimes={}, _under_fsdp=[])


@cache
def _experts(length: int, name: str) -> WorkCurve:
    """Return the work of a published model with experts, its linear layers outside them in float8."""
    return _traced(lambda: transformers_step(name, length), precision="fp8")


def nemo(data: Path) -> Iterator[Pair]:
    """Yield Llama-3-70B in NeMo on 64 GPUs or fewer, in eight and four bits, and a Qwen3 with experts; no LoRA.

    Nodes of 8 H100 with a card of 400 Gbit/s each, and racks of 72 GB200 or GB300.
    """
    for cells in _cells(data / "truth" / "nemo_performance.csv"):
        parts, name = degrees(cells["strategy"]), cells["model"].lower().replace("llama3_", "llama3-")
        if name not in (*LLAMAS, *EXPERTS) or "LoRA" in cells["note"]:
            continue
        if cells["precision"] not in PRODUCTS:
            continue
        device = cells["gpu"].removeprefix("DGX-")
        virtual = degrees(cells["strategy"]).get("VP", 1)
        gpus, fsdp = int(float(cells["gpus"])), parts.get("FSDP", 0) > 1
        layout = ParallelDegrees(
            tensor=parts["TP"],
            pipeline=parts["PP"],
            sequence=parts["TP"] > 1,
            virtual=virtual if parts["PP"] > 1 else 1,
            overlapped=parts["TP"] > 1,  # as its recipes do
            expert=parts.get("EP", 1),
        )
        replicas, batch = gpus // layout.gpus, int(float(cells["batch_per_gpu"]))
        setting = Setting(
            fabric=_fabric(device, "8x400Gbit") if device == "H100" else _fabric(device, "72x400Gbit", 72),
            optimizer="adamw",
            accumulation=int(float(cells["global_batch"])) // (replicas * batch),
            sharding="fsdp" if fsdp else "zero1",
            layout=layout,
            compile=True,  # tuned recipes: Transformer Engine's fused kernels
        )
        length, kept = (
            int(float(cells["seq_len_or_img"])),
            cells["precision"].replace("-CS", "").replace("FP8-MX", "MXFP8"),
        )
        if name in EXPERTS:
            curve, ways = (
                _experts(length, EXPERTS[name]),
                f"EP {layout.expert}" + (", PP" if layout.pipeline > 1 else ""),
            )
        else:
            curve = _narrow_llama(length, LLAMAS[name][-1], name, PRODUCTS[cells["precision"]])
            ways = "FSDP" if fsdp else "TP, PP"
        yield Pair(
            group="Qwen3-30B-A3B, NeMo" if name in EXPERTS else "Llama-3-70B, NeMo",
            strategy=f"{device} {kept}, {ways}",
            measured_s=float(cells["step_time_ms"]) / 1e3,
            predicted_s=step_s(curve, device, 1.0, setting, replicas, batch),
            # NeMo's steps in float8 and MXFP8 differ by a few per cent where their layouts are alike.
            job=(device, str(gpus), cells["seq_len_or_img"], PRODUCTS[cells["precision"]]),
            samples=float(cells["global_batch"]),
        )


def torchtitan() -> Iterator[Pair]:
    """Yield torchtitan's two schedules of Llama-3.1-405B on 512 H100, cut to 64 of its blocks.

    FSDP 8, TP 8, PP 8; 32 sequences of a replica in 8 passes, as torchtitan does unless it is told otherwise.
    """
    curve = _narrow_llama(8192, 64, "llama3-405b", "float8")
    for virtual, tokens_per_s in ((1, 100.0), (2, 128.0)):
        layout = ParallelDegrees(tensor=8, pipeline=8, sequence=True, virtual=virtual)
        setting = Setting(
            fabric=_fabric("H100", "8x400Gbit"),
            optimizer="adamw",
            accumulation=8,
            sharding="zero2",  # with a pipeline torchtitan keeps what it has gathered
            checkpointing="full",
            layout=layout,
            compile=True,
        )
        yield Pair(
            group="Llama-3.1-405B, torchtitan, 512 H100",
            strategy="interleaved" if virtual > 1 else "1F1B",
            measured_s=32 * 8192 / (layout.gpus * tokens_per_s),
            predicted_s=step_s(curve, "H100", 1.0, setting, 8, 4),
            job=("llama3-405b",),
        )


# Tokens per second of a GPU with torch's tensor parallelism, then with its asynchronous one: (model, replicas, samples of a
# pass, checkpointing) -> by type of the products. FSDP between nodes, TP 8 within them.
ASYNCHRONOUS = {
    ("llama3-70b", 32, 16, "full"): {"bf16": (597.3, 652.4), "float8": (809.8, 942.4)},
    ("llama3-8b", 8, 12, "selective"): {"bf16": (4378.0, 4809.4), "float8": (5078.1, 5570.1)},
    ("llama3-405b", 16, 2, "full"): {"float8": (177.0, 185.0)},
}


def asynchronous() -> str:
    """Return the table of torchtitan's gains by asynchronous tensor parallelism, as measured and as predicted."""
    lines = ["| asynchronous tensor parallelism | gain measured | gain predicted |", "|---|---:|---:|"]
    model = cost_model(device_of(META), calibration())
    for (name, replicas, batch, checkpointing), by_type in ASYNCHRONOUS.items():
        for dtype, (plain, overlapped) in by_type.items():
            curve = (
                _narrow_llama(8192, LLAMAS[name][-1], name, dtype)
                if dtype != "bf16"
                else _llama(8192, LLAMAS[name][-1], name)
            )
            steps_s = []
            for is_overlapped in (False, True):
                layout = ParallelDegrees(tensor=8, sequence=True, overlapped=is_overlapped)
                setting = Setting(
                    fabric=_fabric("H100", "8x400Gbit"),
                    optimizer="adamw",
                    sharding="fsdp",
                    checkpointing=checkpointing,
                    layout=layout,
                    compile=True,
                )
                place = Placement(num_nodes=replicas, num_replicas=replicas, gpus=8)
                [row] = predict(ParallelCurve.of(curve, layout, 1), model, setting, [batch], [place])
                steps_s.append(row.step_time_s)
            lines.append(
                f"| {name}, {dtype}, {8 * replicas} H100 of 500 W | {overlapped / plain:.2f} | {steps_s[0] / steps_s[1]:.2f} |"
            )
    return "\n".join(lines)


def range_ratio() -> float:
    """Return how many times the lower end of a prediction's range the upper end is."""
    known = calibration().residuals["device"]
    return known.high / known.low


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """How layouts of the same jobs are ranked."""

    jobs: int
    apart: int
    """Pairs of layouts whose measured times differ by more than the predicted range spans."""
    right: int
    """Those that are predicted in the measured order."""
    lost: tuple[float, ...]
    """By job, the measured time of the layout that is predicted to be fastest over that of the fastest."""

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Ranking:
        """Return the ranking of the layouts of each job that has several; times are of a sample.

        Steps of a job that are predicted alike are repeated measurements of one layout, whose median counts.
        """
        jobs: dict[tuple[str, ...], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
        for pair in pairs:
            jobs[pair.job][pair.predicted_s / pair.samples].append(pair.measured_s / pair.samples)
        rivals = [
            sorted((predicted_s, float(np.median(each))) for predicted_s, each in layouts.items())
            for layouts in jobs.values()
            if len(layouts) > 1
        ]
        apart = [
            slower_s > faster_s  # as predicted
            for layouts in rivals
            for (_, faster_s), (_, slower_s) in combinations(layouts, 2)
            if max(faster_s, slower_s) > range_ratio() * min(faster_s, slower_s)
        ]
        lost = tuple(layouts[0][1] / min(measured_s for _, measured_s in layouts) for layouts in rivals)
        return cls(jobs=len(rivals), apart=len(apart), right=sum(apart), lost=lost)


def _summary(errors: np.ndarray) -> str:
    """Return how many rows, their median ratio, and the mean, worst tenth and largest error."""
    off = 100 * np.abs(errors)
    return (
        f"{len(errors)} | {np.median(1.0 + errors):.2f} | {off.mean():.1f} | {np.median(off):.1f} | "
        f"{np.quantile(off, 0.9):.0f} | {off.max():.0f}"
    )


def _rankings(pairs: Sequence[Pair]) -> str:
    """Return the table of how the layouts of each source's jobs are ranked."""
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[pair.group].append(pair)
    lines = ["| what | jobs | pairs apart | ranked right | pick is slower by, median | worst |", f"|---{'|---:' * 5}|"]
    for group, each in groups.items():
        ranking = Ranking.of(each)
        if ranking.jobs:
            lost = 100 * (np.array(ranking.lost) - 1)
            lines.append(
                f"| {group} | {ranking.jobs} | {ranking.apart} | {ranking.right} | {np.median(lost):.0f} % | "
                f"{lost.max():.0f} % |"
            )
    return "\n".join(lines)


def _errors(pairs: Sequence[Pair]) -> np.ndarray:
    return np.array([pair.error for pair in pairs])


def _table(pairs: Sequence[Pair]) -> str:
    """Return the rows of all pairs, by source and by strategy, and those of memory."""
    groups: dict[str, dict[str, list[Pair]]] = defaultdict(lambda: defaultdict(list))
    for pair in pairs:
        groups[pair.group][pair.strategy].append(pair)
    lines = ["| what | rows | ratio | mean error, % | median | worst tenth | largest |", f"|---{'|---:' * 6}|"]
    for group, strategies in groups.items():
        if len(strategies) > 1:
            lines += [f"| {group}, {name} | {_summary(_errors(each))} |" for name, each in sorted(strategies.items())]
        every = [pair for each in strategies.values() for pair in each]
        lines.append(f"| **{group}, all** | {_summary(_errors(every))} |")
        if every[0].memory_gib:
            memory = np.array([pair.predicted_gib / pair.memory_gib - 1.0 for pair in every])
            lines.append(f"| **{group}, peak memory** | {_summary(memory)} |")
    return "\n".join(lines)


def section(data: Path) -> str:
    """Return the section of the page, from the measured rows below ``data``."""
    megatron, llama, narrow = list(vtrain(data)), list(simumax(data)), list(nemo(data))
    titan = list(torchtitan())
    shipped = np.array([pair.shipped_s / pair.measured_s - 1.0 for pair in megatron if "one node" in pair.group])
    parts = [
        TITLE,
        f"<!-- run: parse (the measured rows) -->\n```sh\n{COMMAND}\n```",
        "Steps of `predict --tensor-parallel`, `--pipeline-parallel`, `--expert-parallel` and `--replicas`.",
        _table([*megatron, *llama, *narrow]),
        "- Megatron-LM: vTrain's GPTs of 0.2 to 18 x 10^9 parameters on 2 to 256 A100. Half of the steps on one node wait for "
        f"the host, which takes {MEGATRON_HOST:g} times as long for an op as the shipped constants say (read off these rows). "
        f"Without it the mean error there is {100 * np.abs(shipped).mean():.0f} % (ratio "
        f"{np.median(1 + shipped):.2f}); `ddltool calibrate` finds a host's own. vTrain's error, with every kernel measured on "
        "that machine, is 8.4 % on one node and 14.7 % on several.\n"
        "- Llama: SimuMax's rows without context parallelism; transformers' Llama, eager, for Transformer Engine's. SimuMax's "
        "error, with operators measured there, is 5.6 % in time and 1.4 % in memory.\n"
        "- NeMo: tuned recipes, compiled transformers' Llama for their fused kernels, in eight and four bits, which no "
        "constant was fitted to; MXFP8 as FP8, NVFP4 as FP8 with products at the datasheet's rate of four bits; a tensor "
        "group's exchanges are asynchronous, as NVIDIA's recipes have them. Qwen3-30B-A3B is transformers', with "
        "`--expert-parallel`; its rows are of several releases of NeMo.",
        asynchronous(),
        "torchtitan measured these ([8B and 70B]"
        "(https://github.com/pytorch/torchtitan/blob/main/benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md), "
        "405B in 2024); one constant, how much of what could be hidden is, was read off the first four.",
        "Layouts of one job, two by two: of those whose measured times are further apart than the range of a prediction spans "
        f"({range_ratio():.2f} times), so many are ranked right, and so much slower than the fastest is the one that is "
        "predicted to be fastest.",
        _rankings([*megatron, *llama, *narrow, *titan]),
        f"- torchtitan: interleaved stages are {titan[0].measured_s / titan[1].measured_s:.2f} times as fast as 1F1B, "
        f"{titan[0].predicted_s / titan[1].predicted_s:.2f} as predicted "
        "([table 5](https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md)).\n"
        "- Ranked wrong are GPTs of width 2,048 on 8 GPUs: in each of these pairs a step of TP 4 with two samples waits for "
        "the host as predicted, which is 26 to 28 % too long.",
        CHOICES,
    ]
    return "\n\n".join(parts) + "\n\n"


def write_section(data: Path) -> None:
    """Write the section on parallel steps."""
    put_section(TITLE, section(data))


def main() -> None:
    """Write the section from the measured rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds truth")
    write_section(parser.parse_args().data)


if __name__ == "__main__":
    main()
