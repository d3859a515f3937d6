"""LB-BSP offline: predictors and schemes on synthetic clusters, and what sizing and predicting cost.

    python benchmarks/bench_balancing.py                     # predictors on the CPU cluster of 32, seeds 0 to 2
    python benchmarks/bench_balancing.py --schemes           # schemes on the CPU cluster of 32 and the GPU cluster of 16
    python benchmarks/bench_balancing.py --solver            # exact sizes for up to 20,480 workers
    python benchmarks/bench_balancing.py --algorithm2 FILE.png  # Algorithm 2 on four simulated GPUs, and a picture of it
    python benchmarks/bench_balancing.py --trace FILE.csv.gz # write a synthetic trace (--workers, --iterations, --seed)

Synthetic means made up: see benchmarks/synthetic.py for how. Times are CPU seconds on one thread.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from ddltool.analyzers.answers.reporting.charts import drawn
from ddltool.analyzers.job.balancing import replay as schemes
from ddltool.analyzers.job.balancing.minmax import DeviceCurves, Offer, choose
from ddltool.analyzers.job.balancing.predict import PREDICTORS, make_predictor
from ddltool.analyzers.job.balancing.replay import gain_kept, replay, replay_equal, replay_oracle
from ddltool.analyzers.job.balancing.sizing import equal, proportional
from ddltool.runtime.measuring.watch import SpeedRow, write_rows

sys.path.insert(0, str(Path(__file__).resolve().parent))
from synthetic import (
    cpu_cluster,
    gpu_clock,
    gpu_curves,
    jitter,
    least_longest,
    simulate,
    slower_network,
    trajectory_figures,
)

BATCH = 128
SINCE = 500


def predictors(iterations: int, workers: int, seeds: int) -> None:
    """Print error, iteration time and gain of each predictor on synthetic CPU clusters, a seed each."""
    print("seed  predictor  rmse   of mean  iteration/equal  gain  CPU s")
    for seed in range(seeds):
        trace, total = cpu_cluster(iterations, seed, workers), BATCH * workers
        base, oracle = replay_equal(trace, total, since=SINCE), replay_oracle(trace, total, since=SINCE)
        for name in PREDICTORS:
            begin = time.process_time()
            made = replay(trace, make_predictor(name, workers), total, since=SINCE)
            spent = time.process_time() - begin
            print(
                f"{seed:4}  {name:9}  {made.rmse:5.2f}  {made.rmse_relative:7.1%}  {made.mean_s / base.mean_s:15.3f}"
                f"  {gain_kept(made, base, oracle):4.0%}  {spent:5.1f}"
            )
        print(f"{seed:4}  known      {0:5.2f}  {0:7.1%}  {oracle.mean_s / base.mean_s:15.3f}  100%")


def show(name: str, made: schemes.SchemeResult, base: schemes.SchemeResult) -> None:
    """Print one scheme's row beside BSP, the ``base``."""
    ratio = made.iteration_s / base.iteration_s
    print(f"{name:28}  {made.iteration_s:8.3f} s  {ratio:6.3f}  {made.staleness:9.1f}  {made.iteration_gap:5}")


def compare_schemes(iterations: int, seed: int) -> None:
    """Print time and staleness of every scheme on a CPU cluster of 32 and a GPU cluster of 16."""
    print("CPU cluster of 32              iteration  of BSP  staleness    gap")
    trace, total = cpu_cluster(iterations, seed), BATCH * 32
    clock, need = schemes.cpu_clock(trace, total), equal(32, total).astype(float)
    base = schemes.bsp(clock, need)
    show("BSP", base, base)
    show("ASP", schemes.bounded(clock, need, None), base)
    show("SSP, bound 5", schemes.bounded(clock, need), base)
    show("redundant execution, 2 of 32", schemes.redundant(clock, lambda sizes: sizes.astype(float), total, 2), base)
    show("work shifting (FlexRR-like)", schemes.work_shifting(clock, total), base)
    for name in ("ema", "narx"):
        show(f"LB-BSP ({name})", schemes.lb_bsp(clock, trace, total, make_predictor(name, 32)), base)
    show("LB-BSP, speeds known", schemes.lb_bsp_oracle(clock, total), base)
    print("GPU cluster of 16              iteration  of BSP  staleness    gap")
    _, curves = gpu_curves()
    total = 32 * 16
    clock = gpu_clock(curves, jitter(iterations, 16, seed), total)
    need = curves.seconds(equal(16, total))
    base = schemes.bsp(clock, need)
    show("BSP", base, base)
    show("ASP", schemes.bounded(clock, need, None), base)
    show("SSP, bound 5", schemes.bounded(clock, need), base)
    show("redundant execution, 1 of 16", schemes.redundant(clock, curves.seconds, total, 1), base)
    balanced = least_longest(curves, total)
    show(f"LB-BSP {tuple(balanced[::4].tolist())}", schemes.bsp(clock, curves.seconds(balanced)), base)


