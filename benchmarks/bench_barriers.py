"""ZipLine and both grid scans beside the published algorithms written down literally, in the same run.

Prints CPU seconds (best of three where short) for 10, 100 and 1000 workers with 15 and 150 predicted iterations, as in
the paper's Table II, and the growth of ours to 10,000 workers. ``--json`` prints one document instead. A published
algorithm that would take over a minute, judged from its smaller runs and its complexity, is left out and the estimate
shown in brackets. ``--realised`` prints what barriers chosen from predictions come to when iteration lengths vary, and
``--example`` prints the synthetic times.csv that ships in fixtures/barrier.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ddltool.analyzers.job.barriers.ends import EndTimes
from ddltool.analyzers.job.barriers.predict import predict_ends
from ddltool.analyzers.job.barriers.tradeoff import best_barrier
from ddltool.analyzers.job.barriers.zipline import full_gridscan, gridscan, zipline
from ddltool.arrays import Floats

sys.path.insert(0, str(Path(__file__).resolve().parent))
import published_barriers as published

WORKERS = (10, 100, 1000)
LOOKAHEADS = (15, 150)
LIMIT_S = 60.0
OURS: dict[str, Callable[[Any], Any]] = {"zipline": zipline, "gridscan": gridscan, "fullgridscan": full_gridscan}
PUBLISHED: dict[str, Callable[[Any], Any]] = {
    "zipline": published.zipline,
    "gridscan": published.gridscan,
    "fullgridscan": published.full_gridscan,
}
# Operations by the paper's Table I, to extrapolate from the runs so far.
COMPLEXITY: dict[str, Callable[[int, int], float]] = {
    "zipline": lambda n, r: r * n**2,
    "gridscan": lambda n, r: r**2 * n,
    "fullgridscan": lambda n, r: r**2 * n**2,
}


def synthetic_ends(workers: int, iterations: int, seed: int = 0) -> Floats:
    """Return (workers, iterations) ends in seconds: mean lengths from 0.5 to 2 s per worker, 5 % spread within one."""
    chance = np.random.default_rng(seed)
    mean = chance.uniform(0.5, 2.0, (workers, 1))
    return np.cumsum(mean * np.clip(chance.normal(1.0, 0.05, (workers, iterations)), 0.5, 1.5), axis=1)


def example() -> str:
    """Return fixtures/barrier/times.csv: four workers recorded for about 24 s, each as far as it got."""
    lines = ["worker,iteration,end_s,source"]
    for worker, ends in enumerate(synthetic_ends(4, 60, seed=4)):
        kept = ends[ends <= 24.0]
        lines += [f"w{worker},{place},{end:.4f},synthetic" for place, end in enumerate(kept, start=1)]
    return "\n".join(lines) + "\n"


def cpu_seconds(call: Callable[[Any], Any], given: Any) -> tuple[float, Any]:
    """Return the shortest CPU seconds of up to three calls (one, when it takes over a second), and the result."""
    best, result = float("inf"), None
    for _ in range(3):
        begin = time.process_time()
        result = call(given)
        best = min(best, time.process_time() - begin)
        if best > 1.0:
            break
    return best, result


def compare() -> list[dict[str, Any]]:
    """Return our times beside the published algorithms' on the same matrices. Ends the run when two results differ."""
    rows = []
    per_operation: dict[str, float] = {}
    for lookahead in LOOKAHEADS:
        for workers in WORKERS:
            matrix = synthetic_ends(workers, lookahead)
            lists = matrix.tolist()
            for name, call in OURS.items():
                ours_s, ours = cpu_seconds(call, matrix)
                operations = COMPLEXITY[name](workers, lookahead)
                estimate = per_operation.get(name, 0.0) * operations
                skipped = estimate > LIMIT_S
                published_s = estimate
                if not skipped:
                    published_s, (waiting, _) = cpu_seconds(PUBLISHED[name], lists)
                    per_operation[name] = published_s / operations
                    if waiting != ours.waiting_time_s:
                        raise SystemExit(f"{name} at {workers} x {lookahead}: {ours.waiting_time_s} is not {waiting}")
                rows.append(
                    {
                        "algorithm": name,
                        "workers": workers,
                        "lookahead": lookahead,
                        "ours_s": ours_s,
                        "published_s": None if skipped else published_s,
                        "published_estimate_s": published_s if skipped else None,
                        "ratio": published_s / ours_s,
                        "waiting_s": ours.waiting_time_s,
                    }
                )
    return rows


