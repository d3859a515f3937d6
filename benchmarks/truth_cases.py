"""The measured rows that the cost model is fitted to and judged by, and what is left out and why. Start at :func:`read`.

Every source is read by a function of its own, which knows what the source ran: models, precision, layout, optimizer.
"""

from __future__ import annotations

import csv
import gzip
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from truth_models import Trace

from ddltool.analyzers.step.tracing.factories import imported

Cells = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measured step."""

    source: str
    model: str
    family: str
    """What is left out together in cross-validation: models of one architecture."""
    trace: Trace
    batch: int
    device: str
    """As the device table names it."""
    precision: str
    optimizer: str
    measured_s: float
    dated: bool = False
    """Whether its cuDNN, before 8.3, lacks kernels for grouped convolutions in channels_last."""
    params_m: float = 0.0
    """Millions of parameters as the source says; 0 where it does not."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where rows come from, and how they are taken."""

    title: str
    error: float
    """Expected relative error of a measurement and its prediction together."""
    weight: float
    """Of a (model, GPU) cell in the fit."""
    adds: bool = False
    """Whether its software adds unknown seconds to every step of a model, which are fitted and not shipped."""
    traffic: float = 1.0
    """Seconds per byte beside those of a training step, where a GPU with both tells."""
    cudnn: int = 8
    """Version of cuDNN, as far as :func:`demand_of` tells them apart."""
    attention: float = 1.0
    """Seconds of fused attention beside those of the kernels that torch has today."""
    remark: str = ""


SOURCES = {
    "timm": Source(
        title="timm's training benchmark", error=0.08, weight=1.0,
        remark="torch 1.10 to 1.12, eager attention; grouped convolutions in channels_last are judged as of cuDNN 8",
    ),
    "timm-inference": Source(
        title="timm's inference benchmark", error=0.1, weight=0.5, traffic=0.72, cudnn=9,
        remark="torch 2.4, fused attention, forward only, a sample; on the RTX 3090 its bytes take 0.72 of the time of "
        "those of training steps, and are taken so everywhere",
    ),
    "lambda": Source(
        title="Lambda's GPU benchmarks", error=0.12, weight=2.0,
        remark="NVIDIA's examples, TF32 where the GPU has it, eager attention, BERT wholly in float16",
    ),
    "neusight": Source(
        title="NeuSight's labels", error=0.08, weight=2.0,
        remark="float32 without TF32, eager attention, no update",
    ),
    "mpt": Source(
        title="LLM Foundry's MPT", error=0.12, weight=0.7, attention=1.6,
        remark="8 GPUs, bfloat16, torch 1.13, FlashAttention's kernel in Triton, 1.6 times as long as today's "
        "(read off the source's own long sequences; FlashAttention-2, arXiv 2307.08691, section 4.1, says 2); "
        "exposed collectives count as error",
    ),
    "lucid": Source(title="Lucid's profiles", error=0.15, weight=0.7, remark="one server with RTX 3090"),
    "gavel": Source(
        title="Gavel's throughputs", error=0.2, weight=0.5, adds=True,
        remark="torch 1.4 with its data loading",
    ),
    "sia": Source(
        title="Sia's profiles", error=0.2, weight=0.5, adds=True,
        remark="AdaptDL's instrumentation, one GPU",
    ),
}  # fmt: skip


@dataclass
class Truth:
    """Rows that are used, and how many of each source are not, by reason."""

    rows: list[Row] = field(default_factory=list)
    excluded: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))


def read(data: Path) -> Truth:
    """Return the measured rows below ``data`` (the folder that holds ``truth`` and ``sia-sosp23``)."""
    truth, made = Truth(), data / "truth"
    excluded = truth.excluded
    truth.rows += _timm(made / "timm_train_rtx3090.csv", excluded["timm"])
    truth.rows += _timm_inference(made / "timm_inference.csv.gz", excluded["timm-inference"])
    truth.rows += _lambda(made / "lambda_gpu_benchmarks.csv", excluded["lambda"])
    truth.rows += _neusight(made / "neusight_labels.csv", excluded["neusight"])
    truth.rows += _mpt(made / "llm_foundry_mpt.csv", excluded["mpt"])
    truth.rows += _lucid(made / "lucid_single_gpu.csv", excluded["lucid"])
    truth.rows += _gavel(made / "gavel_k80_p100_v100.csv", excluded["gavel"])
    truth.rows += _sia(data / "sia-sosp23" / "traces", excluded["sia"])
    return truth


