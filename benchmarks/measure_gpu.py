"""Measure training steps on this machine's GPU, and what `ddltool predict` says of them.

    python benchmarks/measure_gpu.py measure rows.csv [--ops ops.csv.gz] [--device cuda] [--only gpt2]
    python benchmarks/measure_gpu.py compare rows.csv

Each case is a step that `predict` can be asked for: the same source, batch, precision, optimizer and layout. Steps are
timed by CUDA events after a warm-up, on random inputs; the median counts. Rows are appended as they are made, so that an
interrupted run is a shorter one. ``--ops``: the device time of one more step of each case by op, as torch's profiler has it.
``compare`` needs no GPU. `benchmarks/measured` holds what one H200 took on 2026-11-27. Start at :func:`main`.
"""

from __future__ import annotations

import argparse
import csv
import gc
import gzip
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddltool.analyzers.step.tracing.sources import resolve_step
from ddltool.analyzers.step.tracing.step import called
from ddltool.errors import DdlToolError, one_line
from ddltool.graph_results import PredictedRow, RecomputeFigures
from ddltool.runtime.hook.offloading import offload_modules
from ddltool.runtime.hook.sharding import checkpoint_modules
from ddltool.runtime.measuring.training import backward_and_update, prepared_module

WARM_UP = 4
# A spread of the middle half above this share of the median is told in the row.
STEADY = 0.1
GPU_MODELS = Path(__file__).with_name("gpu_models.py")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step, by the options of ``ddltool predict``."""

    source: str
    batch_size: int
    sequence_length: int | None = None
    precision: str = "bf16"
    optimizer: str = "adamw"
    attention: str | None = None
    checkpointing: str = "none"
    channels_last: bool = False
    compile: bool = False

    @property
    def full_source(self) -> str:
        """The source as ``predict`` takes it: a bare name is a factory of `gpu_models.py`."""
        return self.source if ":" in self.source else f"{GPU_MODELS}:{self.source}"

    @property
    def label(self) -> str:
        """The options in one line, without the folder of factories."""
        return " ".join(self.options()).replace(f"{GPU_MODELS}:", "")

    def options(self) -> list[str]:
        """Return the arguments of ``ddltool predict`` for this step, without its device."""
        made = [self.full_source, "--batch-sizes", str(self.batch_size), "--precision", self.precision]
        made += ["--optimizer", self.optimizer, "--checkpointing", self.checkpointing]
        for name in ("sequence_length", "attention"):
            if getattr(self, name) is not None:
                made += [f"--{name.replace('_', '-')}", str(getattr(self, name))]
        return made + [f"--{name.replace('_', '-')}" for name in ("channels_last", "compile") if getattr(self, name)]


def text(source: str, batch_size: int, sequence_length: int, *changes: dict[str, Any]) -> Iterator[Case]:
    """Yield a language model's step under bfloat16's autocast, and that step with each of some changes."""
    for change in ({}, *changes):
        given = {"batch_size": batch_size, "sequence_length": sequence_length, **change}
        yield Case(source=f"transformers:{source}", **given)


def images(source: str, batch_size: int, *changes: dict[str, Any]) -> Iterator[Case]:
    """Yield an image model's step under autocast in channels_last with momentum, and that step with each of some changes."""
    for change in ({}, *changes):
        given = {"batch_size": batch_size, "optimizer": "momentum", "channels_last": True, **change}
        yield Case(source=f"timm:{source}", **given)