def growth() -> list[dict[str, Any]]:
    """Return our times up to 10,000 workers."""
    rows = []
    for workers in (100, 300, 1000, 3000, 10_000):
        matrix = synthetic_ends(workers, 150)
        rows.append(
            {
                "workers": workers,
                "lookahead": 150,
                "zipline_s": cpu_seconds(zipline, matrix)[0],
                "least_total_s": cpu_seconds(best_barrier, matrix)[0],
            }
        )
    return rows


def realised(spread: float, *, workers: int = 8, lookahead: int = 15, jobs: int = 200) -> dict[str, float]:
    """Return waiting over all iterations made, as a share of working time, for BSP and for barriers from predictions.

    Each job records 20 iterations per worker, predicts by EMA, chooses one barrier, and then lives through its own
    further iterations. ``spread`` is the standard deviation of an iteration's length over its worker's mean.
    """
    waited = dict.fromkeys(("bsp", "zipline", "zipline foretold", "per_iteration", "hindsight"), 0.0)
    worked = dict(waited)
    for seed in range(jobs):
        chance = np.random.default_rng(seed)
        mean = chance.uniform(0.5, 2.0, (workers, 1))
        lengths = mean * np.clip(chance.normal(1.0, spread, (workers, 20 + lookahead)), 0.2, 1.8)
        future = np.cumsum(lengths[:, 20:], axis=1)
        foretold = predict_ends(list(lengths[:, :20]), np.zeros(workers), lookahead)
        counts = {
            "bsp": np.ones(workers, dtype=np.int64),
            "zipline": zipline(foretold).iterations,
            "per_iteration": best_barrier(foretold, objective="per_iteration").iterations,
            "hindsight": best_barrier(future, objective="per_iteration").iterations,
        }
        made = {name: EndTimes.of(future).barrier(count) for name, count in counts.items()}
        made["zipline foretold"] = zipline(foretold)
        for name, barrier in made.items():
            waited[name] += barrier.total_waiting_s
            worked[name] += float(barrier.chosen_s.sum())
    return {name: waited[name] / worked[name] for name in waited}


def main() -> None:
    """Print the comparison and the growth, or what an option asks for instead."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--json", action="store_true", help="print one JSON document")
    options.add_argument("--example", action="store_true", help="print the synthetic example times.csv")
    options.add_argument("--realised", action="store_true", help="print waiting when iteration lengths vary")
    chosen = options.parse_args()
    if chosen.realised:
        print("spread   " + "  ".join(f"{name:>16s}" for name in realised(0.0, jobs=1)))
        for spread in (0.0, 0.01, 0.02, 0.05, 0.1, 0.2):
            print(f"{spread:6.0%}   " + "  ".join(f"{share:16.1%}" for share in realised(spread).values()))
        print("waiting over working time of 8 workers, 200 jobs each; means from 0.5 to 2 s; foretold: as predicted")
        return
    if chosen.example:
        sys.stdout.write(example())
        return
    compared, grown = compare(), growth()
    if chosen.json:
        print(json.dumps({"comparison": compared, "growth": grown}, indent=1))
        return
    print("workers  lookahead  algorithm        ours s  as published s     ratio  waiting s")
    for row in sorted(compared, key=lambda row: (row["workers"], row["lookahead"])):
        slow = row["published_s"]
        shown = f"({row['published_estimate_s']:.0f})" if slow is None else f"{slow:.5f}"
        print(
            f"{row['workers']:7d}  {row['lookahead']:9d}  {row['algorithm']:12s}  {row['ours_s']:9.5f}"
            f"  {shown:>14s}  {row['ratio']:8.1f}  {row['waiting_s']:.4f}"
        )
    print("in brackets: extrapolated, not run (over a minute)")
    print("\nworkers  lookahead  zipline s  least total s")
    for row in grown:
        print(f"{row['workers']:7d}  {row['lookahead']:9d}  {row['zipline_s']:9.4f}  {row['least_total_s']:13.4f}")


if __name__ == "__main__":
    main()
