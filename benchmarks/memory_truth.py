"""Predicted against measured memory: the section of docs/truth.md on it.

    python benchmarks/memory_truth.py --data ../shared/data

A minute of tracing; it changes that section alone. Start at :func:`section`.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch._ops import OpOverload
from torch.fx import Node
from truth_models import Trace, build, llama

from ddltool.analyzers.step.costs.compiling import compiled_lifetimes
from ddltool.analyzers.step.costs.held import Held
from ddltool.analyzers.step.costs.memory import ACTIVATION, GRADIENT, Recomputation, TensorLifetimes
from ddltool.analyzers.step.costs.predict import CONTEXT_BYTES, memory_range
from ddltool.analyzers.step.costs.saving import SavedOps
from ddltool.analyzers.step.costs.sharding import Kind, Sharding
from ddltool.analyzers.step.costs.traced_lifetimes import lifetimes_of
from ddltool.analyzers.step.costs.work import WorkCurve, measure_work
from ddltool.analyzers.step.recording.torch_costs import value_of
from ddltool.analyzers.step.tracing.numerics import Numerics
from ddltool.analyzers.step.tracing.torch_adapter import trace_step
from ddltool.artifacts import write_text
from ddltool.precision import PrecisionName

ROOT = Path(__file__).resolve().parents[1]
GIB = 2.0**30
COMMAND = "python benchmarks/memory_truth.py --data ../shared/data"
HEADING = "## Memory"
# Models and optimizers of Lucid's rows, as its scripts have them (github.com/S-Lab-System-Group/Lucid, workloads/).
LUCID = {
    "BERT (SQuAD)": ("bert-base@384", "adam"),
    "EfficientNet (CIFAR-10)": ("cifar-efficientnet-b0@32", "momentum"),
    "LSTM (Wikitext2)": ("word-lstm-log-softmax@35", "sgd"),
    "MobileNetV3 (ImageNet)": ("timm:mobilenetv3_small_100@224", "sgd"),
    "ResNet18 (CIFAR-10)": ("cifar-resnet18@32", "momentum"),
    "ResNet50 (ImageNet)": ("timm:resnet50@224", "sgd"),
    "VGG (CIFAR-10)": ("cifar-vgg11@32", "momentum"),
}
# Until torch 1.11 autograd kept the inputs of these for their backward ops, which read the output alone (pytorch 63027, 64000).
_KEPT_INPUTS = {
    "_softmax_backward_data": "_softmax",
    "_log_softmax_backward_data": "_log_softmax",
    "threshold_backward": "relu",
}
# Lambda's scripts run NVIDIA's examples at batches that fill the GPU: nvidia-smi's figure bounds the tensors from above.
LAMBDA = {
    "PyTorch_resnet50_FP32": ("timm:resnet50@224", "fp32", "momentum"),
    "PyTorch_resnet50_AMP": ("timm:resnet50@224", "fp16", "momentum"),
    "PyTorch_bert_base_squad_FP32": ("bert-base@384", "fp32", "adam"),
    "PyTorch_bert_large_squad_FP32": ("bert-large@384", "fp32", "adam"),
}
_8B = {
    **{"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8},
}

_TITAN: dict[str, PrecisionName] = {"bf16": "bf16", "float8": "fp8"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One measured peak, in bytes, and what is predicted for it."""

    source: str
    what: str
    measured: float
    predicted: float
    least: float
    most: float
    """What ``predict`` gives as ``memory_low_bytes`` and ``memory_high_bytes``."""

    @property
    def error(self) -> float:
        """Return predicted / measured - 1."""
        return self.predicted / self.measured - 1


def every_second(lifetimes: TensorLifetimes) -> SavedOps:
    """Return torchtitan's selective checkpointing: attention and every second matrix product are kept."""
    nodes = list(lifetimes.traced.program.nodes)
    saved_ops = {}
    for block in lifetimes.blocks:
        products = [place for place, node in enumerate(block.products) if "mm" in str(nodes[node].target)]
        skipped = set(products[1::2])
        saved_ops[block.name] = tuple(place for place in range(len(block.products)) if place not in skipped)
    return saved_ops


