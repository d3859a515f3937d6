"""Measure training steps on this machine's GPU, as rows for the truth table: what `calibrate.py` reads and judges.

    python benchmarks/measure_gpu.py rows.csv [--models 20] [--steps 20] [--device cuda]

Twenty models of timm, transformers and torch, at two batch sizes each, in float32, TF32, under autocast, and all in
bfloat16; images channels first and last. Each step is timed by CUDA events after a warm-up; the median of ``--steps``
steps counts. Rows are appended as they are made, so that an interrupted run is a shorter one. Start at :func:`main`.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddltool.analyzers.step.tracing.sources import resolve_step
from ddltool.analyzers.step.tracing.step import TrainingStep, default_loss, with_batch_size
from ddltool.errors import DdlToolError, one_line

# The truth table's.
# fmt: off
COLUMNS = [
    "source", "file", "commit", "model", "params_m", "gpu", "gpus", "nodes", "batch_per_gpu",
    "global_batch", "grad_accum", "seq_len_or_img", "precision", "strategy", "act_ckpt", "compiled", "step_time_ms",
    "throughput", "unit", "scope", "memory_gib", "flag", "note",
]
# fmt: on
WARM_UP = 5
# A spread of the middle half above this share of the median is told in the row's flag.
STEADY = 0.1
LENGTH = 128


class Perceptron(nn.Module):
    """Eight layers of 2048: nothing but matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(2048, 2048), nn.ReLU())))

    def forward(self, rows: Tensor) -> Tensor:
        """Return (batch, 2048)."""
        made: Tensor = self.layers(rows)
        return made


class Recurrent(nn.Module):
    """Two LSTM layers of 512 over 35 words, with a vocabulary of 10,000."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.classes = nn.Embedding(10_000, 512), nn.Linear(512, 10_000)
        self.layers = nn.LSTM(512, 512, 2, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        """Return (batch, 35, 10000)."""
        made: Tensor = self.classes(self.layers(self.embedding(words))[0])
        return made


class Encoder(nn.Module):
    """Six of torch's own transformer layers of 512."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Return (batch, 128, 512)."""
        made: Tensor = self.layers(rows)
        return made


def _own(module: Callable[[], nn.Module], example: Callable[[], Tensor]) -> Callable[[], TrainingStep]:
    return lambda: TrainingStep(name=module.__name__.lower(), module=module(), inputs=(example(),), loss=default_loss)


def _source(name: str) -> Callable[[], TrainingStep]:
    return lambda: resolve_step(name, sequence_length=LENGTH if name.startswith("transformers:") else None)


# Name, what makes it, image size or length, and the two batch sizes; the smallest first, for a short run.
MODELS: tuple[tuple[str, Callable[[], TrainingStep], int, tuple[int, int]], ...] = (
    ("perceptron", _own(Perceptron, lambda: torch.zeros(1, 2048)), 2048, (256, 4096)),
    ("recurrent", _own(Recurrent, lambda: torch.zeros(1, 35, dtype=torch.long)), 35, (16, 128)),
    ("encoder", _own(Encoder, lambda: torch.zeros(1, LENGTH, 512)), LENGTH, (8, 64)),
    *(
        (name, _source(f"timm:{name}"), size, batches)
        for name, size, batches in (
            ("resnet50", 224, (16, 64)),
            ("resnet18", 224, (32, 128)),
            ("resnext50_32x4d", 224, (16, 64)),
            ("regnety_016", 224, (16, 64)),
            ("densenet121", 224, (16, 64)),
            ("vgg16", 224, (16, 64)),
            ("mobilenetv3_large_100", 224, (32, 128)),
            ("efficientnet_b0", 224, (16, 64)),
            ("convnext_tiny", 224, (16, 64)),
            ("vit_base_patch16_224", 224, (8, 32)),
            ("swin_tiny_patch4_window7_224", 224, (8, 32)),
        )
    ),
    *(
        (name, _source(f"transformers:{name}"), LENGTH, (4, 32))
        for name in ("bert", "gpt2", "t5", "distilbert", "albert", "opt")
    ),
)
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", "bf16-pure")