OPTIMIZERS = tuple(
    {"precision": "bf16-pure", "optimizer": name} for name in ("sgd", "muon", "adafactor", "foreach-adamw")
)
HOST = tuple(
    {"precision": "bf16-pure", "checkpointing": way}
    for way in ("none:cpu", "full:cpu", "24GiB", "24GiB:cpu", "20GiB:cpu")
)
PURE, COMPILED, FULL = {"precision": "bf16-pure"}, {"compile": True}, {"checkpointing": "full"}
FLOAT, FIRST = {"precision": "fp32", "channels_last": False}, {"channels_last": False}
CASES: tuple[Case, ...] = (
    *text("gpt2", 16, 1024, PURE, {"attention": "eager", "batch_size": 8}, {"optimizer": "foreach-adamw"},
          {"precision": "tf32"}, {"precision": "fp32", "batch_size": 4}, {"batch_size": 2}, COMPILED),
    *text("meta-llama/Llama-3.2-1B", 4, 2048, PURE, FULL, PURE | FULL, {"batch_size": 1, **PURE}, PURE | COMPILED,
          *OPTIMIZERS, *HOST),
    *text("Qwen/Qwen2.5-0.5B", 8, 1024, PURE),
    *text("HuggingFaceTB/SmolLM2-135M", 16, 1024),
    *text("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 4, 2048, PURE),
    *text("meta-llama/Llama-3.2-3B", 2, 4096, PURE), *text("Qwen/Qwen3-0.6B", 8, 1024, PURE),
    *text("bert", 32, 512, {"precision": "fp16"}, {"precision": "fp32", "batch_size": 8},
          {"batch_size": 128, "sequence_length": 128}),
    *text("t5", 32, 512, COMPILED), *text("distilbert", 64, 256), *text("albert", 32, 256), *text("opt", 8, 1024),
    *text("bart", 8, 512), *text("deberta-v2", 8, 256), *text("whisper", 8, 128),
    *images("resnet50", 256, FIRST, FLOAT | {"batch_size": 128}, {"batch_size": 32}, {"precision": "fp16"}, COMPILED),
    *images("vit_base_patch16_224", 128, FLOAT | {"batch_size": 32}, {"optimizer": "adamw", "precision": "bf16-pure"},
            FIRST | COMPILED),
    *images("convnext_tiny", 128, FIRST), *images("swin_tiny_patch4_window7_224", 128),
    *images("efficientnet_b0", 256), *images("mobilenetv3_large_100", 512), *images("regnety_016", 256),
    *images("densenet121", 128), *images("resnext50_32x4d", 128), *images("vgg16", 128), *images("maxvit_tiny_tf_224", 64),
    *images("coatnet_0_rw_224", 64), *images("mixer_b16_224", 128), *images("resnet18", 512, FLOAT),
    Case(source="perceptron", batch_size=8192), Case(source="perceptron", batch_size=8192, precision="tf32"),
    Case(source="recurrent", batch_size=128, precision="fp32"), Case(source="encoder", batch_size=256),
    Case(source="unet", batch_size=16), Case(source="unet", batch_size=16, channels_last=True),
    *text("EleutherAI/pythia-410m", 8, 1024, PURE), *text("bigscience/bloom-560m", 4, 1024),
    *text("microsoft/phi-1_5", 2, 2048), *text("google/gemma-3-270m", 8, 1024), *text("google/gemma-3-1b-pt", 2, 2048, PURE),
    *text("allenai/OLMo-1B-hf", 2, 2048), *text("EleutherAI/gpt-neo-125m", 8, 1024),
    *text("answerdotai/ModernBERT-base", 16, 512), *text("FacebookAI/roberta-base", 32, 256),
    *text("google/electra-base-discriminator", 32, 256), *text("google/flan-t5-base", 8, 512),
    *text("microsoft/deberta-v3-base", 8, 256), *text("facebook/bart-base", 16, 512), *text("openai/whisper-base", 8, 128),
    *(Case(source=f"transformers:{name}", batch_size=size) for name, size in (
        ("facebook/dinov2-base", 64), ("openai/clip-vit-base-patch16", 64), ("facebook/wav2vec2-base-960h", 8),
        ("facebook/convnext-tiny-224", 64), ("google/siglip-base-patch16-224", 32))),
    *text("Qwen/Qwen3-1.7B", 1, 4096, PURE, PURE | FULL),
    *text("HuggingFaceTB/SmolLM2-1.7B", 1, 4096, PURE), *images("resnet101", 128), *images("efficientnetv2_rw_s", 64),
    *images("beit_base_patch16_224", 64), *images("xcit_tiny_12_p16_224", 128), *images("poolformer_s24", 128),
    *images("regnetx_032", 128), *images("inception_v3", 128), *images("hrnet_w18", 64), *images("repvgg_b1", 64),
    *images("ghostnet_100", 256), *images("res2net50_26w_4s", 128), *images("pvt_v2_b2", 64), *images("mvitv2_tiny", 64),
    *images("cait_s24_224", 64), *images("dm_nfnet_f0", 64), *images("twins_svt_small", 64), *images("davit_tiny", 64),
    *images("convmixer_768_32", 64), *images("deit3_small_patch16_224", 128), *images("wide_resnet50_2", 128),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a step took."""

    step_ms: float
    spread: float
    """The middle half of the steps over their median."""
    allocated_gib: float
    reserved_gib: float


class Running:
    """A case's step on a device, ready to run. Raises whatever its model raises."""

    def __init__(self, case: Case, device: torch.device, chosen: RecomputeFigures | None) -> None:
        with device:
            step = resolve_step(case.full_source, case.sequence_length, case.attention)
        step = step.at_batch(case.batch_size)
        inputs = tuple(_random(value, step.module) for value in step.inputs)
        module, inputs, self._computing = prepared_module(step.module, inputs, case.precision, device)
        if case.channels_last:
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            inputs = tuple(_last(value) for value in inputs)
        if case.checkpointing == "full":
            module.gradient_checkpointing_enable()  # type: ignore[operator]
        elif chosen is not None:
            checkpoint_modules(module, chosen.modules)
            offload_modules(module, chosen.on_host)
        self._backward, self._update = backward_and_update(module, case.optimizer, case.precision, device)
        run: Callable[..., Any] = torch.compile(module) if case.compile else module
        self._loss = lambda: step.loss(called(run, inputs, step.keywords))

    def __call__(self) -> None:
        """Run one step: forward, loss, backward, update."""
        with self._computing():
            loss = self._loss()
        self._backward(loss)
        self._update()


def predicted(case: Case, device_name: str) -> PredictedRow:
    """Return what ``predict`` says of a case on a device of this name. Raises DdlToolError where it says nothing."""
    import ddltool

    setting = asdict(case)
    del setting["source"]
    sizes = [setting.pop("batch_size")]
    return ddltool.predict(case.full_source, device=device_name, batch_sizes=sizes, **setting).rows[0]


def _random(value: Any, module: nn.Module) -> Any:
    """Return random numbers in place of an example's, which may be all alike: zeros need less power, and so less time."""
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        return torch.randn_like(value)
    tables = [part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)]
    is_tokens = value.dim() == 2 and value.dtype == torch.long and tables and bool((value > 1).any() or not value.any())
    return torch.randint_like(value, 2, max(tables)) if is_tokens and max(tables) > 2 else value


def _last(value: Any) -> Any:
    is_image = isinstance(value, Tensor) and value.dim() == 4
    return value.contiguous(memory_format=torch.channels_last) if is_image else value


def measure(once: Callable[[], None], device: torch.device, steps: int) -> Measured:
    """Return what a step takes: the time of each of ``steps``, after a warm-up, and the peaks of memory."""
    for _ in range(WARM_UP):
        once()
    if device.type != "cuda":
        times = [_timed(once) for _ in range(steps)]
        return Measured(step_ms=1e3 * statistics.median(times), spread=0.0, allocated_gib=0.0, reserved_gib=0.0)
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        once()
        mark.record()
    torch.cuda.synchronize()
    times = [first.elapsed_time(second) for first, second in pairwise(marks)]
    median, quarters = statistics.median(times), statistics.quantiles(times, n=4)
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return Measured(
        step_ms=median,
        spread=(quarters[2] - quarters[0]) / median,
        allocated_gib=allocated / 2**30,
        reserved_gib=reserved / 2**30,
    )


def _timed(run: Callable[[], None]) -> float:
    before = time.perf_counter()
    run()
    return time.perf_counter() - before


def device_time(once: Callable[[], None]) -> list[tuple[str, int, float]]:
    """Return (op, calls, microseconds of their kernels) of one step, the longest first. Kernels count to their innermost op."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        once()
        torch.cuda.synchronize()
    calls: Counter[str] = Counter()
    spent_us: Counter[str] = Counter()
    for event in profile.events() or ():
        if event.kernels:
            calls[event.name] += 1
            spent_us[event.name] += sum(kernel.duration for kernel in event.kernels)
    return [(name, calls[name], round(us, 1)) for name, us in spent_us.most_common()]


COLUMNS = [*(field.name for field in fields(Case)), *(field.name for field in fields(Measured)), "gpu", "torch"]


OPS = [*(field.name for field in fields(Case)), "op", "calls", "device_us"]


def append(path: Path, columns: Sequence[str], rows: Sequence[dict[str, object]]) -> None:
    """Append rows to a file, compressed where its name ends in .gz, which gets its header line first."""
    new = not path.exists() or path.stat().st_size == 0
    with (gzip.open if path.suffix == ".gz" else open)(path, "at", newline="", encoding="utf-8") as lines:  # type: ignore[operator]
        writer = csv.DictWriter(lines, columns)
        if new:
            writer.writeheader()
        writer.writerows(rows)


def demand_rows(path: Path) -> None:
    """Exit unless the file is new, or holds rows of this schema."""
    if path.exists() and path.stat().st_size:
        with path.open(encoding="utf-8") as lines:
            if next(csv.reader(lines)) != COLUMNS:
                sys.exit(f"error: {path}: holds something else; give a new file, or one that this script made")


def measure_all(given: argparse.Namespace) -> None:
    """Measure the cases that the options name, and append their rows."""
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("error: torch sees no GPU here: run this on a machine with one, or try the script with --device cpu")
    demand_rows(given.rows)
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    cases = [case for case in CASES if _is_meant(case.label, given.only)]
    # Asked before anything trains here: a process that has trained on a GPU can record no model.
    choices: dict[Case, RecomputeFigures | None] = {}
    for case in [each for each in cases if each.checkpointing not in ("none", "full")]:
        try:
            choices[case] = predicted(case, given.device_name or gpu).recompute
        except DdlToolError as error:
            print(f"{case.label}: not measured ({error})", flush=True)
            cases.remove(case)
    began = time.monotonic()
    for case in sorted(cases, key=lambda case: case.compile):  # what compiles takes longest to begin
        label = case.label
        if time.monotonic() - began > given.limit:
            continue
        once = None
        try:
            once = Running(case, device, choices.get(case))
            found = measure(once, device, given.steps)
            append(given.rows, COLUMNS, [{**asdict(case), **asdict(found), "gpu": gpu, "torch": torch.__version__}])
            if given.ops:
                parts = [dict(zip(OPS[-3:], part, strict=True)) for part in device_time(once)]
                append(given.ops, OPS, [{**asdict(case), **part} for part in parts])
        except Exception as error:  # a model may fail in any way; the others are measured all the same
            print(f"{label}: not measured ({one_line(str(error))[:120]})", flush=True)
            continue
        finally:
            once = None
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        unsteady = " (unsteady)" if found.spread > STEADY else ""
        print(f"{label}: {found.step_ms:.2f} ms{unsteady}, {found.allocated_gib:.2f} GiB", flush=True)


def _is_meant(label: str, only: str | None) -> bool:
    return only is None or any(each in label for each in only.split(","))


def case_of(row: dict[str, str]) -> Case:
    """Return the case of a row of a file."""
    return Case(
        source=row["source"],
        batch_size=int(row["batch_size"]),
        sequence_length=int(row["sequence_length"]) if row["sequence_length"] else None,
        precision=row["precision"],
        optimizer=row["optimizer"],
        attention=row["attention"] or None,
        checkpointing=row["checkpointing"],
        channels_last=row["channels_last"] == "True",
        compile=row["compile"] == "True",
    )


def compare(given: argparse.Namespace) -> None:
    """Print each measured step beside its prediction: time, whether the range holds it, and the memory of its tensors."""
    with given.rows.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    ratios, memory, held = [], [], 0
    print("predicted / measured: time, allocated GiB, reserved GiB")
    for row in rows:
        case = case_of(row)
        if not _is_meant(case.label, given.only):
            continue
        try:
            made = predicted(case, given.device_name or row["gpu"])
        except DdlToolError as error:
            print(f"{' '.join(case.options())}: not predicted ({error})")
            continue
        ratio = 1e3 * made.step_time_s / float(row["step_ms"])
        inside = 1e3 * made.predicted_low_s <= float(row["step_ms"]) <= 1e3 * made.predicted_high_s
        allocated = made.peak_memory_bytes / 2**30 / max(1e-9, float(row["allocated_gib"]))
        reserved = made.reserved_bytes / 2**30 / max(1e-9, float(row["reserved_gib"]))
        ratios.append(ratio)
        memory.append(allocated)
        held += inside
        figures = (
            f"{ratio:5.2f}{' ' if inside else '!'} {allocated:5.2f} {reserved:5.2f} {float(row['step_ms']):8.2f} ms"
        )
        print(f"{figures}  {case.label}", flush=True)
    print(
        f"{len(ratios)} steps: {_spread(ratios)}, in range {held / max(1, len(ratios)):.0%}; memory {_spread(memory)}"
    )


def _spread(ratios: list[float]) -> str:
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    if not errors:
        return "nothing"
    return f"{errors[len(errors) // 2]:.1%} off in the median ({errors[int(0.9 * (len(errors) - 1))]:.0%} in the worst tenth)"


def main() -> None:
    """Measure, or compare what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    measuring, comparing = verbs.add_parser("measure"), verbs.add_parser("compare")
    for each, run in ((measuring, measure_all), (comparing, compare)):
        each.add_argument("rows", type=Path, help="CSV file that rows are appended to, or read from")
        each.add_argument("--only", help="only cases whose options hold one of these texts, divided by commas")
        each.add_argument("--device-name", help="what `predict` calls the GPU; the driver's name by default")
        each.set_defaults(run=run)
    measuring.add_argument("--steps", type=int, default=20)
    measuring.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    measuring.add_argument("--ops", type=Path, help="CSV file for the device time of a step by op")
    measuring.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no case begins")
    given = parser.parse_args()
    given.run(given)


if __name__ == "__main__":
    main()