def _cells(path: Path, excluded: Counter[str]) -> Iterator[Cells]:
    """Yield the rows of a file that are not flagged."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for cells in csv.DictReader(lines):
            if cells.get("flag"):
                excluded["flagged by whoever collected the rows"] += 1
            else:
                yield cells


def _number(cells: Cells, name: str) -> int:
    return int(float(cells[name]))


def _timm_family(name: str) -> str:
    """Return the file of timm that defines a model: whole files are left out together."""
    registry = imported("timm", "timm").models._registry
    return str(registry._model_entrypoints[name].__module__.rpartition(".")[2])


def _timm_model(name: str, size: int, excluded: Counter[str]) -> str | None:
    """Return the source of a timm model of an image size, None where today's timm does not have it."""
    timm = imported("timm", "timm")
    if not timm.is_model(name):
        excluded["no model of today's timm has that name"] += 1
        return None
    return f"timm:{name}@{size}"


def _timm(path: Path, excluded: Counter[str]) -> Iterator[Row]:
    for cells in _cells(path, excluded):
        name = cells["model"]
        if (model := _timm_model(name, _number(cells, "seq_len_or_img"), excluded)) is None:
            continue
        layout = "channels_last" in cells["note"]
        yield Row(
            source="timm", model=name, family=_timm_family(name), trace=Trace(model, "fp16", layout),
            batch=_number(cells, "batch_per_gpu"), device="RTX3090", precision="fp16", optimizer="momentum",
            measured_s=float(cells["step_time_ms"]) / 1e3, params_m=float(cells["params_m"]),
            dated=layout and "torch 1.12" not in cells["note"],
        )  # fmt: skip


_SAMPLE = 100
_INFERENCE = {
    f"amp-{layout}-pt240-cu124-{gpu.lower()}": (gpu, layout == "nhwc")
    for layout in ("nchw", "nhwc")
    for gpu in ("RTX3090", "RTX4090")
}


