"""How far the measured oracle is from a real step: the sum of its op times beside an eager training step.

    python benchmarks/bench_oracle.py [--models zoo:resnet32:16,...] [--threads 1,2] [--trials 3] [--json FILE]

In one process, real steps and measurements take turns, so that other load on the machine meets both; of each the
shortest counts, by the same clock (CPU time where there is one thread). A step is forward, loss and backward, as the
graph has it.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from ddltool.analyzers.step.measured.measured import apply_times, measure_ops, time_call
from ddltool.analyzers.step.tracing.sources import resolve_step, training_step
from ddltool.analyzers.step.tracing.step import TrainingStep
from ddltool.analyzers.step.tracing.torch_adapter import trace_step
from ddltool.device import Network
from ddltool.graph import COMPUTE

MODELS = "zoo:gpt_small:1,zoo:gpt_small:4,zoo:resnet32:1,zoo:resnet32:16,zoo:cifarnet:16,zoo:inception_v1:2"
STEPS = 8


def real_step(step: TrainingStep) -> float:
    """Return the seconds of one eager training step."""
    step.module.zero_grad()
    return time_call(lambda: step.run().backward())


def compare(source: str, batch_size: int, threads: int, given: argparse.Namespace) -> dict[str, Any]:
    """Return the step's and the oracle's seconds, and how long the oracle took."""
    torch.set_num_threads(threads)
    step = training_step(source, batch_size)
    traced = trace_step(lambda: resolve_step(source), mode="training", batch_size=batch_size)
    real_step(step)
    real, sums, took = [], [], []
    for _ in range(given.trials):
        real += [real_step(step) for _ in range(STEPS)]
        began = time.perf_counter()
        times = measure_ops(traced)
        took.append(time.perf_counter() - began)
        graph = apply_times(traced.graph, times, Network())
        sums.append(float(graph.duration_s[graph.kind == COMPUTE].sum()))
        real += [real_step(step) for _ in range(STEPS)]
    row = {
        "source": source,
        "batch_size": batch_size,
        "threads": threads,
        "ops": len(times.seconds),
        "timed": times.distinct,
        "failed": len(times.failed),
        "oracle_s": min(sums),
        "real_s": min(real),
        "error": min(sums) / min(real) - 1,
        "real_median_s": sorted(real)[len(real) // 2],
        "took_s": min(took),
    }
    return row


def show(row: dict[str, Any]) -> None:
    """Print one model's row."""
    print(
        f"{row['source']:20s} {row['batch_size']:5d} {row['threads']:7d} {row['timed']:5d} of {row['ops']:4d} "
        f"{row['oracle_s'] * 1e3:9.2f} ms {row['real_s'] * 1e3:9.2f} ms {row['error']:+7.1%} "
        f"{row['real_median_s'] * 1e3:9.2f} ms {row['took_s']:6.1f} s",
        flush=True,
    )


def main() -> None:
    """Compare the oracle with real steps for every number of threads and every model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    print(
        f"{'model':20s} {'batch':>5s} {'threads':>7s} {'timed of ops':>13s} {'oracle':>12s} {'real step':>12s}"
        f" {'error':>7s} {'(median)':>12s} {'took':>8s}"
    )
    rows = []
    for threads in given.threads.split(","):
        for model in given.models.split(","):
            source, _, batch_size = model.rpartition(":")
            rows.append(compare(source, int(batch_size), int(threads), given))
            show(rows[-1])
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
