"""Measure convolutions with groups, average pools and others on this machine's GPU, one kernel at a time.

    python benchmarks/measure_kernels.py kernels.csv.gz

Each row is a kernel's shape and the microseconds of it: three runs of four, timed by CUDA events behind a pause that hides the
host, and their median. `benchmarks/measured/h200_kernels.csv.gz` is of one H200 (torch 2.11, cuDNN 9) on 2026-11-27. The cycles
that `kernel_times.py` gives grouped convolutions and pools are read off it. Start at :func:`main`.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import statistics
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

_PAUSE_CYCLES = 2_000_000
_MOST_ELEMENTS = 3e8


class Kernel(NamedTuple):
    """The shape of a convolution or a pool of square images, channels and filters; ``dtype`` tf32 is float32 with TF32."""

    op: str
    dtype: str
    layout: str
    samples: int
    channels: int
    side: int
    outputs: int
    groups: int
    taps: int
    """Of a filter's side."""
    stride: int
    padding: int


def kernels() -> Iterator[Kernel]:
    """Yield the shapes that are measured."""
    for width, groups, (side, samples) in product(
        (4, 8, 16, 24, 32, 48, 64, 112, 128), (2, 4, 8, 16, 32), ((56, 64), (14, 128))
    ):
        channels = width * groups
        if not 64 <= channels <= 1024 or channels * side * side * samples > _MOST_ELEMENTS:
            continue
        for dtype, layout, stride in product(("bfloat16", "float16", "tf32"), ("first", "last"), (1, 2)):
            yield Kernel("conv", dtype, layout, samples, channels, side, channels, groups, 3, stride, 1)
    for channels, side, taps, dtype, layout in product(
        (12, 18, 36, 50, 64, 72, 100, 128, 144, 256, 512), (56, 14), (1, 3), ("bfloat16", "tf32"), ("first", "last")
    ):
        yield Kernel("conv", dtype, layout, 64, channels, side, channels, 1, taps, 1, taps // 2)
    for (channels, side, taps, stride), layout in product(
        ((96, 56, 7, 1), (384, 14, 7, 1), (96, 56, 3, 1), (144, 56, 3, 2), (240, 28, 5, 2), (672, 14, 5, 1)),
        ("first", "last"),
    ):
        yield Kernel("conv", "bfloat16", layout, 64, channels, side, channels, channels, taps, stride, taps // 2)
    for (side, channels), (taps, stride, padding), dtype, layout in product(
        ((56, 128), (14, 512), (8, 2048), (112, 64)),
        ((2, 2, 0), (3, 1, 1), (3, 2, 1), (7, 7, 0)),
        ("bfloat16", "float32"),
        ("first", "last"),
    ):
        yield Kernel("avg_pool", dtype, layout, 128, channels, side, channels, 1, taps, stride, padding)


def runs(kernel: Kernel) -> dict[str, Callable[[], object]]:
    """Return a function for each direction of a kernel: forward, and the gradients of its input and its weights."""
    torch.backends.cudnn.allow_tf32 = kernel.dtype == "tf32"
    dtype = torch.float32 if kernel.dtype == "tf32" else getattr(torch, kernel.dtype)
    form = torch.channels_last if kernel.layout == "last" else torch.contiguous_format

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype).contiguous(memory_format=form)

    ops, pair = torch.ops.aten, lambda number: [number, number]
    images = random(kernel.samples, kernel.channels, kernel.side, kernel.side)
    stride, padding = pair(kernel.stride), pair(kernel.padding)
    if kernel.op == "avg_pool":
        window = pair(kernel.taps)
        gradient = torch.randn_like(ops.avg_pool2d(images, window, stride, padding))
        return {
            "forward": lambda: ops.avg_pool2d(images, window, stride, padding),
            "input": lambda: ops.avg_pool2d_backward(gradient, images, window, stride, padding, False, True, None),
        }
    weights = random(kernel.outputs, kernel.channels // kernel.groups, kernel.taps, kernel.taps)
    shape = stride, padding, pair(1), False, pair(0), kernel.groups
    gradient = torch.randn_like(ops.convolution(images, weights, None, *shape))
    backward = lambda mask: ops.convolution_backward(gradient, images, weights, None, *shape, mask)  # noqa: E731
    return {
        "forward": lambda: ops.convolution(images, weights, None, *shape),
        "input": lambda: backward([True, False, False]),
        "weight": lambda: backward([False, True, False]),
    }


def microseconds(run: Callable[[], object]) -> float:
    """Return the time of one run on the device."""
    times = []
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_PAUSE_CYCLES)  # while it sleeps, the host issues all that follows
        begin.record()
        for _ in range(4):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / 4)
    return statistics.median(times)


def main() -> None:
    """Measure every kernel, and write a row for each direction of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, help="file to write, compressed by gzip")
    with gzip.open(parser.parse_args().rows, "wt", newline="", encoding="utf-8") as lines:
        writer = csv.writer(lines)
        writer.writerow([*Kernel._fields, "direction", "us"])
        for kernel in kernels():
            for direction, run in runs(kernel).items():
                run()
                writer.writerow([*kernel, direction, round(microseconds(run), 1)])


if __name__ == "__main__":
    main()