def torchtitan(path: Path) -> Iterator[Row]:
    """Yield the rows of Llama-3.1-8B under FSDP2 on 8 H100: what torch's allocator reserved at most.

    Context parallel groups split the sequence, not the state.
    """
    known_lifetimes: dict[tuple[int, int, str, bool], TensorLifetimes] = {}
    for cells in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
        parallel = int(cells["strategy"].rpartition("CP ")[2]) if "CP " in cells["strategy"] else 1
        shape = int(cells["batch_per_gpu"]), int(float(cells["seq_len_or_img"])) // parallel
        is_compiled, numerics = float(cells["compiled"]) > 0, Numerics(_TITAN[cells["precision"]], gathered=True)
        key = (*shape, numerics.precision)
        if (*key, False) not in known_lifetimes:
            eager = lifetimes_of(trace_step(partial(llama, *shape, **_8B), mode="training", numerics=numerics))
            known_lifetimes |= {(*key, False): eager, (*key, True): compiled_lifetimes(eager, blocks_only=True)}
        lifetimes = known_lifetimes[*key, is_compiled]
        saved_ops = lifetimes.every_block("full") if cells["act_ckpt"] == "full" else every_second(lifetimes)
        sharding = Sharding(kind="fsdp", shard=int(cells["gpus"]))
        held = lifetimes.held(Recomputation(lifetimes, saved_ops), sharding, "adamw", lifetimes.sizes())
        tensors, reserved = held.peak().total_bytes, float(held.reserved_bytes() or 0)
        least, most = memory_range(tensors, reserved, sharding, int(cells["gpus"]), 0.0)
        yield Row(
            source="torchtitan", measured=float(cells["memory_gib"]) * GIB, least=least, most=most,
            what=f"Llama-3.1-8B, {cells['precision']}, {cells['strategy']}, {cells['act_ckpt']}, {shape[0]} x {shape[1]:,}",
            predicted=reserved,
        )  # fmt: skip


def as_before_1_11(lifetimes: TensorLifetimes) -> TensorLifetimes:
    """Return what torch before 1.11 held: inputs of softmax and of ReLU until their backward ops read the outputs."""
    nodes = list(lifetimes.traced.program.nodes)
    place, free, alloc = {node: at for at, node in enumerate(nodes)}, lifetimes.free.copy(), lifetimes.alloc.copy()
    for at, node in enumerate(nodes[lifetimes.backward :], start=lifetimes.backward):
        if (name := _op(node)) in _KEPT_INPUTS:
            forward = _maker(node.args[1])
            if _op(forward) == _KEPT_INPUTS[name]:
                made = (lifetimes.alloc == place[_maker(forward.args[0])]) & (lifetimes.role == ACTIVATION)
                free[made] = np.maximum(free[made], at)
    alloc[lifetimes.role == GRADIENT] = 0  # zero_grad fills them with zeros
    return replace(lifetimes, free=free, alloc=alloc)


def _op(node: Node) -> str:
    return node.target.overloadpacket.__name__ if isinstance(node.target, OpOverload) else ""


def _maker(node: Node) -> Node:
    """Return the node that made the storage of a node's tensor."""
    while node.args and isinstance(node.args[0], Node) and _storage(node.args[0]) == _storage(node):
        node = node.args[0]
    return node


def _storage(node: Node) -> object:
    value = value_of(node)
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


@cache
def _curve(model: str, precision: str) -> WorkCurve:
    return measure_work(lambda: build(Trace(model, precision)), Numerics(precision))  # type: ignore[arg-type]


def _held(model: str, precision: str, batch: int, kind: Kind, optimizer: str) -> Held:
    curve = _curve(model, precision)
    lifetimes = as_before_1_11(curve.lifetimes(batch))
    return lifetimes.held(
        Recomputation(lifetimes, {}), Sharding(kind=kind), optimizer, lifetimes.sizes(curve.scaled(batch))
    )


def lucid(path: Path) -> Iterator[Row]:
    """Yield the rows of the models above: what nvidia-smi showed, with a context that holds all kernels."""
    for cells in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
        if cells["model"] in LUCID:
            model, optimizer = LUCID[cells["model"]]
            precision, batch = "fp16" if cells["precision"] == "amp" else "fp32", int(cells["batch_per_gpu"])
            held = _held(model, precision, batch, "none", optimizer)
            tensors, reserved = held.peak().total_bytes, float(held.reserved_bytes() or 0)
            workspace = _curve(model, precision).workspace_bytes(batch)
            least, most = memory_range(tensors, reserved, Sharding(kind="none"), 1, workspace)
            yield Row(
                source="Lucid", what=f"{cells['model']}, {precision}, batch {batch}", least=least,
                measured=float(cells["memory_gib"]) * GIB, predicted=reserved + CONTEXT_BYTES, most=most,
            )  # fmt: skip