def _timm_inference(path: Path, excluded: Counter[str]) -> Iterator[Row]:
    """Yield the rows of every so many models that ran in both layouts on both GPUs."""
    found: dict[tuple[str, int], dict[str, Cells]] = defaultdict(dict)
    for cells in _cells(path, excluded):
        if cells["file"] not in _INFERENCE:
            excluded["compiled, or an older torch"] += 1
            continue
        key = (cells["model"].partition(".")[0], _number(cells, "img"))
        if cells["file"] in found[key]:
            excluded["the same model with other weights"] += 1
        else:
            found[key][cells["file"]] = cells
    whole = sorted(key for key, each in found.items() if len(each) == len(_INFERENCE))
    chosen = set(whole[:: max(1, len(whole) // _SAMPLE)])
    for (name, size), each in sorted(found.items()):
        if (name, size) not in chosen:
            excluded["not in the sample of models"] += len(each)
            continue
        for file, cells in sorted(each.items()):
            if (model := _timm_model(name, size, excluded)) is None:
                continue
            device, layout = _INFERENCE[file]
            yield Row(
                source="timm-inference", model=name, family=_timm_family(name),
                trace=Trace(model, "fp16", layout, mode="inference", fused=True), batch=_number(cells, "batch"),
                device=device, precision="fp16", optimizer="none", measured_s=float(cells["step_ms"]) / 1e3,
                params_m=float(cells["params_m"]),
            )  # fmt: skip


_LAMBDA_GPUS = {
    "V100 16GB": "V100",
    "A100 40GB PCIe": "A100-PCIe",
    "A100 80GB PCIe": "A100-PCIe-80GB",
    "A100 80GB SXM4": "A100-80GB",
    "RTX 3090": "RTX3090",
    "RTX 6000 Ada": "RTX6000Ada",
    "H100 80GB SXM5": "H100",
    "B200 192GB SXM5": "B200",
}
# Model, family, optimizer, and how many of the reported units one sample of the batch is.
_LAMBDA_MODELS = {
    "ResNet-50 v1.5": ("timm:resnet50@224", "resnet", "momentum", 1),
    "BERT-base SQuAD": ("bert-base@384", "bert", "adam", 1),
    "BERT-large SQuAD": ("bert-large@384", "bert", "adam", 1),
    "SSD300-ResNet50": ("ssd300@300", "ssd", "momentum", 1),
    "GNMT": ("gnmt@26", "gnmt", "adam", 52),
}


def _lambda(path: Path, excluded: Counter[str]) -> Iterator[Row]:
    """Yield one row per model, precision, GPU and batch size: the median over hosts."""
    hosts: dict[tuple[str, str, str, int], list[float]] = defaultdict(list)
    for cells in _cells(path, excluded):
        if cells["gpus"] != "1":
            excluded["more than one GPU"] += 1
        elif cells["model"] not in _LAMBDA_MODELS:
            excluded["a model that is not rebuilt here"] += 1
        elif cells["gpu"] not in _LAMBDA_GPUS or not cells["batch_per_gpu"]:
            excluded["a GPU outside the device table, or no batch size"] += 1
        else:
            key = (cells["model"], cells["precision"], cells["gpu"], _number(cells, "batch_per_gpu"))
            hosts[key].append(float(cells["throughput"]))
    for (name, precision, gpu, batch), throughputs in hosts.items():
        model, family, optimizer, units = _LAMBDA_MODELS[name]
        half = precision == "amp"
        # NVIDIA's BERT keeps the whole model in half precision (apex, O2); the others are under autocast.
        format = ("fp16-pure" if family == "bert" else "fp16") if half else "fp32"
        yield Row(
            source="lambda", model=name, family=family, trace=Trace(model, format), batch=batch,
            device=_LAMBDA_GPUS[gpu], precision=format if half else "tf32", optimizer=optimizer,
            measured_s=batch * units / statistics.median(throughputs),
        )  # fmt: skip


_NEUSIGHT_GPUS = {
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA A100-PCIE-40GB": "A100-PCIe",
    "Tesla V100-PCIE-32GB": "V100-PCIe-32GB",
}
_NEUSIGHT_MODELS = {
    "bert_large": ("bert-large@512", "bert"),
    "gpt2_large": ("gpt2-large@1024", "gpt"),
    "gpt3_xl": ("gpt3-xl@2048", "gpt"),
    "gpt3_27": ("gpt3-2.7b@2048", "gpt"),
}


def _neusight(path: Path, excluded: Counter[str]) -> Iterator[Row]:
    for cells in _cells(path, excluded):
        if cells["gpus"] != "1" or cells["strategy"] != "single":
            excluded["more than one GPU"] += 1
        elif cells["compiled"] != "0":
            excluded["compiled"] += 1
        elif cells["model"] not in _NEUSIGHT_MODELS:
            excluded["a model that is not rebuilt here"] += 1
        else:
            model, family = _NEUSIGHT_MODELS[cells["model"]]
            mode = "inference" if "inference" in cells["note"] else "training"
            yield Row(
                source="neusight", model=cells["model"], family=family, trace=Trace(model, "fp32", mode=mode),
                batch=_number(cells, "batch_per_gpu"), device=_NEUSIGHT_GPUS[cells["gpu"]], precision="fp32",
                optimizer="none", measured_s=float(cells["step_time_ms"]) / 1e3,
            )  # fmt: skip


_LONGEST = 16384


def _mpt(path: Path, excluded: Counter[str]) -> Iterator[Row]:
    gpus = {"a100_40gb": "A100", "h100_80gb": "H100"}
    for cells in _cells(path, excluded):
        length = _number(cells, "seq_len_or_img")
        if cells["gpus"] != "8":
            excluded["more than one node"] += 1
        elif cells["act_ckpt"] != "0":
            excluded["activation checkpointing"] += 1
        elif "fp8" in cells["precision"]:
            excluded["float8"] += 1
        elif length > _LONGEST:
            excluded[f"sequences longer than {_LONGEST}"] += 1
        else:
            # FSDP gathers in bfloat16, so that no op casts a parameter; only PURE reduces in it, too.
            yield Row(
                source="mpt", model=cells["model"], family="gpt", device=gpus[cells["gpu"]],
                precision="bf16-pure" if "PURE" in cells["precision"] else "bf16",
                trace=Trace(f"{cells['model'].lower()}@{length}", "bf16-pure", fused=True),
                batch=_number(cells, "batch_per_gpu"), optimizer="adam",
                measured_s=float(cells["step_time_ms"]) / 1e3 / float(cells["grad_accum"]),
            )  # fmt: skip


# Where a GPU waits for more than a tenth of the time, the loader of data decides.
_BUSY = 90


def _lucid(path: Path, excluded: Counter[str]) -> Iterator[Row]:
    models = {
        "BERT (SQuAD)": ("bert-base@384", "bert"),
        "ResNet18 (CIFAR-10)": ("cifar-resnet18@32", "resnet"),
        "ResNet50 (ImageNet)": ("timm:resnet50@224", "resnet"),
    }
    for cells in _cells(path, excluded):
        if cells["model"] not in models:
            excluded["a model whose shape or data the source does not say"] += 1
            continue
        if float(cells["note"].removeprefix("gpu util ").partition(" ")[0]) < _BUSY:
            excluded[f"the GPU was busy for less than {_BUSY} % of the time"] += 1
            continue
        model, family = models[cells["model"]]
        precision, batch = "fp32" if "fp32" in cells["precision"] else "fp16", _number(cells, "batch_per_gpu")
        yield Row(
            source="lucid", model=cells["model"], family=family, trace=Trace(model, precision), batch=batch,
            device="RTX3090", precision=precision, optimizer="momentum", measured_s=batch / float(cells["throughput"]),
        )  # fmt: skip


def _gavel(path: Path, excluded: Counter[str]) -> Iterator[Row]:
    models = {
        "ResNet-18": ("cifar-resnet18@32", "resnet"),
        "ResNet-50": ("timm:resnet50@224", "resnet"),
        "LM": ("word-lstm@35", "lstm"),
        "Transformer": ("translator@32", "transformer"),
    }
    seen = set()
    for cells in _cells(path, excluded):
        key = (cells["model"], cells["gpu"], cells["batch_per_gpu"])
        if cells["gpus"] != "1" or key in seen:
            excluded["more than one GPU, or the same again"] += 1
        elif cells["model"] not in models:
            excluded["a model that is not rebuilt here"] += 1
        else:
            seen.add(key)
            model, family = models[cells["model"]]
            yield Row(
                source="gavel", model=cells["model"], family=family, trace=Trace(model, "fp32"),
                batch=_number(cells, "batch_per_gpu"), device=cells["gpu"], precision="fp32", optimizer="momentum",
                measured_s=float(cells["step_time_ms"]) / 1e3,
            )  # fmt: skip


def _sia(folder: Path, excluded: Counter[str]) -> Iterator[Row]:
    """Yield one row per application, GPU and batch size: the median over its steps."""
    gpus = {"aws": "T4", "rtx": "RTX2080Ti", "dgx-ext": "A100"}
    applications = {
        "bert": ("bert-base@384", "bert", "tf32", "adam"),
        "cifar10": ("cifar-resnet18@32", "resnet", "fp32", "momentum"),
        "imagenet": ("timm:resnet50@224", "resnet", "fp16", "momentum"),
    }
    for application, (model, family, precision, optimizer) in applications.items():
        for name, gpu in gpus.items():
            steps: dict[int, list[float]] = defaultdict(list)
            for cells in _cells(folder / application / f"placements-{name}.csv", excluded):
                if cells["placement"] == "1":
                    steps[_number(cells, "local_bsz")].append(float(cells["step_time"]))
                else:
                    excluded["more than one GPU"] += 1
            for batch, times in sorted(steps.items()):
                trace = Trace(model, "fp16" if precision == "fp16" else "fp32")
                yield Row(
                    source="sia", model=application, family=family, trace=trace, batch=batch, device=gpu,
                    precision=precision, optimizer=optimizer, measured_s=statistics.median(times),
                )  # fmt: skip