@contextmanager
def _numerics(precision: str, device: str) -> Iterator[None]:
    """Run what is inside in a precision: TF32 in matrix products only where asked for, float16 or bfloat16 under autocast."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    try:
        half = torch.float16 if precision == "fp16" else torch.bfloat16
        with torch.autocast(device, dtype=half, enabled=precision in ("fp16", "bf16")):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _cast(value: Any, precision: str, channels_last: bool, device: str) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.to(device, dtype=torch.bfloat16 if precision == "bf16-pure" and value.is_floating_point() else None)
    return value.contiguous(memory_format=torch.channels_last) if channels_last and value.dim() == 4 else value


def measure(
    step: TrainingStep, batch: int, precision: str, channels_last: bool, device: str, steps: int
) -> tuple[list[float], float]:
    """Return the seconds of each step (forward, loss, backward, SGD with momentum) and the peak memory in bytes."""
    module = step.module.to(device).train()
    if precision == "bf16-pure":
        module = module.to(torch.bfloat16)
    if channels_last:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    inputs = tuple(_cast(value, precision, channels_last, device) for value in with_batch_size(step.inputs, batch))
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-6, momentum=0.9)
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16" and device == "cuda")

    def once() -> None:
        optimizer.zero_grad(set_to_none=True)
        with _numerics(precision, device):
            loss = step.loss(module(*inputs))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    for _ in range(min(WARM_UP, steps)):
        once()
    if device != "cuda":
        return [_timed(once) for _ in range(steps)], 0.0
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        once()
        mark.record()
    torch.cuda.synchronize()
    times = [first.elapsed_time(second) / 1e3 for first, second in pairwise(marks)]
    return times, float(torch.cuda.max_memory_allocated())


def _timed(run: Callable[[], None]) -> float:
    before = time.perf_counter()
    run()
    return time.perf_counter() - before


def row_of(
    name: str, size: int, batch: int, precision: str, layout: str, device: str, params: int
) -> dict[str, object]:
    """Return a row with everything but its times."""
    gpu = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    note = f"{layout}; torch {torch.__version__}; sgd momentum"
    return {
        **dict.fromkeys(COLUMNS, ""),
        **{"source": "ddltool", "file": "benchmarks/measure_gpu.py", "model": name, "params_m": f"{params / 1e6:.2f}"},
        **{"gpu": gpu, "gpus": 1, "nodes": 1, "batch_per_gpu": batch, "global_batch": batch, "grad_accum": 1},
        **{"seq_len_or_img": size, "precision": precision, "strategy": "single", "act_ckpt": 0, "compiled": 0},
        **{"unit": "samples/s", "scope": "total", "note": note},
    }


def append(path: Path, row: dict[str, object]) -> None:
    """Append a row to a file, which gets its header line first."""
    new = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(row)


def demand_rows(path: Path) -> None:
    """Exit unless the file is new, or holds rows of this schema."""
    if path.exists() and path.stat().st_size:
        with path.open(encoding="utf-8") as lines:
            if next(csv.reader(lines)) != COLUMNS:
                sys.exit(f"error: {path}: holds something else; give a new file, or one that this script made")


def cases(models: int, device: str) -> Iterator[tuple[str, Callable[[], TrainingStep], int, int, str, bool]]:
    """Yield what to measure: on a CPU each model's smaller batch in float32 alone."""
    for name, make, size, batches in MODELS[:models]:
        image = size >= 160 and name != "perceptron"
        for precision in PRECISIONS if device == "cuda" else PRECISIONS[:1]:
            for channels_last in (False, True) if image and device == "cuda" else (False,):
                for batch in batches if device == "cuda" else batches[:1]:
                    yield name, make, size, batch, precision, channels_last


def main() -> None:
    """Measure and append."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="CSV file that rows are appended to")
    parser.add_argument("--models", type=int, default=len(MODELS), help="only the first so many")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: torch sees no GPU here: run this on a machine with one, or try the script with --device cpu")
    demand_rows(given.rows)
    for name, make, size, batch, precision, channels_last in cases(given.models, given.device):
        layout = "channels_last" if channels_last else "channels_first"
        label = f"{name}, batch {batch}, {precision}, {layout}"
        try:
            step = make()
            params = sum(value.numel() for value in step.module.parameters())
            times, peak = measure(step, batch, precision, channels_last, given.device, given.steps)
        except (DdlToolError, RuntimeError, NotImplementedError) as error:  # out of memory is a RuntimeError too
            print(f"{label}: not measured ({one_line(str(error))[:120]})", flush=True)
            continue
        finally:
            step = None  # type: ignore[assignment]
            if given.device == "cuda":
                torch.cuda.empty_cache()
        median = statistics.median(times)
        quarters = statistics.quantiles(times, n=4) if len(times) > 1 else [median] * 3
        unsteady = (quarters[2] - quarters[0]) / median > STEADY
        row = row_of(name, size, batch, precision, layout, given.device, params)
        row |= {"step_time_ms": f"{1e3 * median:.4g}", "throughput": f"{batch / median:.6g}"}
        row |= {"memory_gib": f"{peak / 2**30:.3f}" if peak else "", "flag": "unsteady" if unsteady else ""}
        append(given.rows, row)
        print(f"{label}: {1e3 * median:.2f} ms{' (unsteady)' if unsteady else ''}", flush=True)


if __name__ == "__main__":
    main()