def bounds(path: Path) -> list[float]:
    """Return tensors / nvidia-smi's figure of Lambda's rows: one that is above 1 would be wrong."""
    made = []
    for cells in csv.DictReader(path.read_text(encoding="utf-8").splitlines()):
        if cells["task"] in LAMBDA and cells["batch_arg"]:
            model, precision, optimizer = LAMBDA[cells["task"]]
            kind: Kind = "ddp" if int(cells["gpus"]) > 1 else "none"
            held = _held(model, precision, int(float(cells["batch_arg"])), kind, optimizer)
            made.append(held.peak().total_bytes / (float(cells["peak_gpu_memory_mib"]) * 2**20))
    return made


def judged(data: Path) -> list[Row]:
    """Return the rows that are judged."""
    truth = data / "truth"
    return [*torchtitan(truth / "torchtitan_llama3.csv"), *lucid(truth / "lucid_single_gpu.csv")]


def table(rows: Sequence[Row]) -> list[str]:
    """Return a line per model: of how many rows, their measured peaks and their errors, least and most."""
    lines = ["| source | model | rows | measured, GiB | predicted, GiB | error, % |", "|---|---|---:|---:|---:|---:|"]
    models: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        models.setdefault((row.source, row.what.partition(",")[0]), []).append(row)
    for (source, model), own in models.items():
        cells = [_span([f"{getattr(row, name) / GIB:.1f}" for row in own]) for name in ("measured", "predicted")]
        errors = _span([f"{100 * row.error:+.0f}" for row in own])
        lines.append(f"| {source} | {model} | {len(own)} | {' | '.join(cells)} | {errors} |")
    return lines


def _span(shown: Sequence[str]) -> str:
    least, most = (choose(shown, key=float) for choose in (min, max))
    return least if least == most else f"{least} to {most}"


def section(data: Path) -> str:
    """Return the page's section on memory."""
    truth = data / "truth"
    rows = judged(data)
    ratios = bounds(truth / "lambda_peak_memory.csv")
    errors = [abs(row.error) for row in rows]
    far = [row for row in rows if abs(row.error) > 0.2]
    held = sum(row.least <= row.measured <= row.most for row in rows)
    parts = [
        HEADING,
        f"Peaks of {len(rows)} measured steps are predicted {100 * sum(errors) / len(errors):.1f} % off in the mean, "
        f"{100 * float(np.median(errors)):.1f} % in the median, {100 * max(errors):.0f} % at most; {held} lie between "
        "`memory_low_bytes` and `memory_high_bytes`. Predicted is what torch's allocator takes when it plays the step's "
        "tensors (`reserved_bytes`); the only fitted constant is the context of Lucid's CUDA, 2.0 GiB.",
        "<!-- run: parse (the measured rows) -->\n```sh\n" + COMMAND + "\n```",
        "\n".join(table(rows)),
        "- torchtitan: what torch's allocator reserved on 8 H100, in bfloat16 and float8.\n"
        "- Lucid: what nvidia-smi showed in the mean, with a torch before 1.11, whose autograd kept more.\n"
        f"- The {len(far)} rows that are more than 20 % off have 512 channels on small images and `cudnn.benchmark`, whose "
        "search seems to keep a workspace of 1.2 to 1.6 GiB; `memory_high_bytes` counts it.\n"
        f"- Lambda: {len(ratios)} runs that fill their GPU; the tensors predicted are "
        f"{100 * min(ratios):.0f} to {100 * max(ratios):.0f} % of it.",
    ]
    return "\n\n".join(parts)


def write_memory(data: Path) -> None:
    """Put the section into docs/truth.md, in place of the one that is there, or before the limits."""
    made, page = section(data), ROOT / "docs" / "truth.md"
    text = re.sub(rf"{HEADING}\n.*?(?=^## )", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    before, limits, rest = text.partition("## Limits\n")
    write_text(page, f"{before}{made}\n\n{limits}{rest}")


def main() -> None:
    """Write the section from the measured rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder that holds truth")
    write_memory(parser.parse_args().data)


if __name__ == "__main__":
    main()
