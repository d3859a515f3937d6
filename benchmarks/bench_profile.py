"""How well do a few measured batch sizes predict the others? Fits Pollux's model to some and predicts the rest.

    python benchmarks/bench_profile.py [--rounds 8] [SOURCE...]

All batch sizes are measured in one process on one thread, in rounds, each in a new random order, so that a drift of the machine
meets all of them alike. Two clocks: the wall's, which other programs on the machine stretch, and the process's CPU time,
which they hardly do. Unseen: three batch sizes between the fitted ones, and one of twice the largest.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections import defaultdict

import numpy as np
import torch

from ddltool.analyzers.job.goodput.curve import median_interval
from ddltool.analyzers.job.goodput.fit import fit
from ddltool.analyzers.job.goodput.observations import Observations
from ddltool.analyzers.job.goodput.throughput import grad_time_s
from ddltool.runtime.measuring import worker as measure_worker
from ddltool.runtime.measuring.worker import MeasureTask, StepTimer, Subject

FITTED, BETWEEN, BEYOND = (1, 2, 4, 8, 16), (3, 6, 12), (32,)
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
SOURCES = ("zoo:resnet32", "zoo:cifarnet")


def collect(source: str, rounds: int, seed: int) -> dict[tuple[str, int], list[float]]:
    """Return step times (seconds) by clock and batch."""
    subject = Subject(
        source=source,
        resolver="ddltool.analyzers.step.tracing.sources:training_step",
        device="cpu",
        threads=1,
        seed=seed,
    )
    worker = StepTimer(subject, torch.device("cpu"))
    order, found = random.Random(seed), defaultdict(list)
    for _ in range(rounds):
        visits = [(clock, batch) for clock in CLOCKS for batch in (*FITTED, *BETWEEN, *BEYOND)]
        order.shuffle(visits)
        for clock, batch in visits:
            measure_worker.synchronised_clock = lambda device, read=CLOCKS[clock]: read()
            found[clock, batch] += worker.run(MeasureTask(replicas=1, batch=batch, warmup=1, most=3)).full
    return found


def judge(source: str, found: dict[tuple[str, int], list[float]], clock: str) -> None:
    """Print measured and predicted step times of the unseen batch sizes."""
    times = np.array([median_interval(found[clock, batch]).median for batch in FITTED])
    ones = np.ones(len(FITTED))
    rows = Observations(
        num_nodes=ones,
        num_replicas=ones,
        local_batch_size=np.array(FITTED, float),
        step_time_s=times,
        grad_time_s=times,
    )
    params = fit(rows).params
    print(f"{source}, {clock}: alpha {params.alpha_grad_s * 1e3:.2f} ms, beta {params.beta_grad_s * 1e3:.2f} ms")
    for batch in (*BETWEEN, *BEYOND):
        point = median_interval(found[clock, batch])
        guess = float(grad_time_s(params, batch))
        where = "beyond" if batch in BEYOND else "between"
        print(
            f"  batch {batch:3d} ({where:7s}) measured {point.median * 1e3:7.1f} ms +- {point.relative:5.1%}   "
            f"predicted {guess * 1e3:7.1f} ms   error {guess / point.median - 1:+6.1%}"
        )


def main() -> None:
    """Measure every source and print both clocks' figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sources", nargs="*", default=SOURCES)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"load of this machine when it began: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    for source in options.sources:
        found = collect(source, options.rounds, options.seed)
        for clock in CLOCKS:
            judge(source, found, clock)


if __name__ == "__main__":
    main()