def many_devices(workers: int) -> DeviceCurves:
    """Return made-up curves of unlike devices."""
    chance = np.random.default_rng(workers)
    return DeviceCurves.of(
        per_sample_s=chance.uniform(0.001, 0.02, workers),
        launch_s=chance.uniform(0, 0.3, workers),
        saturation=chance.integers(1, 40, workers),
        communication_s=chance.uniform(0, 0.1, workers),
        memory_limit=chance.integers(40, 400, workers),
    )


def solver() -> None:
    """Print the CPU seconds of sizing batches and of choosing among the workers, up to 20,480 of them."""
    print("workers    total  proportional     sizes   workers too  with synchronisation")
    for workers in (16, 256, 4096):
        curves, offer = many_devices(workers), Offer(counts=(1,) * workers)
        total, speeds = 32 * workers, np.random.default_rng(0).uniform(1, 10, workers)
        calls = (
            lambda v=speeds, x=total: proportional(v, x),
            lambda c=curves, x=total: least_longest(c, x),
            lambda c=curves, o=offer, x=total: choose(c, o, x),
            lambda c=curves, o=offer, x=total, w=workers: choose(c, o, x, lambda at, number: at + number * 0.1 / w),
        )
        spent = []
        for call in calls:
            begin = time.process_time()
            call()
            spent.append(time.process_time() - begin)
        print(f"{workers:7}  {total:7}  " + "  ".join(f"{seconds:10.4f}" for seconds in spent))
    print("\nworkers with synchronisation that takes with all of them   0.01 s   0.1 s     1 s    10 s")
    for workers in (4096, 20_480):
        curves, spent = many_devices(workers), []
        for whole_s in (0.01, 0.1, 1.0, 10.0):
            begin = time.process_time()
            each_s = whole_s / workers
            choose(curves, Offer(counts=(1,) * workers), 32 * workers, lambda at, number, s=each_s: at + number * s)
            spent.append(time.process_time() - begin)
        print(f"{workers:7}  {32 * workers:7}" + " " * 41 + "  ".join(f"{seconds:6.2f}" for seconds in spent))


def algorithm2(path: Path) -> None:
    """Start with 32 samples each; at iteration 150 the M60's network becomes four times slower (10 to 2.5 Gbit/s)."""
    names, curves = gpu_curves(1)
    cut = slower_network(curves, 1, 4.0)
    print(
        "delay  noise  fine tuning  sizes before the cut   at the end             longest step: start, before, cut, end"
    )
    for delay in (0, 1, 2):
        for spread in (0.0, 0.01, 0.03):
            run = simulate(curves, [32] * 4, 300, factors=jitter(300, 4, 0, spread), changes={150: cut}, delay=delay)
            steps = run.seconds.max(axis=1)
            sizes = [str(tuple(run.sizes[at].tolist())) for at in (149, 299)]
            print(
                f"{delay:5}  {spread:5.0%}  {run.fine_at or -1:11}  {sizes[0]:21}  {sizes[1]:21}  {steps[0]:.2f} s, "
                f"{steps[130:150].mean():.2f} s, {steps[150]:.2f} s, {steps[280:].mean():.2f} s"
            )
            if (delay, spread) == (1, 0.01):
                path.write_bytes(drawn(trajectory_figures(names, run, {150: "M60: 2.5 Gbit/s"}), "png", width=380))
    for name, known in (("exact, before", curves), ("exact, after", cut)):
        sizes = least_longest(known, 128)
        print(f"{name:13}  {tuple(sizes.tolist())}  {known.seconds(sizes).max():.2f} s")
    print(f"wrote {path}")


def write_trace(path: Path, workers: int, iterations: int, seed: int) -> None:
    """Write the speeds of a synthetic CPU cluster as ``ddltool balance`` reads them, rounded as a recording would be."""
    trace = cpu_cluster(iterations, seed, workers)
    rows = (
        SpeedRow(
            iteration=k,
            worker=name,
            speed=float(f"{trace.speed[k, w]:.4g}"),
            cpu=float(f"{trace.cpu[k, w]:.2f}"),
            memory=float(f"{trace.memory[k, w]:.2f}"),
        )
        for k in range(iterations)
        for w, name in enumerate(trace.names)
    )
    write_rows(rows, path)


def main() -> None:
    """Print the table that the options ask for; predictors by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", action="store_true")
    parser.add_argument("--solver", action="store_true")
    parser.add_argument("--algorithm2", type=Path, metavar="FILE.png")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if options.trace is not None:
        write_trace(options.trace, options.workers, options.iterations, options.seed)
    elif options.algorithm2 is not None:
        algorithm2(options.algorithm2)
    elif options.solver:
        solver()
    elif options.schemes:
        compare_schemes(options.iterations, options.seed)
    else:
        predictors(options.iterations, options.workers, options.seeds)


if __name__ == "__main__":
    main()
