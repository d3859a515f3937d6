"""Records real training under real contention: the trace that ships in fixtures/balance.

Four processes train a small network on scikit-learn's digits together (gloo), each pinned to a core: three share the
first one, as on a busy machine, and the fourth has the second one. Competing processes, pinned to the same cores, compute in an
interleaved schedule of spikes (0.2 to 0.6 s) and lasting changes (6 to 20 s), and one at times fills and sweeps over
memory. The schedule is seeded; what comes of it on a machine is not.

    python benchmarks/record_contention.py -o fixtures/balance/recorded-4.csv.gz
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from ddltool.analyzers.step.tracing.step import TrainingStep
from ddltool.runtime.measuring.watch import WatchRequest, record, write_rows

BATCH = 384
LASTING_S, SPIKE_S = (6.0, 20.0), (0.2, 0.6)
SWEPT_BYTES = 600 * 2**20


def digits_step(source: str, batch: int) -> TrainingStep:
    """The training step: a three-layer network on digits; ``source`` is not used."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.nn import functional as F

    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images[:batch] / 16.0, dtype=torch.float32)
    y = torch.tensor(labels[:batch])
    module = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))
    return TrainingStep(name="digits", module=module, inputs=(x,), loss=lambda output: F.cross_entropy(output, y))


def schedule(seed: int, span_s: tuple[float, float], gap_s: float, until_s: float = 900.0) -> list[tuple[float, float]]:
    """Return (begin, end) in seconds of bouts with exponential gaps between them."""
    chance = np.random.default_rng(seed)
    bouts, at = [], float(chance.exponential(gap_s))
    while at < until_s:
        length = float(chance.uniform(*span_s))
        bouts.append((at, at + length))
        at += length + float(chance.exponential(gap_s))
    return bouts


def compete(core: int, bouts: list[tuple[float, float]], swept_bytes: int) -> None:
    """Compute during the bouts, on one core, and sleep between them."""
    os.sched_setaffinity(0, {core})
    start = time.monotonic()
    for begin, end in bouts:
        time.sleep(max(0.0, start + begin - time.monotonic()))
        held = np.ones(swept_bytes // 8) if swept_bytes else np.ones(1000)
        while time.monotonic() < start + end:
            held *= 1.0000001
        del held


def competitors() -> list[Any]:
    """Start the competing processes: on each core one for spikes and two for lasting changes, one sweeping memory."""
    context = multiprocessing.get_context("spawn")
    made = []
    cores = sorted(os.sched_getaffinity(0))
    for place, core in enumerate(cores):
        # The cores differ, so that there is something to balance.
        for kind, (span, gap) in enumerate(((SPIKE_S, 4.0), (LASTING_S, 12.0 + 14.0 * place), (LASTING_S, 30.0))):
            made.append((core, schedule(10 * place + kind, span, gap), 0))
    made.append((cores[-1], schedule(99, (4.0, 8.0), 25.0), SWEPT_BYTES))
    processes = [context.Process(target=compete, args=arguments, daemon=True) for arguments in made]
    for process in processes:
        process.start()
    return processes


def main() -> None:
    """Record while competitors come and go, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    busy = competitors()
    try:
        request = WatchRequest(
            source="digits",
            resolver="record_contention:digits_step",
            batch=BATCH,
            workers=options.workers,
            iterations=options.iterations,
            cores=tuple(0 if rank < options.workers - 1 else 1 for rank in range(options.workers)),
        )
        rows = record(request)
    finally:
        for process in busy:
            process.kill()
            process.join()
    write_rows(rows, options.output)
    print(f"wrote {len(rows)} rows to {options.output}")


if __name__ == "__main__":
    main()
